/* rmsnorm.cuh -- tests of RMSNorm, forward and backward. */
#ifndef TEST_KERNELS_RMSNORM_CUH
#define TEST_KERNELS_RMSNORM_CUH

#include "llmc/rmsnorm.cuh"
#include "llmc/rmsnorm.h"
#include "kernel_test.cuh"

// rows of few and of many elements, whole vectors and not, more rows than run at a time
static const size_t norm_shapes[][2] = {{1, 60},   {5, 64},     {33, 97},     {5000, 768}, {700, 512}, {65, 513}, {3000, 256},
                                        {9, 2048}, {300, 3072}, {1500, 4096}, {600, 8192}, {3, 8191},  {5000, 10}};

static void rmsnorm_forward_agrees() {
    const float eps = 1e-5f;
    for (auto& s : norm_shapes) {
        const size_t N = rows_of_shape(s[0]), C = s[1], pitch = padded(C);
        char what[64];
        snprintf(what, sizeof what, "rmsnorm N=%zu C=%zu", N, C);
        const RowShape rows = {N, (int)C, pitch};
        const Floats x = random_values<floatX>(N * C, 2), w = random_values<floatX>(C, 1);
        Floats out(N * C), rstd(N);
        rmsnorm_forward(out.data(), rstd.data(), x.data(), w.data(), packed_rows(N, (int)C), eps);
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
        const size_t N = rows_of_shape(s[0]), C = s[1], pitch = padded(C);
        const RowShape rows = {N, (int)C, pitch};
        char what[64];
        const Floats x = random_values<floatX>(N * C, 2), dout = random_values<floatX>(N * C, 1);
        const Floats w = random_values<floatX>(C, 1), dx0 = random_values<floatX>(N * C, 1), dw0 = random_values<float>(C, 1);
        Floats out(N * C), rstd(N), dx = dx0, dw = dw0;
        std::vector<char> scratch(rmsnorm_backward_scratch(N, (int)C));
        rmsnorm_forward(out.data(), rstd.data(), x.data(), w.data(), packed_rows(N, (int)C), 1e-5f);
        rmsnorm_backward(dx.data(), dw.data(), scratch.data(), dout.data(), x.data(), w.data(), rstd.data(),
                         packed_rows(N, (int)C));
        floatX *d_x = upload_rows<floatX>(x, N, C, pitch), *d_dout = upload_rows<floatX>(dout, N, C, pitch);
        floatX* d_w = upload_rows<floatX>(w, 1, C, C);
        const float* d_rstd = upload(rstd);
        for (int threads : {32, (int)RMSNORM_BACKWARD_THREADS, (int)RMSNORM_THREADS}) {
            const auto launch = [&] {  // dx, then dw
                floatX* d_dx = upload_rows<floatX>(dx0, N, C, pitch);
                float* d_dw = upload(dw0);
                void* d_scratch = device_alloc<char>(rmsnorm_backward_scratch_cuda(N, (int)C));
                rmsnorm_backward_cuda(d_dx, d_dw, d_scratch, d_dout, {d_x, d_w, d_rstd}, rows, 0, threads);
                Floats both = download_rows(d_dx, N, C, pitch);
                const Floats dweight = download(d_dw, C);
                both.insert(both.end(), dweight.begin(), dweight.end());
                return both;
            };
            snprintf(what, sizeof what, "rmsnorm backward N=%zu C=%zu, %d threads", N, C, threads);
            const Floats both = twice(what, launch);
            const auto weight = both.begin() + (long)(N * C);
            compare(what, Floats(both.begin(), weight), dx, ulp, 5e-6f);
            compare(what, Floats(weight, both.end()), dw, 1e-5f, 1e-5f);
        }
        device_free_all();
    }
}

#endif
