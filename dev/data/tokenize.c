/* tokenize.c -- turns text and conversations into token files, and JSON lines into ids and back.
 *
 *   tokenize --tokenizer DIR|FILE -o OUT.bin FILE...            text files and .jsonl files to one token file (tokenfile.h)
 *   zcat FILE | tokenize --tokenizer DIR|FILE -o OUT.bin -      the same for a stream: -, /dev/stdin, /dev/fd/N
 *   tokenize --tokenizer DIR --chat -o OUT.bin FILE.jsonl...    conversations, whose answers are trained (conversation.h)
 *   tokenize --tokenizer DIR|FILE --show N FILE.bin             prints a document of a token file
 *   tokenize --train-bpe N -o tokenizer.json FILE...            text to a tokenizer of N tokens (bpe.h)
 *   tokenize --tokenizer DIR|FILE --jsonl                       {"text": ...} lines on stdin to {"ids": [...]} lines on stdout
 *   tokenize --tokenizer DIR|FILE --decode                      {"ids": [...]} lines on stdin to {"text": ...} lines on stdout
 *
 * It reads a file in batches (inputs.h) and cuts a batch into units. Threads encode runs of units in parallel
 * (encode_units.h), and one thread writes the results in order (token_writer.h). So a batch bounds the memory, however large
 * the file is, and the tokens do not depend on the number of threads. A text without a place to cut is encoded whole.
 *
 * Each document starts with BOS, which separates documents (llm.c's files use GPT-2's end of text for this). Files get their
 * names when all are complete. A failure or a signal removes unfinished files; the next run replaces the files of a killed one.
 */
#include "llmc/base/utils.h"  // first, since it asks for the functions beyond C11

#include "dev/data/encode_units.h"
#include "dev/data/inputs.h"
#include "dev/data/token_writer.h"
#include "dev/data/tokenize_flags.h"
#include "dev/data/train_bpe.h"
#include "llmc/base/threads.h"     // defines: max_threads, threads_start
#include "llmc/files/folder.h"     // defines: make_directories
#include "llmc/base/progress.h"    // defines: Progress, progress_begin, progress_add, progress_end
#include "llmc/files/tokenfile.h"  // defines: TokenReader, tokenfile_open, tokenfile_read_ids, tokenfile_mask_at, tokenfile_bit
#include "llmc/base/text.h"        // defines: text_count, print_names, print_escaped
#include "llmc/text/tokenizer.h"   // defines: Tokenizer, TokenDecoder, decoder_push, decoder_flush
#include "llmc/text/tokenizer_read.h"  // defines: tokenizer_load

#include <signal.h>

enum {
    BATCH_BYTES = 16 << 20,  // bytes of a file read at a time
    STDIN_BYTES = 1 << 20,   // most bytes of stdin read at a time; complete lines are answered at once
    PARTS_PER_THREAD = 4,    // runs of units for each thread: short ones balance the threads
    HEAD_BYTES = 4096,       // of a file: they show its kind
    SHOW_TOKENS = 1 << 12    // read at a time for --show; a multiple of 8, for the mask
};

// ---------------------------------------------------------------------------------------------------------------------
// the outputs

static TokenFile token_files[2];    // for training and for validation; global, since a signal may have to remove them
static char made_folder[PATH_CAP];  // the folder of the output, if it is new

/* Removes the unfinished files, and their folder if it is new and empty. A signal handler may call it. */
static void remove_unfinished(void) {
    for (int i = 0; i < 2; i++) {
        if (token_files[i].unfinished) { unlink(token_files[i].tmp); }
    }
    if (made_folder[0]) { rmdir(made_folder); }
}

static void on_signal(int signal_number) {
    for (int i = 0; i < 2; i++) {
        token_files[i].late = token_files[i].making ? signal_number : 0;
        if (token_files[i].late) { return; }
    }
    remove_unfinished();
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

/* Removes unfinished files at any end of the program but SIGKILL. A signal that is ignored (nohup) stays ignored. */
static void catch_the_end(void) {
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    atexit(remove_unfinished);
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
        if (signal(signals[i], on_signal) == SIG_IGN) { signal(signals[i], SIG_IGN); }
    }
}

/* Fails if the output `path` is the file `input`, which it would overwrite. */
static bool is_other_file(const char* path, const char* input, Error* e) {
    struct stat there, other;
    const bool same =
        stat(path, &there) == 0 && stat(input, &other) == 0 && other.st_dev == there.st_dev && other.st_ino == there.st_ino;
    return !same || fail(e, "--out: %s is the input %s, wanted another name: it would be overwritten", path, input);
}

/* Writes the name of the output: OUT.bin, or OUT_kind.bin if `kind` is not "". Makes its folder. Fails if the file is one of
 * the inputs or the tokenizer. */
static bool out_path(char* path, const Job* job, const char* kind, Error* e) {
    const Args* a = job->args;
    const char* out = a->out;
    size_t len = strlen(out);
    if (*kind && len > 4 && strcmp(out + len - 4, ".bin") == 0) { len -= 4; }
    const int n = *kind ? snprintf(path, PATH_CAP, "%.*s_%s.bin", (int)len, out, kind) : snprintf(path, PATH_CAP, "%s", out);
    if (n >= PATH_CAP - 4) { return fail(e, "%.100s...: the path is too long", out); }
    if (is_directory(path) || path[n - 1] == '/') { return fail(e, "--out: %s is a folder, wanted the name of a file", path); }
    for (int tmp = 0; tmp < 2; tmp++) {
        strcpy(path + n, tmp ? ".tmp" : "");
        if (job->t->path && !is_other_file(path, job->t->path, e)) { return false; }
        for (int i = 0; i < a->num_files; i++) {
            if (!is_other_file(path, a->files[i], e)) { return false; }
        }
    }
    path[n] = 0;
    char* slash = strrchr(path, '/');
    if (!slash || slash == path) { return true; }
    *slash = 0;
    const bool made = !file_exists(path);
    if (made) { strcpy(made_folder, path); }  // first: a signal may come in between
    const bool ok = make_directories(path, e);
    if (made && ok) { print_names(stdout, "made folder %s\n", path); }
    *slash = '/';
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// the summary

static void print_summary(const Job* job, const TokenFile* train, const TokenFile* val, double seconds) {
    char a[32], b[32], c[32];
    uint64_t documents = 0, bytes = 0, tokens = 0, left_out = 0;
    for (int k = 0; k < job->num_parts; k++) {
        documents += job->parts[k].documents;
        bytes += job->parts[k].text_bytes;
        tokens += job->parts[k].text_tokens;
        left_out += job->parts[k].left_out;
    }
    const uint64_t count = train->count + val->count;
    printf("%s %s%s, %s tokens", text_count(documents, a, sizeof a), job->args->chat ? "conversation" : "document",
           documents == 1 ? "" : "s", text_count(count, b, sizeof b));
    if (job->args->chat) {
        print_names(stdout, ", %.1f %% of them trained; wrote %s",
                    100 * (double)(train->trained + val->trained) / (double)count, train->path);
    } else {
        print_names(stdout, ", %.2f bytes/token, %.1f s (%.1f MB/s); wrote %s", (double)bytes / (double)(tokens ? tokens : 1),
                    seconds, (double)bytes * 1e-6 / (seconds > 0 ? seconds : 1), train->path);
    }
    if (val->path[0]) {
        print_names(stdout, " (%s token%s) and %s (%s token%s)", text_count(train->count, a, sizeof a),
                    text_plural((int64_t)train->count), val->path, text_count(val->count, c, sizeof c),
                    text_plural((int64_t)val->count));
    }
    printf("\n");
    if (left_out > 0) {
        printf(
            "%s answer%s not trained: the chat template changes an answer when a message follows, as one that hides thoughts\n",
            text_count(left_out, a, sizeof a), left_out == 1 ? " is" : "s are");
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// files and streams to token files

/* Says that names of special tokens became plain text, once. */
static void tell_of_names(Job* job, const Part* p) {
    char at[32] = "", name[64];
    size_t len;
    const char* text = tokenizer_token(job->t, p->special, &len);
    job->told_of_names = true;
    if (p->special_line) { snprintf(at, sizeof at, ":%llu", (unsigned long long)p->special_line); }
    warn(
        "%s%s: a text has the name of the special token %s, which is plain text here\n"
        "  hint: --specials makes such names tokens, and --chat takes conversations",
        job->path, at, show_text(name, sizeof name, text, len));
}

static bool write_parts(Job* job, TokenFile* w, int parts, uint64_t* no_characters, Error* e) {
    for (int k = 0; k < parts; k++) {
        Part* p = &job->parts[k];
        if (p->error.msg[0]) { return fail(e, "%s", p->error.msg); }
        *no_characters += p->no_characters;
        if (w && p->special >= 0 && !job->told_of_names) { tell_of_names(job, p); }
        if (w && !token_file_add(w, p->encoder.out.ids, p->encoder.out.count, e)) { return false; }
        if (!w || !w->masked) { continue; }
        token_file_mask(w, p->mask.marks, p->mask.count);
        token_file_check_starts(w, p->encoder.out.ids, p->mask.marks, p->mask.count, job->separator);
    }
    return true;
}

/* Opens each input and checks the first bytes of files, so that a bad input fails before an hour's work. Reads nothing of a
 * stream. Sets *size to the bytes of all inputs, or to 0 if one is a stream. */
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

/* Appends the tokens of one input; NULL: counts its pieces for --train-bpe. */
static bool tokenize_input(Job* job, TokenFile* w, Progress* progress, const char* path, Error* e) {
    const int cuts = !w ? CUT_AT_PIECES : tokenizer_may_cut(job->t) ? CUT_AT_LINES : CUT_NOWHERE;
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
        const size_t mark = first ? mark_length(job->args, buffer, have) : 0;
        size_t n = last                               ? have
                   : in.lines || cuts == CUT_AT_LINES ? last_cut(buffer, have, in.lines)
                   : cuts == CUT_AT_PIECES            ? mark + piece_last_border(buffer + mark, have - mark)
                                                      : 0;
        if (n == 0 && !last) {  // no place to cut: read more
            cap *= 2;
            buffer = (char*)xrealloc(buffer, cap);
            continue;
        }
        buffer[have] = 0;
        ok = ok && (!first || input_check_start(&in, job->args, buffer, size_min(have, HEAD_BYTES), e));
        if (ok && first) { input_warn_of_rows(&in, job->args, buffer + mark, n - mark); }
        list.count = 0;
        if (in.lines) {
            cut_lines(&list, buffer + mark, n - mark, &line);
        } else {
            cut_text(&list, buffer + mark, n - mark, first, cuts);
        }
        blank = blank && is_blank(buffer + mark, n - mark);
        if (last && blank) { ok = fail(e, "%s: holds no text: it is blank", in.name); }
        first = false;
        bytes += n;
        ok = ok && write_parts(job, w, run_units(job, &list), &no_characters, e) &&
             (w || input_check_utf8(&in, buffer, no_characters ? n : 0, bytes - n, e)) &&
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
    ok = ok && out_path(path, job, split ? "train" : "", e) && token_file_create(train, path, token_bytes, a->chat, e);
    ok = ok && (!split || (out_path(path, job, "val", e) && token_file_create(val, path, token_bytes, a->chat, e)));
    if (a->chat) { train->template_hash = val->template_hash = tokenfile_template_hash(chat_template(&job->rules)); }
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

/* Trains a tokenizer on all inputs. */
static bool train_bpe(Job* job, Error* e) {
    const Args* a = job->args;
    char path[PATH_CAP];
    uint64_t size = 0;
    Counting counting;
    catch_the_end();
    job->counting = counting_begin(&counting);
    bool ok = check_all_inputs(a, &size, e) && out_path(path, job, "", e) && token_file_begin(&token_files[0], path, e);
    Progress progress = progress_begin(stdout, "read", size, "B");
    for (int i = 0; ok && i < a->num_files; i++) { ok = tokenize_input(job, NULL, &progress, a->files[i], e); }
    progress_end(&progress);
    counting_end(&counting);
    ok = ok && write_trained(token_files, a, &counting.all, progress.start, e);
    piece_counts_free(&counting.all);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// lines of stdin to lines of stdout

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

// ---------------------------------------------------------------------------------------------------------------------
// --show: a document of a token file as text. If the file has a mask, [[ ]] encloses the tokens that are trained. Control
// characters are printed as \xNN, so that a terminal does not obey them

/* Prints the rest of a stretch of text, and then a mark. */
static void show_mark(TokenDecoder* d, const char* mark) {
    size_t len;
    const char* rest = decoder_flush(d, &len);
    fwrite(rest, 1, len, stdout);
    fputs(mark, stdout);
}

/* Prints document `number`, from 1. A document starts where the file marks a start, or without marks with the separator; -1:
 * there is none, and the file is one document. */
static bool show_document(const Tokenizer* t, int separator, const char* path, uint64_t number, Error* e) {
    unsigned char raw[4 * SHOW_TOKENS], mask[SHOW_TOKENS / 8], starts[SHOW_TOKENS / 8];
    int32_t ids[SHOW_TOKENS];
    TokenReader file;
    TokenDecoder d;
    if (!tokenfile_open(&file, path, e)) { return false; }
    file.limit = t->vocab_size;
    const TokenFileHeader h = file.h;
    bool ok = h.fingerprint == 0 || h.fingerprint == t->fingerprint ||
              fail(e, "%s: was made with another tokenizer, wanted --tokenizer with the one it was made with", path);
    bool trained = false;
    uint64_t document = 0;
    decoder_init(&d, t);
    for (uint64_t at = 0, n; ok && at < h.num_tokens && document <= number; at += n) {
        n = size_min(h.num_tokens - at, SHOW_TOKENS);
        ok = tokenfile_read_ids(&file, at, n, raw, ids, "the tokens", e) &&
             (!h.masked || read_at(fileno(file.f), tokenfile_mask_at(&h) + at / 8, mask, (n + 7) / 8, path, "the mask", e)) &&
             (!h.starts ||
              read_at(fileno(file.f), tokenfile_starts_at(&h) + at / 8, starts, (n + 7) / 8, path, "the starts", e));
        for (uint64_t i = 0; ok && i < n && document <= number; i++) {
            document += (h.starts ? tokenfile_bit(starts, i) : ids[i] == separator) || at + i == 0;
            if (document != number) { continue; }
            if (h.masked && tokenfile_bit(mask, i) != trained) {
                trained = !trained;
                show_mark(&d, trained ? "[[" : "]]");
            }
            size_t len;
            const char* text = decoder_push(&d, ids[i], &len);
            print_escaped(stdout, text, len);
        }
    }
    if (ok && document < number) {
        ok = fail(e, "%s: has %llu documents, wanted --show with at most that", path, (unsigned long long)document);
    }
    if (ok) { show_mark(&d, trained ? "]]\n" : "\n"); }
    decoder_free(&d);
    tokenfile_close(&file);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------

/* Opens the form of --chat: the template beside the tokenizer. */
static bool open_chat(Job* job, Error* e) {
    if (!text_rules_read(&job->rules, job->t, NULL, NULL, false, false, e)) { return false; }
    if (!chat_form_open(&job->form, &job->rules, job->args->date, e)) { return false; }
    if (job->form.end_of_turn < 0) {
        warn("%s: the chat template ends an answer with no special token: a model will not learn where to end",
             job->rules.chat_template ? job->rules.template_path : "Llama 3");
    }
    for (int k = 0; k < job->num_parts; k++) {
        chat_writer_init(&job->parts[k].writer.chat, &job->form, &job->parts[k].encoder);
    }
    return true;
}

int main(int argc, char** argv) {
    Args args;
    Tokenizer t;
    Error e = NO_ERROR;
    keep_standard_files();
    signal(SIGXFSZ, SIG_IGN);  // a file-size limit then fails a write, which has a message
    parse_args(&args, argc, argv);
#ifdef _OPENMP
    if (args.threads) { omp_set_num_threads((int)args.threads); }
    threads_start();
#endif
    const int threads = (int)max_threads();
    if (!args.tokenizer) {
        tokenizer_bytes(&t);
    } else if (!tokenizer_load(&t, args.tokenizer, &e)) {
        die("%s", e.msg);
    }
    Job job = {.t = &t, .args = &args, .num_parts = threads * PARTS_PER_THREAD};
    job.separator = t.bos_id >= 0 ? t.bos_id : t.eos_id;
    job.parts = (Part*)xcalloc((size_t)job.num_parts, sizeof(Part));
    for (int k = 0; k < job.num_parts; k++) {
        encoder_init(&job.parts[k].encoder, &t);
        decoder_init(&job.parts[k].decoder, &t);
    }
    if (args.chat && !open_chat(&job, &e)) { die("%s", e.msg); }
    const bool lines = args.jsonl || args.decode;
    if (!lines && !args.show && !args.chat && job.separator < 0) {
        warn("%s: has neither BOS nor EOS: nothing separates documents", args.tokenizer);
    }
    const bool ok = lines            ? answer_lines(&job, &e)
                    : args.show      ? show_document(&t, job.separator, args.files[0], args.show, &e)
                    : args.train_bpe ? train_bpe(&job, &e)
                                     : write_token_files(&job, &e);
    for (int k = 0; k < job.num_parts; k++) {
        encoder_free(&job.parts[k].encoder);
        decoder_free(&job.parts[k].decoder);
        answer_writer_free(&job.parts[k].writer);
        free(job.parts[k].mask.marks);
    }
    chat_form_close(&job.form);
    text_rules_free(&job.rules);
    free(job.parts);
    tokenizer_free(&t);
    free(args.files);
    if (!ok) { die("%s", e.msg); }
    if (args.show && (fflush(stdout) != 0 || ferror(stdout))) { die("stdout: writing failed: %s", strerror(errno)); }
    return 0;
}
