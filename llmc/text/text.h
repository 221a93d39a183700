/* text.h -- small text functions that many files need: UTF-8, text in messages, numbers for people to read, and the edit
 * distance of two words, for "did you mean".
 */
#ifndef LLMC_TEXT_H
#define LLMC_TEXT_H

#include "llmc/base/utils.h"  // first, since it asks for the functions beyond C11

// ---------------------------------------------------------------------------------------------------------------------
// UTF-8 (Unicode 16, table 3-7: overlong forms, surrogates and values above U+10FFFF are no characters)

/* Returns the length in bytes (1 to 4) of the UTF-8 character at s and sets *c to its code point; may read n >= 1 bytes.
 * Returns 0 and sets *c to UINT32_MAX if no character starts there. */
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

// ---------------------------------------------------------------------------------------------------------------------
// text in messages

/* Tells whether a text begins with `start`. */
static inline bool text_starts(const char* s, const char* start) { return strncmp(s, start, strlen(start)) == 0; }

/* Copies text into a message's buffer of `cap` bytes. Control characters and invalid bytes become '?'; text that does not fit
 * is cut and ends in "...". */
static inline const char* show_text(char* out, size_t cap, const char* s, size_t len) {
    size_t n = 0;
    for (size_t i = 0; i < len;) {
        size_t bytes = utf8_char_length(s + i, len - i);
        if (n + 4 + 4 > cap) {
            memcpy(out + n, "...", 3);
            n += 3;
            break;
        }
        if (bytes == 0 || (unsigned char)s[i] < 0x20 || s[i] == 0x7F) {
            out[n++] = '?';
            i += bytes ? bytes : 1;
        } else {
            memcpy(out + n, s + i, bytes);
            n += bytes;
            i += bytes;
        }
    }
    out[n] = 0;
    return out;
}

/* Returns the number of edits (insert, delete, replace, swap neighbours) that turn a into b; 41 if either word is longer than
 * 40 characters. */
static inline int edit_distance(const char* a, const char* b) {
    enum { CAP = 41 };
    int d[CAP][CAP];
    const int na = (int)strnlen(a, CAP), nb = (int)strnlen(b, CAP);
    if (na == CAP || nb == CAP) { return CAP; }
    for (int i = 0; i <= na; i++) {
        for (int j = 0; j <= nb; j++) {
            if (i == 0 || j == 0) {
                d[i][j] = i + j;
                continue;
            }
            int best = d[i - 1][j - 1] + (a[i - 1] != b[j - 1]);
            if (d[i - 1][j] + 1 < best) { best = d[i - 1][j] + 1; }
            if (d[i][j - 1] + 1 < best) { best = d[i][j - 1] + 1; }
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] && d[i - 2][j - 2] + 1 < best) {
                best = d[i - 2][j - 2] + 1;
            }
            d[i][j] = best;
        }
    }
    return d[na][nb];
}

// ---------------------------------------------------------------------------------------------------------------------
// numbers as text

/* Writes a count as "12,345,678". */
static inline const char* text_count(uint64_t n, char* out, size_t cap) {
    char digits[24];
    int len = snprintf(digits, sizeof digits, "%llu", (unsigned long long)n);
    size_t used = 0;
    for (int i = 0; i < len && used + 2 < cap; i++) {
        if (i > 0 && (len - i) % 3 == 0) { out[used++] = ','; }
        out[used++] = digits[i];
    }
    out[used] = 0;
    return out;
}

/* Writes a size as "640 KiB", "12.5 MiB" or "1.25 GiB". */
static inline const char* text_bytes(uint64_t bytes, char* out, size_t cap) {
    double b = (double)bytes;
    if (b < 1024.0 * 1024.0) {
        snprintf(out, cap, "%.0f KiB", b / 1024.0);
    } else if (b < 1024.0 * 1024.0 * 1024.0) {
        snprintf(out, cap, "%.1f MiB", b / (1024.0 * 1024.0));
    } else {
        snprintf(out, cap, "%.2f GiB", b / (1024.0 * 1024.0 * 1024.0));
    }
    return out;
}

/* Writes a duration as "0:07", "12:55" or "3:04:05"; "-" if it is negative, nan or beyond a million hours. */
static inline const char* text_clock(double seconds, char* out, size_t cap) {
    if (!(seconds >= 0 && seconds < 3.6e9)) {
        snprintf(out, cap, "-");
        return out;
    }
    long long s = (long long)(seconds + 0.5);
    if (s >= 3600) {
        snprintf(out, cap, "%lld:%02d:%02d", s / 3600, (int)(s / 60 % 60), (int)(s % 60));
    } else {
        snprintf(out, cap, "%d:%02d", (int)(s / 60), (int)(s % 60));
    }
    return out;
}

#endif
