/* test_matmul_trials.c -- --tune on a card that is simulated: each product has candidates that take some cycles and some
 * energy, the clock falls where the power passes a limit, drifts as the card gets warm, and every time is noisy. The right
 * candidates must win, equal ones must not, and all of it must fit into its time. */
#include "llmc/base/rand.h"
#include "llmc/matmul_trials.h"
#include "test.h"

// ---------------------------------------------------------------------------------------------------------------------
// a card

enum { MOST_PRODUCTS = 8 };

typedef struct {
    int products, calls[MOST_PRODUCTS], candidates[MOST_PRODUCTS];
    double us[MOST_PRODUCTS];                         // of the first choice at the clock 1
    double cycles[MOST_PRODUCTS][TRIALS_CANDIDATES];  // of a candidate, by those of the first
    double joules[MOST_PRODUCTS][TRIALS_CANDIDATES];  // per cycle, by those of the first
    bool fails[MOST_PRODUCTS][TRIALS_CANDIDATES];     // does not run
    double other_us;                                  // of a step: what is no product
    double power_limit;                               // of the mean joules per cycle of a step; above it the clock falls
    double drift;                                     // of the clock, per second, for the first 40 seconds
    double noise;                                     // standard deviation of a time
    double outliers;                                  // share of steps that take a tenth longer
    uint64_t seed, draws;
    double seconds, clock;
    Trials* trials;
    const bool* chosen;
    int met[MOST_PRODUCTS][TRIALS_CANDIDATES][64];  // times that a candidate had a call
    int duels;
} Card;

static double uniform(Card* c) {
    const Philox r = philox(c->seed, RAND_INIT, 7, c->draws++);
    return ((double)r.v[0] + 0.5) / 4294967296.0;
}
static double normal(Card* c) {
    const double radius = sqrt(-2 * log(uniform(c)));
    return radius * cos(6.283185307179586 * uniform(c));
}

/* Ends a step of `us` at the clock 1 with so many joules (of us): returns its ms, and moves the clock where its power says. */
static double end_step(Card* c, double us, double joules) {
    const double pace = 1 + c->drift * fmin(c->seconds, 40.0), over = joules / us / c->power_limit;
    const double wanted = over > 1 ? pow(over, -0.5) : 1;
    double ms = 1e-3 * us / c->clock * pace * (1 + c->noise * normal(c));
    if (uniform(c) < c->outliers) { ms *= 1.1; }
    c->clock += (wanted - c->clock) * fmin(1.0, ms / 200);  // it takes a few steps to follow
    c->seconds += 1e-3 * ms;
    return ms;
}

static double card_now(void* card) { return ((Card*)card)->seconds; }

static bool card_rotate(void* card) {
    Card* c = (Card*)card;
    double us = c->other_us, joules = c->other_us;
    const double pace = 1 + c->drift * fmin(c->seconds, 40.0);
    for (int call = 0; call < 64; call++) {
        for (int p = 0; p < c->products; p++) {
            if (call >= c->calls[p]) { continue; }
            const int k = trials_pick(c->trials, p);
            const double cycles = c->us[p] * (c->fails[p][k] ? 1 : c->cycles[p][k]);
            c->met[p][k][call]++;
            us += cycles;
            joules += cycles * c->joules[p][k];
            const double time = cycles / c->clock * pace * (1 + 2 * c->noise * normal(c)) + (call == 0 ? 3.0 : 0.0);
            trials_record(c->trials, p, k, c->fails[p][k] ? -1.0f : (float)time);
        }
    }
    end_step(c, us, joules);
    return true;
}

static void card_use(void* card, const bool* chosen) { ((Card*)card)->chosen = chosen; }

static bool card_steps(void* card, int count, double* ms) {
    Card* c = (Card*)card;
    for (int i = 0; i < count; i++) {
        double us = c->other_us, joules = c->other_us;
        for (int p = 0; p < c->products; p++) {
            const int k = c->chosen[p] ? c->trials->products[p].challenger : 0;
            CHECK(!c->fails[p][k], "product %d got candidate %d, which does not run", p, k);
            us += c->calls[p] * c->us[p] * c->cycles[p][k];
            joules += c->calls[p] * c->us[p] * c->cycles[p][k] * c->joules[p][k];
        }
        ms[i] = end_step(c, us, joules);
    }
    return true;
}

static void card_tell(void* card, int product, const Duel* duel, int n) {
    ((Card*)card)->duels++;
    (void)product, (void)duel, (void)n;
}

/* A step of `ms`, of which the head takes a sixth in `chunks` calls, and three products in each of `layers` layers a half. */
static Card new_card(uint64_t seed, double ms, int layers, int chunks) {
    Card c;
    memset(&c, 0, sizeof c);
    c.products = 4;
    for (int p = 0; p < 4; p++) {
        c.calls[p] = p == 3 ? chunks : layers;
        c.us[p] = 1e3 * ms / 6 / c.calls[p];
        c.candidates[p] = TRIALS_CANDIDATES;
        for (int k = 0; k < TRIALS_CANDIDATES; k++) {
            c.cycles[p][k] = k == 0 ? 1.0 : 1.03 + 0.01 * k;
            c.joules[p][k] = 1.0;
        }
    }
    c.other_us = 1e3 * ms / 3;
    c.power_limit = 0.95;
    c.drift = 0.0005;
    c.noise = 0.004;
    c.outliers = 0.03;
    c.seed = seed;
    c.clock = 1;
    return c;
}

/* Runs the trials on the card. */
static Trials run_trials(Card* c, TrialOutcome* out) {
    const TrialCard card = {c, card_now, card_rotate, card_use, card_steps, card_tell};
    Trials t;
    trials_open(&t, c->products);
    for (int p = 0; p < c->products; p++) { t.products[p].count = c->candidates[p]; }
    c->trials = &t;
    CHECK(trials_run(&t, &card, 1, out), "the trials broke off");
    CHECK(c->duels == out->duels, "%d duels, %d were told", out->duels, c->duels);
    CHECK(memcmp(c->chosen, t.chosen, sizeof t.chosen) == 0, "what is chosen is not in use");
    return t;
}

// ---------------------------------------------------------------------------------------------------------------------

static void each_candidate_meets_each_call(void) {
    static int met[TRIALS_CANDIDATES][64];
    for (int n = 1; n <= TRIALS_CANDIDATES; n++) {
        for (int calls = 1; calls <= 64; calls = calls * 3 / 2 + 1) {
            memset(met, 0, sizeof met);
            for (int step = 0; step < n; step++) {
                bool used[TRIALS_CANDIDATES] = {false};
                for (int call = 0; call < calls; call++) {
                    const int k = trial_of(step, call, calls, n);
                    CHECK(k >= 0 && k < n, "candidate %d of %d", k, n);
                    CHECK(call >= n || !used[k], "n %d, calls %d, step %d: candidate %d twice among the first n", n, calls,
                          step, k);
                    used[k] = true;
                    met[k][call]++;
                }
            }
            for (int k = 0; k < n; k++) {
                for (int call = 0; call < calls; call++) {
                    CHECK(met[k][call] == 1, "n %d, calls %d: candidate %d met call %d %d times", n, calls, k, call,
                          met[k][call]);
                }
            }
        }
    }
    // few calls: a candidate's steps are spread, and not one behind the other
    int first = -1, last = -1;
    for (int step = 0; step < 48; step++) {
        for (int call = 0; call < 8; call++) {
            if (trial_of(step, call, 8, 48) != 5) { continue; }
            first = first < 0 ? step : first;
            last = step;
        }
    }
    CHECK(last - first > 24, "8 times of a candidate lie in steps %d to %d of 48", first, last);
}

/* A clock that drifts by a tenth during the rotation must not change the order. */
static void a_drifting_clock_favors_nobody(void) {
    for (uint64_t seed = 1; seed <= 5; seed++) {
        Trials t;
        Card c = new_card(seed, 93, 12, 16);
        trials_open(&t, c.products);
        c.trials = &t;
        c.drift = 0.03;
        for (int k = 1; k < 24; k++) { c.cycles[1][k] = 1.01 + 0.002 * ((k * 7) % 23); }
        c.cycles[1][17] = 0.985;
        for (int i = 0; i < 6; i++) {
            card_rotate(&c);
            trials_next_step(&t);
        }
        t.products[1].count = 24;
        trials_admit(&t, 40);
        for (int i = 0; i < 40; i++) {
            card_rotate(&c);
            trials_next_step(&t);
        }
        trials_fit(&t);
        for (int k = 1; k < 24; k++) {
            const double ratio = t.products[1].us[k] / t.products[1].us[0];
            CHECK(fabs(ratio - c.cycles[1][k]) < 0.012, "seed %d, candidate %d: %.4f of the first, wanted %.4f", (int)seed, k,
                  ratio, c.cycles[1][k]);
        }
        trials_keep(&t);
        CHECK(t.products[1].num_active <= TRIALS_KEPT && t.products[1].active[0] == 0 && t.products[1].active[1] == 17,
              "seed %d: the fastest is %d", (int)seed, t.products[1].active[1]);
        CHECK(trials_find_challengers(&t) == 1 && t.products[1].challenger == 17, "the challenger is %d",
              t.products[1].challenger);
        trials_close(&t);
    }
}

static void a_better_candidate_wins(void) {
    for (uint64_t seed = 1; seed <= 10; seed++) {
        Card c = new_card(seed, 93, 12, 16);
        c.cycles[2][31] = 0.95;  // 0.8 % of the step
        c.cycles[3][7] = 0.9;    // 1.7 %
        TrialOutcome out;
        Trials t = run_trials(&c, &out);
        CHECK(!t.chosen[0] && !t.chosen[1], "seed %d: a product changed that had nothing better", (int)seed);
        CHECK(t.chosen[3] && t.products[3].challenger == 7, "seed %d: the head kept candidate 0", (int)seed);
        CHECK(t.chosen[2] && t.products[2].challenger == 31, "seed %d: product 2 kept candidate 0", (int)seed);
        CHECK(out.changed == 2 && out.ms < out.first_ms, "%d changed, %.2f ms for %.2f", out.changed, out.ms, out.first_ms);
        trials_close(&t);
    }
}

/* Faster alone, but it draws so much more that the clock falls and the step takes longer: today's plans of --tune. */
static void a_hungry_candidate_loses(void) {
    for (uint64_t seed = 1; seed <= 10; seed++) {
        Card c = new_card(seed, 450, 16, 8);
        for (int p = 0; p < 3; p++) {
            c.cycles[p][5] = 0.97;
            c.joules[p][5] = 1.4;
        }
        c.cycles[3][9] = 0.93;  // and one that is better in each way
        TrialOutcome out;
        Trials t = run_trials(&c, &out);
        for (int p = 0; p < 3; p++) {
            CHECK(t.products[p].challenger == 5 && !t.chosen[p], "seed %d: the hungry candidate of product %d won", (int)seed,
                  p);
        }
        CHECK(t.chosen[3] && t.products[3].challenger == 9, "seed %d: the head kept candidate 0", (int)seed);
        trials_close(&t);
    }
}

static void equal_candidates_replace_nothing(void) {
    int changed = 0;
    for (uint64_t seed = 1; seed <= 40; seed++) {
        Card c = new_card(seed, seed % 2 ? 93 : 754, seed % 2 ? 12 : 32, seed % 2 ? 16 : 2);
        c.noise = 0.008;
        for (int p = 0; p < 4; p++) {
            for (int k = 0; k < TRIALS_CANDIDATES; k++) { c.cycles[p][k] = 1.0; }
        }
        TrialOutcome out;
        Trials t = run_trials(&c, &out);
        changed += out.changed > 0;
        trials_close(&t);
    }
    CHECK(changed <= 3, "equal candidates won in %d of 40 runs", changed);
}

static void a_candidate_that_does_not_run_is_out(void) {
    Card c = new_card(3, 93, 12, 16);
    c.fails[0][4] = true;
    c.cycles[0][4] = 0.5;
    c.cycles[0][6] = 0.8;
    TrialOutcome out;
    Trials t = run_trials(&c, &out);
    CHECK(t.chosen[0] && t.products[0].challenger == 6, "product 0 got candidate %d", t.products[0].challenger);
    int calls = 0;
    for (int call = 0; call < 12; call++) { calls += c.met[0][4][call]; }
    CHECK(calls > 0 && calls <= 12, "a candidate that does not run was asked for %d times", calls);
    CHECK(t.products[0].us[4] == 0, "a candidate that never ran has the time %g", t.products[0].us[4]);
    trials_close(&t);
}

static void the_first_run_of_a_candidate_does_not_count(void) {
    Trials t;
    trials_open(&t, 2);
    for (int run = 0; run < 3; run++) {
        trials_record(&t, 1, 3, 100.0f + (float)run);
        CHECK(t.num_times == (size_t)run, "%zu times after run %d", t.num_times, run);
    }
    CHECK(t.times[0].us == 101.0f && t.times[0].product == 1 && t.times[0].candidate == 3, "the second run has another time");
    trials_close(&t);
}

/* Eight products with something better each: not all get a duel of their own. */
static void duels_end_with_the_time(void) {
    Card c = new_card(2, 754, 32, 2);
    c.products = 8;
    c.other_us = 0;
    for (int p = 4; p < 8; p++) {
        c.calls[p] = 32;
        c.us[p] = c.us[0] / 2;
        c.candidates[p] = TRIALS_CANDIDATES;
        memcpy(c.cycles[p], c.cycles[0], sizeof c.cycles[p]);
        memcpy(c.joules[p], c.joules[0], sizeof c.joules[p]);
    }
    for (int p = 0; p < 8; p++) { c.cycles[p][3] = 0.95; }
    TrialOutcome out;
    Trials t = run_trials(&c, &out);
    CHECK(c.seconds < 165 && out.duels < 9, "%d duels in %.1f s", out.duels, c.seconds);
    CHECK(out.changed == 8, "%d of 8 changed", out.changed);
    trials_close(&t);
}

static void trials_fit_into_their_time(void) {
    const struct {
        double ms, most;
        int layers, chunks;
    } models[] = {{0.4, 20, 3, 1}, {4, 30, 3, 2}, {93, 60, 12, 16}, {450, 130, 16, 8}, {754, 180, 32, 2}, {20000, 240, 64, 2}};
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        Card c = new_card(1, models[i].ms, models[i].layers, models[i].chunks);
        for (int p = 0; p < 4; p++) { c.cycles[p][1 + p] = 0.9; }
        TrialOutcome out;
        Trials t = run_trials(&c, &out);
        CHECK(c.seconds <= models[i].most, "steps of %g ms: %.1f s, wanted at most %g", models[i].ms, c.seconds,
              models[i].most);
        CHECK(out.changed == 4 || models[i].ms > 1000, "steps of %g ms: %d of 4 changed", models[i].ms, out.changed);
        printf("    steps of %g ms: %.1f s, %d candidates, %d steps of rotation, %d duels\n", models[i].ms, out.seconds,
               out.candidates, out.steps, out.duels);
        trials_close(&t);
    }
}

static void a_duel_needs_its_margin(void) {
    const double a[2] = {100.0, 101.0}, b[2] = {99.5, 100.4}, once[2] = {99.0, 101.1}, close[2] = {99.9, 100.9};
    double small[8] = {0.02, 0.02, 0, 0.02, 0.02, 0, 0.02, 0.02}, large[8] = {2, 2, 0, 2, 2, 0, 2, 2};
    const Duel won = duel_judge(a, b, 1, small, 8);
    CHECK(won.won && fabs(won.gain - 1.1 / 201) < 1e-12 && won.margin == TRIALS_MARGIN, "gain %g, margin %g", won.gain,
          won.margin);
    CHECK(!duel_judge(a, close, 1, small, 8).won, "a tenth of a percent won");
    CHECK(!duel_judge(a, once, 1, small, 8).won, "one of two pairs was enough");
    const Duel noisy = duel_judge(a, b, 1, large, 8);
    // spread 1.4826 * 2 * 2 / 1, error 1.2533 * spread / sqrt(2), of a mean of two turns against one of two
    CHECK(!noisy.won && fabs(noisy.margin - TRIALS_ERRORS * 1.2533 * 1.4826 * 4 / sqrt(2.0) / 100.5) < 1e-9, "margin %g",
          noisy.margin);
}

int main(void) {
    RUN(each_candidate_meets_each_call);
    RUN(a_drifting_clock_favors_nobody);
    RUN(a_better_candidate_wins);
    RUN(a_hungry_candidate_loses);
    RUN(equal_candidates_replace_nothing);
    RUN(a_candidate_that_does_not_run_is_out);
    RUN(the_first_run_of_a_candidate_does_not_count);
    RUN(duels_end_with_the_time);
    RUN(trials_fit_into_their_time);
    RUN(a_duel_needs_its_margin);
    return test_summary();
}
