/* timing.h -- times a few steps at learning rate 0, for --minutes and --dry-run; says how many steps fit into --minutes, and
 * where a run ends whose steps become slower. A step may take minutes. So the timing shows a progress line of its own, and can
 * give up after a while. Then it knows the time of a part of a step, or only that a step takes longer.
 */
#ifndef LLMC_TIMING_H
#define LLMC_TIMING_H

#include "llmc/base/os.h"              // defines: os_pipe, os_wait
#include "llmc/base/progress.h"        // defines: Progress, progress_begin, progress_add, progress_end
#include "llmc/run/session/signals.h"  // defines: run_ask_for_end, run_stop_done
#include "llmc/train/step.h"           // defines: Recipe, BatchSource
#include "llmc/dist/agree.h"           // defines: agree_first
#include "llmc/run/session/trainer.h"  // defines: Trainer

#include <math.h>
#include <pthread.h>

enum { TIMED_STEPS = 3 };  // at most; the fastest counts

typedef struct {
    double ms;   // time of the fastest step. If it gave up before one was done: an estimate from `parts` or, without
                 // them, a lower bound
    int parts;   // micro-batches that were done then
    bool whole;  // a step was done
} StepTime;

/* A thread that watches the clock, since a step comes back only when it is done. */
typedef struct {
    Progress progress;
    double bound;  // seconds; then it asks the step to end
    int done[2];   // a pipe, closed at its writing end once the steps are timed
    pthread_t thread;
} StepClock;

static inline void* step_clock_run(void* clock) {
    StepClock* c = (StepClock*)clock;
    for (bool done = false; !done;) {
        done = os_wait(c->done[0], POLLIN, 1);
        if (!done) { progress_add(&c->progress, 0); }
        if (!done && now_seconds() - c->progress.start >= c->bound) { run_ask_for_end(); }
    }
    progress_end(&c->progress);
    return NULL;
}

/* A source of batches that counts its rows. */
typedef struct {
    BatchSource data;
    uint64_t rows;
} CountedRows;

static inline bool counted_next(void* counted, int32_t* x, int32_t* y, Error* e) {
    CountedRows* c = (CountedRows*)counted;
    c->rows += (uint64_t)c->data.rows;
    return c->data.next(c->data.ctx, x, y, e);
}

/* Times TIMED_STEPS steps with micro-batches of B rows, but begins none after ten seconds. Gives up after `bound` seconds
 * and drops the step that it is in. Fails if the data cannot be read. */
static inline bool time_steps(const Trainer* t, void* model, const Recipe* steps, int B, double bound, FILE* screen,
                              StepTime* time, Error* e) {
    Recipe recipe = *steps;
    CountedRows counted = {recipe.data, 0};
    StepClock clock;
    bool goes_on = true;
    clock.progress = progress_begin(screen, "timing", 0, "");
    clock.bound = bound;
    recipe.data.next = counted_next;
    recipe.data.ctx = &counted;
    if (!os_pipe(clock.done, true)) { return fail(e, "cannot make a pipe: %s", strerror(errno)); }
    if (pthread_create(&clock.thread, NULL, step_clock_run, &clock) != 0) { return fail(e, "no thread can be started"); }
    time->ms = INFINITY;
    time->parts = 0;
    time->whole = false;
    const double start = clock.progress.start;
    for (int i = 0; goes_on && i < TIMED_STEPS; i++) {
        bool another = i == 0 || now_seconds() - start < 10.0;
        agree_first(recipe.team, &another, sizeof another);
        if (!another) { break; }
        goes_on = t->step(model, &recipe, 0.0, e);
        if (goes_on) { time->ms = fmin(time->ms, t->result(model, &recipe).ms); }
        time->whole = time->whole || goes_on;
    }
    close(clock.done[1]);
    pthread_join(clock.thread, NULL);
    close(clock.done[0]);
    run_stop_done();
    if (!time->whole) {
        const double seconds = now_seconds() - start;
        // the last one begun was not done
        time->parts = counted.rows > 0 ? (int)((counted.rows - 1) / (uint64_t)B) : 0;
        time->ms = 1e3 * (time->parts ? seconds / time->parts * recipe.accumulate : seconds);
    }
    return !e->msg[0];
}

// ---------------------------------------------------------------------------------------------------------------------
// --minutes

enum { FEWEST_STEPS = 10 };

/* Other programs, a hot processor or a slow disk may make later steps slower than the timed ones. So the run looks at the clock
 * after each tenth of its minutes, and at least a second. Its pace is the time from step to step since the last look, with
 * validations, samples and checkpoints; the faster of two paces in a row counts. So a pause of the process, or a short load,
 * does not count.
 *
 * A run that would end more than a tenth of its minutes late gets an earlier last step, so that it ends with its minutes. It
 * keeps at least FEWEST_STEPS, so that the learning rate comes down in steps. A run that becomes faster keeps its last step. */
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
