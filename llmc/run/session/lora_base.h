/* lora_base.h -- decides whether a job has adapters (LoRA), and finds the base model beside which they stand.
 *
 *   --lora R --model FOLDER       trains new adapters beside the folder's weights
 *   --model ADAPTERS              adapters that exist: their adapter_config.json names the base; every job takes them
 *   --resume of a run with --lora the same: the checkpoint holds the adapters
 *
 * --lora-base DIR gives the base where it has moved. load_weights() compares the base's checksum with the checksum that
 * our checkpoint remembers.
 */
#ifndef LLMC_LORA_BASE_H
#define LLMC_LORA_BASE_H

#include "llmc/base/utils.h"

#include "llmc/files/adapter.h"        // defines: AdapterConfig, folder_is_adapter, adapter_read_config, adapter_check
#include "llmc/run/session/session.h"  // defines: Start, Process, start_has_adapters
#include "llmc/text/tokenizer_read.h"  // defines: folder_has_tokenizer

/* Returns the folder whose tokenizer and side files belong to the model: adapters may have their own. "": a new model. */
static inline const char* start_text_dir(const Start* s) { return folder_has_tokenizer(s->dir) ? s->dir : s->base_dir; }

/* Returns the matrices that --lora-on names, as the bits of LoraConfig.on. */
static inline unsigned lora_on_bits(int on) {
    static const unsigned bits[] = {0x0f, 0x70, 0x7f};
    return bits[on];
}

/* Takes the adapters' shape from the flags. */
static inline void lora_of_flags(LoraConfig* l, const Start* start, const Options* o, Job job) {
    if (start->resumed && o->lora > 0) {
        die("--lora: the run of %s trains all weights, wanted one that began with --lora", start->dir);
    }
    if (!job_trains(job) || o->lora == 0) {
        if (o->lora_alpha > 0 && job_trains(job)) { die("--lora-alpha: is of no use without --lora R"); }
        if (o->given[OPT_lora_on] && job_trains(job)) { die("--lora-on: is of no use without --lora R"); }
        if (o->lora_base) { die("--lora-base: %s holds no adapters", start->dir[0] ? start->dir : o->model); }
        return;
    }
    if (!start->dir[0] && job == JOB_TRAIN) {
        die("--lora: %s is a new model, wanted a trained one in --model, whose weights stay as they are", o->model);
    }
    if (o->lora_base) { die("--lora-base: new adapters stand beside the folder that --model names"); }
    l->rank = o->lora;
    l->alpha = o->lora_alpha > 0 ? o->lora_alpha : 2.0 * o->lora;
    l->on = lora_on_bits(o->lora_on);
    if (l->alpha < LORA_LEAST_ALPHA) {
        die("--lora-alpha: is %g, wanted 0 for twice the rank, or at least %g", o->lora_alpha, LORA_LEAST_ALPHA);
    }
}

/* Refuses flags that give adapters another shape than they have. */
static inline void lora_check_flags(const LoraConfig* l, const char* dir, const Options* o) {
    const double alpha = o->lora_alpha > 0 ? o->lora_alpha : 2.0 * l->rank;
    if (o->given[OPT_lora] && o->lora != l->rank) {
        die("--lora: is %d, but the adapters of %s have rank %d", o->lora, dir, l->rank);
    }
    if (o->given[OPT_lora_alpha] && alpha != l->alpha) {
        die("--lora-alpha: is %g, but the adapters of %s have %g", alpha, dir, l->alpha);
    }
    if (o->given[OPT_lora_on] && lora_on_bits(o->lora_on) != l->on) {
        die("--lora-on: the adapters of %s stand beside other matrices, see its " ADAPTER_CONFIG, dir);
    }
}

/* Takes the adapters' shape from their folder, and sets base_dir to the folder of the base model. */
static inline void lora_of_folder(LoraConfig* l, Start* start, const Options* o, const Process* p) {
    AdapterConfig a;
    Error e = NO_ERROR;
    must(adapter_read_config(start->dir, &a, &e), &e);
    lora_check_flags(&a.lora, start->dir, o);
    if (a.dropout > 0 && p->job == JOB_TRAIN && p->rank == 0) {
        warn("%s: lora_dropout is %g: training goes on without dropout", start->dir, a.dropout);
    }
    *l = a.lora;
    const char* base = o->lora_base ? o->lora_base : a.base;
    if (!is_directory(base)) {
        die("%s/" ADAPTER_CONFIG
            ": base_model_name_or_path is %s, which is no folder here\n"
            "  hint: give the base model's folder with --lora-base DIR",
            start->dir, base);
    }
    if (!folder_has(base, "config.json") && !folder_is_adapter(base)) {
        die("%s: has no config.json, wanted the folder of the base model: one checkpoint, not a folder of them", base);
    }
    if (folder_is_adapter(base)) { die("%s: holds adapters, wanted their base model in --lora-base", base); }
    snprintf(start->base_dir, sizeof start->base_dir, "%s", base);
}

/* Takes the base's checksums, if the base is a checkpoint of ours. */
static inline void base_take_sums(Start* start) {
    char path[PATH_CAP];
    TrainerState found;
    Error e = NO_ERROR;
    must(path_join(path, start->base_dir, "trainer_state.json", &e), &e);
    if (trainer_state_read(&found, path, &e)) {
        start->base_sums = found.files;
        memset(&found.files, 0, sizeof found.files);
    }
    trainer_state_free(&found);
}

/* Sets base_dir and, if there are adapters, their shape. */
static inline void base_find(Start* start, LoraConfig* l, const Options* o, const Process* p) {
    snprintf(start->base_dir, sizeof start->base_dir, "%s", start->dir);
    if (start->dir[0] && folder_is_adapter(start->dir)) {
        lora_of_folder(l, start, o, p);
        base_take_sums(start);
    } else {
        lora_of_flags(l, start, o, p->job);
    }
}

/* Checks the tensors of the adapters; the base's configuration is known now. Reads no weights. */
static inline void adapters_check(const Start* start, const ModelConfig* c) {
    Error e = NO_ERROR;
    if (!start_has_adapters(start)) { return; }
    ParamTable adapters = trained_table(c);
    const bool ok = adapter_check(start->dir, &adapters, &e);
    param_table_free(&adapters);
    must(ok, &e);
}

#endif
