/* chat.h -- writes Llama 3's chat format, as tokens and as a template for `transformers`.
 *
 *   <|begin_of_text|> then for each message <|start_header_id|>ROLE<|end_header_id|>\n\nTEXT<|eot_id|>
 *
 * TEXT is stripped of white space at both ends. An answer follows the header of "assistant" and ends at <|eot_id|>. Special
 * tokens are looked up by name; texts are encoded as plain text, so a user cannot type a header.
 *
 * There are two forms. The form of Llama 3 has a system message if one is given. The form of Llama 3.1, 3.2 and 3.3 always has
 * one, which begins with two dates. No Jinja template is run: the texts in a folder's template decide the form, and any other
 * template is refused. The ids equal the ids that `transformers` makes with that template.
 *
 * Elsewhere: the conversation (run/jobs/chat.h).
 */
#ifndef LLMC_CHAT_H
#define LLMC_CHAT_H

#include "llmc/base/utils.h"  // first, since it asks for the functions beyond C11

#include "llmc/base/utf8.h"       // defines: utf8_decode
#include "llmc/files/folder.h"    // defines: folder_of, folder_has
#include "llmc/files/json.h"      // defines: json_parse, json_get, json_string, json_is_string
#include "llmc/text/tokenizer.h"  // defines: Tokenizer, TokenList, tokenizer_find, tokenizer_encode
#include "llmc/text/unicode.h"    // defines: unicode_is_stripped

#define LLAMA3_CHAT_TEMPLATE                                                                                    \
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n" \
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"                                                     \
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"

// the first line of Llama 3.1's system message; the templates of 3.1, 3.2 and 3.3 have the same month
#define CHAT_CUTOFF "Cutting Knowledge Date: December 2023"
#define CHAT_DATE "26 Jul 2024"  // what the templates write where no date is given

typedef struct {
    int begin, start_header, end_header, eot;
    const char* date;  // in the system message of Llama 3.1; NULL: the form of Llama 3
} ChatFormat;

// ---------------------------------------------------------------------------------------------------------------------
// the form

/* Finds the format's tokens in a tokenizer (or NULL) and checks that the model's vocabulary has them, and that no text can
 * be one of them; otherwise fails with the name of the first token. */
static inline bool chat_tokens(ChatFormat* c, const Tokenizer* t, int vocab_size, Error* e) {
    static const char* const names[] = {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"};
    int* ids[] = {&c->begin, &c->start_header, &c->end_header, &c->eot};
    if (!t) { return fail(e, "the model has no tokenizer, wanted one with Llama 3's chat tokens"); }
    for (int i = 0; i < 4; i++) {
        *ids[i] = tokenizer_find(t, names[i]);
        if (*ids[i] < 0) {
            return fail(e,
                        "the tokenizer has no token %s, wanted Llama 3's chat tokens\n"
                        "  hint: ./tokenize --train-bpe N --chat makes a tokenizer with them, and dev/data/tinytales has one",
                        names[i]);
        }
        if (!(t->flags[*ids[i]] & TOKEN_SPECIAL)) {
            return fail(e, "the tokenizer's %s is no special token: a text could hold it", names[i]);
        }
        if (*ids[i] >= vocab_size) {
            return fail(e, "%s is token %d, but the model's vocabulary has only %d", names[i], *ids[i], vocab_size);
        }
    }
    return true;
}

/* Returns whether a tokenizer has the tokens that LLAMA3_CHAT_TEMPLATE names. */
static inline bool chat_template_fits(const Tokenizer* t) {
    return tokenizer_find(t, "<|start_header_id|>") >= 0 && tokenizer_find(t, "<|end_header_id|>") >= 0 &&
           tokenizer_find(t, "<|eot_id|>") >= 0;
}

/* Returns the member "chat_template" of the text of a tokenizer_config.json: a text, or in a list of named templates the one
 * called "default"; NULL if there is none. The caller frees it. */
static inline char* chat_template_of_config(const char* config) {
    Json j;
    Error ignored = NO_ERROR;  // the text was parsed when it was read or written
    if (!config || !json_parse(&j, xstrdup(config), strlen(config), "tokenizer_config.json", &ignored)) { return NULL; }
    const JsonNode* found = json_get(&j, json_root(&j), "chat_template");
    if (found && found->type == JSON_ARRAY) {
        const JsonNode* item = json_first(&j, found);
        while (item && !json_is_string(&j, json_get(&j, item, "name"), "default")) { item = json_next(&j, item); }
        found = item ? json_get(&j, item, "template") : NULL;
    }
    const char* text = json_string(&j, found, NULL);
    char* copy = text ? xstrdup(text) : NULL;
    json_free(&j);
    return copy;
}

/* Sets *dated: whether a template is of Llama 3.1's form. Fails if it is of neither form; `path` is the file that has it. */
static inline bool chat_template_form(const char* text, const char* path, bool* dated, Error* e) {
    static const char* const wanted[] = {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "trim"};
    *dated = strstr(text, "Cutting Knowledge Date") != NULL;
    for (int i = 0; i < 4; i++) {
        if (strstr(text, wanted[i])) { continue; }
        return fail(e, "%s: the chat template has no %s, wanted Llama 3's or Llama 3.1's template", path, wanted[i]);
    }
    if (!*dated || (strstr(text, CHAT_CUTOFF) && strstr(text, "Today Date: "))) { return true; }
    return fail(
        e, "%s: the chat template writes other dates than \"" CHAT_CUTOFF "\", wanted Llama 3's or Llama 3.1's template", path);
}

/* Sets *dated: whether the template beside the tokenizer's file is of Llama 3.1's form. `transformers` takes
 * chat_template.jinja before tokenizer_config.json. Without a template the form is the form of Llama 3. */
static inline bool chat_read_form(const Tokenizer* t, bool* dated, Error* e) {
    char folder[PATH_CAP], path[PATH_CAP];
    size_t size = 0;
    *dated = false;
    if (!t->path) { return true; }
    folder_of(t->path, folder);
    const bool jinja = folder_has(folder, "chat_template.jinja");
    if (!path_join(path, folder, jinja ? "chat_template.jinja" : "tokenizer_config.json", e)) { return false; }
    char* text = jinja ? read_file(path, &size, 16 << 20, e) : chat_template_of_config(t->config);
    const bool ok = text ? chat_template_form(text, path, dated, e) : !jinja;
    free(text);
    return ok;
}

/* Reads the form of the template beside the tokenizer's file: *date is the date to write, `wanted` unless it is NULL; NULL in
 * the form of Llama 3, which refuses one. */
static inline bool chat_read_date(const Tokenizer* t, const char* wanted, const char** date, Error* e) {
    bool dated = false;
    if (!chat_read_form(t, &dated, e)) { return false; }
    *date = !dated ? NULL : wanted ? wanted : CHAT_DATE;
    return dated || !wanted || fail(e, "--date: the chat template is Llama 3's, which has no date, wanted none or Llama 3.1's");
}

// ---------------------------------------------------------------------------------------------------------------------
// messages

/* Returns the text from its first byte that is no white space. *len, its length, becomes the length without the white space
 * at both ends, as a template's trim does. */
static inline const char* chat_strip(const char* text, size_t* len) {
    const char *end = text + *len, *first = end, *last = end;  // [first, last) is the stripped text
    for (const char* s = text; s < end;) {
        uint32_t c;
        const int bytes = utf8_decode((const uint8_t*)s, (size_t)(end - s), &c);
        const bool stripped = bytes && unicode_is_stripped(c);
        if (!stripped && first == end) { first = s; }
        s += bytes ? bytes : 1;
        if (!stripped) { last = s; }
    }
    *len = (size_t)(last - first);
    return first;
}

/* Appends the header of a role and the text after it: Llama 3.1's dates unless `date` is NULL, and the text of `len`
 * bytes, stripped. To the tokenizer all of it is one string. */
static inline void chat_part(TokenList* l, const ChatFormat* c, const Tokenizer* t, const char* role, const char* date,
                             const char* text, size_t len) {
    size_t size = 0;
    char* whole = NULL;
    text = chat_strip(text, &len);
    FILE* f = xopen_memory(&whole, &size);
    fputs("\n\n", f);
    if (date) { fprintf(f, CHAT_CUTOFF "\nToday Date: %s\n\n", date); }
    fwrite(text, 1, len, f);
    xclose_memory(f, &whole);
    token_list_add(l, c->start_header);
    tokenizer_encode(t, role, strlen(role), false, l);
    token_list_add(l, c->end_header);
    tokenizer_encode(t, whole, size, false, l);
    free(whole);
}

/* Appends the header of a message. */
static inline void chat_header(TokenList* l, const ChatFormat* c, const Tokenizer* t, const char* role) {
    chat_part(l, c, t, role, NULL, "", 0);
}

/* Appends a whole message: header, stripped text, <|eot_id|>. */
static inline void chat_message(TokenList* l, const ChatFormat* c, const Tokenizer* t, const char* role, const char* text,
                                size_t len) {
    chat_part(l, c, t, role, NULL, text, len);
    token_list_add(l, c->eot);
}

/* Returns the place in the list of the first token of a message's text, or of its <|eot_id|>, if the text is empty; `from` is
 * the place of its header. A token that begins in the newlines of the header and ends in the text belongs to the text. */
static inline size_t chat_text_start(const TokenList* l, const ChatFormat* c, const Tokenizer* t, size_t from) {
    size_t at = from, len;
    while (l->ids[at++] != c->end_header) {}
    for (size_t bytes = 0; l->ids[at] != c->eot; at++) {
        tokenizer_token(t, l->ids[at], &len);
        bytes += len;
        if (bytes > strlen("\n\n")) { break; }
    }
    return at;
}

/* Appends the start of a conversation: <|begin_of_text|> and the system message, of `len` bytes; 0: none. */
static inline void chat_begin(TokenList* l, const ChatFormat* c, const Tokenizer* t, const char* system, size_t len) {
    token_list_add(l, c->begin);
    if (c->date) {
        chat_part(l, c, t, "system", c->date, system, len);
        token_list_add(l, c->eot);
    } else if (len > 0) {
        chat_message(l, c, t, "system", system, len);
    }
}

#endif
