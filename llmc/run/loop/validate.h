/* validate.h -- losses of batches without training: the loss on validation data, and the answers to --tasks.
 *
 * With --seq-parallel a batch has parts of rows: the ranks of a group read the same whole rows, and each takes its part of
 * them. starts, for attention, keep counting in whole rows.
 */
#ifndef LLMC_VALIDATE_H
#define LLMC_VALIDATE_H

#include "llmc/base/utils.h"
#include "llmc/dist/agree.h"           // defines: agree_ok, agree_add
#include "llmc/dist/sequence.h"        // defines: SequenceShare
#include "llmc/base/progress.h"        // defines: Progress, progress_begin, progress_add, progress_end
#include "llmc/run/session/session.h"  // defines: Process, Data, process_share, passes_together
#include "llmc/run/session/trainer.h"  // defines: Trainer
#include "llmc/text/tasks.h"           // defines: Tasks, TaskFile, TaskScore, tasks_score
#include "llmc/train/step.h"           // defines: BatchSource, count_trained

#include <math.h>

// ---------------------------------------------------------------------------------------------------------------------
// parts of rows

typedef struct {
    BatchSource whole;
    SequenceShare share;
    int T;          // of a whole row
    int32_t* rows;  // (2, whole.rows, T): x and y
} RowParts;

/* The next() of a BatchSource: x and y have T / parts tokens a row. */
static inline bool row_parts_next(void* parts, int32_t* x, int32_t* y, Error* e) {
    const RowParts* p = (const RowParts*)parts;
    const size_t T = (size_t)p->T, rows = (size_t)p->whole.rows, count = T / (size_t)p->share.row_ranks;
    const int32_t *all_x = p->rows, *all_y = p->rows + rows * T;
    if (!p->whole.next(p->whole.ctx, p->rows, p->rows + rows * T, e)) { return false; }
    for (size_t b = 0; b < rows; b++) {
        const size_t first = b * T + (size_t)p->share.part * count;
        memcpy(x + b * count, all_x + first, count * sizeof *x);
        memcpy(y + b * count, all_y + first, count * sizeof *y);
    }
    return true;
}

/* Returns the source of this rank's parts of the rows of `whole`, which have T tokens: `whole` itself where rows are not
 * shared. *p must stay at its place in memory until row_parts_free(). */
static inline BatchSource row_parts_of(RowParts* p, const BatchSource* whole, SequenceShare share, int T) {
    memset(p, 0, sizeof *p);
    if (share.row_ranks == 1) { return *whole; }
    p->whole = *whole;
    p->share = share;
    p->T = T;
    p->rows = (int32_t*)xmalloc(2 * (size_t)whole->rows * (size_t)T * sizeof *p->rows);
    BatchSource source = *whole;
    source.next = row_parts_next;
    source.ctx = p;
    return source;
}

static inline void row_parts_free(RowParts* p) {
    free(p->rows);
    memset(p, 0, sizeof *p);
}

// ---------------------------------------------------------------------------------------------------------------------
// losses

/* A model and the data on which it is tried. */
typedef struct {
    const Trainer* trainer;
    void* model;
    const Process* process;
    const Options* options;
    Data* data;
} Evaluator;

/* Gets the losses of one batch. */
typedef void (*TakeLosses)(void* ctx, const float* losses /* (B, T / parts) */, uint64_t batch);

/* Gives the losses of `batches` batches of `data` to take(). While the device works on a batch, the host takes the losses of
 * the previous one. Returns false if the data cannot be read, or without an error if a signal asked for the end. */
static inline bool take_losses(const Evaluator* with, const BatchSource* data, uint64_t batches, TakeLosses take, void* ctx,
                               Error* e) {
    const Trainer* t = with->trainer;
    bool ok = true;
    for (uint64_t queued = 0, taken = 0; taken < (ok ? batches : queued); taken++) {
        while (ok && queued < batches && queued - taken < (uint64_t)t->in_flight) {
            ok = t->queue_losses(with->model, data, e);
            queued += ok;
        }
        if (taken == queued) { break; }
        take(ctx, t->wait_losses(with->model), taken);
    }
    return ok;
}

/* The loss on validation data. */
typedef struct {
    double loss;       // mean over the trained targets, in nats
    double bpb;        // bits per byte of the targets that are text; NaN without a tokenizer, or without text
    uint64_t trained;  // targets
} ValidationLoss;

typedef struct {
    DataLoader* val;
    const Tokenizer* tokenizer;  // NULL: none
    uint64_t rows, B, T;
    SequenceShare share;  // the groups take the batches in turn
    uint64_t read;        // rows given out so far
    uint64_t trained;     // targets of this rank's parts of the first `rows` rows
    uint64_t bytes;       // of these targets
    double* sums;         // (2, rows) of this rank's losses of each row: of all targets, and of those that are text
    bool* text;           // (ring, T / parts) whether a target is text, of the rows that are read and have no losses yet
    uint64_t ring;        // rows
    int32_t* starts;      // (B, T) of the batch; NULL: rows hold no documents
    Progress progress;
} Validation;

/* Returns which row of the data is the i-th of this rank's group. */
static inline uint64_t validation_row(const Validation* v, uint64_t i) {
    return (i / v->B * (uint64_t)v->share.groups + (uint64_t)v->share.group) * v->B + i % v->B;
}

/* Returns the tokens of a row that this rank computes. */
static inline uint64_t validation_part(const Validation* v) { return v->T / (uint64_t)v->share.row_ranks; }

/* Reads a row and counts the bytes of this rank's targets: the next() of a BatchSource. A special token stands for none. The
 * last batch is padded with rows from the start, which do not count. */
static inline bool validation_next(void* validation, int32_t* x /* (T) */, int32_t* y /* (T) */, Error* e) {
    Validation* v = (Validation*)validation;
    const uint64_t row = validation_row(v, v->read);
    if (v->val->row != row) { dataloader_seek(v->val, row); }
    if (!dataloader_next(v->val, x, y, e)) { return false; }
    if (v->starts) { memcpy(v->starts + v->read % v->B * v->T, v->val->starts, v->T * sizeof *v->starts); }
    const size_t n = validation_part(v);
    const int32_t* own = y + (size_t)v->share.part * n;
    bool* text = v->text + v->read++ % v->ring * n;
    if (row >= v->rows) { return true; }
    v->trained += count_trained(own, n);
    for (size_t i = 0; v->tokenizer && i < n; i++) {
        const size_t bytes = own[i] >= 0 ? tokenizer_text_bytes(v->tokenizer, own[i]) : 0;
        text[i] = bytes > 0;
        v->bytes += bytes;
    }
    return true;
}

static inline void validation_take(void* validation, const float* losses, uint64_t batch) {
    Validation* v = (Validation*)validation;
    const uint64_t first = validation_row(v, batch * v->B), rows = first < v->rows ? size_min(v->rows - first, v->B) : 0;
    const size_t n = validation_part(v);
    const bool* text = v->text + batch * v->B % v->ring * n;
    for (size_t i = 0; i < rows * n; i++) { v->sums[first + i / n] += losses[i]; }
    for (size_t i = 0; i < rows * n; i++) { v->sums[v->rows + first + i / n] += text[i] ? losses[i] : 0; }
    progress_add(&v->progress, rows * (uint64_t)v->share.groups);
}

/* Computes the loss over the first `max_rows` rows of the validation data (or all rows, if fewer), and reports progress to
 * `screen` (or NULL). Several groups of ranks share the batches. The losses add up row by row, and within a row part by part,
 * so the number of groups does not change the result. Fails as take_losses(). */
static inline bool validate(const Evaluator* with, uint64_t max_rows, FILE* screen, ValidationLoss* l, Error* e) {
    const Options* o = with->options;
    DataLoader* val = &with->data->val;
    Team* team = with->process->team;
    const uint64_t rows = max_rows < val->rows_per_epoch ? max_rows : val->rows_per_epoch;
    const SequenceShare share = process_share(with->process, o);
    const uint64_t group = (uint64_t)share.group, groups = (uint64_t)share.groups;
    Validation v;
    RowParts parts;
    memset(&v, 0, sizeof v);
    v.val = val;
    v.tokenizer = data_tokenizer(with->data);
    v.rows = rows;
    v.B = (uint64_t)o->batch;
    v.T = (uint64_t)o->seq;
    v.share = share;
    v.sums = (double*)xcalloc(rows, 2 * sizeof *v.sums);
    v.ring = v.B * (uint64_t)(with->trainer->in_flight + 1);
    v.text = (bool*)xcalloc(v.ring * validation_part(&v), sizeof *v.text);
    v.starts = val->starts ? (int32_t*)xcalloc(v.B * v.T, sizeof *v.starts) : NULL;
    v.progress = progress_begin(screen, "val", rows, "rows");
    const BatchSource whole = {validation_next, &v, 1, 0, NULL, v.starts};
    const BatchSource data = row_parts_of(&parts, &whole, share, o->seq);
    const uint64_t batches = ceil_div(rows, v.B);
    // ranks that pass the layers together have as many batches as group 0; rows after the last one do not count
    const uint64_t first = passes_together(team, job_trains(with->process->job), o) ? 0 : group;
    const uint64_t mine = batches > first ? ceil_div(batches - first, groups) : 0;
    const bool ok = agree_ok(team, take_losses(with, &data, mine, validation_take, &v, e), e);
    progress_end(&v.progress);
    double counts[2] = {(double)v.trained, (double)v.bytes}, sum = 0, text = 0;
    if (ok) {
        agree_add(team, v.sums, 2 * rows);
        agree_add(team, counts, 2);
    }
    for (uint64_t i = 0; i < rows; i++) { sum += v.sums[i]; }
    for (uint64_t i = 0; i < rows; i++) { text += v.sums[rows + i]; }
    free(v.sums);
    free(v.text);
    free(v.starts);
    row_parts_free(&parts);
    l->loss = sum / counts[0];
    l->bpb = counts[1] > 0 ? text / (M_LN2 * counts[1]) : NAN;
    l->trained = (uint64_t)counts[0];
    return ok;
}

typedef struct {
    const Tasks* tasks;
    const TaskFile* file;
    uint64_t B;
    SequenceShare share;
    double* likelihoods;  // (file->choice_count)
    Progress progress;
} Answering;

static inline void answering_take(void* answering, const float* losses, uint64_t batch) {
    Answering* a = (Answering*)answering;
    const size_t first = batch * a->B, count = a->file->choice_count, rows = size_min(count - first, a->B);
    for (size_t i = 0; i < rows; i++) {
        const TaskChoice* c = &a->tasks->choices[a->file->first_choice + first + i];
        const size_t n = (size_t)(a->tasks->T / a->share.row_ranks);
        a->likelihoods[first + i] = task_likelihood(a->tasks, c, losses + i * n, (size_t)a->share.part * n, n);
    }
    progress_add(&a->progress, rows);
}

/* Answers the questions of a file, on each rank, or with shared rows on each group. Fails as take_losses(). */
static inline bool answer_tasks(const Evaluator* with, const TaskFile* file, TaskScore* score, Error* e) {
    Tasks* tasks = &with->data->tasks;
    const BatchSource whole = {tasks_next, tasks, 1, 0, NULL, NULL};
    const SequenceShare share = process_share(with->process, with->options);
    RowParts parts;
    const BatchSource data = row_parts_of(&parts, &whole, share, tasks->T);
    const uint64_t B = (uint64_t)with->options->batch;
    double* likelihoods = (double*)xcalloc(file->choice_count, sizeof *likelihoods);
    Answering a = {tasks, file, B, share, likelihoods, progress_begin(stdout, "tasks", file->choice_count, "choices")};
    tasks->next = file->first_choice;
    const bool ok = take_losses(with, &data, ceil_div(file->choice_count, B), answering_take, &a, e);
    progress_end(&a.progress);
    row_parts_free(&parts);
    if (ok && share.row_ranks > 1) {  // add up what the first group's members computed of each row
        if (share.group > 0) { memset(likelihoods, 0, file->choice_count * sizeof *likelihoods); }
        agree_add(with->process->team, likelihoods, file->choice_count);
    }
    *score = tasks_score(tasks, file, likelihoods);
    free(likelihoods);
    return ok;
}

#endif
