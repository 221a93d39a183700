/* bench_product.cu -- checks and times the products of matmul_sm90.cuh, alone, with SwiGLU and with RoPE, against cuBLASLt's.
 *
 *   make build/bench_product_cu GPU_ARCH=90 PRECISION=BF16 && build/bench_product_cu check && build/bench_product_cu time
 *
 * check                    small shapes. The sums are compared with cuBLASLt's. SwiGLU and RoPE of the sums must have the bits
 *                          that the kernels of swiglu.cuh and rope.cuh make of the same sums. Results are NaN before. Built
 *                          with NVCCFLAGS_EXTRA=-DBARRIER_TIMEOUT=2000000000ull, a wait that would last forever becomes a
 *                          message.
 * time [SECONDS]           checks, then times three products: gate and up, qkv forward, and down's dx. Contenders run in turns
 *                          A B C C B A, each for a third of SECONDS to settle, then for the SECONDS that count. cuBLASLt's
 *                          algorithm is the fastest of the heuristic's 8.
 *
 * A line: shape | contender | ms | TFLOP/s | W | MHz | share of cuBLASLt's speed. "+" marks a separate kernel.
 */
#include "llmc/matmul_sm90.cuh"
#include "llmc/rope.cuh"
#include "llmc/rope.h"
#include "llmc/swiglu.cuh"
#include "bench_common.cuh"    // defines: take, product_key, choose
#include "dev/cuda/meter.cuh"  // defines: meter, run_for

#ifndef PRECISION_BF16
#error "bench_product compares with bf16: build with PRECISION=BF16"
#endif

enum Pass { GATE_UP, DOWN_DX, QKV };

/* GATE_UP: gate_up (N, 2F) = x (N, K) w (2F, K)^T.   DOWN_DX: dact (N, F) = dout (N, K) w (K, F).
 * QKV: qkv (N, F) = x (N, K) w (F, K)^T. */
struct Shape {
    const char* name;
    Pass pass;
    size_t N, K, F;
    AttentionShape heads;  // of QKV
    size_t width() const { return pass == GATE_UP ? 2 * F : F; }
};
static const Shape timed[] = {
    {"1B gate_up", GATE_UP, 32768, 2048, 8192},
    {"1B down dx", DOWN_DX, 32768, 2048, 8192},
    {"8B gate_up", GATE_UP, 8192, 4096, 14336},
    {"8B down dx", DOWN_DX, 8192, 4096, 14336},
    {"126M gate_up", GATE_UP, 65536, 768, 2048},
    {"126M down dx", DOWN_DX, 65536, 768, 2048},
    {"d16 gate_up", GATE_UP, 32768, 1024, 2816},
    {"d20 gate_up", GATE_UP, 32768, 1280, 3584},
    {"d24 gate_up", GATE_UP, 32768, 1536, 4096},
    {"1B qkv", QKV, 32768, 2048, 3072, {16, 2048, 32, 8, 64}},
    {"8B qkv", QKV, 8192, 4096, 6144, {1, 8192, 32, 8, 128}},
    {"126M qkv", QKV, 65536, 768, 1280, {64, 1024, 12, 4, 64}},
};
static const Shape checked[] = {
    {"one tile", GATE_UP, 256, 64, 128},
    {"one tile", DOWN_DX, 256, 64, 256},
    {"several", GATE_UP, 768, 320, 256},
    {"several", DOWN_DX, 768, 320, 512},
    {"long sums", GATE_UP, 256, 1024, 128},
    {"long sums", DOWN_DX, 256, 1024, 256},
    {"many tiles", GATE_UP, 4096, 192, 1024},
    {"many tiles", DOWN_DX, 4096, 192, 2048},
    {"one tile", QKV, 256, 64, 256, {1, 256, 2, 1, 64}},
    {"several", QKV, 768, 320, 768, {8, 96, 4, 1, 128}},
    {"long sums", QKV, 256, 1024, 512, {2, 128, 6, 1, 64}},
    {"many tiles", QKV, 4096, 192, 2048, {8, 512, 8, 4, 128}},
};

/* The factors; RoPE's table; the results of the product and of SwiGLU or RoPE, with one or two columns for each of F. Results
 * exist twice, for two ways to compute them. */
struct Buffers {
    floatX *x, *w, *wide[2], *narrow[3];
    float* table;
};

static Buffers take_buffers(const Shape* shapes, size_t count) {
    size_t x = 0, w = 0, narrow = 0, table = 0;
    for (size_t i = 0; i < count; i++) {
        x = size_max(x, shapes[i].N * shapes[i].K);
        w = size_max(w, shapes[i].K * shapes[i].width());
        narrow = size_max(narrow, shapes[i].N * shapes[i].F);
        table = size_max(table, (size_t)shapes[i].heads.T * (size_t)shapes[i].heads.HD);
    }
    Buffers b;
    b.x = take<floatX>(x), b.w = take<floatX>(w), b.table = take<float>(table);
    for (floatX*& p : b.wide) { p = take<floatX>(2 * narrow); }
    for (floatX*& p : b.narrow) { p = take<floatX>(narrow); }
    return b;
}

/* Only sums: the main loop alone. */
template <MatmulSplit SPLIT>
static void launch_product(const Shape& s, const Buffers& b, floatX* out) {
    auto* launch = s.pass == DOWN_DX ? matmul_tiles_launch<MatmulTiles<SPLIT, 1, EPILOGUE_STORE>>
                                     : matmul_tiles_launch<MatmulTiles<SPLIT, 0, EPILOGUE_STORE>>;
    launch(out, b.x, b.w, {s.N, s.width(), s.K}, 0, NULL, NULL, MatmulRope());
}

/* out: gate_up, its gradient (backward), or qkv; gate_up: read by backward */
template <MatmulSplit SPLIT>
static void launch_fused(const Shape& s, const Buffers& b, floatX* out, const floatX* gate_up, floatX* act) {
    if (s.pass == GATE_UP) {
        matmul_swiglu_split_cuda<SPLIT>(out, act, b.x, b.w, {s.N, 2 * s.F, s.K}, 0);
    } else if (s.pass == QKV) {
        matmul_rope_cuda(out, b.x, b.w, NULL, b.table, s.heads, s.K, 0);
    } else {
        matmul_swiglu_backward_cuda(out, act, b.x, b.w, gate_up, {s.N, s.F, s.K}, 0);
    }
}

/* One of our kernels, by how the consumers split the work. */
struct Kind {
    const char* name;
    MatmulSplit split;
    decltype(&launch_product<SPLIT_ROWS>) product;
    decltype(&launch_fused<SPLIT_ROWS>) fused;
    bool joins(Pass pass) const { return split == SPLIT_ROWS || pass == GATE_UP; }  // whether fused() has this split
};

template <MatmulSplit SPLIT>
static Kind kind(const char* name) {
    return {name, SPLIT, launch_product<SPLIT>, launch_fused<SPLIT>};
}

static MatmulPlan* plan_of(MatmulContext* ctx, const Shape& s) {
    const MatmulKey key = product_key(CUDA_R_16BF, AS_IS, s.pass == DOWN_DX ? AS_IS : TRANSPOSED, s.N, s.width(), s.K);
    return matmul_plan(ctx, &key);
}

// ---------------------------------------------------------------------------------------------------------------------
// checks

struct Difference {
    double error, norm;          // sums of squares
    unsigned long long outside;  // elements that differ by more than rounding and the order of sums explain, or are NaN
    unsigned long long other;    // elements with other bits
};

/* slack: the largest difference that two orders of a sum may make */
__global__ void compare_kernel(Difference* d, const floatX* got, const floatX* want, size_t n, float slack) {
    __shared__ double sums[32];
    double error = 0, norm = 0;
    unsigned outside = 0, other = 0;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        const float x = to_float(got[i]), y = to_float(want[i]);
        error += (double)(x - y) * (double)(x - y);
        norm += (double)y * (double)y;
        outside += !(fabsf(x - y) <= 0.0078125f * fabsf(y) + slack);  // a rounding may go either way
        other += ((const unsigned short*)got)[i] != ((const unsigned short*)want)[i];
    }
    error = block_sum(error, sums);
    __syncthreads();
    norm = block_sum(norm, sums);
    if (outside) { atomicAdd(&d->outside, (unsigned long long)outside); }
    if (other) { atomicAdd(&d->other, (unsigned long long)other); }
    if (threadIdx.x == 0) {
        atomicAdd(&d->error, error);
        atomicAdd(&d->norm, norm);
    }
}

__global__ void scale_kernel(floatX* x, size_t n, float factor) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        x[i] = from_float<floatX>(factor * to_float(x[i]));
    }
}

/* Waits for the GPU. If a kernel's wait for a barrier timed out, ends the program with a message. */
static void finish(const char* what) {
    CUDA_CHECK(cudaDeviceSynchronize());
#ifdef BARRIER_TIMEOUT
    unsigned long long stuck = 0;
    CUDA_CHECK(cudaMemcpyFromSymbol(&stuck, barrier_stuck, sizeof stuck));
    if (stuck != 0) {
        die("%s: block %llu thread %llu waited too long for the barrier at %llu, parity %llu", what, stuck >> 48,
            stuck >> 32 & 0xffff, (stuck & 0xffffffff) >> 2, stuck >> 1 & 1);
    }
#else
    (void)what;
#endif
}

static int failures;

/* Prints how two results differ. exact: whether they must have the same bits */
static void compare(const char* what, const Shape& s, const Kind& k, const floatX* got, const floatX* want, size_t n,
                    bool exact) {
    static Difference* on_card = take<Difference>(1);
    finish(what);
    CUDA_CHECK(cudaMemset(on_card, 0, sizeof *on_card));
    compare_kernel<<<(unsigned)size_min(1024, ceil_div(n, (size_t)256)), 256>>>(on_card, got, want, n, exact ? 0.0f : 1e-3f);
    CUDA_CHECK_LAUNCH("compare_kernel");
    Difference d;
    CUDA_CHECK(cudaMemcpy(&d, on_card, sizeof d, cudaMemcpyDeviceToHost));
    const double l2 = sqrt(d.error / d.norm);
    const bool good = exact ? d.other == 0 : d.outside == 0 && l2 <= 2.5e-3;
    failures += !good;
    printf("%s | %s | %s, %s | relative L2 %.2e, %llu outside, %llu of %zu with other bits\n", good ? "ok" : "WRONG", s.name,
           what, k.name, l2, d.outside, d.other, n);
    fflush(stdout);
}

static void poison(floatX* p, size_t n) { CUDA_CHECK(cudaMemset(p, 0xff, n * sizeof *p)); }

/* Fills the factors and RoPE's table; sums become about 1. */
static void fill_factors(const Shape& s, const Buffers& b) {
    const size_t n = s.K * s.width();
    random_fill_cuda(b.x, s.N * s.K, 1, 0);
    random_fill_cuda(b.w, n, 2, 0);
    scale_kernel<<<(unsigned)size_min(1024, ceil_div(n, (size_t)256)), 256>>>(b.w, n, exp2f(roundf(-0.5f * log2f((float)s.K))));
    CUDA_CHECK_LAUNCH("scale_kernel");
    if (s.pass != QKV) { return; }
    ModelConfig c;
    memset(&c, 0, sizeof c);
    c.head_dim = s.heads.HD;
    c.rope_theta = 500000;
    std::vector<float> table((size_t)s.heads.T * (size_t)s.heads.HD);
    rope_table(table.data(), s.heads.T, &c);
    CUDA_CHECK(cudaMemcpy(b.table, table.data(), table.size() * sizeof(float), cudaMemcpyHostToDevice));
}

static void check(MatmulContext* ctx, const Shape& s, const Kind& k, const Buffers& b) {
    const size_t n = s.N * s.width(), wide = s.N * 2 * s.F, narrow = s.N * s.F;
    fill_factors(s, b);
    floatX *ours = s.pass == GATE_UP ? b.wide[0] : b.narrow[0], *theirs = s.pass == GATE_UP ? b.wide[1] : b.narrow[1];
    const MatmulPlan* p = plan_of(ctx, s);
    char* const buffers[3] = {(char*)b.x, (char*)b.w, (char*)theirs};
    poison(ours, n);
    poison(theirs, n);
    k.product(s, b, ours);
    CUBLAS_CHECK(matmul_launch(ctx, p, &p->algo, buffers, 0));
    compare("product", s, k, ours, theirs, n, false);
    if (!k.joins(s.pass)) { return; }
    if (s.pass == GATE_UP) {
        floatX *gate_up = b.wide[1], *act = b.narrow[0], *want = b.narrow[1];
        poison(gate_up, wide);
        poison(act, narrow);
        k.fused(s, b, gate_up, NULL, act);
        swiglu_forward_cuda(want, ours, {s.N, (int)s.F, 2 * s.F, s.F}, 0);
        compare("gate and up of SwiGLU", s, k, gate_up, ours, wide, true);
        compare("SwiGLU", s, k, act, want, narrow, true);
    } else if (s.pass == QKV) {
        floatX* qkv = b.narrow[2];
        poison(qkv, narrow);
        k.fused(s, b, qkv, NULL, NULL);
        rope_forward_cuda(ours, NULL, b.table, 0, s.heads, s.F, 0);
        compare("RoPE", s, k, qkv, ours, narrow, true);
    } else {
        floatX *gate_up = b.wide[0], *want = b.wide[1], *act = b.narrow[1], *act_want = b.narrow[2];
        for (const bool with_act : {false, true}) {
            random_fill_cuda(gate_up, wide, 3, 0);
            random_fill_cuda(want, wide, 3, 0);
            poison(act, narrow);
            poison(act_want, narrow);
            k.fused(s, b, gate_up, gate_up, with_act ? act : NULL);
            swiglu_backward_cuda(want, with_act ? act_want : NULL, ours, want, {s.N, (int)s.F, 2 * s.F, s.F}, 0);
            compare(with_act ? "SwiGLU's gradient, with act" : "SwiGLU's gradient", s, k, gate_up, want, wide, true);
            if (with_act) { compare("act again", s, k, act, act_want, narrow, true); }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// times

struct Contender {
    std::string name;
    std::function<void()> launch;
};

/* Times contenders in turns, and prints a line for each. The first one's speed is 100 %. */
static void race(const Shape& s, double seconds, const std::vector<Contender>& contenders, std::vector<std::string>* table) {
    const size_t count = contenders.size();
    std::vector<Rate> rates(count, Rate{0, 0, 0});
    for (size_t turn = 0; turn < 2 * count; turn++) {
        const size_t i = turn < count ? turn : 2 * count - 1 - turn;
        const Rate r = run_for(seconds, contenders[i].launch);
        rates[i].ms += r.ms / 2, rates[i].watts += r.watts / 2, rates[i].mhz += r.mhz / 2;
    }
    finish(s.name);
    const double tflop = 2e-12 * (double)s.N * (double)s.K * (double)s.width();
    for (size_t i = 0; i < count; i++) {
        char line[256];
        snprintf(line, sizeof line, "%-12s | %-32s | %8.4f ms | %6.1f TFLOP/s | %5.1f W | %5.0f MHz | %6.1f %%", s.name,
                 contenders[i].name.c_str(), rates[i].ms, tflop / rates[i].ms * 1e3, rates[i].watts, rates[i].mhz,
                 100 * rates[0].ms / rates[i].ms);
        printf("%s\n", line);
        fflush(stdout);
        table->push_back(line);
    }
}

static void time_shape(MatmulContext* ctx, const Shape& s, const Buffers& b, double seconds, const std::vector<Kind>& kinds,
                       std::vector<std::string>* table) {
    floatX* sums = s.pass == GATE_UP ? b.wide[0] : b.narrow[0];
    char* buffers[3] = {(char*)b.x, (char*)b.w, (char*)sums};
    const MatmulPlan* p = plan_of(ctx, s);
    cublasLtMatmulAlgo_t algo;
    fill_factors(s, b);
    if (choose(ctx, p, buffers, &algo) == 0) { die("bench_product: cuBLASLt has no product for %s", s.name); }
    const auto theirs = [&] { CUBLAS_CHECK(matmul_launch(ctx, p, &algo, buffers, 0)); };
    std::vector<Contender> products = {{"cuBLASLt", theirs}};
    for (const Kind& k : kinds) {
        products.push_back({k.name, [&, k] { k.product(s, b, sums); }});
    }
    race(s, seconds, products, table);

    // in place, the gradient would grow from launch to launch, until nothing but zeros and infinities is left
    floatX *gate_up = b.wide[0], *to = s.pass == DOWN_DX ? b.wide[1] : sums, *act = s.pass == GATE_UP ? b.narrow[1] : NULL;
    if (s.pass == DOWN_DX) { random_fill_cuda(gate_up, s.N * 2 * s.F, 3, 0); }
    const auto apart = [&] {
        theirs();
        if (s.pass == GATE_UP) {
            swiglu_forward_cuda(act, gate_up, {s.N, (int)s.F, 2 * s.F, s.F}, 0);
        } else if (s.pass == QKV) {
            rope_forward_cuda(sums, NULL, b.table, 0, s.heads, s.F, 0);
        } else {
            swiglu_backward_cuda(to, NULL, sums, gate_up, {s.N, (int)s.F, 2 * s.F, s.F}, 0);
        }
    };
    const std::string layer = s.pass == QKV ? "RoPE" : "SwiGLU";
    std::vector<Contender> joined = {{"cuBLASLt + " + layer, apart}};
    for (const Kind& k : kinds) {
        if (!k.joins(s.pass)) { continue; }
        joined.push_back({"with " + layer + ", " + k.name, [&, k] { k.fused(s, b, to, gate_up, act); }});
    }
    race(s, seconds, joined, table);
}

int main(int argc, char** argv) {
    const bool timing = argc >= 2 && argc <= 3 && strcmp(argv[1], "time") == 0;
    if (!timing && (argc != 2 || strcmp(argv[1], "check") != 0)) { die_usage("usage: %s check|time [SECONDS]", argv[0]); }
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) { die("bench_product: no GPU here"); }
    if (!has_wgmma()) { die("bench_product: no sm_90a code or no GPU for it: build with GPU_ARCH=90"); }
    const double seconds = argc > 2 ? atof(argv[2]) : 0.5;
    const std::vector<Kind> kinds = {kind<SPLIT_ROWS>("by rows"), kind<SPLIT_TILES>("in turns")};
    MatmulContext* ctx = take_matmul();
    const Shape* shapes = timing ? timed : checked;
    const size_t count = timing ? sizeof timed / sizeof *timed : sizeof checked / sizeof *checked;
    const Buffers b = take_buffers(shapes, count);
    for (size_t i = 0; i < count; i++) {
        for (const Kind& k : kinds) { check(ctx, shapes[i], k, b); }
    }
    if (failures > 0) { die("bench_product: %d results are wrong", failures); }
    if (timing) {
        char gpu[256];
        device_name(gpu);
        printf("gpu | %s | %s | cuBLASLt %zu\n", gpu, PRECISION_NAME, cublasLtGetVersion());
        std::thread meter_thread(meter);
        std::vector<std::string> table;
        for (size_t i = 0; i < count; i++) { time_shape(ctx, shapes[i], b, seconds, kinds, &table); }
        metering = false;
        meter_thread.join();
        printf("\n");
        for (const std::string& line : table) { printf("%s\n", line.c_str()); }
    }
    matmul_destroy(ctx);
    return 0;
}
