/* crossentropy.h -- the loss of each row of logits, and its gradient in place of the logits. fp32.
 *
 *   softmax_v = e^(logit_v - max) / sum        max, sum: over the row, of the logits and of e^(logit_v - max)
 *   loss      = -log(softmax_target) = log(sum) + max - logit_target
 *   dlogit_v  = (softmax_v - [v = target]) * dloss
 *
 * A row whose target is -1 is not trained: its loss and its gradient are 0. Each row is read three times (maximum,
 * exponentials, scaling) while it stays in a near cache. The functions write one loss a row; the caller sums them in its own
 * order. The caller has checked that -1 <= target < V.
 */
#ifndef LLMC_CROSSENTROPY_H
#define LLMC_CROSSENTROPY_H

#include "llmc/base/simd.h"

#include <float.h>
#include <math.h>
#include <string.h>

/* Returns the loss of a row with a target and writes *sum, the sum of e^(logit - max). Unless `keep` (V) is NULL, stores
 * these exponentials there; `keep` may be `row`. */
LLMC_INLINE float crossentropy_row(const float* row, float* keep, float* sum, int32_t target, size_t V) {
    const float target_logit = row[target];
    vf lane_max = vf_set(-INFINITY), lane_sum = vf_set(0.0f);
    for (size_t v = 0; v < V; v += SIMD) { lane_max = vf_max(vf_load_upto(row + v, V - v, -INFINITY), lane_max); }
    const float max = vf_largest(lane_max);
    for (size_t v = 0; v < V; v += SIMD) {
        const vf e = vf_exp(vf_load_upto(row + v, V - v, -INFINITY) - max);
        lane_sum += e;
        if (keep) { vf_store_upto(keep + v, V - v, e); }
    }
    *sum = vf_sum(lane_sum);
    return logf(*sum) + (max - target_logit);
}

/* Writes losses (N) from logits (N, V) and targets (N). */
static inline void crossentropy_forward(float* losses, const float* logits, const int32_t* targets, size_t N, int V) {
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        float sum;
        losses[n] = targets[n] < 0 ? 0.0f : crossentropy_row(logits + n * (size_t)V, NULL, &sum, targets[n], (size_t)V);
    }
}

/* Writes losses (N) and overwrites logits (N, V) with their gradient. targets: (N). dloss > 0 is the gradient of each loss. */
static inline void crossentropy_fused(float* losses, float* logits, const int32_t* targets, float dloss, size_t N, int V) {
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        float *row = logits + n * (size_t)V, sum;
        if (targets[n] < 0) {
            losses[n] = 0.0f;
            memset(row, 0, (size_t)V * sizeof *row);
            continue;
        }
        losses[n] = crossentropy_row(row, row, &sum, targets[n], (size_t)V);
        const float factor = dloss / sum;
        for (size_t v = 0; v < (size_t)V; v += SIMD) {
            const vf d = vf_load_upto(row + v, (size_t)V - v, 0.0f) * factor;
            // flush denormals: they add nothing, but would slow down every product they enter by an order of magnitude
            vf_store_upto(row + v, (size_t)V - v, vf_select(d < FLT_MIN, vf_set(0.0f), d));
        }
        row[targets[n]] -= dloss;
    }
}

#endif
