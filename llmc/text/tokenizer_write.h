/* tokenizer_write.h -- writes a Tokenizer as the files that `transformers` reads: tokenizer.json and tokenizer_config.json.
 *
 * A tokenizer from a tokenizer.json is written unchanged. For a new model it gets a post-processor that puts BOS in front of a
 * text if there is none, since training documents begin with BOS. A tokenizer from a tiktoken file, or of the built-in bytes,
 * is written anew.
 */
#ifndef LLMC_TOKENIZER_WRITE_H
#define LLMC_TOKENIZER_WRITE_H

#include "llmc/base/utils.h"           // defines: path_join, xmalloc, xstrdup, xopen_memory, xclose_memory
#include "llmc/files/json.h"           // defines: json_write_string, json_write_text, json_find_member, json_with_member
#include "llmc/files/output.h"         // defines: create_output, close_output, write_file
#include "llmc/text/text_rules.h"      // defines: TextRules, text_rules_init
#include "llmc/text/tokenizer.h"       // defines: Tokenizer, tokenizer_token, token_splits
#include "llmc/text/tokenizer_read.h"  // defines: LLAMA3_PATTERN, byte_stand_ins

/* Returns a token's bytes as a JSON string. The caller frees it. */
static inline char* token_json(const Tokenizer* t, int id) {
    size_t len, size = 0;
    char* text = NULL;
    const char* s = tokenizer_token(t, id, &len);
    FILE* f = xopen_memory(&text, &size);
    json_write_string(f, s, len);
    xclose_memory(f, &text);
    return text;
}

/* Writes the token with bytes s[0 .. n) as a JSON string of GPT-2's stand-ins. */
static inline void write_stand_ins(FILE* f, const uint16_t* code, const char* s, size_t n) {
    char* name = (char*)xmalloc(3 * n);  // a stand-in has two bytes; the compiler knows of 16 bits alone
    size_t len = 0;
    for (size_t i = 0; i < n; i++) { len += utf8_encode(name + len, code[(uint8_t)s[i]]); }
    json_write_string(f, name, len);
    free(name);
}

/* Returns the post-processor that puts BOS in front of a text, in the form of `tokenizers`. The caller frees it. */
static inline char* bos_post_processor(const Tokenizer* t) {
    char *name = token_json(t, t->bos_id), *text = NULL;
    size_t size = 0;
    FILE* f = xopen_memory(&text, &size);
    fputs("{\"type\":\"TemplateProcessing\"", f);
    for (int pair = 0; pair < 2; pair++) {
        fputs(pair ? ",\"pair\":[" : ",\"single\":[", f);
        for (int i = 0; i <= pair; i++) {
            fprintf(f, "%s{\"SpecialToken\":{\"id\":%s,\"type_id\":%d}},", i ? "," : "", name, i);
            fprintf(f, "{\"Sequence\":{\"id\":\"%c\",\"type_id\":%d}}", 'A' + i, i);
        }
        fputc(']', f);
    }
    fprintf(f, ",\"special_tokens\":{%s:{\"id\":%s,\"ids\":[%d],\"tokens\":[%s]}}}", name, name, t->bos_id, name);
    xclose_memory(f, &text);
    free(name);
    return text;
}

static inline int compare_splits(const void* a, const void* b) {
    const uint64_t x = *(const uint64_t*)a, y = *(const uint64_t*)b;
    return (x > y) - (x < y);
}

/* Writes the merges that give token `id` by tiktoken's rule: all its splits into two tokens, in the order of their ids.
 * `lengths`: see token_splits(). */
static inline void write_merges_of(FILE* f, const Tokenizer* t, const uint16_t* code, int id, const bool* lengths,
                                   bool* first) {
    uint64_t* splits = (uint64_t*)xmalloc(size_min(t->at[id + 1] - t->at[id], (size_t)t->vocab_size) * sizeof(uint64_t));
    const size_t count = token_splits(t, id, lengths, splits);
    qsort(splits, count, sizeof *splits, compare_splits);
    for (size_t i = 0; i < count; i++) {
        fputs(*first ? "\n[" : ",\n[", f);
        *first = false;
        for (int side = 0; side < 2; side++) {
            size_t len;
            const char* part = tokenizer_token(t, (int)(side ? splits[i] & UINT32_MAX : splits[i] >> 32), &len);
            if (side) { fputc(',', f); }
            write_stand_ins(f, code, part, len);
        }
        fputc(']', f);
    }
    free(splits);
}

/* Writes a tokenizer.json for a tokenizer that did not come from one: tiktoken's kind or the built-in bytes. */
static inline void write_tokenizer_json(FILE* f, const Tokenizer* t) {
    uint16_t code[256];
    int16_t byte_of[512];
    bool first = true;
    byte_stand_ins(code, byte_of);
    fputs("{\n\"version\": \"1.0\",\n\"truncation\": null,\n\"padding\": null,\n\"added_tokens\": [", f);
    for (int id = 0; id < t->vocab_size; id++) {
        if (!(t->flags[id] & TOKEN_ADDED)) { continue; }
        char* name = token_json(t, id);
        fprintf(f, "%s\n{\"id\":%d,\"content\":%s", first ? "" : ",", id, name);
        first = false;
        free(name);
        fputs(",\"single_word\":false,\"lstrip\":false,\"rstrip\":false,\"normalized\":false,\"special\":true}", f);
    }
    fputs("],\n\"normalizer\": null,\n\"pre_tokenizer\": ", f);
    static const char bytes[] = "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":true,\"use_regex\":false}";
    if (t->split == SPLIT_LLAMA3) {
        fputs("{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":", f);
        json_write_text(f, LLAMA3_PATTERN("\\p{N}{1,3}"));
        fprintf(f, "},\"behavior\":\"Isolated\",\"invert\":false},%s]}", bytes);
    } else {
        fputs(bytes, f);
    }
    char* post_processor = bos_post_processor(t);
    fprintf(f, ",\n\"post_processor\": %s", post_processor);
    free(post_processor);
    fputs(",\n\"decoder\": {\"type\":\"ByteLevel\",\"add_prefix_space\":true,\"trim_offsets\":true,\"use_regex\":true},\n", f);
    fputs("\"model\": {\"type\":\"BPE\",\"dropout\":null,\"unk_token\":null,\"continuing_subword_prefix\":null,", f);
    fputs("\"end_of_word_suffix\":null,\"fuse_unk\":false,\"byte_fallback\":false,\"ignore_merges\":true,\n\"vocab\": {", f);
    first = true;
    for (int id = 0; id < t->vocab_size; id++) {
        if (t->flags[id] & TOKEN_ADDED) { continue; }
        fputs(first ? "\n" : ",\n", f);
        first = false;
        size_t len;
        const char* s = tokenizer_token(t, id, &len);
        write_stand_ins(f, code, s, len);
        fprintf(f, ":%d", id);
    }
    fputs("},\n\"merges\": [", f);
    first = true;
    bool* lengths = (bool*)xcalloc(t->max_token_len + 1, sizeof(bool));
    for (int id = 0; id < t->vocab_size; id++) {
        if (!(t->flags[id] & TOKEN_ADDED)) { lengths[t->at[id + 1] - t->at[id]] = true; }
    }
    for (int id = 0; id < t->vocab_size; id++) {
        if (!(t->flags[id] & TOKEN_ADDED)) { write_merges_of(f, t, code, id, lengths, &first); }
    }
    free(lengths);
    fputs("]}\n}\n", f);
}

/* What a folder adds to the tokenizer's own files. */
typedef struct {
    bool fresh;                 // the model is new: its texts begin with BOS
    const char* chat_template;  // Jinja that the tokenizer's folder does not have in tokenizer_config.json; NULL: none
    int max_length;             // of the texts in tokens that the model was trained on, for a new file; 0 leaves it out
} TokenizerExtras;

/* Returns what a folder with these rules says. */
static inline TokenizerExtras tokenizer_extras(const TextRules* r, bool fresh, int max_length) {
    const bool other_file = r->template_path[0] && strcmp(file_name(r->template_path), "tokenizer_config.json") != 0;
    const TokenizerExtras x = {fresh, r->template_added || (fresh && other_file) ? r->chat_template : NULL, max_length};
    return x;
}

/* Returns the text of a tokenizer_config.json: the tokenizer's own, unless x changes it, or a new one, with BOS, EOS and the
 * class set. The caller frees it. */
static inline char* tokenizer_config_text(const Tokenizer* t, const TokenizerExtras* x) {
    static const struct {
        const char *key, *value;
    } fixed[] = {
        // any other class would replace the file's post-processor with its own
        {"tokenizer_class", "\"PreTrainedTokenizerFast\""},
        {"clean_up_tokenization_spaces", "false"},  // otherwise decode() would drop the space in " ."
    };
    const char *from, *to, *names[2] = {"eos_token", "bos_token"};
    const int ids[2] = {t->eos_id, t->bos_id};
    char* text = xstrdup(t->config ? t->config : "{\n}\n");
    char* value = NULL;
    size_t size = 0;
    if (x->chat_template) {
        FILE* f = xopen_memory(&value, &size);
        json_write_text(f, x->chat_template);
        xclose_memory(f, &value);
        json_set_member(&text, "chat_template", value);
        free(value);
    }
    if (t->config && !x->fresh) { return text; }
    if (!t->config && x->max_length > 0) {
        char number[16];
        snprintf(number, sizeof number, "%d", x->max_length);
        json_set_member(&text, "model_max_length", number);
    }
    for (int i = 0; i < 2; i++) {
        if (ids[i] < 0) { continue; }
        value = token_json(t, ids[i]);
        json_set_member(&text, names[i], value);
        free(value);
    }
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++) { json_set_member(&text, fixed[i].key, fixed[i].value); }
    if (json_find_member(text, "add_bos_token", &from, &to)) { json_set_member(&text, "add_bos_token", "true"); }
    return text;
}

/* Writes tokenizer.json and tokenizer_config.json to a folder, for this program and for `transformers`: the tokenizer's own
 * files, changed only as *x says. */
static inline bool tokenizer_save(const Tokenizer* t, const char* folder, const TokenizerExtras* x, Error* e) {
    char path[PATH_CAP];
    if (!path_join(path, folder, "tokenizer.json", e)) { return false; }
    FILE* f = create_output(path, e);
    if (!f) { return false; }
    TextRules rules;
    text_rules_init(&rules, t, NULL);
    if (!t->source) {
        write_tokenizer_json(f, t);
    } else if (!x->fresh || t->bos_id < 0 || (rules.num_start > 0 && rules.start_ids[0] == t->bos_id)) {
        fputs(t->source, f);
    } else {
        char* value = bos_post_processor(t);
        char* text = json_with_member(t->source, "post_processor", value);
        fputs(text, f);
        free(text);
        free(value);
    }
    if (!close_output(f, path, e) || !path_join(path, folder, "tokenizer_config.json", e)) { return false; }
    char* text = tokenizer_config_text(t, x);
    const bool ok = write_file(path, text, strlen(text), e);
    free(text);
    return ok;
}

#endif
