/* fuzz_adapter.c -- reads the bytes as an adapter_config.json. What is accepted must make a table whose offsets are right, and
 * must not change when it is written and read back. */
#include "fuzz.h"
#include "llmc/files/adapter.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    char path[PATH_CAP];
    AdapterConfig a, back;
    ModelConfig c;
    Error e = NO_ERROR;
    fuzz_write(fuzz_path(path, ADAPTER_CONFIG), data, size);
    const bool ok = adapter_read_config(fuzz_folder(), &a, &e);
    fuzz_check_error(ok, &e);
    if (!ok) { return 0; }
    REQUIRE(a.lora.rank >= 1 && a.lora.rank <= LORA_MOST_RANK && a.lora.alpha > 0 && a.lora.on &&
            a.lora.on < 1u << NUM_LORA_PAIRS);
    fuzz_tiny_model(&c);
    c.lora = a.lora;
    ParamTable t = trained_table(&c);
    REQUIRE(t.count > 0 && t.elements >= t.num_params && t.elements - t.num_params <= (size_t)t.count * PARAM_ALIGN);
    for (int i = 0; i < t.count; i++) { REQUIRE(adapter_find(&t, t.items[i].kind, t.items[i].layer) == &t.items[i]); }
    param_table_free(&t);
    must(adapter_write_config(fuzz_folder(), &a.lora, a.base, &e) && adapter_read_config(fuzz_folder(), &back, &e), &e);
    REQUIRE(memcmp(&a.lora, &back.lora, sizeof a.lora) == 0);
    return 0;
}
