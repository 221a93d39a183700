/* matrix.h -- a view of a matrix in memory, given by two strides, and the shapes of products and of rows of activations.
 * Products take their factors as views: the transpose of x, or a part of it, is the same memory with other strides, and nothing
 * is copied.
 */
#ifndef LLMC_MATRIX_H
#define LLMC_MATRIX_H

#include "llmc/base/utils.h"  // defines: LLMC_HOST_DEVICE

/* Element (i, j) lies at data[i * row + j * col]. One of the strides is 1. Borrows its memory. */
typedef struct {
    const float* data;
    size_t row, col;
} MatrixView;

/* Views data as rows, `row` floats from one to the next. */
static inline MatrixView by_rows(const float* data, size_t row) {
    const MatrixView v = {data, row, 1};
    return v;
}

static inline MatrixView transposed(MatrixView v) {
    const MatrixView t = {v.data, v.col, v.row};
    return t;
}

/* Returns whether a b is a a^T, which is symmetric. */
static inline bool is_transpose(MatrixView a, MatrixView b) { return a.data == b.data && a.row == b.col && a.col == b.row; }

/* Returns the part of a view from element (i, j) on. */
static inline MatrixView view_from(MatrixView v, size_t i, size_t j) {
    v.data += i * v.row + j * v.col;
    return v;
}

/* D (M, N) = A (M, K) B (K, N) */
typedef struct {
    size_t M, N, K;
} ProductShape;

/* Factors of a product and of what is added to it. */
typedef struct {
    float product, added;
} SumFactors;

/* S = X X^T of each of `count` matrices X (M, K), or X^T X of X (K, M) with `columns`. */
typedef struct {
    size_t M, K;
    int count;
    bool columns;
} SymmetricShape;

/* Returns the elements from one matrix of a batch to the next: all begin at the same alignment, 256 bytes in 16 bits. */
LLMC_HOST_DEVICE static inline size_t matrix_stride(size_t elements) { return (elements + 127) / 128 * 128; }

/* Rows of activations. */
typedef struct {
    size_t N;      // number of rows
    int C;         // elements of each
    size_t pitch;  // elements from one row to the next
} RowShape;

/* Returns the shape of rows without gaps. */
static inline RowShape packed_rows(size_t N, int C) {
    const RowShape rows = {N, C, (size_t)C};
    return rows;
}

#endif
