/* tokenize.c -- turns text into token files, and JSON lines into ids and back.
 *
 *   tokenize --tokenizer DIR|FILE -o OUT.bin FILE...      text files and .jsonl files to one token file (tokenfile.h)
 *   zcat FILE | tokenize --tokenizer DIR|FILE -o OUT.bin -    the same for a stream: -, /dev/stdin, /dev/fd/N
 *   tokenize --tokenizer DIR|FILE --jsonl                 {"text": ...} lines on stdin to {"ids": [...]} lines on stdout
 *   tokenize --tokenizer DIR|FILE --decode                {"ids": [...]} lines on stdin to {"text": ...} lines on stdout
 *
 * What is no UTF-8 text (filekind.h) is refused with the command that converts it: nothing is decompressed or decoded here.
 *
 * It reads a file in batches, cuts a batch into units (lines of a .jsonl, stretches of a text), encodes runs of units in
 * parallel and writes the results in order. So the batch bounds the memory, not the file, and the tokens do not depend on
 * the number of threads. A text is cut where every split pattern has a border anyway (text_border()); a text without such
 * places is read whole and encoded in one go.
 *
 * Each document starts with BOS, which separates documents (llm.c's files use GPT-2's end of text for this). Files are
 * written as OUT.tmp, which is locked, and renamed when all are complete; a failure or a signal removes them, and what a
 * killed process left is replaced.
 */
#include "llmc/base/utils.h"           // defines: die, fail, xmalloc, open_to_read, LLMC_VERSION
#include "llmc/base/crc.h"             // defines: Crc, crc_begin, crc_add, crc_end, crc_shift
#include "llmc/files/filekind.h"       // defines: text_kind_of
#include "llmc/files/folder.h"         // defines: make_directories, folder_of
#include "llmc/files/json.h"           // defines: json_parse_line, json_get, json_string, json_write_string
#include "llmc/files/output.h"         // defines: create_temporary, rename_output, close_output, sync_directory
#include "llmc/files/tokenfile.h"      // defines: tokenfile_header, tokenfile_scan
#include "llmc/run/progress.h"         // defines: Progress, progress_begin, progress_add, progress_end
#include "llmc/text/text.h"            // defines: edit_distance, text_count
#include "llmc/text/tokenizer.h"       // defines: encoder_text, text_border, decoder_push
#include "llmc/text/tokenizer_read.h"  // defines: tokenizer_load

#include <signal.h>
#ifdef _OPENMP
#include <omp.h>
#endif

enum {
    UNIT_BYTES = 1 << 16,      // about the length of a text's units
    BATCH_BYTES = 16 << 20,    // bytes of a file read at a time
    STDIN_BYTES = 1 << 20,     // most bytes of stdin read at a time; the lines that are there are answered at once
    PARTS_PER_THREAD = 4,      // runs of units for each thread: short ones balance the threads
    CONVERT_TOKENS = 1 << 13,  // tokens converted or copied at a time
    HEAD_BYTES = 4096          // of a file, by which its kind is told
};

// ---------------------------------------------------------------------------------------------------------------------
// command line

typedef struct {
    const char* tokenizer;  // NULL: the built-in bytes
    const char* out;
    const char* field;    // NULL: "text" in .jsonl files, and stdin is plain text
    double val_fraction;  // 0: no validation file
    bool specials, bytes, jsonl, decode;
    int threads;  // 0: OpenMP's default
    char** files;
    int num_files;
} Args;

typedef enum {
    ARG_TOKENIZER,
    ARG_OUT,
    ARG_VAL_FRACTION,
    ARG_FIELD,
    ARG_SPECIALS,
    ARG_BYTES,
    ARG_JSONL,
    ARG_DECODE,
    ARG_THREADS,
    ARG_HELP,
    ARG_VERSION,
    NUM_ARGS
} Arg;

// clang-format off
static const struct { const char *name, *letter, *value, *help; } arg_specs[NUM_ARGS] = {
    [ARG_TOKENIZER] = {"tokenizer", NULL, "PATH", "tokenizer.json, tiktoken's tokenizer.model or a folder; default: bytes"},
    [ARG_OUT] = {"out", "o", "OUT.bin", "token file to write"},
    [ARG_VAL_FRACTION] = {"val-fraction", NULL, "F", "write OUT_train.bin, and the last F of the tokens to OUT_val.bin"},
    [ARG_FIELD] = {"field", NULL, "NAME", "text's field in a line of JSON; default: text. With it, - is lines of JSON"},
    [ARG_SPECIALS] = {"specials", NULL, NULL, "turn names of special tokens in the text into those tokens"},
    [ARG_BYTES] = {"bytes", NULL, NULL, "take the input as it is, though it looks like no text or is no UTF-8"},
    [ARG_JSONL] = {"jsonl", NULL, NULL, "encode {\"text\": ...} lines on stdin to {\"ids\": [...]} lines on stdout; no BOS"},
    [ARG_DECODE] = {"decode", NULL, NULL, "decode {\"ids\": [...]} lines on stdin to {\"text\": ...} lines on stdout"},
    [ARG_THREADS] = {"threads", NULL, "N", "number of threads; default: all"},
    [ARG_HELP] = {"help", "h", NULL, "show this text"},
    [ARG_VERSION] = {"version", NULL, NULL, "print the version"},
};
// clang-format on

static void print_help(void) {
    printf(
        "usage: tokenize [--tokenizer PATH] -o OUT.bin FILE...    text to a token file\n"
        "       tokenize [--tokenizer PATH] --jsonl | --decode    lines of JSON on stdin and stdout\n\n"
        "A .jsonl file holds one document per line, in the field \"text\"; any other file is one document. A FILE may be -,\n"
        "/dev/stdin or /dev/fd/N: zcat FILE.gz | tokenize -o OUT.bin -\n\n");
    for (int i = 0; i < NUM_ARGS; i++) {
        char flag[64];
        snprintf(flag, sizeof flag, "%s%s%s--%s %s", arg_specs[i].letter ? "-" : "",
                 arg_specs[i].letter ? arg_specs[i].letter : "", arg_specs[i].letter ? ", " : "    ", arg_specs[i].name,
                 arg_specs[i].value ? arg_specs[i].value : "");
        printf("  %-24s %s\n", flag, arg_specs[i].help);
    }
}

/* Returns the flag that `arg` names, or dies and suggests the nearest one. */
static Arg find_arg(const char* arg) {
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

/* Returns the descriptor that -, /dev/stdin or /dev/fd/N names; -1: the path is that of a file. */
static int descriptor_of(const char* path) {
    if (strcmp(path, "-") == 0 || strcmp(path, "/dev/stdin") == 0) { return 0; }
    const char* number = text_starts(path, "/dev/fd/") ? path + strlen("/dev/fd/") : "";
    const size_t digits = strspn(number, "0123456789");
    return digits > 0 && digits < 9 && !number[digits] ? atoi(number) : -1;
}

/* Tells whether an input holds a document a line. */
static bool holds_lines(const Args* a, const char* path) {
    const size_t len = strlen(path);
    return descriptor_of(path) >= 0 ? a->field != NULL : len >= 6 && strcmp(path + len - 6, ".jsonl") == 0;
}

static void check_inputs(const Args* a) {
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
            "  hint: cat %s | ./tokenize --field %s -o %s -",
            a->files[0], a->files[0], a->field, a->out);
    }
}

static double parse_number(const char* flag, const char* text, double min, double max, const char* wanted) {
    char* end;
    double value = strtod(text, &end);
    if (end == text || *end || !(value >= min && value <= max)) {
        die_usage("--%s is \"%.100s\", wanted %s", flag, text, wanted);
    }
    return value;
}

static void parse_args(Args* a, int argc, char** argv) {
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
            case ARG_SPECIALS: a->specials = true; break;
            case ARG_BYTES: a->bytes = true; break;
            case ARG_JSONL: a->jsonl = true; break;
            case ARG_DECODE: a->decode = true; break;
            case ARG_THREADS: a->threads = (int)parse_number(name, value, 1, 4096, "a number of threads from 1 to 4096"); break;
            case ARG_HELP: print_help(); exit(0);
            case ARG_VERSION: printf("tokenize (llama3.c) %s\n", LLMC_VERSION); exit(0);
            case NUM_ARGS: break;
        }
    }
    if (a->field && !*a->field) { die_usage("--field is \"\", wanted the name of a field"); }
    if (a->jsonl && a->decode) { die_usage("--jsonl and --decode are both given, wanted one of them"); }
    if (a->jsonl || a->decode) {
        const char* job = a->jsonl ? "--jsonl" : "--decode";
        if (a->num_files) { die_usage("%s reads stdin, but a file is given: %s", job, a->files[0]); }
        if (a->out || a->val_fraction > 0) { die_usage("%s writes to stdout, wanted no --out or --val-fraction", job); }
        if (a->bytes || (a->decode && a->field)) { die_usage("%s goes without --%s", job, a->bytes ? "bytes" : "field"); }
        return;
    }
    if (!a->out || !*a->out) {
        die_usage("--out is missing, wanted -o OUT.bin, --jsonl or --decode\n  hint: --help shows the usage");
    }
    if (!a->num_files) { die_usage("no input file, wanted at least one text or .jsonl file, or -, after -o %s", a->out); }
    check_inputs(a);
}

// ---------------------------------------------------------------------------------------------------------------------
// units: what one thread encodes in one go

typedef struct {
    const char* text;  // of a text: its bytes; of a .jsonl: the line without its newline
    size_t len;
    uint64_t line;  // of a .jsonl, from 1; 0: this is text
    bool starts_document;
} Unit;

typedef struct {
    Unit* units;
    size_t count, cap;
} UnitList;

static void unit_add(UnitList* list, const char* text, size_t len, uint64_t line, bool starts_document) {
    if (list->count == list->cap) {
        list->cap = list->cap * 2 + 64;
        list->units = (Unit*)xrealloc(list->units, list->cap * sizeof(Unit));
    }
    const Unit u = {text, len, line, starts_document};
    list->units[list->count++] = u;
}

/* The result of one run of units: ids in the encoder, or lines of JSON. */
typedef struct {
    TokenEncoder encoder;
    TokenDecoder decoder;
    char* lines;  // the lines of JSON, from a memory stream
    size_t lines_len;
    uint64_t documents, text_bytes, text_tokens;
    uint64_t no_characters;  // bytes of this run's texts that are no part of a UTF-8 character
    Error error;
} Part;

typedef struct {
    const Tokenizer* t;
    const Args* args;
    const char* path;  // of the input, for messages
    int separator;     // id put in front of each document; -1: none
    Part* parts;
    int num_parts;
} Job;

/* Parses one line of JSON. An error names file, line and column. */
static bool parse_line(Json* j, const Unit* u, const char* path, Error* e) {
    char at[PATH_CAP + 32];
    snprintf(at, sizeof at, "%s:%llu", path, (unsigned long long)u->line);
    return json_parse_line(j, u->text, u->len, at, e);
}

/* Returns the name of the field that holds the text. */
static const char* text_field(const Args* a) { return a->field ? a->field : "text"; }

/* Returns the hint for a line whose field is missing: the first one that holds a text, or how to make one of a chat; or "". */
static const char* other_field_hint(char* out, size_t cap, const Json* j) {
    for (const JsonNode* n = json_first(j, json_root(j)); n; n = json_next(j, n)) {
        char name[64];
        if (n->type != JSON_STRING) { continue; }
        snprintf(out, cap, "--field %s, if that is the text", show_text(name, sizeof name, json_key(j, n, NULL), n->key_len));
        return out;
    }
    return json_get(j, json_root(j), "messages")
               ? "a chat is no text; jq -c '{text: [.messages[].content] | join(\"\\n\")}' FILE makes one of it"
               : "";
}

static bool line_member(Json* j, const JsonNode** member, const char* key, JsonType type, const Unit* u, const char* path,
                        Error* e) {
    *member = json_get(j, json_root(j), key);
    if (*member && (*member)->type == (uint32_t)type) { return true; }
    char found[64];
    const bool is_object = json_root(j)->type == JSON_OBJECT;
    char space[128];
    const char* hint = is_object && !*member && type == JSON_STRING ? other_field_hint(space, sizeof space, j) : "";
    if (*hint) {
        return fail(e, "%s:%llu: %s is missing, wanted a string\n  hint: %s", path, (unsigned long long)u->line, key, hint);
    }
    return fail(e, "%s:%llu: %s is %s, wanted %s", path, (unsigned long long)u->line, key,
                is_object ? json_show(found, sizeof found, j, *member) : "missing: the line is not an object",
                type == JSON_STRING ? "a string" : "an array");
}

static void encode_counted(Part* p, const char* text, size_t len, bool specials) {
    const size_t before = p->encoder.count;
    encoder_text(&p->encoder, text, len, specials);
    p->text_bytes += len;
    p->text_tokens += p->encoder.count - before;
}

/* Counts the bytes that are no part of a UTF-8 character. Most bytes are ASCII, which it skips eight at a time. */
static uint64_t count_no_characters(const char* s, size_t n) {
    uint64_t count = 0, eight;
    for (size_t i = 0; i < n;) {
        if (i + 8 <= n && (memcpy(&eight, s + i, 8), (eight & UINT64_C(0x8080808080808080)) == 0)) {
            i += 8;
            continue;
        }
        const size_t length = utf8_char_length(s + i, n - i);
        count += length == 0;
        i += length ? length : 1;
    }
    return count;
}

/* Encodes one unit of a file into p->encoder. */
static bool encode_unit(const Job* job, Part* p, const Unit* u) {
    if (u->line && strspn(u->text, " \t\r\n") >= u->len) { return true; }  // the text ends in a newline or a NUL
    if (u->starts_document) {
        p->documents++;
        if (job->separator >= 0) {
            encoder_reserve(&p->encoder, 1);
            p->encoder.ids[p->encoder.count++] = job->separator;
        }
    }
    if (!u->line) {
        p->no_characters += count_no_characters(u->text, u->len);
        encode_counted(p, u->text, u->len, job->args->specials);
        return true;
    }
    Json j;
    const JsonNode* member;
    if (!parse_line(&j, u, job->path, &p->error)) { return false; }
    const bool ok = line_member(&j, &member, text_field(job->args), JSON_STRING, u, job->path, &p->error);
    if (ok) {
        size_t len = 0;
        const char* text = json_string(&j, member, &len);
        encode_counted(p, text, len, job->args->specials);
    }
    json_free(&j);
    return ok;
}

/* Encodes one line of stdin to a line of `out`. */
static bool answer_encode(const Job* job, Part* p, const Unit* u, FILE* out) {
    Json j;
    const JsonNode* member;
    if (!parse_line(&j, u, job->path, &p->error)) { return false; }
    const bool ok = line_member(&j, &member, text_field(job->args), JSON_STRING, u, job->path, &p->error);
    if (ok) {
        size_t len = 0;
        const char* text = json_string(&j, member, &len);
        p->encoder.count = 0;
        encode_counted(p, text, len, job->args->specials);
        fputs("{\"ids\": [", out);
        for (size_t i = 0; i < p->encoder.count; i++) {
            char digits[16];
            int n = 16;
            for (uint32_t v = (uint32_t)p->encoder.ids[i]; n == 16 || v; v /= 10) { digits[--n] = (char)('0' + v % 10); }
            if (i) { fputs(", ", out); }
            fwrite(digits + n, 1, (size_t)(16 - n), out);
        }
        fputs("]}\n", out);
    }
    json_free(&j);
    return ok;
}

static bool answer_decode(const Job* job, Part* p, const Unit* u, FILE* out) {
    Json j;
    const JsonNode* member;
    if (!parse_line(&j, u, job->path, &p->error)) { return false; }
    bool ok = line_member(&j, &member, "ids", JSON_ARRAY, u, job->path, &p->error);
    char* text = NULL;
    size_t text_len = 0, len;
    FILE* whole = ok ? xopen_memory(&text, &text_len) : NULL;
    for (const JsonNode* n = ok ? json_first(&j, member) : NULL; ok && n; n = json_next(&j, n)) {
        int64_t id = -1;
        if (!json_node_int(&j, n, &id) || id < 0 || id >= job->t->vocab_size) {
            char found[64];
            ok = fail(&p->error, "%s:%llu: ids has %s, wanted numbers from 0 to %d", job->path, (unsigned long long)u->line,
                      json_show(found, sizeof found, &j, n), job->t->vocab_size - 1);
            break;
        }
        const char* piece = decoder_push(&p->decoder, (int)id, &len);
        fwrite(piece, 1, len, whole);
    }
    if (whole) {
        const char* rest = decoder_flush(&p->decoder, &len);
        fwrite(rest, 1, len, whole);
        xclose_memory(whole, &text);
    }
    if (ok) {
        fputs("{\"text\": ", out);
        json_write_string(out, text, text_len);
        fputs("}\n", out);
    }
    free(text);
    json_free(&j);
    return ok;
}

static void run_part(const Job* job, Part* p, const Unit* units, size_t count) {
    bool ok = true;
    if (job->args->jsonl || job->args->decode) {
        FILE* out = xopen_memory(&p->lines, &p->lines_len);
        for (size_t i = 0; ok && i < count; i++) {
            ok = job->args->jsonl ? answer_encode(job, p, &units[i], out) : answer_decode(job, p, &units[i], out);
        }
        xclose_memory(out, &p->lines);
        return;
    }
    p->encoder.count = 0;
    p->no_characters = 0;
    for (size_t i = 0; ok && i < count; i++) { ok = encode_unit(job, p, &units[i]); }
}

/* Encodes or decodes the units in parallel: part k gets the k-th run of about equal bytes. Returns the number of parts used. */
static int run_units(Job* job, const UnitList* list) {
    if (list->count == 0) { return 0; }
    size_t* first = (size_t*)xcalloc((size_t)job->num_parts + 1, sizeof(size_t));
    size_t bytes = 0, done = 0, unit = 0;
    for (size_t i = 0; i < list->count; i++) { bytes += list->units[i].len + 1; }
    const int parts = bytes < UNIT_BYTES ? 1 : job->num_parts;  // a few lines do not pay for threads
    for (int k = 0; k < parts; k++) {
        first[k] = unit;
        for (; unit < list->count && done < bytes / (size_t)parts * (size_t)(k + 1); unit++) {
            done += list->units[unit].len + 1;
        }
    }
    first[parts] = list->count;
#pragma omp parallel for schedule(dynamic, 1) if (parts > 1)
    for (int k = 0; k < parts; k++) { run_part(job, &job->parts[k], list->units + first[k], first[k + 1] - first[k]); }
    free(first);
    return parts;
}

// ---------------------------------------------------------------------------------------------------------------------
// token files

typedef struct {
    FILE* f;
    int lock;  // a second descriptor of the file, which keeps it locked until it has its name
    char path[PATH_CAP], tmp[PATH_CAP];
    volatile sig_atomic_t unfinished;  // tmp is there
    int token_bytes;
    uint64_t count;
    Crc crc;  // of the tokens as stored
} TokenFile;

static TokenFile token_files[2];  // for training and for validation; global, since a signal may have to remove them

/* Removes the unfinished files. A signal handler may call it. */
static void remove_unfinished(void) {
    for (int i = 0; i < 2; i++) {
        if (token_files[i].unfinished) { unlink(token_files[i].tmp); }
    }
}

static void on_signal(int signal_number) {
    remove_unfinished();
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

/* Has unfinished files removed however the program ends, but by SIGKILL. Signals that are ignored (nohup) stay so. */
static void catch_the_end(void) {
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    atexit(remove_unfinished);
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
        if (signal(signals[i], on_signal) == SIG_IGN) { signal(signals[i], SIG_IGN); }
    }
}

static bool token_file_create(TokenFile* w, const char* path, int token_bytes, Error* e) {
    static const char header[TOKENFILE_HEADER_BYTES];
    if (snprintf(w->tmp, sizeof w->tmp, "%s.tmp", path) >= PATH_CAP) {
        return fail(e, "%.100s...: the path is too long", path);
    }
    snprintf(w->path, sizeof w->path, "%s", path);
    if (!is_replaceable(path, e)) { return false; }
    w->f = create_temporary(w->tmp, e);
    if (!w->f) { return false; }
    w->unfinished = 1;
    w->lock = dup(fileno(w->f));
    w->token_bytes = token_bytes;
    crc_begin(&w->crc);
    return fwrite(header, 1, sizeof header, w->f) == sizeof header ||
           fail(e, "%s: writing failed: %s", w->tmp, strerror(errno));
}

static bool token_file_add(TokenFile* w, const int32_t* ids, size_t n, Error* e) {
    uint16_t small[CONVERT_TOKENS];
    bool ok = true;
    if (w->token_bytes == 4) {
        ok = fwrite(ids, 4, n, w->f) == n;
        crc_add(&w->crc, ids, ok ? 4 * n : 0);
    } else {
        for (size_t i = 0, m; ok && i < n; i += m) {
            m = size_min(n - i, CONVERT_TOKENS);
            for (size_t k = 0; k < m; k++) { small[k] = (uint16_t)ids[i + k]; }
            ok = fwrite(small, 2, m, w->f) == m;
            crc_add(&w->crc, small, 2 * m);
        }
    }
    w->count += n;
    return ok || fail(e, "%s: writing failed: %s", w->tmp, strerror(errno));
}

/* Writes the header, flushes the file, and reads it back to check every id and the checksum. */
static bool token_file_finish(TokenFile* w, const Tokenizer* t, Error* e) {
    int32_t words[TOKENFILE_WORDS];
    TokenFileHeader h = {w->token_bytes, t->vocab_size, w->count, t->fingerprint, true, crc_end(&w->crc), false};
    tokenfile_header(words, &h);
    bool ok = fseeko(w->f, 0, SEEK_SET) == 0 && fwrite(words, sizeof words, 1, w->f) == 1 && fflush(w->f) == 0;
    if (!ok) { return fail(e, "%s: writing failed: %s", w->tmp, strerror(errno)); }
    if (!tokenfile_scan(w->f, &h, t->vocab_size, w->tmp, NULL, NULL, e)) { return false; }
    ok = close_output(w->f, w->tmp, e);
    w->f = NULL;
    return ok;
}

/* Gives the finished file its name. */
static bool token_file_publish(TokenFile* w, Error* e) {
    if (!rename_output(w->tmp, w->path, e)) { return false; }
    w->unfinished = 0;
    close(w->lock);
    return true;
}

/* Gives both finished files their names. An old validation file goes first: were the process to die in between, it would lie
 * beside a training file that may hold its text. */
static bool token_files_publish(TokenFile* train, TokenFile* val, Error* e) {
    char folder[PATH_CAP];
    folder_of(train->path, folder);
    if (val->unfinished && unlink(val->path) != 0 && errno != ENOENT) {
        return fail(e, "%s: cannot remove the old file: %s", val->path, strerror(errno));
    }
    return sync_directory(folder, e) && token_file_publish(train, e) && (!val->unfinished || token_file_publish(val, e)) &&
           sync_directory(folder, e);
}

/* Reads n tokens from token `at` on. */
static bool token_file_read(TokenFile* w, int32_t* ids, uint64_t at, size_t n, Error* e) {
    if (fseeko(w->f, (off_t)(TOKENFILE_HEADER_BYTES + at * (uint64_t)w->token_bytes), SEEK_SET) != 0 ||
        !read_exact(w->f, ids, n * (size_t)w->token_bytes, w->tmp, "the tokens", e)) {
        return fail(e, "%s: reading back failed: %s", w->tmp, strerror(errno));
    }
    if (w->token_bytes == 2) {
        const uint16_t* small = (const uint16_t*)ids;
        for (size_t i = n; i-- > 0;) { ids[i] = small[i]; }  // from the end: overwrites only values already read
    }
    return true;
}

/* Finds the token where validation starts: the document border nearest to the wanted place, or that place itself if there is
 * no border within half the validation size. */
static bool find_cut(TokenFile* w, double fraction, int separator, uint64_t* cut, Error* e) {
    if (w->count < 2) {
        return fail(e, "--val-fraction: the text has %llu tokens, wanted at least 2 to split", (unsigned long long)w->count);
    }
    uint64_t val = (uint64_t)((double)w->count * fraction + 0.5);
    val = val < 1 ? 1 : val > w->count - 1 ? w->count - 1 : val;
    const uint64_t target = w->count - val, from = target - size_min(val / 2, target - 1), to = target + val / 2;
    uint64_t nearest = UINT64_MAX;
    int32_t ids[CONVERT_TOKENS];
    *cut = target;
    for (uint64_t at = from; separator >= 0 && at < to; at += CONVERT_TOKENS) {
        const size_t n = (size_t)(to - at < CONVERT_TOKENS ? to - at : CONVERT_TOKENS);
        if (!token_file_read(w, ids, at, n, e)) { return false; }
        for (size_t i = 0; i < n; i++) {
            const uint64_t place = at + i, distance = place > target ? place - target : target - place;
            if (ids[i] != separator || distance >= nearest) { continue; }
            nearest = distance;
            *cut = place;
        }
    }
    return true;
}

/* Reads back the first `count` tokens for their checksum. */
static bool crc_of_first(TokenFile* w, uint64_t count, Error* e) {
    unsigned char raw[1 << 14];
    const uint64_t bytes = count * (uint64_t)w->token_bytes;
    crc_begin(&w->crc);
    for (uint64_t at = 0, n; at < bytes; at += n) {
        n = size_min(bytes - at, sizeof raw);
        if (!read_at(fileno(w->f), TOKENFILE_HEADER_BYTES + at, raw, n, w->tmp, "the tokens", e)) { return false; }
        crc_add(&w->crc, raw, n);
    }
    return true;
}

/* Moves the tokens from `cut` on to the validation file. The checksums of both parts must make that of the whole. */
static bool split_off(TokenFile* train, TokenFile* val, uint64_t cut, Error* e) {
    int32_t ids[CONVERT_TOKENS];
    const uint32_t whole = crc_end(&train->crc);
    for (uint64_t at = cut; at < train->count; at += CONVERT_TOKENS) {
        const size_t n = (size_t)(train->count - at < CONVERT_TOKENS ? train->count - at : CONVERT_TOKENS);
        if (!token_file_read(train, ids, at, n, e) || !token_file_add(val, ids, n, e)) { return false; }
    }
    if (!crc_of_first(train, cut, e)) { return false; }
    const uint32_t parts = crc_shift(crc_end(&train->crc), val->count * (uint64_t)val->token_bytes) ^ crc_end(&val->crc);
    if (parts != whole) { return fail(e, "%s: reads back as other tokens than were written", train->tmp); }
    train->count = cut;
    const off_t end = (off_t)(TOKENFILE_HEADER_BYTES + cut * (uint64_t)train->token_bytes);
    return (fflush(train->f) == 0 && ftruncate(fileno(train->f), end) == 0) ||
           fail(e, "%s: writing failed: %s", train->tmp, strerror(errno));
}

// ---------------------------------------------------------------------------------------------------------------------
// reading files in batches

/* Returns the last place in s[0 .. n) where a batch may end, or 0: after a newline if `lines`, else at a text_border(). */
static size_t last_cut(const char* s, size_t n, bool lines) {
    for (size_t i = n; i > 0; i--) {
        if (lines ? s[i - 1] == '\n' : i < n && text_border(s, i)) { return i; }
    }
    return 0;
}

static void cut_text(UnitList* list, const char* s, size_t n, bool first, bool cuttable) {
    size_t start = 0;
    for (size_t i = UNIT_BYTES; cuttable && i < n; i++) {
        if (!text_border(s, i)) { continue; }
        unit_add(list, s + start, i - start, 0, first && start == 0);
        start = i;
        i += UNIT_BYTES;
    }
    if (start < n || first) { unit_add(list, s + start, n - start, 0, first && start == 0); }
}

static void cut_lines(UnitList* list, const char* s, size_t n, uint64_t* line) {
    for (size_t start = 0; start < n;) {
        const char* newline = (const char*)memchr(s + start, '\n', n - start);
        const size_t len = (newline ? (size_t)(newline - s) : n) - start;
        unit_add(list, s + start, len, ++*line, true);
        start += len + 1;
    }
}

static bool write_parts(Job* job, TokenFile* w, int parts, uint64_t* no_characters, Error* e) {
    for (int k = 0; k < parts; k++) {
        Part* p = &job->parts[k];
        if (p->error.msg[0]) { return fail(e, "%s", p->error.msg); }
        *no_characters += p->no_characters;
        if (!token_file_add(w, p->encoder.ids, p->encoder.count, e)) { return false; }
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// inputs: files and streams

typedef struct {
    const char *path, *name;  // as given; for messages
    FILE* f;
    uint64_t size;  // 0 if `endless`
    bool endless;   // a pipe, a socket or a terminal
    bool lines;     // a document a line
} Input;

/* Opens a file, or the stream that -, /dev/stdin or /dev/fd/N names. */
static bool input_open(Input* in, const Args* a, const char* path, Error* e) {
    const int given = descriptor_of(path);
    struct stat st;
    memset(in, 0, sizeof *in);
    in->path = path;
    in->name = given == 0 ? "stdin" : path;
    in->lines = holds_lines(a, path);
    if (given < 0) {
        const int fd = open_to_read(path, "a regular file, or - for stdin", &in->size, e);
        in->f = fd >= 0 ? fdopen(fd, "rb") : NULL;
        return in->f != NULL || fail(e, "%s: cannot open: %s", path, strerror(errno));
    }
    const int fd = fcntl(given, F_DUPFD_CLOEXEC, 0);
    in->f = fd >= 0 && fstat(fd, &st) == 0 ? fdopen(fd, "rb") : NULL;
    if (!in->f) { return fail(e, "%s: cannot read: %s", in->name, strerror(errno)); }
    in->endless = !S_ISREG(st.st_mode);
    in->size = in->endless ? 0 : (uint64_t)st.st_size;
    return true;
}

/* Writes the end of the command that reads the input from another program. */
static const char* reading_command(char* out, size_t cap, const Args* a, bool lines) {
    char fraction[48] = "";
    if (a->val_fraction > 0) { snprintf(fraction, sizeof fraction, " --val-fraction %g", a->val_fraction); }
    snprintf(out, cap, "./tokenize%s%s%s%s%s -o %s -", a->tokenizer ? " --tokenizer " : "", a->tokenizer ? a->tokenizer : "",
             lines ? " --field " : "", lines ? text_field(a) : "", fraction, a->out);
    return out;
}

/* Returns the length of the byte order mark in front of an input, which is no text. */
static size_t mark_length(const Args* a, const char* head, size_t n) {
    return !a->bytes && n >= 3 && memcmp(head, "\xEF\xBB\xBF", 3) == 0 ? 3 : 0;
}

/* Checks by its first bytes that an input is text. */
static bool input_check_start(const Input* in, const Args* a, const char* head, size_t n, Error* e) {
    char command[2 * PATH_CAP];
    const FileKind kind = text_kind_of(head, n);
    if (n == mark_length(a, head, n)) { return fail(e, "%s: holds no text: it is empty", in->name); }
    if (kind.is_text || a->bytes) { return true; }
    if (!kind.to_text) { return fail(e, "%s: is %s, wanted UTF-8 text", in->name, kind.what); }
    reading_command(command, sizeof command, a, kind.to_lines || in->lines || strstr(in->path, ".json"));
    return fail(e, "%s: is %s, wanted UTF-8 text\n  hint: %s %s | %s", in->name, kind.what, kind.to_text,
                descriptor_of(in->path) < 0 ? in->path : "FILE", command);
}

static bool is_blank(const char* s, size_t n) {
    size_t i = 0;
    while (i < n && s[i] && strchr(" \t\r\n\f\v", s[i])) { i++; }
    return i == n;
}

/* Checks that at most one byte in a hundred of those read so far is no part of a character. */
static bool input_check_characters(const Input* in, const Args* a, uint64_t no_characters, uint64_t bytes, Error* e) {
    char command[2 * PATH_CAP];
    if (a->bytes || no_characters * 100 <= bytes) { return true; }
    return fail(e,
                "%s: %.1f %% of its bytes are no UTF-8, wanted at most 1 %%\n"
                "  hint: iconv -f LATIN1 -t UTF-8 %s | %s, if it is Latin-1; --bytes takes them as they are",
                in->name, 100.0 * (double)no_characters / (double)bytes, descriptor_of(in->path) < 0 ? in->path : "FILE",
                reading_command(command, sizeof command, a, false));
}

/* Opens each input, and looks at the first bytes of the files, before an hour's work. A stream is left as it is. Sets *size to
 * the bytes of all; 0: a stream is among them. */
static bool check_all_inputs(const Args* a, uint64_t* size, Error* e) {
    char head[HEAD_BYTES];
    bool ok = true, endless = false;
    *size = 0;
    for (int i = 0; ok && i < a->num_files; i++) {
        Input in;
        if (!input_open(&in, a, a->files[i], e)) { return false; }
        if (descriptor_of(in.path) < 0) { ok = input_check_start(&in, a, head, fread(head, 1, sizeof head, in.f), e); }
        fclose(in.f);
        *size += in.size;
        endless = endless || in.endless;
    }
    if (endless) { *size = 0; }
    return ok;
}

/* Appends the tokens of one input. */
static bool tokenize_input(Job* job, TokenFile* w, Progress* progress, const char* path, Error* e) {
    const bool cuttable = tokenizer_may_cut(job->t);
    Input in;
    if (!input_open(&in, job->args, path, e)) { return false; }
    job->path = in.name;
    size_t cap = (size_t)(in.endless || in.size > BATCH_BYTES ? BATCH_BYTES : in.size) + 1, have = 0;
    char* buffer = (char*)xmalloc(cap);
    UnitList list = {NULL, 0, 0};
    uint64_t line = 0, bytes = 0, no_characters = 0;
    bool ok = true, first = true, last = false, blank = !job->args->bytes;
    while (ok && !last) {
        have += fread(buffer + have, 1, cap - 1 - have, in.f);
        const int next = have < cap - 1 ? EOF : getc(in.f);
        if (next != EOF) { ungetc(next, in.f); }
        if (ferror(in.f)) { ok = fail(e, "%s: reading failed: %s", in.name, strerror(errno)); }
        last = next == EOF;
        size_t n = last ? have : in.lines || cuttable ? last_cut(buffer, have, in.lines) : 0;
        if (n == 0 && !last) {  // no place to cut: read more
            cap *= 2;
            buffer = (char*)xrealloc(buffer, cap);
            continue;
        }
        buffer[have] = 0;
        ok = ok && (!first || input_check_start(&in, job->args, buffer, size_min(have, HEAD_BYTES), e));
        const size_t mark = first ? mark_length(job->args, buffer, n) : 0;
        list.count = 0;
        if (in.lines) {
            cut_lines(&list, buffer + mark, n - mark, &line);
        } else {
            cut_text(&list, buffer + mark, n - mark, first, cuttable);
        }
        blank = blank && is_blank(buffer + mark, n - mark);
        if (last && blank) { ok = fail(e, "%s: holds no text: it is blank", in.name); }
        first = false;
        bytes += n;
        ok = ok && write_parts(job, w, run_units(job, &list), &no_characters, e) &&
             input_check_characters(&in, job->args, no_characters, bytes, e);
        memmove(buffer, buffer + n, have - n);
        have -= n;
        progress_add(progress, n);
    }
    fclose(in.f);
    free(buffer);
    free(list.units);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// the two jobs

static void print_summary(const Job* job, const TokenFile* train, const TokenFile* val, double seconds) {
    char a[32], b[32], c[32];
    uint64_t documents = 0, bytes = 0, tokens = 0;
    for (int k = 0; k < job->num_parts; k++) {
        documents += job->parts[k].documents;
        bytes += job->parts[k].text_bytes;
        tokens += job->parts[k].text_tokens;
    }
    printf("%s document%s, %s tokens, %.2f bytes/token, %.1f s (%.1f MB/s); wrote %s", text_count(documents, a, sizeof a),
           documents == 1 ? "" : "s", text_count(train->count + val->count, b, sizeof b),
           (double)bytes / (double)(tokens ? tokens : 1), seconds, (double)bytes * 1e-6 / (seconds > 0 ? seconds : 1),
           train->path);
    if (val->path[0]) {
        printf(" (%s tokens) and %s (%s tokens)", text_count(train->count, a, sizeof a), val->path,
               text_count(val->count, c, sizeof c));
    }
    printf("\n");
}

/* Writes the name of the output: OUT.bin, or OUT_kind.bin if `kind` is not "". Makes its folder. Fails if the file is one of
 * the inputs. */
static bool out_path(char* path, const Args* a, const char* kind, Error* e) {
    const char* out = a->out;
    size_t len = strlen(out);
    struct stat there, input;
    if (*kind && len > 4 && strcmp(out + len - 4, ".bin") == 0) { len -= 4; }
    const int n = *kind ? snprintf(path, PATH_CAP, "%.*s_%s.bin", (int)len, out, kind) : snprintf(path, PATH_CAP, "%s", out);
    if (n >= PATH_CAP - 4) { return fail(e, "%.100s...: the path is too long", out); }
    if (is_directory(path) || path[n - 1] == '/') { return fail(e, "--out: %s is a folder, wanted the name of a file", path); }
    for (int tmp = 0; tmp < 2; tmp++) {
        strcpy(path + n, tmp ? ".tmp" : "");
        for (int i = 0; i < a->num_files && stat(path, &there) == 0; i++) {
            if (stat(a->files[i], &input) == 0 && input.st_dev == there.st_dev && input.st_ino == there.st_ino) {
                return fail(e, "--out: %s is the input %s, wanted another name: it would be overwritten", path, a->files[i]);
            }
        }
    }
    path[n] = 0;
    char* slash = strrchr(path, '/');
    if (!slash || slash == path) { return true; }
    *slash = 0;
    const bool made = !file_exists(path), ok = make_directories(path, e);
    if (made && ok) { printf("made folder %s\n", path); }
    *slash = '/';
    return ok;
}

static bool write_token_files(Job* job, Error* e) {
    const Args* a = job->args;
    const Tokenizer* t = job->t;
    const int token_bytes = t->vocab_size <= 65536 ? 2 : 4;
    const bool split = a->val_fraction > 0;
    char path[PATH_CAP];
    TokenFile *train = &token_files[0], *val = &token_files[1];
    uint64_t size = 0;
    catch_the_end();
    bool ok = check_all_inputs(a, &size, e);
    Progress progress = progress_begin(stdout, "read", size, "B");
    ok = ok && out_path(path, a, split ? "train" : "", e) && token_file_create(train, path, token_bytes, e);
    ok = ok && (!split || (out_path(path, a, "val", e) && token_file_create(val, path, token_bytes, e)));
    for (int i = 0; ok && i < a->num_files; i++) { ok = tokenize_input(job, train, &progress, a->files[i], e); }
    progress_end(&progress);
    if (ok && train->count == 0) {
        ok = fail(e, "%s: holds no text%s", job->path, a->num_files > 1 ? ", nor do the other files" : "");
    }
    if (ok && split) {
        uint64_t cut = 0;
        ok = find_cut(train, a->val_fraction, job->separator, &cut, e) && split_off(train, val, cut, e) &&
             token_file_finish(val, t, e);
    }
    ok = ok && token_file_finish(train, t, e) && token_files_publish(train, val, e);
    if (ok) { print_summary(job, train, val, now_seconds() - progress.start); }
    return ok;
}

/* Answers the lines of stdin in order, as soon as they arrive. */
static bool answer_lines(Job* job, Error* e) {
    size_t cap = 2 * STDIN_BYTES, have = 0;
    uint64_t line = 0;
    char* buffer = (char*)xmalloc(cap);
    UnitList list = {NULL, 0, 0};
    bool ok = true, last = false;
    job->path = "stdin";
    while (ok && !last) {
        if (cap - have < STDIN_BYTES) {
            cap *= 2;
            buffer = (char*)xrealloc(buffer, cap);
        }
        const ssize_t got = read(0, buffer + have, STDIN_BYTES);
        if (got < 0 && errno == EINTR) { continue; }
        if (got < 0) { ok = fail(e, "stdin: reading failed: %s", strerror(errno)); }
        last = got <= 0;
        const size_t before = have;
        have += got > 0 ? (size_t)got : 0;
        // only the new bytes can hold a newline
        const size_t n = last ? have : last_cut(buffer + before, have - before, true);
        const size_t end = last ? have : n ? before + n : 0;
        if (end == 0) { continue; }
        list.count = 0;
        cut_lines(&list, buffer, end, &line);
        const int parts = run_units(job, &list);
        for (int k = 0; k < parts; k++) {
            Part* p = &job->parts[k];
            fwrite(p->lines, 1, p->lines_len, stdout);
            free(p->lines);
            if (p->error.msg[0] && ok) { ok = fail(e, "%s", p->error.msg); }
            if (!ok) { break; }
        }
        if (fflush(stdout) != 0) { ok = fail(e, "stdout: writing failed: %s", strerror(errno)); }
        memmove(buffer, buffer + end, have - end);
        have -= end;
    }
    free(buffer);
    free(list.units);
    return ok;
}

int main(int argc, char** argv) {
    Args args;
    Tokenizer t;
    Error e = NO_ERROR;
    keep_standard_files();
    signal(SIGXFSZ, SIG_IGN);  // a file-size limit is a failed write, which has a message, not a death
    parse_args(&args, argc, argv);
    int threads = 1;
#ifdef _OPENMP
    if (args.threads) { omp_set_num_threads(args.threads); }
    threads = omp_get_max_threads();
#endif
    if (!args.tokenizer) {
        tokenizer_bytes(&t);
    } else if (!tokenizer_load(&t, args.tokenizer, &e)) {
        die("%s", e.msg);
    }
    Job job = {&t, &args, NULL, t.bos_id >= 0 ? t.bos_id : t.eos_id, NULL, threads * PARTS_PER_THREAD};
    job.parts = (Part*)xcalloc((size_t)job.num_parts, sizeof(Part));
    for (int k = 0; k < job.num_parts; k++) {
        encoder_init(&job.parts[k].encoder, &t);
        decoder_init(&job.parts[k].decoder, &t);
    }
    const bool lines = args.jsonl || args.decode;
    if (!lines && job.separator < 0) { warn("%s: has neither BOS nor EOS: nothing separates documents", args.tokenizer); }
    const bool ok = lines ? answer_lines(&job, &e) : write_token_files(&job, &e);
    for (int k = 0; k < job.num_parts; k++) {
        encoder_free(&job.parts[k].encoder);
        decoder_free(&job.parts[k].decoder);
    }
    free(job.parts);
    tokenizer_free(&t);
    free(args.files);
    if (!ok) { die("%s", e.msg); }
    return 0;
}
