/* test_generate.c -- tests generation, chat and --answer with a scripted model. */
#include "llmc/run/jobs/answer.h"
#include "llmc/run/jobs/chat.h"
#include "llmc/run/loop/generate.h"
#include "llmc/run/session/signals.h"
#include "llmc/text/tokenizer_read.h"
#include "dev/test/test.h"
#include <poll.h>

// ---------------------------------------------------------------------------------------------------------------------
// generation

/* A model that records its input and answers by a script: script[n] is its n-th token. */
typedef struct {
    int V;
    float* logits;
    const int* script;
    int script_len, step;
    int interrupt_at;     // step at which Ctrl-C comes; 0: never
    int more_at, end_at;  // steps at which the questions' pipe gets `more`, and is closed; 0: never
    const char* more;
    int to_pipe;
    int fed[512], num_fed;  // tokens by position
    bool wrong;             // a position was not the next one
} Scripted;

static const float* scripted_next(void* model, const int32_t* tokens, int count, int pos, Error* e) {
    Scripted* s = (Scripted*)model;
    (void)e;
    if (pos > s->num_fed || pos + count > 512) {
        s->wrong = true;
        return s->logits;
    }
    for (int i = 0; i < count; i++) { s->fed[pos + i] = tokens[i]; }
    s->num_fed = pos + count;
    int choice = s->step < s->script_len ? s->script[s->step] : 'z';
    s->step++;
    if (s->step == s->interrupt_at) { run_signal = SIGINT; }
    if (s->step == s->more_at && write(s->to_pipe, s->more, strlen(s->more)) < 0) { s->wrong = true; }
    if (s->step == s->end_at) { close(s->to_pipe); }
    for (int i = 0; i < s->V; i++) { s->logits[i] = choice == -2 ? NAN : i == choice ? 5.0f : 0.0f; }
    return s->logits;
}

typedef struct {
    Tokenizer tokenizer;
    ModelConfig config;
    TextRules rules;
    Sampler sampler;
    Scripted model;
    Generator g;
    char* out;
    size_t out_size;
    FILE* stream;
} Bench;

/* Sets up a greedy generator with a scripted model. `tokenizer_json` NULL: the byte tokenizer. */
static void bench_open(Bench* b, const char* tokenizer_json, bool with_tokenizer, const int* script, int script_len,
                       int context) {
    Error e = NO_ERROR;
    memset(b, 0, sizeof *b);
    if (tokenizer_json) {
        CHECK(tokenizer_parse(&b->tokenizer, tokenizer_json, strlen(tokenizer_json), "tokenizer.json", &e), "%s", e.msg);
    } else {
        tokenizer_bytes(&b->tokenizer);
    }
    config_preset(&b->config, "d1", b->tokenizer.vocab_size + 3);  // padded, as some models are
    b->model.V = b->config.vocab_size;
    b->model.logits = (float*)xmalloc((size_t)b->model.V * sizeof(float));
    b->model.script = script;
    b->model.script_len = script_len;
    sampler_init(&b->sampler, b->config.vocab_size, 0, 0, 1, 1);
    b->stream = open_memstream(&b->out, &b->out_size);
    text_rules_init(&b->rules, with_tokenizer ? &b->tokenizer : NULL, &b->config);
    generator_init(&b->g, scripted_next, &b->model, &b->rules, &b->sampler, context, b->stream);
}

static void bench_close(Bench* b) {
    CHECK(!b->model.wrong, "positions do not follow");
    generator_free(&b->g);
    sampler_free(&b->sampler);
    tokenizer_free(&b->tokenizer);
    free(b->model.logits);
    fclose(b->stream);
    free(b->out);
}

TEST(generation_feeds_each_token_once_and_stops) {
    static const int script[] = {'l', 'o', 0xC3, 0xA9, '!', 256, 'x'};
    Bench b;
    Error e = NO_ERROR;
    bench_open(&b, NULL, true, script, 7, 64);
    CHECK(generate(&b.g, "hel", 20, &e), "%s", e.msg);
    CHECK(strcmp(b.out, "hello\xC3\xA9!\n") == 0 && strcmp(b.g.text, "hello\xC3\xA9!") == 0, "%s", b.out);
    static const int want[] = {256, 'h', 'e', 'l', 'l', 'o', 0xC3, 0xA9, '!'};
    CHECK(b.model.num_fed == 9 && memcmp(b.model.fed, want, sizeof want) == 0, "%d tokens were fed", b.model.num_fed);
    bench_close(&b);

    bench_open(&b, NULL, true, script, 7, 64);
    CHECK(generate(&b.g, "hel", 3, &e), "%s", e.msg);
    CHECK(strcmp(b.out, "hello\xEF\xBF\xBD\n") == 0, "half a character is not printed: %s", b.out);
    CHECK(b.model.num_fed == 6, "the last token is not fed: %d", b.model.num_fed);
    bench_close(&b);

    bench_open(&b, NULL, true, script, 7, 5);
    CHECK(generate(&b.g, "hel", 20, &e), "%s", e.msg);
    CHECK(strcmp(b.out, "hello\n") == 0, "the context ends it: %s", b.out);
    e.msg[0] = 0;
    CHECK(!generate(&b.g, "hello", 20, &e) && strstr(e.msg, "6 tokens") && strstr(e.msg, "holds 5"), "%s", e.msg);
    bench_close(&b);

    e.msg[0] = 0;
    static const int padding[] = {257, -2};
    bench_open(&b, NULL, true, padding, 2, 64);
    CHECK(!generate(&b.g, "", 20, &e) && strstr(e.msg, "position 1"), "%s", e.msg);
    CHECK(strcmp(b.g.text, "") == 0, "an id without a text: %s", b.g.text);
    bench_close(&b);
}

/* Llama 3 Instruct has three: of a text, of a turn, and of a message to a tool. */
TEST(each_of_several_eos_ids_ends_a_text) {
    static const int eos[] = {'x', 'y', 'z'};
    for (int i = 0; i < 3; i++) {
        const int script[] = {'l', 'o', eos[i], 'w'};
        for (int with_tokenizer = 0; with_tokenizer < 2; with_tokenizer++) {
            Bench b;
            Error e = NO_ERROR;
            bench_open(&b, NULL, with_tokenizer, script, 4, 64);
            memcpy(b.config.eos_ids, eos, sizeof eos);
            b.config.num_eos = 3;
            text_rules_init(&b.rules, with_tokenizer ? &b.tokenizer : NULL, &b.config);
            CHECK(generate(&b.g, with_tokenizer ? "hel" : "104", 20, &e), "%s", e.msg);
            CHECK(strcmp(b.g.text, with_tokenizer ? "hello" : "104 108 111") == 0, "id %d: %s", eos[i], b.g.text);
            bench_close(&b);
        }
    }
}

/* Generates after a prompt into `out` and returns the bytes that arrive at the other end, `from`. */
static const char* generated(FILE* out, int from, const char* prompt, const int* script, int script_len) {
    static char text[256];
    Bench b;
    Error e = NO_ERROR;
    bench_open(&b, NULL, true, script, script_len, 64);
    generator_free(&b.g);
    generator_init(&b.g, scripted_next, &b.model, &b.rules, &b.sampler, 64, out);
    CHECK(generate(&b.g, prompt, 20, &e), "%s", e.msg);
    size_t have = 0;  // a read of a terminal may return a part: read up to the newline that ends the text
    for (ssize_t n = 1; n > 0 && have < sizeof text - 1 && (have == 0 || text[have - 1] != '\n');
         have += (size_t)(n > 0 ? n : 0)) {
        n = read(from, text + have, sizeof text - 1 - have);
    }
    text[have] = 0;
    bench_close(&b);
    return text;
}

TEST(generated_text_cannot_drive_a_terminal) {
    // CSI as ESC [ and as U+009B over two tokens; bytes that are no characters; DEL
    static const int script[] = {0x1B, '[', 0xC2, 0x9B, 'J', 0x9B, '\t', 0xC3, 0xA9, 0x7F, '\n', 256};
    const char* prompt = "\x1B]0;x\x07\xC2";
    const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
    CHECK(terminal >= 0 && grantpt(terminal) == 0 && unlockpt(terminal) == 0, "no terminal: %s", strerror(errno));
    FILE* out = fopen(ptsname(terminal), "w");
    CHECK(out && isatty(fileno(out)), "no terminal");
    if (!out) { return; }
    const char* got = generated(out, terminal, prompt, script, 12);  // the terminal itself makes \n of ours \r\n
    CHECK(strcmp(got, "\\x1b]0;x\\x07\\xc2\\x1b[\\xc2\\x9bJ\xEF\xBF\xBD\t\xC3\xA9\\x7f\r\n") == 0, "%s", got);
    fclose(out);
    close(terminal);

    int ends[2];
    CHECK(pipe(ends) == 0, "no pipe");
    out = fdopen(ends[1], "w");
    got = generated(out, ends[0], prompt, script, 12);
    CHECK(strcmp(got, "\x1B]0;x\x07\xC2\x1B[\xC2\x9BJ\xEF\xBF\xBD\t\xC3\xA9\x7F\n") == 0, "%s", got);
    fclose(out);
    close(ends[0]);
}

TEST(a_sample_that_is_cut_ends_its_line) {
    static const int script[] = {'o', '\n', '!'};
    static const struct {
        int tokens;
        const char* text;
    } cases[] = {{1, "hello \xE2\x80\xA6\n"}, {2, "hello\n \xE2\x80\xA6\n"}};
    for (int i = 0; i < 2; i++) {
        Bench b;
        Error e = NO_ERROR;
        bench_open(&b, NULL, true, script, 3, 64);
        b.g.ellipsis = true;
        CHECK(generate(&b.g, "hell", cases[i].tokens, &e), "%s", e.msg);
        CHECK(strcmp(b.out, cases[i].text) == 0, "%d tokens: %s", cases[i].tokens, b.out);
        bench_close(&b);
    }
}

/* scripted_next() of a slow model. */
static const float* slow_next(void* model, const int32_t* tokens, int count, int pos, Error* e) {
    poll(NULL, 0, 1100);
    return scripted_next(model, tokens, count, pos, e);
}

TEST(a_long_prompt_shows_its_progress_at_a_terminal) {
    static const int script[] = {0, 0, 0, 256};
    char prompt[3 * DECODE_ROWS] = "", got[512] = "";  // with BOS, three calls of the model
    const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
    CHECK(terminal >= 0 && grantpt(terminal) == 0 && unlockpt(terminal) == 0, "no terminal: %s", strerror(errno));
    FILE* screen = fopen(ptsname(terminal), "w");
    Bench b;
    Error e = NO_ERROR;
    memset(prompt, 'x', sizeof prompt - 1);
    bench_open(&b, NULL, true, script, 4, 500);
    b.g.next = slow_next;
    b.g.screen = screen;
    CHECK(generate(&b.g, prompt, 20, &e), "%s", e.msg);
    CHECK(strncmp(b.out, prompt, sizeof prompt - 1) == 0, "the text is as always: %s", b.out);
    fclose(screen);
    size_t have = 0;
    for (ssize_t n = 0; (n = read(terminal, got + have, sizeof got - 1 - have)) > 0;) { have += (size_t)n; }
    CHECK(strncmp(got, "\rprompt   66.7 % of ", 19) == 0 && strstr(got, "  \r"), "it shows %s", got);
    close(terminal);
    bench_close(&b);
}

TEST(without_a_tokenizer_texts_are_ids) {
    static const int script[] = {7, 8, 9};
    Bench b;
    Error e = NO_ERROR;
    bench_open(&b, NULL, false, script, 3, 64);
    CHECK(generate(&b.g, "3  44 ", 3, &e), "%s", e.msg);
    CHECK(b.model.fed[0] == 3 && b.model.fed[1] == 44 && strcmp(b.g.text, "3  44  7 8 9") == 0, "%s", b.g.text);
    static const char* const wrong[] = {"x", "1 x", "1x", "-1", "999", "99999999999999999999", "1.5", "+1"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        e.msg[0] = 0;
        CHECK(!generate(&b.g, wrong[i], 3, &e) && strstr(e.msg, "no tokenizer"), "\"%s\": %s", wrong[i], e.msg);
    }
    e.msg[0] = 0;
    CHECK(generate(&b.g, "", 1, &e) && b.model.fed[0] == 0, "without BOS it starts at token 0: %s", e.msg);
    bench_close(&b);
}

/* Writes a tokenizer.json of the 256 bytes and, if asked, Llama 3's chat tokens from 256 on. */
static char* chat_tokenizer(bool with_chat) {
    char* text = NULL;
    size_t size = 0;
    FILE* f = open_memstream(&text, &size);
    fprintf(f, "{\"model\":{\"type\":\"BPE\",\"merges\":[],\"vocab\":{");
    int stand_in = 256;  // GPT-2's printable stand-ins for the other bytes
    for (int b = 0; b < 256; b++) {
        bool printable = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
        char character[5] = {0};
        size_t len = utf8_encode(character, printable ? b : stand_in++);
        fputs(b ? "," : "", f);
        json_write_string(f, character, len);
        fprintf(f, ":%d", b);
    }
    fprintf(f,
            "}},\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true},"
            "\"decoder\":{\"type\":\"ByteLevel\"},\"added_tokens\":[");
    static const char* const names[] = {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"};
    for (int i = 0; i < (with_chat ? 4 : 1); i++) {
        fprintf(f,
                "%s{\"id\":%d,\"content\":\"%s\",\"special\":true,\"single_word\":false,\"lstrip\":false,\"rstrip\":false,"
                "\"normalized\":false}",
                i ? "," : "", 256 + i, names[i]);
    }
    fprintf(f, "]}");
    fclose(f);
    return text;
}

/* Returns the tokens fed to the model as text, with the chat tokens as B { } E. */
static const char* fed_text(const Scripted* s) {
    static char text[513];
    for (int i = 0; i < s->num_fed; i++) { text[i] = s->fed[i] < 256 ? (char)s->fed[i] : "B{}E"[s->fed[i] - 256]; }
    text[s->num_fed] = 0;
    return text;
}

static bool chat_lines(Bench* b, const char* input, const char* system, int max_tokens, Error* e) {
    char copy[512];
    snprintf(copy, sizeof copy, "%s", input);
    FILE* in = fmemopen(copy, strlen(copy), "r");
    Asked asked;
    question_begin(&asked, &b->rules, NULL);
    *e = asked.no_chat;
    bool ok = !e->msg[0] && chat(&b->g, &asked.writer, system, max_tokens, in, e);
    question_end(&asked);
    fclose(in);
    fflush(b->stream);
    return ok;
}

TEST(chat_follows_the_template) {
    static const int script[] = {'Y', 'o', 259, 'O', 'k', 259};
    char* json = chat_tokenizer(true);
    Bench b;
    Error e = NO_ERROR;
    bench_open(&b, json, true, script, 6, 500);
    CHECK(chat_lines(&b, "  hi <|eot_id|> \n\n   \nbye\n/quit\nnever\n", " be kind ", 50, &e), "%s", e.msg);
    CHECK(strcmp(b.out, "Yo\nOk\n") == 0, "%s", b.out);
    CHECK(strcmp(fed_text(&b.model),
                 "B{system}\n\nbe kindE{user}\n\nhi <|eot_id|>E{assistant}\n\nYoE{user}\n\nbyeE{assistant}\n\nOk") == 0,
          "%s", fed_text(&b.model));
    bench_close(&b);

    // the next turn closes an answer that was cut off; /clear starts a new conversation
    bench_open(&b, json, true, script, 6, 500);
    CHECK(chat_lines(&b, "hi\nbye", NULL, 1, &e), "%s", e.msg);
    CHECK(strcmp(fed_text(&b.model), "B{user}\n\nhiE{assistant}\n\nYE{user}\n\nbyeE{assistant}\n\n") == 0, "%s",
          fed_text(&b.model));
    bench_close(&b);
    bench_open(&b, json, true, script, 6, 500);
    CHECK(chat_lines(&b, "hi\n/clear\nbye", NULL, 50, &e), "%s", e.msg);
    CHECK(strcmp(fed_text(&b.model), "B{user}\n\nbyeE{assistant}\n\nOk") == 0, "%s", fed_text(&b.model));
    bench_close(&b);
    free(json);
}

TEST(ctrl_c_ends_an_answer_and_leaves_a_whole_conversation) {
    static const int script[] = {'Y', 'o', 'O', 'k', 259};
    char* json = chat_tokenizer(true);
    static const struct {
        int at, max_tokens;
        const char *input, *out, *fed;
    } cases[] = {
        // during the answer: the conversation stays
        {2, 50, "hi\nbye", "Y\nOk\n", "B{user}\n\nhiE{assistant}\n\nYE{user}\n\nbyeE{assistant}\n\nOk"},
        // while the message is read: the message is dropped, and the next one begins the conversation
        {1, 50, "hi\nbye", "\noOk\n", "B{user}\n\nbyeE{assistant}\n\noOk"},
        // the same after an answer that was cut off, whose last token is fed with the next message
        {2, 1, "hi\nno\nbye", "Y\n\nO\n", "B{user}\n\nhiE{assistant}\n\nYE{user}\n\nbyeE{assistant}\n\n"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Bench b;
        Error e = NO_ERROR;
        bench_open(&b, json, true, script, 5, 500);
        b.model.interrupt_at = cases[i].at;
        CHECK(chat_lines(&b, cases[i].input, NULL, cases[i].max_tokens, &e), "%s", e.msg);
        CHECK(strcmp(b.out, cases[i].out) == 0, "%zu: %s", i, b.out);
        CHECK(strcmp(fed_text(&b.model), cases[i].fed) == 0, "%zu: %s", i, fed_text(&b.model));
        CHECK(!run_stop_requested(), "the signal is not forgotten");
        bench_close(&b);
    }
    free(json);
}

TEST(chat_says_when_the_context_is_full) {
    static const int script[] = {'Y', 'o', 259, 'O', 'k', 259};
    char* json = chat_tokenizer(true);
    const char* path = test_file("err");
    Bench b;
    Error e = NO_ERROR;
    fflush(NULL);
    int saved = dup(2), fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    dup2(fd, 2);
    bench_open(&b, json, true, script, 6, 48);
    bool ok = chat_lines(&b, "hi\na message that is much too long for this\nbye", NULL, 50, &e);
    fflush(stderr);
    dup2(saved, 2);
    close(saved);
    close(fd);
    const char* text = test_text(path);
    CHECK(ok && strstr(text, "begins anew") && strstr(text, "left out"), "%s%s", e.msg, text);
    CHECK(strcmp(b.out, "Yo\nOk\n") == 0, "%s", b.out);
    CHECK(strcmp(fed_text(&b.model), "B{user}\n\nbyeE{assistant}\n\nOk") == 0, "%s", fed_text(&b.model));
    bench_close(&b);
    free(json);
}

TEST(a_model_without_a_template_is_refused) {
    char* json = chat_tokenizer(false);
    Bench b;
    Error e = NO_ERROR;
    bench_open(&b, json, true, NULL, 0, 64);
    CHECK(!chat_lines(&b, "hi", NULL, 5, &e) && strstr(e.msg, "no chat template"), "%s", e.msg);
    bench_close(&b);
    bench_open(&b, NULL, false, NULL, 0, 64);
    e.msg[0] = 0;
    CHECK(!chat_lines(&b, "hi", NULL, 5, &e) && strstr(e.msg, "no tokenizer"), "%s", e.msg);
    bench_close(&b);
    free(json);
}

// ---------------------------------------------------------------------------------------------------------------------
// --answer

/* Answers the questions, and checks what is written. At step `end_at` of the model the input ends. */
static void check_answers(Bench* b, const char* questions, int end_at, const char* want) {
    const Question silent = {0, 1, 0, 0, 1, 50, {NULL, 0, 0}, false};
    Asked asked;
    question_begin(&asked, &b->rules, NULL);
    int ends[2];
    CHECK(pipe(ends) == 0 && write(ends[1], questions, strlen(questions)) > 0, "no pipe");
    b->model.to_pipe = ends[1];
    b->model.end_at = end_at;
    if (end_at == 0) { close(ends[1]); }
    answer(&b->g, &asked, &silent, ends[0]);
    question_end(&asked);
    close(ends[0]);
    CHECK(strcmp(b->out, want) == 0, "%s", b->out);
}

TEST(answers_are_lines_of_json_each_for_itself) {
    static const int script[] = {'l', 'o', 0xC3, 0xC3, 0xA9, 259, 256, 'Y', '"', 259};
    char* json = chat_tokenizer(true);
    Bench b;
    bench_open(&b, json, true, script, 10, 500);
    check_answers(
        &b,
        "{\"prompt\": \"hel\", \"max_tokens\": 3}\n"
        "{\"prompt\": \"a\", \"temperature\": 0.01, \"top_k\": 3, \"top_p\": 0.5, \"seed\": 9}\n"
        "{\"messages\": [{\"role\": \"user\", \"content\": \" hi <|eot_id|>\"}], \"other\": 1}\n",
        10,
        "{\"text\": \"l\"}\n{\"text\": \"o\"}\n{\"text\": \"\xEF\xBF\xBD\"}\n{\"tokens\": 3, \"reason\": \"length\"}\n"
        "{\"text\": \"\xC3\xA9\"}\n{\"text\": \"<|eot_id|>\"}\n{\"tokens\": 3, \"reason\": \"end\"}\n"
        "{\"text\": \"Y\"}\n{\"text\": \"\\\"\"}\n{\"tokens\": 2, \"reason\": \"end\"}\n");
    CHECK(strcmp(fed_text(&b.model), "B{user}\n\nhi <|eot_id|>E{assistant}\n\nY\"") == 0, "%s", fed_text(&b.model));
    CHECK(b.sampler.temperature == 0 && b.sampler.top_k == 0 && b.sampler.top_p == 1 && b.sampler.seed == 1,
          "the sampling of another question stays");
    bench_close(&b);
    free(json);
}

TEST(a_stop_or_the_end_of_the_input_ends_an_answer) {
    Bench b;
    bench_open(&b, NULL, true, NULL, 0, 64);
    b.model.more_at = 3;
    b.model.more = "{\"stop\": true}\n{\"prompt\": \"b\", \"max_tokens\": 1}\n{\"prompt\": \"c\"}\n";
    check_answers(&b, "{\"stop\": true}\n{\"prompt\": \"a\"}\n", 6,
                  "{\"text\": \"z\"}\n{\"text\": \"z\"}\n{\"text\": \"z\"}\n{\"tokens\": 3, \"reason\": \"stop\"}\n"
                  "{\"text\": \"z\"}\n{\"tokens\": 1, \"reason\": \"length\"}\n"
                  "{\"text\": \"z\"}\n{\"text\": \"z\"}\n{\"tokens\": 2, \"reason\": \"stop\"}\n");
    bench_close(&b);
    bench_open(&b, NULL, true, NULL, 0, 64);
    check_answers(&b, "{\"prompt\": \"a\"}\n{\"prompt\": \"half", 0, "{\"tokens\": 0, \"reason\": \"stop\"}\n");
    CHECK(b.model.step == 0, "the model worked for nobody");
    bench_close(&b);
}

TEST(a_line_that_has_no_answer_gets_an_error) {
    static const struct {
        const char *line, *error;
    } cases[] = {
        {"", "question:1: the text ends here, wanted a value"},
        {"{\"prompt\": \"a\"", "question:15: the text ends here, wanted ',' or '}'"},
        {"[\"prompt\"]", "question: has no prompt or messages, wanted one of them"},
        {"{\"stop\": 1}", "question: has no prompt or messages, wanted one of them"},
        {"{\"prompt\": \"a\", \"messages\": []}", "question: has prompt and messages, wanted one of them"},
        {"{\"prompt\": \"a\\u0000\"}", "question: prompt is \\\"a?\\\", wanted a string without U+0000"},
        {"{\"prompt\": \"a\", \"temperature\": -1}", "question: temperature is -1, wanted a number from 0 to 100"},
        {"{\"prompt\": \"a\", \"top_p\": 2}", "question: top_p is 2, wanted a number from 0 to 1"},
        {"{\"prompt\": \"a\", \"top_k\": 1e3}", "question: top_k is 1e3, wanted an integer from 0 to 2147483647"},
        {"{\"prompt\": \"a\", \"seed\": \"x\"}",
         "question: seed is \\\"x\\\", wanted an integer from 0 to 9223372036854775807"},
        {"{\"prompt\": \"a\", \"max_tokens\": 0}", "question: max_tokens is 0, wanted an integer from 1 to 2147483647"},
        {"{\"prompt\": \"hello!\"}", "6 tokens at position 0 do not fit into the context of 5"},
        {"{\"messages\": []}", "question: messages is an array, wanted a message in it"},
        {"{\"messages\": [{\"role\": \"x\"}]}",
         "question: messages.0.role is \\\"x\\\", wanted \\\"system\\\", \\\"user\\\" or \\\"assistant\\\" (also "
         "\\\"human\\\", "
         "\\\"gpt\\\"), and none of a tool"},
    };
    char* json = chat_tokenizer(true);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Bench b;
        char lines[256], want[512];
        snprintf(lines, sizeof lines, "%s\n{\"prompt\": \"ab\", \"max_tokens\": 9}\n", cases[i].line);
        snprintf(want, sizeof want, "{\"error\": \"%s\"}\n%s%s", cases[i].error,
                 "{\"text\": \"z\"}\n{\"text\": \"z\"}\n{\"text\": \"z\"}\n",
                 "{\"text\": \"z\"}\n{\"tokens\": 4, \"reason\": \"context\"}\n");
        bench_open(&b, json, true, NULL, 0, 5);
        check_answers(&b, lines, 4, want);
        bench_close(&b);
    }
    free(json);

    // a model that breaks within a character, and one that cannot chat
    static const int broken[] = {0xC3, -2, 'x'};
    Bench b;
    bench_open(&b, NULL, true, broken, 3, 64);
    check_answers(&b,
                  "{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]}\n"
                  "{\"prompt\": \"a\"}\n{\"prompt\": \"a\", \"max_tokens\": 1}\n",
                  3,
                  "{\"error\": \"question: messages: the model has no chat template, wanted chat_template.jinja or the member "
                  "chat_template of tokenizer_config.json beside the tokenizer\"}\n"
                  "{\"error\": \"the logits at position 2 are all nan: the model's weights are broken\"}\n"
                  "{\"text\": \"x\"}\n{\"tokens\": 1, \"reason\": \"length\"}\n");
    bench_close(&b);
}

int main(void) { return test_all(); }
