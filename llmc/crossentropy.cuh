/* crossentropy.cuh -- softmax and negative log-likelihood of each row of logits on the GPU and, in the same launch, the
 * gradient, which overwrites the logits. The oracle is crossentropy.h, where the formulas stand.
 *
 * One pass finds maximum and sum (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). Without gradient,
 * one kernel takes any V. It is one wave of blocks. Each block takes row after row, always with the next vectors' loads in
 * flight. With gradient kernels.cuh takes the first of these kernels that can take the row:
 *   held     keeps the row in a block's registers, CE_PACKS vectors a thread: up to 32,768 elements of 16 bits.
 *   row      runs one wave of blocks, each row after row, and keeps a row in registers and shared memory together. As soon as a
 *            part of the row is no longer needed, it loads the next row's part in its place (cp.async): memory always has work.
 *            From sm_80 on, up to what shared memory holds: 131,072 elements of 16 bits on an H100, 94,208 on an A100.
 *   looped   takes any V on any card: reads the row twice, the second time backwards, since its end is still in the L2 cache.
 * 16-bit builds compute 2^(x log2(e) - max log2(e)): one multiply-add and the hardware's 2^x.
 * The caller has checked that -1 <= target < V. A row whose target is -1 is computed like the others, with a factor of 0 for
 * its gradient; its loss becomes 0. Elements from V to the pitch are neither read nor written.
 */
#ifndef LLMC_CROSSENTROPY_CUH
#define LLMC_CROSSENTROPY_CUH

#include "llmc/base/matrix.h"  // defines: RowShape
#include "llmc/kernels.cuh"    // defines: CrossentropyWay, CE_VIA, kernel_row
#include "llmc/cuda/cuda_common.cuh"
#include "llmc/cuda/ptx.cuh"

enum {
    CE_PACKS = 8,              // held kernel: vectors of a row in a thread's registers
    CE_LOOP_THREADS = 1024,    // looped kernel: threads of a block
    CE_FORWARD_THREADS = 256,  // without gradient: threads of a block, at most
    CE_UNROLL = 4,             // looped and without gradient: vectors that a thread processes together
};

/* Exponents are in units of 1 / SOFTMAX_UNIT: base e in FP32 builds, otherwise base 2. */
#ifdef PRECISION_FP32
constexpr float SOFTMAX_UNIT = 1.0f;
__device__ __forceinline__ float softmax_power(float x) { return expf(x); }
#else
constexpr float SOFTMAX_UNIT = 1.4426950409f;
__device__ __forceinline__ float softmax_power(float x) { return exp2_fast(x); }
#endif

/* The sum of e^(x - maximum) over the elements seen so far, and their maximum times SOFTMAX_UNIT. */
struct SoftmaxSum {
    float max, sum;
};
/* The lowest maximum. It is finite even after scaling by the unit, so that -inf minus -inf never happens. */
constexpr float SOFTMAX_LOWEST = -1e38f;
__device__ __forceinline__ SoftmaxSum softmax_of_none() { return {SOFTMAX_LOWEST, 0.0f}; }

__device__ __forceinline__ float softmax_max(float logit) { return fmaxf(logit * SOFTMAX_UNIT, SOFTMAX_LOWEST); }

/* Returns e^(x - max). */
__device__ __forceinline__ float softmax_term(float x, float max) { return softmax_power(fmaf(x, SOFTMAX_UNIT, -max)); }

/* Returns the loss of a row. Computes in double: log(sum) can be far smaller than the other two terms. */
__device__ __forceinline__ float softmax_loss(SoftmaxSum s, int target, float target_logit) {
    return target < 0 ? 0.0f : (float)((double)s.max * (1 / (double)SOFTMAX_UNIT) - (double)target_logit) + logf(s.sum);
}

/* Joins the sums of all threads of a block and returns the result in every thread. `shared` has 32 values and is free for reuse
 * after the next __syncthreads(). */
__device__ __forceinline__ SoftmaxSum softmax_block(SoftmaxSum s, SoftmaxSum* shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float max = warp_max(s.max);
    s.sum = warp_sum(s.sum * softmax_power(s.max - max));
    if (lane == 0) { shared[warp] = SoftmaxSum{max, s.sum}; }
    __syncthreads();
    s = lane < (int)blockDim.x / 32 ? shared[lane] : softmax_of_none();
    max = warp_max(s.max);
    return SoftmaxSum{max, warp_sum(s.sum * softmax_power(s.max - max))};
}

typedef Held<floatX, VECTOR<floatX>> Logits;  // one vector
#if defined(PRECISION_BF16)
typedef __nv_bfloat162 LogitPair;
#elif defined(PRECISION_FP16)
typedef __half2 LogitPair;
#endif

/* Returns the larger of each two elements; a NaN loses against a number. */
__device__ __forceinline__ uint32_t max_word(uint32_t a, uint32_t b) {
#ifdef PRECISION_FP32
    return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
#else
    union {
        uint32_t bits;
        LogitPair pair;
    } x = {a}, y = {b};
    x.pair = __hmax2(x.pair, y.pair);
    return x.bits;
#endif
}

/* Returns the maximum of K vectors and `rest`. */
template <int K>
__device__ __forceinline__ float largest_logit(Logits (&x)[K], float rest) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800  // no instruction for pairs there
#pragma unroll
    for (int k = 0; k < K; k++) {
        const Pack<floatX> v = unpack(x[k]);
#pragma unroll
        for (int i = 0; i < VECTOR<floatX>; i++) { rest = fmaxf(rest, to_float(v.v[i])); }
        forget(x[k]);
    }
    return rest;
#else
    Logits m = x[0];
#pragma unroll
    for (int k = 1; k < K; k++) {
        m.bits.x = max_word(m.bits.x, x[k].bits.x);
        m.bits.y = max_word(m.bits.y, x[k].bits.y);
        m.bits.z = max_word(m.bits.z, x[k].bits.z);
        m.bits.w = max_word(m.bits.w, x[k].bits.w);
    }
    const Pack<floatX> last = unpack(m);
#pragma unroll
    for (int i = 0; i < VECTOR<floatX>; i++) { rest = fmaxf(rest, to_float(last.v[i])); }
    return rest;
#endif
}

/* Returns the sum of e^(x - max) over K vectors, with two running sums a vector. Keeps x as it is in memory. */
template <int K>
__device__ __forceinline__ float sum_of_terms(Logits (&x)[K], float max) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < K; k++) {
        const Pack<floatX> v = unpack(x[k]);
        float even = 0, odd = 0;
#pragma unroll
        for (int i = 0; i < VECTOR<floatX>; i += 2) {
            even += softmax_term(to_float(v.v[i]), max);
            odd += softmax_term(to_float(v.v[i + 1]), max);
        }
        sum += even + odd;
        forget(x[k]);
    }
    return sum;
}

/* Adds K vectors to s. */
template <int K>
__device__ __forceinline__ void softmax_add(SoftmaxSum& s, Logits (&x)[K]) {
    const float max = fmaxf(s.max, softmax_max(largest_logit(x, -INFINITY)));
    s.sum = s.sum * softmax_power(s.max - max) + sum_of_terms(x, max);
    s.max = max;
}

__device__ __forceinline__ void softmax_add(SoftmaxSum& s, float logit) {
    const float max = fmaxf(s.max, softmax_max(logit));
    s.sum = s.sum * softmax_power(s.max - max) + softmax_term(logit, max);
    s.max = max;
}

/* Returns a vector of -inf, whose e^x is 0. It stands for a vector at or past `full`, the largest multiple of a vector's length
 * in V. */
__device__ __forceinline__ Logits no_logits() {
#if defined(PRECISION_FP32)
    const unsigned none = 0xff800000u;
#elif defined(PRECISION_BF16)
    const unsigned none = 0xff80ff80u;
#else
    const unsigned none = 0xfc00fc00u;
#endif
    return Logits{make_uint4(none, none, none, none)};
}

__device__ __forceinline__ Logits load_logits(const floatX* row, int c, int full) {
    return c < full ? hold_stream<VECTOR<floatX>>(row + c) : no_logits();
}

/* Loads a row's V % W elements behind the vectors, one for each of the first threads. */
template <int W>
__device__ __forceinline__ float load_tail(const floatX* row, int thread, int V) {
    const int c = V / W * W + thread;
    return c < V ? to_float(row[c]) : -INFINITY;
}

/* Returns the logit of a row's target; without a target, the first logit. */
__device__ __forceinline__ float load_target(const floatX* row, int target) { return to_float(row[max(target, 0)]); }

/* Returns the factor of the row's softmax in its gradient. */
__device__ __forceinline__ float gradient_scale(float dloss, SoftmaxSum s, int target) {
    return target < 0 ? 0.0f : dloss / s.sum;
}

/* The numbers that turn a row's logits into gradients. */
struct SoftmaxGradient {
    float max, scale, dloss;  // scale: dloss / sum, or 0
    float target_logit;
    int target;
};

/* Stores dlogits of the vector at c. The thread that stores the target's vector then corrects the target's element. */
__device__ __forceinline__ void store_dlogits(floatX* row, int c, int full, const Logits& logits, const SoftmaxGradient& g) {
    constexpr int W = VECTOR<floatX>;
    if (c >= full) { return; }
    Pack<floatX> x = unpack(logits);
#pragma unroll
    for (int i = 0; i < W; i++) { x.v[i] = from_float<floatX>(softmax_term(to_float(x.v[i]), g.max) * g.scale); }
    store_stream(row + c, x);
    if ((unsigned)(g.target - c) < W) {
        row[g.target] = from_float<floatX>(softmax_term(g.target_logit, g.max) * g.scale - g.dloss);
    }
}

template <int W>
__device__ __forceinline__ void store_tail(floatX* row, int thread, int V, float x, const SoftmaxGradient& g) {
    const int c = V / W * W + thread;
    if (c < V) { row[c] = from_float<floatX>(softmax_term(x, g.max) * g.scale - (c == g.target ? g.dloss : 0.0f)); }
}

/* Blocks of the held kernel that an SM must have room for: 2 allow 64 registers a thread. Before sm_80 it needs more. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int CE_HELD_BLOCKS = 1;
#else
constexpr int CE_HELD_BLOCKS = 2;
#endif

/* A block takes one row and keeps it in registers. */
__global__ void __launch_bounds__(CE_BLOCK_PACKS / CE_PACKS, CE_HELD_BLOCKS)
    crossentropy_held_kernel(float* losses, floatX* logits, const int32_t* targets, float dloss, const float* loss_scale, int V,
                             size_t pitch) {
    constexpr int W = VECTOR<floatX>;
    __shared__ SoftmaxSum shared[32];
    // a warp has CE_PACKS * 32 neighboring vectors, so the compiler knows their distances
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = (warp * 32 * CE_PACKS + lane) * W, stride = 32 * W, full = V / W * W;
    floatX* row = logits + blockIdx.x * pitch;
    const int target = targets[blockIdx.x];
    const float target_logit = load_target(row, target);  // before anyone overwrites it
    const float tail = load_tail<W>(row, threadIdx.x, V);
    Logits x[CE_PACKS];
#pragma unroll
    for (int k = 0; k < CE_PACKS; k++) { x[k] = load_logits(row, first + k * stride, full); }
    if (loss_scale) { dloss *= *loss_scale; }
    SoftmaxSum s;
    s.max = softmax_max(largest_logit(x, tail));
    s.sum = sum_of_terms(x, s.max) + softmax_term(tail, s.max);
    s = softmax_block(s, shared);
    const SoftmaxGradient g = {s.max, gradient_scale(dloss, s, target), dloss, target_logit, target};
#pragma unroll
    for (int k = 0; k < CE_PACKS; k++) { store_dlogits(row, first + k * stride, full, x[k], g); }
    store_tail<W>(row, threadIdx.x, V, tail, g);
    if (threadIdx.x == 0) { losses[blockIdx.x] = softmax_loss(s, target, target_logit); }
}

/* A block takes one row and reads it twice. */
__global__ void __launch_bounds__(CE_LOOP_THREADS)
    crossentropy_looped_kernel(float* losses, floatX* logits, const int32_t* targets, float dloss, const float* loss_scale,
                               int V, size_t pitch) {
    constexpr int W = VECTOR<floatX>;
    __shared__ SoftmaxSum shared[32];
    floatX* row = logits + blockIdx.x * pitch;
    const int own = threadIdx.x * W, stride = (int)blockDim.x * W, round = CE_UNROLL * stride, full = V / W * W;
    const int target = targets[blockIdx.x];
    const float target_logit = load_target(row, target), tail = load_tail<W>(row, threadIdx.x, V);
    SoftmaxSum s = softmax_of_none();
    softmax_add(s, tail);
    for (int start = 0; start < full; start += round) {
        Logits x[CE_UNROLL];
#pragma unroll
        for (int k = 0; k < CE_UNROLL; k++) { x[k] = load_logits(row, start + own + k * stride, full); }
        softmax_add(s, x);
    }
    s = softmax_block(s, shared);
    if (threadIdx.x == 0) { losses[blockIdx.x] = softmax_loss(s, target, target_logit); }
    if (loss_scale) { dloss *= *loss_scale; }
    const SoftmaxGradient g = {s.max, gradient_scale(dloss, s, target), dloss, target_logit, target};
    for (int start = full / round * round; start >= 0; start -= round) {
        Logits x[CE_UNROLL];
#pragma unroll
        for (int k = 0; k < CE_UNROLL; k++) { x[k] = load_logits(row, start + own + k * stride, full); }
#pragma unroll
        for (int k = 0; k < CE_UNROLL; k++) { store_dlogits(row, start + own + k * stride, full, x[k], g); }
    }
    store_tail<W>(row, threadIdx.x, V, tail, g);
}

/* CE_STAY vectors that a thread reads at a time: before sm_90, two would take one register too many. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int CE_AT_ONCE = 1;
#else
constexpr int CE_AT_ONCE = 2;
#endif

/* A block takes row after row. CE_VIA vectors of each thread pass through shared memory to registers. So the next row's
 * vectors load while the block works on this row. CE_DIRECT vectors load straight into registers, and CE_STAY into shared
 * memory, where they stay. Both start to load as soon as the gradient of the vectors in their place is written. */
__global__ void __launch_bounds__(CE_ROW_THREADS, 1)
    crossentropy_row_kernel(float* losses, floatX* logits, const int32_t* targets, float dloss, const float* loss_scale,
                            unsigned N, int V, size_t pitch) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    __trap();
#else
    constexpr int W = VECTOR<floatX>, VIA = CE_VIA, HELD = VIA + CE_DIRECT, ALL = HELD + CE_STAY, SLOTS = VIA + CE_STAY;
    constexpr int STRIDE = 32 * W;  // a warp has ALL * 32 neighboring vectors
    __shared__ SoftmaxSum shared[2][32];
    __shared__ float tails[W];  // each thread's own element: saves a register
    extern __shared__ __align__(16) char dynamic[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = (warp * 32 * ALL + lane) * W, left = V / W * W - first;  // vector k exists if k * STRIDE < left
    Logits* const slots = (Logits*)dynamic + warp * 32 * SLOTS + lane;         // this thread's own: slots[32 i]
    auto slot_of = [&](int k) { return slots + (k < VIA ? k : k - CE_DIRECT) * 32; };
    auto start_copy = [&](const floatX* own, int k, int end) {
        if (k * STRIDE < end) { copy_async<16>(shared_address(slot_of(k)), own + k * STRIDE, true); }
    };
    auto copied = [&](int k) { return k * STRIDE < left ? *slot_of(k) : no_logits(); };
    floatX* own = logits + blockIdx.x * pitch + first;  // there is a row for every block
    Logits x[HELD];
    // each row makes two groups of copies: when at most one group is pending, the older one has arrived
#pragma unroll
    for (int k = 0; k < VIA; k++) { start_copy(own, k, left); }
    copy_async_commit();
#pragma unroll
    for (int k = VIA; k < HELD; k++) { x[k] = load_logits(own, k * STRIDE, left); }
#pragma unroll
    for (int k = HELD; k < ALL; k++) { start_copy(own, k, left); }
    copy_async_commit();
    if (loss_scale) { dloss *= *loss_scale; }
    int turn = 0;
    for (unsigned n = blockIdx.x; n < N; n += gridDim.x) {
        const floatX* const next = own + gridDim.x * pitch;
        const int next_left = n + gridDim.x < N ? left : 0, target = targets[n];
        const float target_logit = load_target(logits + n * pitch, target);  // before anyone overwrites it
        const float tail = load_tail<W>(logits + n * pitch, threadIdx.x, V);
        copy_async_wait<1>();
#pragma unroll
        for (int k = 0; k < VIA; k++) {
            x[k] = copied(k);
            start_copy(next, k, next_left);
        }
        copy_async_commit();
        SoftmaxSum s = softmax_of_none();
        softmax_add(s, x);
        copy_async_wait<1>();
#pragma unroll
        for (int k = HELD; k < ALL; k += CE_AT_ONCE) {
            Logits y[CE_AT_ONCE];
#pragma unroll
            for (int i = 0; i < CE_AT_ONCE; i++) { y[i] = k + i < ALL ? copied(k + i) : no_logits(); }
            softmax_add(s, y);
        }
        softmax_add(s, tail);  // last, because this load started late
        if (threadIdx.x < W) { tails[threadIdx.x] = tail; }
        s = softmax_block(s, shared[turn]);
        turn ^= 1;
        if (threadIdx.x == 0) { losses[n] = softmax_loss(s, target, target_logit); }
        const SoftmaxGradient g = {s.max, gradient_scale(dloss, s, target), dloss, target_logit, target - first};
#pragma unroll
        for (int k = HELD; k < ALL; k++) {
            store_dlogits(own, k * STRIDE, left, copied(k), g);
            start_copy(next, k, next_left);
        }
        copy_async_commit();
#pragma unroll
        for (int k = HELD - 1; k >= 0; k--) {
            store_dlogits(own, k * STRIDE, left, x[k], g);
            if (k >= VIA) { x[k] = load_logits(next, k * STRIDE, next_left); }
        }
        if (threadIdx.x < W) {
            const SoftmaxGradient of_row = {g.max, g.scale, dloss, target_logit, target};
            store_tail<W>(own - first, threadIdx.x, V, tails[threadIdx.x], of_row);
        }
        own += gridDim.x * pitch;
    }
    copy_async_wait<0>();
#endif
}

/* Computes losses only: CE_UNROLL vectors of a row at a time, while the next ones load (after the last vectors of a row, the
 * first ones of the next row). The launch bounds allow 64 registers a thread. */
__global__ void __launch_bounds__(CE_FORWARD_THREADS, 1024 / CE_FORWARD_THREADS)
    crossentropy_forward_kernel(float* losses, const floatX* logits, const int32_t* targets, unsigned N, int V, size_t pitch) {
    constexpr int W = VECTOR<floatX>;
    __shared__ SoftmaxSum shared[2][32];
    const int own = threadIdx.x * W, stride = (int)blockDim.x * W, round = CE_UNROLL * stride, full = V / W * W;
    const floatX* row = logits + blockIdx.x * pitch;  // there is a row for every block
    Logits next[CE_UNROLL];
#pragma unroll
    for (int k = 0; k < CE_UNROLL; k++) { next[k] = load_logits(row, own + k * stride, full); }
    int turn = 0;
    for (unsigned n = blockIdx.x; n < N; n += gridDim.x) {
        const floatX* const next_row = row + gridDim.x * pitch;
        const int next_full = n + gridDim.x < N ? full : 0;
        const int target = targets[n];
        const float target_logit = load_target(row, target), tail = load_tail<W>(row, threadIdx.x, V);
        SoftmaxSum s = softmax_of_none();
        for (int c = own; c < own + full; c += round) {
            const bool last = c - own + round >= full;
            const floatX* from = last ? next_row : row;
            const int from_c = last ? own : c + round, from_end = last ? next_full : full;
            Logits x[CE_UNROLL];
#pragma unroll
            for (int k = 0; k < CE_UNROLL; k++) {
                x[k] = next[k];
                next[k] = load_logits(from, from_c + k * stride, from_end);
            }
            softmax_add(s, x);
        }
        softmax_add(s, tail);
        s = softmax_block(s, shared[turn]);
        turn ^= 1;
        if (threadIdx.x == 0) { losses[n] = softmax_loss(s, target, target_logit); }
        row = next_row;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// launchers

/* Writes losses (N) from logits (rows, of C = V elements) and targets (N). */
static inline void crossentropy_forward_cuda(float* losses, const floatX* logits, const int32_t* targets, RowShape rows,
                                             cudaStream_t stream) {
    if (rows.N == 0) { return; }
    // take as many threads as have work in every round
    const size_t packs = ceil_div((size_t)rows.C, VECTOR<floatX>), rounds = ceil_div(packs, CE_FORWARD_THREADS * CE_UNROLL);
    const int threads = (int)round_up(ceil_div(packs, rounds * CE_UNROLL), 32);
    const unsigned blocks = (unsigned)size_min(rows.N, blocks_at_once(crossentropy_forward_kernel, threads, 0));
    crossentropy_forward_kernel<<<blocks, threads, 0, stream>>>(losses, logits, targets, (unsigned)rows.N, rows.C, rows.pitch);
    CUDA_CHECK_LAUNCH("crossentropy_forward_kernel");
}

/* How one of the kernels with gradient is launched. */
typedef struct {
    CrossentropyWay way;
    int threads;
    size_t shared, blocks;  // 0 blocks: cannot run (row too long, card or code too old)
} CrossentropyPlan;

static inline KernelSizes crossentropy_sizes(int V) {
    KernelSizes s = {};
    s.width = (size_t)V;
    return s;
}

static inline CrossentropyPlan crossentropy_plan(CrossentropyWay way, size_t N, int V) {
    if (!kernel_takes(CHOOSE_CROSSENTROPY, way, crossentropy_sizes(V))) { return {way, 0, 0, 0}; }
    if (way == CE_HELD) { return {way, (int)round_up(ceil_div(crossentropy_packs((size_t)V), CE_PACKS), 32), 0, N}; }
    if (way == CE_LOOPED) { return {way, CE_LOOP_THREADS, 0, N}; }
    auto* kernel = crossentropy_row_kernel;
    const int threads = (int)crossentropy_row_threads((size_t)V);
    const size_t shared = crossentropy_row_shared((size_t)V);
    CUDA_CHECK(cudaFuncSetAttribute((const void*)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    return {way, threads, shared, size_min(N, blocks_at_once(kernel, threads, shared))};
}

static inline void crossentropy_run(const CrossentropyPlan* p, float* losses, floatX* logits, const int32_t* targets,
                                    float dloss, const float* loss_scale, RowShape rows, cudaStream_t stream) {
    const unsigned blocks = (unsigned)p->blocks;
    const int V = rows.C;
    const size_t pitch = rows.pitch;
    switch (p->way) {
        case CE_HELD:
            crossentropy_held_kernel<<<blocks, p->threads, 0, stream>>>(losses, logits, targets, dloss, loss_scale, V, pitch);
            break;
        case CE_ROW:
            crossentropy_row_kernel<<<blocks, p->threads, p->shared, stream>>>(losses, logits, targets, dloss, loss_scale,
                                                                               (unsigned)rows.N, V, pitch);
            break;
        default:
            crossentropy_looped_kernel<<<blocks, p->threads, 0, stream>>>(losses, logits, targets, dloss, loss_scale, V, pitch);
    }
    CUDA_CHECK_LAUNCH("crossentropy kernel");
}

/* Writes losses (N) and overwrites logits (rows, of C = V elements) with dlogits = (softmax - onehot) * dloss * *loss_scale.
 * targets: (N)   loss_scale: on the device, or NULL for 1 */
static inline void crossentropy_fused_cuda(float* losses, floatX* logits, const int32_t* targets, float dloss,
                                           const float* loss_scale, RowShape rows, cudaStream_t stream) {
    if (rows.N == 0) { return; }
    const CrossentropyWay way = (CrossentropyWay)kernel_row(CHOOSE_CROSSENTROPY, crossentropy_sizes(rows.C))->kernel;
    const CrossentropyPlan plan = crossentropy_plan(way, rows.N, rows.C);
    crossentropy_run(&plan, losses, logits, targets, dloss, loss_scale, rows, stream);
}

#endif
