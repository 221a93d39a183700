/* test_options.c -- tests the flag table: exactly the flags of --help parse, and values are read whole and within their range.
 * Wrong usage exits with 2 and names the flag. Options survive a round trip through JSON. */
#include "llmc/run/cli/options.h"
#include "llmc/optim/optimizer.h"
#include "llmc/optim/schedule.h"
#include "dev/test/test.h"
#include <sys/wait.h>

enum { MAX_WORDS = 16 };

/* Parses a command line given as one string, words separated by spaces ("" stands for an empty word). */
static OptionsResult parse(Options* o, OptionScope trainer, const char* line, Error* e) {
    static char copy[1024];  // options point into it until the next call
    static char empty[1] = "", program[] = "train";
    char* argv[MAX_WORDS] = {program};
    int argc = 1;
    snprintf(copy, sizeof copy, "%s", line);
    for (char* word = strtok(copy, " "); word && argc < MAX_WORDS; word = strtok(NULL, " ")) {
        argv[argc++] = strcmp(word, "\"\"") == 0 ? empty : word;
    }
    memset(e, 0, sizeof *e);
    return options_parse(o, argc, argv, trainer, e);
}

static bool parses(OptionScope trainer, const char* line) {
    Options o;
    Error e;
    return parse(&o, trainer, line, &e) != OPTIONS_WRONG;
}

/* Returns a valid value of option i, never its default. */
static const char* good_value(int i, char* out, size_t cap) {
    const OptionSpec* s = &option_specs[i];
    switch (s->kind) {
        case OPTION_INT:
        case OPTION_LONG: snprintf(out, cap, "%.0f", s->min < 7 ? 7.0 : s->min); break;
        case OPTION_FLOAT: snprintf(out, cap, "%g", s->max < 1 ? s->max / 2 : 0.5); break;
        case OPTION_SIZE: snprintf(out, cap, "3G"); break;
        case OPTION_SWITCH: snprintf(out, cap, "%s", strcmp(s->def, "on") == 0 ? "off" : "on"); break;
        case OPTION_CHOICE: choice_word(s->value, choice_find(s->value, s->def) == 1 ? 2 : 1, out, cap); break;
        case OPTION_RECOMPUTE: snprintf(out, cap, "norm+swiglu:9,block:3"); break;
        default: snprintf(out, cap, "some/path"); break;
    }
    return out;
}

static bool same_value(const Options* a, const Options* b, int i) {
    char x[OPTION_TEXT], y[OPTION_TEXT];
    return strcmp(option_text(a, i, x), option_text(b, i, y)) == 0;
}

/* Parses a command line with one flag. Returns whether that worked, apart from a --total-batch that no longer divides. */
static bool set_alone(Options* o, OptionScope trainer, const char* line) {
    Error e;
    OptionsResult r = parse(o, trainer, line, &e);
    return r != OPTIONS_WRONG || strstr(e.msg, "wanted a multiple");
}

TEST(every_flag_of_the_table_sets_its_own_field_and_no_other) {
    Options plain;
    for (int i = 0; i < NUM_OPTIONS; i++) {
        char flag[OPTION_TEXT], value[64], line[256];
        const OptionScope trainer = option_specs[i].scope == ON_GPU ? ON_GPU : ON_CPU;
        options_default(&plain, trainer);
        option_flag(i, flag);
        good_value(i, value, sizeof value);
        for (int form = 0; form < 3; form++) {
            Options o;
            snprintf(line, sizeof line, form == 1 ? "%s=%s" : "%s %s", flag, value);
            for (char* p = line + 2; form == 2 && *p && *p != ' '; p++) {
                if (*p == '-') { *p = '_'; }
            }
            CHECK(set_alone(&o, trainer, line), "%s", line);
            CHECK(o.given[i], "%s does not count as given", line);
            for (int k = 0; k < NUM_OPTIONS; k++) {
                CHECK(same_value(&o, &plain, k) == (k != i), "%s: field %s", line, option_specs[k].name);
            }
        }
    }
}

TEST(every_alias_means_its_flag) {
    for (int i = 0; i < NUM_OPTIONS; i++) {
        const OptionSpec* s = &option_specs[i];
        const OptionScope trainer = s->scope == ON_GPU ? ON_GPU : ON_CPU;
        for (const char* a = s->aliases; *a;) {
            int len = (int)strcspn(a, " ");
            char value[64], line[256];
            Options o;
            snprintf(line, sizeof line, "%s%.*s %s", len > 2 ? "--" : "-", len, a, good_value(i, value, sizeof value));
            CHECK(set_alone(&o, trainer, line) && o.given[i], "%s", line);
            a += len + (a[len] == ' ');
        }
    }
}

TEST(names_and_aliases_are_unique) {
    for (int i = 0; i < NUM_OPTIONS; i++) {
        const OptionSpec* s = &option_specs[i];
        char flag[OPTION_TEXT], word[OPTION_TEXT];
        const char* value;
        bool negated;
        CHECK(option_find(option_flag(i, flag), &value, &negated) == i, "%s", flag);
        for (const char* a = s->aliases; *a;) {
            int len = (int)strcspn(a, " ");
            snprintf(word, sizeof word, "%s%.*s", len > 2 ? "--" : "-", len, a);
            CHECK(option_find(word, &value, &negated) == i, "%s", word);
            a += len + (a[len] == ' ');
        }
    }
}

TEST(defaults_lie_in_their_ranges_and_choices_follow_their_enums) {
    Options o;
    options_default(&o, ON_GPU);
    CHECK(o.batch == 4 && o.seq == 256 && o.lr == 3e-4 && o.beta2 == 0.95 && o.graph && o.steps == -1,
          "the documented defaults");
    CHECK(o.train == NULL && strcmp(o.model, "d4") == 0 && o.resume == NULL, "texts");
    char word[OPTION_TEXT];
    choice_word(option_specs[OPT_schedule].value, SCHEDULE_WSD, word, sizeof word);
    CHECK(strcmp(word, "wsd") == 0, "schedule %s", word);
    for (int i = 0; i < (int)(sizeof optimizer_rules / sizeof *optimizer_rules); i++) {
        choice_word(option_specs[OPT_optimizer].value, i, word, sizeof word);
        CHECK(strcmp(word, optimizer_rules[i].word) == 0, "optimizer %s", word);
    }
    choice_word(option_specs[OPT_export_dtype].value, EXPORT_F16, word, sizeof word);
    CHECK(strcmp(word, "f16") == 0, "export %s", word);
    choice_word(option_specs[OPT_master].value, MASTER_SPLIT, word, sizeof word);
    CHECK(strcmp(word, "split") == 0, "master %s", word);
    choice_word(option_specs[OPT_master].value, MASTER_NONE, word, sizeof word);
    CHECK(strcmp(word, "none") == 0, "master %s", word);
    choice_word(option_specs[OPT_moments].value, MOMENTS_BF16, word, sizeof word);
    CHECK(strcmp(word, "bf16") == 0, "moments %s", word);
    choice_word(option_specs[OPT_grad_dtype].value, GRAD_DTYPE_FP32, word, sizeof word);
    CHECK(strcmp(word, "fp32") == 0, "grad dtype %s", word);
}

TEST(values_are_read_whole_and_in_range) {
    const char* wrong =
        "--batch 0;--batch -1;--batch 1048577;--batch 4x;--batch 4.0;--batch \"\";--batch 1e3;--batch 0x10;--batch +4;"
        "--batch=;--lr nan;--lr inf;--lr -inf;--lr 1e999;--lr 3e-4x;--lr \"\";--lr 0x1p-3;--lr -1;--beta1 1;--beta2 1.0;"
        "--eps 0;--top-p 1.1;--seed -1;--seed 1e3;--steps -2;--steps 3000000000;--steps 99999999999999999999;"
        "--schedule cos;--schedule COSINE;--schedule 1;--schedule \"\";--schedule cosine|linear;--chat=maybe;--chat=;"
        "--no-chat=on;--export-dtype f64;-k cosin;-k 4;--final-lr-frac 2;--temperature -0.1;--val-batches 0;--tokens 0;"
        "--lr --batch;--train --val x;--train;--steps;batch 4;-batch 4;--b 4;--;-;--=4;--unknown;4;--no-batch 4;--no-;"
        "--batch 4 --total-batch 100;--chat --eval;--generate x --dry-run;--minutes 1 --steps 5";
    for (const char* line; (line = test_next(&wrong, ';')) != NULL;) {
        Options o;
        Error e;
        CHECK(parse(&o, ON_CPU, line, &e) == OPTIONS_WRONG && e.msg[0], "\"%s\" was taken", line);
    }
    const char* right =
        ";--batch 1048576;--lr 0;--lr .5;--lr 1e-3;--steps -1;--steps 0;--top-p 1;--top-p 0;--generate \"\";--prompt=--x;"
        "--train=--val;--minutes 5 --steps -1;--prompt \"\";--grad-clip 0;--eval on;--eval 0 --chat;--no-chat;"
        "--batch 2 --batch 4;--resume --steps 4";
    for (const char* line; (line = test_next(&right, ';')) != NULL;) {
        CHECK(parses(ON_CPU, line), "\"%s\" was refused", line);
    }
    Options o;
    Error e;
    parse(&o, ON_CPU, "--batch 2 --batch 8 --seed 9000000000000000000 --lr 1e-3", &e);
    CHECK(o.batch == 8 && o.seed == 9000000000000000000 && o.lr == 1e-3, "%d %lld %g", o.batch, (long long)o.seed, o.lr);
    parse(&o, ON_CPU, "--generate \"\"", &e);
    CHECK(o.generate && !*o.generate, "an empty prompt is a prompt");
    parse(&o, ON_CPU, "--prompt=--x", &e);
    CHECK(strcmp(o.prompt, "--x") == 0, "%s", o.prompt);
    parse(&o, ON_CPU, "--lr -0", &e);
    CHECK(!signbit(o.lr), "-0 is 0");
    parse(&o, ON_CPU, "--export --model d1", &e);
    CHECK(strcmp(e.msg, "--export: has no value: the next argument is the flag --model") == 0, "%s", e.msg);
    parse(&o, ON_CPU, "--exporr x", &e);
    CHECK(strstr(e.msg, "did you mean --export?"), "%s", e.msg);
    CHECK(parse(&o, ON_CPU, "--export x", &e) == OPTIONS_OK && strcmp(o.export_, "x") == 0, "%s", e.msg);
}

TEST(resume_takes_a_path_or_none) {
    Options o;
    Error e;
    parse(&o, ON_CPU, "--resume", &e);
    CHECK(o.resume && !*o.resume, "no path");
    parse(&o, ON_CPU, "--resume --batch 8", &e);
    CHECK(o.resume && !*o.resume && o.batch == 8, "a flag behind it");
    parse(&o, ON_CPU, "--resume out/step_00000010 --batch 8", &e);
    CHECK(o.resume && strcmp(o.resume, "out/step_00000010") == 0 && o.batch == 8, "a path");
    parse(&o, ON_CPU, "--resume=1", &e);
    CHECK(o.resume && strcmp(o.resume, "1") == 0, "a path named 1");
    parse(&o, ON_CPU, "-y -b 8", &e);
    CHECK(o.resume && !*o.resume && o.batch == 8, "llm.c's letter");
}

TEST(an_empty_name_of_a_file_is_refused_with_its_flag) {
    static const char* const wrong[] = {"--val \"\"",   "--tokenizer=",  "--model \"\"",
                                        "--tasks \"\"", "--verify \"\"", "--out \"\""};
    Options o;
    Error e;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        CHECK(parse(&o, ON_CPU, wrong[i], &e) == OPTIONS_WRONG && strstr(e.msg, "is empty, wanted "), "%s: %s", wrong[i],
              e.msg);
        CHECK(strncmp(e.msg, wrong[i], strcspn(wrong[i], " =")) == 0, "%s: %s", wrong[i], e.msg);
    }
    CHECK(parse(&o, ON_CPU, "@", &e) == OPTIONS_WRONG && strstr(e.msg, "@: names no file"), "%s", e.msg);
    CHECK(parse(&o, ON_CPU, "--prompt \"\"", &e) == OPTIONS_OK && !*o.prompt, "a text may be empty");
}

TEST(flags_of_the_gpu_are_refused_by_name_on_the_cpu) {
    Options o;
    Error e;
    CHECK(parse(&o, ON_CPU, "--recompute ffn", &e) == OPTIONS_WRONG && strstr(e.msg, "train_llama3cu"), "%s", e.msg);
    CHECK(
        parse(&o, ON_CPU, "--master none", &e) == OPTIONS_WRONG && strstr(e.msg, "--master") && strstr(e.msg, "train_llama3cu"),
        "%s", e.msg);
    CHECK(parse(&o, ON_GPU, "--recompute ffn", &e) == OPTIONS_OK && recompute_at(&o.recompute, 99).gate_up, "%s", e.msg);
    CHECK(parse(&o, ON_GPU, "-r ffn", &e) == OPTIONS_OK && recompute_at(&o.recompute, 99).gate_up, "llm.c's letter: %s", e.msg);
    CHECK(parse(&o, ON_GPU, "-r 2", &e) == OPTIONS_WRONG &&
              strstr(e.msg, "--recompute: is \"2\", wanted none, auto, or levels such as ffn"),
          "%s", e.msg);
    CHECK(parse(&o, ON_GPU, "-f 1 --no-graph --max-memory 15G", &e) == OPTIONS_OK, "%s", e.msg);
    CHECK(o.tf32 && !o.graph && o.max_memory == (uint64_t)15 << 30, "%d %d %llu", o.tf32, o.graph,
          (unsigned long long)o.max_memory);
}

TEST(recompute_takes_levels_with_numbers_of_blocks) {
    static const struct {
        const char *value, *same;  // as the user types it; as it is printed, or NULL: refused
        int norms, gate_up, block;
    } cases[] = {
        {"none", "none", 0, 0, 0},
        {"auto", "auto", 0, 0, 0},
        {"norm+swiglu", "norm+swiglu", ALL_BLOCKS, 0, 0},
        {"ffn", "ffn", ALL_BLOCKS, ALL_BLOCKS, 0},
        {"block", "block", ALL_BLOCKS, ALL_BLOCKS, ALL_BLOCKS},
        {"ffn:18", "ffn:18", 18, 18, 0},
        {"block:007", "block:7", 7, 7, 7},
        {"norm+swiglu,ffn:7", "norm+swiglu,ffn:7", ALL_BLOCKS, 7, 0},
        {"norm+swiglu:9,block:3", "norm+swiglu:9,block:3", 9, 3, 3},
        {"norm+swiglu:2147483646,ffn:2147483645,block:2147483644", "norm+swiglu:2147483646,ffn:2147483645,block:2147483644",
         2147483646, 2147483645, 2147483644},
        {"ffn:0", NULL, 0, 0, 0},
        {"ffn:-1", NULL, 0, 0, 0},
        {"ffn:", NULL, 0, 0, 0},
        {"ffn: 3", NULL, 0, 0, 0},
        {"ffn:3x", NULL, 0, 0, 0},
        {"ffn:3:3", NULL, 0, 0, 0},
        {"ffn:2147483647", NULL, 0, 0, 0},
        {"ffn:99999999999999999999", NULL, 0, 0, 0},
        {"ffn,", NULL, 0, 0, 0},
        {",ffn", NULL, 0, 0, 0},
        {"ffn,ffn:3", NULL, 0, 0, 0},            // the same level twice
        {"ffn,norm+swiglu:3", NULL, 0, 0, 0},    // a cheaper level later
        {"norm+swiglu:5,ffn:7", NULL, 0, 0, 0},  // in more blocks
        {"norm+swiglu,ffn", NULL, 0, 0, 0},      // in as many
        {"none:3", NULL, 0, 0, 0},
        {"auto,ffn", NULL, 0, 0, 0},
        {"ff", NULL, 0, 0, 0},
        {"ffnx", NULL, 0, 0, 0},
        {":3", NULL, 0, 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Recompute r;
        char text[OPTION_TEXT];
        memset(&r, -1, sizeof r);
        CHECK(recompute_read(&r, cases[i].value) == (cases[i].same != NULL), "%s", cases[i].value);
        if (!cases[i].same) {
            CHECK(r.blocks[0] == -1, "%s changed what was there", cases[i].value);
            continue;
        }
        CHECK(strcmp(recompute_text(&r, text, sizeof text), cases[i].same) == 0, "%s became %s", cases[i].value, text);
        CHECK(r.blocks[0] == cases[i].norms && r.blocks[1] == cases[i].gate_up && r.blocks[2] == cases[i].block, "%s: %d %d %d",
              cases[i].value, r.blocks[0], r.blocks[1], r.blocks[2]);
    }
    CHECK(!parses(ON_GPU, "--recompute="), "an empty value");
}

/* 0: keeps everything; 1, 2, 3: recomputes so many groups. */
static int groups_again(const Recompute* r, int l) {
    const Recomputed again = recompute_at(r, l);
    CHECK(again.norms >= again.gate_up && again.gate_up >= again.block, "block %d", l);
    return again.norms + again.gate_up + again.block;
}

TEST(recompute_counts_the_first_blocks) {
    Recompute r;
    CHECK(recompute_read(&r, "norm+swiglu,ffn:3,block:1"), "a list");
    CHECK(groups_again(&r, 0) == 3 && groups_again(&r, 1) == 2 && groups_again(&r, 2) == 2 && groups_again(&r, 3) == 1,
          "a list");
    recompute_limit(&r, 2);
    CHECK(groups_again(&r, 0) == 3 && groups_again(&r, 1) == 2 && groups_again(&r, 2) == 0, "of two blocks");
    recompute_set(&r, RECOMPUTE_FFN, 1);
    CHECK(groups_again(&r, 0) == 2 && groups_again(&r, 1) == 1 && groups_again(&r, 99) == 1, "a place in the order of cost");
}

TEST(sizes_of_memory_are_powers_of_1024) {
    static const struct {
        const char* text;
        uint64_t bytes;
    } cases[] = {{"0", 0},
                 {"17", 17},
                 {"2k", 2048},
                 {"512M", (uint64_t)512 << 20},
                 {"1.5G", (uint64_t)3 << 29},
                 {"15GiB", (uint64_t)15 << 30},
                 {"1T", (uint64_t)1 << 40},
                 {"4GB", (uint64_t)4 << 30},
                 {"8B", 8}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint64_t bytes = 1;
        CHECK(parse_size(cases[i].text, &bytes) && bytes == cases[i].bytes, "%s: %llu", cases[i].text,
              (unsigned long long)bytes);
    }
    static const char* const wrong[] = {"",     "G",   "-1G", "1X",        "1GG", "1 G", "1e9",
                                        "0x10", "inf", "nan", "99999999T", "1G1", "1iB"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        uint64_t bytes;
        CHECK(!parse_size(wrong[i], &bytes), "\"%s\" was taken", wrong[i]);
    }
}

TEST(an_unknown_flag_names_its_nearest) {
    static const struct {
        const char *typed, *meant;
    } cases[] = {{"--stpes", "--steps"},
                 {"--step", "--steps"},
                 {"--learning", ""},
                 {"--batchsize", "--batch"},
                 {"--batch-size", "--batch"},
                 {"--weight_dacay", "--weight-decay"},
                 {"--warm-up", "--warmup"},
                 {"--val-evry=3", "--val-every"},
                 {"--checkpoint", "--checkpoint-every"},
                 {"--temprature", "--temperature"},
                 {"--gen", "--generate"},
                 {"-batch", "--batch"},
                 {"--xyzzy", ""},
                 {"--topk", "--top-k"},
                 {"--hlep", "--help"},
                 {"--save-every=3", "--checkpoint-every"},
                 {"--learning_rate", "--lr"},
                 {"--num-epochs", "--epochs"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Options o;
        Error e;
        CHECK(parse(&o, ON_CPU, cases[i].typed, &e) == OPTIONS_WRONG, "%s", cases[i].typed);
        char want[100];
        snprintf(want, sizeof want, "did you mean %s?", cases[i].meant);
        CHECK(*cases[i].meant ? strstr(e.msg, want) != NULL : strstr(e.msg, "--help") != NULL, "%s: %s", cases[i].typed, e.msg);
    }
    Options o;
    Error e;
    parse(&o, ON_CPU, "--recompte", &e);
    CHECK(!strstr(e.msg, "--recompute"), "a flag of the other trainer is suggested: %s", e.msg);
}

/* Runs options_or_exit() in a child process; returns its exit status and the start of its output. */
static int run_child(OptionScope trainer, const char* a, const char* b, char* out, char* err, size_t cap) {
    const char* paths[2] = {test_file("out"), test_file("err")};
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        if (!freopen(paths[0], "w", stdout) || !freopen(paths[1], "w", stderr)) { _exit(99); }
        char program[] = "train", one[128], two[128];
        snprintf(one, sizeof one, "%s", a ? a : "");
        snprintf(two, sizeof two, "%s", b ? b : "");
        char* argv[] = {program, one, two};
        Options o;
        options_or_exit(&o, a ? b ? 3 : 2 : 1, argv, trainer);
        fflush(NULL);
        _exit(55);  // options_or_exit() returned
    }
    int status = 0;
    waitpid(child, &status, 0);
    snprintf(out, cap, "%s", test_text(paths[0]));
    snprintf(err, cap, "%s", test_text(paths[1]));
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(usage_errors_exit_2_and_help_exits_0_on_stdout) {
    enum { CAP = 1 << 16 };
    char* out = (char*)xmalloc(CAP);
    char* err = (char*)xmalloc(CAP);
    CHECK(run_child(ON_CPU, "--batch", "7", out, err, CAP) == 55 && !*err, "%s", err);
    CHECK(run_child(ON_CPU, "--batch", "0", out, err, CAP) == 2 && !*out, "%s", out);
    CHECK(strcmp(err, "error: --batch: is \"0\", wanted an integer from 1 to 1048576\n") == 0, "%s", err);
    CHECK(run_child(ON_CPU, "--stpes", "3", out, err, CAP) == 2, "%s", err);
    CHECK(strcmp(err, "error: unknown flag --stpes\n  hint: did you mean --steps?\n") == 0, "%s", err);
    CHECK(run_child(ON_CPU, "--version", NULL, out, err, CAP) == 0 && strstr(out, LLMC_VERSION) && !*err, "%s%s", out, err);
    for (int trainer = ON_CPU; trainer <= ON_GPU; trainer++) {
        CHECK(run_child((OptionScope)trainer, "--help", NULL, out, err, CAP) == 0 && !*err, "%s", err);
        for (int i = 0; i < NUM_OPTIONS; i++) {
            char flag[OPTION_TEXT], start[OPTION_TEXT + 4];
            snprintf(start, sizeof start, "\n  %s", option_flag(i, flag));
            bool there = strstr(out, start) != NULL, wanted = (option_specs[i].scope & trainer) != 0;
            CHECK(there == wanted, "%s in --help", flag);
        }
        // and --help lists nothing else: every flag at the start of a line parses
        for (const char* p = out; (p = strstr(p, "\n  --")) != NULL;) {
            char word[OPTION_TEXT];
            const char* value;
            bool negated;
            p += 3;
            snprintf(word, sizeof word, "%.*s", (int)strcspn(p, " ,\n"), p);
            CHECK(option_find(word, &value, &negated) >= 0, "--help names %s", word);
        }
        for (const char* p = out; *p; p += strcspn(p, "\n") + 1) {
            CHECK(strcspn(p, "\n") <= 100, "too wide: %.*s", (int)strcspn(p, "\n"), p);
        }
    }
    CHECK(run_child(ON_CPU, "-h", NULL, out, err, CAP) == 0, "-h");
    free(out);
    free(err);
}

/* Returns the output of options_print(), valid until the next call. */
static const char* printed(const Options* o) {
    static char text[1 << 14];
    FILE* f = fmemopen(text, sizeof text, "w");
    options_print(f, o);
    fclose(f);
    return text;
}

TEST(the_printed_configuration_names_every_number_and_is_narrow) {
    Options o;
    Error e;
    parse(&o, ON_CPU, "--val x*.bin --lr 1e-3 --schedule wsd", &e);
    const char* text = printed(&o);
    CHECK(strstr(text, "lr=0.001") && strstr(text, "val=x*.bin") && strstr(text, "schedule=wsd") && strstr(text, "beta2=0.95"),
          "%s", text);
    CHECK(!strstr(text, "recompute"), "%s", text);
    for (const char* p = text; *p; p += strcspn(p, "\n") + 1) { CHECK(strcspn(p, "\n") <= 100, "too wide: %s", text); }
}

TEST(options_come_back_from_json) {
    Options o, back;
    Error e;
    const char* line =
        "--train a\"b\\c.bin --lr 1.1e-5 --seed 8999999999999999999 --schedule linear --steps 77 --recompute norm+swiglu,ffn:7";
    CHECK(parse(&o, ON_GPU, line, &e) == OPTIONS_OK, "%s", e.msg);
    char* text = options_json_text(&o, NULL, NULL);
    Json j;
    CHECK(json_parse(&j, text, strlen(text), "state", &e), "%s", e.msg);
    Options first = o;  // its texts point into the buffer of parse()
    char train[64];
    snprintf(train, sizeof train, "%s", o.train);
    first.train = train;
    CHECK(parse(&back, ON_GPU, "--resume --steps 99 --out elsewhere", &e) == OPTIONS_OK, "%s", e.msg);
    CHECK(options_merge(&back, &j, json_root(&j), &e), "%s", e.msg);
    json_free(&j);
    CHECK(back.steps == 99 && strcmp(back.out, "elsewhere") == 0, "what was given stays: %d %s", back.steps, back.out);
    back.steps = first.steps;
    back.out = first.out;
    back.resume = NULL;
    for (int i = 0; i < NUM_OPTIONS; i++) { CHECK(same_value(&first, &back, i), "%s", option_specs[i].name); }
    options_free(&back);
}

TEST(local_options_stay_out_of_checkpoints_and_are_not_taken_over) {
    for (int i = 0; i < NUM_OPTIONS; i++) {
        const OptionSpec* s = &option_specs[i];
        char text[OPTION_TEXT], word[OPTION_TEXT], saved[4 * OPTION_TEXT];
        Options o;
        Error e = NO_ERROR;
        Json j;
        options_default(&o, ON_GPU);
        char* kept = options_json_text(&o, NULL, NULL);
        snprintf(word, sizeof word, "\"%s\":", s->name);
        CHECK((strstr(kept, word) != NULL) == (s->life == OPTION_SAVED), "%s in %s", s->name, kept);
        free(kept);

        // a checkpoint that nevertheless holds the option, with a value other than the default
        const bool bare = s->kind < OPTION_CHOICE && s->kind != OPTION_STRING;
        const char* good = good_value(i, text, sizeof text);
        if (s->kind == OPTION_SWITCH) { good = strcmp(good, "on") == 0 ? "true" : "false"; }
        if (s->kind == OPTION_SIZE) { good = "3000"; }
        snprintf(saved, sizeof saved, bare ? "{\"%s\":%s}" : "{\"%s\":\"%s\"}", s->name, good);
        CHECK(json_parse(&j, xstrdup(saved), strlen(saved), "state", &e), "%s", e.msg);
        Options before = o;
        CHECK(options_merge(&o, &j, json_root(&j), &e), "%s", e.msg);
        CHECK(same_value(&before, &o, i) == (s->life == OPTION_LOCAL), "%s", saved);
        json_free(&j);
        options_free(&o);
    }
    CHECK(option_specs[OPT_out].life == OPTION_LOCAL && option_specs[OPT_seed].life == OPTION_SAVED, "a folder and a seed");
}

TEST(options_of_another_trainer_pass_through_a_checkpoint_unchanged) {
    Options o;
    Error e;
    Json j, back;
    const char* saved = "{\"lr\":0.5,\"recompute\":\"ffn\",\"tf32\":true,\"new\\\"er\":-1.5e3,\"out\":\"x\",\"gone\":null}";
    CHECK(parse(&o, ON_CPU, "--lr 0.25", &e) == OPTIONS_OK, "%s", e.msg);
    CHECK(json_parse(&j, xstrdup(saved), strlen(saved), "state", &e), "%s", e.msg);
    char* text = options_json_text(&o, &j, json_root(&j));
    const char* tail = "\"recompute\":\"ffn\",\"tf32\":true,\"new\\\"er\":-1.5e3,\"gone\":null}";
    const size_t length = strlen(text), n = strlen(tail);
    CHECK(length > n && strcmp(text + length - n, tail) == 0, "%s", text);
    CHECK(json_parse(&back, text, length, "state", &e), "%s", e.msg);  // no member twice
    Options gpu;
    CHECK(parse(&gpu, ON_GPU, "", &e) == OPTIONS_OK && options_merge(&gpu, &back, json_root(&back), &e), "%s", e.msg);
    CHECK(gpu.lr == 0.25 && recompute_at(&gpu.recompute, 99).gate_up && gpu.tf32, "lr %g, recompute in %d", gpu.lr,
          gpu.recompute.blocks[RECOMPUTE_FFN]);
    options_free(&gpu);
    json_free(&back);
    json_free(&j);
}

TEST(saved_options_that_are_wrong_are_refused_by_name) {
    static const struct {
        const char *json, *named;
    } cases[] = {{"{\"batch\":0}", "--batch"},
                 {"{\"batch\":\"x\"}", "--batch"},
                 {"{\"schedule\":\"x\"}", "--schedule"},
                 {"{\"lr\":[]}", "lr"},
                 {"{\"model\":3}", "model"},
                 {"{\"model\":{}}", "model"},
                 {"{\"lr\":1e999}", "--lr"},
                 {"{\"lr\":true}", "--lr"},
                 {"{\"batch\":11111111111111111111111111111111111111111111111111111111111111111111111111}", "batch"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Options o;
        Error e;
        Json j;
        parse(&o, ON_CPU, "", &e);
        CHECK(json_parse(&j, xstrdup(cases[i].json), strlen(cases[i].json), "state", &e), "%s", e.msg);
        CHECK(!options_merge(&o, &j, json_root(&j), &e) && strstr(e.msg, cases[i].named), "%s: %s", cases[i].json, e.msg);
        json_free(&j);
        options_free(&o);
    }
}

int main(void) { return test_all(); }
