/* adapter.h -- reads and writes LoRA's adapters in PEFT's layout. adapter_config.json says which matrices have adapters, of
 * which rank and scale, and names the base model's folder. adapter_model.safetensors holds A and B of each.
 *
 *   {"peft_type": "LORA", "base_model_name_or_path": DIR, "r": R, "lora_alpha": ALPHA, "target_modules": ["q_proj", ...], ...}
 *
 * The reader refuses by name whatever we would compute wrongly: another method, biases, DoRA, rsLoRA, ranks that differ, other
 * modules, and starts that change the base's weights. The tensors must be exactly the table of adapters (trained_table()).
 */
#ifndef LLMC_ADAPTER_H
#define LLMC_ADAPTER_H

#include "llmc/base/utils.h"

#include "llmc/config.h"              // defines: LoraConfig, lora_pairs, ParamTable
#include "llmc/files/json.h"          // defines: json_read_file, json_wanted
#include "llmc/files/model_folder.h"  // defines: ModelFiles, model_open_shard, model_match_tensor, model_read, model_save_shard

#define ADAPTER_CONFIG "adapter_config.json"
#define ADAPTER_WEIGHTS "adapter_model.safetensors"

enum { LORA_MOST_RANK = 4096 };
static const double LORA_LEAST_ALPHA = 1e-6;

/* The contents of adapter_config.json. */
typedef struct {
    LoraConfig lora;
    double dropout;       // used in its training; we apply none
    char base[PATH_CAP];  // the base model's folder, or its name on the hub
} AdapterConfig;

/* Returns whether a folder holds adapters instead of a model. */
static inline bool folder_is_adapter(const char* dir) {
    return folder_has(dir, ADAPTER_CONFIG) && !folder_has(dir, "config.json");
}

// ---------------------------------------------------------------------------------------------------------------------
// adapter_config.json

/* Returns whether a member is absent, or a value that means off, also [] and {}. */
static inline bool adapter_is_off(const Json* j, const char* key) {
    const JsonNode* n = json_get(j, json_root(j), key);
    const bool container = n && (n->type == JSON_ARRAY || n->type == JSON_OBJECT);
    return container ? json_length(n) == 0 : json_is_off(j, json_root(j), key);
}

/* Refuses what changes the computation in a way that we do not do. */
static inline bool adapter_check_plain(const Json* j, Error* e) {
    static const char* const off[] = {"use_dora",
                                      "use_rslora",
                                      "fan_in_fan_out",
                                      "lora_bias",
                                      "use_qalora",
                                      "modules_to_save",
                                      "layers_to_transform",
                                      "layer_replication",
                                      "rank_pattern",
                                      "alpha_pattern",
                                      "exclude_modules",
                                      "target_parameters",
                                      "megatron_config",
                                      "trainable_token_indices",
                                      "alora_invocation_tokens"};
    const JsonNode* root = json_root(j);
    if (!json_is_string(j, json_get(j, root, "peft_type"), "LORA")) { return json_wanted(j, root, "peft_type", e, "\"LORA\""); }
    for (size_t i = 0; i < sizeof off / sizeof *off; i++) {
        if (!adapter_is_off(j, off[i])) { return json_wanted(j, root, off[i], e, "none: plain LoRA alone is known here"); }
    }
    if (json_get(j, root, "bias") && !json_is_string(j, json_get(j, root, "bias"), "none")) {
        return json_wanted(j, root, "bias", e, "\"none\"");
    }
    const JsonNode* start = json_get(j, root, "init_lora_weights");
    if (start && start->type == JSON_STRING && !json_is_string(j, start, "gaussian") && !json_is_string(j, start, "eva")) {
        return json_wanted(j, root, "init_lora_weights", e, "true: others change the base's weights");
    }
    return true;
}

/* Reads target_modules, a list of names, into the bits of LoraConfig.on. */
static inline bool adapter_read_targets(const Json* j, unsigned* on, Error* e) {
    const JsonNode* root = json_root(j);
    const JsonNode* list = json_get(j, root, "target_modules");
    if (!list || list->type != JSON_ARRAY || json_length(list) == 0) {
        return json_wanted(j, root, "target_modules", e, "a list of names such as \"q_proj\"");
    }
    *on = 0;
    for (const JsonNode* n = json_first(j, list); n; n = json_next(j, n)) {
        char shown[128];
        int i = 0;
        while (i < NUM_LORA_PAIRS && !json_is_string(j, n, lora_pairs[i].name)) { i++; }
        if (i == NUM_LORA_PAIRS) {
            return fail(e,
                        "%s: target_modules holds %s, wanted some of \"q_proj\", \"k_proj\", \"v_proj\", \"o_proj\", "
                        "\"gate_proj\", \"up_proj\", \"down_proj\"",
                        j->path, json_show(shown, sizeof shown, j, n));
        }
        *on |= 1u << i;
    }
    return true;
}

static inline bool adapter_parse_config(const Json* j, AdapterConfig* a, Error* e) {
    const JsonNode* root = json_root(j);
    char* base = NULL;
    int64_t rank = 0;
    if (!adapter_check_plain(j, e) || !adapter_read_targets(j, &a->lora.on, e) ||
        !json_int(j, root, "r", 1, LORA_MOST_RANK, &rank, e) ||
        !json_double(j, root, "lora_alpha", LORA_LEAST_ALPHA, 1e6, &a->lora.alpha, e) ||
        !json_double_or(j, root, "lora_dropout", 0, 1, &a->dropout, e) ||
        !json_bytes(j, root, "base_model_name_or_path", &base, e)) {
        return false;
    }
    a->lora.rank = (int)rank;
    const bool fits = snprintf(a->base, sizeof a->base, "%s", base) < (int)sizeof a->base;
    free(base);
    return fits || fail(e, "%s: base_model_name_or_path is longer than %d bytes", j->path, PATH_CAP - 1);
}

/* Reads dir/adapter_config.json. */
static inline bool adapter_read_config(const char* dir, AdapterConfig* a, Error* e) {
    char path[PATH_CAP];
    Json j;
    memset(a, 0, sizeof *a);
    if (!path_join(path, dir, ADAPTER_CONFIG, e) || !json_read_file(&j, path, 16 << 20, e)) { return false; }
    const bool ok = adapter_parse_config(&j, a, e);
    json_free(&j);
    return ok;
}

/* Writes dir/adapter_config.json with the members that PEFT writes for plain LoRA. */
static inline bool adapter_write_config(const char* dir, const LoraConfig* l, const char* base, Error* e) {
    char path[PATH_CAP];
    if (!path_join(path, dir, ADAPTER_CONFIG, e)) { return false; }
    FILE* f = create_output(path, e);
    if (!f) { return false; }
    fputs("{\n  \"peft_type\": \"LORA\",\n  \"task_type\": \"CAUSAL_LM\",\n  \"base_model_name_or_path\": ", f);
    json_write_bytes(f, base);
    fprintf(f, ",\n  \"r\": %d,\n  \"lora_alpha\": ", l->rank);
    if (l->alpha == floor(l->alpha)) {
        fprintf(f, "%.0f", l->alpha);
    } else {
        json_write_double(f, l->alpha);
    }
    fputs(",\n  \"lora_dropout\": 0.0,\n  \"bias\": \"none\",\n  \"target_modules\": [", f);
    const char* comma = "";
    for (int i = 0; i < NUM_LORA_PAIRS; i++) {
        if (!(l->on >> i & 1)) { continue; }
        fprintf(f, "%s\"%s\"", comma, lora_pairs[i].name);
        comma = ", ";
    }
    fputs(
        "],\n  \"fan_in_fan_out\": false,\n  \"inference_mode\": true,\n  \"init_lora_weights\": true,\n"
        "  \"modules_to_save\": null,\n  \"use_dora\": false,\n  \"use_rslora\": false\n}\n",
        f);
    return close_output(f, path, e);
}

// ---------------------------------------------------------------------------------------------------------------------
// adapter_model.safetensors

/* Checks that an open file holds exactly the adapters of the table. */
static inline bool adapter_match(const SafeTensors* file, const ParamTable* t, Error* e) {
    static const char says[] = ADAPTER_CONFIG " and the base model say";
    for (int i = 0; i < t->count; i++) {
        const Param* p = &t->items[i];
        const SafeTensor* s = safetensors_find(file, p->name);
        if (!s) {
            return fail(e, "%s: tensor \"%s\" is missing, wanted %zu by %zu as %s", file->path, p->name, p->rows, p->cols,
                        says);
        }
        if (!model_match_tensor(file, s, p, says, e)) { return false; }
    }
    for (size_t i = 0; i < file->count && file->count > (size_t)t->count; i++) {
        const char* name = file->tensors[i].name;
        char found[100];
        if (param_find(t, name)) { continue; }
        return fail(e, "%s: tensor \"%s\" is not one of the %d adapters of " ADAPTER_CONFIG, file->path,
                    show_text(found, sizeof found, name, strlen(name)), t->count);
    }
    return true;
}

/* Opens the adapters of a folder and checks them against the table. Close with model_close(), also after a failure. */
static inline bool adapter_open(ModelFiles* m, const char* dir, const ParamTable* t, Error* e) {
    memset(m, 0, sizeof *m);
    if (!folder_has(dir, ADAPTER_WEIGHTS)) { return fail(e, "%s: holds no " ADAPTER_WEIGHTS, dir); }
    return model_open_shard(m, dir, ADAPTER_WEIGHTS, e) && adapter_match(&m->shards[0], t, e);
}

/* Checks names, shapes and dtypes of the adapters; reads no weights. */
static inline bool adapter_check(const char* dir, const ParamTable* t, Error* e) {
    ModelFiles m;
    const bool ok = adapter_open(&m, dir, t, e);
    model_close(&m);
    return ok;
}

/* Passes every adapter to the slot's sink, as model_load_sums() does. */
static inline bool adapter_load(const char* dir, const ParamTable* t, const FileSums* wanted, StateSlot to, Error* e) {
    ModelFiles m;
    const bool ok = adapter_open(&m, dir, t, e) && model_read(&m, t, wanted, NULL, to, NULL, e);
    model_close(&m);
    return ok;
}

/* Writes both files into an existing folder, the adapters in F32. `base`: the base model's folder. Appends size and checksum
 * of the weights to `sums`. */
static inline bool adapter_save(const char* dir, const LoraConfig* l, const char* base, const ParamTable* t, StateSlot adapters,
                                FileSums* sums, Error* e) {
    adapters.dtype = SAFE_F32;
    return adapter_write_config(dir, l, base, e) && model_save_shard(dir, ADAPTER_WEIGHTS, t, 0, t->count, &adapters, sums, e);
}

#endif
