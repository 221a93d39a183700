/* run_log.h -- sends a run's log (llmc/files/logger.h) to a client as server-sent events, as it grows and is cut, and says in
 * which state a run is.
 *
 * An event's id is the place where its line ends in the log, and a checksum of the bytes before that place. So a client
 * continues after the last id that it got. It begins anew where the log no longer has these bytes.
 *
 * The steps that the log has when a client begins are thinned to MOST_BUCKETS buckets of consecutive steps, and so are the
 * validations. Of a bucket the server sends the last line, and as "event: peak" those that stand out: the least and the
 * greatest loss, the greatest norm of a gradient, and the first loss that is not finite. It sends all other events, but no line
 * that is longer than LONGEST_LINE.
 */
#ifndef SERVE_RUN_LOG_H
#define SERVE_RUN_LOG_H

#include "dev/serve/buffer.h"       // defines: Buffer, buffer_add, buffer_text, buffer_waits
#include "llmc/base/crc.h"          // defines: crc_of
#include "llmc/base/lines.h"        // defines: Lines, lines_read, lines_next
#include "llmc/base/text.h"         // defines: text_starts
#include "llmc/files/checkpoint.h"  // defines: checkpoint_compare_newest, out_is_locked
#include "llmc/files/folder.h"      // defines: folder_has, folder_order
#include "llmc/files/json.h"        // defines: json_parse_line, json_write_text
#include "llmc/files/output.h"      // defines: open_inside

#include <inttypes.h>

#ifndef LONGEST_LINE  // the fuzzer sets both smaller
#define LONGEST_LINE (1 << 20)
#define MOST_BUCKETS 1600
#endif
enum { TAIL = 256, NO_ID = 1, PART = 64 << 10, NUM_PEAKS = 5, LAST = 4, FRESH_SECONDS = 60, MOST_RUNS = 200 };

/* How far a client has read. All zeros: it begins. */
typedef struct {
    uint64_t id;
    bool ranges, ends;  // it asks for the steps from first to last alone; and for no events that are still to come
    double first, last;
    uint64_t history;  // the place where the log ended when it began
    uint64_t* kept;    // (num_kept) the thinned lines before it that are still to send, the next one last: the place where a
    size_t num_kept;   //            line ends, times 2, and 1 more for the last of a bucket. NULL: not known yet
} LogPlace;

/* A log that is read by lines. */
typedef struct {
    Lines lines;
    uint64_t end;  // the place where the last line ends that was read or passed over
    bool passes;
} LogReader;

// ---------------------------------------------------------------------------------------------------------------------
// lines

/* Continues at a byte of the log. The rest of a line that begins before it is passed over, or the newline. */
static inline void log_seek(LogReader* r, uint64_t at) {
    r->passes = at > 0;
    r->end = at - r->passes;
    r->lines.at = r->lines.have = 0;
    r->lines.ended = lseek(r->lines.fd, (off_t)r->end, SEEK_SET) < 0;
}

/* Returns the next line and in *n its bytes with its newline; NULL: it is still to come. It is valid until the next call. */
static inline const char* log_next(LogReader* r, size_t* n) {
    for (Lines* l = &r->lines; !l->ended; lines_read(l, false)) {
        for (const char* line; (line = lines_next(l, n));) {
            const bool passed = r->passes || *n > LONGEST_LINE;
            l->at += *n, r->end += *n, r->passes = false;
            if (!passed) { return line; }
        }
        if (l->have - l->at <= LONGEST_LINE && !r->passes) { continue; }
        r->end += l->have - l->at, r->passes = true, l->at = l->have;
        const off_t size = lseek(l->fd, 0, SEEK_END), data = lseek(l->fd, (off_t)r->end, SEEK_DATA);
        if (data >= 0 || (errno == ENXIO && size > (off_t)r->end)) { r->end = (uint64_t)(data < 0 ? size : data); }
        lseek(l->fd, (off_t)r->end, SEEK_SET);  // a hole has no newline, and may be larger than any disk
    }
    return NULL;
}

/* Returns the id of the event that ends at byte `end`; 0 for the start of the log, NO_ID where the log is shorter. */
static inline uint64_t log_id(const LogReader* r, uint64_t end) {
    char tail[TAIL];
    const size_t n = size_min(end, TAIL);
    const bool there = pread(r->lines.fd, tail, n, (off_t)(end - n)) == (ssize_t)n;
    return there ? end << 24 | (crc_of(tail, n) & 0xffffff) : NO_ID;
}

/* Returns the number after a name such as "\"loss\":" in a line of n bytes that a newline ends; NaN: none. */
static inline double log_number(const char* line, size_t n, const char* name) {
    const char* at = (const char*)memmem(line, n, name, strlen(name));
    if (at) { at += strlen(name), at += *at == ' '; }
    const double value = at && strchr("-0123456789", *at) && *at ? strtod(at, NULL) : NAN;  // strtod() would pass a newline
    return isfinite(value) ? value : NAN;
}

/* Returns whether a line is an event of this name. Python's json writes a space after each colon. */
static inline bool log_is(const char* line, const char* name) {
    if (!text_starts(line, "{\"event\":")) { return false; }
    line += 9 + (line[9] == ' ');
    return *line == '"' && text_starts(line + 1, name) && line[1 + strlen(name)] == '"';
}

enum { STEP, VAL, OTHER, NONE };

/* Returns what a line is to a client: a step, a validation, another event, or none that it asks for. */
static inline int log_kind(const LogPlace* p, const char* line, size_t n) {
    const int kind = log_is(line, "step") ? STEP : log_is(line, "val") ? VAL : OTHER;
    if (!p->ranges) { return kind < OTHER || text_starts(line, "{\"event\":") ? kind : NONE; }
    const double step = log_number(line, n, "\"step\":");
    return kind < OTHER && step >= p->first && step <= p->last ? kind : NONE;
}

// ---------------------------------------------------------------------------------------------------------------------
// thinning

/* Of some lines the one that stands out most. */
typedef struct {
    double value;
    uint64_t end;  // the place where it ends; 0: none
} Peak;

static inline void peak_add(Peak* p, double value, uint64_t end) {
    if (!isnan(value) && (p->end == 0 || value > p->value)) { *p = (Peak){value, end}; }
}

/* Chooses what a client gets of the history, which lies before it in the log: the peaks of buckets. A bucket is a part of the
 * log's bytes or of the steps that are asked. Its last line stands out most by its place. */
static inline void log_thin(LogPlace* p, LogReader* r) {
    Peak(*buckets)[NUM_PEAKS] = (Peak(*)[NUM_PEAKS])xcalloc(OTHER * MOST_BUCKETS, sizeof *buckets);
    const uint64_t begin = p->id >> 24;
    size_t n = 0;
    p->history = (uint64_t)lseek(r->lines.fd, 0, SEEK_END);
    log_seek(r, begin);
    for (const char* line; (line = log_next(r, &n)) && r->end <= p->history;) {
        const int kind = log_kind(p, line, n);
        if (kind >= OTHER) { continue; }
        const double step = log_number(line, n, "\"step\":"), loss = log_number(line, n, "\"loss\":");
        const double share =
            p->ranges ? (step - p->first) / (p->last - p->first) : (double)(r->end - begin) / (double)(p->history - begin);
        const double values[] = {loss, -loss, log_number(line, n, "\"gnorm\":"), isnan(loss) ? 1 : NAN, (double)r->end};
        const size_t b = kind * MOST_BUCKETS + (size_t)(fmin(fmax(share, 0), 1) * (MOST_BUCKETS - 1));
        for (int k = 0; k < NUM_PEAKS; k++) { peak_add(&buckets[b][k], values[k], r->end); }
    }
    p->kept = (uint64_t*)xmalloc(OTHER * MOST_BUCKETS * NUM_PEAKS * sizeof *p->kept);
    for (size_t i = 0; i < OTHER * MOST_BUCKETS * NUM_PEAKS; i++) {
        const uint64_t end = buckets[i / NUM_PEAKS][i % NUM_PEAKS].end;
        if (end > 0) { p->kept[p->num_kept++] = 2 * end + (i % NUM_PEAKS == LAST); }
    }
    qsort(p->kept, p->num_kept, sizeof *p->kept, checkpoint_compare_newest);
    free(buckets);
}

/* Adds the lines of a run that a client has not got yet: if they are many, only the next part of them. */
static inline void log_send(const char* run, LogPlace* p, Buffer* out) {
    char head[64];
    size_t n = 0;
    Error ignored = NO_ERROR;
    LogReader r = {.lines.fd = open_inside(run, "log.jsonl", &ignored)};
    if (r.lines.fd >= 0 && lseek(r.lines.fd, 0, SEEK_END) >> 40) { close(r.lines.fd), r.lines.fd = -1; }  // an id has 40 bits
    if (r.lines.fd < 0) { return; }
    if (log_id(&r, p->id >> 24) != p->id) {
        buffer_text(out, "event: reset\ndata: {}\n\n");
        free(p->kept);
        *p = (LogPlace){.ranges = p->ranges, .ends = p->ends, .first = p->first, .last = p->last};
    }
    if (!p->kept) { log_thin(p, &r); }
    log_seek(&r, p->id >> 24);
    for (const char* line; buffer_waits(out) < PART && (line = log_next(&r, &n));) {
        const int kind = log_kind(p, line, n);
        const bool thins = kind < OTHER && r.end <= p->history;
        uint64_t kept = thins ? 0 : 2 * r.end + 1;
        while (thins && p->num_kept > 0 && p->kept[p->num_kept - 1] / 2 <= r.end) { kept = p->kept[--p->num_kept]; }
        if (kind == NONE || kept / 2 != r.end) { continue; }
        snprintf(head, sizeof head, "%sid: %" PRIu64 "\ndata: ", kept % 2 ? "" : "event: peak\n", log_id(&r, r.end));
        buffer_text(out, head);
        buffer_add(out, line, n);
        buffer_text(out, "\n");
    }
    p->id = log_id(&r, r.end);
    close(r.lines.fd);
    free(r.lines.text);
}

// ---------------------------------------------------------------------------------------------------------------------
// how a run stands, by the end of its log and the lock that a running trainer holds

enum { LOG_END = 128 << 10 };  // bytes of a log that are looked through

/* Writes the run of a folder as an object: its name, its state, when its log was written, its last step and losses, and the
 * reason of its end. */
static inline void run_write(FILE* f, const char* dir, const char* name) {
    static const char* const names[] = {"time", "step", "loss", "val"};
    double numbers[] = {0, NAN, NAN, NAN};
    struct stat st = {0};
    Error ignored = NO_ERROR;
    Json j;
    LogReader r = {.lines.fd = open_inside(dir, "log.jsonl", &ignored)};
    char* reason = NULL;
    size_t n = 0;
    const bool there = r.lines.fd >= 0 && fstat(r.lines.fd, &st) == 0;
    log_seek(&r, st.st_size > LOG_END ? (uint64_t)st.st_size - LOG_END : 0);
    numbers[0] = (double)st.st_mtime;
    for (const char* line; (line = log_next(&r, &n));) {
        if (log_is(line, "step")) {
            numbers[1] = log_number(line, n, "\"step\":"), numbers[2] = log_number(line, n, "\"loss\":");
        }
        if (log_is(line, "val")) { numbers[3] = log_number(line, n, "\"loss\":"); }
        if (!log_is(line, "end") || !json_parse_line(&j, line, n, "log", &ignored)) { continue; }
        const char* found = json_string(&j, json_get(&j, json_root(&j), "reason"), NULL);
        free(reason);
        reason = xstrdup(found ? found : "");
        json_free(&j);
    }
    if (there) { close(r.lines.fd); }
    free(r.lines.text);
    const bool locks = folder_has(dir, ".lock"), fresh = time(NULL) - st.st_mtime < FRESH_SECONDS;
    const char* state = !there                        ? "empty"
                        : locks && out_is_locked(dir) ? "running"
                        : reason ? (strcmp(reason, "done") == 0 || strcmp(reason, "patience") == 0 ? "finished" : "stopped")
                        : !locks && fresh ? "running"
                                          : "killed";
    fputs("{\"name\": ", f);
    json_write_text(f, name);
    fprintf(f, ", \"state\": \"%s\", \"reason\": ", state);
    json_write_text(f, reason ? reason : "");
    for (int i = 0; i < 4; i++) { fprintf(f, ", \"%s\": ", names[i]), json_write_double(f, numbers[i]); }
    fputc('}', f);
    free(reason);
}

/* Finds the folder of a run in a folder of runs by its name; "": the folder itself. It is no link: see open_inside(). */
static inline bool run_find(char path[PATH_CAP], const char* folder, const char* name) {
    struct stat st;
    Error ignored = NO_ERROR;
    if (!*name) { return snprintf(path, PATH_CAP, "%s", folder) < PATH_CAP; }
    return *name != '.' && !strchr(name, '/') && path_join(path, folder, name, &ignored) && lstat(path, &st) == 0 &&
           S_ISDIR(st.st_mode);
}

typedef struct {
    double time;  // of its log
    char* name;
} RunName;

static inline int run_newest(const void* a, const void* b) {
    const double s = ((const RunName*)a)->time, t = ((const RunName*)b)->time;
    return s > t ? -1 : s < t;
}

/* Writes the newest runs of a folder, with commas between; the folder alone if it is a run, or has none. */
static inline void runs_write(FILE* f, const char* folder) {
    char path[PATH_CAP], log[PATH_CAP];
    struct dirent** entries = NULL;
    struct stat st;
    Error ignored = NO_ERROR;
    int count = 0;
    const int listed = folder_has(folder, "log.jsonl") ? 0 : scandir(folder, &entries, NULL, folder_order);
    RunName* runs = (RunName*)xmalloc((listed > 0 ? (size_t)listed : 0) * sizeof *runs);
    for (int i = 0; i < listed; i++) {
        char* name = entries[i]->d_name;
        if (run_find(path, folder, name) && path_join(log, path, "log.jsonl", &ignored) && lstat(log, &st) == 0) {
            runs[count++] = (RunName){(double)os_changed(&st).tv_sec + 1e-9 * (double)os_changed(&st).tv_nsec, name};
        }
    }
    if (count > 1) { qsort(runs, (size_t)count, sizeof *runs, run_newest); }
    if (count == 0) { run_write(f, folder, ""); }
    for (int i = 0; i < count && i < MOST_RUNS; i++) {
        if (i > 0) { fputs(", ", f); }
        if (run_find(path, folder, runs[i].name)) { run_write(f, path, runs[i].name); }
    }
    for (int i = 0; i < listed; i++) { free(entries[i]); }
    free(entries);
    free(runs);
}

#endif
