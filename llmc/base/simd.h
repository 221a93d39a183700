/* simd.h -- vectors of floats as wide as the target's registers, in GCC's and Clang's vector extensions: one source for
 * AVX-512, AVX, SSE and NEON. On a target without vectors the compiler splits them.
 *
 * Operators work lane by lane (`a * b + 1.0f`). A comparison gives a `vi` with all bits of a lane 1 or 0. Nothing here
 * depends on -ffast-math: NaN and infinities pass through as in scalar code.
 */
#ifndef LLMC_SIMD_H
#define LLMC_SIMD_H

#include "llmc/base/utils.h"

#if defined(__AVX512F__)
enum { SIMD = 16 };  // floats in a vector
#elif defined(__AVX__)
enum { SIMD = 8 };
#else
enum { SIMD = 4 };
#endif

#define LLMC_INLINE static inline __attribute__((always_inline, unused))

#ifdef __CUDACC__  // nvcc's front end does not know GCC's pragma and warns
#define LLMC_UNROLL
#elif defined(__clang__)
#define LLMC_UNROLL _Pragma("clang loop unroll(full)")
#else
#define LLMC_UNROLL _Pragma("GCC unroll 16")
#endif

typedef float vf __attribute__((vector_size(SIMD * sizeof(float))));
typedef int32_t vi __attribute__((vector_size(SIMD * sizeof(float))));
typedef uint32_t vu __attribute__((vector_size(SIMD * sizeof(float))));
// the same vectors at any float's address
typedef float vf_anywhere __attribute__((vector_size(SIMD * sizeof(float)), aligned(sizeof(float)), may_alias));

LLMC_INLINE vf vf_load(const float* p) { return *(const vf_anywhere*)p; }
LLMC_INLINE void vf_store(float* p, vf x) { *(vf_anywhere*)p = x; }

LLMC_INLINE vf vf_set(float x) {
    const vf zero = {0};
    return x - zero;  // not x + zero: that would turn -0 into 0
}

/* Loads the floats at p, at most n of them; `rest` fills the other lanes. For the tails of loops in steps of SIMD. */
LLMC_INLINE vf vf_load_upto(const float* p, size_t n, float rest) {
    float lane[SIMD];
    if (n >= SIMD) { return vf_load(p); }
    for (size_t i = 0; i < SIMD; i++) { lane[i] = i < n ? p[i] : rest; }
    return vf_load(lane);
}

LLMC_INLINE void vf_store_upto(float* p, size_t n, vf x) {
    float lane[SIMD];
    if (n >= SIMD) {
        vf_store(p, x);
        return;
    }
    vf_store(lane, x);
    memcpy(p, lane, n * sizeof(float));
}

/* Returns mask ? a : b in each lane. */
LLMC_INLINE vf vf_select(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }

/* Return a > b ? a : b and a < b ? a : b in each lane, so b where either is NaN. */
LLMC_INLINE vf vf_max(vf a, vf b) { return vf_select(a > b, a, b); }
LLMC_INLINE vf vf_min(vf a, vf b) { return vf_select(a < b, a, b); }

/* Returns the sum of the lanes. The order is fixed: it adds the halves until one lane is left. */
LLMC_INLINE float vf_sum(vf x) {
    float lane[SIMD];
    vf_store(lane, x);
    for (int half = SIMD / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) { lane[i] += lane[i + half]; }
    }
    return lane[0];
}

LLMC_INLINE float vf_largest(vf x) {
    float lane[SIMD];
    vf_store(lane, x);
    for (int i = 1; i < SIMD; i++) { lane[0] = lane[0] > lane[i] ? lane[0] : lane[i]; }
    return lane[0];
}

/* Returns the sum of a[i] * b[i]. Four running sums hide the latency of the additions. */
LLMC_INLINE float vf_dot(const float* a, const float* b, size_t n) {
    vf s0 = vf_set(0.0f), s1 = s0, s2 = s0, s3 = s0;
    size_t i = 0;
    for (; i + 4 * SIMD <= n; i += 4 * SIMD) {
        s0 += vf_load(a + i) * vf_load(b + i);
        s1 += vf_load(a + i + SIMD) * vf_load(b + i + SIMD);
        s2 += vf_load(a + i + 2 * SIMD) * vf_load(b + i + 2 * SIMD);
        s3 += vf_load(a + i + 3 * SIMD) * vf_load(b + i + 3 * SIMD);
    }
    for (; i < n; i += SIMD) { s0 += vf_load_upto(a + i, n - i, 0.0f) * vf_load_upto(b + i, n - i, 0.0f); }
    return vf_sum((s0 + s1) + (s2 + s3));
}

typedef float v4 __attribute__((vector_size(16)));
typedef float v4_anywhere __attribute__((vector_size(16), aligned(sizeof(float)), may_alias));

#if defined(__clang__) || (__GNUC__ >= 12 && !defined(__CUDACC__))  // nvcc's front end knows the builtin from CUDA 13 on
#define LLMC_SHUFFLE(a, b, i0, i1, i2, i3) __builtin_shufflevector(a, b, i0, i1, i2, i3)
#else
typedef int32_t v4i __attribute__((vector_size(16)));
#define LLMC_SHUFFLE(a, b, i0, i1, i2, i3) __builtin_shuffle(a, b, (v4i){i0, i1, i2, i3})
#endif

/* Transposes 4 x 4 floats in registers: dst[j * dst_row + i] = src[i * src_row + j]. */
LLMC_INLINE void simd_transpose_4x4(float* dst, size_t dst_row, const float* src, size_t src_row) {
    const v4 a = *(const v4_anywhere*)src, b = *(const v4_anywhere*)(src + src_row);
    const v4 c = *(const v4_anywhere*)(src + 2 * src_row), d = *(const v4_anywhere*)(src + 3 * src_row);
    const v4 ab01 = LLMC_SHUFFLE(a, b, 0, 4, 1, 5), ab23 = LLMC_SHUFFLE(a, b, 2, 6, 3, 7);
    const v4 cd01 = LLMC_SHUFFLE(c, d, 0, 4, 1, 5), cd23 = LLMC_SHUFFLE(c, d, 2, 6, 3, 7);
    *(v4_anywhere*)dst = LLMC_SHUFFLE(ab01, cd01, 0, 1, 4, 5);
    *(v4_anywhere*)(dst + dst_row) = LLMC_SHUFFLE(ab01, cd01, 2, 3, 6, 7);
    *(v4_anywhere*)(dst + 2 * dst_row) = LLMC_SHUFFLE(ab23, cd23, 0, 1, 4, 5);
    *(v4_anywhere*)(dst + 3 * dst_row) = LLMC_SHUFFLE(ab23, cd23, 2, 3, 6, 7);
}

/* Writes the transpose of src (rows, cols) to dst (cols, rows). Rows are dst_row floats apart in dst, and src_row floats
 * apart in src. */
static inline void simd_transpose(float* dst, size_t dst_row, const float* src, size_t src_row, size_t rows, size_t cols) {
    enum { STRIP = 16 };  // columns at a time: one cache line of each row of src
    for (size_t c0 = 0; c0 < cols; c0 += STRIP) {
        const size_t end = size_min(cols, c0 + STRIP);
        size_t r = 0;
        for (; r + 4 <= rows; r += 4) {
            size_t c = c0;
            for (; c + 4 <= end; c += 4) { simd_transpose_4x4(dst + c * dst_row + r, dst_row, src + r * src_row + c, src_row); }
            for (; c < end; c++) {
                for (size_t i = r; i < r + 4; i++) { dst[c * dst_row + i] = src[i * src_row + c]; }
            }
        }
        for (; r < rows; r++) {
            for (size_t c = c0; c < end; c++) { dst[c * dst_row + r] = src[r * src_row + c]; }
        }
    }
}

/* Returns e^x to about 1 ulp. x = n ln 2 + r with |r| <= ln 2 / 2; e^r is a polynomial, and 2^n goes into the exponent bits.
 * A result that would be denormal (x < -86.99; denormals are slow) is 0. From x = 88.73 on it is infinity. NaN stays NaN. */
LLMC_INLINE vf vf_exp(vf x) {
    const vf round = vf_set(12582912.0f);                  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    x = vf_min(vf_set(89.5f), vf_max(vf_set(-87.5f), x));  // n from -126, where `bits` is 0.0f, to 129, where it is infinity
    const vf t = x * 1.44269504f + round;
    const vf n = t - round;
    const vf r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts, the first exact times n
    vf p = r * 1.9875691e-4f + 1.3981999e-3f;
    p = p * r + 8.3334519e-3f;
    p = p * r + 4.1665796e-2f;
    p = p * r + 1.6666665e-1f;
    p = p * r + 0.5f;
    p = p * (r * r) + r + 1.0f;
    const vu bits = ((vu)t << 23) + (126u << 23);  // 2^(n-1), since 2^128 is not a float
    return (p + p) * (vf)bits;
}

#endif
