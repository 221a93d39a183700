/* crossentropy.cuh -- softmax and negative log-likelihood of each row of logits on the GPU, and in the same launch the
 * gradient, written over the logits. The oracle is crossentropy.h.
 *
 *   loss[n] = log(sum_v e^(x[v] - max)) + max - x[target]       dlogit[v] = (softmax(x)[v] - (v == target)) * dloss
 *
 * The maximum and the sum are found together in one pass (Milakov and Gimelshein, "Online normalizer calculation for
 * softmax", 2018). The gradient needs the row a second time. Two kernels behind the launchers:
 *   held     the row stays in registers between the two, CE_PACKS vectors a thread: 1 read and 1 write. A block holds up
 *            to 512 threads' worth (32,768 elements of 16 bits); longer rows are split over a cluster of 2, 4 or 8 blocks
 *            that read each other's maximum and sum through distributed shared memory, where the kernel was compiled for
 *            sm_90 or newer
 *   looped   any V anywhere: reads the row twice, the second time backwards, so that what it read last, still in the L2
 *            cache, comes first
 * The caller has checked that 0 <= target < V. Elements from V to the pitch are neither read nor written.
 */
#ifndef LLMC_CROSSENTROPY_CUH
#define LLMC_CROSSENTROPY_CUH

#include <float.h>
#include "cuda_common.cuh"

enum {
    CE_PACKS = 8,            // vectors of a row in a thread's registers
    CE_THREADS = 512,        // most of a block of the held kernel
    CE_LOOP_THREADS = 1024,  // of a block of the looped kernel
    CE_UNROLL = 4,           // vectors the looped kernel has under way
    CE_MAX_CLUSTER = 8,      // the largest that every sm_90 device takes
};

/* Maximum and sum of e^(x - maximum) over the elements seen so far. Of none the maximum is finite, so that e^(a - b) needs
 * no special case: -inf minus -inf never happens. */
struct SoftmaxSum {
    float max, sum;
};
#define SOFTMAX_OF_NONE (SoftmaxSum{-FLT_MAX, 0.0f})

__device__ __forceinline__ SoftmaxSum softmax_join(SoftmaxSum a, SoftmaxSum b) {
    const float m = fmaxf(a.max, b.max);
    return SoftmaxSum{m, a.sum * exp_x(a.max - m) + b.sum * exp_x(b.max - m)};
}

/* Takes in a vector. A NaN passes fmaxf by but stays in the sum: the loss becomes NaN. */
template <int W>
__device__ __forceinline__ void softmax_add(SoftmaxSum& s, const Vec<floatX, W>& x) {
    float m = s.max, sum = 0;
#pragma unroll
    for (int i = 0; i < W; i++) { m = fmaxf(m, to_float(x.v[i])); }
#pragma unroll
    for (int i = 0; i < W; i++) { sum += exp_x(to_float(x.v[i]) - m); }
    s.sum = s.sum * exp_x(s.max - m) + sum;
    s.max = m;
}

/* Joins all threads of a block, in every thread. shared: 32 values. */
__device__ __forceinline__ SoftmaxSum softmax_block(SoftmaxSum s, SoftmaxSum* shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float m = warp_max(s.max);
    s.sum = warp_sum(s.sum * exp_x(s.max - m));
    if (lane == 0) { shared[warp] = SoftmaxSum{m, s.sum}; }
    __syncthreads();
    s = lane < (int)blockDim.x / 32 ? shared[lane] : SOFTMAX_OF_NONE;
    const float all = warp_max(s.max);
    return SoftmaxSum{all, warp_sum(s.sum * exp_x(s.max - all))};
}

/* A vector as it lies in four registers. Kept like this between its uses: the compiler would otherwise spread 16-bit elements
 * over a register each. */
typedef uint4 Packed;

__device__ __forceinline__ Pack<floatX> unpack(const Packed& p) {
    union {
        Packed bits;
        Pack<floatX> vec;
    } u = {p};
    return u.vec;
}

/* Vectors of a row end at `full`, the largest multiple of a vector's length in V. One from there on is all -inf, whose e^x
 * is 0. */
__device__ __forceinline__ Packed load_logits(const floatX* row, int c, int full) {
#if defined(PRECISION_FP32)
    const unsigned none = 0xff800000u;
#elif defined(PRECISION_BF16)
    const unsigned none = 0xff80ff80u;
#else
    const unsigned none = 0xfc00fc00u;
#endif
    return c < full ? __ldcs((const Packed*)(row + c)) : make_uint4(none, none, none, none);
}

/* The V % W elements behind the vectors are the first threads' of a row, one each. */
template <int W>
__device__ __forceinline__ float load_tail(const floatX* row, int thread, int V) {
    const int c = V / W * W + thread;
    return c < V ? to_float(row[c]) : -INFINITY;
}

/* Makes the compiler forget what it knows of a vector. Otherwise it would keep each element's conversion to fp32 from the
 * first use to the second, in twice the registers. */
__device__ __forceinline__ void forget(Packed& p) { asm volatile("" : "+r"(p.x), "+r"(p.y), "+r"(p.z), "+r"(p.w)); }

/* What turns a row's logits into gradients. */
struct SoftmaxGradient {
    float max, scale, dloss;  // scale = dloss / sum
    float target_logit;
    int target;
};

/* dlogits of the vector at c. The target's own element is put right behind the store, by the same thread. */
template <int W>
__device__ __forceinline__ void store_dlogits(floatX* row, int c, int full, const Packed& packed, const SoftmaxGradient& g) {
    if (c >= full) { return; }
    Vec<floatX, W> x = unpack(packed);
#pragma unroll
    for (int i = 0; i < W; i++) { x.v[i] = from_float<floatX>(exp_x(to_float(x.v[i]) - g.max) * g.scale); }
    store_stream(row + c, x);
    if ((unsigned)(g.target - c) < W) { row[g.target] = from_float<floatX>(exp_x(g.target_logit - g.max) * g.scale - g.dloss); }
}

template <int W>
__device__ __forceinline__ void store_tail(floatX* row, int thread, int V, float x, const SoftmaxGradient& g) {
    const int c = V / W * W + thread;
    if (c < V) { row[c] = from_float<floatX>(exp_x(x - g.max) * g.scale - (c == g.target ? g.dloss : 0.0f)); }
}

// ---------------------------------------------------------------------------------------------------------------------
// clusters (sm_90): blocks that run at one time and see each other's shared memory

__device__ __forceinline__ void cluster_barrier() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
#else
    __trap();
#endif
}

/* A SoftmaxSum in the shared memory of another block of the cluster, at the address it has in this one. */
__device__ __forceinline__ SoftmaxSum cluster_load(const SoftmaxSum* own, int rank) {
    SoftmaxSum s = {0.0f, 0.0f};
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t address = (uint32_t)__cvta_generic_to_shared(own);
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(s.max), "=f"(s.sum) : "r"(address) : "memory");
#else
    (void)own, (void)rank;
    __trap();
#endif
    return s;
}

/* A row a cluster of `ranks` blocks (CLUSTER) or a block. GRADIENT: logits become dlogits. */
template <bool CLUSTER, bool GRADIENT>
__global__ void __launch_bounds__(CE_THREADS, 2)
    crossentropy_held_kernel(float* losses, floatX* logits, const int32_t* targets, float dloss, const float* loss_scale, int V,
                             size_t pitch, int ranks) {
    constexpr int W = VECTOR<floatX>;
    __shared__ SoftmaxSum shared[32];
    __shared__ __align__(8) SoftmaxSum block_result;
    const int rank = CLUSTER ? blockIdx.x % ranks : 0;  // clusters are `ranks` neighbours along x
    const size_t n = CLUSTER ? blockIdx.x / ranks : blockIdx.x;
    floatX* row = logits + n * pitch;
    const int first = (rank * CE_PACKS * (int)blockDim.x + (int)threadIdx.x) * W, stride = (int)blockDim.x * W;
    const int full = V / W * W, tail_thread = rank * (int)blockDim.x + (int)threadIdx.x;
    Packed x[CE_PACKS];
#pragma unroll
    for (int k = 0; k < CE_PACKS; k++) { x[k] = load_logits(row, first + k * stride, full); }
    const float tail = load_tail<W>(row, tail_thread, V);
    const int target = targets[n];
    const float target_logit = to_float(row[target]);  // before anyone overwrites it
    SoftmaxSum s = softmax_join(SoftmaxSum{tail, 1.0f}, SOFTMAX_OF_NONE);
#pragma unroll
    for (int k = 0; k < CE_PACKS; k++) {
        softmax_add(s, unpack(x[k]));
        forget(x[k]);
    }
    s = softmax_block(s, shared);
    if constexpr (CLUSTER) {
        if (threadIdx.x == 0) { block_result = s; }
        cluster_barrier();
        s = cluster_load(&block_result, 0);
#pragma unroll 1
        for (int r = 1; r < ranks; r++) { s = softmax_join(s, cluster_load(&block_result, r)); }
        cluster_barrier();  // no block may end while others read from it
    }
    if (tail_thread == 0) { losses[n] = logf(s.sum) + s.max - target_logit; }
    if constexpr (GRADIENT) {
        if (loss_scale) { dloss *= *loss_scale; }
        const SoftmaxGradient g = {s.max, dloss / s.sum, dloss, target_logit, target};
#pragma unroll
        for (int k = 0; k < CE_PACKS; k++) { store_dlogits<W>(row, first + k * stride, full, x[k], g); }
        store_tail<W>(row, tail_thread, V, tail, g);
    }
}

/* A row a block, read twice. */
template <bool GRADIENT>
__global__ void __launch_bounds__(CE_LOOP_THREADS)
    crossentropy_looped_kernel(float* losses, floatX* logits, const int32_t* targets, float dloss, const float* loss_scale,
                               int V, size_t pitch) {
    constexpr int W = VECTOR<floatX>;
    __shared__ SoftmaxSum shared[32];
    const size_t n = blockIdx.x;
    floatX* row = logits + n * pitch;
    const int own = threadIdx.x * W, stride = (int)blockDim.x * W, round = CE_UNROLL * stride, full = V / W * W;
    const int target = targets[n];
    const float target_logit = to_float(row[target]), tail = load_tail<W>(row, threadIdx.x, V);
    SoftmaxSum s = softmax_join(SoftmaxSum{tail, 1.0f}, SOFTMAX_OF_NONE);
    for (int start = 0; start < full; start += round) {
        Packed x[CE_UNROLL];
#pragma unroll
        for (int k = 0; k < CE_UNROLL; k++) { x[k] = load_logits(row, start + own + k * stride, full); }
#pragma unroll
        for (int k = 0; k < CE_UNROLL; k++) { softmax_add(s, unpack(x[k])); }
    }
    s = softmax_block(s, shared);
    if (threadIdx.x == 0) { losses[n] = logf(s.sum) + s.max - target_logit; }
    if constexpr (GRADIENT) {
        if (loss_scale) { dloss *= *loss_scale; }
        const SoftmaxGradient g = {s.max, dloss / s.sum, dloss, target_logit, target};
        for (int start = full / round * round; start >= 0; start -= round) {
            Packed x[CE_UNROLL];
#pragma unroll
            for (int k = 0; k < CE_UNROLL; k++) { x[k] = load_logits(row, start + own + k * stride, full); }
#pragma unroll
            for (int k = 0; k < CE_UNROLL; k++) { store_dlogits<W>(row, start + own + k * stride, full, x[k], g); }
        }
        store_tail<W>(row, threadIdx.x, V, tail, g);
    }
}

template <bool GRADIENT>
static void crossentropy_launch(float* losses, floatX* logits, const int32_t* targets, float dloss, const float* loss_scale,
                                size_t N, int V, size_t pitch, cudaStream_t stream) {
    if (N == 0) { return; }
    const size_t per_thread = CE_PACKS * VECTOR<floatX>;
    const int threads = (int)size_min(CE_THREADS, round_up(ceil_div((size_t)V, per_thread), 32));
    int ranks = 1;
    while ((size_t)ranks * threads * per_thread < (size_t)V) { ranks *= 2; }
    if (ranks == 1) {
        crossentropy_held_kernel<false, GRADIENT>
            <<<(unsigned)N, threads, 0, stream>>>(losses, logits, targets, dloss, loss_scale, V, pitch, ranks);
        CUDA_CHECK_LAUNCH("crossentropy_held_kernel");
    } else if (ranks <= CE_MAX_CLUSTER && compiled_arch(crossentropy_held_kernel<true, GRADIENT>) >= 90) {
        cudaLaunchAttribute cluster;
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim.x = (unsigned)ranks;
        cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
        cudaLaunchConfig_t launch = {};
        launch.gridDim = dim3((unsigned)(N * ranks));
        launch.blockDim = dim3((unsigned)threads);
        launch.stream = stream;
        launch.attrs = &cluster;
        launch.numAttrs = 1;
        CUDA_CHECK(cudaLaunchKernelEx(&launch, crossentropy_held_kernel<true, GRADIENT>, losses, logits, targets, dloss,
                                      loss_scale, V, pitch, ranks));
    } else {
        crossentropy_looped_kernel<GRADIENT>
            <<<(unsigned)N, CE_LOOP_THREADS, 0, stream>>>(losses, logits, targets, dloss, loss_scale, V, pitch);
        CUDA_CHECK_LAUNCH("crossentropy_looped_kernel");
    }
}

/* losses: (N)   logits: (N, V), pitch, unchanged   targets: (N) */
static inline void crossentropy_forward_cuda(float* losses, const floatX* logits, const int32_t* targets, size_t N, int V,
                                             size_t pitch, cudaStream_t stream) {
    crossentropy_launch<false>(losses, (floatX*)logits, targets, 0.0f, NULL, N, V, pitch, stream);
}

/* losses: (N)   logits: (N, V), pitch; in: logits, out: dlogits = (softmax - onehot) * dloss * *loss_scale
 * targets: (N)   loss_scale: on the device, or NULL for 1 */
static inline void crossentropy_fused_cuda(float* losses, floatX* logits, const int32_t* targets, float dloss,
                                           const float* loss_scale, size_t N, int V, size_t pitch, cudaStream_t stream) {
    crossentropy_launch<true>(losses, logits, targets, dloss, loss_scale, N, V, pitch, stream);
}

#endif
