/* run_log.h -- the events of a run's log (llmc/files/logger.h), as it grows and is cut.
 *
 * Of the steps, at most MOST_POINTS are kept, evenly: every stride-th, and the newest. The same counts for the validations. All
 * other events are kept, but no line that is longer than LONGEST_LINE. An event has an id. Ids only grow, also from one run of
 * the server to the next.
 */
#ifndef SERVE_RUN_LOG_H
#define SERVE_RUN_LOG_H

#include "llmc/base/utils.h"  // first, since it asks for the functions beyond C11

#include "dev/serve/client.h"  // defines: Buffer, buffer_text
#include "llmc/base/lines.h"   // defines: Lines, lines_read, lines_next
#include "llmc/base/text.h"    // defines: text_starts

enum { MOST_POINTS = 4000, TAIL = 64, LONGEST_LINE = 1 << 20 };

/* The events of a name whose number is limited. */
typedef struct {
    const char* start;  // of their lines
    size_t kept;
    uint64_t count, stride;  // so far; each stride-th is kept
} Series;

typedef struct {
    uint64_t id, number;  // number: in its series, counted from 0
    Series* of;           // NULL: it is always kept
    char* text;
} Event;

typedef struct {
    char path[PATH_CAP];
    Lines in;         // fd -1: there is no log
    bool passes;      // the rest of a line that is too long is passed over
    char tail[TAIL];  // the last bytes read. If others stand there now, the log was cut, and may have grown again
    Event* events;
    size_t count, cap;
    uint64_t next, first;  // ids: of the next event, of the first one since the log was cut
    Series series[2];
} Log;

/* Begins with a log that may not be there yet. */
static inline bool log_open(Log* l, const char* run, Error* e) {
    memset(l, 0, sizeof *l);
    l->in.fd = -1;
    l->first = l->next = (uint64_t)time(NULL) << 20;
    return path_join(l->path, run, "log.jsonl", e);
}

/* Drops all events, and begins with another log. */
static inline void log_begin(Log* l) {
    for (size_t i = 0; i < l->count; i++) { free(l->events[i].text); }
    l->count = 0;
    l->series[0] = (Series){"{\"event\":\"step\",", 0, 0, 1};
    l->series[1] = (Series){"{\"event\":\"val\",", 0, 0, 1};
    l->first = ++l->next;  // one id stays unused: also a client that knew all events is behind
}

/* Drops the events that are not kept, but the newest of each series. */
static inline void log_thin(Log* l) {
    size_t kept = 0;
    for (size_t i = 0; i < l->count; i++) {
        const Event v = l->events[i];
        if (!v.of || v.number % v.of->stride == 0 || v.number + 1 == v.of->count) {
            l->events[kept++] = v;
        } else {
            v.of->kept--;
            free(v.text);
        }
    }
    l->count = kept;
}

static inline void log_add(Log* l, const char* line, size_t n) {
    Series* of = l->series;
    while (of < l->series + 2 && !text_starts(line, of->start)) { of++; }
    if (of == l->series + 2) { of = NULL; }
    if (l->count == l->cap) { l->events = (Event*)xrealloc(l->events, (l->cap = 2 * l->cap + 64) * sizeof *l->events); }
    char* text = (char*)memcpy(xmalloc(n), line, n);
    text[n - 1] = 0;  // the newline
    l->events[l->count++] = (Event){l->next++, of ? of->count++ : 0, of, text};
    if (!of || ++of->kept <= MOST_POINTS) { return; }
    for (log_thin(l); of->kept > MOST_POINTS / 4 * 3; log_thin(l)) { of->stride *= 2; }
}

/* Reads the bytes before the place where reading continues. */
static inline void log_tail(const Log* l, char tail[TAIL]) {
    const off_t from = lseek(l->in.fd, 0, SEEK_CUR) - TAIL;
    if (from < 0 || pread(l->in.fd, tail, TAIL, from) < TAIL) { memset(tail, 0, TAIL); }
}

/* Reads what the run has written; a log that was cut or replaced from its start. */
static inline void log_look(Log* l) {
    struct stat now, then;
    char tail[TAIL] = {0};
    const bool has = l->in.fd >= 0 && fstat(l->in.fd, &then) == 0, there = stat(l->path, &now) == 0 && S_ISREG(now.st_mode);
    if (has) { log_tail(l, tail); }
    log_thin(l);  // the clients that follow have got the others
    if (there && (!has || now.st_ino != then.st_ino || memcmp(tail, l->tail, TAIL) != 0)) {
        log_begin(l);
        l->passes = false;
        if (has) { close(l->in.fd); }
        free(l->in.text);
        l->in = (Lines){.fd = open(l->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
    }
    do {
        size_t n = 0;
        if (l->in.fd < 0) { return; }
        lines_read(&l->in, false);
        for (const char* line; (line = lines_next(&l->in, &n)); l->in.at += n) {
            if (!l->passes) { log_add(l, line, n); }
            l->passes = false;
        }
        if (l->in.have - l->in.at > LONGEST_LINE) { l->in.at = l->in.have, l->passes = true; }
    } while (!l->in.ended);
    log_tail(l, l->tail);
}

/* Writes events from *event on as server-sent events, at most about 64 KiB, and advances *event; 0: from the start. */
static inline void log_tell(const Log* l, Buffer* out, uint64_t* event) {
    char head[64];
    if (*event > 0 && *event < l->first) {
        buffer_text(out, "event: reset\ndata: {}\n\n");
        *event = l->first;
    }
    for (size_t i = 0; i < l->count && out->size < 1 << 16; i++) {
        const Event* v = &l->events[i];
        if (v->id < *event) { continue; }
        snprintf(head, sizeof head, "id: %" PRIu64 "\ndata: ", v->id);
        buffer_text(out, head);
        buffer_text(out, v->text);
        buffer_text(out, "\n\n");
        *event = v->id + 1;
    }
}

#endif
