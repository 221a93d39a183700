/* lora_base.h -- decides whether a session has adapters (LoRA), and finds the base model beside which they stand.
 *
 *   --lora R --model FOLDER       trains new adapters beside the folder's weights
 *   --model ADAPTERS              adapters that exist: their adapter_config.json names the base; every job takes them
 *   --resume of a run with --lora the same: the checkpoint holds the adapters
 *
 * --lora-base DIR gives the base where it has moved. session_load_weights() compares the base's checksum with the checksum that
 * our checkpoint remembers.
 */
#ifndef LLMC_LORA_BASE_H
#define LLMC_LORA_BASE_H

#include "llmc/base/utils.h"

#include "llmc/files/adapter.h"        // defines: AdapterConfig, folder_is_adapter, adapter_read_config, adapter_check
#include "llmc/run/session/session.h"  // defines: Session, session_has_adapters
#include "llmc/text/tokenizer_read.h"  // defines: folder_has_tokenizer

/* Returns the folder whose tokenizer and side files belong to the model: adapters may have their own. "": a new model. */
static inline const char* session_text_dir(const Session* s) {
    return folder_has_tokenizer(s->start.dir) ? s->start.dir : s->start.base_dir;
}

/* Returns the matrices that --lora-on names, as the bits of LoraConfig.on. */
static inline unsigned lora_on_bits(int on) {
    static const unsigned bits[] = {0x0f, 0x70, 0x7f};
    return bits[on];
}

/* Takes the adapters' shape from the flags. */
static inline void session_new_lora(Session* s) {
    Options* o = &s->chosen;
    LoraConfig* l = &s->spec.config.lora;
    if (s->start.resumed && o->lora > 0) {
        die("--lora: the run of %s trains all weights, wanted one that began with --lora", s->start.dir);
    }
    if (!job_trains(s->process.job) || o->lora == 0) {
        if (o->lora_alpha > 0 && job_trains(s->process.job)) { die("--lora-alpha: is of no use without --lora R"); }
        if (o->given[OPT_lora_on] && job_trains(s->process.job)) { die("--lora-on: is of no use without --lora R"); }
        if (o->lora_base) { die("--lora-base: %s holds no adapters", s->start.dir[0] ? s->start.dir : o->model); }
        return;
    }
    if (!s->start.dir[0] && s->process.job == JOB_TRAIN) {
        die("--lora: %s is a new model, wanted a trained one in --model, whose weights stay as they are", o->model);
    }
    if (o->lora_base) { die("--lora-base: new adapters stand beside the folder that --model names"); }
    l->rank = o->lora;
    if (o->lora_alpha == 0) { o->lora_alpha = 2.0 * o->lora; }
    if (o->lora_alpha < LORA_LEAST_ALPHA) {
        die("--lora-alpha: is %g, wanted 0 for twice the rank, or at least %g", o->lora_alpha, LORA_LEAST_ALPHA);
    }
    l->alpha = o->lora_alpha;
    l->on = lora_on_bits(o->lora_on);
}

/* Takes the adapters' shape from model_dir, and sets base_dir to the folder of the base model. */
static inline void session_read_adapters(Session* s) {
    Options* o = &s->chosen;
    AdapterConfig a;
    Error e = NO_ERROR;
    must(adapter_read_config(s->start.dir, &a, &e), &e);
    if (o->given[OPT_lora] && o->lora != a.lora.rank) {
        die("--lora: is %d, but the adapters of %s have rank %d", o->lora, s->start.dir, a.lora.rank);
    }
    const double alpha = o->lora_alpha > 0 ? o->lora_alpha : 2.0 * a.lora.rank;
    if (o->given[OPT_lora_alpha] && alpha != a.lora.alpha) {
        die("--lora-alpha: is %g, but the adapters of %s have %g", alpha, s->start.dir, a.lora.alpha);
    }
    if (o->given[OPT_lora_on] && lora_on_bits(o->lora_on) != a.lora.on) {
        die("--lora-on: the adapters of %s stand beside other matrices, see its " ADAPTER_CONFIG, s->start.dir);
    }
    if (a.dropout > 0 && s->process.job == JOB_TRAIN && s->process.rank == 0) {
        warn("%s: lora_dropout is %g: training goes on without dropout", s->start.dir, a.dropout);
    }
    s->spec.config.lora = a.lora;
    o->lora = a.lora.rank;  // so that checkpoints and log say it
    o->lora_alpha = a.lora.alpha;
    const char* base = o->lora_base ? o->lora_base : a.base;
    if (!is_directory(base)) {
        die("%s/" ADAPTER_CONFIG
            ": base_model_name_or_path is %s, which is no folder here\n"
            "  hint: give the base model's folder with --lora-base DIR",
            s->start.dir, base);
    }
    if (!folder_has(base, "config.json") && !folder_is_adapter(base)) {
        die("%s: has no config.json, wanted the folder of the base model: one checkpoint, not a folder of them", base);
    }
    if (folder_is_adapter(base)) { die("%s: holds adapters, wanted their base model in --lora-base", base); }
    snprintf(s->start.base_dir, sizeof s->start.base_dir, "%s", base);
}

/* Takes the base's checksums, if the base is a checkpoint of ours. */
static inline void session_take_base_sums(Session* s) {
    char path[PATH_CAP];
    TrainerState found;
    Error e = NO_ERROR;
    must(path_join(path, s->start.base_dir, "trainer_state.json", &e), &e);
    if (trainer_state_read(&found, path, &e)) {
        s->start.base_sums = found.files;
        memset(&found.files, 0, sizeof found.files);
    }
    trainer_state_free(&found);
}

/* Sets base_dir and, if there are adapters, their shape. */
static inline void session_find_base(Session* s) {
    snprintf(s->start.base_dir, sizeof s->start.base_dir, "%s", s->start.dir);
    if (s->start.dir[0] && folder_is_adapter(s->start.dir)) {
        session_read_adapters(s);
        session_take_base_sums(s);
    } else {
        session_new_lora(s);
    }
}

/* Checks the tensors of the adapters; the base's configuration is known now. Reads no weights. */
static inline void session_check_adapters(const Session* s) {
    Error e = NO_ERROR;
    if (!session_has_adapters(s)) { return; }
    ParamTable adapters = trained_table(&s->spec.config);
    const bool ok = adapter_check(s->start.dir, &adapters, &e);
    param_table_free(&adapters);
    must(ok, &e);
}

/* Writes the base's path for adapter_config.json: the full path, so that the adapters work from any folder. */
static inline void session_base_path(const Session* s, char* out /* PATH_CAP */) {
    char* real = realpath(s->start.base_dir, NULL);
    snprintf(out, PATH_CAP, "%s", real ? real : s->start.base_dir);
    free(real);
}

#endif
