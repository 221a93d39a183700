/* dispatch.h -- runs the job of the command line: the training loop, --eval, --generate, --chat, --answer, --export, --verify.
 */
#ifndef LLMC_DISPATCH_H
#define LLMC_DISPATCH_H

#include "llmc/base/utils.h"
#include "llmc/run/jobs/answer.h"         // defines: answer
#include "llmc/run/jobs/chat.h"           // defines: ChatOptions, chat
#include "llmc/run/jobs/export.h"         // defines: job_export
#include "llmc/run/jobs/verify.h"         // defines: verify
#include "llmc/run/loop/generate.h"       // defines: Generator, generate, generator_free
#include "llmc/run/loop/train.h"          // defines: train
#include "llmc/run/loop/training.h"       // defines: open_generator
#include "llmc/run/loop/validate.h"       // defines: ValidationLoss, validate, answer_tasks
#include "llmc/run/session/open_model.h"  // defines: job_check_memory, job_open_model
#include "llmc/run/session/session.h"     // defines: Session, session_screen
#include "llmc/run/session/trainer.h"     // defines: Trainer

/* Prints the loss on --val, all of it unless --val-batches is given. */
static inline void eval_loss(const Trainer* t, Session* s, void* model) {
    const Options* o = &s->chosen;
    ValidationLoss l;
    Error e = NO_ERROR;
    const uint64_t most = o->given[OPT_val_batches] ? (uint64_t)o->val_batches * (uint64_t)o->batch : UINT64_MAX;
    const uint64_t rows = most < s->data.val.rows_per_epoch ? most : s->data.val.rows_per_epoch;
    must(validate(t, s, model, rows, stdout, &l, &e), &e);
    if (!isfinite(l.loss)) {
        die("%s: the loss on %s is %s: a weight is too large for %s, or broken", s->start.dir, o->val,
            isnan(l.loss) ? "nan" : "inf", t->precision);
    }
    printf("loss %.6f  perplexity %.4f  tokens %llu", l.loss, exp(l.loss), (unsigned long long)l.trained);
    if (!isnan(l.bpb)) { printf("  bits per byte %.4f", l.bpb); }
    printf("\n");
}

/* Prints a line for each file of --tasks. */
static inline void eval_tasks(const Trainer* t, Session* s, void* model) {
    for (size_t i = 0; i < s->data.tasks.num_files; i++) {
        const TaskFile* file = &s->data.tasks.files[i];
        TaskScore score;
        Error e = NO_ERROR;
        must(answer_tasks(t, s, model, file, &score, &e), &e);
        if (isnan(score.acc)) {
            die("%s: a loss on %s is nan: a weight is too large for %s, or broken", s->start.dir, file->path, t->precision);
        }
        print_names(stdout, "acc %.4f  acc_norm %.4f  questions %zu  %s\n", score.acc, score.acc_norm, file->count, file->path);
    }
}

/* Runs --eval. */
static inline void job_eval(const Trainer* t, Session* s) {
    job_check_memory(t, s, stdout);
    if (s->data.has_val) {
        print_names(stdout, "data    %s: %llu tokens\n", s->chosen.val, (unsigned long long)s->data.val.num_tokens);
        print_rows(stdout, s->chosen.val, &s->data.val);
    }
    void* model = job_open_model(t, s);
    if (t->prepare) { t->prepare(model, NULL, s); }
    if (s->data.has_tasks) {
        eval_tasks(t, s, model);
    } else {
        eval_loss(t, s, model);
    }
    t->destroy(model);
}

/* Returns how --chat talks: in the form of the folder's template. */
static inline ChatOptions job_chat_options(const Session* s) {
    const Options* o = &s->chosen;
    Error e = NO_ERROR;
    const bool chats = s->process.job == JOB_CHAT && s->data.has_tokenizer;
    ChatOptions c = {o->system, NULL, o->tokens};
    must(!chats || chat_read_date(&s->data.tokenizer, o->date, &c.date, &e), &e);
    return c;
}

/* Runs --generate, --chat or --answer. stdout carries only the text, and at a terminal what --chat says. */
static inline void job_talk(const Trainer* t, Session* s) {
    const Options* o = &s->chosen;
    Sampler sampler;
    Generator g;
    Error e = NO_ERROR;
    const ChatOptions talk = job_chat_options(s);  // first of all: it may refuse the template
    job_check_memory(t, s, NULL);
    void* model = job_open_model(t, s);
    if (t->prepare) { t->prepare(model, NULL, s); }
    open_generator(t, s, model, &g, &sampler);
    g.screen = session_screen(s);
    if (s->process.job == JOB_ANSWER) {
        const Question silent = {o->temperature, o->top_p, o->top_k, o->seed, o->tokens, {NULL, 0, 0}, false};
        const Asked asked = question_asks(&s->spec.config, g.tokenizer, o->date);
        answer(&g, &asked, &silent, STDIN_FILENO);
    } else {
        must(s->process.job == JOB_CHAT ? chat(&g, &talk, stdin, &e) : generate(&g, o->generate, o->tokens, &e), &e);
    }
    generator_free(&g);
    sampler_free(&sampler);
    t->destroy(model);
}

/* Runs the job of the command line. Not inlined: main's frame holds the session, and has no room for a job's. */
__attribute__((noinline, unused)) static void run_job(const Trainer* t, Session* s) {
    switch (s->process.job) {
        case JOB_TRAIN:
        case JOB_DRY_RUN: train(t, s); break;
        case JOB_EVAL: job_eval(t, s); break;
        case JOB_GENERATE:
        case JOB_CHAT:
        case JOB_ANSWER: job_talk(t, s); break;
        case JOB_EXPORT: job_export(s); break;
        case JOB_VERIFY: verify(s->chosen.verify, s->chosen.lora_base); break;
    }
}

#endif
