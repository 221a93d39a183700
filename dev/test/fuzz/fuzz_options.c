/* fuzz_options.c -- parses the bytes as a command line of both trainers, with arguments separated by NUL. It prints the
 * options, writes them as JSON and reads them back. Nothing may crash, and accepted options must come back unchanged. */
#include "fuzz.h"
#include "llmc/run/cli/options.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    enum { MAX_ARGS = 64 };
    if (size == 0) { return 0; }
    const OptionScope trainer = data[0] & 1 ? ON_GPU : ON_CPU;
    char* text = fuzz_text(data, size);
    char* argv[MAX_ARGS];
    int argc = 0;
    for (size_t at = 0; at < size && argc < MAX_ARGS; at += strlen(text + at) + 1) { argv[argc++] = text + at; }
    Options o, back;
    Error e = NO_ERROR;
    OptionsResult result = options_parse(&o, argc, argv, trainer, &e);
    fuzz_check_error(result != OPTIONS_WRONG, &e);
    if (result == OPTIONS_OK) {
        FILE* screen = fopen("/dev/null", "w");
        options_print(screen, &o);
        fclose(screen);
        Json j;
        char* json = options_json_text(&o, NULL, NULL);
        must(json_parse(&j, json, strlen(json), "options", &e), &e);
        options_default(&back, trainer);
        must(options_merge(&back, &j, json_root(&j), &e), &e);
        REQUIRE(back.batch == o.batch && back.lr == o.lr && back.seed == o.seed && back.schedule == o.schedule);
        options_free(&back);
        json_free(&j);
    }
    options_free(&o);
    free(text);
    return 0;
}
