/* open.h -- opens a session: the job of the command line, the sources of weights, tokenizer and data, and the checks
 * between them.
 *
 * session_open() works in this order, so that the error that matters is the first. Nothing is written before all is checked.
 *
 *   flags -> lock of --out, if the run resumes and it exists -> checkpoint to resume, with its options
 *   -> model folder or preset -> tokenizer -> data files -> plan
 *
 * Then session_compare() reports changes since the checkpoint, the trainer checks its memory, session_load_weights() fills the
 * model, and session_lock() locks --out. Last, session_begin() opens the log and moves aside every checkpoint after the step
 * that the run resumes.
 *
 * --verify needs nothing but the flags: it finds its folders itself.
 *
 * --model may be a model folder, a folder of adapters (adapter.h), a folder of checkpoints (the newest whole one is used), or a
 * preset. Jobs that need a trained model use the newest checkpoint of --out if --model is not given.
 */
#ifndef LLMC_OPEN_H
#define LLMC_OPEN_H

#include "llmc/base/utils.h"

#include "llmc/dist/buckets.h"           // defines: Buckets, buckets_list, buckets_free, shard_ranges
#include "llmc/run/session/lora_base.h"  // defines: session_find_base
#include "llmc/base/progress.h"          // defines: Progress, progress_begin, progress_end
#include "llmc/run/session/machine.h"    // defines: cpu_build
#include "llmc/run/session/session.h"    // defines: Session, session_must_read
#include "llmc/run/session/resume.h"     // defines: session_resume, session_check_out
#include "llmc/text/tokenizer_read.h"    // defines: tokenizer_load, folder_has_tokenizer

#include <signal.h>

// ---------------------------------------------------------------------------------------------------------------------
// flags

/* Settles --out. A run that resumes from --resume PATH continues in the folder of PATH, unless --out is given. Slashes at the
 * end, which a shell adds to the name of a folder, are removed. */
static inline bool session_settle_out(Options* o, Error* e) {
    char parent[PATH_CAP];
    const char* out = o->out;
    if (o->resume && !o->given[OPT_out] && is_directory(o->resume)) {
        out = o->resume;
        if (folder_is_checkpoint(out)) {
            if (!checkpoint_parent(out, parent, e)) { return false; }
            out = parent;
        }
    }
    char* text = xstrdup(out);
    for (size_t n = strlen(text); n > 1 && text[n - 1] == '/'; n--) { text[n - 1] = 0; }
    free(o->merged_text[OPT_out]);
    o->out = o->merged_text[OPT_out] = text;
    return true;
}

/* Parses the command line. Exits after --help and --version, and on wrong usage. */
static inline void session_flags(Session* s, int argc, char** argv, OptionScope trainer) {
    const Options* o = &s->chosen;
    s->process.argc = argc;
    s->process.argv = argv;
    options_or_exit(&s->chosen, argc, argv, trainer);
    s->process.job = o->generate  ? JOB_GENERATE
                     : o->chat    ? JOB_CHAT
                     : o->eval    ? JOB_EVAL
                     : o->dry_run ? JOB_DRY_RUN
                                  : JOB_TRAIN;
    if (o->answer) { s->process.job = JOB_ANSWER; }
    if (o->export_) { s->process.job = JOB_EXPORT; }
    if (o->verify) { s->process.job = JOB_VERIFY; }
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    if (o->threads > 2 * cores && s->process.rank == 0) {
        warn("--threads: %d on %ld core%s: threads that wait for a core hold up the others", o->threads, cores,
             text_plural(cores));
    }
    Error e = NO_ERROR;
    must(session_settle_out(&s->chosen, &e), &e);
    must(options_read_text(&s->chosen, OPT_generate, &e) && options_read_text(&s->chosen, OPT_system, &e), &e);
}

#define DEFAULT_DATA "dev/data/tinytales/"

/* Sets --train and --val to the tinytales data if --train is missing (with --eval: --val, if --tasks is missing too). A new
 * model without --tokenizer then gets the data's tokenizer. If the data has not been built, a dry run does without, if the
 * vocabulary is known; else fails. */
static inline bool default_data(Options* o, Error* e) {
    const bool wanted = o->eval ? !o->val && !o->tasks : !o->train;
    if (!wanted) { return true; }
    const char* missing = o->eval ? DEFAULT_DATA "tinytales_val.bin" : DEFAULT_DATA "tinytales_train.bin";
    if (!file_exists(missing)) {
        ModelConfig preset;
        const bool plain = config_preset(&preset, o->model, 1) && preset.vocab_size == 1 && !o->tokenizer;
        if (o->dry_run && o->epochs == 0 && !plain) { return true; }
        return fail(e, "%s: is not given, and the default %s does not exist\n  hint: make %s", o->eval ? "--val" : "--train",
                    missing, DEFAULT_DATA "tinytales_train.bin");
    }
    if (!o->train) { o->train = DEFAULT_DATA "tinytales_train.bin"; }
    if (!o->val && file_exists(DEFAULT_DATA "tinytales_val.bin")) { o->val = DEFAULT_DATA "tinytales_val.bin"; }
    if (!o->tokenizer && !is_directory(o->model)) { o->tokenizer = DEFAULT_DATA "tokenizer.json"; }
    return true;
}

/* Refuses a --seq-parallel that does not divide rows, heads or ranks, as far as these are known yet. Writes the tokens of a
 * step, which depend on the groups, into the options: a run that resumes without the flag finds them there. */
static inline void session_check_share(Session* s) {
    Options* o = &s->chosen;
    const int parts = o->seq_parallel;
    const struct {
        int count;
        const char* what;
    } shared[] = {{s->process.ranks, "processes"},
                  {o->seq, "tokens of a row (--seq)"},
                  {s->spec.config.num_heads, "query heads of the model"},
                  {s->spec.config.num_kv_heads, "key heads of the model"}};
    if (parts == 1) { return; }
    if (!job_trains(s->process.job)) { die_usage("--seq-parallel: shares the rows of a training step, wanted no other job"); }
    if (s->process.ranks == 1) {
        die("--seq-parallel: is %d, but there is one process\n  hint: --gpus %d starts as many", parts, parts);
    }
    for (size_t i = 0; i < sizeof shared / sizeof *shared; i++) {
        if (shared[i].count % parts == 0) { continue; }
        die("--seq-parallel: is %d, wanted a divisor of the %d %s", parts, shared[i].count, shared[i].what);
    }
    if (o->total_batch == 0) { o->total_batch = (int64_t)o->batch * o->seq * session_share(s).groups; }
}

/* Refuses a number of blocks that the model does not have. */
static inline void session_check_recompute(const Session* s) {
    const int blocks = s->chosen.recompute.blocks[0];
    char text[OPTION_TEXT];
    if (blocks == ALL_BLOCKS || blocks <= s->spec.config.num_layers) { return; }
    die("--recompute: is %s, but the model has %d blocks", option_text(&s->chosen, OPT_recompute, text),
        s->spec.config.num_layers);
}

// ---------------------------------------------------------------------------------------------------------------------
// weights

/* Moves the checksums out of a checkpoint's state into the session and frees the rest. */
static inline void session_take_sums(Session* s, TrainerState* found) {
    s->start.sums = found->files;
    s->run.state.base = found->base;
    memset(&found->files, 0, sizeof found->files);
    trainer_state_free(found);
}

/* Takes the newest checkpoint of a folder as the model. Uses only its weights, not its run. */
static inline void session_find_checkpoint(Session* s, const char* folder) {
    Error e = NO_ERROR;
    TrainerState found;
    const bool ok = checkpoint_open(folder, CHECKPOINT_MODEL, session_screen(s), s->start.dir, &found, &e);
    session_must_read(s, ok, folder, &e);
    session_take_sums(s, &found);
}

/* Takes a model folder given by name. If it is a checkpoint, its weights must match the saved checksums; the user may change
 * the other files. transformers' Trainer also writes a trainer_state.json: such a file is ignored. */
static inline void session_take_folder(Session* s, const char* folder) {
    char path[PATH_CAP];
    TrainerState found;
    Error e = NO_ERROR;
    snprintf(s->start.dir, sizeof s->start.dir, "%s", folder);
    must(path_join(path, folder, "trainer_state.json", &e), &e);
    if (trainer_state_read(&found, path, &e)) {
        session_take_sums(s, &found);
    } else {
        trainer_state_free(&found);
    }
}

/* Finds the model: --model, or for a job that needs a trained model --out. */
static inline void session_find_start(Session* s) {
    const Options* o = &s->chosen;
    ModelConfig preset;
    if (!job_trains(s->process.job) && !o->given[OPT_model]) {
        session_find_checkpoint(s, o->out);
    } else if (is_directory(o->model) && !folder_has(o->model, "config.json") && !folder_is_adapter(o->model)) {
        session_find_checkpoint(s, o->model);
    } else if (is_directory(o->model)) {
        session_take_folder(s, o->model);
    } else if (!config_preset(&preset, o->model, 1)) {
        die("--model: %s is neither a folder nor a preset, wanted a Hugging Face folder, dN, llama3.2-1b, llama3.2-3b, "
            "llama3.1-8b or llama3.1-70b\n"
            "  hint: python3 dev/data/model.py OWNER/NAME downloads a folder of the Hugging Face hub",
            o->model);
    } else if (!job_trains(s->process.job)) {
        die("--model: %s is a preset, an untrained model, wanted a folder with weights", o->model);
    }
}

/* Finds the weights: sets model_dir and, unless the model is a preset, config. */
static inline void session_find_model(Session* s, const FoundCheckpoint* found) {
    Error e = NO_ERROR;
    if (s->chosen.resume && job_trains(s->process.job)) { session_resume(s, found); }
    if (!s->start.resumed) { session_find_start(s); }
    session_find_base(s);
    if (!s->start.dir[0]) { return; }
    const LoraConfig lora = s->spec.config.lora;
    must(model_check(s->start.base_dir, &s->spec.config, &e), &e);
    s->spec.config.lora = lora;
    session_check_adapters(s);
    char config[PATH_CAP];
    if (s->process.rank == 0 && path_join(config, s->start.base_dir, "config.json", &e)) {
        config_warn(&s->spec.config, config);
    }
    if ((s->process.job == JOB_TRAIN || s->process.job == JOB_EXPORT) && s->process.rank == 0) {
        s->start.side_files = side_files_read(session_text_dir(s));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// tokenizer

/* Finds the tokenizer of a resumed run whose checkpoint lacks its copy: the one with the run's fingerprint, in one of the
 * places where the run may have got it. */
static inline void session_find_lost_tokenizer(Session* s) {
    const Options* o = &s->chosen;
    char data[PATH_CAP];
    Error e = NO_ERROR;
    must(mix_folder(o->train, data, &e), &e);
    const char* const places[] = {o->tokenizer, o->model, data, NULL};
    for (int i = 0; i < 4; i++) {
        Error ignored = NO_ERROR;
        const bool built_in = i == 3;
        if (built_in) { tokenizer_bytes(&s->data.tokenizer); }
        if (!built_in && (!places[i] || !tokenizer_load(&s->data.tokenizer, places[i], &ignored))) { continue; }
        s->data.has_tokenizer = s->data.tokenizer.fingerprint == s->run.state.fingerprint;
        if (s->data.has_tokenizer) {
            warn("%s: holds no tokenizer: taking %s, which is the same", s->start.dir,
                 built_in ? "the built-in one" : places[i]);
            return;
        }
        tokenizer_free(&s->data.tokenizer);
    }
    die("%s: holds no tokenizer, but the run had one\n  hint: give the run's tokenizer with --tokenizer", s->start.dir);
}

/* Loads the tokenizer: --tokenizer, otherwise the one in the model folder, otherwise (for a new model) the one beside the
 * training data. A resumed run uses the copy in its checkpoint, since the file of the first --tokenizer may have moved. A
 * default tokenizer that cannot be read is no error: texts are then ids. But a run that had a tokenizer does not continue
 * without it. */
static inline void session_find_tokenizer(Session* s) {
    const Options* o = &s->chosen;
    const bool has_copy = s->start.resumed && !o->given[OPT_tokenizer] && folder_has_tokenizer(s->start.dir);
    const bool had = s->start.resumed && s->run.state.fingerprint != 0;
    Error e = NO_ERROR;
    if (had && !o->given[OPT_tokenizer] && !folder_has_tokenizer(s->start.dir)) {
        session_find_lost_tokenizer(s);
        return;
    }
    if (o->tokenizer && !has_copy) {
        must(tokenizer_load(&s->data.tokenizer, o->tokenizer, &e), &e);
        s->data.has_tokenizer = true;
        return;
    }
    char dir[PATH_CAP];
    snprintf(dir, sizeof dir, "%s", session_text_dir(s));
    if (!dir[0] && o->train) { must(mix_folder(o->train, dir, &e), &e); }
    if (dir[0] && folder_has_tokenizer(dir)) {
        s->data.has_tokenizer = tokenizer_load(&s->data.tokenizer, dir, &e);
        if (!s->data.has_tokenizer && options_export_gguf(o)) { die("%s", e.msg); }
        if (!s->data.has_tokenizer && !had) { warn("%s: continuing without a tokenizer, texts are shown as ids", e.msg); }
    }
    if (had && !s->data.has_tokenizer) { die("%s\n  hint: give the run's tokenizer with --tokenizer", e.msg); }
}

/* Reports the consequences of having no tokenizer. An export still copies a tokenizer that this program cannot read. */
static inline void session_warn_of_no_tokenizer(const Session* s) {
    if (s->data.has_tokenizer || s->process.job == JOB_EVAL || s->process.rank != 0) { return; }
    if (s->process.job != JOB_EXPORT) {
        warn("there is no tokenizer: texts are shown as ids");
    } else if (!folder_has_tokenizer(session_text_dir(s)) && !options_export_gguf(&s->chosen)) {
        warn("there is no tokenizer: the export has none either");
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// data

/* Returns how rows are made: documents begin with the separator of ./tokenize, which is the tokenizer's BOS or, without BOS,
 * its EOS. A new model without a tokenizer may turn out to have the built-in one. */
static inline RowRule session_row_rule(const Session* s, Progress* scan) {
    RowRule r;
    memset(&r, 0, sizeof r);
    r.documents = (Documents)s->chosen.documents;
    r.bos = s->start.dir[0] ? s->spec.config.bos_id : -1;
    r.progress = s->process.rank == 0 ? scan : NULL;
    Tokenizer bytes;
    const bool built_in = !s->data.has_tokenizer && !s->start.dir[0];
    if (built_in) { tokenizer_bytes(&bytes); }
    const Tokenizer* t = built_in ? &bytes : s->data.has_tokenizer ? &s->data.tokenizer : NULL;
    if (t) {
        r.bos = t->bos_id >= 0 ? t->bos_id : t->eos_id;
        r.fingerprint = t->fingerprint;
        r.certain = !built_in;
    }
    if (built_in) { tokenizer_free(&bytes); }
    return r;
}

/* Opens the token files of the job. Each group of ranks that share rows reads its own rows of the training data. Every rank
 * reads all validation data, row by row, so that a file shorter than a batch is used whole. */
static inline void session_open_data(Session* s) {
    const Options* o = &s->chosen;
    const uint64_t seed = (uint64_t)o->seed;
    const SequenceShare share = session_share(s);
    const BatchShare batches = {o->batch, o->seq, share.group, share.groups}, alone = {1, o->seq, 0, 1};
    Progress scan = progress_begin(stdout, "index", 0, "B");
    const RowRule rule = session_row_rule(s, &scan);
    Error e = NO_ERROR;
    if (job_trains(s->process.job) && o->train) {
        must(mix_open(&s->data.mix, &s->data.train, o->train, batches, seed, &rule, &e), &e);
        s->data.has_train = true;
    }
    if (o->val && (job_trains(s->process.job) || s->process.job == JOB_EVAL)) {
        must(dataloader_open(&s->data.val, o->val, alone, seed, false, &rule, &e), &e);
        s->data.has_val = true;
    }
    progress_end(&scan);
}

/* Checks all data against the model and the tokenizer. */
static inline void session_check_data(Session* s) {
    const uint64_t tokenizer = s->data.has_tokenizer ? s->data.tokenizer.fingerprint : 0;
    Error e = NO_ERROR;
    if (s->data.has_train) { must(mix_check_vocab(&s->data.mix, s->spec.config.vocab_size, tokenizer, &e), &e); }
    if (s->data.has_val) { must(dataloader_check_vocab(&s->data.val, s->spec.config.vocab_size, tokenizer, &e), &e); }
}

/* Reads --tasks. With --eval, rows are as long as the longest question, within --seq or, without it, within the model's
 * context. In training rows have --seq tokens. */
static inline void session_open_tasks(Session* s) {
    Options* o = &s->chosen;
    Error e = NO_ERROR;
    if (!o->tasks || (!job_trains(s->process.job) && s->process.job != JOB_EVAL)) { return; }
    if (!s->data.has_tokenizer) {
        die("--tasks: there is no tokenizer to encode the questions\n  hint: give one with --tokenizer");
    }
    must(tasks_open(&s->data.tasks, o->tasks, &s->data.tokenizer, job_trains(s->process.job), &e), &e);
    s->data.has_tasks = true;
    if (s->process.job == JOB_EVAL) {
        const int most = o->given[OPT_seq] ? o->seq : s->spec.config.max_positions;
        o->seq = (int)size_min(tasks_longest(&s->data.tasks), (size_t)most);
    }
    must(tasks_set_length(&s->data.tasks, o->seq, &e), &e);
    if (s->data.tasks.cut > 0 && s->process.rank == 0) {
        printf("tasks   %zu of %zu choices are longer than %d tokens: they lose the start of their context\n",
               s->data.tasks.cut, s->data.tasks.num_choices, o->seq);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// all of it

/* Fills in the configuration of a new model. dN takes the tokenizer's vocabulary, otherwise the vocabulary of the data. */
static inline void session_new_config(Session* s) {
    int vocab = s->data.has_tokenizer ? s->data.tokenizer.vocab_size : 0;
    if (!s->data.has_tokenizer && s->data.has_train) {
        Tokenizer bytes;
        tokenizer_bytes(&bytes);
        if (s->data.train.fingerprint == bytes.fingerprint) {
            if (s->data.train.vocab_size && s->data.train.vocab_size != bytes.vocab_size) {
                die("%s: vocabulary is %d tokens, but the tokenizer that made it has %d: its header is damaged",
                    s->chosen.train, s->data.train.vocab_size, bytes.vocab_size);
            }
            s->data.tokenizer = bytes;
            s->data.has_tokenizer = true;
        } else {
            tokenizer_free(&bytes);
        }
        vocab = s->data.train.vocab_size;
        if (vocab == 0) {
            vocab = s->data.train.token_bytes == 2 ? 50257 : 128256;
        }  // llm.c's files: tokens of GPT-2 or Llama 3
    }
    config_preset(&s->spec.config, s->chosen.model, vocab);
    if (s->data.has_tokenizer && s->spec.config.bos_id < 0) { s->spec.config.bos_id = s->data.tokenizer.bos_id; }
    if (s->data.has_tokenizer && s->spec.config.num_eos == 0 && s->data.tokenizer.eos_id >= 0) {
        // it ends an answer: a program that loads the folder for a chat has to stop there
        const int eot = tokenizer_find(&s->data.tokenizer, "<|eot_id|>");
        s->spec.config.eos_ids[s->spec.config.num_eos++] = s->data.tokenizer.eos_id;
        if (eot >= 0 && eot != s->data.tokenizer.eos_id) { s->spec.config.eos_ids[s->spec.config.num_eos++] = eot; }
    }
}

/* Takes the sampling of a job that speaks from the model's generation_config.json, unless flags give it. */
static inline void session_read_sampling(Session* s) {
    Options* o = &s->chosen;
    char path[PATH_CAP];
    Json j;
    int64_t top_k = o->top_k;
    double temperature = o->temperature, top_p = o->top_p;
    Error e = NO_ERROR;
    const char* dir = folder_has(s->start.dir, "generation_config.json") ? s->start.dir : s->start.base_dir;
    if (!folder_has(dir, "generation_config.json")) { return; }
    must(path_join(path, dir, "generation_config.json", &e) && json_read_file(&j, path, 16 << 20, &e), &e);
    const JsonNode* root = json_root(&j);
    must(o->given[OPT_temperature] || json_double_or(&j, root, "temperature", 0, 100, &temperature, &e), &e);
    must(o->given[OPT_top_k] || json_int_or(&j, root, "top_k", 0, INT_MAX, &top_k, &e), &e);
    must(o->given[OPT_top_p] || json_double_or(&j, root, "top_p", 1e-6, 1, &top_p, &e), &e);
    o->temperature = temperature;
    o->top_k = (int)top_k;
    o->top_p = top_p;
    json_free(&j);
}

/* Warns of flags that do nothing without --val or --tasks. */
static inline void session_warn_of_no_data(const Session* s) {
    const Options* o = &s->chosen;
    const struct {
        int flag;
        bool on, has_data;
        const char* data;
    } flags[] = {
        {OPT_patience, o->patience > 0, s->data.has_val, "--val"},
        {OPT_checkpoint_best, o->checkpoint_best, s->data.has_val, "--val"},
        {OPT_eval_every, o->eval_every > 0, s->data.has_tasks, "--tasks"},
    };
    for (size_t i = 0; s->process.rank == 0 && i < sizeof flags / sizeof *flags; i++) {
        char flag[OPTION_TEXT];
        if (!flags[i].on || flags[i].has_data) { continue; }
        warn("%s: does nothing without %s", option_flag(flags[i].flag, flag), flags[i].data);
    }
}

/* Warns of flags that are possible, but probably a mistake. A model that is trained on longer rows becomes a model for
 * these. */
static inline void session_check_sense(Session* s) {
    const Options* o = &s->chosen;
    if (s->run.plan.steps > 0 && o->warmup >= s->run.plan.steps && s->process.rank == 0) {
        warn("--warmup: %d of %lld steps: the learning rate never gets to --lr", o->warmup, (long long)s->run.plan.steps);
    }
    session_warn_of_no_data(s);
    if (o->seq <= s->spec.config.max_positions) { return; }
    const char* model = s->start.dir[0] ? s->start.base_dir : o->model;
    if (s->spec.config.lora.rank > 0) {
        if (s->process.rank == 0) {
            warn("--seq: is %d, but %s is for %d positions", o->seq, model, s->spec.config.max_positions);
        }
        return;
    }
    if (s->process.rank == 0) {
        warn("--seq: is %d, but %s is for %d positions: the config.json of its checkpoints will say %d", o->seq, model,
             s->spec.config.max_positions, o->seq);
    }
    s->spec.config.max_positions = o->seq;
}

/* Refuses the state of another optimizer. */
static inline void session_check_optimizer(const Session* s) {
    const char* word = optimizer_rules[s->spec.config.optimizer].word;
    if (s->start.resumed && job_trains(s->process.job) && strcmp(s->run.state.optimizer, word) != 0) {
        die("%s: its state is of the optimizer %s, but this run's is %s\n  hint: a new run can start from its weights: --model "
            "%s",
            s->start.dir, s->run.state.optimizer, word, s->start.dir);
    }
}

/* Lays out the tensors for the ranks of the run. */
static inline void session_lay_out(Session* s) {
    s->spec.config.optimizer = RULE_OF_RUN;
    session_check_optimizer(s);
    s->spec.table = param_table_for(&s->spec.config, s->process.ranks);
    s->spec.trained = trained_table_for(&s->spec.config, s->process.ranks);
    Buckets buckets = buckets_list(&s->spec.trained);
    s->spec.owned = shard_ranges(&buckets, s->process.rank);
    buckets_free(&buckets);
}

/* Opens a session, except for memory and --out, in the order above. This process is `rank` of `ranks`;
 * found: the checkpoint that rank 0 has reported. */
static inline void session_open(Session* s, int argc, char** argv, OptionScope trainer, int rank, int ranks,
                                FoundCheckpoint found) {
    const Options* o = &s->chosen;
    Error e = NO_ERROR;
    memset(s, 0, sizeof *s);
    s->process.started = now_seconds();
    s->process.rank = rank;
    s->process.ranks = ranks;
    s->run.lock = -1;
    logger_none(&s->run.log);
    keep_standard_files();
    signal(SIGXFSZ, SIG_IGN);  // a write past the file-size limit then fails with a message instead of killing the process
    session_flags(s, argc, argv, trainer);
    if (s->process.job == JOB_VERIFY) { return; }
    if (trainer == ON_CPU) {
        cpu_build(s->process.build, sizeof s->process.build);
    }  // the other trainer does not know its card yet
    session_find_model(s, &found);
    if (session_writes(s) && !out_is_locked(o->out)) { session_check_out(s); }  // session_lock() says who has locked it
    session_check_share(s);
    if (job_speaks(s->process.job)) { session_read_sampling(s); }
    if (job_trains(s->process.job) || s->process.job == JOB_EVAL) { must(default_data(&s->chosen, &e), &e); }
    session_find_tokenizer(s);
    session_open_data(s);
    if (!s->start.dir[0]) {
        const LoraConfig lora = s->spec.config.lora;
        session_new_config(s);
        s->spec.config.lora = lora;
    }
    session_check_share(s);
    session_check_recompute(s);
    if (s->data.has_tokenizer && s->data.tokenizer.vocab_size > s->spec.config.vocab_size) {
        die("%s: has %d tokens, but the model %s has only %d\n  hint: give the model's own with --tokenizer",
            s->data.tokenizer.path ? s->data.tokenizer.path : "the built-in tokenizer", s->data.tokenizer.vocab_size,
            s->start.dir[0] ? s->start.base_dir : o->model, s->spec.config.vocab_size);
    }
    session_warn_of_no_tokenizer(s);
    session_check_data(s);
    session_open_tasks(s);
    session_lay_out(s);
    if (!job_trains(s->process.job)) { return; }
    must(plan_make(&s->run.plan, o, session_share(s).groups, s->data.train.rows_per_epoch, &e), &e);
    if (o->epochs > 0) {  // from here on this is a run with --steps
        s->chosen.steps = (int)s->run.plan.steps;
        s->chosen.given[OPT_steps] = true;
    }
    if (o->given[OPT_steps]) {
        memset(&s->run.state.shortened, 0, sizeof s->run.state.shortened);
    }  // the user sets the end anew
    if (s->run.state.shortened.steps) { plan_shorten(&s->run.plan, s->run.state.shortened.steps); }
    session_check_sense(s);
    if (s->start.resumed) {
        dataloader_seek(&s->data.train, s->run.state.tokens / (uint64_t)o->seq);
    } else {
        s->run.state.loss_scale = 1;
        run_id_draw(s->run.state.run);
    }
}

#endif
