/* fuzz_chat_data.c -- reads the bytes as a line of JSON with a conversation; the first byte chooses the form. An accepted
 * conversation has an answer to train on. A byte tokenizer makes its length known: one token a byte of the stripped texts and
 * roles, two for each header's newlines, one a special token. Trained tokens are the answers' texts and their <|eot_id|>. */
#include "fuzz.h"

#include "llmc/text/conversation.h"
#include "dev/test/byte_tokens.h"

static void check(const ChatMessages* m, const ChatFormat* c, const Tokenizer* t) {
    static const char dates[] = CHAT_CUTOFF "\nToday Date: " CHAT_DATE "\n\n";
    TokenList l = {NULL, 0, 0};
    ChatMask mask = {NULL, 0, 0};
    chat_write(&l, &mask, m, c, t);
    size_t count = 1, trained = 0, answers = 0;  // as they must be
    if (c->date) { count += strlen(dates) + (strcmp(m->items[0].role, "system") == 0 ? 0 : strlen("system") + 5); }
    for (size_t i = 0; i < m->count; i++) {
        size_t len = m->items[i].len;
        const char* text = chat_strip(m->items[i].text, &len);
        REQUIRE(text >= m->items[i].text && text + len <= m->items[i].text + m->items[i].len);
        count += strlen(m->items[i].role) + len + 5;
        trained += m->items[i].trained ? len + 1 : 0;
        answers += m->items[i].trained;
    }
    REQUIRE(answers > 0 && l.count == count && mask.count == count && l.ids[0] == c->begin);
    for (size_t i = 0; i < count; i++) {
        const bool ends = mask.trained[i] && (i + 1 == count || !mask.trained[i + 1]);
        REQUIRE(i == 0 || l.ids[i] != c->begin);
        REQUIRE(mask.trained[i] == 0 || l.ids[i] < 256 || (l.ids[i] == c->eot && ends));
        trained -= mask.trained[i];
        answers -= ends;
    }
    REQUIRE(trained == 0 && answers == 0);
    token_list_free(&l);
    free(mask.trained);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static Tokenizer t;
    static ChatFormat c;
    Json j;
    Error e = NO_ERROR;
    if (size < 1) { return 0; }
    if (!t.vocab_size) {
        byte_tokens(&t, "");
        must(chat_tokens(&c, &t, t.vocab_size, &e), &e);
    }
    c.date = data[0] & 1 ? CHAT_DATE : NULL;
    char* line = fuzz_text(data + 1, size - 1);
    if (json_parse_line(&j, line, size - 1, "input:1", &e)) {
        ChatMessages m = {NULL, 0, 0};
        const bool ok = chat_read(&m, &j, &e);
        fuzz_check_error(ok, &e);
        if (ok) { check(&m, &c, &t); }
        chat_messages_free(&m);
        json_free(&j);
    }
    free(line);
    return 0;
}
