/* muon.cuh -- tests of Muon: its stages by element against muon.h, and Newton-Schulz against double. */
#ifndef TEST_KERNELS_MUON_CUH
#define TEST_KERNELS_MUON_CUH

#include "llmc/optim/muon.cuh"
#include "llmc/optim/muon.h"
#include "adamw.cuh"
#include "matmul.cuh"

typedef std::vector<double> Doubles;

/* Returns a (M, K) b (K, N) in double; b_t: b is (N, K). */
static Doubles product(const Doubles& a, const Doubles& b, size_t M, size_t N, size_t K, bool b_t) {
    Doubles c(M * N);
    for (size_t i = 0; i < M; i++) {
        for (size_t k = 0; k < K; k++) {
            for (size_t j = 0; j < N; j++) { c[i * N + j] += a[i * K + k] * (b_t ? b[j * K + k] : b[k * N + j]); }
        }
    }
    return c;
}

static Doubles transpose(const Doubles& x, size_t rows, size_t cols) {
    Doubles t(x.size());
    for (size_t i = 0; i < x.size(); i++) { t[i % cols * rows + i / cols] = x[i]; }
    return t;
}

/* Returns X of u (rows, cols) in double. */
static Doubles exact_orthogonal(const Floats& u, size_t rows, size_t cols) {
    const size_t m = std::min(rows, cols), k = std::max(rows, cols);
    Doubles x(u.begin(), u.end());
    double square = 0;
    for (double e : x) { square += e * e; }
    for (double& e : x) { e /= std::max(sqrt(square), 1e-7); }
    if (rows > cols) { x = transpose(x, rows, cols); }
    for (int step = 0; step < MUON_STEPS; step++) {
        const Doubles a = product(x, x, m, m, k, true);
        Doubles c = product(a, a, m, m, m, false);
        for (size_t i = 0; i < c.size(); i++) { c[i] = MUON_B * a[i] + MUON_C * c[i]; }
        const Doubles moved = product(c, x, m, k, m, false);
        for (size_t i = 0; i < x.size(); i++) { x[i] = MUON_A * x[i] + moved[i]; }
    }
    return rows > cols ? transpose(x, m, k) : x;
}

/* Returns X of u (rows, cols) by this card's products, rounded wherever PyTorch rounds. */
static Floats pytorch_s_orthogonal(MatmulContext* ctx, const Floats& u, size_t rows, size_t cols) {
    const size_t m = std::min(rows, cols), k = std::max(rows, cols);
    Floats first = u;
    double square = 0;
    for (float& e : first) { e = to_float(from_float<floatX>(e)), square += (double)e * e; }
    const float norm = to_float(from_float<floatX>(std::max((float)sqrt(square), MUON_EPS)));
    for (float& e : first) { e /= norm; }
    if (rows > cols) {
        const Doubles t = transpose(Doubles(first.begin(), first.end()), rows, cols);
        first.assign(t.begin(), t.end());
    }
    floatX *from = upload_rows<floatX>(first, 1, m * k, m * k), *to = device_alloc<floatX>(m * k);
    floatX *a = device_alloc<floatX>(m * m), *c = device_alloc<floatX>(m * m);
    for (int step = 0; step < MUON_STEPS; step++) {
        const Operand X = operand(from, k), A = operand(a, m);
        matmul_product(ctx, output(a, m), {X, AS_IS}, {X, TRANSPOSED}, NULL, {m, m, k}, 0);
        matmul_product(ctx, output(c, m), {A, AS_IS}, {A, AS_IS}, a, {m, m, m}, 0, {(float)MUON_C, (float)MUON_B});
        matmul_product(ctx, output(to, k), {operand(c, m), AS_IS}, {X, AS_IS}, from, {m, k, m}, 0, {1.0f, (float)MUON_A});
        std::swap(from, to);
    }
    const Floats got = download_rows(from, 1, m * k, m * k);
    const Doubles t = transpose(Doubles(got.begin(), got.end()), m, k);
    return rows > cols ? Floats(t.begin(), t.end()) : got;
}

/* Returns X of `count` matrices u (rows, cols) on the card, one after the other. whole: no product is computed by half */
static Floats orthogonal(const Floats& u, size_t rows, size_t cols, int count, bool whole = false) {
    const size_t n = rows * cols, stride = matrix_stride(n);
    MatmulContext* ctx = matmul_context();
    float* x = upload_rows<float>(u, (size_t)count, n, stride);
    char* scratch = device_alloc<char>(muon_scratch(rows, cols, sizeof(floatX), (size_t)count).end);
    if (whole) { muon_orthogonalize_by(ctx, x, rows, cols, count, scratch, false, 0); }
    if (!whole) { muon_orthogonalize_cuda(ctx, x, rows, cols, count, scratch, 0); }
    const std::vector<floatX> all = download((floatX*)x, (size_t)count * stride);
    Floats got;
    for (size_t i = 0; i < all.size(); i++) {
        if (i % stride < n) { got.push_back(to_float(all[i])); }
    }
    matmul_destroy(ctx);
    return got;
}

static double distance(const Floats& a, const Doubles& b) {
    double off = 0, size = 0;
    for (size_t i = 0; i < b.size(); i++) { off += (a[i] - b[i]) * (a[i] - b[i]), size += b[i] * b[i]; }
    return sqrt(off / size);
}

/* Returns a matrix with singular values from 1 to 1e-3: sums of products of columns and rows that are nearly orthogonal. */
static Floats spread_matrix(size_t rows, size_t cols) {
    const size_t k = 24;
    const Floats a = random_values<float>(rows * k, 1), b = random_values<float>(k * cols, 1);
    Floats x(rows * cols);
    for (size_t i = 0; i < x.size(); i++) {
        for (size_t j = 0; j < k; j++) {
            x[i] += (float)pow(1e-3, (double)j / k) * a[i / cols * k + j] * b[j * cols + i % cols];
        }
    }
    return x;
}

/* In 16 bits an error is chance, so the mean of some draws, which go through the products together, must be at most PyTorch's,
 * on this card. */
static void newton_schulz_is_no_worse_than_pytorch_s() {
    enum { DRAWS = sanitized ? 8 : 40 };
    MatmulContext* ctx = matmul_context();  // its workspace is large
    static const struct {
        const char* name;
        size_t rows, cols;
        int rank;  // 0: all
    } shapes[] = {{"wide", 48, 136, 0}, {"tall", 120, 40, 0},  {"square", 72, 72, 0},
                  {"odd", 45, 77, 0},   {"rank 1", 40, 56, 1}, {"spread", 64, 96, 24}};
    for (const auto& s : shapes) {
        const size_t n = s.rows * s.cols;
        double ours = 0, theirs = 0;
        Floats all;
        for (int draw = 0; draw < DRAWS; draw++) {
            Floats u = s.rank == 24 ? spread_matrix(s.rows, s.cols) : random_values<float>(n, 3);
            for (size_t i = 0; i < n && s.rank == 1; i++) { u[i] = u[i % s.cols] * (float)(1 + i / s.cols); }
            all.insert(all.end(), u.begin(), u.end());
        }
        const Floats got = orthogonal(all, s.rows, s.cols, DRAWS);
        for (size_t draw = 0; draw < DRAWS; draw++) {
            const Floats u(all.begin() + draw * n, all.begin() + (draw + 1) * n);
            const Doubles exact = exact_orthogonal(u, s.rows, s.cols);
            ours += distance(Floats(got.begin() + draw * n, got.begin() + (draw + 1) * n), exact) / DRAWS;
            theirs += distance(pytorch_s_orthogonal(ctx, u, s.rows, s.cols), exact) / DRAWS;
        }
        printf("  %-8s off by %.3g, PyTorch's order of roundings by %.3g\n", s.name, ours, theirs);
        // PyTorch has no FP16, whose errors are a sixth of bf16's: the two orders differ by chance there
        const double limit = sizeof(floatX) == 4 ? 2e-4 : IS_FP16 ? 1.05 * theirs : theirs;
        CHECK(ours <= limit, "%s: Newton-Schulz is off by %.3g, wanted at most %.3g", s.name, ours, limit);
    }
    matmul_destroy(ctx);
    for (float x : orthogonal(Floats(40 * 24), 40, 24, 1)) { CHECK(x == 0, "a matrix of zeros became %g", (double)x); }
}

/* X by half products and X by whole products differ by rounding alone. */
static void newton_schulz_by_half_is_near_the_whole() {
    const size_t m = 256 * CLUSTER_BLOCKS, k = m + 64;
    if (!muon_halves(m, k)) { return; }  // not on this card
    for (const bool tall : {false, true}) {
        const size_t rows = tall ? k : m, cols = tall ? m : k;
        const Floats u = random_values<float>(rows * cols, 3), whole = orthogonal(u, rows, cols, 1, true);
        const double off = distance(orthogonal(u, rows, cols, 1), Doubles(whole.begin(), whole.end()));
        CHECK(off <= 0.02, "%s: products by half move X by %.3g", tall ? "tall" : "wide", off);
    }
}

/* The stages by element, in parts that begin anywhere, against muon.h. */
static void muon_agrees_in_all_forms() {
    const size_t n = 4000, cuts[] = {0, 8, 301, 304, 309, 2400, n};
    Hyperparameters h = test_hyper();
    h.muon_momentum = 0.9;
    h.muon_lr_scale = 0.2;
    StepState state;
    memset(&state, 0, sizeof state);
    state.grad_scale = 0.5f;
    state.lr = 0.02;
    state.decay = (float)(1 - 0.02 * 0.1);
    const Floats start = random_values<float>(n, 1), m0 = random_values<float>(n, 1), grad = random_values<floatX>(n, 1),
                 x = random_values<floatX>(n, 1);
    const floatX* moves = upload_rows<floatX>(x, 1, n, n);
    for (MasterKind kind : adamw_kinds) {
        for (int bf16 = 0; bf16 <= (IS_BF16 ? 1 : 0); bf16++) {
            for (int verdict = UPDATE_APPLIED; verdict <= UPDATE_NOT_FINITE; verdict++) {
                state.verdict = (UpdateVerdict)verdict;
                const StepState* on_card = upload(std::vector<StepState>{state});
                MatrixPart whole;
                memset(&whole, 0, sizeof whole);
                whole.root = sqrt(40);
                whole.params = upload_rows<floatX>(start, 1, n, n);
                whole.master = kind == MASTER_NONE ? NULL : device_alloc<char>(n * (kind == MASTER_SPLIT ? 2 : 4));
                master_set_cuda(whole.params, whole.master, kind, upload(start), n, 0);
                const Floats old = [&] {
                    float* x = device_alloc<float>(n);
                    master_get_cuda(x, whole.params, whole.master, kind, n, 0);
                    return download(x, n);
                }();
                whole.m = bf16 ? (void*)upload_rows<__nv_bfloat16>(m0, 1, n, n) : (void*)upload(m0);
                whole.grads = upload_rows<floatX>(grad, 1, n, n);
                whole.u = device_alloc<float>(n);
                std::vector<MatrixPart> list;
                for (size_t k = 0; k + 1 < sizeof cuts / sizeof *cuts; k++) {
                    const size_t at = cuts[k];
                    MatrixPart part = whole;
                    part.first = at;
                    part.count = cuts[k + 1] - at;
                    part.params += at, part.u += at;
                    part.x = moves + at;
                    part.grads = (const floatX*)whole.grads + at;
                    part.m = (char*)whole.m + at * (bf16 ? 2 : 4);
                    part.master = (char*)whole.master + at * (kind == MASTER_SPLIT ? 2 : 4);
                    list.push_back(part);
                }
                const MatrixParts parts = {upload(list), (int)list.size(), n, kind, bf16 != 0, false, 1};
                muon_prepare_cuda(&parts, on_card, &h, 0);
                muon_update_cuda(&parts, on_card, &h, 0);
                float* moved = device_alloc<float>(n);
                master_get_cuda(moved, whole.params, whole.master, kind, n, 0);
                const Floats got = download(moved, n);
                if (verdict != UPDATE_APPLIED) {
                    CHECK(memcmp(got.data(), old.data(), n * sizeof(float)) == 0, "a skipped step moves weights");
                    continue;
                }
                Floats p = old, u = grad, m = m0;
                for (float& e : m) { e = bf16 ? to_float(from_float<__nv_bfloat16>(e)) : e; }
                muon_prepare(u.data(), m.data(), n, h.muon_momentum, state.grad_scale);
                muon_update(p.data(), x.data(), n, state.decay, muon_rate(state.lr, h.muon_lr_scale, 40, 25));
                compare("u", download(whole.u, n), u, 1e-6f, 1e-6f);
                compare("m", bf16 ? download_rows((__nv_bfloat16*)whole.m, 1, n, n) : download((float*)whole.m, n), m,
                        bf16 ? 1.0f / 128 : 1e-6f, 1e-6f);
                compare("p", got, p, rounds_weights(kind) ? 1.0f / 128 : 1e-6f, 1e-6f);
            }
        }
    }
}

#ifdef PRECISION_BF16
/* The same of Muon's weights, and of its moment, whose step is half of g - m. */
static void small_steps_of_muon_survive_on_average() {
    const size_t n = SMALL_N;
    Hyperparameters h = test_hyper();
    h.muon_momentum = 0.5;
    h.muon_lr_scale = 1;
    for (float fraction : small_fractions) {
        StepState state;
        memset(&state, 0, sizeof state);
        state.verdict = UPDATE_APPLIED;
        state.grad_scale = state.decay = 1;
        state.lr = fraction * small_unit;
        MatrixPart part;
        memset(&part, 0, sizeof part);
        part.count = n;
        part.root = 1;
        part.params = upload_rows<floatX>(Floats(n, 1.75f), 1, n, n);
        part.m = upload_rows<floatX>(Floats(n, 1.75f), 1, n, n);
        part.grads = upload(Floats(n, 1.75f - 2 * fraction * small_unit));
        part.u = device_alloc<float>(n);
        part.x = upload_rows<floatX>(Floats(n, 1), 1, n, n);
        const MatrixParts parts = {upload(std::vector<MatrixPart>{part}), 1, n, MASTER_NONE, true, true, 1};
        for (int step = 0; step < SMALL_STEPS; step++) {
            state.step = step;
            const StepState* on_card = upload(std::vector<StepState>{state});
            if (step == 0) { muon_prepare_cuda(&parts, on_card, &h, 0); }
            muon_update_cuda(&parts, on_card, &h, 0);
        }
        check_small_steps("Muon's weights", fraction, SMALL_STEPS, download_rows(part.params, 1, n, n));
        check_small_steps("Muon's moments", fraction, 1, download_rows((floatX*)part.m, 1, n, n));
        device_free_all();
    }
}
#endif

#endif
