/* matmul.h -- x W^T and its two gradients, without BLAS. fp32, row-major.
 *
 *   forward          out (N, OC)  = x (N, C) W^T [+ residual]    W: (OC, C)
 *   backward input   dx (N, C)    = dout (N, OC) W
 *   backward weight  dW (OC, C)  += dout^T x
 *
 * The plain loops come first. They define the result, and the tests compare the fast form with them. -DLLMC_PLAIN builds them.
 *
 * The fast form treats all three as one product C (M, N) = A (M, K) B (K, N) with different strides. The plain loops wait for
 * memory: every multiply-add reads two numbers, while a core could do 64 a cycle. The fast form (Goto and van de Geijn,
 * "Anatomy of High-Performance Matrix Multiplication", 2008) uses each number many times at each level of memory:
 *
 *   registers  A tile of MR x NR elements of C stays in registers for a whole run over k. One step of k reads NR numbers
 *              of B (2 vectors) and MR of A, and does MR * NR multiply-adds: 24 vector instructions for 14 loads.
 *   L1         All tiles of a block, one below the other, use a panel of B, KC x NR, before the next panel is read.
 *   L2         All panels of a block of B use a block of A, MC x KC.
 *   packing    B is first copied into the order in which the tile reads it. Each cache line and each page is then touched
 *              once, whatever the strides were. The copy costs K N against K M N multiply-adds. A is copied only where
 *              reading it in place is slow: when it is transposed (its columns are contiguous), or when its rows are a
 *              multiple of 4096 bytes apart and would compete for the same few sets of the L1 cache.
 *
 * If the core has a matrix unit, matmul_amx.h computes the large products. Of a product a a^T only the tiles are computed that
 * reach the diagonal. matmul_general() mirrors the others.
 *
 *   GFLOP/s of one thread    forward    dx    dw     Layer qkv of d4, 1024 tokens, 256 -> 384: dev/bench/bench_layers.c with
 *   plain loops                    1     5     5     -DLLMC_PLAIN, with -DLLMC_NO_AMX and with neither. A Xeon at 2 GHz that
 *   packed, AVX-512              111   120   101     has AVX-512 and AMX, gcc 12, 2026-11-22; the best of many runs, with
 *   packed, AMX                  214   223   151     other work on the machine.
 *
 * Threads share a packed block of B and take blocks of rows of A. Each element of C is summed over k in the same order
 * whichever thread computes it, so the result is bitwise the same for any number of threads. The packed blocks lie in the
 * caller's scratch memory, matmul_scratch() bytes, best at an address that is a multiple of 64.
 */
#ifndef LLMC_MATMUL_H
#define LLMC_MATMUL_H

#include "llmc/matmul_amx.h"  // defines: amx_available, amx_matmul
#include "llmc/base/matrix.h"
#include "llmc/base/simd.h"
#include "llmc/base/threads.h"

/* Whether this build runs the plain loops, here and in the layers that include this file. */
#ifdef LLMC_PLAIN
enum { IS_PLAIN = 1 };
#else
enum { IS_PLAIN = 0 };
#endif

// ---------------------------------------------------------------------------------------------------------------------
// the plain loops

/* Writes out (N, OC) from x (N, C) and w (OC, C), and adds residual (N, OC) unless it is NULL; residual may be out. */
static inline void matmul_forward_plain(float* out, const float* x, const float* w, const float* residual, size_t N, int C,
                                        int OC) {
#pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        for (int o = 0; o < OC; o++) {
            const float *x_row = x + n * (size_t)C, *w_row = w + (size_t)o * (size_t)C;
            const size_t at = n * (size_t)OC + (size_t)o;
            float sum = 0;
            for (int c = 0; c < C; c++) { sum += x_row[c] * w_row[c]; }
            out[at] = sum + (residual ? residual[at] : 0);
        }
    }
}

/* Writes dx (N, C) from dout (N, OC) and w (OC, C). */
static inline void matmul_backward_input_plain(float* dx, const float* dout, const float* w, size_t N, int C, int OC) {
#pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        float* dx_row = dx + n * (size_t)C;
        for (int c = 0; c < C; c++) { dx_row[c] = 0; }
        for (int o = 0; o < OC; o++) {
            const float d = dout[n * (size_t)OC + (size_t)o];
            const float* w_row = w + (size_t)o * (size_t)C;
            for (int c = 0; c < C; c++) { dx_row[c] += d * w_row[c]; }
        }
    }
}

/* Adds to dw (OC, C) from dout (N, OC) and x (N, C). */
static inline void matmul_backward_weight_plain(float* dw, const float* dout, const float* x, size_t N, int C, int OC) {
#pragma omp parallel for
    for (int o = 0; o < OC; o++) {
        float* dw_row = dw + (size_t)o * (size_t)C;
        for (size_t n = 0; n < N; n++) {
            const float d = dout[n * (size_t)OC + (size_t)o];
            const float* x_row = x + n * (size_t)C;
            for (int c = 0; c < C; c++) { dw_row[c] += d * x_row[c]; }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// the fast form

enum {
#if defined(__AVX512F__)
    MATMUL_MR = 12,  // 24 of 32 vector registers hold the tile
#elif defined(__aarch64__)
    MATMUL_MR = 8,  // 16 of 32, and 8 hold numbers of A
#else
    MATMUL_MR = 6,  // 12 of 16
#endif
    MATMUL_NR = 2 * SIMD,
    MATMUL_KC = 512,                               // longest run over k
    MATMUL_MC = 4 * MATMUL_MR,                     // rows of a block of A
    MATMUL_NC = 512,                               // columns of a block of B, a multiple of NR
    MATMUL_LDA = MATMUL_KC + SIMD,                 // distance between copied rows of A: not a power of two
    MATMUL_PACKED_A = 2 * MATMUL_MC * MATMUL_LDA,  // floats, 198 KiB at most: one for each thread
    MATMUL_PACKED_B = MATMUL_NC * MATMUL_KC,       // floats, 1 MiB: one for all threads
    MATMUL_SMALL_K = 256,                          // longest run over k in matmul_small()
    MATMUL_FEW = 4,                                // with at most this many rows of x, w is not packed
    MATMUL_AMX_EDGE = 32,                          // amx_matmul() is faster if M, N and K are all at least this
    MATMUL_AMX_SIZE = 64 * 64 * 64                 // and M N K is at least this number
};

/* Where a product goes, and what is added to it: NULL, or a matrix of the same shape, which may be c. Rows of both are `row`
 * floats apart. */
typedef struct {
    float* c;
    const float* add;
    size_t row;
} MatmulSum;

static inline MatmulSum sum_in(float* c, const float* add, size_t row) {
    const MatmulSum s = {c, add, row};
    return s;
}

/* Returns the part from element (i, j) on. */
static inline MatmulSum sum_from(MatmulSum s, size_t i, size_t j) {
    const size_t at = i * s.row + j;
    return sum_in(s.c + at, s.add ? s.add + at : NULL, s.row);
}

#ifdef __aarch64__
/* Adds one step of k to acc (rows, NR): b's two vectors times a number of A for each row. For row i that is lane `lane` of
 * x[i], or with -1 the i-th number of x. The barrier keeps gcc from loading the next steps' b first: registers are too few. */
LLMC_INLINE void matmul_lane(int rows, const vf* x, int lane, const float* b, vf acc[][2]) {
    __asm__ volatile("" ::: "memory");
    const vf b0 = vf_load(b), b1 = vf_load(b + SIMD);
    LLMC_UNROLL
    for (int i = 0; i < rows; i++) {
        const float a = lane < 0 ? x[i / SIMD][i % SIMD] : x[i][lane];
        acc[i][0] += a * b0;
        acc[i][1] += a * b1;
    }
}

/* Adds a (rows, K) b (K, NR) to acc as far as whole vectors of A can be loaded; returns the steps of k that are done. ARM
 * multiplies a vector by one lane of another: 16 loads serve the 64 multiply-adds of 4 steps, or 4 the 16 of a step if A is
 * transposed. The order of the sums is the same. */
LLMC_INLINE size_t matmul_lanes(int rows, size_t K, MatrixView a, MatrixView b, vf acc[][2]) {
    size_t k = 0;
    vf x[MATMUL_MR];
    for (; a.col == 1 && k + 4 <= K; k += 4) {
        const float* row = b.data + k * b.row;
        LLMC_UNROLL
        for (int i = 0; i < rows; i++) { x[i] = vf_load(a.data + (size_t)i * a.row + k); }
        matmul_lane(rows, x, 0, row, acc);
        matmul_lane(rows, x, 1, row + b.row, acc);
        matmul_lane(rows, x, 2, row + 2 * b.row, acc);
        matmul_lane(rows, x, 3, row + 3 * b.row, acc);
    }
    for (; a.row == 1 && rows % 4 == 0 && k < K; k++) {
        LLMC_UNROLL
        for (int i = 0; i < rows; i += 4) { x[i / 4] = vf_load(a.data + k * a.col + i); }
        matmul_lane(rows, x, -1, b.data + k * b.row, acc);
    }
    return k;
}
#endif

/* Computes s (rows, NR) = a (rows, K) b (K, NR) + add. The rows of b are contiguous. `rows` is a constant where this is
 * inlined, so `acc` stays in registers. */
LLMC_INLINE void matmul_tile(int rows, size_t K, MatrixView a, MatrixView b, MatmulSum s) {
    vf acc[MATMUL_MR][2];
    LLMC_UNROLL
    for (int i = 0; i < rows; i++) { acc[i][0] = acc[i][1] = vf_set(0.0f); }
    size_t k = 0;
#ifdef __aarch64__
    k = matmul_lanes(rows, K, a, b, acc);
#endif
    for (; k < K; k++) {
        const vf b0 = vf_load(b.data + k * b.row), b1 = vf_load(b.data + k * b.row + SIMD);
        LLMC_UNROLL
        for (int i = 0; i < rows; i++) {
            const float x = a.data[(size_t)i * a.row + k * a.col];
            acc[i][0] += x * b0;
            acc[i][1] += x * b1;
        }
    }
    LLMC_UNROLL
    for (int i = 0; i < rows; i++) {
        float* row = s.c + (size_t)i * s.row;
        if (s.add) {
            acc[i][0] += vf_load(s.add + (size_t)i * s.row);
            acc[i][1] += vf_load(s.add + (size_t)i * s.row + SIMD);
        }
        vf_store(row, acc[i][0]);
        vf_store(row + SIMD, acc[i][1]);
    }
}

/* Does the same for any number of rows and for `cols` <= NR columns of s; b always has NR columns. */
static inline void matmul_panel(size_t rows, size_t cols, size_t K, MatrixView a, MatrixView b, MatmulSum s) {
    if (cols < MATMUL_NR) {  // narrow: whole vectors go through a buffer
        float wide[MATMUL_MR * MATMUL_NR];
        for (size_t i = 0; i < rows; i += MATMUL_MR) {
            const size_t n = size_min(rows - i, MATMUL_MR);
            matmul_panel(n, MATMUL_NR, K, view_from(a, i, 0), b, sum_in(wide, NULL, MATMUL_NR));
            for (size_t r = 0; r < n; r++) {
                for (size_t q = 0; q < cols; q++) {
                    const size_t at = (i + r) * s.row + q;
                    s.c[at] = wide[r * MATMUL_NR + q] + (s.add ? s.add[at] : 0.0f);
                }
            }
        }
        return;
    }
    size_t i = 0;
    for (; i + MATMUL_MR <= rows; i += MATMUL_MR) { matmul_tile(MATMUL_MR, K, view_from(a, i, 0), b, sum_from(s, i, 0)); }
    for (; i + 4 <= rows; i += 4) { matmul_tile(4, K, view_from(a, i, 0), b, sum_from(s, i, 0)); }
    for (; i < rows; i++) { matmul_tile(1, K, view_from(a, i, 0), b, sum_from(s, i, 0)); }
}

/* Computes s (M, N) = a (M, K) b (K, N) + add without packing, for operands that are already in a near cache. The rows of b are
 * contiguous. K <= MATMUL_SMALL_K. */
static inline void matmul_small(size_t M, size_t N, size_t K, MatrixView a, MatrixView b, MatmulSum s) {
    size_t j = 0;
    for (; j + MATMUL_NR <= N; j += MATMUL_NR) { matmul_panel(M, MATMUL_NR, K, a, view_from(b, 0, j), sum_from(s, 0, j)); }
    if (j == N) { return; }
    float narrow[MATMUL_SMALL_K * MATMUL_NR];  // the last columns of b, made as wide as a tile
    memset(narrow, 0, K * MATMUL_NR * sizeof(float));
    for (size_t k = 0; k < K; k++) { memcpy(narrow + k * MATMUL_NR, b.data + k * b.row + j, (N - j) * sizeof(float)); }
    matmul_panel(M, N - j, K, a, by_rows(narrow, MATMUL_NR), sum_from(s, 0, j));
}

/* Packs a panel of B: dst (depth, NR) = the first (depth, cols) of b. Columns from `cols` on become zeros. */
static inline void matmul_pack(float* dst, MatrixView b, size_t depth, size_t cols) {
    if (cols < MATMUL_NR) { memset(dst, 0, depth * MATMUL_NR * sizeof(float)); }
    if (b.row == 1) {
        simd_transpose(dst, MATMUL_NR, b.data, b.col, cols, depth);
    } else {
        for (size_t k = 0; k < depth; k++) { memcpy(dst + k * MATMUL_NR, b.data + k * b.row, cols * sizeof(float)); }
    }
}

/* Returns a thread's view of A: the block (rows, depth) in place, or its copy in `packed` where reading it would be slow. */
static inline MatrixView matmul_block(float* packed, MatrixView a, size_t rows, size_t depth, size_t mc) {
    if (a.col != 1) {
        for (size_t q = 0; q < depth; q++) { memcpy(packed + q * mc, a.data + q * a.col, rows * sizeof(float)); }
        return transposed(by_rows(packed, mc));
    }
    if (a.row % 1024 != 0) { return a; }
    for (size_t r = 0; r < rows; r++) { memcpy(packed + r * MATMUL_LDA, a.data + r * a.row, depth * sizeof(float)); }
    return by_rows(packed, MATMUL_LDA);
}

/* Computes s (M, N) = a (M, K) b (K, N) + add. scratch: matmul_scratch() bytes */
static inline void matmul_vectors(MatmulSum s, void* scratch, MatrixView a, MatrixView b, size_t M, size_t N, size_t K) {
    float *packed_b = (float*)scratch, *packed_a_0 = packed_b + MATMUL_PACKED_B;
    const size_t kc = ceil_div(K, ceil_div(K, MATMUL_KC));  // runs of equal length
    const bool half = !s.add && is_transpose(a, b);
    // A tall block pays off; where columns of A are read in pieces of its height, it is twice as tall. But each thread should
    // get about four blocks or more, because their costs differ.
    const size_t tallest = a.col == 1 ? MATMUL_MC : 2 * MATMUL_MC;
    const size_t mc = size_min(tallest, round_up(ceil_div(M, 4 * max_threads()), MATMUL_MR));
#pragma omp parallel
    for (size_t j = 0; j < N; j += MATMUL_NC) {
        const size_t cols = size_min(N - j, MATMUL_NC);
        for (size_t k = 0; k < K; k += kc) {
            const size_t depth = size_min(K - k, kc);
            const MatmulSum part = sum_in(s.c, k ? s.c : s.add, s.row);
#pragma omp for schedule(static)
            for (size_t q = 0; q < cols; q += MATMUL_NR) {
                matmul_pack(packed_b + q * depth, view_from(b, k, j + q), depth, size_min(cols - q, MATMUL_NR));
            }
#pragma omp for schedule(dynamic)
            for (size_t i = 0; i < M; i += mc) {
                float* packed_a = packed_a_0 + thread_number() * MATMUL_PACKED_A;
                const size_t rows = size_min(M - i, mc);
                const MatrixView block = matmul_block(packed_a, view_from(a, i, k), rows, depth, mc);
                for (size_t q = 0; q < cols; q += MATMUL_NR) {
                    if (half && j + q + MATMUL_NR <= i) { continue; }
                    matmul_panel(rows, size_min(cols - q, MATMUL_NR), depth, block, by_rows(packed_b + q * depth, MATMUL_NR),
                                 sum_from(part, i, j + q));
                }
            }
        }
    }
}

/* Copies what lies above the diagonal of c (M, M) to below it. */
static inline void matmul_mirror(float* c, size_t M) {
    enum { ROWS = 32 };
#pragma omp parallel for schedule(dynamic)
    for (size_t i = 0; i < M; i += ROWS) {
        const size_t rows = size_min(M - i, ROWS);
        simd_transpose(c + i * M, M, c + i, M, i, rows);
        for (size_t r = i; r < i + rows; r++) {
            for (size_t col = i; col < r; col++) { c[r * M + col] = c[col * M + r]; }
        }
    }
}

/* Does the same without gaps between rows, on the matrix unit if there is one and the product is large enough to pay for its
 * packing. */
static inline void matmul_general(float* c, void* scratch, const float* add, MatrixView a, MatrixView b, size_t M, size_t N,
                                  size_t K) {
#ifdef LLMC_AMX
    if (size_min(M, size_min(N, K)) >= MATMUL_AMX_EDGE && M * N * K >= MATMUL_AMX_SIZE && amx_available()) {
        amx_matmul(c, scratch, add, a, b, M, N, K);
    } else
#endif
        matmul_vectors(sum_in(c, add, N), scratch, a, b, M, N, K);
    if (!add && is_transpose(a, b)) { matmul_mirror(c, M); }
}

/* Does matmul_forward() for a few rows. No element of w is used often enough to pay for packing it. */
static inline void matmul_forward_few(float* out, const float* x, const float* w, const float* residual, size_t N, int C,
                                      int OC) {
#pragma omp parallel for schedule(static)
    for (int o = 0; o < OC; o++) {
        for (size_t n = 0; n < N; n++) {
            const size_t at = n * (size_t)OC + (size_t)o;
            out[at] = vf_dot(x + n * (size_t)C, w + (size_t)o * (size_t)C, (size_t)C) + (residual ? residual[at] : 0.0f);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// the functions that the model calls take the plain loops' arguments, and scratch of matmul_scratch() bytes. dw NULL: the
// weights are frozen, and nothing is computed

/* Returns the bytes of scratch for any product: the packed block of B, then a block of A for each thread. The number of threads
 * must not grow afterwards. Its content has no meaning between calls, so all products may share it. */
static inline size_t matmul_scratch(void) {
    if (IS_PLAIN) { return 0; }
    const size_t vectors = (MATMUL_PACKED_B + max_threads() * MATMUL_PACKED_A) * sizeof(float);
#ifdef LLMC_AMX
    return size_max(vectors, amx_scratch());
#else
    return vectors;
#endif
}

static inline void matmul_forward(float* out, void* scratch, const float* x, const float* w, const float* residual, size_t N,
                                  int C, int OC) {
    if (IS_PLAIN) {
        matmul_forward_plain(out, x, w, residual, N, C, OC);
    } else if (N <= MATMUL_FEW) {  // generating, a token at a time
        matmul_forward_few(out, x, w, residual, N, C, OC);
    } else {
        const MatrixView rows = by_rows(x, (size_t)C), columns = transposed(by_rows(w, (size_t)C));
        matmul_general(out, scratch, residual, rows, columns, N, (size_t)OC, (size_t)C);
    }
}

static inline void matmul_backward_input(float* dx, void* scratch, const float* dout, const float* w, size_t N, int C, int OC) {
    if (IS_PLAIN) {
        matmul_backward_input_plain(dx, dout, w, N, C, OC);
    } else {
        matmul_general(dx, scratch, NULL, by_rows(dout, (size_t)OC), by_rows(w, (size_t)C), N, (size_t)C, (size_t)OC);
    }
}

static inline void matmul_backward_weight(float* dw, void* scratch, const float* dout, const float* x, size_t N, int C,
                                          int OC) {
    if (!dw) { return; }
    if (IS_PLAIN) {
        matmul_backward_weight_plain(dw, dout, x, N, C, OC);
    } else {
        const MatrixView columns = transposed(by_rows(dout, (size_t)OC));
        matmul_general(dw, scratch, dw, columns, by_rows(x, (size_t)C), (size_t)OC, (size_t)C, N);
    }
}

#endif
