/* rmsnorm.h -- simple version. */
#ifndef LLMC_RMSNORM_H
#define LLMC_RMSNORM_H

#include "utils.h"

#include <math.h>

static inline void rmsnorm_forward(float* out, float* rstd, const float* x, const float* weight, size_t N, int C, float eps) {
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        const float* xn = x + n * (size_t)C;
        float* on = out + n * (size_t)C;
        float sum = 0;
        for (int c = 0; c < C; c++) { sum += xn[c] * xn[c]; }
        const float r = 1.0f / sqrtf(sum / (float)C + eps);
        rstd[n] = r;
        for (int c = 0; c < C; c++) { on[c] = xn[c] * r * weight[c]; }
    }
}

enum { RMSNORM_CHUNK = 64 };  // rows whose weight gradients are summed first

static inline size_t rmsnorm_backward_scratch(size_t N, int C) { return (N + RMSNORM_CHUNK - 1) / RMSNORM_CHUNK * (size_t)C; }

static inline void rmsnorm_backward(float* dx, float* dweight, float* scratch, const float* dout, const float* x,
                                    const float* weight, const float* rstd, size_t N, int C) {
    const size_t chunks = (N + RMSNORM_CHUNK - 1) / RMSNORM_CHUNK;
#pragma omp parallel for schedule(static)
    for (size_t k = 0; k < chunks; k++) {
        float* dw = scratch + k * (size_t)C;
        for (int c = 0; c < C; c++) { dw[c] = 0; }
        const size_t end = N < (k + 1) * RMSNORM_CHUNK ? N : (k + 1) * RMSNORM_CHUNK;
        for (size_t n = k * RMSNORM_CHUNK; n < end; n++) {
            const float* xn = x + n * (size_t)C;
            const float* dn = dout + n * (size_t)C;
            float* dxn = dx + n * (size_t)C;
            const float r = rstd[n];
            float dot = 0;
            for (int c = 0; c < C; c++) { dot += dn[c] * weight[c] * xn[c]; }
            const float s = dot * r * r * r / (float)C;
            for (int c = 0; c < C; c++) {
                dw[c] += dn[c] * xn[c] * r;
                dxn[c] += dn[c] * weight[c] * r - xn[c] * s;
            }
        }
    }
    for (size_t k = 0; k < chunks; k++) {
        for (int c = 0; c < C; c++) { dweight[c] += scratch[k * (size_t)C + (size_t)c]; }
    }
}

#endif
