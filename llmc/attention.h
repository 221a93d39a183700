/* attention.h -- causal attention with grouped query heads: forward, backward, and decoding of one new token. fp32.
 *
 *   S = Q K^T / sqrt(HD), masked to start <= key <= query      P = softmax(S)      out = P V      lse = log sum_k e^S
 *
 *   dV = P^T dO      dP = dO V^T      D = sum_d dO * out      dS = P * (dP - D) / sqrt(HD)      dQ = dS K      dK = dS^T Q
 *
 * A row of qkv is NH query heads, NKV key heads, NKV value heads, each HD wide; query head h reads key head h / (NH / NKV).
 * HD <= MAX_HEAD_DIM. q and k are rotated already (rope.h).
 *
 * A row may hold several documents, each of which sees only itself: starts (B, T) holds for each token the index, inside its
 * row, of its document's first token. So starts[t] <= t, and starts never decrease within a row. NULL: each row is one
 * document.
 *
 * The plain loops come first and follow the formulas above. -DLLMC_PLAIN builds the program from them; the tests compare the
 * fast form below with them. Neither form ever holds a (T, T) matrix. Results are bitwise the same for any thread count.
 */
#ifndef LLMC_ATTENTION_H
#define LLMC_ATTENTION_H

#include "llmc/config.h"  // defines: AttentionShape, MAX_HEAD_DIM
#include "llmc/matmul.h"  // defines: matmul_small; and simd.h, with its vectors

#include <assert.h>
#include <math.h>

/* Where one query head of one sequence lies in each tensor: offset of its first row and distance between rows, in floats. */
typedef struct {
    size_t q, k, v;       // in qkv and dqkv
    size_t out;           // in out and dout
    size_t lse;           // in the tensor lse, one float a row
    size_t starts;        // in the tensor starts, one index a row
    size_t row, out_row;  // distance between rows of qkv, of out
    size_t T, HD;         // rows, and their width
} AttentionHead;

static inline AttentionHead attention_head(AttentionShape s, size_t b, size_t h) {
    const size_t T = (size_t)s.T, NH = (size_t)s.NH, NKV = (size_t)s.NKV, HD = (size_t)s.HD;
    AttentionHead a;
    a.row = (NH + 2 * NKV) * HD;
    a.out_row = NH * HD;
    a.q = b * T * a.row + h * HD;
    a.k = b * T * a.row + (NH + h / (NH / NKV)) * HD;
    a.v = a.k + NKV * HD;
    a.out = b * T * a.out_row + h * HD;
    a.lse = (b * NH + h) * T;
    a.starts = b * T;
    a.T = T;
    a.HD = HD;
    return a;
}

/* Returns the first key that query t sees. */
static inline size_t attention_first_key(const int32_t* starts, AttentionHead a, size_t t) {
    return starts ? (size_t)starts[a.starts + t] : 0;
}

/* Returns the factor 1 / sqrt(HD) of the scores: it keeps their deviation from growing with HD. */
static inline float attention_scale(size_t HD) { return 1.0f / sqrtf((float)HD); }

// ---------------------------------------------------------------------------------------------------------------------
// the plain loops

static inline float attention_dot(const float* a, const float* b, int n) {
    float sum = 0;
    for (int i = 0; i < n; i++) { sum += a[i] * b[i]; }
    return sum;
}

/* Writes out (B, T, NH HD) and lse (B, NH, T) from qkv (B, T, (NH + 2 NKV) HD). */
static inline void attention_forward_plain(float* out, float* lse, const float* qkv, const int32_t* starts, AttentionShape s) {
    const float scale = attention_scale((size_t)s.HD);
    for (size_t i = 0; i < (size_t)s.B * (size_t)s.NH; i++) {
        const AttentionHead a = attention_head(s, i / (size_t)s.NH, i % (size_t)s.NH);
        for (size_t t = 0; t < (size_t)s.T; t++) {  // query t sees the keys u from its document's first to t
            const size_t first = attention_first_key(starts, a, t);
            const float *q = qkv + a.q + t * a.row, *k = qkv + a.k, *v = qkv + a.v;
            float *o = out + a.out + t * a.out_row, m = -INFINITY, l = 0;  // row max and row sum
            for (size_t u = first; u <= t; u++) { m = fmaxf(m, attention_dot(q, k + u * a.row, s.HD) * scale); }
            memset(o, 0, (size_t)s.HD * sizeof(float));
            for (size_t u = first; u <= t; u++) {
                const float p = expf(attention_dot(q, k + u * a.row, s.HD) * scale - m);  // <= 1: never overflows
                l += p;
                for (int d = 0; d < s.HD; d++) { o[d] += p * v[u * a.row + (size_t)d]; }
            }
            for (int d = 0; d < s.HD; d++) { o[d] /= l; }
            lse[a.lse + t] = m + logf(l);
        }
    }
}

/* Overwrites dqkv; shapes as above. */
static inline void attention_backward_plain(float* dqkv, const float* dout, const float* out, const float* lse,
                                            const float* qkv, const int32_t* starts, AttentionShape s) {
    const float scale = attention_scale((size_t)s.HD);
    memset(dqkv, 0, (size_t)s.B * (size_t)s.T * attention_head(s, 0, 0).row * sizeof(float));
    for (size_t i = 0; i < (size_t)s.B * (size_t)s.NH; i++) {
        const AttentionHead a = attention_head(s, i / (size_t)s.NH, i % (size_t)s.NH);
        for (size_t t = 0; t < (size_t)s.T; t++) {
            const float *q = qkv + a.q + t * a.row, *dO = dout + a.out + t * a.out_row;
            const float D = attention_dot(dO, out + a.out + t * a.out_row, s.HD);
            float* dq = dqkv + a.q + t * a.row;
            for (size_t u = attention_first_key(starts, a, t); u <= t; u++) {
                const float *k = qkv + a.k + u * a.row, *v = qkv + a.v + u * a.row;
                float *dk = dqkv + a.k + u * a.row, *dv = dqkv + a.v + u * a.row;
                const float p = expf(attention_dot(q, k, s.HD) * scale - lse[a.lse + t]);
                const float ds = p * (attention_dot(dO, v, s.HD) - D) * scale;
                for (int d = 0; d < s.HD; d++) {
                    dq[d] += ds * k[d];
                    dk[d] += ds * q[d];
                    dv[d] += p * dO[d];
                }
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// the fast form
//
// Scores exist only for a tile of ATT_Q queries and ATT_K keys, which stays in the L1 cache (Milakov and Gimelshein, "Online
// normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022). Each tile updates the row max and the row
// sum; when the row max grows, the sums so far are rescaled. matmul_small() computes every product.
//
// A tile holds its scores transposed, (key, query). Queries are the lanes of a vector, so max, sum and exponentials need no
// work across lanes. Only Q and dO are transposed, once for each tile of queries.
//
// A tile of queries begins with the first key of its first query: starts never decrease, so no query of the tile sees an
// earlier key, and the keys of earlier documents cost nothing.
//
// On one thread of an Intel Xeon with AVX-512 (a shared virtual machine, gcc 12, HD 64, T 256) the fast form takes 1/16 to
// 1/20 of the plain loops' time forward, and 1/15 to 1/20 backward. bench_layers.c times both.

enum {
    ATT_Q = MATMUL_NR,      // queries of a tile: the width of a panel
    ATT_K = 8 * MATMUL_MR,  // keys of a tile
};

/* One thread's scratch memory: a tile of queries, and the scores of these queries and a tile of keys. */
typedef struct {
    float q_t[MAX_HEAD_DIM * ATT_Q];     // (HD, ATT_Q) queries, transposed and scaled
    float dout_t[MAX_HEAD_DIM * ATT_Q];  // (HD, ATT_Q) dO, transposed
    float acc[ATT_Q * MAX_HEAD_DIM];     // (ATT_Q, HD) sum over keys of e^(s - row max) v
    float p[ATT_K * ATT_Q];              // (ATT_K, ATT_Q) scores, then weights
    float ds[ATT_K * ATT_Q];             // (ATT_K, ATT_Q) dP, then dS
} AttentionTiles;

/* What the forward pass read, and the part of its results that the backward pass reads. */
typedef struct {
    const float* qkv;        // (B, T, (NH + 2 NKV) HD), q and k rotated
    const int32_t* starts;   // (B, T) or NULL, see above
    const float *out, *lse;  // (B, T, NH HD) and (B, NH, T)
} AttentionTensors;

static_assert((int)MAX_HEAD_DIM <= (int)MATMUL_SMALL_K && (int)ATT_K <= (int)MATMUL_SMALL_K, "matmul_small() sums no further");

/* Writes dst (HD, ATT_Q) = scale * the transpose of n <= ATT_Q rows of HD floats; missing rows become zeros. */
static inline void attention_transpose(float* dst, const float* src, size_t row, size_t n, size_t HD, float scale) {
    if (n < ATT_Q) { memset(dst, 0, HD * ATT_Q * sizeof(float)); }
    simd_transpose(dst, ATT_Q, src, row, n, HD);
    for (size_t i = 0; i < HD * ATT_Q; i += SIMD) { vf_store(dst + i, vf_load(dst + i) * scale); }
}

/* Writes first (ATT_Q), the first key that each query of a tile sees. Queries past the end see the keys that the last query
 * sees. */
static inline void attention_first_keys(int32_t* first, const int32_t* starts, AttentionHead a, size_t q0, size_t nq) {
    for (size_t i = 0; i < ATT_Q; i++) { first[i] = (int32_t)attention_first_key(starts, a, q0 + size_min(i, nq - 1)); }
}

/* Returns a mask of SIMD queries, q and up, that must not see `key`. first: the first key that each of them sees */
LLMC_INLINE vi attention_masked(const int32_t* first, size_t q, size_t key) {
    int32_t lane[SIMD];
    for (size_t i = 0; i < SIMD; i++) { lane[i] = q + i < key || key < (size_t)first[i] ? -1 : 0; }
    vi mask;
    memcpy(&mask, lane, sizeof mask);
    return mask;
}

/* Masks nk rows of scores s (ATT_K, ATT_Q) and turns them into p = e^(s - m). Updates m and l (ATT_Q), the row max and row sum
 * of all tiles so far, and writes `rescale` (ATT_Q), the factor for earlier sums. k0 is the first key, q0 the first query.
 * first: (ATT_Q) the first key that each query sees. */
static inline void attention_softmax_tile(float* s, float* m, float* l, float* rescale, const int32_t* first, size_t q0,
                                          size_t k0, size_t nk) {
    const size_t latest = (size_t)first[ATT_Q - 1];
    for (size_t i = 0; i < ATT_Q; i += SIMD) {
        const vf old = vf_load(m + i);
        vf max = old, total = vf_set(0.0f);
        for (size_t j = 0; j < nk; j++) {
            float* at = s + j * ATT_Q + i;
            if (k0 + j > q0 + i || k0 + j < latest) {  // only on the diagonal, and where a document ends
                vf_store(at, vf_select(attention_masked(first + i, q0 + i, k0 + j), vf_set(-INFINITY), vf_load(at)));
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
        vf_store(rescale + i, factor);
        vf_store(m + i, max);
        vf_store(l + i, vf_load(l + i) * factor + total);
    }
}

/* Computes queries [q0, q0 + ATT_Q), as far as they exist, of one head. */
static inline void attention_forward_tile(float* out, float* lse, AttentionTiles* tiles, const float* qkv,
                                          const int32_t* starts, AttentionHead a, size_t q0) {
    float *q_t = tiles->q_t, *p = tiles->p, *acc = tiles->acc, m[ATT_Q], l[ATT_Q], rescale[ATT_Q];
    int32_t first[ATT_Q];
    const size_t HD = a.HD, nq = size_min(ATT_Q, a.T - q0);
    attention_first_keys(first, starts, a, q0, nq);
    attention_transpose(q_t, qkv + a.q + q0 * a.row, a.row, nq, HD, attention_scale(HD));
    memset(acc, 0, nq * HD * sizeof(float));
    for (size_t i = 0; i < ATT_Q; i++) {
        m[i] = -1e30f;  // below every score, and finite: a query that sees no key of a tile gets e^-infinity, not NaN
        l[i] = 0;
    }
    for (size_t k0 = (size_t)first[0]; k0 < q0 + nq; k0 += ATT_K) {
        const size_t nk = size_min(ATT_K, q0 + nq - k0);
        const float *k = qkv + a.k + k0 * a.row, *v = qkv + a.v + k0 * a.row;
        matmul_small(nk, ATT_Q, HD, by_rows(k, a.row), by_rows(q_t, ATT_Q), sum_in(p, NULL, ATT_Q));
        attention_softmax_tile(p, m, l, rescale, first, q0, k0, nk);
        for (size_t i = 0; i < nq; i++) {
            if (rescale[i] == 1.0f) { continue; }
            for (size_t d = 0; d < HD; d++) { acc[i * HD + d] *= rescale[i]; }
        }
        matmul_small(nq, HD, nk, transposed(by_rows(p, ATT_Q)), by_rows(v, a.row), sum_in(acc, acc, HD));
    }
    for (size_t i = 0; i < nq; i++) {
        const float norm = 1.0f / l[i];
        for (size_t d = 0; d < HD; d++) { out[a.out + (q0 + i) * a.out_row + d] = acc[i * HD + d] * norm; }
        lse[a.lse + q0 + i] = m[i] + logf(l[i]);
    }
}

/* Turns a tile's scores p into masked p = e^(s - lse), and its dP in ds into ds = p * (dP - D) * scale; nk rows are in use.
 * lse, D, first: (ATT_Q) of each query; first is the first key that it sees */
static inline void attention_gradient_tile(AttentionTiles* tiles, const float* lse, const float* D, const int32_t* first,
                                           float scale, size_t q0, size_t k0, size_t nk) {
    const size_t latest = (size_t)first[ATT_Q - 1];
    for (size_t j = 0; j < nk; j++) {
        for (size_t i = 0; i < ATT_Q; i += SIMD) {
            float *p_at = tiles->p + j * ATT_Q + i, *ds_at = tiles->ds + j * ATT_Q + i;
            vf weight = vf_exp(vf_load(p_at) - vf_load(lse + i));
            if (k0 + j > q0 + i || k0 + j < latest) {
                weight = vf_select(attention_masked(first + i, q0 + i, k0 + j), vf_set(0.0f), weight);
            }
            vf_store(p_at, weight);
            vf_store(ds_at, weight * (vf_load(ds_at) - vf_load(D + i)) * scale);
        }
    }
}

/* Computes one query head's backward pass: writes its dq into dqkv, and its share of dk and dv, (2, T, HD). */
static inline void attention_backward_head(float* dqkv, float* share, AttentionTiles* tiles, const float* dout,
                                           AttentionTensors f, AttentionHead a) {
    float *q_t = tiles->q_t, *dout_t = tiles->dout_t, *p = tiles->p, *ds = tiles->ds, tile_lse[ATT_Q], D[ATT_Q];
    float *dk = share, *dv = share + a.T * a.HD;
    int32_t first[ATT_Q];
    const size_t T = a.T, HD = a.HD;
    const float scale = attention_scale(HD);
    memset(share, 0, 2 * T * HD * sizeof(float));
    for (size_t q0 = 0; q0 < T; q0 += ATT_Q) {
        const size_t nq = size_min(ATT_Q, T - q0);
        const float *q = f.qkv + a.q + q0 * a.row, *dO = dout + a.out + q0 * a.out_row, *o = f.out + a.out + q0 * a.out_row;
        float* dq = dqkv + a.q + q0 * a.row;
        attention_transpose(q_t, q, a.row, nq, HD, scale);
        attention_transpose(dout_t, dO, a.out_row, nq, HD, 1.0f);
        for (size_t i = 0; i < ATT_Q; i++) {
            tile_lse[i] = i < nq ? f.lse[a.lse + q0 + i] : 0.0f;
            D[i] = i < nq ? vf_dot(dO + i * a.out_row, o + i * a.out_row, HD) : 0.0f;
        }
        attention_first_keys(first, f.starts, a, q0, nq);
        const size_t begin = (size_t)first[0];
        for (size_t k0 = begin; k0 < q0 + nq; k0 += ATT_K) {
            const size_t nk = size_min(ATT_K, q0 + nq - k0);
            const float *k = f.qkv + a.k + k0 * a.row, *v = f.qkv + a.v + k0 * a.row;
            matmul_small(nk, ATT_Q, HD, by_rows(k, a.row), by_rows(q_t, ATT_Q), sum_in(p, NULL, ATT_Q));
            matmul_small(nk, ATT_Q, HD, by_rows(v, a.row), by_rows(dout_t, ATT_Q), sum_in(ds, NULL, ATT_Q));
            attention_gradient_tile(tiles, tile_lse, D, first, scale, q0, k0, nk);
            const MatmulSum sum_dv = sum_in(dv + k0 * HD, dv + k0 * HD, HD), sum_dk = sum_in(dk + k0 * HD, dk + k0 * HD, HD);
            matmul_small(nk, HD, nq, by_rows(p, ATT_Q), by_rows(dO, a.out_row), sum_dv);
            matmul_small(nk, HD, nq, by_rows(ds, ATT_Q), by_rows(q, a.row), sum_dk);
            matmul_small(nq, HD, nk, transposed(by_rows(ds, ATT_Q)), by_rows(k, a.row),
                         sum_in(dq, k0 > begin ? dq : NULL, a.row));
        }
    }
}

/* Sums the shares of dk and dv (B, NH, 2, T, HD) of each group's query heads, in the order of heads, into dqkv. */
static inline void attention_sum_group(float* dqkv, const float* shares, AttentionShape s) {
    const size_t T = (size_t)s.T, NH = (size_t)s.NH, NKV = (size_t)s.NKV, HD = (size_t)s.HD, group = NH / NKV;
    const size_t row = attention_head(s, 0, 0).row;
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < (size_t)s.B * T; n++) {
        for (size_t i = 0; i < 2 * NKV; i++) {  // dk of each key head, then dv
            const size_t kv = i % NKV, is_dv = i / NKV, first = n / T * NH + kv * group;
            float* sum = dqkv + n * row + (NH + i) * HD;
            for (size_t h = 0; h < group; h++) {
                const float* share = shares + ((first + h) * 2 + is_dv) * T * HD + n % T * HD;
                for (size_t d = 0; d < HD; d++) { sum[d] = h ? sum[d] + share[d] : share[d]; }
            }
        }
    }
}

/* tiles: one for each thread */
static inline void attention_forward_tiled(float* out, float* lse, AttentionTiles* tiles, const float* qkv,
                                           const int32_t* starts, AttentionShape s) {
    const size_t T = (size_t)s.T, NH = (size_t)s.NH, count = ceil_div(T, ATT_Q);
#pragma omp parallel for schedule(dynamic)
    for (size_t i = 0; i < (size_t)s.B * NH * count; i++) {
        const size_t b = i / (NH * count), h = i / count % NH, q0 = (count - 1 - i % count) * ATT_Q;  // longest first
        attention_forward_tile(out, lse, tiles + thread_number(), qkv, starts, attention_head(s, b, h), q0);
    }
}

/* tiles: one for each thread   shares: (B, NH, 2, T, HD) dk and dv of each query head */
static inline void attention_backward_tiled(float* dqkv, AttentionTiles* tiles, float* shares, const float* dout,
                                            AttentionTensors f, AttentionShape s) {
    const size_t NH = (size_t)s.NH, share = 2 * (size_t)s.T * (size_t)s.HD;
#pragma omp parallel for schedule(dynamic)
    for (size_t i = 0; i < (size_t)s.B * NH; i++) {
        const AttentionHead a = attention_head(s, i / NH, i % NH);
        attention_backward_head(dqkv, shares + i * share, tiles + thread_number(), dout, f, a);
    }
    attention_sum_group(dqkv, shares, s);
}

// ---------------------------------------------------------------------------------------------------------------------
// what the program calls

/* Returns the bytes of scratch that attention_forward() needs: each thread's tiles. The number of threads must not grow
 * afterwards. */
static inline size_t attention_forward_scratch(void) { return max_threads() * sizeof(AttentionTiles); }

/* Writes out (B, T, NH HD) and lse (B, NH, T), kept for backward. qkv: (B, T, (NH + 2 NKV) HD), q and k rotated
 * starts: (B, T) or NULL, see above */
static inline void attention_forward(float* out, float* lse, void* scratch, const float* qkv, const int32_t* starts,
                                     AttentionShape s) {
    if (IS_PLAIN) {
        attention_forward_plain(out, lse, qkv, starts, s);
    } else {
        attention_forward_tiled(out, lse, (AttentionTiles*)scratch, qkv, starts, s);
    }
}

/* Returns the bytes of scratch that attention_backward() needs: each thread's tiles, then dk and dv of each query head. */
static inline size_t attention_backward_scratch(AttentionShape s) {
    return attention_forward_scratch() + (size_t)s.B * (size_t)s.NH * (size_t)s.T * 2 * (size_t)s.HD * sizeof(float);
}

/* Overwrites dqkv (B, T, (NH + 2 NKV) HD). dout, out: (B, T, NH HD)   lse: (B, NH, T)   qkv, starts: as in forward */
static inline void attention_backward(float* dqkv, void* scratch, const float* dout, const float* out, const float* lse,
                                      const float* qkv, const int32_t* starts, AttentionShape s) {
    if (IS_PLAIN) {
        attention_backward_plain(dqkv, dout, out, lse, qkv, starts, s);
        return;
    }
    const AttentionTensors f = {qkv, starts, out, lse};
    AttentionTiles* tiles = (AttentionTiles*)scratch;
    attention_backward_tiled(dqkv, tiles, (float*)(tiles + max_threads()), dout, f, s);
}

/* Computes out (NH HD) for one new query q (NH HD) of one sequence. kv_cache: (positions, 2 NKV HD), a row holds the keys, then
 * the values, and the new position's row is included. B and T of the shape are unused. */
static inline void attention_decode(float* out, const float* q, const float* kv_cache, int positions, AttentionShape s) {
    const size_t HD = (size_t)s.HD, row = 2 * (size_t)s.NKV * HD, len = (size_t)positions;
    const float scale = attention_scale(HD);
#pragma omp parallel for schedule(static)
    for (int h = 0; h < s.NH; h++) {
        const float *k = kv_cache + (size_t)(h / (s.NH / s.NKV)) * HD, *v = k + (size_t)s.NKV * HD;
        float *o = out + (size_t)h * HD, p[ATT_K], m = -INFINITY, l = 0;
        memset(o, 0, HD * sizeof(float));
        for (size_t k0 = 0; k0 < len; k0 += ATT_K) {
            const size_t nk = size_min(ATT_K, len - k0);
            float max = m, total = 0;
            for (size_t j = 0; j < nk; j++) {
                p[j] = vf_dot(q + (size_t)h * HD, k + (k0 + j) * row, HD) * scale;
                max = p[j] > max ? p[j] : max;
            }
            const float rescale = expf(m - max);
            for (size_t d = 0; d < HD; d++) { o[d] *= rescale; }
            for (size_t j = 0; j < nk; j++) {
                p[j] = expf(p[j] - max);
                total += p[j];
            }
            for (size_t j = 0; j < nk; j++) {
                const float* value = v + (k0 + j) * row;
                for (size_t d = 0; d < HD; d++) { o[d] += p[j] * value[d]; }
            }
            m = max;
            l = l * rescale + total;
        }
        for (size_t d = 0; d < HD; d++) { o[d] /= l; }
    }
}

#endif
