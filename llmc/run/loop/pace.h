/* pace.h -- whether a run with --minutes still ends in time, and where it must end if its steps have become slower.
 *
 * The number of steps comes from a few timed steps (session/plan.h). Other programs, a hot processor or a slow disk may make
 * later steps slower. So the run looks at the clock after each tenth of its minutes, and at least a second. The time from step
 * to step since the last look, with validations, samples and checkpoints, is the pace. The run compares two looks
 * in a row and keeps the faster pace. So a pause of the process, or a short load, does not count as a slower pace.
 *
 * A run that would end more than a tenth of its minutes late gets an earlier last step, so that it ends with its minutes. It
 * keeps at least PACE_FEWEST steps, so that the learning rate comes down in steps. A run that becomes faster keeps its last
 * step.
 */
#ifndef LLMC_PACE_H
#define LLMC_PACE_H

#include <math.h>
#include <stdint.h>

enum { PACE_FEWEST = 10 };

typedef struct {
    double seconds;   // --minutes; 0: the run has all the time that it needs
    double deadline;  // when they are over: now_seconds()
    double at;        // of the last look
    int64_t step;     // steps done then
    double last;      // seconds a step before that look; 0: it is the first
    double pace;      // seconds a step that counted then
} Pace;

/* Begins to watch a run at its first step. `started`: when its minutes began, `now`: both now_seconds(). */
static inline Pace pace_begin(double minutes, double started, double now, int64_t step) {
    const Pace p = {60 * minutes, started + 60 * minutes, now, step, 0, 0};
    return p;
}

/* Returns the number of steps at which the run ends: `steps`, or fewer if it would end too late. `step` steps are done. */
static inline int64_t pace_end(Pace* p, double now, int64_t step, int64_t steps) {
    const double tenth = 0.1 * p->seconds;
    if (p->seconds == 0 || now - p->at < fmax(tenth, 1) || step == p->step) { return steps; }
    const double last = p->last;
    p->last = (now - p->at) / (double)(step - p->step);
    p->pace = fmin(p->last, last);
    p->at = now;
    p->step = step;
    if (now + p->pace * (double)(steps - step) <= p->deadline + tenth) { return steps; }
    const double more = fmax((p->deadline - now) / p->pace, PACE_FEWEST);
    return more < (double)(steps - step) ? step + (int64_t)more : steps;
}

#endif
