/* save.h -- writes a checkpoint of a run: weights, optimizer state, tokenizer, side files and flags; then removes old
 * ones. checkpoint.h has the files and how they survive a crash.
 *
 * Weights may have parts on several ranks. Then all ranks ask one source for the same pieces in the same order, and each gives
 * its parts (Lockstep). Rank 0 asks as it writes; the others walk the table in that order. If rank 0's write fails (a full
 * disk), it still asks for the rest, or the others would hang.
 */
#ifndef LLMC_SAVE_H
#define LLMC_SAVE_H

#include "llmc/base/utils.h"

#include "llmc/dist/agree.h"            // defines: agree_ok, agree_gather, agree_first
#include "llmc/files/checkpoint.h"      // defines: Checkpoint, checkpoint_begin, checkpoint_commit, checkpoint_prune
#include "llmc/files/logger.h"          // defines: logger_reopen, log_checkpoint
#include "llmc/files/tensor_stream.h"   // defines: TensorSource, StateSlot, Passed, MODEL_PIECE
#include "llmc/base/progress.h"         // defines: progress_begin, progress_end
#include "llmc/run/session/session.h"   // defines: Process, Start, ModelSpec, Run, process_screen, spec_owned
#include "llmc/text/tokenizer_write.h"  // defines: tokenizer_save, tokenizer_extras

/* Writes a trainer's own files into a checkpoint's folder and lists them with checkpoint_add(). */
typedef bool (*AddFiles)(void* ctx, Checkpoint* k, Error* e);

/* The parts of a run that a checkpoint is written from. */
typedef struct {
    const Process* process;
    const Options* options;
    const Start* start;
    const ModelSpec* spec;
    const TextRules* rules;
    StateSlot weights;  // in the dtype of --export-dtype
    bool together;      // the weights lie on all ranks
    StateSlot states[NUM_SLOTS];
    int num_states;
    AddFiles add;  // or NULL
    void* add_ctx;
} Saved;

// ---------------------------------------------------------------------------------------------------------------------
// weights on several ranks

typedef struct {
    TensorSource source;  // all ranks call it in the same order; gives rank 0 the piece
    void* ctx;
    uint64_t asked;  // pieces so far
} Lockstep;

/* A TensorSource for a writer. */
static inline bool lockstep_piece(void* lockstep, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    Lockstep* c = (Lockstep*)lockstep;
    c->asked++;
    return c->source(c->ctx, p, first, n, dst, e);
}

/* Asks for the pieces of a table that nobody asked for, in the order of model_save_weights() and adapter_save(), and drops
 * them. */
static inline bool lockstep_rest(Lockstep* c, const ParamTable* t, Error* e) {
    float* buffer = (float*)xmalloc(MODEL_PIECE * sizeof(float));
    uint64_t piece = 0;
    bool ok = true;
    for (int i = 0; ok && i < t->count; i++) {
        const size_t size = param_size(&t->items[i]);
        for (size_t first = 0; ok && first < size; first += MODEL_PIECE) {
            if (piece++ < c->asked) { continue; }
            ok = lockstep_piece(c, &t->items[i], first, size_min(size - first, MODEL_PIECE), buffer, e);
        }
    }
    free(buffer);
    return ok;
}

/* Returns the table of the weights that a checkpoint holds: with LoRA, of the adapters. */
static inline const ParamTable* saved_table(const Saved* w) {
    return w->spec->config.lora.rank > 0 ? &w->spec->trained : &w->spec->table;
}

/* Writes the weights, or with LoRA the adapters, which name the full path of their base, so that they work from any folder. */
static inline bool save_model(const Saved* w, Checkpoint* k, StateSlot weights, Error* e) {
    const ModelConfig* c = &w->spec->config;
    if (c->lora.rank == 0) { return checkpoint_model(k, c, w->start->config, &w->spec->table, weights, e); }
    char* real = realpath(w->start->base_dir, NULL);
    const bool ok = checkpoint_adapter(k, c, real ? real : w->start->base_dir, &w->spec->trained, weights, e);
    free(real);
    return ok;
}

/* Lets rank 0 write the weights, with `together` by asking all ranks for them. */
static inline bool save_weights(const Saved* w, Checkpoint* k, StateSlot weights, Error* e) {
    const bool first = w->process->rank == 0;
    if (!w->together) { return !first || save_model(w, k, weights, e); }
    Lockstep c = {weights.source, weights.ctx, 0};
    weights.source = lockstep_piece;
    weights.ctx = &c;
    Error after = NO_ERROR;
    const bool ok = !first || save_model(w, k, weights, e);
    return lockstep_rest(&c, saved_table(w), ok ? e : &after) && ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// states

/* Writes this rank's state, waits for the others' states, and lists them. Sets *not_finite if a rank wrote a value that is not
 * finite; `passed` knows what this rank wrote. */
static inline bool save_states(const Saved* w, Checkpoint* k, const StateSlot* slots, const Passed* passed, bool* not_finite,
                               Error* e) {
    typedef struct {
        uint64_t size, crc, not_finite;
    } Sum;
    const Process* p = w->process;
    const bool ok = checkpoint_state(k, p->rank, &w->spec->trained, &w->spec->owned, slots, w->num_states, e);
    if (!agree_ok(p->team, ok, e) || !ok) { return false; }
    const FileSum* state = &k->sums.items[k->sums.count - 1];
    const Sum mine = {state->size, state->crc, passed->not_finite};
    Sum* all = (Sum*)xmalloc((size_t)p->ranks * sizeof *all);
    all[0] = mine;
    if (p->team) { agree_gather(p->team, &mine, sizeof mine, all); }
    for (int r = 0; r < p->ranks; r++) {
        if (p->rank == 0 && all[r].not_finite && !*not_finite) {
            warn("%s: holds numbers that are not finite: older checkpoints stay", k->dir);
        }
        *not_finite |= all[r].not_finite != 0;
        if (p->rank == 0 && r > 0) { checkpoint_list_state(k, r, all[r].size, (uint32_t)all[r].crc); }
    }
    free(all);
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// optional files, the log, the name

/* Writes the run's flags into a checkpoint, for @FILE. A failure is only a warning. */
static inline void save_flags(const Options* o, Checkpoint* k) {
    char path[PATH_CAP], *text = NULL;
    size_t size = 0;
    Error e = NO_ERROR;
    FILE* f = xopen_memory(&text, &size);
    options_write_flags(f, o);
    xclose_memory(f, &text);
    if (!path_join(path, k->tmp, "run.flags", &e) || !write_file(path, text, size, &e)) {
        warn("%s: this checkpoint will not have its flags", e.msg);
        checkpoint_drop(k, "run.flags");
    }
    free(text);
    checkpoint_add_optional(k, "run.flags");
}

/* Writes the tokenizer, what the rules say, and the side files of the model. A failure is only a warning. */
static inline void save_side_files(const Saved* w, Checkpoint* k) {
    const ModelConfig* c = &w->spec->config;
    const TokenizerExtras x = tokenizer_extras(w->rules, !w->start->dir[0], c->max_positions);
    Error e = NO_ERROR, lost = NO_ERROR;
    if (w->rules->tokenizer && !tokenizer_save(w->rules->tokenizer, k->tmp, &x, &e)) {
        warn("%s: this checkpoint will not have a tokenizer", e.msg);
        checkpoint_drop(k, "tokenizer.json");
        checkpoint_drop(k, "tokenizer_config.json");
    }
    if (!text_rules_save_generation(w->rules, c, k->tmp, &lost)) {
        warn("%s: this checkpoint will not have this file", lost.msg);
        checkpoint_drop(k, "generation_config.json");
    }
    checkpoint_add_optional(k, "tokenizer.json");
    checkpoint_add_optional(k, "tokenizer_config.json");
    checkpoint_add_optional(k, "generation_config.json");
    checkpoint_side_files(k, &w->start->side_files);
}

/* Returns whether --out, which this run has locked, is not in its place any more. */
static inline bool run_lost_out(const Run* run, const char* out) {
    char path[PATH_CAP];
    Error ignored = NO_ERROR;
    return run->lock >= 0 && path_join(path, out, ".lock", &ignored) && !is_open_file(run->lock, path);
}

/* Writes the checkpoint into the log, which is opened again if its file is gone. A log that cannot be written is closed, unless
 * --out is gone with it: both are then made again. */
static inline void run_log_checkpoint(Run* run, const Checkpoint* k, const char* out, Error* e) {
    const bool ok = logger_reopen(&run->log, e) &&
                    log_checkpoint(&run->log, (int64_t)run->state.step, k->dir, file_sums_weights(&k->sums), e);
    if (!ok && !run_lost_out(run, out)) { logger_close(&run->log); }
}

/* Seals a checkpoint whose tensors are all written: adds the optional files, logs it, and gives it its name. */
static inline bool save_seal(const Saved* w, Checkpoint* k, Run* run, Error* log_error, Error* e) {
    const Options* o = w->options;
    TrainerState* state = &run->state;
    char* options = options_json_text(o, &state->json, state->saved_options);
    state->seed = (uint64_t)o->seed;
    state->data_row = state->tokens / (uint64_t)o->seq;  // not train.row: a dropped step has read further
    state->world_size = w->process->ranks;
    snprintf(state->optimizer, sizeof state->optimizer, "%s", optimizer_rules[w->spec->config.optimizer].word);
    state->options = options;
    save_side_files(w, k);
    save_flags(o, k);
    run_log_checkpoint(run, k, o->out, log_error);
    const bool ok = checkpoint_commit(k, state, e);
    state->options = NULL;
    free(options);
    return ok;
}

/* Begins a checkpoint: rank 0 makes the folder, the others wait for it. */
static inline bool save_begin(Checkpoint* k, Run* run, const char* out, const Process* p, Error* e) {
    const uint64_t step = run->state.step;
    memset(k, 0, sizeof *k);
    const bool ok = p->rank > 0 ? checkpoint_join(k, out, step, e)
                                : (run->lock < 0 || out_keep(&run->lock, out, e)) && checkpoint_begin(k, out, step, e);
    return agree_ok(p->team, ok, e);
}

/* Writes the checkpoint OUT/step_N of step state.step: the weights in their dtype (with state.f32_weights in F32), the
 * optimizer state, the trainer's files, then the optional files. Then removes old checkpoints by --keep, unless the last step
 * or a value in this checkpoint is not finite. If the dtype cannot hold a weight, fails with e->too_large.
 * Every rank calls this. Rank 0 makes the folder and writes the model. Then each rank writes its own state. When all have done
 * so, rank 0 seals the folder. Returns false, on all ranks, if one of them could not write its part. A log that cannot be
 * written does not prevent this: then the log is closed, and *e says so. */
static inline bool save_checkpoint(const Saved* w, Run* run, Error* e) {
    Checkpoint k;
    Error log_error = NO_ERROR;
    const Options* o = w->options;
    Team* team = w->process->team;
    TrainerState* state = &run->state;
    const bool first = w->process->rank == 0;
    const uint64_t values = saved_table(w)->num_params + (uint64_t)w->num_states * spec_owned(w->spec);
    Passed passed = {progress_begin(process_screen(w->process), "save", values, "values"), false};
    StateSlot states[NUM_SLOTS];
    StateSlot weights = w->weights;
    weights.passed = &passed;
    if (state->f32_weights) { weights.dtype = SAFE_F32; }
    for (int i = 0; i < w->num_states; i++) {
        states[i] = w->states[i];
        states[i].passed = &passed;
    }
    bool ok = save_begin(&k, run, o->out, w->process, e);
    ok = ok && agree_ok(team, save_weights(w, &k, weights, e), e);
    if (!ok) { agree_first(team, &e->too_large, sizeof e->too_large); }
    ok = ok && save_states(w, &k, states, &passed, &state->not_finite, e);
    progress_end(&passed.progress);
    if (ok) {
        ok = !first || ((!w->add || w->add(w->add_ctx, &k, e)) && save_seal(w, &k, run, &log_error, e));
        ok = agree_ok(team, ok, e);
    }
    if (!first) { checkpoint_leave(&k); }
    if (!ok) {
        checkpoint_abort(&k);
        return false;
    }
    snprintf(run->newest, sizeof run->newest, "%s", k.dir);
    if (first && !state->not_finite) { checkpoint_prune(o->out, o->keep, (uint64_t)o->major_every, state->step); }
    if (log_error.msg[0]) { fail(e, "%s", log_error.msg); }
    return true;
}

#endif
