/* attention_sm90_parts.cuh -- what the kernels of attention_sm90.cuh and attention_sm90_walk.cuh are built from: the list of
 * work, the borders of documents, products of tiles in shared memory, and writing rows out.
 */
#ifndef LLMC_ATTENTION_SM90_PARTS_CUH
#define LLMC_ATTENTION_SM90_PARTS_CUH

#include "llmc/attention_common.cuh"
#include "llmc/cuda/warpgroups.cuh"

#ifndef PRECISION_FP32

/* One block's pieces of work, out of `count` in all. Piece p is head p % heads and tile p / heads, the longest tile first. */
struct WorkList {
    uint32_t count, turn = 0;
    __device__ __forceinline__ explicit WorkList(uint32_t pieces) : count(pieces) {}
    __device__ __forceinline__ bool next(uint32_t* piece) {
        *piece = turn * gridDim.x + (turn % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
        turn++;
        return *piece < count;
    }
};

/* Where a document's end limits what a consumer's tokens see: for its queries, the first key that each sees; for its keys,
 * the first query that no longer sees each. Both grow with the token, so a single token gives the edge of the whole block,
 * warpgroup or warp. Tokens past T count as the last one. Without documents everything is `all`, which the compiler knows. */
template <bool DOCUMENTS>
struct DocumentEdges {
    int block, warpgroup, warp, rows[2];  // rows: of rows g and g + 8 of the warp
    /* edges (T): the edge of each token; block_at, warpgroup_at, warp_at: the tokens that give these edges; row: of row g */
    __device__ __forceinline__ DocumentEdges(const int32_t* edges, int T, int all, int block_at, int warpgroup_at, int warp_at,
                                             int row) {
        block = DOCUMENTS ? edges[min(block_at, T - 1)] : all;
        warpgroup = DOCUMENTS ? edges[min(warpgroup_at, T - 1)] : all;
        warp = DOCUMENTS ? edges[min(warp_at, T - 1)] : all;
        rows[0] = DOCUMENTS ? edges[min(row, T - 1)] : all;
        rows[1] = DOCUMENTS ? edges[min(row + 8, T - 1)] : all;
    }
};

/* Issues products as a group, which may read all registers written so far. */
template <typename Products>
__device__ __forceinline__ void wgmma_issue(const Products& products) {
    wgmma_fence();
    products();
    wgmma_commit();
}

/* Waits until at most the PENDING newest groups are still in flight; d is the result of an older one. */
template <int PENDING, int N>
__device__ __forceinline__ void wgmma_finish(float (&d)[N]) {
    wgmma_wait<PENDING>();
    wgmma_hold(d);
}

/* Computes d (64 x N) = a (64 rows of a tile of A_ROWS) b (tile of N rows)^T over HD columns. */
template <int HD, int N, int A_ROWS>
__device__ __forceinline__ void wgmma_scores(float (&d)[N / 2], uint32_t a, uint32_t b) {
#pragma unroll
    for (int k = 0; k < HD / 16; k++) {
        wgmma_shared<N, 0>(d, a + k / 4 * A_ROWS * 8 + k % 4 * 2, b + k / 4 * N * 8 + k % 4 * 2, k > 0);
    }
}

/* The left operand of scores: 64 rows of a tile of ROWS. They lie in registers, or each product reads them from shared
 * memory. */
template <int HD, int ROWS, bool REGISTERS>
struct ScoresLeft {
    uint32_t rows;  // as by matrix_rows
    uint32_t a[REGISTERS ? HD / 16 : 1][4];

    /* address: of the warpgroup's first row */
    __device__ __forceinline__ explicit ScoresLeft(uint32_t address) : rows(matrix_rows(address)) {
        if constexpr (REGISTERS) {
            const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
            const uint32_t row = address + (warp * 16 + lane % 16) * 128;
#pragma unroll
            for (int k = 0; k < HD / 16; k++) {
                load_matrix_x4(a[k], row + k / 4 * ROWS * 128 + ((k % 4 * 2 + lane / 16) ^ lane % 8) * 16);
            }
        }
    }
    /* Computes d (64 x N) = these rows times b (tile of N rows)^T. */
    template <int N>
    __device__ __forceinline__ void product(float (&d)[N], uint32_t b) const {
        if constexpr (REGISTERS) {
#pragma unroll
            for (int k = 0; k < HD / 16; k++) { wgmma_registers<2 * N, 0>(d, a[k], b + k / 4 * N * 16 + k % 4 * 2, k > 0); }
        } else {
            wgmma_scores<HD, 2 * N, ROWS>(d, rows, b);
        }
    }
};

/* Adds a (64 x K) b (tile of K rows) to d (64 x HD). */
template <int HD, int K>
__device__ __forceinline__ void wgmma_values(float (&d)[HD / 2], const uint32_t (&a)[K / 16][4], uint32_t b) {
#pragma unroll
    for (int k = 0; k < K / 16; k++) { wgmma_registers<HD, 1>(d, a[k], b + k * 128, 1); }
}

/* Writes the first `valid` of a warp's 16 rows: rows 0 to 7 times f0, rows 8 to 15 times f1. Four lanes hold a row's columns
 * in pairs; they exchange until each has eight neighboring columns. */
template <int HD>
__device__ __forceinline__ void wgmma_store(floatX* rows, size_t pitch, int valid, const float (&d)[HD / 2], float f0,
                                            float f1) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < HD / 32; m++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float f = r ? f1 : f0;
            uint32_t x[4];  // lane t: columns 2 t, 2 t + 1 of pieces 4 m .. 4 m + 3; becomes columns 0 .. 7 of piece 4 m + t
#pragma unroll
            for (int i = 0; i < 4; i++) { x[i] = pack2(d[(4 * m + i) * 4 + 2 * r] * f, d[(4 * m + i) * 4 + 2 * r + 1] * f); }
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const uint32_t got = __shfl_xor_sync(0xffffffffu, t & 1 ? x[i] : x[i + 1], 1);
                x[i] = t & 1 ? got : x[i];
                x[i + 1] = t & 1 ? x[i + 1] : got;
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t got = __shfl_xor_sync(0xffffffffu, t & 2 ? x[i] : x[i + 2], 2);
                x[i] = t & 2 ? got : x[i];
                x[i + 2] = t & 2 ? x[i + 2] : got;
            }
            if (g + 8 * r < valid) {
                *(uint4*)(rows + (size_t)(g + 8 * r) * pitch + (4 * m + t) * 8) = make_uint4(x[0], x[1], x[2], x[3]);
            }
        }
    }
}

/* Writes to sums[r] the product of row g + 8 r of a warp's 16 rows of x with the same row of y. x and y point at the first of
 * these rows in swizzled tiles, whose next 64 columns are block_bytes further. Two lanes share a row. */
template <int HD>
__device__ __forceinline__ void swizzled_row_products(float (&sums)[2], const char* x, const char* y, int block_bytes) {
    const int lane = threadIdx.x % 32, row = lane / 2;
    float sum = 0;
#pragma unroll
    for (int c = 0; c < HD / 16; c++) {
        const int at = c / 4 * block_bytes + row * 128 + ((lane % 2 * 4 + c % 4) ^ row % 8) * 16;
        const Vec<floatX, 8> a = load_vec<8>((const floatX*)(x + at)), b = load_vec<8>((const floatX*)(y + at));
#pragma unroll
        for (int k = 0; k < 8; k++) { sum += to_float(a.v[k]) * to_float(b.v[k]); }
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
#pragma unroll
    for (int r = 0; r < 2; r++) { sums[r] = __shfl_sync(0xffffffffu, sum, lane / 4 * 2 + r * 16); }
}

#endif  // PRECISION_FP32
#endif
