/* checkpoint.h -- saves a run's state to disk, whole or not at all.
 *
 *   OUT/.lock                        held (flock) while a run writes into OUT
 *   OUT/step_00001000/               a model folder (model_folder.h) that other programs can read, or with LoRA the adapters'
 *                                    (adapter.h), plus
 *       state_rank00000.safetensors  optimizer state of one rank
 *       trainer_state.json           where the run stands; size and CRC-32C of every other file
 *   OUT/step_00001000.tmp/           a checkpoint that was being written or removed when a run died
 *   OUT/step_00001000.set_back/      a checkpoint later than the step to which a run was set back; for the user to delete
 *
 * Invariants:
 *   1. A folder gets the name step_N only when it is complete and flushed to disk. It is built as step_N.tmp: write, fsync and
 *      list each file; then write trainer_state.json, which holds the list; fsync the folder; rename it; fsync OUT. The list
 *      comes from the writers, not from reading the folder, and must pass the reader's own checks before the rename. Removal
 *      renames to .tmp first. So a process may die at any moment.
 *      With several ranks, rank 0 makes the folder. Then each rank writes and flushes its own state, and sends rank 0 the
 *      file's size and checksum. Then rank 0 continues (save.h).
 *   2. Resuming trusts nothing. A run that resumes first compares the sizes and checksums of all files, trainer_state.json
 *      included. If the newest checkpoint is damaged, it warns and takes the checkpoint before it. Loading the model alone does
 *      not open the optimizer state; it checks the weights' checksums while it reads them.
 *      The newest checkpoint is the highest step of the run that wrote last. When a run is set back to step N, the log
 *      says so first (logger.h); then all later steps get the name .set_back. If the process dies between the two,
 *      later steps of other runs do not count.
 *   3. A failed write (full disk) removes the .tmp and leaves older checkpoints alone. Pruning never touches the
 *      checkpoint that was just written.
 *   4. OUT and step_N may be links (to another disk). Removing a step that is a link removes the link.
 *
 * Formats: optimizer_state.h and trainer_state.h describe the two state files. A caller that writes a file into the folder
 * itself (tokenizer, plans) lists it with checkpoint_add().
 */
#ifndef LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_H

#include "llmc/base/utils.h"

#include <inttypes.h>
#include <signal.h>
#include <time.h>

#include "llmc/files/adapter.h"
#include "llmc/files/file_sums.h"
#include "llmc/files/folder.h"
#include "llmc/files/logger.h"
#include "llmc/files/model_folder.h"
#include "llmc/files/optimizer_state.h"
#include "llmc/files/side_files.h"
#include "llmc/files/trainer_state.h"

// ---------------------------------------------------------------------------------------------------------------------
// the lock

/* Gives up a locked .lock that has another name as well, and sets *fd to -1. A backup of hard links shares the lock of its
 * original: it gets one of its own. A file that does not hold a process's number, as locks do, is refused. */
static inline bool out_unshare_lock(int* fd, const char* path, Error* e) {
    char text[32] = "", *end = text;
    struct stat st;
    if (fstat(*fd, &st) != 0 || st.st_nlink <= 1) { return true; }
    const ssize_t n = pread(*fd, text, sizeof text - 1, 0);
    const bool ours = n == 0 || (n > 0 && strtol(text, &end, 10) > 0 && strcmp(end, "\n") == 0);
    bool ok = ours || fail(e, "%s: is a hard link to another file, wanted the lock of this folder alone", path);
    ok = ok && (unlink(path) == 0 || fail(e, "%s: cannot remove it: %s", path, strerror(errno)));
    close(*fd);
    *fd = -1;
    return ok;
}

/* Returns the process that holds the lock of the open file, as it wrote it there; 0: unknown. */
static inline long out_owner(int fd) {
    char text[32] = "";
    return pread(fd, text, sizeof text - 1, 0) > 0 ? strtol(text, NULL, 10) : 0;
}

enum { LOCK_WAIT_SECONDS = 60 };  // for an owner that is ending

/* Makes the folder and locks it for this process. *fd holds the lock until out_unlock() or until the process ends in any
 * way. Fails while another process holds the lock; waits for one that is ending: a supervisor restarts a killed run at once. */
static inline bool out_lock(int* fd, const char* out, Error* e) {
    char path[PATH_CAP], text[32] = "";
    bool busy = false;
    double until = 0;    // the end of the wait; 0: none began
    bool lives = false;  // the owner was not ending
    *fd = -1;
    if (!make_directories(out, e) || !path_join(path, out, ".lock", e)) { return false; }
    while (*fd < 0) {
        *fd = open_locked(path, O_RDWR | O_CREAT, &busy, e);
        if (*fd < 0 || (!busy && !out_unshare_lock(fd, path, e))) { return false; }
        if (!busy) { continue; }
        const struct timespec moment = {0, 20000000};
        const long owner = out_owner(*fd);
        close(*fd);
        *fd = -1;
        const bool ending = process_is_ending(owner);
        if (!ending && !lives) {  // or it has just gone: look again
            lives = true;
            continue;
        }
        if (!ending || (until > 0 && now_seconds() > until)) {
            return fail(e,
                        "%s: another run (process %ld) is writing into this folder, wanted a folder of its own\n"
                        "  hint: wait for it to end, or choose another --out",
                        out, owner);
        }
        if (until == 0) {
            warn("%s: process %ld, which was killed, is not gone yet: waiting for it", out, owner);
            until = now_seconds() + LOCK_WAIT_SECONDS;
        }
        nanosleep(&moment, NULL);
    }
    const int n = snprintf(text, sizeof text, "%ld\n", (long)getpid());
    // only the message above uses the number, so a full disk does not matter here
    if (ftruncate(*fd, 0) == 0 && pwrite(*fd, text, (size_t)n, 0) != n) { errno = 0; }
    return true;
}

/* Checks that this process still holds the lock of OUT: the folder may have been removed or moved, and even made again by
 * another run. If it is gone, makes and locks it again, with a warning. If another run has taken its place, fails and sets *fd
 * to -1. */
static inline bool out_keep(int* fd, const char* out, Error* e) {
    char path[PATH_CAP];
    if (!path_join(path, out, ".lock", e)) { return false; }
    if (is_open_file(*fd, path)) { return true; }
    close(*fd);
    *fd = -1;
    if (folder_has(out, ".lock")) {
        return fail(e, "%s: is another run's folder now: the one that this run locked was moved or removed", out);
    }
    warn("%s: it, or .lock in it, was moved or removed while this run uses it: it is made again", out);
    Error cause = NO_ERROR;
    if (out_lock(fd, out, &cause)) { return true; }
    cause.msg[strcspn(cause.msg, "\n")] = 0;  // drops its hint, which is for a run that begins
    return fail(e, "%s", cause.msg);
}

static inline void out_unlock(int* fd) {
    if (*fd >= 0) { close(*fd); }
    *fd = -1;
}

/* Returns whether a run is writing into the folder. For messages: the answer may be old already. */
static inline bool out_is_locked(const char* out) {
    char path[PATH_CAP];
    Error ignored = NO_ERROR;
    const int fd = path_join(path, out, ".lock", &ignored) ? open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC) : -1;
    const bool locked = fd >= 0 && flock(fd, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    if (fd >= 0) { close(fd); }
    return locked;
}

// ---------------------------------------------------------------------------------------------------------------------
// writing a checkpoint

typedef struct {
    char out[PATH_CAP];
    char dir[PATH_CAP];  // its final path
    char tmp[PATH_CAP];  // where it is built: callers may add files here until checkpoint_commit(); "": nothing to remove
    FileSums sums;       // of the files written so far
} Checkpoint;

/* Writes the path OUT/step_NNNNNNNN with an ending such as "" or ".tmp". */
static inline bool checkpoint_path(char* path /* PATH_CAP */, const char* out, uint64_t step, const char* end, Error* e) {
    char name[80];
    snprintf(name, sizeof name, "step_%08" PRIu64 "%s", step, end);
    return path_join(path, out, name, e);
}

/* Gives the checkpoint up: removes the .tmp folder. Harmless after a commit. */
static inline void checkpoint_abort(Checkpoint* k) {
    Error ignored = NO_ERROR;
    if (k->tmp[0] && !remove_tree(k->tmp, &ignored)) { warn("%s", ignored.msg); }
    k->tmp[0] = 0;
    file_sums_free(&k->sums);
}

/* Ends another rank's part in a checkpoint, written or not: rank 0 commits or removes the folder. */
static inline void checkpoint_leave(Checkpoint* k) {
    k->tmp[0] = 0;
    file_sums_free(&k->sums);
}

/* Joins a checkpoint that rank 0 has begun: another rank adds its state to it, then calls checkpoint_leave(). */
static inline bool checkpoint_join(Checkpoint* k, const char* out, uint64_t step, Error* e) {
    memset(k, 0, sizeof *k);
    if (!checkpoint_path(k->dir, out, step, "", e) || !checkpoint_path(k->tmp, out, step, ".tmp", e)) { return false; }
    snprintf(k->out, sizeof k->out, "%s", out);  // fits, since the longer paths did
    return true;
}

/* Starts a checkpoint in an empty OUT/step_N.tmp. Write the parts below next, then call checkpoint_commit(). If any of them
 * fails, call checkpoint_abort(). */
static inline bool checkpoint_begin(Checkpoint* k, const char* out, uint64_t step, Error* e) {
    if (!checkpoint_join(k, out, step, e)) { return false; }
    LLMC_FAULT_POINT("begin");
    return remove_tree(k->tmp, e) && make_directories(k->tmp, e);
}

/* Flushes, sums and lists a file that was written into the folder. */
static inline bool checkpoint_add(Checkpoint* k, const char* name, Error* e) {
    char path[PATH_CAP];
    uint64_t size = 0;
    uint32_t crc = 0;
    if (!path_join(path, k->tmp, name, e) || !sync_file(path, e) || !file_sum(path, &size, &crc, NULL, e)) { return false; }
    file_sums_add(&k->sums, name, size, crc);
    return true;
}

/* Removes a file that could not be written whole. */
static inline void checkpoint_drop(const Checkpoint* k, const char* name) {
    char path[PATH_CAP];
    Error ignored = NO_ERROR;
    if (path_join(path, k->tmp, name, &ignored)) { unlink(path); }
}

/* Does checkpoint_add() for a file that a run can do without, if it was written. If it cannot be read, only warns and
 * removes it. */
static inline void checkpoint_add_optional(Checkpoint* k, const char* name) {
    char path[PATH_CAP];
    struct stat st;
    Error e = NO_ERROR;
    if (path_join(path, k->tmp, name, &e) && lstat(path, &st) != 0 && errno == ENOENT) { return; }
    if (checkpoint_add(k, name, &e)) { return; }
    warn("%s: this checkpoint will not have this file", e.msg);
    checkpoint_drop(k, name);
}

static inline bool checkpoint_model(Checkpoint* k, const ModelConfig* c, const char* source, const ParamTable* t,
                                    StateSlot weights, Error* e) {
    return model_save_weights(k->tmp, c, source, t, weights, &k->sums, e) && checkpoint_add(k, "config.json", e) &&
           checkpoint_add(k, "model.safetensors.index.json", e);
}

/* Writes the adapters of a model with LoRA, and the path of its base. */
static inline bool checkpoint_adapter(Checkpoint* k, const ModelConfig* c, const char* base, const ParamTable* t,
                                      StateSlot adapters, Error* e) {
    return adapter_save(k->tmp, &c->lora, base, t, adapters, &k->sums, e) && checkpoint_add(k, ADAPTER_CONFIG, e);
}

/* Writes the optimizer state that this process's rank owns. Other ranks do so after checkpoint_join(). */
static inline bool checkpoint_state(Checkpoint* k, int rank, const ParamTable* t, const ArenaRanges* own,
                                    const StateSlot* slots, int num_slots, Error* e) {
    return state_save(k->tmp, rank, t, own, slots, num_slots, &k->sums, e);
}

/* Lists the state that another rank has written, by the size and checksum that it sent. */
static inline void checkpoint_list_state(Checkpoint* k, int rank, uint64_t size, uint32_t crc) {
    char name[64];
    state_file_name(name, rank);
    file_sums_add(&k->sums, name, size, crc);
}

/* Writes the files that a run can do without; only warns if that fails. Keeps files that exist already. */
static inline void checkpoint_side_files(Checkpoint* k, const SideFiles* files) {
    side_files_write(files, k->tmp);
    for (size_t i = 0; i < files->count; i++) {
        if (!file_sums_find(&k->sums, files->items[i].name)) { checkpoint_add_optional(k, files->items[i].name); }
    }
}

/* Checks that a listed file has its size. This is cheap and finds files that were cut short. */
static inline bool checkpoint_check_size(const char* dir, const FileSum* f, Error* e) {
    char path[PATH_CAP];
    struct stat st;
    if (!path_join(path, dir, f->name, e)) { return false; }
    if (stat(path, &st) != 0) { return fail(e, "%s: is missing, but trainer_state.json lists it", path); }
    if (S_ISREG(st.st_mode) && (uint64_t)st.st_size == f->size) { return true; }
    return fail(e, "%s: is %lld bytes long, wanted %" PRIu64 " as trainer_state.json says", path, (long long)st.st_size,
                f->size);
}

/* Checks that the list has what a checkpoint must have. `path` is trainer_state.json's. `ranks`: 0 for the model alone. */
static inline bool checkpoint_check_list(const FileSums* files, int ranks, const char* path, Error* e) {
    char name[64];
    const bool adapters = file_sums_find(files, ADAPTER_CONFIG) != NULL;
    if (!adapters && !file_sums_find(files, "config.json")) { return fail(e, "%s: files lists no config.json", path); }
    for (int rank = 0; rank < ranks; rank++) {
        state_file_name(name, rank);
        if (!file_sums_find(files, name)) {
            return fail(e, "%s: files lists no %s, wanted world_size = %d of them", path, name, ranks);
        }
    }
    return true;
}

/* Checks the list as a reader will, with the states of all ranks, and flushes the folders. */
static inline bool checkpoint_seal(Checkpoint* k, int ranks, const char* path, Error* e) {
    bool ok = checkpoint_check_list(&k->sums, ranks, path, e);
    for (size_t i = 0; ok && i < k->sums.count; i++) { ok = checkpoint_check_size(k->tmp, &k->sums.items[i], e); }
    static const char* const inner[] = {"original", "additional_chat_templates"};
    for (int i = 0; ok && i < 2; i++) {
        char folder[PATH_CAP];
        if (folder_has(k->tmp, inner[i])) { ok = path_join(folder, k->tmp, inner[i], e) && sync_directory(folder, e); }
    }
    if (ok) { qsort(k->sums.items, k->sums.count, sizeof(FileSum), file_sums_compare); }  // the same bytes whatever came first
    return ok;
}

/* Swaps the finished folder with what already has its name (a damaged folder, a folder of a run that was set back, a link).
 * The old one is the .tmp afterwards. */
static inline bool checkpoint_exchange(const char* tmp, const char* dir) {
    if (os_exchange(tmp, dir)) { return true; }
    // this file system cannot exchange: for a moment only older checkpoints exist
    char aside[PATH_CAP];
    const int n = snprintf(aside, sizeof aside, "%s.old.tmp", dir);
    return n > 0 && n < PATH_CAP && rename(dir, aside) == 0 && rename(tmp, dir) == 0 && rename(aside, tmp) == 0;
}

/* Gives the finished folder its final name. */
static inline bool checkpoint_rename(Checkpoint* k, Error* e) {
    LLMC_FAULT_POINT("rename");
    if (rename(k->tmp, k->dir) == 0) {
        k->tmp[0] = 0;
    } else if ((errno != EEXIST && errno != ENOTEMPTY && errno != ENOTDIR) || !checkpoint_exchange(k->tmp, k->dir)) {
        return fail(e, "%s: cannot rename to %s: %s", k->tmp, k->dir, strerror(errno));
    }
    LLMC_FAULT_POINT("renamed");
    return sync_directory(k->out, e);
}

/* Checks the list of files, writes trainer_state.json, flushes, renames. Removes the .tmp if that fails. */
static inline bool checkpoint_commit(Checkpoint* k, const TrainerState* s, Error* e) {
    char path[PATH_CAP];
    LLMC_FAULT_POINT("commit");
    bool ok = path_join(path, k->tmp, "trainer_state.json", e) && checkpoint_seal(k, s->world_size, path, e) &&
              trainer_state_write(s, &k->sums, path, e);
    LLMC_FAULT_POINT("written");
    ok = ok && sync_directory(k->tmp, e) && checkpoint_rename(k, e);
    checkpoint_abort(k);  // removes .tmp: the unfinished checkpoint, or the old one that was swapped out
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// finding, checking and pruning

/* Reads the step from a name step_NNNNNNNN; false for any other name. */
static inline bool checkpoint_step_of(const char* name, uint64_t* step) {
    if (strncmp(name, "step_", 5) != 0) { return false; }
    const size_t digits = strspn(name + 5, "0123456789");
    if (digits < 8 || digits > 19 || name[5 + digits] != 0) { return false; }
    *step = strtoull(name + 5, NULL, 10);
    return true;
}

static inline int checkpoint_compare_newest(const void* a, const void* b) {
    const uint64_t x = *(const uint64_t*)a, y = *(const uint64_t*)b;
    return x > y ? -1 : x < y;
}

/* Lists the steps of all checkpoint folders in OUT, newest first. The caller frees *steps, which is NULL if there are none.
 * A missing OUT holds none. */
static inline bool checkpoint_list(const char* out, uint64_t** steps, size_t* count, Error* e) {
    *steps = NULL;
    *count = 0;
    DIR* d = opendir(out);
    if (!d) { return errno == ENOENT || fail(e, "%s: cannot open the folder: %s", out, strerror(errno)); }
    struct dirent* entry = NULL;
    bool ok = true;
    while (ok && (ok = folder_next(d, out, &entry, e)) && entry) {
        char path[PATH_CAP];
        uint64_t step = 0;
        if (!checkpoint_step_of(entry->d_name, &step)) { continue; }
        ok = path_join(path, out, entry->d_name, e);
        if (!ok || !is_directory(path)) { continue; }
        *steps = (uint64_t*)xrealloc(*steps, (*count + 1) * sizeof **steps);
        (*steps)[(*count)++] = step;
    }
    closedir(d);
    if (!ok) {
        free(*steps);
        *steps = NULL;
        *count = 0;
    }
    if (*count > 1) { qsort(*steps, *count, sizeof **steps, checkpoint_compare_newest); }
    return ok;
}

/* Why a checkpoint is read: to resume its run, for the model alone, or to resume as another rank of its run, after rank 0 has
 * read all of it. */
typedef enum { CHECKPOINT_RUN, CHECKPOINT_MODEL, CHECKPOINT_RANK } CheckpointUse;

static inline bool is_state_file(const char* name) { return strncmp(name, "state_rank", 10) == 0; }
static inline bool is_tensor_file(const char* name) { return fnmatch("*.safetensors", name, 0) == 0; }

/* Returns whether a file's checksum is checked when a checkpoint is read for this use. */
static inline bool checkpoint_sums_file(const FileSum* f, CheckpointUse use) {
    return use == CHECKPOINT_RUN || (use == CHECKPOINT_MODEL && !is_tensor_file(f->name));
}

/* Checks the checksums of a checkpoint's files, as far as this use wants them. */
static inline bool checkpoint_check_sums(const char* dir, const FileSums* files, CheckpointUse use, FILE* screen, Error* e) {
    uint64_t bytes = 0, size = 0;
    uint32_t crc = 0;
    char path[PATH_CAP];
    bool ok = true;
    for (size_t i = 0; i < files->count; i++) {
        bytes += checkpoint_sums_file(&files->items[i], use) ? files->items[i].size : 0;
    }
    Progress progress = progress_begin(screen, "check", bytes, "B");
    for (size_t i = 0; ok && i < files->count; i++) {
        const FileSum* f = &files->items[i];
        if (!checkpoint_sums_file(f, use)) { continue; }
        ok = path_join(path, dir, f->name, e) && file_sum(path, &size, &crc, &progress, e) && file_sum_check(f, path, crc, e);
    }
    progress_end(&progress);
    return ok;
}

/* Reads dir/trainer_state.json and checks the sizes and checksums of the files it lists. CHECKPOINT_RUN checks them all.
 * CHECKPOINT_MODEL skips the state files, and leaves the weights' checksums to model_load_sums(). CHECKPOINT_RANK checks the
 * sizes alone. `screen` (or NULL) shows the progress. Free *s with trainer_state_free(), also after a failure. */
static inline bool checkpoint_read(const char* dir, CheckpointUse use, FILE* screen, TrainerState* s, Error* e) {
    char path[PATH_CAP];
    memset(s, 0, sizeof *s);
    if (!is_directory(dir)) {
        return fail(e, "%s: is %s, wanted a checkpoint's folder", dir, file_exists(dir) ? "a file" : "missing");
    }
    if (!path_join(path, dir, "trainer_state.json", e)) { return false; }
    if (!trainer_state_read(s, path, e)) { return false; }
    if (!checkpoint_check_list(&s->files, use == CHECKPOINT_MODEL ? 0 : s->world_size, s->path, e)) { return false; }
    for (size_t i = 0; i < s->files.count; i++) {
        const FileSum* f = &s->files.items[i];
        if (use == CHECKPOINT_MODEL && is_state_file(f->name)) { continue; }
        if (!checkpoint_check_size(dir, f, e)) { return false; }
    }
    return checkpoint_check_sums(dir, &s->files, use, screen, e);
}

/* Returns whether the run that wrote last, `last`, had been set back to a step before this checkpoint of another run. */
static inline bool checkpoint_abandoned(const LogHistory* last, const TrainerState* s) {
    return last->parent_run[0] && s->step > last->parent_step && strcmp(s->run, last->run) != 0;
}

/* Checks a checkpoint that no user named: its step must be the step in its folder's name, and its last step must be sound. */
static inline bool checkpoint_check_found(const TrainerState* s, uint64_t step, Error* e) {
    if (s->step != step) { return fail(e, "%s: step is %" PRIu64 ", wanted the folder's", s->path, s->step); }
    return !s->not_finite || fail(e, "%s: not_finite is true: the loss or gradient of the last step was not finite", s->path);
}

/* Finds the newest whole checkpoint in OUT: its folder in dir (PATH_CAP bytes; "" if OUT has no checkpoint) and its state.
 * Skips damaged ones with a warning; fails if all are damaged. A run resumes from a step that was not finite only if there is
 * no older checkpoint: a run that was not stopped continued from that step, too. */
static inline bool checkpoint_find(const char* out, CheckpointUse use, FILE* screen, char* dir, TrainerState* s, Error* e) {
    uint64_t* steps = NULL;
    size_t count = 0;
    LogHistory last;
    memset(s, 0, sizeof *s);
    dir[0] = 0;
    if (!log_history_read(&last, out, 0, e) || !checkpoint_list(out, &steps, &count, e)) { return false; }
    bool found = count == 0;
    size_t ruined = count;  // the newest whole one of a step that was not finite
    for (size_t i = 0; i < count && !found; i++) {
        Error cause = NO_ERROR;
        if (!checkpoint_path(dir, out, steps[i], "", e)) { break; }
        const bool whole = checkpoint_read(dir, use, screen, s, &cause);
        const bool abandoned = whole && checkpoint_abandoned(&last, s);
        found = whole && checkpoint_check_found(s, steps[i], &cause);
        if (found && abandoned) {
            found = fail(&cause, "%s: is of a run that was set back to step %" PRIu64, dir, last.parent_step);
        }
        if (found) { break; }
        const bool spare = whole && !abandoned && s->not_finite && s->step == steps[i] && use == CHECKPOINT_RUN;
        if (spare && ruined == count) { ruined = i; }
        trainer_state_free(s);
        if (i + 1 == count && ruined < count) {
            found = checkpoint_path(dir, out, steps[ruined], "", e) && checkpoint_read(dir, use, screen, s, e);
            if (found) { warn("%s: no older checkpoint is whole: resuming all the same", cause.msg); }
        } else if (i + 1 == count) {
            fail(e, !s->not_finite ? "%s" : "%s\n  hint: --model PATH takes it all the same", cause.msg);
        } else if (!abandoned) {
            warn("%s: taking the checkpoint before it", cause.msg);
        }
    }
    free(steps);
    return found;
}

/* Writes the folder that a checkpoint lies in to `out` (PATH_CAP bytes). The checkpoint itself may be a link. */
static inline bool checkpoint_parent(const char* dir, char* out, Error* e) {
    size_t n = strlen(dir);
    while (n > 1 && dir[n - 1] == '/') { n--; }
    size_t at = n;
    while (at > 0 && dir[at - 1] != '/') { at--; }
    if (dir[at] == '.') { return path_join(out, dir, "..", e); }  // "." and ".."
    while (at > 1 && dir[at - 1] == '/') { at--; }
    snprintf(out, PATH_CAP, "%.*s", at ? (int)at : 1, at ? dir : ".");
    return true;
}

/* Reads the log beside a checkpoint, if there is one, and compares the checkpoint's weights with the log's record of them. */
static inline bool checkpoint_check_log(const char* dir, const TrainerState* s, LogHistory* log, Error* e) {
    char folder[PATH_CAP];
    if (!checkpoint_parent(dir, folder, e) || !log_history_read(log, folder, s->step, e)) { return false; }
    const uint32_t weights = file_sums_weights(&s->files);
    if (!log->has_weights || log->weights == weights) { return true; }
    return fail(e,
                "%s: the weights' checksum is %" PRIu32 ", but %s/log.jsonl says %" PRIu32 " at step %" PRIu64
                "\n"
                "  hint: this is another run's checkpoint, or another run's log: move one of them away",
                s->path, weights, folder, log->weights, s->step);
}

/* Returns whether a folder is a checkpoint, whole or not. */
static inline bool folder_is_checkpoint(const char* path) { return folder_has(path, "trainer_state.json"); }

/* Opens what --resume PATH names: a checkpoint's folder, or the newest whole checkpoint in a folder of checkpoints. */
static inline bool checkpoint_open(const char* path, CheckpointUse use, FILE* screen, char* dir, TrainerState* s, Error* e) {
    memset(s, 0, sizeof *s);
    dir[0] = 0;
    if (!is_directory(path)) {
        return fail(e, "%s: is %s, wanted a checkpoint or a folder of checkpoints", path,
                    file_exists(path) ? "a file" : "missing");
    }
    if (!folder_is_checkpoint(path)) {
        if (!checkpoint_find(path, use, screen, dir, s, e)) { return false; }
        return dir[0] || fail(e, "%s: holds no checkpoint, wanted a folder step_NNNNNNNN in it%s", path,
                              folder_has(path, "config.json") ? ": --model takes its weights for a new run" : "");
    }
    const size_t n = strlen(path);
    if (n >= 4 && strcmp(path + n - 4, ".tmp") == 0) {
        return fail(e, "%s: is an unfinished checkpoint, wanted a whole one", path);
    }
    snprintf(dir, PATH_CAP, "%s", path);
    return checkpoint_read(dir, use, screen, s, e);
}

/* Ends the exchange of a run that died between the two renames of checkpoint_exchange(): step_N is missing, but two copies are
 * left, the new .tmp and the old .old.tmp. The first that is whole gets the name back. */
static inline bool checkpoint_restore(const char* out, uint64_t step, FILE* screen, Error* e) {
    char dir[PATH_CAP], copies[2][PATH_CAP];
    struct stat st;
    if (!checkpoint_path(dir, out, step, "", e) || !checkpoint_path(copies[0], out, step, ".tmp", e) ||
        !checkpoint_path(copies[1], out, step, ".old.tmp", e)) {
        return false;
    }
    if (lstat(copies[1], &st) != 0 || lstat(dir, &st) == 0) { return true; }
    for (int i = 0; i < 2; i++) {
        TrainerState s;
        Error damaged = NO_ERROR;
        const bool whole = checkpoint_read(copies[i], CHECKPOINT_RUN, screen, &s, &damaged) && s.step == step;
        trainer_state_free(&s);
        if (whole) {
            return (rename(copies[i], dir) == 0 || fail(e, "%s: cannot rename to %s: %s", copies[i], dir, strerror(errno))) &&
                   sync_directory(out, e);
        }
    }
    return true;
}

/* Renames every checkpoint later than `step` to step_N.set_back, or .set_back2 ... if there is one already. Sets *count to
 * their number. The caller holds the lock. */
static inline bool checkpoint_set_aside(const char* out, uint64_t step, size_t* count, Error* e) {
    uint64_t* steps = NULL;
    size_t listed = 0;
    bool ok = checkpoint_list(out, &steps, &listed, e);
    for (*count = 0; ok && *count < listed && steps[*count] > step; ++*count) {
        char dir[PATH_CAP], aside[PATH_CAP], end[32] = ".set_back";
        struct stat st;
        ok = checkpoint_path(dir, out, steps[*count], "", e);
        for (int i = 2; ok; i++) {
            ok = checkpoint_path(aside, out, steps[*count], end, e);
            if (!ok || lstat(aside, &st) != 0) { break; }
            snprintf(end, sizeof end, ".set_back%d", i);
        }
        ok = ok && (rename(dir, aside) == 0 || fail(e, "%s: cannot rename to %s: %s", dir, aside, strerror(errno)));
    }
    free(steps);
    return ok && (*count == 0 || sync_directory(out, e));
}

/* Removes what dead runs left behind: OUT/step_N.tmp and OUT/step_N.old.tmp. The caller holds the lock. */
static inline bool checkpoint_remove_stale(const char* out, FILE* screen, Error* e) {
    DIR* d = opendir(out);
    if (!d) { return errno == ENOENT || fail(e, "%s: cannot open the folder: %s", out, strerror(errno)); }
    struct dirent* entry = NULL;
    bool ok = true;
    while (ok && (ok = folder_next(d, out, &entry, e)) && entry) {
        char path[PATH_CAP], name[64];
        uint64_t step = 0;
        const size_t n = strcspn(entry->d_name, ".");
        if (n >= sizeof name || (strcmp(entry->d_name + n, ".tmp") != 0 && strcmp(entry->d_name + n, ".old.tmp") != 0)) {
            continue;
        }
        memcpy(name, entry->d_name, n);
        name[n] = 0;
        if (!checkpoint_step_of(name, &step)) { continue; }
        ok = path_join(path, out, entry->d_name, e) && checkpoint_restore(out, step, screen, e) && remove_tree(path, e);
    }
    closedir(d);
    return ok;
}

/* A checkpoint as pruning sees it. An unreadable one counts as not timed and without a loss. */
typedef struct {
    uint64_t step;
    bool timed;   // later ones replace it
    double loss;  // validation loss of its weights; NaN: unknown
} CheckpointWorth;

static inline CheckpointWorth checkpoint_worth(const char* out, uint64_t step) {
    char path[PATH_CAP];
    CheckpointWorth worth = {step, false, NAN};
    TrainerState s;
    Error ignored = NO_ERROR;
    if (!checkpoint_path(path, out, step, "/trainer_state.json", &ignored)) { return worth; }
    if (trainer_state_read(&s, path, &ignored)) {
        worth.timed = s.timed;
        if (s.val.step > 0 && s.val.step == s.step) { worth.loss = s.val.loss; }
    }
    trainer_state_free(&s);
    return worth;
}

/* Reads what pruning needs to know of the checkpoints up to and including step `last`, the newest first. The caller frees
 * *worths. */
static inline bool checkpoint_worths(const char* out, uint64_t last, CheckpointWorth** worths, size_t* count, Error* e) {
    uint64_t* steps = NULL;
    size_t all = 0;
    const bool ok = checkpoint_list(out, &steps, &all, e);
    *count = 0;
    *worths = (CheckpointWorth*)xcalloc(all, sizeof **worths);
    for (size_t i = 0; ok && i < all; i++) {
        if (steps[i] <= last) { (*worths)[(*count)++] = checkpoint_worth(out, steps[i]); }
    }
    free(steps);
    return ok;
}

/* Returns the step of the checkpoint with the lowest validation loss, the first of equal ones, and sets *loss; 0: none was
 * validated. */
static inline uint64_t checkpoint_lowest(const CheckpointWorth* worths, size_t count, double* loss) {
    uint64_t best = 0;
    for (size_t i = 0; i < count; i++) {
        if (isnan(worths[i].loss) || (best > 0 && worths[i].loss > *loss)) { continue; }
        best = worths[i].step;
        *loss = worths[i].loss;
    }
    return best;
}

/* Does the same for the checkpoints of a folder up to and including step `last`. */
static inline uint64_t checkpoint_best(const char* out, uint64_t last, double* loss) {
    CheckpointWorth* worths = NULL;
    size_t count = 0;
    Error ignored = NO_ERROR;
    checkpoint_worths(out, last, &worths, &count, &ignored);
    const uint64_t best = checkpoint_lowest(worths, count, loss);
    free(worths);
    return best;
}

/* Deletes old checkpoints once step `written` is saved: timed ones, and all but the newest `keep` (0: all) of the others up
 * to and including `written`. It never deletes a step that is a multiple of `major_every` (0: none), nor the step with the
 * lowest validation loss. Does not touch later steps, which a run that was set back may have left. Only warns if a folder
 * cannot be removed. */
static inline void checkpoint_prune(const char* out, int keep, uint64_t major_every, uint64_t written) {
    CheckpointWorth* worths = NULL;
    size_t count = 0;
    int newer = 0;  // checkpoints that are kept for being new
    double loss = 0;
    Error e = NO_ERROR;
    if (!checkpoint_worths(out, written, &worths, &count, &e)) { warn("%s", e.msg); }
    const uint64_t best = checkpoint_lowest(worths, count, &loss);
    for (size_t i = 0; i < count; i++) {
        const uint64_t step = worths[i].step;
        char dir[PATH_CAP], tmp[PATH_CAP];
        memset(&e, 0, sizeof e);
        if (!checkpoint_path(dir, out, step, "", &e) || !checkpoint_path(tmp, out, step, ".tmp", &e)) { continue; }
        if (worths[i].timed) {
            if (step == written) { continue; }
        } else if (keep <= 0 || newer++ < keep || (major_every > 0 && step % major_every == 0)) {
            continue;
        }
        if (step == best) { continue; }
        LLMC_FAULT_POINT("prune");
        bool ok = remove_tree(tmp, &e) &&
                  (rename(dir, tmp) == 0 || fail(&e, "%s: cannot rename to %s: %s", dir, tmp, strerror(errno)));
        LLMC_FAULT_POINT("pruned");
        // the new name reaches the disk before a file goes: otherwise a power cut may leave half a folder under the old name
        ok = ok && sync_directory(out, &e) && remove_tree(tmp, &e);
        if (!ok) { warn("%s: the old checkpoint stays", e.msg); }
    }
    free(worths);
}

#endif
