/* test_config.c -- config.json in all its spellings, and the fields that the reader refuses by name. Also the model folder:
 * tensors that are missing, unknown, of the wrong shape or in the wrong file, in one file and in shards. */
#include "llmc/base/utils.h"

static unsigned long long shard_bytes = 5000000000ull;  // a small limit makes model_save_weights() write shards
#define MODEL_SHARD_BYTES shard_bytes
#define TENSOR_READ_PIECE 7  // elements: small models are read in many batches
#include "llmc/files/model_folder.h"

#include <pthread.h>

#include "dev/test/test.h"

static Error error;

static void put(const char* name, const char* text) { test_put(test_file(name), text); }

#define SHAPE "\"vocab_size\":50,\"hidden_size\":12,\"intermediate_size\":20,\"num_hidden_layers\":2,\"num_attention_heads\":2"
#define LLAMA "{\"model_type\":\"llama\"," SHAPE

/* Parses a small Llama's config.json with these members added at the end. */
static bool reads(ModelConfig* c, const char* more) {
    char text[4096];
    snprintf(text, sizeof text, LLAMA "%s}", more);
    put("config.json", text);
    memset(&error, 0, sizeof error);
    return config_read(c, test_file("config.json"), &error);
}

#define ACCEPTED(more) CHECK(reads(&c, more), "%s", error.msg)
#define REFUSED(more, part)                                                                                                  \
    CHECK(!reads(&c, more) && contains(error.msg, part) && contains(error.msg, "config.json"), "wanted \"%s\", message: %s", \
          part, error.msg)

TEST(absent_and_null_fields_have_their_defaults) {
    ModelConfig c;
    static const char* const texts[] = {
        "",
        ",\"head_dim\":null,\"num_key_value_heads\":null,\"rms_norm_eps\":null,\"rope_theta\":null,\"rope_scaling\":null,"
        "\"rope_parameters\":null,\"tie_word_embeddings\":null,\"eos_token_id\":null,\"bos_token_id\":null,\"hidden_act\":null,"
        "\"attention_bias\":null,\"mlp_bias\":false,\"quantization_config\":null,\"sliding_window\":null,\"attention_dropout\":"
        "0.0,"
        "\"max_position_embeddings\":null,\"architectures\":null,\"partial_rotary_factor\":null"};
    for (int i = 0; i < 2; i++) {
        ACCEPTED(texts[i]);
        CHECK(c.vocab_size == 50 && c.hidden_size == 12 && c.intermediate_size == 20 && c.num_layers == 2 && c.num_heads == 2,
              "shape");
        CHECK(c.head_dim == 6 && c.num_kv_heads == 2 && c.rms_eps == 1e-6f && c.rope_theta == 10000 && !c.tied, "defaults");
        CHECK(!c.rope_llama3 && c.bos_id == -1 && c.num_eos == 0 && c.max_positions == 2048, "defaults");
    }
}

TEST(ids_are_one_or_several) {
    ModelConfig c;
    ACCEPTED(",\"bos_token_id\":0,\"eos_token_id\":49");
    CHECK(c.bos_id == 0 && c.num_eos == 1 && c.eos_ids[0] == 49, "one");
    ACCEPTED(",\"eos_token_id\":[1,2,3]");
    CHECK(c.num_eos == 3 && c.eos_ids[2] == 3, "list");
    ACCEPTED(",\"eos_token_id\":[]");
    CHECK(c.num_eos == 0, "empty list");
    ACCEPTED(",\"bos_token_id\":50,\"eos_token_id\":50");  // config_warn() says so
    CHECK(c.bos_id == -1 && c.num_eos == 0, "ids that are no tokens");
    ACCEPTED(",\"bos_token_id\":-1,\"eos_token_id\":[1,-1]");
    CHECK(c.bos_id == -1 && c.num_eos == 1, "-1 stands for none");
    char many[256] = ",\"eos_token_id\":[1";
    for (int i = 0; i < MAX_EOS; i++) { strcat(many, ",1"); }
    REFUSED(strcat(many, "]"), "up to 32 ids");
    REFUSED(",\"eos_token_id\":\"x\"", "eos_token_id is \"x\"");
    REFUSED(",\"bos_token_id\":\"x\"", "bos_token_id is \"x\", wanted an integer");
}

#define L3 "\"factor\":8.0,\"low_freq_factor\":1.0,\"high_freq_factor\":4,\"original_max_position_embeddings\":64"

TEST(rope_is_read_in_every_spelling) {
    ModelConfig c;
    static const char* const same[] = {
        ",\"rope_theta\":5e5,\"rope_scaling\":{\"rope_type\":\"llama3\"," L3 "}",
        ",\"rope_theta\":500000,\"rope_scaling\":{\"type\":\"llama3\"," L3 "}",
        ",\"rope_theta\":500000.0,\"rope_scaling\":{\"type\":\"llama3\",\"rope_type\":\"llama3\"," L3 "}",
        ",\"rope_parameters\":{\"rope_theta\":500000.0,\"rope_type\":\"llama3\"," L3 "}",
        ",\"rope_theta\":500000.0,\"rope_parameters\":{\"rope_type\":\"llama3\"," L3 "}",
        ",\"rope_theta\":500000.0,\"rope_scaling\":{\"rope_type\":\"llama3\"," L3
        "},\"rope_parameters\":{\"rope_theta\":500000,\"rope_type\":\"llama3\"," L3 "}",
        ",\"rope_scaling\":null,\"rope_parameters\":{\"rope_theta\":500000.0,\"type\":\"llama3\"," L3 "}",
    };
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
        ACCEPTED(same[i]);
        CHECK(c.rope_llama3 && c.rope_theta == 500000 && c.rope_factor == 8 && c.rope_low_freq == 1 && c.rope_high_freq == 4 &&
                  c.rope_original_len == 64,
              "spelling %zu", i);
    }
    ACCEPTED(",\"rope_theta\":1000.5,\"rope_scaling\":{}");
    CHECK(!c.rope_llama3 && c.rope_theta == 1000.5, "theta alone");
    ACCEPTED(",\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":777}");
    CHECK(!c.rope_llama3 && c.rope_theta == 777, "default type");
    ACCEPTED(
        ",\"max_position_embeddings\":512,\"rope_scaling\":{\"type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1,\"high_freq_"
        "factor\":4}");
    CHECK(c.rope_original_len == 512, "the original length defaults to max_position_embeddings");
}

TEST(rope_spellings_that_disagree_are_refused_by_name) {
    ModelConfig c;
#define BOTH(a, b) ",\"rope_scaling\":{" a "},\"rope_parameters\":{" b "}"
    REFUSED(BOTH("\"rope_type\":\"llama3\"," L3, "\"rope_type\":\"default\",\"rope_theta\":10000"),
            "rope_parameters.rope_type is \"default\"");
    REFUSED(BOTH("\"rope_type\":\"default\"", "\"rope_type\":\"llama3\"," L3), "rope_scaling.rope_type is \"default\"");
    REFUSED(BOTH("\"rope_type\":\"llama3\"," L3,
                 "\"rope_type\":\"llama3\",\"factor\":32,\"low_freq_factor\":1,\"high_freq_factor\":4,\"original_max_position_"
                 "embeddings\":64"),
            "rope_scaling.factor is 8, but rope_parameters.factor is 32");
    REFUSED(BOTH("\"rope_type\":\"llama3\"," L3,
                 "\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1,\"high_freq_factor\":4,\"original_max_position_"
                 "embeddings\":65"),
            "original_max_position_embeddings");
    REFUSED(",\"rope_theta\":10000,\"rope_parameters\":{\"rope_theta\":500000,\"rope_type\":\"default\"}",
            "rope_theta is 10000, but rope_parameters.rope_theta is 500000");
    REFUSED(BOTH("\"type\":\"default\"", "\"rope_theta\":500000,\"rope_type\":\"default\""),
            "rope_theta (absent) is 10000, but rope_parameters.rope_theta is 500000");
    REFUSED(",\"rope_theta\":10000,\"rope_scaling\":{\"rope_theta\":500000,\"rope_type\":\"default\"}",
            "rope_scaling.rope_theta is 500000");
    REFUSED(",\"rope_scaling\":{\"type\":\"default\",\"rope_type\":\"llama3\"," L3 "}", "rope_scaling.type is \"default\"");
}

/* Returns the output of config_warn() on a small Llama's config.json with these members added at the end. */
static const char* warnings_of(const char* more) {
    static char text[2048];
    ModelConfig c;
    CHECK(reads(&c, more), "%s", error.msg);
    fflush(stderr);
    FILE* caught = tmpfile();
    const int screen = dup(2);
    dup2(fileno(caught), 2);
    config_warn(&c, test_file("config.json"));
    fflush(stderr);
    dup2(screen, 2);
    close(screen);
    rewind(caught);
    text[fread(text, 1, sizeof text - 1, caught)] = 0;
    fclose(caught);
    return text;
}

TEST(a_key_that_was_lost_is_warned_of) {
#define SCALED "\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1,\"high_freq_factor\":4"
    static const struct {
        const char *more, *says;
    } cases[] = {
        {",\"attention_dropout\":0.1", "training here has no dropout"},
        {",\"rope_scaling\":{" SCALED "}", "config.json: has RoPE of type llama3, but no rope_theta: it is 10000"},
        {",\"rope_theta\":null,\"rope_scaling\":{" SCALED "}", "no rope_theta"},
        {",\"rope_parameters\":{" SCALED ",\"rope_teta\":5e5}",
         "\"rope_teta\" is unknown and ignored, did you mean \"rope_theta\"?"},
        {",\"rope_thetas\":5e5", "did you mean \"rope_theta\"?"},
        {",\"rms_norm_esp\":1e-5", "\"rms_norm_esp\" is unknown and ignored, did you mean \"rms_norm_eps\"?"},
        {",\"tie_word_embedding\":true", "did you mean \"tie_word_embeddings\"?"},
        {",\"mlp_bais\":true", "did you mean \"mlp_bias\"?"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char* got = warnings_of(cases[i].more);
        CHECK(strncmp(got, "warning: ", 9) == 0 && contains(got, cases[i].says), "%s gave: %s", cases[i].more, got);
    }
    // as Llama 3.2, SmolLM2, TinyLlama and older files have them, in the spellings of transformers 4 and 5
    static const char* const usual[] = {
        "",
        ",\"rope_theta\":500000.0,\"rope_scaling\":{" SCALED
        ",\"original_max_position_embeddings\":8192},\"pretraining_tp\":1,"
        "\"torch_dtype\":\"bfloat16\",\"transformers_version\":\"4.45.0\",\"use_cache\":true,\"initializer_range\":0.02",
        ",\"rope_parameters\":{" SCALED ",\"rope_theta\":5e5,\"original_max_position_embeddings\":8192},\"dtype\":\"bfloat16\"",
        ",\"is_llama_config\":true,\"rope_interleaved\":false,\"transformers.js_config\":{\"kv_cache_dtype\":{\"q4f16\":"
        "\"float16\"}},\"pad_token_id\":2,\"sep_token_id\":1,\"unk_token_id\":0,\"decoder_start_token_id\":1,"
        "\"_attn_implementation_autoset\":true,\"unsloth_fixed\":true,\"_name_or_path\":\"x\",\"tokenizer_class\":\"y\"",
        ",\"attention_bias\":false,\"mlp_bias\":false,\"head_dim\":6,\"max_sequence_length\":2048,\"is_decoder\":false,"
        "\"num_beams\":1,\"top_k\":50,\"top_p\":1.0,\"num_labels\":2,\"hidden_dropout\":0.0,\"layer_norm_eps\":1e-5,"
        "\"n_layer\":2,\"n_head\":2,\"auto_map\":{\"AutoConfig\":\"z\"},\"output_attentions\":false",
    };
    for (size_t i = 0; i < sizeof usual / sizeof *usual; i++) {
        const char* got = warnings_of(usual[i]);
        CHECK(!*got, "%s gave: %s", usual[i], got);
    }
#undef SCALED
}

TEST(what_would_be_computed_wrongly_is_refused_by_name) {
    ModelConfig c;
    REFUSED(",\"attention_bias\":true", "attention_bias is true");
    REFUSED(",\"mlp_bias\":true", "mlp_bias is true");
    REFUSED(",\"quantization_config\":{\"bits\":4}", "quantization_config is an object");
    REFUSED(",\"sliding_window\":4096", "sliding_window is 4096");
    REFUSED(",\"num_local_experts\":8", "num_local_experts is 8");
    REFUSED(",\"hidden_act\":\"gelu\"", "hidden_act is \"gelu\", wanted \"silu\"");
    REFUSED(",\"architectures\":[\"LlamaForSequenceClassification\"]", "LlamaForSequenceClassification");
    REFUSED(",\"partial_rotary_factor\":0.5", "partial_rotary_factor is 0.5");
    REFUSED(",\"rope_parameters\":{\"rope_type\":\"default\",\"partial_rotary_factor\":0.5}",
            "rope_parameters.partial_rotary_factor is 0.5");
    static const char* const types[] = {"linear", "dynamic", "yarn", "longrope", "su", "mrope", "Llama3", ""};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        char more[200], part[100];
        snprintf(more, sizeof more, ",\"rope_scaling\":{\"type\":\"%s\",\"factor\":2.0}", types[i]);
        snprintf(part, sizeof part, "rope_scaling.type is \"%s\"", types[i]);
        REFUSED(more, part);
    }
    REFUSED(",\"rope_scaling\":{\"factor\":2.0}", "rope_scaling.rope_type is missing");
    REFUSED(",\"rope_parameters\":{\"full_attention\":{\"rope_type\":\"default\"}}",
            "rope_parameters.full_attention is an object");
    REFUSED(",\"rope_scaling\":\"llama3\"", "rope_scaling is \"llama3\", wanted an object");
    put("config.json", "{\"model_type\":\"mistral\"," SHAPE "}");
    memset(&error, 0, sizeof error);
    FAILS(&error, config_read(&c, test_file("config.json"), &error), "model_type is \"mistral\", wanted \"llama\"");
    put("config.json", "{" SHAPE "}");
    memset(&error, 0, sizeof error);
    CHECK(!config_read(&c, test_file("config.json"), &error) && contains(error.msg, "model_type is missing"), "%s", error.msg);
    put("config.json", "[]");
    memset(&error, 0, sizeof error);
    CHECK(!config_read(&c, test_file("config.json"), &error) && contains(error.msg, "not a JSON object"), "%s", error.msg);
}

TEST(numbers_out_of_range_are_refused) {
    ModelConfig c;
    static const char* const fields[] = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                                         "num_attention_heads"};
    static const char* const values[] = {"0",   "-1",  "2147483647", "2147483648", "4294967296", "18446744073709551616",
                                         "1.5", "8.0", "\"8\"",      "null",       "true",       "1e3"};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        for (size_t k = 0; k < sizeof values / sizeof *values; k++) {
            char text[1000];
            size_t used = (size_t)snprintf(text, sizeof text, "{\"model_type\":\"llama\"");
            for (size_t n = 0; n < sizeof fields / sizeof *fields; n++) {
                used += (size_t)snprintf(text + used, sizeof text - used, ",\"%s\":%s", fields[n], n == i ? values[k] : "8");
            }
            snprintf(text + used, sizeof text - used, "}");
            put("config.json", text);
            memset(&error, 0, sizeof error);
            CHECK(!config_read(&c, test_file("config.json"), &error) && contains(error.msg, fields[i]), "%s = %s: %s",
                  fields[i], values[k], error.msg);
        }
    }
    REFUSED(",\"head_dim\":5", "head_dim is 5, wanted an even number");
    REFUSED(",\"head_dim\":258", "head_dim is 258");
    REFUSED(",\"head_dim\":0", "head_dim is 0");
    REFUSED(",\"num_key_value_heads\":3", "num_key_value_heads is 3");
    REFUSED(",\"num_key_value_heads\":0", "num_key_value_heads is 0");
    REFUSED(",\"rms_norm_eps\":0", "rms_norm_eps is 0");
    REFUSED(",\"rms_norm_eps\":1e999", "rms_norm_eps is 1e999");
    REFUSED(",\"rope_theta\":0", "rope_theta is 0");
    REFUSED(",\"rope_theta\":-5", "rope_theta is -5");
    REFUSED(",\"max_position_embeddings\":0", "max_position_embeddings is 0");
    REFUSED(",\"tie_word_embeddings\":1", "tie_word_embeddings is 1");
    REFUSED(",\"rope_scaling\":{\"type\":\"llama3\",\"factor\":0.5}", "rope_scaling.factor is 0.5");
    REFUSED(",\"rope_scaling\":{\"type\":\"llama3\",\"factor\":8}", "rope_scaling.low_freq_factor is missing");
    REFUSED(",\"rope_scaling\":{\"type\":\"llama3\",\"factor\":8,\"low_freq_factor\":4,\"high_freq_factor\":4}",
            "wanted more than low_freq_factor");
    put("config.json",
        "{\"model_type\":\"llama\",\"vocab_size\":50,\"hidden_size\":13,\"intermediate_size\":20,\"num_hidden_layers\":2,"
        "\"num_attention_heads\":2}");
    memset(&error, 0, sizeof error);
    CHECK(!config_read(&c, test_file("config.json"), &error) && contains(error.msg, "does not divide"), "%s", error.msg);
}

TEST(what_is_written_is_read_back) {
    const char* const names[] = {"llama3.2-1b", "llama3.1-8b", "d6", "d12"};
    for (int i = 0; i < 4; i++) {
        ModelConfig c, back;
        config_preset(&c, names[i], 1000);
        if (i == 3) {
            c.num_eos = 3;
            c.eos_ids[1] = 5;
            c.eos_ids[2] = 999;
            c.bos_id = 7;
            c.rms_eps = 1.2345678e-5f;
            c.rope_theta = 1e6 / 3;
        }
        memset(&error, 0, sizeof error);
        CHECK(config_write(&c, test_file("config.json"), SAFE_BF16, NULL, &error) &&
                  config_read(&back, test_file("config.json"), &error),
              "%s", error.msg);
        CHECK(memcmp(&c, &back, sizeof c) == 0, "config %d changed", i);
    }
}

/* huggingface/transformers#34055, huggingface/trl#422: batches need pad_token_id, a resized vocabulary initializer_range. */
TEST(members_that_we_do_not_know_stay) {
    static const char* const kept[] = {"\"pad_token_id\": 5", "\"initializer_range\": 0.01", "\"use_cache\": false",
                                       "\"_mine\": {\"a\": [1, \"}\"]}", "\"LlamaForCausalLM\""};
    static const char source[] =
        "{\"model_type\":\"llama\",\"vocab_size\":50,\"hidden_size\":8,\"intermediate_size\":8,\"num_hidden_layers\":1,"
        "\"num_attention_heads\":2, \"architectures\": [], \"eos_token_id\": 7, \"torch_dtype\": \"float16\","
        "\"rope_theta\": 500.0, \"pad_token_id\": 5, \"initializer_range\": 0.01, \"use_cache\": false,"
        "\"_mine\": {\"a\": [1, \"}\"]}}";
    ModelConfig c, back;
    test_put(test_file("config.json"), source);
    memset(&error, 0, sizeof error);
    CHECK(config_read(&c, test_file("config.json"), &error), "%s", error.msg);
    config_end_at(&c, 9);
    CHECK(config_write(&c, test_file("config.json"), SAFE_BF16, source, &error) &&
              config_read(&back, test_file("config.json"), &error),
          "%s", error.msg);
    CHECK(memcmp(&c, &back, sizeof c) == 0 && back.num_eos == 2, "what we know is written anew");
    size_t size = 0;
    char* text = read_file(test_file("config.json"), &size, 10000, &error);
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) { CHECK(contains(text, kept[i]), "%s: %s", kept[i], text); }
    CHECK(contains(text, "\"torch_dtype\": \"bfloat16\"") && !contains(text, "float16\",\"rope"), "%s", text);
    CHECK(config_pad_of(text, 50) == 5 && config_pad_of(text, 5) == -1 && config_pad_of("{}", 5) == -1, "pad_token_id");
    free(text);
}

// ---------------------------------------------------------------------------------------------------------------------
// the folder

static ModelConfig tiny(bool tied) {
    ModelConfig c;
    if (!reads(&c, tied ? ",\"num_key_value_heads\":1,\"tie_word_embeddings\":true" : ",\"num_key_value_heads\":1")) {
        die("%s", error.msg);
    }
    return c;
}

/* Gives each element a value that depends on its place in the arena. */
static bool give(void* ctx, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    (void)ctx;
    (void)e;
    for (size_t i = 0; i < n; i++) { dst[i] = (float)(p->offset + first + i); }
    return true;
}

static bool take(void* ctx, const Param* p, size_t first, size_t n, const float* src, Error* e) {
    (void)e;
    size_t* count = (size_t*)ctx;
    for (size_t i = 0; i < n; i++) { *count += src[i] == (float)(p->offset + first + i); }
    return true;
}

/* Writes the whole folder, as an export does. */
static bool save(const ModelConfig* c, const ParamTable* t, SafeDtype dtype, TensorSource source, void* ctx) {
    return model_save_weights(test_here(), c, NULL, t, slot_from(dtype, source, ctx), NULL, &error);
}

static bool loads(const ModelConfig* want) {
    ModelConfig c;
    ParamTable t = param_table(want);
    size_t right = 0;
    memset(&error, 0, sizeof error);
    bool ok = model_check(test_here(), &c, &error) && model_load(test_here(), &c, &t, slot_to(take, &right), &error);
    if (ok) { CHECK(right == t.num_params, "%zu of %zu elements are right", right, t.num_params); }
    param_table_free(&t);
    return ok;
}

TEST(a_folder_is_written_and_read_in_one_file_and_in_shards) {
    for (int tied = 0; tied < 2; tied++) {
        for (int shards = 0; shards < 3; shards++) {
            test_elsewhere();
            const ModelConfig c = tiny(tied);
            ParamTable t = param_table(&c);
            memset(&error, 0, sizeof error);
            shard_bytes = shards == 0 ? 5000000000ull : shards == 1 ? 2000 : 1;
            CHECK(save(&c, &t, SAFE_F32, give, NULL), "%s", error.msg);
            CHECK(file_exists(test_file("model.safetensors")) == !shards, "one file");
            CHECK(file_exists(test_file("model.safetensors.index.json")), "index");
            CHECK(loads(&c), "%s", error.msg);
            // save the other kind over it: the first must leave nothing that contradicts the second
            shard_bytes = shards ? 5000000000ull : 2000;
            CHECK(save(&c, &t, SAFE_F32, give, NULL) && loads(&c), "%s", error.msg);
            param_table_free(&t);
        }
    }
    shard_bytes = 5000000000ull;
}

/* Writes the tensors of `c` to model.safetensors (or another name), changed as `how` says: drops tensor `which`, gives it
 * another name, shape or dtype, or adds one after it. The embedding is all ones, a head is all `head`. */
static void write_weights(const char* name, const ModelConfig* c, int which, const char* how, const char* new_name,
                          float head) {
    ParamTable t = param_table(c);
    SafeTensor* s = (SafeTensor*)xcalloc((size_t)t.count + 1, sizeof(SafeTensor));
    size_t count = 0;
    for (int i = 0; i < t.count; i++) {
        const Param* p = &t.items[i];
        if (i == which && strcmp(how, "drop") == 0) { continue; }
        s[count].name = i == which && strcmp(how, "name") == 0 ? new_name : p->name;
        s[count].dtype = i == which && strcmp(how, "dtype") == 0 ? SAFE_I32 : SAFE_F32;
        if (param_specs[p->kind].matrix) { s[count].shape[s[count].ndim++] = p->rows; }
        s[count].shape[s[count].ndim++] = p->cols;
        if (i == which && strcmp(how, "shape") == 0) { s[count].shape[0]++; }
        if (i == which && strcmp(how, "flat") == 0) {
            s[count].shape[0] = param_size(p);
            s[count].ndim = 1;
        }
        count++;
    }
    if (strcmp(how, "add") == 0) {
        s[count] = s[0];
        s[count++].name = new_name;
    }
    SafeWriter w;
    memset(&error, 0, sizeof error);
    if (!safewriter_open(&w, test_file(name), s, count, &error)) { die("%s", error.msg); }
    for (size_t i = 0; i < count; i++) {
        const float one = 1, value = strcmp(s[i].name, "lm_head.weight") == 0 ? head : 1;
        size_t n = 1;
        for (int d = 0; d < s[i].ndim; d++) { n *= s[i].shape[d]; }
        // only the last element differs
        for (size_t k = 0; k < n; k++) {
            if (!safewriter_f32(&w, SAFE_F32, k + 1 == n ? &value : &one, 1, &error)) { die("%s", error.msg); }
        }
    }
    if (!safewriter_finish(&w, &error)) { die("%s", error.msg); }
    free(s);
    param_table_free(&t);
    memset(&error, 0, sizeof error);
}

TEST(every_tensor_that_is_missing_or_misshapen_is_named) {
    const ModelConfig c = tiny(false);
    ParamTable t = param_table(&c);
    ModelConfig found;
    for (int i = 0; i < t.count; i++) {
        static const char* const ways[] = {"drop", "name", "shape", "dtype", "flat"};
        for (size_t k = 0; k < sizeof ways / sizeof *ways; k++) {
            if (strcmp(ways[k], "flat") == 0 && !param_specs[t.items[i].kind].matrix) { continue; }
            write_weights("model.safetensors", &c, i, ways[k], "model.something", 1);
            CHECK(!model_check(test_here(), &found, &error) && contains(error.msg, t.items[i].name), "%s %s: %s", ways[k],
                  t.items[i].name, error.msg);
            CHECK(contains(error.msg, "wanted"), "%s", error.msg);
        }
    }
    write_weights("model.safetensors", &c, 3, "shape", NULL, 1);
    CHECK(!model_check(test_here(), &found, &error) && contains(error.msg, "shape is [7, 12], wanted [6, 12]"), "%s",
          error.msg);
    param_table_free(&t);
}

TEST(unknown_tensors_are_refused_and_inv_freq_is_not) {
    ModelConfig found;
    const ModelConfig c = tiny(false);
    write_weights("model.safetensors", &c, 0, "add", "model.layers.0.self_attn.q_proj.bias", 1);
    FAILS(&error, model_check(test_here(), &found, &error), "\"model.layers.0.self_attn.q_proj.bias\" is not part");
    write_weights("model.safetensors", &c, 0, "add", "model.layers.2.input_layernorm.weight", 1);
    CHECK(!model_check(test_here(), &found, &error) && contains(error.msg, "model.layers.2."), "%s", error.msg);
    write_weights("model.safetensors", &c, 0, "add", "model.layers.0.self_attn.rotary_emb.inv_freq", 1);
    CHECK(model_check(test_here(), &found, &error), "%s", error.msg);
}

TEST(a_tied_folders_head_equals_the_embedding_or_is_refused) {
    ModelConfig found;
    const ModelConfig c = tiny(true);
    ParamTable t = param_table(&c);
    write_weights("model.safetensors", &c, 0, "add", "lm_head.weight", 1);
    CHECK(model_check(test_here(), &found, &error) && model_load(test_here(), &found, &t, slot_to(NULL, NULL), &error), "%s",
          error.msg);
    write_weights("model.safetensors", &c, 0, "add", "lm_head.weight", 2);
    CHECK(model_check(test_here(), &found, &error), "%s", error.msg);
    FAILS(&error, model_load(test_here(), &found, &t, slot_to(NULL, NULL), &error),
          "lm_head.weight[49, 11] is 2, wanted the embedding's 1");
    param_table_free(&t);
    const ModelConfig untied = tiny(false);
    write_weights("model.safetensors", &untied, untied.num_layers * 9 + 2, "drop", NULL, 1);
    CHECK(!model_check(test_here(), &found, &error) && contains(error.msg, "\"lm_head.weight\" is missing") &&
              contains(error.msg, "tie_word_embeddings"),
          "%s", error.msg);
}

/* Gives the same tensors as give(), but one element is `value`. */
typedef struct {
    const char* name;
    size_t index;
    float value;
} Planted;

static bool give_planted(void* ctx, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    const Planted* planted = (const Planted*)ctx;
    (void)e;
    for (size_t i = 0; i < n; i++) {
        dst[i] = strcmp(p->name, planted->name) == 0 && first + i == planted->index ? planted->value : 1.0f;
    }
    return true;
}

TEST(a_weight_that_is_not_finite_is_refused_by_its_place) {
    static const Planted planted[] = {{"model.embed_tokens.weight", 12 * 49 + 11, NAN},
                                      {"model.layers.1.mlp.down_proj.weight", 20 * 3, INFINITY},
                                      {"model.norm.weight", 5, -INFINITY}};
    static const char* const parts[] = {"tensor model.embed_tokens.weight is nan at [49, 11], wanted a finite number",
                                        "tensor model.layers.1.mlp.down_proj.weight is inf at [3, 0], wanted a finite number",
                                        "tensor model.norm.weight is -inf at [5], wanted a finite number"};
    const ModelConfig c = tiny(false);
    ParamTable t = param_table(&c);
    for (int dtype = SAFE_F32; dtype <= SAFE_F16; dtype++) {
        for (int i = 0; i < 3; i++) {
            shard_bytes = i == 1 ? 2000 : 5000000000ull;
            memset(&error, 0, sizeof error);
            CHECK(save(&c, &t, (SafeDtype)dtype, give_planted, (void*)&planted[i]), "%s", error.msg);
            CHECK(!model_load(test_here(), &c, &t, slot_to(NULL, NULL), &error) && contains(error.msg, parts[i]) &&
                      contains(error.msg, test_here()) && contains(error.msg, ".safetensors: "),
                  "%s: %s", safe_dtypes[dtype].name, error.msg);
        }
    }
    shard_bytes = 5000000000ull;
    param_table_free(&t);
}

/* Records the parts of a load that the sink got. */
typedef struct {
    pthread_t thread;
    const Param* param;
    size_t next, pieces;
} Arrival;

static bool arrive(void* ctx, const Param* p, size_t first, size_t n, const float* src, Error* e) {
    Arrival* a = (Arrival*)ctx;
    (void)src, (void)e;
    CHECK(pthread_equal(a->thread, pthread_self()), "%s arrives on another thread", p->name);
    CHECK(p == a->param ? first == a->next : p == (a->param ? a->param + 1 : p) && first == 0, "%s is out of order", p->name);
    a->param = p;
    a->next = first + n;
    a->pieces++;
    return true;
}

TEST(weights_arrive_in_order_on_the_thread_that_asked) {
    const ModelConfig c = tiny(false);
    ParamTable t = param_table(&c);
    Arrival a = {pthread_self(), NULL, 0, 0};
    shard_bytes = 2000;
    memset(&error, 0, sizeof error);
    CHECK(save(&c, &t, SAFE_F32, give, NULL) && model_load(test_here(), &c, &t, slot_to(arrive, &a), &error), "%s", error.msg);
    CHECK(a.param == &t.items[t.count - 1] && a.next == param_size(a.param) && a.pieces > 10 * TENSOR_READ_BATCH,
          "%zu pieces: too few to tell", a.pieces);
    shard_bytes = 5000000000ull;
    param_table_free(&t);
}

/* Replaces a text in the index. */
static void edit_index(const char* from, const char* to) {
    size_t size = 0;
    char* text = read_file(test_file("model.safetensors.index.json"), &size, 1 << 20, &error);
    char* at = text ? strstr(text, from) : NULL;
    if (!at) { die("the index has no %s", from); }
    FILE* f = fopen(test_file("model.safetensors.index.json"), "wb");
    fwrite(text, 1, (size_t)(at - text), f);
    fputs(to, f);
    fputs(at + strlen(from), f);
    fclose(f);
    free(text);
}

TEST(an_index_is_a_map_of_files_and_no_inventory) {
    static const struct {
        const char *from, *to, *part;  // NULL: the folder is read
    } edits[] = {
        {"\"model.norm.weight\"", "\"model.layers.0.self_attn.rotary_emb.inv_freq\"", NULL},
        {"    \"model.embed_tokens.weight\": \"model-00001-of-00004.safetensors\",\n", "", NULL},
        {"\"model.embed_tokens.weight\": \"model-00001-of-00004.safetensors\"",
         "\"model.embed_tokens.weight\": \"model-00002-of-00004.safetensors\"", NULL},
        {"\"model.embed_tokens.weight\": \"model-00001", "\"model.embed_tokens.weight\": \"../model-00001",
         "the name of a file in this folder"},
        {"\"model.embed_tokens.weight\": \"model-00001-of-00004.safetensors\"", "\"model.embed_tokens.weight\": 1",
         "weight_map.model.embed_tokens.weight is 1"},
        {"\"model.embed_tokens.weight\": \"model-00001", "\"model.embed_tokens.weight\": \"absent-00001", "absent-00001"},
        {"\"weight_map\"", "\"weights\"", "weight_map is missing"},
    };
    const ModelConfig c = tiny(false);
    ParamTable t = param_table(&c);
    ModelConfig found;
    shard_bytes = 4000;
    for (size_t i = 0; i < sizeof edits / sizeof *edits; i++) {
        memset(&error, 0, sizeof error);
        CHECK(save(&c, &t, SAFE_F32, give, NULL) && model_check(test_here(), &found, &error), "%s", error.msg);
        edit_index(edits[i].from, edits[i].to);
        const bool read = model_check(test_here(), &found, &error);
        CHECK(edits[i].part ? !read && contains(error.msg, edits[i].part) : read, "edit %zu: %s", i, error.msg);
    }
    shard_bytes = 5000000000ull;
    param_table_free(&t);
}

TEST(a_folder_without_weights_says_what_it_holds) {
    ModelConfig c;
    memset(&error, 0, sizeof error);
    CHECK(!model_check(test_here(), &c, &error) && contains(error.msg, "config.json: cannot open"), "%s", error.msg);
    (void)tiny(false);
    CHECK(!model_check(test_here(), &c, &error) && contains(error.msg, "holds no weights"), "%s", error.msg);
    put("pytorch_model.bin", "PK");
    memset(&error, 0, sizeof error);
    CHECK(
        !model_check(test_here(), &c, &error) && contains(error.msg, "pytorch_model.bin") && contains(error.msg, "\n  hint: "),
        "%s", error.msg);
    test_elsewhere();
    (void)tiny(false);
    put("tiny-Q4_K_M.gguf", "GGUF");
    memset(&error, 0, sizeof error);
    CHECK(!model_check(test_here(), &c, &error) && contains(error.msg, "tiny-Q4_K_M.gguf") && contains(error.msg, "made from"),
          "%s", error.msg);
    put("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n");
    memset(&error, 0, sizeof error);
    FAILS(&error, model_check(test_here(), &c, &error), "Git LFS pointer");
    FAILS(&error, model_check("/nonexistent/model", &c, &error), "missing, wanted a model's folder");
}

int main(void) { return test_all(); }
