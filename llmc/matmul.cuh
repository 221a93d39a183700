/* matmul.cuh -- x W^T and its two gradients on the GPU, through cuBLASLt. The oracle is matmul.h. Steps: dev/cuda/matmul.cu.
 *
 *   forward          out (N, OC)  = x (N, C) W^T [+ residual]   W: (OC, C)
 *   backward input   dx (N, C)    = dout (N, OC) W
 *   backward weight  dW (OC, C)   = dout^T x         [+ dW]
 *
 * Our matrices are row-major, while cuBLAS reads memory column by column. A row-major matrix read by columns is its transpose,
 * so we ask for the transposed product, with the factors exchanged; no data is moved:
 *
 *      row-major               the same memory, by columns
 *      D = op(A) op(B)         D' = op(B)' op(A)'
 *     (m, n) (m, k) (k, n)    (n, m) (n, k)  (k, m)
 *
 *                    ours: op(A), op(B)      cuBLAS' first factor = our B      its second = our A
 *   forward:         x, W transposed         W  by columns (C, OC), transposed x    by columns (C, N)
 *   backward input:  dout, W                 W  by columns (C, OC)             dout by columns (OC, N)
 *   backward weight: dout transposed, x      x  by columns (C, N)              dout by columns (OC, N), transposed
 *
 * matmul_plan() exchanges the layouts. matmul_candidates() and matmul_product() exchange alignments, scales and pointers in the
 * same way.
 *
 * The first call of a shape makes a plan (descriptors and algorithm), which is kept. Its algorithm comes from a plan file if
 * one names it. Otherwise it is the first that cuBLAS' heuristic returns for our fixed workspace. Sums that are split over k
 * are joined in fp32 and in a fixed order, because the schemes that join them in the output's type are excluded. So an
 * algorithm fixes the order of every sum, and the same plans give the same bits.
 * With C added and a 16-bit output, some kernels of cuBLASLt 13 round the product before they add: out = round(round(x W^T)
 * + residual), as x + linear(x) does in two steps.
 *
 * An odd width (a vocabulary of 50,257, say) would rule out the fast algorithms, which need a multiple of 16 bytes. So the last
 * OC % 8 outputs (OC % 4 in fp32, OC % 16 in fp8) are a small product of their own, and the rest is even: see matmul_even().
 * In dx, which sums over the outputs, the small product is rounded to the output's type before the rest is added.
 *
 * Factors in fp8 have scales: one for each factor, or one for each of its rows (OUTER_VEC, compute capability 9.0). cuBLASLt
 * takes them only with the summed index innermost, as A B^T: that is matmul_forward_cuda() and, for dW with the transposes of
 * both factors, matmul_backward_weight_transposed_cuda(). One of the two may be in e5m2. gpu/fp8.cuh makes them. A scale for a
 * whole factor lies at a multiple of 16 bytes: at a multiple of 4, cuBLASLt refused the launch ("the requested functionality is
 * not supported").
 *
 * Limits: one context serves one stream at a time, because its products share the workspace and a plan's descriptor holds the
 * scales of its last call.
 */
#ifndef LLMC_MATMUL_CUH
#define LLMC_MATMUL_CUH

#include <cublasLt.h>
#include <cuda_fp8.h>

#include "llmc/base/matrix.h"    // defines: ProductShape, SumFactors, matrix_stride
#include "llmc/matmul_choice.h"  // defines: MatmulKey, MatmulChoice
#include "llmc/cuda/cuda_common.cuh"

static inline void cublas_check(cublasStatus_t status, const char* what, const char* file, int line) {
    if (status == CUBLAS_STATUS_SUCCESS) { return; }
    die("%s:%d: %s: %s", file, line, what, cublasLtGetStatusString(status));
}
#define CUBLAS_CHECK(call) cublas_check((call), #call, __FILE__, __LINE__)

/* Every element type, with cuBLAS' name for it. */
#define MATMUL_TYPES(X)              \
    X(float, CUDA_R_32F)             \
    X(__nv_bfloat16, CUDA_R_16BF)    \
    X(__half, CUDA_R_16F)            \
    X(__nv_fp8_e4m3, CUDA_R_8F_E4M3) \
    X(__nv_fp8_e5m2, CUDA_R_8F_E5M2)

template <typename T>
static constexpr cudaDataType_t data_type() = delete;  // for a type that is not in the table
#define DATA_TYPE(T, name)                    \
    template <>                               \
    constexpr cudaDataType_t data_type<T>() { \
        return name;                          \
    }
MATMUL_TYPES(DATA_TYPE)
#undef DATA_TYPE

/* Returns the bytes of an element of a cudaDataType_t. */
static inline size_t matmul_type_bytes(int64_t type) {
    switch (type) {
#define TYPE_BYTES(T, name) \
    case name: return sizeof(T);
        MATMUL_TYPES(TYPE_BYTES)
#undef TYPE_BYTES
        default: die("matrix products: cuBLAS' type %lld is not supported", (long long)type);
    }
}

/* A factor: row-major, rows `ld` elements apart. 8-bit types have a scale, on the device (NULL: 1), or one for each row. */
typedef struct {
    const void* data;
    cudaDataType_t type;
    const float* scale;
    size_t ld;
    MatmulScaling scaling;
} Operand;

template <typename T>
static inline Operand operand(const T* data, size_t ld) {
    const Operand o = {data, data_type<T>(), NULL, ld, NOT_SCALED};
    return o;
}

/* Rows in 8 bits with one scale for all. */
static inline Operand operand_fp8_tensor(const void* data, const float* scale, size_t ld, bool fast, cudaDataType_t type) {
    const Operand o = {data, type, scale, ld, fast ? SCALED_TENSORS_FAST : SCALED_TENSORS};
    return o;
}

/* Rows in 8 bits with a scale each. */
static inline Operand operand_fp8_rows(const void* data, const float* scales, size_t ld, bool fast, cudaDataType_t type) {
    const Operand o = {data, type, scales, ld, fast ? SCALED_ROWS_FAST : SCALED_ROWS};
    return o;
}

/* The product's result: row-major, rows `ld` elements apart. */
typedef struct {
    void* data;
    cudaDataType_t type;
    size_t ld;
} Output;

template <typename T>
static inline Output output(T* data, size_t ld) {
    const Output o = {data, data_type<T>(), ld};
    return o;
}

/* Whether a product uses a factor or its transpose. */
typedef enum { AS_IS, TRANSPOSED } FactorSide;
typedef struct {
    Operand o;
    FactorSide side;
} Factor;

/* A layer's product: N rows, of C elements in and OC out. */
typedef struct {
    size_t N;
    int C, OC;
} LayerShape;

typedef struct {
    MatmulKey key;
    cublasLtMatmulAlgo_t algo;
    cublasLtMatmulDesc_t product;  // descriptors
    cublasLtMatrixLayout_t a, b, c, d;
} MatmulPlan;
static_assert(sizeof(cublasLtMatmulAlgo_t) == sizeof(MatmulChoice::algo), "a MatmulChoice holds the image of an algorithm");

enum {
    MATMUL_MAX_PLANS = 2048,
    MATMUL_SPLIT_WIDTH = 128,          // odd widths from here on are split
    MATMUL_WORKSPACE_SM90 = 32 << 20,  // bytes; the advice of cuBLAS' documentation for Hopper, and for older cards
    MATMUL_WORKSPACE = 4 << 20,
    MATMUL_SCALE_ALIGNMENT = 16,  // bytes, of the scale of a whole factor
};

typedef struct {
    cublasLtHandle_t handle;
    cublasLtMatmulPreference_t preference;
    cublasComputeType_t compute;
    void* workspace;
    size_t workspace_bytes;
    MatmulPlan* plans;  // MATMUL_MAX_PLANS
    int num_plans;
    MatmulChoice* saved;  // choices of a plan file, MATMUL_MAX_PLANS
    int num_saved;
    int num_unsaved;  // plans that it has no choice for, or none that runs
} MatmulContext;

/* Returns the bytes of workspace that matmul_create() needs on the current device. */
static inline size_t matmul_workspace_bytes(void) {
    return device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9 ? MATMUL_WORKSPACE_SM90 : MATMUL_WORKSPACE;
}

/* Makes a context. workspace: matmul_workspace_bytes() on the device. tf32: FP32 builds may round factors to 10-bit
 * mantissas. */
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
    c->saved = (MatmulChoice*)xcalloc(MATMUL_MAX_PLANS, sizeof *c->saved);
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

/* Returns the largest power of two up to 256 that divides an address. */
static inline int64_t alignment_of(const void* p) {
    const uintptr_t bits = (uintptr_t)p | 256;
    return (int64_t)(bits & (~bits + 1));
}

/* Asks the heuristic for algorithms for a plan's descriptors, best first; returns how many are usable. */
static inline int matmul_candidates(MatmulContext* c, const MatmulPlan* p, cublasLtMatmulHeuristicResult_t* results,
                                    int wanted) {
    // the factors are exchanged, see the top
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

static inline void matmul_layout(cublasLtMatrixLayout_t* layout, int64_t type, int64_t rows, int64_t cols, int64_t ld,
                                 int64_t batch) {
    const int32_t count = (int32_t)batch;
    const int64_t stride = (int64_t)matrix_stride((size_t)(rows * ld));
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(layout, (cudaDataType_t)type, (uint64_t)cols, (uint64_t)rows, ld));
    if (batch == 1) { return; }
    CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
    CUBLAS_CHECK(
        cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride));
}

/* Gives a plan the algorithm that the plan file names for it. Returns false if there is none or cuBLASLt rejects it. */
static inline bool matmul_use_saved(MatmulContext* c, MatmulPlan* p) {
    for (int i = 0; i < c->num_saved; i++) {
        const MatmulChoice* saved = &c->saved[i];
        if (!matmul_key_equal(&saved->key, &p->key)) { continue; }
        cublasLtMatmulHeuristicResult_t result;
        memcpy(&p->algo, saved->algo, sizeof p->algo);
        if (cublasLtMatmulAlgoCheck(c->handle, p->product, p->a, p->b, p->c, p->d, &p->algo, &result) ==
                CUBLAS_STATUS_SUCCESS &&
            result.workspaceSize <= c->workspace_bytes) {
            return true;
        }
    }
    c->num_unsaved += c->num_saved > 0;
    return false;
}

/* The first version of cuBLASLt with a scale for each row, and whether this one has them. */
#define MATMUL_ROW_SCALES_VERSION 120900
static inline bool matmul_has_row_scales(void) {
    return CUBLAS_VERSION >= MATMUL_ROW_SCALES_VERSION && cublasLtGetVersion() >= MATMUL_ROW_SCALES_VERSION;
}

/* Sets on a plan's descriptor how the factors are scaled. */
static inline void matmul_set_scaling(const MatmulPlan* p) {
    const int64_t scaling = p->key.v[KEY_SCALED];
    if (scaling == NOT_SCALED) { return; }
    const int8_t fast = scaling == SCALED_ROWS_FAST || scaling == SCALED_TENSORS_FAST;
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(p->product, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast));
    if (scaling == SCALED_TENSORS || scaling == SCALED_TENSORS_FAST) { return; }
#if CUBLAS_VERSION >= MATMUL_ROW_SCALES_VERSION
    const int32_t rows = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(p->product, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &rows, sizeof rows));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(p->product, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &rows, sizeof rows));
#else
    die("matrix products: scales for each row need cuBLASLt 12.9; this is a build with %d", CUBLAS_VERSION);
#endif
}

/* Sets the scales of our factors A and B on a plan's descriptor. The factors are exchanged, see the top. */
static inline void matmul_set_scales(const MatmulPlan* p, const float* a, const float* b) {
    if (p->key.v[KEY_SCALED] == NOT_SCALED) { return; }
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(p->product, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &b, sizeof b));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(p->product, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &a, sizeof a));
}

/* Finds or makes the plan of a key. a_scale, b_scale: the scales of a product that has them; the heuristic may ask for them */
static inline MatmulPlan* matmul_plan(MatmulContext* c, const MatmulKey* key, const float* a_scale = NULL,
                                      const float* b_scale = NULL) {
    for (int i = 0; i < c->num_plans; i++) {
        if (matmul_key_equal(&c->plans[i].key, key)) { return &c->plans[i]; }
    }
    if (c->num_plans == MATMUL_MAX_PLANS) { die("matrix products: more than %d different shapes", MATMUL_MAX_PLANS); }
    MatmulPlan* p = &c->plans[c->num_plans++];
    const int64_t* v = key->v;
    p->key = *key;
    // our B is the first factor, our A the second; matmul_layout() takes our rows and columns
    const cublasOperation_t first = v[KEY_TRANS_B] ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t second = v[KEY_TRANS_A] ? CUBLAS_OP_T : CUBLAS_OP_N;
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&p->product, c->compute, CUDA_R_32F));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(p->product, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(p->product, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second));
    const int64_t M = v[KEY_M], N = v[KEY_N], K = v[KEY_K];
    matmul_layout(&p->a, v[KEY_TYPE_B], v[KEY_TRANS_B] ? N : K, v[KEY_TRANS_B] ? K : N, v[KEY_LD_B], v[KEY_BATCH]);
    matmul_layout(&p->b, v[KEY_TYPE_A], v[KEY_TRANS_A] ? K : M, v[KEY_TRANS_A] ? M : K, v[KEY_LD_A], v[KEY_BATCH]);
    matmul_layout(&p->c, v[KEY_TYPE_D], M, N, v[KEY_LD_C], v[KEY_BATCH]);
    matmul_layout(&p->d, v[KEY_TYPE_D], M, N, v[KEY_LD_D], v[KEY_BATCH]);
    matmul_set_scaling(p);
    matmul_set_scales(p, a_scale, b_scale);

    if (matmul_use_saved(c, p)) { return p; }
    cublasLtMatmulHeuristicResult_t result;
    if (matmul_candidates(c, p, &result, 1) == 0) {
        die("cuBLASLt has no algorithm for a product (%lld, %lld) x (%lld, %lld)", (long long)M, (long long)K, (long long)K,
            (long long)N);
    }
    p->algo = result.algo;
    return p;
}

/* Computes D = f.product op(A) op(B), plus f.added C unless C is NULL. C has D's type and pitch, and may be D. With `batch`, so
 * many products, whose matrices lie matrix_stride() apart. */
static inline void matmul_product(MatmulContext* ctx, Output d, Factor a, Factor b, const void* c, ProductShape shape,
                                  cudaStream_t stream, SumFactors f = {1.0f, 1.0f}, int batch = 1) {
    if (shape.M == 0 || shape.N == 0) { return; }
    MatmulKey key;
    int64_t* v = key.v;
    v[KEY_M] = (int64_t)shape.M;
    v[KEY_N] = (int64_t)shape.N;
    v[KEY_K] = (int64_t)shape.K;
    v[KEY_TRANS_A] = a.side == TRANSPOSED;
    v[KEY_TRANS_B] = b.side == TRANSPOSED;
    v[KEY_TYPE_A] = a.o.type;
    v[KEY_TYPE_B] = b.o.type;
    v[KEY_TYPE_D] = d.type;
    v[KEY_LD_A] = (int64_t)a.o.ld;
    v[KEY_LD_B] = (int64_t)b.o.ld;
    v[KEY_LD_C] = (int64_t)d.ld;
    v[KEY_LD_D] = (int64_t)d.ld;
    v[KEY_ADD] = c != NULL;
    assert(a.o.scaling == b.o.scaling);
    assert((uintptr_t)a.o.scale % MATMUL_SCALE_ALIGNMENT == 0 && (uintptr_t)b.o.scale % MATMUL_SCALE_ALIGNMENT == 0);
    v[KEY_SCALED] = a.o.scaling;
    v[KEY_ALIGN_A] = alignment_of(a.o.data);
    v[KEY_ALIGN_B] = alignment_of(b.o.data);
    v[KEY_ALIGN_C] = alignment_of(c ? c : d.data);
    v[KEY_ALIGN_D] = alignment_of(d.data);
    v[KEY_BATCH] = batch;
    MatmulPlan* p = matmul_plan(ctx, &key, a.o.scale, b.o.scale);
    matmul_set_scales(p, a.o.scale, b.o.scale);
    const float beta = c ? f.added : 0.0f;
    CUBLAS_CHECK(cublasLtMatmul(ctx->handle, p->product, &f.product, b.o.data, p->a, a.o.data, p->b, &beta, c ? c : d.data,
                                p->c, d.data, p->d, &p->algo, ctx->workspace, ctx->workspace_bytes, stream));
}

// ---------------------------------------------------------------------------------------------------------------------
// the three products of a layer

/* Returns the part of a width that is a multiple of 16 bytes; the rest, if any, needs a product of its own. */
static inline int matmul_even(int width, Operand o) {
    const int unit = 16 / (int)matmul_type_bytes(o.type);
    return width < MATMUL_SPLIT_WIDTH ? width : width / unit * unit;
}

/* Returns the part of an operand from row `row` and column `col` on. */
static inline Operand operand_from(Operand o, size_t row, size_t col) {
    o.data = (const char*)o.data + (row * o.ld + col) * matmul_type_bytes(o.type);
    return o;
}

/* Returns the part of an output from column `col` on. */
static inline Output output_from(Output o, size_t col) {
    o.data = (char*)o.data + col * matmul_type_bytes(o.type);
    return o;
}

/* Writes out (N, OC): `scale` times the product of x (N, C) and w (OC, C), and adds residual (N, OC) unless it is NULL.
 * residual has out's type and pitch, and may be out. */
static inline void matmul_forward_cuda(MatmulContext* ctx, Output out, Operand x, Operand w, const void* residual, LayerShape s,
                                       cudaStream_t stream, float scale = 1.0f) {
    const size_t even = (size_t)matmul_even(s.OC, w), rest = (size_t)s.OC - even, C = (size_t)s.C;
    matmul_product(ctx, out, {x, AS_IS}, {w, TRANSPOSED}, residual, {s.N, even, C}, stream, {scale, 1.0f});
    if (rest == 0) { return; }
    const void* behind = residual ? (const char*)residual + even * matmul_type_bytes(out.type) : NULL;
    matmul_product(ctx, output_from(out, even), {x, AS_IS}, {operand_from(w, even, 0), TRANSPOSED}, behind, {s.N, rest, C},
                   stream, {scale, 1.0f});
}

/* Writes dx (N, C) from dout (N, OC) and w (OC, C). */
static inline void matmul_backward_input_cuda(MatmulContext* ctx, Output dx, Operand dout, Operand w, LayerShape s,
                                              cudaStream_t stream) {
    const size_t even = (size_t)matmul_even(s.OC, w), rest = (size_t)s.OC - even, C = (size_t)s.C;
    // the small product first: its sum is the smaller one, so rounding it costs less precision
    if (rest > 0) {
        matmul_product(ctx, dx, {operand_from(dout, 0, even), AS_IS}, {operand_from(w, even, 0), AS_IS}, NULL, {s.N, C, rest},
                       stream);
    }
    matmul_product(ctx, dx, {dout, AS_IS}, {w, AS_IS}, rest > 0 ? dx.data : NULL, {s.N, C, even}, stream);
}

/* Overwrites dw (OC, C), or with `accumulate` adds to it, from dout (N, OC) and x (N, C). */
static inline void matmul_backward_weight_cuda(MatmulContext* ctx, Output dw, Operand dout, Operand x, LayerShape s,
                                               bool accumulate, cudaStream_t stream) {
    const size_t C = (size_t)s.C, even = (size_t)matmul_even(s.OC, dout), rest = (size_t)s.OC - even;
    matmul_product(ctx, dw, {dout, TRANSPOSED}, {x, AS_IS}, accumulate ? dw.data : NULL, {even, C, s.N}, stream);
    if (rest == 0) { return; }
    dw = output_from(dw, even * C);
    matmul_product(ctx, dw, {operand_from(dout, 0, even), TRANSPOSED}, {x, AS_IS}, accumulate ? dw.data : NULL, {rest, C, s.N},
                   stream);
}

/* Does the same with `scale` times the product of the transposes dout_t (OC, N) and x_t (C, N) in 8 bits. N, C and OC are
 * multiples of 16. */
static inline void matmul_backward_weight_transposed_cuda(MatmulContext* ctx, Output dw, Operand dout_t, Operand x_t,
                                                          LayerShape s, bool accumulate, cudaStream_t stream,
                                                          float scale = 1.0f) {
    matmul_product(ctx, dw, {dout_t, AS_IS}, {x_t, TRANSPOSED}, accumulate ? dw.data : NULL, {(size_t)s.OC, (size_t)s.C, s.N},
                   stream, {scale, 1.0f});
}

#endif
