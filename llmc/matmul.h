/* matmul.h -- x W^T and its two gradients, without BLAS. fp32, row-major.
 *
 *   forward          out (N, OC)  = x (N, C) W^T            W: (OC, C)
 *   backward input   dx (N, C)    = dout (N, OC) W
 *   backward weight  dW (OC, C)  += dout^T x
 *
 * All three are one product C (M, N) = A (M, K) B (K, N) that differ only in the strides of A and B. Three nested loops
 * would do it, but would wait for memory: every multiply-add reads two numbers and a core has 64 and more of them a
 * cycle to feed. What makes it fast (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008)
 * is to use each number many times at each level of memory before it is dropped:
 *
 *   registers  A tile of MR x NR elements of C stays in registers for a whole run over k. One step of k reads NR numbers
 *              of B (2 vectors) and MR of A, and does MR * NR multiply-adds: 24 vector instructions for 14 loads.
 *   L1         A panel of B, KC x NR, is used by the tiles of a block, below each other, before the next panel.
 *   L2         A block of A, MC x KC, is used by all panels of a block of B.
 *   packing    B is first copied into the order in which the tile reads it, so that each cache line and each page is
 *              touched once, whatever the strides were. The copy costs K N against K M N multiply-adds. A is copied only
 *              where it cannot be read in place: transposed (its columns lie together), or with rows a multiple of 4096
 *              bytes apart, which would all want the same few places of the L1 cache.
 *
 * Where the core has a matrix unit, matmul_amx.h takes the large products.
 *
 * Threads share a packed block of B and take blocks of rows of A. Each element of C is summed over k in the same order
 * whoever computes it, so the result is bitwise the same for any number of threads.
 */
#ifndef LLMC_MATMUL_H
#define LLMC_MATMUL_H

#include "llmc/matmul_amx.h"  // defines: amx_available, amx_matmul, matmul_threads
#include "llmc/base/simd.h"

enum {
#if defined(__AVX512F__) || defined(__aarch64__)
    MATMUL_MR = 12,  // 24 of 32 vector registers hold the tile
#else
    MATMUL_MR = 6,  // 12 of 16
#endif
    MATMUL_NR = 2 * SIMD,
    MATMUL_KC = 512,                // longest run over k
    MATMUL_MC = 4 * MATMUL_MR,      // rows of a block of A
    MATMUL_NC = 512,                // columns of a block of B, a multiple of NR; packed, it takes 1 MiB of the caller's stack
    MATMUL_LDA = MATMUL_KC + SIMD,  // distance of copied rows of A: anything but a power of two
    MATMUL_SMALL_K = 256,           // longest run over k in matmul_small()
    MATMUL_FEW = 4,                 // up to so many rows of x are multiplied without packing w
    MATMUL_AMX_EDGE = 32,           // M, N and K from which on
    MATMUL_AMX_SIZE = 64 * 64 * 64  // and M N K from which on amx_matmul() is faster
};

/* c (rows, NR) = a (rows, K) b (K, NR) + add (rows, NR), or without `add` where it is NULL. Element (i, k) of a lies at
 * i * a_row + k * a_col. `rows` is a constant where this is inlined, so that `acc` lives in registers. */
LLMC_INLINE void matmul_tile(int rows, size_t K, const float* a, size_t a_row, size_t a_col, const float* b, size_t b_row,
                             float* c, const float* add, size_t c_row) {
    vf acc[MATMUL_MR][2];
    LLMC_UNROLL
    for (int i = 0; i < rows; i++) { acc[i][0] = acc[i][1] = vf_set(0.0f); }
    for (size_t k = 0; k < K; k++) {
        const vf b0 = vf_load(b + k * b_row), b1 = vf_load(b + k * b_row + SIMD);
        LLMC_UNROLL
        for (int i = 0; i < rows; i++) {
            const float s = a[(size_t)i * a_row + k * a_col];
            acc[i][0] += s * b0;
            acc[i][1] += s * b1;
        }
    }
    LLMC_UNROLL
    for (int i = 0; i < rows; i++) {
        float* row = c + (size_t)i * c_row;
        if (add) {
            acc[i][0] += vf_load(add + (size_t)i * c_row);
            acc[i][1] += vf_load(add + (size_t)i * c_row + SIMD);
        }
        vf_store(row, acc[i][0]);
        vf_store(row + SIMD, acc[i][1]);
    }
}

/* The same for any number of rows and for `cols` <= NR columns of c; b has NR columns in any case. */
static inline void matmul_panel(size_t rows, size_t cols, size_t K, const float* a, size_t a_row, size_t a_col, const float* b,
                                size_t b_row, float* c, const float* add, size_t c_row) {
    if (cols < MATMUL_NR) {  // narrow: whole vectors go through a buffer
        float wide[MATMUL_MR * MATMUL_NR];
        for (size_t i = 0; i < rows; i += MATMUL_MR) {
            const size_t n = size_min(rows - i, MATMUL_MR);
            matmul_panel(n, MATMUL_NR, K, a + i * a_row, a_row, a_col, b, b_row, wide, NULL, MATMUL_NR);
            for (size_t r = 0; r < n; r++) {
                for (size_t q = 0; q < cols; q++) {
                    const size_t at = (i + r) * c_row + q;
                    c[at] = wide[r * MATMUL_NR + q] + (add ? add[at] : 0.0f);
                }
            }
        }
        return;
    }
    size_t i = 0;
    for (; i + MATMUL_MR <= rows; i += MATMUL_MR) {
        matmul_tile(MATMUL_MR, K, a + i * a_row, a_row, a_col, b, b_row, c + i * c_row, add ? add + i * c_row : NULL, c_row);
    }
    for (; i + 4 <= rows; i += 4) {
        matmul_tile(4, K, a + i * a_row, a_row, a_col, b, b_row, c + i * c_row, add ? add + i * c_row : NULL, c_row);
    }
    for (; i < rows; i++) {
        matmul_tile(1, K, a + i * a_row, a_row, a_col, b, b_row, c + i * c_row, add ? add + i * c_row : NULL, c_row);
    }
}

/* c (M, N) = a (M, K) b (K, N) + add for operands that lie in a near cache already and need no packing; K <= SMALL_K. */
static inline void matmul_small(size_t M, size_t N, size_t K, const float* a, size_t a_row, size_t a_col, const float* b,
                                size_t b_row, float* c, const float* add, size_t c_row) {
    size_t j = 0;
    for (; j + MATMUL_NR <= N; j += MATMUL_NR) {
        matmul_panel(M, MATMUL_NR, K, a, a_row, a_col, b + j, b_row, c + j, add ? add + j : NULL, c_row);
    }
    if (j == N) { return; }
    float narrow[MATMUL_SMALL_K * MATMUL_NR];  // the last columns of b, made as wide as a tile
    memset(narrow, 0, K * MATMUL_NR * sizeof(float));
    for (size_t k = 0; k < K; k++) { memcpy(narrow + k * MATMUL_NR, b + k * b_row + j, (N - j) * sizeof(float)); }
    matmul_panel(M, N - j, K, a, a_row, a_col, narrow, MATMUL_NR, c + j, add ? add + j : NULL, c_row);
}

/* A panel of B: dst (depth, NR) = the part (depth, cols) of a matrix with the given strides, one of which is 1. Columns from
 * `cols` on become zeros. */
static inline void matmul_pack(float* dst, const float* b, size_t b_row, size_t b_col, size_t depth, size_t cols) {
    if (cols < MATMUL_NR) { memset(dst, 0, depth * MATMUL_NR * sizeof(float)); }
    if (b_row == 1) {
        simd_transpose(dst, MATMUL_NR, b, b_col, cols, depth);
    } else {
        for (size_t k = 0; k < depth; k++) { memcpy(dst + k * MATMUL_NR, b + k * b_row, cols * sizeof(float)); }
    }
}

/* c (M, N) = a (M, K) b (K, N) + add (M, N), or without `add` where it is NULL; `add` may be c. Element (i, k) of a lies at
 * i * a_row + k * a_col, and so for b; c and add are row-major without gaps. */
static inline void matmul_vectors(float* c, const float* add, const float* a, size_t a_row, size_t a_col, const float* b,
                                  size_t b_row, size_t b_col, size_t M, size_t N, size_t K) {
    float packed_b[MATMUL_NC * MATMUL_KC] __attribute__((aligned(64)));
    const size_t kc = ceil_div(K, ceil_div(K, MATMUL_KC));  // runs of equal length
    // a block is as tall as pays (twice as tall where columns of A are read in pieces of its height), but never so tall that
    // a thread gets less than some four of them: they are of unequal cost
    const size_t tallest = a_col == 1 ? MATMUL_MC : 2 * MATMUL_MC;
    const size_t mc = size_min(tallest, round_up(ceil_div(M, 4 * matmul_threads()), MATMUL_MR));
#pragma omp parallel
    for (size_t j = 0; j < N; j += MATMUL_NC) {
        const size_t cols = size_min(N - j, MATMUL_NC);
        for (size_t k = 0; k < K; k += kc) {
            const size_t depth = size_min(K - k, kc);
            const float* from = k ? c : add;
#pragma omp for schedule(static)
            for (size_t q = 0; q < cols; q += MATMUL_NR) {
                matmul_pack(packed_b + q * depth, b + k * b_row + (j + q) * b_col, b_row, b_col, depth,
                            size_min(cols - q, MATMUL_NR));
            }
#pragma omp for schedule(dynamic)
            for (size_t i = 0; i < M; i += mc) {
                float packed_a[2 * MATMUL_MC * MATMUL_LDA] __attribute__((aligned(64)));
                const size_t rows = size_min(M - i, mc), at = i * N + j;
                const float* block = a + i * a_row + k * a_col;
                size_t block_row = a_row, block_col = a_col;
                if (a_col != 1) {
                    for (size_t q = 0; q < depth; q++) { memcpy(packed_a + q * mc, block + q * a_col, rows * sizeof(float)); }
                    block = packed_a, block_col = mc;
                } else if (a_row % 1024 == 0) {
                    for (size_t r = 0; r < rows; r++) {
                        memcpy(packed_a + r * MATMUL_LDA, block + r * a_row, depth * sizeof(float));
                    }
                    block = packed_a, block_row = MATMUL_LDA;
                }
                for (size_t q = 0; q < cols; q += MATMUL_NR) {
                    matmul_panel(rows, size_min(cols - q, MATMUL_NR), depth, block, block_row, block_col, packed_b + q * depth,
                                 MATMUL_NR, c + at + q, from ? from + at + q : NULL, N);
                }
            }
        }
    }
}

/* The same by the matrix unit, where there is one and the product is large enough to pay for what it packs. */
static inline void matmul_general(float* c, const float* add, const float* a, size_t a_row, size_t a_col, const float* b,
                                  size_t b_row, size_t b_col, size_t M, size_t N, size_t K) {
#ifdef LLMC_AMX
    if (size_min(M, size_min(N, K)) >= MATMUL_AMX_EDGE && M * N * K >= MATMUL_AMX_SIZE && amx_available()) {
        amx_matmul(c, add, a, a_row, a_col, b, b_row, b_col, M, N, K);
        return;
    }
#endif
    matmul_vectors(c, add, a, a_row, a_col, b, b_row, b_col, M, N, K);
}

/* out: (N, OC)   x: (N, C)   w: (OC, C)   residual: (N, OC) is added, NULL for none; it may be out */
static inline void matmul_forward(float* out, const float* x, const float* w, const float* residual, size_t N, int C, int OC) {
    if (N > MATMUL_FEW) {
        matmul_general(out, residual, x, (size_t)C, 1, w, 1, (size_t)C, N, (size_t)OC, (size_t)C);
        return;
    }
    // generating, a token at a time: nothing of w is used twice, so packing it would cost more than the product
#pragma omp parallel for schedule(static)
    for (int o = 0; o < OC; o++) {
        for (size_t n = 0; n < N; n++) {
            const size_t at = n * (size_t)OC + (size_t)o;
            out[at] = vf_dot(x + n * (size_t)C, w + (size_t)o * (size_t)C, (size_t)C) + (residual ? residual[at] : 0.0f);
        }
    }
}

/* dx: (N, C) = or +=   dout: (N, OC)   w: (OC, C) */
static inline void matmul_backward_input(float* dx, const float* dout, const float* w, size_t N, int C, int OC,
                                         bool accumulate) {
    matmul_general(dx, accumulate ? dx : NULL, dout, (size_t)OC, 1, w, (size_t)C, 1, N, (size_t)C, (size_t)OC);
}

/* dw: (OC, C) +=   dout: (N, OC)   x: (N, C) */
static inline void matmul_backward_weight(float* dw, const float* dout, const float* x, size_t N, int C, int OC) {
    matmul_general(dw, dw, dout, 1, (size_t)OC, x, (size_t)C, 1, (size_t)OC, (size_t)C, N);
}

#endif
