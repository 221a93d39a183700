/* export.h -- --export: writes a trained model for other programs, without the state of its run:
 *
 *   --export FILE.gguf   one GGUF file (version 3), which llama.cpp and its relatives run: F32, F16, BF16 or Q8_0
 *   --export DIR         a Hugging Face folder in F32, F16 or BF16
 *
 * Adapters (LoRA) are merged into the weights beside which they stand: in fp32, and rounded once.
 *
 * Every weight is checked first, as when it is loaded. Then the tensors pass through in pieces, so no trainer and no memory for
 * the whole model is needed. A weight that would be infinite in the output's type is refused by name. The output gets its name
 * once it is whole.
 *
 * A GGUF file is
 *
 *   "GGUF" | version | number of tensors | number of keys | keys with values | tensor infos | padding | tensors
 *
 * Numbers are little-endian; strings carry a 64-bit length; tensors start at multiples of GGUF_ALIGN behind the infos. Facts:
 * https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and the keys that llama.cpp reads for architecture "llama".
 *
 * Three things differ from a Hugging Face folder:
 *   - RoPE there turns neighbours (2i, 2i + 1) of a head, here halves (i, i + HD/2): the rows of q and k are permuted.
 *   - RoPE of type llama3 becomes a tensor rope_freqs.weight of divisors, one for each frequency.
 *   - The split pattern of the tokenizer is a name (tokenizer.ggml.pre). A pattern without a name there is refused.
 *
 * Matrices get the wanted type, norms stay F32. Q8_0 stores 32 neighbours x of a row as one F16 scale d = max|x| / 127 and
 * 32 integers round(x / d), rounded half away from zero. Rows whose length is no multiple of 32 stay F16. A weight or scale
 * that would be infinite is refused.
 */
#ifndef LLMC_EXPORT_H
#define LLMC_EXPORT_H

#include "llmc/base/utils.h"

#include "llmc/base/float16.h"
#include "llmc/config.h"
#include "llmc/files/model_folder.h"
#include "llmc/files/side_files.h"
#include "llmc/files/tensor_stream.h"
#include "llmc/lora.h"
#include "llmc/rope.h"
#include "llmc/run/cli/options.h"
#include "llmc/base/progress.h"           // defines: Progress, progress_begin, progress_add, progress_end
#include "llmc/run/session/choose.h"      // defines: export_dtype_of, safe_dtype_of
#include "llmc/run/session/open_model.h"  // defines: load_weights, load_adapters
#include "llmc/run/session/session.h"     // defines: Program, ModelSpec, process_screen
#include "llmc/text/tokenizer.h"
#include "llmc/text/tokenizer_read.h"  // defines: byte_stand_ins
#include "llmc/text/tokenizer_write.h"

// ---------------------------------------------------------------------------------------------------------------------
// a GGUF file

// the format's own numbers
enum { GGUF_VERSION = 3, GGUF_ALIGN = 32, GGUF_Q8_BLOCK = 32 };
enum { GGUF_KEY_U32 = 4, GGUF_KEY_I32 = 5, GGUF_KEY_F32 = 6, GGUF_KEY_BOOL = 7, GGUF_KEY_STRING = 8, GGUF_KEY_ARRAY = 9 };
enum { GGUF_TOKEN_NORMAL = 1, GGUF_TOKEN_CONTROL = 3, GGUF_TOKEN_USER = 4, GGUF_TOKEN_UNUSED = 5 };

/* The types of tensors, in the order of ExportDtype. */
static const struct {
    const char* name;
    uint32_t number, file_type;  // in a tensor's info, and in general.file_type if most tensors have this type
    size_t block, bytes;         // bytes of so many neighbours in a row
} gguf_types[] = {{"", 0, 0, 1, 0},
                  {"F32", 0, 0, 1, 4},
                  {"BF16", 30, 32, 1, 2},
                  {"F16", 1, 1, 1, 2},
                  {"Q8_0", 8, 7, GGUF_Q8_BLOCK, 2 + GGUF_Q8_BLOCK}};

/* Describes the file to write. */
typedef struct {
    const char* name;  // of the model
    const ModelConfig* config;
    const ParamTable* table;
    const TextRules* rules;
    ExportDtype type;     // of the matrices
    TensorSource source;  // of the weights
    void* ctx;
} GgufModel;

// ---------------------------------------------------------------------------------------------------------------------
// keys and values

static inline void gguf_u32(FILE* f, uint32_t x) { fwrite(&x, sizeof x, 1, f); }
static inline void gguf_u64(FILE* f, uint64_t x) { fwrite(&x, sizeof x, 1, f); }

static inline void gguf_string(FILE* f, const char* s, size_t n) {
    gguf_u64(f, n);
    fwrite(s, 1, n, f);
}

/* Starts a key with a value of this type. `count` counts the keys. */
static inline void gguf_key(FILE* f, uint64_t* count, const char* key, uint32_t type) {
    (*count)++;
    gguf_string(f, key, strlen(key));
    gguf_u32(f, type);
}

static inline void gguf_key_u32(FILE* f, uint64_t* count, const char* key, uint32_t x) {
    gguf_key(f, count, key, GGUF_KEY_U32);
    gguf_u32(f, x);
}

static inline void gguf_key_f32(FILE* f, uint64_t* count, const char* key, float x) {
    gguf_key(f, count, key, GGUF_KEY_F32);
    fwrite(&x, sizeof x, 1, f);
}

static inline void gguf_key_bool(FILE* f, uint64_t* count, const char* key, bool x) {
    gguf_key(f, count, key, GGUF_KEY_BOOL);
    fputc(x, f);
}

static inline void gguf_key_string(FILE* f, uint64_t* count, const char* key, const char* s) {
    gguf_key(f, count, key, GGUF_KEY_STRING);
    gguf_string(f, s, strlen(s));
}

static inline void gguf_key_array(FILE* f, uint64_t* count, const char* key, uint32_t type, uint64_t length) {
    gguf_key(f, count, key, GGUF_KEY_ARRAY);
    gguf_u32(f, type);
    gguf_u64(f, length);
}

// ---------------------------------------------------------------------------------------------------------------------
// the tokenizer

/* Returns llama.cpp's name for the tokenizer's split pattern; NULL if it has none. Without merges every byte is a token by
 * itself, and any pattern will do. */
static inline const char* gguf_pre_tokenizer(const Tokenizer* t) {
    const bool words = t->digits == DIGITS_IN_WORDS;
    if (t->num_merges == 0) { return "gpt-2"; }
    if (t->split == SPLIT_LLAMA3 && t->max_digits == 3 && words) { return "llama-bpe"; }
    if (t->split == SPLIT_GPT2 && t->digits == DIGITS_EACH) { return "smollm"; }
    if (t->split == SPLIT_GPT2 && words) { return "gpt-2"; }
    return NULL;
}

/* Writes the bytes of a token as GPT-2's stand-ins to `out`, which holds twice as many. Returns their length. */
static inline size_t gguf_stand_ins(char* out, const uint16_t* code, const char* s, size_t n) {
    size_t length = 0;
    for (size_t i = 0; i < n; i++) { length += utf8_encode(out + length, code[(uint8_t)s[i]]); }
    return length;
}

/* Writes the text of a token: names of added tokens as they are, all others as stand-ins. Ids that the tokenizer lacks, but
 * the model has, get a name of their own. */
static inline void gguf_token(FILE* f, const Tokenizer* t, const uint16_t* code, char* scratch, int id) {
    if (id >= t->vocab_size) {
        char name[32];
        gguf_string(f, name, (size_t)snprintf(name, sizeof name, "[PAD%d]", id));
        return;
    }
    size_t n = 0;
    const char* s = tokenizer_token(t, id, &n);
    if (t->flags[id] & TOKEN_ADDED) {
        gguf_string(f, s, n);
    } else {
        gguf_string(f, scratch, gguf_stand_ins(scratch, code, s, n));
    }
}

static inline int gguf_token_type(const Tokenizer* t, int id) {
    if (id >= t->vocab_size) { return GGUF_TOKEN_UNUSED; }
    if (t->flags[id] & TOKEN_SPECIAL) { return GGUF_TOKEN_CONTROL; }
    return t->flags[id] & TOKEN_ADDED ? GGUF_TOKEN_USER : GGUF_TOKEN_NORMAL;
}

static inline int gguf_compare_merges(const void* a, const void* b) {
    const MergeSlot *x = (const MergeSlot*)a, *y = (const MergeSlot*)b;
    if (x->rank != y->rank) { return x->rank < y->rank ? -1 : 1; }
    return x->pair < y->pair ? -1 : x->pair > y->pair;
}

/* Writes the merges, best rank first, as strings "LEFT RIGHT" of stand-ins. */
static inline void gguf_merges(FILE* f, uint64_t* count, const Tokenizer* t, const uint16_t* code, char* scratch) {
    MergeSlot* merges = (MergeSlot*)xmalloc(size_max(1, t->num_merges) * sizeof(MergeSlot));
    size_t num = 0;
    for (size_t i = 0; t->num_merges > 0 && i <= t->merge_mask; i++) {
        if (t->merges[i].pair != UINT64_MAX) { merges[num++] = t->merges[i]; }
    }
    qsort(merges, num, sizeof *merges, gguf_compare_merges);
    gguf_key_array(f, count, "tokenizer.ggml.merges", GGUF_KEY_STRING, num);
    for (size_t i = 0; i < num; i++) {
        size_t n = 0;
        const char* left = tokenizer_token(t, (int)(merges[i].pair >> 32), &n);
        size_t length = gguf_stand_ins(scratch, code, left, n);
        scratch[length++] = ' ';
        const char* right = tokenizer_token(t, (int)(merges[i].pair & UINT32_MAX), &n);
        length += gguf_stand_ins(scratch + length, code, right, n);
        gguf_string(f, scratch, length);
    }
    free(merges);
}

/* Writes the ids of BOS, pad, EOS (as llama.cpp's converter: the tokenizer's, otherwise the model's first) and of two more
 * tokens that end a text: llama.cpp ends one at each of them, and at others by their names. */
static inline void gguf_ids(FILE* f, uint64_t* count, const GgufModel* m) {
    static const char* const more[] = {"tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"};
    const TextRules* r = m->rules;
    const Tokenizer* t = r->tokenizer;
    const ModelConfig* c = m->config;
    const int named = tokenizer_find_any(t, t->eos_name), eos = named >= 0 ? named : c->num_eos > 0 ? c->eos_ids[0] : t->eos_id;
    if (r->bos_id >= 0) { gguf_key_u32(f, count, "tokenizer.ggml.bos_token_id", (uint32_t)r->bos_id); }
    if (eos >= 0) { gguf_key_u32(f, count, "tokenizer.ggml.eos_token_id", (uint32_t)eos); }
    if (r->pad_id >= 0) { gguf_key_u32(f, count, "tokenizer.ggml.padding_token_id", (uint32_t)r->pad_id); }
    for (int i = 0, k = 0; i < r->num_ends && k < 2; i++) {
        const int id = r->end_ids[i];
        if (id == eos || id == r->bos_id || id == t->bos_id || id == c->bos_id) { continue; }
        gguf_key_u32(f, count, more[k++], (uint32_t)id);
    }
}

static inline void gguf_tokenizer(FILE* f, uint64_t* count, const GgufModel* m) {
    const TextRules* r = m->rules;
    const Tokenizer* t = r->tokenizer;
    const int vocab = m->config->vocab_size;
    uint16_t code[256];
    int16_t byte_of[512];
    char* scratch = (char*)xmalloc(4 * t->max_token_len + 1);  // two tokens of a merge, two bytes for each
    byte_stand_ins(code, byte_of);
    gguf_key_string(f, count, "tokenizer.ggml.model", "gpt2");
    gguf_key_string(f, count, "tokenizer.ggml.pre", gguf_pre_tokenizer(t));
    gguf_key_array(f, count, "tokenizer.ggml.tokens", GGUF_KEY_STRING, (uint64_t)vocab);
    for (int id = 0; id < vocab; id++) { gguf_token(f, t, code, scratch, id); }
    gguf_key_array(f, count, "tokenizer.ggml.token_type", GGUF_KEY_I32, (uint64_t)vocab);
    for (int id = 0; id < vocab; id++) { gguf_u32(f, (uint32_t)gguf_token_type(t, id)); }
    gguf_merges(f, count, t, code, scratch);
    gguf_ids(f, count, m);
    gguf_key_bool(f, count, "tokenizer.ggml.add_bos_token", text_rules_begins_with_bos(r));
    if (r->ends_with_eos) { gguf_key_bool(f, count, "tokenizer.ggml.add_eos_token", true); }
    if (r->chat_template) { gguf_key_string(f, count, "tokenizer.chat_template", r->chat_template); }
    free(scratch);
}

// ---------------------------------------------------------------------------------------------------------------------
// the model

static inline void gguf_config(FILE* f, uint64_t* count, const GgufModel* m) {
    const ModelConfig* c = m->config;
    gguf_key_string(f, count, "general.architecture", "llama");
    gguf_key_string(f, count, "general.type", "model");
    gguf_key_string(f, count, "general.name", m->name);
    gguf_key_u32(f, count, "general.file_type", gguf_types[m->type].file_type);
    gguf_key_u32(f, count, "general.alignment", GGUF_ALIGN);
    gguf_key_u32(f, count, "llama.vocab_size", (uint32_t)c->vocab_size);
    gguf_key_u32(f, count, "llama.context_length", (uint32_t)c->max_positions);
    gguf_key_u32(f, count, "llama.embedding_length", (uint32_t)c->hidden_size);
    gguf_key_u32(f, count, "llama.block_count", (uint32_t)c->num_layers);
    gguf_key_u32(f, count, "llama.feed_forward_length", (uint32_t)c->intermediate_size);
    gguf_key_u32(f, count, "llama.attention.head_count", (uint32_t)c->num_heads);
    gguf_key_u32(f, count, "llama.attention.head_count_kv", (uint32_t)c->num_kv_heads);
    gguf_key_u32(f, count, "llama.attention.key_length", (uint32_t)c->head_dim);
    gguf_key_u32(f, count, "llama.attention.value_length", (uint32_t)c->head_dim);
    gguf_key_u32(f, count, "llama.rope.dimension_count", (uint32_t)c->head_dim);
    gguf_key_f32(f, count, "llama.rope.freq_base", (float)c->rope_theta);
    gguf_key_f32(f, count, "llama.attention.layer_norm_rms_epsilon", c->rms_eps);
}

/* The tensors' names in GGUF. */
static const struct {
    ParamKind kind;
    const char* name;
} gguf_names[] = {
    {P_EMBEDDING, "token_embd"},   {P_INPUT_NORM, "attn_norm"}, {P_Q, "attn_q"},      {P_K, "attn_k"},  {P_V, "attn_v"},
    {P_O, "attn_output"},          {P_POST_NORM, "ffn_norm"},   {P_GATE, "ffn_gate"}, {P_UP, "ffn_up"}, {P_DOWN, "ffn_down"},
    {P_FINAL_NORM, "output_norm"}, {P_LM_HEAD, "output"}};

/* Writes the tensor's name in GGUF. */
static inline void gguf_name(char* out, size_t cap, const Param* p) {
    size_t i = 0;
    while (gguf_names[i].kind != p->kind) {
        i++;
        assert(i < sizeof gguf_names / sizeof *gguf_names);  // a new kind needs a row
    }
    if (p->layer >= 0) {
        snprintf(out, cap, "blk.%d.%s.weight", p->layer, gguf_names[i].name);
    } else {
        snprintf(out, cap, "%s.weight", gguf_names[i].name);
    }
}

static inline ExportDtype gguf_type_of(const GgufModel* m, const Param* p) {
    if (!param_specs[p->kind].matrix) { return EXPORT_F32; }
    return m->type == EXPORT_Q8_0 && p->cols % GGUF_Q8_BLOCK != 0 ? EXPORT_F16 : m->type;
}

/* Returns the bytes of n neighbours in a row. */
static inline size_t gguf_bytes(ExportDtype type, size_t n) { return n / gguf_types[type].block * gguf_types[type].bytes; }

/* Writes the info of a tensor at *offset, and moves *offset past it. Dimensions are listed innermost first. */
static inline void gguf_info(FILE* f, const char* name, size_t rows, size_t cols, int ndim, ExportDtype type,
                             uint64_t* offset) {
    gguf_string(f, name, strlen(name));
    gguf_u32(f, (uint32_t)ndim);
    gguf_u64(f, cols);
    if (ndim == 2) { gguf_u64(f, rows); }
    gguf_u32(f, gguf_types[type].number);
    gguf_u64(f, *offset);
    *offset = round_up(*offset + rows * gguf_bytes(type, cols), GGUF_ALIGN);
}

static inline void gguf_pad(FILE* f) {
    while (ftello(f) % GGUF_ALIGN != 0) { fputc(0, f); }
}

/* Fills `divisors` (HD/2) with what llama.cpp divides each frequency by. */
static inline void gguf_rope_divisors(float* divisors, const ModelConfig* c) {
    float plain[MAX_HEAD_DIM / 2], scaled[MAX_HEAD_DIM / 2];
    ModelConfig without = *c;
    without.rope_llama3 = false;
    rope_inv_freq(plain, &without);
    rope_inv_freq(scaled, c);
    for (int i = 0; i < c->head_dim / 2; i++) { divisors[i] = plain[i] / scaled[i]; }
}

/* Packs 32 neighbours as Q8_0. */
static inline void gguf_pack_q8(const float* x /* (32) */, uint8_t* out /* (34) */) {
    float largest = 0;
    for (int i = 0; i < GGUF_Q8_BLOCK; i++) { largest = fmaxf(largest, fabsf(x[i])); }
    const float d = largest / 127;
    const uint16_t scale = f16_from_f32(d);
    const float inverse = scale ? 1 / d : 0;  // 1 / d may be infinite where the scale is 0
    memcpy(out, &scale, 2);
    for (int i = 0; i < GGUF_Q8_BLOCK; i++) { out[2 + i] = (uint8_t)(int8_t)roundf(x[i] * inverse); }
}

/* Packs a row of n elements into `out`, gguf_bytes() long. */
static inline void gguf_pack(ExportDtype type, const float* x, size_t n, uint8_t* out) {
    for (size_t i = 0; i < n; i += gguf_types[type].block, out += gguf_types[type].bytes) {
        if (type == EXPORT_Q8_0) {
            gguf_pack_q8(x + i, out);
        } else if (type == EXPORT_F32) {
            memcpy(out, x + i, sizeof(float));
        } else {
            const uint16_t half = type == EXPORT_F16 ? f16_from_f32(x[i]) : bf16_from_f32(x[i]);
            memcpy(out, &half, sizeof half);
        }
    }
}

/* Returns the bits of the least magnitude that would be infinite in a type; in Q8_0 that makes the scale infinite. */
static inline uint32_t gguf_infinite(ExportDtype type) {
    const uint32_t q8 = float_bits(127 * float_from_bits(F16_INFINITE));  // exact
    return type == EXPORT_F16 ? F16_INFINITE : type == EXPORT_BF16 ? BF16_INFINITE : type == EXPORT_Q8_0 ? q8 : 0x7F800000u;
}

/* Returns which of our rows is row `row` of the tensor in GGUF: in q and k, row 2i + j of a head there is our row
 * i + j * HD/2. */
static inline size_t gguf_source_row(const ModelConfig* c, const Param* p, size_t row) {
    const size_t HD = (size_t)c->head_dim, in_head = row % HD;
    return p->kind == P_Q || p->kind == P_K ? row - in_head + in_head % 2 * (HD / 2) + in_head / 2 : row;
}

/* Writes the rows of one tensor. */
static inline bool gguf_tensor(FILE* f, const GgufModel* m, const Param* p, Error* e) {
    const ExportDtype type = gguf_type_of(m, p);
    const size_t bytes = gguf_bytes(type, p->cols);
    float* row = (float*)xmalloc(p->cols * sizeof(float));
    uint8_t* packed = (uint8_t*)xmalloc(bytes);
    bool ok = true;
    for (size_t r = 0; ok && r < p->rows; r++) {
        const size_t first = gguf_source_row(m->config, p, r) * p->cols;
        ok = m->source(m->ctx, p, first, p->cols, row, e) &&
             tensor_fits(row, p->cols, gguf_infinite(type), gguf_types[type].name, "--export", p, first, e);
        if (ok) {
            gguf_pack(type, row, p->cols, packed);
            fwrite(packed, 1, bytes, f);
        }
    }
    free(row);
    free(packed);
    gguf_pad(f);
    return ok;
}

/* Fails if GGUF cannot express the model. Cheap; call it before anything is written. */
static inline bool gguf_check(const GgufModel* m, Error* e) {
    if (!m->rules->tokenizer) {
        return fail(e, "--export: the model has no tokenizer, and a GGUF file needs one\n  hint: give it with --tokenizer");
    }
    if (gguf_pre_tokenizer(m->rules->tokenizer)) { return true; }
    return fail(
        e,
        "--export: llama.cpp has no name for the split pattern of this tokenizer, wanted Llama 3's, GPT-2's or SmolLM's\n"
        "  hint: --export DIR writes a Hugging Face folder, which keeps the pattern");
}

/* Writes everything but the tensors: keys, then infos. The counts of both come first in the file, so the keys go through
 * memory. */
static inline void gguf_head(FILE* f, const GgufModel* m) {
    const ParamTable* t = m->table;
    const bool divisors = m->config->rope_llama3;
    char *keys = NULL, name[64];
    size_t size = 0;
    uint64_t count = 0, offset = 0;
    FILE* memory = xopen_memory(&keys, &size);
    gguf_config(memory, &count, m);
    gguf_tokenizer(memory, &count, m);
    xclose_memory(memory, &keys);
    fwrite("GGUF", 1, 4, f);
    gguf_u32(f, GGUF_VERSION);
    gguf_u64(f, (uint64_t)t->count + divisors);
    gguf_u64(f, count);
    fwrite(keys, 1, size, f);
    free(keys);
    if (divisors) { gguf_info(f, "rope_freqs.weight", 1, (size_t)m->config->head_dim / 2, 1, EXPORT_F32, &offset); }
    for (int i = 0; i < t->count; i++) {
        const Param* p = &t->items[i];
        gguf_name(name, sizeof name, p);
        gguf_info(f, name, p->rows, p->cols, param_specs[p->kind].matrix ? 2 : 1, gguf_type_of(m, p), &offset);
    }
    gguf_pad(f);
}

/* Writes the whole file to `f`, from its start. gguf_check() must have passed. */
static inline bool gguf_write(FILE* f, const GgufModel* m, Error* e) {
    gguf_head(f, m);
    if (m->config->rope_llama3) {
        float divisors[MAX_HEAD_DIM / 2];
        gguf_rope_divisors(divisors, m->config);
        fwrite(divisors, sizeof(float), (size_t)m->config->head_dim / 2, f);
        gguf_pad(f);
    }
    for (int i = 0; i < m->table->count; i++) {
        if (!gguf_tensor(f, m, &m->table->items[i], e)) { return false; }
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// the job

/* What is exported. */
typedef struct {
    const Program* program;
    ModelFiles files;  // of the weights
    float* adapters;   // (program->spec.trained.elements); NULL: none
    Progress progress;
} Export;

/* A TensorSource: reads a parameter from the open files and merges its adapters into it. */
static inline bool export_source(void* ctx, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    Export* x = (Export*)ctx;
    const SafeTensors* file = NULL;
    const SafeTensor* t = model_find(&x->files, p->name, &file);
    progress_add(&x->progress, n);
    if (!safetensors_read_f32(file, t, first, n, dst, e)) { return false; }
    for (int i = 0; x->adapters && i < NUM_LORA_PAIRS; i++) {
        if (lora_pairs[i].matrix != p->kind || !(x->program->spec.config.lora.on >> i & 1)) { continue; }
        const float* a = x->adapters + param_at(&x->program->spec.trained, lora_pairs[i].a, p->layer)->offset;
        const float* b = x->adapters + param_at(&x->program->spec.trained, lora_pairs[i].b, p->layer)->offset;
        lora_merge(dst, first, n, a, b, &x->program->spec.config.lora, p->cols);
    }
    return count_good(dst, n, false) == n || fail(e, "--export: tensor %s is not finite with its adapters", p->name);
}

/* Returns the type to write: --export-dtype, otherwise the type of the embedding in the files. */
static inline ExportDtype export_type(const Export* x) {
    const SafeTensors* file = NULL;
    if (x->program->chosen.export_dtype != EXPORT_AUTO) { return (ExportDtype)x->program->chosen.export_dtype; }
    return export_dtype_of(model_find(&x->files, x->program->spec.table.items[0].name, &file)->dtype);
}

/* Writes a GGUF file. */
static inline bool export_gguf(Export* x, ExportDtype type, FILE* f, Error* e) {
    char name[PATH_CAP];
    snprintf(name, sizeof name, "%s", file_name(x->program->chosen.export_));
    name[strlen(name) - strlen(".gguf")] = 0;
    const Program* p = x->program;
    const GgufModel m = {name, &p->spec.config, &p->spec.table, &p->data.rules, type, export_source, x};
    return gguf_check(&m, e) && gguf_write(f, &m, e);
}

/* Writes a model folder. */
static inline bool export_folder(Export* x, ExportDtype type, const char* path, Error* e) {
    const Program* p = x->program;
    const ModelConfig* c = &p->spec.config;
    const TextRules* r = &p->data.rules;
    const TokenizerExtras extras = tokenizer_extras(r, false, c->max_positions);
    const StateSlot weights = slot_from(safe_dtype_of(type), export_source, x);
    const bool ok = model_save_weights(path, c, p->start.config, &p->spec.table, weights, NULL, e) &&
                    (!r->tokenizer || tokenizer_save(r->tokenizer, path, &extras, e)) &&
                    text_rules_save_generation(r, c, path, e);
    if (ok) { side_files_write(&p->start.side_files, path); }
    return ok && sync_directory(path, e);
}

/* Copies the target without the slashes at its end, which a shell adds to the name of a folder. */
static inline bool export_path(const Options* o, char path[PATH_CAP], Error* e) {
    const int length = snprintf(path, PATH_CAP, "%s", o->export_);
    if (length >= PATH_CAP) { return fail(e, "--export: the path is too long"); }
    for (int n = length; n > 1 && path[n - 1] == '/'; n--) { path[n - 1] = 0; }
    return true;
}

/* Returns whether a folder can be read and is empty. */
static inline bool export_is_empty(const char* path) {
    struct dirent* entry = NULL;
    Error ignored = NO_ERROR;
    DIR* d = opendir(path);
    const bool empty = d && folder_next(d, path, &entry, &ignored) && !entry;
    if (d) { closedir(d); }
    return empty;
}

/* Refuses a target that exists, unless it is an empty folder, and a name that is meant as a file's. */
static inline bool export_check_target(const Options* o, const char* path, Error* e) {
    static const char* const files[] = {".bin", ".safetensors", ".pt", ".pth", ".onnx", ".json", ".ggml"};
    struct stat st;
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        if (!text_ends(path, files[i])) { continue; }
        return fail(e, "--export: %s looks like a file, wanted the name of a folder, or of a file that ends with .gguf", path);
    }
    if (lstat(path, &st) != 0) { return true; }
    if (options_export_gguf(o)) { return fail(e, "--export: %s exists, wanted a new name", path); }
    return (S_ISDIR(st.st_mode) && export_is_empty(path)) ||
           fail(e, "--export: %s exists, wanted a new folder, or a name that ends with .gguf", path);
}

/* Writes the export under a temporary name, then renames it. The lock of the temporary file or folder keeps other exports away
 * until then. */
static inline bool export_write(Export* x, ExportDtype type, const char* path, Error* e) {
    char tmp[PATH_CAP], parent[PATH_CAP];
    const Options* o = &x->program->chosen;
    const bool gguf = options_export_gguf(o);
    Error ignored = NO_ERROR;
    folder_of(path, parent);
    if (snprintf(tmp, sizeof tmp, "%s.tmp", path) >= (int)sizeof tmp) { return fail(e, "--export: the path is too long"); }
    if (!make_directories(parent, e)) { return false; }
    FILE* f = gguf ? create_temporary(tmp, e) : NULL;
    if (gguf && !f) { return false; }
    const int lock = gguf ? dup(fileno(f)) : create_temporary_folder(tmp, e);
    if (!gguf && lock < 0) { return false; }
    bool ok = lock >= 0 || fail(e, "%s: cannot keep its lock: %s", tmp, strerror(errno));
    ok = ok && export_check_target(o, path, e);  // again: another export may have ended meanwhile
    ok = ok && (gguf ? export_gguf(x, type, f, e) : export_folder(x, type, tmp, e));
    if (f) { ok = close_output(f, tmp, ok ? e : &ignored) && ok; }
    ok = ok && (gguf ? rename_output(tmp, path, e)
                     : rename(tmp, path) == 0 || fail(e, "%s: cannot rename to %s: %s", tmp, path, strerror(errno)));
    if (!ok) { remove_tree(tmp, &ignored); }
    if (lock >= 0) { close(lock); }
    return ok && sync_directory(parent, e);
}

/* Runs --export. */
static inline void job_export(Program* p) {
    const ModelSpec* spec = &p->spec;
    Export x;
    Error e = NO_ERROR;
    char path[PATH_CAP], count[32];
    memset(&x, 0, sizeof x);
    x.program = p;
    must(export_path(&p->chosen, path, &e) && export_check_target(&p->chosen, path, &e), &e);
    load_weights(&p->start, spec, &p->run, &p->process, slot_to(NULL, NULL));
    if (spec->config.lora.rank > 0) {
        x.adapters = (float*)xcalloc(spec->trained.elements, sizeof(float));
        HostSlot slot;
        load_adapters(&p->start, spec, 0, host_slot(&slot, SLOT_MASTER, x.adapters, NULL));
    }
    must(model_open(&x.files, p->start.base_dir, &e), &e);
    const ExportDtype type = export_type(&x);
    x.progress = progress_begin(process_screen(&p->process), "export", spec->table.num_params, "weights");
    const bool ok = export_write(&x, type, path, &e);
    progress_end(&x.progress);
    if (!ok && e.too_large) { die("%s\n  hint: --export-dtype f32 or bf16 holds it", e.msg); }
    must(ok, &e);
    model_close(&x.files);
    free(x.adapters);
    print_names(stdout, "exported %s, %s parameters, as %s to %s\n", p->start.dir,
                text_count(spec->table.num_params, count, sizeof count), gguf_types[type].name, path);
}

#endif
