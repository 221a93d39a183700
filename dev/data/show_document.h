/* show_document.h -- --show: prints a document of a token file as text. If the file has a mask, [[ ]] encloses the tokens that
 * are trained. Control characters are printed as \xNN, so that a terminal does not obey them.
 */
#ifndef DATA_SHOW_DOCUMENT_H
#define DATA_SHOW_DOCUMENT_H

#include "llmc/base/utils.h"  // first, since it asks for the functions beyond C11

#include "llmc/files/tokenfile.h"  // defines: TokenReader, tokenfile_open, tokenfile_read_ids, tokenfile_mask_at, tokenfile_bit
#include "llmc/base/text.h"        // defines: print_escaped
#include "llmc/text/tokenizer.h"   // defines: Tokenizer, TokenDecoder, decoder_push, decoder_flush

enum { SHOW_TOKENS = 1 << 12 };  // read at a time; a multiple of 8, for the mask

/* Prints the rest of a stretch of text, and then a mark. */
static inline void show_mark(TokenDecoder* d, const char* mark) {
    size_t len;
    const char* rest = decoder_flush(d, &len);
    fwrite(rest, 1, len, stdout);
    fputs(mark, stdout);
}

/* Prints document `number`, from 1. A document starts where the file marks a start, or without marks with the separator; -1:
 * there is none, and the file is one document. */
static inline bool show_document(const Tokenizer* t, int separator, const char* path, uint64_t number, Error* e) {
    unsigned char raw[4 * SHOW_TOKENS], mask[SHOW_TOKENS / 8], starts[SHOW_TOKENS / 8];
    int32_t ids[SHOW_TOKENS];
    TokenReader file;
    TokenDecoder d;
    if (!tokenfile_open(&file, path, e)) { return false; }
    file.limit = t->vocab_size;
    const TokenFileHeader h = file.h;
    bool ok = h.fingerprint == 0 || h.fingerprint == t->fingerprint ||
              fail(e, "%s: was made with another tokenizer, wanted --tokenizer with the one it was made with", path);
    bool trained = false;
    uint64_t document = 0;
    decoder_init(&d, t);
    for (uint64_t at = 0, n; ok && at < h.num_tokens && document <= number; at += n) {
        n = size_min(h.num_tokens - at, SHOW_TOKENS);
        ok = tokenfile_read_ids(&file, at, n, raw, ids, "the tokens", e) &&
             (!h.masked || read_at(fileno(file.f), tokenfile_mask_at(&h) + at / 8, mask, (n + 7) / 8, path, "the mask", e)) &&
             (!h.starts ||
              read_at(fileno(file.f), tokenfile_starts_at(&h) + at / 8, starts, (n + 7) / 8, path, "the starts", e));
        for (uint64_t i = 0; ok && i < n && document <= number; i++) {
            document += (h.starts ? tokenfile_bit(starts, i) : ids[i] == separator) || at + i == 0;
            if (document != number) { continue; }
            if (h.masked && tokenfile_bit(mask, i) != trained) {
                trained = !trained;
                show_mark(&d, trained ? "[[" : "]]");
            }
            size_t len;
            const char* text = decoder_push(&d, ids[i], &len);
            print_escaped(stdout, text, len);
        }
    }
    if (ok && document < number) {
        ok = fail(e, "%s: has %llu documents, wanted --show with at most that", path, (unsigned long long)document);
    }
    if (ok) { show_mark(&d, trained ? "]]\n" : "\n"); }
    decoder_free(&d);
    tokenfile_close(&file);
    return ok;
}

#endif
