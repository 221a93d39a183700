/* logger.h -- OUT/log.jsonl: one JSON object a line, one line an event, one write() a line to an O_APPEND file; and what a
 * resumed run reads there.
 *
 *   {"event":"config", ...}      first line: version, time, run, program, precision, machine, argv, options, model, ...
 *   {"event":"step","step":7,"loss":3.9,"gnorm":0.8,"lr":0.0003,"ms":41.2,"tok_s":24854.4,
 *    "seconds":0.9,"memory":96337920,"tokens":7168}   since this process began; bytes in use; of the run so far
 *       ("skipped": the reason, if the step was;
 *       "padding": of the rows so far, if they have some: "tokens" and "tok_s" do not count it;
 *       "trained": the step's trained targets, if some are not trained. With several sources, "sources": the loss on each
 *       source's tokens in the order of --train, null for one without a row) with --fp8
 *       "quantised":{"weight":[0.0001,0.02],..}: for each kind of tensor in 8 bits, the share of a sample that became zero, and
 *       the share with fewer bits (subnormals).
 *   {"event":"val","step":..,"loss":..,"bpb":..}   {"event":"sample","step":..,"text":".."}
 *   {"event":"task","step":..,"file":"..","acc":..,"acc_norm":..,"questions":..}   one for each file of --tasks
 *   {"event":"slowest","step":..,"rank":..,"host":"..","busy_ms":..,"others_ms":..}   with several ranks (run/loop/slowest.h)
 *   {"event":"plan","step":..,"steps":..,"ms":..}   fewer steps from here on, which take `ms` now (run/loop/timing.h)
 *   {"event":"checkpoint","step":..,"path":"..","weights_crc32c":..}
 *   {"event":"resume","step":..,"run":"..","path":"..", ...}   {"event":"end","step":..,"reason":"..","seconds":..}
 *
 * "run" is the run's id; a run that branched off from another adds "parent_run" and "parent_step" (trainer_state.h). "step"
 * counts the optimizer steps done: the first step's line says 1, and the checkpoint step_N holds the state after the lines up
 * to N. A number that is not finite is written as null.
 * Invariants: everything up to the last newline is whole lines. All events of a step are written before its checkpoint, and
 * the log is flushed to disk before a checkpoint is renamed into place: a resumed run finds every line up to its step. A
 * resumed run cuts off the lines of later steps, the "end" of the run that it continues, and a torn last line.
 * A line that cannot be written (disk full) is an error; the logger cuts off the part that was written. A part that cannot be
 * read is an error, too, never the end of the log: otherwise the lines after it would be cut off. No line is longer than
 * readers take: long texts are cut.
 * A log that has another name as well (a backup made of hard links) is copied first, and the copy takes its place: the file
 * under the other name stays as it is. The logger looks for that when it opens the log, and at each checkpoint.
 */
#ifndef LLMC_LOGGER_H
#define LLMC_LOGGER_H

#include "llmc/base/utils.h"           // defines: fail, die, path_join
#include "llmc/files/config_file.h"    // defines: config_fields, config_write_value
#include "llmc/files/json.h"           // defines: json_parse, json_get, json_node_int, json_write_text, json_write_double
#include "llmc/base/sources.h"         // defines: SourceLosses
#include "llmc/files/output.h"         // defines: open_inside, open_output, is_open_file
#include "llmc/files/trainer_state.h"  // defines: TrainerState
#include "llmc/quantise.h"             // defines: QuantiseCounts, NUM_QUANTISED, quantised_names

#include <assert.h>

#ifndef LOG_LINE_MAX
#define LOG_LINE_MAX (1 << 20)  // most bytes of a line, for the writer and for readers; tests set it smaller
#endif
// most bytes of a sample, of the command line, and of the options' texts in a line: in JSON, a byte takes up to six
#define LOG_TEXT_MAX (LOG_LINE_MAX / 16)

/* Fails because of the line that begins at byte `at`: a log has no such lines, but a hole in a file is one. */
static inline bool log_line_too_long(const char* path, off_t at, Error* e) {
    return fail(e,
                "%s: the line at byte %lld is longer than %d bytes, wanted the log of a run\n"
                "  hint: move the file away; a resumed run then begins a new one",
                path, (long long)at, LOG_LINE_MAX);
}

typedef struct {
    int fd;  // -1: no log (all ranks but the first, and jobs that write nothing)
    char path[PATH_CAP];
    FILE* line;  // the event being written, in memory
    char* text;  // its text
    size_t size;
} Logger;

static inline void logger_none(Logger* g) {
    memset(g, 0, sizeof *g);
    g->fd = -1;
}

static inline void logger_close(Logger* g) {
    if (g->fd >= 0) { close(g->fd); }
    logger_none(g);
}

/* Returns whether a run resumed at `step` cuts this line off: a line of a later step, an event of this step that the run makes
 * again, or the end of the run that now continues. A line that is not ours stays. If memory is too short to read a line, that
 * is an error. */
static inline bool logger_is_later(const char* line, size_t length, int64_t step, const char* const* again, bool* later,
                                   Error* e) {
    Json j;
    Error cause = NO_ERROR;
    int64_t at = 0;
    *later = false;
    char* copy = (char*)malloc(length + 1);
    if (!copy) { return fail(e, "out of memory for a line of %zu bytes", length); }
    memcpy(copy, line, length);
    copy[length] = 0;
    errno = 0;
    if (!json_parse(&j, copy, length, "a line", &cause)) { return errno != ENOMEM || fail(e, "%s", cause.msg); }
    const JsonNode* event = json_get(&j, json_root(&j), "event");
    const bool has_step = json_node_int(&j, json_get(&j, json_root(&j), "step"), &at);
    *later = (has_step && at > step) || json_is_string(&j, event, "end");
    for (; *again; again++) { *later = *later || (has_step && at == step && json_is_string(&j, event, *again)); }
    json_free(&j);
    return true;
}

/* Finds the length in bytes that a run resumed at `step` keeps: whole lines up to the first that logger_is_later(). `buffer`
 * holds LOG_LINE_MAX bytes. */
static inline bool logger_find_cut(const Logger* g, char* buffer, int64_t step, const char* const* again, off_t* keep,
                                   Error* e) {
    size_t have = 0;  // bytes in the buffer; the file's byte *keep is the first
    for (*keep = 0;;) {
        const ssize_t got = pread(g->fd, buffer + have, LOG_LINE_MAX - have, *keep + (off_t)have);
        if (got < 0 && errno == EINTR) { continue; }
        if (got < 0) { return fail(e, "%s: reading failed: %s", g->path, strerror(errno)); }
        if (got == 0) { return true; }
        have += (size_t)got;
        const char *line = buffer, *newline;
        while ((newline = (const char*)memchr(line, '\n', (size_t)(buffer + have - line))) != NULL) {
            const size_t length = (size_t)(newline + 1 - line);
            bool later = false;
            Error cause = NO_ERROR;
            if (!logger_is_later(line, length, step, again, &later, &cause)) { return fail(e, "%s: %s", g->path, cause.msg); }
            if (later) { return true; }
            *keep += (off_t)length;
            line += length;
        }
        have = (size_t)(buffer + have - line);
        memmove(buffer, line, have);
        if (have == LOG_LINE_MAX) { return log_line_too_long(g->path, *keep, e); }
    }
}

/* Copies the first `keep` bytes of the log to the open file `to`, and flushes them. */
static inline bool logger_copy(const Logger* g, int to, off_t keep, char* buffer /* (LOG_LINE_MAX) */) {
    for (off_t at = 0; at < keep;) {
        const ssize_t got = pread(g->fd, buffer, size_min(LOG_LINE_MAX, (size_t)(keep - at)), at);
        if (got <= 0 || write(to, buffer, (size_t)got) != got) { return false; }
        at += got;
    }
    return os_flush(to);
}

/* Cuts the log to `keep` bytes. If its file has another name, only a copy is cut, which takes the log's name. */
static inline bool logger_cut(Logger* g, off_t keep, char* buffer /* (LOG_LINE_MAX) */, Error* e) {
    struct stat st;
    char tmp[PATH_CAP + 4];
    snprintf(tmp, sizeof tmp, "%s.tmp", g->path);
    unlink(tmp);  // left by a run that died here
    if (fstat(g->fd, &st) != 0) { return fail(e, "%s: cannot tell what it is: %s", g->path, strerror(errno)); }
    if (st.st_nlink <= 1) {
        return ftruncate(g->fd, keep) == 0 ||
               fail(e, "%s: cannot cut to %lld bytes: %s", g->path, (long long)keep, strerror(errno));
    }
    const int copy = open(tmp, O_RDWR | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666);
    const bool whole = copy >= 0 && logger_copy(g, copy, keep, buffer);
    if (!whole) { fail(e, "%s: cannot be copied to %s: %s", g->path, tmp, strerror(errno)); }
    if (!whole || !rename_output(tmp, g->path, e)) {
        if (copy >= 0) { close(copy); }
        unlink(tmp);
        return false;
    }
    close(g->fd);
    g->fd = copy;
    return true;
}

/* Opens OUT/log.jsonl: emptied for a new run (resume_step -1), otherwise cut back to resume_step, without the events of that
 * step that the run makes again: their names, then NULL. */
static inline bool logger_open_before(Logger* g, const char* out, int64_t resume_step, const char* const* again, Error* e) {
    logger_none(g);
    off_t keep = 0;
    if (!path_join(g->path, out, "log.jsonl", e)) { return false; }
    g->fd = open_output(g->path, O_RDWR | O_CREAT | O_APPEND, e);
    if (g->fd < 0) { return false; }
    char* buffer = (char*)malloc(LOG_LINE_MAX);
    bool ok = buffer || fail(e, "%s: out of memory to read it", g->path);
    ok = ok && (resume_step < 0 || logger_find_cut(g, buffer, resume_step, again, &keep, e)) && logger_cut(g, keep, buffer, e);
    free(buffer);
    if (!ok) { logger_close(g); }
    return ok;
}

static inline bool logger_open(Logger* g, const char* out, int64_t resume_step, Error* e) {
    static const char* const none[] = {NULL};
    return logger_open_before(g, out, resume_step, none, e);
}

/* Opens the log again if its file was moved or removed; otherwise later lines would be lost. Copies it if its file has got
 * another name. */
static inline bool logger_reopen(Logger* g, Error* e) {
    struct stat st;
    if (g->fd < 0) { return true; }
    if (!is_open_file(g->fd, g->path)) {
        const int again = open_output(g->path, O_RDWR | O_CREAT | O_APPEND, e);
        if (again < 0) { return false; }
        close(g->fd);
        g->fd = again;
    }
    if (fstat(g->fd, &st) != 0 || st.st_nlink <= 1) { return true; }
    char* buffer = (char*)malloc(LOG_LINE_MAX);
    const bool ok = buffer ? logger_cut(g, st.st_size, buffer, e) : fail(e, "%s: out of memory to copy it", g->path);
    free(buffer);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// one event: logger_begin, fields, logger_end

static inline void log_key(FILE* f, const char* key) {
    fputs(",", f);
    json_write_text(f, key);
    fputs(":", f);
}

static inline void log_int(FILE* f, const char* key, int64_t value) {
    log_key(f, key);
    fprintf(f, "%lld", (long long)value);
}

static inline void log_double(FILE* f, const char* key, double value) {
    log_key(f, key);
    json_write_double(f, value);
}

/* Writes a text, cut to LOG_TEXT_MAX bytes. */
static inline void log_bytes(FILE* f, const char* key, const char* text, size_t length) {
    size_t room = LOG_TEXT_MAX;
    log_key(f, key);
    json_write_part(f, text, length, &room);
}

static inline void log_text(FILE* f, const char* key, const char* text) { log_bytes(f, key, text, strlen(text)); }

/* Starts a line with its event and, unless it is negative, its step. Write its other fields to the returned stream with
 * log_int, log_double, log_text or fprintf. */
static inline FILE* logger_begin(Logger* g, const char* event, int64_t step) {
    g->line = open_memstream(&g->text, &g->size);
    if (!g->line) { die("out of memory for a line of the log"); }
    fputs("{\"event\":", g->line);
    json_write_text(g->line, event);
    if (step >= 0) { log_int(g->line, "step", step); }
    return g->line;
}

/* Ends the line and writes it. */
static inline bool logger_end(Logger* g, Error* e) {
    fputs("}\n", g->line);
    if (fclose(g->line) != 0 || !g->text) { die("out of memory for a line of the log"); }
    assert(g->size <= LOG_LINE_MAX);
    bool ok = true;
    if (g->fd >= 0) {
        size_t done = 0;
        while (done < g->size) {
            ssize_t n = write(g->fd, g->text + done, g->size - done);
            if (n < 0 && errno == EINTR) { continue; }
            if (n <= 0) { break; }
            done += (size_t)n;
        }
        if (done < g->size) {
            int cause = errno;
            off_t end = lseek(g->fd, 0, SEEK_END);
            // leave no half line in front of later lines
            bool undone = end >= (off_t)done && ftruncate(g->fd, end - (off_t)done) == 0;
            ok = fail(e, "%s: writing failed: %s%s", g->path, strerror(cause), undone ? "" : " (its last line is torn)");
        }
    }
    free(g->text);
    g->text = NULL;
    g->line = NULL;
    return ok;
}

/* Flushes the log to disk. Called before a checkpoint is renamed into place. */
static inline bool logger_sync(Logger* g, Error* e) {
    return g->fd < 0 || os_flush(g->fd) || fail(e, "%s: writing failed: %s", g->path, strerror(errno));
}

// ---------------------------------------------------------------------------------------------------------------------
// the events

static inline void log_argv(FILE* f, int argc, char** argv) {
    size_t room = LOG_TEXT_MAX;
    log_key(f, "argv");
    for (int i = 0; i < argc && room > 0; i++) {
        fputc(i ? ',' : '[', f);
        json_write_part(f, argv[i], strlen(argv[i]), &room);
    }
    fputs(argc > 0 ? "]" : "[]", f);
}

static inline void log_time(FILE* f) {
    char text[32];
    time_t now = time(NULL);
    struct tm utc;
    gmtime_r(&now, &utc);
    strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
    log_text(f, "time", text);
}

static inline void log_run(FILE* f, const TrainerState* s) {
    log_text(f, "run", s->run);
    if (!s->parent_run[0]) { return; }
    log_text(f, "parent_run", s->parent_run);
    log_int(f, "parent_step", (int64_t)s->parent_step);
}

/* How a run was started. */
typedef struct {
    const char *program, *precision;  // precision: FP32, BF16 or FP16
    const char* machine;              // run_machine()'s text
    const char* options;              // all options, as a JSON object, with at most LOG_TEXT_MAX bytes of texts
    int argc;
    char** argv;
} LoggedRun;

/* Logs the first line, which holds all that is needed to repeat the run. tokens: in the training files */
static inline bool log_config(Logger* g, const TrainerState* s, const LoggedRun* r, const ModelConfig* c, const ParamTable* t,
                              uint64_t tokens, Error* e) {
    FILE* f = logger_begin(g, "config", -1);
    log_text(f, "version", LLMC_VERSION);
    log_time(f);
    log_run(f, s);
    log_text(f, "program", r->program);
    log_text(f, "precision", r->precision);
    log_text(f, "machine", r->machine);
    log_argv(f, r->argc, r->argv);
    log_key(f, "options");
    fputs(r->options, f);
    fprintf(f, ",\"model\":{\"parameters\":%zu", t->num_params);
    for (int i = 0; i < NUM_CONFIG_FIELDS; i++) {
        if (config_fields[i].kind == CONFIG_FIXED) { continue; }
        log_key(f, config_fields[i].name);
        config_write_value(f, c, &config_fields[i], NULL);
    }
    log_double(f, "rope_theta", c->rope_theta);
    if (c->rope_llama3) { log_double(f, "rope_factor", c->rope_factor); }
    fputc('}', f);
    log_int(f, "train_tokens", (int64_t)tokens);
    return logger_end(g, e);
}

static inline void log_sources(FILE* f, const SourceLosses* sources) {
    log_key(f, "sources");
    for (int i = 0; i < sources->count; i++) {
        fputc(i ? ',' : '[', f);
        json_write_double(f, sources->sum[i] / sources->tokens[i]);
    }
    fputc(']', f);
}

/* Logs the shares of counts (NUM_QUANTISED), for the kinds that have any; nothing if there are none. */
static inline void log_quantised(FILE* f, const QuantiseCounts* counts) {
    char before = '{';
    if (counts[QUANTISED_NORM].values == 0) { return; }
    log_key(f, "quantised");
    for (int i = 0; i < NUM_QUANTISED; i++) {
        const QuantiseCounts* c = &counts[i];
        if (c->values == 0) { continue; }
        fprintf(f, "%c\"%s\":[", before, quantised_names[i]);
        before = ',';
        json_write_double(f, (double)c->flushed / (double)c->values);
        fputc(',', f);
        json_write_double(f, (double)c->subnormal / (double)c->values);
        fputc(']', f);
    }
    fputc('}', f);
}

/* Logs the slowest of several ranks: see run/loop/slowest.h. */
static inline bool log_slowest(Logger* g, int64_t step, int rank, const char* host, double ms, double others_ms, Error* e) {
    FILE* f = logger_begin(g, "slowest", step);
    log_int(f, "rank", rank);
    log_text(f, "host", host);
    fprintf(f, ",\"busy_ms\":%.3f,\"others_ms\":%.3f", ms, others_ms);
    return logger_end(g, e);
}

/* Logs that the run now ends after `steps` steps, each of which takes `ms`. */
static inline bool log_plan(Logger* g, int64_t step, int64_t steps, double ms, Error* e) {
    FILE* f = logger_begin(g, "plan", step);
    log_int(f, "steps", steps);
    fprintf(f, ",\"ms\":%.3f", ms);
    return logger_end(g, e);
}

/* Logs a validation. `bpb`: bits per byte; NaN: unknown, and not logged. */
static inline bool log_val(Logger* g, int64_t step, double loss, double bpb, Error* e) {
    FILE* f = logger_begin(g, "val", step);
    log_double(f, "loss", loss);
    if (!isnan(bpb)) { log_double(f, "bpb", bpb); }
    return logger_end(g, e);
}

static inline bool log_task(Logger* g, int64_t step, const char* file, double acc, double acc_norm, size_t questions,
                            Error* e) {
    FILE* f = logger_begin(g, "task", step);
    log_text(f, "file", file);
    log_double(f, "acc", acc);
    log_double(f, "acc_norm", acc_norm);
    log_int(f, "questions", (int64_t)questions);
    return logger_end(g, e);
}

static inline bool log_sample(Logger* g, int64_t step, const char* text, size_t len, Error* e) {
    FILE* f = logger_begin(g, "sample", step);
    log_bytes(f, "text", text, len);
    return logger_end(g, e);
}

/* Logs the checkpoint `path`, whose weights have the checksum `weights`, and flushes the log. Called before the checkpoint is
 * renamed into place. */
static inline bool log_checkpoint(Logger* g, int64_t step, const char* path, uint32_t weights, Error* e) {
    FILE* f = logger_begin(g, "checkpoint", step);
    log_text(f, "path", path);
    log_int(f, "weights_crc32c", weights);
    return logger_end(g, e) && logger_sync(g, e);
}

/* Logs that the run resumes from the checkpoint `path`, and flushes the log: from here on it is the run that wrote last. */
static inline bool log_resume(Logger* g, const TrainerState* s, const char* path, const LoggedRun* r, Error* e) {
    FILE* f = logger_begin(g, "resume", (int64_t)s->step);
    log_time(f);
    log_run(f, s);
    log_text(f, "path", path);
    log_text(f, "machine", r->machine);
    log_argv(f, r->argc, r->argv);
    log_key(f, "options");
    fputs(r->options, f);
    return logger_end(g, e) && logger_sync(g, e);
}

/* Logs the run's last line and flushes the log; `reason`: "done", "stop-after", "patience", "signal", "not finite" or
 * "error". */
static inline bool log_end(Logger* g, int64_t step, const char* reason, double seconds, Error* e) {
    FILE* f = logger_begin(g, "end", step);
    log_text(f, "reason", reason);
    fprintf(f, ",\"seconds\":%.3f", seconds);
    return logger_end(g, e) && logger_sync(g, e);
}

// ---------------------------------------------------------------------------------------------------------------------
// what a resumed run learns from the log: which run wrote last, and the checksum that a checkpoint's weights had when they were
// written. A missing log is fine, and lines that are not whole events are skipped: the log is the user's to edit.

typedef struct {
    RunId run;             // of the last "config" or "resume"; "": unknown
    RunId parent_run;      // the run that it branched off from; "": it began anew
    uint64_t parent_step;  // and the step where
    bool has_weights;      // the last "checkpoint" of the step that was asked for holds a checksum:
    uint32_t weights;      // CRC-32C of its weights
} LogHistory;

/* Copies a member that is a run's id; "" if it is none. */
static inline void log_history_id(const Json* j, const char* key, RunId id) {
    const char* text = json_string(j, json_get(j, json_root(j), key), NULL);
    snprintf(id, sizeof(RunId), "%s", text && strlen(text) < sizeof(RunId) ? text : "");
}

/* Takes the facts of one event. */
static inline void log_history_event(LogHistory* h, const Json* j, uint64_t step) {
    const JsonNode* root = json_root(j);
    const char* event = json_string(j, json_get(j, root, "event"), NULL);
    uint64_t at = 0;
    int64_t crc = 0;
    if (!event) { return; }
    if (strcmp(event, "config") == 0 || strcmp(event, "resume") == 0) {
        log_history_id(j, "run", h->run);
        log_history_id(j, "parent_run", h->parent_run);
        if (!json_node_u64(j, json_get(j, root, "parent_step"), &h->parent_step)) { h->parent_step = 0; }
    } else if (strcmp(event, "checkpoint") == 0 && json_node_u64(j, json_get(j, root, "step"), &at) && at == step) {
        h->has_weights = json_node_int(j, json_get(j, root, "weights_crc32c"), &crc) && crc >= 0 && crc <= UINT32_MAX;
        h->weights = (uint32_t)crc;
    }
}

/* Reads OUT/log.jsonl for a run that resumes from `step`. */
static inline bool log_history_read(LogHistory* h, const char* out, uint64_t step, Error* e) {
    enum { CAP = LOG_LINE_MAX + 1 };
    char path[PATH_CAP];
    Error cause = NO_ERROR;
    memset(h, 0, sizeof *h);
    if (!path_join(path, out, "log.jsonl", e)) { return false; }
    const int fd = open_inside(out, "log.jsonl", &cause);
    if (fd < 0 && (errno == 0 || errno == ENOENT)) { return true; }  // opening it for writing refuses what is no file
    FILE* f = fd >= 0 ? fdopen(fd, "rb") : NULL;
    if (!f && fd >= 0) { close(fd); }
    if (!f) { return fail(e, "%s", fd < 0 ? cause.msg : strerror(errno)); }
    char* line = (char*)xmalloc(CAP);
    bool ok = true;
    while (ok) {
        line[CAP - 1] = 1;  // fgets() puts a 0 here only when it fills the buffer; strlen() would stop at the 0s of a hole
        if (!fgets(line, CAP, f)) { break; }
        Json j;
        Error ignored = NO_ERROR;
        const size_t length = strlen(line);
        const bool whole = length > 0 && line[length - 1] == '\n';
        if (!line[CAP - 1] && line[CAP - 2] != '\n') { ok = log_line_too_long(path, ftello(f) - LOG_LINE_MAX, e); }
        // nearly all lines are steps, which do not matter here
        if (!whole || strncmp(line, "{\"event\":\"step\"", 15) == 0) { continue; }
        if (!json_parse(&j, xstrdup(line), length, path, &ignored)) { continue; }
        log_history_event(h, &j, step);
        json_free(&j);
    }
    ok = ok && (!ferror(f) || fail(e, "%s: reading failed: %s", path, strerror(errno)));
    free(line);
    fclose(f);
    return ok;
}

#endif
