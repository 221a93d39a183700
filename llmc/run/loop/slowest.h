/* slowest.h -- finds the slowest of several ranks, by the time that each computes in a step without waiting for others. The
 * ranks wait for each other, so the time of a whole step is the same on all and does not show which one is slow.
 *
 * It compares the means over a window of SLOWEST_STEPS steps. It reports a rank that takes more than SLOWEST_SHARE longer than
 * the median of the others. It reports the same rank again only after SLOWEST_AGAIN windows.
 */
#ifndef LLMC_SLOWEST_H
#define LLMC_SLOWEST_H

#include "llmc/base/utils.h"

enum { SLOWEST_STEPS = 20, SLOWEST_AGAIN = 50 };
#define SLOWEST_SHARE 0.05

typedef struct {
    double* sums;       // (ranks) ms of each rank in this window
    int steps;          // of this window
    int told, windows;  // the rank reported last, and how many windows ago; windows 0: none was
} Slowest;

typedef struct {
    int rank;
    double ms, others_ms;  // mean time of a step on this rank, and the median of the other ranks' means
} SlowRank;

static inline int slowest_compare(const void* a, const void* b) {
    const double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

/* Returns the slowest of at least two ranks. */
static inline SlowRank slowest_of(const double* ms /* (ranks) */, int ranks) {
    double* others = (double*)xmalloc((size_t)ranks * sizeof *others);
    SlowRank s = {0, ms[0], 0};
    for (int i = 1; i < ranks; i++) {
        if (ms[i] > ms[s.rank]) { s.rank = i; }
    }
    int count = 0;
    for (int i = 0; i < ranks; i++) {
        if (i != s.rank) { others[count++] = ms[i]; }
    }
    qsort(others, (size_t)count, sizeof *others, slowest_compare);
    s.ms = ms[s.rank];
    s.others_ms = 0.5 * (others[(count - 1) / 2] + others[count / 2]);
    free(others);
    return s;
}

/* Adds the times of a step. Returns whether to report a rank, and sets *slow to it. Leaves out a step whose time one rank
 * does not know (0). */
static inline bool slowest_add(Slowest* s, const float* ms /* (ranks) */, int ranks, SlowRank* slow) {
    for (int i = 0; i < ranks; i++) {
        if (!(ms[i] > 0)) { return false; }
    }
    if (!s->sums) { s->sums = (double*)xcalloc((size_t)ranks, sizeof *s->sums); }
    for (int i = 0; i < ranks; i++) { s->sums[i] += (double)ms[i] / SLOWEST_STEPS; }
    if (++s->steps < SLOWEST_STEPS) { return false; }
    *slow = slowest_of(s->sums, ranks);
    s->steps = 0;
    memset(s->sums, 0, (size_t)ranks * sizeof *s->sums);
    const bool again = s->windows == 0 || slow->rank != s->told || s->windows >= SLOWEST_AGAIN;
    if (s->windows > 0) { s->windows++; }
    if (slow->ms <= (1 + SLOWEST_SHARE) * slow->others_ms || !again) { return false; }
    s->told = slow->rank;
    s->windows = 1;
    return true;
}

static inline void slowest_free(Slowest* s) {
    free(s->sums);
    s->sums = NULL;
}

#endif
