/* plan.h -- the number of steps and the tokens per step of a run, from its flags and data; the number of steps for --minutes.
 */
#ifndef LLMC_PLAN_H
#define LLMC_PLAN_H

#include "llmc/base/utils.h"        // defines: fail
#include "llmc/files/dataloader.h"  // defines: DataLoader
#include "llmc/run/cli/options.h"   // defines: Options
#include "llmc/base/text.h"         // defines: text_count, print_names

typedef struct {
    int64_t steps;            // of the whole schedule
    int64_t stop;             // last step of this run: steps, or --stop-after
    int64_t tokens_per_step;  // over all ranks
    int accumulate;           // micro-steps per step
    double epochs;            // of the whole schedule
} Plan;

/* Plans a run of `ranks` processes, or groups of --seq-parallel, over data of rows_per_epoch rows of --seq tokens. With
 * --minutes, the number of steps is not known at first: plan once, call steps_for_minutes(), set o->steps, and plan again. */
static inline bool plan_make(Plan* p, const Options* o, int ranks, uint64_t rows_per_epoch, Error* e) {
    memset(p, 0, sizeof *p);
    const int64_t micro = (int64_t)o->batch * o->seq * ranks;
    p->tokens_per_step = o->total_batch ? o->total_batch : micro;
    if (p->tokens_per_step % micro != 0) {
        char hint[64] = "";
        for (int batch = o->batch; batch >= 1; batch--) {
            if (p->tokens_per_step % ((int64_t)batch * o->seq * ranks) != 0) { continue; }
            snprintf(hint, sizeof hint, "\n  hint: these flags fit: --batch %d", batch);
            break;
        }
        return fail(e, "--total-batch: is %lld, wanted a multiple of batch * seq * %s = %d * %d * %d = %lld%s",
                    (long long)p->tokens_per_step, o->seq_parallel > 1 ? "groups of processes" : "processes", o->batch, o->seq,
                    ranks, (long long)micro, hint);
    }
    if (p->tokens_per_step / micro > INT32_MAX) {
        return fail(e, "--total-batch: is %lld, wanted at most 2^31 micro-steps of %lld tokens", (long long)p->tokens_per_step,
                    (long long)micro);
    }
    p->accumulate = (int)(p->tokens_per_step / micro);
    const uint64_t rows_per_step = (uint64_t)(p->tokens_per_step / o->seq);
    p->steps = o->dry_run && !o->train && o->steps < 0 ? 1 : o->steps;  // without data: the plan of a step
    if (p->steps < 0 || o->epochs > 0) {
        const double steps = o->epochs * (double)rows_per_epoch / (double)rows_per_step;
        if (steps > 2e9) { return fail(e, "--epochs: %g are %.0f steps, wanted at most 2e9", o->epochs, steps); }
        p->steps = o->epochs > 0 ? (int64_t)steps : (int64_t)(rows_per_epoch / rows_per_step);
        if (p->steps == 0 && o->epochs > 0) {
            return fail(e, "--epochs: %g of %llu rows are less than a step, which takes %llu, wanted at least %g", o->epochs,
                        (unsigned long long)rows_per_epoch, (unsigned long long)rows_per_step,
                        (double)rows_per_step / (double)rows_per_epoch);
        }
        if (p->steps == 0) {
            return fail(e,
                        "--train: one epoch has %llu rows of %d tokens, but a step takes %llu\n"
                        "  hint: give --steps N to train over several epochs, or lower --batch, --seq or --total-batch",
                        (unsigned long long)rows_per_epoch, o->seq, (unsigned long long)rows_per_step);
        }
    }
    p->stop = o->stop_after > 0 && o->stop_after < p->steps ? o->stop_after : p->steps;
    p->epochs = rows_per_epoch ? (double)p->steps * (double)rows_per_step / (double)rows_per_epoch : 0.0;
    return true;
}

/* Returns whether a task is due after `step` steps. It is due at each multiple of `every` (0: none), and at the run's end. */
static inline bool plan_due(const Plan* p, int every, int64_t step) {
    return (every > 0 && step % every == 0) || step == p->stop;
}

/* Gives the run fewer steps. */
static inline void plan_shorten(Plan* p, int64_t steps) {
    p->epochs *= (double)steps / (double)p->steps;
    p->steps = steps;
    if (p->stop > steps) { p->stop = steps; }
}

/* Prints the plan of `ranks` processes or groups. With --minutes, the number of steps may not be known yet. num_tokens: of the
 * data; 0: there is none. */
static inline void print_plan(FILE* f, const Plan* p, const Options* o, int ranks, uint64_t num_tokens) {
    char a[32], b[32], c[32], steps[64], epochs[96] = "", by_ranks[64] = "";
    text_count(num_tokens, c, sizeof c);
    if (o->minutes > 0 && o->steps < 0) {
        snprintf(steps, sizeof steps, "the steps that fit into %g minutes, each", o->minutes);
        snprintf(epochs, sizeof epochs, ", an epoch has %s tokens", c);
    } else {
        snprintf(steps, sizeof steps, "%s step%s", text_count((uint64_t)p->steps, a, sizeof a), text_plural(p->steps));
        snprintf(epochs, sizeof epochs, ", %.2f epochs of %s tokens", p->epochs, c);
    }
    if (ranks > 1) { snprintf(by_ranks, sizeof by_ranks, " x %d processes", ranks); }
    if (o->seq_parallel > 1) {
        snprintf(by_ranks, sizeof by_ranks, " x %d group%s of %d processes", ranks, text_plural(ranks), o->seq_parallel);
    }
    fprintf(f, "plan    %s of %s tokens (%d x %d x %d%s)%s\n", steps, text_count((uint64_t)p->tokens_per_step, b, sizeof b),
            p->accumulate, o->batch, o->seq, by_ranks, num_tokens > 0 ? epochs : "");
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
        fprintf(f, ", %.1f %% of the tokens are trained, answers cut by the end of a row: %llu",
                100 * (double)c->trained / tokens, (unsigned long long)c->cut);
    }
    fprintf(f, "\n");
    if (c->bytes < 1000000 && c->seconds < 0.5) { return; }
    fprintf(f, "        an index of %.1f MB, made in %.1f s\n", 1e-6 * (double)c->bytes, c->seconds);
}

enum { MINUTES_MEASURE = 3 };  // steps timed for --minutes; the fastest counts

/* Returns the number of steps that fit into --minutes. The trainer measures before step 0: it runs MINUTES_MEASURE steps
 * with learning rate 0 and wipes their traces (m, v, gradients, data position), so that the run equals a run with --steps
 * and this number. Then it sets o->steps, which the log and the checkpoints record and a resumed run keeps. `elapsed`:
 * seconds since the start of the program. Leaves a tenth of the time for validation, samples and checkpoints. Returns at
 * least 10, rounded down to two digits. */
static inline int64_t steps_for_minutes(double minutes, double elapsed, double step_seconds) {
    double steps = 0.9 * (minutes * 60.0 - elapsed) / (step_seconds > 1e-9 ? step_seconds : 1e-9);
    if (!(steps >= 10.0)) { return 10; }
    if (steps > 2e9) { steps = 2e9; }
    int64_t n = (int64_t)steps, unit = 1;
    while (n / unit >= 100) { unit *= 10; }
    return n / unit * unit;
}

#endif
