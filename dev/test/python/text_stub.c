/* text_stub.c -- what tests of chats and templates ask of our code. The first argument says what:
 *
 *   text_stub talk                  for test_chat.py: a chat with a model that answers [MESSAGE], with '|' for newlines; a
 *                                   message that begins with "count" gets an endless slow answer
 *   text_stub slow                  the same at a slow screen
 *   text_stub rules PROMPT FOLDER...  for test_text_rules.py: what text_rules.h reads from folders, a line of JSON each
 *   text_stub render                for test_template.py: renders chat templates. A line of stdin is {"template": TEXT,
 *                                   "variables": OBJECT}, and answered by {"text": TEXT, "marks": "0110...", "generations":
 *                                   [[from, to], ...]}, in bytes, or by {"error": TEXT}. A line without a template uses the one
 *                                   before it. bos_token and eos_token are the template's own; it is noon of 27 November 2026.
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
#include "llmc/files/config_file.h"
#include "llmc/text/tokenizer_read.h"
#include "dev/test/byte_tokens.h"

// ---------------------------------------------------------------------------------------------------------------------
// a chat

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
    Asked asked;
    byte_tokens(&t, "");
    config_preset(&c, "d1", VOCAB);
    m.end_header = tokenizer_find(&t, "<|end_header_id|>");
    m.eot = tokenizer_find(&t, "<|eot_id|>");
    sampler_init(&sampler, VOCAB, 0, 0, 1, 1);
    text_rules_init(&rules, &t, &c);
    generator_init(&g, echo_next, &m, &rules, &sampler, CONTEXT, stdout);
    question_begin(&asked, &rules, NULL);
    must(chat(&g, &asked.writer, "be brief", CONTEXT, stdin, &e), &e);
    question_end(&asked);
    generator_free(&g);
    sampler_free(&sampler);
    tokenizer_free(&t);
}

// ---------------------------------------------------------------------------------------------------------------------
// the rules of texts

static void print_text(const char* key, const char* text) {
    printf(", \"%s\": ", key);
    if (text) {
        json_write_text(stdout, text);
    } else {
        fputs("null", stdout);
    }
}

static void print_ids(const char* key, const int32_t* ids, size_t count) {
    printf(", \"%s\": [", key);
    for (size_t i = 0; i < count; i++) { printf("%s%d", i ? ", " : "", ids[i]); }
    fputs("]", stdout);
}

static void print_rules(const char* folder, const char* prompt) {
    char path[PATH_CAP];
    Tokenizer t;
    ModelConfig c;
    TextRules r;
    TokenList l = {NULL, 0, 0};
    Error e = NO_ERROR;
    must(path_join(path, folder, "config.json", &e) && config_read(&c, path, &e), &e);
    must(tokenizer_load(&t, folder, &e) && text_rules_read(&r, &t, &c, folder, true, true, &e), &e);
    must(prompt_tokens(&l, prompt, &r, &e), &e);
    printf("{\"pad_id\": %d", r.pad_id);
    print_ids("start", r.start_ids, (size_t)r.num_start);
    print_ids("ends", r.end_ids, (size_t)r.num_ends);
    print_ids("prompt", l.ids, l.count);
    print_text("bos", t.bos_name);
    print_text("eos", t.eos_name);
    print_text("pad", t.pad_name);
    print_text("template", r.chat_template);
    printf(", \"draws\": %s}\n", r.sampling.draws ? "true" : "false");
    token_list_free(&l);
    text_rules_free(&r);
    tokenizer_free(&t);
}

// ---------------------------------------------------------------------------------------------------------------------
// templates

/* Makes the variables of a line. */
static TemplateValue variables_of(TemplateArena* arena, const Json* j) {
    const TemplateValue v = template_from_json(arena, j, json_get(j, json_root(j), "variables"));
    for (size_t i = 0; i < v.as.dict->count; i++) {
        TemplatePair* p = &v.as.dict->items[i];
        const bool own = template_is(p->key, "bos_token") || template_is(p->key, "eos_token");
        if (own && p->value.type == TEMPLATE_STRING) { p->value = template_string(arena, p->value.as.s, p->value.len, true); }
    }
    return v;
}

static void render(void) {
    Template t;
    TemplateArena arena = {NULL, 0};
    char* line = NULL;
    size_t cap = 0;
    struct tm now;
    memset(&t, 0, sizeof t);
    memset(&now, 0, sizeof now);
    strptime("2026-11-27 12:34:56", "%Y-%m-%d %H:%M:%S", &now);
    for (ssize_t len; (len = getline(&line, &cap, stdin)) > 0;) {
        Error e = NO_ERROR;
        Json j;
        TemplateRendered r;
        size_t size = 0;
        must(json_parse(&j, xcopy_text(line, (size_t)len), (size_t)len, "stdin", &e), &e);
        const char* text = json_string(&j, json_get(&j, json_root(&j), "template"), &size);
        bool ok = true;
        if (text) {
            template_free(&t);
            ok = template_parse(&t, text, size, "t", &e);
        }
        if (ok && t.text && template_render(&t, &arena, variables_of(&arena, &j), &now, &r, &e)) {
            fputs("{\"text\": ", stdout);
            json_write_string(stdout, r.text, r.len);
            fputs(", \"marks\": \"", stdout);
            for (size_t i = 0; i < r.len; i++) { putchar('0' + r.from_template[i]); }
            fputs("\", \"generations\": [", stdout);
            for (size_t i = 0; i < r.num_generations; i++) {
                printf("%s[%zu, %zu]", i ? ", " : "", r.generations[i].from, r.generations[i].to);
            }
            puts("]}");
        } else {
            fputs("{\"error\": ", stdout);
            json_write_text(stdout, e.msg);
            puts("}");
        }
        fflush(stdout);
        json_free(&j);
        template_arena_reset(&arena);
    }
    template_arena_free(&arena);
    template_free(&t);
    free(line);
}

int main(int argc, char** argv) {
    const char* what = argc > 1 ? argv[1] : "";
    slow = strcmp(what, "slow") == 0;
    if (slow || strcmp(what, "talk") == 0) {
        talk();
    } else if (strcmp(what, "render") == 0) {
        render();
    } else if (strcmp(what, "rules") == 0 && argc > 2) {
        for (int i = 3; i < argc; i++) { print_rules(argv[i], argv[2]); }
    } else {
        die_usage("usage: text_stub talk | slow | rules PROMPT FOLDER... | render");
    }
    return 0;
}
