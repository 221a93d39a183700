/* train_llama3.c -- trains Llama 3 on the CPU, in fp32, with C11 and OpenMP alone.
 *
 * This file is the readable specification of the model. Read it from top to bottom: the memory of a model, its forward
 * pass, its backward pass, the update, generation, and the training loop. The layers themselves, each a pure function
 * with its formula, are in llmc/<layer>.h; the CUDA trainer (train_llama3.cu) is the same program with the layers of
 * llmc/<layer>.cuh, and test_llama3.cu holds both to PyTorch.
 *
 *   h_0     = embedding[tokens]
 *   mid_l   = h_l   + attention(rope(rmsnorm(h_l) Wqkv^T)) Wo^T           for every layer l
 *   h_(l+1) = mid_l + swiglu(rmsnorm(mid_l) Wgate_up^T) Wdown^T
 *   logits  = rmsnorm(h_L) Whead^T            loss = mean over all B*T targets of -log softmax(logits)[target]
 *
 * Every result is bitwise the same for any number of threads: no layer lets a thread's share of the work decide the
 * order of a sum. Nothing is allocated inside a training step.
 *
 * Left to others: files (llmc/files/checkpoint.h), flags (llmc/run/options.h), token batches (llmc/files/dataloader.h), screen, log and
 * sampling (llmc/run/). Several processes and 16-bit arithmetic are the CUDA trainer's.
 */
#include "llmc/base/utils.h"  // defines: Error, fail, die, die_usage, warn, xmalloc, path_join, now_seconds
#include "llmc/base/rand.h"   // defines: philox, rand_normal
#include "llmc/config.h"      // defines: ModelConfig, ParamTable, param_table, param_offset, config_preset, config_read
#include "llmc/run/session.h"  // defines: Session, session_open, session_begin, session_checkpoint, session_lr; all that it includes
#include "llmc/embedding.h"     // defines: embedding_forward, embedding_backward
#include "llmc/rmsnorm.h"       // defines: rmsnorm_forward, rmsnorm_backward, rmsnorm_backward_scratch
#include "llmc/rope.h"          // defines: rope_table, rope_forward, rope_backward
#include "llmc/attention.h"     // defines: attention_forward, attention_backward, attention_backward_scratch, attention_decode
#include "llmc/swiglu.h"        // defines: swiglu_forward, swiglu_backward
#include "llmc/matmul.h"        // defines: matmul_forward, matmul_backward_input, matmul_backward_weight
#include "llmc/crossentropy.h"  // defines: crossentropy_forward, crossentropy_fused
#include "llmc/adamw.h"         // defines: AdamW, adamw_update, global_norm, global_norm_scratch

#include <sys/mman.h>
#ifdef _OPENMP
#include <omp.h>
#endif

// ---------------------------------------------------------------------------------------------------------------------
// memory: one arena each for weights, gradients, m and v (same element offsets, see config.h), one for activations

/* The tensors of one block in an arena of weights (or gradients: the same type, the same offsets). */
typedef struct {
    float* input_norm;  // (C)
    float* qkv;         // (QKV, C), QKV = (NH + 2 NKV) HD: rows of q, then k, then v
    float* o;           // (C, NH HD)
    float* post_norm;   // (C)
    float* gate_up;     // (2F, C): rows of gate, then up
    float* down;        // (C, F)
} Block;

/* What the forward pass of one block keeps for its backward pass; N = B*T rows. */
typedef struct {
    float* h;        // (N, C) the residual stream as it enters
    float* norm1;    // (N, C) rmsnorm(h)
    float* rstd1;    // (N) 1 / rms of h
    float* qkv;      // (N, QKV) after RoPE
    float* lse;      // (B, NH, T) log-sum-exp of the scores of each query
    float* att;      // (N, NH HD) attention's output
    float* mid;      // (N, C) the residual stream after attention
    float* norm2;    // (N, C) rmsnorm(mid)
    float* rstd2;    // (N)
    float* gate_up;  // (N, 2F)
    float* act;      // (N, F) silu(gate) * up
} BlockActivations;

typedef enum {
    MEM_WEIGHTS,
    MEM_GRADIENTS,
    MEM_M,
    MEM_V,
    MEM_ACTIVATIONS,
    MEM_LOGITS,
    MEM_WORKSPACE,
    MEM_CACHE,
    NUM_MEM
} MemoryKind;

enum { CLASSIFIER_ROWS = 512 };  // tokens whose logits exist at one time: (512, V) stays near the cache
enum { DECODE_ROWS = 64 };       // tokens of a prompt that generation takes in one pass

typedef struct {
    ModelConfig config;
    ParamTable table;
    float* params;  // (table.elements) each
    float* grads;
    float* m;  // AdamW's first moment
    float* v;  // AdamW's second moment

    int B, T;                  // of the training batch the activations are sized for
    float* rope;               // (T, HD) cos and sin
    BlockActivations* blocks;  // (L)
    float* h_final;            // (N, C) the residual stream behind the last block
    float* norm_final;         // (N, C)
    float* rstd_final;         // (N)
    float* losses;             // (N) of each token
    float* logits;             // (min(N, CLASSIFIER_ROWS), V)

    float* dh;             // (N, C) gradient of the residual stream, carried down through the blocks
    float* dnorm;          // (N, C) gradient of a norm's output
    float* dqkv;           // (N, QKV)
    float* datt;           // (N, NH HD)
    float* dgate_up;       // (N, 2F)
    float* dact;           // (N, F)
    float* scratch;        // for the layers that ask for it
    double* norm_scratch;  // for the global norm

    // generation; each layer's cache holds rows of k then v
    int cache_len;       // positions
    float* kv_cache;     // (L, cache_len, 2 NKV HD)
    float* decode_rope;  // (cache_len, HD)
    float* decode_rows;  // buffers of DECODE_ROWS rows, see llama_decode_rows

    float* mapped[NUM_MEM];  // what all of the above points into
    size_t mapped_bytes[NUM_MEM];
} Llama;

/* A region that is first measured (base NULL) and then handed out, by the same code: the memory table cannot differ
 * from what is allocated. Units: floats. */
typedef struct {
    float* base;
    size_t used;
} Arena;

static float* take(Arena* a, size_t count) {
    float* p = a->base ? a->base + a->used : NULL;
    a->used += round_up(count, 16);  // 64 bytes: a cache line, and the widest vector
    return p;
}

/* Zeroed pages, huge ones where the system has them: the matrices are walked in tiles, and small pages cost TLB misses. */
static float* map_memory(size_t bytes, const char* what) {
    void* p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) { die("out of memory: could not allocate %.1f MiB for %s", (double)bytes / (1 << 20), what); }
#ifdef MADV_HUGEPAGE
    madvise(p, bytes, MADV_HUGEPAGE);
#endif
    return (float*)p;
}

/* The tensors of block l in an arena of weights or gradients. The only way by which a layer gets its weights. */
static Block block_at(float* arena, const ParamTable* t, int l) {
    Block b;
    b.input_norm = arena + param_offset(t, P_INPUT_NORM, l);
    b.qkv = arena + param_offset(t, P_Q, l);
    b.o = arena + param_offset(t, P_O, l);
    b.post_norm = arena + param_offset(t, P_POST_NORM, l);
    b.gate_up = arena + param_offset(t, P_GATE, l);
    b.down = arena + param_offset(t, P_DOWN, l);
    return b;
}

/* Lays a model's buffers out. `B` = 0: no training batch, `train` false: forward only, `cache_len` = 0: no generation. */
static void llama_lay_out(Llama* m, Arena mem[NUM_MEM], int B, int T, bool train, int cache_len) {
    const ModelConfig* c = &m->config;
    const size_t N = (size_t)B * T, C = c->hidden_size, F = c->intermediate_size, V = c->vocab_size;
    const size_t QKV = qkv_width(c), Q = q_width(c), KV = kv_width(c), HD = c->head_dim, L = c->num_layers;
    const size_t rows = size_min(N, CLASSIFIER_ROWS);
    m->B = B;
    m->T = T;
    m->cache_len = cache_len;
    m->params = take(&mem[MEM_WEIGHTS], m->table.elements);
    if (train) {
        m->grads = take(&mem[MEM_GRADIENTS], m->table.elements);
        m->m = take(&mem[MEM_M], m->table.elements);
        m->v = take(&mem[MEM_V], m->table.elements);
    }
    if (B > 0) {
        Arena* a = &mem[MEM_ACTIVATIONS];
        m->rope = take(a, T * HD);
        Arena first_block = *a;  // without a backward pass, every block uses the same buffers
        for (size_t l = 0; l < L; l++) {
            BlockActivations* s = &m->blocks[l];
            if (!train) { *a = first_block; }
            s->h = take(a, N * C);
            s->norm1 = take(a, N * C);
            s->rstd1 = take(a, N);
            s->qkv = take(a, N * QKV);
            s->lse = take(a, (size_t)B * c->num_heads * T);
            s->att = take(a, N * Q);
            s->mid = take(a, N * C);
            s->norm2 = take(a, N * C);
            s->rstd2 = take(a, N);
            s->gate_up = take(a, N * 2 * F);
            s->act = take(a, N * F);
        }
        m->h_final = train ? take(a, N * C) : m->blocks[0].h;
        m->norm_final = take(a, N * C);
        m->rstd_final = take(a, N);
        m->losses = take(a, N);
        m->logits = take(&mem[MEM_LOGITS], rows * V);
    }
    if (train) {
        Arena* a = &mem[MEM_WORKSPACE];
        m->dh = take(a, N * C);
        m->dnorm = take(a, N * C);
        m->dqkv = take(a, N * QKV);
        m->datt = take(a, N * Q);
        m->dgate_up = take(a, N * 2 * F);
        m->dact = take(a, N * F);
        m->scratch = take(a, size_max(rmsnorm_backward_scratch(N, c->hidden_size),
                                      attention_backward_scratch(attention_shape(c, (int)B, (int)T)) / sizeof(float)));
        m->norm_scratch = (double*)take(a, 2 * global_norm_scratch(m->table.elements));
    }
    if (cache_len > 0) {
        m->kv_cache = take(&mem[MEM_CACHE], L * cache_len * 2 * KV);
        m->decode_rope = take(&mem[MEM_CACHE], cache_len * HD);
        m->decode_rows = take(&mem[MEM_CACHE], DECODE_ROWS * (2 * C + 1 + QKV + Q + 3 * F) + V + 16);
    }
}

/* Bytes of each kind of memory that llama_create() would map. */
static void llama_measure(const ModelConfig* c, int B, int T, bool train, int cache_len, size_t bytes[NUM_MEM]) {
    Llama m;
    Arena mem[NUM_MEM];
    memset(&m, 0, sizeof m);
    memset(mem, 0, sizeof mem);
    m.config = *c;
    m.table = param_table(c);
    m.blocks = (BlockActivations*)xcalloc(c->num_layers, sizeof *m.blocks);
    llama_lay_out(&m, mem, B, T, train, cache_len);
    for (int i = 0; i < NUM_MEM; i++) { bytes[i] = round_up(mem[i].used * sizeof(float), (size_t)2 << 20); }
    free(m.blocks);
    param_table_free(&m.table);
}

/* Maps all memory of a model: weights, and what the given uses need. Weights are zero until they are read or drawn. */
static Llama llama_create(const ModelConfig* c, int B, int T, bool train, int cache_len) {
    static const char* names[NUM_MEM] = {"weights",     "gradients", "m",         "v",
                                         "activations", "logits",    "workspace", "the KV cache"};
    Llama m;
    Arena mem[NUM_MEM];
    size_t bytes[NUM_MEM];
    llama_measure(c, B, T, train, cache_len, bytes);
    memset(&m, 0, sizeof m);
    memset(mem, 0, sizeof mem);
    for (int i = 0; i < NUM_MEM; i++) {
        if (bytes[i] > 0) { m.mapped[i] = mem[i].base = map_memory(bytes[i], names[i]); }
        m.mapped_bytes[i] = bytes[i];
    }
    m.config = *c;
    m.table = param_table(c);
    m.blocks = (BlockActivations*)xcalloc(c->num_layers, sizeof *m.blocks);
    llama_lay_out(&m, mem, B, T, train, cache_len);
    if (B > 0) { rope_table(m.rope, T, c); }
    if (cache_len > 0) { rope_table(m.decode_rope, cache_len, c); }
    return m;
}

static void llama_free(Llama* m) {
    for (int i = 0; i < NUM_MEM; i++) {
        if (m->mapped[i]) { munmap(m->mapped[i], m->mapped_bytes[i]); }
    }
    free(m->blocks);
    param_table_free(&m->table);
}

/* Fresh weights, the same in all three trainers. */
static inline void llama_init(Llama* m, uint64_t seed) {
    for (int i = 0; i < m->table.count; i++) {
        const Param* p = &m->table.items[i];
        param_init(m->params + p->offset, p, (uint32_t)i, &m->config, seed);
    }
}

/* A TensorSink and a TensorSource (model_folder.h) of one arena: weights, m or v. */
static bool store_tensor(void* arena, const Param* p, size_t first, size_t n, const float* src, Error* e) {
    (void)e;
    memcpy((float*)arena + p->offset + first, src, n * sizeof(float));
    return true;
}

static inline bool fetch_tensor(void* arena, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    (void)e;
    memcpy(dst, (float*)arena + p->offset + first, n * sizeof(float));
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// forward

/* From tokens (B, T) to norm_final (B, T, C), keeping what the backward pass needs. */
static void llama_forward(Llama* m, const int32_t* tokens) {
    const ModelConfig* c = &m->config;
    const size_t B = m->B, N = B * m->T;
    const int T = m->T, C = c->hidden_size, F = c->intermediate_size, L = c->num_layers;
    const int NH = c->num_heads, NKV = c->num_kv_heads, HD = c->head_dim, Q = q_width(c), QKV = qkv_width(c);

    embedding_forward(m->blocks[0].h, m->params + param_offset(&m->table, P_EMBEDDING, -1), tokens, N, C);
    for (int l = 0; l < L; l++) {
        const Block w = block_at(m->params, &m->table, l);
        const BlockActivations* s = &m->blocks[l];
        float* h_next = l + 1 < L ? m->blocks[l + 1].h : m->h_final;
        rmsnorm_forward(s->norm1, s->rstd1, s->h, w.input_norm, N, C, c->rms_eps);
        matmul_forward(s->qkv, s->norm1, w.qkv, NULL, N, C, QKV);
        rope_forward(s->qkv, m->rope, B, T, 0, NH, NKV, HD);
        attention_forward(s->att, s->lse, s->qkv, attention_shape(c, m->B, T));
        matmul_forward(s->mid, s->att, w.o, s->h, N, Q, C);
        rmsnorm_forward(s->norm2, s->rstd2, s->mid, w.post_norm, N, C, c->rms_eps);
        matmul_forward(s->gate_up, s->norm2, w.gate_up, NULL, N, C, 2 * F);
        swiglu_forward(s->act, s->gate_up, N, F);
        matmul_forward(h_next, s->act, w.down, s->mid, N, F, C);
    }
    rmsnorm_forward(m->norm_final, m->rstd_final, m->h_final, m->params + param_offset(&m->table, P_FINAL_NORM, -1), N, C,
                    c->rms_eps);
}

/* The head and the loss after llama_forward(): the mean cross-entropy over the B*T targets. Works through
 * CLASSIFIER_ROWS tokens at a time, so that full (B, T, V) logits never exist. With dloss != 0 (the weight of one
 * token's loss in what is differentiated) it goes on to the head's backward pass while a chunk's logits are at hand:
 * fills dnorm (N, C) and adds to the head's gradient. */
static double llama_loss(Llama* m, const int32_t* targets, float dloss) {
    const int C = m->config.hidden_size, V = m->config.vocab_size;
    const size_t N = (size_t)m->B * m->T;
    const float* head = m->params + param_offset(&m->table, P_LM_HEAD, -1);
    for (size_t first = 0; first < N; first += CLASSIFIER_ROWS) {
        const size_t rows = size_min(CLASSIFIER_ROWS, N - first);
        const float* x = m->norm_final + first * C;
        matmul_forward(m->logits, x, head, NULL, rows, C, V);
        if (dloss == 0.0f) {
            crossentropy_forward(m->losses + first, m->logits, targets + first, rows, V);
            continue;
        }
        crossentropy_fused(m->losses + first, m->logits, targets + first, dloss, rows, V);
        matmul_backward_input(m->dnorm + first * C, m->logits, head, rows, C, V, false);
        matmul_backward_weight(m->grads + param_offset(&m->table, P_LM_HEAD, -1), m->logits, x, rows, C, V);
    }
    double sum = 0.0;
    for (size_t i = 0; i < N; i++) { sum += m->losses[i]; }
    return sum / (double)N;
}

// ---------------------------------------------------------------------------------------------------------------------
// backward: every gradient accumulates (+=), so micro-batches add up; llama_zero_gradients() starts a step

static void llama_zero_gradients(Llama* m) {
    const size_t n = m->table.elements;
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i += 1 << 16) { memset(m->grads + i, 0, size_min(1 << 16, n - i) * sizeof(float)); }
}

/* After llama_forward(m, tokens) and llama_loss(m, targets, dloss != 0): dh walks from the last block to the first. */
static void llama_backward(Llama* m, const int32_t* tokens) {
    const ModelConfig* c = &m->config;
    const size_t B = m->B, N = B * m->T;
    const int T = m->T, C = c->hidden_size, F = c->intermediate_size, L = c->num_layers;
    const int NH = c->num_heads, NKV = c->num_kv_heads, HD = c->head_dim, Q = q_width(c), QKV = qkv_width(c);
    const size_t final_norm = param_offset(&m->table, P_FINAL_NORM, -1);

    memset(m->dh, 0, N * C * sizeof(float));
    rmsnorm_backward(m->dh, m->grads + final_norm, m->scratch, m->dnorm, m->h_final, m->params + final_norm, m->rstd_final, N,
                     C);
    for (int l = L - 1; l >= 0; l--) {
        const Block w = block_at(m->params, &m->table, l), g = block_at(m->grads, &m->table, l);
        const BlockActivations* s = &m->blocks[l];
        // h_next = mid + act Wdown^T: dh is the gradient of both terms
        matmul_backward_weight(g.down, m->dh, s->act, N, F, C);
        matmul_backward_input(m->dact, m->dh, w.down, N, F, C, false);
        swiglu_backward(m->dgate_up, m->dact, s->gate_up, N, F);
        matmul_backward_weight(g.gate_up, m->dgate_up, s->norm2, N, C, 2 * F);
        matmul_backward_input(m->dnorm, m->dgate_up, w.gate_up, N, C, 2 * F, false);
        rmsnorm_backward(m->dh, g.post_norm, m->scratch, m->dnorm, s->mid, w.post_norm, s->rstd2, N, C);
        // mid = h + att Wo^T
        matmul_backward_weight(g.o, m->dh, s->att, N, Q, C);
        matmul_backward_input(m->datt, m->dh, w.o, N, Q, C, false);
        attention_backward(m->dqkv, m->scratch, m->datt, s->att, s->lse, s->qkv, attention_shape(c, m->B, T));
        rope_backward(m->dqkv, m->rope, B, T, 0, NH, NKV, HD);
        matmul_backward_weight(g.qkv, m->dqkv, s->norm1, N, C, QKV);
        matmul_backward_input(m->dnorm, m->dqkv, w.qkv, N, C, QKV, false);
        rmsnorm_backward(m->dh, g.input_norm, m->scratch, m->dnorm, s->h, w.input_norm, s->rstd1, N, C);
    }
    embedding_backward(m->grads + param_offset(&m->table, P_EMBEDDING, -1), m->dh, tokens, N, C);
}

// ---------------------------------------------------------------------------------------------------------------------
// update

/* What gradients are multiplied with so that their norm is at most `max_norm` (0: any), as torch's clip_grad_norm_. */
static float clip_factor(double norm, double max_norm) {
    return max_norm > 0 && norm > max_norm ? (float)(max_norm / (norm + 1e-6)) : 1.0f;
}

/* One AdamW step on all parameters; weight decay acts on matrices alone. */
static void llama_update(Llama* m, AdamW hyper) {
    const double weight_decay = hyper.weight_decay;
    for (int i = 0; i < m->table.count; i++) {
        const Param* p = &m->table.items[i];
        hyper.weight_decay = param_specs[p->kind].matrix ? weight_decay : 0.0;
        adamw_update(m->params + p->offset, m->grads + p->offset, m->m + p->offset, m->v + p->offset, param_size(p), &hyper);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// generation: the forward pass again, over the rows of one sequence that are new, with keys and values cached

/* One pass over `rows` <= DECODE_ROWS tokens at positions pos .. pos + rows - 1. Returns the last one's logits (V). */
static const float* llama_decode_rows(Llama* m, const int32_t* tokens, int rows, int pos) {
    const ModelConfig* c = &m->config;
    const int C = c->hidden_size, F = c->intermediate_size, NH = c->num_heads, NKV = c->num_kv_heads, HD = c->head_dim;
    const int Q = q_width(c), QKV = qkv_width(c), KV2 = 2 * kv_width(c);
    Arena a = {m->decode_rows, 0};
    float* h = take(&a, (size_t)DECODE_ROWS * C);
    float* norm = take(&a, (size_t)DECODE_ROWS * C);
    float* rstd = take(&a, DECODE_ROWS);
    float* qkv = take(&a, (size_t)DECODE_ROWS * QKV);
    float* att = take(&a, (size_t)DECODE_ROWS * Q);
    float* gate_up = take(&a, (size_t)DECODE_ROWS * 2 * F);
    float* act = take(&a, (size_t)DECODE_ROWS * F);
    float* logits = take(&a, c->vocab_size);

    embedding_forward(h, m->params + param_offset(&m->table, P_EMBEDDING, -1), tokens, rows, C);
    for (int l = 0; l < c->num_layers; l++) {
        const Block w = block_at(m->params, &m->table, l);
        float* cache = m->kv_cache + (size_t)l * m->cache_len * KV2;  // (cache_len, KV2)
        rmsnorm_forward(norm, rstd, h, w.input_norm, rows, C, c->rms_eps);
        matmul_forward(qkv, norm, w.qkv, NULL, rows, C, QKV);
        rope_forward(qkv, m->decode_rope, 1, rows, pos, NH, NKV, HD);
        for (int i = 0; i < rows; i++) {
            memcpy(cache + (size_t)(pos + i) * KV2, qkv + (size_t)i * QKV + Q, KV2 * sizeof(float));
        }
        for (int i = 0; i < rows; i++) {
            attention_decode(att + (size_t)i * Q, qkv + (size_t)i * QKV, cache, pos + i + 1, attention_shape(c, 1, 1));
        }
        matmul_forward(h, att, w.o, h, rows, Q, C);
        rmsnorm_forward(norm, rstd, h, w.post_norm, rows, C, c->rms_eps);
        matmul_forward(gate_up, norm, w.gate_up, NULL, rows, C, 2 * F);
        swiglu_forward(act, gate_up, rows, F);
        matmul_forward(h, act, w.down, h, rows, F, C);
    }
    const float* last = h + (size_t)(rows - 1) * C;
    rmsnorm_forward(norm, rstd, last, m->params + param_offset(&m->table, P_FINAL_NORM, -1), 1, C, c->rms_eps);
    matmul_forward(logits, norm, m->params + param_offset(&m->table, P_LM_HEAD, -1), NULL, 1, C, c->vocab_size);
    return logits;
}

/* Takes `count` tokens at positions pos .. pos + count - 1 <= cache_len - 1; returns the logits (V) behind the last. */
static const float* llama_decode(Llama* m, const int32_t* tokens, int count, int pos) {
    const float* logits = NULL;
    for (int done = 0; done < count; done += DECODE_ROWS) {
        const int rows = count - done < DECODE_ROWS ? count - done : DECODE_ROWS;
        logits = llama_decode_rows(m, tokens + done, rows, pos + done);
    }
    return logits;
}

/* llama_decode() as generate.h calls it. */
static inline const float* next_logits(void* model, const int32_t* tokens, int count, int pos, Error* e) {
    (void)e;
    return llama_decode((Llama*)model, tokens, count, pos);
}

// ---------------------------------------------------------------------------------------------------------------------
// one step

#ifndef TESTING

/* Forward and backward over the step's micro-batches, then the update. Returns the mean loss of the step's tokens before the
 * update; *norm is that of the gradient before clipping. `lr` of this step; x, y (B, T) are buffers. */
static double train_step(Llama* m, Session* s, int32_t* x, int32_t* y, double lr, double* norm, const char** skipped) {
    const Options* o = &s->options;
    const float dloss = (float)(1.0 / (double)s->plan.tokens_per_step);
    double loss = 0.0;
    Error e = NO_ERROR;
    llama_zero_gradients(m);
    for (int k = 0; k < s->plan.accumulate; k++) {
        must(dataloader_next(&s->train, x, y, &e), &e);
        llama_forward(m, x);
        loss += llama_loss(m, y, dloss) / s->plan.accumulate;
        llama_backward(m, x);
    }
    *norm = global_norm(m->grads, m->table.elements, m->norm_scratch);

    const double loss_z = outlier_update(&s->state.loss, loss), norm_z = outlier_update(&s->state.grad_norm, *norm);
    *skipped = !isfinite(loss) || !isfinite(*norm)    ? "skipped: not finite"
               : outlier_skip(loss_z, o->skip_loss_z) ? "skipped: loss"
               : outlier_skip(norm_z, o->skip_norm_z) ? "skipped: gradient norm"
                                                      : NULL;
    s->state.step++;
    s->state.tokens += (uint64_t)s->plan.tokens_per_step;
    if (*skipped) { return loss; }
    s->state.updates++;
    AdamW hyper;
    hyper.lr = lr;
    hyper.beta1 = o->beta1;
    hyper.beta2 = o->beta2;
    hyper.eps = o->eps;
    hyper.weight_decay = o->weight_decay;
    hyper.grad_scale = clip_factor(*norm, o->grad_clip);
    hyper.step = (int64_t)s->state.updates;
    llama_update(m, hyper);
    return loss;
}

/* Mean loss over the first `max_rows` rows of the validation data (all, where it has fewer). */
static double validate(Llama* m, Session* s, int32_t* x, int32_t* y, uint64_t max_rows) {
    const uint64_t rows = max_rows < s->val.rows_per_epoch ? max_rows : s->val.rows_per_epoch;
    const size_t T = (size_t)m->T;
    double sum = 0.0;
    Error e = NO_ERROR;
    dataloader_seek(&s->val, 0);
    for (uint64_t done = 0; done < rows; done += (uint64_t)m->B) {
        // the last batch is filled up with rows from the start, whose losses do not count
        for (int b = 0; b < m->B; b++) { must(dataloader_next(&s->val, x + b * T, y + b * T, &e), &e); }
        const size_t counted = (rows - done < (uint64_t)m->B ? (size_t)(rows - done) : (size_t)m->B) * T;
        llama_forward(m, x);
        llama_loss(m, y, 0.0f);
        for (size_t i = 0; i < counted; i++) { sum += m->losses[i]; }
    }
    return sum / ((double)rows * (double)T);
}

// ---------------------------------------------------------------------------------------------------------------------
// jobs

/* What the run with these options maps, by kind; and as the table that is shown. */
static uint64_t memory_need(void* session, const Options* o) {
    const Session* s = (const Session*)session;
    size_t bytes[NUM_MEM];
    uint64_t sum = 0;
    const bool trains = s->job == JOB_TRAIN || s->job == JOB_DRY_RUN;
    llama_measure(&s->config, trains || s->job == JOB_EVAL ? o->batch : 0, o->seq, trains, session_context(s), bytes);
    for (int i = 0; i < NUM_MEM; i++) { sum += bytes[i]; }
    return sum;
}

/* Shows the memory a job needs (on stderr for those whose stdout is text), refuses what does not fit, and maps it. */
static Llama create_checked(Session* s, FILE* screen) {
    static const char* const names[NUM_MEM] = {"weights",     "gradients", "m",         "v",
                                               "activations", "logits",    "workspace", "KV cache"};
    const Options* o = &s->options;
    const bool trains = s->job == JOB_TRAIN || s->job == JOB_DRY_RUN;
    const int B = trains || s->job == JOB_EVAL ? o->batch : 0, context = session_context(s);
    const uint64_t have = host_memory_available();
    size_t bytes[NUM_MEM];
    MemoryTable table;
    Error e = NO_ERROR;
    memset(&table, 0, sizeof table);
    llama_measure(&s->config, B, o->seq, trains, context, bytes);
    for (int i = 0; i < NUM_MEM; i++) { memory_add(&table, names[i], bytes[i]); }
    if (screen) { print_memory(screen, &table, have); }
    must(memory_check(&table, have, "memory", o, 1, memory_need, s, &e), &e);
    if (s->job == JOB_DRY_RUN) {
        Llama none;
        memset(&none, 0, sizeof none);
        return none;
    }
    return llama_create(&s->config, B, o->seq, trains, context);
}

static void load_weights(Llama* m, const Session* s) {
    Error e = NO_ERROR;
    must(model_load(s->model_dir, &m->config, &m->table, store_tensor, m->params, &e), &e);
}

/* The optimizer's state as the checkpoint names it. One whose weights are rounded keeps the exact ones as well. */
static int state_slots(Llama* m, bool with_master, StateSlot slots[3]) {
    const StateSlot all[3] = {{"m", "F32", fetch_tensor, store_tensor, m->m},
                              {"v", "F32", fetch_tensor, store_tensor, m->v},
                              {"master", "F32", fetch_tensor, store_tensor, m->params}};
    memcpy(slots, all, sizeof all);
    return with_master ? 3 : 2;
}

static void write_checkpoint(Llama* m, Session* s) {
    static const char* const dtypes[] = {"F32", "F32", "BF16", "F16"};  // as EXPORT_AUTO ... EXPORT_F16
    const char* dtype = dtypes[s->options.export_dtype];
    StateSlot slots[3];
    const int num_slots = state_slots(m, strcmp(dtype, "F32") != 0, slots);
    session_checkpoint(s, dtype, fetch_tensor, m->params, slots, num_slots, NULL);
}

/* Settles --minutes: times a few steps with learning rate 0 on the first batches, then wipes their traces. */
static void measure_steps(Llama* m, Session* s, int32_t* x, int32_t* y, double started) {
    const TrainerState before = s->state;  // a new run's, which owns nothing
    const uint64_t row = s->train.row;
    double best = INFINITY;
    Error e = NO_ERROR;
    for (int i = 0; i < MINUTES_MEASURE; i++) {
        double norm, start = now_seconds();
        const char* skipped;
        train_step(m, s, x, y, 0.0, &norm, &skipped);
        best = fmin(best, now_seconds() - start);
    }
    memset(m->m, 0, m->table.elements * sizeof(float));
    memset(m->v, 0, m->table.elements * sizeof(float));
    s->state = before;
    dataloader_seek(&s->train, row);
    s->options.steps = (int)steps_for_minutes(s->options.minutes, now_seconds() - started, best);
    must(plan_make(&s->plan, &s->options, s->ranks, s->train.rows_per_epoch, &e), &e);
    printf("timed   %.1f ms a step: %lld steps fit into %g minutes\n", best * 1e3, (long long)s->plan.steps,
           s->options.minutes);
}

static void train(Session* s, double started) {
    Options* o = &s->options;
    Error e = NO_ERROR;
    session_print(s, "FP32");
    Llama model = create_checked(s, stdout), *m = &model;
    const bool timed = o->minutes > 0 && !s->resumed;
    if (!timed) { print_plan(stdout, &s->plan, o, 1, s->train.num_tokens); }
    if (s->job == JOB_DRY_RUN) { return; }
    fflush(stdout);

    if (s->model_dir[0]) {
        load_weights(m, s);
    } else {
        llama_init(m, (uint64_t)o->seed);
    }
    if (s->resumed) {
        StateSlot slots[3];
        const int num_slots = state_slots(m, s->saved_master, slots);
        must(state_load(s->model_dir, s->state.world_size, &m->table, 0, m->table.elements, slots, num_slots, &e), &e);
    }
    int32_t* x = (int32_t*)xmalloc((size_t)m->B * m->T * sizeof(int32_t));
    int32_t* y = (int32_t*)xmalloc((size_t)m->B * m->T * sizeof(int32_t));
    if (timed) {
        measure_steps(m, s, x, y, started);
        print_plan(stdout, &s->plan, o, 1, s->train.num_tokens);
    }
    session_begin(s, "FP32");
    run_catch_signals();

    Sampler sampler;
    Generator g;
    StepLines lines;
    sampler_init(&sampler, m->config.vocab_size, o->temperature, o->top_k, o->top_p, (uint64_t)o->seed);
    generator_init(&g, next_logits, m, &m->config, s->has_tokenizer ? &s->tokenizer : NULL, &sampler, m->cache_len, stdout);
    step_lines_init(&lines, &s->plan, (int64_t)s->state.step, flops_per_token(&m->config, &m->table, m->T), 0);

    int64_t saved = s->resumed ? (int64_t)s->state.step : -1;
    const char* reason = s->plan.stop < s->plan.steps ? "stop-after" : "done";
    while ((int64_t)s->state.step < s->plan.stop) {
        const double lr = session_lr(s, (int64_t)s->state.step), start = now_seconds();
        const char* skipped;
        double norm;
        const double loss = train_step(m, s, x, y, lr, &norm, &skipped);
        const double ms = (now_seconds() - start) * 1e3;
        const int64_t step = (int64_t)s->state.step;
        const double tok_s = step_line(stdout, &lines, step, s->plan.stop, loss, norm, lr, ms, host_memory_peak(), skipped);
        must(log_step(&s->log, step, loss, norm, lr, ms, tok_s, skipped, &e), &e);
        const bool stopping = run_stop_requested();

        if (s->has_val && !stopping && session_due(s, o->val_every, step)) {
            const double val_loss = validate(m, s, x, y, (uint64_t)o->val_batches * (uint64_t)m->B);
            print_validation(stdout, &lines, step, val_loss);
            must(log_val(&s->log, step, val_loss, &e), &e);
        }
        if (m->cache_len > 0 && !stopping && session_due(s, o->sample_every, step)) {
            printf("sample  ");
            g.stream = (uint32_t)step;
            must(generate(&g, o->prompt, o->sample_tokens, &e), &e);
            must(log_sample(&s->log, step, g.text, g.text_len, &e), &e);
        }
        if (stopping || session_due(s, o->checkpoint_every, step)) {
            write_checkpoint(m, s);
            saved = step;
        }
        if (stopping) {
            reason = "signal";
            break;
        }
    }
    if (saved < 0) { write_checkpoint(m, s); }  // --steps 0: a new model, exported
    must(log_end(&s->log, (int64_t)s->state.step, reason, now_seconds() - started, &e), &e);
    print_summary(stdout, &lines, s->argv[0], s->model_dir, host_memory_peak());
    generator_free(&g);
    sampler_free(&sampler);
    free(x);
    free(y);
    llama_free(m);
}

/* --eval: the loss on --val, all of it unless --val-batches is given. */
static void eval(Session* s) {
    const Options* o = &s->options;
    Llama model = create_checked(s, stderr), *m = &model;
    load_weights(m, s);
    int32_t* x = (int32_t*)xmalloc((size_t)m->B * m->T * sizeof(int32_t));
    int32_t* y = (int32_t*)xmalloc((size_t)m->B * m->T * sizeof(int32_t));
    const uint64_t most = o->given[OPT_val_batches] ? (uint64_t)o->val_batches * (uint64_t)m->B : UINT64_MAX;
    const uint64_t rows = most < s->val.rows_per_epoch ? most : s->val.rows_per_epoch;
    const double loss = validate(m, s, x, y, rows);
    printf("loss %.6f  perplexity %.4f  tokens %llu\n", loss, exp(loss), (unsigned long long)rows * (unsigned long long)m->T);
    free(x);
    free(y);
    llama_free(m);
}

/* --generate and --chat: stdout carries the model's text alone. */
static void talk(Session* s) {
    const Options* o = &s->options;
    Llama model = create_checked(s, NULL), *m = &model;
    Sampler sampler;
    Generator g;
    Error e = NO_ERROR;
    load_weights(m, s);
    sampler_init(&sampler, m->config.vocab_size, o->temperature, o->top_k, o->top_p, (uint64_t)o->seed);
    generator_init(&g, next_logits, m, &m->config, s->has_tokenizer ? &s->tokenizer : NULL, &sampler, m->cache_len, stdout);
    must(s->job == JOB_CHAT ? chat(&g, o->system, o->tokens, stdin, &e) : generate(&g, o->generate, o->tokens, &e), &e);
    generator_free(&g);
    sampler_free(&sampler);
    llama_free(m);
}

int main(int argc, char** argv) {
    const double started = now_seconds();
    Session s;
    session_open(&s, argc, argv, ON_CPU, 0, 1);
    int threads = 1;
#ifdef _OPENMP
    if (s.options.threads > 0) { omp_set_num_threads(s.options.threads); }
    threads = omp_get_max_threads();
#endif
    run_machine(NULL, threads, s.machine, sizeof s.machine);
    switch (s.job) {
        case JOB_TRAIN:
        case JOB_DRY_RUN: train(&s, started); break;
        case JOB_EVAL: eval(&s); break;
        case JOB_GENERATE:
        case JOB_CHAT: talk(&s); break;
    }
    session_close(&s);
    return 0;
}

#endif  // TESTING
