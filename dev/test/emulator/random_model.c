/* random_model.c -- writes a model with a new run's weights: ./random_model CONFIG.json FOLDER. FOLDER must exist. For models
 * without a preset.
 */
#include "llmc/files/model_folder.h"

typedef struct {
    ModelConfig config;
    ParamTable table;
} Model;

static bool draw(void* ctx, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    (void)e;
    const Model* m = (const Model*)ctx;
    param_init(dst, p, first, n, (uint32_t)(p - m->table.items), &m->config, 42);
    return true;
}

int main(int argc, char** argv) {
    if (argc != 3) { die_usage("wanted: random_model CONFIG.json FOLDER"); }
    Error e = NO_ERROR;
    Model m;
    must(config_read(&m.config, argv[1], &e), &e);
    m.table = param_table(&m.config);
    must(model_save_weights(argv[2], &m.config, NULL, &m.table, slot_from(SAFE_F32, draw, &m), NULL, &e), &e);
    param_table_free(&m.table);
    return 0;
}
