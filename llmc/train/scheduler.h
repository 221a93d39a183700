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
 *
 * A run may get a new end while it runs. From the step at which the new end counts, it passes through the rest of its schedule
 * in the steps that it has left: each step has a place in the whole schedule, a real number, and the rate of that place. So
 * earlier steps keep their rates, the rate does not jump, and the last step has about the schedule's last rate.
 */
#ifndef LLMC_SCHEDULER_H
#define LLMC_SCHEDULER_H

#include "llmc/files/trainer_state.h"  // defines: Shortened

#include <math.h>
#include <stdint.h>

typedef enum { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD } Schedule;  // the words of --schedule

/* Returns (now - first) / (last - first), clamped to [0, 1]; 1 for an empty interval. */
static inline double schedule_progress(double now, int64_t first, int64_t last) {
    if (now >= (double)last) { return 1.0; }
    return now <= (double)first ? 0.0 : (now - (double)first) / (double)(last - first);
}

/* Returns the place of step `step` (from 0). `s`: how the schedule was shortened, at this step or before. */
static inline double schedule_place(const Shortened* s, int64_t step) {
    if (s->steps == 0) { return (double)step; }
    return s->place + (double)(step - s->step) * (((double)s->from - s->place) / (double)(s->steps - s->step));
}

/* Shortens a schedule of `from` steps before step `step`: from there on it ends after `steps` steps. It may have been shortened
 * before. */
static inline void schedule_shorten(Shortened* s, int64_t step, int64_t from, int64_t steps) {
    const Shortened next = {step, schedule_place(s, step), s->steps ? s->from : from, steps};
    *s = next;
}

/* Returns the learning rate of step `step` (from 0), or of a place between steps, of `steps`. */
static inline double learning_rate(Schedule schedule, double step, int64_t steps, int64_t warmup, double lr,
                                   double final_lr_frac) {
    const double pi = 3.14159265358979323846, f = final_lr_frac;
    if (step < (double)warmup) { return lr * fmin(step + 1, (double)warmup) / (double)warmup; }
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
