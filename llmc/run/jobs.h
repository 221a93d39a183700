/* jobs.h -- the jobs besides training, shared by both trainers: checking memory, loading a model, the validation loss,
 * --eval, --generate and --chat. training.h has the parts of the training loop.
 */
#ifndef LLMC_JOBS_H
#define LLMC_JOBS_H

#include "llmc/base/utils.h"
#include "llmc/run/chat.h"
#include "llmc/run/export.h"
#include "llmc/run/generate.h"
#include "llmc/run/memory.h"
#include "llmc/run/sampler.h"
#include "llmc/run/session.h"
#include "llmc/run/trainer.h"

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
    if (s->model_dir[0]) {
        snprintf(text, cap, "%s: the model of %s/config.json", t->memory, s->model_dir);
    } else {
        snprintf(text, cap, "%s: the model %s with the vocabulary of %s", t->memory, s->options.model, words);
    }
}

/* Prints the memory table to `screen` (or NULL) and refuses a job that does not fit. */
static inline void job_check_memory(const Trainer* t, const Session* s, FILE* screen) {
    const Options* o = &s->options;
    const uint64_t have = t->available(t, o);
    MemoryQuestion question = {t, s};
    MemoryTable table;
    Error e = NO_ERROR;
    memset(&table, 0, sizeof table);
    t->measure(t, s, o, &table);
    if (screen) { print_memory(screen, &table, have); }
    char what[3 * PATH_CAP];
    job_memory_text(t, s, what, sizeof what);
    must(memory_check(&table, have, what, o, s->ranks, job_memory_need, &question, &e), &e);
}

/* Creates a model with the weights of the session's folder, or newly initialized. */
static inline void* job_open_model(const Trainer* t, const Session* s) {
    void* model = t->create(t, s);
    if (s->model_dir[0]) {
        const StateSlot weights = t->slot(model, SLOT_WEIGHTS);
        session_load_weights(s, weights.sink, weights.ctx);
    } else {
        t->init(model, (uint64_t)s->options.seed);
    }
    return model;
}

/* Sets up a generator and its sampler for the session's model and options. */
static inline void job_open_generator(const Trainer* t, const Session* s, void* model, Generator* g, Sampler* sampler) {
    const Options* o = &s->options;
    sampler_init(sampler, s->config.vocab_size, o->temperature, o->top_k, o->top_p, (uint64_t)o->seed);
    generator_init(g, t->next_logits, model, &s->config, s->has_tokenizer ? &s->tokenizer : NULL, sampler, session_context(s),
                   stdout);
}

// ---------------------------------------------------------------------------------------------------------------------
// loss on validation data

/* Computes the mean loss over the first `max_rows` rows of the validation data (or all rows, if fewer). While the device
 * works on a batch, the host adds up the losses of the previous one. Returns false if the data cannot be read, or without an
 * error if a signal asked for the end. */
static inline bool validate(const Trainer* t, Session* s, void* model, uint64_t max_rows, double* loss, Error* e) {
    const uint64_t rows = max_rows < s->val.rows_per_epoch ? max_rows : s->val.rows_per_epoch;
    const uint64_t B = (uint64_t)s->options.batch, T = (uint64_t)s->options.seq, batches = ceil_div(rows, B);
    const BatchSource data = batches_of(&s->val);
    double sum = 0.0;
    bool ok = true;
    dataloader_seek(&s->val, 0);
    for (uint64_t queued = 0, added = 0; added < (ok ? batches : queued); added++) {
        while (ok && queued < batches && queued - added < (uint64_t)t->in_flight) {
            ok = t->queue_losses(model, &data, e);
            queued += ok;
        }
        if (added == queued) { break; }
        const float* losses = t->wait_losses(model);
        // the last batch is padded with rows from the start; their losses do not count
        const size_t counted = size_min(rows - added * B, B) * T;
        for (size_t i = 0; i < counted; i++) { sum += losses[i]; }
    }
    *loss = sum / ((double)rows * (double)T);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// the jobs

/* Runs --eval: prints the loss on --val, all of it unless --val-batches is given. */
static inline void job_eval(const Trainer* t, Session* s) {
    const Options* o = &s->options;
    double loss = 0.0;
    Error e = NO_ERROR;
    job_check_memory(t, s, stdout);
    printf("data    %s: %llu tokens\n", o->val, (unsigned long long)s->val.num_tokens);
    void* model = job_open_model(t, s);
    if (t->prepare) { t->prepare(model, NULL, s); }
    const uint64_t most = o->given[OPT_val_batches] ? (uint64_t)o->val_batches * (uint64_t)o->batch : UINT64_MAX;
    const uint64_t rows = most < s->val.rows_per_epoch ? most : s->val.rows_per_epoch;
    must(validate(t, s, model, rows, &loss, &e), &e);
    if (!isfinite(loss)) {
        die("%s: the loss on %s is %s: a weight is too large for %s, or broken", s->model_dir, o->val,
            isnan(loss) ? "nan" : "inf", t->precision);
    }
    printf("loss %.6f  perplexity %.4f  tokens %llu\n", loss, exp(loss), (unsigned long long)rows * (unsigned long long)o->seq);
    t->destroy(model);
}

/* Returns how --chat talks: in the form of the folder's template. */
static inline ChatOptions job_chat_options(const Session* s) {
    const Options* o = &s->options;
    bool dated = false;
    Error e = NO_ERROR;
    must(!s->has_tokenizer || chat_read_form(&s->tokenizer, &dated, &e), &e);
    ChatOptions c = {o->system, NULL, o->tokens};
    if (dated) { c.date = o->date ? o->date : CHAT_DATE; }
    return c;
}

/* Runs --generate or --chat. stdout carries only the text, and at a terminal what --chat says. */
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
    must(s->job == JOB_CHAT ? chat(&g, &talk, stdin, &e) : generate(&g, o->generate, o->tokens, &e), &e);
    generator_free(&g);
    sampler_free(&sampler);
    t->destroy(model);
}

/* Runs the job of the command line; `train` is the trainer's loop. */
static inline void run_job(const Trainer* t, Session* s, void (*train)(const Trainer* t, Session* s)) {
    if (s->options.tune && !job_trains(s->job)) {
        die_usage("--tune: times the products of a training step, wanted no other job");
    }
    switch (s->job) {
        case JOB_TRAIN:
        case JOB_DRY_RUN: train(t, s); break;
        case JOB_EVAL: job_eval(t, s); break;
        case JOB_GENERATE:
        case JOB_CHAT: job_talk(t, s); break;
        case JOB_EXPORT: job_export(s); break;
    }
}

#endif
