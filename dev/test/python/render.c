/* render.c -- renders chat templates for test_template.py. A line of stdin is {"template": TEXT, "variables": OBJECT}, and
 * answered by {"text": TEXT, "marks": "0110...", "generations": [[from, to], ...]}, in bytes, or by {"error": TEXT}. A line
 * without a template uses the one before it. bos_token and eos_token are the template's own; it is 27 November 2026, 12:34:56. */
#include "llmc/text/template.h"

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

int main(void) {
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
    return 0;
}
