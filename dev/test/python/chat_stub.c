/* chat_stub.c -- for test_chat.py.
 *
 *   chat_stub talk                        a chat with a model that answers [MESSAGE], with '|' for newlines; a message that
 *                                         begins with "count" gets an endless slow answer
 *   chat_stub slow                        the same at a slow screen
 */
#include "llmc/base/utils.h"

static bool slow;

/* A slow screen shows a prompt 10 ms before the chat waits for a line: a key may come in between. */
static int slow_fflush(FILE* f) {
    const struct timespec pause = {0, slow ? 10000000 : 0};
    const int status = fflush(f);
    nanosleep(&pause, NULL);
    return status;
}

#define fflush slow_fflush
#include "llmc/run/jobs/chat.h"
#undef fflush
#include "dev/test/byte_tokens.h"

enum { CONTEXT = 32768, VOCAB = 1024 };

typedef struct {
    int end_header, eot;
    int fed[CONTEXT];
    int reply, end;  // the rest of the answer: fed[reply .. end); reply == end: ']', beyond: the end
    bool endless;
    float logits[VOCAB];
} Echo;

/* Finds the message in a fed turn: the tokens between a header with two newlines and the last <|eot_id|>. */
static void echo_listen(Echo* m, int count) {
    m->end = count;
    while (m->fed[--m->end] != m->eot) {}
    m->reply = m->end;
    while (m->fed[m->reply - 1] != m->end_header) { m->reply--; }
    m->reply += 2;
    static const char word[] = "count";
    m->endless = true;
    for (int i = 0; i < 5; i++) { m->endless = m->endless && m->fed[m->reply + i] == word[i]; }
}

static const float* echo_next(void* model, const int32_t* tokens, int count, int pos, Error* e) {
    Echo* m = (Echo*)model;
    int say = '[';
    (void)e;
    for (int i = 0; i < count; i++) { m->fed[pos + i] = tokens[i]; }
    if (count > 1) {
        echo_listen(m, pos + count);
    } else if (m->endless) {
        const struct timespec pause = {0, 2000000};
        nanosleep(&pause, NULL);
        say = 'x';
    } else {
        say = m->reply < m->end ? m->fed[m->reply] : m->reply == m->end ? ']' : m->eot;
        if (say == '\n') { say = '|'; }
        m->reply++;
    }
    memset(m->logits, 0, sizeof m->logits);
    m->logits[say] = 1;
    return m->logits;
}

static void talk(void) {
    static Echo m;
    Tokenizer t;
    ModelConfig c;
    TextRules rules;
    Sampler sampler;
    Generator g;
    Error e = NO_ERROR;
    const ChatOptions options = {"be brief", CONTEXT};
    Asked asked;
    byte_tokens(&t, "");
    config_preset(&c, "d1", VOCAB);
    m.end_header = tokenizer_find(&t, "<|end_header_id|>");
    m.eot = tokenizer_find(&t, "<|eot_id|>");
    sampler_init(&sampler, VOCAB, 0, 0, 1, 1);
    text_rules_init(&rules, &t, &c);
    generator_init(&g, echo_next, &m, &rules, &sampler, CONTEXT, stdout);
    question_begin(&asked, &rules, NULL);
    must(chat(&g, &asked.writer, &options, stdin, &e), &e);
    question_end(&asked);
    generator_free(&g);
    sampler_free(&sampler);
    tokenizer_free(&t);
}

int main(int argc, char** argv) {
    slow = argc == 2 && strcmp(argv[1], "slow") == 0;
    if (slow || (argc == 2 && strcmp(argv[1], "talk") == 0)) {
        talk();
    } else {
        die_usage("usage: chat_stub talk | slow");
    }
    return 0;
}
