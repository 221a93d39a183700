/* tokenizer_copy.c -- reads a tokenizer and writes it to a folder: ./tokenizer_copy FILE|DIR|bytes TO. TO must exist.
 * test_tokenizer.py reads the folder with transformers. */
#include "llmc/text/tokenizer_read.h"
#include "llmc/text/tokenizer_write.h"

int main(int argc, char** argv) {
    Tokenizer t;
    Error e = NO_ERROR;
    if (argc != 3) { die_usage("wanted: tokenizer_copy FILE|DIR|bytes TO"); }
    if (strcmp(argv[1], "bytes") == 0) {
        tokenizer_bytes(&t);
    } else if (!tokenizer_load(&t, argv[1], &e)) {
        die("%s", e.msg);
    }
    if (!tokenizer_save(&t, argv[2], 2048, &e)) { die("%s", e.msg); }
    printf("%d %d %d %016llx\n", t.vocab_size, t.bos_id, t.eos_id, (unsigned long long)t.fingerprint);
    tokenizer_free(&t);
    return 0;
}
