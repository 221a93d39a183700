/* schedule.h -- the learning rate of every step, the same in the C, CUDA and Python trainers.
 *
 * A schedule is a list of phases. A phase begins at the step `from` (steps count from 0) and holds until the next one begins.
 * It leads from the rate `first` to the rate `last`, both fractions of the peak rate. With n = to - from, k = step - from and
 * p = k / n, in [0, 1]:
 *   rise:    (first * n + (last - first) * (k + 1)) / n    the warm-up: its first rate is not 0, and its last one is `last`
 *   linear:  first - (first - last) * p
 *   cosine:  last + (first - last) * (1 + cos(pi * p)) / 2
 *   root:    last + (first - last) * (1 - sqrt(p))
 * The decay by the root is from Haegele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations"
 * (2024). All of it is computed in double; the caller rounds.
 *
 * A checkpoint has the phases of its run, since schedule_shorten() and schedule_decay() may give it others later.
 */
#ifndef LLMC_SCHEDULE_H
#define LLMC_SCHEDULE_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

typedef enum { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD } ScheduleName;  // the words of --schedule

typedef enum { SHAPE_RISE, SHAPE_LINEAR, SHAPE_COSINE, SHAPE_ROOT, NUM_SHAPES } PhaseShape;
static const char* const shape_names[NUM_SHAPES] = {"rise", "linear", "cosine", "root"};

typedef struct {
    int64_t from, to;
    double first, last;  // fractions of the peak rate
    PhaseShape shape;
} Phase;

enum { MOST_PHASES = 16 };  // three, one of a branch, and one each time that --minutes shortens a run: at most twelve times

typedef struct {
    double lr;      // the peak rate: --lr
    int64_t steps;  // of the run: the only place that says where it ends
    int count;      // at least 1
    Phase phases[MOST_PHASES];
} Schedule;

/* Returns the learning rate of step `now` (or of a place between steps), where the peak rate is `peak`. */
static inline double schedule_rate(const Schedule* s, double now, double peak) {
    const double pi = 3.14159265358979323846;
    int i = s->count - 1;
    while (i > 0 && now < (double)s->phases[i].from) { i--; }
    const Phase* phase = &s->phases[i];
    const double from = (double)phase->from, to = (double)phase->to, n = to - from, first = phase->first, last = phase->last;
    const double p = now >= to ? 1.0 : now <= from ? 0.0 : (now - from) / n;
    volatile double above =
        (first - last) * (1.0 - sqrt(p));  // the root's; volatile: a build by GCC never fused this with `last`
    switch (phase->shape) {
        case SHAPE_RISE: return peak * (first * n + (last - first) * fmin(now - from + 1, n)) / n;
        case SHAPE_COSINE: return peak * (last + (first - last) * 0.5 * (1.0 + cos(pi * p)));
        case SHAPE_ROOT: return peak * (last + above);
        default: return peak * (first - (first - last) * p);
    }
}

static inline double learning_rate(const Schedule* s, int64_t step) { return schedule_rate(s, (double)step, s->lr); }

/* Adds a phase in the place of those that begin at its first step or later. If there is no room, the oldest one goes. */
static inline void schedule_add(Schedule* s, int64_t from, int64_t to, double first, double last, PhaseShape shape) {
    const Phase p = {from, to, first, last, shape};
    while (s->count > 0 && s->phases[s->count - 1].from >= from) { s->count--; }
    if (s->count == MOST_PHASES) { memmove(s->phases, s->phases + 1, (size_t)--s->count * sizeof p); }
    s->phases[s->count++] = p;
}

/* Ends the run `decay` steps after step `now`, from which on the rate falls from where it is to the fraction `final` of the
 * peak rate. */
static inline void schedule_decay(Schedule* s, int64_t now, int64_t decay, double final, PhaseShape shape) {
    schedule_add(s, now, now + decay, schedule_rate(s, (double)now, 1), final, shape);
    Phase* before = s->count > 1 ? s->phases + s->count - 2 : NULL;
    if (before && before->first == before->last && before->to > now) { before->to = now; }  // it holds as long as planned
    s->steps = now + decay;
}

/* Returns the schedule of a run of `steps` steps: a warm-up to the rate `lr`, then what --schedule names, to the fraction
 * `final` of `lr`. wsd holds the peak rate and falls in the last `decay` steps, and so does constant if `decay` is not 0. wsd
 * with 0 takes the last fifth. A warm-up that reaches into this fifth moves the decay, which then does not get to its end:
 * pressed into the steps that are left, it would jump. */
static inline Schedule schedule_make(ScheduleName name, int64_t steps, int64_t warmup, double lr, double final, int64_t decay,
                                     PhaseShape shape) {
    static const PhaseShape shapes[] = {SHAPE_COSINE, SHAPE_LINEAR, SHAPE_LINEAR};
    const int64_t most = steps > warmup ? steps - warmup : 0, fall = decay == 0 ? steps / 5 : decay < most ? decay : most;
    Schedule s;
    memset(&s, 0, sizeof s);
    s.lr = lr;
    schedule_add(&s, 0, warmup, 0, 1, SHAPE_RISE);
    if (name == SCHEDULE_WSD || decay > 0) {
        const int64_t from = fall < most ? steps - fall : warmup;
        schedule_add(&s, warmup, from, 1, 1, SHAPE_LINEAR);
        schedule_decay(&s, from, fall, final, shape);
    } else {
        schedule_add(&s, warmup, warmup + most, 1, name == SCHEDULE_CONSTANT ? 1 : final, shapes[name]);
    }
    s.steps = steps;
    return s;
}

/* Ends the run after `steps` steps. The phases after step `now` are pressed together into the steps that are left. The phase
 * that `now` is in leads on from the rate that it has there. */
static inline void schedule_shorten(Schedule* s, int64_t now, int64_t steps) {
    const Schedule old = *s;
    const double share = (double)(steps - now) / (double)(old.steps - now);
    s->steps = steps;
    for (int i = 0; i < old.count; i++) {
        const Phase p = old.phases[i];
        const bool begun = p.from <= now;
        if (begun && i + 1 < old.count && old.phases[i + 1].from <= now) { continue; }
        schedule_add(s, begun ? now : now + llround(share * (double)(p.from - now)),
                     now + llround(share * (double)(p.to - now)), begun ? schedule_rate(&old, (double)now, 1) : p.first, p.last,
                     p.shape);
    }
}

#endif
