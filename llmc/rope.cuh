/* rope.cuh -- rotary position embedding on the GPU, in place on q and k of packed qkv rows. The oracle is rope.h, whose
 * table (fp32 cosines and sines from position 0 on) is copied to the device once.
 *
 * A thread rotates one vector of a head's first half together with its partner in the second half, for ROPE_HEADS heads of one
 * token. So 2 * ROPE_HEADS loads are in flight at once, and the table is read once for all of them.
 * Bytes: q and k are read once and written once. Steps: dev/cuda/rope.cu.
 */
#ifndef LLMC_ROPE_CUH
#define LLMC_ROPE_CUH

#include "llmc/config.h"  // defines: AttentionShape
#include "llmc/rope.h"    // defines: rope_table
#include "llmc/cuda/cuda_common.cuh"

enum { ROPE_HEADS = 4, ROPE_THREADS = 256 };

/* How a launch covers all tokens and heads. */
typedef struct {
    size_t N;  // tokens
    int T, first_pos;
    int heads, HD;      // heads of q and k together
    int lanes, groups;  // vectors in half a head; groups of heads: group g has heads g, g + groups, ...
    int tokens;         // tokens of a block
} RopeGrid;

/* Rotates vectors of a head; b lies half a head after a. The operations are fused by hand, so that all kernels that do this get
 * the same bits. */
template <int W>
__device__ __forceinline__ void rope_vectors(Vec<floatX, W>& a, Vec<floatX, W>& b, const Vec<float, W>& cosine,
                                             const Vec<float, W>& sine) {
#pragma unroll
    for (int j = 0; j < W; j++) {
        const float x = to_float(a.v[j]), y = to_float(b.v[j]);
        a.v[j] = from_float<floatX>(__fmaf_rn(x, cosine.v[j], -(y * sine.v[j])));
        b.v[j] = from_float<floatX>(__fmaf_rn(y, cosine.v[j], x * sine.v[j]));
    }
}

/* W: elements of a vector. With DOCUMENTS, positions count from starts (N), where each token's document starts in its row. */
template <int W, bool DOCUMENTS>
__global__ void __launch_bounds__(ROPE_THREADS)
    rope_kernel(floatX* qkv, const float* cos_sin, float sign, RopeGrid g, size_t pitch, const int32_t* starts) {
    const int per_token = g.lanes * g.groups, half = g.HD / 2;
    const size_t first = (size_t)blockIdx.x * g.tokens;
    const int start = (int)(first % g.T);
    for (int slot = threadIdx.x; slot < per_token * g.tokens; slot += ROPE_THREADS) {
        const int token = slot / per_token, rest = slot % per_token, i = rest % g.lanes * W, group = rest / g.lanes;
        const size_t n = first + token;
        if (n >= g.N) { return; }
        floatX* row = qkv + n * pitch + i;
        Vec<floatX, W> a[ROPE_HEADS], b[ROPE_HEADS];
#pragma unroll
        for (int k = 0; k < ROPE_HEADS; k++) {
            const int h = group + k * g.groups;
            if (h < g.heads) {
                a[k] = load_vec<W>(row + (size_t)h * g.HD);
                b[k] = load_vec<W>(row + (size_t)h * g.HD + half);
            }
        }
        const int back = DOCUMENTS ? starts[n] : 0;
        const float* table = cos_sin + ((size_t)g.first_pos + (start + token) % g.T - back) * g.HD + i;
        const Vec<float, W> cosine = load_vec<W>(table);
        Vec<float, W> sine = load_vec<W>(table + half);
#pragma unroll
        for (int j = 0; j < W; j++) { sine.v[j] *= sign; }
#pragma unroll
        for (int k = 0; k < ROPE_HEADS; k++) {
            const int h = group + k * g.groups;
            if (h < g.heads) {
                rope_vectors(a[k], b[k], cosine, sine);
                store_vec(row + (size_t)h * g.HD, a[k]);
                store_vec(row + (size_t)h * g.HD + half, b[k]);
            }
        }
    }
}

static inline void rope_rotate_cuda(floatX* qkv, const int32_t* starts, const float* cos_sin, float sign, int first_pos,
                                    AttentionShape s, size_t pitch, cudaStream_t stream) {
    const size_t N = (size_t)s.B * s.T;
    if (N == 0) { return; }
    const bool wide = s.HD / 2 % VECTOR<floatX> == 0;
    const int heads = s.NH + s.NKV, lanes = wide ? s.HD / 2 / VECTOR<floatX> : s.HD / 2;
    const int groups = (int)ceil_div((size_t)heads, ROPE_HEADS);
    const int tokens = (int)size_max(1, ROPE_THREADS / (size_t)(lanes * groups));
    const RopeGrid g = {N, s.T, first_pos, heads, s.HD, lanes, groups, tokens};
    const unsigned blocks = (unsigned)ceil_div(N, (size_t)tokens);
    auto* plain = wide ? rope_kernel<VECTOR<floatX>, false> : rope_kernel<1, false>;
    auto* documents = wide ? rope_kernel<VECTOR<floatX>, true> : rope_kernel<1, true>;
    (starts ? documents : plain)<<<blocks, ROPE_THREADS, 0, stream>>>(qkv, cos_sin, sign, g, pitch, starts);
    CUDA_CHECK_LAUNCH("rope_kernel");
}

/* Rotates qkv (B, T, (NH + 2 NKV) HD), pitch, in place. Row t of each sequence is at position first_pos + t, minus starts
 * (B, T) unless starts is NULL. cos_sin: (positions, HD) */
static inline void rope_forward_cuda(floatX* qkv, const int32_t* starts, const float* cos_sin, int first_pos, AttentionShape s,
                                     size_t pitch, cudaStream_t stream) {
    rope_rotate_cuda(qkv, starts, cos_sin, 1.0f, first_pos, s, pitch, stream);
}

/* Turns dqkv in place from the gradient after the rotation into the gradient before it. */
static inline void rope_backward_cuda(floatX* dqkv, const int32_t* starts, const float* cos_sin, int first_pos,
                                      AttentionShape s, size_t pitch, cudaStream_t stream) {
    rope_rotate_cuda(dqkv, starts, cos_sin, -1.0f, first_pos, s, pitch, stream);
}

/* Writes the table (positions, HD) of rope.h to the device. */
static inline void rope_upload(float* device, int positions, const ModelConfig* c, cudaStream_t stream) {
    const size_t bytes = (size_t)positions * c->head_dim * sizeof(float);
    float* host = (float*)xmalloc(bytes);
    rope_table(host, positions, c);
    copy_in(device, host, bytes, stream);
    free(host);
}

#endif
