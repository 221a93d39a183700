/* verify.h -- --verify DIR: checks a checkpoint, every checkpoint of a run, or all runs of a folder, and prints a line for
 * each checkpoint. It checks every file's size and checksum, the configuration, every tensor (weights, m, master finite; v
 * finite and not negative), and that the log beside it knows the same weights. A checkpoint that passes can be resumed. It
 * needs neither data nor memory for a model.
 */
#ifndef LLMC_VERIFY_H
#define LLMC_VERIFY_H

#include "llmc/base/utils.h"

#include "llmc/config.h"
#include "llmc/files/checkpoint.h"
#include "llmc/files/model_folder.h"
#include "llmc/files/optimizer_state.h"
#include "llmc/base/progress.h"  // defines: progress_begin, progress_end

/* Reads the configuration of a checkpoint's model; with LoRA, the configuration of the base, which must exist. `base` is the
 * base's folder now, or "" for the folder that the adapters name; on return it is the folder that was read. */
static inline bool verify_config(const char* dir, ModelConfig* c, char base[PATH_CAP], Error* e) {
    AdapterConfig a;
    if (!folder_is_adapter(dir)) { return model_check(dir, c, e); }
    if (!adapter_read_config(dir, &a, e)) { return false; }
    if (!base[0]) { snprintf(base, PATH_CAP, "%s", a.base); }
    if (!model_check(base, c, e)) { return false; }
    c->lora = a.lora;
    return true;
}

/* Checks that the adapters were trained beside these weights of the base. */
static inline bool verify_base(const char* base, const ModelConfig* c, const ParamTable* t, const TrainerState* s,
                               StateSlot checked, Error* e) {
    uint32_t crc = 0;
    if (!model_load_sums(base, c, t, NULL, &crc, checked, NULL, e)) { return false; }
    return !s->base || s->base == crc ||
           fail(e, "%s: the weights' checksum is %" PRIu32 ", but the adapters were trained beside weights with %" PRIu64, base,
                crc, s->base);
}

/* Checks the tensors of a checkpoint whose files are as they were written. Weights that are not finite are only noted in *note
 * where the state holds the exact ones: a run resumes with those. */
static inline bool verify_tensors(const char* dir, const TrainerState* s, const char* lora_base, Error* note, Error* e) {
    ModelConfig c;
    char base[PATH_CAP];
    snprintf(base, sizeof base, "%s", lora_base ? lora_base : "");
    if (!verify_config(dir, &c, base, e)) { return false; }
    c.optimizer = optimizer_find(s->optimizer);
    if (c.optimizer < 0) { return fail(e, "%s: the optimizer %s is none of this build", dir, s->optimizer); }
    ParamTable table = param_table(&c), trained = trained_table(&c);
    ArenaRange range;
    const ArenaRanges whole = whole_arena(&trained, &range);
    const bool lora = c.lora.rank > 0;
    const int num_slots = trainer_state_has_master(s) ? 3 : 2;
    const uint64_t values = (lora ? table.num_params : 0) + (1 + (uint64_t)num_slots) * trained.num_params;
    Passed passed = {progress_begin(stdout, "check", values, "values"), false};
    const StateSlot slots[] = {{"m", SAFE_F32, NULL, NULL, NULL, &passed},
                               {"v", SAFE_F32, NULL, NULL, NULL, &passed},
                               {"master", SAFE_F32, NULL, NULL, NULL, &passed}};
    const StateSlot weights = slots[2];
    const bool read = lora
                          ? adapter_load(dir, &trained, NULL, weights, e) && verify_base(base, &c, &table, s, weights, e)
                          : model_load_sums(dir, &c, &table, NULL, NULL, weights, trainer_state_has_master(s) ? note : NULL, e);
    const bool ok = read && state_load(dir, s->world_size, &trained, &whole, slots, num_slots, e);
    progress_end(&passed.progress);
    param_table_free(&table);
    param_table_free(&trained);
    return ok;
}

/* Checks a checkpoint and prints its line. */
static inline bool verify_checkpoint(const char* dir, const char* lora_base) {
    TrainerState s;
    LogHistory log;
    Error e = NO_ERROR, note = NO_ERROR;
    const bool ok = checkpoint_read(dir, CHECKPOINT_RUN, stdout, &s, &e) && checkpoint_check_log(dir, &s, &log, &e) &&
                    verify_tensors(dir, &s, lora_base, &note, &e);
    if (ok) {
        uint64_t bytes = 0;
        for (size_t i = 0; i < s.files.count; i++) { bytes += s.files.items[i].size; }
        print_names(stdout, "whole   %s: step %" PRIu64 ", run %s, %zu files, %.1f MiB%s%s\n", dir, s.step,
                    s.run[0] ? s.run : "unknown", s.files.count, (double)bytes / (1 << 20),
                    s.not_finite ? "; its last step was not finite" : "",
                    note.msg[0] ? "; its rounded weights are not finite, those of its state are" : "");
    } else {
        printf("damaged %s\n", e.msg);
    }
    trainer_state_free(&s);
    return ok;
}

/* Checks all checkpoints of a run's folder, the newest first. Adds to the counts. */
static inline bool verify_run(const char* run, const char* lora_base, size_t* count, size_t* damaged, Error* e) {
    uint64_t* steps = NULL;
    size_t listed = 0;
    bool ok = checkpoint_list(run, &steps, &listed, e);
    for (size_t i = listed; ok && i > 0; i--) {
        char dir[PATH_CAP];
        ok = checkpoint_path(dir, run, steps[i - 1], "", e);
        if (ok) { *damaged += !verify_checkpoint(dir, lora_base); }
        *count += ok;
    }
    free(steps);
    return ok;
}

/* Checks all runs whose folders lie in `path`, in the order of their names. */
static inline bool verify_runs(const char* path, const char* lora_base, size_t* count, size_t* damaged, Error* e) {
    struct dirent** names = NULL;
    const int listed = scandir(path, &names, NULL, alphasort);
    bool ok = listed >= 0 || fail(e, "%s: reading the folder failed: %s", path, strerror(errno));
    for (int i = 0; i < listed; i++) {
        char run[PATH_CAP];
        const bool looks = ok && names[i]->d_name[0] != '.';
        ok = ok && (!looks || path_join(run, path, names[i]->d_name, e));
        if (ok && looks && is_directory(run)) { ok = verify_run(run, lora_base, count, damaged, e); }
        free(names[i]);
    }
    free(names);
    return ok;
}

/* Checks the checkpoint `path`, all that the run's folder `path` holds, or all of the runs in it. Dies if one is damaged, or
 * there is none. lora_base: the base of their adapters, if it has moved, or NULL. */
static inline void verify(const char* path, const char* lora_base) {
    size_t count = 0, damaged = 0;
    Error e = NO_ERROR;
    if (!is_directory(path)) { die("--verify: %s is no folder, wanted a checkpoint or a folder of checkpoints", path); }
    if (folder_has(path, "trainer_state.json")) {
        count = 1;
        damaged = !verify_checkpoint(path, lora_base);
    } else {
        must(verify_run(path, lora_base, &count, &damaged, &e), &e);
    }
    if (count == 0) { must(verify_runs(path, lora_base, &count, &damaged, &e), &e); }
    if (count == 0 && folder_has(path, "config.json")) {
        die("%s: is a model's folder, wanted a run or a checkpoint: only a run lists the checksums of its files", path);
    }
    if (count == 0) { die("%s: holds no checkpoint, wanted a folder step_NNNNNNNN in it, or in a folder of it", path); }
    if (damaged > 0) { die("%s: damaged checkpoints: %zu of %zu", path, damaged, count); }
}

#endif
