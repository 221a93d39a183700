/* uniform.cuh -- fills tensors on the GPU with uniform numbers, for tests and timings that need no special data. */
#ifndef LLMC_UNIFORM_CUH
#define LLMC_UNIFORM_CUH

#include "llmc/cuda/cuda_common.cuh"  // defines: floatX, from_float, CUDA_CHECK_LAUNCH

__global__ void uniform_fill_kernel(floatX* x, size_t n, uint32_t seed) {
    const size_t stride = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
        uint32_t z = (uint32_t)i * 2654435761u + (uint32_t)(i >> 32) * 40503u + seed;
        z = (z ^ z >> 16) * 0x85ebca6bu;
        z = (z ^ z >> 13) * 0xc2b2ae35u;
        z ^= z >> 16;
        x[i] = from_float<floatX>((float)(z >> 8) * (2.0f / 16777216.0f) - 1.0f);
    }
}

/* Sets x[i] to a number in [-1, 1) that is a function of (seed, i). n may pass 2^32. */
static void uniform_fill_cuda(floatX* x, size_t n, uint32_t seed) {
    uniform_fill_kernel<<<1024, 256>>>(x, n, seed);
    CUDA_CHECK_LAUNCH("uniform_fill_kernel");
}

#endif
