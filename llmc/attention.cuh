/* attention.cuh -- causal grouped-query attention on the GPU, forward, backward and for one new token, without a (T, T)
 * buffer: FlashAttention-2 (Dao 2023, arXiv 2307.08691). The oracle is attention.h.
 *
 *   s[t][u] = q[t] . k[u] / sqrt(HD)  for u <= t        lse[t] = log sum_u exp(s[t][u])
 *   p = exp(s - lse)     out = p v                      D[t] = dout[t] . out[t]
 *   dv = p^T dout        ds = p (dout v^T - D)          dq = ds k / sqrt(HD)      dk = ds^T q / sqrt(HD)
 *
 * Query head h reads key/value head h / (NH / NKV); K and V are never replicated. All sums are in fp32 and in an order
 * that depends on shapes alone: the backward pass computes the scores twice (dK and dV in one kernel whose block owns a
 * tile of keys and walks over all query heads of its group, dQ in another whose block owns a tile of queries) and so
 * needs no atomics: seven products where five would do, but every run gives the same bits.
 *
 * Two kernels behind each launcher:
 *   plain   any even HD <= 256 and any floatX; tiles in shared memory as fp32, products on the ordinary units
 *   mma     HD 64 and 128 in 16-bit builds: mma.sync tensor-core products, for sm_75 and for sm_80 and newer apart
 * and in 16-bit builds for sm_90a those of attention_sm90.cuh.
 *
 * Layouts: qkv rows are [NH q heads | NKV k heads | NKV v heads] x HD with RoPE applied, out rows NH x HD, a row per
 * token, rows `pitch` elements apart. Pointers and pitches are multiples of 16 bytes. T need not be a multiple of any
 * tile: rows past the end are read as zeros and never written.
 */
#ifndef LLMC_ATTENTION_CUH
#define LLMC_ATTENTION_CUH

#include <math.h>

#include "llmc/gpu/cuda_common.cuh"
#include "llmc/gpu/ptx.cuh"

/* Which kernels a launcher uses; tests and benchmarks name one, the program takes AUTO. */
typedef enum { ATTENTION_AUTO, ATTENTION_PLAIN, ATTENTION_MMA, ATTENTION_WGMMA, NUM_ATTENTION_KERNELS } AttentionKernel;

struct AttentionShape {
    int T, NH, NKV, HD;
    int stat_rows;                // statistics of a head: T, rounded up to a multiple of 128
    size_t qkv_pitch, out_pitch;  // elements between rows
    float scale;                  // 1 / sqrt(HD)
    float scale_log2;             // scale * log2(e): the kernels' exponentials have base 2
};

// Scores outside of the causal triangle. exp2(-inf - m) is 0 for finite m; where a whole row is masked so far, m is
// taken as 0 instead of -inf, so that -inf - -inf never happens.
#define ATTENTION_MASKED (-INFINITY)
#define LOG2_E 1.4426950408889634f

/* First element of a row's head. */
template <typename Element>
__device__ __forceinline__ Element* attention_row(Element* base, size_t row, size_t pitch, int head, int HD) {
    return base + row * pitch + (size_t)head * HD;
}

// ---------------------------------------------------------------------------------------------------------------------
// backward, first step: D, and lse in base 2, side by side, for whoever recomputes scores

/* stats (B, NH, stat_rows) pairs {lse * log2(e), D}; those past T make every p and ds zero. LANES threads a pair, each W
 * neighbouring elements at a time; pairs of neighbouring tokens lie next to each other in a block. */
template <int LANES, int W>
__global__ void attention_stats_kernel(float2* stats, const floatX* dout, const floatX* out, const float* lse, AttentionShape s,
                                       size_t pairs) {
    const size_t pair = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
    if (pair >= pairs) { return; }  // pairs come in multiples of 128: whole blocks
    const int lane = threadIdx.x % LANES, t = (int)(pair % s.stat_rows), h = (int)(pair / s.stat_rows % s.NH);
    const size_t row = pair / s.stat_rows / s.NH * s.T + t;
    float sum = 0;
    if (t < s.T) {
        const floatX* o = attention_row(out, row, s.out_pitch, h, s.HD);
        const floatX* d = attention_row(dout, row, s.out_pitch, h, s.HD);
        for (int i = lane * W; i < s.HD; i += LANES * W) {
            const Vec<floatX, W> x = load_vec<W>(o + i), y = load_vec<W>(d + i);
#pragma unroll
            for (int k = 0; k < W; k++) { sum += to_float(x.v[k]) * to_float(y.v[k]); }
        }
    }
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2) { sum += __shfl_xor_sync(0xffffffffu, sum, mask); }
    if (lane == 0) {
        stats[pair] = t < s.T ? make_float2(lse[pair / s.stat_rows * s.T + t] * LOG2_E, sum) : make_float2(INFINITY, 0);
    }
}

enum { SM75_SHARED = 64 << 10 };  // bytes a block may have there: the limit of kernels that must run on any card

// ---------------------------------------------------------------------------------------------------------------------
// plain kernels: any head dimension, any type

/* Tile sizes by the largest head dimension that fits. A block has 16 x (BM / RM) threads; thread (ty, tx) computes scores of
 * query rows ty + TY i (i < RM) and key rows tx + 16 j (j < BN / 16), and for tiles of head_dim columns the columns
 * 4 tx + 64 c + 0..3. Rows in shared memory are HD + 4 floats apart, so that 16-byte reads of eight adjacent rows do not
 * collide. */
template <int HD_MAX>
struct PlainTiles;
template <>
struct PlainTiles<64> {
    enum { FORWARD_BM = 64, FORWARD_BN = 64, FORWARD_RM = 4, BACKWARD_BM = 32, BACKWARD_BN = 64, BACKWARD_RM = 2 };
};
template <>
struct PlainTiles<128> {
    enum { FORWARD_BM = 64, FORWARD_BN = 32, FORWARD_RM = 4, BACKWARD_BM = 16, BACKWARD_BN = 32, BACKWARD_RM = 1 };
};
template <>
struct PlainTiles<256> {
    enum { FORWARD_BM = 32, FORWARD_BN = 16, FORWARD_RM = 2, BACKWARD_BM = 8, BACKWARD_BN = 16, BACKWARD_RM = 1 };
};

/* Brings `rows` rows of one head as fp32; rows from `valid` on and columns from HD on become zeros. */
template <int HD_MAX>
__device__ void plain_load(float* tile, const floatX* src, size_t pitch, int rows, int valid, int HD) {
    for (int i = threadIdx.x; i < rows * (HD_MAX / 2); i += blockDim.x) {
        const int r = i / (HD_MAX / 2), c = i % (HD_MAX / 2) * 2;
        float2 v = make_float2(0, 0);
        if (r < valid && c < HD) { v = load2(src + (size_t)r * pitch + c); }
        tile[r * (HD_MAX + 4) + c] = v.x;
        tile[r * (HD_MAX + 4) + c + 1] = v.y;
    }
}

/* s[i][j] = row (ty + TY i) of a . row (tx + 16 j) of b */
template <int HD_MAX, int RM, int RN, int TY>
__device__ __forceinline__ void plain_scores(float s[RM][RN], const float* a, const float* b, int ty, int tx, int HD) {
#pragma unroll
    for (int i = 0; i < RM; i++) {
#pragma unroll
        for (int j = 0; j < RN; j++) { s[i][j] = 0; }
    }
#pragma unroll 2
    for (int k = 0; k < HD; k += 4) {
        float4 x[RM], y[RN];
#pragma unroll
        for (int i = 0; i < RM; i++) { x[i] = *(const float4*)(a + (ty + TY * i) * (HD_MAX + 4) + k); }
#pragma unroll
        for (int j = 0; j < RN; j++) { y[j] = *(const float4*)(b + (tx + 16 * j) * (HD_MAX + 4) + k); }
#pragma unroll
        for (int i = 0; i < RM; i++) {
#pragma unroll
            for (int j = 0; j < RN; j++) { s[i][j] += x[i].x * y[j].x + x[i].y * y[j].y + x[i].z * y[j].z + x[i].w * y[j].w; }
        }
    }
}

/* acc[i][c] += weight * tile[row][4 tx + 64 c + 0..3], where weights[i] are those of the thread's R rows */
template <int HD_MAX, int R>
__device__ __forceinline__ void plain_accumulate(float4 acc[R][HD_MAX / 64], const float weights[R], const float* tile, int row,
                                                 int tx) {
#pragma unroll
    for (int c = 0; c < HD_MAX / 64; c++) {
        const float4 v = *(const float4*)(tile + row * (HD_MAX + 4) + 4 * tx + 64 * c);
#pragma unroll
        for (int i = 0; i < R; i++) {
            acc[i][c].x += weights[i] * v.x;
            acc[i][c].y += weights[i] * v.y;
            acc[i][c].z += weights[i] * v.z;
            acc[i][c].w += weights[i] * v.w;
        }
    }
}

/* Columns 4 tx + 64 c + 0..3 of one row, times f. */
template <int HD_MAX>
__device__ __forceinline__ void plain_store(floatX* row, const float4 acc[HD_MAX / 64], float f, int tx, int HD) {
#pragma unroll
    for (int c = 0; c < HD_MAX / 64; c++) {
        const int col = 4 * tx + 64 * c;
        if (col < HD) { store2(row + col, acc[c].x * f, acc[c].y * f); }
        if (col + 2 < HD) { store2(row + col + 2, acc[c].z * f, acc[c].w * f); }
    }
}

template <int HD_MAX>
__global__ void attention_forward_plain_kernel(floatX* out, float* lse, const floatX* qkv, AttentionShape s) {
    typedef PlainTiles<HD_MAX> Tiles;
    constexpr int BM = Tiles::FORWARD_BM, BN = Tiles::FORWARD_BN, RM = Tiles::FORWARD_RM, RN = BN / 16, TY = BM / RM;
    constexpr int PITCH = HD_MAX + 4, COLS = HD_MAX / 64;
    extern __shared__ __align__(128) char smem[];
    float* q_tile = (float*)smem;          // (BM, PITCH)
    float* kv_tile = q_tile + BM * PITCH;  // (BN, PITCH): first K, then V
    float* p_tile = kv_tile + BN * PITCH;  // (BM, BN + 4)
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    const int h = blockIdx.x, kv_head = h / (s.NH / s.NKV);
    const size_t b = blockIdx.z, first_row = b * s.T;
    const int q0 = (gridDim.y - 1 - blockIdx.y) * BM;  // the longest rows start first
    const floatX* k_head = attention_row(qkv, first_row, s.qkv_pitch, s.NH + kv_head, s.HD);
    const floatX* v_head = attention_row(qkv, first_row, s.qkv_pitch, s.NH + s.NKV + kv_head, s.HD);
    plain_load<HD_MAX>(q_tile, attention_row(qkv, first_row + q0, s.qkv_pitch, h, s.HD), s.qkv_pitch, BM, s.T - q0, s.HD);

    float4 acc[RM][COLS];
    float m[RM], l[RM];
#pragma unroll
    for (int i = 0; i < RM; i++) {
        m[i] = ATTENTION_MASKED;
        l[i] = 0;
#pragma unroll
        for (int c = 0; c < COLS; c++) { acc[i][c] = make_float4(0, 0, 0, 0); }
    }
    const int end = min(s.T, q0 + BM);
    for (int k0 = 0; k0 < end; k0 += BN) {
        plain_load<HD_MAX>(kv_tile, k_head + k0 * s.qkv_pitch, s.qkv_pitch, BN, s.T - k0, s.HD);
        __syncthreads();
        float p[RM][RN];
        plain_scores<HD_MAX, RM, RN, TY>(p, q_tile, kv_tile, ty, tx, s.HD);
#pragma unroll
        for (int i = 0; i < RM; i++) {
            const int row = q0 + ty + TY * i;
            float top = m[i];
#pragma unroll
            for (int j = 0; j < RN; j++) {
                p[i][j] = k0 + tx + 16 * j <= row ? p[i][j] * s.scale_log2 : ATTENTION_MASKED;
                top = fmaxf(top, p[i][j]);
            }
            for (int mask = 8; mask > 0; mask /= 2) { top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, mask)); }
            // the first tile holds column 0, which no row masks: top is finite
            const float shrink = exp2f(m[i] - top);
            m[i] = top;
            l[i] *= shrink;
#pragma unroll
            for (int c = 0; c < COLS; c++) {
                acc[i][c].x *= shrink;
                acc[i][c].y *= shrink;
                acc[i][c].z *= shrink;
                acc[i][c].w *= shrink;
            }
#pragma unroll
            for (int j = 0; j < RN; j++) {
                const float e = exp2f(p[i][j] - top);
                l[i] += e;
                p_tile[(ty + TY * i) * (BN + 4) + tx + 16 * j] = e;
            }
        }
        __syncthreads();
        plain_load<HD_MAX>(kv_tile, v_head + k0 * s.qkv_pitch, s.qkv_pitch, BN, s.T - k0, s.HD);
        __syncthreads();
#pragma unroll 4
        for (int j = 0; j < BN; j++) {
            float w[RM];
#pragma unroll
            for (int i = 0; i < RM; i++) { w[i] = p_tile[(ty + TY * i) * (BN + 4) + j]; }
            plain_accumulate<HD_MAX, RM>(acc, w, kv_tile, j, tx);
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < RM; i++) {
        const int row = q0 + ty + TY * i;
        for (int mask = 8; mask > 0; mask /= 2) { l[i] += __shfl_xor_sync(0xffffffffu, l[i], mask); }
        if (row >= s.T) { continue; }
        plain_store<HD_MAX>(attention_row(out, first_row + row, s.out_pitch, h, s.HD), acc[i], 1 / l[i], tx, s.HD);
        if (tx == 0) { lse[(b * s.NH + h) * s.T + row] = (m[i] + log2f(l[i])) / LOG2_E; }
    }
}

/* p and ds of the tile pair (queries from q0, keys from k0) in registers: recomputed scores, masked, against {lse, D}. */
template <int HD_MAX, int RM, int RN, int TY>
__device__ __forceinline__ void plain_gradients(float p[RM][RN], float ds[RM][RN], const float* q_tile, const float* dout_tile,
                                                const float* k_tile, const float* v_tile, const float2* stats, int q0, int k0,
                                                int ty, int tx, const AttentionShape& s) {
    plain_scores<HD_MAX, RM, RN, TY>(p, q_tile, k_tile, ty, tx, s.HD);
    plain_scores<HD_MAX, RM, RN, TY>(ds, dout_tile, v_tile, ty, tx, s.HD);
#pragma unroll
    for (int i = 0; i < RM; i++) {
        const int row = q0 + ty + TY * i;
        const float2 stat = row < s.T ? stats[row] : make_float2(0, 0);
#pragma unroll
        for (int j = 0; j < RN; j++) {
            const bool seen = row < s.T && k0 + tx + 16 * j <= row;
            p[i][j] = seen ? exp2f(p[i][j] * s.scale_log2 - stat.x) : 0;
            ds[i][j] = p[i][j] * (ds[i][j] - stat.y);
        }
    }
}

/* A block owns BN keys of one kv head and walks over the query heads of the group and the queries that see the keys. */
template <int HD_MAX>
__global__ void attention_backward_kv_plain_kernel(floatX* dqkv, const float2* stats, const floatX* dout, const floatX* qkv,
                                                   AttentionShape s) {
    typedef PlainTiles<HD_MAX> Tiles;
    constexpr int BM = Tiles::BACKWARD_BM, BN = Tiles::BACKWARD_BN, RM = Tiles::BACKWARD_RM, RN = BN / 16, TY = BM / RM;
    constexpr int PITCH = HD_MAX + 4, COLS = HD_MAX / 64, ROWS = BN / TY;  // ROWS: keys a thread accumulates
    extern __shared__ __align__(128) char smem[];
    float* k_tile = (float*)smem;
    float* v_tile = k_tile + BN * PITCH;
    float* q_tile = v_tile + BN * PITCH;
    float* dout_tile = q_tile + BM * PITCH;
    float* p_tile = dout_tile + BM * PITCH;  // (BM, BN + 4): first p, then ds
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16, group = s.NH / s.NKV;
    const int kv_head = blockIdx.x, k0 = blockIdx.y * BN;
    const size_t b = blockIdx.z, first_row = b * s.T;
    const size_t k_at = (size_t)(s.NH + kv_head) * s.HD, v_at = k_at + (size_t)s.NKV * s.HD;
    plain_load<HD_MAX>(k_tile, qkv + (first_row + k0) * s.qkv_pitch + k_at, s.qkv_pitch, BN, s.T - k0, s.HD);
    plain_load<HD_MAX>(v_tile, qkv + (first_row + k0) * s.qkv_pitch + v_at, s.qkv_pitch, BN, s.T - k0, s.HD);

    float4 dk[ROWS][COLS], dv[ROWS][COLS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
#pragma unroll
        for (int c = 0; c < COLS; c++) { dk[i][c] = dv[i][c] = make_float4(0, 0, 0, 0); }
    }
    for (int h = kv_head * group; h < (kv_head + 1) * group; h++) {
        const float2* head_stats = stats + (b * s.NH + h) * s.stat_rows;
        for (int q0 = k0 / BM * BM; q0 < s.T; q0 += BM) {
            __syncthreads();
            plain_load<HD_MAX>(q_tile, attention_row(qkv, first_row + q0, s.qkv_pitch, h, s.HD), s.qkv_pitch, BM, s.T - q0,
                               s.HD);
            plain_load<HD_MAX>(dout_tile, attention_row(dout, first_row + q0, s.out_pitch, h, s.HD), s.out_pitch, BM, s.T - q0,
                               s.HD);
            __syncthreads();
            float p[RM][RN], ds[RM][RN];
            plain_gradients<HD_MAX, RM, RN, TY>(p, ds, q_tile, dout_tile, k_tile, v_tile, head_stats, q0, k0, ty, tx, s);
            for (int pass = 0; pass < 2; pass++) {
                if (pass == 1) { __syncthreads(); }
#pragma unroll
                for (int i = 0; i < RM; i++) {
#pragma unroll
                    for (int j = 0; j < RN; j++) {
                        p_tile[(ty + TY * i) * (BN + 4) + tx + 16 * j] = pass == 0 ? p[i][j] : ds[i][j];
                    }
                }
                __syncthreads();
#pragma unroll 4
                for (int q = 0; q < BM; q++) {
                    float w[ROWS];
#pragma unroll
                    for (int i = 0; i < ROWS; i++) { w[i] = p_tile[q * (BN + 4) + ty + TY * i]; }
                    if (pass == 0) {
                        plain_accumulate<HD_MAX, ROWS>(dv, w, dout_tile, q, tx);
                    } else {
                        plain_accumulate<HD_MAX, ROWS>(dk, w, q_tile, q, tx);
                    }
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int row = k0 + ty + TY * i;
        if (row >= s.T) { continue; }
        plain_store<HD_MAX>(dqkv + (first_row + row) * s.qkv_pitch + k_at, dk[i], s.scale, tx, s.HD);
        plain_store<HD_MAX>(dqkv + (first_row + row) * s.qkv_pitch + v_at, dv[i], 1, tx, s.HD);
    }
}

/* A block owns BM queries of one head and walks over the keys they see. */
template <int HD_MAX>
__global__ void attention_backward_q_plain_kernel(floatX* dqkv, const float2* stats, const floatX* dout, const floatX* qkv,
                                                  AttentionShape s) {
    typedef PlainTiles<HD_MAX> Tiles;
    constexpr int BM = Tiles::BACKWARD_BM, BN = Tiles::BACKWARD_BN, RM = Tiles::BACKWARD_RM, RN = BN / 16, TY = BM / RM;
    constexpr int PITCH = HD_MAX + 4, COLS = HD_MAX / 64;
    extern __shared__ __align__(128) char smem[];
    float* k_tile = (float*)smem;
    float* v_tile = k_tile + BN * PITCH;
    float* q_tile = v_tile + BN * PITCH;
    float* dout_tile = q_tile + BM * PITCH;
    float* ds_tile = dout_tile + BM * PITCH;  // (BM, BN + 4)
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    const int h = blockIdx.x, kv_head = h / (s.NH / s.NKV);
    const size_t b = blockIdx.z, first_row = b * s.T;
    const int q0 = (gridDim.y - 1 - blockIdx.y) * BM;
    const float2* head_stats = stats + (b * s.NH + h) * s.stat_rows;
    plain_load<HD_MAX>(q_tile, attention_row(qkv, first_row + q0, s.qkv_pitch, h, s.HD), s.qkv_pitch, BM, s.T - q0, s.HD);
    plain_load<HD_MAX>(dout_tile, attention_row(dout, first_row + q0, s.out_pitch, h, s.HD), s.out_pitch, BM, s.T - q0, s.HD);

    float4 dq[RM][COLS];
#pragma unroll
    for (int i = 0; i < RM; i++) {
#pragma unroll
        for (int c = 0; c < COLS; c++) { dq[i][c] = make_float4(0, 0, 0, 0); }
    }
    const int end = min(s.T, q0 + BM);
    for (int k0 = 0; k0 < end; k0 += BN) {
        const size_t row = first_row + k0;
        __syncthreads();
        plain_load<HD_MAX>(k_tile, attention_row(qkv, row, s.qkv_pitch, s.NH + kv_head, s.HD), s.qkv_pitch, BN, s.T - k0, s.HD);
        plain_load<HD_MAX>(v_tile, attention_row(qkv, row, s.qkv_pitch, s.NH + s.NKV + kv_head, s.HD), s.qkv_pitch, BN,
                           s.T - k0, s.HD);
        __syncthreads();
        float p[RM][RN], ds[RM][RN];
        plain_gradients<HD_MAX, RM, RN, TY>(p, ds, q_tile, dout_tile, k_tile, v_tile, head_stats, q0, k0, ty, tx, s);
#pragma unroll
        for (int i = 0; i < RM; i++) {
#pragma unroll
            for (int j = 0; j < RN; j++) { ds_tile[(ty + TY * i) * (BN + 4) + tx + 16 * j] = ds[i][j]; }
        }
        __syncthreads();
#pragma unroll 4
        for (int j = 0; j < BN; j++) {
            float w[RM];
#pragma unroll
            for (int i = 0; i < RM; i++) { w[i] = ds_tile[(ty + TY * i) * (BN + 4) + j]; }
            plain_accumulate<HD_MAX, RM>(dq, w, k_tile, j, tx);
        }
    }
#pragma unroll
    for (int i = 0; i < RM; i++) {
        const int row = q0 + ty + TY * i;
        if (row >= s.T) { continue; }
        plain_store<HD_MAX>(attention_row(dqkv, first_row + row, s.qkv_pitch, h, s.HD), dq[i], s.scale, tx, s.HD);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// mma kernels: head dimension 64 and 128, 16 bits

#ifndef PRECISION_FP32

/* A tile of ROWS x HD elements in shared memory lies in 16-byte chunks: chunk c of row r is stored at place c ^ (r % 8) of its
 * row, so that the eight rows of an 8x8 matrix, the same chunk in each, fall on different banks for any chunk.
 *
 * TileCopy brings such a tile from global memory in two steps, between which the caller computes: on sm_80 and newer start()
 * issues asynchronous copies and the caller commits and waits; on sm_75 start() loads into registers and finish() stores them. */
template <int ROWS, int HD, int THREADS, bool ASYNC>
struct TileCopy {
    static constexpr int CHUNKS = HD / 8, STEP = THREADS / CHUNKS, PIECES = ROWS / STEP;
    static_assert(ROWS % STEP == 0 && STEP % 8 == 0, "a thread moves the same chunk, in the same place, of PIECES rows");
    uint4 held[ASYNC ? 1 : PIECES];

    /* src: the head's part of the tile's first row. Rows from `valid` on become zeros. */
    __device__ __forceinline__ void start(uint32_t tile, const floatX* src, size_t pitch, int valid) {
        uint32_t thread = threadIdx.x;
        compute_here(thread);
        const int r = thread / CHUNKS, c = thread % CHUNKS;
        const floatX* p = src + r * pitch + c * 8;
        valid -= r;
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            const bool inside = i * STEP < valid;
            if constexpr (ASYNC) {
                copy_async<16>(tile + r * HD * 2 + ((c ^ (r & 7)) << 4) + i * STEP * HD * 2, p + i * STEP * pitch, inside);
            } else {
                held[i] = inside ? *(const uint4*)(p + i * STEP * pitch) : make_uint4(0, 0, 0, 0);
            }
        }
    }

    __device__ __forceinline__ void finish(char* tile) {
        if constexpr (!ASYNC) {
            uint32_t thread = threadIdx.x;
            compute_here(thread);
            const int r = thread / CHUNKS, c = thread % CHUNKS;
#pragma unroll
            for (int i = 0; i < PIECES; i++) {
                *(uint4*)(tile + r * HD * 2 + ((c ^ (r & 7)) << 4) + i * STEP * HD * 2) = held[i];
            }
        }
    }
};

/* acc[m][n] += a(rows a_row + 16 m ..) . b(rows b_row + 8 n ..)^T over HD: scores of MT 16-row by NT 8-row pieces. Accumulators
 * have the layout of an mma's result: with g = lane / 4, t = lane % 4 elements 0, 1 are row g, columns 2t, 2t + 1, elements 2, 3
 * the same of row g + 8. */
template <int HD, int MT, int NT>
__device__ __forceinline__ void mma_scores(float acc[MT][NT][4], uint32_t a_tile, int a_row, uint32_t b_tile, int b_row) {
    uint32_t lane = threadIdx.x % 32;
    compute_here(lane);
    const uint32_t a_base = a_tile + (a_row + (lane & 15)) * (HD * 2);
    const uint32_t b_base = b_tile + (b_row + (lane & 7) + ((lane >> 4) << 3)) * (HD * 2);
    const uint32_t a_chunk = ((lane >> 4) ^ (lane & 7)) << 4, b_chunk = (((lane >> 3) & 1) ^ (lane & 7)) << 4;
#pragma unroll 4
    for (int k = 0; k < HD / 16; k++) {
        uint32_t a[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++) { load_matrix_x4(a[m], a_base + (a_chunk ^ (k * 32)) + m * 16 * HD * 2); }
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            uint32_t b[4];
            load_matrix_x4(b, b_base + (b_chunk ^ (k * 32)) + n * 8 * HD * 2);
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mma_16x8x16(acc[m][n], a[m], b[0], b[1]);
                mma_16x8x16(acc[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

/* acc[m][n] += a[m] b(rows b_row .. b_row + 16 KT, columns 8 n ..), a in registers, HD / 8 column pieces. */
template <int HD, int MT, int KT>
__device__ __forceinline__ void mma_values(float acc[MT][HD / 8][4], const uint32_t a[MT][KT][4], uint32_t b_tile, int b_row) {
    uint32_t lane = threadIdx.x % 32;
    compute_here(lane);
    const uint32_t base = b_tile + (b_row + (lane & 15)) * (HD * 2);
    const uint32_t chunk = ((lane >> 4) ^ (lane & 7)) << 4;
#pragma unroll
    for (int k = 0; k < KT; k++) {
#pragma unroll
        for (int n = 0; n < HD / 8; n += 2) {
            uint32_t b[4];
            load_matrix_x4_trans(b, base + (chunk ^ (n * 16)) + k * 16 * HD * 2);
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mma_16x8x16(acc[m][n], a[m][k], b[0], b[1]);
                mma_16x8x16(acc[m][n + 1], a[m][k], b[2], b[3]);
            }
        }
    }
}

/* Two neighbouring 16x8 results are, rounded to 16 bits, the left operand of the next product over their 16 columns. */
template <int MT, int KT>
__device__ __forceinline__ void mma_operand(uint32_t a[MT][KT][4], const float acc[MT][2 * KT][4]) {
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int k = 0; k < KT; k++) {
            a[m][k][0] = pack2(acc[m][2 * k][0], acc[m][2 * k][1]);
            a[m][k][1] = pack2(acc[m][2 * k][2], acc[m][2 * k][3]);
            a[m][k][2] = pack2(acc[m][2 * k + 1][0], acc[m][2 * k + 1][1]);
            a[m][k][3] = pack2(acc[m][2 * k + 1][2], acc[m][2 * k + 1][3]);
        }
    }
}

template <int MT, int NT>
__device__ __forceinline__ void mma_clear(float acc[MT][NT][4]) {
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int n = 0; n < NT; n++) { acc[m][n][0] = acc[m][n][1] = acc[m][n][2] = acc[m][n][3] = 0; }
    }
}

/* Writes a warp's 16 MT rows, row r times f[m][r / 8], to global memory, by way of `rows`: the warp's own rows of a tile in
 * shared memory that no other warp reads any more. */
template <int HD, int MT>
__device__ __forceinline__ void mma_store(floatX* dst, size_t pitch, int valid, char* rows, const float acc[MT][HD / 8][4],
                                          const float f[MT][2]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int n = 0; n < HD / 8; n++) {
            char* at = rows + (m * 16 + g) * HD * 2 + ((n ^ g) << 4) + t * 4;
            *(uint32_t*)at = pack2(acc[m][n][0] * f[m][0], acc[m][n][1] * f[m][0]);
            *(uint32_t*)(at + 8 * HD * 2) = pack2(acc[m][n][2] * f[m][1], acc[m][n][3] * f[m][1]);
        }
    }
    __syncwarp();
#pragma unroll
    for (int i = lane; i < MT * 16 * (HD / 8); i += 32) {
        const int r = i / (HD / 8), c = i % (HD / 8);
        if (r < valid) {
            *(uint4*)(dst + (size_t)r * pitch + c * 8) = *(const uint4*)(rows + r * HD * 2 + ((c ^ (r & 7)) << 4));
        }
    }
}

/* A kernel's body exists in code for sm_80 and newer or in code for sm_75, as its ASYNC says. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define MMA_BODY_IS_ASYNC false
#else
#define MMA_BODY_IS_ASYNC true
#endif

/* WARPS warps of 16 MT queries each, keys in tiles of BN. One buffer each for K and V: V arrives under q k^T, the next K under
 * softmax and p v. Walks from the diagonal to the left, so that masked tiles come first. */
template <int HD_, int BN_, int MT_, int WARPS_, int BLOCKS_, bool ASYNC_>
struct ForwardTiles {
    static constexpr int HD = HD_, BN = BN_, MT = MT_, WARPS = WARPS_, BLOCKS = BLOCKS_;
    static constexpr bool ASYNC = ASYNC_;
    static constexpr int THREADS = WARPS * 32, BM = WARPS * MT * 16, SMEM = (BM + 2 * BN) * HD * 2;
    static_assert(ASYNC || SMEM <= SM75_SHARED, "does not run on sm_75");
};

template <typename Tiles>
__global__ void __launch_bounds__(Tiles::THREADS, Tiles::BLOCKS)
    attention_forward_mma_kernel(floatX* out, float* lse, const floatX* qkv, AttentionShape s) {
    if constexpr (Tiles::ASYNC != MMA_BODY_IS_ASYNC) {
        __trap();
    } else {
        constexpr int HD = Tiles::HD, BM = Tiles::BM, BN = Tiles::BN, MT = Tiles::MT, NT = BN / 8;
        extern __shared__ __align__(128) char smem[];
        char *q_tile = smem, *k_tile = q_tile + BM * HD * 2, *v_tile = k_tile + BN * HD * 2;
        const uint32_t q_smem = shared_address(q_tile), k_smem = shared_address(k_tile), v_smem = shared_address(v_tile);
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const int h = blockIdx.x, kv_head = h / (s.NH / s.NKV);
        const size_t b = blockIdx.z, first_row = b * s.T;
        const int q0 = (gridDim.y - 1 - blockIdx.y) * BM;  // the longest rows start first
        const int warp_q0 = q0 + warp * MT * 16;
        int k0 = (min(s.T, q0 + BM) - 1) / BN * BN;
        const floatX* k_rows = attention_row(qkv, first_row + k0, s.qkv_pitch, s.NH + kv_head, HD);
        const size_t v_offset = (size_t)s.NKV * HD;

        TileCopy<BN, HD, Tiles::THREADS, Tiles::ASYNC> copy;
        {
            TileCopy<BM, HD, Tiles::THREADS, Tiles::ASYNC> copy_q;
            copy_q.start(q_smem, attention_row(qkv, first_row + q0, s.qkv_pitch, h, HD), s.qkv_pitch, s.T - q0);
            copy_q.finish(q_tile);
        }
        copy.start(k_smem, k_rows, s.qkv_pitch, s.T - k0);
        copy_async_commit();

        float acc[MT][HD / 8][4], top[MT][2], sum[MT][2];
        mma_clear<MT, HD / 8>(acc);
#pragma unroll
        for (int m = 0; m < MT; m++) {
            top[m][0] = top[m][1] = ATTENTION_MASKED;
            sum[m][0] = sum[m][1] = 0;
        }
        for (; k0 >= 0; k0 -= BN) {
            copy.finish(k_tile);
            copy_async_wait<0>();
            __syncthreads();  // K is there, and V's last readers are done
            copy.start(v_smem, k_rows + v_offset, s.qkv_pitch, s.T - k0);
            k_rows -= BN * s.qkv_pitch;
            copy_async_commit();
            float p[MT][NT][4];
            mma_clear<MT, NT>(p);
            mma_scores<HD, MT, NT>(p, q_smem, warp * MT * 16, k_smem, 0);
            copy.finish(v_tile);
            copy_async_wait<0>();
            __syncthreads();  // V is there, and K's readers are done
            if (k0 > 0) {
                copy.start(k_smem, k_rows, s.qkv_pitch, BN);
                copy_async_commit();
            }
            if (k0 + BN - 1 > warp_q0) {
                // the last column that row g of the warp sees, counted from column 2 t of this tile
                const int last = warp_q0 + g - k0 - t * 2;
#pragma unroll
                for (int m = 0; m < MT; m++) {
#pragma unroll
                    for (int n = 0; n < NT; n++) {
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            if (n * 8 + e % 2 - m * 16 - e / 2 * 8 > last) { p[m][n][e] = ATTENTION_MASKED; }
                        }
                    }
                }
            }
#pragma unroll
            for (int m = 0; m < MT; m++) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float now = top[m][r];
#pragma unroll
                    for (int n = 0; n < NT; n++) { now = fmaxf(now, fmaxf(p[m][n][2 * r], p[m][n][2 * r + 1])); }
                    now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 1));
                    now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 2));
                    const float shift = now == ATTENTION_MASKED ? 0 : now * s.scale_log2;
                    const float shrink = exp2_fast(top[m][r] * s.scale_log2 - shift);
                    top[m][r] = now;
                    sum[m][r] *= shrink;
#pragma unroll
                    for (int n = 0; n < HD / 8; n++) {
                        acc[m][n][2 * r] *= shrink;
                        acc[m][n][2 * r + 1] *= shrink;
                    }
#pragma unroll
                    for (int n = 0; n < NT; n++) {
                        p[m][n][2 * r] = exp2_fast(p[m][n][2 * r] * s.scale_log2 - shift);
                        p[m][n][2 * r + 1] = exp2_fast(p[m][n][2 * r + 1] * s.scale_log2 - shift);
                        sum[m][r] += p[m][n][2 * r] + p[m][n][2 * r + 1];
                    }
                }
            }
            uint32_t a[MT][NT / 2][4];
            mma_operand<MT, NT / 2>(a, p);
            mma_values<HD, MT, NT / 2>(acc, a, v_smem, 0);
        }
        float f[MT][2];
        float* lse_rows = lse + (b * s.NH + h) * s.T;
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                sum[m][r] += __shfl_xor_sync(0xffffffffu, sum[m][r], 1);
                sum[m][r] += __shfl_xor_sync(0xffffffffu, sum[m][r], 2);
                f[m][r] = 1 / sum[m][r];
                const int row = warp_q0 + m * 16 + g + r * 8;
                if (t == 0 && row < s.T) { lse_rows[row] = top[m][r] * s.scale + logf(sum[m][r]); }
            }
        }
        mma_store<HD, MT>(attention_row(out, first_row + warp_q0, s.out_pitch, h, HD), s.out_pitch, s.T - warp_q0,
                          q_tile + warp * MT * 16 * HD * 2, acc, f);
    }
}

/* dK, dV: WARPS warps of 16 MT keys each; queries in tiles of BM, of which a warp takes NC at a time. The scores are computed
 * transposed (keys are rows), so that p^T and ds^T already lie in registers as left operands of dv += p^T dout and
 * dk += ds^T q and never pass through shared memory. On sm_80 and newer the next q and dout tiles arrive in a second buffer. */
template <int HD_, int BM_, int NC_, int MT_, int WARPS_, int BLOCKS_, bool ASYNC_>
struct BackwardKVTiles {
    static constexpr int HD = HD_, BM = BM_, NC = NC_, MT = MT_, WARPS = WARPS_, BLOCKS = BLOCKS_;
    static constexpr bool ASYNC = ASYNC_;
    static constexpr int THREADS = WARPS * 32, BN = WARPS * MT * 16, STAGES = ASYNC ? 2 : 1;
    static constexpr int STAGE = 2 * BM * HD * 2 + BM * 8, SMEM = 2 * BN * HD * 2 + STAGES * STAGE;
    static_assert(ASYNC || SMEM <= SM75_SHARED, "does not run on sm_75");
    static_assert(BM <= THREADS, "a thread brings at most one pair of statistics");
};

template <typename Tiles>
__global__ void __launch_bounds__(Tiles::THREADS, Tiles::BLOCKS)
    attention_backward_kv_mma_kernel(floatX* dqkv, const float2* stats, const floatX* dout, const floatX* qkv,
                                     AttentionShape s) {
    if constexpr (Tiles::ASYNC != MMA_BODY_IS_ASYNC) {
        __trap();
    } else {
        constexpr int HD = Tiles::HD, BM = Tiles::BM, BN = Tiles::BN, MT = Tiles::MT, NC = Tiles::NC, NT = NC / 8;
        extern __shared__ __align__(128) char smem[];
        char *k_tile = smem, *v_tile = k_tile + BN * HD * 2, *stages = v_tile + BN * HD * 2;
        const uint32_t k_smem = shared_address(k_tile), v_smem = shared_address(v_tile);
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, group = s.NH / s.NKV;
        const int kv_head = blockIdx.x, k0 = blockIdx.y * BN;  // the first keys, seen by all queries, start first
        const size_t b = blockIdx.z, first_row = b * s.T;
        const int warp_k0 = k0 + warp * MT * 16;

        TileCopy<BM, HD, Tiles::THREADS, Tiles::ASYNC> copy_q, copy_dout;
        float2 held_stats = make_float2(0, 0);
        const int first_q = k0 / BM * BM;
        // q, dout and statistics of head h from query q0 on; past the end all are zeros, which contribute nothing
        auto start_stage = [&](int stage, int h, int q0) {
            const uint32_t q_smem = shared_address(stages) + stage * Tiles::STAGE;
            copy_q.start(q_smem, attention_row(qkv, first_row + q0, s.qkv_pitch, h, HD), s.qkv_pitch, s.T - q0);
            copy_dout.start(q_smem + BM * HD * 2, attention_row(dout, first_row + q0, s.out_pitch, h, HD), s.out_pitch,
                            s.T - q0);
            if (threadIdx.x < BM) {
                const bool inside = q0 + (int)threadIdx.x < s.T;
                const float2* src = stats + (b * s.NH + h) * s.stat_rows + (inside ? q0 + threadIdx.x : 0);
                if constexpr (Tiles::ASYNC) {
                    copy_async<8>(q_smem + 2 * BM * HD * 2 + threadIdx.x * 8, src, inside);
                } else {
                    held_stats = inside ? *src : make_float2(0, 0);
                }
            }
            copy_async_commit();
        };
        auto finish_stage = [&]() {
            if constexpr (!Tiles::ASYNC) {
                copy_q.finish(stages);
                copy_dout.finish(stages + BM * HD * 2);
                if (threadIdx.x < BM) { ((float2*)(stages + 2 * BM * HD * 2))[threadIdx.x] = held_stats; }
            }
            copy_async_wait<0>();
        };
        {
            TileCopy<BN, HD, Tiles::THREADS, Tiles::ASYNC> copy;
            const floatX* k_head = attention_row(qkv, first_row + k0, s.qkv_pitch, s.NH + kv_head, HD);
            copy.start(k_smem, k_head, s.qkv_pitch, s.T - k0);
            copy.finish(k_tile);
            copy.start(v_smem, k_head + (size_t)s.NKV * HD, s.qkv_pitch, s.T - k0);
            copy.finish(v_tile);
        }
        start_stage(0, kv_head * group, first_q);

        float dk[MT][HD / 8][4], dv[MT][HD / 8][4];
        mma_clear<MT, HD / 8>(dk);
        mma_clear<MT, HD / 8>(dv);
        int h = kv_head * group, q0 = first_q, stage = 0;
        while (true) {
            if constexpr (!Tiles::ASYNC) { __syncthreads(); }  // readers of the only buffer are done
            finish_stage();
            __syncthreads();  // the tiles are there, and readers of the other buffer are done
            int next_q0 = q0 + BM, next_h = h;
            if (next_q0 >= s.T) {
                next_q0 = first_q;
                next_h++;
            }
            const bool more = next_h < (kv_head + 1) * group;
            if (more) { start_stage(Tiles::STAGES - 1 - stage, next_h, next_q0); }
            const char* tiles = stages + stage * Tiles::STAGE;
            const uint32_t q_smem = shared_address(tiles), dout_smem = q_smem + BM * HD * 2;
            const float4* tile_stats = (const float4*)(tiles + 2 * BM * HD * 2);  // of two queries each
#pragma unroll 1
            for (int c = 0; c < BM; c += NC) {
                if (q0 + c + NC - 1 < warp_k0) { continue; }  // no query of these sees a key of this warp
                float p[MT][NT][4], ds[MT][NT][4];
                uint32_t a[MT][NT / 2][4];
                mma_clear<MT, NT>(p);
                mma_scores<HD, MT, NT>(p, k_smem, warp * MT * 16, q_smem, c);
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const float4 stat = tile_stats[(c + n * 8) / 2 + t];
#pragma unroll
                    for (int m = 0; m < MT; m++) {
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            p[m][n][e] = exp2_fast(p[m][n][e] * s.scale_log2 - (e % 2 ? stat.z : stat.x));
                        }
                    }
                }
                if (q0 + c < warp_k0 + MT * 16 - 1) {
#pragma unroll
                    for (int m = 0; m < MT; m++) {
#pragma unroll
                        for (int n = 0; n < NT; n++) {
#pragma unroll
                            for (int e = 0; e < 4; e++) {
                                const int key = warp_k0 + m * 16 + g + e / 2 * 8, query = q0 + c + n * 8 + t * 2 + e % 2;
                                if (key > query) { p[m][n][e] = 0; }
                            }
                        }
                    }
                }
                mma_operand<MT, NT / 2>(a, p);
                mma_values<HD, MT, NT / 2>(dv, a, dout_smem, c);
                mma_clear<MT, NT>(ds);
                mma_scores<HD, MT, NT>(ds, v_smem, warp * MT * 16, dout_smem, c);
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const float4 stat = tile_stats[(c + n * 8) / 2 + t];
#pragma unroll
                    for (int m = 0; m < MT; m++) {
#pragma unroll
                        for (int e = 0; e < 4; e++) { ds[m][n][e] = p[m][n][e] * (ds[m][n][e] - (e % 2 ? stat.w : stat.y)); }
                    }
                }
                mma_operand<MT, NT / 2>(a, ds);
                mma_values<HD, MT, NT / 2>(dk, a, q_smem, c);
            }
            if (!more) { break; }
            q0 = next_q0;
            h = next_h;
            stage = Tiles::STAGES - 1 - stage;
        }
        float f[MT][2];
#pragma unroll
        for (int m = 0; m < MT; m++) { f[m][0] = f[m][1] = s.scale; }
        floatX* dk_rows = attention_row(dqkv, first_row + warp_k0, s.qkv_pitch, s.NH + kv_head, HD);
        mma_store<HD, MT>(dk_rows, s.qkv_pitch, s.T - warp_k0, k_tile + warp * MT * 16 * HD * 2, dk, f);
#pragma unroll
        for (int m = 0; m < MT; m++) { f[m][0] = f[m][1] = 1; }
        mma_store<HD, MT>(dk_rows + (size_t)s.NKV * HD, s.qkv_pitch, s.T - warp_k0, v_tile + warp * MT * 16 * HD * 2, dv, f);
    }
}

/* dQ: WARPS warps of 16 MT queries each, keys in tiles of BN, of which a warp takes NC at a time. */
template <int HD_, int BN_, int NC_, int MT_, int WARPS_, int BLOCKS_, bool ASYNC_>
struct BackwardQTiles {
    static constexpr int HD = HD_, BN = BN_, NC = NC_, MT = MT_, WARPS = WARPS_, BLOCKS = BLOCKS_;
    static constexpr bool ASYNC = ASYNC_;
    static constexpr int THREADS = WARPS * 32, BM = WARPS * MT * 16, STAGES = ASYNC ? 2 : 1;
    static constexpr int STAGE = 2 * BN * HD * 2, SMEM = 2 * BM * HD * 2 + STAGES * STAGE;
    static_assert(ASYNC || SMEM <= SM75_SHARED, "does not run on sm_75");
};

template <typename Tiles>
__global__ void __launch_bounds__(Tiles::THREADS, Tiles::BLOCKS)
    attention_backward_q_mma_kernel(floatX* dqkv, const float2* stats, const floatX* dout, const floatX* qkv,
                                    AttentionShape s) {
    if constexpr (Tiles::ASYNC != MMA_BODY_IS_ASYNC) {
        __trap();
    } else {
        constexpr int HD = Tiles::HD, BM = Tiles::BM, BN = Tiles::BN, MT = Tiles::MT, NC = Tiles::NC, NT = NC / 8;
        extern __shared__ __align__(128) char smem[];
        char *q_tile = smem, *dout_tile = q_tile + BM * HD * 2, *stages = dout_tile + BM * HD * 2;
        const uint32_t q_smem = shared_address(q_tile), dout_smem = shared_address(dout_tile);
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const int h = blockIdx.x, kv_head = h / (s.NH / s.NKV);
        const size_t b = blockIdx.z, first_row = b * s.T;
        const int q0 = (gridDim.y - 1 - blockIdx.y) * BM;  // the longest rows start first
        const int warp_q0 = q0 + warp * MT * 16;
        const floatX* k_head = attention_row(qkv, first_row, s.qkv_pitch, s.NH + kv_head, HD);
        const size_t v_offset = (size_t)s.NKV * HD;

        TileCopy<BN, HD, Tiles::THREADS, Tiles::ASYNC> copy_k, copy_v;
        auto start_stage = [&](int stage, int k0) {
            const uint32_t k_smem = shared_address(stages) + stage * Tiles::STAGE;
            const floatX* src = k_head + k0 * s.qkv_pitch;
            copy_k.start(k_smem, src, s.qkv_pitch, s.T - k0);
            copy_v.start(k_smem + BN * HD * 2, src + v_offset, s.qkv_pitch, s.T - k0);
            copy_async_commit();
        };
        {
            TileCopy<BM, HD, Tiles::THREADS, Tiles::ASYNC> copy;
            copy.start(q_smem, attention_row(qkv, first_row + q0, s.qkv_pitch, h, HD), s.qkv_pitch, s.T - q0);
            copy.finish(q_tile);
            copy.start(dout_smem, attention_row(dout, first_row + q0, s.out_pitch, h, HD), s.out_pitch, s.T - q0);
            copy.finish(dout_tile);
        }
        int k0 = (min(s.T, q0 + BM) - 1) / BN * BN, stage = 0;
        start_stage(0, k0);

        float dq[MT][HD / 8][4];
        float2 stat[MT][2];
        mma_clear<MT, HD / 8>(dq);
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int row = warp_q0 + m * 16 + g + r * 8;
                stat[m][r] = row < s.T ? stats[(b * s.NH + h) * s.stat_rows + row] : make_float2(0, 0);
            }
        }
        for (; k0 >= 0; k0 -= BN) {
            if constexpr (!Tiles::ASYNC) {
                __syncthreads();  // readers of the only buffer are done
                copy_k.finish(stages);
                copy_v.finish(stages + BN * HD * 2);
            }
            copy_async_wait<0>();
            __syncthreads();  // the tiles are there, and readers of the other buffer are done
            if (k0 > 0) { start_stage(Tiles::STAGES - 1 - stage, k0 - BN); }
            const uint32_t k_smem = shared_address(stages) + stage * Tiles::STAGE, v_smem = k_smem + BN * HD * 2;
#pragma unroll 1
            for (int c = 0; c < BN; c += NC) {
                if (k0 + c > warp_q0 + MT * 16 - 1) { continue; }  // no query of this warp sees these keys
                float p[MT][NT][4], ds[MT][NT][4];
                mma_clear<MT, NT>(p);
                mma_scores<HD, MT, NT>(p, q_smem, warp * MT * 16, k_smem, c);
                mma_clear<MT, NT>(ds);
                mma_scores<HD, MT, NT>(ds, dout_smem, warp * MT * 16, v_smem, c);
#pragma unroll
                for (int m = 0; m < MT; m++) {
#pragma unroll
                    for (int n = 0; n < NT; n++) {
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            const float e2 = exp2_fast(p[m][n][e] * s.scale_log2 - stat[m][e / 2].x);
                            ds[m][n][e] = e2 * (ds[m][n][e] - stat[m][e / 2].y);
                        }
                    }
                }
                if (k0 + c + NC - 1 > warp_q0) {
#pragma unroll
                    for (int m = 0; m < MT; m++) {
#pragma unroll
                        for (int n = 0; n < NT; n++) {
#pragma unroll
                            for (int e = 0; e < 4; e++) {
                                const int row = warp_q0 + m * 16 + g + e / 2 * 8, col = k0 + c + n * 8 + t * 2 + e % 2;
                                if (col > row) { ds[m][n][e] = 0; }
                            }
                        }
                    }
                }
                uint32_t a[MT][NT / 2][4];
                mma_operand<MT, NT / 2>(a, ds);
                mma_values<HD, MT, NT / 2>(dq, a, k_smem, c);
            }
            stage = Tiles::STAGES - 1 - stage;
        }
        float f[MT][2];
#pragma unroll
        for (int m = 0; m < MT; m++) { f[m][0] = f[m][1] = s.scale; }
        mma_store<HD, MT>(attention_row(dqkv, first_row + warp_q0, s.qkv_pitch, h, HD), s.qkv_pitch, s.T - warp_q0,
                          q_tile + warp * MT * 16 * HD * 2, dq, f);
    }
}

#endif  // PRECISION_FP32

// ---------------------------------------------------------------------------------------------------------------------
// one new token against a cache

/* A block a query head; a warp takes every WARPS-th group of four positions, so that four sums over lanes overlap. Lane i holds
 * columns 2 i + 64 c, 2 i + 64 c + 1. The warps' partial softmaxes are joined in order of warps. */
enum { DECODE_WARPS = 16, DECODE_GROUP = 4 };

__global__ void __launch_bounds__(DECODE_WARPS * 32)
    attention_decode_kernel(floatX* out, const floatX* q, const floatX* kv_cache, int positions, AttentionShape s) {
    constexpr int PAIRS = 256 / 64;
    __shared__ float tops[DECODE_WARPS], sums[DECODE_WARPS], parts[DECODE_WARPS][256];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, h = blockIdx.x, kv_head = h / (s.NH / s.NKV);
    const size_t pitch = s.qkv_pitch;
    const floatX *k = kv_cache + (size_t)kv_head * s.HD, *v = k + (size_t)s.NKV * s.HD;
    float2 query[PAIRS], acc[PAIRS];
#pragma unroll
    for (int c = 0; c < PAIRS; c++) {
        const int d = 2 * lane + 64 * c;
        query[c] = d < s.HD ? load2(q + (size_t)h * s.HD + d) : make_float2(0, 0);
        acc[c] = make_float2(0, 0);
    }
    float top = ATTENTION_MASKED, sum = 0;
    for (int p0 = warp * DECODE_GROUP; p0 < positions; p0 += DECODE_WARPS * DECODE_GROUP) {
        float score[DECODE_GROUP];
#pragma unroll
        for (int i = 0; i < DECODE_GROUP; i++) {
            score[i] = 0;
#pragma unroll
            for (int c = 0; c < PAIRS; c++) {
                const int d = 2 * lane + 64 * c;
                if (d < s.HD && p0 + i < positions) {
                    const float2 key = load2(k + (size_t)(p0 + i) * pitch + d);
                    score[i] += query[c].x * key.x + query[c].y * key.y;
                }
            }
        }
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) {
#pragma unroll
            for (int i = 0; i < DECODE_GROUP; i++) { score[i] += __shfl_xor_sync(0xffffffffu, score[i], mask); }
        }
        float now = top;
#pragma unroll
        for (int i = 0; i < DECODE_GROUP; i++) {
            score[i] = p0 + i < positions ? score[i] * s.scale_log2 : ATTENTION_MASKED;
            now = fmaxf(now, score[i]);
        }
        const float shrink = exp2f(top - now);  // `now` is finite: position p0 exists
        top = now;
        sum *= shrink;
#pragma unroll
        for (int c = 0; c < PAIRS; c++) {
            acc[c].x *= shrink;
            acc[c].y *= shrink;
        }
#pragma unroll
        for (int i = 0; i < DECODE_GROUP; i++) {
            const float p = exp2f(score[i] - top);
            sum += p;
#pragma unroll
            for (int c = 0; c < PAIRS; c++) {
                const int d = 2 * lane + 64 * c;
                if (d < s.HD && p0 + i < positions) {
                    const float2 value = load2(v + (size_t)(p0 + i) * pitch + d);
                    acc[c].x += p * value.x;
                    acc[c].y += p * value.y;
                }
            }
        }
    }
    if (lane == 0) {
        tops[warp] = top;
        sums[warp] = sum;
    }
#pragma unroll
    for (int c = 0; c < PAIRS; c++) {
        parts[warp][2 * lane + 64 * c] = acc[c].x;
        parts[warp][2 * lane + 64 * c + 1] = acc[c].y;
    }
    __syncthreads();
    const int d = 2 * threadIdx.x;
    if (d >= s.HD) { return; }
    float best = tops[0], total = 0, x = 0, y = 0;  // warp 0 has position 0
    for (int w = 1; w < DECODE_WARPS; w++) { best = fmaxf(best, tops[w]); }
    for (int w = 0; w < DECODE_WARPS; w++) {
        const float f = exp2f(tops[w] - best);
        total += f * sums[w];
        x += f * parts[w][d];
        y += f * parts[w][d + 1];
    }
    store2(out + (size_t)h * s.HD + d, x / total, y / total);
}

// ---------------------------------------------------------------------------------------------------------------------
// launchers

static inline AttentionShape attention_shape(int T, int NH, int NKV, int HD, size_t qkv_pitch, size_t out_pitch) {
    const double scale = 1.0 / sqrt((double)HD);
    AttentionShape s = {
        T, NH, NKV, HD, (T + 127) / 128 * 128, qkv_pitch, out_pitch, (float)scale, (float)(scale * 1.4426950408889634)};
    return s;
}

/* Launches with more shared memory than the 48 KB that need no asking. */
template <typename... Params, typename... Args>
static inline void attention_launch(void (*kernel)(Params...), dim3 grid, int threads, int smem, cudaStream_t stream,
                                    Args... args) {
    CUDA_CHECK(cudaFuncSetAttribute((const void*)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
    kernel<<<grid, threads, smem, stream>>>(args...);
    CUDA_CHECK_LAUNCH("an attention kernel");
}

/* One block a (head, tile of `rows` rows, sequence). Heads lie next to each other: those of a group read the same K and V, and
 * what one sequence's heads read at a time fits in the L2 cache. */
static inline dim3 attention_grid(size_t B, int heads, int T, int rows) {
    return dim3((unsigned)heads, (unsigned)((T + rows - 1) / rows), (unsigned)B);
}

template <int HD_MAX>
static inline void attention_forward_plain(floatX* out, float* lse, const floatX* qkv, size_t B, AttentionShape s,
                                           cudaStream_t stream) {
    typedef PlainTiles<HD_MAX> Tiles;
    constexpr int BM = Tiles::FORWARD_BM, BN = Tiles::FORWARD_BN, THREADS = 16 * BM / Tiles::FORWARD_RM;
    constexpr int SMEM = 4 * ((BM + BN) * (HD_MAX + 4) + BM * (BN + 4));
    static_assert(SMEM <= SM75_SHARED, "does not run on sm_75");
    attention_launch(attention_forward_plain_kernel<HD_MAX>, attention_grid(B, s.NH, s.T, BM), THREADS, SMEM, stream, out, lse,
                     qkv, s);
}

template <int HD_MAX>
static inline void attention_backward_plain(floatX* dqkv, const float2* stats, const floatX* dout, const floatX* qkv, size_t B,
                                            AttentionShape s, cudaStream_t stream) {
    typedef PlainTiles<HD_MAX> Tiles;
    constexpr int BM = Tiles::BACKWARD_BM, BN = Tiles::BACKWARD_BN, THREADS = 16 * BM / Tiles::BACKWARD_RM;
    constexpr int SMEM = 4 * (2 * (BM + BN) * (HD_MAX + 4) + BM * (BN + 4));
    static_assert(SMEM <= SM75_SHARED, "does not run on sm_75");
    attention_launch(attention_backward_kv_plain_kernel<HD_MAX>, attention_grid(B, s.NKV, s.T, BN), THREADS, SMEM, stream, dqkv,
                     stats, dout, qkv, s);
    attention_launch(attention_backward_q_plain_kernel<HD_MAX>, attention_grid(B, s.NH, s.T, BM), THREADS, SMEM, stream, dqkv,
                     stats, dout, qkv, s);
}

#ifndef PRECISION_FP32

template <typename Tiles>
static inline void attention_forward_mma(floatX* out, float* lse, const floatX* qkv, size_t B, AttentionShape s,
                                         cudaStream_t stream) {
    attention_launch(attention_forward_mma_kernel<Tiles>, attention_grid(B, s.NH, s.T, Tiles::BM), Tiles::THREADS, Tiles::SMEM,
                     stream, out, lse, qkv, s);
}

template <typename Tiles>
static inline void attention_backward_kv_mma(floatX* dqkv, const float2* stats, const floatX* dout, const floatX* qkv, size_t B,
                                             AttentionShape s, cudaStream_t stream) {
    attention_launch(attention_backward_kv_mma_kernel<Tiles>, attention_grid(B, s.NKV, s.T, Tiles::BN), Tiles::THREADS,
                     Tiles::SMEM, stream, dqkv, stats, dout, qkv, s);
}

template <typename Tiles>
static inline void attention_backward_q_mma(floatX* dqkv, const float2* stats, const floatX* dout, const floatX* qkv, size_t B,
                                            AttentionShape s, cudaStream_t stream) {
    attention_launch(attention_backward_q_mma_kernel<Tiles>, attention_grid(B, s.NH, s.T, Tiles::BM), Tiles::THREADS,
                     Tiles::SMEM, stream, dqkv, stats, dout, qkv, s);
}

// Tiles by architecture and head dimension: HD, tile of the walked-over side (, columns at a time), MT, WARPS, BLOCKS, ASYNC.
// sm_80: two blocks a multiprocessor, within the 99 KB a block may have on sm_86 and sm_89. sm_75: within 64 KB.
template <int HD>
struct MmaTiles;
template <>
struct MmaTiles<64> {
    typedef ForwardTiles<64, 64, 2, 4, 2, true> Forward;
    typedef BackwardKVTiles<64, 64, 32, 2, 4, 2, true> BackwardKV;
    typedef BackwardQTiles<64, 64, 32, 2, 4, 2, true> BackwardQ;
    typedef ForwardTiles<64, 64, 1, 4, 2, false> Forward75;
    typedef BackwardKVTiles<64, 64, 32, 1, 4, 2, false> BackwardKV75;
    typedef BackwardQTiles<64, 64, 32, 1, 4, 2, false> BackwardQ75;
};
template <>
struct MmaTiles<128> {
    typedef ForwardTiles<128, 32, 2, 4, 2, true> Forward;
    typedef BackwardKVTiles<128, 64, 64, 1, 4, 2, true> BackwardKV;
    typedef BackwardQTiles<128, 32, 32, 2, 4, 2, true> BackwardQ;
    typedef ForwardTiles<128, 32, 1, 4, 2, false> Forward75;
    typedef BackwardKVTiles<128, 32, 32, 1, 4, 1, false> BackwardKV75;
    typedef BackwardQTiles<128, 32, 32, 1, 4, 1, false> BackwardQ75;
};

template <int HD>
static inline void attention_forward_mma_any(floatX* out, float* lse, const floatX* qkv, size_t B, AttentionShape s,
                                             cudaStream_t stream) {
    if (compiled_arch(attention_stats_kernel<32, 2>) >= 80) {
        attention_forward_mma<typename MmaTiles<HD>::Forward>(out, lse, qkv, B, s, stream);
    } else {
        attention_forward_mma<typename MmaTiles<HD>::Forward75>(out, lse, qkv, B, s, stream);
    }
}

template <int HD>
static inline void attention_backward_mma_any(floatX* dqkv, const float2* stats, const floatX* dout, const floatX* qkv,
                                              size_t B, AttentionShape s, cudaStream_t stream) {
    if (compiled_arch(attention_stats_kernel<32, 2>) >= 80) {
        attention_backward_kv_mma<typename MmaTiles<HD>::BackwardKV>(dqkv, stats, dout, qkv, B, s, stream);
        attention_backward_q_mma<typename MmaTiles<HD>::BackwardQ>(dqkv, stats, dout, qkv, B, s, stream);
    } else {
        attention_backward_kv_mma<typename MmaTiles<HD>::BackwardKV75>(dqkv, stats, dout, qkv, B, s, stream);
        attention_backward_q_mma<typename MmaTiles<HD>::BackwardQ75>(dqkv, stats, dout, qkv, B, s, stream);
    }
}

#endif  // PRECISION_FP32

#include "llmc/attention_sm90.cuh"  // defines: attention_forward_wgmma, attention_backward_wgmma, attention_has_wgmma

/* Whether a kernel exists for this head dimension in this build, for the GPU and code at hand. */
static inline bool attention_has_kernel(AttentionKernel kernel, int HD) {
#ifndef PRECISION_FP32
    if (kernel == ATTENTION_WGMMA) { return (HD == 64 || HD == 128) && attention_has_wgmma(); }
    if (kernel == ATTENTION_MMA) { return HD == 64 || HD == 128; }
#endif
    return kernel == ATTENTION_AUTO || (kernel == ATTENTION_PLAIN && HD > 0 && HD <= 256 && HD % 2 == 0);
}

static inline AttentionKernel attention_choose(AttentionKernel kernel, int HD) {
    if (kernel != ATTENTION_AUTO) { return kernel; }
    for (int k = NUM_ATTENTION_KERNELS - 1; k > ATTENTION_PLAIN; k--) {
        if (attention_has_kernel((AttentionKernel)k, HD)) { return (AttentionKernel)k; }
    }
    return ATTENTION_PLAIN;
}

/* attention_forward_cuda with the kernel named; attention_has_kernel must be true of it. */
static inline void attention_forward_kernel(AttentionKernel kernel, floatX* out, float* lse, const floatX* qkv, size_t B, int T,
                                            int NH, int NKV, int HD, size_t qkv_pitch, size_t out_pitch, cudaStream_t stream) {
    const AttentionShape s = attention_shape(T, NH, NKV, HD, qkv_pitch, out_pitch);
    kernel = attention_choose(kernel, HD);
    if (B == 0 || T == 0) { return; }
#ifndef PRECISION_FP32
    if (kernel == ATTENTION_WGMMA) {
        return HD == 64 ? attention_forward_wgmma<64>(out, lse, qkv, B, s, stream)
                        : attention_forward_wgmma<128>(out, lse, qkv, B, s, stream);
    }
    if (kernel == ATTENTION_MMA) {
        return HD == 64 ? attention_forward_mma_any<64>(out, lse, qkv, B, s, stream)
                        : attention_forward_mma_any<128>(out, lse, qkv, B, s, stream);
    }
#endif
    if (HD <= 64) { return attention_forward_plain<64>(out, lse, qkv, B, s, stream); }
    if (HD <= 128) { return attention_forward_plain<128>(out, lse, qkv, B, s, stream); }
    attention_forward_plain<256>(out, lse, qkv, B, s, stream);
}

/* attention_backward_cuda with the kernel named. */
static inline void attention_backward_kernel(AttentionKernel kernel, floatX* dqkv, float* scratch, const floatX* dout,
                                             const floatX* out, const float* lse, const floatX* qkv, size_t B, int T, int NH,
                                             int NKV, int HD, size_t qkv_pitch, size_t out_pitch, cudaStream_t stream) {
    const AttentionShape s = attention_shape(T, NH, NKV, HD, qkv_pitch, out_pitch);
    float2* stats = (float2*)scratch;
    const size_t pairs = B * NH * s.stat_rows;
    kernel = attention_choose(kernel, HD);
    if (pairs == 0) { return; }
    if (HD % 64 == 0) {
        attention_stats_kernel<8, 8><<<(unsigned)(pairs / 32), 256, 0, stream>>>(stats, dout, out, lse, s, pairs);
    } else {
        attention_stats_kernel<32, 2><<<(unsigned)(pairs / 8), 256, 0, stream>>>(stats, dout, out, lse, s, pairs);
    }
    CUDA_CHECK_LAUNCH("attention_stats_kernel");
#ifndef PRECISION_FP32
    if (kernel == ATTENTION_WGMMA) {
        return HD == 64 ? attention_backward_wgmma<64>(dqkv, stats, dout, qkv, B, s, stream)
                        : attention_backward_wgmma<128>(dqkv, stats, dout, qkv, B, s, stream);
    }
    if (kernel == ATTENTION_MMA) {
        return HD == 64 ? attention_backward_mma_any<64>(dqkv, stats, dout, qkv, B, s, stream)
                        : attention_backward_mma_any<128>(dqkv, stats, dout, qkv, B, s, stream);
    }
#endif
    if (HD <= 64) { return attention_backward_plain<64>(dqkv, stats, dout, qkv, B, s, stream); }
    if (HD <= 128) { return attention_backward_plain<128>(dqkv, stats, dout, qkv, B, s, stream); }
    attention_backward_plain<256>(dqkv, stats, dout, qkv, B, s, stream);
}

/* out (B, T, NH * HD) and lse (B, NH, T) from qkv (B, T, (NH + 2 NKV) * HD). Pitches: elements between rows of qkv and out. */
static inline void attention_forward_cuda(floatX* out, float* lse, const floatX* qkv, size_t B, int T, int NH, int NKV, int HD,
                                          size_t qkv_pitch, size_t out_pitch, cudaStream_t stream) {
    attention_forward_kernel(ATTENTION_AUTO, out, lse, qkv, B, T, NH, NKV, HD, qkv_pitch, out_pitch, stream);
}

/* Floats of scratch for attention_backward_cuda: lse and D of every query, T rounded up. */
static inline size_t attention_backward_scratch_cuda(size_t B, int T, int NH) {
    return 2 * B * NH * round_up((size_t)T, (size_t)128);
}

/* dqkv, laid out like qkv and overwritten, from dout, and out and lse of the forward pass. scratch: see above, 16-byte aligned. */
static inline void attention_backward_cuda(floatX* dqkv, float* scratch, const floatX* dout, const floatX* out,
                                           const float* lse, const floatX* qkv, size_t B, int T, int NH, int NKV, int HD,
                                           size_t qkv_pitch, size_t out_pitch, cudaStream_t stream) {
    attention_backward_kernel(ATTENTION_AUTO, dqkv, scratch, dout, out, lse, qkv, B, T, NH, NKV, HD, qkv_pitch, out_pitch,
                              stream);
}

/* out (NH * HD) of one query q (NH * HD) that sees all `positions` >= 1 of kv_cache (positions, 2 NKV * HD: k, then v). */
static inline void attention_decode_cuda(floatX* out, const floatX* q, const floatX* kv_cache, int positions, int NH, int NKV,
                                         int HD, cudaStream_t stream) {
    const AttentionShape s = attention_shape(1, NH, NKV, HD, (size_t)2 * NKV * HD, (size_t)NH * HD);
    attention_decode_kernel<<<NH, DECODE_WARPS * 32, 0, stream>>>(out, q, kv_cache, positions, s);
    CUDA_CHECK_LAUNCH("attention_decode_kernel");
}

#endif
