/* tensor_stream.h -- moves weights and optimizer state between files and a trainer, as floats in pieces: neither side holds a
 * second copy.
 *
 * Reading is parallel. All threads read, convert and check the pieces of a batch. Meanwhile the calling thread passes the
 * previous batch's pieces to their sinks, then helps reading. Only that thread calls the sinks, one piece at a time, in the
 * order of the list: a sink may own one staging buffer, or a GPU. A file's checksum is put together from its pieces in any
 * order (crc_shift()). model_folder.h and optimizer_state.h make the lists.
 */
#ifndef LLMC_TENSOR_STREAM_H
#define LLMC_TENSOR_STREAM_H

#include "llmc/base/utils.h"

#include "llmc/base/crc.h"
#include "llmc/base/float16.h"
#include "llmc/base/progress.h"  // defines: Progress, progress_add
#include "llmc/base/threads.h"   // defines: thread_number
#include "llmc/config.h"
#include "llmc/files/file_sums.h"  // defines: FileSums, file_sums_add
#include "llmc/files/safetensors.h"
#include "llmc/base/text.h"

#include <math.h>

enum { MODEL_PIECE = 1 << 20 };  // most floats that a sink gets, or a source is asked for, at a time
#ifndef TENSOR_READ_PIECE
#define TENSOR_READ_PIECE (1 << 18)  // floats that one thread reads at a time: 1 MiB fits its cache
#endif
enum { TENSOR_READ_BATCH = 32 };  // pieces read while as many are passed to the sinks

/* Receives n elements of p, from element `first` on. */
typedef bool (*TensorSink)(void* ctx, const Param* p, size_t first, size_t n, const float* src, Error* e);
/* Writes n elements of p, from element `first` on, to dst. */
typedef bool (*TensorSource)(void* ctx, const Param* p, size_t first, size_t n, float* dst, Error* e);

/* Counts the elements that have passed between a model and files. */
typedef struct {
    Progress progress;  // of elements
    bool not_finite;    // a value that was written is not finite
} Passed;

/* One kind of tensors of a model: its weights, or a part of the optimizer's state (optimizer_state.h). For writing, `source`
 * gives the floats and `dtype` the format on disk. For reading, `sink` gets the floats; NULL: the run does not need them. */
typedef struct {
    const char* name;
    SafeDtype dtype;  // F32, BF16 or F16
    TensorSource source;
    TensorSink sink;
    void* ctx;
    Passed* passed;  // counts the floats; NULL: nobody does
} StateSlot;

/* Return a slot for writing alone, and for reading alone. */
static inline StateSlot slot_from(SafeDtype dtype, TensorSource source, void* ctx) {
    const StateSlot slot = {"", dtype, source, NULL, ctx, NULL};
    return slot;
}
static inline StateSlot slot_to(TensorSink sink, void* ctx) {
    const StateSlot slot = {"", SAFE_F32, NULL, sink, ctx, NULL};
    return slot;
}

/* Passes n elements that were read or drawn to the slot. */
static inline bool slot_store(const StateSlot* to, const Param* p, size_t first, size_t n, const float* src, Error* e) {
    if (to->passed) { progress_add(&to->passed->progress, n); }
    return !to->sink || to->sink(to->ctx, p, first, n, src, e);
}

/* Draws fresh parameters for the slot's sink, by param_init(), in the order of the table. */
static inline bool tensors_draw(const ModelConfig* c, const ParamTable* t, uint64_t seed, StateSlot to, Error* e) {
    float* w = (float*)xmalloc(MODEL_PIECE * sizeof *w);
    bool ok = true;
    for (int i = 0; i < t->count; i++) {
        const Param* p = &t->items[i];
        for (size_t first = 0; ok && first < param_size(p); first += MODEL_PIECE) {
            const size_t n = size_min(MODEL_PIECE, param_size(p) - first);
            param_init(w, p, first, n, (uint32_t)i, c, seed);
            ok = slot_store(&to, p, first, n, w, e);
        }
    }
    free(w);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// reading

/* Elements [at, at + n) of a tensor, which are elements [first, first + n) of a parameter. Without a tensor: bytes
 * [at, at + n) of the file, read only for the checksum. */
typedef struct {
    const SafeTensors* file;
    const SafeTensor* tensor;
    size_t at, n;
    const Param* param;
    size_t first;
    const StateSlot* slot;  // gets the elements; NULL: none does
    bool squares;           // a mean of squares: no value is below 0
    uint32_t* sum;          // the file's checksum, which takes the piece's share (XOR); NULL: not wanted
} TensorPiece;

typedef struct {
    TensorPiece* items;
    size_t count;
} TensorPieces;

/* Appends a piece of any length, cut into pieces that one thread reads. */
static inline void tensor_pieces_add(TensorPieces* list, TensorPiece whole) {
    const size_t most = whole.tensor ? TENSOR_READ_PIECE : TENSOR_READ_PIECE * sizeof(float);
    for (size_t done = 0; done < whole.n; done += most) {
        if ((list->count & (list->count - 1)) == 0) {  // full at each power of two
            list->items = (TensorPiece*)xrealloc(list->items, size_max(1, 2 * list->count) * sizeof(TensorPiece));
        }
        TensorPiece* piece = &list->items[list->count++];
        *piece = whole;
        piece->at += done;
        piece->first += done;
        piece->n = size_min(whole.n - done, most);
    }
}

static inline void tensor_pieces_free(TensorPieces* list) {
    free(list->items);
    memset(list, 0, sizeof *list);
}

/* A piece that was read. */
typedef struct {
    float values[TENSOR_READ_PIECE];
    size_t good;     // number of values before the first that is not finite, or below 0 among squares
    uint32_t share;  // the piece's share of the file's checksum
    Error error;
} TensorSlot;

/* Returns the number of values before the first that is not finite, or below 0 among squares. Works on bits: as integers,
 * numbers below 0 are above -0. */
static inline size_t count_good(const float* x, size_t n, bool squares) {
    const uint32_t infinite = 0x7F800000u, most = squares ? 0x80000000u : UINT32_MAX;
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i++) {
        bad |= (uint32_t)((float_bits(x[i]) & infinite) == infinite) | (uint32_t)(float_bits(x[i]) > most);
    }
    size_t i = bad ? 0 : n;
    while (i < n && (float_bits(x[i]) & infinite) != infinite && float_bits(x[i]) <= most) { i++; }
    return i;
}

/* Reads, converts and checks one piece. Any thread may call it. */
static inline void tensor_piece_read(const TensorPiece* p, TensorSlot* slot) {
    const SafeTensors* file = p->file;
    const size_t size = p->tensor ? safe_dtypes[p->tensor->dtype].bytes : 1;
    const uint64_t begin = p->at * size + (p->tensor ? p->tensor->begin : 0);
    Crc crc;
    slot->error.msg[0] = 0;
    if (p->sum) { crc_begin(&crc); }
    if (p->tensor) {
        safetensors_read_sum(file, p->tensor, p->at, p->n, slot->values, p->sum ? &crc : NULL, &slot->error);
        slot->good = count_good(slot->values, p->n, p->squares);
    } else if (read_at(file->fd, begin, slot->values, p->n, file->path, "the file", &slot->error)) {
        crc_add(&crc, slot->values, p->n);
        slot->good = p->n;
    }
    if (p->sum) { slot->share = crc_shift(crc_end(&crc), file->size - begin - p->n * size); }
}

/* Fails with "FILE: tensor NAME is nan at [row, col], wanted a finite number". */
static inline bool tensor_fail_value(const TensorPiece* p, const TensorSlot* slot, Error* e) {
    const SafeTensor* t = p->tensor;
    const size_t index = p->at + slot->good, cols = t->ndim > 0 ? t->shape[t->ndim - 1] : 1;
    const float value = slot->values[slot->good];
    char where[64], shown[100];
    if (t->ndim > 1) {
        snprintf(where, sizeof where, "%zu, %zu", index / cols, index % cols);
    } else {
        snprintf(where, sizeof where, "%zu", index);
    }
    return fail(e, "%s: tensor %s is %g at [%s], wanted a %s", p->file->path,
                show_text(shown, sizeof shown, t->name, strlen(t->name)), isnan(value) ? (double)NAN : (double)value, where,
                p->squares ? "number of at least 0" : "finite number");
}

/* Passes the pieces of a batch to their sinks. Only the calling thread runs this. */
static inline bool tensor_pieces_hand_over(const TensorPiece* pieces, const TensorSlot* slots, size_t count, Error* bad_value,
                                           Error* e) {
    for (size_t i = 0; i < count; i++) {
        const TensorPiece* p = &pieces[i];
        if (slots[i].error.msg[0]) { return fail(e, "%s", slots[i].error.msg); }
        if (p->sum) { *p->sum ^= slots[i].share; }
        if (bad_value && slots[i].good < p->n) { tensor_fail_value(p, &slots[i], bad_value); }
        if (p->slot && !slot_store(p->slot, p->param, p->first, p->n, slots[i].values, e)) { return false; }
    }
    return true;
}

/* Reads all pieces and passes them to their sinks in order. `bad_value` (NULL: accept any value) gets the error of the first
 * value that is not good. Reading continues after it: if the file's checksum is wrong too, that is the better message. */
static inline bool tensor_pieces_read(const TensorPieces* list, Error* bad_value, Error* e) {
    const size_t count = list->count, batch = TENSOR_READ_BATCH;
    TensorSlot* slots[2];
    for (int i = 0; i < 2; i++) { slots[i] = (TensorSlot*)xmalloc(size_min(count, batch) * sizeof(TensorSlot)); }
    bool ok = true;
    for (size_t at = 0; ok && at < count + batch; at += batch) {  // the last round only passes on the last batch
        const size_t begin = size_min(at, count), end = size_min(at + batch, count), before = at > 0 ? at - batch : 0;
        TensorSlot *filling = slots[at / batch % 2], *filled = slots[(at / batch + 1) % 2];
#pragma omp parallel
        {
            if (thread_number() == 0) {
                ok = tensor_pieces_hand_over(list->items + before, filled, begin - before, bad_value, e);
            }
#pragma omp for schedule(dynamic)
            for (size_t i = begin; i < end; i++) { tensor_piece_read(&list->items[i], &filling[i - begin]); }
        }
    }
    for (int i = 0; i < 2; i++) { free(slots[i]); }
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// writing

/* Fails if one of n elements of a parameter, from element `first` on, is finite, but infinite once it is rounded to the format:
 * its magnitude has bits of at least `least`, such as F16_INFINITE. `format`: the format's name. */
static inline bool tensor_fits(const float* x, size_t n, uint32_t least, const char* format, const char* path, const Param* p,
                               size_t first, Error* e) {
    bool large = false;
    for (size_t i = 0; i < n; i++) { large |= (float_bits(x[i]) & 0x7FFFFFFFu) - least < 0x7F800000u - least; }
    if (!large) { return true; }
    size_t i = 0;
    while ((float_bits(x[i]) & 0x7FFFFFFFu) - least >= 0x7F800000u - least) { i++; }
    e->too_large = true;
    return fail(e, "%s: tensor %s is %g at [%zu, %zu], which is infinite in %s", path, p->name, (double)x[i],
                (first + i) / p->cols, (first + i) % p->cols, format);
}

/* Gets n elements from the slot, to write them. */
static inline bool slot_fetch(const StateSlot* from, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    if (from->passed) { progress_add(&from->passed->progress, n); }
    if (!from->source(from->ctx, p, first, n, dst, e)) { return false; }
    if (from->passed) { from->passed->not_finite |= count_good(dst, n, false) < n; }
    return true;
}

/* Writes elements [first, first + n) of a parameter from a slot, rounded to its dtype. `buffer` holds MODEL_PIECE floats. Fails
 * if rounding would make a finite element infinite. */
static inline bool tensor_write(SafeWriter* w, const StateSlot* slot, const Param* p, size_t first, size_t n, float* buffer,
                                Error* e) {
    const SafeDtype dtype = slot->dtype;
    const uint32_t least = dtype == SAFE_F16 ? F16_INFINITE : dtype == SAFE_BF16 ? BF16_INFINITE : 0x7F800000u;
    for (size_t done = 0; done < n; done += MODEL_PIECE) {
        const size_t m = size_min(n - done, MODEL_PIECE);
        if (!slot_fetch(slot, p, first + done, m, buffer, e) ||
            !tensor_fits(buffer, m, least, safe_dtypes[dtype].name, w->path, p, first + done, e) ||
            !safewriter_f32(w, dtype, buffer, m, e)) {
            return false;
        }
    }
    return true;
}

/* Elements [first, first + n) of a parameter, which are a tensor of a file. */
typedef struct {
    const StateSlot* slot;
    const Param* param;
    size_t first, n;
} TensorSpan;

/* Describes a tensor that holds a whole parameter. */
static inline SafeTensor tensor_of(const Param* p, const char* name, SafeDtype dtype) {
    SafeTensor s;
    memset(&s, 0, sizeof s);
    s.name = name;
    s.dtype = dtype;
    if (param_specs[p->kind].matrix) { s.shape[s.ndim++] = p->rows; }
    s.shape[s.ndim++] = p->cols;
    return s;
}

/* Writes a file of `count` tensors into dir and flushes it. Appends its size and checksum to `sums` (or NULL). */
static inline bool tensors_save(const char* dir, const char* name, const SafeTensor* tensors, const TensorSpan* spans,
                                size_t count, FileSums* sums, Error* e) {
    char path[PATH_CAP];
    SafeWriter w;
    if (!path_join(path, dir, name, e) || !safewriter_open(&w, path, tensors, count, e)) { return false; }
    float* buffer = (float*)xmalloc(MODEL_PIECE * sizeof(float));
    bool ok = true;
    for (size_t i = 0; ok && i < count; i++) {
        ok = tensor_write(&w, spans[i].slot, spans[i].param, spans[i].first, spans[i].n, buffer, e);
    }
    free(buffer);
    ok = ok && safewriter_finish(&w, e);
    if (!ok) { safewriter_abort(&w); }
    if (ok) { file_sums_add(sums, name, w.written, crc_end(&w.crc)); }
    return ok;
}

#endif
