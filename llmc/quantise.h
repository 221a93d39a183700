/* quantise.h -- rows of a matrix in 8 bits with a scale each, and its transpose with one scale for all, for matrix products in
 * fp8. The oracle of quantise.cuh.
 *
 *   e4m3   1 sign, 4 exponent, 3 mantissa bits: +-2^(e-7) * (1 + m/8), subnormals +-m * 2^-9, largest value 448, no infinity,
 *          one NaN (0x7F, 0xFF)                   (Micikevicius et al., "FP8 Formats for Deep Learning", 2022)
 *   row    x[c] = q[c] * scale, scale = 2^k with the smallest k >= -126 for which max |x| / 2^k <= 448
 *   transpose   x[n][c] = q[c][n] * scale, the same scale for all, by max |x| over all rows: for products that sum over the
 *          rows, after which a scale for each row cannot be applied
 *
 * Scales are powers of two, so that dividing by one rounds nothing: the only rounding is that to e4m3, to nearest, ties to
 * even, and nothing saturates. A scale is that of the row as it is now. There is no history, so a resumed run computes the same
 * bits. A row of zeros has the scale 1. A row that holds a NaN or an infinity is all NaN, and so is its scale: what is not
 * finite must show in the loss.
 *
 * What is lost: the absolute value x / 2^k of an element that is flushed to zero is at most 2^-10, one that becomes subnormal
 * is below 2^-6: in a row whose largest is 448 / 2 < |x| / 2^k <= 448, at most 2^-17.8 and below 2^-13.8 of it.
 *
 * A transpose of rows that are in 8 bits already shifts their exponents from the row's scale to that of all: q * 2^(k - K),
 * K >= k. That is exact unless it becomes subnormal, where it rounds again, to nearest even. The scale is by the largest of
 * the values, not of the rows' scales: a row of zeros has the scale 1, which may be far above all others.
 */
#ifndef LLMC_QUANTISE_H
#define LLMC_QUANTISE_H

#include "llmc/base/utils.h"
#include "llmc/base/float16.h"  // defines: float_bits, float_from_bits

enum { E4M3_NAN = 0x7F, E4M3_LEAST_NORMAL = 0x08 };  // 2^-6
enum { QUANTISE_WIDTH = 16 };                        // rows and columns of a factor are a multiple of it: cuBLASLt wants that

/* The kinds of tensors that --fp8 quantises: weights of the blocks' linear layers, the inputs of these in the forward pass, the
 * gradients of their outputs in the backward pass; and the transposes (_T) of both, in the same order. */
typedef enum {
    QUANTISED_WEIGHT,
    QUANTISED_NORM,
    QUANTISED_ATT,
    QUANTISED_ACT,
    QUANTISED_DH,
    QUANTISED_DGATE_UP,
    QUANTISED_DQKV,
    QUANTISED_NORM_T,
    QUANTISED_ATT_T,
    QUANTISED_ACT_T,
    QUANTISED_DH_T,
    QUANTISED_DGATE_UP_T,
    QUANTISED_DQKV_T,
    NUM_QUANTISED
} QuantisedKind;
static const char* const quantised_names[NUM_QUANTISED] = {"weight", "norm",  "att",   "act",  "dh",         "dgate_up", "dqkv",
                                                           "norm_t", "att_t", "act_t", "dh_t", "dgate_up_t", "dqkv_t"};

/* Returns the kind of the transpose of an input or of an output's gradient. */
static inline QuantisedKind quantised_transpose(QuantisedKind kind) {
    return (QuantisedKind)(kind + (QUANTISED_NORM_T - QUANTISED_NORM));
}

/* The counts of one kind of tensor: its values, those that are not zero and became zero, and those that became subnormal. */
typedef struct {
    uint64_t values, flushed, subnormal;
} QuantiseCounts;

/* Rounds to nearest, ties to even; above 448 saturates, NaN stays NaN. */
static inline uint8_t e4m3_from_f32(float x) {
    const uint32_t u = float_bits(x), sign = u >> 24 & 0x80u, magnitude = u & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) { return (uint8_t)(sign | E4M3_NAN); }
    if (magnitude >= 0x43E00000u) { return (uint8_t)(sign | 0x7Eu); }  // 448 and above
    if (magnitude < 0x3C800000u) {                                     // below 2^-6: subnormal
        // adding 2^14 leaves units of 2^-9 in the float's mantissa, rounded to nearest even by the addition itself
        const float shifted = float_from_bits(magnitude) + 16384.0f;
        return (uint8_t)(sign | (float_bits(shifted) - 0x46800000u));
    }
    const uint32_t rounded = magnitude + 0x7FFFFu + (magnitude >> 20 & 1);
    return (uint8_t)(sign | (rounded - 0x3C000000u) >> 20);  // the exponent's bias is 7, a float's 127
}

static inline float f32_from_e4m3(uint8_t q) {
    const uint32_t sign = (uint32_t)(q & 0x80u) << 24, magnitude = q & 0x7Fu;
    if (magnitude == E4M3_NAN) { return float_from_bits(sign | 0x7FC00000u); }
    if (magnitude < E4M3_LEAST_NORMAL) { return float_from_bits(sign | float_bits((float)magnitude * 0.001953125f)); }  // 2^-9
    return float_from_bits(sign | ((magnitude << 20) + 0x3C000000u));
}

/* Returns the scale of a row by the bits of its largest absolute value. As integers the bits of absolute values are in the
 * order of these, with infinity and NaN above all, so a maximum of bits misses none. */
LLMC_HOST_DEVICE static inline float quantise_scale(uint32_t largest) {
    if (largest == 0) { return 1.0f; }
    if (largest >= 0x7F800000u) { return float_from_bits(0x7FFFFFFFu); }
    // largest = 2^e (1 + m / 2^23), 448 = 2^8 * 1.75: k = e - 8, or e - 7 if the mantissa is above 1.75
    const uint32_t exponent = (largest >> 23) + ((largest & 0x7FFFFFu) > 0x600000u);  // biased by 127, and by 8 more than k
    return float_from_bits((exponent > 9 ? exponent - 8 : 1u) << 23);
}

/* Returns 1 / scale, which is a power of two as well, from 2^-120 to 2^126; NaN if the scale is. */
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
static inline uint8_t quantise_value(float x, float factor) {
    return factor != factor ? (uint8_t)E4M3_NAN : e4m3_from_f32(x * factor);
}

/* Quantises n values that lie `stride` apart, to q[0], q[1], ... Returns their scale. */
static inline float quantise_values(uint8_t* q, const float* x, size_t n, size_t stride) {
    const float scale = quantise_scale(quantise_largest(x, n, stride)), factor = quantise_factor(scale);
    for (size_t i = 0; i < n; i++) { q[i] = quantise_value(x[i * stride], factor); }
    return scale;
}

/* Writes q (R, C) and scale (R) from x (R, C). */
static inline void quantise_rows(uint8_t* q, float* scale, const float* x, size_t R, size_t C) {
    for (size_t r = 0; r < R; r++) { scale[r] = quantise_values(q + r * C, x + r * C, C, 1); }
}

/* Writes the transpose q (C, R) and scale (C), one for each column of x (R, C). */
static inline void quantise_columns(uint8_t* q, float* scale, const float* x, size_t R, size_t C) {
    for (size_t c = 0; c < C; c++) { scale[c] = quantise_values(q + c * R, x + c, R, C); }
}

/* Writes the transpose q (C, R) of x (R, C) with one scale, which it returns. */
static inline float quantise_transposed(uint8_t* q, const float* x, size_t R, size_t C) {
    const float scale = quantise_scale(quantise_largest(x, R * C, 1)), factor = quantise_factor(scale);
    for (size_t r = 0; r < R; r++) {
        for (size_t c = 0; c < C; c++) { q[c * R + r] = quantise_value(x[r * C + c], factor); }
    }
    return scale;
}

/* Writes the transpose q (C, R) of rows (R, C) that have the scales row_scale (R), shifted to the one `scale` of all: that of
 * the largest value that was quantised to the rows. */
static inline void quantise_shifted(uint8_t* q, const uint8_t* rows, const float* row_scale, float scale, size_t R, size_t C) {
    for (size_t r = 0; r < R; r++) {
        const float factor = row_scale[r] * quantise_factor(scale);
        for (size_t c = 0; c < C; c++) { q[c * R + r] = quantise_value(f32_from_e4m3(rows[r * C + c]), factor); }
    }
}

/* Counts what became of the values x (n), which became q (n). */
static inline void quantise_count(QuantiseCounts* counts, const uint8_t* q, const float* x, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const unsigned magnitude = q[i] & 0x7Fu;
        counts->values++;
        counts->flushed += magnitude == 0 && x[i] != 0;
        counts->subnormal += magnitude > 0 && magnitude < E4M3_LEAST_NORMAL;
    }
}

#endif
