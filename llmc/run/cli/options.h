/* options.h -- the command line of the trainers: one table of flags.
 *
 * options.def is the only list. From it come the fields of `Options`, the parser, the ranges, --help, the printed
 * configuration, and the JSON in the log and in checkpoints. So no flag can be missing in one of them.
 *
 * Grammar: --name value or --name=value. '_' and '-' are the same inside a name. llm.c's letters are aliases (-b 4). There
 * are no positional arguments; @FILE stands for the flags of a file (flag_file.h). A switch stands alone (--chat) or takes
 * on/off, true/false, yes/no, 1/0; --no-name is off. If a flag is given twice, the last one wins. A value that is itself a flag
 * must be written --name=value.
 * A number must be the whole argument, without trailing characters; inf and nan are refused. Memory sizes are written as
 * 15G, 512M or in bytes.
 *
 * options_parse() never exits and never prints: it returns what to do next and puts the cause into an Error, for the tests
 * and the fuzzer. main() calls options_or_exit(), which prints: --help on stdout ends with 0, wrong usage with 2.
 * Text values point into argv, into the table or into a file of flags. options_merge() allocates its own; options_free() frees
 * them.
 */
#ifndef LLMC_OPTIONS_H
#define LLMC_OPTIONS_H

#include "llmc/base/utils.h"         // defines: fail, die, die_usage
#include "llmc/files/json.h"         // defines: json_get, json_text, json_write_text, json_write_double
#include "llmc/run/cli/flag_file.h"  // defines: FlagFile, flag_file_open, flag_file_next, flag_write
#include "llmc/run/cli/recompute.h"  // defines: Recompute, recompute_read, recompute_text
#include "llmc/run/cli/synonyms.h"   // defines: flag_synonym
#include "llmc/base/text.h"          // defines: edit_distance, print_names
#include <math.h>
#include <sys/ioctl.h>

typedef enum { ON_CPU = 1, ON_GPU = 2, ON_BOTH = 3 } OptionScope;  // the trainers that accept a flag

typedef enum { OPTION_SAVED, OPTION_LOCAL } OptionLife;  // stored in checkpoints, or local to this process

// Choices, in the order of the words in the table. Other enums: --schedule's is in
// optim/schedule.h, --documents' in files/rows.h, --master's in optim/optimizer.h.
typedef enum { EXPORT_AUTO, EXPORT_F32, EXPORT_BF16, EXPORT_F16, EXPORT_Q8_0 } ExportDtype;  // AUTO: see the help
typedef enum { LORA_ON_QKVO, LORA_ON_FFN, LORA_ON_ALL } LoraOn;
typedef enum { ZERO_1, ZERO_2, ZERO_3 } Zero;
typedef enum { GRAD_DTYPE_PARAM, GRAD_DTYPE_FP32, GRAD_DTYPE_AUTO } GradDtype;
typedef enum { MOMENTS_FP32, MOMENTS_BF16 } MomentsKind;
typedef enum { OFFLOAD_AUTO, OFFLOAD_OFF, OFFLOAD_OPTIMIZER, OFFLOAD_GRADIENTS, OFFLOAD_WEIGHTS } Offload;  // each moves more

typedef enum {
    OPTION_STRING,
    OPTION_INT,
    OPTION_LONG,
    OPTION_FLOAT,
    OPTION_SIZE,
    OPTION_SWITCH,
    OPTION_CHOICE,
    OPTION_RESUME,
    OPTION_RECOMPUTE
} OptionKind;

#define OPTION_CTYPE_STRING const char*
#define OPTION_CTYPE_INT int
#define OPTION_CTYPE_LONG int64_t
#define OPTION_CTYPE_FLOAT double
#define OPTION_CTYPE_SIZE uint64_t
#define OPTION_CTYPE_SWITCH bool
#define OPTION_CTYPE_CHOICE int
#define OPTION_CTYPE_RESUME const char*
#define OPTION_CTYPE_RECOMPUTE Recompute

typedef enum {
#define OPTION(kind, field, ...) OPT_##field,
#include "llmc/run/cli/options.def"
#undef OPTION
    NUM_OPTIONS
} OptionIndex;

enum { MAX_FLAG_FILES = 16 };

typedef struct {
#define OPTION(kind, field, ...) OPTION_CTYPE_##kind field;
#include "llmc/run/cli/options.def"
#undef OPTION
    bool given[NUM_OPTIONS];          // whether the flag OPT_<field> is on the command line
    bool offload_auto;                // --offload auto: `offload` is what choose_offload() took
    OptionScope trainer;              // ON_CPU or ON_GPU
    char* own_text[NUM_OPTIONS];      // text values that option_own_text() was given
    char* file_text[MAX_FLAG_FILES];  // text of each @FILE; values point into it
    int num_files;
} Options;

typedef struct {
    OptionKind kind;
    const char* name;  // name of the field: see option_name_length()
    const char* aliases;
    const char* def;  // NULL: not given
    double min, max;
    OptionScope scope;
    OptionLife life;
    const char* group;
    const char* value;
    const char* help;
    size_t offset;  // of the field in Options
} OptionSpec;

static const OptionSpec option_specs[NUM_OPTIONS] = {
#define OPTION(kind, field, aliases, def, min, max, trainer, life, group, value, help) \
    {OPTION_##kind, #field,        aliases, def,   (double)(min), (double)(max),       \
     ON_##trainer,  OPTION_##life, group,   value, help,          offsetof(Options, field)},
#include "llmc/run/cli/options.def"
#undef OPTION
};

static inline const char* trainer_name(OptionScope trainer) { return trainer == ON_GPU ? "train_llama3cu" : "train_llama3"; }

enum { OPTION_TEXT = 64 };  // buffer size for a flag's name, or for any value except a text

static inline void* option_field(Options* o, int i) { return (char*)o + option_specs[i].offset; }
static inline const void* option_value(const Options* o, int i) { return (const char*)o + option_specs[i].offset; }

/* Returns the length of an option's name: the name of its field, without a '_' at the end. The flag has '-' for '_'. */
static inline size_t option_name_length(const OptionSpec* s) {
    const size_t n = strlen(s->name);
    return n - (s->name[n - 1] == '_');
}

/* Writes the flag of option i, such as "--val-every", and returns `out`. */
static inline const char* option_flag(int i, char* out /* OPTION_TEXT */) {
    const OptionSpec* s = &option_specs[i];
    snprintf(out, OPTION_TEXT, "--%.*s", (int)option_name_length(s), s->name);
    for (char* p = out; *p; p++) {
        if (*p == '_') { *p = '-'; }
    }
    return out;
}

// ---------------------------------------------------------------------------------------------------------------------
// values

/* Parses "15G", "512MiB", "1.5g" or a plain number into bytes; units are powers of 1024. False: not a size. */
static inline bool parse_size(const char* text, uint64_t* bytes) {
    char* end = NULL;
    if (*text < '0' || *text > '9') { return false; }
    double value = strtod(text, &end);
    static const char units[] = "KMGT";
    const char* unit = *end ? strchr(units, *end & ~0x20) : NULL;
    double scale = 1;
    if (unit && *unit) {
        for (const char* u = units; u <= unit; u++) { scale *= 1024; }
        end++;
        if (*end == 'i' && (end[1] == 'B' || end[1] == 'b')) { end++; }
    }
    if (*end == 'B' || *end == 'b') { end++; }
    if (*end != 0 || !(value * scale <= 9e18) || strpbrk(text, "xXpPeEnN")) { return false; }
    *bytes = (uint64_t)(value * scale);
    return true;
}

/* Returns the index of `word` in "a|b|c", or -1. */
static inline int choice_find(const char* words, const char* word) {
    size_t n = strlen(word);
    for (int i = 0; *words; i++) {
        size_t len = strcspn(words, "|");
        if (len == n && memcmp(words, word, n) == 0) { return i; }
        words += len + (words[len] == '|');
    }
    return -1;
}

/* Copies word `i` of "a|b|c" to `out`. */
static inline void choice_word(const char* words, int i, char* out, size_t cap) {
    while (i-- > 0) { words += strcspn(words, "|") + 1; }
    snprintf(out, cap, "%.*s", (int)strcspn(words, "|"), words);
}

/* Returns 1 for on, 0 for off, -1 if the text is neither. */
static inline int switch_value(const char* text) {
    const int i = choice_find("off|on|false|true|no|yes|0|1", text);
    return i < 0 ? -1 : i & 1;
}

/* Returns the value of option i as the user would type it, either the text itself or `out`; "" for a text not given. */
static inline const char* option_text(const Options* o, int i, char* out /* OPTION_TEXT */) {
    const OptionSpec* s = &option_specs[i];
    const void* v = option_value(o, i);
    switch (s->kind) {
        case OPTION_STRING:
        case OPTION_RESUME: return *(const char* const*)v ? *(const char* const*)v : "";
        case OPTION_INT: snprintf(out, OPTION_TEXT, "%d", *(const int*)v); break;
        case OPTION_LONG: snprintf(out, OPTION_TEXT, "%lld", (long long)*(const int64_t*)v); break;
        case OPTION_SIZE: snprintf(out, OPTION_TEXT, "%llu", (unsigned long long)*(const uint64_t*)v); break;
        case OPTION_SWITCH: snprintf(out, OPTION_TEXT, "%s", *(const bool*)v ? "on" : "off"); break;
        case OPTION_CHOICE: {
            const int word = i == OPT_offload && o->offload_auto ? OFFLOAD_AUTO : *(const int*)v;
            choice_word(s->value, word, out, OPTION_TEXT);
            break;
        }
        case OPTION_RECOMPUTE: return recompute_text((const Recompute*)v, out, OPTION_TEXT);
        case OPTION_FLOAT: {
            // the shortest text that reads back as the same double
            double d = *(const double*)v;
            for (int digits = 1; digits <= 17; digits++) {
                snprintf(out, OPTION_TEXT, "%.*g", digits, d);
                if (strtod(out, NULL) == d) { break; }
            }
            if (d >= 10 && d < 1e6 && d == floor(d)) { snprintf(out, OPTION_TEXT, "%.0f", d); }  // 10, not 1e+01
            break;
        }
    }
    return out;
}

/* Fails with a message such as: --batch: is "0", wanted an integer from 1 to 1048576. */
static inline bool option_refuse(int i, const char* text, Error* e) {
    const OptionSpec* s = &option_specs[i];
    char flag[OPTION_TEXT];
    option_flag(i, flag);
    if (i == OPT_lora && is_directory(text)) {
        return fail(e, "--lora: %s is a folder, wanted the rank of new adapters\n  hint: --model takes a folder of adapters",
                    text);
    }
    switch (s->kind) {
        case OPTION_INT:
        case OPTION_LONG: return fail(e, "%s: is \"%.200s\", wanted an integer from %.0f to %.16g", flag, text, s->min, s->max);
        case OPTION_FLOAT: return fail(e, "%s: is \"%.200s\", wanted a number from %.10g to %.10g", flag, text, s->min, s->max);
        case OPTION_SIZE: return fail(e, "%s: is \"%.200s\", wanted a size of memory such as 15G or 512M", flag, text);
        case OPTION_SWITCH: return fail(e, "%s: is \"%.200s\", wanted on or off", flag, text);
        case OPTION_CHOICE: return fail(e, "%s: is \"%.200s\", wanted one of %s", flag, text, s->value);
        case OPTION_RECOMPUTE:
            return fail(e, "%s: is \"%.200s\", wanted none, auto, or levels such as ffn, ffn:18 or norm+swiglu,ffn:7", flag,
                        text);
        default: return fail(e, "%s: has no value", flag);
    }
}

/* Reads a text into the field of an option. Returns false, with the field as it was, if it is no such value. */
static inline bool option_read(void* field, const OptionSpec* s, const char* text) {
    char* end = NULL;
    errno = 0;
    switch (s->kind) {
        case OPTION_STRING:
        case OPTION_RESUME: *(const char**)field = text; return true;
        case OPTION_INT:
        case OPTION_LONG: {
            const bool number = *text == '-' || (*text >= '0' && *text <= '9');
            const long long v = number ? strtoll(text, &end, 10) : 0;
            if (!number || end == text || *end || errno == ERANGE || (double)v < s->min || (double)v > s->max) { return false; }
            if (s->kind == OPTION_INT) { *(int*)field = (int)v; }
            if (s->kind == OPTION_LONG) { *(int64_t*)field = v; }
            return true;
        }
        case OPTION_FLOAT: {
            // strtod alone would also take "inf", "nan", hexadecimal numbers and leading spaces
            const bool number = *text && strspn(text, "+-.0123456789eE") == strlen(text);
            const double v = number ? strtod(text, &end) : NAN;
            if (!number || end == text || *end || !(v >= s->min && v <= s->max)) { return false; }
            *(double*)field = v + 0.0;  // -0 becomes 0
            return true;
        }
        case OPTION_SIZE: return parse_size(text, (uint64_t*)field);
        case OPTION_SWITCH: {
            const int on = switch_value(text);
            if (on >= 0) { *(bool*)field = on == 1; }
            return on >= 0;
        }
        case OPTION_CHOICE: {
            const int place = choice_find(s->value, text);
            if (place >= 0) { *(int*)field = place; }
            return place >= 0;
        }
        case OPTION_RECOMPUTE: return recompute_read((Recompute*)field, text);
    }
    return false;
}

/* Sets option i from a text. */
static inline bool option_set(Options* o, int i, const char* text, Error* e) {
    return option_read(option_field(o, i), &option_specs[i], text) || option_refuse(i, text, e);
}

/* Sets every option to its default. */
static inline void options_default(Options* o, OptionScope trainer) {
    Error e = NO_ERROR;
    memset(o, 0, sizeof *o);
    o->trainer = trainer;
    for (int i = 0; i < NUM_OPTIONS; i++) {
        if (option_specs[i].def) { option_set(o, i, option_specs[i].def, &e); }
    }
    if (e.msg[0]) { die("the option table is wrong: %s", e.msg); }
}

// ---------------------------------------------------------------------------------------------------------------------
// names

/* Returns whether text[0..n) equals `name`; '-' and '_' are the same. */
static inline bool option_same_name(const char* text, size_t n, const char* name, size_t name_len) {
    if (n != name_len) { return false; }
    for (size_t k = 0; k < n; k++) {
        if ((text[k] == '_' ? '-' : text[k]) != (name[k] == '_' ? '-' : name[k])) { return false; }
    }
    return true;
}

/* Returns the option that an argument names ("--val-every", "--val_every=3", "-v"), or -1. Sets *value to the text after '='
 * or to NULL, and *negated to whether it is --no-name of a switch. */
static inline int option_find(const char* arg, const char** value, bool* negated) {
    *value = NULL;
    *negated = false;
    if (arg[0] != '-' || !arg[1]) { return -1; }
    const bool two = arg[1] == '-';
    const char* text = arg + (two ? 2 : 1);
    const size_t n = strcspn(text, "=");
    if (text[n] == '=') { *value = text + n + 1; }
    const bool no = two && n > 3 && option_same_name(text, 3, "no-", 3);
    for (int i = 0; i < NUM_OPTIONS; i++) {
        const OptionSpec* s = &option_specs[i];
        if (two && option_same_name(text, n, s->name, option_name_length(s))) { return i; }
        if (no && s->kind == OPTION_SWITCH && option_same_name(text + 3, n - 3, s->name, option_name_length(s))) {
            *negated = true;
            return i;
        }
        for (const char* a = s->aliases; *a;) {
            size_t len = strcspn(a, " ");
            if ((len > 2) == two && option_same_name(text, n, a, len)) { return i; }
            a += len + (a[len] == ' ');
        }
    }
    return -1;
}

/* Fails with the unknown argument, and suggests the closest flag: by a common prefix or by a small edit distance. */
static inline bool option_unknown(const char* arg, OptionScope trainer, Error* e) {
    if (arg[0] != '-') {
        return fail(e, "unexpected argument \"%.200s\"\n  hint: put a flag before each value, and quotes around a pattern",
                    arg);
    }
    char typed[OPTION_TEXT];
    snprintf(typed, sizeof typed, "%.*s", (int)strcspn(arg, "="), arg);
    char* word = typed + strspn(typed, "-");
    for (char* p = word; *p; p++) {
        if (*p == '_') { *p = '-'; }
    }
    const char* known = flag_synonym(word);
    if (known) { return fail(e, "unknown flag %.200s\n  hint: %s", arg, known); }
    int best = -1, best_distance = 0;
    for (int i = 0; i < NUM_OPTIONS; i++) {
        if (!(option_specs[i].scope & trainer)) { continue; }
        char flag[OPTION_TEXT];
        const char* name = option_flag(i, flag) + 2;
        int distance = edit_distance(word, name);
        size_t typed_len = strlen(word);
        bool start = typed_len >= 3 && strncmp(word, name, typed_len) == 0;
        bool longer = strlen(name) >= 3 && strncmp(word, name, strlen(name)) == 0;
        if (longer && distance > 2) { distance = 2; }
        if (start) { distance = 1; }
        if (distance > 2 && distance * 3 > (int)strlen(name)) { continue; }
        if (distance >= (int)strlen(name)) { continue; }
        if (best < 0 || distance < best_distance) {
            best = i;
            best_distance = distance;
        }
    }
    char flag[OPTION_TEXT];
    if (best >= 0) { return fail(e, "unknown flag %.200s\n  hint: did you mean %s?", arg, option_flag(best, flag)); }
    return fail(e, "unknown flag %.200s\n  hint: --help lists all flags", arg);
}

// ---------------------------------------------------------------------------------------------------------------------
// the parser

typedef enum { OPTIONS_OK, OPTIONS_HELP, OPTIONS_SHOW_VERSION, OPTIONS_WRONG } OptionsResult;

/* Returns whether --export names a GGUF file, not a folder. */
static inline bool options_export_gguf(const Options* o) {
    const size_t n = o->export_ ? strlen(o->export_) : 0;
    return n > 5 && strcmp(o->export_ + n - 5, ".gguf") == 0;
}

/* Checks what involves several options: two jobs at once, flags that exclude each other. */
static inline bool options_check(const Options* o, Error* e) {
    static const int jobs[] = {OPT_generate, OPT_chat, OPT_answer, OPT_eval, OPT_export_, OPT_dry_run, OPT_verify};
    const bool chosen[] = {o->generate != NULL, o->chat, o->answer, o->eval, o->export_ != NULL, o->dry_run, o->verify != NULL};
    int first = -1;
    char a[OPTION_TEXT], b[OPTION_TEXT];
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++) {
        if (!chosen[i]) { continue; }
        if (first >= 0) {
            return fail(e, "%s and %s are two jobs, wanted only one", option_flag(jobs[first], a), option_flag(jobs[i], b));
        }
        first = i;
    }
    if (o->minutes > 0 && o->given[OPT_steps] && o->steps >= 0) {
        return fail(e, "--steps and --minutes both set the length of the run, wanted only one");
    }
    if (o->epochs > 0 && (o->minutes > 0 || (o->given[OPT_steps] && o->steps >= 0))) {
        return fail(e, "--epochs and %s both set the length of the run, wanted only one",
                    o->minutes > 0 ? "--minutes" : "--steps");
    }
    if (o->eval && o->tasks && o->val) { return fail(e, "--eval takes --val or --tasks, wanted only one of them"); }
    // --batch that is not given, and --seq of a run that is resumed, are not known yet: plan_make() checks them
    if (!o->resume && o->given[OPT_batch] && o->total_batch % ((int64_t)o->batch * o->seq) != 0) {
        return fail(e, "--total-batch: is %lld, wanted a multiple of batch * seq = %d * %d = %lld", (long long)o->total_batch,
                    o->batch, o->seq, (long long)o->batch * o->seq);
    }
    if (o->export_dtype == EXPORT_Q8_0 && !options_export_gguf(o)) {
        return fail(e, "--export-dtype: q8_0 is a type of GGUF files, wanted f32, bf16 or f16, or --export FILE.gguf");
    }
    return true;
}

/* Returns the value of option i, which argv[*a] names. It is `value` if the argument has '='; otherwise the next argument
 * (*a then advances), or what a switch or --resume means alone. Returns NULL and sets *e if there is no value. */
static inline const char* option_argument(int i, const char* value, int* a, int argc, char** argv, Error* e) {
    const OptionSpec* s = &option_specs[i];
    const char* next = *a + 1 < argc ? argv[*a + 1] : NULL;
    if (value) { return value; }
    if (s->kind == OPTION_SWITCH) { return next && switch_value(next) >= 0 ? argv[++*a] : "on"; }
    if (s->kind == OPTION_RESUME) { return next && next[0] && next[0] != '-' ? argv[++*a] : ""; }
    const char* unused;
    bool other;
    if (next && option_find(next, &unused, &other) < 0) { return argv[++*a]; }
    char flag[OPTION_TEXT];
    const char* meant = s->kind == OPTION_STRING ? "" : ", wanted ";
    fail(e, "%s: has no value%s%s%s%.200s", option_flag(i, flag), meant, *meant ? s->value : "",
         next ? ": the next argument is the flag " : "", next ? next : "");
    return NULL;
}

/* Parses argv[*a], and its value if that is the next argument. */
static inline bool options_parse_one(Options* o, int* a, int argc, char** argv, Error* e) {
    const char* arg = argv[*a];
    const char* value;
    bool negated;
    const int i = option_find(arg, &value, &negated);
    if (i < 0) { return option_unknown(arg, o->trainer, e); }
    const OptionScope scope = option_specs[i].scope;
    if (!(scope & o->trainer)) {
        char flag[OPTION_TEXT];
        return fail(e, "%s: is only for %s", option_flag(i, flag),
                    scope == ON_GPU ? "the CUDA trainer, train_llama3cu" : "the CPU trainer");
    }
    if (negated && value) { return fail(e, "%.200s: takes no value", arg); }
    value = option_argument(i, negated ? "off" : value, a, argc, argv, e);
    const OptionSpec* s = &option_specs[i];
    if (value && !*value && s->kind == OPTION_STRING && strcmp(s->value, "TEXT") != 0) {  // "$NAME" of an unset variable
        char flag[OPTION_TEXT];
        return fail(e, "%s: is empty, wanted %s", option_flag(i, flag), s->value);
    }
    o->given[i] = value && option_set(o, i, value, e);
    return o->given[i];
}

/* Parses the flags of a file. */
static inline bool options_parse_file(Options* o, const char* path, Error* e) {
    FlagFile f;
    if (!*path) { return fail(e, "@: names no file of flags, wanted @FILE"); }
    if (o->num_files == MAX_FLAG_FILES) { return fail(e, "@%s: wanted at most %d files of flags", path, MAX_FLAG_FILES); }
    if (!flag_file_open(&f, path, e)) { return false; }
    o->file_text[o->num_files++] = f.text;
    for (char* argument; (argument = flag_file_next(&f)) != NULL;) {
        Error cause = NO_ERROR;
        const char* value = NULL;
        bool negated;
        int a = 0;
        const int i = option_find(argument, &value, &negated);
        const bool more = i >= 0 && value && strcmp(option_specs[i].value, "TEXT") != 0 && flag_holds_flag(value);
        if (argument[0] != '-' || more) {
            char shown[100];
            return fail(e, "%s:%d: \"%s\" is %s\n  hint: a file of flags has one a line, as --model d4", path, f.line,
                        show_text(shown, sizeof shown, f.raw, strlen(f.raw)), more ? "more than one flag" : "no flag");
        }
        if (options_parse_one(o, &a, 1, &argument, &cause)) { continue; }
        char* hint = strstr(cause.msg, "\n  hint: ");
        if (!hint) { return fail(e, "%s:%d: %s", path, f.line, cause.msg); }
        *hint = 0;
        return fail(e, "%s:%d: %s\n  hint: %s", path, f.line, cause.msg, hint + strlen("\n  hint: "));
    }
    return true;
}

/* Parses the command line of a trainer into *o. On OPTIONS_WRONG the cause is in *e. */
static inline OptionsResult options_parse(Options* o, int argc, char** argv, OptionScope trainer, Error* e) {
    options_default(o, trainer);
    for (int a = 1; a < argc; a++) {
        const bool ok = argv[a][0] == '@' ? options_parse_file(o, argv[a] + 1, e) : options_parse_one(o, &a, argc, argv, e);
        if (!ok) { return OPTIONS_WRONG; }
    }
    if (o->help) { return OPTIONS_HELP; }
    if (o->version) { return OPTIONS_SHOW_VERSION; }
    return options_check(o, e) ? OPTIONS_OK : OPTIONS_WRONG;
}

enum { TEXT_FILE_MAX = 1 << 20 };  // bytes of a text in a file: three bytes for each token of the longest context of Llama 3

/* Sets a text option to `text`, which the options free. */
static inline void option_own_text(Options* o, int i, char* text) {
    free(o->own_text[i]);
    *(const char**)option_field(o, i) = o->own_text[i] = text;
}

/* Makes *to a copy of `from`, which must outlive it. */
static inline void options_copy(Options* to, const Options* from) {
    *to = *from;
    memset(to->own_text, 0, sizeof to->own_text);
    to->num_files = 0;
}

/* Replaces the value "@FILE" of a text by the file's text without a byte order mark and the newline at its end, and "@@TEXT" by
 * "@TEXT". */
static inline bool options_read_text(Options* o, int i, Error* e) {
    const char** value = (const char**)option_field(o, i);
    char flag[OPTION_TEXT];
    size_t size = 0;
    if (!*value || **value != '@') { return true; }
    const char* path = *value + 1;
    if (*path == '@') {
        *value = path;
        return true;
    }
    if (!*path) { return fail(e, "%s: is \"@\", wanted @FILE, or @@ for the text @", option_flag(i, flag)); }
    char* text = read_file(path, &size, TEXT_FILE_MAX, e);
    if (!text) { return false; }
    option_own_text(o, i, text);
    if (strlen(text) < size) { return fail(e, "%s: byte %zu is 0, wanted text", path, strlen(text)); }
    if (size > 0 && text[size - 1] == '\n') { text[--size] = 0; }
    if (size > 0 && text[size - 1] == '\r') { text[--size] = 0; }
    *value += text_mark(text);
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// output for the user

enum { OPTIONS_WIDTH = 100, OPTIONS_HELP_COLUMN = 34 };

/* Returns the columns to print in: the terminal's width or the variable COLUMNS, at least 60 and at most OPTIONS_WIDTH. */
static inline int screen_width(FILE* f) {
    struct winsize size;
    const char* columns = getenv("COLUMNS");
    int width = columns ? atoi(columns) : 0;
    if (width <= 0 && ioctl(fileno(f), TIOCGWINSZ, &size) == 0) { width = size.ws_col; }
    if (width <= 0 || width > OPTIONS_WIDTH) { return OPTIONS_WIDTH; }
    return width < 60 ? 60 : width;
}

/* Prints text starting at column `column`, wrapped at `width` and indented to `indent`. Returns the last column. */
static inline int print_wrapped(FILE* f, const char* text, int column, int indent, int width) {
    bool first = true;
    while (*text) {
        int n = (int)strcspn(text, " ");
        if (!first && column + 1 + n > width) {
            fprintf(f, "\n%*s", indent, "");
            column = indent;
        } else if (!first) {
            fputc(' ', f);
            column++;
        }
        fwrite(text, 1, (size_t)n, f);
        column += n;
        first = false;
        text += n + (text[n] == ' ');
    }
    return column;
}

/* Prints --help: every flag of this trainer by group, as wide as the terminal. */
static inline void options_print_help(FILE* f, const char* program, OptionScope trainer) {
    const int width = screen_width(f);
    fprintf(f, "usage: %s [--flag value]... [@FILE]...\n\n", program);
    fprintf(f, "Trains a Llama 3 model on the %s, or generates, chats and evaluates.\n", trainer == ON_GPU ? "GPU" : "CPU");
    fprintf(f, "@FILE stands for the flags in FILE, a flag a line; later flags win.\n");
    const char* group = "";
    for (int i = 0; i < NUM_OPTIONS; i++) {
        const OptionSpec* s = &option_specs[i];
        if (!(s->scope & trainer)) { continue; }
        if (strcmp(group, s->group) != 0) { fprintf(f, "\n%s\n", group = s->group); }
        char flag[OPTION_TEXT], text[1024];
        int column = fprintf(f, "  %s", option_flag(i, flag));
        for (const char* a = s->aliases; *a;) {
            int len = (int)strcspn(a, " ");
            column += fprintf(f, ", %s%.*s", len > 2 ? "--" : "-", len, a);
            a += len + (a[len] == ' ');
        }
        if (*s->value && s->kind != OPTION_CHOICE) { column += fprintf(f, " %s", s->value); }
        if (column > OPTIONS_HELP_COLUMN - 2) {
            fputc('\n', f);
            column = 0;
        }
        fprintf(f, "%*s", OPTIONS_HELP_COLUMN - column, "");
        int n = snprintf(text, sizeof text, "%s%s%s", s->help, s->kind == OPTION_CHOICE ? ": " : "",
                         s->kind == OPTION_CHOICE ? s->value : "");
        if (s->def && *s->def && strcmp(s->def, "off") != 0) {
            snprintf(text + n, sizeof text - (size_t)n, " (default %s)", s->def);
        }
        print_wrapped(f, text, OPTIONS_HELP_COLUMN, OPTIONS_HELP_COLUMN, width);
        fputc('\n', f);
    }
}

/* Returns whether option i sets nothing: a text not given, a switch that is off, a number at its default of 0 or -1. */
static inline bool option_is_unset(const Options* o, int i, const char* value) {
    const OptionSpec* s = &option_specs[i];
    if (s->kind == OPTION_STRING || s->kind == OPTION_RESUME) { return !*value && !o->given[i]; }
    if (s->kind == OPTION_SWITCH) { return !*(const bool*)option_value(o, i); }
    if ((i == OPT_lora_on && o->lora == 0) || (i == OPT_decay_shape && o->decay == 0 && !o->given[i])) { return true; }
    if (i == OPT_lr && o->lr == 0 && o->minutes > 0) { return true; }  // it waits for the steps
    return s->kind != OPTION_CHOICE && strcmp(value, s->def) == 0 && (strcmp(value, "0") == 0 || strcmp(value, "-1") == 0);
}

/* Prints the configuration as name=value, one paragraph per group, without options that are not set. */
static inline void options_print(FILE* f, const Options* o) {
    enum { INDENT = 17 };
    const int width = screen_width(f);
    const char* group = "";
    int column = 0;
    for (int i = 0; i < NUM_OPTIONS; i++) {
        const OptionSpec* s = &option_specs[i];
        char text[OPTION_TEXT], flag[OPTION_TEXT];
        const char* value = option_text(o, i, text);
        if (!(s->scope & o->trainer) || option_is_unset(o, i, value)) { continue; }
        if (strcmp(group, s->group) != 0) {
            column = fprintf(f, "%s%-*s", *group ? "\n" : "", INDENT, s->group) - (*group ? 1 : 0);
            group = s->group;
        }
        option_flag(i, flag);
        int n = (int)(strlen(flag + 2) + 1 + strlen(value));
        if (column > INDENT && column + 2 + n > width) {
            fprintf(f, "\n%*s", INDENT, "");
            column = INDENT;
        } else if (column > INDENT) {
            column += fprintf(f, "  ");
        }
        column += print_names(f, "%s=%s", flag + 2, value);
    }
    fputc('\n', f);
}

static inline void options_print_way(const char* program, const char* flags, const char* does) {
    const int width = 52 - (int)strlen(program);
    printf("  %s%-*s %s\n", program, width > 0 ? width : 0, flags, does);
}

/* Shows a newcomer, who gives no flag at all, the first commands. */
LLMC_NORETURN static inline void options_die_of_none(const char* program) {
    printf("usage: %s [--flag value]... [@FILE]...\n\n", program);
    options_print_way("make quickstart", "", "trains a small model and prints what it writes");
    options_print_way(program, " --model d4 --train data.bin", "trains a new model; ./tokenize makes data.bin from text");
    options_print_way(program, " --model out --generate \"Once upon\"", "continues a text with the newest checkpoint in out");
    options_print_way(program, " --help", "lists every flag");
    die_usage("no flag is given, wanted at least one\n  hint: make quickstart");
}

/* Parses the command line for main(). Exits with 0 after --help and --version, with 2 on wrong usage. */
static inline void options_or_exit(Options* o, int argc, char** argv, OptionScope trainer) {
    Error e = NO_ERROR;
    const char* program = trainer_name(trainer);
    if (argc <= 1) { options_die_of_none(argc > 0 ? argv[0] : program); }
    switch (options_parse(o, argc, argv, trainer, &e)) {
        case OPTIONS_OK: return;
        case OPTIONS_HELP: options_print_help(stdout, argc > 0 ? argv[0] : program, trainer); break;
        case OPTIONS_SHOW_VERSION: printf("%s (llama3.c) %s\n", program, LLMC_VERSION); break;
        case OPTIONS_WRONG: die_usage("%s", e.msg);
    }
    if (fflush(stdout) != 0) { die("standard output: %s", strerror(errno)); }
    exit(0);
}

// ---------------------------------------------------------------------------------------------------------------------
// JSON for the log and for checkpoints

/* Writes the options of this trainer as one JSON object on one line; a text that was not given is null. With `room`, which is
 * for the log, also the local ones, and at most *room bytes of texts. Without it, texts are written by json_write_bytes(). */
static inline void options_json(FILE* f, const Options* o, size_t* room) {
    const char* separator = "{";
    for (int i = 0; i < NUM_OPTIONS; i++) {
        const OptionSpec* s = &option_specs[i];
        if (!(s->scope & o->trainer) || i == OPT_help || i == OPT_version || (!room && s->life == OPTION_LOCAL)) { continue; }
        char text[OPTION_TEXT];
        const char* value = option_text(o, i, text);
        fprintf(f, "%s\"%.*s\":", separator, (int)option_name_length(s), s->name);
        separator = ",";
        switch (s->kind) {
            case OPTION_STRING:
            case OPTION_RESUME:
                if (!*(const char* const*)option_value(o, i)) {
                    fputs("null", f);
                } else if (room) {
                    json_write_part(f, value, strlen(value), room);
                } else {
                    json_write_bytes(f, value);
                }
                break;
            case OPTION_CHOICE:
            case OPTION_RECOMPUTE: json_write_text(f, value); break;
            case OPTION_SWITCH: fputs(*(const bool*)option_value(o, i) ? "true" : "false", f); break;
            case OPTION_FLOAT: json_write_double(f, *(const double*)option_value(o, i)); break;
            default: fputs(value, f); break;
        }
    }
    fputc('}', f);
}

/* Returns all options as a JSON object, for the log, with at most `room` bytes of texts. The caller calls free(). */
static inline char* options_log_text(const Options* o, size_t room) {
    char* text = NULL;
    size_t size = 0;
    FILE* f = xopen_memory(&text, &size);
    Options shown = *o;
    shown.recompute.automatic = shown.offload_auto = false;  // what auto chose
    options_json(f, &shown, &room);
    xclose_memory(f, &text);
    return text;
}

/* Writes a file of flags: the saved options that differ from their defaults, and those that dial.h would choose otherwise. */
static inline void options_write_flags(FILE* f, const Options* o) {
    Options plain;
    options_default(&plain, o->trainer);
    fprintf(f, "# the flags of a run; the others had their defaults. %s @run.flags --out DIR starts it anew\n",
            trainer_name(o->trainer));
    for (int i = 0; i < NUM_OPTIONS; i++) {
        const OptionSpec* s = &option_specs[i];
        if (!(s->scope & o->trainer) || s->life == OPTION_LOCAL) { continue; }
        char flag[OPTION_TEXT], now[OPTION_TEXT], before[OPTION_TEXT];
        const char* value = option_text(o, i, now);
        const bool dialled = i == OPT_steps || i == OPT_batch || i == OPT_total_batch || i == OPT_lr || i == OPT_warmup;
        if (dialled || strcmp(value, option_text(&plain, i, before)) != 0) { flag_write(f, option_flag(i, flag), value); }
    }
}

/* Returns whether this trainer writes a member of that name into its checkpoints. */
static inline bool options_writes(const Options* o, const char* name) {
    for (int i = 0; i < NUM_OPTIONS; i++) {
        const OptionSpec* s = &option_specs[i];
        if (strcmp(s->name, name) == 0) { return s->life == OPTION_LOCAL || (s->scope & o->trainer); }
    }
    return false;
}

/* Returns the options for a checkpoint as JSON. `saved` (or NULL), an object in j, holds the options of the checkpoint that
 * the run resumed: members that only another trainer or version knows are kept unchanged. The caller calls free(). */
static inline char* options_json_text(const Options* o, const Json* j, const JsonNode* saved) {
    char* text = NULL;
    size_t size = 0;
    FILE* f = xopen_memory(&text, &size);
    options_json(f, o, NULL);
    if (saved) { fseek(f, -1, SEEK_CUR); }  // back before the closing brace
    for (const JsonNode* n = saved ? json_first(j, saved) : NULL; n; n = json_next(j, n)) {
        size_t len = 0;
        const char* name = json_key(j, n, &len);
        if (options_writes(o, name)) { continue; }
        fputc(',', f);
        json_write_string(f, name, len);
        fputc(':', f);
        json_write_value(f, j, n);
    }
    if (saved) { fputc('}', f); }
    xclose_memory(f, &text);
    return text;
}

/* Restores the options of a resumed run: every saved option that is not on the command line gets its value from `saved`, the
 * object that options_json_text() wrote into a checkpoint. Ignores unknown members, which another version may have written. */
static inline bool options_merge(Options* o, const Json* j, const JsonNode* saved, Error* e) {
    for (int i = 0; i < NUM_OPTIONS; i++) {
        const OptionSpec* s = &option_specs[i];
        const bool keep = o->given[i] || !(s->scope & o->trainer) || s->life == OPTION_LOCAL;
        const JsonNode* n = keep ? NULL : json_get(j, saved, s->name);
        if (!n) { continue; }
        char number[OPTION_TEXT], *bytes = NULL;
        const char* text = number;
        if (s->kind == OPTION_STRING) {
            if (!json_bytes(j, saved, s->name, &bytes, e)) { return false; }
            option_own_text(o, i, bytes);
            continue;
        }
        if (n->type == JSON_TRUE || n->type == JSON_FALSE) {
            text = n->type == JSON_TRUE ? "on" : "off";
        } else if (n->type == JSON_NUMBER && n->length < sizeof number) {
            memcpy(number, j->text + n->at, n->length);
            number[n->length] = 0;
        } else if (!json_text(j, saved, s->name, &text, e)) {
            return false;
        }
        Error cause = NO_ERROR;
        if (!option_set(o, i, text, &cause)) { return fail(e, "%s: options: %s", j->path, cause.msg); }
    }
    o->minutes = 0;
    return true;
}

static inline void options_free(Options* o) {
    for (int i = 0; i < NUM_OPTIONS; i++) {
        free(o->own_text[i]);
        o->own_text[i] = NULL;
    }
    while (o->num_files > 0) { free(o->file_text[--o->num_files]); }
}

#endif
