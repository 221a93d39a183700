/* attention_decode.cuh -- attention of one new token against a cache of keys and values. Formulas: attention.cuh. The kernel
 * reads the cache once and does two operations an element, so memory bandwidth limits it. One sequence; NH blocks.
 */
#ifndef LLMC_ATTENTION_DECODE_CUH
#define LLMC_ATTENTION_DECODE_CUH

#include "llmc/attention_common.cuh"

/* A block computes a query head. A warp takes every WARPS-th group of four positions, so that four sums over lanes overlap.
 * Lane i holds columns 2 i + 64 c and 2 i + 64 c + 1. The warps' partial softmaxes are joined in the order of warps. */
constexpr int DECODE_WARPS = 16, DECODE_GROUP = 4;

__global__ void __launch_bounds__(DECODE_WARPS * 32)
    attention_decode_kernel(floatX* out, const floatX* q, const floatX* kv_cache, int positions, AttentionArgs s) {
    constexpr int PAIRS = MAX_HEAD_DIM / 64;
    __shared__ float maxima[DECODE_WARPS], sums[DECODE_WARPS], parts[DECODE_WARPS][MAX_HEAD_DIM];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, h = blockIdx.x, kv_head = h / (s.NH / s.NKV);
    const size_t pitch = s.qkv_pitch;
    const floatX *k = kv_cache + (size_t)kv_head * s.HD, *v = k + (size_t)s.NKV * s.HD;
    float2 query[PAIRS], acc[PAIRS];
#pragma unroll
    for (int c = 0; c < PAIRS; c++) {
        const int d = 2 * lane + 64 * c;
        query[c] = d < s.HD ? load2(q + (size_t)h * s.HD + d) : make_float2(0, 0);
        acc[c] = make_float2(0, 0);
    }
    float m = ATTENTION_MASKED, l = 0;
    for (int p0 = warp * DECODE_GROUP; p0 < positions; p0 += DECODE_WARPS * DECODE_GROUP) {
        float score[DECODE_GROUP];
#pragma unroll
        for (int i = 0; i < DECODE_GROUP; i++) {
            score[i] = 0;
#pragma unroll
            for (int c = 0; c < PAIRS; c++) {
                const int d = 2 * lane + 64 * c;
                if (d < s.HD && p0 + i < positions) {
                    const float2 key = load2(k + (size_t)(p0 + i) * pitch + d);
                    score[i] += query[c].x * key.x + query[c].y * key.y;
                }
            }
        }
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) {
#pragma unroll
            for (int i = 0; i < DECODE_GROUP; i++) { score[i] += __shfl_xor_sync(0xffffffffu, score[i], mask); }
        }
        float max = m;
#pragma unroll
        for (int i = 0; i < DECODE_GROUP; i++) {
            score[i] = p0 + i < positions ? score[i] * s.scale_log2 : ATTENTION_MASKED;
            max = fmaxf(max, score[i]);
        }
        const float rescale = exp2f(m - max);  // max is finite: position p0 exists
        m = max;
        l *= rescale;
#pragma unroll
        for (int c = 0; c < PAIRS; c++) {
            acc[c].x *= rescale;
            acc[c].y *= rescale;
        }
#pragma unroll
        for (int i = 0; i < DECODE_GROUP; i++) {
            const float p = exp2f(score[i] - m);
            l += p;
#pragma unroll
            for (int c = 0; c < PAIRS; c++) {
                const int d = 2 * lane + 64 * c;
                if (d < s.HD && p0 + i < positions) {
                    const float2 value = load2(v + (size_t)(p0 + i) * pitch + d);
                    acc[c].x += p * value.x;
                    acc[c].y += p * value.y;
                }
            }
        }
    }
    if (lane == 0) {
        maxima[warp] = m;
        sums[warp] = l;
    }
#pragma unroll
    for (int c = 0; c < PAIRS; c++) {
        parts[warp][2 * lane + 64 * c] = acc[c].x;
        parts[warp][2 * lane + 64 * c + 1] = acc[c].y;
    }
    __syncthreads();
    const int d = 2 * threadIdx.x;
    if (d >= s.HD) { return; }
    float best = maxima[0], total = 0, x = 0, y = 0;  // warp 0 has position 0
    for (int w = 1; w < DECODE_WARPS; w++) { best = fmaxf(best, maxima[w]); }
    for (int w = 0; w < DECODE_WARPS; w++) {
        const float f = exp2f(maxima[w] - best);
        total += f * sums[w];
        x += f * parts[w][d];
        y += f * parts[w][d + 1];
    }
    store2(out + (size_t)h * s.HD + d, x / total, y / total);
}

/* Writes out (NH HD) for one query q (NH HD) that sees all `positions` >= 1 of kv_cache (positions, 2 NKV HD: k, then v). B and
 * T of the shape are unused. */
static inline void attention_decode_cuda(floatX* out, const floatX* q, const floatX* kv_cache, int positions, AttentionShape s,
                                         cudaStream_t stream) {
    const AttentionArgs args = attention_args(s, (size_t)2 * s.NKV * s.HD, (size_t)s.NH * s.HD);
    attention_decode_kernel<<<s.NH, DECODE_WARPS * 32, 0, stream>>>(out, q, kv_cache, positions, args);
    CUDA_CHECK_LAUNCH("attention_decode_kernel");
}

#endif
