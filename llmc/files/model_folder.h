/* model_folder.h -- reads and writes a model in Hugging Face's layout: config.json, and the weights in model.safetensors or
 * in the shards that model.safetensors.index.json names:
 *
 *   {"metadata": {"total_size": BYTES}, "weight_map": {TENSOR: FILE, ...}}
 *
 * We write that index beside a single file, too: without it some loaders take every *.safetensors for weights, a checkpoint's
 * optimizer state included.
 *
 * model_check() validates a folder without reading a weight: the ranges in config.json; that the folder holds exactly the
 * tensors of the parameter table, with their shapes and dtypes. It ignores the `inv_freq` buffers of old files and refuses any
 * other unknown tensor: leaving out, say, a bias would compute another model. A tied model may carry lm_head.weight if it
 * equals the embedding; model_load_sums() checks that. The index only says which files there are: as in transformers, it may
 * list a tensor that no file has, or leave one out.
 *
 * model_load_sums() reads the weights with all threads (tensor_stream.h) and refuses a value that is not finite. Writing
 * refuses a weight that is finite, but would be infinite in the file's dtype. model_save_weights() and
 * model_save_generation() write such a folder.
 */
#ifndef LLMC_MODEL_FOLDER_H
#define LLMC_MODEL_FOLDER_H

#include "llmc/base/utils.h"

#include <fnmatch.h>

#include "llmc/base/text.h"  // defines: text_ends, show_text
#include "llmc/config.h"
#include "llmc/files/config_file.h"
#include "llmc/files/file_sums.h"
#include "llmc/files/folder.h"
#include "llmc/files/safetensors.h"
#include "llmc/files/tensor_stream.h"

enum { MODEL_MAX_SHARDS = 512 };  // files of a model; each holds a descriptor while it is open
#ifndef MODEL_SHARD_BYTES
#define MODEL_SHARD_BYTES 5000000000ull  // most bytes of tensors in a shard (as transformers), unless one tensor has more
#endif

// ---------------------------------------------------------------------------------------------------------------------
// reading

typedef struct {
    SafeTensors* shards;
    size_t count;
} ModelFiles;

static inline void model_close(ModelFiles* m) {
    for (size_t i = 0; i < m->count; i++) { safetensors_close(&m->shards[i]); }
    free(m->shards);
    memset(m, 0, sizeof *m);
}

static inline bool model_open_shard(ModelFiles* m, const char* dir, const char* name, Error* e) {
    char path[PATH_CAP];
    m->shards = (SafeTensors*)xrealloc(m->shards, (m->count + 1) * sizeof(SafeTensors));
    memset(&m->shards[m->count++], 0, sizeof(SafeTensors));
    return path_join(path, dir, name, e) && safetensors_open(&m->shards[m->count - 1], path, e);
}

/* Opens the files that an index names. Which of them holds a tensor does not matter: model_match() looks into all. */
static inline bool model_open_index(ModelFiles* m, const char* dir, const Json* j, Error* e) {
    const JsonNode* map = json_get(j, json_root(j), "weight_map");
    if (!map || map->type != JSON_OBJECT || json_length(map) == 0) {
        return json_wanted(j, json_root(j), "weight_map", e, "an object that names each tensor's file");
    }
    size_t last = 0;
    char shown[100];
    for (const JsonNode* n = json_first(j, map); n; n = json_next(j, n)) {
        size_t len = 0;
        const char* name = json_string(j, n, &len);
        // a name with a slash could leave the folder
        if (!name || len == 0 || strlen(name) != len || strchr(name, '/') || name[0] == '.') {
            return json_wanted(j, map, json_key(j, n, NULL), e, "the name of a file in this folder");
        }
        if (m->count == 0 || strcmp(file_name(m->shards[last].path), name) != 0) {
            for (last = 0; last < m->count && strcmp(file_name(m->shards[last].path), name) != 0;) { last++; }
        }
        if (last < m->count) { continue; }
        if (last == MODEL_MAX_SHARDS) { return fail(e, "%s: weight_map names more than %d files", j->path, MODEL_MAX_SHARDS); }
        if (!folder_has(dir, name)) {
            return fail(
                e,
                "%s: weight_map names %s, which is not in the folder\n  hint: the command that downloaded the others continues",
                j->path, show_text(shown, sizeof shown, name, len));
        }
        if (!model_open_shard(m, dir, name, e)) { return false; }
    }
    return true;
}

/* Returns whether a folder holds a model's weights, as model_open() finds them. */
static inline bool model_has_weights(const char* dir) {
    return folder_has(dir, "model.safetensors") || folder_has(dir, "model.safetensors.index.json");
}

/* Fails for a folder without weights that we read: names the weights in another format that it holds, and the way out. */
static inline bool model_fail_without_weights(const char* dir, Error* e) {
    static const struct {
        const char *pattern, *hint;
    } others[] = {{"pytorch_model*.bin", "load it with transformers and save_pretrained(), which writes safetensors"},
                  {"*.gguf", "no job reads GGUF: give the Hugging Face folder that it was made from"},
                  {"*.pth", "the hub has the same model in Hugging Face's format"},
                  {"consolidated*.safetensors", "the hub has the same model in Hugging Face's format"},
                  {"zero_to_fp32.py", "in that folder, python3 zero_to_fp32.py . . --safe_serialization writes it"},
                  {"pytorch_model_fsdp_*", "accelerate merge-weights makes it of this folder of FSDP"}};
    const size_t num = sizeof others / sizeof *others;
    char name[256] = "";
    size_t kind = num;
    struct dirent* entry = NULL;
    Error ignored = NO_ERROR;
    DIR* d = opendir(dir);
    while (d && kind == num && folder_next(d, dir, &entry, &ignored) && entry) {
        for (kind = 0; kind < num && fnmatch(others[kind].pattern, entry->d_name, 0) != 0;) { kind++; }
        snprintf(name, sizeof name, "%s", entry->d_name);
    }
    if (d) { closedir(d); }
    if (kind == num) { return fail(e, "%s: holds no weights, wanted model.safetensors or model.safetensors.index.json", dir); }
    return fail(e, "%s: holds %s, wanted model.safetensors\n  hint: %s", dir, name, others[kind].hint);
}

/* Opens model.safetensors, or the shards of model.safetensors.index.json. Close with model_close(), also after a failure. */
static inline bool model_open(ModelFiles* m, const char* dir, Error* e) {
    char path[PATH_CAP];
    memset(m, 0, sizeof *m);
    if (folder_has(dir, "model.safetensors")) { return model_open_shard(m, dir, "model.safetensors", e); }
    if (!path_join(path, dir, "model.safetensors.index.json", e)) { return false; }
    if (!folder_has(dir, "model.safetensors.index.json")) { return model_fail_without_weights(dir, e); }
    Json j;
    if (!json_read_file(&j, path, 64 << 20, e)) { return false; }
    const bool ok = model_open_index(m, dir, &j, e);
    json_free(&j);
    return ok;
}

/* Returns the tensor of exactly this name and sets *file to the file that holds it; NULL if there is none. If several do,
 * the file whose name sorts last counts, as in transformers, whatever the index says. */
static inline const SafeTensor* model_find_exactly(const ModelFiles* m, const char* name, const SafeTensors** file) {
    const SafeTensor* found = NULL;
    for (size_t i = 0; i < m->count; i++) {
        const SafeTensor* t = safetensors_find(&m->shards[i], name);
        if (!t || (found && strcmp(m->shards[i].path, (*file)->path) < 0)) { continue; }
        found = t;
        *file = &m->shards[i];
    }
    return found;
}

/* Returns the tensor of a parameter under any name that transformers or PEFT takes for `name`, and sets *file to the file that
 * holds it; NULL if there is none. A model without its head has names without "model." or with two of them. Adapters lack
 * PEFT's "base_model.model.", or have the name of the adapter behind "lora_A". */
static inline const SafeTensor* model_find(const ModelFiles* m, const char* name, const SafeTensors** file) {
    static const char* const prefixes[] = {"base_model.model.", "model."};
    char other[128];
    const SafeTensor* t = model_find_exactly(m, name, file);
    const char* rest = name;
    for (int i = 0; !t && i < 2; i++) {
        if (strncmp(rest, prefixes[i], strlen(prefixes[i])) != 0) { continue; }
        rest += strlen(prefixes[i]);
        t = model_find_exactly(m, rest, file);
    }
    const size_t stem = strlen(name) - strlen(strrchr(name, '.'));
    snprintf(other, sizeof other, strstr(name, ".lora_") ? "%.*s.default%s" : "model.%.*s%s", (int)stem, name, name + stem);
    return t ? t : model_find_exactly(m, other, file);
}

/* Returns whether a tensor of the files is a parameter of the table. */
static inline bool model_uses(const ModelFiles* m, const ParamTable* t, const SafeTensor* tensor) {
    const SafeTensors* file = NULL;
    for (int i = 0; i < t->count; i++) {
        if (model_find(m, t->items[i].name, &file) == tensor) { return true; }
    }
    return false;
}

/* Checks that a tensor of a file has the shape of a parameter; `says`: what says so. */
static inline bool model_match_tensor(const SafeTensors* file, const SafeTensor* t, const Param* p, const char* says,
                                      Error* e) {
    const bool matrix = param_specs[p->kind].matrix;
    const int ndim = matrix ? 2 : 1;
    char found[256];
    if (t->dtype != SAFE_F32 && t->dtype != SAFE_BF16 && t->dtype != SAFE_F16) {
        return fail(e, "%s: %s.dtype is %s, wanted F32, BF16 or F16", file->path, t->name, safe_dtypes[t->dtype].name);
    }
    if (t->ndim == ndim && t->shape[ndim - 1] == p->cols && (!matrix || t->shape[0] == p->rows)) { return true; }
    safe_shape(found, sizeof found, t);
    if (matrix) {
        return fail(e, "%s: %s.shape is %s, wanted [%zu, %zu] as %s", file->path, t->name, found, p->rows, p->cols, says);
    }
    return fail(e, "%s: %s.shape is %s, wanted [%zu] as %s", file->path, t->name, found, p->cols, says);
}

/* Returns whether the files may hold a tensor of this name that is not a parameter. */
static inline bool model_ignores(const ModelConfig* c, const char* name) {
    return text_ends(name, ".inv_freq") || (c->tied && text_ends(name, "lm_head.weight"));
}

/* Returns the name of a tensor that has more before `name`, or NULL. */
static inline const char* model_find_behind(const ModelFiles* m, const char* name) {
    for (size_t i = 0; i < m->count; i++) {
        for (size_t k = 0; k < m->shards[i].count; k++) {
            if (text_ends(m->shards[i].tensors[k].name, name)) { return m->shards[i].tensors[k].name; }
        }
    }
    return NULL;
}

/* Checks that the open files hold exactly the parameters of the table, each once. */
static inline bool model_match(const ModelFiles* m, const char* dir, const ModelConfig* c, const ParamTable* t, Error* e) {
    const SafeTensors* file = NULL;
    size_t total = 0;
    for (size_t i = 0; i < m->count; i++) {
        for (size_t k = 0; k < m->shards[i].count; k++) { total += !model_ignores(c, m->shards[i].tensors[k].name); }
    }
    for (int i = 0; i < t->count; i++) {
        const Param* p = &t->items[i];
        const SafeTensor* s = model_find(m, p->name, &file);
        if (!s && p->kind == P_LM_HEAD) {
            return fail(e,
                        "%s: tensor \"lm_head.weight\" is missing, wanted one: config.json does not tie it to the embedding\n"
                        "  hint: if the embedding is the head, set \"tie_word_embeddings\": true",
                        dir);
        }
        if (!s) {
            const char *held = model_find_behind(m, p->name), *where = m->count == 1 ? m->shards[0].path : dir;
            if (held) {
                return fail(
                    e,
                    "%s: tensor \"%s\" is missing, but there is \"%s\"\n"
                    "  hint: torch.compile() and other wrappers put such a prefix before the names: save the model inside",
                    where, p->name, held);
            }
            return fail(e, "%s: tensor \"%s\" is missing, wanted %zu by %zu as config.json says", where, p->name, p->rows,
                        p->cols);
        }
        if (!model_match_tensor(file, s, p, "config.json says", e)) { return false; }
    }
    const SafeTensor* head = c->tied ? model_find(m, "lm_head.weight", &file) : NULL;
    if (head && !model_match_tensor(file, head, &t->items[0], "config.json says", e)) { return false; }
    for (size_t i = 0; total > (size_t)t->count && i < m->count; i++) {
        for (size_t k = 0; k < m->shards[i].count; k++) {
            const SafeTensor* s = &m->shards[i].tensors[k];
            char shown[100];
            if (model_ignores(c, s->name) || model_uses(m, t, s)) { continue; }
            show_text(shown, sizeof shown, s->name, strlen(s->name));
            if (model_find_exactly(m, s->name, &file) != s) { continue; }  // the other one counts
            return fail(e, "%s: tensor \"%s\" is not part of a Llama with this config.json, wanted only its %d tensors",
                        m->shards[i].path, shown, t->count);
        }
    }
    return true;
}

/* Reads dir/config.json into *c. */
static inline bool model_config(const char* dir, ModelConfig* c, Error* e) {
    char path[PATH_CAP];
    if (!is_directory(dir)) {
        return fail(e, "%s: is %s, wanted a model's folder", dir, file_exists(dir) ? "a file" : "missing");
    }
    return path_join(path, dir, "config.json", e) && config_read(c, path, e);
}

/* Reads and checks the configuration, then names, shapes, dtypes and offsets of all tensors. Reads no weights. */
static inline bool model_check(const char* dir, ModelConfig* c, Error* e) {
    if (!model_config(dir, c, e)) { return false; }
    ModelFiles m;
    ParamTable t = param_table(c);
    const bool ok = model_open(&m, dir, e) && model_match(&m, dir, c, &t, e);
    param_table_free(&t);
    model_close(&m);
    return ok;
}

/* Checks that a tied model's lm_head.weight, if there is one, equals the embedding bit for bit. */
static inline bool model_check_tied_head(const ModelFiles* m, const ParamTable* t, Error* e) {
    enum { PIECE = 4096 };
    const SafeTensors *file = NULL, *head_file = NULL;
    const SafeTensor* head = model_find(m, "lm_head.weight", &head_file);
    const SafeTensor* embedding = model_find(m, t->items[0].name, &file);
    if (!head) { return true; }
    float a[PIECE], b[PIECE];
    for (size_t i = 0; i < head->count; i += PIECE) {
        const size_t n = size_min(head->count - i, PIECE);
        if (!safetensors_read_f32(head_file, head, i, n, a, e) || !safetensors_read_f32(file, embedding, i, n, b, e)) {
            return false;
        }
        for (size_t k = 0; k < n; k++) {
            if (float_bits(a[k]) == float_bits(b[k])) { continue; }
            return fail(e,
                        "%s: lm_head.weight[%zu, %zu] is %g, wanted the embedding's %g, since config.json ties them\n"
                        "  hint: if the model has a head of its own, set \"tie_word_embeddings\": false",
                        head_file->path, (i + k) / head->shape[1], (i + k) % head->shape[1], (double)a[k], (double)b[k]);
        }
    }
    return true;
}

/* Lists what to read from the open files: every weight for the slot's sink, in the order of the table. With `sums`, one for
 * each file, it also lists all other bytes, which the files' checksums need. */
static inline TensorPieces model_pieces(const ModelFiles* m, const ParamTable* t, uint32_t* sums, const StateSlot* to) {
    TensorPieces list = {NULL, 0};
    TensorPiece piece;
    memset(&piece, 0, sizeof piece);
    piece.slot = to;
    for (int i = 0; i < t->count; i++) {
        piece.param = &t->items[i];
        piece.tensor = model_find(m, piece.param->name, &piece.file);
        piece.n = piece.tensor->count;
        piece.sum = sums ? &sums[piece.file - m->shards] : NULL;
        tensor_pieces_add(&list, piece);
    }
    memset(&piece, 0, sizeof piece);
    for (size_t i = 0; sums && i < m->count; i++) {
        const SafeTensors* file = piece.file = &m->shards[i];
        piece.sum = &sums[i];
        piece.at = 0;
        piece.n = file->data_start;
        tensor_pieces_add(&list, piece);
        for (size_t k = 0; k < file->count; k++) {
            const SafeTensor* tensor = &file->tensors[k];
            if (model_uses(m, t, tensor)) { continue; }
            piece.at = tensor->begin;
            piece.n = safe_bytes(tensor);
            tensor_pieces_add(&list, piece);
        }
    }
    return list;
}

/* Returns the CRC-32C of the files, one after the other. */
static inline uint32_t model_sum(const ModelFiles* m, const uint32_t* sums) {
    uint32_t crc = 0;
    for (size_t i = 0; i < m->count; i++) { crc = crc_shift(crc, m->shards[i].size) ^ sums[i]; }
    return crc;
}

/* Checks the files' checksums against `wanted`. */
static inline bool model_check_sums(const ModelFiles* m, const uint32_t* sums, const FileSums* wanted, Error* e) {
    for (size_t i = 0; i < m->count; i++) {
        const char* path = m->shards[i].path;
        const FileSum* file = file_sums_find(wanted, file_name(path));
        if (!file) { return fail(e, "%s: is not listed in trainer_state.json, wanted its size and checksum there", path); }
        if (!file_sum_check(file, path, sums[i], e)) { return false; }
    }
    return true;
}

/* Passes every tensor of the table to the slot's sink as floats, in the order of the table. `wanted` (or NULL) holds the files'
 * checksums; *crc (or NULL) gets the checksum of all of them. *not_finite gets the error of the first value that is not finite;
 * with NULL, that is a failure. After a failure, discard what the sink received. */
static inline bool model_read(const ModelFiles* m, const ParamTable* t, const FileSums* wanted, uint32_t* crc, StateSlot to,
                              Error* not_finite, Error* e) {
    Error refused = NO_ERROR;
    uint32_t* sums = (uint32_t*)xcalloc(m->count, sizeof(uint32_t));
    TensorPieces pieces = model_pieces(m, t, wanted || crc ? sums : NULL, &to);
    bool ok = tensor_pieces_read(&pieces, not_finite ? not_finite : &refused, e);
    ok = ok && (!wanted || model_check_sums(m, sums, wanted, e));
    ok = ok && (!refused.msg[0] || fail(e, "%s", refused.msg));
    if (crc) { *crc = model_sum(m, sums); }
    tensor_pieces_free(&pieces);
    free(sums);
    return ok;
}

/* Does the same with the weights of a folder. `c` and `t` come from model_check(); the files are checked against them again,
 * since they may have changed. */
static inline bool model_load_sums(const char* dir, const ModelConfig* c, const ParamTable* t, const FileSums* wanted,
                                   uint32_t* crc, StateSlot to, Error* not_finite, Error* e) {
    ModelFiles m;
    const bool ok = model_open(&m, dir, e) && model_match(&m, dir, c, t, e) && (!c->tied || model_check_tied_head(&m, t, e)) &&
                    model_read(&m, t, wanted, crc, to, not_finite, e);
    model_close(&m);
    return ok;
}

static inline bool model_load(const char* dir, const ModelConfig* c, const ParamTable* t, StateSlot to, Error* e) {
    return model_load_sums(dir, c, t, NULL, NULL, to, NULL, e);
}

// ---------------------------------------------------------------------------------------------------------------------
// writing

/* Writes parameters [first, last) of the table as one file. */
static inline bool model_save_shard(const char* dir, const char* name, const ParamTable* t, int first, int last,
                                    const StateSlot* weights, FileSums* sums, Error* e) {
    const size_t count = (size_t)(last - first);
    SafeTensor* tensors = (SafeTensor*)xmalloc(count * sizeof(SafeTensor));
    TensorSpan* spans = (TensorSpan*)xmalloc(count * sizeof(TensorSpan));
    for (size_t i = 0; i < count; i++) {
        const Param* p = &t->items[(size_t)first + i];
        const TensorSpan whole = {weights, p, 0, param_size(p)};
        spans[i] = whole;
        tensors[i] = tensor_of(p, p->name, weights->dtype);
    }
    const bool ok = tensors_save(dir, name, tensors, spans, count, sums, e);
    free(tensors);
    free(spans);
    return ok;
}

/* Returns the first parameter that no longer fits into a file that starts with parameter `first`. */
static inline int model_shard_end(const ParamTable* t, int first, size_t element_bytes) {
    uint64_t bytes = 0;
    int last = first;
    while (last < t->count) {
        bytes += (uint64_t)param_size(&t->items[last]) * element_bytes;
        if (last > first && bytes > MODEL_SHARD_BYTES) { break; }
        last++;
    }
    return last;
}

/* Writes the name of file number `shard`, counted from 1. */
static inline void model_file_name(char* out, size_t cap, int shard, int shards) {
    if (shards == 1) {
        snprintf(out, cap, "model.safetensors");
    } else {
        snprintf(out, cap, "model-%05d-of-%05d.safetensors", shard, shards);
    }
}

static inline bool model_save_index(const char* dir, const ParamTable* t, size_t element_bytes, int shards, Error* e) {
    char path[PATH_CAP], name[64];
    if (!path_join(path, dir, "model.safetensors.index.json", e)) { return false; }
    FILE* f = create_output(path, e);
    if (!f) { return false; }
    fprintf(f, "{\n  \"metadata\": {\n    \"total_size\": %llu\n  },\n  \"weight_map\": {",
            (unsigned long long)t->num_params * element_bytes);
    for (int first = 0, shard = 1; first < t->count; shard++) {
        const int last = model_shard_end(t, first, element_bytes);
        model_file_name(name, sizeof name, shard, shards);
        for (; first < last; first++) { fprintf(f, "%s\n    \"%s\": \"%s\"", first ? "," : "", t->items[first].name, name); }
    }
    fputs("\n  }\n}\n", f);
    return close_output(f, path, e);
}

/* Writes config.json, the weights and their index into an existing folder and flushes them. The weights are rounded to the
 * slot's dtype; above MODEL_SHARD_BYTES they become shards. `source`: see config_write(). Appends the weight files' sizes and
 * checksums to `sums` (or NULL). */
static inline bool model_save_weights(const char* dir, const ModelConfig* c, const char* source, const ParamTable* t,
                                      StateSlot weights, FileSums* sums, Error* e) {
    const size_t element_bytes = safe_dtypes[weights.dtype].bytes;
    char path[PATH_CAP], name[64];
    if (!path_join(path, dir, "config.json", e) || !config_write(c, path, weights.dtype, source, e)) { return false; }
    int shards = 0;
    for (int first = 0; first < t->count; first = model_shard_end(t, first, element_bytes)) { shards++; }
    // a single file from an earlier save into this folder would be read instead of the shards
    if (!path_join(path, dir, "model.safetensors", e)) { return false; }
    unlink(path);
    for (int first = 0, shard = 1; first < t->count; shard++) {
        const int last = model_shard_end(t, first, element_bytes);
        model_file_name(name, sizeof name, shard, shards);
        if (!model_save_shard(dir, name, t, first, last, &weights, sums, e)) { return false; }
        first = last;
    }
    return model_save_index(dir, t, element_bytes, shards, e);
}

#endif
