/* zero.h -- which gradients (ZeRO 2 and 3, --offload gradients) and which blocks' weights (ZeRO 3, --offload weights) a
 * rank holds at a time.
 *
 * Gradients (ZeRO 2 and 3) lie in a ring, from which they travel to their owners (gpu/exchange.cuh). The embedding's bucket and
 * the head's bucket take turns in one part; block l lies in one of two parts. With --offload gradients the owner is the host:
 * blocks take turns in three parts, since they also return (gpu/gradients.cuh), and the other buckets stay. If embedding and
 * head are tied, the embedding's bucket holds both gradients for the whole backward pass. The bucket of the final norm, which
 * is only a gap, then has its own part.
 *
 * Weights (ZeRO 3): every rank keeps 1 / ranks of each block. It computes with whole blocks, which lie in GATHER_SLOTS buffers,
 * block l in slot l % GATHER_SLOTS. When a pass comes to block l, it queues the gathers of the next two blocks in its
 * direction. So a block has the time of a whole block to arrive. The gathers take the slots of blocks whose last use has been
 * queued already.
 *
 *   forward at block l:      slots hold l and l + 1 (on its way), and l + 2 takes the place of l - 1
 *   backward at block l:     slots hold l and l - 1 (on its way), and l - 2 takes the place of l + 1
 *   the turn                  the last three blocks of the forward pass are the first of the backward pass: they have arrived
 *
 * A micro-step of L blocks gathers 2 L - 3. The order of calls on the host alone decides: every rank queues the same gathers in
 * the same order, and a captured graph replays them. Every pass begins with no block gathered, because an update or another
 * pass may have come between.
 */
#ifndef LLMC_ZERO_H
#define LLMC_ZERO_H

#include "llmc/base/utils.h"
#include "llmc/config.h"  // defines: ParamTable

// ---------------------------------------------------------------------------------------------------------------------
// the ring of gradients

// blocks whose gradients have room: one computes while another travels; with the host, while one leaves and one arrives
enum { GRADIENT_BLOCKS = 2, HOST_BLOCKS = 3 };

/* Parts of the ring; block l has part PART_BLOCK + l % turns. */
typedef enum { PART_ENDS, PART_LAST_NORM, PART_BLOCK, GRADIENT_PARTS = PART_BLOCK + HOST_BLOCKS } GradientPart;

/* The parts of the arena that take turns: the embedding's bucket, blocks of `block` elements each, the bucket of final norm
 * and head. */
typedef struct {
    size_t first_block, block, end, elements;
    bool tied;
    int turns;  // blocks that have room
} GradientRing;

/* Cuts the arena of a table of all parameters. */
static inline GradientRing gradient_ring_of(const ParamTable* t, int blocks, bool tied) {
    int last = t->count - 1;
    while (t->items[last - 1].layer < 0) { last--; }
    const size_t first = t->items[1].offset, end = t->items[last].offset;
    const GradientRing r = {first, (end - first) / (size_t)blocks, end, t->elements, tied, GRADIENT_BLOCKS};
    return r;
}

/* Returns the part of a layer's bucket: of the embedding (-1), a block, or final norm and head (the number of blocks). */
static inline int gradient_part_of(int layer, int blocks, bool tied) {
    if (layer == blocks && tied) { return PART_LAST_NORM; }
    return layer < 0 || layer == blocks ? (int)PART_ENDS : PART_BLOCK + layer % GRADIENT_BLOCKS;
}

/* Returns the part that holds element `at` of the arena, and sets *first to the element with which the part then begins. */
static inline int gradient_part(const GradientRing* r, size_t at, size_t* first) {
    if (at < r->first_block) {
        *first = 0;
        return PART_ENDS;
    }
    if (at >= r->end) {
        *first = r->end;
        return r->tied ? PART_LAST_NORM : PART_ENDS;
    }
    const size_t l = (at - r->first_block) / r->block;
    *first = r->first_block + l * r->block;
    return PART_BLOCK + (int)(l % (size_t)r->turns);
}

// ---------------------------------------------------------------------------------------------------------------------
// the ring of gathered blocks

enum { GATHER_SLOTS = 3 };

typedef struct {
    int blocks;              // of the model
    int held[GATHER_SLOTS];  // the block in each slot, there or on its way; -1: none
    int last;                // the block asked for last; -1: none
    int step;                // step to the next block: 1 forward, -1 backward
} GatherRing;

/* Forgets what the slots hold. */
static inline void gather_ring_reset(GatherRing* r) {
    for (int i = 0; i < GATHER_SLOTS; i++) { r->held[i] = -1; }
    r->last = -1;
    r->step = 1;
}

/* Lists the blocks to gather now that a pass asks for block l, in order. Returns their number. A pass may ask for a block
 * several times in a row. */
static inline int gather_ring_next(GatherRing* r, int l, int list[GATHER_SLOTS]) {
    int count = 0;
    if (l != r->last) { r->step = l < r->last ? -1 : 1; }
    r->last = l;
    for (int k = 0; k < GATHER_SLOTS; k++) {
        const int next = l + k * r->step;
        if (next < 0 || next >= r->blocks) { break; }
        int* held = &r->held[next % GATHER_SLOTS];
        if (*held != next) { list[count++] = next; }
        *held = next;
    }
    return count;
}

#endif
