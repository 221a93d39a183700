/* bench_kernels.cu -- measures how close each CUDA layer comes to the card's limits.
 *
 *   make build/bench_kernels_cu && build/bench_kernels_cu [variants|matmul] [WORD]    lines whose name contains WORD
 *
 * `variants` times the launch options from which a layer's launcher chose, in turns with a device-to-device copy. The last
 * column is the share of that copy's bandwidth. Bytes are those the layer must move: each input once, each output once.
 * dev/cuda times the kernels themselves. Matrix products run at the shapes of Llama models on normally distributed data, each
 * by all of matmul_algos(), one after the other. Algorithms that ran are timed again, in five rounds in other orders. Columns:
 * TFLOP/s of the heuristic's first algorithm, of the first measurement's fastest and of the second's; then the first two as
 * shares of the third.
 */
#include <functional>
#include <string>
#include <vector>

#include "llmc/crossentropy.cuh"
#include "llmc/embedding.cuh"
#include "llmc/rmsnorm.cuh"
#include "matmul_timing.cuh"

static const char* wanted = "";
static char* arena;  // all device memory that this program uses
static size_t arena_bytes, arena_used;
static cudaEvent_t events[3];

/* Takes n elements of the arena; their contents are undefined. */
template <typename T>
static T* take(size_t n) {
    arena_used = round_up(arena_used, 256);
    T* p = (T*)(arena + arena_used);
    arena_used += n * sizeof(T);
    if (arena_used > arena_bytes) { die("bench_kernels: %zu bytes of device memory are too few", arena_bytes); }
    return p;
}

/* Takes n elements filled with normals. */
template <typename T>
static T* take_random(size_t n) {
    T* p = take<T>(n);
    random_fill_cuda(p, n, n, 0);
    return p;
}

/* Times `launch`, which moves `bytes`, in turns with a copy of one gigabyte; prints medians. The host queues the launch while
 * the copy runs, as it queues launches ahead in a training step. So the host's part of a launch is not timed. */
static void measure(const char* name, double bytes, const std::function<void()>& launch) {
    enum { ROUNDS = 11 };
    if (!strstr(name, wanted)) { return; }
    const size_t used = arena_used, copied = (size_t)1 << 30;
    char *from = take<char>(copied), *to = take<char>(copied);
    float kernel[ROUNDS], copy[ROUNDS];
    launch();
    for (int i = 0; i < ROUNDS; i++) {
        CUDA_CHECK(cudaEventRecord(events[0], 0));
        CUDA_CHECK(cudaMemcpyAsync(to, from, copied, cudaMemcpyDeviceToDevice, 0));
        CUDA_CHECK(cudaEventRecord(events[1], 0));
        launch();
        CUDA_CHECK(cudaEventRecord(events[2], 0));
        CUDA_CHECK(cudaEventSynchronize(events[2]));
        CUDA_CHECK(cudaEventElapsedTime(&copy[i], events[0], events[1]));
        CUDA_CHECK(cudaEventElapsedTime(&kernel[i], events[1], events[2]));
    }
    qsort(kernel, ROUNDS, sizeof(float), compare_floats);
    qsort(copy, ROUNDS, sizeof(float), compare_floats);
    const double rate = bytes / (kernel[ROUNDS / 2] * 1e6), limit = 2.0 * (double)copied / (copy[ROUNDS / 2] * 1e6);
    printf("%-56s %9.3f ms %8.1f GB/s  copy %8.1f GB/s %6.1f %%\n", name, (double)kernel[ROUNDS / 2], rate, limit,
           100.0 * rate / limit);
    fflush(stdout);
    arena_used = used;
}

/* Runs embedding's backward pass at the sizes of training steps and on more than 1 GB. Tokens are uniform or, as in text, the
 * k-th most frequent has a share of about 1 / k (Zipf). The pass reads each gradient row once; it reads and writes each table
 * row that occurs. Times how many rows a thread has in flight. */
static void bench_embedding() {
    static const struct {
        size_t N, C, V;
        bool zipf;
    } shapes[] = {{65536, 768, 32768, false},    {32768, 2048, 128256, false}, {8192, 4096, 128256, false},
                  {65536, 768, 257, false},      {1048576, 768, 32768, false}, {262144, 2048, 128256, false},
                  {131072, 4096, 128256, false}, {1048576, 768, 32768, true},  {262144, 2048, 128256, true}};
    const double X = sizeof(floatX);
    char name[96];
    for (auto& s : shapes) {
        arena_used = 0;
        const size_t N = s.N, C = s.C, V = s.V;
        snprintf(name, sizeof name, "embedding N=%zu C=%zu V=%zu%s", N, C, V, s.zipf ? " Zipf" : "");
        const std::string shape = strchr(name, ' ');
        int32_t* tokens = take<int32_t>(N);
        std::vector<int32_t> host(N);
        std::vector<bool> occurs(V);
        size_t rows = 0;
        for (size_t i = 0; i < N; i++) {
            const uint64_t random = philox_below(1, RAND_INIT, 0, i, (uint64_t)1 << 32);
            const double u = (double)random / 4294967296.0;
            host[i] = (int32_t)(s.zipf ? pow((double)V + 1, u) - 1 : u * (double)V);
            rows += !occurs[host[i]];
            occurs[host[i]] = true;
        }
        CUDA_CHECK(cudaMemcpy(tokens, host.data(), N * sizeof(int32_t), cudaMemcpyHostToDevice));
        floatX *table = take_random<floatX>(V * C), *dout = take_random<floatX>(N * C);
        void* scratch = take<char>(embedding_backward_scratch_cuda(N, (int)C));
        const double bytes = X * C * (N + 2.0 * rows);
        const std::string what = "embedding backward" + shape;
        measure(what.c_str(), bytes,
                [&] { embedding_backward_cuda(table, scratch, dout, tokens, (int)V, {N, (int)C, (size_t)C}, 0); });
    }
}

/* Times the launch options from which the launchers chose one. */
static void bench_variants() {
    const double X = sizeof(floatX);
    char name[96];
    for (int C : {768, 2048, 4096}) {
        arena_used = 0;
        const size_t N = ((size_t)1 << 29) / (size_t)C / sizeof(floatX);  // 0.5 GB a tensor
        floatX *x = take_random<floatX>(N * C), *out = take_random<floatX>(N * C), *y = take_random<floatX>(N * C),
               *w = take_random<floatX>(C);
        float *rstd = take_random<float>(N), *dw = take_random<float>(C);
        for (int threads : {256, 384, 512}) {
            const RmsnormBackwardPlan plan = rmsnorm_backward_plan(N, C, threads);
            void* scratch = take<char>(plan.blocks * C * sizeof(float));
            snprintf(name, sizeof name, "rmsnorm backward C=%d, %zu x %d threads", C, plan.blocks, threads);
            measure(name, 4 * X * N * C, [&] {
                rmsnorm_backward_cuda(y, dw, scratch, out, {x, w, rstd}, {N, C, (size_t)C}, 0, threads);
            });
        }
        for (int threads : {64, 128, 256, 512}) {
            snprintf(name, sizeof name, "rmsnorm forward C=%d, %d threads", C, threads);
            measure(name, 2 * X * N * C, [&] {
                rmsnorm_forward_launch(out, rstd, x, w, {N, C, (size_t)C}, 1e-5f, threads, 0);
            });
        }
    }
    for (int V : {32768, 50257, 128256, 262144}) {
        arena_used = 0;
        const size_t pitch = row_pitch<floatX>(V), N = ((size_t)1 << 30) / pitch / sizeof(floatX);
        floatX* logits = take_random<floatX>(N * pitch);
        float* losses = take<float>(N);
        int32_t* targets = take<int32_t>(N);
        CUDA_CHECK(cudaMemset(targets, 0, N * sizeof(int32_t)));
        static const char* const ways[NUM_CE_WAYS] = {"held", "row", "looped"};
        for (int way = 0; way < NUM_CE_WAYS; way++) {
            const CrossentropyPlan plan = crossentropy_plan((CrossentropyWay)way, N, V);
            if (plan.blocks == 0) { continue; }
            snprintf(name, sizeof name, "cross-entropy V=%d, %s, %zu x %d", V, ways[way], plan.blocks, plan.threads);
            measure(name, 2 * X * N * V, [&] { crossentropy_run(&plan, losses, logits, targets, 1.0f, NULL, {N, V, pitch}, 0); });
        }
    }
    bench_embedding();
}

static void bench_matmul() {
    arena_used = 0;
    static const struct {
        const char* model;
        size_t N;
        int C, QKV, Q, F, V;
        size_t chunk;
    } models[] = {
        {"126M", 65536, 768, 1280, 768, 2048, 32768, 8192},
        {"1B", 32768, 2048, 3072, 2048, 8192, 128256, 4096},
        {"8B", 8192, 4096, 6144, 4096, 14336, 128256, 4096},
    };
    MatmulContext* ctx = matmul_create(take<char>(matmul_workspace_bytes()), false);
    const size_t used = arena_used;
    printf("%-28s %22s %10s %10s %10s %8s %8s %5s\n", "product", "M x N x K", "first", "choice", "best", "first", "choice",
           "ran");
    for (auto& m : models) {
        const struct {
            const char* name;
            size_t N;
            int C, OC;
            bool residual;
        } layers[] = {{"qkv", m.N, m.C, m.QKV, false},
                      {"o", m.N, m.Q, m.C, true},
                      {"gate_up", m.N, m.C, 2 * m.F, false},
                      {"down", m.N, m.F, m.C, true},
                      {"head", m.chunk, m.C, m.V, false}};
        for (auto& l : layers) {
            for (int pass = 0; pass < 3; pass++) {
                static const char* passes[] = {"forward", "input", "weight"};
                char name[64];
                snprintf(name, sizeof name, "%s %s %s", m.model, l.name, passes[pass]);
                if (!strstr(name, wanted)) { continue; }
                arena_used = used;
                floatX *x = take_random<floatX>(l.N * l.C), *w = take_random<floatX>((size_t)l.OC * l.C),
                       *y = take_random<floatX>(l.N * l.OC);
                const int before = ctx->num_plans;
                if (pass == 0) {
                    matmul_forward_cuda(ctx, output(y, l.OC), operand(x, l.C), operand(w, l.C), l.residual ? y : NULL,
                                        {l.N, l.C, l.OC}, 0);
                } else if (pass == 1) {
                    matmul_backward_input_cuda(ctx, output(x, l.C), operand(y, l.OC), operand(w, l.C), {l.N, l.C, l.OC}, 0);
                } else {
                    matmul_backward_weight_cuda(ctx, output(w, l.C), operand(y, l.OC), operand(x, l.C), {l.N, l.C, l.OC}, true, 0);
                }
                MatmulPlan* p = &ctx->plans[before];
                arena_used = used;
                size_t bytes[3];
                const size_t need = matmul_timing_bytes(&p->key, bytes);
                MatmulRetimed again;
                const int ran = matmul_choose_alone(ctx, p, take<char>(need), need, &again, 0);
                const double tflop = 2e-6 * (double)l.N * l.C * l.OC;
                char shape[64];
                snprintf(shape, sizeof shape, "%lld x %lld x %lld", (long long)p->key.v[KEY_M], (long long)p->key.v[KEY_N],
                         (long long)p->key.v[KEY_K]);
                printf("%-28s %22s %10.1f %10.1f %10.1f %8.3f %8.3f %5d\n", name, shape, tflop / again.first_us,
                       tflop / again.choice_us, tflop / again.best_us, (double)(again.best_us / again.first_us),
                       (double)(again.best_us / again.choice_us), ran);
                fflush(stdout);
            }
        }
    }
    matmul_destroy(ctx);
}

int main(int argc, char** argv) {
    const char* part = argc > 1 ? argv[1] : "";
    const bool variants = !*part || !strcmp(part, "variants");
    const bool matmul = !*part || !strcmp(part, "matmul");
    if (!variants && !matmul) { die("bench_kernels: the part is '%s', wanted variants or matmul", part); }
    if (argc > 2) { wanted = argv[2]; }
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) { die("bench_kernels: no GPU here"); }
    size_t available = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&available, &total));
    arena_bytes = size_min(available / 10 * 9, (size_t)24 << 30);
    CUDA_CHECK(cudaMalloc(&arena, arena_bytes));
    for (cudaEvent_t& event : events) { CUDA_CHECK(cudaEventCreate(&event)); }
    char gpu[256];
    device_name(gpu);
    printf("%s, %s\n", gpu, PRECISION_NAME);
    if (variants) { bench_variants(); }
    if (matmul) { bench_matmul(); }
    return 0;
}
