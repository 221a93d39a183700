/* float16.h -- converts to and from the two 16-bit floating-point formats of weight files, on the host.
 *
 *   bf16: 1 sign, 8 exponent, 7 mantissa bits: the upper half of a float
 *   f16:  1 sign, 5 exponent, 10 mantissa bits (IEEE 754 binary16), with subnormals
 *
 * To 16 bits: rounds to nearest, ties to even, as PyTorch does; overflow gives infinity, NaN stays NaN. Back to float is
 * exact. Device code has its own conversions.
 */
#ifndef LLMC_FLOAT16_H
#define LLMC_FLOAT16_H

#include "llmc/base/utils.h"

LLMC_HOST_DEVICE static inline uint32_t float_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

LLMC_HOST_DEVICE static inline float float_from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

// bits of the least magnitude that rounds to infinity: of 65520, and of 3.396e38
#define F16_INFINITE 0x477FF000u
#define BF16_INFINITE 0x7F7F8000u

static inline float f32_from_bf16(uint16_t h) { return float_from_bits((uint32_t)h << 16); }

static inline uint16_t bf16_from_f32(float x) {
    const uint32_t u = float_bits(x);
    // truncating or rounding a NaN's mantissa could give infinity, so set the quiet bit instead
    if ((u & 0x7FFFFFFFu) > 0x7F800000u) { return (uint16_t)(u >> 16 | 0x40); }
    return (uint16_t)((u + 0x7FFFu + (u >> 16 & 1)) >> 16);
}

static inline float f32_from_f16(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = h >> 10 & 0x1Fu, mantissa = h & 0x3FFu;
    if (exponent == 0x1F) { return float_from_bits(sign | 0x7F800000u | mantissa << 13); }
    if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24 is exact
        const float magnitude = (float)mantissa * 5.9604644775390625e-8f;
        return float_from_bits(sign | float_bits(magnitude));
    }
    return float_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

static inline uint16_t f16_from_f32(float x) {
    const uint32_t u = float_bits(x), sign = u >> 16 & 0x8000u, magnitude = u & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) { return (uint16_t)(sign | 0x7E00u); }
    if (magnitude >= F16_INFINITE) { return (uint16_t)(sign | 0x7C00u); }
    if (magnitude < 0x38800000u) {  // below 2^-14: subnormal
        // adding 0.5 leaves units of 2^-24 in the float's mantissa, rounded to nearest even by the addition itself
        const float shifted = float_from_bits(magnitude) + 0.5f;
        return (uint16_t)(sign | (float_bits(shifted) - 0x3F000000u));
    }
    const uint32_t rounded = magnitude + 0xFFFu + (magnitude >> 13 & 1);
    return (uint16_t)(sign | (rounded - 0x38000000u) >> 13);
}

#endif
