/* swiglu.h -- simple version. */
#ifndef LLMC_SWIGLU_H
#define LLMC_SWIGLU_H

#include "utils.h"

#include <math.h>

static inline void swiglu_forward(float* out, const float* gate_up, size_t N, int F) {
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        const float* g = gate_up + n * 2 * (size_t)F;
        for (int f = 0; f < F; f++) { out[n * (size_t)F + (size_t)f] = g[f] / (1.0f + expf(-g[f])) * g[F + f]; }
    }
}

static inline void swiglu_backward(float* dgate_up, const float* dout, const float* gate_up, size_t N, int F) {
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        const float* g = gate_up + n * 2 * (size_t)F;
        float* dg = dgate_up + n * 2 * (size_t)F;
        const float* d = dout + n * (size_t)F;
        for (int f = 0; f < F; f++) {
            const float s = 1.0f / (1.0f + expf(-g[f]));
            const float gate = g[f], up = g[F + f];
            dg[F + f] = d[f] * gate * s;
            dg[f] = d[f] * up * s * (1.0f + gate * (1.0f - s));
        }
    }
}

#endif
