/* debug.cuh -- names the first tensor on the GPU that is not finite: for runs that diverge, and for --debug.
 */
#ifndef LLMC_DEBUG_CUH
#define LLMC_DEBUG_CUH

#include "llmc/config.h"  // defines: ParamTable
#include "llmc/cuda/cuda_common.cuh"
#include "llmc/cuda/finite.cuh"     // defines: FiniteIndex, ALL_FINITE, first_not_finite_cuda
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

/* The same of the tensors of an arena. */
static inline bool debug_name_params(const ParamTable* t, const floatX* arena, void* scratch, cudaStream_t stream,
                                     char name[TENSOR_TEXT]) {
    for (int i = 0; i < t->count; i++) {
        const Param* p = &t->items[i];
        const NamedTensor w = {p->name, -1, arena + p->offset, false, p->rows, p->cols, p->cols};
        if (debug_name(&w, 1, scratch, stream, name)) { return true; }
    }
    return false;
}

#endif
