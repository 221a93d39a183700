/* adamw.h -- AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019), computed in the order of
 * PyTorch's torch.optim.AdamW. fp32 state.
 *
 *   g = grad_scale * g                      the clip factor (and any loss scale) is applied where g is read
 *   p = p * (1 - lr * weight_decay)
 *   m = m + (1 - beta1) * (g - m)
 *   v = beta2 * v + (1 - beta2) * g * g
 *   p = p - lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
 *
 * Bias corrections are computed in double. The caller chooses the tensors that decay: the two-dimensional ones.
 */
#ifndef LLMC_ADAMW_H
#define LLMC_ADAMW_H

#include "llmc/base/utils.h"

#include <math.h>

typedef struct {
    double lr, beta1, beta2, eps, weight_decay;
    float grad_scale;  // multiplies every gradient as it is read
    int64_t step;      // counts applied updates from 1
} AdamW;

enum { ADAMW_CHUNK = 4096 };  // elements a thread takes at once

/* Updates p, m, v (n) in place from the gradients g (n). sqrtf() becomes a vector instruction only where it need not set
 * errno: build with -fno-math-errno. */
static inline void adamw_update(float* p, const float* g, float* m, float* v, size_t n, const AdamW* hyper) {
    const double correction1 = 1.0 - pow(hyper->beta1, (double)hyper->step);
    const double correction2 = 1.0 - pow(hyper->beta2, (double)hyper->step);
    const float decay = (float)(1.0 - hyper->lr * hyper->weight_decay), grad_scale = hyper->grad_scale;
    const float step_size = (float)(hyper->lr / correction1);
    const float rsqrt_correction2 = (float)(1.0 / sqrt(correction2));
    const float one_minus_beta1 = (float)(1.0 - hyper->beta1), one_minus_beta2 = (float)(1.0 - hyper->beta2);
    const float beta2 = (float)hyper->beta2, eps = (float)hyper->eps;
#pragma omp parallel for schedule(static)
    for (size_t chunk = 0; chunk < n; chunk += ADAMW_CHUNK) {
        const size_t count = size_min(n - chunk, ADAMW_CHUNK);
        float* __restrict__ pc = p + chunk, * __restrict__ mc = m + chunk, * __restrict__ vc = v + chunk;
        const float* __restrict__ gc = g + chunk;
        for (size_t i = 0; i < count; i++) {
            const float gi = gc[i] * grad_scale;
            const float mi = mc[i] + one_minus_beta1 * (gi - mc[i]);
            const float vi = beta2 * vc[i] + one_minus_beta2 * gi * gi;
            mc[i] = mi;
            vc[i] = vi;
            pc[i] = pc[i] * decay - step_size * mi / (sqrtf(vi) * rsqrt_correction2 + eps);
        }
    }
}

#endif
