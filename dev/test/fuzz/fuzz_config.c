/* fuzz_config.c -- reads the bytes as a config.json. An accepted configuration must be safe for the code that uses it, and
 * must survive writing and reading. */
#include "fuzz.h"
#include "llmc/files/config_file.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    const char* path = fuzz_file(data, size);
    ModelConfig c, back;
    Error e = NO_ERROR;
    const bool ok = config_read(&c, path, &e);
    fuzz_check_error(ok, &e);
    if (!ok) { return 0; }
    REQUIRE(c.num_heads % c.num_kv_heads == 0 && c.head_dim % 2 == 0 && c.head_dim <= MAX_HEAD_DIM &&
            c.num_layers <= MAX_LAYERS);
    REQUIRE(c.bos_id < c.vocab_size && c.num_eos <= MAX_EOS && c.rms_eps > 0 && c.rope_theta > 0);
    REQUIRE(!c.rope_llama3 || (c.rope_high_freq > c.rope_low_freq && c.rope_low_freq > 0 && c.rope_original_len > 0));
    config_warn(&c, path);
    ParamTable t = param_table(&c);
    // the arena's offsets did not wrap: it holds every parameter, and nothing else but the gaps
    REQUIRE(t.elements >= t.num_params && t.elements - t.num_params <= (size_t)t.count * PARAM_ALIGN);
    param_table_free(&t);
    char* source = fuzz_text(data, size);
    for (int i = 0; i < 2; i++) {  // anew, and with the other members of the bytes
        must(config_write(&c, path, SAFE_BF16, i ? source : NULL, &e) && config_read(&back, path, &e), &e);
        REQUIRE(memcmp(&c, &back, sizeof c) == 0);
    }
    free(source);
    return 0;
}
