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
 * kernels.cuh chooses among these kernels:
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

#include "llmc/attention_common.cuh"     // defines: AttentionArgs, AttentionTensorsX, attention_stats
#include "llmc/attention_decode.cuh"     // attention_decode_cuda, for those who include this file
#include "llmc/attention_mma.cuh"        // defines: attention_mma_forward, attention_mma_backward
#include "llmc/attention_plain.cuh"      // defines: attention_plain_forward, attention_plain_backward
#include "llmc/attention_sm90.cuh"       // defines: attention_wgmma_forward, attention_wgmma_backward
#include "llmc/attention_sm90_walk.cuh"  // defines: attention_walk_backward
#include "llmc/attention_walk.h"         // defines: walk_order
#include "llmc/kernels.cuh"              // defines: AttentionKernel, kernel_row
#include "llmc/rope.cuh"                 // defines: rope_backward_cuda

/* Returns the kernel to use, where `kernel` is AUTO. */
static inline AttentionKernel attention_choose(AttentionKernel kernel, KernelChoice pass, int B, const AttentionArgs& s) {
    if (kernel != ATTENTION_AUTO) { return kernel; }
    return (AttentionKernel)kernel_row(pass, attention_sizes({B, s.T, s.NH, s.NKV, s.HD}, s.starts != NULL))->kernel;
}

/* Ends the program if rows are too long for the kernels of forward and backward, as their launchers do once memory is taken.
 * known: there is a card; otherwise asks for what no card can do */
static inline void attention_check(const AttentionShape& s, bool known) {
    const bool tensor_cores = attention_tensor_cores(s.HD);
    int rows = s.HD <= 64    ? (int)PlainTiles<64>::BACKWARD_BM  // the least of the tiles
               : s.HD <= 128 ? (int)PlainTiles<128>::BACKWARD_BM
                             : (int)PlainTiles<256>::BACKWARD_BM;
    if (tensor_cores && (!known || this_card()->wgmma)) { return; }
#ifndef PRECISION_FP32
    const auto least = [&](auto of) {
        mma_choose(typename decltype(of)::BackwardKV(), [&](auto tiles) { rows = decltype(tiles)::BN; });
    };
    if (tensor_cores) { mma_with_tiles(s.HD, least); }
#endif
    attention_grid(1, s.NH, s.T, rows);
}

/* Runs forward for B <= MAX_GRID_YZ sequences. */
static inline void attention_forward_slice(AttentionKernel kernel, floatX* out, float* lse, const floatX* qkv, int B,
                                           const AttentionArgs& s, cudaStream_t stream) {
#ifndef PRECISION_FP32
    if (kernel >= ATTENTION_WGMMA) { return attention_wgmma_forward(out, lse, qkv, B, s, stream); }
    if (kernel == ATTENTION_MMA) { return attention_mma_forward(out, lse, qkv, B, s, stream); }
#endif
    attention_plain_forward(out, lse, qkv, B, s, stream);
}

/* Runs backward for B <= MAX_GRID_YZ sequences. The wgmma kernels compute the statistics themselves. */
static inline void attention_backward_slice(AttentionKernel kernel, floatX* dqkv, void* scratch, const floatX* dout,
                                            const AttentionTensorsX& f, int B, const AttentionArgs& s, cudaStream_t stream) {
    float2* stats = (float2*)scratch;
#ifndef PRECISION_FP32
    if (kernel == ATTENTION_WGMMA) { return attention_wgmma_backward(dqkv, stats, dout, f, B, s, stream); }
#endif
    attention_stats(stats, dout, f, B, s, stream);
#ifndef PRECISION_FP32
    if (kernel == ATTENTION_WALK) {
        float* sums = (float*)(stats + (size_t)B * s.NH * s.stat_rows);
        return attention_walk_backward(dqkv, sums, stats, dout, f.qkv, walk_order(B, s.NKV, s.T, this_card()->processors), s,
                                       stream);
    }
    if (kernel == ATTENTION_MMA) { return attention_mma_backward(dqkv, stats, dout, f.qkv, B, s, stream); }
#endif
    attention_plain_backward(dqkv, stats, dout, f.qkv, B, s, stream);
}

/* Returns the arguments of a slice whose sequences begin at this row. */
static inline AttentionArgs attention_slice(AttentionArgs s, size_t row) {
    if (s.starts) { s.starts += row; }
    return s;
}

/* Writes out (B, T, NH HD) and lse (B, NH, T) from qkv (B, T, (NH + 2 NKV) HD). attention_has_kernel must be true for `kernel`
 * and s.HD. */
static inline void attention_forward_cuda(floatX* out, float* lse, const floatX* qkv, int B, const AttentionArgs& s,
                                          cudaStream_t stream, AttentionKernel kernel = ATTENTION_AUTO) {
    if (s.T == 0 || B == 0) { return; }
    kernel = attention_choose(kernel, CHOOSE_ATTENTION, B, s);
    for (int b = 0; b < B; b += MAX_GRID_YZ) {
        const size_t row = (size_t)b * s.T;
        attention_forward_slice(kernel, out + row * s.out_pitch, lse + row * s.NH, qkv + row * s.qkv_pitch,
                                (int)size_min(B - b, MAX_GRID_YZ), attention_slice(s, row), stream);
    }
}

/* Returns the bytes of scratch for attention_backward_cuda, for the sequences that run at a time: lse and D of every query (T
 * rounded up), then the end of every token's document or, for a walk, the sums of dq. walk: the caller chooses a kernel that
 * walks at any row length */
static inline size_t attention_backward_scratch_cuda(AttentionShape s, bool walk = false) {
    const size_t B = size_min((size_t)s.B, (size_t)MAX_GRID_YZ), stats = B * s.NH * attention_stat_rows(s.T) * sizeof(float2);
    size_t rest = B * s.T * sizeof(int32_t);
    if (walk || attention_may_walk(s.T, s.HD)) { rest = size_max(rest, walk_sums_bytes((int)B, s.NH, s.T, s.HD)); }
    return stats + rest;
}

/* Overwrites dqkv, laid out like qkv, from dout, laid out like out. scratch is aligned to 16 bytes; slices run one after
 * another in it. With s.cos_sin, dqkv is the gradient before the rotation of qkv; with NULL, the gradient after it. */
static inline void attention_backward_cuda(floatX* dqkv, void* scratch, const floatX* dout, const AttentionTensorsX& f, int B,
                                           const AttentionArgs& s, cudaStream_t stream,
                                           AttentionKernel kernel = ATTENTION_AUTO) {
    if (s.T == 0 || B == 0) { return; }
    kernel = attention_choose(kernel, CHOOSE_ATTENTION_BACKWARD, B, s);
    for (int b = 0; b < B; b += MAX_GRID_YZ) {
        const size_t row = (size_t)b * s.T;
        attention_backward_slice(kernel, dqkv + row * s.qkv_pitch, scratch, dout + row * s.out_pitch,
                                 {f.qkv + row * s.qkv_pitch, f.out + row * s.out_pitch, f.lse + row * s.NH},
                                 (int)size_min(B - b, MAX_GRID_YZ), attention_slice(s, row), stream);
    }
    if (s.cos_sin && kernel < ATTENTION_WGMMA) {  // Hopper's kernels have turned dq and dk back themselves
        rope_backward_cuda(dqkv, s.starts, s.cos_sin, 0, {B, s.T, s.NH, s.NKV, s.HD}, s.qkv_pitch, stream);
    }
}

#endif
