/* layers.cuh -- the layers as train_llama3.cu calls them: each takes a queue and the arguments of the C layer, and each call
 * adds to a row of the profile. Rows of activations have the pitch of their width (pitch_of).
 */
#ifndef LLMC_LAYERS_CUH
#define LLMC_LAYERS_CUH

#include "llmc/attention.cuh"        // defines: attention_forward_cuda, attention_backward_cuda
#include "llmc/config.h"             // defines: AttentionShape
#include "llmc/crossentropy.cuh"     // defines: crossentropy_forward_cuda, crossentropy_fused_cuda
#include "llmc/embedding.cuh"        // defines: embedding_forward_cuda, embedding_backward_cuda
#include "llmc/gpu/cuda_common.cuh"  // defines: floatX, row_pitch
#include "llmc/gpu/profile.cuh"      // defines: Profiler, Op
#include "llmc/lora.cuh"             // defines: lora_forward_cuda, lora_backward_input_cuda, lora_backward_weight_cuda
#include "llmc/matmul.cuh"           // defines: matmul_forward_cuda, matmul_backward_input_cuda, matmul_backward_weight_cuda
#include "llmc/matmul_sm90.cuh"      // defines: matmul_swiglu_cuda, matmul_swiglu_backward_cuda, matmul_rope_cuda
#include "llmc/quantise.cuh"         // defines: QuantisedRows
#include "llmc/rmsnorm.cuh"          // defines: rmsnorm_forward_cuda, rmsnorm_backward_cuda
#include "llmc/rope.cuh"             // defines: rope_forward_cuda
#include "llmc/swiglu.cuh"           // defines: swiglu_forward_cuda, swiglu_backward_cuda

/* What a model's layers share. */
typedef struct {
    cudaStream_t stream;
    MatmulContext* matmul;
    void* scratch;              // for the layers that need it
    Profiler* profiler;         // NULL: off
    QuantisedRows quantised;    // room for one factor of a product in fp8 (gpu/fp8.cuh)
    uint8_t* transposes;        // room for both factors of a dW in fp8; NULL: none
    float* transpose_scale[2];  // of dout's and of x's
    QuantiseCounts* counts;     // (NUM_QUANTISED) on the device, of what is quantised; or NULL
} Queue;

/* The gradient of a tensor, in fp32 or floatX. */
typedef struct {
    void* data;  // NULL: the tensor is frozen, nothing is computed
    bool fp32;
} Gradient;

/* Returns the elements from one row of activations to the next. */
static inline size_t pitch_of(size_t width) { return row_pitch<floatX>(width); }

static inline size_t qkv_width(AttentionShape s) { return (size_t)(s.NH + 2 * s.NKV) * s.HD; }

/* Return, as doubles for the profile, the bytes of `elements` floatX, and the operations of a product. */
static inline double bytes_x(double elements) { return elements * sizeof(floatX); }
static inline double linear_flops(size_t N, size_t C, size_t OC) { return 2.0 * (double)N * (double)C * (double)OC; }

static inline void embedding(const Queue* q, floatX* out, const floatX* w, const int32_t* tokens, size_t N, int C) {
    Op op(q->profiler, q->stream, "embedding", 0, bytes_x(2.0 * N * C));
    embedding_forward_cuda(out, w, tokens, N, C, pitch_of(C), q->stream);
}

static inline void embedding_backward(const Queue* q, Gradient dw, const floatX* dout, const int32_t* tokens, size_t N, int C,
                                      int V) {
    if (!dw.data) { return; }
    Op op(q->profiler, q->stream, "embedding backward", 0, bytes_x(3.0 * N * C));
    if (dw.fp32) {
        embedding_backward_cuda((float*)dw.data, q->scratch, dout, tokens, N, C, V, pitch_of(C), q->stream);
    } else {
        embedding_backward_cuda((floatX*)dw.data, q->scratch, dout, tokens, N, C, V, pitch_of(C), q->stream);
    }
}

static inline void rmsnorm(const Queue* q, floatX* out, float* rstd, const floatX* x, const floatX* w, size_t N, int C,
                           float eps) {
    Op op(q->profiler, q->stream, "rmsnorm", 0, bytes_x(2.0 * N * C));
    rmsnorm_forward_cuda(out, rstd, x, w, {N, C, pitch_of(C)}, eps, q->stream);
}

/* Adds to dx and dw. */
static inline void rmsnorm_backward(const Queue* q, floatX* dx, Gradient dw, const floatX* dout, const floatX* x,
                                    const floatX* w, const float* rstd, size_t N, int C) {
    Op op(q->profiler, q->stream, "rmsnorm backward", 0, bytes_x(4.0 * N * C));
    rmsnorm_backward_cuda(dx, (float*)dw.data, q->scratch, dout, x, w, rstd, {N, C, pitch_of(C)}, q->stream);
}

/* starts here and below: where each token's document starts in its row (attention.h); NULL: a row is one */
static inline void rope(const Queue* q, floatX* qkv, const int32_t* starts, const float* table, int first_pos,
                        AttentionShape s) {
    Op op(q->profiler, q->stream, "rope", 0, bytes_x(2.0 * s.B * s.T * (s.NH + s.NKV) * s.HD));
    rope_forward_cuda(qkv, starts, table, first_pos, s, pitch_of(qkv_width(s)), q->stream);
}

/* The profile of attention counts no operations with documents: how many they are depends on the data. */
static inline void attention(const Queue* q, floatX* out, float* lse, const floatX* qkv, const int32_t* starts,
                             AttentionShape s) {
    const size_t N = (size_t)s.B * s.T, Q = (size_t)s.NH * s.HD, QKV = qkv_width(s);
    Op op(q->profiler, q->stream, "attention", starts ? 0 : 2.0 * N * s.T * Q, bytes_x((double)N * (QKV + Q)));
    attention_forward_cuda(out, lse, qkv, starts, s, pitch_of(QKV), pitch_of(Q), q->stream);
}

/* dqkv is the gradient before the rotation by `table`, at positions from 0 on. */
static inline void attention_backward(const Queue* q, floatX* dqkv, const floatX* dout, const floatX* out, const float* lse,
                                      const floatX* qkv, const int32_t* starts, const float* table, AttentionShape s) {
    const size_t N = (size_t)s.B * s.T, Q = (size_t)s.NH * s.HD, QKV = qkv_width(s);
    Op op(q->profiler, q->stream, "attention backward", starts ? 0 : 5.0 * N * s.T * Q, bytes_x(2.0 * N * (QKV + Q)));
    attention_backward_cuda(dqkv, q->scratch, dout, out, lse, qkv, starts, table, s, pitch_of(QKV), pitch_of(Q), q->stream);
}

static inline void swiglu(const Queue* q, floatX* out, const floatX* gate_up, size_t N, int F) {
    Op op(q->profiler, q->stream, "swiglu", 0, bytes_x(3.0 * N * F));
    swiglu_forward_cuda(out, gate_up, N, F, pitch_of(2 * (size_t)F), pitch_of(F), q->stream);
}

/* dgate_up may be gate_up. Computes out again unless it is NULL. */
static inline void swiglu_backward(const Queue* q, floatX* dgate_up, floatX* out, const floatX* dout, const floatX* gate_up,
                                   size_t N, int F) {
    Op op(q->profiler, q->stream, "swiglu backward", 0, bytes_x((out ? 6.0 : 5.0) * N * F));
    swiglu_backward_cuda(dgate_up, out, dout, gate_up, N, F, pitch_of(2 * (size_t)F), pitch_of(F), q->stream);
}

/* Writes out (N, OC) = x (N, C) w^T [+ residual]. */
static inline void linear(const Queue* q, const char* name, floatX* out, const floatX* x, const floatX* w,
                          const floatX* residual, size_t N, int C, int OC) {
    const double moved = (double)N * C + (double)OC * C + (double)N * OC * (residual ? 2 : 1);
    Op op(q->profiler, q->stream, name, linear_flops(N, C, OC), bytes_x(moved));
    matmul_forward_cuda(q->matmul, out, operand(x, pitch_of(C)), operand(w, C), residual, N, C, OC, pitch_of(OC), q->stream);
}

/* Writes dx (N, C) = dout (N, OC) w. */
static inline void linear_backward_input(const Queue* q, const char* name, floatX* dx, const floatX* dout, const floatX* w,
                                         size_t N, int C, int OC) {
    Op op(q->profiler, q->stream, name, linear_flops(N, C, OC), bytes_x((double)N * C + (double)OC * C + (double)N * OC));
    matmul_backward_input_cuda(q->matmul, dx, operand(dout, pitch_of(OC)), operand(w, C), N, C, OC, pitch_of(C), q->stream);
}

/* Writes dw (OC, C) = dout^T x, or with `add` adds it to dw. */
static inline void linear_backward_weight(const Queue* q, const char* name, Gradient dw, const floatX* dout, const floatX* x,
                                          size_t N, int C, int OC, bool add) {
    if (!dw.data) { return; }
    const double grad = (double)OC * C * (dw.fp32 ? sizeof(float) : sizeof(floatX)) * (add ? 2 : 1);
    Op op(q->profiler, q->stream, name, linear_flops(N, C, OC), bytes_x((double)N * C + (double)N * OC) + grad);
    const Operand d = operand(dout, pitch_of(OC)), in = operand(x, pitch_of(C));
    if (dw.fp32) {
        matmul_backward_weight_cuda(q->matmul, (float*)dw.data, d, in, N, C, OC, add, q->stream);
    } else {
        matmul_backward_weight_cuda(q->matmul, (floatX*)dw.data, d, in, N, C, OC, add, q->stream);
    }
}

/* Does linear(), then swiglu(): writes gate_up (N, 2F) = x (N, C) w^T and, unless it is NULL, act (N, F). The sizes are such
 * that matmul_takes_swiglu(). */
static inline void linear_swiglu(const Queue* q, floatX* act, floatX* gate_up, const floatX* x, const floatX* w, size_t N,
                                 int C, int F) {
    const double moved = (double)N * C + 2.0 * F * C + (act ? 3.0 : 2.0) * N * F;
    Op op(q->profiler, q->stream, "gate up swiglu", linear_flops(N, C, 2 * (size_t)F), bytes_x(moved));
    matmul_swiglu_cuda(gate_up, act, x, w, N, C, F, q->stream);
}

/* Does linear_backward_input() of dout (N, C) by w (C, F), then swiglu_backward() in place of gate_up (N, 2F). */
static inline void linear_backward_input_swiglu(const Queue* q, floatX* gate_up, floatX* act, const floatX* dout,
                                                const floatX* w, size_t N, int F, int C) {
    const double moved = (double)N * C + (double)F * C + (act ? 5.0 : 4.0) * N * F;
    Op op(q->profiler, q->stream, "down dx swiglu", linear_flops(N, C, F), bytes_x(moved));
    matmul_swiglu_backward_cuda(gate_up, act, dout, w, gate_up, N, F, C, q->stream);
}

/* Does linear() of x (B T, C) by w (QKV, C), then rope() from position 0 on. The sizes are such that matmul_takes_rope(). */
static inline void linear_rope(const Queue* q, floatX* qkv, const floatX* x, const floatX* w, const int32_t* starts,
                               const float* table, AttentionShape s, int C) {
    const size_t N = (size_t)s.B * s.T, QKV = qkv_width(s);
    const double moved = (double)N * C + (double)QKV * C + (double)N * QKV;
    Op op(q->profiler, q->stream, "qkv rope", linear_flops(N, C, QKV), bytes_x(moved));
    matmul_rope_cuda(qkv, x, w, starts, table, s, C, q->stream);
}

/* Return the operations of the adapters beside one product, and the bytes of x or y, of t and of the adapters. */
static inline double lora_flops(const Lora* l, size_t N) { return 2.0 * N * l->parts * l->r * ((double)l->C + l->OC); }
static inline double lora_bytes(const Lora* l, size_t N) {
    return bytes_x((double)N * (l->C + 2.0 * l->OC) + (double)l->parts * l->r * (2.0 * N + l->C + l->OC));
}

/* Writes t and adds the adapters' part to y (N, OC) from x (N, C); nothing if there are none. w: arena of the adapters. */
static inline void lora(const Queue* q, floatX* y, floatX* t, const floatX* x, const floatX* w, const Lora* l, size_t N) {
    if (l->parts == 0) { return; }
    Op op(q->profiler, q->stream, "lora", lora_flops(l, N), lora_bytes(l, N));
    lora_forward_cuda(q->matmul, y, t, x, w, l, N, q->stream);
}

/* Writes dt and adds the adapters' part to dx (N, C) from dy (N, OC). */
static inline void lora_backward_input(const Queue* q, floatX* dx, floatX* dt, const floatX* dy, const floatX* w, const Lora* l,
                                       size_t N) {
    if (l->parts == 0) { return; }
    Op op(q->profiler, q->stream, "lora dx", lora_flops(l, N), lora_bytes(l, N));
    lora_backward_input_cuda(q->matmul, dx, dt, dy, w, l, N, q->stream);
}

/* Overwrites the adapters' gradients in the arena dw, or with `add` adds to them. dt: of lora_backward_input(). */
static inline void lora_backward_weight(const Queue* q, Gradient dw, const floatX* dt, const floatX* dy, const floatX* x,
                                        const floatX* t, const Lora* l, size_t N, bool add) {
    if (l->parts == 0) { return; }
    Op op(q->profiler, q->stream, "lora dw", lora_flops(l, N), lora_bytes(l, N));
    if (dw.fp32) {
        lora_backward_weight_cuda(q->matmul, (float*)dw.data, dt, dy, x, t, l, N, add, q->stream);
    } else {
        lora_backward_weight_cuda(q->matmul, (floatX*)dw.data, dt, dy, x, t, l, N, add, q->stream);
    }
}

/* Writes the losses of `rows` tokens; unless dloss is 0, also overwrites the logits with their gradients. */
static inline void crossentropy(const Queue* q, float* losses, floatX* logits, const int32_t* targets, float dloss,
                                const float* loss_scale, size_t rows, int V) {
    Op op(q->profiler, q->stream, "cross-entropy", 0, bytes_x((dloss == 0.0f ? 1.0 : 2.0) * rows * V));
    if (dloss == 0.0f) {
        crossentropy_forward_cuda(losses, logits, targets, rows, V, pitch_of(V), q->stream);
    } else {
        crossentropy_fused_cuda(losses, logits, targets, dloss, loss_scale, rows, V, pitch_of(V), q->stream);
    }
}

#endif
