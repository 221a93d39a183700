/* lines.h -- reads the lines of a pipe, or of a file that grows, without waiting for the end of a line.
 *
 * A line has its newline: text after the last one waits for the rest of its line.
 */
#ifndef LLMC_LINES_H
#define LLMC_LINES_H

#include "llmc/base/os.h"  // defines: os_wait

typedef struct {
    int fd;
    char* text;  // (cap) text[at .. have) was read and is not taken
    size_t at, have, cap;
    bool ended;  // the last read found the end
} Lines;

/* Reads once if something has come; with `wait`, once something has. Lines that were taken before are no longer valid. */
static inline void lines_read(Lines* l, bool wait) {
    if (!os_wait(l->fd, POLLIN, wait ? -1 : 0)) { return; }
    if (l->at > 0) { memmove(l->text, l->text + l->at, l->have -= l->at); }
    l->at = 0;
    if (l->have == l->cap) { l->text = (char*)xrealloc(l->text, l->cap = 2 * l->cap + 4096); }
    const ssize_t n = read(l->fd, l->text + l->have, l->cap - l->have);
    l->ended = n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN);
    l->have += n > 0 ? (size_t)n : 0;
}

/* Returns the next line, and in *len its bytes with its newline. NULL: it has not come yet. Adding *len to `at` takes it. */
static inline const char* lines_next(const Lines* l, size_t* len) {
    const char* line = l->text ? l->text + l->at : NULL;
    const char* end = line ? (const char*)memchr(line, '\n', l->have - l->at) : NULL;
    if (!end) { return NULL; }
    *len = (size_t)(end - line) + 1;
    return line;
}

#endif
