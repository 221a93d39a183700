/* text_rules.h -- what a model's folder says about its texts, read once for all jobs:
 *
 *   the tokens before a text    the post-processor of tokenizer.json
 *   the tokens that end one     eos_token_id of config.json and of generation_config.json, and the tokenizer's eos_token
 *   the chat template           chat_template.jinja, else the member of tokenizer_config.json
 *   how tokens are drawn        generation_config.json
 *
 * The rules are those of `transformers`; dev/doc/generating.md has them in one table, and a test compares each row. One rule is
 * ours: a text also ends at BOS, since token files separate documents with it.
 *
 * Elsewhere: the names of BOS, EOS and pad (tokenizer_read.h); writing a folder (tokenizer_write.h).
 */
#ifndef LLMC_TEXT_RULES_H
#define LLMC_TEXT_RULES_H

#include "llmc/base/utils.h"  // first, since it asks for the functions beyond C11; defines: read_file, path_join, file_exists

#include "llmc/base/text.h"       // defines: text_starts, show_text
#include "llmc/config.h"          // defines: ModelConfig, MAX_EOS
#include "llmc/files/folder.h"    // defines: folder_of, folder_has
#include "llmc/files/json.h"      // defines: json_parse, json_get, json_string, json_find_member, json_set_member
#include "llmc/files/output.h"    // defines: write_file
#include "llmc/text/tokenizer.h"  // defines: Tokenizer

enum { MAX_END_IDS = 2 * MAX_EOS + 4, MAX_START_IDS = 8 };

/* How generation_config.json lets tokens be drawn. A number below 0 is not stated. */
typedef struct {
    bool stated, draws;         // do_sample is stated; it is true, otherwise the most probable token is taken
    double temperature, top_p;  // if tokens are drawn
    int64_t top_k;
    double repetition_penalty;  // 1: none
    int64_t max_new_tokens;     // the most of a text
} Sampling;

/* The rules of a model's texts. Ids are below vocab_size; -1: none. */
typedef struct {
    const Tokenizer* tokenizer;        // NULL: texts are ids
    int vocab_size;                    // of the model
    int bos_id;                        // also separates documents
    int32_t start_ids[MAX_START_IDS];  // what `transformers` puts before a text
    int num_start;
    bool ends_with_eos;            // `transformers` puts a token after a text, too
    int32_t end_ids[MAX_END_IDS];  // any of them ends a text that is generated
    int num_ends;
    int pad_id;                    // fills up the rows of a batch
    int end_of_turn;               // ends an answer in the chat template, if this run trains with it
    char* chat_template;           // Jinja; NULL: none
    char template_path[PATH_CAP];  // the file that has templates; "": none. Without chat_template none is called "default"
    bool template_added;           // the folder has none: this run trains with chat_template
    Sampling sampling;
    char* generation;          // the text of generation_config.json; NULL: none
    bool generation_lost;      // there is one, but it could not be read
    int32_t ids[MAX_END_IDS];  // its eos_token_id
    int num_ids;
} TextRules;

static inline void text_rules_free(TextRules* r) {
    free(r->chat_template);
    free(r->generation);
    memset(r, 0, sizeof *r);
}

/* Returns whether a list has the id. */
static inline bool text_rules_has(const int32_t* ids, int count, int64_t id) {
    int i = 0;
    while (i < count && ids[i] != id) { i++; }
    return i < count;
}

/* Returns whether a token ends a text. */
static inline bool text_rules_ends(const TextRules* r, int64_t id) { return text_rules_has(r->end_ids, r->num_ends, id); }

/* Adds a token that ends texts, unless it is one already or no token of the model. */
static inline void text_rules_end_at(TextRules* r, int64_t id) {
    if (id < 0 || id >= r->vocab_size || r->num_ends == MAX_END_IDS || text_rules_ends(r, id)) { return; }
    r->end_ids[r->num_ends++] = (int32_t)id;
}

/* Checks that the model has every token of a text: the tokenizer may have added ones that it lacks. */
static inline bool text_rules_hold(const TextRules* r, const int32_t* ids, size_t count, Error* e) {
    size_t i = 0;
    while (i < count && ids[i] < r->vocab_size) { i++; }
    if (i == count) { return true; }
    const Tokenizer* t = r->tokenizer;
    char name[100];
    const uint32_t at = t->at[ids[i]];
    return fail(e, "token %zu of the text is \"%s\" (%d), but the model has only %d tokens: leave it out of the text", i,
                show_text(name, sizeof name, (const char*)t->bytes + at, t->at[ids[i] + 1] - at), ids[i], r->vocab_size);
}

// ---------------------------------------------------------------------------------------------------------------------
// the tokens before a text

/* Puts ids in front of r->start_ids. */
static inline void text_rules_add_start(TextRules* r, const int32_t* ids, int count) {
    if (count > MAX_START_IDS - r->num_start) { return; }
    memmove(r->start_ids + count, r->start_ids, (size_t)r->num_start * sizeof *r->start_ids);
    memcpy(r->start_ids, ids, (size_t)count * sizeof *ids);
    r->num_start += count;
}

/* Reads the member "single" of a TemplateProcessing: tokens, the text, tokens. */
static inline void text_rules_read_template(TextRules* r, const Json* j, const JsonNode* node) {
    const JsonNode* single = json_get(j, node, "single");
    int32_t ids[MAX_START_IDS];
    int count = 0;
    bool behind = false;
    for (const JsonNode* n = single && json_is_container(single) ? json_first(j, single) : NULL; n; n = json_next(j, n)) {
        const JsonNode* token = json_get(j, n, "SpecialToken");
        const char* name = json_string(j, json_get(j, token, "id"), NULL);
        const JsonNode* list = name ? json_get(j, json_get(j, json_get(j, node, "special_tokens"), name), "ids") : NULL;
        int64_t id = 0;
        behind |= json_get(j, n, "Sequence") != NULL;
        r->ends_with_eos |= behind && token;
        for (const JsonNode* i = list && !behind && json_is_container(list) ? json_first(j, list) : NULL; i;
             i = json_next(j, i)) {
            if (json_node_int(j, i, &id) && id >= 0 && id < r->vocab_size && count < MAX_START_IDS) {
                ids[count++] = (int32_t)id;
            }
        }
    }
    text_rules_add_start(r, ids, count);
}

/* Reads a post-processor, or the parts of one in their order: the last stands outermost. */
static inline void text_rules_read_processor(TextRules* r, const Json* j, const JsonNode* node, int depth) {
    const JsonNode *list = json_get(j, node, "processors"), *type = json_get(j, node, "type"), *cls = json_get(j, node, "cls");
    int64_t id = 0;
    if (json_is_string(j, type, "Sequence") && list && json_is_container(list) && depth < 8) {
        for (const JsonNode* n = json_first(j, list); n; n = json_next(j, n)) { text_rules_read_processor(r, j, n, depth + 1); }
    } else if (json_is_string(j, type, "TemplateProcessing")) {
        text_rules_read_template(r, j, node);
    } else if (cls && cls->type == JSON_ARRAY && json_length(cls) == 2 &&
               json_node_int(j, json_next(j, json_first(j, cls)), &id) && id >= 0 &&
               id < r->vocab_size) {  // BertProcessing, RobertaProcessing: [name, id]
        const int32_t first = (int32_t)id;
        text_rules_add_start(r, &first, 1);
        r->ends_with_eos = true;
    }
}

/* Finds the tokens before a text: by the post-processor of tokenizer.json. Without a tokenizer.json the folders that we write
 * have one with BOS. */
static inline void text_rules_find_start(TextRules* r) {
    const Tokenizer* t = r->tokenizer;
    const char *from, *to;
    const int32_t bos = r->bos_id;
    Json j;
    Error ignored = NO_ERROR;
    if ((!t || !t->source) && bos >= 0) { text_rules_add_start(r, &bos, 1); }
    if (!t || !t->source || !json_find_member(t->source, "post_processor", &from, &to)) { return; }
    const size_t len = (size_t)(to - from);
    if (!json_parse(&j, xcopy_text(from, len), len, "post_processor", &ignored)) { return; }
    text_rules_read_processor(r, &j, json_root(&j), 0);
    json_free(&j);
}

/* Lets texts begin with BOS alone, if there is one. */
static inline void text_rules_begin_with_bos(TextRules* r) {
    r->num_start = r->bos_id >= 0;
    r->start_ids[0] = r->bos_id;
    r->ends_with_eos = false;
}

/* Returns whether a text begins with BOS. */
static inline bool text_rules_begins_with_bos(const TextRules* r) { return r->num_start > 0 && r->start_ids[0] == r->bos_id; }

// ---------------------------------------------------------------------------------------------------------------------
// the chat template

/* Returns a template of tokenizer_config.json: the text, or the one that is called "default" in a list of objects with name and
 * template, or in an object. The caller frees it. */
static inline char* text_rules_template_of(const Json* j, const JsonNode* found) {
    if (found && found->type == JSON_ARRAY) {
        const JsonNode* item = json_first(j, found);
        while (item && !json_is_string(j, json_get(j, item, "name"), "default")) { item = json_next(j, item); }
        found = item ? json_get(j, item, "template") : NULL;
    } else if (found && found->type == JSON_OBJECT) {
        found = json_get(j, found, "default");
    }
    const char* text = json_string(j, found, NULL);
    return text ? xstrdup(text) : NULL;
}

/* Ends every line by a newline alone, as Python does when it reads a text. */
static inline void text_rules_join_lines(char* text) {
    char* out = text;
    for (const char* s = text; *s; s++) {
        if (*s != '\r') { *out++ = *s; }
        if (*s == '\r' && s[1] != '\n') { *out++ = '\n'; }
    }
    *out = 0;
}

/* Finds the template in the tokenizer's folder. */
static inline bool text_rules_find_template(TextRules* r, Error* e) {
    const Tokenizer* t = r->tokenizer;
    char folder[PATH_CAP];
    size_t size = 0;
    Json j;
    Error ignored = NO_ERROR;  // the text was parsed when it was read
    if (!t || !t->path) { return true; }
    folder_of(t->path, folder);
    if (folder_has(folder, "chat_template.jinja")) {
        if (!path_join(r->template_path, folder, "chat_template.jinja", e)) { return false; }
        r->chat_template = read_file(r->template_path, &size, 16 << 20, e);
        if (r->chat_template) { text_rules_join_lines(r->chat_template); }
        return r->chat_template != NULL;
    }
    if (!t->config || !json_parse(&j, xstrdup(t->config), strlen(t->config), "tokenizer_config.json", &ignored)) {
        return true;
    }
    const JsonNode* found = json_get(&j, json_root(&j), "chat_template");
    const bool ok = !found || path_join(r->template_path, folder, "tokenizer_config.json", e);
    r->chat_template = text_rules_template_of(&j, found);
    json_free(&j);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// generation_config.json

/* Members that change the text of `transformers`, and that we do not compute: a warning names them, unless they are off. Those
 * of the first list count only where tokens are drawn. */
static const char* const generation_drawing[] = {"min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"};
// clang-format off
static const char* const generation_unsupported[] = {
    "num_beams", "penalty_alpha", "dola_layers", "guidance_scale", "no_repeat_ngram_size", "min_length", "min_new_tokens",
    "bad_words_ids", "force_words_ids", "constraints", "suppress_tokens", "sequence_bias", "stop_strings", "token_healing",
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "watermarking_config",
    "exponential_decay_length_penalty"
};
// clang-format on

/* Reads a number from min on, up to max. Any other value is left out with a warning: it ends no job. */
static inline void generation_number(const Json* j, const char* key, double min, double max, double* out, bool says) {
    Error e = NO_ERROR;
    if (!json_double_or(j, json_root(j), key, min, max, out, &e) && says) { warn("%s: it is left out", e.msg); }
}

static inline void generation_integer(const Json* j, const char* key, int64_t min, int64_t max, int64_t* out, bool says) {
    Error e = NO_ERROR;
    if (!json_int_or(j, json_root(j), key, min, max, out, &e) && says) { warn("%s: it is left out", e.msg); }
}

static inline void generation_read_sampling(Sampling* s, const Json* j, bool says) {
    const JsonNode* draws = json_get(j, json_root(j), "do_sample");
    const JsonNode* top_k = json_get(j, json_root(j), "top_k");
    int64_t minus_one = 0;
    s->stated = draws != NULL;
    s->draws = !json_is_off(j, json_root(j), "do_sample");
    generation_number(j, "temperature", 0, 100, &s->temperature, says);
    generation_number(j, "top_p", 0, 1, &s->top_p, says);
    if (top_k && json_node_int(j, top_k, &minus_one) && minus_one == -1) {
        s->top_k = 0;  // as other programs turn it off
    } else {
        generation_integer(j, "top_k", 0, INT32_MAX, &s->top_k, says);
    }
    generation_number(j, "repetition_penalty", 1e-6, 1e6, &s->repetition_penalty, says);
    generation_integer(j, "max_new_tokens", 1, 1 << 24, &s->max_new_tokens, says);
}

/* Names the members that have no effect here. */
static inline void generation_warn(const Sampling* s, const Json* j) {
    char names[512] = "";
    enum { DRAWING = sizeof generation_drawing / sizeof *generation_drawing };
    for (size_t i = s->draws ? 0 : DRAWING; i < DRAWING + sizeof generation_unsupported / sizeof *generation_unsupported; i++) {
        const char* name = i < DRAWING ? generation_drawing[i] : generation_unsupported[i - DRAWING];
        const bool one =
            strcmp(name, "typical_p") == 0 || strcmp(name, "num_beams") == 0 || strcmp(name, "guidance_scale") == 0;
        double number = 0, off = one ? 1 : text_starts(name, "forced_") ? -1 : 0;
        const bool is_number = json_node_double(j, json_get(j, json_root(j), name), &number);
        if (is_number ? number == off : json_is_off(j, json_root(j), name)) { continue; }
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", names[0] ? ", " : "", name);
    }
    if (s->repetition_penalty != 1) {  // no flag turns it off, so it is said
        char text[PATH_CAP + 64];
        snprintf(text, sizeof text, "%s: repetition_penalty %g applies", j->path, s->repetition_penalty);
        print_message("note", text);
    }
    if (names[0]) { warn("%s: not computed here, so texts differ from those of transformers: %s", j->path, names); }
}

/* Reads the folder's generation_config.json, if there is one. A file that is damaged is left out with a warning. says: with
 * warnings; speaks: also those that matter to a text. */
static inline void text_rules_read_generation(TextRules* r, const char* dir, bool says, bool speaks) {
    char path[PATH_CAP];
    size_t size = 0;
    Json j;
    Error e = NO_ERROR;
    if (!path_join(path, dir, "generation_config.json", &e) || (access(path, F_OK) != 0 && errno == ENOENT)) { return; }
    char* text = read_file(path, &size, 16 << 20, &e);
    if (!text || !json_parse(&j, xcopy_text(text, size), size, path, &e)) {
        if (says) { warn("%s: the file is left out", e.msg); }
        r->generation_lost = true;
        free(text);
        return;
    }
    r->generation = text;
    generation_read_sampling(&r->sampling, &j, says && speaks);
    const JsonNode* eos = json_get(&j, json_root(&j), "eos_token_id");
    const bool list = eos && eos->type == JSON_ARRAY;
    for (const JsonNode* n = list ? json_first(&j, eos) : eos; n; n = list ? json_next(&j, n) : NULL) {
        int64_t id = 0;
        if (!json_node_int(&j, n, &id) || id < 0 || id >= r->vocab_size || r->num_ids == MAX_END_IDS) { continue; }
        r->ids[r->num_ids++] = (int32_t)id;
        text_rules_end_at(r, id);
    }
    if (says && speaks) { generation_warn(&r->sampling, &j); }
    json_free(&j);
}

/* Writes generation_config.json: the text that was read, unless training has added an end token; otherwise a new one, with the
 * ids of *c and the sampling if it is stated. Writes none in the place of one that could not be read. */
static inline bool text_rules_save_generation(const TextRules* r, const ModelConfig* c, const char* dir, Error* e) {
    char path[PATH_CAP], *eos = NULL, *text = NULL;
    const Sampling* s = &r->sampling;
    size_t size = 0;
    int32_t ids[MAX_END_IDS + MAX_EOS];
    int count = r->num_ids;
    memcpy(ids, r->ids, (size_t)count * sizeof *ids);
    for (int i = 0; r->num_ids == 0 && i < c->num_eos; i++) { ids[count++] = c->eos_ids[i]; }
    const bool added = r->num_ids > 0 && r->end_of_turn >= 0 && !text_rules_has(r->ids, r->num_ids, r->end_of_turn);
    if (added) { ids[count++] = r->end_of_turn; }
    FILE* f = xopen_memory(&eos, &size);
    json_write_ids(f, ids, count);
    xclose_memory(f, &eos);
    if (r->generation) {
        text = xstrdup(r->generation);
        if (added || (r->end_of_turn >= 0 && r->num_ids == 0)) { json_set_member(&text, "eos_token_id", eos); }
    } else {
        f = xopen_memory(&text, &size);
        fputs("{\n  \"bos_token_id\": ", f);
        json_write_ids(f, &c->bos_id, c->bos_id >= 0);
        fprintf(f, ",\n  \"eos_token_id\": %s", eos);
        if (s->stated) {
            fprintf(f, ",\n  \"do_sample\": %s,\n  \"temperature\": ", s->draws ? "true" : "false");
            json_write_double(f, s->draws ? s->temperature : 1);  // 0 is refused there
            fprintf(f, ",\n  \"top_k\": %lld,\n  \"top_p\": ", (long long)s->top_k);
            json_write_double(f, s->top_p);
        }
        fputs("\n}\n", f);
        xclose_memory(f, &text);
    }
    const bool ok =
        r->generation_lost || (path_join(path, dir, "generation_config.json", e) && write_file(path, text, strlen(text), e));
    free(eos);
    free(text);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// all of it

/* Sets what a configuration (or NULL) and a tokenizer (or NULL) say by themselves. Free with text_rules_free(). */
static inline void text_rules_init(TextRules* r, const Tokenizer* t, const ModelConfig* c) {
    static const Sampling none = {false, false, -1, -1, -1, 1, -1};
    const int named = t ? tokenizer_find_any(t, t->bos_name) : -1, pad = t ? tokenizer_find_any(t, t->pad_name) : -1;
    memset(r, 0, sizeof *r);
    r->tokenizer = t;
    r->vocab_size = c ? c->vocab_size : t->vocab_size;
    r->end_of_turn = -1;
    r->pad_id = pad < r->vocab_size ? pad : -1;
    r->bos_id = named >= 0 ? named : c && c->bos_id >= 0 ? c->bos_id : t ? t->bos_id : -1;
    if (r->bos_id >= r->vocab_size) { r->bos_id = -1; }
    r->sampling = none;
    text_rules_find_start(r);
    if (t) { text_rules_end_at(r, t->eos_id); }
    for (int i = 0; c && i < c->num_eos; i++) { text_rules_end_at(r, c->eos_ids[i]); }
    text_rules_end_at(r, r->bos_id);
    if (t) { text_rules_end_at(r, t->bos_id); }
    if (c) { text_rules_end_at(r, c->bos_id); }
}

/* Reads the rules of a tokenizer (or NULL) with a path, and of a model's folder `dir` (or NULL), whose configuration is *c (or
 * NULL). says, speaks: see text_rules_read_generation(). Free with text_rules_free(), also after an error. */
static inline bool text_rules_read(TextRules* r, const Tokenizer* t, const ModelConfig* c, const char* dir, bool says,
                                   bool speaks, Error* e) {
    text_rules_init(r, t, c);
    if (dir) { text_rules_read_generation(r, dir, says, speaks); }
    return text_rules_find_template(r, e);
}

#endif
