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
#include "llmc/run/session/open_model.h"  // defines: model_use, model_create, model_check_memory, load_states, check_weights
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
    void* model;
    const Options* options;  // the chosen ones
    const Process* process;
    const Start* start;
    const ModelSpec* spec;
    Data* data;
    Run* run;
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

static inline Recipe training_recipe(bool scales_loss, const Options* o, Mix* data, Run* run, Team* team) {
    Recipe p;
    memset(&p, 0, sizeof p);
    p.data = batches_of_mix(data);
    p.hyper.beta1 = o->beta1;
    p.hyper.beta2 = o->beta2;
    p.hyper.eps = o->eps;
    p.hyper.weight_decay = o->weight_decay;
    p.hyper.grad_clip = o->grad_clip;
    p.hyper.skip_loss_z = o->skip_loss_z;
    p.hyper.skip_norm_z = o->skip_norm_z;
    p.hyper.tokens = (double)run->plan.tokens_per_step;
    p.hyper.loss_weight = 1.0 / p.hyper.tokens;
    p.hyper.scale_interval = scales_loss ? 1000 : 0;
    p.accumulate = run->plan.accumulate;
    p.tokens = (uint64_t)run->plan.tokens_per_step;
    p.seed = (uint64_t)o->seed;
    p.team = team;
    p.run = &run->state;
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

/* Prints options, machine, model and data before anything is allocated. `precision`: FP32, BF16 or FP16. */
static inline void training_print_start(const Training* t) {
    const Options* o = t->options;
    const ModelSpec* m = t->spec;
    const Data* d = t->data;
    char count[32];
    if (t->process->rank != 0) { return; }
    options_print(stdout, o);
    printf("machine %s\n", t->process->machine);
    print_model(stdout, start_name(t->start, o), &m->config, &m->table, t->trainer->precision);
    if (m->config.lora.rank > 0) { print_lora(stdout, &m->config.lora, m->trained.num_params, m->table.num_params); }
    if (d->has_train) {
        const int files = mix_num_files(&d->mix);
        print_names(stdout, "data    %s: %s tokens in %d file%s\n", o->train,
                    text_count(d->train.num_tokens, count, sizeof count), files, text_plural(files));
    } else {
        printf("data    none: this is the plan of a step\n");
    }
    if (d->has_val) {
        print_names(stdout, "        %s: %s tokens for validation\n", o->val,
                    text_count(d->val.num_tokens, count, sizeof count));
    }
    if (t->start->resumed) {
        print_names(stdout, "resume  %s, step %llu\n", t->start->dir, (unsigned long long)t->run->state.step);
    }
}

/* Prints the plan and, with several sources, what it takes of each. With --minutes, the number of steps may not be known
 * yet. */
static inline void training_print_plan(const Training* t) {
    const Options* o = t->options;
    const Plan* plan = &t->run->plan;
    const Mix* m = &t->data->mix;
    const uint64_t rows = (uint64_t)(plan->tokens_per_step / o->seq);
    uint64_t counts[MIX_MOST];
    char tokens[32];
    print_plan(stdout, plan, o, process_share(t->process, o).groups, t->data->train.num_tokens);
    for (int i = 0; i < m->count; i++) { print_rows(stdout, m->sources[i].pattern, m->sources[i].data); }
    if (t->data->has_val) { print_rows(stdout, o->val, &t->data->val); }
    if (m->count <= 1) { return; }
    const bool known = o->minutes == 0 || o->steps >= 0;
    mix_count(m, known ? (uint64_t)plan->steps * rows : 0, counts);
    for (int i = 0; i < m->count; i++) {
        const DataLoader* d = m->sources[i].data;
        print_names(stdout, "source  %s: %.2f %% of the rows, %s tokens", m->sources[i].pattern,
                    100.0 * m->sources[i].share / MIX_BLOCK, text_count(d->num_tokens, tokens, sizeof tokens));
        if (known) { printf(", %.2f epochs", (double)counts[i] / (double)d->rows_per_epoch); }
        printf("\n");
    }
}

/* Prints what a resumed run does otherwise than its flags say. */
static inline void training_print_resumed(const Training* t) {
    const Plan* plan = &t->run->plan;
    const uint64_t step = t->run->state.step;
    if (t->options->given[OPT_minutes]) {
        printf("resume  --minutes set the number of steps when the run began: it has %lld\n", (long long)plan->steps);
    }
    if ((int64_t)step >= plan->stop) {
        printf("resume  already at step %llu of %s %lld: nothing is left to train\n", (unsigned long long)step,
               plan->stop < plan->steps ? "--stop-after" : "--steps", (long long)plan->stop);
    }
}

/* Creates the model, loads its weights and, to resume, its state. */
static inline void training_load(Training* t, const ModelUse* use) {
    const Trainer* trainer = t->trainer;
    Run* run = t->run;
    StateSlot slots[NUM_SLOTS];
    together_at(t->process->team, PHASE_LOADING, (int64_t)run->state.step);
    t->model = model_create(trainer, use, t->options, t->start, t->spec, run, t->process);
    together_compare_weights(t->process->team, run->weights);
    if (!t->start->resumed) { return; }
    const int num_slots = state_slots(trainer, t->model, t->start->saved_master, slots);
    load_states(t->start, t->spec, run->state.world_size, process_screen(t->process), slots, num_slots);
    if (!run->state.bf16_weights && trainer->slot(t->model, SLOT_MASTER).dtype == SAFE_BF16) {
        print_names(stdout, "resume  --master none: the exact weights of %s are now rounded to bfloat16\n", t->start->dir);
    }
}

/* Makes the model ready for steps. */
static inline void training_prepare(Training* t) {
    const Trainer* trainer = t->trainer;
    const Options* o = t->options;
    TrainerState* state = &t->run->state;
    // a new run, or a run of a build that scales no loss: there the counter never moves
    const bool unscaled = state->loss_scale == 1 && state->scale_good == 0;
    if (trainer->scales_loss && (!t->start->resumed || unscaled)) { state->loss_scale = 65536; }
    if (!trainer->scales_loss) { state->loss_scale = 1; }
    t->recipe = training_recipe(trainer->scales_loss, o, &t->data->mix, t->run, t->process->team);
    t->recipe.data = row_parts_of(&t->parts, &t->recipe.data, process_share(t->process, o), o->seq);
    if (trainer->prepare) { trainer->prepare(t->model, &t->recipe, o, t->start->resumed ? t->start->dir : NULL); }
}

/* Turns --minutes into a number of steps: times a few steps, then wipes their traces. */
static inline void training_measure(Training* t, Options* chosen) {
    Run* run = t->run;
    DataLoader* train = &t->data->train;
    const TrainerState before = run->state;  // state of a new run, which owns no memory
    const uint64_t row = train->row;
    Error e = NO_ERROR;
    StepTime time;
    must(time_steps(t->trainer, t->model, &t->recipe, chosen->batch, INFINITY, stdout, &time, &e), &e);
    run->state = before;
    t->trainer->forget(t->model, &t->recipe);
    dataloader_seek(train, row);
    const double elapsed = now_seconds() - t->process->started;
    choose_minutes(chosen, steps_for_minutes(chosen->minutes, elapsed, time.ms * 1e-3), t->process->team);
    must(plan_make(&run->plan, chosen, process_share(t->process, chosen).groups, train->rows_per_epoch, &e), &e);
    char count[32];
    printf("timed   %.1f ms a step: %s steps fit into %g minutes\n", time.ms,
           text_count((uint64_t)run->plan.steps, count, sizeof count), chosen->minutes);
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
static inline void training_scan_data(const Training* t) {
    const Mix* m = &t->data->mix;
    Error e = NO_ERROR;
    if (t->process->rank != 0) { return; }
    for (int i = 0; i < m->count; i++) { must(training_scan(m->sources[i].data, m->sources[i].pattern, &e), &e); }
    if (t->data->has_val) { must(training_scan(&t->data->val, t->options->val, &e), &e); }
}

/* Prints how long the run's `steps` take. */
static inline void training_print_time(const Training* t, const StepTime* time, int64_t steps) {
    const Options* o = t->options;
    const bool least = !time->whole && !time->parts;
    const char* about = time->whole ? "" : least ? "more than " : "about ";
    char clock[32], count[32], parts[64] = "";
    if (time->parts) { snprintf(parts, sizeof parts, " (%d of its %d micro-batches)", time->parts, t->run->plan.accumulate); }
    const bool long_step = time->ms >= 1e4;
    printf("timed   %s%.1f %s a step%s: ", about, time->ms * (long_step ? 1e-3 : 1), long_step ? "s" : "ms", parts);
    if (o->minutes > 0 && o->steps < 0) {
        const int64_t fit = steps_for_minutes(o->minutes, now_seconds() - t->process->started, time->ms * 1e-3);
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
static inline void training_dry_run(Training* t, const ModelUse* use) {
    enum { MOST_SECONDS = 60 };
    const Options* o = t->options;
    const bool has_train = t->data->has_train;
    const int64_t steps = t->run->plan.stop - (int64_t)t->run->state.step;  // before the timed ones count
    StepTime time;
    Error e = NO_ERROR;
    if (t->trainer->missing || t->process->ranks > 1 || !has_train) {
        const char* missing = t->trainer->missing ? t->trainer->missing : "";
        const char* why = !has_train ? "there is no data" : *missing ? "no GPU can be used here: " : "a dry run is one process";
        check_weights(t->start, t->spec, t->run, t->process);
        training_scan_data(t);
        printf("timed   nothing: %s%s\n", why, has_train ? missing : "");
        return;
    }
    t->model = model_create(t->trainer, use, o, t->start, t->spec, t->run, t->process);
    training_scan_data(t);
    if (o->profile == 0 && (steps > 0 || o->minutes > 0)) {
        training_prepare(t);
        must(time_steps(t->trainer, t->model, &t->recipe, o->batch, MOST_SECONDS, stdout, &time, &e), &e);
        training_print_time(t, &time, steps);
    }
    t->trainer->destroy(t->model);
}

/* Returns whether --patience validations in a row were above the lowest loss. */
static inline bool training_patience_is_over(const Training* t) {
    const int patience = t->options->patience;
    return patience > 0 && t->run->state.val.since_best >= (uint64_t)patience;
}

static inline void training_catch_up(Training* t);
static inline void training_checkpoint(Training* t, bool timed);

/* Sets where the loop begins, and what a resumed run has done and owes. */
static inline void training_set_back(Training* t) {
    const TrainerState* state = &t->run->state;
    const bool resumed = t->start->resumed;
    t->queued = t->reported = (int64_t)state->step;
    t->tokens = state->tokens;
    t->sampled = resumed && (state->owed & OWED_SAMPLE) ? -1 : t->queued;
    t->answered = resumed && (state->owed & OWED_TASKS) ? -1 : t->queued;
    if (resumed && !*t->options->resume) { t->not_finite = (int)size_min(state->bad_steps, MOST_NOT_FINITE); }
    t->saved = resumed ? t->queued : -1;
    t->saved_timed = resumed && state->timed;
    t->saved_at = now_seconds();
    t->loss_scale = state->loss_scale;
    if (resumed && !state->not_finite) { snprintf(t->healthy, sizeof t->healthy, "%s", t->start->dir); }
    // a run whose patience is over, whether it ended so or died after its last checkpoint, does not continue
    t->out_of_patience = resumed && t->data->has_val && training_patience_is_over(t);
}

/* Prepares what speaks: the generator of samples, and the lines of steps. */
static inline void training_open_output(Training* t, int context) {
    const Options* o = t->options;
    const ModelConfig* c = &t->spec->config;
    const Plan* plan = &t->run->plan;
    const int ranks = t->process->ranks;
    sampler_init(&t->sampler, c->vocab_size, o->temperature, o->top_k, o->top_p, (uint64_t)o->seed);
    generator_init(&t->generator, t->trainer->next_logits, t->model, c, data_tokenizer(t->data), &t->sampler, context, stdout);
    t->generator.ellipsis = true;
    step_lines_init(&t->lines, plan->steps, plan->tokens_per_step, (int64_t)t->run->state.step,
                    flops_per_token(c, &t->spec->table, o->seq), t->trainer->peak_flops * ranks);
    t->lines.ranks = ranks;
}

/* Prints and checks what the run would do: plan, changes since the checkpoint, memory. */
static inline void training_check(Training* t, Options* chosen, const ModelUse* use) {
    MemoryQuestion question = {t->trainer, &t->spec->config, *use};
    char what[3 * PATH_CAP];
    const bool unknown = chosen->minutes > 0 && !t->start->resumed && t->process->job != JOB_DRY_RUN;
    training_print_start(t);
    choose_dtype(chosen, t->trainer->dtype, t->spec->config.lora.rank > 0);
    run_compare(t->run, t->start, t->data, chosen, t->process);
    model_choose_recompute(&question, chosen, t->process->team);
    model_memory_text(t->trainer->memory, t->start, chosen, t->data, what);
    model_check_memory(&question, chosen, what, stdout);
    if (!unknown) { training_print_plan(t); }
    if (t->start->resumed) { training_print_resumed(t); }
}

/* Does everything before the first step; the last of it are the last choices. Returns false for --dry-run and --profile, which do
 * not train. */
static inline bool training_open(Training* t, const Trainer* trainer, Program* p) {
    const Options* o = &p->chosen;
    const bool timed = o->minutes > 0 && !p->start.resumed;
    memset(t, 0, sizeof *t);
    t->trainer = trainer;
    t->options = o;
    t->process = &p->process;
    t->start = &p->start;
    t->spec = &p->spec;
    t->data = &p->data;
    t->run = &p->run;
    run_catch_save_signals();
    const ModelUse use = model_use(&p->process, o, &p->spec.config, &p->data);
    training_check(t, &p->chosen, &use);
    if (p->process.job == JOB_DRY_RUN) {
        training_dry_run(t, &use);
        return false;
    }
    fflush(stdout);
    training_load(t, &use);
    if (o->profile == 0) {
        out_take(&p->run, o->out, &p->start, &p->process);  // a run that is refused before this point leaves no trace
        together_share_out(p->process.team, o->out);
    }
    together_at(p->process.team, PHASE_PREPARING, (int64_t)p->run.state.step);
    training_prepare(t);
    if (timed) {
        training_measure(t, &p->chosen);
        training_print_plan(t);
    }
    if (o->profile > 0) {
        trainer->profile(t->model, &t->recipe, o->profile);
        trainer->destroy(t->model);
        return false;
    }
    run_begin(&p->run, &p->start, &p->spec, o, &p->process, trainer->precision, p->data.train.num_tokens);
    run_catch_signals();
    training_open_output(t, use.cache_len);
    training_set_back(t);
    if (timed && p->process.rank == 0) { t->pace = pace_begin(o->minutes, p->process.started, now_seconds(), t->queued); }
    if (p->start.resumed) { training_catch_up(t); }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// a step

/* Returns whether the run breaks off and skips the work that is due at this step. Once true, it stays so. All ranks return
 * the same: an error of one counts once training_due() has shared it. */
static inline bool training_breaks_off(const Training* t) {
    const bool failed = t->process->team ? t->failed : t->error.msg[0] != 0;
    return run_stop_requested() || failed || t->not_finite >= MOST_NOT_FINITE;
}

/* Returns whether the run ends before its last step. Once true, it stays so. */
static inline bool training_stops(const Training* t) { return training_breaks_off(t) || t->out_of_patience; }

/* Returns whether --checkpoint-minutes asks for a checkpoint. */
static inline bool training_time_is_up(const Training* t) {
    const double interval = 60.0 * t->options->checkpoint_minutes;
    return interval > 0 && now_seconds() - t->saved_at >= fmax(interval, WRITE_INTERVAL * t->write_seconds);
}

/* Closes the log after a line that could not be written: the run then ends without it. */
static inline void training_logged(Training* t, bool written) {
    if (!written) { logger_close(&t->run->log); }
}

/* Reports the slowest rank, from the times that all ranks have shared. */
static inline void training_find_slowest(Training* t, const float* busy_ms) {
    const Team* team = t->process->team;
    SlowRank r;
    if (!team || t->process->rank > 0 || !slowest_add(&t->slowest, busy_ms, team->run.ranks, &r)) { return; }
    const char* host = together_host(team, r.rank);
    print_slowest(stdout, t->reported, r.rank, host, r.ms, r.others_ms);
    training_logged(t, log_slowest(&t->run->log, t->reported, r.rank, host, r.ms, r.others_ms, &t->error));
}

/* Ends the run after `steps` steps, since --minutes does not suffice for more: from the next step on, the schedule passes
 * through the rest of its rates in fewer steps. */
static inline void training_shorten(Training* t, int64_t steps) {
    const double ms = 1e3 * t->pace.pace;
    char now[32], before[32];
    printf("plan    %s steps instead of %s: a step takes %.1f ms now, at step %lld\n",
           text_count((uint64_t)steps, now, sizeof now), text_count((uint64_t)t->run->plan.steps, before, sizeof before), ms,
           (long long)t->queued);
    fflush(stdout);
    schedule_shorten(&t->run->state.shortened, t->queued, t->run->plan.steps, steps);
    plan_shorten(&t->run->plan, steps);
    t->lines.steps = steps;
    training_logged(t, log_plan(&t->run->log, t->queued, steps, ms, &t->error));
}

/* Learns what the ranks ask for, and whether one has an error. */
static inline Wishes training_wishes(Training* t) {
    Team* team = t->process->team;
    const int64_t steps = pace_end(&t->pace, now_seconds(), t->queued, t->run->plan.steps);
    const Wishes mine = {run_signal_came(),    run_save_requested(), training_time_is_up(t),
                         t->error.msg[0] != 0, (float)t->busy_ms,    steps};
    float* busy_ms = team ? (float*)xcalloc((size_t)team->run.ranks, sizeof *busy_ms) : NULL;
    together_at(t->process->team, PHASE_STEP, t->queued);
    const Wishes all = together_wish(team, mine, busy_ms);
    t->busy_ms = 0;
    run_all_stop = all.end;
    t->failed = all.failed && !agree_ok(team, !mine.failed, &t->error);  // which shares the error with the others
    training_find_slowest(t, busy_ms);
    if (all.steps > t->queued && all.steps < t->run->plan.steps) { training_shorten(t, all.steps); }
    free(busy_ms);
    return all;
}

static inline Due training_due(Training* t) {
    const Options* o = t->options;
    const int64_t step = t->queued;
    const Wishes wishes = training_wishes(t);
    const bool stops = training_stops(t), unsaved = step != t->saved;
    const bool unkept = unsaved || t->saved_timed;  // a timed checkpoint is written again if a lasting one is due at this step
    const bool nothing_done = stops && t->error.msg[0] && step == 0;  // the first batch of all could not be read
    Due d;
    d.validation = t->data->has_val && !stops && plan_due(&t->run->plan, o->val_every, step);
    d.tasks = t->data->has_tasks && !stops && plan_due(&t->run->plan, o->eval_every, step);
    d.sample = t->generator.context > 0 && !stops && plan_due(&t->run->plan, o->sample_every, step);
    d.checkpoint = unkept && !nothing_done && (stops || wishes.save || plan_due(&t->run->plan, o->checkpoint_every, step));
    d.timed = unsaved && !d.checkpoint && wishes.timed;
    d.end = stops || step >= t->run->plan.stop;
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
    char note[96], name[TENSOR_TEXT];
    const char* skipped = skip_note(r, t->trainer->scales_loss, note, sizeof note);
    const bool not_finite = r->verdict == UPDATE_NOT_FINITE && t->loss_scale <= 1;  // otherwise FP16 looks for its loss scale
    t->reported++;
    t->tokens += t->recipe.tokens;
    t->not_finite = not_finite ? t->not_finite + 1 : 0;
    t->loss_scale = r->loss_scale;
    if (t->trainer->busy_ms) { t->busy_ms = t->trainer->busy_ms(t->model); }
    t->run->state.not_finite = not_finite;
    step_line(stdout, &t->lines, t->reported, t->run->plan.stop, r, t->trainer->memory_used(t->model), skipped);
    training_logged(t, log_step(&t->run->log, &t->lines, r, now_seconds() - t->process->started, t->tokens,
                                t->data->train.indexed, skipped, &t->error));
    if (t->options->debug && r->verdict == UPDATE_NOT_FINITE) {
        training_name_not_finite(t, name);
        printf("debug   not finite: %s\n", name);
    }
}

/* Takes the loss of a validation. A validation that happens only because --stop-after ends the run counts for its checkpoint,
 * but not for the run, which later continues as if it never stopped. Returns whether the loss is the lowest so far. */
static inline bool training_take_validation(Training* t, double loss) {
    const int every = t->options->val_every;
    Validations* v = &t->run->state.val;
    if ((every == 0 || t->reported % every != 0) && t->reported != t->run->plan.steps) {
        v->step = (uint64_t)t->reported;
        v->loss = loss;
        return false;
    }
    const bool best = validations_add(v, (uint64_t)t->reported, loss);
    t->out_of_patience = training_patience_is_over(t);
    return best;
}

static inline Evaluator training_evaluator(const Training* t) {
    const Evaluator e = {t->trainer, t->model, t->process, t->options, t->data};
    return e;
}

/* Validates, unless a signal ends the run meanwhile. A loss that is not finite is reported, but only steps that are not
 * finite end a run. */
static inline void training_validate(Training* t, Due* due) {
    const uint64_t rows = (uint64_t)t->options->val_batches * (uint64_t)t->options->batch;
    const Evaluator e = training_evaluator(t);
    ValidationLoss l;
    together_at(t->process->team, PHASE_VALIDATION, t->reported);
    if (training_breaks_off(t) || !validate(&e, rows, stdout, &l, &t->error)) { return; }
    print_validation(stdout, &t->lines, t->reported, l.loss, l.bpb);
    training_logged(t, log_val(&t->run->log, t->reported, l.loss, l.bpb, &t->error));
    if (training_take_validation(t, l.loss) && t->options->checkpoint_best && t->saved != t->reported) {
        due->checkpoint = true;
        due->timed = false;  // it stays
    }
}

/* Answers --tasks, unless a signal ends the run meanwhile. */
static inline void training_answer(Training* t) {
    const Evaluator e = training_evaluator(t);
    together_at(t->process->team, PHASE_VALIDATION, t->reported);
    for (size_t i = 0; i < t->data->tasks.num_files; i++) {
        const TaskFile* file = &t->data->tasks.files[i];
        const char* name = file_name(file->path);
        TaskScore score;
        if (training_breaks_off(t) || !answer_tasks(&e, file, &score, &t->error)) { return; }
        print_task(stdout, t->reported, name, score.acc, score.acc_norm, file->count);
        training_logged(t, log_task(&t->run->log, t->reported, name, score.acc, score.acc_norm, file->count, &t->error));
    }
    t->answered = t->reported;
}

static inline void training_evaluate(Training* t, Due* due) {
    if (due->validation) { training_validate(t, due); }
    if (due->tasks) { training_answer(t); }
}

static inline void training_sample(Training* t) {
    Generator* g = &t->generator;
    Error e = NO_ERROR;
    if (training_breaks_off(t)) { return; }
    together_at(t->process->team, PHASE_SAMPLING, t->reported);
    printf("sample  ");
    g->stream = (uint32_t)t->reported;
    if (!generate(g, t->options->prompt, t->options->sample_tokens, &e)) { warn("no sample: %s", e.msg); }
    if (run_stop_requested()) { return; }  // the text is cut off
    t->sampled = t->reported;
    training_logged(t, log_sample(&t->run->log, t->reported, g->text, g->text_len, &t->error));
}

/* Returns the bits of what the run, were it not to stop here, makes at this step, and has not made. */
static inline uint64_t training_owed(const Training* t) {
    const Options* o = t->options;
    const int64_t step = t->reported;
    const bool last = step == t->run->plan.steps;
    const bool tasks = t->data->has_tasks && (last || (o->eval_every > 0 && step % o->eval_every == 0));
    const bool sample = t->generator.context > 0 && (last || (o->sample_every > 0 && step % o->sample_every == 0));
    return (tasks && t->answered != step ? OWED_TASKS : 0) | (sample && t->sampled != step ? OWED_SAMPLE : 0);
}

/* On resuming, makes what was due at the checkpoint's step, if a signal or an error prevented it then. Saves the step again, so
 * that it is made once. */
static inline void training_catch_up(Training* t) {
    const TrainerState* state = &t->run->state;
    const uint64_t owed = state->owed;
    Due due = training_due(t);
    const bool validates = due.validation && state->val.step != state->step;
    if (validates) { training_validate(t, &due); }
    if (due.tasks && (owed & OWED_TASKS)) { training_answer(t); }
    if (due.sample && (owed & OWED_SAMPLE)) { training_sample(t); }
    if ((validates && state->val.step == state->step) || training_owed(t) != owed) { training_checkpoint(t, t->saved_timed); }
}

/* Reports that a checkpoint cannot be written, after the error that ended the run, if any. */
static inline void training_die_unsaved(const Training* t, const Saved* what, const Error* e) {
    const uint64_t elements = t->spec->trained.num_params;
    uint64_t bytes = elements * safe_dtypes[what->weights.dtype].bytes;
    char size[32];
    together_close(t->process->team, true);
    for (int i = 0; i < what->num_states; i++) { bytes += elements * safe_dtypes[what->states[i].dtype].bytes; }
    text_bytes(bytes, size, sizeof size);
    const int length = (int)strcspn(t->error.msg, "\n");  // one hint is enough
    const char *first = t->error.msg, *then = first[0] ? "; then " : "";
    if (t->process->rank == 0 && t->run->lock < 0) {
        die("%.*s%s%s\n  hint: the steps after %lld are lost: if its folder was moved, go on there with --resume", length,
            first, then, e->msg, (long long)(t->saved < 0 ? 0 : t->saved));
    }
    if (!t->run->newest[0]) {
        die("%.*s%s%s\n  hint: a checkpoint takes %s, and none is saved yet: make room", length, first, then, e->msg, size);
    }
    die("%.*s%s%s\n  hint: a checkpoint takes %s; %s is whole: make room and continue with --resume", length, first, then,
        e->msg, size, t->run->newest);
}

/* Returns what a checkpoint holds. It has the exact weights if its dtype can hold them (F32, or the dtype of --master none).
 * Otherwise it has rounded weights, and the exact ones go into the optimizer state, as "master". */
static inline Saved training_saved(const Training* t) {
    const Trainer* trainer = t->trainer;
    const SafeDtype dtype = safe_dtype_of((ExportDtype)t->options->export_dtype);
    const bool exact = dtype == SAFE_F32 || dtype == trainer->slot(t->model, SLOT_MASTER).dtype || t->run->state.f32_weights;
    const SlotKind kind = exact ? SLOT_MASTER : SLOT_WEIGHTS;
    Saved s;
    memset(&s, 0, sizeof s);
    s.process = t->process;
    s.options = t->options;
    s.start = t->start;
    s.spec = t->spec;
    s.tokenizer = data_tokenizer(t->data);
    if (trainer->collect) { s.weights = trainer->collect(t->model, kind); }
    s.together = trainer->collect && s.weights.source;
    if (!s.together) { s.weights = trainer->slot(t->model, kind); }
    s.weights.dtype = dtype;
    s.num_states = state_slots(trainer, t->model, !exact, s.states);
    s.add = trainer->add_files;
    s.add_ctx = t->model;
    return s;
}

/* Prepares another try after a checkpoint that could not be written, or ends the run. If rounding made a weight infinite, the
 * checkpoint gets F32, with a warning. If --out was moved meanwhile, save_begin() makes it again. */
static inline void training_mend_save(Training* t, const Saved* what, const Error* e) {
    const bool first = t->process->rank == 0;
    bool moved = first && run_lost_out(t->run, t->options->out);
    agree_first(t->process->team, &moved, sizeof moved);
    if (!e->too_large && !moved) { training_die_unsaved(t, what, e); }
    if (e->too_large && first) { warn("%s: this checkpoint has its weights in F32", e->msg); }
    t->run->state.f32_weights |= e->too_large;
}

static inline void training_checkpoint(Training* t, bool timed) {
    const int major = t->options->major_every;
    Run* run = t->run;
    TrainerState* state = &run->state;
    double start = 0;
    Error e = NO_ERROR;
    together_at(t->process->team, PHASE_WRITING, t->reported);
    state->bf16_weights = t->trainer->slot(t->model, SLOT_MASTER).dtype == SAFE_BF16;
    state->bad_steps = (uint64_t)t->not_finite;
    state->owed = training_owed(t);
    state->timed = timed && (major == 0 || t->reported % major != 0);
    for (bool saved = false; !saved;) {
        const Saved what = training_saved(t);
        memset(&e, 0, sizeof e);
        start = now_seconds();
        run_save_done();
        saved = save_checkpoint(&what, run, &e);
        if (!saved) { training_mend_save(t, &what, &e); }
    }
    state->f32_weights = false;  // the next checkpoint decides anew, after a resume as well
    if (e.msg[0]) { fail(&t->error, "%s", e.msg); }
    t->saved = t->reported;
    t->saved_timed = state->timed;
    t->saved_at = now_seconds();
    t->write_seconds = t->saved_at - start;
    const bool last = t->reported >= run->plan.stop || training_stops(t);
    if (!last) { print_names(stdout, "saved   %s\n", run->newest); }  // the last is in the summary
    if (!state->not_finite) { snprintf(t->healthy, sizeof t->healthy, "%s", run->newest); }
}

// ---------------------------------------------------------------------------------------------------------------------
// the end

/* Ends the program after an error that has another cause than the model. The hint names what is saved. */
static inline void training_die_of_error(const Training* t) {
    const int length = (int)strcspn(t->error.msg, "\n");  // one hint is enough
    if (t->saved < 0) { die("%.*s\n  hint: no step was done, so nothing is saved", length, t->error.msg); }
    die("%.*s\n  hint: step %lld is saved in %s: mend the cause and go on with --resume", length, t->error.msg,
        (long long)t->saved, t->run->newest);
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

/* Prints the summary of a run, and the checkpoint with the lowest validation loss. */
static inline void training_print_end(const Training* t) {
    const Options* o = t->options;
    const Data* d = t->data;
    const Tokenizer* tokenizer = data_tokenizer(d);
    char words[256];
    const bool chats = d->train.masked && tokenizer && chat_template_fits(tokenizer);
    first_words(d->mix.sources[0].data, tokenizer, words, sizeof words);
    const char* prompt = *o->prompt ? o->prompt : chats ? NULL : words;
    print_summary(stdout, &t->lines, t->process->argv[0], t->run->newest, prompt, t->trainer->memory_used(t->model));
    double loss = 0;
    const uint64_t best = checkpoint_best(o->out, t->run->state.step, &loss);
    if (best > 0) { print_names(stdout, "best    %s/step_%08llu, validation %.4f\n", o->out, (unsigned long long)best, loss); }
}

/* Returns the exit status of the program. */
static inline int training_close(Training* t) {
    const Plan* plan = &t->run->plan;
    const TrainerState* state = &t->run->state;
    // --steps 0 exports a new model; a run resumed at its last step keeps a timed checkpoint
    if ((t->saved < 0 || t->saved_timed) && !training_breaks_off(t)) { training_checkpoint(t, false); }
    const bool stopped = t->reported < plan->stop, patient = !t->out_of_patience;
    const char* reason = t->error.msg[0]            ? "error"
                         : t->not_finite > 0        ? "not finite"
                         : stopped && !patient      ? "patience"
                         : stopped                  ? "signal"
                         : plan->stop < plan->steps ? "stop-after"
                                                    : "done";
    char name[TENSOR_TEXT];
    if (t->not_finite > 0) { training_name_not_finite(t, name); }  // all ranks call it, while they are together
    log_end(&t->run->log, (int64_t)state->step, reason, now_seconds() - t->process->started, &t->error);
    together_close(t->process->team, t->error.msg[0] || t->not_finite > 0);
    if (t->error.msg[0]) { training_die_of_error(t); }
    if (t->not_finite > 0) { training_die_not_finite(t, name); }
    if (stopped && !patient) {
        printf("ended   %d validations in a row were above %.4f of step %llu\n", t->options->patience, state->val.best,
               (unsigned long long)state->val.best_step);
    }
    training_print_end(t);
    generator_free(&t->generator);
    sampler_free(&t->sampler);
    slowest_free(&t->slowest);
    row_parts_free(&t->parts);
    t->trainer->destroy(t->model);
    return stopped && patient ? t->options->signal_status : 0;
}

#endif
