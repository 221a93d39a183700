/* adamw.h -- AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019) in the order of PyTorch's
 * torch.optim.AdamW, and the global gradient norm. fp32 state.
 *
 *   g = grad_scale * g                      the clip factor (and any loss scale) is applied where g is read
 *   p = p * (1 - lr * weight_decay)
 *   m = m + (1 - beta1) * (g - m)
 *   v = beta2 * v + (1 - beta2) * g * g
 *   p = p - lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
 *
 * Bias corrections are computed in double. Which tensors decay is the caller's choice (two-dimensional ones do).
 */
#ifndef LLMC_ADAMW_H
#define LLMC_ADAMW_H

#include "utils.h"

#include <math.h>

typedef struct {
    double lr, beta1, beta2, eps, weight_decay;
    float grad_scale;  // multiplies every gradient as it is read
    int64_t step;      // counts applied updates from 1
} AdamW;

/* p, m, v: (n) updated in place   g: (n) */
static inline void adamw_update(float* p, const float* g, float* m, float* v, size_t n, const AdamW* hyper) {
    const double correction1 = 1.0 - pow((double)hyper->beta1, (double)hyper->step);
    const double correction2 = 1.0 - pow((double)hyper->beta2, (double)hyper->step);
    const float decay = (float)(1.0 - (double)hyper->lr * (double)hyper->weight_decay);
    const float step_size = (float)((double)hyper->lr / correction1), root2 = (float)sqrt(correction2);
    const float blend1 = (float)(1.0 - (double)hyper->beta1), blend2 = (float)(1.0 - (double)hyper->beta2);
    const float beta2 = (float)hyper->beta2, eps = (float)hyper->eps, scale = hyper->grad_scale;
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) {
        const float gi = g[i] * scale;
        const float mi = m[i] + blend1 * (gi - m[i]);
        const float vi = beta2 * v[i] + blend2 * gi * gi;
        m[i] = mi;
        v[i] = vi;
        p[i] = p[i] * decay - step_size * (mi / (sqrtf(vi) / root2 + eps));
    }
}

enum { NORM_CHUNK = 16384 };  // elements of one partial sum: fixed, so that the norm is the same for any thread count

/* Doubles of scratch that global_norm() wants. */
static inline size_t global_norm_scratch(size_t n) { return (n + NORM_CHUNK - 1) / NORM_CHUNK; }

/* Euclidean norm of g (n), summed in double. */
static inline double global_norm(const float* g, size_t n, double* scratch) {
    const size_t chunks = global_norm_scratch(n);
#pragma omp parallel for schedule(static)
    for (size_t k = 0; k < chunks; k++) {
        const size_t end = n - k * NORM_CHUNK < NORM_CHUNK ? n : (k + 1) * NORM_CHUNK;
        double lane[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        for (size_t i = k * NORM_CHUNK; i < end; i++) { lane[i % 8] += (double)g[i] * (double)g[i]; }
        scratch[k] = ((lane[0] + lane[4]) + (lane[1] + lane[5])) + ((lane[2] + lane[6]) + (lane[3] + lane[7]));
    }
    double sum = 0;
    for (size_t k = 0; k < chunks; k++) { sum += scratch[k]; }
    return sqrt(sum);
}

#endif
