/* training.h -- the functions that the training loop (train.h) calls:
 *
 *   training_stops:    says whether the run ends before its last step
 *   training_due:      says which work is due once the queued steps are done
 *   training_report:   writes the line of a step to the screen and the log
 *   training_validate, training_answer (to --tasks), training_sample, training_checkpoint
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
#include "llmc/dist/team.h"          // defines: team_at
#include "llmc/run/loop/generate.h"  // defines: Generator, generate, generator_free
#include "llmc/run/loop/sampler.h"
#include "llmc/run/loop/validate.h"  // defines: ValidationLoss, validate, answer_tasks, RowParts
#include "llmc/train/mfu.h"
#include "llmc/run/session/plan.h"
#include "llmc/run/screen/screen.h"
#include "llmc/run/session/resume.h"
#include "llmc/run/session/save.h"
#include "llmc/run/session/signals.h"
#include "llmc/run/loop/slowest.h"
#include "llmc/run/loop/timing.h"  // defines: Pace, pace_end
#include "llmc/run/session/together.h"
#include "llmc/run/session/trainer.h"
#include "llmc/text/chat.h"  // defines: chat_template

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
    uint64_t tokens;            // trained on until the step reported last, with padding
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
// a step

/* Returns whether --patience validations in a row were above the lowest loss. */
static inline bool training_patience_is_over(const Training* t) {
    const int patience = t->options->patience;
    return patience > 0 && t->run->state.val.since_best >= (uint64_t)patience;
}

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
    const char* host = team->members[r.rank].host;
    print_slowest(stdout, t->reported, r.rank, host, r.ms, r.others_ms);
    training_logged(t, log_slowest(&t->run->log, t->reported, r.rank, host, r.ms, r.others_ms, &t->error));
}

/* Ends the run after `steps` steps, since --minutes does not suffice for more. */
static inline void training_shorten(Training* t, int64_t steps) {
    Schedule* schedule = &t->run->state.schedule;
    const double ms = 1e3 * t->pace.pace;
    char now[32], before[32];
    printf("plan    %s steps instead of %s: a step takes %.1f ms now, at step %lld",
           text_count((uint64_t)steps, now, sizeof now), text_count((uint64_t)schedule->steps, before, sizeof before), ms,
           (long long)t->queued);
    schedule_shorten(schedule, t->queued, steps);
    printf("; the rate goes from %.3g to %.3g by then\n", learning_rate(schedule, t->queued), learning_rate(schedule, steps));
    fflush(stdout);
    t->lines.steps = steps;
    training_logged(t, log_plan(&t->run->log, t->queued, steps, ms, &t->error));
}

/* Learns what the ranks ask for, and whether one has an error. */
static inline Wishes training_wishes(Training* t) {
    Team* team = t->process->team;
    const int64_t steps = pace_end(&t->pace, now_seconds(), t->queued, t->run->state.schedule.steps);
    const Wishes mine = {run_signal_came(),    run_save_requested(), training_time_is_up(t),
                         t->error.msg[0] != 0, (float)t->busy_ms,    steps};
    float* busy_ms = team ? (float*)xcalloc((size_t)team->run.ranks, sizeof *busy_ms) : NULL;
    team_at(t->process->team, PHASE_STEP, t->queued);
    const Wishes all = together_wish(team, mine, busy_ms);
    t->busy_ms = 0;
    run_all_stop = all.end;
    t->failed = all.failed && !agree_ok(team, !mine.failed, &t->error);  // which shares the error with the others
    training_find_slowest(t, busy_ms);
    if (all.steps > t->queued && all.steps < t->run->state.schedule.steps) { training_shorten(t, all.steps); }
    free(busy_ms);
    return all;
}

static inline Due training_due(Training* t) {
    const Options* o = t->options;
    const int64_t step = t->queued;
    const Wishes wishes = training_wishes(t);
    const int64_t stop = run_stop(t->run, o);
    const bool stops = training_stops(t), unsaved = step != t->saved;
    const bool unkept = unsaved || t->saved_timed;  // a timed checkpoint is written again if a lasting one is due at this step
    const bool nothing_done = stops && t->error.msg[0] && step == 0;  // the first batch of all could not be read
    Due d;
    d.validation = t->data->has_val && !stops && is_due(o->val_every, step, stop);
    d.tasks = t->data->has_tasks && !stops && is_due(o->eval_every, step, stop);
    d.sample = t->generator.context > 0 && !stops && is_due(o->sample_every, step, stop);
    d.checkpoint = unkept && !nothing_done && (stops || wishes.save || is_due(o->checkpoint_every, step, stop));
    d.timed = unsaved && !d.checkpoint && wishes.timed;
    d.end = stops || step >= stop;
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
    const uint64_t T = (uint64_t)t->options->seq;
    t->reported++;
    t->lines.padding = mix_padding(&t->data->mix, t->tokens / T, t->recipe.tokens / T);
    t->run->state.padding += t->lines.padding;
    t->tokens += t->recipe.tokens;
    t->not_finite = not_finite ? t->not_finite + 1 : 0;
    t->loss_scale = r->loss_scale;
    if (t->trainer->busy_ms) { t->busy_ms = t->trainer->busy_ms(t->model); }
    t->run->state.not_finite = not_finite;
    step_line(stdout, &t->lines, t->reported, run_stop(t->run, t->options), r, t->trainer->memory_used(t->model), skipped);
    training_logged(t, log_step(&t->run->log, &t->lines, r, now_seconds() - t->process->started,
                                t->tokens - t->run->state.padding, t->data->train.indexed, skipped, &t->error));
    if (t->options->debug && r->verdict == UPDATE_NOT_FINITE) {
        training_name_not_finite(t, name);
        printf("debug   not finite: %s\n", name);
    }
}

/* Takes the loss of a validation. A validation that happens only because --stop-after ends the run counts for its checkpoint,
 * but not for the run, which later continues as if it never stopped. Returns whether the loss is the lowest so far. */
static inline bool training_take_validation(Training* t, double loss) {
    Validations* v = &t->run->state.val;
    if (!is_due(t->options->val_every, t->reported, t->run->state.schedule.steps)) {
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
    team_at(t->process->team, PHASE_VALIDATION, t->reported);
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
    team_at(t->process->team, PHASE_VALIDATION, t->reported);
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

static inline void training_sample(Training* t) {
    Generator* g = &t->generator;
    Error e = NO_ERROR;
    if (training_breaks_off(t)) { return; }
    team_at(t->process->team, PHASE_SAMPLING, t->reported);
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
    const int64_t step = t->reported, last = t->run->state.schedule.steps;
    const bool tasks = t->data->has_tasks && is_due(o->eval_every, step, last);
    const bool sample = t->generator.context > 0 && is_due(o->sample_every, step, last);
    return (tasks && t->answered != step ? OWED_TASKS : 0) | (sample && t->sampled != step ? OWED_SAMPLE : 0);
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

/* Fills `slots` with the optimizer state, and with the master weights if `with_master`. Returns their number. */
static inline int state_slots(const Trainer* trainer, void* model, bool with_master, StateSlot slots[NUM_SLOTS]) {
    int count = 0;
    slots[count++] = trainer->slot(model, SLOT_M);
    slots[count++] = trainer->slot(model, SLOT_V);
    if (with_master) { slots[count++] = trainer->slot(model, SLOT_MASTER); }
    return count;
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
    s.rules = &t->data->rules;
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
    team_at(t->process->team, PHASE_WRITING, t->reported);
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
    const bool last = t->reported >= run_stop(run, t->options) || training_stops(t);
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

/* Prints the summary of a run, what its rate has left to do, and the checkpoint with the lowest validation loss. */
static inline void training_print_end(const Training* t) {
    const Options* o = t->options;
    const Data* d = t->data;
    const Tokenizer* tokenizer = data_tokenizer(d);
    char words[256];
    const bool chats = d->train.masked && chat_template(&d->rules);
    first_words(d->mix.sources[0].data, tokenizer, words, sizeof words);
    const Schedule* s = &t->run->state.schedule;
    const double rate = learning_rate(s, t->reported), last = learning_rate(s, s->steps);
    if (t->reported < s->steps && last < rate) {
        printf("ended   at step %lld of %lld: the rate is %.3g here, and falls to %.3g in the steps that are left\n",
               (long long)t->reported, (long long)s->steps, rate, last);
    }
    const char* prompt = *o->prompt ? o->prompt : chats ? NULL : words;
    print_summary(stdout, &t->lines, t->process->argv[0], t->run->newest, prompt, t->trainer->memory_used(t->model));
    double loss = 0;
    const uint64_t best = checkpoint_best(o->out, t->run->state.step, &loss);
    if (best > 0) { print_names(stdout, "best    %s/step_%08llu, validation %.4f\n", o->out, (unsigned long long)best, loss); }
}

/* Returns the exit status of the program. */
static inline int training_close(Training* t) {
    const TrainerState* state = &t->run->state;
    const int64_t stop = run_stop(t->run, t->options);
    // --steps 0 exports a new model; a run resumed at its last step keeps a timed checkpoint
    if ((t->saved < 0 || t->saved_timed) && !training_breaks_off(t)) { training_checkpoint(t, false); }
    const bool stopped = t->reported < stop, patient = !t->out_of_patience;
    const char* reason = t->error.msg[0]                ? "error"
                         : t->not_finite > 0            ? "not finite"
                         : stopped && !patient          ? "patience"
                         : stopped                      ? "signal"
                         : stop < state->schedule.steps ? "stop-after"
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
