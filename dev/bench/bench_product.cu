/* bench_product.cu -- times the products of matmul_sm90.cuh, alone, with SwiGLU and with RoPE, against cuBLASLt's.
 *
 *   make build/bench_product_cu GPU_ARCH=90 PRECISION=BF16 && build/bench_product_cu [SECONDS]
 *
 * Three products: gate and up, qkv forward, and down's dx. Contenders run in turns A B C C B A, each for a third of SECONDS to
 * settle, then for the SECONDS that count. cuBLASLt runs the trainer's plan. dev/test/cuda/kernels/joined.cuh checks the
 * results.
 *
 * A line: shape | contender | ms | TFLOP/s | W | MHz | share of cuBLASLt's speed. "+" marks a separate kernel.
 */
#include <string>

#include "llmc/matmul.cuh"
#include "llmc/matmul_sm90.cuh"
#include "llmc/rope.cuh"
#include "llmc/rope.h"
#include "llmc/swiglu.cuh"
#include "dev/cuda/meter.cuh"  // defines: meter, run_for, fill

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
static const Shape shapes[] = {
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
/* Takes n elements of device memory, which the program keeps to its end. */
template <typename T>
static T* take(size_t n) {
    T* p = NULL;
    CUDA_CHECK(cudaMalloc((void**)&p, n * sizeof(T)));
    return p;
}

/* The factors; RoPE's table; gate_up and its gradient; results with a column for each of F. */
struct Buffers {
    floatX *x, *w, *wide[2], *narrow[2];
    float* table;
};

/* Returns buffers that are large enough for every shape. */
static Buffers take_buffers() {
    size_t x = 0, w = 0, narrow = 0, table = 0;
    for (const Shape& s : shapes) {
        x = size_max(x, s.N * s.K);
        w = size_max(w, s.K * s.width());
        narrow = size_max(narrow, s.N * s.F);
        table = size_max(table, (size_t)s.heads.T * (size_t)s.heads.HD);
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

/* Fills the factors and RoPE's table; sums become about 1. */
static void fill_factors(const Shape& s, const Buffers& b) {
    fill(b.x, s.N * s.K, 2);
    fill(b.w, s.K * s.width(), 2 / sqrtf((float)s.K));
    if (s.pass != QKV) { return; }
    ModelConfig c;
    memset(&c, 0, sizeof c);
    c.head_dim = s.heads.HD;
    c.rope_theta = 500000;
    std::vector<float> table((size_t)s.heads.T * (size_t)s.heads.HD);
    rope_table(table.data(), s.heads.T, &c);
    CUDA_CHECK(cudaMemcpy(b.table, table.data(), table.size() * sizeof(float), cudaMemcpyHostToDevice));
}

// ---------------------------------------------------------------------------------------------------------------------
// times

struct Contender {
    std::string name;
    std::function<void()> launch;
};

/* Times contenders in turns, and prints a line for each. The first one's speed is 100 %. */
static void race(const Shape& s, double seconds, const std::vector<Contender>& contenders) {
    const size_t count = contenders.size();
    std::vector<Rate> rates(count, Rate{0, 0, 0});
    for (size_t turn = 0; turn < 2 * count; turn++) {
        const size_t i = turn < count ? turn : 2 * count - 1 - turn;
        const Rate r = run_for(seconds, contenders[i].launch);
        rates[i].ms += r.ms / 2, rates[i].watts += r.watts / 2, rates[i].mhz += r.mhz / 2;
    }
    const double tflop = 2e-12 * (double)s.N * (double)s.K * (double)s.width();
    for (size_t i = 0; i < count; i++) {
        printf("%-12s | %-32s | %8.4f ms | %6.1f TFLOP/s | %5.1f W | %5.0f MHz | %6.1f %%\n", s.name,
               contenders[i].name.c_str(), rates[i].ms, tflop / rates[i].ms * 1e3, rates[i].watts, rates[i].mhz,
               100 * rates[0].ms / rates[i].ms);
    }
    fflush(stdout);
}

static void time_shape(MatmulContext* ctx, const Shape& s, const Buffers& b, double seconds) {
    const std::vector<Kind> kinds = {kind<SPLIT_ROWS>("by rows"), kind<SPLIT_TILES>("in turns")};
    floatX* sums = s.pass == GATE_UP ? b.wide[0] : b.narrow[0];
    fill_factors(s, b);
    const auto theirs = [&] {
        if (s.pass == DOWN_DX) {
            matmul_backward_input_cuda(ctx, output(sums, s.F), operand(b.x, s.K), operand(b.w, s.F), {s.N, (int)s.F, (int)s.K},
                                       0);
        } else {
            matmul_forward_cuda(ctx, output(sums, s.width()), operand(b.x, s.K), operand(b.w, s.K), NULL,
                                {s.N, (int)s.K, (int)s.width()}, 0);
        }
    };
    std::vector<Contender> products = {{"cuBLASLt", theirs}};
    for (const Kind& k : kinds) {
        products.push_back({k.name, [&, k] { k.product(s, b, sums); }});
    }
    race(s, seconds, products);

    // in place, the gradient would grow from launch to launch, until nothing but zeros and infinities is left
    floatX *gate_up = b.wide[0], *to = s.pass == DOWN_DX ? b.wide[1] : sums, *act = s.pass == GATE_UP ? b.narrow[1] : NULL;
    if (s.pass == DOWN_DX) { fill(gate_up, s.N * 2 * s.F, 2); }
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
    race(s, seconds, joined);
}

int main(int argc, char** argv) {
    const double seconds = argc == 2 ? atof(argv[1]) : 0.5;
    if (argc > 2 || !(seconds > 0)) { die_usage("usage: %s [SECONDS]", argv[0]); }
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) { die("bench_product: no GPU here"); }
    if (!has_wgmma()) { die("bench_product: no sm_90a code or no GPU for it: build with GPU_ARCH=90"); }
    char gpu[256];
    device_name(gpu);
    printf("gpu | %s | %s | cuBLASLt %zu\n", gpu, PRECISION_NAME, cublasLtGetVersion());
    MatmulContext* ctx = matmul_create(take<char>(matmul_workspace_bytes()), false);
    const Buffers b = take_buffers();
    std::thread meter_thread(meter);
    for (const Shape& s : shapes) { time_shape(ctx, s, b, seconds); }
    metering = false;
    meter_thread.join();
    matmul_destroy(ctx);
    return 0;
}
