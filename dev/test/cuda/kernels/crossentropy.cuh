/* crossentropy.cuh -- tests of the loss and its gradient. */
#ifndef TEST_KERNELS_CROSSENTROPY_CUH
#define TEST_KERNELS_CROSSENTROPY_CUH

#include "llmc/crossentropy.cuh"
#include "llmc/crossentropy.h"
#include "kernel_test.cuh"

/* Computes the oracle's gradients; for long rows in double, since there the oracle's fp32 sum is not exact enough. */
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

/* Compares losses. Where the target is by far the largest logit, the loss is log(sum) of a sum near 1. So the loss has the
 * sum's error: the errors of 2^x and of a rounding of max log2(e). Where all rows are such, the largest loss is no measure of
 * this error. */
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
            const size_t N = sanitized && s[1] > 12291 ? 2 : rows_of_shape(s[0]), V = s[1], pitch = padded(V);
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
                                     crossentropy_forward_cuda(d_losses, d, d_targets, {N, (int)V, pitch}, 0);
                                     return download(d_losses, N);
                                 }),
                           losses);
            CHECK(download_rows(d, N, V, pitch) == logits, "%s: forward changed the logits", what);
            compare(what,
                    twice(what,
                          [&] {
                              d = upload_rows<floatX>(logits, N, V, pitch);
                              d_losses = device_alloc<float>(N);
                              crossentropy_fused_cuda(d_losses, d, d_targets, dloss, d_scale, {N, (int)V, pitch}, 0);
                              return download_rows(d, N, V, pitch);
                          }),
                    dlogits, 2 * ulp, large ? 1e-4f : 1e-6f, FLT_EPSILON * dloss * scale);  // p - 1, p near 1
            compare_losses(what, download(d_losses, N), losses);
            device_free_all();
        }
    }
}

static const char* const crossentropy_names[NUM_CE_WAYS] = {"held", "row", "looped"};

/* Compares each kernel with the oracle. A small grid gives each block many rows: this tests a block's last row, and blocks that
 * have one row more than others. */
static void crossentropy_plans_agree() {
    const float dloss = 0.25f, scale = 8.0f;
    for (size_t V : {2, 97, 301, 32767, 32768, 32769, 50257, 128256, 131072, 131073, 262144, 262152}) {
        const size_t N = sanitized ? 4 : 8, pitch = padded(V);
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
                }  // cannot run (long rows, before sm_80), or takes no rows in turns (only CE_ROW does)
                plan.blocks = blocks;
                char what[96];
                snprintf(what, sizeof what, "crossentropy V=%zu, %s, %zu blocks", V, crossentropy_names[way], blocks);
                float* d_losses = NULL;
                const Floats got = twice(what, [&] {
                    floatX* d = upload_rows<floatX>(logits, N, V, pitch);
                    d_losses = device_alloc<float>(N);
                    crossentropy_run(&plan, d_losses, d, d_targets, dloss, d_scale, {N, (int)V, pitch}, 0);
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
    const size_t V = 301, N = rows_of_shape(5000), pitch = padded(V);  // more rows than run at a time
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
    check("forward", [&](float* losses, floatX* d) { crossentropy_forward_cuda(losses, d, d_targets, {N, (int)V, pitch}, 0); });
    for (int way = 0; way < NUM_CE_WAYS; way++) {
        CrossentropyPlan plan = crossentropy_plan((CrossentropyWay)way, N, (int)V);
        if (plan.blocks == 0) { continue; }
        if (way == CE_ROW) { plan.blocks = 7; }
        check(crossentropy_names[way], [&](float* losses, floatX* d) {
            crossentropy_run(&plan, losses, d, d_targets, 1.0f, NULL, {N, (int)V, pitch}, 0);
        });
    }
    device_free_all();
}

#endif
