/* collect.cuh -- what rank 0 writes of a run of several ranks although no rank has all of it: the exact weights of a 16-bit
 * build, or with ZeRO 3 the weights of the blocks. The owner of each part of a piece broadcasts it. All ranks ask for the same
 * pieces in the same order (run/session/collect.h), and rank 0 gets them.
 */
#ifndef LLMC_COLLECT_CUH
#define LLMC_COLLECT_CUH

#include "llmc/dist/buckets.h"    // defines: Buckets, shard_owner, shard_left
#include "llmc/gpu/exchange.cuh"  // defines: Exchange
#include "llmc/gpu/weights.cuh"   // defines: WeightArena, weight_at, trained_at, master_at

/* The ctx of the sources below. */
typedef struct {
    const WeightArena* weights;
    const Exchange* exchange;
} Collect;

/* Writes elements [at, at + n), that this rank owns, to `to` as floats: the exact ones, or those that the model computes
 * with. */
static inline void collect_own(const WeightArena* a, bool exact, size_t at, size_t n, float* to) {
    size_t run = 0;
    void* master = exact ? master_at(a, at) : NULL;
    const floatX* from = exact ? trained_at(a, at) : weight_at(a, at, &run);
    master_get_cuda(to, from, master, master ? a->master_kind : MASTER_NONE, n, a->stream);
}

/* Gets n elements of p, from `first` on; only rank 0 fills dst. */
static inline bool collect_piece(const Collect* c, bool exact, const Param* p, size_t first, size_t n, float* dst) {
    const WeightArena* a = c->weights;
    const Buckets* owners = exact ? &a->shards : &a->blocks;
    for (size_t i = 0, run, local; i < n; i += run) {
        const size_t at = p->offset + first + i;
        const int owner = shard_owner(owners, at, &local);
        run = size_min(shard_left(owners, at), n - i);
        if (owner == a->rank) { collect_own(a, exact, at, run, a->staging[0] + i); }
        nccl_broadcast(c->exchange->links.all, a->staging[0] + i, run * sizeof(float), owner, a->stream,
                       "the weights of a checkpoint");
    }
    if (a->rank == 0) {
        copy_out_staged(a, dst, n);
    } else {
        CUDA_CHECK(cudaStreamSynchronize(a->stream));  // never far ahead of who writes
    }
    return true;
}

/* Two TensorSources: of the weights that the model computes with, and of the exact ones of what is trained. */
static bool collect_weights(void* collect, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    (void)e;
    return collect_piece((const Collect*)collect, false, p, first, n, dst);
}
static bool collect_trained(void* collect, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    (void)e;
    return collect_piece((const Collect*)collect, true, p, first, n, dst);
}

/* Returns the source for a checkpoint's weights, which all ranks call alike; NULL where rank 0 has them all. */
static inline TensorSource collect_source(const Collect* c, SlotKind kind) {
    const WeightArena* a = c->weights;
    const bool sharded = a->blocks.ranks > 1, adapters = a->trained != a->params;
    if (!c->exchange->links.all) { return NULL; }
    if (kind == SLOT_WEIGHTS) { return sharded ? collect_weights : NULL; }
    return a->master_kind != MASTER_NONE || (sharded && !adapters) ? collect_trained : NULL;
}

#endif
