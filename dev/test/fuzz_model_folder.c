/* fuzz_model_folder.c -- puts the bytes into a sound model folder as one of its files. The first byte says which:
 * model.safetensors.index.json (with shards), model.safetensors or config.json. What is accepted must give every element of
 * every parameter once, within its parameter. */
#define MODEL_SHARD_BYTES 64
#define TENSOR_READ_PIECE 4  // elements: cuts a few dozen weights into several pieces
#include "llmc/files/model_folder.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

static char folder[PATH_CAP], written[3][PATH_CAP];
static char* config_text;
static size_t config_size;

static void must_write(const char* path, const void* bytes, size_t size) {
    FILE* f = fopen(path, "wb");
    if (!f || fwrite(bytes, 1, size, f) != size || fclose(f) != 0) { die("%s: cannot write", path); }
}

static bool give(void* ctx, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    (void)ctx, (void)p, (void)e;
    for (size_t i = 0; i < n; i++) { dst[i] = (float)(first + i); }
    return true;
}

/* Counts the elements and checks that they lie in their parameter. */
static bool take(void* ctx, const Param* p, size_t first, size_t n, const float* src, Error* e) {
    (void)e;
    if (first + n > param_size(p) || n == 0 || src[0] + src[n - 1] == 12345.0f) { abort(); }
    *(size_t*)ctx += n;
    return true;
}

static void remove_folder(void) {
    char command[PATH_CAP + 16];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    if (system(command) != 0) { warn("%s: stays", folder); }
}

/* Makes a model of a few dozen weights, in shards. */
static void make_folder(void) {
    static const char* const names[3] = {"model.safetensors.index.json", "model.safetensors", "config.json"};
    const char* base = getenv("TEST_TMP");
    ModelConfig c;
    Error e = NO_ERROR;
    snprintf(folder, sizeof folder, "%s/fuzz_model_XXXXXX", base && *base ? base : "/tmp");
    if (!mkdtemp(folder)) { die("%s: cannot make a folder", folder); }
    atexit(remove_folder);
    config_preset(&c, "d1", 3);
    c.hidden_size = c.head_dim = 2;
    c.num_heads = c.num_kv_heads = c.intermediate_size = 1;
    ParamTable t = param_table(&c);
    bool ok = model_save(folder, &c, &t, SAFE_F32, give, NULL, &e);
    for (int i = 0; ok && i < 3; i++) { ok = path_join(written[i], folder, names[i], &e); }
    ok = ok && (config_text = read_file(written[2], &config_size, 1 << 16, &e));
    if (!ok || !file_exists(written[0]) || !model_check(folder, &c, &e)) { die("%s", e.msg); }
    param_table_free(&t);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size < 1) { return 0; }
    if (!folder[0]) { make_folder(); }
    const int which = data[0] % 3;
    must_write(written[which], data + 1, size - 1);
    ModelConfig c;
    Error e = NO_ERROR;
    bool ok = model_check(folder, &c, &e);
    if (ok == (e.msg[0] != 0)) { abort(); }
    if (ok) {
        ParamTable t = param_table(&c);
        size_t elements = 0;
        ok = model_load(folder, &c, &t, take, &elements, &e);
        if (ok == (e.msg[0] != 0) || (ok && elements != t.num_params)) { abort(); }
        param_table_free(&t);
    }
    // model.safetensors would be read instead of the index
    if (which == 1) { unlink(written[1]); }
    if (which == 2) { must_write(written[2], config_text, config_size); }
    return 0;
}
