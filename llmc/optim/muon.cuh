/* muon.cuh -- Muon on whole matrices on the GPU. The oracle is muon.h, where the formula stands.
 *
 * Newton-Schulz runs in the dtype of the weights, with sums in fp32. BF16 builds round where PyTorch does (A, C and each new X
 * once a product), but for the ends: PyTorch rounds the first X before and after it divides, and also the last X, which is fp32
 * here. FP16 builds have 3 more bits, and also run on cards without bfloat16. FP32 builds round nothing to 16 bits. Products
 * are cuBLASLt's, as the trainer's others, so plans fix their order. The norm is a sum of MUON_SUMS sums, each in its order.
 *
 * Matrices are not transposed: if X has more rows than columns, A is X^T X, and the new X is a X + X C.
 *
 * Memory: the matrix is fp32, so its room takes two matrices in 16 bits, between which the steps alternate. The scratch takes
 * the first X and the last but one. FP32 builds alternate between both rooms. All master weights and moments have the forms of
 * adamw.cuh, and the random bits of 8 weights, or 4 moments, that lie side by side in their tensor are one draw.
 */
#ifndef LLMC_MUON_CUH
#define LLMC_MUON_CUH

#include "llmc/base/rand.h"           // defines: philox
#include "llmc/matmul.cuh"            // defines: MatmulContext, matmul_product
#include "llmc/optim/master.cuh"      // defines: round_master, stochastic_upper, split_join, split_low
#include "llmc/optim/muon.h"          // defines: muon_scratch, muon_rate, MUON_STEPS
#include "llmc/optim/optimizer.cuh"   // defines: MatrixPart
#include "llmc/optim/step_state.cuh"  // defines: StepState, norm_list_sum, NORM_SUM_THREADS

enum { MUON_THREADS = 256 };

/* Returns the 16 random bits of an element: of a weight (each = 8, two of them in a word), or of a moment (each = 4). */
__device__ __forceinline__ uint32_t muon_bits(const MatrixPart& part, RandPurpose purpose, int64_t step, size_t i, int each) {
    const size_t at = part.first + i;
    const Philox bits = philox(part.seed, purpose, part.tensor, (uint64_t)step << 40 | (uint64_t)(at / each));
    const int k = (int)(at % each);
    return each == 8 ? bits.v[k / 2] >> k % 2 * 16 & 0xffffu : bits.v[k] & 0xffffu;
}

__global__ void __launch_bounds__(MUON_THREADS) muon_prepare_kernel(MatrixPart part, float rest, const StepState* state) {
    const size_t i = (size_t)blockIdx.x * MUON_THREADS + threadIdx.x;
    if (i >= part.count || state->verdict != UPDATE_APPLIED) { return; }
    const float grad = part.fp32_grads ? ((const float*)part.grads)[i] : to_float(((const floatX*)part.grads)[i]);
    const float g = __fmul_rn(grad, state->grad_scale);
    float m = part.bf16_moments ? to_float(((const __nv_bfloat16*)part.m)[i]) : ((const float*)part.m)[i];
    m = __fmaf_rn(rest, __fsub_rn(g, m), m);
    part.x[i] = __fmaf_rn(rest, __fsub_rn(g, m), m);
    if (part.bf16_moments) {
        const uint32_t random = muon_bits(part, RAND_ROUND, state->step, i, 4);
        ((__nv_bfloat16*)part.m)[i] = bfloat16_of(stochastic_upper(m, random) >> 16);
    } else {
        ((float*)part.m)[i] = m;
    }
}

__global__ void __launch_bounds__(MUON_THREADS) muon_update_kernel(MatrixPart part, double scale, const StepState* state) {
    const size_t i = (size_t)blockIdx.x * MUON_THREADS + threadIdx.x;
    if (i >= part.count || state->verdict != UPDATE_APPLIED) { return; }
    const float old = part.master_kind == MASTER_FP32 ? ((const float*)part.master)[i]
                      : part.master_kind == MASTER_NONE
                          ? to_float(part.params[i])
                          : split_join(to_float(part.params[i]), ((const int16_t*)part.master)[i]);
    const float p = __fmaf_rn(old, state->decay, -__fmul_rn((float)((double)state->lr * scale), part.x[i]));
    if (part.master_kind == MASTER_FP32) { ((float*)part.master)[i] = p; }
    if (part.master_kind == MASTER_SPLIT) { ((uint16_t*)part.master)[i] = split_low(p); }
#ifdef PRECISION_BF16
    if (part.master_kind == MASTER_NONE) {
        part.params[i] = bfloat16_of(stochastic_upper(p, muon_bits(part, RAND_ROUND_WEIGHTS, state->step, i, 8)) >> 16);
        return;
    }
#endif
    part.params[i] = round_master<floatX>(p);
}

/* Writes sums[block] = sum of squares of the block's share of x (n). */
__global__ void __launch_bounds__(MUON_THREADS) muon_norm_kernel(double* sums, const float* x, size_t n) {
    __shared__ double shared[32];
    double sum = 0;
    for (size_t i = (size_t)blockIdx.x * MUON_THREADS + threadIdx.x; i < n; i += (size_t)MUON_SUMS * MUON_THREADS) {
        sum += (double)x[i] * (double)x[i];
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) { sums[blockIdx.x] = sum; }
}

/* Writes out (n) = x / max(|x|, eps), which may be x. */
__global__ void __launch_bounds__(NORM_SUM_THREADS)
    muon_scale_kernel(floatX* out, const float* x, const double* sums, size_t n) {
    __shared__ double shared[32];
    const float norm = fmaxf((float)sqrt(norm_list_sum(sums, MUON_SUMS, shared)), MUON_EPS);
    for (size_t i = (size_t)blockIdx.x * NORM_SUM_THREADS + threadIdx.x; i < n; i += (size_t)gridDim.x * NORM_SUM_THREADS) {
        out[i] = from_float<floatX>(__fdiv_rn(x[i], norm));
    }
}

/* Adds a X to x, the product C X of the last step. */
__global__ void __launch_bounds__(MUON_THREADS) muon_finish_kernel(float* x, const floatX* from, size_t n) {
    const size_t i = (size_t)blockIdx.x * MUON_THREADS + threadIdx.x;
    if (i < n) { x[i] = __fmaf_rn((float)MUON_A, to_float(from[i]), x[i]); }
}

static inline unsigned muon_blocks(size_t n) { return (unsigned)ceil_div(n, (size_t)MUON_THREADS); }

static inline void muon_prepare_cuda(const MatrixPart* part, const StepState* state, const Hyperparameters* h,
                                     cudaStream_t stream) {
    muon_prepare_kernel<<<muon_blocks(part->count), MUON_THREADS, 0, stream>>>(*part, (float)(1.0 - h->muon_momentum), state);
    CUDA_CHECK_LAUNCH("muon_prepare_kernel");
}

static inline void muon_update_cuda(const MatrixPart* part, const StepState* state, const Hyperparameters* h,
                                    cudaStream_t stream) {
    const double scale = muon_rate(1.0, h->muon_lr_scale, part->rows, part->cols);
    muon_update_kernel<<<muon_blocks(part->count), MUON_THREADS, 0, stream>>>(*part, scale, state);
    CUDA_CHECK_LAUNCH("muon_update_kernel");
}

/* Replaces x (rows, cols) by X. scratch: muon_scratch() for floatX */
static inline void muon_orthogonalize_cuda(MatmulContext* ctx, float* x, size_t rows, size_t cols, void* scratch,
                                           cudaStream_t stream) {
    const MuonScratch parts = muon_scratch(rows, cols, sizeof(floatX));
    const size_t n = rows * cols, m = size_min(rows, cols), k = size_max(rows, cols);
    const bool tall = rows > cols;
    floatX *copy = (floatX*)((char*)scratch + parts.copy), *gram = (floatX*)((char*)scratch + parts.gram);
    floatX* poly = (floatX*)((char*)scratch + parts.poly);
    double* sums = (double*)((char*)scratch + parts.sums);
    const unsigned blocks = (unsigned)size_min(ceil_div(n, (size_t)4 * NORM_SUM_THREADS), 4 * MUON_SUMS);
    muon_norm_kernel<<<MUON_SUMS, MUON_THREADS, 0, stream>>>(sums, x, n);
    muon_scale_kernel<<<blocks, NORM_SUM_THREADS, 0, stream>>>(copy, x, sums, n);
    floatX* rooms[2] = {(floatX*)x, sizeof(floatX) == 2 ? (floatX*)x + round_up(n, 128) : copy};
    const floatX* from = copy;
    for (int step = 0; step < MUON_STEPS; step++) {
        const bool last = step == MUON_STEPS - 1;
        floatX* to = step == MUON_STEPS - 2 ? copy : rooms[step % 2];
        const Operand X = operand(from, cols), A = operand(gram, m), C = operand(poly, m);
        matmul_product(ctx, output(gram, m), {X, tall ? TRANSPOSED : AS_IS}, {X, tall ? AS_IS : TRANSPOSED}, NULL, {m, m, k},
                       stream);
        matmul_product(ctx, output(poly, m), {A, AS_IS}, {A, AS_IS}, gram, {m, m, m}, stream, {(float)MUON_C, (float)MUON_B});
        const Factor first = tall ? Factor{X, AS_IS} : Factor{C, AS_IS},
                     second = tall ? Factor{C, TRANSPOSED} : Factor{X, AS_IS};
        matmul_product(ctx, last ? output(x, cols) : output(to, cols), first, second, last ? NULL : from, {rows, cols, m},
                       stream, {1.0f, (float)MUON_A});
        from = last ? copy : to;
    }
    muon_finish_kernel<<<muon_blocks(n), MUON_THREADS, 0, stream>>>(x, from, n);
    CUDA_CHECK_LAUNCH("muon_finish_kernel");
}

#endif
