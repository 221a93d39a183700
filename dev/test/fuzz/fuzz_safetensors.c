/* fuzz_safetensors.c -- opens the bytes as a safetensors file. If it opens, every tensor must lie in the file and give all of
 * its bytes. Its names are also parsed as names of an optimizer state's tensors, or refused. */
#include "fuzz.h"
#include "llmc/files/optimizer_state.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const StateSlot slots[2] = {{"m", SAFE_F32, NULL, NULL, NULL, NULL}, {"v", SAFE_F32, NULL, NULL, NULL, NULL}};
    const char* path = fuzz_file(data, size);
    ModelConfig c;
    config_preset(&c, "d1", 16);
    ParamTable table = param_table(&c);
    SafeTensors st;
    Error e = NO_ERROR;
    const bool ok = safetensors_open(&st, path, &e);
    fuzz_check_error(ok, &e);
    uint64_t covered = 0;
    for (size_t i = 0; ok && i < st.count; i++) {
        const SafeTensor* t = &st.tensors[i];
        REQUIRE(safetensors_find(&st, t->name) == t && t->begin + safe_bytes(t) <= size);
        covered += safe_bytes(t);
        void* bytes = xmalloc(safe_bytes(t));
        REQUIRE(safetensors_read_raw(&st, t, 0, t->count, bytes, &e));
        free(bytes);
        if (t->dtype == SAFE_BF16 || t->dtype == SAFE_F16) {
            float* values = (float*)xmalloc(t->count * sizeof(float));
            REQUIRE(safetensors_read_f32(&st, t, 0, t->count, values, &e));
            free(values);
        }
        StatePart part;
        Error refused = NO_ERROR;
        const bool is_state = state_parse(&st, t, &table, slots, 2, &part, &refused);
        REQUIRE(!is_state || part.first + t->count <= param_size(&table.items[part.param]));
    }
    REQUIRE(!ok || covered <= size);
    safetensors_close(&st);
    param_table_free(&table);
    return 0;
}
