/* debug.cuh -- --debug: names the first tensor that is not finite, in the order of computation.
 */
#ifndef LLMC_DEBUG_CUH
#define LLMC_DEBUG_CUH

#include "llmc/gpu/cuda_common.cuh"
#include "llmc/gpu/finite.cuh"  // defines: FiniteIndex, ALL_FINITE, first_not_finite_cuda

/* A tensor (rows, width) on the device, of floatX or float. */
typedef struct {
    const char* name;
    int layer;  // -1: none
    const void* data;
    bool fp32;
    size_t rows, width, pitch;
} NamedTensor;

/* Prints the first element that is not finite; returns false if all are finite. `scratch` holds a FiniteIndex on the device. */
static inline bool debug_report(const NamedTensor* t, void* scratch, cudaStream_t stream) {
    FiniteIndex first, *on_device = (FiniteIndex*)scratch;
    char where[32] = "";
    if (t->fp32) {
        first_not_finite_cuda(on_device, (const float*)t->data, t->rows, t->width, t->pitch, stream);
    } else {
        first_not_finite_cuda(on_device, (const floatX*)t->data, t->rows, t->width, t->pitch, stream);
    }
    CUDA_CHECK(cudaMemcpyAsync(&first, on_device, sizeof first, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    if (first == ALL_FINITE) { return false; }
    if (t->layer >= 0) { snprintf(where, sizeof where, " of layer %d", t->layer); }
    printf("debug   not finite: %s%s, row %llu, column %llu\n", t->name, where, first / t->width, first % t->width);
    return true;
}

/* Prints the first of `count` tensors that is not finite; returns false if all are finite. */
static inline bool debug_report_first(const NamedTensor* list, int count, void* scratch, cudaStream_t stream) {
    for (int i = 0; i < count; i++) {
        if (debug_report(&list[i], scratch, stream)) { return true; }
    }
    return false;
}

#endif
