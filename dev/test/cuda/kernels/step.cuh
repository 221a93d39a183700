/* step.cuh -- tests of a step's decision and its inputs: sums of losses and squares, values that are not finite, outliers, the
 * loss scale. */
#ifndef TEST_KERNELS_STEP_CUH
#define TEST_KERNELS_STEP_CUH

#include "llmc/gpu/exchange.cuh"
#include "llmc/gpu/debug.cuh"
#include "llmc/optim/recipe.h"  // defines: global_norm, global_norm_scratch
#include "llmc/optim/step_state.cuh"
#include "dev/test/oracles.h"
#include "kernel_test.cuh"

template <typename T>
static void check_first_not_finite(size_t rows, size_t width, size_t pitch) {
    Floats x = random_values<T>(rows * width, 1);
    const size_t n = rows * width, places[] = {n, n - 1, n / 2, 0};  // n: none; each is before those already set
    for (size_t at : places) {
        if (at < n) { x[at] = at % 2 ? NAN : -INFINITY; }
        FiniteIndex* first = device_alloc<FiniteIndex>(1);
        first_not_finite_cuda(first, upload_rows<T>(x, rows, width, pitch), rows, width, pitch, 0);
        const FiniteIndex found = download(first, 1)[0];
        CHECK(found == (at < n ? at : ALL_FINITE), "(%zu, %zu): found %llu, wanted %zu", rows, width, found, at);
    }
    device_free_all();
}

static void the_first_not_finite_is_found() {
    for (size_t width : {(size_t)1, (size_t)97, (size_t)768, (size_t)1000000}) {
        check_first_not_finite<floatX>(1, width, width);
        check_first_not_finite<float>(1, width, width);
        check_first_not_finite<floatX>(5, width, padded(width));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// norm and the decision

static StepState read_state(const StepState* d) {
    StepState s;
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemcpy(&s, d, sizeof s, cudaMemcpyDeviceToHost));
    return s;
}

static StepState* new_state(float loss_scale) {
    std::vector<StepState> s(1);
    memset((void*)s.data(), 0, sizeof(StepState));
    s[0].loss_scale = loss_scale;
    return upload(s);
}

static Hyperparameters test_hyper() {
    Hyperparameters h;
    memset(&h, 0, sizeof h);
    h.beta1 = 0.9;
    h.beta2 = 0.95;
    h.eps = 1e-8;
    h.weight_decay = 0.1;
    h.grad_clip = 1.0;
    h.tokens = h.loss_weight = 1.0;
    return h;
}

static void norm_and_loss_sums_agree() {
    for (size_t n : {(size_t)8, (size_t)1000, (size_t)8192, (size_t)100008, (size_t)(sanitized ? 400000 : 40000000)}) {
        const Floats g = random_values<floatX>(n, 0.01f), apart = random_values<float>(1024, 1);
        std::vector<char> scratch(global_norm_scratch(n));
        const double first = global_norm(g.data(), n, scratch.data()), second = global_norm(apart.data(), 1024, scratch.data());
        const double want = first * first + second * second;
        floatX* d_g = upload_rows<floatX>(g, 1, n, n);
        float* d_apart = upload(apart);
        std::vector<int32_t> targets = random_tokens(1024, 100);
        double trained = 0;
        for (int i = 0; i < 1024; i++) {
            if (i % 7 == 3) { targets[i] = -1; }
            trained += targets[i] >= 0;
        }
        const int32_t* d_targets = upload(targets);
        StepState* state = new_state(1);
        double found[2];
        for (int run = 0; run < 2; run++) {
            void* d_scratch = device_alloc<char>(norm_square_scratch_cuda());
            NormSums sums = norm_sums(d_scratch);
            const Hyperparameters h = test_hyper();
            step_begin_cuda(state, 7, 0.5, 0);
            norm_square_cuda(&sums, d_g, n, 0);
            norm_square_cuda(&sums, d_apart, 1024, 0);
            loss_sum_cuda(state, d_apart, d_targets, NULL, 0, 10, 100, true, 0);
            loss_sum_cuda(state, d_apart, d_targets + 1000, NULL, 0, 1, 24, false, 0);
            step_decide_cuda(state, &sums, &h, 0);
            found[run] = read_state(state).norm_square;
        }
        CHECK(found[0] == found[1], "two runs differ: %.17g %.17g", found[0], found[1]);
        // as with several GPUs: each list on its own, then a decision without a list
        NormSums sums = norm_sums(device_alloc<char>(norm_square_scratch_cuda()));
        const NormSums none = norm_sums(sums.partial[0]);
        const Hyperparameters hyper = test_hyper();
        step_begin_cuda(state, 8, 0.5, 0);
        norm_square_cuda(&sums, d_g, n, 0);
        norm_square_cuda(&sums, d_apart, 1024, 0);
        for (int i = 0; i < sums.lists; i++) { norm_finish_cuda(state, sums.partial[i], sums.count[i], 0); }
        CHECK(read_state(state).norm_square == found[0], "list by list it is %.17g, at once %.17g",
              read_state(state).norm_square, found[0]);
        loss_sum_cuda(state, d_apart, d_targets, NULL, 0, 10, 100, true, 0);
        loss_sum_cuda(state, d_apart, d_targets + 1000, NULL, 0, 1, 24, false, 0);
        step_decide_cuda(state, &none, &hyper, 0);
        CHECK(read_state(state).norm_square == found[0], "a decision without lists changes the sum");
        CHECK(fabs(found[0] - want) <= 1e-6 * want, "sum of squares of %zu is %.9g, wanted %.9g", n, found[0], want);
        double sum = 0;
        for (int i = 0; i < 1000; i++) { sum += (double)apart[i]; }
        for (int i = 0; i < 24; i++) { sum += (double)apart[i]; }
        CHECK(read_state(state).trained == trained, "%g targets, wanted %g", read_state(state).trained, trained);
        CHECK(fabs(read_state(state).loss_sum - sum) < 1e-9 * 1024, "loss sum %.12g, wanted %.12g", read_state(state).loss_sum,
              sum);
        device_free_all();
    }
}

/* ordered_sum() of `parts` (ranks, n), which hold numbers of type Grad. */
template <typename Grad>
static double ordered_sum_oracle(Floats& out, const Floats& parts, int ranks, size_t n, bool add) {
    std::vector<const float*> list(ranks);
    for (int r = 0; r < ranks; r++) { list[r] = parts.data() + (size_t)r * n; }
    return ordered_sum(out.data(), list.data(), ranks, n, add);
}

/* The sum in rank order has the oracle's bits, alone and added to the sum of earlier micro-steps. It also leaves the sum of its
 * squares. */
template <typename Grad>
static void ordered_sums_agree_with(int ranks, size_t n) {
    const bool fp32 = sizeof(Grad) == sizeof(float);
    const Floats parts = random_values<Grad>((size_t)ranks * n, 0.01f), before = random_values<float>(n, 0.01f);
    const Grad* d_parts = upload_rows<Grad>(parts, 1, (size_t)ranks * n, (size_t)ranks * n);
    for (const bool add : {false, true}) {
        Floats want = before, runs[2];
        const double squares = ordered_sum_oracle<Grad>(want, parts, ranks, n, add);
        double sums[2] = {0, 0};
        for (int run = 0; run < 2; run++) {
            float* out = add ? upload(before) : device_alloc<float>(n);
            double* partials = device_alloc<double>(SUM_BLOCKS);
            ordered_sum_cuda(out, partials, d_parts, fp32, ranks, n, add, 0);
            runs[run] = download(out, n);
            for (double partial : download(partials, SUM_BLOCKS)) { sums[run] += partial; }
        }
        CHECK(memcmp(runs[0].data(), want.data(), n * sizeof(float)) == 0, "%d ranks, %zu elements, add %d: other bits", ranks,
              n, add);
        CHECK(memcmp(runs[0].data(), runs[1].data(), n * sizeof(float)) == 0 && sums[0] == sums[1], "%d ranks: two runs differ",
              ranks);
        CHECK(fabs(sums[0] - squares) <= 1e-6 * squares, "%d ranks, %zu elements, add %d: squares %.9g, wanted %.9g", ranks, n,
              add, sums[0], squares);
    }
    device_free_all();
}

static void ordered_sums_agree() {
    // counted in vectors of 8: less than a block, a whole grid and one vector more, several rounds of the grid
    for (size_t n :
         {(size_t)8, (size_t)1024, (size_t)SUM_BLOCKS * SUM_THREADS * 8 + 8, (size_t)(sanitized ? 300000 : 3000000)}) {
        for (int ranks : {1, 2, 3, 8}) {
            ordered_sums_agree_with<floatX>(ranks, n);
            if (sizeof(floatX) != sizeof(float)) { ordered_sums_agree_with<float>(ranks, n); }
        }
    }
}

static void losses_add_up_by_source() {
    const int B = 37, T = 1000, S = 5;
    const Floats losses = random_values<float>((size_t)B * T, 1);
    std::vector<int32_t> sources(B), targets = random_tokens((size_t)B * T, 100);
    SourceLosses want;
    memset(&want, 0, sizeof want);
    for (int b = 0; b < B; b++) {
        const int s = sources[b] = b * b % 7 % (S - 1);  // the last source has no row
        for (int t = 0; t < T; t++) {
            int32_t& target = targets[(size_t)b * T + t];
            if ((b + t) % 3 == 0) { target = -1; }
            want.sum[s] += 2 * (double)losses[(size_t)b * T + t];
            want.tokens[s] += 2 * (target >= 0);
        }
    }
    StepState* state = new_state(1);
    const float* d_losses = upload(losses);
    const int32_t *d_sources = upload(sources), *d_targets = upload(targets);
    for (int step = 0; step < 2; step++) {  // the second one overwrites the first
        step_begin_cuda(state, step, 0.5, 0);
        for (int k = 0; k < 2; k++) { loss_sum_cuda(state, d_losses, d_targets, d_sources, S, B, T, k == 0, 0); }
    }
    const SourceLosses got = read_state(state).sources;
    double sum = 0, tokens = 0;
    for (int s = 0; s < S; s++) {
        sum += want.sum[s];
        tokens += want.tokens[s];
    }
    CHECK(read_state(state).trained == tokens, "%g targets, the sources have %g", read_state(state).trained, tokens);
    for (int s = 0; s < S; s++) {
        CHECK(fabs(got.sum[s] - want.sum[s]) < 1e-9 * B * T && got.tokens[s] == want.tokens[s],
              "source %d: %.12g of %g, wanted %.12g of %g", s, got.sum[s], got.tokens[s], want.sum[s], want.tokens[s]);
    }
    device_free_all();
}

/* Returns one step's decision from the given sums; `targets`: of the step, the first is trained. */
static StepState decide(StepState* state, const Hyperparameters& h, int64_t step, float loss, const floatX* grad, size_t n,
                        const std::vector<int32_t>& targets = {7}) {
    Floats losses(targets.size(), 0.0f);
    losses[0] = loss;
    NormSums sums = norm_sums(device_alloc<char>(norm_square_scratch_cuda()));
    step_begin_cuda(state, step, 0.01, 0);
    loss_sum_cuda(state, upload(losses), upload(targets), NULL, 0, 1, (int)targets.size(), true, 0);
    norm_square_cuda(&sums, grad, n, 0);
    step_decide_cuda(state, &sums, &h, 0);
    return read_state(state);
}

static void decisions_follow_the_host() {
    Hyperparameters h = test_hyper();
    h.skip_loss_z = 4;
    const float scale = 8;
    StepState* state = new_state(scale);
    Outlier host = {};
    floatX* grad = upload_rows<floatX>(Floats(64, 0.5f * scale), 1, 64, 64);  // norm 4
    int64_t updates = 0;
    for (int step = 0; step < 140; step++) {
        const float loss = step == 135 ? 50.0f : 3.0f + 0.01f * (float)(step * 37 % 11);
        const StepState s = decide(state, h, step, loss, grad, 64);
        const double z = outlier_update(&host, (double)loss);
        const bool skip = outlier_skip(z, h.skip_loss_z);
        CHECK(skip == (step == 135), "the host's own detector: step %d", step);
        CHECK(s.verdict == (skip ? UPDATE_OUTLIER_LOSS : UPDATE_APPLIED), "step %d has verdict %d", step, s.verdict);
        CHECK(isnan(z) ? isnan(s.loss_z) : fabs(s.loss_z - z) <= 1e-4 * fabs(z) + 1e-5, "step %d: z %g, wanted %g", step,
              (double)s.loss_z, z);
        updates += !skip;
        CHECK(s.updates == updates && s.step == step, "step %d counts %lld updates", step, (long long)s.updates);
        const double step_size = 0.01 / (1 - pow(0.9, (double)updates)), correction = sqrt(1 - pow(0.95, (double)updates));
        CHECK(fabs(s.step_size - step_size) < 1e-6 * step_size && fabs(s.sqrt_correction2 - correction) < 1e-6,
              "step %d: step size %.9g, wanted %.9g", step, (double)s.step_size, step_size);
        CHECK(fabsf(s.norm - 4) < 1e-5f && fabsf(s.grad_scale - 0.25f / scale) < 1e-6f, "norm %g, scale %g", (double)s.norm,
              (double)s.grad_scale);
    }
    device_free_all();
}

static void a_step_is_divided_by_its_trained_targets() {
    Hyperparameters h = test_hyper();
    h.tokens = 8;
    h.loss_weight = 1.0 / 8;
    StepState* state = new_state(4);
    floatX* grad = upload_rows<floatX>(Floats(64, 0.5f), 1, 64, 64);  // norm 4, with the loss scale 1
    StepState s = decide(state, h, 0, 6.0f, grad, 64, {3, -1, -1, 5, -1, 0, -1, -1});
    CHECK(s.trained == 3 && fabsf(s.loss - 2) < 1e-6f, "loss %g of %g targets", (double)s.loss, s.trained);
    CHECK(fabsf(s.norm - 8.0f / 3) < 1e-5f && fabsf(s.grad_scale * s.norm - 8.0f / 3 / 4) < 1e-5f, "norm %g, scale %g",
          (double)s.norm, (double)s.grad_scale);
    s = decide(state, h, 1, 6.0f, grad, 64, {3, 1, 1, 5, 1, 0, 1, 1});
    CHECK(s.trained == 8 && s.loss == 0.75f && s.norm == 1 && s.grad_scale == 0.25f, "without a mask: loss %g, norm %g",
          (double)s.loss, (double)s.norm);
    device_free_all();
}

static void loss_scale_halves_and_doubles() {
    Hyperparameters h = test_hyper();
    h.scale_interval = 3;
    StepState* state = new_state(1024);
    floatX* good = upload_rows<floatX>(Floats(64, 0.5f), 1, 64, 64);
    floatX* bad = upload_rows<floatX>(Floats(64, INFINITY), 1, 64, 64);
    StepState s = decide(state, h, 0, 1.0f, bad, 64);
    CHECK(s.verdict == UPDATE_NOT_FINITE && s.loss_scale == 512 && s.updates == 0, "verdict %d, scale %g", s.verdict,
          (double)s.loss_scale);
    for (int i = 1; i <= 3; i++) { s = decide(state, h, i, 1.0f, good, 64); }
    CHECK(s.loss_scale == 1024 && s.scale_good == 0 && s.updates == 3, "scale %g after three good steps", (double)s.loss_scale);
    CHECK(fabsf(s.norm - 4.0f / 512) < 1e-6f && fabsf(s.grad_scale - 1.0f / 512) < 1e-8f, "norm %g, scale %g", (double)s.norm,
          (double)s.grad_scale);
    s = decide(state, h, 4, NAN, good, 64);
    CHECK(s.verdict == UPDATE_NOT_FINITE && s.loss_scale == 512, "a NaN loss has verdict %d", s.verdict);
    device_free_all();
}

#endif
