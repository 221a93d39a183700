/* adapter.h -- reads and writes LoRA's adapters in PEFT's layout. adapter_config.json says their scale and names the folder of
 * the base model. adapter_model.safetensors holds A and B of each matrix that has adapters.
 *
 *   {"peft_type": "LORA", "base_model_name_or_path": DIR, "r": R, "lora_alpha": ALPHA, "target_modules": ["q_proj", ...], ...}
 *
 * Which matrices have adapters, the tensors say: target_modules may be names, ends of names, a regular expression. The reader
 * refuses by name whatever we would compute wrongly: another method, DoRA, ranks that differ, layers without adapters, whole
 * matrices beside them, and starts that change the base's weights. It ignores members that do not change the computation.
 */
#ifndef LLMC_ADAPTER_H
#define LLMC_ADAPTER_H

#include "llmc/base/utils.h"

#include "llmc/base/text.h"           // defines: text_ends, text_starts
#include "llmc/config.h"              // defines: LoraConfig, lora_pairs, ParamTable
#include "llmc/files/json.h"          // defines: json_is_off, json_read_file, json_wanted
#include "llmc/files/model_folder.h"  // defines: ModelFiles, model_find, model_read, model_save_shard

#include <strings.h>

#define ADAPTER_CONFIG "adapter_config.json"
#define ADAPTER_WEIGHTS "adapter_model.safetensors"

enum { LORA_MOST_RANK = 4096 };
static const double LORA_LEAST_ALPHA = 1e-6;

/* The contents of adapter_config.json. */
typedef struct {
    LoraConfig lora;
    double dropout;       // used in its training; we apply none
    char base[PATH_CAP];  // the base model's folder, or its name on the hub; "": not named
} AdapterConfig;

/* Returns whether a folder holds adapters instead of a model. The base's config.json may lie beside them. */
static inline bool folder_is_adapter(const char* dir) { return folder_has(dir, ADAPTER_CONFIG) && !model_has_weights(dir); }

// ---------------------------------------------------------------------------------------------------------------------
// adapter_config.json

#define ADAPTER_HINT "\n  hint: if PEFT loads them with the base, its merge_and_unload() and save_pretrained() write one model"

/* Returns whether a member, if it is on, changes the computation in a way that we do not do. Variants that this list does not
 * know have members such as use_NAME or NAME_config. */
static inline bool adapter_is_variant(const char* key) {
    static const char variants[] =
        " lora_bias modules_to_save layer_replication alpha_pattern target_parameters "
        "trainable_token_indices alora_invocation_tokens ";
    static const char plain[] = " use_rslora eva_config loftq_config corda_config lora_ga_config velora_config runtime_config ";
    char word[64];
    snprintf(word, sizeof word, " %.60s ", key);
    return strstr(variants, word) || (!strstr(plain, word) && (text_starts(key, "use_") || text_ends(key, "_config")));
}

static inline bool adapter_refuse(const Json* j, const char* key, const char* wanted, Error* e) {
    char found[128];
    return fail(e, "%s: %s is %s, wanted %s" ADAPTER_HINT, j->path, key,
                json_show(found, sizeof found, j, json_get(j, json_root(j), key)), wanted);
}

/* Refuses what changes the computation in a way that we do not do. */
static inline bool adapter_check_plain(const Json* j, Error* e) {
    static const char* const starts[] = {"gaussian", "eva", "orthogonal", "mica"};  // they leave the base's weights as they are
    const JsonNode* root = json_root(j);
    if (!json_is_string(j, json_get(j, root, "peft_type"), "LORA")) { return json_wanted(j, root, "peft_type", e, "\"LORA\""); }
    for (const JsonNode* n = json_first(j, root); n; n = json_next(j, n)) {
        const char* key = json_key(j, n, NULL);
        if (adapter_is_variant(key) && !json_is_off(j, json_root(j), key)) {
            return adapter_refuse(j, key, "none: plain LoRA alone is known here", e);
        }
    }
    const JsonNode* start = json_get(j, root, "init_lora_weights");
    const char* word = start ? json_string(j, start, NULL) : NULL;
    if (!word) { return true; }
    for (size_t i = 0; i < sizeof starts / sizeof *starts; i++) {
        if (strcasecmp(word, starts[i]) == 0) { return true; }
    }
    return adapter_refuse(j, "init_lora_weights", "true: this start changes the base's weights", e);
}

/* Refuses tensors beside a matrix that a list of names in target_modules leaves out: PEFT ignores them. */
static inline bool adapter_check_targets(const Json* j, unsigned on, Error* e) {
    const JsonNode* list = json_get(j, json_root(j), "target_modules");
    for (int i = 0; list && list->type == JSON_ARRAY && i < NUM_LORA_PAIRS; i++) {
        const JsonNode* n = json_first(j, list);
        while (n && !text_ends(json_string(j, n, NULL) ? json_string(j, n, NULL) : "", lora_pairs[i].name)) {
            n = json_next(j, n);
        }
        if (n || !(on >> i & 1)) { continue; }
        return fail(e, "%s: target_modules does not name %s, but " ADAPTER_WEIGHTS " has adapters beside it", j->path,
                    lora_pairs[i].name);
    }
    return true;
}

/* Takes the matrices from the names of the tensors, and the rank, too, if rank_pattern gives some matrices another one. */
static inline bool adapter_read_tensors(const Json* j, const SafeTensors* file, LoraConfig* l, Error* e) {
    const bool own_rank = !json_is_off(j, json_root(j), "rank_pattern");
    const JsonNode* some = json_get(j, json_root(j), "layers_to_transform");
    size_t tensors = 0;
    for (int i = 0; i < NUM_LORA_PAIRS; i++) {
        char part[32];
        snprintf(part, sizeof part, "%s.lora_A.", lora_pairs[i].name);
        for (size_t k = 0; k < file->count; k++) {
            const SafeTensor* t = &file->tensors[k];
            if (!strstr(t->name, part) || t->ndim != 2) { continue; }
            if (l->on == 0 && own_rank && t->shape[0] <= LORA_MOST_RANK) { l->rank = (int)t->shape[0]; }
            if (own_rank && t->shape[0] != (size_t)l->rank) { return adapter_refuse(j, "rank_pattern", "one rank for all", e); }
            l->on |= 1u << i;
            tensors += i == __builtin_ctz(l->on);  // one a layer
        }
    }
    if (l->on == 0) {
        return fail(e, "%s: holds no adapter of a Llama's matrix, such as layers.0.self_attn.q_proj.lora_A.weight", file->path);
    }
    if (some && some->type == JSON_ARRAY && json_length(some) != tensors) {
        return fail(e, "%s: layers_to_transform names %zu layers, but " ADAPTER_WEIGHTS " has adapters in %zu", j->path,
                    json_length(some), tensors);
    }
    return adapter_check_targets(j, l->on, e);
}

static inline bool adapter_parse_config(const Json* j, const SafeTensors* file, AdapterConfig* a, Error* e) {
    const JsonNode* root = json_root(j);
    char* base = NULL;
    int64_t rank = 0;
    bool rank_stable = false;
    if (!adapter_check_plain(j, e) || !json_int(j, root, "r", 1, LORA_MOST_RANK, &rank, e) ||
        !json_bool_or(j, root, "use_rslora", &rank_stable, e) ||
        !json_double(j, root, "lora_alpha", LORA_LEAST_ALPHA, rank_stable ? 1e4 : 1e6, &a->lora.alpha, e) ||
        !json_double_or(j, root, "lora_dropout", 0, 1, &a->dropout, e) ||
        (json_get(j, root, "base_model_name_or_path") && !json_bytes(j, root, "base_model_name_or_path", &base, e))) {
        return false;
    }
    a->lora.rank = (int)rank;
    const bool fits = snprintf(a->base, sizeof a->base, "%s", base ? base : "") < (int)sizeof a->base;
    free(base);
    if (!fits) { return fail(e, "%s: base_model_name_or_path is longer than %d bytes", j->path, PATH_CAP - 1); }
    if (!adapter_read_tensors(j, file, &a->lora, e)) { return false; }
    if (rank_stable) { a->lora.alpha *= sqrt(a->lora.rank); }  // such a scale is alpha / sqrt(rank)
    return true;
}

/* Opens dir/adapter_model.safetensors. Close with model_close(), also after a failure. */
static inline bool adapter_open_file(ModelFiles* m, const char* dir, Error* e) {
    memset(m, 0, sizeof *m);
    if (!folder_has(dir, ADAPTER_WEIGHTS) && folder_has(dir, "adapter_model.bin")) {
        return fail(
            e,
            "%s: holds adapter_model.bin, wanted " ADAPTER_WEIGHTS
            "\n  hint: AutoPeftModelForCausalLM.from_pretrained() of PEFT reads it, save_pretrained() writes safetensors",
            dir);
    }
    if (!folder_has(dir, ADAPTER_WEIGHTS)) { return fail(e, "%s: holds no " ADAPTER_WEIGHTS, dir); }
    return model_open_shard(m, dir, ADAPTER_WEIGHTS, e);
}

/* Reads dir/adapter_config.json, and the names of the tensors beside it. */
static inline bool adapter_read_config(const char* dir, AdapterConfig* a, Error* e) {
    char path[PATH_CAP];
    Json j;
    ModelFiles m;
    memset(a, 0, sizeof *a);
    if (!path_join(path, dir, ADAPTER_CONFIG, e) || !json_read_file(&j, path, 16 << 20, e)) { return false; }
    const bool ok = adapter_open_file(&m, dir, e) && adapter_parse_config(&j, &m.shards[0], a, e);
    model_close(&m);
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
static inline bool adapter_match(const ModelFiles* m, const ParamTable* t, Error* e) {
    static const char says[] = ADAPTER_CONFIG " and the base model say";
    const SafeTensors* file = &m->shards[0];
    for (int i = 0; i < t->count; i++) {
        const Param* p = &t->items[i];
        const SafeTensor* s = model_find(m, p->name, &file);
        if (!s) {
            return fail(e, "%s: tensor \"%s\" is missing, wanted the same adapters in every layer" ADAPTER_HINT, file->path,
                        p->name);
        }
        if (!model_match_tensor(file, s, p, says, e)) { return false; }
    }
    for (size_t i = 0; i < file->count && file->count > (size_t)t->count; i++) {
        const SafeTensor* s = &file->tensors[i];
        char found[100];
        if (model_uses(m, t, s)) { continue; }
        return fail(e, "%s: tensor \"%s\" is not one of the %d adapters of its matrices" ADAPTER_HINT, file->path,
                    show_text(found, sizeof found, s->name, strlen(s->name)), t->count);
    }
    return true;
}

/* Opens the adapters of a folder and checks them against the table. Close with model_close(), also after a failure. */
static inline bool adapter_open(ModelFiles* m, const char* dir, const ParamTable* t, Error* e) {
    return adapter_open_file(m, dir, e) && adapter_match(m, t, e);
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
