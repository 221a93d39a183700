/* adamw.cu -- AdamW and the gradient's norm in steps. The formulas stand in llmc/optim/adamw.h.
 *
 *   make -C dev/cuda adamw && build/zoo/adamw [update|split|none|norm|ranks] [N...]
 *
 * An arena of n elements holds tensors of equal length, of which every fourth does not decay. In 16 bits the exact weights are
 * kept apart, in fp32 (`update`), as the lower halves of fp32 (`split`), or not at all (`none`: rounding is stochastic).
 * `ranks` adds up the gradients that several cards have sent to the owner of a part.
 */
#include <map>

#include "llmc/optim/adamw.cuh"
#include "llmc/optim/adamw.h"
#include "dev/cuda/zoo.cuh"

enum { PARAMS, GRADS, M, V, MASTER };  // tensors; in FP32 the parameters are the master weights

static const AdamW HYPER = {1e-3, 0.9, 0.95, 1e-8, 0.1, 1.0f, 10};
static const double X = sizeof(floatX);
static const bool IN_FP32 = sizeof(floatX) == 4;

/* The factors of a step, as the kernels need them. */
struct Factors {
    float beta1, beta2, decay, step_size, sqrt_correction2, eps;
};
static const Factors FACTORS = {(float)HYPER.beta1,
                                (float)HYPER.beta2,
                                (float)(1 - HYPER.lr * HYPER.weight_decay),
                                (float)(HYPER.lr / (1 - pow(HYPER.beta1, (double)HYPER.step))),
                                (float)sqrt(1 - pow(HYPER.beta2, (double)HYPER.step)),
                                (float)HYPER.eps};

/* Elements of a tensor: n / tensors, in whole vectors; the last one has the rest. */
static size_t tensor_length(const Case& c) { return c.n[0] / c.n[1] / OPTIMIZER_VECTOR * OPTIMIZER_VECTOR; }
static size_t first_of(const Case& c, size_t k) { return k < c.n[1] ? k * tensor_length(c) : c.n[0]; }
static bool decays(size_t k) { return k % 4 != 0; }

/* The arrays of a tensor, or of all. p: exact weights */
struct Arrays {
    floatX* params;
    const floatX* g;
    float *m, *v, *p;
    size_t n;
};
static Arrays arrays(const Case& c, size_t first, size_t end) {
    return {c.at<floatX>(PARAMS) + first,
            c.at<floatX>(GRADS) + first,
            c.at<float>(M) + first,
            c.at<float>(V) + first,
            (IN_FP32 ? (float*)c.at<floatX>(PARAMS) : c.at<float>(MASTER)) + first,
            end - first};
}

#define FOR_EACH_ELEMENT(i) if (const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < t.n)

// ---------------------------------------------------------------------------------------------------------------------
// update 1: a kernel an operation, as a framework runs it. Each reads its arrays from memory and writes one back.
__global__ void first_moment_kernel(Arrays t, Factors f) {
    FOR_EACH_ELEMENT(i) { t.m[i] += (1 - f.beta1) * (to_float(t.g[i]) - t.m[i]); }
}
__global__ void second_moment_kernel(Arrays t, Factors f) {
    FOR_EACH_ELEMENT(i) { t.v[i] = f.beta2 * t.v[i] + (1 - f.beta2) * to_float(t.g[i]) * to_float(t.g[i]); }
}
__global__ void decay_kernel(Arrays t, float decay) {
    FOR_EACH_ELEMENT(i) { t.p[i] *= decay; }
}
__global__ void move_kernel(Arrays t, Factors f) {
    FOR_EACH_ELEMENT(i) { t.p[i] -= f.step_size * t.m[i] / (sqrtf(t.v[i]) / f.sqrt_correction2 + f.eps); }
}
__global__ void round_kernel(Arrays t) {
    FOR_EACH_ELEMENT(i) { t.params[i] = from_float<floatX>(t.p[i]); }
}

static void update1(const Case& c, cudaStream_t stream) {
    for (size_t k = 0; k < c.n[1]; k++) {
        const Arrays t = arrays(c, first_of(c, k), first_of(c, k + 1));
        const unsigned blocks = blocks_for(t.n, 256);
        first_moment_kernel<<<blocks, 256, 0, stream>>>(t, FACTORS);
        second_moment_kernel<<<blocks, 256, 0, stream>>>(t, FACTORS);
        if (decays(k)) { decay_kernel<<<blocks, 256, 0, stream>>>(t, FACTORS.decay); }
        move_kernel<<<blocks, 256, 0, stream>>>(t, FACTORS);
        if (!IN_FP32) { round_kernel<<<blocks, 256, 0, stream>>>(t); }
    }
}

// bytes of the operations: 8 + X, 8 + X, 8 for three tensors of four, 16, and in 16 bits 4 + X
static Work predict_update1(const Case& c) {
    const double bytes = 38 + 2 * X + (IN_FP32 ? 0 : 4 + X), kernels = IN_FP32 ? 3.75 : 4.75;
    return {(double)c.n[0] * bytes / 32, 0, 0, 0, kernels * (double)c.n[1]};
}

// update 2: a launch a tensor, which does all operations on an element in registers. Small tensors don't fill the card.

__device__ __forceinline__ void update_element(const Arrays& t, size_t i, const Factors& f, float decay) {
    const float g = to_float(t.g[i]), m = t.m[i] + (1 - f.beta1) * (g - t.m[i]), v = f.beta2 * t.v[i] + (1 - f.beta2) * g * g;
    const float p = t.p[i] * decay - f.step_size * m / (sqrtf(v) / f.sqrt_correction2 + f.eps);
    t.m[i] = m, t.v[i] = v, t.p[i] = p;
    if (sizeof(floatX) < 4) { t.params[i] = from_float<floatX>(p); }
}

__global__ void update2_kernel(Arrays t, Factors f, float decay) {
    FOR_EACH_ELEMENT(i) { update_element(t, i, f, decay); }
}

static void update2(const Case& c, cudaStream_t stream) {
    for (size_t k = 0; k < c.n[1]; k++) {
        const Arrays t = arrays(c, first_of(c, k), first_of(c, k + 1));
        update2_kernel<<<blocks_for(t.n, 256), 256, 0, stream>>>(t, FACTORS, decays(k) ? FACTORS.decay : 1);
    }
}

static Work predict_update2(const Case& c) { return {c.bytes / 32, 0, 60 * (double)c.n[0], 0, (double)c.n[1]}; }

// update 3: one launch for the whole arena. A thread finds the tensor of its element, which says whether it decays.
__global__ void update3_kernel(Arrays t, Factors f, unsigned length, unsigned tensors) {
    FOR_EACH_ELEMENT(i) {
        const unsigned k = min((unsigned)i / length, tensors - 1);
        update_element(t, i, f, k % 4 != 0 ? f.decay : 1);
    }
}

static void update3(const Case& c, cudaStream_t stream) {
    const Arrays t = arrays(c, 0, c.n[0]);
    update3_kernel<<<blocks_for(t.n, 256), 256, 0, stream>>>(t, FACTORS, (unsigned)tensor_length(c), (unsigned)c.n[1]);
}

// A division and a root by IEEE 754 are some 20 instructions each, the rest as many.
static Work predict_update3(const Case& c) { return {c.bytes / 32, 0, 80 * (double)c.n[0]}; }

// ---------------------------------------------------------------------------------------------------------------------
// 4 and 5, the trainer's: 16 bytes a thread; quotients and roots without branches. `split` keeps 2 bytes a weight instead of 4.
// `none` keeps none, and moments in bf16.
/* What the trainer's kernels read besides a case's tensors, made once a shape. */
struct Fixed {
    StepState* state;
    OptimizerStretch* stretches;
    void* scratch;  // of the norm
};
static Fixed fixed(const Case& c) {
    static std::map<std::pair<size_t, size_t>, Fixed> made;
    Fixed& f = made[{c.n[0], c.n[1]}];
    if (f.state) { return f; }
    StepState state;
    memset((void*)&state, 0, sizeof state);
    state.step = HYPER.step;
    state.grad_scale = state.loss_scale = 1;
    state.step_size = FACTORS.step_size, state.sqrt_correction2 = FACTORS.sqrt_correction2, state.decay = FACTORS.decay;
    std::vector<OptimizerStretch> stretches;
    for (size_t k = 0; k < c.n[1]; k++) { stretches.push_back({first_of(c, k), NULL, (uint32_t)k, decays(k)}); }
    CUDA_CHECK(cudaMalloc((void**)&f.state, sizeof state));
    CUDA_CHECK(cudaMalloc((void**)&f.stretches, (1 + c.n[1]) * sizeof stretches[0]));
    CUDA_CHECK(cudaMalloc(&f.scratch, norm_square_scratch_cuda()));
    CUDA_CHECK(cudaMemcpy(f.state, &state, sizeof state, cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaMemcpy(f.stretches, stretches.data(), c.n[1] * sizeof stretches[0], cudaMemcpyHostToDevice));
    return f;
}

template <MasterKind KIND>
static void trainer(const Case& c, cudaStream_t stream) {
    const Fixed f = fixed(c);
    const bool low = KIND == MASTER_NONE && !IN_FP32;
    Hyperparameters hyper;
    memset(&hyper, 0, sizeof hyper);
    hyper.beta1 = HYPER.beta1, hyper.beta2 = HYPER.beta2, hyper.eps = HYPER.eps;
    void *m = low ? (void*)c.at<floatX>(M) : c.at<float>(M), *v = low ? (void*)c.at<floatX>(V) : c.at<float>(V);
    void* master = KIND == MASTER_NONE ? NULL : KIND == MASTER_SPLIT ? (void*)c.at<char>(MASTER) : c.at<float>(MASTER);
    const OptimizerTensors<floatX> t = {c.at<floatX>(PARAMS), c.at<floatX>(GRADS), 0, c.n[0], master, m, v, 0,
                                        f.stretches,          (int)c.n[1]};
    adamw_update_cuda(&t, 0, c.n[0], f.state, adamw_factors(&hyper, 42), KIND, low, stream);
}

static Work predict_trainer(const Case& c) { return {c.bytes / 32, 0, 60 * (double)c.n[0]}; }

// ---------------------------------------------------------------------------------------------------------------------
// norm 1: each warp adds its sum to one number in memory, atomically. The additions wait for each other, in any order.
enum { NORM_GRADS, NORM };  // tensors of the ladder `norm`: the sum of squares as a float, and what the float lacks

__global__ void norm1_kernel(double* sum, const floatX* g, size_t n) {
    constexpr int W = VECTOR<floatX>;
    const size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    float square = 0;
    if (i < n) {
        const Vec<floatX, W> x = load_vec<W>(g + i);
#pragma unroll
        for (int k = 0; k < W; k++) { square += to_float(x.v[k]) * to_float(x.v[k]); }
    }
    const double all = warp_sum((double)square);
    if (threadIdx.x % 32 == 0) { atomicAdd(sum, all); }
}

/* Hands the sum over and clears it. */
__global__ void norm_take_kernel(float* out, StepState* state) {
    out[0] = (float)state->norm_square;
    out[1] = (float)(state->norm_square - (double)out[0]);
    state->norm_square = 0;
}

static void norm1(const Case& c, cudaStream_t stream) {
    StepState* state = fixed(c).state;
    const unsigned blocks = blocks_for(c.n[0], 256 * VECTOR<floatX>);
    norm1_kernel<<<blocks, 256, 0, stream>>>(&state->norm_square, c.at<floatX>(NORM_GRADS), c.n[0]);
    norm_take_kernel<<<1, 1, 0, stream>>>(c.at<float>(NORM), state);
}

// additions to one address, of a double: one every 2 clocks of the L2 cache, which is as slow as 256 lanes of an SM
static Work predict_norm1(const Case& c) {
    const double additions = (double)c.n[0] / (32 * VECTOR<floatX>);
    return {c.bytes / 32, 0, additions * 2 * 128 * sms(), 0, 2};
}

// norm 2, the trainer's: each block writes its sum, and one block adds these up in their order
static void norm2(const Case& c, cudaStream_t stream) {
    const Fixed f = fixed(c);
    NormSums sums = norm_sums(f.scratch);
    norm_square_cuda(&sums, c.at<floatX>(NORM_GRADS), c.n[0], stream);
    norm_finish_cuda(f.state, sums.partial[0], sums.count[0], stream);
    norm_take_kernel<<<1, 1, 0, stream>>>(c.at<float>(NORM), f.state);
}

static Work predict_norm2(const Case& c) { return {c.bytes / 32, 0, 0, 0, 3, 4096 * 8 / 32}; }

// ---------------------------------------------------------------------------------------------------------------------
// ranks 1: a launch a rank, which adds its part to the sum in memory. In rank order, so the bits are the same in every run.
enum { PARTS, SUM, PARTIALS };  // tensors of the ladder `ranks`: parts (ranks, n); scratch for sums of squares

template <bool FIRST>
__global__ void ranks1_kernel(float* sum, const floatX* part, size_t n) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { sum[i] = (FIRST ? 0 : sum[i]) + to_float(part[i]); }
}

static void ranks1(const Case& c, cudaStream_t stream) {
    for (size_t r = 0; r < c.n[1]; r++) {
        auto* kernel = r == 0 ? ranks1_kernel<true> : ranks1_kernel<false>;
        kernel<<<blocks_for(c.n[0], 256), 256, 0, stream>>>(c.at<float>(SUM), c.at<floatX>(PARTS) + r * c.n[0], c.n[0]);
    }
}

static Work predict_ranks1(const Case& c) {
    const double n = (double)c.n[0], ranks = (double)c.n[1];
    return {n * (ranks * X + (2 * ranks - 1) * 4) / 32, 0, 0, 0, ranks};
}

// ranks 2, the trainer's: a thread adds all parts of its elements in registers. It also leaves the sum of squares, for the
// norm.
static void ranks2(const Case& c, cudaStream_t stream) {
    ordered_sum_cuda(c.at<float>(SUM), (double*)c.at<char>(PARTIALS), c.at<floatX>(PARTS), IN_FP32, (int)c.n[1], c.n[0], false,
                     stream);
}

static Work predict_ranks2(const Case& c) { return {c.bytes / 32}; }

static void make_ranks(Case& c) {
    c.tensor<floatX>("parts", READ, c.n[1], c.n[0]);
    c.tensor<float>("sum", WRITE, 1, c.n[0]);
    c.tensor<char>("partials", SCRATCH, 1, SUM_BLOCKS * sizeof(double));
    c.bytes = (double)c.n[0] * ((double)c.n[1] * X + 4);
}
static void oracle_ranks(Case& c) {
    std::fill(c[SUM], c[SUM] + c.n[0], 0.0f);
    for (size_t i = 0; i < c.n[0] * c.n[1]; i++) { c[SUM][i % c.n[0]] += c[PARTS][i]; }
}

// ---------------------------------------------------------------------------------------------------------------------

template <MasterKind KIND>
static void make(Case& c) {
    const size_t n = c.n[0];
    const bool low = KIND == MASTER_NONE;
    const float units = low ? 2 : 1;
    c.tensor<floatX>("params", CHANGE, 1, n, 0.02f, 0).units = units;
    c.tensor<floatX>("grads", READ, 1, n, 0.1f);
    if (low) {
        c.tensor<floatX>("m", CHANGE, 1, n, 0.1f, 0).units = units;
        c.tensor<floatX>("v", CHANGE, 1, n, -0.1f, 0).units = units;
    } else {
        c.tensor<float>("m", CHANGE, 1, n, 0.1f);
        c.tensor<float>("v", CHANGE, 1, n, -0.1f);
    }
    if (KIND == MASTER_FP32 && !IN_FP32) { c.tensor<float>("master", CHANGE, 1, n, 0.02f); }
    if (KIND == MASTER_SPLIT) { c.tensor<char>("low", SCRATCH, 1, 2 * n, -1); }
    const double weights = KIND == MASTER_FP32 ? (IN_FP32 ? 8 : 8 + X) : KIND == MASTER_SPLIT ? 8 : 4;
    c.bytes = (double)n * (X + weights + (low ? 8 : 16));
}

/* Returns by how much a weight without decay moves. */
static float step_of(float m, float v, float g) {
    const float m1 = m + (1 - FACTORS.beta1) * (g - m), v1 = FACTORS.beta2 * v + (1 - FACTORS.beta2) * g * g;
    return FACTORS.step_size * m1 / (sqrtf(v1) / FACTORS.sqrt_correction2 + FACTORS.eps);
}

static void values(Case& c) {  // second moments are squares; some exact weights are as large as their step
    Floats &m = c.tensors[M].start, &v = c.tensors[V].start, &g = c.tensors[GRADS].start;
    const bool master = c.tensors.size() > MASTER && c.tensors[MASTER].role == CHANGE;
    for (size_t i = 0; i < v.size(); i++) {
        v[i] = to_float(from_float<floatX>(v[i] * v[i]));
        if (master && i % 61 == 0) { c.tensors[MASTER].start[i] = step_of(m[i], v[i], g[i]); }
    }
}

/* The weights before the step are the master weights, or both halves joined. Fresh memory, the lower half, holds -1.
 *
 * A weight and its step may cancel, and so may a moment and its gradient. Then the rest is far smaller than both, and their
 * roundings in fp32 may exceed its half unit in 16 bits. So the oracle leaves the size of the numbers that it added up. It
 * rounds some 10 times, the trainer's kernel 16 times, since its quotient and root are off by up to 2 units. */
static void oracle(Case& c) {
    Floats p = c.tensors[PARAMS].start;
    const Floats &m = c.tensors[M].start, &v = c.tensors[V].start, &g = c.tensors[GRADS].start;
    const bool apart = c.tensors.size() > MASTER, split = apart && c.tensors[MASTER].role == SCRATCH;
    if (split) {
        for (float& x : p) { x = split_join(x, -1); }
    } else if (apart) {
        p = c.tensors[MASTER].start;
    }
    for (size_t i = 0; i < p.size(); i++) {
        c.tensors[PARAMS].terms.push_back(fabsf(p[i]) + step_of(fabsf(m[i]), v[i], fabsf(g[i])));
        c.tensors[M].terms.push_back(fabsf(m[i]) + fabsf(g[i]));
    }
    for (size_t k = 0; k < c.n[1]; k++) {
        const size_t first = first_of(c, k);
        AdamW hyper = HYPER;
        if (!decays(k)) { hyper.weight_decay = 0; }
        adamw_update(&p[first], c[GRADS] + first, c[M] + first, c[V] + first, first_of(c, k + 1) - first, &hyper);
    }
    c.tensors[PARAMS].host = p;
    if (apart && !split) { c.tensors[MASTER].host = p; }
}

static void make_norm(Case& c) {
    c.tensor<floatX>("grads", READ, 1, c.n[0]);
    c.tensor<float>("norm", WRITE, 1, 2);
    c.bytes = (double)c.n[0] * X;
}
static void oracle_norm(Case& c) {
    double sum = 0;
    for (size_t i = 0; i < c.n[0]; i++) { sum += (double)c[NORM_GRADS][i] * (double)c[NORM_GRADS][i]; }
    c[NORM][0] = (float)sum, c[NORM][1] = (float)(sum - (double)c[NORM][0]);
}

static const Shape odd = {{104, 3}}, tail = {{1000, 7}}, wide = {{12296, 5}}, classic = {{6291456, 64}},
                   large = {{268435456, 256}};

#include "dev/cuda/main.cuh"

int main(int argc, char** argv) {
    constexpr MasterKind EXACT = sizeof(floatX) == 4 ? MASTER_NONE : MASTER_FP32;
    const Ladder u("update", "n,tensors", make<MASTER_FP32>, values, oracle, {odd, tail, wide}, {classic}, {large},
                   {{1, "a kernel an operation", 0, update1, predict_update1},
                    {2, "a tensor a launch", 0, update2, predict_update2},
                    {3, "flat: all tensors in one launch", 0, update3, predict_update3},
                    {4, "16 bytes a thread, no branches", BOLD, trainer<EXACT>, predict_trainer}});
    const Ladder s("split", "n,tensors", make<MASTER_SPLIT>, values, oracle, {odd, tail, wide}, {classic}, {large},
                   {{4, "lower halves of master weights", BOLD | ONLY_BF16, trainer<MASTER_SPLIT>, predict_trainer}});
    const Ladder n("none", "n,tensors", make<MASTER_NONE>, values, oracle, {odd, tail, wide}, {classic}, {large},
                   {{5, "no master weights, stochastic", BOLD | ONLY_BF16, trainer<MASTER_NONE>, predict_trainer}});
    const Ladder g("norm", "n", make_norm, NULL, oracle_norm, {{{1000}}, {{4104}}, {{40000}}}, {{{6291456}}}, {{{1 << 30}}},
                   {{1, "atomic additions of warps", ATOMICS, norm1, predict_norm1},
                    {2, "a sum a block, added in order", BOLD, norm2, predict_norm2}});
    const Ladder r("ranks", "n,ranks", make_ranks, NULL, oracle_ranks, {{{1000, 3}}, {{4104, 8}}, {{40000, 2}}},
                   {{{6291456, 8}}}, {{{1 << 27, 8}}},
                   {{1, "a launch a rank", 0, ranks1, predict_ranks1},
                    {2, "all ranks in registers, in order", BOLD, ranks2, predict_ranks2}});
    return zoo(argc, argv, "adamw", {u, s, n, g, r});
}
