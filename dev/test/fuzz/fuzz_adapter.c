/* fuzz_adapter.c -- puts the bytes into a sound folder of adapters, as adapter_config.json or adapter_model.safetensors; the
 * first byte chooses the file. An accepted configuration must be in range, make a table with correct offsets and survive
 * writing and reading. It may accept the sound weights only if it has their rank and matrices. Accepted weights must give every
 * element of every adapter once. */
#define TENSOR_READ_PIECE 4  // elements: cuts a few dozen weights into several pieces
#include "fuzz.h"
#include "llmc/files/adapter.h"

enum { MOST = 1024 };

static char folder[PATH_CAP], again[PATH_CAP], written[2][PATH_CAP];
static char* sound[2];  // the texts of both files
static size_t sound_size[2];
static ModelConfig config;
static ParamTable table;

/* Counts how often each element of the arena is given. */
static bool take(void* ctx, const Param* p, size_t first, size_t n, const float* src, Error* e) {
    (void)e;
    fuzz_taken(p, first, n, src);
    for (size_t i = 0; i < n; i++) { ((uint8_t*)ctx)[p->offset + first + i]++; }
    return true;
}

/* Makes adapters of rank 2 beside two matrices. */
static void make_folder(void) {
    Error e = NO_ERROR;
    fuzz_tiny_model(&config);
    config.lora.rank = 2;
    config.lora.alpha = 4;
    config.lora.on = 0x41;  // q_proj, down_proj
    table = trained_table(&config);
    REQUIRE(table.elements <= MOST);
    must(make_directories(fuzz_path(folder, "adapter"), &e) && make_directories(fuzz_path(again, "again"), &e) &&
             adapter_save(again, &config.lora, "base", &table, slot_from(SAFE_F32, fuzz_give, NULL), NULL, &e) &&
             adapter_save(folder, &config.lora, "base", &table, slot_from(SAFE_F32, fuzz_give, NULL), NULL, &e) &&
             path_join(written[0], folder, ADAPTER_CONFIG, &e) && path_join(written[1], folder, ADAPTER_WEIGHTS, &e),
         &e);
    for (int i = 0; i < 2; i++) {
        sound[i] = read_file(written[i], &sound_size[i], 1 << 16, &e);
        REQUIRE(sound[i]);
    }
}

static void check_config(void) {
    AdapterConfig a, back;
    Error e = NO_ERROR, cause = NO_ERROR;
    const bool ok = adapter_read_config(folder, &a, &e);
    fuzz_check_error(ok, &e);
    if (!ok) { return; }
    REQUIRE(a.lora.rank >= 1 && a.lora.rank <= LORA_MOST_RANK && a.lora.alpha > 0 && isfinite(a.lora.alpha));
    REQUIRE(a.lora.on > 0 && a.lora.on < 1u << NUM_LORA_PAIRS && a.dropout >= 0 && a.dropout <= 1);
    must(adapter_write_config(again, &a.lora, a.base, &e) && adapter_read_config(again, &back, &e), &e);
    REQUIRE(back.lora.rank == a.lora.rank && back.lora.alpha == a.lora.alpha && back.lora.on == a.lora.on);
    REQUIRE(strcmp(back.base, a.base) == 0);
    ModelConfig c = config;
    c.lora = a.lora;
    ParamTable t = trained_table(&c);
    REQUIRE(t.count > 0 && t.elements >= t.num_params && t.elements - t.num_params <= (size_t)t.count * PARAM_ALIGN);
    for (int i = 0; i < t.count; i++) { REQUIRE(param_at(&t, t.items[i].kind, t.items[i].layer) == &t.items[i]); }
    const bool fits = adapter_check(folder, &t, &cause);
    fuzz_check_error(fits, &cause);
    REQUIRE(fits == (a.lora.rank == config.lora.rank && a.lora.on == config.lora.on));
    param_table_free(&t);
}

static void check_weights(void) {
    uint8_t times[MOST] = {0};
    Error e = NO_ERROR, cause = NO_ERROR;
    const bool fits = adapter_check(folder, &table, &cause);
    const bool ok = adapter_load(folder, &table, NULL, slot_to(take, times), &e);
    fuzz_check_error(fits, &cause);
    fuzz_check_error(ok, &e);
    REQUIRE(fits || !ok);
    for (int k = 0; ok && k < table.count; k++) {
        const Param* p = &table.items[k];
        for (size_t i = p->offset; i < p->offset + param_size(p); i++) { REQUIRE(times[i] == 1); }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (!folder[0]) { make_folder(); }
    if (size < 1) { return 0; }
    const int which = data[0] & 1;
    fuzz_write(written[which], data + 1, size - 1);
    REQUIRE(folder_is_adapter(folder));
    if (which) {
        check_weights();
    } else {
        check_config();
    }
    fuzz_write(written[which], sound[which], sound_size[which]);
    return 0;
}
