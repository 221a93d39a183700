/* attention_sm90_walk.cuh -- the backward pass of attention in one walk over all pairs of tiles. It takes five products instead
 * of the seven of attention_sm90.cuh, and the scores and their exponentials once instead of twice. Code for sm_90a, HD 64 and
 * 128, 16-bit builds, rows that are one document. Formulas and layouts: attention.cuh.
 *
 * A block owns 128 keys and walks over q and dout of all query heads of the group, like the kernel of dK and dV in
 * attention_sm90.cuh. It also computes its keys' part of dq for each tile of 64 queries:
 *
 *   S^T = k q^T     dP^T = v dout^T     dv += p^T dout     dk += ds^T q     part of dq = ds k
 *
 * The two consumer warpgroups have 64 keys each. Both write their ds into shared memory, transposed. Each then computes half
 * of the columns of this part, over all 128 keys. The parts are added up in fp32 in memory, mostly in the L2 cache. A last
 * kernel turns the sums back by RoPE and rounds them.
 *
 * So that every run gives the same bits, the parts of a tile of queries are added in a fixed order, that in which blocks finish
 * them anyway (attention_walk.h). Each part waits for a flag that counts the parts before it. One thread of a block waits for
 * flags before the consumers add, another sets them afterwards. So all blocks must be resident at once. The launch is
 * cooperative: blocks start when there is room for all of them, and the driver refuses a grid for which there never is.
 * A kernel that still holds a multiprocessor must be able to end without this kernel.
 *
 * A turn of a consumer's loop adds a tile to dv, dk and dq and computes p and ds of the next one. With registers for all
 * (APART), S^T comes first, and the other products run under the exponentials:
 *
 *   issued     S^T"  dq  dP^T"  dv  dk                 " of the next tile
 *   computed                exp"         add dq   ds"
 *
 * At head_dim 128 S^T gets registers when dv is done. dq takes the registers of ds, and is added before dP^T begins:
 *
 *   issued     dv  dq  dk  S^T"         dP^T"
 *   computed                    add dq         exp"  ds"
 *
 * Speed beside the two kernels: dev/results/nvidia-h200-kernels.md, nvidia-h100-attention.md.
 */
#ifndef LLMC_ATTENTION_SM90_WALK_CUH
#define LLMC_ATTENTION_SM90_WALK_CUH

#include "llmc/attention_common.cuh"
#include "llmc/attention_sm90_parts.cuh"  // defines: ScoresLeft, wgmma_values, wgmma_store
#include "llmc/attention_walk.h"          // defines: WALK_KEYS, WalkOrder, WalkPiece, walk_next
#include "llmc/cuda/warpgroups.cuh"       // defines: WarpgroupSplit, Ring, tensor_map

constexpr int WALK_QUERIES = 64;  // of a tile

/* Returns the tiles of queries of a head. */
static inline int walk_query_tiles(int T) { return (int)ceil_div((size_t)T, (size_t)WALK_QUERIES); }

/* Returns the bytes of the sums of dq, and of their flags. */
static inline size_t walk_sums_bytes(int B, int NH, int T, int HD) {
    return (size_t)B * NH * walk_query_tiles(T) * (WALK_QUERIES * HD * sizeof(float) + sizeof(uint32_t));
}

#ifndef PRECISION_FP32

/* The producer writes it beside K and V of a piece; tile < 0: there are no more pieces. */
struct WalkNote {
    int head, tile;
};

/* Where parts of dq are added. Each query head of each sequence has `tiles` tiles of WALK_QUERIES queries. Each consumer's
 * half of a tile lies as its threads hold it. Each tile has a flag that counts the parts added. */
struct WalkSums {
    float* sums;
    uint32_t* flags;
    uint32_t tiles;
};

/* Shared memory holds K and V of KV_STAGES pieces of work, and q and dout of STAGES tiles. APART: whether registers are enough
 * for dq beside ds, and for the left operands of S and dP. */
template <int HD_, int STAGES_, int KV_STAGES_>
struct WalkTiles : WarpgroupSplit<2, 1> {
    static constexpr int HD = HD_, STAGES = STAGES_, KV_STAGES = KV_STAGES_, TURNS = 4;
    static constexpr bool APART = HD == 64;
    static constexpr int BM = WALK_QUERIES, BN = WALK_KEYS;
    static constexpr int KV_BYTES = BN * HD * 2, Q_BYTES = BM * HD * 2, STATS_BYTES = BM * 8, DS_BYTES = BM * BN * 2;
    static constexpr int SMEM = 2 * KV_STAGES * KV_BYTES + STAGES * (2 * Q_BYTES + STATS_BYTES) + 2 * DS_BYTES + 1024;
};

/* walk_store_ds() stores ds^T of a warp's 16 keys, an operand over 64 queries, into a tile of 64 queries by 64 keys.
 * walk_ds_row() returns the address of this thread's row in the tile at address `tile`. */
__device__ __forceinline__ uint32_t walk_ds_row(uint32_t tile) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    return tile + (lane / 16 * 8 + lane % 8) * 128 + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
}
__device__ __forceinline__ void walk_store_ds(uint32_t row, const uint32_t (&ds)[WALK_QUERIES / 16][4]) {
#pragma unroll
    for (int i = 0; i < WALK_QUERIES / 16; i++) { store_matrix_x4_transposed(row + i * 16 * 128, ds[i]); }
}

/* Returns a, or else b. */
template <bool FIRST, int M, int N>
__device__ __forceinline__ auto& walk_either(float (&a)[M], float (&b)[N]) {
    if constexpr (FIRST) {
        return a;
    } else {
        return b;
    }
}

/* Calls visit(flag, parts before) for each tile of queries to which this block adds its part, in its order. */
template <typename Visit>
__device__ __forceinline__ void walk_flags(const WalkOrder& order, const WalkSums& sums, int group, const Visit& visit) {
#pragma unroll 1
    for (WalkPiece piece = walk_begin(order, blockIdx.x); piece.head < order.heads; piece = walk_next(order, piece)) {
        const uint32_t tile = walk_tile(order, piece);
        if (tile >= order.tiles) { continue; }
        uint32_t row = piece.head * group;  // of flags
        compute_here(row);
        constexpr uint32_t RATIO = WALK_KEYS / WALK_QUERIES;
        uint32_t* flag = sums.flags + (size_t)row * sums.tiles + tile * RATIO;
#pragma unroll 1
        for (int h = 0; h < group; h++, flag += tile * RATIO) {
#pragma unroll 1
            for (uint32_t m = tile * RATIO; m < sums.tiles; m++, flag++) { visit(flag, walk_before(order, tile, m / RATIO)); }
        }
    }
}

template <typename Tiles>
__global__ void __launch_bounds__(Tiles::THREADS, 1)
    attention_walk_kernel(floatX* dqkv, WalkSums sums, const float2* stats, const __grid_constant__ CUtensorMap q_map,
                          const __grid_constant__ CUtensorMap kv_map, const __grid_constant__ CUtensorMap dout_map,
                          AttentionArgs s, WalkOrder order) {
#if PTX_HAS_SM90A
    constexpr int HD = Tiles::HD, BM = Tiles::BM, BN = Tiles::BN, TURNS = Tiles::TURNS;
    constexpr bool APART = Tiles::APART;
    constexpr uint32_t KV_BYTES = Tiles::KV_BYTES, Q_BYTES = Tiles::Q_BYTES, STATS_BYTES = Tiles::STATS_BYTES;
    extern __shared__ __align__(128) char smem[];
    __shared__ uint64_t kv_barriers[2 * Tiles::KV_STAGES], q_barriers[2 * Tiles::STAGES], ds_barriers[2];
    __shared__ WalkNote notes[Tiles::KV_STAGES];
    __shared__ uint64_t turn_barriers[2 * TURNS], added_barriers[TURNS];
    // layout: K, V of each of KV_STAGES; q, dout of each of STAGES; ds of two tiles; statistics of each of STAGES
    const char* all_stats =
        wgmma_tiles(smem) + 2 * Tiles::KV_STAGES * KV_BYTES + 2 * Tiles::STAGES * Q_BYTES + 2 * Tiles::DS_BYTES;
    const uint32_t kv_smem = shared_address(wgmma_tiles(smem)), q_smem = kv_smem + 2 * Tiles::KV_STAGES * KV_BYTES;
    const uint32_t ds_smem = q_smem + 2 * Tiles::STAGES * Q_BYTES, stats_smem = shared_address(all_stats);
    const uint32_t ds_full = shared_address(ds_barriers);
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), group = s.NH / s.NKV;
    Ring<Tiles::KV_STAGES> kv_ring(kv_barriers);
    Ring<Tiles::STAGES> q_ring(q_barriers);
    // full: it is this block's turn to add its part of a tile; empty: the tile's flag is set. Between the two, all consumers
    // arrive at added_barriers once they have added their parts
    Ring<TURNS> turns(turn_barriers);
    auto added = [&]() { return shared_address(added_barriers) + turns.stage * 8; };
    if (threadIdx.x == 0) {
        kv_ring.init(8);
        q_ring.init(8);
        turns.init(1);
        for (int i = 0; i < TURNS; i++) { barrier_init(shared_address(added_barriers) + i * 8, 8); }
        barrier_init(ds_full, 8);
        barrier_init(ds_full + 8, 8);
        barrier_init_done();
    }
    __syncthreads();
    if (warpgroup == 0) {
        registers_lower<Tiles::PRODUCER>();
        if (threadIdx.x == 0) {  // copies q and dout
#pragma unroll 1
            for (WalkPiece piece = walk_begin(order, blockIdx.x); piece.head < order.heads; piece = walk_next(order, piece)) {
                const int tile = (int)walk_tile(order, piece);
                if (tile >= (int)order.tiles) { continue; }
                const int b = (int)piece.head / s.NKV;
                int row = (int)piece.head * group;  // of query heads
#pragma unroll 1
                for (int left = group; left > 0; left--, row++) {
#pragma unroll 1
                    for (int q0 = tile * BN; q0 < s.T; q0 += BM) {
                        const uint32_t q_tile = q_smem + q_ring.stage * 2 * Q_BYTES;
                        const int block = (row - b * s.NH) * (HD / 64);
                        q_ring.begin_fill(2 * Q_BYTES + STATS_BYTES);
                        copy_box_4d(q_tile, &q_map, 0, q0, block, b, q_ring.full());
                        copy_box_4d(q_tile + Q_BYTES, &dout_map, 0, q0, block, b, q_ring.full());
                        copy_bytes(stats_smem + q_ring.stage * STATS_BYTES, stats + (size_t)row * s.stat_rows + q0, STATS_BYTES,
                                   q_ring.full());
                        q_ring.advance();
                    }
                }
            }
        } else if (threadIdx.x == 96) {  // copies K and V
#pragma unroll 1
            for (WalkPiece piece = walk_begin(order, blockIdx.x); piece.head < order.heads; piece = walk_next(order, piece)) {
                const int tile = (int)walk_tile(order, piece), b = (int)piece.head / s.NKV, kv_head = (int)piece.head % s.NKV;
                if (tile >= (int)order.tiles) { continue; }
                const uint32_t kv_tile = kv_smem + kv_ring.stage * 2 * KV_BYTES;
                barrier_wait(kv_ring.empty(), kv_ring.phase ^ 1);
                notes[kv_ring.stage] = {(int)piece.head, tile};
                barrier_arrive_expect(kv_ring.full(), 2 * KV_BYTES);
                copy_box_4d(kv_tile, &kv_map, 0, tile * BN, (s.NH + kv_head) * (HD / 64), b, kv_ring.full());
                copy_box_4d(kv_tile + KV_BYTES, &kv_map, 0, tile * BN, (s.NH + s.NKV + kv_head) * (HD / 64), b, kv_ring.full());
                kv_ring.advance();
            }
            barrier_wait(kv_ring.empty(), kv_ring.phase ^ 1);
            notes[kv_ring.stage].tile = -1;
            barrier_arrive(kv_ring.full());
        } else if (threadIdx.x == 32) {  // waits for flags
            walk_flags(order, sums, group, [&](uint32_t* flag, uint32_t before) {
                barrier_wait(turns.empty(), turns.phase ^ 1);
                flag_wait(flag, before);
                barrier_arrive(turns.full());
                turns.advance();
            });
        } else if (threadIdx.x == 64) {  // sets them
            walk_flags(order, sums, group, [&](uint32_t* flag, uint32_t before) {
                barrier_wait(added(), turns.phase);
                flag_set(flag, before + 1);
                barrier_arrive(turns.empty());
                turns.advance();
            });
        }
    } else {
        registers_raise<Tiles::CONSUMER>();
        const int consumer = warpgroup - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        uint32_t ds_row = walk_ds_row(ds_smem + consumer * BM * 128), key_row = warp * 16 + g - t * 2;
        compute_here(ds_row);
        compute_here(key_row);
        float dk[HD / 2], dv[HD / 2], p[BM / 2], ds[BM / 2], more[APART ? HD / 4 : 1];
        float(&dq)[HD / 4] = walk_either<APART>(more, ds);
        uint32_t p_operand[BM / 16][4], ds_operand[BM / 16][4];
        for (;;) {
            kv_ring.wait_full();
            const WalkNote note = notes[kv_ring.stage];
            if (note.tile < 0) { break; }
            const int k0 = note.tile * BN, my_k0 = k0 + consumer * 64;
            const uint32_t k_tile = kv_smem + kv_ring.stage * 2 * KV_BYTES;
            const ScoresLeft<HD, BN, APART> k_left(k_tile + consumer * 64 * 128);
            const ScoresLeft<HD, BN, APART> v_left(k_tile + KV_BYTES + consumer * 64 * 128);
            const uint32_t k_columns = matrix_columns(k_tile + consumer * (HD == 64 ? 64 : BN * 128), BN * 128);
            int q0 = k0;  // first query of the tile
            // where this thread adds its part of dq. Before `first_until` this part is the first part of its tile
            uint32_t row = note.head * group, thread = threadIdx.x - 128;
            compute_here(row);
            compute_here(thread);
            float* part = sums.sums + ((size_t)row * sums.tiles + k0 / BM) * (BM * HD) +
                          (thread / 128 * (HD / 16) * 128 + thread % 128) * 4;
            const int first_until = note.tile + 1 == (int)order.blocks ? s.T : note.tile < (int)order.blocks ? k0 + BN : 0;
            uint32_t q_tile;
            // S^T and dP^T of the tile, once it has arrived
            auto begin_scores = [&]() {
                q_tile = q_smem + q_ring.stage * 2 * Q_BYTES;
                q_ring.wait_full();
                wgmma_fence();
                k_left.product(p, matrix_rows(q_tile));
                wgmma_commit();
            };
            auto begin_dp = [&]() {
                v_left.product(ds, matrix_rows(q_tile + Q_BYTES));
                wgmma_commit();
            };
            // p from S^T
            auto exponentials = [&]() {
                fragment_p_transposed(p, (const float4*)(all_stats + q_ring.stage * STATS_BYTES) + t, s.scale_log2);
                if (q0 < my_k0 + 63) {
                    // the first column of this tile, counted from 2 t, whose query sees key g of the warp
                    fragment_clear_before(p, my_k0 + (int)key_row - q0);
                }
            };
            // ds from p and dP^T
            auto gradients = [&]() {
                fragment_ds_transposed(ds, p, (const float4*)(all_stats + q_ring.stage * STATS_BYTES) + t);
            };
            auto share_ds = [&]() {
                fragment_operand(ds_operand, ds);
                walk_store_ds(ds_row + turns.stage % 2 * Tiles::DS_BYTES, ds_operand);
                fence_async_readers();
                ring_release(ds_full + turns.stage % 2 * 8);
            };
            // the part of dq, once both consumers have stored ds of the tile
            auto begin_dq = [&]() {
                const uint32_t ds_rows = matrix_rows(ds_smem + turns.stage % 2 * Tiles::DS_BYTES);
                barrier_wait(ds_full + turns.stage % 2 * 8, turns.stage / 2);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < BN / 16; k++) {
                    wgmma_shared<HD / 2, 1>(dq, ds_rows + k / 4 * BM * 8 + k % 4 * 2, k_columns + k * 128, k > 0);
                }
                wgmma_commit();
            };
            auto begin_dv = [&](uint32_t q_tile) {
                wgmma_values<HD, BM>(dv, p_operand, matrix_columns(q_tile + Q_BYTES, BM * 128));
                wgmma_commit();
            };
            auto begin_dk = [&](uint32_t q_tile) {
                wgmma_values<HD, BM>(dk, ds_operand, matrix_columns(q_tile, BM * 128));
                wgmma_commit();
            };
            // first: it is the first part of the tile
            auto add_dq = [&](bool first) {
                turns.wait_full();
                wgmma_hold(dq);
#pragma unroll
                for (int i = 0; i < HD / 16; i++) {
                    const float4 x = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
                    if (first) {
                        *(float4*)(part + i * 512) = x;
                    } else {
                        add_in_memory(part + i * 512, x);
                    }
                }
                ring_release(added());
                turns.advance();
            };
            fragment_clear(dk);
            fragment_clear(dv);
            begin_scores();
            begin_dp();
            wgmma_finish<1>(p);
            exponentials();
            fragment_operand(p_operand, p);
            wgmma_finish<0>(ds);
            gradients();
            share_ds();
#pragma unroll 1
            for (int count = group * ((s.T - k0 + BM - 1) / BM); count > 1; count--) {
                const uint32_t q_before = q_tile, release = q_ring.empty();
                const bool first = q0 < first_until, last = q0 + BM >= s.T;
                q0 = last ? k0 : q0 + BM;
                q_ring.advance();
                if constexpr (APART) {
                    begin_scores();
                    begin_dq();
                    begin_dp();
                    begin_dv(q_before);
                    begin_dk(q_before);
                    wgmma_finish<4>(p);
                    exponentials();
                    wgmma_wait<3>();
                    add_dq(first);
                    wgmma_finish<2>(ds);
                    gradients();
                    wgmma_wait<0>();
                    fragment_operand(p_operand, p);
                } else {
                    wgmma_fence();
                    begin_dv(q_before);
                    begin_dq();
                    begin_dk(q_before);
                    wgmma_wait<2>();  // dv is complete, and the registers of p's operand are free for S
                    begin_scores();
                    wgmma_wait<2>();
                    add_dq(first);
                    wgmma_fence();
                    begin_dp();
                    wgmma_finish<1>(p);
                    exponentials();
                    fragment_operand(p_operand, p);
                    wgmma_finish<0>(ds);
                    gradients();
                }
                ring_release(release);
                share_ds();
                part += (last ? k0 + BM : BM) * HD;
            }
            begin_dq();
            begin_dv(q_tile);
            begin_dk(q_tile);
            wgmma_wait<2>();
            add_dq(q0 < first_until);
            wgmma_wait<0>();
            ring_release(q_ring.empty());
            q_ring.advance();
            wgmma_hold(dk);
            wgmma_hold(dv);
            const int head = notes[kv_ring.stage].head, warp_k0 = notes[kv_ring.stage].tile * BN + consumer * 64 + warp * 16;
            ring_release(kv_ring.empty());
            kv_ring.advance();
            const int b = head / s.NKV, kv_head = head - b * s.NKV;
            floatX* dk_rows = attention_row(dqkv, (size_t)b * s.T + warp_k0, s.qkv_pitch, s.NH + kv_head, HD);
            if (s.cos_sin) { fragment_turn_back<HD>(dk, s, b, warp_k0); }
            wgmma_store<HD>(dk_rows, s.qkv_pitch, s.T - warp_k0, dk, s.scale, s.scale);
            wgmma_store<HD>(dk_rows + (size_t)s.NKV * HD, s.qkv_pitch, s.T - warp_k0, dv, 1, 1);
        }
    }
#else
    __trap();
#endif
}

/* Writes dq of a tile of queries from its sums; a block takes one tile. */
template <int HD>
__global__ void __launch_bounds__(128) attention_walk_dq_kernel(floatX* dqkv, WalkSums sums, AttentionArgs s) {
    const int tile = blockIdx.x % sums.tiles, h = blockIdx.x / sums.tiles, b = blockIdx.y;
    const int row = tile * WALK_QUERIES + threadIdx.x / 32 * 16;
    const float* from = sums.sums + (((size_t)b * s.NH + h) * sums.tiles + tile) * (WALK_QUERIES * HD) + threadIdx.x * 4;
    float dq[HD / 2];
#pragma unroll
    for (int i = 0; i < HD / 8; i++) {
        const Vec<float, 4> x = load_stream<4>(from + i * 512);
#pragma unroll
        for (int k = 0; k < 4; k++) { dq[4 * i + k] = x.v[k]; }
    }
    if (s.cos_sin) { fragment_turn_back<HD>(dq, s, b, row); }
    wgmma_store<HD>(attention_row(dqkv, (size_t)b * s.T + row, s.qkv_pitch, h, HD), s.qkv_pitch, s.T - row, dq, s.scale,
                    s.scale);
}

// ---------------------------------------------------------------------------------------------------------------------
// launcher

/* Fills dqkv. stats: from attention_stats(); sums: walk_sums_bytes() bytes; order: of B sequences */
template <typename Tiles>
static inline void attention_walk_tiles(floatX* dqkv, float* sums, const float2* stats, const floatX* dout, const floatX* qkv,
                                        const WalkOrder& order, const AttentionArgs& s, cudaStream_t stream) {
    constexpr int HD = Tiles::HD;
    const int B = (int)order.heads / s.NKV;
    const int tiles = walk_query_tiles(s.T);
    const size_t all_tiles = (size_t)B * s.NH * tiles;
    if ((uint64_t)order.heads * order.tiles > INT32_MAX) { die("attention: B %d rows of %d tokens are too many", B, s.T); }
    const WalkSums where = {sums, (uint32_t*)(sums + all_tiles * WALK_QUERIES * HD), (uint32_t)tiles};
    CUDA_CHECK(cudaMemsetAsync(where.flags, 0, all_tiles * sizeof *where.flags, stream));
    const size_t width = (size_t)(s.NH + 2 * s.NKV) * HD;
    const dim3 blocks((order.step * order.together));
    const cudaError_t status = attention_launch_resident(
        attention_walk_kernel<Tiles>, blocks, Tiles::THREADS, Tiles::SMEM, stream, dqkv, where, stats,
        tensor_map(qkv, B, s.T, width, s.qkv_pitch, Tiles::BM, HD), tensor_map(qkv, B, s.T, width, s.qkv_pitch, Tiles::BN, HD),
        tensor_map(dout, B, s.T, (size_t)s.NH * HD, s.out_pitch, Tiles::BM, HD), s, order);
    cuda_check(status, "launch of attention_walk_kernel, all blocks at once", __FILE__, __LINE__);
    attention_launch(attention_walk_dq_kernel<HD>, dim3((unsigned)(tiles * s.NH), (unsigned)B), 128, 0, stream, dqkv, where, s);
}

static inline void attention_walk_backward(floatX* dqkv, float* sums, const float2* stats, const floatX* dout,
                                           const floatX* qkv, const WalkOrder& order, const AttentionArgs& s,
                                           cudaStream_t stream) {
    auto* const launch = s.HD == 64 ? attention_walk_tiles<WalkTiles<64, 5, 2>> : attention_walk_tiles<WalkTiles<128, 3, 1>>;
    launch(dqkv, sums, stats, dout, qkv, order, s, stream);
}

#endif  // PRECISION_FP32
#endif
