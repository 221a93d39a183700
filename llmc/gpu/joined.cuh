/* joined.cuh -- a product and the layer beside it: the product of q, k and v with RoPE; gate and up with SwiGLU, and dx of
 * down with SwiGLU's gradient.
 *
 * One kernel computes both (matmul_sm90.cuh) where kernels.cuh chooses it; otherwise they are two layers. Neither 8 bits, nor
 * adapters, nor an exchange of heads (sequence.cuh) may come between them.
 */
#ifndef LLMC_JOINED_CUH
#define LLMC_JOINED_CUH

#include "llmc/kernels.cuh"       // defines: kernel_row, KernelSizes
#include "llmc/gpu/layers.cuh"    // defines: Rows, rope, swiglu, swiglu_backward
#include "llmc/gpu/linear.cuh"    // defines: Linear, linear, linear_backward_input
#include "llmc/gpu/sequence.cuh"  // defines: rows_to_heads, heads_of
#include "llmc/matmul_sm90.cuh"   // defines: matmul_rope_cuda, matmul_swiglu_cuda, matmul_swiglu_backward_cuda
#include "llmc/swiglu.cuh"        // defines: swiglu_forward_quantised_cuda, swiglu_backward_quantised_cuda

/* Returns the sizes of the product of q, k and v, and of RoPE; in one kernel, positions begin at 0. */
static inline KernelSizes qkv_sizes(const Linear* l, const Rows* r) {
    KernelSizes s = {};
    s.attention = r->shape;
    s.apart = r->shared || r->cache || l->fp8.rows.data || l->lora.parts > 0;
    s.rows = r->N, s.width = (size_t)l->OC, s.sum = (size_t)l->C;
    return s;
}

/* Writes qkv by heads, rotated, from x (N, C). room (N, QKV): for rows that are exchanged */
static inline void qkv_rope(const Queue* q, floatX* qkv, floatX* room, const Linear* l, const floatX* x, const Rows* r) {
    if (kernel_row(CHOOSE_QKV, qkv_sizes(l, r))->kernel != PRODUCT_APART) {
        const double moved = (double)r->N * l->C + (double)l->OC * l->C + (double)r->N * l->OC;
        Op op(q, "qkv rope", product_flops(r->N, l->C, l->OC), bytes_x(moved));
        matmul_rope_cuda(qkv, x, l->w, r->starts, r->rope, r->shape, l->C, q->stream);
        return;
    }
    linear(q, r->shared ? room : qkv, l, x, NULL, r->N);
    if (r->shared) { rows_to_heads(q, r->shared, qkv, room, r->shape); }
    const Rows heads = heads_of(r);
    rope(q, qkv, &heads);
}

/* Returns the sizes of SwiGLU of width F and the product beside it, whose other width is C. */
static inline KernelSizes swiglu_sizes(const Linear* l, size_t N, int C, int F) {
    KernelSizes s = {};
    s.apart = l->fp8.rows.data || l->lora.parts > 0;
    s.rows = N, s.width = (size_t)F, s.sum = (size_t)C;
    return s;
}

/* Writes gate_up (N, 2F) from x (N, C), and act (N, F) unless it is NULL. reader: the product that reads act */
static inline void gate_up_swiglu(const Queue* q, floatX* act, floatX* gate_up, const Linear* l, const floatX* x, size_t N,
                                  const Linear* reader) {
    const int C = l->C, F = l->OC / 2;
    if (kernel_row(CHOOSE_GATE_UP, swiglu_sizes(l, N, C, F))->kernel != PRODUCT_APART) {
        const double moved = (double)N * C + 2.0 * F * C + (act ? 3.0 : 2.0) * N * F;
        Op op(q, "gate up swiglu", product_flops(N, C, 2 * (size_t)F), bytes_x(moved));
        matmul_swiglu_cuda(gate_up, act, x, l->w, {N, 2 * (size_t)F, (size_t)C}, q->stream);
        return;
    }
    linear(q, gate_up, l, x, NULL, N);
    if (act && reader->fp8.rows.data) {
        Op op(q, "swiglu", 0, 7.0 * N * F);
        swiglu_forward_quantised_cuda({fp8_x(q, reader), fp8_counts(q, linear_specs[reader->kind].x)}, act, gate_up,
                                      swiglu_shape(N, F), q->stream);
    } else if (act) {
        swiglu(q, act, gate_up, N, F);
    }
}

/* Overwrites gate_up (N, 2F) with its gradient, from dy (N, C), the gradient of down's output. Writes act (N, F) again
 * unless it is NULL. reader: the product whose dx reads the gradient. q's scratch has room for act's gradient (N, F). */
static inline void down_dx_swiglu(const Queue* q, floatX* gate_up, floatX* act, const Linear* l, const floatX* dy, size_t N,
                                  const Linear* reader) {
    const int F = l->C, C = l->OC;
    floatX* dact = (floatX*)q->scratch;
    if (kernel_row(CHOOSE_DOWN_DX, swiglu_sizes(l, N, C, F))->kernel != PRODUCT_APART) {
        const double moved = (double)N * C + (double)F * C + (act ? 5.0 : 4.0) * N * F;
        Op op(q, "down dx swiglu", product_flops(N, C, F), bytes_x(moved));
        matmul_swiglu_backward_cuda(gate_up, act, dy, l->w, gate_up, {N, (size_t)F, (size_t)C}, q->stream);
        return;
    }
    linear_backward_input(q, dact, l, dy, N);
    if (reader->fp8.columns.data) {
        Op op(q, "swiglu backward", 0, (act ? 14.0 : 12.0) * N * F);
        swiglu_backward_quantised_cuda({fp8_dy(q, reader), fp8_counts(q, linear_specs[reader->kind].dy)}, gate_up, act, dact,
                                       gate_up, swiglu_shape(N, F), q->stream);
    } else {
        swiglu_backward(q, gate_up, act, dact, gate_up, N, F);
    }
}

#endif
