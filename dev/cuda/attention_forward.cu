/* attention_forward.cu -- causal attention with grouped query heads, in steps. The formulas stand in llmc/attention.h, the
 * lesson is dev/doc/attention.md.
 *
 *   make -C dev/cuda attention_forward && build/zoo/attention_forward [forward|decode] [N...]
 *
 * S = Q K^T / sqrt(HD), P = softmax(S), out = P V. The scores of a head are T x T: far more than q, k, v and out together. So
 * the question is where they live: in memory (1, 2), or in registers and shared memory, a tile at a time (3 to 8). Operations
 * count for the causal half alone, 2 B NH T T HD. Version 0 is a product of cuBLASLt with as many. `decode` is the same for one
 * new token and a cache of keys and values, as in generation: there nothing is used twice.
 */
#include <float.h>

#include "llmc/attention.cuh"
#include "llmc/attention.h"
enum { PLAIN = 6 };  // the last version for any head size
#include "dev/cuda/attention_classic.cuh"

enum { QKV, OUT, LSE, SPARE };

static AttentionShape cache_of(const Case& c) {
    return {1, (int)c.n[0], (int)c.n[1], (int)c.n[2], (int)c.n[3]};
}  // of `decode`

// ---------------------------------------------------------------------------------------------------------------------
// 1: three kernels, as the formulas stand, with S in memory. A thread a score, a warp a row of the softmax (softmax.cu has its
// steps), a thread an output element. One sequence at a time, so that S fits.

__global__ void scores1_kernel(float* S, const floatX* qkv, AttentionShape s, size_t pitch) {
    const int u = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y, h = blockIdx.z;
    if (u > t) { return; }
    const floatX *q = qkv + t * pitch + h * s.HD, *k = qkv + u * pitch + (s.NH + h / (s.NH / s.NKV)) * s.HD;
    float sum = 0;
    for (int d = 0; d < s.HD; d++) { sum += to_float(q[d]) * to_float(k[d]); }
    S[((size_t)h * s.T + t) * s.T + u] = sum / sqrtf((float)s.HD);
}

/* A warp a row: p = softmax(S) up to the diagonal, zero above it. p may be S. */
template <typename P>
__global__ void softmax_kernel(P* p, float* lse, const float* S, AttentionShape s) {
    const size_t row = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= (size_t)s.NH * s.T) { return; }
    const int t = (int)(row % s.T);
    float m = -INFINITY, l = 0;
    S += row * s.T, p += row * s.T;
    for (int u = threadIdx.x; u <= t; u += 32) { m = fmaxf(m, S[u]); }
    m = warp_max(m);
    for (int u = threadIdx.x; u <= t; u += 32) { l += expf(S[u] - m); }
    l = warp_sum(l);
    for (int u = threadIdx.x; u < s.T; u += 32) { p[u] = from_float<P>(u <= t ? expf(S[u] - m) / l : 0); }
    if (threadIdx.x == 0) { lse[row] = m + logf(l); }
}

template <typename P>
static void softmax(P* p, float* lse, const float* S, AttentionShape s, cudaStream_t stream) {
    softmax_kernel<<<blocks_for((size_t)s.NH * s.T, 8), dim3(32, 8), 0, stream>>>(p, lse, S, s);
}

__global__ void values1_kernel(floatX* out, const float* P, const floatX* qkv, AttentionShape s, size_t pitch,
                               size_t out_pitch) {
    const int d = threadIdx.x, t = blockIdx.x, h = blockIdx.y;
    const floatX* v = qkv + (s.NH + s.NKV + h / (s.NH / s.NKV)) * s.HD + d;
    float sum = 0;
    for (int u = 0; u <= t; u++) { sum += P[((size_t)h * s.T + t) * s.T + u] * to_float(v[u * pitch]); }
    out[t * out_pitch + h * s.HD + d] = from_float<floatX>(sum);
}

static void forward1(floatX* out, float* lse, floatX* qkv, void* spare, AttentionShape s, size_t pitch, size_t out_pitch,
                     cudaStream_t stream) {
    float* S = (float*)spare;
    for (int b = 0; b < s.B; b++, qkv += s.T * pitch, out += s.T * out_pitch, lse += s.NH * s.T) {
        const dim3 grid(blocks_for(s.T, 128), (unsigned)s.T, (unsigned)s.NH);
        scores1_kernel<<<grid, 128, 0, stream>>>(S, qkv, s, pitch);
        softmax(S, lse, S, s, stream);
        values1_kernel<<<dim3((unsigned)s.T, (unsigned)s.NH), s.HD, 0, stream>>>(out, S, qkv, s, pitch, out_pitch);
    }
}

// A score's loads of k touch a sector for each thread, which the L1 cache takes a clock for, as long as 128 instructions; the
// next elements come from the same sectors. Half of S is written, read three times and written whole, then half is read again.
static Work predict_forward1(const Case& c) {
    const double S = scores(c) / 2;
    return {7 * S * sizeof(float) / 32, 0, S * (double)c.n[4] * (128 + 12), 0, 3.0 * (double)c.n[0]};
}

// ---------------------------------------------------------------------------------------------------------------------
// 2: the classic way. Tensor cores want matrices, so q, k and v become matrices of a head each, k and v copied for every head
// of a group. One call of cuBLASLt makes the scores of all heads of a sequence, one the outputs; between them the same softmax.
// Both products compute the half above the diagonal, too.

static void forward2(floatX* out, float* lse, floatX* qkv, void* spare, AttentionShape s, size_t pitch, size_t out_pitch,
                     cudaStream_t stream) {
    Arena memory = {(char*)spare, 0};
    Heads h(&memory, s);
    for (int b = 0; b < s.B; b++, qkv += s.T * pitch, out += s.T * out_pitch, lse += s.NH * s.T) {
        split_heads(h, qkv, s, pitch, stream);
        batched(matrices(h.scores), matrices(h.q), matrices(h.k, true), s.T, s.T, s.HD, s.NH, 1 / sqrtf((float)s.HD), stream);
        softmax(h.p, lse, h.scores, s, stream);
        batched(matrices(h.out), matrices(h.p), matrices(h.v), s.T, s.HD, s.T, s.NH, 1, stream);
        permute<true>(out, h.out, s, 0, 1, out_pitch, stream);
    }
}

// The scores are written and read in fp32, the weights in floatX; q, k, v and out move twice more. A sequence's scores may stay
// in the L2 cache. The products do twice the operations, at a low share of the rate since HD is short.
static Work predict_forward2(const Case& c) {
    const double one = scores(c) / (double)c.n[0], bytes = one * (sizeof(float) + sizeof(floatX)),
                 heads = 8.0 * (double)(c.n[0] * c.n[1] * c.n[2] * c.n[4]) * sizeof(floatX);
    return {0, 2 * c.flops / 0.6, 0, 0, 7.0 * (double)c.n[0], (2 * missing(bytes) * bytes * (double)c.n[0] + heads) / 32};
}

// ---------------------------------------------------------------------------------------------------------------------
// 3: a query a warp. S never leaves the chip: the warp walks over the keys up to the diagonal with a running maximum and sum.
// When the maximum grows, the output so far is scaled down. A lane has every 32nd element, so each score is a sum of a warp.

enum { MOST_LANES3 = 8, KEYS4 = 32, QUERIES = 8 };  // elements of a lane, HD / 32 at most; keys of a tile; queries of a block

/* Takes a key and its value into a warp's output, maximum and sum. */
__device__ __forceinline__ void take_key3(float (&o)[MOST_LANES3], float& m, float& l, const floatX* q, const floatX* k,
                                          const floatX* v, int HD) {
    float dot = 0;
    for (int d = threadIdx.x; d < HD; d += 32) { dot += to_float(q[d]) * to_float(k[d]); }
    const float score = warp_sum(dot) / sqrtf((float)HD), before = m;
    m = fmaxf(m, score);
    const float shrink = expf(before - m), p = expf(score - m);
    l = l * shrink + p;
#pragma unroll
    for (int i = 0; i < MOST_LANES3; i++) {
        const int d = threadIdx.x + 32 * i;
        if (d < HD) { o[i] = o[i] * shrink + p * to_float(v[d]); }
    }
}

__global__ void forward3_kernel(floatX* out, float* lse, const floatX* qkv, AttentionShape s, size_t pitch, size_t out_pitch) {
    const int t = blockIdx.x * QUERIES + threadIdx.y, h = blockIdx.y, b = blockIdx.z, lane = threadIdx.x;
    if (t >= s.T) { return; }
    const floatX *q = qkv + ((size_t)b * s.T + t) * pitch + h * s.HD,
                 *k = qkv + (size_t)b * s.T * pitch + (s.NH + h / (s.NH / s.NKV)) * s.HD, *v = k + s.NKV * s.HD;
    float o[MOST_LANES3] = {}, m = -INFINITY, l = 0;
    for (int u = 0; u <= t; u++) { take_key3(o, m, l, q, k + u * pitch, v + u * pitch, s.HD); }
#pragma unroll
    for (int i = 0; i < MOST_LANES3; i++) {
        const int d = lane + 32 * i;
        if (d < s.HD) { out[((size_t)b * s.T + t) * out_pitch + h * s.HD + d] = from_float<floatX>(o[i] / l); }
    }
    if (lane == 0) { lse[((size_t)b * s.NH + h) * s.T + t] = m + logf(l); }
}

static dim3 queries(AttentionShape s) { return dim3(blocks_for(s.T, QUERIES), (unsigned)s.NH, (unsigned)s.B); }

static void forward3(floatX* out, float* lse, floatX* qkv, void*, AttentionShape s, size_t pitch, size_t out_pitch,
                     cudaStream_t stream) {
    forward3_kernel<<<queries(s), dim3(32, QUERIES), 0, stream>>>(out, lse, qkv, s, pitch, out_pitch);
}

// For each score and element of both products a load from the L1 cache, which takes the place of 4 additions, and an addition;
// for each score some 30 instructions of the whole warp, which are 15 for each of 64 elements of both products.
static Work predict_forward3(const Case& c) { return {c.bytes / 32, 0, c.flops / 2 * (5 + 480 / (double)c.n[4])}; }

// ---------------------------------------------------------------------------------------------------------------------
// 4: a tile of keys. The 8 queries of a block share 32 keys and values in shared memory, and a lane has a key: 32 scores at a
// time without a shuffle, one maximum and one rescaling a tile. 5: tiles beyond the block's last query are skipped.

template <bool SKIP>
__global__ void forward4_kernel(floatX* out, float* lse, const floatX* qkv, AttentionShape s, size_t pitch, size_t out_pitch) {
    extern __shared__ float tile[];  // keys (32, HD + 1), values (32, HD), queries (8, HD)
    float *ks = tile, *vs = ks + KEYS4 * (s.HD + 1), *q = vs + KEYS4 * s.HD + threadIdx.y * s.HD;
    const int first = blockIdx.x * QUERIES, t = first + threadIdx.y, h = blockIdx.y, b = blockIdx.z, lane = threadIdx.x;
    qkv += (size_t)b * s.T * pitch;
    const floatX *k = qkv + (s.NH + h / (s.NH / s.NKV)) * s.HD, *v = k + s.NKV * s.HD;
    for (int d = lane; d < s.HD; d += 32) { q[d] = t < s.T ? to_float(qkv[t * pitch + h * s.HD + d]) : 0; }
    float o[MOST_LANES3] = {}, m = -INFINITY, l = 0;
    for (int u0 = 0; u0 < (SKIP ? min(first + QUERIES, s.T) : s.T); u0 += KEYS4) {
        __syncthreads();  // all have read the last tile, and later all of this one is there
        for (int i = threadIdx.y; i < KEYS4; i += QUERIES) {
            for (int d = lane; d < s.HD; d += 32) {
                ks[i * (s.HD + 1) + d] = u0 + i < s.T ? to_float(k[(u0 + i) * pitch + d]) : 0;
                vs[i * s.HD + d] = u0 + i < s.T ? to_float(v[(u0 + i) * pitch + d]) : 0;
            }
        }
        __syncthreads();
        float dot = 0;
        for (int d = 0; d < s.HD; d++) { dot += q[d] * ks[lane * (s.HD + 1) + d]; }
        const float score = u0 + lane <= t ? dot / sqrtf((float)s.HD) : -INFINITY, before = m;
        m = fmaxf(m, warp_max(score));
        const float shrink = expf(before - m), p = expf(score - m);
        l = l * shrink + warp_sum(p);
#pragma unroll
        for (int i = 0; i < MOST_LANES3; i++) { o[i] *= shrink; }
        for (int u = 0; u < KEYS4; u++) {
            const float weight = __shfl_sync(~0u, p, u);
#pragma unroll
            for (int i = 0; i < MOST_LANES3; i++) {
                if (lane + 32 * i < s.HD) { o[i] += weight * vs[u * s.HD + lane + 32 * i]; }
            }
        }
    }
    if (t >= s.T) { return; }
#pragma unroll
    for (int i = 0; i < MOST_LANES3; i++) {
        const int d = lane + 32 * i;
        if (d < s.HD) { out[((size_t)b * s.T + t) * out_pitch + h * s.HD + d] = from_float<floatX>(o[i] / l); }
    }
    if (lane == 0) { lse[((size_t)b * s.NH + h) * s.T + t] = m + logf(l); }
}

template <bool SKIP>
static void forward4(floatX* out, float* lse, floatX* qkv, void*, AttentionShape s, size_t pitch, size_t out_pitch,
                     cudaStream_t stream) {
    const int bytes = (int)sizeof(float) * (KEYS4 * (2 * s.HD + 1) + QUERIES * s.HD);
    CUDA_CHECK(cudaFuncSetAttribute((const void*)forward4_kernel<SKIP>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    forward4_kernel<SKIP><<<queries(s), dim3(32, QUERIES), bytes, stream>>>(out, lse, qkv, s, pitch, out_pitch);
}

// For a score and element of the first product two loads from shared memory and an addition, of the second one a load, a part
// of a shuffle and an addition. Half of the tiles of 4 are above the diagonal.
static Work predict_forward4(const Case& c) { return {c.bytes / 32, 0, c.flops * (9 + 6) / 2}; }
static Work predict_forward5(const Case& c) { return {c.bytes / 32, 0, c.flops / 2 * (9 + 6) / 2}; }

// ---------------------------------------------------------------------------------------------------------------------
// 6 to 8, the trainer's: a tile of queries meets a tile of keys, so a thread has many sums in registers. 6 on the ordinary
// units, 7 by mma, with copies beside it, 8 by wgmma, with a warpgroup that only copies.

template <AttentionKernel KERNEL>
static void trainer(floatX* out, float* lse, floatX* qkv, void*, AttentionShape s, size_t pitch, size_t out_pitch,
                    cudaStream_t stream) {
    attention_forward_cuda(out, lse, qkv, s.B, attention_args(s, pitch, out_pitch), stream, KERNEL);
}

// 6: two additions of products in fp32 for each score and element, and about two loads from shared memory for four of them.
static Work predict_forward6(const Case& c) { return {c.bytes / 32, 0, c.flops / 2 * 2.2}; }
// 7: a score's exponential takes a special unit a quarter of a clock of a lane: as long as 2 HD operations of the tensor cores
// take at HD 64. Half of it hides.
static Work predict_forward7(const Case& c) { return {c.bytes / 32, c.flops / mma_rate() / (c.n[4] < 128 ? 0.6 : 0.75)}; }
// 8: two warpgroups take turns, one multiplies while the other computes exponentials.
static Work predict_forward8(const Case& c) { return {c.bytes / 32, c.flops / (c.n[4] < 128 ? 0.7 : 0.85)}; }

// ---------------------------------------------------------------------------------------------------------------------
// decode 1: a warp a query head walks over the cache, as in forward 3. 2: sixteen warps take every 16th key, and join their
// parts in their order. 3, the trainer's: a warp takes four keys at a time, whose loads and sums wait beside each other.
enum { DECODE_OUT, Q, CACHE };  // tensors of the ladder `decode`; a row of the cache: NKV keys, NKV values

template <int WARPS>
__global__ void decode1_kernel(floatX* out, const floatX* q, const floatX* cache, int positions, AttentionShape s) {
    __shared__ float maxima[WARPS], sums[WARPS], parts[WARPS][32 * MOST_LANES3];
    const int h = blockIdx.x, warp = threadIdx.y, lane = threadIdx.x, pitch = 2 * s.NKV * s.HD;
    const floatX* k = cache + h / (s.NH / s.NKV) * s.HD;
    float o[MOST_LANES3] = {}, m = -FLT_MAX, l = 0;
    for (size_t u = warp; u < (size_t)positions; u += WARPS) {
        take_key3(o, m, l, q + h * s.HD, k + u * pitch, k + u * pitch + s.NKV * s.HD, s.HD);
    }
    if (lane == 0) { maxima[warp] = m, sums[warp] = l; }
#pragma unroll
    for (int i = 0; i < MOST_LANES3; i++) { parts[warp][lane + 32 * i] = o[i]; }
    __syncthreads();
    for (int d = warp * 32 + lane; d < s.HD; d += WARPS * 32) {
        float best = maxima[0], total = 0, sum = 0;
        for (int w = 1; w < WARPS; w++) { best = fmaxf(best, maxima[w]); }
        for (int w = 0; w < WARPS; w++) {
            total += expf(maxima[w] - best) * sums[w];
            sum += expf(maxima[w] - best) * parts[w][d];
        }
        out[h * s.HD + d] = from_float<floatX>(sum / total);
    }
}

template <int WARPS>
static void decode1(floatX* out, const floatX* q, const floatX* cache, int positions, AttentionShape s, cudaStream_t stream) {
    decode1_kernel<WARPS><<<s.NH, dim3(32, WARPS), 0, stream>>>(out, q, cache, positions, s);
}

template <void LAUNCH(floatX*, const floatX*, const floatX*, int, AttentionShape, cudaStream_t)>
static void decode(const Case& c, cudaStream_t stream) {
    LAUNCH(c.at<floatX>(DECODE_OUT), c.at<floatX>(Q), c.at<floatX>(CACHE), (int)c.n[0], cache_of(c), stream);
}

// A key takes a warp a trip for its loads, and the sum of 32 lanes half of one.
template <int AT_ONCE>
static Work predict_decode(const Case& c) {
    return {c.bytes / 32, 0, 0, 1.5 * (double)c.n[0] / AT_ONCE};
}

static void make_decode(Case& c) {
    const size_t HD = c.n[3];
    c.tensor<floatX>("out", WRITE, c.n[1], HD);
    c.tensor<floatX>("q", READ, c.n[1], HD);
    c.tensor<floatX>("cache", READ, c.n[0], 2 * c.n[2] * HD);
    c.bytes = sizeof(floatX) * 2.0 * (double)(c.n[0] * c.n[2] * HD + c.n[1] * HD);
}
static void oracle_decode(Case& c) { attention_decode(c[DECODE_OUT], c[Q], c[CACHE], (int)c.n[0], cache_of(c)); }

// ---------------------------------------------------------------------------------------------------------------------

static void forward0(floatX* out, float*, floatX* qkv, void* spare, AttentionShape s, size_t pitch, size_t out_pitch,
                     cudaStream_t stream) {
    as_many((floatX*)spare, out, out_pitch, qkv, pitch, s, 2, stream);
}

// ---------------------------------------------------------------------------------------------------------------------

template <auto* LAUNCH>
static void forward(const Case& c, cudaStream_t stream) {
    const AttentionShape s = shape_of(c);
    LAUNCH(c.at<floatX>(OUT), c.at<float>(LSE), c.at<floatX>(QKV), c.at<char>(SPARE), s, c.pitch(qkv_width(s)),
           c.pitch(out_width(s)), stream);
}

static void make(Case& c) {
    const AttentionShape s = shape_of(c);
    const size_t N = (size_t)s.B * s.T, as_many_bytes = N * s.T * sizeof(floatX);
    c.rows("qkv", READ, N, qkv_width(s));
    // 2, 7 and 8 round P to 16 bits before they multiply it, so an element may be as wrong as its largest terms are rounded
    c.rows("out", WRITE, N, out_width(s), 1, INFINITY);
    c.tensor<float>("lse", WRITE, 1, (size_t)s.NH * N);
    c.tensor<char>("scratch", SCRATCH, 1, s.T > 2048 ? as_many_bytes : size_max(as_many_bytes, Heads::bytes(s)));
    c.bytes = sizeof(floatX) * (double)N * (double)(qkv_width(s) + out_width(s));
    c.flops = 2 * half_product(s);
}
static void oracle(Case& c) {
    std::vector<char> scratch(attention_forward_scratch());
    attention_forward(c[OUT], c[LSE], scratch.data(), c[QKV], NULL, shape_of(c));
}

#include "dev/cuda/main.cuh"

int main(int argc, char** argv) {
    const Ladder l("forward", "B,T,NH,NKV,HD", make, NULL, oracle, TESTS, CLASSIC, LARGE,
                   {{0, "cuBLASLt, a product of as many operations", REFERENCE, forward<forward0>, predict_product},
                    {1, "scores in memory, a thread each", 0, forward<forward1>, predict_forward1},
                    {2, "classic: permute, copy, cuBLASLt, softmax", 0, forward<forward2>, predict_forward2},
                    {3, "a query a warp, running maximum", 0, forward<forward3>, predict_forward3},
                    {4, "a tile of keys in shared memory", 0, forward<forward4<false>>, predict_forward4},
                    {5, "tiles above the diagonal are skipped", 0, forward<forward4<true>>, predict_forward5},
                    {6, "a tile of queries by a tile of keys", BOLD, forward<trainer<ATTENTION_PLAIN>>, predict_forward6},
                    {7, "mma, cp.async", BOLD | ONLY_16, forward<trainer<ATTENTION_MMA>>, predict_forward7},
                    {8, "wgmma, TMA", BOLD | ONLY_16 | SM90, forward<trainer<ATTENTION_WGMMA>>, predict_forward8}});
    const Ladder d("decode", "positions,NH,NKV,HD", make_decode, NULL, oracle_decode,
                   {{{5, 3, 1, 24}}, {{70, 4, 2, 64}}, {{333, 2, 1, 128}}}, {{{8192, 32, 8, 64}}}, {{{131072, 32, 8, 128}}},
                   {{1, "a warp a query head", 0, decode<decode1<1>>, predict_decode<1>},
                    {2, "sixteen warps a query head", 0, decode<decode1<16>>, predict_decode<16>},
                    {3, "four keys at a time", BOLD, decode<attention_decode_cuda>, predict_decode<64>}});
    return zoo(argc, argv, "attention_forward", {l, d});
}
