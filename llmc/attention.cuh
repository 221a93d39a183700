/* attention.cuh -- causal grouped-query attention on the GPU: forward, backward, and decoding of one new token, without a
 * (T, T) buffer. The method is FlashAttention-2 (Dao 2023, arXiv 2307.08691). The oracle is attention.h.
 *
 *   s[t][u] = q[t] . k[u] / sqrt(HD)  for start[t] <= u <= t        lse[t] = log sum_u exp(s[t][u])
 *   p = exp(s - lse)     out = p v                      D[t] = dout[t] . out[t]
 *   dv = p^T dout        ds = p (dout v^T - D)          dq = ds k / sqrt(HD)      dk = ds^T q / sqrt(HD)
 *
 * Query head h reads key/value head h / (NH / NKV); K and V are never replicated. All sums are in fp32, and their order depends
 * on shapes and the card. To keep that order, the backward pass computes the scores twice. The kernel of dK and dV has a block
 * for each tile of keys, which walks over all query heads of its group. The kernel of dQ has a block for each tile of queries.
 * That takes seven products instead of five, but every run gives the same bits. Where blocks can wait for each other at little
 * cost, they add dQ up in a fixed order, in five products.
 *
 * The launchers here choose the last of these kernels that the build, the card and head_dim allow:
 *   attention_plain.cuh    any even HD <= 256 and any floatX, on the ordinary units: the readable ones
 *   attention_mma.cuh      HD 64 and 128 in 16-bit builds: mma.sync tensor-core products, from sm_75 on
 *   attention_sm90.cuh     HD 64 and 128 in 16-bit builds: wgmma products, code for sm_90a
 *   attention_sm90_walk.cuh  the same, backward, in five products: long rows without documents
 *   attention_decode.cuh   one new token against a cache
 *   attention_common.cuh   what they share
 *
 * starts (B, T) divide a row into documents, as in attention.h; NULL: each row is one document. Steps:
 * dev/cuda/attention_forward.cu, dev/cuda/attention_backward.cu.
 *
 * Layouts: qkv rows are [NH q heads | NKV k heads | NKV v heads] x HD with RoPE applied; out rows are NH x HD. Both have a row
 * per token, `pitch` elements apart. Pointers and pitches are multiples of 16 bytes. T need not be a multiple of any tile:
 * rows past the end are read as zeros and never written.
 *
 * A grid's z dimension limits a launch to 65,535 sequences; larger batches are split into slices. Its y dimension limits a head
 * to 65,535 tiles. So T may be four million with tensor cores, and 524,280 in the worst case (head_dim 256). A longer T is an
 * error.
 */
#ifndef LLMC_ATTENTION_CUH
#define LLMC_ATTENTION_CUH

#include "llmc/attention_common.cuh"     // defines: AttentionArgs, attention_stats
#include "llmc/attention_decode.cuh"     // attention_decode_cuda, for those who include this file
#include "llmc/attention_mma.cuh"        // defines: attention_mma_forward, attention_mma_backward
#include "llmc/attention_plain.cuh"      // defines: attention_plain_forward, attention_plain_backward
#include "llmc/attention_sm90.cuh"       // defines: attention_wgmma_forward, attention_wgmma_backward
#include "llmc/attention_sm90_walk.cuh"  // defines: attention_walk_backward
#include "llmc/cuda/warpgroups.cuh"      // defines: has_wgmma
#include "llmc/rope.cuh"                 // defines: rope_backward_cuda

/* Which kernels a launcher uses; tests and benchmarks choose one, the program uses AUTO. */
typedef enum {
    ATTENTION_AUTO,
    ATTENTION_PLAIN,
    ATTENTION_MMA,
    ATTENTION_WGMMA,
    ATTENTION_WALK,  // differs from WGMMA in the backward pass alone
    NUM_ATTENTION_KERNELS
} AttentionKernel;

/* Returns whether a kernel uses Hopper's own instructions; such a kernel's backward pass also turns dq and dk back (RoPE). */
static inline bool attention_is_hopper(AttentionKernel kernel) { return kernel == ATTENTION_WGMMA || kernel == ATTENTION_WALK; }

/* Returns whether a kernel for this head dimension exists in this build and runs on this GPU with the code it loaded. */
static inline bool attention_has_kernel(AttentionKernel kernel, int HD) {
#ifndef PRECISION_FP32
    if (attention_is_hopper(kernel)) { return (HD == 64 || HD == 128) && has_wgmma(); }
    if (kernel == ATTENTION_MMA) { return HD == 64 || HD == 128; }
#endif
    return kernel == ATTENTION_AUTO || (kernel == ATTENTION_PLAIN && HD > 0 && HD <= MAX_HEAD_DIM && HD % 2 == 0);
}

static inline AttentionKernel attention_choose(AttentionKernel kernel, int HD) {
    if (kernel != ATTENTION_AUTO) { return kernel; }
    for (const AttentionKernel k : {ATTENTION_WGMMA, ATTENTION_MMA}) {
        if (attention_has_kernel(k, HD)) { return k; }
    }
    return ATTENTION_PLAIN;
}

// tokens of a row: in shorter rows, reading and writing the sums costs more than a walk saves; longer rows were not tried
constexpr int WALK_LEAST_TOKENS = 1024, WALK_MOST_TOKENS = 1 << 22;
// at head_dim 128 the sums of all heads in progress take 67 MB: with an H100's L2 cache (50 MiB) one walk is slower for shorter
// rows, with an H200's (60 MiB) it is not
constexpr int WALK_LEAST_TOKENS_SMALL_L2 = 4096;

/* Returns the row length in tokens from which on the backward pass is one walk, on a card with l2 bytes of L2 cache. At all
 * such lengths that were measured, it was faster than two kernels, except 16384 at head_dim 128 (4 to 7 % slower). */
static inline int walk_least_tokens(int HD, int l2) {
    return HD == 128 && l2 < SMALL_L2 ? WALK_LEAST_TOKENS_SMALL_L2 : WALK_LEAST_TOKENS;
}

/* Returns whether the backward pass of such rows may be one walk: then its scratch has room for the sums. */
static inline bool attention_may_walk(int T, int HD) {
    return sizeof(floatX) == 2 && (HD == 64 || HD == 128) && T >= WALK_LEAST_TOKENS && T <= WALK_MOST_TOKENS;
}

/* Returns whether the backward pass of these rows is one walk, where Hopper's kernels run. */
static inline bool attention_walks(int B, const AttentionArgs& s) {
#ifndef PRECISION_FP32
    const uint32_t processors = (uint32_t)device_attribute(cudaDevAttrMultiProcessorCount);
    return attention_may_walk(s.T, s.HD) && s.T >= walk_least_tokens(s.HD, device_attribute(cudaDevAttrL2CacheSize)) &&
           !s.starts && device_attribute(cudaDevAttrCooperativeLaunch) &&
           walk_fills(walk_order(B, s.NKV, s.T, processors), processors);
#else
    return false;
#endif
}

/* Runs forward for B <= MAX_GRID_YZ sequences. */
static inline void attention_forward_slice(AttentionKernel kernel, floatX* out, float* lse, const floatX* qkv, int B,
                                           const AttentionArgs& s, cudaStream_t stream) {
#ifndef PRECISION_FP32
    if (attention_is_hopper(kernel)) {
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

/* Runs backward for B <= MAX_GRID_YZ sequences. The wgmma kernels compute the statistics themselves. */
static inline void attention_backward_slice(AttentionKernel kernel, floatX* dqkv, void* scratch, const floatX* dout,
                                            const floatX* out, const float* lse, const floatX* qkv, int B,
                                            const AttentionArgs& s, cudaStream_t stream) {
    float2* stats = (float2*)scratch;
#ifndef PRECISION_FP32
    if (kernel == ATTENTION_WGMMA) {
        return s.HD == 64 ? attention_wgmma_backward<64>(dqkv, stats, dout, out, lse, qkv, B, s, stream)
                          : attention_wgmma_backward<128>(dqkv, stats, dout, out, lse, qkv, B, s, stream);
    }
#endif
    attention_stats(stats, dout, out, lse, B, s, stream);
#ifndef PRECISION_FP32
    if (kernel == ATTENTION_WALK) {
        float* sums = (float*)(stats + (size_t)B * s.NH * s.stat_rows);
        return s.HD == 64 ? attention_walk_backward<64>(dqkv, sums, stats, dout, qkv, B, s, stream)
                          : attention_walk_backward<128>(dqkv, sums, stats, dout, qkv, B, s, stream);
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

/* Returns the arguments of a slice whose sequences begin at this row. */
static inline AttentionArgs attention_slice(AttentionArgs s, size_t row) {
    if (s.starts) { s.starts += row; }
    return s;
}

/* Runs attention_forward_cuda with the given kernel; attention_has_kernel must be true for it. */
static inline void attention_forward_by(AttentionKernel kernel, floatX* out, float* lse, const floatX* qkv, int B,
                                        const AttentionArgs& s, cudaStream_t stream) {
    if (s.T == 0) { return; }
    kernel = attention_choose(kernel, s.HD);
    for (int b = 0; b < B; b += MAX_GRID_YZ) {
        const size_t row = (size_t)b * s.T;
        attention_forward_slice(kernel, out + row * s.out_pitch, lse + row * s.NH, qkv + row * s.qkv_pitch,
                                (int)size_min(B - b, MAX_GRID_YZ), attention_slice(s, row), stream);
    }
}

/* Runs attention_backward_cuda with the given kernel. Slices run one after another in the same scratch. */
static inline void attention_backward_by(AttentionKernel kernel, floatX* dqkv, void* scratch, const floatX* dout,
                                         const floatX* out, const float* lse, const floatX* qkv, int B, const AttentionArgs& s,
                                         cudaStream_t stream) {
    if (s.T == 0 || B == 0) { return; }
    const bool chosen = kernel == ATTENTION_AUTO;
    kernel = attention_choose(kernel, s.HD);
    if (chosen && kernel == ATTENTION_WGMMA && attention_walks(B, s)) { kernel = ATTENTION_WALK; }
    for (int b = 0; b < B; b += MAX_GRID_YZ) {
        const size_t row = (size_t)b * s.T;
        attention_backward_slice(kernel, dqkv + row * s.qkv_pitch, scratch, dout + row * s.out_pitch, out + row * s.out_pitch,
                                 lse + row * s.NH, qkv + row * s.qkv_pitch, (int)size_min(B - b, MAX_GRID_YZ),
                                 attention_slice(s, row), stream);
    }
    if (s.cos_sin && !attention_is_hopper(kernel)) {
        rope_backward_cuda(dqkv, s.starts, s.cos_sin, 0, {B, s.T, s.NH, s.NKV, s.HD}, s.qkv_pitch, stream);
    }
}

/* Writes out (B, T, NH HD) and lse (B, NH, T) from qkv (B, T, (NH + 2 NKV) HD). starts: (B, T) or NULL. Pitches: elements
 * between rows of qkv, out. */
static inline void attention_forward_cuda(floatX* out, float* lse, const floatX* qkv, const int32_t* starts, AttentionShape s,
                                          size_t qkv_pitch, size_t out_pitch, cudaStream_t stream) {
    attention_forward_by(ATTENTION_AUTO, out, lse, qkv, s.B, attention_args(s, qkv_pitch, out_pitch, starts), stream);
}

/* Returns the bytes of scratch for attention_backward_cuda, for the sequences that run at a time: lse and D of every query (T
 * rounded up), then the end of every token's document or, for a walk, the sums of dq. walk: the caller chooses a kernel that
 * walks at any row length */
static inline size_t attention_backward_scratch_cuda(AttentionShape s, bool walk = false) {
    const size_t B = size_min((size_t)s.B, (size_t)MAX_GRID_YZ), stats = B * s.NH * attention_stat_rows(s.T) * sizeof(float2);
    size_t rest = B * s.T * sizeof(int32_t);
#ifndef PRECISION_FP32
    if (walk || attention_may_walk(s.T, s.HD)) { rest = size_max(rest, walk_sums_bytes((int)B, s.NH, s.T, s.HD)); }
#endif
    return stats + rest;
}

/* Overwrites dqkv, laid out like qkv, from dout and the forward pass's out and lse. scratch is aligned to 16 bytes. With
 * cos_sin, the table of rope.cuh (T, HD), dqkv is the gradient before the rotation of qkv; with NULL, the gradient after it. */
static inline void attention_backward_cuda(floatX* dqkv, void* scratch, const floatX* dout, const floatX* out, const float* lse,
                                           const floatX* qkv, const int32_t* starts, const float* cos_sin, AttentionShape s,
                                           size_t qkv_pitch, size_t out_pitch, cudaStream_t stream) {
    AttentionArgs args = attention_args(s, qkv_pitch, out_pitch, starts);
    args.cos_sin = cos_sin;
    attention_backward_by(ATTENTION_AUTO, dqkv, scratch, dout, out, lse, qkv, s.B, args, stream);
}

#endif
