/* fuzz_tokenizer_config.c -- reads the bytes as the tokenizer_config.json beside a sound tokenizer. An accepted file must name
 * tokens of the vocabulary, and must name them again after it was written into a checkpoint and read from there. */
#include "fuzz.h"
#include "llmc/text/tokenizer_read.h"
#include "llmc/text/tokenizer_write.h"

/* Reads the bytes for a tokenizer of the 256 bytes. */
static bool read_config(Tokenizer* t, const Tokenizer* base, const char* bytes, size_t size, Error* e) {
    static char path[PATH_CAP];
    fuzz_write(fuzz_path(path, "tokenizer_config.json"), bytes, size);
    *t = *base;
    return tokenizer_read_config(t, fuzz_folder(), e);
}

static void free_names(Tokenizer* t) {
    free(t->config);
    free(t->bos_name);
    free(t->eos_name);
    free(t->pad_name);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static Tokenizer base;
    if (!base.vocab_size) { tokenizer_bytes(&base); }
    Tokenizer t, back;
    Error e = NO_ERROR;
    const bool ok = read_config(&t, &base, (const char*)data, size, &e);
    fuzz_check_error(ok, &e);
    if (ok) {
        REQUIRE(t.bos_id >= -1 && t.bos_id < t.vocab_size && t.eos_id >= -1 && t.eos_id < t.vocab_size);
        const TokenizerExtras x = {data[0] & 1, data[0] & 2 ? "{{ messages }}" : NULL, 7};
        char* text = tokenizer_config_text(&t, &x);
        must(read_config(&back, &base, text, strlen(text), &e), &e);
        REQUIRE(back.bos_id == t.bos_id && back.eos_id == t.eos_id);
        free(text);
        free_names(&back);
    }
    free_names(&t);
    return 0;
}
