/* dispatch.h -- runs the job of the command line: the training loop, --eval, --generate, --chat, --answer, --export, --verify.
 */
#ifndef LLMC_DISPATCH_H
#define LLMC_DISPATCH_H

#include "llmc/base/utils.h"
#include "llmc/run/jobs/answer.h"         // defines: answer
#include "llmc/run/jobs/chat.h"           // defines: chat
#include "llmc/run/jobs/export.h"         // defines: job_export
#include "llmc/run/jobs/verify.h"         // defines: verify
#include "llmc/run/loop/generate.h"       // defines: Generator, generate, generator_free
#include "llmc/run/loop/train.h"          // defines: train
#include "llmc/run/loop/validate.h"       // defines: Evaluator, ValidationLoss, validate, answer_tasks
#include "llmc/run/session/open_model.h"  // defines: model_use, model_create, memory_text
#include "llmc/run/session/memory.h"      // defines: MemoryRoom, memory_room, memory_check
#include "llmc/run/session/session.h"     // defines: Program, process_screen
#include "llmc/run/session/trainer.h"     // defines: Trainer

/* Prints the loss on --val, all of it unless --val-batches is given. `dir`: the model's folder */
static inline void eval_loss(const Evaluator* with, const char* dir) {
    const Options* o = with->options;
    const DataLoader* val = &with->data->val;
    ValidationLoss l;
    Error e = NO_ERROR;
    const uint64_t most = o->given[OPT_val_batches] ? (uint64_t)o->val_batches * (uint64_t)o->batch : UINT64_MAX;
    const uint64_t rows = most < val->rows_per_epoch ? most : val->rows_per_epoch;
    must(validate(with, rows, stdout, &l, &e), &e);
    if (!isfinite(l.loss)) {
        die("%s: the loss on %s is %s: a weight is too large for %s, or broken", dir, o->val, isnan(l.loss) ? "nan" : "inf",
            with->trainer->precision);
    }
    printf("loss %.6f  perplexity %.4f  tokens %llu", l.loss, exp(l.loss), (unsigned long long)l.trained);
    if (!isnan(l.bpb)) { printf("  bits per byte %.4f", l.bpb); }
    printf("  rows of %d tokens\n", o->seq);
}

/* Prints a line for each file of --tasks. */
static inline void eval_tasks(const Evaluator* with, const char* dir) {
    const Tasks* tasks = &with->data->tasks;
    for (size_t i = 0; i < tasks->num_files; i++) {
        const TaskFile* file = &tasks->files[i];
        TaskScore score;
        Error e = NO_ERROR;
        must(answer_tasks(with, file, &score, &e), &e);
        if (isnan(score.acc)) {
            die("%s: a loss on %s is nan: a weight is too large for %s, or broken", dir, file->path, with->trainer->precision);
        }
        print_names(stdout, "acc %.4f  acc_norm %.4f  questions %zu  %s\n", score.acc, score.acc_norm, file->count, file->path);
    }
}

/* Makes the model of a job that does not train. The memory table goes to `screen`, or nowhere (NULL). */
static inline void* job_open_model(const Trainer* t, Program* p, const ModelUse* use, FILE* screen) {
    const MemoryRoom room = memory_room(t, &p->spec.config, use, &p->chosen);
    Error e = NO_ERROR;
    char what[3 * PATH_CAP];
    memory_text(t->memory, &p->start, &p->chosen, &p->data, what);
    must(memory_check(&room, &p->chosen, what, screen, &e), &e);
    if (p->data.has_val) {
        print_names(stdout, "data    %s: %llu tokens\n", p->chosen.val, (unsigned long long)p->data.val.num_tokens);
        print_rows(stdout, p->chosen.val, &p->data.val);
    }
    void* model = model_create(t, use, &p->chosen, &p->start, &p->spec, &p->run, &p->process);
    if (t->prepare) { t->prepare(model, NULL, &p->chosen, NULL); }
    return model;
}

/* Runs --eval. */
static inline void job_eval(const Trainer* t, Program* p) {
    const ModelUse use = model_use(&p->process, &p->chosen, &p->spec.config, &p->data);
    void* model = job_open_model(t, p, &use, stdout);
    const Evaluator with = {t, model, &p->process, &p->chosen, &p->data};
    if (p->data.has_tasks) {
        eval_tasks(&with, p->start.dir);
    } else {
        eval_loss(&with, p->start.dir);
    }
    t->destroy(model);
}

/* Runs --generate, --chat or --answer. stdout carries only the text, and at a terminal what --chat says. */
static inline void job_talk(const Trainer* t, Program* p) {
    const Options* o = &p->chosen;
    const ModelConfig* config = &p->spec.config;
    const Job job = p->process.job;
    Sampler sampler;
    Generator g;
    Error e = NO_ERROR;
    Asked asked;
    question_begin(&asked, &p->data.rules, o->date);
    if (job == JOB_CHAT && asked.no_chat.msg[0]) { die("%s", asked.no_chat.msg); }
    const ModelUse use = model_use(&p->process, o, config, &p->data);
    void* model = job_open_model(t, p, &use, NULL);
    sampler_init(&sampler, config->vocab_size, o->temperature, o->top_k, o->top_p, (uint64_t)o->seed);
    sampler_penalise(&sampler, p->data.rules.sampling.repetition_penalty);
    generator_init(&g, t->next_logits, model, &p->data.rules, &sampler, use.cache_len, stdout);
    g.screen = process_screen(&p->process);
    if (job == JOB_ANSWER) {
        const double drawing = p->data.rules.sampling.temperature;
        const Question silent = {o->temperature, o->top_p, drawing, o->top_k, o->seed, o->tokens, {NULL, 0, 0}, false};
        answer(&g, &asked, &silent, STDIN_FILENO);
    } else {
        must(job == JOB_CHAT ? chat(&g, &asked.writer, o->system, o->tokens, stdin, &e)
                             : generate(&g, o->generate, o->tokens, &e),
             &e);
    }
    question_end(&asked);
    generator_free(&g);
    sampler_free(&sampler);
    t->destroy(model);
}

/* Runs the job of the command line, and returns the exit status of the program. Not inlined: main's frame holds the program,
 * and has no room for a job's. */
__attribute__((noinline, unused)) static int run_job(const Trainer* t, Program* p) {
    switch (p->process.job) {
        case JOB_TRAIN:
        case JOB_DRY_RUN: return train(t, p);
        case JOB_EVAL: job_eval(t, p); break;
        case JOB_GENERATE:
        case JOB_CHAT:
        case JOB_ANSWER: job_talk(t, p); break;
        case JOB_EXPORT: job_export(p); break;
        case JOB_VERIFY: verify(p->chosen.verify, p->chosen.lora_base); break;
    }
    return 0;
}

#endif
