/* attention_timing.cuh -- what the benchmarks of attention share: shapes of models, their random data, and times of launches.
 */
#ifndef BENCH_ATTENTION_TIMING_CUH
#define BENCH_ATTENTION_TIMING_CUH

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
    {{  4,  8192, 32, 8,  64}, "1B_500", 500},
    {{  1,  8192, 32, 8, 128}, "8B_500", 500},
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

#endif
