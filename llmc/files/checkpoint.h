/* checkpoint.h -- a run's state on disk, whole or not there at all.
 *
 *   OUT/.lock                        held (flock) while a run writes into OUT
 *   OUT/step_00001000/               a model folder (model_folder.h), readable by others as it lies, and
 *       state_rank00000.safetensors  optimizer state of one rank: tensors "SLOT.PARAMETER", SLOT being m, v, master ...
 *       trainer_state.json           step, data position, detectors, options; size and CRC-32C of every other file
 *   OUT/step_00001000.tmp/           one that was being made, or removed, when a run died
 *
 * Invariants:
 *   1. A folder named step_N was complete, and flushed to the disk, before it got that name. It is made as step_N.tmp:
 *      files, each fsynced; trainer_state.json as the last of them; the folder fsynced; rename; OUT fsynced. To remove
 *      one, it is renamed to .tmp first. So a process may die at any instant.
 *   2. Resuming trusts nothing: sizes and checksums of all files, and of trainer_state.json itself, are compared first.
 *      Where the newest is damaged, the one before is taken, with a warning.
 *   3. A write that fails (full disk) removes the .tmp and leaves older checkpoints alone; pruning never touches the
 *      checkpoint that has just been written.
 *
 * A rank that owns elements [lo, hi) of the arena writes the parts of the parameters that lie there; part of a parameter
 * that starts at element 96 is named "m.NAME@96". A later run may have another number of ranks: each reads all files and
 * keeps what it owns. What the numbers in a TrainerState mean is left to the loop; which files a tokenizer needs, to
 * whoever writes them into the folder before checkpoint_commit().
 */
#ifndef LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_H

#include "llmc/base/utils.h"

#include <dirent.h>
#include <inttypes.h>
#include <sys/file.h>

#include "llmc/base/crc.h"
#include "llmc/files/json.h"
#include "llmc/files/model_folder.h"
#include "llmc/base/outlier.h"

enum {
    TRAINER_STATE_FORMAT = 1,
    CHECKPOINT_MAX_RANKS = 100000,
    CHECKPOINT_COPY = 1 << 20,  // bytes copied or summed at a time
};

// ---------------------------------------------------------------------------------------------------------------------
// the lock

/* Makes the folder and locks it for this process: *fd keeps the lock until out_unlock() or the process's end, however it
 * ends. Fails while another live process holds it. */
static inline bool out_lock(int* fd, const char* out, Error* e) {
    char path[PATH_CAP];
    if (!make_directories(out, e) || !path_join(path, out, ".lock", e)) { return false; }
    *fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (*fd < 0) { return fail(e, "%s: cannot make the file: %s", path, strerror(errno)); }
    char text[32] = "";
    if (flock(*fd, LOCK_EX | LOCK_NB) != 0) {
        const int cause = errno;
        const ssize_t n = pread(*fd, text, sizeof text - 1, 0);
        close(*fd);
        *fd = -1;
        if (cause != EWOULDBLOCK) { return fail(e, "%s: cannot lock the file: %s", path, strerror(cause)); }
        const long pid = n > 0 ? strtol(text, NULL, 10) : 0;
        return fail(e,
                    "%s: another run (process %ld) is writing into this folder, wanted a folder of its own\n"
                    "  hint: wait for it to end, or choose another --out",
                    out, pid);
    }
    const int n = snprintf(text, sizeof text, "%ld\n", (long)getpid());
    // the number is for the message above alone, so a full disk does not matter here
    if (ftruncate(*fd, 0) == 0 && pwrite(*fd, text, (size_t)n, 0) != n) { errno = 0; }
    return true;
}

static inline void out_unlock(int* fd) {
    if (*fd >= 0) { close(*fd); }
    *fd = -1;
}

// ---------------------------------------------------------------------------------------------------------------------
// files

/* Size and checksum of a file. */
static inline bool file_sum(const char* path, uint64_t* size, uint32_t* crc, Error* e) {
    FILE* f = open_input(path, size, e);
    if (!f) { return false; }
    char* piece = (char*)xmalloc(CHECKPOINT_COPY);
    Crc c;
    crc_begin(&c);
    bool ok = true;
    for (uint64_t left = *size; ok && left > 0;) {
        const size_t n = size_min((size_t)left, CHECKPOINT_COPY);
        ok = read_exact(f, piece, n, path, "the file", e);
        if (ok) { crc_add(&c, piece, n); }
        left -= n;
    }
    free(piece);
    fclose(f);
    *crc = crc_end(&c);
    return ok;
}

/* Flushes a file that someone else wrote and closed. */
static inline bool sync_file(const char* path, Error* e) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    bool ok = fd >= 0 && fsync(fd) == 0;
    const int cause = errno;
    if (fd >= 0) { close(fd); }
    return ok || fail(e, "%s: cannot flush the file: %s", path, strerror(cause));
}

static inline bool copy_file(const char* from, const char* to, Error* e) {
    uint64_t size = 0;
    FILE* in = open_input(from, &size, e);
    if (!in) { return false; }
    FILE* out = fopen(to, "wb");
    bool ok = out || fail(e, "%s: cannot make the file: %s", to, strerror(errno));
    char* piece = (char*)xmalloc(CHECKPOINT_COPY);
    for (uint64_t left = size; ok && left > 0;) {
        const size_t n = size_min((size_t)left, CHECKPOINT_COPY);
        LLMC_FAULT_POINT("copy");
        ok = read_exact(in, piece, n, from, "the file", e) &&
             (fwrite(piece, 1, n, out) == n || fail(e, "%s: writing failed: %s", to, strerror(errno)));
        left -= n;
    }
    free(piece);
    fclose(in);
    if (out && ok) { return close_output(out, to, e); }
    if (out) { fclose(out); }
    return false;
}

/* rm -r, links not followed; a folder four levels down is none of ours and stays. */
static inline bool remove_tree_at(const char* path, int depth, Error* e) {
    DIR* d = opendir(path);
    if (!d) { return fail(e, "%s: cannot open the folder: %s", path, strerror(errno)); }
    bool ok = true;
    for (struct dirent* entry = readdir(d); ok && entry; entry = readdir(d)) {
        char inside[PATH_CAP];
        struct stat st;
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) { continue; }
        ok = path_join(inside, path, entry->d_name, e);
        if (ok && lstat(inside, &st) == 0 && S_ISDIR(st.st_mode) && depth < 4) {
            ok = remove_tree_at(inside, depth + 1, e);
        } else if (ok && unlink(inside) != 0) {
            ok = fail(e, "%s: cannot remove the file: %s", inside, strerror(errno));
        }
    }
    closedir(d);
    return ok && (rmdir(path) == 0 || fail(e, "%s: cannot remove the folder: %s", path, strerror(errno)));
}

/* Removes a folder where there is one. */
static inline bool remove_tree(const char* path, Error* e) { return !is_directory(path) || remove_tree_at(path, 0, e); }

// ---------------------------------------------------------------------------------------------------------------------
// optimizer state of a rank

/* One kind of state: m, v, master ... For writing, `source` gives it as floats and dtype says how they are kept; for
 * reading, `sink` takes it, or is NULL where the run has no use for it. */
typedef struct {
    const char* name;
    const char* dtype;  // "F32", "BF16"
    TensorSource source;
    TensorSink sink;
    void* ctx;
} StateSlot;

/* The part of parameter p that lies in [lo, hi) of the arena; returns its number of elements. */
static inline size_t state_part(const Param* p, size_t lo, size_t hi, size_t* first) {
    const size_t begin = size_max(p->offset, lo), end = size_min(p->offset + param_size(p), hi);
    *first = begin - p->offset;
    return end > begin ? end - begin : 0;
}

static inline void state_file_name(char* out /* 64 */, int rank) { snprintf(out, 64, "state_rank%05d.safetensors", rank); }

typedef char StateTensorName[112];

/* The tensors a rank's file holds: every slot, every part of a parameter in [lo, hi). Returns how many. */
static inline size_t state_list(const ParamTable* t, size_t lo, size_t hi, const StateSlot* slots, int num_slots,
                                SafeTensor* tensors, StateTensorName* names) {
    size_t count = 0, first = 0;
    for (int s = 0; s < num_slots; s++) {
        for (int i = 0; i < t->count; i++) {
            const Param* p = &t->items[i];
            const size_t n = state_part(p, lo, hi, &first);
            if (n == 0) { continue; }
            SafeTensor* tensor = &tensors[count];
            const bool whole = n == param_size(p);
            snprintf(names[count], sizeof names[count], "%s.%s", slots[s].name, p->name);
            if (!whole) { snprintf(names[count], sizeof names[count], "%s.%s@%zu", slots[s].name, p->name, first); }
            tensor->name = names[count];
            tensor->dtype = safe_dtype(slots[s].dtype);
            if (whole && param_specs[p->kind].matrix) { tensor->shape[tensor->ndim++] = p->rows; }
            tensor->shape[tensor->ndim++] = whole ? p->cols : n;
            count++;
        }
    }
    return count;
}

/* Writes the state of elements [lo, hi) of the arena into dir/state_rankRRRRR.safetensors and flushes it. */
static inline bool state_save(const char* dir, int rank, const ParamTable* t, size_t lo, size_t hi, const StateSlot* slots,
                              int num_slots, FileSums* sums, Error* e) {
    char name[64], path[PATH_CAP];
    state_file_name(name, rank);
    if (!path_join(path, dir, name, e)) { return false; }
    const size_t most = (size_t)num_slots * (size_t)t->count;
    SafeTensor* tensors = (SafeTensor*)xcalloc(most, sizeof(SafeTensor));
    StateTensorName* names = (StateTensorName*)xcalloc(most, sizeof(StateTensorName));
    const size_t count = state_list(t, lo, hi, slots, num_slots, tensors, names);
    SafeWriter w;
    bool ok = safewriter_open(&w, path, tensors, count, e);
    float* piece = (float*)xmalloc(MODEL_PIECE * sizeof(float));
    for (int s = 0; ok && s < num_slots; s++) {
        for (int i = 0; ok && i < t->count; i++) {
            size_t first = 0;
            const size_t n = state_part(&t->items[i], lo, hi, &first);
            for (size_t at = 0; ok && at < n; at += MODEL_PIECE) {
                const size_t m = size_min(n - at, MODEL_PIECE);
                ok = slots[s].source(slots[s].ctx, &t->items[i], first + at, m, piece, e) &&
                     safewriter_f32(&w, safe_dtype(slots[s].dtype), piece, m, e);
            }
        }
    }
    free(piece);
    free(tensors);
    free(names);
    ok = ok && safewriter_finish(&w, e);
    if (!ok) { safewriter_abort(&w); }
    if (ok) { file_sums_add(sums, name, w.written, crc_end(&w.crc)); }
    return ok;
}

/* A tensor of a state file, understood. */
typedef struct {
    int slot;
    int param;
    size_t first;
    const SafeTensor* tensor;
    const SafeTensors* file;
} StatePart;

static inline int state_compare(const void* a, const void* b) {
    const StatePart *x = (const StatePart*)a, *y = (const StatePart*)b;
    if (x->slot != y->slot) { return x->slot - y->slot; }
    if (x->param != y->param) { return x->param - y->param; }
    return x->first < y->first ? -1 : x->first > y->first;
}

/* Understands the name "SLOT.PARAMETER" or "SLOT.PARAMETER@FIRST" of a tensor. */
static inline bool state_parse(const SafeTensors* file, const SafeTensor* tensor, const ParamTable* t, const StateSlot* slots,
                               int num_slots, StatePart* part, Error* e) {
    const char* dot = strchr(tensor->name, '.');
    const char* at = strrchr(tensor->name, '@');
    const size_t slot_len = dot ? (size_t)(dot - tensor->name) : 0;
    char shown[120];
    show_text(shown, sizeof shown, tensor->name, strlen(tensor->name));
    part->file = file;
    part->tensor = tensor;
    part->first = 0;
    for (part->slot = 0; part->slot < num_slots; part->slot++) {
        const char* name = slots[part->slot].name;
        if (strlen(name) == slot_len && strncmp(name, tensor->name, slot_len) == 0) { break; }
    }
    if (part->slot == num_slots) {
        return fail(e, "%s: tensor \"%s\" is state that this run does not keep (was the checkpoint made by another build?)",
                    file->path, shown);
    }
    const size_t len = at ? (size_t)(at - dot - 1) : strlen(dot + 1);
    for (part->param = 0; part->param < t->count; part->param++) {
        const char* name = t->items[part->param].name;
        if (strlen(name) == len && strncmp(name, dot + 1, len) == 0) { break; }
    }
    if (part->param == t->count) { return fail(e, "%s: tensor \"%s\" is of no parameter of this model", file->path, shown); }
    if (at) {
        char* end = NULL;
        errno = 0;
        part->first = (size_t)strtoull(at + 1, &end, 10);
        if (at[1] < '0' || at[1] > '9' || *end != 0 || errno) {
            return fail(e, "%s: tensor \"%s\" does not end in a number, wanted its first element", file->path, shown);
        }
    }
    if (tensor->dtype != SAFE_F32 && tensor->dtype != SAFE_BF16 && tensor->dtype != SAFE_F16) {
        return fail(e, "%s: %s.dtype is %s, wanted F32, BF16 or F16", file->path, shown, safe_dtypes[tensor->dtype].name);
    }
    const size_t size = param_size(&t->items[part->param]);
    if (part->first > size || tensor->count > size - part->first) {
        return fail(e, "%s: tensor \"%s\" has %zu elements, wanted at most %zu", file->path, shown, tensor->count,
                    part->first > size ? 0 : size - part->first);
    }
    return true;
}

/* Parts cover every parameter of every slot exactly once. `parts` is sorted. */
static inline bool state_check_cover(const char* dir, const StatePart* parts, size_t count, const ParamTable* t,
                                     const StateSlot* slots, int num_slots, Error* e) {
    size_t k = 0;
    for (int s = 0; s < num_slots; s++) {
        for (int i = 0; i < t->count; i++) {
            size_t covered = 0;
            while (k < count && parts[k].slot == s && parts[k].param == i && parts[k].first == covered &&
                   parts[k].tensor->count > 0) {
                covered += parts[k++].tensor->count;
            }
            if (covered == param_size(&t->items[i]) && !(k < count && parts[k].slot == s && parts[k].param == i)) { continue; }
            return fail(e, "%s: tensor \"%s.%s\" has %zu of its %zu elements in the state files, wanted each once", dir,
                        slots[s].name, t->items[i].name, covered, param_size(&t->items[i]));
        }
    }
    return true;
}

/* Reads the state files of all `world_size` ranks of a checkpoint and gives the slots' elements in [lo, hi) of the arena
 * to their sinks. All files are checked before the first element is given. */
static inline bool state_load(const char* dir, int world_size, const ParamTable* t, size_t lo, size_t hi,
                              const StateSlot* slots, int num_slots, Error* e) {
    SafeTensors* files = (SafeTensors*)xcalloc((size_t)world_size, sizeof(SafeTensors));
    StatePart* parts = NULL;
    size_t count = 0;
    bool ok = true;
    for (int rank = 0; ok && rank < world_size; rank++) {
        char name[64], path[PATH_CAP];
        state_file_name(name, rank);
        SafeTensors* st = &files[rank];
        ok = path_join(path, dir, name, e) && safetensors_open(st, path, e);
        if (!ok) { break; }
        parts = (StatePart*)xrealloc(parts, (count + st->count) * sizeof(StatePart));
        for (size_t i = 0; ok && i < st->count; i++) {
            ok = state_parse(st, &st->tensors[i], t, slots, num_slots, &parts[count++], e);
        }
    }
    if (ok && count > 0) { qsort(parts, count, sizeof(StatePart), state_compare); }
    ok = ok && state_check_cover(dir, parts, count, t, slots, num_slots, e);
    float* piece = (float*)xmalloc(MODEL_PIECE * sizeof(float));
    for (size_t k = 0; ok && k < count; k++) {
        const StatePart* part = &parts[k];
        const StateSlot* slot = &slots[part->slot];
        const Param* p = &t->items[part->param];
        size_t first = 0;
        const size_t n = state_part(p, lo, hi, &first);
        const size_t begin = size_max(first, part->first), end = size_min(first + n, part->first + part->tensor->count);
        if (!slot->sink || n == 0) { continue; }
        for (size_t at = begin; ok && at < end; at += MODEL_PIECE) {
            const size_t m = size_min(end - at, MODEL_PIECE);
            ok = safetensors_read_f32(part->file, part->tensor, at - part->first, m, piece, e) &&
                 slot->sink(slot->ctx, p, at, m, piece, e);
        }
    }
    free(piece);
    free(parts);
    for (int rank = 0; rank < world_size; rank++) { safetensors_close(&files[rank]); }
    free(files);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// trainer_state.json

typedef struct {
    uint64_t step;            // steps done
    uint64_t seed;            // with `step` it is the whole state of the counter-based random numbers
    uint64_t data_row;        // rows of tokens consumed by all ranks since the run began
    uint64_t tokens;          // tokens trained on
    uint64_t updates;         // applications of AdamW: steps without those skipped
    uint64_t fingerprint;     // of the tokenizer, 0: none
    int world_size;           // ranks, one state file each
    double loss_scale;        // FP16's; 1 otherwise
    uint64_t scale_good;      // steps since the loss scale last changed
    Outlier loss, grad_norm;  // detectors
    const char* options;      // for writing: the run's options, a JSON object (options_json_text)
    // filled by trainer_state_read(), which owns them; trainer_state_free() when done
    FileSums files;
    Json json;
    const JsonNode* saved_options;  // in `json`
    char path[PATH_CAP];
} TrainerState;

static inline void trainer_state_free(TrainerState* s) {
    file_sums_free(&s->files);
    json_free(&s->json);
    s->saved_options = NULL;
}

// The integers of the file, in one table for its writer and its reader.
// clang-format off
static const struct { const char* name; size_t offset; } trainer_state_integers[] = {
    {"step", offsetof(TrainerState, step)},
    {"seed", offsetof(TrainerState, seed)},
    {"data_row", offsetof(TrainerState, data_row)},
    {"tokens", offsetof(TrainerState, tokens)},
    {"updates", offsetof(TrainerState, updates)},
    {"tokenizer_fingerprint", offsetof(TrainerState, fingerprint)},
    {"loss_scale_good_steps", offsetof(TrainerState, scale_good)},
};
// clang-format on
enum { NUM_TRAINER_STATE_INTEGERS = sizeof trainer_state_integers / sizeof *trainer_state_integers };

// The last line of the file: the CRC-32C of everything before it.
static const char trainer_state_tail[] = ",\n  \"crc32c\": ";

static inline void outlier_write(FILE* f, const Outlier* o) {
    fprintf(f, "{\"next\": %d, \"values\": [", o->next);
    for (int i = 0; i < o->count; i++) {
        if (i) { fputs(", ", f); }
        json_write_double(f, o->values[i]);
    }
    fputs("]}", f);
}

/* Writes and flushes the file. `files` are all others of the checkpoint. */
static inline bool trainer_state_write(const TrainerState* s, const FileSums* files, const char* path, Error* e) {
    char* text = NULL;
    size_t length = 0;
    FILE* f = open_memstream(&text, &length);
    if (!f) { return fail(e, "%s: out of memory", path); }
    fprintf(f, "{\n  \"format\": %d", TRAINER_STATE_FORMAT);
    for (int i = 0; i < NUM_TRAINER_STATE_INTEGERS; i++) {
        uint64_t value;
        memcpy(&value, (const char*)s + trainer_state_integers[i].offset, sizeof value);
        fprintf(f, ",\n  \"%s\": %" PRIu64, trainer_state_integers[i].name, value);
    }
    fprintf(f, ",\n  \"world_size\": %d,\n  \"loss_scale\": ", s->world_size);
    json_write_double(f, s->loss_scale);
    fputs(",\n  \"loss_window\": ", f);
    outlier_write(f, &s->loss);
    fputs(",\n  \"grad_norm_window\": ", f);
    outlier_write(f, &s->grad_norm);
    fprintf(f, ",\n  \"options\": %s,\n  \"files\": [", s->options ? s->options : "{}");
    for (size_t i = 0; i < files->count; i++) {
        fprintf(f, "%s\n    {\"name\": ", i ? "," : "");
        json_write_string(f, files->items[i].name, strlen(files->items[i].name));
        fprintf(f, ", \"size\": %" PRIu64 ", \"crc32c\": %" PRIu32 "}", files->items[i].size, files->items[i].crc);
    }
    fputs("\n  ]", f);
    fflush(f);
    if (!ferror(f)) { fprintf(f, "%s%" PRIu32 "\n}\n", trainer_state_tail, crc_of(text, length)); }
    if (fclose(f) != 0 || !text) {
        free(text);
        return fail(e, "%s: out of memory", path);
    }
    FILE* out = fopen(path, "wb");
    bool ok = out || fail(e, "%s: cannot make the file: %s", path, strerror(errno));
    LLMC_FAULT_POINT("trainer_state");
    if (ok && fwrite(text, 1, length, out) != length) { ok = fail(e, "%s: writing failed: %s", path, strerror(errno)); }
    free(text);
    if (!ok && out) { fclose(out); }
    return ok && close_output(out, path, e);
}

static inline bool outlier_read(const Json* j, const char* key, Outlier* o, Error* e) {
    const JsonNode* window = json_get(j, json_root(j), key);
    const JsonNode* values = json_get(j, window, "values");
    memset(o, 0, sizeof *o);
    int64_t next = 0;
    if (!window || window->type != JSON_OBJECT) { return json_wanted(j, json_root(j), key, e, "an object"); }
    if (!values || values->type != JSON_ARRAY || json_length(values) > OUTLIER_WINDOW) {
        return json_wanted(j, window, "values", e, "an array of at most %d numbers", OUTLIER_WINDOW);
    }
    for (const JsonNode* n = json_first(j, values); n; n = json_next(j, n)) {
        if (!json_node_double(j, n, &o->values[o->count]) || !isfinite(o->values[o->count])) {
            return json_wanted(j, window, "values", e, "finite numbers");
        }
        o->count++;
    }
    // until the ring is full, the next value goes behind the last
    const bool full = o->count == OUTLIER_WINDOW;
    if (!json_int(j, window, "next", full ? 0 : o->count, full ? OUTLIER_WINDOW - 1 : o->count, &next, e)) { return false; }
    o->next = (int)next;
    return true;
}

/* A name inside of the checkpoint: no part of it starts with a dot, and none is empty. */
static inline bool checkpoint_good_name(const char* name) {
    if (strlen(name) >= sizeof(((FileSum*)0)->name)) { return false; }
    for (const char* p = name;; p++) {
        if (*p == '.' || *p == '/' || *p == 0) { return false; }
        p = strchr(p, '/');
        if (!p) { return true; }
    }
}

static inline bool trainer_state_files(TrainerState* s, Error* e) {
    const Json* j = &s->json;
    const JsonNode* files = json_get(j, json_root(j), "files");
    if (!files || files->type != JSON_ARRAY) { return json_wanted(j, json_root(j), "files", e, "an array"); }
    for (const JsonNode* n = json_first(j, files); n; n = json_next(j, n)) {
        const char* name = NULL;
        uint64_t size = 0;
        int64_t crc = 0;
        if (!json_text(j, n, "name", &name, e) || !json_u64(j, n, "size", &size, e) ||
            !json_int(j, n, "crc32c", 0, UINT32_MAX, &crc, e)) {
            return false;
        }
        if (!checkpoint_good_name(name)) { return json_wanted(j, n, "name", e, "the name of a file in this folder"); }
        file_sums_add(&s->files, name, size, (uint32_t)crc);
    }
    return true;
}

/* The fields of a text that passed its own checksum. */
static inline bool trainer_state_parse(TrainerState* s, Error* e) {
    const Json* j = &s->json;
    const JsonNode* root = json_root(j);
    int64_t number = 0;
    if (!json_int(j, root, "format", TRAINER_STATE_FORMAT, TRAINER_STATE_FORMAT, &number, e)) { return false; }
    for (int i = 0; i < NUM_TRAINER_STATE_INTEGERS; i++) {
        uint64_t value = 0;
        if (!json_u64(j, root, trainer_state_integers[i].name, &value, e)) { return false; }
        memcpy((char*)s + trainer_state_integers[i].offset, &value, sizeof value);
    }
    if (!json_int(j, root, "world_size", 1, CHECKPOINT_MAX_RANKS, &number, e) ||
        !json_double(j, root, "loss_scale", 1e-30, 1e30, &s->loss_scale, e) || !outlier_read(j, "loss_window", &s->loss, e) ||
        !outlier_read(j, "grad_norm_window", &s->grad_norm, e) || !trainer_state_files(s, e)) {
        return false;
    }
    s->world_size = (int)number;
    s->saved_options = json_get(j, root, "options");
    if (!s->saved_options || s->saved_options->type != JSON_OBJECT) { return json_wanted(j, root, "options", e, "an object"); }
    return true;
}

/* Whether the text ends in the line with its own checksum, byte for byte as it was written. */
static inline bool trainer_state_whole(const char* text, size_t length) {
    char tail[64];
    for (size_t n = sizeof trainer_state_tail; n < sizeof tail && n <= length; n++) {
        const char* at = text + length - n;
        if (memcmp(at, trainer_state_tail, sizeof trainer_state_tail - 1) != 0) { continue; }
        const int wanted = snprintf(tail, sizeof tail, "%s%" PRIu32 "\n}\n", trainer_state_tail, crc_of(text, length - n));
        return (size_t)wanted == n && memcmp(at, tail, n) == 0;
    }
    return false;
}

/* Reads a text of `length` bytes (owned, as json_parse). Free with trainer_state_free(), also where this fails. */
static inline bool trainer_state_from_text(TrainerState* s, char* text, size_t length, const char* path, Error* e) {
    memset(s, 0, sizeof *s);
    snprintf(s->path, sizeof s->path, "%s", path);
    const bool whole = trainer_state_whole(text, length);  // before strings are decoded in place
    if (!json_parse(&s->json, text, length, s->path, e)) { return false; }
    if (!whole) {
        return fail(e, "%s: crc32c in its last line is not that of the text before it: the file is damaged", s->path);
    }
    return trainer_state_parse(s, e);
}

static inline bool trainer_state_read(TrainerState* s, const char* path, Error* e) {
    memset(s, 0, sizeof *s);
    size_t length = 0;
    char* text = read_file(path, &length, 64 << 20, e);
    const char* kind = text ? file_looks_like(text, length) : NULL;
    if (kind && strcmp(kind, "JSON text") != 0) {
        free(text);
        return fail(e, "%s: is %s, wanted a checkpoint's JSON text", path, kind);
    }
    return text && trainer_state_from_text(s, text, length, path, e);
}

// ---------------------------------------------------------------------------------------------------------------------
// making a checkpoint

typedef struct {
    char out[PATH_CAP];
    char dir[PATH_CAP];  // what it will be called
    char tmp[PATH_CAP];  // where it is made: files may be added here until checkpoint_commit()
    FileSums sums;       // of the files whose checksum was taken while they were written
} Checkpoint;

/* OUT/step_NNNNNNNN and OUT/step_NNNNNNNN.tmp, each in PATH_CAP bytes. */
static inline bool checkpoint_paths(const char* out, uint64_t step, char* dir, char* tmp, Error* e) {
    char name[64];
    snprintf(name, sizeof name, "step_%08" PRIu64, step);
    if (!path_join(dir, out, name, e)) { return false; }
    snprintf(name, sizeof name, "step_%08" PRIu64 ".tmp", step);
    return path_join(tmp, out, name, e);
}

/* Gives up: removes the .tmp folder. Harmless after a commit. */
static inline void checkpoint_abort(Checkpoint* k) {
    Error ignored = NO_ERROR;
    if (k->tmp[0] && !remove_tree(k->tmp, &ignored)) { warn("%s", ignored.msg); }
    k->tmp[0] = 0;
    file_sums_free(&k->sums);
}

/* Starts one in an empty OUT/step_N.tmp. Then the parts below (checkpoint_copy_files() first, since what it brought is
 * kept), then checkpoint_commit(). Any function that fails leaves the rest to checkpoint_abort(). */
static inline bool checkpoint_begin(Checkpoint* k, const char* out, uint64_t step, Error* e) {
    memset(k, 0, sizeof *k);
    if (!checkpoint_paths(out, step, k->dir, k->tmp, e)) { return false; }
    snprintf(k->out, sizeof k->out, "%s", out);  // fits, since the longer paths did
    LLMC_FAULT_POINT("begin");
    return remove_tree(k->tmp, e) && make_directories(k->tmp, e);
}

static inline bool checkpoint_model(Checkpoint* k, const ModelConfig* c, const ParamTable* t, const char* dtype,
                                    TensorSource source, void* ctx, Error* e) {
    return model_save_sums(k->tmp, c, t, dtype, source, ctx, &k->sums, e);
}

/* This process's rank; other ranks call state_save() on the same folder. */
static inline bool checkpoint_state(Checkpoint* k, int rank, const ParamTable* t, size_t lo, size_t hi, const StateSlot* slots,
                                    int num_slots, Error* e) {
    return state_save(k->tmp, rank, t, lo, hi, slots, num_slots, &k->sums, e);
}

/* Whether a file of the source model's folder is weights, or something that a checkpoint writes itself. */
static inline bool checkpoint_skips(const char* name) {
    static const char* const ends[] = {".safetensors", ".index.json", ".bin",  ".pt",  ".pth",   ".ckpt", ".gguf",
                                       ".h5",          ".msgpack",    ".onnx", ".tmp", ".jsonl", ".npz"};
    static const char* const names[] = {"config.json", "trainer_state.json"};
    const size_t n = strlen(name);
    if (name[0] == '.' || n >= sizeof(((FileSum*)0)->name)) { return true; }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(name, names[i]) == 0) { return true; }
    }
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        const size_t m = strlen(ends[i]);
        if (n >= m && strcmp(name + n - m, ends[i]) == 0) { return true; }
    }
    return false;
}

/* Whether a tokenizer.model is tiktoken's text ("IQ== 0") and not SentencePiece's binary. */
static inline bool checkpoint_is_tiktoken(const char* path) {
    char head[8] = "";
    FILE* f = fopen(path, "rb");
    const size_t n = f ? fread(head, 1, sizeof head, f) : 0;
    if (f) { fclose(f); }
    const char* space = (const char*)memchr(head, ' ', n);
    return space && space > head && space[-1] == '=';
}

/* Copies what else lies in the folder a run started from: tokenizer, licence, generation settings. Weights, the files a
 * checkpoint writes itself, hidden files, folders, and what already lies in the checkpoint are left out. Meta's
 * tokenizer.model (tiktoken's text) goes into original/, where Meta keeps it: converters take one at the top for
 * SentencePiece's and stop. */
static inline bool checkpoint_copy_files(Checkpoint* k, const char* from, Error* e) {
    DIR* d = opendir(from);
    if (!d) { return fail(e, "%s: cannot open the folder: %s", from, strerror(errno)); }
    bool ok = true;
    char source[PATH_CAP], target[PATH_CAP], original[PATH_CAP], sub[PATH_CAP];
    ok = path_join(sub, k->tmp, "original", e) && path_join(original, sub, "tokenizer.model", e);
    for (struct dirent* entry = readdir(d); ok && entry; entry = readdir(d)) {
        struct stat st;
        if (checkpoint_skips(entry->d_name)) { continue; }
        ok = path_join(source, from, entry->d_name, e) && path_join(target, k->tmp, entry->d_name, e);
        if (!ok || stat(source, &st) != 0 || !S_ISREG(st.st_mode)) { continue; }
        if (strcmp(entry->d_name, "tokenizer.model") == 0 && checkpoint_is_tiktoken(source)) {
            ok = make_directories(sub, e);
            strcpy(target, original);
        }
        ok = ok && (file_exists(target) || copy_file(source, target, e));
    }
    closedir(d);
    ok = ok && path_join(source, from, "original/tokenizer.model", e);
    if (ok && file_exists(source) && !file_exists(original)) {
        ok = make_directories(sub, e) && copy_file(source, original, e);
    }
    return ok;
}

/* Sums (and flushes) every file below the folder that is not summed yet; `prefix` is "" or "original/". */
static inline bool checkpoint_sum_folder(FileSums* sums, const char* dir, const char* prefix, Error* e) {
    DIR* d = opendir(dir);
    if (!d) { return fail(e, "%s: cannot open the folder: %s", dir, strerror(errno)); }
    bool ok = true;
    for (struct dirent* entry = readdir(d); ok && entry; entry = readdir(d)) {
        char path[PATH_CAP], name[sizeof(((FileSum*)0)->name)];
        if (entry->d_name[0] == '.') { continue; }
        ok = path_join(path, dir, entry->d_name, e);
        if (!ok) { break; }
        const int length = snprintf(name, sizeof name, "%s%s", prefix, entry->d_name);
        if (length < 0 || length >= (int)sizeof name) {
            ok = fail(e, "%s: the name is longer than %zu bytes", path, sizeof name - 1);
            break;
        }
        if (is_directory(path)) {
            const bool known = !*prefix && strcmp(name, "original") == 0;
            ok = known ? checkpoint_sum_folder(sums, path, "original/", e)
                       : fail(e, "%s: a folder that no checkpoint has", path);
            continue;
        }
        bool known = false;
        for (size_t i = 0; i < sums->count; i++) { known = known || strcmp(sums->items[i].name, name) == 0; }
        uint64_t size = 0;
        uint32_t crc = 0;
        if (known) { continue; }
        ok = sync_file(path, e) && file_sum(path, &size, &crc, e);
        if (ok) { file_sums_add(sums, name, size, crc); }
    }
    closedir(d);
    return ok && sync_directory(dir, e);
}

static inline int file_sums_compare(const void* a, const void* b) {
    return strcmp(((const FileSum*)a)->name, ((const FileSum*)b)->name);
}

/* Swaps the finished folder with one that has its name already (damaged, or of a run that was set back), which is then
 * the .tmp. */
static inline bool checkpoint_exchange(const char* tmp, const char* dir) {
#ifdef RENAME_EXCHANGE
    if (renameat2(AT_FDCWD, tmp, AT_FDCWD, dir, RENAME_EXCHANGE) == 0) { return true; }
#endif
    // a file system without the exchange: for a moment only older checkpoints are there
    char aside[PATH_CAP];
    const int n = snprintf(aside, sizeof aside, "%s.old.tmp", dir);
    return n > 0 && n < PATH_CAP && rename(dir, aside) == 0 && rename(tmp, dir) == 0 && rename(aside, tmp) == 0;
}

/* Gives the finished folder its name. */
static inline bool checkpoint_rename(Checkpoint* k, Error* e) {
    LLMC_FAULT_POINT("rename");
    if (rename(k->tmp, k->dir) == 0) {
        k->tmp[0] = 0;
    } else if ((errno != EEXIST && errno != ENOTEMPTY) || !checkpoint_exchange(k->tmp, k->dir)) {
        return fail(e, "%s: cannot rename to %s: %s", k->tmp, k->dir, strerror(errno));
    }
    LLMC_FAULT_POINT("renamed");
    return sync_directory(k->out, e);
}

/* Sums the files, writes trainer_state.json, flushes, renames. Where it fails the .tmp is removed. */
static inline bool checkpoint_commit(Checkpoint* k, const TrainerState* s, Error* e) {
    char path[PATH_CAP];
    LLMC_FAULT_POINT("commit");
    bool ok = checkpoint_sum_folder(&k->sums, k->tmp, "", e) && path_join(path, k->tmp, "trainer_state.json", e);
    if (ok) { qsort(k->sums.items, k->sums.count, sizeof(FileSum), file_sums_compare); }  // the same bytes on any file system
    ok = ok && trainer_state_write(s, &k->sums, path, e);
    LLMC_FAULT_POINT("written");
    ok = ok && sync_directory(k->tmp, e) && checkpoint_rename(k, e);
    checkpoint_abort(k);  // what is left in .tmp: an unfinished checkpoint, or the one that was swapped out
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// finding, checking and pruning

/* The step of a name step_NNNNNNNN; false for any other name. */
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

/* The steps of all checkpoint folders of OUT, newest first; *steps is malloc'ed, NULL where there are none. A missing
 * OUT has none. */
static inline bool checkpoint_list(const char* out, uint64_t** steps, size_t* count, Error* e) {
    *steps = NULL;
    *count = 0;
    DIR* d = opendir(out);
    if (!d) { return errno == ENOENT || fail(e, "%s: cannot open the folder: %s", out, strerror(errno)); }
    for (struct dirent* entry = readdir(d); entry; entry = readdir(d)) {
        char path[PATH_CAP];
        uint64_t step = 0;
        if (!checkpoint_step_of(entry->d_name, &step) || !path_join(path, out, entry->d_name, e) || !is_directory(path)) {
            continue;
        }
        *steps = (uint64_t*)xrealloc(*steps, (*count + 1) * sizeof **steps);
        (*steps)[(*count)++] = step;
    }
    closedir(d);
    if (*count > 1) { qsort(*steps, *count, sizeof **steps, checkpoint_compare_newest); }
    return true;
}

/* Whether `files` has this name. */
static inline bool file_sums_have(const FileSums* files, const char* name) {
    for (size_t i = 0; i < files->count; i++) {
        if (strcmp(files->items[i].name, name) == 0) { return true; }
    }
    return false;
}

/* Reads dir/trainer_state.json and compares every file it lists with its size and checksum. Free *s with
 * trainer_state_free(), also where this fails. */
static inline bool checkpoint_read(const char* dir, TrainerState* s, Error* e) {
    char path[PATH_CAP], name[64];
    memset(s, 0, sizeof *s);
    if (!is_directory(dir)) {
        return fail(e, "%s: is %s, wanted a checkpoint's folder", dir, file_exists(dir) ? "a file" : "missing");
    }
    if (!path_join(path, dir, "trainer_state.json", e) || !trainer_state_read(s, path, e)) { return false; }
    if (!file_sums_have(&s->files, "config.json")) { return fail(e, "%s: files lists no config.json", s->path); }
    for (int rank = 0; rank < s->world_size; rank++) {
        state_file_name(name, rank);
        if (!file_sums_have(&s->files, name)) {
            return fail(e, "%s: files lists no %s, wanted world_size = %d of them", s->path, name, s->world_size);
        }
    }
    // sizes first: they cost nothing and find what was cut short
    for (size_t i = 0; i < s->files.count; i++) {
        const FileSum* f = &s->files.items[i];
        struct stat st;
        if (!path_join(path, dir, f->name, e)) { return false; }
        if (stat(path, &st) != 0) { return fail(e, "%s: is missing, wanted since trainer_state.json lists it", path); }
        if (!S_ISREG(st.st_mode) || (uint64_t)st.st_size != f->size) {
            return fail(e, "%s: is %lld bytes long, wanted %" PRIu64 " as trainer_state.json says", path, (long long)st.st_size,
                        f->size);
        }
    }
    for (size_t i = 0; i < s->files.count; i++) {
        const FileSum* f = &s->files.items[i];
        uint64_t size = 0;
        uint32_t crc = 0;
        if (!path_join(path, dir, f->name, e) || !file_sum(path, &size, &crc, e)) { return false; }
        if (size != f->size || crc != f->crc) {
            return fail(e,
                        "%s: the checksum is %" PRIu32 ", wanted %" PRIu32 " as trainer_state.json says: the file is damaged",
                        path, crc, f->crc);
        }
    }
    return true;
}

/* The newest whole checkpoint of OUT: its folder in dir (PATH_CAP bytes, "" where OUT has none at all) and its state.
 * Damaged ones are passed over with a warning; where all are, that is an error. */
static inline bool checkpoint_find(const char* out, char* dir, TrainerState* s, Error* e) {
    uint64_t* steps = NULL;
    size_t count = 0;
    char tmp[PATH_CAP];
    memset(s, 0, sizeof *s);
    dir[0] = 0;
    if (!checkpoint_list(out, &steps, &count, e)) { return false; }
    bool found = count == 0;
    for (size_t i = 0; i < count && !found; i++) {
        Error cause = NO_ERROR;
        found = checkpoint_paths(out, steps[i], dir, tmp, &cause) && checkpoint_read(dir, s, &cause) &&
                (s->step == steps[i] || fail(&cause, "%s: step is %" PRIu64 ", wanted the folder's", s->path, s->step));
        if (found) { break; }
        trainer_state_free(s);
        if (i + 1 < count) {
            warn("%s: taking the checkpoint before", cause.msg);
        } else {
            fail(e, "%s", cause.msg);
        }
    }
    free(steps);
    return found;
}

/* What --resume PATH means: a checkpoint's folder, or a folder of checkpoints and then its newest whole one. */
static inline bool checkpoint_open(const char* path, char* dir, TrainerState* s, Error* e) {
    char inside[PATH_CAP];
    memset(s, 0, sizeof *s);
    dir[0] = 0;
    if (!is_directory(path)) {
        return fail(e, "%s: is %s, wanted a checkpoint or a folder of checkpoints", path,
                    file_exists(path) ? "a file" : "missing");
    }
    if (!path_join(inside, path, "trainer_state.json", e)) { return false; }
    if (!file_exists(inside)) {
        if (!checkpoint_find(path, dir, s, e)) { return false; }
        return dir[0] || fail(e, "%s: holds no checkpoint, wanted a folder step_NNNNNNNN in it", path);
    }
    const size_t n = strlen(path);
    if (n >= 4 && strcmp(path + n - 4, ".tmp") == 0) {
        return fail(e, "%s: is an unfinished checkpoint, wanted a whole one", path);
    }
    snprintf(dir, PATH_CAP, "%s", path);
    return checkpoint_read(dir, s, e);
}

/* Removes what runs that died left behind: OUT/step_N.tmp and step_N.old.tmp. The caller holds the lock. */
static inline bool checkpoint_remove_stale(const char* out, Error* e) {
    DIR* d = opendir(out);
    if (!d) { return errno == ENOENT || fail(e, "%s: cannot open the folder: %s", out, strerror(errno)); }
    bool ok = true;
    for (struct dirent* entry = readdir(d); ok && entry; entry = readdir(d)) {
        char path[PATH_CAP], name[64];
        uint64_t step = 0;
        const size_t n = strcspn(entry->d_name, ".");
        if (n >= sizeof name || (strcmp(entry->d_name + n, ".tmp") != 0 && strcmp(entry->d_name + n, ".old.tmp") != 0)) {
            continue;
        }
        memcpy(name, entry->d_name, n);
        name[n] = 0;
        if (checkpoint_step_of(name, &step)) { ok = path_join(path, out, entry->d_name, e) && remove_tree(path, e); }
    }
    closedir(d);
    return ok;
}

/* Deletes old checkpoints after that of step `written`: the newest `keep` up to it stay (0: all), and those whose step is
 * a multiple of `major_every` (0: none). Later steps, of a run that was set back, are not touched; neither is `written`.
 * A folder that cannot be removed gives a warning: it must not end a run. */
static inline void checkpoint_prune(const char* out, int keep, uint64_t major_every, uint64_t written) {
    uint64_t* steps = NULL;
    size_t count = 0;
    int newer = 0;
    Error e = NO_ERROR;
    if (keep <= 0) { return; }
    if (!checkpoint_list(out, &steps, &count, &e)) { warn("%s", e.msg); }
    for (size_t i = 0; i < count; i++) {
        char dir[PATH_CAP], tmp[PATH_CAP];
        if (steps[i] > written || newer++ < keep || (major_every > 0 && steps[i] % major_every == 0)) { continue; }
        memset(&e, 0, sizeof e);
        LLMC_FAULT_POINT("prune");
        bool ok = checkpoint_paths(out, steps[i], dir, tmp, &e) && remove_tree(tmp, &e) &&
                  (rename(dir, tmp) == 0 || fail(&e, "%s: cannot rename to %s: %s", dir, tmp, strerror(errno)));
        LLMC_FAULT_POINT("pruned");
        ok = ok && remove_tree(tmp, &e);
        if (!ok) { warn("%s: the old checkpoint stays", e.msg); }
    }
    free(steps);
}

#endif
