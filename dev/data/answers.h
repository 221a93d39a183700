/* answers.h -- reads a conversation to train on from a line of ./tokenize --chat, and marks which of its tokens are trained:
 *
 *   {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
 *   {"system": "Be brief.", "prompt": "Hi", "completion": "Hello."}
 *
 * A prompt and a completion may also be lists of messages, as in trl; then the completion alone is trained. A line may be the
 * list itself. Messages and the names of their members: conversation.h.
 *
 * What is trained of a conversation are its answers. An answer is what the template adds between
 *     the messages before it, and the request for an answer
 *     the same messages and the answer
 * or, if the template marks answers itself ({% generation %}), what stands between its marks. The first must begin the second,
 * and both must begin the whole: otherwise the model would be trained on another text than it is asked with. A template that
 * hides the thoughts of earlier answers changes them: then only the answers that it leaves unchanged are trained, usually the
 * last. A token that stands partly in an answer belongs to it.
 */
#ifndef DATA_ANSWERS_H
#define DATA_ANSWERS_H

#include "llmc/base/utils.h"  // first, since it asks for the functions beyond C11

#include "llmc/base/text.h"          // defines: show_text
#include "llmc/files/json.h"         // defines: Json, json_get, json_first, json_wanted, json_is_off
#include "llmc/text/chat.h"          // defines: ChatWriter, chat_begin, chat_render, chat_keep, chat_encode, chat_token_end
#include "llmc/text/conversation.h"  // defines: ChatMessages, chat_name, chat_read_list, chat_read_text, chat_is_answer
#include "llmc/text/template.h"      // defines: TemplateRendered

// ---------------------------------------------------------------------------------------------------------------------
// reading

static const char* const chat_list_names[] = {"messages", "conversations", "conversation", "chat", "turns", "dialogue", NULL};
static const char* const chat_question_names[] = {"prompt", "instruction", "question", "query", NULL};
static const char* const chat_input_names[] = {"input", "context", NULL};
static const char* const chat_answer_names[] = {"completion", "response", "output", "answer", NULL};
static const char* const chat_system_names[] = {"system", "system_prompt", NULL};

/* Sets *name to the only one of the names that an object has, NULL for none. Fails if it has two. */
static inline bool chat_one_name(const char** name, const Json* j, const JsonNode* object, const char* const* names, Error* e) {
    *name = chat_name(j, object, names);
    while (*name && *names++ != *name) {}
    const char* other = *name ? chat_name(j, object, names) : NULL;
    return !other || json_wanted(j, object, other, e, "none beside %s: which of them counts is not known", *name);
}

/* Reads a member of the root: a list of messages, or the text of one; `more`: see chat_read_text(). */
static inline bool chat_read_side(ChatMessages* m, const char* key, const char* more, const char* role, bool trained,
                                  Error* e) {
    const Json* j = m->json;
    const JsonNode* n = json_get(j, json_root(j), key);
    const JsonNode* first = n && n->type == JSON_ARRAY ? json_first(j, n) : NULL;
    if (first && !json_get(j, first, "type")) { return chat_read_list(m, n, trained, e); }
    return chat_read_text(m, json_root(j), key, more, role, trained, e);
}

/* Reads a question and its answer, which the root has as members. */
static inline bool chat_read_pair(ChatMessages* m, Error* e) {
    const Json* j = m->json;
    const JsonNode* root = json_root(j);
    const char *question = NULL, *input = NULL, *answer = NULL;
    const JsonNode* label = json_get(j, root, "label");
    if (!chat_one_name(&question, j, root, chat_question_names, e) || !chat_one_name(&answer, j, root, chat_answer_names, e) ||
        !chat_one_name(&input, j, root, chat_input_names, e)) {
        return false;
    }
    if (label && label->type == JSON_FALSE) { return json_wanted(j, root, "label", e, "true: it marks an answer to avoid"); }
    if (!question && answer && json_get(j, root, "input")) { question = "input", input = NULL; }
    if (!question) { return json_wanted(j, root, "messages", e, "it or another list, or a prompt and a completion"); }
    if (!answer) { return json_wanted(j, root, "completion", e, "it beside %s, or response, output or answer", question); }
    return chat_read_side(m, question, input, "user", false, e) && chat_read_side(m, answer, NULL, "assistant", true, e);
}

/* Reads what the root has: a system message, and a list of messages or a pair. */
static inline bool chat_read_root(ChatMessages* m, Error* e) {
    static const char* const refused[] = {"tools",
                                          "functions",
                                          "documents",
                                          "images",
                                          "image",
                                          "video",
                                          "videos",
                                          "audio",
                                          "audios",
                                          "loss_scale",
                                          "chat_template_kwargs",
                                          "history",
                                          NULL};
    const Json* j = m->json;
    const JsonNode* root = json_root(j);
    const char *name = chat_name(j, root, chat_list_names), *system = NULL;
    const JsonNode* list = name ? json_get(j, root, name) : root;
    if (root->type == JSON_ARRAY) { return chat_read_list(m, root, true, e); }
    if (root->type != JSON_OBJECT) { return fail(e, "%s: the line is not an object, wanted {\"messages\": [...]}", j->path); }
    if (!chat_check_absent(j, root, refused, e) || !chat_one_name(&system, j, root, chat_system_names, e)) { return false; }
    if (system && !json_is_off(j, root, system) && !chat_read_text(m, root, system, NULL, "system", false, e)) { return false; }
    const size_t before = m->count;
    if (name && list->type != JSON_ARRAY) { return json_wanted(j, root, name, e, "an array"); }
    if (!(name ? chat_read_list(m, list, true, e) : chat_read_pair(m, e))) { return false; }
    return !before || m->count == before || strcmp(m->items[before].role, "system") != 0 ||
           json_wanted(j, root, system, e, "none: the messages begin with a system message");
}

/* Reads a conversation to train on from a line, into *m, which is empty. Errors begin with the Json's path: file and line. */
static inline bool chat_read(ChatMessages* m, const Json* j, Error* e) {
    m->json = j;
    if (!chat_read_root(m, e)) { return false; }
    size_t answers = 0, trained = 0;
    for (size_t i = 0; i < m->count; i++) {
        answers += chat_is_answer(&m->items[i]);
        trained += m->items[i].trained;
    }
    if (trained > 0) { return true; }
    if (answers > 0) {
        return fail(e, "%s: no answer is trained: members such as \"weight\": 0 take them out, or they stand in the prompt",
                    j->path);
    }
    return fail(e, "%s: no message is of the assistant, wanted one: nothing would be trained", j->path);
}

// ---------------------------------------------------------------------------------------------------------------------
// what is trained

enum { TOKEN_IS_TRAINED = 1, TOKEN_STARTS = 2 };  // marks of a token of a conversation

/* The marks of a list of tokens. All zeros is an empty list. */
typedef struct {
    uint8_t* marks;
    size_t count, cap;
} ChatMask;

/* What a thread needs to write conversations to train on. All zeros but for `chat`, which chat_writer_init() sets, is ready. */
typedef struct {
    ChatWriter chat;
    size_t (*spans)[2];  // [start, end) of each trained answer in chat.text
    size_t num_spans, span_cap;
    Error why;  // why an answer of the conversation cannot be trained
} AnswerWriter;

static inline void answer_writer_free(AnswerWriter* a) {
    chat_writer_free(&a->chat);
    free(a->spans);
    memset(a, 0, sizeof *a);
}

static inline bool chat_begins(const ChatWriter* w, const TemplateRendered* r) {
    return r->len == 0 || (r->len <= w->len && memcmp(w->text, r->text, r->len) == 0);
}

static inline void chat_add_span(AnswerWriter* a, size_t start, size_t end) {
    a->spans = (size_t(*)[2])xgrow(a->spans, a->num_spans, &a->span_cap, sizeof *a->spans);
    a->spans[a->num_spans][0] = start;
    a->spans[a->num_spans++][1] = end;
}

/* Finds the start of an answer that no question precedes: a template may refuse to ask for it. The rendering of `end` bytes has
 * the request all the same. The answer starts after the last one. Returns `end` if there is none. */
static inline size_t chat_find_request(ChatWriter* w, size_t count, size_t end) {
    TemplateRendered both;
    Error ignored = NO_ERROR;
    if (!chat_render(w, count, true, &both, &ignored) || both.len <= end || memcmp(both.text, w->text, end) != 0) {
        return end;
    }
    const size_t len = both.len - end;  // of the request
    for (size_t at = end; at >= len; at--) {
        const size_t from = at - len;
        if (memcmp(w->text + from, both.text + end, len) == 0 && !memchr(w->ours + from, 0, len)) { return at; }
    }
    return end;
}

/* Says that an answer is asked for in another way than it is written: shows both from the first different byte on. */
static inline void chat_tell_difference(AnswerWriter* a, const TemplateRendered* asked) {
    const ChatWriter* w = &a->chat;
    char request[48], written[48];
    size_t at = 0;
    while (at < asked->len && at < w->len && asked->text[at] == w->text[at]) { at++; }
    fail(&a->why, "the chat template asks for an answer with \"%s\", but then writes \"%s\"",
         show_text(request, sizeof request, asked->text + at, asked->len - at),
         show_text(written, sizeof written, w->text + at, w->len - at));
}

/* Returns where the turn of the last message ends in a rendering. Its text begins at `start` or later. The turn ends after the
 * first end_of_turn that follows this text, or at the end. */
static inline size_t chat_turn_end(const ChatWriter* w, const TemplateRendered* r, size_t start) {
    const int id = w->form->end_of_turn;
    size_t len = 0, text = start;
    const char* name = id >= 0 ? tokenizer_token(w->encoder->t, id, &len) : NULL;
    for (size_t i = start; i < r->len; i++) { text = r->from_template[i] ? text : i + 1; }
    for (size_t at = text; name && at + len <= r->len; at++) {
        if (memcmp(r->text + at, name, len) == 0) { return at + len; }
    }
    return r->len;
}

/* Adds the span of answer i, unless the whole conversation shows it otherwise. Some templates write more after the last turn
 * than after the others: EOS, or a request for an answer though nobody asks. It is no part of the answer. */
static inline bool chat_find_answer(AnswerWriter* a, const ChatMessages* m, size_t i, Error* e) {
    ChatWriter* w = &a->chat;
    TemplateRendered r;
    Error asking = NO_ERROR, ignored = NO_ERROR;
    bool first = true;  // nobody asked before
    for (size_t k = 0; k < i; k++) { first = first && strcmp(m->items[k].role, "system") == 0; }
    const bool asked = chat_render(w, i, true, &r, &asking), begins = asked && chat_begins(w, &r);
    if (!asked && !first) { return fail(e, "%s", asking.msg); }
    if (asked && !begins) { chat_tell_difference(a, &r); }
    size_t start = begins ? r.len : 0, end = w->len;
    if (i + 1 < m->count) {
        if (!chat_render(w, i + 1, false, &r, e)) { return false; }
        if (!chat_begins(w, &r)) { r.len = chat_turn_end(w, &r, start); }
        if (!chat_begins(w, &r)) { return fail(&a->why, "the chat template changes an answer when a message follows") || true; }
        end = r.len;
    } else if (chat_render(w, i + 1, true, &r, &ignored) && r.len == w->len && chat_begins(w, &r)) {
        end = chat_turn_end(w, &r, start);
    }
    if (!begins) { start = first ? chat_find_request(w, i + 1, end) : end; }
    if (start < end) { chat_add_span(a, start, end); }
    return true;
}

/* Finds the spans of the answers that are trained, in the order of the text. *left_out counts those that have none. */
static inline bool chat_find_answers(AnswerWriter* a, const ChatMessages* m, const TemplateRendered* whole, size_t* left_out,
                                     Error* e) {
    size_t answers = 0, trained = 0;
    a->num_spans = 0;
    a->why.msg[0] = 0;
    for (size_t i = 0; i < m->count; i++) { answers += chat_is_answer(&m->items[i]), trained += m->items[i].trained; }
    if (whole->num_generations > 0 && whole->num_generations != answers && trained < answers) {
        return fail(e,
                    "the chat template marks %zu texts, but there are %zu answers: which of them is not trained is not known",
                    whole->num_generations, answers);
    }
    for (size_t i = 0, k = 0; whole->num_generations > 0 && k < whole->num_generations; k++) {
        while (trained < answers && !chat_is_answer(&m->items[i])) { i++; }
        if (trained == answers || m->items[i++].trained) {
            chat_add_span(a, whole->generations[k].from, whole->generations[k].to);
        }
    }
    if (whole->num_generations > 0) { return true; }
    for (size_t i = 0; i < m->count; i++) {
        if (m->items[i].trained && !chat_find_answer(a, m, i, e)) { return false; }
    }
    *left_out += a->num_spans > 0 ? trained - a->num_spans : 0;
    if (a->num_spans > 0) { return true; }
    return fail(e, "no answer can be trained: %s",
                a->why.msg[0] ? a->why.msg : "the chat template writes nothing for an answer");
}

/* Appends the tokens of a conversation to the encoder's `out` and their marks to *mask. *left_out grows by the answers that
 * would be trained if the template did not change them. */
static inline bool chat_write(AnswerWriter* a, ChatMask* mask, const ChatMessages* m, size_t* left_out, Error* e) {
    ChatWriter* w = &a->chat;
    const TokenList* out = &w->encoder->out;
    const size_t first = out->count;
    TemplateRendered whole;
    chat_begin(w, m);
    if (!chat_render(w, m->count, false, &whole, e)) { return false; }
    chat_keep(w, &whole);
    if (!chat_find_answers(a, m, &whole, left_out, e) || !chat_encode(w, w->text, w->ours, w->len, e)) { return false; }
    size_t k = 0, at = 0;
    for (size_t i = first, end; i < out->count; i++, at = end) {
        end = chat_token_end(w, out->ids[i], at);
        while (k < a->num_spans && a->spans[k][1] <= at) { k++; }
        const bool trained = k < a->num_spans && a->spans[k][0] < end;
        mask->marks = (uint8_t*)xgrow(mask->marks, mask->count, &mask->cap, 1);
        mask->marks[mask->count++] = (uint8_t)(trained * TOKEN_IS_TRAINED + (i == first) * TOKEN_STARTS);
    }
    return out->count > first || fail(e, "the chat template writes nothing");
}

#endif
