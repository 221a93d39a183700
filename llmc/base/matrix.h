/* matrix.h -- a view of a matrix in memory, given by two strides. Products take their factors as views: the transpose of x,
 * or a part of it, is the same memory with other strides, and nothing is copied.
 */
#ifndef LLMC_MATRIX_H
#define LLMC_MATRIX_H

#include <stddef.h>

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

/* Returns the part of a view from element (i, j) on. */
static inline MatrixView view_from(MatrixView v, size_t i, size_t j) {
    v.data += i * v.row + j * v.col;
    return v;
}

#endif
