/* log_history.h -- what a resumed run learns from OUT/log.jsonl: which run wrote last, and the checksum that a checkpoint's
 * weights had when they were written. logger.h describes the events.
 *
 * A missing log is fine, and the reader skips lines that are not whole events: the log is the user's to edit.
 */
#ifndef LLMC_LOG_HISTORY_H
#define LLMC_LOG_HISTORY_H

#include "llmc/base/utils.h"  // defines: fail, path_join

#include "llmc/files/json.h"  // defines: json_parse, json_get, json_string, json_node_int, json_node_u64
#include "llmc/files/trainer_state.h"

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
    struct stat st;
    memset(h, 0, sizeof *h);
    if (!path_join(path, out, "log.jsonl", e)) { return false; }
    if (stat(path, &st) != 0 || !S_ISREG(st.st_mode)) { return true; }  // opening it for writing refuses what is no file
    FILE* f = fopen(path, "rb");
    if (!f) { return fail(e, "%s: cannot open: %s", path, strerror(errno)); }
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
