/* fuzz_answer.c -- reads the bytes as the input of --answer; the first byte chooses whether the model has a tokenizer. The
 * model draws its answers' tokens from the input. Each line but a stop must get one last line, of a reason or an error, and
 * before it pieces of text alone. The model must get ids of its vocabulary that fit its context. */
#include "fuzz.h"
#include "llmc/run/jobs/answer.h"
#include "dev/test/byte_tokens.h"

enum { CONTEXT = 40, VOCAB = 300, MOST_BYTES = 4096, MOST_LINES = 32 };

/* A model whose logits favor one token: its next byte. */
typedef struct {
    const uint8_t* bytes;
    size_t count, at;
    int pos;  // tokens in its cache
    float logits[VOCAB];
} Stub;

static const float* stub_next(void* model, const int32_t* tokens, int count, int pos, Error* e) {
    Stub* m = (Stub*)model;
    (void)e;
    REQUIRE(count > 0 && (pos == 0 || pos == m->pos) && count <= CONTEXT - pos);
    for (int i = 0; i < count; i++) { REQUIRE(tokens[i] >= 0 && tokens[i] < VOCAB); }
    m->pos = pos + count;
    memset(m->logits, 0, sizeof m->logits);
    const int favored = m->bytes[m->at % m->count] + (m->at % 7 == 0 ? 44 : 0);
    m->at++;
    m->logits[favored] = favored == 255 ? NAN : 50;
    return m->logits;
}

/* Returns a pipe with the input. The blanks after it are read between the tokens of the first answer, before the end of the
 * input ends it. */
static int input_pipe(const uint8_t* data, size_t size) {
    static char blanks[60000];
    int ends[2];
    memset(blanks, ' ', sizeof blanks);
    REQUIRE(pipe(ends) == 0 && write(ends[1], data, size) == (ssize_t)size);
    REQUIRE(write(ends[1], blanks, sizeof blanks) == (ssize_t)sizeof blanks && close(ends[1]) == 0);
    return ends[0];
}

/* Counts the last lines of answers. */
static size_t count_answers(const char* text, size_t length) {
    size_t answers = 0;
    const char* end = text + length;
    REQUIRE(length == 0 || end[-1] == '\n');
    for (const char *next, *line = text; line < end; line = next) {
        Json j;
        Error e = NO_ERROR;
        next = (const char*)memchr(line, '\n', (size_t)(end - line)) + 1;
        REQUIRE(json_parse_line(&j, line, (size_t)(next - line), "output", &e));
        const bool last = json_get(&j, json_root(&j), "error") || json_get(&j, json_root(&j), "reason");
        REQUIRE(last || json_get(&j, json_root(&j), "text"));
        answers += last;
        json_free(&j);
    }
    return answers;
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static Tokenizer t;
    static TextRules rules[2];  // without and with the tokenizer
    if (!t.vocab_size) {
        ModelConfig c;
        byte_tokens(&t, "");
        config_preset(&c, "d1", VOCAB);
        for (int i = 0; i < 2; i++) { text_rules_init(&rules[i], i ? &t : NULL, &c); }
    }
    if (size < 2 || size > MOST_BYTES) { return 0; }
    size_t lines = 0, questions = 0;
    for (size_t i = 1, from = 1; i < size; i++) {
        if (data[i] != '\n') { continue; }
        lines++;
        questions += !question_is_stop((const char*)data + from, i + 1 - from);
        from = i + 1;
    }
    if (lines > MOST_LINES) { return 0; }
    Stub stub = {data, size, 0, 0, {0}};
    Sampler sampler;
    Generator g;
    char* written = NULL;
    size_t length = 0;
    FILE* out = open_memstream(&written, &length);
    sampler_init(&sampler, VOCAB, 1, 0, 1, 1);
    generator_init(&g, stub_next, &stub, &rules[data[0] & 1], &sampler, CONTEXT, out);
    const Question silent = {1, 1, 1, 0, 1, 8, {NULL, 0, 0}, false};
    Asked asked;
    question_begin(&asked, g.rules, NULL);
    const int fd = input_pipe(data + 1, size - 1);
    answer(&g, &asked, &silent, fd);
    close(fd);
    fclose(out);
    REQUIRE(count_answers(written, length) == questions);
    question_end(&asked);
    generator_free(&g);
    sampler_free(&sampler);
    free(written);
    return 0;
}
