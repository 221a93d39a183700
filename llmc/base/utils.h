/* utils.h -- what every other header needs: errors, checked memory, checked reading of files, paths, time.
 *
 * Errors have two forms. A parser returns false and leaves the first cause in an `Error`, so that a caller may try
 * another file (resume) and a fuzzer can continue. A program that cannot continue calls die(): a message on stderr, exit 1.
 * Wrong usage (flags) calls die_usage(): exit 2. A message reads "FILE: FIELD is FOUND, wanted WANTED" and may have a
 * second line "\n  hint: ...". `assert` is for our own bugs, never for a user's file.
 * Valid C11 and C++17. Mutable globals on the host exist only for hooks and signal handlers, which get no argument of ours: the
 * globals for a rank's messages here, and those in together.h and signals.h.
 */
#ifndef LLMC_UTILS_H
#define LLMC_UTILS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1  // fseeko, fileno, clock_gettime under -std=c11
#endif
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#include "llmc/base/utf8.h"  // utf8_decode, utf8_encode, plain_char_length; included after the line that asks for GNU functions

#define LLMC_VERSION "0.2.0"

#if defined __FAST_MATH__ || __FINITE_MATH_ONLY__ + 0 || defined __ASSOCIATIVE_MATH__
#error "without -ffast-math and -Ofast: they delete the checks for nan, and round sums in another order"
#endif
#if UINTPTR_MAX >> 31 < 2 || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "for a 64-bit little-endian system: sizes and files are made for it"
#endif

/* Marks a function that kernels call too. */
#ifdef __CUDACC__
#define LLMC_HOST_DEVICE __host__ __device__
#else
#define LLMC_HOST_DEVICE
#endif

#ifdef __cplusplus
#define LLMC_NORETURN [[noreturn]]
#else
#define LLMC_NORETURN _Noreturn
#endif
#define LLMC_PRINTF(format_index, first_arg) __attribute__((format(printf, format_index, first_arg), unused))

// ---------------------------------------------------------------------------------------------------------------------
// numbers

static inline size_t size_min(size_t a, size_t b) { return a < b ? a : b; }
static inline size_t size_max(size_t a, size_t b) { return a > b ? a : b; }
static inline size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }
static inline size_t round_up(size_t a, size_t to) { return ceil_div(a, to) * to; }

/* Compares two floats for qsort(), ascending. */
static inline int compare_floats(const void* a, const void* b) {
    const float x = *(const float*)a, y = *(const float*)b;
    return (x > y) - (x < y);
}

// ---------------------------------------------------------------------------------------------------------------------
// errors

typedef struct {
    char msg[1024];  // the first cause; empty: no error
    bool too_large;  // the cause is a number that its format would hold as infinity
} Error;
#define NO_ERROR \
    { "", false }

/* Copies text into `out`, at most cap bytes with the NUL; what a terminal would obey becomes \\xNN. Returns the length. */
static inline size_t escape_text(char* out, size_t cap, const char* s, size_t n) {
    size_t used = 0;
    for (size_t i = 0; i < n && used + 4 < cap;) {
        const size_t length = plain_char_length(s + i, n - i);
        if (length == 0) { snprintf(out + used, cap - used, "\\x%02x", (unsigned char)s[i]); }
        memcpy(out + used, s + i, length);
        used += length ? length : 4;
        i += length ? length : 1;
    }
    out[used] = 0;
    return used;
}

/* Formats a message for the terminal. The newlines of the format stay; what its arguments hold (names of files, words of the
 * command line) is escaped, so that no file's name can print a line of its own. "%s" alone passes a finished message on. */
static inline void message_text(char* out, size_t cap, const char* fmt, va_list ap) {
    char raw[8192], line[1024];
    const bool finished = strcmp(fmt, "%s") == 0;
    va_list again;
    va_copy(again, ap);
    vsnprintf(raw, sizeof raw, fmt, again);
    va_end(again);
    if (finished) {
        snprintf(out, cap, "%s", raw);
        return;
    }
    size_t used = 0, from = 0, length = strlen(raw);
    for (const char* newline = strchr(fmt, '\n'); newline; newline = strchr(newline + 1, '\n')) {
        snprintf(line, sizeof line, "%.*s", (int)(newline - fmt), fmt);
        va_copy(again, ap);
        const size_t at = size_min((size_t)vsnprintf(NULL, 0, line, again), length);  // the newline's place in `raw`
        va_end(again);
        used += escape_text(out + used, cap - used, raw + from, at - from);
        if (at == length || used + 8 > cap) { return; }  // cut: no room for the next line
        out[used++] = '\n';
        from = at + 1;
    }
    escape_text(out + used, cap - used, raw + from, length - from);
}

/* Records the first cause and returns false, so that a parser can `return fail(e, ...)`. Drops later causes. */
LLMC_PRINTF(2, 3) static bool fail(Error* e, const char* fmt, ...) {
    if (e->msg[0]) { return false; }
    va_list ap;
    va_start(ap, fmt);
    message_text(e->msg, sizeof e->msg, fmt, ap);
    va_end(ap);
    return false;
}

static char message_rank[32];                   // "rank 3: ", in a run of several ranks; otherwise ""
static void (*message_last)(const char* text);  // passes the error that ends this rank on to the others; NULL: no others

/* Prints one line and at most one hint line on stderr. */
static inline void print_message(const char* kind, const char* text) {
    fflush(stdout);
    fprintf(stderr, "%s: %s%s\n", kind, message_rank, text);
}

LLMC_NORETURN LLMC_PRINTF(2, 0) static void die_v(int code, const char* fmt, va_list ap) {
    char text[8192];
    message_text(text, sizeof text, fmt, ap);
    print_message("error", text);
    if (message_last) { message_last(text); }
    exit(code);
}

/* Ends the program with exit 1, for bad input or a failed resource: one line and at most one hint line. */
LLMC_NORETURN LLMC_PRINTF(1, 2) static void die(const char* fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    die_v(1, fmt, ap);
}

/* Dies with the error unless `ok`: for a program that cannot continue after a parser failed. */
static inline void must(bool ok, const Error* e) {
    if (!ok) { die("%s", e->msg); }
}

/* Ends the program with exit 2, for wrong usage of the command line. */
LLMC_NORETURN LLMC_PRINTF(1, 2) static void die_usage(const char* fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    die_v(2, fmt, ap);
}

LLMC_PRINTF(1, 2) static void warn(const char* fmt, ...) {
    char text[8192];
    va_list ap;
    va_start(ap, fmt);
    message_text(text, sizeof text, fmt, ap);
    va_end(ap);
    print_message("warning", text);
}

static void other_processor(int sig) {
    static const char text[] =
        "error: this program was built for another CPU: this one lacks some of its instructions\n"
        "  hint: run make on this machine, or make MARCH= for every CPU of this kind\n";
    (void)sig;
    _exit(write(STDERR_FILENO, text, sizeof text - 1) < 0 ? 2 : 1);
}

/* Runs before main(), and holds no vector instruction itself. */
__attribute__((constructor(101))) static void name_other_processor(void) { signal(SIGILL, other_processor); }

// ---------------------------------------------------------------------------------------------------------------------
// memory

static inline void* xmalloc(size_t bytes) {
    void* p = malloc(bytes ? bytes : 1);
    if (!p) { die("out of memory: could not allocate %.1f MiB", (double)bytes / (1 << 20)); }
    return p;
}

static inline void* xcalloc(size_t count, size_t size) {
    void* p = calloc(count ? count : 1, size ? size : 1);
    if (!p) { die("out of memory: could not allocate %.1f MiB", (double)count * (double)size / (1 << 20)); }
    return p;
}

static inline void* xrealloc(void* old, size_t bytes) {
    void* p = realloc(old, bytes ? bytes : 1);
    if (!p) { die("out of memory: could not allocate %.1f MiB", (double)bytes / (1 << 20)); }
    return p;
}

/* Makes room for `more` elements after the first `count` of a list. */
static inline void* xreserve(void* items, size_t count, size_t more, size_t* cap, size_t bytes) {
    if (count + more <= *cap) { return items; }
    *cap = size_max(*cap + *cap / 2 + 64, count + more);
    return xrealloc(items, *cap * bytes);
}

static inline void* xgrow(void* items, size_t count, size_t* cap, size_t bytes) {
    return xreserve(items, count, 1, cap, bytes);
}

/* Returns a copy of n bytes and a zero after them. The bytes may be zeros, too. */
static inline char* xcopy_text(const char* s, size_t n) {
    char* copy = (char*)memcpy(xmalloc(n + 1), s, n);
    copy[n] = 0;
    return copy;
}

static inline char* xstrdup(const char* s) { return xcopy_text(s, strlen(s)); }

/* Opens a stream that writes to memory; xclose_memory() makes *text and *length valid, and the caller frees *text. */
static inline FILE* xopen_memory(char** text, size_t* length) {
    FILE* f = open_memstream(text, length);
    if (!f) { die("out of memory: could not open a stream"); }
    return f;
}

static inline void xclose_memory(FILE* f, char** text) {
    const bool lost = ferror(f) != 0;  // fclose() alone may succeed after a write that found no memory
    if (fclose(f) != 0 || lost || !*text) { die("out of memory: could not keep a text"); }
}

// ---------------------------------------------------------------------------------------------------------------------
// paths, and reading files. files/output.h writes them

// A point where a test makes a write fail or the process die; empty in a program.
#ifndef LLMC_FAULT_POINT
#define LLMC_FAULT_POINT(where) ((void)0)
#endif

enum { PATH_CAP = 4096 };  // bytes of a path buffer, including the NUL

/* Writes dir "/" name to `out`, a buffer of PATH_CAP bytes; fails if it does not fit. */
static inline bool path_join(char* out, const char* dir, const char* name, Error* e) {
    int n = snprintf(out, PATH_CAP, "%s/%s", dir, name);
    if (n >= 0 && n < PATH_CAP) { return true; }
    return fail(e, "%.200s...: the path is longer than %d bytes", dir, PATH_CAP - 1);
}

static inline bool file_exists(const char* path) {
    struct stat st;
    return stat(path, &st) == 0;
}

static inline bool is_directory(const char* path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

/* Names what stat() found, for a message. */
static inline const char* file_kind(mode_t mode) {
    return S_ISREG(mode)    ? "a regular file"
           : S_ISDIR(mode)  ? "a folder"
           : S_ISLNK(mode)  ? "a link"
           : S_ISFIFO(mode) ? "a pipe"
           : S_ISSOCK(mode) ? "a socket"
                            : "a device";
}

/* Opens a regular file, or a link to one, for reading and sets *size to its bytes. Anything else is an error; its message
 * names `wanted`. Returns -1 on an error. */
static inline int open_to_read(const char* path, const char* wanted, uint64_t* size, Error* e) {
    struct stat st;
    const int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);  // do not hang on a pipe without a writer
    if (fd < 0) {
        const int cause = errno;
        const bool link = lstat(path, &st) == 0 && S_ISLNK(st.st_mode);
        fail(e, "%s: cannot open%s: %s", path, link ? " what this link points to" : "", strerror(cause));
        return -1;
    }
    const bool seen = fstat(fd, &st) == 0 || fail(e, "%s: cannot tell what it is: %s", path, strerror(errno));
    if (!seen || !S_ISREG(st.st_mode)) {
        fail(e, "%s: is %s, wanted %s", path, file_kind(st.st_mode), wanted);
        close(fd);
        return -1;
    }
    *size = (uint64_t)st.st_size;
    return fd;
}

/* Does the same and returns a stream. Returns NULL on an error. */
static inline FILE* open_input(const char* path, uint64_t* size, Error* e) {
    const int fd = open_to_read(path, "a regular file", size, e);
    FILE* f = fd >= 0 ? fdopen(fd, "rb") : NULL;
    if (!f && fd >= 0) {
        fail(e, "%s: cannot open: %s", path, strerror(errno));
        close(fd);
    }
    return f;
}

/* Reads exactly `bytes` bytes at the file's position. `what` names the part in the error. */
static inline bool read_exact(FILE* f, void* dst, size_t bytes, const char* path, const char* what, Error* e) {
    size_t got = fread(dst, 1, bytes, f);
    if (got == bytes) { return true; }
    if (ferror(f)) { return fail(e, "%s: reading %s failed: %s", path, what, strerror(errno)); }
    return fail(e, "%s: %s ends after %zu bytes, wanted %zu: the file is cut short", path, what, got, bytes);
}

/* Reads exactly `bytes` bytes at an offset. pread() moves no file position, so threads may share the descriptor. */
static inline bool read_at(int fd, uint64_t offset, void* dst, size_t bytes, const char* path, const char* what, Error* e) {
    const size_t max_read = (size_t)1 << 30;  // Linux reads at most 2^31 - 4096 bytes a call
    char* out = (char*)dst;
    while (bytes > 0) {
        const ssize_t got = pread(fd, out, size_min(bytes, max_read), (off_t)offset);
        if (got < 0 && errno == EINTR) { continue; }
        if (got < 0) { return fail(e, "%s: reading %s failed: %s", path, what, strerror(errno)); }
        if (got == 0) { return fail(e, "%s: %s ends %zu bytes early: the file is cut short", path, what, bytes); }
        out += got;
        offset += (uint64_t)got;
        bytes -= (size_t)got;
    }
    return true;
}

/* Reads a whole file and adds a NUL, which *size does not count. Returns memory that the caller frees, or NULL on an error.
 * Refuses files above `max` bytes. */
static inline char* read_file(const char* path, size_t* size, uint64_t max, Error* e) {
    uint64_t bytes = 0;
    FILE* f = open_input(path, &bytes, e);
    if (!f) { return NULL; }
    char* data = NULL;
    if (bytes > max) {
        fail(e, "%s: is %llu bytes long, wanted at most %llu", path, (unsigned long long)bytes, (unsigned long long)max);
    } else {
        data = (char*)malloc((size_t)bytes + 1);
        if (!data) { fail(e, "%s: out of memory for its %llu bytes", path, (unsigned long long)bytes); }
    }
    if (data && !read_exact(f, data, (size_t)bytes, path, "the file", e)) {
        free(data);
        data = NULL;
    }
    fclose(f);
    if (data) {
        data[bytes] = 0;
        *size = (size_t)bytes;
    }
    return data;
}

/* Opens /dev/null for each of stdin, stdout and stderr that the parent closed. It opens them in the wrong direction, so
 * reading and writing there still fail. Without this, a file that the program opens could get such a number, and output
 * would end up in it. Call it first of all. */
static inline void keep_standard_files(void) {
    for (int fd = 0; fd <= 2; fd++) {
        if (fcntl(fd, F_GETFD) >= 0) { continue; }
        errno = 0;
        if (open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY) != fd) {
            die("standard stream %d is closed, and /dev/null cannot take its place: %s", fd, strerror(errno));
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// time

/* Returns the seconds of a clock that never steps back. */
static inline double now_seconds(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

#endif
