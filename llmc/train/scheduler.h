/* scheduler.h -- the learning rate of every step, the same in the C, CUDA and Python trainers.
 *
 * Steps count from 0; `f` is the final rate as a fraction of the peak rate:
 *   step < warmup:   lr * (step + 1) / warmup
 *   cosine:          lr * (f + (1 - f) * (1 + cos(pi * p)) / 2)     p = (step - warmup) / (steps - warmup), in [0, 1]
 *   linear:          lr * (1 - (1 - f) * p)
 *   constant:        lr
 *   wsd:             lr, then over the last fifth of all steps lr * (f + (1 - f) * (1 - sqrt(q))), q from 0 to 1
 * The decay of wsd is from Haegele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations" (2024).
 * All of it is computed in double; the caller rounds.
 */
#ifndef LLMC_SCHEDULER_H
#define LLMC_SCHEDULER_H

#include <math.h>
#include <stdint.h>

typedef enum { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD } Schedule;  // the words of --schedule

/* Returns (now - first) / (last - first), clamped to [0, 1]; 1 for an empty interval. */
static inline double schedule_progress(int64_t now, int64_t first, int64_t last) {
    if (now >= last) { return 1.0; }
    return now <= first ? 0.0 : (double)(now - first) / (double)(last - first);
}

/* Returns the learning rate of step `step` (from 0) of `steps`. */
static inline double learning_rate(Schedule schedule, int64_t step, int64_t steps, int64_t warmup, double lr,
                                   double final_lr_frac) {
    const double pi = 3.14159265358979323846, f = final_lr_frac;
    if (step < warmup) { return lr * (double)(step + 1) / (double)warmup; }
    const double p = schedule_progress(step, warmup, steps);
    switch (schedule) {
        case SCHEDULE_COSINE: return lr * (f + (1.0 - f) * 0.5 * (1.0 + cos(pi * p)));
        case SCHEDULE_LINEAR: return lr * (1.0 - (1.0 - f) * p);
        case SCHEDULE_CONSTANT: return lr;
        case SCHEDULE_WSD: return lr * (f + (1.0 - f) * (1.0 - sqrt(schedule_progress(step, steps - steps / 5, steps))));
    }
    return lr;
}

#endif
