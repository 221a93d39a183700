/* test_attention.cu -- compares every attention kernel of this build, and the CPU oracle attention.h, with a reference in
 * double precision. The reference shares no code with them.
 *
 *   nvcc -std=c++17 -O3 -DPRECISION_BF16 -gencode arch=compute_90a,code=sm_90a -Xcompiler -fopenmp -diag-suppress 1675 \
 *        -I. -o test_attention dev/test/cuda/test_attention.cu && ./test_attention [plain|mma|wgmma|walk [TEST]]
 *
 * With -DBARRIER_TIMEOUT=200000000ull a wgmma kernel that hangs reports where, and the test continues.
 *
 * Inputs are rounded to floatX first, so that only the kernels' own rounding is measured. The measure is the relative L2 error
 * of each of out, lse, dq, dk and dv: it shows a wrong scale, a wrong head and a missing tile. Outputs, and the gaps between
 * their rows, are filled with NaN before each run: this shows what a kernel leaves out or writes outside its rows.
 */
#include <initializer_list>

#include "llmc/attention.cuh"
#include "llmc/attention.h"
#include "llmc/base/rand.h"
#include "dev/test/oracles.h"
#include "dev/test/test.h"
#include "occupancy.cuh"
#include "uniform.cuh"

static const char* kernel_names[NUM_ATTENTION_KERNELS] = {"auto", "plain", "mma", "wgmma", "walk"};
static AttentionKernel only = ATTENTION_AUTO;  // AUTO: all kernels that this build has
static uint32_t walk_blocks;                   // of a walk, those that share a head's tiles; 0: as many as the card suits

struct Case : AttentionShape {
    float amplitude;  // of q and k: 1 is an ordinary softmax, 20 one whose weights are nearly all 0 or 1
    int longest;      // document of a row; 0: rows are not divided
};

// ---------------------------------------------------------------------------------------------------------------------
// reference

static double* new_doubles(size_t n) { return (double*)xcalloc(n, sizeof(double)); }

/* Fills x with uniform numbers in [-a, a], rounded to floatX. */
static void fill(float* x, size_t n, float a, uint32_t stream) {
    for (size_t i = 0; i < n; i++) {
        const double u = philox_double(philox(1234, RAND_SAMPLE, stream, i), 0, 1);
        x[i] = to_float(from_float<floatX>((float)((2 * u - 1) * a)));
    }
}

/* Computes out, lse and dqkv of packed rows without gaps, straight from the formulas at the top of attention.cuh. */
static void reference(const Case* c, const float* qkv, const int32_t* starts, const float* dout, double* out, double* lse,
                      double* dqkv) {
    const size_t T = (size_t)c->T, HD = (size_t)c->HD, NH = (size_t)c->NH, NKV = (size_t)c->NKV;
    const size_t W = (NH + 2 * NKV) * HD, O = NH * HD, group = NH / NKV;
    const double scale = 1 / sqrt((double)HD);
#pragma omp parallel for collapse(2)
    for (size_t b = 0; b < (size_t)c->B; b++) {
        for (size_t kv = 0; kv < NKV; kv++) {
            double *p = new_doubles(T), *ds = new_doubles(T);
            for (size_t h = kv * group; h < (kv + 1) * group; h++) {
                for (size_t t = 0; t < T; t++) {
                    const size_t row = b * T + t, first = starts ? (size_t)starts[row] : 0;
                    const float *q = qkv + row * W + h * HD, *d = dout + row * O + h * HD;
                    double *o = out + row * O + h * HD, *dq = dqkv + row * W + h * HD;
                    double m = -INFINITY, l = 0, D = 0;
                    for (size_t u = first; u <= t; u++) {
                        const float* k = qkv + (b * T + u) * W + (NH + kv) * HD;
                        p[u] = 0;
                        for (size_t i = 0; i < HD; i++) { p[u] += scale * q[i] * k[i]; }
                        m = p[u] > m ? p[u] : m;
                    }
                    for (size_t u = first; u <= t; u++) { l += exp(p[u] - m); }
                    lse[(b * NH + h) * T + t] = m + log(l);
                    for (size_t u = first; u <= t; u++) {
                        const float* v = qkv + (b * T + u) * W + (NH + NKV + kv) * HD;
                        p[u] = exp(p[u] - m) / l;
                        ds[u] = 0;
                        for (size_t i = 0; i < HD; i++) {
                            o[i] += p[u] * v[i];
                            ds[u] += (double)d[i] * v[i];
                        }
                        D += p[u] * ds[u];
                    }
                    for (size_t u = first; u <= t; u++) {
                        const float* k = qkv + (b * T + u) * W + (NH + kv) * HD;
                        double *dk = dqkv + (b * T + u) * W + (NH + kv) * HD, *dv = dk + NKV * HD;
                        ds[u] = p[u] * (ds[u] - D) * scale;
                        for (size_t i = 0; i < HD; i++) {
                            dq[i] += ds[u] * k[i];
                            dk[i] += ds[u] * q[i];
                            dv[i] += p[u] * d[i];
                        }
                    }
                }
            }
            free(p);
            free(ds);
        }
    }
}

/* Returns |x - ref| / max(|ref|, floor) over columns [from, to) of rows `pitch` (x) and `width` (ref) apart; NaN if x has a
 * NaN. */
static double error_of(const float* x, size_t pitch, const double* ref, size_t width, size_t rows, size_t from, size_t to,
                       double floor) {
    double diff = 0, norm = 0;
    for (size_t r = 0; r < rows; r++) {
        for (size_t i = from; i < to; i++) {
            const double e = x[r * pitch + i] - ref[r * width + i];
            diff += e * e;
            norm += ref[r * width + i] * ref[r * width + i];
        }
    }
    return sqrt(diff) / fmax(sqrt(norm), floor);
}

/* Returns the largest error_of() of a row's documents, each taken alone: in an error over the whole tensor a few wrong keys
 * would drown. The floor of a document is `part` of its dv. */
static double worst_document(const Case* c, const int32_t* starts, const float* x, size_t pitch, const double* ref,
                             size_t width, size_t from, size_t to, const double* dqkv, double part) {
    const size_t N = (size_t)c->B * c->T, O = (size_t)c->NH * c->HD, KV = (size_t)c->NKV * c->HD, W = O + 2 * KV;
    double worst = 0;
    for (size_t first = 0, end = 0; first < N; first = end) {
        for (end = first + 1; end < N && end % c->T != 0 && starts[end] == starts[first]; end++) {}
        double dv = 0;
        for (size_t i = first * W; i < end * W; i++) { dv += i % W >= O + KV ? dqkv[i] * dqkv[i] : 0; }
        const double e = error_of(x + first * pitch, pitch, ref + first * width, width, end - first, from, to, part * sqrt(dv));
        worst = e > worst || isnan(e) ? e : worst;
    }
    return worst;
}

// ---------------------------------------------------------------------------------------------------------------------
// one case on the GPU

static floatX* upload(const float* x, size_t rows, size_t width, size_t pitch) {
    const size_t n = rows * pitch;
    floatX *host = (floatX*)xmalloc(n * sizeof(floatX)), *device = NULL;
    for (size_t i = 0; i < n; i++) { host[i] = from_float<floatX>(NAN); }
    for (size_t r = 0; r < rows; r++) {
        for (size_t i = 0; i < width; i++) { host[r * pitch + i] = from_float<floatX>(x[r * width + i]); }
    }
    CUDA_CHECK(cudaMalloc((void**)&device, n * sizeof(floatX)));
    CUDA_CHECK(cudaMemcpy(device, host, n * sizeof(floatX), cudaMemcpyHostToDevice));
    free(host);
    return device;
}

/* Uploads starts (N); NULL stays NULL. */
static int32_t* upload_starts(const int32_t* starts, size_t N) {
    int32_t* device = NULL;
    if (!starts) { return NULL; }
    CUDA_CHECK(cudaMalloc((void**)&device, N * sizeof *starts));
    CUDA_CHECK(cudaMemcpy(device, starts, N * sizeof *starts, cudaMemcpyHostToDevice));
    return device;
}

static void download(float* out, const floatX* device, size_t n) {
    floatX* host = (floatX*)xmalloc(n * sizeof(floatX));
    CUDA_CHECK(cudaMemcpy(host, device, n * sizeof(floatX), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < n; i++) { out[i] = to_float(host[i]); }
    free(host);
}

/* Returns whether the columns past `width` still hold the initial NaN. */
static bool gaps_untouched(const float* x, size_t rows, size_t width, size_t pitch) {
    for (size_t r = 0; r < rows; r++) {
        for (size_t i = width; i < pitch; i++) {
            if (!isnan(x[r * pitch + i])) { return false; }
        }
    }
    return true;
}

/* Runs attention_backward_cuda, or a walk with `walk_blocks`. */
static void run_backward(AttentionKernel kernel, floatX* dqkv, void* scratch, const floatX* dout, const AttentionTensorsX& f,
                         int B, const AttentionArgs& s) {
    if (kernel != ATTENTION_WALK || walk_blocks == 0) {
        return attention_backward_cuda(dqkv, scratch, dout, f, B, s, 0, kernel);
    }
#ifndef PRECISION_FP32
    const WalkOrder order = walk_order_of(B, s.NKV, s.T, walk_blocks, (size_t)this_card()->processors);
    float2* stats = (float2*)scratch;
    attention_stats(stats, dout, f, B, s, 0);
    attention_walk_backward(dqkv, (float*)(stats + (size_t)B * s.NH * s.stat_rows), stats, dout, f.qkv, order, s, 0);
#endif
}

static void run_kernel(const Case* c, AttentionKernel kernel, const float* qkv, const int32_t* starts, const float* dout,
                       const double* out, const double* lse, const double* dqkv) {
    const size_t N = (size_t)c->B * c->T, HD = c->HD, O = c->NH * HD, KV = c->NKV * HD, W = O + 2 * KV, stats = N * c->NH;
    const size_t unit = 16 / sizeof(floatX), qkv_pitch = round_up(W, unit) + unit, out_pitch = round_up(O, unit) + 2 * unit;
    const size_t scratch_size = attention_backward_scratch_cuda(*c, kernel == ATTENTION_WALK);
    int32_t* d_starts = upload_starts(starts, N);
    const AttentionArgs args = attention_args(*c, qkv_pitch, out_pitch, d_starts);
    floatX *d_qkv = upload(qkv, N, W, qkv_pitch), *d_dout = upload(dout, N, O, out_pitch), *d_out, *d_dqkv;
    float* d_lse;
    void* d_scratch;
    CUDA_CHECK(cudaMalloc((void**)&d_out, N * out_pitch * sizeof(floatX)));
    CUDA_CHECK(cudaMalloc((void**)&d_dqkv, N * qkv_pitch * sizeof(floatX)));
    CUDA_CHECK(cudaMalloc((void**)&d_lse, stats * sizeof(float)));
    CUDA_CHECK(cudaMalloc(&d_scratch, scratch_size));
    float* got[2][3];  // out, lse, dqkv of two runs
    for (int run = 0; run < 2; run++) {
        // all bits set is a NaN in every type
        CUDA_CHECK(cudaMemset(d_out, 0xff, N * out_pitch * sizeof(floatX)));
        CUDA_CHECK(cudaMemset(d_dqkv, 0xff, N * qkv_pitch * sizeof(floatX)));
        CUDA_CHECK(cudaMemset(d_lse, 0xff, stats * sizeof(float)));
        CUDA_CHECK(cudaMemset(d_scratch, 0xff, scratch_size));
        attention_forward_cuda(d_out, d_lse, d_qkv, c->B, args, 0, kernel);
        run_backward(kernel, d_dqkv, d_scratch, d_dout, {d_qkv, d_out, d_lse}, c->B, args);
        CUDA_CHECK(cudaDeviceSynchronize());
#ifdef BARRIER_TIMEOUT
        unsigned long long stuck = 0;
        CUDA_CHECK(cudaMemcpyFromSymbol(&stuck, barrier_stuck, sizeof stuck));
        CHECK(stuck == 0,
              "%s B %d T %d NH %d NKV %d HD %d: block %llu thread %llu waited too long for the barrier at %llu, parity %llu",
              kernel_names[kernel], c->B, c->T, c->NH, c->NKV, c->HD, stuck >> 48, stuck >> 32 & 0xffff,
              (stuck & 0xffffffff) >> 2, stuck >> 1 & 1);
        stuck = 0;
        CUDA_CHECK(cudaMemcpyToSymbol(barrier_stuck, &stuck, sizeof stuck));
#endif
        got[run][0] = (float*)xmalloc(N * out_pitch * sizeof(float));
        got[run][1] = (float*)xmalloc(stats * sizeof(float));
        got[run][2] = (float*)xmalloc(N * qkv_pitch * sizeof(float));
        download(got[run][0], d_out, N * out_pitch);
        CUDA_CHECK(cudaMemcpy(got[run][1], d_lse, stats * sizeof(float), cudaMemcpyDeviceToHost));
        download(got[run][2], d_dqkv, N * qkv_pitch);
    }
    double dv_norm = 0;
    for (size_t i = 0; i < N * W; i++) { dv_norm += i % W >= O + KV ? dqkv[i] * dqkv[i] : 0; }
    const double floor = 0.1 * sqrt(dv_norm);  // dq and dk of a single key are zero
    const bool steep = c->amplitude > 1;       // scores in the hundreds: one ulp of a score changes p visibly
#if defined(PRECISION_FP32)
    const double limit = steep ? 2e-4 : 4e-6;
#elif defined(PRECISION_BF16)
    const double limit = steep ? 1.5e-2 : 6e-3;
#else
    const double limit = steep ? 2.5e-3 : 8e-4;
#endif
    const double e_out = error_of(got[0][0], out_pitch, out, O, N, 0, O, 0),
                 e_lse = error_of(got[0][1], 1, lse, 1, stats, 0, 1, 0);
    const double e_dq = error_of(got[0][2], qkv_pitch, dqkv, W, N, 0, O, floor);
    const double e_dk = error_of(got[0][2], qkv_pitch, dqkv, W, N, O, O + KV, floor);
    const double e_dv = error_of(got[0][2], qkv_pitch, dqkv, W, N, O + KV, W, 0);
    const bool close = e_out <= limit && e_lse <= 2e-6 && e_dq <= limit && e_dk <= limit && e_dv <= limit;  // false for NaN
    CHECK(close,
          "%s B %d T %d NH %d NKV %d HD %d amplitude %g documents %d: errors out %.1e lse %.1e dq %.1e dk %.1e dv %.1e, limit "
          "%.1e",
          kernel_names[kernel], c->B, c->T, c->NH, c->NKV, c->HD, c->amplitude, c->longest, e_out, e_lse, e_dq, e_dk, e_dv,
          limit);
    if (starts && !steep) {
        const double w_out = worst_document(c, starts, got[0][0], out_pitch, out, O, 0, O, dqkv, 0);
        const double w_dq = worst_document(c, starts, got[0][2], qkv_pitch, dqkv, W, 0, O, dqkv, 0.1);
        const double w_dk = worst_document(c, starts, got[0][2], qkv_pitch, dqkv, W, O, O + KV, dqkv, 0.1);
        const double w_dv = worst_document(c, starts, got[0][2], qkv_pitch, dqkv, W, O + KV, W, dqkv, 0);
        const double worst = sizeof(floatX) == 4 ? 1e-4 : 6e-2;
        CHECK(w_out <= worst && w_dq <= worst && w_dk <= worst && w_dv <= worst,
              "%s B %d T %d NH %d NKV %d HD %d: errors of a document: out %.1e dq %.1e dk %.1e dv %.1e, limit %.1e",
              kernel_names[kernel], c->B, c->T, c->NH, c->NKV, c->HD, w_out, w_dq, w_dk, w_dv, worst);
    }
    CHECK(gaps_untouched(got[0][0], N, O, out_pitch) && gaps_untouched(got[0][2], N, W, qkv_pitch),
          "%s T %d HD %d wrote between rows", kernel_names[kernel], c->T, c->HD);
    CHECK(memcmp(got[0][0], got[1][0], N * out_pitch * sizeof(float)) == 0 &&
              memcmp(got[0][1], got[1][1], stats * sizeof(float)) == 0 &&
              memcmp(got[0][2], got[1][2], N * qkv_pitch * sizeof(float)) == 0,
          "%s B %d T %d HD %d: two runs differ", kernel_names[kernel], c->B, c->T, c->HD);
    for (int i = 0; i < 6; i++) { free(got[i / 3][i % 3]); }
    CUDA_CHECK(cudaFree(d_starts));
    CUDA_CHECK(cudaFree(d_qkv));
    CUDA_CHECK(cudaFree(d_dout));
    CUDA_CHECK(cudaFree(d_out));
    CUDA_CHECK(cudaFree(d_dqkv));
    CUDA_CHECK(cudaFree(d_lse));
    CUDA_CHECK(cudaFree(d_scratch));
}

/* Whether the tests run this kernel at this head dimension. A walk takes no documents. */
static bool is_tested(int kernel, int HD, bool documents) {
    return (only == ATTENTION_AUTO || only == kernel) && attention_has_kernel((AttentionKernel)kernel, HD) &&
           !(kernel == ATTENTION_WALK && documents);
}

/* Runs all kernels of this build on one case with these starts, (B, T) or NULL; with `oracle`, also checks attention.h. */
static void run_case_with(Case c, const int32_t* starts, bool oracle) {
    const size_t N = (size_t)c.B * c.T, O = (size_t)c.NH * c.HD, W = (size_t)(c.NH + 2 * c.NKV) * c.HD, stats = N * c.NH;
    float *qkv = (float*)xmalloc(N * W * sizeof(float)), *dout = (float*)xmalloc(N * O * sizeof(float));
    double *out = new_doubles(N * O), *lse = new_doubles(stats), *dqkv = new_doubles(N * W);
    fill(qkv, N * W, 1, (uint32_t)(c.T * 1000 + c.HD));
    fill(dout, N * O, 1, (uint32_t)(c.T * 1000 + c.HD + 1));
    for (size_t i = 0; i < N * W; i++) {
        if (i % W < O + (size_t)c.NKV * c.HD) { qkv[i] = to_float(from_float<floatX>(qkv[i] * c.amplitude)); }
    }
    reference(&c, qkv, starts, dout, out, lse, dqkv);
    if (oracle) {
        float *o = (float*)xmalloc(N * O * sizeof(float)), *l = (float*)xmalloc(stats * sizeof(float));
        float* d = (float*)xmalloc(N * W * sizeof(float));
        void* scratch = xmalloc(attention_backward_scratch(c));
        attention_forward(o, l, scratch, qkv, starts, c);
        attention_backward(d, scratch, dout, o, l, qkv, starts, c);
        const double e_out = error_of(o, O, out, O, N, 0, O, 0), e_d = error_of(d, W, dqkv, W, N, 0, W, 0);
        CHECK(e_out <= 2e-6 && e_d <= 4e-6, "oracle T %d HD %d: errors out %.1e gradients %.1e", c.T, c.HD, e_out, e_d);
        free(o);
        free(l);
        free(d);
        free(scratch);
    }
    for (int k = ATTENTION_PLAIN; k < NUM_ATTENTION_KERNELS; k++) {
        if (is_tested(k, c.HD, starts != NULL)) { run_kernel(&c, (AttentionKernel)k, qkv, starts, dout, out, lse, dqkv); }
    }
    free(qkv);
    free(dout);
    free(out);
    free(lse);
    free(dqkv);
}

/* Runs the case, with random documents if it has documents. */
static void run_case(Case c, bool oracle) {
    int32_t* starts = random_starts(c.B, c.T, c.longest);
    run_case_with(c, starts, oracle);
    free(starts);
}

// ---------------------------------------------------------------------------------------------------------------------
// tests

static const int head_dims[] = {10, 12, 16, 64, 96, 128, 256};
static const int heads[][2] = {{2, 2}, {4, 2}, {4, 1}, {3, 1}, {8, 2}};  // groups of 1, 2, 4, all, 4

static void every_head_dim_at_short_and_odd_lengths(void) {
    const int lengths[] = {1, 17, 200, 256};
    int turn = 0;
    for (int HD : head_dims) {
        for (int T : lengths) {
            const int* h = heads[turn++ % 5];
            Case c = {{1 + turn % 3, T, h[0], h[1], HD}, 1};
            run_case(c, true);
        }
    }
}

static void every_group_on_the_tensor_core_head_dims(void) {
    for (int HD : {64, 128}) {
        for (const int* h : heads) {
            Case c = {{2, 200, h[0], h[1], HD}, 1};
            run_case(c, false);
        }
    }
}

static void lengths_around_every_tile_edge(void) {
    for (int HD : {64, 128}) {
        for (int T : {31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 320, 385}) {
            Case c = {{1, T, 2, 1, HD}, 1};
            run_case(c, false);
        }
    }
}

static void a_thousand_tokens(void) {
    int turn = 0;
    for (int HD : head_dims) {
        const int* h = heads[turn++ % 4];
        Case c = {{HD == 64 ? 3 : 1, 1000, h[0], h[1], HD}, 1};
        run_case(c, false);
    }
}

static void rows_with_scores_in_the_hundreds(void) {
    for (int HD : head_dims) {
        Case c = {{1, 300, 4, 2, HD}, 20};
        run_case(c, false);
    }
}

static void documents_at_every_head_dim(void) {
    const int lengths[][2] = {{1, 1},     {17, 3},    {200, 1},   {200, 30},
                              {385, 150}, {385, 385}, {1000, 400}};  // T, longest document
    int turn = 0;
    for (int HD : head_dims) {
        for (const int* length : lengths) {
            const int* h = heads[turn++ % 5];
            Case c = {{1 + turn % 3, length[0], h[0], h[1], HD}, 1, length[1]};
            run_case(c, length[0] < 1000);
        }
    }
}

static void documents_around_every_tile_edge(void) {
    for (int HD : {64, 128}) {
        for (int T : {31, 63, 64, 65, 127, 128, 129, 191, 192, 193, 320}) {
            for (int longest : {8, 64, 130}) {
                Case c = {{2, T, 4, 2, HD}, 1, longest};
                run_case(c, false);
            }
        }
    }
}

/* Returns the starts (B, T) of rows with documents of these lengths, repeated. Row b begins with length number b * skip,
 * shortened by b * cut tokens. */
static int32_t* repeated_starts(int B, int T, const int* lengths, int count, int skip, int cut) {
    int32_t* starts = (int32_t*)xmalloc((size_t)B * T * sizeof *starts);
    for (int b = 0; b < B; b++) {
        int at = b * skip % count, start = 0, end = lengths[at] - b * cut % lengths[at];
        for (int t = 0; t < T; t++) {
            if (t == end) {
                start = t;
                at = (at + 1) % count;
                end += lengths[at];
            }
            starts[(size_t)b * T + t] = start;
        }
    }
    return starts;
}

/* Documents of 193 tokens begin at every offset in tiles of 64, 96, 128 and 192 rows: the next document begins one offset
 * further. Each of eight rows begins 24 documents further. */
static void documents_at_every_offset_in_a_tile(void) {
    const int length = 193, B = 8, T = 24 * length + 70;
    int32_t* starts = repeated_starts(B, T, &length, 1, 0, length - 24);
    for (int HD : {64, 128}) {
        Case c = {{B, T, 2, HD == 64 ? 1 : 2, HD}, 1, length};
        run_case_with(c, starts, false);
    }
    free(starts);
}

/* Neighbours in a row: single tokens; documents that end with a tile, or with a warpgroup's half of a tile; a document longer
 * than all tiles that a kernel holds at a time; and a rest, such as padding. */
static void documents_at_odds_with_tiles(void) {
    const int lengths[] = {64, 700, 1, 1, 1, 63, 128, 65, 2, 17, 191, 1, 400}, count = sizeof lengths / sizeof *lengths;
    const int B = 7, T = 1200;
    int32_t* starts = repeated_starts(B, T, lengths, count, 1, 0);
    int turn = 0;
    for (int HD : {64, 128}) {
        for (const int* h : heads) {
            Case c = {{HD == 64 ? B : 4, T - 37 * turn++, h[0], h[1], HD}, 1, 700};
            int32_t* rows = (int32_t*)xmalloc((size_t)c.B * c.T * sizeof *rows);
            for (size_t i = 0; i < (size_t)c.B * c.T; i++) { rows[i] = starts[i / c.T * T + i % c.T]; }
            run_case_with(c, rows, false);
            free(rows);
        }
    }
    free(starts);
}

static void documents_with_scores_in_the_hundreds(void) {
    for (int HD : head_dims) {
        Case c = {{2, 300, 2, 1, HD}, 20, 120};  // the documents of the two rows differ
        run_case(c, false);
    }
}

/* The GPU outputs of a kernel. */
typedef struct {
    floatX *out, *dqkv;
    float* lse;
} Results;

static Results new_results(AttentionShape s) {
    const size_t N = (size_t)s.B * s.T, W = (size_t)(s.NH + 2 * s.NKV) * s.HD, O = (size_t)s.NH * s.HD;
    Results r;
    CUDA_CHECK(cudaMalloc((void**)&r.out, N * O * sizeof(floatX)));
    CUDA_CHECK(cudaMalloc((void**)&r.dqkv, N * W * sizeof(floatX)));
    CUDA_CHECK(cudaMalloc((void**)&r.lse, N * s.NH * sizeof(float)));
    return r;
}

static void free_results(Results* r) {
    CUDA_CHECK(cudaFree(r->out));
    CUDA_CHECK(cudaFree(r->dqkv));
    CUDA_CHECK(cudaFree(r->lse));
}

/* The GPU inputs of a kernel, uniform numbers in rows without gaps, and the scratch of its backward pass. */
typedef struct {
    floatX *qkv, *dout;
    void* scratch;
} Inputs;

static Inputs new_inputs(AttentionShape s, AttentionKernel kernel) {
    const size_t N = (size_t)s.B * s.T, W = (size_t)(s.NH + 2 * s.NKV) * s.HD, O = (size_t)s.NH * s.HD;
    Inputs in;
    CUDA_CHECK(cudaMalloc((void**)&in.qkv, N * W * sizeof(floatX)));
    CUDA_CHECK(cudaMalloc((void**)&in.dout, N * O * sizeof(floatX)));
    CUDA_CHECK(cudaMalloc(&in.scratch, attention_backward_scratch_cuda(s, kernel == ATTENTION_WALK)));
    uniform_fill_cuda(in.qkv, N * W, 1);
    uniform_fill_cuda(in.dout, N * O, 2);
    return in;
}

static void free_inputs(Inputs* in) {
    CUDA_CHECK(cudaFree(in->qkv));
    CUDA_CHECK(cudaFree(in->dout));
    CUDA_CHECK(cudaFree(in->scratch));
}

/* Runs backward with a table of RoPE. dq and dk must equal the result without a table, turned back by rope_backward_cuda(), up
 * to one rounding. */
static void turned_back(AttentionKernel kernel, AttentionShape s, int longest) {
    const size_t N = (size_t)s.B * s.T, W = (size_t)(s.NH + 2 * s.NKV) * s.HD, O = (size_t)s.NH * s.HD, half = s.HD / 2;
    const size_t table_size = (size_t)s.T * s.HD, KV = (size_t)s.NKV * s.HD;
    float *host = (float*)xmalloc(table_size * sizeof(float)), *table;
    for (size_t i = 0; i < table_size; i++) {
        const double angle = (double)(i / s.HD) * pow(0.9, (double)(i % half));
        host[i] = (float)(i % s.HD < half ? cos(angle) : sin(angle));
    }
    CUDA_CHECK(cudaMalloc((void**)&table, table_size * sizeof(float)));
    CUDA_CHECK(cudaMemcpy(table, host, table_size * sizeof(float), cudaMemcpyHostToDevice));
    int32_t *starts = random_starts(s.B, s.T, longest), *d_starts = upload_starts(starts, N);
    AttentionArgs args = attention_args(s, W, O, d_starts);
    Results turned = new_results(s), plain = new_results(s);
    Inputs in = new_inputs(s, kernel);
    attention_forward_cuda(plain.out, plain.lse, in.qkv, s.B, args, 0, kernel);
    attention_backward_cuda(plain.dqkv, in.scratch, in.dout, {in.qkv, plain.out, plain.lse}, s.B, args, 0, kernel);
    rope_backward_cuda(plain.dqkv, d_starts, table, 0, s, W, 0);
    args.cos_sin = table;
    CUDA_CHECK(cudaMemset(turned.dqkv, 0xff, N * W * sizeof(floatX)));
    attention_backward_cuda(turned.dqkv, in.scratch, in.dout, {in.qkv, plain.out, plain.lse}, s.B, args, 0, kernel);
    CUDA_CHECK(cudaDeviceSynchronize());
    float *got = (float*)xmalloc(N * W * sizeof(float)), *want = (float*)xmalloc(N * W * sizeof(float));
    double* reference = new_doubles(N * W);
    download(got, turned.dqkv, N * W);
    download(want, plain.dqkv, N * W);
    for (size_t i = 0; i < N * W; i++) { reference[i] = want[i]; }
    const double e_dq = error_of(got, W, reference, W, N, 0, O, 0), e_dk = error_of(got, W, reference, W, N, O, O + KV, 0);
    const double e_dv = error_of(got, W, reference, W, N, O + KV, W, 0), limit = kernel >= ATTENTION_WGMMA ? 4e-3 : 0;
    CHECK(e_dq <= limit && e_dk <= limit && e_dv == 0,
          "%s B %d T %d HD %d documents %d: turned back, dq differs by %.1e, dk by %.1e, dv by %.1e, limit %.1e",
          kernel_names[kernel], s.B, s.T, s.HD, longest, e_dq, e_dk, e_dv, limit);
    CUDA_CHECK(cudaFree(table));
    CUDA_CHECK(cudaFree(d_starts));
    free_inputs(&in);
    free_results(&turned);
    free_results(&plain);
    free(host);
    free(starts);
    free(got);
    free(want);
    free(reference);
}

static void gradients_turned_back_by_rope(void) {
    for (int HD : {64, 96, 128}) {
        for (int longest : {0, 150}) {
            for (int k = ATTENTION_PLAIN; k < NUM_ATTENTION_KERNELS; k++) {
                if (is_tested(k, HD, longest > 0)) { turned_back((AttentionKernel)k, {2, 331, 4, 2, HD}, longest); }
            }
        }
    }
}

static void one_token_against_a_cache(void) {
    const int positions[] = {1, 3, 17, 256, 1000};
    int turn = 0;
    for (int HD : head_dims) {
        for (int P : positions) {
            const int *h = heads[turn++ % 5], NH = h[0], NKV = h[1];
            const AttentionShape s = {1, 1, NH, NKV, HD};
            const size_t nq = (size_t)NH * HD, width = (size_t)2 * NKV * HD, n = P * width;
            float *q = (float*)xmalloc(nq * sizeof(float)), *cache = (float*)xmalloc(n * sizeof(float));
            float *want = (float*)xmalloc(nq * sizeof(float)), *got = (float*)xmalloc(nq * sizeof(float));
            fill(q, nq, 3, 7);
            fill(cache, n, 1, 8);
            attention_decode(want, q, cache, P, s);
            floatX *d_q = upload(q, 1, nq, nq), *d_cache = upload(cache, P, width, width), *d_out = upload(q, 1, nq, nq);
            CUDA_CHECK(cudaMemset(d_out, 0xff, nq * sizeof(floatX)));
            attention_decode_cuda(d_out, d_q, d_cache, P, s, 0);
            CUDA_CHECK(cudaDeviceSynchronize());
            download(got, d_out, nq);
            double diff = 0, norm = 0;
            for (size_t i = 0; i < nq; i++) {
                diff += (got[i] - want[i]) * (got[i] - want[i]);
                norm += want[i] * want[i];
            }
            const double error = sqrt(diff / norm), limit = sizeof(floatX) == 4 ? 3e-6 : 4e-3;
            CHECK(error <= limit, "P %d NH %d NKV %d HD %d: error %.1e, limit %.1e", P, NH, NKV, HD, error, limit);
            CUDA_CHECK(cudaFree(d_q));
            CUDA_CHECK(cudaFree(d_cache));
            CUDA_CHECK(cudaFree(d_out));
            free(q);
            free(cache);
            free(want);
            free(got);
        }
    }
}

static bool same_bytes(const void* a, const void* b, size_t n) {
    char *x = (char*)xmalloc(n), *y = (char*)xmalloc(n);
    CUDA_CHECK(cudaMemcpy(x, a, n, cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaMemcpy(y, b, n, cudaMemcpyDeviceToHost));
    const bool same = memcmp(x, y, n) == 0;
    free(x);
    free(y);
    return same;
}

/* Runs forward and backward of a batch with one kernel: the chosen sequences must equal, bit for bit, the same sequences
 * alone. starts: on the device, or NULL */
static void compare_with_alone(AttentionKernel kernel, AttentionShape s, const int32_t* starts,
                               std::initializer_list<int> chosen) {
    const size_t N = (size_t)s.B * s.T, W = (size_t)(s.NH + 2 * s.NKV) * s.HD, O = (size_t)s.NH * s.HD;
    const AttentionArgs args = attention_args(s, W, O, starts);
    AttentionShape one = s;
    one.B = 1;
    Results all = new_results(s), alone = new_results(one);
    Inputs in = new_inputs(s, kernel);
    CUDA_CHECK(cudaMemset(all.out, 0xff, N * O * sizeof(floatX)));
    CUDA_CHECK(cudaMemset(all.dqkv, 0xff, N * W * sizeof(floatX)));
    attention_forward_cuda(all.out, all.lse, in.qkv, s.B, args, 0, kernel);
    attention_backward_cuda(all.dqkv, in.scratch, in.dout, {in.qkv, all.out, all.lse}, s.B, args, 0, kernel);
    for (int b : chosen) {
        const size_t row = (size_t)b * s.T;
        const AttentionArgs one_args = attention_args(one, W, O, starts ? starts + row : NULL);
        CUDA_CHECK(cudaMemset(alone.out, 0, s.T * O * sizeof(floatX)));
        CUDA_CHECK(cudaMemset(alone.dqkv, 0, s.T * W * sizeof(floatX)));
        attention_forward_cuda(alone.out, alone.lse, in.qkv + row * W, 1, one_args, 0, kernel);
        attention_backward_cuda(alone.dqkv, in.scratch, in.dout + row * O, {in.qkv + row * W, alone.out, alone.lse}, 1,
                                one_args, 0, kernel);
        CUDA_CHECK(cudaDeviceSynchronize());
        CHECK(same_bytes(all.out + row * O, alone.out, s.T * O * sizeof(floatX)) &&
                  same_bytes(all.lse + row * s.NH, alone.lse, (size_t)s.T * s.NH * sizeof(float)),
              "%s, B %d T %d HD %d: out or lse of sequence %d differs", kernel_names[kernel], s.B, s.T, s.HD, b);
        CHECK(same_bytes(all.dqkv + row * W, alone.dqkv, s.T * W * sizeof(floatX)),
              "%s, B %d T %d HD %d: gradients of sequence %d differ", kernel_names[kernel], s.B, s.T, s.HD, b);
    }
    free_inputs(&in);
    free_results(&all);
    free_results(&alone);
}

/* Rows hold documents of up to `longest` tokens; 0: rows are not divided. */
static void compare_all_kernels_with_alone(AttentionShape s, int longest, std::initializer_list<int> chosen) {
    int32_t *starts = random_starts(s.B, s.T, longest), *d_starts = upload_starts(starts, (size_t)s.B * s.T);
    for (int k = ATTENTION_PLAIN; k < NUM_ATTENTION_KERNELS; k++) {
        if (is_tested(k, s.HD, longest > 0)) { compare_with_alone((AttentionKernel)k, s, d_starts, chosen); }
    }
    CUDA_CHECK(cudaFree(d_starts));
    free(starts);
}

#ifndef PRECISION_FP32
/* Calls check with those tiles of a list that this code and this card can run. */
template <typename... Tiles, typename Check>
static void with_each(MmaTileList<Tiles...>, const Check& check) {
    const size_t limit = shared_limit(attention_stats_kernel<8, 8>);
    ((Tiles::ASYNC == this_card()->async && Tiles::SMEM <= (int)limit ? check(Tiles()) : (void)0), ...);
}

/* Cards with more and less shared memory take other tiles; a run may resume on another card. */
template <int HD>
static void tiles_give_the_same_bits(int longest) {
    const AttentionShape s = {1, 300, 2, 1, HD};
    const size_t N = (size_t)s.B * s.T, W = (size_t)(s.NH + 2 * s.NKV) * HD, O = (size_t)s.NH * HD;
    int32_t *starts = random_starts(s.B, s.T, longest), *d_starts = upload_starts(starts, N);
    const AttentionArgs args = attention_args(s, W, O, d_starts);
    Results want = new_results(s), got = new_results(s);
    Inputs in = new_inputs(s, ATTENTION_MMA);
    attention_forward_cuda(want.out, want.lse, in.qkv, s.B, args, 0, ATTENTION_MMA);
    attention_backward_cuda(want.dqkv, in.scratch, in.dout, {in.qkv, want.out, want.lse}, s.B, args, 0, ATTENTION_MMA);
    const float2* stats = (const float2*)in.scratch;
    with_each(typename MmaTiles<HD>::Forward(), [&](auto tiles) {
        CUDA_CHECK(cudaMemset(got.out, 0xff, N * O * sizeof(floatX)));
        CUDA_CHECK(cudaMemset(got.lse, 0xff, N * s.NH * sizeof(float)));
        attention_mma_forward_tiles<decltype(tiles)>(got.out, got.lse, in.qkv, s.B, args, 0);
        CHECK(same_bytes(want.out, got.out, N * O * sizeof(floatX)) && same_bytes(want.lse, got.lse, N * s.NH * sizeof(float)),
              "forward, HD %d documents %d: tiles of %d bytes differ", HD, longest, tiles.SMEM);
    });
    with_each(typename MmaTiles<HD>::BackwardKV(), [&](auto kv_tiles) {
        with_each(typename MmaTiles<HD>::BackwardQ(), [&](auto q_tiles) {
            CUDA_CHECK(cudaMemset(got.dqkv, 0xff, N * W * sizeof(floatX)));
            attention_mma_backward_kv<decltype(kv_tiles)>(got.dqkv, stats, in.dout, in.qkv, s.B, args, 0);
            attention_mma_backward_q<decltype(q_tiles)>(got.dqkv, stats, in.dout, in.qkv, s.B, args, 0);
            CHECK(same_bytes(want.dqkv, got.dqkv, N * W * sizeof(floatX)),
                  "backward, HD %d documents %d: tiles of %d and %d bytes differ", HD, longest, kv_tiles.SMEM, q_tiles.SMEM);
        });
    });
    CUDA_CHECK(cudaFree(d_starts));
    free_inputs(&in);
    free_results(&want);
    free_results(&got);
    free(starts);
}

static void all_tiles_give_the_same_bits(void) {
    if (!is_tested(ATTENTION_MMA, 64, true)) { return; }
    for (int longest : {0, 120}) {
        tiles_give_the_same_bits<64>(longest);
        tiles_give_the_same_bits<128>(longest);
    }
}
#endif

/* Here qkv has more than 2^31 elements. */
static void offsets_past_two_to_the_31(void) { compare_all_kernels_with_alone({1400, 256, 32, 8, 128}, 0, {1399}); }

/* A grid's second and third dimension have at most 65,535 blocks. */
static void more_sequences_than_a_grid_has_room_for(void) {
    for (int HD : {16, 64}) {
        for (int T : {2, 16}) {
            for (int longest : {0, 9}) {
                compare_all_kernels_with_alone({70000, T, 2, 1, HD}, longest, {0, 1, 65534, 65535, 65536, 69999});
            }
        }
    }
}

static void more_tiles_than_a_grid_has_room_for_are_refused(void) {
    struct Tiles {
        int T, rows;
    };
    const auto ask = [](const void* p) {
        const Tiles& t = *(const Tiles*)p;
        if (attention_grid(1, 2, t.T, t.rows).y != 65535) { _exit(2); }
    };
    for (int rows : {8, 64}) {
        const Tiles most = {65535 * rows, rows}, more = {most.T + 1, rows};
        CHECK(test_exit_status(ask, &most) == 0, "T %d in tiles of %d", most.T, rows);
        CHECK(test_exit_status(ask, &more) == 1, "T %d in tiles of %d is accepted", more.T, rows);
    }
}

__global__ static void empty_kernel(int) {}

/* A walk's blocks wait for each other. A grid of which some blocks cannot start would hang, so the driver refuses it. */
static void more_blocks_than_are_resident_are_refused(void) {
    const int threads = 384, bytes = (int)shared_limit(empty_kernel);
    CUDA_CHECK(cudaFuncSetAttribute((const void*)empty_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    const unsigned most = (unsigned)blocks_at_once(empty_kernel, threads, (size_t)bytes);
    const auto launch = [&](unsigned blocks) {
        const cudaError_t status = attention_launch_resident(empty_kernel, dim3(blocks), threads, bytes, 0, 0);
        cudaGetLastError();  // a refused launch leaves its error there, too
        return status;
    };
    CHECK(launch(most) == cudaSuccess, "%u blocks", most);
    CHECK(launch(most + 1) == cudaErrorCooperativeLaunchTooLarge, "%u blocks are launched, %u are resident", most + 1, most);
    CUDA_CHECK(cudaDeviceSynchronize());
}

/* Several heads share a piece of work, and blocks take several pieces one after the other. */
static void many_rows_have_the_bits_of_one_alone(void) {
    for (int HD : {64, 128}) { compare_all_kernels_with_alone({24, 1100, 8, 2, HD}, 0, {0, 11, 23}); }
}

#ifndef PRECISION_FP32
/* Lengths whose pairs of tiles divide badly among the multiprocessors walk in more stages. Few heads do not fill a card. */
static void walks_suit_the_card(void) {
    const struct {
        int B, NKV, T, HD, processors;
        bool walks;
    } cases[] = {{64, 4, 1024, 64, 132, true}, {8, 8, 1024, 64, 132, true},     {5, 8, 1024, 64, 132, false},
                 {1, 8, 8192, 128, 132, true}, {1, 8, 32768, 128, 132, true},   {1, 8, 12288, 128, 132, true},
                 {1, 8, 20480, 64, 132, true}, {5, 8, 6144, 64, 132, true},     {1, 8, 6144, 128, 132, false},
                 {1, 8, 2048, 64, 132, false}, {17, 1, 2048, 64, 132, false},   {1, 8, 16384, 64, 114, true},
                 {1, 1, 34000, 64, 132, true}, {1, 1, 1000000, 128, 132, true}, {1, 1, 8192, 64, 132, false}};
    for (auto& c : cases) {
        const Card card = {true, true, true, c.processors, 227 << 10, 50 << 20};
        const KernelSizes s = attention_sizes({c.B, c.T, 4 * c.NKV, c.NKV, c.HD}, false);
        const WalkOrder o = walk_order(c.B, c.NKV, c.T, c.processors);
        CHECK(attention_walks(&card, &s) == c.walks, "B %d NKV %d T %d HD %d: %u x %u blocks on %d", c.B, c.NKV, c.T, c.HD,
              o.blocks, o.together, c.processors);
    }
}

/* Two and three stages; the last one lacks a tile. On the emulated card other tests have a stage for each tile. */
static void walks_in_several_stages(void) {
    for (int HD : {64, 128}) {
        for (walk_blocks = HD == 64 ? 3 : 2; walk_blocks > 1; walk_blocks--) { run_case({{1, 520, 2, 1, HD}, 1}, false); }
    }
    walk_blocks = 0;
}

/* Where the driver does not start all blocks together, two kernels run instead of a walk. */
static void a_part_of_a_card_runs_two_kernels(void) {
    const Card* card = this_card();
    const cudaError_t status = attention_launch_resident(empty_kernel, dim3((unsigned)card->processors), 32,
                                                         (int)shared_limit(empty_kernel), (cudaStream_t)0, 0);
    cudaGetLastError();  // a refused launch leaves its error there, too
    CHECK(card->together == (card->wgmma && status == cudaSuccess), "a block a multiprocessor: %s", cudaGetErrorName(status));
    if (card->together || !card->wgmma) { return; }
    const AttentionShape s = {1, 1024, 1, 1, 64};
    const AttentionArgs args = attention_args(s, 3 * 64, 64);
    Card whole = *card;
    whole.together = true;
    CHECK(kernel_takes(CHOOSE_ATTENTION_BACKWARD, ATTENTION_WALK, attention_sizes(s, false), &whole), "it would not walk");
    Results two = new_results(s), any = new_results(s);
    Inputs in = new_inputs(s, ATTENTION_AUTO);
    attention_forward_cuda(two.out, two.lse, in.qkv, 1, args, 0);
    attention_backward_cuda(two.dqkv, in.scratch, in.dout, {in.qkv, two.out, two.lse}, 1, args, 0, ATTENTION_WGMMA);
    attention_backward_cuda(any.dqkv, in.scratch, in.dout, {in.qkv, two.out, two.lse}, 1, args, 0);
    CHECK(same_bytes(two.dqkv, any.dqkv, (size_t)s.T * 3 * 64 * sizeof(floatX)), "the card's choice computes other gradients");
    free_inputs(&in);
    free_results(&two);
    free_results(&any);
}
#endif

/* The table's choices for cards that are not here. */
static void each_card_has_its_kernels(void) {
    const Card t4 = {false, false, true, 40, 64 << 10, 4 << 20}, a100 = {false, true, true, 108, 163 << 10, 40 << 20};
    const Card h100 = {IS_BF16 || IS_FP16, true, true, 132, 227 << 10, 50 << 20};
    Card h200 = h100, small = h100;
    h200.l2 = 60 << 20, small.together = false;
    const struct {
        const Card* card;
        int T, HD;
        bool documents;
        AttentionKernel forward, backward;
    } cases[] = {{&t4, 4096, 64, false, ATTENTION_MMA, ATTENTION_MMA},
                 {&a100, 4096, 128, false, ATTENTION_MMA, ATTENTION_MMA},
                 {&a100, 4096, 96, false, ATTENTION_PLAIN, ATTENTION_PLAIN},
                 {&h100, 4096, 128, false, ATTENTION_WGMMA, ATTENTION_WALK},
                 {&h100, 2048, 128, false, ATTENTION_WGMMA, ATTENTION_WGMMA},
                 {&h200, 2048, 128, false, ATTENTION_WGMMA, ATTENTION_WALK},
                 {&h100, 1024, 64, false, ATTENTION_WGMMA, ATTENTION_WALK},
                 {&h100, 1023, 64, false, ATTENTION_WGMMA, ATTENTION_WGMMA},
                 {&h100, 4096, 64, true, ATTENTION_WGMMA, ATTENTION_WGMMA},
                 {&small, 4096, 64, false, ATTENTION_WGMMA, ATTENTION_WGMMA},
                 {&h200, 4096, 32, false, ATTENTION_PLAIN, ATTENTION_PLAIN}};
    for (auto& c : cases) {
        KernelSizes s = {};
        s.attention = {64, c.T, 16, 8, c.HD}, s.documents = c.documents;
        const AttentionKernel fp32 = ATTENTION_PLAIN, forward = sizeof(floatX) == 4 ? fp32 : c.forward;
        const AttentionKernel backward = sizeof(floatX) == 4 ? fp32 : c.backward;
        CHECK(kernel_row(CHOOSE_ATTENTION, s, c.card)->kernel == forward &&
                  kernel_row(CHOOSE_ATTENTION_BACKWARD, s, c.card)->kernel == backward,
              "%d processors, T %d HD %d: %s and %s", c.card->processors, c.T, c.HD,
              kernel_row(CHOOSE_ATTENTION, s, c.card)->name, kernel_row(CHOOSE_ATTENTION_BACKWARD, s, c.card)->name);
    }
    KernelSizes s = {};
    for (const size_t V : {32768, 94208, 94304, 131072, 131328}) {  // of 16 bits; half as many of 32
        s.width = V * 2 / sizeof(floatX);
        const int a = kernel_row(CHOOSE_CROSSENTROPY, s, &a100)->kernel, h = kernel_row(CHOOSE_CROSSENTROPY, s, &h100)->kernel;
        CHECK(h == (V > 131072 ? CE_LOOPED : V > 32768 ? CE_ROW : CE_HELD), "an H100's row of %zu", s.width);
        CHECK(a == (V > 94208 ? CE_LOOPED : V > 32768 ? CE_ROW : CE_HELD), "an A100's row of %zu", s.width);
        CHECK(kernel_row(CHOOSE_CROSSENTROPY, s, &t4)->kernel == (V > 32768 ? CE_LOOPED : CE_HELD), "a T4's row of %zu",
              s.width);
    }
}

#define RUN_NAMED(test) \
    if (strstr(#test, named)) { RUN(test); }

int main(int argc, char** argv) {
    for (int k = ATTENTION_PLAIN; argc > 1 && k < NUM_ATTENTION_KERNELS; k++) {
        if (strcmp(argv[1], kernel_names[k]) == 0) { only = (AttentionKernel)k; }
    }
    if (argc > 3 || (argc > 1 && only == ATTENTION_AUTO)) { die_usage("usage: %s [plain|mma|wgmma|walk [TEST]]", argv[0]); }
    const char* named = argc > 2 ? argv[2] : "";  // part of a test's name
    RUN_NAMED(more_tiles_than_a_grid_has_room_for_are_refused);
    RUN_NAMED(resident_blocks_are_those_of_the_toolkit);
    RUN_NAMED(each_card_has_its_kernels);
#ifndef PRECISION_FP32
    RUN_NAMED(walks_suit_the_card);
    RUN_NAMED(attention_has_these_warps_on_each_card);
#endif
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        SKIP("every attention kernel", "no GPU");
        return test_summary();
    }
    printf("%s, code for sm_%d;", PRECISION_NAME, compiled_arch(attention_stats_kernel<32, 2>));
    for (int HD : {64, 128}) {
        printf(" head_dim %d runs %s", HD,
               kernel_names[attention_choose(ATTENTION_AUTO, CHOOSE_ATTENTION, 1, attention_args({1, 64, 1, 1, HD}, 0, 0))]);
    }
    printf("\n");
    RUN_NAMED(more_blocks_than_are_resident_are_refused);
#ifndef PRECISION_FP32
    RUN_NAMED(a_part_of_a_card_runs_two_kernels);
    RUN_NAMED(walks_in_several_stages);
#endif
    RUN_NAMED(every_head_dim_at_short_and_odd_lengths);
    RUN_NAMED(every_group_on_the_tensor_core_head_dims);
    RUN_NAMED(lengths_around_every_tile_edge);
    RUN_NAMED(rows_with_scores_in_the_hundreds);
    RUN_NAMED(a_thousand_tokens);
    RUN_NAMED(documents_at_every_head_dim);
    RUN_NAMED(documents_around_every_tile_edge);
    RUN_NAMED(documents_at_every_offset_in_a_tile);
    RUN_NAMED(documents_at_odds_with_tiles);
    RUN_NAMED(documents_with_scores_in_the_hundreds);
    RUN_NAMED(gradients_turned_back_by_rope);
    RUN_NAMED(one_token_against_a_cache);
#ifndef PRECISION_FP32
    RUN_NAMED(multiprocessor_is_that_of_the_card);
    RUN_NAMED(all_tiles_give_the_same_bits);
#endif
    RUN_NAMED(many_rows_have_the_bits_of_one_alone);
    RUN_NAMED(more_sequences_than_a_grid_has_room_for);
    if (!strstr("offsets_past_two_to_the_31", named)) { return test_summary(); }
    size_t free_memory = 0, total_memory = 0;
    CUDA_CHECK(cudaMemGetInfo(&free_memory, &total_memory));
    if (free_memory > ((size_t)9 << 31) * sizeof(floatX)) {
        RUN(offsets_past_two_to_the_31);
    } else {
        SKIP("offsets_past_two_to_the_31", "not enough GPU memory");
    }
    return test_summary();
}
