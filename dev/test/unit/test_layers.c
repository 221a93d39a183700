/* test_layers.c -- compares every CPU layer with a plain reference in double, at odd sizes.
 *
 * Forward: the formula as loops. Backward: central differences of the double reference. So no gradient formula is written
 * twice, and the reference cannot repeat a layer's mistake. Gradients must add to the old values (or replace garbage, if the
 * header says so). Every layer must give the same bits with 1, 2, 3 and 7 threads.
 */
#include "llmc/optim/optimizer.h"
#include "llmc/attention.h"
#include "llmc/attention_walk.h"
#include "llmc/crossentropy.h"
#include "llmc/embedding.h"
#include "llmc/lora.h"
#include "llmc/matmul.h"
#include "llmc/base/rand.h"
#include "llmc/rmsnorm.h"
#include "llmc/rope.h"
#include "llmc/swiglu.h"
#include "dev/test/oracles.h"
#include "dev/test/test.h"

#ifdef _OPENMP
#include <omp.h>
#endif

// ---------------------------------------------------------------------------------------------------------------------
// helpers

enum { NUM_THREAD_COUNTS = 4 };

/* Sets the i-th thread count to try. Without OpenMP the same run repeats, which still finds uninitialized reads. */
static void use_threads(int i) {
    static const int counts[NUM_THREAD_COUNTS] = {1, 2, 3, 7};
    (void)counts;
#ifdef _OPENMP
    omp_set_num_threads(counts[i]);
#else
    (void)i;
#endif
}

static void* packed;  // scratch memory of the products, enough for every thread count

static float* floats(size_t n) { return (float*)xmalloc(n * sizeof(float)); }
static double* doubles(size_t n) { return (double*)xcalloc(n, sizeof(double)); }

/* Returns n normals of deviation std; another id gives another array. */
static float* normals(size_t n, double std, uint32_t id) {
    float* x = floats(n + 1);
    rand_normal(x, 0, n, std, 1234, id);
    return x;
}

static double* widened(const float* x, size_t n) {
    double* d = doubles(n);
    for (size_t i = 0; i < n; i++) { d[i] = (double)x[i]; }
    return d;
}

static float* copied(const float* x, size_t n) { return (float*)memcpy(floats(n), x, n * sizeof(float)); }

/* Checks |got - base - want| <= tol * max(1, max |want|) for all elements; base may be NULL. */
static void check_close(const char* what, const float* got, const float* base, const double* want, size_t n, double tol) {
    double scale = 1, worst = 0;
    size_t at = 0;
    for (size_t i = 0; i < n; i++) { scale = fabs(want[i]) > scale ? fabs(want[i]) : scale; }
    for (size_t i = 0; i < n; i++) {
        const double error = fabs((double)got[i] - (base ? (double)base[i] : 0.0) - want[i]);
        if (!(error <= worst)) {
            worst = error;
            at = i;
        }
    }
    CHECK(worst <= tol * scale, "%s: element %zu is off by %g (wanted %g)", what, at, worst, n ? want[at] : 0.0);
}

static void check_same_bits(const char* what, const float* a, const float* b, size_t n, int i) {
    CHECK(memcmp(a, b, n * sizeof(float)) == 0, "%s differs with thread count no. %d", what, i);
}

static size_t moved = SIZE_MAX;  // the element that check_gradient moves: a loss may leave out terms that do not depend on it

/* Compares `got - base` with the central difference of loss(ctx) in x at up to `samples` of its n elements. */
static void check_gradient(const char* what, const float* got, const float* base, double* x, size_t n, size_t samples,
                           double (*loss)(const void*), const void* ctx, double tol) {
    const double h = 1e-4;
    double scale = 1;
    for (size_t i = 0; i < n; i++) { scale = fabs((double)got[i]) > scale ? fabs((double)got[i]) : scale; }
    for (size_t s = 0; s < samples && s < n; s++) {
        const size_t i = n <= samples ? s : (size_t)philox_below(99, RAND_SAMPLE, 0, s, n);
        const double keep = x[i];
        moved = i;
        x[i] = keep + h;
        const double up = loss(ctx);
        x[i] = keep - h;
        const double down = loss(ctx);
        x[i] = keep;
        moved = SIZE_MAX;
        const double want = (up - down) / (2 * h), have = (double)got[i] - (base ? (double)base[i] : 0.0);
        CHECK(fabs(have - want) <= tol * scale, "%s: element %zu of %zu is %g, wanted %g", what, i, n, have, want);
    }
}

static double dot(const double* a, const double* b, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) { sum += a[i] * b[i]; }
    return sum;
}

// ---------------------------------------------------------------------------------------------------------------------
// exp

TEST(exp_is_within_two_ulp_and_keeps_its_limits) {
    double worst = 0;
    for (double x = -86.9; x < 88.7; x += 0.00037) {
        const float xf = (float)x;
        float lane[SIMD];
        vf_store(lane, vf_exp(vf_set(xf)));
        const double want = exp((double)xf), ulp = ldexp(1.0, ilogb(want) - 23);
        const double error = fabs((double)lane[SIMD - 1] - want) / ulp;
        worst = error > worst ? error : worst;
    }
    CHECK(worst <= 2, "off by %.2f ulp", worst);
    const float in[6] = {-INFINITY, -1000, 0, 89, INFINITY, NAN}, want[5] = {0, 0, 1, INFINITY, INFINITY};
    for (int i = 0; i < 6; i++) {
        const float got = vf_sum(vf_exp(vf_set(in[i]))) / SIMD;
        CHECK(i == 5 ? isnan(got) : got == want[i], "exp(%f) = %f", (double)in[i], (double)got);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// embedding

TEST(embedding_gathers_rows_and_adds_gradients_of_repeated_tokens) {
    static const int sizes[][3] = {{1, 1, 1}, {37, 5, 3}, {200, 130, 17}, {64, 256, 1}};  // N C V
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        const size_t N = (size_t)sizes[s][0], C = (size_t)sizes[s][1], V = (size_t)sizes[s][2];
        float *table = normals(V * C, 1, 1), *dout = normals(N * C, 1, 2), *base = normals(V * C, 1, 3);
        float *out = floats(N * C), *first = NULL;
        int32_t* tokens = (int32_t*)xmalloc(N * sizeof *tokens);
        double* want = doubles(V * C);
        for (size_t n = 0; n < N; n++) { tokens[n] = (int32_t)philox_below(1, RAND_SAMPLE, 0, n, V); }
        embedding_forward(out, table, tokens, N, (int)C);
        for (size_t i = 0; i < N * C; i++) {
            CHECK(out[i] == table[(size_t)tokens[i / C] * C + i % C], "row %zu is not its token's row of the table", i / C);
            want[(size_t)tokens[i / C] * C + i % C] += (double)dout[i];
        }
        for (int t = 0; t < NUM_THREAD_COUNTS; t++) {
            use_threads(t);
            float* d = copied(base, V * C);
            embedding_backward(d, dout, tokens, N, (int)C);
            check_close("dtable", d, base, want, V * C, 1e-5);
            if (first) { check_same_bits("dtable", first, d, V * C, t); }
            free(first);
            first = d;
        }
        free(first), free(table), free(dout), free(base), free(out), free(tokens), free(want);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// rmsnorm

typedef struct {
    double *x, *w, *dout;
    size_t N, C;
    double eps;
} NormCase;

static double norm_loss(const void* ctx) {
    const NormCase* c = (const NormCase*)ctx;
    double sum = 0;
    for (size_t n = 0; n < c->N; n++) {
        const double* x = c->x + n * c->C;
        const double rstd = 1 / sqrt(dot(x, x, c->C) / (double)c->C + c->eps);
        for (size_t i = 0; i < c->C; i++) { sum += x[i] * rstd * c->w[i] * c->dout[n * c->C + i]; }
    }
    return sum;
}

/* Compares the plain loop of the backward pass with dx and dw of the fast form, and the fast form on rows with gaps with its
 * own bits. dx0, dw0: what both forms add to */
static void check_plain_norm(const float* dx, const float* dw, const float* dx0, const float* dw0, const float* dout,
                             const float* x, const float* w, const float* rstd, RowShape rows) {
    const size_t n = rows.N * rows.pitch, C = (size_t)rows.C;
    float *plain_dx = copied(dx0, n), *plain_dw = copied(dw0, C);
    double *want_dx = widened(dx, n), *want_dw = widened(dw, C);
    rmsnorm_backward_plain(plain_dx, plain_dw, dout, x, w, rstd, rows);
    check_close("plain dx", plain_dx, NULL, want_dx, n, 1e-5);
    check_close("plain dweight", plain_dw, NULL, want_dw, C, 1e-5);
    const RowShape wide = {rows.N, rows.C, C + 5};
    float *wide_dx = floats(rows.N * wide.pitch), *wide_dout = floats(rows.N * wide.pitch);
    float *wide_x = floats(rows.N * wide.pitch), *wide_out = floats(rows.N * wide.pitch), *wide_rstd = floats(rows.N);
    void* scratch = xmalloc(rmsnorm_backward_scratch(rows.N, rows.C));
    for (size_t i = 0; i < n; i++) {
        const size_t at = i / C * wide.pitch + i % C;
        wide_dx[at] = dx0[i], wide_dout[at] = dout[i], wide_x[at] = x[i];
    }
    memcpy(plain_dw, dw0, C * sizeof(float));
    rmsnorm_forward(wide_out, wide_rstd, wide_x, w, wide, 1e-2f);
    rmsnorm_backward(wide_dx, plain_dw, scratch, wide_dout, wide_x, w, wide_rstd, wide);
    for (size_t i = 0; i < n; i++) { plain_dx[i] = wide_dx[i / C * wide.pitch + i % C]; }
    check_same_bits("dx of rows with gaps", dx, plain_dx, n, 0);
    check_same_bits("dweight of rows with gaps", dw, plain_dw, C, 0);
    free(plain_dx), free(plain_dw), free(want_dx), free(want_dw), free(scratch);
    free(wide_dx), free(wide_dout), free(wide_x), free(wide_out), free(wide_rstd);
}

TEST(rmsnorm_and_its_gradients_match) {
    static const int sizes[][2] = {{1, 1}, {3, 16}, {70, 37}, {5, 384}, {130, 64}, {257, 100}};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        const size_t N = (size_t)sizes[s][0], C = (size_t)sizes[s][1];
        float *x = normals(N * C, 2, 1), *w = normals(C, 1, 2), *dout = normals(N * C, 1, 3);
        float *dx0 = normals(N * C, 1, 4), *dw0 = normals(C, 1, 5), *out = floats(N * C), *rstd = floats(N);
        void* scratch = xmalloc(rmsnorm_backward_scratch(N, (int)C));
        NormCase c = {widened(x, N * C), widened(w, C), widened(dout, N * C), N, C, 1e-2};
        double* want = doubles(N * C);
        for (size_t n = 0; n < N; n++) {
            const double* r = c.x + n * C;
            for (size_t i = 0; i < C; i++) { want[n * C + i] = r[i] / sqrt(dot(r, r, C) / (double)C + c.eps) * c.w[i]; }
        }
        float *first_x = NULL, *first_w = NULL, *first_out = NULL;
        for (int t = 0; t < NUM_THREAD_COUNTS; t++) {
            use_threads(t);
            float *dx = copied(dx0, N * C), *dw = copied(dw0, C);
            rmsnorm_forward(out, rstd, x, w, packed_rows(N, (int)C), 1e-2f);
            rmsnorm_backward(dx, dw, scratch, dout, x, w, rstd, packed_rows(N, (int)C));
            check_close("out", out, NULL, want, N * C, 1e-5);
            if (t == 0) {
                check_gradient("dx", dx, dx0, c.x, N * C, 60, norm_loss, &c, 1e-5);
                check_gradient("dweight", dw, dw0, c.w, C, 60, norm_loss, &c, 1e-5);
                check_plain_norm(dx, dw, dx0, dw0, dout, x, w, rstd, packed_rows(N, (int)C));
                first_x = dx, first_w = dw, first_out = copied(out, N * C);
                continue;
            }
            check_same_bits("out", first_out, out, N * C, t);
            check_same_bits("dx", first_x, dx, N * C, t);
            check_same_bits("dweight", first_w, dw, C, t);
            free(dx), free(dw);
        }
        free(first_x), free(first_w), free(first_out), free(want), free(c.x), free(c.w), free(c.dout);
        free(x), free(w), free(dout), free(dx0), free(dw0), free(out), free(rstd), free(scratch);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// rope

static ModelConfig rope_config(int HD, double theta, double factor /* 0: default type */) {
    ModelConfig c;
    memset(&c, 0, sizeof c);
    c.head_dim = HD;
    c.rope_theta = theta;
    c.rope_llama3 = factor > 0;
    c.rope_factor = factor;
    c.rope_low_freq = 1;
    c.rope_high_freq = 4;
    c.rope_original_len = 8192;
    return c;
}

TEST(rope_rotates_q_and_k_by_position_and_backward_undoes_it) {
    static const int sizes[][7] = {{1, 1, 1, 1, 2, 0, 0},     {2, 9, 4, 2, 6, 5, 0},  {3, 33, 3, 1, 64, 0, 0},
                                   {1, 17, 2, 2, 40, 100, 0}, {3, 50, 2, 1, 8, 0, 9}, {2, 20, 1, 1, 4, 3, 1}};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        const int B = sizes[s][0], T = sizes[s][1], NH = sizes[s][2], NKV = sizes[s][3], HD = sizes[s][4], pos = sizes[s][5];
        int32_t* starts = random_starts(B, T, sizes[s][6]);
        const ModelConfig c = rope_config(HD, 10000, 0);
        const AttentionShape shape = {B, T, NH, NKV, HD};
        const size_t width = (size_t)(NH + 2 * NKV) * (size_t)HD, n = (size_t)B * (size_t)T * width;
        float *x = normals(n, 1, 1), *table = floats((size_t)(pos + T) * (size_t)HD), *first = NULL;
        double *want = widened(x, n), *before = widened(x, n);
        rope_table(table, pos + T, &c);
        for (size_t i = 0; i < n; i++) {
            const size_t head = i % width / (size_t)HD, d = i % (size_t)HD, half = (size_t)HD / 2;
            if (head >= (size_t)(NH + NKV)) { continue; }
            const double t = (double)(pos + (int)(i / width % (size_t)T) - (starts ? starts[i / width] : 0));
            const double angle = t * pow(10000, -2.0 * (double)(d % half) / HD);
            // rotate_half: (-x2, x1)
            const double other = d < half ? -before[i + half] : before[i - half];
            want[i] = before[i] * cos(angle) + other * sin(angle);
        }
        for (int k = 0; k < NUM_THREAD_COUNTS; k++) {
            use_threads(k);
            float* y = copied(x, n);
            rope_forward(y, starts, table, pos, shape);
            check_close("rotated", y, NULL, want, n, 2e-5);
            if (first) { check_same_bits("rotated", first, y, n, k); }
            free(first);
            first = copied(y, n);
            rope_backward(y, starts, table, pos, shape);  // a rotation's transpose is its inverse
            check_close("rotated back", y, NULL, before, n, 1e-5);
            free(y);
        }
        free(first), free(x), free(table), free(want), free(before), free(starts);
    }
}

TEST(rope_tables_are_those_of_transformers) {
    // bits of LlamaRotaryEmbedding(...).inv_freq at indices `at`, HD 64, transformers 5; 22, 23 and 16 are in the blend
    static const struct {
        double theta, factor;
        uint32_t bits[7];
    } cases[] = {
        // clang-format off
        {10000, 0, {0x3f800000, 0x3d2cba15, 0x3c23d70a, 0x3ae91528, 0x3aaec98e, 0x3a83126f, 0x390bd472}},
        {10000, 8, {0x3f800000, 0x3d2cba15, 0x3c23d70a, 0x3a6d8ae2, 0x39ee0430, 0x395ffbd9, 0x378bd472}},
        {10000, 32, {0x3f800000, 0x3d2cba15, 0x3c23d70a, 0x3a550c17, 0x39bc9bf8, 0x3907a276, 0x368bd472}},
        {500000, 0, {0x3f800000, 0x3c340d6d, 0x3ab95d21, 0x38fd45c3, 0x38a8126b, 0x385f10c4, 0x364a41b0}},
        {500000, 8, {0x3f800000, 0x3c340d6d, 0x3a0995d2, 0x377d45c3, 0x3728126b, 0x36df10c4, 0x34ca41b0}},
        {500000, 32, {0x3f800000, 0x3c340d6d, 0x39e13620, 0x367d45c3, 0x3628126b, 0x35df10c4, 0x33ca41b0}},
        // clang-format on
    };
    static const int at[7] = {0, 11, 16, 22, 23, 24, 31};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        const ModelConfig c = rope_config(64, cases[k].theta, cases[k].factor);
        float f[MAX_HEAD_DIM / 2];
        rope_inv_freq(f, &c);
        for (int i = 0; i < 7; i++) {
            uint32_t bits;
            memcpy(&bits, &f[at[i]], sizeof bits);
            CHECK(bits == cases[k].bits[i], "theta %g factor %g: inv_freq[%d] is %08x, wanted %08x", cases[k].theta,
                  cases[k].factor, at[i], bits, cases[k].bits[i]);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// matmul

/* Checks products calculated by hand: x = (1 2 3; 4 5 6), w = (1 0 -1; 2 1 0), dout = (1 2; 3 4). */
TEST(plain_products_of_a_small_example_are_right) {
    const float x[6] = {1, 2, 3, 4, 5, 6}, w[6] = {1, 0, -1, 2, 1, 0}, dout[4] = {1, 2, 3, 4}, res[4] = {10, 20, 30, 40};
    const float out_want[4] = {-2, 4, -2, 13}, res_want[4] = {8, 24, 28, 53};
    const float dx_want[6] = {5, 2, -1, 11, 4, -3}, dw_want[6] = {113, 117, 121, 118, 124, 130};
    float out[4], dx[6] = {9, 9, 9, 9, 9, 9}, dw[6] = {100, 100, 100, 100, 100, 100};
    matmul_forward_plain(out, x, w, NULL, 2, 3, 2);
    CHECK(memcmp(out, out_want, sizeof out) == 0, "out is %g %g %g %g", out[0], out[1], out[2], out[3]);
    matmul_forward_plain(out, x, w, res, 2, 3, 2);
    CHECK(memcmp(out, res_want, sizeof out) == 0, "with a residual it is %g %g %g %g", out[0], out[1], out[2], out[3]);
    matmul_backward_input_plain(dx, dout, w, 2, 3, 2);
    CHECK(memcmp(dx, dx_want, sizeof dx) == 0, "dx is %g %g %g %g %g %g", dx[0], dx[1], dx[2], dx[3], dx[4], dx[5]);
    matmul_backward_weight_plain(dw, dout, x, 2, 3, 2);
    CHECK(memcmp(dw, dw_want, sizeof dw) == 0, "dw is %g %g %g %g %g %g", dw[0], dw[1], dw[2], dw[3], dw[4], dw[5]);
}

/* Returns want - base, the gradient that was added. */
static double* added(const float* want, const float* base, size_t n) {
    double* d = widened(want, n);
    for (size_t i = 0; i < n; i++) { d[i] -= (double)base[i]; }
    return d;
}

TEST(matmul_and_its_gradients_are_the_plain_loops_at_every_edge) {
    static const int sizes[][3] = {{1, 1, 1},      {1, 300, 70},   {2, 17, 33},    {3, 64, 5},
                                   {5, 7, 9},      {12, 32, 32},   {13, 33, 31},   {48, 256, 64},
                                   {50, 257, 65},  {130, 100, 77}, {61, 515, 530}, {300, 40, 24},
                                   {70, 1024, 40}, {20, 30, 1024}, {1100, 33, 50}, {40, 20, 800}};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        const int C = sizes[s][1], OC = sizes[s][2];
        const size_t N = (size_t)sizes[s][0], in = N * (size_t)C, on = N * (size_t)OC, wn = (size_t)C * (size_t)OC;
        float *x = normals(in, 1, 1), *w = normals(wn, 1, 2), *res = normals(on, 1, 3), *dout = normals(on, 1, 4);
        float *dw0 = normals(wn, 1, 6), *plain[4] = {floats(on), floats(on), floats(in), copied(dw0, wn)};
        matmul_forward_plain(plain[0], x, w, NULL, N, C, OC);
        matmul_forward_plain(plain[1], x, w, res, N, C, OC);
        matmul_backward_input_plain(plain[2], dout, w, N, C, OC);
        matmul_backward_weight_plain(plain[3], dout, x, N, C, OC);
        double *y = widened(plain[0], on), *y_res = widened(plain[1], on), *dx = widened(plain[2], in);
        double* dw = added(plain[3], dw0, wn);
        float* first[5] = {0};
        for (int t = 0; t < NUM_THREAD_COUNTS; t++) {
            use_threads(t);
            float* got[5] = {floats(on), floats(on), copied(res, on), floats(in), copied(dw0, wn)};
            const size_t count[5] = {on, on, on, in, wn};
            memset(got[0], 0xff, on * sizeof(float));  // NaN: shows elements that are not overwritten
            memset(got[3], 0xff, in * sizeof(float));
            matmul_forward(got[0], packed, x, w, NULL, N, C, OC);
            matmul_forward(got[1], packed, x, w, res, N, C, OC);
            matmul_forward(got[2], packed, x, w, got[2], N, C, OC);
            matmul_backward_input(got[3], packed, dout, w, N, C, OC);
            matmul_backward_weight(got[4], packed, dout, x, N, C, OC);
            check_close("out", got[0], NULL, y, on, 1e-5);
            check_close("out + residual", got[1], NULL, y_res, on, 1e-5);
            check_close("out onto itself", got[2], NULL, y_res, on, 1e-5);
            check_close("dx", got[3], NULL, dx, in, 1e-5);
            check_close("dw +=", got[4], dw0, dw, wn, 1e-5);
            for (int i = 0; i < 5; i++) {
                if (first[i]) { check_same_bits("product", first[i], got[i], count[i], t); }
                free(first[i]);
                first[i] = got[i];
            }
        }
        for (int i = 0; i < 5; i++) { free(first[i]); }
        for (int i = 0; i < 4; i++) { free(plain[i]); }
        free(x), free(w), free(res), free(dout), free(dw0), free(y), free(y_res), free(dx), free(dw);
    }
}

TEST(matmul_lets_nan_through_and_not_around) {
    enum { N = 13, C = 40, OC = 35 };
    float *x = normals(N * C, 1, 1), *w = normals(OC * C, 1, 2), *out = floats(N * OC);
    x[5 * C + 39] = NAN;
    x[6 * C + 3] = INFINITY;
    matmul_forward(out, packed, x, w, NULL, N, C, OC);
    for (int i = 0; i < N * OC; i++) {
        CHECK(isnan(out[i]) == (i / OC == 5), "row %d", i / OC);
        CHECK(!isinf(out[i]) == (i / OC != 6), "row %d", i / OC);
    }
    free(x), free(w), free(out);
}

// ---------------------------------------------------------------------------------------------------------------------
// matmul on the matrix unit

#ifdef LLMC_AMX
typedef struct {
    size_t M, N, K;
    float *a, *b, *add;   // (M, K), (K, N), (M, N), without gaps
    double *want, *size;  // a b + add, |a| |b| + |add|
} Product;

static Product product(size_t M, size_t N, size_t K, double decades) {
    Product p = {M, N, K, normals(M * K, 1, 1), normals(K * N, 1, 2), normals(M * N, 1, 3), doubles(M * N), doubles(M * N)};
    float *ea = normals(M * K, 1, 4), *eb = normals(K * N, 1, 5);
    for (size_t i = 0; i < M * K; i++) { p.a[i] = (float)((double)p.a[i] * pow(10, decades * tanh((double)ea[i]))); }
    for (size_t i = 0; i < K * N; i++) { p.b[i] = (float)((double)p.b[i] * pow(10, decades * tanh((double)eb[i]))); }
    free(ea), free(eb);
    return p;
}

static void product_reference(Product* p) {
    for (size_t i = 0; i < p->M; i++) {
        double *want = p->want + i * p->N, *size = p->size + i * p->N;
        for (size_t j = 0; j < p->N; j++) { want[j] = (double)p->add[i * p->N + j], size[j] = fabs(want[j]); }
        for (size_t k = 0; k < p->K; k++) {
            const double s = (double)p->a[i * p->K + k];
            for (size_t j = 0; j < p->N; j++) {
                want[j] += s * (double)p->b[k * p->N + j];
                size[j] += fabs(s * (double)p->b[k * p->N + j]);
            }
        }
    }
}

static void product_free(Product* p) { free(p->a), free(p->b), free(p->add), free(p->want), free(p->size); }

/* Copies x (rows, cols) row by row or column by column, with `gap` floats of garbage between. */
static MatrixView strided(const float* x, size_t rows, size_t cols, bool by_columns, size_t gap) {
    const size_t n = by_columns ? cols * (rows + gap) : rows * (cols + gap);
    float* out = floats(n);
    memset(out, 0xff, n * sizeof(float));
    const MatrixView v = by_columns ? transposed(by_rows(out, rows + gap)) : by_rows(out, cols + gap);
    for (size_t i = 0; i < rows; i++) {
        for (size_t j = 0; j < cols; j++) { out[i * v.row + j * v.col] = x[i * cols + j]; }
    }
    return v;
}

/* Checks every element against the largest possible rounding error, in units of 2^-24 (|a| |b| + |add|): 1 for the products
 * left out, 16 for the sum of a tile's row, 1 for each of six tiles added up per 32 along k, and 1 for each run over k added to
 * c. Each of six products below 2^-126 may be lost. Returns the root mean square error in those units. */
static double check_product(const char* what, const Product* p, const float* got) {
    const double runs = (double)ceil_div(p->K, AMX_KC), steps = (double)ceil_div(p->K, AMX_DEPTH);
    const double limit = 1 + (double)size_min(p->K, 16) + 6 * steps + runs, unit = ldexp(1, -24);
    double squares = 0;
    size_t wrong = 0, at = 0;
    for (size_t i = 0; i < p->M * p->N; i++) {
        const double error = fabs((double)got[i] - p->want[i]);
        if (!(error <= limit * unit * p->size[i] + (double)p->K * ldexp(6, -126))) { wrong++, at = i; }
        squares += (error / (unit * p->size[i])) * (error / (unit * p->size[i]));
    }
    CHECK(wrong == 0, "%s, %zu x %zu x %zu: %zu elements are off: %g, wanted %g (limit %g)", what, p->M, p->N, p->K, wrong,
          (double)got[at], p->want[at], limit * unit * p->size[at]);
    return sqrt(squares / (double)(p->M * p->N));
}

static void amx_products_of_any_shape_and_stride_are_those_of_fp32(void) {
    static const size_t sizes[][3] = {{1, 1, 1},    {33, 17, 1},  {40, 40, 2},  {5, 70, 9},     {16, 16, 32},   {32, 32, 31},
                                      {31, 65, 33}, {64, 96, 64}, {17, 33, 96}, {40, 33, 1100}, {100, 300, 70}, {70, 800, 600}};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        Product p = product(sizes[s][0], sizes[s][1], sizes[s][2], s % 3 == 2 ? 18 : 0);
        const size_t n = p.M * p.N;
        product_reference(&p);
        float *first = NULL, *got = floats(n);
        for (int layout = 0; layout < 4; layout++) {
            const MatrixView a = strided(p.a, p.M, p.K, layout & 1, s % 4), b = strided(p.b, p.K, p.N, layout & 2, s % 3);
            for (int t = 0; t < NUM_THREAD_COUNTS; t++) {
                use_threads(t);
                memset(got, 0xff, n * sizeof(float));
                amx_matmul(got, packed, p.add, a, b, p.M, p.N, p.K);
                if (!first) { first = copied(got, n); }
                check_same_bits("amx_matmul with another layout or", first, got, n, t);
                memcpy(got, p.add, n * sizeof(float));
                amx_matmul(got, packed, got, a, b, p.M, p.N, p.K);
                check_same_bits("amx_matmul onto itself", first, got, n, t);
            }
            free((float*)a.data), free((float*)b.data);
        }
        const double with_amx = check_product("a b + add", &p, first);
        matmul_vectors(sum_in(got, p.add, p.N), packed, by_rows(p.a, p.K), by_rows(p.b, p.N), p.M, p.N, p.K);
        const double with_vectors = check_product("by vectors", &p, got);
        CHECK(with_amx <= 1.25 * with_vectors, "the RMS error is %g, by vectors %g", with_amx, with_vectors);

        memset(p.add, 0, n * sizeof(float));
        product_reference(&p);
        amx_matmul(got, packed, NULL, by_rows(p.a, p.K), by_rows(p.b, p.N), p.M, p.N, p.K);
        check_product("a b", &p, got);
        free(first), free(got), product_free(&p);
    }
}

/* Whole numbers of 12 bits have two parts each. Their products and sums are exact, so nothing may be missing. */
static void amx_products_of_whole_numbers_are_exact(void) {
    Product p = product(50, 70, 200, 0);
    for (size_t i = 0; i < p.M * p.K; i++) { p.a[i] = (float)((i * 2654435761u) % 8191) - 4095; }
    for (size_t i = 0; i < p.K * p.N; i++) { p.b[i] = i / p.N % 100 ? 0 : (float)((i * 40503u) % 4095) - 2047; }  // 2 a column
    for (size_t i = 0; i < p.M * p.N; i++) { p.add[i] = 0; }
    product_reference(&p);
    amx_matmul(p.add, packed, NULL, by_rows(p.a, p.K), by_rows(p.b, p.N), p.M, p.N, p.K);
    for (size_t i = 0; i < p.M * p.N; i++) {
        CHECK((double)p.add[i] == p.want[i], "element %zu is %g, wanted %g", i, (double)p.add[i], p.want[i]);
    }
    product_free(&p);
}

/* a b = 0 by cancellation, but the terms that cancel are large. */
static void amx_products_that_cancel_leave_no_more_than_rounding(void) {
    Product p = product(40, 64, 512, 0);
    for (size_t i = 0; i < p.M; i++) { memcpy(p.a + i * p.K + 256, p.a + i * p.K, 256 * sizeof(float)); }
    for (size_t i = 0; i < 256 * p.N; i++) { p.b[256 * p.N + i] = -p.b[i]; }
    product_reference(&p);
    float* got = floats(p.M * p.N);
    amx_matmul(got, packed, p.add, by_rows(p.a, p.K), by_rows(p.b, p.N), p.M, p.N, p.K);
    check_product("cancelling", &p, got);
    free(got), product_free(&p);
}

static float float_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Rounded to bf16, the largest floats would become infinite. */
static void amx_products_of_the_largest_floats_are_finite(void) {
    static const uint32_t large[] = {0x7f7fffff, 0x7f7f8000, 0x7f7f7fff, 0x7f7f0001, 0xff7fffff, 0xff7f8001};
    for (size_t s = 0; s < sizeof large / sizeof *large; s++) {
        Product p = product(40, 40, 40, 0);
        for (size_t i = 0; i < p.M; i++) {
            for (size_t k = 0; k < p.K; k++) { p.a[i * p.K + k] = k == i ? float_of_bits(large[s]) : 0; }
        }
        for (size_t i = 0; i < p.K * p.N; i++) { p.b[i] /= 16; }
        product_reference(&p);
        float* got = floats(p.M * p.N);
        amx_matmul(got, packed, p.add, by_rows(p.a, p.K), by_rows(p.b, p.N), p.M, p.N, p.K);
        check_product("largest in a", &p, got);
        // the transposed product, b^T a^T: puts the large numbers into the other factor
        float* t = floats(p.M * p.N);
        amx_matmul(t, packed, NULL, transposed(by_rows(p.b, p.N)), transposed(by_rows(p.a, p.K)), p.N, p.M, p.K);
        for (size_t i = 0; i < p.M * p.N; i++) { got[i] = t[i % p.N * p.M + i / p.N]; }
        check_product("largest in b", &p, got);
        free(got), free(t), product_free(&p);
    }
}

/* Denormal parts count as 0, whatever numbers they meet: they cost a factor 2^-125 at most. */
static void amx_products_of_tiny_numbers_lose_only_what_is_denormal(void) {
    Product p = product(40, 50, 100, 0);
    const size_t n = p.M * p.N;
    for (size_t i = 0; i < p.M * p.K; i++) { p.a[i] = ldexpf(p.a[i], -(int)(i * 7919 % 149)); }
    for (size_t i = 0; i < p.K * p.N; i++) { p.b[i] = ldexpf(p.b[i], -(int)(i * 104729 % 149)); }
    for (size_t i = 0; i < n; i++) { p.add[i] = 0; }
    product_reference(&p);
    for (size_t i = 0; i < p.M; i++) {
        for (size_t j = 0; j < p.N; j++) {  // the limit counts this loss as rounding, in units of 2^-24
            double lost = 0;
            for (size_t k = 0; k < p.K; k++) { lost += fabs((double)p.a[i * p.K + k]) + fabs((double)p.b[k * p.N + j]); }
            p.size[i * p.N + j] += ldexp(lost, -125 + 24);
        }
    }
    float* got = floats(n);
    amx_matmul(got, packed, NULL, by_rows(p.a, p.K), by_rows(p.b, p.N), p.M, p.N, p.K);
    check_product("tiny", &p, got);
    free(got), product_free(&p);
}

/* The trainers detect a bad step by values that are not finite: a product must not lose one. */
static void amx_lets_nan_and_infinity_through_and_not_around(void) {
    static const uint32_t bits[] = {0x7fc00000, 0x7fffffff, 0xffffffff, 0x7f800001,
                                    0x7fbfffff, 0xff80ffff, 0x7f800000, 0xff800000};
    enum { M = 37, N = 41, K = 70 };
    for (size_t s = 0; s < sizeof bits / sizeof *bits; s++) {
        for (int other = 0; other < 3; other++) {  // with 0, a power of two, or any numbers in the other factor
            for (size_t k = 0; k < K; k += 23) {
                Product p = product(M, N, K, 0);
                if (other < 2) {
                    for (size_t i = 0; i < K * N; i++) { p.b[i] = (float)other; }
                }
                memcpy(p.a + 5 * K + k, &bits[s], sizeof bits[s]);
                float *c = floats(M * N), *t = floats(M * N);
                amx_matmul(c, packed, NULL, by_rows(p.a, K), by_rows(p.b, N), M, N, K);
                amx_matmul(t, packed, NULL, transposed(by_rows(p.b, N)), transposed(by_rows(p.a, K)), N, M,
                           K);  // the same transposed: the special value is in b
                for (size_t i = 0; i < M * N; i++) {
                    const bool nan = s < 6;
                    CHECK(i / N == 5 ? (nan ? isnan(c[i]) : !isfinite(c[i])) : isfinite(c[i]), "%x in a: element %zu is %g",
                          bits[s], i, (double)c[i]);
                    CHECK(i % M == 5 ? (nan ? isnan(t[i]) : !isfinite(t[i])) : isfinite(t[i]), "%x in b: element %zu is %g",
                          bits[s], i, (double)t[i]);
                }
                free(c), free(t), product_free(&p);
            }
        }
    }
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// attention

typedef struct {
    double *qkv, *dout, *out, *lse;
    const int32_t* starts;
    AttentionShape s;
} AttentionCase;

/* Returns whether the output of query t depends on element i of qkv: on its q, or on k or v of a position up to t. */
static bool attention_reads(AttentionHead a, size_t HD, size_t t, size_t i) {
    const bool key = i >= a.k && (i - a.k) % a.row < HD && (i - a.k) / a.row <= t;
    const bool value = i >= a.v && (i - a.v) % a.row < HD && (i - a.v) / a.row <= t;
    return key || value || (i >= a.q + t * a.row && i < a.q + t * a.row + HD);
}

/* Writes out (B, T, NH HD) and lse (B, NH, T), and returns the sum of out * dout, in double: the loss of check_gradient. If an
 * element has moved, only queries count that read it. */
static double attention_loss(const void* ctx) {
    const AttentionCase* c = (const AttentionCase*)ctx;
    const size_t T = (size_t)c->s.T, NH = (size_t)c->s.NH, HD = (size_t)c->s.HD;
    double sum = 0, *p = doubles(T);
    for (size_t i = 0; i < (size_t)c->s.B * NH * T; i++) {
        const size_t t = i % T, first = c->starts ? (size_t)c->starts[i / (NH * T) * T + t] : 0;
        const AttentionHead a = attention_head(c->s, i / (NH * T), i / T % NH);
        if (moved != SIZE_MAX && !attention_reads(a, HD, t, moved)) { continue; }
        const double *q = c->qkv + a.q + t * a.row, *k = c->qkv + a.k, *v = c->qkv + a.v;
        double *out = c->out + a.out + t * a.out_row, m = -1e300, l = 0;
        for (size_t u = first; u <= t; u++) {
            p[u] = dot(q, k + u * a.row, HD) / sqrt((double)HD);
            m = p[u] > m ? p[u] : m;
        }
        for (size_t u = first; u <= t; u++) { l += p[u] = exp(p[u] - m); }
        c->lse[i] = m + log(l);
        for (size_t d = 0; d < HD; d++) {
            out[d] = 0;
            for (size_t u = first; u <= t; u++) { out[d] += p[u] / l * v[u * a.row + d]; }
        }
        sum += dot(out, c->dout + a.out + t * a.out_row, HD);
    }
    free(p);
    return sum;
}

/* Compares the plain loops with the formula in double. For every thread count, compares the fast form with the plain loops.
 * Rows hold documents of up to `longest` tokens; 0: rows are not divided. */
static void check_attention(AttentionShape s, int longest, double std, size_t samples) {
    int32_t* starts = random_starts(s.B, s.T, longest);
    const size_t rows = (size_t)s.B * (size_t)s.T, n_qkv = rows * (size_t)((s.NH + 2 * s.NKV) * s.HD);
    const size_t n_out = rows * (size_t)(s.NH * s.HD), n_lse = rows * (size_t)s.NH;
    use_threads(NUM_THREAD_COUNTS - 1);
    const size_t n_scratch = attention_backward_scratch(s);
    float *qkv = normals(n_qkv, std, 1), *dout = normals(n_out, 1, 2), *out = floats(n_out), *lse = floats(n_lse);
    float *dqkv = floats(n_qkv), *first_d = NULL, *first_o = NULL;
    void* scratch = xmalloc(n_scratch);
    AttentionCase c = {widened(qkv, n_qkv), widened(dout, n_out), doubles(n_out), doubles(n_lse), starts, s};
    attention_loss(&c);
    memset(dqkv, 0xff, n_qkv * sizeof(float));  // must be overwritten
    attention_forward_plain(out, lse, qkv, starts, s);
    attention_backward_plain(dqkv, dout, out, lse, qkv, starts, s);
    check_close("plain out", out, NULL, c.out, n_out, 1e-5 * std);  // an error in a score shows in the weights
    check_close("plain lse", lse, NULL, c.lse, n_lse, 1e-5);
    check_gradient("plain dqkv", dqkv, NULL, c.qkv, n_qkv, samples, attention_loss, &c, 1e-4);
    double *want_out = widened(out, n_out), *want_lse = widened(lse, n_lse), *want_dqkv = widened(dqkv, n_qkv);
    for (int t = 0; t < NUM_THREAD_COUNTS; t++) {
        use_threads(t);
        memset(out, 0xff, n_out * sizeof(float));
        memset(lse, 0xff, n_lse * sizeof(float));
        memset(dqkv, 0xff, n_qkv * sizeof(float));
        memset(scratch, 0xff, n_scratch);  // may contain anything
        attention_forward(out, lse, scratch, qkv, starts, s);
        attention_backward(dqkv, scratch, dout, out, lse, qkv, starts, s);
        if (t == 0) {
            check_close("out", out, NULL, want_out, n_out, 1e-5 * std);
            check_close("lse", lse, NULL, want_lse, n_lse, 1e-5);
            check_close("dqkv", dqkv, NULL, want_dqkv, n_qkv, 1e-4);
            first_d = copied(dqkv, n_qkv), first_o = copied(out, n_out);
        }
        check_same_bits("out", first_o, out, n_out, t);
        check_same_bits("dqkv", first_d, dqkv, n_qkv, t);
    }
    free(qkv), free(dout), free(out), free(lse), free(dqkv), free(first_d), free(first_o), free(scratch);
    free(c.qkv), free(c.dout), free(c.out), free(c.lse), free(want_out), free(want_lse), free(want_dqkv), free(starts);
}

TEST(attention_and_its_gradient_match_for_any_grouping) {
    // B, T, NH, NKV, HD
    check_attention((AttentionShape){1, 1, 1, 1, 2}, 0, 1, 100);
    check_attention((AttentionShape){2, 2, 2, 1, 6}, 0, 1, 200);
    check_attention((AttentionShape){2, 17, 4, 4, 8}, 0, 1, 200);
    check_attention((AttentionShape){1, 65, 4, 2, 16}, 0, 2, 150);
    check_attention((AttentionShape){3, 50, 6, 2, 10}, 0, 1, 150);
    check_attention((AttentionShape){1, 130, 3, 1, 64}, 0, 1, 100);
    check_attention((AttentionShape){1, 97, 2, 1, 128}, 0, 1, 60);
    check_attention((AttentionShape){1, 70, 2, 2, 250}, 0, 1, 60);
    check_attention((AttentionShape){1, 33, 1, 1, 256}, 0, 1, 60);
}

TEST(attention_holds_at_a_thousand_positions) { check_attention((AttentionShape){1, 1000, 2, 1, 32}, 0, 1, 12); }

/* With scores of some hundreds exp overflows unless the kernel subtracts the maximum, also when the maximum changes from tile
 * to tile. */
TEST(attention_survives_large_scores) { check_attention((AttentionShape){1, 150, 2, 1, 16}, 0, 12, 0); }

TEST(attention_inside_documents_and_its_gradient_match) {
    check_attention((AttentionShape){1, 1, 1, 1, 2}, 1, 1, 100);
    check_attention((AttentionShape){2, 17, 4, 2, 8}, 1, 1, 100);  // each token alone
    check_attention((AttentionShape){3, 50, 6, 2, 10}, 7, 1, 150);
    check_attention((AttentionShape){2, 65, 4, 4, 16}, 65, 2, 150);
    check_attention((AttentionShape){2, 300, 3, 1, 64}, 150, 1, 60);
    check_attention((AttentionShape){1, 260, 2, 1, 128}, 33, 1, 60);
    check_attention((AttentionShape){1, 150, 2, 1, 16}, 100, 12, 0);  // scores of some hundreds
    check_attention((AttentionShape){2, 1000, 2, 1, 32}, 400, 1, 12);
}

/* Runs RoPE and attention, forward and backward, on rows of documents: writes out, lse, and the gradient of qkv. */
static void run_attention(float* out, float* lse, float* dqkv, const float* qkv, const float* dout, const int32_t* starts,
                          const float* table, AttentionShape s) {
    float* rotated = copied(qkv, (size_t)(s.B * s.T) * (size_t)((s.NH + 2 * s.NKV) * s.HD));
    void* scratch = xmalloc(attention_backward_scratch(s));
    rope_forward(rotated, starts, table, 0, s);
    attention_forward(out, lse, scratch, rotated, starts, s);
    attention_backward(dqkv, scratch, dout, out, lse, rotated, starts, s);
    rope_backward(dqkv, starts, table, 0, s);
    free(rotated), free(scratch);
}

TEST(documents_in_one_row_equal_each_document_alone) {
    static const int sizes[][6] = {
        {2, 40, 2, 1, 8, 1}, {3, 100, 4, 2, 16, 30}, {2, 500, 2, 2, 64, 200}, {1, 1000, 2, 1, 32, 600}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const AttentionShape s = {sizes[i][0], sizes[i][1], sizes[i][2], sizes[i][3], sizes[i][4]};
        const size_t rows = (size_t)(s.B * s.T), W = (size_t)((s.NH + 2 * s.NKV) * s.HD), O = (size_t)(s.NH * s.HD);
        const ModelConfig c = rope_config(s.HD, 500000, 32);
        int32_t* starts = random_starts(s.B, s.T, sizes[i][5]);
        float *qkv = normals(rows * W, 1, 1), *dout = normals(rows * O, 1, 2), *table = floats((size_t)(s.T * s.HD));
        float *out = floats(rows * O), *lse = floats(rows * (size_t)s.NH), *dqkv = floats(rows * W);
        float *alone_out = floats(rows * O), *alone_lse = floats(rows * (size_t)s.NH), *alone_dqkv = floats(rows * W);
        rope_table(table, s.T, &c);
        run_attention(out, lse, dqkv, qkv, dout, starts, table, s);
        for (size_t n = 0, end; n < rows; n = end) {
            for (end = n + 1; end < rows && end % (size_t)s.T > 0 && starts[end] == starts[n]; end++) {}
            const AttentionShape one = {1, (int)(end - n), s.NH, s.NKV, s.HD};
            run_attention(alone_out + n * O, alone_lse + n * (size_t)s.NH, alone_dqkv + n * W, qkv + n * W, dout + n * O, NULL,
                          table, one);
        }
        double *want_out = widened(alone_out, rows * O), *want_dqkv = widened(alone_dqkv, rows * W);
        check_close("out", out, NULL, want_out, rows * O, 1e-5);
        check_close("dqkv", dqkv, NULL, want_dqkv, rows * W, 1e-5);
        free(starts), free(qkv), free(dout), free(table), free(out), free(lse), free(dqkv), free(want_out), free(want_dqkv);
        free(alone_out), free(alone_lse), free(alone_dqkv);
    }
}

TEST(one_document_as_long_as_its_row_has_the_bits_of_a_plain_row) {
    const AttentionShape s = {2, 200, 4, 2, 16};
    const size_t rows = (size_t)(s.B * s.T), W = (size_t)((s.NH + 2 * s.NKV) * s.HD), O = (size_t)(s.NH * s.HD);
    const ModelConfig c = rope_config(s.HD, 10000, 0);
    int32_t* starts = (int32_t*)xcalloc(rows, sizeof *starts);
    float *qkv = normals(rows * W, 1, 1), *dout = normals(rows * O, 1, 2), *table = floats((size_t)(s.T * s.HD));
    float *out[2], *lse[2], *dqkv[2];
    rope_table(table, s.T, &c);
    for (int i = 0; i < 2; i++) {
        out[i] = floats(rows * O), lse[i] = floats(rows * (size_t)s.NH), dqkv[i] = floats(rows * W);
        run_attention(out[i], lse[i], dqkv[i], qkv, dout, i ? starts : NULL, table, s);
    }
    check_same_bits("out", out[0], out[1], rows * O, 0);
    check_same_bits("lse", lse[0], lse[1], rows * (size_t)s.NH, 0);
    check_same_bits("dqkv", dqkv[0], dqkv[1], rows * W, 0);
    for (int i = 0; i < 2; i++) { free(out[i]), free(lse[i]), free(dqkv[i]); }
    free(starts), free(qkv), free(dout), free(table);
}

TEST(attention_decode_is_the_last_row_of_forward) {
    static const AttentionShape shapes[] = {
        {1, 1, 1, 1, 2}, {1, 5, 4, 2, 6}, {1, 64, 2, 1, 64}, {1, 131, 6, 2, 40}, {1, 300, 3, 3, 256}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const AttentionShape s = shapes[i];
        const size_t q = (size_t)(s.NH * s.HD), kv = (size_t)(2 * s.NKV * s.HD), width = q + kv, rows = (size_t)s.T;
        float *qkv = normals(rows * width, 1, 1), *out = floats(rows * q), *lse = floats(rows * (size_t)s.NH);
        float *cache = floats(rows * kv), *got = floats(q), *first = NULL;
        void* scratch = xmalloc(attention_forward_scratch());
        attention_forward(out, lse, scratch, qkv, NULL, s);
        for (size_t t = 0; t < rows; t++) { memcpy(cache + t * kv, qkv + t * width + q, kv * sizeof(float)); }
        double* want = widened(out + (rows - 1) * q, q);
        for (int t = 0; t < NUM_THREAD_COUNTS; t++) {
            use_threads(t);
            attention_decode(got, qkv + (rows - 1) * width, cache, s.T, s);
            check_close("decoded", got, NULL, want, q, 1e-5);
            if (first) { check_same_bits("decoded", first, got, q, t); }
            free(first);
            first = copied(got, q);
        }
        free(first), free(qkv), free(out), free(lse), free(cache), free(got), free(want), free(scratch);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// swiglu

typedef struct {
    double *gate_up, *dout;
    size_t N, F;
} SwigluCase;

static double swiglu_loss(const void* ctx) {
    const SwigluCase* c = (const SwigluCase*)ctx;
    double sum = 0;
    for (size_t i = 0; i < c->N * c->F; i++) {
        const double* row = c->gate_up + i / c->F * 2 * c->F;
        const double gate = row[i % c->F], up = row[i % c->F + c->F];
        sum += gate / (1 + exp(-gate)) * up * c->dout[i];
    }
    return sum;
}

/* Simulates the blocks of a walk: a part of a sum takes time 1, and is seen 0.2 after it was added. Returns the time of the
 * last part; -1 if a part waits for one that comes later in the list of work, or if a sum lacks parts. */
static double walk_simulated(WalkOrder o, uint32_t group) {
    const size_t blocks = (size_t)o.step * o.together, sums = (size_t)o.heads * group * o.tiles;
    uint32_t* added = (uint32_t*)xcalloc(sums, sizeof *added);
    double *when = (double*)xcalloc(sums, sizeof *when), *time = (double*)xcalloc(blocks, sizeof *time), last = 0;
    WalkPiece* pieces = (WalkPiece*)xcalloc(blocks, sizeof *pieces);
    bool right = true;
    for (size_t i = 0; i < blocks; i++) { pieces[i] = walk_begin(o, (uint32_t)i); }
    for (bool at_work = true; at_work;) {
        at_work = false;
        for (size_t i = 0; i < blocks; i++) {
            const WalkPiece piece = pieces[i];
            if (piece.head >= o.heads) { continue; }
            at_work = true;
            pieces[i] = walk_next(o, piece);
            const uint32_t tile = walk_tile(o, piece);
            for (uint32_t h = 0; h < group; h++) {
                for (uint32_t m = tile; m < o.tiles; m++) {
                    const size_t sum = ((size_t)piece.head * group + h) * o.tiles + m;
                    right &= added[sum] == walk_before(o, tile, m);
                    time[i] = fmax(time[i] + 1, added[sum]++ > 0 ? when[sum] + 0.2 : 0);
                    when[sum] = time[i];
                }
            }
            last = fmax(last, time[i]);
        }
    }
    for (size_t i = 0; i < sums; i++) { right &= added[i] == i % o.tiles + 1; }
    free(added);
    free(when);
    free(time);
    free(pieces);
    return right ? last : -1;
}

/* In any order, and with fewer blocks than share a head's tiles, as on the emulated card. */
TEST(parts_of_a_walk_wait_only_for_earlier_pieces) {
    for (uint32_t tiles = 1; tiles <= 13; tiles++) {
        for (uint32_t blocks = 1; blocks <= tiles + 1; blocks++) {
            for (uint32_t processors = 1; processors <= 3 * blocks; processors += 1 + processors / 3) {
                const WalkOrder o = walk_order_of(3, 2, (int)tiles * 128 - 5, blocks, processors);
                CHECK(o.step * o.together <= processors && walk_simulated(o, 2) > 0, "%u tiles, %u blocks", tiles, blocks);
            }
        }
    }
}

/* The share of a card that a walk keeps at work, waits and all. */
TEST(a_walk_keeps_the_card_at_work_at_any_length) {
    static const struct {
        int T, NKV, processors, blocks, percent;  // blocks of a head; percent of the card
    } cases[] = {{1000, 8, 132, 4, 20},   {4096, 8, 132, 16, 94},  {5120, 8, 132, 16, 86},   {6144, 8, 132, 16, 86},
                 {8192, 8, 132, 32, 95},  {10240, 8, 132, 33, 89}, {12288, 8, 132, 16, 96},  {16384, 8, 132, 64, 95},
                 {20480, 8, 132, 33, 95}, {24576, 8, 132, 33, 98}, {32768, 2, 132, 128, 94}, {65536, 1, 132, 132, 97},
                 {20480, 4, 132, 33, 95}, {8192, 8, 114, 14, 94},  {16384, 8, 78, 39, 91},   {8200, 1, 132, 33, 22}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const WalkOrder o = walk_order(1, cases[i].NKV, cases[i].T, cases[i].processors);
        const double pairs = (double)o.heads * o.tiles * (o.tiles + 1) / 2, time = walk_simulated(o, 4) / 4;
        const double percent = pairs / time * 100 / cases[i].processors;
        CHECK(o.blocks == (uint32_t)cases[i].blocks && percent >= cases[i].percent, "T %d, %d heads: %u blocks a head, %.1f %%",
              cases[i].T, cases[i].NKV, o.blocks, percent);
        CHECK(time <= 1.02 * walk_time(o), "T %d: a time of %.0f was foreseen, it is %.0f", cases[i].T, walk_time(o), time);
        CHECK(walk_order(7, cases[i].NKV, cases[i].T, cases[i].processors).blocks == o.blocks,
              "T %d: seven rows have another order than one", cases[i].T);
    }
}

TEST(swiglu_and_its_gradient_match) {
    static const int sizes[][2] = {{1, 1}, {3, 16}, {20, 37}, {2, 770}};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        const size_t N = (size_t)sizes[s][0], F = (size_t)sizes[s][1];
        float *x = normals(N * 2 * F, 3, 1), *dout = normals(N * F, 1, 2), *out = floats(N * F), *dx = floats(N * 2 * F);
        x[0] = -200;  // exp(200) in the sigmoid overflows
        SwigluCase c = {widened(x, N * 2 * F), widened(dout, N * F), N, F};
        double* want = doubles(N * F);
        for (size_t i = 0; i < N * F; i++) {
            const double gate = c.gate_up[i / F * 2 * F + i % F], up = c.gate_up[i / F * 2 * F + i % F + F];
            want[i] = gate / (1 + exp(-gate)) * up;
        }
        float *first_o = NULL, *first_d = NULL;
        for (int t = 0; t < NUM_THREAD_COUNTS; t++) {
            use_threads(t);
            memset(dx, 0xff, N * 2 * F * sizeof(float));
            swiglu_forward(out, x, N, (int)F);
            swiglu_backward(dx, dout, x, N, (int)F);
            if (t == 0) {
                check_close("out", out, NULL, want, N * F, 1e-5);
                check_gradient("dgate_up", dx, NULL, c.gate_up, N * 2 * F, 100, swiglu_loss, &c, 1e-5);
                first_o = copied(out, N * F), first_d = copied(dx, N * 2 * F);
            }
            check_same_bits("out", first_o, out, N * F, t);
            check_same_bits("dgate_up", first_d, dx, N * 2 * F, t);
        }
        free(x), free(dout), free(out), free(dx), free(want), free(first_o), free(first_d), free(c.gate_up), free(c.dout);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// cross-entropy

TEST(crossentropy_and_its_gradient_match) {
    static const int sizes[][2] = {{1, 1}, {4, 3}, {9, 16}, {30, 1001}, {3, 4096}};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        const size_t N = (size_t)sizes[s][0], V = (size_t)sizes[s][1];
        const float dloss = 0.25f;
        float *logits = normals(N * V, 4, 1), *losses = floats(N), *losses2 = floats(N);
        float *first_l = NULL, *first_d = NULL;
        int32_t* targets = (int32_t*)xmalloc(N * sizeof *targets);
        double *want = doubles(N), *dwant = doubles(N * V);
        for (size_t i = 0; i < V; i++) { logits[i] += 300; }  // exp(300) overflows
        for (size_t n = 0; n < N; n++) {
            targets[n] = (int32_t)(n == 0 ? V - 1 : philox_below(1, RAND_SAMPLE, 0, n, V));
            if (n % 3 == 1) {
                targets[n] = -1;  // not trained: `want` and `dwant` are 0
                continue;
            }
            double total = 0;
            const float* row = logits + n * V;
            for (size_t v = 0; v < V; v++) { total += exp((double)row[v] - (double)row[targets[n]]); }
            want[n] = log(total);
            for (size_t v = 0; v < V; v++) {
                const double p = exp((double)row[v] - (double)row[targets[n]]) / total;
                dwant[n * V + v] = (p - (v == (size_t)targets[n])) * (double)dloss;
            }
        }
        for (int t = 0; t < NUM_THREAD_COUNTS; t++) {
            use_threads(t);
            float* d = copied(logits, N * V);
            crossentropy_forward(losses, logits, targets, N, (int)V);
            crossentropy_fused(losses2, d, targets, dloss, N, (int)V);
            check_close("losses", losses, NULL, want, N, 1e-5);
            check_close("dlogits", d, NULL, dwant, N * V, 1e-6);
            check_same_bits("losses of the fused form", losses, losses2, N, t);
            for (size_t n = 1; n < N; n += 3) {
                for (size_t v = 0; v < V; v++) { CHECK(d[n * V + v] == 0 && losses[n] == 0, "row %zu is not 0", n); }
            }
            if (first_l) {
                check_same_bits("losses", first_l, losses, N, t);
                check_same_bits("dlogits", first_d, d, N * V, t);
            }
            free(first_l), free(first_d);
            first_l = copied(losses, N), first_d = d;
        }
        free(logits), free(losses), free(losses2), free(first_l), free(first_d), free(targets), free(want), free(dwant);
    }
}

/* Denormal gradients would make the products that use them ten times slower. */
TEST(crossentropy_leaves_no_denormals) {
    enum { V = 1000 };
    float logits[V], loss = 0;
    const int32_t target = 0;
    for (int v = 0; v < V; v++) { logits[v] = -0.1f * (float)v; }
    crossentropy_fused(&loss, logits, &target, 1e-3f, 1, V);
    for (int v = 0; v < V; v++) { CHECK(logits[v] == 0 || isnormal(logits[v]), "dlogit %d is %g", v, (double)logits[v]); }
}

TEST(crossentropy_of_nan_is_nan) {
    enum { V = 70 };
    for (int at = 0; at < V; at++) {
        float logits[V], loss = 0;
        const int32_t target = 1;
        for (int v = 0; v < V; v++) { logits[v] = v == at ? NAN : 1.0f; }
        crossentropy_forward(&loss, logits, &target, 1, V);
        CHECK(isnan(loss), "a NaN at %d gives the loss %f", at, (double)loss);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// adamw

TEST(adamw_takes_pytorchs_steps) {
    static const size_t sizes[] = {1, 7, 16, 1000, 70001};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        const size_t n = sizes[s];
        float *p0 = normals(n, 1, 1), *g = normals(n, 1, 2), *first = NULL;
        for (int t = 0; t < NUM_THREAD_COUNTS; t++) {
            use_threads(t);
            float *p = copied(p0, n), *m = (float*)xcalloc(n, sizeof(float)), *v = (float*)xcalloc(n, sizeof(float));
            double *wp = widened(p0, n), *wm = doubles(n), *wv = doubles(n);
            AdamW h = {0.05f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.5f, 0};
            for (h.step = 1; h.step <= 5; h.step++) {
                adamw_update(p, g, m, v, n, &h);
                for (size_t i = 0; i < n; i++) {
                    const double gi = 0.5 * (double)g[i];
                    wp[i] *= 1 - 0.05 * 0.1;
                    wm[i] = 0.9 * wm[i] + 0.1 * gi;
                    wv[i] = 0.95 * wv[i] + 0.05 * gi * gi;
                    const double mhat = wm[i] / (1 - pow(0.9, (double)h.step)), vhat = wv[i] / (1 - pow(0.95, (double)h.step));
                    wp[i] -= 0.05 * mhat / (sqrt(vhat) + 1e-8);
                }
            }
            check_close("p", p, NULL, wp, n, 1e-6);
            check_close("m", m, NULL, wm, n, 1e-6);
            check_close("v", v, NULL, wv, n, 1e-6);
            if (first) { check_same_bits("p", first, p, n, t); }
            free(first), free(m), free(v), free(wp), free(wm), free(wv);
            first = p;
        }
        free(first), free(p0), free(g);
    }
}

/* Replaces x (rows, cols) by what Newton and Schulz's five steps make of it, by the formula of muon.h. */
static void orthogonalize_in_double(double* x, size_t rows, size_t cols) {
    const size_t n = rows * cols, m = size_min(rows, cols), k = size_max(rows, cols), row = rows > cols ? 1 : k,
                 col = rows > cols ? m : 1;  // X (m, k) is x, or its transpose
    double *a = doubles(m * m), *c = doubles(m * m), *moved = doubles(n);
    const double norm = fmax(sqrt(dot(x, x, n)), 1e-7);
    for (size_t i = 0; i < n; i++) { x[i] /= norm; }
    for (int step = 0; step < 5; step++) {
        for (size_t i = 0; i < m * m; i++) {
            a[i] = 0;
            for (size_t q = 0; q < k; q++) { a[i] += x[i / m * row + q * col] * x[i % m * row + q * col]; }
        }
        for (size_t i = 0; i < m * m; i++) {
            c[i] = -4.775 * a[i];
            for (size_t q = 0; q < m; q++) { c[i] += 2.0315 * a[i / m * m + q] * a[q * m + i % m]; }
        }
        for (size_t i = 0; i < n; i++) {
            const size_t r = i / k, q = i % k;
            moved[r * row + q * col] = 3.4445 * x[r * row + q * col];
            for (size_t j = 0; j < m; j++) { moved[r * row + q * col] += c[r * m + j] * x[j * row + q * col]; }
        }
        memcpy(x, moved, n * sizeof *x);
    }
    free(a), free(c), free(moved);
}

/* Two steps on matrices whose gradient has full rank, rank 1, or is zero. */
TEST(muon_takes_pytorchs_steps) {
    static const size_t shapes[][2] = {{24, 70}, {97, 40}, {133, 150}, {1, 9}, {5, 1}};
    for (size_t s = 0; s < 3 * sizeof shapes / sizeof *shapes; s++) {
        const size_t rows = shapes[s / 3][0], cols = shapes[s / 3][1], n = rows * cols, kind = s % 3;
        float *p0 = normals(n, 1, 1), *g = normals(n, 1, 2), *first = NULL;
        for (size_t i = 0; i < n && kind > 0; i++) { g[i] = kind == 1 ? g[i % cols] * (float)(1 + i / cols) : 0; }
        for (int t = 0; t < NUM_THREAD_COUNTS; t++) {
            use_threads(t);
            void* scratch = xmalloc(muon_scratch(rows, cols, sizeof(float), 1).end + matmul_scratch());
            float *p = copied(p0, n), *m = (float*)xcalloc(n, sizeof(float));
            double *wp = widened(p0, n), *wm = doubles(n), *x = doubles(n);
            for (int step = 1; step <= 2; step++) {
                float* u = copied(g, n);
                muon_prepare(u, m, n, 0.95, 0.5f);
                muon_orthogonalize(u, rows, cols, scratch);
                muon_update(p, u, n, 1 - 0.05 * 0.1, muon_rate(0.05, 0.2, rows, cols));
                for (size_t i = 0; i < n; i++) {
                    wm[i] += 0.05 * (0.5 * (double)g[i] - wm[i]);
                    x[i] = 0.05 * 0.5 * (double)g[i] + 0.95 * wm[i];
                }
                orthogonalize_in_double(x, rows, cols);
                for (size_t i = 0; i < n; i++) {
                    wp[i] += -0.05 * 0.1 * wp[i] - 0.05 * 0.2 * sqrt((double)(rows > cols ? rows : cols)) * x[i];
                }
                double off = 0;
                for (size_t i = 0; i < n; i++) { off += ((double)u[i] - x[i]) * ((double)u[i] - x[i]); }
                CHECK(off <= 2e-4 * 2e-4 * dot(x, x, n), "shape %zu x %zu: X is off by %g", rows, cols,
                      sqrt(off / dot(x, x, n)));
                free(u);
            }
            check_close("p", p, NULL, wp, n, 1e-5);
            check_close("m", m, NULL, wm, n, 1e-6);
            if (first) { check_same_bits("p", first, p, n, t); }
            free(first), free(m), free(wp), free(wm), free(x), free(scratch);
            first = p;
        }
        free(first), free(p0), free(g);
    }
}

TEST(global_norm_is_the_same_for_any_thread_count) {
    static const size_t sizes[] = {1, 5, 16384, 16385, 100003};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        const size_t n = sizes[s];
        float* g = normals(n, 1, 1);
        void* scratch = xmalloc(global_norm_scratch(n));
        double *wide = widened(g, n), first = 0;
        for (int t = 0; t < NUM_THREAD_COUNTS; t++) {
            use_threads(t);
            const double norm = global_norm(g, n, scratch), want = sqrt(dot(wide, wide, n));
            CHECK(fabs(norm - want) <= 1e-12 * want, "norm of %zu is %.17g, wanted %.17g", n, norm, want);
            CHECK(t == 0 || norm == first, "norm of %zu differs with thread count no. %d", n, t);
            first = norm;
        }
        free(g), free(scratch), free(wide);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// lora

/* The adapters beside one product in double: its inputs and weights, and the gradient of y. */
typedef struct {
    const Lora* l;
    size_t N;
    double *x, *w, *dy;
} LoraLoss;

/* Returns sum(dy * y), y being the adapters' part alone. */
static double lora_loss(const void* ctx) {
    const LoraLoss* p = (const LoraLoss*)ctx;
    const Lora* l = p->l;
    const size_t C = (size_t)l->C, OC = (size_t)l->OC, r = (size_t)l->r;
    double sum = 0;
    for (size_t n = 0; n < p->N; n++) {
        for (size_t i = 0; i < (size_t)l->parts * r; i++) {
            const double t = (double)l->scale * dot(p->x + n * C, p->w + l->a + i * C, C);
            for (size_t o = 0; o < (size_t)l->width[i / r]; o++) {
                sum += p->dy[n * OC + (size_t)l->first[i / r] + o] * t * p->w[l->b[i / r] + o * r + i % r];
            }
        }
    }
    return sum;
}

/* Compares the plain loops with differences of lora_loss(), and the functions that the model calls with the plain loops. */
static void check_lora(const Lora* l, size_t elements, size_t N, void* scratch) {
    const size_t nx = N * (size_t)l->C, ny = N * (size_t)l->OC, nt = N * (size_t)(l->parts * l->r);
    float *x = normals(nx, 1, 1), *w = normals(elements, 0.5, 2), *dy = normals(ny, 1, 3), *y = normals(ny, 1, 4);
    float *y0 = copied(y, ny), *dx = normals(nx, 1, 5), *dw = normals(elements, 1, 6), *t = floats(nt), *dt = floats(nt);
    float *dx0 = copied(dx, nx), *dw0 = copied(dw, elements);
    const LoraMemory plain = {w, dw, t, dt};
    lora_forward_plain(y, &plain, x, l, N);
    lora_backward_plain(dx, &plain, dy, x, l, N);
    const LoraLoss loss = {l, N, widened(x, nx), widened(w, elements), widened(dy, ny)};
    double added = 0;
    for (size_t i = 0; i < ny; i++) { added += (double)dy[i] * ((double)y[i] - (double)y0[i]); }
    CHECK(fabs(added - lora_loss(&loss)) <= 1e-5 * (double)ny, "y: %g, wanted %g", added, lora_loss(&loss));
    check_gradient("dx", dx, dx0, loss.x, nx, 20, lora_loss, &loss, 1e-4);
    check_gradient("dw", dw, dw0, loss.w, elements, 200, lora_loss, &loss, 1e-4);
    float *y1 = floats(ny), *t1 = floats(nt), *dx1 = floats(nx), *dw1 = floats(elements), *first = NULL;
    double *wy = widened(y, ny), *wdx = widened(dx, nx), *wdw = widened(dw, elements);
    const LoraMemory fast = {w, dw1, t1, dt};
    for (int i = 0; i < NUM_THREAD_COUNTS; i++) {
        use_threads(i);
        memcpy(y1, y0, ny * sizeof(float)), memcpy(dx1, dx0, nx * sizeof(float)), memcpy(dw1, dw0, elements * sizeof(float));
        lora_forward(y1, scratch, &fast, x, l, N);
        lora_backward(dx1, scratch, &fast, dy, x, l, N);
        check_close("y", y1, NULL, wy, ny, 1e-5);
        check_close("dx", dx1, NULL, wdx, nx, 1e-5);
        check_close("dw", dw1, NULL, wdw, elements, 1e-5);
        if (!first) { first = copied(dw1, elements); }
        check_same_bits("dw", first, dw1, elements, i);
    }
    free(x), free(w), free(dy), free(y), free(y0), free(dx), free(dw), free(t), free(dt), free(dx0), free(dw0), free(loss.x);
    free(loss.w), free(loss.dy), free(y1), free(t1), free(dx1), free(dw1), free(first), free(wy), free(wdx), free(wdw);
}

TEST(lora_and_its_gradients_are_the_plain_loops) {
    const LoraConfig cases[] = {{4, 8, 0x7f}, {3, 1.5, 0x05}, {33, 33, 0x6a}};  // all; q, v; k, o, up, down
    void* scratch = xmalloc(matmul_scratch());
    ModelConfig c;
    memset(&c, 0, sizeof c);
    c.hidden_size = 40, c.intermediate_size = 72, c.num_layers = 2, c.num_heads = 5, c.num_kv_heads = 1, c.head_dim = 6;
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        c.lora = cases[k];
        ParamTable t = trained_table(&c);
        int parts = 0;
        for (int i = 0; i < BLOCK_LINEARS; i++) {
            const Lora l = lora_at(&c, &t, (LinearKind)i, 1);
            parts += l.parts;
            check_lora(&l, t.elements, 1, scratch);
            check_lora(&l, t.elements, 70, scratch);
        }
        CHECK(2 * 2 * parts == t.count, "%d parts, %d tensors in two blocks", parts, t.count);
        param_table_free(&t);
    }
    free(scratch);
}

int main(void) {
    use_threads(NUM_THREAD_COUNTS - 1);
    packed = xmalloc(matmul_scratch());
    memset(packed, 0xff, matmul_scratch());  // may contain anything
#ifdef LLMC_AMX
    if (amx_available()) {
        RUN(amx_products_of_any_shape_and_stride_are_those_of_fp32);
        RUN(amx_products_of_whole_numbers_are_exact);
        RUN(amx_products_that_cancel_leave_no_more_than_rounding);
        RUN(amx_products_of_the_largest_floats_are_finite);
        RUN(amx_products_of_tiny_numbers_lose_only_what_is_denormal);
        RUN(amx_lets_nan_and_infinity_through_and_not_around);
    } else {
        SKIP("amx_*", "the kernel does not let this process use the matrix unit");
    }
#endif
    return test_all();
}
