/* run_log.h -- sends a run's log (llmc/files/logger.h) to a client as server-sent events, as it grows and is cut, and says in
 * which state a run is.
 *
 * An event's id is the place where its line ends in the log, and a checksum of the bytes before that place. So a client
 * continues after the last id that it got. It begins anew where the log no longer has these bytes. The server keeps nothing.
 *
 * The steps that the log has when a client begins are thinned to about MOST_BUCKETS buckets of consecutive steps, and so are
 * the validations. Of a bucket the server sends the last line, and as "event: peak" those that stand out: the least and the
 * greatest loss, the greatest norm of a gradient, and the first loss that is not finite. It sends all other events, but no line
 * that is longer than LONGEST_LINE.
 */
#ifndef SERVE_RUN_LOG_H
#define SERVE_RUN_LOG_H

#include "dev/serve/buffer.h"       // defines: Buffer, buffer_add, buffer_text
#include "llmc/base/crc.h"          // defines: crc_of
#include "llmc/base/text.h"         // defines: text_starts
#include "llmc/files/checkpoint.h"  // defines: out_is_locked
#include "llmc/files/folder.h"      // defines: folder_has, folder_order
#include "llmc/files/json.h"        // defines: json_parse_line, json_write_text
#include "llmc/files/output.h"      // defines: open_inside

#include <inttypes.h>

#ifndef LONGEST_LINE  // the fuzzer sets both smaller
#define LONGEST_LINE (1 << 20)
#define MOST_BUCKETS 1000
#endif
enum { TAIL = 256, NO_ID = 1, NUM_PEAKS = 4, FRESH_SECONDS = 60, MOST_RUNS = 200 };

/* How far a client has read. All zeros: it begins. */
typedef struct {
    uint64_t id;
    bool counted;         // `history` is known
    bool passes;          // the rest of a line that is too long is passed over
    bool ranges, ends;    // it asks for the steps from first to last alone; and for no events that are still to come
    uint64_t history[2];  // steps and validations that were there when it began
    uint64_t seen[2];     // those read so far
    double first, last;
} LogPlace;

/* Lines of one series that follow each other, as far as they lie in memory. */
typedef struct {
    const char *peaks[NUM_PEAKS], *last;
    double values[NUM_PEAKS];
} Bucket;

/* Returns the id of the event that ends at byte `end` of the log: the n bytes before it are given, at most TAIL. */
static inline uint64_t log_id_of(uint64_t end, const char* before, size_t n) {
    return end << 24 | (crc_of(before, n) & 0xffffff);
}

/* Reads that id; 0 for the start of the log, NO_ID where the log is shorter. */
static inline uint64_t log_id(int fd, uint64_t end) {
    char tail[TAIL];
    const size_t n = size_min(end, TAIL);
    return pread(fd, tail, n, (off_t)(end - n)) == (ssize_t)n ? log_id_of(end, tail, n) : NO_ID;
}

/* Returns the number after a name such as "\"loss\":" in a line of n bytes that a NUL or a newline follows; NaN: none. */
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

static const Bucket no_lines = {{NULL}, NULL, {-INFINITY, -INFINITY, -INFINITY, -INFINITY}};

/* Marks the lines of a bucket that are sent, at their places in the block, and empties it. */
static inline void bucket_end(Bucket* b, const char* block, char* marks) {
    for (int i = 0; i < NUM_PEAKS; i++) {
        if (b->peaks[i]) { marks[b->peaks[i] - block] = 'p'; }
    }
    if (b->last) { marks[b->last - block] = 's'; }
    *b = no_lines;
}

static inline void bucket_add(Bucket* b, const char* line, size_t n) {
    const double loss = log_number(line, n, "\"loss\":");
    const double values[NUM_PEAKS] = {loss, -loss, log_number(line, n, "\"gnorm\":"), isnan(loss) ? 1 : NAN};
    for (int i = 0; i < NUM_PEAKS; i++) {
        if (values[i] > b->values[i]) { b->values[i] = values[i], b->peaks[i] = line; }
    }
    b->last = line;
}

/* Marks the lines of a block, which ends with a newline, that a client gets. */
static inline void log_choose(LogPlace* p, const char* block, const char* end, char* marks) {
    Bucket buckets[2] = {no_lines, no_lines};
    for (const char *line = block, *next; line < end; line = next) {
        next = (const char*)memchr(line, '\n', (size_t)(end - line)) + 1;
        const size_t n = (size_t)(next - line);
        const int i = log_is(line, "step") ? 0 : log_is(line, "val") ? 1 : 2;
        const double step = p->ranges ? log_number(line, n, "\"step\":") : 0;
        const bool passed = p->passes || (p->ranges && (i == 2 || !(step >= p->first && step <= p->last)));
        p->passes = false;
        if (passed) { continue; }
        if (i == 2) {  // a line without an event is none of a run
            marks[line - block] = text_starts(line, "{\"event\":") ? 's' : 0;
            continue;
        }
        const uint64_t seen = ++p->seen[i], stride = p->history[i] / MOST_BUCKETS + 1;
        if (!p->counted) { continue; }
        bucket_add(&buckets[i], line, n);
        if (seen % stride == 0 || seen >= p->history[i]) { bucket_end(&buckets[i], block, marks); }
    }
    for (int i = 0; i < 2; i++) { bucket_end(&buckets[i], block, marks); }
}

/* Adds the marked lines of a block, whose first byte is byte `at` of the log. Returns whether there are any. */
static inline bool log_add(int fd, uint64_t at, const char* block, const char* end, const char* marks, Buffer* out) {
    char head[64];
    bool some = false;
    for (const char *line = block, *next; line < end; line = next) {
        next = (const char*)memchr(line, '\n', (size_t)(end - line)) + 1;
        const char mark = marks[line - block];
        if (!mark) { continue; }
        some = true;
        const uint64_t end_at = at + (uint64_t)(next - block), n = size_min(end_at, TAIL);
        const bool held = (uint64_t)(next - block) >= n;  // most ids need no system call
        snprintf(head, sizeof head, "%sid: %" PRIu64 "\ndata: ", mark == 'p' ? "event: peak\n" : "",
                 held ? log_id_of(end_at, next - n, n) : log_id(fd, end_at));
        buffer_text(out, head);
        buffer_add(out, line, (size_t)(next - line));
        buffer_text(out, "\n");
    }
    return some;
}

/* Reads blocks of lines until some are sent to `out`; NULL: reads all, to count them. */
static inline void log_read(LogPlace* p, int fd, Buffer* out) {
    char *block = (char*)xmalloc(LONGEST_LINE + 1), *marks = (char*)xmalloc(LONGEST_LINE);
    uint64_t at = p->id >> 24;
    ssize_t n = 0;
    bool sent = false;
    while (!sent && (n = pread(fd, block, LONGEST_LINE, (off_t)at)) > 0) {
        const char* newline = (const char*)memrchr(block, '\n', (size_t)n);
        if (!newline && n < LONGEST_LINE) { break; }  // the rest of the line is still to come
        if (!newline) {
            p->passes = true, at += (uint64_t)n;
            continue;
        }
        block[n] = 0;
        memset(marks, 0, (size_t)n);
        log_choose(p, block, newline + 1, marks);
        sent = out && log_add(fd, at, block, newline + 1, marks, out);
        at += (uint64_t)(newline + 1 - block);
    }
    p->id = log_id(fd, at);
    free(block);
    free(marks);
}

/* Adds the lines of a run that a client has not got yet: if they are many, only the next part of them. */
static inline void log_send(const char* run, LogPlace* p, Buffer* out) {
    Error ignored = NO_ERROR;
    const int fd = open_inside(run, "log.jsonl", &ignored);
    if (fd < 0) { return; }
    if (log_id(fd, p->id >> 24) != p->id) {
        buffer_text(out, "event: reset\ndata: {}\n\n");
        *p = (LogPlace){.ranges = p->ranges, .ends = p->ends, .first = p->first, .last = p->last};
    }
    if (!p->counted) {
        LogPlace end = *p;
        log_read(&end, fd, NULL);
        memcpy(p->history, end.seen, sizeof p->history);
        p->counted = true;
    }
    log_read(p, fd, out);
    close(fd);
}

// ---------------------------------------------------------------------------------------------------------------------
// how a run stands, by the end of its log and the lock that a running trainer holds

enum { LOG_END = 128 << 10 };  // bytes of a log that are looked through
static const char* const run_numbers[] = {"time", "step", "loss", "val"};

/* Writes the run of a folder as an object: its name, its state, when its log was written, its last step and losses, and the
 * reason of its end. */
static inline void run_write(FILE* f, const char* dir, const char* name) {
    struct stat st = {0};
    Error ignored = NO_ERROR;
    Json j;
    double step = NAN, loss = NAN, val = NAN;
    const int fd = open_inside(dir, "log.jsonl", &ignored);
    char *text = (char*)xmalloc(LOG_END + 1), *reason = NULL;
    const off_t from = fd >= 0 && fstat(fd, &st) == 0 && st.st_size > LOG_END ? st.st_size - LOG_END : 0;
    const ssize_t n = fd >= 0 ? pread(fd, text, LOG_END, from) : 0;
    text[n > 0 ? n : 0] = 0;
    if (fd >= 0) { close(fd); }
    for (char *line = text, *end; (end = strchr(line, '\n')); line = end + 1) {
        const size_t length = (size_t)(end - line);
        if (log_is(line, "step")) {
            step = log_number(line, length, "\"step\":"), loss = log_number(line, length, "\"loss\":");
        }
        if (log_is(line, "val")) { val = log_number(line, length, "\"loss\":"); }
        if (!log_is(line, "end") || !json_parse_line(&j, line, length, "log", &ignored)) { continue; }
        const char* found = json_string(&j, json_get(&j, json_root(&j), "reason"), NULL);
        free(reason);
        reason = xstrdup(found ? found : "");
        json_free(&j);
    }
    const bool locks = folder_has(dir, ".lock"), fresh = time(NULL) - st.st_mtime < FRESH_SECONDS;
    const char* state = fd < 0                        ? "empty"
                        : locks && out_is_locked(dir) ? "running"
                        : reason ? (strcmp(reason, "done") == 0 || strcmp(reason, "patience") == 0 ? "finished" : "stopped")
                        : !locks && fresh ? "running"
                                          : "killed";
    const double numbers[] = {(double)st.st_mtime, step, loss, val};
    fputs("{\"name\": ", f);
    json_write_text(f, name);
    fprintf(f, ", \"state\": \"%s\", \"reason\": ", state);
    json_write_text(f, reason ? reason : "");
    for (int i = 0; i < 4; i++) { fprintf(f, ", \"%s\": ", run_numbers[i]), json_write_double(f, numbers[i]); }
    fputc('}', f);
    free(reason);
    free(text);
}

/* Finds the folder of a run in a folder of runs by its name; "": the folder itself. It is no link: see open_inside(). */
static inline bool run_find(char path[PATH_CAP], const char* folder, const char* name) {
    struct stat st;
    Error ignored = NO_ERROR;
    if (!*name) { return snprintf(path, PATH_CAP, "%s", folder) < PATH_CAP; }
    return *name != '.' && !strchr(name, '/') && path_join(path, folder, name, &ignored) && lstat(path, &st) == 0 &&
           S_ISDIR(st.st_mode);
}

/* Writes the runs of a folder, with commas between; the folder alone if it is a run, or has none. */
static inline void runs_write(FILE* f, const char* folder) {
    char path[PATH_CAP];
    struct dirent** names = NULL;
    const bool one = folder_has(folder, "log.jsonl");
    const int listed = one ? 0 : scandir(folder, &names, NULL, folder_order);
    int count = 0;
    for (int i = listed; i-- > 0; free(names[i])) {
        if (count == MOST_RUNS || !run_find(path, folder, names[i]->d_name) || !folder_has(path, "log.jsonl")) { continue; }
        fputs(count++ ? ", " : "", f);
        run_write(f, path, names[i]->d_name);
    }
    free(names);
    if (count == 0) { run_write(f, folder, ""); }
}

#endif
