/* config_file.h -- reads and writes config.json, a model's shape in the format of Hugging Face's `transformers`.
 *
 * config_fields is the one list of plain fields; the reader, the writer and the log walk over it. Token ids and RoPE have
 * several spellings, hence functions of their own. A field that we would compute wrongly is refused by name; null means
 * absent. See config.h for the meaning of the numbers, model_folder.h for the weights.
 */
#ifndef LLMC_CONFIG_FILE_H
#define LLMC_CONFIG_FILE_H

#include "llmc/base/utils.h"

#include "llmc/config.h"
#include "llmc/files/json.h"
#include "llmc/files/output.h"
#include "llmc/files/safetensors.h"
#include "llmc/base/text.h"

#include <math.h>

// ---------------------------------------------------------------------------------------------------------------------
// the fields

typedef enum { CONFIG_FIXED, CONFIG_INT, CONFIG_FLOAT, CONFIG_BOOL } ConfigKind;

typedef struct {
    const char* name;
    ConfigKind kind;
    const char* text;  // CONFIG_FIXED: the text to write; config_check_kind() checks what is read
    size_t member;     // other kinds: offset in ModelConfig
    double min, max;   // allowed range
    double absent;     // value if the field is absent or null
} ConfigField;

#define CONFIG_REQUIRED (-1.0)  // in `absent`: the field must be there
#define FIXED(text) CONFIG_FIXED, text, 0, 0, 0, 0
#define INT(member) CONFIG_INT, NULL, offsetof(ModelConfig, member)
#define FLOAT(member) CONFIG_FLOAT, NULL, offsetof(ModelConfig, member)
#define BOOL(member) CONFIG_BOOL, NULL, offsetof(ModelConfig, member)

// In the order they are written. The limits keep every later product within 63 bits and every row length within an int.
// clang-format off
static const ConfigField config_fields[] = {
    {"architectures",           FIXED("[\"LlamaForCausalLM\"]")},
    {"model_type",              FIXED("\"llama\"")},
    {"vocab_size",              INT(vocab_size),        1, 1 << 24,      CONFIG_REQUIRED},
    {"hidden_size",             INT(hidden_size),       1, 1 << 17,      CONFIG_REQUIRED},
    {"intermediate_size",       INT(intermediate_size), 1, 1 << 20,      CONFIG_REQUIRED},
    {"num_hidden_layers",       INT(num_layers),        1, MAX_LAYERS,   CONFIG_REQUIRED},
    {"num_attention_heads",     INT(num_heads),         1, 1024,         CONFIG_REQUIRED},
    {"num_key_value_heads",     INT(num_kv_heads),      1, 1024,         0},  // absent: num_attention_heads
    {"head_dim",                INT(head_dim),          2, MAX_HEAD_DIM, 0},  // absent: hidden_size / num_attention_heads
    {"hidden_act",              FIXED("\"silu\"")},
    {"max_position_embeddings", INT(max_positions),     1, INT32_MAX,    2048},
    {"rms_norm_eps",            FLOAT(rms_eps),         1e-30, 1,        1e-6},
    {"tie_word_embeddings",     BOOL(tied),             0, 1,            false},
    {"attention_bias",          FIXED("false")},
    {"attention_dropout",       FIXED("0.0")},
    {"mlp_bias",                FIXED("false")},
    {"initializer_range",       FIXED("0.02")},
    {"use_cache",               FIXED("true")},
};
// clang-format on
enum { NUM_CONFIG_FIELDS = sizeof config_fields / sizeof *config_fields };

#undef FIXED
#undef INT
#undef FLOAT
#undef BOOL

// ---------------------------------------------------------------------------------------------------------------------
// reading

// Fields that would change what the model computes. Each must be absent, null, false or 0, otherwise the file is refused.
// clang-format off
static const char* const config_unsupported[] = {
    "attention_bias", "mlp_bias", "quantization_config", "sliding_window", "num_local_experts", "num_experts",
    "n_routed_experts", "layer_types", "no_rope_layers", "attn_logit_softcapping", "final_logit_softcapping", "use_qk_norm",
    "qk_norm", "is_encoder_decoder", "add_cross_attention"
};
// clang-format on

// the numbers of RoPE type llama3
enum { ROPE_FACTOR, ROPE_LOW, ROPE_HIGH, ROPE_ORIGINAL, NUM_ROPE_NUMBERS };
static const char* const rope_names[NUM_ROPE_NUMBERS] = {"factor", "low_freq_factor", "high_freq_factor",
                                                         "original_max_position_embeddings"};
static const size_t rope_members[NUM_ROPE_NUMBERS] = {offsetof(ModelConfig, rope_factor), offsetof(ModelConfig, rope_low_freq),
                                                      offsetof(ModelConfig, rope_high_freq),
                                                      offsetof(ModelConfig, rope_original_len)};

/* One set of RoPE parameters. A file may hold two sets (rope_scaling and rope_parameters) and top-level numbers. */
typedef struct {
    const char* field;  // for messages
    bool has_theta, has_original, llama3;
    double theta, numbers[NUM_ROPE_NUMBERS];
} RopeFields;

/* Reads a positive number if the field exists; *has says whether it does. */
static inline bool config_positive(const Json* j, const JsonNode* object, const char* key, bool* has, double* out, Error* e) {
    *has = json_get(j, object, key) != NULL;
    return !*has || json_double(j, object, key, 1e-6, 1e15, out, e);
}

/* Reads rope_scaling or rope_parameters: an object that names its type as rope_type or as type. */
static inline bool config_read_rope(const Json* j, const JsonNode* o, RopeFields* r, Error* e) {
    if (o->type != JSON_OBJECT) { return json_wanted(j, json_root(j), r->field, e, "an object"); }
    for (const JsonNode* n = json_first(j, o); n; n = json_next(j, n)) {
        if (!json_is_container(n)) { continue; }
        return json_wanted(j, o, json_key(j, n, NULL), e, "a plain value: one set of RoPE parameters for all layers");
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
    for (int i = ROPE_FACTOR; i < ROPE_ORIGINAL; i++) {
        if (!json_double(j, o, rope_names[i], i == ROPE_FACTOR ? 1 : 1e-6, 1e6, &r->numbers[i], e)) { return false; }
    }
    const double low = r->numbers[ROPE_LOW];
    return config_positive(j, o, rope_names[ROPE_ORIGINAL], &r->has_original, &r->numbers[ROPE_ORIGINAL], e) &&
           (r->numbers[ROPE_HIGH] > low || json_wanted(j, o, rope_names[ROPE_HIGH], e, "more than low_freq_factor, %g", low));
}

/* Fails unless both sets are of one type and have the same numbers. */
static inline bool config_agree(const Json* j, const RopeFields* a, const RopeFields* b, Error* e) {
    if (a->llama3 != b->llama3) {
        return fail(e, "%s: %s.rope_type is \"%s\", but %s.rope_type is \"%s\": wanted one type", j->path, a->field,
                    a->llama3 ? "llama3" : "default", b->field, b->llama3 ? "llama3" : "default");
    }
    for (int i = 0; i < NUM_ROPE_NUMBERS; i++) {
        if (a->numbers[i] == b->numbers[i]) { continue; }
        return fail(e, "%s: %s.%s is %.17g, but %s.%s is %.17g: wanted one value", j->path, a->field, rope_names[i],
                    a->numbers[i], b->field, rope_names[i], b->numbers[i]);
    }
    return true;
}

/* Sets *theta, which an earlier field (`*from`) may have set already; fails if the two differ. */
static inline bool config_set_theta(const Json* j, double* theta, const char** from, double value, const char* field,
                                    Error* e) {
    if (*from && *theta != value) {
        return fail(e, "%s: %s is %.17g, but %s is %.17g: wanted one value", j->path, *from, *theta, field, value);
    }
    *theta = value;
    *from = field;
    return true;
}

/* Reads RoPE's parameters in every spelling: top-level rope_theta with rope_scaling (transformers 4), rope_parameters
 * (transformers 5), or all of them if they agree. */
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
    if (has && !config_set_theta(j, &c->rope_theta, &theta_from, theta, "rope_theta", e)) { return false; }
    for (int i = 0; i < 2; i++) {
        RopeFields* r = &both[i];
        const JsonNode* o = json_get(j, root, r->field);
        if (json_is_off(j, root, r->field)) { continue; }
        if (used && !theta_from) { theta_from = "rope_theta (absent)"; }  // transformers reads rope_scaling alone then
        if (!config_read_rope(j, o, r, e)) { return false; }
        const char* field = i == 0 ? "rope_scaling.rope_theta" : "rope_parameters.rope_theta";
        if (r->has_theta && !config_set_theta(j, &c->rope_theta, &theta_from, r->theta, field, e)) { return false; }
        bool outside = false;  // Phi-3's place for it: transformers takes this one first
        if (!config_positive(j, root, rope_names[ROPE_ORIGINAL], &outside, &theta, e)) { return false; }
        if (r->llama3 && outside) { r->numbers[ROPE_ORIGINAL] = theta; }
        if (r->llama3 && !outside && !r->has_original) { r->numbers[ROPE_ORIGINAL] = c->max_positions; }
        if (used && !config_agree(j, used, r, e)) { return false; }
        used = r;
    }
    c->rope_llama3 = used && used->llama3;
    for (int i = 0; c->rope_llama3 && i < NUM_ROPE_NUMBERS; i++) { *(double*)((char*)c + rope_members[i]) = used->numbers[i]; }
    return true;
}

/* Reads bos_token_id and eos_token_id; the latter is one id or a list. An id that is no token of the model begins or ends no
 * text: config_warn() names it. */
static inline bool config_read_ids(ModelConfig* c, const Json* j, Error* e) {
    const JsonNode* bos = json_get(j, json_root(j), "bos_token_id");
    const JsonNode* eos = json_get(j, json_root(j), "eos_token_id");
    int64_t id = -1;
    if (bos && !json_node_int(j, bos, &id)) { return json_wanted(j, json_root(j), "bos_token_id", e, "an integer"); }
    c->bos_id = id < c->vocab_size ? (int)id : -1;
    if (c->bos_id < 0) { c->bos_id = -1; }
    const bool list = eos && eos->type == JSON_ARRAY;
    for (const JsonNode* n = list ? json_first(j, eos) : eos; n; n = list ? json_next(j, n) : NULL) {
        if (!json_node_int(j, n, &id)) {
            return json_wanted(j, json_root(j), "eos_token_id", e, "an integer or a list of them");
        }
        if (c->num_eos == MAX_EOS) { return json_wanted(j, json_root(j), "eos_token_id", e, "up to %d ids", MAX_EOS); }
        if (id >= 0 && id < c->vocab_size) { c->eos_ids[c->num_eos++] = (int)id; }
    }
    return true;
}

/* Returns whether a list of layer_types has no other word than "full_attention". */
static inline bool config_is_full(const Json* j, const JsonNode* list) {
    const JsonNode* n = list->type == JSON_ARRAY ? json_first(j, list) : list;
    while (n && json_is_string(j, n, "full_attention")) { n = json_next(j, n); }
    return !n;
}

/* Checks that the model is a Llama: model_type, architectures, hidden_act, and no field of config_unsupported. */
static inline bool config_check_kind(const Json* j, Error* e) {
    const JsonNode* root = json_root(j);
    const char* text = NULL;
    if (root->type != JSON_OBJECT) { return fail(e, "%s: is not a JSON object, wanted a model's configuration", j->path); }
    if (!json_get(j, root, "model_type")) {
        return json_wanted(j, root, "model_type", e, "\"llama\": is this the config.json of a model?");
    }
    if (!json_text(j, root, "model_type", &text, e)) { return false; }
    if (strcmp(text, "llama") != 0) { return json_wanted(j, root, "model_type", e, "\"llama\""); }
    const JsonNode* kinds = json_get(j, root, "architectures");
    if (kinds && !(kinds->type == JSON_ARRAY && kinds->length == 0)) {
        const JsonNode* first = json_first(j, kinds);
        text = first ? json_string(j, first, NULL) : NULL;
        if (!text || (strcmp(text, "LlamaForCausalLM") != 0 && strcmp(text, "LlamaModel") != 0)) {
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
        if (strcmp(config_unsupported[i], "layer_types") == 0 && config_is_full(j, n)) { continue; }
        return json_wanted(j, root, config_unsupported[i], e, "no such field: it is not supported");
    }
    return true;
}

/* Reads one plain field. */
static inline bool config_read_field(ModelConfig* c, const Json* j, const ConfigField* field, Error* e) {
    const JsonNode* root = json_root(j);
    char* member = (char*)c + field->member;
    const bool absent = !json_get(j, root, field->name) && field->absent != CONFIG_REQUIRED;
    int64_t integer = (int64_t)field->absent;
    double number = field->absent;
    bool truth = field->absent != 0;
    switch (field->kind) {
        case CONFIG_FIXED: return true;
        case CONFIG_INT:
            if (!absent && !json_int(j, root, field->name, (int64_t)field->min, (int64_t)field->max, &integer, e)) {
                return false;
            }
            *(int*)member = (int)integer;
            return true;
        case CONFIG_FLOAT:
            if (!absent && !json_double(j, root, field->name, field->min, field->max, &number, e)) { return false; }
            *(float*)member = (float)number;
            return true;
        case CONFIG_BOOL:
            if (!absent && !json_bool(j, root, field->name, &truth, e)) { return false; }
            *(bool*)member = truth;
            return true;
    }
    return false;
}

/* Fills in num_kv_heads and head_dim if the file leaves them out; checks the heads against each other. */
static inline bool config_check_heads(ModelConfig* c, const Json* j, Error* e) {
    const JsonNode* root = json_root(j);
    const bool derived = c->head_dim == 0;
    if (c->num_kv_heads == 0) { c->num_kv_heads = c->num_heads; }
    if (c->num_heads % c->num_kv_heads != 0) {
        return json_wanted(j, root, "num_key_value_heads", e, "a divisor of num_attention_heads, %d", c->num_heads);
    }
    if (derived && c->hidden_size % c->num_heads != 0) {
        return json_wanted(j, root, "head_dim", e, "a number, since num_attention_heads %d does not divide hidden_size %d",
                           c->num_heads, c->hidden_size);
    }
    if (derived) { c->head_dim = c->hidden_size / c->num_heads; }
    if (c->head_dim < 2 || c->head_dim > MAX_HEAD_DIM || c->head_dim % 2 != 0) {
        return fail(e, "%s: head_dim is %d%s, wanted an even number from 2 to %d", j->path, c->head_dim,
                    derived ? " (hidden_size / num_attention_heads)" : "", MAX_HEAD_DIM);
    }
    return true;
}

/* Reads *c from a parsed config.json. */
static inline bool config_parse(ModelConfig* c, const Json* j, Error* e) {
    memset(c, 0, sizeof *c);
    if (!config_check_kind(j, e)) { return false; }
    for (int i = 0; i < NUM_CONFIG_FIELDS; i++) {
        if (!config_read_field(c, j, &config_fields[i], e)) { return false; }
    }
    return config_check_heads(c, j, e) && config_read_ids(c, j, e) && config_read_all_rope(c, j, e);
}

/* Reads a Hugging Face config.json. Refuses by name what we would compute wrongly; null means absent. */
static inline bool config_read(ModelConfig* c, const char* path, Error* e) {
    Json j;
    memset(c, 0, sizeof *c);
    if (!json_read_file(&j, path, 16 << 20, e)) { return false; }
    const bool ok = config_parse(c, &j, e);
    json_free(&j);
    return ok;
}

/* Returns pad_token_id of the text of a config.json that was read; -1: none. */
static inline int config_pad_of(const char* source, int vocab_size) {
    const char *from, *to;
    const long id =
        json_find_member(source, "pad_token_id", &from, &to) && *from >= '0' && *from <= '9' ? strtol(from, NULL, 10) : -1;
    return id < vocab_size ? (int)id : -1;
}

/* Returns the known field whose name is one edit away from `key`; NULL if there is none, or if `key` is known itself. */
static inline const char* config_meant(const char* key, size_t len) {
    // clang-format off
    static const char* const others[] = {
        "bos_token_id", "eos_token_id", "rope_theta", "rope_scaling", "rope_parameters", "rope_type", "type", "factor",
        "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "partial_rotary_factor", "dtype"
    };
    // clang-format on
    enum { UNSUPPORTED = sizeof config_unsupported / sizeof *config_unsupported, OTHERS = sizeof others / sizeof *others };
    const char* meant = NULL;
    for (int i = 0; i < NUM_CONFIG_FIELDS + UNSUPPORTED + OTHERS; i++) {
        const char* known = i < NUM_CONFIG_FIELDS                 ? config_fields[i].name
                            : i < NUM_CONFIG_FIELDS + UNSUPPORTED ? config_unsupported[i - NUM_CONFIG_FIELDS]
                                                                  : others[i - NUM_CONFIG_FIELDS - UNSUPPORTED];
        if (strlen(known) > len + 1 || len > strlen(known) + 1) { continue; }
        const int edits = edit_distance(key, known);
        if (edits == 0) { return NULL; }
        if (edits == 1) { meant = known; }
    }
    return meant;
}

/* Warns of ids that are no tokens of the model. */
static inline void config_warn_of_ids(const ModelConfig* c, const Json* j) {
    static const char* const fields[] = {"bos_token_id", "eos_token_id"};
    for (int i = 0; i < 2; i++) {
        const JsonNode* ids = json_get(j, json_root(j), fields[i]);
        const bool list = ids && ids->type == JSON_ARRAY;
        for (const JsonNode* n = list ? json_first(j, ids) : ids; n; n = list ? json_next(j, n) : NULL) {
            int64_t id = 0;
            if (!json_node_int(j, n, &id) || id < c->vocab_size) { continue; }
            warn("%s: %s has %lld, which is no token of the model's %d", j->path, fields[i], (long long)id, c->vocab_size);
        }
    }
}

/* Warns of fields that an accepted config.json may have lost: a field whose name is one edit off, and rope_theta beside RoPE
 * type llama3. Either changes the model. */
static inline void config_warn(const ModelConfig* c, const char* path) {
    Json j;
    Error ignored = NO_ERROR;
    if (!json_read_file(&j, path, 16 << 20, &ignored)) { return; }
    const JsonNode* root = json_root(&j);
    const JsonNode* objects[] = {root, json_get(&j, root, "rope_scaling"), json_get(&j, root, "rope_parameters")};
    bool has_theta = false;
    for (int i = 0; i < 3; i++) {
        has_theta = has_theta || json_get(&j, objects[i], "rope_theta");
        for (const JsonNode* n = objects[i] ? json_first(&j, objects[i]) : NULL; n; n = json_next(&j, n)) {
            const char *key = json_key(&j, n, NULL), *meant = config_meant(key, n->key_len);
            if (meant) { warn("%s: the field \"%s\" is unknown and ignored, did you mean \"%s\"?", path, key, meant); }
        }
    }
    config_warn_of_ids(c, &j);
    if (!json_is_off(&j, root, "attention_dropout")) { warn("%s: attention_dropout: training here has no dropout", path); }
    if (c->rope_llama3 && !has_theta) {
        warn("%s: has RoPE of type llama3, but no rope_theta: it is %g, as in transformers", path, c->rope_theta);
    }
    json_free(&j);
}

// ---------------------------------------------------------------------------------------------------------------------
// writing

/* Writes the value of a plain field. A fixed one is as in `source`, the text of the config.json that was read, if it is there:
 * that was found to mean the same. NULL: the model is new. */
static inline void config_write_value(FILE* f, const ModelConfig* c, const ConfigField* field, const char* source) {
    const char *member = (const char*)c + field->member, *from, *to;
    const bool names_kind = strcmp(field->name, "architectures") == 0 || strcmp(field->name, "model_type") == 0;
    switch (field->kind) {
        case CONFIG_FIXED:
            if (source && !names_kind && json_find_member(source, field->name, &from, &to) && strncmp(from, "null", 4) != 0) {
                fwrite(from, 1, (size_t)(to - from), f);
            } else {
                fputs(field->text, f);
            }
            break;
        case CONFIG_INT: fprintf(f, "%d", *(const int*)member); break;
        case CONFIG_FLOAT: json_write_float(f, *(const float*)member); break;
        case CONFIG_BOOL: fputs(*(const bool*)member ? "true" : "false", f); break;
    }
}

/* Writes the parameters of RoPE's type, without braces. Floats keep their decimal point, which transformers 5 wants; the
 * original length is an integer there. */
static inline void config_write_rope(FILE* f, const ModelConfig* c) {
    fprintf(f, "\"rope_type\": \"%s\"", c->rope_llama3 ? "llama3" : "default");
    for (int i = 0; c->rope_llama3 && i < NUM_ROPE_NUMBERS; i++) {
        const double value = *(const double*)((const char*)c + rope_members[i]);
        fprintf(f, ", \"%s\": ", rope_names[i]);
        if (i == ROPE_ORIGINAL && value == floor(value)) {
            fprintf(f, "%.0f", value);
        } else {
            json_write_double(f, value);
        }
    }
}

/* Writes the members of `source` that the text so far does not have: what we do not know stays as it is. */
static inline void config_write_others(FILE* f, const char* text, const char* source) {
    const char *from, *to;
    Json j;
    Error ignored = NO_ERROR;  // it was parsed when it was read
    if (!source || !json_parse(&j, xstrdup(source), strlen(source), "config.json", &ignored)) { return; }
    for (const JsonNode* n = json_first(&j, json_root(&j)); n; n = json_next(&j, n)) {
        const char* key = json_key(&j, n, NULL);
        if (json_find_member(text, key, &from, &to) || !json_find_member(source, key, &from, &to)) { continue; }
        fputs(",\n  ", f);
        json_write_text(f, key);
        fprintf(f, ": %.*s", (int)(to - from), from);
    }
    json_free(&j);
}

/* Writes config.json and flushes it to disk. transformers loads the weights as `dtype` (F32, BF16 or F16). RoPE is written in
 * the spellings of transformers 4 and 5. `source`: the text of the config.json that was read, whose other members are kept;
 * NULL: none. */
static inline bool config_write(const ModelConfig* c, const char* path, SafeDtype dtype, const char* source, Error* e) {
    const char* torch_dtype = dtype == SAFE_BF16 ? "bfloat16" : dtype == SAFE_F16 ? "float16" : "float32";
    char* text = NULL;
    size_t size = 0;
    FILE* f = xopen_memory(&text, &size);
    fputs("{\n", f);
    for (int i = 0; i < NUM_CONFIG_FIELDS; i++) {
        fprintf(f, "  \"%s\": ", config_fields[i].name);
        config_write_value(f, c, &config_fields[i], source);
        fputs(",\n", f);
    }
    fputs("  \"bos_token_id\": ", f);
    json_write_ids(f, &c->bos_id, c->bos_id >= 0);
    fputs(",\n  \"eos_token_id\": ", f);
    json_write_ids(f, c->eos_ids, c->num_eos);
    fputs(",\n", f);
    fputs("  \"rope_theta\": ", f);
    json_write_double(f, c->rope_theta);
    fputs(c->rope_llama3 ? ",\n  \"rope_scaling\": {" : ",\n  \"rope_scaling\": null", f);
    if (c->rope_llama3) { config_write_rope(f, c); }
    fputs(c->rope_llama3 ? "}" : "", f);
    fputs(",\n  \"rope_parameters\": {\"rope_theta\": ", f);
    json_write_double(f, c->rope_theta);
    fputs(", ", f);
    config_write_rope(f, c);
    fprintf(f, "},\n  \"dtype\": \"%s\",\n  \"torch_dtype\": \"%s\"\n}\n", torch_dtype, torch_dtype);
    xclose_memory(f, &text);
    f = create_output(path, e);
    if (f) {
        fwrite(text, 1, size - strlen("\n}\n"), f);
        config_write_others(f, text, source);
        fputs("\n}\n", f);
    }
    free(text);
    return f && close_output(f, path, e);
}

#endif
