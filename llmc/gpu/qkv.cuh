/* qkv.cuh -- the input of attention: the product of q, k and v, the exchange of heads (sequence.cuh), and RoPE.
 *
 * One kernel computes product and RoPE where it takes the sizes (matmul_sm90.cuh) and nothing comes between them, neither 8
 * bits, nor adapters, nor an exchange. Otherwise they are two layers. Sizes, flags and the card alone decide, so every step of
 * a run computes, and recomputes, the same way.
 */
#ifndef LLMC_QKV_CUH
#define LLMC_QKV_CUH

#include "llmc/gpu/linear.cuh"    // defines: Linear, linear
#include "llmc/gpu/layers.cuh"    // defines: Rows, rope
#include "llmc/gpu/sequence.cuh"  // defines: rows_to_heads, heads_of
#include "llmc/matmul_sm90.cuh"   // defines: matmul_takes_rope, matmul_rope_cuda

/* Returns whether one kernel computes the product and RoPE. */
static inline bool rope_is_joined(const Linear* l, const Rows* r) {
    return !r->shared && !l->fp8.rows.data && l->lora.parts == 0 && matmul_takes_rope(r->shape, (size_t)l->C);
}

/* Writes qkv by heads, rotated, from x (N, C). room (N, QKV): for rows that are exchanged */
static inline void qkv_rope(const Queue* q, floatX* qkv, floatX* room, const Linear* l, const floatX* x, const Rows* r) {
    if (rope_is_joined(l, r)) {
        const double moved = (double)r->N * l->C + (double)l->OC * l->C + (double)r->N * l->OC;
        Op op(q->profiler, q->stream, "qkv rope", product_flops(r->N, l->C, l->OC), bytes_x(moved));
        matmul_rope_cuda(qkv, x, l->w, r->starts, r->rope, r->shape, l->C, q->stream);
        return;
    }
    linear(q, r->shared ? room : qkv, l, x, NULL, r->N);
    if (r->shared) { rows_to_heads(q, r->shared, qkv, room, r->shape); }
    const Rows heads = heads_of(r);
    rope(q, qkv, &heads);
}

#endif
