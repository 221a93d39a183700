/* matmul.h -- simple version. */
#ifndef LLMC_MATMUL_H
#define LLMC_MATMUL_H

#include "utils.h"

static inline void matmul_forward(float* out, const float* x, const float* w, const float* residual, size_t N, int C, int OC) {
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        for (int o = 0; o < OC; o++) {
            const float *a = x + n * (size_t)C, *b = w + (size_t)o * (size_t)C;
            float lane[16] = {0};
            int c = 0;
            for (; c + 16 <= C; c += 16) {
                for (int i = 0; i < 16; i++) { lane[i] += a[c + i] * b[c + i]; }
            }
            float sum = residual ? residual[n * (size_t)OC + (size_t)o] : 0;
            for (; c < C; c++) { sum += a[c] * b[c]; }
            for (int i = 0; i < 16; i++) { sum += lane[i]; }
            out[n * (size_t)OC + (size_t)o] = sum;
        }
    }
}

static inline void matmul_backward_input(float* dx, const float* dout, const float* w, size_t N, int C, int OC,
                                         bool accumulate) {
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        float* d = dx + n * (size_t)C;
        if (!accumulate) {
            for (int c = 0; c < C; c++) { d[c] = 0; }
        }
        for (int o = 0; o < OC; o++) {
            const float s = dout[n * (size_t)OC + (size_t)o];
            const float* b = w + (size_t)o * (size_t)C;
            for (int c = 0; c < C; c++) { d[c] += s * b[c]; }
        }
    }
}

static inline void matmul_backward_weight(float* dw, const float* dout, const float* x, size_t N, int C, int OC) {
#pragma omp parallel for schedule(static)
    for (int o = 0; o < OC; o++) {
        float* d = dw + (size_t)o * (size_t)C;
        for (size_t n = 0; n < N; n++) {
            const float s = dout[n * (size_t)OC + (size_t)o];
            const float* a = x + n * (size_t)C;
            for (int c = 0; c < C; c++) { d[c] += s * a[c]; }
        }
    }
}

#endif
