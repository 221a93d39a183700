/* config.h -- the shape of a model: its configuration, the presets, and the one table of its parameters.
 *
 * All code that walks over parameters (initialization, files, weight decay, the memory plan, the tests) walks over
 * `param_specs` and the ParamTable built from it. Names, shapes and the half-split RoPE pairing follow Hugging Face.
 *
 * The arena's layout (weights and gradients share the element offsets; for the optimizer's state see optim/optimizer.h):
 *   embedding | block 0 | block 1 | ... | final norm | lm_head (untied only)
 * A block is input_norm, q k v, o, post_norm, gate up, down. q, k, v are adjacent, and so are gate and up: one GEMM
 * with (NH + 2 NKV) HD or 2F output rows computes them together, and reading or writing files is a plain copy. Every other
 * tensor starts at a multiple of PARAM_ALIGN elements. Gaps hold zeros and stay zero under every update.
 * The embedding, each block, and the final norm with the head are the buckets that travel between the ranks of a run. A table
 * for several ranks pads each bucket, so that every rank owns an equal, aligned share of it (dist/buckets.h).
 *
 * With LoRA (lora.h) the weights above are frozen. Only the adapters A and B beside some matrices are trained; they lie in an
 * arena of their own, block after block: A of q k v, their B, A and B of o, A of gate up, their B, A and B of down. The A
 * matrices of one input are adjacent. The adapters of a block are a bucket. Their names are PEFT's.
 *
 * files/config_file.h reads and writes config.json.
 */
#ifndef LLMC_CONFIG_H
#define LLMC_CONFIG_H

#include "llmc/base/utils.h"
#include "llmc/base/rand.h"

#include <math.h>

enum {
    MAX_EOS = 32,
    MAX_LAYERS = 1024,
    MAX_HEAD_DIM = 256,
    PARAM_ALIGN = 128,  // elements: 256 bytes in 16-bit builds, 512 in fp32
};

/* LoRA's adapters: y = x W^T + alpha / rank (x A^T) B^T. */
typedef struct {
    int rank;      // r; 0: no adapters, every weight is trained
    double alpha;  // above 0
    unsigned on;   // bit i: the matrix of lora_pairs[i] has adapters
} LoraConfig;

typedef struct {
    int vocab_size;         // V
    int hidden_size;        // C
    int intermediate_size;  // F
    int num_layers;         // L
    int num_heads;          // NH, query heads
    int num_kv_heads;       // NKV, divides NH
    int head_dim;           // HD, even; NH * HD need not be C
    int max_positions;      // written back as max_position_embeddings; nothing is sized by it
    bool tied;              // the lm_head is the embedding
    float rms_eps;
    double rope_theta;
    bool rope_llama3;          // RoPE type "llama3"; false: "default", and the four below are unused
    double rope_factor;        // 8 in Llama 3.1, 32 in 3.2
    double rope_low_freq;      // low_freq_factor
    double rope_high_freq;     // high_freq_factor
    double rope_original_len;  // original_max_position_embeddings
    int bos_id;                // -1: none
    int eos_ids[MAX_EOS];
    int num_eos;      // 0: none
    LoraConfig lora;  // not part of config.json
    int optimizer;    // the rule that trains it: a row of optimizer_rules (optim/optimizer.h); not part of config.json
} ModelConfig;

/* Adds a token that ends texts, unless it is -1 or known. */
static inline void config_end_at(ModelConfig* c, int id) {
    bool known = id < 0 || id >= c->vocab_size || c->num_eos == MAX_EOS;
    for (int i = 0; i < c->num_eos; i++) { known |= c->eos_ids[i] == id; }
    if (!known) { c->eos_ids[c->num_eos++] = id; }
}

/* Return the elements of one packed QKV row: its queries, its keys (as many as its values), and all of it. */
static inline int q_width(const ModelConfig* c) { return c->num_heads * c->head_dim; }
static inline int kv_width(const ModelConfig* c) { return c->num_kv_heads * c->head_dim; }
static inline int qkv_width(const ModelConfig* c) { return q_width(c) + 2 * kv_width(c); }

/* The shape of a batch for RoPE and attention. */
typedef struct {
    int B, T;         // sequences, and tokens of each
    int NH, NKV, HD;  // query heads, key-value heads (NKV divides NH), elements of a head
} AttentionShape;

static inline AttentionShape attention_shape(const ModelConfig* c, int B, int T) {
    const AttentionShape s = {B, T, c->num_heads, c->num_kv_heads, c->head_dim};
    return s;
}

// ---------------------------------------------------------------------------------------------------------------------
// the parameter table

typedef enum {
    P_EMBEDDING,
    P_INPUT_NORM,
    P_Q,
    P_K,
    P_V,
    P_O,
    P_POST_NORM,
    P_GATE,
    P_UP,
    P_DOWN,
    P_FINAL_NORM,
    P_LM_HEAD,
    P_Q_A,  // adapters
    P_K_A,
    P_V_A,
    P_Q_B,
    P_K_B,
    P_V_B,
    P_O_A,
    P_O_B,
    P_GATE_A,
    P_UP_A,
    P_GATE_B,
    P_UP_B,
    P_DOWN_A,
    P_DOWN_B,
    NUM_PARAM_SPECS
} ParamKind;

// 1; N(0, 0.02); N(0, 0.02 / sqrt(2L)); uniform within +-1 / sqrt(columns), as PEFT draws A; 0
typedef enum { INIT_ONES, INIT_NORMAL, INIT_RESIDUAL, INIT_EVEN, INIT_ZEROS } InitKind;

// Outside of the blocks; one in each block; one in each block of the adapters' arena
typedef enum { PLACE_OUTSIDE, PLACE_BLOCK, PLACE_ADAPTERS } ParamPlace;

typedef struct {
    const char* name;  // name of the tensor in the file; %d is the layer
    ParamPlace place;
    bool joined;  // follows the tensor of the row above without a gap (k and v behind q, up behind gate)
    bool matrix;  // two dimensions: has weight decay; its GPU gradients may be 16-bit
    InitKind init;
} ParamSpec;

// In the order of the arenas. A tensor that only some models have: see param_exists().
// clang-format off
static const ParamSpec param_specs[NUM_PARAM_SPECS] = {
    // name                                                         place    joined matrix init
    {"model.embed_tokens.weight",                            PLACE_OUTSIDE,  false, true,  INIT_NORMAL},
    {"model.layers.%d.input_layernorm.weight",               PLACE_BLOCK,    false, false, INIT_ONES},
    {"model.layers.%d.self_attn.q_proj.weight",              PLACE_BLOCK,    false, true,  INIT_NORMAL},
    {"model.layers.%d.self_attn.k_proj.weight",              PLACE_BLOCK,    true,  true,  INIT_NORMAL},
    {"model.layers.%d.self_attn.v_proj.weight",              PLACE_BLOCK,    true,  true,  INIT_NORMAL},
    {"model.layers.%d.self_attn.o_proj.weight",              PLACE_BLOCK,    false, true,  INIT_RESIDUAL},
    {"model.layers.%d.post_attention_layernorm.weight",      PLACE_BLOCK,    false, false, INIT_ONES},
    {"model.layers.%d.mlp.gate_proj.weight",                 PLACE_BLOCK,    false, true,  INIT_NORMAL},
    {"model.layers.%d.mlp.up_proj.weight",                   PLACE_BLOCK,    true,  true,  INIT_NORMAL},
    {"model.layers.%d.mlp.down_proj.weight",                 PLACE_BLOCK,    false, true,  INIT_RESIDUAL},
    {"model.norm.weight",                                    PLACE_OUTSIDE,  false, false, INIT_ONES},
    {"lm_head.weight",                                       PLACE_OUTSIDE,  false, true,  INIT_NORMAL},
    {"base_model.model.model.layers.%d.self_attn.q_proj.lora_A.weight",           PLACE_ADAPTERS, false, true,  INIT_EVEN},
    {"base_model.model.model.layers.%d.self_attn.k_proj.lora_A.weight",           PLACE_ADAPTERS, true,  true,  INIT_EVEN},
    {"base_model.model.model.layers.%d.self_attn.v_proj.lora_A.weight",           PLACE_ADAPTERS, true,  true,  INIT_EVEN},
    {"base_model.model.model.layers.%d.self_attn.q_proj.lora_B.weight",           PLACE_ADAPTERS, false, true,  INIT_ZEROS},
    {"base_model.model.model.layers.%d.self_attn.k_proj.lora_B.weight",           PLACE_ADAPTERS, false, true,  INIT_ZEROS},
    {"base_model.model.model.layers.%d.self_attn.v_proj.lora_B.weight",           PLACE_ADAPTERS, false, true,  INIT_ZEROS},
    {"base_model.model.model.layers.%d.self_attn.o_proj.lora_A.weight",           PLACE_ADAPTERS, false, true,  INIT_EVEN},
    {"base_model.model.model.layers.%d.self_attn.o_proj.lora_B.weight",           PLACE_ADAPTERS, false, true,  INIT_ZEROS},
    {"base_model.model.model.layers.%d.mlp.gate_proj.lora_A.weight",              PLACE_ADAPTERS, false, true,  INIT_EVEN},
    {"base_model.model.model.layers.%d.mlp.up_proj.lora_A.weight",                PLACE_ADAPTERS, true,  true,  INIT_EVEN},
    {"base_model.model.model.layers.%d.mlp.gate_proj.lora_B.weight",              PLACE_ADAPTERS, false, true,  INIT_ZEROS},
    {"base_model.model.model.layers.%d.mlp.up_proj.lora_B.weight",                PLACE_ADAPTERS, false, true,  INIT_ZEROS},
    {"base_model.model.model.layers.%d.mlp.down_proj.lora_A.weight",              PLACE_ADAPTERS, false, true,  INIT_EVEN},
    {"base_model.model.model.layers.%d.mlp.down_proj.lora_B.weight",              PLACE_ADAPTERS, false, true,  INIT_ZEROS},
};
// clang-format on

/* The matrices that can have adapters, each with its A and B. */
typedef struct {
    ParamKind matrix, a, b;
    const char* name;  // as PEFT's target_modules names it
} LoraPair;
static const LoraPair lora_pairs[] = {{P_Q, P_Q_A, P_Q_B, "q_proj"},
                                      {P_K, P_K_A, P_K_B, "k_proj"},
                                      {P_V, P_V_A, P_V_B, "v_proj"},
                                      {P_O, P_O_A, P_O_B, "o_proj"},
                                      {P_GATE, P_GATE_A, P_GATE_B, "gate_proj"},
                                      {P_UP, P_UP_A, P_UP_B, "up_proj"},
                                      {P_DOWN, P_DOWN_A, P_DOWN_B, "down_proj"}};
enum { NUM_LORA_PAIRS = sizeof lora_pairs / sizeof *lora_pairs };

static inline float lora_scale(const LoraConfig* l) { return (float)(l->alpha / l->rank); }

/* Writes the rows and columns of a kind that is no adapter; a norm has one row. */
static inline void matrix_shape(const ModelConfig* c, ParamKind kind, size_t* rows, size_t* cols) {
    const size_t V = (size_t)c->vocab_size, C = (size_t)c->hidden_size, F = (size_t)c->intermediate_size;
    const size_t Q = (size_t)q_width(c), KV = (size_t)kv_width(c);
    *rows = 1;
    *cols = C;
    switch (kind) {
        case P_EMBEDDING:
        case P_LM_HEAD: *rows = V; break;
        case P_Q: *rows = Q; break;
        case P_K:
        case P_V: *rows = KV; break;
        case P_O:
            *rows = C;
            *cols = Q;
            break;
        case P_GATE:
        case P_UP: *rows = F; break;
        case P_DOWN:
            *rows = C;
            *cols = F;
            break;
        default: break;
    }
}

/* Writes the rows and columns of a kind: A is (r, columns of its matrix), B is (rows of its matrix, r). */
static inline void param_shape(const ModelConfig* c, ParamKind kind, size_t* rows, size_t* cols) {
    matrix_shape(c, kind, rows, cols);
    for (int i = 0; i < NUM_LORA_PAIRS; i++) {
        const LoraPair* p = &lora_pairs[i];
        if (kind != p->a && kind != p->b) { continue; }
        matrix_shape(c, p->matrix, rows, cols);
        *(kind == p->a ? rows : cols) = (size_t)c->lora.rank;
    }
}

/* The products of a model: the products of a block, then the head. One product serves a matrix and all that join it. */
typedef enum {
    LINEAR_QKV,
    LINEAR_O,
    LINEAR_GATE_UP,
    LINEAR_DOWN,
    BLOCK_LINEARS,
    LINEAR_HEAD = BLOCK_LINEARS,
    NUM_LINEARS
} LinearKind;
static const ParamKind linear_params[NUM_LINEARS] = {P_Q, P_O, P_GATE, P_DOWN, P_LM_HEAD};  // the first matrix of each

/* Writes the outputs and inputs of a product. */
static inline void linear_shape(const ModelConfig* c, LinearKind linear, int* outputs, int* inputs) {
    ParamKind kind = linear_params[linear];
    *outputs = 0;
    do {
        size_t rows = 0, cols = 0;
        matrix_shape(c, kind, &rows, &cols);
        *outputs += (int)rows;
        *inputs = (int)cols;
        kind = (ParamKind)(kind + 1);
    } while (param_specs[kind].joined);
}

typedef struct {
    ParamKind kind;
    int layer;             // -1 outside the blocks
    bool joined;           // follows the tensor before it without a gap
    size_t offset;         // place of its first element in the arena
    size_t rows, cols;     // row-major
    size_t vector_offset;  // for a tensor that is no matrix: its offset in an arena of such tensors alone
    char name[80];         // Hugging Face's, or PEFT's
} Param;

typedef struct {
    Param* items;  // `count` of them in arena order; the index is the tensor's ordinal for its random numbers
    int count;
    int optimizer;           // the model's
    int ranks;               // ranks that can own equal shares of every bucket
    size_t elements;         // length of the arena, gaps included
    size_t vector_elements;  // length of the arena of the tensors that are no matrices
    size_t num_params;       // without gaps
    size_t num_matmul;       // elements of the matrices that multiply tokens: blocks and head (tied or not)
} ParamTable;

/* Elements [first, first + count) of an arena. */
typedef struct {
    size_t first, count;
} ArenaRange;

/* Ranges of an arena in its order, without overlap. */
typedef struct {
    ArenaRange* items;
    size_t count;
} ArenaRanges;

/* Returns the first of the ranges that ends after element `at` of the arena; their number if none does. */
static inline size_t arena_range_at(const ArenaRanges* list, size_t at) {
    size_t below = 0, above = list->count;
    while (below < above) {
        const size_t middle = (below + above) / 2;
        if (list->items[middle].first + list->items[middle].count > at) {
            above = middle;
        } else {
            below = middle + 1;
        }
    }
    return below;
}

static inline size_t param_size(const Param* p) { return p->rows * p->cols; }

/* Returns the whole arena as ranges, for a run of one rank. `range` holds it. */
static inline ArenaRanges whole_arena(const ParamTable* t, ArenaRange* range) {
    const ArenaRanges all = {range, 1};
    range->first = 0;
    range->count = t->elements;
    return all;
}

/* Returns whether the i-th tensor begins its bucket: the embedding, a block, or the end (final norm, head). */
static inline bool param_begins_bucket(const ParamTable* t, int i) {
    return i == 0 || t->items[i].layer != t->items[i - 1].layer;
}

/* Buckets begin and end at multiples of this many elements. */
static inline size_t bucket_align(const ParamTable* t) { return (size_t)PARAM_ALIGN * (size_t)t->ranks; }

/* Returns whether a tensor of this kind joins the last tensor of the table. Not every matrix need have adapters: v's A may
 * follow q's A, or be the first. */
static inline bool param_joins(const ParamTable* t, ParamKind kind) {
    const int last = t->count > 0 ? (int)t->items[t->count - 1].kind : -1;
    for (int k = (int)kind; param_specs[k].joined; k--) {
        if (last == k - 1) { return true; }
    }
    return false;
}

static inline void param_table_add(ParamTable* t, const ModelConfig* c, ParamKind kind, int layer) {
    const bool joined = param_joins(t, kind);
    Param* p = &t->items[t->count++];
    p->kind = kind;
    p->layer = layer;
    p->joined = joined;
    param_shape(c, kind, &p->rows, &p->cols);
    const size_t align = param_begins_bucket(t, t->count - 1) ? bucket_align(t) : (size_t)PARAM_ALIGN;
    if (!joined) { t->elements = round_up(t->elements, align); }
    p->offset = t->elements;
    // the format is one of param_specs; only per-layer names hold a %d
    if (layer >= 0) {
        snprintf(p->name, sizeof p->name, param_specs[kind].name, layer);
    } else {
        snprintf(p->name, sizeof p->name, "%s", param_specs[kind].name);
    }
    t->elements += param_size(p);
    t->num_params += param_size(p);
    if (param_specs[kind].matrix && (kind != P_EMBEDDING || c->tied)) { t->num_matmul += param_size(p); }
}

/* Returns a table without tensors, with room for every kind in every layer. */
static inline ParamTable param_table_open(const ModelConfig* c, int ranks) {
    ParamTable t;
    memset(&t, 0, sizeof t);
    t.items = (Param*)xcalloc(((size_t)c->num_layers + 1) * NUM_PARAM_SPECS, sizeof(Param));
    t.optimizer = c->optimizer;
    t.ranks = ranks;
    return t;
}

/* Ends a table, and lays out the arena of vectors: each vector takes as much room there as in the first arena, gap included. */
static inline void param_table_close(ParamTable* t) {
    t->elements = round_up(t->elements, bucket_align(t));
    for (int i = 0; i < t->count; i++) {
        Param* p = &t->items[i];
        if (param_specs[p->kind].matrix) { continue; }
        p->vector_offset = t->vector_elements;
        t->vector_elements += (i + 1 < t->count ? p[1].offset : t->elements) - p->offset;
    }
}

/* Returns whether a model has tensors of this kind. */
static inline bool param_exists(const ModelConfig* c, ParamKind kind) {
    if (kind == P_LM_HEAD) { return !c->tied; }
    if (param_specs[kind].place != PLACE_ADAPTERS) { return true; }
    for (int i = 0; i < NUM_LORA_PAIRS; i++) {
        if (lora_pairs[i].a == kind || lora_pairs[i].b == kind) { return c->lora.on >> i & 1; }
    }
    return false;
}

/* Adds the tensors of a layer that have this place. */
static inline void param_table_add_block(ParamTable* t, const ModelConfig* c, ParamPlace place, int layer) {
    for (int kind = 0; kind < NUM_PARAM_SPECS; kind++) {
        if (param_specs[kind].place == place && param_exists(c, (ParamKind)kind)) {
            param_table_add(t, c, (ParamKind)kind, layer);
        }
    }
}

/* Builds the table of a checked configuration, laid out for so many ranks. Free it with param_table_free(). */
static inline ParamTable param_table_for(const ModelConfig* c, int ranks) {
    ParamTable t = param_table_open(c, ranks);
    param_table_add(&t, c, P_EMBEDDING, -1);
    for (int l = 0; l < c->num_layers; l++) { param_table_add_block(&t, c, PLACE_BLOCK, l); }
    param_table_add(&t, c, P_FINAL_NORM, -1);
    if (param_exists(c, P_LM_HEAD)) { param_table_add(&t, c, P_LM_HEAD, -1); }
    param_table_close(&t);
    return t;
}

/* Builds the table for one rank, or for code that only needs the names and shapes. */
static inline ParamTable param_table(const ModelConfig* c) { return param_table_for(c, 1); }

/* Makes the table of the tensors that a run trains: all of param_table_for(), or with LoRA the adapters alone. Gradients,
 * master weights, m and v follow this table, and so do the adapters; all other weights follow param_table_for(). Free with
 * param_table_free(). */
static inline ParamTable trained_table_for(const ModelConfig* c, int ranks) {
    if (c->lora.rank == 0) { return param_table_for(c, ranks); }
    ParamTable t = param_table_open(c, ranks);
    for (int l = 0; l < c->num_layers; l++) { param_table_add_block(&t, c, PLACE_ADAPTERS, l); }
    param_table_close(&t);
    return t;
}

static inline ParamTable trained_table(const ModelConfig* c) { return trained_table_for(c, 1); }

static inline void param_table_free(ParamTable* t) {
    free(t->items);
    t->items = NULL;
}

/* Returns the parameter of this name, or NULL. */
static inline const Param* param_find(const ParamTable* t, const char* name) {
    for (int i = 0; i < t->count; i++) {
        if (strcmp(t->items[i].name, name) == 0) { return &t->items[i]; }
    }
    return NULL;
}

/* Returns the tensor of a kind in a layer (-1 outside the blocks); NULL if there is none. A tied head is the embedding. */
static inline const Param* param_at(const ParamTable* t, ParamKind kind, int layer) {
    for (int i = 0; i < t->count; i++) {
        if (t->items[i].kind == kind && t->items[i].layer == layer) { return &t->items[i]; }
    }
    return kind == P_LM_HEAD ? param_at(t, P_EMBEDDING, layer) : NULL;
}

/* Returns the offset of a tensor that the table has. */
static inline size_t param_offset(const ParamTable* t, ParamKind kind, int layer) { return param_at(t, kind, layer)->offset; }

/* Fills w with elements [first, first + n) of a fresh parameter, the table's `ordinal`-th; first is even. Norms are 1,
 * matrices N(0, 0.02), and N(0, 0.02 / sqrt(2L)) where they end a residual branch; adapters start as PEFT draws them: A
 * small and B zero, so they have no effect at first. C, CUDA and Python give the same bits. */
static inline void param_init(float* w, const Param* p, size_t first, size_t n, uint32_t ordinal, const ModelConfig* c,
                              uint64_t seed) {
    switch (param_specs[p->kind].init) {
        case INIT_ONES:
            for (size_t i = 0; i < n; i++) { w[i] = 1.0f; }
            break;
        case INIT_NORMAL: rand_normal(w, first, n, 0.02, seed, ordinal); break;
        case INIT_RESIDUAL: rand_normal(w, first, n, 0.02 / sqrt(2.0 * c->num_layers), seed, ordinal); break;
        case INIT_EVEN: rand_even(w, first, n, 1.0 / sqrt((double)p->cols), seed, ordinal); break;
        case INIT_ZEROS: memset(w, 0, n * sizeof(float)); break;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// presets

typedef struct {
    const char* name;
    int V, C, F, L, NH, NKV, HD, max_positions;
    bool tied;
    double rope_factor;
} Preset;

// Meta's published shapes; all have theta 500000, eps 1e-5 and llama3 RoPE with low 1, high 4, original length 8192.
// clang-format off
static const Preset presets[] = {
    {"llama3.2-1b",  128256, 2048,  8192, 16, 32, 8,  64, 131072, true,  32},
    {"llama3.2-3b",  128256, 3072,  8192, 28, 24, 8, 128, 131072, true,  32},
    {"llama3.1-8b",  128256, 4096, 14336, 32, 32, 8, 128, 131072, false,  8},
    {"llama3.1-70b", 128256, 8192, 28672, 80, 64, 8, 128, 131072, false,  8},
};
// clang-format on

/* Fills *c from a preset's name: one of `presets`, or dN. Returns false if the name is no preset. dN has depth N, hidden size
 * 64 N, and N heads of 64. Its kv heads are the largest divisor of N not above max(1, N/3). Its ffn size is 8/3 of the hidden
 * size, rounded up to 256. It has an untied head, no RoPE scaling, and the tokenizer's vocabulary, `vocab_size`. */
static inline bool config_preset(ModelConfig* c, const char* name, int vocab_size) {
    memset(c, 0, sizeof *c);
    c->rms_eps = 1e-5f;
    c->rope_theta = 500000.0;
    c->bos_id = -1;
    for (size_t i = 0; i < sizeof presets / sizeof *presets; i++) {
        const Preset* p = &presets[i];
        if (strcmp(name, p->name) != 0) { continue; }
        c->vocab_size = p->V;
        c->hidden_size = p->C;
        c->intermediate_size = p->F;
        c->num_layers = p->L;
        c->num_heads = p->NH;
        c->num_kv_heads = p->NKV;
        c->head_dim = p->HD;
        c->max_positions = p->max_positions;
        c->tied = p->tied;
        c->rope_llama3 = true;
        c->rope_factor = p->rope_factor;
        c->rope_low_freq = 1;
        c->rope_high_freq = 4;
        c->rope_original_len = 8192;
        c->bos_id = 128000;
        c->eos_ids[0] = 128001;
        c->num_eos = 1;
        return true;
    }
    if (name[0] != 'd' || name[1] < '1' || name[1] > '9') { return false; }
    char* end = NULL;
    long depth = strtol(name + 1, &end, 10);
    if (*end != 0 || depth > MAX_LAYERS) { return false; }
    const int N = (int)depth;
    c->vocab_size = vocab_size;
    c->num_layers = c->num_heads = N;
    c->head_dim = 64;
    c->hidden_size = 64 * N;
    c->intermediate_size = (int)round_up(ceil_div((size_t)c->hidden_size * 8, 3), 256);
    c->max_positions = 8192;
    c->num_kv_heads = 1;
    for (int k = 1; k * 3 <= N; k++) {
        if (N % k == 0) { c->num_kv_heads = k; }
    }
    return true;
}

#endif
