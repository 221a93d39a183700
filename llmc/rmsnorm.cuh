/* rmsnorm.cuh -- root-mean-square norm on the GPU: forward, forward behind a residual addition, backward. The oracle is
 * rmsnorm.h.
 *
 *   rstd = 1 / sqrt(mean(x^2) + eps)        out = x * rstd * weight
 *   dx  += rstd * (dout * weight) - x * rstd^3 / C * sum(dout * weight * x)       dweight += sum over rows of dout * x * rstd
 *
 * A row is held by `warps` warps, RMSNORM_ELEMENTS elements a thread, in registers: it is read once. Narrow rows share a
 * block. Backward runs one wave of blocks over all rows; each thread keeps the weight gradient of its columns in
 * registers, a block writes one partial row, and a second kernel adds the partial rows in their order.
 * dx is read and written: it carries the residual stream's gradient past the norm (dx += is the residual's addition).
 * Bytes a row: forward 2C, with residual 4C, backward 4C (times the size of an element).
 */
#ifndef LLMC_RMSNORM_CUH
#define LLMC_RMSNORM_CUH

#include "cuda_common.cuh"

enum {
    RMSNORM_ELEMENTS = 16,  // of a row, per thread
    RMSNORM_THREADS = 512,  // most of a block
    RMSNORM_MAX_C = RMSNORM_THREADS * RMSNORM_ELEMENTS,
};

/* The sum over the `warps` = blockDim.y warps that share a row; blockDim = (32, warps, rows of a block). `shared` holds
 * RMSNORM_THREADS / 32 floats; a loop gives two such arrays in turns, so that one barrier a sum is enough. */
__device__ __forceinline__ float row_sum(float x, float* shared) {
    x = warp_sum(x);
    if (blockDim.y == 1) { return x; }
    float* row = shared + threadIdx.z * blockDim.y;
    if (threadIdx.x == 0) { row[threadIdx.y] = x; }
    __syncthreads();
    float sum = 0;
    for (int w = 0; w < (int)blockDim.y; w++) { sum += row[w]; }
    return sum;
}

/* out = norm(x), or with RESIDUAL: sum = x + y, out = norm(sum), where the norm sees the sum as it is stored. */
template <int W, bool RESIDUAL>
__global__ void __launch_bounds__(RMSNORM_THREADS)
    rmsnorm_forward_kernel(floatX* sum, floatX* out, float* rstd, const floatX* x, const floatX* y, const floatX* weight,
                           size_t N, int C, float eps, size_t pitch) {
    constexpr int K = RMSNORM_ELEMENTS / W;
    __shared__ float shared[RMSNORM_THREADS / 32];
    const size_t n = (size_t)blockIdx.x * blockDim.z + threadIdx.z;
    const bool active = n < N;  // the others only meet the barriers
    const int first = (threadIdx.y * 32 + threadIdx.x) * W, stride = blockDim.y * 32 * W;
    Vec<floatX, W> v[K], other[RESIDUAL ? K : 1];
#pragma unroll
    for (int k = 0; k < K; k++) {
        const int c = first + k * stride;
        if (active && c < C) {
            v[k] = load_vec<W>(x + n * pitch + c);
            if constexpr (RESIDUAL) { other[k] = load_vec<W>(y + n * pitch + c); }
        }
    }
    float square = 0;
#pragma unroll
    for (int k = 0; k < K; k++) {
        const int c = first + k * stride;
        if (active && c < C) {
#pragma unroll
            for (int i = 0; i < W; i++) {
                if constexpr (RESIDUAL) { v[k].v[i] = from_float<floatX>(to_float(v[k].v[i]) + to_float(other[k].v[i])); }
                const float e = to_float(v[k].v[i]);
                square += e * e;
            }
            if constexpr (RESIDUAL) { store_vec(sum + n * pitch + c, v[k]); }
        }
    }
    square = row_sum(square, shared);
    if (!active) { return; }
    const float r = 1.0f / sqrtf(square / (float)C + eps);
    if (threadIdx.x == 0 && threadIdx.y == 0) { rstd[n] = r; }
#pragma unroll
    for (int k = 0; k < K; k++) {
        const int c = first + k * stride;
        if (c < C) {
            const Vec<floatX, W> w = load_vec<W>(weight + c);
            Vec<floatX, W> o;
#pragma unroll
            for (int i = 0; i < W; i++) { o.v[i] = from_float<floatX>(to_float(v[k].v[i]) * r * to_float(w.v[i])); }
            store_vec(out + n * pitch + c, o);
        }
    }
}

/* partial: (gridDim.x, C) weight gradients of each block's rows. */
template <int W>
__global__ void __launch_bounds__(RMSNORM_THREADS)
    rmsnorm_backward_kernel(floatX* dx, float* partial, const floatX* dout, const floatX* x, const floatX* weight,
                            const float* rstd, size_t N, int C, size_t pitch) {
    constexpr int K = RMSNORM_ELEMENTS / W;
    __shared__ float shared[2][RMSNORM_THREADS / 32];
    extern __shared__ float dweight_rows[];  // (blockDim.z, C), used at the end
    const int first = (threadIdx.y * 32 + threadIdx.x) * W, stride = blockDim.y * 32 * W;
    float dweight[K][W] = {};
    int turn = 0;
    // a block's rows are together: the loop's length is the same for all its threads
    for (size_t start = (size_t)blockIdx.x * blockDim.z; start < N; start += (size_t)gridDim.x * blockDim.z) {
        const size_t n = start + threadIdx.z;
        const bool active = n < N;
        Vec<floatX, W> xs[K], ds[K], old[K];
#pragma unroll
        for (int k = 0; k < K; k++) {
            const int c = first + k * stride;
            if (active && c < C) {
                xs[k] = load_vec<W>(x + n * pitch + c);
                ds[k] = load_vec<W>(dout + n * pitch + c);
                if constexpr (W > 1) { old[k] = load_vec<W>(dx + n * pitch + c); }  // early: one wait for all three
            }
        }
        const float r = active ? rstd[n] : 0.0f;
        float dot = 0;
#pragma unroll
        for (int k = 0; k < K; k++) {
            const int c = first + k * stride;
            if (active && c < C) {
                const Vec<floatX, W> w = load_vec<W>(weight + c);
#pragma unroll
                for (int i = 0; i < W; i++) {
                    const float e = to_float(xs[k].v[i]), d = to_float(ds[k].v[i]);
                    dweight[k][i] += d * e * r;
                    dot += d * to_float(w.v[i]) * e;
                }
            }
        }
        dot = row_sum(dot, shared[turn]);
        turn ^= 1;
        const float s = dot * r * r * r / (float)C;
#pragma unroll
        for (int k = 0; k < K; k++) {
            const int c = first + k * stride;
            if (active && c < C) {
                const Vec<floatX, W> w = load_vec<W>(weight + c);
                if constexpr (W == 1) { old[k] = load_vec<W>(dx + n * pitch + c); }  // too many registers otherwise
#pragma unroll
                for (int i = 0; i < W; i++) {
                    const float d = to_float(ds[k].v[i]) * to_float(w.v[i]) * r - to_float(xs[k].v[i]) * s;
                    old[k].v[i] = from_float<floatX>(to_float(old[k].v[i]) + d);
                }
                store_vec(dx + n * pitch + c, old[k]);
            }
        }
    }
    // the rows that were side by side in the block, summed in their order
#pragma unroll
    for (int k = 0; k < K; k++) {
        const int c = first + k * stride;
        if (c < C) {
#pragma unroll
            for (int i = 0; i < W; i++) { dweight_rows[(size_t)threadIdx.z * C + c + i] = dweight[k][i]; }
        }
    }
    __syncthreads();
    const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * 32 + threadIdx.x;
    for (int c = thread; c < C; c += blockDim.x * blockDim.y * blockDim.z) {
        float sum = 0;
        for (int z = 0; z < (int)blockDim.z; z++) { sum += dweight_rows[(size_t)z * C + c]; }
        partial[(size_t)blockIdx.x * C + c] = sum;
    }
}

/* dweight (C) += the column sums of partial (rows, C); a block has 32 columns, its 32 warps every 32nd row each. */
__global__ void __launch_bounds__(1024) rmsnorm_dweight_kernel(float* dweight, const float* partial, int rows, int C) {
    __shared__ float shared[32][33];
    const int c = blockIdx.x * 32 + threadIdx.x;
    float sum = 0;
    if (c < C) {
        for (int r = threadIdx.y; r < rows; r += 32) { sum += partial[(size_t)r * C + c]; }
    }
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && c < C) {
        sum = 0;
        for (int y = 0; y < 32; y++) { sum += shared[y][threadIdx.x]; }
        dweight[c] += sum;
    }
}

/* blockDim for rows of C elements: (32, warps of a row, rows of a block). */
static inline dim3 rmsnorm_block(int C, int threads) {
    assert(C <= RMSNORM_MAX_C);
    const int warps = (int)ceil_div((size_t)C, 32 * RMSNORM_ELEMENTS);
    return dim3(32, (unsigned)warps, (unsigned)size_max(1, (size_t)(threads / 32 / warps)));
}

/* out: (N, C), pitch   rstd: (N)   x: (N, C), pitch   weight: (C).   C <= RMSNORM_MAX_C */
static inline void rmsnorm_forward_cuda(floatX* out, float* rstd, const floatX* x, const floatX* weight, size_t N, int C,
                                        float eps, size_t pitch, cudaStream_t stream) {
    if (N == 0) { return; }
    const dim3 block = rmsnorm_block(C, 256);
    const unsigned grid = (unsigned)ceil_div(N, block.z);
    if (C % VECTOR<floatX> == 0) {
        rmsnorm_forward_kernel<VECTOR<floatX>, false>
            <<<grid, block, 0, stream>>>(NULL, out, rstd, x, NULL, weight, N, C, eps, pitch);
    } else {
        rmsnorm_forward_kernel<1, false><<<grid, block, 0, stream>>>(NULL, out, rstd, x, NULL, weight, N, C, eps, pitch);
    }
    CUDA_CHECK_LAUNCH("rmsnorm_forward_kernel");
}

/* residual = x + y (may be x or y), then out and rstd of its norm; all (N, C), pitch. */
static inline void residual_rmsnorm_forward_cuda(floatX* residual, floatX* out, float* rstd, const floatX* x, const floatX* y,
                                                 const floatX* weight, size_t N, int C, float eps, size_t pitch,
                                                 cudaStream_t stream) {
    if (N == 0) { return; }
    const dim3 block = rmsnorm_block(C, 256);
    const unsigned grid = (unsigned)ceil_div(N, block.z);
    if (C % VECTOR<floatX> == 0) {
        rmsnorm_forward_kernel<VECTOR<floatX>, true>
            <<<grid, block, 0, stream>>>(residual, out, rstd, x, y, weight, N, C, eps, pitch);
    } else {
        rmsnorm_forward_kernel<1, true><<<grid, block, 0, stream>>>(residual, out, rstd, x, y, weight, N, C, eps, pitch);
    }
    CUDA_CHECK_LAUNCH("rmsnorm_forward_kernel");
}

/* Blocks of the backward pass: as many as run at one time, so that each sums many rows before it writes its partial row. */
static inline int rmsnorm_backward_blocks(size_t N, int C) {
    const dim3 block = rmsnorm_block(C, 256);
    const int threads = (int)(block.x * block.y * block.z);
    const size_t shared = (size_t)block.z * C * sizeof(float);
    int per_sm = 0;
    if (C % VECTOR<floatX> == 0) {
        CUDA_CHECK(
            cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, rmsnorm_backward_kernel<VECTOR<floatX>>, threads, shared));
    } else {
        CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, rmsnorm_backward_kernel<1>, threads, shared));
    }
    const size_t wave = (size_t)device_attribute(cudaDevAttrMultiProcessorCount) * size_max(1, (size_t)per_sm);
    return (int)size_min(wave, ceil_div(N, block.z));
}

/* Bytes of scratch that rmsnorm_backward_cuda() wants. */
static inline size_t rmsnorm_backward_scratch_cuda(size_t N, int C) {
    return (size_t)rmsnorm_backward_blocks(N, C) * (size_t)C * sizeof(float);
}

/* dx: (N, C) +=, pitch   dweight: (C) += in fp32   scratch: bytes as above   dout, x: (N, C), pitch   weight: (C)
 * rstd: (N) */
static inline void rmsnorm_backward_cuda(floatX* dx, float* dweight, void* scratch, const floatX* dout, const floatX* x,
                                         const floatX* weight, const float* rstd, size_t N, int C, size_t pitch,
                                         cudaStream_t stream) {
    if (N == 0) { return; }
    const dim3 block = rmsnorm_block(C, 256);
    const int grid = rmsnorm_backward_blocks(N, C);
    const size_t shared = (size_t)block.z * C * sizeof(float);  // at most 32 KB
    float* partial = (float*)scratch;
    if (C % VECTOR<floatX> == 0) {
        rmsnorm_backward_kernel<VECTOR<floatX>>
            <<<grid, block, shared, stream>>>(dx, partial, dout, x, weight, rstd, N, C, pitch);
    } else {
        rmsnorm_backward_kernel<1><<<grid, block, shared, stream>>>(dx, partial, dout, x, weight, rstd, N, C, pitch);
    }
    CUDA_CHECK_LAUNCH("rmsnorm_backward_kernel");
    rmsnorm_dweight_kernel<<<(unsigned)ceil_div((size_t)C, 32), dim3(32, 32), 0, stream>>>(dweight, partial, grid, C);
    CUDA_CHECK_LAUNCH("rmsnorm_dweight_kernel");
}

#endif
