/* fuzz_tokenizer.c -- reads the bytes as a tokenizer file of either kind, and as a text for this tokenizer and for a fixed one
 * with Llama 3's pattern. What is accepted must give every text back, stream valid UTF-8, encode a text cut at borders like
 * the whole, and stay well-formed JSON with another post-processor. */
#include "llmc/text/tokenizer_read.h"
#include "llmc/text/tokenizer_write.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

/* Makes a tokenizer from a tiktoken file of the 256 bytes and a few longer tokens. */
static void fixed_tokenizer(Tokenizer* t) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    char text[8192];
    size_t n = 0;
    Error e = NO_ERROR;
    for (int b = 0; b < 256; b++) { n += (size_t)sprintf(text + n, "%c%c== %d\n", digits[b >> 2], digits[(b & 3) << 4], b); }
    // "aa" "\n\n" " a" "\"" + ":" "\xC3\xA9" "aaa"
    n += (size_t)sprintf(text + n, "YWE= 256\nCgo= 257\nIGE= 258\nIjo= 259\nw6k= 260\nYWFh 261\n");
    if (!tokenizer_parse(t, text, n, "fixed", &e)) { die("%s", e.msg); }
}

static void check_text(const Tokenizer* t, const char* text, size_t len, bool specials) {
    TokenEncoder whole, cut;
    TokenDecoder d;
    bool all_bytes = true;
    size_t at = 0, start = 0, n;
    encoder_init(&whole, t);
    encoder_text(&whole, text, len, specials);
    for (int b = 0; b < 256; b++) {
        const char byte = (char)b;
        const int32_t id = t->byte_ids[b];
        all_bytes = all_bytes && id >= 0 && t->at[id + 1] - t->at[id] == 1 && t->bytes[t->at[id]] == byte;
    }
    decoder_init(&d, t);
    for (size_t i = 0; i < whole.count; i++) {
        if (whole.ids[i] < 0 || whole.ids[i] >= t->vocab_size) { abort(); }
        const char* piece = tokenizer_token(t, whole.ids[i], &n);
        if (all_bytes && (at + n > len || memcmp(text + at, piece, n) != 0)) { abort(); }
        at += n;
        const char* out = decoder_push(&d, whole.ids[i], &n);
        for (size_t k = 0, used; k < n; k += used) {
            used = utf8_char_length(out + k, n - k);
            if (used == 0) { abort(); }
        }
    }
    if (all_bytes && at != len) { abort(); }
    decoder_free(&d);
    encoder_init(&cut, t);
    const size_t cuttable = tokenizer_may_cut(t) ? len : 0;
    for (size_t i = 1; i < cuttable; i++) {
        if (!text_border(text, i)) { continue; }
        encoder_text(&cut, text + start, i - start, specials);
        start = i;
    }
    encoder_text(&cut, text + start, len - start, specials);
    if (cut.count != whole.count || (cut.count && memcmp(cut.ids, whole.ids, cut.count * sizeof(int32_t)) != 0)) { abort(); }
    encoder_free(&whole);
    encoder_free(&cut);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static Tokenizer fixed;
    const char* text = (const char*)data;
    Tokenizer t;
    Error e = NO_ERROR;
    if (!fixed.vocab_size) { fixed_tokenizer(&fixed); }
    check_text(&fixed, text, size, false);
    check_text(&fixed, text, size, true);
    const bool ok = tokenizer_parse(&t, text, size, "fuzz", &e);
    if (ok == (e.msg[0] != 0) || (strchr(e.msg, '\n') && !strstr(e.msg, "\n  hint: "))) { abort(); }
    if (!ok) { return 0; }
    if (t.vocab_size < 1 || t.fingerprint == 0 || t.bos_id >= t.vocab_size || t.eos_id >= t.vocab_size) { abort(); }
    check_text(&t, text, size, false);
    check_text(&t, text, size, true);
    if (t.source) {
        Json j;
        char* changed = json_with_member(t.source, "post_processor", "{\"type\":\"fuzz\"}");
        if (!json_parse(&j, changed, strlen(changed), "changed", &e)) { die("%s", e.msg); }
        if (!json_is_string(&j, json_get(&j, json_get(&j, json_root(&j), "post_processor"), "type"), "fuzz")) { abort(); }
        json_free(&j);
        char* config = tokenizer_config_text(&t, 1);
        if (!json_parse(&j, config, strlen(config), "config", &e)) { die("%s", e.msg); }
        json_free(&j);
    }
    tokenizer_free(&t);
    return 0;
}
