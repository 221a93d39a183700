/* first_words.h -- a prompt that suits the training data, for the command that a run proposes at its end: the first words of
 * the first token file, or its first ids if there is no tokenizer.
 */
#ifndef LLMC_FIRST_WORDS_H
#define LLMC_FIRST_WORDS_H

#include "llmc/base/utils.h"

#include "llmc/files/dataloader.h"
#include "llmc/text/tokenizer.h"

/* Ends a text after `most` words, and before what a terminal or a shell would obey. Such characters at its start, and blanks,
 * are left out. */
static inline void first_words_cut(char* text, int most) {
    int words = 0;
    size_t n = strspn(text, " \t\r\n\"\\$`!");
    memmove(text, text + n, strlen(text + n) + 1);
    for (n = 0; text[n] && !strchr("\"\\$`!", text[n]); n++) {
        const size_t length = plain_char_length(text + n, strlen(text + n));
        if (length == 0 || (text[n] == ' ' && ++words == most)) { break; }
        n += length - 1;
    }
    while (n > 0 && text[n - 1] == ' ') { n--; }
    text[n] = 0;
}

/* Writes the first words of the data; "" if they cannot be read. `t` may be NULL. */
static inline void first_words(const DataLoader* d, const Tokenizer* t, char* out, size_t cap) {
    enum { MOST_TOKENS = 32, MOST_WORDS = 4 };
    unsigned char raw[4 * MOST_TOKENS];
    int32_t ids[MOST_TOKENS];
    size_t used = 0;
    Error e = NO_ERROR;
    TokenReader file;
    const size_t count = size_min((size_t)d->shards[0].num_tokens, t ? MOST_TOKENS : MOST_WORDS);
    bool ok = tokenfile_open(&file, d->shards[0].path, &e);
    file.limit = d->vocab_limit;
    ok = ok && tokenfile_read_ids(&file, 0, count, raw, ids, "a row", &e);
    TokenDecoder decoder;
    tokenfile_close(&file);
    if (t) { decoder_init(&decoder, t); }
    out[0] = 0;
    for (size_t i = 0; ok && i < count && used < cap; i++) {
        const bool edge = t && (ids[i] == t->bos_id || ids[i] == t->eos_id);
        size_t length = 0;
        if (edge && i > 0) { break; }
        if (edge) { continue; }
        const char* text = t ? decoder_push(&decoder, ids[i], &length) : NULL;
        used += (size_t)(t ? snprintf(out + used, cap - used, "%.*s", (int)length, text)
                           : snprintf(out + used, cap - used, "%s%d", i > 0 ? " " : "", ids[i]));
    }
    if (t) { decoder_free(&decoder); }
    first_words_cut(out, MOST_WORDS);
}

#endif
