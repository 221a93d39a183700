/* rmsnorm.cu -- RMSNorm in steps. The formulas stand in llmc/rmsnorm.h, the lesson is dev/doc/rmsnorm.md.
 *
 *   make -C dev/cuda rmsnorm && build/zoo/rmsnorm [forward|backward] [N...]
 *
 * The forward pass reads x and writes out: 2 N C elements. The backward pass reads dout, x and dx, and writes dx: 4 N C
 * elements.
 */
#include "llmc/rmsnorm.cuh"
#include "llmc/rmsnorm.h"
#include "dev/cuda/zoo.cuh"

static const float EPS = 1e-5f;

enum { X, WEIGHT, OUT, RSTD };  // tensors of the forward ladder

/* The bytes of a tensor (N, C), in sectors. */
static double sectors(const Case& c) { return (double)c.n[0] * (double)c.n[1] * sizeof(floatX) / 32; }

static RowShape rows_of(const Case& c) { return {c.n[0], (int)c.n[1], c.pitch(c.n[1])}; }

// ---------------------------------------------------------------------------------------------------------------------
/* Launches a kernel of the forward ladder with so many rows a block and threads a row. */
template <auto* KERNEL, int ROWS, int THREADS>
static void in_rows(floatX* out, float* rstd, const floatX* x, const floatX* weight, RowShape rows, float eps,
                    cudaStream_t stream) {
    const dim3 block = THREADS == 1 ? dim3(ROWS) : dim3(THREADS, ROWS);
    KERNEL<<<blocks_for(rows.N, ROWS), block, 0, stream>>>(out, rstd, x, weight, rows, eps);
}

// forward 1: a thread a row, as the oracle's loop. The 32 threads of a warp read 32 rows at a time, so each load touches 32
// sectors and uses one element of each. The L1 cache keeps the sectors for the next elements; the stores have no such help.
__global__ void forward1_kernel(floatX* out, float* rstd, const floatX* x, const floatX* weight, RowShape rows, float eps) {
    const size_t n = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= rows.N) { return; }
    x += n * rows.pitch, out += n * rows.pitch;
    float square = 0;
    for (int c = 0; c < rows.C; c++) { square += to_float(x[c]) * to_float(x[c]); }
    const float r = 1.0f / sqrtf(square / (float)rows.C + eps);
    rstd[n] = r;
    for (int c = 0; c < rows.C; c++) { out[c] = from_float<floatX>(to_float(x[c]) * r * to_float(weight[c])); }
}

// Each store writes its sector anew. A thread waits once for each sector of its row, twice.
static Work predict_forward1(const Case& c) {
    return {2 * sectors(c) + (double)c.n[0] * (double)c.n[1], 0, 0, 2 * sectors(c) / (double)c.n[0]};
}

// forward 2: a block a row. Neighboring threads read neighboring elements, so that a warp's load is a few whole sectors. The
// sum goes through shared memory, by halves: a tree of 8 barriers.
__global__ void forward2_kernel(floatX* out, float* rstd, const floatX* x, const floatX* weight, RowShape rows, float eps) {
    __shared__ float shared[256];
    const size_t n = blockIdx.x;
    x += n * rows.pitch, out += n * rows.pitch;
    float square = 0;
    for (int c = threadIdx.x; c < rows.C; c += 256) { square += to_float(x[c]) * to_float(x[c]); }
    shared[threadIdx.x] = square;
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if ((int)threadIdx.x < half) { shared[threadIdx.x] += shared[threadIdx.x + half]; }
        __syncthreads();
    }
    const float r = 1.0f / sqrtf(shared[0] / (float)rows.C + eps);
    if (threadIdx.x == 0) { rstd[n] = r; }
    for (int c = threadIdx.x; c < rows.C; c += 256) { out[c] = from_float<floatX>(to_float(x[c]) * r * to_float(weight[c])); }
}

// The second read of a row hits a cache. An SM holds 8 blocks; a row takes them a trip to memory for x and a tree, which is
// about as long.
static Work predict_forward2(const Case& c) { return {2 * sectors(c), 0, 0, 2 * (double)c.n[0] / (8 * sms())}; }

// forward 3: a warp a row. Shuffles add 32 values without shared memory or a barrier, so the warps of an SM drift apart: some
// load while others add.
__global__ void forward3_kernel(floatX* out, float* rstd, const floatX* x, const floatX* weight, RowShape rows, float eps) {
    const size_t n = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (n >= rows.N) { return; }
    x += n * rows.pitch, out += n * rows.pitch;
    float square = 0;
    for (int c = threadIdx.x; c < rows.C; c += 32) { square += to_float(x[c]) * to_float(x[c]); }
    const float r = 1.0f / sqrtf(warp_sum(square) / (float)rows.C + eps);
    if (threadIdx.x == 0) { rstd[n] = r; }
    for (int c = threadIdx.x; c < rows.C; c += 32) { out[c] = from_float<floatX>(to_float(x[c]) * r * to_float(weight[c])); }
}

// All 64 warps of an SM have a row in flight, read and written. As far as these rows exceed the cache, x comes from memory
// twice. A lane has 4 loads of a loop in flight.
static Work predict_forward3(const Case& c) {
    const double row = (double)c.n[1] * sizeof(floatX), again = missing(64 * sms() * 2 * row);
    return {(2 + again) * sectors(c), 0, 16.0 * (double)c.n[0] * (double)c.n[1],
            2 * (double)c.n[1] / 128 * (double)c.n[0] / (64 * sms())};
}

// forward 4: a lane loads 16 bytes at a time, and keeps them in registers from the sum to the scaling. So x is read once, and a
// few instructions keep all of a row in flight.
template <int W, int K>
__global__ void forward4_kernel(floatX* out, float* rstd, const floatX* x, const floatX* weight, RowShape rows, float eps) {
    const size_t n = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (n >= rows.N) { return; }
    x += n * rows.pitch, out += n * rows.pitch;
    Vec<floatX, W> v[K];
    float square = 0;
#pragma unroll
    for (int k = 0; k < K; k++) {
        const int c = (k * 32 + threadIdx.x) * W;
        if (c < rows.C) { v[k] = load_vec<W>(x + c); }
    }
#pragma unroll
    for (int k = 0; k < K; k++) {
        if ((k * 32 + (int)threadIdx.x) * W >= rows.C) { continue; }
#pragma unroll
        for (int i = 0; i < W; i++) { square += to_float(v[k].v[i]) * to_float(v[k].v[i]); }
    }
    const float r = 1.0f / sqrtf(warp_sum(square) / (float)rows.C + eps);
    if (threadIdx.x == 0) { rstd[n] = r; }
#pragma unroll
    for (int k = 0; k < K; k++) {
        const int c = (k * 32 + threadIdx.x) * W;
        if (c >= rows.C) { continue; }
        const Vec<floatX, W> w = load_vec<W>(weight + c);
#pragma unroll
        for (int i = 0; i < W; i++) { v[k].v[i] = from_float<floatX>(to_float(v[k].v[i]) * r * to_float(w.v[i])); }
        store_vec(out + c, v[k]);
    }
}

/* Each lane has K vectors: the least of 2, 8 and 32 that hold the row, and at most 128 elements. With W = 1, for rows that are
 * not whole vectors, a vector is an element. */
template <int W, int K = 2>
static void forward4_launch(floatX* out, float* rstd, const floatX* x, const floatX* weight, RowShape rows, float eps,
                            cudaStream_t stream) {
    if constexpr (4 * K <= 32 && 4 * K * W <= 128) {
        if (rows.C > 32 * W * K) { return forward4_launch<W, 4 * K>(out, rstd, x, weight, rows, eps, stream); }
    }
    if (rows.C > 32 * W * K) { die("forward 4: rows of %d elements, at most %d fit", rows.C, 32 * W * K); }
    forward4_kernel<W, K><<<blocks_for(rows.N, 4), dim3(32, 4), 0, stream>>>(out, rstd, x, weight, rows, eps);
}

static void forward4(floatX* out, float* rstd, const floatX* x, const floatX* weight, RowShape rows, float eps,
                     cudaStream_t stream) {
    (rows.C % VECTOR<floatX> ? forward4_launch<1> : forward4_launch<VECTOR<floatX>>)(out, rstd, x, weight, rows, eps, stream);
}

// Nothing is read twice, and memory always has work: as fast as a copy.
static Work predict_forward4(const Case& c) { return {2 * sectors(c)}; }

// ---------------------------------------------------------------------------------------------------------------------
// backward 1: a block a row finds the sum that dx needs. Each row adds to the weight's gradient in memory, atomically: N
// additions to each of C addresses, in any order. The bits change from run to run.
enum { DX, DWEIGHT, SPARE, DOUT, BX, BWEIGHT, BRSTD };  // tensors of the backward ladder
enum { BLOCKS = RMSNORM_BACKWARD_BLOCKS };              // of 2 and 3, at most

/* Adds to dx of a row, by a block of 256 threads; calls each(c, value) with what the row adds to dweight[c]. */
template <typename Each>
__device__ void backward_row(floatX* dx, const floatX* dout, const floatX* x, const floatX* weight, float r, int C,
                             const Each& each) {
    __shared__ float shared[32];
    float dot = 0;
    for (int c = threadIdx.x; c < C; c += 256) { dot += to_float(dout[c]) * to_float(weight[c]) * to_float(x[c]); }
    const float mean_term = block_sum(dot, shared) * r * r * r / (float)C;
    for (int c = threadIdx.x; c < C; c += 256) {
        const float d = to_float(dout[c]) * r, e = to_float(x[c]);
        dx[c] = from_float<floatX>(to_float(dx[c]) + (d * to_float(weight[c]) - e * mean_term));
        each(c, d * e);
    }
    __syncthreads();  // `shared` is free for the next row
}

__global__ void backward1_kernel(floatX* dx, float* dweight, const floatX* dout, const floatX* x, const floatX* weight,
                                 const float* rstd, RowShape rows) {
    const size_t n = blockIdx.x, at = n * rows.pitch;
    backward_row(dx + at, dout + at, x + at, weight, rstd[n], rows.C, [&](int c, float d) { atomicAdd(&dweight[c], d); });
}

static void backward1(floatX* dx, float* dweight, void*, const floatX* dout, const floatX* x, const floatX* weight,
                      const float* rstd, RowShape rows, cudaStream_t stream) {
    backward1_kernel<<<(unsigned)rows.N, 256, 0, stream>>>(dx, dweight, dout, x, weight, rstd, rows);
}

// An atomic addition is a sector in the L2 cache, as one written by a store; a warp's 32 are 4.
static Work predict_backward1(const Case& c) {
    return {4 * sectors(c) + (double)c.n[0] * (double)c.n[1] / 8, 0, 0, 3 * (double)c.n[0] / (8 * sms())};
}

// backward 2: a block takes many rows and adds their weight gradients in shared memory, where each thread owns its columns.
// Only the block's sum is added atomically: as many times as there are blocks.
template <bool PARTIAL>
__global__ void backward2_kernel(floatX* dx, float* dweight, const floatX* dout, const floatX* x, const floatX* weight,
                                 const float* rstd, RowShape rows) {
    extern __shared__ float sums[];
    for (int c = threadIdx.x; c < rows.C; c += 256) { sums[c] = 0; }
    for (size_t n = blockIdx.x; n < rows.N; n += gridDim.x) {
        const size_t at = n * rows.pitch;
        backward_row(dx + at, dout + at, x + at, weight, rstd[n], rows.C, [&](int c, float d) { sums[c] += d; });
    }
    for (int c = threadIdx.x; c < rows.C; c += 256) {
        if constexpr (PARTIAL) {
            dweight[(size_t)blockIdx.x * rows.C + c] = sums[c];
        } else {
            atomicAdd(&dweight[c], sums[c]);
        }
    }
}

static unsigned blocks_of(RowShape rows) { return (unsigned)size_min(rows.N, size_min(BLOCKS, 4 * (size_t)sms())); }

static void backward2(floatX* dx, float* dweight, void*, const floatX* dout, const floatX* x, const floatX* weight,
                      const float* rstd, RowShape rows, cudaStream_t stream) {
    backward2_kernel<false><<<blocks_of(rows), 256, rows.C * sizeof(float), stream>>>(dx, dweight, dout, x, weight, rstd, rows);
}

// A row takes its block a trip for both inputs, the sum, and a trip for dx; 4 blocks of an SM do this beside each other.
static Work predict_backward2(const Case& c) { return {4 * sectors(c), 0, 0, 3 * (double)c.n[0] / (4 * sms())}; }
// For the compiler, the store to dx may change what the next loads read. So a thread waits for each of its C / 256 elements,
// and two more times. At both shapes a wait takes as long as two trips of a lone thread.
static double waits(const Case& c) { return 2 * ((double)c.n[1] / 256 + 2) * (double)c.n[0] / (4 * sms()); }
static Work correct_backward2(const Case& c) { return {4 * sectors(c), 0, 0, waits(c)}; }

// backward 3: each block writes its sum as a row of its own, and a second kernel adds these rows in their order. The same bits
// in each run, for C floats a block more.
__global__ void backward3_sum_kernel(float* dweight, const float* partial, int count, int C) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= C) { return; }
    float sum = 0;
    for (int k = 0; k < count; k++) { sum += partial[(size_t)k * C + c]; }
    dweight[c] += sum;
}

static void backward3(floatX* dx, float* dweight, void* scratch, const floatX* dout, const floatX* x, const floatX* weight,
                      const float* rstd, RowShape rows, cudaStream_t stream) {
    const unsigned count = blocks_of(rows);
    float* partial = (float*)scratch;  // (count, C)
    backward2_kernel<true><<<count, 256, rows.C * sizeof(float), stream>>>(dx, partial, dout, x, weight, rstd, rows);
    backward3_sum_kernel<<<blocks_for((size_t)rows.C, 32), 32, 0, stream>>>(dweight, partial, (int)count, rows.C);
}

// The second kernel's threads walk down a column, with 4 loads in flight.
static Work predict_backward3(const Case& c) {
    const double count = 4 * sms();
    return {4 * sectors(c) + count * (double)c.n[1] / 4, 0, 0, 3 * (double)c.n[0] / count + count / 4, 2};
}
// The measured time fits some 16 loads in flight in the second kernel.
static Work correct_backward3(const Case& c) { return {4 * sectors(c), 0, 0, waits(c) + 4 * sms() / 16, 2}; }

static Work predict_backward4(const Case& c) { return {4 * sectors(c), 0, 0, 0, 2}; }

// ---------------------------------------------------------------------------------------------------------------------

static void backward4(floatX* dx, float* dweight, void* scratch, const floatX* dout, const floatX* x, const floatX* weight,
                      const float* rstd, RowShape rows, cudaStream_t stream) {
    rmsnorm_backward_cuda(dx, dweight, scratch, dout, {x, weight, rstd}, rows, stream);
}

template <auto* LAUNCH>
static void forward(const Case& c, cudaStream_t stream) {
    LAUNCH(c.at<floatX>(OUT), c.at<float>(RSTD), c.at<floatX>(X), c.at<floatX>(WEIGHT), rows_of(c), EPS, stream);
}

template <auto* LAUNCH>
static void backward(const Case& c, cudaStream_t stream) {
    LAUNCH(c.at<floatX>(DX), c.at<float>(DWEIGHT), c.at<char>(SPARE), c.at<floatX>(DOUT), c.at<floatX>(BX),
           c.at<floatX>(BWEIGHT), c.at<float>(BRSTD), rows_of(c), stream);
}

static void make_forward(Case& c) {
    const size_t N = c.n[0], C = c.n[1];
    c.rows("x", READ, N, C, 0.02f);  // so small that eps shows
    c.tensor<floatX>("weight", READ, 1, C);
    c.rows("out", WRITE, N, C);
    c.tensor<float>("rstd", WRITE, 1, N);
    c.bytes = 2.0 * sizeof(floatX) * (double)N * (double)C;
}

static void oracle_forward(Case& c) {
    rmsnorm_forward(c[OUT], c[RSTD], c[X], c[WEIGHT], packed_rows(c.n[0], (int)c.n[1]), EPS);
}

static void make_backward(Case& c) {
    const size_t N = c.n[0], C = c.n[1];
    c.rows("dx", ADD, N, C);
    c.tensor<float>("dweight", ADD, 1, C);
    c.tensor<char>("scratch", SCRATCH, 1, rmsnorm_backward_scratch_cuda(N, (int)C));
    c.rows("dout", READ, N, C);
    c.rows("x", READ, N, C, 2);
    c.tensor<floatX>("weight", READ, 1, C);
    c.tensor<float>("rstd", READ, 1, N);
    c.bytes = 4.0 * sizeof(floatX) * (double)N * (double)C;
}

/* Terms of dx may cancel, so the oracle leaves their sizes. */
static void oracle_backward(Case& c) {
    const size_t N = c.n[0], C = c.n[1];
    std::vector<char> scratch(rmsnorm_backward_scratch(N, (int)C));
    for (size_t n = 0; n < N; n++) {
        const float *dout = c[DOUT] + n * C, *x = c[BX] + n * C, r = fabsf(c[BRSTD][n]);
        float mean = 0;
        for (size_t i = 0; i < C; i++) { mean += fabsf(dout[i] * c[BWEIGHT][i] * x[i]) / (float)C; }
        for (size_t i = 0; i < C; i++) {
            const float added = fabsf(dout[i] * c[BWEIGHT][i]) * r + fabsf(x[i]) * r * r * r * mean;
            c.tensors[DX].terms.push_back(fabsf(c[DX][n * C + i]) + added);
        }
    }
    rmsnorm_backward(c[DX], c[DWEIGHT], scratch.data(), c[DOUT], c[BX], c[BWEIGHT], c[BRSTD], packed_rows(N, (int)C));
}

static const Shape odd = {{33, 97}}, tail = {{67, 520}}, padded_rows = {{130, 256}}, classic = {{8192, 768}},
                   large = {{262144, 2048}};

#include "dev/cuda/main.cuh"

int main(int argc, char** argv) {
    const Ladder f("forward", "N,C", make_forward, NULL, oracle_forward, {odd, tail, padded_rows}, {classic}, {large},
                   {{1, "a thread a row", 0, forward<in_rows<forward1_kernel, 64, 1>>, predict_forward1},
                    {2, "a block a row, tree in shared memory", 0, forward<in_rows<forward2_kernel, 1, 256>>, predict_forward2},
                    {3, "a warp a row, shuffles", 0, forward<in_rows<forward3_kernel, 8, 32>>, predict_forward3},
                    {4, "16-byte loads, row in registers", 0, forward<forward4>, predict_forward4},
                    {5, "as few warps as hold the row", BOLD, forward<rmsnorm_forward_cuda>, predict_forward4}});
    const Ladder b(
        "backward", "N,C", make_backward, NULL, oracle_backward, {odd, tail, padded_rows}, {classic}, {large},
        {{1, "atomic additions of each row", ATOMICS, backward<backward1>, predict_backward1},
         {2, "sums in shared memory, then atomics", ATOMICS, backward<backward2>, predict_backward2, correct_backward2},
         {3, "partial rows, ordered sum", 0, backward<backward3>, predict_backward3, correct_backward3},
         {4, "one wave, row and dweight in registers", BOLD, backward<backward4>, predict_backward4}});
    return zoo(argc, argv, "rmsnorm", {f, b});
}
