/* swiglu.cuh -- tests of SwiGLU, forward and backward. */
#ifndef TEST_KERNELS_SWIGLU_CUH
#define TEST_KERNELS_SWIGLU_CUH

#include "llmc/swiglu.cuh"
#include "llmc/swiglu.h"
#include "kernel_test.cuh"

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
            swiglu_forward_cuda(d_out, d_in, {N, (int)F, wide, pitch}, 0);
            return download_rows(d_out, N, F, pitch);
        });
        compare(what, forward, out);
        floatX* d_again = NULL;
        const Floats apart = twice(what, [&] {
            floatX* d_grad = device_alloc<floatX>(N * wide);
            d_again = device_alloc<floatX>(N * pitch);
            swiglu_backward_cuda(d_grad, d_again, d_dout, d_in, {N, (int)F, wide, pitch}, 0);
            return download_rows(d_grad, N, 2 * F, wide);
        });
        compare(what, apart, dgate_up);
        CHECK(download_rows(d_again, N, F, pitch) == forward, "%s: the output that backward repeats differs", what);
        swiglu_backward_cuda(d_in, NULL, d_dout, d_in, {N, (int)F, wide, pitch}, 0);
        CHECK(download_rows(d_in, N, 2 * F, wide) == apart, "%s: in place differs from apart", what);
        device_free_all();
    }
}

#endif
