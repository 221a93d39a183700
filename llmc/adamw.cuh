/* adamw.cuh -- the end of a training step on the GPU: mean loss, global gradient norm, the decision whether to update, and
 * AdamW over a range of the parameter arena. The oracles are adamw.h and outlier.h.
 *
 * Whatever changes from step to step lies in one struct on the device, the StepState: kernels read it, so a step needs no
 * answer from the host, and can be captured in a graph once. The host copies it back a step late, for the log, and at
 * checkpoints. In order:
 *
 *   step_begin_cuda      learning rate and number of the step; sums to zero
 *   loss_sum_cuda        for each micro-batch: adds its token losses
 *   norm_square_cuda     sum of squares of all gradients
 *   (several GPUs: loss_sum and norm_square, neighbours, are summed over the ranks here)
 *   step_decide_cuda     mean loss, norm, clip factor, outliers, loss scale; whether this step updates at all
 *   adamw_update_cuda    reads all of it
 *
 * The weights' fp32 values between steps ("master") have three forms:
 *   none    FP32 builds: the parameters themselves
 *   fp32    an array beside the 16-bit parameters, which are its rounding
 *   split   BF16 builds: a bfloat16 is the upper half of an fp32, so the 16 bits that its rounding lost are enough to
 *           have the exact fp32 again: 2 bytes a parameter instead of 4. Rounding is to nearest, ties away from zero, since
 *           ties to even would lose a bit; the fp32 form rounds alike, so both give the same bits.
 * m and v are fp32, or bfloat16 rounded stochastically, up with the probability of the part that is cut off, so that small
 * contributions survive on average. The random bits are a function of (seed, step, tensor, element): a resumed run rounds
 * alike.
 *
 * Bytes a parameter in BF16: fp32 master, m and v 28; split 24; split with bfloat16 m and v 16. The norm reads 2 more.
 */
#ifndef LLMC_ADAMW_CUH
#define LLMC_ADAMW_CUH

#include "llmc/gpu/cuda_common.cuh"
#include "llmc/base/outlier.h"
#include "llmc/base/rand.h"

typedef enum { UPDATE_APPLIED, UPDATE_NOT_FINITE, UPDATE_OUTLIER_LOSS, UPDATE_OUTLIER_NORM } UpdateVerdict;

typedef struct {
    // kept from step to step: what a checkpoint saves
    int64_t updates;      // AdamW steps applied so far
    float loss_scale;     // gradients are this times too large; 1 but in FP16
    int32_t scale_good;   // finite steps since it last changed
    Outlier loss_window;  // detectors
    Outlier norm_window;
    // of this step
    int64_t step;        // its number, also for the random bits
    double loss_sum;     // of the losses of all tokens so far
    double norm_square;  // of the gradients, loss_scale^2 times too large
    double lr;
    float loss;            // mean
    float norm;            // of the gradients, before clipping
    float loss_z, norm_z;  // scores of both against the last steps, NaN where there are too few
    int32_t verdict;       // an UpdateVerdict
    // what AdamW reads
    float grad_scale;  // clip factor / loss_scale
    float step_size;   // lr / (1 - beta1^t)
    float root2;       // sqrt(1 - beta2^t)
    float decay;       // 1 - lr * weight_decay
} StepState;

/* What does not change in a run. Host memory, passed by value. */
typedef struct {
    double beta1, beta2, eps, weight_decay;
    double grad_clip;                 // largest norm; 0: any
    double skip_loss_z, skip_norm_z;  // 0: never skip
    double loss_weight;               // 1 / tokens of a step, over all ranks
    int scale_interval;               // finite steps until the loss scale doubles; 0: it stays
} StepHyper;

enum { LOSS_SCALE_MAX_LOG2 = 24 };

// ---------------------------------------------------------------------------------------------------------------------
// the step's numbers

__global__ void step_begin_kernel(StepState* s, int64_t step, double lr) {
    s->step = step;
    s->lr = lr;
    s->loss_sum = 0;
    s->norm_square = 0;
}

/* Starts step `step` with learning rate `lr`. */
static inline void step_begin_cuda(StepState* state, int64_t step, double lr, cudaStream_t stream) {
    step_begin_kernel<<<1, 1, 0, stream>>>(state, step, lr);
    CUDA_CHECK_LAUNCH("step_begin_kernel");
}

__global__ void __launch_bounds__(1024) loss_sum_kernel(StepState* s, const float* losses, size_t n) {
    __shared__ double shared[32];
    double sum = 0;
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) { sum += (double)losses[i]; }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) { s->loss_sum += sum; }
}

/* state->loss_sum += the sum of losses (n). */
static inline void loss_sum_cuda(StepState* state, const float* losses, size_t n, cudaStream_t stream) {
    loss_sum_kernel<<<1, 1024, 0, stream>>>(state, losses, n);
    CUDA_CHECK_LAUNCH("loss_sum_kernel");
}

enum {
    NORM_BLOCKS = 4096,  // most partial sums of one call: the order of the additions depends on n alone
    NORM_THREADS = 256,
    NORM_UNROLL = 4,
};

/* Bytes of scratch that norm_square_cuda() wants. */
static inline size_t norm_square_scratch_cuda(void) { return NORM_BLOCKS * sizeof(double); }

/* partial[block] = sum of squares of the block's share of g (n, a multiple of a vector). */
template <typename Grad>
__global__ void __launch_bounds__(NORM_THREADS) norm_partial_kernel(double* partial, const Grad* g, size_t n) {
    constexpr int W = VECTOR<Grad>;
    __shared__ double shared[32];
    const size_t round = (size_t)NORM_THREADS * NORM_UNROLL * W;
    double sum = 0;
    for (size_t start = blockIdx.x * round; start < n; start += gridDim.x * round) {
        Vec<Grad, W> x[NORM_UNROLL];
        float part = 0;
#pragma unroll
        for (int k = 0; k < NORM_UNROLL; k++) {
            const size_t i = start + (size_t)(k * NORM_THREADS + threadIdx.x) * W;
            if (i < n) {
                x[k] = load_vec<W>(g + i);
            } else {
#pragma unroll
                for (int j = 0; j < W; j++) { x[k].v[j] = from_float<Grad>(0.0f); }
            }
        }
#pragma unroll
        for (int k = 0; k < NORM_UNROLL; k++) {
#pragma unroll
            for (int j = 0; j < W; j++) { part += to_float(x[k].v[j]) * to_float(x[k].v[j]); }
        }
        sum += (double)part;
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) { partial[blockIdx.x] = sum; }
}

__global__ void __launch_bounds__(1024) norm_finish_kernel(StepState* s, const double* partial, int count) {
    __shared__ double shared[32];
    double sum = 0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) { sum += partial[i]; }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) { s->norm_square += sum; }
}

/* state->norm_square += the sum of squares of g (n); n is a multiple of 16 bytes. scratch: bytes as above */
template <typename Grad>
static void norm_square_cuda(StepState* state, void* scratch, const Grad* g, size_t n, cudaStream_t stream) {
    if (n == 0) { return; }
    assert(n % VECTOR<Grad> == 0 && is_aligned16(g));
    const size_t round = (size_t)NORM_THREADS * NORM_UNROLL * VECTOR<Grad>;
    const int blocks = (int)size_min(NORM_BLOCKS, ceil_div(n, round));
    norm_partial_kernel<<<blocks, NORM_THREADS, 0, stream>>>((double*)scratch, g, n);
    CUDA_CHECK_LAUNCH("norm_partial_kernel");
    norm_finish_kernel<<<1, 1024, 0, stream>>>(state, (const double*)scratch, blocks);
    CUDA_CHECK_LAUNCH("norm_finish_kernel");
}

__global__ void step_decide_kernel(StepState* s, StepHyper h) {
    const double scale = (double)s->loss_scale;
    const double loss = s->loss_sum * h.loss_weight, norm = sqrt(s->norm_square) / scale;
    const bool finite = isfinite(loss) && isfinite(norm);
    const double loss_z = outlier_update(&s->loss_window, loss), norm_z = outlier_update(&s->norm_window, norm);
    s->loss = (float)loss;
    s->norm = (float)norm;
    s->loss_z = (float)loss_z;
    s->norm_z = (float)norm_z;
    s->verdict = !finite                               ? UPDATE_NOT_FINITE
                 : outlier_skip(loss_z, h.skip_loss_z) ? UPDATE_OUTLIER_LOSS
                 : outlier_skip(norm_z, h.skip_norm_z) ? UPDATE_OUTLIER_NORM
                                                       : UPDATE_APPLIED;
    const double clip = h.grad_clip > 0 && norm > h.grad_clip ? h.grad_clip / (norm + 1e-6) : 1.0;
    s->grad_scale = (float)(clip / scale);
    if (s->verdict == UPDATE_APPLIED) {
        s->updates++;
        s->step_size = (float)(s->lr / (1.0 - pow(h.beta1, (double)s->updates)));
        s->root2 = (float)sqrt(1.0 - pow(h.beta2, (double)s->updates));
        s->decay = (float)(1.0 - s->lr * h.weight_decay);
    }
    if (h.scale_interval > 0) {
        if (!finite) {
            s->loss_scale = fmaxf(s->loss_scale * 0.5f, 1.0f);
            s->scale_good = 0;
        } else if (++s->scale_good >= h.scale_interval) {
            s->loss_scale = fminf(s->loss_scale * 2.0f, (float)(1 << LOSS_SCALE_MAX_LOG2));
            s->scale_good = 0;
        }
    }
}

/* From the sums of the step: everything below them in StepState. */
static inline void step_decide_cuda(StepState* state, const StepHyper* hyper, cudaStream_t stream) {
    step_decide_kernel<<<1, 1, 0, stream>>>(state, *hyper);
    CUDA_CHECK_LAUNCH("step_decide_kernel");
}

// ---------------------------------------------------------------------------------------------------------------------
// master weights and rounding

typedef enum { MASTER_NONE, MASTER_FP32, MASTER_SPLIT } MasterKind;

/* The parameter of an fp32 master weight. bfloat16: to nearest, ties away from zero, see above. */
template <typename T>
__host__ __device__ __forceinline__ T round_master(float x) {
    return from_float<T>(x);
}

union FloatBits {
    float f;
    uint32_t u;
};

template <>
__host__ __device__ __forceinline__ __nv_bfloat16 round_master<__nv_bfloat16>(float x) {
    FloatBits bits;
    bits.f = x;
    __nv_bfloat16_raw raw;
    raw.x = (unsigned short)((bits.u + 0x8000u) >> 16);
    return __nv_bfloat16(raw);
}

/* What round_master() lost, as the difference of the bit patterns; and the master weight again. */
__host__ __device__ __forceinline__ uint16_t split_low(float x) {
    FloatBits bits;
    bits.f = x;
    return (uint16_t)bits.u;
}
__host__ __device__ __forceinline__ float split_join(__nv_bfloat16 p, uint16_t low) {
    // the upper half was rounded up exactly where the lower half's highest bit is set
    FloatBits bits;
    bits.u = ((uint32_t)__nv_bfloat16_raw(p).x << 16) - ((uint32_t)(low >> 15) << 16) + low;
    return bits.f;
}

/* Cuts to bfloat16, up with the probability of the part that is cut off; `random` has 16 bits. */
__device__ __forceinline__ __nv_bfloat16 round_stochastic(float x, uint32_t random) {
    __nv_bfloat16_raw raw;
    raw.x = (unsigned short)((__float_as_uint(x) + random) >> 16);
    return __nv_bfloat16(raw);
}

template <MasterKind>
struct MasterType {
    typedef float type;
};
template <>
struct MasterType<MASTER_SPLIT> {
    typedef uint16_t type;
};

/* params (n) = rounded x, master (n) = x in the form of MASTER (unused for MASTER_NONE). For loading weights. */
template <MasterKind MASTER>
__global__ void master_set_kernel(floatX* params, void* master, const float* x, size_t n) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) { return; }
    params[i] = round_master<floatX>(x[i]);
    if constexpr (MASTER == MASTER_FP32) { ((float*)master)[i] = x[i]; }
    if constexpr (MASTER == MASTER_SPLIT) { ((uint16_t*)master)[i] = split_low(x[i]); }
}

static inline void master_set_cuda(floatX* params, void* master, MasterKind kind, const float* x, size_t n,
                                   cudaStream_t stream) {
    if (n == 0) { return; }
    const unsigned grid = (unsigned)ceil_div(n, 256);
    switch (kind) {
        case MASTER_NONE: master_set_kernel<MASTER_NONE><<<grid, 256, 0, stream>>>(params, master, x, n); break;
        case MASTER_FP32: master_set_kernel<MASTER_FP32><<<grid, 256, 0, stream>>>(params, master, x, n); break;
        case MASTER_SPLIT: master_set_kernel<MASTER_SPLIT><<<grid, 256, 0, stream>>>(params, master, x, n); break;
    }
    CUDA_CHECK_LAUNCH("master_set_kernel");
}

/* x (n) = the exact master weights. For saving them. */
template <MasterKind MASTER>
__global__ void master_get_kernel(float* x, const floatX* params, const void* master, size_t n) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) { return; }
    if constexpr (MASTER == MASTER_NONE) {
        x[i] = to_float(params[i]);
    } else if constexpr (MASTER == MASTER_FP32) {
        x[i] = ((const float*)master)[i];
    } else {
        x[i] = split_join(((const __nv_bfloat16*)params)[i], ((const uint16_t*)master)[i]);
    }
}

static inline void master_get_cuda(float* x, const floatX* params, const void* master, MasterKind kind, size_t n,
                                   cudaStream_t stream) {
    if (n == 0) { return; }
    const unsigned grid = (unsigned)ceil_div(n, 256);
    switch (kind) {
        case MASTER_NONE: master_get_kernel<MASTER_NONE><<<grid, 256, 0, stream>>>(x, params, master, n); break;
        case MASTER_FP32: master_get_kernel<MASTER_FP32><<<grid, 256, 0, stream>>>(x, params, master, n); break;
        case MASTER_SPLIT: master_get_kernel<MASTER_SPLIT><<<grid, 256, 0, stream>>>(x, params, master, n); break;
    }
    CUDA_CHECK_LAUNCH("master_get_kernel");
}

// ---------------------------------------------------------------------------------------------------------------------
// AdamW

/* A stretch of the arena with one answer to the questions below: from `first` (a multiple of ADAMW_VECTOR) to the next
 * stretch's. Tensors that follow each other without a gap (q, k, v; gate, up) are one. Lies on the device, sorted. */
typedef struct {
    size_t first;
    const float* grad;  // where its fp32 gradients lie (norm weights), or NULL: in the arena of gradients
    uint32_t tensor;    // ordinal, for the random bits
    int32_t decays;     // whether weight decay acts on it
} AdamWStretch;

/* The arenas. Element i of the parameters is i in `params` and `grads`, and i - state_first in the others, of which a rank
 * may hold a part. */
template <typename Grad>
struct AdamWTensors {
    floatX* params;
    const Grad* grads;
    void* master;  // float or uint16_t by MasterKind; unused for MASTER_NONE
    void* m;       // float or __nv_bfloat16
    void* v;
    size_t state_first;
    const AdamWStretch* stretches;
    int num_stretches;
};

enum { ADAMW_VECTOR = 8, ADAMW_THREADS = 256 };

/* Elements of a thread: 16 bytes of the narrowest state, so that a warp's stores fill whole sectors. */
template <MasterKind MASTER, typename Moment>
constexpr int ADAMW_WIDTH = sizeof(Moment) == 4 && MASTER != MASTER_SPLIT ? 4 : ADAMW_VECTOR;

template <typename Grad, MasterKind MASTER, typename Moment>
__global__ void __launch_bounds__(ADAMW_THREADS)
    adamw_kernel(AdamWTensors<Grad> t, size_t lo, size_t hi, const StepState* state, float blend1, float beta2, float blend2,
                 float eps, uint64_t seed) {
    typedef typename MasterType<MASTER>::type Master;
    constexpr int W = ADAMW_WIDTH<MASTER, Moment>;
    if (state->verdict != UPDATE_APPLIED) { return; }
    const size_t i = lo + ((size_t)blockIdx.x * ADAMW_THREADS + threadIdx.x) * W;
    if (i >= hi) { return; }
    const size_t at = i - t.state_first;
    Moment* m_at = (Moment*)t.m + at;
    Moment* v_at = (Moment*)t.v + at;
    Master* master_at = MASTER == MASTER_NONE ? NULL : (Master*)t.master + at;
    // all that can be loaded before the stretch is known
    Vec<Grad, W> grad = load_stream<W>(t.grads + i);
    Vec<Moment, W> m = load_stream<W>(m_at), v = load_stream<W>(v_at);
    Vec<Master, W> master;
    Vec<floatX, W> param;
    if constexpr (MASTER != MASTER_NONE) { master = load_stream<W>(master_at); }
    if constexpr (MASTER != MASTER_FP32) { param = load_vec<W>(t.params + i); }

    int below = 0, above = t.num_stretches;  // the last stretch that begins at or before i
    while (above - below > 1) {
        const int middle = (below + above) / 2;
        if (t.stretches[middle].first <= i) {
            below = middle;
        } else {
            above = middle;
        }
    }
    const AdamWStretch stretch = t.stretches[below];
    float g[W];
    if (stretch.grad) {
        const Vec<float, W> apart = load_vec<W>(stretch.grad + (i - stretch.first));
#pragma unroll
        for (int k = 0; k < W; k++) { g[k] = apart.v[k]; }
    } else {
#pragma unroll
        for (int k = 0; k < W; k++) { g[k] = to_float(grad.v[k]); }
    }

    const float grad_scale = state->grad_scale, step_size = state->step_size, root2 = state->root2;
    const float decay = stretch.decays ? state->decay : 1.0f;
    Philox random[W / 4];
    if constexpr (sizeof(Moment) == 2) {
#pragma unroll
        for (int k = 0; k < W / 4; k++) {
            const uint64_t index = (uint64_t)state->step << 40 | (uint64_t)((i - stretch.first) / 4 + k);
            random[k] = philox(seed, RAND_ROUND, stretch.tensor, index);
        }
    }
    // each rounding is written out: a compiler that fuses one product here and the other there would make the forms of
    // master weights, and the next build, differ in the last bit
#pragma unroll
    for (int k = 0; k < W; k++) {
        const float gk = __fmul_rn(g[k], grad_scale), m_old = to_float(m.v[k]);
        const float mk = __fmaf_rn(blend1, __fsub_rn(gk, m_old), m_old);
        const float vk = __fmaf_rn(beta2, to_float(v.v[k]), __fmul_rn(__fmul_rn(blend2, gk), gk));
        float p;
        if constexpr (MASTER == MASTER_NONE) { p = to_float(param.v[k]); }
        if constexpr (MASTER == MASTER_FP32) { p = master.v[k]; }
        if constexpr (MASTER == MASTER_SPLIT) { p = split_join(*(const __nv_bfloat16*)&param.v[k], master.v[k]); }
        const float root = __fadd_rn(__fdiv_rn(__fsqrt_rn(vk), root2), eps);
        p = __fmaf_rn(p, decay, -__fmul_rn(step_size, __fdiv_rn(mk, root)));
        param.v[k] = round_master<floatX>(p);
        if constexpr (MASTER == MASTER_FP32) { master.v[k] = p; }
        if constexpr (MASTER == MASTER_SPLIT) { master.v[k] = split_low(p); }
        if constexpr (sizeof(Moment) == 2) {
            const uint32_t bits = random[k / 4].v[k % 4];
            m.v[k] = round_stochastic(mk, bits & 0xffffu);
            v.v[k] = round_stochastic(vk, bits >> 16);
        } else {
            m.v[k] = mk;
            v.v[k] = vk;
        }
    }
    store_stream(m_at, m);
    store_stream(v_at, v);
    if constexpr (MASTER != MASTER_NONE) { store_stream(master_at, master); }
    store_vec(t.params + i, param);
}

/* One AdamW step on elements [lo, hi) of the arena (multiples of ADAMW_VECTOR), or nothing where state->verdict says so.
 * Gaps between tensors stay zero if their gradients are. bf16_moments: m and v are __nv_bfloat16. */
template <typename Grad>
static void adamw_update_cuda(const AdamWTensors<Grad>* tensors, size_t lo, size_t hi, const StepState* state,
                              const StepHyper* hyper, MasterKind master, bool bf16_moments, uint64_t seed,
                              cudaStream_t stream) {
    if (lo >= hi) { return; }
    assert(lo % ADAMW_VECTOR == 0 && hi % ADAMW_VECTOR == 0 && tensors->state_first % ADAMW_VECTOR == 0);
    const float blend1 = (float)(1.0 - hyper->beta1), blend2 = (float)(1.0 - hyper->beta2);
    const float beta2 = (float)hyper->beta2, eps = (float)hyper->eps;
#define ADAMW_LAUNCH(kind, moment)                                                                                      \
    adamw_kernel<Grad, kind, moment>                                                                                    \
        <<<(unsigned)ceil_div(hi - lo, (size_t)ADAMW_THREADS * ADAMW_WIDTH<kind, moment>), ADAMW_THREADS, 0, stream>>>( \
            *tensors, lo, hi, state, blend1, beta2, blend2, eps, seed)
#define ADAMW_LAUNCH_MOMENTS(kind)         \
    if (bf16_moments) {                    \
        ADAMW_LAUNCH(kind, __nv_bfloat16); \
    } else {                               \
        ADAMW_LAUNCH(kind, float);         \
    }
#if defined(PRECISION_FP32)
    assert(master == MASTER_NONE);
    ADAMW_LAUNCH_MOMENTS(MASTER_NONE)
#elif defined(PRECISION_FP16)
    assert(master == MASTER_FP32);
    ADAMW_LAUNCH_MOMENTS(MASTER_FP32)
#else
    assert(master != MASTER_NONE);
    if (master == MASTER_SPLIT) {
        ADAMW_LAUNCH_MOMENTS(MASTER_SPLIT)
    } else {
        ADAMW_LAUNCH_MOMENTS(MASTER_FP32)
    }
#endif
#undef ADAMW_LAUNCH_MOMENTS
#undef ADAMW_LAUNCH
    (void)master;
    CUDA_CHECK_LAUNCH("adamw_kernel");
}

#endif
