/* debug.cuh -- finds a GPU tensor's first inf or NaN: for runs that diverge, and for --debug. The search (train/not_finite.h)
 * looks at the weights and gradients that this rank holds. In ZeRO 2 and 3 it looks at the sums of gradients in its shards;
 * in ZeRO 3 also at its shards of the blocks' weights.
 *
 * The kernel reads each element once, but no padding, and writes one number. The smallest index wins, so runs agree.
 */
#ifndef LLMC_DEBUG_CUH
#define LLMC_DEBUG_CUH

#include "llmc/config.h"              // defines: ParamTable
#include "llmc/cuda/cuda_common.cuh"  // defines: CUDA_CHECK, load_stream
#include "llmc/gpu/exchange.cuh"      // defines: Exchange
#include "llmc/gpu/gradients.cuh"     // defines: Gradient, Gradients, gradient_of, gradients_bytes, gradients_home
#include "llmc/gpu/layers.cuh"        // defines: Queue
#include "llmc/gpu/weights.cuh"       // defines: WeightArena, weight_at
#include "llmc/train/not_finite.h"    // defines: FiniteSearch, NamedTensor, search_param

typedef unsigned long long FiniteIndex;  // atomicMin takes this type
constexpr FiniteIndex ALL_FINITE = ~(FiniteIndex)0;

enum { FINITE_THREADS = 256, FINITE_BLOCKS = 2048 };

template <int W, typename T>
__global__ void __launch_bounds__(FINITE_THREADS)
    first_not_finite_kernel(FiniteIndex* first, const T* x, size_t rows, size_t width, size_t pitch) {
    const size_t vectors = width / W, stride = (size_t)gridDim.x * FINITE_THREADS;
    FiniteIndex found = ALL_FINITE;
    for (size_t i = (size_t)blockIdx.x * FINITE_THREADS + threadIdx.x; i < rows * vectors; i += stride) {
        const size_t row = i / vectors, column = i % vectors * W;
        const Vec<T, W> v = load_stream<W>(x + row * pitch + column);
#pragma unroll
        for (int k = W - 1; k >= 0; k--) {
            if (!isfinite(to_float(v.v[k]))) { found = min(found, (FiniteIndex)(row * width + column + k)); }
        }
    }
    if (found != ALL_FINITE) { atomicMin(first, found); }
}

/* Sets *first, on the device, to row * width + column of the first inf or NaN of x (rows, width), pitch, or to ALL_FINITE. A
 * flat array of n is (1, n). x starts at a multiple of 16 bytes; if there are several rows, so does each row. */
template <typename T>
static void first_not_finite_cuda(FiniteIndex* first, const T* x, size_t rows, size_t width, size_t pitch,
                                  cudaStream_t stream) {
    CUDA_CHECK(cudaMemsetAsync(first, 0xff, sizeof *first, stream));
    if (rows == 0 || width == 0) { return; }
    constexpr int W = VECTOR<T>;
    if (width % W == 0) {
        const unsigned grid = (unsigned)size_min(FINITE_BLOCKS, ceil_div(rows * width / W, FINITE_THREADS));
        first_not_finite_kernel<W><<<grid, FINITE_THREADS, 0, stream>>>(first, x, rows, width, pitch);
    } else {
        const unsigned grid = (unsigned)size_min(FINITE_BLOCKS, ceil_div(rows * width, FINITE_THREADS));
        first_not_finite_kernel<1><<<grid, FINITE_THREADS, 0, stream>>>(first, x, rows, width, pitch);
    }
    CUDA_CHECK_LAUNCH("first_not_finite_kernel");
}

/* The search of FiniteSearch on the stream of a queue, whose scratch holds a FiniteIndex. */
static inline size_t first_not_finite_on_gpu(const void* queue, const NamedTensor* t) {
    const Queue* q = (const Queue*)queue;
    FiniteIndex first, *on_device = (FiniteIndex*)q->scratch;
    if (t->bytes == sizeof(float)) {
        first_not_finite_cuda(on_device, (const float*)t->data, t->rows, t->width, t->pitch, q->stream);
    } else {
        first_not_finite_cuda(on_device, (const floatX*)t->data, t->rows, t->width, t->pitch, q->stream);
    }
    CUDA_CHECK(cudaMemcpyAsync(&first, on_device, sizeof first, cudaMemcpyDeviceToHost, q->stream));
    CUDA_CHECK(cudaStreamSynchronize(q->stream));
    return first == ALL_FINITE ? SIZE_MAX : (size_t)first;
}

static inline FiniteSearch search_on_gpu(const Queue* q, char name[TENSOR_TEXT]) {
    return {name, false, first_not_finite_on_gpu, q};
}

/* Searches all weights of a table. */
static inline void search_weights(FiniteSearch* s, const WeightArena* a, const ParamTable* t) {
    for (int i = 0; i < t->count; i++) {
        const Param* p = &t->items[i];
        for (size_t k = 0, run; k < param_size(p); k += run) {
            const floatX* at = weight_at(a, p->offset + k, &run);
            run = size_min(run, param_size(p) - k);
            if (at) { search_param(s, "", p, k, run, at, sizeof(floatX)); }
        }
    }
}

/* Searches all gradients. In a ring the matrices' gradients have been overwritten: their sums over the ranks stand for them. */
static inline void search_gradients(FiniteSearch* s, const Gradients* g, const Exchange* x) {
    static const char of[] = "the gradient of ";
    host_stream_finish(g->host);  // the last ones may still be on their way
    for (int i = 0; i < g->trained.count; i++) {
        const Param* p = &g->trained.items[i];
        if (!g->in_ring || !param_specs[p->kind].matrix) {
            Gradient grad = gradient_of(g, p->kind, p->layer);
            if (param_specs[p->kind].matrix && gradient_on_host(g, p->offset)) {
                grad.data = gradients_home(g, p->offset).data;
            }
            search_param(s, of, p, 0, param_size(p), grad.data, gradients_bytes(grad.fp32));
            continue;
        }
        for (size_t k = 0, run, local; k < param_size(p); k += run) {
            const bool own = shard_local(&x->buckets, x->rank, p->offset + k, &local);
            run = size_min(shard_left(&x->buckets, p->offset + k), param_size(p) - k);
            if (own) { search_param(s, of, p, k, run, x->sums + local, sizeof(float)); }
        }
    }
}

#endif
