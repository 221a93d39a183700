/* feedforward.cuh -- SwiGLU with the product before it: gate and up in the forward pass, dx of down in the backward pass.
 *
 * One kernel computes both where it takes the sizes (matmul_sm90.cuh) and nothing comes between them, neither 8 bits nor
 * adapters. Else they are layers of their own. Sizes, flags and the card alone decide, so all steps of a run, and what they
 * compute again, are computed alike.
 */
#ifndef LLMC_FEEDFORWARD_CUH
#define LLMC_FEEDFORWARD_CUH

#include "llmc/gpu/fp8.cuh"      // defines: Weight, linear, linear_backward_input, swiglu, swiglu_backward
#include "llmc/gpu/layers.cuh"   // defines: linear_swiglu, linear_backward_input_swiglu, lora, lora_backward_input
#include "llmc/matmul_sm90.cuh"  // defines: matmul_takes_swiglu

/* Whether one kernel computes SwiGLU and the product by w: gate and up (2F, C), or down (C, F), with the adapters l. */
static inline bool swiglu_is_joined(const Weight& w, const Lora* l, size_t N, int C, int F) {
    return !w.rows.data && l->parts == 0 && matmul_takes_swiglu(N, (size_t)C, (size_t)F);
}

/* Writes gate_up (N, 2F) = x (N, C) w^T with its adapters l, whose t it writes, too, and, unless it is NULL, act (N, F).
 * trained: arena of the adapters. next: the weight whose product takes act */
static inline void gate_up_swiglu(const Queue* q, floatX* act, floatX* gate_up, floatX* t, const floatX* x, const Weight& w,
                                  const Weight& next, const floatX* trained, const Lora* l, size_t N, int C, int F) {
    if (swiglu_is_joined(w, l, N, C, F)) {
        linear_swiglu(q, act, gate_up, x, w.data, N, C, F);
        return;
    }
    linear(q, "gate up", gate_up, x, w, NULL, N, C, 2 * F);
    lora(q, gate_up, t, x, trained, l, N);
    if (act) { swiglu(q, act, gate_up, N, F, next); }
}

/* Overwrites gate_up (N, 2F) with its gradient, from dout (N, C) by w (C, F) with its adapters l, whose dt it writes, too, and,
 * unless it is NULL, writes act (N, F) again. next: the weight whose dx takes the gradient. The scratch of q has room for the
 * gradient of act (N, F). */
static inline void down_dx_swiglu(const Queue* q, floatX* gate_up, floatX* act, floatX* dt, const floatX* dout, const Weight& w,
                                  const Weight& next, const floatX* trained, const Lora* l, size_t N, int F, int C) {
    if (swiglu_is_joined(w, l, N, C, F)) {
        linear_backward_input_swiglu(q, gate_up, act, dout, w.data, N, F, C);
        return;
    }
    floatX* dact = (floatX*)q->scratch;
    linear_backward_input(q, "down dx", dact, dout, w, N, F, C);
    lora_backward_input(q, dact, dt, dout, trained, l, N);
    swiglu_backward(q, gate_up, act, dact, gate_up, N, F, next);
}

#endif
