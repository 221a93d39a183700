/* adamw.cuh -- tests of AdamW in all forms of master weights and moments. */
#ifndef TEST_KERNELS_ADAMW_CUH
#define TEST_KERNELS_ADAMW_CUH

#include "llmc/optim/adamw.cuh"
#include "llmc/optim/adamw.h"
#include "step.cuh"

// the forms of master weights that the build has
static const MasterKind adamw_kinds[] = {
#if defined(PRECISION_FP32)
    MASTER_NONE,
#elif defined(PRECISION_FP16)
    MASTER_FP32,
#else
    MASTER_FP32,
    MASTER_SPLIT,
    MASTER_NONE,
#endif
};

/* Whether AdamW rounds the weights stochastically. */
static bool rounds_weights(MasterKind kind) { return IS_BF16 && kind == MASTER_NONE; }

enum { STEPS = 5 };
enum GradWindow { WINDOW_OF_ALL, WINDOW_WITHOUT_FIRST, WINDOW_WITHOUT_LAST, NUM_WINDOWS };

/* A small model's arena, its stretches, and the gradients of STEPS steps. */
struct AdamWCase {
    size_t n;                                 // elements of the arena
    std::vector<bool> gap;                    // (n)
    std::vector<OptimizerStretch> stretches;  // `grad` is set when the device has it
    std::vector<bool> apart;                  // of each stretch: has separate fp32 gradients
    size_t grads_first, grads_end;            // range of the main array of gradients
    Floats start;                             // (n) weights
    std::vector<Floats> grads;                // (STEPS, n)

    size_t end_of(size_t k) const { return k + 1 < stretches.size() ? stretches[k + 1].first : n; }
};

/* Builds one block, C wide. If PARAM_ALIGN does not divide C, gaps follow norms and matrices. The tensor outside the window has
 * separate gradients, as all norms have. */
template <typename Grad>
static AdamWCase adamw_case(int C, GradWindow window) {
    ModelConfig config;
    memset(&config, 0, sizeof config);
    config.vocab_size = 51;
    config.hidden_size = C;
    config.intermediate_size = 40;
    config.num_layers = config.num_heads = config.num_kv_heads = 1;
    config.head_dim = 24;
    ParamTable table = param_table(&config);
    const int left_out = window == WINDOW_WITHOUT_FIRST ? 0 : window == WINDOW_WITHOUT_LAST ? table.count - 1 : -1;
    AdamWCase c;
    c.n = table.elements;
    c.gap.assign(c.n, true);
    for (int i = 0; i < table.count; i++) {
        const Param* p = &table.items[i];
        std::fill_n(c.gap.begin() + (long)p->offset, param_size(p), false);
        if (p->joined) { continue; }
        const bool matrix = param_specs[p->kind].matrix;
        c.stretches.push_back({p->offset, NULL, (uint32_t)i, matrix});
        c.apart.push_back(!matrix || i == left_out);
    }
    c.grads_first = window == WINDOW_WITHOUT_FIRST ? c.stretches[1].first : 0;
    c.grads_end = window == WINDOW_WITHOUT_LAST ? c.stretches.back().first : c.n;
    c.start = random_values<float>(c.n, 0.02f);
    for (int step = 0; step < STEPS; step++) {
        c.grads.push_back(random_values<float>(c.n, 1));
        Floats& g = c.grads.back();
        for (size_t k = 0; k < c.stretches.size(); k++) {
            for (size_t i = c.stretches[k].first; i < c.end_of(k); i++) {
                if (!c.apart[k]) { g[i] = to_float(from_float<Grad>(g[i])); }
                if (c.gap[i]) { c.start[i] = g[i] = 0; }
            }
        }
    }
    param_table_free(&table);
    return c;
}

/* Uploads one step's gradients g and the stretches. The separate rows follow each other without a gap, so a read past the end
 * of one reads another's gradient; the main array has NaN in their places. */
template <typename Grad>
static void upload_grads(OptimizerTensors<Grad>* t, const AdamWCase& c, const Floats& g) {
    Floats window = g, rows;
    std::vector<size_t> row;
    for (size_t k = 0; k < c.stretches.size(); k++) {
        const long first = (long)c.stretches[k].first, end = (long)c.end_of(k);
        row.push_back(rows.size());
        if (!c.apart[k]) { continue; }
        rows.insert(rows.end(), g.begin() + first, g.begin() + end);
        std::fill(window.begin() + first, window.begin() + end, NAN);
    }
    const float* d_rows = upload(rows);
    std::vector<OptimizerStretch> stretches = c.stretches;
    for (size_t k = 0; k < stretches.size(); k++) { stretches[k].grad = c.apart[k] ? d_rows + row[k] : NULL; }
    t->stretches = upload(stretches);
    t->num_stretches = (int)stretches.size();
    t->grads_first = c.grads_first;
    t->grads_end = c.grads_end;
    const Floats held(window.begin() + (long)c.grads_first, window.begin() + (long)c.grads_end);
    t->grads = upload_rows<Grad>(held, 1, held.size(), held.size());
}

struct AdamWRun {
    Floats params, master, m, v;
};

/* Runs STEPS steps, each in `parts` ranges. */
template <typename Grad>
static AdamWRun run_adamw(const AdamWCase& c, MasterKind kind, bool bf16_moments, int parts) {
    const size_t master_bytes = kind == MASTER_SPLIT ? 2 : 4, moment_bytes = bf16_moments ? 2 : 4;
    OptimizerTensors<Grad> t;
    t.params = device_alloc<floatX>(c.n);
    t.master = kind == MASTER_NONE ? NULL : device_alloc<char>(c.n * master_bytes);
    t.m = device_alloc<char>(c.n * moment_bytes);
    t.v = device_alloc<char>(c.n * moment_bytes);
    CUDA_CHECK(cudaMemset(t.m, 0, c.n * moment_bytes));
    CUDA_CHECK(cudaMemset(t.v, 0, c.n * moment_bytes));
    t.state_first = 0;
    master_set_cuda(t.params, t.master, kind, upload(c.start), c.n, 0);
    Hyperparameters h = test_hyper();
    h.grad_clip = 0;
    StepState* state = new_state(1);
    for (int step = 0; step < STEPS; step++) {
        upload_grads(&t, c, c.grads[step]);
        decide(state, h, step, 1.0f, upload_rows<floatX>(Floats(64, 0.5f), 1, 64, 64), 64);
        for (int part = 0; part < parts; part++) {
            const size_t lo = c.n / 8 * part / parts * 8, hi = c.n / 8 * (part + 1) / parts * 8;
            adamw_update_cuda(&t, lo, hi, state, adamw_factors(&h, 42), kind, bf16_moments, 0);
        }
    }
    AdamWRun r;
    r.params = download_rows(t.params, 1, c.n, c.n);
    float* exact = device_alloc<float>(c.n);
    master_get_cuda(exact, t.params, t.master, kind, c.n, 0);
    r.master = download(exact, c.n);
    if (bf16_moments) {
        r.m = download_rows((__nv_bfloat16*)t.m, 1, c.n, c.n);
        r.v = download_rows((__nv_bfloat16*)t.v, 1, c.n, c.n);
    } else {
        r.m = download((float*)t.m, c.n);
        r.v = download((float*)t.v, c.n);
    }
    return r;
}

/* Runs the same steps with the oracle. */
static AdamWRun adamw_oracle(const AdamWCase& c) {
    AdamWRun r;
    r.master = c.start;
    r.m = r.v = Floats(c.n, 0.0f);
    for (int step = 0; step < STEPS; step++) {
        for (size_t k = 0; k < c.stretches.size(); k++) {
            const size_t at = c.stretches[k].first;
            const AdamW hyper = {0.01, 0.9, 0.95, 1e-8, c.stretches[k].decays ? 0.1 : 0.0, 1, step + 1};
            adamw_update(&r.master[at], &c.grads[step][at], &r.m[at], &r.v[at], c.end_of(k) - at, &hyper);
        }
    }
    return r;
}

static void check_gaps(const char* what, const AdamWCase& c, const AdamWRun& r) {
    size_t gaps = 0, wrong = 0;
    for (size_t i = 0; i < c.n; i++) {
        gaps += c.gap[i];
        wrong += c.gap[i] && (r.params[i] != 0 || r.master[i] != 0 || r.m[i] != 0 || r.v[i] != 0);
    }
    CHECK(gaps > 0 && wrong == 0, "%s: %zu of %zu elements between tensors did not stay zero", what, wrong, gaps);
}

template <typename Grad>
static void check_adamw(int C, GradWindow window) {
    static const char* names[NUM_WINDOWS] = {"", ", first tensor apart", ", last tensor apart"};
    char what[96];
    snprintf(what, sizeof what, "adamw C=%d, %zu-bit gradients%s", C, 8 * sizeof(Grad), names[window]);
    const AdamWCase c = adamw_case<Grad>(C, window);
    const AdamWRun want = adamw_oracle(c);
    AdamWRun first;
    for (MasterKind kind : adamw_kinds) {
        const AdamWRun r = run_adamw<Grad>(c, kind, false, 1);
        if (rounds_weights(kind)) {  // within a unit of the larger weights in each step
            compare(what, r.master, want.master, STEPS * 0x1p-7f, STEPS * 0x1p-8f);
        } else {
            compare(what, r.master, want.master, 1e-5f, 1e-6f);
        }
        compare(what, r.m, want.m, 1e-5f, 1e-6f);
        compare(what, r.v, want.v, 1e-5f, 1e-6f);
        check_gaps(what, c, r);
        const AdamWRun parts = run_adamw<Grad>(c, kind, false, 3);
        CHECK(parts.master == r.master && parts.params == r.params && parts.m == r.m && parts.v == r.v,
              "%s: three ranges differ from one", what);
        if (kind == adamw_kinds[0]) { first = r; }
        CHECK(rounds_weights(kind) || (first.master == r.master && first.params == r.params),
              "%s: the forms of master weights differ", what);
        CHECK(first.m == r.m && first.v == r.v, "%s: moments depend on the form of master weights", what);

        // bfloat16 moments: reproducible, close to fp32, and unbiased
        const AdamWRun low = run_adamw<Grad>(c, kind, true, 1);
        const AdamWRun again = run_adamw<Grad>(c, kind, true, 2);
        CHECK(low.master == again.master && low.m == again.m && low.v == again.v, "%s: bf16 moments are not reproducible",
              what);
        check_gaps(what, c, low);
        compare(what, low.m, want.m, 0.04f, 0.04f);
        double bias = 0;
        size_t weights = 0;
        for (size_t i = 0; i < c.n; i++) {
            bias += want.v[i] > 0 ? ((double)low.v[i] - want.v[i]) / want.v[i] : 0.0;
            weights += !c.gap[i];
        }
        CHECK(fabs(bias / weights) < 3e-4, "%s: stochastic rounding of v is off by %g on average", what, bias / weights);
        compare(what, low.v, want.v, 0.04f, 1e-6f);
    }
    bool moved = true;
    for (size_t i = 0; i < c.n; i++) { moved = moved && (c.gap[i] || first.master[i] != c.start[i]); }
    CHECK(moved, "%s: some weights did not move", what);
    device_free_all();
}

static void adamw_agrees_in_all_forms() {
    for (int C : {192, 576}) {
        check_adamw<floatX>(C, WINDOW_OF_ALL);
        check_adamw<float>(C, WINDOW_OF_ALL);
    }
}

/* The main array of gradients may begin or end within the arena; the gradients outside it are read from their separate rows. */
static void adamw_takes_gradients_from_a_window() {
    for (GradWindow window : {WINDOW_WITHOUT_FIRST, WINDOW_WITHOUT_LAST}) {
        check_adamw<floatX>(192, window);
        check_adamw<float>(192, window);
    }
}

static void a_skipped_step_changes_nothing() {
    enum { N = 4096 };
    const Floats start = random_values<float>(N, 1);
    const MasterKind kind = sizeof(floatX) == 4 ? MASTER_NONE : MASTER_FP32;
    OptimizerTensors<floatX> t;
    t.params = device_alloc<floatX>(N);
    t.master = kind == MASTER_NONE ? NULL : device_alloc<float>(N);
    t.m = upload(start);
    t.v = upload(start);
    t.state_first = 0;
    master_set_cuda(t.params, t.master, kind, upload(start), N, 0);
    const std::vector<OptimizerStretch> stretches = {{0, NULL, 0, 1}};
    t.stretches = upload(stretches);
    t.num_stretches = 1;
    floatX* bad = upload_rows<floatX>(Floats(N, NAN), 1, N, N);
    t.grads = bad;
    t.grads_first = 0;
    t.grads_end = N;
    StepState* state = new_state(1);
    const Hyperparameters h = test_hyper();
    CHECK(decide(state, h, 0, 1.0f, bad, N).verdict == UPDATE_NOT_FINITE, "NaN gradients pass");
    adamw_update_cuda(&t, 0, N, state, adamw_factors(&h, 42), kind, false, 0);
    float* exact = device_alloc<float>(N);
    master_get_cuda(exact, t.params, t.master, kind, N, 0);
    CHECK(download(exact, N) == start && download((float*)t.m, N) == start, "weights or moments changed");
    device_free_all();
}

/* Counts wrong inverses, quotients and roots of all numbers with an exponent. */
__global__ void quotients_kernel(unsigned* wrong, int exponent) {
    const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
    for (uint32_t i = thread; i < 1u << 23; i += gridDim.x * blockDim.x) {
        const float d = float_from_bits((uint32_t)(exponent + 127) << 23 | i), inverse = inverse_of(d);
        if (inverse != __fdiv_rn(1, d)) { atomicAdd(&wrong[0], 1u); }
        const Philox random = philox(11, RAND_INIT, (uint32_t)(exponent + 127), i);
        // |x| from 2^-100 on, and x / d from 2^-124 to 2^124; and special values
        const int low = max(-100, exponent - 123), high = min(126, exponent + 123);
        const uint32_t sign = random.v[1] << 31, mantissa = random.v[0] & 0x7fffffu;
        const uint32_t x_exponent = (uint32_t)(127 + low) + random.v[2] % (uint32_t)(high - low + 1);
        for (uint32_t bits : {sign | x_exponent << 23 | mantissa, sign | x_exponent << 23, sign | x_exponent << 23 | i,
                              sign | x_exponent << 23 | (i + random.v[3] % 5 - 2 & 0x7fffffu), sign}) {
            const float x = float_from_bits(bits);
            if (float_bits(quotient_of(x, d, inverse)) != float_bits(__fdiv_rn(x, d))) { atomicAdd(&wrong[1], 1u); }
        }
        if (exponent >= -101 && root_of(d) != __fsqrt_rn(d)) { atomicAdd(&wrong[2], 1u); }
    }
}

/* The functions without branches give the bits of the general ones: for every mantissa, at the ends and in the middle of the
 * range. They also agree just above and below 1, where the root of an odd exponent takes another branch. */
static void quotients_and_roots_are_rounded() {
    unsigned* wrong = upload(std::vector<unsigned>(3, 0));
    for (int exponent : {-125, -124, -101, -100, -51, -50, -1, 0, 1, 40, 63, 64, 123, 124}) {
        quotients_kernel<<<256, 256>>>(wrong, exponent);
        CUDA_CHECK_LAUNCH("quotients_kernel");
        const std::vector<unsigned> w = download(wrong, 3);
        CHECK(w[0] + w[1] + w[2] == 0, "2^%d: %u inverses, %u quotients, %u roots are not rounded", exponent, w[0], w[1], w[2]);
    }
    device_free_all();
}

/* Returns the bits of a float: of any float, of the end of a range, of zero, or of a value as training has them. */
static uint32_t adamw_pattern(uint64_t i, int exponent) {
    static const uint32_t ends[] = {0,          1,          0x00800000, 0x007fffff, 0x17800000, 0x177fffff, 0x1f800000,
                                    0x5f800000, 0x5f7fffff, 0x3fffffff, 0x7f7fffff, 0x7f800000, 0x7f800001, 0x7fc00000};
    const Philox r = philox(12, RAND_INIT, 0, i);
    switch (i / 4096 % 4) {
        case 0: return r.v[0];
        case 1: return ends[r.v[1] % (sizeof ends / sizeof ends[0])] | r.v[2] << 31;
        case 2: return r.v[1] % 64 ? 0 : r.v[0];
        default: return r.v[2] << 31 | (uint32_t)(127 + exponent - (int)(r.v[1] % 16)) << 23 | (r.v[0] & 0x7fffffu);
    }
}

/* Returns x rounded stochastically to bfloat16. */
static float rounded_up_or_down(float x, uint32_t random) {
    return float_from_bits(stochastic_upper(x, random & 0xffffu) & 0xffff0000u);
}

/* Returns a copy of x on the device, as fp32, or as bfloat16 from the upper halves. */
static void* upload_moments(const Floats& x, bool bf16) {
    std::vector<uint16_t> upper(x.size());
    for (size_t i = 0; i < x.size(); i++) { upper[i] = (uint16_t)(float_bits(x[i]) >> 16); }
    return bf16 ? (void*)upload(upper) : (void*)upload(x);
}

static Floats download_moments(const void* x, size_t n, bool bf16) {
    if (!bf16) { return download((const float*)x, n); }
    const std::vector<uint16_t> upper = download((const uint16_t*)x, n);
    Floats floats(n);
    for (size_t i = 0; i < n; i++) { floats[i] = float_from_bits((uint32_t)upper[i] << 16); }
    return floats;
}

/* Takes one step with the state's numbers over two tensors of half the size, with the ordinals 5 and 9. */
static AdamWRun run_adamw_step(const StepState& state, const Hyperparameters& h, MasterKind kind, bool bf16_moments,
                               const AdamWRun& old, const Floats& grads) {
    const size_t n = old.master.size();
    const std::vector<OptimizerStretch> stretches = {{0, NULL, 5, 1}, {n / 2, NULL, 9, 1}};
    OptimizerTensors<float> t;
    t.params = device_alloc<floatX>(n);
    t.master = device_alloc<float>(n);
    t.grads = upload(grads);
    t.grads_first = t.state_first = 0;
    t.grads_end = n;
    t.m = upload_moments(old.m, bf16_moments);
    t.v = upload_moments(old.v, bf16_moments);
    t.stretches = upload(stretches);
    t.num_stretches = (int)stretches.size();
    master_set_cuda(t.params, t.master, kind, upload(old.master), n, 0);
    adamw_update_cuda(&t, 0, n, upload(std::vector<StepState>(1, state)), adamw_factors(&h, 42), kind, bf16_moments, 0);
    AdamWRun r;
    float* exact = device_alloc<float>(n);
    master_get_cuda(exact, t.params, t.master, kind, n, 0);
    r.params = download_rows(t.params, 1, n, n);
    r.master = download(exact, n);
    r.m = download_moments(t.m, n, bf16_moments);
    r.v = download_moments(t.v, n, bf16_moments);
    return r;
}

/* The oracle of that step. It rounds every operation, then weights and moments by the random bits of their step, tensor and
 * element. */
static AdamWRun adamw_step_oracle(const StepState& state, const Hyperparameters& h, MasterKind kind, bool bf16_moments,
                                  const AdamWRun& old, const Floats& grads) {
    const AdamWFactors f = adamw_factors(&h, 42);
    const size_t n = old.master.size();
    AdamWRun r = old;
    r.params.resize(n);
    for (size_t i = 0; i < n; i++) {
        const uint32_t tensor = i < n / 2 ? 5 : 9;
        const uint64_t element = i % (n / 2), step = (uint64_t)state.step << 40;
        const volatile float g = grads[i] * state.grad_scale;  // a rounding that the compiler must keep
        const float mk = fmaf(f.one_minus_beta1, g - old.m[i], old.m[i]);
        const float vk = fmaf(f.beta2, old.v[i], f.one_minus_beta2 * g * g);
        const float quotient = mk / (sqrtf(vk) / state.sqrt_correction2 + f.eps);
        const float w = fmaf(old.master[i], state.decay, -(state.step_size * quotient));
        const uint32_t of_moments = philox(42, RAND_ROUND, tensor, step | element / 4).v[element % 4];
        const uint32_t of_weights = philox(42, RAND_ROUND_WEIGHTS, tensor, step | element / 8).v[element % 8 / 2];
        r.m[i] = bf16_moments ? rounded_up_or_down(mk, of_moments) : mk;
        r.v[i] = bf16_moments ? rounded_up_or_down(vk, of_moments >> 16) : vk;
        r.master[i] = rounds_weights(kind) ? rounded_up_or_down(w, of_weights >> element % 2 * 16) : w;
        r.params[i] = to_float(round_master<floatX>(r.master[i]));
    }
    return r;
}

static size_t different_bits(const Floats& a, const Floats& b) {
    size_t count = 0;
    for (size_t i = 0; i < a.size(); i++) { count += float_bits(a[i]) != float_bits(b[i]) && !(isnan(a[i]) && isnan(b[i])); }
    return count;
}

/* Weights and moments have the bits of IEEE 754 for all inputs, also where divisions need the slower path. */
static void adamw_rounds_each_operation() {
    enum { N = 1 << 16 };
    AdamWRun old;
    Floats grads(N);
    for (size_t i = 0; i < N; i++) {
        old.master.push_back(float_from_bits(adamw_pattern(i, -4)));
        grads[i] = float_from_bits(adamw_pattern(i + N, -12));
        old.m.push_back(float_from_bits(adamw_pattern(i + 2 * N, -14)));
        old.v.push_back(float_from_bits(adamw_pattern(i / 2 + 3 * N, -28) & (i % 16 ? 0x7fffffffu : 0xffffffffu)));
    }
    AdamWRun low = old;  // as bfloat16 holds it
    for (size_t i = 0; i < N; i++) {
        low.master[i] = to_float(round_master<__nv_bfloat16>(old.master[i]));
        low.m[i] = float_from_bits(float_bits(old.m[i]) & 0xffff0000u);
        low.v[i] = float_from_bits(float_bits(old.v[i]) & 0xffff0000u);
    }
    Hyperparameters h = test_hyper();
    for (double eps : {1e-8, 1e-30}) {
        for (float sqrt_correction2 : {0.2f, 1.0f, 1e-4f}) {
            h.eps = eps;
            StepState state;
            memset(&state, 0, sizeof state);
            state.step = 3;
            state.verdict = UPDATE_APPLIED;
            state.grad_scale = 0.3f;
            state.step_size = 1e-3f;
            state.sqrt_correction2 = sqrt_correction2;
            state.decay = 0.999f;
            for (int form = 0; form < 2 * (int)(sizeof adamw_kinds / sizeof *adamw_kinds); form++) {
                const MasterKind kind = adamw_kinds[form / 2];
                const bool bf16 = form % 2;
                AdamWRun start = bf16 ? low : old;
                start.master = rounds_weights(kind) ? low.master : old.master;
                const AdamWRun got = run_adamw_step(state, h, kind, bf16, start, grads);
                const AdamWRun want = adamw_step_oracle(state, h, kind, bf16, start, grads);
                const size_t wrong[] = {different_bits(got.master, want.master), different_bits(got.params, want.params),
                                        different_bits(got.m, want.m), different_bits(got.v, want.v)};
                CHECK(
                    wrong[0] + wrong[1] + wrong[2] + wrong[3] == 0,
                    "eps %g, correction %g, master %d, bf16 moments %d: of %d, %zu masters, %zu weights, %zu m, %zu v are not "
                    "rounded",
                    eps, (double)sqrt_correction2, kind, bf16, (int)N, wrong[0], wrong[1], wrong[2], wrong[3]);
                device_free_all();
            }
        }
    }
}

#ifdef PRECISION_BF16
/* Without master weights, a step of a fraction of a unit moves a weight by that fraction on average. A weight moves by whole
 * units or stays, independently of other weights and of its own earlier steps. The limits are five deviations of the mean and
 * of the variance of a binomial distribution. Weights rounded to nearest would stay, or move by a unit each time. `weights`
 * have taken so many steps from 1.75 down. */
enum { SMALL_N = 1 << 16, SMALL_STEPS = 16 };
static const float small_unit = 0x1p-7f;  // between 1 and 2
static const float small_fractions[] = {0.0f, 0.03125f, 0.3125f, 0.5f, 0.96875f};
static void check_small_steps(const char* what, float fraction, int steps, const Floats& weights) {
    double sum = 0, squares = 0;
    const double mean = steps * (double)fraction, variance = mean * (1 - (double)fraction);
    for (float w : weights) {
        const double units = (1.75 - (double)w) / (double)small_unit;
        CHECK(units >= 0 && units <= steps && units == floor(units), "fraction %g: %s moved by %g units", (double)fraction,
              what, units);
        sum += units;
        squares += (units - mean) * (units - mean);
    }
    // the fourth central moment is variance (1 + (3 steps - 6) / steps variance)
    const double fourth = variance * (1 + (3.0 * steps - 6) / steps * variance), n = (double)weights.size();
    const double most = 5 * sqrt(variance / n), most_squares = 5 * sqrt((fourth - variance * variance) / n);
    CHECK(fabs(sum / n - mean) <= most, "fraction %g: %d steps moved %s by %g units, not by %g", (double)fraction, steps, what,
          sum / n, mean);
    CHECK(fabs(squares / n - variance) <= most_squares, "fraction %g: %s have variance %g, not %g", (double)fraction, what,
          squares / n, variance);
}

static void small_steps_survive_on_average() {
    const Hyperparameters h = test_hyper();
    const Floats ones(SMALL_N, 1.0f);
    for (float fraction : small_fractions) {
        for (bool bf16_moments : {false, true}) {
            AdamWRun r = {{}, Floats(SMALL_N, 1.75f), ones, ones};
            StepState state;
            memset(&state, 0, sizeof state);
            state.verdict = UPDATE_APPLIED;
            state.grad_scale = state.sqrt_correction2 = state.decay = 1;
            state.step_size = fraction * small_unit;  // the gradient is 1, and so are m and v
            for (int step = 0; step < SMALL_STEPS; step++) {
                state.step = step;
                r = run_adamw_step(state, h, MASTER_NONE, bf16_moments, r, ones);
                r.m = r.v = ones;
                device_free_all();
            }
            check_small_steps(bf16_moments ? "weights beside bf16 moments" : "weights", fraction, SMALL_STEPS, r.master);
        }
    }
}
#endif

// random bit patterns; all lower halves of the numbers from 1 on, the tie among them; and values that rounding could carry too
// far: many NaNs, the infinities, the largest finite numbers, denormals
static std::vector<uint32_t> patterns_to_round() {
    std::vector<uint32_t> bits = {0x7fffffff, 0x7fff8000, 0x7fff7fff, 0x7fc00000, 0x7f80ffff, 0x7f800001, 0x7f800000,
                                  0x7f7fffff, 0x7f7f8000, 0x7f7f7fff, 0x00000001, 0x00007fff, 0x00008000, 0x00000000};
    for (size_t i = 0, n = bits.size(); i < n; i++) { bits.push_back(bits[i] | 0x80000000u); }
    for (uint32_t i = 0; i < 65536; i++) { bits.push_back(0x3f800000u + i); }
    for (uint64_t i = 0; i < 300000; i++) { bits.push_back(philox(7, RAND_INIT, 0, i).v[0]); }
    return bits;
}

/* Weights are rounded to nearest, and exact again with the lower half; a NaN returns as some NaN. Runs on the host. */
static void split_weights_are_exact() {
    for (uint32_t u : patterns_to_round()) {
        const float x = float_from_bits(u);
        const __nv_bfloat16 p = round_master<__nv_bfloat16>(x);
        const float rounded = to_float(p), joined = split_join(rounded, (int16_t)split_low(x));
        if (isnan(x)) {
            CHECK(isnan(rounded) && isnan(joined), "the NaN %08x becomes %g, then %g", u, (double)rounded, (double)joined);
            continue;
        }
        CHECK(float_bits(joined) == u, "%08x becomes %08x", u, float_bits(joined));
        const uint32_t upper = (u + 0x8000u) >> 16 << 16;  // to nearest, ties away from zero; past the largest number infinity
        CHECK(float_bits(rounded) == upper, "%08x rounds to %08x", u, float_bits(rounded));
    }
}

/* The result is the upper half or the next number away from zero, as often as the lower half says. Inf and NaN stay unchanged.
 * Runs on the host. */
static void stochastic_rounding_is_to_a_neighbour() {
    for (uint32_t u : patterns_to_round()) {
        const float x = float_from_bits(u);
        const uint32_t low = u & 0xffffu;
        for (uint32_t random : {0u, 0xffffu - low, 0x10000u - low, 0xffffu}) {  // the first two round down, the last two up
            if (random > 0xffffu) { continue; }                                 // nothing to cut off: never up
            const float rounded = float_from_bits(stochastic_upper(x, random) & 0xffff0000u);
            if (isnan(x)) {
                CHECK(isnan(rounded), "the NaN %08x with %04x becomes %g", u, random, (double)rounded);
                continue;
            }
            const uint32_t want = (u & 0xffff0000u) + (random > 0xffffu - low ? 0x10000u : 0u);
            CHECK(float_bits(rounded) == want, "%08x with %04x becomes %08x", u, random, float_bits(rounded));
        }
    }
}

#endif
