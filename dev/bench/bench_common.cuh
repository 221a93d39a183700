/* bench_common.cuh -- the benchmarks' shared parts: device memory that the program keeps; the fastest algorithm of a single
 * product.
 */
#ifndef TEST_BENCH_COMMON_CUH
#define TEST_BENCH_COMMON_CUH

#include "matmul_timing.cuh"

/* Takes n elements of device memory, which the program keeps to its end. */
template <typename T>
static T* take(size_t n) {
    T* p = NULL;
    CUDA_CHECK(cudaMalloc((void**)&p, n * sizeof(T)));
    return p;
}

/* Takes n elements filled with normals. */
template <typename T>
static T* take_random(size_t n) {
    T* p = take<T>(n);
    random_fill_cuda(p, n, n, 0);
    return p;
}

static MatmulContext* take_matmul() { return matmul_create(take<char>(matmul_workspace_bytes()), false); }

enum { CANDIDATES = 8 };

/* Returns the key of D (M, N) = op(A) op(B) with packed rows. */
static MatmulKey product_key(cudaDataType_t type, FactorSide a, FactorSide b, size_t M, size_t N, size_t K) {
    MatmulKey key;
    memset(&key, 0, sizeof key);
    int64_t* v = key.v;
    v[KEY_M] = (int64_t)M, v[KEY_N] = (int64_t)N, v[KEY_K] = (int64_t)K;
    v[KEY_TRANS_A] = a == TRANSPOSED, v[KEY_TRANS_B] = b == TRANSPOSED;
    v[KEY_TYPE_A] = v[KEY_TYPE_B] = type;
    v[KEY_TYPE_D] = CUDA_R_16BF;
    v[KEY_LD_A] = a == TRANSPOSED ? v[KEY_M] : v[KEY_K];
    v[KEY_LD_B] = b == TRANSPOSED ? v[KEY_K] : v[KEY_N];
    v[KEY_LD_C] = v[KEY_LD_D] = v[KEY_N];
    v[KEY_ALIGN_A] = v[KEY_ALIGN_B] = v[KEY_ALIGN_C] = v[KEY_ALIGN_D] = 256;
    return key;
}

/* Finds the fastest of the heuristic's algorithms for a plan's descriptors. Returns how many of them ran. */
static int choose(MatmulContext* ctx, const MatmulPlan* p, char* buffers[3], cublasLtMatmulAlgo_t* algo) {
    cublasLtMatmulHeuristicResult_t results[CANDIDATES];
    cublasLtMatmulAlgo_t algos[CANDIDATES];
    float us[CANDIDATES];
    const int count = matmul_candidates(ctx, p, results, CANDIDATES);
    for (int i = 0; i < count; i++) { algos[i] = results[i].algo; }
    const int ran = matmul_time_candidates(ctx, p, algos, count, us, buffers, 0, 0);
    const int best = matmul_fastest(us, count);
    if (best < 0) { return 0; }
    *algo = algos[best];
    return ran;
}

#endif
