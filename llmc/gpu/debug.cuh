/* debug.cuh -- names the first tensor on the GPU that is not finite: for runs that diverge, and for --debug. It looks at the
 * weights and gradients that this rank holds. In ZeRO 2 and 3 it looks at the sums of gradients in its shards; in ZeRO 3 also
 * at its shards of the blocks' weights.
 */
#ifndef LLMC_DEBUG_CUH
#define LLMC_DEBUG_CUH

#include "llmc/config.h"  // defines: ParamTable
#include "llmc/cuda/cuda_common.cuh"
#include "llmc/cuda/finite.cuh"     // defines: FiniteIndex, ALL_FINITE, first_not_finite_cuda
#include "llmc/gpu/exchange.cuh"    // defines: Exchange
#include "llmc/gpu/gradients.cuh"   // defines: Gradient, Gradients, gradient_of
#include "llmc/gpu/weights.cuh"     // defines: WeightArena, weight_at
#include "llmc/train/not_finite.h"  // defines: NamedTensor, TENSOR_TEXT, tensor_element_text

/* Returns the first element of t that is not finite, or ALL_FINITE. `scratch` holds a FiniteIndex on the device. */
static inline FiniteIndex debug_first(const NamedTensor* t, void* scratch, cudaStream_t stream) {
    FiniteIndex first, *on_device = (FiniteIndex*)scratch;
    if (t->fp32) {
        first_not_finite_cuda(on_device, (const float*)t->data, t->rows, t->width, t->pitch, stream);
    } else {
        first_not_finite_cuda(on_device, (const floatX*)t->data, t->rows, t->width, t->pitch, stream);
    }
    CUDA_CHECK(cudaMemcpyAsync(&first, on_device, sizeof first, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    return first;
}

/* Names the first of `count` tensors that is not finite, with its element. Returns false if there is none. */
static inline bool debug_name(const NamedTensor* list, int count, void* scratch, cudaStream_t stream, char name[TENSOR_TEXT]) {
    for (int i = 0; i < count; i++) {
        const FiniteIndex first = debug_first(&list[i], scratch, stream);
        if (first == ALL_FINITE) { continue; }
        tensor_element_text(&list[i], (size_t)first, name);
        return true;
    }
    return false;
}

/* Does the same for the tensors of an arena. */
static inline bool debug_name_params(const ParamTable* t, const floatX* arena, void* scratch, cudaStream_t stream,
                                     char name[TENSOR_TEXT]) {
    for (int i = 0; i < t->count; i++) {
        const Param* p = &t->items[i];
        const NamedTensor w = {p->name, -1, arena + p->offset, false, p->rows, p->cols, p->cols};
        if (debug_name(&w, 1, scratch, stream, name)) { return true; }
    }
    return false;
}

/* Names the first element of n, from element `first` of tensor p on, that is not finite. Returns false if there is none. */
static inline bool part_not_finite(const Param* p, const char* what, const void* data, bool fp32, size_t first, size_t n,
                                   void* scratch, cudaStream_t stream, char name[TENSOR_TEXT]) {
    char text[160];
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
