/* fuzz_template.c -- parses the bytes as a chat template and renders it twice, with and without a question at the end: the
 * same bytes each time, valid UTF-8, each marked 0 or 1, and all spans of generations in order. */
#include "fuzz.h"
#include "llmc/text/template.h"

static const char variables_text[] =
    "{\"messages\": [{\"role\": \"system\", \"content\": \" a \"}, {\"role\": \"user\", \"content\": \"h\\u00e9 <s>\"}, "
    "{\"role\": "
    "\"assistant\", \"content\": \"</think>\\n\\nb\", \"tool_calls\": [{\"function\": {\"name\": \"f\", \"arguments\": {\"x\": "
    "1.5, "
    "\"y\": [null, true]}}}]}], \"tools\": null, \"n\": 7, \"eos_token\": \"</s>\"}";

static bool render(const Template* t, TemplateArena* a, const Json* j, bool ask, TemplateRendered* out) {
    Error e = NO_ERROR;
    struct tm now;
    memset(&now, 0, sizeof now);
    const TemplateValue variables = template_from_json(a, j, json_root(j));
    template_dict_set(a, variables, "bos_token", template_string(a, "<s>", 3, true));
    template_dict_set(a, variables, "add_generation_prompt", template_bool(ask));
    const bool ok = template_render(t, a, variables, &now, out, &e);
    fuzz_check_error(ok, &e);
    return ok;
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static Json j;
    Template t;
    Error e = NO_ERROR;
    if (!j.nodes) { must(json_parse(&j, xstrdup(variables_text), strlen(variables_text), "variables", &e), &e); }
    const bool parsed = template_parse(&t, (const char*)data, size, "fuzz", &e);
    fuzz_check_error(parsed, &e);
    if (!parsed) { return 0; }
    TemplateArena a = {NULL, 0}, b = {NULL, 0};
    for (int ask = 0; ask < 2; ask++) {
        TemplateRendered x, y;
        const bool ok = render(&t, &a, &j, ask, &x);
        REQUIRE(render(&t, &b, &j, ask, &y) == ok && x.len == y.len && (!x.len || memcmp(x.text, y.text, x.len) == 0));
        for (size_t i = 0, n = 0; i < x.len; i += n) {
            n = utf8_char_length(x.text + i, x.len - i);
            REQUIRE(n > 0 && x.from_template[i] <= 1);
        }
        for (size_t i = 0; i < x.num_generations; i++) { REQUIRE(x.generations[i].from <= x.generations[i].to); }
        template_arena_reset(&a);
        template_arena_reset(&b);
    }
    template_arena_free(&a);
    template_arena_free(&b);
    template_free(&t);
    return 0;
}
