/* matrix.h -- a matrix in memory, seen through two strides. Products take their factors as such views: then x and its
 * transpose, or a part of it, are the same memory under other strides, and nothing is moved.
 */
#ifndef LLMC_MATRIX_H
#define LLMC_MATRIX_H

#include <stddef.h>

/* Element (i, j) lies at data[i * row + j * col]. One of the strides is 1. Borrows its memory. */
typedef struct {
    const float* data;
    size_t row, col;
} MatrixView;

/* Row after row, `row` floats from one to the next. */
static inline MatrixView by_rows(const float* data, size_t row) {
    const MatrixView v = {data, row, 1};
    return v;
}

static inline MatrixView transposed(MatrixView v) {
    const MatrixView t = {v.data, v.col, v.row};
    return t;
}

/* What lies from element (i, j) on. */
static inline MatrixView view_from(MatrixView v, size_t i, size_t j) {
    v.data += i * v.row + j * v.col;
    return v;
}

#endif
