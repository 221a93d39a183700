/* fuzz_tokenize.c -- reads the bytes as the input of ./tokenize: a .jsonl file, lines for --jsonl, lines for --decode or a
 * text (first byte). --decode must give back the lines that --jsonl encodes, and each answer is one line of JSON. The units of
 * a text, joined, must be the text and have the ids of the text in one piece. The token file must hold the ids of the units. */
#include "fuzz.h"

#define main tokenize_main
#include "dev/data/tokenize.c"
#undef main

enum { PARTS = 2, MOST_LINES = 64 };

static Tokenizer bytes_only;

static void job_init(Job* job, const Args* args, Part* parts) {
    memset(job, 0, sizeof *job);
    memset(parts, 0, PARTS * sizeof *parts);
    job->t = &bytes_only;
    job->args = args;
    job->path = "input";
    job->separator = bytes_only.bos_id;
    job->parts = parts;
    job->num_parts = PARTS;
    for (int k = 0; k < PARTS; k++) {
        encoder_init(&parts[k].encoder, &bytes_only);
        decoder_init(&parts[k].decoder, &bytes_only);
    }
}

static void job_free(Job* job) {
    for (int k = 0; k < PARTS; k++) {
        encoder_free(&job->parts[k].encoder);
        decoder_free(&job->parts[k].decoder);
        free(job->parts[k].lines);
    }
}

/* Runs lines through --jsonl or --decode. Returns the answers up to the first error, one line each. */
static char* answer(const Args* args, const char* text, size_t len, size_t* out_len, Error* e) {
    Part parts[PARTS];
    Job job;
    UnitList list = {NULL, 0, 0};
    uint64_t line = 0;
    job_init(&job, args, parts);
    cut_lines(&list, text, len, &line);
    char* out = fuzz_text(NULL, 0);
    *out_len = 0;
    const int used = list.count ? run_units(&job, &list) : 0;
    for (int k = 0; k < used && !e->msg[0]; k++) {
        out = (char*)xrealloc(out, *out_len + parts[k].lines_len + 1);
        memcpy(out + *out_len, parts[k].lines, parts[k].lines_len);
        *out_len += parts[k].lines_len;
        out[*out_len] = 0;
        if (parts[k].error.msg[0]) { fail(e, "%s", parts[k].error.msg); }
    }
    size_t lines = 0;
    for (size_t i = 0; i < *out_len; i++) { lines += out[i] == '\n'; }
    REQUIRE(e->msg[0] ? lines < list.count : lines == list.count);
    free(list.units);
    job_free(&job);
    return out;
}

/* Gives the lines to stdin and requires these answers on stdout. */
static void check_stdin(const Args* args, const char* text, size_t len, const char* want, size_t want_len, bool whole) {
    Part parts[PARTS];
    Job job;
    Error e = NO_ERROR;
    char* got = NULL;
    size_t got_len = 0;
    const int fd = open(fuzz_file((const uint8_t*)text, len), O_RDONLY);
    REQUIRE(fd >= 0 && dup2(fd, 0) == 0);
    close(fd);
    FILE* real = stdout;
    stdout = open_memstream(&got, &got_len);
    job_init(&job, args, parts);
    const bool ok = answer_lines(&job, &e);
    fclose(stdout);
    stdout = real;
    fuzz_check_error(ok, &e);
    REQUIRE(ok == whole && got_len == want_len && memcmp(got, want, want_len) == 0);
    free(got);
    for (int k = 0; k < PARTS; k++) { parts[k].lines = NULL; }  // they are freed
    job_free(&job);
}

/* Returns the strings of one member of each line of JSON. The last line may lack its newline. */
static char* members(const char* text, size_t len, const char* key) {
    char* out = NULL;
    size_t size = 0;
    FILE* f = open_memstream(&out, &size);
    for (size_t i = 0, start = 0; start < len; i++) {
        if (i < len && text[i] != '\n') { continue; }
        Json j;
        Error e = NO_ERROR;
        size_t n = 0;
        must(json_parse(&j, fuzz_text(text + start, i - start), i - start, "line", &e), &e);
        const char* s = json_string(&j, json_get(&j, json_root(&j), key), &n);
        REQUIRE(s);
        json_write_string(f, s, n);
        fputc(',', f);
        json_free(&j);
        start = i + 1;
    }
    fclose(f);
    return out;
}

static void check_lines(const char* text, size_t len, bool specials) {
    Args encode, decode;
    Error e = NO_ERROR;
    size_t ids_len = 0, back_len = 0;
    memset(&encode, 0, sizeof encode);
    memset(&decode, 0, sizeof decode);
    encode.jsonl = decode.decode = true;
    encode.specials = specials;
    char* ids = answer(&encode, text, len, &ids_len, &e);
    fuzz_check_error(!e.msg[0], &e);
    const bool whole = !e.msg[0];
    check_stdin(&encode, text, len, ids, ids_len, whole);
    e.msg[0] = 0;
    char* back = answer(&decode, ids, ids_len, &back_len, &e);
    REQUIRE(!e.msg[0]);
    if (whole && !specials) {
        char *want = members(text, len, "text"), *got = members(back, back_len, "text");
        REQUIRE(strcmp(want, got) == 0);
        free(want);
        free(got);
    }
    free(ids);
    free(back);
}

static void check_decode(const char* text, size_t len) {
    Args decode;
    Error e = NO_ERROR;
    size_t out_len = 0;
    memset(&decode, 0, sizeof decode);
    decode.decode = true;
    char* out = answer(&decode, text, len, &out_len, &e);
    fuzz_check_error(!e.msg[0], &e);
    free(members(out, out_len, "text"));
    free(out);
}

/* Writes the token file of a file of these bytes and requires the tokens of the parts that are `used`. */
static void check_token_file(const char* text, size_t len, const char* name, Job* job, int used) {
    char in[PATH_CAP], path[PATH_CAP], *files[1] = {in};
    Args args = *job->args;
    Part parts[PARTS];
    Job again;
    Error e = NO_ERROR;
    fuzz_write(fuzz_path(in, name), text, len);
    args.out = fuzz_path(path, "out.bin");
    args.bytes = true;
    args.files = files;
    args.num_files = 1;
    job_init(&again, &args, parts);
    const bool ok = write_token_files(&again, &e);
    fuzz_check_error(ok, &e);
    size_t bytes = 0, at = TOKENFILE_HEADER_BYTES;
    char* written = ok ? read_file(path, &bytes, 1 << 24, &e) : NULL;
    for (int k = 0; k < used; k++) {
        REQUIRE(!ok || !job->parts[k].error.msg[0]);
        for (size_t i = 0; ok && i < job->parts[k].encoder.out.count; i++, at += 2) {
            uint16_t id;
            REQUIRE(at + 2 <= bytes);
            memcpy(&id, written + at, 2);
            REQUIRE(id == job->parts[k].encoder.out.ids[i]);
        }
    }
    REQUIRE(!ok || at == bytes);
    free(written);
    if (token_files[0].f) { fclose(token_files[0].f); }
    if (token_files[0].unfinished) { close(token_files[0].lock); }
    remove_unfinished();
    memset(token_files, 0, sizeof token_files);
    unlink(in);
    job_free(&again);
}

/* Encodes a file's batch: a text, or the lines of a .jsonl. */
static void check_file(const char* text, size_t len, bool is_text, bool specials) {
    Args args;
    Part parts[PARTS];
    Job job;
    UnitList list = {NULL, 0, 0};
    uint64_t line = 0;
    memset(&args, 0, sizeof args);
    args.specials = specials;
    args.out = "out.bin";
    const Input in = {"input", "input", NULL, len, false, !is_text};
    Error e = NO_ERROR;
    fuzz_check_error(input_check_start(&in, &args, text, len, &e) &&
                         input_check_characters(&in, &args, count_no_characters(text, len), len, &e),
                     &e);
    job_init(&job, &args, parts);
    if (is_text) {
        cut_text(&list, text, len, true, true);
    } else {
        cut_lines(&list, text, len, &line);
    }
    const int used = list.count ? run_units(&job, &list) : 0;
    size_t ids = 0, documents = 0, covered = 0;
    for (int k = 0; k < used; k++) {
        fuzz_check_error(!parts[k].error.msg[0], &parts[k].error);
        for (size_t i = 0; i < parts[k].encoder.out.count; i++) {
            const int32_t id = parts[k].encoder.out.ids[i];
            REQUIRE(id >= 0 && id < bytes_only.vocab_size);
            documents += id == bytes_only.bos_id;
        }
        ids += parts[k].encoder.out.count;
    }
    for (size_t i = 0; is_text && i < list.count; i++) {
        REQUIRE(list.units[i].text == text + covered);
        covered += list.units[i].len;
    }
    const size_t cut = last_cut(text, len, !is_text);
    REQUIRE(cut <= len && (cut == 0 || (is_text ? cut < len && text_border(text, cut) : text[cut - 1] == '\n')));
    check_token_file(text, len, is_text ? "in.txt" : "in.jsonl", &job, used);
    // every byte is a token; each document has a separator in front
    REQUIRE(!is_text || (covered == len && (specials || ids == len + documents)));
    free(list.units);
    job_free(&job);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size < 1) { return 0; }
    if (!bytes_only.vocab_size) { tokenizer_bytes(&bytes_only); }
    const bool specials = data[0] & 4;
    char* text = fuzz_text(data + 1, size - 1);
    switch (data[0] % 4) {
        case 0: check_lines(text, size - 1, specials); break;
        case 1: check_decode(text, size - 1); break;
        default: check_file(text, size - 1, data[0] % 4 == 2, specials);
    }
    free(text);
    return 0;
}
