/* attention.cuh -- causal grouped-query attention on the GPU, forward, backward and for one new token, without a (T, T)
 * buffer: FlashAttention-2 (Dao 2023, arXiv 2307.08691). The oracle is attention.h.
 *
 *   s[t][u] = q[t] . k[u] / sqrt(HD)  for u <= t        lse[t] = log sum_u exp(s[t][u])
 *   p = exp(s - lse)     out = p v                      D[t] = dout[t] . out[t]
 *   dv = p^T dout        ds = p (dout v^T - D)          dq = ds k / sqrt(HD)      dk = ds^T q / sqrt(HD)
 *
 * Query head h reads key/value head h / (NH / NKV); K and V are never replicated. All sums are in fp32 and in an order that
 * depends on shapes alone. For that the backward pass computes the scores twice: the kernel of dK and dV has a block for each
 * tile of keys, which walks over all query heads of its group; the kernel of dQ has one for each tile of queries. So nothing
 * needs atomics: seven products where five would do, but every run gives the same bits.
 *
 * The kernels, of which the launchers here choose the last that the build, the card and head_dim allow:
 *   attention_plain.cuh    any even HD <= 256 and any floatX, on the ordinary units: the readable ones
 *   attention_mma.cuh      HD 64 and 128 in 16-bit builds: mma.sync tensor-core products, from sm_75 on
 *   attention_sm90.cuh     HD 64 and 128 in 16-bit builds: wgmma products, code for sm_90a
 *   attention_decode.cuh   one new token against a cache
 *   attention_common.cuh   what they share
 *
 * Layouts: qkv rows are [NH q heads | NKV k heads | NKV v heads] x HD with RoPE applied, out rows NH x HD, a row per
 * token, rows `pitch` elements apart. Pointers and pitches are multiples of 16 bytes. T need not be a multiple of any
 * tile: rows past the end are read as zeros and never written.
 *
 * A grid has room for 65,535 sequences: larger batches go in slices. It has room for as many tiles: T may be four million with
 * tensor cores, 524,280 in the worst case (head_dim 256), and longer is refused.
 */
#ifndef LLMC_ATTENTION_CUH
#define LLMC_ATTENTION_CUH

#include "llmc/attention_common.cuh"  // defines: AttentionArgs, attention_stats
#include "llmc/attention_decode.cuh"  // defines: attention_decode_cuda
#include "llmc/attention_mma.cuh"     // defines: attention_mma_forward, attention_mma_backward
#include "llmc/attention_plain.cuh"   // defines: attention_plain_forward, attention_plain_backward
#include "llmc/attention_sm90.cuh"    // defines: attention_wgmma_forward, attention_wgmma_backward, attention_has_wgmma

/* Which kernels a launcher uses; tests and benchmarks name one, the program takes AUTO. */
typedef enum { ATTENTION_AUTO, ATTENTION_PLAIN, ATTENTION_MMA, ATTENTION_WGMMA, NUM_ATTENTION_KERNELS } AttentionKernel;

/* Whether a kernel exists for this head dimension in this build, for the GPU and code at hand. */
static inline bool attention_has_kernel(AttentionKernel kernel, int HD) {
#ifndef PRECISION_FP32
    if (kernel == ATTENTION_WGMMA) { return (HD == 64 || HD == 128) && attention_has_wgmma(); }
    if (kernel == ATTENTION_MMA) { return HD == 64 || HD == 128; }
#endif
    return kernel == ATTENTION_AUTO || (kernel == ATTENTION_PLAIN && HD > 0 && HD <= MAX_HEAD_DIM && HD % 2 == 0);
}

static inline AttentionKernel attention_choose(AttentionKernel kernel, int HD) {
    if (kernel != ATTENTION_AUTO) { return kernel; }
    for (int k = NUM_ATTENTION_KERNELS - 1; k > ATTENTION_PLAIN; k--) {
        if (attention_has_kernel((AttentionKernel)k, HD)) { return (AttentionKernel)k; }
    }
    return ATTENTION_PLAIN;
}

/* Forward of B <= MAX_GRID_YZ sequences. */
static inline void attention_forward_slice(AttentionKernel kernel, floatX* out, float* lse, const floatX* qkv, int B,
                                           const AttentionArgs& s, cudaStream_t stream) {
#ifndef PRECISION_FP32
    if (kernel == ATTENTION_WGMMA) {
        return s.HD == 64 ? attention_wgmma_forward<64>(out, lse, qkv, B, s, stream)
                          : attention_wgmma_forward<128>(out, lse, qkv, B, s, stream);
    }
    if (kernel == ATTENTION_MMA) {
        return s.HD == 64 ? attention_mma_forward<64>(out, lse, qkv, B, s, stream)
                          : attention_mma_forward<128>(out, lse, qkv, B, s, stream);
    }
#endif
    if (s.HD <= 64) { return attention_plain_forward<64>(out, lse, qkv, B, s, stream); }
    if (s.HD <= 128) { return attention_plain_forward<128>(out, lse, qkv, B, s, stream); }
    attention_plain_forward<256>(out, lse, qkv, B, s, stream);
}

/* Backward of B <= MAX_GRID_YZ sequences. */
static inline void attention_backward_slice(AttentionKernel kernel, floatX* dqkv, const float2* stats, const floatX* dout,
                                            const floatX* qkv, int B, const AttentionArgs& s, cudaStream_t stream) {
#ifndef PRECISION_FP32
    if (kernel == ATTENTION_WGMMA) {
        return s.HD == 64 ? attention_wgmma_backward<64>(dqkv, stats, dout, qkv, B, s, stream)
                          : attention_wgmma_backward<128>(dqkv, stats, dout, qkv, B, s, stream);
    }
    if (kernel == ATTENTION_MMA) {
        return s.HD == 64 ? attention_mma_backward<64>(dqkv, stats, dout, qkv, B, s, stream)
                          : attention_mma_backward<128>(dqkv, stats, dout, qkv, B, s, stream);
    }
#endif
    if (s.HD <= 64) { return attention_plain_backward<64>(dqkv, stats, dout, qkv, B, s, stream); }
    if (s.HD <= 128) { return attention_plain_backward<128>(dqkv, stats, dout, qkv, B, s, stream); }
    attention_plain_backward<256>(dqkv, stats, dout, qkv, B, s, stream);
}

/* attention_forward_cuda by the kernel that is named; attention_has_kernel must be true of it. */
static inline void attention_forward_by(AttentionKernel kernel, floatX* out, float* lse, const floatX* qkv, int B,
                                        const AttentionArgs& s, cudaStream_t stream) {
    if (s.T == 0) { return; }
    kernel = attention_choose(kernel, s.HD);
    for (int b = 0; b < B; b += MAX_GRID_YZ) {
        const size_t row = (size_t)b * s.T;
        attention_forward_slice(kernel, out + row * s.out_pitch, lse + row * s.NH, qkv + row * s.qkv_pitch,
                                (int)size_min(B - b, MAX_GRID_YZ), s, stream);
    }
}

/* attention_backward_cuda by the kernel that is named. */
static inline void attention_backward_by(AttentionKernel kernel, floatX* dqkv, void* scratch, const floatX* dout,
                                         const floatX* out, const float* lse, const floatX* qkv, int B, const AttentionArgs& s,
                                         cudaStream_t stream) {
    if (s.T == 0 || B == 0) { return; }
    float2* stats = (float2*)scratch;
    attention_stats(stats, dout, out, lse, B, s, stream);
    kernel = attention_choose(kernel, s.HD);
    for (int b = 0; b < B; b += MAX_GRID_YZ) {
        const size_t row = (size_t)b * s.T;
        attention_backward_slice(kernel, dqkv + row * s.qkv_pitch, stats + (size_t)b * s.NH * s.stat_rows,
                                 dout + row * s.out_pitch, qkv + row * s.qkv_pitch, (int)size_min(B - b, MAX_GRID_YZ), s,
                                 stream);
    }
}

/* out (B, T, NH HD) and lse (B, NH, T) from qkv (B, T, (NH + 2 NKV) HD). Pitches: elements between rows of qkv and out. */
static inline void attention_forward_cuda(floatX* out, float* lse, const floatX* qkv, AttentionShape s, size_t qkv_pitch,
                                          size_t out_pitch, cudaStream_t stream) {
    attention_forward_by(ATTENTION_AUTO, out, lse, qkv, s.B, attention_args(s, qkv_pitch, out_pitch), stream);
}

/* Bytes of scratch for attention_backward_cuda: lse and D of every query, T rounded up. */
static inline size_t attention_backward_scratch_cuda(AttentionShape s) {
    return (size_t)s.B * s.NH * attention_stat_rows(s.T) * sizeof(float2);
}

/* dqkv, laid out like qkv and overwritten, from dout, and out and lse of the forward pass. scratch is aligned to 16 bytes. */
static inline void attention_backward_cuda(floatX* dqkv, void* scratch, const floatX* dout, const floatX* out, const float* lse,
                                           const floatX* qkv, AttentionShape s, size_t qkv_pitch, size_t out_pitch,
                                           cudaStream_t stream) {
    attention_backward_by(ATTENTION_AUTO, dqkv, scratch, dout, out, lse, qkv, s.B, attention_args(s, qkv_pitch, out_pitch),
                          stream);
}

#endif
