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

#include "llmc/config.h"          // defines: ModelConfig, MAX_EOS
#include "llmc/files/folder.h"    // defines: folder_of, folder_has
#include "llmc/files/json.h"      // defines: json_parse, json_get, json_string, json_find_member
#include "llmc/text/tokenizer.h"  // defines: Tokenizer

enum { MAX_END_IDS = 2 * MAX_EOS + 4, MAX_START_IDS = 8 };

/* What is said of a text. Ids are below vocab_size; -1: none. */
typedef struct {
    const Tokenizer* tokenizer;        // NULL: texts are ids
    int vocab_size;                    // of the model
    int bos_id;                        // also separates documents
    int32_t start_ids[MAX_START_IDS];  // what `transformers` puts before a text
    int num_start;
    bool ends_with_eos;            // it puts a token behind a text, too
    int32_t end_ids[MAX_END_IDS];  // any of them ends a text that is generated
    int num_ends;
    int end_of_turn;               // ends an answer in the chat template
    char* chat_template;           // Jinja; NULL: none
    char template_path[PATH_CAP];  // the file that has templates; "": none. Without chat_template none is called "default"
} TextRules;

static inline void text_rules_free(TextRules* r) {
    free(r->chat_template);
    memset(r, 0, sizeof *r);
}

/* Adds a token that ends texts, unless it is one already or no token of the model. */
static inline void text_rules_end_at(TextRules* r, int64_t id) {
    bool known = id < 0 || id >= r->vocab_size || r->num_ends == MAX_END_IDS;
    for (int i = 0; i < r->num_ends; i++) { known |= r->end_ids[i] == id; }
    if (!known) { r->end_ids[r->num_ends++] = (int32_t)id; }
}

/* Returns whether a token ends a text. */
static inline bool text_rules_ends(const TextRules* r, int id) {
    for (int i = 0; i < r->num_ends; i++) {
        if (r->end_ids[i] == id) { return true; }
    }
    return false;
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
// all of it

/* Sets what a configuration (or NULL) and a tokenizer (or NULL) say by themselves. Free with text_rules_free(). */
static inline void text_rules_init(TextRules* r, const Tokenizer* t, const ModelConfig* c) {
    memset(r, 0, sizeof *r);
    r->tokenizer = t;
    r->vocab_size = c ? c->vocab_size : t->vocab_size;
    r->end_of_turn = -1;
    r->bos_id = t && t->bos_id >= 0 && t->bos_id < r->vocab_size ? t->bos_id : c ? c->bos_id : -1;
    text_rules_find_start(r);
    text_rules_end_at(r, r->bos_id);
    if (t) { text_rules_end_at(r, t->eos_id); }
    if (c) { text_rules_end_at(r, c->bos_id); }
    for (int i = 0; c && i < c->num_eos; i++) { text_rules_end_at(r, c->eos_ids[i]); }
}

/* Reads the rules of a tokenizer (or NULL) with a path, and of a model's folder `dir` (or NULL), whose configuration is *c (or
 * NULL). Free with text_rules_free(), also after an error. */
static inline bool text_rules_read(TextRules* r, const Tokenizer* t, const ModelConfig* c, const char* dir, Error* e) {
    (void)dir;
    text_rules_init(r, t, c);
    return text_rules_find_template(r, e);
}

#endif
