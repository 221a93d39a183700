/* fuzz_text.h -- checks how a tokenizer encodes a text: its ids give the text back, stream valid UTF-8, and are the same when
 * the text is cut at its borders.
 */
#ifndef LLMC_FUZZ_TEXT_H
#define LLMC_FUZZ_TEXT_H

#include "fuzz.h"
#include "dev/data/encode_units.h"  // defines: text_border, tokenizer_may_cut
#include "llmc/text/tokenizer.h"

/* Returns whether every byte has its own token, so that any text comes back whole. */
static inline bool has_all_bytes(const Tokenizer* t) {
    for (int b = 0; b < 256; b++) {
        const char byte = (char)b;
        const int32_t id = t->byte_ids[b];
        if (id < 0 || t->at[id + 1] - t->at[id] != 1 || t->bytes[t->at[id]] != byte) { return false; }
    }
    return true;
}

static inline void check_text(const Tokenizer* t, const char* text, size_t len, bool specials) {
    TokenEncoder whole, cut;
    TokenDecoder d;
    const bool all_bytes = has_all_bytes(t);
    size_t at = 0, start = 0, n;
    encoder_init(&whole, t);
    encoder_text(&whole, text, len, specials);
    decoder_init(&d, t);
    for (size_t i = 0; i < whole.out.count; i++) {
        REQUIRE(whole.out.ids[i] >= 0 && whole.out.ids[i] < t->vocab_size);
        const char* piece = tokenizer_token(t, whole.out.ids[i], &n);
        REQUIRE(!all_bytes || (at + n <= len && memcmp(text + at, piece, n) == 0));
        at += n;
        const char* out = decoder_push(&d, whole.out.ids[i], &n);
        for (size_t k = 0, used; k < n; k += used) {
            used = utf8_char_length(out + k, n - k);
            REQUIRE(used > 0);
        }
    }
    REQUIRE(!all_bytes || at == len);
    decoder_free(&d);
    encoder_init(&cut, t);
    const size_t cuttable = tokenizer_may_cut(t) ? len : 0;
    for (size_t i = 1; i < cuttable; i++) {
        if (!text_border(text, i)) { continue; }
        encoder_text(&cut, text + start, i - start, specials);
        start = i;
    }
    encoder_text(&cut, text + start, len - start, specials);
    REQUIRE(cut.out.count == whole.out.count);
    REQUIRE(cut.out.count == 0 || memcmp(cut.out.ids, whole.out.ids, cut.out.count * sizeof(int32_t)) == 0);
    encoder_free(&whole);
    encoder_free(&cut);
}

#endif
