/* attention_classic.cuh -- what both files of attention share: their shapes, and the classic way. Each head of q, k and v is a
 * matrix of its own there, and cuBLASLt multiplies many such matrices in one call.
 */
#ifndef ZOO_ATTENTION_CLASSIC_CUH
#define ZOO_ATTENTION_CLASSIC_CUH

#include "llmc/config.h"              // defines: AttentionShape
#include "llmc/cuda/cuda_common.cuh"  // defines: Arena, take
#include "dev/cuda/product.cuh"

// B, T, NH, NKV, HD; some shapes are for versions 1 to PLAIN alone, which take any head size, the large one for those above
static const std::vector<Shape> TESTS = {{{2, 24, 3, 1, 24}, 1, PLAIN}, {{1, 70, 4, 2, 64}}, {{2, 33, 2, 1, 128}}},
                                CLASSIC = {{{8, 1024, 12, 4, 64}},
                                           {{8, 1024, 8, 2, 96}, 1, PLAIN},
                                           {{64, 320, 4, 4, 256}, 1, PLAIN}},
                                LARGE = {{{16, 8192, 32, 8, 64}, PLAIN + 1}};

static AttentionShape shape_of(const Case& c) { return {(int)c.n[0], (int)c.n[1], (int)c.n[2], (int)c.n[3], (int)c.n[4]}; }
static size_t qkv_width(AttentionShape s) { return (size_t)(s.NH + 2 * s.NKV) * s.HD; }
static size_t out_width(AttentionShape s) { return (size_t)s.NH * s.HD; }

static double scores(const Case& c) { return (double)c.n[0] * (double)c.n[2] * (double)c.n[1] * (double)c.n[1]; }

/* Operations of one product of a head, of the causal half alone, for all heads. */
static double half_product(AttentionShape s) { return (double)s.B * s.NH * s.T * s.T * s.HD; }

/* Matrices for all heads of one sequence, as the classic way holds them. In fp32 `p` may be `scores`. */
struct Heads {
    floatX *q, *k, *v, *out;  // (NH, T, HD); k and v of a group's heads are copies
    float* scores;            // (NH, T, T)
    floatX* p;                // (NH, T, T)
    Heads(Arena* a, AttentionShape s) {
        const size_t heads = (size_t)s.NH * s.T;
        for (floatX** m : {&q, &k, &v, &out}) { *m = take<floatX>(a, heads * s.HD); }
        scores = take<float>(a, heads * s.T);
        p = take<floatX>(a, heads * s.T);
    }
    static size_t bytes(AttentionShape s) {
        Arena measured = {};
        Heads(&measured, s);
        return measured.used;
    }
};

/* A thread an element: x (T, heads from `first` of a row) to m (NH, T, HD), or with BACK m to x. Head h of m is head
 * h / group. */
template <bool BACK>
__global__ void permute_kernel(floatX* x, floatX* m, AttentionShape s, int first, int group, size_t pitch) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)s.NH * s.T * s.HD) { return; }
    const size_t d = i % s.HD, t = i / s.HD % s.T, h = i / s.HD / s.T;
    floatX* place = x + t * pitch + (first + h / group) * s.HD + d;
    if (BACK) {
        *place = m[i];
    } else {
        m[i] = *place;
    }
}

template <bool BACK = false>
static void permute(floatX* x, floatX* m, AttentionShape s, int first, int group, size_t pitch, cudaStream_t stream) {
    const size_t n = (size_t)s.NH * s.T * s.HD;
    permute_kernel<BACK><<<blocks_for(n, 256), 256, 0, stream>>>(x, m, s, first, group, pitch);
}

/* Fills q, k and v of one sequence. */
static void split_heads(Heads& h, floatX* qkv, AttentionShape s, size_t pitch, cudaStream_t stream) {
    permute(qkv, h.q, s, 0, 1, pitch, stream);
    permute(qkv, h.k, s, s.NH, s.NH / s.NKV, pitch, stream);
    permute(qkv, h.v, s, s.NH + s.NKV, s.NH / s.NKV, pitch, stream);
}

struct Matrices {
    const void* data;
    cudaDataType_t type;
    bool transposed;  // read by columns
};
template <typename T>
static Matrices matrices(const T* data, bool transposed = false) {
    return {data, data_type<T>(), transposed};
}

/* d (M, N) = scale a (M, K) b (K, N) for `count` packed matrices after each other, in one call. cuBLAS reads columns where we
 * have rows, so it computes the transposed product, with the factors exchanged. */
static void batched(Matrices d, Matrices a, Matrices b, int64_t M, int64_t N, int64_t K, int32_t count, float scale,
                    cudaStream_t stream) {
    MatmulContext* ctx = product_context();
    MatmulPlan plan = {};
    cublasLtMatmulHeuristicResult_t found;
    const cublasOperation_t first = b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N, second = a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    const float zero = 0;
    auto layout = [&](cublasLtMatrixLayout_t* made, int alignment, Matrices m, int64_t rows, int64_t cols) {
        if (m.transposed) { std::swap(rows, cols); }
        const int64_t stride = rows * cols;
        matmul_layout(made, m.type, rows, cols, cols, 1);
        CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(*made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
        CUBLAS_CHECK(
            cublasLtMatrixLayoutSetAttribute(*made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride));
        // the second matrix may begin at a lower alignment than the first
        plan.key.v[alignment] = alignment_of((const void*)((size_t)stride * matmul_type_bytes(m.type)));
    };
    layout(&plan.a, KEY_ALIGN_B, b, K, N);
    layout(&plan.b, KEY_ALIGN_A, a, M, K);
    layout(&plan.c, KEY_ALIGN_C, d, M, N);
    layout(&plan.d, KEY_ALIGN_D, d, M, N);
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&plan.product, ctx->compute, CUDA_R_32F));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(plan.product, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(plan.product, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second));
    if (matmul_candidates(ctx, &plan, &found, 1) == 0) { die("cuBLASLt has no algorithm for these products"); }
    CUBLAS_CHECK(cublasLtMatmul(ctx->handle, plan.product, &scale, b.data, plan.a, a.data, plan.b, &zero, d.data, plan.c,
                                (void*)d.data, plan.d, &found.algo, ctx->workspace, ctx->workspace_bytes, stream));
    for (cublasLtMatrixLayout_t l : {plan.a, plan.b, plan.c, plan.d}) { CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(l)); }
    CUBLAS_CHECK(cublasLtMatmulDescDestroy(plan.product));
}

/* As many operations as `halves` products of all heads: a plain product, for the rate to compare with.   out (B T, T) */
static void as_many(floatX* out, const floatX* x, size_t x_pitch, const floatX* w, size_t w_pitch, AttentionShape s, int halves,
                    cudaStream_t stream) {
    for (size_t rows = (size_t)s.B * s.T * halves / 2, now; rows > 0; rows -= now) {
        now = size_min(rows, (size_t)s.B * s.T);
        matmul_forward_cuda(product_context(), output(out, (size_t)s.T), operand(x, x_pitch), operand(w, w_pitch), NULL,
                            {now, (int)out_width(s), s.T}, stream);
    }
}

#endif
