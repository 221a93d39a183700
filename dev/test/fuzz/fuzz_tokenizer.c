/* fuzz_tokenizer.c -- reads the bytes as a tokenizer file of either kind. An accepted tokenizer must encode its own first
 * bytes as a text (fuzz_text.h), and must stay well-formed JSON with another post-processor. */
#include "fuzz.h"
#include "fuzz_text.h"
#include "llmc/text/tokenizer_read.h"
#include "llmc/text/tokenizer_write.h"

enum { MOST_TEXT = 256 };

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    const char* text = (const char*)data;
    Tokenizer t;
    Error e = NO_ERROR;
    const bool ok = tokenizer_parse(&t, text, size, "fuzz", &e);
    fuzz_check_error(ok, &e);
    if (!ok) { return 0; }
    REQUIRE(t.vocab_size >= 1 && t.fingerprint != 0 && t.bos_id < t.vocab_size && t.eos_id < t.vocab_size);
    check_text(&t, text, size_min(size, MOST_TEXT), size & 1);
    if (t.source) {
        Json j;
        char* changed = json_with_member(t.source, "post_processor", "{\"type\":\"fuzz\"}");
        must(json_parse(&j, changed, strlen(changed), "changed", &e), &e);
        REQUIRE(json_is_string(&j, json_get(&j, json_get(&j, json_root(&j), "post_processor"), "type"), "fuzz"));
        json_free(&j);
        const TokenizerExtras x = {true, NULL, 1};
        char* config = tokenizer_config_text(&t, &x);
        must(json_parse(&j, config, strlen(config), "config", &e), &e);
        json_free(&j);
    }
    tokenizer_free(&t);
    return 0;
}
