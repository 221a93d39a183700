/* embedding.cuh -- tests of the embedding, forward and backward. */
#ifndef TEST_KERNELS_EMBEDDING_CUH
#define TEST_KERNELS_EMBEDDING_CUH

#include "llmc/embedding.cuh"
#include "llmc/embedding.h"
#include "kernel_test.cuh"

enum { WIDE = emulated ? 8 : 72 };  // for a long table

static void embedding_copies_and_sums_rows() {
    // N, C, V: odd widths, runs within a chunk, runs over many chunks, a single token, a large vocabulary
    const size_t shapes[][3] = {{1, 60, 97},       {17, 64, 301},    {300, 768, 97},       {63, 12, 5},
                                {64, 12, 1},       {65, 12, 2},      {1000, WIDE, 128256}, {4097, 64, 1},
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
                          embedding_forward_cuda(d_out, d_table, d_tokens, {N, (int)C, pitch}, 0);
                          return download_rows(d_out, N, C, pitch);
                      }),
                out, 0, 0);
        // gradients of two types; a sum of n numbers in another order may differ by a few n ulp of fp32
        auto backward = [&](auto* d_dtable) {
            void* scratch = device_alloc<char>(embedding_backward_scratch_cuda(N, (int)C));
            embedding_backward_cuda(d_dtable, scratch, d_dout, d_tokens, (int)V, {N, (int)C, pitch}, 0);
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

/* Checks the sort's order alone, with vocabularies of one to four digits, and lists of one or more rounds a tile. */
static void embedding_sort_is_stable() {
    const size_t sizes[] = {1, 17, 2047, 2048, 2049, 4095, 4096, 4097, 65539, 270001};
    const int vocabularies[] = {1, 2, 257, 512, 513, 128256, 262144, 262145, (1 << 27) + 5, INT32_MAX};
    for (size_t N : sizes) {
        for (int V : vocabularies) {
            if (N > 10000 && V != 257 && V != 128256 && V != 262145 && V != INT32_MAX) { continue; }  // saves time
            for (int pattern = 0; pattern < NUM_TOKEN_PATTERNS; pattern++) {
                if (sanitized && (N > 100000 || (N > 4000 && pattern != TOKENS_RUNS))) { continue; }
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
    const size_t shapes[][3] = {{1, 10, 2},       {17, 768, 2},       {64, 10, 3},          {65, 16, 3},
                                {96, 768, 3},     {97, 10, 3},        {2049, 1032, 40},     {4095, 768, 2},
                                {4096, 10, 257},  {4097, 768, 257},   {4097, WIDE, 128256}, {4097, 10, 262145},
                                {65539, 64, 257}, {65539, 16, 32768}, {270001, 8, 5000}};
    for (auto& s : shapes) {
        const size_t N = s[0], C = s[1], V = s[2], pitch = padded(C);
        for (int pattern = 0; pattern < NUM_TOKEN_PATTERNS; pattern++) {
            const bool mixed = pattern == TOKENS_DISTINCT || pattern == TOKENS_ZIPF;
            // saves time: long lists keep the other three patterns, the longest one, shorter lists all
            if (emulated && N > 10000 && (mixed || (N > 100000 && pattern != TOKENS_RUNS))) { continue; }
            if (sanitized && (N > 100000 || (N > 4000 && pattern != TOKENS_RUNS))) { continue; }
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
                embedding_backward_cuda(d_dtable, scratch, d_dout, d_tokens, (int)V, {N, (int)C, pitch}, 0);
                return download_rows(d_dtable, V, C, C);
            };
            compare(what, twice(what, [&] { return backward(upload_rows<float>(table, V, C, C)); }), want, 0, 0);
            for (float& x : want) { x = to_float(from_float<floatX>(x)); }
            compare(what, twice(what, [&] { return backward(upload_rows<floatX>(table, V, C, C)); }), want, 0, 0);
            device_free_all();
        }
    }
}

#endif
