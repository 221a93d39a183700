/* train_llama3.c -- trains Llama 3 on the CPU, in fp32, with only C11 and OpenMP.
 *
 * This file is the readable specification of the model. Read it from top to bottom: memory, forward pass, backward pass,
 * update, generation, training step. Each layer is a pure function in llmc/<layer>.h, beside its formula.
 * The CUDA trainer (train_llama3.cu) is the same program with the layers of llmc/<layer>.cuh. test_llama3.cu compares both
 * with PyTorch.
 *
 *   h_0     = embedding[tokens]
 *   mid_l   = h_l   + attention(rope(rmsnorm(h_l) Wqkv^T)) Wo^T           for every layer l
 *   h_(l+1) = mid_l + swiglu(rmsnorm(mid_l) Wgate_up^T) Wdown^T
 *   logits  = rmsnorm(h_L) Whead^T            loss = mean over all B*T targets of -log softmax(logits)[target]
 *
 * With --lora these weights are frozen, and two small matrices beside each W are trained (llmc/lora.h).
 *
 * Every result is bitwise the same for any number of threads, because no layer lets the number of threads change the order
 * of a sum. A training step allocates nothing.
 *
 * Other folders hold the rest: files (llmc/files), text (llmc/text), and in llmc/run the training loop (loop/train.h), flags,
 * screen, log, validation, sampling and all other jobs. Only the CUDA trainer computes in 16 bits.
 */
#include "llmc/base/utils.h"             // defines: Error, xcalloc, round_up, size_min, now_seconds
#include "llmc/base/arena.h"             // defines: Arena, take, map_memory
#include "llmc/config.h"                 // defines: ModelConfig, ParamTable, param_table_for, trained_table_for, param_offset
#include "llmc/files/optimizer_state.h"  // defines: HostSlot, host_slot
#include "llmc/train/activations.h"      // defines: BLOCK_ACTIVATIONS
#include "llmc/train/step.h"             // defines: ModelUse, Recipe, Metrics, BatchSource, batch_read, DECODE_ROWS
#include "llmc/run/session/signals.h"    // defines: run_stop_requested
#include "llmc/embedding.h"              // defines: embedding_forward, embedding_backward
#include "llmc/linear.h"                 // defines: Linear, linear, linear_backward, Norm, norm, norm_backward
#include "llmc/rmsnorm.h"                // defines: rmsnorm_backward_scratch
#include "llmc/rope.h"                   // defines: rope_table, rope_forward, rope_backward
#include "llmc/attention.h"     // defines: attention_forward, attention_backward, attention_backward_scratch, attention_decode
#include "llmc/swiglu.h"        // defines: swiglu_forward, swiglu_backward
#include "llmc/matmul.h"        // defines: matmul_scratch
#include "llmc/lora.h"          // defines: lora_at, lora_width, lora_most_width
#include "llmc/crossentropy.h"  // defines: crossentropy_forward, crossentropy_fused
#include "llmc/optim/optimizer.h"      // defines: HeldState, held_whole, optimizer_update
#ifndef TESTING                        // a test of the model leaves out the code that runs it
#include "llmc/train/not_finite.h"     // defines: FiniteSearch, NamedTensor, TENSOR_TEXT, search_tensor, search_arena
#include "llmc/base/os.h"              // defines: host_memory_available, host_memory_peak
#include "llmc/run/session/machine.h"  // defines: machine_threads, run_machine
#include "llmc/run/session/session.h"  // defines: Program, program_close
#include "llmc/run/session/open.h"     // defines: program_open
#include "llmc/run/session/trainer.h"  // defines: Trainer
#include "llmc/run/jobs/dispatch.h"    // defines: run_job
#endif

// ---------------------------------------------------------------------------------------------------------------------
// memory: an arena for the weights; with --lora one for the adapters; one for gradients, which hold the trained tensors;
// one each for m and v, which hold what the tensors' rules keep; one for activations

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
    const float* embedding;  // (V, C)
    float* dembedding;       // (V, C) its gradient; NULL: frozen
    Norm final_norm;
    Linear head;  // (V, C); the embedding if the two are tied
} Ends;

/* What the forward pass of one block keeps for its backward pass. N = B*T rows. The table in train/activations.h has the widths
 * and meanings: norm1, rstd1, qkv, lse, att, mid, norm2, rstd2, gate_up, act. */
#define ACTIVATION_FIELD(type, field, shape, width, group, name) float* field;
typedef struct {
    float* h;  // (N, C) the residual stream as it enters
    BLOCK_ACTIVATIONS(ACTIVATION_FIELD)
    float* t[BLOCK_LINEARS];  // (N, lora_width) of the adapters
} BlockActivations;

/* The rows that pass through the layers: a batch, or new rows of one sequence. */
typedef struct {
    size_t N;  // B T of them
    AttentionShape shape;
    const int32_t* starts;  // (B, T) index in its row of the first token of each token's document; NULL: each row is one
    const float* rope;      // (positions, HD) cos and sin
    int first_pos;          // position of the first token of each row
    float* cache;           // (cache_len, 2 NKV HD) of the block: keys and values of all positions so far; NULL: a batch
} Rows;

#define MEMORY_KINDS(X)       \
    X(WEIGHTS, "weights")     \
    X(ADAPTERS, "adapters")   \
    X(GRADIENTS, "gradients") \
    X(M, "m") X(V, "v") X(ACTIVATIONS, "activations") X(LOGITS, "logits") X(WORKSPACE, "workspace") X(CACHE, "KV cache")
#define MEMORY_ENUM(kind, name) MEM_##kind,
#define MEMORY_NAME(kind, name) name,
typedef enum { MEMORY_KINDS(MEMORY_ENUM) NUM_MEM } MemoryKind;
static const char* const memory_names[NUM_MEM] = {MEMORY_KINDS(MEMORY_NAME)};

/* A pass through the layers: over a batch, or over new rows of one sequence. */
typedef enum { BATCH, DECODE } Pass;

enum { CLASSIFIER_ROWS = 512 };  // tokens whose logits exist at one time; (512, V) stays close to the cache

typedef struct {
    ModelConfig config;
    ParamTable table;    // of the weights
    ParamTable trained;  // of the tensors that are trained: all of them, or the adapters
    float* params;       // (table.elements)
    float* adapters;     // (trained.elements) with --lora
    float* grads;        // (trained.elements) each
    float *m, *v;        // the optimizer's moments, laid out by `held`
    HeldState held;
    HostSlot slots[NUM_SLOTS];

    int B, T;                  // shape of the batch that activations are sized for
    int32_t* x;                // (B, T) tokens
    int32_t* y;                // (B, T) targets
    const int32_t* starts;     // (B, T) see Rows
    float* rope;               // (T, HD) cos and sin
    BlockActivations* blocks;  // (L)
    float* h_final;            // (N, C) the residual stream after the last block
    float* norm_final;         // (N, C)
    float* rstd_final;         // (N)
    float* losses;             // (N) the loss of each token
    float* logits;             // (min(N, CLASSIFIER_ROWS), V)

    float* dh;        // (N, C) gradient of the residual stream, carried from the last block to the first
    float* dnorm;     // (N, C) gradient of a norm's output
    float* dqkv;      // (N, QKV)
    float* datt;      // (N, NH HD)
    float* dgate_up;  // (N, 2F)
    float* dact;      // (N, F)
    float* dt;        // (N, lora_most_width)
    void* scratch;    // for the layers that ask for it, one after the other
    Metrics result;   // of the last step

    // generation; each layer's cache holds rows of k then v
    int cache_len;              // positions
    float* kv_cache;            // (L, cache_len, 2 NKV HD)
    float* decode_rope;         // (cache_len, HD)
    BlockActivations decoding;  // of DECODE_ROWS rows, for one block after the other
    float* decode_logits;       // (V)

    float* mapped[NUM_MEM];  // the arenas that all of the above points into
    size_t mapped_bytes[NUM_MEM];
} Llama;

/* Returns the gradient of the weights at an offset; NULL: --lora freezes them, or nothing is trained. */
static float* grad_at(const Llama* m, size_t at) { return m->adapters || !m->grads ? NULL : m->grads + at; }

/* Returns a norm of block l, or the final one (l = -1). */
static Norm norm_at(const Llama* m, ParamKind kind, int l) {
    const size_t at = param_offset(&m->table, kind, l);
    return (Norm){m->params + at, grad_at(m, at), m->config.hidden_size, m->config.rms_eps};
}

/* Returns a product of block l, or the head (l = -1). */
static Linear linear_at(const Llama* m, LinearKind kind, int l, Pass pass) {
    const size_t at = param_offset(&m->table, linear_params[kind], l);
    Linear w = {.w = m->params + at, .dw = grad_at(m, at)};
    linear_shape(&m->config, kind, &w.OC, &w.C);
    w.lora = lora_at(&m->config, &m->trained, kind, l);
    float* t = l < 0 ? NULL : pass == DECODE ? m->decoding.t[kind] : m->blocks[l].t[kind];
    w.adapters = (LoraMemory){m->adapters, m->grads, t, m->dt};
    return w;
}

/* Returns block l; ends_at() returns the layers outside of the blocks. A layer gets its weights only through these two. */
static Block block_at(const Llama* m, int l, Pass pass) {
    return (Block){norm_at(m, P_INPUT_NORM, l), linear_at(m, LINEAR_QKV, l, pass),     linear_at(m, LINEAR_O, l, pass),
                   norm_at(m, P_POST_NORM, l),  linear_at(m, LINEAR_GATE_UP, l, pass), linear_at(m, LINEAR_DOWN, l, pass)};
}

static Ends ends_at(const Llama* m, Pass pass) {
    const size_t embedding = param_offset(&m->table, P_EMBEDDING, -1);
    return (Ends){m->params + embedding, grad_at(m, embedding), norm_at(m, P_FINAL_NORM, -1),
                  linear_at(m, LINEAR_HEAD, -1, pass)};
}

/* Returns the arena that the optimizer updates. */
static float* trained_params(const Llama* m) { return m->adapters ? m->adapters : m->params; }

/* Takes the activations of a block over N rows. */
static BlockActivations take_block(const ModelConfig* c, size_t N, Arena* a) {
    BlockActivations s;
    s.h = take(a, N * c->hidden_size);
#define TAKE_ACTIVATION(type, field, shape, width, group, name) s.field = take(a, N * (size_t)(width));
    BLOCK_ACTIVATIONS(TAKE_ACTIVATION)
    for (int i = 0; i < BLOCK_LINEARS; i++) { s.t[i] = take(a, N * lora_width(&c->lora, i)); }
    return s;
}

/* Lays out a model's buffers. */
static void llama_lay_out(Llama* m, Arena mem[NUM_MEM], const ModelUse* use) {
    const ModelConfig* c = &m->config;
    const int B = use->B, T = use->T;
    const size_t N = (size_t)B * T, C = c->hidden_size, F = c->intermediate_size, V = c->vocab_size;
    const size_t QKV = qkv_width(c), Q = q_width(c), KV = kv_width(c), HD = c->head_dim, L = c->num_layers;
    const size_t rows = size_min(N, CLASSIFIER_ROWS);
    m->B = B;
    m->T = T;
    m->cache_len = use->cache_len;
    m->params = take(&mem[MEM_WEIGHTS], m->table.elements);
    if (c->lora.rank > 0) { m->adapters = take(&mem[MEM_ADAPTERS], m->trained.elements); }
    if (use->train) {
        m->grads = take(&mem[MEM_GRADIENTS], m->trained.elements);
        m->m = take(&mem[MEM_M], m->held.elements[SLOT_M]);
        m->v = take(&mem[MEM_V], m->held.elements[SLOT_V]);
    }
    if (B > 0) {
        Arena* a = &mem[MEM_ACTIVATIONS];
        m->x = (int32_t*)take(a, N);
        m->y = (int32_t*)take(a, N);
        m->rope = take(a, T * HD);
        Arena first_block = *a;  // without a backward pass, all blocks use the same buffers
        for (size_t l = 0; l < L; l++) {
            if (!use->train) { *a = first_block; }
            m->blocks[l] = take_block(c, N, a);
        }
        m->h_final = use->train ? take(a, N * C) : m->blocks[0].h;
        m->norm_final = take(a, N * C);
        m->rstd_final = take(a, N);
        m->losses = take(a, N);
        m->logits = take(&mem[MEM_LOGITS], rows * V);
    }
    size_t scratch = B > 0 || m->cache_len > 0 ? size_max(matmul_scratch(), attention_forward_scratch()) : 0;
    if (use->train) {
        Arena* a = &mem[MEM_WORKSPACE];
        m->dh = take(a, N * C);
        m->dnorm = take(a, N * C);
        m->dqkv = take(a, N * QKV);
        m->datt = take(a, N * Q);
        m->dgate_up = take(a, N * 2 * F);
        m->dact = take(a, N * F);
        m->dt = take(a, N * lora_most_width(&c->lora));
        scratch = size_max(scratch, rmsnorm_backward_scratch(N, c->hidden_size));
        scratch = size_max(scratch, attention_backward_scratch(attention_shape(c, B, T)));
        scratch = size_max(scratch, optimizer_scratch(&m->trained) + matmul_scratch());
    }
    m->scratch = take(&mem[MEM_WORKSPACE], ceil_div(scratch, sizeof(float)));
    if (m->cache_len > 0) {
        m->kv_cache = take(&mem[MEM_CACHE], L * m->cache_len * 2 * KV);
        m->decode_rope = take(&mem[MEM_CACHE], m->cache_len * HD);
        m->decoding = take_block(c, DECODE_ROWS, &mem[MEM_CACHE]);
        m->decode_logits = take(&mem[MEM_CACHE], V);
    }
}

/* Makes a model without memory, laid out for the ranks of a run. Free with llama_close(). */
static Llama llama_open(const ModelConfig* c, int ranks) {
    Llama m;
    memset(&m, 0, sizeof m);
    m.config = *c;
    m.table = param_table_for(c, ranks);
    m.trained = trained_table_for(c, ranks);
    m.held = held_whole(&m.trained);
    m.blocks = (BlockActivations*)xcalloc(c->num_layers, sizeof *m.blocks);
    return m;
}

static void llama_close(Llama* m) {
    free(m->blocks);
    held_free(&m->held);
    param_table_free(&m->table);
    param_table_free(&m->trained);
}

/* Computes the bytes of each kind of memory that llama_create() would map. */
static void llama_measure(const ModelConfig* c, const ModelUse* use, size_t bytes[NUM_MEM]) {
    Llama m = llama_open(c, use->ranks);
    Arena mem[NUM_MEM] = {{NULL, 0}};
    llama_lay_out(&m, mem, use);
    for (int i = 0; i < NUM_MEM; i++) { bytes[i] = round_up(mem[i].used * sizeof(float), (size_t)2 << 20); }
    llama_close(&m);
}

/* Maps all memory of a model: its weights, and the buffers of this use. Weights are zero until they are read or drawn. */
static Llama llama_create(const ModelConfig* c, const ModelUse* use) {
    Llama m = llama_open(c, use->ranks);
    Arena mem[NUM_MEM] = {{NULL, 0}};
    llama_measure(c, use, m.mapped_bytes);
    for (int i = 0; i < NUM_MEM; i++) {
        if (m.mapped_bytes[i] > 0) { m.mapped[i] = mem[i].base = map_memory(m.mapped_bytes[i], memory_names[i]); }
    }
    llama_lay_out(&m, mem, use);
    if (use->B > 0) { rope_table(m.rope, use->T, c); }
    if (use->cache_len > 0) { rope_table(m.decode_rope, use->cache_len, c); }
    return m;
}

static void llama_free(Llama* m) {
    for (int i = 0; i < NUM_MEM; i++) {
        if (m->mapped[i]) { munmap(m->mapped[i], m->mapped_bytes[i]); }
    }
    llama_close(m);
}

// ---------------------------------------------------------------------------------------------------------------------
// forward

static Rows batch_rows(const Llama* m) {
    return (Rows){(size_t)m->B * m->T, attention_shape(&m->config, m->B, m->T), m->starts, m->rope, 0, NULL};
}

/* Writes att from qkv. With a cache, each new row attends to all positions up to its own, whose keys and values are added. */
static void attend(void* scratch, const BlockActivations* s, const Rows* r) {
    const AttentionShape shape = r->shape;
    const size_t Q = (size_t)shape.NH * shape.HD, KV2 = 2 * (size_t)shape.NKV * shape.HD;
    if (!r->cache) {
        attention_forward(s->att, s->lse, scratch, s->qkv, r->starts, shape);
        return;
    }
    for (size_t i = 0; i < r->N; i++) {
        memcpy(r->cache + (r->first_pos + i) * KV2, s->qkv + i * (Q + KV2) + Q, KV2 * sizeof(float));
    }
    for (size_t i = 0; i < r->N; i++) {
        attention_decode(s->att + i * Q, s->qkv + i * (Q + KV2), r->cache, r->first_pos + (int)i + 1, shape);
    }
}

/* Computes h_next (N, C), which may be s->h, from s->h, and the activations between them. */
static void block_forward(void* scratch, float* h_next, const Block* w, const BlockActivations* s, const Rows* r) {
    norm(s->norm1, s->rstd1, &w->input_norm, s->h, r->N);
    linear(scratch, s->qkv, &w->qkv, s->norm1, NULL, r->N);
    rope_forward(s->qkv, r->starts, r->rope, r->first_pos, r->shape);
    attend(scratch, s, r);
    linear(scratch, s->mid, &w->o, s->att, s->h, r->N);
    norm(s->norm2, s->rstd2, &w->post_norm, s->mid, r->N);
    linear(scratch, s->gate_up, &w->gate_up, s->norm2, NULL, r->N);
    swiglu_forward(s->act, s->gate_up, r->N, w->down.C);
    linear(scratch, h_next, &w->down, s->act, s->mid, r->N);
}

/* Computes norm_final (B, T, C) from the tokens m->x and keeps what the backward pass needs. Like the two functions below, it
 * ends early if a signal asks for the end: the caller looks at run_stop_requested() and then drops what it computed. */
static void llama_forward(Llama* m) {
    const Rows rows = batch_rows(m);
    const int L = m->config.num_layers;
    const Ends ends = ends_at(m, BATCH);

    embedding_forward(m->blocks[0].h, ends.embedding, m->x, rows.N, m->config.hidden_size);
    for (int l = 0; l < L && !run_stop_requested(); l++) {
        const Block w = block_at(m, l, BATCH);
        block_forward(m->scratch, l + 1 < L ? m->blocks[l + 1].h : m->h_final, &w, &m->blocks[l], &rows);
    }
    norm(m->norm_final, m->rstd_final, &ends.final_norm, m->h_final, rows.N);
}

/* Runs head and loss after llama_forward(). Returns the cross-entropy of the targets m->y, -1 with loss 0, over B*T. Works on
 * CLASSIFIER_ROWS tokens at a time, so full (B, T, V) logits never exist. If dloss is not 0, also runs the head's backward
 * pass while the logits exist: writes dnorm (N, C) and adds to the head's gradient. dloss is the weight of one token's
 * loss. */
static double llama_loss(Llama* m, float dloss) {
    const int C = m->config.hidden_size, V = m->config.vocab_size;
    const size_t N = (size_t)m->B * m->T;
    const Linear head = ends_at(m, BATCH).head;
    for (size_t first = 0; first < N && !run_stop_requested(); first += CLASSIFIER_ROWS) {
        const size_t rows = size_min(CLASSIFIER_ROWS, N - first);
        const float* x = m->norm_final + first * C;
        linear(m->scratch, m->logits, &head, x, NULL, rows);
        if (dloss == 0.0f) {
            crossentropy_forward(m->losses + first, m->logits, m->y + first, rows, V);
            continue;
        }
        crossentropy_fused(m->losses + first, m->logits, m->y + first, dloss, rows, V);
        linear_backward(m->scratch, m->dnorm + first * C, &head, m->logits, x, rows);
    }
    double sum = 0.0;
    for (size_t i = 0; i < N; i++) { sum += m->losses[i]; }
    return sum / (double)N;
}

// ---------------------------------------------------------------------------------------------------------------------
// backward: every gradient accumulates (+=), so micro-batches add up. llama_zero_gradients() starts a step

static void llama_zero_gradients(Llama* m) {
    const size_t n = m->trained.elements;
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i += 1 << 16) { memset(m->grads + i, 0, size_min(1 << 16, n - i) * sizeof(float)); }
}

/* Runs the backward pass after llama_forward() and llama_loss(dloss != 0). Carries dh from the last block to the first. */
static void llama_backward(Llama* m) {
    const Rows rows = batch_rows(m);
    const size_t N = rows.N;
    const int C = m->config.hidden_size;
    const Ends ends = ends_at(m, BATCH);

    memset(m->dh, 0, N * C * sizeof(float));
    norm_backward(m->scratch, m->dh, &ends.final_norm, m->dnorm, m->h_final, m->rstd_final, N);
    for (int l = m->config.num_layers - 1; l >= 0 && !run_stop_requested(); l--) {
        const BlockActivations* s = &m->blocks[l];
        const Block w = block_at(m, l, BATCH);
        // h_next = mid + act Wdown^T: dh is the gradient of both terms
        linear_backward(m->scratch, m->dact, &w.down, m->dh, s->act, N);
        swiglu_backward(m->dgate_up, m->dact, s->gate_up, N, w.down.C);
        linear_backward(m->scratch, m->dnorm, &w.gate_up, m->dgate_up, s->norm2, N);
        norm_backward(m->scratch, m->dh, &w.post_norm, m->dnorm, s->mid, s->rstd2, N);
        // mid = h + att Wo^T
        linear_backward(m->scratch, m->datt, &w.o, m->dh, s->att, N);
        attention_backward(m->dqkv, m->scratch, m->datt, s->att, s->lse, s->qkv, rows.starts, rows.shape);
        rope_backward(m->dqkv, rows.starts, rows.rope, 0, rows.shape);
        linear_backward(m->scratch, m->dnorm, &w.qkv, m->dqkv, s->norm1, N);
        norm_backward(m->scratch, m->dh, &w.input_norm, m->dnorm, s->h, s->rstd1, N);
    }
    embedding_backward(ends.dembedding, m->dh, m->x, N, C);
}

// ---------------------------------------------------------------------------------------------------------------------
// update

/* Updates all trained tensors; grad_scale multiplies every gradient, which may be overwritten. */
static void llama_update(Llama* m, const Recipe* recipe, float grad_scale) {
    const OptimizerArenas arenas = {trained_params(m), m->grads, m->m, m->v};
    const UpdateStep step = {&recipe->hyper, m->result.lr, grad_scale, (int64_t)recipe->run->updates, NULL, 0};
    optimizer_update(&m->trained, &m->held, arenas, step, m->scratch);
}

// ---------------------------------------------------------------------------------------------------------------------
// generation: the forward pass for the new rows of one sequence, with keys and values cached

/* Takes `rows` <= DECODE_ROWS tokens at positions pos .. pos + rows - 1 (NextLogits). Returns the logits (V) after the last
 * one. */
static const float* llama_decode(void* model, const int32_t* tokens, int rows, int pos, Error* e) {
    Llama* m = (Llama*)model;
    (void)e;
    const ModelConfig* c = &m->config;
    const BlockActivations* s = &m->decoding;
    const Ends ends = ends_at(m, DECODE);
    Rows r = {(size_t)rows, attention_shape(c, 1, rows), NULL, m->decode_rope, pos, m->kv_cache};

    embedding_forward(s->h, ends.embedding, tokens, r.N, c->hidden_size);
    for (int l = 0; l < c->num_layers; l++) {
        const Block w = block_at(m, l, DECODE);
        block_forward(m->scratch, s->h, &w, s, &r);
        r.cache += (size_t)m->cache_len * 2 * kv_width(c);
    }
    norm(s->norm1, s->rstd1, &ends.final_norm, s->h + (r.N - 1) * c->hidden_size, 1);
    linear(m->scratch, m->decode_logits, &ends.head, s->norm1, NULL, 1);
    return m->decode_logits;
}

// ---------------------------------------------------------------------------------------------------------------------
// training step

/* Begins the step's result, and runs forward and backward over its micro-batches. Fails if the step is dropped (step.h). */
static bool step_gradients(Llama* m, const Recipe* recipe, double lr, Error* e) {
    Metrics* r = &m->result;
    memset(r, 0, sizeof *r);
    r->lr = lr;
    llama_zero_gradients(m);
    for (int k = 0; k < recipe->accumulate; k++) {
        m->starts = recipe->data.starts;
        if (!batch_read(&recipe->data, m->B, m->T, m->x, m->y, e)) { return false; }
        llama_forward(m);
        r->loss += llama_loss(m, (float)recipe->hyper.loss_weight) / recipe->accumulate;
        r->trained += (double)count_trained(m->y, (size_t)m->B * m->T);
        step_add_sources(r, &recipe->data, m->losses, m->y, m->T);
        llama_backward(m);
        if (run_stop_requested()) { return false; }
    }
    return true;
}

/* Decides from the step's loss and gradient norm whether it updates, and by which factor of the gradients. Counts the step. */
static bool step_decide(Llama* m, const Recipe* recipe, double norm, float* grad_scale) {
    Metrics* r = &m->result;
    TrainerState* run = recipe->run;
    const Hyperparameters* h = &recipe->hyper;
    const double factor = trained_factor(h, r->trained);
    r->loss *= factor;
    r->norm = norm * factor;
    r->loss_z = outlier_update(&run->loss, r->loss);
    r->norm_z = outlier_update(&run->grad_norm, r->norm);
    r->verdict = update_verdict(r->loss, r->norm, r->loss_z, r->norm_z, h);
    r->loss_scale = run->loss_scale;
    run->step++;
    run->tokens += recipe->tokens;
    if (r->verdict != UPDATE_APPLIED) { return false; }
    *grad_scale = (float)(clip_factor(r->norm, h->grad_clip) * factor);
    run->updates++;
    return true;
}

/* Takes a step: gradients, decision, update. */
static bool train_step(void* model, const Recipe* recipe, double lr, Error* e) {
    Llama* m = (Llama*)model;
    float grad_scale = 0;
    const double start = now_seconds();
    if (!step_gradients(m, recipe, lr, e)) { return false; }
    const double norm = global_norm(m->grads, m->trained.elements, m->scratch);
    if (step_decide(m, recipe, norm, &grad_scale)) { llama_update(m, recipe, grad_scale); }
    m->result.ms = (now_seconds() - start) * 1e3;
    return true;
}

/* Returns the result of the last step. */
static Metrics step_result(void* model, const Recipe* recipe) {
    (void)recipe;
    return ((Llama*)model)->result;
}

// ---------------------------------------------------------------------------------------------------------------------
// what a run asks of a model beside steps: the losses of a batch, weights and optimizer state

static bool queue_losses(void* model, const BatchSource* data, Error* e) {
    Llama* m = (Llama*)model;
    m->starts = data->starts;
    if (!batch_read(data, m->B, m->T, m->x, m->y, e)) { return false; }
    llama_forward(m);
    llama_loss(m, 0.0f);
    return !run_stop_requested();
}

static const float* wait_losses(void* model) { return ((Llama*)model)->losses; }

static void trainer_destroy(void* model) {
    llama_free((Llama*)model);
    free(model);
}

static StateSlot trainer_slot(void* model, SlotKind kind) {
    Llama* m = (Llama*)model;
    float* const arenas[NUM_SLOTS] = {m->params, trained_params(m), m->m, m->v};
    return host_slot(&m->slots[kind], kind, arenas[kind], &m->held);
}

#ifndef TESTING

// ---------------------------------------------------------------------------------------------------------------------
// the trainer's table (trainer.h)

static void trainer_measure(const Trainer* t, const ModelConfig* c, const ModelUse* use, const Options* o, MemoryTable* table) {
    size_t bytes[NUM_MEM];
    (void)t, (void)o;
    llama_measure(c, use, bytes);
    for (int i = 0; i < NUM_MEM; i++) { memory_add(table, memory_names[i], bytes[i]); }
    // the program with its tokenizer and data, as it stands now, and 3 MiB for threads and buffers of files
    memory_add(table, "program, estimated", round_up(host_memory_peak() + (3 << 20), (size_t)2 << 20));
}

static uint64_t trainer_available(const Trainer* t, const Options* o) {
    (void)t, (void)o;
    return host_memory_available();
}

static uint64_t trainer_memory_used(const void* model) {
    (void)model;
    return host_memory_peak();
}

static void* trainer_create(const Trainer* t, const ModelConfig* c, const ModelUse* use, const Options* o, Team* team) {
    Llama* m = (Llama*)xmalloc(sizeof *m);
    (void)t, (void)o, (void)team;
    *m = llama_create(c, use);
    return m;
}

/* Wipes the traces of steps at learning rate 0. */
static void trainer_forget(void* model, const Recipe* recipe) {
    Llama* m = (Llama*)model;
    (void)recipe;
    for (int i = MEM_M; i <= MEM_V; i++) { memset(m->mapped[i], 0, m->mapped_bytes[i]); }
}

/* Searches what the forward pass of block l left. */
static void search_block(FiniteSearch* f, const Llama* m, int l) {
    const ModelConfig* c = &m->config;
    const BlockActivations* s = &m->blocks[l];
    const size_t N = (size_t)m->B * m->T, C = c->hidden_size;
    search_tensor(f, (NamedTensor){"the residual stream before attention", l, s->h, sizeof(float), N, C, C});
#define SEARCH_ACTIVATION(type, field, shape, width, group, name) \
    search_tensor(f, (NamedTensor){name, l, s->field, sizeof(float), N, width, width});
    BLOCK_ACTIVATIONS(SEARCH_ACTIVATION)
}

/* Names the first tensor that is not finite after a step whose loss or norm is not: of the weights, of what the last
 * micro-batch's forward pass left, in its order, and of the gradients. */
static bool trainer_name_not_finite(void* model, char name[TENSOR_TEXT]) {
    const Llama* m = (Llama*)model;
    const size_t N = (size_t)m->B * m->T;
    FiniteSearch f = finite_search(name);
    search_arena(&f, "", &m->table, m->params, sizeof(float));
    if (m->adapters) { search_arena(&f, "", &m->trained, m->adapters, sizeof(float)); }
    for (int l = 0; l < m->config.num_layers; l++) { search_block(&f, m, l); }
    search_tensor(&f, (NamedTensor){"the losses", -1, m->losses, sizeof(float), 1, N, N});
    search_arena(&f, "the gradient of ", &m->trained, m->grads, sizeof(float));
    return f.found;
}

static const Trainer cpu_trainer = {
    .precision = "FP32",
    .dtype = SAFE_F32,
    .memory = "memory",
    .in_flight = 1,
    .measure = trainer_measure,
    .available = trainer_available,
    .memory_used = trainer_memory_used,
    .create = trainer_create,
    .destroy = trainer_destroy,
    .slot = trainer_slot,
    .step = train_step,
    .result = step_result,
    .forget = trainer_forget,
    .name_not_finite = trainer_name_not_finite,
    .queue_losses = queue_losses,
    .wait_losses = wait_losses,
    .next_logits = llama_decode,
};

int main(int argc, char** argv) {
    Program p;
    program_open(&p, argc, argv, ON_CPU, 0, 1, no_report);
    run_machine(NULL, machine_threads(p.chosen.threads), p.process.machine, sizeof p.process.machine);
    const int status = run_job(&cpu_trainer, &p);
    program_close(&p);
    return status;
}

#endif  // TESTING
