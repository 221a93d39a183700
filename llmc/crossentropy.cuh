/* crossentropy.cuh -- softmax and negative log-likelihood of each row of logits on the GPU, and in the same launch the
 * gradient, written over the logits. The oracle is crossentropy.h.
 *
 *   loss[n] = log(sum_v e^(x[v] - max)) + max - x[target]       dlogit[v] = (softmax(x)[v] - (v == target)) * dloss
 *
 * Behind the launchers are the first two of these, the others are callable by their plans:
 *   held     the row stays in registers, CE_PACKS vectors a thread, between finding its maximum and sum and writing the
 *            gradient: 1 read and 1 write. A block holds up to 32,768 elements of 16 bits; longer rows are split over a
 *            cluster of 2, 4 or 8 blocks that read each other's maximum and sum through distributed shared memory, where
 *            the kernel was compiled for sm_90 or newer. One wave of blocks goes over all rows; while a row is worked on
 *            (two exponentials an element, and barriers), the next is on its way to shared memory (cp.async), each
 *            thread's own part, so that memory is never idle.
 *   looped   any V anywhere: reads the row twice, the second time backwards, so that what it read last, still in the L2
 *            cache, comes first. Maximum and sum are found together (Milakov and Gimelshein, "Online normalizer
 *            calculation for softmax", 2018).
 *   row      a row a block, up to 131,072 elements of 16 bits: what registers do not hold stays in shared memory.
 *   stream   any V: a row's gradient is written while the next one's maximum and sum are found; without gradient it only reads.
 * 16-bit builds compute 2^(x log2(e) - max log2(e)): one multiply-add and the hardware's 2^x.
 * The caller has checked that 0 <= target < V. Elements from V to the pitch are neither read nor written.
 */
#ifndef LLMC_CROSSENTROPY_CUH
#define LLMC_CROSSENTROPY_CUH

#include "cuda_common.cuh"
#include "ptx.cuh"

enum {
    CE_PACKS = 8,            // vectors of a row in a thread's registers
    CE_STAGES = 1,           // rows on their way to shared memory while one is worked on
    CE_BLOCK_PACKS = 4096,   // vectors that a block of the held kernel has in registers, at most
    CE_LOOP_THREADS = 1024,  // of a block of the looped kernel
    CE_UNROLL = 4,           // vectors the looped kernel has under way
    CE_MAX_CLUSTER = 8,      // the largest that every sm_90 device takes
};

/* Exponents are counted in units of 1 / SOFTMAX_UNIT: natural in FP32 builds, else base 2. */
#ifdef PRECISION_FP32
#define SOFTMAX_UNIT 1.0f
__device__ __forceinline__ float softmax_power(float x) { return expf(x); }
#else
#define SOFTMAX_UNIT 1.4426950409f
__device__ __forceinline__ float softmax_power(float x) { return exp2_fast(x); }
#endif

/* Sum of e^(x - maximum) over the elements seen so far, and their maximum in SOFTMAX_UNITs. */
struct SoftmaxSum {
    float max, sum;
};
/* The lowest maximum. Finite, so that -inf minus -inf never happens, also behind the unit. */
#define SOFTMAX_LOWEST (-1e38f)
#define SOFTMAX_OF_NONE (SoftmaxSum{SOFTMAX_LOWEST, 0.0f})

__device__ __forceinline__ float softmax_max(float logit) { return fmaxf(logit * SOFTMAX_UNIT, SOFTMAX_LOWEST); }

/* e^(x - max) */
__device__ __forceinline__ float softmax_term(float x, float max) { return softmax_power(fmaf(x, SOFTMAX_UNIT, -max)); }

__device__ __forceinline__ SoftmaxSum softmax_join(SoftmaxSum a, SoftmaxSum b) {
    const float m = fmaxf(a.max, b.max);
    return SoftmaxSum{m, a.sum * softmax_power(a.max - m) + b.sum * softmax_power(b.max - m)};
}

/* In double: log(sum) can be far smaller than both others. */
__device__ __forceinline__ float softmax_loss(SoftmaxSum s, float target_logit) {
    return (float)((double)s.max * (1 / (double)SOFTMAX_UNIT) - (double)target_logit) + logf(s.sum);
}

/* Joins all threads of a block, in every thread. shared: 32 values, free for others after the next __syncthreads(). */
__device__ __forceinline__ SoftmaxSum softmax_block(SoftmaxSum s, SoftmaxSum* shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float m = warp_max(s.max);
    s.sum = warp_sum(s.sum * softmax_power(s.max - m));
    if (lane == 0) { shared[warp] = SoftmaxSum{m, s.sum}; }
    __syncthreads();
    s = lane < (int)blockDim.x / 32 ? shared[lane] : SOFTMAX_OF_NONE;
    const float all = warp_max(s.max);
    return SoftmaxSum{all, warp_sum(s.sum * softmax_power(s.max - all))};
}

typedef Held<floatX, VECTOR<floatX>> Logits;  // of one vector

/* The larger of each two elements, of which a NaN is none. */
__device__ __forceinline__ uint32_t max_word(uint32_t a, uint32_t b) {
#if defined(PRECISION_FP32)
    return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
#elif defined(PRECISION_BF16)
    union {
        uint32_t bits;
        __nv_bfloat162 pair;
    } x = {a}, y = {b};
    x.pair = __hmax2(x.pair, y.pair);
    return x.bits;
#else
    union {
        uint32_t bits;
        __half2 pair;
    } x = {a}, y = {b};
    x.pair = __hmax2(x.pair, y.pair);
    return x.bits;
#endif
}

/* The maximum of K vectors and `rest`. */
template <int K>
__device__ __forceinline__ float largest_logit(Logits (&x)[K], float rest) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800  // which has no instruction for pairs
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

/* The sum of e^(x - max) over K vectors, in two running sums a vector. Keeps x as it is in memory. */
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

/* s and K vectors more. */
template <int K>
__device__ __forceinline__ void softmax_add(SoftmaxSum& s, Logits (&x)[K]) {
    const float m = fmaxf(s.max, softmax_max(largest_logit(x, -INFINITY)));
    s.sum = s.sum * softmax_power(s.max - m) + sum_of_terms(x, m);
    s.max = m;
}

__device__ __forceinline__ void softmax_add(SoftmaxSum& s, float logit) {
    const float m = fmaxf(s.max, softmax_max(logit));
    s.sum = s.sum * softmax_power(s.max - m) + softmax_term(logit, m);
    s.max = m;
}

/* Vectors of a row end at `full`, the largest multiple of a vector's length in V. One from there on is all -inf, whose e^x
 * is 0. */
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

/* The V % W elements behind the vectors are the first threads' of a row, one each. */
template <int W>
__device__ __forceinline__ float load_tail(const floatX* row, int thread, int V) {
    const int c = V / W * W + thread;
    return c < V ? to_float(row[c]) : -INFINITY;
}

/* What turns a row's logits into gradients. */
struct SoftmaxGradient {
    float max, scale, dloss;  // scale = dloss / sum
    float target_logit;
    int target;
};

/* dlogits of the vector at c. The target's own element is put right behind the store, by the same thread. */
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

/* Blocks of the held kernel that an SM must have room for: 64 registers a thread, more before sm_80, which wants them. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define CE_BLOCKS(packs) 1
#else
#define CE_BLOCKS(packs) ((packs) / 4)
#endif

/* Rows in turns, each by a cluster of `ranks` blocks (CLUSTER) or a block. GRADIENT: logits become dlogits. STAGES 0: there
 * are as many blocks as rows need, and rows come straight into registers. */
template <int PACKS, int STAGES, bool CLUSTER, bool GRADIENT>
__global__ void __launch_bounds__(CE_BLOCK_PACKS / PACKS, CE_BLOCKS(PACKS))
    crossentropy_held_kernel(float* losses, floatX* logits, const int32_t* targets, float dloss, const float* loss_scale,
                             unsigned N, int V, size_t pitch, int ranks) {
    constexpr int W = VECTOR<floatX>;
    __shared__ SoftmaxSum shared[2][32];
    __shared__ __align__(8) SoftmaxSum block_result[2];
    extern __shared__ __align__(16) char dynamic[];
    const int rank = CLUSTER ? blockIdx.x % ranks : 0;  // clusters are `ranks` neighbours along x
    const unsigned step = CLUSTER ? gridDim.x / ranks : gridDim.x;
    // a warp has PACKS * 32 neighbouring vectors: distances that the compiler knows
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, threads = (int)blockDim.x;
    const int first = (rank * threads * PACKS + warp * 32 * PACKS + lane) * W, stride = 32 * W;
    const int full = V / W * W, tail_thread = rank * threads + (int)threadIdx.x;
    Logits* const slots = (Logits*)dynamic + warp * 32 * PACKS + lane;  // this thread's own; slots[32 k] in stage 0
    auto start_copies = [&](unsigned row, int stage) {
        const int end = row < N ? full : 0;
        const floatX* from = logits + row * pitch + first;
        const uint32_t to = shared_address(slots + stage * PACKS * threads);
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            const bool valid = first + k * stride < end;
            copy_async<16>(to + k * 32 * (int)sizeof(Logits), valid ? from + k * stride : logits, valid);
        }
        copy_async_commit();
    };
    unsigned n = CLUSTER ? blockIdx.x / ranks : blockIdx.x;
    if constexpr (STAGES > 0) {
#pragma unroll
        for (int s = 0; s < STAGES; s++) { start_copies(n + s * step, s); }
    }
    if (GRADIENT && loss_scale) { dloss *= *loss_scale; }
    int next_target = n < N ? targets[n] : 0, stage = 0, turn = 0;
    for (; n < N; n += step) {
        floatX* row = logits + n * pitch;
        const int target = next_target;
        next_target = n + step < N ? targets[n + step] : 0;
        const float target_logit = to_float(row[target]);  // before anyone overwrites it
        const float tail = load_tail<W>(row, tail_thread, V);
        Logits x[PACKS];
        if constexpr (STAGES > 0) {
            copy_async_wait<STAGES - 1>();
#pragma unroll
            for (int k = 0; k < PACKS; k++) {
                x[k] = first + k * stride < full ? slots[stage * PACKS * threads + k * 32] : no_logits();
            }
            start_copies(n + STAGES * step, stage);
            stage = (stage + 1) % STAGES;
        } else {
#pragma unroll
            for (int k = 0; k < PACKS; k++) { x[k] = load_logits(row, first + k * stride, full); }
        }
        SoftmaxSum s;
        s.max = softmax_max(largest_logit(x, tail));
        s.sum = sum_of_terms(x, s.max) + softmax_term(tail, s.max);
        s = softmax_block(s, shared[turn]);
        if constexpr (CLUSTER) {
            if (threadIdx.x == 0) { block_result[turn] = s; }
            cluster_barrier();
            s = cluster_load(&block_result[turn], 0);
#pragma unroll 1
            for (int r = 1; r < ranks; r++) { s = softmax_join(s, cluster_load(&block_result[turn], r)); }
        }
        turn ^= 1;
        if constexpr (GRADIENT) {
            const SoftmaxGradient g = {s.max, dloss / s.sum, dloss, target_logit, target};
#pragma unroll
            for (int k = 0; k < PACKS; k++) { store_dlogits(row, first + k * stride, full, x[k], g); }
            store_tail<W>(row, tail_thread, V, tail, g);
        }
        if (tail_thread == 0) { losses[n] = softmax_loss(s, target_logit); }
        if constexpr (STAGES == 0) { break; }
    }
    if constexpr (CLUSTER) { cluster_barrier(); }  // no block may end while others read from it
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
    SoftmaxSum s = {softmax_max(tail), 0};
    s.sum = softmax_term(tail, s.max);
    for (int start = 0; start < full; start += round) {
        Logits x[CE_UNROLL];
#pragma unroll
        for (int k = 0; k < CE_UNROLL; k++) { x[k] = load_logits(row, start + own + k * stride, full); }
        softmax_add(s, x);
    }
    s = softmax_block(s, shared);
    if (threadIdx.x == 0) { losses[n] = softmax_loss(s, target_logit); }
    if constexpr (GRADIENT) {
        if (loss_scale) { dloss *= *loss_scale; }
        const SoftmaxGradient g = {s.max, dloss / s.sum, dloss, target_logit, target};
        for (int start = full / round * round; start >= 0; start -= round) {
            Logits x[CE_UNROLL];
#pragma unroll
            for (int k = 0; k < CE_UNROLL; k++) { x[k] = load_logits(row, start + own + k * stride, full); }
#pragma unroll
            for (int k = 0; k < CE_UNROLL; k++) { store_dlogits(row, start + own + k * stride, full, x[k], g); }
        }
        store_tail<W>(row, threadIdx.x, V, tail, g);
    }
}

template <bool GRADIENT>
static void crossentropy_looped(float* losses, floatX* logits, const int32_t* targets, float dloss, const float* loss_scale,
                                size_t N, int V, size_t pitch, cudaStream_t stream) {
    crossentropy_looped_kernel<GRADIENT>
        <<<(unsigned)N, CE_LOOP_THREADS, 0, stream>>>(losses, logits, targets, dloss, loss_scale, V, pitch);
    CUDA_CHECK_LAUNCH("crossentropy_looped_kernel");
}

/* The held kernel by PACKS and STAGES; false where it does not go: too long a row, too old a card or machine code. */
template <int PACKS, int STAGES, bool CLUSTER, bool GRADIENT>
static bool crossentropy_held(float* losses, floatX* logits, const int32_t* targets, float dloss, const float* loss_scale,
                              size_t N, int V, size_t pitch, int ranks, cudaStream_t stream) {
    auto kernel = crossentropy_held_kernel<PACKS, STAGES, CLUSTER, GRADIENT>;
    const int arch = compiled_arch(kernel), sms = device_attribute(cudaDevAttrMultiProcessorCount);
    const size_t packs = ceil_div((size_t)V, VECTOR<floatX>);
    const int threads = (int)round_up(ceil_div(packs, (size_t)PACKS * ranks), 32);
    const size_t slots = (size_t)STAGES * PACKS * threads * sizeof(Logits);
    if (CLUSTER && arch < 90) { return false; }
    if (STAGES > 0 && (arch < 80 || slots + 2048 > (size_t)device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin))) {
        return false;
    }
    cudaLaunchConfig_t launch = {};
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = (unsigned)ranks;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    launch.gridDim = dim3((unsigned)(N * ranks));
    launch.blockDim = dim3((unsigned)threads);
    launch.dynamicSmemBytes = slots;
    launch.stream = stream;
    launch.attrs = &cluster;
    launch.numAttrs = CLUSTER;
    if (STAGES > 0) {  // one wave
        int at_once = 0;
        CUDA_CHECK(cudaFuncSetAttribute((const void*)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)slots));
        if (CLUSTER) {
            CUDA_CHECK(cudaOccupancyMaxActiveClusters(&at_once, (const void*)kernel, &launch));
        } else {
            CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&at_once, kernel, threads, slots));
            at_once *= sms;
        }
        if (at_once == 0) { return false; }
        launch.gridDim.x = (unsigned)(size_min(N, (size_t)at_once) * ranks);
    }
    CUDA_CHECK(cudaLaunchKernelEx(&launch, kernel, losses, logits, targets, dloss, loss_scale, (unsigned)N, V, pitch, ranks));
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// rows of one block, in turns

/* Staying vectors that a thread looks at together: before sm_90 there is one register too few. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define ROW_AT_ONCE 1
#else
#define ROW_AT_ONCE 2
#endif

/* Each thread has VIA + DIRECT + STAY vectors of a row. VIA of them pass through shared memory to registers, so that the next row's
 * are under way while this one is worked on; DIRECT come straight into registers and STAY into shared memory, where they stay, both
 * as soon as the gradient of those before them is written. */
template <int VIA, int DIRECT, int STAY, int THREADS>
__global__ void __launch_bounds__(THREADS, 1)
    crossentropy_row_kernel(float* losses, floatX* logits, const int32_t* targets, float dloss, const float* loss_scale,
                            unsigned N, int V, size_t pitch) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    __trap();
#else
    constexpr int W = VECTOR<floatX>, HELD = VIA + DIRECT, ALL = HELD + STAY, SLOTS = VIA + STAY;
    constexpr int AT_ONCE = ROW_AT_ONCE;
    constexpr int STRIDE = 32 * W;  // a warp has ALL * 32 neighbouring vectors
    __shared__ SoftmaxSum shared[2][32];
    __shared__ float tails[W];  // each thread's own: a register less
    extern __shared__ __align__(16) char dynamic[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = (warp * 32 * ALL + lane) * W, left = V / W * W - first;  // vector k is there where k * STRIDE < left
    Logits* const slots = (Logits*)dynamic + warp * 32 * SLOTS + lane;         // this thread's own: slots[32 i]
    auto slot_of = [&](int k) { return slots + (k < VIA ? k : k - DIRECT) * 32; };
    auto start_copy = [&](const floatX* own, int k, int end) {
        if (k * STRIDE < end) { copy_async<16>(shared_address(slot_of(k)), own + k * STRIDE, true); }
    };
    auto copied = [&](int k) { return k * STRIDE < left ? *slot_of(k) : no_logits(); };
    floatX* own = logits + blockIdx.x * pitch + first;  // there is a row for every block
    Logits x[HELD];
    // two groups of copies a row, in turns: when at most one is under way, the older has arrived
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
        const float target_logit = to_float(logits[n * pitch + target]);  // before anyone overwrites it
        const float tail = load_tail<W>(logits + n * pitch, threadIdx.x, V);
        copy_async_wait<1>();
#pragma unroll
        for (int k = 0; k < VIA; k++) {
            x[k] = copied(k);
            start_copy(next, k, next_left);
        }
        copy_async_commit();
        SoftmaxSum s = SOFTMAX_OF_NONE;
        softmax_add(s, x);
        copy_async_wait<1>();
#pragma unroll
        for (int k = HELD; k < ALL; k += AT_ONCE) {
            Logits y[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) { y[i] = k + i < ALL ? copied(k + i) : no_logits(); }
            softmax_add(s, y);
        }
        softmax_add(s, tail);  // last: nobody started this load early
        if (threadIdx.x < W) { tails[threadIdx.x] = tail; }
        s = softmax_block(s, shared[turn]);
        turn ^= 1;
        if (threadIdx.x == 0) { losses[n] = softmax_loss(s, target_logit); }
        const SoftmaxGradient g = {s.max, dloss / s.sum, dloss, target_logit, target - first};
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

/* A vector that will be read again before long: other data leaves the L2 cache first. */
__device__ __forceinline__ Logits load_and_keep(const floatX* p) {
    Logits x;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile(
        "{.reg .b64 keep; createpolicy.fractional.L2::evict_last.b64 keep, 1.0;\n"
        "ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], keep;}"
        : "=r"(x.bits.x), "=r"(x.bits.y), "=r"(x.bits.z), "=r"(x.bits.w)
        : "l"(p));
#else
    x = hold<VECTOR<floatX>>(p);
#endif
    return x;
}

/* Any V: UNROLL vectors of a row at a time, the next ones under way. While a row's maximum and sum are found, the gradient of the
 * row before it is written in the same loop, its logits read again from the L2 cache. KEEP: ask the cache to keep them. */
template <int UNROLL, bool KEEP, bool GRADIENT>
__global__ void __launch_bounds__(CE_LOOP_THREADS, 1)
    crossentropy_stream_kernel(float* losses, floatX* logits, const int32_t* targets, float dloss, const float* loss_scale,
                               unsigned N, int V, size_t pitch) {
    constexpr int W = VECTOR<floatX>;
    __shared__ SoftmaxSum shared[2][32];
    const int own = threadIdx.x * W, stride = (int)blockDim.x * W, round = UNROLL * stride, full = V / W * W;
    auto load_first = [&](const floatX* row, int c, int end) {
        if constexpr (!GRADIENT) { return load_logits(row, c, end); }
        if (c >= end) { return no_logits(); }
        return KEEP ? load_and_keep(row + c) : hold<W>(row + c);
    };
    if (GRADIENT && loss_scale) { dloss *= *loss_scale; }
    floatX* before = NULL;  // the row whose gradient is written
    SoftmaxGradient g = {};
    float tail_before = 0;
    floatX* row = logits + blockIdx.x * pitch;  // there is a row for every block
    Logits next[UNROLL];
#pragma unroll
    for (int k = 0; k < UNROLL; k++) { next[k] = load_first(row, own + k * stride, full); }
    int turn = 0;
    for (unsigned n = blockIdx.x; n < N || before; n += gridDim.x) {  // a last time without a row of its own
        const bool more = n < N;
        const int end = more ? full : 0, next_end = n + gridDim.x < N ? full : 0, target = more ? targets[n] : 0;
        const float target_logit = more ? to_float(row[target]) : 0.0f;
        const float tail = more ? load_tail<W>(row, threadIdx.x, V) : 0.0f;
        SoftmaxSum s = SOFTMAX_OF_NONE;
        for (int c = own; c < own + full; c += round) {
            const bool wraps = c - own + round >= full;
            const floatX* from = wraps ? row + gridDim.x * pitch : row;
            const int from_c = wraps ? own : c + round, from_end = wraps ? next_end : end;
            Logits x[UNROLL], y[UNROLL];
#pragma unroll
            for (int k = 0; k < UNROLL; k++) {
                x[k] = next[k];
                next[k] = load_first(from, from_c + k * stride, from_end);
            }
            if constexpr (GRADIENT) {
#pragma unroll
                for (int k = 0; k < UNROLL; k++) { y[k] = load_logits(before, c + k * stride, before ? full : 0); }
            }
            softmax_add(s, x);
            if constexpr (GRADIENT) {
#pragma unroll
                for (int k = 0; k < UNROLL; k++) { store_dlogits(before, c + k * stride, before ? full : 0, y[k], g); }
            }
        }
        if (GRADIENT && before) { store_tail<W>(before, threadIdx.x, V, tail_before, g); }
        if (!more) { break; }
        softmax_add(s, tail);
        s = softmax_block(s, shared[turn]);
        turn ^= 1;
        if (threadIdx.x == 0) { losses[n] = softmax_loss(s, target_logit); }
        if constexpr (GRADIENT) {
            g = SoftmaxGradient{s.max, dloss / s.sum, dloss, target_logit, target};
            before = row;
            tail_before = tail;
        }
        row += gridDim.x * pitch;
    }
}

typedef void CrossentropyKernel(float* losses, floatX* logits, const int32_t* targets, float dloss, const float* loss_scale,
                                unsigned N, int V, size_t pitch);

typedef struct {
    CrossentropyKernel* kernel;  // NULL: too long a row, too old a card or machine code
    int threads, blocks;         // as many blocks as run at one time
    size_t shared;
} CrossentropyPlan;

static inline CrossentropyPlan crossentropy_plan(CrossentropyKernel* kernel, size_t N, int threads, size_t shared) {
    CrossentropyPlan p = {NULL, threads, 0, shared};
    if (shared + 1024 > (size_t)device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)) { return p; }
    int per_sm = 0;
    CUDA_CHECK(cudaFuncSetAttribute((const void*)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, threads, shared));
    if (per_sm == 0) { return p; }
    p.kernel = kernel;
    p.blocks = (int)size_min(N, (size_t)device_attribute(cudaDevAttrMultiProcessorCount) * per_sm);
    return p;
}

template <int VIA, int DIRECT, int STAY, int THREADS>
static CrossentropyPlan crossentropy_row_plan(size_t N, int V) {
    CrossentropyKernel* kernel = crossentropy_row_kernel<VIA, DIRECT, STAY, THREADS>;
    const size_t packs = ceil_div((size_t)V, VECTOR<floatX>);
    const int threads = (int)round_up(ceil_div(packs, VIA + DIRECT + STAY), 32);
    if (threads > THREADS || (VIA + STAY > 0 && compiled_arch(kernel) < 80)) { return CrossentropyPlan{}; }
    return crossentropy_plan(kernel, N, threads, (size_t)(VIA + STAY) * threads * sizeof(Logits));
}

/* threads: at most; as many as are busy in every round */
template <int UNROLL, bool KEEP, bool GRADIENT>
static CrossentropyPlan crossentropy_stream_plan(size_t N, int V, int threads) {
    const size_t packs = ceil_div((size_t)V, VECTOR<floatX>), rounds = ceil_div(packs, (size_t)threads * UNROLL);
    return crossentropy_plan(crossentropy_stream_kernel<UNROLL, KEEP, GRADIENT>, N,
                             (int)round_up(ceil_div(packs, rounds * UNROLL), 32), 0);
}

static inline void crossentropy_run(const CrossentropyPlan* p, float* losses, floatX* logits, const int32_t* targets,
                                    float dloss, const float* loss_scale, size_t N, int V, size_t pitch, cudaStream_t stream) {
    p->kernel<<<p->blocks, p->threads, p->shared, stream>>>(losses, logits, targets, dloss, loss_scale, (unsigned)N, V, pitch);
    CUDA_CHECK_LAUNCH("crossentropy kernel");
}

/* The blocks that hold a row of V: a power of two. */
static inline int crossentropy_ranks(int V) {
    int ranks = 1;
    while ((size_t)ranks * CE_BLOCK_PACKS * VECTOR<floatX> < (size_t)V) { ranks *= 2; }
    return ranks;
}

template <bool GRADIENT>
static void crossentropy_launch(float* losses, floatX* logits, const int32_t* targets, float dloss, const float* loss_scale,
                                size_t N, int V, size_t pitch, cudaStream_t stream) {
    if (N == 0) { return; }
    const int ranks = crossentropy_ranks(V);
    bool done = false;
    if (ranks == 1) {
        done =
            crossentropy_held<CE_PACKS, CE_STAGES, false, GRADIENT>(losses, logits, targets, dloss, loss_scale, N, V, pitch, 1,
                                                                    stream) ||
            crossentropy_held<CE_PACKS, 0, false, GRADIENT>(losses, logits, targets, dloss, loss_scale, N, V, pitch, 1, stream);
    } else if (ranks <= CE_MAX_CLUSTER) {
        done = crossentropy_held<CE_PACKS, CE_STAGES, true, GRADIENT>(losses, logits, targets, dloss, loss_scale, N, V, pitch,
                                                                      ranks, stream);
    }
    if (!done) { crossentropy_looped<GRADIENT>(losses, logits, targets, dloss, loss_scale, N, V, pitch, stream); }
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
