/* muon.cuh -- Muon on whole matrices on the GPU. The oracle is muon.h, where the formula stands.
 *
 * Newton-Schulz runs in the dtype of the weights, with sums in fp32. BF16 builds round where PyTorch does (A, C and each new X
 * once a product), but for the beginning: PyTorch rounds the first X before and after it divides, here it is rounded after.
 * FP16 builds have 3 more bits, and also run on cards without bfloat16. FP32 builds round nothing to 16 bits. Products are
 * cuBLASLt's, as the trainer's others, so plans fix their order. On Hopper the two symmetric ones, X X^T and A A, are our own:
 * matmul_sm90.cuh computes half of each. The norm is a sum of up to MUON_SUMS sums, each in its order.
 *
 * A matrix of 768 x 768 has 18 tiles of 128 x 256, a seventh of an H200's multiprocessors. So all matrices of one shape, up to
 * MATRICES_MOST elements (dist/buckets.h), go through each product in one launch, and through each stage by element.
 *
 * Matrices are not transposed: if X has more rows than columns, A is X^T X, and the new X is a X + X C.
 *
 * Memory: the steps alternate between the memory of the matrices u, which are fp32, and a copy in the scratch. All master
 * weights and moments have the forms of adamw.cuh. 8 elements that lie side by side in their tensor share one draw, 16 bits for
 * each.
 */
#ifndef LLMC_MUON_CUH
#define LLMC_MUON_CUH

#include "llmc/base/rand.h"           // defines: philox
#include "llmc/kernels.cuh"           // defines: kernel_row, PRODUCT_HALF
#include "llmc/matmul.cuh"            // defines: MatmulContext, matmul_product
#include "llmc/matmul_sm90.cuh"       // defines: matmul_symmetric_cuda
#include "llmc/optim/master.cuh"      // defines: round_master, stochastic_upper, split_join, split_low
#include "llmc/optim/muon.h"          // defines: muon_scratch, MUON_STEPS
#include "llmc/optim/optimizer.cuh"   // defines: MatrixPart, MatrixParts
#include "llmc/optim/step_state.cuh"  // defines: StepState, norm_list_sum, NORM_SUM_THREADS

enum { MUON_THREADS = 256, MUON_WIDTH = 8 };

/* The elements of a part that a thread has: some of 8 side by side in the matrix, which have one draw of random bits. */
struct MuonRun {
    ptrdiff_t at;  // the first of the 8, counted from the part's
    int from, to;  // those of the part
    size_t draw;
    __device__ __forceinline__ explicit MuonRun(const MatrixPart& p) {
        draw = p.first / MUON_WIDTH + (size_t)blockIdx.x * MUON_THREADS + threadIdx.x;
        at = (ptrdiff_t)(draw * MUON_WIDTH) - (ptrdiff_t)p.first;
        from = (int)max((ptrdiff_t)0, -at);
        to = (int)min((ptrdiff_t)MUON_WIDTH, (ptrdiff_t)p.count - at);
    }
    template <typename T>
    __device__ __forceinline__ bool is_vector(const T* p) const {
        return from == 0 && to == MUON_WIDTH && (uintptr_t)(p + at) % sizeof(Pack<T>) == 0;
    }
    template <typename T>
    __device__ __forceinline__ void load(float (&x)[MUON_WIDTH], const void* array) const {
        const T* p = (const T*)array;
        if (is_vector(p)) {
            const Vec<T, MUON_WIDTH> v = load_stream<MUON_WIDTH>(p + at);
#pragma unroll
            for (int k = 0; k < MUON_WIDTH; k++) { x[k] = to_float(v.v[k]); }
        } else {
#pragma unroll
            for (int k = 0; k < MUON_WIDTH; k++) { x[k] = k >= from && k < to ? to_float(p[at + k]) : 0; }
        }
    }
    template <typename T>
    __device__ __forceinline__ void store(void* array, const T (&x)[MUON_WIDTH]) const {
        T* p = (T*)array;
        if (is_vector(p)) {
            Vec<T, MUON_WIDTH> v;
#pragma unroll
            for (int k = 0; k < MUON_WIDTH; k++) { v.v[k] = x[k]; }
            store_stream(p + at, v);
        } else {
#pragma unroll
            for (int k = 0; k < MUON_WIDTH; k++) {
                if (k >= from && k < to) { p[at + k] = x[k]; }
            }
        }
    }
    /* Rounds x to bfloat16, stochastically. */
    __device__ __forceinline__ void round(__nv_bfloat16 (&y)[MUON_WIDTH], const float (&x)[MUON_WIDTH], const MatrixPart& part,
                                          uint64_t seed, RandPurpose purpose, int64_t step) const {
        const Philox bits = philox(seed, purpose, part.tensor, (uint64_t)step << 40 | (uint64_t)draw);
#pragma unroll
        for (int k = 0; k < MUON_WIDTH; k++) {
            y[k] = bfloat16_of(stochastic_upper(x[k], bits.v[k / 2] >> k % 2 * 16 & 0xffffu) >> 16);
        }
    }
};

__global__ void __launch_bounds__(MUON_THREADS) muon_prepare_kernel(MatrixParts parts, float rest, const StepState* state) {
    const MatrixPart part = parts.items[blockIdx.y];
    const MuonRun run(part);
    if (run.from >= run.to || state->verdict != UPDATE_APPLIED) { return; }
    float g[MUON_WIDTH], m[MUON_WIDTH];
    parts.fp32_grads ? run.load<float>(g, part.grads) : run.load<floatX>(g, part.grads);
    parts.bf16_moments ? run.load<__nv_bfloat16>(m, part.m) : run.load<float>(m, part.m);
#pragma unroll
    for (int k = 0; k < MUON_WIDTH; k++) {
        const float scaled = __fmul_rn(g[k], state->grad_scale);
        m[k] = __fmaf_rn(rest, __fsub_rn(scaled, m[k]), m[k]);
        g[k] = __fmaf_rn(rest, __fsub_rn(scaled, m[k]), m[k]);
    }
    run.store(part.u, g);
    if (parts.bf16_moments) {
        __nv_bfloat16 rounded[MUON_WIDTH];
        run.round(rounded, m, part, parts.seed, RAND_ROUND, state->step);
        run.store(part.m, rounded);
    } else {
        run.store(part.m, m);
    }
}

__global__ void __launch_bounds__(MUON_THREADS) muon_update_kernel(MatrixParts parts, double lr_scale, const StepState* state) {
    const MatrixPart part = parts.items[blockIdx.y];
    const MuonRun run(part);
    if (run.from >= run.to || state->verdict != UPDATE_APPLIED) { return; }
    const float rate = (float)(state->lr * (lr_scale * part.root)), decay = state->decay;
    float p[MUON_WIDTH], x[MUON_WIDTH];
    run.load<floatX>(x, part.x);
    if (parts.master_kind == MASTER_FP32) {
        run.load<float>(p, part.master);
    } else {
        run.load<floatX>(p, part.params);
    }
    if (parts.master_kind == MASTER_SPLIT) {
#pragma unroll
        for (int k = 0; k < MUON_WIDTH; k++) {
            if (k >= run.from && k < run.to) { p[k] = split_join(p[k], ((const int16_t*)part.master)[run.at + k]); }
        }
    }
    floatX rounded[MUON_WIDTH];
#pragma unroll
    for (int k = 0; k < MUON_WIDTH; k++) {
        p[k] = __fmaf_rn(p[k], decay, -__fmul_rn(rate, x[k]));
        rounded[k] = round_master<floatX>(p[k]);
        const bool mine = k >= run.from && k < run.to;
        if (parts.master_kind == MASTER_SPLIT && mine) { ((uint16_t*)part.master)[run.at + k] = split_low(p[k]); }
    }
    if (parts.master_kind == MASTER_FP32) { run.store(part.master, p); }
#ifdef PRECISION_BF16
    if (parts.master_kind == MASTER_NONE) { run.round(rounded, p, part, parts.seed, RAND_ROUND_WEIGHTS, state->step); }
#endif
    run.store(part.params, rounded);
}

/* Returns the blocks that have elements of a matrix (n), and so the sums of its norm: few in a small one. */
static __host__ __device__ inline int muon_sums(size_t n) {
    const size_t blocks = (n + 4 * MUON_THREADS - 1) / (4 * MUON_THREADS);
    return blocks < MUON_SUMS ? (int)blocks : (int)MUON_SUMS;
}

/* Writes sums[matrix][block] = sum of squares of the block's share of a matrix x (n). */
__global__ void __launch_bounds__(MUON_THREADS) muon_norm_kernel(double* sums, const float* x, size_t n) {
    __shared__ double shared[32];
    double sum = 0;
    x += blockIdx.y * matrix_stride(n);
    for (size_t i = ((size_t)blockIdx.x * MUON_THREADS + threadIdx.x) * 4; i < n; i += (size_t)MUON_SUMS * MUON_THREADS * 4) {
        const Vec<float, 4> v = load_vec<4>(x + i);
#pragma unroll
        for (int k = 0; k < 4; k++) { sum += i + k < n ? (double)v.v[k] * (double)v.v[k] : 0; }
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) { sums[blockIdx.y * MUON_SUMS + blockIdx.x] = sum; }
}

/* Writes out (n) = x / max(|x|, eps) for each matrix. */
__global__ void __launch_bounds__(NORM_SUM_THREADS)
    muon_scale_kernel(floatX* out, const float* x, const double* sums, size_t n) {
    __shared__ double shared[32];
    const size_t first = blockIdx.y * matrix_stride(n);
    const float norm = fmaxf((float)sqrt(norm_list_sum(sums + blockIdx.y * MUON_SUMS, muon_sums(n), shared)), MUON_EPS);
    for (size_t i = ((size_t)blockIdx.x * NORM_SUM_THREADS + threadIdx.x) * 4; i < n;
         i += (size_t)gridDim.x * NORM_SUM_THREADS * 4) {
        const Vec<float, 4> v = load_stream<4>(x + first + i);
        Vec<floatX, 4> y;
#pragma unroll
        for (int k = 0; k < 4; k++) { y.v[k] = from_float<floatX>(__fdiv_rn(v.v[k], norm)); }
        store_vec(out + first + i, y);
    }
}

static inline dim3 muon_grid(const MatrixParts* parts) {
    return dim3((unsigned)ceil_div(parts->most + MUON_WIDTH - 1, (size_t)MUON_THREADS * MUON_WIDTH), (unsigned)parts->count);
}

static inline void muon_prepare_cuda(const MatrixParts* parts, const StepState* state, const Hyperparameters* h,
                                     cudaStream_t stream) {
    muon_prepare_kernel<<<muon_grid(parts), MUON_THREADS, 0, stream>>>(*parts, (float)(1.0 - h->muon_momentum), state);
    CUDA_CHECK_LAUNCH("muon_prepare_kernel");
}

static inline void muon_update_cuda(const MatrixParts* parts, const StepState* state, const Hyperparameters* h,
                                    cudaStream_t stream) {
    muon_update_kernel<<<muon_grid(parts), MUON_THREADS, 0, stream>>>(*parts, h->muon_lr_scale, state);
    CUDA_CHECK_LAUNCH("muon_update_kernel");
}

/* Whether X X^T and A A are computed by half. */
static inline bool muon_halves(size_t m, size_t k) {
    KernelSizes s = {};
    s.width = m, s.sum = k;
    return kernel_row(CHOOSE_SYMMETRIC, s)->kernel == PRODUCT_HALF;
}

static inline void muon_orthogonalize_by(MatmulContext* ctx, float* u, size_t rows, size_t cols, int count, void* scratch,
                                         bool halves, cudaStream_t stream) {
    const MuonScratch parts = muon_scratch(rows, cols, sizeof(floatX), (size_t)count);
    const size_t n = rows * cols, m = size_min(rows, cols), k = size_max(rows, cols);
    const bool tall = rows > cols;
    const SumFactors plain = {1.0f, 0.0f}, square = {(float)MUON_C, (float)MUON_B}, last = {1.0f, (float)MUON_A};
    floatX *from = (floatX*)((char*)scratch + parts.copy), *to = (floatX*)u;
    floatX *gram = (floatX*)((char*)scratch + parts.gram), *poly = (floatX*)((char*)scratch + parts.poly);
    double* sums = (double*)((char*)scratch + parts.sums);
    const unsigned blocks = (unsigned)size_min(ceil_div(n, (size_t)16 * NORM_SUM_THREADS), 1024);
    muon_norm_kernel<<<dim3((unsigned)muon_sums(n), (unsigned)count), MUON_THREADS, 0, stream>>>(sums, u, n);
    muon_scale_kernel<<<dim3(blocks, (unsigned)count), NORM_SUM_THREADS, 0, stream>>>(from, u, sums, n);
    CUDA_CHECK_LAUNCH("muon_scale_kernel");
    for (int step = 0; step < MUON_STEPS; step++) {
        const Operand X = operand(from, cols), A = operand(gram, m), C = operand(poly, m);
        if (halves) {
            matmul_symmetric_cuda(gram, from, NULL, {m, k, count, tall}, plain, stream);
            matmul_symmetric_cuda(poly, gram, gram, {m, m, count, false}, square, stream);
        } else {
            const Factor turned = {X, TRANSPOSED}, as_is = {X, AS_IS};
            matmul_product(ctx, output(gram, m), tall ? turned : as_is, tall ? as_is : turned, NULL, {m, m, k}, stream, plain,
                           count);
            matmul_product(ctx, output(poly, m), {A, AS_IS}, {A, AS_IS}, gram, {m, m, m}, stream, square, count);
        }
        const Factor first = tall ? Factor{X, AS_IS} : Factor{C, AS_IS},
                     second = tall ? Factor{C, TRANSPOSED} : Factor{X, AS_IS};
        matmul_product(ctx, output(to, cols), first, second, from, {rows, cols, m}, stream, last, count);
        std::swap(from, to);
    }
}

/* Writes the X of each of `count` matrices u (rows, cols), in floatX, over the memory of all u. Both lie matrix_stride() apart,
 * from an address that 256 divides. scratch: muon_scratch() for floatX */
static inline void muon_orthogonalize_cuda(MatmulContext* ctx, float* u, size_t rows, size_t cols, int count, void* scratch,
                                           cudaStream_t stream) {
    const bool halves = muon_halves(size_min(rows, cols), size_max(rows, cols));
    muon_orthogonalize_by(ctx, u, rows, cols, count, scratch, halves, stream);
}

#endif
