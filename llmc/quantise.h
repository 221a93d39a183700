/* quantise.h -- rows of a matrix in 8 bits with a scale each, and its transpose with one scale for all, for matrix products in
 * fp8. The oracle of quantise.cuh.
 *
 *   e4m3   1 sign, 4 exponent, 3 mantissa bits: +-2^(e-7) * (1 + m/8), subnormals +-m * 2^-9, largest value 448, no infinity,
 *          one NaN (0x7F, 0xFF)                   (Micikevicius et al., "FP8 Formats for Deep Learning", 2022)
 *   e5m2   1 sign, 5 exponent, 2 mantissa bits: +-2^(e-15) * (1 + m/4), subnormals +-m * 2^-16, largest value 57344; we write
 *          one of its NaNs (0x7F, 0xFF) and no infinity
 *   row    x[c] = q[c] * scale, scale = 2^k with the smallest k >= -126 for which max |x| / 2^k <= 448, of e5m2 57344
 *   transpose   x[n][c] = q[c][n] * scale, the same scale for all, by max |x| over all rows: for products that sum over the
 *          rows, after which a scale for each row cannot be applied
 *
 * Everything is e4m3 but the gradients of the logits, see QUANTISED_DLOGITS.
 *
 * Scales are powers of two, so dividing by a scale rounds nothing. The only rounding is to 8 bits, to nearest, ties to even,
 * and nothing saturates. A scale depends on the row alone. It has no history, so a resumed run computes the same bits. A row of
 * zeros has the scale 1. A row that holds a NaN or an infinity is all NaN, and so is its scale: such a value must show in the
 * loss.
 *
 * Losses: an element is flushed to zero if |x| / 2^k is at most 2^-10, and becomes subnormal if it is below 2^-6. The row's
 * largest |x| / 2^k is above 448 / 2 and at most 448, so these limits are at most 2^-17.8 and 2^-13.8 of the largest. In e5m2
 * they are at most 2^-31.8 and 2^-28.8 of it.
 *
 * A transpose of 8-bit rows shifts their exponents from the row's scale to the common scale: q * 2^(k - K),
 * K >= k. That is exact unless it becomes subnormal, where it rounds again, to nearest even. The common scale follows from the
 * largest value, not from the largest of the rows' scales: a row of zeros has the scale 1, which may be far above all others.
 */
#ifndef LLMC_QUANTISE_H
#define LLMC_QUANTISE_H

#include "llmc/base/utils.h"
#include "llmc/base/float16.h"  // defines: float_bits, float_from_bits

typedef enum { E4M3, E5M2 } Fp8Format;

enum { FP8_NAN = 0x7F };       // of both
enum { QUANTISE_WIDTH = 16 };  // rows and columns of a factor are multiples of this: cuBLASLt requires it

/* The formats differ in these numbers. */
LLMC_HOST_DEVICE static inline int fp8_mantissa_bits(Fp8Format f) { return f == E4M3 ? 3 : 2; }
LLMC_HOST_DEVICE static inline int fp8_bias(Fp8Format f) { return f == E4M3 ? 7 : 15; }
/* The largest value is 1.75 times two to the power of this. */
LLMC_HOST_DEVICE static inline int fp8_top(Fp8Format f) { return f == E4M3 ? 8 : 15; }
LLMC_HOST_DEVICE static inline int fp8_least_normal(Fp8Format f) { return 1 << fp8_mantissa_bits(f); }

/* The kinds of tensors that --fp8 quantises: weights of linear layers, the inputs of these in the forward pass, the gradients
 * of their outputs in the backward pass; and the transposes (_T) of both, in the same order.
 *
 * The gradients of the logits are a vocabulary's probabilities, minus one at the target. Under the scale of the row's
 * largest gradient, e4m3 would flush many of them to zero, and so never push these logits down. e5m2 keeps them, at half the
 * precision. */
typedef enum {
    QUANTISED_WEIGHT,
    QUANTISED_NORM,
    QUANTISED_ATT,
    QUANTISED_ACT,
    QUANTISED_DH,
    QUANTISED_DGATE_UP,
    QUANTISED_DQKV,
    QUANTISED_DLOGITS,
    QUANTISED_NORM_T,
    QUANTISED_ATT_T,
    QUANTISED_ACT_T,
    QUANTISED_DH_T,
    QUANTISED_DGATE_UP_T,
    QUANTISED_DQKV_T,
    QUANTISED_DLOGITS_T,
    NUM_QUANTISED
} QuantisedKind;
static const char* const quantised_names[NUM_QUANTISED] = {"weight",   "norm", "att",        "act",    "dh",
                                                           "dgate_up", "dqkv", "dlogits",    "norm_t", "att_t",
                                                           "act_t",    "dh_t", "dgate_up_t", "dqkv_t", "dlogits_t"};

/* Returns the kind of the transpose of an input or of an output's gradient. */
static inline QuantisedKind quantised_transpose(QuantisedKind kind) {
    static const QuantisedKind transposes[] = {QUANTISED_WEIGHT, QUANTISED_NORM_T,     QUANTISED_ATT_T,  QUANTISED_ACT_T,
                                               QUANTISED_DH_T,   QUANTISED_DGATE_UP_T, QUANTISED_DQKV_T, QUANTISED_DLOGITS_T};
    return transposes[kind];
}

static inline Fp8Format quantised_format(QuantisedKind kind) {
    return kind == QUANTISED_DLOGITS || kind == QUANTISED_DLOGITS_T ? E5M2 : E4M3;
}

/* The counts of one kind of tensor: its values, the values that were not zero and became zero, and the values that became
 * subnormal. */
typedef struct {
    uint64_t values, flushed, subnormal;
} QuantiseCounts;

/* Rounds to nearest, ties to even; above the largest value saturates, NaN stays NaN. */
static inline uint8_t fp8_from_f32(float x, Fp8Format f) {
    const int shift = 23 - fp8_mantissa_bits(f), bias = 127 - fp8_bias(f);  // difference to a float's mantissa and exponent
    const uint32_t u = float_bits(x), sign = u >> 24 & 0x80u, magnitude = u & 0x7FFFFFFFu;
    const uint32_t largest = (uint32_t)(127 + fp8_top(f)) << 23 | 0x600000u;
    if (magnitude > 0x7F800000u) { return (uint8_t)(sign | FP8_NAN); }
    if (magnitude >= largest) { return (uint8_t)(sign | (largest - ((uint32_t)bias << 23)) >> shift); }
    if (magnitude < (uint32_t)(bias + 1) << 23) {  // subnormal
        // after adding this, the float's least mantissa bit is the format's least unit; the addition rounds to nearest even
        const uint32_t unit = (uint32_t)(bias + 1 + shift) << 23;
        return (uint8_t)(sign | (float_bits(float_from_bits(magnitude) + float_from_bits(unit)) - unit));
    }
    const uint32_t rounded = magnitude + (1u << (shift - 1)) - 1 + (magnitude >> shift & 1);
    return (uint8_t)(sign | (rounded - ((uint32_t)bias << 23)) >> shift);
}

/* q is no infinity. */
static inline float f32_from_fp8(uint8_t q, Fp8Format f) {
    const int shift = 23 - fp8_mantissa_bits(f), bias = 127 - fp8_bias(f);
    const uint32_t sign = (uint32_t)(q & 0x80u) << 24, magnitude = q & 0x7Fu,
                   normal = (magnitude << shift) + ((uint32_t)bias << 23);
    if (magnitude == FP8_NAN) { return float_from_bits(sign | 0x7FC00000u); }
    if (magnitude >= (uint32_t)fp8_least_normal(f)) { return float_from_bits(sign | normal); }
    const float unit = float_from_bits((uint32_t)(bias + 1 - fp8_mantissa_bits(f)) << 23);
    return float_from_bits(sign | float_bits((float)magnitude * unit));
}

/* Returns the scale of a row, given the bits of its largest absolute value. As integers, the bits of absolute values have
 * the order of the values, with infinity and NaN on top. So a maximum of bits misses none. */
LLMC_HOST_DEVICE static inline float quantise_scale(uint32_t largest, Fp8Format f) {
    const uint32_t top = (uint32_t)fp8_top(f);
    if (largest == 0) { return 1.0f; }
    if (largest >= 0x7F800000u) { return float_from_bits(0x7FFFFFFFu); }
    // largest = 2^e (1 + m / 2^23): k = e - top, or one more if the mantissa is above 1.75
    const uint32_t exponent = (largest >> 23) + ((largest & 0x7FFFFFu) > 0x600000u);  // biased by 127, and by `top` more than k
    return float_from_bits((exponent > top ? exponent - top : 1u) << 23);
}

/* Returns 1 / scale, which is a power of two as well, from 2^-120 (e5m2: 2^-113) to 2^126; NaN if the scale is. */
LLMC_HOST_DEVICE static inline float quantise_factor(float scale) {
    const uint32_t bits = float_bits(scale);
    return bits >= 0x7F800000u ? scale : float_from_bits((254u << 23) - bits);
}

/* Returns the largest magnitude of n values that lie `stride` apart, as bits. */
static inline uint32_t quantise_largest(const float* x, size_t n, size_t stride) {
    uint32_t largest = 0;
    for (size_t i = 0; i < n; i++) {
        const uint32_t magnitude = float_bits(x[i * stride]) & 0x7FFFFFFFu;
        if (magnitude > largest) { largest = magnitude; }
    }
    return largest;
}

/* Returns x * factor in 8 bits. A factor that is NaN gives NaN, without a sign. */
static inline uint8_t quantise_value(float x, float factor, Fp8Format f) {
    return factor != factor ? (uint8_t)FP8_NAN : fp8_from_f32(x * factor, f);
}

/* Quantises n values that lie `stride` apart, to q[0], q[1], ... Returns their scale. */
static inline float quantise_values(uint8_t* q, const float* x, size_t n, size_t stride, Fp8Format f) {
    const float scale = quantise_scale(quantise_largest(x, n, stride), f), factor = quantise_factor(scale);
    for (size_t i = 0; i < n; i++) { q[i] = quantise_value(x[i * stride], factor, f); }
    return scale;
}

/* Writes q (R, C) and scale (R) from x (R, C). */
static inline void quantise_rows(uint8_t* q, float* scale, const float* x, size_t R, size_t C, Fp8Format f) {
    for (size_t r = 0; r < R; r++) { scale[r] = quantise_values(q + r * C, x + r * C, C, 1, f); }
}

/* Writes the transpose q (C, R) and scale (C), one for each column of x (R, C): of weights, in e4m3. */
static inline void quantise_columns(uint8_t* q, float* scale, const float* x, size_t R, size_t C) {
    for (size_t c = 0; c < C; c++) { scale[c] = quantise_values(q + c * R, x + c, R, C, E4M3); }
}

/* Writes the transpose q (C, R) of x (R, C) with one scale, which it returns: of inputs, in e4m3. */
static inline float quantise_transposed(uint8_t* q, const float* x, size_t R, size_t C) {
    const float scale = quantise_scale(quantise_largest(x, R * C, 1), E4M3), factor = quantise_factor(scale);
    for (size_t r = 0; r < R; r++) {
        for (size_t c = 0; c < C; c++) { q[c * R + r] = quantise_value(x[r * C + c], factor, E4M3); }
    }
    return scale;
}

/* Writes the transpose q (C, R) of rows (R, C) that have the scales row_scale (R), shifted to one common `scale`, which
 * belongs to the largest value that was quantised to the rows. */
static inline void quantise_shifted(uint8_t* q, const uint8_t* rows, const float* row_scale, float scale, size_t R, size_t C,
                                    Fp8Format f) {
    for (size_t r = 0; r < R; r++) {
        const float factor = row_scale[r] * quantise_factor(scale);
        for (size_t c = 0; c < C; c++) { q[c * R + r] = quantise_value(f32_from_fp8(rows[r * C + c], f), factor, f); }
    }
}

/* Counts the values x (n) that became zero or subnormal in q (n). */
static inline void quantise_count(QuantiseCounts* counts, const uint8_t* q, const float* x, size_t n, Fp8Format f) {
    for (size_t i = 0; i < n; i++) {
        const int magnitude = q[i] & 0x7F;
        counts->values++;
        counts->flushed += magnitude == 0 && x[i] != 0;
        counts->subnormal += magnitude > 0 && magnitude < fp8_least_normal(f);
    }
}

#endif
