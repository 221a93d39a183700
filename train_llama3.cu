/* train_llama3.cu -- trains Llama 3 on one GPU: the program of train_llama3.c, whose header says what it computes, with the
 * layers of llmc/<layer>.cuh in FP32, BF16 or FP16 (-DPRECISION_...). Read that file first; what differs is here:
 *
 *   - weights, activations and gradients are floatX; master weights, m, v, norms' gradients, losses and all sums are fp32;
 *   - activations may be computed again in the backward pass instead of being kept (--recompute), with the same bits;
 *   - what changes from step to step lives in one struct on the device (StepState, llmc/adamw.cuh), so a step is queued
 *     without the host looking at it: no allocation and no synchronisation. Its result is read one step late;
 *   - a micro-step is captured in a CUDA graph: one for the first of a step, which overwrites gradients, one for the
 *     others, which add to them; token batches are copied on a stream of their own while the GPU computes.
 *
 * Every sum has a fixed order, so two runs of one build on one kind of card give the same bits.
 */
#include "llmc/base/utils.h"         // defines: Error, fail, die, warn, xmalloc, now_seconds
#include "llmc/run/session.h"        // defines: Session, session_open, session_begin, session_checkpoint; all that it includes
#include "llmc/base/float16.h"       // defines: f32_from_bf16, bf16_from_f32, f32_from_f16
#include "llmc/gpu/cuda_common.cuh"  // defines: floatX, CUDA_CHECK, row_pitch, ProfileRange
#include "llmc/embedding.cuh"        // defines: embedding_forward_cuda, embedding_backward_cuda
#include "llmc/rmsnorm.cuh"          // defines: rmsnorm_forward_cuda, rmsnorm_backward_cuda
#include "llmc/rope.cuh"             // defines: rope_forward_cuda, rope_backward_cuda
#include "llmc/rope.h"               // defines: rope_table
#include "llmc/attention.cuh"        // defines: attention_forward_cuda, attention_backward_cuda, attention_decode_cuda
#include "llmc/swiglu.cuh"           // defines: swiglu_forward_cuda, swiglu_backward_cuda
#include "llmc/matmul.cuh"  // defines: MatmulContext, matmul_forward_cuda, matmul_backward_input_cuda, matmul_backward_weight_cuda
#include "llmc/crossentropy.cuh"  // defines: crossentropy_forward_cuda, crossentropy_fused_cuda
#include "llmc/gpu/finite.cuh"    // defines: first_not_finite_cuda
#include "llmc/adamw.cuh"         // defines: StepState, step_begin_cuda, norm_square_cuda, adamw_update_cuda

// ---------------------------------------------------------------------------------------------------------------------
// memory

/* The weights of one block; its gradients lie at the same offsets of their arena, in their own type. */
typedef struct {
    const floatX* input_norm;  // (C)
    const floatX* qkv;         // (QKV, C)
    const floatX* o;           // (C, NH HD)
    const floatX* post_norm;   // (C)
    const floatX* gate_up;     // (2F, C)
    const floatX* down;        // (C, F)
} Block;

/* What the forward pass of one block leaves for its backward pass; N = B*T rows, each padded (row_pitch). What the
 * recompute level does not keep points to buffers that all blocks share. */
typedef struct {
    floatX* h;        // (N, C) the residual stream as it enters; kept at every level
    floatX* norm1;    // (N, C)
    float* rstd1;     // (N)
    floatX* qkv;      // (N, QKV) after RoPE
    float* lse;       // (B, NH, T)
    floatX* att;      // (N, NH HD)
    floatX* mid;      // (N, C) the residual stream after attention
    floatX* norm2;    // (N, C)
    float* rstd2;     // (N)
    floatX* gate_up;  // (N, 2F); backward overwrites it with its gradient
    floatX* act;      // (N, F)
} BlockActivations;

typedef enum {
    MEM_WEIGHTS,
    MEM_GRADIENTS,
    MEM_MASTER,
    MEM_M,
    MEM_V,
    MEM_ACTIVATIONS,
    MEM_LOGITS,
    MEM_WORKSPACE,
    MEM_CACHE,
    NUM_MEM
} MemoryKind;
static const char* const memory_names[NUM_MEM] = {"weights",     "gradients", "master",    "m",       "v",
                                                  "activations", "logits",    "workspace", "KV cache"};

enum { CLASSIFIER_ROWS = 4096 };  // tokens whose logits exist at one time; fewer would leave the last GEMMs short of tiles
enum { DECODE_ROWS = 64 };        // tokens of a prompt that generation takes in one pass
enum { INFLIGHT = 2 };            // steps that may be queued
enum { NO_FILL = -1 };            // see llama_create()
#ifdef PRECISION_BF16
enum { CAN_SPLIT = true };  // a master weight into the weight and 16 bits more
#else
enum { CAN_SPLIT = false };
#endif

/* How a model is laid out: what the command line says of it. */
typedef struct {
    int B, T;       // of the micro-batch; B = 0: none
    bool train;     // with gradients and optimizer
    int cache_len;  // positions of the KV cache; 0: no generation
    Recompute level;
    bool fp32_grads;  // else floatX
    MasterKind master;
    bool bf16_moments;
} Layout;

/* Elements from one row to the next. */
typedef struct {
    size_t C, QKV, Q, F2, F, V;
} Pitches;

struct Profiler;

typedef struct {
    ModelConfig config;
    ParamTable table;
    Layout layout;
    Pitches pitch;
    cudaStream_t stream, copy_stream;
    MatmulContext* matmul;
    Profiler* profiler;  // NULL: off

    floatX* params;
    void* grads;        // floatX or float; norms' slots stay zero, their gradients are in norm_grads
    float* norm_grads;  // (2L + 1, C) fp32
    void* master;
    void* m;
    void* v;
    AdamWStretch* stretches;  // on the device
    int num_stretches;
    StepState* state;  // on the device

    float* rope;               // (T, HD)
    BlockActivations* blocks;  // (L)
    floatX* h_final;           // (N, C)
    floatX* norm_final;        // (N, C)
    float* rstd_final;         // (N)
    float* losses;             // (N)
    floatX* logits;            // (min(N, CLASSIFIER_ROWS), V)
    int32_t* x;                // (N)
    int32_t* y;                // (N)
    floatX* dh;                // (N, C) gradient of the residual stream
    floatX* dnorm;             // (N, C)
    floatX* dqkv;              // (N, QKV)
    floatX* datt;              // (N, NH HD)
    floatX* dact;              // (N, F)
    void* matmul_workspace;
    void* scratch;   // for the layers that ask for it
    float* staging;  // (MODEL_PIECE) weights on their way from or to a file

    floatX* kv_cache;     // (L, cache_len, 2 NKV HD)
    float* decode_rope;   // (cache_len, HD)
    floatX* decode_rows;  // see llama_decode_rows
    floatX* host_logits;  // pinned
    float* float_logits;  // (V) on the host

    void* mapped[NUM_MEM];
} Llama;

/* A region that is first measured (base NULL) and then handed out by the same code. Units: bytes. */
typedef struct {
    char* base;
    size_t used;
} Arena;

template <typename T>
static T* take(Arena* a, size_t count) {
    T* p = a->base ? (T*)(a->base + a->used) : NULL;
    a->used += round_up(count * sizeof(T), 256);
    return p;
}

static size_t grad_bytes(const Layout* o) { return o->fp32_grads ? sizeof(float) : sizeof(floatX); }

/* The weights of block l: the only way by which a layer gets them. */
static Block block_at(const Llama* m, int l) {
    Block b;
    b.input_norm = m->params + param_offset(&m->table, P_INPUT_NORM, l);
    b.qkv = m->params + param_offset(&m->table, P_Q, l);
    b.o = m->params + param_offset(&m->table, P_O, l);
    b.post_norm = m->params + param_offset(&m->table, P_POST_NORM, l);
    b.gate_up = m->params + param_offset(&m->table, P_GATE, l);
    b.down = m->params + param_offset(&m->table, P_DOWN, l);
    return b;
}

/* Gradient of a matrix, in the gradients' type. */
static void* grad_at(const Llama* m, ParamKind kind, int l) {
    return (char*)m->grads + param_offset(&m->table, kind, l) * grad_bytes(&m->layout);
}

/* fp32 gradient of a norm's weights: two a block, then the final one. */
static float* norm_grad_at(const Llama* m, ParamKind kind, int l) {
    const size_t row = kind == P_FINAL_NORM ? 2 * (size_t)m->config.num_layers : 2 * (size_t)l + (kind == P_POST_NORM);
    return m->norm_grads + row * round_up(m->config.hidden_size, ADAMW_VECTOR);
}

static size_t norm_grads_size(const ModelConfig* c) {
    return (2 * (size_t)c->num_layers + 1) * round_up(c->hidden_size, ADAMW_VECTOR);
}

/* Lays a model's buffers out; see train_llama3.c. */
static void llama_lay_out(Llama* m, Arena mem[NUM_MEM]) {
    const ModelConfig* c = &m->config;
    const Layout* o = &m->layout;
    const size_t N = (size_t)o->B * o->T, L = c->num_layers, HD = c->head_dim, elements = m->table.elements;
    const size_t rows = size_min(N, CLASSIFIER_ROWS), V = c->vocab_size;
    Pitches* p = &m->pitch;
    p->C = row_pitch<floatX>(c->hidden_size);
    p->QKV = row_pitch<floatX>(qkv_width(c));
    p->Q = row_pitch<floatX>(q_width(c));
    p->F2 = row_pitch<floatX>(2 * (size_t)c->intermediate_size);
    p->F = row_pitch<floatX>(c->intermediate_size);
    p->V = row_pitch<floatX>(V);

    m->params = take<floatX>(&mem[MEM_WEIGHTS], elements);
    if (o->train) {
        m->grads = take<char>(&mem[MEM_GRADIENTS], elements * grad_bytes(o));
        m->norm_grads = take<float>(&mem[MEM_GRADIENTS], norm_grads_size(c));
        const size_t master = o->master == MASTER_FP32 ? sizeof(float) : o->master == MASTER_SPLIT ? sizeof(uint16_t) : 0;
        m->master = take<char>(&mem[MEM_MASTER], elements * master);
        m->m = take<char>(&mem[MEM_M], elements * (o->bf16_moments ? 2 : 4));
        m->v = take<char>(&mem[MEM_V], elements * (o->bf16_moments ? 2 : 4));
    }
    Arena* w = &mem[MEM_WORKSPACE];
    m->matmul_workspace = take<char>(w, m->matmul->workspace_bytes);
    m->staging = take<float>(w, MODEL_PIECE);
    if (N > 0) {
        Arena* a = &mem[MEM_ACTIVATIONS];
        const Recompute level = o->train ? o->level : RECOMPUTE_BLOCK;
        // what the level does not keep is taken once, here, for all blocks; the others take theirs below
        BlockActivations shared;
        memset(&shared, 0, sizeof shared);
        if (level >= RECOMPUTE_NORM_SWIGLU) {
            shared.norm1 = take<floatX>(w, N * p->C);
            shared.norm2 = take<floatX>(w, N * p->C);
            shared.act = take<floatX>(w, N * p->F);
        }
        if (level >= RECOMPUTE_FFN) { shared.gate_up = take<floatX>(w, N * p->F2); }
        if (level >= RECOMPUTE_BLOCK) {
            shared.rstd1 = take<float>(w, N);
            shared.qkv = take<floatX>(w, N * p->QKV);
            shared.lse = take<float>(w, N * c->num_heads);
            shared.att = take<floatX>(w, N * p->Q);
            shared.mid = take<floatX>(w, N * p->C);
            shared.rstd2 = take<float>(w, N);
        }
        m->rope = take<float>(a, o->T * HD);
        m->x = take<int32_t>(a, N);
        m->y = take<int32_t>(a, N);
        floatX* ping_pong[2] = {NULL, NULL};  // without a backward pass two residual streams are enough
        if (!o->train) {
            ping_pong[0] = take<floatX>(a, N * p->C);
            ping_pong[1] = take<floatX>(a, N * p->C);
        }
        for (size_t l = 0; l < L; l++) {
            BlockActivations s = shared;
            s.h = o->train ? take<floatX>(a, N * p->C) : ping_pong[l % 2];
            if (level < RECOMPUTE_BLOCK) {
                s.rstd1 = take<float>(a, N);
                s.qkv = take<floatX>(a, N * p->QKV);
                s.lse = take<float>(a, N * c->num_heads);
                s.att = take<floatX>(a, N * p->Q);
                s.mid = take<floatX>(a, N * p->C);
                s.rstd2 = take<float>(a, N);
            }
            if (level < RECOMPUTE_FFN) { s.gate_up = take<floatX>(a, N * p->F2); }
            if (level < RECOMPUTE_NORM_SWIGLU) {
                s.norm1 = take<floatX>(a, N * p->C);
                s.norm2 = take<floatX>(a, N * p->C);
                s.act = take<floatX>(a, N * p->F);
            }
            m->blocks[l] = s;
        }
        m->h_final = o->train ? take<floatX>(a, N * p->C) : ping_pong[L % 2];
        m->norm_final = take<floatX>(a, N * p->C);
        m->rstd_final = take<float>(a, N);
        m->losses = take<float>(a, N);
        m->logits = take<floatX>(&mem[MEM_LOGITS], rows * p->V);
    }
    if (o->train) {
        m->dh = take<floatX>(w, N * p->C);
        m->dnorm = take<floatX>(w, N * p->C);
        m->dqkv = take<floatX>(w, N * p->QKV);
        m->datt = take<floatX>(w, N * p->Q);
        m->dact = take<floatX>(w, N * p->F);
        size_t scratch = size_max(rmsnorm_backward_scratch_cuda(N, c->hidden_size), norm_square_scratch_cuda());
        scratch = size_max(scratch, embedding_backward_scratch_cuda(N, c->hidden_size));
        scratch = size_max(scratch, attention_backward_scratch_cuda(attention_shape(c, o->B, o->T)));
        m->scratch = take<char>(w, scratch);
        m->stretches = take<AdamWStretch>(w, m->table.count);
        m->state = take<StepState>(w, 1);
    }
    if (o->cache_len > 0) {
        Arena* a = &mem[MEM_CACHE];
        m->kv_cache = take<floatX>(a, L * o->cache_len * 2 * kv_width(c));
        m->decode_rope = take<float>(a, o->cache_len * HD);
        m->decode_rows = take<floatX>(a, DECODE_ROWS * (2 * p->C + p->QKV + p->Q + p->F2 + p->F) + p->V);
    }
}

/* Bytes of each kind of memory that llama_create() would take. `matmul` is the context whose workspace is counted. */
static void llama_measure(const ModelConfig* c, const Layout* layout, MatmulContext* matmul, size_t bytes[NUM_MEM]) {
    Llama m;
    Arena mem[NUM_MEM];
    memset(&m, 0, sizeof m);
    memset(mem, 0, sizeof mem);
    m.config = *c;
    m.layout = *layout;
    m.matmul = matmul;
    m.table = param_table(c);
    m.blocks = (BlockActivations*)xcalloc(c->num_layers, sizeof *m.blocks);
    llama_lay_out(&m, mem);
    for (int i = 0; i < NUM_MEM; i++) { bytes[i] = round_up(mem[i].used, (size_t)2 << 20); }  // cudaMalloc's unit
    free(m.blocks);
    param_table_free(&m.table);
}

/* Copies to the device in the order of the model's stream, and waits. A plain cudaMemcpy of pageable memory may return before
 * the last bytes have arrived, and this stream does not wait for the default one. */
static void copy_in(const Llama* m, void* device, const void* host, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, m->stream));
    CUDA_CHECK(cudaStreamSynchronize(m->stream));
}

/* The stretches of the arena that AdamW tells apart: norms, whose gradients lie elsewhere and which do not decay, and what
 * lies between them. */
static void llama_make_stretches(Llama* m) {
    AdamWStretch* list = (AdamWStretch*)xcalloc(m->table.count, sizeof *list);
    for (int i = 0; i < m->table.count; i++) {
        const Param* p = &m->table.items[i];
        if (param_specs[p->kind].joined) { continue; }
        AdamWStretch* s = &list[m->num_stretches++];
        s->first = p->offset;
        s->tensor = (uint32_t)i;
        s->decays = param_specs[p->kind].matrix;
        s->grad = s->decays ? NULL : norm_grad_at(m, p->kind, p->layer);
    }
    copy_in(m, m->stretches, list, m->num_stretches * sizeof *list);
    free(list);
}

/* The RoPE table of `positions` positions, on the device. */
static void upload_rope(const Llama* m, float* device, int positions) {
    const size_t bytes = (size_t)positions * m->config.head_dim * sizeof(float);
    float* host = (float*)xmalloc(bytes);
    rope_table(host, positions, &m->config);
    copy_in(m, device, host, bytes);
    free(host);
}

/* Takes all device memory of a model. `fill` is the byte that activations and workspace hold at first, NO_FILL for what was
 * there: no result depends on it. Weights, gradients and optimizer state are zero until they are read, drawn or computed. */
static Llama llama_create(const ModelConfig* c, const Layout* layout, MatmulContext* matmul, int fill) {
    Llama m;
    Arena mem[NUM_MEM];
    size_t bytes[NUM_MEM];
    llama_measure(c, layout, matmul, bytes);
    memset(&m, 0, sizeof m);
    memset(mem, 0, sizeof mem);
    for (int i = 0; i < NUM_MEM; i++) {
        if (bytes[i] == 0) { continue; }
        const cudaError_t status = cudaMalloc(&m.mapped[i], bytes[i]);
        if (status != cudaSuccess) {
            die("out of GPU memory: could not allocate %.2f GiB for %s: %s\n  hint: does another process use the card?",
                (double)bytes[i] / (1 << 30), memory_names[i], cudaGetErrorString(status));
        }
        const bool keeps_zero = i <= MEM_V;  // gaps between tensors must stay zero
        if (keeps_zero || fill != NO_FILL) { CUDA_CHECK(cudaMemset(m.mapped[i], keeps_zero ? 0 : fill, bytes[i])); }
        mem[i].base = (char*)m.mapped[i];
    }
    m.config = *c;
    m.layout = *layout;
    m.matmul = matmul;
    m.table = param_table(c);
    m.blocks = (BlockActivations*)xcalloc(c->num_layers, sizeof *m.blocks);
    llama_lay_out(&m, mem);
    matmul->workspace = m.matmul_workspace;
    CUDA_CHECK(cudaStreamCreateWithFlags(&m.stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaStreamCreateWithFlags(&m.copy_stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaDeviceSynchronize());  // the fills above, on the default stream, come before what follows on ours
    if (layout->B > 0) { upload_rope(&m, m.rope, layout->T); }
    if (layout->train) {
        llama_make_stretches(&m);
        CUDA_CHECK(cudaMemset(m.state, 0, sizeof *m.state));
    }
    if (layout->cache_len > 0) {
        upload_rope(&m, m.decode_rope, layout->cache_len);
        CUDA_CHECK(cudaMallocHost(&m.host_logits, c->vocab_size * sizeof(floatX)));
        m.float_logits = (float*)xmalloc(c->vocab_size * sizeof(float));
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    return m;
}

static void llama_free(Llama* m) {
    CUDA_CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < NUM_MEM; i++) { CUDA_CHECK(cudaFree(m->mapped[i])); }
    CUDA_CHECK(cudaStreamDestroy(m->stream));
    CUDA_CHECK(cudaStreamDestroy(m->copy_stream));
    if (m->host_logits) { CUDA_CHECK(cudaFreeHost(m->host_logits)); }
    free(m->float_logits);
    free(m->blocks);
    param_table_free(&m->table);
}

// ---------------------------------------------------------------------------------------------------------------------
// weights and optimizer state, in and out: pieces of a parameter, through a staging buffer

/* Sets elements of the weights and of their master. */
static bool store_weights(void* model, const Param* p, size_t first, size_t n, const float* src, Error* e) {
    Llama* m = (Llama*)model;
    (void)e;
    const size_t at = p->offset + first, size = m->layout.master == MASTER_FP32 ? 4 : 2;
    CUDA_CHECK(cudaMemcpyAsync(m->staging, src, n * sizeof(float), cudaMemcpyHostToDevice, m->stream));
    if (m->layout.train && m->layout.master != MASTER_NONE) {
        master_set_cuda(m->params + at, (char*)m->master + at * size, m->layout.master, m->staging, n, m->stream);
    } else {
        master_set_cuda(m->params + at, NULL, MASTER_NONE, m->staging, n, m->stream);
    }
    CUDA_CHECK(cudaStreamSynchronize(m->stream));
    return true;
}

/* The exact weights: the master's. */
static bool fetch_master(void* model, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    Llama* m = (Llama*)model;
    (void)e;
    const size_t at = p->offset + first, size = m->layout.master == MASTER_FP32 ? 4 : 2;
    master_get_cuda(m->staging, m->params + at, (char*)m->master + at * size, m->layout.master, n, m->stream);
    CUDA_CHECK(cudaMemcpyAsync(dst, m->staging, n * sizeof(float), cudaMemcpyDeviceToHost, m->stream));
    CUDA_CHECK(cudaStreamSynchronize(m->stream));
    return true;
}

/* The weights that the model computes with. */
static bool fetch_params(void* model, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    Llama* m = (Llama*)model;
    (void)e;
    master_get_cuda(m->staging, m->params + p->offset + first, NULL, MASTER_NONE, n, m->stream);
    CUDA_CHECK(cudaMemcpyAsync(dst, m->staging, n * sizeof(float), cudaMemcpyDeviceToHost, m->stream));
    CUDA_CHECK(cudaStreamSynchronize(m->stream));
    return true;
}

/* m or v: fp32, or bfloat16, whose values floats hold exactly. */
static void move_moment(const Llama* m, void* arena, const Param* p, size_t first, size_t n, float* host, bool store) {
    const size_t at = p->offset + first;
    if (!m->layout.bf16_moments) {
        float* device = (float*)arena + at;
        if (store) {
            copy_in(m, device, host, n * sizeof(float));
        } else {
            CUDA_CHECK(cudaMemcpy(host, device, n * sizeof(float), cudaMemcpyDeviceToHost));
        }
        return;
    }
    uint16_t* bits = (uint16_t*)xmalloc(n * sizeof(uint16_t));
    uint16_t* device = (uint16_t*)arena + at;
    if (store) {
        for (size_t i = 0; i < n; i++) { bits[i] = bf16_from_f32(host[i]); }
        copy_in(m, device, bits, n * sizeof(uint16_t));
    } else {
        CUDA_CHECK(cudaMemcpy(bits, device, n * sizeof(uint16_t), cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < n; i++) { host[i] = f32_from_bf16(bits[i]); }
    }
    free(bits);
}

static bool store_m(void* model, const Param* p, size_t first, size_t n, const float* src, Error* e) {
    (void)e;
    move_moment((Llama*)model, ((Llama*)model)->m, p, first, n, (float*)src, true);
    return true;
}
static bool fetch_m(void* model, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    (void)e;
    move_moment((Llama*)model, ((Llama*)model)->m, p, first, n, dst, false);
    return true;
}
static bool store_v(void* model, const Param* p, size_t first, size_t n, const float* src, Error* e) {
    (void)e;
    move_moment((Llama*)model, ((Llama*)model)->v, p, first, n, (float*)src, true);
    return true;
}
static bool fetch_v(void* model, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    (void)e;
    move_moment((Llama*)model, ((Llama*)model)->v, p, first, n, dst, false);
    return true;
}

/* Fresh weights: drawn on the host, by the generator that all three trainers share. */
static void llama_init(Llama* m, uint64_t seed) {
    Error e = NO_ERROR;
    for (int i = 0; i < m->table.count; i++) {
        const Param* p = &m->table.items[i];
        const size_t n = param_size(p);
        float* w = (float*)xmalloc(n * sizeof(float));
        param_init(w, p, (uint32_t)i, &m->config, seed);
        for (size_t first = 0; first < n; first += MODEL_PIECE) {
            store_weights(m, p, first, size_min(MODEL_PIECE, n - first), w + first, &e);
        }
        free(w);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// the profile of a step: events around every operation, see print_profile()

enum { PROFILE_MAX = 16384 };

typedef struct {
    const char* name;
    double flops, bytes;  // that the operation has to do and to move at least
    cudaEvent_t begin, end;
} ProfiledOp;

struct Profiler {
    ProfiledOp ops[PROFILE_MAX];
    int count;
};

/* A block's pass, as a range in Nsight's timeline. */
struct LayerRange {
    char name[24];
    ProfileRange range;
    explicit LayerRange(int l) : range((snprintf(name, sizeof name, "layer %d", l), name)) {}
};

/* One operation, from construction to the end of its scope: a range in Nsight's timeline and, where a profiler is on, a row
 * of its table. */
struct Op {
    ProfileRange range;
    ProfiledOp* op = NULL;
    cudaStream_t stream;
    Op(const Llama* m, const char* name, double flops, double bytes) : range(name), stream(m->stream) {
        Profiler* p = m->profiler;
        if (!p || p->count == PROFILE_MAX) { return; }
        op = &p->ops[p->count++];
        op->name = name;
        op->flops = flops;
        op->bytes = bytes;
        CUDA_CHECK(cudaEventCreate(&op->begin));
        CUDA_CHECK(cudaEventCreate(&op->end));
        CUDA_CHECK(cudaEventRecord(op->begin, stream));
    }
    ~Op() {
        if (op) { CUDA_CHECK(cudaEventRecord(op->end, stream)); }
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// forward

static double linear_flops(size_t N, size_t C, size_t OC) { return 2.0 * (double)N * (double)C * (double)OC; }

/* Bytes of `elements` floatX, as a double for the profile. */
static double bytes_x(double elements) { return elements * sizeof(floatX); }

/* out (N, OC) = x (N, C) w^T [+ residual]; pitches of x and of out. */
static void linear(const Llama* m, const char* name, floatX* out, const floatX* x, const floatX* w, const floatX* residual,
                   size_t N, int C, int OC, size_t x_pitch, size_t out_pitch) {
    Op op(m, name, linear_flops(N, C, OC), bytes_x((double)N * C + (double)OC * C + (double)N * OC * (residual ? 2 : 1)));
    matmul_forward_cuda(m->matmul, out, operand(x, x_pitch), operand(w, C), residual, N, C, OC, out_pitch, m->stream);
}

/* The attention half of a block: everything up to mid. */
static void block_attention_forward(const Llama* m, int l) {
    const ModelConfig* c = &m->config;
    const Pitches* p = &m->pitch;
    const Block w = block_at(m, l);
    const BlockActivations* s = &m->blocks[l];
    const int B = m->layout.B, T = m->layout.T, C = c->hidden_size, NH = c->num_heads, NKV = c->num_kv_heads, HD = c->head_dim;
    const size_t N = (size_t)B * T;
    {
        Op op(m, "rmsnorm", 0, bytes_x(2.0 * N * C));
        rmsnorm_forward_cuda(s->norm1, s->rstd1, s->h, w.input_norm, N, C, c->rms_eps, p->C, m->stream);
    }
    linear(m, "qkv", s->qkv, s->norm1, w.qkv, NULL, N, C, qkv_width(c), p->C, p->QKV);
    {
        Op op(m, "rope", 0, bytes_x(2.0 * N * (q_width(c) + kv_width(c))));
        rope_forward_cuda(s->qkv, m->rope, B, T, 0, NH, NKV, HD, p->QKV, m->stream);
    }
    {
        Op op(m, "attention", 2.0 * N * T * q_width(c), bytes_x((double)N * (qkv_width(c) + q_width(c))));
        attention_forward_cuda(s->att, s->lse, s->qkv, attention_shape(c, B, T), p->QKV, p->Q, m->stream);
    }
    linear(m, "o", s->mid, s->att, w.o, s->h, N, q_width(c), C, p->Q, p->C);
}

static void block_gate_up_forward(const Llama* m, int l) {
    const ModelConfig* c = &m->config;
    const BlockActivations* s = &m->blocks[l];
    linear(m, "gate up", s->gate_up, s->norm2, block_at(m, l).gate_up, NULL, (size_t)m->layout.B * m->layout.T, c->hidden_size,
           2 * c->intermediate_size, m->pitch.C, m->pitch.F2);
}

static void block_norm2_forward(const Llama* m, int l) {
    const ModelConfig* c = &m->config;
    const BlockActivations* s = &m->blocks[l];
    const size_t N = (size_t)m->layout.B * m->layout.T;
    Op op(m, "rmsnorm", 0, bytes_x(2.0 * N * c->hidden_size));
    rmsnorm_forward_cuda(s->norm2, s->rstd2, s->mid, block_at(m, l).post_norm, N, c->hidden_size, c->rms_eps, m->pitch.C,
                         m->stream);
}

/* The tokens in m->x: from their embeddings to norm_final, keeping what the recompute level keeps. */
static void llama_forward(const Llama* m) {
    const ModelConfig* c = &m->config;
    const Pitches* p = &m->pitch;
    const size_t N = (size_t)m->layout.B * m->layout.T;
    const int C = c->hidden_size, F = c->intermediate_size, L = c->num_layers;
    ProfileRange phase("forward");
    {
        Op op(m, "embedding", 0, bytes_x(2.0 * N * C));
        embedding_forward_cuda(m->blocks[0].h, m->params + param_offset(&m->table, P_EMBEDDING, -1), m->x, N, C, p->C,
                               m->stream);
    }
    for (int l = 0; l < L; l++) {
        LayerRange layer(l);
        const BlockActivations* s = &m->blocks[l];
        floatX* h_next = l + 1 < L ? m->blocks[l + 1].h : m->h_final;
        block_attention_forward(m, l);
        block_norm2_forward(m, l);
        block_gate_up_forward(m, l);
        {
            Op op(m, "swiglu", 0, bytes_x(3.0 * N * F));
            swiglu_forward_cuda(s->act, s->gate_up, N, F, p->F2, p->F, m->stream);
        }
        linear(m, "down", h_next, s->act, block_at(m, l).down, s->mid, N, F, C, p->F, p->C);
    }
    Op op(m, "rmsnorm", 0, bytes_x(2.0 * N * C));
    rmsnorm_forward_cuda(m->norm_final, m->rstd_final, m->h_final, m->params + param_offset(&m->table, P_FINAL_NORM, -1), N, C,
                         c->rms_eps, p->C, m->stream);
}

/* dw (OC, C) = or += dout^T x, in the gradients' type. */
static void linear_backward_weight(const Llama* m, const char* name, void* dw, const floatX* dout, const floatX* x, size_t N,
                                   int C, int OC, size_t dout_pitch, size_t x_pitch, bool accumulate) {
    const double grad = (double)OC * C * grad_bytes(&m->layout) * (accumulate ? 2 : 1);
    Op op(m, name, linear_flops(N, C, OC), bytes_x((double)N * C + (double)N * OC) + grad);
    const Operand d = operand(dout, dout_pitch), in = operand(x, x_pitch);
    if (m->layout.fp32_grads) {
        matmul_backward_weight_cuda(m->matmul, (float*)dw, d, in, N, C, OC, accumulate, m->stream);
    } else {
        matmul_backward_weight_cuda(m->matmul, (floatX*)dw, d, in, N, C, OC, accumulate, m->stream);
    }
}

/* dx (N, C) = dout (N, OC) w. */
static void linear_backward_input(const Llama* m, const char* name, floatX* dx, const floatX* dout, const floatX* w, size_t N,
                                  int C, int OC, size_t dout_pitch, size_t dx_pitch) {
    Op op(m, name, linear_flops(N, C, OC), bytes_x((double)N * C + (double)OC * C + (double)N * OC));
    matmul_backward_input_cuda(m->matmul, dx, operand(dout, dout_pitch), operand(w, C), N, C, OC, false, dx_pitch, m->stream);
}

/* Head and loss after llama_forward(), as in train_llama3.c: fills losses (N), and with dloss != 0 goes on to the gradient of
 * norm_final (in dnorm) and of the head. `first`: the head's gradient is overwritten. */
static void llama_loss(const Llama* m, float dloss, bool first) {
    const ModelConfig* c = &m->config;
    const Pitches* p = &m->pitch;
    const int C = c->hidden_size, V = c->vocab_size;
    const size_t N = (size_t)m->layout.B * m->layout.T;
    const floatX* head = m->params + param_offset(&m->table, P_LM_HEAD, -1);
    ProfileRange phase("head and loss");
    for (size_t at = 0; at < N; at += CLASSIFIER_ROWS) {
        const size_t rows = size_min(CLASSIFIER_ROWS, N - at);
        const floatX* x = m->norm_final + at * p->C;
        linear(m, "head", m->logits, x, head, NULL, rows, C, V, p->C, p->V);
        if (dloss == 0.0f) {
            crossentropy_forward_cuda(m->losses + at, m->logits, m->y + at, rows, V, p->V, m->stream);
            continue;
        }
        {
            Op op(m, "cross-entropy", 0, bytes_x(2.0 * rows * V));
            crossentropy_fused_cuda(m->losses + at, m->logits, m->y + at, dloss, &m->state->loss_scale, rows, V, p->V,
                                    m->stream);
        }
        linear_backward_input(m, "head dx", m->dnorm + at * p->C, m->logits, head, rows, C, V, p->V, p->C);
        linear_backward_weight(m, "head dw", grad_at(m, P_LM_HEAD, -1), m->logits, x, rows, C, V, p->V, p->C, !first || at > 0);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// backward

/* Computes again what the recompute level did not keep of block l, with the same kernels and so the same bits. The
 * swiglu's output comes out of its backward pass. */
static void block_recompute(const Llama* m, int l) {
    const ModelConfig* c = &m->config;
    const BlockActivations* s = &m->blocks[l];
    const size_t N = (size_t)m->layout.B * m->layout.T;
    const Recompute level = m->layout.level;
    if (level == RECOMPUTE_NONE) { return; }
    if (level == RECOMPUTE_BLOCK) {
        block_attention_forward(m, l);
    } else {
        Op op(m, "rmsnorm again", 0, bytes_x(2.0 * N * c->hidden_size));
        rmsnorm_forward_cuda(s->norm1, s->rstd1, s->h, block_at(m, l).input_norm, N, c->hidden_size, c->rms_eps, m->pitch.C,
                             m->stream);
    }
    block_norm2_forward(m, l);
    if (level >= RECOMPUTE_FFN) { block_gate_up_forward(m, l); }
}

static void norm_backward(const Llama* m, ParamKind kind, int l, const floatX* x, const float* rstd) {
    const size_t N = (size_t)m->layout.B * m->layout.T;
    const int C = m->config.hidden_size;
    Op op(m, "rmsnorm backward", 0, bytes_x(4.0 * N * C));
    rmsnorm_backward_cuda(m->dh, norm_grad_at(m, kind, l), m->scratch, m->dnorm, x,
                          m->params + param_offset(&m->table, kind, l), rstd, N, C, m->pitch.C, m->stream);
}

/* After llama_forward() and llama_loss(dloss != 0). `first`: matrices' gradients are overwritten, not added to. */
static void llama_backward(const Llama* m, bool first) {
    const ModelConfig* c = &m->config;
    const Pitches* p = &m->pitch;
    const int B = m->layout.B, T = m->layout.T, C = c->hidden_size, F = c->intermediate_size;
    const int Q = q_width(c), QKV = qkv_width(c), NH = c->num_heads, NKV = c->num_kv_heads, HD = c->head_dim;
    const size_t N = (size_t)B * T;
    const bool add = !first;
    ProfileRange phase("backward");

    CUDA_CHECK(cudaMemsetAsync(m->dh, 0, N * p->C * sizeof(floatX), m->stream));
    if (first) { CUDA_CHECK(cudaMemsetAsync(m->norm_grads, 0, norm_grads_size(c) * sizeof(float), m->stream)); }
    if (first && !c->tied) {  // a tied embedding's gradient has been overwritten by the head's
        CUDA_CHECK(
            cudaMemsetAsync(grad_at(m, P_EMBEDDING, -1), 0, (size_t)c->vocab_size * C * grad_bytes(&m->layout), m->stream));
    }
    norm_backward(m, P_FINAL_NORM, -1, m->h_final, m->rstd_final);
    for (int l = c->num_layers - 1; l >= 0; l--) {
        LayerRange layer(l);
        const Block w = block_at(m, l);
        const BlockActivations* s = &m->blocks[l];
        block_recompute(m, l);
        // h_next = mid + act Wdown^T
        linear_backward_input(m, "down dx", m->dact, m->dh, w.down, N, F, C, p->C, p->F);
        {
            const bool act_is_lost = m->layout.level >= RECOMPUTE_NORM_SWIGLU;
            Op op(m, "swiglu backward", 0, bytes_x((act_is_lost ? 6.0 : 5.0) * N * F));
            swiglu_backward_cuda(s->gate_up, act_is_lost ? s->act : NULL, m->dact, s->gate_up, N, F, p->F2, p->F, m->stream);
        }
        linear_backward_weight(m, "down dw", grad_at(m, P_DOWN, l), m->dh, s->act, N, F, C, p->C, p->F, add);
        linear_backward_weight(m, "gate up dw", grad_at(m, P_GATE, l), s->gate_up, s->norm2, N, C, 2 * F, p->F2, p->C, add);
        linear_backward_input(m, "gate up dx", m->dnorm, s->gate_up, w.gate_up, N, C, 2 * F, p->F2, p->C);
        norm_backward(m, P_POST_NORM, l, s->mid, s->rstd2);
        // mid = h + att Wo^T
        linear_backward_weight(m, "o dw", grad_at(m, P_O, l), m->dh, s->att, N, Q, C, p->C, p->Q, add);
        linear_backward_input(m, "o dx", m->datt, m->dh, w.o, N, Q, C, p->C, p->Q);
        {
            Op op(m, "attention backward", 5.0 * N * T * Q, bytes_x(2.0 * N * (QKV + Q)));
            attention_backward_cuda(m->dqkv, m->scratch, m->datt, s->att, s->lse, s->qkv, attention_shape(c, B, T), p->QKV,
                                    p->Q, m->stream);
        }
        {
            Op op(m, "rope backward", 0, bytes_x(2.0 * N * (q_width(c) + kv_width(c))));
            rope_backward_cuda(m->dqkv, m->rope, B, T, 0, NH, NKV, HD, p->QKV, m->stream);
        }
        linear_backward_weight(m, "qkv dw", grad_at(m, P_Q, l), m->dqkv, s->norm1, N, C, QKV, p->QKV, p->C, add);
        linear_backward_input(m, "qkv dx", m->dnorm, m->dqkv, w.qkv, N, C, QKV, p->QKV, p->C);
        norm_backward(m, P_INPUT_NORM, l, s->h, s->rstd1);
    }
    Op op(m, "embedding backward", 0, bytes_x(3.0 * N * C));
    if (m->layout.fp32_grads) {
        embedding_backward_cuda((float*)grad_at(m, P_EMBEDDING, -1), m->scratch, m->dh, m->x, N, C, c->vocab_size, p->C,
                                m->stream);
    } else {
        embedding_backward_cuda((floatX*)grad_at(m, P_EMBEDDING, -1), m->scratch, m->dh, m->x, N, C, c->vocab_size, p->C,
                                m->stream);
    }
}

/* One micro-batch, which lies in m->x and m->y: gradients and the sum of losses grow. `dloss`: 1 / tokens of the step. */
static void llama_micro_step(const Llama* m, float dloss, bool first) {
    llama_forward(m);
    llama_loss(m, dloss, first);
    loss_sum_cuda(m->state, m->losses, (size_t)m->layout.B * m->layout.T, m->stream);
    llama_backward(m, first);
}

// ---------------------------------------------------------------------------------------------------------------------
// update

template <typename Grad>
static void update_with(const Llama* m, const StepHyper* hyper, uint64_t seed) {
    const size_t n = m->table.elements;
    const double state = (m->layout.bf16_moments ? 8.0 : 16.0) + (m->layout.master == MASTER_FP32    ? 8.0
                                                                  : m->layout.master == MASTER_SPLIT ? 4.0
                                                                                                     : 0.0);
    {
        Op op(m, "gradient norm", 0, (double)n * sizeof(Grad));
        norm_square_cuda(m->state, m->scratch, (const Grad*)m->grads, n, m->stream);
        norm_square_cuda(m->state, m->scratch, m->norm_grads, norm_grads_size(&m->config), m->stream);
    }
    step_decide_cuda(m->state, hyper, m->stream);
    Op op(m, "adamw", 0, (double)n * (state + sizeof(Grad) + sizeof(floatX) * (m->layout.master == MASTER_FP32 ? 1 : 2)));
    AdamWTensors<Grad> t;
    t.params = m->params;
    t.grads = (const Grad*)m->grads;
    t.master = m->master;
    t.m = m->m;
    t.v = m->v;
    t.state_first = 0;
    t.stretches = m->stretches;
    t.num_stretches = m->num_stretches;
    adamw_update_cuda(&t, 0, n, m->state, hyper, m->layout.master, m->layout.bf16_moments, seed, m->stream);
}

/* Norm, decision and AdamW, all queued: the host learns of the outcome from the StepState later. */
static void llama_update(const Llama* m, const StepHyper* hyper, uint64_t seed) {
    ProfileRange phase("update");
    if (m->layout.fp32_grads) {
        update_with<float>(m, hyper, seed);
    } else {
        update_with<floatX>(m, hyper, seed);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// generation: as in train_llama3.c, over the new rows of one sequence, with keys and values cached

/* One pass over `rows` <= DECODE_ROWS tokens, which lie in host memory, at positions pos .. pos + rows - 1. Returns the last
 * one's logits (V) on the host. */
static const float* llama_decode_rows(Llama* m, const int32_t* tokens, int rows, int pos) {
    const ModelConfig* c = &m->config;
    const Pitches* p = &m->pitch;
    const int C = c->hidden_size, F = c->intermediate_size, NH = c->num_heads, NKV = c->num_kv_heads, HD = c->head_dim;
    const int Q = q_width(c), QKV = qkv_width(c), V = c->vocab_size;
    const size_t KV2 = 2 * (size_t)kv_width(c);
    Arena a = {(char*)m->decode_rows, 0};
    floatX* h = take<floatX>(&a, DECODE_ROWS * p->C);
    floatX* norm = take<floatX>(&a, DECODE_ROWS * p->C);
    floatX* qkv = take<floatX>(&a, DECODE_ROWS * p->QKV);
    floatX* att = take<floatX>(&a, DECODE_ROWS * p->Q);
    floatX* gate_up = take<floatX>(&a, DECODE_ROWS * p->F2);
    floatX* act = take<floatX>(&a, DECODE_ROWS * p->F);
    floatX* logits = take<floatX>(&a, p->V);
    float* rstd = m->staging;                             // (DECODE_ROWS), borrowed
    int32_t* ids = (int32_t*)(m->staging + DECODE_ROWS);  // (DECODE_ROWS)

    CUDA_CHECK(cudaMemcpyAsync(ids, tokens, rows * sizeof(int32_t), cudaMemcpyHostToDevice, m->stream));
    embedding_forward_cuda(h, m->params + param_offset(&m->table, P_EMBEDDING, -1), ids, rows, C, p->C, m->stream);
    for (int l = 0; l < c->num_layers; l++) {
        const Block w = block_at(m, l);
        floatX* cache = m->kv_cache + (size_t)l * m->layout.cache_len * KV2;  // (cache_len, KV2)
        rmsnorm_forward_cuda(norm, rstd, h, w.input_norm, rows, C, c->rms_eps, p->C, m->stream);
        linear(m, "qkv", qkv, norm, w.qkv, NULL, rows, C, QKV, p->C, p->QKV);
        rope_forward_cuda(qkv, m->decode_rope, 1, rows, pos, NH, NKV, HD, p->QKV, m->stream);
        CUDA_CHECK(cudaMemcpy2DAsync(cache + (size_t)pos * KV2, KV2 * sizeof(floatX), qkv + Q, p->QKV * sizeof(floatX),
                                     KV2 * sizeof(floatX), rows, cudaMemcpyDeviceToDevice, m->stream));
        for (int i = 0; i < rows; i++) {
            attention_decode_cuda(att + i * p->Q, qkv + i * p->QKV, cache, pos + i + 1, attention_shape(c, 1, 1), m->stream);
        }
        linear(m, "o", h, att, w.o, h, rows, Q, C, p->Q, p->C);
        rmsnorm_forward_cuda(norm, rstd, h, w.post_norm, rows, C, c->rms_eps, p->C, m->stream);
        linear(m, "gate up", gate_up, norm, w.gate_up, NULL, rows, C, 2 * F, p->C, p->F2);
        swiglu_forward_cuda(act, gate_up, rows, F, p->F2, p->F, m->stream);
        linear(m, "down", h, act, w.down, h, rows, F, C, p->F, p->C);
    }
    rmsnorm_forward_cuda(norm, rstd, h + (rows - 1) * p->C, m->params + param_offset(&m->table, P_FINAL_NORM, -1), 1, C,
                         c->rms_eps, p->C, m->stream);
    linear(m, "head", logits, norm, m->params + param_offset(&m->table, P_LM_HEAD, -1), NULL, 1, C, V, p->C, p->V);
    CUDA_CHECK(cudaMemcpyAsync(m->host_logits, logits, V * sizeof(floatX), cudaMemcpyDeviceToHost, m->stream));
    CUDA_CHECK(cudaStreamSynchronize(m->stream));
    for (int i = 0; i < V; i++) { m->float_logits[i] = to_float(m->host_logits[i]); }
    return m->float_logits;
}

/* NextLogits of generate.h. */
static const float* next_logits(void* model, const int32_t* tokens, int count, int pos, Error* e) {
    (void)e;
    const float* logits = NULL;
    for (int done = 0; done < count; done += DECODE_ROWS) {
        const int rows = count - done < DECODE_ROWS ? count - done : DECODE_ROWS;
        logits = llama_decode_rows((Llama*)model, tokens + done, rows, pos + done);
    }
    return logits;
}

#ifndef TESTING

// ---------------------------------------------------------------------------------------------------------------------
// token batches: read into pinned memory, copied to the device on a stream of their own while the GPU computes, and put in
// place in stream order

typedef struct {
    Llama* m;
    DataLoader* data;
    int32_t* host[INFLIGHT];    // (2, N): x, then y
    int32_t* device[INFLIGHT];  // (2, N)
    cudaEvent_t copied[INFLIGHT], consumed[INFLIGHT];
    uint64_t batches;
} Feed;

/* Bytes of one batch. */
static size_t feed_bytes(const Llama* m) { return 2 * (size_t)m->layout.B * m->layout.T * sizeof(int32_t); }

static void feed_init(Feed* f, Llama* m, DataLoader* data) {
    memset(f, 0, sizeof *f);
    f->m = m;
    f->data = data;
    for (int i = 0; i < INFLIGHT; i++) {
        CUDA_CHECK(cudaMallocHost(&f->host[i], feed_bytes(m)));
        CUDA_CHECK(cudaMalloc(&f->device[i], feed_bytes(m)));
        CUDA_CHECK(cudaEventCreateWithFlags(&f->copied[i], cudaEventDisableTiming));
        CUDA_CHECK(cudaEventCreateWithFlags(&f->consumed[i], cudaEventDisableTiming));
    }
}

static void feed_free(Feed* f) {
    for (int i = 0; i < INFLIGHT; i++) {
        CUDA_CHECK(cudaFreeHost(f->host[i]));
        CUDA_CHECK(cudaFree(f->device[i]));
        CUDA_CHECK(cudaEventDestroy(f->copied[i]));
        CUDA_CHECK(cudaEventDestroy(f->consumed[i]));
    }
}

/* The next B rows into m->x and m->y, in stream order. */
static void feed_next(Feed* f) {
    Llama* m = f->m;
    Error e = NO_ERROR;
    const size_t T = (size_t)m->layout.T, N = m->layout.B * T;
    const int slot = (int)(f->batches++ % INFLIGHT);
    CUDA_CHECK(cudaEventSynchronize(f->copied[slot]));  // of INFLIGHT batches ago: the pinned memory is free again
    for (int b = 0; b < m->layout.B; b += f->data->B) {
        must(dataloader_next(f->data, f->host[slot] + b * T, f->host[slot] + N + b * T, &e), &e);
    }
    CUDA_CHECK(cudaStreamWaitEvent(m->copy_stream, f->consumed[slot]));
    CUDA_CHECK(cudaMemcpyAsync(f->device[slot], f->host[slot], feed_bytes(m), cudaMemcpyHostToDevice, m->copy_stream));
    CUDA_CHECK(cudaEventRecord(f->copied[slot], m->copy_stream));
    CUDA_CHECK(cudaStreamWaitEvent(m->stream, f->copied[slot]));
    CUDA_CHECK(cudaMemcpyAsync(m->x, f->device[slot], N * sizeof(int32_t), cudaMemcpyDeviceToDevice, m->stream));
    CUDA_CHECK(cudaMemcpyAsync(m->y, f->device[slot] + N, N * sizeof(int32_t), cudaMemcpyDeviceToDevice, m->stream));
    CUDA_CHECK(cudaEventRecord(f->consumed[slot], m->stream));
}

// ---------------------------------------------------------------------------------------------------------------------
// steps in flight: the host queues a step and reads the result of the one before

typedef struct {
    Llama* m;
    Session* s;
    StepHyper hyper;
    float dloss;               // 1 / tokens of a step
    cudaGraphExec_t micro[2];  // [first of its step]; NULL: not captured
    Feed feed;
    StepState* result[INFLIGHT];  // pinned
    cudaEvent_t begin[INFLIGHT], end[INFLIGHT];
    int64_t queued, reported;  // steps done since step 0 of the schedule
} Stepper;

/* Queues a whole step with learning rate `lr`. */
static void stepper_queue(Stepper* t, double lr) {
    Llama* m = t->m;
    const int slot = (int)(t->queued % INFLIGHT);
    CUDA_CHECK(cudaEventRecord(t->begin[slot], m->stream));
    step_begin_cuda(m->state, t->queued, lr, m->stream);
    for (int k = 0; k < t->s->plan.accumulate; k++) {
        feed_next(&t->feed);
        if (t->micro[k == 0]) {
            CUDA_CHECK(cudaGraphLaunch(t->micro[k == 0], m->stream));
        } else {
            llama_micro_step(m, t->dloss, k == 0);
        }
    }
    llama_update(m, &t->hyper, (uint64_t)t->s->options.seed);
    CUDA_CHECK(cudaMemcpyAsync(t->result[slot], m->state, sizeof(StepState), cudaMemcpyDeviceToHost, m->stream));
    CUDA_CHECK(cudaEventRecord(t->end[slot], m->stream));
    t->queued++;
}

/* Waits for the oldest queued step and returns its result; *ms is its time on the GPU. The run's state moves on. */
static const StepState* stepper_wait(Stepper* t, float* ms) {
    const int slot = (int)(t->reported % INFLIGHT);
    CUDA_CHECK(cudaEventSynchronize(t->end[slot]));
    CUDA_CHECK(cudaEventElapsedTime(ms, t->begin[slot], t->end[slot]));
    const StepState* r = t->result[slot];
    TrainerState* run = &t->s->state;
    t->reported++;
    run->step = (uint64_t)t->reported;
    run->tokens += (uint64_t)t->s->plan.tokens_per_step;
    run->updates = (uint64_t)r->updates;
    run->loss = r->loss_window;
    run->grad_norm = r->norm_window;
    run->loss_scale = r->loss_scale;
    run->scale_good = (uint64_t)r->scale_good;
    return r;
}

/* Puts the run's state on the device: that of a checkpoint, or a new one. */
static void stepper_restore(Stepper* t) {
    StepState on_device;
    const TrainerState* run = &t->s->state;
    memset(&on_device, 0, sizeof on_device);
    on_device.updates = (int64_t)run->updates;
    on_device.loss_window = run->loss;
    on_device.norm_window = run->grad_norm;
    on_device.loss_scale = (float)run->loss_scale;
    on_device.scale_good = (int32_t)run->scale_good;
    copy_in(t->m, t->m->state, &on_device, sizeof on_device);
    t->queued = t->reported = (int64_t)run->step;
}

/* Runs a micro-step of each kind, which makes the matmul plans and loads all code; tunes them where asked; captures graphs.
 * The tokens are zeros, and what it leaves in gradients and sums the first step overwrites. */
static void stepper_warm_up(Stepper* t, bool graph) {
    Llama* m = t->m;
    const Options* o = &t->s->options;
    const size_t N = (size_t)m->layout.B * m->layout.T;
    const bool accumulates = t->s->plan.accumulate > 1;
    CUDA_CHECK(cudaMemsetAsync(m->x, 0, N * sizeof(int32_t), m->stream));
    CUDA_CHECK(cudaMemsetAsync(m->y, 0, N * sizeof(int32_t), m->stream));
    llama_micro_step(m, t->dloss, true);
    if (accumulates) { llama_micro_step(m, t->dloss, false); }
    CUDA_CHECK(cudaStreamSynchronize(m->stream));
    if (o->tune) {
        // activations are free now: the largest piece of memory there is to measure in
        size_t bytes[NUM_MEM];
        llama_measure(&m->config, &m->layout, m->matmul, bytes);
        const int tuned = matmul_tune(m->matmul, m->mapped[MEM_ACTIVATIONS], bytes[MEM_ACTIVATIONS], m->stream);
        printf("tuned   %d of %d matrix products\n", tuned, m->matmul->num_plans);
        upload_rope(m, m->rope, m->layout.T);  // it lay there
        CUDA_CHECK(cudaMemsetAsync(m->x, 0, N * sizeof(int32_t), m->stream));
        CUDA_CHECK(cudaMemsetAsync(m->y, 0, N * sizeof(int32_t), m->stream));
    }
    if (!graph) { return; }
    for (int first = accumulates ? 0 : 1; first <= 1; first++) {
        cudaGraph_t captured;
        CUDA_CHECK(cudaStreamBeginCapture(m->stream, cudaStreamCaptureModeThreadLocal));
        llama_micro_step(m, t->dloss, first);
        CUDA_CHECK(cudaStreamEndCapture(m->stream, &captured));
        CUDA_CHECK(cudaGraphInstantiate(&t->micro[first], captured, 0));
        CUDA_CHECK(cudaGraphDestroy(captured));
    }
}

static void stepper_init(Stepper* t, Llama* m, Session* s) {
    const Options* o = &s->options;
    memset(t, 0, sizeof *t);
    t->m = m;
    t->s = s;
    t->dloss = (float)(1.0 / (double)s->plan.tokens_per_step);
    t->hyper.beta1 = o->beta1;
    t->hyper.beta2 = o->beta2;
    t->hyper.eps = o->eps;
    t->hyper.weight_decay = o->weight_decay;
    t->hyper.grad_clip = o->grad_clip;
    t->hyper.skip_loss_z = o->skip_loss_z;
    t->hyper.skip_norm_z = o->skip_norm_z;
    t->hyper.loss_weight = 1.0 / (double)s->plan.tokens_per_step;
#ifdef PRECISION_FP16
    t->hyper.scale_interval = 1000;
    if (!s->resumed) { s->state.loss_scale = 65536; }
#endif
    feed_init(&t->feed, m, &s->train);
    for (int i = 0; i < INFLIGHT; i++) {
        CUDA_CHECK(cudaMallocHost(&t->result[i], sizeof(StepState)));
        CUDA_CHECK(cudaEventCreate(&t->begin[i]));
        CUDA_CHECK(cudaEventCreate(&t->end[i]));
    }
    stepper_restore(t);
}

static void stepper_free(Stepper* t) {
    feed_free(&t->feed);
    for (int i = 0; i < INFLIGHT; i++) {
        CUDA_CHECK(cudaFreeHost(t->result[i]));
        CUDA_CHECK(cudaEventDestroy(t->begin[i]));
        CUDA_CHECK(cudaEventDestroy(t->end[i]));
        if (t->micro[i]) { CUDA_CHECK(cudaGraphExecDestroy(t->micro[i])); }
    }
}

/* Settles --minutes: times a few steps with learning rate 0 on the first batches, then wipes their traces. */
static void stepper_measure(Stepper* t, double started) {
    Llama* m = t->m;
    Session* s = t->s;
    const TrainerState before = s->state;  // a new run's, which owns nothing
    const uint64_t row = s->train.row;
    float best = INFINITY;
    Error e = NO_ERROR;
    for (int i = 0; i < MINUTES_MEASURE; i++) {
        float ms;
        stepper_queue(t, 0.0);
        stepper_wait(t, &ms);
        best = fminf(best, ms);
    }
    const size_t moment = m->table.elements * (m->layout.bf16_moments ? 2 : 4);
    CUDA_CHECK(cudaMemsetAsync(m->m, 0, moment, m->stream));
    CUDA_CHECK(cudaMemsetAsync(m->v, 0, moment, m->stream));
    s->state = before;
    stepper_restore(t);
    dataloader_seek(&s->train, row);
    s->options.steps = (int)steps_for_minutes(s->options.minutes, now_seconds() - started, best * 1e-3);
    must(plan_make(&s->plan, &s->options, s->ranks, s->train.rows_per_epoch, &e), &e);
    printf("timed   %.1f ms a step: %lld steps fit into %g minutes\n", best, (long long)s->plan.steps, s->options.minutes);
}

// ---------------------------------------------------------------------------------------------------------------------
// what a step's kernels take

static int compare_ms(const void* a, const void* b) { return *(const float*)a > *(const float*)b ? 1 : -1; }

/* TB/s of a copy on this card, read and written bytes counted, over memory whose contents may be lost. */
static double measure_copy(Llama* m, char* memory, size_t bytes) {
    enum { REPEATS = 5 };
    cudaEvent_t begin, end;
    float ms[REPEATS];
    bytes = size_min(bytes / 2, (size_t)2 << 30);
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    for (int i = 0; i < REPEATS; i++) {
        CUDA_CHECK(cudaEventRecord(begin, m->stream));
        CUDA_CHECK(cudaMemcpyAsync(memory + bytes, memory, bytes, cudaMemcpyDeviceToDevice, m->stream));
        CUDA_CHECK(cudaEventRecord(end, m->stream));
        CUDA_CHECK(cudaEventSynchronize(end));
        CUDA_CHECK(cudaEventElapsedTime(&ms[i], begin, end));
    }
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    qsort(ms, REPEATS, sizeof *ms, compare_ms);
    return 2.0 * (double)bytes / (ms[REPEATS / 2] * 1e-3) * 1e-12;
}

/* The operations of one step, which ran under m->profiler, summed by name in the order of their time. An operation's ceiling
 * is the card's peak in FLOP/s where it has arithmetic to speak of, else the copy's bandwidth. step_ms: the whole step's. */
static void print_profile(Llama* m, double peak_flops, double step_ms) {
    typedef struct {
        const char* name;
        int calls;
        double ms, flops, bytes;
    } Row;
    Profiler* p = m->profiler;
    Row rows[128];
    int count = 0;
    double total = 0;
    size_t memory[NUM_MEM];
    CUDA_CHECK(cudaStreamSynchronize(m->stream));
    for (int i = 0; i < p->count; i++) {
        float ms = 0;
        CUDA_CHECK(cudaEventElapsedTime(&ms, p->ops[i].begin, p->ops[i].end));
        int k = 0;
        while (k < count && strcmp(rows[k].name, p->ops[i].name) != 0) { k++; }
        if (k == 128) { continue; }
        if (k == count) { memset(&rows[count++], 0, sizeof *rows); }
        rows[k].name = p->ops[i].name;
        rows[k].calls++;
        rows[k].ms += ms;
        rows[k].flops += p->ops[i].flops;
        rows[k].bytes += p->ops[i].bytes;
        total += ms;
    }
    llama_measure(&m->config, &m->layout, m->matmul, memory);
    const double copy = measure_copy(m, (char*)m->mapped[MEM_ACTIVATIONS], memory[MEM_ACTIVATIONS]);
    printf(
        "profile of one step: %.2f ms, of which %.2f ms in these; ceilings: %.0f TFLOP/s (data sheet), copy %.2f TB/s "
        "(measured)\n",
        step_ms, total, peak_flops * 1e-12, copy);
    if (p->count == PROFILE_MAX) { printf("only its first %d operations are counted\n", PROFILE_MAX); }
    printf("%-20s %6s %9s %7s %9s %9s %8s\n", "operation", "calls", "ms", "share", "TFLOP/s", "GB/s", "ceiling");
    for (int shown = 0; shown < count; shown++) {
        int k = 0;
        for (int i = 1; i < count; i++) { k = rows[i].ms > rows[k].ms ? i : k; }
        Row* r = &rows[k];
        const double tflops = r->flops / r->ms * 1e-9, gbs = r->bytes / r->ms * 1e-6;
        const double by_flops = peak_flops > 0 ? tflops * 1e12 / peak_flops : 0, by_bytes = gbs * 1e-3 / copy;
        printf("%-20s %6d %9.3f %6.1f%% %9.1f %9.0f %7.1f%%\n", r->name, r->calls, r->ms, 100 * r->ms / total, tflops, gbs,
               100 * (by_flops > by_bytes ? by_flops : by_bytes));
        r->ms = -1;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// jobs

#define PLAN_NAME "matmul_plan.json"

/* The device as a run finds it. */
typedef struct {
    char name[256];
    size_t total, context;  // bytes; `context`: taken before the model's, by CUDA and by whoever else uses the card
    double peak_flops;
    MatmulContext* matmul;
} Device;

enum { MAX_HIDDEN = 8192 };  // what the norm kernels' registers hold of a row

static Device device_open(const Options* o) {
    Device d;
    cudaDeviceProp properties;
    size_t free_bytes = 0;
    memset(&d, 0, sizeof d);
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);  // kernels loaded later would take memory that the table does not know of
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess || count == 0) {
        die("no GPU can be used: %s\n  hint: ./train_llama3 runs on the CPU, with the same flags",
            status != cudaSuccess ? cudaGetErrorString(status) : "the machine has none");
    }
    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
    snprintf(d.name, sizeof d.name, "%s", properties.name);
    const PeakKind kind =
        sizeof(floatX) == 2 ? (strcmp(PRECISION_NAME, "BF16") == 0 ? PEAK_BF16 : PEAK_FP16) : (o->tf32 ? PEAK_TF32 : PEAK_FP32);
    d.peak_flops = gpu_peak_flops(d.name, kind);
    d.matmul = matmul_create(NULL, o->tf32);
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &d.total));
    d.context = d.total - free_bytes;
    return d;
}

/* The bytes that may be used in all: --max-memory, or the card's. */
static uint64_t device_memory(const Device* d, const Options* o) { return o->max_memory ? o->max_memory : d->total; }

static Layout layout_of(const Session* s, const Options* o) {
    Layout l;
    const bool trains = s->job == JOB_TRAIN || s->job == JOB_DRY_RUN;
    memset(&l, 0, sizeof l);
    l.B = trains || s->job == JOB_EVAL ? o->batch : 0;
    l.T = o->seq;
    l.train = trains;
    l.cache_len = session_context(s);
    l.level = (Recompute)o->recompute;
    l.fp32_grads = o->grad_dtype == GRAD_DTYPE_FP32 || sizeof(floatX) == 4;
    l.master = sizeof(floatX) == 4 ? MASTER_NONE : o->master == MASTER_OPTION_SPLIT && CAN_SPLIT ? MASTER_SPLIT : MASTER_FP32;
    l.bf16_moments = o->moments == MOMENTS_BF16;
    return l;
}

typedef struct {
    const Session* s;
    const Device* d;
} MemoryQuestion;

static void memory_table(const MemoryQuestion* q, const Options* o, MemoryTable* table) {
    size_t bytes[NUM_MEM];
    const Layout layout = layout_of(q->s, o);
    memset(table, 0, sizeof *table);
    llama_measure(&q->s->config, &layout, q->d->matmul, bytes);
    memory_add(table, "context", q->d->context);
    for (int i = 0; i < NUM_MEM; i++) { memory_add(table, memory_names[i], bytes[i]); }
}

static uint64_t memory_need(void* question, const Options* o) {
    MemoryTable table;
    memory_table((const MemoryQuestion*)question, o, &table);
    return memory_total(&table);
}

/* Shows the memory a job needs and refuses what does not fit. */
static void check_memory(Session* s, const Device* d, FILE* screen) {
    MemoryTable table;
    MemoryQuestion q = {s, d};
    Error e = NO_ERROR;
    const Options* o = &s->options;
    memory_table(&q, o, &table);
    if (screen) { print_memory(screen, &table, device_memory(d, o)); }
    must(memory_check(&table, device_memory(d, o), d->name, o, s->ranks, memory_need, &q, &e), &e);
}

static void load_weights(Llama* m, const Session* s) {
    Error e = NO_ERROR;
    must(model_load(s->model_dir, &m->config, &m->table, store_weights, m, &e), &e);
}

static int state_slots(Llama* m, bool with_master, StateSlot slots[3]) {
    const char* moment = m->layout.bf16_moments ? "BF16" : "F32";
    const StateSlot all[3] = {{"m", moment, fetch_m, store_m, m},
                              {"v", moment, fetch_v, store_v, m},
                              {"master", "F32", fetch_master, store_weights, m}};
    memcpy(slots, all, sizeof all);
    return with_master ? 3 : 2;
}

/* The choice of matmul algorithms travels with a checkpoint: a run that goes on from it computes the same bits. */
static bool save_plans(void* model, const char* folder, Error* e) {
    char path[PATH_CAP];
    return path_join(path, folder, PLAN_NAME, e) && matmul_save_plans(((Llama*)model)->matmul, path, e);
}

/* --plan; else that of the checkpoint, which another card or cuBLASLt cannot use. */
static void load_plans(const Session* s, Device* d) {
    const Options* o = &s->options;
    char path[PATH_CAP];
    Error e = NO_ERROR;
    if (o->plan) {
        must(matmul_load_plans(d->matmul, o->plan, &e), &e);
    } else if (s->resumed && folder_has(s->model_dir, PLAN_NAME)) {
        must(path_join(path, s->model_dir, PLAN_NAME, &e), &e);
        if (!matmul_load_plans(d->matmul, path, &e)) { warn("%s: cuBLASLt chooses anew, the bits may differ", e.msg); }
    }
}

/* Weights in 32 bits are the exact ones; in 16 bits they are those the model computes with, and the exact ones go into the
 * state. */
static void write_checkpoint(Llama* m, Session* s) {
    static const char* const own = sizeof(floatX) == 4 ? "F32" : strcmp(PRECISION_NAME, "BF16") == 0 ? "BF16" : "F16";
    const char* const dtypes[] = {own, "F32", "BF16", "F16"};  // as EXPORT_AUTO ... EXPORT_F16
    const char* dtype = dtypes[s->options.export_dtype];
    const bool exact = strcmp(dtype, "F32") == 0;
    StateSlot slots[3];
    const int num_slots = state_slots(m, !exact, slots);
    session_checkpoint(s, dtype, exact ? fetch_master : fetch_params, m, slots, num_slots, save_plans);
}

/* Mean loss over the first `max_rows` rows of the validation data (all, where it has fewer); see train_llama3.c. The host adds
 * up the losses of a batch while the GPU is at the next. */
static double validate(Llama* m, Session* s, uint64_t max_rows) {
    const uint64_t rows = max_rows < s->val.rows_per_epoch ? max_rows : s->val.rows_per_epoch;
    const size_t T = (size_t)m->layout.T, B = (size_t)m->layout.B;
    const uint64_t batches = ceil_div(rows, B);
    float* losses[INFLIGHT];  // pinned, (B, T)
    cudaEvent_t end[INFLIGHT];
    Feed feed;
    double sum = 0.0;
    feed_init(&feed, m, &s->val);
    for (int i = 0; i < INFLIGHT; i++) {
        CUDA_CHECK(cudaMallocHost(&losses[i], B * T * sizeof(float)));
        CUDA_CHECK(cudaEventCreateWithFlags(&end[i], cudaEventDisableTiming));
    }
    dataloader_seek(&s->val, 0);
    for (uint64_t queued = 0, added = 0; added < batches;) {
        if (queued < batches && queued - added < INFLIGHT) {
            const int slot = (int)(queued++ % INFLIGHT);
            feed_next(&feed);
            llama_forward(m);
            llama_loss(m, 0.0f, false);
            CUDA_CHECK(cudaMemcpyAsync(losses[slot], m->losses, B * T * sizeof(float), cudaMemcpyDeviceToHost, m->stream));
            CUDA_CHECK(cudaEventRecord(end[slot], m->stream));
            continue;
        }
        const int slot = (int)(added % INFLIGHT);
        CUDA_CHECK(cudaEventSynchronize(end[slot]));
        const size_t counted = size_min(rows - added++ * B, B) * T;  // the last batch may go past the end
        for (size_t i = 0; i < counted; i++) { sum += losses[slot][i]; }
    }
    for (int i = 0; i < INFLIGHT; i++) {
        CUDA_CHECK(cudaFreeHost(losses[i]));
        CUDA_CHECK(cudaEventDestroy(end[i]));
    }
    feed_free(&feed);
    return sum / ((double)rows * (double)T);
}

/* --debug: prints the first element of a tensor that is not finite; true where there is one. */
template <typename T>
static bool report_not_finite(const Llama* m, const char* what, int layer, const T* x, size_t rows, size_t width,
                              size_t pitch) {
    FiniteIndex first;
    first_not_finite_cuda((FiniteIndex*)m->scratch, x, rows, width, pitch, m->stream);
    CUDA_CHECK(cudaMemcpyAsync(&first, m->scratch, sizeof first, cudaMemcpyDeviceToHost, m->stream));
    CUDA_CHECK(cudaStreamSynchronize(m->stream));
    if (first == ALL_FINITE) { return false; }
    char where[32] = "";
    if (layer >= 0) { snprintf(where, sizeof where, " of layer %d", layer); }
    printf("debug   not finite: %s%s, row %llu, column %llu\n", what, where, first / width, first % width);
    return true;
}

/* --debug, after a step whose loss or norm is not finite: names the first such tensor in the order of computation, from the
 * weights through the forward pass of the last micro-batch, which is run again, to the gradients. */
static void name_not_finite(const Llama* m) {
    const ModelConfig* c = &m->config;
    const Pitches* p = &m->pitch;
    const size_t N = (size_t)m->layout.B * m->layout.T, C = c->hidden_size, F = c->intermediate_size;
    for (int i = 0; i < m->table.count; i++) {
        const Param* w = &m->table.items[i];
        if (report_not_finite(m, w->name, -1, m->params + w->offset, w->rows, w->cols, w->cols)) { return; }
    }
    llama_forward(m);
    for (int l = 0; l < c->num_layers; l++) {
        const BlockActivations* s = &m->blocks[l];
        if (report_not_finite(m, "the residual stream before attention", l, s->h, N, C, p->C)) { return; }
        if (m->layout.level >= RECOMPUTE_BLOCK) { continue; }  // what blocks share holds the last one's
        if (report_not_finite(m, "q, k, v", l, s->qkv, N, qkv_width(c), p->QKV) ||
            report_not_finite(m, "attention's output", l, s->att, N, q_width(c), p->Q) ||
            report_not_finite(m, "the residual stream after attention", l, s->mid, N, C, p->C)) {
            return;
        }
        if (m->layout.level < RECOMPUTE_FFN && report_not_finite(m, "gate, up", l, s->gate_up, N, 2 * F, p->F2)) { return; }
        if (m->layout.level < RECOMPUTE_NORM_SWIGLU && report_not_finite(m, "swiglu's output", l, s->act, N, F, p->F)) {
            return;
        }
    }
    if (report_not_finite(m, "the residual stream behind the last layer", -1, m->h_final, N, C, p->C)) { return; }
    llama_loss(m, 0.0f, false);
    if (report_not_finite(m, "the losses", -1, m->losses, 1, N, N)) { return; }
    for (int i = 0; i < m->table.count; i++) {
        const Param* w = &m->table.items[i];
        char what[96];
        snprintf(what, sizeof what, "the gradient of %s", w->name);
        const size_t n = param_size(w);
        const bool found =
            !param_specs[w->kind].matrix ? report_not_finite(m, what, -1, norm_grad_at(m, w->kind, w->layer), 1, n, n)
            : m->layout.fp32_grads ? report_not_finite(m, what, -1, (float*)m->grads + w->offset, w->rows, w->cols, w->cols)
                                   : report_not_finite(m, what, -1, (floatX*)m->grads + w->offset, w->rows, w->cols, w->cols);
        if (found) { return; }
    }
    printf("debug   every tensor of the last micro-batch is finite: an earlier one of the step was not\n");
}

/* Why a step did not update, or NULL. */
static const char* skip_note(const StepState* r, char* out, size_t cap) {
    switch ((UpdateVerdict)r->verdict) {
        case UPDATE_APPLIED: return NULL;
        case UPDATE_NOT_FINITE:
#ifdef PRECISION_FP16
            snprintf(out, cap, "skipped: not finite, loss scale now %g", (double)r->loss_scale);
#else
            snprintf(out, cap, "skipped: not finite");
#endif
            return out;
        case UPDATE_OUTLIER_LOSS: snprintf(out, cap, "skipped: loss z %.1f", (double)r->loss_z); return out;
        case UPDATE_OUTLIER_NORM: snprintf(out, cap, "skipped: gradient norm z %.1f", (double)r->norm_z); return out;
    }
    return NULL;
}

static uint64_t device_memory_used(void) {
    size_t free_bytes = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total));
    return total - free_bytes;
}

static void train(Session* s, Device* d, double started) {
    Options* o = &s->options;
    Error e = NO_ERROR;
    session_print(s, PRECISION_NAME);
    check_memory(s, d, stdout);
    const bool timed = o->minutes > 0 && !s->resumed;
    if (!timed) { print_plan(stdout, &s->plan, o, s->ranks, s->train.num_tokens); }
    if (s->job == JOB_DRY_RUN) { return; }
    fflush(stdout);

    const Layout layout = layout_of(s, o);
    Llama model = llama_create(&s->config, &layout, d->matmul, 0), *m = &model;
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
    if (!o->tune) { load_plans(s, d); }
    Stepper stepper, *t = &stepper;
    stepper_init(t, m, s);
    stepper_warm_up(t, o->graph && o->profile == 0);
    if (o->tune) {
        char path[PATH_CAP];
        must(make_directories(o->out, &e) && path_join(path, o->out, PLAN_NAME, &e), &e);
        must(matmul_save_plans(d->matmul, o->plan ? o->plan : path, &e), &e);
    }
    if (timed) {
        stepper_measure(t, started);
        print_plan(stdout, &s->plan, o, s->ranks, s->train.num_tokens);
    }
    if (o->profile > 0) {
        Profiler* profiler = (Profiler*)xcalloc(1, sizeof *profiler);
        float ms = 0;
        for (int i = 0; i <= o->profile; i++) {
            m->profiler = i == o->profile ? profiler : NULL;
            stepper_queue(t, session_lr(s, t->queued));
            stepper_wait(t, &ms);
        }
        print_profile(m, d->peak_flops, ms);
        return;
    }
    session_begin(s, PRECISION_NAME);
    run_catch_signals();

    Sampler sampler;
    Generator g;
    StepLines lines;
    sampler_init(&sampler, m->config.vocab_size, o->temperature, o->top_k, o->top_p, (uint64_t)o->seed);
    generator_init(&g, next_logits, m, &m->config, s->has_tokenizer ? &s->tokenizer : NULL, &sampler, layout.cache_len, stdout);
    step_lines_init(&lines, &s->plan, (int64_t)s->state.step, flops_per_token(&m->config, &m->table, layout.T), d->peak_flops);

    int64_t saved = s->resumed ? (int64_t)s->state.step : -1;
    const char* reason = s->plan.stop < s->plan.steps ? "stop-after" : "done";
    bool ended = t->queued >= s->plan.stop;
    while (!ended) {
        const bool stopping = run_stop_requested();
        if (!stopping) { stepper_queue(t, session_lr(s, t->queued)); }
        const int64_t step = t->queued;
        const bool val_due = s->has_val && !stopping && session_due(s, o->val_every, step);
        const bool sample_due = layout.cache_len > 0 && !stopping && session_due(s, o->sample_every, step);
        const bool checkpoint_due = stopping || session_due(s, o->checkpoint_every, step);
        // while nothing is due, one step stays in flight
        const int64_t leave = val_due || sample_due || checkpoint_due || o->debug ? 0 : 1;
        while (t->reported < t->queued - leave) {
            float ms;
            char note[96];
            const StepState* r = stepper_wait(t, &ms);
            const char* skipped = skip_note(r, note, sizeof note);
            const double tok_s = step_line(stdout, &lines, t->reported, s->plan.stop, r->loss, r->norm, r->lr, ms,
                                           device_memory_used(), skipped);
            must(log_step(&s->log, t->reported, r->loss, r->norm, r->lr, ms, tok_s, skipped, &e), &e);
            if (o->debug && r->verdict == UPDATE_NOT_FINITE) { name_not_finite(m); }
        }
        if (val_due) {
            const double val_loss = validate(m, s, (uint64_t)o->val_batches * (uint64_t)layout.B);
            print_validation(stdout, &lines, step, val_loss);
            must(log_val(&s->log, step, val_loss, &e), &e);
        }
        if (sample_due) {
            printf("sample  ");
            g.stream = (uint32_t)step;
            must(generate(&g, o->prompt, o->sample_tokens, &e), &e);
            must(log_sample(&s->log, step, g.text, g.text_len, &e), &e);
        }
        if (checkpoint_due && step != saved) {
            write_checkpoint(m, s);
            saved = step;
        }
        if (stopping) { reason = "signal"; }
        ended = stopping || step >= s->plan.stop;
    }
    if (saved < 0) { write_checkpoint(m, s); }  // --steps 0: a new model, exported
    must(log_end(&s->log, (int64_t)s->state.step, reason, now_seconds() - started, &e), &e);
    print_summary(stdout, &lines, s->argv[0], s->model_dir, device_memory_used());
    generator_free(&g);
    sampler_free(&sampler);
    stepper_free(t);
    llama_free(m);
}

/* --eval: the loss on --val, all of it unless --val-batches is given. */
static void eval(Session* s, Device* d) {
    const Options* o = &s->options;
    check_memory(s, d, stderr);
    const Layout layout = layout_of(s, o);
    Llama model = llama_create(&s->config, &layout, d->matmul, 0), *m = &model;
    load_weights(m, s);
    const uint64_t most = o->given[OPT_val_batches] ? (uint64_t)o->val_batches * (uint64_t)layout.B : UINT64_MAX;
    const uint64_t rows = most < s->val.rows_per_epoch ? most : s->val.rows_per_epoch;
    const double loss = validate(m, s, rows);
    printf("loss %.6f  perplexity %.4f  tokens %llu\n", loss, exp(loss),
           (unsigned long long)rows * (unsigned long long)layout.T);
    llama_free(m);
}

/* --generate and --chat: stdout carries the model's text alone. */
static void talk(Session* s, Device* d) {
    const Options* o = &s->options;
    check_memory(s, d, NULL);
    const Layout layout = layout_of(s, o);
    Llama model = llama_create(&s->config, &layout, d->matmul, 0), *m = &model;
    Sampler sampler;
    Generator g;
    Error e = NO_ERROR;
    load_weights(m, s);
    sampler_init(&sampler, m->config.vocab_size, o->temperature, o->top_k, o->top_p, (uint64_t)o->seed);
    generator_init(&g, next_logits, m, &m->config, s->has_tokenizer ? &s->tokenizer : NULL, &sampler, layout.cache_len, stdout);
    must(s->job == JOB_CHAT ? chat(&g, o->system, o->tokens, stdin, &e) : generate(&g, o->generate, o->tokens, &e), &e);
    generator_free(&g);
    sampler_free(&sampler);
    llama_free(m);
}

int main(int argc, char** argv) {
    const double started = now_seconds();
    Session s;
    session_open(&s, argc, argv, ON_GPU, 0, 1);
    if (s.config.hidden_size > MAX_HIDDEN) {
        die("%s: hidden_size is %d, wanted at most %d on a GPU", s.model_dir[0] ? s.model_dir : s.options.model,
            s.config.hidden_size, MAX_HIDDEN);
    }
    if (s.options.given[OPT_master] && s.options.master == MASTER_OPTION_SPLIT && !CAN_SPLIT) {
        die_usage("--master split: a weight's upper half is its BF16 value; this is a build for %s, wanted PRECISION=BF16",
                  PRECISION_NAME);
    }
    Device d = device_open(&s.options);
    run_machine(d.name, 1, s.machine, sizeof s.machine);
    switch (s.job) {
        case JOB_TRAIN:
        case JOB_DRY_RUN: train(&s, &d, started); break;
        case JOB_EVAL: eval(&s, &d); break;
        case JOB_GENERATE:
        case JOB_CHAT: talk(&s, &d); break;
    }
    session_close(&s);
    matmul_destroy(d.matmul);
    return 0;
}

#endif  // TESTING
