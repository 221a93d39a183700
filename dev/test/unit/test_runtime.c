/* test_runtime.c -- tests schedules, sampling against a naive sampler, the outlier window, FLOPs and peaks. Also the log and
 * how a resumed run cuts it, the plan, hints about memory, progress, fresh weights, the timing of steps, signals.
 * test_generate.c has generation and chat. */
#include "llmc/run/loop/sampler.h"
#include "llmc/run/session/choose.h"
#include "llmc/run/session/machine.h"
#include "llmc/run/session/memory.h"
#include "llmc/run/session/plan.h"
#include "llmc/base/progress.h"
#include "llmc/run/screen/screen.h"
#include "llmc/train/not_finite.h"
#include "llmc/run/session/signals.h"
#include "llmc/run/loop/timing.h"
#include "llmc/run/loop/slowest.h"
#include "llmc/files/logger.h"
#include "llmc/optim/recipe.h"
#include "llmc/optim/schedule.h"
#include "dev/test/test.h"
#include <sys/wait.h>

static bool near(double a, double b) { return fabs(a - b) <= 1e-12 * fmax(1.0, fabs(b)); }

// ---------------------------------------------------------------------------------------------------------------------
// schedule

/* The rates by formulas of six numbers each, from before schedules had phases; only the decay of wsd was another after a
 * warm-up into the last fifth. A compiler may fuse the last product with its sum: `fuse` says so. */
static double rate_by_formula(ScheduleName name, double step, int64_t steps, int64_t warmup, double lr, double f, bool fuse) {
    const int64_t fifth = steps - steps / 5, decay = fifth > warmup ? fifth : warmup;
    const double pi = 3.14159265358979323846;
    if (step < (double)warmup) { return lr * fmin(step + 1, (double)warmup) / (double)warmup; }
    const double p = step >= (double)steps ? 1 : (step - (double)warmup) / (double)(steps - warmup);
    const double fall = (double)(steps / 5), after = step - (double)decay;
    const double q = after >= fall ? 1 : after <= 0 ? 0 : after / fall;
    const double a[] = {(1.0 - f) * 0.5, -(1.0 - f), 0, 1.0 - f}, b[] = {1.0 + cos(pi * p), p, 0, 1.0 - sqrt(q)};
    const double c[] = {f, 1, 1, f};
    volatile double product = a[name] * b[name];
    return lr * (fuse ? fma(a[name], b[name], c[name]) : product + c[name]);
}

TEST(phases_have_the_rates_of_the_formulas_bit_for_bit) {
    const double rates[] = {1, 3e-4, 6.123456789e-3}, finals[] = {0, 0.1, 1.0 / 3, 0.05, 1};
    const int64_t lengths[] = {0, 1, 2, 3, 4, 5, 7, 10, 57, 100, 1000}, warmups[] = {0, 1, 2, 3, 7, 9, 46, 57, 99, 1200};
    for (int i = 0; i < 4 * 3 * 5 * 11 * 10; i++) {
        const ScheduleName name = (ScheduleName)(i % 4);
        const double lr = rates[i / 4 % 3], final = finals[i / 12 % 5];
        const int64_t steps = lengths[i / 60 % 11], warmup = warmups[i / 660];
        const Schedule s = schedule_make(name, steps, warmup, lr, final, 0, SHAPE_ROOT);
        CHECK(s.steps == steps && s.count >= 1 && s.count <= 3, "%d phases, %lld steps", s.count, (long long)s.steps);
        for (int64_t step = 0; step < steps + 3; step++) {
            const double rate = learning_rate(&s, step),
                         want = rate_by_formula(name, (double)step, steps, warmup, lr, final, false);
            CHECK(rate == want || rate == rate_by_formula(name, (double)step, steps, warmup, lr, final, true),
                  "schedule %d of %lld steps, warm-up %lld, step %lld: %.17g is not %.17g", name, (long long)steps,
                  (long long)warmup, (long long)step, rate, want);
        }
    }
}

TEST(schedules_have_their_values_at_the_edges) {
    const double lr = 2.0, f = 0.1;
    for (int name = SCHEDULE_COSINE; name <= SCHEDULE_WSD; name++) {
        const Schedule s = schedule_make((ScheduleName)name, 100, 10, lr, f, 0, SHAPE_ROOT);
        const double last = name == SCHEDULE_CONSTANT ? lr : lr * f;
        CHECK(near(learning_rate(&s, 0), 0.2), "the first step of the warm-up is not 0");
        CHECK(near(learning_rate(&s, 9), 2.0) && near(learning_rate(&s, 10), 2.0), "the warm-up ends at lr, and goes on there");
        CHECK(near(learning_rate(&s, 100), last) && near(learning_rate(&s, 5000), last), "schedule %d ends at %g", name, last);
    }
    const Schedule cosine = schedule_make(SCHEDULE_COSINE, 100, 10, lr, f, 0, SHAPE_ROOT),
                   wsd = schedule_make(SCHEDULE_WSD, 100, 10, lr, f, 0, SHAPE_ROOT);
    CHECK(near(learning_rate(&cosine, 55), lr * 0.55), "cosine is half way in the middle");
    CHECK(near(learning_rate(&wsd, 80), lr) && learning_rate(&wsd, 81) < lr, "wsd holds for four fifths of all steps");
    CHECK(near(learning_rate(&wsd, 85), lr * (f + 0.9 * 0.5)), "and falls with the root of progress");
    const Schedule late =
        schedule_make(SCHEDULE_WSD, 100, 90, lr, f, 0, SHAPE_ROOT);  // the warm-up reaches into the last fifth
    CHECK(near(learning_rate(&late, 89), lr) && near(learning_rate(&late, 90), lr), "the decay begins after the warm-up");
    for (int k = 0; k <= 10; k++) {  // mlc-ai/pith-train#55: it does not jump
        CHECK(learning_rate(&late, 90 + k) == learning_rate(&wsd, 80 + k), "and is as steep as without it");
    }
}

TEST(a_branch_has_the_rates_of_the_run_that_planned_it) {
    for (int i = 0; i < 3 * 2 * 3; i++) {
        const PhaseShape shape = (PhaseShape)(SHAPE_LINEAR + i % 3);
        const ScheduleName name = i / 3 % 2 ? SCHEDULE_WSD : SCHEDULE_CONSTANT;
        const int64_t now = (int64_t[]){10, 57, 80}[i / 6];
        Schedule s = schedule_make(name, 100, 10, 2, 0.1, 0, SHAPE_ROOT);
        const Schedule planned = schedule_make(name, now + 30, 10, 2, 0.1, 30, shape), trunk = s;
        const double p = 0.5, half[] = {0, p, 0.5, 1 - sqrt(p)};
        schedule_decay(&s, now, 30, 0.1, shape);
        CHECK(s.steps == planned.steps && s.count == planned.count, "%lld steps, %d phases", (long long)s.steps, s.count);
        CHECK(s.phases[s.count - 2].to == planned.phases[s.count - 2].to, "what it holds ends elsewhere");
        for (int64_t step = 0; step < now + 35; step++) {
            const double rate = learning_rate(&s, step);
            CHECK(rate == learning_rate(&planned, step), "step %lld of a branch at %lld", (long long)step, (long long)now);
            CHECK(step > now || rate == learning_rate(&trunk, step), "step %lld is not the trunk's", (long long)step);
        }
        CHECK(near(learning_rate(&s, now + 15), 2 * (0.1 + 0.9 * half[shape])) && near(learning_rate(&s, s.steps), 0.2), "%d",
              i);
    }
    const Schedule late = schedule_make(SCHEDULE_WSD, 100, 90, 1, 0, 30, SHAPE_LINEAR);  // with --minutes
    CHECK(learning_rate(&late, 90) == 1 && near(learning_rate(&late, 95), 0.5) && learning_rate(&late, 100) == 0,
          "does not fit");
}

TEST(a_full_schedule_loses_its_oldest_phase) {
    Schedule s = schedule_make(SCHEDULE_CONSTANT, 100, 10, 1, 1, 0, SHAPE_ROOT);
    for (int64_t i = 20; i < 90; i++) { schedule_add(&s, i, 100, 1, 1e-2 * (double)i, SHAPE_LINEAR); }
    CHECK(s.count == MOST_PHASES && s.phases[s.count - 1].from == 89 && near(learning_rate(&s, 100), 0.89), "%d", s.count);
    schedule_add(&s, 75, 90, 1, 0, SHAPE_LINEAR);
    CHECK(s.phases[s.count - 1].from == 75 && s.phases[s.count - 2].from == 74, "it takes the place of later phases");
}

// ---------------------------------------------------------------------------------------------------------------------
// sampler

/* Makes the same draw by a full sort. `margin`: how close a top-p border was to another result. */
static int naive_sample(const float* logits, int V, double temperature, int top_k, double top_p, double u, double* margin) {
    int* order = (int*)xmalloc((size_t)V * sizeof(int));
    double* w = (double*)xcalloc((size_t)V, sizeof(double));
    bool* kept = (bool*)xcalloc((size_t)V, sizeof(bool));
    int n = 0, best = -1;
    for (int i = 0; i < V; i++) {
        if (isnan(logits[i])) { continue; }
        if (best < 0 || logits[i] > logits[best]) { best = i; }
        int at = n++;
        for (; at > 0 && logits[order[at - 1]] < logits[i]; at--) { order[at] = order[at - 1]; }
        order[at] = i;
    }
    *margin = 1.0;
    if (best >= 0 && temperature > 0) {
        double total = 0, sum = 0;
        for (int i = 0; i < n; i++) { w[order[i]] = exp(((double)logits[order[i]] - logits[best]) / temperature); }
        if (top_k > 0 && top_k < n) { n = top_k; }
        for (int i = 0; i < n; i++) { total += w[order[i]]; }
        for (int i = 0; i < n; i++) {
            kept[order[i]] = true;
            sum += w[order[i]];
            if (top_p < 1) { *margin = fmin(*margin, fabs(sum / total - top_p)); }
            if (top_p < 1 && sum >= top_p * total) { break; }
        }
        double kept_sum = 0;
        for (int i = 0; i < V; i++) { kept_sum += kept[i] ? w[i] : 0; }
        sum = 0;
        for (int i = 0; i < V; i++) {
            if (!kept[i] || w[i] <= 0) { continue; }
            best = i;
            sum += w[i];
            if (sum > u * kept_sum) { break; }
        }
    }
    free(order);
    free(w);
    free(kept);
    return best;
}

TEST(sampling_equals_a_naive_sampler) {
    enum { V_MAX = 600 };
    float logits[V_MAX];
    int compared = 0;
    for (uint32_t trial = 0; trial < 3000; trial++) {
        Philox r = philox(7, RAND_SAMPLE, 1000, trial);
        const int V = 1 + (int)(r.v[0] % V_MAX);
        const int levels = r.v[1] % 3 == 0 ? 4 : 1 << 20;  // few levels: many ties
        for (int i = 0; i < V; i++) {
            Philox q = philox(8, RAND_SAMPLE, trial, (uint64_t)i);
            logits[i] = (float)(q.v[0] % (uint32_t)levels) / (float)levels * 12.0f - 6.0f;
            if (q.v[1] % 97 == 0) { logits[i] = q.v[2] % 2 ? NAN : -INFINITY; }
        }
        static const double temperatures[] = {0.0, 0.3, 1.0, 2.5}, top_ps[] = {1.0, 0.9137, 0.4999, 0.0123};
        const double temperature = temperatures[r.v[2] % 4], top_p = top_ps[r.v[2] / 4 % 4];
        const int top_k = r.v[3] % 3 == 0 ? 0 : (int)(r.v[3] / 3 % (uint32_t)(V + 3));
        Sampler s;
        sampler_init(&s, V, temperature, top_k, top_p, 99);
        for (uint64_t index = 0; index < 5; index++) {
            double margin, u = philox_double(philox(99, RAND_SAMPLE, trial, index), 0, 1);
            int want = naive_sample(logits, V, temperature, top_k, top_p, u, &margin);
            int got = sampler_next(&s, logits, trial, index);
            if (margin < 1e-9) { continue; }  // too close: the order of a sum may decide
            compared++;
            CHECK(got == want, "trial %u: V %d temperature %g top-k %d top-p %g: %d, wanted %d", trial, V, temperature, top_k,
                  top_p, got, want);
        }
        sampler_free(&s);
    }
    CHECK(compared > 14000, "only %d were compared", compared);
}

TEST(samples_follow_the_softmax) {
    enum { V = 10, DRAWS = 100000 };
    float logits[V];
    double p[V], sum = 0, chi2 = 0;
    int counts[V] = {0};
    for (int i = 0; i < V; i++) {
        logits[i] = (float)(i % 4) * 0.7f;
        p[i] = exp(logits[i] / 1.3);
        sum += p[i];
    }
    Sampler s;
    sampler_init(&s, V, 1.3, 0, 1.0, 12345);
    for (int k = 0; k < DRAWS; k++) { counts[sampler_next(&s, logits, 3, (uint64_t)k)]++; }
    for (int i = 0; i < V; i++) {
        double want = DRAWS * p[i] / sum;
        chi2 += (counts[i] - want) * (counts[i] - want) / want;
    }
    CHECK(chi2 < 27.9, "chi-square of 9 degrees of freedom is %.1f", chi2);  // 0.1 %
    sampler_free(&s);
}

TEST(sampling_survives_odd_logits) {
    const float all_nan[3] = {NAN, NAN, NAN}, some[5] = {NAN, 1, 3, 3, -INFINITY}, inf[3] = {1, INFINITY, INFINITY};
    Sampler s;
    sampler_init(&s, 3, 0.7, 0, 0.9, 1);
    CHECK(sampler_next(&s, all_nan, 0, 0) == -1, "all NaN");
    CHECK(sampler_next(&s, inf, 0, 0) == 1, "+inf is certain");
    s.temperature = 0;
    CHECK(sampler_next(&s, all_nan, 0, 0) == -1, "all NaN, greedy");
    sampler_free(&s);
    sampler_init(&s, 5, 0, 0, 1, 1);
    CHECK(sampler_next(&s, some, 0, 0) == 2, "the lower id of a tie");
    static const double temperatures[] = {1e-300, 1e-10, 100.0};
    for (int t = 0; t < 3; t++) {
        s.temperature = temperatures[t];
        for (uint64_t k = 0; k < 200; k++) {
            int id = sampler_next(&s, some, 0, k);
            CHECK(id == 2 || id == 3 || (t == 2 && id == 1), "id %d at temperature %g", id, s.temperature);
        }
    }
    s.temperature = 1;
    s.top_k = 1;
    CHECK(sampler_next(&s, some, 0, 5) == 2, "top-k 1 is greedy");
    s.top_k = 0;
    s.top_p = 1e-12;
    CHECK(sampler_next(&s, some, 0, 5) == 2, "a tiny top-p is greedy");
    sampler_free(&s);
}

// ---------------------------------------------------------------------------------------------------------------------
// outlier, mfu

TEST(the_outlier_window_scores_against_the_last_128) {
    Outlier o;
    memset(&o, 0, sizeof o);
    for (int i = 0; i < OUTLIER_WINDOW; i++) {
        CHECK(isnan(outlier_update(&o, i % 2 ? 1.0 : 3.0)), "no score before it is full");
    }
    Outlier copy = o;
    CHECK(near(outlier_update(&o, 4.0), 2.0), "mean 2, deviation 1");
    CHECK(near(outlier_update(&copy, -1.0), -3.0), "a copy scores on its own");
    CHECK(outlier_update(&o, NAN) == INFINITY && outlier_update(&o, INFINITY) == INFINITY, "no number is far out");
    Outlier before = o;
    outlier_update(&o, NAN);
    CHECK(memcmp(&before, &o, sizeof o) == 0, "and stays out of the window");
    // the window moves: after 128 values of 5 the old ones are forgotten
    for (int i = 0; i < OUTLIER_WINDOW; i++) { outlier_update(&o, 5.0); }
    CHECK(outlier_update(&o, 5.0) == 0.0, "equal values");
    CHECK(outlier_update(&o, 5.5) == INFINITY, "any change after none is infinitely far");
    CHECK(
        !outlier_skip(NAN, 3) && !outlier_skip(9, 0) && outlier_skip(9, 3) && !outlier_skip(-9, 3) && outlier_skip(INFINITY, 3),
        "skip");
}

TEST(flops_and_peaks_are_those_of_the_formula_and_the_data_sheets) {
    ModelConfig c;
    CHECK(config_preset(&c, "d12", 32768), "preset");
    ParamTable t = param_table(&c);
    const double blocks = 12.0 * (768.0 * 768 * 2 + 2.0 * 768 * 256 + 3.0 * 768 * 2048);
    CHECK(near(flops_per_token(&c, &t, 1024), 6 * (blocks + 32768.0 * 768) + 6.0 * 12 * 768 * 1024), "%g",
          flops_per_token(&c, &t, 1024));
    param_table_free(&t);
    static const struct {
        const char* name;
        PeakKind kind;
        double tflops;
    } cases[] = {{"NVIDIA H200", PEAK_BF16, 989.4},
                 {"NVIDIA H100 80GB HBM3", PEAK_TF32, 494.7},
                 {"NVIDIA H100 PCIe", PEAK_BF16, 756.5},
                 {"NVIDIA H100 NVL", PEAK_BF16, 835.5},
                 {"NVIDIA A100-SXM4-80GB", PEAK_BF16, 312},
                 {"NVIDIA A100-PCIE-40GB", PEAK_FP32, 19.5},
                 {"NVIDIA A10G", PEAK_FP16, 70},
                 {"NVIDIA A10", PEAK_FP16, 125},
                 {"Tesla T4", PEAK_FP16, 65},
                 {"Tesla T4", PEAK_BF16, 0},
                 {"Tesla V100-SXM2-16GB", PEAK_FP16, 125},
                 {"Tesla V100-PCIE-16GB", PEAK_FP16, 112},
                 {"NVIDIA L4", PEAK_BF16, 121},
                 {"NVIDIA L40S", PEAK_BF16, 362},
                 {"NVIDIA GeForce RTX 4090", PEAK_BF16, 165.2},
                 {"NVIDIA GeForce RTX 4090 Laptop GPU", PEAK_BF16, 0},
                 {"NVIDIA GeForce RTX 3080 Ti", PEAK_BF16, 68.2},
                 {"NVIDIA A100-SXM4-40GB MIG 1g.5gb", PEAK_BF16, 0},
                 {"NVIDIA T4G", PEAK_FP16, 0},
                 {"NVIDIA RTX A1000", PEAK_FP16, 0},
                 {"NVIDIA X999", PEAK_BF16, 0},
                 {"", PEAK_BF16, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CHECK(near(gpu_peak_flops(cases[i].name, cases[i].kind), cases[i].tflops * 1e12), "%s: %g", cases[i].name,
              gpu_peak_flops(cases[i].name, cases[i].kind));
    }
    char text[32];
    CHECK(strcmp(mfu_text(4e14, 1e15, text, sizeof text), "40.0%") == 0, "%s", text);
    CHECK(strcmp(mfu_text(6.6e10, 0, text, sizeof text), "66G") == 0, "%s", text);
    CHECK(strcmp(mfu_text(8.16e7, 0, text, sizeof text), "81.6M") == 0, "%s", text);
    CHECK(strcmp(mfu_text(1.25e12, 0, text, sizeof text), "1.25T") == 0, "%s", text);
    CHECK(strcmp(mfu_text(0, 0, text, sizeof text), "-") == 0 && strcmp(mfu_text(NAN, 0, text, sizeof text), "-") == 0, "%s",
          text);
}

// ---------------------------------------------------------------------------------------------------------------------
// log

/* Logs a step like many others. */
static bool log_plain_step(Logger* g, int64_t step, Error* e) {
    const Metrics r = {.loss = 1, .norm = 1, .lr = 1, .ms = 1};
    const StepLines s = {.last_step = step};
    return log_step(g, &s, &r, 1.5, 64, false, NULL, e);
}

static void put_text(const char* path, const char* mode, const char* text, size_t len) {
    FILE* f = fopen(path, mode);
    CHECK(f && fwrite(text, 1, len, f) == len && fclose(f) == 0, "%s", path);
}

TEST(every_line_of_the_log_is_json_of_its_event) {
    Logger g;
    Error e = NO_ERROR;
    Options o;
    ModelConfig c;
    TrainerState run;
    memset(&run, 0, sizeof run);
    run.step = 2;
    strcpy(run.run, "00000000000000aa");
    const char* dir = test_folder();
    options_default(&o, ON_CPU);
    config_preset(&c, "d4", 512);
    ParamTable t = param_table(&c);
    char program[] = "train", flag[] = "--out=a\"b\xff";
    char* argv[] = {program, flag};
    char* options = options_log_text(&o, LOG_TEXT_MAX);
    const LoggedRun how = {"train_llama3", "FP32", "a machine", options, 2, argv};
    CHECK(logger_open(&g, dir, -1, &e), "%s", e.msg);
    CHECK(log_config(&g, &run, &how, &c, &t, 123, &e), "%s", e.msg);
    const Metrics steps[] = {
        {.loss = 3.25, .norm = NAN, .lr = 3e-4, .ms = 41.2},
        {.loss = INFINITY, .norm = 1, .ms = 1, .trained = 77, .quantised = {{0, 0, 0}, {64, 0, 16}, {100, 1, 25}}}};
    StepLines shown = {.last_step = 1, .tok_s = 1000};
    CHECK(log_step(&g, &shown, &steps[0], 1.5, 64, false, NULL, &e), "%s", e.msg);
    shown.last_step = 2;
    CHECK(log_step(&g, &shown, &steps[1], 2, 128, true, "loss", &e), "%s", e.msg);
    CHECK(log_val(&g, 2, 3.5, 1.25, &e) && log_sample(&g, 2, "a\nb\0c", 5, &e) &&
              log_checkpoint(&g, 2, "out/step_00000002", 77, &e),
          "%s", e.msg);
    CHECK(log_plan(&g, 2, 90, 41.5, &e), "%s", e.msg);
    CHECK(log_resume(&g, &run, "p", &how, &e) && log_end(&g, 2, "done", 1.5, &e), "%s", e.msg);
    free(options);
    static const char* const events[] = {"config", "step", "step", "val", "sample", "checkpoint", "plan", "resume", "end"};
    const char* text = test_text(g.path);
    int lines = 0;
    for (const char* p = text; *p; lines++) {
        size_t len = strcspn(p, "\n");
        CHECK(p[len] == '\n', "the last line is torn");
        char* copy = (char*)xcalloc(len + 1, 1);
        memcpy(copy, p, len);
        Json j;
        bool ok = json_parse(&j, copy, len, "log", &e);
        CHECK(ok, "%s in %.*s", e.msg, (int)len, p);
        if (!ok) { break; }
        const char* event = json_string(&j, json_get(&j, json_root(&j), "event"), NULL);
        CHECK(lines < 9 && event && strcmp(event, events[lines]) == 0, "line %d is %s", lines, event ? event : "nothing");
        if (lines == 1) {
            double loss = 0;
            CHECK(json_double(&j, json_root(&j), "loss", 0, 9, &loss, &e) && loss == 3.25, "%s", e.msg);
            CHECK(!json_get(&j, json_root(&j), "gnorm") && json_get_any(&j, json_root(&j), "gnorm"), "NaN is null");
            double seconds = 0;
            int64_t tokens = 0;
            CHECK(json_double(&j, json_root(&j), "seconds", 0, 9, &seconds, &e) && seconds == 1.5, "%s", e.msg);
            CHECK(json_int(&j, json_root(&j), "tokens", 0, 99, &tokens, &e) && tokens == 64, "%s", e.msg);
        }
        if (lines == 1 || lines == 2) {
            int64_t trained = -1;
            const bool masked = lines == 2;  // only then it is reported
            CHECK((json_get_any(&j, json_root(&j), "trained") != NULL) == masked, "line %d", lines);
            CHECK(!masked || (json_int(&j, json_root(&j), "trained", 0, 99, &trained, &e) && trained == 77), "%s", e.msg);
        }
        const JsonNode* shares = json_get(&j, json_root(&j), "quantised");
        CHECK((shares != NULL) == (lines == 2), "line %d tells what --fp8 lost", lines);
        if (shares) {
            const char* want = "\"quantised\":{\"norm\":[0.0,0.25],\"att\":[0.01,0.25]}";
            CHECK(strstr(p, want), "%.*s", (int)len, p);
        }
        CHECK(lines != 6 || strstr(p, "\"step\":2,\"steps\":90,\"ms\":41.500}"), "%s", p);
        double bpb = 0;
        CHECK(lines != 3 || (json_double(&j, json_root(&j), "bpb", 0, 9, &bpb, &e) && bpb == 1.25), "%s", e.msg);
        json_free(&j);
        p += len + 1;
    }
    CHECK(lines == 9, "%d lines", lines);
    param_table_free(&t);
    logger_close(&g);
}

TEST(a_resumed_log_is_cut_back_to_its_step) {
    static const char head[] =
        "{\"event\":\"config\",\"steps\":9}\n{\"event\":\"step\",\"step\":1}\n{\"event\":\"val\",\"step\":1}\n{\"event\":"
        "\"step\",\"step\":2}\n";
    static const struct {
        const char* tail;
        size_t keep;  // bytes of the end that stay
    } cases[] = {
        {"", 0},
        {"{\"event\":\"step\",\"st", 0},                                                  // torn
        {"{\"event\":\"step\",\"step\":3}\n", 0},                                         // later
        {"{\"event\":\"step\",\"step\":3}\n{\"event\":\"step\",\"step\":4}\n{\"ev", 0},   // both
        {"{\"event\":\"sample\",\"step\":2}\n{\"event\":\"step\",\"step\":3}\n", 28},     // of the same step
        {"{\"event\":\"checkpoint\",\"step\":2}\n{\"event\":\"end\",\"step\":2}\n", 32},  // the end is none
        {"not json\n{\"event\":\"step\",\"step\":3}\n", 9},                               // not ours
        {"{\"event\":\"step\",\"step\":2}", 0},                                           // whole but for its newline
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char path[PATH_CAP];
        Logger g;
        Error e = NO_ERROR;
        const char* dir = test_folder();
        CHECK(path_join(path, dir, "log.jsonl", &e), "%s", e.msg);
        put_text(path, "w", head, strlen(head));
        put_text(path, "a", cases[i].tail, strlen(cases[i].tail));
        CHECK(logger_open(&g, dir, 2, &e), "%s", e.msg);
        CHECK(log_plain_step(&g, 3, &e), "%s", e.msg);
        logger_close(&g);
        const char* text = test_text(path);
        size_t len = strlen(head) + cases[i].keep;
        CHECK(strncmp(text, head, strlen(head)) == 0 && strncmp(text + strlen(head), cases[i].tail, cases[i].keep) == 0,
              "case %zu: %s", i, text);
        CHECK(strncmp(text + len, "{\"event\":\"step\",\"step\":3,", 25) == 0, "case %zu: %s", i, text);
        CHECK(logger_open(&g, dir, -1, &e), "%s", e.msg);
        logger_close(&g);
        text = test_text(path);
        CHECK(!*text, "a new run starts an empty log");
    }
}

TEST(a_log_cut_anywhere_ends_in_whole_lines_again) {
    char path[PATH_CAP], full[2048];
    size_t len = 0;
    Error e = NO_ERROR;
    for (int i = 1; i <= 8; i++) {
        len += (size_t)snprintf(full + len, sizeof full - len, "{\"event\":\"step\",\"step\":%d,\"loss\":%d.5}\n", i, i);
    }
    const char* dir = test_folder();
    CHECK(path_join(path, dir, "log.jsonl", &e), "%s", e.msg);
    for (size_t cut = 0; cut <= len; cut++) {
        Logger g;
        put_text(path, "w", full, cut);
        CHECK(logger_open(&g, dir, 6, &e), "%s", e.msg);
        logger_close(&g);
        const char* text = test_text(path);
        size_t kept = strlen(text), want = 0;
        for (size_t i = 0, line = 1; i < cut && line <= 6; i++) {
            if (full[i] == '\n') {
                want = i + 1;
                line++;
            }
        }
        CHECK(kept == want && memcmp(text, full, kept) == 0, "cut at %zu: %zu bytes, wanted %zu", cut, kept, want);
    }
}

TEST(a_full_disk_is_an_error_and_leaves_no_torn_line) {
    char path[PATH_CAP];
    Logger g;
    Error e = NO_ERROR;
    struct rlimit old, small;
    const char* dir = test_folder();
    CHECK(path_join(path, dir, "log.jsonl", &e) && logger_open(&g, dir, -1, &e), "%s", e.msg);
    fflush(stdout);
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &old);
    small = old;
    small.rlim_cur = 1000;
    setrlimit(RLIMIT_FSIZE, &small);
    int written = 0;
    while (written < 100 && log_plain_step(&g, written + 1, &e)) { written++; }
    setrlimit(RLIMIT_FSIZE, &old);
    signal(SIGXFSZ, SIG_DFL);
    CHECK(written > 3 && written < 100 && strstr(e.msg, "log.jsonl: writing failed"), "%d: %s", written, e.msg);
    logger_close(&g);
    const char* text = test_text(path);
    size_t len = strlen(text);
    CHECK(len > 0 && text[len - 1] == '\n', "torn: %s", text);
    e.msg[0] = 0;
    CHECK(!logger_open(&g, "/nonexistent/folder", -1, &e) && strstr(e.msg, "/nonexistent/folder/log.jsonl"), "%s", e.msg);
    logger_none(&g);
    CHECK(log_val(&g, 1, 1, NAN, &e) && g.text == NULL, "no log, no error");
}

// ---------------------------------------------------------------------------------------------------------------------
// plan, memory, machine

TEST(the_plan_counts_steps_and_epochs) {
    Options o;
    Plan p;
    int64_t steps;
    Error e = NO_ERROR;
    options_default(&o, ON_CPU);
    o.total_batch = 4096;
    CHECK(plan_make(&p, &o, 2, &e) && p.accumulate == 2 && p.tokens_per_step == 4096, "%d: %s", p.accumulate, e.msg);
    CHECK(plan_steps(&p, &o, 1000, &steps, &e) && steps == 62, "%lld: %s", (long long)steps, e.msg);
    Options fits = o;
    Plan other;
    FAILS(&e, plan_make(&other, &o, 3, &e), "\n  hint: these flags fit: --total-batch ");
    fits.total_batch = 3 * o.seq;
    FAILS(&e, plan_make(&other, &fits, 3, &e), "\n  hint: these flags fit: --batch 1");
    CHECK(!plan_steps(&p, &o, 15, &steps, &e) && strstr(e.msg, "15 rows") && strstr(e.msg, "hint"), "%s", e.msg);
    e.msg[0] = 0;
    o.steps = 0;
    CHECK(plan_steps(&p, &o, 1, &steps, &e) && steps == 0, "no steps is a plan: %s", e.msg);
    o.epochs = 2.5;
    CHECK(plan_steps(&p, &o, 1000, &steps, &e) && steps == 156, "2.5 * 1000 / 16 is %lld: %s", (long long)steps, e.msg);
    o.epochs = 1e6;
    CHECK(!plan_steps(&p, &o, (uint64_t)1 << 40, &steps, &e) && strstr(e.msg, "--epochs"), "%s", e.msg);
}

/* Runs with --minutes 10, by the plan of `steps` steps. A step takes ms[i] in the i-th tenth of the minutes, and the last ms
 * after them; in the sixth minute the process also pauses for `pause` seconds. Returns the steps that it takes; *seconds: how
 * long. */
static int64_t run_of_ten_minutes(int64_t steps, const double* ms, double pause, double* seconds) {
    double now = 1000;
    Pace p = {60, now + 600, now, 0, 0, 0};
    for (int64_t step = 0; step < steps;) {
        const int tenth = (int)fmin((now - 1000) / 60, 9);
        now += 1e-3 * ms[tenth];
        if (tenth == 5) { now += pause, pause = 0; }
        step++;
        const int64_t end = pace_end(&p, now, step, steps);
        CHECK(end > step || step == steps, "an end at %lld of %lld", (long long)end, (long long)step);
        steps = end;
    }
    *seconds = now - 1000;
    return steps;
}

TEST(a_run_whose_steps_become_slower_ends_in_its_minutes) {
    static const struct {
        double ms[10], pause;
        int64_t least, most;      // steps of 5,400 that were planned
        double earliest, latest;  // seconds
    } cases[] = {
        {{100, 100, 100, 100, 100, 100, 100, 100, 100, 100}, 0, 5400, 5400, 539, 541},
        {{120, 120, 120, 120, 120, 120, 120, 120, 120, 120}, 0, 5400, 5400, 647, 649},  // within a tenth of the minutes
        {{200, 200, 200, 200, 200, 200, 200, 200, 200, 200}, 0, 2950, 3000, 590, 601},
        {{100, 100, 100, 100, 100, 300, 300, 300, 300, 300}, 0, 3950, 4000, 590, 601},
        {{200, 200, 200, 200, 200, 400, 400, 400, 400, 400}, 0, 2200, 2250, 590, 601},   // slower twice
        {{100, 100, 100, 900, 100, 100, 100, 100, 100, 100}, 0, 5400, 5400, 590, 600},   // a short load costs its time alone
        {{100, 100, 100, 100, 100, 100, 100, 100, 100, 100}, 90, 5400, 5400, 629, 631},  // so does a pause
        {{100, 100, 100, 100, 100, 100, 100, 100, 100, 100}, 3000, 3010, 3020, 3300, 3305},  // with it all minutes are over
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double seconds = 0;
        const int64_t steps = run_of_ten_minutes(5400, cases[i].ms, cases[i].pause, &seconds);
        CHECK(steps >= cases[i].least && steps <= cases[i].most, "case %zu: %lld steps", i, (long long)steps);
        CHECK(seconds >= cases[i].earliest && seconds <= cases[i].latest, "case %zu: %.0f s", i, seconds);
    }
    Pace all_time = {0, 0, 0, 0, 0, 0};
    CHECK(pace_end(&all_time, 1e9, 5, 100) == 100, "without --minutes");
}

TEST(a_shortened_schedule_goes_on_from_its_rate_to_the_last) {
    for (int name = SCHEDULE_COSINE; name <= SCHEDULE_WSD; name++) {
        Schedule s = schedule_make((ScheduleName)name, 1000, 20, 1, 0.1, 0, SHAPE_ROOT);
        double before = 0, steepest = 0;
        for (int64_t step = 0; step < s.steps; step++) {
            const Schedule old = s;
            if (step == 15) { schedule_shorten(&s, step, 700); }  // in the warm-up, too
            if (step == 300) { schedule_shorten(&s, step, 500); }
            for (int64_t past = 0; past < step; past++) { CHECK(learning_rate(&s, past) == learning_rate(&old, past), "past"); }
            const double lr = learning_rate(&s, step), jump = lr - learning_rate(&old, step);
            CHECK(step == 15 ? jump >= 0 && jump < 0.1 : jump == 0, "a jump of %g at step %lld", jump, (long long)step);
            CHECK(lr <= 1, "%g is above the highest rate", lr);
            if (step >= 20) { steepest = fmax(steepest, before - lr); }
            before = lr;
        }
        const double most[] = {0.0052, 0.0027, 0, 0.16}, last[] = {0.1, 0.1, 1, 0.1};  // wsd falls as a root does
        CHECK(s.steps == 500 && s.count <= 5, "%lld steps in %d phases", (long long)s.steps, s.count);
        CHECK(steepest <= most[name], "schedule %d falls by %g in a step", name, steepest);
        CHECK(fabs(before - last[name]) <= 0.007, "schedule %d ends at %g", name, before);
    }
    Schedule wsd = schedule_make(SCHEDULE_WSD, 1000, 20, 1, 0, 0, SHAPE_ROOT);
    schedule_shorten(&wsd, 300, 650);
    CHECK(learning_rate(&wsd, 550) == 1 && near(learning_rate(&wsd, 600), 1 - sqrt(0.5)), "what is left keeps its shares");
}

TEST(minutes_become_a_round_number_of_steps) {
    CHECK(steps_for_minutes(5, 60, 0.5) == 430, "%lld", (long long)steps_for_minutes(5, 60, 0.5));
    CHECK(steps_for_minutes(5, 400, 0.5) == 10, "out of time");
    CHECK(steps_for_minutes(1e6, 0, 0) == 2000000000, "%lld", (long long)steps_for_minutes(1e6, 0, 0));
    CHECK(steps_for_minutes(1, 0, NAN) >= 10, "no time");
}

/* Returns the plan's text on packed rows, whose index has these costs. */
static const char* rows_text(uint64_t bytes, double seconds) {
    static char text[256];
    DataLoader d;
    FILE* f = tmpfile();
    memset(&d, 0, sizeof d);
    d.indexed = true;
    d.documents = DOCUMENTS_PACK;
    d.T = 32;
    d.counts.rows = 1000;
    d.counts.documents = 3000;
    d.counts.padding = 1600;
    d.counts.bytes = bytes;
    d.counts.seconds = seconds;
    print_rows(f, "a.bin", &d);
    rewind(f);
    text[fread(text, 1, sizeof text - 1, f)] = 0;
    fclose(f);
    return text;
}

TEST(the_plan_tells_of_an_index_that_costs_something) {
#define ROWS "rows    a.bin: 1,000 rows of 32 tokens (pack), 3,000 documents, 5.0 % padding\n"
    CHECK(strcmp(rows_text(999999, 0.49), ROWS) == 0, "%s", rows_text(999999, 0.49));
    CHECK(strcmp(rows_text(1000000, 0), ROWS "        an index of 1.0 MB, made in 0.0 s\n") == 0, "%s", rows_text(1000000, 0));
    CHECK(strcmp(rows_text(24000, 0.5), ROWS "        an index of 0.0 MB, made in 0.5 s\n") == 0, "%s", rows_text(24000, 0.5));
#undef ROWS
}

enum { PRETEND_LAYERS = 8 };

/* Pretends a need of 100 MiB + 1 MiB per row of 256 tokens, less with recomputation and smaller moments; with several ranks 20
 * more, of which --zero 2 spares 10 and --zero 3 all. */
static void pretend_measure(const Trainer* t, const ModelConfig* c, const ModelUse* use, const Options* o, MemoryTable* m) {
    const uint64_t mib = 1 << 20, fixed = (use->ranks > 1 ? 120 - 10 * (uint64_t)o->zero : 100) << 20;
    (void)t, (void)c;
    uint64_t saved = 0;
    uint64_t row = (uint64_t)o->seq * mib / 256;
    for (int l = 0; o->trainer == ON_GPU && l < PRETEND_LAYERS - 1; l++) {  // each of the four groups takes a quarter
        const Recomputed again = recompute_at(&o->recompute, l);
        saved += (uint64_t)(again.norms + again.gate_up + again.block);
    }
    row = row * (4 * PRETEND_LAYERS - saved) / (4 * PRETEND_LAYERS);
    memory_add(m, "everything", (o->moments == MOMENTS_BF16 ? fixed / 2 : fixed) + row * (uint64_t)o->batch);
}

static const ModelConfig pretend_config = {.num_layers = PRETEND_LAYERS};
static const Trainer pretend_trainer = {.measure = pretend_measure};

/* Returns the room of `have` bytes for a pretended model. */
static MemoryRoom pretend_room(const Trainer* t, uint64_t have) {
    const MemoryRoom room = {t, &pretend_config, {.ranks = 1, .B = 1}, have};
    return room;
}

/* Smaller micro-batches add up more often, which costs memory: the memory must be measured for the run that the hint
 * describes. */
static void sums_measure(const Trainer* t, const ModelConfig* c, const ModelUse* use, const Options* o, MemoryTable* m) {
    const int64_t step = o->total_batch ? o->total_batch : (int64_t)o->batch * o->seq;
    (void)t, (void)c, (void)use;
    memory_add(m, "sums", (uint64_t)o->batch + (step / ((int64_t)o->batch * o->seq) > 2 ? 1000 : 0));
}

TEST(a_hint_is_measured_with_all_its_flags) {
    Options o;
    char hint[256];
    options_default(&o, ON_CPU);
    o.batch = 16;
    o.seq = 1;
    const Trainer trainer = {.measure = sums_measure};
    MemoryRoom room = pretend_room(&trainer, 8);
    CHECK(memory_find_fit(hint, sizeof hint, &o, &room), "8 rows in two micro-batches fit");
    CHECK(strcmp(hint, "these flags fit: --batch 8 --total-batch 16") == 0, "%s", hint);
    room.have = 7;
    CHECK(!memory_find_fit(hint, sizeof hint, &o, &room), "4 micro-batches do not fit into 7: %s", hint);
    options_free(&o);
}

/* State of 60 MiB, 30 with bf16 moments, beside 40 MiB that stay on the card, 35 with small gradients. The host's room is the
 * trainer's data. */
static void offload_measure(const Trainer* t, const ModelConfig* c, const ModelUse* use, const Options* o, MemoryTable* m) {
    (void)c, (void)use;
    memory_add(m, "weights and gradients", (uint64_t)(o->grad_dtype == GRAD_DTYPE_PARAM ? 35 : 40) << 20);
    memory_add_row(m, "state", (uint64_t)(o->moments == MOMENTS_BF16 ? 30 : 60) << 20, o->offload >= OFFLOAD_OPTIMIZER);
    memory_add_row(m, "copies", 1, true);
    m->host = *(const uint64_t*)t->device;
}

TEST(a_hint_moves_state_to_a_host_that_has_room) {
    static const struct {
        Offload given;
        uint64_t card, host;  // MiB; 0: unknown
        const char* hint;
    } cases[] = {{OFFLOAD_OFF, 100, 1, NULL},
                 {OFFLOAD_OFF, 50, 0, "fit: --offload optimizer"},
                 {OFFLOAD_OFF, 50, 61, "fit: --offload optimizer"},
                 {OFFLOAD_OFF, 50, 60, "fit: --offload optimizer --moments bf16"},
                 {OFFLOAD_OFF, 50, 30, "too large"},
                 {OFFLOAD_OPTIMIZER, 50, 61, NULL},
                 {OFFLOAD_OPTIMIZER, 50, 60, "fit: --moments bf16"},
                 {OFFLOAD_OPTIMIZER, 100, 60, "fit: --offload off"},
                 {OFFLOAD_OPTIMIZER, 36, 61, "fit: --grad-dtype param"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Options o;
        Error e = NO_ERROR;
        uint64_t host = cases[i].host << 20;
        const Trainer trainer = {.measure = offload_measure, .device = &host};
        const MemoryRoom room = pretend_room(&trainer, cases[i].card << 20);
        options_default(&o, ON_GPU);
        o.offload = cases[i].given;
        const bool fits = memory_check(&room, &o, "memory", NULL, &e);
        CHECK(fits == !cases[i].hint && (fits || strstr(e.msg, cases[i].hint)), "case %zu: %s", i, e.msg);
    }
}

TEST(checkpoints_keep_offload_auto_and_logs_what_it_took) {
    Options o;
    char text[OPTION_TEXT];
    uint64_t host = 0;
    const Trainer trainer = {.measure = offload_measure, .device = &host};
    const MemoryRoom room = pretend_room(&trainer, 50 << 20);
    options_default(&o, ON_GPU);
    o.offload = OFFLOAD_AUTO;
    choose_offload(&o, &room, NULL);
    char* log = options_log_text(&o, 1000);
    CHECK(o.offload == OFFLOAD_OPTIMIZER && strstr(log, "\"offload\":\"optimizer\""), "%d, %s", o.offload, log);
    CHECK(strcmp(option_text(&o, OPT_offload, text), "auto") == 0, "checkpoints keep %s", text);
    free(log);
}

TEST(what_does_not_fit_is_refused_with_flags_that_fit) {
    static const struct {
        OptionScope trainer;
        const char* recompute;  // as given
        int have;               // MiB
        const char* hint;
    } cases[] = {
        {ON_CPU, "none", 108, NULL},
        {ON_CPU, "none", 107, "fit: --batch 4 --total-batch 2048"},
        {ON_CPU, "none", 101, "fit: --batch 1 --total-batch 2048"},
        {ON_GPU, "none", 107, "fit: --recompute norm+swiglu:4"},
        {ON_GPU, "none", 106, "fit: --recompute norm+swiglu,ffn:1"},
        {ON_GPU, "none", 103, "fit: --recompute ffn,block:6"},
        {ON_GPU, "none", 101, "fit: --recompute ffn,block:2 --batch 2 --total-batch 2048"},
        {ON_GPU, "ffn:2", 107, NULL},
        {ON_GPU, "ffn:2", 106, "fit: --recompute norm+swiglu,ffn:1"},
        {ON_GPU, "block", 101, "fit: --batch 2 --total-batch 2048"},
        {ON_GPU, "none", 58, "fit: --moments bf16"},
        {ON_CPU, "none", 99, "too large"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Options o;
        Error e = NO_ERROR;
        MemoryRoom room = pretend_room(&pretend_trainer, (uint64_t)cases[i].have << 20);
        options_default(&o, cases[i].trainer);
        o.batch = 8;
        CHECK(recompute_read(&o.recompute, cases[i].recompute), "%s", cases[i].recompute);
        bool fits = memory_check(&room, &o, "memory", NULL, &e);
        const char* hint = cases[i].hint ? strstr(e.msg, cases[i].hint) : "";
        CHECK(fits == !cases[i].hint, "case %zu: %s", i, e.msg);
        CHECK(hint && (fits || !hint[strlen(cases[i].hint)] || strstr(cases[i].hint, "large")), "case %zu: %s", i, e.msg);
        room.have = 0;
        CHECK(memory_check(&room, &o, "memory", NULL, &e), "an unknown size refuses nothing");
    }
}

/* Each choice but the last fits, and the one before it in the order of cost does not. A group of a block takes one MiB. */
TEST(recompute_auto_takes_as_few_blocks_as_fit) {
    static const struct {
        int have;  // MiB; 0: unknown
        const char* takes;
    } cases[] = {{0, "none"},
                 {132, "none"},
                 {131, "norm+swiglu:1"},
                 {126, "norm+swiglu:6"},
                 {125, "norm+swiglu"},
                 {124, "norm+swiglu,ffn:1"},
                 {119, "norm+swiglu,ffn:6"},
                 {118, "ffn"},
                 {117, "ffn,block:1"},
                 {111, "block"},
                 {110, "block"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Options o;
        char text[OPTION_TEXT];
        const MemoryRoom room = pretend_room(&pretend_trainer, (uint64_t)cases[i].have << 20);
        options_default(&o, ON_GPU);
        o.batch = 4 * PRETEND_LAYERS;
        CHECK(recompute_read(&o.recompute, "auto"), "auto");
        recompute_set(&o.recompute, RECOMPUTE_FFN, 3);  // an earlier choice does not count
        o.recompute = memory_find_recompute(&room, &o);
        CHECK(strcmp(option_text(&o, OPT_recompute, text), "auto") == 0, "checkpoints keep %s, not auto", text);
        o.recompute.automatic = false;
        CHECK(strcmp(option_text(&o, OPT_recompute, text), cases[i].takes) == 0, "in %d MiB: %s", cases[i].have, text);
    }
}

/* A block's norms and SwiGLU cost 0.25 % of a step here, --zero 2 costs 1 % and --zero 3 1.7 %. */
TEST(recompute_auto_takes_the_cheapest_pair_with_zero) {
    static const struct {
        int have, ranks, parts, micros;  // MiB; of a row; micro-batches of a step
        const char *zero, *lora;         // as given
        const char* takes;
    } cases[] = {{0, 4, 1, 1, NULL, "0", "1 none"},
                 {152, 4, 1, 1, NULL, "0", "1 none"},
                 {148, 4, 1, 1, NULL, "0", "1 norm+swiglu:4"},
                 {147, 4, 1, 1, NULL, "0", "2 none"},
                 {141, 4, 1, 1, NULL, "0", "2 norm+swiglu:1"},
                 {138, 4, 1, 1, NULL, "0", "3 none"},
                 {130, 4, 1, 1, NULL, "0", "3 norm+swiglu:2"},
                 {105, 4, 1, 1, NULL, "0", "3 block"},
                 {147, 4, 1, 1, "1", "0", "1 norm+swiglu:5"},
                 {152, 4, 1, 1, "3", "0", "3 none"},
                 {147, 4, 1, 2, NULL, "0", "1 norm+swiglu:5"},
                 {147, 4, 1, 2, NULL, "8", "2 none"},
                 {147, 4, 2, 1, NULL, "0", "2 none"},
                 {131, 1, 1, 1, NULL, "0", "1 norm+swiglu:1"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Options o;
        Error e = NO_ERROR;
        char text[OPTION_TEXT], found[OPTION_TEXT + 8];
        MemoryRoom room = pretend_room(&pretend_trainer, (uint64_t)cases[i].have << 20);
        options_default(&o, ON_GPU);
        o.batch = 4 * PRETEND_LAYERS;
        room.use.ranks = cases[i].ranks;
        o.seq_parallel = cases[i].parts;
        o.total_batch = (int64_t)o.batch * o.seq * cases[i].micros * cases[i].ranks / cases[i].parts;
        o.given[OPT_zero] = cases[i].zero != NULL;
        CHECK(option_set(&o, OPT_zero, cases[i].zero ? cases[i].zero : "3", &e), "%s", e.msg);  // 3: an earlier choice
        CHECK(option_set(&o, OPT_lora, cases[i].lora, &e) && recompute_read(&o.recompute, "auto"), "%s", e.msg);
        memory_find_pair(&room, &o, ZERO_3);
        o.recompute.automatic = false;
        snprintf(found, sizeof found, "%d %s", o.zero + 1, option_text(&o, OPT_recompute, text));
        CHECK(strcmp(found, cases[i].takes) == 0, "case %zu: --zero %s", i, found);
        o.recompute.automatic = true;
        const char* hint =
            cases[i].have == 105 ? "fit: --zero 3 --batch " : "";  // smaller rows are several: auto would stay at 1
        CHECK(memory_check(&room, &o, "memory", NULL, &e) || (*hint && strstr(e.msg, hint)), "case %zu: %s", i, e.msg);
    }
}

TEST(the_rows_of_a_new_model_are_halved_after_recompute_auto) {
    static const struct {
        const char* recompute;  // as given
        int have;               // MiB; 0: unknown
        int rows;
    } cases[] = {{"none", 0, 32},   {"none", 132, 32}, {"none", 131, 16}, {"none", 99, 1},  {"auto", 0, 32},
                 {"auto", 131, 32}, {"auto", 111, 32}, {"auto", 110, 16}, {"auto", 105, 8}, {"auto", 99, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Options o;
        const Dial dial = {.on = true};
        const MemoryRoom room = pretend_room(&pretend_trainer, (uint64_t)cases[i].have << 20);
        options_default(&o, ON_GPU);
        o.batch = 4 * PRETEND_LAYERS;
        CHECK(recompute_read(&o.recompute, cases[i].recompute), "%s", cases[i].recompute);
        choose_batch(&o, &dial, &room, NULL);
        CHECK(o.batch == cases[i].rows, "--recompute %s in %d MiB: %d rows", cases[i].recompute, cases[i].have, o.batch);
    }
}

static void write_text_at(const char* folder, const char* name, const char* text) {
    char path[PATH_CAP], dir[PATH_CAP];
    Error e = NO_ERROR;
    CHECK(path_join(path, folder, name, &e), "%s", e.msg);
    folder_of(path, dir);
    CHECK(make_directories(dir, &e) && write_file(path, text, strlen(text), &e), "%s", e.msg);
}

TEST(a_container_has_the_cores_of_its_share) {
    const char* root = test_folder();
    CHECK(cgroups_cores(root) == UINT64_MAX, "no cgroup");
    write_text_at(root, "proc/self/cgroup", "1:cpuset:/\n0::/a/b\n");
    CHECK(cgroups_cores(root) == UINT64_MAX, "no limit");
    write_text_at(root, "sys/fs/cgroup/cpu.max", "max 100000\n");
    write_text_at(root, "sys/fs/cgroup/a/cpu.max", "150000 100000\n");
    write_text_at(root, "sys/fs/cgroup/a/b/cpu.max", "400000 100000\n");
    CHECK(cgroups_cores(root) == 2, "1.5 of a parent, 4 of its own: %llu", (unsigned long long)cgroups_cores(root));
    write_text_at(root, "sys/fs/cgroup/a/cpu.max", "0 0\n");
    CHECK(cgroups_cores(root) == 4, "nonsense is no limit: %llu", (unsigned long long)cgroups_cores(root));
    write_text_at(root, "proc/self/cgroup", "4:cpu,cpuacct:/c\n0::/\n");
    write_text_at(root, "sys/fs/cgroup/cpu/c/cpu.cfs_quota_us", "-1\n");
    write_text_at(root, "sys/fs/cgroup/cpu/c/cpu.cfs_period_us", "100000\n");
    CHECK(cgroups_cores(root) == UINT64_MAX, "version 1, no limit");
    write_text_at(root, "sys/fs/cgroup/cpu/c/cpu.cfs_quota_us", "50000\n");
    CHECK(cgroups_cores(root) == 1, "version 1, half a core");
    CHECK(cgroups_available(root) == UINT64_MAX, "memory is another matter");
}

static int print_path(void) {
    const char* path = getenv("PATH");
    printf("%zu threads, PATH=%s\n", max_threads(), path ? path : "");
    return 0;
}

#ifdef _OPENMP
/* Returns what OpenMP and print_path() print in a process of this program with these variables. */
static const char* environment_with(const char* variables) {
    static char text[1 << 14];
    char command[256];
    snprintf(command, sizeof command,
             "env -u OMP_WAIT_POLICY -u GOMP_SPINCOUNT -u KMP_BLOCKTIME %s OMP_DISPLAY_ENV=verbose KMP_SETTINGS=1 "
             "/proc/%d/exe print_path 2>&1",
             variables, (int)getpid());
    FILE* f = popen(command, "r");
    text[f ? fread(text, 1, sizeof text - 1, f) : 0] = 0;
    if (f) { pclose(f); }
    return text;
}

TEST(threads_spin_for_a_short_time_unless_the_user_has_chosen) {
#ifdef __clang__
    const char *ours = "KMP_BLOCKTIME='1'", *own = "KMP_BLOCKTIME=7", *theirs = "KMP_BLOCKTIME='7'",
               *policy = "KMP_BLOCKTIME='0'";
#else
    const char *ours = "GOMP_SPINCOUNT = '2000'", *own = "GOMP_SPINCOUNT=7", *theirs = "GOMP_SPINCOUNT = '7'",
               *policy = "GOMP_SPINCOUNT = '0'";
#endif
    const char* text = environment_with("PATH=/a:/b OMP_NUM_THREADS=2");
    CHECK(strstr(text, ours) && strstr(text, "2 threads"), "%s", text);
    CHECK(strstr(text, "PATH=/a:/b\n"), "PATH is not what it was: %s", text);
    text = environment_with(own);
    CHECK(strstr(text, theirs) && !strstr(text, ours), "%s", text);
    text = environment_with("OMP_WAIT_POLICY=passive");
    CHECK(strstr(text, policy) && !strstr(text, ours), "%s", text);
    text = environment_with("-u PATH");
    CHECK(strstr(text, "threads, PATH="), "no PATH: %s", text);
}
#endif

TEST(numbers_read_well) {
    char t[64];
    CHECK(strcmp(text_count(0, t, sizeof t), "0") == 0 && strcmp(text_count(999, t, sizeof t), "999") == 0, "%s", t);
    CHECK(strcmp(text_count(1234567, t, sizeof t), "1,234,567") == 0, "%s", t);
    CHECK(strcmp(text_count(UINT64_MAX, t, sizeof t), "18,446,744,073,709,551,615") == 0, "%s", t);
    CHECK(strcmp(text_clock(7.4, t, sizeof t), "0:07") == 0, "%s", t);
    CHECK(strcmp(text_clock(775, t, sizeof t), "12:55") == 0, "%s", t);
    CHECK(strcmp(text_clock(3600 * 30 + 61, t, sizeof t), "30:01:01") == 0, "%s", t);
    CHECK(strcmp(text_clock(NAN, t, sizeof t), "-") == 0 && strcmp(text_clock(-1, t, sizeof t), "-") == 0, "%s", t);
    CHECK(strcmp(text_bytes(1536 << 10, t, sizeof t), "1.5 MiB") == 0, "%s", t);
    CHECK(host_memory_available() > 1 << 20 && host_memory_peak() > 1 << 16, "this machine has memory");
}

/* Reads the bytes that a pipe or terminal holds now. */
static const char* what_came(int fd) {
    static char text[1024];
    const ssize_t n = read(fd, text, sizeof text - 1);
    text[n > 0 ? n : 0] = 0;
    return text;
}

/* Adds `n` as if `seconds` had passed since the start, and since the last line, if any. */
static void later(Progress* p, double seconds, uint64_t n) {
    const double now = now_seconds();
    p->start = now - seconds;
    if (p->shown > 0) { p->shown = now - seconds; }
    progress_add(p, n);
}

TEST(progress_tells_share_speed_and_time_left) {
    char line[PROGRESS_CAP];
    Progress p = progress_begin(NULL, "scan", 4000000000u, "B");
    p.done = 1000000000;
    progress_text(&p, 10, line);
    CHECK(strcmp(line, "scan     25.0 % of 4.00 GB, 100.0 MB/s, 0:30 left") == 0, "%s", line);
    p.total = 0;
    progress_text(&p, 0.5, line);
    CHECK(strcmp(line, "scan    1.00 GB, 2.00 GB/s") == 0, "%s", line);
    p = progress_begin(NULL, "timing", 3, "steps");
    p.total = 0;
    progress_text(&p, 65, line);
    CHECK(strcmp(line, "timing  1:05") == 0, "what cannot be counted: %s", line);
    p.total = 3;
    progress_text(&p, 65, line);
    CHECK(strcmp(line, "timing    0.0 % of 3 steps, 1:05") == 0, "without a speed, the time so far: %s", line);
    p.done = 1;
    progress_text(&p, 20, line);
    CHECK(strcmp(line, "timing   33.3 % of 3 steps, 0.05 steps/s, 0:40 left") == 0, "%s", line);
    p.done = 3;
    progress_text(&p, 20, line);
    CHECK(strcmp(line, "timing  100.0 % of 3 steps, 0.15 steps/s") == 0, "%s", line);
}

TEST(progress_is_one_line_at_a_terminal_and_few_elsewhere) {
    const int terminal = posix_openpt(O_RDWR | O_NOCTTY | O_NONBLOCK);
    CHECK(terminal >= 0 && grantpt(terminal) == 0 && unlockpt(terminal) == 0, "no terminal: %s", strerror(errno));
    FILE* out = fopen(ptsname(terminal), "w");
    if (!out) { return; }
    Progress p = progress_begin(out, "read", 0, "B");
    later(&p, 1.9, 1000000);
    CHECK(*what_came(terminal) == 0, "nothing within two seconds");
    later(&p, 2.1, 98900000);
    CHECK(strncmp(what_came(terminal), "\rread    99.9 MB", 16) == 0, "then a line");
    p.start -= 100;
    progress_add(&p, 0);
    CHECK(*what_came(terminal) == 0, "and not two within a second");
    later(&p, 50, 0);
    const char* got = what_came(terminal);
    CHECK(strcmp(got, "\rread    99.9 MB, 2.0 MB/s ") == 0, "a shorter one covers the one before: %s", got);
    progress_end(&p);
    progress_end(&p);
    fflush(out);
    CHECK(strcmp(what_came(terminal), "\r                         \r") == 0, "the end wipes it away, once");
    fclose(out);
    close(terminal);

    int ends[2];
    CHECK(pipe2(ends, O_NONBLOCK) == 0, "no pipe");
    out = fdopen(ends[1], "w");
    p = progress_begin(out, "read", 0, "B");
    later(&p, 9.9, 0);
    CHECK(*what_came(ends[0]) == 0, "a file gets a line every ten seconds");
    later(&p, 10.1, 20200000);
    CHECK(strcmp(what_came(ends[0]), "read    20.2 MB, 2.0 MB/s\n") == 0, "which ends");
    later(&p, 9.9, 0);
    progress_end(&p);
    fflush(out);
    CHECK(*what_came(ends[0]) == 0, "and nothing is wiped there");
    fclose(out);
    close(ends[0]);
    p = progress_begin(NULL, "read", 0, "B");
    later(&p, 100, 1);
    progress_end(&p);
}

/* Weights that a sink got, and a source gives. */
typedef struct {
    float* values;  // an arena
    size_t pieces, limit;
} Arrived;

static bool arrive(void* arrived, const Param* p, size_t first, size_t n, const float* src, Error* e) {
    Arrived* a = (Arrived*)arrived;
    memcpy(a->values + p->offset + first, src, n * sizeof *src);
    return ++a->pieces <= a->limit || fail(e, "these are too many");
}

static bool depart(void* arrived, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    const Arrived* a = (const Arrived*)arrived;
    (void)e;
    memcpy(dst, a->values + p->offset + first, n * sizeof *dst);
    return true;
}

TEST(what_passes_is_counted) {
    int ends[2];
    float values[4] = {1, 2, 3, 4}, got[2] = {0, 0};
    const Param p = {.offset = 1, .rows = 1, .cols = 3, .name = "p"};
    Arrived a = {values, 0, 1};
    Error e = NO_ERROR;
    CHECK(pipe2(ends, O_NONBLOCK) == 0, "no pipe");
    FILE* out = fdopen(ends[1], "w");
    Passed passed = {progress_begin(out, "load", 8, "weights"), false};
    StateSlot slot = {"m", SAFE_F32, depart, arrive, &a, &passed};
    const float src[2] = {5, 6};
    CHECK(slot_store(&slot, &p, 1, 2, src, &e) && values[2] == 5 && values[3] == 6 && values[1] == 2, "not where it belongs");
    passed.progress.start -= 11;
    CHECK(slot_fetch(&slot, &p, 0, 2, got, &e) && got[0] == 2 && got[1] == 5, "not what is there");
    const char* line = what_came(ends[0]);
    CHECK(strncmp(line, "load     50.0 % of 8 weights, 0.36 weights/s, 0:11 left\n", 56) == 0, "%s", line);
    CHECK(!slot_store(&slot, &p, 1, 1, src, &e) && strcmp(e.msg, "these are too many") == 0, "an error is lost");
    slot.sink = NULL;
    CHECK(slot_store(&slot, &p, 0, 2, src, &e) && passed.progress.done == 7, "without a sink: %d", (int)passed.progress.done);
    CHECK(!passed.not_finite, "all are finite");
    values[2] = INFINITY;
    CHECK(slot_fetch(&slot, &p, 0, 2, got, &e) && passed.not_finite, "an infinite one is not noted");
    fclose(out);
    close(ends[0]);
}

TEST(weights_in_pieces_are_those_drawn_at_once) {
    static float whole[2001], parts[2001];
    rand_normal(whole, 0, 2001, 0.02, 7, 3);
    rand_normal(parts, 0, 1000, 0.02, 7, 3);
    rand_normal(parts + 1000, 1000, 1001, 0.02, 7, 3);
    CHECK(memcmp(whole, parts, sizeof whole) == 0, "normals");
    rand_even(whole, 0, 2001, 0.5, 7, 3);
    rand_even(parts, 0, 1002, 0.5, 7, 3);
    rand_even(parts + 1002, 1002, 999, 0.5, 7, 3);
    CHECK(memcmp(whole, parts, sizeof whole) == 0, "even ones");

    ModelConfig c;
    CHECK(config_preset(&c, "d1", 2 * MODEL_PIECE / 64 + 3), "no preset");
    ParamTable t = param_table(&c);
    float* at_once = (float*)xcalloc(t.elements, sizeof(float));
    for (int i = 0; i < t.count; i++) {
        const Param* p = &t.items[i];
        param_init(at_once + p->offset, p, 0, param_size(p), (uint32_t)i, &c, 5);
    }
    Arrived a = {(float*)xcalloc(t.elements, sizeof(float)), 0, SIZE_MAX};
    Error e = NO_ERROR;
    CHECK(tensors_draw(&c, &t, 5, slot_to(arrive, &a), &e) && a.pieces > (size_t)t.count, "%zu pieces of %d", a.pieces,
          t.count);
    CHECK(memcmp(at_once, a.values, t.elements * sizeof(float)) == 0, "the pieces are others than the whole");
    a.pieces = 0;
    a.limit = 2;
    CHECK(!tensors_draw(&c, &t, 5, slot_to(arrive, &a), &e) && a.pieces == 3, "an error ends it: %zu pieces", a.pieces);
    free(a.values);
    free(at_once);
    param_table_free(&t);
}

/* A trainer whose steps take their time: `slow` seconds for each of a step's micro-batches after the first `fast`. */
typedef struct {
    int fast, slow, steps;
    int32_t tokens[8];
} SlowModel;

static bool slow_next(void* ctx, int32_t* x, int32_t* y, Error* e) {
    (void)ctx, (void)x, (void)y;
    return e->msg[0] == 0;
}

static bool slow_step(void* model, const Recipe* recipe, double lr, Error* e) {
    SlowModel* m = (SlowModel*)model;
    CHECK(lr == 0, "a timed step changes nothing");
    for (int k = 0; k < recipe->accumulate; k++) {
        if (!batch_read(&recipe->data, 2, 2, m->tokens, m->tokens + 4, e)) { return false; }
        const double start = now_seconds();
        while (k >= m->fast && now_seconds() - start < m->slow) {
            if (run_stop_requested()) { return false; }
            usleep(1000);
        }
    }
    m->steps++;
    return true;
}

static Metrics slow_result(void* model, const Recipe* recipe) {
    Metrics r;
    (void)recipe;
    memset(&r, 0, sizeof r);
    r.ms = 100.0 / ((SlowModel*)model)->steps;
    return r;
}

TEST(steps_are_timed_and_given_up_after_a_while) {
    Trainer t;
    Recipe recipe;
    StepTime time;
    Error e = NO_ERROR;
    memset(&t, 0, sizeof t);
    memset(&recipe, 0, sizeof recipe);
    t.step = slow_step;
    t.result = slow_result;
    recipe.data.next = slow_next;
    recipe.data.rows = 1;
    recipe.accumulate = 4;
    SlowModel m = {4, 0, 0, {0}};
    CHECK(time_steps(&t, &m, &recipe, 2, 1, NULL, &time, &e) && time.whole && m.steps == TIMED_STEPS &&
              near(time.ms, 100.0 / TIMED_STEPS),
          "the fastest of all: %g", time.ms);
    m.fast = 3, m.slow = 60, m.steps = 0;
    CHECK(time_steps(&t, &m, &recipe, 2, 1, NULL, &time, &e) && !time.whole && time.parts == 3, "%s", e.msg);
    CHECK(time.ms >= 1e3 / 3 * 4 && time.ms < 5e3, "the part that was done tells of the rest: %g", time.ms);
    m.fast = 0;
    CHECK(time_steps(&t, &m, &recipe, 2, 1, NULL, &time, &e) && !time.whole && time.parts == 0 && time.ms >= 1e3, "%g",
          time.ms);
    CHECK(!run_stop_requested(), "what comes next is not asked to end");
    recipe.accumulate = 1;
    m.fast = 1;
    fail(&e, "no data");
    CHECK(!time_steps(&t, &m, &recipe, 2, 1, NULL, &time, &e), "an error is one");
}

TEST(the_columns_of_the_step_line_stand_below_their_names) {
    char text[8192];
    FILE* f = fmemopen(text, sizeof text, "w");
    StepLines s;
    step_lines_init(&s, 2000, 1024, 0, 1e9, 0);
    Metrics r = {.loss = 7.6241, .norm = 2.5, .lr = 3e-4, .ms = 512};
    step_line(f, &s, 1, 2000, &r, (uint64_t)1 << 30, NULL);
    CHECK(near(s.tok_s, 2000), "%g", s.tok_s);
    r.loss = NAN;
    r.norm = 123456;
    for (int i = 2; i <= 60; i++) {  // step 41 is skipped and so shown; other steps after the first screen are not
        step_line(f, &s, i, 2000, &r, (uint64_t)1 << 30, i == 41 ? "skipped" : NULL);
    }
    fclose(f);
    size_t header = strcspn(text, "\n");
    static const char* const names[] = {"step", "loss", "gnorm", "lr", "ms", "tok/s", "flop/s", "mem", "eta"};
    const char *line = text + header + 1, *name = text;
    for (int i = 0; i < 9; i++) {
        name = strstr(name, names[i]);
        CHECK(name != NULL, "no column %s", names[i]);
        if (!name) { break; }
        size_t end = (size_t)(name - text) + strlen(names[i]);
        CHECK(line[end - 1] != ' ' && (line[end] == ' ' || line[end] == '\n'), "%s does not end where its numbers do:\n%s",
              names[i], text);
    }
    CHECK(strncmp(line, "   1/2000    7.6241    2.500  3.00e-04    512.0     2,000     2T   1.00G    17:03\n", 82) == 0, "%s",
          line);
    int headers = 0;
    for (const char* q = text; (q = strstr(q, "step")) != NULL; q++) { headers++; }
    CHECK(headers == 2, "%d headers in 41 lines", headers);
    int lines = 0;
    for (const char* q = text; (q = strchr(q, '\n')) != NULL; q++) { lines++; }
    CHECK(lines == 2 + 41, "%d lines", lines);
}

TEST(the_first_signal_asks_and_the_second_ends_at_once) {
    static const struct {
        int first, second, status;
    } cases[] = {
        {SIGTERM, 0, 0}, {SIGINT, SIGINT, 130}, {SIGINT, SIGTERM, 143}, {SIGTERM, SIGTERM, 143}, {SIGHUP, SIGTERM, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            signal(SIGHUP, SIG_DFL);  // nohup ignores it
            run_catch_signals();
            if (run_stop_requested()) { _exit(1); }
            raise(cases[i].first);
            if (!run_stop_requested()) { _exit(2); }
            if (cases[i].second) { raise(cases[i].second); }
            _exit(0);
        }
        int status = 0;
        waitpid(child, &status, 0);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == cases[i].status, "case %zu: status %d", i, status);
    }
}

TEST(of_several_ranks_one_signal_is_a_wish_and_its_copies_are_none) {
    static const struct {
        int later, status;  // seconds between the two signals
    } cases[] = {{0, 0}, {RUN_SAME_SIGNAL, 0}, {RUN_SAME_SIGNAL + 1, 143}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fflush(stdout);
        const pid_t child = fork();
        if (child == 0) {
            run_catch_signals();
            run_together = 1;
            raise(SIGINT);
            if (!run_signal_came() || run_stop_requested()) { _exit(1); }
            run_signal_time -= cases[i].later;
            raise(SIGTERM);
            run_all_stop = 1;
            _exit(run_stop_requested() ? 0 : 2);
        }
        int status = 0;
        waitpid(child, &status, 0);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == cases[i].status, "%d s later: status %d", cases[i].later, status);
    }
}

TEST(sigusr1_and_sigusr2_ask_for_a_checkpoint_and_for_no_end) {
    static const int numbers[] = {SIGUSR1, SIGUSR2};
    for (int i = 0; i < 2; i++) {
        fflush(stdout);
        const pid_t child = fork();
        if (child == 0) {
            run_catch_save_signals();
            if (run_save_requested()) { _exit(1); }
            raise(numbers[i]);
            if (!run_save_requested() || run_stop_requested()) { _exit(2); }
            run_save_done();
            _exit(run_save_requested() ? 3 : 0);
        }
        int status = 0;
        waitpid(child, &status, 0);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "SIGUSR%d: status %d", i + 1, status);
    }
}

/* Searches a (2, 3), then b (3, 2) of layer 7. */
static bool search_two(const float* a, const float* b, char name[TENSOR_TEXT]) {
    FiniteSearch s = finite_search(name);
    search_tensor(&s, (NamedTensor){"a", -1, a, sizeof *a, 2, 3, 3});
    search_tensor(&s, (NamedTensor){"b", 7, b, sizeof *b, 3, 2, 2});
    return s.found;
}

TEST(the_first_tensor_that_is_not_finite_is_named) {
    float a[6] = {0}, b[6] = {0};
    char name[TENSOR_TEXT] = "";
    CHECK(!search_two(a, b, name), "%s", name);
    b[3] = NAN;
    CHECK(search_two(a, b, name) && strcmp(name, "b of layer 7, row 1, column 1") == 0, "%s", name);
    a[5] = -INFINITY;
    CHECK(search_two(a, b, name) && strcmp(name, "a, row 1, column 2") == 0, "%s", name);
}

// ---------------------------------------------------------------------------------------------------------------------
// which rank counts as the slowest, and when the run reports it

/* Adds a window of steps with these times. Returns how often a rank was reported. */
static int window(Slowest* s, const float* ms, int ranks, SlowRank* slow) {
    int told = 0;
    for (int i = 0; i < SLOWEST_STEPS; i++) { told += slowest_add(s, ms, ranks, slow); }
    return told;
}

TEST(the_slowest_is_compared_with_the_median_of_the_others) {
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

TEST(a_rank_that_is_five_percent_behind_is_told_after_a_window) {
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

TEST(it_is_told_again_when_it_is_another_one_or_after_long) {
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

TEST(a_step_of_unknown_time_is_left_out) {
    static const float slow[2] = {10, 12}, unknown[2] = {0, 12}, nan[2] = {10, NAN};
    Slowest s;
    SlowRank r = {0, 0, 0};
    memset(&s, 0, sizeof s);
    CHECK(window(&s, unknown, 2, &r) == 0 && window(&s, nan, 2, &r) == 0 && s.steps == 0, "%d steps count", s.steps);
    CHECK(window(&s, slow, 2, &r) == 1 && fabs(r.ms - 12) < 1e-3, "%g ms", r.ms);
    slowest_free(&s);
}

int main(int argc, char** argv) {
    if (argc > 1 && strcmp(argv[1], "print_path") == 0) { return print_path(); }
#ifndef _OPENMP
    SKIP("threads_spin_for_a_short_time_unless_the_user_has_chosen", "built without OpenMP");
#endif
    return test_all();
}
