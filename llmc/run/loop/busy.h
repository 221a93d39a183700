/* busy.h -- notices on a CPU that other programs use the cores. A thread that has to wait for a core holds up all others at the
 * end of every parallel loop, so a step may take many times as long; fewer threads are then faster.
 */
#ifndef LLMC_BUSY_H
#define LLMC_BUSY_H

#include "llmc/base/utils.h"

#include <math.h>

enum { BUSY_STEPS = 20 };  // steps that are looked at

typedef struct {
    double ms[BUSY_STEPS];
    int steps;
    bool told;
} BusyCores;

/* Returns whether more programs than this one want the cores. The load is the mean of a minute, so an own run that has just
 * ended still counts. */
static inline bool busy_load(double load, long cores) { return load > 1.25 * (double)cores; }

/* Returns whether steps vary too much for a quiet machine: several take more than five times as long as the fastest. */
static inline bool busy_steps(const double* ms, int steps) {
    double fastest = INFINITY;
    int slow = 0;
    for (int i = 0; i < steps; i++) { fastest = fmin(fastest, ms[i]); }
    for (int i = 0; i < steps; i++) { slow += ms[i] > 5.0 * fastest; }
    return slow >= 3;
}

/* Warns before the run if the load is high and this run has `threads` threads. */
static inline void busy_before(BusyCores* b, int threads) {
    double load = 0.0;
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    b->told = !isatty(STDERR_FILENO);  // a hint for somebody who watches, not for a file
    if (b->told || threads < 2 || getloadavg(&load, 1) != 1 || !busy_load(load, cores)) { return; }
    warn("other programs use the cores (load %.1f on %ld): --threads 1 may be faster than %d", load, cores, threads);
    b->told = true;
}

/* Looks at one more step. The first one, with cold caches, does not count. */
static inline void busy_step(BusyCores* b, double ms, int threads) {
    const int i = b->steps++ - 1;
    if (b->told || i < 0 || i >= BUSY_STEPS || threads < 2) { return; }
    b->ms[i] = ms;
    if (i + 1 < BUSY_STEPS || !busy_steps(b->ms, BUSY_STEPS)) { return; }
    warn("steps vary by more than five times: if other programs use the cores, --threads 1 may be faster than %d", threads);
    b->told = true;
}

#endif
