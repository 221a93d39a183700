/* exchange.cuh -- a gradient's way over several GPUs, and the way back of the updated weights. Other files point here.
 *
 * Every rank computes gradients of all trained tensors from its own rows. The tensors are cut into buckets, and every rank owns
 * a shard of each bucket (dist/buckets.h). A rank sends each shard of its gradients to the owner. The owner adds up what
 * arrives, in rank order, and updates the shard; it alone keeps m, v and master weights of it. Then all gather the new weights.
 * Gradients of norms are small: every rank gathers and adds up all of them (exchange_sum_step()). Adapters go as in ZeRO 1.
 *
 *   ZeRO 1   every rank holds all weights and all gradients; the last micro-step of a step sends
 *   ZeRO 2   gradients lie in a ring (dist/zero.h); every micro-step sends, and the owner adds onto its sums
 *   ZeRO 3   as 2; and a rank holds shards of the blocks alone, and gathers a block before its use (sharded_blocks.cuh)
 *
 * Each rank has two streams. The compute stream runs the layers and the update. The exchange stream runs NCCL's collectives,
 * the sums, and the 8-bit copies of gathered weights (fp8.cuh). One step, of blocks l and buckets b:
 *
 *   compute    forward, head | backward of block l | of l - 1 | ... | wait | decide | update b 0 | update b 1 | forward ...
 *   exchange                                       | send l, sum    | ... | norms   |            | gather 0   | gather 1 ...
 *
 * The streams wait for each other by events alone, in this order. The host waits for none of them.
 *
 *   stream that waits   for the event       recorded by the other stream      and may then
 *   exchange            ready[bucket]:      after the bucket's gradients      send them, and add up its own shard
 *   compute             sent[part] (2):     after the sends from that part    write other gradients into this part of the ring
 *   compute             summed (2):         after a micro-step's last send    begin the next micro-step
 *   exchange            summed:             after the step's last backward    add up the losses, and the gradients of norms
 *   compute             summed:             after these sums                  decide on the step, update its shards
 *   exchange, compute   summed:             around a whole matrix's way       pass it to its owner, or back, between stages
 *   exchange            decided (O):        after the decision                update the buckets, one after the other
 *   exchange            updated[bucket]:    after the update of its shard     gather the bucket's weights, make 8-bit copies
 *   compute             gathered[bucket]:   after gather and copies           read these weights, in the next forward pass
 *   exchange            used (3):           after the last use of a slot      gather another block into it, make its copies
 *   compute             there[slot] (3):    after gather and copies           compute with the block
 *   exchange            turn[0] (S):        before an exchange of heads       record turn[1], also where a graph is captured
 *   compute             turn[1] (S):        after all that was queued         exchange heads with ranks that share its rows
 *
 *   (2) where gradients lie in a ring; `summed` also where ranks pass the layers together
 *   (3) ZeRO 3; with --offload weights the gathers have a stream of their own (sharded_blocks.cuh)
 *   (S) --seq-parallel, whose exchanges of heads run on the compute stream (sequence.cuh)
 *   (O) --offload, also with one rank: the exchange stream updates, beside the next forward pass (host_stream.cuh)
 *
 * With a ring, block l - 2 takes the part of block l, so the sends have the time of one block:
 *
 *   compute    | block l              | block l - 1          | block l - 2: waits for sent[part of l]                | ...
 *   exchange                          | send l, sum          | send l - 1, sum                                       | ...
 *
 * With ZeRO 3 the gathers stand between the sends. Block l - 2 goes into the slot of block l + 1, so its gather waits for
 * `used`, as send l + 1 waits for `ready`: both begin with block l. They are hidden if they end before block l - 1 does.
 *
 *   compute    | block l                       | block l - 1                   | block l - 2 ...        (backward)
 *   exchange   | send l + 1, sum, gather l - 2 | send l, sum, gather l - 3     | send l - 1, sum, ...
 *
 * Graphs: a micro-step is captured whole, its sends with it. So a micro-step ends with a wait for the exchange stream, and the
 * last send (of the embedding's gradient) is not hidden. The update lies outside of the graphs, and so do the events
 * `gathered`: a captured wait for one is an external wait.
 *
 * The bits depend neither on NCCL's algorithms nor on the time at which something arrives: gradients and weights travel as
 * bytes, and only our kernels add. A gradient is rounded once, when its rank computes it; all sums are fp32.
 *
 * No deadlock is possible. The collectives are on one stream, in the order of the host's calls, the same on all ranks. The
 * k-th waits for the earlier collectives, and for a point in this rank's compute stream, which waits for earlier ones alone. So
 * by induction over k all ranks begin each collective, and it ends.
 *
 * Across hosts the network is slower. So a sum has two levels, if all hosts have equally many ranks and the ranks of a host are
 * neighbours. Each rank has a place l in its host. First, it gets from the ranks of its host every shard whose owner has place
 * l, on whatever host. It adds each shard up in rank order. Then it sends the sums to their owners in fp32, once for the whole
 * host. The owner adds the hosts' sums in the hosts' order.
 *
 *   rank h L + l of H hosts with L ranks   grads (H, L, shard) -> landing (L, H, shard) -> sum of the host (H, shard)
 *                                          -> to the ranks l of all hosts (H, shard) -> sum (shard)
 */
#ifndef LLMC_EXCHANGE_CUH
#define LLMC_EXCHANGE_CUH

#include "llmc/dist/agree.h"          // defines: agree_ok, agree_gather, agree_hosts
#include "llmc/dist/buckets.h"        // defines: Bucket, Buckets, DealtMatrix, shard_owner, shard_left
#include "llmc/dist/zero.h"           // defines: GRADIENT_PARTS
#include "llmc/gpu/gradients.cuh"     // defines: Gradients, Gradient, MicroKind, MICRO_FIRST, MICRO_LAST
#include "llmc/gpu/nccl.cuh"          // defines: NcclGroup, NcclId, nccl_join, nccl_all_to_all, nccl_all_gather
#include "llmc/gpu/profile.cuh"       // defines: Profiler, Op
#include "llmc/optim/step_state.cuh"  // defines: StepState, ordered_sum_cuda, SUM_BLOCKS, step_computed_cuda, norm_finish_cuda

enum { JOIN_SECONDS = 120 };

/* The connections of a run's ranks: one of all ranks. If sums have two levels, also one of the ranks on this host, and one
 * of the ranks at this rank's place on each host. */
typedef struct {
    NcclGroup *all, *inside, *across;
    int hosts;  // 1: sums have one level
} Links;

/* The events of the table above that each bucket has. */
typedef struct {
    cudaEvent_t ready, updated, gathered;
} BucketEvents;

typedef struct {
    int rank, ranks;  // ranks <= 1: nothing is exchanged
    Buckets buckets;  // of the trained tensors; none: no layer is waited for
    float* sums;      // (shard_elements) the gradients of this rank's shards, added up over the ranks
    void* landing;    // (ranks, shard) the gradients of one bucket as they arrive: float or floatX
    float* of_hosts;  // (2, hosts, shard) the host's sums, then what arrives of them from all hosts
    float* norms;     // (ranks, norm_elements) gradients of the norms, which are small: every rank adds up all of them
    size_t norm_elements;
    double* partials;              // (buckets + 1, SUM_BLOCKS) sums of squares: of the buckets, then of the norms
    StepState* states;             // (ranks)
    Links links;                   // all zero: the model is not trained
    cudaStream_t compute, stream;  // the model's stream, and the exchange stream
    Profiler* profiler;            // NULL: none
    BucketEvents* events;          // (buckets)
    cudaEvent_t summed, decided;
    cudaEvent_t sent[GRADIENT_PARTS];
} Exchange;

// ---------------------------------------------------------------------------------------------------------------------
// kernels

/* Replaces the sums of a step by the sums over the ranks, added in rank order. */
__global__ void add_states_kernel(StepState* s, const StepState* states, int ranks) {
    s->loss_sum = s->trained = s->norm_square = 0;
    for (int i = 0; i < MIX_MOST; i++) { s->sources.sum[i] = s->sources.tokens[i] = 0; }
    for (int r = 0; r < ranks; r++) {
        s->loss_sum += states[r].loss_sum;
        s->trained += states[r].trained;
        s->norm_square += states[r].norm_square;
        for (int i = 0; i < MIX_MOST; i++) {
            s->sources.sum[i] += states[r].sources.sum[i];
            s->sources.tokens[i] += states[r].sources.tokens[i];
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// opening

/* Returns the elements of the largest bucket. */
static inline size_t exchange_most(const Buckets* list) {
    size_t most = 0;
    for (int i = 0; i < list->count; i++) { most = size_max(most, list->items[i].count); }
    return most;
}

/* Connects the GPUs of the `count` ranks first, first + step, ...; this rank is one. All ranks call this, each for its own
 * group, to which rank `first` invites. End *group with nccl_leave() and free(). Fails on all ranks if one cannot. */
static inline bool exchange_join_some(NcclGroup** group, Team* team, int first, int step, int count, Error* e) {
    const int rank = team->run.rank;
    NcclId id, *all = (NcclId*)xcalloc((size_t)team->run.ranks, sizeof *all);
    memset(&id, 0, sizeof id);
    *group = (NcclGroup*)xmalloc(sizeof **group);
    bool ok = agree_ok(team, rank != first || nccl_invite(&id, e), e);
    if (ok) {
        agree_gather(team, &id, sizeof id, all);
        ok = agree_ok(team, nccl_join(*group, &all[first], (rank - first) / step, count, JOIN_SECONDS, e), e);
    }
    free(all);
    return ok;
}

/* Connects the ranks. exchange_unlink() frees. Fails on all ranks if one cannot. */
static inline bool exchange_join(Links* links, Team* team, Error* e) {
    const int rank = team->run.rank, ranks = team->run.ranks;
    if (!exchange_join_some(&links->all, team, 0, 1, ranks, e)) { return false; }
    links->hosts = agree_hosts(team);
    if (links->hosts <= 1) { return true; }
    const int most = ranks / links->hosts, place = rank % most;
    printf("hosts   %d of %d ranks: gradients are added up on each host first\n", links->hosts, most);
    return exchange_join_some(&links->inside, team, rank - place, 1, most, e) &&
           exchange_join_some(&links->across, team, place, most, links->hosts, e);
}

/* Lays out the sums of this rank's shards, and room for what arrives from the others. */
static inline void exchange_lay_out(Exchange* x, const Gradients* g, Arena* landing, Arena* sums) {
    const size_t most = exchange_most(&x->buckets), hosts = x->links.hosts > 1 ? (size_t)x->links.hosts : 0;
    x->norm_elements = norms_size(g);
    x->sums = take<float>(sums, shard_elements(&x->buckets));
    x->landing = take<char>(landing, most * gradients_bytes(g->fp32 || g->fp32_head));
    x->of_hosts = take<float>(landing, 2 * hosts * (most / (size_t)x->ranks));
    x->norms = take<float>(landing, (size_t)x->ranks * x->norm_elements);
    x->partials = take<double>(landing, ((size_t)x->buckets.count + 1) * SUM_BLOCKS);
    x->states = take<StepState>(landing, x->ranks);
}

/* Makes the stream and the events. The model lays out the buffers. */
static inline void exchange_open(Exchange* x, cudaStream_t compute) {
    int lowest = 0, highest = 0;
    if (x->buckets.count == 0) { return; }
    x->compute = compute;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&x->stream, cudaStreamNonBlocking, highest));
    x->events = (BucketEvents*)xcalloc((size_t)x->buckets.count, sizeof *x->events);
    for (int i = 0; i < x->buckets.count; i++) { x->events[i] = {event_new(), event_new(), event_new()}; }
    x->summed = event_new(), x->decided = event_new();
    for (cudaEvent_t& event : x->sent) { event = event_new(); }
}

static inline void exchange_close(Exchange* x) {
    if (x->buckets.count == 0) { return; }
    for (NcclGroup* group : {x->links.across, x->links.inside, x->links.all}) {
        if (group) { nccl_leave(group); }
    }
    for (int i = 0; i < x->buckets.count; i++) {
        for (cudaEvent_t event : {x->events[i].ready, x->events[i].updated, x->events[i].gathered}) {
            CUDA_CHECK(cudaEventDestroy(event));
        }
    }
    free(x->events);
    CUDA_CHECK(cudaEventDestroy(x->summed));
    CUDA_CHECK(cudaEventDestroy(x->decided));
    for (cudaEvent_t event : x->sent) { CUDA_CHECK(cudaEventDestroy(event)); }
    CUDA_CHECK(cudaStreamDestroy(x->stream));
}

/* Call after the last nccl_free(). */
static inline void exchange_unlink(Exchange* x) {
    free(x->links.across);
    free(x->links.inside);
    free(x->links.all);
}

// ---------------------------------------------------------------------------------------------------------------------
// gradients to their owners

/* Returns the sums (hosts, shard) for this rank's shard, in fp32, one of each host.   grads: (hosts, ranks of a host, shard)
 * unused: room for sums of squares, which the caller's own sum overwrites */
static inline const float* exchange_on_hosts(Exchange* x, Gradient grads, size_t shard, double* unused) {
    const int hosts = x->links.hosts, most = x->ranks / hosts;
    const size_t bytes = shard * gradients_bytes(grads.fp32), n = (size_t)hosts * shard;
    float *sums = x->of_hosts, *arrived = sums + n;
    {
        Op op(x->profiler, x->stream, "gradients on a host", 0, (double)(most - 1) * hosts * (double)bytes);
        nccl_all_to_all_parts(x->links.inside, grads.data, x->landing, bytes, hosts, x->stream, "the exchange on a host");
        ordered_sum_cuda(sums, unused, x->landing, grads.fp32, most, n, false, x->stream);
    }
    Op op(x->profiler, x->stream, "gradients across", 0, (double)(hosts - 1) * (double)shard * sizeof(float));
    nccl_all_to_all(x->links.across, sums, arrived, shard * sizeof(float), x->stream, "the exchange across hosts");
    return arrived;
}

/* Sends the gradients of a bucket once the compute stream has done what it has queued, and adds up this rank's shard; with
 * `add`, onto the sums of earlier micro-steps.   grads: (bucket's count) */
static inline void exchange_send(Exchange* x, int bucket, Gradient grads, bool add) {
    const Bucket* b = &x->buckets.items[bucket];
    const size_t shard = b->count / (size_t)x->ranks, bytes = shard * gradients_bytes(grads.fp32);
    float* sum = x->sums + b->first / (size_t)x->ranks;
    stream_wait(x->stream, x->compute, x->events[bucket].ready);
    double* partials = x->partials + (size_t)bucket * SUM_BLOCKS;
    if (x->links.hosts > 1) {
        const float* arrived = exchange_on_hosts(x, grads, shard, partials);
        ordered_sum_cuda(sum, partials, arrived, true, x->links.hosts, shard, add, x->stream);
        return;
    }
    {
        Op op(x->profiler, x->stream, "gradients to owners", 0, (double)(x->ranks - 1) * (double)bytes);
        nccl_all_to_all(x->links.all, grads.data, x->landing, bytes, x->stream, "the exchange of gradients");
    }
    Op op(x->profiler, x->stream, "sum in rank order", 0, (double)x->ranks * (double)bytes + (double)shard * sizeof(float));
    ordered_sum_cuda(sum, partials, x->landing, grads.fp32, x->ranks, shard, add, x->stream);
}

/* Call after the backward pass of a layer: the embedding (-1), a block, or final norm and head (the number of layers). Sends
 * its gradients to their owners. Without a ring only the last micro-step of a step sends, because it completes the gradients.
 * In a ring each micro-step sends its own gradients: in the first one they overwrite the owners' sums, in later ones they are
 * added. */
static inline void exchange_send_layer(Exchange* x, const Gradients* g, int layer, MicroKind kind) {
    if (x->ranks <= 1 || (!g->in_ring && !(kind & MICRO_LAST))) { return; }
    for (int i = 0; i < x->buckets.count; i++) {
        const Bucket* b = &x->buckets.items[i];
        const bool add = g->in_ring && !(kind & MICRO_FIRST);
        if (b->layer == layer) { exchange_send(x, i, gradient_of_element(g, b->first), add); }
    }
    const int part = gradient_part_of(layer, g->config.num_layers, g->config.tied);
    if (g->in_ring) { CUDA_CHECK(cudaEventRecord(x->sent[part], x->stream)); }
}

/* Call before a layer's gradients are written. Lets the compute stream wait until the sends from their part of the ring are
 * done, if this micro-step has used that part before. */
static inline void exchange_wait_sent(const Exchange* x, const Gradients* g, int layer) {
    const int L = g->config.num_layers;
    const bool used = layer < 0 ? !g->config.tied : layer + GRADIENT_BLOCKS < L;
    if (!g->in_ring || !used) { return; }
    Op op(x->profiler, x->compute, "wait: gradients", 0, 0);
    CUDA_CHECK(cudaStreamWaitEvent(x->compute, x->sent[gradient_part_of(layer, L, g->config.tied)]));
}

/* Ends a micro-step that another one follows: the compute stream waits for all that the exchange stream has queued. */
static inline void exchange_wait_summed(Exchange* x) {
    Op op(x->profiler, x->compute, "wait: gradients", 0, 0);
    stream_wait(x->compute, x->stream, x->summed);
}

/* Call after the last send of a step. Adds up over the ranks, in place, the gradients of the norms (norm_elements), the sums
 * of the step and the norm of the gradients. Then the compute stream may continue. */
static inline void exchange_sum_step(Exchange* x, StepState* state, float* norms) {
    if (x->ranks <= 1) { return; }
    const int count = x->buckets.count * SUM_BLOCKS;
    double* of_norms = x->partials + count;
    step_computed_cuda(state, x->compute);
    Op wait(x->profiler, x->compute, "wait: gradients", 0, 0);
    stream_wait(x->stream, x->compute, x->summed);
    norm_finish_cuda(state, x->partials, count, x->stream);
    nccl_all_gather(x->links.all, state, x->states, sizeof(StepState), x->stream, "the exchange of losses");
    add_states_kernel<<<1, 1, 0, x->stream>>>(state, x->states, x->ranks);
    if (x->norm_elements > 0) {
        nccl_all_gather(x->links.all, norms, x->norms, x->norm_elements * sizeof(float), x->stream, "the exchange of norms");
        ordered_sum_cuda(norms, of_norms, x->norms, true, x->ranks, x->norm_elements, false, x->stream);
        norm_finish_cuda(state, of_norms, SUM_BLOCKS, x->stream);
    }
    CUDA_CHECK_LAUNCH("add_states_kernel");
    stream_wait(x->compute, x->stream, x->summed);
}

/* Sends what the ranks have prepared of a round's matrices to their places in the owners' `room`; or `back`, in floatX, into
 * the places of the sums. The compute stream waits for it. */
static inline void exchange_matrices(Exchange* x, const DealtMatrix* list, int count, float* room, bool back) {
    const size_t width = back ? sizeof(floatX) : sizeof(float);
    const char* what = back ? "matrices from owners" : "matrices to owners";
    size_t moved = 0;
    for (int i = 0; i < count; i++) { moved += param_size(list[i].param); }
    Op op(x->profiler, x->stream, what, 0, (double)moved / x->ranks * (double)width);
    CUDA_CHECK(cudaEventRecord(x->summed, x->compute));
    CUDA_CHECK(cudaStreamWaitEvent(x->stream, x->summed));
    nccl_begin(x->links.all, what);
    for (int i = 0; i < count; i++) {
        const size_t first = list[i].param->offset, end = first + param_size(list[i].param);
        for (size_t at = first, run, local; at < end; at += run) {
            const int holder = shard_owner(&x->buckets, at, &local), owner = list[i].owner;
            const size_t in_room = (size_t)list[i].place * matrix_stride(end - first) + (at - first);
            char *part = (char*)(x->sums + local), *whole = (char*)room + in_room * width;
            const int sender = back ? owner : holder, receiver = back ? holder : owner;
            run = size_min(shard_left(&x->buckets, at), end - at);
            if (x->rank == sender) { nccl_send(x->links.all, back ? whole : part, run * width, receiver, x->stream, what); }
            if (x->rank == receiver) { nccl_receive(x->links.all, back ? part : whole, run * width, sender, x->stream, what); }
        }
    }
    nccl_end(x->links.all, what);
    CUDA_CHECK(cudaEventRecord(x->summed, x->stream));
    CUDA_CHECK(cudaStreamWaitEvent(x->compute, x->summed));
}

// ---------------------------------------------------------------------------------------------------------------------
// weights to all

/* Gathers the weights (bucket's count) of a bucket, whose shards the compute streams of their owners have updated. Call
 * exchange_record_gathered() after it, and after the 8-bit copies of these weights: a stream that waits for a layer then waits
 * for both. */
static inline void exchange_gather(Exchange* x, int bucket, floatX* weights) {
    const Bucket* b = &x->buckets.items[bucket];
    const size_t shard = b->count / (size_t)x->ranks;
    if (x->ranks <= 1) { return; }
    stream_wait(x->stream, x->compute, x->events[bucket].updated);
    Op op(x->profiler, x->stream, "weights to all", 0, (double)(x->ranks - 1) * (double)shard * sizeof(floatX));
    nccl_all_gather(x->links.all, weights + (size_t)x->rank * shard, weights, shard * sizeof(floatX), x->stream,
                    "the exchange of weights");
}
static inline void exchange_record_gathered(const Exchange* x, int bucket) {
    CUDA_CHECK(cudaEventRecord(x->events[bucket].gathered, x->stream));
}

/* Lets the compute stream wait for an event of the exchange that a captured graph may not hold. */
static inline void exchange_wait_uncaptured(const Exchange* x, cudaEvent_t event) {
    cudaStreamCaptureStatus status;
    Op op(x->profiler, x->compute, "wait: weights", 0, 0);
    CUDA_CHECK(cudaStreamIsCapturing(x->compute, &status));
    const unsigned flags = status == cudaStreamCaptureStatusActive ? cudaEventWaitExternal : cudaEventWaitDefault;
    CUDA_CHECK(cudaStreamWaitEvent(x->compute, event, flags));
}

/* Lets the compute stream wait for the weights of a layer: -1 the embedding, the number of layers final norm and head. */
static inline void exchange_wait_gathered(const Exchange* x, int layer) {
    for (int i = 0; i < x->buckets.count; i++) {
        if (x->buckets.items[i].layer != layer) { continue; }
        const bool last = i + 1 == x->buckets.count || x->buckets.items[i + 1].layer != layer;
        if (last) { exchange_wait_uncaptured(x, x->events[i].gathered); }  // they arrive in order
    }
}

/* Lets the compute stream wait for all weights. */
static inline void exchange_wait_all_gathered(const Exchange* x) {
    if (x->buckets.count > 0) { exchange_wait_uncaptured(x, x->events[x->buckets.count - 1].gathered); }
}

#endif
