/* attention_plain.cuh -- the readable attention kernels, for any even head_dim up to 256 and any floatX: tiles in shared memory
 * as fp32, products on the ordinary units. Formulas and layouts: attention.cuh. The tiling follows FlashAttention-2 (Dao 2023,
 * arXiv 2307.08691).
 *
 * They serve FP32 builds and the head dimensions that the tensor-core kernels lack. They are also the oracle of the tensor-core
 * kernels. On an H200 they reach 18 to 21 TFLOP/s forward and 9 to 16 backward (BF16, T = 1024 and 2048), where mma.sync
 * reaches 250 to 300 and 190 to 230.
 */
#ifndef LLMC_ATTENTION_PLAIN_CUH
#define LLMC_ATTENTION_PLAIN_CUH

#include "llmc/attention_common.cuh"

/* Tile sizes by the largest head dimension that fits. A block has 16 x (BM / RM) threads. Thread (ty, tx) computes the scores
 * of query rows ty + TY i (i < RM) and key rows tx + 16 j (j < BN / 16). In tiles of head_dim columns it has columns
 * 4 tx + 64 c + 0..3. Rows in shared memory are HD_MAX + 4 floats apart, so that 16-byte reads of eight adjacent rows do not
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

/* Loads `rows` rows of one head as fp32; rows from `valid` on and columns from HD on become zeros. */
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

/* Writes s[i][j] = row (ty + TY i) of a . row (tx + 16 j) of b. */
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

/* Adds weights[i] * tile[row][4 tx + 64 c + 0..3] to acc[i][c], for each of the thread's R rows. */
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

/* Stores columns 4 tx + 64 c + 0..3 of one row, times f. */
template <int HD_MAX>
__device__ __forceinline__ void plain_store(floatX* row, const float4 acc[HD_MAX / 64], float f, int tx, int HD) {
#pragma unroll
    for (int c = 0; c < HD_MAX / 64; c++) {
        const int col = 4 * tx + 64 * c;
        if (col < HD) { store2(row + col, acc[c].x * f, acc[c].y * f); }
        if (col + 2 < HD) { store2(row + col + 2, acc[c].z * f, acc[c].w * f); }
    }
}

/* A block owns BM queries of one head and walks over the keys they see, with an online softmax. */
template <int HD_MAX, bool DOCUMENTS>
__global__ void attention_forward_plain_kernel(floatX* out, float* lse, const floatX* qkv, AttentionArgs s) {
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
    const int32_t* starts = s.starts + first_row;
    const int end = min(s.T, q0 + BM);
    for (int k0 = DOCUMENTS ? starts[q0] / BN * BN : 0; k0 < end; k0 += BN) {
        plain_load<HD_MAX>(kv_tile, k_head + k0 * s.qkv_pitch, s.qkv_pitch, BN, s.T - k0, s.HD);
        __syncthreads();
        float p[RM][RN];
        plain_scores<HD_MAX, RM, RN, TY>(p, q_tile, kv_tile, ty, tx, s.HD);
#pragma unroll
        for (int i = 0; i < RM; i++) {
            const int row = q0 + ty + TY * i, first = DOCUMENTS && row < s.T ? starts[row] : 0;
            float max = m[i];
#pragma unroll
            for (int j = 0; j < RN; j++) {
                const int key = k0 + tx + 16 * j;
                p[i][j] = key <= row && (!DOCUMENTS || first <= key) ? p[i][j] * s.scale_log2 : ATTENTION_MASKED;
                max = fmaxf(max, p[i][j]);
            }
            for (int mask = 8; mask > 0; mask /= 2) { max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, mask)); }
            // without documents max is finite: the first tile holds column 0, which every row sees
            const float shift = DOCUMENTS && max == ATTENTION_MASKED ? 0 : max;
            const float rescale = exp2f(m[i] - shift);
            m[i] = max;
            l[i] *= rescale;
#pragma unroll
            for (int c = 0; c < COLS; c++) {
                acc[i][c].x *= rescale;
                acc[i][c].y *= rescale;
                acc[i][c].z *= rescale;
                acc[i][c].w *= rescale;
            }
#pragma unroll
            for (int j = 0; j < RN; j++) {
                const float e = exp2f(p[i][j] - shift);
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
        if (tx == 0) { lse[(b * s.NH + h) * s.T + row] = (m[i] + log2f(l[i])) / (float)LOG2_E; }
    }
}

/* A pair of tiles in shared memory: queries from q0 on, keys from k0 on. */
struct PlainPair {
    float *q, *dout, *k, *v;  // tiles
    int q0, k0;
};

/* Computes p and ds of a pair of tiles in registers, from recomputed scores and {lse, D}. stats, starts: (T) of the row */
template <int HD_MAX, int RM, int RN, int TY, bool DOCUMENTS>
__device__ __forceinline__ void plain_gradients(float p[RM][RN], float ds[RM][RN], const PlainPair& tiles, const float2* stats,
                                                const int32_t* starts, const AttentionArgs& s) {
    const int q0 = tiles.q0, k0 = tiles.k0;
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    plain_scores<HD_MAX, RM, RN, TY>(p, tiles.q, tiles.k, ty, tx, s.HD);
    plain_scores<HD_MAX, RM, RN, TY>(ds, tiles.dout, tiles.v, ty, tx, s.HD);
#pragma unroll
    for (int i = 0; i < RM; i++) {
        const int row = q0 + ty + TY * i;
        const float2 stat = row < s.T ? stats[row] : make_float2(0, 0);
        const int first = DOCUMENTS && row < s.T ? starts[row] : 0;
#pragma unroll
        for (int j = 0; j < RN; j++) {
            const int key = k0 + tx + 16 * j;
            const bool seen = row < s.T && key <= row && (!DOCUMENTS || first <= key);
            p[i][j] = seen ? exp2f(p[i][j] * s.scale_log2 - stat.x) : 0;
            ds[i][j] = p[i][j] * (ds[i][j] - stat.y);
        }
    }
}

/* A block owns BN keys of one kv head and walks over the group's query heads and the queries that see the keys. */
template <int HD_MAX, bool DOCUMENTS>
__global__ void attention_backward_kv_plain_kernel(floatX* dqkv, const float2* stats, const floatX* dout, const floatX* qkv,
                                                   AttentionArgs s) {
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
    const int kv_head = blockIdx.x, k0 = blockIdx.y * BN;  // the first keys, seen by all queries, start first
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
    const int32_t* starts = s.starts + first_row;
    const int end = DOCUMENTS ? attention_document_end(starts, min(s.T, k0 + BN) - 1, s.T) : s.T;
    for (int h = kv_head * group; h < (kv_head + 1) * group; h++) {
        const float2* head_stats = stats + (b * s.NH + h) * s.stat_rows;
        for (int q0 = k0 / BM * BM; q0 < end; q0 += BM) {
            __syncthreads();
            plain_load<HD_MAX>(q_tile, attention_row(qkv, first_row + q0, s.qkv_pitch, h, s.HD), s.qkv_pitch, BM, s.T - q0,
                               s.HD);
            plain_load<HD_MAX>(dout_tile, attention_row(dout, first_row + q0, s.out_pitch, h, s.HD), s.out_pitch, BM, s.T - q0,
                               s.HD);
            __syncthreads();
            float p[RM][RN], ds[RM][RN];
            plain_gradients<HD_MAX, RM, RN, TY, DOCUMENTS>(p, ds, {q_tile, dout_tile, k_tile, v_tile, q0, k0}, head_stats,
                                                           starts, s);
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
template <int HD_MAX, bool DOCUMENTS>
__global__ void attention_backward_q_plain_kernel(floatX* dqkv, const float2* stats, const floatX* dout, const floatX* qkv,
                                                  AttentionArgs s) {
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
    const int q0 = (gridDim.y - 1 - blockIdx.y) * BM;  // the longest rows start first
    const float2* head_stats = stats + (b * s.NH + h) * s.stat_rows;
    plain_load<HD_MAX>(q_tile, attention_row(qkv, first_row + q0, s.qkv_pitch, h, s.HD), s.qkv_pitch, BM, s.T - q0, s.HD);
    plain_load<HD_MAX>(dout_tile, attention_row(dout, first_row + q0, s.out_pitch, h, s.HD), s.out_pitch, BM, s.T - q0, s.HD);

    float4 dq[RM][COLS];
#pragma unroll
    for (int i = 0; i < RM; i++) {
#pragma unroll
        for (int c = 0; c < COLS; c++) { dq[i][c] = make_float4(0, 0, 0, 0); }
    }
    const int32_t* starts = s.starts + first_row;
    const int end = min(s.T, q0 + BM);
    for (int k0 = DOCUMENTS ? starts[q0] / BN * BN : 0; k0 < end; k0 += BN) {
        const size_t row = first_row + k0;
        __syncthreads();
        plain_load<HD_MAX>(k_tile, attention_row(qkv, row, s.qkv_pitch, s.NH + kv_head, s.HD), s.qkv_pitch, BN, s.T - k0, s.HD);
        plain_load<HD_MAX>(v_tile, attention_row(qkv, row, s.qkv_pitch, s.NH + s.NKV + kv_head, s.HD), s.qkv_pitch, BN,
                           s.T - k0, s.HD);
        __syncthreads();
        float p[RM][RN], ds[RM][RN];
        plain_gradients<HD_MAX, RM, RN, TY, DOCUMENTS>(p, ds, {q_tile, dout_tile, k_tile, v_tile, q0, k0}, head_stats, starts,
                                                       s);
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
// launchers

template <int HD_MAX>
static inline void attention_plain_forward_tiles(floatX* out, float* lse, const floatX* qkv, int B, const AttentionArgs& s,
                                                 cudaStream_t stream) {
    typedef PlainTiles<HD_MAX> Tiles;
    constexpr int BM = Tiles::FORWARD_BM, BN = Tiles::FORWARD_BN, THREADS = 16 * BM / Tiles::FORWARD_RM;
    constexpr int SMEM = 4 * ((BM + BN) * (HD_MAX + 4) + BM * (BN + 4));
    static_assert(SMEM <= SM75_SHARED, "does not run on sm_75");
    auto* kernel = s.starts ? attention_forward_plain_kernel<HD_MAX, true> : attention_forward_plain_kernel<HD_MAX, false>;
    attention_launch(kernel, attention_grid(B, s.NH, s.T, BM), THREADS, SMEM, stream, out, lse, qkv, s);
}

template <int HD_MAX>
static inline void attention_plain_backward_tiles(floatX* dqkv, const float2* stats, const floatX* dout, const floatX* qkv,
                                                  int B, const AttentionArgs& s, cudaStream_t stream) {
    typedef PlainTiles<HD_MAX> Tiles;
    constexpr int BM = Tiles::BACKWARD_BM, BN = Tiles::BACKWARD_BN, THREADS = 16 * BM / Tiles::BACKWARD_RM;
    constexpr int SMEM = 4 * (2 * (BM + BN) * (HD_MAX + 4) + BM * (BN + 4));
    static_assert(SMEM <= SM75_SHARED, "does not run on sm_75");
    auto* kv = s.starts ? attention_backward_kv_plain_kernel<HD_MAX, true> : attention_backward_kv_plain_kernel<HD_MAX, false>;
    auto* q = s.starts ? attention_backward_q_plain_kernel<HD_MAX, true> : attention_backward_q_plain_kernel<HD_MAX, false>;
    attention_launch(kv, attention_grid(B, s.NKV, s.T, BN), THREADS, SMEM, stream, dqkv, stats, dout, qkv, s);
    attention_launch(q, attention_grid(B, s.NH, s.T, BM), THREADS, SMEM, stream, dqkv, stats, dout, qkv, s);
}

static inline void attention_plain_forward(floatX* out, float* lse, const floatX* qkv, int B, const AttentionArgs& s,
                                           cudaStream_t stream) {
    auto* const launch = s.HD <= 64    ? attention_plain_forward_tiles<64>
                         : s.HD <= 128 ? attention_plain_forward_tiles<128>
                                       : attention_plain_forward_tiles<256>;
    launch(out, lse, qkv, B, s, stream);
}

static inline void attention_plain_backward(floatX* dqkv, const float2* stats, const floatX* dout, const floatX* qkv, int B,
                                            const AttentionArgs& s, cudaStream_t stream) {
    auto* const launch = s.HD <= 64    ? attention_plain_backward_tiles<64>
                         : s.HD <= 128 ? attention_plain_backward_tiles<128>
                                       : attention_plain_backward_tiles<256>;
    launch(dqkv, stats, dout, qkv, B, s, stream);
}

#endif
