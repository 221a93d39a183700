/* matmul.cuh -- x W^T and its two gradients on the GPU, through cuBLASLt. The oracle is matmul.h.
 *
 *   forward          out (N, OC)  = x (N, C) W^T [+ residual]   W: (OC, C)
 *   backward input   dx (N, C)    = dout (N, OC) W   [+ dx]
 *   backward weight  dW (OC, C)   = dout^T x         [+ dW]
 *
 * Ours is row-major, cuBLAS reads memory column by column. A row-major matrix read by columns is its transpose, so we ask
 * for the transposed product, with the factors exchanged; nothing is moved:
 *
 *      row-major               the same memory, by columns
 *      D = op(A) op(B)         D' = op(B)' op(A)'
 *     (m, n) (m, k) (k, n)    (n, m) (n, k)  (k, m)
 *
 *                    ours: op(A), op(B)      cuBLAS' first factor = our B      its second = our A
 *   forward          x, W transposed         W  by columns (C, OC), transposed x    by columns (C, N)
 *   backward input   dout, W                 W  by columns (C, OC)             dout by columns (OC, N)
 *   backward weight  dout transposed, x      x  by columns (C, N)              dout by columns (OC, N), transposed
 *
 * That exchange happens in matmul_plan() and nowhere else.
 *
 * A plan (descriptors and algorithm) is made at the first call of a shape and kept. The algorithm is the first that
 * cuBLAS' heuristic names under our fixed workspace; matmul_tune() times all that it names, each also with other cluster
 * shapes, on random data (on zeros the card clocks higher than it ever will in training) and keeps the fastest. The choices
 * can be written to a file and read again; since an algorithm fixes the order of every sum, runs with one file are bitwise
 * equal. Sums that are split over k are joined in fp32 and in a fixed order: the schemes that join them in the output's type
 * are excluded.
 * With C added and a 16-bit output, some kernels of cuBLASLt 13 round the product before they add: out = round(round(x W^T)
 * + residual), what x + linear(x) gives in two steps.
 *
 * An odd width (a vocabulary of 50,257, say) would rule the fast algorithms out, which want 16 bytes to divide it. So the
 * last OC % 8 outputs (4 in fp32) are a small product of their own, and the rest is even: see matmul_even(). Where they are
 * summed over, in dx, their sum is rounded to the output's type before the rest is added.
 *
 * One context serves one stream at a time: its products share the workspace.
 */
#ifndef LLMC_MATMUL_CUH
#define LLMC_MATMUL_CUH

#include <cublasLt.h>
#include <type_traits>

#include "llmc/gpu/cuda_common.cuh"
#include "llmc/files/json.h"
#include "llmc/base/rand.h"

static inline void cublas_check(cublasStatus_t status, const char* what, const char* file, int line) {
    if (status == CUBLAS_STATUS_SUCCESS) { return; }
    die("%s:%d: %s: %s", file, line, what, cublasLtGetStatusString(status));
}
#define CUBLAS_CHECK(call) cublas_check((call), #call, __FILE__, __LINE__)

template <typename T>
static constexpr cudaDataType_t data_type() {
    return sizeof(T) == 4 ? CUDA_R_32F : std::is_same<T, __half>::value ? CUDA_R_16F : CUDA_R_16BF;
}

/* A factor: row-major, rows `ld` elements apart. The scale belongs to 8-bit types and lies on the device (NULL: 1). */
typedef struct {
    const void* data;
    cudaDataType_t type;
    const float* scale;
    size_t ld;
} Operand;

template <typename T>
static inline Operand operand(const T* data, size_t ld) {
    const Operand o = {data, data_type<T>(), NULL, ld};
    return o;
}

/* What a plan depends on, in our row-major terms. All fields are numbers, so that keys compare as memory and one table
 * names them in the plan file. */
typedef enum {
    KEY_M,  // D is (M, N), the sums are over K
    KEY_N,
    KEY_K,
    KEY_TRANS_A,
    KEY_TRANS_B,
    KEY_TYPE_A,  // cudaDataType_t
    KEY_TYPE_B,
    KEY_TYPE_D,  // of C, too
    KEY_LD_A,
    KEY_LD_B,
    KEY_LD_C,
    KEY_LD_D,
    KEY_ADD,      // whether C is added
    KEY_SCALED,   // whether the factors have scales
    KEY_ALIGN_A,  // bytes
    KEY_ALIGN_B,
    KEY_ALIGN_C,
    KEY_ALIGN_D,
    NUM_KEY_FIELDS
} MatmulKeyField;

static const char* const matmul_key_names[NUM_KEY_FIELDS] = {
    "m",    "n",    "k",    "trans_a", "trans_b", "type_a",  "type_b",  "type_d",  "ld_a",
    "ld_b", "ld_c", "ld_d", "add",     "scaled",  "align_a", "align_b", "align_c", "align_d",
};

typedef struct {
    int64_t v[NUM_KEY_FIELDS];
} MatmulKey;

typedef struct {
    MatmulKey key;
    cublasLtMatmulAlgo_t algo;
    cublasLtMatmulDesc_t product;  // descriptors, NULL in a choice that was read from a file
    cublasLtMatrixLayout_t a, b, c, d;
    float heuristic_us, us;  // measured by matmul_tune(): the heuristic's first and the choice; 0: not measured
} MatmulPlan;

enum {
    MATMUL_MAX_PLANS = 1024,
    MATMUL_CANDIDATES = 80,            // that are timed, at most
    MATMUL_ROUNDS = 5,                 // in which they are
    MATMUL_SPLIT_WIDTH = 128,          // from here on an odd width is split
    MATMUL_WORKSPACE_SM90 = 32 << 20,  // bytes; what cuBLAS' documentation advises for Hopper, and for what is older
    MATMUL_WORKSPACE = 4 << 20,
};

typedef struct {
    cublasLtHandle_t handle;
    cublasLtMatmulPreference_t preference;
    cublasComputeType_t compute;
    void* workspace;
    size_t workspace_bytes;
    MatmulPlan* plans;  // MATMUL_MAX_PLANS
    int num_plans;
    MatmulPlan* saved;  // choices read from a file
    int num_saved;
} MatmulContext;

/* Bytes of workspace that matmul_create() wants on the current device. */
static inline size_t matmul_workspace_bytes(void) {
    return device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9 ? MATMUL_WORKSPACE_SM90 : MATMUL_WORKSPACE;
}

/* workspace: device memory of matmul_workspace_bytes(). tf32: FP32 builds may round factors to 10 bits of mantissa. */
static inline MatmulContext* matmul_create(void* workspace, bool tf32) {
    MatmulContext* c = (MatmulContext*)xcalloc(1, sizeof *c);
    CUBLAS_CHECK(cublasLtCreate(&c->handle));
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&c->preference));
    c->workspace = workspace;
    c->workspace_bytes = matmul_workspace_bytes();
    const uint64_t bytes = c->workspace_bytes;
    const uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    CUBLAS_CHECK(
        cublasLtMatmulPreferenceSetAttribute(c->preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(c->preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes,
                                                      sizeof schemes));
    c->compute = tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    c->plans = (MatmulPlan*)xcalloc(MATMUL_MAX_PLANS, sizeof *c->plans);
    c->saved = (MatmulPlan*)xcalloc(MATMUL_MAX_PLANS, sizeof *c->saved);
    return c;
}

static inline void matmul_destroy(MatmulContext* c) {
    for (int i = 0; i < c->num_plans; i++) {
        MatmulPlan* p = &c->plans[i];
        CUBLAS_CHECK(cublasLtMatmulDescDestroy(p->product));
        CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(p->a));
        CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(p->b));
        CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(p->c));
        CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(p->d));
    }
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(c->preference));
    CUBLAS_CHECK(cublasLtDestroy(c->handle));
    free(c->plans);
    free(c->saved);
    free(c);
}

// ---------------------------------------------------------------------------------------------------------------------
// plans

static inline bool matmul_key_equal(const MatmulKey* a, const MatmulKey* b) { return memcmp(a, b, sizeof *a) == 0; }

/* The largest power of two up to 256 that divides an address. */
static inline int64_t alignment_of(const void* p) {
    const uintptr_t bits = (uintptr_t)p | 256;
    return (int64_t)(bits & (~bits + 1));
}

/* The heuristic's choices for a plan's descriptors, best first; how many there are. */
static inline int matmul_candidates(MatmulContext* c, const MatmulPlan* p, cublasLtMatmulHeuristicResult_t* results,
                                    int wanted) {
    // first and second factor are exchanged, see the top
    const uint32_t align[4] = {(uint32_t)p->key.v[KEY_ALIGN_B], (uint32_t)p->key.v[KEY_ALIGN_A],
                               (uint32_t)p->key.v[KEY_ALIGN_C], (uint32_t)p->key.v[KEY_ALIGN_D]};
    const cublasLtMatmulPreferenceAttributes_t attributes[4] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    for (int i = 0; i < 4; i++) {
        CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(c->preference, attributes[i], &align[i], sizeof align[i]));
    }
    int found = 0, usable = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(c->handle, p->product, p->a, p->b, p->c, p->d, c->preference, wanted, results, &found);
    if (status != CUBLAS_STATUS_SUCCESS) { found = 0; }
    for (int i = 0; i < found; i++) {
        if (results[i].state == CUBLAS_STATUS_SUCCESS && results[i].workspaceSize <= c->workspace_bytes) {
            results[usable++] = results[i];
        }
    }
    return usable;
}

static inline void matmul_layout(cublasLtMatrixLayout_t* layout, int64_t type, int64_t rows, int64_t cols, int64_t ld) {
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(layout, (cudaDataType_t)type, (uint64_t)cols, (uint64_t)rows, ld));
}

/* Finds or makes the plan of a key. */
static inline MatmulPlan* matmul_plan(MatmulContext* c, const MatmulKey* key) {
    for (int i = 0; i < c->num_plans; i++) {
        if (matmul_key_equal(&c->plans[i].key, key)) { return &c->plans[i]; }
    }
    if (c->num_plans == MATMUL_MAX_PLANS) { die("matrix products: more than %d different shapes", MATMUL_MAX_PLANS); }
    MatmulPlan* p = &c->plans[c->num_plans++];
    const int64_t* v = key->v;
    p->key = *key;
    // our B is the first factor, our A the second; matmul_layout() takes rows and columns as they are for us
    const cublasOperation_t first = v[KEY_TRANS_B] ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t second = v[KEY_TRANS_A] ? CUBLAS_OP_T : CUBLAS_OP_N;
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&p->product, c->compute, CUDA_R_32F));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(p->product, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(p->product, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second));
    const int64_t M = v[KEY_M], N = v[KEY_N], K = v[KEY_K];
    matmul_layout(&p->a, v[KEY_TYPE_B], v[KEY_TRANS_B] ? N : K, v[KEY_TRANS_B] ? K : N, v[KEY_LD_B]);
    matmul_layout(&p->b, v[KEY_TYPE_A], v[KEY_TRANS_A] ? K : M, v[KEY_TRANS_A] ? M : K, v[KEY_LD_A]);
    matmul_layout(&p->c, v[KEY_TYPE_D], M, N, v[KEY_LD_C]);
    matmul_layout(&p->d, v[KEY_TYPE_D], M, N, v[KEY_LD_D]);

    cublasLtMatmulHeuristicResult_t result;
    for (int i = 0; i < c->num_saved; i++) {
        if (!matmul_key_equal(&c->saved[i].key, key)) { continue; }
        const cublasLtMatmulAlgo_t* algo = &c->saved[i].algo;
        if (cublasLtMatmulAlgoCheck(c->handle, p->product, p->a, p->b, p->c, p->d, algo, &result) == CUBLAS_STATUS_SUCCESS &&
            result.workspaceSize <= c->workspace_bytes) {
            p->algo = *algo;
            p->us = c->saved[i].us;
            p->heuristic_us = c->saved[i].heuristic_us;
            return p;
        }
        warn("matrix product %lld x %lld x %lld: the algorithm of the plan file does not run here; using cuBLAS' choice",
             (long long)M, (long long)N, (long long)K);
    }
    if (matmul_candidates(c, p, &result, 1) == 0) {
        die("cuBLASLt has no algorithm for a product (%lld, %lld) x (%lld, %lld)", (long long)M, (long long)K, (long long)K,
            (long long)N);
    }
    p->algo = result.algo;
    return p;
}

/* D (M, N) = op(A) op(B), plus C where it is not NULL; C and D have one type and may be the same. */
static inline void matmul_product(MatmulContext* ctx, void* d, size_t ld_d, cudaDataType_t type_d, Operand a, bool trans_a,
                                  Operand b, bool trans_b, const void* c, size_t ld_c, size_t M, size_t N, size_t K,
                                  cudaStream_t stream) {
    if (M == 0 || N == 0) { return; }
    MatmulKey key;
    int64_t* v = key.v;
    v[KEY_M] = (int64_t)M;
    v[KEY_N] = (int64_t)N;
    v[KEY_K] = (int64_t)K;
    v[KEY_TRANS_A] = trans_a;
    v[KEY_TRANS_B] = trans_b;
    v[KEY_TYPE_A] = a.type;
    v[KEY_TYPE_B] = b.type;
    v[KEY_TYPE_D] = type_d;
    v[KEY_LD_A] = (int64_t)a.ld;
    v[KEY_LD_B] = (int64_t)b.ld;
    v[KEY_LD_C] = (int64_t)(c ? ld_c : ld_d);
    v[KEY_LD_D] = (int64_t)ld_d;
    v[KEY_ADD] = c != NULL;
    v[KEY_SCALED] = a.scale != NULL || b.scale != NULL;
    v[KEY_ALIGN_A] = alignment_of(a.data);
    v[KEY_ALIGN_B] = alignment_of(b.data);
    v[KEY_ALIGN_C] = alignment_of(c ? c : d);
    v[KEY_ALIGN_D] = alignment_of(d);
    MatmulPlan* p = matmul_plan(ctx, &key);
    if (v[KEY_SCALED]) {
        CUBLAS_CHECK(
            cublasLtMatmulDescSetAttribute(p->product, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &b.scale, sizeof b.scale));
        CUBLAS_CHECK(
            cublasLtMatmulDescSetAttribute(p->product, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &a.scale, sizeof a.scale));
    }
    const float one = 1.0f, beta = c ? 1.0f : 0.0f;
    CUBLAS_CHECK(cublasLtMatmul(ctx->handle, p->product, &one, b.data, p->a, a.data, p->b, &beta, c ? c : d, p->c, d, p->d,
                                &p->algo, ctx->workspace, ctx->workspace_bytes, stream));
}

// ---------------------------------------------------------------------------------------------------------------------
// the three products of a layer

/* The part of a width that is a multiple of 16 bytes; what is left, if anything, is to be a product of its own. */
static inline int matmul_even(int width, Operand o) {
    const int unit = o.type == CUDA_R_32F ? 4 : 8;
    return width < MATMUL_SPLIT_WIDTH ? width : width / unit * unit;
}

/* The operand from its row `row` and column `col` on. */
static inline Operand operand_from(Operand o, size_t row, size_t col) {
    o.data = (const char*)o.data + (row * o.ld + col) * (o.type == CUDA_R_32F ? 4 : 2);
    return o;
}

/* out: (N, OC), out_pitch   x: (N, C)   w: (OC, C)   residual: (N, OC), out_pitch, added, or NULL; may be out */
template <typename Out>
static void matmul_forward_cuda(MatmulContext* ctx, Out* out, Operand x, Operand w, const Out* residual, size_t N, int C,
                                int OC, size_t out_pitch, cudaStream_t stream) {
    const int even = matmul_even(OC, w);
    matmul_product(ctx, out, out_pitch, data_type<Out>(), x, false, w, true, residual, out_pitch, N, (size_t)even, (size_t)C,
                   stream);
    if (even == OC) { return; }
    matmul_product(ctx, out + even, out_pitch, data_type<Out>(), x, false, operand_from(w, even, 0), true,
                   residual ? residual + even : NULL, out_pitch, N, (size_t)(OC - even), (size_t)C, stream);
}

/* dx: (N, C), dx_pitch, = or (accumulate) +=   dout: (N, OC)   w: (OC, C) */
template <typename Out>
static void matmul_backward_input_cuda(MatmulContext* ctx, Out* dx, Operand dout, Operand w, size_t N, int C, int OC,
                                       bool accumulate, size_t dx_pitch, cudaStream_t stream) {
    const int even = matmul_even(OC, w);
    // the few first, which costs less precision: their sum is the smaller one
    if (even < OC) {
        matmul_product(ctx, dx, dx_pitch, data_type<Out>(), operand_from(dout, 0, even), false, operand_from(w, even, 0), false,
                       accumulate ? dx : NULL, dx_pitch, N, (size_t)C, (size_t)(OC - even), stream);
    }
    matmul_product(ctx, dx, dx_pitch, data_type<Out>(), dout, false, w, false, accumulate || even < OC ? dx : NULL, dx_pitch, N,
                   (size_t)C, (size_t)even, stream);
}

/* dw: (OC, C) = or (accumulate) +=   dout: (N, OC)   x: (N, C) */
template <typename Out>
static void matmul_backward_weight_cuda(MatmulContext* ctx, Out* dw, Operand dout, Operand x, size_t N, int C, int OC,
                                        bool accumulate, cudaStream_t stream) {
    const int even = matmul_even(OC, dout);
    matmul_product(ctx, dw, (size_t)C, data_type<Out>(), dout, true, x, false, accumulate ? dw : NULL, (size_t)C, (size_t)even,
                   (size_t)C, N, stream);
    if (even == OC) { return; }
    Out* rest = dw + (size_t)even * C;
    matmul_product(ctx, rest, (size_t)C, data_type<Out>(), operand_from(dout, 0, even), true, x, false,
                   accumulate ? rest : NULL, (size_t)C, (size_t)(OC - even), (size_t)C, N, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// tuning

/* x[i] = a standard normal that is a function of (seed, i): the bits of real data, for measuring. */
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

static inline size_t matmul_type_bytes(int64_t type) { return type == CUDA_R_32F ? 4 : 2; }

/* Microseconds of one product, over `repeats` of them; negative if it does not run. */
static inline float matmul_time(MatmulContext* c, const MatmulPlan* p, const cublasLtMatmulAlgo_t* algo, char* buffers[3],
                                int repeats, cudaEvent_t start, cudaEvent_t end, cudaStream_t stream) {
    const float one = 1.0f, beta = p->key.v[KEY_ADD] ? 1.0f : 0.0f;
    CUDA_CHECK(cudaEventRecord(start, stream));
    for (int i = 0; i < repeats; i++) {
        if (cublasLtMatmul(c->handle, p->product, &one, buffers[1], p->a, buffers[0], p->b, &beta, buffers[2], p->c, buffers[2],
                           p->d, algo, c->workspace, c->workspace_bytes, stream) != CUBLAS_STATUS_SUCCESS) {
            return -1.0f;
        }
    }
    CUDA_CHECK(cudaEventRecord(end, stream));
    CUDA_CHECK(cudaEventSynchronize(end));
    float ms = 0;
    CUDA_CHECK(cudaEventElapsedTime(&ms, start, end));
    return ms * 1000.0f / (float)repeats;
}

/* Bytes of scratch that tuning a plan takes. */
static inline size_t matmul_tune_bytes(const MatmulKey* key, size_t bytes[3]) {
    const int64_t* v = key->v;
    bytes[0] = (size_t)((v[KEY_TRANS_A] ? v[KEY_K] : v[KEY_M]) * v[KEY_LD_A]) * matmul_type_bytes(v[KEY_TYPE_A]);
    bytes[1] = (size_t)((v[KEY_TRANS_B] ? v[KEY_N] : v[KEY_K]) * v[KEY_LD_B]) * matmul_type_bytes(v[KEY_TYPE_B]);
    bytes[2] = (size_t)(v[KEY_M] * v[KEY_LD_D]) * matmul_type_bytes(v[KEY_TYPE_D]);
    return round_up(bytes[0], 256) + round_up(bytes[1], 256) + round_up(bytes[2], 256);
}

/* Adds to `count` algorithms of a plan the same with other cluster shapes, where they run; how many there are then. */
static inline int matmul_add_clusters(MatmulContext* c, const MatmulPlan* p, cublasLtMatmulHeuristicResult_t* results,
                                      int count) {
    static const uint16_t shapes[] = {CUBLASLT_CLUSTER_SHAPE_1x1x1, CUBLASLT_CLUSTER_SHAPE_2x1x1, CUBLASLT_CLUSTER_SHAPE_1x2x1,
                                      CUBLASLT_CLUSTER_SHAPE_2x2x1, CUBLASLT_CLUSTER_SHAPE_4x1x1, CUBLASLT_CLUSTER_SHAPE_1x4x1,
                                      CUBLASLT_CLUSTER_SHAPE_4x2x1, CUBLASLT_CLUSTER_SHAPE_2x4x1};
    const int named = count;
    for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++) {
        for (int i = 0; i < named && count < MATMUL_CANDIDATES; i++) {
            cublasLtMatmulHeuristicResult_t* r = &results[count];
            cublasLtMatmulAlgo_t algo = results[i].algo;
            uint16_t own = 0;
            size_t written;
            if (cublasLtMatmulAlgoConfigGetAttribute(&algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, &own, sizeof own,
                                                     &written) != CUBLAS_STATUS_SUCCESS ||
                own == CUBLASLT_CLUSTER_SHAPE_AUTO || own == shapes[k]) {
                continue;  // what is made for older cards has none
            }
            if (cublasLtMatmulAlgoConfigSetAttribute(&algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, &shapes[k],
                                                     sizeof shapes[k]) == CUBLAS_STATUS_SUCCESS &&
                cublasLtMatmulAlgoCheck(c->handle, p->product, p->a, p->b, p->c, p->d, &algo, r) == CUBLAS_STATUS_SUCCESS &&
                r->workspaceSize <= c->workspace_bytes) {
                r->algo = algo;
                count++;
            }
        }
    }
    return count;
}

static inline int matmul_compare_us(const void* a, const void* b) { return *(const float*)a > *(const float*)b ? 1 : -1; }

/* Times candidates in MATMUL_ROUNDS rounds, each in an order of its own that depends on `seed`. us: each one's median (its
 * best would be that of a moment when the card was cool); negative for those that do not run or took 1.3 times as long as the
 * fastest at first, which are out. Returns how many ran. */
static inline int matmul_time_candidates(MatmulContext* c, const MatmulPlan* p, const cublasLtMatmulHeuristicResult_t* results,
                                         int count, float* us, char* buffers[3], uint64_t seed, cudaStream_t stream) {
    cudaEvent_t start, end;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&end));
    float times[MATMUL_CANDIDATES][MATMUL_ROUNDS], fastest = INFINITY;
    int order[MATMUL_CANDIDATES], ran = 0;
    for (int i = 0; i < count; i++) {
        order[i] = i;
        us[i] = matmul_time(c, p, &results[i].algo, buffers, 1, start, end, stream);  // loads its code, too
        if (us[i] < 0) { continue; }
        us[i] = matmul_time(c, p, &results[i].algo, buffers, 2, start, end, stream);
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
            times[k][round] = matmul_time(c, p, &results[k].algo, buffers, repeats, start, end, stream);
        }
    }
    for (int i = 0; i < count; i++) {
        if (us[i] < 0) { continue; }
        qsort(times[i], MATMUL_ROUNDS, sizeof(float), matmul_compare_us);
        us[i] = times[i][MATMUL_ROUNDS / 2];
    }
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(end));
    return ran;
}

/* The fastest of `count` times; -1 where none ran. */
static inline int matmul_fastest(const float* us, int count) {
    int best = -1;
    for (int k = 0; k < count; k++) {
        if (us[k] >= 0 && (best < 0 || us[k] < us[best])) { best = k; }
    }
    return best;
}

/* Random factors and C of a plan in `scratch`. */
static inline void matmul_tune_fill(const MatmulPlan* p, char* buffers[3], void* scratch, cudaStream_t stream) {
    size_t bytes[3];
    char* at = (char*)scratch;
    matmul_tune_bytes(&p->key, bytes);
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

/* Times of a second measurement: of the heuristic's first, of what tuning chose, of the fastest. Negative: it is out. */
typedef struct {
    float first_us, choice_us, best_us;
} MatmulRetimed;

/* Times the candidates of one plan and keeps the fastest; the heuristic's first stays where nothing is 1 %
 * faster. scratch: device memory, its contents are lost. Returns how many candidates ran; 0 where the scratch is too small.
 * retimed: NULL, or filled from a second measurement in other orders. Synchronises; for use before training. */
static inline int matmul_tune_plan(MatmulContext* c, MatmulPlan* p, void* scratch, size_t scratch_bytes, MatmulRetimed* retimed,
                                   cudaStream_t stream) {
    size_t bytes[3];
    if (matmul_tune_bytes(&p->key, bytes) > scratch_bytes || p->key.v[KEY_SCALED]) { return 0; }
    char* buffers[3];
    matmul_tune_fill(p, buffers, scratch, stream);
    cublasLtMatmulHeuristicResult_t results[MATMUL_CANDIDATES];
    float us[MATMUL_CANDIDATES];
    const int named = matmul_candidates(c, p, results, MATMUL_CANDIDATES);
    const int count = matmul_add_clusters(c, p, results, named);
    const int ran = matmul_time_candidates(c, p, results, count, us, buffers, 0, stream);
    int choice = matmul_fastest(us, count);
    if (choice < 0) { return 0; }
    if (us[0] >= 0 && us[choice] > 0.99f * us[0]) { choice = 0; }
    p->algo = results[choice].algo;
    p->us = us[choice];
    p->heuristic_us = us[0] >= 0 ? us[0] : 0.0f;
    if (retimed) {
        matmul_time_candidates(c, p, results, count, us, buffers, 1, stream);
        const int best = matmul_fastest(us, count);
        const MatmulRetimed r = {us[0], us[choice], best < 0 ? -1.0f : us[best]};
        *retimed = r;
    }
    return ran;
}

/* Tunes every plan made so far (run one micro-step first) in `scratch`, device memory whose contents are lost. Returns how
 * many were tuned; plans whose matrices are larger than the scratch keep their algorithm. */
static inline int matmul_tune(MatmulContext* c, void* scratch, size_t scratch_bytes, cudaStream_t stream) {
    int tuned = 0;
    for (int i = 0; i < c->num_plans; i++) {
        if (matmul_tune_plan(c, &c->plans[i], scratch, scratch_bytes, NULL, stream) > 0) { tuned++; }
    }
    return tuned;
}

// ---------------------------------------------------------------------------------------------------------------------
// plan files: JSON; an algorithm is the hexadecimal image of cuBLASLt's 64 bytes, which only the same version reads

static inline void matmul_gpu_name(char name[256]) {
    cudaDeviceProp properties;
    int device = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    snprintf(name, 256, "%s", properties.name);
}

/* Writes the choices of all plans. */
static inline bool matmul_save_plans(const MatmulContext* c, const char* path, Error* e) {
    FILE* f = fopen(path, "w");
    if (!f) { return fail(e, "%s: cannot write: %s", path, strerror(errno)); }
    char gpu[256];
    matmul_gpu_name(gpu);
    fprintf(f, "{\n\"format\": \"llama3.c matmul plans\",\n\"gpu\": ");
    json_write_string(f, gpu, strlen(gpu));
    fprintf(f, ",\n\"cublaslt\": %llu,\n\"workspace\": %zu,\n\"compute\": %d,\n\"plans\": [",
            (unsigned long long)cublasLtGetVersion(), c->workspace_bytes, (int)c->compute);
    for (int i = 0; i < c->num_plans; i++) {
        const MatmulPlan* p = &c->plans[i];
        fprintf(f, "%s\n{", i ? "," : "");
        for (int k = 0; k < NUM_KEY_FIELDS; k++) { fprintf(f, "\"%s\": %lld, ", matmul_key_names[k], (long long)p->key.v[k]); }
        fprintf(f, "\"us\": %.2f, \"heuristic_us\": %.2f, \"algo\": \"", (double)p->us, (double)p->heuristic_us);
        for (int k = 0; k < 8; k++) { fprintf(f, "%016llx", (unsigned long long)p->algo.data[k]); }
        fprintf(f, "\"}");
    }
    fprintf(f, "\n]\n}\n");
    return close_output(f, path, e);
}

static inline bool matmul_read_plan(MatmulPlan* p, const Json* j, const JsonNode* n, const char* path, Error* e) {
    memset(p, 0, sizeof *p);
    double us = 0, heuristic_us = 0;
    for (int k = 0; k < NUM_KEY_FIELDS; k++) {
        if (!json_int(j, n, matmul_key_names[k], 0, INT64_MAX, &p->key.v[k], e)) { return false; }
    }
    if (!json_double(j, n, "us", 0, 1e12, &us, e) || !json_double(j, n, "heuristic_us", 0, 1e12, &heuristic_us, e)) {
        return false;
    }
    p->us = (float)us;
    p->heuristic_us = (float)heuristic_us;
    const JsonNode* algo = json_get(j, n, "algo");
    size_t length = 0;
    const char* hex = algo ? json_string(j, algo, &length) : NULL;
    if (!hex || length != 128 || strspn(hex, "0123456789abcdef") != 128) {
        return fail(e, "%s: algo is not a text of 128 hexadecimal digits", path);
    }
    for (int k = 0; k < 8; k++) {
        char word[17];
        memcpy(word, hex + 16 * k, 16);
        word[16] = 0;
        p->algo.data[k] = strtoull(word, NULL, 16);
    }
    return true;
}

/* Reads choices for the plans that will be made from now on. A file from another GPU, cuBLASLt or setting is an error that
 * the caller may take as a warning: then the heuristic chooses. */
static inline bool matmul_load_plans(MatmulContext* c, const char* path, Error* e) {
    Json j;
    if (!json_read_file(&j, path, 16 << 20, e)) { return false; }
    const JsonNode* root = json_root(&j);
    const JsonNode* gpu_node = json_get(&j, root, "gpu");
    const JsonNode* plans = json_get(&j, root, "plans");
    char gpu[256];
    matmul_gpu_name(gpu);
    size_t length = 0;
    const char* found = gpu_node ? json_string(&j, gpu_node, &length) : NULL;
    int64_t version = 0, workspace = 0, compute = 0;
    bool ok = json_int(&j, root, "cublaslt", 0, INT64_MAX, &version, e) &&
              json_int(&j, root, "workspace", 0, INT64_MAX, &workspace, e) &&
              json_int(&j, root, "compute", 0, INT64_MAX, &compute, e);
    if (ok && (!found || strcmp(found, gpu) != 0)) {
        ok = fail(e, "%s: gpu is '%.100s', wanted '%.100s', the one in this machine", path, found ? found : "missing", gpu);
    }
    if (ok && version != (int64_t)cublasLtGetVersion()) {
        ok = fail(e, "%s: cublaslt is %lld, wanted %lld, the version of this program", path, (long long)version,
                  (long long)cublasLtGetVersion());
    }
    if (ok && (workspace != (int64_t)c->workspace_bytes || compute != (int64_t)c->compute)) {
        ok = fail(e, "%s: made for another workspace or compute type (TF32)", path);
    }
    if (ok && !plans) { ok = fail(e, "%s: plans is missing", path); }
    c->num_saved = 0;
    for (const JsonNode* n = ok ? json_first(&j, plans) : NULL; n && ok; n = json_next(&j, n)) {
        if (c->num_saved == MATMUL_MAX_PLANS) {
            ok = fail(e, "%s: plans has more than %d entries", path, MATMUL_MAX_PLANS);
        } else {
            ok = matmul_read_plan(&c->saved[c->num_saved], &j, n, path, e);
            c->num_saved += ok;
        }
    }
    if (!ok) { c->num_saved = 0; }
    json_free(&j);
    return ok;
}

#endif
