/* matmul_trials.h -- decides which algorithm each matrix product of a training step gets (--tune), by times taken inside of
 * running steps. Only the decisions are here: matmul_tune.cuh knows the algorithms and gpu/tune.cuh the steps, behind the
 * functions of a TrialCard, so that a test can stand in for the card.
 *
 * A card at its power limit lowers its clock for all kernels when one of them draws more. So a product that is faster alone may
 * slow the step down, and only the time of the whole step decides:
 *
 *   1. rotation   A product runs many times in a step (once a layer, say), and each time another candidate computes it. Call i
 *                 of step s takes candidate (g i + s) mod n. With g prime to n, each candidate meets each call in n steps; with
 *                 g near n / calls, its times are spread over these steps. A time is fitted as
 *                     us = time of the candidate * pace of the step
 *                 by medians in turns, so a clock that drifts favors nobody. A second round repeats this with the
 *                 TRIALS_KEPT fastest.
 *   2. duels      Whole steps, as in training, go in turns A B B A: what is chosen so far against a change of it. B wins if
 *                 its steps are faster than A's before and behind it, by 0.3 % and by 2.5 standard errors at least. First all
 *                 products change to their fastest candidates at once, then one after the other to and fro, those that gained
 *                 most in the rotation first. At the end what is chosen must have won against the first choices in a duel of
 *                 its own. Without a win everything stays as it was: candidate 0, the heuristic's first choice.
 *
 * The time for all this is fixed by the time of a micro-step before it begins (trials_budget) and kept by the clock.
 */
#ifndef LLMC_MATMUL_TRIALS_H
#define LLMC_MATMUL_TRIALS_H

#include "llmc/base/utils.h"
#include <math.h>

enum {
    TRIALS_PRODUCTS = 256,   // that take part, at most
    TRIALS_CANDIDATES = 48,  // of a product, at most, its first choice included
    TRIALS_KEPT = 8,         // that take part in the second round
    TRIALS_TIMES = 5,        // of a candidate in the first round, at least; fewer candidates take part if need be
    TRIALS_MOST = 1 << 18,   // times of all
    TRIALS_ROUND = 200,      // steps of a round, at most
    TRIALS_WARM = 100,       // steps before the first, at most
    TRIALS_TURN = 256,       // steps of a turn, at most
    TRIALS_LEAST_TURN = 4,   // at least; the first fifth does not count
    TRIALS_MOST_CYCLES = 2,  // A B B A of a duel
    TRIALS_FITS = 4,         // of times and paces
    TRIALS_ALL = -1,         // names the duel in which all products change at once, and
    TRIALS_CHOSEN = -2,      // that of what is chosen against the first choices
};
#define TRIALS_MARGIN 0.003  // a smaller gain of the step is none
#define TRIALS_ERRORS 2.5    // standard errors that a gain must have
#define TRIALS_CLOSE 1.05    // candidates slower than this times the fastest are out after the first round
#define TRIALS_FASTER 0.998  // a challenger takes at most this part of the first choice's time

typedef struct {
    int count;                      // of candidates; the first is the heuristic's choice
    int active[TRIALS_CANDIDATES];  // those that take part
    int num_active;
    bool started[TRIALS_CANDIDATES];  // has run: the first time, in which its code may load, does not count
    double us[TRIALS_CANDIDATES];     // fitted times; 0: unknown
    int calls, most_calls;            // in this step so far; in any step
    int seen;                         // steps with calls
    int challenger;                   // the fastest but the first; 0: none
    double gain;                      // us of a step that the challenger is faster
} TrialProduct;

/* A candidate's time in a step. */
typedef struct {
    int product, candidate, step;
    float us;
} TrialTime;

typedef struct {
    TrialProduct* products;
    int num_products;
    TrialTime* times;  // TRIALS_MOST
    size_t num_times;
    int step;
    bool chosen[TRIALS_PRODUCTS];  // the challenger instead of the first
} Trials;

typedef struct {
    double first_ms, ms;  // medians of A's and B's steps, averaged over the turns
    double gain, margin;  // of B: 1 - ms / first_ms; what it needs
    bool won;
} Duel;

/* The card, or what stands in for it. A function that returns false ends the trials: what has won until then stays. */
typedef struct {
    void* ctx;
    double (*now)(void* ctx);                         // seconds
    bool (*rotate)(void* ctx);                        // a step whose products call trials_pick() and _record()
    void (*use)(void* ctx, const bool* chosen);       // the algorithms of the steps to come
    bool (*steps)(void* ctx, int count, double* ms);  // whole steps
    void (*tell)(void* ctx, int product, const Duel* duel,
                 int n);  // of a duel of n products: `product`, or one of the two names
} TrialCard;

static inline void trials_open(Trials* t, int num_products) {
    memset(t, 0, sizeof *t);
    t->num_products = num_products < TRIALS_PRODUCTS ? num_products : TRIALS_PRODUCTS;
    t->products = (TrialProduct*)xcalloc((size_t)t->num_products + 1, sizeof *t->products);
    t->times = (TrialTime*)xcalloc(TRIALS_MOST, sizeof *t->times);
    for (int i = 0; i < t->num_products; i++) { t->products[i].count = t->products[i].num_active = 1; }
}

static inline void trials_close(Trials* t) {
    free(t->products);
    free(t->times);
}

// ---------------------------------------------------------------------------------------------------------------------
// rotation

/* Returns the candidate of n for call `call` of step `step`, of `calls` a step. */
static inline int trial_of(int step, int call, int calls, int n) {
    int stride = calls > 0 && n / calls > 1 ? n / calls : 1;
    for (;; stride++) {  // n + 1 is prime to n
        int a = stride, b = n;
        while (b) {
            const int rest = a % b;
            a = b;
            b = rest;
        }
        if (a == 1) { break; }
    }
    return (int)(((int64_t)call * stride + step) % n);
}

/* Returns the candidate that computes this call of a product. */
static inline int trials_pick(Trials* t, int product) {
    TrialProduct* p = &t->products[product];
    const int call = p->calls++;
    return p->active[trial_of(p->seen, call, p->most_calls, p->num_active)];
}

/* Takes the time of a call; negative: the candidate does not run, and is out. */
static inline void trials_record(Trials* t, int product, int candidate, float us) {
    TrialProduct* p = &t->products[product];
    if (us < 0 && candidate > 0) {
        int kept = 0;
        for (int i = 0; i < p->num_active; i++) {
            if (p->active[i] != candidate) { p->active[kept++] = p->active[i]; }
        }
        p->num_active = kept;
    } else if (!p->started[candidate]) {
        p->started[candidate] = us >= 0;
    } else if (us >= 0 && t->num_times < TRIALS_MOST) {
        const TrialTime time = {product, candidate, t->step, us};
        t->times[t->num_times++] = time;
    }
}

/* Ends a step of the rotation. */
static inline void trials_next_step(Trials* t) {
    for (int i = 0; i < t->num_products; i++) {
        TrialProduct* p = &t->products[i];
        p->seen += p->calls > 0;
        p->most_calls = p->calls > p->most_calls ? p->calls : p->most_calls;
        p->calls = 0;
    }
    t->step++;
}

static inline int compare_doubles(const void* a, const void* b) {
    const double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

/* Returns the median of n > 0 numbers, which it sorts. */
static inline double median_of(double* x, size_t n) {
    qsort(x, n, sizeof *x, compare_doubles);
    return n % 2 ? x[n / 2] : 0.5 * (x[n / 2 - 1] + x[n / 2]);
}

/* Sets out[g] to the median of the x[i] whose group[i] is g; a group without any keeps its number. */
static inline void medians_of_groups(const int* group, const double* x, size_t n, int groups, double* out) {
    size_t* first = (size_t*)xcalloc((size_t)groups + 1, sizeof *first);
    double* sorted = (double*)xcalloc(n + 1, sizeof *sorted);
    for (size_t i = 0; i < n; i++) { first[group[i] + 1]++; }
    for (int g = 0; g < groups; g++) { first[g + 1] += first[g]; }
    for (size_t i = 0; i < n; i++) { sorted[first[group[i]]++] = x[i]; }  // first[g] becomes the end of group g
    for (int g = 0; g < groups; g++) {
        const size_t begin = g ? first[g - 1] : 0;
        if (first[g] > begin) { out[g] = median_of(sorted + begin, first[g] - begin); }
    }
    free(first);
    free(sorted);
}

/* Fits all times so far: us = time of the candidate * pace of the step. */
static inline void trials_fit(Trials* t) {
    const size_t n = t->num_times;
    const int cells = t->num_products * TRIALS_CANDIDATES;
    int* cell = (int*)xcalloc(n + 1, sizeof *cell);
    int* step = (int*)xcalloc(n + 1, sizeof *step);
    double* x = (double*)xcalloc(n + 1, sizeof *x);
    double* time = (double*)xcalloc((size_t)cells + 1, sizeof *time);
    double* pace = (double*)xcalloc((size_t)t->step + 1, sizeof *pace);
    for (int s = 0; s <= t->step; s++) { pace[s] = 1.0; }
    for (size_t i = 0; i < n; i++) {
        cell[i] = t->times[i].product * TRIALS_CANDIDATES + t->times[i].candidate;
        step[i] = t->times[i].step;
    }
    for (int fit = 0; fit < TRIALS_FITS; fit++) {
        for (size_t i = 0; i < n; i++) { x[i] = (double)t->times[i].us / pace[step[i]]; }
        medians_of_groups(cell, x, n, cells, time);
        for (size_t i = 0; i < n; i++) { x[i] = time[cell[i]] > 0 ? (double)t->times[i].us / time[cell[i]] : 1.0; }
        medians_of_groups(step, x, n, t->step + 1, pace);
        for (int s = 0; s <= t->step; s++) { pace[s] = pace[s] > 0 ? pace[s] : 1.0; }
    }
    for (int i = 0; i < t->num_products; i++) {
        memcpy(t->products[i].us, time + (size_t)i * TRIALS_CANDIDATES, sizeof t->products[i].us);
    }
    free(cell);
    free(step);
    free(x);
    free(time);
    free(pace);
}

/* Lets as many candidates of each product take part as `steps` steps can time. */
static inline void trials_admit(Trials* t, int steps) {
    for (int i = 0; i < t->num_products; i++) {
        TrialProduct* p = &t->products[i];
        const int64_t room = 1 + (int64_t)steps * p->most_calls / TRIALS_TIMES;
        p->num_active = p->count < room ? p->count : (int)room;
        for (int k = 0; k < p->num_active; k++) { p->active[k] = k; }
    }
}

/* Lets the first choice and the fastest others go on. */
static inline void trials_keep(Trials* t) {
    for (int i = 0; i < t->num_products; i++) {
        TrialProduct* p = &t->products[i];
        double fastest = INFINITY;
        for (int k = 0; k < p->num_active; k++) {
            const double us = p->us[p->active[k]];
            if (us > 0) { fastest = fmin(fastest, us); }
        }
        int kept[TRIALS_KEPT] = {0}, count = 1;
        while (count < TRIALS_KEPT) {
            int next = 0;  // the fastest of those that are not kept yet
            for (int k = 0; k < p->num_active; k++) {
                const int c = p->active[k];
                bool is_new = p->us[c] > 0 && p->us[c] <= TRIALS_CLOSE * fastest;
                for (int j = 0; j < count; j++) { is_new = is_new && kept[j] != c; }
                if (is_new && (next == 0 || p->us[c] < p->us[next])) { next = c; }
            }
            if (next == 0) { break; }
            kept[count++] = next;
        }
        memcpy(p->active, kept, (size_t)count * sizeof *kept);
        p->num_active = count;
    }
}

/* Finds each product's challenger. Returns how many have one. */
static inline int trials_find_challengers(Trials* t) {
    int found = 0;
    for (int i = 0; i < t->num_products; i++) {
        TrialProduct* p = &t->products[i];
        p->challenger = 0;
        for (int k = 0; k < p->num_active; k++) {
            const int c = p->active[k];
            if (p->us[c] > 0 && p->us[c] <= TRIALS_FASTER * p->us[0] && (!p->challenger || p->us[c] < p->us[p->challenger])) {
                p->challenger = c;
            }
        }
        p->gain = p->challenger ? p->most_calls * (p->us[0] - p->us[p->challenger]) : 0.0;
        found += p->challenger > 0;
    }
    return found;
}

// ---------------------------------------------------------------------------------------------------------------------
// duels

/* Returns the median of a turn's steps without the first fifth, in which the clock settles. Writes how far each of the others
 * is from it behind far[*count]. */
static inline double trials_turn(double* ms, int steps, double* far, size_t* count) {
    const int skip = (steps + 4) / 5;
    double kept[TRIALS_TURN];
    memcpy(kept, ms + skip, (size_t)(steps - skip) * sizeof *kept);
    const double median = median_of(kept, (size_t)(steps - skip));
    for (int i = skip; i < steps; i++) { far[(*count)++] = fabs(ms[i] - median); }
    return median;
}

/* Judges the turns a[0] b[0] b[1] a[1] (a[2] ...) of `cycles`: their medians. far: (count) what each step is from its
 * turn's. */
static inline Duel duel_judge(const double* a, const double* b, int cycles, double* far, size_t count) {
    Duel d = {0, 0, 0, 0, true};
    for (int i = 0; i < 2 * cycles; i++) {
        d.first_ms += a[i] / (2 * cycles);
        d.ms += b[i] / (2 * cycles);
        d.won = d.won && b[i] < a[i];
    }
    // the spread of a step by the median deviation, of which each turn's median has made one zero; the error of a median of n
    // normal numbers is 1.2533 times that of their mean
    const double turns = 4.0 * cycles, n = (double)count / turns;
    const double spread = 1.4826 * median_of(far, count) * n / fmax(1.0, n - 1);
    const double error = 1.2533 * spread / sqrt(n) * sqrt(2.0 / (2 * cycles));
    d.gain = 1 - d.ms / d.first_ms;
    d.margin = fmax(TRIALS_MARGIN, TRIALS_ERRORS * error / d.first_ms);
    d.won = d.won && d.gain >= d.margin;
    return d;
}

/* Lets `challenger` (B) go against `chosen` (A) in `cycles` of A B B A, with turns of `turn` steps. */
static inline bool trials_duel(const TrialCard* card, const bool* chosen, const bool* challenger, int turn, int cycles,
                               Duel* d) {
    double ms[TRIALS_TURN], a[2 * TRIALS_MOST_CYCLES], b[2 * TRIALS_MOST_CYCLES];
    double* far = (double*)xcalloc((size_t)(4 * cycles * turn), sizeof *far);
    size_t count = 0;
    bool ok = true;
    for (int i = 0; ok && i < 4 * cycles; i++) {
        const bool is_b = i % 4 == 1 || i % 4 == 2;
        if (i % 2 == 1 || i == 0) { card->use(card->ctx, is_b ? challenger : chosen); }  // A | B B | A A | B B | A
        double* medians = is_b ? b : a;
        ok = card->steps(card->ctx, turn, ms);
        if (ok) { medians[i / 2] = trials_turn(ms, turn, far, &count); }
    }
    if (ok) { *d = duel_judge(a, b, cycles, far, count); }
    free(far);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// the whole

/* What the trials may take. */
typedef struct {
    double seconds;     // all of it
    int first, second;  // steps of the rotation's rounds
    int turn;           // steps of a turn
    double duel;        // seconds of one A B B A
} TrialBudget;

/* Plans the trials: 49 s for micro-steps of 93 ms (126M), 158 s for those of 754 ms (8B), never more than 170 s.
 * micro, step: seconds of a micro-step, and of a step of the trials */
static inline TrialBudget trials_budget(double micro, double step) {
    TrialBudget b;
    b.seconds = fmin(170.0, fmin(10.0 + 420.0 * micro, 45.0 + 150.0 * micro));
    b.first = (int)fmin(TRIALS_ROUND, 0.12 * b.seconds / step);
    b.second = (int)fmin(TRIALS_ROUND, 0.08 * b.seconds / step);
    b.turn = (int)fmax(TRIALS_LEAST_TURN, fmin(TRIALS_TURN, 0.03 * b.seconds / step));
    b.duel = 4 * b.turn * step;
    return b;
}

/* How the trials ended. */
typedef struct {
    int products, candidates;  // that took part in the first round
    int steps;                 // of the rotation
    int duels, changed;        // products whose algorithm changed
    double first_ms, ms;  // of a step with the first choices and with what is chosen, in their last duel; 0: there was none
    double seconds;
} TrialOutcome;

/* Runs up to `steps` steps of the rotation until `end`. */
static inline bool trials_rotate(Trials* t, const TrialCard* card, int steps, double end) {
    bool ok = true;
    for (int i = 0; ok && i < steps && card->now(card->ctx) < end; i++) {
        ok = card->rotate(card->ctx);
        trials_next_step(t);
    }
    return ok;
}

/* Runs the first steps with the first choices alone: counts the calls of each product. Returns the seconds of a step, or 0 if
 * one does not run. */
static inline double trials_warm_up(Trials* t, const TrialCard* card) {
    double seconds[TRIALS_WARM];
    const double start = card->now(card->ctx);
    int n = 0;
    while (n < TRIALS_WARM && (n < 3 || card->now(card->ctx) - start < 1.5)) {
        const double begin = card->now(card->ctx);
        if (!trials_rotate(t, card, 1, INFINITY)) { return 0; }
        seconds[n++] = card->now(card->ctx) - begin;
    }
    return median_of(seconds + n / 3, (size_t)(n - n / 3));
}

/* Lists the products with challengers, those that gained most first. Returns their number. */
static inline int trials_order(const Trials* t, int order[TRIALS_PRODUCTS]) {
    int n = 0;
    for (int i = 0; i < t->num_products; i++) {
        if (!t->products[i].challenger) { continue; }
        int at = n++;
        for (; at > 0 && t->products[order[at - 1]].gain < t->products[i].gain; at--) { order[at] = order[at - 1]; }
        order[at] = i;
    }
    return n;
}

/* One duel of the trials. If the challenger wins, it is chosen; a win against the first choices alone is `proven`. */
static inline bool trials_meet(Trials* t, const TrialCard* card, const bool* from, const bool* challenger, int product, int n,
                               int turn, int cycles, bool* proven, TrialOutcome* out) {
    static const bool none[TRIALS_PRODUCTS] = {false};
    const bool direct = memcmp(from, none, sizeof none) == 0;
    Duel d;
    if (!trials_duel(card, from, challenger, turn, cycles, &d)) { return false; }
    out->duels++;
    card->tell(card->ctx, product, &d, n);
    if (direct && (d.won || out->ms == 0)) {
        out->first_ms = d.first_ms;
        out->ms = d.won ? d.ms : d.first_ms;
    }
    if (d.won) { memcpy(t->chosen, challenger, sizeof t->chosen); }
    if (d.won && direct) { memcpy(proven, challenger, sizeof t->chosen); }
    return true;
}

/* Lets the challengers fight until `end`. What is in `proven` at the end has won against the first choices. */
static inline bool trials_fight(Trials* t, const TrialCard* card, const TrialBudget* b, double end, bool* proven,
                                TrialOutcome* out) {
    static const bool none[TRIALS_PRODUCTS] = {false};
    int order[TRIALS_PRODUCTS];
    bool next[TRIALS_PRODUCTS] = {false};
    const int n = trials_order(t, order);
    for (int k = 0; k < n; k++) { next[order[k]] = true; }
    if (n > 1 && card->now(card->ctx) + 2 * b->duel <= end &&
        !trials_meet(t, card, t->chosen, next, TRIALS_ALL, n, b->turn, 2, proven, out)) {
        return false;
    }
    for (int k = 0; k < n; k++) {
        const bool unproven = memcmp(t->chosen, none, sizeof none) != 0;  // a change of it would need a duel at the end
        if (card->now(card->ctx) + (unproven ? 2 : 1) * b->duel > end) { break; }
        memcpy(next, t->chosen, sizeof next);
        next[order[k]] = !next[order[k]];
        if (!trials_meet(t, card, t->chosen, next, order[k], 1, b->turn, 1, proven, out)) { return false; }
    }
    memcpy(next, t->chosen, sizeof next);
    if (memcmp(next, proven, sizeof next) == 0 || memcmp(next, none, sizeof none) == 0) { return true; }
    return trials_meet(t, card, none, next, TRIALS_CHOSEN, n, b->turn, 1, proven, out);
}

/* Chooses an algorithm for each product: t->chosen, which is in use at the end. micro_steps: of a step of the trials. Returns
 * false if a step did not run; what had won stays chosen. */
static inline bool trials_run(Trials* t, const TrialCard* card, int micro_steps, TrialOutcome* out) {
    bool proven[TRIALS_PRODUCTS] = {false};
    const double start = card->now(card->ctx), step = trials_warm_up(t, card);
    bool ok = step > 0;
    memset(out, 0, sizeof *out);
    if (ok) {
        const TrialBudget b = trials_budget(step / micro_steps, step);
        const double end = start + b.seconds;
        trials_admit(t, b.first);
        for (int i = 0; i < t->num_products; i++) {
            out->products += t->products[i].num_active > 1;
            out->candidates += t->products[i].num_active;
        }
        ok = trials_rotate(t, card, b.first, start + 0.2 * b.seconds);
        trials_fit(t);
        trials_keep(t);
        ok = ok && trials_rotate(t, card, b.second, start + 0.25 * b.seconds);
        trials_fit(t);
        out->steps = t->step;
        ok = ok && (trials_find_challengers(t) == 0 || trials_fight(t, card, &b, end, proven, out));
    }
    memcpy(t->chosen, proven, sizeof proven);
    card->use(card->ctx, t->chosen);
    for (int i = 0; i < t->num_products; i++) { out->changed += t->chosen[i]; }
    out->seconds = card->now(card->ctx) - start;
    return ok;
}

#endif
