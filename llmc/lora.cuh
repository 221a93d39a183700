/* lora.cuh -- LoRA's products on the GPU, through cuBLASLt. The oracle is lora.h, where the formula stands.
 *
 * t and dt are floatX, rows of a whole number of 16-byte units; y, dy, x and dx have the pitch of their width. The scale
 * alpha / r goes into the products that make t and dt. A is one product for all parts, each B is a product of its own.
 */
#ifndef LLMC_LORA_CUH
#define LLMC_LORA_CUH

#include "llmc/lora.h"      // defines: Lora
#include "llmc/matmul.cuh"  // defines: MatmulContext, matmul_product, operand, output, output_from

/* The pitches of x, of y and of t. */
typedef struct {
    size_t x, y, t;
} LoraPitch;

static inline LoraPitch lora_pitch(const Lora* l) {
    return {row_pitch<floatX>(l->C), row_pitch<floatX>(l->OC), row_pitch<floatX>((size_t)l->parts * l->r)};
}

/* The arenas of the adapters, and the rows between A and B of one product: LoraMemory of lora.h on the device. */
typedef struct {
    const floatX* w;  // the adapters
    Output dw;        // their gradients; its pitch is not read
    floatX* t;        // (N, parts r) forward writes them for backward
    floatX* dt;       // (N, parts r) room for their gradient
} LoraMemoryX;

/* Writes m.t and adds to y (N, OC) from x (N, C). */
static inline void lora_forward_cuda(MatmulContext* ctx, floatX* y, const LoraMemoryX& m, const floatX* x, const Lora* l,
                                     size_t N, cudaStream_t stream) {
    const LoraPitch pitch = lora_pitch(l);
    const size_t C = (size_t)l->C, r = (size_t)l->r, R = (size_t)l->parts * r;
    matmul_product(ctx, output(m.t, pitch.t), {operand(x, pitch.x), AS_IS}, {operand(m.w + l->a, C), TRANSPOSED}, NULL,
                   {N, R, C}, stream, {l->scale, 1.0f});
    for (int p = 0; p < l->parts; p++) {
        floatX* part = y + l->first[p];
        matmul_product(ctx, output(part, pitch.y), {operand(m.t + p * r, pitch.t), AS_IS},
                       {operand(m.w + l->b[p], r), TRANSPOSED}, part, {N, (size_t)l->width[p], r}, stream);
    }
}

/* Writes m.dt and adds to dx (N, C) from dy (N, OC). */
static inline void lora_backward_input_cuda(MatmulContext* ctx, floatX* dx, const LoraMemoryX& m, const floatX* dy,
                                            const Lora* l, size_t N, cudaStream_t stream) {
    const LoraPitch pitch = lora_pitch(l);
    const size_t C = (size_t)l->C, r = (size_t)l->r, R = (size_t)l->parts * r;
    for (int p = 0; p < l->parts; p++) {
        matmul_product(ctx, output(m.dt + p * r, pitch.t), {operand(dy + l->first[p], pitch.y), AS_IS},
                       {operand(m.w + l->b[p], r), AS_IS}, NULL, {N, r, (size_t)l->width[p]}, stream, {l->scale, 1.0f});
    }
    matmul_product(ctx, output(dx, pitch.x), {operand(m.dt, pitch.t), AS_IS}, {operand(m.w + l->a, C), AS_IS}, dx, {N, C, R},
                   stream);
}

/* Overwrites the adapters' gradients, or with `add` adds to them, from dy (N, OC), x (N, C), the forward pass's m.t and the
 * m.dt of lora_backward_input_cuda(). */
static inline void lora_backward_weight_cuda(MatmulContext* ctx, const LoraMemoryX& m, const floatX* dy, const floatX* x,
                                             const Lora* l, size_t N, bool add, cudaStream_t stream) {
    const LoraPitch pitch = lora_pitch(l);
    const size_t C = (size_t)l->C, r = (size_t)l->r, R = (size_t)l->parts * r;
    const auto gradient = [&](size_t offset, size_t width) {
        Output dw = output_from(m.dw, offset);
        dw.ld = width;
        return dw;
    };
    for (int p = 0; p < l->parts; p++) {
        const Output db = gradient(l->b[p], r);
        matmul_product(ctx, db, {operand(dy + l->first[p], pitch.y), TRANSPOSED}, {operand(m.t + p * r, pitch.t), AS_IS},
                       add ? db.data : NULL, {(size_t)l->width[p], r, N}, stream);
    }
    const Output da = gradient(l->a, C);
    matmul_product(ctx, da, {operand(m.dt, pitch.t), TRANSPOSED}, {operand(x, pitch.x), AS_IS}, add ? da.data : NULL, {R, C, N},
                   stream);
}

#endif
