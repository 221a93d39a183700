/* quotient.cuh -- quotients and square roots in fp32, rounded to nearest as IEEE 754 says, without branches.
 *
 * A card divides in software: it corrects an approximate reciprocal, or root, by the remainder, which a fused multiply-add
 * computes without an error. __fdiv_rn and __fsqrt_rn first test for numbers whose remainder or quotient is denormal, and
 * branch to longer code for them. The functions here compute the corrections and nothing else,
 *
 *   r = approximate 1 / d          1 / d   = r + r (1 - r d)
 *   q = x (1 / d)                  x / d   = q + (x - q d) (1 / d)
 *   r = approximate 1 / sqrt(x)    sqrt(x) = s + (x - s^2) r / 2, s = x r
 *
 * so the caller must keep to the range. Infinity, NaN and quotients that are too large give infinity or NaN.
 *
 * One correction of q is enough if 1 / d is rounded to nearest itself (P. Markstein, "Computation of elementary functions on
 * the IBM RISC System/6000 processor", 1990). This is so for every r within a unit in its last place, except for the d whose
 * mantissa is all ones. For this d, and for some roots, the result is right only because of the r that cards really compute.
 * dev/test/cuda/test_kernels.cu compares every mantissa.
 */
#ifndef LLMC_QUOTIENT_CUH
#define LLMC_QUOTIENT_CUH

#include "llmc/cuda/ptx.cuh"  // defines: reciprocal_fast, inverse_root_fast

/* Returns 1 / d for 2^-125 <= d <= 2^125. */
__device__ __forceinline__ float inverse_of(float d) {
    const float r = reciprocal_fast(d);
    return __fmaf_rn(r, __fmaf_rn(-d, r, 1.0f), r);
}

/* Returns x / d for x = 0, or |x| >= 2^-100 with |x / d| >= 2^-124. inverse: inverse_of(d) */
__device__ __forceinline__ float quotient_of(float x, float d, float inverse) {
    const float q = __fmul_rn(x, inverse), too_large_by = __fmaf_rn(q, d, -x);  // this sign keeps a zero's sign
    return __fmaf_rn(too_large_by, -inverse, q);
}

/* Returns the square root of x >= 2^-101; for a smaller normal number the result is only nearly rounded. */
__device__ __forceinline__ float root_of(float x) {
    const float r = inverse_root_fast(x), s = __fmul_rn(x, r);
    return __fmaf_rn(__fmaf_rn(-s, s, x), __fmul_rn(0.5f, r), s);
}

#endif
