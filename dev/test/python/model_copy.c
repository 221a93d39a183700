/* model_copy.c -- reads a model folder and writes it again: ./model_copy FROM TO [F32|BF16|F16]. TO must exist.
 * test_formats.py compares both folders with what transformers and safetensors read from them. */
#include "llmc/files/model_folder.h"

typedef struct {
    const ParamTable* table;
    float* arena;
} Copy;

static bool take(void* ctx, const Param* p, size_t first, size_t n, const float* src, Error* e) {
    (void)e;
    memcpy(((Copy*)ctx)->arena + p->offset + first, src, n * sizeof(float));
    return true;
}

static bool give(void* ctx, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    (void)e;
    memcpy(dst, ((Copy*)ctx)->arena + p->offset + first, n * sizeof(float));
    return true;
}

int main(int argc, char** argv) {
    if (argc != 3 && argc != 4) { die_usage("wanted: model_copy FROM TO [F32|BF16|F16]"); }
    Error e = NO_ERROR;
    ModelConfig c;
    const SafeDtype dtype = safe_dtype(argc == 4 ? argv[3] : "F32");
    if (dtype > SAFE_F16) { die_usage("%s: wanted F32, BF16 or F16", argv[3]); }
    if (!model_check(argv[1], &c, &e)) { die("%s", e.msg); }
    ParamTable table = param_table(&c);
    Copy copy = {&table, (float*)xcalloc(table.elements, sizeof(float))};
    const bool ok = model_load(argv[1], &c, &table, slot_to(take, &copy), &e) &&
                    model_save_weights(argv[2], &c, &table, slot_from(dtype, give, &copy), NULL, &e) &&
                    model_save_generation(argv[2], &c, &e);
    free(copy.arena);
    param_table_free(&table);
    if (!ok) { die("%s", e.msg); }
    return 0;
}
