/* linear.h -- the layers that hold weights, as the trainer calls them: a matrix, and a norm. fp32.
 *
 *   linear           y = x W^T [+ residual]   with adapters   + s (x A^T) B^T     (lora.h)
 *   linear_backward  dx = dy W                                + their part
 *                    dW += dy^T x                             dA, dB += ...
 *
 * A layer carries its weights, its shape and its gradients, so a call names only what flows through it. matmul.h, lora.h and
 * rmsnorm.h compute; they know nothing of a model. The CUDA trainer's twin is gpu/linear.cuh.
 */
#ifndef LLMC_LINEAR_H
#define LLMC_LINEAR_H

#include "llmc/lora.h"     // defines: Lora, lora_forward, lora_backward
#include "llmc/matmul.h"   // defines: matmul_forward, matmul_backward_input, matmul_backward_weight
#include "llmc/rmsnorm.h"  // defines: rmsnorm_forward, rmsnorm_backward

/* A matrix that multiplies rows, with the adapters beside it. */
typedef struct {
    const float* w;       // (OC, C)
    float* dw;            // (OC, C) its gradient, which accumulates; NULL: the matrix is frozen
    int C, OC;            // widths of an input row and of an output row
    Lora lora;            // the adapters; none if lora.parts is 0
    LoraMemory adapters;  // where they lie
} Linear;

/* The gain of an RMSNorm. */
typedef struct {
    const float* w;  // (C)
    float* dw;       // (C) its gradient, which accumulates; NULL: the gain is frozen
    int C;
    float eps;
} Norm;

/* Writes y (N, OC) from x (N, C) and adds residual (N, OC), which may be y, unless it is NULL. scratch: matmul_scratch()
 * bytes */
static inline void linear(void* scratch, float* y, const Linear* l, const float* x, const float* residual, size_t N) {
    matmul_forward(y, scratch, x, l->w, residual, N, l->C, l->OC);
    lora_forward(y, scratch, &l->adapters, x, &l->lora, N);
}

/* Writes dx (N, C) and adds to the gradients of the matrix and of its adapters, from dy (N, OC) and the forward pass's x. */
static inline void linear_backward(void* scratch, float* dx, const Linear* l, const float* dy, const float* x, size_t N) {
    matmul_backward_input(dx, scratch, dy, l->w, N, l->C, l->OC);
    matmul_backward_weight(l->dw, scratch, dy, x, N, l->C, l->OC);
    lora_backward(dx, scratch, &l->adapters, dy, x, &l->lora, N);
}

/* Writes y (N, C) and rstd (N), kept for backward, from x (N, C). */
static inline void norm(float* y, float* rstd, const Norm* n, const float* x, size_t N) {
    rmsnorm_forward(y, rstd, x, n->w, packed_rows(N, n->C), n->eps);
}

/* Adds to dx (N, C) and to the gain's gradient, from dy (N, C) and the forward pass's x and rstd. scratch:
 * rmsnorm_backward_scratch() bytes */
static inline void norm_backward(void* scratch, float* dx, const Norm* n, const float* dy, const float* x, const float* rstd,
                                 size_t N) {
    rmsnorm_backward(dx, n->dw, scratch, dy, x, n->w, rstd, packed_rows(N, n->C));
}

#endif
