/* row_parts.h -- batches of parts of rows, for --seq-parallel: reads whole rows and gives this rank its part of each. The ranks
 * of a group read the same rows. starts, for attention, keep counting in whole rows.
 */
#ifndef LLMC_ROW_PARTS_H
#define LLMC_ROW_PARTS_H

#include "llmc/base/utils.h"
#include "llmc/dist/sequence.h"  // defines: SequenceShare
#include "llmc/train/step.h"     // defines: BatchSource

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

#endif
