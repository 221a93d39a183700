/* product.cuh -- what ladders with matrix products share: the trainer's cuBLASLt (llmc/matmul.cuh) and its oracle.
 */
#ifndef ZOO_PRODUCT_CUH
#define ZOO_PRODUCT_CUH

#pragma nv_diag_suppress 1675  // matmul.h: pragmas for GCC
#include "llmc/matmul.cuh"
#include "llmc/matmul.h"
#include "dev/cuda/zoo.cuh"

static MatmulContext* product_context() {
    static MatmulContext* ctx;
    if (!ctx) {
        void* workspace;
        CUDA_CHECK(cudaMalloc(&workspace, matmul_workspace_bytes()));
        ctx = matmul_create(workspace, false);
    }
    return ctx;
}

/* Writes out (N, OC) = x (N, C) w^T, w: (OC, C): tensors of a case, without padding. */
static void product_cuda(const Case& c, int out, int x, int w, size_t N, size_t C, size_t OC, cudaStream_t stream) {
    const Operand a = operand(c.at<floatX>(x), C), b = operand(c.at<floatX>(w), C);
    matmul_forward_cuda(product_context(), output(c.at<floatX>(out), OC), a, b, NULL, {N, (int)C, (int)OC}, stream);
}

/* Hopper's mma has 62 % of the rate of wgmma, which cuBLASLt uses there. */
static double mma_rate() { return sms() > 0 && card.major == 9 ? 0.62 : 0.95; }

/* The oracle of the same. */
static void product_oracle(Case& c, int out, int x, int w, size_t N, size_t C, size_t OC) {
    std::vector<char> scratch(matmul_scratch());
    matmul_forward(c[out], scratch.data(), c[x], c[w], NULL, N, (int)C, (int)OC);
}

static Work predict_product(const Case& c) { return {c.bytes / 32, c.flops}; }

/* Rounds the start values of both factors to multiples of 1/16, so that a product's sums of them are exact. Then a product that
 * is rounded, by its type or before the next operation, has the same bits in any order of its sums. */
static void to_sixteenths(Case& c, int x, int w) {
    for (const int i : {x, w}) {
        for (float& value : c.tensors[i].start) { value = roundf(4 * value) / 16; }
    }
}

/* Rounds values to floatX, as a kernel that writes them. */
static void to_floatX(Floats& values) {
    for (float& x : values) { x = to_float(from_float<floatX>(x)); }
}

#endif
