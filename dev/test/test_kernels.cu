/* test_kernels.cu -- compares every CUDA layer except attention with its CPU oracle, on a real GPU.
 *
 *   make build/test_kernels_cu PRECISION=FP32 && build/test_kernels_cu [WORD]     only the tests whose name contains WORD
 *
 * Inputs are random and rounded to the build's type before the oracle sees them. Every output starts as NaN (bytes 0xFF), has
 * padded rows if the layer allows them, and is followed by a guard; padding and guards must not change. Every launch runs
 * twice, on fresh memory, and must give the same bits. Tolerances: fp32 1e-5; 16-bit builds half a unit in the last place of
 * the result (at most 1/256 or 1/2048 of it), because the arithmetic is in fp32.
 */
#pragma nv_diag_suppress 1675  // matmul.h: pragmas for GCC
#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "llmc/adamw.cuh"
#include "llmc/crossentropy.cuh"
#include "llmc/embedding.cuh"
#include "llmc/gpu/exchange.cuh"
#include "llmc/gpu/finite.cuh"
#include "llmc/gpu/sequence.cuh"
#include "llmc/lora.cuh"
#include "llmc/matmul_sm90.cuh"
#include "llmc/matmul_tune.cuh"
#include "llmc/quantise.cuh"
#include "llmc/rmsnorm_quantised.cuh"
#include "llmc/rope.cuh"
#include "llmc/swiglu_quantised.cuh"

#include "llmc/adamw.h"
#include "llmc/crossentropy.h"
#include "llmc/embedding.h"
#include "llmc/matmul.h"
#include "llmc/rmsnorm.h"
#include "llmc/rope.h"
#include "llmc/swiglu.h"
#include "documents.h"
#include "test.h"

typedef std::vector<float> Floats;

#if defined(PRECISION_FP32)
static const float ulp = 1e-5f;
#elif defined(PRECISION_BF16)
static const float ulp = 1.0f / 256;
#else
static const float ulp = 1.0f / 2048;
#endif

// ---------------------------------------------------------------------------------------------------------------------
// device memory: poisoned, guarded, freed at the end of each test

enum { GUARD = 512 };
static std::vector<std::pair<char*, size_t>> allocations;

template <typename T>
static T* device_alloc(size_t n) {
    char* p = NULL;
    const size_t bytes = n * sizeof(T);
    CUDA_CHECK(cudaMalloc(&p, bytes + GUARD));
    CUDA_CHECK(cudaMemset(p, 0xff, bytes + GUARD));
    allocations.push_back({p, bytes});
    return (T*)p;
}

static void device_free_all() {
    CUDA_CHECK(cudaDeviceSynchronize());
    for (size_t i = 0; i < allocations.size(); i++) {
        unsigned char guard[GUARD];
        CUDA_CHECK(cudaMemcpy(guard, allocations[i].first + allocations[i].second, GUARD, cudaMemcpyDeviceToHost));
        bool intact = true;
        for (int k = 0; k < GUARD; k++) { intact = intact && guard[k] == 0xff; }
        CHECK(intact, "a kernel wrote past the end of allocation %zu of %zu bytes", i, allocations[i].second);
        CUDA_CHECK(cudaFree(allocations[i].first));
    }
    allocations.clear();
}

template <typename T>
static T* upload(const std::vector<T>& x) {
    T* p = device_alloc<T>(x.size());
    CUDA_CHECK(cudaMemcpy(p, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}

/* Uploads x (rows, width) as T in rows of `pitch`; the padding is NaN. */
template <typename T>
static T* upload_rows(const Floats& x, size_t rows, size_t width, size_t pitch) {
    std::vector<T> h(rows * pitch);
    memset((void*)h.data(), 0xff, h.size() * sizeof(T));
    for (size_t r = 0; r < rows; r++) {
        for (size_t c = 0; c < width; c++) { h[r * pitch + c] = from_float<T>(x[r * width + c]); }
    }
    return upload(h);
}

template <typename T>
static std::vector<T> download(const T* p, size_t n) {
    std::vector<T> h(n);
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemcpy((void*)h.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
    return h;
}

/* Does the opposite of upload_rows() and checks that the padding is untouched. */
template <typename T>
static Floats download_rows(const T* p, size_t rows, size_t width, size_t pitch) {
    std::vector<T> h = download(p, rows * pitch);
    Floats x(rows * width);
    bool padding = true;
    for (size_t r = 0; r < rows; r++) {
        for (size_t c = 0; c < width; c++) { x[r * width + c] = to_float(h[r * pitch + c]); }
        const unsigned char* bytes = (const unsigned char*)(h.data() + r * pitch + width);
        for (size_t k = 0; k < (pitch - width) * sizeof(T); k++) { padding = padding && bytes[k] == 0xff; }
    }
    CHECK(padding, "the padding of rows of %zu was overwritten", width);
    return x;
}

// ---------------------------------------------------------------------------------------------------------------------
// values and comparison

static uint32_t next_stream = 1;

/* Returns n normals of deviation `scale`, rounded to T. */
template <typename T>
static Floats random_values(size_t n, float scale) {
    Floats x(n);
    rand_normal(x.data(), 0, n, scale, 1234, next_stream++);
    for (size_t i = 0; i < n; i++) { x[i] = to_float(from_float<T>(x[i])); }
    return x;
}

static std::vector<int32_t> random_tokens(size_t n, int V) {
    std::vector<int32_t> t(n);
    const uint32_t stream = next_stream++;
    for (size_t i = 0; i < n; i++) { t[i] = (int32_t)philox_below(99, RAND_INIT, stream, i, (uint64_t)V); }
    return t;
}

/* Checks |got - want| <= rel |want| + max(rest max |want|, least) for every element; NaN never passes. */
static void compare(const char* what, const Floats& got, const Floats& want, float rel, float rest, float least = 0) {
    float largest = 0, worst = 0;
    size_t at = 0;
    CHECK(got.size() == want.size(), "%s: %zu elements, wanted %zu", what, got.size(), want.size());
    for (size_t i = 0; i < want.size(); i++) { largest = fmaxf(largest, fabsf(want[i])); }
    for (size_t i = 0; i < want.size(); i++) {
        const float excess = fabsf(got[i] - want[i]) - rel * fabsf(want[i]) - fmaxf(rest * largest, least);
        if (!(excess <= 0) && !(worst > excess)) {
            worst = excess;
            at = i;
        }
    }
    CHECK(worst == 0, "%s: element %zu is %.8g, wanted %.8g (largest %.3g)", what, at, (double)got[at], (double)want[at],
          (double)largest);
}

static void compare(const char* what, const Floats& got, const Floats& want) { compare(what, got, want, ulp, 1e-6f); }

/* Runs a launch twice and returns its output; both runs must agree in every bit. */
static Floats twice(const char* what, const std::function<Floats()>& launch) {
    const Floats a = launch(), b = launch();
    CHECK(a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0, "%s: two runs differ", what);
    return a;
}

static size_t padded(size_t width) { return row_pitch<floatX>(width) + VECTOR<floatX>; }

// ---------------------------------------------------------------------------------------------------------------------
// embedding

static void embedding_copies_and_sums_rows() {
    // N, C, V: odd widths, runs within a chunk, runs over many chunks, a single token, a large vocabulary
    const size_t shapes[][3] = {{1, 60, 97},       {17, 64, 301},    {300, 768, 97},     {63, 12, 5},
                                {64, 12, 1},       {65, 12, 2},      {1000, 72, 128256}, {4097, 64, 1},
                                {5000, 101, 4096}, {70000, 32, 257}, {4097, 2064, 97}};
    for (auto& s : shapes) {
        const size_t N = s[0], C = s[1], V = s[2], pitch = padded(C);
        char what[64];
        snprintf(what, sizeof what, "embedding N=%zu C=%zu V=%zu", N, C, V);
        const std::vector<int32_t> tokens = random_tokens(N, (int)V);
        const Floats table = random_values<floatX>(V * C, 1), dout = random_values<floatX>(N * C, 1);
        Floats out(N * C), dtable = table;
        embedding_forward(out.data(), table.data(), tokens.data(), N, (int)C);
        embedding_backward(dtable.data(), dout.data(), tokens.data(), N, (int)C);
        int32_t* d_tokens = upload(tokens);
        floatX *d_table = upload_rows<floatX>(table, V, C, C), *d_dout = upload_rows<floatX>(dout, N, C, pitch);
        compare(what,
                twice(what,
                      [&] {
                          floatX* d_out = device_alloc<floatX>(N * pitch);
                          embedding_forward_cuda(d_out, d_table, d_tokens, N, (int)C, pitch, 0);
                          return download_rows(d_out, N, C, pitch);
                      }),
                out, 0, 0);
        // gradients of two types; a sum of n numbers in another order may differ by a few n ulp of fp32
        auto backward = [&](auto* d_dtable) {
            void* scratch = device_alloc<char>(embedding_backward_scratch_cuda(N, (int)C));
            embedding_backward_cuda(d_dtable, scratch, d_dout, d_tokens, N, (int)C, (int)V, pitch, 0);
            return download_rows(d_dtable, V, C, C);
        };
        compare(what, twice(what, [&] { return backward(upload_rows<floatX>(table, V, C, C)); }), dtable, ulp, 1e-5f);
        compare(what, twice(what, [&] { return backward(upload_rows<float>(table, V, C, C)); }), dtable, 1e-5f, 1e-5f);
        device_free_all();
    }
}

/* Distributions of N tokens: uniform; all the last token; each once before any again; as in text, the k-th token with a share
 * of about 1 / k; shuffled runs whose lengths are close to whole chunks. */
enum TokenPattern { TOKENS_UNIFORM, TOKENS_EQUAL, TOKENS_DISTINCT, TOKENS_ZIPF, TOKENS_RUNS, NUM_TOKEN_PATTERNS };

static std::vector<int32_t> pattern_tokens(TokenPattern pattern, size_t N, int V) {
    std::vector<int32_t> t = random_tokens(N, V);
    const uint32_t stream = next_stream++;
    auto below = [&](size_t i, uint64_t n) { return (size_t)philox_below(98, RAND_INIT, stream, i, n); };
    if (pattern == TOKENS_EQUAL) { t.assign(N, V - 1); }
    if (pattern == TOKENS_DISTINCT) {
        size_t step = (size_t)V / 2 + 1;  // made coprime to V
        auto gcd = [](size_t a, size_t b) {
            while (b) {
                const size_t r = a % b;
                a = b;
                b = r;
            }
            return a;
        };
        while (gcd(step, (size_t)V) > 1) { step++; }
        for (size_t i = 0; i < N; i++) { t[i] = (int32_t)(i * step % (size_t)V); }
    }
    if (pattern == TOKENS_ZIPF) {
        for (size_t i = 0; i < N; i++) { t[i] = (int32_t)(pow((double)V + 1, (double)below(i, 1 << 30) / (1 << 30)) - 1); }
    }
    if (pattern == TOKENS_RUNS) {
        size_t i = 0;
        for (int token = 0; i < N; token = (token + 1) % V) {
            const size_t chunks = below(2 * i, 5), more = below(2 * i + 1, 3);  // 0 to 4 chunks, one pair fewer or more
            for (size_t left = size_max(1, chunks * EMBEDDING_CHUNK + more - (chunks > 0)); left > 0 && i < N; left--) {
                t[i++] = token;
            }
        }
        for (i = N - 1; i > 0; i--) { std::swap(t[i], t[below(2 * N + i, i + 1)]); }
    }
    return t;
}

/* Checks the sort's order alone, with vocabularies of one to four digits and lists of one round a tile or more. */
static void embedding_sort_is_stable() {
    const size_t sizes[] = {1, 17, 2047, 2048, 2049, 4095, 4096, 4097, 65539, 270001};
    const int vocabularies[] = {1, 2, 257, 512, 513, 128256, 262144, 262145, (1 << 27) + 5, INT32_MAX};
    for (size_t N : sizes) {
        for (int V : vocabularies) {
            if (N > 10000 && V != 257 && V != 128256 && V != 262145 && V != INT32_MAX) { continue; }  // saves time
            for (int pattern = 0; pattern < NUM_TOKEN_PATTERNS; pattern++) {
                const std::vector<int32_t> tokens = pattern_tokens((TokenPattern)pattern, N, V);
                std::vector<int32_t> order(N);
                for (size_t i = 0; i < N; i++) { order[i] = (int32_t)i; }
                std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return tokens[a] < tokens[b]; });
                const EmbeddingScratch s = embedding_scratch(device_alloc<char>(embedding_backward_scratch_cuda(N, 1)), N, 1);
                const std::vector<int2> pairs = download(embedding_sort_cuda(&s, upload(tokens), N, V, 0), N);
                size_t wrong = 0;
                for (size_t i = 0; i < N; i++) { wrong += pairs[i].y != order[i] || pairs[i].x != tokens[order[i]]; }
                CHECK(wrong == 0, "sort of N=%zu V=%d pattern %d: %zu pairs are wrong", N, V, pattern, wrong);
                CHECK(download(s.runs, 1)[0] == 0, "sort of N=%zu V=%d pattern %d: the list of runs is not empty", N, V,
                      pattern);
                device_free_all();
            }
        }
    }
}

/* Gradients that are small integers have exact sums in fp32: no row may be lost, counted twice or added in the wrong place. */
static void embedding_gradient_misses_no_row() {
    const size_t shapes[][3] = {{1, 10, 2},       {17, 768, 2},       {64, 10, 3},        {65, 16, 3},
                                {96, 768, 3},     {97, 10, 3},        {2049, 1032, 40},   {4095, 768, 2},
                                {4096, 10, 257},  {4097, 768, 257},   {4097, 72, 128256}, {4097, 10, 262145},
                                {65539, 64, 257}, {65539, 16, 32768}, {270001, 8, 5000}};
    for (auto& s : shapes) {
        const size_t N = s[0], C = s[1], V = s[2], pitch = padded(C);
        for (int pattern = 0; pattern < NUM_TOKEN_PATTERNS; pattern++) {
            char what[96];
            snprintf(what, sizeof what, "embedding backward N=%zu C=%zu V=%zu pattern %d", N, C, V, pattern);
            const std::vector<int32_t> tokens = pattern_tokens((TokenPattern)pattern, N, (int)V);
            Floats table = random_values<floatX>(V * C, 2), dout = random_values<floatX>(N * C, 2);
            for (float& x : table) { x = roundf(x); }
            for (float& x : dout) { x = roundf(x); }
            Floats want = table;
            embedding_backward(want.data(), dout.data(), tokens.data(), N, (int)C);
            int32_t* d_tokens = upload(tokens);
            floatX* d_dout = upload_rows<floatX>(dout, N, C, pitch);
            auto backward = [&](auto* d_dtable) {
                void* scratch = device_alloc<char>(embedding_backward_scratch_cuda(N, (int)C));
                embedding_backward_cuda(d_dtable, scratch, d_dout, d_tokens, N, (int)C, (int)V, pitch, 0);
                return download_rows(d_dtable, V, C, C);
            };
            compare(what, twice(what, [&] { return backward(upload_rows<float>(table, V, C, C)); }), want, 0, 0);
            for (float& x : want) { x = to_float(from_float<floatX>(x)); }
            compare(what, twice(what, [&] { return backward(upload_rows<floatX>(table, V, C, C)); }), want, 0, 0);
            device_free_all();
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// rmsnorm

// rows of few and of many elements, whole vectors and not, more rows than run at a time
static const size_t norm_shapes[][2] = {{1, 60},   {5, 64},     {33, 97},     {5000, 768}, {700, 512}, {65, 513}, {3000, 256},
                                        {9, 2048}, {300, 3072}, {1500, 4096}, {600, 8192}, {3, 8191},  {5000, 10}};

static void rmsnorm_forward_agrees() {
    const float eps = 1e-5f;
    for (auto& s : norm_shapes) {
        const size_t N = s[0], C = s[1], pitch = padded(C);
        char what[64];
        snprintf(what, sizeof what, "rmsnorm N=%zu C=%zu", N, C);
        const RowShape rows = {N, (int)C, pitch};
        const Floats x = random_values<floatX>(N * C, 2), w = random_values<floatX>(C, 1);
        Floats out(N * C), rstd(N);
        rmsnorm_forward(out.data(), rstd.data(), x.data(), w.data(), N, (int)C, eps);
        floatX *d_x = upload_rows<floatX>(x, N, C, pitch), *d_w = upload_rows<floatX>(w, 1, C, C);
        float* d_rstd = NULL;
        compare(what,
                twice(what,
                      [&] {
                          floatX* d_out = device_alloc<floatX>(N * pitch);
                          d_rstd = device_alloc<float>(N);
                          rmsnorm_forward_cuda(d_out, d_rstd, d_x, d_w, rows, eps, 0);
                          return download_rows(d_out, N, C, pitch);
                      }),
                out);
        compare(what, download(d_rstd, N), rstd, 1e-5f, 0);
        device_free_all();
    }
}

static void rmsnorm_backward_adds_to_both_gradients() {
    for (auto& s : norm_shapes) {
        const size_t N = s[0], C = s[1], pitch = padded(C);
        const RowShape rows = {N, (int)C, pitch};
        char what[64];
        const Floats x = random_values<floatX>(N * C, 2), dout = random_values<floatX>(N * C, 1);
        const Floats w = random_values<floatX>(C, 1), dx0 = random_values<floatX>(N * C, 1), dw0 = random_values<float>(C, 1);
        Floats out(N * C), rstd(N), dx = dx0, dw = dw0;
        std::vector<char> scratch(rmsnorm_backward_scratch(N, (int)C));
        rmsnorm_forward(out.data(), rstd.data(), x.data(), w.data(), N, (int)C, 1e-5f);
        rmsnorm_backward(dx.data(), dw.data(), scratch.data(), dout.data(), x.data(), w.data(), rstd.data(), N, (int)C);
        floatX *d_x = upload_rows<floatX>(x, N, C, pitch), *d_dout = upload_rows<floatX>(dout, N, C, pitch);
        floatX* d_w = upload_rows<floatX>(w, 1, C, C);
        float *d_rstd = upload(rstd), *d_dw = NULL;
        for (int threads : {32, (int)RMSNORM_BACKWARD_THREADS, (int)RMSNORM_THREADS}) {
            auto launch = [&](bool weight) {
                floatX* d_dx = upload_rows<floatX>(dx0, N, C, pitch);
                d_dw = upload(dw0);
                if (threads == RMSNORM_BACKWARD_THREADS) {
                    void* d_scratch = device_alloc<char>(rmsnorm_backward_scratch_cuda(N, (int)C));
                    rmsnorm_backward_cuda(d_dx, d_dw, d_scratch, d_dout, d_x, d_w, d_rstd, rows, 0);
                } else {
                    const RmsnormBackwardPlan plan = rmsnorm_backward_plan(N, (int)C, threads);
                    rmsnorm_backward_launch(&plan, d_dx, d_dw, device_alloc<float>(plan.blocks * C), d_dout, d_x, d_w, d_rstd,
                                            rows, 0);
                }
                return weight ? download(d_dw, C) : download_rows(d_dx, N, C, pitch);
            };
            snprintf(what, sizeof what, "rmsnorm backward N=%zu C=%zu, %d threads", N, C, threads);
            compare(what, twice(what, [&] { return launch(false); }), dx, ulp, 5e-6f);
            compare(what, twice(what, [&] { return launch(true); }), dw, 1e-5f, 1e-5f);
        }
        device_free_all();
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// rope

static void rope_turns_q_and_k_and_leaves_v() {
    // B, T, first_pos, NH, NKV, HD, longest document (0: none)
    const int shapes[][7] = {{2, 17, 0, 6, 2, 10, 0},   {1, 33, 5, 4, 4, 12, 0},    {3, 100, 0, 12, 4, 64, 0},
                             {1, 50, 7, 32, 8, 128, 0}, {2, 9, 0, 3, 1, 16, 0},     {1, 20, 3, 5, 1, 96, 0},
                             {1, 5, 0, 2, 1, 256, 0},   {1, 1, 999, 9, 3, 64, 0},   {2, 300, 0, 1, 1, 2, 0},
                             {2, 17, 0, 6, 2, 10, 5},   {3, 100, 0, 12, 4, 64, 40}, {2, 50, 7, 32, 8, 128, 20},
                             {2, 300, 0, 1, 1, 2, 1}};
    for (auto& s : shapes) {
        const int B = s[0], T = s[1], first = s[2], NH = s[3], NKV = s[4], HD = s[5];
        const size_t N = (size_t)B * T, width = (size_t)(NH + 2 * NKV) * HD, pitch = padded(width);
        char what[96];
        snprintf(what, sizeof what, "rope B=%d T=%d NH=%d NKV=%d HD=%d documents=%d", B, T, NH, NKV, HD, s[6]);
        int32_t* starts = random_starts(B, T, s[6]);
        const int32_t* d_starts = starts ? upload(std::vector<int32_t>(starts, starts + N)) : NULL;
        ModelConfig c;
        memset(&c, 0, sizeof c);
        c.head_dim = HD;
        c.rope_theta = 500000;
        Floats table((size_t)(first + T) * HD);
        rope_table(table.data(), first + T, &c);
        const Floats qkv = random_values<floatX>(N * width, 1);
        const AttentionShape shape = {B, T, NH, NKV, HD};
        float* d_table = upload(table);
        for (int backward = 0; backward < 2; backward++) {
            Floats want = qkv;
            (backward ? rope_backward : rope_forward)(want.data(), starts, table.data(), first, shape);
            const Floats got = twice(what, [&] {
                floatX* d = upload_rows<floatX>(qkv, N, width, pitch);
                (backward ? rope_backward_cuda : rope_forward_cuda)(d, d_starts, d_table, first, shape, pitch, 0);
                return download_rows(d, N, width, pitch);
            });
            compare(what, got, want);
            bool same = true;
            for (size_t n = 0; n < N; n++) {
                for (size_t i = (size_t)(NH + NKV) * HD; i < width; i++) {
                    same = same && got[n * width + i] == qkv[n * width + i];
                }
            }
            CHECK(same, "%s: v was changed", what);
        }
        free(starts);
        device_free_all();
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// heads for parts of rows

static void heads_are_packed_and_unpacked() {
    // B, T of a part, NH, NKV (0: attention's output), HD, parts
    const int shapes[][6] = {{1, 17, 4, 2, 64, 2},  {3, 33, 12, 4, 64, 2},   {3, 33, 12, 4, 64, 4}, {1, 50, 32, 8, 128, 8},
                             {3, 9, 32, 8, 128, 4}, {1, 129, 32, 0, 128, 2}, {3, 20, 12, 0, 64, 4}, {2, 7, 4, 2, 12, 2},
                             {2, 5, 2, 2, 10, 2},   {1, 3, 8, 8, 2, 8},      {1, 1, 2, 2, 256, 2},  {3, 4, 6, 3, 6, 1}};
    for (auto& s : shapes) {
        const AttentionShape shape = {s[0], s[1], s[2], s[3], s[4]};
        const int parts = s[5];
        const size_t N = (size_t)s[0] * s[1], width = heads_width(shape), own = width / parts;
        const size_t pitch = row_pitch<floatX>(width), own_pitch = row_pitch<floatX>(own);
        char what[96];
        snprintf(what, sizeof what, "heads B=%d T=%d NH=%d NKV=%d HD=%d parts=%d", s[0], s[1], s[2], s[3], s[4], parts);
        Floats rows = random_values<floatX>(N * width, 1), pieces(N * width);
        heads_pack(pieces.data(), rows.data(), shape, parts, false);
        compare(what,
                twice(what,
                      [&] {
                          floatX *from = upload_rows<floatX>(rows, N, width, pitch),
                                 *to = device_alloc<floatX>(N * parts * own_pitch);
                          heads_pack_cuda(to, from, shape, parts, false, 0);
                          return download_rows(to, N * parts, own, own_pitch);
                      }),
                pieces, 0, 0);
        compare(what,
                twice(what,
                      [&] {
                          floatX *from = upload_rows<floatX>(pieces, N * parts, own, own_pitch),
                                 *to = device_alloc<floatX>(N * pitch);
                          heads_pack_cuda(from, to, shape, parts, true, 0);
                          return download_rows(to, N, width, pitch);
                      }),
                rows, 0, 0);
        device_free_all();
    }
}

/* What the members' all-to-all does, on one card: block q of member p of each row becomes block p of member q. */
static void exchange_blocks(const std::vector<floatX*>& to, const std::vector<floatX*>& from, AttentionShape s) {
    const size_t parts = to.size(), block = (size_t)s.T * row_pitch<floatX>(heads_width(s) / parts);
    for (size_t i = 0; i < s.B * parts * parts; i++) {
        const size_t b = i / parts / parts, p = i / parts % parts, q = i % parts;
        CUDA_CHECK(cudaMemcpyAsync(to[q] + (b * parts + p) * block, from[p] + (b * parts + q) * block, block * sizeof(floatX),
                                   cudaMemcpyDeviceToDevice, 0));
    }
}

/* Returns each member's heads (B, T parts, heads / parts) of rows x (B, T parts, all heads). */
static std::vector<floatX*> share_rows(const Floats& x, AttentionShape s, int parts) {
    const size_t width = heads_width(s), part = (size_t)s.T * width, room = (size_t)s.B * s.T * heads_room(width, parts);
    std::vector<floatX*> pieces, heads;
    for (int p = 0; p < parts; p++) {
        Floats rows;
        for (int b = 0; b < s.B; b++) {
            const size_t first = (size_t)(b * parts + p) * part;
            rows.insert(rows.end(), x.begin() + first, x.begin() + first + part);
        }
        pieces.push_back(device_alloc<floatX>(room));
        heads.push_back(device_alloc<floatX>(room));
        floatX* on_device = upload_rows<floatX>(rows, (size_t)s.B * s.T, width, row_pitch<floatX>(width));
        heads_pack_cuda(pieces[p], on_device, s, parts, false, 0);
    }
    exchange_blocks(heads, pieces, s);
    return heads;
}

/* Returns the rows of the members' heads. */
static Floats unshare_rows(const std::vector<floatX*>& heads, AttentionShape s) {
    const int parts = (int)heads.size();
    const size_t width = heads_width(s), part = (size_t)s.T * width, pitch = row_pitch<floatX>(width);
    std::vector<floatX*> pieces;
    for (int p = 0; p < parts; p++) { pieces.push_back(device_alloc<floatX>((size_t)s.B * s.T * heads_room(width, parts))); }
    exchange_blocks(pieces, heads, s);
    Floats x((size_t)s.B * parts * part);
    for (int p = 0; p < parts; p++) {
        floatX* on_device = device_alloc<floatX>((size_t)s.B * s.T * pitch);
        heads_pack_cuda(pieces[p], on_device, s, parts, true, 0);
        const Floats rows = download_rows(on_device, (size_t)s.B * s.T, width, pitch);
        for (int b = 0; b < s.B; b++) {
            std::copy_n(rows.begin() + b * part, part, x.begin() + (size_t)(b * parts + p) * part);
        }
    }
    return x;
}

/* Runs RoPE and attention, forward and backward. */
static void run_attention(floatX* qkv, floatX* out, floatX* dqkv, const floatX* dout, const int32_t* starts, const float* table,
                          AttentionShape s) {
    const size_t pitch = row_pitch<floatX>(heads_width(s)), out_pitch = row_pitch<floatX>((size_t)s.NH * s.HD);
    float* lse = device_alloc<float>((size_t)s.B * s.NH * s.T);
    char* scratch = device_alloc<char>(attention_backward_scratch_cuda(s));
    rope_forward_cuda(qkv, starts, table, 0, s, pitch, 0);
    attention_forward_cuda(out, lse, qkv, starts, s, pitch, out_pitch, 0);
    attention_backward_cuda(dqkv, scratch, dout, out, lse, qkv, starts, table, s, pitch, out_pitch, 0);
}

static void attention_by_heads_is_that_over_whole_rows() {
    // B, T of a part, NH, NKV, HD, parts, longest document (0: none)
    const int shapes[][7] = {{1, 64, 4, 2, 64, 2, 0},   {2, 33, 12, 4, 64, 4, 0},   {3, 50, 4, 2, 64, 2, 40},
                             {1, 300, 8, 2, 128, 2, 0}, {2, 20, 16, 8, 128, 8, 30}, {2, 9, 4, 2, 12, 2, 0},
                             {3, 11, 2, 2, 10, 2, 7}};
    for (auto& c : shapes) {
        const int parts = c[5];
        const AttentionShape s = {c[0], c[1], c[2], c[3], c[4]}, heads = heads_shape(s, parts);
        const AttentionShape all = {s.B, s.T * parts, s.NH, s.NKV, s.HD};
        const size_t N = (size_t)s.B * all.T, width = heads_width(s), Q = (size_t)s.NH * s.HD;
        const size_t pitch = row_pitch<floatX>(width), out_pitch = row_pitch<floatX>(Q);
        char what[96];
        snprintf(what, sizeof what, "shared B=%d T=%d NH=%d NKV=%d HD=%d parts=%d", s.B, all.T, s.NH, s.NKV, s.HD, parts);
        int32_t* starts = random_starts(s.B, all.T, c[6]);
        const int32_t* d_starts = starts ? upload(std::vector<int32_t>(starts, starts + N)) : NULL;
        ModelConfig config;
        memset(&config, 0, sizeof config);
        config.head_dim = s.HD;
        config.rope_theta = 500000;
        Floats table((size_t)all.T * s.HD);
        rope_table(table.data(), all.T, &config);
        const float* d_table = upload(table);
        const Floats qkv = random_values<floatX>(N * width, 1), dout = random_values<floatX>(N * Q, 1);
        std::vector<floatX*> qkvs = share_rows(qkv, s, parts), douts = share_rows(dout, heads_out(s), parts), outs, dqkvs;
        for (int p = 0; p < parts; p++) {
            outs.push_back(device_alloc<floatX>((size_t)s.B * s.T * heads_room(Q, parts)));
            dqkvs.push_back(device_alloc<floatX>((size_t)s.B * s.T * heads_room(width, parts)));
            run_attention(qkvs[p], outs[p], dqkvs[p], douts[p], d_starts, d_table, heads);
        }
        floatX *w_qkv = upload_rows<floatX>(qkv, N, width, pitch), *w_dout = upload_rows<floatX>(dout, N, Q, out_pitch);
        floatX *w_out = device_alloc<floatX>(N * out_pitch), *w_dqkv = device_alloc<floatX>(N * pitch);
        run_attention(w_qkv, w_out, w_dqkv, w_dout, d_starts, d_table, all);
        compare(what, unshare_rows(outs, heads_out(s)), download_rows(w_out, N, Q, out_pitch), ulp, 1e-4f);
        compare(what, unshare_rows(dqkvs, s), download_rows(w_dqkv, N, width, pitch), 2 * ulp, 1e-3f);
        free(starts);
        device_free_all();
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// swiglu

static void swiglu_agrees_in_place_and_apart() {
    const size_t shapes[][2] = {{1, 136}, {17, 136}, {33, 137}, {300, 2048}, {20, 8192}, {7, 14336}, {1000, 1}, {50, 24}};
    for (auto& s : shapes) {
        const size_t N = s[0], F = s[1], wide = padded(2 * F), pitch = padded(F);
        char what[64];
        snprintf(what, sizeof what, "swiglu N=%zu F=%zu", N, F);
        Floats gate_up = random_values<floatX>(N * 2 * F, 4), dout = random_values<floatX>(N * F, 1);
        gate_up[0] = -100;  // e^100 overflows fp32 in the naive form
        Floats out(N * F), dgate_up(N * 2 * F);
        swiglu_forward(out.data(), gate_up.data(), N, (int)F);
        swiglu_backward(dgate_up.data(), dout.data(), gate_up.data(), N, (int)F);
        floatX *d_in = upload_rows<floatX>(gate_up, N, 2 * F, wide), *d_dout = upload_rows<floatX>(dout, N, F, pitch);
        const Floats forward = twice(what, [&] {
            floatX* d_out = device_alloc<floatX>(N * pitch);
            swiglu_forward_cuda(d_out, d_in, N, (int)F, wide, pitch, 0);
            return download_rows(d_out, N, F, pitch);
        });
        compare(what, forward, out);
        floatX* d_again = NULL;
        const Floats apart = twice(what, [&] {
            floatX* d_grad = device_alloc<floatX>(N * wide);
            d_again = device_alloc<floatX>(N * pitch);
            swiglu_backward_cuda(d_grad, d_again, d_dout, d_in, N, (int)F, wide, pitch, 0);
            return download_rows(d_grad, N, 2 * F, wide);
        });
        compare(what, apart, dgate_up);
        CHECK(download_rows(d_again, N, F, pitch) == forward, "%s: the output that backward repeats differs", what);
        swiglu_backward_cuda(d_in, NULL, d_dout, d_in, N, (int)F, wide, pitch, 0);
        CHECK(download_rows(d_in, N, 2 * F, wide) == apart, "%s: in place differs from apart", what);
        device_free_all();
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// cross-entropy

/* Computes the oracle's gradients; for long rows, where the oracle's fp32 sum has an error of its own, in double. */
static void crossentropy_gradients(Floats& losses, Floats& dlogits, const std::vector<int32_t>& targets, float dloss, size_t N,
                                   size_t V) {
    const Floats logits = dlogits;
    crossentropy_fused(losses.data(), dlogits.data(), targets.data(), dloss, N, (int)V);
    if (V <= 65536) { return; }
    for (size_t n = 0; n < N; n++) {
        const float* x = logits.data() + n * V;
        double sum = 0;
        const double largest = *std::max_element(x, x + V);
        for (size_t v = 0; v < V; v++) { sum += exp(x[v] - largest); }
        for (size_t v = 0; v < V; v++) {
            if (targets[n] < 0) { continue; }
            dlogits[n * V + v] = (float)((exp(x[v] - largest) / sum - (v == (size_t)targets[n])) * dloss);
        }
    }
}

/* Compares losses. Where the target is by far the largest logit, the loss is log(sum) of a sum near 1, so it has the sum's
 * error: that of 2^x and of a rounding of max log2(e). Where all rows are such, the largest loss is no measure of it. */
static void compare_losses(const char* what, const Floats& got, const Floats& want) {
    compare(what, got, want, 2e-5f, 1e-6f, 1e-6f);
}

static void crossentropy_agrees_for_all_vocabularies() {
    // one block of a few warps, one full block, rows that also need shared memory, and rows too large for that; some shapes
    // have more rows than run at a time
    const size_t shapes[][2] = {{3, 2},     {5, 97},      {9000, 301}, {9, 257},     {20, 4096},  {700, 12291}, {300, 32768},
                                {7, 32769}, {150, 50257}, {4, 65536},  {80, 128256}, {3, 131079}, {2, 262144},  {2, 300001}};
    for (auto& s : shapes) {
        for (int large = 0; large < 2; large++) {
            const size_t N = s[0], V = s[1], pitch = padded(V);
            char what[64];
            snprintf(what, sizeof what, "crossentropy N=%zu V=%zu%s", N, V, large ? " large logits" : "");
            const Floats logits = random_values<floatX>(N * V, large ? 1000.0f : 3.0f);
            std::vector<int32_t> targets = random_tokens(N, (int)V);
            targets[0] = (int32_t)V - 1;                            // in the tail if V is no multiple of a vector
            for (size_t n = 1; n < N; n += 3) { targets[n] = -1; }  // not trained
            const float dloss = 0.25f, scale = 8.0f;
            Floats losses(N), fused_losses(N), dlogits = logits;
            crossentropy_forward(losses.data(), logits.data(), targets.data(), N, (int)V);
            crossentropy_gradients(fused_losses, dlogits, targets, dloss * scale, N, V);
            int32_t* d_targets = upload(targets);
            float *d_scale = upload(Floats(1, scale)), *d_losses = NULL;
            floatX* d = NULL;
            compare_losses(what,
                           twice(what,
                                 [&] {
                                     d = upload_rows<floatX>(logits, N, V, pitch);
                                     d_losses = device_alloc<float>(N);
                                     crossentropy_forward_cuda(d_losses, d, d_targets, N, (int)V, pitch, 0);
                                     return download(d_losses, N);
                                 }),
                           losses);
            CHECK(download_rows(d, N, V, pitch) == logits, "%s: forward changed the logits", what);
            compare(what,
                    twice(what,
                          [&] {
                              d = upload_rows<floatX>(logits, N, V, pitch);
                              d_losses = device_alloc<float>(N);
                              crossentropy_fused_cuda(d_losses, d, d_targets, dloss, d_scale, N, (int)V, pitch, 0);
                              return download_rows(d, N, V, pitch);
                          }),
                    dlogits, 2 * ulp, large ? 1e-4f : 1e-6f, FLT_EPSILON * dloss * scale);  // p - 1, p near 1
            compare_losses(what, download(d_losses, N), losses);
            device_free_all();
        }
    }
}

static const char* const crossentropy_names[NUM_CE_WAYS] = {"held", "row", "looped"};

/* Compares each kernel with the oracle. With few blocks each has many rows: tests a block's last row, and blocks with one
 * more. */
static void crossentropy_plans_agree() {
    const float dloss = 0.25f, scale = 8.0f;
    for (size_t V : {2, 97, 301, 32767, 32768, 32769, 50257, 128256, 131072, 131073, 262144, 262152}) {
        const size_t N = 8, pitch = padded(V);
        const Floats logits = random_values<floatX>(N * V, 3);
        std::vector<int32_t> targets = random_tokens(N, (int)V);
        targets[0] = 0;
        targets[1] = (int32_t)V - 1;
        targets[2] = targets[N - 1] = -1;  // not trained
        Floats losses(N), dlogits = logits;
        crossentropy_gradients(losses, dlogits, targets, dloss * scale, N, V);
        int32_t* d_targets = upload(targets);
        float* d_scale = upload(Floats(1, scale));
        for (int way = 0; way < NUM_CE_WAYS; way++) {
            CrossentropyPlan plan = crossentropy_plan((CrossentropyWay)way, N, (int)V);
            const bool can = plan.blocks > 0;
            for (size_t blocks : {N, (size_t)3}) {
                if (!can || (blocks < N && way != CE_ROW)) {
                    continue;
                }  // cannot run (long rows, before sm_80), or no rows in turns (only CE_ROW)
                plan.blocks = blocks;
                char what[96];
                snprintf(what, sizeof what, "crossentropy V=%zu, %s, %zu blocks", V, crossentropy_names[way], blocks);
                float* d_losses = NULL;
                const Floats got = twice(what, [&] {
                    floatX* d = upload_rows<floatX>(logits, N, V, pitch);
                    d_losses = device_alloc<float>(N);
                    crossentropy_run(&plan, d_losses, d, d_targets, dloss, d_scale, N, (int)V, pitch, 0);
                    return download_rows(d, N, V, pitch);
                });
                compare(what, got, dlogits, 2 * ulp, 1e-6f);
                const Floats got_losses = download(d_losses, N);
                compare_losses(what, got_losses, losses);
                size_t wrong = 0;
                for (size_t n : {(size_t)2, N - 1}) {
                    for (size_t v = 0; v < V; v++) { wrong += got[n * V + v] != 0 || got_losses[n] != 0; }
                }
                CHECK(wrong == 0, "%s: %zu elements of rows without a target are not 0", what, wrong);
            }
        }
        device_free_all();
    }
}

/* A NaN or inf anywhere in a row, the tail included, makes that row's loss not finite, and no other row's. */
static void crossentropy_shows_what_is_not_finite() {
    const size_t V = 301, N = 5000, pitch = padded(V);  // more rows than run at a time
    Floats logits = random_values<floatX>(N * V, 1);
    for (size_t n = 0; n < N; n += 2) { logits[n * V + (2 * n + (n % 4 ? 0 : 1)) % V] = n % 4 ? NAN : INFINITY; }
    int32_t* d_targets = upload(random_tokens(N, (int)V));
    auto check = [&](const char* name, const std::function<void(float*, floatX*)>& launch) {
        floatX* d = upload_rows<floatX>(logits, N, V, pitch);
        float* d_losses = device_alloc<float>(N);
        launch(d_losses, d);
        const Floats losses = download(d_losses, N), got = download_rows(d, N, V, pitch);
        size_t wrong = 0;
        for (size_t n = 0; n < N; n++) {
            size_t finite = 0;
            for (size_t c = 0; c < V; c++) { finite += isfinite(got[n * V + c]); }
            wrong += n % 2 == 0 ? isfinite(losses[n]) : !isfinite(losses[n]) || finite < V;
        }
        CHECK(wrong == 0, "crossentropy, %s: %zu of %zu rows are finite and should not be, or the reverse", name, wrong, N);
    };
    check("forward", [&](float* losses, floatX* d) { crossentropy_forward_cuda(losses, d, d_targets, N, (int)V, pitch, 0); });
    for (int way = 0; way < NUM_CE_WAYS; way++) {
        CrossentropyPlan plan = crossentropy_plan((CrossentropyWay)way, N, (int)V);
        if (plan.blocks == 0) { continue; }
        if (way == CE_ROW) { plan.blocks = 7; }
        check(crossentropy_names[way], [&](float* losses, floatX* d) {
            crossentropy_run(&plan, losses, d, d_targets, 1.0f, NULL, N, (int)V, pitch, 0);
        });
    }
    device_free_all();
}

// ---------------------------------------------------------------------------------------------------------------------
// what is not finite

template <typename T>
static void check_first_not_finite(size_t rows, size_t width, size_t pitch) {
    Floats x = random_values<T>(rows * width, 1);
    const size_t n = rows * width, places[] = {n, n - 1, n / 2, 0};  // n: none; earlier values stay set, further back
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

static StepHyper test_hyper() {
    StepHyper h;
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
    for (size_t n : {(size_t)8, (size_t)1000, (size_t)8192, (size_t)100008, (size_t)40000000}) {
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
            const StepHyper h = test_hyper();
            step_begin_cuda(state, 7, 0.5, 0);
            norm_square_cuda(&sums, d_g, n, 0);
            norm_square_cuda(&sums, d_apart, 1024, 0);
            loss_sum_cuda(state, d_apart, d_targets, NULL, 0, 10, 100, true, 0);
            loss_sum_cuda(state, d_apart, d_targets + 1000, NULL, 0, 1, 24, false, 0);
            step_decide_cuda(state, &sums, &h, 0);
            found[run] = read_state(state).norm_square;
        }
        CHECK(found[0] == found[1], "two runs differ: %.17g %.17g", found[0], found[1]);
        // what several GPUs do: each list on its own, then a decision without any
        NormSums sums = norm_sums(device_alloc<char>(norm_square_scratch_cuda()));
        const NormSums none = norm_sums(sums.partial);
        const StepHyper hyper = test_hyper();
        step_begin_cuda(state, 8, 0.5, 0);
        norm_square_cuda(&sums, d_g, n, 0);
        norm_square_cuda(&sums, d_apart, 1024, 0);
        for (int i = 0; i < sums.lists; i++) {
            norm_finish_cuda(state, sums.partial + (size_t)i * NORM_BLOCKS, sums.count[i], 0);
        }
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

/* The sum in rank order has the oracle's bits, alone and added to that of the micro-steps before, and leaves its squares. */
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
    // in vectors of 8: less than a block, a whole grid and one vector more, several rounds of the grid
    for (size_t n : {(size_t)8, (size_t)1024, (size_t)SUM_BLOCKS * SUM_THREADS * 8 + 8, (size_t)3000000}) {
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
static StepState decide(StepState* state, const StepHyper& h, int64_t step, float loss, const floatX* grad, size_t n,
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
    StepHyper h = test_hyper();
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
    StepHyper h = test_hyper();
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
    StepHyper h = test_hyper();
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

// ---------------------------------------------------------------------------------------------------------------------
// AdamW

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
    size_t n;                             // elements of the arena
    std::vector<bool> gap;                // (n)
    std::vector<AdamWStretch> stretches;  // `grad` is set on the device
    std::vector<bool> apart;              // of each stretch: has separate fp32 gradients
    size_t grads_first, grads_end;        // range of the main array of gradients
    Floats start;                         // (n) weights
    std::vector<Floats> grads;            // (STEPS, n)

    size_t end_of(size_t k) const { return k + 1 < stretches.size() ? stretches[k + 1].first : n; }
};

/* Builds one block, C wide. If PARAM_ALIGN does not divide C, there are gaps after norms and matrices. The tensor outside the
 * window has separate gradients, as all norms have. */
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

/* Uploads one step's gradients g and the stretches. The separate rows follow each other without a gap, so reading past one's
 * end reads another's gradient; the main array has NaN in their places. */
template <typename Grad>
static void upload_grads(AdamWTensors<Grad>* t, const AdamWCase& c, const Floats& g) {
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
    std::vector<AdamWStretch> stretches = c.stretches;
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
    AdamWTensors<Grad> t;
    t.params = device_alloc<floatX>(c.n);
    t.master = kind == MASTER_NONE ? NULL : device_alloc<char>(c.n * master_bytes);
    t.m = device_alloc<char>(c.n * moment_bytes);
    t.v = device_alloc<char>(c.n * moment_bytes);
    CUDA_CHECK(cudaMemset(t.m, 0, c.n * moment_bytes));
    CUDA_CHECK(cudaMemset(t.v, 0, c.n * moment_bytes));
    t.state_first = 0;
    master_set_cuda(t.params, t.master, kind, upload(c.start), c.n, 0);
    StepHyper h = test_hyper();
    h.grad_clip = 0;
    StepState* state = new_state(1);
    for (int step = 0; step < STEPS; step++) {
        upload_grads(&t, c, c.grads[step]);
        decide(state, h, step, 1.0f, upload_rows<floatX>(Floats(64, 0.5f), 1, 64, 64), 64);
        for (int part = 0; part < parts; part++) {
            const size_t lo = c.n / 8 * part / parts * 8, hi = c.n / 8 * (part + 1) / parts * 8;
            adamw_update_cuda(&t, lo, hi, state, &h, kind, bf16_moments, 42, 0);
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
    AdamWTensors<floatX> t;
    t.params = device_alloc<floatX>(N);
    t.master = kind == MASTER_NONE ? NULL : device_alloc<float>(N);
    t.m = upload(start);
    t.v = upload(start);
    t.state_first = 0;
    master_set_cuda(t.params, t.master, kind, upload(start), N, 0);
    const std::vector<AdamWStretch> stretches = {{0, NULL, 0, 1}};
    t.stretches = upload(stretches);
    t.num_stretches = 1;
    floatX* bad = upload_rows<floatX>(Floats(N, NAN), 1, N, N);
    t.grads = bad;
    t.grads_first = 0;
    t.grads_end = N;
    StepState* state = new_state(1);
    const StepHyper h = test_hyper();
    CHECK(decide(state, h, 0, 1.0f, bad, N).verdict == UPDATE_NOT_FINITE, "NaN gradients pass");
    adamw_update_cuda(&t, 0, N, state, &h, kind, false, 42, 0);
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
        // |x| from 2^-100 on, and x / d from 2^-124 to 2^124; and what is special
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

/* The functions without branches give the bits of the general ones: for every mantissa, at the ends of the range, between, and
 * above and below 1, where a root of an odd exponent is another one. */
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

/* Returns a float's bits: of any float, of an end of some range, of zero, or of a size that occurs in training. */
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

/* Returns a copy of x on the device, as fp32 or as bfloat16, that of the upper halves. */
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
static AdamWRun run_adamw_step(const StepState& state, const StepHyper& h, MasterKind kind, bool bf16_moments,
                               const AdamWRun& old, const Floats& grads) {
    const size_t n = old.master.size();
    const std::vector<AdamWStretch> stretches = {{0, NULL, 5, 1}, {n / 2, NULL, 9, 1}};
    AdamWTensors<float> t;
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
    adamw_update_cuda(&t, 0, n, upload(std::vector<StepState>(1, state)), &h, kind, bf16_moments, 42, 0);
    AdamWRun r;
    float* exact = device_alloc<float>(n);
    master_get_cuda(exact, t.params, t.master, kind, n, 0);
    r.params = download_rows(t.params, 1, n, n);
    r.master = download(exact, n);
    r.m = download_moments(t.m, n, bf16_moments);
    r.v = download_moments(t.v, n, bf16_moments);
    return r;
}

/* The oracle of that step: every operation rounded, then weights and moments by the bits of their step, tensor and element. */
static AdamWRun adamw_step_oracle(const StepState& state, const StepHyper& h, MasterKind kind, bool bf16_moments,
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

/* Weights and moments have the bits of IEEE 754, whatever they are: also where divisions need the slower path. */
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
    StepHyper h = test_hyper();
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
/* Without master weights, steps of a fraction of a unit move a weight by that fraction on average, in whole units that a weight
 * takes or not independently of the others and of its own before. The limits are five deviations of a binomial distribution,
 * and of the variance of such. Rounded to nearest, weights would stay, or move by a unit each time. */
static void small_steps_survive_on_average() {
    enum { N = 1 << 16, TIMES = 16 };
    const float unit = 0x1p-7f;  // between 1 and 2
    const StepHyper h = test_hyper();
    for (float fraction : {0.0f, 0.03125f, 0.3125f, 0.5f, 0.96875f}) {
        for (bool bf16_moments : {false, true}) {
            AdamWRun r = {{}, Floats(N, 1.75f), Floats(N, 1.0f), Floats(N, 1.0f)};
            StepState state;
            memset(&state, 0, sizeof state);
            state.verdict = UPDATE_APPLIED;
            state.grad_scale = state.sqrt_correction2 = state.decay = 1;
            state.step_size = fraction * unit;  // the gradient is 1, and so are m and v
            for (int step = 0; step < TIMES; step++) {
                state.step = step;
                r = run_adamw_step(state, h, MASTER_NONE, bf16_moments, r, Floats(N, 1.0f));
                r.m = r.v = Floats(N, 1.0f);
                device_free_all();
            }
            double sum = 0, squares = 0;
            const double mean = TIMES * (double)fraction, variance = mean * (1 - (double)fraction);
            for (float w : r.master) {
                const double units = (1.75 - (double)w) / (double)unit;
                CHECK(units >= 0 && units <= TIMES && units == floor(units), "fraction %g: a weight moved by %g units",
                      (double)fraction, units);
                sum += units;
                squares += (units - mean) * (units - mean);
            }
            // the fourth central moment is variance (1 + (3 TIMES - 6) / TIMES variance)
            const double fourth = variance * (1 + (3.0 * TIMES - 6) / TIMES * variance);
            const double most = 5 * sqrt(variance / N), most_squares = 5 * sqrt((fourth - variance * variance) / N);
            CHECK(fabs(sum / N - mean) <= most, "fraction %g, bf16 moments %d: %d steps moved weights by %g units, not by %g",
                  (double)fraction, bf16_moments, (int)TIMES, sum / N, mean);
            CHECK(fabs(squares / N - variance) <= most_squares, "fraction %g, bf16 moments %d: variance %g, not %g",
                  (double)fraction, bf16_moments, squares / N, variance);
        }
    }
}
#endif

// random bit patterns; all lower halves of the numbers from 1 on, the tie among them; and values that rounding may carry too
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

/* The result is the upper half or the next number away from zero, as often as the lower half says; inf and NaN stay what they
 * are. Runs on the host. */
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

// ---------------------------------------------------------------------------------------------------------------------
// matmul

static MatmulContext* matmul_context() { return matmul_create(device_alloc<char>(matmul_workspace_bytes()), false); }

/* Returns half a unit in the last place of x in T: the largest error of rounding to it. */
template <typename T>
static float half_ulp(float x) {
    const int digits = sizeof(T) == 4 ? 24 : std::is_same<T, __half>::value ? 11 : 8;
    const int lowest = std::is_same<T, __half>::value ? -14 : -126;  // exponent of the smallest normal number
    int exponent = 0;
    frexpf(x, &exponent);  // 2^(exponent - 1) <= |x| < 2^exponent
    return ldexpf(1.0f, (exponent - 1 > lowest ? exponent - 1 : lowest) - digits);
}

/* Compares products: got = round(sum + add), where sum is in fp32 over `K` terms and `want` is the oracle's sum + add. Allowed:
 *   half an ulp of the result, for its rounding;
 *   with an addition also half an ulp of the sum before it: some of cuBLASLt's kernels round the product to the output's type
 *   before they add C (seen on an H200), as x + linear(x) does in two steps. Without C there is one rounding;
 *   half an ulp of `few`, the part of the sum that matmul_even() computes and rounds as a separate product, and of what is
 * added;
 *   2^-22 sqrt(K) of the largest sum, for the order of the sum in fp32 and the tensor cores' truncation. */
template <typename T>
static void compare_product(const char* what, const Floats& got, const Floats& want, const Floats* add, size_t K,
                            const Floats* few = NULL) {
    float largest = 0, worst = 0;
    size_t at = 0;
    for (size_t i = 0; i < want.size(); i++) { largest = fmaxf(largest, fabsf(want[i] - (add ? (*add)[i] : 0.0f))); }
    const float order = ldexpf(sqrtf((float)K) * largest, -22);
    for (size_t i = 0; i < want.size(); i++) {
        float allowed = half_ulp<T>(fmaxf(fabsf(want[i]), fabsf(got[i]))) + order;
        if (add) { allowed += half_ulp<T>(fabsf(want[i] - (*add)[i]) + order); }
        if (few) { allowed += half_ulp<T>(fabsf((*few)[i]) + order) + half_ulp<T>(fabsf(want[i] - (*few)[i]) + order); }
        const float excess = fabsf(got[i] - want[i]) - allowed;
        if (!(excess <= 0) && !(worst > excess)) {
            worst = excess;
            at = i;
        }
    }
    CHECK(worst == 0, "%s: element %zu is %.8g, wanted %.8g of which %.8g is added", what, at, (double)got[at],
          (double)want[at], add ? (double)(*add)[at] : 0.0);
}

static void matmul_agrees_in_all_directions() {
    const size_t shapes[][3] = {{1, 64, 64},   {17, 60, 97},     {200, 768, 1280}, {33, 12, 10},
                                {64, 136, 64}, {129, 2048, 301}, {50, 101, 7},     {40, 64, 50257}};
    MatmulContext* ctx = matmul_context();
    for (auto& s : shapes) {
        const size_t N = s[0], C = s[1], OC = s[2], pitch_c = padded(C), pitch_oc = padded(OC);
        const Floats x = random_values<floatX>(N * C, 1), w = random_values<floatX>(OC * C, 1),
                     r = random_values<floatX>(N * OC, 1);
        const Floats dout = random_values<floatX>(N * OC, 1), dw0 = random_values<floatX>(OC * C, 1);
        floatX *d_x = upload_rows<floatX>(x, N, C, pitch_c), *d_w = upload_rows<floatX>(w, OC, C, C);
        floatX *d_r = upload_rows<floatX>(r, N, OC, pitch_oc), *d_dout = upload_rows<floatX>(dout, N, OC, pitch_oc);
        const Operand ox = operand(d_x, pitch_c), ow = operand(d_w, C), odout = operand(d_dout, pitch_oc);
        char what[96];
        auto name = [&](const char* pass, bool add) {
            snprintf(what, sizeof what, "%s%s N=%zu C=%zu OC=%zu", pass, add ? " with addition" : "", N, C, OC);
            return what;
        };
        const size_t even = (size_t)matmul_even((int)OC, ow);
        Floats dx(N * C), few(N * C), dout_few;
        std::vector<char> scratch(matmul_scratch());
        matmul_backward_input(dx.data(), scratch.data(), dout.data(), w.data(), N, (int)C, (int)OC);
        for (size_t n = 0; n < N && even < OC; n++) {
            dout_few.insert(dout_few.end(), dout.begin() + (long)(n * OC + even), dout.begin() + (long)((n + 1) * OC));
        }
        if (even < OC) {
            matmul_backward_input(few.data(), scratch.data(), dout_few.data(), w.data() + even * C, N, (int)C,
                                  (int)(OC - even));
        }
        name("backward input", false);
        compare_product<floatX>(what,
                                twice(what,
                                      [&] {
                                          floatX* d_dx = device_alloc<floatX>(N * pitch_c);
                                          matmul_backward_input_cuda(ctx, d_dx, odout, ow, N, (int)C, (int)OC, pitch_c, 0);
                                          return download_rows(d_dx, N, C, pitch_c);
                                      }),
                                dx, NULL, OC, even < OC ? &few : NULL);
        for (int add = 0; add < 2; add++) {
            Floats out(N * OC), dw = add ? dw0 : Floats(OC * C, 0.0f);
            matmul_forward(out.data(), scratch.data(), x.data(), w.data(), add ? r.data() : NULL, N, (int)C, (int)OC);
            matmul_backward_weight(dw.data(), scratch.data(), dout.data(), x.data(), N, (int)C, (int)OC);
            name("forward", add);
            compare_product<floatX>(what,
                                    twice(what,
                                          [&] {
                                              floatX* d_out = device_alloc<floatX>(N * pitch_oc);
                                              matmul_forward_cuda(ctx, d_out, ox, ow, add ? d_r : NULL, N, (int)C, (int)OC,
                                                                  pitch_oc, 0);
                                              return download_rows(d_out, N, OC, pitch_oc);
                                          }),
                                    out, add ? &r : NULL, C);
            name("backward weight", add);
            compare_product<floatX>(what,
                                    twice(what,
                                          [&] {
                                              floatX* d_dw =
                                                  add ? upload_rows<floatX>(dw0, OC, C, C) : device_alloc<floatX>(OC * C);
                                              matmul_backward_weight_cuda(ctx, d_dw, odout, ox, N, (int)C, (int)OC, add, 0);
                                              return download_rows(d_dw, OC, C, C);
                                          }),
                                    dw, add ? &dw0 : NULL, N);
            name("backward weight in fp32", add);
            compare_product<float>(what,
                                   twice(what,
                                         [&] {
                                             float* d_dw = add ? upload(dw0) : device_alloc<float>(OC * C);
                                             matmul_backward_weight_cuda(ctx, d_dw, odout, ox, N, (int)C, (int)OC, add, 0);
                                             return download(d_dw, OC * C);
                                         }),
                                   dw, add ? &dw0 : NULL, N);
        }
    }
    matmul_destroy(ctx);
    device_free_all();
}

static void element_sizes_are_those_of_the_types() {
    CHECK(matmul_type_bytes(CUDA_R_32F) == 4 && matmul_type_bytes(CUDA_R_16F) == 2 && matmul_type_bytes(CUDA_R_16BF) == 2,
          "wanted 4, 2 and 2 bytes");
    CHECK(matmul_type_bytes(CUDA_R_8F_E4M3) == 1 && matmul_type_bytes(CUDA_R_8F_E5M2) == 1, "fp8 is not one byte");
    CHECK(data_type<__half>() == CUDA_R_16F && data_type<__nv_fp8_e5m2>() == CUDA_R_8F_E5M2, "types and names do not match");
    const float base[64] = {0};
    const Operand fp8 = operand_fp8_rows(base, NULL, 10, false, CUDA_R_8F_E4M3),
                  fp16 = {base, CUDA_R_16F, NULL, 10, NOT_SCALED}, fp32 = operand(base, 10);
    CHECK((const char*)operand_from(fp8, 2, 3).data - (const char*)base == 23, "fp8: row 2, column 3");
    CHECK((const char*)operand_from(fp16, 2, 3).data - (const char*)base == 46, "fp16: row 2, column 3");
    CHECK((const char*)operand_from(fp32, 2, 3).data - (const char*)base == 92, "fp32: row 2, column 3");
    // the even part of a width ends at a multiple of 16 bytes
    CHECK(matmul_even(207, fp8) == 192 && matmul_even(207, fp16) == 200 && matmul_even(207, fp32) == 204, "width 207");
}

/* Checks |got - want| <= 2 % of the largest element (fp32: 1e-4): other algorithms round elsewhere. */
static void same_product(const char* what, int candidate, const Floats& got, const Floats& want) {
    float largest = 0, worst = 0;
    for (size_t i = 0; i < want.size(); i++) {
        largest = fmaxf(largest, fabsf(want[i]));
        worst = fmaxf(worst, fabsf(got[i] - want[i]));
    }
    CHECK(worst <= (sizeof(floatX) == 4 ? 1e-4f : 0.02f) * largest, "%s, candidate %d: %g off, the largest is %g", what,
          candidate, (double)worst, (double)largest);
}

/* The three products of a layer, with and without what is added, for tests of their candidates. */
struct ThreeProducts {
    static constexpr size_t N = 1024, C = 768, OC = 1280;
    floatX *x, *w, *dout, *out, *dx, *dw, *residual;
    ThreeProducts() {
        x = upload_rows<floatX>(random_values<floatX>(N * C, 1), N, C, C);
        w = upload_rows<floatX>(random_values<floatX>(OC * C, 1), OC, C, C);
        dout = upload_rows<floatX>(random_values<floatX>(N * OC, 1), N, OC, OC);
        residual = upload_rows<floatX>(random_values<floatX>(N * OC, 1), N, OC, OC);
        out = device_alloc<floatX>(N * OC);
        dx = device_alloc<floatX>(N * C);
        dw = device_alloc<floatX>(OC * C);
    }
    void run(MatmulContext* ctx) {
        matmul_forward_cuda(ctx, out, operand(x, C), operand(w, C), residual, N, (int)C, (int)OC, OC, 0);
        matmul_backward_input_cuda(ctx, dx, operand(dout, OC), operand(w, C), N, (int)C, (int)OC, C, 0);
        matmul_backward_weight_cuda(ctx, dw, operand(dout, OC), operand(x, C), N, (int)C, (int)OC, false, 0);
        matmul_backward_weight_cuda(ctx, dw, operand(dout, OC), operand(x, C), N, (int)C, (int)OC, true, 0);
    }
    std::vector<Floats> results() const {
        return {download_rows(out, N, OC, OC), download_rows(dx, N, C, C), download_rows(dw, OC, C, C)};
    }
};

static void every_candidate_agrees_and_repeats_its_bits() {
    MatmulContext* ctx = matmul_context();
    ThreeProducts p;
    p.run(ctx);
    const std::vector<Floats> want = p.results();
    static const int result_of[4] = {0, 1, 2, 2};
    CHECK(ctx->num_plans == 4, "%d plans", ctx->num_plans);
    for (int i = 0; i < 4; i++) {
        const MatmulAlgos list = matmul_algos(ctx, &ctx->plans[i]);
        const cublasLtMatmulAlgo_t first = ctx->plans[i].algo;
        CHECK(memcmp(&list.algos[0], &first, sizeof first) == 0, "plan %d: the heuristic's choice is not candidate 0", i);
        for (int k = 0; k < list.count; k++) {
            ctx->plans[i].algo = list.algos[k];
            p.run(ctx);
            const Floats once = p.results()[result_of[i]];
            p.run(ctx);
            same_product("a plan", k, once, want[result_of[i]]);
            CHECK(p.results()[result_of[i]] == once, "plan %d, candidate %d: two runs differ", i, k);
            CHECK(matmul_sums_in_order(&list.algos[k]), "plan %d, candidate %d joins sums in another type", i, k);
        }
        ctx->plans[i].algo = first;
        printf("    plan %d has %d candidates\n", i, list.count);
    }
    matmul_destroy(ctx);
    device_free_all();
}

static void a_tuner_times_the_products_of_a_step() {
    MatmulContext* ctx = matmul_context();
    ThreeProducts p;
    p.run(ctx);
    const std::vector<Floats> want = p.results();
    MatmulTuner tuner = matmul_tuner_open(ctx);
    Trials* t = &tuner.trials;
    CHECK(t->num_products == 4, "%d products", t->num_products);
    for (int step = 0; step < 20; step++) {
        if (step == 2) { trials_admit(t, 18); }
        matmul_tuner_listen(&tuner, true);
        for (int layer = 0; layer < 12; layer++) { p.run(ctx); }
        ctx->trials = NULL;
        CUDA_CHECK(cudaDeviceSynchronize());
        CHECK(tuner.num_calls == 48, "%d calls in a step", tuner.num_calls);
        matmul_tuner_read(&tuner);
        matmul_tuner_record(&tuner);
        trials_next_step(t);
        for (int i = 0; i < 3; i++) { same_product("a step's last layer", step, p.results()[i], want[i]); }
    }
    trials_fit(t);
    for (int i = 0; i < 4; i++) {
        const TrialProduct* product = &t->products[i];
        CHECK(product->most_calls == 12 && product->seen == 20, "product %d: %d calls, %d steps", i, product->most_calls,
              product->seen);
        CHECK(product->num_active > 1 && product->us[0] > 0 && product->us[0] < 1e4,
              "product %d: %d candidates, the first %g us", i, product->num_active, product->us[0]);
        for (int k = 0; k < product->num_active; k++) {
            CHECK(product->us[product->active[k]] > 0, "product %d: candidate %d has no time", i, product->active[k]);
        }
    }
    bool chosen[TRIALS_PRODUCTS] = {false, true};
    t->products[1].challenger = t->products[1].active[t->products[1].num_active - 1];
    matmul_tuner_use(&tuner, chosen);
    CHECK(memcmp(&ctx->plans[1].algo, &tuner.algos[1].algos[t->products[1].challenger], sizeof(cublasLtMatmulAlgo_t)) == 0 &&
              memcmp(&ctx->plans[0].algo, &tuner.algos[0].algos[0], sizeof(cublasLtMatmulAlgo_t)) == 0,
          "the plans do not have what is chosen");
    chosen[1] = false;
    matmul_tuner_use(&tuner, chosen);
    matmul_tuner_close(&tuner);
    p.run(ctx);
    CHECK(p.results() == want, "after tuning without a choice the bits differ");
    matmul_destroy(ctx);
    device_free_all();
}

static void matmul_plans_survive_a_file() {
    const size_t N = 512, C = 768, OC = 1280;
    const Floats x = random_values<floatX>(N * C, 1), w = random_values<floatX>(OC * C, 1);
    floatX *d_x = upload_rows<floatX>(x, N, C, C), *d_w = upload_rows<floatX>(w, OC, C, C);
    auto product = [&](MatmulContext* ctx) {
        floatX* d_out = device_alloc<floatX>(N * OC);
        matmul_forward_cuda(ctx, d_out, operand(d_x, C), operand(d_w, C), (floatX*)NULL, N, (int)C, (int)OC, OC, 0);
        return download_rows(d_out, N, OC, OC);
    };
    char folder[PATH_CAP], path[PATH_CAP];
    Error e = NO_ERROR;
    test_folder(folder);
    CHECK(path_join(path, folder, "plan.json", &e), "%s", e.msg);
    MatmulContext* ctx = matmul_context();
    product(ctx);
    const MatmulAlgos list = matmul_algos(ctx, &ctx->plans[0]);
    CHECK(list.count > 1, "a product has %d candidates", list.count);
    ctx->plans[0].algo = list.algos[list.count - 1];
    const Floats tuned = product(ctx);
    bool elsewhere = true;
    CHECK(matmul_save_plans(ctx, path, &e), "%s", e.msg);
    MatmulContext* other = matmul_context();
    CHECK(matmul_load_plans(other, path, &elsewhere, &e) && !elsewhere, "%s", e.msg);
    CHECK(product(other) == tuned, "the same plan gives different bits");
    CHECK(other->num_unsaved == 0, "%d plans were not in the file", other->num_unsaved);
    CHECK(other->num_plans == 1 && memcmp(&other->plans[0].algo, &ctx->plans[0].algo, sizeof(cublasLtMatmulAlgo_t)) == 0,
          "the file's algorithm was not used");
    FILE* f = fopen(path, "w");
    fputs(
        "{\"format\": \"llama3.c matmul plans\", \"gpu\": \"another\", \"cublaslt\": 1, \"workspace\": 1, \"compute\": 1, "
        "\"plans\": []}",
        f);
    fclose(f);
    CHECK(!matmul_load_plans(other, path, &elsewhere, &e) && elsewhere && strstr(e.msg, "gpu is"),
          "a plan of another GPU was accepted: %s", e.msg);
    matmul_destroy(ctx);
    matmul_destroy(other);
    remove(path);
    rmdir(folder);
    device_free_all();
}

// ---------------------------------------------------------------------------------------------------------------------
// fp8

/* Returns (R, C) random values whose rows and columns are of very different sizes; some are zero. The last rows hold an
 * infinity or a NaN, one is all zero, one all the smallest of normal numbers. */
static Floats uneven_values(size_t R, size_t C) {
    Floats x = random_values<floatX>(R * C, 1);
    for (size_t r = 0; r < R; r++) {
        for (size_t c = 0; c < C; c++) {
            float& v = x[r * C + c];
            v = to_float(from_float<floatX>((r + c) % 11 == 0 ? 0.0f : ldexpf(v, (int)(r % 9) - (int)(c % 13))));
        }
    }
    for (size_t c = 0; c < C; c++) {
        if (R > 5) { x[2 * C + c] = 0; }
        if (R > 5) { x[3 * C + c] = to_float(from_float<floatX>(6.2e-5f)); }
    }
    if (R > 17) {
        x[(R - 1) * C + 5] = -INFINITY;
        x[(R - 2) * C + 6] = NAN;
    }
    return x;
}

/* Checks n bytes, and scales, against the oracle's. */
static void compare_quantised(const char* what, const std::vector<uint8_t>& q, const std::vector<uint8_t>& want_q,
                              const Floats& scale, const Floats& want_scale) {
    for (size_t i = 0; i < want_scale.size(); i++) {
        const bool same = scale[i] == want_scale[i] || (std::isnan(scale[i]) && std::isnan(want_scale[i]));
        if (!same) {
            CHECK(same, "%s: scale %zu is %g, wanted %g", what, i, (double)scale[i], (double)want_scale[i]);
            return;
        }
    }
    for (size_t i = 0; i < want_q.size(); i++) {
        if (q[i] == want_q[i]) { continue; }
        CHECK(false, "%s: element %zu of %zu is 0x%02X, wanted 0x%02X", what, i, want_q.size(), q[i], want_q[i]);
        return;
    }
}

/* Whether the bits are those of the largest magnitude; any NaN is as good as another. */
static bool same_largest(uint32_t bits, const Floats& x) {
    const uint32_t want = quantise_largest(x.data(), x.size(), 1);
    return bits == want || (bits > 0x7F800000u && want > 0x7F800000u);
}

static void check_counts(const char* what, const QuantiseCounts* d_counts, const QuantiseCounts& want) {
    const QuantiseCounts got = download(d_counts, 1)[0];
    CHECK(memcmp(&got, &want, sizeof got) == 0, "%s: %llu of %llu flushed, %llu subnormal, wanted %llu of %llu and %llu", what,
          (unsigned long long)got.flushed, (unsigned long long)got.values, (unsigned long long)got.subnormal,
          (unsigned long long)want.flushed, (unsigned long long)want.values, (unsigned long long)want.subnormal);
}

static const char* format_name(Fp8Format f) { return f == E4M3 ? "e4m3" : "e5m2"; }

static void quantised_rows_are_the_oracle_s() {
    const size_t shapes[][2] = {{1, 16}, {7, 48}, {130, 768}, {66, 2048}, {65, 8192}, {3, 16400}, {2, 57344}, {3, 128256}};
    for (size_t i = 0; i < 2 * std::size(shapes); i++) {
        const Fp8Format format = i % 2 == 0 ? E4M3 : E5M2;
        const size_t N = shapes[i / 2][0], C = shapes[i / 2][1], pitch_x = padded(C), pitch = quantised_pitch(C) + 16;
        const Floats x = uneven_values(N, C);
        const floatX* d_x = upload_rows<floatX>(x, N, C, pitch_x);
        std::vector<uint8_t> want(N * C);
        Floats want_scale(N);
        QuantiseCounts counts = {0, 0, 0};
        quantise_rows(want.data(), want_scale.data(), x.data(), N, C, format);
        for (size_t n = 0; n < N; n += QUANTISE_SAMPLE) { quantise_count(&counts, &want[n * C], &x[n * C], C, format); }
        char what[64];
        snprintf(what, sizeof what, "%s, rows of (%zu, %zu)", format_name(format), N, C);
        for (int turn = 0; turn < 2; turn++) {
            QuantisedRows to = {device_alloc<uint8_t>(N * pitch), device_alloc<float>(N), pitch, NULL, format};
            if (turn == 0) { to.largest = upload(std::vector<uint32_t>(1)); }
            QuantiseCounts* d_counts = upload(std::vector<QuantiseCounts>(1));
            quantise_rows_cuda(to, d_x, N, (int)C, pitch_x, turn == 0 ? d_counts : NULL, 0);
            const std::vector<uint8_t> rows = download(to.data, N * pitch);
            std::vector<uint8_t> q;
            bool padding = true;
            for (size_t n = 0; n < N; n++) {
                q.insert(q.end(), rows.begin() + (long)(n * pitch), rows.begin() + (long)(n * pitch + C));
                for (size_t c = C; c < pitch; c++) { padding = padding && rows[n * pitch + c] == 0xff; }
            }
            CHECK(padding, "%s: the padding was overwritten", what);
            compare_quantised(what, q, want, download(to.scale, N), want_scale);
            CHECK(turn == 1 || same_largest(download(to.largest, 1)[0], x), "%s: another largest value", what);
            check_counts(what, d_counts, turn == 0 ? counts : QuantiseCounts{0, 0, 0});
        }
    }
    device_free_all();
}

static bool same_bytes(const floatX* a, const floatX* b, size_t n) {
    return memcmp(download(a, n).data(), download(b, n).data(), n * sizeof *a) == 0;
}

#ifndef PRECISION_FP32  // which has no products of our own
/* Counts in `taken` (rows, columns) how often each tile is taken. */
__global__ static void place_kernel(int* taken, MatmulTilesArgs s, int cluster) {
    const uint32_t piece = blockIdx.x * blockDim.x + threadIdx.x;
    if (piece >= s.rows * s.columns) { return; }
    for (int rank = 0; rank < cluster; rank++) {
        const MatmulPlace place(s, piece, cluster, rank);
        atomicAdd(&taken[(uint32_t)place.row * s.columns + (uint32_t)place.column], 1);
    }
}

static void tiles_of_a_product_are_taken_once() {
    for (int cluster : {1, 2}) {
        for (uint32_t rows : {1u, 7u, 12u}) {
            for (uint32_t columns : {1u, 5u}) {
                for (uint32_t group = 1; group <= rows; group++) {
                    const MatmulTilesArgs s = {rows, columns, group, 0, 0, false};
                    const size_t tiles = (size_t)rows * (size_t)cluster * columns;
                    const int* taken = upload(std::vector<int>(tiles));
                    place_kernel<<<1, 64>>>((int*)taken, s, cluster);
                    CUDA_CHECK_LAUNCH("place_kernel");
                    const std::vector<int> got = download(taken, tiles);
                    CHECK(std::count(got.begin(), got.end(), 1) == (long)tiles, "%u x %u pieces of %d tiles, groups of %u rows",
                          rows, columns, cluster, group);
                    device_free_all();
                }
            }
        }
    }
}

/* Returns sixteenths, up to `most` of them, of which sums are exact. */
static Floats sixteenths(size_t n, int most) {
    Floats x = random_values<float>(n, 1);
    for (float& v : x) { v = (float)(int)fminf(fmaxf(v * 8, (float)-most), (float)most) / 16; }
    return x;
}

/* SwiGLU in the epilogue of a product has the bits of product and SwiGLU apart, where no sum is rounded. */
static void swiglu_joins_its_product() {
    // the third one has more tiles than a card has multiprocessors, so a block has several
    const size_t shapes[][3] = {{256, 64, 256}, {768, 320, 512}, {2560, 128, 1792}, {256, 1024, 4096}};
    if (!matmul_takes_swiglu(256, 64, 1 << 20)) { return; }  // no code for this card
    for (auto& s : shapes) {
        const size_t N = s[0], C = s[1], F = s[2];
        MatmulContext* ctx = matmul_context();
        char what[64];
        snprintf(what, sizeof what, "N=%zu C=%zu F=%zu", N, C, F);
        const floatX *x = upload_rows<floatX>(sixteenths(N * C, 12), N, C, C),
                     *w = upload_rows<floatX>(sixteenths(2 * F * C, 6), 2 * F, C, C),
                     *down = upload_rows<floatX>(sixteenths(C * F, 6), C, F, F);
        floatX *gate_up = device_alloc<floatX>(N * 2 * F), *act = device_alloc<floatX>(N * F),
               *dact = device_alloc<floatX>(N * F), *want = device_alloc<floatX>(N * 2 * F),
               *want_grad = device_alloc<floatX>(N * 2 * F), *want_act = device_alloc<floatX>(N * F),
               *alone = device_alloc<floatX>(N * 2 * F);
        matmul_forward_cuda(ctx, want, operand(x, C), operand(w, C), (const floatX*)NULL, N, (int)C, (int)(2 * F), 2 * F, 0);
        swiglu_forward_cuda(want_act, want, N, (int)F, 2 * F, F, 0);
        matmul_backward_input_cuda(ctx, dact, operand(x, C), operand(down, F), N, (int)F, (int)C, F, 0);
        swiglu_backward_cuda(want_grad, NULL, dact, want, N, (int)F, 2 * F, F, 0);
        for (const bool turns : {false, true}) {  // the consumers of a block share each tile, or take tiles in turns
            const auto product =
                turns ? matmul_swiglu_cuda<CLUSTER_BLOCKS, SPLIT_TILES> : matmul_swiglu_cuda<CLUSTER_BLOCKS, SPLIT_ROWS>;
            const char* way = turns ? "in turns" : "together";
            for (floatX* p : {gate_up, alone}) { CUDA_CHECK(cudaMemset(p, 0xff, N * 2 * F * sizeof *p)); }
            CUDA_CHECK(cudaMemset(act, 0xff, N * F * sizeof *act));
            product(gate_up, act, x, w, N, C, F, 0);
            product(alone, NULL, x, w, N, C, F, 0);
            CHECK(same_bytes(gate_up, want, N * 2 * F) && same_bytes(alone, want, N * 2 * F), "%s, %s: gate and up differ",
                  what, way);
            CHECK(same_bytes(act, want_act, N * F), "%s, %s: SwiGLU differs", what, way);
        }
        CUDA_CHECK(cudaMemset(act, 0xff, N * F * sizeof *act));
        matmul_swiglu_backward_cuda(alone, act, x, down, gate_up, N, F, C, 0);
        matmul_swiglu_backward_cuda(gate_up, NULL, x, down, gate_up, N, F, C, 0);
        CHECK(same_bytes(alone, want_grad, N * 2 * F), "%s: the gradient differs", what);
        CHECK(same_bytes(gate_up, want_grad, N * 2 * F), "%s: in place differs from apart", what);
        CHECK(same_bytes(act, want_act, N * F), "%s: the output that backward repeats differs", what);
        matmul_destroy(ctx);
        device_free_all();
    }
}

/* RoPE in the epilogue of a product has the bits of product and RoPE apart, where no sum is rounded. */
static void rope_joins_its_product() {
    // B, T, C, NH, NKV, HD, longest document (0: none). q, k and v meet inside of tiles and between them, and so do sequences.
    // The last two have more tiles than a card has multiprocessors, so a block has several
    const int shapes[][7] = {{1, 256, 64, 2, 1, 64, 0},   {8, 96, 128, 6, 1, 64, 0},   {8, 96, 128, 6, 1, 64, 40},
                             {2, 384, 64, 12, 4, 64, 90}, {1, 256, 320, 2, 1, 128, 0}, {8, 96, 64, 4, 1, 128, 0},
                             {8, 96, 64, 4, 2, 128, 40},  {20, 128, 64, 32, 8, 64, 0}, {5, 512, 64, 16, 4, 128, 0}};
    if (!matmul_takes_rope({1, 256, 1 << 14, 0, 64}, 64)) { return; }  // no code for this card
    for (auto& v : shapes) {
        const AttentionShape s = {v[0], v[1], v[3], v[4], v[5]};
        const size_t N = (size_t)s.B * s.T, C = (size_t)v[2], QKV = qkv_width(s);
        MatmulContext* ctx = matmul_context();
        char what[96];
        snprintf(what, sizeof what, "B=%d T=%d C=%zu NH=%d NKV=%d HD=%d documents=%d", s.B, s.T, C, s.NH, s.NKV, s.HD, v[6]);
        int32_t* starts = random_starts(s.B, s.T, v[6]);
        const int32_t* d_starts = starts ? upload(std::vector<int32_t>(starts, starts + N)) : NULL;
        ModelConfig c;
        memset(&c, 0, sizeof c);
        c.head_dim = s.HD;
        c.rope_theta = 500000;
        Floats table((size_t)s.T * s.HD);
        rope_table(table.data(), s.T, &c);
        const float* d_table = upload(table);
        const floatX *x = upload_rows<floatX>(sixteenths(N * C, 12), N, C, C),
                     *w = upload_rows<floatX>(sixteenths(QKV * C, 6), QKV, C, C);
        floatX *qkv = device_alloc<floatX>(N * QKV), *want = device_alloc<floatX>(N * QKV);
        matmul_forward_cuda(ctx, want, operand(x, C), operand(w, C), (const floatX*)NULL, N, (int)C, (int)QKV, QKV, 0);
        rope_forward_cuda(want, d_starts, d_table, 0, s, QKV, 0);
        CUDA_CHECK(cudaMemset(qkv, 0xff, N * QKV * sizeof *qkv));
        matmul_rope_cuda(qkv, x, w, d_starts, d_table, s, C, 0);
        CHECK(same_bytes(qkv, want, N * QKV), "%s: q, k or v differ", what);
        free(starts);
        matmul_destroy(ctx);
        device_free_all();
    }
}
#endif

/* Returns room for rows, with their largest value. */
static QuantisedRows rows_to_fill(size_t N, size_t pitch, Fp8Format format = E4M3) {
    return {device_alloc<uint8_t>(N * pitch), device_alloc<float>(N), pitch, upload(std::vector<uint32_t>(1)), format};
}

/* Checks that a layer's own 8-bit rows are those of the pass over what it wrote, w (N, C). */
static void compare_fused(const char* what, QuantisedRows q, const QuantiseCounts* d_counts, const floatX* w, size_t N,
                          size_t C, size_t pitch) {
    const QuantisedRows want = rows_to_fill(N, q.pitch);
    QuantiseCounts* want_counts = upload(std::vector<QuantiseCounts>(1));
    quantise_rows_cuda(want, w, N, (int)C, pitch, want_counts, 0);
    compare_quantised(what, download(q.data, N * q.pitch), download(want.data, N * q.pitch), download(q.scale, N),
                      download(want.scale, N));
    const QuantiseCounts got = download(d_counts, 1)[0], wanted = download(want_counts, 1)[0];
    CHECK(memcmp(&got, &wanted, sizeof got) == 0, "%s: the counts differ", what);
    CHECK(download(q.largest, 1)[0] == download(want.largest, 1)[0], "%s: the largest values differ", what);
}

static void rmsnorm_quantises_what_it_writes() {
    const size_t shapes[][2] = {{1, 16}, {70, 80}, {130, 768}, {129, 2048}, {66, 4096}, {3, 8192}};
    for (auto& s : shapes) {
        const size_t N = s[0], C = s[1], pitch = padded(C);
        const Floats x = uneven_values(N, C), w = random_values<floatX>(C, 1);
        const floatX *d_x = upload_rows<floatX>(x, N, C, pitch), *d_w = upload_rows<floatX>(w, 1, C, C);
        floatX *plain = device_alloc<floatX>(N * pitch), *out = device_alloc<floatX>(N * pitch);
        float *plain_rstd = device_alloc<float>(N), *rstd = device_alloc<float>(N);
        const QuantisedRows q = rows_to_fill(N, quantised_pitch(C));
        QuantiseCounts* counts = upload(std::vector<QuantiseCounts>(1));
        rmsnorm_forward_cuda(plain, plain_rstd, d_x, d_w, {N, (int)C, pitch}, 1e-5f, 0);
        rmsnorm_forward_quantised_cuda(q, out, rstd, d_x, d_w, {N, (int)C, pitch}, 1e-5f, counts, 0);
        char what[64];
        snprintf(what, sizeof what, "rmsnorm (%zu, %zu)", N, C);
        CHECK(same_bytes(plain, out, N * pitch), "%s: the output differs", what);
        CHECK(memcmp(download(plain_rstd, N).data(), download(rstd, N).data(), N * sizeof *rstd) == 0, "%s: rstd differs",
              what);
        compare_fused(what, q, counts, out, N, C, pitch);
    }
    device_free_all();
}

/* What swiglu writes beside its rows changes none of their bits, and is what the pass makes of them. */
static void swiglu_quantises_what_it_writes() {
    const size_t shapes[][2] = {{1, 16}, {70, 80}, {130, 2048}, {65, 14336}};
    for (auto& s : shapes) {
        const size_t N = s[0], F = s[1], pitch = padded(F), pitch2 = padded(2 * F);
        const Floats gate_up = uneven_values(N, 2 * F), dout = uneven_values(N, F);
        const floatX *d_dout = upload_rows<floatX>(dout, N, F, pitch),
                     *d_gate_up = upload_rows<floatX>(gate_up, N, 2 * F, pitch2);
        char what[64];
        floatX *plain = device_alloc<floatX>(N * pitch), *out = device_alloc<floatX>(N * pitch);
        QuantisedRows q = rows_to_fill(N, quantised_pitch(F));
        QuantiseCounts* counts = upload(std::vector<QuantiseCounts>(1));
        swiglu_forward_cuda(plain, d_gate_up, N, (int)F, pitch2, pitch, 0);
        swiglu_forward_quantised_cuda(q, out, d_gate_up, N, (int)F, pitch2, pitch, counts, 0);
        snprintf(what, sizeof what, "swiglu (%zu, %zu)", N, F);
        CHECK(same_bytes(plain, out, N * pitch), "%s: the output differs", what);
        compare_fused(what, q, counts, out, N, F, pitch);
        for (int again = 0; again < 2; again++) {
            floatX *in_place = upload_rows<floatX>(gate_up, N, 2 * F, pitch2), *apart = device_alloc<floatX>(N * pitch2);
            CUDA_CHECK(cudaMemset(apart, 0xff, N * pitch2 * sizeof(floatX)));
            q = rows_to_fill(N, quantised_pitch(2 * F));
            counts = upload(std::vector<QuantiseCounts>(1));
            floatX *y = device_alloc<floatX>(N * pitch), *want_y = device_alloc<floatX>(N * pitch);
            swiglu_backward_cuda(apart, again ? want_y : NULL, d_dout, d_gate_up, N, (int)F, pitch2, pitch, 0);
            swiglu_backward_quantised_cuda(q, in_place, again ? y : NULL, d_dout, in_place, N, (int)F, pitch2, pitch, counts,
                                           0);
            snprintf(what, sizeof what, "swiglu backward (%zu, %zu)", N, F);
            CHECK(same_bytes(apart, in_place, N * pitch2) && same_bytes(y, want_y, N * pitch), "%s: the rows differ", what);
            compare_fused(what, q, counts, in_place, N, 2 * F, pitch2);
        }
    }
    device_free_all();
}

/* Several blocks' matrices with a gap between them; both copies. The sample is the first row of each tile on the diagonal. */
static void quantised_weights_are_the_oracle_s() {
    const size_t shapes[][3] = {{16, 16, 1}, {48, 80, 3}, {64, 64, 2}, {160, 48, 2}, {272, 528, 2}, {768, 2048, 1}};
    for (auto& s : shapes) {
        const size_t R = s[0], C = s[1], blocks = s[2], gap = 128, stride = R * C + gap;
        Floats all;
        std::vector<uint8_t> want_rows(blocks * R * C), want_columns(blocks * R * C);
        Floats want_scale(blocks * (R + C));
        QuantiseCounts counts = {0, 0, 0};
        for (size_t b = 0; b < blocks; b++) {
            const Floats w = uneven_values(R, C);
            uint8_t *rows = &want_rows[b * R * C], *columns = &want_columns[b * R * C];
            quantise_rows(rows, &want_scale[b * (R + C)], w.data(), R, C, E4M3);
            quantise_columns(columns, &want_scale[b * (R + C) + R], w.data(), R, C);
            const size_t tiles = ceil_div(C, (size_t)QUANTISE_TILE);
            for (size_t r = 0; r < R; r += QUANTISE_TILE) {
                const size_t first = r / QUANTISE_TILE % tiles * QUANTISE_TILE;
                for (size_t c = first; c < C && c < first + QUANTISE_TILE; c++) {
                    quantise_count(&counts, &rows[r * C + c], &w[r * C + c], 1, E4M3);
                    quantise_count(&counts, &columns[c * R + r], &w[r * C + c], 1, E4M3);
                }
            }
            all.insert(all.end(), w.begin(), w.end());
            all.insert(all.end(), gap, 1e30f);
        }
        const floatX* d_w = upload_rows<floatX>(all, 1, all.size(), all.size());
        QuantiseCounts* d_counts = upload(std::vector<QuantiseCounts>(1));
        const QuantisedWeights q = {device_alloc<uint8_t>(blocks * R * C), device_alloc<uint8_t>(blocks * R * C),
                                    device_alloc<float>(blocks * (R + C)), (int)R, (int)C};
        quantise_weights_cuda(q, d_w, stride, (int)blocks, d_counts, 0);
        char what[64];
        snprintf(what, sizeof what, "rows of weights (%zu, %zu)", R, C);
        const Floats scale = download(q.scales, blocks * (R + C));
        compare_quantised(what, download(q.rows, blocks * R * C), want_rows, scale, want_scale);
        snprintf(what, sizeof what, "columns of weights (%zu, %zu)", R, C);
        compare_quantised(what, download(q.columns, blocks * R * C), want_columns, scale, want_scale);
        check_counts(what, d_counts, counts);
    }
    device_free_all();
}

/* Returns (N, C) values of rows whose sizes differ by up to 2^24; some are zero, and some rows are. */
static Floats steep_values(size_t N, size_t C) {
    Floats x = random_values<floatX>(N * C, 1);
    for (size_t i = 0; i < N * C; i++) {
        const size_t n = i / C;
        x[i] = to_float(from_float<floatX>(n % 5 == 3 || i % 11 == 0 ? 0.0f : ldexpf(x[i], -(int)(n % 7) * 4)));
    }
    return x;
}

/* Adds up the counts of a transpose q (C, N) of x (N, C): of the first row of the tiles on a diagonal. */
static QuantiseCounts count_transpose(const std::vector<uint8_t>& q, const Floats& x, size_t N, size_t C, Fp8Format format) {
    const size_t tiles = ceil_div(C, (size_t)TRANSPOSE_TILE);
    QuantiseCounts counts = {0, 0, 0};
    for (size_t n = 0; n < N; n += TRANSPOSE_TILE) {
        const size_t first = n / TRANSPOSE_TILE % tiles * TRANSPOSE_TILE;
        for (size_t c = first; c < C && c < first + TRANSPOSE_TILE; c++) {
            quantise_count(&counts, &q[c * N + n], &x[n * C + c], 1, format);
        }
    }
    return counts;
}

/* Checks a transpose of x (N, C), its scale and its counts, and that its padding is left alone. */
static void compare_transpose(const char* what, QuantisedTranspose q, const QuantiseCounts* d_counts,
                              const std::vector<uint8_t>& want, float scale, const Floats& x, size_t N, size_t C,
                              Fp8Format format) {
    const std::vector<uint8_t> lines = download(q.data, C * q.pitch);
    std::vector<uint8_t> got;
    bool padding = true;
    for (size_t c = 0; c < C; c++) {
        got.insert(got.end(), lines.begin() + (long)(c * q.pitch), lines.begin() + (long)(c * q.pitch + N));
        for (size_t n = N; n < q.pitch; n++) { padding = padding && lines[c * q.pitch + n] == 0xff; }
    }
    CHECK(padding, "%s (%zu, %zu): the padding was overwritten", what, N, C);
    compare_quantised(what, got, want, download(q.scale, 1), {scale});
    check_counts(what, d_counts, count_transpose(want, x, N, C, format));
}

/* Of rows in 16 bits and of 8-bit rows, whose scales may lie far below that of all; tiles that are not full; a NaN in one row
 * shows in all. */
static void transposes_are_the_oracle_s() {
    const size_t shapes[][2] = {{16, 16}, {48, 80}, {128, 128}, {144, 272}, {400, 2048}, {2064, 48}, {272, 1040}};
    for (auto& s : shapes) {
        for (int nan = 0; nan < 2; nan++) {
            const size_t N = s[0], C = s[1], pitch_x = padded(C), pitch = quantised_pitch(N) + 16;
            Floats x = steep_values(N, C);
            if (nan) { x[(N - 2) * C + 7] = NAN; }
            const floatX* d_x = upload_rows<floatX>(x, N, C, pitch_x);
            const auto room = [&] {
                return QuantisedTranspose{device_alloc<uint8_t>(C * pitch), device_alloc<float>(1), pitch};
            };
            char what[64];
            for (Fp8Format format : {E4M3, E5M2}) {
                Floats row_scale(N), shifted_from(N * C);
                std::vector<uint8_t> rows(N * C), want(C * N);
                const float scale = quantise_scale(quantise_largest(x.data(), N * C, 1), format);
                quantise_rows(rows.data(), row_scale.data(), x.data(), N, C, format);
                quantise_shifted(want.data(), rows.data(), row_scale.data(), scale, N, C, format);
                for (size_t i = 0; i < N * C; i++) { shifted_from[i] = f32_from_fp8(rows[i], format); }
                const QuantisedRows d_rows = rows_to_fill(N, quantised_pitch(C), format);
                const QuantisedTranspose q = room();
                QuantiseCounts* d_counts = upload(std::vector<QuantiseCounts>(1));
                quantise_rows_cuda(d_rows, d_x, N, (int)C, pitch_x, NULL, 0);
                quantise_shifted_cuda(q, d_rows, N, (int)C, d_counts, 0);
                snprintf(what, sizeof what, "%s, shifted (%zu, %zu)%s", format_name(format), N, C, nan ? ", NaN" : "");
                compare_transpose(what, q, d_counts, want, scale, shifted_from, N, C, format);
            }
            std::vector<uint8_t> want(C * N);
            const float scale = quantise_transposed(want.data(), x.data(), N, C);
            const uint32_t* largest = upload(std::vector<uint32_t>(1, quantise_largest(x.data(), N * C, 1)));
            const QuantisedTranspose q = room();
            QuantiseCounts* d_counts = upload(std::vector<QuantiseCounts>(1));
            quantise_transposed_cuda(q, d_x, largest, N, (int)C, pitch_x, d_counts, 0);
            snprintf(what, sizeof what, "transposed (%zu, %zu)%s", N, C, nan ? ", NaN" : "");
            compare_transpose(what, q, d_counts, want, scale, x, N, C, E4M3);
        }
    }
    device_free_all();
}

/* Whether this card has scales for each row of a factor. */
static bool has_row_scales() {
    return device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
           device_attribute(cudaDevAttrComputeCapabilityMinor) == 0 && matmul_has_row_scales();
}

template <typename Out>
static double product_error(const std::vector<Out>& got, const std::vector<double>& want) {
    double diff = 0, sum = 0;
    for (size_t i = 0; i < want.size(); i++) {
        diff += ((double)to_float(got[i]) - want[i]) * ((double)to_float(got[i]) - want[i]);
        sum += want[i] * want[i];
    }
    return sqrt(diff / sum);
}

/* Returns the error of the exact result once it is rounded: up to twice its usual 1.6e-3 where few elements are large. */
static double rounding_error(const std::vector<double>& want) {
    std::vector<__nv_bfloat16> rounded;
    for (const double x : want) { rounded.push_back(from_float<__nv_bfloat16>((float)x)); }
    return product_error(rounded, want);
}

/* 8-bit rows on the host, (R, K), with a scale for each or one for all. */
typedef struct {
    size_t R, K;
    std::vector<uint8_t> q;
    Floats scale;
    Operand (*operand)(const void* data, const float* scale, size_t ld, bool fast, cudaDataType_t type);
    Fp8Format format;
} HostRows;

static cudaDataType_t type_of(Fp8Format f) { return f == E4M3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2; }

/* Checks A B^T (M, N) of 8-bit rows A (M, K) and B (N, K) against the product of the values that these stand for, in double.
 * 1e-3 with sums in fp32; the output's rounding comes on top. product(out, a, b, add) writes out (M, N), or adds to it. */
template <typename Product>
static void compare_products(const HostRows& a, const HostRows& b, const Product& product) {
    const size_t M = a.R, N = b.R, K = a.K;
    const Floats r = random_values<__nv_bfloat16>(M * N, 8);
    std::vector<double> want(M * N), added(M * N);
    for (size_t i = 0; i < M * N; i++) {
        const uint8_t *x = &a.q[i / N * K], *y = &b.q[i % N * K];
        double sum = 0;
        for (size_t k = 0; k < K; k++) { sum += (double)f32_from_fp8(x[k], a.format) * (double)f32_from_fp8(y[k], b.format); }
        want[i] = sum * a.scale[i / N % a.scale.size()] * b.scale[i % N % b.scale.size()];
        added[i] = want[i] + r[i];
    }
    const uint8_t *d_a = upload(a.q), *d_b = upload(b.q);
    const float *a_scale = upload(a.scale), *b_scale = upload(b.scale);
    for (int fast = 0; fast < 2; fast++) {
        const Operand oa = a.operand(d_a, a_scale, K, fast, type_of(a.format));
        const Operand ob = b.operand(d_b, b_scale, K, fast, type_of(b.format));
        std::vector<float> out32;
        std::vector<__nv_bfloat16> out16, sum16;
        for (int turn = 0; turn < 2; turn++) {
            float* d32 = device_alloc<float>(M * N);
            __nv_bfloat16 *d16 = device_alloc<__nv_bfloat16>(M * N), *sum = upload_rows<__nv_bfloat16>(r, M, N, N);
            product(d32, oa, ob, false);
            product(d16, oa, ob, false);
            product(sum, oa, ob, true);
            const std::vector<float> again = download(d32, M * N);
            CHECK(turn == 0 || memcmp(again.data(), out32.data(), M * N * sizeof(float)) == 0, "two runs differ");
            out32 = again;
            out16 = download(d16, M * N);
            sum16 = download(sum, M * N);
        }
        const double e32 = product_error(out32, want), e16 = product_error(out16, want), sum = product_error(sum16, added);
        printf("     %s M=%zu K=%zu N=%zu%s: fp32 %.2e, BF16 %.2e, with addition %.2e\n", format_name(a.format), M, K, N,
               fast ? ", fast" : "", e32, e16, sum);
        const double limit = fast ? 1e-2 : 1e-3;
        CHECK(e32 <= limit, "fp32: relative L2 error %g, wanted at most %g", e32, limit);
        CHECK(e16 <= limit + rounding_error(want), "BF16: relative L2 error %g, rounding is %g", e16, rounding_error(want));
        CHECK(sum <= limit + rounding_error(added), "added: relative L2 error %g, rounding is %g", sum, rounding_error(added));
    }
}

/* Returns random rows (R, K) in 8 bits, of `sizes` very different scales, so that a scale in the wrong place shows. */
static HostRows quantised_rows_of(size_t R, size_t K, int sizes, Fp8Format format) {
    HostRows h = {R, K, std::vector<uint8_t>(R * K), Floats(R), operand_fp8_rows, format};
    Floats x = random_values<floatX>(R * K, 1);
    for (size_t i = 0; i < R * K; i++) { x[i] = ldexpf(x[i], (int)(i / K) % sizes - sizes / 2); }
    quantise_rows(h.q.data(), h.scale.data(), x.data(), R, K, format);
    return h;
}

static void products_of_quantised_rows_agree() {
    if (!has_row_scales()) {
        printf("     no card with scales for each row here: no product is tested\n");
        return;
    }
    const size_t shapes[][3] = {{48, 48, 64}, {16, 80, 48}, {256, 2048, 512}, {128, 8192, 256}};
    MatmulContext* ctx = matmul_context();
    for (auto& s : shapes) {
        const size_t N = s[0], C = s[1], OC = s[2];
        for (Fp8Format format : {E4M3, E5M2}) {
            compare_products(quantised_rows_of(N, C, 9, format), quantised_rows_of(OC, C, 7, E4M3),
                             [&](auto* out, Operand x, Operand w, bool add) {
                                 matmul_forward_cuda(ctx, out, x, w, add ? out : NULL, N, (int)C, (int)OC, OC, 0);
                             });
        }
    }
    CHECK(ctx->num_plans == 2 * 4 * 2 * 3, "%d plans: the keys of products with scales", ctx->num_plans);
    matmul_destroy(ctx);
    device_free_all();
}

/* Returns the transpose in 8 bits of random rows (N, C), whose sizes are very different, with one scale, times 2^size. */
static HostRows quantised_transpose_of(size_t N, size_t C, int size, Fp8Format format) {
    HostRows h = {C, N, std::vector<uint8_t>(C * N), Floats(1), operand_fp8_tensor, format};
    Floats x = steep_values(N, C), row_scale(N);
    std::vector<uint8_t> rows(N * C);
    for (float& v : x) { v = ldexpf(v, size); }
    h.scale[0] = quantise_scale(quantise_largest(x.data(), N * C, 1), format);
    quantise_rows(rows.data(), row_scale.data(), x.data(), N, C, format);
    quantise_shifted(h.q.data(), rows.data(), row_scale.data(), h.scale[0], N, C, format);
    return h;
}

/* dW from 8-bit transposes, whose sums run over the tokens. */
static void weights_gradients_of_transposes_agree() {
    if (!has_row_scales()) {
        printf("     no card with scales for each row here: no product is tested\n");
        return;
    }
    const size_t shapes[][3] = {{48, 48, 64}, {16, 80, 48}, {2048, 256, 512}, {8192, 256, 128}};
    MatmulContext* ctx = matmul_context();
    for (auto& s : shapes) {
        const size_t N = s[0], C = s[1], OC = s[2];
        const HostRows x = quantised_transpose_of(N, C, 2, E4M3);
        for (Fp8Format format : {E4M3, E5M2}) {
            compare_products(quantised_transpose_of(N, OC, -5, format), x,
                             [&](auto* dw, Operand dout_t, Operand x_t, bool add) {
                                 matmul_backward_weight_transposed_cuda(ctx, dw, dout_t, x_t, N, (int)C, (int)OC, add, 0);
                             });
        }
    }
    CHECK(ctx->num_plans == 2 * 4 * 2 * 3, "%d plans: the keys of products with scales", ctx->num_plans);
    matmul_destroy(ctx);
    device_free_all();
}

// ---------------------------------------------------------------------------------------------------------------------
// lora

/* Checks |got - want| <= 1e-5 of the largest element; in 16 bits 2 %: t and dt are rounded on the way. */
static void compare_loosely(const char* what, const Floats& got, const Floats& want) {
    const float limit = sizeof(floatX) == 4 ? 1e-5f : 0.02f;
    float largest = 0, worst = 0;
    for (float w : want) { largest = fmaxf(largest, fabsf(w)); }
    for (size_t i = 0; i < want.size(); i++) {
        const float error = fabsf(got[i] - want[i]);
        if (!(error <= worst) && !isnan(worst)) { worst = error; }  // a NaN stays
    }
    CHECK(worst <= limit * largest, "%s: off by %g, the largest element is %g", what, (double)worst, (double)largest);
}

static void lora_agrees_with_its_oracle() {
    const LoraConfig cases[] = {{8, 16, 0x7f}, {3, 1.5, 0x05}, {16, 16, 0x6a}};  // all; q, v; k, o, up, down
    const size_t N = 150;
    MatmulContext* ctx = matmul_context();
    ModelConfig c;
    memset(&c, 0, sizeof c);
    c.hidden_size = 72, c.intermediate_size = 136, c.num_layers = 2, c.num_heads = 4, c.num_kv_heads = 2, c.head_dim = 16;
    for (const LoraConfig& lora : cases) {
        c.lora = lora;
        ParamTable table = trained_table(&c);
        const size_t elements = table.elements;
        for (const Lora& l : lora_block(&c, &table, 1).at) {
            if (l.parts == 0) { continue; }
            const LoraPitch pitch = lora_pitch(&l);
            const size_t C = (size_t)l.C, OC = (size_t)l.OC, R = (size_t)(l.parts * l.r);
            const Floats x = random_values<floatX>(N * C, 1), w = random_values<floatX>(elements, 0.3f);
            const Floats dy = random_values<floatX>(N * OC, 1), y0 = random_values<floatX>(N * OC, 1);
            const Floats dx0 = random_values<floatX>(N * C, 1), dw0 = random_values<float>(elements, 1);
            Floats y = y0, dx = dx0, dw = dw0, t(N * R), dt(N * R);
            lora_forward_plain(y.data(), t.data(), x.data(), w.data(), &l, N);
            lora_backward_plain(dx.data(), dw.data(), dt.data(), dy.data(), x.data(), t.data(), w.data(), &l, N);
            floatX *d_x = upload_rows<floatX>(x, N, C, pitch.x), *d_w = upload_rows<floatX>(w, 1, elements, elements);
            floatX *d_dy = upload_rows<floatX>(dy, N, OC, pitch.y), *d_y = upload_rows<floatX>(y0, N, OC, pitch.y);
            floatX *d_dx = upload_rows<floatX>(dx0, N, C, pitch.x), *d_t = device_alloc<floatX>(N * pitch.t);
            floatX* d_dt = device_alloc<floatX>(N * pitch.t);
            float* d_dw = upload(dw0);
            lora_forward_cuda(ctx, d_y, d_t, d_x, d_w, &l, N, 0);
            lora_backward_input_cuda(ctx, d_dx, d_dt, d_dy, d_w, &l, N, 0);
            lora_backward_weight_cuda(ctx, d_dw, d_dt, d_dy, d_x, d_t, &l, N, true, 0);
            compare_loosely("t", download_rows(d_t, N, R, pitch.t), t);
            compare_loosely("y", download_rows(d_y, N, OC, pitch.y), y);
            compare_loosely("dt", download_rows(d_dt, N, R, pitch.t), dt);
            compare_loosely("dx", download_rows(d_dx, N, C, pitch.x), dx);
            compare_loosely("dw", download(d_dw, elements), dw);
        }
        param_table_free(&table);
    }
    matmul_destroy(ctx);
    device_free_all();
}

// ---------------------------------------------------------------------------------------------------------------------

static const struct {
    const char* name;
    void (*run)();
    bool needs_gpu;
} tests[] = {
#define HOST_ENTRY(test) \
    { #test, test, false }
#define ENTRY(test) \
    { #test, test, true }
    HOST_ENTRY(split_weights_are_exact),
    HOST_ENTRY(stochastic_rounding_is_to_a_neighbour),
    ENTRY(embedding_copies_and_sums_rows),
    ENTRY(embedding_sort_is_stable),
    ENTRY(embedding_gradient_misses_no_row),
    ENTRY(rmsnorm_forward_agrees),
    ENTRY(rmsnorm_backward_adds_to_both_gradients),
    ENTRY(rope_turns_q_and_k_and_leaves_v),
    ENTRY(heads_are_packed_and_unpacked),
    ENTRY(attention_by_heads_is_that_over_whole_rows),
    ENTRY(swiglu_agrees_in_place_and_apart),
    ENTRY(crossentropy_agrees_for_all_vocabularies),
    ENTRY(crossentropy_plans_agree),
    ENTRY(crossentropy_shows_what_is_not_finite),
    ENTRY(the_first_not_finite_is_found),
    ENTRY(norm_and_loss_sums_agree),
    ENTRY(ordered_sums_agree),
    ENTRY(losses_add_up_by_source),
    ENTRY(decisions_follow_the_host),
    ENTRY(a_step_is_divided_by_its_trained_targets),
    ENTRY(loss_scale_halves_and_doubles),
    ENTRY(adamw_agrees_in_all_forms),
    ENTRY(adamw_takes_gradients_from_a_window),
    ENTRY(a_skipped_step_changes_nothing),
    ENTRY(quotients_and_roots_are_rounded),
    ENTRY(adamw_rounds_each_operation),
#ifdef PRECISION_BF16
    ENTRY(small_steps_survive_on_average),
#endif
    HOST_ENTRY(element_sizes_are_those_of_the_types),
    ENTRY(matmul_agrees_in_all_directions),
    ENTRY(every_candidate_agrees_and_repeats_its_bits),
    ENTRY(a_tuner_times_the_products_of_a_step),
    ENTRY(matmul_plans_survive_a_file),
    ENTRY(quantised_rows_are_the_oracle_s),
    ENTRY(quantised_weights_are_the_oracle_s),
    ENTRY(rmsnorm_quantises_what_it_writes),
    ENTRY(swiglu_quantises_what_it_writes),
#ifndef PRECISION_FP32
    ENTRY(tiles_of_a_product_are_taken_once),
    ENTRY(swiglu_joins_its_product),
    ENTRY(rope_joins_its_product),
#endif
    ENTRY(transposes_are_the_oracle_s),
    ENTRY(products_of_quantised_rows_agree),
    ENTRY(weights_gradients_of_transposes_agree),
    ENTRY(lora_agrees_with_its_oracle),
};

int main(int argc, char** argv) {
    int devices = 0;
    const bool gpu = cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
    printf("CUDA layers, " PRECISION_NAME "\n");
    for (auto& test : tests) {
        if (argc > 1 && !strstr(test.name, argv[1])) { continue; }
        if (!gpu && test.needs_gpu) {
            SKIP(test.name, "no GPU here");
            continue;
        }
        checks_failed = 0;
        test.run();
        printf("%s %s\n", checks_failed ? "FAIL" : "ok  ", test.name);
        fflush(stdout);
        checks_failed ? tests_failed++ : tests_passed++;
    }
    return test_summary();
}
