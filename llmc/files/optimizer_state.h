/* optimizer_state.h -- saves and loads the optimizer state: one file per rank, state_rank00000.safetensors ..., with tensors
 * "SLOT.PARAMETER".
 *
 * SLOT is m, v or master. A rank that owns elements [lo, hi) of the arena writes the parts of the parameters in that range.
 * A part that starts at element 96 of its parameter is named "m.NAME@96". A later run may have another number of ranks:
 * each rank reads all files and keeps what it owns.
 */
#ifndef LLMC_OPTIMIZER_STATE_H
#define LLMC_OPTIMIZER_STATE_H

#include "llmc/base/utils.h"

#include "llmc/config.h"
#include "llmc/files/file_sums.h"
#include "llmc/files/json.h"
#include "llmc/files/safetensors.h"
#include "llmc/files/tensor_stream.h"

// ---------------------------------------------------------------------------------------------------------------------
// what a rank stores

/* One kind of state: m, v or master. For writing, `source` gives the floats and `dtype` the format on disk. For reading,
 * `sink` takes the floats, or is NULL if the run does not need them. */
typedef struct {
    const char* name;
    SafeDtype dtype;  // F32 or BF16
    TensorSource source;
    TensorSink sink;
    void* ctx;
} StateSlot;

/* Parts of a model that can be read and written tensor by tensor. */
typedef enum {
    SLOT_WEIGHTS,  // the weights that the model computes with; unless LoRA freezes them, writing also sets the master weights
    SLOT_MASTER,   // the exact weights that AdamW updates: the same as SLOT_WEIGHTS in FP32; with LoRA the adapters
    SLOT_M,        // AdamW's moments
    SLOT_V,
    NUM_SLOTS
} SlotKind;
static const char* const slot_names[NUM_SLOTS] = {"weights", "master", "m", "v"};  // as state files name them

/* Finds the part of parameter p in [lo, hi) of the arena: returns its number of elements, sets *first to its first one. */
static inline size_t state_part(const Param* p, size_t lo, size_t hi, size_t* first) {
    const size_t begin = size_max(p->offset, lo), end = size_min(p->offset + param_size(p), hi);
    *first = begin - p->offset;
    return end > begin ? end - begin : 0;
}

static inline void state_file_name(char* out /* 64 */, int rank) { snprintf(out, 64, "state_rank%05d.safetensors", rank); }

typedef char StateTensorName[112];

/* Lists the tensors of a rank's file: for every slot, every part of a parameter in [lo, hi). Returns how many. */
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
            tensor->dtype = slots[s].dtype;
            if (whole && param_specs[p->kind].matrix) { tensor->shape[tensor->ndim++] = p->rows; }
            tensor->shape[tensor->ndim++] = whole ? p->cols : n;
            count++;
        }
    }
    return count;
}

// ---------------------------------------------------------------------------------------------------------------------
// writing

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
    float* buffer = (float*)xmalloc(MODEL_PIECE * sizeof(float));
    for (int s = 0; ok && s < num_slots; s++) {
        for (int i = 0; ok && i < t->count; i++) {
            size_t first = 0;
            const size_t n = state_part(&t->items[i], lo, hi, &first);
            ok = tensor_write(&w, slots[s].dtype, &t->items[i], first, n, slots[s].source, slots[s].ctx, buffer, e);
        }
    }
    free(buffer);
    free(tensors);
    free(names);
    ok = ok && safewriter_finish(&w, e);
    if (!ok) { safewriter_abort(&w); }
    if (ok) { file_sums_add(sums, name, w.written, crc_end(&w.crc)); }
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// reading

/* A tensor of a state file, with its name parsed. */
typedef struct {
    int slot;
    int param;
    size_t first;  // element of the parameter that the tensor starts at
    const SafeTensor* tensor;
    const SafeTensors* file;
} StatePart;

static inline int state_compare(const void* a, const void* b) {
    const StatePart *x = (const StatePart*)a, *y = (const StatePart*)b;
    if (x->slot != y->slot) { return x->slot - y->slot; }
    if (x->param != y->param) { return x->param - y->param; }
    return x->first < y->first ? -1 : x->first > y->first;
}

/* Parses a tensor's name, "SLOT.PARAMETER" or "SLOT.PARAMETER@FIRST", and checks its dtype and size. */
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
        return fail(e, "%s: tensor \"%s\" is state that this run does not keep (did another build write the checkpoint?)",
                    file->path, shown);
    }
    const size_t len = at ? (size_t)(at - dot - 1) : strlen(dot + 1);
    for (part->param = 0; part->param < t->count; part->param++) {
        const char* name = t->items[part->param].name;
        if (strlen(name) == len && strncmp(name, dot + 1, len) == 0) { break; }
    }
    if (part->param == t->count) {
        return fail(e, "%s: tensor \"%s\" belongs to no parameter of this model", file->path, shown);
    }
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

/* Checks that the parts cover every parameter of every slot exactly once. `parts` is sorted. */
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

/* Lists the pieces of the parts in [lo, hi) of the arena, for the sinks. */
static inline TensorPieces state_pieces(const StatePart* parts, size_t count, const ParamTable* t, size_t lo, size_t hi,
                                        const StateSlot* slots) {
    TensorPieces list = {NULL, 0};
    for (size_t k = 0; k < count; k++) {
        const StatePart* part = &parts[k];
        TensorPiece piece;
        memset(&piece, 0, sizeof piece);
        piece.file = part->file;
        piece.tensor = part->tensor;
        piece.param = &t->items[part->param];
        piece.sink = slots[part->slot].sink;
        piece.ctx = slots[part->slot].ctx;
        piece.squares = strcmp(slots[part->slot].name, slot_names[SLOT_V]) == 0;
        const size_t n = state_part(piece.param, lo, hi, &piece.first), last = piece.first + n;
        piece.first = size_max(piece.first, part->first);
        piece.at = piece.first - part->first;
        const size_t end = size_min(last, part->first + part->tensor->count);
        if (!piece.sink || end <= piece.first) { continue; }
        piece.n = end - piece.first;
        tensor_pieces_add(&list, piece);
    }
    return list;
}

/* Reads the state files of all `world_size` ranks of a checkpoint and passes the slots' elements in [lo, hi) of the arena to
 * their sinks. Checks all files before it passes the first element. Refuses values that are not finite, and a v below 0; after
 * a failure, discard what the sinks received. */
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
    if (ok && state_check_cover(dir, parts, count, t, slots, num_slots, e)) {
        TensorPieces pieces = state_pieces(parts, count, t, lo, hi, slots);
        Error value = NO_ERROR;
        ok = tensor_pieces_read(&pieces, &value, e) && (!value.msg[0] || fail(e, "%s", value.msg));
        tensor_pieces_free(&pieces);
    } else {
        ok = false;
    }
    free(parts);
    for (int rank = 0; rank < world_size; rank++) { safetensors_close(&files[rank]); }
    free(files);
    return ok;
}

#endif
