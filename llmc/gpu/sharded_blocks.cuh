/* sharded_blocks.cuh -- ZeRO 3: the weights of the blocks lie in shards, 1 / ranks on each rank. A block is gathered before its
 * use. Embedding, final norm and head stay whole on every rank: every micro-step begins and ends with them, and in 70B they are
 * 2.1 of 70.6 billion weights (3.9 GiB in 16 bits).
 *
 * dist/zero.h decides which block is gathered when, exchange.cuh says which stream waits for what. The forward pass gathers the
 * same way as the backward pass there, without sends. A captured graph records the events of its gathers itself, and knows of
 * no earlier gather. So each pass begins with no block gathered, after all gathers of the update.
 *
 * --offload weights (one GPU): the same with the host as the other rank. The blocks lie whole in its memory. They are gathered
 * by copies on a stream of their own, so that a gather need not wait for the update of later blocks: it waits until the copies
 * of its own block have left the card (`updated`). No graph is captured.
 */
#ifndef LLMC_SHARDED_BLOCKS_CUH
#define LLMC_SHARDED_BLOCKS_CUH

#include "llmc/dist/buckets.h"        // defines: Bucket, Buckets, bucket_at, shard_owner, shard_left
#include "llmc/dist/zero.h"           // defines: GatherRing, gather_ring_next, gather_ring_reset
#include "llmc/cuda/cuda_common.cuh"  // defines: Arena, take
#include "llmc/gpu/exchange.cuh"      // defines: Exchange, exchange_wait_all_gathered
#include "llmc/gpu/fp8.cuh"           // defines: Fp8, fp8_follow_slot
#include "llmc/gpu/host_stream.cuh"   // defines: host_pace
#include "llmc/gpu/weights.cuh"       // defines: WeightArena, weights_get, copy_out_staged

/* Functions take NULL where every rank has all weights, and then do nothing. */
typedef struct {
    GatherRing ring;
    floatX* slots[GATHER_SLOTS];  // (a block) each
    cudaEvent_t used;             // after the last use of the blocks whose slots are taken now
    cudaEvent_t there[GATHER_SLOTS];
    cudaStream_t stream;  // of the gathers: the exchange stream, or with blocks on the host their own
} ShardedBlocks;

static inline bool sharded_on_host(const ShardedBlocks* g, const WeightArena* a) { return g && a->blocks.ranks == 1; }

/* Returns the elements of a block. */
static inline size_t sharded_block_size(const ShardedBlocks* g, const WeightArena* a) {
    return (a->blocks_end - a->blocks_first) / (size_t)g->ring.blocks;
}

/* Makes what ZeRO 3, or --offload weights, needs of a model of this many blocks, laid out by `table`. Free with
 * sharded_delete(). */
static inline ShardedBlocks* sharded_new(WeightArena* a, const ParamTable* table, int blocks, bool tied) {
    ShardedBlocks* g = (ShardedBlocks*)xcalloc(1, sizeof *g);
    const GradientRing arena = gradient_ring_of(table, blocks, tied);
    g->ring.blocks = blocks;
    a->blocks = buckets_list(table);
    a->blocks_first = arena.first_block;
    a->blocks_end = arena.end;
    return g;
}

static inline void sharded_delete(ShardedBlocks* g, WeightArena* a) {
    if (g) { buckets_free(&a->blocks); }
    free(g);
}

/* Lays out the shards of the blocks, and the slots. */
static inline void sharded_lay_out(ShardedBlocks* g, WeightArena* a, Arena* memory, Arena* host) {
    Arena* from = sharded_on_host(g, a) ? host : memory;
    a->own = take<floatX>(from, (a->blocks_end - a->blocks_first) / (size_t)a->blocks.ranks);
    for (int i = 0; i < GATHER_SLOTS; i++) { g->slots[i] = take<floatX>(memory, sharded_block_size(g, a)); }
}

static inline void sharded_open(ShardedBlocks* g, const WeightArena* a, const Exchange* x) {
    if (!g) { return; }
    g->stream = x->stream;
    if (sharded_on_host(g, a)) { CUDA_CHECK(cudaStreamCreateWithFlags(&g->stream, cudaStreamNonBlocking)); }
    g->used = event_new();
    for (cudaEvent_t& event : g->there) { event = event_new(); }
}

static inline void sharded_close(ShardedBlocks* g, const WeightArena* a) {
    if (!g) { return; }
    if (sharded_on_host(g, a)) { CUDA_CHECK(cudaStreamDestroy(g->stream)); }
    CUDA_CHECK(cudaEventDestroy(g->used));
    for (int i = 0; i < GATHER_SLOTS; i++) { CUDA_CHECK(cudaEventDestroy(g->there[i])); }
}

/* Begins a pass through the layers. All ranks make the same passes. */
static inline void sharded_begin(ShardedBlocks* g, const Exchange* x) {
    if (!g) { return; }
    gather_ring_reset(&g->ring);
    // so that the first gather comes after the update's gathers, also in a graph
    if (x->ranks > 1) { exchange_wait_all_gathered(x); }
}

/* Queues the gathers of block l, piece by piece. Then queues its 8-bit copies, and the event that announces both. */
static inline void sharded_queue(ShardedBlocks* g, const Exchange* x, const WeightArena* a, const Fp8* fp8, int l) {
    const int slot = l % GATHER_SLOTS;
    const size_t first = a->blocks_first + (size_t)l * sharded_block_size(g, a), ranks = (size_t)a->blocks.ranks;
    const Bucket* end = a->blocks.items + a->blocks.count;
    if (sharded_on_host(g, a)) {
        const size_t bytes = sharded_block_size(g, a) * sizeof(floatX);
        for (int i = 0; i < x->buckets.count; i++) {
            if (x->buckets.items[i].layer == l) { CUDA_CHECK(cudaStreamWaitEvent(g->stream, x->events[i].updated)); }
        }
        Op op(x->profiler, g->stream, "blocks from the host", 0, (double)bytes);
        host_pace(a->host, g->stream, 0);
        CUDA_CHECK(
            cudaMemcpyAsync(g->slots[slot], a->own + (first - a->blocks_first), bytes, cudaMemcpyHostToDevice, g->stream));
        host_pace(a->host, g->stream, (double)bytes);
    } else {
        Op op(x->profiler, x->stream, "blocks to all", 0,
              (double)sharded_block_size(g, a) * sizeof(floatX) * (1 - 1 / (double)ranks));
        for (const Bucket* b = bucket_at(&a->blocks, first); b < end && b->layer == l; b++) {
            const floatX* own = a->own + (b->first - a->blocks_first) / ranks;
            nccl_all_gather(x->links.all, own, g->slots[slot] + (b->first - first), b->count / ranks * sizeof(floatX),
                            x->stream, "the gathering of a block");
        }
    }
    fp8_follow_slot(fp8, x, l, g->slots[slot], g->stream);
    CUDA_CHECK(cudaEventRecord(g->there[slot], g->stream));
}

/* Returns the weights of block l, for what is queued from now on, and queues the gathers of the next blocks. */
static inline const floatX* sharded_block(ShardedBlocks* g, const Exchange* x, const WeightArena* a, const Fp8* fp8, int l) {
    int list[GATHER_SLOTS];
    const int count = gather_ring_next(&g->ring, l, list);
    if (count > 0) { stream_wait(g->stream, x->compute, g->used); }
    for (int i = 0; i < count; i++) { sharded_queue(g, x, a, fp8, list[i]); }
    Op op(x->profiler, x->compute, "wait: blocks", 0, 0);
    CUDA_CHECK(cudaStreamWaitEvent(x->compute, g->there[l % GATHER_SLOTS]));
    return g->slots[l % GATHER_SLOTS];
}

/* Returns whether the weights of a bucket, whose update has been queued, stay where they are until they are gathered. */
static inline bool sharded_keeps(const ShardedBlocks* g, const Exchange* x, const WeightArena* a, int bucket) {
    const int layer = x->buckets.items[bucket].layer;
    if (!g || a->trained != a->params || layer < 0 || layer >= g->ring.blocks) { return false; }
    if (sharded_on_host(g, a)) { CUDA_CHECK(cudaEventRecord(x->events[bucket].updated, a->host->out)); }
    return true;
}

/* Prints what is gathered in a micro-step, if it comes from the host. */
static inline void sharded_print_price(const ShardedBlocks* g, const WeightArena* a) {
    if (!sharded_on_host(g, a)) { return; }
    printf("offload %.2f GB of weights arrive in each forward pass, and again in each backward pass\n",
           1e-9 * (double)((a->blocks_end - a->blocks_first) * sizeof(floatX)));
}

/* Replaces each rank's `memory` (bytes) by the memory of rank 0, so that all ranks decide the same way by it. */
static inline void sharded_take_first(const ShardedBlocks* g, const Exchange* x, void* memory, size_t bytes) {
    if (g && x->links.all) { nccl_broadcast(x->links.all, memory, bytes, 0, x->compute, "the logits of rank 0"); }
}

// ---------------------------------------------------------------------------------------------------------------------
// checkpoints: no rank has the exact weights of a 16-bit build whole, nor the blocks' weights with ZeRO 3.
// The owner of each part of a piece broadcasts it. All ranks ask for the same pieces in the same order
// (run/session/save.h), and rank 0 gets them.

/* The ctx of the sources below. */
typedef struct {
    const WeightArena* weights;
    const Exchange* exchange;
} ShardReader;

/* A TensorSource of the exact weights of the trained tensors, or of the weights that the model computes with; only rank 0 fills
 * dst. */
template <bool EXACT>
static bool shard_reader_piece(void* reader, const Param* p, size_t first, size_t n, float* dst, Error*) {
    const ShardReader* c = (const ShardReader*)reader;
    const WeightArena* a = c->weights;
    const Buckets* owners = EXACT ? &a->shards : &a->blocks;
    for (size_t i = 0, run, local; i < n; i += run) {
        const size_t at = p->offset + first + i;
        const int owner = shard_owner(owners, at, &local);
        run = size_min(shard_left(owners, at), n - i);
        if (owner == a->rank) { weights_get(a, EXACT, at, run, a->staging[0] + i); }
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

/* Returns the source of a checkpoint's weights, which all ranks call in the same order; NULL where rank 0 has them all. */
static inline TensorSource shard_reader_source(const ShardReader* c, SlotKind kind) {
    const WeightArena* a = c->weights;
    const bool sharded = a->blocks.ranks > 1, adapters = a->trained != a->params;
    if (!c->exchange->links.all) { return NULL; }
    if (kind == SLOT_WEIGHTS) { return sharded ? shard_reader_piece<false> : NULL; }
    return a->master_kind != MASTER_NONE || (sharded && !adapters) ? shard_reader_piece<true> : NULL;
}

#endif
