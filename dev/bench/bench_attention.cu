/* bench_attention.cu -- times attention by kernel, head dimension and length, on random data.
 *
 *   nvcc -std=c++17 -O3 -DPRECISION_BF16 -gencode arch=compute_90a,code=sm_90a -diag-suppress 1675 -I. \
 *        -o bench_attention dev/bench/bench_attention.cu
 *   ./bench_attention [auto|plain|mma|wgmma|walk|variants [mma|wgmma|walk]|sweep SECONDS FILE]
 *
 * TFLOP/s use the common count: forward 4 B T^2 NH HD / 2 (the causal half), backward 2.5 times as much. A walk computes
 * exactly that; our other kernels compute 3.5 times. Each number is the median of single launches between events, after a
 * warm-up. The last lines time rows of 8192 tokens in documents of 400 to 600. Their TFLOP/s also count whole rows, so compare
 * their times, not their rates, with the lines above.
 * With a kernel's name it runs that kernel alone, with `auto` the kernels that the program would choose.
 *
 * `./bench_attention sweep SECONDS FILE` times all backward kernels at every T from 1024 to 65536 in steps of 1024: at head_dim
 * 64 in 32,768 tokens, at 128 in 8,192, or in one row. It appends a line for each length to FILE, and begins with those that
 * FILE lacks, coarse steps first, until SECONDS are over: so a second call continues. `pairs` is a walk in two stages, `walk`
 * one in the stages that the program would take. The kernels run in two turns, in the opposite order, each for at least 60 ms;
 * the median counts. The error is the distance of wgmma's and walk's results; 1: a kernel gave other bits in its second turn.
 * `dev/plot_speed.py --sweep FILE` draws the file.
 *
 * `./bench_attention variants` runs each mma and wgmma kernel, and the walk, with other tiles (a minute). A third word selects
 * one kind. It prints one line a variant: its error against the plain kernel (about 2e-3 in BF16; more is a bug), its registers
 * at the start, and its bytes of stack. For T = 1024, 2048 and 8192 follow the time and the TFLOP/s of the operations it really
 * does: dK dV four products, dQ three, a walk five. The best line of each (kernel, part, HD) belongs into MmaTiles of
 * attention_mma.cuh, WgmmaTiles of attention_sm90.cuh or WalkTiles of attention_sm90_walk.cuh. Their numbers have the same
 * order.
 */
#include <errno.h>
#include <time.h>

#include <algorithm>
#include <vector>

#include "llmc/attention.cuh"
#include "dev/test/cuda/uniform.cuh"

struct Shape : AttentionShape {
    const char* name;
    int document;  // mean tokens of a document; 0: rows are not divided
};

// clang-format off
static const Shape shapes[] = {
    {{128,   512, 12, 4,  64}, "126M"},
    {{ 64,  1024, 12, 4,  64}, "126M"},
    {{ 32,  1024, 32, 8,  64}, "1B"},
    {{ 16,  2048, 32, 8,  64}, "1B"},
    {{  8,  4096, 32, 8,  64}, "1B"},
    {{  4,  8192, 32, 8,  64}, "1B"},
    {{  2, 16384, 32, 8,  64}, "1B"},
    {{  1, 32768, 32, 8,  64}, "1B"},
    {{ 16,   512, 32, 8, 128}, "8B"},
    {{  8,  1024, 32, 8, 128}, "8B"},
    {{  4,  2048, 32, 8, 128}, "8B"},
    {{  2,  4096, 32, 8, 128}, "8B"},
    {{  1,  8192, 32, 8, 128}, "8B"},
    {{  1, 16384, 32, 8, 128}, "8B"},
    {{  1, 32768, 32, 8, 128}, "8B"},
    {{ 10,  3072, 32, 8,  64}, "1B"},
    {{  5,  6144, 32, 8,  64}, "1B"},
    {{  2, 12288, 32, 8,  64}, "1B"},
    {{  1, 20480, 32, 8,  64}, "1B"},
    {{  1, 24576, 32, 8,  64}, "1B"},
    {{  2,  3072, 32, 8, 128}, "8B"},
    {{  1,  6144, 32, 8, 128}, "8B"},
    {{  1, 12288, 32, 8, 128}, "8B"},
    {{  1, 20480, 32, 8, 128}, "8B"},
    {{  1, 24576, 32, 8, 128}, "8B"},
    {{  4,  8192, 32, 8,  64}, "1B_500", 500},
    {{  1,  8192, 32, 8, 128}, "8B_500", 500},
    {{  2, 12288, 32, 8,  64}, "1B_500", 500},
    {{  1, 12288, 32, 8, 128}, "8B_3000", 3000},
};
// clang-format on

typedef struct {
    floatX *qkv, *out, *dout, *dqkv;
    float* lse;
    void* scratch;
    int32_t* starts;
    AttentionArgs args;
} Buffers;

/* Returns where document n of a row starts: within a tenth of n * mean, so that it has 0.8 to 1.2 * mean tokens. */
__device__ int document_start(int n, int mean, int row) {
    const int span = mean / 5;
    return n <= 0 ? 0 : n * mean + (int)((uint32_t)(n * 7919 + row * 104729) % (uint32_t)(span + 1)) - span / 2;
}

__global__ void starts_kernel(int32_t* starts, size_t N, int T, int mean) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= N) { return; }
    const int t = (int)(i % T), row = (int)(i / T);
    int n = t / mean + 1;
    while (document_start(n, mean, row) > t) { n--; }
    starts[i] = document_start(n, mean, row);
}

static Buffers allocate(const Shape* s) {
    Buffers b;
    const size_t N = (size_t)s->B * s->T;
    b.starts = NULL;
    if (s->document > 0) {
        CUDA_CHECK(cudaMalloc((void**)&b.starts, N * sizeof *b.starts));
        starts_kernel<<<(unsigned)ceil_div(N, (size_t)256), 256>>>(b.starts, N, s->T, s->document);
        CUDA_CHECK_LAUNCH("starts_kernel");
    }
    b.args = attention_args(*s, (size_t)(s->NH + 2 * s->NKV) * s->HD, (size_t)s->NH * s->HD, b.starts);
    CUDA_CHECK(cudaMalloc((void**)&b.qkv, N * b.args.qkv_pitch * sizeof(floatX)));
    CUDA_CHECK(cudaMalloc((void**)&b.dqkv, N * b.args.qkv_pitch * sizeof(floatX)));
    CUDA_CHECK(cudaMalloc((void**)&b.out, N * b.args.out_pitch * sizeof(floatX)));
    CUDA_CHECK(cudaMalloc((void**)&b.dout, N * b.args.out_pitch * sizeof(floatX)));
    CUDA_CHECK(cudaMalloc((void**)&b.lse, N * s->NH * sizeof(float)));
    CUDA_CHECK(cudaMalloc(&b.scratch, attention_backward_scratch_cuda(*s, s->document == 0 && (s->HD == 64 || s->HD == 128))));
    uniform_fill_cuda(b.qkv, N * b.args.qkv_pitch, 1);
    uniform_fill_cuda(b.dout, N * b.args.out_pitch, 2);
    return b;
}

static void release(Buffers* b) {
    CUDA_CHECK(cudaFree(b->starts));
    CUDA_CHECK(cudaFree(b->qkv));
    CUDA_CHECK(cudaFree(b->dqkv));
    CUDA_CHECK(cudaFree(b->out));
    CUDA_CHECK(cudaFree(b->dout));
    CUDA_CHECK(cudaFree(b->lse));
    CUDA_CHECK(cudaFree(b->scratch));
}

/* Returns the median milliseconds of one call. */
template <typename F>
static float time_ms(F launch) {
    enum { WARM = 2, RUNS = 9 };
    cudaEvent_t events[RUNS + 1];
    for (int i = 0; i <= RUNS; i++) { CUDA_CHECK(cudaEventCreate(&events[i])); }
    for (int i = 0; i < WARM; i++) { launch(); }
    CUDA_CHECK(cudaEventRecord(events[0]));
    for (int i = 0; i < RUNS; i++) {
        launch();
        CUDA_CHECK(cudaEventRecord(events[i + 1]));
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    std::vector<float> ms(RUNS);
    for (int i = 0; i < RUNS; i++) { CUDA_CHECK(cudaEventElapsedTime(&ms[i], events[i], events[i + 1])); }
    for (int i = 0; i <= RUNS; i++) { CUDA_CHECK(cudaEventDestroy(events[i])); }
    std::sort(ms.begin(), ms.end());
    return ms[RUNS / 2];
}

static double forward_flops(const Shape* s) { return 2.0 * s->B * s->T * (double)s->T * s->NH * s->HD; }

static const char* kernel_names[NUM_ATTENTION_KERNELS] = {"auto", "plain", "mma", "wgmma", "walk"};

/* Times every kernel, or the chosen one; AUTO is the launchers' choice. */
static void bench_kernels(bool all, AttentionKernel chosen) {
    printf("%-6s %-6s %5s %3s %3s %6s %3s | %10s %8s | %10s %8s\n", "kernel", "model", "T", "HD", "B", "NH", "NKV",
           "forward ms", "TFLOP/s", "backwd ms", "TFLOP/s");
    for (const Shape& s : shapes) {
        Buffers b = allocate(&s);
        for (int k = ATTENTION_AUTO; k < NUM_ATTENTION_KERNELS; k++) {
            const AttentionKernel kernel = (AttentionKernel)k;
            // the plain kernels take seconds at length 8192
            if (!attention_has_kernel(kernel, s.HD) || (k == ATTENTION_PLAIN && s.T > 2048)) { continue; }
            if (k == ATTENTION_WALK && s.document > 0) { continue; }
            if (all ? k == ATTENTION_AUTO : k != chosen) { continue; }
            const float forward = time_ms([&]() { attention_forward_cuda(b.out, b.lse, b.qkv, s.B, b.args, 0, kernel); });
            const float backward = time_ms([&]() {
                attention_backward_cuda(b.dqkv, b.scratch, b.dout, {b.qkv, b.out, b.lse}, s.B, b.args, 0, kernel);
            });
            printf("%-6s %-6s %5d %3d %3d %6d %3d | %10.3f %8.1f | %10.3f %8.1f\n", kernel_names[k], s.name, s.T, s.HD, s.B,
                   s.NH, s.NKV, forward, forward_flops(&s) / forward * 1e-9, backward,
                   2.5 * forward_flops(&s) / backward * 1e-9);
            fflush(stdout);
        }
        release(&b);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// the mma and wgmma kernels with other tiles

#ifndef PRECISION_FP32

enum { PART_FORWARD, PART_KV, PART_Q, PART_WALK, NUM_PARTS };
static const char* part_names[NUM_PARTS] = {"forward", "dK dV", "dQ", "walk"};

typedef void (*VariantLaunch)(const Buffers* b, int B);

template <typename Tiles>
static void launch_forward(const Buffers* b, int B) {
    attention_mma_forward_tiles<Tiles>(b->out, b->lse, b->qkv, B, b->args, 0);
}
template <typename Tiles>
static void launch_kv(const Buffers* b, int B) {
    attention_mma_backward_kv<Tiles>(b->dqkv, (const float2*)b->scratch, b->dout, b->qkv, B, b->args, 0);
}
template <typename Tiles>
static void launch_q(const Buffers* b, int B) {
    attention_mma_backward_q<Tiles>(b->dqkv, (const float2*)b->scratch, b->dout, b->qkv, B, b->args, 0);
}

template <typename Tiles>
static void launch_wgmma_forward(const Buffers* b, int B) {
    attention_wgmma_forward_tiles<Tiles>(b->out, b->lse, b->qkv, B, b->args, 0);
}
template <typename Tiles>
static void launch_wgmma_kv(const Buffers* b, int B) {
    attention_wgmma_backward_kv<Tiles>(b->dqkv, (const float2*)b->scratch, NULL, b->dout, b->qkv, B, b->args, 0);
}
template <typename Tiles>
static void launch_wgmma_q(const Buffers* b, int B) {
    attention_wgmma_backward_q<Tiles>(b->dqkv, (float2*)b->scratch, b->dout, {b->qkv, b->out, b->lse}, B, b->args, 0);
}

static WalkOrder card_order(const Buffers* b, int B) { return walk_order(B, b->args.NKV, b->args.T, this_card()->processors); }

template <typename Tiles>
static void launch_walk(const Buffers* b, int B) {
    float2* stats = (float2*)b->scratch;
    attention_stats(stats, b->dout, {b->qkv, b->out, b->lse}, B, b->args, 0);
    attention_walk_tiles<Tiles>(b->dqkv, (float*)(stats + (size_t)B * b->args.NH * b->args.stat_rows), stats, b->dout, b->qkv,
                                card_order(b, B), b->args, 0);
}

/* Runs the whole backward pass in a walk of this order. */
static void launch_order(const Buffers* b, const WalkOrder& order) {
    float2* stats = (float2*)b->scratch;
    const int B = (int)order.heads / b->args.NKV;
    attention_stats(stats, b->dout, {b->qkv, b->out, b->lse}, B, b->args, 0);
    attention_walk_backward(b->dqkv, (float*)(stats + (size_t)B * b->args.NH * b->args.stat_rows), stats, b->dout, b->qkv,
                            order, b->args, 0);
}

typedef struct {
    AttentionKernel family;
    int part, HD;
    const char* tiles;
    VariantLaunch launch;
    const void* kernel;
} Variant;

// clang-format off
#define FORWARD(HD, ...) {ATTENTION_MMA, PART_FORWARD, HD, #__VA_ARGS__, \
                          launch_forward<MmaForwardTiles<HD, __VA_ARGS__, true>>, \
                          (const void*)attention_forward_mma_kernel<MmaForwardTiles<HD, __VA_ARGS__, true>>}
#define KV(HD, ...)      {ATTENTION_MMA, PART_KV, HD, #__VA_ARGS__, launch_kv<MmaKVTiles<HD, __VA_ARGS__, true>>, \
                          (const void*)attention_backward_kv_mma_kernel<MmaKVTiles<HD, __VA_ARGS__, true>>}
#define Q(HD, ...)       {ATTENTION_MMA, PART_Q, HD, #__VA_ARGS__, launch_q<MmaQTiles<HD, __VA_ARGS__, true>>, \
                          (const void*)attention_backward_q_mma_kernel<MmaQTiles<HD, __VA_ARGS__, true>>}
#define WFORWARD(HD, ...) {ATTENTION_WGMMA, PART_FORWARD, HD, #__VA_ARGS__, \
                           launch_wgmma_forward<WgmmaForwardTiles<HD, __VA_ARGS__>>, \
                           (const void*)attention_forward_wgmma_kernel<WgmmaForwardTiles<HD, __VA_ARGS__>>}
#define WKV(HD, ...)      {ATTENTION_WGMMA, PART_KV, HD, #__VA_ARGS__, launch_wgmma_kv<WgmmaKVTiles<HD, __VA_ARGS__>>, \
                           (const void*)attention_backward_kv_wgmma_kernel<WgmmaKVTiles<HD, __VA_ARGS__>>}
#define WQ(HD, ...)       {ATTENTION_WGMMA, PART_Q, HD, #__VA_ARGS__, launch_wgmma_q<WgmmaQTiles<HD, __VA_ARGS__>>, \
                           (const void*)attention_backward_q_wgmma_kernel<WgmmaQTiles<HD, __VA_ARGS__>>}
#define WALK(HD, ...)     {ATTENTION_WALK, PART_WALK, HD, #__VA_ARGS__, launch_walk<WalkTiles<HD, __VA_ARGS__>>, \
                           (const void*)attention_walk_kernel<WalkTiles<HD, __VA_ARGS__>>}
static const Variant variants[] = {
    WALK(64, 5, 2), WALK(64, 4, 2), WALK(64, 5, 1), WALK(128, 3, 1), WALK(128, 2, 1),
    WFORWARD(64, 128, 3, 2, 2, 1), WFORWARD(64, 128, 2, 2, 2, 1), WFORWARD(64, 64, 3, 4, 2, 1),
    WFORWARD(64, 128, 1, 2, 1, 2), WFORWARD(64, 64, 1, 2, 1, 3),
    WFORWARD(128, 128, 2, 2, 1, 1), WFORWARD(128, 64, 2, 4, 2, 1), WFORWARD(128, 64, 3, 3, 1, 1), WFORWARD(128, 64, 1, 2, 1, 2),
    WKV(64, 64, 2, 5, 2, 1, false), WKV(64, 64, 2, 5, 2, 1, true), WKV(128, 64, 2, 4, 1, 1, true),
    WQ(64, 64, 3, 4, 2, 1, 0), WQ(64, 64, 2, 4, 2, 1, 0), WQ(64, 64, 2, 4, 2, 1, 2),
    WQ(128, 64, 2, 4, 1, 1, 0), WQ(128, 64, 2, 4, 1, 1, 1),
    FORWARD(64, 64, 2, 4, 2), FORWARD(64, 128, 2, 4, 2), FORWARD(64, 64, 1, 4, 4), FORWARD(64, 64, 1, 8, 2),
    FORWARD(64, 32, 2, 4, 3),
    FORWARD(128, 32, 2, 4, 2), FORWARD(128, 64, 2, 4, 2), FORWARD(128, 48, 2, 4, 2),
    FORWARD(128, 64, 1, 4, 3), FORWARD(128, 64, 1, 8, 1),
    KV(64, 64, 32, 2, 4, 2), KV(64, 64, 64, 2, 4, 2), KV(64, 64, 64, 1, 4, 3), KV(64, 64, 32, 1, 4, 4), KV(64, 64, 64, 1, 8, 1),
    KV(128, 64, 64, 1, 4, 2), KV(128, 64, 32, 1, 4, 2), KV(128, 32, 32, 1, 4, 2), KV(128, 64, 64, 1, 8, 1),
    Q(64, 64, 32, 2, 4, 2), Q(64, 64, 64, 2, 4, 2), Q(64, 64, 32, 2, 4, 3), Q(64, 64, 64, 1, 4, 3), Q(64, 64, 64, 1, 8, 2),
    Q(128, 32, 32, 2, 4, 2), Q(128, 32, 32, 1, 4, 3), Q(128, 64, 64, 1, 8, 1), Q(128, 64, 32, 2, 8, 1),
};
// clang-format on

static std::vector<float> fetch(const floatX* x, size_t n) {
    std::vector<floatX> raw(n);
    CUDA_CHECK(cudaMemcpy(raw.data(), x, n * sizeof(floatX), cudaMemcpyDeviceToHost));
    std::vector<float> v(n);
    for (size_t i = 0; i < n; i++) { v[i] = to_float(raw[i]); }
    return v;
}

/* Returns the relative L2 distance of a variant's result from the plain kernel's, at an odd length. */
static double variant_error(const Variant* v) {
    const Shape s = {{1, 777, 4, 2, v->HD}, ""};
    Buffers b = allocate(&s);
    const size_t N = (size_t)s.B * s.T, q_width = (size_t)s.NH * s.HD;
    attention_forward_cuda(b.out, b.lse, b.qkv, s.B, b.args, 0, ATTENTION_PLAIN);
    attention_backward_cuda(b.dqkv, b.scratch, b.dout, {b.qkv, b.out, b.lse}, s.B, b.args, 0, ATTENTION_PLAIN);
    const bool is_forward = v->part == PART_FORWARD;
    const size_t pitch = is_forward ? b.args.out_pitch : b.args.qkv_pitch;
    floatX* result = is_forward ? b.out : b.dqkv;
    const std::vector<float> want = fetch(result, N * pitch);
    CUDA_CHECK(cudaMemset(result, 0xff, N * pitch * sizeof(floatX)));
    v->launch(&b, s.B);
    const std::vector<float> got = fetch(result, N * pitch);
    release(&b);
    const size_t from = v->part == PART_KV ? q_width : 0, to = v->part == PART_KV ? pitch : q_width;
    double diff = 0, norm = 0;
    for (size_t i = 0; i < N * pitch; i++) {
        if (i % pitch < from || i % pitch >= to) { continue; }
        diff += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        norm += (double)want[i] * want[i];
    }
    return sqrt(diff / norm);
}

/* Times the variants of one family, or of all (AUTO). */
static void bench_variants(AttentionKernel family) {
    const double products[NUM_PARTS] = {1, 2, 1.5, 2.5};  // relative to the forward pass's two products
    printf("\n%-6s %-8s %3s %-30s %9s %5s %5s |", "kernel", "part", "HD", "tiles", "error", "regs", "stack");
    for (int T : {1024, 2048, 8192}) { printf(" T %5d ms TFLOP/s", T); }
    printf("\n");
    for (const Variant& v : variants) {
        if (!attention_has_kernel(v.family, v.HD) || (family != ATTENTION_AUTO && v.family != family)) { continue; }
        cudaFuncAttributes f;
        CUDA_CHECK(cudaFuncGetAttributes(&f, v.kernel));
        printf("%-6s %-8s %3d %-30s %9.1e %5d %5zu |", kernel_names[v.family], part_names[v.part], v.HD, v.tiles,
               variant_error(&v), f.numRegs, f.localSizeBytes);
        for (int T : {1024, 2048, 8192}) {
            const Shape s = {{(v.HD == 64 ? 32768 : 16384) / T, T, 32, 8, v.HD}, ""};
            Buffers b = allocate(&s);
            attention_forward_cuda(b.out, b.lse, b.qkv, s.B, b.args, 0);
            const float ms = time_ms([&]() { v.launch(&b, s.B); });
            printf(" %10.3f %7.1f", ms, products[v.part] * forward_flops(&s) / ms * 1e-9);
            release(&b);
        }
        printf("\n");
        fflush(stdout);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// all lengths

/* Runs launch() for at least 60 ms and adds the milliseconds of each run. */
template <typename F>
static void time_turn(std::vector<float>* ms, F launch) {
    cudaEvent_t begin, end;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    launch();
    for (float all = 0; all < 60;) {
        float now;
        CUDA_CHECK(cudaEventRecord(begin));
        launch();
        CUDA_CHECK(cudaEventRecord(end));
        CUDA_CHECK(cudaEventSynchronize(end));
        CUDA_CHECK(cudaEventElapsedTime(&now, begin, end));
        ms->push_back(now);
        all += now;
    }
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
}

enum { SWEEP_MMA, SWEEP_WGMMA, SWEEP_PAIRS, SWEEP_WALK, NUM_SWEEP };
static const char* sweep_names[NUM_SWEEP] = {"mma", "wgmma", "pairs", "walk"};

/* Returns the values of every 16th row of dqkv. */
static std::vector<floatX> sixteenth(const Buffers* b, int B) {
    const size_t rows = ceil_div((size_t)B * b->args.T, 16), bytes = b->args.qkv_pitch * sizeof(floatX);
    std::vector<floatX> x(rows * b->args.qkv_pitch);
    CUDA_CHECK(cudaMemcpy2D(x.data(), bytes, b->dqkv, 16 * bytes, bytes, rows, cudaMemcpyDeviceToHost));
    return x;
}

/* Returns how far the results of two turns of two kernels and of a walk are apart: the relative L2 distance of the kernels and
 * the walk; 1 if two turns of a kernel differ in any bit. */
static double sweep_error(const std::vector<floatX> (&results)[2][2]) {
    double diff = 0, norm = 0;
    for (size_t i = 0; i < results[0][0].size(); i++) {
        const double x = to_float(results[0][0][i]), e = x - to_float(results[1][0][i]);
        diff += e * e, norm += x * x;
    }
    for (auto& turns : results) {
        if (memcmp(turns[0].data(), turns[1].data(), turns[0].size() * sizeof(floatX)) != 0) { return 1; }
    }
    return sqrt(diff / norm);
}

/* Times the backward kernels at a length and appends a line to `file`. */
static void sweep_length(FILE* file, int T, int HD) {
    const Shape s = {{(int)size_max(1, (HD == 64 ? 32768 : 8192) / (size_t)T), T, 32, 8, HD}, ""};
    Buffers b = allocate(&s);
    attention_forward_cuda(b.out, b.lse, b.qkv, s.B, b.args, 0);
    const WalkOrder order = card_order(&b, s.B);
    const size_t processors = (size_t)this_card()->processors;
    const WalkOrder pairs = walk_order_of(s.B, s.NKV, T, (order.tiles + 1) / 2, processors);
    std::vector<float> ms[NUM_SWEEP];
    std::vector<floatX> results[2][2];  // of wgmma and walk, in two turns
    for (int i = 0; i < 2 * NUM_SWEEP; i++) {
        const int way = i < NUM_SWEEP ? i : 2 * NUM_SWEEP - 1 - i;
        const AttentionKernel kernel = way == SWEEP_MMA ? ATTENTION_MMA : ATTENTION_WGMMA;
        if (!attention_has_kernel(kernel, HD) || (way >= SWEEP_PAIRS && !this_card()->together)) { continue; }
        CUDA_CHECK(cudaMemset(b.dqkv, 0xff, (size_t)s.B * T * b.args.qkv_pitch * sizeof(floatX)));
        time_turn(&ms[way], [&]() {
            if (way >= SWEEP_PAIRS) { return launch_order(&b, way == SWEEP_WALK ? order : pairs); }
            attention_backward_cuda(b.dqkv, b.scratch, b.dout, {b.qkv, b.out, b.lse}, s.B, b.args, 0, kernel);
        });
        if (way == SWEEP_WGMMA || way == SWEEP_WALK) { results[way == SWEEP_WALK][i >= NUM_SWEEP] = sixteenth(&b, s.B); }
    }
    release(&b);
    const int chosen = attention_choose(ATTENTION_AUTO, CHOOSE_ATTENTION_BACKWARD, s.B, b.args);
    const int taken = chosen == ATTENTION_WALK ? SWEEP_WALK : chosen == ATTENTION_WGMMA ? SWEEP_WGMMA : SWEEP_MMA;
    float best = INFINITY, median[NUM_SWEEP];
    for (int way = 0; way < NUM_SWEEP; way++) {
        std::sort(ms[way].begin(), ms[way].end());
        median[way] = ms[way].empty() ? NAN : ms[way][ms[way].size() / 2];
        best = fminf(best, median[way]);
    }
    for (FILE* out : {stdout, file}) {
        fprintf(out, "%3d %6d %3d |", HD, T, s.B);
        for (const float m : median) { fprintf(out, " %9.3f", m); }
        fprintf(out, " | %3u x %3u | %-6s %6.3f | %.1e\n", order.blocks, order.together, sweep_names[taken],
                best / median[taken], results[1][0].empty() ? 0 : sweep_error(results));
        fflush(out);
    }
}

static void bench_sweep(double seconds, const char* path) {
    const time_t begin = time(NULL);
    bool done[129][65] = {};  // by head_dim and T / 1024
    FILE* file = fopen(path, "a+");
    if (!file) { die("%s: %s", path, strerror(errno)); }
    char line[256];
    for (int HD, T; fgets(line, sizeof line, file);) {
        if (sscanf(line, "%d %d", &HD, &T) == 2 && (HD == 64 || HD == 128) && T <= 65536) { done[HD][T / 1024] = true; }
    }
    printf("%3s %6s %3s |", "HD", "T", "B");
    for (const char* name : sweep_names) { printf(" %6s ms", name); }
    printf(" | blocks    | taken, best / taken | error\n");
    int left = 0;
    for (int step = 32; step > 0; step /= 2) {
        for (int n = step; n <= 64; n += step) {
            for (int HD : {64, 128}) {
                if (done[HD][n]) { continue; }
                done[HD][n] = true;
                if (difftime(time(NULL), begin) < seconds) {
                    sweep_length(file, n * 1024, HD);
                } else {
                    left++;
                }
            }
        }
    }
    fclose(file);
    if (left > 0) { printf("%d lengths are left: the same command continues\n", left); }
}

#endif  // PRECISION_FP32

int main(int argc, char** argv) {
    const bool sweep = argc == 4 && strcmp(argv[1], "sweep") == 0;
    const bool with_variants = argc > 1 && strcmp(argv[1], "variants") == 0;
    int named = NUM_ATTENTION_KERNELS;
    for (int k = ATTENTION_AUTO; k < NUM_ATTENTION_KERNELS; k++) {
        if (argc > 1 && strcmp(argv[argc - 1], kernel_names[k]) == 0) { named = k; }
    }
    const bool no_name = named == NUM_ATTENTION_KERNELS, family = named >= ATTENTION_MMA && !no_name;
    if (!sweep && (argc > 3 || (argc == 2 && !with_variants && no_name) || (argc == 3 && !(with_variants && family)))) {
        die_usage("usage: %s [auto|plain|mma|wgmma|walk|variants [mma|wgmma|walk]|sweep SECONDS FILE]", argv[0]);
    }
    cudaDeviceProp p;
    CUDA_CHECK(cudaGetDeviceProperties(&p, 0));
    printf("%s, %s, code for sm_%d\n", p.name, PRECISION_NAME, compiled_arch(attention_stats_kernel<32, 2>));
    if (argc < 3) { bench_kernels(no_name, (AttentionKernel)named); }
#ifndef PRECISION_FP32
    if (sweep) { bench_sweep(atof(argv[2]), argv[3]); }
    if (with_variants) { bench_variants(argc == 3 ? (AttentionKernel)named : ATTENTION_AUTO); }
#endif
    return 0;
}
