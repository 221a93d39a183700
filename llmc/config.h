/* config.h -- the shape of a model: its configuration, the presets, and the one table of its parameters.
 *
 * Everything that walks over parameters (initialisation, files, AdamW's decay, the memory plan, the tests) walks over
 * `param_specs` and the ParamTable made from it. Names, shapes and the half-split RoPE pairing are Hugging Face's.
 *
 * Layout of one arena (the same element offsets serve weights, gradients, master weights, m and v):
 *   embedding | block 0 | block 1 | ... | final norm | lm_head (untied only)
 * A block is input_norm, q k v, o, post_norm, gate up, down. q, k, v are adjacent, and so are gate and up: one GEMM
 * with (NH + 2 NKV) HD or 2F output rows serves them, and reading or writing files is a plain copy. Every other tensor
 * starts at a multiple of PARAM_ALIGN elements; gaps hold zeros and stay zero under AdamW. Every block starts
 * `block_stride` after the one before.
 *
 * config.json is read and written here; the weights beside it are model_folder.h's.
 */
#ifndef LLMC_CONFIG_H
#define LLMC_CONFIG_H

#include "llmc/base/utils.h"
#include "llmc/base/rand.h"

#include "llmc/files/json.h"

enum {
    MAX_EOS = 8,
    MAX_LAYERS = 1024,
    MAX_HEAD_DIM = 256,
    PARAM_ALIGN = 128,  // elements: 256 bytes in 16-bit builds, 512 in fp32
};

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
    int num_eos;  // 0: none
} ModelConfig;

/* Elements of one packed QKV row, of its query part, and of its key part (= its value part). */
static inline int q_width(const ModelConfig* c) { return c->num_heads * c->head_dim; }
static inline int kv_width(const ModelConfig* c) { return c->num_kv_heads * c->head_dim; }
static inline int qkv_width(const ModelConfig* c) { return q_width(c) + 2 * kv_width(c); }

/* What RoPE and attention know of a batch. */
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
    NUM_PARAM_SPECS
} ParamKind;

typedef enum { INIT_ONES, INIT_NORMAL, INIT_RESIDUAL } InitKind;  // 1; N(0, 0.02); N(0, 0.02 / sqrt(2L))

typedef struct {
    const char* name;  // of the tensor in the file; %d is the layer
    bool per_layer;
    bool joined;  // follows the tensor before it without a gap (k and v behind q, up behind gate)
    bool matrix;  // two dimensions: has weight decay, is computed in 16 bits
    InitKind init;
} ParamSpec;

// clang-format off
static const ParamSpec param_specs[NUM_PARAM_SPECS] = {
    // name                                                per_layer joined matrix init
    {"model.embed_tokens.weight",                              false, false, true,  INIT_NORMAL},
    {"model.layers.%d.input_layernorm.weight",                 true,  false, false, INIT_ONES},
    {"model.layers.%d.self_attn.q_proj.weight",                true,  false, true,  INIT_NORMAL},
    {"model.layers.%d.self_attn.k_proj.weight",                true,  true,  true,  INIT_NORMAL},
    {"model.layers.%d.self_attn.v_proj.weight",                true,  true,  true,  INIT_NORMAL},
    {"model.layers.%d.self_attn.o_proj.weight",                true,  false, true,  INIT_RESIDUAL},
    {"model.layers.%d.post_attention_layernorm.weight",        true,  false, false, INIT_ONES},
    {"model.layers.%d.mlp.gate_proj.weight",                   true,  false, true,  INIT_NORMAL},
    {"model.layers.%d.mlp.up_proj.weight",                     true,  true,  true,  INIT_NORMAL},
    {"model.layers.%d.mlp.down_proj.weight",                   true,  false, true,  INIT_RESIDUAL},
    {"model.norm.weight",                                      false, false, false, INIT_ONES},
    {"lm_head.weight",                                         false, false, true,  INIT_NORMAL},
};
// clang-format on

/* Rows and columns of a kind; norms have one row. */
static inline void param_shape(const ModelConfig* c, ParamKind kind, size_t* rows, size_t* cols) {
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

typedef struct {
    ParamKind kind;
    int layer;          // -1 outside of the blocks
    size_t offset;      // of its first element in the arena
    size_t rows, cols;  // row-major
    char name[64];      // Hugging Face's
} Param;

typedef struct {
    Param* items;  // `count` of them in arena order; the index is the tensor's ordinal for the random numbers
    int count;
    size_t elements;      // length of the arena, gaps included
    size_t num_params;    // without gaps
    size_t num_matmul;    // elements of the matrices that tokens are multiplied with: blocks and head (also when tied)
    size_t block_offset;  // of block 0
    size_t block_stride;
} ParamTable;

static inline size_t param_size(const Param* p) { return p->rows * p->cols; }

static inline void param_table_add(ParamTable* t, const ModelConfig* c, ParamKind kind, int layer) {
    Param* p = &t->items[t->count++];
    p->kind = kind;
    p->layer = layer;
    param_shape(c, kind, &p->rows, &p->cols);
    if (!param_specs[kind].joined) { t->elements = round_up(t->elements, PARAM_ALIGN); }
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

/* The table of a checked configuration. Free with param_table_free(). */
static inline ParamTable param_table(const ModelConfig* c) {
    ParamTable t;
    memset(&t, 0, sizeof t);
    t.items = (Param*)xcalloc((size_t)c->num_layers * (P_DOWN - P_INPUT_NORM + 1) + 3, sizeof(Param));
    param_table_add(&t, c, P_EMBEDDING, -1);
    t.block_offset = round_up(t.elements, PARAM_ALIGN);
    for (int l = 0; l < c->num_layers; l++) {
        size_t start = round_up(t.elements, PARAM_ALIGN);
        for (int kind = P_INPUT_NORM; kind <= P_DOWN; kind++) { param_table_add(&t, c, (ParamKind)kind, l); }
        t.elements = round_up(t.elements, PARAM_ALIGN);
        t.block_stride = t.elements - start;
    }
    param_table_add(&t, c, P_FINAL_NORM, -1);
    if (!c->tied) { param_table_add(&t, c, P_LM_HEAD, -1); }
    t.elements = round_up(t.elements, PARAM_ALIGN);
    return t;
}

static inline void param_table_free(ParamTable* t) {
    free(t->items);
    t->items = NULL;
}

/* Offset of one kind's tensor in one layer (-1 for those outside of the blocks); for a tied P_LM_HEAD the embedding's. */
static inline size_t param_offset(const ParamTable* t, ParamKind kind, int layer) {
    const int per_block = P_DOWN - P_INPUT_NORM + 1;
    if (kind == P_EMBEDDING) { return t->items[0].offset; }
    if (layer >= 0) { return t->items[1 + layer * per_block + (int)kind - P_INPUT_NORM].offset; }
    for (int i = t->count - 1; i > 0 && t->items[i].layer < 0; i--) {
        if (t->items[i].kind == kind) { return t->items[i].offset; }
    }
    return t->items[0].offset;
}

/* Fresh weights of one parameter, the `ordinal`-th of the table: norms 1, matrices N(0, 0.02), and those that end a residual
 * branch N(0, 0.02 / sqrt(2L)). The same bits in C, CUDA and Python. */
static inline void param_init(float* w, const Param* p, uint32_t ordinal, const ModelConfig* c, uint64_t seed) {
    const size_t n = param_size(p);
    switch (param_specs[p->kind].init) {
        case INIT_ONES:
            for (size_t i = 0; i < n; i++) { w[i] = 1.0f; }
            break;
        case INIT_NORMAL: rand_normal(w, n, 0.02, seed, ordinal); break;
        case INIT_RESIDUAL: rand_normal(w, n, 0.02 / sqrt(2.0 * c->num_layers), seed, ordinal); break;
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

/* Fills *c from a preset's name: one of `presets`, or dN (depth N: hidden 64 N, N heads of 64, kv heads the largest
 * divisor of N not above max(1, N/3), ffn 8/3 of hidden rounded up to 256, untied, no RoPE scaling). The vocabulary of
 * dN is the tokenizer's: `vocab_size` fills it. False where the name is no preset. */
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

// ---------------------------------------------------------------------------------------------------------------------
// config.json

// Fields that would change what the model computes: absent, null, false or 0, or the file is refused by name.
static const char* const config_unsupported[] = {
    "attention_bias",
    "mlp_bias",
    "attention_dropout",
    "quantization_config",
    "sliding_window",
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "layer_types",
    "no_rope_layers",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_qk_norm",
    "qk_norm",
    "is_encoder_decoder",
    "add_cross_attention",
};

/* One statement of the RoPE parameters; a file may hold two (rope_scaling and rope_parameters) and top-level numbers. */
typedef struct {
    const char* field;  // for messages
    bool has_theta, has_original, llama3;
    double theta, factor, low, high, original;
} RopeFields;

/* A positive number where there is one; *has tells. */
static inline bool config_positive(const Json* j, const JsonNode* object, const char* key, bool* has, double* out, Error* e) {
    *has = json_get(j, object, key) != NULL;
    return !*has || json_double(j, object, key, 1e-6, 1e15, out, e);
}

/* rope_scaling or rope_parameters: an object in either spelling of its type (rope_type, type). */
static inline bool config_read_rope(const Json* j, const JsonNode* o, RopeFields* r, Error* e) {
    if (o->type != JSON_OBJECT) { return json_wanted(j, json_root(j), r->field, e, "an object"); }
    for (const JsonNode* n = json_first(j, o); n; n = json_next(j, n)) {
        if (n->type < JSON_ARRAY) { continue; }
        return json_wanted(j, o, json_key(j, n, NULL), e, "one set of RoPE numbers for all layers");
    }
    const char *type = NULL, *old_type = NULL;
    if (json_get(j, o, "rope_type") && !json_text(j, o, "rope_type", &type, e)) { return false; }
    if (json_get(j, o, "type") && !json_text(j, o, "type", &old_type, e)) { return false; }
    if (type && old_type && strcmp(type, old_type) != 0) {
        return json_wanted(j, o, "type", e, "\"%s\" as its rope_type says", type);
    }
    const char* type_key = type || !old_type ? "rope_type" : "type";
    type = type ? type : old_type;
    if (!type && json_get(j, o, "factor")) { return json_wanted(j, o, "rope_type", e, "\"default\" or \"llama3\""); }
    r->llama3 = type && strcmp(type, "llama3") == 0;
    if (type && !r->llama3 && strcmp(type, "default") != 0) {
        return json_wanted(j, o, type_key, e, "\"default\" or \"llama3\": other RoPE types are not supported");
    }
    bool has = false;
    double partial = 1;
    if (!config_positive(j, o, "partial_rotary_factor", &has, &partial, e)) { return false; }
    if (has && partial != 1) { return json_wanted(j, o, "partial_rotary_factor", e, "1: every dimension is rotated"); }
    if (!config_positive(j, o, "rope_theta", &r->has_theta, &r->theta, e)) { return false; }
    if (!r->llama3) { return true; }
    if (!json_double(j, o, "factor", 1, 1e6, &r->factor, e) || !json_double(j, o, "low_freq_factor", 1e-6, 1e6, &r->low, e) ||
        !json_double(j, o, "high_freq_factor", 1e-6, 1e6, &r->high, e) ||
        !config_positive(j, o, "original_max_position_embeddings", &r->has_original, &r->original, e)) {
        return false;
    }
    return r->high > r->low || json_wanted(j, o, "high_freq_factor", e, "more than low_freq_factor, %g", r->low);
}

/* "path: a.x is 1, but b.x is 2" unless both are equal. */
static inline bool config_agree(const Json* j, const char* a, double x, const char* b, double y, const char* key, Error* e) {
    return x == y || fail(e, "%s: %s.%s is %.17g, but %s.%s is %.17g: wanted one value", j->path, a, key, x, b, key, y);
}

/* Takes one statement of theta over into *theta, which an earlier one (`*from`) may have set. */
static inline bool config_take_theta(const Json* j, double* theta, const char** from, double value, const char* field,
                                     Error* e) {
    if (*from && *theta != value) {
        return fail(e, "%s: %s is %.17g, but %s is %.17g: wanted one value", j->path, *from, *theta, field, value);
    }
    *theta = value;
    *from = field;
    return true;
}

/* All spellings of RoPE's parameters: top-level rope_theta with rope_scaling (transformers 4), rope_parameters
 * (transformers 5), or all of them, then in agreement. */
static inline bool config_read_all_rope(ModelConfig* c, const Json* j, Error* e) {
    const JsonNode* root = json_root(j);
    RopeFields both[2];
    memset(both, 0, sizeof both);
    both[0].field = "rope_scaling";
    both[1].field = "rope_parameters";
    const RopeFields* used = NULL;
    const char* theta_from = NULL;
    double theta = 0;
    bool has = false;
    c->rope_theta = 10000.0;
    if (!config_positive(j, root, "partial_rotary_factor", &has, &theta, e)) { return false; }
    if (has && theta != 1) { return json_wanted(j, root, "partial_rotary_factor", e, "1: every dimension is rotated"); }
    if (!config_positive(j, root, "rope_theta", &has, &theta, e)) { return false; }
    if (has && !config_take_theta(j, &c->rope_theta, &theta_from, theta, "rope_theta", e)) { return false; }
    for (int i = 0; i < 2; i++) {
        RopeFields* r = &both[i];
        const JsonNode* o = json_get(j, root, r->field);
        if (!o || (o->type == JSON_OBJECT && json_length(o) == 0)) { continue; }
        if (!config_read_rope(j, o, r, e)) { return false; }
        const char* field = i == 0 ? "rope_scaling.rope_theta" : "rope_parameters.rope_theta";
        if (r->has_theta && !config_take_theta(j, &c->rope_theta, &theta_from, r->theta, field, e)) { return false; }
        if (r->llama3 && !r->has_original) { r->original = c->max_positions; }
        if (used) {
            if (used->llama3 != r->llama3) {
                return fail(e, "%s: rope_scaling.rope_type is \"%s\", but rope_parameters.rope_type is \"%s\": wanted one type",
                            j->path, used->llama3 ? "llama3" : "default", r->llama3 ? "llama3" : "default");
            }
            const char *a = used->field, *b = r->field;
            if (!config_agree(j, a, used->factor, b, r->factor, "factor", e) ||
                !config_agree(j, a, used->low, b, r->low, "low_freq_factor", e) ||
                !config_agree(j, a, used->high, b, r->high, "high_freq_factor", e) ||
                !config_agree(j, a, used->original, b, r->original, "original_max_position_embeddings", e)) {
                return false;
            }
        }
        used = r;
    }
    if (!used || !used->llama3) { return true; }
    c->rope_llama3 = true;
    c->rope_factor = used->factor;
    c->rope_low_freq = used->low;
    c->rope_high_freq = used->high;
    c->rope_original_len = used->original;
    return true;
}

/* eos_token_id: one id or a list of up to MAX_EOS. */
static inline bool config_read_eos(ModelConfig* c, const Json* j, Error* e) {
    const JsonNode* eos = json_get(j, json_root(j), "eos_token_id");
    if (!eos) { return true; }
    const bool list = eos->type == JSON_ARRAY;
    for (const JsonNode* n = list ? json_first(j, eos) : eos; n; n = list ? json_next(j, n) : NULL) {
        int64_t id = 0;
        if (!json_node_int(j, n, &id) || id < 0 || id >= c->vocab_size || c->num_eos == MAX_EOS) {
            return json_wanted(j, json_root(j), "eos_token_id", e, "up to %d ids from 0 to vocab_size - 1 = %d", MAX_EOS,
                               c->vocab_size - 1);
        }
        c->eos_ids[c->num_eos++] = (int)id;
    }
    return true;
}

/* hidden_act, model_type and architectures: what kind of model it is. */
static inline bool config_check_kind(const Json* j, Error* e) {
    const JsonNode* root = json_root(j);
    const char* text = NULL;
    if (root->type != JSON_OBJECT) { return fail(e, "%s: is no JSON object, wanted a model's configuration", j->path); }
    if (!json_get(j, root, "model_type")) {
        return json_wanted(j, root, "model_type", e, "\"llama\": is this the config.json of a model?");
    }
    if (!json_text(j, root, "model_type", &text, e)) { return false; }
    if (strcmp(text, "llama") != 0) { return json_wanted(j, root, "model_type", e, "\"llama\""); }
    const JsonNode* kinds = json_get(j, root, "architectures");
    if (kinds) {
        const JsonNode* first = json_first(j, kinds);
        text = first ? json_string(j, first, NULL) : NULL;
        if (!text || strcmp(text, "LlamaForCausalLM") != 0) {
            char shown[100];
            return fail(e, "%s: architectures holds %s, wanted \"LlamaForCausalLM\"", j->path,
                        json_show(shown, sizeof shown, j, first));
        }
    }
    if (json_get(j, root, "hidden_act")) {
        if (!json_text(j, root, "hidden_act", &text, e)) { return false; }
        if (strcmp(text, "silu") != 0 && strcmp(text, "swish") != 0) {
            return json_wanted(j, root, "hidden_act", e, "\"silu\"");
        }
    }
    for (size_t i = 0; i < sizeof config_unsupported / sizeof *config_unsupported; i++) {
        const JsonNode* n = json_get(j, root, config_unsupported[i]);
        double number = 1;
        if (!n || n->type == JSON_FALSE || (json_node_double(j, n, &number) && number == 0)) { continue; }
        return json_wanted(j, root, config_unsupported[i], e, "none: not supported");
    }
    return true;
}

/* The fields of a parsed config.json. */
static inline bool config_parse(ModelConfig* c, const Json* j, Error* e) {
    const JsonNode* root = json_root(j);
    memset(c, 0, sizeof *c);
    if (!config_check_kind(j, e)) { return false; }
    int64_t V = 0, C = 0, F = 0, L = 0, NH = 0, NKV = 0, HD = 0, positions = 0, bos = 0;
    double eps = 0;
    // the limits keep every later product inside of 63 bits and every row length inside of an int
    if (!json_int(j, root, "vocab_size", 1, 1 << 24, &V, e) || !json_int(j, root, "hidden_size", 1, 1 << 17, &C, e) ||
        !json_int(j, root, "intermediate_size", 1, 1 << 20, &F, e) ||
        !json_int(j, root, "num_hidden_layers", 1, MAX_LAYERS, &L, e) ||
        !json_int(j, root, "num_attention_heads", 1, 1024, &NH, e) ||
        !json_int_or(j, root, "num_key_value_heads", 1, NH, NH, &NKV, e) ||
        !json_int_or(j, root, "head_dim", 2, MAX_HEAD_DIM, C / NH, &HD, e) ||
        !json_int_or(j, root, "max_position_embeddings", 1, INT32_MAX, 2048, &positions, e) ||
        !json_int_or(j, root, "bos_token_id", 0, V - 1, -1, &bos, e) ||
        !json_double_or(j, root, "rms_norm_eps", 1e-30, 1, 1e-6, &eps, e) ||
        !json_bool_or(j, root, "tie_word_embeddings", false, &c->tied, e)) {
        return false;
    }
    if (NH % NKV != 0) {
        return json_wanted(j, root, "num_key_value_heads", e, "a divisor of num_attention_heads, %d", (int)NH);
    }
    if (!json_get(j, root, "head_dim") && C % NH != 0) {
        return json_wanted(j, root, "head_dim", e, "a number, since num_attention_heads %d does not divide hidden_size %d",
                           (int)NH, (int)C);
    }
    if (HD < 2 || HD > MAX_HEAD_DIM || HD % 2 != 0) {
        return fail(e, "%s: head_dim is %d%s, wanted an even number from 2 to %d", j->path, (int)HD,
                    json_get(j, root, "head_dim") ? "" : " (hidden_size / num_attention_heads)", MAX_HEAD_DIM);
    }
    c->vocab_size = (int)V;
    c->hidden_size = (int)C;
    c->intermediate_size = (int)F;
    c->num_layers = (int)L;
    c->num_heads = (int)NH;
    c->num_kv_heads = (int)NKV;
    c->head_dim = (int)HD;
    c->max_positions = (int)positions;
    c->rms_eps = (float)eps;
    c->bos_id = (int)bos;
    return config_read_eos(c, j, e) && config_read_all_rope(c, j, e);
}

/* Reads a Hugging Face config.json. Everything that would be computed wrongly is refused by name; null means absent. */
static inline bool config_read(ModelConfig* c, const char* path, Error* e) {
    Json j;
    memset(c, 0, sizeof *c);
    if (!json_read_file(&j, path, 16 << 20, e)) { return false; }
    const bool ok = config_parse(c, &j, e);
    json_free(&j);
    return ok;
}

/* The parameters behind the opening brace of rope_scaling or rope_parameters. Floats keep a point: transformers 5 checks
 * their type. */
static inline void config_write_llama3(FILE* f, const ModelConfig* c) {
    fputs("\"rope_type\": \"llama3\", \"factor\": ", f);
    json_write_double(f, c->rope_factor);
    fputs(", \"low_freq_factor\": ", f);
    json_write_double(f, c->rope_low_freq);
    fputs(", \"high_freq_factor\": ", f);
    json_write_double(f, c->rope_high_freq);
    fputs(", \"original_max_position_embeddings\": ", f);
    if (c->rope_original_len == floor(c->rope_original_len)) {  // an integer for transformers
        fprintf(f, "%.0f", c->rope_original_len);
    } else {
        json_write_double(f, c->rope_original_len);
    }
}

/* bos_token_id and eos_token_id, each with a comma behind it. */
static inline void config_write_ids(FILE* f, const ModelConfig* c) {
    if (c->bos_id >= 0) {
        fprintf(f, "  \"bos_token_id\": %d,\n", c->bos_id);
    } else {
        fputs("  \"bos_token_id\": null,\n", f);
    }
    fputs("  \"eos_token_id\": ", f);
    if (c->num_eos == 0) { fputs("null", f); }
    if (c->num_eos > 1) { fputs("[", f); }
    for (int i = 0; i < c->num_eos; i++) { fprintf(f, "%s%d", i ? ", " : "", c->eos_ids[i]); }
    fputs(c->num_eos > 1 ? "],\n" : ",\n", f);
}

/* Writes config.json for weights of `dtype` ("F32", "BF16" or "F16"), which the loader obeys; RoPE in the spellings of
 * transformers 4 and 5. The file is flushed to the disk. */
static inline bool config_write(const ModelConfig* c, const char* path, const char* dtype, Error* e) {
    const char* torch_dtype = strcmp(dtype, "BF16") == 0 ? "bfloat16" : strcmp(dtype, "F16") == 0 ? "float16" : "float32";
    FILE* f = fopen(path, "wb");
    if (!f) { return fail(e, "%s: cannot make the file: %s", path, strerror(errno)); }
    fputs("{\n  \"architectures\": [\"LlamaForCausalLM\"],\n  \"model_type\": \"llama\",\n", f);
    fprintf(f, "  \"vocab_size\": %d,\n  \"hidden_size\": %d,\n  \"intermediate_size\": %d,\n", c->vocab_size, c->hidden_size,
            c->intermediate_size);
    fprintf(
        f,
        "  \"num_hidden_layers\": %d,\n  \"num_attention_heads\": %d,\n  \"num_key_value_heads\": %d,\n  \"head_dim\": %d,\n",
        c->num_layers, c->num_heads, c->num_kv_heads, c->head_dim);
    fprintf(f, "  \"hidden_act\": \"silu\",\n  \"max_position_embeddings\": %d,\n  \"rms_norm_eps\": ", c->max_positions);
    json_write_float(f, c->rms_eps);
    fprintf(f, ",\n  \"tie_word_embeddings\": %s,\n", c->tied ? "true" : "false");
    fputs("  \"attention_bias\": false,\n  \"attention_dropout\": 0.0,\n  \"mlp_bias\": false,\n", f);
    fputs("  \"initializer_range\": 0.02,\n  \"use_cache\": true,\n", f);
    config_write_ids(f, c);
    fputs("  \"rope_theta\": ", f);
    json_write_double(f, c->rope_theta);
    fputs(",\n  \"rope_scaling\": ", f);
    if (c->rope_llama3) {
        fputs("{", f);
        config_write_llama3(f, c);
        fputs("}", f);
    } else {
        fputs("null", f);
    }
    fputs(",\n  \"rope_parameters\": {\"rope_theta\": ", f);
    json_write_double(f, c->rope_theta);
    fputs(", ", f);
    if (c->rope_llama3) {
        config_write_llama3(f, c);
    } else {
        fputs("\"rope_type\": \"default\"", f);
    }
    fprintf(f, "},\n  \"dtype\": \"%s\",\n  \"torch_dtype\": \"%s\"\n}\n", torch_dtype, torch_dtype);
    return close_output(f, path, e);
}

#endif
