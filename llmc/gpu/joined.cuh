/* joined.cuh -- a product and the layer beside it: the product of q, k and v with RoPE; gate and up with SwiGLU, and dx of
 * down with SwiGLU's gradient; the head with cross-entropy.
 *
 * One kernel computes both (matmul_sm90.cuh) where kernels.cuh chooses it; otherwise they are two layers. Neither 8 bits, nor
 * adapters, nor an exchange of heads (sequence.cuh) may come between them.
 */
#ifndef LLMC_JOINED_CUH
#define LLMC_JOINED_CUH

#include "llmc/kernels.cuh"       // defines: kernel_row, KernelSizes
#include "llmc/gpu/layers.cuh"    // defines: Rows, rope, swiglu, swiglu_backward, crossentropy
#include "llmc/gpu/linear.cuh"    // defines: Linear, linear, linear_backward_input
#include "llmc/gpu/sequence.cuh"  // defines: rows_to_heads, heads_of
#include "llmc/matmul_sm90.cuh"   // defines: matmul_rope_cuda, matmul_swiglu_cuda, matmul_softmax_cuda
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

enum { HEAD_ROWS = 4096 };  // tokens whose logits exist at one time; 8192 and 16384 take more memory and gain no time

/* The rows of the head and the loss. */
typedef struct {
    floatX* x;               // (N, C)
    const int32_t* targets;  // (N)
    float* losses;           // (N)
    floatX* logits;          // (min(N, HEAD_ROWS), V)
    floatX* dx;              // (N, C)
    float* dx_factors;       // (N)
    float* sums;             // (min(N, HEAD_ROWS), matmul_softmax_parts(V))
} HeadRows;

/* Returns the sizes of the smallest chunk of N rows. */
static inline KernelSizes head_sizes(const Linear* l, size_t N) {
    KernelSizes s = {};
    s.apart = l->fp8.rows.data || l->lora.parts > 0;
    s.rows = N % HEAD_ROWS ? N % HEAD_ROWS : HEAD_ROWS, s.width = (size_t)l->OC, s.sum = (size_t)l->C;
    return s;
}

/* Whether head_loss() leaves factors of dx's rows, and x multiplied by them. */
static inline bool head_joins(const Linear* l, size_t N) {
    return kernel_row(CHOOSE_HEAD, head_sizes(l, N))->kernel != PRODUCT_APART;
}

/* Writes exponentials in the place of `rows` logits, from row `at` on, and changes them and x for the backward products. */
static inline void head_exponentials(const Queue* q, const Linear* l, const HeadRows* r, size_t at, size_t rows, float dloss,
                                     const float* loss_scale) {
    const size_t V = (size_t)l->OC, C = (size_t)l->C;
    floatX* x = r->x + at * C;
    {
        Op op(q, "head exponentials", product_flops(rows, l->C, V),
              bytes_x((double)rows * C + (double)V * C + (double)rows * V));
        matmul_softmax_cuda(r->logits, r->sums, x, l->w, r->dx_factors + at, {rows, V, C}, q->stream);
    }
    const size_t parts = matmul_softmax_parts(V);
    Op op(q, "cross-entropy", 0, bytes_x(2.0 * rows * C) + 4.0 * rows * parts);
    crossentropy_join_cuda(r->losses + at, r->dx_factors + at, r->logits, x, r->sums, parts, r->targets + at, dloss, loss_scale,
                           {rows, V, C}, q->stream);
}

/* Writes the losses of N rows and, if dloss is not 0, dx and the head's gradient (with `add`, adds to it). */
static inline void head_loss(const Queue* q, const Linear* l, const HeadRows* r, size_t N, float dloss, const float* loss_scale,
                             bool add) {
    const bool joined = dloss != 0.0f && head_joins(l, N);
    const float factor = fp8_factor_behind(l, dloss);
    if (joined) {
        Op op(q, "targets' logits", 0, bytes_x(2.0 * N * l->C));
        crossentropy_references_cuda(r->dx_factors, r->x, l->w, r->targets, N, l->C, q->stream);
    }
    for (size_t at = 0; at < N; at += HEAD_ROWS) {
        const size_t rows = size_min(HEAD_ROWS, N - at);
        const floatX* x = r->x + at * pitch_of(l->C);
        if (joined) {
            head_exponentials(q, l, r, at, rows, dloss, loss_scale);
        } else {
            linear(q, r->logits, l, x, NULL, rows);
            crossentropy(q, r->losses + at, r->logits, r->targets + at, dloss / factor, loss_scale, rows, l->OC);
        }
        if (dloss == 0.0f) { continue; }
        linear_backward(q, r->dx + at * pitch_of(l->C), l, r->logits, x, rows, add || at > 0, factor);
    }
}

#endif
