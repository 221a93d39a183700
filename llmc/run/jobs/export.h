/* export.h -- --export: writes a trained model for other programs, without the state of its run:
 *
 *   --export FILE.gguf   one GGUF file for llama.cpp (run/jobs/gguf.h): F32, F16, BF16 or Q8_0
 *   --export DIR         a Hugging Face folder in F32, F16 or BF16
 *
 * Adapters (LoRA) are merged into the weights beside which they stand: in fp32, and rounded once.
 *
 * Every weight is checked first, as when it is loaded. Then the tensors pass through in pieces, so no trainer and no memory for
 * the whole model is needed. A weight that would be infinite in the output's type is refused by name. The output gets its name
 * once it is whole.
 */
#ifndef LLMC_EXPORT_H
#define LLMC_EXPORT_H

#include "llmc/base/utils.h"

#include "llmc/run/jobs/gguf.h"
#include "llmc/files/model_folder.h"
#include "llmc/files/side_files.h"
#include "llmc/lora.h"
#include "llmc/run/cli/options.h"
#include "llmc/base/progress.h"           // defines: Progress, progress_begin, progress_add, progress_end
#include "llmc/run/session/choose.h"      // defines: export_dtype_of
#include "llmc/run/session/open_model.h"  // defines: load_weights, load_adapters
#include "llmc/run/session/session.h"     // defines: Program, Start, ModelSpec, process_screen
#include "llmc/text/tokenizer_write.h"

/* What is exported. */
typedef struct {
    const Options* options;
    const Start* start;
    const ModelSpec* spec;
    const Tokenizer* tokenizer;  // NULL: none
    ModelFiles files;            // of the weights
    float* adapters;             // (spec->trained.elements); NULL: none
    Progress progress;
} Export;

/* A TensorSource: reads a parameter from the open files and merges its adapters into it. */
static inline bool export_source(void* ctx, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    Export* x = (Export*)ctx;
    const SafeTensors* file = NULL;
    const SafeTensor* t = model_find(&x->files, p->name, &file);
    progress_add(&x->progress, n);
    if (!safetensors_read_f32(file, t, first, n, dst, e)) { return false; }
    for (int i = 0; x->adapters && i < NUM_LORA_PAIRS; i++) {
        if (lora_pairs[i].matrix != p->kind || !(x->spec->config.lora.on >> i & 1)) { continue; }
        const float* a = x->adapters + param_at(&x->spec->trained, lora_pairs[i].a, p->layer)->offset;
        const float* b = x->adapters + param_at(&x->spec->trained, lora_pairs[i].b, p->layer)->offset;
        lora_merge(dst, first, n, a, b, &x->spec->config.lora, p->cols);
    }
    return count_good(dst, n, false) == n || fail(e, "--export: tensor %s is not finite with its adapters", p->name);
}

/* Returns the type to write: --export-dtype, otherwise the type of the embedding in the files. */
static inline ExportDtype export_type(const Export* x) {
    const SafeTensors* file = NULL;
    if (x->options->export_dtype != EXPORT_AUTO) { return (ExportDtype)x->options->export_dtype; }
    return export_dtype_of(model_find(&x->files, x->spec->table.items[0].name, &file)->dtype);
}

/* Returns the chat template of the model: its folder's, or Llama 3's if the tokenizer has its tokens; NULL if neither
 * exists. The caller frees it. */
static inline char* export_chat_template(const Export* x) {
    for (size_t i = 0; i < x->start->side_files.count; i++) {
        const SideFile* file = &x->start->side_files.items[i];
        if (strcmp(file->name, "chat_template.jinja") == 0) { return xcopy_text(file->data, file->size); }
    }
    char* config = tokenizer_config_text(x->tokenizer, x->spec->config.max_positions);
    char* found = chat_template_of_config(config);
    free(config);
    return found;
}

/* Writes a GGUF file. */
static inline bool export_gguf(Export* x, ExportDtype type, FILE* f, Error* e) {
    static const GgufType types[] = {GGUF_F32, GGUF_F32, GGUF_BF16, GGUF_F16, GGUF_Q8_0};
    char name[PATH_CAP];
    snprintf(name, sizeof name, "%s", file_name(x->options->export_));
    name[strlen(name) - strlen(".gguf")] = 0;
    GgufModel m = {name, &x->spec->config, &x->spec->table, x->tokenizer, NULL, types[type], export_source, x};
    if (!gguf_check(&m, e)) { return false; }
    char* chat = export_chat_template(x);
    m.chat_template = chat;
    const bool ok = gguf_write(f, &m, e);
    free(chat);
    return ok;
}

/* Writes a model folder. */
static inline bool export_folder(Export* x, ExportDtype type, const char* path, Error* e) {
    static const SafeDtype types[] = {SAFE_F32, SAFE_F32, SAFE_BF16, SAFE_F16};
    bool ok = model_save_weights(path, &x->spec->config, &x->spec->table, slot_from(types[type], export_source, x), NULL, e) &&
              (!x->tokenizer || tokenizer_save(x->tokenizer, path, x->spec->config.max_positions, e));
    if (ok) { side_files_write(&x->start->side_files, path); }
    return ok && model_save_generation(path, &x->spec->config, e) && sync_directory(path, e);
}

/* Copies the target without the slashes at its end, which a shell adds to the name of a folder. */
static inline bool export_path(const Options* o, char path[PATH_CAP], Error* e) {
    const int length = snprintf(path, PATH_CAP, "%s", o->export_);
    if (length >= PATH_CAP) { return fail(e, "--export: the path is too long"); }
    for (int n = length; n > 1 && path[n - 1] == '/'; n--) { path[n - 1] = 0; }
    return true;
}

/* Gives a finished folder its name; at most an empty folder may have that name already. */
static inline bool export_rename(const char* tmp, const char* path, Error* e) {
    return rename(tmp, path) == 0 || fail(e, "%s: cannot rename to %s: %s", tmp, path, strerror(errno));
}

/* Returns whether a folder can be read and is empty. */
static inline bool export_is_empty(const char* path) {
    struct dirent* entry = NULL;
    Error ignored = NO_ERROR;
    DIR* d = opendir(path);
    const bool empty = d && folder_next(d, path, &entry, &ignored) && !entry;
    if (d) { closedir(d); }
    return empty;
}

/* Refuses a target that exists, unless it is an empty folder. */
static inline bool export_check_target(const Options* o, const char* path, Error* e) {
    struct stat st;
    if (lstat(path, &st) != 0) { return true; }
    if (options_export_gguf(o)) { return fail(e, "--export: %s exists, wanted a new name", path); }
    return (S_ISDIR(st.st_mode) && export_is_empty(path)) ||
           fail(e, "--export: %s exists, wanted a new folder, or a name that ends with .gguf", path);
}

/* Writes the export under a temporary name, then renames it. The lock of the temporary file or folder keeps other exports away
 * until then. */
static inline bool export_write(Export* x, ExportDtype type, const char* path, Error* e) {
    char tmp[PATH_CAP], parent[PATH_CAP];
    const Options* o = x->options;
    const bool gguf = options_export_gguf(o);
    Error ignored = NO_ERROR;
    folder_of(path, parent);
    if (snprintf(tmp, sizeof tmp, "%s.tmp", path) >= (int)sizeof tmp) { return fail(e, "--export: the path is too long"); }
    if (!make_directories(parent, e)) { return false; }
    FILE* f = gguf ? create_temporary(tmp, e) : NULL;
    if (gguf && !f) { return false; }
    const int lock = gguf ? dup(fileno(f)) : create_temporary_folder(tmp, e);
    if (!gguf && lock < 0) { return false; }
    bool ok = lock >= 0 || fail(e, "%s: cannot keep its lock: %s", tmp, strerror(errno));
    ok = ok && export_check_target(o, path, e);  // again: another export may have ended meanwhile
    ok = ok && (gguf ? export_gguf(x, type, f, e) : export_folder(x, type, tmp, e));
    if (f) { ok = close_output(f, tmp, ok ? e : &ignored) && ok; }
    ok = ok && (gguf ? rename_output(tmp, path, e) : export_rename(tmp, path, e));
    if (!ok) { remove_tree(tmp, &ignored); }
    if (lock >= 0) { close(lock); }
    return ok && sync_directory(parent, e);
}

/* Runs --export. */
static inline void job_export(Program* p) {
    static const char* const type_names[] = {"", "F32", "BF16", "F16", "Q8_0"};
    const ModelSpec* spec = &p->spec;
    Export x;
    Error e = NO_ERROR;
    char path[PATH_CAP], count[32];
    memset(&x, 0, sizeof x);
    x.options = &p->chosen;
    x.start = &p->start;
    x.spec = spec;
    x.tokenizer = data_tokenizer(&p->data);
    must(export_path(x.options, path, &e) && export_check_target(x.options, path, &e), &e);
    load_weights(x.start, spec, &p->run, &p->process, slot_to(NULL, NULL));
    if (spec->config.lora.rank > 0) {
        x.adapters = (float*)xcalloc(spec->trained.elements, sizeof(float));
        HostSlot slot;
        load_adapters(x.start, spec, 0, host_slot(&slot, SLOT_MASTER, x.adapters, NULL));
    }
    must(model_open(&x.files, x.start->base_dir, &e), &e);
    const ExportDtype type = export_type(&x);
    x.progress = progress_begin(process_screen(&p->process), "export", spec->table.num_params, "weights");
    const bool ok = export_write(&x, type, path, &e);
    progress_end(&x.progress);
    if (!ok && e.too_large) { die("%s\n  hint: --export-dtype f32 or bf16 holds it", e.msg); }
    must(ok, &e);
    model_close(&x.files);
    free(x.adapters);
    print_names(stdout, "exported %s, %s parameters, as %s to %s\n", x.start->dir,
                text_count(spec->table.num_params, count, sizeof count), type_names[type], path);
}

#endif
