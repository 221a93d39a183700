/* fuzz_text.c -- encodes the bytes as a text with Llama 3's pattern (fuzz_text.h has the checks). The first byte says whether
 * names of special tokens become those tokens. */
#include "fuzz.h"
#include "fuzz_text.h"
#include "llmc/text/tokenizer_read.h"

/* Makes a tokenizer from a tiktoken file of the 256 bytes and a few longer tokens. */
static void fixed_tokenizer(Tokenizer* t) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    char text[8192];
    size_t n = 0;
    Error e = NO_ERROR;
    for (int b = 0; b < 256; b++) { n += (size_t)sprintf(text + n, "%c%c== %d\n", digits[b >> 2], digits[(b & 3) << 4], b); }
    // "aa" "\n\n" " a" "\"" + ":" "\xC3\xA9" "aaa"
    n += (size_t)sprintf(text + n, "YWE= 256\nCgo= 257\nIGE= 258\nIjo= 259\nw6k= 260\nYWFh 261\n");
    must(tokenizer_parse(t, text, n, "fixed", &e), &e);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static Tokenizer fixed;
    if (!fixed.vocab_size) { fixed_tokenizer(&fixed); }
    if (size > 0) { check_text(&fixed, (const char*)data + 1, size - 1, data[0] & 1); }
    return 0;
}
