/* fuzz_config.c -- reads the bytes as a config.json. What is accepted must be safe for the code that uses it, and must not
 * change when it is written and read back. */
#include "llmc/files/config_file.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

static char path[PATH_CAP];  // a file: config_write() follows no link, such as those of /proc/self/fd

static void remove_file(void) { unlink(path); }

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (!path[0]) {
        const char* tmp = getenv("TEST_TMP");
        snprintf(path, sizeof path, "%s/fuzz_config_%d.json", tmp && *tmp ? tmp : "/dev/shm", (int)getpid());
        atexit(remove_file);
    }
    FILE* f = fopen(path, "wb");
    if (!f || fwrite(data, 1, size, f) != size || fclose(f) != 0) { die("%s: %s", path, strerror(errno)); }
    ModelConfig c, back;
    Error e = NO_ERROR;
    const bool ok = config_read(&c, path, &e);
    if (ok == (e.msg[0] != 0) || strchr(e.msg, '\n')) { abort(); }
    if (!ok) { return 0; }
    if (c.num_heads % c.num_kv_heads || c.head_dim % 2 || c.head_dim > MAX_HEAD_DIM || c.num_layers > MAX_LAYERS) { abort(); }
    if (c.bos_id >= c.vocab_size || c.num_eos > MAX_EOS || !(c.rms_eps > 0) || !(c.rope_theta > 0)) { abort(); }
    if (c.rope_llama3 && !(c.rope_high_freq > c.rope_low_freq && c.rope_low_freq > 0 && c.rope_original_len > 0)) { abort(); }
    config_warn(&c, path);
    ParamTable t = param_table(&c);
    // the arena's offsets did not wrap: it holds every parameter, and nothing else but the gaps
    if (t.elements < t.num_params || t.elements - t.num_params > (size_t)t.count * PARAM_ALIGN) { abort(); }
    param_table_free(&t);
    if (!config_write(&c, path, SAFE_BF16, &e) || !config_read(&back, path, &e)) { die("%s", e.msg); }
    if (memcmp(&c, &back, sizeof c) != 0) { abort(); }
    return 0;
}
