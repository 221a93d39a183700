/* rmsnorm.h -- root mean square normalization of rows (Zhang and Sennrich, "Root Mean Square Layer Normalization", NeurIPS
 * 2019). fp32.
 *
 *   rstd = 1 / sqrt(mean(x^2) + eps)                      mean over the C elements of a row
 *   out  = x * rstd * weight
 *
 *   dweight   += sum over rows of dout * x * rstd
 *   mean_term  = rstd^3 * mean(dout * weight * x)         how rstd depends on x
 *   dx        += dout * weight * rstd - x * mean_term
 *
 * dweight is summed within chunks of RMSNORM_CHUNK rows and then over the chunks, both in order: the result is the same
 * for any thread count.
 */
#ifndef LLMC_RMSNORM_H
#define LLMC_RMSNORM_H

#include "llmc/base/simd.h"

#include <math.h>

enum { RMSNORM_CHUNK = 64 };

/* Writes out (N, C) and rstd (N), kept for backward, from x (N, C) and weight (C). */
static inline void rmsnorm_forward(float* out, float* rstd, const float* x, const float* weight, size_t N, int C, float eps) {
    const size_t width = (size_t)C;
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        const float* xn = x + n * width;
        float* on = out + n * width;
        const float r = 1.0f / sqrtf(vf_dot(xn, xn, width) / (float)C + eps);
        rstd[n] = r;
        for (size_t c = 0; c < width; c++) { on[c] = xn[c] * r * weight[c]; }
    }
}

/* Returns the bytes of scratch that rmsnorm_backward() needs. */
static inline size_t rmsnorm_backward_scratch(size_t N, int C) {
    return ceil_div(N, RMSNORM_CHUNK) * (size_t)C * sizeof(float);
}

/* Adds to dx (N, C) and dweight (C; NULL: not wanted) from dout, x (N, C), weight (C) and the forward pass's rstd (N).
 * scratch: bytes as above */
static inline void rmsnorm_backward(float* dx, float* dweight, void* scratch, const float* dout, const float* x,
                                    const float* weight, const float* rstd, size_t N, int C) {
    const size_t width = (size_t)C, chunks = ceil_div(N, RMSNORM_CHUNK);
    float* partial = (float*)scratch;  // (chunks, C)
#pragma omp parallel for schedule(static)
    for (size_t k = 0; k < chunks; k++) {
        float* __restrict__ dw = partial + k * width;
        memset(dw, 0, width * sizeof(float));
        for (size_t n = k * RMSNORM_CHUNK; n < size_min(N, (k + 1) * RMSNORM_CHUNK); n++) {
            const float *xn = x + n * width, *dn = dout + n * width;
            float* __restrict__ dxn = dx + n * width;
            const float r = rstd[n];
            vf dot = vf_set(0.0f);
            for (size_t c = 0; c < width; c += SIMD) {
                const size_t lanes = width - c;
                dot += vf_load_upto(dn + c, lanes, 0.0f) * vf_load_upto(weight + c, lanes, 0.0f) *
                       vf_load_upto(xn + c, lanes, 0.0f);
            }
            const float mean_term = vf_sum(dot) * r * r * r / (float)C;
            for (size_t c = 0; c < width; c++) {
                const float scaled = dn[c] * r;
                dw[c] += scaled * xn[c];
                dxn[c] += scaled * weight[c] - xn[c] * mean_term;
            }
        }
    }
    for (size_t k = 0; dweight && k < chunks; k++) {
        for (size_t c = 0; c < width; c++) { dweight[c] += partial[k * width + c]; }
    }
}

#endif
