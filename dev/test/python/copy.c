/* copy.c -- reads with our readers and writes with our writers, for tests that compare with Hugging Face's: a model's folder,
 * ./copy FROM TO [F32|BF16|F16], or a tokenizer, ./copy tokenizer FILE|DIR|bytes TO. ./copy random CONFIG.json TO writes a
 * model with a new run's weights, for tests of models without a preset. TO must exist.
 */
#include "llmc/files/model_folder.h"
#include "llmc/text/chat.h"
#include "llmc/text/tokenizer_read.h"
#include "llmc/text/tokenizer_write.h"

typedef struct {
    const ModelConfig* config;
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

static bool draw(void* ctx, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    (void)e;
    const Copy* copy = (const Copy*)ctx;
    param_init(dst, p, first, n, (uint32_t)(p - copy->table->items), copy->config, 42);
    return true;
}

static void write_random(const char* config, const char* to) {
    Error e = NO_ERROR;
    ModelConfig c;
    must(config_read(&c, config, &e), &e);
    ParamTable table = param_table(&c);
    Copy copy = {&c, &table, NULL};
    must(model_save_weights(to, &c, NULL, &table, slot_from(SAFE_F32, draw, &copy), NULL, &e), &e);
    param_table_free(&table);
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

static void copy_model(const char* from, const char* to, const char* dtype_name) {
    Error e = NO_ERROR;
    ModelConfig c;
    const SafeDtype dtype = safe_dtype(dtype_name);
    if (dtype > SAFE_F16) { die_usage("%s: wanted F32, BF16 or F16", dtype_name); }
    must(model_check(from, &c, &e), &e);
    ParamTable table = param_table(&c);
    TextRules rules;
    text_rules_init(&rules, NULL, &c);
    Copy copy = {&c, &table, (float*)xcalloc(table.elements, sizeof(float))};
    must(model_load(from, &c, &table, slot_to(take, &copy), &e) &&
             model_save_weights(to, &c, NULL, &table, slot_from(dtype, give, &copy), NULL, &e) &&
             text_rules_save_generation(&rules, &c, to, &e),
         &e);
    free(copy.arena);
    param_table_free(&table);
}

int main(int argc, char** argv) {
    if (argc != 3 && argc != 4) {
        die_usage("wanted: copy FROM TO [F32|BF16|F16], copy tokenizer FROM TO, or copy random CONFIG TO");
    }
    if (argc == 4 && strcmp(argv[1], "tokenizer") == 0) {
        copy_tokenizer(argv[2], argv[3]);
    } else if (argc == 4 && strcmp(argv[1], "random") == 0) {
        write_random(argv[2], argv[3]);
    } else {
        copy_model(argv[1], argv[2], argc == 4 ? argv[3] : "F32");
    }
    return 0;
}
