/* adamw.cuh -- AdamW over a range of the parameter arena on the GPU. The oracle is adamw.h, where the formula stands.
 *
 * Kernels read what changes from step to step (step size, clip factor, whether to update at all) from the StepState. master.cuh
 * defines the forms of the master weights. m and v are fp32, or bfloat16 with stochastic rounding: up with a probability equal
 * to the fraction cut off, so that small contributions survive on average. The random bits are a function of (seed, step,
 * tensor, element), so a resumed run rounds in the same way.
 *
 * Bytes moved a parameter in BF16, gradient included: fp32 master, m and v 28; split 26; split with bfloat16 m and v 18. The
 * norm reads the gradient's 2 once more.
 */
#ifndef LLMC_ADAMW_CUH
#define LLMC_ADAMW_CUH

#include "llmc/gpu/master.cuh"      // defines: MasterKind, round_master, round_stochastic, split_low, split_join
#include "llmc/gpu/step_state.cuh"  // defines: StepState
#include "llmc/base/update.h"       // defines: StepHyper
#include "llmc/base/rand.h"         // defines: philox

/* A stretch of the arena: a tensor, or tensors without a gap between them (q, k, v; gate, up), and the gap behind. It reaches
 * from `first`, a multiple of PARAM_ALIGN, to the next stretch's `first`; the last one reaches the arena's end. The list is
 * sorted and lies on the device.
 * The kernel cannot tell a gap from weights. Gaps stay zero because their gradients are zero: `grad` is as long as the
 * stretch, round_up(size, PARAM_ALIGN), and zero behind the tensor. */
typedef struct {
    size_t first;
    const float* grad;  // its separate fp32 gradients (norms; large tensors accumulated in fp32), or NULL
    uint32_t tensor;    // ordinal, for the random bits
    int32_t decays;     // whether weight decay acts on it
} AdamWStretch;

/* The arenas. Parameter element i is params[i]; its master, m and v are at i - state_first, because a rank may hold only a part
 * of them. `grads` holds elements [grads_first, grads_end), the first at grads[0]; stretches outside this range have separate
 * gradients. state_first, grads_first and grads_end are multiples of ADAMW_VECTOR. */
template <typename Grad>
struct AdamWTensors {
    floatX* params;
    const Grad* grads;
    size_t grads_first, grads_end;
    void* master;  // float or uint16_t by MasterKind; unused for MASTER_NONE
    void* m;       // float or __nv_bfloat16
    void* v;
    size_t state_first;
    const AdamWStretch* stretches;
    int num_stretches;
};

enum { ADAMW_VECTOR = 8, ADAMW_THREADS = 256 };

/* Elements a thread: 16 bytes of the narrowest state, so that a warp's stores fill whole sectors. */
template <MasterKind MASTER, typename Moment>
constexpr int ADAMW_WIDTH = sizeof(Moment) == 4 && MASTER != MASTER_SPLIT ? 4 : ADAMW_VECTOR;

/* Returns the last stretch that begins at or before element i. */
__device__ __forceinline__ AdamWStretch stretch_at(const AdamWStretch* stretches, int count, size_t i) {
    int below = 0, above = count;
    while (above - below > 1) {
        const int middle = (below + above) / 2;
        if (stretches[middle].first <= i) {
            below = middle;
        } else {
            above = middle;
        }
    }
    return stretches[below];
}

/* Updates the W elements from i on. */
template <typename Grad, MasterKind MASTER, typename Moment>
__device__ __forceinline__ void adamw_vector(const AdamWTensors<Grad>& t, size_t i, const StepState* state,
                                             float one_minus_beta1, float beta2, float one_minus_beta2, float eps,
                                             uint64_t seed) {
    typedef typename MasterType<MASTER>::type Master;
    constexpr int W = ADAMW_WIDTH<MASTER, Moment>;
    const size_t at = i - t.state_first;
    Moment* m_at = (Moment*)t.m + at;
    Moment* v_at = (Moment*)t.v + at;
    Master* master_at = MASTER == MASTER_NONE ? NULL : (Master*)t.master + at;
    // load all that does not depend on the stretch
    Vec<Grad, W> grad;
    if (i >= t.grads_first && i < t.grads_end) { grad = load_stream<W>(t.grads + (i - t.grads_first)); }
    Vec<Moment, W> m = load_stream<W>(m_at), v = load_stream<W>(v_at);
    Vec<Master, W> master;
    Vec<floatX, W> param;
    if constexpr (MASTER != MASTER_NONE) { master = load_stream<W>(master_at); }
    if constexpr (MASTER != MASTER_FP32) { param = load_vec<W>(t.params + i); }

    const AdamWStretch stretch = stretch_at(t.stretches, t.num_stretches, i);
    float g[W];
    if (stretch.grad) {
        const Vec<float, W> apart = load_vec<W>(stretch.grad + (i - stretch.first));
#pragma unroll
        for (int k = 0; k < W; k++) { g[k] = apart.v[k]; }
    } else {
#pragma unroll
        for (int k = 0; k < W; k++) { g[k] = to_float(grad.v[k]); }
    }

    const float grad_scale = state->grad_scale, step_size = state->step_size, sqrt_correction2 = state->sqrt_correction2;
    const float decay = stretch.decays ? state->decay : 1.0f;
    Philox random[W / 4];
    if constexpr (sizeof(Moment) == 2) {
#pragma unroll
        for (int k = 0; k < W / 4; k++) {
            const uint64_t index = (uint64_t)state->step << 40 | (uint64_t)((i - stretch.first) / 4 + k);
            random[k] = philox(seed, RAND_ROUND, stretch.tensor, index);
        }
    }
    // Write out each rounding. Otherwise the compiler may fuse different products in different instantiations, and the forms
    // of master weights, or two builds, would differ in the last bit.
#pragma unroll
    for (int k = 0; k < W; k++) {
        const float gk = __fmul_rn(g[k], grad_scale), m_old = to_float(m.v[k]);
        const float mk = __fmaf_rn(one_minus_beta1, __fsub_rn(gk, m_old), m_old);
        const float vk = __fmaf_rn(beta2, to_float(v.v[k]), __fmul_rn(__fmul_rn(one_minus_beta2, gk), gk));
        float p;
        if constexpr (MASTER == MASTER_NONE) { p = to_float(param.v[k]); }
        if constexpr (MASTER == MASTER_FP32) { p = master.v[k]; }
        if constexpr (MASTER == MASTER_SPLIT) { p = split_join(*(const __nv_bfloat16*)&param.v[k], master.v[k]); }
        const float root = __fadd_rn(__fdiv_rn(__fsqrt_rn(vk), sqrt_correction2), eps);
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

template <typename Grad, MasterKind MASTER, typename Moment>
__global__ void __launch_bounds__(ADAMW_THREADS)
    adamw_kernel(AdamWTensors<Grad> t, size_t lo, size_t hi, const StepState* state, float one_minus_beta1, float beta2,
                 float one_minus_beta2, float eps, uint64_t seed) {
    if (state->verdict != UPDATE_APPLIED) { return; }
    const size_t i = lo + ((size_t)blockIdx.x * ADAMW_THREADS + threadIdx.x) * ADAMW_WIDTH<MASTER, Moment>;
    if (i >= hi) { return; }
    adamw_vector<Grad, MASTER, Moment>(t, i, state, one_minus_beta1, beta2, one_minus_beta2, eps, seed);
}

/* Applies one AdamW step to elements [lo, hi) of the arena (multiples of ADAMW_VECTOR); does nothing unless state->verdict is
 * UPDATE_APPLIED. bf16_moments: m and v are __nv_bfloat16. */
template <typename Grad>
static void adamw_update_cuda(const AdamWTensors<Grad>* tensors, size_t lo, size_t hi, const StepState* state,
                              const StepHyper* hyper, MasterKind master, bool bf16_moments, uint64_t seed,
                              cudaStream_t stream) {
    if (lo >= hi) { return; }
    assert(lo % ADAMW_VECTOR == 0 && hi % ADAMW_VECTOR == 0 && tensors->state_first % ADAMW_VECTOR == 0);
    assert(tensors->grads_first % ADAMW_VECTOR == 0 && tensors->grads_end % ADAMW_VECTOR == 0);
    const float one_minus_beta1 = (float)(1.0 - hyper->beta1), one_minus_beta2 = (float)(1.0 - hyper->beta2);
    const float beta2 = (float)hyper->beta2, eps = (float)hyper->eps;
#define ADAMW_LAUNCH(kind, moment)                                                                                      \
    adamw_kernel<Grad, kind, moment>                                                                                    \
        <<<(unsigned)ceil_div(hi - lo, (size_t)ADAMW_THREADS * ADAMW_WIDTH<kind, moment>), ADAMW_THREADS, 0, stream>>>( \
            *tensors, lo, hi, state, one_minus_beta1, beta2, one_minus_beta2, eps, seed)
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
