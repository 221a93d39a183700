/* embedding.h -- looks up a table row for each token, and computes the table's gradient. fp32.
 *
 *   out[n] = table[tokens[n]]        dtable[tokens[n]] += dout[n]        for each token n, C elements each
 *
 * Backward adds all rows of dout that share a token into one row of dtable. Threads split the columns, not the tokens: one
 * thread sums each element, in the order of the tokens, so the result is the same for any thread count.
 * The caller has checked that 0 <= token < V.
 */
#ifndef LLMC_EMBEDDING_H
#define LLMC_EMBEDDING_H

#include "llmc/base/utils.h"

/* Writes out (N, C) from table (V, C) and tokens (N). */
static inline void embedding_forward(float* out, const float* table, const int32_t* tokens, size_t N, int C) {
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        memcpy(out + n * (size_t)C, table + (size_t)tokens[n] * (size_t)C, (size_t)C * sizeof(float));
    }
}

/* Adds to dtable (V, C; NULL: frozen, does nothing) from dout (N, C) and tokens (N). */
static inline void embedding_backward(float* dtable, const float* dout, const int32_t* tokens, size_t N, int C) {
    enum { CHUNK = 64 };  // columns of a thread: whole cache lines, so threads share none
    if (!dtable) { return; }
#pragma omp parallel for schedule(static)
    for (int c0 = 0; c0 < C; c0 += CHUNK) {
        const int c1 = C - c0 < CHUNK ? C : c0 + CHUNK;
        for (size_t n = 0; n < N; n++) {
            float* row = dtable + (size_t)tokens[n] * (size_t)C;
            const float* d = dout + n * (size_t)C;
            for (int c = c0; c < c1; c++) { row[c] += d[c]; }
        }
    }
}

#endif
