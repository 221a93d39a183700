/* pace.h -- how many steps fit into --minutes, and where a run ends whose steps become slower.
 *
 * The number of steps comes from a few timed ones (timing.h). Other programs, a hot processor or a slow disk may make later
 * steps slower. So the run looks at the clock after each tenth of its minutes, and at least a second. Its pace is the time from
 * step to step since the last look, with validations, samples and checkpoints; the faster of two paces in a row counts. So a
 * pause of the process, or a short load, does not count.
 *
 * A run that would end more than a tenth of its minutes late gets an earlier last step, so that it ends with its minutes. It
 * keeps at least FEWEST_STEPS, so that the learning rate comes down in steps. A run that becomes faster keeps its last step.
 */
#ifndef LLMC_PACE_H
#define LLMC_PACE_H

#include <math.h>
#include <stdint.h>

enum { FEWEST_STEPS = 10 };

typedef struct {
    double tenth;       // of --minutes, in seconds; 0: the run has all the time that it needs
    double deadline;    // when its minutes are over: now_seconds()
    double at;          // of the last look: now_seconds()
    int64_t step;       // steps done then
    double last, pace;  // seconds a step before that look, and what counted then; 0: it is the first
} Pace;

/* Returns the number of steps that fit into --minutes, of which `elapsed` seconds are over. Leaves a tenth of the time for
 * validation, samples and checkpoints. The number is rounded down to two digits. */
static inline int64_t steps_for_minutes(double minutes, double elapsed, double step_seconds) {
    const double steps = 0.9 * (minutes * 60.0 - elapsed) / (step_seconds > 1e-9 ? step_seconds : 1e-9);
    if (!(steps >= FEWEST_STEPS)) { return FEWEST_STEPS; }
    int64_t n = (int64_t)fmin(steps, 2e9), unit = 1;
    while (n / unit >= 100) { unit *= 10; }
    return n / unit * unit;
}

/* Returns the number of steps at which the run ends: `steps`, or fewer if it would end too late. `step` steps are done. */
static inline int64_t pace_end(Pace* p, double now, int64_t step, int64_t steps) {
    if (p->tenth == 0 || now - p->at < fmax(p->tenth, 1) || step == p->step) { return steps; }
    const double before = p->last;
    p->last = (now - p->at) / (double)(step - p->step);
    p->pace = fmin(p->last, before);
    p->at = now;
    p->step = step;
    if (now + p->pace * (double)(steps - step) <= p->deadline + p->tenth) { return steps; }
    const double more = fmax((p->deadline - now) / p->pace, FEWEST_STEPS);
    return more < (double)(steps - step) ? step + (int64_t)more : steps;
}

#endif
