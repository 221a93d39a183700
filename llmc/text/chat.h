/* chat.h -- writes Llama 3's chat format, as tokens and as a template for `transformers`.
 *
 *   <|begin_of_text|> then for each message <|start_header_id|>ROLE<|end_header_id|>\n\nTEXT<|eot_id|>
 *
 * TEXT is stripped of white space at both ends. An answer follows the header of "assistant" and ends at <|eot_id|>. Special
 * tokens are looked up by name; texts are encoded as plain text, so a user cannot type a header. generate.h holds the
 * conversation.
 */
#ifndef LLMC_CHAT_H
#define LLMC_CHAT_H

#include "llmc/base/utils.h"      // defines: fail
#include "llmc/text/tokenizer.h"  // defines: Tokenizer, TokenList, tokenizer_find, tokenizer_encode

#define LLAMA3_CHAT_TEMPLATE                                                                                    \
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n" \
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"                                                     \
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"

typedef struct {
    int begin, start_header, end_header, eot;
} ChatTokens;

/* Finds the format's tokens in a tokenizer (or NULL) and checks that the model's vocabulary has them; fails with the name of
 * the first one missing. */
static inline bool chat_tokens(ChatTokens* c, const Tokenizer* t, int vocab_size, Error* e) {
    static const char* const names[] = {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"};
    int* ids[] = {&c->begin, &c->start_header, &c->end_header, &c->eot};
    if (!t) { return fail(e, "--chat: the model has no tokenizer, wanted one with Llama 3's chat tokens"); }
    for (int i = 0; i < 4; i++) {
        *ids[i] = tokenizer_find(t, names[i]);
        if (*ids[i] < 0) { return fail(e, "--chat: the tokenizer has no token %s, wanted Llama 3's chat tokens", names[i]); }
        if (*ids[i] >= vocab_size) {
            return fail(e, "--chat: %s is token %d, but the model's vocabulary has only %d", names[i], *ids[i], vocab_size);
        }
    }
    return true;
}

/* Tells whether a tokenizer has the tokens that LLAMA3_CHAT_TEMPLATE names. */
static inline bool chat_template_fits(const Tokenizer* t) {
    return tokenizer_find(t, "<|start_header_id|>") >= 0 && tokenizer_find(t, "<|end_header_id|>") >= 0 &&
           tokenizer_find(t, "<|eot_id|>") >= 0;
}

/* Appends the header of a message. */
static inline void chat_header(TokenList* l, const ChatTokens* c, const Tokenizer* t, const char* role) {
    token_list_add(l, c->start_header);
    tokenizer_encode(t, role, strlen(role), false, l);
    token_list_add(l, c->end_header);
    tokenizer_encode(t, "\n\n", 2, false, l);
}

/* Appends a whole message: header, stripped text, <|eot_id|>. */
static inline void chat_message(TokenList* l, const ChatTokens* c, const Tokenizer* t, const char* role, const char* text) {
    static const char space[] = " \t\r\n\v\f";
    text += strspn(text, space);
    size_t len = strlen(text);
    while (len > 0 && strchr(space, text[len - 1])) { len--; }
    chat_header(l, c, t, role);
    tokenizer_encode(t, text, len, false, l);
    token_list_add(l, c->eot);
}

#endif
