/* muon.h -- Muon (Jordan and others, "Muon: An optimizer for hidden layers in neural networks", 2024), in the order of PyTorch
 * 2.15's torch.optim.Muon (torch/optim/_muon.py), with Nesterov's momentum and the scale `match_rms_adamw` (Liu and others,
 * "Muon is Scalable for LLM Training", 2025). A matrix of a block keeps one moment, and moves by a matrix whose singular values
 * are all near 1:
 *
 *   g = grad_scale * g                      as in adamw.h
 *   m = m + (1 - momentum) * (g - m)
 *   u = m + (1 - momentum) * (g - m)        Nesterov: with the new m
 *   X = u / max(|u|, 1e-7)                  |u|: root of the sum of squares. If u has more rows than columns, X is u^T
 *   five times (Newton and Schulz):
 *     A = X X^T
 *     C = b A + c A A                       a, b, c = 3.4445, -4.775, 2.0315
 *     X = a X + C X
 *   p = p * (1 - lr * weight_decay) - lr * lr_scale * sqrt(max(rows, cols)) * X
 *
 * With lr_scale = 0.2, X moves a weight about as far as AdamW's update does, so AdamW's rates and decay stand. A matrix is one
 * tensor of Hugging Face: q, k and v are three.
 *
 * PyTorch computes X in bfloat16. Here it is fp32; muon.cuh has the dtype of the weights. The last line of the loop is one
 * product here, (a I + C) X. A is symmetric, so the other two are products of a matrix with its transpose, of which matmul.h
 * computes half.
 */
#ifndef LLMC_MUON_H
#define LLMC_MUON_H

#include "llmc/base/matrix.h"
#include "llmc/base/utils.h"
#include "llmc/matmul.h"        // defines: matmul_general
#include "llmc/optim/recipe.h"  // defines: global_norm

enum { MUON_STEPS = 5 };  // odd
#define MUON_A 3.4445
#define MUON_B (-4.775)
#define MUON_C 2.0315
#define MUON_EPS 1e-7f  // least norm of u: a matrix of zeros stays one

/* Where the parts of the scratch begin, in bytes: copies of matrices of one shape, their X X^T, their C, and partial sums. */
typedef struct {
    size_t copy, gram, poly, sums, end;
} MuonScratch;

enum { MUON_SUMS = 128 };  // partial sums of a norm on the GPU; the CPU's fit into `copy`

/* Lays it out for `count` matrices, of elements of `width` bytes. */
static inline MuonScratch muon_scratch(size_t rows, size_t cols, size_t width, size_t count) {
    const size_t square = count * matrix_stride(size_min(rows, cols) * size_min(rows, cols)) * width;
    MuonScratch s = {0, count * matrix_stride(rows * cols) * width, 0, 0, 0};
    s.poly = s.gram + square;
    s.sums = s.poly + square;
    s.end = s.sums + count * MUON_SUMS * sizeof(double);
    return s;
}

/* Returns the floating-point operations of the products. */
static inline double muon_flops(size_t rows, size_t cols) {
    const double m = (double)size_min(rows, cols), k = (double)size_max(rows, cols);
    return MUON_STEPS * m * m * (4 * k + 2 * m);
}

/* Writes u over the gradient g (n), and updates m (n). */
static inline void muon_prepare(float* g, float* m, size_t n, double momentum, float grad_scale) {
    const float rest = (float)(1.0 - momentum);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) {
        const float gi = g[i] * grad_scale;
        m[i] += rest * (gi - m[i]);
        g[i] = m[i] + rest * (gi - m[i]);
    }
}

/* Computes c (M, N) = a (M, K) b (K, N). */
static inline void muon_product(float* c, void* scratch, MatrixView a, MatrixView b, size_t M, size_t N, size_t K) {
#ifdef LLMC_PLAIN
    (void)scratch;
#pragma omp parallel for
    for (size_t i = 0; i < M; i++) {
        for (size_t j = 0; j < N; j++) {
            float sum = 0;
            for (size_t k = 0; k < K; k++) { sum += a.data[i * a.row + k * a.col] * b.data[k * b.row + j * b.col]; }
            c[i * N + j] = sum;
        }
    }
#else
    matmul_general(c, scratch, NULL, a, b, M, N, K);
#endif
}

/* Replaces x (rows, cols) by X. scratch: muon_scratch() for floats, then matmul_scratch() bytes */
static inline void muon_orthogonalize(float* x, size_t rows, size_t cols, void* scratch) {
    const MuonScratch parts = muon_scratch(rows, cols, sizeof(float), 1);
    const size_t n = rows * cols, m = size_min(rows, cols), k = size_max(rows, cols);
    const bool tall = rows > cols;
    float *copy = (float*)((char*)scratch + parts.copy), *gram = (float*)((char*)scratch + parts.gram);
    float* poly = (float*)((char*)scratch + parts.poly);
    void* room = (char*)scratch + parts.end;
    const float norm = (float)global_norm(x, n, copy);
    const float factor = 1 / (norm > MUON_EPS ? norm : MUON_EPS);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) { copy[i] = x[i] * factor; }
    for (int step = 0; step < MUON_STEPS; step++) {
        const float* from = step % 2 ? x : copy;
        const MatrixView rows_of = by_rows(from, cols), wide = tall ? transposed(rows_of) : rows_of;
        muon_product(gram, room, wide, transposed(wide), m, m, k);
        muon_product(poly, room, by_rows(gram, m), transposed(by_rows(gram, m)), m, m, m);
#pragma omp parallel for schedule(static)
        for (size_t i = 0; i < m * m; i++) {
            poly[i] = (float)MUON_B * gram[i] + (float)MUON_C * poly[i] + (i % (m + 1) ? 0 : (float)MUON_A);
        }
        float* to = step % 2 ? copy : x;
        if (tall) {
            muon_product(to, room, rows_of, transposed(by_rows(poly, m)), rows, cols, cols);
        } else {
            muon_product(to, room, by_rows(poly, m), rows_of, rows, cols, rows);
        }
    }
}

/* Returns what X is multiplied with. */
static inline double muon_rate(double lr, double lr_scale, size_t rows, size_t cols) {
    return lr * lr_scale * sqrt((double)size_max(rows, cols));
}

/* Moves p (n) by `rate` times x (n), which is X. */
static inline void muon_update(float* p, const float* x, size_t n, double decay, double rate) {
    const float keep = (float)decay, step = (float)rate;
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) { p[i] = p[i] * keep - step * x[i]; }
}

#endif
