/* runs.h -- the runs of the folder that ./serve shows: their checkpoints, and in which state each is, by the end of its log
 * (llmc/files/logger.h) and the lock that a running trainer holds.
 *
 * A run is read where it is the working folder (run_enter()), so that no link can take its place between two calls.
 */
#ifndef SERVE_RUNS_H
#define SERVE_RUNS_H

#include "llmc/base/text.h"         // defines: text_starts
#include "llmc/files/checkpoint.h"  // defines: checkpoint_list, out_is_locked
#include "llmc/files/folder.h"      // defines: folder_has
#include "llmc/files/json.h"        // defines: json_parse_line, json_write_text, json_write_value
#include "llmc/files/output.h"      // defines: open_inside
#include "llmc/text/text_rules.h"   // defines: TextRules, text_rules_find_template, text_rules_free

#include <ftw.h>

enum { LOG_END = 128 << 10, FRESH_SECONDS = 60, MOST_RUNS = 200 };  // LOG_END: bytes of a log that are looked through

/* The folder that the server shows: a run's, or of runs. */
typedef struct {
    int home;          // the folder in which the server began
    const char* path;  // from there
} Runs;

/* Makes a run's folder the working folder: the one of this name in a folder of runs, "": that itself. It may be no link. */
static inline bool run_enter(const Runs* r, const char* name) {
    if (fchdir(r->home) != 0 || chdir(r->path) != 0 || *name == '.' || strchr(name, '/')) { return false; }
    if (!*name) { return true; }
    const int fd = open(name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    const bool entered = fd >= 0 && fchdir(fd) == 0;
    if (fd >= 0) { close(fd); }
    return entered;
}

/* For nftw(): returns whether it has come to something that may lead out of a folder, or is not of the folder's owner. */
static inline int is_foreign(const char* path, const struct stat* st, int type, struct FTW* at) {
    static uid_t owner;
    (void)path, (void)type, owner = at->level == 0 ? st->st_uid : owner;
    return (!S_ISREG(st->st_mode) && !S_ISDIR(st->st_mode)) || st->st_uid != owner;
}

/* Checks that whoever reads a checkpoint of the working folder follows no link there. */
static inline bool checkpoint_is_own(const char* name, Error* e) {
    const int found = nftw(name, is_foreign, 8, FTW_PHYS);
    return found == 0 || fail(e, "%s: %s", name, found > 0 ? "is or holds a link, wanted its owner's files" : strerror(errno));
}

/* Returns whether a checkpoint of the working folder has a form of a chat. */
static inline bool checkpoint_chats(const char* name) {
    char path[PATH_CAP], config[PATH_CAP];
    size_t size = 0;
    Error e = NO_ERROR;
    Tokenizer t = {.path = path};
    TextRules r = {.tokenizer = &t};
    if (!checkpoint_is_own(name, &e)) { return false; }
    snprintf(path, sizeof path, "%s/tokenizer.json", name);
    snprintf(config, sizeof config, "%s/tokenizer_config.json", name);
    t.config = read_file(config, &size, 1 << 20, &e);
    const bool found = text_rules_find_template(&r, &e) && r.chat_template;
    free(t.config);
    text_rules_free(&r);
    return found;
}

/* Returns whether a line is an event of this name. Python's json writes a space after each colon. */
static inline bool log_is(const char* line, const char* name) {
    if (!text_starts(line, "{\"event\":")) { return false; }
    line += 9 + (line[9] == ' ');
    return *line == '"' && text_starts(line + 1, name) && line[1 + strlen(name)] == '"';
}

/* Writes the last facts of a log as members of an object. Returns how the log ends: finished, stopped, or killed. */
static inline const char* log_write_end(FILE* f, int fd, off_t size) {
    static const struct {
        const char *event, *member, *name;
    } facts[] = {{"step", "step", "step"}, {"step", "loss", "loss"}, {"val", "loss", "val"}, {"end", "reason", "reason"}};
    const char* ends = "killed";
    char* text = (char*)xcalloc(LOG_END + 1, 1);
    const ssize_t got = pread(fd, text, LOG_END, size > LOG_END ? size - LOG_END : 0);
    for (int k = 0; k < 4; k++) {
        const char *last = NULL, *end;
        Json j;
        Error ignored = NO_ERROR;
        for (const char* line = text; got > 0 && (end = memchr(line, '\n', (size_t)(text + got - line))); line = end + 1) {
            if (log_is(line, facts[k].event)) { last = line; }
        }
        const bool parsed = last && json_parse_line(&j, last, strcspn(last, "\n"), "log", &ignored);
        const JsonNode* n = parsed ? json_get(&j, json_root(&j), facts[k].member) : NULL;
        double value = 0;  // of a short number that is finite: a NaN is no JSON, and the page would lose the whole list
        const bool fits = n && n->length < 80 && (k == 3 || (json_node_double(&j, n, &value) && isfinite(value)));
        fprintf(f, ", \"%s\": %s", facts[k].name, fits ? "" : "null");
        if (fits) { json_write_value(f, &j, n); }
        if (n && k == 3) { ends = json_is_string(&j, n, "done") || json_is_string(&j, n, "patience") ? "finished" : "stopped"; }
        if (parsed) { json_free(&j); }
    }
    free(text);
    return ends;
}

/* Writes the run of the working folder as an object: its name, when its log was written, its last step and losses, the reason
 * of its end, its state; its checkpoints, the oldest first, and whether the newest has a form of a chat. */
static inline void run_write(FILE* f, const char* name) {
    struct stat st = {0};
    uint64_t* steps = NULL;
    size_t count = 0;
    char checkpoint[40] = "";
    Error ignored = NO_ERROR;
    const int fd = open_inside(".", "log.jsonl", &ignored);
    const bool there = fd >= 0 && fstat(fd, &st) == 0;
    fputs("{\"name\": ", f);
    json_write_text(f, name);
    fprintf(f, ", \"time\": %lld", (long long)st.st_mtime);
    const char* ends = log_write_end(f, fd, st.st_size);
    if (fd >= 0) { close(fd); }
    const bool locks = folder_has(".", ".lock"), fresh = time(NULL) - st.st_mtime < FRESH_SECONDS;
    const bool runs = locks ? out_is_locked(".") : fresh && strcmp(ends, "killed") == 0;
    fprintf(f, ", \"state\": \"%s\", \"checkpoints\": [", !there ? "empty" : runs ? "running" : ends);
    if (!checkpoint_list(".", &steps, &count, &ignored)) { count = 0; }
    for (size_t i = count; i-- > 0;) {
        snprintf(checkpoint, sizeof checkpoint, "step_%08" PRIu64, steps[i]);
        fprintf(f, "\"%s\"%s", checkpoint, i > 0 ? ", " : "");
    }
    fprintf(f, "], \"chat\": %s}", count > 0 && checkpoint_chats(checkpoint) ? "true" : "false");
    free(steps);
}

/* Returns when the log of a folder in the working folder was written; NaN: it has none, and is no run. */
static inline double run_time(const struct dirent* folder) {
    char log[NAME_MAX + 16];
    struct stat st;
    snprintf(log, sizeof log, "%s/log.jsonl", folder->d_name);
    if (folder->d_name[0] == '.' || lstat(log, &st) != 0) { return NAN; }
    return (double)os_changed(&st).tv_sec + 1e-9 * (double)os_changed(&st).tv_nsec;
}

static inline int run_is_one(const struct dirent* folder) { return !isnan(run_time(folder)); }

static inline int run_is_newer(const struct dirent** a, const struct dirent** b) {
    const double s = run_time(*a), t = run_time(*b);
    return (s < t) - (s > t);
}

/* Writes the newest runs of a folder, with commas between; the folder alone if it is a run, or has none. */
static inline void runs_write(FILE* f, const Runs* r) {
    struct dirent** runs = NULL;
    const char* comma = "";
    const bool many = run_enter(r, "") && !folder_has(".", "log.jsonl");
    const int count = many ? scandir(".", &runs, run_is_one, run_is_newer) : 0;
    if (count <= 0 && run_enter(r, "")) { run_write(f, ""); }
    for (int i = 0; i < count; free(runs[i++])) {
        if (i >= MOST_RUNS || !run_enter(r, runs[i]->d_name)) { continue; }
        fputs(comma, f);
        run_write(f, runs[i]->d_name);
        comma = ", ";
    }
    free(runs);
}

#endif
