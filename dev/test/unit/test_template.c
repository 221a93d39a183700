/* test_template.c -- the interpreter of chat templates: who wrote each byte, bounds, the places of errors, threads.
 * dev/test/python/test_template.py compares its renderings with transformers. */
#include "llmc/text/template.h"

#include "dev/test/test.h"

#include <pthread.h>

static Error error;

/* Renders a template with variables of JSON; `out` gets the text, and `marks` a digit a byte. Returns whether it succeeded. */
static bool render(const char* text, const char* json, char* out, char* marks, size_t cap) {
    Template t;
    TemplateArena arena = {NULL, 0};
    TemplateRendered r;
    Json j;
    memset(&error, 0, sizeof error);
    bool ok = json_parse(&j, xstrdup(json), strlen(json), "v.json", &error);
    if (!ok || !template_parse(&t, text, strlen(text), "t.jinja", &error)) {
        json_free(&j);
        return false;
    }
    const TemplateValue variables = template_from_json(&arena, &j, json_root(&j));
    template_dict_set(&arena, variables, "bos_token", template_string(&arena, "<s>", 3, true));
    ok = template_render(&t, &arena, variables, NULL, &r, &error);
    const size_t n = ok ? size_min(r.len, cap - 1) : 0;
    for (size_t i = 0; i < n; i++) {
        out[i] = r.text[i];
        marks[i] = (char)('0' + r.from_template[i]);
    }
    out[n] = marks[n] = 0;
    template_arena_free(&arena);
    template_free(&t);
    json_free(&j);
    return ok;
}

TEST(each_byte_knows_who_wrote_it) {
    static const char* const cases[][3] = {
        {"<|{{ x }}|>", "<|<s> Hi |>", "11000000011"},
        {"{{ bos_token + x|trim + '!' }}", "<s><s> Hi!", "1110000001"},
        {"{{ x|upper ~ 'a'|upper }}", "<S> HI A", "00000001"},
        {"{{ x.replace('<s>', '[') }}", "[ Hi ", "10000"},
        {"{{ x.split('>')|join('|') }}", "<s| Hi ", "0010000"},
        {"{{ (x ~ 'ab')[::-1][:3] }}", "ba ", "110"},
        {"{% set y %}a{{ x[:1] }}{% endset %}{{ y }}", "a<", "10"},
        {"{% macro m(v) %}({{ v }}){% endmacro %}{{ m(x[4:6]) }}", "(Hi)", "1001"},
        {"{{ -n }}{{ n|int }}{{ '7'|int }}{{ ('1' ~ n)|int }}{{ -2 }}", "-77717-2", "00010011"},
        {"{{ [bos_token]|tojson }}{{ n }}{{ 2 }}", "[\"<s>\"]72", "000000001"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char out[200], marks[200];
        const bool ok = render(cases[i][0], "{\"x\": \"<s> Hi \", \"n\": 7}", out, marks, sizeof out);
        CHECK(ok && strcmp(out, cases[i][1]) == 0, "%s: \"%s\" %s", cases[i][0], out, error.msg);
        CHECK(strcmp(marks, cases[i][2]) == 0, "%s: %s", cases[i][0], marks);
    }
}

TEST(an_error_names_its_place) {
    static const char* const cases[][2] = {
        {"a\n  {{ x|foo }}", "t.jinja:2:8: the filter \"foo\" is not known here"},
        {"{{ x.splitlines() }}", "t.jinja:1:17: 'str object' has no attribute 'splitlines' that is known here"},
        {"{{ x is foo }}", "t.jinja:1:9: the test \"foo\" is not known here"},
        {"\n\n{% include 'x' %}", "t.jinja:3:4: found \"include\", wanted"},
        {"{{ x.y.z }}", "'str object' has no attribute 'y'"},
        {"{{ nothing.z }}", "t.jinja:1:12: 'nothing' is undefined"},
        {"{{ raise_exception('no ' ~ x) }}", "no <s> Hi"},
        {"{% if x %}", "t.jinja:1:11: found the end of the template"},
        {"{{ 'abc }}", "a string has no end"},
        {"{{ (x }}", "t.jinja:1:7:"},
        {"{{ 1 / 0 }}", "division by zero"},
        {"a\xff", "t.jinja:1:2: byte 0xff is not valid UTF-8"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char out[200], marks[200];
        const bool ok = render(cases[i][0], "{\"x\": \"<s> Hi \"}", out, marks, sizeof out);
        CHECK(!ok && strstr(error.msg, cases[i][1]), "%s: %s", cases[i][0], error.msg);
    }
}

/* Repeats a text n times between two others. */
static char* repeated(const char* before, const char* text, size_t n, const char* after) {
    char* all = (char*)xmalloc(strlen(before) + n * strlen(text) + strlen(after) + 1);
    char* p = stpcpy(all, before);
    while (n-- > 0) { p = stpcpy(p, text); }
    strcpy(p, after);
    return all;
}

TEST(a_template_is_bounded) {
    static const char* const parts[][3] = {{"{{ ", "(", ""},
                                           {"{{ ", "[", ""},
                                           {"{{ ", "not ", "1 }}"},
                                           {"{{ ", "-", "1 }}"},
                                           {"{{ x", "|trim", " }}"},
                                           {"{{ x", ".a", " }}"},
                                           {"{{ 1", " + 1", " }}"},
                                           {"{{ 1", " if 1 else 1", " }}"},
                                           {"", "{% if x %}", ""},
                                           {"", "{% for i in x %}", ""},
                                           {"{% if 0 %}", "{% elif 0 %}", "{% endif %}"}};
    static const char* const loops[] = {
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set n = namespace(s='abcdefgh') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(l=[1]) %}{% for i in range(99) %}{% set n.l = n.l + n.l %}{% endfor %}",
        "{% set n = namespace(l=[1]) %}{% for i in range(9999) %}{% set n.l = [n.l] %}{% endfor %}{{ n.l }}",
        "{{ 'a' * 999999999 }}",
        "{{ [1] * 999999999 }}",
        "{{ range(100001) }}",
    };
    char out[8], marks[8];
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        char* text = repeated(parts[i][0], parts[i][1], 20000, parts[i][2]);
        const double start = now_seconds();
        const bool ok = render(text, "{\"x\": \"\"}", out, marks, sizeof out);
        CHECK(now_seconds() - start < 5, "%s: %.1f s", parts[i][1], now_seconds() - start);
        CHECK(ok || error.msg[0], "%s", parts[i][1]);
        free(text);
    }
    for (size_t i = 0; i < sizeof loops / sizeof *loops; i++) {
        const double start = now_seconds();
        CHECK(!render(loops[i], "{}", out, marks, sizeof out) && error.msg[0], "%s", loops[i]);
        CHECK(now_seconds() - start < 5, "%s: %.1f s", loops[i], now_seconds() - start);
    }
}

static Template shared;

static void* render_often(void* number) {
    TemplateArena arena = {NULL, 0};
    size_t wrong = 0;
    for (int i = 0; i < 200; i++) {
        Error e = NO_ERROR;
        TemplateRendered r;
        char want[32];
        const TemplateValue variables = template_dict(&arena);
        template_dict_set(&arena, variables, "n", template_int(*(int*)number));
        snprintf(want, sizeof want, "%d,%d", *(int*)number, *(int*)number * 2);
        wrong += !template_render(&shared, &arena, variables, NULL, &r, &e) || r.len != strlen(want) ||
                 memcmp(r.text, want, r.len) != 0;
        template_arena_reset(&arena);
    }
    template_arena_free(&arena);
    *(int*)number = (int)wrong;
    return NULL;
}

TEST(threads_share_a_template) {
    static const char text[] = "{% set x = n %}{% for i in [1, 2] %}{{ x * i }}{{ ',' if not loop.last }}{% endfor %}";
    pthread_t threads[4];
    int numbers[4] = {1, 20, 300, 4000};
    CHECK(template_parse(&shared, text, strlen(text), "t", &error), "%s", error.msg);
    for (int i = 0; i < 4; i++) { CHECK(pthread_create(&threads[i], NULL, render_often, &numbers[i]) == 0, "thread"); }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        CHECK(numbers[i] == 0, "%d wrong", numbers[i]);
    }
    template_free(&shared);
}

int main(void) { return test_all(); }
