/* adamw.cuh -- AdamW over a range of the parameter arena on the GPU. The oracle is adamw.h, where the formula stands.
 *
 * Kernels read from the StepState the numbers that change with each step: step size, clip factor, whether to update at all.
 * master.cuh defines the forms of the master weights. m and v are fp32, or bfloat16 with stochastic rounding: up with a
 * probability equal to the fraction cut off, so that small contributions survive on average. BF16 runs without master weights
 * round their weights in the same way. The random bits are a function of (seed, step, tensor, element), so a resumed run rounds
 * in the same way. One draw has exactly the random bits for m and v of 4 elements; a second draw has them for 8 weights.
 *
 * All divisions and roots are rounded as IEEE 754 says. Nearly all are computed without branches; see adamw_quotient().
 *
 * Bytes moved per parameter in BF16, gradient included: 28 with fp32 master weights, m and v; 26 with split master weights; 18
 * with split master weights and bfloat16 m and v; 14 without master weights and with bfloat16 m and v. The norm reads the
 * gradient's 2 bytes once more. Steps: dev/cuda/adamw.cu.
 */
#ifndef LLMC_ADAMW_CUH
#define LLMC_ADAMW_CUH

#include "llmc/optim/master.cuh"      // defines: nearest_upper, stochastic_upper, split_join
#include "llmc/cuda/ptx.cuh"          // defines: pack2, compute_here, reciprocal_fast, inverse_root_fast
#include "llmc/optim/optimizer.cuh"   // defines: OptimizerStretch, OptimizerTensors
#include "llmc/optim/step_state.cuh"  // defines: StepState
#include "llmc/optim/recipe.h"        // defines: Hyperparameters, UPDATE_APPLIED
#include "llmc/base/rand.h"           // defines: philox

#include <type_traits>

enum { ADAMW_THREADS = 256, ADAMW_TURNS = 4 };  // vectors that a thread updates, one after the other

/* Elements in a vector: 16 bytes of the narrowest state, so that a warp's stores fill whole sectors. */
template <MasterKind MASTER, typename Moment>
constexpr int ADAMW_WIDTH = sizeof(Moment) == 4 && MASTER != MASTER_SPLIT ? 4 : OPTIMIZER_VECTOR;

/* What is the same in every step. */
typedef struct {
    float one_minus_beta1, beta2, one_minus_beta2, eps;
    uint64_t seed;
} AdamWFactors;

static inline AdamWFactors adamw_factors(const Hyperparameters* hyper, uint64_t seed) {
    const AdamWFactors f = {(float)(1.0 - hyper->beta1), (float)hyper->beta2, (float)(1.0 - hyper->beta2), (float)hyper->eps,
                            seed};
    return f;
}

// ---------------------------------------------------------------------------------------------------------------------
// quotients and square roots in fp32, rounded to nearest as IEEE 754 says, without branches
//
// A card divides in software: it corrects an approximate reciprocal, or root, by the remainder, which a fused multiply-add
// computes without an error. __fdiv_rn and __fsqrt_rn first test for numbers whose remainder or quotient is denormal, and
// branch to longer code for them. The functions here compute the corrections and nothing else,
//
//   r = approximate 1 / d          1 / d   = r + r (1 - r d)
//   q = x (1 / d)                  x / d   = q + (x - q d) (1 / d)
//   r = approximate 1 / sqrt(x)    sqrt(x) = s + (x - s^2) r / 2, s = x r
//
// so the caller must keep to the range. Infinity, NaN and quotients that are too large give infinity or NaN.
//
// One correction of q is enough if 1 / d is rounded to nearest itself (P. Markstein, "Computation of elementary functions on
// the IBM RISC System/6000 processor", 1990). This is so for every r within a unit in its last place, except for the d whose
// mantissa is all ones. For this d, and for some roots, the result is right only because of the r that cards really compute.
// dev/test/cuda/test_kernels.cu compares every mantissa.

/* Returns 1 / d for 2^-125 <= d <= 2^125. */
__device__ __forceinline__ float inverse_of(float d) {
    const float r = reciprocal_fast(d);
    return __fmaf_rn(r, __fmaf_rn(-d, r, 1.0f), r);
}

/* Returns x / d for x = 0, or |x| >= 2^-100 with |x / d| >= 2^-124. inverse: inverse_of(d) */
__device__ __forceinline__ float quotient_of(float x, float d, float inverse) {
    const float q = __fmul_rn(x, inverse), too_large_by = __fmaf_rn(q, d, -x);  // this sign keeps a zero's sign
    return __fmaf_rn(too_large_by, -inverse, q);
}

/* Returns the square root of x >= 2^-101; for a smaller normal number the result is only nearly rounded. */
__device__ __forceinline__ float root_of(float x) {
    const float r = inverse_root_fast(x), s = __fmul_rn(x, r);
    return __fmaf_rn(__fmaf_rn(-s, s, x), __fmul_rn(0.5f, r), s);
}

// ---------------------------------------------------------------------------------------------------------------------
// elements as they lie in memory, packed into words: unpacked, a 16-bit element would take a register

template <typename T, int W>
constexpr int WORDS = W*(int)sizeof(T) / 4;
template <typename T, int W>
using Words = Vec<uint32_t, WORDS<T, W>>;

template <typename T, int W>
__device__ __forceinline__ Words<T, W> load_words(const void* array, size_t i) {
    return load_stream<WORDS<T, W>>((const uint32_t*)((const T*)array + i));
}
template <typename T, int W>
__device__ __forceinline__ void store_words(void* array, size_t i, const Words<T, W>& x) {
    store_stream((uint32_t*)((T*)array + i), x);
}

/* Returns element k. */
template <typename T, int N>
__device__ __forceinline__ float float_at(const Vec<uint32_t, N>& x, int k) {
    const uint32_t word = x.v[k * (int)sizeof(T) / 4];
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        return float_from_bits(k % 2 ? word & 0xffff0000u : word << 16);
    } else if constexpr (std::is_same_v<T, __half>) {
        return __half2float(__ushort_as_half((unsigned short)(word >> k % 2 * 16)));
    } else {
        return float_from_bits(word);
    }
}

template <int N>
__device__ __forceinline__ void set_floats(Vec<uint32_t, N>& x, int k, float a, float b) {
    x.v[k] = float_bits(a);
    x.v[k + 1] = float_bits(b);
}

/* Return the lower halves of a and b in one word, a's first, and the upper halves. */
__device__ __forceinline__ uint32_t lower_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ uint32_t upper_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }

// ---------------------------------------------------------------------------------------------------------------------
// the update

// Quotients and roots without branches need eps and sqrt_correction2 between these and 1, and m that is zero or has at least
// this magnitude. Other values take a slower path to the same result.
constexpr float USUAL_EPS = 0x1p-50f, USUAL_CORRECTION2 = 0x1p-12f, USUAL_M = 0x1p-80f;

/* Returns m / (sqrt(v) / sqrt_correction2 + eps), each operation rounded. USUAL: without branches; the same bits for the values
 * above, but infinity or NaN if v is negative, not finite, or 2^64 and more. inverse: inverse_of(sqrt_correction2) */
template <bool USUAL>
__device__ __forceinline__ float adamw_quotient(float m, float v, float sqrt_correction2, float inverse, float eps) {
    if constexpr (USUAL) {
        // Times 2^64, no v is denormal. 2^-126 is for v = 0, whose root would be 0 times infinity. Added to any other v, it is
        // lost in rounding, and so is its root in the sum with eps.
        const float root = root_of(__fmaf_rn(v, 0x1p64f, 0x1p-126f));
        const float corrected = quotient_of(root, 0x1p32f * sqrt_correction2, 0x1p-32f * inverse);
        const float denominator = __fadd_rn(corrected, eps);
        return quotient_of(m, denominator, inverse_of(denominator));
    } else {
        return __fdiv_rn(m, __fadd_rn(__fdiv_rn(__fsqrt_rn(v), sqrt_correction2), eps));
    }
}

/* Loads the gradients of the W elements from i on. */
template <int W, typename Grad>
__device__ __forceinline__ void load_gradients(float (&grad)[W], const OptimizerTensors<Grad>& t, size_t i,
                                               const OptimizerStretch& stretch) {
    if (stretch.grad) {
        const Words<float, W> apart = load_words<float, W>(stretch.grad, i - stretch.first);
#pragma unroll
        for (int k = 0; k < W; k++) { grad[k] = float_at<float>(apart, k); }
    } else {
        const Words<Grad, W> joint = load_words<Grad, W>(t.grads, i - t.grads_first);
#pragma unroll
        for (int k = 0; k < W; k++) { grad[k] = float_at<Grad>(joint, k); }
    }
}

/* Draws the random bits of W weights, 16 for each, of which the first is element `in_stretch` of its stretch. */
template <int W>
__device__ __forceinline__ Philox weight_bits(uint64_t seed, int64_t step, uint32_t tensor, size_t in_stretch) {
    Philox bits = philox(seed, RAND_ROUND_WEIGHTS, tensor, (uint64_t)step << 40 | (uint64_t)(in_stretch / 8));
    if (W == 4 && in_stretch % 8) {  // W divides the 8 weights of an index: these are the last 4
        bits.v[0] = bits.v[2];
        bits.v[1] = bits.v[3];
    }
    return bits;
}

/* Updates the W elements from i on, all of one stretch. USUAL: does nothing and returns false, if a value is not usual. */
template <bool USUAL, typename Grad, MasterKind MASTER, typename Moment>
__device__ __forceinline__ bool adamw_vector(const OptimizerTensors<Grad>& t, size_t i, const OptimizerStretch& stretch,
                                             const StepState* state, const AdamWFactors& f) {
    typedef typename MasterType<MASTER>::type Master;
    constexpr int W = ADAMW_WIDTH<MASTER, Moment>;
    constexpr bool rounds_weights = IS_BF16 && MASTER == MASTER_NONE;
    const size_t at = i - t.state_first, in_stretch = i - stretch.first;
    Words<Moment, W> m = load_words<Moment, W>(t.m, at), v = load_words<Moment, W>(t.v, at);
    Words<Master, W> master;
    Words<floatX, W> param;
    if constexpr (MASTER != MASTER_NONE) { master = load_words<Master, W>(t.master, at); }
    if constexpr (MASTER != MASTER_FP32) { param = load_words<floatX, W>(t.params, i); }
    float grad[W];
    load_gradients<W>(grad, t, i, stretch);
    Philox weight_random, random[W / 4];
    if constexpr (rounds_weights) { weight_random = weight_bits<W>(f.seed, state->step, stretch.tensor, in_stretch); }
    if constexpr (sizeof(Moment) == 2) {
        const uint64_t index = (uint64_t)state->step << 40 | (uint64_t)(in_stretch / 4);  // a multiple of W / 4
#pragma unroll
        for (int k = 0; k < W / 4; k++) { random[k] = philox(f.seed, RAND_ROUND, stretch.tensor, index | k); }
    }
    const float grad_scale = state->grad_scale, step_size = state->step_size, sqrt_correction2 = state->sqrt_correction2;
    const float decay = stretch.decays ? state->decay : 1.0f, inverse = inverse_of(sqrt_correction2);
    uint32_t least_m = 0xffffffffu;  // least of 2 * (magnitude's bits) - 1; a zero wraps to the largest
    float not_finite = 0;            // NaN if a new weight is not finite
    // Write out each rounding. Otherwise the compiler may fuse different products in different instantiations, and the forms
    // of master weights, or two builds, would differ in the last bit.
#pragma unroll
    for (int k = 0; k < W; k += 2) {
        float p[2], mk[2], vk[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float gk = __fmul_rn(grad[k + j], grad_scale), m_old = float_at<Moment>(m, k + j);
            mk[j] = __fmaf_rn(f.one_minus_beta1, __fsub_rn(gk, m_old), m_old);
            vk[j] = __fmaf_rn(f.beta2, float_at<Moment>(v, k + j), __fmul_rn(__fmul_rn(f.one_minus_beta2, gk), gk));
            if constexpr (MASTER == MASTER_NONE) { p[j] = float_at<floatX>(param, k + j); }
            if constexpr (MASTER == MASTER_FP32) { p[j] = float_at<float>(master, k + j); }
            if constexpr (MASTER == MASTER_SPLIT) {
                p[j] = split_join(float_at<floatX>(param, k + j), (int16_t)(master.v[k / 2] >> 16 * j));
            }
            const float quotient = adamw_quotient<USUAL>(mk[j], vk[j], sqrt_correction2, inverse, f.eps);
            p[j] = __fmaf_rn(p[j], decay, -__fmul_rn(step_size, quotient));
            least_m = min(least_m, 2 * float_bits(mk[j]) - 1);
            not_finite = __fmaf_rn(p[j], 0.0f, not_finite);
        }
        if constexpr (sizeof(floatX) == 4) { set_floats(param, k, p[0], p[1]); }  // both elements of a word at once
        if constexpr (MASTER == MASTER_FP32) { set_floats(master, k, p[0], p[1]); }
        if constexpr (MASTER == MASTER_SPLIT) { master.v[k / 2] = lower_halves(float_bits(p[0]), float_bits(p[1])); }
#if defined(PRECISION_BF16)
        if constexpr (rounds_weights) {
            const uint32_t r = weight_random.v[k / 2];
            param.v[k / 2] = upper_halves(stochastic_upper<USUAL>(p[0], r & 0xffffu), stochastic_upper<USUAL>(p[1], r >> 16));
        } else {
            param.v[k / 2] = upper_halves(nearest_upper<USUAL>(p[0]), nearest_upper<USUAL>(p[1]));
        }
#elif defined(PRECISION_FP16)
        param.v[k / 2] = pack2(p[0], p[1]);
#endif
        if constexpr (sizeof(Moment) == 2) {
            const uint32_t r0 = random[k / 4].v[k % 4], r1 = random[k / 4].v[k % 4 + 1];
            m.v[k / 2] =
                upper_halves(stochastic_upper<USUAL>(mk[0], r0 & 0xffffu), stochastic_upper<USUAL>(mk[1], r1 & 0xffffu));
            v.v[k / 2] = upper_halves(stochastic_upper<USUAL>(vk[0], r0 >> 16), stochastic_upper<USUAL>(vk[1], r1 >> 16));
        } else {
            set_floats(m, k, mk[0], mk[1]);
            set_floats(v, k, vk[0], vk[1]);
        }
    }
    if constexpr (USUAL) {
        if (f.eps < USUAL_EPS || f.eps > 1 || !(sqrt_correction2 >= USUAL_CORRECTION2 && sqrt_correction2 <= 1) ||
            least_m < 2 * float_bits(USUAL_M) - 1 || not_finite != 0) {
            return false;
        }
    }
    store_words<Moment, W>(t.m, at, m);
    store_words<Moment, W>(t.v, at, v);
    if constexpr (MASTER != MASTER_NONE) { store_words<Master, W>(t.master, at, master); }
    store_words<floatX, W>(t.params, i, param);
    return true;
}

/* Returns the last stretch that begins at or before element i. */
__device__ __forceinline__ int stretch_at(const OptimizerStretch* stretches, int count, size_t i) {
    int below = 0, above = count;
    while (above - below > 1) {
        const int middle = (below + above) / 2;
        if (stretches[middle].first <= i) {
            below = middle;
        } else {
            above = middle;
        }
    }
    return below;
}

/* Updates the vectors at i, i + stride ... below `end`. */
template <typename Grad, MasterKind MASTER, typename Moment>
__device__ __forceinline__ void adamw_vectors(const OptimizerTensors<Grad>& t, size_t i, size_t end, size_t stride,
                                              const StepState* state, const AdamWFactors& f) {
    int k = stretch_at(t.stretches, t.num_stretches, i);
#pragma unroll 1
    for (; i < end; i += stride) {
        while (k + 1 < t.num_stretches && t.stretches[k + 1].first <= i) { k++; }
        if (!adamw_vector<true, Grad, MASTER, Moment>(t, i, t.stretches[k], state, f)) {
            compute_here(i);  // otherwise the compiler keeps what both paths share, and spills registers
            adamw_vector<false, Grad, MASTER, Moment>(t, i, t.stretches[k], state, f);
        }
    }
}

template <typename Grad, MasterKind MASTER, typename Moment>
__global__ void __launch_bounds__(ADAMW_THREADS, 3)
    adamw_kernel(OptimizerTensors<Grad> t, size_t lo, size_t hi, const StepState* state, AdamWFactors f) {
    if (state->verdict != UPDATE_APPLIED) { return; }
    constexpr int W = ADAMW_WIDTH<MASTER, Moment>, turn = ADAMW_THREADS * W;
    const size_t first = lo + (size_t)blockIdx.x * (turn * ADAMW_TURNS), end = first + turn * ADAMW_TURNS;
    adamw_vectors<Grad, MASTER, Moment>(t, first + threadIdx.x * W, end < hi ? end : hi, turn, state, f);
}

/* Applies one AdamW step to elements [lo, hi) of the arena (multiples of OPTIMIZER_VECTOR); does nothing unless state->verdict
 * is UPDATE_APPLIED. bf16_moments: m and v are __nv_bfloat16. */
template <typename Grad>
static void adamw_update_cuda(const OptimizerTensors<Grad>* tensors, size_t lo, size_t hi, const StepState* state,
                              AdamWFactors f, MasterKind master, bool bf16_moments, cudaStream_t stream) {
    if (lo >= hi) { return; }
    assert(lo % OPTIMIZER_VECTOR == 0 && hi % OPTIMIZER_VECTOR == 0 && tensors->state_first % OPTIMIZER_VECTOR == 0);
    assert(tensors->grads_first % OPTIMIZER_VECTOR == 0 && tensors->grads_end % OPTIMIZER_VECTOR == 0);
#define ADAMW_LAUNCH(kind, moment)                                                                                         \
    adamw_kernel<Grad, kind, moment>                                                                                       \
        <<<(unsigned)ceil_div(hi - lo, (size_t)ADAMW_THREADS * ADAMW_TURNS * ADAMW_WIDTH<kind, moment>), ADAMW_THREADS, 0, \
           stream>>>(*tensors, lo, hi, state, f)
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
    switch (master) {
        case MASTER_NONE: ADAMW_LAUNCH_MOMENTS(MASTER_NONE) break;
        case MASTER_FP32: ADAMW_LAUNCH_MOMENTS(MASTER_FP32) break;
        case MASTER_SPLIT: ADAMW_LAUNCH_MOMENTS(MASTER_SPLIT) break;
    }
#endif
#undef ADAMW_LAUNCH_MOMENTS
#undef ADAMW_LAUNCH
    (void)master;
    CUDA_CHECK_LAUNCH("adamw_kernel");
}

#endif
