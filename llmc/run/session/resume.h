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
#include "llmc/run/session/session.h"  // defines: Session, session_writes, session_must_read, session_with_dtype

// ---------------------------------------------------------------------------------------------------------------------
// the checkpoint

/* Locks --out, and removes what dead runs left half-made in it. */
static inline void session_take_out(Session* s) {
    const char* out = s->chosen.out;
    Error e = NO_ERROR;
    must(out_lock(&s->run.lock, out, &e) && checkpoint_remove_stale(out, session_screen(s), &e), &e);
}

/* Returns whether the run resumes from a checkpoint in --out. */
static inline bool session_goes_on_in_out(const Session* s) {
    char parent[PATH_CAP];
    struct stat a, b;
    Error e = NO_ERROR;
    return s->start.resumed && checkpoint_parent(s->start.dir, parent, &e) && stat(parent, &a) == 0 &&
           stat(s->chosen.out, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

/* Returns whether the run branches off from the run of its checkpoint: it uses another folder, or a step before the newest. */
static inline bool session_branches(const Session* s) {
    uint64_t* steps = NULL;
    size_t count = 0;
    Error e = NO_ERROR;
    if (!session_goes_on_in_out(s)) { return true; }
    must(checkpoint_list(s->chosen.out, &steps, &count, &e), &e);
    const bool named = strcmp(s->chosen.resume, s->start.dir) == 0, later = count > 0 && steps[0] > s->run.state.step;
    free(steps);
    return named && later;
}

/* Decides which run this is, and compares the weights with the log that lies beside the checkpoint. */
static inline void session_identify(Session* s) {
    TrainerState* state = &s->run.state;
    LogHistory log;
    Error e = NO_ERROR;
    must(checkpoint_check_log(s->start.dir, state, &log, &e), &e);
    if (session_branches(s)) {
        trainer_state_branch(state);
    } else if (log.parent_run[0] && state->step <= log.parent_step) {  // set back, and ended before its first checkpoint
        memcpy(state->run, log.run, sizeof log.run);
        memcpy(state->parent_run, log.parent_run, sizeof log.parent_run);
        state->parent_step = log.parent_step;
    } else if (!state->run[0]) {  // a checkpoint of format 1
        run_id_draw(state->run);
    }
}

/* Keeps the tokens of a step as they were: another number of processes takes other micro-batches, not other steps. (A run with
 * --seq-parallel has them in its options, see session_check_share().) */
static inline void session_keep_step(Session* s) {
    Options was;
    Error e = NO_ERROR;
    if (s->run.state.world_size == session_share(s).groups || s->chosen.total_batch != 0) { return; }
    options_default(&was, s->chosen.trainer);
    must(options_merge(&was, &s->run.state.json, s->run.state.saved_options, &e), &e);
    s->chosen.total_batch = (int64_t)was.batch * was.seq * s->run.state.world_size;
    options_free(&was);
}

/* Opens the checkpoint that rank 0 has found: all ranks must take the same one, and one of them has read all of it. This
 * rank checks again the weights that it loads, because they come to it another way. */
static inline bool session_follow(Session* s, const FoundCheckpoint* found, Error* e) {
    const Options* o = &s->chosen;
    char inside[PATH_CAP], tmp[PATH_CAP];
    if (!found->resumed) { return true; }
    const char* from = *o->resume ? o->resume : o->out;
    if (!path_join(inside, from, "trainer_state.json", e)) { return false; }
    if (*o->resume && file_exists(inside)) {
        snprintf(s->start.dir, sizeof s->start.dir, "%s", from);
    } else if (!checkpoint_paths(from, found->step, s->start.dir, tmp, e)) {
        return false;
    }
    if (!checkpoint_read(s->start.dir, CHECKPOINT_RANK, NULL, &s->run.state, e)) { return false; }
    for (size_t i = 0; i < s->run.state.files.count; i++) {
        const FileSum* f = &s->run.state.files.items[i];
        file_sums_add(&s->start.sums, f->name, f->size, f->crc);
    }
    return true;
}

/* Finds the checkpoint to resume from and restores its options. If --out has none, the run starts at step 0, so that a script
 * can always pass --resume. Locks --out first, so that it misses nothing that another run still writes there. */
static inline void session_resume(Session* s, const FoundCheckpoint* found) {
    Options* o = &s->chosen;
    const bool named = *o->resume;
    FILE* screen = session_screen(s);
    Error e = NO_ERROR;
    if (session_writes(s) && is_directory(o->out)) { session_take_out(s); }
    const bool ok = found->known ? session_follow(s, found, &e)
                    : named      ? checkpoint_open(o->resume, CHECKPOINT_RUN, screen, s->start.dir, &s->run.state, &e)
                                 : checkpoint_find(o->out, CHECKPOINT_RUN, screen, s->start.dir, &s->run.state, &e);
    session_must_read(s, ok, named ? o->resume : o->out, &e);
    if (!s->start.dir[0] && !o->given[OPT_model] && !o->given[OPT_train]) {
        die("--resume: %s holds no checkpoint, and neither --model nor --train says what to train\n"
            "  hint: give the folder of the run with --out, or the flags of a new run",
            o->out);
    }
    if (!s->start.dir[0]) {
        print_names(stdout, "%s holds no checkpoint yet: starting at step 0\n", o->out);
        return;
    }
    s->start.resumed = true;
    session_identify(s);
    snprintf(s->run.newest, sizeof s->run.newest, "%s", s->start.dir);
    const Json* j = &s->run.state.json;
    const JsonNode* saved = s->run.state.saved_options;
    s->start.saved_master = trainer_state_has_master(&s->run.state);
    s->run.state.f32_weights = false;
    char* model = NULL;
    if (o->given[OPT_model] && json_bytes(j, saved, "model", &model, &e) && strcmp(o->model, model) != 0) {
        warn("--model: %s is not used, the run resumes with the model of %s", o->model, s->start.dir);
        o->given[OPT_model] = false;
    }
    free(model);
    must(options_merge(o, j, saved, &e), &e);
    session_keep_step(s);
}

// ---------------------------------------------------------------------------------------------------------------------
// what has changed since

/* Reports a difference from the checkpoint that the run resumes: a warning, or with --strict-resume an error. */
LLMC_PRINTF(2, 3) static void session_differs(const Session* s, const char* fmt, ...) {
    Error e = NO_ERROR;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(e.msg, sizeof e.msg, fmt, ap);
    va_end(ap);
    if (s->chosen.strict_resume) { die("%s\n  hint: without --strict-resume this is a warning", e.msg); }
    warn("%s", e.msg);
}

/* Returns whether two values of --documents read all data of the run in the same way: `auto` may stand for the other value. */
static inline bool session_reads_alike(const Session* s, Documents a, Documents b) {
    for (int i = 0; i < s->data.mix.count; i++) {
        const bool masked = s->data.mix.sources[i].data->masked;
        if (documents_of(a, masked) != documents_of(b, masked)) { return false; }
    }
    return !s->data.has_val || documents_of(a, s->data.val.masked) == documents_of(b, s->data.val.masked);
}

/* Reports every saved flag on the command line that had another value. Files are compared by their fingerprints, and a
 * resumed run has the model of its checkpoint. */
static inline void session_compare_options(const Session* s, SafeDtype own) {
    const Options now_all = session_with_dtype(s, session_export_dtype(s, own)), *o = &now_all;
    Options was;
    Error e = NO_ERROR;
    options_default(&was, o->trainer);
    must(options_merge(&was, &s->run.state.json, s->run.state.saved_options, &e), &e);
    for (int i = 0; i < NUM_OPTIONS; i++) {
        char flag[OPTION_TEXT], now[OPTION_TEXT], before[OPTION_TEXT];
        const char *a = option_text(o, i, now), *b = option_text(&was, i, before);
        const bool compared = option_specs[i].life == OPTION_SAVED && i != OPT_model && i != OPT_train && i != OPT_tokenizer;
        if (!compared || !o->given[i] || strcmp(a, b) == 0) { continue; }
        if (i == OPT_documents && session_reads_alike(s, (Documents)o->documents, (Documents)was.documents)) { continue; }
        session_differs(s, "%s: is %s, was %s in %s", option_flag(i, flag), a, b, s->start.dir);
    }
    options_free(&was);
}

/* Reports changes of everything else that the bits of the results depend on. It does not compare a value that the
 * checkpoint, or a dry run without a GPU, does not know. Then the state holds the values of this run. `own` is the dtype of
 * the build. */
static inline void session_compare(Session* s, SafeDtype own) {
    TrainerState* was = &s->run.state;
    uint64_t data = 0;
    Error e = NO_ERROR;
    if (s->process.rank != 0) { return; }
    const uint64_t tokenizer = s->data.has_tokenizer ? s->data.tokenizer.fingerprint : 0;
    must(mix_fingerprint(&s->data.mix, &data, &e), &e);
    if (s->start.resumed) {
        session_compare_options(s, own);
        if (was->data && was->data != data) {
            session_differs(s, "--train: %s has the fingerprint %016" PRIx64 ", the data of %s had %016" PRIx64,
                            s->chosen.train, data, s->start.dir, was->data);
        }
        if (was->fingerprint && was->fingerprint != tokenizer) {
            session_differs(s, "--tokenizer: has the fingerprint %016" PRIx64 ", that of %s had %016" PRIx64, tokenizer,
                            s->start.dir, was->fingerprint);
        }
        if (was->build[0] && s->process.build[0] && strcmp(was->build, s->process.build) != 0) {
            session_differs(s, "this build is (%s), that of %s was (%s): it may round elsewhere", s->process.build,
                            s->start.dir, was->build);
        }
        if (was->row_order != ROW_ORDER) {
            session_differs(s, "the order of rows is %d, in %s it was %d: rows of this epoch may come twice or not at all",
                            ROW_ORDER, s->start.dir, (int)was->row_order);
        }
    }
    was->data = data;
    was->fingerprint = tokenizer;
    was->row_order = ROW_ORDER;
    memcpy(was->build, s->process.build, sizeof was->build);
}

// ---------------------------------------------------------------------------------------------------------------------
// the run begins

/* Refuses an --out with the checkpoints of another run. */
static inline void session_check_out(const Session* s) {
    Error e = NO_ERROR;
    uint64_t* steps = NULL;
    size_t count = 0;
    const Options* o = &s->chosen;
    must(checkpoint_list(o->out, &steps, &count, &e), &e);
    if (count > 0 && !session_goes_on_in_out(s)) {
        die("--out: %s holds the checkpoints of another run, up to step %llu\n"
            "  hint: continue that run with --resume (without PATH), or give another --out",
            o->out, (unsigned long long)steps[0]);
    }
    free(steps);
}

/* Locks --out, unless it is locked already, before anything is written there, and checks it again. */
static inline void session_lock(Session* s) {
    if (s->process.rank != 0) { return; }
    if (s->run.lock < 0) { session_take_out(s); }
    session_check_out(s);
}

/* Moves aside everything after the step that the run resumes: checkpoints of a run that was set back, or damaged ones. */
static inline void session_set_aside(const Session* s) {
    size_t count = 0;
    Error e = NO_ERROR;
    must(checkpoint_set_aside(s->chosen.out, s->run.state.step, &count, &e), &e);
    if (count == 0) { return; }
    print_names(stdout, "aside   %zu checkpoint%s after step %llu in %s %s now step_N.set_back\n", count, count == 1 ? "" : "s",
                (unsigned long long)s->run.state.step, s->chosen.out, count == 1 ? "is" : "are");
}

/* Opens the log of a resumed run. The run makes what its checkpoint owes; lines about it are from a run that was killed before
 * it saved the checkpoint again. */
static inline bool session_open_log(Session* s, Error* e) {
    const TrainerState* state = &s->run.state;
    const char* again[4] = {NULL};
    int count = 0;
    if (state->val.step != state->step) { again[count++] = "val"; }
    if (state->owed & OWED_TASKS) { again[count++] = "task"; }
    if (state->owed & OWED_SAMPLE) { again[count++] = "sample"; }
    return logger_open_before(&s->run.log, s->chosen.out, (int64_t)state->step, again, e);
}

/* Opens the log in --out, which must be locked, and writes the configuration or the resumption, with what --recompute auto
 * chose. From then on this is the run that wrote last. */
static inline void session_begin(Session* s, const char* precision) {
    Error e = NO_ERROR;
    const Options* o = &s->chosen;
    if (s->process.rank != 0) { return; }
    Options logged = *o;
    logged.recompute.automatic = false;
    char* options = options_log_text(&logged, LOG_TEXT_MAX);
    const LoggedRun run = {trainer_name(o->trainer), precision, s->process.machine, options, s->process.argc, s->process.argv};
    must(s->start.resumed ? session_open_log(s, &e) : logger_open(&s->run.log, o->out, -1, &e), &e);
    if (s->start.resumed) {
        must(log_resume(&s->run.log, &s->run.state, s->start.dir, &run, &e), &e);
        session_set_aside(s);
        // a run that died while it removed old checkpoints
        if (!s->run.state.not_finite) { checkpoint_prune(o->out, o->keep, (uint64_t)o->major_every, s->run.state.step); }
    } else {
        must(log_config(&s->run.log, &s->run.state, &run, &s->spec.config, &s->spec.table, s->data.train.num_tokens, &e), &e);
    }
    free(options);
}

#endif
