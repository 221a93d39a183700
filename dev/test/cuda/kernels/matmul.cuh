/* matmul.cuh -- tests of cuBLASLt's products: directions, plans, other algorithms. */
#ifndef TEST_KERNELS_MATMUL_CUH
#define TEST_KERNELS_MATMUL_CUH

#include "llmc/gpu/plans.cuh"
#include "llmc/matmul.h"
#include "kernel_test.cuh"

enum { CANDIDATES = 16 };  // of a product, at most

static MatmulContext* matmul_context() { return matmul_create(device_alloc<char>(matmul_workspace_bytes()), false); }

/* Returns half a unit in the last place of x in T: the largest error of rounding to T. */
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
 *   before they add C (seen on an H200), as x + linear(x) does in two steps. Without C the result is rounded once;
 *   half an ulp of `few`, the part of the sum that matmul_even() computes and rounds as a separate product, and half an ulp of
 *   the addition;
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
        compare_product<floatX>(
            what,
            twice(what,
                  [&] {
                      floatX* d_dx = device_alloc<floatX>(N * pitch_c);
                      matmul_backward_input_cuda(ctx, output(d_dx, pitch_c), odout, ow, {N, (int)C, (int)OC}, 0);
                      return download_rows(d_dx, N, C, pitch_c);
                  }),
            dx, NULL, OC, even < OC ? &few : NULL);
        for (int add = 0; add < 2; add++) {
            Floats out(N * OC), dw = add ? dw0 : Floats(OC * C, 0.0f);
            matmul_forward(out.data(), scratch.data(), x.data(), w.data(), add ? r.data() : NULL, N, (int)C, (int)OC);
            matmul_backward_weight(dw.data(), scratch.data(), dout.data(), x.data(), N, (int)C, (int)OC);
            name("forward", add);
            compare_product<floatX>(
                what,
                twice(what,
                      [&] {
                          floatX* d_out = device_alloc<floatX>(N * pitch_oc);
                          matmul_forward_cuda(ctx, output(d_out, pitch_oc), ox, ow, add ? d_r : NULL, {N, (int)C, (int)OC}, 0);
                          return download_rows(d_out, N, OC, pitch_oc);
                      }),
                out, add ? &r : NULL, C);
            name("backward weight", add);
            compare_product<floatX>(
                what,
                twice(what,
                      [&] {
                          floatX* d_dw = add ? upload_rows<floatX>(dw0, OC, C, C) : device_alloc<floatX>(OC * C);
                          matmul_backward_weight_cuda(ctx, output(d_dw, C), odout, ox, {N, (int)C, (int)OC}, add, 0);
                          return download_rows(d_dw, OC, C, C);
                      }),
                dw, add ? &dw0 : NULL, N);
            name("backward weight in fp32", add);
            compare_product<float>(
                what,
                twice(what,
                      [&] {
                          float* d_dw = add ? upload(dw0) : device_alloc<float>(OC * C);
                          matmul_backward_weight_cuda(ctx, output(d_dw, C), odout, ox, {N, (int)C, (int)OC}, add, 0);
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

/* Checks |got - want| <= 2 % of the largest element (fp32: 1e-4): other algorithms round at other places. */
static void same_product(const char* what, int candidate, const Floats& got, const Floats& want) {
    float largest = 0, worst = 0;
    for (size_t i = 0; i < want.size(); i++) {
        largest = fmaxf(largest, fabsf(want[i]));
        worst = fmaxf(worst, fabsf(got[i] - want[i]));
    }
    CHECK(worst <= (sizeof(floatX) == 4 ? 1e-4f : 0.02f) * largest, "%s, candidate %d: %g off, the largest is %g", what,
          candidate, (double)worst, (double)largest);
}

/* The three products of a layer, with and without an addition, for tests of their candidates. */
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
        const LayerShape s = {N, (int)C, (int)OC};
        matmul_forward_cuda(ctx, output(out, OC), operand(x, C), operand(w, C), residual, s, 0);
        matmul_backward_input_cuda(ctx, output(dx, C), operand(dout, OC), operand(w, C), s, 0);
        matmul_backward_weight_cuda(ctx, output(dw, C), operand(dout, OC), operand(x, C), s, false, 0);
        matmul_backward_weight_cuda(ctx, output(dw, C), operand(dout, OC), operand(x, C), s, true, 0);
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
        cublasLtMatmulHeuristicResult_t candidates[CANDIDATES];
        const int count = matmul_candidates(ctx, &ctx->plans[i], candidates, CANDIDATES);
        const cublasLtMatmulAlgo_t first = ctx->plans[i].algo;
        CHECK(memcmp(&candidates[0].algo, &first, sizeof first) == 0, "plan %d is not the heuristic's first choice", i);
        for (int k = 0; k < count; k++) {
            ctx->plans[i].algo = candidates[k].algo;
            p.run(ctx);
            const Floats once = p.results()[result_of[i]];
            p.run(ctx);
            same_product("a plan", k, once, want[result_of[i]]);
            CHECK(p.results()[result_of[i]] == once, "plan %d, candidate %d: two runs differ", i, k);
        }
        ctx->plans[i].algo = first;
        printf("    plan %d has %d candidates\n", i, count);
    }
    matmul_destroy(ctx);
    device_free_all();
}

static void matmul_plans_survive_a_file() {
    const size_t N = 512, C = 768, OC = 1280;
    const Floats x = random_values<floatX>(N * C, 1), w = random_values<floatX>(OC * C, 1);
    floatX *d_x = upload_rows<floatX>(x, N, C, C), *d_w = upload_rows<floatX>(w, OC, C, C);
    auto product = [&](MatmulContext* ctx) {
        floatX* d_out = device_alloc<floatX>(N * OC);
        matmul_forward_cuda(ctx, output(d_out, OC), operand(d_x, C), operand(d_w, C), NULL, {N, (int)C, (int)OC}, 0);
        return download_rows(d_out, N, OC, OC);
    };
    char path[PATH_CAP];
    Error e = NO_ERROR;
    const char* const folder = test_folder();
    CHECK(path_join(path, folder, "plan.json", &e), "%s", e.msg);
    MatmulContext* ctx = matmul_context();
    product(ctx);
    cublasLtMatmulHeuristicResult_t candidates[CANDIDATES];
    const int count = matmul_candidates(ctx, &ctx->plans[0], candidates, CANDIDATES);
    CHECK(count > 1, "a product has %d candidates", count);
    ctx->plans[0].algo = candidates[count - 1].algo;
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

#endif
