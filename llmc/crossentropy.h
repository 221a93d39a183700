/* crossentropy.h -- simple version. */
#ifndef LLMC_CROSSENTROPY_H
#define LLMC_CROSSENTROPY_H

#include "utils.h"

#include <math.h>

static inline void crossentropy_forward(float* losses, const float* logits, const int32_t* targets, size_t N, int V) {
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        const float* row = logits + n * (size_t)V;
        float m = -INFINITY, sum = 0;
        for (int v = 0; v < V; v++) { m = row[v] > m ? row[v] : m; }
        for (int v = 0; v < V; v++) { sum += expf(row[v] - m); }
        losses[n] = logf(sum) + m - row[targets[n]];
    }
}

static inline void crossentropy_fused(float* losses, float* logits, const int32_t* targets, float dloss, size_t N, int V) {
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        float* row = logits + n * (size_t)V;
        float m = -INFINITY, sum = 0;
        for (int v = 0; v < V; v++) { m = row[v] > m ? row[v] : m; }
        for (int v = 0; v < V; v++) { sum += expf(row[v] - m); }
        losses[n] = logf(sum) + m - row[targets[n]];
        for (int v = 0; v < V; v++) { row[v] = expf(row[v] - m) / sum * dloss; }
        row[targets[n]] -= dloss;
    }
}

#endif
