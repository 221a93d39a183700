/* lockstep.h -- writes weights whose parts lie on several ranks: all ranks ask one source for the same pieces in the same
 * order, and each gives its parts. Rank 0 asks as it writes; the others walk the table in that order. If rank 0's write fails
 * (a full disk), it still asks for the rest, or the others would hang.
 */
#ifndef LLMC_LOCKSTEP_H
#define LLMC_LOCKSTEP_H

#include "llmc/config.h"               // defines: ParamTable
#include "llmc/files/tensor_stream.h"  // defines: TensorSource, MODEL_PIECE

typedef struct {
    TensorSource source;  // all ranks call it in the same order; gives rank 0 the piece
    void* ctx;
    uint64_t asked;  // pieces so far
} Lockstep;

/* A TensorSource for a writer. */
static inline bool lockstep_piece(void* lockstep, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    Lockstep* c = (Lockstep*)lockstep;
    c->asked++;
    return c->source(c->ctx, p, first, n, dst, e);
}

/* Asks for the pieces of a table that nobody asked for, in the order of model_save_weights() and adapter_save(), and drops
 * them. */
static inline bool lockstep_rest(Lockstep* c, const ParamTable* t, Error* e) {
    float* buffer = (float*)xmalloc(MODEL_PIECE * sizeof(float));
    uint64_t piece = 0;
    bool ok = true;
    for (int i = 0; ok && i < t->count; i++) {
        const size_t size = param_size(&t->items[i]);
        for (size_t first = 0; ok && first < size; first += MODEL_PIECE) {
            if (piece++ < c->asked) { continue; }
            ok = lockstep_piece(c, &t->items[i], first, size_min(size - first, MODEL_PIECE), buffer, e);
        }
    }
    free(buffer);
    return ok;
}

#endif
