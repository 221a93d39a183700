/* oracles.h -- what tests of layers and of ranks share: rows of random documents, and in plain loops the sums of the ranks'
 * gradients and the packing of heads, the oracles of gpu/exchange.cuh and gpu/sequence.cuh.
 */
#ifndef LLMC_ORACLES_H
#define LLMC_ORACLES_H

#include "llmc/base/rand.h"
#include "llmc/base/utils.h"
#include "llmc/dist/sequence.h"  // defines: heads_width

/* Returns the starts (B, T) of rows that hold documents of 1 to `longest` tokens. Each row has other documents. longest 0:
 * returns NULL. */
static inline int32_t* random_starts(int B, int T, int longest) {
    if (longest == 0) { return NULL; }
    int32_t* starts = (int32_t*)xmalloc((size_t)B * (size_t)T * sizeof *starts);
    for (size_t b = 0; b < (size_t)B; b++) {
        int end = 0;
        for (int t = 0, start = 0; t < T; t++) {
            if (t == end) {
                start = t;
                end += 1 + (int)philox_below(7, RAND_SAMPLE, (uint32_t)b, (uint64_t)t, (uint64_t)longest);
            }
            starts[b * (size_t)T + (size_t)t] = start;
        }
    }
    return starts;
}

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
