/* linear.cuh -- the layers that hold weights, as train_llama3.cu calls them: a matrix, and a norm. The twin of linear.h.
 *
 *   linear           y = x W^T [+ residual]   with adapters   + s (x A^T) B^T     (lora.h)
 *   linear_backward  dx = dy W                                + their part
 *                    dW = dy^T x [+ dW]                       dA, dB = ... [+ dA, dB]
 *
 * With --fp8 a matrix has 8-bit copies (fp8.cuh), and its three products multiply in 8 bits:
 *
 *   y    x: 8 bits, a scale for each token         W: 8 bits, a scale for each output
 *   dx   dy: a scale for each token                W: its transposed copy, a scale for each input
 *   dW   dy: its transpose, one scale              x: its transpose, one scale
 *
 * x and dy are quantised just before their product: by the norm or the SwiGLU that writes them, otherwise in one pass. All
 * products share one buffer for them. Values that are computed again have the same bits.
 *
 * dW sums over the tokens, so it cannot apply a scale of one token: each factor has one scale, by its largest value. The kernel
 * that quantises a tensor's rows also stores this value in `largest`; for x it does so in the forward pass. dx makes the
 * transpose of dy from the 8-bit rows, by a shift of the exponents (quantise.h; 2 bytes a value), and leaves it for dW. dW
 * makes the transpose of x from its 16 bits (3 bytes a value), with the scale that the forward pass has left. Both transposes
 * share one buffer.
 *
 * The sums: forward keeps them in the tensor cores' own precision until the end (fast), as other programs do. dx sums over
 * twice the feed-forward width, and dW over all tokens: they are not fast. On an H200 (dev/results/nvidia-h200-kernels.md), the
 * products of a 1B model with scales for each row run at 1.87 times BF16's speed if all are fast. If none is, they run at 1.66.
 * The products of dW, with one scale for each factor and not fast, run at 1.77.
 */
#ifndef LLMC_GPU_LINEAR_CUH
#define LLMC_GPU_LINEAR_CUH

#include "llmc/gpu/fp8.cuh"        // defines: Fp8Copies
#include "llmc/gpu/gradients.cuh"  // defines: Gradient
#include "llmc/gpu/layers.cuh"     // defines: Queue, pitch_of, bytes_x
#include "llmc/lora.cuh"           // defines: lora_forward_cuda, lora_backward_input_cuda, lora_backward_weight_cuda
#include "llmc/matmul.cuh"         // defines: operand, matmul_forward_cuda, matmul_backward_input_cuda
#include "llmc/quantise.cuh"       // defines: QuantisedRows, QuantisedTranspose, quantise_rows_cuda
#include "llmc/rmsnorm.cuh"        // defines: rmsnorm_forward_cuda, rmsnorm_forward_quantised_cuda, rmsnorm_backward_cuda

constexpr bool FP8_FAST_FORWARD = true, FP8_FAST_DX = false, FP8_FAST_DW = false;

/* A product of the model: its name in profiles, forward and for its gradients; the kinds of its factors; and whether the layer
 * that writes a factor just before has also quantised it. */
typedef struct {
    const char *name, *dx, *dw;
    QuantisedKind x, dy;
    bool x_made, dy_made;
} LinearSpec;
static const LinearSpec linear_specs[NUM_LINEARS] = {
    {"qkv", "qkv dx", "qkv dw", QUANTISED_NORM, QUANTISED_DQKV, true, false},
    {"o", "o dx", "o dw", QUANTISED_ATT, QUANTISED_DH, false, false},
    {"gate up", "gate up dx", "gate up dw", QUANTISED_NORM, QUANTISED_DGATE_UP, true, true},
    {"down", "down dx", "down dw", QUANTISED_ACT, QUANTISED_DH, true, false},
    {"head", "head dx", "head dw", QUANTISED_NORM, QUANTISED_DLOGITS, false, false}};

/* A matrix that multiplies rows, with the adapters beside it. */
typedef struct {
    LinearKind kind;
    const floatX* w;         // (OC, C)
    Gradient dw;             // (OC, C)
    int C, OC;               // widths of an input row and of an output row
    Fp8Copies fp8;           // of w
    Lora lora;               // the adapters; none if lora.parts is 0
    const floatX* adapters;  // arena that holds them
    Gradient dadapters;      // arena of their gradients
    floatX* t;               // (N, lora_width) rows between A and B: forward writes them for backward
    floatX* dt;              // (N, lora_width) room for their gradient
} Linear;

/* The gain of an RMSNorm. */
typedef struct {
    const floatX* w;  // (C)
    Gradient dw;      // (C) fp32, accumulates
    int C;
    float eps;
} Norm;

// ---------------------------------------------------------------------------------------------------------------------
// 8 bits

/* Return the shared buffer for rows of `width` of a kind of tensor, which leave their largest value in `largest`; and the
 * counts of the kind, or NULL. */
static inline QuantisedRows fp8_rows(const Queue* q, QuantisedKind kind, size_t width, uint32_t* largest) {
    return {q->quantised.data, q->quantised.scale, quantised_pitch(width), largest, quantised_format(kind)};
}
static inline QuantiseCounts* fp8_counts(const Queue* q, QuantisedKind kind) { return q->counts ? q->counts + kind : NULL; }

/* Return the room for a product's input (N, C), and for the gradient of its output (N, OC). */
static inline QuantisedRows fp8_x(const Queue* q, const Linear* l) {
    return fp8_rows(q, linear_specs[l->kind].x, (size_t)l->C, l->fp8.x_largest);
}
static inline QuantisedRows fp8_dy(const Queue* q, const Linear* l) {
    return fp8_rows(q, linear_specs[l->kind].dy, (size_t)l->OC, l->fp8.dout_largest);
}

/* Return the places of the two transposes of a dW: the lines (OC, N) of dy come before the lines (C, N) of x. */
static inline QuantisedTranspose fp8_dy_t(const Queue* q, size_t N) {
    return {q->transposes, q->transpose_scale[0], quantised_pitch(N)};
}
static inline QuantisedTranspose fp8_x_t(const Queue* q, size_t N, int OC) {
    const size_t pitch = quantised_pitch(N);
    return {q->transposes + (size_t)OC * pitch, q->transpose_scale[1], pitch};
}

static inline cudaDataType_t fp8_type(Fp8Format f) { return f == E4M3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2; }
static inline Operand fp8_operand(QuantisedRows r, bool fast) {
    return operand_fp8_rows(r.data, r.scale, r.pitch, fast, fp8_type(r.format));
}
static inline Operand fp8_operand(QuantisedTranspose t, QuantisedKind kind) {
    return operand_fp8_tensor(t.data, t.scale, t.pitch, FP8_FAST_DW, fp8_type(quantised_format(kind)));
}

/* Returns the factor that the head's backward products apply to their results. The rest of dloss, which scales the gradients
 * of the logits, is then a power of two. A row's largest gradient is often the gradient of the target, close to that rest.
 * e5m2 holds a power of two exactly; it would round any other number, in all such rows the same way. */
static inline float fp8_factor_behind(const Linear* head, float dloss) {
    int exponent = 0;
    return head->fp8.rows.data && dloss != 0 ? 2 * frexpf(dloss, &exponent) : 1.0f;
}

/* Quantises x (N, C) into rows `to` of the shared buffer. */
static inline void fp8_quantise(const Queue* q, QuantisedRows to, QuantisedKind kind, const floatX* x, size_t N, int C) {
    Op op(q, "quantise", 0, 3.0 * (double)N * C);
    quantise_rows_cuda(to, x, {N, C, pitch_of(C)}, fp8_counts(q, kind), q->stream);
}

/* Quantises dy (N, OC), unless the layer before has done so, and leaves its transpose for dW. */
static inline void fp8_prepare_dy(const Queue* q, const Linear* l, const floatX* dy, size_t N) {
    const LinearSpec* spec = &linear_specs[l->kind];
    if (!spec->dy_made) { fp8_quantise(q, fp8_dy(q, l), spec->dy, dy, N, l->OC); }
    if (!l->fp8.dout_largest) { return; }
    Op op(q, "transpose", 0, 2.0 * (double)N * l->OC);
    quantise_shifted_cuda(fp8_dy_t(q, N), fp8_dy(q, l), N, l->OC, fp8_counts(q, quantised_transpose(spec->dy)), q->stream);
}

/* Returns a gradient as a product's output. */
static inline Output gradient_output(Gradient g, size_t width) {
    return {g.data, g.fp32 ? data_type<float>() : data_type<floatX>(), width};
}

/* fp8_prepare_dy() of this product has left the transpose of dy. */
static inline void linear_dw_fp8(const Queue* q, const Linear* l, const floatX* x, size_t N, bool add, float factor) {
    const LinearSpec* spec = &linear_specs[l->kind];
    const QuantisedTranspose x_t = fp8_x_t(q, N, l->OC);
    {
        Op op(q, "transpose", 0, 3.0 * (double)N * l->C);
        quantise_transposed_cuda(x_t, x, l->fp8.x_largest, {N, l->C, pitch_of(l->C)},
                                 fp8_counts(q, quantised_transpose(spec->x)), q->stream);
    }
    const Output dw = gradient_output(l->dw, l->C);
    const double grad = (double)l->OC * l->C * matmul_type_bytes(dw.type) * (add ? 2 : 1);
    Op op(q, spec->dw, product_flops(N, l->C, l->OC), (double)N * l->C + (double)N * l->OC + grad, FP8_RATE);
    const Operand dy8 = fp8_operand(fp8_dy_t(q, N), spec->dy), x8 = fp8_operand(x_t, spec->x);
    matmul_backward_weight_transposed_cuda(q->matmul, dw, dy8, x8, {N, l->C, l->OC}, add, q->stream, factor);
}

static inline void linear_dw_x(const Queue* q, const Linear* l, const floatX* dy, const floatX* x, size_t N, bool add) {
    const Output dw = gradient_output(l->dw, l->C);
    const double grad = (double)l->OC * l->C * matmul_type_bytes(dw.type) * (add ? 2 : 1);
    Op op(q, linear_specs[l->kind].dw, product_flops(N, l->C, l->OC), bytes_x((double)N * l->C + (double)N * l->OC) + grad);
    matmul_backward_weight_cuda(q->matmul, dw, operand(dy, pitch_of(l->OC)), operand(x, pitch_of(l->C)), {N, l->C, l->OC}, add,
                                q->stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// adapters

/* Return the operations of the adapters beside one product, and the bytes of x or y, of t and of the adapters. */
static inline double lora_flops(const Lora* l, size_t N) { return 2.0 * N * l->parts * l->r * ((double)l->C + l->OC); }
static inline double lora_bytes(const Lora* l, size_t N) {
    return bytes_x((double)N * (l->C + 2.0 * l->OC) + (double)l->parts * l->r * (2.0 * N + l->C + l->OC));
}

static inline LoraMemoryX lora_memory(const Linear* l) { return {l->adapters, gradient_output(l->dadapters, 0), l->t, l->dt}; }

/* Writes t and adds the adapters' part to y (N, OC). */
static inline void lora_add(const Queue* q, floatX* y, const Linear* l, const floatX* x, size_t N) {
    if (l->lora.parts == 0) { return; }
    Op op(q, "lora", lora_flops(&l->lora, N), lora_bytes(&l->lora, N));
    lora_forward_cuda(q->matmul, y, lora_memory(l), x, &l->lora, N, q->stream);
}

/* Writes dt and adds the adapters' part to dx (N, C). */
static inline void lora_add_dx(const Queue* q, floatX* dx, const Linear* l, const floatX* dy, size_t N) {
    if (l->lora.parts == 0) { return; }
    Op op(q, "lora dx", lora_flops(&l->lora, N), lora_bytes(&l->lora, N));
    lora_backward_input_cuda(q->matmul, dx, lora_memory(l), dy, &l->lora, N, q->stream);
}

/* Overwrites the adapters' gradients, or with `add` adds to them; lora_add_dx() has written dt. */
static inline void lora_dw(const Queue* q, const Linear* l, const floatX* dy, const floatX* x, size_t N, bool add) {
    Op op(q, "lora dw", lora_flops(&l->lora, N), lora_bytes(&l->lora, N));
    lora_backward_weight_cuda(q->matmul, lora_memory(l), dy, x, &l->lora, N, add, q->stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// a matrix

/* Writes y (N, OC) from x (N, C); adds residual (N, OC) unless it is NULL; residual may be y. In 8 bits N is rounded up to a
 * multiple of 16: generation has room for more rows. */
static inline void linear(const Queue* q, floatX* y, const Linear* l, const floatX* x, const floatX* residual, size_t N) {
    const LinearSpec* spec = &linear_specs[l->kind];
    const bool in8 = l->fp8.rows.data;
    if (in8 && !spec->x_made) { fp8_quantise(q, fp8_x(q, l), spec->x, x, N, l->C); }
    if (in8) { N = round_up(N, QUANTISE_WIDTH); }
    const Operand of_x = in8 ? fp8_operand(fp8_x(q, l), FP8_FAST_FORWARD) : operand(x, pitch_of(l->C));
    const Operand of_w = in8 ? fp8_operand(l->fp8.rows, FP8_FAST_FORWARD) : operand(l->w, l->C);
    {
        const double in = (double)N * l->C + (double)l->OC * l->C, out = bytes_x((double)N * l->OC * (residual ? 2 : 1));
        Op op(q, spec->name, product_flops(N, l->C, l->OC), (in8 ? in : bytes_x(in)) + out, in8 ? FP8_RATE : 1);
        matmul_forward_cuda(q->matmul, output(y, pitch_of(l->OC)), of_x, of_w, residual, {N, l->C, l->OC}, q->stream);
    }
    lora_add(q, y, l, x, N);
}

/* Writes dx (N, C) = dy (N, OC) w. In 8 bits this is the forward product of dy with the transpose of w, (C, OC).
 * factor: multiplies an 8-bit product, see fp8_factor_behind() */
static inline void linear_backward_input(const Queue* q, floatX* dx, const Linear* l, const floatX* dy, size_t N,
                                         float factor = 1.0f) {
    const bool in8 = l->fp8.columns.data;
    if (in8) { fp8_prepare_dy(q, l, dy, N); }
    {
        const double in = (double)N * l->OC + (double)l->OC * l->C, out = bytes_x((double)N * l->C);
        Op op(q, linear_specs[l->kind].dx, product_flops(N, l->C, l->OC), (in8 ? in : bytes_x(in)) + out, in8 ? FP8_RATE : 1);
        const Output to = output(dx, pitch_of(l->C));
        if (in8) {
            const Operand dy8 = fp8_operand(fp8_dy(q, l), FP8_FAST_DX), w8 = fp8_operand(l->fp8.columns, FP8_FAST_DX);
            matmul_forward_cuda(q->matmul, to, dy8, w8, NULL, {N, l->OC, l->C}, q->stream, factor);
        } else {
            const Operand of_dy = operand(dy, pitch_of(l->OC)), w = operand(l->w, l->C);
            matmul_backward_input_cuda(q->matmul, to, of_dy, w, {N, l->C, l->OC}, q->stream);
        }
    }
    lora_add_dx(q, dx, l, dy, N);
}

/* Computes the gradients of the matrix and of its adapters from dy (N, OC) and the forward pass's x: overwrites them, or adds
 * to them with `add`. Computes nothing for what is frozen. linear_backward_input() of this matrix came just before. */
static inline void linear_backward_weight(const Queue* q, const Linear* l, const floatX* dy, const floatX* x, size_t N,
                                          bool add, float factor = 1.0f) {
    if (l->dw.data && l->fp8.x_largest) {
        linear_dw_fp8(q, l, x, N, add, factor);
    } else if (l->dw.data) {
        linear_dw_x(q, l, dy, x, N, add);
    }
    if (l->lora.parts > 0) { lora_dw(q, l, dy, x, N, add); }
}

static inline void linear_backward(const Queue* q, floatX* dx, const Linear* l, const floatX* dy, const floatX* x, size_t N,
                                   bool add, float factor = 1.0f) {
    linear_backward_input(q, dx, l, dy, N, factor);
    linear_backward_weight(q, l, dy, x, N, add, factor);
}

// ---------------------------------------------------------------------------------------------------------------------
// a norm

/* Writes y (N, C) and rstd (N), kept for backward, from x (N, C). reader: the product that reads y, which may want it in 8 bits
 * as well; NULL: none does */
static inline void norm(const Queue* q, floatX* y, float* rstd, const Norm* n, const floatX* x, size_t N,
                        const Linear* reader) {
    const RowShape rows = {N, n->C, pitch_of(n->C)};
    if (!reader || !reader->fp8.rows.data) {
        Op op(q, "rmsnorm", 0, bytes_x(2.0 * N * n->C));
        rmsnorm_forward_cuda(y, rstd, x, n->w, rows, n->eps, q->stream);
        return;
    }
    Op op(q, "rmsnorm", 0, 5.0 * N * n->C);
    rmsnorm_forward_quantised_cuda({fp8_x(q, reader), fp8_counts(q, linear_specs[reader->kind].x)}, y, rstd, x, n->w, rows,
                                   n->eps, q->stream);
}

/* Adds to dx (N, C) and to the gain's gradient, from dy (N, C) and the forward pass's x and rstd. */
static inline void norm_backward(const Queue* q, floatX* dx, const Norm* n, const floatX* dy, const floatX* x,
                                 const float* rstd, size_t N) {
    Op op(q, "rmsnorm backward", 0, bytes_x(4.0 * N * n->C));
    rmsnorm_backward_cuda(dx, (float*)n->dw.data, q->scratch, dy, {x, n->w, rstd}, {N, n->C, pitch_of(n->C)}, q->stream);
}

#endif
