/* attention.h -- causal attention with grouped query heads, forward and backward, without a (T, T) matrix. fp32.
 *
 *   S = Q K^T / sqrt(HD), masked to key <= query        P = softmax(S)        out = P V        lse = log sum e^S
 *
 * Scores exist only for a tile of ATT_Q queries and ATT_K keys (Milakov and Gimelshein, "Online normalizer calculation for
 * softmax", 2018; Dao et al., "FlashAttention", 2022). A running maximum and sum a query are carried from tile to tile,
 * and what was accumulated is scaled down when the maximum moves. Backward recomputes P = e^(S - lse):
 *
 *   dV = P^T dO      dP = dO V^T      dS = P * (dP - sum_d(dO * out)) / sqrt(HD)      dQ = dS K      dK = dS^T Q
 *
 * Tiles hold scores transposed, (key, query). Then queries are the lanes of a vector: maximum, sum and exponentials need
 * no work across lanes, and every product finds its operands as matmul_small() reads them. Only Q (and dO) are transposed,
 * once a tile of queries.
 *
 * A row of qkv is NH query heads, NKV key heads, NKV value heads, each HD wide; query head h reads key head
 * h / (NH / NKV). HD <= MAX_HEAD_DIM. Results are bitwise the same for any thread count.
 */
#ifndef LLMC_ATTENTION_H
#define LLMC_ATTENTION_H

#include "llmc/config.h"
#include "llmc/matmul.h"

#include <math.h>

enum {
    ATT_Q = MATMUL_NR,      // queries of a tile: the width of a panel
    ATT_K = 8 * MATMUL_MR,  // keys of a tile
};

/* dst (HD, ATT_Q) = scale * the transpose of n <= ATT_Q rows of HD floats; missing rows are zeros. */
static inline void attention_transpose(float* dst, const float* src, size_t row, size_t n, size_t HD, float scale) {
    if (n < ATT_Q) { memset(dst, 0, HD * ATT_Q * sizeof(float)); }
    simd_transpose(dst, ATT_Q, src, row, n, HD);
    for (size_t i = 0; i < HD * ATT_Q; i += SIMD) { vf_store(dst + i, vf_load(dst + i) * scale); }
}

/* The lanes from `first` on of queries that stand before a key: lane + first < ahead. */
LLMC_INLINE vi attention_masked(size_t first, int64_t ahead) {
    int32_t lane[SIMD];
    for (int i = 0; i < SIMD; i++) { lane[i] = (int64_t)first + i < ahead ? -1 : 0; }
    vi mask;
    memcpy(&mask, lane, sizeof mask);
    return mask;
}

/* One tile of queries [q0, q0 + nq) of one head. q, k, v, out point to the head's row 0. */
static inline void attention_forward_tile(float* out, float* lse, const float* q, const float* k, const float* v, size_t row,
                                          size_t out_row, size_t q0, size_t nq, size_t HD) {
    float q_t[MAX_HEAD_DIM * ATT_Q], s[ATT_K * ATT_Q], acc[ATT_Q * MAX_HEAD_DIM], top[ATT_Q], sum[ATT_Q], shrink[ATT_Q];
    attention_transpose(q_t, q + q0 * row, row, nq, HD, 1.0f / sqrtf((float)HD));
    memset(acc, 0, nq * HD * sizeof(float));
    for (size_t i = 0; i < ATT_Q; i++) {
        top[i] = -INFINITY;
        sum[i] = 0;
    }
    for (size_t k0 = 0; k0 < q0 + nq; k0 += ATT_K) {
        const size_t nk = size_min(ATT_K, q0 + nq - k0);
        matmul_small(nk, ATT_Q, HD, by_rows(k + k0 * row, row), q_t, ATT_Q, s, NULL, ATT_Q);
        for (size_t i = 0; i < ATT_Q; i += SIMD) {
            const vf old = vf_load(top + i);
            vf max = old, total = vf_set(0.0f);
            for (size_t j = 0; j < nk; j++) {
                float* at = s + j * ATT_Q + i;
                if (k0 + j > q0 + i) {  // only on the diagonal
                    vf_store(at, vf_select(attention_masked(i, (int64_t)(k0 + j - q0)), vf_set(-INFINITY), vf_load(at)));
                }
                max = vf_max(vf_load(at), max);
            }
            for (size_t j = 0; j < nk; j++) {
                float* at = s + j * ATT_Q + i;
                const vf p = vf_exp(vf_load(at) - max);
                vf_store(at, p);
                total += p;
            }
            const vf factor = vf_exp(old - max);  // 0 in the first tile
            vf_store(shrink + i, factor);
            vf_store(top + i, max);
            vf_store(sum + i, vf_load(sum + i) * factor + total);
        }
        for (size_t i = 0; i < nq; i++) {
            if (shrink[i] == 1.0f) { continue; }
            for (size_t d = 0; d < HD; d++) { acc[i * HD + d] *= shrink[i]; }
        }
        matmul_small(nq, HD, nk, transposed(by_rows(s, ATT_Q)), v + k0 * row, row, acc, acc, HD);
    }
    for (size_t i = 0; i < nq; i++) {
        const float scale = 1.0f / sum[i];
        for (size_t d = 0; d < HD; d++) { out[(q0 + i) * out_row + d] = acc[i * HD + d] * scale; }
        lse[q0 + i] = top[i] + logf(sum[i]);
    }
}

/* out: (B, T, NH HD)   lse: (B, NH, T), kept for backward   qkv: (B, T, (NH + 2 NKV) HD), q and k rotated */
static inline void attention_forward(float* out, float* lse, const float* qkv, size_t B, int T, int NH, int NKV, int HD) {
    const size_t len = (size_t)T, width = (size_t)HD, heads = (size_t)NH, kv_heads = (size_t)NKV;
    const size_t row = (heads + 2 * kv_heads) * width, out_row = heads * width, tiles = ceil_div(len, ATT_Q);
#pragma omp parallel for schedule(dynamic)
    for (size_t i = 0; i < B * heads * tiles; i++) {
        const size_t b = i / (heads * tiles), h = i / tiles % heads, q0 = (tiles - 1 - i % tiles) * ATT_Q;  // longest first
        const float* q = qkv + b * len * row + h * width;
        const float* k = qkv + b * len * row + (heads + h / (heads / kv_heads)) * width;
        attention_forward_tile(out + b * len * out_row + h * width, lse + (b * heads + h) * len, q, k, k + kv_heads * width,
                               row, out_row, q0, size_min(ATT_Q, len - q0), width);
    }
}

/* One query head of one sequence: dq (T, HD) in rows of `row` floats, dk and dv (T, HD) without gaps; all are overwritten. */
static inline void attention_backward_head(float* dq, float* dk, float* dv, const float* dout, const float* out,
                                           const float* lse, const float* q, const float* k, const float* v, size_t row,
                                           size_t out_row, size_t T, size_t HD) {
    float q_t[MAX_HEAD_DIM * ATT_Q], dout_t[MAX_HEAD_DIM * ATT_Q], p[ATT_K * ATT_Q], ds[ATT_K * ATT_Q];
    float norm[ATT_Q], pull[ATT_Q];  // lse, and sum_d(dO * out), of each query
    const float scale = 1.0f / sqrtf((float)HD);
    memset(dk, 0, T * HD * sizeof(float));
    memset(dv, 0, T * HD * sizeof(float));
    for (size_t q0 = 0; q0 < T; q0 += ATT_Q) {
        const size_t nq = size_min(ATT_Q, T - q0);
        const float *q_rows = q + q0 * row, *dout_rows = dout + q0 * out_row;
        attention_transpose(q_t, q_rows, row, nq, HD, scale);
        attention_transpose(dout_t, dout_rows, out_row, nq, HD, 1.0f);
        for (size_t i = 0; i < ATT_Q; i++) {
            norm[i] = i < nq ? lse[q0 + i] : 0.0f;
            pull[i] = i < nq ? vf_dot(dout_rows + i * out_row, out + (q0 + i) * out_row, HD) : 0.0f;
        }
        for (size_t k0 = 0; k0 < q0 + nq; k0 += ATT_K) {
            const size_t nk = size_min(ATT_K, q0 + nq - k0);
            matmul_small(nk, ATT_Q, HD, by_rows(k + k0 * row, row), q_t, ATT_Q, p, NULL, ATT_Q);
            matmul_small(nk, ATT_Q, HD, by_rows(v + k0 * row, row), dout_t, ATT_Q, ds, NULL, ATT_Q);
            for (size_t j = 0; j < nk; j++) {
                for (size_t i = 0; i < ATT_Q; i += SIMD) {
                    float *p_at = p + j * ATT_Q + i, *ds_at = ds + j * ATT_Q + i;
                    vf weight = vf_exp(vf_load(p_at) - vf_load(norm + i));
                    if (k0 + j > q0 + i) {
                        weight = vf_select(attention_masked(i, (int64_t)(k0 + j - q0)), vf_set(0.0f), weight);
                    }
                    vf_store(p_at, weight);
                    vf_store(ds_at, weight * (vf_load(ds_at) - vf_load(pull + i)) * scale);
                }
            }
            matmul_small(nk, HD, nq, by_rows(p, ATT_Q), dout_rows, out_row, dv + k0 * HD, dv + k0 * HD, HD);
            matmul_small(nk, HD, nq, by_rows(ds, ATT_Q), q_rows, row, dk + k0 * HD, dk + k0 * HD, HD);
            matmul_small(nq, HD, nk, transposed(by_rows(ds, ATT_Q)), k + k0 * row, row, dq + q0 * row,
                         k0 ? dq + q0 * row : NULL, row);
        }
    }
}

/* Floats of scratch that attention_backward() wants: dk and dv of each query head. */
static inline size_t attention_backward_scratch(size_t B, int T, int NH, int NKV, int HD) {
    (void)NKV;
    return B * (size_t)NH * (size_t)T * 2 * (size_t)HD;
}

/* dqkv: (B, T, (NH + 2 NKV) HD) =   dout, out: (B, T, NH HD)   lse: (B, NH, T)   qkv as in forward */
static inline void attention_backward(float* dqkv, float* scratch, const float* dout, const float* out, const float* lse,
                                      const float* qkv, size_t B, int T, int NH, int NKV, int HD) {
    const size_t len = (size_t)T, width = (size_t)HD, heads = (size_t)NH, kv_heads = (size_t)NKV, group = heads / kv_heads;
    const size_t row = (heads + 2 * kv_heads) * width, out_row = heads * width;
#pragma omp parallel for schedule(dynamic)
    for (size_t i = 0; i < B * heads; i++) {
        const size_t b = i / heads, h = i % heads, at = b * len * row, out_at = b * len * out_row + h * width;
        const float* k = qkv + at + (heads + h / group) * width;
        float* dk = scratch + i * len * 2 * width;
        attention_backward_head(dqkv + at + h * width, dk, dk + len * width, dout + out_at, out + out_at, lse + i * len,
                                qkv + at + h * width, k, k + kv_heads * width, row, out_row, len, width);
    }
    // the heads of a group share a key head: their gradients are added in the order of the heads
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < B * len; n++) {
        for (size_t i = 0; i < 2 * kv_heads; i++) {  // dk of each key head, then dv
            float* sum = dqkv + n * row + (heads + i) * width;
            const size_t first = n / len * heads + i % kv_heads * group;
            for (size_t h = 0; h < group; h++) {
                const float* part = scratch + ((first + h) * 2 + i / kv_heads) * len * width + n % len * width;
                for (size_t d = 0; d < width; d++) { sum[d] = h ? sum[d] + part[d] : part[d]; }
            }
        }
    }
}

/* One new position of one sequence. out, q: (NH HD)   kv_cache: (positions, 2 NKV HD), a row is the keys, then the values; the
 * new position's own are in it. */
static inline void attention_decode(float* out, const float* q, const float* kv_cache, int positions, int NH, int NKV, int HD) {
    const size_t width = (size_t)HD, row = 2 * (size_t)NKV * width, len = (size_t)positions;
    const float scale = 1.0f / sqrtf((float)HD);
#pragma omp parallel for schedule(static)
    for (int h = 0; h < NH; h++) {
        const float *k = kv_cache + (size_t)(h / (NH / NKV)) * width, *v = k + (size_t)NKV * width;
        float *o = out + (size_t)h * width, p[ATT_K], top = -INFINITY, sum = 0;
        memset(o, 0, width * sizeof(float));
        for (size_t k0 = 0; k0 < len; k0 += ATT_K) {
            const size_t nk = size_min(ATT_K, len - k0);
            float max = top, total = 0;
            for (size_t j = 0; j < nk; j++) {
                p[j] = vf_dot(q + (size_t)h * width, k + (k0 + j) * row, width) * scale;
                max = p[j] > max ? p[j] : max;
            }
            const float shrink = expf(top - max);
            for (size_t d = 0; d < width; d++) { o[d] *= shrink; }
            for (size_t j = 0; j < nk; j++) {
                p[j] = expf(p[j] - max);
                total += p[j];
            }
            for (size_t j = 0; j < nk; j++) {
                const float* value = v + (k0 + j) * row;
                for (size_t d = 0; d < width; d++) { o[d] += p[j] * value[d]; }
            }
            top = max;
            sum = sum * shrink + total;
        }
        for (size_t d = 0; d < width; d++) { o[d] /= sum; }
    }
}

#endif
