/* jobs.h -- the jobs besides training, shared by both trainers: checking memory, loading a model, the validation loss and
 * the answers to --tasks, --eval, --generate, --chat and --answer. export.h has --export, training.h the parts of the training
 * loop.
 */
#ifndef LLMC_JOBS_H
#define LLMC_JOBS_H

#include "llmc/base/utils.h"
#include "llmc/run/jobs/answer.h"
#include "llmc/run/jobs/chat.h"
#include "llmc/run/jobs/export.h"
#include "llmc/run/jobs/generate.h"
#include "llmc/run/session/memory.h"
#include "llmc/run/screen/progress.h"
#include "llmc/run/session/row_parts.h"
#include "llmc/run/jobs/sampler.h"
#include "llmc/run/session/session.h"
#include "llmc/run/session/trainer.h"
#include "llmc/run/jobs/verify.h"

#include <math.h>

// ---------------------------------------------------------------------------------------------------------------------
// memory and models

typedef struct {
    const Trainer* trainer;
    const Session* session;
} MemoryQuestion;

/* Returns the bytes that a run with the options `o` needs (a MemoryNeed). */
static inline uint64_t job_memory_need(void* question, const Options* o) {
    const MemoryQuestion* q = (const MemoryQuestion*)question;
    MemoryTable table;
    memset(&table, 0, sizeof table);
    q->trainer->measure(q->trainer, q->session, o, &table);
    return memory_total(&table);
}

/* Names what the memory is for: the files whose numbers decide its size. */
static inline void job_memory_text(const Trainer* t, const Session* s, char* text, size_t cap) {
    const char* words = !s->has_tokenizer ? s->options.train : s->tokenizer.path ? s->tokenizer.path : "the built-in tokenizer";
    ModelConfig preset;
    if (s->model_dir[0]) {
        snprintf(text, cap, "%s: the model of %s/config.json", t->memory, s->base_dir);
    } else if (config_preset(&preset, s->options.model, 1) && preset.vocab_size != 1) {  // it has its own vocabulary
        snprintf(text, cap, "%s: the model %s", t->memory, s->options.model);
    } else {
        snprintf(text, cap, "%s: the model %s with the vocabulary of %s", t->memory, s->options.model, words);
    }
}

/* --recompute auto: takes the cheapest value that fits on every rank. They share passes through the layers, so all take the
 * value of the rank with the least room. */
static inline void job_choose_recompute(Session* s, const MemoryRoom* room, FILE* screen) {
    Recompute* r = &s->options.recompute;
    char text[OPTION_TEXT];
    memory_choose_recompute(room, &s->options);
    agree_most(s->team, r->blocks, RECOMPUTE_LEVELS);
    Recompute chosen = *r;
    chosen.automatic = false;
    if (screen) { fprintf(screen, "memory  --recompute auto takes %s\n", recompute_text(&chosen, text, sizeof text)); }
}

/* Prints the memory table to `screen` (or NULL) and refuses a job that does not fit. */
static inline void job_check_memory(const Trainer* t, Session* s, FILE* screen) {
    const Options* o = &s->options;
    MemoryQuestion question = {t, s};
    const MemoryRoom room = {t->available(t, o), session_share(s).groups, s->config.num_layers, job_memory_need, &question};
    MemoryTable table;
    Error e = NO_ERROR;
    if (o->recompute.automatic && job_trains(s->job)) { job_choose_recompute(s, &room, screen); }
    memset(&table, 0, sizeof table);
    t->measure(t, s, o, &table);
    if (screen) { print_memory(screen, &table, room.have); }
    char what[3 * PATH_CAP];
    job_memory_text(t, s, what, sizeof what);
    must(memory_check(&table, &room, what, o, &e), &e);
}

/* Creates a model and gives it the weights of the session's folder, or new ones. */
static inline void* job_open_model(const Trainer* t, Session* s) {
    void* model = t->create(t, s);
    const StateSlot weights = t->slot(model, SLOT_WEIGHTS);
    if (s->model_dir[0]) {
        session_load_weights(s, weights.sink, weights.ctx);
    } else {
        session_draw_weights(s, weights.sink, weights.ctx);
    }
    if (s->config.lora.rank > 0) {
        const StateSlot adapters = t->slot(model, SLOT_MASTER);
        session_load_adapters(s, adapters.sink, adapters.ctx);
    }
    return model;
}

/* Reads the weights that job_open_model() would load. Nothing holds them, but reading checks them. */
static inline void job_check_weights(Session* s) {
    if (s->model_dir[0]) { session_load_weights(s, verify_tensor, NULL); }
    if (session_has_adapters(s)) { session_load_adapters(s, verify_tensor, NULL); }
}

/* Sets up a generator and its sampler for the session's model and options. */
static inline void job_open_generator(const Trainer* t, const Session* s, void* model, Generator* g, Sampler* sampler) {
    const Options* o = &s->options;
    sampler_init(sampler, s->config.vocab_size, o->temperature, o->top_k, o->top_p, (uint64_t)o->seed);
    generator_init(g, t->next_logits, model, &s->config, s->has_tokenizer ? &s->tokenizer : NULL, sampler, session_context(s),
                   stdout);
}

// ---------------------------------------------------------------------------------------------------------------------
// losses of batches: on validation data, and on --tasks

/* Gets the losses of one batch. */
typedef void (*TakeLosses)(void* ctx, const float* losses /* (B, T / parts) */, uint64_t batch);

/* Gives the losses of `batches` batches of `data` to take(). While the device works on a batch, the host takes the losses of
 * the previous one. Returns false if the data cannot be read, or without an error if a signal asked for the end. */
static inline bool take_losses(const Trainer* t, void* model, const BatchSource* data, uint64_t batches, TakeLosses take,
                               void* ctx, Error* e) {
    bool ok = true;
    for (uint64_t queued = 0, taken = 0; taken < (ok ? batches : queued); taken++) {
        while (ok && queued < batches && queued - taken < (uint64_t)t->in_flight) {
            ok = t->queue_losses(model, data, e);
            queued += ok;
        }
        if (taken == queued) { break; }
        take(ctx, t->wait_losses(model), taken);
    }
    return ok;
}

/* The loss on validation data. */
typedef struct {
    double loss;       // mean over the trained targets, in nats
    double bpb;        // bits per byte of the targets' text; NaN without a tokenizer, or without text
    uint64_t trained;  // targets
} ValidationLoss;

typedef struct {
    DataLoader* val;
    const Tokenizer* tokenizer;  // NULL: none
    uint64_t rows, B, T;
    SequenceShare share;  // the groups take the batches in turn
    uint64_t read;        // rows given out so far
    uint64_t trained;     // targets of this rank's parts of the first `rows` rows
    uint64_t bytes;       // of these targets
    double* sums;         // (rows) of this rank's losses of each row
    int32_t* starts;      // (B, T) of the batch; NULL: rows hold no documents
    Progress progress;
} Validation;

/* Returns which row of the data is the i-th of this rank's group. */
static inline uint64_t validation_row(const Validation* v, uint64_t i) {
    return (i / v->B * (uint64_t)v->share.groups + (uint64_t)v->share.group) * v->B + i % v->B;
}

/* Returns the tokens of a row that this rank computes. */
static inline uint64_t validation_part(const Validation* v) { return v->T / (uint64_t)v->share.row_ranks; }

/* Reads a row and counts the bytes of this rank's targets: the next() of a BatchSource. The last batch is padded with rows from
 * the start, which do not count. */
static inline bool validation_next(void* validation, int32_t* x /* (T) */, int32_t* y /* (T) */, Error* e) {
    Validation* v = (Validation*)validation;
    const uint64_t row = validation_row(v, v->read);
    if (v->val->row != row) { dataloader_seek(v->val, row); }
    if (!dataloader_next(v->val, x, y, e)) { return false; }
    if (v->starts) { memcpy(v->starts + v->read % v->B * v->T, v->val->starts, v->T * sizeof *v->starts); }
    v->read++;
    if (row >= v->rows) { return true; }
    const size_t n = validation_part(v);
    const int32_t* own = y + (size_t)v->share.part * n;
    v->trained += count_trained(own, n);
    for (size_t i = 0; v->tokenizer && i < n; i++) { v->bytes += own[i] >= 0 ? tokenizer_text_bytes(v->tokenizer, own[i]) : 0; }
    return true;
}

static inline void validation_take(void* validation, const float* losses, uint64_t batch) {
    Validation* v = (Validation*)validation;
    const uint64_t first = validation_row(v, batch * v->B), rows = first < v->rows ? size_min(v->rows - first, v->B) : 0;
    const size_t n = validation_part(v);
    for (size_t i = 0; i < rows * n; i++) { v->sums[first + i / n] += losses[i]; }
    progress_add(&v->progress, rows * (uint64_t)v->share.groups);
}

/* Computes the loss over the first `max_rows` rows of the validation data (or all rows, if fewer), and reports progress to
 * `screen` (or NULL). Several groups of ranks share the batches. The losses add up row by row, and within a row part by part,
 * so the number of groups does not change the result. Fails as take_losses(). */
static inline bool validate(const Trainer* t, Session* s, void* model, uint64_t max_rows, FILE* screen, ValidationLoss* l,
                            Error* e) {
    const uint64_t rows = max_rows < s->val.rows_per_epoch ? max_rows : s->val.rows_per_epoch;
    const SequenceShare share = session_share(s);
    const uint64_t group = (uint64_t)share.group, groups = (uint64_t)share.groups;
    Validation v;
    RowParts parts;
    memset(&v, 0, sizeof v);
    v.val = &s->val;
    v.tokenizer = s->has_tokenizer ? &s->tokenizer : NULL;
    v.rows = rows;
    v.B = (uint64_t)s->options.batch;
    v.T = (uint64_t)s->options.seq;
    v.share = share;
    v.sums = (double*)xcalloc(rows, sizeof *v.sums);
    v.starts = s->val.starts ? (int32_t*)xcalloc(v.B * v.T, sizeof *v.starts) : NULL;
    v.progress = progress_begin(screen, "val", rows, "rows");
    const BatchSource whole = {validation_next, &v, 1, 0, NULL, v.starts};
    const BatchSource data = row_parts_of(&parts, &whole, share, s->options.seq);
    const uint64_t batches = ceil_div(rows, v.B);
    // ranks that pass the layers together have as many batches as group 0; rows after the last one do not count
    const uint64_t first = session_passes_together(s) ? 0 : group;
    const uint64_t mine = batches > first ? ceil_div(batches - first, groups) : 0;
    const bool ok = agree_ok(s->team, take_losses(t, model, &data, mine, validation_take, &v, e), e);
    progress_end(&v.progress);
    double counts[2] = {(double)v.trained, (double)v.bytes}, sum = 0;
    if (ok) {
        agree_add(s->team, v.sums, rows);
        agree_add(s->team, counts, 2);
    }
    for (uint64_t i = 0; i < rows; i++) { sum += v.sums[i]; }
    free(v.sums);
    free(v.starts);
    row_parts_free(&parts);
    l->loss = sum / counts[0];
    l->bpb = counts[1] > 0 ? sum / (M_LN2 * counts[1]) : NAN;
    l->trained = (uint64_t)counts[0];
    return ok;
}

typedef struct {
    const Tasks* tasks;
    const TaskFile* file;
    uint64_t B;
    SequenceShare share;
    double* likelihoods;  // (file->choice_count)
    Progress progress;
} Answering;

static inline void answering_take(void* answering, const float* losses, uint64_t batch) {
    Answering* a = (Answering*)answering;
    const size_t first = batch * a->B, count = a->file->choice_count, rows = size_min(count - first, a->B);
    for (size_t i = 0; i < rows; i++) {
        const TaskChoice* c = &a->tasks->choices[a->file->first_choice + first + i];
        const size_t n = (size_t)(a->tasks->T / a->share.row_ranks);
        a->likelihoods[first + i] = task_likelihood(a->tasks, c, losses + i * n, (size_t)a->share.part * n, n);
    }
    progress_add(&a->progress, rows);
}

/* Answers the questions of a file, on each rank, or with shared rows on each group. Fails as take_losses(). */
static inline bool answer_tasks(const Trainer* t, Session* s, void* model, const TaskFile* file, TaskScore* score, Error* e) {
    const BatchSource whole = {tasks_next, &s->tasks, 1, 0, NULL, NULL};
    const SequenceShare share = session_share(s);
    RowParts parts;
    const BatchSource data = row_parts_of(&parts, &whole, share, s->tasks.T);
    const uint64_t B = (uint64_t)s->options.batch;
    double* likelihoods = (double*)xcalloc(file->choice_count, sizeof *likelihoods);
    Answering a = {&s->tasks, file, B, share, likelihoods, progress_begin(stdout, "tasks", file->choice_count, "choices")};
    s->tasks.next = file->first_choice;
    const bool ok = take_losses(t, model, &data, ceil_div(file->choice_count, B), answering_take, &a, e);
    progress_end(&a.progress);
    row_parts_free(&parts);
    if (ok && share.row_ranks > 1) {  // add up what the first group's members computed of each row
        if (share.group > 0) { memset(likelihoods, 0, file->choice_count * sizeof *likelihoods); }
        agree_add(s->team, likelihoods, file->choice_count);
    }
    *score = tasks_score(&s->tasks, file, likelihoods);
    free(likelihoods);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// the jobs

/* Prints the loss on --val, all of it unless --val-batches is given. */
static inline void eval_loss(const Trainer* t, Session* s, void* model) {
    const Options* o = &s->options;
    ValidationLoss l;
    Error e = NO_ERROR;
    const uint64_t most = o->given[OPT_val_batches] ? (uint64_t)o->val_batches * (uint64_t)o->batch : UINT64_MAX;
    const uint64_t rows = most < s->val.rows_per_epoch ? most : s->val.rows_per_epoch;
    must(validate(t, s, model, rows, stdout, &l, &e), &e);
    if (!isfinite(l.loss)) {
        die("%s: the loss on %s is %s: a weight is too large for %s, or broken", s->model_dir, o->val,
            isnan(l.loss) ? "nan" : "inf", t->precision);
    }
    printf("loss %.6f  perplexity %.4f  tokens %llu", l.loss, exp(l.loss), (unsigned long long)l.trained);
    if (!isnan(l.bpb)) { printf("  bits per byte %.4f", l.bpb); }
    printf("\n");
}

/* Prints a line for each file of --tasks. */
static inline void eval_tasks(const Trainer* t, Session* s, void* model) {
    for (size_t i = 0; i < s->tasks.num_files; i++) {
        const TaskFile* file = &s->tasks.files[i];
        TaskScore score;
        Error e = NO_ERROR;
        must(answer_tasks(t, s, model, file, &score, &e), &e);
        if (isnan(score.acc)) {
            die("%s: a loss on %s is nan: a weight is too large for %s, or broken", s->model_dir, file->path, t->precision);
        }
        print_names(stdout, "acc %.4f  acc_norm %.4f  questions %zu  %s\n", score.acc, score.acc_norm, file->count, file->path);
    }
}

/* Runs --eval. */
static inline void job_eval(const Trainer* t, Session* s) {
    job_check_memory(t, s, stdout);
    if (s->has_val) {
        print_names(stdout, "data    %s: %llu tokens\n", s->options.val, (unsigned long long)s->val.num_tokens);
        print_rows(stdout, s->options.val, &s->val);
    }
    void* model = job_open_model(t, s);
    if (t->prepare) { t->prepare(model, NULL, s); }
    if (s->has_tasks) {
        eval_tasks(t, s, model);
    } else {
        eval_loss(t, s, model);
    }
    t->destroy(model);
}

/* Returns how --chat talks: in the form of the folder's template. */
static inline ChatOptions job_chat_options(const Session* s) {
    const Options* o = &s->options;
    Error e = NO_ERROR;
    const bool chats = s->job == JOB_CHAT && s->has_tokenizer;
    ChatOptions c = {o->system, NULL, o->tokens};
    must(!chats || chat_read_date(&s->tokenizer, o->date, &c.date, &e), &e);
    return c;
}

/* Runs --generate, --chat or --answer. stdout carries only the text, and at a terminal what --chat says. */
static inline void job_talk(const Trainer* t, Session* s) {
    const Options* o = &s->options;
    Sampler sampler;
    Generator g;
    Error e = NO_ERROR;
    const ChatOptions talk = job_chat_options(s);  // first of all: it may refuse the template
    job_check_memory(t, s, NULL);
    void* model = job_open_model(t, s);
    if (t->prepare) { t->prepare(model, NULL, s); }
    job_open_generator(t, s, model, &g, &sampler);
    g.screen = session_screen(s);
    if (s->job == JOB_ANSWER) {
        const Question silent = {o->temperature, o->top_p, o->top_k, o->seed, o->tokens, {NULL, 0, 0}, false};
        const Asked asked = question_asks(&s->config, g.tokenizer, o->date);
        answer(&g, &asked, &silent, STDIN_FILENO);
    } else {
        must(s->job == JOB_CHAT ? chat(&g, &talk, stdin, &e) : generate(&g, o->generate, o->tokens, &e), &e);
    }
    generator_free(&g);
    sampler_free(&sampler);
    t->destroy(model);
}

/* Runs the job of the command line; `train` is the trainer's loop. Not inlined: main's frame holds the session, and has no room
 * for a job's. */
__attribute__((noinline, unused)) static void run_job(const Trainer* t, Session* s,
                                                      void (*train)(const Trainer* t, Session* s)) {
    switch (s->job) {
        case JOB_TRAIN:
        case JOB_DRY_RUN: train(t, s); break;
        case JOB_EVAL: job_eval(t, s); break;
        case JOB_GENERATE:
        case JOB_CHAT:
        case JOB_ANSWER: job_talk(t, s); break;
        case JOB_EXPORT: job_export(s); break;
        case JOB_VERIFY: verify(s->options.verify, s->options.lora_base); break;
    }
}

#endif
