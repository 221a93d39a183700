/* resume.h -- resuming: finds the checkpoint that a run resumes and decides which run this is; reports changes since;
 * locks --out, moves aside checkpoints after the step, and opens the log.
 *
 * checkpoint.h says which checkpoint is the newest, trainer_state.h what a run's id is.
 */
#ifndef LLMC_RESUME_H
#define LLMC_RESUME_H

#include "llmc/base/utils.h"

#include "llmc/files/checkpoint.h"     // defines: checkpoint_open, checkpoint_find, checkpoint_check_log, checkpoint_set_aside
#include "llmc/files/logger.h"         // defines: logger_open, logger_open_before, log_config, log_resume
#include "llmc/run/session/choose.h"   // defines: choose_saved, saved_options
#include "llmc/run/session/session.h"  // defines: Process, Start, ModelSpec, Data, Run, process_writes, run_must_read

// ---------------------------------------------------------------------------------------------------------------------
// the checkpoint

/* Locks --out and removes what dead runs left half-made in it. */
static inline void run_lock_out(Run* run, const char* out, FILE* screen) {
    Error e = NO_ERROR;
    must(out_lock(&run->lock, out, &e) && checkpoint_remove_stale(out, screen, &e), &e);
}

/* Returns whether the run resumes from a checkpoint in --out. */
static inline bool resumes_in_place(const Start* start, const char* out) {
    char parent[PATH_CAP];
    Error e = NO_ERROR;
    return start->resumed && checkpoint_parent(start->dir, parent, &e) && same_file(parent, out);
}

/* Returns whether the run branches off from the run of its checkpoint, of step `step`: it uses another folder, or a step before
 * the newest. */
static inline bool resume_branches(const Start* start, const Options* o, uint64_t step) {
    uint64_t* steps = NULL;
    size_t count = 0;
    Error e = NO_ERROR;
    if (!resumes_in_place(start, o->out)) { return true; }
    must(checkpoint_list(o->out, &steps, &count, &e), &e);
    const bool named = strcmp(o->resume, start->dir) == 0, later = count > 0 && steps[0] > step;
    free(steps);
    return named && later;
}

/* Decides which run this is, and compares the weights with the log that lies beside the checkpoint. */
static inline void resume_identify(TrainerState* state, const Start* start, const Options* o) {
    LogHistory log;
    Error e = NO_ERROR;
    must(checkpoint_check_log(start->dir, state, &log, &e), &e);
    if (resume_branches(start, o, state->step)) {
        trainer_state_branch(state);
    } else if (log.parent_run[0] && state->step <= log.parent_step) {  // set back, and ended before its first checkpoint
        memcpy(state->run, log.run, sizeof log.run);
        memcpy(state->parent_run, log.parent_run, sizeof log.parent_run);
        state->parent_step = log.parent_step;
    }
}

/* Opens the checkpoint that rank 0 has found: all ranks must take the same one, and one of them has read all of it. This
 * rank checks again the weights that it loads, because they come to it another way. */
static inline bool resume_follow(Start* start, TrainerState* state, const Options* o, const FoundCheckpoint* found, Error* e) {
    char inside[PATH_CAP];
    if (!found->resumed) { return true; }
    const char* from = *o->resume ? o->resume : o->out;
    if (!path_join(inside, from, "trainer_state.json", e)) { return false; }
    if (*o->resume && file_exists(inside)) {
        snprintf(start->dir, sizeof start->dir, "%s", from);
    } else if (!checkpoint_path(start->dir, from, found->step, "", e)) {
        return false;
    }
    if (!checkpoint_read(start->dir, CHECKPOINT_RANK, NULL, state, e)) { return false; }
    for (size_t i = 0; i < state->files.count; i++) {
        const FileSum* f = &state->files.items[i];
        file_sums_add(&start->sums, f->name, f->size, f->crc);
    }
    return true;
}

/* Finds the checkpoint to resume from and restores its options. If --out has none, the run starts at step 0, so that a script
 * can always pass --resume. Locks --out first, so that it misses nothing that another run still writes there. */
static inline void run_resume(Run* run, Start* start, Options* chosen, const Process* p, const FoundCheckpoint* found) {
    const Options* o = chosen;
    TrainerState* state = &run->state;
    const bool named = *o->resume;
    FILE* screen = process_screen(p);
    Error e = NO_ERROR;
    if (process_writes(p, o) && is_directory(o->out)) { run_lock_out(run, o->out, screen); }
    const bool ok = found->known ? resume_follow(start, state, o, found, &e)
                    : named      ? checkpoint_open(o->resume, CHECKPOINT_RUN, screen, start->dir, state, &e)
                                 : checkpoint_find(o->out, CHECKPOINT_RUN, screen, start->dir, state, &e);
    run_must_read(run, ok, named ? o->resume : o->out, &e);
    if (!start->dir[0] && !o->given[OPT_model] && !o->given[OPT_train]) {
        die("--resume: %s holds no checkpoint, and neither --model nor --train says what to train\n"
            "  hint: give the folder of the run with --out, or the flags of a new run",
            o->out);
    }
    if (!start->dir[0]) {
        print_names(stdout, "%s holds no checkpoint yet: starting at step 0\n", o->out);
        return;
    }
    start->resumed = true;
    resume_identify(state, start, o);
    snprintf(run->newest, sizeof run->newest, "%s", start->dir);
    start->saved_master = trainer_state_has_master(state);
    state->f32_weights = false;
    choose_saved(chosen, state, start->dir, process_share(p, o).groups);
}

/* Returns whether the run branches off to decay: it goes into another folder with --decay, and no flag says where it ends. */
static inline bool resume_decays(const Start* start, const Options* o) {
    return start->resumed && o->given[OPT_decay] && o->decay > 0 && !o->given[OPT_steps] && !resumes_in_place(start, o->out);
}

/* Settles the schedule. A resumed run takes its checkpoint's, unless --steps is given, the data decides the steps, or another
 * flag of the schedule differs: then it gets a new one of `steps` steps. A branch gets its decay. */
static inline void run_settle_schedule(Run* run, const Options* o, const Start* start, int64_t steps) {
    Schedule* schedule = &run->state.schedule;
    const int64_t now = (int64_t)run->state.step;
    Error e = NO_ERROR;
    if (!start->resumed) {
        must(plan_check_decay(o, steps, &e), &e);
        *schedule = plan_schedule(o, steps);
        return;
    }
    Options was = saved_options(&run->state, o->trainer);
    if (schedule->count == 0) { *schedule = plan_schedule(&was, was.steps < 0 ? steps : was.steps); }
    schedule->lr = was.lr;
    run->lr_before = learning_rate(schedule, now);
    const bool end = o->given[OPT_steps] || o->steps < 0, decays = o->decay != was.decay || o->decay_shape != was.decay_shape;
    if (resume_decays(start, o)) {
        if (o->schedule != was.schedule || o->warmup != was.warmup) {
            die("--%s: a branch has that of its trunk, wanted none beside --decay",
                o->schedule != was.schedule ? "schedule" : "warmup");
        }
        was.decay = o->decay;
        must(plan_check_decay(&was, now + o->decay, &e), &e);
        if (run->lr_before <= was.lr * o->final_lr_frac) {
            die("--decay: the rate at %s is %.3g already, wanted a checkpoint before the decay", start->dir, run->lr_before);
        }
        schedule_decay(schedule, now, o->decay, o->final_lr_frac, plan_decay_shape(o));
    } else if (o->decay != was.decay && !o->given[OPT_steps]) {
        die("--decay: is %d, was %d in %s\n"
            "  hint: with another --out the rate falls from there on; with --steps N, in the last of N steps",
            o->decay, was.decay, start->dir);
    } else if (end || decays || o->schedule != was.schedule || o->warmup != was.warmup ||
               o->final_lr_frac != was.final_lr_frac) {
        must(plan_check_decay(o, end ? steps : schedule->steps, &e), &e);
        *schedule = plan_schedule(o, end ? steps : schedule->steps);
    }
    schedule->lr = o->lr;
    options_free(&was);
}

// ---------------------------------------------------------------------------------------------------------------------
// what has changed since

/* Reports a difference from the checkpoint that the run resumes: a warning, or with `strict` an error. */
LLMC_PRINTF(2, 3) static void resume_differs(bool strict, const char* fmt, ...) {
    Error e = NO_ERROR;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(e.msg, sizeof e.msg, fmt, ap);
    va_end(ap);
    if (strict) { die("%s\n  hint: without --strict-resume this is a warning", e.msg); }
    warn("%s", e.msg);
}

/* Returns whether two values of --documents read all data of the run in the same way: `auto` may stand for the other value. */
static inline bool documents_read_alike(const Data* d, Documents a, Documents b) {
    for (int i = 0; i < d->mix.count; i++) {
        const bool masked = d->mix.sources[i].data->masked;
        if (documents_of(a, masked) != documents_of(b, masked)) { return false; }
    }
    return !d->has_val || documents_of(a, d->val.masked) == documents_of(b, d->val.masked);
}

/* Returns whether the learning rate of a step depends on the flag i. */
static inline bool option_sets_rate(int i) {
    return i == OPT_steps || i == OPT_lr || i == OPT_warmup || i == OPT_schedule || i == OPT_decay || i == OPT_decay_shape ||
           i == OPT_final_lr_frac;
}

/* Returns whether the flag i says where a card keeps or recomputes what it needs: it fits a machine, and changes no bit. */
static inline bool option_places(int i) { return i == OPT_recompute || i == OPT_offload; }

/* Reports every saved flag on the command line that had another value; together those that give the first step another rate.
 * Files are compared by their fingerprints, a resumed run has the model of its checkpoint, and a branch says its decay. */
static inline void resume_compare_options(const Run* run, const Options* o, const Data* d, const Start* start) {
    const TrainerState* saved = &run->state;
    const double lr = learning_rate(&saved->schedule, (int64_t)saved->step);
    const char* dir = start->dir;
    const bool branch = resume_decays(start, o);
    char reasons[7 * 3 * OPTION_TEXT] = "";
    size_t used = 0;
    Options was = saved_options(saved, o->trainer);
    for (int i = 0; i < NUM_OPTIONS; i++) {
        char flag[OPTION_TEXT], now[OPTION_TEXT], before[OPTION_TEXT];
        const char *a = option_text(o, i, now), *b = option_text(&was, i, before);
        const bool compared = option_specs[i].life == OPTION_SAVED && i != OPT_model && i != OPT_train && i != OPT_tokenizer;
        if (!compared || !o->given[i] || strcmp(a, b) == 0 || (branch && option_sets_rate(i) && i != OPT_lr)) { continue; }
        if (option_places(i)) { continue; }
        if (i == OPT_documents && documents_read_alike(d, (Documents)o->documents, (Documents)was.documents)) { continue; }
        option_flag(i, flag);
        if (lr != run->lr_before && option_sets_rate(i)) {
            used +=
                (size_t)snprintf(reasons + used, sizeof reasons - used, "%s %s: is %s, was %s", used ? ";" : ":", flag, a, b);
        } else {
            resume_differs(o->strict_resume, "%s: is %s, was %s in %s", flag, a, b, dir);
        }
    }
    if (lr != run->lr_before) {
        resume_differs(o->strict_resume, "the rate goes from %.2e to %.2e at step %llu%s in %s", run->lr_before, lr,
                       (unsigned long long)saved->step, reasons, dir);
    }
    options_free(&was);
}

/* Reports changes of everything else that the bits of the results depend on. It does not compare a value that the
 * checkpoint, or a dry run without a GPU, does not know. Then the state holds the values of this run. */
static inline void run_compare(Run* run, const Start* start, const Data* d, const Options* o, const Process* p) {
    TrainerState* was = &run->state;
    const bool strict = o->strict_resume;
    const char* dir = start->dir;
    uint64_t data = 0;
    Error e = NO_ERROR;
    if (p->rank != 0) { return; }
    const uint64_t tokenizer = data_tokenizer_print(d), order = mix_leaves_out(&d->mix) ? ROW_ORDER_LEFT : ROW_ORDER;
    must(mix_fingerprint(&d->mix, &data, &e), &e);
    if (start->resumed) {
        resume_compare_options(run, o, d, start);
        if (was->data && was->data != data) {
            resume_differs(strict, "--train: %s has the fingerprint %016" PRIx64 ", the data of %s had %016" PRIx64, o->train,
                           data, dir, was->data);
        }
        if (was->fingerprint && was->fingerprint != tokenizer) {
            resume_differs(strict, "--tokenizer: has the fingerprint %016" PRIx64 ", that of %s had %016" PRIx64, tokenizer,
                           dir, was->fingerprint);
        }
        if (was->build[0] && p->build[0] && strcmp(was->build, p->build) != 0) {
            resume_differs(strict, "this build is (%s), that of %s was (%s): it may round elsewhere", p->build, dir,
                           was->build);
        }
        if (was->row_order != order) {
            resume_differs(
                strict, "the order of rows is %d%s, in %s it was %d: rows of this epoch may come twice or not at all",
                (int)order, order == ROW_ORDER_LEFT ? " (answers do not fit in a row)" : "", dir, (int)was->row_order);
        }
    }
    was->data = data;
    was->fingerprint = tokenizer;
    was->row_order = order;
    memcpy(was->build, p->build, sizeof was->build);
}

// ---------------------------------------------------------------------------------------------------------------------
// the run begins

/* Refuses an --out with the checkpoints of another run. */
static inline void out_check(const char* out, const Start* start) {
    Error e = NO_ERROR;
    char folder[PATH_CAP], parent[PATH_CAP];
    snprintf(folder, sizeof folder, "%s", out);
    for (; access(folder, F_OK) != 0 && strcmp(folder, ".") != 0; strcpy(folder, parent)) { folder_of(folder, parent); }
    if (access(folder, W_OK) != 0) {
        die("--out: %s: no file can be made in %s: %s\n  hint: --out DIR names another folder", out, folder, strerror(errno));
    }
    uint64_t* steps = NULL;
    size_t count = 0;
    must(checkpoint_list(out, &steps, &count, &e), &e);
    if (count > 0 && !resumes_in_place(start, out)) {
        die("--out: %s holds the checkpoints of another run, up to step %llu\n"
            "  hint: continue that run with --resume (without PATH), or give another --out",
            out, (unsigned long long)steps[0]);
    }
    free(steps);
}

/* Locks --out, unless it is locked already, before anything is written there, and checks it again. */
static inline void out_take(Run* run, const char* out, const Start* start, const Process* p) {
    if (p->rank != 0) { return; }
    if (run->lock < 0) { run_lock_out(run, out, process_screen(p)); }
    out_check(out, start);
}

/* Moves aside everything after the step that the run resumes: checkpoints of a run that was set back, or damaged ones. */
static inline void out_set_aside(const char* out, uint64_t step) {
    size_t count = 0;
    Error e = NO_ERROR;
    must(checkpoint_set_aside(out, step, &count, &e), &e);
    if (count == 0) { return; }
    print_names(stdout, "aside   %zu checkpoint%s after step %llu in %s %s now step_N.set_back\n", count, count == 1 ? "" : "s",
                (unsigned long long)step, out, count == 1 ? "is" : "are");
}

/* Opens the log of a resumed run. The run makes what its checkpoint owes; lines about it are from a run that was killed before
 * it saved the checkpoint again. */
static inline bool log_open_resumed(Logger* log, const TrainerState* state, const char* out, Error* e) {
    const char* again[4] = {NULL};
    int count = 0;
    if (state->val.step != state->step) { again[count++] = "val"; }
    if (state->owed & OWED_TASKS) { again[count++] = "task"; }
    if (state->owed & OWED_SAMPLE) { again[count++] = "sample"; }
    return logger_open_before(log, out, (int64_t)state->step, again, e);
}

/* Opens the log in --out, which must be locked, and writes the configuration or the resumption. From then on this is the run
 * that wrote last. `tokens`: of the data */
static inline void run_begin(Run* run, const Start* start, const ModelSpec* m, const Options* o, const Process* p,
                             const char* precision, uint64_t tokens) {
    Error e = NO_ERROR;
    if (p->rank != 0) { return; }
    char* options = options_log_text(o, LOG_TEXT_MAX);
    const LoggedRun logged = {trainer_name(o->trainer), precision, p->machine, options, p->argc, p->argv};
    if (start->resumed) {
        must(log_open_resumed(&run->log, &run->state, o->out, &e), &e);
        must(log_resume(&run->log, &run->state, start->dir, &logged, &e), &e);
        out_set_aside(o->out, run->state.step);
        // a run that died while it removed old checkpoints
        if (!run->state.not_finite) { checkpoint_prune(o->out, o->keep, (uint64_t)o->major_every, run->state.step); }
    } else {
        must(logger_open(&run->log, o->out, -1, &e), &e);
        must(log_config(&run->log, &run->state, &logged, &m->config, &m->table, tokens, &e), &e);
    }
    free(options);
}

#endif
