/* matmul_timing.cuh -- times the algorithms of a matrix product one by one, on random data, for the benchmarks.
 *
 * The time of a product alone is no guide for training: a faster product draws more power, and all kernels slow down. But it
 * shows how far the heuristic's first choice is from the fastest. A time is the median of rounds in random orders, in
 * microseconds: TFLOP/s = 2e-6 M N K / us. The data is random: on zeros the card clocks higher than it ever will in training.
 */
#ifndef TEST_MATMUL_TIMING_CUH
#define TEST_MATMUL_TIMING_CUH

#include "llmc/base/rand.h"
#include "dev/test/cuda/matmul_algos.cuh"

enum {
    MATMUL_CANDIDATES = 80,  // timed, at most
    MATMUL_ROUNDS = 5,       // of timing
};

/* Sets x[i] to a standard normal that is a function of (seed, i): measuring needs the bit patterns of real data. */
template <typename T>
__global__ void random_fill_kernel(T* x, size_t n, uint64_t seed) {
    const size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (i >= n) { return; }
    const Philox r = philox(seed, RAND_INIT, 0, i / 4);
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
        const float radius = sqrtf(-2.0f * __logf(((float)r.v[k] + 1.0f) * 2.3283064e-10f));
        float s, c;
        __sincosf(6.2831853f * ((float)r.v[k + 1] * 2.3283064e-10f), &s, &c);
        if (i + k < n) { x[i + k] = from_float<T>(radius * c); }
        if (i + k + 1 < n) { x[i + k + 1] = from_float<T>(radius * s); }
    }
}

template <typename T>
static void random_fill_cuda(T* x, size_t n, uint64_t seed, cudaStream_t stream) {
    if (n == 0) { return; }
    random_fill_kernel<<<(unsigned)ceil_div(n, 4 * 256), 256, 0, stream>>>(x, n, seed);
    CUDA_CHECK_LAUNCH("random_fill_kernel");
}

/* Queues one product of a plan by `algo`. buffers: A, B, and D, which is also C */
static inline cublasStatus_t matmul_launch(const MatmulContext* c, const MatmulPlan* p, const cublasLtMatmulAlgo_t* algo,
                                           char* const buffers[3], cudaStream_t stream) {
    const float one = 1.0f, beta = p->key.v[KEY_ADD] ? 1.0f : 0.0f;
    return cublasLtMatmul(c->handle, p->product, &one, buffers[1], p->a, buffers[0], p->b, &beta, buffers[2], p->c, buffers[2],
                          p->d, algo, c->workspace, c->workspace_bytes, stream);
}

/* Returns the microseconds of one product, averaged over `repeats`; negative if it does not run. */
static inline float matmul_time(MatmulContext* c, const MatmulPlan* p, const cublasLtMatmulAlgo_t* algo, char* buffers[3],
                                int repeats, cudaEvent_t start, cudaEvent_t end, cudaStream_t stream) {
    CUDA_CHECK(cudaEventRecord(start, stream));
    for (int i = 0; i < repeats; i++) {
        if (matmul_launch(c, p, algo, buffers, stream) != CUBLAS_STATUS_SUCCESS) { return -1.0f; }
    }
    CUDA_CHECK(cudaEventRecord(end, stream));
    CUDA_CHECK(cudaEventSynchronize(end));
    float ms = 0;
    CUDA_CHECK(cudaEventElapsedTime(&ms, start, end));
    return ms * 1000.0f / (float)repeats;
}

/* Returns the bytes of scratch that timing a plan needs. `bytes` receives the sizes of A, B and D. */
static inline size_t matmul_timing_bytes(const MatmulKey* key, size_t bytes[3]) {
    const int64_t* v = key->v;
    bytes[0] = (size_t)((v[KEY_TRANS_A] ? v[KEY_K] : v[KEY_M]) * v[KEY_LD_A]) * matmul_type_bytes(v[KEY_TYPE_A]);
    bytes[1] = (size_t)((v[KEY_TRANS_B] ? v[KEY_N] : v[KEY_K]) * v[KEY_LD_B]) * matmul_type_bytes(v[KEY_TYPE_B]);
    bytes[2] = (size_t)(v[KEY_M] * v[KEY_LD_D]) * matmul_type_bytes(v[KEY_TYPE_D]);
    return round_up(bytes[0], 256) + round_up(bytes[1], 256) + round_up(bytes[2], 256);
}

/* Times candidates in MATMUL_ROUNDS rounds, each in its own order, which depends on `seed`. us: each candidate's median, since
 * its best time may come from a moment when the card was cool. It is negative for a candidate that does not run, or that is out
 * because it first took 1.3 times as long as the fastest. Returns how many ran. */
static inline int matmul_time_candidates(MatmulContext* c, const MatmulPlan* p, const cublasLtMatmulAlgo_t* algos, int count,
                                         float* us, char* buffers[3], uint64_t seed, cudaStream_t stream) {
    cudaEvent_t start, end;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&end));
    float times[MATMUL_CANDIDATES][MATMUL_ROUNDS], fastest = INFINITY;
    int order[MATMUL_CANDIDATES], ran = 0;
    for (int i = 0; i < count; i++) {
        order[i] = i;
        us[i] = matmul_time(c, p, &algos[i], buffers, 1, start, end, stream);  // also loads its code
        if (us[i] < 0) { continue; }
        us[i] = matmul_time(c, p, &algos[i], buffers, 2, start, end, stream);
        fastest = fminf(fastest, us[i]);
        ran++;
    }
    for (int i = 0; i < count; i++) {
        if (us[i] > 1.3f * fastest) { us[i] = -1.0f; }
    }
    for (int round = 0; round < MATMUL_ROUNDS; round++) {
        for (int i = count - 1; i > 0; i--) {
            const int j = (int)philox_below(seed, RAND_INIT, (uint32_t)round, (uint64_t)i, (uint64_t)i + 1);
            const int other = order[i];
            order[i] = order[j];
            order[j] = other;
        }
        for (int i = 0; i < count; i++) {
            const int k = order[i];
            if (us[k] < 0) { continue; }
            const int repeats = (int)size_max(1, size_min(50, (size_t)(2000.0f / (us[k] + 1.0f))));
            times[k][round] = matmul_time(c, p, &algos[k], buffers, repeats, start, end, stream);
        }
    }
    for (int i = 0; i < count; i++) {
        if (us[i] < 0) { continue; }
        qsort(times[i], MATMUL_ROUNDS, sizeof(float), compare_floats);
        us[i] = times[i][MATMUL_ROUNDS / 2];
    }
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(end));
    return ran;
}

/* Returns the index of the fastest of `count` times; -1 if none ran. */
static inline int matmul_fastest(const float* us, int count) {
    int best = -1;
    for (int k = 0; k < count; k++) {
        if (us[k] >= 0 && (best < 0 || us[k] < us[best])) { best = k; }
    }
    return best;
}

/* Fills `scratch` with random factors and C of a plan. */
static inline void matmul_timing_fill(const MatmulPlan* p, char* buffers[3], void* scratch, cudaStream_t stream) {
    size_t bytes[3];
    char* at = (char*)scratch;
    matmul_timing_bytes(&p->key, bytes);
    for (int i = 0; i < 3; i++) {
        const bool wide = matmul_type_bytes(p->key.v[i == 0 ? KEY_TYPE_A : i == 1 ? KEY_TYPE_B : KEY_TYPE_D]) == 4;
        buffers[i] = at;
        at += round_up(bytes[i], 256);
        if (wide) {
            random_fill_cuda((float*)buffers[i], bytes[i] / sizeof(float), (uint64_t)i, stream);
        } else {
            random_fill_cuda((floatX*)buffers[i], bytes[i] / sizeof(floatX), (uint64_t)i, stream);
        }
    }
}

/* Times of a second measurement: the heuristic's first algorithm, the choice, the fastest. Negative: not measured. */
typedef struct {
    float first_us, choice_us, best_us;
} MatmulRetimed;

/* Times the candidates of one plan and gives it the fastest; keeps the heuristic's first if nothing is 1 % faster. scratch:
 * device memory, whose contents are lost. retimed: NULL, or filled from a second measurement in other orders. Returns how many
 * candidates ran, 0 if the scratch is too small or the factors have scales. Synchronizes. */
static inline int matmul_choose_alone(MatmulContext* c, MatmulPlan* p, void* scratch, size_t scratch_bytes,
                                      MatmulRetimed* retimed, cudaStream_t stream) {
    size_t bytes[3];
    if (matmul_timing_bytes(&p->key, bytes) > scratch_bytes || p->key.v[KEY_SCALED]) { return 0; }
    char* buffers[3];
    matmul_timing_fill(p, buffers, scratch, stream);
    float us[MATMUL_CANDIDATES];
    const MatmulAlgos list = matmul_algos(c, p);
    const int count = list.count;
    const cublasLtMatmulAlgo_t* algos = list.algos;
    const int ran = matmul_time_candidates(c, p, algos, count, us, buffers, 0, stream);
    int choice = matmul_fastest(us, count);
    if (choice < 0) { return 0; }
    if (us[0] >= 0 && us[choice] > 0.99f * us[0]) { choice = 0; }
    p->algo = algos[choice];
    if (retimed) {
        matmul_time_candidates(c, p, algos, count, us, buffers, 1, stream);
        const int best = matmul_fastest(us, count);
        const MatmulRetimed r = {us[0], us[choice], best < 0 ? -1.0f : us[best]};
        *retimed = r;
    }
    return ran;
}

#endif
