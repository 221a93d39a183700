/* test_jobs.c -- tests the jobs other than training: the GGUF file and the merged adapters of --export, the sampling that
 * --generate takes from the model's folder, and the scores of --tasks. test_generate.c has generation and chat.
 *
 * The GGUF reader below follows the format's own description (see export.h), not the writer. Merged adapters are compared with
 * the plain loops of lora.h: their product with the identity is the matrix that a merged folder must hold.
 */
#include "llmc/run/jobs/dispatch.h"
#include "llmc/run/session/open.h"
#include "dev/test/test.h"

// ---------------------------------------------------------------------------------------------------------------------
// a reader of GGUF

/* A tensor of a GGUF file. A vector has one row. */
typedef struct {
    uint64_t rows, cols;
    uint32_t type;
    const uint8_t* data;
} Packed;

static uint64_t take(const uint8_t** at, size_t bytes) {
    uint64_t x = 0;
    memcpy(&x, *at, bytes);
    *at += bytes;
    return x;
}

/* Takes a string and returns whether it is `wanted`. */
static bool take_name(const uint8_t** at, const char* wanted) {
    const uint64_t n = take(at, 8);
    const bool same = n == strlen(wanted) && memcmp(*at, wanted, n) == 0;
    *at += n;
    return same;
}

static void skip_value(const uint8_t** at, uint64_t type) {
    enum { STRING = 8, ARRAY = 9 };
    static const size_t bytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    if (type == STRING) {
        take_name(at, "");
    } else if (type == ARRAY) {
        const uint64_t each = take(at, 4);
        for (uint64_t n = take(at, 8); n > 0; n--) { skip_value(at, each); }
    } else {
        *at += bytes[type];
    }
}

/* Walks a file and returns the value of `key`, a number of 4 bytes, and the tensor `name`. Either may be "". */
static uint32_t gguf_walk(const uint8_t* file, const char* key, const char* name, Packed* found) {
    const uint8_t* at = file;
    uint32_t value = 0;
    uint64_t offset = 0;
    CHECK(take(&at, 4) == 0x46554747 && take(&at, 4) == 3, "it is no GGUF file of version 3");
    const uint64_t tensors = take(&at, 8), keys = take(&at, 8);
    bool missing = *key != 0;
    for (uint64_t i = 0; i < keys; i++) {
        const bool wanted = take_name(&at, key);
        const uint64_t type = take(&at, 4);
        if (wanted) { memcpy(&value, at, 4); }
        missing = missing && !wanted;
        skip_value(&at, type);
    }
    CHECK(!missing, "%s is missing", key);
    missing = *name != 0;
    for (uint64_t i = 0; i < tensors; i++) {
        const bool wanted = take_name(&at, name);
        const uint64_t dims = take(&at, 4), cols = take(&at, 8), rows = dims == 2 ? take(&at, 8) : 1;
        const uint32_t type = (uint32_t)take(&at, 4);
        const uint64_t here = take(&at, 8);
        missing = missing && !wanted;
        if (!wanted) { continue; }
        offset = here;
        found->rows = rows, found->cols = cols, found->type = type;
    }
    CHECK(!missing, "%s is missing", name);
    if (*name && !missing) { found->data = file + ((size_t)(at - file) + 31) / 32 * 32 + offset; }
    return value;
}

static float gguf_float(const uint8_t* file, const char* key) {
    const uint32_t bits = gguf_walk(file, key, "", NULL);
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// ---------------------------------------------------------------------------------------------------------------------
// --export FILE.gguf

/* Element i of a parameter: of either sign, and of many sizes. */
static float value_of(const Param* p, size_t i) {
    const int n = (int)((i * 7919 + (size_t)(p->kind * 31 + p->layer)) % 255) - 127;
    return ldexpf((float)n, (int)(i / 32 % 5) - 12);
}

static bool give(void* ctx, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    (void)ctx, (void)e;
    for (size_t i = 0; i < n; i++) { dst[i] = value_of(p, first + i); }
    return true;
}

/* A model without a common number, and its table. */
static ModelConfig odd_model(ParamTable* table) {
    ModelConfig c;
    config_preset(&c, "d2", 300);
    c.max_positions = 777;
    c.rms_eps = 3e-4f;
    c.rope_theta = 12345;
    *table = param_table(&c);
    return c;
}

/* Returns the model as a GGUF file with matrices of a type. The caller frees it. */
static uint8_t* gguf_of(const ModelConfig* c, const ParamTable* table, ExportDtype type) {
    Tokenizer tokenizer;
    char* file = NULL;
    size_t size = 0;
    Error e = NO_ERROR;
    tokenizer_bytes(&tokenizer);
    TextRules rules;
    text_rules_init(&rules, &tokenizer, c);
    const GgufModel m = {"odd", c, table, &rules, type, give, NULL};
    FILE* f = xopen_memory(&file, &size);
    CHECK(gguf_check(&m, &e) && gguf_write(f, &m, &e), "%s", e.msg);
    xclose_memory(f, &file);
    tokenizer_free(&tokenizer);
    return (uint8_t*)file;
}

TEST(a_gguf_file_has_the_numbers_of_the_model) {
    ParamTable table;
    const ModelConfig c = odd_model(&table);
    uint8_t* file = gguf_of(&c, &table, EXPORT_F32);
    const struct {
        const char* key;
        int want;
    } integers[] = {{"llama.vocab_size", 300},           {"llama.context_length", 777},
                    {"llama.embedding_length", 128},     {"llama.block_count", 2},
                    {"llama.attention.head_count", 2},   {"llama.attention.head_count_kv", 1},
                    {"llama.attention.key_length", 64},  {"llama.attention.value_length", 64},
                    {"llama.rope.dimension_count", 64},  {"llama.feed_forward_length", c.intermediate_size},
                    {"tokenizer.ggml.bos_token_id", 256}};
    for (size_t i = 0; i < sizeof integers / sizeof *integers; i++) {
        const uint32_t got = gguf_walk(file, integers[i].key, "", NULL);
        CHECK(got == (uint32_t)integers[i].want, "%s is %u, wanted %d", integers[i].key, got, integers[i].want);
    }
    const float eps = gguf_float(file, "llama.attention.layer_norm_rms_epsilon"),
                base = gguf_float(file, "llama.rope.freq_base");
    CHECK(eps == 3e-4f, "the epsilon of the norms is %g", (double)eps);
    CHECK(base == 12345, "the base of RoPE is %g", (double)base);
    free(file);
    param_table_free(&table);
}

/* llama.cpp rotates neighbours: element i of the first half of a head becomes 2i, element i of the second half 2i + 1. */
TEST(rows_of_q_and_k_become_neighbours_and_others_stay) {
    ParamTable table;
    const ModelConfig c = odd_model(&table);
    uint8_t* file = gguf_of(&c, &table, EXPORT_F32);
    const struct {
        const char* name;
        ParamKind kind;
        bool turned;
    } tensors[] = {{"blk.1.attn_q.weight", P_Q, true}, {"blk.1.attn_k.weight", P_K, true}, {"blk.1.attn_v.weight", P_V, false}};
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) {
        const Param* p = param_at(&table, tensors[i].kind, 1);
        Packed t = {0, 0, 0, NULL};
        size_t wrong = 0;
        gguf_walk(file, "", tensors[i].name, &t);
        CHECK(t.rows == p->rows && t.cols == p->cols && t.type == 0, "%s has another shape", tensors[i].name);
        for (size_t r = 0; r < p->rows; r++) {
            const size_t in_head = r % 64, turned = in_head < 32 ? 2 * in_head : 2 * (in_head - 32) + 1;
            const size_t to = tensors[i].turned ? r - in_head + turned : r;
            for (size_t k = 0; k < p->cols; k++) {
                float x;
                memcpy(&x, t.data + (to * p->cols + k) * sizeof x, sizeof x);
                wrong += x != value_of(p, r * p->cols + k);
            }
        }
        CHECK(wrong == 0, "%s: %zu elements are in another place", tensors[i].name, wrong);
    }
    free(file);
    param_table_free(&table);
}

/* 32 neighbours share a scale, the largest of them divided by 127, in F16. Each number is then off by at most half a scale,
 * and by the rounding of the scale. */
TEST(q8_0_numbers_are_off_by_half_a_scale_at_most) {
    ParamTable table;
    const ModelConfig c = odd_model(&table);
    uint8_t* file = gguf_of(&c, &table, EXPORT_Q8_0);
    const Param* p = param_at(&table, P_DOWN, 0);
    Packed t = {0, 0, 0, NULL};
    gguf_walk(file, "", "blk.0.ffn_down.weight", &t);
    CHECK(t.rows == p->rows && t.cols == p->cols && t.type == 8, "another shape or type");
    double worst = 0;
    for (size_t block = 0; block < param_size(p) / 32; block++) {
        const uint8_t* at = t.data + block * 34;
        uint16_t scale;
        float largest = 0;
        memcpy(&scale, at, 2);
        for (size_t i = 0; i < 32; i++) { largest = fmaxf(largest, fabsf(value_of(p, block * 32 + i))); }
        const double d = (double)f32_from_f16(scale), want = (double)largest / 127;
        CHECK(fabs(d / want - 1) <= 0x1p-11, "block %zu: the scale is %g, wanted %g", block, d, want);
        for (size_t i = 0; i < 32; i++) {
            worst = fmax(worst, fabs((int8_t)at[2 + i] * d - (double)value_of(p, block * 32 + i)) / d);
        }
    }
    CHECK(worst <= 0.5 + 127 * 0x1p-11, "a number is off by %g scales", worst);
    free(file);
    param_table_free(&table);
}

// ---------------------------------------------------------------------------------------------------------------------
// --export DIR, of adapters

/* Opens a program of these flags, as the trainer does. */
static void open_program(Program* p, char** flags, int count) {
    char* argv[16] = {"train_llama3"};
    for (int i = 0; i < count; i++) { argv[i + 1] = flags[i]; }
    program_open(p, count + 1, argv, ON_CPU, 0, 1, no_report);
}

/* Reads a matrix (rows, cols) of a model folder into columns [at, at + rows) of y (cols, OC): transposed. */
static void read_transposed(const ModelFiles* files, const Param* p, float* y, size_t at, size_t OC) {
    const SafeTensors* file = NULL;
    const SafeTensor* t = model_find(files, p->name, &file);
    float* w = (float*)xmalloc(param_size(p) * sizeof *w);
    Error e = NO_ERROR;
    CHECK(t && safetensors_read_f32(file, t, 0, param_size(p), w, &e), "%s: %s", p->name, e.msg);
    for (size_t r = 0; r < p->rows; r++) {
        for (size_t k = 0; k < p->cols; k++) { y[k * OC + at + r] = w[r * p->cols + k]; }
    }
    free(w);
}

/* Compares the matrices of one product of a layer, merged, with what the plain loops make of the identity. Returns the largest
 * difference; *effect becomes the adapters' own largest effect. */
static double merged_error(const ModelSpec* m, const float* adapters, const ModelFiles* base, const ModelFiles* merged,
                           LinearKind linear, int layer, double* effect) {
    int outputs = 0, inputs = 0;
    linear_shape(&m->config, linear, &outputs, &inputs);
    const size_t C = (size_t)inputs, OC = (size_t)outputs;
    const Lora l = lora_at(&m->config, &m->trained, linear, layer);
    float *x = (float*)xcalloc(C * C, sizeof(float)), *y = (float*)xcalloc(C * OC, sizeof(float));
    float *got = (float*)xcalloc(C * OC, sizeof(float)), *t = (float*)xcalloc(C * LORA_PARTS * (size_t)l.r + 1, sizeof(float));
    double worst = 0;
    size_t at = 0;
    for (size_t i = 0; i < C; i++) { x[i * C + i] = 1; }
    for (int i = lora_first_pair(linear); i < lora_first_pair(linear + 1); i++) {
        const Param* p = param_at(&m->table, lora_pairs[i].matrix, layer);
        read_transposed(base, p, y, at, OC);
        read_transposed(merged, p, got, at, OC);
        at += p->rows;
    }
    for (size_t i = 0; i < C * OC; i++) { *effect = fmax(*effect, fabs((double)got[i] - (double)y[i])); }
    const LoraMemory memory = {adapters, NULL, t, NULL};
    lora_forward_plain(y, &memory, x, &l, C);
    for (size_t i = 0; i < C * OC; i++) { worst = fmax(worst, fabs((double)got[i] - (double)y[i])); }
    free(x);
    free(y);
    free(got);
    free(t);
    return worst;
}

TEST(merged_adapters_are_those_of_the_plain_loops) {
    static const char* const pairs[] = {"dev/test/pairs/lora_all", "dev/test/pairs/lora_some"};
    for (int i = 0; i < 2; i++) {
        const char* out = test_path(test_folder(), "merged");
        char* flags[] = {"--model", (char*)pairs[i], "--export", (char*)out};
        Program p;
        ModelFiles base, merged;
        Error e = NO_ERROR;
        double worst = 0, effect = 0;
        open_program(&p, flags, 4);
        job_export(&p);
        float* adapters = (float*)xcalloc(p.spec.trained.elements, sizeof(float));
        HostSlot slot;
        CHECK(adapter_load(pairs[i], &p.spec.trained, NULL, host_slot(&slot, SLOT_MASTER, adapters, NULL), &e), "%s", e.msg);
        CHECK(model_open(&base, p.start.base_dir, &e) && model_open(&merged, out, &e), "%s", e.msg);
        for (int layer = 0; layer < p.spec.config.num_layers; layer++) {
            for (int linear = 0; linear < BLOCK_LINEARS; linear++) {
                worst = fmax(worst, merged_error(&p.spec, adapters, &base, &merged, (LinearKind)linear, layer, &effect));
            }
        }
        CHECK(worst <= 1e-6 && effect > 0.1, "%s: off by %g; the adapters change a weight by %g", pairs[i], worst, effect);
        free(adapters);
        model_close(&base);
        model_close(&merged);
        program_close(&p);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// --generate: the sampling of generation_config.json

TEST(sampling_is_that_of_the_model_s_folder_unless_flags_give_it) {
    static const char all[] = "{\"do_sample\": true, \"temperature\": 0.25, \"top_k\": 7, \"top_p\": 0.5}";
    static const char silent[] = "{\"temperature\": 0.25, \"top_k\": 7}";
    static const char greedy[] = "{\"do_sample\": false, \"temperature\": 0.25}";
    static const char draws[] = "{\"do_sample\": true}";
    static const struct {
        const char* file;
        char *flag, *value;
        double temperature;
        int top_k;
        double top_p;
    } cases[] = {{all, NULL, NULL, 0.25, 7, 0.5},
                 {all, "--temperature", "0.75", 0.75, 7, 0.5},
                 {all, "--top-k", "3", 0.25, 3, 0.5},
                 {all, "--top-p", "0.875", 0.25, 7, 0.875},
                 {draws, NULL, NULL, 1, 50, 1},  // the defaults of transformers
                 {draws, "--seed", "1", 1, 50, 1},
                 {greedy, NULL, NULL, 0, 0, 0.95},  // transformers then ignores the temperature
                 {greedy, "--seed", "1", 0, 0, 0.95},
                 {greedy, "--top-k", "3", 0.25, 3, 0.95},
                 {silent, NULL, NULL, 0, 7, 0.95},
                 {silent, "--seed", "1", 0.25, 7, 0.95},
                 {"{}", NULL, NULL, 0, 0, 0.95},
                 {"{}", "--top-k", "3", 0.8, 3, 0.95},
                 {"{\"do_sample\": true, \"top_p\": 2, \"top_k\": -1, \"temperature\": null}", NULL, NULL, 1, 0, 1},
                 {"no JSON", NULL, NULL, 0, 0, 0.95}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char* argv[] = {"train_llama3", "--generate", "text", cases[i].flag, cases[i].value};
        Options given, chosen;
        const Options* o = &chosen;
        ModelConfig c;
        TextRules rules;
        Error e = NO_ERROR;
        test_put(test_file("generation_config.json"), cases[i].file);
        options_or_exit(&given, cases[i].flag ? 5 : 3, argv, ON_CPU);
        choose_typed(&chosen, &given);
        config_preset(&c, "d1", 300);
        CHECK(text_rules_read(&rules, NULL, &c, test_here(), false, true, &e), "%s", e.msg);
        choose_sampling(&chosen, &rules.sampling);
        CHECK(o->temperature == cases[i].temperature && o->top_k == cases[i].top_k && o->top_p == cases[i].top_p,
              "%s: %s: temperature %g, top-k %d, top-p %g", cases[i].file, cases[i].flag ? cases[i].flag : "no flag",
              o->temperature, o->top_k, o->top_p);
        text_rules_free(&rules);
        options_free(&chosen);
        options_free(&given);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// --eval --tasks

/* The right answer of both questions is the first. In the first one, all choices have the same likelihood a character. In the
 * second one, they have the same likelihood. */
TEST(the_first_of_equal_choices_is_the_answer) {
    const char* path = test_file("ties.jsonl");
    test_put(path,
             "{\"ctx\": \"a\", \"choices\": [\"four\", \"is\", \"more\"], \"label\": 0}\n"
             "{\"ctx\": \"a\", \"choices\": [\"no\", \"is\"], \"label\": 0}\n");
    static const double likelihoods[] = {-4, -2, -4, -3, -3};
    Tokenizer tokenizer;
    Tasks t;
    Error e = NO_ERROR;
    tokenizer_bytes(&tokenizer);
    TextRules rules;
    text_rules_init(&rules, &tokenizer, NULL);
    CHECK(tasks_open(&t, path, &rules, &e) && t.num_choices == 5, "%s", e.msg);
    const TaskScore score = tasks_score(&t, &t.files[0], likelihoods);
    CHECK(score.acc == 0.5, "acc %g: the first is the answer to the second question alone", score.acc);
    CHECK(score.acc_norm == 1, "acc_norm %g: the first is the answer to both", score.acc_norm);
    tasks_free(&t);
    tokenizer_free(&tokenizer);
}

int main(void) { return test_all(); }
