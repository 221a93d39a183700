/* sgd_matrix.h -- an optimizer for tests alone: momentum, divided by the root mean square of the whole matrix. So a matrix
 * shows that was cut, or joined with another. It takes the matrices of blocks, and keeps m alone. optimizer.h includes this
 * file in programs that are built with -DTEST_RULES='"dev/test/sgd_matrix.h"'. They take the rule if SGD_MATRIX is set. */
#define TEST_KERNELS "dev/test/cuda/sgd_matrix.cuh"
#define RULE_OF_RUN (getenv("SGD_MATRIX") ? 1 : 0)
#define TEST_ROWS                                                                                                \
    {"sgd_matrix",     sgd_matrix_takes,  1 << SLOT_MASTER | 1 << SLOT_M, sgd_matrix_prepare, sgd_matrix_update, \
     sgd_matrix_whole, sgd_matrix_scratch},

#define SGD_MATRIX_MOMENTUM 0.9f

static inline bool sgd_matrix_takes(ParamKind kind) {
    return param_specs[kind].matrix && param_specs[kind].place != PLACE_OUTSIDE;
}

static inline size_t sgd_matrix_scratch(size_t rows, size_t cols) { return cols > 0 ? rows * sizeof(double) : 0; }

static inline void sgd_matrix_prepare(OptimizerArenas a, size_t n, const UpdateStep* step) {
    for (size_t i = 0; i < n; i++) { a.grads[i] = a.m[i] = SGD_MATRIX_MOMENTUM * a.m[i] + a.grads[i] * step->grad_scale; }
}

static inline void sgd_matrix_whole(float* x, size_t rows, size_t cols, void* scratch) {
    double *squares = (double*)scratch, all = 0;  // of each row
    for (size_t r = 0; r < rows; r++) {
        squares[r] = 0;
        for (size_t c = 0; c < cols; c++) { squares[r] += (double)x[r * cols + c] * (double)x[r * cols + c]; }
        all += squares[r];
    }
    const float factor = all > 0 ? (float)sqrt((double)(rows * cols) / all) : 1;
    for (size_t i = 0; i < rows * cols; i++) { x[i] *= factor; }
}

static inline void sgd_matrix_update(OptimizerArenas a, size_t n, const UpdateStep* step) {
    const float keep = (float)(1 - step->lr * step->weight_decay), lr = (float)step->lr;
    for (size_t i = 0; i < n; i++) { a.params[i] = a.params[i] * keep - lr * a.grads[i]; }
}
