/* lora.cuh -- LoRA's products on the GPU, through cuBLASLt. The oracle is lora.h, where the formula stands.
 *
 * t and dt are floatX, rows of a whole number of 16-byte units; y, dy, x and dx have the pitch of their width. The scale
 * alpha / r goes into the products that make t and dt. A is one product for all parts, each B is a product of its own.
 */
#ifndef LLMC_LORA_CUH
#define LLMC_LORA_CUH

#include "llmc/lora.h"      // defines: Lora
#include "llmc/matmul.cuh"  // defines: MatmulContext, matmul_product, operand, output

/* The pitches of x, of y and of t. */
typedef struct {
    size_t x, y, t;
} LoraPitch;

static inline LoraPitch lora_pitch(const Lora* l) {
    return {row_pitch<floatX>(l->C), row_pitch<floatX>(l->OC), row_pitch<floatX>((size_t)l->parts * l->r)};
}

/* Writes t (N, parts r) and adds to y (N, OC) from x (N, C) and the arena w of adapters. */
static inline void lora_forward_cuda(MatmulContext* ctx, floatX* y, floatX* t, const floatX* x, const floatX* w, const Lora* l,
                                     size_t N, cudaStream_t stream) {
    const LoraPitch pitch = lora_pitch(l);
    const size_t C = (size_t)l->C, r = (size_t)l->r, R = (size_t)l->parts * r;
    matmul_product(ctx, output(t, pitch.t), {operand(x, pitch.x), AS_IS}, {operand(w + l->a, C), TRANSPOSED}, NULL, {N, R, C},
                   stream, l->scale);
    for (int p = 0; p < l->parts; p++) {
        floatX* part = y + l->first[p];
        matmul_product(ctx, output(part, pitch.y), {operand(t + p * r, pitch.t), AS_IS}, {operand(w + l->b[p], r), TRANSPOSED},
                       part, {N, (size_t)l->width[p], r}, stream);
    }
}

/* Writes dt (N, parts r) and adds to dx (N, C) from dy (N, OC). */
static inline void lora_backward_input_cuda(MatmulContext* ctx, floatX* dx, floatX* dt, const floatX* dy, const floatX* w,
                                            const Lora* l, size_t N, cudaStream_t stream) {
    const LoraPitch pitch = lora_pitch(l);
    const size_t C = (size_t)l->C, r = (size_t)l->r, R = (size_t)l->parts * r;
    for (int p = 0; p < l->parts; p++) {
        matmul_product(ctx, output(dt + p * r, pitch.t), {operand(dy + l->first[p], pitch.y), AS_IS},
                       {operand(w + l->b[p], r), AS_IS}, NULL, {N, r, (size_t)l->width[p]}, stream, l->scale);
    }
    matmul_product(ctx, output(dx, pitch.x), {operand(dt, pitch.t), AS_IS}, {operand(w + l->a, C), AS_IS}, dx, {N, C, R},
                   stream);
}

/* Overwrites the gradients in the arena dw, or with `add` adds to them, from dy (N, OC), x (N, C), the forward pass's t and the
 * dt of lora_backward_input_cuda(). */
template <typename Grad>
static void lora_backward_weight_cuda(MatmulContext* ctx, Grad* dw, const floatX* dt, const floatX* dy, const floatX* x,
                                      const floatX* t, const Lora* l, size_t N, bool add, cudaStream_t stream) {
    const LoraPitch pitch = lora_pitch(l);
    const size_t C = (size_t)l->C, r = (size_t)l->r, R = (size_t)l->parts * r;
    for (int p = 0; p < l->parts; p++) {
        Grad* db = dw + l->b[p];
        matmul_product(ctx, output(db, r), {operand(dy + l->first[p], pitch.y), TRANSPOSED},
                       {operand(t + p * r, pitch.t), AS_IS}, add ? db : NULL, {(size_t)l->width[p], r, N}, stream);
    }
    Grad* da = dw + l->a;
    matmul_product(ctx, output(da, C), {operand(dt, pitch.t), TRANSPOSED}, {operand(x, pitch.x), AS_IS}, add ? da : NULL,
                   {R, C, N}, stream);
}

#endif
