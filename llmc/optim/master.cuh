/* master.cuh -- the weights' fp32 values between steps ("master weights"), and how they are rounded to 16 bits.
 *
 *   none    the parameters themselves. FP32 builds have no others. In BF16 builds the optimizer rounds each new weight
 *           stochastically: rounded to nearest, a weight would not move as long as its steps are below half a unit in its
 *           last place.
 *           Weights that are loaded are rounded to nearest once, as below.
 *   fp32    an array beside the 16-bit parameters, which are its rounded values
 *   split   BF16 builds: a bfloat16 is the upper half of an fp32, so the 16 bits that rounding lost are enough to restore the
 *           exact fp32: 2 bytes a parameter instead of 4. Rounding is to nearest, ties away from zero, because ties to even
 *           would lose a bit. The fp32 form rounds in the same way, so both give the same bits.
 *
 * A parameter is infinite if the master weight is infinite or too large for 16 bits; a NaN stays a NaN.
 */
#ifndef LLMC_MASTER_CUH
#define LLMC_MASTER_CUH

#include "llmc/cuda/cuda_common.cuh"
#include "llmc/base/float16.h"
#include "llmc/optim/optimizer.h"  // defines: MasterKind, MASTER_SPLIT

/* Returns the bfloat16 with these 16 bits. */
__host__ __device__ __forceinline__ __nv_bfloat16 bfloat16_of(uint32_t bits) {
    __nv_bfloat16_raw raw;
    raw.x = (unsigned short)bits;
    return __nv_bfloat16(raw);
}

/* Returns bits of x to which less than 2^16 may be added. A NaN becomes a NaN whose upper half survives the addition.
 * Without this, 0x7fffffff, CUDA's own NaN, would become -0, and 0x7f800001 infinity. NUMBER: x is known to be no NaN. */
template <bool NUMBER = false>
__host__ __device__ __forceinline__ uint32_t bits_to_round(float x) {
    return !NUMBER && isnan(x) ? 0x7fff0000u : float_bits(x);
}

/* Round to bfloat16, which is the upper half of the result. The first rounds to nearest, ties away from zero; the second
 * rounds up with a probability equal to the fraction cut off, otherwise down. `random` has 16 bits. */
template <bool NUMBER = false>
__host__ __device__ __forceinline__ uint32_t nearest_upper(float x) {
    return bits_to_round<NUMBER>(x) + 0x8000u;
}
template <bool NUMBER = false>
__host__ __device__ __forceinline__ uint32_t stochastic_upper(float x, uint32_t random) {
    return bits_to_round<NUMBER>(x) + random;
}

/* Rounds an fp32 master weight to its parameter. bfloat16: to nearest, ties away from zero, see above. */
template <typename T>
__host__ __device__ __forceinline__ T round_master(float x) {
    return from_float<T>(x);
}
template <>
__host__ __device__ __forceinline__ __nv_bfloat16 round_master<__nv_bfloat16>(float x) {
    return bfloat16_of(nearest_upper(x) >> 16);
}

/* Return what round_master() lost, as the difference of the bit patterns, and restore the master weight from it. */
__host__ __device__ __forceinline__ uint16_t split_low(float x) { return (uint16_t)float_bits(x); }
__host__ __device__ __forceinline__ float split_join(float p, int16_t low) {
    // the upper half was rounded up if and only if the lower half's highest bit is set, here its sign
    return float_from_bits(float_bits(p) + (uint32_t)low);
}

template <MasterKind>
struct MasterType {
    typedef float type;
};
template <>
struct MasterType<MASTER_SPLIT> {
    typedef uint16_t type;
};

__global__ void master_set_kernel(floatX* params, void* master, MasterKind kind, const float* x, size_t n) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) { return; }
    params[i] = round_master<floatX>(x[i]);
    if (kind == MASTER_FP32) { ((float*)master)[i] = x[i]; }
    if (kind == MASTER_SPLIT) { ((uint16_t*)master)[i] = split_low(x[i]); }
}

/* Sets params (n) to the rounded x, and master (n) to x in its form (unused for MASTER_NONE). For loading weights. */
static inline void master_set_cuda(floatX* params, void* master, MasterKind kind, const float* x, size_t n,
                                   cudaStream_t stream) {
    if (n == 0) { return; }
    master_set_kernel<<<(unsigned)ceil_div(n, 256), 256, 0, stream>>>(params, master, kind, x, n);
    CUDA_CHECK_LAUNCH("master_set_kernel");
}

__global__ void master_get_kernel(float* x, const floatX* params, const void* master, MasterKind kind, size_t n) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) { return; }
    x[i] = kind == MASTER_NONE   ? to_float(params[i])
           : kind == MASTER_FP32 ? ((const float*)master)[i]
                                 : split_join(to_float(((const __nv_bfloat16*)params)[i]), ((const int16_t*)master)[i]);
}

/* Sets x (n) to the exact master weights. For saving them. */
static inline void master_get_cuda(float* x, const floatX* params, const void* master, MasterKind kind, size_t n,
                                   cudaStream_t stream) {
    if (n == 0) { return; }
    master_get_kernel<<<(unsigned)ceil_div(n, 256), 256, 0, stream>>>(x, params, master, kind, n);
    CUDA_CHECK_LAUNCH("master_get_kernel");
}

#endif
