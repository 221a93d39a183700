/* attention_walk.h -- the order of work of attention_sm90_walk.cuh, and what it costs. test_layers.c simulates it on any card.
 *
 * P blocks share the N tiles of keys of a head of K and V, in stages of P tiles, the lowest first. A block takes one tile of
 * each stage: in stages 0, 2, 4 ... block i takes the i-th tile from above, in stages 1, 3, 5 ... the i-th from below. More
 * queries see the lower tiles. So a pair of stages is the same work for every block, and all blocks of a head begin it at the
 * same time. All walk upwards over the queries. So in stages 0, 2, 4 ... higher tiles are ahead, in the others lower ones. This
 * is also the order in which they add their parts to dq of tile m of queries, in units of 128:
 *
 *   m < P: m, m - 1 ... 0        m < 2 P: P - 1, P - 2 ... 0, P, P + 1 ... m        and so on
 *
 * A part waits only for pieces before its own in the list of work: stage by stage, in a stage by i. A block takes its pieces in
 * the order of the list. So the earliest unfinished piece can always proceed, provided that all blocks run at once.
 */
#ifndef LLMC_ATTENTION_WALK_H
#define LLMC_ATTENTION_WALK_H

#include "llmc/base/utils.h"  // defines: LLMC_HOST_DEVICE, ceil_div, size_min

enum { WALK_KEYS = 128 };  // of a tile

/* A round takes `together` heads (of K and V, of all sequences). `blocks` (P above) share the `tiles` of a head, whose list of
 * work has `places`, P for each stage. `step` blocks work on a head at a time: all P, unless a test has a card of fewer. */
typedef struct {
    uint32_t heads, tiles, blocks, together, step, places;
} WalkOrder;

/* A block's piece of work: a place in the list of a head. */
typedef struct {
    uint32_t head, at;
} WalkPiece;

/* Returns the first piece of a block of the grid. There is one if piece.head < order.heads. */
LLMC_HOST_DEVICE static inline WalkPiece walk_begin(WalkOrder o, uint32_t block) {
    const WalkPiece piece = {block % o.together, block / o.together};
    return piece;
}

/* Returns the piece that follows. */
LLMC_HOST_DEVICE static inline WalkPiece walk_next(WalkOrder o, WalkPiece p) {
    p.at += o.step;
    if (p.at >= o.places) { p.at -= o.places, p.head += o.together; }
    return p;
}

/* Returns the piece's tile of keys. In the last stage it may be `tiles` or more: then there is no work. */
LLMC_HOST_DEVICE static inline uint32_t walk_tile(WalkOrder o, WalkPiece p) {
    const uint32_t stage = p.at / o.blocks;
    return stage % 2 ? p.at : (2 * stage + 1) * o.blocks - 1 - p.at;
}

/* A tile of keys gives a part of dq to tile m of 128 queries. Returns how many parts are added before it. */
LLMC_HOST_DEVICE static inline uint32_t walk_before(WalkOrder o, uint32_t tile, uint32_t m) {
    const uint32_t stage = tile / o.blocks, first = stage * o.blocks, last = first + o.blocks - 1;
    return stage % 2 ? tile : first + (m < last ? m : last) - tile;
}

// ---------------------------------------------------------------------------------------------------------------------
// times, in pairs of a tile of keys and a tile of queries of all query heads of a group

/* Returns the order of all heads of B sequences. blocks: of a head   processors: blocks that run at a time */
static inline WalkOrder walk_order_of(int B, int NKV, int T, size_t blocks, size_t processors) {
    WalkOrder o;
    o.heads = (uint32_t)B * (uint32_t)NKV;
    o.tiles = (uint32_t)ceil_div((size_t)T, WALK_KEYS);
    o.blocks = (uint32_t)blocks;
    o.places = (uint32_t)round_up(o.tiles, blocks);
    o.together = (uint32_t)size_min(o.heads, size_max(1, processors / blocks));
    o.step = (uint32_t)size_min(blocks, processors);
    return o;
}

/* Returns the time of an order: in each round the work of the busiest block, and half a pair for each tile of sums that it adds
 * to in a stage. Between two stages the sums leave the L2 cache; at 480 TFLOP/s and 3.3 TB/s their bytes take as long as 0.9
 * pairs. The half fits the times of rows from 1024 to 32768 tokens on an H100 and an H200. */
static inline double walk_time(WalkOrder o) {
    const double N = o.tiles, P = o.blocks, pairs = o.tiles / (2 * o.blocks), stages = o.places / o.blocks;
    const double work = pairs * (2 * (N - P * pairs) + 1) + N - 2 * P * pairs, sums = stages * (N / P - (stages - 1) / 2);
    return (double)ceil_div(o.heads, o.together) * (work + sums / 2);
}

/* Returns the time of the two kernels of attention_sm90.cuh, if a product took them as long as a walk: they compute four and
 * three products where a walk computes five. Their lists of work are even, unless the longest tile is longer than the mean. */
static inline double walk_time_of_two_kernels(WalkOrder o, int group, int processors) {
    const double N = o.tiles, mean = o.heads * N * (N + 1) / 2 / processors;
    return 0.8 * (mean > N ? mean : N) + 0.6 * (mean > N / group ? mean : N / group);
}

/* Returns the order of work on a card: two stages, or more, with more heads at a time, if that saves 3 %. One sequence decides,
 * so a row has the bits that it has alone. */
static inline WalkOrder walk_order(int B, int NKV, int T, int processors) {
    const size_t all = (size_t)processors, half = ceil_div((size_t)T, 2 * WALK_KEYS);
    WalkOrder best = walk_order_of(1, NKV, T, size_min(half, all), all);
    for (size_t together = 1; together <= size_min((size_t)NKV, all); together++) {
        const WalkOrder o = walk_order_of(1, NKV, T, size_min(half, all / together), all);
        if (walk_time(o) < 0.97 * walk_time(best)) { best = o; }
    }
    return walk_order_of(B, NKV, T, best.blocks, all);
}

#endif
