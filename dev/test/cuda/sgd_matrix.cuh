/* sgd_matrix.cuh -- the kernels of dev/test/sgd_matrix.h, for builds in which a master weight is fp32, or the weights are. */
#ifndef TEST_SGD_MATRIX_CUH
#define TEST_SGD_MATRIX_CUH

#include "llmc/cuda/ptx.cuh"
#include "llmc/optim/master.cuh"
#include "llmc/optim/optimizer.cuh"

#define TEST_KERNELS_ROWS {sgd_matrix_prepare_cuda, sgd_matrix_update_cuda, sgd_matrix_whole_cuda},

__global__ void sgd_matrix_prepare_kernel(MatrixPart part, const StepState* state) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= part.count || state->verdict != UPDATE_APPLIED) { return; }
    const float g = part.fp32_grads ? ((const float*)part.grads)[i] : to_float(((const floatX*)part.grads)[i]);
    float* m = (float*)part.m;
    part.x[i] = m[i] = SGD_MATRIX_MOMENTUM * m[i] + g * state->grad_scale;
}

__global__ void sgd_matrix_update_kernel(MatrixPart part, const StepState* state) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= part.count || state->verdict != UPDATE_APPLIED) { return; }
    float* master = (float*)part.master;
    const float p = (master ? master[i] : to_float(part.params[i])) * state->decay - (float)state->lr * part.x[i];
    if (master) { master[i] = p; }
    part.params[i] = round_master<floatX>(p);
}

/* One block. */
__global__ void sgd_matrix_whole_kernel(float* x, size_t n, const StepState* state) {
    __shared__ double shared[32];
    double sum = 0;
    if (state->verdict != UPDATE_APPLIED) { return; }
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) { sum += (double)x[i] * (double)x[i]; }
    sum = block_sum(sum, shared);
    const float factor = sum > 0 ? (float)sqrt((double)n / sum) : 1;
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) { x[i] *= factor; }
}

static void sgd_matrix_check(const MatrixPart* part) {
    const bool fp32 = part->master_kind == (sizeof(floatX) == 4 ? MASTER_NONE : MASTER_FP32);
    if (!fp32 || part->bf16_moments) { die("sgd_matrix: wanted fp32 master weights and moments"); }
}
static void sgd_matrix_prepare_cuda(const MatrixPart* part, const StepState* state, const Hyperparameters*,
                                    cudaStream_t stream) {
    sgd_matrix_check(part);
    sgd_matrix_prepare_kernel<<<(unsigned)ceil_div(part->count, 256), 256, 0, stream>>>(*part, state);
    CUDA_CHECK_LAUNCH("sgd_matrix_prepare_kernel");
}
static void sgd_matrix_update_cuda(const MatrixPart* part, const StepState* state, const Hyperparameters*,
                                   cudaStream_t stream) {
    sgd_matrix_update_kernel<<<(unsigned)ceil_div(part->count, 256), 256, 0, stream>>>(*part, state);
    CUDA_CHECK_LAUNCH("sgd_matrix_update_kernel");
}
static void sgd_matrix_whole_cuda(float* x, size_t rows, size_t cols, void*, const StepState* state, cudaStream_t stream) {
    sgd_matrix_whole_kernel<<<1, 256, 0, stream>>>(x, rows * cols, state);
    CUDA_CHECK_LAUNCH("sgd_matrix_whole_kernel");
}

#endif
