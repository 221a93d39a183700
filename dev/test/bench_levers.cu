/* bench_levers.cu -- measures what a faster step could win: energy of each kind of work, fp8 products, AdamW beside products,
 * earlier starts of kernels.
 *
 *   make build/bench_levers_cu && build/bench_levers_cu power|fp8|adamw|launches|attention
 *
 * dev/bench_levers.py runs all five.
 *
 * power      runs one kind of work at a time for seconds, as a block of the model launches it. Operations are those really done
 *            (attention backward: seven products, or five in one walk, the causal half); bytes are each input once, each output
 *            once. "tensor" is the share of the tensor cores' operations at the clock of that moment: 4096 a cycle and
 *            multiprocessor in bf16.
 * fp8        runs the block's products in bf16 and, by each of cuBLASLt's ways to scale, in e4m3. cuBLASLt multiplies fp8 only
 *            as A B^T, so dx takes W^T and dW takes dout^T and x^T. Each line uses the fastest of the heuristic's 8 algorithms.
 * adamw      runs AdamW on a few multiprocessors while products use the others, and both one after the other on all.
 * launches   runs chains of kernels in a graph, each of which starts after the one before, or early ("programmatic dependent
 *            launch": its blocks come when the one before has started its last ones, and wait for its end).
 * attention  launches each attention kernel once a shape, for a profiler to look at.
 *
 * All data is random, and more than the L2 cache holds. A measurement settles first, then runs back to back. Energy and clock
 * come from NVML; watts are the energy between two changes of its counter over the time between them. Columns of a line are
 * separated by " | "; without NVML they hold nan.
 */
#include <string>
#include <thread>
#include <vector>

#include "llmc/adamw.cuh"
#include "llmc/attention.cuh"
#include "llmc/config.h"
#include "llmc/rmsnorm.cuh"
#include "llmc/rope.cuh"
#include "llmc/rope.h"
#include "llmc/swiglu.cuh"
#include "bench_common.cuh"  // defines: meter, run_for, take, product_key, choose

#ifndef PRECISION_BF16
#error "bench_levers compares with bf16: build with PRECISION=BF16"
#endif

// ---------------------------------------------------------------------------------------------------------------------
// models

struct Model {
    const char* name;
    const char* preset;
    int B, T;
};
static const Model models[] = {{"126M", "d12", 64, 1024}, {"1B", "llama3.2-1b", 16, 2048}, {"8B", "llama3.1-8b", 1, 8192}};
enum { MODEL_126M, MODEL_1B, MODEL_8B };

struct Linear {
    const char* name;
    int C, OC;
};
enum { BLOCK_LINEARS = 4 };

static ModelConfig config_of(const Model& m) {
    ModelConfig c;
    if (!config_preset(&c, m.preset, 32768)) { die("bench_levers: no preset %s", m.preset); }
    return c;
}

/* Returns the linear layers of a block. */
static std::vector<Linear> linears_of(const ModelConfig& c) {
    const int C = c.hidden_size, F = c.intermediate_size;
    return {{"qkv", C, qkv_width(&c)}, {"o", q_width(&c), C}, {"gate_up", C, 2 * F}, {"down", F, C}};
}

/* Returns the weights of a block's linear layers. */
static size_t block_weights(const ModelConfig& c) {
    size_t n = 0;
    for (const Linear& l : linears_of(c)) { n += (size_t)l.C * l.OC; }
    return n;
}

/* Random parameters of one block with their gradients and AdamW's states, and a StepState that lets AdamW update. */
struct Update {
    AdamWTensors<floatX> t;
    size_t n;
    StepState* state;
    StepHyper hyper;
    MasterKind master;
    bool bf16_moments;
};

static Update take_update(size_t n, MasterKind master, bool bf16_moments) {
    Update u;
    memset(&u, 0, sizeof u);
    StepState state;
    memset(&state, 0, sizeof state);
    state.loss_scale = state.grad_scale = state.sqrt_correction2 = state.decay = 1;
    state.step_size = 1e-3f;
    state.verdict = UPDATE_APPLIED;
    u.state = take<StepState>(1);
    CUDA_CHECK(cudaMemcpy(u.state, &state, sizeof state, cudaMemcpyHostToDevice));
    const AdamWStretch stretch = {0, NULL, 0, 1};
    AdamWStretch* stretches = take<AdamWStretch>(1);
    CUDA_CHECK(cudaMemcpy(stretches, &stretch, sizeof stretch, cudaMemcpyHostToDevice));
    u.n = n, u.master = master, u.bf16_moments = bf16_moments;
    u.hyper.beta1 = 0.9, u.hyper.beta2 = 0.95, u.hyper.eps = 1e-8;
    u.t.params = take_random<floatX>(n);
    u.t.grads = take_random<floatX>(n);
    u.t.grads_end = n;
    u.t.master = take_random<float>(n);
    u.t.m = bf16_moments ? (void*)take_random<__nv_bfloat16>(n) : (void*)take_random<float>(n);
    u.t.v = take<float>(n);
    CUDA_CHECK(cudaMemset(u.t.v, 0, n * sizeof(float)));
    u.t.stretches = stretches;
    u.t.num_stretches = 1;
    return u;
}

/* Returns the bytes that an update moves. */
static double update_bytes(const Update& u) {
    const double master = u.master == MASTER_FP32 ? 8 + 2 : 4 + 4, moments = u.bf16_moments ? 8 : 16;
    return (double)u.n * (2 + master + moments);
}

static void update_launch(const Update& u, cudaStream_t stream) {
    adamw_update_cuda(&u.t, 0, u.n, u.state, &u.hyper, u.master, u.bf16_moments, 42, stream);
}

/* The tensors of attention at a model's shape. */
struct Attention {
    AttentionShape shape;
    size_t N, qkv_pitch, out_pitch;
    floatX *qkv, *out, *dout, *dqkv;
    float* lse;
    void* scratch;
};

static Attention take_attention(const Model& m) {
    const ModelConfig c = config_of(m);
    Attention a;
    a.shape = attention_shape(&c, m.B, m.T);
    a.N = (size_t)m.B * m.T;
    a.qkv_pitch = (size_t)qkv_width(&c), a.out_pitch = (size_t)q_width(&c);
    a.qkv = take_random<floatX>(a.N * a.qkv_pitch);
    a.dqkv = take<floatX>(a.N * a.qkv_pitch);
    a.out = take<floatX>(a.N * a.out_pitch);
    a.dout = take_random<floatX>(a.N * a.out_pitch);
    a.lse = take<float>(a.N * a.shape.NH);
    a.scratch = take<char>(attention_backward_scratch_cuda(a.shape));
    return a;
}

static void attention_forward_launch(const Attention& a) {
    attention_forward_cuda(a.out, a.lse, a.qkv, NULL, a.shape, a.qkv_pitch, a.out_pitch, 0);
}
static void attention_backward_launch(const Attention& a) {
    attention_backward_cuda(a.dqkv, a.scratch, a.dout, a.out, a.lse, a.qkv, NULL, NULL, a.shape, a.qkv_pitch, a.out_pitch, 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// power: watts of each kind of work

constexpr double POWER_SECONDS = 3;

/* Keeps every multiprocessor awake for about 10 ms, and idle. */
__global__ void awake_kernel() {
    for (const long long start = clock64(); clock64() - start < 15000000;) { __nanosleep(1000); }
}

/* Measures a kind of work. products, attention: operations of a launch in each   bytes: moved by a launch */
static void measure_power(const char* name, double products, double attention, double bytes,
                          const std::function<void()>& launch) {
    const Rate r = run_for(POWER_SECONDS, launch);
    const double cycle = 4096.0 * device_attribute(cudaDevAttrMultiProcessorCount) * r.mhz * 1e6;  // operations a second
    printf(
        "power | %-26s | %9.4f ms | %7.1f TFLOP/s products | %7.1f TFLOP/s attention | %7.1f GB/s | %6.1f W | %6.0f MHz | "
        "%5.1f %% tensor\n",
        name, r.ms, products / r.ms * 1e-9, attention / r.ms * 1e-9, bytes / r.ms * 1e-6, r.watts, r.mhz,
        100 * (products + attention) / (r.ms * 1e-3) / cycle);
    fflush(stdout);
}

/* The 12 products of a block as cuBLASLt's first choice runs them, and the fastest alone. */
static void power_products(const Model& m) {
    const ModelConfig c = config_of(m);
    const std::vector<Linear> linears = linears_of(c);
    const size_t N = (size_t)m.B * m.T, F = (size_t)c.intermediate_size, W = block_weights(c);
    floatX *x = take_random<floatX>(N * F), *y = take_random<floatX>(N * 2 * F), *w = take_random<floatX>(W);
    floatX *dx = take<floatX>(N * F), *out = take<floatX>(N * 2 * F), *dw = take<floatX>(W);
    MatmulContext* ctx = take_matmul();
    double bytes = 0;
    for (const Linear& l : linears) { bytes += 3.0 * sizeof(floatX) * (N * (size_t)(l.C + l.OC) + (size_t)l.C * l.OC); }
    const auto launch = [&] {
        for (const Linear& l : linears) {
            const Operand lx = operand(x, l.C), lw = operand(w, l.C), ly = operand(y, l.OC);
            matmul_forward_cuda(ctx, out, lx, lw, (const floatX*)NULL, N, l.C, l.OC, l.OC, 0);
            matmul_backward_input_cuda(ctx, dx, ly, lw, N, l.C, l.OC, l.C, 0);
            matmul_backward_weight_cuda(ctx, dw, ly, lx, N, l.C, l.OC, false, 0);
        }
    };
    const std::string name = m.name;
    measure_power((name + " products").c_str(), 6.0 * N * W, 0, bytes, launch);
    size_t need = 0, each[3];
    for (int i = 0; i < ctx->num_plans; i++) { need = size_max(need, matmul_timing_bytes(&ctx->plans[i].key, each)); }
    char* scratch = take<char>(need);
    for (int i = 0; i < ctx->num_plans; i++) { matmul_choose_alone(ctx, &ctx->plans[i], scratch, need, NULL, 0); }
    measure_power((name + " products, fastest alone").c_str(), 6.0 * N * W, 0, bytes, launch);
    matmul_destroy(ctx);
}

static void power_attention(const Model& m) {
    const Attention a = take_attention(m);
    const AttentionShape& s = a.shape;
    const double forward = 2.0 * s.B * s.T * (double)s.T * s.NH * s.HD, X = sizeof(floatX);  // two products, the causal half
    const double in = X * a.N * a.qkv_pitch, out = X * a.N * a.out_pitch;
    const std::string name = m.name;
    measure_power((name + " attention").c_str(), 0, forward, in + out, [&] { attention_forward_launch(a); });
    const bool walks = attention_choose(ATTENTION_AUTO, s.HD) == ATTENTION_WGMMA &&
                       attention_walks(s.B, attention_args(s, a.qkv_pitch, a.out_pitch, NULL));
    measure_power((name + " attention backward").c_str(), 0, (walks ? 2.5 : 3.5) * forward, 2 * in + 2 * out,
                  [&] { attention_backward_launch(a); });
}

/* The memory-bound passes of a block: RMSNorm, SwiGLU and RoPE, forward and backward. */
static void power_memory(const Model& m) {
    const ModelConfig c = config_of(m);
    const size_t N = (size_t)m.B * m.T, C = (size_t)c.hidden_size, F = (size_t)c.intermediate_size;
    const size_t qkv = (size_t)qkv_width(&c), rotated = (size_t)(q_width(&c) + kv_width(&c));
    const AttentionShape shape = attention_shape(&c, m.B, m.T);
    const RowShape rows = {N, (int)C, C};
    floatX *x = take_random<floatX>(N * C), *dout = take_random<floatX>(N * C), *w = take_random<floatX>(C);
    floatX *out = take<floatX>(N * C), *dx = take_random<floatX>(N * C), *heads = take_random<floatX>(N * qkv);
    floatX *gate_up = take_random<floatX>(2 * N * F), *dgate_up = take<floatX>(2 * N * F);
    floatX *act = take<floatX>(N * F), *dact = take_random<floatX>(N * F);
    float *rstd = take<float>(N), *dw = take_random<float>(C), *table = take<float>((size_t)m.T * c.head_dim);
    std::vector<float> cos_sin((size_t)m.T * c.head_dim);
    rope_table(cos_sin.data(), m.T, &c);
    CUDA_CHECK(cudaMemcpy(table, cos_sin.data(), cos_sin.size() * sizeof(float), cudaMemcpyHostToDevice));
    void* scratch = take<char>(rmsnorm_backward_scratch_cuda(N, (int)C));
    const double bytes = sizeof(floatX) * (double)N * (6 * C + 8 * F + 4 * rotated);
    measure_power((std::string(m.name) + " norm, swiglu, rope").c_str(), 0, 0, bytes, [&] {
        rmsnorm_forward_cuda(out, rstd, x, w, rows, 1e-5f, 0);
        rmsnorm_backward_cuda(dx, dw, scratch, dout, x, w, rstd, rows, 0);
        swiglu_forward_cuda(act, gate_up, N, (int)F, 2 * F, F, 0);
        swiglu_backward_cuda(dgate_up, NULL, dact, gate_up, N, (int)F, 2 * F, F, 0);
        rope_forward_cuda(heads, NULL, table, 0, shape, qkv, 0);
        rope_backward_cuda(heads, NULL, table, 0, shape, qkv, 0);
    });
    const Update u = take_update(4 * block_weights(c), MASTER_FP32, false);
    measure_power((std::string(m.name) + " adamw").c_str(), 0, 0, update_bytes(u), [&] { update_launch(u, 0); });
}

static void bench_power() {
    measure_power("idle", 0, 0, 0, [] { std::this_thread::sleep_for(std::chrono::milliseconds(5)); });
    const int processors = device_attribute(cudaDevAttrMultiProcessorCount);
    measure_power("awake, no work", 0, 0, 0, [&] {
        awake_kernel<<<processors, 32>>>();
        CUDA_CHECK_LAUNCH("awake_kernel");
    });
    const size_t n = (size_t)1 << 30;
    char *from = (char*)take_random<floatX>(n / sizeof(floatX)), *to = take<char>(n);
    measure_power("copy", 0, 0, 2.0 * (double)n,
                  [&] { CUDA_CHECK(cudaMemcpyAsync(to, from, n, cudaMemcpyDeviceToDevice, 0)); });
    for (int i : {MODEL_126M, MODEL_1B}) {
        power_products(models[i]);
        power_attention(models[i]);
        power_memory(models[i]);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// fp8: cuBLASLt's ways to scale

template <>
__host__ __device__ __forceinline__ __nv_fp8_e4m3 from_float<__nv_fp8_e4m3>(float x) {
    return __nv_fp8_e4m3(x);
}

constexpr double FP8_SECONDS = 0.3;
/* A way to multiply: the type, how A's and B's values are scaled, and whether sums stay in the tensor cores' own precision
 * until the end. */
struct Way {
    const char* name;
    cudaDataType_t type;
    cublasLtMatmulMatrixScale_t a, b;
    int8_t fast;
};
#define SCALE(name) CUBLASLT_MATMUL_MATRIX_SCALE_##name
static const Way ways[] = {
    {"bf16", CUDA_R_16BF, SCALE(SCALAR_32F), SCALE(SCALAR_32F), 0},
    {"tensor, fast", CUDA_R_8F_E4M3, SCALE(SCALAR_32F), SCALE(SCALAR_32F), 1},
    {"tensor", CUDA_R_8F_E4M3, SCALE(SCALAR_32F), SCALE(SCALAR_32F), 0},
    {"row, fast", CUDA_R_8F_E4M3, SCALE(OUTER_VEC_32F), SCALE(OUTER_VEC_32F), 1},
    {"row", CUDA_R_8F_E4M3, SCALE(OUTER_VEC_32F), SCALE(OUTER_VEC_32F), 0},
    {"1x128 128x128", CUDA_R_8F_E4M3, SCALE(VEC128_32F), SCALE(BLK128x128_32F), 0},
    {"1x128 1x128", CUDA_R_8F_E4M3, SCALE(VEC128_32F), SCALE(VEC128_32F), 0},
};
// shown once to run or to be refused
static const Way rare_ways[] = {
    {"128x128 1x128", CUDA_R_8F_E4M3, SCALE(BLK128x128_32F), SCALE(VEC128_32F), 0},
    {"128x128 128x128", CUDA_R_8F_E4M3, SCALE(BLK128x128_32F), SCALE(BLK128x128_32F), 0},
    {"1x128 128x128, fast", CUDA_R_8F_E4M3, SCALE(VEC128_32F), SCALE(BLK128x128_32F), 1},
    {"1x128 1x128, fast", CUDA_R_8F_E4M3, SCALE(VEC128_32F), SCALE(VEC128_32F), 1},
    {"row tensor", CUDA_R_8F_E4M3, SCALE(OUTER_VEC_32F), SCALE(SCALAR_32F), 0},
};

/* What the fp8 products share: A and B at their largest, D, and scales, all of one value. */
struct Fp8Buffers {
    char *a, *b, *d;
    float* scales;
};

/* Sets the way's scales on a plan's descriptor. The factors are exchanged, see matmul.cuh. */
static cublasStatus_t set_way(const MatmulPlan* p, const Way& way, const float* scales) {
    const int32_t first = way.b, second = way.a;
    const struct {
        cublasLtMatmulDescAttributes_t name;
        const void* value;
        size_t bytes;
    } attributes[] = {
        {CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &first, sizeof first},
        {CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &second, sizeof second},
        {CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &scales, sizeof scales},
        {CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &scales, sizeof scales},
        {CUBLASLT_MATMUL_DESC_FAST_ACCUM, &way.fast, sizeof way.fast},
    };
    for (const auto& a : attributes) {
        const cublasStatus_t status = cublasLtMatmulDescSetAttribute(p->product, a.name, a.value, a.bytes);
        if (status != CUBLAS_STATUS_SUCCESS) { return status; }
    }
    return CUBLAS_STATUS_SUCCESS;
}

/* Returns why the heuristic has nothing for a plan. */
static const char* refusal(const MatmulContext* ctx, const MatmulPlan* p) {
    cublasLtMatmulHeuristicResult_t result;
    int found = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(ctx->handle, p->product, p->a, p->b, p->c, p->d, ctx->preference, 1, &result, &found);
    return status != CUBLAS_STATUS_SUCCESS ? cublasLtGetStatusString(status) : found == 0 ? "no algorithm" : "does not run";
}

/* Measures one product in one way. key: as bf16 lays it out; fp8 is always A B^T. */
static void measure_product(MatmulContext* ctx, const char* name, const MatmulKey& key, const Way& way, const Fp8Buffers& f) {
    const size_t M = (size_t)key.v[KEY_M], N = (size_t)key.v[KEY_N], K = (size_t)key.v[KEY_K];
    const bool bf16 = way.type == CUDA_R_16BF;
    const MatmulKey own = bf16 ? key : product_key(way.type, AS_IS, TRANSPOSED, M, N, K);
    MatmulPlan* p = matmul_plan(ctx, &own);
    char* buffers[3] = {f.a, f.b, f.d};
    if (bf16) {
        random_fill_cuda((__nv_bfloat16*)f.a, M * K, 1, 0);
        random_fill_cuda((__nv_bfloat16*)f.b, N * K, 2, 0);
    } else {
        random_fill_cuda((__nv_fp8_e4m3*)f.a, M * K, 1, 0);
        random_fill_cuda((__nv_fp8_e4m3*)f.b, N * K, 2, 0);
    }
    printf("fp8 | %-20s | %5zu x %5zu x %5zu | %-20s | ", name, M, N, K, way.name);
    const cublasStatus_t status = bf16 ? CUBLAS_STATUS_SUCCESS : set_way(p, way, f.scales);
    cublasLtMatmulAlgo_t algo;
    const int ran = status == CUBLAS_STATUS_SUCCESS ? choose(ctx, p, buffers, &algo) : 0;
    if (ran == 0) {
        printf("refused: %s\n", status != CUBLAS_STATUS_SUCCESS ? cublasLtGetStatusString(status) : refusal(ctx, p));
    } else {
        const Rate r = run_for(FP8_SECONDS, [&] { CUBLAS_CHECK(matmul_launch(ctx, p, &algo, buffers, 0)); });
        const double tflop = 2e-12 * (double)M * (double)N * (double)K, rate = tflop / r.ms * 1e3;
        printf("%8.4f ms | %7.1f TFLOP/s | %6.1f W | %6.0f MHz | %6.3f J/TFLOP | %d algorithms\n", r.ms, rate, r.watts, r.mhz,
               r.watts / rate, ran);
    }
    fflush(stdout);
}

static void bench_fp8() {
    Fp8Buffers f;
    const size_t most = (size_t)32768 * 16384;  // elements of the largest factor and result: gate and up of 1B
    f.a = take<char>(2 * most), f.b = take<char>(2 * most), f.d = take<char>(2 * most);
    f.scales = take<float>(most / 128 + 65536);
    CUDA_CHECK(cudaMemset(f.scales, 0x3f, (most / 128 + 65536) * sizeof(float)));  // every byte 0x3f: 0.747
    MatmulContext* ctx = take_matmul();
    for (int i : {MODEL_1B, MODEL_8B}) {
        const Model& m = models[i];
        const size_t N = (size_t)m.B * m.T;
        for (const Linear& l : linears_of(config_of(m))) {
            const size_t C = (size_t)l.C, OC = (size_t)l.OC;
            const struct {
                const char* name;
                MatmulKey key;
            } passes[] = {{"forward", product_key(CUDA_R_16BF, AS_IS, TRANSPOSED, N, OC, C)},
                          {"dx", product_key(CUDA_R_16BF, AS_IS, AS_IS, N, C, OC)},
                          {"dw", product_key(CUDA_R_16BF, TRANSPOSED, AS_IS, OC, C, N)}};
            for (const auto& pass : passes) {
                const std::string name = std::string(m.name) + " " + l.name + " " + pass.name;
                for (const Way& way : ways) { measure_product(ctx, name.c_str(), pass.key, way, f); }
                if (name != "1B qkv forward") { continue; }
                for (const Way& way : rare_ways) { measure_product(ctx, name.c_str(), pass.key, way, f); }
            }
        }
    }
    matmul_destroy(ctx);
}

// ---------------------------------------------------------------------------------------------------------------------
// adamw: an update beside products

enum { LAYERS = 16, FEW_THREADS = 768 };  // a block of AdamW this large leaves no registers for a product's block beside it

/* AdamW on as many multiprocessors as it has blocks. */
template <MasterKind MASTER, typename Moment>
__global__ void __launch_bounds__(FEW_THREADS, 1)
    adamw_few_kernel(AdamWTensors<floatX> t, size_t n, const StepState* state, AdamWFactors f) {
    constexpr size_t W = ADAMW_WIDTH<MASTER, Moment>;
    const size_t first = ((size_t)blockIdx.x * FEW_THREADS + threadIdx.x) * W;
    adamw_vectors<floatX, MASTER, Moment>(t, first, n, gridDim.x * FEW_THREADS * W, state, f);
}

static void few_launch(const Update& u, int processors, cudaStream_t stream) {
    const auto kernel =
        u.master == MASTER_SPLIT ? adamw_few_kernel<MASTER_SPLIT, __nv_bfloat16> : adamw_few_kernel<MASTER_FP32, float>;
    kernel<<<processors, FEW_THREADS, 0, stream>>>(u.t, u.n, u.state, adamw_factors(&u.hyper, 42));
    CUDA_CHECK_LAUNCH("adamw_few_kernel");
}

/* The four forward products of a block, with algorithms for so many multiprocessors. */
struct Products {
    MatmulContext* ctx;
    MatmulPlan* plans[BLOCK_LINEARS];
    cublasLtMatmulAlgo_t algos[BLOCK_LINEARS];
    char* buffers[3];
};

/* processors: 0 for all */
static Products choose_products(MatmulContext* ctx, const Model& m, int processors, char* const buffers[3]) {
    Products p;
    p.ctx = ctx;
    memcpy(p.buffers, buffers, sizeof p.buffers);
    int i = 0;
    for (const Linear& l : linears_of(config_of(m))) {
        const MatmulKey key = product_key(CUDA_R_16BF, AS_IS, TRANSPOSED, (size_t)m.B * m.T, (size_t)l.OC, (size_t)l.C);
        MatmulPlan* plan = p.plans[i] = matmul_plan(ctx, &key);
        const int32_t target = processors;
        CUBLAS_CHECK(
            cublasLtMatmulDescSetAttribute(plan->product, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &target, sizeof target));
        if (choose(ctx, plan, p.buffers, &p.algos[i]) == 0) { die("bench_levers: no product on %d SMs", processors); }
        i++;
    }
    return p;
}

static void products_launch(const Products& p) {
    for (int i = 0; i < BLOCK_LINEARS; i++) { CUBLAS_CHECK(matmul_launch(p.ctx, p.plans[i], &p.algos[i], p.buffers, 0)); }
}

/* Measures LAYERS layers of AdamW beside the forward products of as many, for several shares of the card. */
static void bench_adamw_model(const Model& m, MasterKind master, bool bf16_moments) {
    const ModelConfig c = config_of(m);
    const size_t N = (size_t)m.B * m.T, F = (size_t)c.intermediate_size, W = block_weights(c);
    const Update u = take_update(W, master, bf16_moments);
    char* buffers[3] = {(char*)take_random<floatX>(N * F), (char*)take_random<floatX>(W), (char*)take<floatX>(N * 2 * F)};
    MatmulContext *whole = take_matmul(), *part = take_matmul();  // a plan's descriptor holds its count of multiprocessors
    const Products all = choose_products(whole, m, 0, buffers);
    const Rate products = run_for(0.5, [&] { products_launch(all); }), update = run_for(0.5, [&] { update_launch(u, 0); });
    const Rate after = run_for(1, [&] {
        for (int l = 0; l < LAYERS; l++) { update_launch(u, 0); }
        for (int l = 0; l < LAYERS; l++) { products_launch(all); }
    });
    printf("adamw | %s | all SMs | adamw %.3f ms a layer | products %.3f ms | one after the other %.3f ms | %.1f W | %.4f J\n",
           m.name, update.ms, products.ms, after.ms / LAYERS, after.watts, after.watts * after.ms * 1e-3 / LAYERS);
    fflush(stdout);

    int least = 0, greatest = 0;
    cudaStream_t side;  // of AdamW; its blocks come first, so that products cannot take the multiprocessors left for it
    cudaEvent_t fork, join;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&side, cudaStreamNonBlocking, greatest));
    CUDA_CHECK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
    for (int few : {8, 16, 24, 32}) {
        const Products rest = choose_products(part, m, device_attribute(cudaDevAttrMultiProcessorCount) - few, buffers);
        const Rate slow_update = run_for(0.5, [&] { few_launch(u, few, 0); });
        const Rate slow_products = run_for(0.5, [&] { products_launch(rest); });
        // AdamW lasts for so many layers of products; the others have the whole card
        const int beside = (int)fmin(LAYERS, ceil(LAYERS * slow_update.ms / slow_products.ms));
        const Rate together = run_for(1, [&] {
            CUDA_CHECK(cudaEventRecord(fork, 0));
            CUDA_CHECK(cudaStreamWaitEvent(side, fork, 0));
            for (int l = 0; l < LAYERS; l++) { few_launch(u, few, side); }
            CUDA_CHECK(cudaEventRecord(join, side));
            for (int l = 0; l < LAYERS; l++) { products_launch(l < beside ? rest : all); }
            CUDA_CHECK(cudaStreamWaitEvent(0, join, 0));
        });
        printf(
            "adamw | %s | %d SMs | adamw %.3f ms a layer | products on the rest %.3f ms | %d of %d layers beside | together "
            "%.3f ms | %.1f %% of one after the other | %.1f W | %.4f J\n",
            m.name, few, slow_update.ms, slow_products.ms, beside, (int)LAYERS, together.ms / LAYERS,
            100 * together.ms / after.ms, together.watts, together.watts * together.ms * 1e-3 / LAYERS);
        fflush(stdout);
    }
    CUDA_CHECK(cudaEventDestroy(fork));
    CUDA_CHECK(cudaEventDestroy(join));
    CUDA_CHECK(cudaStreamDestroy(side));
    matmul_destroy(whole);
    matmul_destroy(part);
}

static void bench_adamw() {
    bench_adamw_model(models[MODEL_1B], MASTER_FP32, false);
    bench_adamw_model(models[MODEL_8B], MASTER_SPLIT, true);
}

// ---------------------------------------------------------------------------------------------------------------------
// launches: kernels that start before the one before them has ended

/* How a kernel starts: after the end of the one before; as soon as each of its blocks has ended or called for the next kernel,
 * and then waits for the memory that it writes; the same, and itself calls for the next one at once. */
enum Start { ORDINARY, PROGRAMMATIC, EARLY, NUM_STARTS };

enum { CHAIN = 200, PASS_BYTES = 10 << 20, RING = 24 };  // launches in a graph; a pass reads so much and writes as much

/* Copies 16 bytes a thread. */
template <Start START>
__global__ void __launch_bounds__(256) pass_kernel(uint4* to, const uint4* from) {
#if __CUDA_ARCH__ >= 900
    if (START == EARLY) { cudaTriggerProgrammaticLaunchCompletion(); }
    if (START != ORDINARY) { cudaGridDependencySynchronize(); }
#endif
    const size_t i = (size_t)blockIdx.x * 256 + threadIdx.x;
    to[i] = from[i];
}

static void pass_launch(Start start, char* to, const char* from, size_t bytes, cudaStream_t stream) {
    static void (*const kernels[NUM_STARTS])(uint4*, const uint4*) = {pass_kernel<ORDINARY>, pass_kernel<PROGRAMMATIC>,
                                                                      pass_kernel<EARLY>};
    cudaLaunchAttribute attribute;
    memset(&attribute, 0, sizeof attribute);
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config;
    memset(&config, 0, sizeof config);
    config.gridDim = dim3((unsigned)(bytes / (16 * 256)));
    config.blockDim = dim3(256);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = start != ORDINARY;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernels[start], (uint4*)to, (const uint4*)from));
}

/* Prints the microseconds a link of a chain by each start of its passes. link(k, start): queues link k */
static void measure_chain(const char* what, cudaStream_t stream, const std::function<void(int, Start)>& link) {
    enum { TURNS = 11 };
    const double turn_ms = 100;
    cudaGraphExec_t chains[NUM_STARTS];
    for (int s = 0; s < NUM_STARTS; s++) {
        cudaGraph_t graph;
        CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        for (int k = 0; k < CHAIN; k++) { link(k, k == 0 ? ORDINARY : (Start)s); }
        CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
        CUDA_CHECK(cudaGraphInstantiate(&chains[s], graph, 0));
        CUDA_CHECK(cudaGraphDestroy(graph));
    }
    cudaEvent_t begin, end;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    const auto replay_ms = [&](cudaGraphExec_t chain, int replays) {
        float ms = 0;
        CUDA_CHECK(cudaEventRecord(begin, stream));
        for (int i = 0; i < replays; i++) { CUDA_CHECK(cudaGraphLaunch(chain, stream)); }
        CUDA_CHECK(cudaEventRecord(end, stream));
        CUDA_CHECK(cudaEventSynchronize(end));
        CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
        return (double)ms;
    };
    for (cudaGraphExec_t chain : chains) { replay_ms(chain, 2); }
    const int replays = (int)ceil(turn_ms / (replay_ms(chains[ORDINARY], 10) / 10));
    double us[NUM_STARTS] = {0};
    for (int turn = 0; turn < TURNS; turn++) {
        for (int s = 0; s < NUM_STARTS; s++) {
            const double ms = replay_ms(chains[s], replays);
            if (turn > 0) { us[s] += 1e3 * ms / ((double)CHAIN * replays * (TURNS - 1)); }  // the first one warms up
        }
    }
    printf("launches | %s | ordinary %.3f us | programmatic %.3f us | early %.3f us | gains %.3f us | early %.3f us\n", what,
           us[ORDINARY], us[PROGRAMMATIC], us[EARLY], us[ORDINARY] - us[PROGRAMMATIC], us[ORDINARY] - us[EARLY]);
    fflush(stdout);
    for (cudaGraphExec_t chain : chains) { CUDA_CHECK(cudaGraphExecDestroy(chain)); }
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
}

static void bench_launches() {
    if (compiled_arch(pass_kernel<EARLY>) < 90) { die("bench_levers: launches: needs a card and a build of sm_90 or newer"); }
    cudaStream_t stream;
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    enum { C = 2048, N = PASS_BYTES / (C * (int)sizeof(floatX)), HALF = RING / 2 };  // a product of the 1B's width
    char* ring = (char*)take_random<floatX>((size_t)RING * PASS_BYTES / sizeof(floatX));
    const auto at = [&](int k) { return ring + (size_t)(k % RING) * PASS_BYTES; };
    const floatX* w = take_random<floatX>((size_t)C * C);
    MatmulContext* ctx = take_matmul();
    const auto product = [&](int k) {  // from one half of the ring to the other
        const Operand x = operand((const floatX*)at(k % HALF), C);
        matmul_forward_cuda(ctx, (floatX*)at(HALF + k % HALF), x, operand(w, C), (const floatX*)NULL, N, C, C, C, stream);
    };
    product(0);  // chooses its algorithm
    CUDA_CHECK(cudaDeviceSynchronize());

    enum { BLOCK = 16 * 256 };  // bytes of one block
    measure_chain("1 block", stream, [&](int, Start s) { pass_launch(s, ring, ring, BLOCK, stream); });
    measure_chain("20 MiB moved", stream, [&](int k, Start s) { pass_launch(s, at(k + 1), at(k), PASS_BYTES, stream); });
    measure_chain("a product", stream, [&](int k, Start) { product(k); });
    measure_chain("a product, then 1 block", stream, [&](int k, Start s) {
        product(k);
        pass_launch(s, at(HALF + k % HALF), at(HALF + k % HALF), BLOCK, stream);
    });
    measure_chain("a product, then 20 MiB moved", stream, [&](int k, Start s) {
        product(k);
        pass_launch(s, at(k + 1), at(HALF + k % HALF), PASS_BYTES, stream);
    });
    matmul_destroy(ctx);
    CUDA_CHECK(cudaStreamDestroy(stream));
}

// ---------------------------------------------------------------------------------------------------------------------
// attention: one launch of each kernel

static void bench_attention() {
    for (const Model& m : models) {
        const Attention a = take_attention(m);
        printf("attention | %s\n", m.name);
        attention_forward_launch(a);
        attention_backward_launch(a);
        CUDA_CHECK(cudaDeviceSynchronize());
    }
}

int main(int argc, char** argv) {
    static const struct {
        const char* name;
        void (*run)();
    } parts[] = {{"power", bench_power},
                 {"fp8", bench_fp8},
                 {"adamw", bench_adamw},
                 {"launches", bench_launches},
                 {"attention", bench_attention}};
    for (const auto& part : parts) {
        if (argc != 2 || strcmp(argv[1], part.name)) { continue; }
        int devices = 0;
        if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) { die("bench_levers: no GPU here"); }
        char gpu[256];
        device_name(gpu);
        printf("gpu | %s | %s | cuBLASLt %zu\n", gpu, PRECISION_NAME, cublasLtGetVersion());
        std::thread meter_thread(meter);
        part.run();
        metering = false;
        meter_thread.join();
        return 0;
    }
    die_usage("usage: %s power|fp8|adamw|launches|attention", argv[0]);
}
