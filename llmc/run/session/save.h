/* save.h -- writes a checkpoint of a run: weights, optimizer state, tokenizer, side files and flags; then removes old
 * ones. checkpoint.h has the files and how they survive a crash.
 */
#ifndef LLMC_SAVE_H
#define LLMC_SAVE_H

#include "llmc/base/utils.h"

#include "llmc/files/checkpoint.h"       // defines: Checkpoint, checkpoint_begin, checkpoint_commit, checkpoint_prune
#include "llmc/files/logger.h"           // defines: logger_reopen, log_checkpoint
#include "llmc/run/session/lockstep.h"   // defines: Lockstep, lockstep_piece, lockstep_rest
#include "llmc/run/session/lora_base.h"  // defines: session_base_path
#include "llmc/run/session/session.h"    // defines: Session, session_with_dtype, session_screen, session_owned
#include "llmc/dist/agree.h"             // defines: agree_ok, agree_gather, agree_first
#include "llmc/text/tokenizer_write.h"   // defines: tokenizer_save

/* Writes the run's flags into a checkpoint, for @FILE. A failure is only a warning. */
static inline void session_add_flags(const Options* o, Checkpoint* k) {
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

/* Writes a trainer's own files into a checkpoint's folder and lists them with checkpoint_add(). */
typedef bool (*AddFiles)(void* ctx, Checkpoint* k, Error* e);

/* Writes the tokenizer and the side files of the model. A failure is only a warning. */
static inline void session_add_side_files(const Session* s, Checkpoint* k) {
    Error e = NO_ERROR;
    if (s->data.has_tokenizer && !tokenizer_save(&s->data.tokenizer, k->tmp, s->spec.config.max_positions, &e)) {
        warn("%s: this checkpoint will not have a tokenizer", e.msg);
        checkpoint_drop(k, "tokenizer.json");
        checkpoint_drop(k, "tokenizer_config.json");
    }
    checkpoint_add_optional(k, "tokenizer.json");
    checkpoint_add_optional(k, "tokenizer_config.json");
    checkpoint_side_files(k, &s->start.side_files, &s->spec.config);
}

/* Returns whether --out, which this run has locked, is not in its place any more. */
static inline bool session_lost_out(const Session* s) {
    char path[PATH_CAP];
    Error ignored = NO_ERROR;
    return s->run.lock >= 0 && path_join(path, s->chosen.out, ".lock", &ignored) && !is_open_file(s->run.lock, path);
}

/* Writes the checkpoint into the log, which is opened again if its file is gone. A log that cannot be written is closed, unless
 * --out is gone with it: both are then made again. */
static inline void session_log_checkpoint(Session* s, const Checkpoint* k, Error* e) {
    const bool ok = logger_reopen(&s->run.log, e) &&
                    log_checkpoint(&s->run.log, (int64_t)s->run.state.step, k->dir, file_sums_weights(&k->sums), e);
    if (!ok && !session_lost_out(s)) { logger_close(&s->run.log); }
}

/* Seals a checkpoint whose tensors are all written: adds the optional files, logs it, and gives it its name. */
static inline bool session_seal(Session* s, Checkpoint* k, SafeDtype dtype, Error* log_error, Error* e) {
    const Options saved = session_with_dtype(s, dtype);
    char* options = options_json_text(&saved, &s->run.state.json, s->run.state.saved_options);
    s->run.state.seed = (uint64_t)s->chosen.seed;
    s->run.state.data_row = s->run.state.tokens / (uint64_t)s->chosen.seq;  // not train.row: a dropped step has read further
    s->run.state.world_size = s->process.ranks;
    snprintf(s->run.state.optimizer, sizeof s->run.state.optimizer, "%s", optimizer_rules[s->spec.config.optimizer].word);
    s->run.state.options = options;
    session_add_side_files(s, k);
    session_add_flags(&saved, k);
    session_log_checkpoint(s, k, log_error);
    const bool ok = checkpoint_commit(k, &s->run.state, e);
    s->run.state.options = NULL;
    free(options);
    return ok;
}

/* Writes the weights, or with LoRA the adapters. */
static inline bool session_add_weights(const Session* s, Checkpoint* k, StateSlot weights, Error* e) {
    char base[PATH_CAP];
    if (s->spec.config.lora.rank == 0) { return checkpoint_model(k, &s->spec.config, &s->spec.table, weights, e); }
    session_base_path(s, base);
    return checkpoint_adapter(k, &s->spec.config, base, &s->spec.trained, weights, e);
}

/* Lets rank 0 write the weights, with `together` by asking all ranks for them. */
static inline bool session_pass_weights(const Session* s, Checkpoint* k, StateSlot weights, bool together, Error* e) {
    const bool first = s->process.rank == 0;
    if (!together) { return !first || session_add_weights(s, k, weights, e); }
    Lockstep c = {weights.source, weights.ctx, 0};
    weights.source = lockstep_piece;
    weights.ctx = &c;
    Error after = NO_ERROR;
    const bool ok = !first || session_add_weights(s, k, weights, e);
    return lockstep_rest(&c, s->spec.config.lora.rank > 0 ? &s->spec.trained : &s->spec.table, ok ? e : &after) && ok;
}

/* Begins a checkpoint: rank 0 makes the folder, the others wait for it. */
static inline bool session_begin_checkpoint(Session* s, Checkpoint* k, Error* e) {
    const char* out = s->chosen.out;
    const bool first = s->process.rank == 0;
    memset(k, 0, sizeof *k);
    const bool ok = first
                        ? (s->run.lock < 0 || out_keep(&s->run.lock, out, e)) && checkpoint_begin(k, out, s->run.state.step, e)
                        : checkpoint_join(k, out, s->run.state.step, e);
    return agree_ok(s->process.team, ok, e);
}

/* Writes this rank's state, waits for the others' states, and lists them. Notes in state.not_finite if a rank wrote a value
 * that is not finite; `passed` knows what this rank wrote. */
static inline bool session_add_states(Session* s, Checkpoint* k, const StateSlot* slots, int num_slots, const Passed* passed,
                                      Error* e) {
    typedef struct {
        uint64_t size, crc, not_finite;
    } Sum;
    const bool ok = checkpoint_state(k, s->process.rank, &s->spec.trained, &s->spec.owned, slots, num_slots, e);
    if (!agree_ok(s->process.team, ok, e) || !ok) { return false; }
    const FileSum* state = &k->sums.items[k->sums.count - 1];
    const Sum mine = {state->size, state->crc, passed->not_finite};
    Sum* all = (Sum*)xmalloc((size_t)s->process.ranks * sizeof *all);
    all[0] = mine;
    if (s->process.team) { agree_gather(s->process.team, &mine, sizeof mine, all); }
    for (int r = 0; r < s->process.ranks; r++) {
        if (s->process.rank == 0 && all[r].not_finite && !s->run.state.not_finite) {
            warn("%s: holds numbers that are not finite: older checkpoints stay", k->dir);
        }
        s->run.state.not_finite |= all[r].not_finite != 0;
        if (s->process.rank == 0 && r > 0) { checkpoint_list_state(k, r, all[r].size, (uint32_t)all[r].crc); }
    }
    free(all);
    return true;
}

/* Writes the checkpoint OUT/step_N of step state.step: the weights in the slot's dtype (with state.f32_weights in F32), the optimizer state, the files of `add` (or NULL), then the optional files. Then removes old checkpoints by --keep,
 * unless the last step or a value in this checkpoint is not finite. If the dtype cannot hold a weight, fails with e->too_large.
 * Every rank calls this. Rank 0 makes the folder and writes the model, whose weights with `together` lie on all ranks
 * (lockstep.h). Then each rank writes its own state. When all have done so, rank 0 seals the folder. Returns false, on all
 * ranks, if one of them could not write its part. A log that cannot be written does not prevent this: then the log is
 * closed, and *e says so. */
static inline bool session_checkpoint(Session* s, StateSlot weights, bool together, const StateSlot* slots, int num_slots,
                                      AddFiles add, void* add_ctx, Error* e) {
    Checkpoint k;
    Error log_error = NO_ERROR;
    const Options* o = &s->chosen;
    const bool first = s->process.rank == 0;
    const uint64_t weight_values = s->spec.config.lora.rank > 0 ? s->spec.trained.num_params : s->spec.table.num_params;
    const uint64_t values = weight_values + (uint64_t)num_slots * session_owned(s);
    Passed passed = {progress_begin(session_screen(s), "save", values, "values"), false};
    StateSlot states[NUM_SLOTS];
    const SafeDtype dtype = weights.dtype;
    weights.passed = &passed;
    weights.dtype = s->run.state.f32_weights ? SAFE_F32 : dtype;
    for (int i = 0; i < num_slots; i++) {
        states[i] = slots[i];
        states[i].passed = &passed;
    }
    bool ok = session_begin_checkpoint(s, &k, e);
    ok = ok && agree_ok(s->process.team, session_pass_weights(s, &k, weights, together, e), e);
    if (!ok) { agree_first(s->process.team, &e->too_large, sizeof e->too_large); }
    ok = ok && session_add_states(s, &k, states, num_slots, &passed, e);
    progress_end(&passed.progress);
    if (ok) {
        ok = !first || ((!add || add(add_ctx, &k, e)) && session_seal(s, &k, dtype, &log_error, e));
        ok = agree_ok(s->process.team, ok, e);
    }
    if (!first) { checkpoint_leave(&k); }
    if (!ok) {
        checkpoint_abort(&k);
        return false;
    }
    snprintf(s->run.newest, sizeof s->run.newest, "%s", k.dir);
    if (first && !s->run.state.not_finite) { checkpoint_prune(o->out, o->keep, (uint64_t)o->major_every, s->run.state.step); }
    if (log_error.msg[0]) { fail(e, "%s", log_error.msg); }
    return true;
}

#endif
