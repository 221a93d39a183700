/* cublaslt.cpp -- the part of cuBLASLt that the CUDA sources call, on the CPU: D = alpha scale_a scale_b op(A) op(B) + beta C,
 * by columns. Factors in fp32, BF16, FP16, e4m3 and e5m2, sums in fp32, rounded to the output's type; with beta twice, before
 * and after C is added, as some of cuBLASLt's kernels do.
 *
 * As on a card
 *   the work runs later, on a stream, and only then reads the factors and the scales, which lie on the device; the host's
 *   arguments (descriptors, alpha, beta) are copied at the call;
 *   an algorithm fixes the order of a sum: number `id` cuts k into 2^id parts, sums each part from its first term to its last,
 *   and joins the parts in their order. So another plan gives other bits;
 *   the parts lie in the workspace between two works on the stream: streams that share a workspace without an order overwrite
 *   each other's parts;
 *   products that cuBLASLt does not take are refused, see supported() and aligned().
 *
 * Not as on a card: TF32 is fp32, sums of 8-bit products are in fp32 even with fast accumulation, and promised alignments are
 * not checked. Three algorithms exist, without the knobs of a card's. */
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "runtime.h"  // defines: emulator_queue, emulator_die

struct cublasLtContext {};

namespace {

// The contents of the opaque types.
struct Product {
    cublasOperation_t side_a, side_b;
    int32_t mode_a, mode_b;
    const float *scale_a, *scale_b;  // on the device
    int8_t fast;
};
struct Layout {
    cudaDataType_t type;
    size_t rows, cols, ld;
    int32_t batch;   // matrices
    int64_t stride;  // elements from one to the next
};
struct Preference {
    uint64_t workspace;
};
struct Algo {
    uint64_t magic, id;
    uint64_t unused[6];
};
static_assert(sizeof(Algo) == sizeof(cublasLtMatmulAlgo_t), "an algorithm is copied as an image");

constexpr uint64_t ALGO_MAGIC = 0x6c6c616d6133u;
constexpr uint32_t NUM_ALGOS = 3;

// A product of matrices, with the pointers and factors that its launch adds.
struct Call {
    Product p;
    Layout a, b, c, d;
    Algo algo;
    float alpha = 0, beta = 0;
    const void *A = NULL, *B = NULL, *C = NULL;
    void* D = NULL;
    const void* line = NULL;  // that called
    size_t depth() const { return p.side_a == CUBLAS_OP_T ? a.rows : a.cols; }
    size_t parts() const { return (size_t)1 << algo.id; }
};

template <typename Opaque, typename T>
cublasStatus_t create(Opaque* out, T value) {
    *out = (Opaque) new T(value);
    return CUBLAS_STATUS_SUCCESS;
}

template <typename T>
cublasStatus_t destroy(T* value) {
    delete value;
    return CUBLAS_STATUS_SUCCESS;
}

template <typename T>
cublasStatus_t set(T* attribute, const void* value, size_t bytes) {
    if (bytes != sizeof *attribute) { return CUBLAS_STATUS_INVALID_VALUE; }
    memcpy(attribute, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

// ---------------------------------------------------------------------------------------------------------------------
// what is supported

/* Returns the bytes of an element, or 0 for a type that is not emulated. */
size_t bytes_of(cudaDataType_t type) {
    if (type == CUDA_R_32F) { return 4; }
    if (type == CUDA_R_16BF || type == CUDA_R_16F) { return 2; }
    return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2;
}

bool is_matrix(const Layout& l, bool transposed, size_t rows, size_t cols) {
    return l.rows == (transposed ? cols : rows) && l.cols == (transposed ? rows : cols) && l.ld >= l.rows;
}

/* The 8-bit kernels take k innermost in both factors, rows of whole 16 bytes, and scales of one kind. */
bool supported_8_bit(const Call& call) {
    const Product& p = call.p;
    const bool scaled = p.scale_a && p.scale_b && p.mode_a == p.mode_b;
    const bool known =
        p.mode_a == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F || p.mode_a == CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    const size_t pitches = call.a.ld | call.b.ld | call.d.ld * bytes_of(call.d.type);
    return scaled && known && (call.a.type == CUDA_R_8F_E4M3 || call.b.type == CUDA_R_8F_E4M3) && p.side_a == CUBLAS_OP_T &&
           p.side_b == CUBLAS_OP_N && pitches % 16 == 0;
}

bool supported(const Call& call) {
    const Layout &a = call.a, &b = call.b, &c = call.c, &d = call.d;
    const size_t m = d.rows, n = d.cols, k = call.depth(), factor = bytes_of(a.type);
    if (!is_matrix(a, call.p.side_a == CUBLAS_OP_T, m, k) || !is_matrix(b, call.p.side_b == CUBLAS_OP_T, k, n) ||
        !is_matrix(c, false, m, n) || !is_matrix(d, false, m, n) || c.type != d.type || bytes_of(d.type) < 2) {
        return false;
    }
    if (factor == 1) { return bytes_of(b.type) == 1 && supported_8_bit(call); }
    return factor > 0 && a.type == b.type && (d.type == CUDA_R_32F || d.type == a.type);
}

/* Returns whether an 8-bit product takes these pointers. Only the launch knows them. */
bool aligned(const Call& call) {
    uintptr_t bits = (uintptr_t)call.A | (uintptr_t)call.B | (uintptr_t)call.C | (uintptr_t)call.D;
    if (call.p.mode_a == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F) {
        bits |= (uintptr_t)call.p.scale_a | (uintptr_t)call.p.scale_b;
    }
    return bits % 16 == 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// products

/* Eight sums side by side: GCC keeps its vector types in registers, but not always arrays. */
typedef float Lanes __attribute__((vector_size(32), aligned(4)));

/* A tile of D, TILE_M rows of two Lanes and TILE_N columns, is summed in registers. */
enum { TILE_M = 16, TILE_N = 6 };

size_t rounded_up(size_t x, size_t unit) { return (x + unit - 1) / unit * unit; }

/* Returns the size of a part of the sums: (rounded m, rounded n), by columns, so that every tile is whole. */
size_t part_floats(const Layout& d) { return rounded_up(d.rows, TILE_M) * rounded_up(d.cols, TILE_N); }

size_t workspace_of(const Call& call) { return call.parts() == 1 ? 0 : part_floats(call.d) * call.parts() * sizeof(float); }

float load(const void* data, size_t i, cudaDataType_t type) {
    switch (type) {
        case CUDA_R_32F: return ((const float*)data)[i];
        case CUDA_R_16BF: return (float)((const __nv_bfloat16*)data)[i];
        case CUDA_R_16F: return (float)((const __half*)data)[i];
        case CUDA_R_8F_E4M3: return (float)((const __nv_fp8_e4m3*)data)[i];
        default: return (float)((const __nv_fp8_e5m2*)data)[i];
    }
}

void store(void* data, size_t i, cudaDataType_t type, float value) {
    switch (type) {
        case CUDA_R_32F: ((float*)data)[i] = value; return;
        case CUDA_R_16BF: ((__nv_bfloat16*)data)[i] = __float2bfloat16(value); return;
        default: ((__half*)data)[i] = __float2half(value);
    }
}

/* Returns a factor in fp32, as panels (k, width) of `width` rows of op(A) or columns of op(B), padded with zeros. k_first: the
 * terms of a sum lie side by side. */
std::vector<float> pack(const void* data, const Layout& l, bool k_first, size_t width) {
    const size_t count = k_first ? l.cols : l.rows, k = k_first ? l.rows : l.cols;
    std::vector<float> out(rounded_up(count, width) * k);
    float* to = out.data();
    for (size_t first = 0; first < count; first += width) {
        for (size_t i = 0; i < k; i++, to += width) {
            for (size_t r = first; r < std::min(first + width, count); r++) {
                to[r - first] = load(data, k_first ? r * l.ld + i : i * l.ld + r, l.type);
            }
        }
    }
    return out;
}

/* Writes the sums of a tile, columns `ld` apart. a (depth, TILE_M), b (depth, TILE_N) */
void sum_tile(float* sums, size_t ld, const float* a, const float* b, size_t depth) {
    Lanes tile[TILE_N][2] = {};
    for (size_t k = 0; k < depth; k++, a += TILE_M, b += TILE_N) {
        const Lanes low = *(const Lanes*)a, high = *(const Lanes*)(a + 8);
        for (size_t j = 0; j < TILE_N; j++) {
            tile[j][0] += low * b[j];
            tile[j][1] += high * b[j];
        }
    }
    for (size_t j = 0; j < TILE_N; j++) { memcpy(sums + j * ld, tile[j], sizeof tile[j]); }
}

/* Writes the parts of the sums. */
void multiply(const Call& call, float* parts) {
    const size_t k = call.depth(), ld = rounded_up(call.d.rows, TILE_M);
    const std::vector<float> a = pack(call.A, call.a, call.p.side_a == CUBLAS_OP_T, TILE_M);
    const std::vector<float> b = pack(call.B, call.b, call.p.side_b == CUBLAS_OP_N, TILE_N);
    for (size_t part = 0; part < call.parts(); part++, parts += part_floats(call.d)) {
        const size_t begin = k * part / call.parts(), end = k * (part + 1) / call.parts();
        for (size_t i = 0; i < call.d.rows; i += TILE_M) {
            for (size_t j = 0; j < call.d.cols; j += TILE_N) {
                sum_tile(parts + j * ld + i, ld, &a[i * k + begin * TILE_M], &b[j * k + begin * TILE_N], end - begin);
            }
        }
    }
}

float scale(const float* scales, int32_t mode, size_t i) {
    return scales ? scales[mode == CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F ? i : 0] : 1.0f;
}

/* Joins the parts, in fp32, and writes D. */
void join(const Call& call, const float* parts) {
    const size_t ld = rounded_up(call.d.rows, TILE_M), step = part_floats(call.d);
    for (size_t j = 0; j < call.d.cols; j++) {
        for (size_t i = 0; i < call.d.rows; i++) {
            float sum = parts[j * ld + i];
            for (size_t part = 1; part < call.parts(); part++) { sum += parts[part * step + j * ld + i]; }
            sum *= call.alpha * scale(call.p.scale_a, call.p.mode_a, i) * scale(call.p.scale_b, call.p.mode_b, j);
            if (call.beta != 0) {
                const float c = load(call.C, j * call.c.ld + i, call.c.type);  // D may be C
                store(call.D, j * call.d.ld + i, call.d.type, sum);
                sum = load(call.D, j * call.d.ld + i, call.d.type) + call.beta * c;
            }
            store(call.D, j * call.d.ld + i, call.d.type, sum);
        }
        shadow_written((char*)call.D + j * call.d.ld * bytes_of(call.d.type), call.d.rows * bytes_of(call.d.type), NULL,
                       call.line);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// algorithms

/* Returns the algorithm of an image; without an image, the algorithm whose sums are not cut. */
Algo algo_of(const cublasLtMatmulAlgo_t* image) {
    Algo algo = {ALGO_MAGIC, 0, {}};
    if (image) { memcpy(&algo, image, sizeof algo); }
    return algo;
}

Call call_of(cublasLtMatmulDesc_t p, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
             cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t* algo) {
    const auto layout = [](const void* l) { return *(const Layout*)l; };
    return {*(const Product*)p, layout(a), layout(b), layout(c), layout(d), algo_of(algo)};
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// the functions of cublasLt.h, which has their description

size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }

const char* cublasLtGetStatusString(cublasStatus_t status) {
    return status == CUBLAS_STATUS_NOT_SUPPORTED ? "the requested functionality is not supported" : "an invalid value";
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) { return create(handle, cublasLtContext{}); }
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return destroy(handle); }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* p, cublasComputeType_t compute, cudaDataType_t alpha) {
    if ((compute != CUBLAS_COMPUTE_32F && compute != CUBLAS_COMPUTE_32F_FAST_TF32) || alpha != CUDA_R_32F) {
        emulator_die("cublasLtMatmulDescCreate: sums that are not in fp32");
    }
    return create(p, Product{});
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t p) { return destroy((Product*)p); }

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
    Product* p = (Product*)desc;
    switch (attribute) {
        case CUBLASLT_MATMUL_DESC_TRANSA: return set(&p->side_a, value, bytes);
        case CUBLASLT_MATMUL_DESC_TRANSB: return set(&p->side_b, value, bytes);
        case CUBLASLT_MATMUL_DESC_A_SCALE_MODE: return set(&p->mode_a, value, bytes);
        case CUBLASLT_MATMUL_DESC_B_SCALE_MODE: return set(&p->mode_b, value, bytes);
        case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER: return set(&p->scale_a, value, bytes);
        case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER: return set(&p->scale_b, value, bytes);
        case CUBLASLT_MATMUL_DESC_FAST_ACCUM: return set(&p->fast, value, bytes);
        default: emulator_die("cublasLtMatmulDescSetAttribute: attribute %d is unknown here", attribute);
    }
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* l, cudaDataType type, uint64_t rows, uint64_t cols,
                                          int64_t ld) {
    return create(l, Layout{type, rows, cols, (size_t)ld, 1, 0});
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute,
                                                const void* value, size_t bytes) {
    switch (attribute) {
        case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: return set(&((Layout*)layout)->batch, value, bytes);
        case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: return set(&((Layout*)layout)->stride, value, bytes);
        default: emulator_die("cublasLtMatrixLayoutSetAttribute: attribute %d is unknown here", attribute);
    }
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) { return destroy((Layout*)l); }

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* p) { return create(p, Preference{}); }
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) { return destroy((Preference*)p); }

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                    size_t bytes) {
    switch (attribute) {
        case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return set(&((Preference*)preference)->workspace, value, bytes);
        case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return CUBLAS_STATUS_SUCCESS;
        default: emulator_die("cublasLtMatmulPreferenceSetAttribute: attribute %d is unknown here", attribute);
    }
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t p, cublasLtMatrixLayout_t a,
                                       cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t* image, cublasLtMatmulHeuristicResult_t* result) {
    const Call call = call_of(p, a, b, c, d, image);
    const Algo& algo = call.algo;
    if (algo.magic != ALGO_MAGIC || algo.id >= NUM_ALGOS) { return CUBLAS_STATUS_INVALID_VALUE; }
    result->state = supported(call) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
    result->workspaceSize = workspace_of(call);
    return result->state;
}

/* The heuristic prefers to cut sums that are longer than both sides of the result, as on a card. So runs without a plan file
 * cut sums, too. */
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t p, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t results[], int* count) {
    const Call call = call_of(p, a, b, c, d, NULL);
    const bool deep = call.depth() > std::max(call.d.rows, call.d.cols);
    *count = 0;
    for (uint32_t i = 0; i < NUM_ALGOS && *count < requested; i++) {
        const Algo algo = {ALGO_MAGIC, (i + deep) % NUM_ALGOS, {}};
        cublasLtMatmulHeuristicResult_t* r = &results[*count];
        memcpy(&r->algo, &algo, sizeof algo);
        const cublasStatus_t status = cublasLtMatmulAlgoCheck(handle, p, a, b, c, d, &r->algo, r);
        if (status != CUBLAS_STATUS_SUCCESS) { return status; }
        *count += r->workspaceSize <= ((const Preference*)preference)->workspace;
    }
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t p, const void* alpha, const void* A,
                              cublasLtMatrixLayout_t a, const void* B, cublasLtMatrixLayout_t b, const void* beta,
                              const void* C, cublasLtMatrixLayout_t c, void* D, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t* algo, void* workspace, size_t workspace_bytes, cudaStream_t stream) {
    cublasLtMatmulHeuristicResult_t checked;
    const cublasStatus_t status = cublasLtMatmulAlgoCheck(handle, p, a, b, c, d, algo, &checked);
    if (status != CUBLAS_STATUS_SUCCESS) { return status; }
    Call call = call_of(p, a, b, c, d, algo);
    call.alpha = *(const float*)alpha, call.beta = *(const float*)beta;
    call.A = A, call.B = B, call.C = C, call.D = D, call.line = SHADOW_HERE;
    if (bytes_of(call.a.type) == 1 && !aligned(call)) { return CUBLAS_STATUS_NOT_SUPPORTED; }
    if (checked.workspaceSize > workspace_bytes) { return CUBLAS_STATUS_INVALID_VALUE; }
    for (int64_t i = 0; i < call.d.batch; i++) {
        const auto of = [i](const void* m, const Layout& l) { return (char*)m + i * l.stride * (int64_t)bytes_of(l.type); };
        call.A = of(A, call.a), call.B = of(B, call.b), call.C = of(C, call.c), call.D = of(D, call.d);
        if (call.parts() > 1) {
            emulator_queue(stream, [=] { multiply(call, (float*)workspace); });
            emulator_queue(stream, [=] { join(call, (const float*)workspace); });
        } else {
            emulator_queue(stream, [=] {
                std::vector<float> sums(part_floats(call.d));
                multiply(call, sums.data());
                join(call, sums.data());
            });
        }
    }
    return CUBLAS_STATUS_SUCCESS;
}
