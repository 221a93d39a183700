/* collect.h -- writing what rank 0 does not have: the parts of a weight lie on several ranks, and every rank has to give its
 * own when rank 0 comes to it. So all ranks ask one source for the same pieces in the same order. Rank 0 does by writing them.
 * The others ask for all in the order of the writer, and so does rank 0 from where its writing failed (a full disk), or they
 * would wait for it.
 */
#ifndef LLMC_COLLECT_H
#define LLMC_COLLECT_H

#include "llmc/config.h"               // defines: ParamTable
#include "llmc/files/tensor_stream.h"  // defines: TensorSource, MODEL_PIECE

typedef struct {
    TensorSource source;  // all ranks call it alike; gives rank 0 the piece
    void* ctx;
    uint64_t asked;  // pieces so far
} Collected;

/* A TensorSource for a writer. */
static inline bool collected_piece(void* collected, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    Collected* c = (Collected*)collected;
    c->asked++;
    return c->source(c->ctx, p, first, n, dst, e);
}

/* Asks for the pieces of a table that nobody asked for, in the order of model_save_weights() and adapter_save(), and drops
 * them. */
static inline bool collected_rest(Collected* c, const ParamTable* t, Error* e) {
    float* buffer = (float*)xmalloc(MODEL_PIECE * sizeof(float));
    uint64_t piece = 0;
    bool ok = true;
    for (int i = 0; ok && i < t->count; i++) {
        const size_t size = param_size(&t->items[i]);
        for (size_t first = 0; ok && first < size; first += MODEL_PIECE) {
            if (piece++ < c->asked) { continue; }
            ok = collected_piece(c, &t->items[i], first, size_min(size - first, MODEL_PIECE), buffer, e);
        }
    }
    free(buffer);
    return ok;
}

#endif
