/* pieces.h -- the second step of encoding: where a piece of text ends, by Llama 3's pattern and by GPT-2's. Each pattern has a
 * hand-written scanner over the Unicode classes of unicode.h.
 */
#ifndef LLMC_PIECES_H
#define LLMC_PIECES_H

#include "llmc/base/hash.h"     // defines: load8
#include "llmc/base/utf8.h"     // defines: utf8_decode
#include "llmc/text/unicode.h"  // defines: unicode_class, unicode_byte_class

/* Returns the class of the character at s < end; sets *len to its bytes. A byte that is not UTF-8 is a character of class
 * OTHER. */
static inline int scan_class(const uint8_t* s, const uint8_t* end, size_t* len) {
    int cls = unicode_byte_class[*s];
    *len = 1;
    if (cls != UNICODE_NOT_ASCII) { return cls; }
    uint32_t c;
    int n = utf8_decode(s, (size_t)(end - s), &c);
    if (n == 0) { return UNICODE_OTHER; }
    *len = (size_t)n;
    return unicode_class(c);
}

/* Returns the end of the run of characters of class `cls` that starts at s. */
static inline const uint8_t* scan_run(const uint8_t* s, const uint8_t* end, int cls) {
    while (s < end) {
        int byte_cls = unicode_byte_class[*s];
        size_t len = 1;
        if (byte_cls == UNICODE_NOT_ASCII) { byte_cls = scan_class(s, end, &len); }
        if (byte_cls != cls) { break; }
        s += len;
    }
    return s;
}

/* Returns the end of the run of letters that starts at s: scan_run(), but 8 ASCII bytes at a time. */
static inline const uint8_t* scan_letters(const uint8_t* s, const uint8_t* end) {
    const uint64_t ones = 0x0101010101010101u, high = 0x8080808080808080u;
    while (end - s >= 8) {
        uint64_t x = load8((const char*)s);
        uint64_t lower = (x | 0x20 * ones) & ~high;
        // sets the high bit of each byte that is: 'a' or above, not above 'z', ASCII
        uint64_t letter = (lower + (0x80 - 'a') * ones) & ~(lower + (0x80 - 'z' - 1) * ones) & ~x & high;
        if (letter != high) {
            s += __builtin_ctzll(letter ^ high) >> 3;
            return *s < 0x80 ? s : scan_run(s, end, UNICODE_LETTER);
        }
        s += 8;
    }
    return scan_run(s, end, UNICODE_LETTER);
}

/* Returns the length of 's 't 're 've 'm 'll 'd at s, or 0. `fold` ignores case; U+017F (long s) is then an s too. */
static inline size_t scan_contraction(const uint8_t* s, const uint8_t* end, bool fold) {
    if (end - s < 2) { return 0; }
    const uint8_t lower = fold ? 0x20 : 0;
    const uint8_t a = s[1] | lower;
    if (a == 's' || a == 't' || a == 'm' || a == 'd') { return 2; }
    if (end - s < 3) { return 0; }
    if (fold && s[1] == 0xC5 && s[2] == 0xBF) { return 3; }
    const uint8_t b = s[2] | lower;
    return (b == 'e' && (a == 'r' || a == 'v')) || (a == 'l' && b == 'l') ? 3 : 0;
}

/* Returns the end of the piece of white space at s, by the first of these that matches: \s*[\r\n]+ (only if `newlines`),
 * \s+(?!\S), \s+. */
static inline const uint8_t* scan_space(const uint8_t* s, const uint8_t* end, bool newlines) {
    const uint8_t *p = s, *last = s, *behind_newline = NULL;
    size_t len;
    while (p < end && scan_class(p, end, &len) == UNICODE_SPACE) {
        if (*p == '\r' || *p == '\n') { behind_newline = p + 1; }
        last = p;
        p += len;
    }
    if (newlines && behind_newline) { return behind_newline; }
    return p == end || last == s ? p : last;  // the last space belongs to the word after it
}

/* Returns the end of the piece that starts at s < end, by Llama 3's pattern:
 *   (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+ */
static inline const uint8_t* scan_llama3(const uint8_t* s, const uint8_t* end, int max_digits) {
    size_t len, next_len;
    int cls = scan_class(s, end, &len);
    if (cls == UNICODE_LETTER) { return scan_letters(s + len, end); }
    if (cls == UNICODE_NUMBER) {
        const uint8_t* p = s + len;
        for (int i = 1; i < max_digits && p < end && scan_class(p, end, &len) == UNICODE_NUMBER; i++) { p += len; }
        return p;
    }
    if (*s == '\'') {
        size_t n = scan_contraction(s, end, true);
        if (n) { return s + n; }
    }
    const uint8_t* p = s + len;
    int next = p < end ? scan_class(p, end, &next_len) : UNICODE_SPACE;
    if (next == UNICODE_LETTER && *s != '\r' && *s != '\n') { return scan_letters(p + next_len, end); }
    if (cls == UNICODE_OTHER || (*s == ' ' && next == UNICODE_OTHER)) {
        p = scan_run(p, end, UNICODE_OTHER);
        while (p < end && (*p == '\r' || *p == '\n')) { p++; }
        return p;
    }
    return scan_space(s, end, true);
}

/* Returns the end of the piece that starts at s < end, by GPT-2's pattern:
 *   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ */
static inline const uint8_t* scan_gpt2(const uint8_t* s, const uint8_t* end) {
    size_t len;
    if (*s == '\'') {
        size_t n = scan_contraction(s, end, false);
        if (n) { return s + n; }
    }
    const uint8_t* p = *s == ' ' && end - s > 1 ? s + 1 : s;
    int cls = scan_class(p, end, &len);
    if (cls == UNICODE_SPACE) { return scan_space(s, end, false); }
    return cls == UNICODE_LETTER ? scan_letters(p + len, end) : scan_run(p + len, end, cls);
}

#endif
