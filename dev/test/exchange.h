/* exchange.h -- sums of the ranks' gradients and packing of heads in plain loops: the oracles of gpu/exchange.cuh and
 * gpu/sequence.cuh. */
#ifndef TEST_EXCHANGE_H
#define TEST_EXCHANGE_H

#include "llmc/dist/sequence.h"  // defines: heads_width

/* out (n) = parts[0] + parts[1] + ... of all ranks, (n) each, added from left to right in fp32; with `add`, it adds this sum to
 * `out` (ZeRO 2: the next micro-batch of a step). `out` may be one of the parts. Returns the sum of the squares of `out` in
 * double: this slice's share of the gradient's norm. */
static inline double ordered_sum(float* out, const float* const* parts, int ranks, size_t n, bool add) {
    double squares = 0;
    for (size_t i = 0; i < n; i++) {
        float sum = parts[0][i];
        for (int r = 1; r < ranks; r++) { sum += parts[r][i]; }
        if (add) { sum = out[i] + sum; }
        out[i] = sum;
        squares += (double)sum * (double)sum;
    }
    return squares;
}

/* Packs rows into pieces, or with `back` writes rows from pieces. */
static inline void heads_pack(float* pieces, float* rows, AttentionShape s, int parts, bool back) {
    const size_t T = (size_t)s.T, P = (size_t)parts, width = heads_width(s), q = (size_t)(s.NH * s.HD) / P;
    const size_t kv = (size_t)(s.NKV * s.HD) / P, sections[3] = {q, kv, kv};
    for (size_t n = 0; n < (size_t)s.B * T; n++) {
        for (size_t p = 0; p < P; p++) {
            float* piece = pieces + ((n / T * P + p) * T + n % T) * (width / P);
            float* row = rows + n * width;
            for (int i = 0; i < 3; i++) {  // queries, keys, values
                float* mine = row + p * sections[i];
                memcpy(back ? mine : piece, back ? piece : mine, sections[i] * sizeof(float));
                piece += sections[i];
                row += P * sections[i];
            }
        }
    }
}

#endif
