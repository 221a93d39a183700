/* train_llama3.cu -- trains Llama 3 on GPUs, one process each, in FP32, BF16 or FP16, with the layers of llmc/<layer>.cuh.
 *
 * Read train_llama3.c first: its header says what is computed, in the same order of parts. This file differs in four points:
 *   - Weights, activations and gradients are floatX. Master weights, m, v, norm gradients, losses and all sums are fp32.
 *   - The backward pass may recompute activations instead of keeping them (--recompute), with the same bits.
 *   - All numbers that change from step to step lie in one struct on the device (StepState). So the host queues a step without
 *     waiting for its results, and without allocating. It reads them one step late (llmc/gpu/runner.cuh).
 *   - The first micro-step of a step overwrites the gradients of matrices; the others add to them. With ZeRO 2 and 3 all
 *     overwrite, and the owner of a gradient adds up the micro-steps.
 *
 * Every sum has a fixed order, so two runs of one build on one kind of card give the same bits.
 */
#include "llmc/base/utils.h"  // defines: Error, die, must, xcalloc, round_up, size_min, size_max
#include "llmc/config.h"  // defines: ModelConfig, ParamTable, param_table_for, trained_table_for, param_offset, attention_shape
#include "llmc/run/session/session.h"  // defines: Program, process_share, passes_together, program_close
#include "llmc/run/session/open.h"     // defines: program_open
#include "llmc/train/activations.h"    // defines: BLOCK_ACTIVATIONS
#include "llmc/train/step.h"           // defines: ModelUse, Recipe, Metrics, BatchSource, DECODE_ROWS
#include "llmc/run/session/trainer.h"  // defines: Trainer
#include "llmc/run/jobs/dispatch.h"    // defines: run_job
#include "llmc/run/session/signals.h"  // defines: run_stop_requested
#include "llmc/train/not_finite.h"     // defines: FiniteSearch, TENSOR_TEXT, search_tensor, search_arena
#include "llmc/cuda/cuda_common.cuh"   // defines: floatX, CUDA_CHECK, copy_out, to_float, ProfileRange
#include "llmc/gpu/device.cuh"         // defines: Device, device_open, device_memory, MemoryKind, MemoryPlace, memory_take,
                                       // memory_fill
#include "llmc/gpu/weights.cuh"        // defines: WeightArena, weights_slot, master_check
#include "llmc/gpu/host_stream.cuh"    // defines: HostStream, host_stream_begin, host_stream_finish
#include "llmc/gpu/feed.cuh"           // defines: Feed, feed_next, feed_clear, IN_FLIGHT
#include "llmc/gpu/runner.cuh"         // defines: Runner, runner_begin, runner_end, runner_wait, runner_time, runner_capture
#include "llmc/gpu/plans.cuh"          // defines: device_load_plans, matmul_save_plans, device_check_plans, device_share_plans
#include "llmc/gpu/profile.cuh"        // defines: LayerRange, profiler_new, print_profile
#include "llmc/gpu/debug.cuh"          // defines: search_on_gpu, search_weights, search_gradients
#include "llmc/gpu/exchange.cuh"  // defines: Exchange, exchange_join, exchange_lay_out, exchange_send_layer, exchange_gather
#include "llmc/gpu/sharded_blocks.cuh"  // defines: ShardedBlocks, sharded_begin, sharded_block, ShardReader
#include "llmc/gpu/gradients.cuh"       // defines: Gradient, Gradients, gradient_of, gradients_zero, gradients_expect
#include "llmc/gpu/layers.cuh"          // defines: Queue, Rows, embedding, crossentropy
#include "llmc/gpu/fp8.cuh"             // defines: Fp8, fp8_check, fp8_lay_out_copies, fp8_copies_of, fp8_begin, fp8_refresh
#include "llmc/gpu/linear.cuh"          // defines: Linear, linear, linear_backward, Norm, norm, norm_backward
#include "llmc/gpu/joined.cuh"          // defines: qkv_rope, gate_up_swiglu, down_dx_swiglu
#include "llmc/gpu/sequence.cuh"        // defines: Sequence, sequence_join, sequence_begin, attend, heads_room
#include "llmc/rope.cuh"                // defines: rope_upload
#include "llmc/optim/step_state.cuh"    // defines: StepState, loss_sum_cuda
#include "llmc/gpu/update.cuh"  // defines: Optimizer, optimizer_open, optimizer_decide, optimizer_update, matrices_update

// ---------------------------------------------------------------------------------------------------------------------
// memory: an arena for each MemoryKind. Master, m and v have a place for what this rank holds, by the rules (HeldState)

/* One block: its layers that hold weights, with their gradients. */
typedef struct {
    Norm input_norm;
    Linear qkv;  // (QKV, C), QKV = (NH + 2 NKV) HD: rows of q, then k, then v
    Linear o;    // (C, NH HD)
    Norm post_norm;
    Linear gate_up;  // (2F, C): rows of gate, then up
    Linear down;     // (C, F)
} Block;

/* The layers outside of the blocks. */
typedef struct {
    const floatX* embedding;  // (V, C)
    Gradient dembedding;
    Norm final_norm;
    Linear head;  // (V, C); the embedding if the two are tied
} Ends;

/* What the forward pass of one block leaves for its backward pass. N = B*T rows, each padded (row_pitch). The table in
 * train/activations.h has the widths and meanings. Blocks that recompute a group of activations share one set of its buffers.
 * The last block uses that set, too (recompute.h). */
#define ACTIVATION_FIELD(type, field, shape, width, group, name) type* field;
typedef struct {
    floatX* h;  // (N, C) the residual stream as it enters; kept at every level
    BLOCK_ACTIVATIONS(ACTIVATION_FIELD)
    floatX* t[BLOCK_LINEARS];  // (N, lora_width) of the adapters
} BlockActivations;

static const Recomputed ALL_GROUPS = {true, true, true};  // of activations

/* A pass through the layers: over a batch, or over new rows of one sequence: in 16 bits, unless blocks are frozen in 8. */
typedef enum { BATCH, DECODE } Pass;

enum { HEAD_ROWS = 4096 };  // tokens whose logits exist at one time; 8192 and 16384 take more memory and gain no time
enum { NO_FILL = -1 };      // see llama_create()

typedef struct {
    ModelConfig config;
    ParamTable table;    // of the weights
    ParamTable trained;  // of the tensors that are trained: all of them, or the adapters
    ModelUse use;        // T is the length of a part of a row
    int parts, groups;   // parts of a row, one for each rank (1: whole rows); groups of NCCL to which this rank belongs
    Zero zero;           // what ranks share besides the optimizer's state
    Recompute recompute;
    bool in_fp8, head_in_fp8;  // the products of the blocks, and of the head, are in 8 bits
    Queue queue;
    const Device* device;
    Fp8 fp8;              // weights in 8 bits
    WeightArena weights;  // params (table.elements); with --lora trained (trained.elements); master, m, v (of this rank)

    Gradients grads;
    Optimizer optimizer;

    Feed feed;  // x and y hold the batch
    Runner runner;
    Exchange exchange;         // with the other ranks
    ShardedBlocks* sharded;    // ZeRO 3 or --offload weights, else NULL
    ShardReader reader;        // collects the shards for rank 0, which writes them
    Sequence sequence;         // the exchange with the ranks that share rows
    Team* team;                // ranks that have to pass the layers together; otherwise NULL
    float* rope;               // (T parts, HD)
    BlockActivations* blocks;  // (L)
    floatX* h_final;           // (N, C)
    floatX* norm_final;        // (N, C)
    float* rstd_final;         // (N)
    float* losses;             // (N)
    floatX* logits;            // (min(N, HEAD_ROWS), V)
    floatX* dh;                // (N, C) gradient of the residual stream
    floatX* dnorm;             // (N, C)
    floatX* dqkv;              // (N, QKV); with shared rows also qkv on its way
    floatX* datt;              // (N, NH HD)
    floatX* dt;                // (N, lora_most_width)
    void* matmul_workspace;

    floatX* kv_cache;           // (L, cache_len, 2 NKV HD)
    float* decode_rope;         // (cache_len, HD)
    int32_t* decode_ids;        // (DECODE_ROWS)
    BlockActivations decoding;  // of DECODE_ROWS rows, for one block after the other
    floatX* decode_logits;      // (V)
    floatX* host_logits;        // (V) pinned
    float* float_logits;        // (V) on the host

    void* mapped[NUM_MEM];
    size_t mapped_bytes[NUM_MEM];
} Llama;

/* Returns the gradient of a tensor; {NULL} if none is computed. */
static Gradient grad_at(const Llama* m, ParamKind kind, int l) {
    return m->use.train ? gradient_of(&m->grads, kind, l) : Gradient{NULL, false};
}

/* Returns the norm at `w`, of block l or the final one (l = -1). */
static Norm norm_at(const Llama* m, ParamKind kind, int l, const floatX* w) {
    return {w, grad_at(m, kind, l), m->config.hidden_size, m->config.rms_eps};
}

/* Returns the product at `w`, of block l or the head (l = -1). */
static Linear linear_at(const Llama* m, LinearKind kind, int l, const floatX* w, Pass pass) {
    Linear r;
    memset(&r, 0, sizeof r);
    r.kind = kind;
    r.w = w;
    r.dw = grad_at(m, linear_params[kind], l);
    linear_shape(&m->config, kind, &r.OC, &r.C);
    if (pass == BATCH || (m->fp8.frozen && l >= 0)) { r.fp8 = fp8_copies_of(&m->fp8, kind, l < 0 ? 0 : l); }
    r.lora = lora_at(&m->config, &m->trained, kind, l);
    r.adapters = m->weights.trained;
    r.dadapters = {m->grads.all, m->grads.fp32};
    r.t = l < 0 ? NULL : pass == DECODE ? m->decoding.t[kind] : m->blocks[l].t[kind];
    r.dt = m->dt;
    return r;
}

/* Return block l, and the layers outside of the blocks. Operations queued afterwards wait for these weights, with `last` also
 * for the final norm and the head. A layer gets its weights only through these two. */
static Block block_at(const Llama* m, int l, Pass pass) {
    const ParamTable* t = &m->table;
    const size_t first = param_offset(t, P_INPUT_NORM, l);
    if (!m->sharded || m->config.lora.rank > 0) { exchange_wait_gathered(&m->exchange, l); }  // the block, or its adapters
    const floatX* block =
        m->sharded ? sharded_block(m->sharded, &m->exchange, &m->weights, &m->fp8, l) : m->weights.params + first;
    const auto at = [&](ParamKind kind) { return block + (param_offset(t, kind, l) - first); };
    return {norm_at(m, P_INPUT_NORM, l, at(P_INPUT_NORM)),     linear_at(m, LINEAR_QKV, l, at(P_Q), pass),
            linear_at(m, LINEAR_O, l, at(P_O), pass),          norm_at(m, P_POST_NORM, l, at(P_POST_NORM)),
            linear_at(m, LINEAR_GATE_UP, l, at(P_GATE), pass), linear_at(m, LINEAR_DOWN, l, at(P_DOWN), pass)};
}

static Ends ends_at(const Llama* m, bool last, Pass pass) {
    const WeightArena* a = &m->weights;
    size_t run = 0;
    exchange_wait_gathered(&m->exchange, -1);
    if (last) { exchange_wait_gathered(&m->exchange, m->config.num_layers); }
    return {weight_at(a, param_offset(&m->table, P_EMBEDDING, -1), &run), grad_at(m, P_EMBEDDING, -1),
            norm_at(m, P_FINAL_NORM, -1, weight_at(a, param_offset(&m->table, P_FINAL_NORM, -1), &run)),
            linear_at(m, LINEAR_HEAD, -1, weight_at(a, param_offset(&m->table, P_LM_HEAD, -1), &run), pass)};
}

/* Returns the rows of the batch. */
static Rows batch_rows(const Llama* m) {
    const AttentionShape s = attention_shape(&m->config, m->use.B, m->use.T);
    return {(size_t)s.B * s.T, s, m->feed.starts, m->rope, 0, m->parts > 1 ? &m->sequence : NULL, NULL};
}

/* Takes the wanted groups of a block's activations over N rows; otherwise leaves them as they are. */
static void take_groups(const Llama* m, BlockActivations* s, size_t N, Arena* a, Recomputed wanted) {
    const ModelConfig* c = &m->config;
    const auto bytes = [&](ActivationShape shape, size_t width) {
        const size_t padded = heads_room(width, shape == BY_HEADS ? m->parts : 1);
        return N * (shape == DENSE ? width * sizeof(float) : padded * sizeof(floatX));
    };
#define TAKE_ACTIVATION(type, field, shape, width, group, name) \
    if (wanted.group) { s->field = (type*)take<char>(a, bytes(shape, width)); }
    BLOCK_ACTIVATIONS(TAKE_ACTIVATION)
}

static void take_adapter_rows(const Llama* m, BlockActivations* s, size_t N, Arena* a) {
    for (int i = 0; i < BLOCK_LINEARS; i++) { s->t[i] = take<floatX>(a, N * pitch_of(lora_width(&m->config.lora, i))); }
}

/* Lays out the activations of a batch. Those that blocks share lie in the workspace `w`. A block's own lie in memory of the
 * gradients if there is room (gradients_lend()), otherwise in `a`. */
static void lay_out_activations(Llama* m, Arena* a, Arena* w) {
    const ModelConfig* c = &m->config;
    const ModelUse* o = &m->use;
    const size_t N = (size_t)o->B * o->T, L = c->num_layers, C = pitch_of(c->hidden_size);
    BlockActivations shared;
    memset(&shared, 0, sizeof shared);
    take_groups(m, &shared, N, w, recompute_at(&m->recompute, 0));
    m->rope = take<float>(a, (size_t)o->T * m->parts * c->head_dim);
    floatX* only = o->train ? NULL : take<floatX>(a, N * C);  // without a backward pass, one residual stream is enough
    for (size_t l = L, top = SIZE_MAX; l-- > 0;) {
        const Recomputed shares = recompute_at(&m->recompute, l + 1 < L ? (int)l : 0);
        const auto take_own = [&](Arena* from) {  // `shared` gives the rest
            BlockActivations s = shared;
            s.h = o->train ? take<floatX>(from, N * C) : only;
            take_groups(m, &s, N, from, {!shares.norms, !shares.gate_up, !shares.block});
            take_adapter_rows(m, &s, N, from);
            return s;
        };
        Arena own = {NULL, 0}, lent;
        take_own(&own);  // measures
        m->blocks[l] = take_own(gradients_lend(&m->grads, (int)l, own.used, &top, &lent) ? &lent : a);
    }
    m->h_final = o->train ? take<floatX>(a, N * C) : only;
    m->norm_final = take<floatX>(a, N * C);
    m->rstd_final = take<float>(a, N);
    m->losses = take<float>(a, N);
}

/* Lays out a model's buffers, as in train_llama3.c. */
static void llama_lay_out(Llama* m, Arena mem[NUM_MEM]) {
    const ModelConfig* c = &m->config;
    const ModelUse* o = &m->use;
    const size_t N = (size_t)o->B * o->T, V = pitch_of(c->vocab_size), C = pitch_of(c->hidden_size);
    const size_t rows = size_min(N, HEAD_ROWS);  // of logits
    const size_t F = pitch_of(c->intermediate_size), QKV = heads_room(qkv_width(c), m->parts),
                 Q = heads_room(q_width(c), m->parts);
    Arena* w = &mem[MEM_WORKSPACE];
    m->weights.params = m->weights.trained = take<floatX>(&mem[MEM_WEIGHTS], weights_whole(&m->weights, &m->table));
    if (m->sharded) { sharded_lay_out(m->sharded, &m->weights, &mem[MEM_WEIGHTS], &mem[MEM_BLOCKS]); }
    if (c->lora.rank > 0) { m->weights.trained = take<floatX>(&mem[MEM_ADAPTERS], m->trained.elements); }
    weights_lay_out_staging(&m->weights, w, &mem[MEM_PINNED]);
    m->matmul_workspace = take<char>(w, m->queue.matmul->workspace_bytes);
    if (o->train) { gradients_lay_out(&m->grads, &mem[MEM_GRADIENTS], &mem[MEM_HOME]); }
    if (N > 0) {
        lay_out_activations(m, &mem[MEM_ACTIVATIONS], w);
        feed_lay_out(&m->feed, o->B, o->T, m->parts, o->documents, &mem[MEM_ACTIVATIONS], &mem[MEM_PINNED]);
        runner_lay_out_losses(&m->runner, m->losses, N, &mem[MEM_PINNED]);
        m->logits = take<floatX>(&mem[MEM_LOGITS], rows * V);
    }
    if (o->train) {
        if (o->ranks > 1) { exchange_lay_out(&m->exchange, &m->grads, &mem[MEM_LANDING], &mem[MEM_SUMS]); }
        weights_lay_out_state(&m->weights, c->lora.rank > 0, &mem[MEM_MASTER], &mem[MEM_M], &mem[MEM_V], &mem[MEM_WINDOWS]);
        m->dh = take<floatX>(w, N * C);
        m->dnorm = take<floatX>(w, N * C);
        m->dqkv = take<floatX>(w, N * QKV);
        m->datt = take<floatX>(w, N * Q);
        m->dt = take<floatX>(w, N * pitch_of(lora_most_width(&c->lora)));
        m->sequence.pieces = take<floatX>(w, m->parts > 1 ? N * QKV : 0);
        m->sequence.out = take<floatX>(w, m->parts > 1 ? N * Q : 0);
        size_t scratch = size_max(rmsnorm_backward_scratch_cuda(N, c->hidden_size), norm_square_scratch_cuda());
        scratch = size_max(scratch, embedding_backward_scratch_cuda(N, c->hidden_size));
        scratch = size_max(scratch, attention_backward_scratch_cuda(heads_shape(attention_shape(c, o->B, o->T), m->parts)));
        scratch = size_max(scratch, N * F * sizeof(floatX));  // the gradient of SwiGLU's output
        scratch = size_max(scratch, matrices_scratch(&m->trained));
        m->queue.scratch = take<char>(w, scratch);
        optimizer_lay_out(&m->optimizer, &m->trained, &m->exchange.buckets, m->weights.host ? m->weights.host->piece : 0, w);
        runner_lay_out(&m->runner, w, &mem[MEM_PINNED]);
        m->queue.counts = m->runner.state ? m->runner.state->quantised : NULL;
    }
    if (m->in_fp8) {
        fp8_lay_out_copies(&m->fp8, c, &m->table, m->head_in_fp8, m->sharded != NULL, m->weights.params, &mem[MEM_FP8]);
        fp8_lay_out_factors(&m->fp8, &m->queue, size_max(N, o->cache_len > 0 ? DECODE_ROWS : 0), rows, o->train, w);
    }
    if (o->cache_len > 0) {
        Arena* a = &mem[MEM_CACHE];
        m->kv_cache = take<floatX>(a, (size_t)c->num_layers * o->cache_len * 2 * kv_width(c));
        m->decode_rope = take<float>(a, (size_t)o->cache_len * c->head_dim);
        m->decode_ids = take<int32_t>(a, DECODE_ROWS);
        take_groups(m, &m->decoding, DECODE_ROWS, a, ALL_GROUPS);
        m->decoding.h = m->decoding.mid;  // the residual stream stays in place: cuBLASLt's sums then have these bits
        take_adapter_rows(m, &m->decoding, DECODE_ROWS, a);
        m->decode_logits = take<floatX>(a, V);
        m->host_logits = take<floatX>(&mem[MEM_PINNED], c->vocab_size);
        m->float_logits = take<float>(&mem[MEM_PINNED], c->vocab_size);
    }
}

/* Makes a model without memory, as the options say. Free with llama_close(). The head adds to its gradient chunk by chunk. In
 * ZeRO 2 and 3 a gradient holds one micro-step, and its owner's sums are fp32 in any case. */
static Llama llama_open(const ModelConfig* c, const ModelUse* use, const Options* o, MatmulContext* matmul) {
    const SequenceShare share = sequence_share(use->rank, use->ranks, o->seq_parallel);
    const int ranks = use->ranks > 1 ? use->ranks : 1;
    const bool lora = c->lora.rank > 0;
    Llama m;
    memset(&m, 0, sizeof m);
    m.config = *c;
    m.use = *use;
    m.use.T = use->T / share.row_ranks;
    m.parts = m.sequence.parts = share.row_ranks;
    m.groups = use->train ? (ranks > 1) + (m.parts > 1) : 0;
    m.zero = use->train && ranks > 1 ? (Zero)o->zero : ZERO_1;
    m.recompute = o->recompute;
    if (!use->train) { recompute_set(&m.recompute, RECOMPUTE_BLOCK, ALL_BLOCKS); }  // nothing is kept
    recompute_limit(&m.recompute, c->num_layers - (use->train ? 1 : 0));
    m.in_fp8 = o->fp8 && use->B > 0;
    m.head_in_fp8 = o->fp8_head && m.in_fp8;
    m.queue.matmul = matmul;
    m.table = param_table_for(c, ranks);
    m.trained = trained_table_for(c, ranks);
    m.blocks = (BlockActivations*)xcalloc(c->num_layers, sizeof *m.blocks);
    if (use->train && o->offload >= OFFLOAD_OPTIMIZER) { m.weights.host = (HostStream*)xcalloc(1, sizeof *m.weights.host); }
    m.exchange.rank = m.weights.rank = use->rank;
    m.exchange.ranks = ranks;
    m.grads.buckets = buckets_list(&m.trained);
    if (ranks > 1 || m.weights.host) { m.exchange.buckets = m.grads.buckets; }
    if (ranks > 1) { m.weights.shards = m.exchange.buckets; }
    m.fp8.frozen = lora || !use->train, m.fp8.apart = m.exchange.buckets.count > 0 && !m.fp8.frozen;
    ArenaRanges own = ranks > 1 ? shard_ranges(&m.exchange.buckets, use->rank) : ArenaRanges{NULL, 0};
    m.weights.held = ranks > 1 ? held_state(&m.trained, &own) : held_whole(&m.trained);
    free(own.items);
    m.weights.master_kind = master_kind_of((MasterKind)o->master);
    m.weights.bf16_moments = o->moments == MOMENTS_BF16;
    const bool gathers = m.zero == ZERO_3 || (m.weights.host && o->offload == OFFLOAD_WEIGHTS);
    if (gathers) { m.sharded = sharded_new(&m.weights, &m.table, c->num_layers, c->tied); }
    const int64_t micro = (int64_t)o->batch * o->seq, step = o->total_batch ? o->total_batch / share.groups : micro;
    const bool automatic = o->grad_dtype == GRAD_DTYPE_AUTO;
    Gradients* g = &m.grads;
    g->config = *c;
    g->trained = m.trained;
    g->in_ring = m.zero != ZERO_1 && !lora;  // adapters' are small
    g->host = o->offload >= OFFLOAD_GRADIENTS && !lora ? m.weights.host : NULL;
    g->lends = use->train && !g->in_ring && step == micro && !lora && !g->host, g->sent = ranks > 1;
    const int64_t sums = g->in_ring ? 1 : step / micro, chunks = (int64_t)ceil_div((size_t)o->batch * m.use.T, HEAD_ROWS);
    g->fp32 = o->grad_dtype == GRAD_DTYPE_FP32 || gradients_need_fp32(automatic, sums, lora);
    g->fp32_head = !g->fp32 && automatic && gradients_need_fp32(true, sums * chunks, false);
    return m;
}

static void llama_close(Llama* m) {
    free(m->blocks);
    sharded_delete(m->sharded, &m->weights);
    free(m->weights.host);
    param_table_free(&m->table);
    param_table_free(&m->trained);
    buckets_free(&m->grads.buckets);
    held_free(&m->weights.held);
    optimizer_close(&m->optimizer);
}

/* Computes the bytes of each kind of memory that llama_create() will take, with the workspace of the products' context. */
static void llama_measure(Llama* m, size_t bytes[NUM_MEM]) {
    Arena mem[NUM_MEM];
    memset(mem, 0, sizeof mem);
    llama_lay_out(m, mem);
    for (int i = 0; i < NUM_MEM; i++) { bytes[i] = round_up(mem[i].used, (size_t)2 << 20); }  // cudaMalloc's unit
}

/* Returns where this memory lies. */
static MemoryPlace place_of(const Llama* m, int kind) {
    const MemoryKind weights = m->config.lora.rank > 0 ? MEM_ADAPTERS : MEM_WEIGHTS;
    const bool sent =
        kind == (int)weights || kind == MEM_GRADIENTS || kind == MEM_LANDING || (m->sharded && kind == MEM_WEIGHTS);
    if (kind >= MEM_HOME || (m->weights.host && kind >= MEM_MASTER && kind <= MEM_V)) { return ON_HOST; }
    return m->exchange.links.all && sent ? ON_CARD_EXCHANGED : ON_CARD;
}

/* Allocates all memory of an opened model. Fills activations and workspace with the byte `fill`, unless it is NO_FILL: no
 * result depends on it. Weights, gradients and optimizer state are zero until they are read, drawn or computed. */
static void llama_create(Llama* m, int fill) {
    const ModelUse* use = &m->use;
    Arena mem[NUM_MEM];
    memset(mem, 0, sizeof mem);
    llama_measure(m, m->mapped_bytes);
    CUDA_CHECK(cudaStreamCreateWithFlags(&m->queue.stream, cudaStreamNonBlocking));
    for (int i = 0; i < NUM_MEM; i++) {
        const size_t bytes = m->mapped_bytes[i];
        if (bytes == 0) { continue; }
        const MemoryPlace place = place_of(m, i);
        const bool zeroed = memory_kinds[i].begins_zero;
        m->mapped[i] = memory_take(place, m->exchange.links.all, bytes, memory_kinds[i].name);
        if (place != ON_HOST && (zeroed || fill != NO_FILL)) {
            memory_fill(place, m->mapped[i], zeroed ? 0 : fill, bytes, m->queue.stream);
        }
        mem[i].base = (char*)m->mapped[i];
    }
    llama_lay_out(m, mem);
    m->queue.matmul->workspace = m->matmul_workspace;
    weights_open(&m->weights, m->queue.stream);
    feed_open(&m->feed, m->queue.stream);
    runner_open(&m->runner, m->queue.stream);
    exchange_open(&m->exchange, m->queue.stream);
    sharded_open(m->sharded, &m->weights, &m->exchange);
    sequence_open(&m->sequence, m->exchange.stream);
    if (use->B > 0) { rope_upload(m->rope, use->T * m->parts, &m->config, m->queue.stream); }
    if (use->cache_len > 0) { rope_upload(m->decode_rope, use->cache_len, &m->config, m->queue.stream); }
    if (use->train) {
        optimizer_open(&m->optimizer, &m->queue, &m->weights, &m->grads, &m->exchange);
        CUDA_CHECK(cudaMemsetAsync(m->runner.state, 0, sizeof(StepState), m->queue.stream));
    }
    CUDA_CHECK(cudaStreamSynchronize(m->queue.stream));
}

static void llama_free(Llama* m) {
    CUDA_CHECK(cudaDeviceSynchronize());
    weights_close(&m->weights);
    feed_close(&m->feed);
    runner_close(&m->runner);  // its graphs hold calls of the exchanges
    sharded_close(m->sharded, &m->weights);
    sequence_close(&m->sequence);
    exchange_close(&m->exchange);
    for (int i = 0; i < NUM_MEM; i++) {
        memory_give_back(place_of(m, i), m->exchange.links.all, m->mapped[i], m->mapped_bytes[i]);
    }
    exchange_unlink(&m->exchange);
    CUDA_CHECK(cudaStreamDestroy(m->queue.stream));
    free(m->queue.profiler);
    llama_close(m);
}

// ---------------------------------------------------------------------------------------------------------------------
// forward

/* Queues the forward pass of a block from s->h on. Writes h_next (N, C), which may be s->h. For the backward pass h_next is
 * NULL: then it computes again only the groups `wanted` of s, with the same kernels and so the same bits. The backward pass
 * of SwiGLU computes SwiGLU's output again. */
static void block_forward(const Llama* m, floatX* h_next, const Block* w, const BlockActivations* s, const Rows* r,
                          Recomputed wanted) {
    const Queue* q = &m->queue;
    if (wanted.norms) { norm(q, s->norm1, s->rstd1, &w->input_norm, s->h, r->N, wanted.block ? &w->qkv : NULL); }
    if (wanted.block) {
        qkv_rope(q, s->qkv, m->dqkv, &w->qkv, s->norm1, r);
        attend(q, s->att, s->lse, s->qkv, r);
        linear(q, s->mid, &w->o, s->att, s->h, r->N);
    }
    if (wanted.norms) { norm(q, s->norm2, s->rstd2, &w->post_norm, s->mid, r->N, wanted.gate_up ? &w->gate_up : NULL); }
    if (wanted.gate_up) { gate_up_swiglu(q, h_next ? s->act : NULL, s->gate_up, &w->gate_up, s->norm2, r->N, &w->down); }
    if (h_next) { linear(q, h_next, &w->down, s->act, s->mid, r->N); }
}

/* Computes norm_final (B, T, C) from the tokens feed.x, and the activations of the blocks. */
static void llama_forward(const Llama* m) {
    const Queue* q = &m->queue;
    const Rows rows = batch_rows(m);
    const int L = m->config.num_layers;
    sharded_begin(m->sharded, &m->exchange);
    const Ends ends = ends_at(m, false, BATCH);
    ProfileRange phase("forward");
    sequence_begin(&m->sequence, &m->exchange);
    fp8_begin(&m->fp8, q);
    embedding(q, m->blocks[0].h, ends.embedding, m->feed.x, rows.N, m->config.hidden_size);
    for (int l = 0; l < L; l++) {
        LayerRange layer(l);
        const Block w = block_at(m, l, BATCH);
        floatX* h_next = l + 1 < L ? m->blocks[l + 1].h : m->h_final;
        block_forward(m, h_next, &w, &m->blocks[l], &rows, ALL_GROUPS);
    }
    const Ends last = ends_at(m, true, BATCH);
    norm(q, m->norm_final, m->rstd_final, &last.final_norm, m->h_final, rows.N, NULL);
}

/* Runs head and loss: writes losses (N) and, if dloss is not 0, dnorm (N, C) and the head's gradient (with `add`, adds to
 * it). */
static void llama_loss(const Llama* m, float dloss, bool add) {
    const Queue* q = &m->queue;
    const int C = m->config.hidden_size, V = m->config.vocab_size;
    const size_t N = (size_t)m->use.B * m->use.T;
    const Linear head = ends_at(m, true, BATCH).head;
    const float* loss_scale = m->runner.state ? &m->runner.state->loss_scale : NULL;
    const float factor = fp8_factor_behind(&head, dloss);
    ProfileRange phase("head and loss");
    for (size_t at = 0; at < N; at += HEAD_ROWS) {
        const size_t rows = size_min(HEAD_ROWS, N - at);
        const floatX* x = m->norm_final + at * pitch_of(C);
        linear(q, m->logits, &head, x, NULL, rows);
        crossentropy(q, m->losses + at, m->logits, m->feed.y + at, dloss / factor, loss_scale, rows, V);
        if (dloss == 0.0f) { continue; }
        linear_backward(q, m->dnorm + at * pitch_of(C), &head, m->logits, x, rows, add || at > 0, factor);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// backward

/* Runs the backward pass after llama_forward() and llama_loss(dloss != 0). Carries dh from the last block to the first. With
 * several GPUs, sends each gradient once it is complete. */
static void llama_backward(Llama* m, MicroKind kind) {
    const Queue* q = &m->queue;
    const Rows rows = batch_rows(m);
    const size_t N = rows.N;
    const int C = m->config.hidden_size, L = m->config.num_layers;
    const Ends ends = ends_at(m, true, BATCH);
    const bool add = gradients_add(&m->grads, kind);
    ProfileRange phase("backward");

    gradients_zero(&m->grads, L, kind, q->stream);
    CUDA_CHECK(cudaMemsetAsync(m->dh, 0, N * pitch_of(C) * sizeof(floatX), m->queue.stream));
    norm_backward(q, m->dh, &ends.final_norm, m->dnorm, m->h_final, m->rstd_final, N);
    exchange_send_layer(&m->exchange, &m->grads, L, kind);
    for (int l = L - 1; l >= 0; l--) {
        LayerRange layer(l);
        const Block w = block_at(m, l, BATCH);
        const BlockActivations* s = &m->blocks[l];
        const Recomputed again = recompute_at(&m->recompute, l);
        block_forward(m, NULL, &w, s, &rows, again);
        exchange_wait_sent(&m->exchange, &m->grads, l);
        gradients_expect(&m->grads, l, kind, q->stream);
        // h_next = mid + act Wdown^T: dh is the gradient of both. dw comes last: dx and SwiGLU may make its factors
        down_dx_swiglu(q, s->gate_up, again.norms ? s->act : NULL, &w.down, m->dh, N, &w.gate_up);
        linear_backward_weight(q, &w.down, m->dh, s->act, N, add);
        linear_backward(q, m->dnorm, &w.gate_up, s->gate_up, s->norm2, N, add);
        norm_backward(q, m->dh, &w.post_norm, m->dnorm, s->mid, s->rstd2, N);
        // mid = h + att Wo^T
        linear_backward(q, m->datt, &w.o, m->dh, s->att, N, add);
        attend_backward(q, m->dqkv, m->datt, s->att, again.block || l == L - 1, s->lse, s->qkv, &rows);
        linear_backward(q, m->dnorm, &w.qkv, m->dqkv, s->norm1, N, add);
        norm_backward(q, m->dh, &w.input_norm, m->dnorm, s->h, s->rstd1, N);
        exchange_send_layer(&m->exchange, &m->grads, l, kind);
        gradients_leave(&m->grads, l, kind, q->stream);
    }
    exchange_wait_sent(&m->exchange, &m->grads, -1);
    gradients_zero(&m->grads, -1, kind, q->stream);
    embedding_backward(q, ends.dembedding, m->dh, m->feed.x, N, C, m->config.vocab_size);
    exchange_send_layer(&m->exchange, &m->grads, -1, kind);
}

// ---------------------------------------------------------------------------------------------------------------------
// update

/* Updates what this rank owns of a bucket. With several GPUs it then sends the new weights to the others, except the blocks of
 * ZeRO 3. */
static void update_bucket(Llama* m, const Queue* q, const StepState* state, const Recipe* recipe, int i) {
    Exchange* x = &m->exchange;
    const Bucket* b = &x->buckets.items[i];
    const ArenaRange mine = shard_of(b, x->rank, x->ranks);
    UpdateRange range = update_range(&m->weights, &m->grads, mine.first, mine.count);
    if (x->ranks > 1) { range = {mine, range.weights, x->sums + b->first / (size_t)x->ranks, mine, true}; }
    optimizer_update(&m->optimizer, q, &m->weights, state, recipe, range);
    if (sharded_keeps(m->sharded, x, &m->weights, i)) { return; }
    exchange_gather(x, i, range.weights - (mine.first - b->first));
    fp8_follow(&m->fp8, x, i, &m->weights);
    exchange_record_gathered(x, i);
}

/* Queues norm, decision and update. Call it when gradients, or with several GPUs sums and norm, are complete. Buckets are
 * updated in the order in which the forward pass needs them; with state on the host, beside that pass (host_stream.cuh). The
 * host reads the outcome from the StepState later. */
static void llama_update(Llama* m, const Recipe* recipe) {
    Exchange* x = &m->exchange;
    HostStream* host = m->weights.host;
    Queue q = m->queue;  // of the update
    const StepState* state = m->runner.state;
    ProfileRange phase("update");
    if (host) { host_stream_begin(host); }
    fp8_take_counts(&m->fp8, &q);
    optimizer_decide(&q, &m->grads, x, m->runner.state, recipe);
    matrices_update(&m->optimizer, &q, &m->weights, &m->grads, x, state, recipe);
    if (host) {
        state = runner_keep_decided(&m->runner);
        stream_wait(x->stream, x->compute, x->decided);
        q.stream = x->stream;
    }
    for (int i = 0; i < x->buckets.count; i++) { update_bucket(m, &q, state, recipe, i); }
    if (x->buckets.count > 0) { return; }
    const UpdateRange all = update_range(&m->weights, &m->grads, 0, m->trained.elements);
    optimizer_update(&m->optimizer, &q, &m->weights, state, recipe, all);
    fp8_refresh(&m->fp8, &q, &m->weights);
}

// ---------------------------------------------------------------------------------------------------------------------
// generation: the forward pass for the new rows of one sequence, with keys and values cached

/* Takes `rows` <= DECODE_ROWS tokens (host memory) at positions pos .. pos + rows - 1 (NextLogits). Returns the logits (V)
 * after the last one, on the host. */
static const float* llama_decode(void* model, const int32_t* tokens, int rows, int pos, Error* e) {
    Llama* m = (Llama*)model;
    (void)e;
    const Queue* q = &m->queue;
    const ModelConfig* c = &m->config;
    const BlockActivations* s = &m->decoding;
    const int C = c->hidden_size, V = c->vocab_size;
    Rows r = {(size_t)rows, attention_shape(c, 1, rows), NULL, m->decode_rope, pos, NULL, m->kv_cache};
    sharded_begin(m->sharded, &m->exchange);
    const Ends ends = ends_at(m, true, DECODE);

    CUDA_CHECK(cudaMemcpyAsync(m->decode_ids, tokens, rows * sizeof(int32_t), cudaMemcpyHostToDevice, m->queue.stream));
    embedding(q, s->h, ends.embedding, m->decode_ids, r.N, C);
    for (int l = 0; l < c->num_layers; l++) {
        const Block w = block_at(m, l, DECODE);
        block_forward(m, s->h, &w, s, &r, ALL_GROUPS);
        r.cache += (size_t)m->use.cache_len * 2 * kv_width(c);
    }
    norm(q, s->norm1, s->rstd1, &ends.final_norm, s->h + (r.N - 1) * pitch_of(C), 1, NULL);
    linear(q, m->decode_logits, &ends.head, s->norm1, NULL, 1);
    sharded_take_first(m->sharded, &m->exchange, m->decode_logits, V * sizeof(floatX));
    copy_out(m->host_logits, m->decode_logits, V * sizeof(floatX), m->queue.stream);
    for (int i = 0; i < V; i++) { m->float_logits[i] = to_float(m->host_logits[i]); }
    return m->float_logits;
}

// ---------------------------------------------------------------------------------------------------------------------
// training step

/* Returns whether the ranks meet in every micro-step, not only in the last one of a step. */
static bool meets_always(const Llama* m) { return m->grads.in_ring || m->team; }

/* Runs the micro-batch in feed.x and feed.y, and adds to the sums of losses. After the last one of a step, the ranks add up
 * gradients and losses. */
static void micro_step(void* model, const Recipe* recipe, MicroKind kind) {
    Llama* m = (Llama*)model;
    llama_forward(m);
    llama_loss(m, (float)recipe->hyper.loss_weight, gradients_add(&m->grads, kind));
    loss_sum_cuda(m->runner.state, m->losses, m->feed.y, m->feed.sources, recipe->data.num_sources, m->feed.B, m->feed.T,
                  kind & MICRO_FIRST, m->queue.stream);
    llama_backward(m, kind);
    if (kind & MICRO_LAST) {
        exchange_sum_step(&m->exchange, m->runner.state, m->grads.extra);
    } else if (meets_always(m)) {
        exchange_wait_summed(&m->exchange);
    }
}

/* Queues forward and backward over the step's micro-batches, then the update with learning rate `lr`. Until the update, a step
 * can be dropped (step.h): the next one overwrites its gradients and sums. */
static bool train_step(void* model, const Recipe* recipe, double lr, Error* e) {
    Llama* m = (Llama*)model;
    bool ok = true;
    runner_begin(&m->runner, lr);
    if (m->in_fp8) { CUDA_CHECK(cudaMemsetAsync(m->queue.counts, 0, sizeof m->runner.state->quantised, m->queue.stream)); }
    for (int k = 0; ok && k < recipe->accumulate; k++) {
        const MicroKind kind = micro_kind(recipe, &m->grads, k);
        const cudaGraphExec_t captured = m->runner.micro[kind];
        ok = !run_stop_requested() && feed_next(&m->feed, &recipe->data, e);
        // otherwise one rank would wait for another that has dropped the step
        if (!ok || kind & MICRO_LAST || meets_always(m)) { ok = agree_ok(recipe->team, ok, e); }
        if (ok && captured) { CUDA_CHECK(cudaGraphLaunch(captured, m->queue.stream)); }
        if (ok && !captured) { micro_step(m, recipe, kind); }
    }
    if (!ok) { return false; }
    llama_update(m, recipe);
    runner_end(&m->runner);
    return true;
}

/* Waits for the oldest queued step and returns its result. */
static Metrics step_result(void* model, const Recipe* recipe) { return runner_wait(&((Llama*)model)->runner, recipe); }
static double step_busy_ms(const void* model) { return ((const Llama*)model)->runner.busy_ms; }

// ---------------------------------------------------------------------------------------------------------------------
// the trainer's table (trainer.h)

static const Device* device_of(const Trainer* t) { return (const Device*)t->device; }
static void trainer_measure(const Trainer* t, const ModelConfig* c, const ModelUse* use, const Options* o, MemoryTable* table) {
    size_t bytes[NUM_MEM];
    Llama m = llama_open(c, use, o, device_of(t)->matmul);
    table->host = device_of(t)->host;
    llama_measure(&m, bytes);
    memory_add(table, t->missing ? "context, estimated" : "context", device_of(t)->context);
    for (int i = 0; i < NUM_MEM; i++) {  // the workspace of cuBLAS depends on the card
        const char* name = t->missing && i == MEM_WORKSPACE ? "workspace, estimated" : memory_kinds[i].name;
        memory_add_row(table, name, bytes[i], place_of(&m, i) == ON_HOST);
    }
    memory_add(table, "nccl, estimated", nccl_expected_bytes(m.groups));
    llama_close(&m);
}

static uint64_t trainer_available(const Trainer* t, const Options* o) {
    return o->max_memory ? o->max_memory : device_memory(device_of(t));
}

/* Returns the bytes of the card that this process holds. */
static uint64_t trainer_memory_used(const void* model) {
    const Llama* m = (const Llama*)model;
    uint64_t bytes = m->device->context + nccl_expected_bytes(m->groups);
    for (int i = 0; i < NUM_MEM; i++) { bytes += place_of(m, i) == ON_HOST ? 0 : m->mapped_bytes[i]; }
    return bytes;
}

static void* trainer_create(const Trainer* t, const ModelConfig* c, const ModelUse* use, const Options* o, Team* team) {
    Llama* m = (Llama*)xmalloc(sizeof *m);
    *m = llama_open(c, use, o, device_of(t)->matmul);
    if (team && use->train) {
        Error e = NO_ERROR;
        const bool joined = exchange_join(&m->exchange.links, team, &e) &&
                            sequence_join(&m->sequence.group, team, sequence_share(use->rank, use->ranks, o->seq_parallel), &e);
        if (!joined) { together_die(team, &e); }
    }
    llama_create(m, 0);
    m->device = device_of(t);
    m->reader = {&m->weights, &m->exchange};
    m->team = passes_together(team, use->train, o) ? team : NULL;
    return m;
}

static void trainer_destroy(void* model) {
    llama_free((Llama*)model);
    free(model);
}

static StateSlot trainer_slot(void* model, SlotKind kind) {
    Llama* m = (Llama*)model;
    exchange_wait_all_gathered(&m->exchange);
    host_stream_finish(m->weights.host);
    return weights_slot(&m->weights, kind);
}

/* Returns the slot of weights that the ranks read together; without a source if rank 0 has them all. */
static StateSlot trainer_collect(void* model, SlotKind kind) {
    Llama* m = (Llama*)model;
    exchange_wait_all_gathered(&m->exchange);
    host_stream_finish(m->weights.host);
    return {slot_names[kind], SAFE_F32, shard_reader_source(&m->reader, kind), NULL, &m->reader, NULL};
}

/* Adds the plans of the matrix products to a checkpoint. */
static bool trainer_add_files(void* model, Checkpoint* k, Error* e) {
    char path[PATH_CAP];
    return path_join(path, k->tmp, PLAN_NAME, e) && matmul_save_plans(((Llama*)model)->queue.matmul, path, e) &&
           checkpoint_add(k, PLAN_NAME, e);
}

/* Finds the file of the matrix products' plans: --plan, or the one of the checkpoint `resumed` (or NULL). Returns false if
 * neither exists. */
static bool plan_file(char path[PATH_CAP], const Options* o, const char* resumed) {
    Error e = NO_ERROR;
    if (!o->plan && (!resumed || !folder_has(resumed, PLAN_NAME))) { return false; }
    if (o->plan) {
        snprintf(path, PATH_CAP, "%s", o->plan);
    } else {
        must(path_join(path, resumed, PLAN_NAME, &e), &e);
    }
    return true;
}

/* Reads the plans of the matrix products. For training, also runs a micro-step of each kind to make the missing plans, takes
 * over rank 0's plans, and captures the graphs. The first real step overwrites the gradients and sums of these micro-steps. */
static void trainer_prepare(void* model, const Recipe* recipe, const Options* o, const char* resumed) {
    Llama* m = (Llama*)model;
    const bool first = m->use.rank == 0;
    char plans[PATH_CAP];
    const bool planned = plan_file(plans, o, resumed);
    if (planned) { device_load_plans(m->queue.matmul, plans, o->plan != NULL, first); }
    fp8_refresh(&m->fp8, &m->queue, &m->weights);
    if (!recipe) { return; }
    MicroKind kinds[MICRO_KINDS];
    const int count = micro_kinds(recipe, &m->grads, kinds);
    runner_restore(&m->runner, recipe->run);
    feed_aim(&m->feed, &recipe->data);
    feed_clear(&m->feed);
    for (int k = 0; k < count; k++) { micro_step(m, recipe, kinds[k]); }
    CUDA_CHECK(cudaStreamSynchronize(m->queue.stream));
    if (planned && first) { device_check_plans(m->queue.matmul, plans); }
    device_share_plans(m->queue.matmul, recipe->team);
    if (m->weights.host) {
        const double forward = runner_time(&m->runner, [&] { llama_forward(m); });
        const double micro = runner_time(&m->runner, [&] { micro_step(m, recipe, kinds[count - 1]); });
        const bool waits = m->zero == ZERO_3 || m->parts > 1 || m->optimizer.deal.count > 0;  // for all pieces
        weights_print_price(&m->weights, gradients_passing(&m->grads), waits ? 0 : forward, micro * recipe->accumulate, first);
        if (first) { gradients_print_price(&m->grads), sharded_print_price(m->sharded, &m->weights); }
    }
    if (!o->graph || o->profile > 0 || o->offload > OFFLOAD_OPTIMIZER) { return; }  // a graph would wait for copies
    for (int k = 0; k < count; k++) { runner_capture(&m->runner, micro_step, m, recipe, kinds[k]); }
}

/* Wipes the traces of steps at learning rate 0. */
static void trainer_forget(void* model, const Recipe* recipe) {
    Llama* m = (Llama*)model;
    host_stream_finish(m->weights.host);
    for (const MemoryKind kind : {MEM_M, MEM_V}) {
        memory_fill(place_of(m, kind), m->mapped[kind], 0, m->mapped_bytes[kind], m->queue.stream);
    }
    runner_restore(&m->runner, recipe->run);
}

/* Prints the kernels that the table chooses for the operations of a step. */
static void print_kernels(const Llama* m) {
    const Rows rows = batch_rows(m), heads = heads_of(&rows);
    const Linear qkv = linear_at(m, LINEAR_QKV, 0, NULL, BATCH), gate_up = linear_at(m, LINEAR_GATE_UP, 0, NULL, BATCH);
    const Linear down = linear_at(m, LINEAR_DOWN, 0, NULL, BATCH);
    const KernelSizes attention = attention_sizes(heads.shape, rows.starts != NULL);
    printf("%-20s %-22s  %s\n", "operation", "kernel", "is taken for");
    print_kernel("qkv rope", CHOOSE_QKV, qkv_sizes(&qkv, &rows));
    print_kernel("attention", CHOOSE_ATTENTION, attention);
    print_kernel("attention backward", CHOOSE_ATTENTION_BACKWARD, attention);
    print_kernel("gate up swiglu", CHOOSE_GATE_UP, swiglu_sizes(&gate_up, rows.N, gate_up.C, down.C));
    print_kernel("down dx swiglu", CHOOSE_DOWN_DX, swiglu_sizes(&down, rows.N, down.OC, down.C));
    print_kernel("cross-entropy", CHOOSE_CROSSENTROPY, crossentropy_sizes(m->config.vocab_size));
}

/* --profile: takes `warm_up` steps, then prints the operations of one more as a table. */
static void trainer_profile(void* model, const Recipe* recipe, int warm_up) {
    Llama* m = (Llama*)model;
    double ms = 0;
    Error e = NO_ERROR;
    for (int i = 0; i <= warm_up; i++) {
        if (i == warm_up) {
            m->queue.profiler = m->exchange.profiler = profiler_new(m->queue.stream);
            if (m->weights.host) { m->weights.host->profiler = m->queue.profiler; }
        }
        must(train_step(m, recipe, 0.0, &e), &e);
        ms = step_result(m, recipe).ms;
    }
    const MemoryKind kind = m->grads.lends ? MEM_GRADIENTS : MEM_ACTIVATIONS;  // a loan may leave too little to copy
    print_profile(m->queue.profiler, m->device->peak_flops,
                  measure_copy(m->mapped[kind], m->mapped_bytes[kind], m->queue.stream), ms);
    print_kernels(m);
}

/* Searches the activations of block l that a forward pass keeps. */
static void search_block(FiniteSearch* f, const Llama* m, int l) {
    const ModelConfig* c = &m->config;
    const BlockActivations* s = &m->blocks[l];
    const Recomputed again = recompute_at(&m->recompute, l);
    const auto look = [&](const char* name, const floatX* data, size_t width, int pieces) {  // of a row
        const size_t N = m->runner.num_losses * pieces, w = width / pieces;
        search_tensor(f, {name, l, data, sizeof(floatX), N, w, pitch_of(w)});
    };
    look("the residual stream before attention", s->h, c->hidden_size, 1);
#define SEARCH_ACTIVATION(type, field, shape, width, group, name) \
    if (name && !again.group) { look(name, (const floatX*)s->field, width, shape == BY_HEADS ? m->parts : 1); }
    BLOCK_ACTIVATIONS(SEARCH_ACTIVATION)
}

/* Names the first tensor that is not finite after a step whose loss or norm is not: of the weights, of the forward pass of the
 * last micro-batch, which it runs again, and of the gradients. */
static bool trainer_name_not_finite(void* model, char name[TENSOR_TEXT]) {
    const Llama* m = (Llama*)model;
    const size_t N = m->runner.num_losses, C = m->config.hidden_size;
    // first, as the forward pass may overwrite them; another tensor that is found takes the name
    FiniteSearch gradients = search_on_gpu(&m->queue, name), f = gradients;
    search_gradients(&gradients, &m->grads, &m->exchange);
    llama_forward(m);  // all ranks run it, whatever each finds
    if (!m->fp8.in_place) { search_weights(&f, &m->weights, &m->table); }
    if (m->config.lora.rank > 0) { search_arena(&f, "", &m->trained, m->weights.trained, sizeof(floatX)); }
    for (int l = 0; l < m->config.num_layers; l++) { search_block(&f, m, l); }
    llama_loss(m, 0.0f, false);
    search_tensor(&f, {"the residual stream behind the last layer", -1, m->h_final, sizeof(floatX), N, C, pitch_of(C)});
    search_tensor(&f, {"the losses", -1, m->losses, sizeof(float), 1, N, N});
    return f.found || gradients.found;
}

static bool queue_losses(void* model, const BatchSource* data, Error* e) {
    Llama* m = (Llama*)model;
    const bool ok = !run_stop_requested() && feed_next(&m->feed, data, e);
    if (!agree_ok(m->team, ok, e)) { return false; }  // all ranks pass the layers, or none does
    llama_forward(m);
    llama_loss(m, 0.0f, false);
    runner_queue_losses(&m->runner);
    return true;
}

static const float* wait_losses(void* model) { return runner_wait_losses(&((Llama*)model)->runner); }

static Trainer cuda_trainer(Device* d) {
    Trainer t;
    memset(&t, 0, sizeof t);
    t.precision = PRECISION_NAME;
    t.dtype = IS_BF16 ? SAFE_BF16 : IS_FP16 ? SAFE_F16 : SAFE_F32;
    t.memory = d->missing ? "--max-memory" : d->name;
    t.device = d;
    t.missing = d->missing;
    t.scales_loss = IS_FP16;
    t.in_flight = IN_FLIGHT;
    t.peak_flops = d->peak_flops;
    t.measure = trainer_measure;
    t.available = trainer_available;
    t.memory_used = trainer_memory_used;
    t.create = trainer_create;
    t.destroy = trainer_destroy;
    t.slot = trainer_slot;
    t.collect = trainer_collect;
    t.add_files = trainer_add_files;
    t.prepare = trainer_prepare;
    t.step = train_step;
    t.result = step_result;
    t.busy_ms = step_busy_ms;
    t.forget = trainer_forget;
    t.profile = trainer_profile;
    t.name_not_finite = trainer_name_not_finite;
    t.queue_losses = queue_losses;
    t.wait_losses = wait_losses;
    t.next_logits = llama_decode;
    return t;
}

#ifndef TESTING

/* Refuses flags that this build or model does not take, before it opens the card. Returns whether products are in 8 bits. */
static bool flags_check(const Program* p) {
    const Options* o = &p->chosen;
    const Job job = p->process.job;
    const ModelConfig* c = &p->spec.config;
    if (job == JOB_VERIFY) { return false; }  // computes nothing
    if (c->hidden_size > RMSNORM_MAX_C) {
        die("%s: hidden_size is %d, wanted at most %d on a GPU", p->start.dir[0] ? p->start.dir : o->model, c->hidden_size,
            RMSNORM_MAX_C);
    }
    if (o->given[OPT_master]) { master_check((MasterKind)o->master); }
    if (o->fp8_head && !o->fp8) {
        die_usage("--fp8-head: the blocks' products are not in FP8, wanted --fp8 as well, or --no-fp8-head");
    }
    const bool fp8 = o->fp8 && (job_trains(job) || job == JOB_EVAL);
    const int row_ranks = process_share(&p->process, o).row_ranks;
    const char* tokens = row_ranks > 1 ? "--batch * --seq / --seq-parallel" : "--batch * --seq";
    if (fp8) { fp8_check(c, o->fp8_head, (size_t)o->batch * (size_t)o->seq / (size_t)row_ranks, tokens); }
    return fp8;
}

int main(int argc, char** argv) {
    Ranks ranks;
    Program p;
    Team team;
    const FoundCheckpoint found = together_start(&team, &ranks, argc, argv, ON_GPU, device_count);
    program_open(&p, argc, argv, ON_GPU, ranks.rank, ranks.ranks, found);
    const Options* o = &p.chosen;
    const Job job = p.process.job;
    const bool fp8 = flags_check(&p);
    Device d = job == JOB_VERIFY ? device_missing("--verify asks for none")
                                 : device_open(&ranks, job_trains(job), o->tf32, o->dry_run && o->max_memory > 0);
    if (fp8) { fp8_check_device(&d); }
    if (job_trains(job)) { attention_check(attention_shape(&p.spec.config, o->batch, o->seq), !d.missing); }
    run_machine(d.name, 1, p.process.machine, sizeof p.process.machine);
    if (!d.missing) { device_build(&d, p.process.build, sizeof p.process.build); }
    together_open(&p, &team, &ranks);
    const Trainer trainer = cuda_trainer(&d);
    const int status = run_job(&trainer, &p);
    together_close(p.process.team, false);
    program_close(&p);
    device_close(&d);
    return status;
}

#endif  // TESTING
