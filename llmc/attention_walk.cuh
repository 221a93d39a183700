/* attention_walk.cuh -- the order of work and of sums when attention's backward pass is one walk over all pairs of tiles: five
 * products instead of seven, and the scores and their exponentials once instead of twice. The walks themselves are in
 * attention_mma_walk.cuh and attention_sm90_walk.cuh. Formulas and layouts: attention.cuh.
 *
 * A block owns 128 keys and walks over q and dout of all query heads of the group, like the kernel of dK and dV. It also
 * computes its keys' part of dq for each tile of 64 queries:
 *
 *   S^T = k q^T     dP^T = v dout^T     dv += p^T dout     dk += ds^T q     part of dq = ds k
 *
 * The parts are added up in fp32 in memory, mostly in the L2 cache. A last
 * kernel turns the sums back by RoPE and rounds them.
 *
 * So that every run gives the same bits, the parts of a tile of queries are added in a fixed order. Each part waits for a flag
 * that counts the parts before it.
 *
 * This is the order in which blocks finish the parts anyway, so waits are short. Among N tiles of keys, more queries see the
 * lower ones. A block takes tile P - 1 - i and then tile P + i, with P = N / 2 rounded up. So all blocks have the same work if
 * the card has P multiprocessors. All blocks walk upwards. In the lower half of the tiles, higher tiles are ahead; in the upper
 * half, lower ones:
 *
 *   parts of tile m of queries, in units of 128:   m < P: m, m - 1 ... 0        else: P - 1, P - 2 ... 0, P, P + 1 ... m
 *
 * A part waits only for pieces before its own in the list of work, and a block takes its pieces in the order of the list. So
 * the earliest unfinished piece can always proceed, provided that all blocks are resident at once. The grid is therefore never
 * larger than the number of multiprocessors, and the launch is cooperative: blocks start when there is room for all of them,
 * and the driver refuses a grid for which there never is. A kernel that still holds a multiprocessor must be able to end
 * without this kernel.
 */
#ifndef LLMC_ATTENTION_WALK_CUH
#define LLMC_ATTENTION_WALK_CUH

#include "llmc/attention_common.cuh"

#ifndef PRECISION_FP32

constexpr int WALK_QUERIES = 64, WALK_KEYS = 128;  // of a tile

/* The order of work and of sums. A round takes `together` heads (of K and V, of all sequences). Each head has `tiles` tiles
 * of keys in `pairs` pairs: first come the lower tiles of all pairs, then the upper tiles. The last pair may lack its upper
 * tile. `step` blocks share the tiles of each of these heads. */
struct WalkOrder {
    uint32_t heads, tiles, pairs, together, step;

    /* Returns how many parts of some queries' dq are added before the part of a tile of keys. m: the tile of WALK_KEYS with
     * these queries */
    __device__ __forceinline__ uint32_t before(uint32_t tile, uint32_t m) const {
        return tile >= pairs ? tile : min(m, pairs - 1) - tile;
    }
};

/* A block's pieces of work, one after the other: a tile of keys of a head. */
struct WalkPiece {
    uint32_t head, at;
    __device__ __forceinline__ explicit WalkPiece(const WalkOrder& order)
        : head(blockIdx.x % order.together), at(blockIdx.x / order.together) {}
    __device__ __forceinline__ void advance(const WalkOrder& order) {
        at += order.step;
        if (at >= 2 * order.pairs) { at -= 2 * order.pairs, head += order.together; }
    }
    __device__ __forceinline__ uint32_t tile(const WalkOrder& order) const {
        return at < order.pairs ? order.pairs - 1 - at : at;
    }
};

/* Where parts of dq are added. Each query head of each sequence has `tiles` tiles of WALK_QUERIES queries. A tile consists of
 * blocks of 8 columns, and these of fragments of 16 queries: 128 floats, in the order in which the kernel adds them. Each tile
 * has a flag that counts the parts added. */
struct WalkSums {
    float* sums;
    uint32_t* flags;
    uint32_t tiles;
};

/* Writes dq of a tile of queries from its sums; a block takes one tile. A fragment has the four floats of each lane one after
 * the other (BY_LANE), or those of all lanes four times. */
template <int HD, bool BY_LANE>
__global__ void __launch_bounds__(128) attention_walk_dq_kernel(floatX* dqkv, WalkSums sums, AttentionArgs s) {
    const int tile = blockIdx.x % sums.tiles, h = blockIdx.x / sums.tiles, b = blockIdx.y;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = tile * WALK_QUERIES + warp * 16;
    const float* from = sums.sums + (((size_t)b * s.NH + h) * sums.tiles + tile) * (WALK_QUERIES * HD) + warp * 128;
    float dq[HD / 2];
#pragma unroll
    for (int i = 0; i < HD / 8; i++) {
        if constexpr (BY_LANE) {
            const Vec<float, 4> x = load_stream<4>(from + i * 512 + lane * 4);
#pragma unroll
            for (int k = 0; k < 4; k++) { dq[4 * i + k] = x.v[k]; }
        } else {
#pragma unroll
            for (int k = 0; k < 4; k++) { dq[4 * i + k] = __ldcs(from + i * 512 + k * 32 + lane); }
        }
    }
    if (s.cos_sin) { fragment_turn_back<HD>(dq, s, b, row); }
    fragment_store<HD>(attention_row(dqkv, (size_t)b * s.T + row, s.qkv_pitch, h, HD), s.qkv_pitch, s.T - row, dq, s.scale,
                       s.scale);
}

// ---------------------------------------------------------------------------------------------------------------------
// on the host

/* Returns the tiles of queries of a head. */
static inline int walk_query_tiles(int T) { return (int)ceil_div((size_t)T, (size_t)WALK_QUERIES); }

/* Returns the bytes of the sums of dq, and of their flags. */
static inline size_t walk_sums_bytes(int B, int NH, int T, int HD) {
    return (size_t)B * NH * walk_query_tiles(T) * (WALK_QUERIES * HD * sizeof(float) + sizeof(uint32_t));
}

/* Returns the order of work on a card with so many multiprocessors. */
static inline WalkOrder walk_order(int B, int NKV, int T, uint32_t processors) {
    WalkOrder o;
    o.heads = (uint32_t)B * NKV;
    o.tiles = (uint32_t)ceil_div((size_t)T, (size_t)WALK_KEYS);
    o.pairs = (o.tiles + 1) / 2;
    o.together = (uint32_t)size_min(o.heads, size_max(1, processors / o.pairs));
    o.step = (uint32_t)size_min(o.pairs, processors);
    return o;
}

/* Whether a walk keeps at least 85 % of the multiprocessors at work. A walk has fewer pieces of work than the two kernels.
 * With few heads, or if their pairs of tiles divide badly among the multiprocessors, it leaves more of the card idle than it
 * saves. */
static inline bool walk_fills(const WalkOrder& o, uint32_t processors) {
    const size_t pairs = (size_t)o.heads * o.pairs;  // pairs of all heads; every pair is the same work
    const size_t turns = o.step == o.pairs ? ceil_div((size_t)o.heads, (size_t)o.together) : ceil_div(pairs, (size_t)o.step);
    return pairs * 100 >= turns * processors * 85;
}

/* Clears the flags of a walk and returns where its parts of dq are added. sums: walk_sums_bytes() bytes */
static inline WalkSums walk_begin(float* sums, int B, const AttentionArgs& s, const WalkOrder& order, cudaStream_t stream) {
    const int tiles = walk_query_tiles(s.T);
    const size_t all_tiles = (size_t)B * s.NH * tiles;
    if ((uint64_t)order.heads * order.tiles > INT32_MAX) { die("attention: B %d rows of %d tokens are too many", B, s.T); }
    const WalkSums where = {sums, (uint32_t*)(sums + all_tiles * WALK_QUERIES * s.HD), (uint32_t)tiles};
    CUDA_CHECK(cudaMemsetAsync(where.flags, 0, all_tiles * sizeof *where.flags, stream));
    return where;
}

/* Writes dq from the sums of a walk. */
template <int HD, bool BY_LANE>
static inline void walk_finish(floatX* dqkv, const WalkSums& sums, int B, const AttentionArgs& s, cudaStream_t stream) {
    attention_launch(attention_walk_dq_kernel<HD, BY_LANE>, dim3(sums.tiles * (unsigned)s.NH, (unsigned)B), 128, 0, stream,
                     dqkv, sums, s);
}

#endif  // PRECISION_FP32
#endif
