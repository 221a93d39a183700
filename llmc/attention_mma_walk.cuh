/* attention_mma_walk.cuh -- the backward pass of attention in one walk, in five products instead of the seven of
 * attention_mma.cuh. Code for sm_80 and newer, HD 64 and 128, 16-bit builds, rows that are one document. The order of work and
 * of sums: attention_walk.cuh. Formulas and layouts: attention.cuh.
 *
 * Eight warps share each product of a turn of the loop, a tile of 64 queries. Which part of it a warp computes:
 *
 *   S^T, dP^T   32 of 128 keys, 32 of 64 queries
 *   dv, dk      32 of 128 keys, half of the columns
 *   dq          32 of 64 queries, a quarter of the columns
 *
 * So each warp reads little of the tiles: shared memory, not the tensor cores, limits this kernel. p^T and ds^T pass through
 * shared memory, since the next three products divide them otherwise.
 */
#ifndef LLMC_ATTENTION_MMA_WALK_CUH
#define LLMC_ATTENTION_MMA_WALK_CUH

#include "llmc/attention_mma.cuh"   // defines: TileCopy, mma_scores, mma_values
#include "llmc/attention_walk.cuh"  // defines: WalkOrder, WalkPiece, WalkSums

#ifndef PRECISION_FP32

/* Shared memory holds K, V, p^T, ds^T, then q, dout and statistics of two tiles. */
template <int HD_>
struct MmaWalkTiles {
    static constexpr int HD = HD_, BM = WALK_QUERIES, BN = WALK_KEYS, THREADS = BN * BM / 32;
    static constexpr int KV_BYTES = BN * HD * 2, P_BYTES = BN * BM * 2, Q_BYTES = BM * HD * 2, STAGE = 2 * Q_BYTES + BM * 8;
    static constexpr int SMEM = 2 * KV_BYTES + 2 * P_BYTES + 2 * STAGE;
};

/* Stores a warp's 32 keys by 32 queries, rounded, into a tile of 128 keys by 64 queries. */
__device__ __forceinline__ void mma_walk_share(char* tile, int key, int query, const float (&x)[2][16]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
            char* at = tile + (key + i * 16 + g) * WALK_QUERIES * 2 + (((query / 8 + n) ^ g) << 4) + t * 4;
            *(uint32_t*)at = pack2(x[i][4 * n], x[i][4 * n + 1]);
            *(uint32_t*)(at + 8 * WALK_QUERIES * 2) = pack2(x[i][4 * n + 2], x[i][4 * n + 3]);
        }
    }
}

/* Adds to acc, of 32 keys from `key` on and half of the columns, p^T b. p: a tile of 128 keys by 64 queries; b: of 64 queries
 * */
template <int HD>
__device__ __forceinline__ void mma_walk_keys(float (&acc)[2][HD / 4], uint32_t p_tile, int key, uint32_t b_tile, int half) {
    const int lane = threadIdx.x % 32;
    const uint32_t row = p_tile + (key + lane % 16) * WALK_QUERIES * 2;
#pragma unroll
    for (int k = 0; k < WALK_QUERIES; k += 16) {
        uint32_t a[2][1][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            load_matrix_x4(a[i][0], row + i * 16 * WALK_QUERIES * 2 + (((k / 8 + lane / 16) ^ lane % 8) << 4));
        }
        mma_values<HD, 2, 1, HD / 2>(acc, a, b_tile, k, half);
    }
}

/* Adds to dq, of 32 queries from `query` on and a quarter of the columns, ds k. ds is stored transposed, 128 keys by 64
 * queries. */
template <int HD>
__device__ __forceinline__ void mma_walk_queries(float (&dq)[2][HD / 8], uint32_t ds_tile, int query, uint32_t k_tile,
                                                 int quarter) {
    const int lane = threadIdx.x % 32;
    const uint32_t row = ds_tile + (lane / 16 * 8 + lane % 8) * WALK_QUERIES * 2;
#pragma unroll
    for (int k = 0; k < WALK_KEYS; k += 16) {
        uint32_t a[2][1][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            load_matrix_x4_trans(a[i][0], row + k * WALK_QUERIES * 2 + (((query / 8 + i * 2 + lane / 8 % 2) ^ lane % 8) << 4));
        }
        mma_values<HD, 2, 1, HD / 4>(dq, a, k_tile, k, quarter);
    }
}

template <typename Tiles>
__global__ void __launch_bounds__(Tiles::THREADS, 1)
    attention_mma_walk_kernel(floatX* dqkv, WalkSums sums, const float2* stats, const floatX* dout, const floatX* qkv,
                              AttentionArgs s, WalkOrder order) {
    if constexpr (!MMA_BODY_IS_ASYNC) {
        __trap();
    } else {
        constexpr int HD = Tiles::HD, BM = Tiles::BM, BN = Tiles::BN, RATIO = BN / BM;
        extern __shared__ __align__(128) char smem[];
        char *p_tile = smem + 2 * Tiles::KV_BYTES, *ds_tile = p_tile + Tiles::P_BYTES, *stages = ds_tile + Tiles::P_BYTES;
        const uint32_t k_smem = shared_address(smem), v_smem = k_smem + Tiles::KV_BYTES;
        const uint32_t p_smem = shared_address(p_tile), ds_smem = p_smem + Tiles::P_BYTES;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, group = s.NH / s.NKV;
        const int key = warp / 2 * 32, half = warp % 2, query = half * 32, quarter = warp / 2;  // this warp's parts
        TileCopy<BN, HD, Tiles::THREADS, true> copy_kv;
        TileCopy<BM, HD, Tiles::THREADS, true> copy_q;
#pragma unroll 1
        for (WalkPiece piece(order); piece.head < order.heads; piece.advance(order)) {
            const uint32_t tile = piece.tile(order);
            if (tile >= order.tiles) { continue; }
            const int b = (int)piece.head / s.NKV, kv_head = (int)piece.head % s.NKV, k0 = (int)tile * BN;
            const size_t first_row = (size_t)b * s.T;
            // loads q, dout and statistics of head h from query q0 on; all are zeros past the end and contribute nothing
            auto start_stage = [&](int stage, int h, int q0) {
                const uint32_t q_smem = shared_address(stages) + stage * Tiles::STAGE;
                copy_q.start(q_smem, attention_row(qkv, first_row + q0, s.qkv_pitch, h, HD), s.qkv_pitch, s.T - q0);
                copy_q.start(q_smem + Tiles::Q_BYTES, attention_row(dout, first_row + q0, s.out_pitch, h, HD), s.out_pitch,
                             s.T - q0);
                if (threadIdx.x < BM) {
                    const bool inside = q0 + (int)threadIdx.x < s.T;
                    copy_async<8>(q_smem + 2 * Tiles::Q_BYTES + threadIdx.x * 8,
                                  stats + ((size_t)b * s.NH + h) * s.stat_rows + (inside ? q0 + threadIdx.x : 0), inside);
                }
                copy_async_commit();
            };
            const floatX* k_rows = attention_row(qkv, first_row + k0, s.qkv_pitch, s.NH + kv_head, HD);
            copy_kv.start(k_smem, k_rows, s.qkv_pitch, s.T - k0);
            copy_kv.start(v_smem, k_rows + (size_t)s.NKV * HD, s.qkv_pitch, s.T - k0);
            start_stage(0, kv_head * group, k0);

            float dk[2][HD / 4], dv[2][HD / 4];
            mma_clear(dk);
            mma_clear(dv);
            int h = kv_head * group, q0 = k0;
            // the tile's place among all tiles of queries, and the parts of its dq that are added before this one
            uint32_t at = piece.head * group * sums.tiles + tile * RATIO, before = 0, last_at = 0, last_before = 0;
            const int count = group * ((s.T - k0 + BM - 1) / BM);
#pragma unroll 1
            for (int n = 0; n < count; n++) {
                copy_async_wait<0>();
                __syncthreads();  // the tile has arrived; all have added to dq of the last one, and need its data no more
                if (n > 0 && threadIdx.x == 0) { flag_set(sums.flags + last_at, last_before + 1); }
                before = order.before(tile, (uint32_t)(q0 / BN));
                if (threadIdx.x == 32) { flag_wait(sums.flags + at, before); }
                const bool row_ends = q0 + BM >= s.T;
                const int next_h = h + row_ends, next_q0 = row_ends ? k0 : q0 + BM;
                if (n + 1 < count) { start_stage((n + 1) % 2, next_h, next_q0); }
                const char* tiles = stages + n % 2 * Tiles::STAGE;
                const uint32_t q_smem = shared_address(tiles), dout_smem = q_smem + Tiles::Q_BYTES;
                {
                    const float4* stat = (const float4*)(tiles + 2 * Tiles::Q_BYTES) + query / 2 + t;  // of two queries each
                    float p[2][16], ds[2][16];
                    mma_clear(p);
                    mma_scores<HD, 2, 4>(p, k_smem, key, q_smem, query);
                    // the first of these columns, counted from column 2 t, whose query sees key g of the warp
                    const int first = k0 + key + g - q0 - query - t * 2;
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        fragment_p_transposed(p[i], stat, s.scale_log2);
                        if (q0 < k0 + BN) { fragment_clear_before(p[i], first, i * 16); }
                    }
                    mma_walk_share(p_tile, key, query, p);
                    mma_clear(ds);
                    mma_scores<HD, 2, 4>(ds, v_smem, key, dout_smem, query);
#pragma unroll
                    for (int i = 0; i < 2; i++) { fragment_ds_transposed(ds[i], p[i], stat); }
                    mma_walk_share(ds_tile, key, query, ds);
                }
                __syncthreads();  // p and ds are complete, and it is this block's turn to add
                mma_walk_keys<HD>(dv, p_smem, key, dout_smem, half);
                mma_walk_keys<HD>(dk, ds_smem, key, q_smem, half);
                float dq[2][HD / 8];
                mma_clear(dq);
                mma_walk_queries<HD>(dq, ds_smem, query, k_smem, quarter);
                float* part = sums.sums + (size_t)at * (BM * HD) + (quarter * (HD / 32) * 4 + half * 2) * 128 + lane;
#pragma unroll
                for (int i = 0; i < 2; i++) {
#pragma unroll
                    for (int j = 0; j < HD / 8; j++) {
                        float* to = part + (j / 4 * 4 + i) * 128 + j % 4 * 32;
                        if (before > 0) {
                            add_in_memory(to, dq[i][j]);
                        } else {
                            *to = dq[i][j];
                        }
                    }
                }
                last_at = at, last_before = before;
                at += row_ends ? tile * RATIO + 1 : 1;
                h = next_h, q0 = next_q0;
            }
            __syncthreads();  // all have added to dq of the last tile, and need K and V no more
            if (threadIdx.x == 0) { flag_set(sums.flags + last_at, last_before + 1); }
            floatX* dk_rows = attention_row(dqkv, first_row + k0 + key, s.qkv_pitch, s.NH + kv_head, HD) + half * (HD / 2);
            const size_t to_dv = (size_t)s.NKV * HD;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                floatX* rows = dk_rows + i * 16 * s.qkv_pitch;
                const int valid = s.T - k0 - key - i * 16;
                fragment_store<HD / 2>(rows, s.qkv_pitch, valid, dk[i], s.scale, s.scale);
                fragment_store<HD / 2>(rows + to_dv, s.qkv_pitch, valid, dv[i], 1, 1);
            }
        }
    }
}

/* Returns whether this card and the code that it loaded have a walk for this head dimension. */
static inline bool attention_has_mma_walk(int HD) {
    const int bytes = HD == 64 ? MmaWalkTiles<64>::SMEM : MmaWalkTiles<128>::SMEM;
    return mma_is_async() && device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= bytes;
}

/* Fills dqkv. stats: from attention_stats(); sums: walk_sums_bytes() bytes */
template <int HD>
static inline void attention_mma_walk_backward(floatX* dqkv, float* sums, const float2* stats, const floatX* dout,
                                               const floatX* qkv, int B, const AttentionArgs& s, cudaStream_t stream) {
    typedef MmaWalkTiles<HD> Tiles;
    const WalkOrder order = walk_order(B, s.NKV, s.T, (uint32_t)device_attribute(cudaDevAttrMultiProcessorCount));
    const WalkSums where = walk_begin(sums, B, s, order, stream);
    const cudaError_t status =
        attention_launch_resident(attention_mma_walk_kernel<Tiles>, dim3(order.step * order.together), Tiles::THREADS,
                                  Tiles::SMEM, stream, dqkv, where, stats, dout, qkv, s, order);
    cuda_check(status, "launch of attention_mma_walk_kernel, all blocks at once", __FILE__, __LINE__);
    walk_finish<HD, false>(dqkv, where, B, s, stream);
}

#endif  // PRECISION_FP32
#endif
