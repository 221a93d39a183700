/* utf8.h -- reads and writes UTF-8 (Unicode 16, table 3-7: overlong forms, surrogates and values above U+10FFFF are no
 * characters), and says which bytes may reach a terminal unchanged.
 */
#ifndef LLMC_UTF8_H
#define LLMC_UTF8_H

#include <stddef.h>
#include <stdint.h>

/* Returns the length in bytes (1 to 4) of the UTF-8 character at s and sets *c to its code point; reads at most n >= 1
 * bytes. Returns 0 and sets *c to UINT32_MAX if no character starts there. */
static inline int utf8_decode(const uint8_t* s, size_t n, uint32_t* c) {
    uint32_t a = s[0];
    if (a < 0x80) {
        *c = a;
        return 1;
    }
    *c = UINT32_MAX;
    if (n < 2 || a < 0xC2 || a > 0xF4 || (s[1] & 0xC0) != 0x80) { return 0; }
    if (a < 0xE0) {
        *c = (a & 0x1F) << 6 | (s[1] & 0x3Fu);
        return 2;
    }
    if (n < 3 || (s[2] & 0xC0) != 0x80) { return 0; }
    if (a < 0xF0) {
        uint32_t v = (a & 0x0F) << 12 | (s[1] & 0x3Fu) << 6 | (s[2] & 0x3Fu);
        if (v < 0x800 || (v >= 0xD800 && v < 0xE000)) { return 0; }
        *c = v;
        return 3;
    }
    if (n < 4 || (s[3] & 0xC0) != 0x80) { return 0; }
    uint32_t v = (a & 0x07) << 18 | (s[1] & 0x3Fu) << 12 | (s[2] & 0x3Fu) << 6 | (s[3] & 0x3Fu);
    if (v < 0x10000 || v > 0x10FFFF) { return 0; }
    *c = v;
    return 4;
}

/* Returns the length of the UTF-8 character at s (n bytes left), or 0 if there is none. */
static inline size_t utf8_char_length(const char* s, size_t n) {
    uint32_t c;
    return n > 0 ? (size_t)utf8_decode((const uint8_t*)s, n, &c) : 0;
}

/* Writes the UTF-8 form of a code point (1 to 4 bytes) and returns its length. */
static inline size_t utf8_encode(char* out, int code) {
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    size_t len = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (size_t i = len - 1; i > 0; i--) {
        out[i] = (char)(0x80 | (code & 0x3F));
        code >>= 6;
    }
    out[0] = (char)((len == 2 ? 0xC0 : len == 3 ? 0xE0 : 0xF0) | code);
    return len;
}

/* Returns the length of the character at s if a terminal may get it as it is, otherwise 0. Terminals obey control characters
 * (C0 and DEL, but a tab is harmless; C1, U+0080 to U+009F). Some also obey bytes 80 to 9F that are not UTF-8. */
static inline size_t plain_char_length(const char* s, size_t n) {
    uint32_t c;
    const size_t length = n > 0 ? (size_t)utf8_decode((const uint8_t*)s, n, &c) : 0;
    return length > 0 && (c == '\t' || (c >= 0x20 && c < 0x7F) || c >= 0xA0) ? length : 0;
}

#endif
