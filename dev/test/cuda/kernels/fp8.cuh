/* fp8.cuh -- tests of 8-bit rows, weights and transposes, and of products of them. */
#ifndef TEST_KERNELS_FP8_CUH
#define TEST_KERNELS_FP8_CUH

#include "llmc/quantise.cuh"
#include "llmc/rmsnorm.cuh"
#include "llmc/swiglu.cuh"
#include "matmul.cuh"

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

/* Whether `got` holds the bits of the largest magnitude; any NaN is as good as another. */
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
            quantise_rows_cuda(to, d_x, {N, (int)C, pitch_x}, turn == 0 ? d_counts : NULL, 0);
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

/* Returns room for rows, with their largest value. */
static QuantisedRows rows_to_fill(size_t N, size_t pitch, Fp8Format format = E4M3) {
    return {device_alloc<uint8_t>(N * pitch), device_alloc<float>(N), pitch, upload(std::vector<uint32_t>(1)), format};
}

/* Checks that a layer's own 8-bit rows equal the rows that quantise_rows_cuda() makes of the layer's output w (N, C). */
static void compare_fused(const char* what, QuantisedRows q, const QuantiseCounts* d_counts, const floatX* w, size_t N,
                          size_t C, size_t pitch) {
    const QuantisedRows want = rows_to_fill(N, q.pitch);
    QuantiseCounts* want_counts = upload(std::vector<QuantiseCounts>(1));
    quantise_rows_cuda(want, w, {N, (int)C, pitch}, want_counts, 0);
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
        rmsnorm_forward_quantised_cuda({q, counts}, out, rstd, d_x, d_w, {N, (int)C, pitch}, 1e-5f, 0);
        char what[64];
        snprintf(what, sizeof what, "rmsnorm (%zu, %zu)", N, C);
        CHECK(same_bytes(plain, out, N * pitch), "%s: the output differs", what);
        CHECK(memcmp(download(plain_rstd, N).data(), download(rstd, N).data(), N * sizeof *rstd) == 0, "%s: rstd differs",
              what);
        compare_fused(what, q, counts, out, N, C, pitch);
    }
    device_free_all();
}

/* SwiGLU's own 8-bit rows change no bit of its output, and equal the rows that quantise_rows_cuda() makes of this output. */
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
        swiglu_forward_cuda(plain, d_gate_up, {N, (int)F, pitch2, pitch}, 0);
        swiglu_forward_quantised_cuda({q, counts}, out, d_gate_up, {N, (int)F, pitch2, pitch}, 0);
        snprintf(what, sizeof what, "swiglu (%zu, %zu)", N, F);
        CHECK(same_bytes(plain, out, N * pitch), "%s: the output differs", what);
        compare_fused(what, q, counts, out, N, F, pitch);
        for (int again = 0; again < 2; again++) {
            floatX *in_place = upload_rows<floatX>(gate_up, N, 2 * F, pitch2), *apart = device_alloc<floatX>(N * pitch2);
            CUDA_CHECK(cudaMemset(apart, 0xff, N * pitch2 * sizeof(floatX)));
            q = rows_to_fill(N, quantised_pitch(2 * F));
            counts = upload(std::vector<QuantiseCounts>(1));
            floatX *y = device_alloc<floatX>(N * pitch), *want_y = device_alloc<floatX>(N * pitch);
            swiglu_backward_cuda(apart, again ? want_y : NULL, d_dout, d_gate_up, {N, (int)F, pitch2, pitch}, 0);
            swiglu_backward_quantised_cuda({q, counts}, in_place, again ? y : NULL, d_dout, in_place,
                                           {N, (int)F, pitch2, pitch}, 0);
            snprintf(what, sizeof what, "swiglu backward (%zu, %zu)", N, F);
            CHECK(same_bytes(apart, in_place, N * pitch2) && same_bytes(y, want_y, N * pitch), "%s: the rows differ", what);
            compare_fused(what, q, counts, in_place, N, 2 * F, pitch2);
        }
    }
    device_free_all();
}

static void more_rows_than_a_grid_has_room_for_are_refused() {
    const auto ask = [](const void* rows) {
        if (quantise_grid(*(const size_t*)rows, 512, TRANSPOSE_TILE, TRANSPOSE_TILE).y != 65535) { _exit(2); }
    };
    const size_t most = (size_t)65535 * TRANSPOSE_TILE, more = most + 1;
    CHECK(test_exit_status(ask, &most) == 0, "%zu rows", most);
    CHECK(test_exit_status(ask, &more) == 1, "%zu rows are accepted", more);
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

/* Transposes rows in 16 bits, and 8-bit rows whose scales may lie far below the transpose's scale. Some tiles are not full. A
 * NaN in one row shows in all. */
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
                quantise_rows_cuda(d_rows, d_x, {N, (int)C, pitch_x}, NULL, 0);
                quantise_shifted_cuda(q, d_rows, N, (int)C, d_counts, 0);
                snprintf(what, sizeof what, "%s, shifted (%zu, %zu)%s", format_name(format), N, C, nan ? ", NaN" : "");
                compare_transpose(what, q, d_counts, want, scale, shifted_from, N, C, format);
            }
            std::vector<uint8_t> want(C * N);
            const float scale = quantise_transposed(want.data(), x.data(), N, C);
            const uint32_t* largest = upload(std::vector<uint32_t>(1, quantise_largest(x.data(), N * C, 1)));
            const QuantisedTranspose q = room();
            QuantiseCounts* d_counts = upload(std::vector<QuantiseCounts>(1));
            quantise_transposed_cuda(q, d_x, largest, {N, (int)C, pitch_x}, d_counts, 0);
            snprintf(what, sizeof what, "transposed (%zu, %zu)%s", N, C, nan ? ", NaN" : "");
            compare_transpose(what, q, d_counts, want, scale, x, N, C, E4M3);
        }
    }
    device_free_all();
}

/* Whether this card's products take a scale for each row of a factor. */
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

/* Returns the largest relative error of `added`, the sum of a product and C, if both product and sum are rounded. */
static double rounding_limit(const std::vector<double>& product, const std::vector<double>& added) {
    double first = 0, second = 0, sum = 0;
    for (size_t i = 0; i < added.size(); i++) {
        first += pow(half_ulp<__nv_bfloat16>((float)product[i]), 2);
        second += pow(half_ulp<__nv_bfloat16>((float)added[i]), 2);
        sum += added[i] * added[i];
    }
    return (sqrt(first) + sqrt(second)) / sqrt(sum);
}

/* 8-bit rows (R, K) on the host, with a scale for each row or one for all rows. */
typedef struct {
    size_t R, K;
    std::vector<uint8_t> q;
    Floats scale;
    Operand (*operand)(const void* data, const float* scale, size_t ld, bool fast, cudaDataType_t type);
    Fp8Format format;
} HostRows;

static cudaDataType_t type_of(Fp8Format f) { return f == E4M3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2; }

/* Checks A B^T (M, N) of 8-bit rows A (M, K) and B (N, K) against the product, in double, of the values that A and B stand for.
 * The limit is 1e-3 with sums in fp32. The rounding of the output comes on top; with an addition, also the rounding of the
 * product, as in compare_product(). product(out, a, b, add) writes out (M, N), or adds to it. */
template <typename Product>
static void compare_products(const HostRows& a, const HostRows& b, const Product& product) {
    const size_t M = a.R, N = b.R, K = a.K;
    std::vector<double> want(M * N), added(M * N);
    double squares = 0;
    for (size_t i = 0; i < M * N; i++) {
        const uint8_t *x = &a.q[i / N * K], *y = &b.q[i % N * K];
        double sum = 0;
        for (size_t k = 0; k < K; k++) { sum += (double)f32_from_fp8(x[k], a.format) * (double)f32_from_fp8(y[k], b.format); }
        want[i] = sum * a.scale[i / N % a.scale.size()] * b.scale[i % N % b.scale.size()];
        squares += want[i] * want[i];
    }
    // as large as the product: if it were far larger or smaller, a limit relative to the sum would not show whether it is added
    const Floats r = random_values<__nv_bfloat16>(M * N, (float)sqrt(squares / (double)(M * N)));
    for (size_t i = 0; i < M * N; i++) { added[i] = want[i] + r[i]; }
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
        CHECK(sum <= limit + rounding_limit(want, added), "added: relative L2 error %g, rounding is up to %g", sum,
              rounding_limit(want, added));
    }
}

/* Returns random rows (R, K) in 8 bits with `sizes` very different scales, so that a scale in the wrong place shows. */
static HostRows quantised_rows_of(size_t R, size_t K, int sizes, Fp8Format format) {
    HostRows h = {R, K, std::vector<uint8_t>(R * K), Floats(R), operand_fp8_rows, format};
    Floats x = random_values<floatX>(R * K, 1);
    for (size_t i = 0; i < R * K; i++) { x[i] = ldexpf(x[i], (int)(i / K) % sizes - sizes / 2); }
    quantise_rows(h.q.data(), h.scale.data(), x.data(), R, K, format);
    return h;
}

// the terms of a sum in the two large products, which run in cublasLt
enum { MANY_TERMS = emulated ? 256 : 2048, MOST_TERMS = emulated ? 1024 : 8192 };

static void products_of_quantised_rows_agree() {
    if (!has_row_scales()) {
        printf("     no card with scales for each row here: no product is tested\n");
        return;
    }
    const size_t shapes[][3] = {{48, 48, 64}, {16, 80, 48}, {256, MANY_TERMS, 512}, {128, MOST_TERMS, 256}};
    MatmulContext* ctx = matmul_context();
    for (auto& s : shapes) {
        const size_t N = s[0], C = s[1], OC = s[2];
        for (Fp8Format format : {E4M3, E5M2}) {
            compare_products(quantised_rows_of(N, C, 9, format), quantised_rows_of(OC, C, 7, E4M3),
                             [&](auto* out, Operand x, Operand w, bool add) {
                                 matmul_forward_cuda(ctx, output(out, OC), x, w, add ? out : NULL, {N, (int)C, (int)OC}, 0);
                             });
        }
    }
    CHECK(ctx->num_plans == 2 * 4 * 2 * 3, "%d plans: the keys of products with scales", ctx->num_plans);
    matmul_destroy(ctx);
    device_free_all();
}

/* Returns the transpose in 8 bits, with one scale, of random rows (N, C) of very different sizes, times 2^size. */
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
    const size_t shapes[][3] = {{48, 48, 64}, {16, 80, 48}, {MANY_TERMS, 256, 512}, {MOST_TERMS, 256, 128}};
    MatmulContext* ctx = matmul_context();
    for (auto& s : shapes) {
        const size_t N = s[0], C = s[1], OC = s[2];
        const HostRows x = quantised_transpose_of(N, C, 2, E4M3);
        for (Fp8Format format : {E4M3, E5M2}) {
            compare_products(
                quantised_transpose_of(N, OC, -5, format), x, [&](auto* dw, Operand dout_t, Operand x_t, bool add) {
                    matmul_backward_weight_transposed_cuda(ctx, output(dw, C), dout_t, x_t, {N, (int)C, (int)OC}, add, 0);
                });
        }
    }
    CHECK(ctx->num_plans == 2 * 4 * 2 * 3, "%d plans: the keys of products with scales", ctx->num_plans);
    matmul_destroy(ctx);
    device_free_all();
}

#endif
