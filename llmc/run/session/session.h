/* session.h -- what a run of either trainer works with: its options, its model, text and data, and where it stands.
 *
 *   open.h     finds and checks all of it
 *   resume.h   finds the checkpoint to resume, reports changes since, and sets a run back
 *   save.h     writes a checkpoint
 *
 * All functions of these four files die() on an error, except where they say otherwise: this is the outermost layer. Ranks
 * other than 0 write no log and do not lock --out.
 */
#ifndef LLMC_SESSION_H
#define LLMC_SESSION_H

#include "llmc/base/utils.h"

#include "llmc/config.h"
#include "llmc/dist/sequence.h"    // defines: SequenceShare, sequence_share
#include "llmc/dist/team_state.h"  // defines: Team
#include "llmc/files/checkpoint.h"
#include "llmc/files/dataloader.h"
#include "llmc/files/logger.h"
#include "llmc/files/mix.h"
#include "llmc/run/cli/options.h"
#include "llmc/run/session/plan.h"
#include "llmc/text/question.h"
#include "llmc/train/scheduler.h"
#include "llmc/train/step.h"  // defines: ModelUse
#include "llmc/run/screen/screen.h"
#include "llmc/text/tasks.h"
#include "llmc/text/tokenizer.h"

typedef enum { JOB_TRAIN, JOB_DRY_RUN, JOB_EVAL, JOB_GENERATE, JOB_CHAT, JOB_ANSWER, JOB_EXPORT, JOB_VERIFY } Job;

/* Returns whether a job sets up training; a dry run does so without training. The other jobs need a trained model. */
static inline bool job_trains(Job job) { return job == JOB_TRAIN || job == JOB_DRY_RUN; }

/* Returns whether a job's output is text of the model. */
static inline bool job_speaks(Job job) { return job == JOB_GENERATE || job == JOB_CHAT || job == JOB_ANSWER; }

/* Who this process is. Opening sets it; only `team` comes later, when the ranks have met. */
typedef struct {
    Job job;
    int rank, ranks;
    Team* team;      // the ranks of the run; NULL: the process is alone
    double started;  // now_seconds() at the start of the program
    int argc;
    char** argv;
    char machine[256];
    char build[160];  // what the bits of the results depend on besides the options, to compare with the checkpoint
} Process;

/* Where the weights come from. */
typedef struct {
    char dir[PATH_CAP];       // folder to start from, with a model or with adapters; "": a new model
    FileSums sums;            // checksums of its files, verified on loading; none: unknown, or already verified
    char base_dir[PATH_CAP];  // folder with the weights: dir, or the base of its adapters
    FileSums base_sums;       // the same for base_dir, if it is another folder
    SideFiles side_files;     // copied from dir into the checkpoints of this run
    bool resumed;             // dir is the checkpoint that this run resumes from
    bool saved_master;        // its weights are rounded: the master weights are in its state, as "master"
    uint32_t weights;         // the checksum of all weights that were loaded, with LoRA or several ranks; 0: unknown
} Start;

/* What the model is. */
typedef struct {
    ModelConfig config;
    ParamTable table;    // of the weights
    ParamTable trained;  // of the tensors that are trained
    ArenaRanges owned;   // elements that this rank updates, and whose optimizer state it keeps
} ModelSpec;

/* Text and data. */
typedef struct {
    Tokenizer tokenizer;
    DataLoader train, val;
    Mix mix;  // the sources of `train`
    Tasks tasks;
    bool has_tokenizer, has_train, has_val, has_tasks;
} Data;

/* The training run, which writes into --out. */
typedef struct {
    Plan plan;              // until --minutes is measured, a plan for one epoch
    TrainerState state;     // which run it is, and how far; the trainer keeps it up to date
    char newest[PATH_CAP];  // the checkpoint saved last, or resumed from; "": none yet
    int lock;               // of --out; -1: not locked
    Logger log;
} Run;

/* What main holds. */
typedef struct {
    Options chosen;
    Process process;
    Start start;
    ModelSpec spec;
    Data data;
    Run run;
    int status;  // exit status of the program
} Session;

/* Rank 0's report to the other ranks before they open their sessions (together.h): the checkpoint that it has found and read
 * whole. `known` is false on rank 0, and in a process that is alone; `resumed` is false without a checkpoint. */
typedef struct {
    bool known, resumed;
    uint64_t step;
} FoundCheckpoint;
static const FoundCheckpoint no_report = {false, false, 0};

/* Returns whether rows of the session's data hold documents that do not see each other. */
static inline bool session_documents(const Session* s) { return s->data.train.starts || s->data.val.starts; }

/* Returns whether the ranks pass the layers of the model together: each has only a part of the blocks' weights (ZeRO 3), or
 * a part of each row. Then either all ranks run the model at a place in the program, or none does. */
static inline bool session_passes_together(const Session* s) {
    return s->process.team && job_trains(s->process.job) && (s->chosen.zero == ZERO_3 || s->chosen.seq_parallel > 1);
}

/* Finds the file of matrix products' plans: --plan, or the file `name` of the checkpoint that the run resumes. Returns false if
 * neither exists. */
static inline bool session_plan_file(const Session* s, const char* name, char path[PATH_CAP]) {
    Error e = NO_ERROR;
    if (s->chosen.plan) {
        snprintf(path, PATH_CAP, "%s", s->chosen.plan);
        return true;
    }
    if (!s->start.resumed || !folder_has(s->start.dir, name)) { return false; }
    must(path_join(path, s->start.dir, name, &e), &e);
    return true;
}

/* Return the part of a step's rows that this process computes, and the tokens of its micro-batch. */
static inline SequenceShare session_share(const Session* s) {
    return sequence_share(s->process.rank, s->process.ranks, s->chosen.seq_parallel);
}
static inline size_t session_tokens(const Session* s) {
    return (size_t)s->chosen.batch * (size_t)s->chosen.seq / (size_t)session_share(s).row_ranks;
}

/* Returns whether this process writes into --out. */
static inline bool session_writes(const Session* s) {
    return s->process.job == JOB_TRAIN && s->process.rank == 0 && s->chosen.profile == 0;
}

/* Returns the word of --export-dtype that stands for weights of this dtype; F32 stands in for a dtype without a word. */
static inline ExportDtype export_dtype_of(SafeDtype dtype) {
    return dtype == SAFE_BF16 ? EXPORT_BF16 : dtype == SAFE_F16 ? EXPORT_F16 : EXPORT_F32;
}

/* Returns the dtype of the weights in checkpoints; `own` is the dtype of the build, for --export-dtype auto. Adapters are
 * exact, since they are small. */
static inline SafeDtype session_export_dtype(const Session* s, SafeDtype own) {
    if (s->spec.config.lora.rank > 0) { return SAFE_F32; }
    static const SafeDtype dtypes[] = {SAFE_F32, SAFE_F32, SAFE_BF16, SAFE_F16};
    return s->chosen.export_dtype == EXPORT_AUTO ? own : dtypes[s->chosen.export_dtype];
}

/* Returns the options with `dtype` in the place of --export-dtype auto: another build may resume the run. --recompute auto
 * stays: a resumed run chooses anew, for its card. The log has the choice (session_begin). */
static inline Options session_with_dtype(const Session* s, SafeDtype dtype) {
    Options o = s->chosen;
    o.export_dtype = export_dtype_of(dtype);
    return o;
}

/* Returns whether model_dir holds adapters. */
static inline bool session_has_adapters(const Session* s) {
    return s->start.dir[0] && strcmp(s->start.dir, s->start.base_dir) != 0;
}

/* Prints options, machine, model and data before anything is allocated. `precision`: FP32, BF16 or FP16. */
static inline void session_print(const Session* s, const char* precision) {
    char count[32];
    if (s->process.rank != 0) { return; }
    options_print(stdout, &s->chosen);
    printf("machine %s\n", s->process.machine);
    print_model(stdout, s->start.dir[0] ? s->start.base_dir : s->chosen.model, &s->spec.config, &s->spec.table, precision);
    if (s->spec.config.lora.rank > 0) {
        print_lora(stdout, &s->spec.config.lora, s->spec.trained.num_params, s->spec.table.num_params);
    }
    if (s->data.has_train) {
        print_names(stdout, "data    %s: %s tokens in %d file%s\n", s->chosen.train,
                    text_count(s->data.train.num_tokens, count, sizeof count), mix_num_files(&s->data.mix),
                    text_plural(mix_num_files(&s->data.mix)));
    } else {
        printf("data    none: this is the plan of a step\n");
    }
    if (s->data.has_val) {
        print_names(stdout, "        %s: %s tokens for validation\n", s->chosen.val,
                    text_count(s->data.val.num_tokens, count, sizeof count));
    }
    if (s->start.resumed) {
        print_names(stdout, "resume  %s, step %llu\n", s->start.dir, (unsigned long long)s->run.state.step);
    }
}

/* Returns the learning rate of step `step`, counted from 0. */
static inline double session_lr(const Session* s, int64_t step) {
    const Options* o = &s->chosen;
    const Shortened* shortened = &s->run.state.shortened;
    return learning_rate((Schedule)o->schedule, schedule_place(shortened, step),
                         shortened->steps ? shortened->from : s->run.plan.steps, o->warmup, o->lr, o->final_lr_frac);
}

/* Returns whether a task is due after `step` steps. It is due at each multiple of `every` (0: none), and at the run's end. */
static inline bool session_due(const Session* s, int every, int64_t step) {
    return (every > 0 && step % every == 0) || step == s->run.plan.stop;
}

/* Returns the positions that the job's KV cache needs: the prompt and the generated text, with --generate at most the model's
 * context. 0: the job generates nothing. */
static inline int session_context(const Session* s) {
    enum { CHAT_CONTEXT = 8192 };
    const Options* o = &s->chosen;
    const bool samples = job_trains(s->process.job);
    if (s->process.job == JOB_EVAL || (samples && o->sample_tokens == 0)) { return 0; }
    if (s->process.job == JOB_CHAT || s->process.job == JOB_ANSWER) {
        return (int)size_min((size_t)s->spec.config.max_positions, CHAT_CONTEXT);
    }
    TokenList prompt;
    Error e = NO_ERROR;
    memset(&prompt, 0, sizeof prompt);
    must(prompt_tokens(&prompt, samples ? o->prompt : o->generate, &s->spec.config,
                       s->data.has_tokenizer ? &s->data.tokenizer : NULL, &e),
         &e);
    const size_t most = (size_t)s->spec.config.max_positions;
    if (!samples && prompt.count >= most) {
        die("--generate: the prompt has %zu tokens, but the model's context holds %zu, and at least one must be generated",
            prompt.count, most);
    }
    size_t count = prompt.count + (size_t)(samples ? o->sample_tokens : o->tokens);
    if (!samples) { count = size_min(count, most); }
    token_list_free(&prompt);
    if (count > INT32_MAX / 2) { die("--%s: is %zu tokens too long", samples ? "sample-tokens" : "tokens", count); }
    return (int)count;
}

/* Returns what the job needs of a model, with these options: those of the run, or others that are tried. */
static inline ModelUse session_use(const Session* s, const Options* o) {
    const bool trains = job_trains(s->process.job), batches = trains || s->process.job == JOB_EVAL;
    const ModelUse use = {s->process.rank, s->process.ranks,     batches ? o->batch : 0, o->seq,
                          trains,          session_documents(s), session_context(s)};
    return use;
}

// ---------------------------------------------------------------------------------------------------------------------
// weights

/* Dies unless `ok`: something in `folder` could not be read. A run that writes there may have removed it meanwhile. */
static inline void session_must_read(const Session* s, bool ok, const char* folder, const Error* e) {
    if (!ok && s->run.lock < 0 && !strstr(e->msg, "hint: ") && out_is_locked(folder)) {
        die("%s\n  hint: another run is writing into %s and may have removed it: try again", e->msg, folder);
    }
    must(ok, e);
}

/* Returns how many of the trained elements this rank owns. */
static inline uint64_t session_owned(const Session* s) {
    uint64_t owned = 0;
    for (size_t i = 0; i < s->spec.owned.count; i++) { owned += s->spec.owned.items[i].count; }
    return owned;
}

/* Returns where rank 0 shows progress: on stdout. If a job writes its text there, only a terminal shows progress, because
 * the line can be wiped. NULL: nowhere */
static inline FILE* session_screen(const Session* s) {
    return s->process.rank == 0 && (!job_speaks(s->process.job) || isatty(fileno(stdout))) ? stdout : NULL;
}

/* Loads the weights of base_dir into the trainer's slot. With LoRA, checks as far as possible that the adapters were trained
 * beside these weights, and remembers their checksum. Rounded weights may be infinite if the run resumes with exact ones. */
static inline void session_load_weights(Session* s, StateSlot weights) {
    const FileSums* known = session_has_adapters(s) ? &s->start.base_sums : &s->start.sums;
    const FileSums* sums = known->count > 0 ? known : NULL;
    const bool lora = s->spec.config.lora.rank > 0;
    char folder[PATH_CAP];
    uint32_t crc = 0;
    Error e = NO_ERROR, not_finite = NO_ERROR;
    Passed passed = {progress_begin(session_screen(s), "load", s->spec.table.num_params, "weights"), false};
    weights.passed = &passed;
    const bool ok =
        checkpoint_parent(s->start.base_dir, folder, &e) &&
        model_load_sums(s->start.base_dir, &s->spec.config, &s->spec.table, sums, lora || s->process.team ? &crc : NULL,
                        weights, s->start.saved_master ? &not_finite : NULL, &e);
    progress_end(&passed.progress);
    session_must_read(s, ok, folder, &e);
    if (not_finite.msg[0] && s->process.rank == 0) {
        warn("%s: the run resumes with the exact weights of its state", not_finite.msg);
    }
    if (s->run.state.base && lora && s->run.state.base != crc) {
        die("%s: the weights' checksum is %" PRIu32 ", but the adapters of %s were trained beside weights with %" PRIu64
            "\n  hint: give their base model with --lora-base",
            s->start.base_dir, crc, s->start.dir, s->run.state.base);
    }
    s->run.state.base = lora ? crc : 0;
    s->start.weights = crc;
}

/* Draws new weights into the trainer's slot. */
static inline void session_draw_weights(const Session* s, StateSlot weights) {
    Error e = NO_ERROR;
    Passed passed = {progress_begin(session_screen(s), "draw", s->spec.table.num_params, "weights"), false};
    weights.passed = &passed;
    const bool ok = tensors_draw(&s->spec.config, &s->spec.table, (uint64_t)s->chosen.seed, weights, &e);
    progress_end(&passed.progress);
    must(ok, &e);
}

/* Loads the adapters of model_dir into the trainer's slot, or draws new ones. */
static inline void session_load_adapters(const Session* s, StateSlot to) {
    const FileSums* sums = s->start.sums.count > 0 ? &s->start.sums : NULL;
    Error e = NO_ERROR;
    must(session_has_adapters(s) ? adapter_load(s->start.dir, &s->spec.trained, sums, to, &e)
                                 : tensors_draw(&s->spec.config, &s->spec.trained, (uint64_t)s->chosen.seed, to, &e),
         &e);
}

/* Loads what this rank owns of the optimizer state of model_dir into the slots. */
static inline void session_load_states(const Session* s, StateSlot* slots, int num_slots) {
    Error e = NO_ERROR;
    const uint64_t values = (uint64_t)num_slots * session_owned(s);
    Passed passed = {progress_begin(session_screen(s), "load", values, "values"), false};
    for (int i = 0; i < num_slots; i++) { slots[i].passed = &passed; }
    const bool ok = state_load(s->start.dir, s->run.state.world_size, &s->spec.trained, &s->spec.owned, slots, num_slots, &e);
    progress_end(&passed.progress);
    must(ok, &e);
}

// ---------------------------------------------------------------------------------------------------------------------
// the end

/* Closes the session. Fails if stdout was not written and the job has no other output: a training run has its log. */
static inline void session_close(Session* s) {
    const bool failed = fflush(stdout) != 0 || ferror(stdout);
    if (failed && s->process.job != JOB_TRAIN && s->process.rank == 0) { die("standard output: writing failed"); }
    if (s->data.has_train) { mix_close(&s->data.mix); }
    if (s->data.has_val) { dataloader_close(&s->data.val); }
    if (s->data.has_tasks) { tasks_free(&s->data.tasks); }
    if (s->data.has_tokenizer) { tokenizer_free(&s->data.tokenizer); }
    if (s->start.resumed) { trainer_state_free(&s->run.state); }
    logger_close(&s->run.log);
    out_unlock(&s->run.lock);
    file_sums_free(&s->start.sums);
    file_sums_free(&s->start.base_sums);
    side_files_free(&s->start.side_files);
    param_table_free(&s->spec.table);
    param_table_free(&s->spec.trained);
    free(s->spec.owned.items);
    options_free(&s->chosen);
}

#endif
