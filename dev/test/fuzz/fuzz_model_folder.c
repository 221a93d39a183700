/* fuzz_model_folder.c -- puts the bytes into a sound model folder as one of its files. The first byte chooses
 * model.safetensors.index.json (with shards), model.safetensors or config.json, and whether the sound config.json ties the
 * head to the embedding. An accepted folder must give every element of every parameter once, within its parameter. */
#define MODEL_SHARD_BYTES 64
#define TENSOR_READ_PIECE 4  // elements: cuts a few dozen weights into several pieces
#include "fuzz.h"
#include "llmc/files/model_folder.h"

static char folder[PATH_CAP], written[3][PATH_CAP];
static char* config_text[2];  // untied, tied
static size_t config_size[2];

/* Counts the elements and checks that they lie in their parameter. */
static bool take(void* ctx, const Param* p, size_t first, size_t n, const float* src, Error* e) {
    (void)e;
    fuzz_taken(p, first, n, src);
    *(size_t*)ctx += n;
    return true;
}

/* Makes a model of a few dozen weights, in shards. */
static void make_folder(void) {
    static const char* const names[3] = {"model.safetensors.index.json", "model.safetensors", "config.json"};
    ModelConfig c;
    Error e = NO_ERROR;
    must(make_directories(fuzz_path(folder, "model"), &e), &e);
    fuzz_tiny_model(&c);
    ParamTable t = param_table(&c);  // with a head, which is equal to the embedding
    bool ok = model_save_weights(folder, &c, NULL, &t, slot_from(SAFE_F32, fuzz_give, NULL), NULL, &e);
    for (int i = 0; ok && i < 3; i++) { ok = path_join(written[i], folder, names[i], &e); }
    for (int tied = 1; ok && tied >= 0; tied--) {
        c.tied = tied;
        ok = config_write(&c, written[2], SAFE_F32, NULL, &e) &&
             (config_text[tied] = read_file(written[2], &config_size[tied], 1 << 16, &e));
    }
    if (!ok || !file_exists(written[0]) || !model_check(folder, &c, &e)) { die("%s", e.msg); }
    param_table_free(&t);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size < 1) { return 0; }
    if (!folder[0]) { make_folder(); }
    const int which = data[0] % 3, tied = data[0] / 3 % 2;
    if (tied) { fuzz_write(written[2], config_text[1], config_size[1]); }
    fuzz_write(written[which], data + 1, size - 1);
    ModelConfig c;
    Error e = NO_ERROR;
    bool ok = model_check(folder, &c, &e);
    fuzz_check_error(ok, &e);
    if (ok) {
        ParamTable t = param_table(&c);
        size_t elements = 0;
        ok = model_load(folder, &c, &t, slot_to(take, &elements), &e);
        fuzz_check_error(ok, &e);
        REQUIRE(!ok || elements == t.num_params);
        param_table_free(&t);
    }
    // model.safetensors would be read instead of the index
    if (which == 1) { unlink(written[1]); }
    if (which == 2 || tied) { fuzz_write(written[2], config_text[0], config_size[0]); }
    return 0;
}
