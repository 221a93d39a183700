/* training.h -- the functions that the training loop calls, shared by both trainers. The loop itself is in train_llama3.c and,
 * word for word the same, in train_llama3.cu:
 *
 *   training_open      prints the plan, locks --out, creates the model; false if there is nothing to train
 *   training_due       tells what is due once the queued steps are done
 *   training_report    writes the line of a step to the screen and the log
 *   training_validate, training_sample, training_checkpoint
 *   training_close     the last checkpoint and the summary
 */
#ifndef LLMC_TRAINING_H
#define LLMC_TRAINING_H

#include "llmc/base/utils.h"
#include "llmc/files/logger.h"
#include "llmc/run/data_scan.h"
#include "llmc/run/jobs.h"
#include "llmc/run/mfu.h"
#include "llmc/run/plan.h"
#include "llmc/run/scheduler.h"
#include "llmc/run/screen.h"
#include "llmc/run/session.h"
#include "llmc/run/signals.h"
#include "llmc/run/trainer.h"

#include <math.h>

typedef struct {
    const Trainer* trainer;
    Session* s;
    void* model;
    StepPlan plan;
    Sampler sampler;
    Generator generator;
    StepLines lines;
    int64_t queued, reported;  // number of steps, from the start of the schedule
    int64_t saved;             // step of the newest checkpoint, -1: none
    bool stopping;             // a signal asked for the end
} Training;

typedef struct {
    bool validation, sample, checkpoint;
    bool end;    // the run ends here
    bool drain;  // something is due, or --debug: no step may stay in flight
} Due;

// ---------------------------------------------------------------------------------------------------------------------
// opening

static inline StepPlan step_plan(const Trainer* trainer, Session* s) {
    const Options* o = &s->options;
    StepPlan p;
    memset(&p, 0, sizeof p);
    p.data = batches_of(&s->train);
    p.hyper.beta1 = o->beta1;
    p.hyper.beta2 = o->beta2;
    p.hyper.eps = o->eps;
    p.hyper.weight_decay = o->weight_decay;
    p.hyper.grad_clip = o->grad_clip;
    p.hyper.skip_loss_z = o->skip_loss_z;
    p.hyper.skip_norm_z = o->skip_norm_z;
    p.hyper.loss_weight = 1.0 / (double)s->plan.tokens_per_step;
    p.hyper.scale_interval = trainer->scales_loss ? 1000 : 0;
    p.accumulate = s->plan.accumulate;
    p.tokens = (uint64_t)s->plan.tokens_per_step;
    p.seed = (uint64_t)o->seed;
    p.run = &s->state;
    return p;
}

/* Fills `slots` with the optimizer state, and with the master weights if `with_master`. Returns their number. */
static inline int state_slots(const Trainer* trainer, void* model, bool with_master, StateSlot slots[NUM_SLOTS]) {
    int count = 0;
    slots[count++] = trainer->slot(model, SLOT_M);
    slots[count++] = trainer->slot(model, SLOT_V);
    if (with_master) { slots[count++] = trainer->slot(model, SLOT_MASTER); }
    return count;
}

/* Turns --minutes into a number of steps: times a few steps at learning rate 0, then wipes their traces. */
static inline void training_measure(Training* t) {
    Session* s = t->s;
    const TrainerState before = s->state;  // of a new run, which owns no memory
    const uint64_t row = s->train.row;
    double best = INFINITY;
    Error e = NO_ERROR;
    for (int i = 0; i < MINUTES_MEASURE; i++) {
        t->trainer->step(t->model, &t->plan, 0.0);
        best = fmin(best, t->trainer->result(t->model, &t->plan).ms);
    }
    s->state = before;
    t->trainer->forget(t->model, &t->plan);
    dataloader_seek(&s->train, row);
    s->options.steps = (int)steps_for_minutes(s->options.minutes, now_seconds() - s->started, best * 1e-3);
    must(plan_make(&s->plan, &s->options, s->ranks, s->train.rows_per_epoch, &e), &e);
    printf("timed   %.1f ms a step: %lld steps fit into %g minutes\n", best, (long long)s->plan.steps, s->options.minutes);
}

/* Reads all data of the run: --dry-run finds at once what training would find hours later. */
static inline void training_scan_data(const Session* s) {
    Error e = NO_ERROR;
    if (s->rank != 0) { return; }
    must(data_scan(&s->train, s->options.train, stdout, &e), &e);
    if (s->has_val) { must(data_scan(&s->val, s->options.val, stdout, &e), &e); }
}

/* Does everything before the first step. Returns false for --dry-run and --profile, which do not train. */
static inline bool training_open(Training* t, const Trainer* trainer, Session* s) {
    const Options* o = &s->options;
    const bool timed = o->minutes > 0 && !s->resumed;
    Error e = NO_ERROR;
    memset(t, 0, sizeof *t);
    t->trainer = trainer;
    t->s = s;
    session_print(s, trainer->precision);
    session_compare(s);
    job_check_memory(trainer, s, stdout);
    if (!timed || s->job == JOB_DRY_RUN) { print_plan(stdout, &s->plan, o, s->ranks, s->train.num_tokens); }
    if (s->job == JOB_DRY_RUN) {
        if (s->model_dir[0]) { session_load_weights(s, job_ignore_tensor, NULL); }
        training_scan_data(s);
        return false;
    }
    fflush(stdout);

    t->model = job_open_model(trainer, s);
    if (s->resumed) {
        StateSlot slots[NUM_SLOTS];
        const int num_slots = state_slots(trainer, t->model, s->saved_master, slots);
        must(state_load(s->model_dir, s->state.world_size, &s->trained, 0, s->trained.elements, slots, num_slots, &e), &e);
    }
    if (o->profile == 0 || o->tune) { session_lock(s); }  // what is refused until here leaves no trace

    // a new run, or one of a build that scales no loss, whose counter never moves
    const bool unscaled = s->state.loss_scale == 1 && s->state.scale_good == 0;
    if (trainer->scales_loss && (!s->resumed || unscaled)) { s->state.loss_scale = 65536; }
    if (!trainer->scales_loss) { s->state.loss_scale = 1; }
    t->plan = step_plan(trainer, s);
    if (trainer->prepare) { trainer->prepare(t->model, &t->plan, s); }
    if (timed) {
        training_measure(t);
        print_plan(stdout, &s->plan, o, s->ranks, s->train.num_tokens);
    }
    if (o->profile > 0) {
        trainer->profile(t->model, &t->plan, o->profile);
        trainer->destroy(t->model);
        return false;
    }
    session_begin(s, trainer->precision);
    run_catch_signals();
    job_open_generator(trainer, s, t->model, &t->generator, &t->sampler);
    t->queued = t->reported = (int64_t)s->state.step;
    t->saved = s->resumed ? t->queued : -1;
    step_lines_init(&t->lines, &s->plan, t->queued, flops_per_token(&s->config, &s->table, o->seq),
                    trainer->peak_flops * s->ranks);
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// a step

static inline Due training_due(const Training* t) {
    const Session* s = t->s;
    const Options* o = &s->options;
    const int64_t step = t->queued;
    Due d;
    d.validation = s->has_val && !t->stopping && session_due(s, o->val_every, step);
    d.sample = t->generator.context > 0 && !t->stopping && session_due(s, o->sample_every, step);
    d.checkpoint = step != t->saved && (t->stopping || session_due(s, o->checkpoint_every, step));
    d.end = t->stopping || step >= s->plan.stop;
    d.drain = d.validation || d.sample || d.checkpoint || d.end || o->debug;
    return d;
}

static inline void training_report(Training* t, const StepResult* r) {
    Session* s = t->s;
    char note[96];
    Error e = NO_ERROR;
    const char* skipped = skip_note(r, t->trainer->scales_loss, note, sizeof note);
    t->reported++;
    const double tok_s = step_line(stdout, &t->lines, t->reported, s->plan.stop, r->loss, r->norm, r->lr, r->ms,
                                   t->trainer->memory_used(t->model), skipped);
    must(log_step(&s->log, t->reported, r->loss, r->norm, r->lr, r->ms, tok_s, skipped, &e), &e);
    if (s->options.debug && r->verdict == UPDATE_NOT_FINITE) { t->trainer->name_not_finite(t->model); }
}

static inline void training_validate(Training* t) {
    Session* s = t->s;
    Error e = NO_ERROR;
    const uint64_t rows = (uint64_t)s->options.val_batches * (uint64_t)s->options.batch;
    const double loss = validate(t->trainer, s, t->model, rows);
    print_validation(stdout, &t->lines, t->reported, loss);
    must(log_val(&s->log, t->reported, loss, &e), &e);
}

static inline void training_sample(Training* t) {
    Session* s = t->s;
    Generator* g = &t->generator;
    Error e = NO_ERROR;
    printf("sample  ");
    g->stream = (uint32_t)t->reported;
    must(generate(g, s->options.prompt, s->options.sample_tokens, &e), &e);
    must(log_sample(&s->log, t->reported, g->text, g->text_len, &e), &e);
}

/* Writes a checkpoint. In F32 it holds the master weights. In 16 bits it holds rounded weights; the master weights then go into
 * the optimizer state, as "master". */
static inline void training_checkpoint(Training* t) {
    const Trainer* trainer = t->trainer;
    const SafeDtype dtype = session_export_dtype(t->s, trainer->dtype);
    const bool exact = dtype == SAFE_F32;
    StateSlot slots[NUM_SLOTS];
    const int num_slots = state_slots(trainer, t->model, !exact, slots);
    const StateSlot weights = trainer->slot(t->model, exact ? SLOT_MASTER : SLOT_WEIGHTS);
    session_checkpoint(t->s, dtype, weights.source, weights.ctx, slots, num_slots, trainer->add_files, t->model);
    t->saved = t->reported;
}

// ---------------------------------------------------------------------------------------------------------------------
// the end

static inline void training_close(Training* t) {
    Session* s = t->s;
    Error e = NO_ERROR;
    if (t->saved < 0) { training_checkpoint(t); }  // --steps 0 exports a new model
    const char* reason = t->stopping ? "signal" : s->plan.stop < s->plan.steps ? "stop-after" : "done";
    must(log_end(&s->log, (int64_t)s->state.step, reason, now_seconds() - s->started, &e), &e);
    print_summary(stdout, &t->lines, s->argv[0], s->newest, t->trainer->memory_used(t->model));
    generator_free(&t->generator);
    sampler_free(&t->sampler);
    t->trainer->destroy(t->model);
}

#endif
