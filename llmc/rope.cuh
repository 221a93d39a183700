/* rope.cuh -- rotary position embedding on the GPU, in place on q and k of packed qkv rows. The oracle is rope.h, whose
 * table (fp32 cosines and sines from position 0 on) is copied to the device once.
 *
 * A thread rotates one vector of a head's first half together with its partner in the second half, for
 * ROPE_HEADS heads of one token: 2 * ROPE_HEADS loads under way at once, and the table read once for all of them.
 * Bytes: q and k once in, once out.
 */
#ifndef LLMC_ROPE_CUH
#define LLMC_ROPE_CUH

#include "llmc/gpu/cuda_common.cuh"

enum { ROPE_HEADS = 4, ROPE_THREADS = 256 };

/* lanes: vectors in half a head; groups: groups of heads, group g has heads g, g + groups, ...; a block has `tokens` tokens. */
template <int W>
__global__ void __launch_bounds__(ROPE_THREADS)
    rope_kernel(floatX* qkv, const float* cos_sin, float sign, size_t N, int T, int first_pos, int heads, int HD, int lanes,
                int groups, int tokens, size_t pitch) {
    const int per_token = lanes * groups, half = HD / 2;
    const size_t first = (size_t)blockIdx.x * tokens;
    const int start = (int)(first % T);
    for (int slot = threadIdx.x; slot < per_token * tokens; slot += ROPE_THREADS) {
        const int token = slot / per_token, rest = slot % per_token, i = rest % lanes * W, group = rest / lanes;
        const size_t n = first + token;
        if (n >= N) { return; }
        floatX* row = qkv + n * pitch + i;
        Vec<floatX, W> a[ROPE_HEADS], b[ROPE_HEADS];
#pragma unroll
        for (int k = 0; k < ROPE_HEADS; k++) {
            const int h = group + k * groups;
            if (h < heads) {
                a[k] = load_vec<W>(row + (size_t)h * HD);
                b[k] = load_vec<W>(row + (size_t)h * HD + half);
            }
        }
        const float* table = cos_sin + ((size_t)first_pos + (start + token) % T) * HD + i;
        const Vec<float, W> cosine = load_vec<W>(table), sine = load_vec<W>(table + half);
#pragma unroll
        for (int k = 0; k < ROPE_HEADS; k++) {
            const int h = group + k * groups;
            if (h < heads) {
#pragma unroll
                for (int j = 0; j < W; j++) {
                    const float x = to_float(a[k].v[j]), y = to_float(b[k].v[j]), s = sign * sine.v[j];
                    a[k].v[j] = from_float<floatX>(x * cosine.v[j] - y * s);
                    b[k].v[j] = from_float<floatX>(y * cosine.v[j] + x * s);
                }
                store_vec(row + (size_t)h * HD, a[k]);
                store_vec(row + (size_t)h * HD + half, b[k]);
            }
        }
    }
}

static inline void rope_rotate_cuda(floatX* qkv, const float* cos_sin, float sign, size_t B, int T, int first_pos, int NH,
                                    int NKV, int HD, size_t pitch, cudaStream_t stream) {
    const size_t N = B * (size_t)T;
    if (N == 0) { return; }
    const bool wide = HD / 2 % VECTOR<floatX> == 0;
    const int lanes = wide ? HD / 2 / VECTOR<floatX> : HD / 2, heads = NH + NKV;
    const int groups = (int)ceil_div((size_t)heads, ROPE_HEADS);
    const int tokens = (int)size_max(1, ROPE_THREADS / (size_t)(lanes * groups));
    const unsigned grid = (unsigned)ceil_div(N, (size_t)tokens);
    if (wide) {
        rope_kernel<VECTOR<floatX>>
            <<<grid, ROPE_THREADS, 0, stream>>>(qkv, cos_sin, sign, N, T, first_pos, heads, HD, lanes, groups, tokens, pitch);
    } else {
        rope_kernel<1>
            <<<grid, ROPE_THREADS, 0, stream>>>(qkv, cos_sin, sign, N, T, first_pos, heads, HD, lanes, groups, tokens, pitch);
    }
    CUDA_CHECK_LAUNCH("rope_kernel");
}

/* qkv: (B, T, (NH + 2 NKV) HD), pitch, rotated in place; row t of each sequence stands at position first_pos + t.
 * cos_sin: (positions, HD) */
static inline void rope_forward_cuda(floatX* qkv, const float* cos_sin, size_t B, int T, int first_pos, int NH, int NKV, int HD,
                                     size_t pitch, cudaStream_t stream) {
    rope_rotate_cuda(qkv, cos_sin, 1.0f, B, T, first_pos, NH, NKV, HD, pitch, stream);
}

/* dqkv in place: gradient after the rotation -> gradient before it. */
static inline void rope_backward_cuda(floatX* dqkv, const float* cos_sin, size_t B, int T, int first_pos, int NH, int NKV,
                                      int HD, size_t pitch, cudaStream_t stream) {
    rope_rotate_cuda(dqkv, cos_sin, -1.0f, B, T, first_pos, NH, NKV, HD, pitch, stream);
}

#endif
