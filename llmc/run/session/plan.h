/* plan.h -- the number of steps, the schedule and the tokens per step of a run, from its flags and data. */
#ifndef LLMC_PLAN_H
#define LLMC_PLAN_H

#include "llmc/base/utils.h"        // defines: fail
#include "llmc/files/dataloader.h"  // defines: DataLoader
#include "llmc/optim/schedule.h"    // defines: Schedule, ScheduleName, schedule_make
#include "llmc/run/cli/options.h"   // defines: Options
#include "llmc/base/text.h"         // defines: text_count, print_names

typedef struct {
    int64_t tokens_per_step;  // over all ranks
    int accumulate;           // micro-steps per step
} Plan;

/* Plans the steps of `ranks` processes, or groups of --seq-parallel. */
static inline bool plan_make(Plan* p, const Options* o, int ranks, Error* e) {
    memset(p, 0, sizeof *p);
    const int64_t micro = (int64_t)o->batch * o->seq * ranks;
    p->tokens_per_step = o->total_batch ? o->total_batch : micro;
    if (p->tokens_per_step % micro != 0) {
        int batch = o->batch;  // the largest that fits; 0: none does
        while (batch > 0 && p->tokens_per_step % ((int64_t)batch * o->seq * ranks) != 0) { batch--; }
        return fail(e,
                    "--total-batch: is %lld, wanted a multiple of batch * seq * %s = %d * %d * %d = %lld\n"
                    "  hint: these flags fit: --%sbatch %lld",
                    (long long)p->tokens_per_step, o->seq_parallel > 1 ? "groups of processes" : "processes", o->batch, o->seq,
                    ranks, (long long)micro, batch ? "" : "total-", (long long)(batch ? batch : micro));
    }
    if (p->tokens_per_step / micro > INT32_MAX) {
        return fail(e, "--total-batch: is %lld, wanted at most 2^31 micro-steps of %lld tokens", (long long)p->tokens_per_step,
                    (long long)micro);
    }
    p->accumulate = (int)(p->tokens_per_step / micro);
    return true;
}

/* Finds the number of steps that --steps or --epochs asks for, over data of rows_per_epoch rows of --seq tokens. */
static inline bool plan_steps(const Plan* p, const Options* o, uint64_t rows_per_epoch, int64_t* count, Error* e) {
    const uint64_t rows_per_step = (uint64_t)(p->tokens_per_step / o->seq);
    *count = o->dry_run && !o->train && o->steps < 0 ? 1 : o->steps;  // without data: the plan of a step
    if (*count >= 0 && o->epochs == 0) { return true; }
    const double steps = o->epochs * (double)rows_per_epoch / (double)rows_per_step;
    if (steps > 2e9) { return fail(e, "--epochs: %g are %.0f steps, wanted at most 2e9", o->epochs, steps); }
    *count = o->epochs > 0 ? (int64_t)steps : (int64_t)(rows_per_epoch / rows_per_step);
    if (*count == 0 && o->epochs > 0) {
        return fail(e, "--epochs: %g of %llu rows are less than a step, which takes %llu, wanted at least %g", o->epochs,
                    (unsigned long long)rows_per_epoch, (unsigned long long)rows_per_step,
                    (double)rows_per_step / (double)rows_per_epoch);
    }
    return *count > 0 || fail(e,
                              "--train: one epoch has %llu rows of %d tokens, but a step takes %llu\n"
                              "  hint: give --steps N to train over several epochs, or lower --batch, --seq or --total-batch",
                              (unsigned long long)rows_per_epoch, o->seq, (unsigned long long)rows_per_step);
}

/* Returns the shape that a word of --decay-shape stands for. */
static inline PhaseShape plan_decay_shape(const Options* o) { return (PhaseShape)(SHAPE_LINEAR + o->decay_shape); }

/* Returns the schedule that the flags ask for, of a run of `steps` steps. */
static inline Schedule plan_schedule(const Options* o, int64_t steps) {
    return schedule_make((ScheduleName)o->schedule, steps, o->warmup, o->lr, o->final_lr_frac, o->decay, plan_decay_shape(o));
}

/* Checks that a run of `steps` steps has a place for its --decay. With --minutes the steps are not known yet. */
static inline bool plan_check_decay(const Options* o, int64_t steps, Error* e) {
    char word[OPTION_TEXT];
    if (o->decay == 0) {
        return o->schedule == SCHEDULE_WSD || !o->given[OPT_decay_shape] ||
               fail(e, "--decay-shape: is of no use without --decay N or --schedule wsd");
    }
    if (o->schedule == SCHEDULE_COSINE || o->schedule == SCHEDULE_LINEAR) {
        return fail(e, "--decay: the schedule is %s, whose rate always falls, wanted --schedule wsd or constant",
                    option_text(o, OPT_schedule, word));
    }
    return !o->train || (o->minutes > 0 && o->steps < 0) || (o->decay + (int64_t)o->warmup <= steps && steps <= 2000000000) ||
           fail(e, "--decay: %d steps and --warmup %d do not fit into the %lld steps of the run", o->decay, o->warmup,
                (long long)steps);
}

/* Returns whether work is due after `step` steps. It is due at each multiple of `every` (0: none), and after step `last`. */
static inline bool is_due(int every, int64_t step, int64_t last) { return (every > 0 && step % every == 0) || step == last; }

/* Prints the plan of `ranks` processes or groups, for a run of `count` steps. With --minutes, they may not be known yet. `data`
 * may have no tokens: then there is none. */
static inline void print_plan(FILE* f, const Plan* p, const Options* o, int64_t count, int ranks, const DataLoader* data) {
    char a[32], b[32], c[32], steps[64], epochs[96] = "", by_ranks[64] = "";
    const double rows = (double)count * (double)(p->tokens_per_step / o->seq);
    text_count(data->num_tokens, c, sizeof c);
    if (o->minutes > 0 && o->steps < 0) {
        snprintf(steps, sizeof steps, "the steps that fit into %g minutes, each", o->minutes);
        snprintf(epochs, sizeof epochs, ", an epoch has %s tokens", c);
    } else {
        snprintf(steps, sizeof steps, "%s step%s", text_count((uint64_t)count, a, sizeof a), text_plural(count));
        snprintf(epochs, sizeof epochs, ", %.2f epochs of %s tokens", rows / (double)data->rows_per_epoch, c);
    }
    if (ranks > 1) { snprintf(by_ranks, sizeof by_ranks, " x %d processes", ranks); }
    if (o->seq_parallel > 1) {
        snprintf(by_ranks, sizeof by_ranks, " x %d group%s of %d processes", ranks, text_plural(ranks), o->seq_parallel);
    }
    fprintf(f, "plan    %s of %s tokens (%d x %d x %d%s)%s\n", steps, text_count((uint64_t)p->tokens_per_step, b, sizeof b),
            p->accumulate, o->batch, o->seq, by_ranks, data->num_tokens > 0 ? epochs : "");
}

/* Prints what the rows of `d` hold, unless they are simply consecutive tokens. Also prints what it took to find them, if
 * that is worth a line. */
static inline void print_rows(FILE* f, const char* name, const DataLoader* d) {
    const RowCounts* c = &d->counts;
    const double tokens = (double)c->rows * d->T;
    char rows[32], documents[32];
    if (!d->indexed) { return; }
    text_count(c->rows, rows, sizeof rows);
    text_count(c->documents, documents, sizeof documents);
    print_names(f, "rows    %s: %s rows of %d tokens (%s)", name, rows, d->T, documents_names[d->documents]);
    if (c->documents > 0) { fprintf(f, ", %s documents, %.1f %% padding", documents, 100 * (double)c->padding / tokens); }
    if (d->masked) {
        fprintf(f,
                ", %.1f %% of the tokens are trained, answers cut by the end of a row: %llu, without the start of their "
                "conversation: %llu",
                100 * (double)c->trained / tokens, (unsigned long long)c->cut, (unsigned long long)c->lost);
    }
    fprintf(f, "\n");
    if (c->bytes < 1000000 && c->seconds < 0.5) { return; }
    fprintf(f, "        an index of %.1f MB, made in %.1f s\n", 1e-6 * (double)c->bytes, c->seconds);
}

#endif
