/* first_words.h -- a prompt that suits the training data, for the command that a run proposes at its end: the first words of
 * the first token file, or its first ids if there is no tokenizer.
 */
#ifndef LLMC_FIRST_WORDS_H
#define LLMC_FIRST_WORDS_H

#include "llmc/base/utils.h"

#include "llmc/files/dataloader.h"
#include "llmc/base/text.h"
#include "llmc/text/tokenizer.h"

/* Ends a text after `most` words, and before what a terminal or a shell would obey. */
static inline void first_words_cut(char* text, int most) {
    int words = 0;
    size_t n = 0;
    for (; text[n] && !strchr("\"\\$`!", text[n]); n++) {
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
    uint64_t size = 0;
    Error e = NO_ERROR;
    const char* path = d->shards[0].path;
    const size_t count = size_min((size_t)d->shards[0].num_tokens, MOST_TOKENS);
    const size_t width = (size_t)d->token_bytes;
    const int fd = open_to_read(path, "a regular file", &size, &e);
    const bool ok = fd >= 0 && read_at(fd, TOKENFILE_HEADER_BYTES, raw, count * width, path, "a row", &e) &&
                    tokenfile_widen(ids, raw, count, d->token_bytes, d->vocab_limit, 0, path, &e);
    FILE* f = fmemopen(out, cap, "w");
    TokenDecoder decoder;
    if (fd >= 0) { close(fd); }
    out[0] = 0;
    if (!f) { return; }
    if (t) { decoder_init(&decoder, t); }
    for (size_t i = 0; ok && i < count; i++) {
        const bool edge = t && (ids[i] == t->bos_id || ids[i] == t->eos_id);
        if (edge && i > 0) { break; }
        size_t length = 0;
        if (t && !edge) {
            const char* text = decoder_push(&decoder, ids[i], &length);
            fwrite(text, 1, length, f);
        } else if (!t && i < MOST_WORDS) {
            fprintf(f, "%s%d", i > 0 ? " " : "", ids[i]);
        }
    }
    if (t) { decoder_free(&decoder); }
    fclose(f);
    out[cap - 1] = 0;
    first_words_cut(out, MOST_WORDS);
}

#endif
