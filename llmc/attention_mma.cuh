/* attention_mma.cuh -- the attention kernels on tensor cores with mma.sync: head_dim 64 and 128, 16-bit builds, every card from
 * sm_75 on. Formulas and layouts: attention.cuh. The method is FlashAttention-2 (Dao 2023, arXiv 2307.08691). Tiles go to
 * shared memory asynchronously from sm_80 on, and through registers on sm_75.
 *
 * On an H200 in BF16, T = 1024 to 8192, they reach 248 to 332 TFLOP/s forward, 25 to 34 % of the data sheet's 989, and 187 to
 * 260 backward. Only wgmma can reach that card's limit, so attention_sm90.cuh is the better choice there.
 */
#ifndef LLMC_ATTENTION_MMA_CUH
#define LLMC_ATTENTION_MMA_CUH

#include <algorithm>

#include "llmc/attention_common.cuh"
#include "llmc/cuda/occupancy.cuh"  // defines: multiprocessor_of, resident_blocks

#ifndef PRECISION_FP32

/* A tile of ROWS x HD elements lies in shared memory as 16-byte chunks. Chunk c of row r is stored at place c ^ (r % 8) of its
 * row, so that the eight rows of an 8x8 matrix, which use the same chunk c, fall on different banks for any c.
 *
 * TileCopy loads such a tile from global memory in two steps, and the caller computes between them. On sm_80 and newer start()
 * issues asynchronous copies, and the caller commits and waits. On sm_75 start() loads into registers and finish() stores. */
template <int ROWS, int HD, int THREADS, bool ASYNC>
struct TileCopy {
    static constexpr int CHUNKS = HD / 8, STEP = THREADS / CHUNKS, PIECES = ROWS / STEP;
    static_assert(ROWS % STEP == 0 && STEP % 8 == 0, "a thread moves the same chunk, in the same place, of PIECES rows");
    uint4 held[ASYNC ? 1 : PIECES];

    /* Starts to load the tile. src: the head's part of the tile's first row. Rows from `valid` on become zeros. */
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

// steps of 16 columns that the scores' loop unrolls: with four, ptxas spills registers of sm_120's kernel of dK and dV
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int MMA_SCORES_UNROLL = 2;
#else
constexpr int MMA_SCORES_UNROLL = 4;
#endif

/* Adds to acc[i] the scores a(rows a_row + 16 i ..) . b(rows b_row .. b_row + 8 NT)^T, summed over HD; acc[i] is a fragment. */
template <int HD, int MT, int NT>
__device__ __forceinline__ void mma_scores(float (&acc)[MT][4 * NT], uint32_t a_tile, int a_row, uint32_t b_tile, int b_row) {
    uint32_t lane = threadIdx.x % 32;
    compute_here(lane);
    const uint32_t a_base = a_tile + (a_row + (lane & 15)) * (HD * 2);
    const uint32_t b_base = b_tile + (b_row + (lane & 7) + ((lane >> 4) << 3)) * (HD * 2);
    const uint32_t a_chunk = ((lane >> 4) ^ (lane & 7)) << 4, b_chunk = (((lane >> 3) & 1) ^ (lane & 7)) << 4;
#pragma unroll MMA_SCORES_UNROLL
    for (int k = 0; k < HD / 16; k++) {
        uint32_t a[MT][4];
#pragma unroll
        for (int i = 0; i < MT; i++) { load_matrix_x4(a[i], a_base + (a_chunk ^ (k * 32)) + i * 16 * HD * 2); }
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            uint32_t b[4];
            load_matrix_x4(b, b_base + (b_chunk ^ (k * 32)) + n * 8 * HD * 2);
#pragma unroll
            for (int i = 0; i < MT; i++) {
                mma_16x8x16(acc[i] + 4 * n, a[i], b[0], b[1]);
                mma_16x8x16(acc[i] + 4 * n + 4, a[i], b[2], b[3]);
            }
        }
    }
}

/* Adds to acc[i] the product a[i] b(rows b_row .. b_row + 16 KT), with a in registers; acc[i] is a fragment of HD columns. */
template <int HD, int MT, int KT>
__device__ __forceinline__ void mma_values(float (&acc)[MT][HD / 2], const uint32_t (&a)[MT][KT][4], uint32_t b_tile,
                                           int b_row) {
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
            for (int i = 0; i < MT; i++) {
                mma_16x8x16(acc[i] + 4 * n, a[i][k], b[0], b[1]);
                mma_16x8x16(acc[i] + 4 * n + 4, a[i][k], b[2], b[3]);
            }
        }
    }
}

template <int MT, int KT>
__device__ __forceinline__ void mma_operand(uint32_t (&a)[MT][KT][4], const float (&p)[MT][8 * KT]) {
#pragma unroll
    for (int i = 0; i < MT; i++) { fragment_operand(a[i], p[i]); }
}

template <int MT, int N>
__device__ __forceinline__ void mma_clear(float (&acc)[MT][N]) {
#pragma unroll
    for (int i = 0; i < MT; i++) { fragment_clear(acc[i]); }
}

/* Writes a warp's 16 MT rows, row r of acc[i] times f[i][r / 8], to global memory. They pass through `rows`, the warp's own
 * rows of a tile in shared memory that no other warp reads any more. */
template <int HD, int MT>
__device__ __forceinline__ void mma_store(floatX* dst, size_t pitch, int valid, char* rows, const float (&acc)[MT][HD / 2],
                                          const float (&f)[MT][2]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < MT; i++) {
#pragma unroll
        for (int n = 0; n < HD / 8; n++) {
            char* at = rows + (i * 16 + g) * HD * 2 + ((n ^ g) << 4) + t * 4;
            *(uint32_t*)at = pack2(acc[i][4 * n] * f[i][0], acc[i][4 * n + 1] * f[i][0]);
            *(uint32_t*)(at + 8 * HD * 2) = pack2(acc[i][4 * n + 2] * f[i][1], acc[i][4 * n + 3] * f[i][1]);
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

// ---------------------------------------------------------------------------------------------------------------------
// forward

/* A kernel's body is compiled either for sm_80 and newer or for sm_75; the tile's ASYNC says which. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr bool MMA_BODY_IS_ASYNC = false;
#else
constexpr bool MMA_BODY_IS_ASYNC = true;
#endif

/* WARPS warps of 16 MT queries each; keys in tiles of BN. K and V have one buffer each: V is loaded during q k^T, the next K
 * during softmax and p v. The kernel walks from the diagonal to the left, so masked tiles come first. */
template <int HD_, int BN_, int MT_, int WARPS_, int BLOCKS_, bool ASYNC_>
struct MmaForwardTiles {
    static constexpr int HD = HD_, BN = BN_, MT = MT_, WARPS = WARPS_, BLOCKS = BLOCKS_;
    static constexpr bool ASYNC = ASYNC_;
    static constexpr int THREADS = WARPS * 32, BM = WARPS * MT * 16, SMEM = (BM + 2 * BN) * HD * 2;
    static_assert(ASYNC || SMEM <= SM75_SHARED, "does not run on sm_75");
};

template <typename Tiles, bool DOCUMENTS = false>
__global__ void __launch_bounds__(Tiles::THREADS, Tiles::BLOCKS)
    attention_forward_mma_kernel(floatX* out, float* lse, const floatX* qkv, AttentionArgs s) {
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
        const int32_t* starts = s.starts + first_row;
        const int first_k0 = DOCUMENTS ? starts[q0] / BN * BN : 0;
        const int last_start = DOCUMENTS ? starts[min(s.T, warp_q0 + MT * 16) - 1] : 0;  // of the warp's queries
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

        float acc[MT][HD / 2], m[MT][2], l[MT][2];
        mma_clear(acc);
#pragma unroll
        for (int i = 0; i < MT; i++) {
            m[i][0] = m[i][1] = ATTENTION_MASKED;
            l[i][0] = l[i][1] = 0;
        }
        for (; k0 >= first_k0; k0 -= BN) {
            copy.finish(k_tile);
            copy_async_wait<0>();
            __syncthreads();  // K has arrived, and V's last readers are done
            copy.start(v_smem, k_rows + v_offset, s.qkv_pitch, s.T - k0);
            k_rows -= BN * s.qkv_pitch;
            copy_async_commit();
            float p[MT][4 * NT];
            mma_clear(p);
            mma_scores<HD, MT, NT>(p, q_smem, warp * MT * 16, k_smem, 0);
            copy.finish(v_tile);
            copy_async_wait<0>();
            __syncthreads();  // V has arrived, and K's readers are done
            if (k0 > first_k0) {
                copy.start(k_smem, k_rows, s.qkv_pitch, BN);
                copy_async_commit();
            }
            if (k0 + BN - 1 > warp_q0) {
                // the last column that row g of the warp sees, counted from column 2 t of this tile
                const int last = warp_q0 + g - k0 - t * 2;
#pragma unroll
                for (int i = 0; i < MT; i++) { fragment_mask_behind(p[i], last, ATTENTION_MASKED, i * 16); }
            }
            if (DOCUMENTS && k0 < last_start) {
#pragma unroll
                for (int i = 0; i < MT; i++) {
                    fragment_mask_documents(p[i], starts, warp_q0 + i * 16 + g, k0 + t * 2, s.T, ATTENTION_MASKED);
                }
            }
#pragma unroll
            for (int i = 0; i < MT; i++) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const float rescale = fragment_softmax(p[i], r, m[i][r], l[i][r], s.scale_log2);
#pragma unroll
                    for (int n = 0; n < HD / 8; n++) {
                        acc[i][4 * n + 2 * r] *= rescale;
                        acc[i][4 * n + 2 * r + 1] *= rescale;
                    }
                }
            }
            uint32_t a[MT][NT / 2][4];
            mma_operand(a, p);
            mma_values<HD, MT, NT / 2>(acc, a, v_smem, 0);
        }
        float f[MT][2];
        float* lse_rows = lse + (b * s.NH + h) * s.T;
#pragma unroll
        for (int i = 0; i < MT; i++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                l[i][r] = fragment_row_sum(l[i][r]);
                f[i][r] = 1 / l[i][r];
                const int row = warp_q0 + i * 16 + g + r * 8;
                if (t == 0 && row < s.T) { lse_rows[row] = m[i][r] * s.scale + logf(l[i][r]); }
            }
        }
        mma_store<HD, MT>(attention_row(out, first_row + warp_q0, s.out_pitch, h, HD), s.out_pitch, s.T - warp_q0,
                          q_tile + warp * MT * 16 * HD * 2, acc, f);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// dK, dV

/* dK, dV: WARPS warps of 16 MT keys each; queries in tiles of BM, of which a warp takes NC at a time. The scores are computed
 * transposed (keys are rows). p^T and ds^T then already lie in registers as left operands of dv += p^T dout and dk += ds^T q
 * and never pass through shared memory. On sm_80 and newer a second buffer receives the next q and dout tiles. */
template <int HD_, int BM_, int NC_, int MT_, int WARPS_, int BLOCKS_, bool ASYNC_>
struct MmaKVTiles {
    static constexpr int HD = HD_, BM = BM_, NC = NC_, MT = MT_, WARPS = WARPS_, BLOCKS = BLOCKS_;
    static constexpr bool ASYNC = ASYNC_;
    static constexpr int THREADS = WARPS * 32, BN = WARPS * MT * 16, STAGES = ASYNC ? 2 : 1;
    static constexpr int STAGE = 2 * BM * HD * 2 + BM * 8, SMEM = 2 * BN * HD * 2 + STAGES * STAGE;
    static_assert(ASYNC || SMEM <= SM75_SHARED, "does not run on sm_75");
    static_assert(BM <= THREADS, "a thread brings at most one pair of statistics");
};

template <typename Tiles, bool DOCUMENTS = false>
__global__ void __launch_bounds__(Tiles::THREADS, Tiles::BLOCKS)
    attention_backward_kv_mma_kernel(floatX* dqkv, const float2* stats, const floatX* dout, const floatX* qkv,
                                     AttentionArgs s) {
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
        // loads q, dout and statistics of head h from query q0 on; all are zeros past the end and contribute nothing
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
        const int32_t* starts = s.starts + first_row;
        const int end_q = DOCUMENTS ? attention_document_end(starts, min(s.T, k0 + BN) - 1, s.T) : s.T;
        const int first_end = DOCUMENTS ? attention_document_end(starts, min(s.T - 1, warp_k0), s.T) : 0;  // of the warp's keys

        float dk[MT][HD / 2], dv[MT][HD / 2];
        mma_clear(dk);
        mma_clear(dv);
        int h = kv_head * group, q0 = first_q, stage = 0;
        while (true) {
            if constexpr (!Tiles::ASYNC) { __syncthreads(); }  // readers of the only buffer are done
            finish_stage();
            __syncthreads();  // the tiles have arrived, and readers of the other buffer are done
            int next_q0 = q0 + BM, next_h = h;
            if (next_q0 >= end_q) {
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
                if (q0 + c + NC - 1 < warp_k0) { continue; }  // none of these queries sees a key of this warp
                float p[MT][4 * NT], ds[MT][4 * NT];
                uint32_t a[MT][NT / 2][4];
                mma_clear(p);
                mma_scores<HD, MT, NT>(p, k_smem, warp * MT * 16, q_smem, c);
                const float4* stat = tile_stats + c / 2 + t;
#pragma unroll
                for (int i = 0; i < MT; i++) { fragment_p_transposed(p[i], stat, s.scale_log2); }
                if (q0 + c < warp_k0 + MT * 16 - 1) {
                    // the first of these columns, counted from column 2 t, whose query sees key g of the warp
                    const int first = warp_k0 + g - q0 - c - t * 2;
#pragma unroll
                    for (int i = 0; i < MT; i++) { fragment_clear_before(p[i], first, i * 16); }
                }
                if (DOCUMENTS && q0 + c + NC > first_end) {
#pragma unroll
                    for (int i = 0; i < MT; i++) {
                        fragment_clear_documents(p[i], starts, warp_k0 + i * 16 + g, q0 + c + t * 2, s.T);
                    }
                }
                mma_operand(a, p);
                mma_values<HD, MT, NT / 2>(dv, a, dout_smem, c);
                mma_clear(ds);
                mma_scores<HD, MT, NT>(ds, v_smem, warp * MT * 16, dout_smem, c);
#pragma unroll
                for (int i = 0; i < MT; i++) { fragment_ds_transposed(ds[i], p[i], stat); }
                mma_operand(a, ds);
                mma_values<HD, MT, NT / 2>(dk, a, q_smem, c);
            }
            if (!more) { break; }
            q0 = next_q0;
            h = next_h;
            stage = Tiles::STAGES - 1 - stage;
        }
        float f[MT][2];
#pragma unroll
        for (int i = 0; i < MT; i++) { f[i][0] = f[i][1] = s.scale; }
        floatX* dk_rows = attention_row(dqkv, first_row + warp_k0, s.qkv_pitch, s.NH + kv_head, HD);
        mma_store<HD, MT>(dk_rows, s.qkv_pitch, s.T - warp_k0, k_tile + warp * MT * 16 * HD * 2, dk, f);
#pragma unroll
        for (int i = 0; i < MT; i++) { f[i][0] = f[i][1] = 1; }
        mma_store<HD, MT>(dk_rows + (size_t)s.NKV * HD, s.qkv_pitch, s.T - warp_k0, v_tile + warp * MT * 16 * HD * 2, dv, f);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// dQ

/* dQ: WARPS warps of 16 MT queries each, keys in tiles of BN, of which a warp takes NC at a time. */
template <int HD_, int BN_, int NC_, int MT_, int WARPS_, int BLOCKS_, bool ASYNC_>
struct MmaQTiles {
    static constexpr int HD = HD_, BN = BN_, NC = NC_, MT = MT_, WARPS = WARPS_, BLOCKS = BLOCKS_;
    static constexpr bool ASYNC = ASYNC_;
    static constexpr int THREADS = WARPS * 32, BM = WARPS * MT * 16, STAGES = ASYNC ? 2 : 1;
    static constexpr int STAGE = 2 * BN * HD * 2, SMEM = 2 * BM * HD * 2 + STAGES * STAGE;
    static_assert(ASYNC || SMEM <= SM75_SHARED, "does not run on sm_75");
};

template <typename Tiles, bool DOCUMENTS = false>
__global__ void __launch_bounds__(Tiles::THREADS, Tiles::BLOCKS)
    attention_backward_q_mma_kernel(floatX* dqkv, const float2* stats, const floatX* dout, const floatX* qkv, AttentionArgs s) {
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
        const int32_t* starts = s.starts + first_row;
        const int first_k0 = DOCUMENTS ? starts[q0] / BN * BN : 0;
        const int last_start = DOCUMENTS ? starts[min(s.T, warp_q0 + MT * 16) - 1] : 0;  // of the warp's queries
        int k0 = (min(s.T, q0 + BM) - 1) / BN * BN, stage = 0;
        start_stage(0, k0);

        float dq[MT][HD / 2];
        float2 stat[MT][2];
        mma_clear(dq);
#pragma unroll
        for (int i = 0; i < MT; i++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int row = warp_q0 + i * 16 + g + r * 8;
                stat[i][r] = row < s.T ? stats[(b * s.NH + h) * s.stat_rows + row] : make_float2(0, 0);
            }
        }
        for (; k0 >= first_k0; k0 -= BN) {
            if constexpr (!Tiles::ASYNC) {
                __syncthreads();  // readers of the only buffer are done
                copy_k.finish(stages);
                copy_v.finish(stages + BN * HD * 2);
            }
            copy_async_wait<0>();
            __syncthreads();  // the tiles have arrived, and readers of the other buffer are done
            if (k0 > first_k0) { start_stage(Tiles::STAGES - 1 - stage, k0 - BN); }
            const uint32_t k_smem = shared_address(stages) + stage * Tiles::STAGE, v_smem = k_smem + BN * HD * 2;
#pragma unroll 1
            for (int c = 0; c < BN; c += NC) {
                if (k0 + c > warp_q0 + MT * 16 - 1) { continue; }  // no query of this warp sees these keys
                float p[MT][4 * NT], ds[MT][4 * NT];
                mma_clear(p);
                mma_scores<HD, MT, NT>(p, q_smem, warp * MT * 16, k_smem, c);
                mma_clear(ds);
                mma_scores<HD, MT, NT>(ds, dout_smem, warp * MT * 16, v_smem, c);
#pragma unroll
                for (int i = 0; i < MT; i++) { fragment_p(p[i], stat[i], s.scale_log2); }
                if (k0 + c + NC - 1 > warp_q0) {
                    const int last = warp_q0 + g - k0 - c - t * 2;
#pragma unroll
                    for (int i = 0; i < MT; i++) { fragment_mask_behind(p[i], last, 0, i * 16); }
                }
                if (DOCUMENTS && k0 + c < last_start) {
                    size_t row = blockIdx.z;  // a pointer kept through the loop makes ptxas spill on sm_120
                    compute_here(row);
                    const int32_t* row_starts = s.starts + row * s.T;
#pragma unroll
                    for (int i = 0; i < MT; i++) {
                        fragment_mask_documents(p[i], row_starts, warp_q0 + i * 16 + g, k0 + c + t * 2, s.T, 0);
                    }
                }
#pragma unroll
                for (int i = 0; i < MT; i++) { fragment_ds(ds[i], p[i], stat[i]); }
                uint32_t a[MT][NT / 2][4];
                mma_operand(a, ds);
                mma_values<HD, MT, NT / 2>(dq, a, k_smem, c);
            }
            stage = Tiles::STAGES - 1 - stage;
        }
        float f[MT][2];
#pragma unroll
        for (int i = 0; i < MT; i++) { f[i][0] = f[i][1] = s.scale; }
        mma_store<HD, MT>(attention_row(dqkv, first_row + warp_q0, s.qkv_pitch, h, HD), s.qkv_pitch, s.T - warp_q0,
                          q_tile + warp * MT * 16 * HD * 2, dq, f);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// launchers

template <typename Tiles>
static inline void attention_mma_forward_tiles(floatX* out, float* lse, const floatX* qkv, int B, const AttentionArgs& s,
                                               cudaStream_t stream) {
    auto* kernel = s.starts ? attention_forward_mma_kernel<Tiles, true> : attention_forward_mma_kernel<Tiles, false>;
    attention_launch(kernel, attention_grid(B, s.NH, s.T, Tiles::BM), Tiles::THREADS, Tiles::SMEM, stream, out, lse, qkv, s);
}

template <typename Tiles>
static inline void attention_mma_backward_kv(floatX* dqkv, const float2* stats, const floatX* dout, const floatX* qkv, int B,
                                             const AttentionArgs& s, cudaStream_t stream) {
    auto* kernel = s.starts ? attention_backward_kv_mma_kernel<Tiles, true> : attention_backward_kv_mma_kernel<Tiles, false>;
    attention_launch(kernel, attention_grid(B, s.NKV, s.T, Tiles::BN), Tiles::THREADS, Tiles::SMEM, stream, dqkv, stats, dout,
                     qkv, s);
}

template <typename Tiles>
static inline void attention_mma_backward_q(floatX* dqkv, const float2* stats, const floatX* dout, const floatX* qkv, int B,
                                            const AttentionArgs& s, cudaStream_t stream) {
    auto* kernel = s.starts ? attention_backward_q_mma_kernel<Tiles, true> : attention_backward_q_mma_kernel<Tiles, false>;
    attention_launch(kernel, attention_grid(B, s.NH, s.T, Tiles::BM), Tiles::THREADS, Tiles::SMEM, stream, dqkv, stats, dout,
                     qkv, s);
}

/* Tiles for one kernel. A card takes those that give its multiprocessors the most warps; of several, the first. All tiles of a
 * list add in the same order, so every card computes the same bits. */
template <typename... Tiles>
struct MmaTileList {};

// Tiles by head dimension: HD, tile of the side walked over, columns at a time (backward), MT, WARPS, BLOCKS, ASYNC. Two blocks
// of four warps come first, then one of eight for cards that hold only one. Each card's warps: dev/doc/cards.md.
template <int HD>
struct MmaTiles;
template <>
struct MmaTiles<64> {
    typedef MmaTileList<MmaForwardTiles<64, 64, 2, 4, 2, true>, MmaForwardTiles<64, 64, 2, 4, 2, false>> Forward;
    typedef MmaTileList<MmaKVTiles<64, 64, 32, 2, 4, 2, true>, MmaKVTiles<64, 64, 32, 2, 8, 1, true>,
                        MmaKVTiles<64, 64, 32, 1, 8, 1, false>>
        BackwardKV;
    typedef MmaTileList<MmaQTiles<64, 64, 32, 2, 4, 2, true>, MmaQTiles<64, 64, 32, 2, 8, 1, true>,
                        MmaQTiles<64, 64, 32, 1, 4, 2, false>>
        BackwardQ;
};
template <>
struct MmaTiles<128> {
    typedef MmaTileList<MmaForwardTiles<128, 32, 2, 4, 2, true>, MmaForwardTiles<128, 32, 1, 4, 2, false>> Forward;
    typedef MmaTileList<MmaKVTiles<128, 64, 64, 1, 4, 2, true>, MmaKVTiles<128, 64, 64, 1, 8, 1, true>,
                        MmaKVTiles<128, 32, 32, 1, 4, 1, false>>
        BackwardKV;
    typedef MmaTileList<MmaQTiles<128, 32, 32, 2, 4, 2, true>, MmaQTiles<128, 32, 32, 2, 8, 1, true>,
                        MmaQTiles<128, 32, 32, 1, 4, 1, false>>
        BackwardQ;
};

/* Returns the warps that such a multiprocessor holds, if ptxas takes all registers that it may; 0 for tiles of other code.
 * async: whether the card loaded code for sm_80 or newer */
template <typename Tiles>
constexpr int mma_warps(Multiprocessor m, bool async) {
    const int registers = least_of(MOST_REGISTERS, 4 * REGISTERS_OF_PART / (Tiles::THREADS * Tiles::BLOCKS));
    return Tiles::ASYNC == async ? Tiles::WARPS * resident_blocks(m, Tiles::THREADS, registers, Tiles::SMEM) : 0;
}
template <typename... Tiles>
constexpr bool mma_blocks_fit(MmaTileList<Tiles...>) {
    return ((mma_warps<Tiles>(multiprocessor_of(90), Tiles::ASYNC) >= Tiles::WARPS * Tiles::BLOCKS) && ...);
}
template <typename Tiles>
constexpr bool mma_blocks_fit(Tiles) {
    return mma_blocks_fit(typename Tiles::Forward()) && mma_blocks_fit(typename Tiles::BackwardKV()) &&
           mma_blocks_fit(typename Tiles::BackwardQ());
}
static_assert(mma_blocks_fit(MmaTiles<64>()) && mma_blocks_fit(MmaTiles<128>()),
              "launch bounds ask for more blocks than any card holds");

/* Returns the multiprocessor of the current device: multiprocessor_of() may not know a new card. */
static inline Multiprocessor mma_multiprocessor() {
    return {device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor),
            device_attribute(cudaDevAttrReservedSharedMemoryPerBlock), device_attribute(cudaDevAttrMaxThreadsPerMultiProcessor),
            device_attribute(cudaDevAttrMaxBlocksPerMultiprocessor)};
}

/* Calls launch with those tiles of a list that the card takes. */
template <typename... Tiles, typename Launch>
static inline void mma_choose(MmaTileList<Tiles...>, const Launch& launch, Multiprocessor m = mma_multiprocessor(),
                              bool async = compiled_arch(attention_stats_kernel<8, 8>) >= 80) {
    const int most = std::max({mma_warps<Tiles>(m, async)...});
    (void)((mma_warps<Tiles>(m, async) == most && (launch(Tiles()), true)) || ...);
}

/* Calls run with the tiles of head dimension 64 or 128. */
template <typename Run>
static inline void mma_with_tiles(int HD, const Run& run) {
    if (HD == 64) {
        run(MmaTiles<64>());
    } else {
        run(MmaTiles<128>());
    }
}

static inline void attention_mma_forward(floatX* out, float* lse, const floatX* qkv, int B, const AttentionArgs& s,
                                         cudaStream_t stream) {
    mma_with_tiles(s.HD, [&](auto of) {
        mma_choose(typename decltype(of)::Forward(),
                   [&](auto tiles) { attention_mma_forward_tiles<decltype(tiles)>(out, lse, qkv, B, s, stream); });
    });
}

static inline void attention_mma_backward(floatX* dqkv, const float2* stats, const floatX* dout, const floatX* qkv, int B,
                                          const AttentionArgs& s, cudaStream_t stream) {
    mma_with_tiles(s.HD, [&](auto of) {
        mma_choose(typename decltype(of)::BackwardKV(),
                   [&](auto tiles) { attention_mma_backward_kv<decltype(tiles)>(dqkv, stats, dout, qkv, B, s, stream); });
        mma_choose(typename decltype(of)::BackwardQ(),
                   [&](auto tiles) { attention_mma_backward_q<decltype(tiles)>(dqkv, stats, dout, qkv, B, s, stream); });
    });
}

#endif  // PRECISION_FP32
#endif
