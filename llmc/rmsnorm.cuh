/* rmsnorm.cuh -- root mean square normalization of rows on the GPU. The oracle is rmsnorm.h, where the formulas stand.
 *
 * A row lies in the registers of as few warps as can hold it, RMSNORM_PACKS vectors a lane, and is read once. Up to C = 1024
 * (16-bit) one warp is enough and meets no barrier, so the warps of an SM drift apart and memory always has work.
 * Backward runs one wave of blocks over all rows. Each lane keeps the weight gradient of its columns in registers. Each block
 * then writes one partial row. A second kernel adds up the partial rows in a fixed order. Rows that are not whole vectors use
 * the same kernels, one element at a time.
 * dx += also does the addition of a residual connection: dx carries the residual stream's gradient past the norm.
 * Bytes a row: forward 2C, backward 4C (times the size of an element). Steps: dev/cuda/rmsnorm.cu.
 */
#ifndef LLMC_RMSNORM_CUH
#define LLMC_RMSNORM_CUH

#include "llmc/quantise.cuh"   // defines: QuantisedRows, quantise_row, largest_of
#include "llmc/base/matrix.h"  // defines: RowShape
#include "llmc/cuda/cuda_common.cuh"
#include "llmc/cuda/ptx.cuh"  // defines: barrier_sync

enum {
    RMSNORM_PACKS = 4,      // vectors of a row in a lane's registers, at most
    RMSNORM_SCALARS = 16,   // elements, if a row is not whole vectors
    RMSNORM_THREADS = 512,  // threads of a block, at most
    RMSNORM_FORWARD_THREADS = 256,
    RMSNORM_BACKWARD_THREADS = 384,
    RMSNORM_BACKWARD_BLOCKS = 1024,                     // most blocks, so that the scratch is the same on every card
    RMSNORM_SUM_COLUMNS = 8,                            // weight gradients that a block adds up from the partial rows
    RMSNORM_MAX_C = RMSNORM_THREADS * RMSNORM_SCALARS,  // widest row
};

/* Returns the sum over the blockDim.y warps that share a row; blockDim = (32, warps of a row, rows of a block). `shared` holds
 * RMSNORM_THREADS / 32 floats. A loop alternates between two such arrays, so that one barrier a sum is enough. OWN: each row
 * has its own barrier and rows do not wait for each other (this takes all 16 barriers of a block); otherwise all rows of the
 * block share one barrier. */
template <bool OWN>
__device__ __forceinline__ float row_sum(float x, float* shared) {
    x = warp_sum(x);
    if (blockDim.y == 1) { return x; }
    float* row = shared + threadIdx.z * blockDim.y;
    if (threadIdx.x == 0) { row[threadIdx.y] = x; }
    if constexpr (OWN) {
        barrier_sync(1 + (int)threadIdx.z, 32 * (int)blockDim.y);
    } else {
        __syncthreads();
    }
    float sum = 0;
    for (int w = 0; w < (int)blockDim.y; w++) { sum += row[w]; }
    return sum;
}
static_assert(RMSNORM_THREADS / (2 * 32) <= 15, "a block has 15 barriers for rows of two warps or more");

/* Does the rows of a block; calls each() with every vector that this thread has written. */
template <int W, int K, typename Each>
__device__ __forceinline__ void rmsnorm_forward_rows(floatX* out, float* rstd, const floatX* x, const floatX* weight,
                                                     RowShape rows, float eps, const Each& each) {
    const size_t N = rows.N, pitch = rows.pitch;
    const int C = rows.C;
    __shared__ float shared[RMSNORM_THREADS / 32];
    const size_t n = (size_t)blockIdx.x * blockDim.z + threadIdx.z;
    const bool active = n < N;  // the others only meet the barrier
    const int first = (threadIdx.y * 32 * K + threadIdx.x) * W, stride = 32 * W, end = active ? C : 0;
    Held<floatX, W> v[K];
#pragma unroll
    for (int k = 0; k < K; k++) {
        const int c = first + k * stride;
        if (c < end) { v[k] = hold_stream<W>(x + n * pitch + c); }
    }
    float square = 0;
#pragma unroll
    for (int k = 0; k < K; k++) {
        const int c = first + k * stride;
        if (c < end) {
            const Vec<floatX, W> e = unpack(v[k]);
#pragma unroll
            for (int i = 0; i < W; i++) { square += to_float(e.v[i]) * to_float(e.v[i]); }
            forget(v[k]);
        }
    }
    square = row_sum<false>(square, shared);
    if (!active) { return; }
    const float r = 1.0f / sqrtf(square / (float)C + eps);
    if (threadIdx.x == 0 && threadIdx.y == 0) { rstd[n] = r; }
#pragma unroll
    for (int k = 0; k < K; k++) {
        const int c = first + k * stride;
        if (c < end) {
            const Vec<floatX, W> w = load_vec<W>(weight + c);
            Vec<floatX, W> o = unpack(v[k]);
#pragma unroll
            for (int i = 0; i < W; i++) { o.v[i] = from_float<floatX>(to_float(o.v[i]) * r * to_float(w.v[i])); }
            store_vec(out + n * pitch + c, o);
            each(o);
        }
    }
}

template <int W, int K>
__global__ void __launch_bounds__(RMSNORM_THREADS)
    rmsnorm_forward_kernel(floatX* out, float* rstd, const floatX* x, const floatX* weight, size_t N, int C, float eps,
                           size_t pitch) {
    rmsnorm_forward_rows<W, K>(out, rstd, x, weight, {N, C, pitch}, eps, [](const Vec<floatX, W>&) {});
}

/* Writes partial (gridDim.x, C): the weight gradient of each block's rows. */
template <int W, int K>
__global__ void __launch_bounds__(RMSNORM_THREADS)
    rmsnorm_backward_kernel(floatX* dx, float* partial, const floatX* dout, const floatX* x, const floatX* weight,
                            const float* rstd, size_t N, int C, size_t pitch) {
    __shared__ float shared[2][RMSNORM_THREADS / 32];
    extern __shared__ float dweight_rows[];  // (blockDim.z, C)
    const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * 32 + threadIdx.x;
    const int threads = blockDim.x * blockDim.y * blockDim.z;
    const int first = (threadIdx.y * 32 * K + threadIdx.x) * W, stride = 32 * W;
    const size_t step = (size_t)gridDim.x * blockDim.z;
    size_t n = (size_t)blockIdx.x * blockDim.z + threadIdx.z;
    float dweight[K][W] = {};
    float next_rstd = n < N ? rstd[n] : 0.0f;
    int turn = 0;
    for (; n < N; n += step) {
        const float r = next_rstd;
        next_rstd = n + step < N ? rstd[n + step] : 0.0f;
        Held<floatX, W> xs[K], ds[K], old[K];
#pragma unroll
        for (int k = 0; k < K; k++) {
            const int c = first + k * stride;
            if (c < C) {
                xs[k] = hold_stream<W>(x + n * pitch + c);
                ds[k] = hold_stream<W>(dout + n * pitch + c);
                if constexpr (W > 1) { old[k] = hold<W>(dx + n * pitch + c); }  // loaded early: one wait for all three
            }
        }
        float dot = 0;
#pragma unroll
        for (int k = 0; k < K; k++) {
            const int c = first + k * stride;
            if (c < C) {
                const Vec<floatX, W> w = load_vec<W>(weight + c), x_row = unpack(xs[k]), d_row = unpack(ds[k]);
#pragma unroll
                for (int i = 0; i < W; i++) {
                    const float e = to_float(x_row.v[i]), d = to_float(d_row.v[i]);
                    dweight[k][i] += d * e * r;
                    dot += d * to_float(w.v[i]) * e;
                }
                forget(xs[k]);
                forget(ds[k]);
            }
        }
        dot = row_sum<true>(dot, shared[turn]);
        turn ^= 1;
        const float mean_term = dot * r * r * r / (float)C;
#pragma unroll
        for (int k = 0; k < K; k++) {
            const int c = first + k * stride;
            if (c < C) {
                const Vec<floatX, W> w = load_vec<W>(weight + c), x_row = unpack(xs[k]), d_row = unpack(ds[k]);
                if constexpr (W == 1) { old[k] = hold<W>(dx + n * pitch + c); }  // too many registers otherwise
                Vec<floatX, W> sum = unpack(old[k]);
#pragma unroll
                for (int i = 0; i < W; i++) {
                    const float d = to_float(d_row.v[i]) * to_float(w.v[i]) * r - to_float(x_row.v[i]) * mean_term;
                    sum.v[i] = from_float<floatX>(to_float(sum.v[i]) + d);
                }
                store_vec(dx + n * pitch + c, sum);
            }
        }
    }
    __syncthreads();
    // sum the rows of the block in their order
#pragma unroll
    for (int k = 0; k < K; k++) {
        const int c = first + k * stride;
        if (c < C) {
#pragma unroll
            for (int i = 0; i < W; i++) { dweight_rows[(size_t)threadIdx.z * C + c + i] = dweight[k][i]; }
        }
    }
    __syncthreads();
    for (int c = thread; c < C; c += threads) {
        float sum = 0;
        for (int z = 0; z < (int)blockDim.z; z++) { sum += dweight_rows[(size_t)z * C + c]; }
        partial[(size_t)blockIdx.x * C + c] = sum;
    }
}

/* Adds the column sums of partial (rows, C) to dweight (C). A block has RMSNORM_SUM_COLUMNS columns, one sector of memory. Each
 * of its groups of that many threads sums every 128th row. */
__global__ void __launch_bounds__(1024) rmsnorm_dweight_kernel(float* dweight, const float* partial, int rows, int C) {
    constexpr int COLUMNS = RMSNORM_SUM_COLUMNS;
    __shared__ float shared[COLUMNS][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.x * COLUMNS;
    const int c = first + lane % COLUMNS;
    float sum = 0;
    if (c < C) {
#pragma unroll 4
        for (int r = threadIdx.x / COLUMNS; r < rows; r += 1024 / COLUMNS) { sum += partial[(size_t)r * C + c]; }
    }
#pragma unroll
    for (int mask = 16; mask >= COLUMNS; mask /= 2) { sum += __shfl_xor_sync(0xffffffffu, sum, mask); }
    if (lane < COLUMNS) { shared[lane][warp] = sum; }
    __syncthreads();
    if (warp < COLUMNS) {
        sum = warp_sum(shared[warp][lane]);
        if (lane == 0 && first + warp < C) { dweight[first + warp] += sum; }
    }
}

/* How a block holds its rows. */
typedef struct {
    dim3 block;  // (32, warps of a row, rows of a block)
    int packs;   // vectors of a lane; 0: RMSNORM_SCALARS elements
} RmsnormBlock;

static inline RmsnormBlock rmsnorm_block(int C, int threads) {
    assert(C <= RMSNORM_MAX_C);
    RmsnormBlock b = {dim3(32, (unsigned)ceil_div((size_t)C, 32 * RMSNORM_SCALARS)), 0};
    if (C % VECTOR<floatX> == 0) {
        const size_t vectors = (size_t)C / VECTOR<floatX>;
        b.block.y = (unsigned)ceil_div(vectors, 32 * RMSNORM_PACKS);
        b.packs = (int)ceil_div(vectors, 32 * b.block.y);
    }
    b.block.z = (unsigned)size_max(1, (size_t)threads / (32 * b.block.y));
    return b;
}

/* Runs rmsnorm_forward_cuda() with `threads` threads a block, or more if a row needs them. */
static inline void rmsnorm_forward_launch(floatX* out, float* rstd, const floatX* x, const floatX* weight, RowShape rows,
                                          float eps, int threads, cudaStream_t stream) {
    if (rows.N == 0) { return; }
    constexpr int W = VECTOR<floatX>;
    void (*const kernels[1 + RMSNORM_PACKS])(floatX*, float*, const floatX*, const floatX*, size_t, int, float, size_t) = {
        rmsnorm_forward_kernel<1, RMSNORM_SCALARS>, rmsnorm_forward_kernel<W, 1>, rmsnorm_forward_kernel<W, 2>,
        rmsnorm_forward_kernel<W, 3>, rmsnorm_forward_kernel<W, 4>};
    const RmsnormBlock b = rmsnorm_block(rows.C, threads);
    kernels[b.packs]<<<(unsigned)ceil_div(rows.N, b.block.z), b.block, 0, stream>>>(out, rstd, x, weight, rows.N, rows.C, eps,
                                                                                    rows.pitch);
    CUDA_CHECK_LAUNCH("rmsnorm_forward_kernel");
}

/* Writes out (rows) and rstd (N) from x (rows) and weight (C). */
static inline void rmsnorm_forward_cuda(floatX* out, float* rstd, const floatX* x, const floatX* weight, RowShape rows,
                                        float eps, cudaStream_t stream) {
    rmsnorm_forward_launch(out, rstd, x, weight, rows, eps, RMSNORM_FORWARD_THREADS, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// forward for products in 8 bits: it writes its output once more, quantised, with the bits of quantise_rows_cuda(). A block
// takes a row, with the same warps and so with the same sums. It converts the row once it is complete, from the cache. Bytes a
// row: 5C (BF16)

template <int K>
__global__ void __launch_bounds__(RMSNORM_THREADS)
    rmsnorm_forward_quantised_kernel(QuantisedRows q, floatX* out, float* rstd, const floatX* x, const floatX* weight,
                                     RowShape rows, float eps, QuantiseCounts* counts) {
    constexpr int W = VECTOR<floatX>;
    uint32_t largest = 0;
    rmsnorm_forward_rows<W, K>(out, rstd, x, weight, rows, eps,
                               [&](const Vec<floatX, W>& o) { largest = largest_of(o, largest); });
    quantise_row(q, blockIdx.x, out + blockIdx.x * rows.pitch, rows.C, largest, counts);
}

/* Writes out (rows) and rstd (N) as rmsnorm_forward_cuda(), and q.rows from out. C is a multiple of QUANTISE_WIDTH. */
static inline void rmsnorm_forward_quantised_cuda(QuantisedOutput q, floatX* out, float* rstd, const floatX* x,
                                                  const floatX* weight, RowShape rows, float eps, cudaStream_t stream) {
    if (rows.N == 0) { return; }
    assert(rows.C % QUANTISE_WIDTH == 0 && q.rows.pitch % QUANTISE_WIDTH == 0);
    void (*const kernels[])(QuantisedRows, floatX*, float*, const floatX*, const floatX*, RowShape, float, QuantiseCounts*) = {
        rmsnorm_forward_quantised_kernel<1>, rmsnorm_forward_quantised_kernel<2>, rmsnorm_forward_quantised_kernel<3>,
        rmsnorm_forward_quantised_kernel<4>};
    static_assert(sizeof kernels / sizeof *kernels == RMSNORM_PACKS, "a kernel for each number of vectors");
    RmsnormBlock b = rmsnorm_block(rows.C, 32);
    b.block.z = 1;
    kernels[b.packs - 1]<<<(unsigned)rows.N, b.block, 0, stream>>>(q.rows, out, rstd, x, weight, rows, eps, q.counts);
    CUDA_CHECK_LAUNCH("rmsnorm_forward_quantised_kernel");
}

// ---------------------------------------------------------------------------------------------------------------------
// backward

typedef void RmsnormBackwardKernel(floatX* dx, float* partial, const floatX* dout, const floatX* x, const floatX* weight,
                                   const float* rstd, size_t N, int C, size_t pitch);

typedef struct {
    RmsnormBackwardKernel* kernel;
    RmsnormBlock rows;
    size_t shared;
    size_t blocks;  // as many as run at a time: each sums many rows before it writes its partial row
} RmsnormBackwardPlan;

/* What the forward pass read and kept. */
typedef struct {
    const floatX *x, *weight;  // (rows), (C)
    const float* rstd;         // (N)
} RmsnormInput;

/* Plans backward. threads: of a block; fewer if shared memory is small, more if a row needs them */
static inline RmsnormBackwardPlan rmsnorm_backward_plan(size_t N, int C, int threads) {
    constexpr int W = VECTOR<floatX>;
    static RmsnormBackwardKernel* const kernels[1 + RMSNORM_PACKS] = {
        rmsnorm_backward_kernel<1, RMSNORM_SCALARS>, rmsnorm_backward_kernel<W, 1>, rmsnorm_backward_kernel<W, 2>,
        rmsnorm_backward_kernel<W, 3>, rmsnorm_backward_kernel<W, 4>};
    RmsnormBackwardPlan p;
    p.rows = rmsnorm_block(C, threads);
    p.kernel = kernels[p.rows.packs];
    dim3& block = p.rows.block;
    const size_t row = (size_t)C * sizeof(float);
    block.z = (unsigned)size_min(block.z, shared_limit(p.kernel) / row);
    p.shared = block.z * row;
    CUDA_CHECK(cudaFuncSetAttribute((const void*)p.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)p.shared));
    const size_t wave = blocks_at_once(p.kernel, (int)(block.x * block.y * block.z), p.shared);
    p.blocks = size_min(size_min(wave, RMSNORM_BACKWARD_BLOCKS), ceil_div(N, block.z));
    return p;
}

/* Returns the bytes of scratch that rmsnorm_backward_cuda() needs on any card. */
static inline size_t rmsnorm_backward_scratch_cuda(size_t N, int C) {
    return size_min(N, RMSNORM_BACKWARD_BLOCKS) * (size_t)C * sizeof(float);
}

/* Adds to dx (rows) and dweight (C, fp32; NULL: not wanted) from dout and what the forward pass read and kept.
 * scratch: bytes as above   threads: of a block, as the plan takes them */
static inline void rmsnorm_backward_cuda(floatX* dx, float* dweight, void* scratch, const floatX* dout, RmsnormInput f,
                                         RowShape rows, cudaStream_t stream, int threads = RMSNORM_BACKWARD_THREADS) {
    if (rows.N == 0) { return; }
    const RmsnormBackwardPlan plan = rmsnorm_backward_plan(rows.N, rows.C, threads);
    float* partial = (float*)scratch;  // (plan.blocks, C)
    plan.kernel<<<(unsigned)plan.blocks, plan.rows.block, plan.shared, stream>>>(dx, partial, dout, f.x, f.weight, f.rstd,
                                                                                 rows.N, rows.C, rows.pitch);
    CUDA_CHECK_LAUNCH("rmsnorm_backward_kernel");
    if (!dweight) { return; }
    rmsnorm_dweight_kernel<<<(unsigned)ceil_div((size_t)rows.C, RMSNORM_SUM_COLUMNS), 1024, 0, stream>>>(
        dweight, partial, (int)plan.blocks, rows.C);
    CUDA_CHECK_LAUNCH("rmsnorm_dweight_kernel");
}

#endif
