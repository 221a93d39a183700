/* swiglu.h -- the gate of the feed-forward block (Shazeer, "GLU Variants Improve Transformer", 2020). fp32.
 *
 *   s     = sigmoid(gate) = 1 / (1 + e^-gate)
 *   out   = gate * s * up                                silu(gate) * up
 *   dgate = dout * up * s * (1 + gate * (1 - s))
 *   dup   = dout * gate * s
 *
 * A row of gate_up holds F gates, then F ups, as one GEMM writes them.
 */
#ifndef LLMC_SWIGLU_H
#define LLMC_SWIGLU_H

#include "llmc/base/simd.h"

LLMC_INLINE vf swiglu_sigmoid(vf x) { return 1.0f / (1.0f + vf_exp(-x)); }

/* Writes out (N, F) from gate_up (N, 2F). */
static inline void swiglu_forward(float* out, const float* gate_up, size_t N, int F) {
    const size_t width = (size_t)F;
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        const float *gate = gate_up + n * 2 * width, *up = gate + width;
        float* on = out + n * width;
        for (size_t f = 0; f < width; f += SIMD) {
            const size_t lanes = width - f;
            const vf g = vf_load_upto(gate + f, lanes, 0.0f), u = vf_load_upto(up + f, lanes, 0.0f);
            vf_store_upto(on + f, lanes, g * swiglu_sigmoid(g) * u);
        }
    }
}

/* Writes dgate_up (N, 2F) from dout (N, F) and gate_up (N, 2F). */
static inline void swiglu_backward(float* dgate_up, const float* dout, const float* gate_up, size_t N, int F) {
    const size_t width = (size_t)F;
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        const float *gate = gate_up + n * 2 * width, *up = gate + width, *dn = dout + n * width;
        float *dgate = dgate_up + n * 2 * width, *dup = dgate + width;
        for (size_t f = 0; f < width; f += SIMD) {
            const size_t lanes = width - f;
            const vf g = vf_load_upto(gate + f, lanes, 0.0f), u = vf_load_upto(up + f, lanes, 0.0f),
                     d = vf_load_upto(dn + f, lanes, 0.0f);
            const vf s = swiglu_sigmoid(g);
            vf_store_upto(dup + f, lanes, d * g * s);
            vf_store_upto(dgate + f, lanes, d * u * s * (1.0f + g * (1.0f - s)));
        }
    }
}

#endif
