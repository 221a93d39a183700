/* step.h -- the interface of one training step, the same in both trainers. It has the source of the step's tokens, the numbers
 * that are fixed for a whole run, and the step's result. The interface of one pass of generation is here, too.
 *
 * A step takes `accumulate` micro-batches of B rows. The GPU trainer queues a step and learns its result later, so both
 * trainers have two functions: train_step() and step_result().
 *
 * train_step() returns false for a step that it drops before the update: *e says why, or is empty if a signal asked for the
 * end. Then weights, m, v and the run's state are unchanged since the step before, and step_result() does not report the step.
 * Either all ranks drop it, or none does.
 */
#ifndef LLMC_STEP_H
#define LLMC_STEP_H

#include "llmc/optim/recipe.h"  // defines: Hyperparameters, UpdateVerdict
#include "llmc/base/utils.h"
#include "llmc/dist/team_state.h"      // defines: Team
#include "llmc/files/trainer_state.h"  // defines: TrainerState
#include "llmc/files/dataloader.h"     // defines: DataLoader, dataloader_next
#include "llmc/files/mix.h"            // defines: Mix, mix_next
#include "llmc/quantise.h"             // defines: QuantiseCounts, NUM_QUANTISED

/* The use that a job makes of a model. */
typedef struct {
    int rank, ranks;  // of the run
    int B, T;         // rows of a batch, and tokens of a row; B = 0: no batches
    bool train;       // with gradients and the optimizer's state
    bool documents;   // rows hold some
    int cache_len;    // positions of the KV cache; 0: no generation
} ModelUse;

// ---------------------------------------------------------------------------------------------------------------------
// tokens

/* A source of batches. next() writes the next `rows` rows of T tokens x and targets y. */
typedef struct {
    bool (*next)(void* ctx, int32_t* x, int32_t* y, Error* e);
    void* ctx;
    int rows;
    int num_sources;         // sources of the data; 0: there is only one
    const int32_t* sources;  // (rows) of the last batch, if there are several
    const int32_t* starts;   // (B, T) of the last batch, whose rows hold documents (rows.h); NULL: each row is one
} BatchSource;

static inline bool batches_from_loader(void* loader, int32_t* x, int32_t* y, Error* e) {
    return dataloader_next((DataLoader*)loader, x, y, e);
}

static inline BatchSource batches_of(DataLoader* d) {
    const BatchSource source = {batches_from_loader, d, d->B, 0, NULL, d->starts};
    return source;
}

static inline bool batches_from_mix(void* mix, int32_t* x, int32_t* y, Error* e) { return mix_next((Mix*)mix, x, y, e); }

static inline BatchSource batches_of_mix(Mix* m) {
    const BatchSource source = {batches_from_mix, m, m->stream->B, m->count, m->batch_sources, m->stream->starts};
    return m->count == 1 ? batches_of(m->stream) : source;
}

/* Reads the next B rows into x, y (B, T); B is a multiple of source->rows. */
static inline bool batch_read(const BatchSource* source, int B, int T, int32_t* x, int32_t* y, Error* e) {
    for (int b = 0; b < B; b += source->rows) {
        if (!source->next(source->ctx, x + (size_t)b * T, y + (size_t)b * T, e)) { return false; }
    }
    return true;
}

/* Counts the targets that are trained. */
static inline uint64_t count_trained(const int32_t* y, size_t n) {
    uint64_t count = 0;
    for (size_t i = 0; i < n; i++) { count += y[i] >= 0; }
    return count;
}

enum { DECODE_ROWS = 64 };  // tokens of a prompt that one pass of generation takes

/* Feeds `count` <= DECODE_ROWS tokens at positions pos .. pos + count - 1 and returns the logits (V) after the last one, valid
 * until the next call. Returns NULL and sets *e on failure. */
typedef const float* (*NextLogits)(void* model, const int32_t* tokens, int count, int pos, Error* e);

// ---------------------------------------------------------------------------------------------------------------------
// fixed for a whole run

typedef struct {
    BatchSource data;
    Hyperparameters hyper;
    int accumulate;     // micro-batches per step
    uint64_t tokens;    // per step, over all ranks
    uint64_t seed;      // of stochastic rounding
    Team* team;         // the ranks of the run; NULL: the process is alone
    TrainerState* run;  // counts steps, tokens and updates; holds the outlier detectors and the loss scale
} Recipe;

// ---------------------------------------------------------------------------------------------------------------------
// the result of a step

typedef struct {
    double loss;  // mean over the step's trained targets, before the update
    double norm;  // norm of the gradient, before clipping
    double lr;
    double ms;
    UpdateVerdict verdict;
    double loss_z, norm_z;                    // z-scores against recent steps; NaN if there are too few
    double loss_scale;                        // after the step
    double trained;                           // targets of the step; the others are -1
    SourceLosses sources;                     // of these targets, by the source of their rows
    QuantiseCounts quantised[NUM_QUANTISED];  // counts of a sample of the tensors with --fp8; otherwise zero
} Metrics;

/* Adds the losses (B, T) of the last batch of `data`, whose targets are y, to its sources' losses; nothing if it has one
 * source. */
static inline void step_add_sources(Metrics* r, const BatchSource* data, const float* losses, const int32_t* y, int T) {
    SourceLosses* all = &r->sources;
    all->count = data->num_sources;
    for (int b = 0; all->count > 0 && b < data->rows; b++) {
        const int s = data->sources[b];
        for (int t = 0; t < T; t++) { all->sum[s] += losses[(size_t)b * (size_t)T + t]; }
        all->tokens[s] += (double)count_trained(y + (size_t)b * (size_t)T, (size_t)T);
    }
}

/* Writes why a step was skipped to `out` (`cap` bytes) and returns it; NULL if the step was applied. */
static inline const char* skip_note(const Metrics* r, bool scales_loss, char* out, size_t cap) {
    switch (r->verdict) {
        case UPDATE_APPLIED: return NULL;
        case UPDATE_NOT_FINITE:
            snprintf(out, cap, "skipped: not finite");
            if (scales_loss) { snprintf(out, cap, "skipped: not finite, loss scale now %g", r->loss_scale); }
            break;
        case UPDATE_OUTLIER_LOSS: snprintf(out, cap, "skipped: loss z %.1f", r->loss_z); break;
        case UPDATE_OUTLIER_NORM: snprintf(out, cap, "skipped: gradient norm z %.1f", r->norm_z); break;
    }
    return out;
}

#endif
