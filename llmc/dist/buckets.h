/* buckets.h -- which part of the trained tensors each rank of a run owns.
 *
 * A bucket travels as a whole: the embedding, a block, or the final norm with the head; with LoRA the adapters of a block.
 * Buckets of more than BUCKET_MOST elements are cut into pieces. Every rank owns 1 / ranks of each piece, its shard: so all
 * ranks send and receive the same amount, whichever bucket travels. (If each rank owned one stretch of the whole arena, all
 * ranks would send a bucket to the same owner.)
 *
 *   arena   | piece 0: rank 0 | rank 1 | rank 2 | piece 1: rank 0 | rank 1 | rank 2 | ...
 *   rank 1            | piece 0's shard | piece 1's shard | ...       its m, v and master weights, its "local" elements
 *
 * The pieces tile the arena. Each begins at, and is as long as, a multiple of PARAM_ALIGN * ranks (config.h pads the buckets),
 * so shards are equal and aligned.
 *
 * Gradients: every rank sends its gradients of a shard to the shard's owner. The owner adds them in rank order, in fp32. So the
 * result depends neither on the order of arrival nor on how the network adds (gpu/exchange.cuh).
 */
#ifndef LLMC_BUCKETS_H
#define LLMC_BUCKETS_H

#include "llmc/base/utils.h"
#include "llmc/config.h"           // defines: ArenaRange, ArenaRanges, ParamTable, bucket_align, param_begins_bucket
#include "llmc/optim/optimizer.h"  // defines: rule_of

#ifndef BUCKET_MOST
#define BUCKET_MOST ((size_t)64 << 20)  // elements: 256 MiB in fp32; tests set it smaller
#endif

/* A bucket, or a piece of one. */
typedef struct {
    size_t first, count;  // elements [first, first + count) of the arena
    int layer;            // layer of the block; -1: the embedding; number of blocks: final norm and head
} Bucket;

typedef struct {
    Bucket* items;  // in the order of the arena
    int count;
    int ranks;
} Buckets;

static inline void buckets_free(Buckets* list) {
    free(list->items);
    memset(list, 0, sizeof *list);
}

/* Appends elements [first, end) of the arena, cut into as few pieces as possible, whose lengths differ by one unit at most. */
static inline void buckets_add(Buckets* list, size_t first, size_t end, int layer, size_t unit) {
    const size_t units = (end - first) / unit, pieces = ceil_div(units, BUCKET_MOST / unit);
    list->items = (Bucket*)xrealloc(list->items, ((size_t)list->count + pieces) * sizeof(Bucket));
    for (size_t i = 0; i < pieces; i++) {
        const size_t begin = units * i / pieces, stop = units * (i + 1) / pieces;
        const Bucket piece = {first + begin * unit, (stop - begin) * unit, layer};
        list->items[list->count++] = piece;
    }
}

/* Lists the buckets of a table, cut for the table's ranks. Free with buckets_free(). */
static inline Buckets buckets_list(const ParamTable* t) {
    Buckets list = {NULL, 0, t->ranks};
    int blocks = 0;
    for (int i = 0, next; i < t->count; i = next) {
        for (next = i + 1; next < t->count && !param_begins_bucket(t, next);) { next++; }
        const int layer = t->items[i].layer;
        const size_t end = next < t->count ? t->items[next].offset : t->elements;
        buckets_add(&list, t->items[i].offset, end, layer < 0 && i > 0 ? blocks : layer, bucket_align(t));
        if (layer >= 0) { blocks = layer + 1; }
    }
    return list;
}

/* Returns the part of a bucket that a rank owns. */
static inline ArenaRange shard_of(const Bucket* b, int rank, int ranks) {
    const size_t count = b->count / (size_t)ranks;
    const ArenaRange shard = {b->first + (size_t)rank * count, count};
    return shard;
}

/* Returns the elements that each rank owns. */
static inline size_t shard_elements(const Buckets* list) {
    const Bucket* last = &list->items[list->count - 1];
    return (last->first + last->count) / (size_t)list->ranks;
}

/* Returns the bucket of element `at` of the arena. */
static inline const Bucket* bucket_at(const Buckets* list, size_t at) {
    int below = 0, above = list->count;
    while (above - below > 1) {
        const int middle = (below + above) / 2;
        if (list->items[middle].first <= at) {
            below = middle;
        } else {
            above = middle;
        }
    }
    return &list->items[below];
}

/* Returns the elements from `at` to the end of the shard that holds it. */
static inline size_t shard_left(const Buckets* list, size_t at) {
    const Bucket* b = bucket_at(list, at);
    const size_t count = b->count / (size_t)list->ranks;
    return count - (at - b->first) % count;
}

/* Returns the rank that owns element `at` of the arena, and sets *local to its place among all elements that this rank
 * owns, shard after shard. */
static inline int shard_owner(const Buckets* list, size_t at, size_t* local) {
    const Bucket* b = bucket_at(list, at);
    const size_t count = b->count / (size_t)list->ranks, in_piece = at - b->first;
    *local = b->first / (size_t)list->ranks + in_piece % count;  // a rank owns the same part of each piece before
    return (int)(in_piece / count);
}

/* Sets *local to the place of element `at` of the arena among all elements of `rank`. Returns false if another rank owns it. */
static inline bool shard_local(const Buckets* list, int rank, size_t at, size_t* local) {
    return shard_owner(list, at, local) == rank;
}

/* Lists what a rank owns; adjacent shards (of the only rank) become one range. `items` is for free(). */
static inline ArenaRanges shard_ranges(const Buckets* list, int rank) {
    ArenaRanges own = {(ArenaRange*)xmalloc((size_t)list->count * sizeof(ArenaRange)), 0};
    for (int i = 0; i < list->count; i++) {
        const ArenaRange shard = shard_of(&list->items[i], rank, list->ranks);
        ArenaRange* last = own.count > 0 ? &own.items[own.count - 1] : NULL;
        if (last && last->first + last->count == shard.first) {
            last->count += shard.count;
        } else {
            own.items[own.count++] = shard;
        }
    }
    return own;
}

// ---------------------------------------------------------------------------------------------------------------------
// owners of whole matrices

#ifndef MATRICES_MOST
#define MATRICES_MOST ((size_t)32 << 20)  // elements of a rank's matrices in a round, if there are several
#endif

/* A matrix whose rule takes it whole (optim/optimizer.h). Its shards stay where they are. For the rule's stage on the matrix
 * they travel to the owner, and back. */
typedef struct {
    const Param* param;
    double flops;      // of its product with its transpose
    int owner, round;  // a rank's matrices of a round have one shape: a GPU takes them in one launch
    int place;         // among these
} DealtMatrix;

typedef struct {
    DealtMatrix* items;  // round after round
    int count;
} Deal;

/* The most work first, shape by shape. Between equals the order of the arena decides. */
static inline int deal_compare(const void* a, const void* b) {
    const DealtMatrix *x = (const DealtMatrix*)a, *y = (const DealtMatrix*)b;
    if (x->round != y->round) { return x->round - y->round; }
    if (x->flops != y->flops) { return (x->flops < y->flops) - (x->flops > y->flops); }
    if (x->param->rows != y->param->rows) { return (x->param->rows > y->param->rows) - (x->param->rows < y->param->rows); }
    return (x->param > y->param) - (x->param < y->param);
}

static inline bool deal_same_shape(const Param* a, const Param* b) { return a->rows == b->rows && a->cols == b->cols; }

/* Cuts the matrices of an owner, which are sorted, into as few rounds as their shapes and MATRICES_MOST allow. */
static inline void deal_rounds(Deal* d, int owner) {
    for (int i = 0, next, round = 0; i < d->count; i = next) {
        size_t all = 0, done = 0;  // of this shape
        for (next = i; next < d->count && deal_same_shape(d->items[next].param, d->items[i].param); next++) {
            all += d->items[next].owner == owner;
        }
        const size_t most = size_max(1, MATRICES_MOST / param_size(d->items[i].param)), cuts = ceil_div(all, most);
        for (int k = i, place = 0; k < next; k++) {
            DealtMatrix* m = &d->items[k];
            if (m->owner != owner) { continue; }
            const int cut = (int)(done * cuts / all);
            place = done > 0 && (int)((done - 1) * cuts / all) == cut ? place + 1 : 0;
            m->round = round + cut;
            m->place = place;
            done++;
        }
        round += (int)cuts;
    }
}

/* Gives each matrix to one rank, the largest first: to a rank with the fewest matrices of this block, and among these to the
 * rank with the least work. Free `items`. */
static inline Deal deal_matrices(const ParamTable* t) {
    Deal d = {(DealtMatrix*)xcalloc((size_t)t->count, sizeof(DealtMatrix)), 0};
    const size_t ranks = (size_t)t->ranks;
    double* work = (double*)xcalloc(ranks, sizeof *work);
    int* held = (int*)xcalloc((MAX_LAYERS + 1) * ranks, sizeof *held);
    for (int i = 0; i < t->count; i++) {
        const Param* p = &t->items[i];
        if (!rule_of(t, p->kind)->prepare) { continue; }
        d.items[d.count].param = p;
        d.items[d.count++].flops = (double)param_size(p) * (double)size_min(p->rows, p->cols);
    }
    qsort(d.items, (size_t)d.count, sizeof *d.items, deal_compare);
    for (int i = 0; i < d.count; i++) {
        DealtMatrix* m = &d.items[i];
        int* of_block = held + (size_t)(m->param->layer + 1) * ranks;
        for (int r = 1; r < t->ranks; r++) {
            const int fewer = of_block[r] - of_block[m->owner];
            if (fewer < 0 || (fewer == 0 && work[r] < work[m->owner])) { m->owner = r; }
        }
        of_block[m->owner]++;
        work[m->owner] += m->flops;
    }
    for (int r = 0; r < t->ranks; r++) { deal_rounds(&d, r); }
    qsort(d.items, (size_t)d.count, sizeof *d.items, deal_compare);
    free(work);
    free(held);
    return d;
}

#endif
