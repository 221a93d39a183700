/* text_rules_stub.c -- prints what text_rules.h reads from folders, a line of JSON each, for test_text_rules.py:
 * text_rules_stub PROMPT FOLDER... */
#include "llmc/files/config_file.h"
#include "llmc/text/question.h"
#include "llmc/text/text_rules.h"
#include "llmc/text/tokenizer_read.h"

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

int main(int argc, char** argv) {
    for (int i = 2; i < argc; i++) { print_rules(argv[i], argv[1]); }
    return 0;
}
