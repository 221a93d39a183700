/* copy.c -- reads with our readers and writes with our writers, for tests that compare with Hugging Face's: a model's folder,
 * ./copy FROM TO [F32|BF16|F16], or a tokenizer, ./copy tokenizer FILE|DIR|bytes TO. TO must exist.
 */
#include "llmc/files/model_folder.h"
#include "llmc/text/chat.h"
#include "llmc/text/tokenizer_read.h"
#include "llmc/text/tokenizer_write.h"

typedef struct {
    const ParamTable* table;
    float* arena;
} Copy;

static bool take(void* ctx, const Param* p, size_t first, size_t n, const float* src, Error* e) {
    (void)e;
    memcpy(((Copy*)ctx)->arena + p->offset + first, src, n * sizeof(float));
    return true;
}

static bool give(void* ctx, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    (void)e;
    memcpy(dst, ((Copy*)ctx)->arena + p->offset + first, n * sizeof(float));
    return true;
}

static void copy_tokenizer(const char* from, const char* to) {
    Tokenizer t;
    Error e = NO_ERROR;
    if (strcmp(from, "bytes") == 0) {
        tokenizer_bytes(&t);
    } else {
        must(tokenizer_load(&t, from, &e), &e);
    }
    const TokenizerExtras extras = {true, chat_template_fits(&t) ? LLAMA3_CHAT_TEMPLATE : NULL, 2048};
    must(tokenizer_save(&t, to, &extras, &e), &e);
    printf("%d %d %d %016llx\n", t.vocab_size, t.bos_id, t.eos_id, (unsigned long long)t.fingerprint);
    tokenizer_free(&t);
}

int main(int argc, char** argv) {
    if (argc != 3 && argc != 4) { die_usage("wanted: copy FROM TO [F32|BF16|F16], or copy tokenizer FROM TO"); }
    if (argc == 4 && strcmp(argv[1], "tokenizer") == 0) {
        copy_tokenizer(argv[2], argv[3]);
        return 0;
    }
    Error e = NO_ERROR;
    ModelConfig c;
    const SafeDtype dtype = safe_dtype(argc == 4 ? argv[3] : "F32");
    if (dtype > SAFE_F16) { die_usage("%s: wanted F32, BF16 or F16", argv[3]); }
    if (!model_check(argv[1], &c, &e)) { die("%s", e.msg); }
    ParamTable table = param_table(&c);
    TextRules rules;
    text_rules_init(&rules, NULL, &c);
    Copy copy = {&table, (float*)xcalloc(table.elements, sizeof(float))};
    const bool ok = model_load(argv[1], &c, &table, slot_to(take, &copy), &e) &&
                    model_save_weights(argv[2], &c, NULL, &table, slot_from(dtype, give, &copy), NULL, &e) &&
                    text_rules_save_generation(&rules, &c, argv[2], &e);
    free(copy.arena);
    param_table_free(&table);
    if (!ok) { die("%s", e.msg); }
    return 0;
}
