/* fuzz_chat_data.c -- reads the bytes as a line of JSON with a conversation; the first byte chooses whether the template marks
 * answers itself. An accepted conversation has an answer to train on. A byte tokenizer and a template that changes no text make
 * its length known: one token a byte of the texts and roles, two for each header's newlines, one a special token. Trained
 * tokens are the answers' texts and their <|eot_id|>. */
#include "fuzz.h"

#include "dev/data/answers.h"
#include "dev/test/byte_tokens.h"

#define HEADER "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
#define ASK "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"

static void check(const ChatMessages* m, const ChatForm* form) {
    const Tokenizer* t = form->rules->tokenizer;
    ChatMask mask = {NULL, 0, 0};
    TokenEncoder encoder;
    AnswerWriter w;
    Error e = NO_ERROR;
    size_t count = 1, trained = 0, answers = 0, left_out = 0;  // as they must be
    memset(&w, 0, sizeof w);
    encoder_init(&encoder, t);
    chat_writer_init(&w.chat, form, &encoder);
    REQUIRE(chat_write(&w, &mask, m, &left_out, &e) && left_out == 0);
    for (size_t i = 0; i < m->count; i++) {
        count += strlen(m->items[i].role) + m->items[i].len + 5;
        trained += m->items[i].trained ? m->items[i].len + 1 : 0;
        answers += m->items[i].trained;
    }
    const TokenList* l = &encoder.out;
    REQUIRE(answers > 0 && l->count == count && mask.count == count && l->ids[0] == t->bos_id);
    for (size_t i = 0; i < count; i++) {
        const bool now = mask.marks[i] & TOKEN_IS_TRAINED;
        const bool ends = now && (i + 1 == count || !(mask.marks[i + 1] & TOKEN_IS_TRAINED));
        REQUIRE(i == 0 || (l->ids[i] != t->bos_id && !(mask.marks[i] & TOKEN_STARTS)));
        REQUIRE(!now || l->ids[i] < 256 || (l->ids[i] == form->end_of_turn && ends));
        trained -= now;
        answers -= ends;
    }
    REQUIRE(trained == 0 && answers == 0);
    answer_writer_free(&w);
    encoder_free(&encoder);
    free(mask.marks);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static Tokenizer t;
    static TextRules rules[2];
    static ChatForm forms[2];
    static char* const templates[] = {
        (char*)"{{ bos_token }}{% for m in messages %}" HEADER "{{ m.content }}<|eot_id|>{% endfor %}" ASK,
        (char*)"{{ bos_token }}{% for m in messages %}" HEADER
               "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|eot_id|>{% endgeneration %}"
               "{% else %}{{ m.content }}<|eot_id|>{% endif %}{% endfor %}" ASK};
    Json j;
    Error e = NO_ERROR;
    if (size < 1) { return 0; }
    for (int i = 0; i < 2 && !forms[i].rules; i++) {
        if (i == 0) { byte_tokens(&t, ""), t.bos_name = xstrdup("<|begin_of_text|>"); }
        text_rules_init(&rules[i], &t, NULL);
        rules[i].chat_template = templates[i];
        must(chat_form_open(&forms[i], &rules[i], NULL, &e), &e);
    }
    char* line = fuzz_text(data + 1, size - 1);
    if (json_parse_line(&j, line, size - 1, "input:1", &e)) {
        ChatMessages m = {NULL, 0, 0, NULL};
        const bool ok = chat_read(&m, &j, &e);
        fuzz_check_error(ok, &e);
        if (ok) { check(&m, &forms[data[0] & 1]); }
        chat_messages_free(&m);
        json_free(&j);
    }
    free(line);
    return 0;
}
