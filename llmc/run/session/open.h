/* open.h -- opens the program: the job of the command line, the sources of weights, tokenizer and data, and the checks
 * between them.
 *
 * program_open() works in this order, so that the error that matters is the first. Nothing is written before all is checked.
 *
 *   flags -> lock of --out, if the run resumes and it exists -> checkpoint to resume, with its options
 *   -> model folder or preset -> tokenizer -> data files -> plan
 *
 * Training continues in loop/train.h: run_compare() reports changes since the checkpoint, the trainer checks its memory,
 * model_create() fills the model, and out_take() locks --out. Last, run_begin() opens the log and moves aside every checkpoint
 * after the step that the run resumes.
 *
 * --verify needs nothing but the flags: it finds its folders itself.
 *
 * --model may be a model folder, a folder of adapters (adapter.h), a folder of checkpoints (the newest whole one is used), or a
 * preset. Jobs that need a trained model use the newest checkpoint of --out if --model is not given.
 */
#ifndef LLMC_OPEN_H
#define LLMC_OPEN_H

#include "llmc/base/utils.h"

#include "llmc/dist/buckets.h"          // defines: Buckets, buckets_list, buckets_free, shard_ranges
#include "llmc/run/session/choose.h"    // defines: choose_typed, choose_lora, choose_total_batch, choose_sampling, choose_data
#include "llmc/files/adapter.h"         // defines: AdapterConfig, folder_is_adapter, adapter_read_config, adapter_check
#include "llmc/base/progress.h"         // defines: Progress, progress_begin, progress_end
#include "llmc/run/session/machine.h"   // defines: cpu_build
#include "llmc/run/session/no_model.h"  // defines: die_of_no_model, holds_model, holds_checkpoints
#include "llmc/run/session/session.h"   // defines: Program, Process, Start, ModelSpec, Data, Run, run_must_read
#include "llmc/run/session/resume.h"    // defines: run_resume, out_check
#include "llmc/text/chat.h"             // defines: ChatForm, chat_form_open, chat_template
#include "llmc/text/tokenizer_read.h"   // defines: tokenizer_load, folder_has_tokenizer

#include <signal.h>

// ---------------------------------------------------------------------------------------------------------------------
// flags

static inline Job job_of(const Options* o) {
    if (o->generate) { return JOB_GENERATE; }
    if (o->chat) { return JOB_CHAT; }
    if (o->answer) { return JOB_ANSWER; }
    if (o->eval) { return JOB_EVAL; }
    if (o->export_) { return JOB_EXPORT; }
    if (o->verify) { return JOB_VERIFY; }
    return o->dry_run ? JOB_DRY_RUN : JOB_TRAIN;
}

static inline void warn_of_threads(int threads) {
    const long cores = os_cores();
    if (threads <= 2 * cores) { return; }
    warn("--threads: %d on %ld core%s: threads that wait for a core hold up the others", threads, cores, text_plural(cores));
}

/* Refuses an --offload of one GPU for several. */
static inline void check_offload(const Options* o, const Process* p) {
    if (o->offload <= OFFLOAD_OPTIMIZER || p->ranks == 1) { return; }
    char text[OPTION_TEXT];
    die("--offload: is %s, wanted off or optimizer for %d processes\n  hint: --offload optimizer --zero %d lets them share "
        "this",
        option_text(o, OPT_offload, text), p->ranks, o->offload == OFFLOAD_WEIGHTS ? 3 : 2);
}

/* Refuses a --seq-parallel that does not divide rows, heads or ranks, as far as these are known yet. */
static inline void check_share(const Options* o, const Process* p, const ModelConfig* c) {
    const int parts = o->seq_parallel;
    const struct {
        int count;
        const char* what;
    } shared[] = {{p->ranks, "processes"},
                  {o->seq, "tokens of a row (--seq)"},
                  {c->num_heads, "query heads of the model"},
                  {c->num_kv_heads, "key heads of the model"}};
    if (parts == 1) { return; }
    if (!job_trains(p->job)) { die_usage("--seq-parallel: shares the rows of a training step, wanted no other job"); }
    if (p->ranks == 1) {
        die("--seq-parallel: is %d, but there is one process\n  hint: --gpus %d starts as many", parts, parts);
    }
    for (size_t i = 0; i < sizeof shared / sizeof *shared; i++) {
        if (shared[i].count % parts == 0) { continue; }
        die("--seq-parallel: is %d, wanted a divisor of the %d %s", parts, shared[i].count, shared[i].what);
    }
}

/* Refuses a number of blocks that the model does not have. */
static inline void check_recompute(const Options* o, int layers) {
    const int blocks = o->recompute.blocks[0];
    char text[OPTION_TEXT];
    if (blocks == ALL_BLOCKS || blocks <= layers) { return; }
    die("--recompute: is %s, but the model has %d blocks", option_text(o, OPT_recompute, text), layers);
}

// ---------------------------------------------------------------------------------------------------------------------
// weights

/* Moves the checksums and --seq out of a checkpoint's state and frees the rest. Returns the checksum of its adapters' base. */
static inline uint64_t take_sums(FileSums* sums, int* seq, TrainerState* found) {
    const uint64_t base = found->base;
    int64_t T = 0;
    Error ignored = NO_ERROR;
    if (json_int(&found->json, found->saved_options, "seq", 1, INT_MAX, &T, &ignored)) { *seq = (int)T; }
    *sums = found->files;
    memset(&found->files, 0, sizeof found->files);
    trainer_state_free(found);
    return base;
}

/* take_sums() of a model folder given by name. If it is a checkpoint, its weights must match the saved checksums; the user may
 * change the other files. transformers' Trainer also writes a trainer_state.json: such a file is ignored. */
static inline uint64_t take_folder_sums(FileSums* sums, int* seq, const char* folder) {
    char path[PATH_CAP];
    TrainerState found;
    Error e = NO_ERROR;
    must(path_join(path, folder, "trainer_state.json", &e), &e);
    if (trainer_state_read(&found, path, &e)) { return take_sums(sums, seq, &found); }
    trainer_state_free(&found);
    return 0;
}

/* Takes the newest checkpoint of a folder as the model. Uses only its weights, not its run. */
static inline void start_at_checkpoint(Start* start, Run* run, const char* folder, FILE* screen) {
    Error e = NO_ERROR;
    TrainerState found;
    const bool ok = checkpoint_open(folder, CHECKPOINT_MODEL, screen, start->dir, &found, &e);
    run_must_read(run, ok, folder, &e);
    run->state.base = take_sums(&start->sums, &start->seq, &found);
}

/* Finds the model: --model, or for a job that needs a trained model --out. */
static inline void start_find(Start* start, Run* run, const Options* o, const Process* p) {
    const Job job = p->job;
    ModelConfig preset;
    if (!job_trains(job) && !o->given[OPT_model]) {
        start_at_checkpoint(start, run, o->out, process_screen(p));
    } else if (is_directory(o->model) && holds_model(o->model)) {
        snprintf(start->dir, sizeof start->dir, "%s", o->model);
        run->state.base = take_folder_sums(&start->sums, &start->seq, o->model);
    } else if (is_directory(o->model) && (holds_checkpoints(o->model) || folder_is_checkpoint(o->model))) {
        start_at_checkpoint(start, run, o->model, process_screen(p));
    } else if (is_directory(o->model) || !config_preset(&preset, o->model, 1)) {
        die_of_no_model("--model", o->model);
    } else if (!job_trains(job)) {
        die("--model: %s is a preset, an untrained model, wanted a folder with weights", o->model);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// adapters (LoRA) and the base model beside which they stand
//
//   --lora R --model FOLDER         trains new adapters beside the folder's weights
//   --model ADAPTERS                adapters that exist: adapter_config.json names their base; every job takes them
//   --resume of a run with --lora   the same: the checkpoint holds the adapters
//
// --lora-base DIR gives the base where it has moved. load_weights() compares its checksum with the checkpoint's.

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
        if (o->lora_base) {
            die("--lora-base: %s holds no adapters\n  hint: --model takes the adapters' folder, --lora-base the folder of "
                "their base",
                start->dir[0] ? start->dir : o->model);
        }
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
    if (!is_directory(base) && !o->lora_base) {
        const bool hub = is_hub_name(base);
        die("%s/" ADAPTER_CONFIG
            ": base_model_name_or_path is \"%s\", which is no folder here\n"
            "  hint: give the base model's folder with --lora-base DIR%s%s%s",
            start->dir, base, hub ? "; python3 dev/data/model.py " : "", hub ? base : "", hub ? " downloads it" : "");
    }
    if (!holds_model(base)) { die_of_no_model("--lora-base", base); }
    if (folder_is_adapter(base)) { die("%s: holds adapters, wanted their base model in --lora-base", base); }
    snprintf(start->base_dir, sizeof start->base_dir, "%s", base);
    start->has_adapters = true;
}

/* Sets base_dir and, if there are adapters, their shape. */
static inline void base_find(Start* start, LoraConfig* l, const Options* o, const Process* p) {
    const bool adapters = start->dir[0] && folder_has(start->dir, ADAPTER_CONFIG);
    if (adapters && !folder_is_adapter(start->dir) && !o->lora_base) {
        die("%s: holds a whole model and adapters\n"
            "  hint: --lora-base %s puts the adapters beside that model, --lora-base DIR beside another; "
            "without " ADAPTER_CONFIG " it is the model alone",
            start->dir, start->dir);
    }
    snprintf(start->base_dir, sizeof start->base_dir, "%s", start->dir);
    if (adapters) {
        lora_of_folder(l, start, o, p);
        int seq;
        take_folder_sums(&start->base_sums, &seq, start->base_dir);
    } else {
        lora_of_flags(l, start, o, p->job);
    }
}

/* Checks the tensors of the adapters; the base's configuration is known now. Reads no weights. */
static inline void adapters_check(const Start* start, const ModelConfig* c) {
    Error e = NO_ERROR;
    if (!start->has_adapters) { return; }
    ParamTable adapters = trained_table(c);
    const bool ok = adapter_check(start->dir, &adapters, &e);
    param_table_free(&adapters);
    must(ok, &e);
}

/* Reads the configuration of a model that exists, whose adapters are `lora`, and its side files. */
static inline void start_read_model(Start* start, ModelConfig* c, LoraConfig lora, const Process* p) {
    char path[PATH_CAP];
    Error e = NO_ERROR;
    must(model_check(start->base_dir, c, &e), &e);
    c->lora = lora;
    adapters_check(start, c);
    if (p->rank != 0) { return; }
    must(path_join(path, start->base_dir, "config.json", &e), &e);
    config_warn(c, path);
    if (p->job != JOB_TRAIN && p->job != JOB_EXPORT) { return; }
    size_t size = 0;
    start->side_files = side_files_read(start_text_dir(start));
    start->config = read_file(path, &size, 16 << 20, &e);
    must(start->config != NULL, &e);
}

// ---------------------------------------------------------------------------------------------------------------------
// tokenizer

/* Finds the tokenizer of a resumed run whose checkpoint `dir` lacks its copy: the one with the run's fingerprint, in one of the
 * places where the run may have got it. */
static inline void tokenizer_find_lost(Data* d, const char* dir, const Options* o, uint64_t fingerprint) {
    char data[PATH_CAP];
    Error e = NO_ERROR;
    must(mix_folder(o->train, data, &e), &e);
    const char* const places[] = {o->tokenizer, o->model, data, NULL};
    for (int i = 0; i < 4; i++) {
        Error ignored = NO_ERROR;
        const bool built_in = i == 3;
        if (built_in) { tokenizer_bytes(&d->tokenizer); }
        if (!built_in && (!places[i] || !tokenizer_load(&d->tokenizer, places[i], &ignored))) { continue; }
        d->has_tokenizer = d->tokenizer.fingerprint == fingerprint;
        if (d->has_tokenizer) {
            warn("%s: holds no tokenizer: taking %s, which is the same", dir, built_in ? "the built-in one" : places[i]);
            return;
        }
        tokenizer_free(&d->tokenizer);
    }
    die("%s: holds no tokenizer, but the run had one\n  hint: give the run's tokenizer with --tokenizer", dir);
}

/* Loads the tokenizer: --tokenizer, otherwise the one in the model folder, otherwise (for a new model) the one beside the
 * training data. A resumed run uses the copy in its checkpoint, since the file of the first --tokenizer may have moved. A
 * default tokenizer that cannot be read is no error: texts are then ids. But a run that had a tokenizer, with the fingerprint
 * `had`, does not continue without it. */
static inline void data_find_tokenizer(Data* d, const Start* start, const Options* o, uint64_t had) {
    const bool copied = folder_has_tokenizer(start->dir), takes_copy = start->resumed && !o->given[OPT_tokenizer];
    Error e = NO_ERROR;
    if (had && takes_copy && !copied) {
        tokenizer_find_lost(d, start->dir, o, had);
        return;
    }
    if (o->tokenizer && !(takes_copy && copied)) {
        must(tokenizer_load(&d->tokenizer, o->tokenizer, &e), &e);
        d->has_tokenizer = true;
        if (!start->resumed || !copied || d->tokenizer.fingerprint != had) { return; }
        tokenizer_free(&d->tokenizer);  // the checkpoint's copy is the same, and says what the run has made of it
    }
    char dir[PATH_CAP];
    snprintf(dir, sizeof dir, "%s", start_text_dir(start));
    if (!dir[0] && o->train) { must(mix_folder(o->train, dir, &e), &e); }
    if (dir[0] && folder_has_tokenizer(dir)) {
        d->has_tokenizer = tokenizer_load(&d->tokenizer, dir, &e);
        if (!d->has_tokenizer && options_export_gguf(o)) { die("%s", e.msg); }
        if (!d->has_tokenizer && !had) { warn("%s: continuing without a tokenizer, texts are shown as ids", e.msg); }
    }
    if (had && !d->has_tokenizer) { die("%s\n  hint: give the run's tokenizer with --tokenizer", e.msg); }
}

/* Checks the tokenizer against the model. It may have added tokens beyond the model's: text_rules_hold() and the data refuse
 * them. Reports the consequences of having none: an export still copies a tokenizer that this program cannot read. */
static inline void check_tokenizer(const Data* d, const Start* start, const ModelConfig* c, const Options* o,
                                   const Process* p) {
    const Tokenizer* t = &d->tokenizer;
    int ordinary = d->has_tokenizer ? t->vocab_size : 0;
    while (ordinary > 0 && t->flags[ordinary - 1] & TOKEN_ADDED) { ordinary--; }
    if (ordinary > c->vocab_size) {
        die("%s: has %d tokens, but the model %s has only %d\n  hint: give the model's own with --tokenizer",
            t->path ? t->path : "the built-in tokenizer", t->vocab_size, start_name(start, o), c->vocab_size);
    }
    if (d->has_tokenizer || p->job == JOB_EVAL || p->rank != 0) { return; }
    if (p->job != JOB_EXPORT) {
        warn("there is no tokenizer: texts are shown as ids");
    } else if (!folder_has_tokenizer(start_text_dir(start)) && !options_export_gguf(o)) {
        warn("there is no tokenizer: the export has none either");
    }
}

/* Reads the rules of texts. The texts of a new model begin with BOS, as documents do in training. */
static inline void data_read_rules(Data* d, const Start* start, ModelConfig* c, const Process* p) {
    TextRules* r = &d->rules;
    const char* dir = folder_has(start->dir, "generation_config.json") ? start->dir : start->base_dir;
    Error e = NO_ERROR;
    must(text_rules_read(r, data_tokenizer(d), c, start->dir[0] ? dir : NULL, p->rank == 0, job_speaks(p->job), &e), &e);
    if (!start->dir[0]) { text_rules_begin_with_bos(r); }
    if (r->pad_id < 0 && start->config) { r->pad_id = config_pad_of(start->config, c->vocab_size); }
    // adapters whose training has added an end token say so here; a merged model has it in config.json, too
    for (int i = 0; start->has_adapters && i < r->num_ids; i++) { config_end_at(c, r->ids[i]); }
}

/* Warns of conversations that another template has made than the one at hand, which the run's folders will name. */
static inline void warn_of_templates(const Data* d) {
    const TextRules* r = &d->rules;
    const uint64_t hash = r->chat_template ? tokenfile_template_hash(r->chat_template) : 0;
    for (int s = 0; hash && d->has_train && s < d->mix.count; s++) {
        const DataLoader* source = d->mix.sources[s].data;
        for (int i = 0; i < source->num_shards; i++) {
            const TokenFileHeader* h = &source->shards[i].header;
            if (!h->template_hash || h->template_hash == hash) { continue; }
            warn(
                "%s: its conversations were made with another chat template than %s, which the run's folders will name\n"
                "  hint: make the file again by ./tokenize --chat with the tokenizer of this model",
                source->shards[i].path, r->template_path[0] ? r->template_path : "the template of Llama 3");
            return;
        }
    }
}

/* Notes what this run makes of the model: one that is trained on the answers of conversations, or a new one, has a chat
 * template, whose end of a turn ends its texts. The folders that the run writes say so. */
static inline void data_learn_chat(Data* d, ModelConfig* c, const Options* o, bool new_model, bool says) {
    TextRules* r = &d->rules;
    const bool chats = d->has_train && d->train.masked;
    ChatForm form;
    Error ignored = NO_ERROR;  // such a model has no chat template, or one that is not understood here
    if (new_model) {
        const Sampling s = {true, o->temperature > 0, o->temperature, o->top_p, o->top_k, 1, -1};
        r->sampling = s;
    }
    if (!r->tokenizer || (!chats && !new_model)) { return; }
    if (!r->chat_template && chat_template(r)) {
        r->chat_template = xstrdup(chat_template(r));
        r->template_added = true;
    }
    if (chat_form_open(&form, r, NULL, &ignored)) { r->end_of_turn = form.end_of_turn; }
    chat_form_close(&form);
    text_rules_end_at(r, r->end_of_turn);
    config_end_at(c, r->end_of_turn);
    if (says) { warn_of_templates(d); }
}

// ---------------------------------------------------------------------------------------------------------------------
// data

/* Returns how rows are made: documents begin with the separator of ./tokenize, which is the tokenizer's BOS or, without BOS,
 * its EOS; without a tokenizer with `bos`. A new model without a tokenizer may turn out to have the built-in one. */
static inline RowRule row_rule(const Data* d, Documents documents, bool new_model, int bos) {
    RowRule r;
    memset(&r, 0, sizeof r);
    r.documents = documents;
    r.bos = new_model ? -1 : bos;
    Tokenizer bytes;
    const bool built_in = !d->has_tokenizer && new_model;
    if (built_in) { tokenizer_bytes(&bytes); }
    const Tokenizer* t = built_in ? &bytes : data_tokenizer(d);
    if (t) {
        r.bos = t->bos_id >= 0 ? t->bos_id : t->eos_id;
        r.fingerprint = t->fingerprint;
        r.certain = !built_in;
    }
    if (built_in) { tokenizer_free(&bytes); }
    return r;
}

/* Warns of answers that have lost the start of their conversation, and of training data that are files of `val`, too: they are
 * refused, but if there are no others. */
static inline void warn_of_source(const char* name, const DataLoader* d, const DataLoader* val) {
    char text[ROWS_TEXT];
    if (d->counts.lost > 0) {
        warn("%s: %s; trained without it: %llu", name, rows_lost_text(&d->counts, text), (unsigned long long)d->counts.late);
    }
    for (int i = d->num_shards; i < d->num_shards + d->num_apart; i++) {
        warn("%s: is a file of --val, and refused as one of --train %s", d->shards[i].path, name);
    }
    for (int k = 0; val && k < val->num_shards; k++) {
        if (!same_file(d->shards[0].path, val->shards[k].path)) { continue; }
        warn("--val: %s is also what --train reads: its loss says nothing about other text", val->shards[k].path);
    }
}

/* Opens the token files of the job. Each group of ranks that share rows reads its own rows of the training data. Every rank
 * reads all validation data, row by row, so that a file shorter than a batch is used whole. */
static inline void data_open(Data* d, const Process* p, const Options* o, RowRule rule) {
    const uint64_t seed = (uint64_t)o->seed;
    const SequenceShare share = process_share(p, o);
    const BatchShare batches = {o->batch, o->seq, share.group, share.groups}, alone = {1, o->seq, 0, 1};
    Progress scan = progress_begin(stdout, "index", 0, "B");
    Error e = NO_ERROR;
    rule.progress = p->rank == 0 ? &scan : NULL;
    if (o->val && (job_trains(p->job) || p->job == JOB_EVAL)) {
        must(dataloader_open(&d->val, o->val, alone, seed, false, &rule, &e), &e);
        d->has_val = true;
        rule.apart = &d->val;
    }
    if (job_trains(p->job) && o->train) {
        must(mix_open(&d->mix, &d->train, o->train, batches, seed, &rule, &e), &e);
        d->has_train = true;
    }
    progress_end(&scan);
    for (int i = 0; p->rank == 0 && d->has_train && i < d->mix.count; i++) {
        warn_of_source(d->mix.sources[i].pattern, d->mix.sources[i].data, d->has_val ? &d->val : NULL);
    }
    if (p->rank == 0 && d->has_val) { warn_of_source(o->val, &d->val, NULL); }
}

/* Checks all data against the model and the tokenizer. */
static inline void check_data(Data* d, int vocab_size) {
    const uint64_t tokenizer = data_tokenizer_print(d);
    Error e = NO_ERROR;
    if (d->has_train) { must(mix_check_vocab(&d->mix, vocab_size, tokenizer, &e), &e); }
    if (d->has_val) { must(dataloader_check_vocab(&d->val, vocab_size, tokenizer, &e), &e); }
}

/* Reads --tasks. With --eval it chooses the length of rows; in training rows have --seq tokens. */
static inline void data_open_tasks(Data* d, Options* chosen, const Process* p, int max_positions) {
    Tasks* t = &d->tasks;
    Error e = NO_ERROR;
    if (!chosen->tasks || (!job_trains(p->job) && p->job != JOB_EVAL)) { return; }
    if (!d->has_tokenizer) { die("--tasks: there is no tokenizer to encode the questions\n  hint: give one with --tokenizer"); }
    must(tasks_open(t, chosen->tasks, &d->rules, &e), &e);
    d->has_tasks = true;
    if (p->job == JOB_EVAL) { choose_rows(chosen, t, max_positions); }
    must(tasks_set_length(t, chosen->seq, &e), &e);
    if (t->cut > 0 && p->rank == 0) {
        printf("tasks   %zu of %zu choices are longer than %d tokens: they lose the start of their context\n", t->cut,
               t->num_choices, chosen->seq);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// a new model

/* Returns the vocabulary of data that came without a tokenizer. If the built-in one has made the data, takes it. */
static inline int vocabulary_of_data(Data* d, const char* train) {
    Tokenizer bytes;
    tokenizer_bytes(&bytes);
    if (d->train.fingerprint != bytes.fingerprint) {
        tokenizer_free(&bytes);
    } else if (d->train.vocab_size && d->train.vocab_size != bytes.vocab_size) {
        die("%s: vocabulary is %d tokens, but the tokenizer that made it has %d: its header is damaged", train,
            d->train.vocab_size, bytes.vocab_size);
    } else {
        d->tokenizer = bytes;
        d->has_tokenizer = true;
    }
    if (d->train.vocab_size) { return d->train.vocab_size; }
    return d->train.token_bytes == 2 ? 50257 : 128256;  // llm.c's files: tokens of GPT-2 or Llama 3
}

/* Fills in the configuration of a new model. dN takes the tokenizer's vocabulary, otherwise the vocabulary of the data. */
static inline void config_of_preset(ModelConfig* c, Data* d, const Options* o) {
    const LoraConfig lora = c->lora;
    const int vocab = d->has_tokenizer ? d->tokenizer.vocab_size : d->has_train ? vocabulary_of_data(d, o->train) : 0;
    const Tokenizer* t = data_tokenizer(d);
    config_preset(c, o->model, vocab);
    c->lora = lora;
    if (t && c->bos_id < 0) { c->bos_id = t->bos_id; }
    if (t && c->num_eos == 0) { config_end_at(c, t->eos_id); }
}

/* Refuses the state of another optimizer. */
static inline void check_optimizer(const Start* start, const TrainerState* state, const ModelConfig* c) {
    const char* word = optimizer_rules[c->optimizer].word;
    if (!start->resumed || strcmp(state->optimizer, word) == 0) { return; }
    die("%s: its state is of the optimizer %s, but this run's is %s\n  hint: a new run can start from its weights: --model %s",
        start->dir, state->optimizer, word, start->dir);
}

/* Lays out the tensors for the ranks of the run. */
static inline void spec_lay_out(ModelSpec* m, const Process* p) {
    m->table = param_table_for(&m->config, p->ranks);
    m->trained = trained_table_for(&m->config, p->ranks);
    Buckets buckets = buckets_list(&m->trained);
    m->owned = shard_ranges(&buckets, p->rank);
    buckets_free(&buckets);
}

// ---------------------------------------------------------------------------------------------------------------------
// all of it

/* Warns of flags that do nothing without --val or --tasks. */
static inline void warn_of_no_data(const Options* o, const Data* d) {
    const struct {
        int flag;
        bool on, has_data;
        const char* data;
    } flags[] = {
        {OPT_patience, o->patience > 0, d->has_val, "--val"},
        {OPT_checkpoint_best, o->checkpoint_best, d->has_val, "--val"},
        {OPT_eval_every, o->eval_every > 0, d->has_tasks, "--tasks"},
    };
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        char flag[OPTION_TEXT];
        if (!flags[i].on || flags[i].has_data) { continue; }
        warn("%s: does nothing without %s", option_flag(flags[i].flag, flag), flags[i].data);
    }
}

/* A model that is trained on longer rows becomes a model for these; adapters do not change their model. */
static inline void lengthen_context(ModelConfig* c, const Options* o, const char* name, int rank) {
    if (o->seq <= c->max_positions) { return; }
    if (c->lora.rank > 0) {
        if (rank == 0) { warn("--seq: is %d, but %s is for %d positions", o->seq, name, c->max_positions); }
        return;
    }
    if (rank == 0) {
        warn("--seq: is %d, but %s is for %d positions: the config.json of its checkpoints will say %d", o->seq, name,
             c->max_positions, o->seq);
    }
    c->max_positions = o->seq;
}

/* Finds the weights and the shape of adapters. The configuration of a new model comes later (config_of_preset). */
static inline void program_find_model(Program* p, const FoundCheckpoint* found) {
    Start* start = &p->start;
    LoraConfig lora = p->spec.config.lora;
    if (p->chosen.resume && job_trains(p->process.job)) { run_resume(&p->run, start, &p->chosen, &p->process, found); }
    if (!start->resumed) { start_find(start, &p->run, &p->chosen, &p->process); }
    base_find(start, &lora, &p->chosen, &p->process);
    choose_lora(&p->chosen, &lora);
    p->spec.config.lora = lora;
    if (start->dir[0]) { start_read_model(start, &p->spec.config, lora, &p->process); }
}

/* Plans a run that trains, and sets it to its first step. */
static inline void program_plan(Program* p) {
    const Options* o = &p->chosen;
    Run* run = &p->run;
    Error e = NO_ERROR;
    int64_t steps = 0;
    const int groups = process_share(&p->process, o).groups;
    const DataLoader* train = &p->data.train;
    run->dial.weights = (double)p->spec.table.num_matmul;
    run->dial.data = (double)train->rows_per_epoch * o->seq;
    run->dial.ranks = p->process.ranks;
    choose_dial(&p->chosen, &run->dial, train->rows_per_epoch, groups);
    if (p->data.has_train) { mix_set_batch(&p->data.mix, o->batch); }
    must(plan_make(&run->plan, o, groups, &e), &e);
    must(plan_steps(&run->plan, o, train->rows_per_epoch, &steps, &e), &e);
    choose_steps(&p->chosen, steps);
    choose_rate(&p->chosen, &run->dial, steps, run->plan.tokens_per_step);
    run_settle_schedule(run, o, &p->start, steps);
    if (resume_decays(&p->start, o)) { choose_branch(&p->chosen, run->state.schedule.steps); }
    if (p->process.rank == 0) {
        steps = run->state.schedule.steps;
        if (steps > 0 && o->warmup > steps) {
            warn("--warmup: %d of %lld steps: the learning rate never gets to --lr", o->warmup, (long long)steps);
        } else if (o->schedule == SCHEDULE_WSD && o->decay == 0 && o->final_lr_frac < 1 &&
                   (steps < 10 || o->warmup > steps - steps / 5)) {
            warn("--schedule wsd: %lld steps and a warm-up of %d leave little of its decay: the last rate is %.2e",
                 (long long)steps, o->warmup, learning_rate(&run->state.schedule, steps - 1));
        }
        if (o->lr > 0.1) { warn("--lr: is %g: AdamW seldom learns with more than 0.01", o->lr); }
        if (o->optimizer && o->lora) { warn("--optimizer: muon trains no adapters: AdamW trains all of them"); }
        warn_of_no_data(o, &p->data);
    }
    lengthen_context(&p->spec.config, o, start_name(&p->start, o), p->process.rank);
    if (p->start.resumed) {
        dataloader_seek(&p->data.train, run->state.tokens / (uint64_t)o->seq);
    } else {
        run->state.loss_scale = 1;
        run_id_draw(run->state.run);
    }
}

/* Opens the program, except for memory and --out, in the order above. This process is `rank` of `ranks`;
 * found: the checkpoint that rank 0 has reported. */
static inline void program_open(Program* p, int argc, char** argv, OptionScope trainer, int rank, int ranks,
                                FoundCheckpoint found) {
    Options* chosen = &p->chosen;
    ModelConfig* config = &p->spec.config;
    Process* process = &p->process;
    Data* data = &p->data;
    Error e = NO_ERROR;
    memset(p, 0, sizeof *p);
    process->started = now_seconds();
    process->rank = rank;
    process->ranks = ranks;
    process->argc = argc;
    process->argv = argv;
    p->run.lock = -1;
    logger_none(&p->run.log);
    keep_standard_files();
    signal(SIGXFSZ, SIG_IGN);  // a write past the file-size limit then fails with a message instead of killing the process
    options_or_exit(&p->given, argc, argv, trainer);
    process->job = job_of(&p->given);
    if (rank == 0) { warn_of_threads(p->given.threads); }
    choose_typed(chosen, &p->given);
    if (process->job == JOB_VERIFY) { return; }
    if (trainer == ON_CPU) { cpu_build(process->build, sizeof process->build); }  // the other does not know its card yet

    program_find_model(p, &found);
    if (process_writes(process, chosen) && !out_is_locked(chosen->out)) {
        out_check(chosen->out, &p->start);
    }  // out_take() says who has locked it
    check_share(chosen, process, config);
    choose_total_batch(chosen, process_share(process, chosen).groups);
    if (job_trains(process->job) || process->job == JOB_EVAL) { must(choose_data(chosen, &e), &e); }
    if (process->job == JOB_EVAL && !chosen->tasks) {
        choose_eval_rows(chosen, &p->start, config->max_positions);
        if (rank == 0 && chosen->seq > config->max_positions) {
            warn("--seq: is %d, but %s is for %d positions", chosen->seq, start_name(&p->start, chosen), config->max_positions);
        }
    }
    data_find_tokenizer(data, &p->start, chosen, p->start.resumed ? p->run.state.fingerprint : 0);
    if (job_trains(process->job)) { choose_to_dial(chosen, &p->run.dial, &p->start); }
    data_open(data, process, chosen, row_rule(data, (Documents)chosen->documents, !p->start.dir[0], config->bos_id));
    if (!p->start.dir[0]) { config_of_preset(config, data, chosen); }
    check_share(chosen, process, config);
    check_offload(chosen, process);
    check_recompute(chosen, config->num_layers);
    check_tokenizer(data, &p->start, config, chosen, process);
    data_read_rules(data, &p->start, config, process);
    if (job_speaks(process->job)) { choose_sampling(chosen, &data->rules.sampling); }
    if (job_trains(process->job)) { data_learn_chat(data, config, chosen, !p->start.dir[0], rank == 0); }
    check_data(data, config->vocab_size);
    data_open_tasks(data, chosen, process, config->max_positions);
    config->optimizer = chosen->optimizer;
    check_optimizer(&p->start, &p->run.state, config);
    spec_lay_out(&p->spec, process);
    if (job_trains(process->job)) { program_plan(p); }
}

#endif
