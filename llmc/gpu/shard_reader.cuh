/* shard_reader.cuh -- reads for a checkpoint the weights that no rank has whole: the exact weights of a 16-bit build, and with
 * ZeRO 3 the weights of the blocks. The owner of each part of a piece broadcasts it. All ranks ask for the same pieces in the
 * same order (run/session/lockstep.h), and rank 0 gets them.
 */
#ifndef LLMC_SHARD_READER_CUH
#define LLMC_SHARD_READER_CUH

#include "llmc/dist/buckets.h"    // defines: Buckets, shard_owner, shard_left
#include "llmc/gpu/exchange.cuh"  // defines: Exchange
#include "llmc/gpu/weights.cuh"   // defines: WeightArena, weight_at, trained_at, master_at

/* The ctx of the sources below. */
typedef struct {
    const WeightArena* weights;
    const Exchange* exchange;
} ShardReader;

/* Writes elements [at, at + n), that this rank owns, to `to` as floats: the exact weights, or the weights that the model
 * computes with. */
static inline void shard_reader_own(const WeightArena* a, bool exact, size_t at, size_t n, float* to) {
    size_t run = 0;
    void* master = exact ? master_at(a, at) : NULL;
    const floatX* from = exact ? trained_at(a, at) : weight_at(a, at, &run);
    master_get_cuda(to, from, master, master ? a->master_kind : MASTER_NONE, n, a->stream);
}

/* Gets n elements of p, from `first` on; only rank 0 fills dst. */
static inline bool shard_reader_piece(const ShardReader* c, bool exact, const Param* p, size_t first, size_t n, float* dst) {
    const WeightArena* a = c->weights;
    const Buckets* owners = exact ? &a->shards : &a->blocks;
    for (size_t i = 0, run, local; i < n; i += run) {
        const size_t at = p->offset + first + i;
        const int owner = shard_owner(owners, at, &local);
        run = size_min(shard_left(owners, at), n - i);
        if (owner == a->rank) { shard_reader_own(a, exact, at, run, a->staging[0] + i); }
        nccl_broadcast(c->exchange->links.all, a->staging[0] + i, run * sizeof(float), owner, a->stream,
                       "the weights of a checkpoint");
    }
    if (a->rank == 0) {
        copy_out_staged(a, dst, n);
    } else {
        CUDA_CHECK(cudaStreamSynchronize(a->stream));  // never far ahead of the writer
    }
    return true;
}

/* Two TensorSources: of the weights that the model computes with, and of the exact weights of the trained tensors. */
static bool shard_reader_weights(void* reader, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    (void)e;
    return shard_reader_piece((const ShardReader*)reader, false, p, first, n, dst);
}
static bool shard_reader_trained(void* reader, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    (void)e;
    return shard_reader_piece((const ShardReader*)reader, true, p, first, n, dst);
}

/* Returns the source of a checkpoint's weights, which all ranks call in the same order; NULL where rank 0 has them all. */
static inline TensorSource shard_reader_source(const ShardReader* c, SlotKind kind) {
    const WeightArena* a = c->weights;
    const bool sharded = a->blocks.ranks > 1, adapters = a->trained != a->params;
    if (!c->exchange->links.all) { return NULL; }
    if (kind == SLOT_WEIGHTS) { return sharded ? shard_reader_weights : NULL; }
    return a->master_kind != MASTER_NONE || (sharded && !adapters) ? shard_reader_trained : NULL;
}

#endif
