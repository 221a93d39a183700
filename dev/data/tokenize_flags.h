/* tokenize_flags.h -- the command line of ./tokenize. */
#ifndef DATA_TOKENIZE_FLAGS_H
#define DATA_TOKENIZE_FLAGS_H

#include "llmc/base/utils.h"  // defines: die_usage, xcalloc, LLMC_VERSION
#include "llmc/base/text.h"   // defines: edit_distance, text_starts

typedef struct {
    const char* tokenizer;  // NULL: the built-in bytes
    const char* out;
    const char* field;    // NULL: "text" in .jsonl files, and stdin is plain text
    const char* date;     // NULL: the date of the template
    double val_fraction;  // 0: no validation file
    uint64_t show;        // document to print, from 1; 0: none
    size_t train_bpe;     // tokens of the tokenizer to train; 0: none
    size_t num_specials;  // of them special, with --train-bpe
    bool specials, bytes, jsonl, decode, chat;
    int threads;  // 0: OpenMP's default
    char** files;
    int num_files;
} Args;

typedef enum {
    ARG_TOKENIZER,
    ARG_OUT,
    ARG_VAL_FRACTION,
    ARG_FIELD,
    ARG_CHAT,
    ARG_DATE,
    ARG_SPECIALS,
    ARG_BYTES,
    ARG_JSONL,
    ARG_DECODE,
    ARG_SHOW,
    ARG_TRAIN_BPE,
    ARG_THREADS,
    ARG_HELP,
    ARG_VERSION,
    NUM_ARGS
} Arg;

// clang-format off
static const struct { const char *name, *letter, *value, *help; } arg_specs[NUM_ARGS] = {
    [ARG_TOKENIZER] = {"tokenizer", NULL, "PATH", "tokenizer.json, tiktoken's tokenizer.model or a folder; default: bytes"},
    [ARG_OUT] = {"out", "o", "OUT.bin", "token file to write, or tokenizer.json of --train-bpe"},
    [ARG_VAL_FRACTION] = {"val-fraction", NULL, "F", "write OUT_train.bin, and the last F of the tokens to OUT_val.bin"},
    [ARG_FIELD] = {"field", NULL, "NAME", "text's field in a line of JSON; default: text. With it, - is lines of JSON"},
    [ARG_CHAT] = {"chat", NULL, NULL, "take conversations, a line of JSON each, in the form of the tokenizer's chat template"},
    [ARG_DATE] = {"date", NULL, "TEXT", "today's date in Llama 3.1's form; default: 26 Jul 2024"},
    [ARG_SPECIALS] = {"specials", NULL, NULL, "turn names of special tokens in the text into those tokens"},
    [ARG_BYTES] = {"bytes", NULL, NULL, "take the input as it is, though it looks like no text or is no UTF-8"},
    [ARG_JSONL] = {"jsonl", NULL, NULL, "encode {\"text\": ...} lines on stdin to {\"ids\": [...]} lines on stdout; no BOS"},
    [ARG_DECODE] = {"decode", NULL, NULL, "decode {\"ids\": [...]} lines on stdin to {\"text\": ...} lines on stdout"},
    [ARG_SHOW] = {"show", NULL, "N", "print document N of a token file, with [[ ]] around what is trained"},
    [ARG_TRAIN_BPE] = {"train-bpe", NULL, "N", "train a tokenizer of N tokens on the text; --chat adds Llama 3's chat tokens"},
    [ARG_THREADS] = {"threads", NULL, "N", "number of threads; default: all"},
    [ARG_HELP] = {"help", "h", NULL, "show this text"},
    [ARG_VERSION] = {"version", NULL, NULL, "print the version"},
};
// clang-format on

static inline void print_help(void) {
    printf(
        "usage: tokenize [--tokenizer PATH] -o OUT.bin FILE...            text to a token file\n"
        "       tokenize --tokenizer PATH --chat -o OUT.bin FILE.jsonl    conversations to one that trains the answers alone\n"
        "       tokenize [--tokenizer PATH] --jsonl | --decode            lines of JSON on stdin and stdout\n"
        "       tokenize [--tokenizer PATH] --show N FILE.bin             a document of a token file as text\n"
        "       tokenize --train-bpe N -o tokenizer.json FILE...          text to a tokenizer of N tokens\n\n"
        "A .jsonl file holds one document per line, in the field \"text\"; any other file is one document. A FILE may be -,\n"
        "/dev/stdin or /dev/fd/N: zcat FILE.gz | tokenize -o OUT.bin -\n"
        "A line of --chat has \"messages\" of \"role\" and \"content\"; \"conversations\" of \"from\" (human, gpt) and "
        "\"value\"; or\n"
        "\"prompt\" and \"completion\".\n\n");
    for (int i = 0; i < NUM_ARGS; i++) {
        char flag[64];
        snprintf(flag, sizeof flag, "%s%s%s--%s %s", arg_specs[i].letter ? "-" : "",
                 arg_specs[i].letter ? arg_specs[i].letter : "", arg_specs[i].letter ? ", " : "    ", arg_specs[i].name,
                 arg_specs[i].value ? arg_specs[i].value : "");
        printf("  %-24s %s\n", flag, arg_specs[i].help);
    }
}

/* Returns the flag that `arg` names, or dies and suggests the nearest one. */
static inline Arg find_arg(const char* arg) {
    char word[64];
    const bool is_long = arg[1] == '-';
    const size_t len = strcspn(arg, "=");
    snprintf(word, sizeof word, "%.*s", (int)len - 1 - is_long, arg + 1 + is_long);
    for (char* p = word; *p; p++) {
        if (*p == '_') { *p = '-'; }
    }
    int best = 0, best_distance = 1000;
    for (int i = 0; i < NUM_ARGS; i++) {
        const char* name = is_long ? arg_specs[i].name : arg_specs[i].letter;
        if (name && strcmp(word, name) == 0) { return (Arg)i; }
        int distance = edit_distance(word, arg_specs[i].name);
        if (distance < best_distance) {
            best = i;
            best_distance = distance;
        }
    }
    if (best_distance > (int)strlen(arg_specs[best].name) / 2) {
        die_usage("unknown flag %.100s\n  hint: --help lists all flags", arg);
    }
    die_usage("unknown flag %.100s\n  hint: did you mean --%s?", arg, arg_specs[best].name);
}

/* Returns the descriptor that -, /dev/stdin or /dev/fd/N names; -1: the path names a file. */
static inline int descriptor_of(const char* path) {
    if (strcmp(path, "-") == 0 || strcmp(path, "/dev/stdin") == 0) { return 0; }
    const char* number = text_starts(path, "/dev/fd/") ? path + strlen("/dev/fd/") : "";
    const size_t digits = strspn(number, "0123456789");
    return digits > 0 && digits < 9 && !number[digits] ? atoi(number) : -1;
}

/* Returns whether an input holds a document a line: all do with --chat. */
static inline bool holds_lines(const Args* a, const char* path) {
    const size_t len = strlen(path);
    if (a->chat) { return true; }
    return descriptor_of(path) >= 0 ? a->field != NULL : len >= 6 && strcmp(path + len - 6, ".jsonl") == 0;
}

/* Returns the name of the field that holds the text. */
static inline const char* text_field(const Args* a) { return a->field ? a->field : "text"; }

/* Writes the end of the command that reads the input from another program. */
static inline const char* reading_command(char* out, size_t cap, const Args* a, bool lines) {
    char fraction[48] = "", train[48] = "";
    if (a->val_fraction > 0) { snprintf(fraction, sizeof fraction, " --val-fraction %g", a->val_fraction); }
    if (a->train_bpe) {
        snprintf(train, sizeof train, " --train-bpe %zu%s", a->train_bpe, a->num_specials > 2 ? " --chat" : "");
    }
    snprintf(out, cap, "./tokenize%s%s%s%s%s%s -o %s -", train, a->tokenizer ? " --tokenizer " : "",
             a->tokenizer ? a->tokenizer : "",
             a->chat ? " --chat"
             : lines ? " --field "
                     : "",
             lines && !a->chat ? text_field(a) : "", fraction, a->out);
    return out;
}

static inline void check_inputs(const Args* a) {
    char command[2 * PATH_CAP];
    bool lines = false;
    for (int i = 0; i < a->num_files; i++) {
        const int fd = descriptor_of(a->files[i]);
        lines = lines || holds_lines(a, a->files[i]);
        for (int k = 0; k < i && fd >= 0; k++) {
            if (descriptor_of(a->files[k]) == fd) { die_usage("%s is given twice, but can be read once", a->files[i]); }
        }
    }
    if (a->field && !lines) {
        die_usage(
            "--field is for .jsonl files and for lines of JSON from -, but the input is %s\n"
            "  hint: cat %s | %s",
            a->files[0], a->files[0], reading_command(command, sizeof command, a, true));
    }
}

/* Checks that all flags belong to one job. */
static inline void check_jobs(const Args* a) {
    const char* text_job = a->train_bpe ? "train-bpe" : a->chat ? "chat" : "out";
    const char* job = a->jsonl ? "jsonl" : a->decode ? "decode" : a->show ? "show" : text_job;
    const bool lines = a->jsonl || a->decode, reads_text = !a->decode && !a->show, trains = a->train_bpe > 0;
    // which flags are given, and whether the job takes them
    const struct {
        const char* name;
        bool given, fits;
    } flags[] = {
        {"decode", a->decode, a->decode && !a->jsonl},
        {"show", a->show > 0, !lines},
        {"chat", a->chat, !lines && !a->show},
        {"train-bpe", trains, !lines && !a->show},
        {"out", a->out != NULL, !lines && !a->show},
        {"tokenizer", a->tokenizer != NULL, !trains},
        {"val-fraction", a->val_fraction > 0, !lines && !a->show && !trains},
        {"field", a->field != NULL, reads_text && (!a->chat || trains)},
        {"specials", a->specials, !a->chat && !a->show && !trains},
        {"bytes", a->bytes, reads_text && !lines && !a->chat && !trains},
    };
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        if (flags[i].given && !flags[i].fits) { die_usage("--%s goes without --%s", job, flags[i].name); }
    }
    if (a->date && (!a->chat || trains)) { die_usage("--date goes with --chat, wanted both or none"); }
    if (a->field && !*a->field) { die_usage("--field is \"\", wanted the name of a field"); }
    if (lines && a->num_files) { die_usage("--%s reads stdin, but a file is given: %s", job, a->files[0]); }
    if (a->show && a->num_files != 1) { die_usage("--show reads one token file, but %d are given", a->num_files); }
}

static inline double parse_number(const char* flag, const char* text, double min, double max, const char* wanted) {
    char* end;
    double value = strtod(text, &end);
    if (end == text || *end || !(value >= min && value <= max)) {
        die_usage("--%s is \"%.100s\", wanted %s", flag, text, wanted);
    }
    return value;
}

/* The same of a number without a fraction. */
static inline uint64_t parse_integer(const char* flag, const char* text, double min, double max, const char* wanted) {
    const double value = parse_number(flag, text, min, max, wanted);
    if (value != (double)(uint64_t)value) { die_usage("--%s is \"%.100s\", wanted %s", flag, text, wanted); }
    return (uint64_t)value;
}

static inline void parse_args(Args* a, int argc, char** argv) {
    memset(a, 0, sizeof *a);
    a->files = (char**)xcalloc((size_t)argc, sizeof(char*));
    bool flags_over = false;
    for (int i = 1; i < argc; i++) {
        if (flags_over || argv[i][0] != '-' || argv[i][1] == 0) {
            a->files[a->num_files++] = argv[i];
            continue;
        }
        if (strcmp(argv[i], "--") == 0) {
            flags_over = true;
            continue;
        }
        const Arg arg = find_arg(argv[i]);
        const char* name = arg_specs[arg].name;
        const char* value = strchr(argv[i], '=');
        value = value ? value + 1 : NULL;
        if (!arg_specs[arg].value && value) { die_usage("--%s takes no value", name); }
        if (arg_specs[arg].value && !value) {
            if (i + 1 == argc) { die_usage("--%s needs a value: %s", name, arg_specs[arg].value); }
            value = argv[++i];
        }
        switch (arg) {
            case ARG_TOKENIZER: a->tokenizer = value; break;
            case ARG_OUT: a->out = value; break;
            case ARG_VAL_FRACTION:
                a->val_fraction = parse_number(name, value, 1e-9, 1 - 1e-9, "a fraction above 0 and below 1");
                break;
            case ARG_FIELD: a->field = value; break;
            case ARG_CHAT: a->chat = true; break;
            case ARG_DATE: a->date = value; break;
            case ARG_SPECIALS: a->specials = true; break;
            case ARG_BYTES: a->bytes = true; break;
            case ARG_JSONL: a->jsonl = true; break;
            case ARG_DECODE: a->decode = true; break;
            case ARG_SHOW: a->show = parse_integer(name, value, 1, 1e15, "the number of a document, from 1"); break;
            case ARG_TRAIN_BPE:
                a->train_bpe = parse_integer(name, value, 1, 1 << 30, "a number of tokens, at most 1073741824");
                break;
            case ARG_THREADS:
                a->threads = (int)parse_integer(name, value, 1, 4096, "a number of threads from 1 to 4096");
                break;
            case ARG_HELP: print_help(); exit(0);
            case ARG_VERSION: printf("tokenize (llama3.c) %s\n", LLMC_VERSION); exit(0);
            case NUM_ARGS: break;
        }
    }
    check_jobs(a);
    if (a->train_bpe) {
        a->num_specials = a->chat ? 8 : 2;
        a->chat = false;  // the inputs are texts
        if (a->train_bpe < 256 + a->num_specials) {
            die_usage("--train-bpe is %zu, wanted at least %zu: 256 bytes and %zu special tokens", a->train_bpe,
                      256 + a->num_specials, a->num_specials);
        }
    }
    if (a->jsonl || a->decode || a->show) { return; }
    if (!a->out || !*a->out) {
        die_usage("--out is missing, wanted -o %s\n  hint: --help shows the usage",
                  a->train_bpe ? "tokenizer.json" : "OUT.bin, --jsonl, --decode or --show");
    }
    if (strcmp(a->out, "-") == 0) { die_usage("--out is -, wanted the name of a file: it is no stream"); }
    if (!a->num_files) { die_usage("no input file, wanted at least one text or .jsonl file, or -, after -o %s", a->out); }
    check_inputs(a);
}

#endif
