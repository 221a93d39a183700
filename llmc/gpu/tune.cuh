/* tune.cuh -- --tune: runs the steps in which the algorithms of the matrix products are tried and chosen. matmul_trials.h says
 * how, and decides; matmul_tune.cuh times the products.
 *
 * The steps are the trainer's own, on the run's data, with all that belongs to a step. Only the update does nothing: with
 * infinitely many tokens a step its loss is not finite, so AdamW skips it and no weight, moment or master weight changes, also
 * of a run that goes on. What does change, the run's counters and the StepState, is put back; the caller takes the data back to
 * its first row. A step of many micro-batches is stood for by one of TUNE_MICRO_STEPS: the first, and one that adds to it.
 *
 * In the rotation products change their algorithm at each call, so these steps are not captured. In the duels whole steps run
 * as in training: two in flight, from graphs, which are captured anew for each change.
 *
 * Several ranks step together. All try rank 0's candidates and decide by what it measures, and so decide alike.
 */
#ifndef LLMC_TUNE_CUH
#define LLMC_TUNE_CUH

#include "llmc/gpu/steps.cuh"    // defines: Steps, steps_capture, steps_release, steps_restore, micro_kinds
#include "llmc/matmul_tune.cuh"  // defines: MatmulTuner, matmul_tuner_open, matmul_tuner_count, matmul_tuner_listen
#include "llmc/run/progress.h"   // defines: Progress, progress_begin, progress_add, progress_end
#include "llmc/run/together.h"   // defines: together_take_first

enum { TUNE_MICRO_STEPS = 2, TUNE_LOSS_SCALE = 1024 };

/* The trainer whose steps run. */
typedef struct {
    void* model;
    void (*micro_step)(void* model, const StepPlan* plan, MicroKind kind);
    bool (*step)(void* model, const StepPlan* plan, double lr, Error* e);
    StepResult (*result)(void* model, const StepPlan* plan);
    Steps* steps;
    MatmulContext* matmul;
    bool graph;  // steps are captured
} TunedTrainer;

typedef struct {
    const TunedTrainer* trainer;
    StepPlan plan;  // of the steps that are tried
    MatmulTuner tuner;
    Progress progress;
    Error error;
} Tune;

/* TrialCard.now */
static inline double tune_now(void* tune) {
    double now = now_seconds();
    together_take_first(((Tune*)tune)->plan.team, &now, sizeof now);
    return now;
}

/* TrialCard.rotate */
static inline bool tune_rotate(void* tune) {
    Tune* t = (Tune*)tune;
    const TunedTrainer* r = t->trainer;
    matmul_tuner_listen(&t->tuner, true);
    const bool ok = r->step(r->model, &t->plan, 0.0, &t->error);
    t->tuner.matmul->trials = NULL;
    if (!ok) { return false; }
    r->result(r->model, &t->plan);  // waits for the step
    matmul_tuner_read(&t->tuner);
    together_take_first(t->plan.team, t->tuner.us, (size_t)t->tuner.num_calls * sizeof *t->tuner.us);
    matmul_tuner_record(&t->tuner);
    progress_add(&t->progress, 1);
    return true;
}

/* TrialCard.use */
static inline void tune_use(void* tune, const bool* chosen) {
    Tune* t = (Tune*)tune;
    const TunedTrainer* r = t->trainer;
    MicroKind kinds[MICRO_KINDS];
    const int count = micro_kinds(&t->plan, kinds);
    matmul_tuner_use(&t->tuner, chosen);
    if (!r->graph) { return; }
    steps_release(r->steps);
    for (int k = 0; k < count; k++) { steps_capture(r->steps, r->micro_step, r->model, &t->plan, kinds[k]); }
}

/* TrialCard.steps */
static inline bool tune_steps(void* tune, int count, double* ms) {
    Tune* t = (Tune*)tune;
    const TunedTrainer* r = t->trainer;
    int queued = 0, done = 0;
    bool ok = true;
    progress_add(&t->progress, (uint64_t)count);
    while (done < queued || (ok && queued < count)) {
        ok = ok && (queued == count || r->step(r->model, &t->plan, 0.0, &t->error));
        queued += ok && queued < count;
        if (queued - done == IN_FLIGHT || queued == count || !ok) {
            if (done < queued) { ms[done++] = r->result(r->model, &t->plan).ms; }
        }
    }
    together_take_first(t->plan.team, ms, (size_t)done * sizeof *ms);
    return done == count;
}

/* Names a product by its shape: M x N x K. */
static inline void tune_name(const Tune* t, int product, char* out, size_t cap) {
    const int64_t* v = t->tuner.matmul->plans[product].key.v;
    snprintf(out, cap, "%lld x %lld x %lld%s%s", (long long)v[KEY_M], (long long)v[KEY_N], (long long)v[KEY_K],
             v[KEY_TRANS_A]   ? ", dw"
             : v[KEY_TRANS_B] ? ""
                              : ", dx",
             v[KEY_ADD] ? ", added" : "");
}

/* TrialCard.tell */
static inline void tune_tell(void* tune, int product, const Duel* d, int n) {
    Tune* t = (Tune*)tune;
    char what[96];
    if (product >= 0) { tune_name(t, product, what, sizeof what); }
    if (product == TRIALS_ALL) { snprintf(what, sizeof what, "%d products at once", n); }
    if (product == TRIALS_CHOSEN) { snprintf(what, sizeof what, "all that was chosen"); }
    progress_end(&t->progress);
    printf("tune    %s: %.2f ms a step for %.2f, %+.2f %% (wanted %.2f %%): %s\n", what, d->ms, d->first_ms, 100 * d->gain,
           100 * d->margin, d->won ? "changed" : "not changed");
    fflush(stdout);
}

static inline void tune_print(const TrialOutcome* o, int num_plans) {
    printf("tuned   %d of %d matrix products, %d candidates in %d steps, %d duels, %.0f s", o->changed, num_plans,
           o->candidates, o->steps, o->duels, o->seconds);
    if (o->ms > 0) {
        printf(": %.2f ms a step", o->ms);
        if (o->changed > 0) { printf(" for %.2f (%.2f %%)", o->first_ms, 100 * (1 - o->ms / o->first_ms)); }
    }
    printf("\n");
    fflush(stdout);
}

/* Chooses the algorithms of all plans made so far. Leaves no graph. A signal that asks for the end ends the trials; what has
 * won until then stays. Fails if the data cannot be read. */
static inline bool tune_products(const TunedTrainer* trainer, const StepPlan* plan, Error* e) {
    Tune t;
    memset(&t, 0, sizeof t);
    const TrainerState before = *plan->run;
    const TrialCard card = {&t, tune_now, tune_rotate, tune_use, tune_steps, tune_tell};
    TrialOutcome out;
    t.trainer = trainer;
    t.plan = *plan;
    t.plan.accumulate = plan->accumulate < TUNE_MICRO_STEPS ? plan->accumulate : TUNE_MICRO_STEPS;
    t.plan.hyper.tokens = INFINITY;  // the update is skipped; the weight of each loss, loss_weight, is the run's
    t.plan.hyper.scale_interval = 0;
    if (plan->hyper.scale_interval > 0) {  // FP16 would look for its scale first: products of inf take less power
        plan->run->loss_scale = fmin(plan->run->loss_scale, TUNE_LOSS_SCALE);
        steps_restore(trainer->steps, plan->run);
    }
    t.progress = progress_begin(stdout, "tuning", 0, "steps");
    t.tuner = matmul_tuner_open(trainer->matmul);
    together_take_first(plan->team, t.tuner.algos, (size_t)t.tuner.trials.num_products * sizeof *t.tuner.algos);
    matmul_tuner_count(&t.tuner);
    const bool ok = trials_run(&t.tuner.trials, &card, t.plan.accumulate, &out);
    steps_release(trainer->steps);
    *plan->run = before;
    steps_restore(trainer->steps, plan->run);
    progress_end(&t.progress);
    tune_print(&out, trainer->matmul->num_plans);
    matmul_tuner_close(&t.tuner);
    return ok || !t.error.msg[0] || fail(e, "%s", t.error.msg);
}

#endif
