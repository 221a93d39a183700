/* chat.h -- writes conversations as tokens in the form of the model's own chat template, which text/template.h executes.
 *
 * The ids are those of `apply_chat_template` in `transformers`: the template's text, encoded without BOS or EOS of our own.
 * There is one difference. The name of a special token is a token only where the template wrote every byte of it: a user cannot
 * type a header. The same holds for other added tokens that the template writes around messages. A template has the variables
 * that `transformers` gives it; tools and documents are none.
 *
 * A model without a template gets LLAMA3_CHAT_TEMPLATE if its tokenizer has the tokens; it is executed as well.
 *
 * Elsewhere: reading messages (conversation.h), talking (run/jobs/chat.h), what is trained of them (dev/data/answers.h).
 */
#ifndef LLMC_CHAT_H
#define LLMC_CHAT_H

#include "llmc/base/utils.h"  // first, since it asks for the functions beyond C11

#include "llmc/files/json.h"           // defines: json_parse, json_get, json_string
#include "llmc/text/conversation.h"    // defines: ChatMessage, ChatMessages
#include "llmc/text/template.h"        // defines: Template, TemplateRendered, template_parse, template_render
#include "llmc/text/template_value.h"  // defines: TemplateArena, TemplateValue, template_dict_set, template_string
#include "llmc/text/text_rules.h"      // defines: TextRules
#include "llmc/text/tokenizer.h"       // defines: Tokenizer, TokenEncoder, TokenList, tokenizer_find, encoder_marked

#include <ctype.h>
#include <time.h>

#define LLAMA3_CHAT_TEMPLATE                                                                                    \
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n" \
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"                                                     \
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"

/* Returns whether a tokenizer has the tokens that LLAMA3_CHAT_TEMPLATE names, and no text can hold them. */
static inline bool chat_template_fits(const Tokenizer* t) {
    static const char* const names[] = {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"};
    bool fits = true;
    for (int i = 0; i < 3 && fits; i++) {
        const int id = tokenizer_find(t, names[i]);
        fits = id >= 0 && (t->flags[id] & TOKEN_SPECIAL);
    }
    return fits;
}

/* Returns the template of a model: its own, or Llama 3's if it has none and its tokenizer has the tokens; NULL: it has none. */
static inline const char* chat_template(const TextRules* r) {
    const bool built_in = !r->template_path[0] && r->tokenizer && chat_template_fits(r->tokenizer);
    return r->chat_template ? r->chat_template : built_in ? LLAMA3_CHAT_TEMPLATE : NULL;
}

/* The form of a model's conversations. Constant once it is open: threads may share it. */
typedef struct {
    const TextRules* rules;
    Template parsed;
    const char* date;  // as --date gives it; NULL: none
    struct tm now;     // the day, when the form was opened or as --date says
    int end_of_turn;   // token that ends an answer; -1: none
    uint8_t* control;  // (vocab_size) 1: an added token that is not special, but that the template writes around messages
    TemplateArena arena;
    TemplateValue names;  // of the special tokens: bos_token, eos_token ...
} ChatForm;

/* What one thread needs to write conversations. */
typedef struct {
    const ChatForm* form;
    TokenEncoder* encoder;  // borrowed; its `out` gets the tokens
    TemplateArena values, work;
    TemplateValue messages;     // of the conversation that is being written
    char* text;                 // the whole conversation
    uint8_t* ours;              // for each byte 1 if the template wrote it
    size_t len, cap, ours_cap;  // bytes
} ChatWriter;

/* `encoder` is one for the form's tokenizer. */
static inline void chat_writer_init(ChatWriter* w, const ChatForm* form, TokenEncoder* encoder) {
    memset(w, 0, sizeof *w);
    w->form = form;
    w->encoder = encoder;
}

static inline void chat_writer_free(ChatWriter* w) {
    template_arena_free(&w->values);
    template_arena_free(&w->work);
    free(w->text);
    free(w->ours);
    memset(w, 0, sizeof *w);
}

// ---------------------------------------------------------------------------------------------------------------------
// rendering

/* Makes a message: its members that are not null, with role and content under the names that templates know. The thoughts
 * have three names in templates, of which a file has one. */
static inline TemplateValue chat_message_value(TemplateArena* a, const Json* j, const ChatMessage* message) {
    static const char* const thoughts[] = {"reasoning_content", "thinking", "reasoning", NULL};
    const JsonNode* object = message->object;
    const TemplateValue v = template_dict(a), content = template_string(a, message->text, message->len, false);
    // a role is one of ours: so a header that is made of it is the template's
    const TemplateValue role = template_string(a, message->role, strlen(message->role), true);
    if (!object) {
        template_dict_set(a, v, "role", role);
        template_dict_set(a, v, "content", content);
        return v;
    }
    const char* thought = chat_name(j, object, thoughts);
    const TemplateValue value = thought ? template_from_json(a, j, json_get(j, object, thought)) : content;
    if (thought) { template_dict_set(a, v, "thinking", value); }  // in this order, which tojson shows
    const char *role_name = chat_name(j, object, chat_role_names), *text_name = chat_name(j, object, chat_text_names);
    for (const JsonNode* n = json_first(j, object); n; n = json_next(j, n)) {
        const char* key = json_key(j, n, NULL);
        if (n->type == JSON_NULL) { continue; }
        if (strcmp(key, role_name) == 0) {
            template_dict_set(a, v, "role", role);
        } else if (strcmp(key, text_name) == 0) {
            template_dict_set(a, v, "content", content);
        } else {
            template_dict_set(a, v, key, template_from_json(a, j, n));
        }
    }
    if (thought) { template_dict_set(a, v, "reasoning_content", value); }
    return v;
}

/* Makes the values of a conversation. *m must live as long as they are used. */
static inline void chat_begin(ChatWriter* w, const ChatMessages* m) {
    template_arena_reset(&w->values);
    w->messages = template_list(&w->values);
    for (size_t i = 0; i < m->count; i++) {
        template_list_add(&w->values, w->messages, chat_message_value(&w->values, m->json, &m->items[i]));
    }
}

/* Renders the first `count` messages; `ask`: and the request for an answer. The result is valid until the next call. */
static inline bool chat_render(ChatWriter* w, size_t count, bool ask, TemplateRendered* out, Error* e) {
    const ChatForm* f = w->form;
    TemplateArena* a = &w->work;
    template_arena_reset(a);
    const TemplateValue variables = template_dict(a), messages = template_list(a);
    for (size_t i = 0; i < count; i++) { template_list_add(a, messages, w->messages.as.list->items[i]); }
    template_dict_set(a, variables, "messages", messages);
    template_dict_set(a, variables, "tools", template_none());
    template_dict_set(a, variables, "documents", template_none());
    template_dict_set(a, variables, "add_generation_prompt", template_bool(ask));
    if (f->date) { template_dict_set(a, variables, "date_string", template_string(a, f->date, strlen(f->date), true)); }
    for (size_t i = 0; i < f->names.as.dict->count; i++) {
        template_dict_add(a, variables, f->names.as.dict->items[i].key, f->names.as.dict->items[i].value);
    }
    return template_render(&f->parsed, a, variables, &f->now, out, e);
}

/* Returns the byte of the text where a token ends that begins at `at`. A byte that the tokenizer lacks is in no token. */
static inline size_t chat_token_end(const ChatWriter* w, int32_t id, size_t at) {
    size_t len = 0;
    const char* bytes = tokenizer_token(w->encoder->t, id, &len);
    for (size_t i = 0; i < len && at < w->len; i++) {
        while (at < w->len && w->text[at] != bytes[i]) { at++; }
        at += at < w->len;
    }
    return at;
}

/* Appends the tokens of a rendering to w->encoder->out. Fails on a token that the model lacks. */
static inline bool chat_encode(ChatWriter* w, const char* text, const uint8_t* ours, size_t len, Error* e) {
    const int V = w->form->rules->vocab_size;
    const TokenList* out = &w->encoder->out;
    const size_t before = out->count;
    encoder_marked(w->encoder, text, ours, len, w->form->control);
    for (size_t i = before; i < out->count; i++) {
        if (out->ids[i] >= V) {
            return fail(e, "the conversation has the token %d, but the model's vocabulary has only %d", out->ids[i], V);
        }
    }
    return true;
}

/* Sets w->encoder->out to the tokens of the messages and of the request for an answer. */
static inline bool chat_ask(ChatWriter* w, const ChatMessages* m, Error* e) {
    TemplateRendered asked;
    chat_begin(w, m);
    w->encoder->out.count = 0;
    return chat_render(w, m->count, true, &asked, e) && chat_encode(w, asked.text, asked.from_template, asked.len, e);
}

/* Keeps a rendering as the whole conversation. */
static inline void chat_keep(ChatWriter* w, const TemplateRendered* r) {
    w->text = (char*)xreserve(w->text, 0, r->len + 1, &w->cap, 1);
    w->ours = (uint8_t*)xreserve(w->ours, 0, r->len + 1, &w->ours_cap, 1);
    if (r->len) {
        memcpy(w->text, r->text, r->len);
        memcpy(w->ours, r->from_template, r->len);
    }
    w->len = r->len;
}

// ---------------------------------------------------------------------------------------------------------------------
// opening

/* Reads the names of the special tokens that the folder gives. Llama 3's form of a folder without a template has BOS and EOS in
 * any case. */
static inline void chat_read_names(ChatForm* f) {
    static const char* const keys[] = {"bos_token", "eos_token", "pad_token", "unk_token",
                                       "sep_token", "cls_token", "mask_token"};
    const Tokenizer* t = f->rules->tokenizer;
    const char* names[7] = {t->bos_name, t->eos_name, t->pad_name};
    const int ids[] = {t->bos_id, t->eos_id};
    Json j;
    Error ignored = NO_ERROR;  // the text was parsed when it was read
    const bool parsed = t->config && json_parse(&j, xstrdup(t->config), strlen(t->config), "tokenizer_config.json", &ignored);
    f->names = template_dict(&f->arena);
    for (int i = 0; i < 7; i++) {
        const JsonNode* n = parsed && i > 2 ? json_get(&j, json_root(&j), keys[i]) : NULL;
        size_t len = names[i] ? strlen(names[i]) : 0;
        const char* name = n ? json_string(&j, n->type == JSON_OBJECT ? json_get(&j, n, "content") : n, &len) : names[i];
        if (!name && !f->rules->chat_template && i < 2 && ids[i] >= 0) { name = tokenizer_token(t, ids[i], &len); }
        if (!name) { continue; }
        char* copy = (char*)memcpy(template_alloc(&f->arena, len), name, len);
        template_dict_set(&f->arena, f->names, keys[i], template_string(&f->arena, copy, len, true));
    }
    if (parsed) { json_free(&j); }
}

/* Finds the control tokens in a conversation whose last messages are a question and its answer, and which has none of its own:
 * form->control, and form->end_of_turn after the answer. Some tokenizers call none of them special. Words and blanks are no
 * control tokens. Nor is what the template writes between the header of an answer and its text, as an empty <think></think>: an
 * answer may hold it, too. Returns false if the template refuses the conversation. */
static inline bool chat_find_control(ChatWriter* w, const ChatMessages* m, ChatForm* form) {
    const Tokenizer* t = w->encoder->t;
    TemplateRendered r;
    Error ignored = NO_ERROR;
    size_t asked = 0, answer = 0, tail = 0, at = 0, len;  // where the question ends, the answer begins and ends
    bool header = false;                                  // the answer has got one
    chat_begin(w, m);
    if (!chat_render(w, m->count, false, &r, &ignored)) { return false; }
    chat_keep(w, &r);
    for (size_t i = 0; i < r.len; i++) {
        if (w->ours[i]) { continue; }
        if (i > tail) { asked = tail, answer = i; }
        tail = i + 1;
    }
    w->encoder->out.count = 0;
    if (!chat_encode(w, w->text, w->ours, w->len, &ignored)) { return false; }
    const TokenList* out = &w->encoder->out;
    for (int pass = 0; pass < 2; pass++, at = 0) {  // the second has the end of a turn
        for (size_t i = 0; i < out->count; i++) {
            const int32_t id = out->ids[i];
            const uint8_t first = (uint8_t)*tokenizer_token(t, id, &len);
            const bool special = t->flags[id] & TOKEN_SPECIAL, added = t->flags[id] & TOKEN_ADDED;
            const bool control = !special && added && first > ' ' && !isalnum(first), inside = at >= asked && at < answer;
            const bool heads = pass == 1 && inside && added && id != form->end_of_turn && !header;
            header |= heads;
            form->control[id] |= control && (!inside || heads);
            if (form->end_of_turn < 0 && at >= tail && (special || control)) { form->end_of_turn = id; }
            at = chat_token_end(w, id, at);
        }
    }
    return true;
}

/* Checks that the template can ask, and finds its control tokens. */
static inline bool chat_probe(ChatForm* f, Error* e) {
    ChatMessage items[] = {{NULL, "system", (char*)"Be", 2, false},
                           {NULL, "user", (char*)"Hi", 2, false},
                           {NULL, "assistant", (char*)"Hello", 5, false}};
    ChatMessages all = {items, 3, 3, NULL}, m = {items + 1, 1, 2, NULL};
    TokenEncoder encoder;
    ChatWriter w;
    encoder_init(&encoder, f->rules->tokenizer);
    chat_writer_init(&w, f, &encoder);
    const bool ok = chat_ask(&w, &m, e);
    m.count = 2;
    if (ok && !chat_find_control(&w, &all, f)) { chat_find_control(&w, &m, f); }
    chat_writer_free(&w);
    encoder_free(&encoder);
    return ok;
}

/* Reads --date (or NULL): the template writes it as date_string, or asks for the day in a form of its own. */
static inline bool chat_read_date(ChatForm* f, const char* text, const char* date, Error* e) {
    static const char* const forms[] = {"%d %b %Y", "%Y-%m-%d", "%b %d, %Y"};  // %b also reads whole names
    const time_t now = time(NULL);
    bool read = false;
    localtime_r(&now, &f->now);
    f->date = date;
    if (!date) { return true; }
    for (int i = 0; i < 3 && !read; i++) {
        struct tm day = f->now;
        const char* rest = strptime(date, forms[i], &day);
        read = rest && !*rest;
        if (read) { mktime(&day), f->now = day; }  // finds the day of the week
    }
    if (strstr(text, "date_string")) { return true; }
    if (!strstr(text, "strftime_now")) { return fail(e, "--date: the chat template has no date, wanted none"); }
    return read ||
           fail(e, "--date: is \"%.40s\", wanted a day such as \"26 Jul 2024\", since the chat template asks for its parts",
                date);
}

static inline void chat_form_close(ChatForm* f) {
    template_free(&f->parsed);
    template_arena_free(&f->arena);
    free(f->control);
    memset(f, 0, sizeof *f);
}

/* Opens the form of a model's conversations. `date`: what a template writes as today's date, instead of the day on which it
 * runs; NULL: not given. Close it with chat_form_close(), also after an error. */
static inline bool chat_form_open(ChatForm* f, const TextRules* r, const char* date, Error* e) {
    static const char built_in[] = "the template of Llama 3";
    const char* text = chat_template(r);
    memset(f, 0, sizeof *f);
    f->rules = r;
    f->end_of_turn = -1;
    if (!r->tokenizer) { return fail(e, "the model has no tokenizer, wanted one with a chat template"); }
    if (!text) {
        return fail(
            e,
            "%s has no chat template, wanted chat_template.jinja or the member chat_template of tokenizer_config.json "
            "beside the tokenizer\n"
            "  hint: models made for chats have one; another gets it by a file chat_template.jinja, and a new model by a "
            "tokenizer of ./tokenize --train-bpe N --chat",
            r->tokenizer->path ? r->tokenizer->path : "the model");
    }
    f->control = (uint8_t*)xcalloc((size_t)r->tokenizer->vocab_size, 1);
    chat_read_names(f);
    return template_parse(&f->parsed, text, strlen(text), r->chat_template ? r->template_path : built_in, e) &&
           chat_read_date(f, text, date, e) && chat_probe(f, e);
}

#endif
