/* embedding.h -- a row of a table for each token, and the table's gradient. fp32.
 *
 *   out[n] = table[tokens[n]]        dtable[tokens[n]] += dout[n]        for each token n, C elements each
 *
 * Backward adds rows of dout that share a token into one row of dtable. Threads split the columns, not the tokens, so
 * that every element is summed by one thread in the order of the tokens: the result is the same for any thread count.
 * The caller has checked that 0 <= token < V.
 */
#ifndef LLMC_EMBEDDING_H
#define LLMC_EMBEDDING_H

#include "llmc/base/utils.h"

/* out: (N, C)   table: (V, C)   tokens: (N) */
static inline void embedding_forward(float* out, const float* table, const int32_t* tokens, size_t N, int C) {
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        memcpy(out + n * (size_t)C, table + (size_t)tokens[n] * (size_t)C, (size_t)C * sizeof(float));
    }
}

/* dtable: (V, C) +=   dout: (N, C)   tokens: (N) */
static inline void embedding_backward(float* dtable, const float* dout, const int32_t* tokens, size_t N, int C) {
    enum { CHUNK = 64 };  // columns a thread owns: whole cache lines, so that threads do not share them
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
