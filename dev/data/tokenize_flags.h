/* tokenize_flags.h -- the command line of ./tokenize. */
#ifndef DATA_TOKENIZE_FLAGS_H
#define DATA_TOKENIZE_FLAGS_H

#include "llmc/base/utils.h"  // defines: die_usage, xcalloc, LLMC_VERSION
#include "llmc/base/text.h"   // defines: edit_distance, text_ends, text_starts

#include <fnmatch.h>
#include <inttypes.h>

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

typedef struct {
    bool given[NUM_ARGS];
    const char* tokenizer;  // NULL: the built-in bytes
    const char* out;
    const char* field;      // NULL: "text" in .jsonl files, and stdin is plain text
    const char* date;       // NULL: the date of the template
    double val_fraction;    // 0: no validation file
    uint64_t show;          // document to print, from 1; 0: none
    uint64_t train_bpe;     // tokens of the tokenizer to train; 0: none
    uint64_t num_specials;  // of them special, with --train-bpe
    uint64_t threads;       // 0: OpenMP's default
    bool specials, bytes, jsonl, decode, chat;
    char** files;
    int num_files;
} Args;

typedef enum { ARG_ACTS, ARG_SWITCH, ARG_TEXT, ARG_FRACTION, ARG_COUNT } ArgKind;  // of the member that a flag sets

// clang-format off
#define TEXT(member) ARG_TEXT, offsetof(Args, member), 0, 0, NULL
#define SWITCH(member) ARG_SWITCH, offsetof(Args, member), 0, 0, NULL
#define COUNT(member) ARG_COUNT, offsetof(Args, member)
#define FRACTION(member) ARG_FRACTION, offsetof(Args, member)
#define ACTS ARG_ACTS, 0, 0, 0, NULL
static const struct {
    const char *name, *letter, *value, *help;
    ArgKind kind;
    size_t member;
    double min, max;     // of a number,
    const char* wanted;  // and its range in words
} arg_specs[NUM_ARGS] = {
    [ARG_TOKENIZER] = {"tokenizer", NULL, "PATH", "tokenizer.json, tiktoken's tokenizer.model or a folder; default: bytes",
        TEXT(tokenizer)},
    [ARG_OUT] = {"out", "o", "OUT.bin", "token file to write, or tokenizer.json of --train-bpe", TEXT(out)},
    [ARG_VAL_FRACTION] = {"val-fraction", NULL, "F", "write OUT_train.bin, and the last F of the tokens to OUT_val.bin",
        FRACTION(val_fraction), 1e-9, 1 - 1e-9, "a fraction above 0 and below 1"},
    [ARG_FIELD] = {"field", NULL, "NAME", "text's field in a line of JSON; default: text. With it, - is lines of JSON",
        TEXT(field)},
    [ARG_CHAT] = {"chat", NULL, NULL, "take conversations, a line of JSON each, in the form of the tokenizer's chat template",
        SWITCH(chat)},
    [ARG_DATE] = {"date", NULL, "TEXT", "today's date for chat templates that write one, as \"26 Jul 2024\"", TEXT(date)},
    [ARG_SPECIALS] = {"specials", NULL, NULL, "turn names of special tokens in the text into those tokens", SWITCH(specials)},
    [ARG_BYTES] = {"bytes", NULL, NULL, "take the input as it is, though it looks like no text or is no UTF-8", SWITCH(bytes)},
    [ARG_JSONL] = {"jsonl", NULL, NULL, "encode {\"text\": ...} lines on stdin to {\"ids\": [...]} lines on stdout; no BOS",
        SWITCH(jsonl)},
    [ARG_DECODE] = {"decode", NULL, NULL, "decode {\"ids\": [...]} lines on stdin to {\"text\": ...} lines on stdout",
        SWITCH(decode)},
    [ARG_SHOW] = {"show", NULL, "N", "print document N of a token file, with [[ ]] around what is trained",
        COUNT(show), 1, 1e15, "the number of a document, from 1"},
    [ARG_TRAIN_BPE] = {"train-bpe", NULL, "N", "train a tokenizer of N tokens on the text; --chat adds Llama 3's chat tokens",
        COUNT(train_bpe), 1, 1 << 30, "a number of tokens, at most 1073741824"},
    [ARG_THREADS] = {"threads", NULL, "N", "number of threads; default: all",
        COUNT(threads), 1, 4096, "a number of threads from 1 to 4096"},
    [ARG_HELP] = {"help", "h", NULL, "show this text", ACTS},
    [ARG_VERSION] = {"version", NULL, NULL, "print the version", ACTS},
};
#undef TEXT
#undef SWITCH
#undef COUNT
#undef FRACTION
#undef ACTS
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
    if (a->chat) { return true; }
    if (descriptor_of(path) >= 0) { return a->field != NULL; }
    return fnmatch("*.jsonl", path, FNM_CASEFOLD) == 0 || fnmatch("*.ndjson", path, FNM_CASEFOLD) == 0;
}

/* Returns the name of the field that holds the text. */
static inline const char* text_field(const Args* a) { return a->field ? a->field : "text"; }

/* Writes the end of the command that reads the input from another program. */
static inline const char* reading_command(char* out, size_t cap, const Args* a, bool lines) {
    char fraction[48] = "", train[48] = "";
    if (a->val_fraction > 0) { snprintf(fraction, sizeof fraction, " --val-fraction %g", a->val_fraction); }
    if (a->train_bpe) {
        snprintf(train, sizeof train, " --train-bpe %" PRIu64 "%s", a->train_bpe, a->num_specials > 2 ? " --chat" : "");
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

// the jobs, of which a command line has one; a later one counts if several are asked for
enum { JOB_OUT = 1, JOB_CHAT = 2, JOB_TRAIN_BPE = 4, JOB_SHOW = 8, JOB_DECODE = 16, JOB_JSONL = 32 };

// the jobs that take a flag, in the order in which flags are checked
static const struct {
    Arg arg;
    int jobs;
} arg_jobs[] = {
    {ARG_DECODE, JOB_DECODE},
    {ARG_SHOW, JOB_SHOW},
    {ARG_CHAT, JOB_OUT | JOB_CHAT | JOB_TRAIN_BPE},
    {ARG_TRAIN_BPE, JOB_TRAIN_BPE},
    {ARG_OUT, JOB_OUT | JOB_CHAT | JOB_TRAIN_BPE},
    {ARG_TOKENIZER, ~JOB_TRAIN_BPE},
    {ARG_VAL_FRACTION, JOB_OUT | JOB_CHAT},
    {ARG_FIELD, JOB_OUT | JOB_TRAIN_BPE | JOB_JSONL},
    {ARG_SPECIALS, JOB_OUT | JOB_DECODE | JOB_JSONL},
    {ARG_BYTES, JOB_OUT},
};

/* Checks that all flags belong to one job. */
static inline void check_jobs(const Args* a) {
    static const Arg names[] = {ARG_OUT, ARG_CHAT, ARG_TRAIN_BPE, ARG_SHOW, ARG_DECODE, ARG_JSONL};
    int job = 5;
    while (job > 0 && !a->given[names[job]]) { job--; }
    const char* name = arg_specs[names[job]].name;
    for (size_t i = 0; i < sizeof arg_jobs / sizeof *arg_jobs; i++) {
        const Arg arg = arg_jobs[i].arg;
        if (a->given[arg] && !(arg_jobs[i].jobs & 1 << job)) { die_usage("--%s goes without --%s", name, arg_specs[arg].name); }
    }
    const bool lines = a->jsonl || a->decode;
    if (a->date && 1 << job != JOB_CHAT) { die_usage("--date goes with --chat, wanted both or none"); }
    if (a->field && !*a->field) { die_usage("--field is \"\", wanted the name of a field"); }
    if (lines && a->num_files) { die_usage("--%s reads stdin, but a file is given: %s", name, a->files[0]); }
    if (a->show && a->num_files != 1) { die_usage("--show reads one token file, but %d are given", a->num_files); }
}

/* Checks what a job that writes a file needs. */
static inline void check_out(Args* a) {
    if (!a->out || !*a->out) {
        die_usage("--out is missing, wanted -o %s\n  hint: --help shows the usage",
                  a->train_bpe   ? "tokenizer.json"
                  : a->num_files ? "OUT.bin for the token file"
                                 : "OUT.bin, --train-bpe, --jsonl, --decode or --show");
    }
    if (strcmp(a->out, "-") == 0) { die_usage("--out is -, wanted the name of a file: it is no stream"); }
    if (a->train_bpe && !text_ends(a->out, ".json")) {  // a name without it is a folder, which --tokenizer takes
        char* file = (char*)xmalloc(strlen(a->out) + sizeof "/tokenizer.json");
        sprintf(file, "%s/tokenizer.json", a->out);
        a->out = file;
    }
    if (!a->num_files) { die_usage("no input file, wanted at least one text or .jsonl file, or -, after -o %s", a->out); }
    check_inputs(a);
}

/* Does what a flag asks for; `value`: NULL for a flag that takes none. */
static inline void set_arg(Args* a, Arg arg, const char* value) {
    void* member = (char*)a + arg_specs[arg].member;
    const ArgKind kind = arg_specs[arg].kind;
    char* end;
    if (arg == ARG_HELP) { print_help(); }
    if (arg == ARG_VERSION) { printf("tokenize (llama3.c) %s\n", LLMC_VERSION); }
    if (kind == ARG_ACTS) { exit(0); }
    a->given[arg] = true;
    if (kind == ARG_SWITCH) { *(bool*)member = true; }
    if (kind == ARG_TEXT) { *(const char**)member = value; }
    if (kind != ARG_FRACTION && kind != ARG_COUNT) { return; }
    const double number = strtod(value, &end);
    const bool fits = end > value && !*end && number >= arg_specs[arg].min && number <= arg_specs[arg].max;
    if (!fits || (kind == ARG_COUNT && number != (double)(uint64_t)number)) {
        die_usage("--%s is \"%.100s\", wanted %s", arg_specs[arg].name, value, arg_specs[arg].wanted);
    }
    if (kind == ARG_FRACTION) {
        *(double*)member = number;
    } else {
        *(uint64_t*)member = (uint64_t)number;
    }
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
        flags_over = strcmp(argv[i], "--") == 0;
        if (flags_over) { continue; }
        const Arg arg = find_arg(argv[i]);
        const char *name = arg_specs[arg].name, *wanted = arg_specs[arg].value, *equals = strchr(argv[i], '=');
        if (!wanted && equals) { die_usage("--%s takes no value", name); }
        if (wanted && !equals && i + 1 == argc) { die_usage("--%s needs a value: %s", name, wanted); }
        set_arg(a, arg, equals ? equals + 1 : wanted ? argv[++i] : NULL);
    }
    check_jobs(a);
    if (a->train_bpe) {
        a->num_specials = a->chat ? 8 : 2;
        a->chat = false;  // the inputs are texts
        if (a->train_bpe < 256 + a->num_specials) {
            die_usage("--train-bpe is %" PRIu64 ", wanted at least %" PRIu64 ": 256 bytes and %" PRIu64 " special tokens",
                      a->train_bpe, 256 + a->num_specials, a->num_specials);
        }
    }
    if (!a->jsonl && !a->decode && !a->show) { check_out(a); }
}

#endif
