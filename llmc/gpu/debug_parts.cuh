/* debug_parts.cuh -- names an inf or NaN among the weights and sums of gradients that this rank has of a tensor: the parts of
 * it in its shards (ZeRO 2 and 3), or all of it.
 */
#ifndef LLMC_DEBUG_PARTS_CUH
#define LLMC_DEBUG_PARTS_CUH

#include "llmc/gpu/debug.cuh"      // defines: debug_name
#include "llmc/gpu/exchange.cuh"   // defines: Exchange
#include "llmc/gpu/gradients.cuh"  // defines: Gradient, Gradients, gradient_of
#include "llmc/gpu/weights.cuh"    // defines: WeightArena, weight_at

/* Names the first element of n, from element `first` of tensor p on, that is not finite. Returns false if there is none. */
static inline bool part_not_finite(const Param* p, const char* what, const void* data, bool fp32, size_t first, size_t n,
                                   void* scratch, cudaStream_t stream, char name[TENSOR_TEXT]) {
    char text[128];
    const bool whole = n == param_size(p);
    snprintf(text, sizeof text, "%s%s", what, p->name);
    if (!whole) { snprintf(text, sizeof text, "%s%s from element %zu on", what, p->name, first); }
    const NamedTensor t = {text, -1, data, fp32, whole ? p->rows : 1, whole ? p->cols : n, whole ? p->cols : n};
    return debug_name(&t, 1, scratch, stream, name);
}

/* Does so with the weights of a tensor. */
static inline bool weight_not_finite(const WeightArena* a, const Param* p, void* scratch, char name[TENSOR_TEXT]) {
    const size_t size = param_size(p);
    for (size_t i = 0, run; i < size; i += run) {
        const floatX* at = weight_at(a, p->offset + i, &run);
        run = size_min(run, size - i);
        if (at && part_not_finite(p, "", at, false, i, run, scratch, a->stream, name)) { return true; }
    }
    return false;
}

/* Does so with all weights. */
static inline bool weights_not_finite(const WeightArena* a, const ParamTable* t, void* scratch, char name[TENSOR_TEXT]) {
    for (int i = 0; i < t->count; i++) {
        if (weight_not_finite(a, &t->items[i], scratch, name)) { return true; }
    }
    return false;
}

/* Does so with the sums over the ranks of a tensor's gradients. */
static inline bool sums_not_finite(const Exchange* x, const Param* p, void* scratch, char name[TENSOR_TEXT]) {
    const size_t size = param_size(p);
    for (size_t i = 0, run, local; i < size; i += run) {
        const bool own = shard_local(&x->buckets, x->rank, p->offset + i, &local);
        run = size_min(shard_left(&x->buckets, p->offset + i), size - i);
        if (own && part_not_finite(p, "the gradient of ", x->sums + local, true, i, run, scratch, x->compute, name)) {
            return true;
        }
    }
    return false;
}

/* Does so with all gradients. In a ring the matrices' gradients have been overwritten: their sums stand for them. */
static inline bool gradients_not_finite(const Gradients* g, const Exchange* x, void* scratch, cudaStream_t stream,
                                        char name[TENSOR_TEXT]) {
    for (int i = 0; i < g->trained.count; i++) {
        const Param* p = &g->trained.items[i];
        const bool in_ring = g->in_ring && param_specs[p->kind].matrix;
        const Gradient grad = in_ring ? Gradient{NULL, false} : gradient_of(g, p->kind, p->layer);
        const bool bad =
            in_ring ? sums_not_finite(x, p, scratch, name)
                    : part_not_finite(p, "the gradient of ", grad.data, grad.fp32, 0, param_size(p), scratch, stream, name);
        if (bad) { return true; }
    }
    return false;
}

#endif
