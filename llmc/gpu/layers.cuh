/* layers.cuh -- the layers as train_llama3.cu calls them. Each takes a queue and the arguments of the C layer. Each call adds
 * to a row of the profile. Rows of activations have the pitch of their width (pitch_of). Layers that hold weights are in
 * linear.cuh.
 */
#ifndef LLMC_LAYERS_CUH
#define LLMC_LAYERS_CUH

#include "llmc/attention.cuh"         // defines: attention_forward_cuda, attention_backward_cuda
#include "llmc/attention_decode.cuh"  // defines: attention_decode_cuda
#include "llmc/config.h"              // defines: AttentionShape
#include "llmc/crossentropy.cuh"      // defines: crossentropy_forward_cuda, crossentropy_fused_cuda
#include "llmc/embedding.cuh"         // defines: embedding_forward_cuda, embedding_backward_cuda
#include "llmc/cuda/cuda_common.cuh"  // defines: floatX, row_pitch
#include "llmc/gpu/gradients.cuh"     // defines: Gradient
#include "llmc/gpu/profile.cuh"       // defines: Profiler, Op
#include "llmc/matmul.cuh"            // defines: MatmulContext
#include "llmc/quantise.cuh"          // defines: QuantisedRows
#include "llmc/rope.cuh"              // defines: rope_forward_cuda
#include "llmc/swiglu.cuh"            // defines: swiglu_forward_cuda, swiglu_backward_cuda

/* The stream and the buffers that a model's layers share. */
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

struct Sequence;

/* The rows of a batch that this rank computes. */
typedef struct {
    size_t N;                // B T of them
    AttentionShape shape;    // with shared rows, T is the length of the part that this rank holds
    const int32_t* starts;   // (B, T parts) where each token's document starts in its row (attention.h); NULL: each row is one
    const float* rope;       // (T parts, HD) the table of rope.h, from position 0 on
    int first_pos;           // position of the first token of each row
    const Sequence* shared;  // with the ranks that hold the other parts (sequence.cuh); NULL: this rank has whole rows
    floatX* cache;           // (cache_len, 2 NKV HD) of the block: keys and values of all positions so far; NULL: a batch
} Rows;

/* Returns the elements from one row of activations to the next. */
static inline size_t pitch_of(size_t width) { return row_pitch<floatX>(width); }

static inline size_t qkv_width(AttentionShape s) { return (size_t)(s.NH + 2 * s.NKV) * s.HD; }

/* Returns the bytes of `elements` floatX. */
static inline double bytes_x(double elements) { return elements * sizeof(floatX); }

/* Returns the operations of a product. */
static inline double product_flops(size_t N, size_t C, size_t OC) { return 2.0 * (double)N * (double)C * (double)OC; }

static inline void embedding(const Queue* q, floatX* out, const floatX* w, const int32_t* tokens, size_t N, int C) {
    Op op(q, "embedding", 0, bytes_x(2.0 * N * C));
    embedding_forward_cuda(out, w, tokens, {N, C, pitch_of(C)}, q->stream);
}

static inline void embedding_backward(const Queue* q, Gradient dw, const floatX* dout, const int32_t* tokens, size_t N, int C,
                                      int V) {
    if (!dw.data) { return; }
    Op op(q, "embedding backward", 0, bytes_x(3.0 * N * C));
    const RowShape rows = {N, C, pitch_of(C)};
    if (dw.fp32) {
        embedding_backward_cuda((float*)dw.data, q->scratch, dout, tokens, V, rows, q->stream);
    } else {
        embedding_backward_cuda((floatX*)dw.data, q->scratch, dout, tokens, V, rows, q->stream);
    }
}

static inline void rope(const Queue* q, floatX* qkv, const Rows* r) {
    const AttentionShape s = r->shape;
    Op op(q, "rope", 0, bytes_x(2.0 * s.B * s.T * (s.NH + s.NKV) * s.HD));
    rope_forward_cuda(qkv, r->starts, r->rope, r->first_pos, s, pitch_of(qkv_width(s)), q->stream);
}

/* The profile of attention counts no operations with documents: how many they are depends on the data. */
static inline void attention(const Queue* q, floatX* out, float* lse, const floatX* qkv, const Rows* r) {
    const AttentionShape s = r->shape;
    const size_t N = (size_t)s.B * s.T, Q = (size_t)s.NH * s.HD, QKV = qkv_width(s);
    Op op(q, "attention", r->starts ? 0 : 2.0 * N * s.T * Q, bytes_x((double)N * (QKV + Q)));
    attention_forward_cuda(out, lse, qkv, s.B, attention_args(s, pitch_of(QKV), pitch_of(Q), r->starts), q->stream);
}

/* Adds the keys and values of new rows to the cache. Each row attends to all positions up to its own. */
static inline void attention_cached(const Queue* q, floatX* out, const floatX* qkv, const Rows* r) {
    const AttentionShape s = r->shape;
    const size_t Q = (size_t)s.NH * s.HD, QKV = qkv_width(s), KV2 = QKV - Q, pitch = pitch_of(QKV);
    CUDA_CHECK(cudaMemcpy2DAsync(r->cache + (size_t)r->first_pos * KV2, KV2 * sizeof(floatX), qkv + Q, pitch * sizeof(floatX),
                                 KV2 * sizeof(floatX), r->N, cudaMemcpyDeviceToDevice, q->stream));
    for (int i = 0; i < (int)r->N; i++) {
        attention_decode_cuda(out + i * pitch_of(Q), qkv + i * pitch, r->cache, r->first_pos + i + 1, s, q->stream);
    }
}

/* dqkv is the gradient before the rotation by RoPE, at positions from 0 on. */
static inline void attention_backward(const Queue* q, floatX* dqkv, const floatX* dout, const floatX* out, const float* lse,
                                      const floatX* qkv, const Rows* r) {
    const AttentionShape s = r->shape;
    const size_t N = (size_t)s.B * s.T, Q = (size_t)s.NH * s.HD, QKV = qkv_width(s);
    Op op(q, "attention backward", r->starts ? 0 : 5.0 * N * s.T * Q, bytes_x(2.0 * N * (QKV + Q)));
    const AttentionArgs args = attention_args(s, pitch_of(QKV), pitch_of(Q), r->starts, r->rope);
    attention_backward_cuda(dqkv, q->scratch, dout, {qkv, out, lse}, s.B, args, q->stream);
}

static inline SwigluShape swiglu_shape(size_t N, int F) { return {N, F, pitch_of(2 * (size_t)F), pitch_of(F)}; }

static inline void swiglu(const Queue* q, floatX* out, const floatX* gate_up, size_t N, int F) {
    Op op(q, "swiglu", 0, bytes_x(3.0 * N * F));
    swiglu_forward_cuda(out, gate_up, swiglu_shape(N, F), q->stream);
}

/* dgate_up may be gate_up. Computes out again unless it is NULL. */
static inline void swiglu_backward(const Queue* q, floatX* dgate_up, floatX* out, const floatX* dout, const floatX* gate_up,
                                   size_t N, int F) {
    Op op(q, "swiglu backward", 0, bytes_x((out ? 6.0 : 5.0) * N * F));
    swiglu_backward_cuda(dgate_up, out, dout, gate_up, swiglu_shape(N, F), q->stream);
}

/* Writes the losses of `rows` tokens; unless dloss is 0, also overwrites the logits with their gradients. */
static inline void crossentropy(const Queue* q, float* losses, floatX* logits, const int32_t* targets, float dloss,
                                const float* loss_scale, size_t rows, int V) {
    Op op(q, "cross-entropy", 0, bytes_x((dloss == 0.0f ? 1.0 : 2.0) * rows * V));
    if (dloss == 0.0f) {
        crossentropy_forward_cuda(losses, logits, targets, {rows, V, pitch_of(V)}, q->stream);
    } else {
        crossentropy_fused_cuda(losses, logits, targets, dloss, loss_scale, {rows, V, pitch_of(V)}, q->stream);
    }
}

#endif
