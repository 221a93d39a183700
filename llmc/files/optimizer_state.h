/* optimizer_state.h -- saves and loads the optimizer state: one file per rank, state_rank00000.safetensors ..., with tensors
 * "SLOT.PARAMETER".
 *
 * SLOT is m, v or master. The file has no v of a tensor whose rule keeps none (optim/optimizer.h). A rank owns ranges of the
 * arena, and writes the parts of the parameters in them. A part that starts at element 96 of its parameter is named
 * "m.NAME@96"; a parameter may have several parts in a file. A later run may have another number of ranks: each rank opens
 * all files, checks that they hold each element once, and reads what it owns.
 */
#ifndef LLMC_OPTIMIZER_STATE_H
#define LLMC_OPTIMIZER_STATE_H

#include "llmc/base/utils.h"

#include "llmc/optim/optimizer.h"  // defines: SlotKind, slot_names, slot_kept, HeldState, held_place
#include "llmc/files/file_sums.h"
#include "llmc/files/safetensors.h"
#include "llmc/files/tensor_stream.h"

// ---------------------------------------------------------------------------------------------------------------------
// what a rank stores

/* Finds the part of parameter p in a range of the arena: returns its number of elements, sets *first to its first one. */
static inline size_t state_part(const Param* p, ArenaRange range, size_t* first) {
    const size_t begin = size_max(p->offset, range.first);
    const size_t end = size_min(p->offset + param_size(p), range.first + range.count);
    *first = begin - p->offset;
    return end > begin ? end - begin : 0;
}

static inline void state_file_name(char* out /* 64 */, int rank) { snprintf(out, 64, "state_rank%05d.safetensors", rank); }

typedef char StateName[112];

/* Lists the tensors of a rank's file: for every slot, every part of a parameter in the ranges, in the order of the arena.
 * Returns how many: at most num_slots * (parameters + ranges). */
static inline size_t state_list(const ParamTable* t, const ArenaRanges* own, const StateSlot* slots, int num_slots,
                                SafeTensor* tensors, TensorSpan* spans, StateName* names) {
    size_t count = 0;
    for (int s = 0; s < num_slots; s++) {
        for (int i = 0; i < t->count; i++) {
            const Param* p = &t->items[i];
            const size_t end = slot_kept(t, p, slots[s].name) ? p->offset + param_size(p) : 0;
            for (size_t r = arena_range_at(own, p->offset); r < own->count && own->items[r].first < end; r++, count++) {
                TensorSpan span = {&slots[s], p, 0, 0};
                SafeTensor* tensor = &tensors[count];
                span.n = state_part(p, own->items[r], &span.first);
                spans[count] = span;
                *tensor = tensor_of(p, names[count], slots[s].dtype);
                snprintf(names[count], sizeof(StateName), "%s.%s", slots[s].name, p->name);
                if (span.n == param_size(p)) { continue; }
                snprintf(names[count], sizeof(StateName), "%s.%s@%zu", slots[s].name, p->name, span.first);
                tensor->ndim = 1;
                tensor->shape[0] = span.n;
            }
        }
    }
    return count;
}

/* Writes the state that a rank owns into dir/state_rankRRRRR.safetensors and flushes it. */
static inline bool state_save(const char* dir, int rank, const ParamTable* t, const ArenaRanges* own, const StateSlot* slots,
                              int num_slots, FileSums* sums, Error* e) {
    char name[64];
    const size_t most = (size_t)num_slots * ((size_t)t->count + own->count);
    SafeTensor* tensors = (SafeTensor*)xmalloc(most * sizeof(SafeTensor));
    TensorSpan* spans = (TensorSpan*)xmalloc(most * sizeof(TensorSpan));
    StateName* names = (StateName*)xmalloc(most * sizeof(StateName));
    const size_t count = state_list(t, own, slots, num_slots, tensors, spans, names);
    state_file_name(name, rank);
    const bool ok = tensors_save(dir, name, tensors, spans, count, sums, e);
    free(tensors);
    free(spans);
    free(names);
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

/* Returns the index of the parameter with this name of `len` bytes; -1 if there is none. */
static inline int state_find(const ParamTable* t, const char* name, size_t len) {
    int i = 0;
    while (i < t->count && !(strncmp(t->items[i].name, name, len) == 0 && t->items[i].name[len] == 0)) { i++; }
    return i < t->count ? i : -1;
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
    part->param = state_find(t, dot + 1, len);
    if (part->param < 0) { return fail(e, "%s: tensor \"%s\" belongs to no parameter of this model", file->path, shown); }
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
    if (!slot_kept(t, &t->items[part->param], slots[part->slot].name)) {
        return fail(e, "%s: tensor \"%s\" is state that the optimizer %s does not keep", file->path, shown,
                    optimizer_rules[t->optimizer].word);
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
            if (k < count && parts[k].slot == s && parts[k].param == i) {
                return fail(e, "%s: tensor \"%s\" starts at element %zu, but the parts before it end at %zu, wanted each once",
                            parts[k].file->path, parts[k].tensor->name, parts[k].first, covered);
            }
            if (covered == param_size(&t->items[i]) || !slot_kept(t, &t->items[i], slots[s].name)) { continue; }
            return fail(e, "%s: tensor \"%s.%s\" has %zu of its %zu elements in the state files, wanted each once", dir,
                        slots[s].name, t->items[i].name, covered, param_size(&t->items[i]));
        }
    }
    return true;
}

/* Lists the pieces of the parts in the ranges, for the sinks. */
static inline TensorPieces state_pieces(const StatePart* parts, size_t count, const ParamTable* t, const ArenaRanges* own,
                                        const StateSlot* slots) {
    TensorPieces list = {NULL, 0};
    for (size_t k = 0; k < count; k++) {
        const StatePart* part = &parts[k];
        const Param* p = &t->items[part->param];
        const size_t begin = p->offset + part->first, end = begin + part->tensor->count;
        TensorPiece piece;
        memset(&piece, 0, sizeof piece);
        piece.file = part->file;
        piece.tensor = part->tensor;
        piece.param = p;
        piece.slot = &slots[part->slot];
        piece.squares = strcmp(slots[part->slot].name, slot_names[SLOT_V]) == 0;
        if (!piece.slot->sink && !piece.slot->passed) { continue; }
        for (size_t r = arena_range_at(own, begin); r < own->count && own->items[r].first < end; r++) {
            const size_t from = size_max(begin, own->items[r].first);
            piece.first = from - p->offset;
            piece.at = from - begin;
            piece.n = size_min(end, own->items[r].first + own->items[r].count) - from;
            tensor_pieces_add(&list, piece);
        }
    }
    return list;
}

/* Reads the state files of all `world_size` ranks of a checkpoint and passes the slots' elements in the ranges to their sinks;
 * a sink's piece lies in one range. Checks all files before it passes the first element. Reads the headers of all files, but
 * only the elements in the ranges. Refuses values that are not finite, and a v below 0; after a failure, discard what the sinks
 * received. */
static inline bool state_load(const char* dir, int world_size, const ParamTable* t, const ArenaRanges* own,
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
        TensorPieces pieces = state_pieces(parts, count, t, own, slots);
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

/* A slot in host memory, in fp32: the ctx of the functions below. */
typedef struct {
    float* arena;
    const HeldState* held;
    SlotKind kind;
} HostSlot;

/* Returns where element `first` of a parameter lies. */
static inline float* host_slot_at(const HostSlot* s, const Param* p, size_t first) {
    const size_t at = p->offset + first;
    return s->arena + (s->kind < SLOT_M ? at : held_place(s->held, s->kind, at));
}

static inline bool host_slot_fetch(void* slot, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    (void)e;
    memcpy(dst, host_slot_at((HostSlot*)slot, p, first), n * sizeof(float));
    return true;
}

static inline bool host_slot_store(void* slot, const Param* p, size_t first, size_t n, const float* src, Error* e) {
    (void)e;
    memcpy(host_slot_at((HostSlot*)slot, p, first), src, n * sizeof(float));
    return true;
}

/* Makes the slot of an arena: of all weights, or of m or v, as `held` lays them out. *s must outlive it. */
static inline StateSlot host_slot(HostSlot* s, SlotKind kind, float* arena, const HeldState* held) {
    const StateSlot slot = {slot_names[kind], SAFE_F32, host_slot_fetch, host_slot_store, s, NULL};
    s->arena = arena;
    s->held = held;
    s->kind = kind;
    return slot;
}

#endif
