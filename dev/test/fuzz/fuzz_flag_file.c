/* fuzz_flag_file.c -- reads the bytes as a file of flags, for both trainers. Accepted flags must come back unchanged from the
 * file that a checkpoint would hold. */
#include "fuzz.h"
#include "llmc/run/cli/options.h"

/* Parses the command line "train @path". */
static OptionsResult parse_file(Options* o, const char* path, OptionScope trainer, Error* e) {
    static char program[] = "train", argument[PATH_CAP + 1];
    char* argv[] = {program, argument};
    snprintf(argument, sizeof argument, "@%s", path);
    return options_parse(o, 2, argv, trainer, e);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    for (int trainer = ON_CPU; trainer <= ON_GPU; trainer++) {
        Options o, again;
        Error e = NO_ERROR;
        const OptionsResult result = parse_file(&o, fuzz_file(data, size), (OptionScope)trainer, &e);
        fuzz_check_error(result != OPTIONS_WRONG, &e);
        // the flags of one process are not written: some values are right only together with them. A step has
        // whole micro-batches
        if (result == OPTIONS_OK && !o.resume && !o.export_ && o.total_batch % ((int64_t)o.batch * o.seq) == 0) {
            char *text = NULL, a[OPTION_TEXT], b[OPTION_TEXT];
            size_t length = 0;
            FILE* f = xopen_memory(&text, &length);
            options_write_flags(f, &o);
            xclose_memory(f, &text);
            REQUIRE(parse_file(&again, fuzz_file((const uint8_t*)text, length), (OptionScope)trainer, &e) == OPTIONS_OK);
            for (int i = 0; i < NUM_OPTIONS; i++) {
                REQUIRE(option_specs[i].life == OPTION_LOCAL || strcmp(option_text(&o, i, a), option_text(&again, i, b)) == 0);
            }
            options_free(&again);
            free(text);
        }
        options_free(&o);
    }
    return 0;
}
