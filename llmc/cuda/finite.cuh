/* finite.cuh -- finds a GPU tensor's first inf or NaN (debug.cuh).
 *
 * The kernel reads each element once, but no padding, and writes one number. The smallest index wins, so runs agree.
 */
#ifndef LLMC_FINITE_CUH
#define LLMC_FINITE_CUH

#include "llmc/cuda/cuda_common.cuh"

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

#endif
