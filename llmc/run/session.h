/* session.h -- everything around the model in both trainers: the job of the command line, the sources of weights, tokenizer and
 * data, the checks between them, the log, and the files of a checkpoint.
 *
 * session_open() works in this order, so that the first error is the one that matters and nothing is written before all is
 * checked: flags -> lock of --out, if the run resumes and it exists -> checkpoint to resume, with its options -> model folder
 * or preset -> tokenizer -> data files -> plan. Then session_compare() tells what has changed since the checkpoint, the
 * trainer checks its memory, session_load_weights() fills the model, session_lock() locks --out, and session_begin() opens
 * the log and moves aside what lies behind the step that the run goes on from.
 *
 * --model may be a model folder, a folder of checkpoints (the newest whole one is used), or a preset. Jobs that need a
 * trained model use the newest checkpoint of --out if --model is not given.
 * All functions die() on an error: this is the outermost layer. Ranks other than 0 write no log and do not lock --out.
 */
#ifndef LLMC_SESSION_H
#define LLMC_SESSION_H

#include "llmc/base/utils.h"

#include "llmc/config.h"
#include "llmc/files/checkpoint.h"
#include "llmc/files/dataloader.h"
#include "llmc/files/logger.h"
#include "llmc/files/mix.h"
#include "llmc/run/prompt.h"
#include "llmc/run/machine.h"
#include "llmc/run/memory.h"
#include "llmc/run/options.h"
#include "llmc/run/plan.h"
#include "llmc/run/scheduler.h"
#include "llmc/run/screen.h"
#include "llmc/run/signals.h"
#include "llmc/run/tasks.h"
#include "llmc/run/verify.h"
#include "llmc/text/tokenizer.h"
#include "llmc/text/tokenizer_read.h"
#include "llmc/text/tokenizer_write.h"

typedef enum { JOB_TRAIN, JOB_DRY_RUN, JOB_EVAL, JOB_GENERATE, JOB_CHAT, JOB_EXPORT } Job;

/* Returns whether a job sets up training; a dry run does so without training. The other jobs need a trained model. */
static inline bool job_trains(Job job) { return job == JOB_TRAIN || job == JOB_DRY_RUN; }

typedef struct {
    // the command line
    Options options;
    int argc;
    char** argv;
    double started;  // now_seconds() at the start of the program
    int status;      // exit status of the program
    Job job;
    int rank, ranks;

    // the model and its origin
    ModelConfig config;
    ParamTable table;          // of the weights
    ParamTable trained;        // of the tensors that are trained
    char model_dir[PATH_CAP];  // folder with the weights to start from; "": a new model
    FileSums sums;             // checksums of its files, verified on loading; none: unknown, or already verified
    SideFiles side_files;      // copied from model_dir into the checkpoints of this run
    bool resumed;              // model_dir is the checkpoint that this run resumes from
    bool saved_master;         // its weights are rounded: the master weights are in its state, as "master"

    // text and data
    Tokenizer tokenizer;
    bool has_tokenizer;
    DataLoader train, val;
    Mix mix;  // the sources of `train`
    bool has_train, has_val;
    Tasks tasks;
    bool has_tasks;

    // the run
    Plan plan;              // until --minutes is measured, planned for one epoch
    TrainerState state;     // the trainer keeps it up to date
    char newest[PATH_CAP];  // the checkpoint saved last, or resumed from; "": none yet
    int lock;
    Logger log;
    char machine[256];
    char build[160];  // what the bits of the results depend on besides the options, to compare with the checkpoint's
} Session;

// ---------------------------------------------------------------------------------------------------------------------
// flags

/* Parses the command line. Exits after --help and --version, and on wrong usage. */
static inline void session_flags(Session* s, int argc, char** argv, OptionScope trainer) {
    const Options* o = &s->options;
    s->argc = argc;
    s->argv = argv;
    options_or_exit(&s->options, argc, argv, trainer);
    s->job = o->generate ? JOB_GENERATE : o->chat ? JOB_CHAT : o->eval ? JOB_EVAL : o->dry_run ? JOB_DRY_RUN : JOB_TRAIN;
    if (o->export_model) { s->job = JOB_EXPORT; }
    Error e = NO_ERROR;
    must(options_read_text(&s->options, OPT_generate, &e) && options_read_text(&s->options, OPT_system, &e), &e);
}

#define DEFAULT_DATA "dev/data/tinytales/"

/* Sets --train and --val to the tinytales data if --train is missing (for --eval: --val, without --tasks), and for a new model
 * without --tokenizer to its tokenizer. Fails if the data has not been built. */
static inline bool default_data(Options* o, Error* e) {
    const bool wanted = o->eval ? !o->val && !o->tasks : !o->train;
    if (!wanted) { return true; }
    const char* missing = o->eval ? DEFAULT_DATA "tinytales_val.bin" : DEFAULT_DATA "tinytales_train.bin";
    if (!file_exists(missing)) {
        return fail(e, "%s: is not given, and the default %s does not exist\n  hint: make %s", o->eval ? "--val" : "--train",
                    missing, DEFAULT_DATA "tinytales_train.bin");
    }
    if (!o->train) { o->train = DEFAULT_DATA "tinytales_train.bin"; }
    if (!o->val && file_exists(DEFAULT_DATA "tinytales_val.bin")) { o->val = DEFAULT_DATA "tinytales_val.bin"; }
    if (!o->tokenizer && !is_directory(o->model)) { o->tokenizer = DEFAULT_DATA "tokenizer.json"; }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// weights

/* Moves the checksums out of a checkpoint's state into the session and frees the rest. */
static inline void session_take_sums(Session* s, TrainerState* found) {
    s->sums = found->files;
    memset(&found->files, 0, sizeof found->files);
    trainer_state_free(found);
}

/* Dies unless `ok`: something in `folder` could not be read. A run that writes there may have removed it meanwhile. */
static inline void session_must_read(const Session* s, bool ok, const char* folder, const Error* e) {
    if (!ok && s->lock < 0 && !strstr(e->msg, "hint: ") && out_is_locked(folder)) {
        die("%s\n  hint: another run is writing into %s and may have removed it: try again", e->msg, folder);
    }
    must(ok, e);
}

/* Takes the newest checkpoint of a folder as the model. Uses only its weights, not its run. */
static inline void session_find_checkpoint(Session* s, const char* folder) {
    Error e = NO_ERROR;
    TrainerState found;
    const bool ok = checkpoint_open(folder, CHECKPOINT_MODEL, s->model_dir, &found, &e);
    session_must_read(s, ok, folder, &e);
    session_take_sums(s, &found);
}

/* Takes a model folder given by name. If it is a checkpoint, its weights must match the saved checksums; the user may change
 * the other files. transformers' Trainer also writes a trainer_state.json: one that is not ours is ignored. */
static inline void session_take_folder(Session* s, const char* folder) {
    char path[PATH_CAP];
    TrainerState found;
    Error e = NO_ERROR;
    snprintf(s->model_dir, sizeof s->model_dir, "%s", folder);
    must(path_join(path, folder, "trainer_state.json", &e), &e);
    if (trainer_state_read(&found, path, &e)) {
        session_take_sums(s, &found);
    } else {
        trainer_state_free(&found);
    }
}

/* Returns whether this process writes into --out. */
static inline bool session_writes(const Session* s) {
    return s->job == JOB_TRAIN && s->rank == 0 && (s->options.profile == 0 || s->options.tune);
}

/* Locks --out and removes what dead runs left half-made in it. */
static inline void session_take_out(Session* s) {
    const char* out = s->options.out;
    Error e = NO_ERROR;
    must(out_lock(&s->lock, out, &e), &e);
    must(checkpoint_remove_stale(out, &e), &e);
}

/* Returns whether the run resumes from a checkpoint in --out. */
static inline bool session_goes_on_in_out(const Session* s) {
    char parent[PATH_CAP];
    struct stat a, b;
    Error e = NO_ERROR;
    return s->resumed && checkpoint_parent(s->model_dir, parent, &e) && stat(parent, &a) == 0 &&
           stat(s->options.out, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

/* Returns whether the run leaves the one of its checkpoint: it goes on in another folder, or from a step before the newest. */
static inline bool session_branches(const Session* s) {
    uint64_t* steps = NULL;
    size_t count = 0;
    Error e = NO_ERROR;
    if (!session_goes_on_in_out(s)) { return true; }
    must(checkpoint_list(s->options.out, &steps, &count, &e), &e);
    const bool named = strcmp(s->options.resume, s->model_dir) == 0, later = count > 0 && steps[0] > s->state.step;
    free(steps);
    return named && later;
}

/* Decides which run this is, and compares the weights with the log that lies beside the checkpoint. */
static inline void session_identify(Session* s) {
    TrainerState* state = &s->state;
    LogHistory log;
    Error e = NO_ERROR;
    must(checkpoint_check_log(s->model_dir, state, &log, &e), &e);
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

/* Finds the checkpoint to resume from and restores its options. If --out has none, the run starts at step 0, so that a script
 * can always pass --resume. Locks --out first: what another run still writes there must not be missed. */
static inline void session_resume(Session* s) {
    Options* o = &s->options;
    const bool named = *o->resume;
    Error e = NO_ERROR;
    if (session_writes(s) && is_directory(o->out)) { session_take_out(s); }
    const bool ok = named ? checkpoint_open(o->resume, CHECKPOINT_RUN, s->model_dir, &s->state, &e)
                          : checkpoint_find(o->out, CHECKPOINT_RUN, s->model_dir, &s->state, &e);
    session_must_read(s, ok, named ? o->resume : o->out, &e);
    if (!s->model_dir[0]) {
        printf("%s holds no checkpoint yet: starting at step 0\n", o->out);
        return;
    }
    s->resumed = true;
    session_identify(s);
    snprintf(s->newest, sizeof s->newest, "%s", s->model_dir);
    const Json* j = &s->state.json;
    const JsonNode* saved = s->state.saved_options;
    s->saved_master = trainer_state_has_master(&s->state);
    const char* model = json_string(j, json_get(j, saved, "model"), NULL);
    if (o->given[OPT_model] && model && strcmp(o->model, model) != 0) {
        warn("--model: %s is not used, the run resumes with the model of %s", o->model, s->model_dir);
        o->given[OPT_model] = false;
    }
    must(options_merge(o, j, saved, &e), &e);
}

/* Finds the model: --model, or for a job that needs a trained model --out. */
static inline void session_find_start(Session* s) {
    const Options* o = &s->options;
    ModelConfig preset;
    if (!job_trains(s->job) && !o->given[OPT_model]) {
        session_find_checkpoint(s, o->out);
    } else if (is_directory(o->model) && !folder_has(o->model, "config.json")) {
        session_find_checkpoint(s, o->model);
    } else if (is_directory(o->model)) {
        session_take_folder(s, o->model);
    } else if (!config_preset(&preset, o->model, 1)) {
        die("--model: %s is neither a folder nor a preset, wanted a Hugging Face folder, dN, llama3.2-1b, llama3.2-3b, "
            "llama3.1-8b or llama3.1-70b\n"
            "  hint: python dev/data/model.py OWNER/NAME downloads a folder of the Hugging Face hub",
            o->model);
    } else if (!job_trains(s->job)) {
        die("--model: %s is a preset, an untrained model, wanted a folder with weights", o->model);
    }
}

/* Finds the weights: sets model_dir and, unless the model is a preset, config. */
static inline void session_find_model(Session* s) {
    Error e = NO_ERROR;
    if (s->options.resume && job_trains(s->job)) { session_resume(s); }
    if (!s->resumed) { session_find_start(s); }
    if (!s->model_dir[0]) { return; }
    must(model_check(s->model_dir, &s->config, &e), &e);
    char config[PATH_CAP];
    if (s->rank == 0 && path_join(config, s->model_dir, "config.json", &e)) { config_warn(&s->config, config); }
    if ((s->job == JOB_TRAIN || s->job == JOB_EXPORT) && s->rank == 0) { s->side_files = side_files_read(s->model_dir); }
}

/* Loads the weights of model_dir into the trainer's sink. */
static inline void session_load_weights(const Session* s, TensorSink sink, void* ctx) {
    const FileSums* sums = s->sums.count > 0 ? &s->sums : NULL;
    char folder[PATH_CAP];
    Error e = NO_ERROR;
    const bool ok = checkpoint_parent(s->model_dir, folder, &e) &&
                    model_load_sums(s->model_dir, &s->config, &s->table, sums, sink, ctx, &e);
    session_must_read(s, ok, folder, &e);
}

// ---------------------------------------------------------------------------------------------------------------------
// tokenizer

/* Returns whether `dir` has a tokenizer of either kind. */
static inline bool folder_has_tokenizer(const char* dir) {
    return folder_has(dir, "tokenizer.json") || folder_has(dir, "tokenizer.model");
}

/* Finds the tokenizer of a resumed run whose checkpoint lacks its copy: the one with the run's fingerprint, in one of the places
 * where the run may have got it. */
static inline void session_find_lost_tokenizer(Session* s) {
    const Options* o = &s->options;
    char data[PATH_CAP];
    folder_of(o->train, data);
    const char* const places[] = {o->tokenizer, o->model, data, NULL};
    for (int i = 0; i < 4; i++) {
        Error ignored = NO_ERROR;
        const bool built_in = i == 3;
        if (built_in) { tokenizer_bytes(&s->tokenizer); }
        if (!built_in && (!places[i] || !tokenizer_load(&s->tokenizer, places[i], &ignored))) { continue; }
        s->has_tokenizer = s->tokenizer.fingerprint == s->state.fingerprint;
        if (s->has_tokenizer) {
            warn("%s: holds no tokenizer: taking %s, which is the same", s->model_dir,
                 built_in ? "the built-in one" : places[i]);
            return;
        }
        tokenizer_free(&s->tokenizer);
    }
    die("%s: holds no tokenizer, but the run had one\n  hint: give the run's tokenizer with --tokenizer", s->model_dir);
}

/* Loads the tokenizer: --tokenizer, else the model folder's, else for a new model the one beside the training data. A resumed
 * run uses the copy in its checkpoint, since the file of the first --tokenizer may have moved. A default tokenizer that cannot
 * be read is no error, texts are then ids; but a run that had a tokenizer does not go on without it. */
static inline void session_find_tokenizer(Session* s) {
    const Options* o = &s->options;
    const bool has_copy = s->resumed && !o->given[OPT_tokenizer] && folder_has_tokenizer(s->model_dir);
    const bool had = s->resumed && s->state.fingerprint != 0;
    Error e = NO_ERROR;
    if (had && !o->given[OPT_tokenizer] && !folder_has_tokenizer(s->model_dir)) {
        session_find_lost_tokenizer(s);
        return;
    }
    if (o->tokenizer && !has_copy) {
        must(tokenizer_load(&s->tokenizer, o->tokenizer, &e), &e);
        s->has_tokenizer = true;
        return;
    }
    char dir[PATH_CAP];
    snprintf(dir, sizeof dir, "%s", s->model_dir);
    if (!dir[0] && o->train) { must(mix_folder(o->train, dir, &e), &e); }
    if (dir[0] && folder_has_tokenizer(dir)) {
        s->has_tokenizer = tokenizer_load(&s->tokenizer, dir, &e);
        if (!s->has_tokenizer && !had) { warn("%s: continuing without a tokenizer, texts are shown as ids", e.msg); }
    }
    if (had && !s->has_tokenizer) { die("%s\n  hint: give the run's tokenizer with --tokenizer", e.msg); }
}

// ---------------------------------------------------------------------------------------------------------------------
// data

/* Opens the token files of the job. Each rank reads its own rows of the training data. Every rank reads all validation data,
 * row by row, so that a file shorter than a batch is used whole. */
static inline void session_open_data(Session* s) {
    const Options* o = &s->options;
    const uint64_t seed = (uint64_t)o->seed;
    Error e = NO_ERROR;
    if (job_trains(s->job)) {
        must(mix_open(&s->mix, &s->train, o->train, o->batch, o->seq, s->rank, s->ranks, seed, &e), &e);
        s->has_train = true;
    }
    if (o->val && (job_trains(s->job) || s->job == JOB_EVAL)) {
        must(dataloader_open(&s->val, o->val, 1, o->seq, 0, 1, seed, false, &e), &e);
        s->has_val = true;
    }
}

/* Checks all data against the model and the tokenizer. */
static inline void session_check_data(Session* s) {
    const uint64_t tokenizer = s->has_tokenizer ? s->tokenizer.fingerprint : 0;
    Error e = NO_ERROR;
    if (s->has_train) { must(mix_check_vocab(&s->mix, s->config.vocab_size, tokenizer, &e), &e); }
    if (s->has_val) { must(dataloader_check_vocab(&s->val, s->config.vocab_size, tokenizer, &e), &e); }
}

/* Reads --tasks. With --eval the rows get the length of the longest, within --seq or else the model's context; in training
 * they have --seq. */
static inline void session_open_tasks(Session* s) {
    Options* o = &s->options;
    Error e = NO_ERROR;
    if (!o->tasks || (!job_trains(s->job) && s->job != JOB_EVAL)) { return; }
    if (!s->has_tokenizer) { die("--tasks: there is no tokenizer to encode the questions\n  hint: give one with --tokenizer"); }
    must(tasks_open(&s->tasks, o->tasks, &s->tokenizer, job_trains(s->job), &e), &e);
    s->has_tasks = true;
    if (s->job == JOB_EVAL) {
        const int most = o->given[OPT_seq] ? o->seq : s->config.max_positions;
        o->seq = (int)size_min(tasks_longest(&s->tasks), (size_t)most);
    }
    must(tasks_set_length(&s->tasks, o->seq, &e), &e);
    if (s->tasks.cut > 0 && s->rank == 0) {
        printf("tasks   %zu of %zu choices are longer than %d tokens: they lose the start of their context\n", s->tasks.cut,
               s->tasks.num_choices, o->seq);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// opening

/* Fills in the configuration of a new model. dN takes the tokenizer's vocabulary, else that of the data. */
static inline void session_new_config(Session* s) {
    int vocab = s->has_tokenizer ? s->tokenizer.vocab_size : 0;
    if (!s->has_tokenizer && s->has_train) {
        Tokenizer bytes;
        tokenizer_bytes(&bytes);
        if (s->train.fingerprint == bytes.fingerprint) {
            if (s->train.vocab_size && s->train.vocab_size != bytes.vocab_size) {
                die("%s: vocabulary is %d tokens, but the tokenizer that made it has %d: its header is damaged",
                    s->options.train, s->train.vocab_size, bytes.vocab_size);
            }
            s->tokenizer = bytes;
            s->has_tokenizer = true;
        } else {
            tokenizer_free(&bytes);
        }
        vocab = s->train.vocab_size;
        if (vocab == 0) { vocab = s->train.token_bytes == 2 ? 50257 : 128256; }  // llm.c's own files: GPT-2's or Llama 3's
    }
    config_preset(&s->config, s->options.model, vocab);
    if (s->has_tokenizer && s->config.bos_id < 0) { s->config.bos_id = s->tokenizer.bos_id; }
    if (s->has_tokenizer && s->config.num_eos == 0 && s->tokenizer.eos_id >= 0) {
        s->config.eos_ids[s->config.num_eos++] = s->tokenizer.eos_id;
    }
}

/* Takes the sampling of --generate and --chat from the model's generation_config.json, as far as it is there and not given. */
static inline void session_read_sampling(Session* s) {
    Options* o = &s->options;
    char path[PATH_CAP];
    Json j;
    int64_t top_k = o->top_k;
    double temperature = o->temperature, top_p = o->top_p;
    Error e = NO_ERROR;
    if (!folder_has(s->model_dir, "generation_config.json")) { return; }
    must(path_join(path, s->model_dir, "generation_config.json", &e) && json_read_file(&j, path, 16 << 20, &e), &e);
    const JsonNode* root = json_root(&j);
    must(o->given[OPT_temperature] || json_double_or(&j, root, "temperature", 0, 100, temperature, &temperature, &e), &e);
    must(o->given[OPT_top_k] || json_int_or(&j, root, "top_k", 0, INT_MAX, top_k, &top_k, &e), &e);
    must(o->given[OPT_top_p] || json_double_or(&j, root, "top_p", 1e-6, 1, top_p, &top_p, &e), &e);
    o->temperature = temperature;
    o->top_k = (int)top_k;
    o->top_p = top_p;
    json_free(&j);
}

/* Warns of flags that are possible, but hardly meant. A model that learns longer rows is one for these. */
static inline void session_check_sense(Session* s) {
    const Options* o = &s->options;
    if (s->plan.steps > 0 && o->warmup >= s->plan.steps && s->rank == 0) {
        warn("--warmup: %d of %lld steps: the learning rate never gets to --lr", o->warmup, (long long)s->plan.steps);
    }
    if (o->seq <= s->config.max_positions) { return; }
    if (s->rank == 0) {
        warn("--seq: is %d, but %s is for %d positions: the config.json of its checkpoints will say %d", o->seq,
             s->model_dir[0] ? s->model_dir : o->model, s->config.max_positions, o->seq);
    }
    s->config.max_positions = o->seq;
}

/* Opens a session, except for memory and --out, in the order above. This process is `rank` of `ranks`. */
static inline void session_open(Session* s, int argc, char** argv, OptionScope trainer, int rank, int ranks) {
    const Options* o = &s->options;
    Error e = NO_ERROR;
    memset(s, 0, sizeof *s);
    s->started = now_seconds();
    s->rank = rank;
    s->ranks = ranks;
    s->lock = -1;
    logger_none(&s->log);
    keep_standard_files();
    signal(SIGXFSZ, SIG_IGN);  // a write past the file-size limit then fails with a message instead of killing the process
    session_flags(s, argc, argv, trainer);
    if (o->verify) {  // needs no model, so no GPU
        verify(o->verify);
        exit(fflush(stdout) == 0 ? 0 : 1);
    }
    if (trainer == ON_CPU) { cpu_build(s->build, sizeof s->build); }  // the other trainer does not know its card yet
    session_find_model(s);
    if (s->job == JOB_GENERATE || s->job == JOB_CHAT) { session_read_sampling(s); }
    if (job_trains(s->job) || s->job == JOB_EVAL) { must(default_data(&s->options, &e), &e); }
    session_find_tokenizer(s);
    session_open_data(s);
    if (!s->model_dir[0]) { session_new_config(s); }
    if (s->has_tokenizer && s->tokenizer.vocab_size > s->config.vocab_size) {
        die("%s: has %d tokens, but the model %s has only %d\n  hint: give the model's own with --tokenizer",
            s->tokenizer.path ? s->tokenizer.path : "the built-in tokenizer", s->tokenizer.vocab_size,
            s->model_dir[0] ? s->model_dir : o->model, s->config.vocab_size);
    }
    if (!s->has_tokenizer && s->job != JOB_EVAL && s->rank == 0) { warn("there is no tokenizer: texts are shown as ids"); }
    session_check_data(s);
    session_open_tasks(s);
    s->table = param_table(&s->config);
    s->trained = trained_table(&s->config);
    if (!job_trains(s->job)) { return; }
    must(plan_make(&s->plan, o, ranks, s->train.rows_per_epoch, &e), &e);
    if (o->epochs > 0) {  // from here on the run is one with --steps
        s->options.steps = (int)s->plan.steps;
        s->options.given[OPT_steps] = true;
    }
    session_check_sense(s);
    if (s->resumed) {
        dataloader_seek(&s->train, s->state.tokens / (uint64_t)o->seq);
    } else {
        s->state.loss_scale = 1;
        run_id_draw(s->state.run);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// what has changed since the checkpoint

/* Returns the dtype of the weights in checkpoints; `own` is the dtype of the build, for --export-dtype auto. */
static inline SafeDtype session_export_dtype(const Session* s, SafeDtype own) {
    switch (s->options.export_dtype) {
        case EXPORT_F32: return SAFE_F32;
        case EXPORT_BF16: return SAFE_BF16;
        case EXPORT_F16: return SAFE_F16;
        default: return own;
    }
}

/* Returns the options with `dtype` in the place of --export-dtype auto: another build may resume the run. */
static inline Options session_resolved(const Session* s, SafeDtype dtype) {
    Options o = s->options;
    o.export_dtype = dtype == SAFE_F32 ? EXPORT_F32 : dtype == SAFE_BF16 ? EXPORT_BF16 : EXPORT_F16;
    return o;
}

/* Tells a difference from the checkpoint that the run resumes: a warning, or with --strict-resume an error. */
LLMC_PRINTF(2, 3) static void session_differs(const Session* s, const char* fmt, ...) {
    Error e = NO_ERROR;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(e.msg, sizeof e.msg, fmt, ap);
    va_end(ap);
    if (s->options.strict_resume) { die("%s\n  hint: without --strict-resume this is a warning", e.msg); }
    warn("%s", e.msg);
}

/* Tells of every saved flag on the command line that had another value. Files are compared by their fingerprints, and the
 * model of a run that is resumed is its checkpoint's. */
static inline void session_compare_options(const Session* s, SafeDtype own) {
    const Options now_all = session_resolved(s, session_export_dtype(s, own)), *o = &now_all;
    Options was;
    Error e = NO_ERROR;
    options_default(&was, o->trainer);
    must(options_merge(&was, &s->state.json, s->state.saved_options, &e), &e);
    for (int i = 0; i < NUM_OPTIONS; i++) {
        char flag[OPTION_TEXT], now[OPTION_TEXT], before[OPTION_TEXT];
        const char *a = option_text(o, i, now), *b = option_text(&was, i, before);
        const bool compared = option_specs[i].life == OPTION_SAVED && i != OPT_model && i != OPT_train && i != OPT_tokenizer;
        if (!compared || !o->given[i] || strcmp(a, b) == 0) { continue; }
        session_differs(s, "%s: is %s, was %s in %s", option_flag(i, flag), a, b, s->model_dir);
    }
    options_free(&was);
}

/* Tells of what else the bits of the results depend on. What the checkpoint does not know is not compared. Then the state
 * holds the values of this run. `own` is the dtype of the build. */
static inline void session_compare(Session* s, SafeDtype own) {
    TrainerState* was = &s->state;
    uint64_t data = 0;
    Error e = NO_ERROR;
    if (s->rank != 0) { return; }
    const uint64_t tokenizer = s->has_tokenizer ? s->tokenizer.fingerprint : 0;
    must(mix_fingerprint(&s->mix, &data, &e), &e);
    if (s->resumed) {
        session_compare_options(s, own);
        if (was->data && was->data != data) {
            session_differs(s, "--train: %s has the fingerprint %016" PRIx64 ", the data of %s had %016" PRIx64,
                            s->options.train, data, s->model_dir, was->data);
        }
        if (was->fingerprint && was->fingerprint != tokenizer) {
            session_differs(s, "--tokenizer: has the fingerprint %016" PRIx64 ", that of %s had %016" PRIx64, tokenizer,
                            s->model_dir, was->fingerprint);
        }
        if (was->build[0] && strcmp(was->build, s->build) != 0) {
            session_differs(s, "this build is (%s), that of %s was (%s): it may round elsewhere", s->build, s->model_dir,
                            was->build);
        }
        if (was->row_order != ROW_ORDER) {
            session_differs(s, "the order of rows is %d, in %s it was %d: rows of this epoch may come twice or not at all",
                            ROW_ORDER, s->model_dir, (int)was->row_order);
        }
    }
    was->data = data;
    was->fingerprint = tokenizer;
    was->row_order = ROW_ORDER;
    memcpy(was->build, s->build, sizeof was->build);
}

// ---------------------------------------------------------------------------------------------------------------------
// a training run

/* Prints options, machine, model and data before anything is allocated. `precision`: FP32, BF16 or FP16. */
static inline void session_print(const Session* s, const char* precision) {
    char count[32];
    if (s->rank != 0) { return; }
    options_print(stdout, &s->options);
    printf("machine %s\n", s->machine);
    print_model(stdout, s->model_dir[0] ? s->model_dir : s->options.model, &s->config, &s->table, precision);
    printf("data    %s: %s tokens in %d file%s\n", s->options.train, text_count(s->train.num_tokens, count, sizeof count),
           mix_num_files(&s->mix), mix_num_files(&s->mix) == 1 ? "" : "s");
    if (s->has_val) {
        printf("        %s: %s tokens for validation\n", s->options.val, text_count(s->val.num_tokens, count, sizeof count));
    }
    if (s->resumed) { printf("resume  %s, step %llu\n", s->model_dir, (unsigned long long)s->state.step); }
}

/* Locks --out unless it is, before anything is written there. Refuses a folder with the checkpoints of another run. */
static inline void session_lock(Session* s) {
    Error e = NO_ERROR;
    uint64_t* steps = NULL;
    size_t count = 0;
    const Options* o = &s->options;
    if (s->rank != 0) { return; }
    if (s->lock < 0) { session_take_out(s); }
    must(checkpoint_list(o->out, &steps, &count, &e), &e);
    if (count > 0 && !session_goes_on_in_out(s)) {
        die("--out: %s holds the checkpoints of another run, up to step %llu\n"
            "  hint: continue that run with --resume (without PATH), or give another --out",
            o->out, (unsigned long long)steps[0]);
    }
    free(steps);
}

/* Moves aside what lies behind the step that the run goes on from: checkpoints of a run that was set back, or damaged ones. */
static inline void session_set_aside(const Session* s) {
    size_t count = 0;
    Error e = NO_ERROR;
    must(checkpoint_set_aside(s->options.out, s->state.step, &count, &e), &e);
    if (count == 0) { return; }
    printf("aside   %zu checkpoint%s after step %llu in %s %s now step_N.set_back\n", count, count == 1 ? "" : "s",
           (unsigned long long)s->state.step, s->options.out, count == 1 ? "is" : "are");
}

/* Opens the log in --out, which must be locked, and writes the configuration or the resumption. From then on this is the run
 * that wrote last. */
static inline void session_begin(Session* s, const char* precision) {
    Error e = NO_ERROR;
    const Options* o = &s->options;
    if (s->rank != 0) { return; }
    must(logger_open(&s->log, o->out, s->resumed ? (int64_t)s->state.step : -1, &e), &e);
    if (s->resumed) {
        must(log_resume(&s->log, &s->state, s->model_dir, o, s->argc, s->argv, s->machine, &e), &e);
        session_set_aside(s);
        // a run that died while it removed old checkpoints
        if (!s->state.not_finite) { checkpoint_prune(o->out, o->keep, (uint64_t)o->major_every, s->state.step); }
    } else {
        must(log_config(&s->log, &s->state, o, s->argc, s->argv, &s->config, &s->table, precision, s->machine,
                        s->train.num_tokens, &e),
             &e);
    }
}

/* Returns the learning rate of step `step`, counted from 0. */
static inline double session_lr(const Session* s, int64_t step) {
    const Options* o = &s->options;
    return learning_rate((Schedule)o->schedule, step, s->plan.steps, o->warmup, o->lr, o->final_lr_frac);
}

/* Returns whether a task is due when `step` steps are done: every `every` steps (0: never) and at the end. */
static inline bool session_due(const Session* s, int every, int64_t step) {
    return (every > 0 && step % every == 0) || step == s->plan.stop;
}

/* Returns the positions that the job's KV cache needs: the prompt and the generated text. 0: the job generates nothing. */
static inline int session_context(const Session* s) {
    enum { CHAT_CONTEXT = 8192 };
    const Options* o = &s->options;
    const bool samples = job_trains(s->job);
    if (s->job == JOB_EVAL || (samples && o->sample_tokens == 0)) { return 0; }
    if (s->job == JOB_CHAT) { return s->config.max_positions < CHAT_CONTEXT ? s->config.max_positions : CHAT_CONTEXT; }
    TokenList prompt;
    Error e = NO_ERROR;
    memset(&prompt, 0, sizeof prompt);
    must(prompt_tokens(&prompt, samples ? o->prompt : o->generate, &s->config, s->has_tokenizer ? &s->tokenizer : NULL, &e),
         &e);
    const size_t count = prompt.count + (size_t)(samples ? o->sample_tokens : o->tokens);
    token_list_free(&prompt);
    if (count > INT32_MAX / 2) { die("--%s: is %zu tokens too long", samples ? "sample-tokens" : "tokens", count); }
    return (int)count;
}

// ---------------------------------------------------------------------------------------------------------------------
// a checkpoint

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
    }
    free(text);
    checkpoint_add_optional(k, "run.flags");
}

/* Writes a trainer's own files into a checkpoint's folder and lists them with checkpoint_add(). */
typedef bool (*AddFiles)(void* ctx, Checkpoint* k, Error* e);

/* Writes the tokenizer and the side files of the model. A failure is only a warning. */
static inline void session_add_side_files(const Session* s, Checkpoint* k) {
    Error e = NO_ERROR;
    if (s->has_tokenizer && !tokenizer_save(&s->tokenizer, k->tmp, s->config.max_positions, &e)) {
        warn("%s: this checkpoint will not have a tokenizer", e.msg);
        checkpoint_drop(k, "tokenizer.json");
        checkpoint_drop(k, "tokenizer_config.json");
    }
    checkpoint_add_optional(k, "tokenizer.json");
    checkpoint_add_optional(k, "tokenizer_config.json");
    checkpoint_side_files(k, &s->side_files, &s->config);
}

/* Writes the checkpoint into the log, which is opened again if its file is gone. A log that cannot be written is closed. */
static inline void session_log_checkpoint(Session* s, const Checkpoint* k, Error* e) {
    const bool ok =
        logger_reopen(&s->log, e) && log_checkpoint(&s->log, (int64_t)s->state.step, k->dir, file_sums_weights(&k->sums), e);
    if (!ok) { logger_close(&s->log); }
}

/* Seals a checkpoint whose tensors are all written: adds the optional files, logs it, and gives it its name. */
static inline bool session_seal(Session* s, Checkpoint* k, SafeDtype dtype, Error* log_error, Error* e) {
    const Options saved = session_resolved(s, dtype);
    char* options = options_json_text(&saved, &s->state.json, s->state.saved_options);
    s->state.seed = (uint64_t)s->options.seed;
    s->state.data_row = s->state.tokens / (uint64_t)s->options.seq;  // not train.row: a step that was dropped has read on
    s->state.world_size = s->ranks;
    s->state.options = options;
    session_add_side_files(s, k);
    session_add_flags(&saved, k);
    session_log_checkpoint(s, k, log_error);
    const bool ok = checkpoint_commit(k, &s->state, e);
    s->state.options = NULL;
    free(options);
    return ok;
}

/* Writes the checkpoint OUT/step_N of step state.step: the weights (F32, BF16 or F16), the optimizer state, the files of `add`
 * (or NULL), then the optional files. Then removes old checkpoints by --keep, unless the last step was not finite. Every rank
 * calls this: rank 0 makes the folder, writes the model and at the end seals the folder; each rank writes its own state in
 * between. Returns false if it cannot be written. A log that cannot be written does not hinder it: then the log is closed, and
 * *e says so. */
static inline bool session_checkpoint(Session* s, SafeDtype dtype, TensorSource weights, void* weights_ctx,
                                      const StateSlot* slots, int num_slots, AddFiles add, void* add_ctx, Error* e) {
    Checkpoint k;
    Error log_error = NO_ERROR;
    const Options* o = &s->options;
    const bool first = s->rank == 0;
    memset(&k, 0, sizeof k);
    bool ok = (s->lock < 0 || out_keep(&s->lock, o->out, e)) &&
              (first ? checkpoint_begin(&k, o->out, s->state.step, e) &&
                           checkpoint_model(&k, &s->config, &s->table, dtype, weights, weights_ctx, e)
                     : checkpoint_join(&k, o->out, s->state.step, e));
    ok = ok && checkpoint_state(&k, s->rank, &s->trained, 0, s->trained.elements, slots, num_slots, e);
    if (first) { ok = ok && (!add || add(add_ctx, &k, e)) && session_seal(s, &k, dtype, &log_error, e); }
    if (!ok) {
        checkpoint_abort(&k);
        return false;
    }
    snprintf(s->newest, sizeof s->newest, "%s", k.dir);
    if (first && !s->state.not_finite) { checkpoint_prune(o->out, o->keep, (uint64_t)o->major_every, s->state.step); }
    if (log_error.msg[0]) { fail(e, "%s", log_error.msg); }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// the end

/* Closes the session. Fails if stdout was not written and the job has no other output: a training run has its log. */
static inline void session_close(Session* s) {
    const bool failed = fflush(stdout) != 0 || ferror(stdout);
    if (failed && s->job != JOB_TRAIN && s->rank == 0) { die("standard output: writing failed"); }
    if (s->has_train) { mix_close(&s->mix); }
    if (s->has_val) { dataloader_close(&s->val); }
    if (s->has_tasks) { tasks_free(&s->tasks); }
    if (s->has_tokenizer) { tokenizer_free(&s->tokenizer); }
    if (s->resumed) { trainer_state_free(&s->state); }
    logger_close(&s->log);
    out_unlock(&s->lock);
    file_sums_free(&s->sums);
    side_files_free(&s->side_files);
    param_table_free(&s->table);
    param_table_free(&s->trained);
    options_free(&s->options);
}

#endif
