/* run_log.h -- sends a run's log (llmc/files/logger.h) to a client as server-sent events, as it grows and is cut.
 *
 * An event's id is the place where its line ends in the log, and a checksum of the bytes before that place. So a client
 * continues after the last id that it got. It begins anew where the log no longer has these bytes. The server keeps nothing.
 *
 * Of the steps that the log has when a client begins, the server sends at most MOST_POINTS: evenly, and the newest one. The
 * same counts for the validations. It sends all other events, but no line that is longer than LONGEST_LINE.
 */
#ifndef SERVE_RUN_LOG_H
#define SERVE_RUN_LOG_H

#include "dev/serve/buffer.h"  // defines: Buffer, buffer_add, buffer_text
#include "llmc/base/crc.h"     // defines: crc_of
#include "llmc/base/text.h"    // defines: text_starts

#include <inttypes.h>

enum { MOST_POINTS = 4000, TAIL = 256, LONGEST_LINE = 1 << 20, NO_ID = 1 };

/* How far a client has read. All zeros: it begins. */
typedef struct {
    uint64_t id;
    bool counted;         // `history` is known
    bool passes;          // the rest of a line that is too long is passed over
    uint64_t history[2];  // steps and validations that were there when it began
    uint64_t seen[2];     // those read so far
} LogPlace;

/* Returns the id of the event that ends at a byte of the log; 0 for its start, NO_ID where the log is shorter. */
static inline uint64_t log_id(int fd, uint64_t end) {
    char tail[TAIL];
    const size_t n = size_min(end, TAIL);
    if (pread(fd, tail, n, (off_t)(end - n)) != (ssize_t)n) { return NO_ID; }
    return end << 24 | (crc_of(tail, n) & 0xffffff);
}

/* Returns whether a line is sent: of a long history, each stride-th step and the last one. */
static inline bool log_sends(LogPlace* p, const char* line) {
    static const char* const series[] = {"{\"event\":\"step\",", "{\"event\":\"val\","};
    for (int i = 0; i < 2; i++) {
        if (!text_starts(line, series[i])) { continue; }
        const uint64_t stride = p->history[i] / (MOST_POINTS - 1) + 1, n = p->seen[i]++;
        return n % stride == 0 || n + 1 >= p->history[i];
    }
    return true;
}

/* Reads lines until some are sent to `out`; NULL: reads all, to count them. */
static inline void log_read(LogPlace* p, int fd, Buffer* out) {
    char head[64];
    char* block = (char*)xmalloc(LONGEST_LINE);
    uint64_t at = p->id >> 24;
    ssize_t n = 0;
    bool sent = false;
    while (!sent && (n = pread(fd, block, LONGEST_LINE, (off_t)at)) > 0) {
        char *line = block, *end = NULL;
        for (; (end = (char*)memchr(line, '\n', (size_t)(block + n - line))); line = end + 1) {
            const bool sends = !p->passes && log_sends(p, line) && out;
            p->passes = false;
            if (!sends) { continue; }
            snprintf(head, sizeof head, "id: %" PRIu64 "\ndata: ", log_id(fd, at + (uint64_t)(end + 1 - block)));
            buffer_text(out, head);
            buffer_add(out, line, (size_t)(end + 1 - line));
            buffer_text(out, "\n");
            sent = true;
        }
        if (line == block && n < LONGEST_LINE) { break; }  // the rest of the line is still to come
        if (line == block) { p->passes = true, line += n; }
        at += (uint64_t)(line - block);
    }
    p->id = log_id(fd, at);
    free(block);
}

/* Adds the lines that a client has not got yet: if they are many, only the next part of them. */
static inline void log_send(const char* path, LogPlace* p, Buffer* out) {
    struct stat s;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) { return; }
    if (fstat(fd, &s) == 0 && S_ISREG(s.st_mode)) {
        if (log_id(fd, p->id >> 24) != p->id) {
            buffer_text(out, "event: reset\ndata: {}\n\n");
            *p = (LogPlace){0};
        }
        if (!p->counted) {
            LogPlace end = *p;
            log_read(&end, fd, NULL);
            memcpy(p->history, end.seen, sizeof p->history);
            p->counted = true;
        }
        log_read(p, fd, out);
    }
    close(fd);
}

#endif
