/* attention.h -- simple version. */
#ifndef LLMC_ATTENTION_H
#define LLMC_ATTENTION_H

#include "utils.h"

#include <math.h>

static inline float attention_dot(const float* a, const float* b, int n) {
    float s = 0;
    for (int i = 0; i < n; i++) { s += a[i] * b[i]; }
    return s;
}

static inline void attention_forward(float* out, float* lse, const float* qkv, size_t B, int T, int NH, int NKV, int HD) {
    const size_t row = (size_t)(NH + 2 * NKV) * (size_t)HD, orow = (size_t)NH * (size_t)HD;
    const float scale = 1.0f / sqrtf((float)HD);
#pragma omp parallel for schedule(static)
    for (size_t bh = 0; bh < B * (size_t)NH; bh++) {
        const size_t b = bh / (size_t)NH, h = bh % (size_t)NH, kvh = h / (size_t)(NH / NKV);
        for (int t = 0; t < T; t++) {
            const float* q = qkv + (b * (size_t)T + (size_t)t) * row + h * (size_t)HD;
            float* o = out + (b * (size_t)T + (size_t)t) * orow + h * (size_t)HD;
            float m = -INFINITY, l = 0;
            for (int d = 0; d < HD; d++) { o[d] = 0; }
            for (int s = 0; s <= t; s++) {
                const float* k = qkv + (b * (size_t)T + (size_t)s) * row + ((size_t)NH + kvh) * (size_t)HD;
                const float* v = k + (size_t)NKV * (size_t)HD;
                const float score = attention_dot(q, k, HD) * scale;
                if (score > m) {
                    const float f = expf(m - score);
                    for (int d = 0; d < HD; d++) { o[d] *= f; }
                    l *= f;
                    m = score;
                }
                const float p = expf(score - m);
                l += p;
                for (int d = 0; d < HD; d++) { o[d] += p * v[d]; }
            }
            for (int d = 0; d < HD; d++) { o[d] /= l; }
            lse[bh * (size_t)T + (size_t)t] = m + logf(l);
        }
    }
}

static inline size_t attention_backward_scratch(size_t B, int T, int NH, int NKV, int HD) {
    (void)NKV;
    return B * (size_t)T * (size_t)NH * 2 * (size_t)HD;
}

static inline void attention_backward(float* dqkv, float* scratch, const float* dout, const float* out, const float* lse,
                                      const float* qkv, size_t B, int T, int NH, int NKV, int HD) {
    const size_t row = (size_t)(NH + 2 * NKV) * (size_t)HD, orow = (size_t)NH * (size_t)HD;
    const float scale = 1.0f / sqrtf((float)HD);
    (void)scratch;
#pragma omp parallel for schedule(static)
    for (size_t bk = 0; bk < B * (size_t)NKV; bk++) {
        const size_t b = bk / (size_t)NKV, kvh = bk % (size_t)NKV, group = (size_t)(NH / NKV);
        for (int t = 0; t < T; t++) {
            float* dk = dqkv + (b * (size_t)T + (size_t)t) * row + ((size_t)NH + kvh) * (size_t)HD;
            for (int d = 0; d < HD; d++) { dk[d] = dk[(size_t)NKV * (size_t)HD + (size_t)d] = 0; }
        }
        for (size_t h = kvh * group; h < (kvh + 1) * group; h++) {
            for (int t = 0; t < T; t++) {
                const size_t n = b * (size_t)T + (size_t)t;
                const float *q = qkv + n * row + h * (size_t)HD, *o = out + n * orow + h * (size_t)HD;
                const float* dO = dout + n * orow + h * (size_t)HD;
                float* dq = dqkv + n * row + h * (size_t)HD;
                const float D = attention_dot(o, dO, HD), L = lse[(b * (size_t)NH + h) * (size_t)T + (size_t)t];
                for (int d = 0; d < HD; d++) { dq[d] = 0; }
                for (int s = 0; s <= t; s++) {
                    const size_t at = (b * (size_t)T + (size_t)s) * row + ((size_t)NH + kvh) * (size_t)HD;
                    const float *k = qkv + at, *v = k + (size_t)NKV * (size_t)HD;
                    float *dk = dqkv + at, *dv = dk + (size_t)NKV * (size_t)HD;
                    const float p = expf(attention_dot(q, k, HD) * scale - L);
                    const float ds = p * (attention_dot(dO, v, HD) - D) * scale;
                    for (int d = 0; d < HD; d++) {
                        dv[d] += p * dO[d];
                        dk[d] += ds * q[d];
                        dq[d] += ds * k[d];
                    }
                }
            }
        }
    }
}

static inline void attention_decode(float* out, const float* q, const float* kv_cache, int positions, int NH, int NKV, int HD) {
    const size_t row = 2 * (size_t)NKV * (size_t)HD;
    const float scale = 1.0f / sqrtf((float)HD);
#pragma omp parallel for schedule(static)
    for (int h = 0; h < NH; h++) {
        const float* k = kv_cache + (size_t)(h / (NH / NKV)) * (size_t)HD;
        const float* v = k + (size_t)NKV * (size_t)HD;
        float* o = out + (size_t)h * (size_t)HD;
        float m = -INFINITY, l = 0;
        for (int d = 0; d < HD; d++) { o[d] = 0; }
        for (int s = 0; s < positions; s++) {
            const float score = attention_dot(q + (size_t)h * (size_t)HD, k + (size_t)s * row, HD) * scale;
            if (score > m) {
                const float f = expf(m - score);
                for (int d = 0; d < HD; d++) { o[d] *= f; }
                l *= f;
                m = score;
            }
            const float p = expf(score - m);
            l += p;
            for (int d = 0; d < HD; d++) { o[d] += p * v[(size_t)s * row + (size_t)d]; }
        }
        for (int d = 0; d < HD; d++) { o[d] /= l; }
    }
}

#endif
