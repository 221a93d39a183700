/* test_slowest.c -- which rank counts as the slowest, and when the run reports it. */
#include "llmc/run/loop/slowest.h"

#include "dev/test/test.h"

#include <math.h>

/* Adds a window of steps with these times. Returns how often a rank was reported. */
static int window(Slowest* s, const float* ms, int ranks, SlowRank* slow) {
    int told = 0;
    for (int i = 0; i < SLOWEST_STEPS; i++) { told += slowest_add(s, ms, ranks, slow); }
    return told;
}

static void the_slowest_is_compared_with_the_median_of_the_others(void) {
    static const struct {
        int ranks;
        double ms[5];
        int rank;
        double others;
    } cases[] = {{2, {10, 12}, 1, 10},
                 {2, {12, 10}, 0, 10},
                 {3, {10, 30, 20}, 1, 15},
                 {4, {4, 1, 2, 9}, 3, 2},
                 {5, {5, 7, 6, 8, 1}, 3, 5.5}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const SlowRank s = slowest_of(cases[i].ms, cases[i].ranks);
        CHECK(s.rank == cases[i].rank && s.ms == cases[i].ms[s.rank] && s.others_ms == cases[i].others,
              "case %zu: rank %d, %g ms, others %g", i, s.rank, s.ms, s.others_ms);
    }
}

static void a_rank_that_is_five_percent_behind_is_told_after_a_window(void) {
    static const float even[3] = {100, 103, 99}, slow[3] = {100, 100, 107};
    Slowest s;
    SlowRank r = {-1, 0, 0};
    memset(&s, 0, sizeof s);
    CHECK(window(&s, even, 3, &r) == 0, "rank %d is told", r.rank);
    for (int i = 0; i < SLOWEST_STEPS - 1; i++) { CHECK(!slowest_add(&s, slow, 3, &r), "after %d steps", i + 1); }
    CHECK(slowest_add(&s, slow, 3, &r), "it is not told");
    CHECK(r.rank == 2 && fabs(r.ms - 107) < 1e-3 && fabs(r.others_ms - 100) < 1e-3, "rank %d, %g, %g", r.rank, r.ms,
          r.others_ms);
    slowest_free(&s);
}

static void it_is_told_again_when_it_is_another_one_or_after_long(void) {
    static const float one[2] = {10, 12}, zero[2] = {12, 10};
    Slowest s;
    SlowRank r;
    memset(&s, 0, sizeof s);
    CHECK(window(&s, one, 2, &r) == 1, "the first time");
    for (int i = 1; i < SLOWEST_AGAIN; i++) { CHECK(window(&s, one, 2, &r) == 0, "again after %d windows", i); }
    CHECK(window(&s, one, 2, &r) == 1, "not again after long");
    CHECK(window(&s, zero, 2, &r) == 1 && r.rank == 0, "another one");
    CHECK(window(&s, one, 2, &r) == 1 && r.rank == 1, "and back");
    slowest_free(&s);
}

static void a_step_of_unknown_time_is_left_out(void) {
    static const float slow[2] = {10, 12}, unknown[2] = {0, 12}, nan[2] = {10, NAN};
    Slowest s;
    SlowRank r = {0, 0, 0};
    memset(&s, 0, sizeof s);
    CHECK(window(&s, unknown, 2, &r) == 0 && window(&s, nan, 2, &r) == 0 && s.steps == 0, "%d steps count", s.steps);
    CHECK(window(&s, slow, 2, &r) == 1 && fabs(r.ms - 12) < 1e-3, "%g ms", r.ms);
    slowest_free(&s);
}

int main(void) {
    RUN(the_slowest_is_compared_with_the_median_of_the_others);
    RUN(a_rank_that_is_five_percent_behind_is_told_after_a_window);
    RUN(it_is_told_again_when_it_is_another_one_or_after_long);
    RUN(a_step_of_unknown_time_is_left_out);
    return test_summary();
}
