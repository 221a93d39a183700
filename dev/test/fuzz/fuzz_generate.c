/* fuzz_generate.c -- reads the bytes as the lines of a chat, or as a prompt of text or of ids; the first byte chooses. The
 * model draws its answers' tokens from the input. The generator must give the model ids of its vocabulary, at positions of its
 * context that the cache reaches. It must write the text that it gives to the log. */
#include "fuzz.h"
#include "llmc/run/jobs/chat.h"
#include "dev/test/byte_tokens.h"

enum { CONTEXT = 48, ANSWER = 6, MODEL_VOCAB = 300, MOST_LINES = 32 };  // 3 lines of a chat fill the context

/* A model whose logits favor one token: its next byte. */
typedef struct {
    const uint8_t* bytes;
    size_t count, at;
    int pos;  // tokens in its cache
    float logits[MODEL_VOCAB];
} Stub;

static const float* stub_next(void* model, const int32_t* tokens, int count, int pos, Error* e) {
    Stub* m = (Stub*)model;
    (void)e;
    REQUIRE(count > 0 && pos >= 0 && pos <= m->pos && count <= CONTEXT - pos);
    for (int i = 0; i < count; i++) { REQUIRE(tokens[i] >= 0 && tokens[i] < MODEL_VOCAB); }
    m->pos = pos + count;
    memset(m->logits, 0, sizeof m->logits);
    if (m->count) { m->at++; }
    const int favored = m->count ? m->bytes[(m->at - 1) % m->count] + (m->at % 7 == 0 ? 44 : 0) : 0;
    m->logits[favored] = favored == 255 ? NAN : 50;
    return m->logits;
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static Tokenizer t;
    static TextRules rules[2];  // without and with the tokenizer
    if (!t.vocab_size) {
        ModelConfig c;
        byte_tokens(&t, "");
        config_preset(&c, "d1", MODEL_VOCAB);
        for (int i = 0; i < 2; i++) { text_rules_init(&rules[i], i ? &t : NULL, &c); }
    }
    size_t lines = 0;
    for (size_t i = 0; i < size; i++) { lines += data[i] == '\n'; }
    if (size < 2 || lines > MOST_LINES) { return 0; }
    enum { CHAT, TEXT, IDS, NUM_KINDS };
    const int kind = data[0] % NUM_KINDS, max_tokens = data[0] / NUM_KINDS % ANSWER;
    char* input = fuzz_text(data + 1, size - 1);
    Stub stub = {data + 1, size - 1, 0, 0, {0}};
    Sampler sampler;
    Generator g;
    Error e = NO_ERROR;
    char* written = NULL;
    size_t length = 0;
    FILE* out = open_memstream(&written, &length);
    sampler_init(&sampler, MODEL_VOCAB, 1, 0, 1, 1);
    generator_init(&g, stub_next, &stub, &rules[kind != IDS], &sampler, CONTEXT, out);
    bool ok;
    if (kind == CHAT) {
        FILE* in = fmemopen(input, size - 1, "r");
        Asked asked;
        question_begin(&asked, g.rules, NULL);
        ok = chat(&g, &asked.writer, data[1] & 1 ? "be brief" : NULL, max_tokens, in, &e);
        question_end(&asked);
        fclose(in);
    } else {
        ok = generate(&g, input, max_tokens, &e);
    }
    fuzz_check_error(ok, &e);
    fclose(out);
    // a chat's answers are written one after the other; g.text is the last one
    if (ok && kind != CHAT) { REQUIRE(length - g.text_len <= 1 && memcmp(written, g.text, g.text_len) == 0); }
    generator_free(&g);
    sampler_free(&sampler);
    free(written);
    free(input);
    return 0;
}
