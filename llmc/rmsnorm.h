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

#include "llmc/base/matrix.h"  // defines: RowShape
#include "llmc/base/simd.h"

#include <math.h>

// ---------------------------------------------------------------------------------------------------------------------
// the plain loops; the forward pass has no other form

/* Writes out (rows) and rstd (N), kept for backward, from x (rows) and weight (C). */
static inline void rmsnorm_forward(float* out, float* rstd, const float* x, const float* weight, RowShape rows, float eps) {
    const size_t width = (size_t)rows.C;
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < rows.N; n++) {
        const float* xn = x + n * rows.pitch;
        float* on = out + n * rows.pitch;
        const float r = 1.0f / sqrtf(vf_dot(xn, xn, width) / (float)rows.C + eps);
        rstd[n] = r;
        for (size_t c = 0; c < width; c++) { on[c] = xn[c] * r * weight[c]; }
    }
}

/* Adds to dx (rows) and dweight (C; NULL: not wanted) from dout, x (rows), weight (C) and the forward pass's rstd (N). */
static inline void rmsnorm_backward_plain(float* dx, float* dweight, const float* dout, const float* x, const float* weight,
                                          const float* rstd, RowShape rows) {
    for (size_t n = 0; n < rows.N; n++) {
        const float *xn = x + n * rows.pitch, *dn = dout + n * rows.pitch, r = rstd[n];
        float *dxn = dx + n * rows.pitch, dot = 0;
        for (int c = 0; c < rows.C; c++) { dot += dn[c] * weight[c] * xn[c]; }
        const float mean_term = r * r * r * dot / (float)rows.C;
        for (int c = 0; c < rows.C; c++) {
            if (dweight) { dweight[c] += dn[c] * xn[c] * r; }
            dxn[c] += dn[c] * weight[c] * r - xn[c] * mean_term;
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// the fast form

enum { RMSNORM_CHUNK = 64 };

/* Returns the bytes of scratch that rmsnorm_backward() needs. */
static inline size_t rmsnorm_backward_scratch(size_t N, int C) {
    return ceil_div(N, RMSNORM_CHUNK) * (size_t)C * sizeof(float);
}

/* Does the same with threads and vectors. scratch: bytes as above */
static inline void rmsnorm_backward(float* dx, float* dweight, void* scratch, const float* dout, const float* x,
                                    const float* weight, const float* rstd, RowShape rows) {
    const size_t width = (size_t)rows.C, chunks = ceil_div(rows.N, RMSNORM_CHUNK);
    float* partial = (float*)scratch;  // (chunks, C)
#pragma omp parallel for schedule(static)
    for (size_t k = 0; k < chunks; k++) {
        float* __restrict__ dw = partial + k * width;
        memset(dw, 0, width * sizeof(float));
        for (size_t n = k * RMSNORM_CHUNK; n < size_min(rows.N, (k + 1) * RMSNORM_CHUNK); n++) {
            const float *xn = x + n * rows.pitch, *dn = dout + n * rows.pitch;
            float* __restrict__ dxn = dx + n * rows.pitch;
            const float r = rstd[n];
            vf dot = vf_set(0.0f);
            for (size_t c = 0; c < width; c += SIMD) {
                const size_t lanes = width - c;
                dot += vf_load_upto(dn + c, lanes, 0.0f) * vf_load_upto(weight + c, lanes, 0.0f) *
                       vf_load_upto(xn + c, lanes, 0.0f);
            }
            const float mean_term = vf_sum(dot) * r * r * r / (float)rows.C;
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
