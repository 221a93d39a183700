/* question.h -- the tokens of what a model is asked: the prompt of --prompt and --generate, and a question from JSON, for
 * --answer (run/jobs/answer.h):
 *
 *   {"prompt": "Once upon", "temperature": 0.5, "top_k": 40, "top_p": 0.9, "seed": 7, "max_tokens": 100}
 *   {"messages": [{"role": "user", "content": "Hi"}]}
 *
 * A prompt gets the tokens that --generate gives it, and messages the tokens of --chat, in the spellings of a list there
 * (conversation.h). Other members are ignored.
 */
#ifndef LLMC_QUESTION_H
#define LLMC_QUESTION_H

#include "llmc/base/utils.h"         // first, since it asks for the functions beyond C11
#include "llmc/files/json.h"         // defines: json_get, json_text, json_double_or, json_int_or, json_wanted
#include "llmc/text/chat.h"          // defines: ChatForm, ChatWriter, chat_form_open, chat_ask
#include "llmc/text/conversation.h"  // defines: ChatMessages, chat_read_list
#include "llmc/text/text_rules.h"    // defines: TextRules
#include "llmc/text/tokenizer.h"     // defines: TokenList, tokenizer_encode
#include <limits.h>

/* Appends the tokens of a prompt to *l: those that stand before a text, and the text, where names of special tokens are tokens.
 * Without a tokenizer the text is a list of ids. An empty *l gets BOS, or token 0. Fails on an id outside the vocabulary. */
static inline bool prompt_tokens(TokenList* l, const char* text, const TextRules* r, Error* e) {
    const int V = r->vocab_size;
    for (int i = 0; i < r->num_start; i++) { token_list_add(l, r->start_ids[i]); }
    if (r->tokenizer) {
        tokenizer_encode(r->tokenizer, text, strlen(text), true, l);
    } else {
        for (const char* p = text + strspn(text, " "); *p; p += strspn(p, " ")) {
            char* end = NULL;
            long id = *p >= '0' && *p <= '9' ? strtol(p, &end, 10) : -1;
            if (id < 0 || id >= V || (*end && *end != ' ')) {
                return fail(e,
                            "the prompt is \"%.100s\", wanted ids from 0 to %d, since the model has no tokenizer\n"
                            "  hint: give one with --tokenizer",
                            text, V - 1);
            }
            token_list_add(l, (int32_t)id);
            p = end;
        }
    }
    if (l->count == 0) { token_list_add(l, r->bos_id >= 0 ? r->bos_id : 0); }
    return text_rules_hold(r, l->ids, l->count, e);
}

// ---------------------------------------------------------------------------------------------------------------------
// a question

typedef struct {
    double temperature, top_p;
    double drawing;  // the temperature of a question that has top_k or top_p, but none itself
    int64_t top_k, seed, max_tokens;
    TokenList tokens;
    bool chats;  // it has messages: the end of a turn ends the answer
} Question;

/* The model that is asked. */
typedef struct {
    const TextRules* rules;
    ChatForm form;
    TokenEncoder encoder;
    ChatWriter writer;
    Error no_chat;  // why it takes no messages; empty: it does
} Asked;

/* Opens the form of the model's messages; `date`: see chat_form_open(). Close with question_end(). */
static inline void question_begin(Asked* a, const TextRules* r, const char* date) {
    memset(a, 0, sizeof *a);
    a->rules = r;
    if (!chat_form_open(&a->form, r, date, &a->no_chat)) { return; }
    encoder_init(&a->encoder, r->tokenizer);
    chat_writer_init(&a->writer, &a->form, &a->encoder);
}

static inline void question_end(Asked* a) {
    chat_writer_free(&a->writer);
    encoder_free(&a->encoder);
    chat_form_close(&a->form);
}

/* Reads how to answer. A member that is missing leaves its value as it is. */
static inline bool question_read_sampling(Question* q, const Json* j, Error* e) {
    const JsonNode* root = json_root(j);
    if (json_get(j, root, "top_k") || json_get(j, root, "top_p")) { q->temperature = q->drawing; }
    return json_double_or(j, root, "temperature", 0, 100, &q->temperature, e) &&
           json_double_or(j, root, "top_p", 0, 1, &q->top_p, e) && json_int_or(j, root, "top_k", 0, INT_MAX, &q->top_k, e) &&
           json_int_or(j, root, "seed", 0, INT64_MAX, &q->seed, e) &&
           json_int_or(j, root, "max_tokens", 1, INT_MAX, &q->max_tokens, e);
}

/* Appends the tokens of the question's messages and of the request for an answer. */
static inline bool question_read_messages(Question* q, const Json* j, Asked* a, Error* e) {
    static const char* const refused[] = {"tools", "functions", "documents", NULL};
    const JsonNode* list = json_get(j, json_root(j), "messages");
    ChatMessages m = {NULL, 0, 0, j};
    const bool ok = chat_check_absent(j, json_root(j), refused, e) &&
                    (list->type == JSON_ARRAY || json_wanted(j, json_root(j), "messages", e, "an array")) &&
                    chat_read_list(&m, list, true, e) &&
                    (m.count > 0 || json_wanted(j, json_root(j), "messages", e, "a message in it")) &&
                    chat_ask(&a->writer, &m, e);
    for (size_t i = 0; ok && i < a->encoder.out.count; i++) { token_list_add(&q->tokens, a->encoder.out.ids[i]); }
    chat_messages_free(&m);
    return ok;
}

/* Reads a question. *q holds what counts where the question is silent, and no tokens. The caller frees the tokens, also after
 * an error. */
static inline bool question_read(Question* q, const Json* j, Asked* a, Error* e) {
    const JsonNode* root = json_root(j);
    const char* prompt = NULL;
    q->chats = json_get(j, root, "messages") != NULL;
    if (q->chats == (json_get(j, root, "prompt") != NULL)) {
        return fail(e, "%s: has %s, wanted one of them", j->path, q->chats ? "prompt and messages" : "no prompt or messages");
    }
    if (!question_read_sampling(q, j, e)) { return false; }
    if (!q->chats) { return json_text(j, root, "prompt", &prompt, e) && prompt_tokens(&q->tokens, prompt, a->rules, e); }
    if (a->no_chat.msg[0]) {
        return fail(e, "%s: messages: %.*s", j->path, (int)strcspn(a->no_chat.msg, "\n"), a->no_chat.msg);
    }
    return question_read_messages(q, j, a, e);
}

/* Returns whether a line, of `len` bytes with its newline, is {"stop": true}, which is no question. */
static inline bool question_is_stop(const char* line, size_t len) {
    Json j;
    Error not_json = NO_ERROR;
    if (!json_parse_line(&j, line, len - 1, "question", &not_json)) { return false; }
    const JsonNode* stop = json_get(&j, json_root(&j), "stop");
    const bool is = stop && stop->type == JSON_TRUE;
    json_free(&j);
    return is;
}

#endif
