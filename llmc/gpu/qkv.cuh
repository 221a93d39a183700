/* qkv.cuh -- what attention reads: the product of q, k and v with its adapters, exchanged for heads (sequence.cuh), and RoPE.
 *
 * One kernel computes product and RoPE where it takes the sizes (matmul_sm90.cuh) and nothing comes between them, neither 8
 * bits, nor adapters, nor an exchange. Else they are layers of their own. Sizes, flags and the card alone decide, so all steps
 * of a run, and what they compute again, are computed alike.
 */
#ifndef LLMC_QKV_CUH
#define LLMC_QKV_CUH

#include "llmc/gpu/fp8.cuh"       // defines: Weight, linear
#include "llmc/gpu/layers.cuh"    // defines: linear_rope, lora, rope
#include "llmc/gpu/sequence.cuh"  // defines: Sequence, rows_to_heads, heads_of
#include "llmc/matmul_sm90.cuh"   // defines: matmul_takes_rope

/* Whether one kernel computes the product by w (QKV, C), with the adapters l, and RoPE. s: of a part */
static inline bool rope_is_joined(const Sequence* p, const Weight& w, const Lora* l, AttentionShape s, int C) {
    return p->parts <= 1 && !w.rows.data && l->parts == 0 && matmul_takes_rope(s, (size_t)C);
}

/* Writes qkv by heads, rotated, from x (B T, C) by w (QKV, C) with its adapters l, whose t it writes, too.
 * rows (B T, QKV): room for what is exchanged. trained: arena of the adapters. starts (B, T parts), table (T parts, HD)
 * s: of a part */
static inline void qkv_rope(const Queue* q, const Sequence* p, floatX* qkv, floatX* rows, floatX* t, const floatX* x,
                            const Weight& w, const floatX* trained, const Lora* l, const int32_t* starts, const float* table,
                            AttentionShape s, int C) {
    if (rope_is_joined(p, w, l, s, C)) {
        linear_rope(q, qkv, x, w.data, starts, table, s, C);
        return;
    }
    const size_t N = (size_t)s.B * s.T;
    floatX* to = p->parts > 1 ? rows : qkv;
    linear(q, "qkv", to, x, w, NULL, N, C, (int)qkv_width(s));
    lora(q, to, t, x, trained, l, N);
    if (p->parts > 1) { rows_to_heads(q, p, qkv, rows, s); }
    rope(q, qkv, starts, table, 0, heads_of(p, s));
}

#endif
