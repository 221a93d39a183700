/* fuzz_text.c -- encodes the bytes as a text with Llama 3's pattern (fuzz_text.h has the checks). The first byte says whether
 * names of special tokens become those tokens. */
#include "fuzz.h"
#include "fuzz_text.h"
#include "dev/test/byte_tokens.h"

// "aa" "\n\n" " a" "\"" + ":" "\xC3\xA9" "aaa"
static const char more[] = "YWE= 256\nCgo= 257\nIGE= 258\nIjo= 259\nw6k= 260\nYWFh 261\n";

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static Tokenizer fixed;
    if (!fixed.vocab_size) { byte_tokens(&fixed, more); }
    if (size > 0) { check_text(&fixed, (const char*)data + 1, size - 1, data[0] & 1); }
    return 0;
}
