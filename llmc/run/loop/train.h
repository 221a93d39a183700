/* train.h -- training, of both trainers: opens a run, from its first line on the screen to its first step, and holds the loop.
 * training.h has the functions that the loop calls. --dry-run and --profile end before the loop.
 */
#ifndef LLMC_TRAIN_H
#define LLMC_TRAIN_H

#include "llmc/base/utils.h"
#include "llmc/optim/schedule.h"          // defines: learning_rate
#include "llmc/dist/team.h"               // defines: team_at
#include "llmc/run/loop/timing.h"         // defines: Pace, StepTime, steps_for_minutes, time_steps
#include "llmc/run/loop/training.h"       // defines: Training, Due, training_due, training_report, training_close
#include "llmc/run/session/open_model.h"  // defines: model_use, model_create, memory_text, load_states, check_weights
#include "llmc/run/session/memory.h"      // defines: MemoryRoom, memory_room, memory_check
#include "llmc/run/session/choose.h"      // defines: choose_batch, choose_rate, choose_offload, choose_recompute, choose_dtype
#include "llmc/run/session/resume.h"      // defines: run_compare, run_begin, out_take
#include "llmc/run/session/session.h"     // defines: Program
#include "llmc/run/session/together.h"    // defines: together_compare_weights, together_share_out

static inline Recipe training_recipe(bool scales_loss, const Options* o, Mix* data, Run* run, Team* team) {
    Recipe p;
    memset(&p, 0, sizeof p);
    p.data = batches_of_mix(data);
    p.hyper.beta1 = o->beta1;
    p.hyper.beta2 = o->beta2;
    p.hyper.eps = o->eps;
    p.hyper.weight_decay = o->weight_decay;
    p.hyper.muon_momentum = o->muon_momentum;
    p.hyper.muon_lr_scale = o->muon_lr_scale;
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

/* Prints options, machine, model and data before anything is allocated. */
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
    if (m->config.optimizer && m->config.lora.rank == 0) { print_optimizer(stdout, &m->trained); }
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
    const int64_t steps = t->run->state.schedule.steps;
    const uint64_t rows = (uint64_t)(plan->tokens_per_step / o->seq);
    uint64_t counts[MIX_MOST];
    char tokens[32];
    dial_print(stdout, &t->run->dial, o, steps, plan->tokens_per_step);
    print_plan(stdout, plan, o, steps, process_share(t->process, o).groups, &t->data->train);
    for (int i = 0; i < m->count; i++) { print_rows(stdout, m->sources[i].pattern, m->sources[i].data); }
    if (t->data->has_val) { print_rows(stdout, o->val, &t->data->val); }
    if (m->count <= 1) { return; }
    const bool known = o->minutes == 0 || o->steps >= 0;
    mix_count(m, known ? (uint64_t)steps * rows : 0, counts);
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
    const uint64_t step = t->run->state.step;
    const Options* o = t->options;
    const int64_t steps = t->run->state.schedule.steps, stop = run_stop(t->run, o);
    if (resume_decays(t->start, o)) {
        char at[32], count[32];
        printf("branch  step %s: the rate falls from %.3g to %.3g in %s step%s\n", text_count(step, at, sizeof at),
               learning_rate(&t->run->state.schedule, (int64_t)step), o->lr * o->final_lr_frac,
               text_count((uint64_t)o->decay, count, sizeof count), text_plural(o->decay));
    } else if (o->given[OPT_minutes]) {
        printf("resume  --minutes set the number of steps when the run began: it has %lld\n", (long long)steps);
    }
    if ((int64_t)step >= stop) {
        printf("resume  already at step %llu of %s %lld: nothing is left to train\n", (unsigned long long)step,
               stop < steps ? "--stop-after" : "--steps", (long long)stop);
    }
}

/* Creates the model, loads its weights and, to resume, its state. */
static inline void training_load(Training* t, const ModelUse* use) {
    const Trainer* trainer = t->trainer;
    Run* run = t->run;
    StateSlot slots[NUM_SLOTS];
    team_at(t->process->team, PHASE_LOADING, (int64_t)run->state.step);
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

/* Prints how long the run's `steps` take, or for --minutes how many fit. */
static inline void training_print_time(const Training* t, const StepTime* time, int64_t steps) {
    const Options* o = t->options;
    const bool least = !time->whole && !time->parts;
    const char* about = time->whole ? "" : least ? "more than " : "about ";
    char clock[32], count[32], parts[64] = "";
    if (time->parts) { snprintf(parts, sizeof parts, " (%d of its %d micro-batches)", time->parts, t->run->plan.accumulate); }
    const bool long_step = time->ms >= 1e4;
    printf("timed   %s%.1f %s a step%s: ", about, time->ms * (long_step ? 1e-3 : 1), long_step ? "s" : "ms", parts);
    text_count((uint64_t)steps, count, sizeof count);
    if (o->minutes > 0) {
        printf("%s%s steps fit into %g minutes\n", least ? "at most " : about, count, o->minutes);
    } else {
        printf("%s step%s %s%s, validations, samples and checkpoints apart\n", count, steps == 1 ? " takes" : "s take", about,
               text_clock(time->ms * 1e-3 * (double)steps, clock, sizeof clock));
    }
}

/* Turns --minutes into a number of steps: times a few steps, for at most `bound` seconds, then wipes their traces. */
static inline void training_measure(Training* t, Options* chosen, double bound) {
    Run* run = t->run;
    DataLoader* train = &t->data->train;
    const TrainerState before = run->state;  // state of a new run, which owns no memory
    const uint64_t row = train->row;
    Error e = NO_ERROR;
    StepTime time;
    must(time_steps(t->trainer, t->model, &t->recipe, chosen->batch, bound, stdout, &time, &e), &e);
    run->state = before;
    t->trainer->forget(t->model, &t->recipe);
    dataloader_seek(train, row);
    const double elapsed = now_seconds() - t->process->started;
    choose_minutes(chosen, steps_for_minutes(chosen->minutes, elapsed, time.ms * 1e-3), t->process->team);
    choose_rate(chosen, &run->dial, chosen->steps, run->plan.tokens_per_step);
    run->state.schedule = plan_schedule(chosen, chosen->steps);
    if (!plan_check_decay(chosen, chosen->steps, &e)) { warn("%s: it begins after the warm-up", e.msg); }
    training_print_time(t, &time, chosen->steps);
    training_print_plan(t);
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

/* Reads every file of the run. Then estimates its duration by a few steps of a model of its size, within a minute. Without a
 * device it only reads. */
static inline void training_dry_run(Training* t, Options* chosen, const ModelUse* use) {
    enum { MOST_SECONDS = 60 };
    const Options* o = t->options;
    const bool has_train = t->data->has_train;
    const int64_t steps = run_stop(t->run, o) - (int64_t)t->run->state.step;  // before the timed ones count
    StepTime time;
    Error e = NO_ERROR;
    if (t->trainer->missing || t->process->ranks > 1 || !has_train) {
        const char* missing = t->trainer->missing ? t->trainer->missing : "";
        const char* why = !has_train ? "there is no data" : *missing ? "no GPU can be used here: " : "a dry run is one process";
        if (o->minutes > 0) { training_print_plan(t); }
        check_weights(t->start, t->spec, t->run, t->process);
        training_scan_data(t);
        printf("timed   nothing: %s%s\n", why, has_train ? missing : "");
        return;
    }
    t->model = model_create(t->trainer, use, o, t->start, t->spec, t->run, t->process);
    training_scan_data(t);
    if (o->profile == 0 && (steps > 0 || o->minutes > 0)) {
        training_prepare(t);
        if (o->minutes > 0) {
            training_measure(t, chosen, MOST_SECONDS);
        } else {
            must(time_steps(t->trainer, t->model, &t->recipe, o->batch, MOST_SECONDS, stdout, &time, &e), &e);
            training_print_time(t, &time, steps);
        }
    }
    t->trainer->destroy(t->model);
}

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
    const int ranks = t->process->ranks;
    sampler_init(&t->sampler, c->vocab_size, o->temperature, o->top_k, o->top_p, (uint64_t)o->seed);
    generator_init(&t->generator, t->trainer->next_logits, t->model, &t->data->rules, &t->sampler, context, stdout);
    t->generator.ellipsis = true;
    step_lines_init(&t->lines, t->run->state.schedule.steps, t->run->plan.tokens_per_step, (int64_t)t->run->state.step,
                    flops_per_token(c, &t->spec->table, o->seq), t->trainer->peak_flops * ranks);
    t->lines.ranks = ranks;
    t->lines.run_padding = t->lines.first_padding = t->run->state.padding;
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

/* Prints and checks what the run would do: plan, changes since the checkpoint, memory. */
static inline void training_check(Training* t, Options* chosen, const ModelUse* use) {
    const MemoryRoom room = memory_room(t->trainer, &t->spec->config, use, chosen);
    Error e = NO_ERROR;
    char what[3 * PATH_CAP];
    training_print_start(t);
    choose_dtype(chosen, t->trainer->dtype, t->spec->config.lora.rank > 0);
    run_compare(t->run, t->start, t->data, chosen, t->process);
    choose_offload(chosen, &room, t->process->team);
    choose_recompute(chosen, &room, t->process->team);
    memory_text(t->trainer->memory, t->start, chosen, t->data, what);
    must(memory_check(&room, chosen, what, stdout, &e), &e);
    if (chosen->minutes == 0) { training_print_plan(t); }  // otherwise it waits for the steps that fit
    if (t->start->resumed) { training_print_resumed(t); }
}

/* Settles the micro-batch, now that the memory is known, and the plan with it. */
static inline void training_fit_batch(Training* t, Options* chosen) {
    const ModelUse use = model_use(t->process, chosen, &t->spec->config, t->data);
    const MemoryRoom room = memory_room(t->trainer, &t->spec->config, &use, chosen);
    const int before = chosen->batch;
    Error e = NO_ERROR;
    choose_batch(chosen, &t->run->dial, &room, t->process->team);
    if (chosen->batch == before) { return; }
    must(plan_make(&t->run->plan, chosen, process_share(t->process, chosen).groups, &e), &e);
    if (t->data->has_train) { mix_set_batch(&t->data->mix, chosen->batch); }
}

/* Does everything before the first step; the last of it are the last choices. Returns false for --dry-run and --profile, which
 * do not train. */
static inline bool training_open(Training* t, const Trainer* trainer, Program* p) {
    const Options* o = &p->chosen;
    const bool timed = o->minutes > 0;  // a resumed run keeps the steps that it found
    memset(t, 0, sizeof *t);
    t->trainer = trainer;
    t->options = o;
    t->process = &p->process;
    t->start = &p->start;
    t->spec = &p->spec;
    t->data = &p->data;
    t->run = &p->run;
    run_catch_save_signals();
    training_fit_batch(t, &p->chosen);
    const ModelUse use = model_use(&p->process, o, &p->spec.config, &p->data);
    training_check(t, &p->chosen, &use);
    if (p->process.job == JOB_DRY_RUN) {
        training_dry_run(t, &p->chosen, &use);
        return false;
    }
    fflush(stdout);
    training_load(t, &use);
    if (o->profile == 0) {
        out_take(&p->run, o->out, &p->start, &p->process);  // a run that is refused before this point leaves no trace
        together_share_out(p->process.team, o->out);
    }
    team_at(p->process.team, PHASE_PREPARING, (int64_t)p->run.state.step);
    training_prepare(t);
    if (timed) { training_measure(t, &p->chosen, INFINITY); }
    if (o->profile > 0) {
        trainer->profile(t->model, &t->recipe, o->profile);
        trainer->destroy(t->model);
        return false;
    }
    run_begin(&p->run, &p->start, &p->spec, o, &p->process, trainer->precision, p->data.train.num_tokens);
    run_catch_signals();
    training_open_output(t, use.cache_len);
    training_set_back(t);
    if (timed && p->process.rank == 0) {
        const Pace pace = {6 * o->minutes, p->process.started + 60 * o->minutes, now_seconds(), t->queued, 0, 0};
        t->pace = pace;
    }
    if (p->start.resumed) { training_catch_up(t); }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// the loop

/* Returns the exit status of the program. */
static inline int train(const Trainer* trainer, Program* p) {
    Training t;
    if (!training_open(&t, trainer, p)) { return 0; }
    for (Due due = training_due(&t); !due.end;) {
        if (!training_stops(&t)) {
            t.queued += trainer->step(t.model, &t.recipe, learning_rate(&t.run->state.schedule, t.queued), &t.error);
        }
        due = training_due(&t);
        // steps may stay in flight until something is due
        while (t.reported < t.queued - (due.drain ? 0 : trainer->in_flight - 1)) {
            const Metrics r = trainer->result(t.model, &t.recipe);
            training_report(&t, &r);
        }
        if (due.validation) { training_validate(&t, &due); }
        if (due.tasks) { training_answer(&t); }
        if (due.sample) { training_sample(&t); }
        if (due.checkpoint || due.timed) { training_checkpoint(&t, due.timed); }
    }
    return training_close(&t);
}

#endif
