/* session.h -- what a program of either trainer works with, from opening to closing: a struct for each thing.
 *
 *   choose.h       makes the options that count from those that were typed
 *   open.h         finds and checks all of it
 *   open_model.h   makes the model of a job and gives it its weights
 *   resume.h       finds the checkpoint to resume, reports changes since, and sets a run back
 *   save.h         writes a checkpoint
 *
 * All functions of these files die() on an error, except where they say otherwise: this is the outermost layer. Only main,
 * opening and the functions that begin a job see the whole Program; every other function takes the things that it needs.
 * Ranks other than 0 write no log and do not lock --out.
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
#include "llmc/run/session/dial.h"
#include "llmc/run/session/plan.h"
#include "llmc/text/tasks.h"
#include "llmc/text/text_rules.h"
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
    FileSums base_sums;       // the same for base_dir, if dir holds adapters
    SideFiles side_files;     // copied from dir into the checkpoints of this run
    char* config;             // text of the config.json of base_dir; NULL: none, or of no use to the job
    bool has_adapters;        // dir holds adapters, whose base is in base_dir
    bool resumed;             // dir is the checkpoint that this run resumes from
    int seq;                  // --seq of the run that wrote dir; 0: unknown
    bool saved_master;        // its weights are rounded: the master weights are in its state, as "master"
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
    TextRules rules;  // of the tokenizer and the model
    DataLoader train, val;
    Mix mix;  // the sources of `train`
    Tasks tasks;
    bool has_tokenizer, has_train, has_val, has_tasks;
} Data;

/* The training run, which writes into --out. */
typedef struct {
    Dial dial;
    Plan plan;
    TrainerState state;     // which run it is, and how far; the trainer keeps it up to date. Until --minutes is
                            // measured, its schedule has one epoch
    double lr_before;       // the rate of the next step by the schedule of the checkpoint that the run resumes
    char newest[PATH_CAP];  // the checkpoint saved last, or resumed from; "": none yet
    uint32_t weights;       // the checksum of all weights that were loaded, with LoRA or several ranks; 0: unknown
    int lock;               // of --out; -1: not locked
    Logger log;
} Run;

/* The whole program: only main, opening and the functions that begin a job take it. */
typedef struct {
    Options given;   // as typed; nothing changes it after parsing
    Options chosen;  // what counts (choose.h): this is logged, saved and compared. Nothing changes it after opening
    Process process;
    Start start;
    ModelSpec spec;
    Data data;
    Run run;
} Program;

/* Rank 0's report to the other ranks before they open their programs (together.h): the checkpoint that it has found and read
 * whole. `known` is false on rank 0, and in a process that is alone; `resumed` is false without a checkpoint. */
typedef struct {
    bool known, resumed;
    uint64_t step;
} FoundCheckpoint;
static const FoundCheckpoint no_report = {false, false, 0};

/* Returns the part of a step's rows that this process computes. */
static inline SequenceShare process_share(const Process* p, const Options* o) {
    return sequence_share(p->rank, p->ranks, o->seq_parallel);
}

/* Returns whether the ranks pass the layers of the model together: each has only a part of the blocks' weights (ZeRO 3), or
 * a part of each row. Then either all ranks run the model at a place in the program, or none does. */
static inline bool passes_together(const Team* team, bool train, const Options* o) {
    return team && train && (o->zero == ZERO_3 || o->seq_parallel > 1);
}

/* Returns whether this process writes into --out. */
static inline bool process_writes(const Process* p, const Options* o) {
    return p->job == JOB_TRAIN && p->rank == 0 && o->profile == 0;
}

/* Returns where rank 0 shows progress: on stdout. If a job writes its text there, only a terminal shows progress, because
 * the line can be wiped. NULL: nowhere */
static inline FILE* process_screen(const Process* p) {
    return p->rank == 0 && (!job_speaks(p->job) || isatty(fileno(stdout))) ? stdout : NULL;
}

/* Returns the name of the model for messages. */
static inline const char* start_name(const Start* s, const Options* o) { return s->dir[0] ? s->base_dir : o->model; }

/* Returns how many of the trained elements this rank owns. */
static inline uint64_t spec_owned(const ModelSpec* m) {
    uint64_t owned = 0;
    for (size_t i = 0; i < m->owned.count; i++) { owned += m->owned.items[i].count; }
    return owned;
}

/* Returns the tokenizer; NULL: there is none. */
static inline const Tokenizer* data_tokenizer(const Data* d) { return d->has_tokenizer ? &d->tokenizer : NULL; }

/* Returns the fingerprint of the tokenizer; 0: there is none. */
static inline uint64_t data_tokenizer_print(const Data* d) { return d->has_tokenizer ? d->tokenizer.fingerprint : 0; }

/* Returns whether rows hold documents that do not see each other. */
static inline bool data_has_documents(const Data* d) { return d->train.starts || d->val.starts; }

/* Returns the number of steps after which this process ends: --stop-after, or where the schedule ends. */
static inline int64_t run_stop(const Run* r, const Options* o) {
    const int64_t steps = r->state.schedule.steps;
    return o->stop_after > 0 && o->stop_after < steps ? o->stop_after : steps;
}

/* Dies unless `ok`: something in `folder` could not be read. A run that writes there may have removed it meanwhile. */
static inline void run_must_read(const Run* r, bool ok, const char* folder, const Error* e) {
    if (!ok && r->lock < 0 && !strstr(e->msg, "hint: ") && out_is_locked(folder)) {
        die("%s\n  hint: another run is writing into %s and may have removed it: try again", e->msg, folder);
    }
    must(ok, e);
}

/* Closes the program. Fails if stdout was not written and the job has no other output: a training run has its log. */
static inline void program_close(Program* p) {
    const bool failed = fflush(stdout) != 0 || ferror(stdout);
    if (failed && p->process.job != JOB_TRAIN && p->process.rank == 0) { die("standard output: writing failed"); }
    if (p->data.has_train) { mix_close(&p->data.mix); }
    if (p->data.has_val) { dataloader_close(&p->data.val); }
    if (p->data.has_tasks) { tasks_free(&p->data.tasks); }
    text_rules_free(&p->data.rules);
    if (p->data.has_tokenizer) { tokenizer_free(&p->data.tokenizer); }
    if (p->start.resumed) { trainer_state_free(&p->run.state); }
    logger_close(&p->run.log);
    out_unlock(&p->run.lock);
    file_sums_free(&p->start.sums);
    file_sums_free(&p->start.base_sums);
    side_files_free(&p->start.side_files);
    free(p->start.config);
    param_table_free(&p->spec.table);
    param_table_free(&p->spec.trained);
    free(p->spec.owned.items);
    options_free(&p->chosen);
    options_free(&p->given);
}

#endif
