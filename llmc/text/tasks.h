/* tasks.h -- multiple-choice questions for --tasks: reads and encodes them, gives them out as rows of a batch, scores them.
 *
 * A file has one question a line, {"ctx": text, "choices": [texts], "label": index of the right one}. The model's answer is the
 * choice with the highest log-likelihood after the context. `acc` counts right answers. `acc_norm` counts them with each
 * likelihood divided by the choice's number of characters. The first of equal choices wins. The rules are the rules of lm-eval,
 * and so the scores agree:
 *
 *   context and " " + choice are encoded together and split at the length of the encoded context;
 *   white space at the context's end goes to the choice;
 *   BOS comes first if the tokenizer adds it and the context does not begin with its name; an empty context is BOS alone;
 *   names of special tokens become these tokens;
 *   a question longer than a row loses tokens on the left.
 *
 * A row holds one choice: T inputs and targets, padded on the right, where no token that counts sees the padding.
 */
#ifndef LLMC_TASKS_H
#define LLMC_TASKS_H

#include "llmc/base/utils.h"  // first, since it asks for the functions beyond C11

#include "llmc/base/crc.h"         // defines: Crc, crc_begin, crc_add, crc_end
#include "llmc/files/json.h"       // defines: Json, json_parse_line, json_wanted
#include "llmc/text/text_rules.h"  // defines: TextRules, text_rules_begins_with_bos
#include "llmc/text/tokenizer.h"   // defines: Tokenizer, TokenEncoder, encoder_text
#include "llmc/text/unicode.h"     // defines: unicode_is_stripped

#include <glob.h>
#include <math.h>

typedef struct {
    size_t at;      // its first token in Tasks.ids
    size_t tokens;  // of context and choice
    size_t scored;  // the last tokens, which are the choice
    size_t chars;   // of the choice's text
} TaskChoice;

typedef struct {
    size_t first;  // in Tasks.choices
    size_t count;  // of choices
    size_t label;  // the right one, from 0
    size_t line;   // in the file, from 1
} TaskQuestion;

typedef struct {
    char* path;
    size_t first, count;                // in Tasks.questions
    size_t first_choice, choice_count;  // in Tasks.choices
} TaskFile;

typedef struct {
    int T;          // tokens of a row
    size_t cut;     // choices that lose tokens on the left
    TokenList ids;  // of all choices
    TaskChoice* choices;
    size_t num_choices, choice_cap;
    TaskQuestion* questions;
    size_t num_questions, question_cap;
    TaskFile* files;
    size_t num_files;
    size_t next;  // the choice that tasks_next() gives out
} Tasks;

typedef struct {
    double acc, acc_norm;
} TaskScore;

enum { TASK_CHOICES_MAX = 1000 };
#define TASK_FILE_MAX ((uint64_t)1 << 32)  // bytes

static inline void tasks_free(Tasks* t) {
    for (size_t i = 0; i < t->num_files; i++) { free(t->files[i].path); }
    token_list_free(&t->ids);
    free(t->choices);
    free(t->questions);
    free(t->files);
    memset(t, 0, sizeof *t);
}

// ---------------------------------------------------------------------------------------------------------------------
// encoding

typedef struct {
    TokenEncoder context, whole;
    int bos;        // what an empty context becomes: BOS, otherwise EOS
    bool adds_bos;  // whether BOS is put in front of every text
} TaskEncoder;

/* Sets up an encoder for the rules' tokenizer. */
static inline bool task_encoder_init(TaskEncoder* c, const TextRules* r, Error* e) {
    const Tokenizer* t = r->tokenizer;
    encoder_init(&c->context, t);
    encoder_init(&c->whole, t);
    c->bos = t->bos_id >= 0 ? t->bos_id : t->eos_id;
    c->adds_bos = text_rules_begins_with_bos(r);
    return c->bos >= 0 || fail(e, "--tasks: the tokenizer has neither BOS nor EOS, wanted one to put before a text");
}

static inline void task_encoder_free(TaskEncoder* c) {
    encoder_free(&c->context);
    encoder_free(&c->whole);
}

/* Encodes a text as the tokenizer's users do. */
static inline void task_encode(const TaskEncoder* c, TokenEncoder* enc, const char* text, size_t len) {
    TokenList* out = &enc->out;
    out->count = 0;
    if (c->adds_bos) { token_list_add(out, c->bos); }
    encoder_text(enc, text, len, true);
    if (c->adds_bos && out->count > 1 && out->ids[1] == c->bos) {
        memmove(out->ids, out->ids + 1, --out->count * sizeof(int32_t));
    }
}

/* Returns the length of a text without the white space at its end. */
static inline size_t task_strip(const char* s, size_t len) {
    size_t end = 0;
    for (size_t i = 0; i < len;) {
        uint32_t c;
        const size_t n = (size_t)utf8_decode((const uint8_t*)s + i, len - i, &c);  // JSON is valid UTF-8
        i += n ? n : 1;
        if (!unicode_is_stripped(c)) { end = i; }
    }
    return end;
}

static inline size_t task_characters(const char* s, size_t len) {
    size_t count = 0;
    for (size_t i = 0; i < len; i++) { count += ((unsigned char)s[i] & 0xC0) != 0x80; }
    return count;
}

/* Adds one choice. `text` is the context, a blank and the choice; `stripped` is the length of the context without the white
 * space at its end. c->context has the encoded context. Returns false if the choice has no token of its own. */
static inline bool tasks_add_choice(Tasks* t, TaskEncoder* c, const char* text, size_t len, size_t stripped, size_t chars) {
    const TokenList *ctx = &c->context.out, *whole = &c->whole.out;
    const size_t from = stripped > 0 ? ctx->count : c->adds_bos;  // where the choice's tokens begin
    TaskChoice choice = {t->ids.count, 0, 0, chars};
    task_encode(c, &c->whole, text, len);
    if (whole->count <= from) { return false; }
    if (stripped == 0) { token_list_add(&t->ids, c->bos); }
    for (size_t i = 0; stripped > 0 && i < from; i++) { token_list_add(&t->ids, ctx->ids[i]); }
    for (size_t i = from; i < whole->count; i++) { token_list_add(&t->ids, whole->ids[i]); }
    choice.tokens = t->ids.count - choice.at;
    choice.scored = whole->count - from;
    t->choices = (TaskChoice*)xgrow(t->choices, t->num_choices, &t->choice_cap, sizeof choice);
    t->choices[t->num_choices++] = choice;
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// reading

/* Reads the choices of a question. */
static inline bool tasks_read_choices(Tasks* t, TaskEncoder* c, const Json* j, const JsonNode* list, const char* ctx,
                                      size_t ctx_len, Error* e) {
    const size_t stripped = task_strip(ctx, ctx_len);
    bool ok = true;
    task_encode(c, &c->context, ctx, stripped);
    for (const JsonNode* n = json_first(j, list); ok && n; n = json_next(j, n)) {
        size_t len = 0;
        const char* choice = json_string(j, n, &len);
        if (!choice || len == 0) { return fail(e, "%s: \"choices\" holds what is no text or empty, wanted texts", j->path); }
        char* text = (char*)xmalloc(ctx_len + 1 + len);
        memcpy(text, ctx, ctx_len);
        text[ctx_len] = ' ';
        memcpy(text + ctx_len + 1, choice, len);
        ok = tasks_add_choice(t, c, text, ctx_len + 1 + len, stripped, task_characters(choice, len));
        free(text);
        if (!ok) { fail(e, "%s: a choice has no token of its own: it melts into the context", j->path); }
    }
    return ok;
}

/* Reads one line, which is an object. */
static inline bool tasks_read_question(Tasks* t, TaskEncoder* c, const Json* j, size_t line, Error* e) {
    const JsonNode *root = json_root(j), *list = json_get(j, root, "choices");
    TaskQuestion q = {t->num_choices, 0, 0, line};
    size_t ctx_len = 0;
    int64_t label = 0;
    if (root->type != JSON_OBJECT) { return fail(e, "%s: is no object, wanted {\"ctx\", \"choices\", \"label\"}", j->path); }
    const char* ctx = json_string(j, json_get(j, root, "ctx"), &ctx_len);
    if (!ctx) { return json_wanted(j, root, "ctx", e, "a text"); }
    if (!list || list->type != JSON_ARRAY || json_length(list) == 0 || json_length(list) > TASK_CHOICES_MAX) {
        return json_wanted(j, root, "choices", e, "an array of 1 to %d texts", TASK_CHOICES_MAX);
    }
    q.count = json_length(list);
    if (!json_int(j, root, "label", 0, (int64_t)q.count - 1, &label, e)) { return false; }
    q.label = (size_t)label;
    if (!tasks_read_choices(t, c, j, list, ctx, ctx_len, e)) { return false; }
    t->questions = (TaskQuestion*)xgrow(t->questions, t->num_questions, &t->question_cap, sizeof q);
    t->questions[t->num_questions++] = q;
    return true;
}

/* Reads the questions of a text; empty lines are none. */
static inline bool tasks_read_lines(Tasks* t, TaskEncoder* c, const char* text, size_t size, const char* path, Error* e) {
    bool ok = true;
    size_t number = 1, length;
    for (const char *line = text, *end = text + size; ok && line < end; line += length + 1, number++) {
        char at[PATH_CAP + 32];
        Json j;
        const char* newline = (const char*)memchr(line, '\n', (size_t)(end - line));
        length = (size_t)((newline ? newline : end) - line);
        if (strspn(line, " \t\r\n") >= length) { continue; }  // the text ends in a NUL
        snprintf(at, sizeof at, "%s:%zu", path, number);
        if (!json_parse_line(&j, line, length, at, e)) { return false; }
        ok = tasks_read_question(t, c, &j, number, e);
        json_free(&j);
    }
    return ok;
}

static inline bool tasks_read_file(Tasks* t, TaskEncoder* c, const char* path, Error* e) {
    size_t size = 0;
    if (!file_exists(path)) {
        return fail(
            e, "--tasks: %s is missing\n  hint: python3 dev/data/tasks.py hellaswag writes tasks/hellaswag.jsonl, and so on",
            path);
    }
    char* text = read_file(path, &size, TASK_FILE_MAX, e);
    if (!text) { return false; }
    TaskFile file = {xstrdup(path), t->num_questions, 0, t->num_choices, 0};
    bool ok = tasks_read_lines(t, c, text, size, path, e);
    free(text);
    file.count = t->num_questions - file.first;
    file.choice_count = t->num_choices - file.first_choice;
    t->files = (TaskFile*)xrealloc(t->files, (t->num_files + 1) * sizeof file);
    t->files[t->num_files++] = file;
    return ok && (file.count > 0 || fail(e, "%s: holds no question, wanted one a line", path));
}

/* Reads every file that `pattern` names, in the order of their names. Free with tasks_free(), also after a failure. */
static inline bool tasks_open(Tasks* t, const char* pattern, const TextRules* r, Error* e) {
    TaskEncoder c;
    glob_t found;
    memset(t, 0, sizeof *t);
    memset(&found, 0, sizeof found);
    bool ok = task_encoder_init(&c, r, e);
    if (!ok || file_exists(pattern) || glob(pattern, 0, NULL, &found) != 0) { ok = ok && tasks_read_file(t, &c, pattern, e); }
    for (size_t i = 0; ok && i < found.gl_pathc; i++) { ok = tasks_read_file(t, &c, found.gl_pathv[i], e); }
    globfree(&found);
    task_encoder_free(&c);
    return ok && text_rules_hold(r, t->ids.ids, t->ids.count, e);
}

/* Returns a number that differs for other questions: a CRC-32C of their tokens, choices and labels. */
static inline uint32_t tasks_fingerprint(const Tasks* t) {
    Crc crc;
    crc_begin(&crc);
    crc_add(&crc, t->ids.ids, t->ids.count * sizeof *t->ids.ids);
    for (size_t i = 0; i < t->num_choices; i++) {
        const TaskChoice* c = &t->choices[i];
        const uint64_t words[3] = {c->tokens, c->scored, c->chars};
        crc_add(&crc, words, sizeof words);
    }
    for (size_t i = 0; i < t->num_questions; i++) {
        const TaskQuestion* q = &t->questions[i];
        const uint64_t words[3] = {q->first, q->count, q->label};
        crc_add(&crc, words, sizeof words);
    }
    return crc_end(&crc);
}

/* Returns the tokens of the longest row. */
static inline size_t tasks_longest(const Tasks* t) {
    size_t longest = 1;
    for (size_t i = 0; i < t->num_choices; i++) { longest = size_max(longest, t->choices[i].tokens - 1); }
    return longest;
}

/* Sets the length of a row and counts the choices that are cut to it. Fails if one does not fit even without its context. */
static inline bool tasks_set_length(Tasks* t, int T, Error* e) {
    t->T = T;
    t->cut = 0;
    for (size_t i = 0; i < t->num_files; i++) {
        const TaskFile* f = &t->files[i];
        for (size_t k = f->first; k < f->first + f->count; k++) {
            const TaskQuestion* q = &t->questions[k];
            for (size_t n = q->first; n < q->first + q->count; n++) {
                const TaskChoice* choice = &t->choices[n];
                t->cut += choice->tokens > (size_t)T + 1;
                if (choice->scored <= (size_t)T) { continue; }
                return fail(e, "%s:%zu: a choice has %zu tokens, wanted at most %d, one row", f->path, q->line, choice->scored,
                            T);
            }
        }
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// rows and scores

/* Writes the row of the next choice, or an empty one after the last: the next() of a BatchSource of one row. */
static inline bool tasks_next(void* tasks, int32_t* x /* (T) */, int32_t* y /* (T) */, Error* e) {
    Tasks* t = (Tasks*)tasks;
    const size_t T = (size_t)t->T;
    (void)e;
    memset(x, 0, T * sizeof *x);
    memset(y, 0, T * sizeof *y);
    if (t->next >= t->num_choices) { return true; }
    const TaskChoice* c = &t->choices[t->next++];
    const size_t n = size_min(c->tokens - 1, T);
    const int32_t* last = t->ids.ids + c->at + c->tokens;  // behind the row
    memcpy(x, last - n - 1, n * sizeof *x);
    memcpy(y, last - n, n * sizeof *y);
    return true;
}

/* Returns the log-likelihood of a choice from the losses (count) of its row from token `first` on, as far as they cover it. */
static inline double task_likelihood(const Tasks* t, const TaskChoice* c, const float* losses, size_t first, size_t count) {
    const size_t n = size_min(c->tokens - 1, (size_t)t->T), end = size_min(n, first + count);
    double sum = 0;
    for (size_t i = size_max(n - c->scored, first); i < end; i++) { sum -= losses[i - first]; }
    return sum;
}

/* Scores the questions of a file: NaN if a likelihood is. */
static inline TaskScore tasks_score(const Tasks* t, const TaskFile* f, const double* likelihoods /* (f->choice_count) */) {
    const TaskScore broken = {NAN, NAN};
    TaskScore score = {0, 0};
    for (size_t k = f->first; k < f->first + f->count; k++) {
        const TaskQuestion* q = &t->questions[k];
        const double* l = likelihoods + (q->first - f->first_choice);
        const TaskChoice* c = t->choices + q->first;
        size_t best = 0, best_norm = 0;
        for (size_t i = 0; i < q->count; i++) {
            if (isnan(l[i])) { return broken; }
            if (l[i] > l[best]) { best = i; }
            if (l[i] / (double)c[i].chars > l[best_norm] / (double)c[best_norm].chars) { best_norm = i; }
        }
        score.acc += best == q->label;
        score.acc_norm += best_norm == q->label;
    }
    score.acc /= (double)f->count;
    score.acc_norm /= (double)f->count;
    return score;
}

#endif
