/* byte_tokens.h -- a tokenizer for tests: the 256 bytes, with ids equal to the bytes, and Llama 3's special tokens. */
#ifndef LLMC_BYTE_TOKENS_H
#define LLMC_BYTE_TOKENS_H

#include "llmc/base/utils.h"
#include "llmc/text/tokenizer_read.h"  // defines: tokenizer_parse

/* Makes the tokenizer. `more`: further lines of tiktoken's format, "" for none. */
static inline void byte_tokens(Tokenizer* t, const char* more) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    char text[8192];
    size_t n = 0;
    Error e = NO_ERROR;
    for (int b = 0; b < 256; b++) { n += (size_t)sprintf(text + n, "%c%c== %d\n", digits[b >> 2], digits[(b & 3) << 4], b); }
    n += (size_t)snprintf(text + n, sizeof text - n, "%s", more);
    must(tokenizer_parse(t, text, n, "bytes", &e), &e);
}

#endif
