/* text.h -- small text functions that many files need: text in messages, numbers for people to read, and the edit
 * distance of two words, for "did you mean".
 */
#ifndef LLMC_TEXT_H
#define LLMC_TEXT_H

#include "llmc/base/utils.h"  // first, since it enables the functions beyond C11

// ---------------------------------------------------------------------------------------------------------------------
// text in messages

/* Returns whether a text begins with `start`. */
static inline bool text_starts(const char* s, const char* start) { return strncmp(s, start, strlen(start)) == 0; }

static inline bool text_ends(const char* s, const char* end) {
    const size_t n = strlen(s), m = strlen(end);
    return n >= m && strcmp(s + n - m, end) == 0;
}

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

/* Prints text at a terminal. Newlines and harmless characters stay as they are; what the terminal would obey becomes \xNN,
 * as in messages. */
static inline void print_escaped(FILE* f, const char* s, size_t n) {
    for (size_t i = 0; i < n;) {
        const size_t length = s[i] == '\n' ? 1 : plain_char_length(s + i, n - i);
        if (length == 0) { fprintf(f, "\\x%02x", (unsigned char)s[i]); }
        fwrite(s + i, 1, length, f);
        i += length ? length : 1;
    }
}

/* printf() for a line with names of files or other text from the user. At a terminal, characters that the terminal would
 * obey are escaped; a pipe or file gets the bytes as they are. Returns the number of bytes before escaping. */
LLMC_PRINTF(2, 3) static int print_names(FILE* f, const char* fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    const int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    char* text = (char*)xmalloc((size_t)(n > 0 ? n : 0) + 1);
    va_start(ap, fmt);
    vsnprintf(text, (size_t)(n > 0 ? n : 0) + 1, fmt, ap);
    va_end(ap);
    if (isatty(fileno(f))) {
        print_escaped(f, text, strlen(text));
    } else {
        fputs(text, f);
    }
    free(text);
    return n;
}

/* Returns the length of the byte order mark with which some editors begin a text; 0: there is none. */
static inline size_t text_mark(const char* s) { return text_starts(s, "\xEF\xBB\xBF") ? 3 : 0; }

/* Prints a word of a command as a shell takes it, in quotes if it needs them: 'a b', 'it'\''s', and with control characters
 * $'a\x0ab'. */
static inline void print_word(FILE* f, const char* word) {
    static const char plain[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_./:=+,@%-";
    const size_t n = strlen(word);
    bool hidden = false;
    if (n > 0 && strspn(word, plain) == n) {
        fputs(word, f);
        return;
    }
    for (size_t i = 0, length = 1; i < n && !hidden; i += length) {
        length = plain_char_length(word + i, n - i);
        hidden = length == 0;
    }
    fputs(hidden ? "$'" : "'", f);
    for (size_t i = 0, length = 1; i < n; i += length ? length : 1) {
        length = plain_char_length(word + i, n - i);
        if (length == 0) {
            fprintf(f, "\\x%02x", (unsigned char)word[i]);
        } else if (word[i] == '\'') {
            fputs(hidden ? "\\'" : "'\\''", f);
        } else if (word[i] == '\\' && hidden) {
            fputs("\\\\", f);
        } else {
            fwrite(word + i, 1, length, f);
        }
    }
    fputc('\'', f);
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

/* Returns whether a name has the form OWNER/NAME, as models on the Hugging Face hub have, and is no usual path here. */
static inline bool is_hub_name(const char* name) {
    const char* slash = strchr(name, '/');
    if (strncmp(name, "out/", 4) == 0 || strncmp(name, "models/", 7) == 0) { return false; }
    const size_t n = strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./");
    return slash && slash > name && slash[1] && !strchr(slash + 1, '/') && !strchr(".-", name[0]) && !name[n];
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

/* Returns the end of a noun after a count. */
static inline const char* text_plural(int64_t n) { return n == 1 ? "" : "s"; }

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
