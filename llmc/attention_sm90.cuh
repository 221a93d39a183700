/* attention_sm90.cuh -- the attention kernels with Hopper's own instructions (code for sm_90a): products by wgmma, tiles loaded
 * by the tensor memory accelerator (TMA), registers moved from the producer to the consumers. HD 64 and 128, 16-bit builds.
 * Formulas, layouts and the order of sums: attention.cuh. The kernels of attention_mma.cuh are the oracle. The split into a
 * producer and consumers that take turns follows FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608).
 *
 * A block is a producer and two or three consumer warpgroups, which hand tiles over through a ring of buffers:
 *
 *   producer     fill 0   fill 1   fill 2 | wait empty 0, fill 0 ...
 *                  |        |        |    ^
 *                full     full     full  empty       barriers in shared memory
 *                  v        v        v    |
 *   consumer 0   S dP | exp, ds |        S dP | exp, ds | ...
 *   consumer 1       S dP | exp, ds |        S dP | ...
 *
 * The producer is one thread. It runs ahead by the ring's length, also into the block's next piece of work. A consumer has 64
 * rows of the block's own tile; while one consumer computes exponentials, the tensor cores work for another.
 *
 *   forward   owns queries, walks over K and V. S = q k^T, out += p v. S of the next tile is issued before p v of this one,
 *             so that both run under the softmax.
 *   dK, dV    owns keys, walks over q and dout of all query heads of the group. S^T = k q^T, dP^T = v dout^T, dv += p^T dout,
 *             dk += ds^T q. Transposed, p^T and ds^T already lie in registers as left operands of these products.
 *   dQ        owns queries, walks over K and V. S = q k^T, dP = dout v^T, dq += ds k. It runs before the kernel of dK and dV
 *             and computes D = rowsum(dout * out) of its queries for both.
 *
 * Tiles lie in shared memory in blocks of 64 columns with 128-byte swizzle (ptx.cuh), as TMA writes them. Sums over head_dim
 * read a tile by rows, sums over tokens read it by columns. Each operand has a tensor map with the dimensions (64 columns,
 * T tokens, blocks of a row, B sequences), so tokens past T read as zeros, whatever memory follows them.
 *
 * The backward kernels, too, keep their own products running while they compute. During exp, dP and the last product of the
 * previous tile run; during ds, S of the next tile runs.
 *
 *   issued       dk' dP            dv S"            dk' dP            dv S"          ' of the previous tile
 *   computed            exp               ds               exp              ds       " of the next tile
 *
 * ptxas keeps products running only if the loop reads the results of products that it issued in the same turn. So a turn begins
 * with all earlier products done, and issues the product that was held back first. At head_dim 128 the kernel of dK and dV has
 * no registers for ds and p of two tiles. It computes ds from the p that was rounded for dv (ROUNDED), then issues dv and dk
 * together. A left operand of S or dP that a warpgroup needs in every tile may stay in registers (LEFT): at 64 columns,
 * products with both operands in shared memory would take all of that memory's bandwidth.
 *
 * With documents, a block's tiles end where the documents of its first query or of its last key end. A warpgroup skips a tile
 * that none of its own tokens see, and masks a tile that a border of its documents divides.
 *
 * Blocks are persistent: each takes pieces of work from a list that is the same in every run. The list starts with the longest
 * pieces and is dealt out in turns of alternating direction: the block with the longest piece of one turn gets the shortest of
 * the next.
 *
 * On an H200 in BF16, T = 1024 to 8192, forward reaches 323 to 523 TFLOP/s at HD 64 and 474 to 692 at HD 128: 33 to 70 % of the
 * data sheet's 989. Backward reaches 301 to 389 and 320 to 459, 30 to 46 %, counting five of its seven products.
 */
#ifndef LLMC_ATTENTION_SM90_CUH
#define LLMC_ATTENTION_SM90_CUH

#include "llmc/attention_common.cuh"
#include "llmc/attention_sm90_parts.cuh"  // defines: WorkList, DocumentEdges, wgmma_store
#include "llmc/cuda/warpgroups.cuh"       // defines: WarpgroupSplit, Ring

#ifndef PRECISION_FP32

// ---------------------------------------------------------------------------------------------------------------------
// forward

/* WGS x 64 queries; keys in tiles of BN; shared memory holds the queries of Q_STAGES pieces of work. */
template <int HD_, int BN_, int WGS_, int STAGES_, int Q_STAGES_, int BLOCKS_>
struct WgmmaForwardTiles : WarpgroupSplit<WGS_, BLOCKS_> {
    static constexpr int HD = HD_, BN = BN_, WGS = WGS_, STAGES = STAGES_, Q_STAGES = Q_STAGES_, BLOCKS = BLOCKS_;
    static constexpr int BM = 64 * WGS, KV_BYTES = BN * HD * 2, Q_BYTES = BM * HD * 2;
    static constexpr int SMEM = Q_STAGES * Q_BYTES + STAGES * 2 * KV_BYTES + 1024;
    static_assert(STAGES >= 2, "the ring is too short");
};

template <typename Tiles, bool DOCUMENTS = false>
__global__ void __launch_bounds__(Tiles::THREADS, Tiles::BLOCKS)
    attention_forward_wgmma_kernel(floatX* out, float* lse, const __grid_constant__ CUtensorMap q_map,
                                   const __grid_constant__ CUtensorMap kv_map, AttentionArgs s, uint32_t B) {
#if PTX_HAS_SM90A
    constexpr int HD = Tiles::HD, BM = Tiles::BM, BN = Tiles::BN;
    constexpr uint32_t KV_BYTES = Tiles::KV_BYTES, Q_BYTES = Tiles::Q_BYTES;
    extern __shared__ __align__(128) char smem[];
    __shared__ uint64_t q_barriers[2 * Tiles::Q_STAGES], k_barriers[2 * Tiles::STAGES], v_barriers[2 * Tiles::STAGES];
    // layout: q of each of Q_STAGES; K of each of STAGES; V of each of STAGES
    const uint32_t q_smem = shared_address(wgmma_tiles(smem)), k_smem = q_smem + Tiles::Q_STAGES * Q_BYTES;
    const uint32_t v_smem = k_smem + Tiles::STAGES * KV_BYTES;
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), group = s.NH / s.NKV, tiles = (s.T + BM - 1) / BM;
    const uint32_t heads = B * s.NH;
    Ring<Tiles::Q_STAGES> q_ring(q_barriers);
    Ring<Tiles::STAGES> k_ring(k_barriers), v_ring(v_barriers);
    if (threadIdx.x == 0) {
        q_ring.init(4 * Tiles::WGS);
        k_ring.init(4 * Tiles::WGS);
        v_ring.init(4 * Tiles::WGS);
        barrier_init_done();
    }
    __syncthreads();
    WorkList work(heads * tiles);
    if (warpgroup == 0) {
        registers_lower<Tiles::PRODUCER>();
        if (threadIdx.x != 0) { return; }
        for (uint32_t piece; work.next(&piece);) {
            const int q0 = (tiles - 1 - (int)(piece / heads)) * BM, b = piece % heads / s.NH, h = piece % heads % s.NH;
            const int k_block = (s.NH + h / group) * (HD / 64), v_block = k_block + s.NKV * (HD / 64);
            q_ring.begin_fill(Q_BYTES);
            copy_box_4d(q_smem + q_ring.stage * Q_BYTES, &q_map, 0, q0, h * (HD / 64), b, q_ring.full());
            q_ring.advance();
            const int first_k0 = DOCUMENTS ? s.starts[(size_t)b * s.T + q0] / BN * BN : 0;
            for (int k0 = (min(s.T, q0 + BM) - 1) / BN * BN; k0 >= first_k0; k0 -= BN) {
                k_ring.begin_fill(KV_BYTES);
                copy_box_4d(k_smem + k_ring.stage * KV_BYTES, &kv_map, 0, k0, k_block, b, k_ring.full());
                k_ring.advance();
                v_ring.begin_fill(KV_BYTES);
                copy_box_4d(v_smem + v_ring.stage * KV_BYTES, &kv_map, 0, k0, v_block, b, v_ring.full());
                v_ring.advance();
            }
        }
    } else {
        registers_raise<Tiles::CONSUMER>();
        const int consumer = warpgroup - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        float acc[HD / 2], p[BN / 2], m[2], l[2], rescale[2];
        uint32_t operand[BN / 16][4];
        // turns p into exp(p - m) of the tile whose keys start at k0; `rescale` becomes the factor for all earlier sums
        auto softmax = [&](int k0, int my_q0, const DocumentEdges<DOCUMENTS>& first) {
            if (k0 + BN - 1 > my_q0) {
                // the last column of this tile, counted from 2 t, that row g of the warp sees
                fragment_mask_behind(p, my_q0 + warp * 16 + g - k0 - t * 2, ATTENTION_MASKED);
            }
            if (DOCUMENTS && k0 < first.warp) {
                const int columns[2] = {first.rows[0] - k0 - t * 2, first.rows[1] - k0 - t * 2};
                fragment_mask_before(p, columns, ATTENTION_MASKED);
            }
#pragma unroll
            for (int r = 0; r < 2; r++) { rescale[r] = fragment_softmax(p, r, m[r], l[r], s.scale_log2); }
        };
        for (uint32_t piece; work.next(&piece);) {
            const int q0 = (tiles - 1 - (int)(piece / heads)) * BM, b = piece % heads / s.NH, h = piece % heads % s.NH;
            const int my_q0 = q0 + consumer * 64, warp_q0 = my_q0 + warp * 16;
            const DocumentEdges<DOCUMENTS> first(s.starts + (size_t)b * s.T, s.T, 0, q0, my_q0, warp_q0 + 15, warp_q0 + g);
            q_ring.wait_full();
            const uint32_t q_rows = matrix_rows(q_smem + q_ring.stage * Q_BYTES + consumer * 64 * 128);
            int k0 = (min(s.T, q0 + BM) - 1) / BN * BN;
#pragma unroll 1
            for (; k0 > my_q0 + 63; k0 -= BN) {  // no query of this warpgroup sees these keys
                k_ring.pass();
                v_ring.pass();
            }
            fragment_clear(acc);
            m[0] = m[1] = ATTENTION_MASKED;
            l[0] = l[1] = 0;
            k_ring.wait_full();
            wgmma_fence();
            wgmma_scores<HD, BN, BM>(p, q_rows, matrix_rows(k_smem + k_ring.stage * KV_BYTES));
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_hold(p);
            ring_release(k_ring.empty());
            k_ring.advance();
            softmax(k0, my_q0, first);
            fragment_operand(operand, p);
            const int my_first_k0 = first.warpgroup / BN * BN;
#pragma unroll 1
            for (k0 -= BN; k0 >= my_first_k0; k0 -= BN) {
                k_ring.wait_full();
                wgmma_fence();
                wgmma_scores<HD, BN, BM>(p, q_rows, matrix_rows(k_smem + k_ring.stage * KV_BYTES));
                wgmma_commit();
                v_ring.wait_full();
                wgmma_fence();
                wgmma_values<HD, BN>(acc, operand, matrix_columns(v_smem + v_ring.stage * KV_BYTES, BN * 128));
                wgmma_commit();
                wgmma_wait<1>();
                wgmma_hold(p);
                ring_release(k_ring.empty());
                k_ring.advance();
                softmax(k0, my_q0, first);
                wgmma_wait<0>();
                wgmma_hold(acc);
                ring_release(v_ring.empty());
                v_ring.advance();
#pragma unroll
                for (int i = 0; i < HD / 2; i++) { acc[i] *= rescale[i % 4 / 2]; }
                fragment_operand(operand, p);
            }
            ring_release(q_ring.empty());
            q_ring.advance();
            v_ring.wait_full();
            wgmma_fence();
            wgmma_values<HD, BN>(acc, operand, matrix_columns(v_smem + v_ring.stage * KV_BYTES, BN * 128));
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_hold(acc);
            ring_release(v_ring.empty());
            v_ring.advance();
#pragma unroll
            for (int r = 0; r < 2; r++) {
                l[r] = fragment_row_sum(l[r]);
                const int at = warp_q0 + g + r * 8;
                if (t == 0 && at < s.T) { lse[((size_t)b * s.NH + h) * s.T + at] = m[r] * s.scale + logf(l[r]); }
            }
            wgmma_store<HD>(attention_row(out, (size_t)b * s.T + warp_q0, s.out_pitch, h, HD), s.out_pitch, s.T - warp_q0, acc,
                            1 / l[0], 1 / l[1]);
            if constexpr (DOCUMENTS) {  // the other warpgroups' queries see keys further back
#pragma unroll 1
                for (; k0 >= first.block / BN * BN; k0 -= BN) {
                    k_ring.pass();
                    v_ring.pass();
                }
            }
        }
    }
#else
    __trap();
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// dK, dV

/* WGS x 64 keys; queries in tiles of BM; shared memory holds K and V of KV_STAGES pieces of work. */
template <int HD_, int BM_, int WGS_, int STAGES_, int KV_STAGES_, int BLOCKS_, bool ROUNDED_>
struct WgmmaKVTiles : WarpgroupSplit<WGS_, BLOCKS_> {
    static constexpr bool ROUNDED = ROUNDED_;
    static constexpr int HD = HD_, BM = BM_, WGS = WGS_, STAGES = STAGES_, KV_STAGES = KV_STAGES_, BLOCKS = BLOCKS_;
    static constexpr int BN = 64 * WGS, KV_BYTES = BN * HD * 2, Q_BYTES = BM * HD * 2, STATS_BYTES = BM * 8;
    static constexpr int SMEM = 2 * KV_STAGES * KV_BYTES + STAGES * (2 * Q_BYTES + STATS_BYTES) + 1024;
    // a warpgroup may pass over the first tiles of a head while it still holds the last tile of the previous head
    static_assert(STAGES >= (BN - 1) / BM + 2, "the ring is too short");
    static_assert(BM == 64 || BM == 128, "statistics are padded to multiples of 128");
};

/* ends (B, T): the end of each token's document in its row, used with DOCUMENTS. */
template <typename Tiles, bool DOCUMENTS = false>
__global__ void __launch_bounds__(Tiles::THREADS, Tiles::BLOCKS)
    attention_backward_kv_wgmma_kernel(floatX* dqkv, const float2* stats, const int32_t* ends,
                                       const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap kv_map,
                                       const __grid_constant__ CUtensorMap dout_map, AttentionArgs s, uint32_t B) {
#if PTX_HAS_SM90A
    constexpr int HD = Tiles::HD, BM = Tiles::BM, BN = Tiles::BN;
    constexpr uint32_t KV_BYTES = Tiles::KV_BYTES, Q_BYTES = Tiles::Q_BYTES, STATS_BYTES = Tiles::STATS_BYTES;
    extern __shared__ __align__(128) char smem[];
    __shared__ uint64_t kv_barriers[2 * Tiles::KV_STAGES], q_barriers[2 * Tiles::STAGES];
    // layout: K, V of each of KV_STAGES; q, dout of each of STAGES; statistics of each of STAGES
    const char* all_stats = wgmma_tiles(smem) + 2 * Tiles::KV_STAGES * KV_BYTES + 2 * Tiles::STAGES * Q_BYTES;
    const uint32_t kv_smem = shared_address(wgmma_tiles(smem)), q_smem = kv_smem + 2 * Tiles::KV_STAGES * KV_BYTES;
    const uint32_t stats_smem = shared_address(all_stats);
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), group = s.NH / s.NKV;
    const uint32_t heads = B * s.NKV;
    Ring<Tiles::KV_STAGES> kv_ring(kv_barriers);
    Ring<Tiles::STAGES> q_ring(q_barriers);
    rings_init(4 * Tiles::WGS, kv_ring, q_ring);
    WorkList work(heads * ((s.T + BN - 1) / BN));
    if (warpgroup == 0) {
        registers_lower<Tiles::PRODUCER>();
        if (threadIdx.x != 0) { return; }
        for (uint32_t piece; work.next(&piece);) {
            const int k0 = piece / heads * BN, b = piece % heads / s.NKV, kv_head = piece % heads % s.NKV;
            const uint32_t kv_tile = kv_smem + kv_ring.stage * 2 * KV_BYTES;
            kv_ring.begin_fill(2 * KV_BYTES);
            copy_box_4d(kv_tile, &kv_map, 0, k0, (s.NH + kv_head) * (HD / 64), b, kv_ring.full());
            copy_box_4d(kv_tile + KV_BYTES, &kv_map, 0, k0, (s.NH + s.NKV + kv_head) * (HD / 64), b, kv_ring.full());
            kv_ring.advance();
            const int end_q = DOCUMENTS ? ends[(size_t)b * s.T + min(s.T, k0 + BN) - 1] : s.T;
            for (int h = kv_head * group; h < (kv_head + 1) * group; h++) {
                const float2* head_stats = stats + ((size_t)b * s.NH + h) * s.stat_rows;
                for (int q0 = k0 / BM * BM; q0 < end_q; q0 += BM) {
                    const uint32_t q_tile = q_smem + q_ring.stage * 2 * Q_BYTES;
                    q_ring.begin_fill(2 * Q_BYTES + STATS_BYTES);
                    copy_box_4d(q_tile, &q_map, 0, q0, h * (HD / 64), b, q_ring.full());
                    copy_box_4d(q_tile + Q_BYTES, &dout_map, 0, q0, h * (HD / 64), b, q_ring.full());
                    copy_bytes(stats_smem + q_ring.stage * STATS_BYTES, head_stats + q0, STATS_BYTES, q_ring.full());
                    q_ring.advance();
                }
            }
        }
    } else {
        registers_raise<Tiles::CONSUMER>();
        const int consumer = warpgroup - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        float dk[HD / 2], dv[HD / 2], p[BM / 2], ds[BM / 2];
        uint32_t p_operand[BM / 16][4], ds_operand[BM / 16][4];
        for (uint32_t piece; work.next(&piece);) {
            const int k0 = piece / heads * BN, b = piece % heads / s.NKV, kv_head = piece % heads % s.NKV;
            const int my_k0 = k0 + consumer * 64, warp_k0 = my_k0 + warp * 16;
            const DocumentEdges<DOCUMENTS> end(ends + (size_t)b * s.T, s.T, s.T, k0 + BN - 1, my_k0 + 63, warp_k0, warp_k0 + g);
            kv_ring.wait_full();
            const uint32_t k_tile = kv_smem + kv_ring.stage * 2 * KV_BYTES + consumer * 64 * 128;
            const uint32_t k_rows = matrix_rows(k_tile), v_rows = matrix_rows(k_tile + KV_BYTES);
            uint32_t held = NO_BARRIER;  // the `empty` barrier of the buffer that pending products read
            auto release_held = [&]() {
                wgmma_finish<0>(dk);
                wgmma_hold(dv);
                if (held != NO_BARRIER) { ring_release(held); }
                held = NO_BARRIER;
            };
            int h = 0, q0 = 0;  // the tile: head of the group, first query
            auto head_begin = [&]() {
#pragma unroll 1
                for (q0 = k0 / BM * BM; q0 < end.block && q0 + BM <= my_k0; q0 += BM) {
                    q_ring.pass();  // no key of this warpgroup is seen by these queries
                }
            };
            // turns S^T into p^T = exp(S^T - lse)
            auto exponentials = [&](float(&x)[BM / 2], const float4* tile_stats) {
                fragment_p_transposed(x, tile_stats, s.scale_log2);
                if (q0 < my_k0 + 63) {
                    // columns of this tile count from 2 t; the first kept one has a query that sees the warp's key g
                    fragment_clear_before(x, my_k0 + warp * 16 + g - q0 - t * 2);
                }
                if (DOCUMENTS && q0 + BM > end.warp) {
                    const int columns[2] = {end.rows[0] - q0 - t * 2, end.rows[1] - q0 - t * 2};
                    fragment_mask(x, 0, [&](int column, int r) { return column >= columns[r]; });
                }
            };
            // moves to the next tile; false if there is none, or if tiles that only other warpgroups need come first
            auto next_tile = [&]() {
                q0 += BM;
                if (q0 < end.warpgroup) { return true; }
                if ((DOCUMENTS && q0 < end.block) || h + 1 == group) { return false; }
                h++;
                head_begin();
                return q0 < end.warpgroup;
            };
            fragment_clear(dk);
            fragment_clear(dv);
#pragma unroll 1
            for (; h < group; h++) {
                head_begin();
                if (q0 < end.warpgroup) {
                    float e[BM / 2];
                    int stage = q_ring.stage;
                    uint32_t q_tile = q_smem + stage * 2 * Q_BYTES, q_before = 0;
                    q_ring.wait_full();
                    wgmma_issue([&] { wgmma_scores<HD, BM, BN>(p, k_rows, matrix_rows(q_tile)); });
                    wgmma_finish<0>(p);
                    bool more;
#pragma unroll 1
                    do {  // S of this tile is complete, and ds of the previous one
                        const float4* tile_stats = (const float4*)(all_stats + stage * STATS_BYTES) + t;
                        if (!Tiles::ROUNDED && held != NO_BARRIER) {
                            wgmma_issue([&] { wgmma_values<HD, BM>(dk, ds_operand, matrix_columns(q_before, BM * 128)); });
                        }
                        wgmma_issue([&] { wgmma_scores<HD, BM, BN>(ds, v_rows, matrix_rows(q_tile + Q_BYTES)); });
#pragma unroll
                        for (int i = 0; i < BM / 2; i++) { e[i] = p[i]; }
                        exponentials(e, tile_stats);
                        fragment_operand(p_operand, e);
                        if constexpr (!Tiles::ROUNDED) {
                            wgmma_issue(
                                [&] { wgmma_values<HD, BM>(dv, p_operand, matrix_columns(q_tile + Q_BYTES, BM * 128)); });
                            wgmma_wait<2>();
                            if (held != NO_BARRIER) { ring_release(held); }
                        }
                        held = q_ring.empty();
                        q_ring.advance();
                        q_before = q_tile;
                        more = next_tile();
                        if (more) {
                            stage = q_ring.stage;
                            q_tile = q_smem + stage * 2 * Q_BYTES;
                            q_ring.wait_full();
                            wgmma_issue([&] { wgmma_scores<HD, BM, BN>(p, k_rows, matrix_rows(q_tile)); });
                            wgmma_wait<Tiles::ROUNDED ? 1 : 2>();
                        } else {
                            wgmma_wait<Tiles::ROUNDED ? 0 : 1>();
                        }
                        wgmma_hold(ds);
                        if constexpr (Tiles::ROUNDED) { fragment_rounded(e, p_operand); }
                        fragment_ds_transposed(ds, e, tile_stats);
                        fragment_operand(ds_operand, ds);
                        if constexpr (Tiles::ROUNDED) {
                            wgmma_issue([&] {
                                wgmma_values<HD, BM>(dv, p_operand, matrix_columns(q_before + Q_BYTES, BM * 128));
                                wgmma_values<HD, BM>(dk, ds_operand, matrix_columns(q_before, BM * 128));
                            });
                        }
                        wgmma_finish<0>(p);
                        if constexpr (Tiles::ROUNDED) {
                            ring_release(held);
                            held = NO_BARRIER;
                        }
                    } while (more);
                    if constexpr (!Tiles::ROUNDED) {
                        wgmma_issue([&] { wgmma_values<HD, BM>(dk, ds_operand, matrix_columns(q_before, BM * 128)); });
                    }
                    release_held();
                }
                if (DOCUMENTS && q0 < end.block) {  // another warpgroup's keys are seen by queries further on
                    release_held();
#pragma unroll 1
                    for (; q0 < end.block; q0 += BM) { q_ring.pass(); }
                }
            }
            release_held();
            ring_release(kv_ring.empty());
            kv_ring.advance();
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

// ---------------------------------------------------------------------------------------------------------------------
// dQ

/* WGS x 64 queries; keys in tiles of BN; shared memory holds q, dout and out of Q_STAGES pieces of work. */
template <int HD_, int BN_, int WGS_, int STAGES_, int Q_STAGES_, int BLOCKS_, int LEFT_>
struct WgmmaQTiles : WarpgroupSplit<WGS_, BLOCKS_> {
    static constexpr int LEFT = LEFT_;
    static constexpr int HD = HD_, BN = BN_, WGS = WGS_, STAGES = STAGES_, Q_STAGES = Q_STAGES_, BLOCKS = BLOCKS_;
    static constexpr int BM = 64 * WGS, KV_BYTES = BN * HD * 2, Q_BYTES = BM * HD * 2;
    static constexpr int SMEM = 3 * Q_STAGES * Q_BYTES + STAGES * 2 * KV_BYTES + 1024;
    static_assert(STAGES >= 2, "the ring is too short");
};

template <typename Tiles, bool DOCUMENTS = false>
__global__ void __launch_bounds__(Tiles::THREADS, Tiles::BLOCKS)
    attention_backward_q_wgmma_kernel(floatX* dqkv, float2* stats, const float* lse, const __grid_constant__ CUtensorMap q_map,
                                      const __grid_constant__ CUtensorMap kv_map, const __grid_constant__ CUtensorMap dout_map,
                                      const __grid_constant__ CUtensorMap out_map, AttentionArgs s, uint32_t B) {
#if PTX_HAS_SM90A
    constexpr int HD = Tiles::HD, BM = Tiles::BM, BN = Tiles::BN;
    constexpr uint32_t KV_BYTES = Tiles::KV_BYTES, Q_BYTES = Tiles::Q_BYTES;
    extern __shared__ __align__(128) char smem[];
    __shared__ uint64_t kv_barriers[2 * Tiles::STAGES], q_barriers[2 * Tiles::Q_STAGES];
    // layout: q, dout, out of each of Q_STAGES; K, V of each of STAGES
    const uint32_t q_smem = shared_address(wgmma_tiles(smem)), kv_smem = q_smem + 3 * Tiles::Q_STAGES * Q_BYTES;
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), group = s.NH / s.NKV, tiles = (s.T + BM - 1) / BM;
    const uint32_t heads = B * s.NH;
    Ring<Tiles::STAGES> kv_ring(kv_barriers);
    Ring<Tiles::Q_STAGES> q_ring(q_barriers);
    rings_init(4 * Tiles::WGS, kv_ring, q_ring);
    WorkList work(heads * tiles);
    if (warpgroup == 0) {
        registers_lower<Tiles::PRODUCER>();
        if (threadIdx.x != 0) { return; }
        for (uint32_t piece; work.next(&piece);) {
            const int q0 = (tiles - 1 - (int)(piece / heads)) * BM, b = piece % heads / s.NH, h = piece % heads % s.NH;
            const int k_block = (s.NH + h / group) * (HD / 64), v_block = k_block + s.NKV * (HD / 64);
            const uint32_t q_tile = q_smem + q_ring.stage * 3 * Q_BYTES;
            q_ring.begin_fill(3 * Q_BYTES);
            copy_box_4d(q_tile, &q_map, 0, q0, h * (HD / 64), b, q_ring.full());
            copy_box_4d(q_tile + Q_BYTES, &dout_map, 0, q0, h * (HD / 64), b, q_ring.full());
            copy_box_4d(q_tile + 2 * Q_BYTES, &out_map, 0, q0, h * (HD / 64), b, q_ring.full());
            q_ring.advance();
            const int first_k0 = DOCUMENTS ? s.starts[(size_t)b * s.T + q0] / BN * BN : 0;
            for (int k0 = (min(s.T, q0 + BM) - 1) / BN * BN; k0 >= first_k0; k0 -= BN) {
                const uint32_t kv_tile = kv_smem + kv_ring.stage * 2 * KV_BYTES;
                kv_ring.begin_fill(2 * KV_BYTES);
                copy_box_4d(kv_tile, &kv_map, 0, k0, k_block, b, kv_ring.full());
                copy_box_4d(kv_tile + KV_BYTES, &kv_map, 0, k0, v_block, b, kv_ring.full());
                kv_ring.advance();
            }
        }
    } else {
        registers_raise<Tiles::CONSUMER>();
        const int consumer = warpgroup - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        float dq[HD / 2], p[BN / 2], ds[BN / 2];
        uint32_t ds_operand[BN / 16][4];
        for (uint32_t piece; work.next(&piece);) {
            const int q0 = (tiles - 1 - (int)(piece / heads)) * BM, b = piece % heads / s.NH, h = piece % heads % s.NH;
            const int my_q0 = q0 + consumer * 64, warp_q0 = my_q0 + warp * 16, row = warp_q0 + g;
            const DocumentEdges<DOCUMENTS> first(s.starts + (size_t)b * s.T, s.T, 0, q0, my_q0, warp_q0 + 15, row);
            const size_t head = (size_t)b * s.NH + h;
            float log_sum[2], D[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                log_sum[r] = row + r * 8 < s.T ? lse[head * s.T + row + r * 8] * (float)LOG2_E : INFINITY;
            }
            q_ring.wait_full();
            const uint32_t q_tile = q_smem + q_ring.stage * 3 * Q_BYTES + consumer * 64 * 128;
            const ScoresLeft<HD, BM, (Tiles::LEFT > 0)> q_left(q_tile);
            const ScoresLeft<HD, BM, (Tiles::LEFT > 1)> dout_left(q_tile + Q_BYTES);
            float2 stat[2];  // lse in base 2 and D
            auto statistics = [&]() {
                const char* dout_warp =
                    wgmma_tiles(smem) + (q_ring.stage * 3 + 1) * Q_BYTES + (consumer * 64 + warp * 16) * 128;
                swizzled_row_products<HD>(D, dout_warp, dout_warp + Q_BYTES, BM * 128);
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    stat[r] = make_float2(log_sum[r], D[r]);
                    if (t == 0 && row + r * 8 < s.stat_rows) { stats[head * s.stat_rows + row + r * 8] = stat[r]; }
                }
            };
            uint32_t held = NO_BARRIER;
            fragment_clear(dq);
            int k0 = (min(s.T, q0 + BM) - 1) / BN * BN;
#pragma unroll 1
            for (; k0 > my_q0 + 63; k0 -= BN) {  // no query of this warpgroup sees these keys
                kv_ring.pass();
            }
            const int my_first_k0 = first.warpgroup / BN * BN;
            // turns S into p = exp(S - lse)
            auto exponentials = [&](float(&x)[BN / 2]) {
                fragment_p(x, stat, s.scale_log2);
                if (k0 + BN - 1 > my_q0) {
                    // the last column of this tile, counted from 2 t, that row g of the warp sees
                    fragment_mask_behind(x, row - k0 - t * 2, 0);
                }
                if (DOCUMENTS && k0 < first.warp) {
                    const int columns[2] = {first.rows[0] - k0 - t * 2, first.rows[1] - k0 - t * 2};
                    fragment_mask_before(x, columns, 0);
                }
            };
            float e[BN / 2];
            uint32_t k_tile = kv_smem + kv_ring.stage * 2 * KV_BYTES, k_before = 0;
            kv_ring.wait_full();
            wgmma_issue([&] { q_left.product(p, matrix_rows(k_tile)); });
            statistics();
            wgmma_finish<0>(p);
            bool more;
#pragma unroll 1
            do {  // S of this tile is complete, and ds of the previous one
                if (held != NO_BARRIER) {
                    wgmma_issue([&] { wgmma_values<HD, BN>(dq, ds_operand, matrix_columns(k_before, BN * 128)); });
                }
                wgmma_issue([&] { dout_left.product(ds, matrix_rows(k_tile + KV_BYTES)); });
#pragma unroll
                for (int i = 0; i < BN / 2; i++) { e[i] = p[i]; }
                exponentials(e);
                wgmma_wait<1>();
                if (held != NO_BARRIER) { ring_release(held); }
                held = kv_ring.empty();
                kv_ring.advance();
                k_before = k_tile;
                k0 -= BN;
                more = k0 >= my_first_k0;
                if (more) {
                    k_tile = kv_smem + kv_ring.stage * 2 * KV_BYTES;
                    kv_ring.wait_full();
                    wgmma_issue([&] { q_left.product(p, matrix_rows(k_tile)); });
                    wgmma_wait<1>();
                } else {
                    wgmma_wait<0>();
                }
                wgmma_hold(ds);
                fragment_ds(ds, e, stat);
                fragment_operand(ds_operand, ds);
                wgmma_finish<0>(p);
            } while (more);
            wgmma_issue([&] { wgmma_values<HD, BN>(dq, ds_operand, matrix_columns(k_before, BN * 128)); });
            wgmma_finish<0>(dq);
            if (held != NO_BARRIER) { ring_release(held); }
            ring_release(q_ring.empty());
            q_ring.advance();
            if (s.cos_sin) { fragment_turn_back<HD>(dq, s, b, warp_q0); }
            floatX* dq_rows = attention_row(dqkv, (size_t)b * s.T + warp_q0, s.qkv_pitch, h, HD);
            wgmma_store<HD>(dq_rows, s.qkv_pitch, s.T - warp_q0, dq, s.scale, s.scale);
            if constexpr (DOCUMENTS) {  // the other warpgroups' queries see keys further back
#pragma unroll 1
                for (const int first_k0 = s.starts[(size_t)b * s.T + q0] / BN * BN; k0 >= first_k0; k0 -= BN) {
                    kv_ring.pass();
                }
            }
        }
    }
#else
    __trap();
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// launchers

static inline CUtensorMap attention_qkv_map(const floatX* qkv, int B, const AttentionArgs& s, int rows) {
    return tensor_map(qkv, B, s.T, (size_t)(s.NH + 2 * s.NKV) * s.HD, s.qkv_pitch, rows, s.HD);
}

static inline CUtensorMap attention_out_map(const floatX* out, int B, const AttentionArgs& s, int rows) {
    return tensor_map(out, B, s.T, (size_t)s.NH * s.HD, s.out_pitch, rows, s.HD);
}

/* Returns a grid of as many blocks as run at a time, but no more than there are pieces of work (tiles of `rows` rows). */
template <typename Tiles>
static inline dim3 attention_wgmma_blocks(int B, int heads, int T, int rows) {
    const size_t pieces = (size_t)B * heads * ceil_div((size_t)T, (size_t)rows);
    if (pieces > INT32_MAX) { die("attention: %zu tiles of %d tokens, wanted at most %d", pieces, rows, INT32_MAX); }
    return dim3((unsigned)size_min(pieces, (size_t)device_attribute(cudaDevAttrMultiProcessorCount) * Tiles::BLOCKS));
}

template <typename Tiles>
static inline void attention_wgmma_forward_tiles(floatX* out, float* lse, const floatX* qkv, int B, const AttentionArgs& s,
                                                 cudaStream_t stream) {
    auto* kernel = s.starts ? attention_forward_wgmma_kernel<Tiles, true> : attention_forward_wgmma_kernel<Tiles, false>;
    attention_launch(kernel, attention_wgmma_blocks<Tiles>(B, s.NH, s.T, Tiles::BM), Tiles::THREADS, Tiles::SMEM, stream, out,
                     lse, attention_qkv_map(qkv, B, s, Tiles::BM), attention_qkv_map(qkv, B, s, Tiles::BN), s, (uint32_t)B);
}

/* ends: where each token's document ends, if s has documents. */
template <typename Tiles>
static inline void attention_wgmma_backward_kv(floatX* dqkv, const float2* stats, const int32_t* ends, const floatX* dout,
                                               const floatX* qkv, int B, const AttentionArgs& s, cudaStream_t stream) {
    auto* kernel =
        s.starts ? attention_backward_kv_wgmma_kernel<Tiles, true> : attention_backward_kv_wgmma_kernel<Tiles, false>;
    attention_launch(kernel, attention_wgmma_blocks<Tiles>(B, s.NKV, s.T, Tiles::BN), Tiles::THREADS, Tiles::SMEM, stream, dqkv,
                     stats, ends, attention_qkv_map(qkv, B, s, Tiles::BM), attention_qkv_map(qkv, B, s, Tiles::BN),
                     attention_out_map(dout, B, s, Tiles::BM), s, (uint32_t)B);
}

template <typename Tiles>
static inline void attention_wgmma_backward_q(floatX* dqkv, float2* stats, const floatX* dout, const AttentionTensorsX& f,
                                              int B, const AttentionArgs& s, cudaStream_t stream) {
    auto* kernel = s.starts ? attention_backward_q_wgmma_kernel<Tiles, true> : attention_backward_q_wgmma_kernel<Tiles, false>;
    attention_launch(kernel, attention_wgmma_blocks<Tiles>(B, s.NH, s.T, Tiles::BM), Tiles::THREADS, Tiles::SMEM, stream, dqkv,
                     stats, f.lse, attention_qkv_map(f.qkv, B, s, Tiles::BM), attention_qkv_map(f.qkv, B, s, Tiles::BN),
                     attention_out_map(dout, B, s, Tiles::BM), attention_out_map(f.out, B, s, Tiles::BM), s, (uint32_t)B);
}

// Tiles by head dimension: HD, rows of a tile walked over, warpgroups, ring, pieces of work at a time, blocks. For dK and dV,
// whether ds is computed from the rounded p. For dQ, how many left operands of scores stay in registers: q, or q and dout.
template <int HD>
struct WgmmaTiles;
template <>
struct WgmmaTiles<64> {
    typedef WgmmaForwardTiles<64, 128, 3, 2, 2, 1> Forward;
    typedef WgmmaKVTiles<64, 64, 2, 5, 2, 1, false> BackwardKV;
    typedef WgmmaQTiles<64, 64, 2, 4, 2, 1, 2> BackwardQ;
};
template <>
struct WgmmaTiles<128> {
    typedef WgmmaForwardTiles<128, 128, 2, 2, 1, 1> Forward;
    typedef WgmmaKVTiles<128, 64, 2, 4, 1, 1, true> BackwardKV;
    typedef WgmmaQTiles<128, 64, 2, 4, 1, 1, 1> BackwardQ;
};

static inline void attention_wgmma_forward(floatX* out, float* lse, const floatX* qkv, int B, const AttentionArgs& s,
                                           cudaStream_t stream) {
    auto* const launch = s.HD == 64 ? attention_wgmma_forward_tiles<WgmmaTiles<64>::Forward>
                                    : attention_wgmma_forward_tiles<WgmmaTiles<128>::Forward>;
    launch(out, lse, qkv, B, s, stream);
}

/* Writes where each of N tokens' document ends, in rows of T tokens. */
__global__ static void attention_ends_kernel(int32_t* ends, const int32_t* starts, size_t N, int T) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, row = i / T * T;
    if (i < N) { ends[i] = attention_document_end(starts + row, (int)(i - row), T); }
}

/* Fills stats as attention_stats does; with documents, also fills the B * T integers after them. */
static inline void attention_wgmma_backward(floatX* dqkv, float2* stats, const floatX* dout, const AttentionTensorsX& f, int B,
                                            const AttentionArgs& s, cudaStream_t stream) {
    const size_t N = (size_t)B * s.T;
    int32_t* ends = (int32_t*)(stats + (size_t)B * s.NH * s.stat_rows);
    if (s.starts) {
        attention_launch(attention_ends_kernel, dim3((unsigned)ceil_div(N, (size_t)256)), 256, 0, stream, ends, s.starts, N,
                         s.T);
    }
    auto* const q = s.HD == 64 ? attention_wgmma_backward_q<WgmmaTiles<64>::BackwardQ>
                               : attention_wgmma_backward_q<WgmmaTiles<128>::BackwardQ>;
    auto* const kv = s.HD == 64 ? attention_wgmma_backward_kv<WgmmaTiles<64>::BackwardKV>
                                : attention_wgmma_backward_kv<WgmmaTiles<128>::BackwardKV>;
    q(dqkv, stats, dout, f, B, s, stream);
    kv(dqkv, stats, ends, dout, f.qkv, B, s, stream);
}

#endif  // PRECISION_FP32
#endif
