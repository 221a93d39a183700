/* training.h -- the functions that the training loop (train.h) calls:
 *
 *   training_open:     prints the plan, locks --out, creates the model; false if there is nothing to train
 *   training_stops:    says whether the run ends before its last step
 *   training_due:      says which work is due once the queued steps are done
 *   training_report:   writes the line of a step to the screen and the log
 *   training_evaluate: the validation loss and the answers to --tasks
 *   training_sample, training_checkpoint
 *   training_close:    the last checkpoint and the summary
 *
 * Four things end a run early: --patience, a signal, an error that is not the model's (data or log that cannot be read or
 * written), and a loss or gradient norm that is not finite, ten steps in a row. In each case the run finishes the queued
 * steps, saves the last whole step, and then prints the cause. From the first step that is not finite until the next finite
 * one, checkpoints say so in trainer_state.json, and none is pruned.
 */
#ifndef LLMC_TRAINING_H
#define LLMC_TRAINING_H

#include "llmc/base/utils.h"
#include "llmc/files/logger.h"
#include "llmc/run/screen/first_words.h"
#include "llmc/run/loop/generate.h"  // defines: Generator, generate, generator_free
#include "llmc/run/loop/sampler.h"
#include "llmc/run/loop/validate.h"       // defines: ValidationLoss, validate, answer_tasks, RowParts, row_parts_of
#include "llmc/run/session/open_model.h"  // defines: job_check_memory, job_open_model, job_check_weights
#include "llmc/train/mfu.h"
#include "llmc/run/loop/pace.h"  // defines: Pace, pace_begin, pace_end
#include "llmc/run/session/plan.h"
#include "llmc/run/screen/screen.h"
#include "llmc/run/session/resume.h"
#include "llmc/run/session/save.h"
#include "llmc/run/session/signals.h"
#include "llmc/run/loop/slowest.h"
#include "llmc/run/loop/timing.h"
#include "llmc/run/session/together.h"
#include "llmc/run/session/trainer.h"
#include "llmc/text/chat.h"  // defines: chat_template_fits

#include <math.h>

typedef struct {
    const Trainer* trainer;
    Session* s;
    void* model;
    Recipe recipe;
    RowParts parts;  // that recipe.data gives
    Sampler sampler;
    Generator generator;
    StepLines lines;
    Pace pace;                  // of rank 0, with --minutes
    int64_t queued, reported;   // number of steps, from the start of the schedule
    uint64_t tokens;            // trained on until the step reported last
    int64_t saved;              // step of the newest checkpoint, -1: none
    int64_t sampled, answered;  // the newest step whose sample, and answers to --tasks, were made
    bool saved_timed;           // the newest checkpoint is one of --checkpoint-minutes
    double saved_at;            // when it was written, or when the run began: now_seconds()
    double write_seconds;       // how long writing it took
    char healthy[PATH_CAP];     // the newest checkpoint after a finite step; "": none
    int not_finite;             // steps in a row whose loss or norm is not finite
    bool out_of_patience;       // --patience validations without a new lowest loss
    double loss_scale;          // loss scale of the next step to report
    double busy_ms;             // time of the step reported last, until all ranks share it: see slowest.h
    Slowest slowest;            // of the ranks
    Error error;                // what ends the run early; empty: nothing
    bool failed;                // all ranks know of an error
} Training;

typedef struct {
    bool validation, tasks, sample, checkpoint;
    bool timed;  // the checkpoint is one of --checkpoint-minutes
    bool end;    // the run ends here
    bool drain;  // something is due, or --debug: no step may stay in flight
} Due;

enum {
    MOST_NOT_FINITE = 10,  // steps in a row: then the run ends
    WRITE_INTERVAL = 50,   // timed checkpoints take at most 1 / 50 of the time
};

// ---------------------------------------------------------------------------------------------------------------------
// opening

/* Sets up a generator and its sampler for the session's model and options. */
static inline void open_generator(const Trainer* t, const Session* s, void* model, Generator* g, Sampler* sampler) {
    const Options* o = &s->chosen;
    sampler_init(sampler, s->spec.config.vocab_size, o->temperature, o->top_k, o->top_p, (uint64_t)o->seed);
    generator_init(g, t->next_logits, model, &s->spec.config, s->data.has_tokenizer ? &s->data.tokenizer : NULL, sampler,
                   session_context(s), stdout);
}

static inline Recipe training_recipe(const Trainer* trainer, Session* s) {
    const Options* o = &s->chosen;
    Recipe p;
    memset(&p, 0, sizeof p);
    p.data = batches_of_mix(&s->data.mix);
    p.hyper.beta1 = o->beta1;
    p.hyper.beta2 = o->beta2;
    p.hyper.eps = o->eps;
    p.hyper.weight_decay = o->weight_decay;
    p.hyper.grad_clip = o->grad_clip;
    p.hyper.skip_loss_z = o->skip_loss_z;
    p.hyper.skip_norm_z = o->skip_norm_z;
    p.hyper.tokens = (double)s->run.plan.tokens_per_step;
    p.hyper.loss_weight = 1.0 / p.hyper.tokens;
    p.hyper.scale_interval = trainer->scales_loss ? 1000 : 0;
    p.accumulate = s->run.plan.accumulate;
    p.tokens = (uint64_t)s->run.plan.tokens_per_step;
    p.seed = (uint64_t)o->seed;
    p.team = s->process.team;
    p.run = &s->run.state;
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

/* Turns --minutes into a number of steps: times a few steps, then wipes their traces. */
static inline void training_measure(Training* t) {
    Session* s = t->s;
    const TrainerState before = s->run.state;  // state of a new run, which owns no memory
    const uint64_t row = s->data.train.row;
    Error e = NO_ERROR;
    StepTime time;
    must(time_steps(t->trainer, t->model, &t->recipe, s->chosen.batch, INFINITY, stdout, &time, &e), &e);
    s->run.state = before;
    t->trainer->forget(t->model, &t->recipe);
    dataloader_seek(&s->data.train, row);
    s->chosen.steps = (int)steps_for_minutes(s->chosen.minutes, now_seconds() - s->process.started, time.ms * 1e-3);
    agree_first(s->process.team, &s->chosen.steps, sizeof s->chosen.steps);
    must(plan_make(&s->run.plan, &s->chosen, session_share(s).groups, s->data.train.rows_per_epoch, &e), &e);
    char count[32];
    printf("timed   %.1f ms a step: %s steps fit into %g minutes\n", time.ms,
           text_count((uint64_t)s->run.plan.steps, count, sizeof count), s->chosen.minutes);
}

/* Reads the data behind `pattern` (for the message). Fails on the first id that is no token and the first wrong checksum. */
static inline bool training_scan(const DataLoader* d, const char* pattern, Error* e) {
    const uint64_t bits = d->masked ? d->num_tokens / 8 : 0;
    Progress p = progress_begin(stdout, "scan", d->num_tokens * (uint64_t)d->token_bytes + bits, "B");
    const bool ok = dataloader_scan(d, &p, e);
    progress_end(&p);
    if (ok) { print_names(stdout, "scan    %s: all ids are below %lld\n", pattern, (long long)d->vocab_limit); }
    return ok;
}

/* Reads all data of the run: --dry-run finds at once what training would find hours later. */
static inline void training_scan_data(const Session* s) {
    Error e = NO_ERROR;
    if (s->process.rank != 0) { return; }
    for (int i = 0; i < s->data.mix.count; i++) {
        must(training_scan(s->data.mix.sources[i].data, s->data.mix.sources[i].pattern, &e), &e);
    }
    if (s->data.has_val) { must(training_scan(&s->data.val, s->chosen.val, &e), &e); }
}

/* Prints the plan and, with several sources, what it takes of each. With --minutes, the number of steps may not be known
 * yet. */
static inline void training_print_plan(const Session* s) {
    const Mix* m = &s->data.mix;
    const uint64_t rows = (uint64_t)(s->run.plan.tokens_per_step / s->chosen.seq);
    uint64_t counts[MIX_MOST];
    char tokens[32];
    print_plan(stdout, &s->run.plan, &s->chosen, session_share(s).groups, s->data.train.num_tokens);
    for (int i = 0; i < m->count; i++) { print_rows(stdout, m->sources[i].pattern, m->sources[i].data); }
    if (s->data.has_val) { print_rows(stdout, s->chosen.val, &s->data.val); }
    if (m->count <= 1) { return; }
    const bool known = s->chosen.minutes == 0 || s->chosen.steps >= 0;
    mix_count(m, known ? (uint64_t)s->run.plan.steps * rows : 0, counts);
    for (int i = 0; i < m->count; i++) {
        const DataLoader* d = m->sources[i].data;
        print_names(stdout, "source  %s: %.2f %% of the rows, %s tokens", m->sources[i].pattern,
                    100.0 * m->sources[i].share / MIX_BLOCK, text_count(d->num_tokens, tokens, sizeof tokens));
        if (known) { printf(", %.2f epochs", (double)counts[i] / (double)d->rows_per_epoch); }
        printf("\n");
    }
}

/* Makes the model ready for steps. */
static inline void training_prepare(Training* t) {
    const Trainer* trainer = t->trainer;
    Session* s = t->s;
    // a new run, or a run of a build that scales no loss: there the counter never moves
    const bool unscaled = s->run.state.loss_scale == 1 && s->run.state.scale_good == 0;
    if (trainer->scales_loss && (!s->start.resumed || unscaled)) { s->run.state.loss_scale = 65536; }
    if (!trainer->scales_loss) { s->run.state.loss_scale = 1; }
    t->recipe = training_recipe(trainer, s);
    t->recipe.data = row_parts_of(&t->parts, &t->recipe.data, session_share(s), s->chosen.seq);
    if (trainer->prepare) { trainer->prepare(t->model, &t->recipe, s); }
}

/* Prints how long the run's `steps` take. */
static inline void training_print_time(const Session* s, const StepTime* time, int64_t steps) {
    const Options* o = &s->chosen;
    const bool least = !time->whole && !time->parts;
    const char* about = time->whole ? "" : least ? "more than " : "about ";
    char clock[32], count[32], parts[64] = "";
    if (time->parts) { snprintf(parts, sizeof parts, " (%d of its %d micro-batches)", time->parts, s->run.plan.accumulate); }
    const bool long_step = time->ms >= 1e4;
    printf("timed   %s%.1f %s a step%s: ", about, time->ms * (long_step ? 1e-3 : 1), long_step ? "s" : "ms", parts);
    if (o->minutes > 0 && o->steps < 0) {
        const int64_t fit = steps_for_minutes(o->minutes, now_seconds() - s->process.started, time->ms * 1e-3);
        printf("%s%s steps fit into %g minutes\n", least ? "at most " : about, text_count((uint64_t)fit, count, sizeof count),
               o->minutes);
    } else {
        printf("%s steps take %s%s, validations, samples and checkpoints apart\n",
               text_count((uint64_t)steps, count, sizeof count), about,
               text_clock(time->ms * 1e-3 * (double)steps, clock, sizeof clock));
    }
}

/* Reads every file of the run. Then estimates its duration by a few steps of a model of its size, within a minute. Without a
 * device it only reads. */
static inline void training_dry_run(Training* t) {
    enum { MOST_SECONDS = 60 };
    Session* s = t->s;
    const Options* o = &s->chosen;
    const int64_t steps = s->run.plan.stop - (int64_t)s->run.state.step;  // before the timed ones count
    StepTime time;
    Error e = NO_ERROR;
    if (t->trainer->missing || s->process.ranks > 1 || !s->data.has_train) {
        const char* missing = t->trainer->missing ? t->trainer->missing : "";
        const char* why = !s->data.has_train ? "there is no data"
                          : *missing         ? "no GPU can be used here: "
                                             : "a dry run is one process";
        job_check_weights(s);
        training_scan_data(s);
        printf("timed   nothing: %s%s\n", why, s->data.has_train ? missing : "");
        return;
    }
    t->model = job_open_model(t->trainer, s);
    training_scan_data(s);
    if (o->profile == 0 && (steps > 0 || o->minutes > 0)) {
        training_prepare(t);
        must(time_steps(t->trainer, t->model, &t->recipe, o->batch, MOST_SECONDS, stdout, &time, &e), &e);
        training_print_time(s, &time, steps);
    }
    t->trainer->destroy(t->model);
}

/* Returns whether --patience validations in a row were above the lowest loss. */
static inline bool training_patience_is_over(const Session* s) {
    return s->chosen.patience > 0 && s->run.state.val.since_best >= (uint64_t)s->chosen.patience;
}

static inline void training_catch_up(Training* t);
static inline void training_checkpoint(Training* t, bool timed);

/* Does everything before the first step. Returns false for --dry-run and --profile, which do not train. */
static inline bool training_open(Training* t, const Trainer* trainer, Session* s) {
    const Options* o = &s->chosen;
    const bool timed = o->minutes > 0 && !s->start.resumed;
    memset(t, 0, sizeof *t);
    t->trainer = trainer;
    t->s = s;
    run_catch_save_signals();
    session_print(s, trainer->precision);
    session_compare(s, trainer->dtype);
    job_check_memory(trainer, s, stdout);
    if (!timed || s->process.job == JOB_DRY_RUN) { training_print_plan(s); }
    if (s->start.resumed && o->given[OPT_minutes]) {
        printf("resume  --minutes set the number of steps when the run began: it has %lld\n", (long long)s->run.plan.steps);
    }
    if (s->start.resumed && (int64_t)s->run.state.step >= s->run.plan.stop) {
        printf("resume  already at step %llu of %s %lld: nothing is left to train\n", (unsigned long long)s->run.state.step,
               s->run.plan.stop < s->run.plan.steps ? "--stop-after" : "--steps", (long long)s->run.plan.stop);
    }
    if (s->process.job == JOB_DRY_RUN) {
        training_dry_run(t);
        return false;
    }
    fflush(stdout);

    together_at(s, PHASE_LOADING, (int64_t)s->run.state.step);
    t->model = job_open_model(trainer, s);
    together_compare_weights(s);
    if (s->start.resumed) {
        StateSlot slots[NUM_SLOTS];
        const int num_slots = state_slots(trainer, t->model, s->start.saved_master, slots);
        session_load_states(s, slots, num_slots);
        if (!s->run.state.bf16_weights && trainer->slot(t->model, SLOT_MASTER).dtype == SAFE_BF16) {
            print_names(stdout, "resume  --master none: the exact weights of %s are now rounded to bfloat16\n", s->start.dir);
        }
    }
    if (o->profile == 0) {
        session_lock(s);  // a run that is refused before this point leaves no trace
        together_share_out(s);
    }

    together_at(s, PHASE_PREPARING, (int64_t)s->run.state.step);
    training_prepare(t);
    if (timed) {
        training_measure(t);
        training_print_plan(s);
    }
    if (o->profile > 0) {
        trainer->profile(t->model, &t->recipe, o->profile);
        trainer->destroy(t->model);
        return false;
    }
    session_begin(s, trainer->precision);
    run_catch_signals();
    open_generator(trainer, s, t->model, &t->generator, &t->sampler);
    t->generator.ellipsis = true;
    t->queued = t->reported = (int64_t)s->run.state.step;
    t->tokens = s->run.state.tokens;
    t->sampled = s->start.resumed && (s->run.state.owed & OWED_SAMPLE) ? -1 : t->queued;
    t->answered = s->start.resumed && (s->run.state.owed & OWED_TASKS) ? -1 : t->queued;
    if (s->start.resumed && !*o->resume) { t->not_finite = (int)size_min(s->run.state.bad_steps, MOST_NOT_FINITE); }
    t->saved = s->start.resumed ? t->queued : -1;
    t->saved_timed = s->start.resumed && s->run.state.timed;
    t->saved_at = now_seconds();
    t->loss_scale = s->run.state.loss_scale;
    if (s->start.resumed && !s->run.state.not_finite) { snprintf(t->healthy, sizeof t->healthy, "%s", s->start.dir); }
    step_lines_init(&t->lines, s->run.plan.steps, s->run.plan.tokens_per_step, t->queued,
                    flops_per_token(&s->spec.config, &s->spec.table, o->seq), trainer->peak_flops * s->process.ranks);
    t->lines.ranks = s->process.ranks;
    // a run whose patience is over, whether it ended so or died after its last checkpoint, does not continue
    t->out_of_patience = s->start.resumed && s->data.has_val && training_patience_is_over(s);
    if (timed && s->process.rank == 0) { t->pace = pace_begin(o->minutes, s->process.started, now_seconds(), t->queued); }
    if (s->start.resumed) { training_catch_up(t); }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// a step

/* Returns whether the run breaks off and skips the work that is due at this step. Once true, it stays so. All ranks return
 * the same: an error of one counts once training_due() has shared it. */
static inline bool training_breaks_off(const Training* t) {
    const bool failed = t->s->process.team ? t->failed : t->error.msg[0] != 0;
    return run_stop_requested() || failed || t->not_finite >= MOST_NOT_FINITE;
}

/* Returns whether the run ends before its last step. Once true, it stays so. */
static inline bool training_stops(const Training* t) { return training_breaks_off(t) || t->out_of_patience; }

/* Returns whether --checkpoint-minutes asks for a checkpoint. */
static inline bool training_time_is_up(const Training* t) {
    const double interval = 60.0 * t->s->chosen.checkpoint_minutes;
    return interval > 0 && now_seconds() - t->saved_at >= fmax(interval, WRITE_INTERVAL * t->write_seconds);
}

/* Closes the log after a line that could not be written: the run then ends without it. */
static inline void training_logged(Training* t, bool written) {
    if (!written) { logger_close(&t->s->run.log); }
}

/* Reports the slowest rank, from the times that all ranks have shared. */
static inline void training_find_slowest(Training* t, const float* busy_ms) {
    const Team* team = t->s->process.team;
    SlowRank r;
    if (!team || t->s->process.rank > 0 || !slowest_add(&t->slowest, busy_ms, team->run.ranks, &r)) { return; }
    const char* host = together_host(team, r.rank);
    print_slowest(stdout, t->reported, r.rank, host, r.ms, r.others_ms);
    training_logged(t, log_slowest(&t->s->run.log, t->reported, r.rank, host, r.ms, r.others_ms, &t->error));
}

/* Ends the run after `steps` steps, since --minutes does not suffice for more: from the next step on, the schedule passes
 * through the rest of its rates in fewer steps. */
static inline void training_shorten(Training* t, int64_t steps) {
    Session* s = t->s;
    const double ms = 1e3 * t->pace.pace;
    char now[32], before[32];
    printf("plan    %s steps instead of %s: a step takes %.1f ms now, at step %lld\n",
           text_count((uint64_t)steps, now, sizeof now), text_count((uint64_t)s->run.plan.steps, before, sizeof before), ms,
           (long long)t->queued);
    fflush(stdout);
    schedule_shorten(&s->run.state.shortened, t->queued, s->run.plan.steps, steps);
    plan_shorten(&s->run.plan, steps);
    t->lines.steps = steps;
    training_logged(t, log_plan(&s->run.log, t->queued, steps, ms, &t->error));
}

/* Learns what the ranks ask for, and whether one has an error. */
static inline Wishes training_wishes(Training* t) {
    Team* team = t->s->process.team;
    const int64_t steps = pace_end(&t->pace, now_seconds(), t->queued, t->s->run.plan.steps);
    const Wishes mine = {run_signal_came(),    run_save_requested(), training_time_is_up(t),
                         t->error.msg[0] != 0, (float)t->busy_ms,    steps};
    float* busy_ms = team ? (float*)xcalloc((size_t)team->run.ranks, sizeof *busy_ms) : NULL;
    together_at(t->s, PHASE_STEP, t->queued);
    const Wishes all = together_wish(team, mine, busy_ms);
    t->busy_ms = 0;
    run_all_stop = all.end;
    t->failed = all.failed && !agree_ok(team, !mine.failed, &t->error);  // which shares the error with the others
    training_find_slowest(t, busy_ms);
    if (all.steps > t->queued && all.steps < t->s->run.plan.steps) { training_shorten(t, all.steps); }
    free(busy_ms);
    return all;
}

static inline Due training_due(Training* t) {
    const Session* s = t->s;
    const Options* o = &s->chosen;
    const int64_t step = t->queued;
    const Wishes wishes = training_wishes(t);
    const bool stops = training_stops(t), unsaved = step != t->saved;
    const bool unkept = unsaved || t->saved_timed;  // a timed checkpoint is written again if a lasting one is due at this step
    const bool nothing_done = stops && t->error.msg[0] && step == 0;  // the first batch of all could not be read
    Due d;
    d.validation = s->data.has_val && !stops && session_due(s, o->val_every, step);
    d.tasks = s->data.has_tasks && !stops && session_due(s, o->eval_every, step);
    d.sample = t->generator.context > 0 && !stops && session_due(s, o->sample_every, step);
    d.checkpoint = unkept && !nothing_done && (stops || wishes.save || session_due(s, o->checkpoint_every, step));
    d.timed = unsaved && !d.checkpoint && wishes.timed;
    d.end = stops || step >= s->run.plan.stop;
    d.drain = d.validation || d.tasks || d.sample || d.checkpoint || d.timed || d.end || o->debug;
    return d;
}

/* Writes where the first inf or NaN is. */
static inline void training_name_not_finite(Training* t, char name[TENSOR_TEXT]) {
    if (t->reported == t->lines.first_step) {  // a resumed run that does no step has no tensors to look at
        snprintf(name, TENSOR_TEXT, "a step before this start");
    } else if (!t->trainer->name_not_finite(t->model, name)) {
        snprintf(name, TENSOR_TEXT, "an earlier micro-batch, since every tensor of the last one is finite");
    }
}

static inline void training_report(Training* t, const Metrics* r) {
    Session* s = t->s;
    char note[96], name[TENSOR_TEXT];
    const char* skipped = skip_note(r, t->trainer->scales_loss, note, sizeof note);
    const bool not_finite = r->verdict == UPDATE_NOT_FINITE && t->loss_scale <= 1;  // otherwise FP16 looks for its loss scale
    t->reported++;
    t->tokens += t->recipe.tokens;
    t->not_finite = not_finite ? t->not_finite + 1 : 0;
    t->loss_scale = r->loss_scale;
    if (t->trainer->busy_ms) { t->busy_ms = t->trainer->busy_ms(t->model); }
    s->run.state.not_finite = not_finite;
    step_line(stdout, &t->lines, t->reported, s->run.plan.stop, r, t->trainer->memory_used(t->model), skipped);
    training_logged(t, log_step(&s->run.log, &t->lines, r, now_seconds() - s->process.started, t->tokens, s->data.train.indexed,
                                skipped, &t->error));
    if (s->chosen.debug && r->verdict == UPDATE_NOT_FINITE) {
        training_name_not_finite(t, name);
        printf("debug   not finite: %s\n", name);
    }
}

/* Takes the loss of a validation. A validation that happens only because --stop-after ends the run counts for its checkpoint,
 * but not for the run, which later continues as if it never stopped. Returns whether the loss is the lowest so far. */
static inline bool training_take_validation(Training* t, double loss) {
    const Session* s = t->s;
    const int every = s->chosen.val_every;
    Validations* v = &t->s->run.state.val;
    if ((every == 0 || t->reported % every != 0) && t->reported != s->run.plan.steps) {
        v->step = (uint64_t)t->reported;
        v->loss = loss;
        return false;
    }
    const bool best = validations_add(v, (uint64_t)t->reported, loss);
    t->out_of_patience = training_patience_is_over(s);
    return best;
}

/* Validates, unless a signal ends the run meanwhile. A loss that is not finite is reported, but only steps that are not
 * finite end a run. */
static inline void training_validate(Training* t, Due* due) {
    Session* s = t->s;
    const uint64_t rows = (uint64_t)s->chosen.val_batches * (uint64_t)s->chosen.batch;
    ValidationLoss l;
    together_at(s, PHASE_VALIDATION, t->reported);
    if (training_breaks_off(t) || !validate(t->trainer, s, t->model, rows, stdout, &l, &t->error)) { return; }
    print_validation(stdout, &t->lines, t->reported, l.loss, l.bpb);
    training_logged(t, log_val(&s->run.log, t->reported, l.loss, l.bpb, &t->error));
    if (training_take_validation(t, l.loss) && s->chosen.checkpoint_best && t->saved != t->reported) {
        due->checkpoint = true;
        due->timed = false;  // it stays
    }
}

/* Answers --tasks, unless a signal ends the run meanwhile. */
static inline void training_answer(Training* t) {
    Session* s = t->s;
    together_at(s, PHASE_VALIDATION, t->reported);
    for (size_t i = 0; i < s->data.tasks.num_files; i++) {
        const TaskFile* file = &s->data.tasks.files[i];
        const char* name = file_name(file->path);
        TaskScore score;
        if (training_breaks_off(t) || !answer_tasks(t->trainer, s, t->model, file, &score, &t->error)) { return; }
        print_task(stdout, t->reported, name, score.acc, score.acc_norm, file->count);
        training_logged(t, log_task(&s->run.log, t->reported, name, score.acc, score.acc_norm, file->count, &t->error));
    }
    t->answered = t->reported;
}

static inline void training_evaluate(Training* t, Due* due) {
    if (due->validation) { training_validate(t, due); }
    if (due->tasks) { training_answer(t); }
}

static inline void training_sample(Training* t) {
    Session* s = t->s;
    Generator* g = &t->generator;
    Error e = NO_ERROR;
    if (training_breaks_off(t)) { return; }
    together_at(s, PHASE_SAMPLING, t->reported);
    printf("sample  ");
    g->stream = (uint32_t)t->reported;
    if (!generate(g, s->chosen.prompt, s->chosen.sample_tokens, &e)) { warn("no sample: %s", e.msg); }
    if (run_stop_requested()) { return; }  // the text is cut off
    t->sampled = t->reported;
    training_logged(t, log_sample(&s->run.log, t->reported, g->text, g->text_len, &t->error));
}

/* Returns the bits of what the run, were it not to stop here, makes at this step, and has not made. */
static inline uint64_t training_owed(const Training* t) {
    const Session* s = t->s;
    const Options* o = &s->chosen;
    const int64_t step = t->reported;
    const bool last = step == s->run.plan.steps;
    const bool tasks = s->data.has_tasks && (last || (o->eval_every > 0 && step % o->eval_every == 0));
    const bool sample = t->generator.context > 0 && (last || (o->sample_every > 0 && step % o->sample_every == 0));
    return (tasks && t->answered != step ? OWED_TASKS : 0) | (sample && t->sampled != step ? OWED_SAMPLE : 0);
}

/* On resuming, makes what was due at the checkpoint's step, if a signal or an error prevented it then. Saves the step again, so
 * that it is made once. */
static inline void training_catch_up(Training* t) {
    const TrainerState* state = &t->s->run.state;
    const uint64_t owed = state->owed;
    Due due = training_due(t);
    const bool validates = due.validation && state->val.step != state->step;
    if (validates) { training_validate(t, &due); }
    if (due.tasks && (owed & OWED_TASKS)) { training_answer(t); }
    if (due.sample && (owed & OWED_SAMPLE)) { training_sample(t); }
    if ((validates && state->val.step == state->step) || training_owed(t) != owed) { training_checkpoint(t, t->saved_timed); }
}

/* Reports that a checkpoint cannot be written, after the error that ended the run, if any. */
static inline void training_die_unsaved(const Training* t, const Error* e, SafeDtype dtype, const StateSlot* slots,
                                        int num_slots) {
    const Session* s = t->s;
    double bytes = (double)s->spec.trained.num_params * (double)safe_dtypes[dtype].bytes;
    char size[32];
    together_close(t->s, true);
    for (int i = 0; i < num_slots; i++) {
        bytes += (double)s->spec.trained.num_params * (double)safe_dtypes[slots[i].dtype].bytes;
    }
    text_bytes((uint64_t)bytes, size, sizeof size);
    const int length = (int)strcspn(t->error.msg, "\n");  // one hint is enough
    const char *first = t->error.msg, *then = first[0] ? "; then " : "";
    if (s->process.rank == 0 && s->run.lock < 0) {
        die("%.*s%s%s\n  hint: the steps after %lld are lost: if its folder was moved, go on there with --resume", length,
            first, then, e->msg, (long long)(t->saved < 0 ? 0 : t->saved));
    }
    if (!s->run.newest[0]) {
        die("%.*s%s%s\n  hint: a checkpoint takes %s, and none is saved yet: make room", length, first, then, e->msg, size);
    }
    die("%.*s%s%s\n  hint: a checkpoint takes %s; %s is whole: make room and continue with --resume", length, first, then,
        e->msg, size, s->run.newest);
}

/* Writes a checkpoint. It holds the exact weights if its dtype can hold them (F32, or the dtype of --master none). Otherwise
 * it holds rounded weights, and the exact ones go into the optimizer state, as "master". If rounding made a weight infinite, it
 * writes F32 instead, with a warning. If --out was moved meanwhile, begins anew: session_begin_checkpoint() makes it again. */
static inline void training_checkpoint(Training* t, bool timed) {
    const Trainer* trainer = t->trainer;
    Session* s = t->s;
    const double start = now_seconds();
    const SafeDtype dtype = session_export_dtype(s, trainer->dtype);
    const SafeDtype master = trainer->slot(t->model, SLOT_MASTER).dtype;
    const bool exact = dtype == SAFE_F32 || dtype == master || s->run.state.f32_weights;
    StateSlot slots[NUM_SLOTS];
    Error e = NO_ERROR;
    const int num_slots = state_slots(trainer, t->model, !exact, slots);
    const SlotKind kind = exact ? SLOT_MASTER : SLOT_WEIGHTS;
    const StateSlot own = trainer->slot(t->model, kind), all = trainer->collect ? trainer->collect(t->model, kind) : own;
    const bool together = trainer->collect && all.source;
    StateSlot weights = together ? all : own;
    weights.dtype = dtype;
    const int major = s->chosen.major_every;
    together_at(s, PHASE_WRITING, t->reported);
    run_save_done();
    s->run.state.bf16_weights = master == SAFE_BF16;
    s->run.state.bad_steps = (uint64_t)t->not_finite;
    s->run.state.owed = training_owed(t);
    s->run.state.timed = timed && (major == 0 || t->reported % major != 0);
    if (!session_checkpoint(s, weights, together, slots, num_slots, trainer->add_files, t->model, &e)) {
        bool moved = s->process.rank == 0 && session_lost_out(s);
        agree_first(s->process.team, &moved, sizeof moved);
        if (!e.too_large && !moved) { training_die_unsaved(t, &e, dtype, slots, num_slots); }
        if (e.too_large && s->process.rank == 0) { warn("%s: this checkpoint has its weights in F32", e.msg); }
        s->run.state.f32_weights |= e.too_large;
        training_checkpoint(t, timed);
        return;
    }
    s->run.state.f32_weights = false;  // the next checkpoint decides anew, after a resume as well
    if (e.msg[0]) { fail(&t->error, "%s", e.msg); }
    t->saved = t->reported;
    t->saved_timed = s->run.state.timed;
    t->saved_at = now_seconds();
    t->write_seconds = t->saved_at - start;
    const bool last = t->reported >= s->run.plan.stop || training_stops(t);
    if (!last) { print_names(stdout, "saved   %s\n", s->run.newest); }  // the last is in the summary
    if (!s->run.state.not_finite) { snprintf(t->healthy, sizeof t->healthy, "%s", s->run.newest); }
}

// ---------------------------------------------------------------------------------------------------------------------
// the end

/* Ends the program after an error that has another cause than the model. The hint names what is saved. */
static inline void training_die_of_error(const Training* t) {
    const int length = (int)strcspn(t->error.msg, "\n");  // one hint is enough
    if (t->saved < 0) { die("%.*s\n  hint: no step was done, so nothing is saved", length, t->error.msg); }
    die("%.*s\n  hint: step %lld is saved in %s: mend the cause and go on with --resume", length, t->error.msg,
        (long long)t->saved, t->s->run.newest);
}

/* Ends the program after steps that were not finite. `name`: the first tensor that was not finite. */
static inline void training_die_not_finite(Training* t, const char* name) {
    char count[32] = "step";
    if (t->not_finite > 1) { snprintf(count, sizeof count, "%d steps", t->not_finite); }
    if (!t->healthy[0]) {
        die("the loss or gradient norm of the last %s is not finite, first in %s\n  hint: start again with a lower --lr", count,
            name);
    }
    die("the loss or gradient norm of the last %s is not finite, first in %s\n"
        "  hint: %s is from before: go on with --resume %s and a lower --lr",
        count, name, t->healthy, t->healthy);
}

static inline void training_close(Training* t) {
    Session* s = t->s;
    // --steps 0 exports a new model; a run resumed at its last step keeps a timed checkpoint
    if ((t->saved < 0 || t->saved_timed) && !training_breaks_off(t)) { training_checkpoint(t, false); }
    const bool stopped = t->reported < s->run.plan.stop;
    const char* reason = t->error.msg[0]                        ? "error"
                         : t->not_finite > 0                    ? "not finite"
                         : stopped && t->out_of_patience        ? "patience"
                         : stopped                              ? "signal"
                         : s->run.plan.stop < s->run.plan.steps ? "stop-after"
                                                                : "done";
    char name[TENSOR_TEXT];
    if (t->not_finite > 0) { training_name_not_finite(t, name); }  // all ranks call it, while they are together
    log_end(&s->run.log, (int64_t)s->run.state.step, reason, now_seconds() - s->process.started, &t->error);
    together_close(s, t->error.msg[0] || t->not_finite > 0);
    if (t->error.msg[0]) { training_die_of_error(t); }
    if (t->not_finite > 0) { training_die_not_finite(t, name); }
    s->status = stopped && !t->out_of_patience ? s->chosen.signal_status : 0;
    if (stopped && t->out_of_patience) {
        printf("ended   %d validations in a row were above %.4f of step %llu\n", s->chosen.patience, s->run.state.val.best,
               (unsigned long long)s->run.state.val.best_step);
    }
    char words[256];
    const bool chats = s->data.train.masked && s->data.has_tokenizer && chat_template_fits(&s->data.tokenizer);
    first_words(s->data.mix.sources[0].data, s->data.has_tokenizer ? &s->data.tokenizer : NULL, words, sizeof words);
    print_summary(stdout, &t->lines, s->process.argv[0], s->run.newest,
                  *s->chosen.prompt ? s->chosen.prompt
                  : chats           ? NULL
                                    : words,
                  t->trainer->memory_used(t->model));
    double loss = 0;
    const uint64_t best = checkpoint_best(s->chosen.out, s->run.state.step, &loss);
    if (best > 0) {
        print_names(stdout, "best    %s/step_%08llu, validation %.4f\n", s->chosen.out, (unsigned long long)best, loss);
    }
    generator_free(&t->generator);
    sampler_free(&t->sampler);
    slowest_free(&t->slowest);
    row_parts_free(&t->parts);
    t->trainer->destroy(t->model);
}

#endif
