/* rope.h -- rotary position embedding (Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021).
 *
 *   angle = position * inv_freq[i]        inv_freq[i] = 1 / theta^(2i / HD)        for i < HD/2, in each head of q and k
 *   x[i]        = x[i] * cos(angle) - x[i + HD/2] * sin(angle)
 *   x[i + HD/2] = x[i + HD/2] * cos(angle) + x[i] * sin(angle)
 *
 * Elements i and i + HD/2 turn together: Hugging Face's pairing. The paper pairs 2i and 2i + 1. The functions rotate q and k of
 * packed qkv rows in place and leave v alone. Backward turns by the negative angle. Where a row holds several documents, a
 * token's position counts from the start of its document (starts, see attention.h; NULL: from the start of the row).
 *
 * The table repeats what transformers computes, rounding for rounding, in fp32. Type "llama3" (modeling_rope_utils.py)
 * divides the frequencies of long wavelengths by its factor and blends in between. The angle is the fp32 product of position
 * and inv_freq; at position 8191 for a head of 64 an angle in double would differ by 3.7e-4.
 */
#ifndef LLMC_ROPE_H
#define LLMC_ROPE_H

#include "llmc/config.h"

#include <math.h>

/* Writes inv_freq (HD/2). Each line rounds where transformers rounds. pow, cos and sin go through double, so that the result
 * does not depend on a libm's float versions. */
static inline void rope_inv_freq(float* inv_freq, const ModelConfig* c) {
    const float pi2 = 6.283185307179586f;
    for (int i = 0; i < c->head_dim / 2; i++) {
        const float exponent = (float)(2 * i) / (float)c->head_dim;
        float f = 1.0f / (float)pow((double)(float)c->rope_theta, (double)exponent);
        if (c->rope_llama3) {
            const float wavelen = 1.0f / f * pi2;  // PyTorch divides a number by a tensor as number * (1 / tensor)
            if (wavelen > (float)(c->rope_original_len / c->rope_low_freq)) {
                f = f / (float)c->rope_factor;
            } else if (!(wavelen < (float)(c->rope_original_len / c->rope_high_freq))) {
                const float low = (float)c->rope_low_freq, span = (float)(c->rope_high_freq - c->rope_low_freq);
                const float smooth = (1.0f / wavelen * (float)c->rope_original_len - low) / span;
                const float slow = (1.0f - smooth) * f / (float)c->rope_factor;
                volatile float fast = smooth * f;  // rounds separately: must not become a fused multiply-add
                f = slow + fast;
            }
        }
        inv_freq[i] = f;
    }
}

/* Writes cos_sin (T, HD): each row holds HD/2 cosines, then HD/2 sines. */
static inline void rope_table(float* cos_sin, int T, const ModelConfig* c) {
    float inv_freq[MAX_HEAD_DIM / 2];
    const int half = c->head_dim / 2;
    rope_inv_freq(inv_freq, c);
#pragma omp parallel for schedule(static)
    for (int t = 0; t < T; t++) {
        float* row = cos_sin + (size_t)t * 2 * (size_t)half;
        for (int i = 0; i < half; i++) {
            const float angle = (float)t * inv_freq[i];
            row[i] = (float)cos((double)angle);
            row[half + i] = (float)sin((double)angle);
        }
    }
}

static inline void rope_rotate(float* qkv, const int32_t* starts, const float* cos_sin, float sign, int first_pos,
                               AttentionShape s) {
    const size_t HD = (size_t)s.HD, half = HD / 2, width = (size_t)(s.NH + 2 * s.NKV) * HD;
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < (size_t)s.B * (size_t)s.T; n++) {
        const size_t start = starts ? (size_t)starts[n] : 0;
        const float* cosine = cos_sin + ((size_t)first_pos + n % (size_t)s.T - start) * HD;
        const float* sine = cosine + half;
        for (size_t h = 0; h < (size_t)(s.NH + s.NKV); h++) {  // queries, then keys
            float* x = qkv + n * width + h * HD;
            for (size_t i = 0; i < half; i++) {
                const float a = x[i], b = x[i + half], sin_i = sign * sine[i];
                x[i] = a * cosine[i] - b * sin_i;
                x[i + half] = b * cosine[i] + a * sin_i;
            }
        }
    }
}

/* Rotates qkv (B, T, (NH + 2 NKV) HD) in place. Row t of each sequence is at position first_pos + t, minus starts (B, T);
 * cos_sin is the table from position 0 on. */
static inline void rope_forward(float* qkv, const int32_t* starts, const float* cos_sin, int first_pos, AttentionShape s) {
    rope_rotate(qkv, starts, cos_sin, 1.0f, first_pos, s);
}

/* Turns dqkv in place from the gradient after the rotation into the gradient before it. */
static inline void rope_backward(float* dqkv, const int32_t* starts, const float* cos_sin, int first_pos, AttentionShape s) {
    rope_rotate(dqkv, starts, cos_sin, -1.0f, first_pos, s);
}

#endif
