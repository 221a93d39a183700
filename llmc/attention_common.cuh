/* attention_common.cuh -- what the attention kernels share: their arguments and launches, D = rowsum(dout * out), and the
 * work on scores in registers: causal mask, online softmax, p and ds. Formulas and layouts: attention.cuh.
 */
#ifndef LLMC_ATTENTION_COMMON_CUH
#define LLMC_ATTENTION_COMMON_CUH

#include <math.h>

#include "llmc/config.h"              // defines: AttentionShape
#include "llmc/cuda/cuda_common.cuh"  // defines: floatX, CUDA_CHECK
#include "llmc/cuda/ptx.cuh"          // defines: exp2_fast, pack2

/* Every kernel's arguments besides its tensors: the AttentionShape, the pitches, and the scale of the scores. */
struct AttentionArgs {
    int T, NH, NKV, HD;
    int stat_rows;                // rows of a head's statistics
    size_t qkv_pitch, out_pitch;  // elements between rows
    float scale;                  // 1 / sqrt(HD)
    float scale_log2;             // scale * log2(e): the kernels' exponentials have base 2
    const int32_t* starts;        // (B, T) where each token's document starts in its row (attention.h); NULL: each row is one
    const float* cos_sin;         // (T, HD) the table of rope.cuh by which dq and dk are turned back; NULL: they are not
};

/* What the forward pass read, and the part of its results that the backward pass reads. */
struct AttentionTensorsX {
    const floatX *qkv, *out;  // (B, T, (NH + 2 NKV) HD) and (B, T, NH HD)
    const float* lse;         // (B, NH, T)
};

// The value of a score above the causal diagonal. exp2(-inf - m) is 0 for a finite row max m. If a whole row is masked so far,
// the kernels subtract 0 instead of m, so that -inf - -inf never happens.
constexpr float ATTENTION_MASKED = -INFINITY;
constexpr double LOG2_E = 1.4426950408889634;

constexpr int STAT_ROWS = 128;         // statistics of a head are padded to a multiple of this: a tile never reads past them
constexpr int SM75_SHARED = 64 << 10;  // bytes of shared memory a block may have on sm_75: the limit of code for every card

/* Returns the rows of a head's statistics: T, rounded up. */
static inline size_t attention_stat_rows(int T) { return round_up((size_t)T, (size_t)STAT_ROWS); }

static inline AttentionArgs attention_args(AttentionShape s, size_t qkv_pitch, size_t out_pitch, const int32_t* starts = NULL,
                                           const float* cos_sin = NULL) {
    const double scale = 1.0 / sqrt((double)s.HD);
    AttentionArgs a;
    a.T = s.T, a.NH = s.NH, a.NKV = s.NKV, a.HD = s.HD;
    a.stat_rows = (int)attention_stat_rows(s.T);
    a.qkv_pitch = qkv_pitch, a.out_pitch = out_pitch;
    a.scale = (float)scale, a.scale_log2 = (float)(scale * LOG2_E);
    a.starts = starts;
    a.cos_sin = cos_sin;
    return a;
}

/* Returns the first element of a head in a row. */
template <typename Element>
__device__ __forceinline__ Element* attention_row(Element* base, size_t row, size_t pitch, int head, int HD) {
    return base + row * pitch + (size_t)head * HD;
}

// ---------------------------------------------------------------------------------------------------------------------
// documents: kernels with DOCUMENTS true let a query see only keys of its own document. starts never decrease within a row. So
// the first query of a tile limits the keys that its queries see, and the last key of a tile limits the queries that see its
// keys. Those tiles are skipped. Only tiles that a document's end divides are masked

/* Returns the first query behind `key` that does not see it: where the key's document ends. starts: (T) of the row */
__device__ __forceinline__ int attention_document_end(const int32_t* starts, int key, int T) {
    int low = key + 1, high = T;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (starts[middle] > key) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

// ---------------------------------------------------------------------------------------------------------------------
// launches

/* Launches a kernel that may need more than the 48 KB of shared memory available without cudaFuncSetAttribute. */
template <typename... Params, typename... Args>
static inline void attention_launch(void (*kernel)(Params...), dim3 grid, int threads, int smem, cudaStream_t stream,
                                    Args... args) {
    CUDA_CHECK(cudaFuncSetAttribute((const void*)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
    kernel<<<grid, threads, smem, stream>>>(args...);
    CUDA_CHECK_LAUNCH("an attention kernel");
}

/* Launches a kernel whose blocks wait for each other. The driver then refuses a grid that is not resident at once, where
 * a plain launch would hang. Returns its answer. */
template <typename... Params, typename... Args>
static inline cudaError_t attention_launch_resident(void (*kernel)(Params...), dim3 grid, int threads, int smem,
                                                    cudaStream_t stream, Args... args) {
    cudaLaunchAttribute together = {};
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
    cudaLaunchConfig_t launch = {};
    launch.gridDim = grid;
    launch.blockDim = dim3((unsigned)threads);
    launch.dynamicSmemBytes = (size_t)smem;
    launch.stream = stream;
    launch.attrs = &together;
    launch.numAttrs = 1;
    CUDA_CHECK(cudaFuncSetAttribute((const void*)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
    return cudaLaunchKernelEx(&launch, kernel, args...);
}

/* Returns a grid with a block for each tile of `rows` rows of each head of B <= MAX_GRID_YZ sequences. Heads vary fastest.
 * The heads of a group read the same K and V, and what the heads of one sequence read at a time fits in the L2. */
static inline dim3 attention_grid(int B, int heads, int T, int rows) {
    return dim3((unsigned)heads, grid_tiles("--seq, for the kernels of this head_dim,", (size_t)T, rows), (unsigned)B);
}

// ---------------------------------------------------------------------------------------------------------------------
// backward, first step: lse in base 2 and D = rowsum(dout * out), in pairs, for the kernels that recompute scores

/* Writes stats (B, NH, stat_rows), pairs {lse * log2(e), D}; pairs past T make every p and ds zero. LANES threads share a pair
 * and read W neighboring elements at a time; neighboring tokens share a block. */
template <int LANES, int W>
__global__ void attention_stats_kernel(float2* stats, const floatX* dout, const floatX* out, const float* lse, AttentionArgs s,
                                       size_t pairs) {
    const size_t pair = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
    if (pair >= pairs) { return; }  // never happens: `pairs` is a multiple of STAT_ROWS, so blocks are full
    const int lane = threadIdx.x % LANES, t = (int)(pair % s.stat_rows), h = (int)(pair / s.stat_rows % s.NH);
    const size_t row = pair / s.stat_rows / s.NH * s.T + t;
    float D = 0;
    if (t < s.T) {
        const floatX* o = attention_row(out, row, s.out_pitch, h, s.HD);
        const floatX* d = attention_row(dout, row, s.out_pitch, h, s.HD);
        for (int i = lane * W; i < s.HD; i += LANES * W) {
            const Vec<floatX, W> x = load_vec<W>(o + i), y = load_vec<W>(d + i);
#pragma unroll
            for (int k = 0; k < W; k++) { D += to_float(x.v[k]) * to_float(y.v[k]); }
        }
    }
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2) { D += __shfl_xor_sync(0xffffffffu, D, mask); }
    if (lane == 0) {
        stats[pair] = t < s.T ? make_float2(lse[pair / s.stat_rows * s.T + t] * (float)LOG2_E, D) : make_float2(INFINITY, 0);
    }
}

static inline void attention_stats(float2* stats, const floatX* dout, const AttentionTensorsX& f, int B, const AttentionArgs& s,
                                   cudaStream_t stream) {
    constexpr size_t THREADS = 256;
    const bool wide = s.HD % 64 == 0;
    const size_t pairs = (size_t)B * s.NH * s.stat_rows, pairs_of_block = THREADS / (wide ? 8 : 32);
    attention_launch(wide ? attention_stats_kernel<8, 8> : attention_stats_kernel<32, 2>,
                     dim3((unsigned)(pairs / pairs_of_block)), THREADS, 0, stream, stats, dout, f.out, f.lse, s, pairs);
}

// ---------------------------------------------------------------------------------------------------------------------
// fragments: how mma.sync and wgmma lay out 16 rows of a product in a warp's registers
//
// With g = lane / 4 and t = lane % 4, element i of a thread's float p[N] is in row g + 8 (i / 2 % 2) and column 2 t + 8 (i / 4)
// + i % 2: a thread holds two rows, and two neighboring columns of every eight.

template <int N>
__device__ __forceinline__ void fragment_clear(float (&p)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) { p[i] = 0; }
}

/* Gives a value to the elements for which hidden(column, r) is true: row g + 8 r, columns counted from 2 t. */
template <int N, typename Hidden>
__device__ __forceinline__ void fragment_mask(float (&p)[N], float value, const Hidden& hidden) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (hidden(i / 4 * 8 + i % 2, i % 4 / 2)) { p[i] = value; }
    }
}

/* Masks the columns past the last one that a row sees. `last` is the last column of row g of the warp's first fragment. This
 * fragment lies `down` rows further down; each row sees one column more than the row before. */
template <int N>
__device__ __forceinline__ void fragment_mask_behind(float (&p)[N], int last, float value, int down = 0) {
    fragment_mask(p, value, [&](int column, int r) { return column - r * 8 - down > last; });
}

/* Does the transposed case, where rows are keys: clears the columns before the first one that sees key g. */
template <int N>
__device__ __forceinline__ void fragment_clear_before(float (&p)[N], int first, int down = 0) {
    fragment_mask(p, 0, [&](int column, int r) { return column - r * 8 - down < first; });
}

/* Masks, in row g + 8 r, the columns before first[r]. */
template <int N>
__device__ __forceinline__ void fragment_mask_before(float (&p)[N], const int (&first)[2], float value) {
    fragment_mask(p, value, [&](int column, int r) { return column < first[r]; });
}

/* Masks the keys of earlier documents. The thread's first row belongs to query `row`, its first column to key `column`.
 * starts: (T) of the row */
template <int N>
__device__ __forceinline__ void fragment_mask_documents(float (&p)[N], const int32_t* starts, int row, int column, int T,
                                                        float value) {
    const int first[2] = {row < T ? starts[row] - column : 0, row + 8 < T ? starts[row + 8] - column : 0};
    fragment_mask_before(p, first, value);
}

/* Does the transposed case, where rows are keys: clears the queries of later documents. */
template <int N>
__device__ __forceinline__ void fragment_clear_documents(float (&p)[N], const int32_t* starts, int row, int column, int T) {
#pragma unroll
    for (int n = 0; n < N / 4; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int query = column + 8 * n + e, first = query < T ? starts[query] : 0;
            if (row < first) { p[4 * n + e] = 0; }
            if (row + 8 < first) { p[4 * n + 2 + e] = 0; }
        }
    }
}

/* Applies the online softmax to row g + 8 r: scores become p = e^(s - m), and row max m and this thread's part l of the row sum
 * cover all tiles so far. Returns the factor that rescales earlier sums. m is in units of the unscaled scores. */
template <int N>
__device__ __forceinline__ float fragment_softmax(float (&p)[N], int r, float& m, float& l, float scale_log2) {
    float max = m;
#pragma unroll
    for (int n = 0; n < N / 4; n++) { max = fmaxf(max, fmaxf(p[4 * n + 2 * r], p[4 * n + 2 * r + 1])); }
    max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 1));
    max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 2));
    const float shift = max == ATTENTION_MASKED ? 0 : max * scale_log2;
    const float rescale = exp2_fast(m * scale_log2 - shift);
    m = max;
    l *= rescale;
#pragma unroll
    for (int n = 0; n < N / 4; n++) {
        p[4 * n + 2 * r] = exp2_fast(p[4 * n + 2 * r] * scale_log2 - shift);
        p[4 * n + 2 * r + 1] = exp2_fast(p[4 * n + 2 * r + 1] * scale_log2 - shift);
        l += p[4 * n + 2 * r] + p[4 * n + 2 * r + 1];
    }
    return rescale;
}

/* Turns 16 rows of dq or dk back from RoPE's rotation, as rope_backward_cuda does. row: the index of the
 * first one in its sequence. Positions count from the start of a document. Column c and its partner c + HD / 2 are in the same
 * thread. */
template <int HD>
__device__ __forceinline__ void fragment_turn_back(float (&d)[HD / 2], const AttentionArgs& s, size_t b, int row) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int at = min(row + lane / 4 + r * 8, s.T - 1), position = at - (s.starts ? s.starts[b * s.T + at] : 0);
        const float* table = s.cos_sin + (size_t)position * HD + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < HD / 16; n++) {
            const Vec<float, 2> cosine = load_vec<2>(table + n * 8), sine = load_vec<2>(table + HD / 2 + n * 8);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &x = d[4 * n + 2 * r + e], &y = d[4 * (n + HD / 16) + 2 * r + e];
                const float turned = x * cosine.v[e] + y * sine.v[e];
                y = y * cosine.v[e] - x * sine.v[e];
                x = turned;
            }
        }
    }
}

/* Adds up l over the four threads of a row. */
__device__ __forceinline__ float fragment_row_sum(float l) {
    l += __shfl_xor_sync(0xffffffffu, l, 1);
    l += __shfl_xor_sync(0xffffffffu, l, 2);
    return l;
}

/* Backward: turn scores into p = e^(s - lse), and dP into ds = p (dP - D), whose factor `scale` the store applies. stat[r]
 * is {lse * log2(e), D} of the query in row g + 8 r. */
template <int N>
__device__ __forceinline__ void fragment_p(float (&p)[N], const float2 (&stat)[2], float scale_log2) {
#pragma unroll
    for (int i = 0; i < N; i++) { p[i] = exp2_fast(p[i] * scale_log2 - stat[i % 4 / 2].x); }
}
template <int N>
__device__ __forceinline__ void fragment_ds(float (&ds)[N], const float (&p)[N], const float2 (&stat)[2]) {
#pragma unroll
    for (int i = 0; i < N; i++) { ds[i] = p[i] * (ds[i] - stat[i % 4 / 2].y); }
}

/* Do the same transposed: queries are columns. stats[0] holds the pairs of columns 2 t and 2 t + 1, stats[4 n] the pairs
 * of the columns 8 n further. */
template <int N>
__device__ __forceinline__ void fragment_p_transposed(float (&p)[N], const float4* stats, float scale_log2) {
#pragma unroll
    for (int n = 0; n < N / 4; n++) {
        const float4 stat = stats[n * 4];
#pragma unroll
        for (int e = 0; e < 4; e++) { p[n * 4 + e] = exp2_fast(p[n * 4 + e] * scale_log2 - (e % 2 ? stat.z : stat.x)); }
    }
}
template <int N>
__device__ __forceinline__ void fragment_ds_transposed(float (&ds)[N], const float (&p)[N], const float4* stats) {
#pragma unroll
    for (int n = 0; n < N / 4; n++) {
        const float4 stat = stats[n * 4];
#pragma unroll
        for (int e = 0; e < 4; e++) { ds[n * 4 + e] = p[n * 4 + e] * (ds[n * 4 + e] - (e % 2 ? stat.w : stat.y)); }
    }
}

#ifndef PRECISION_FP32

/* Rounds a product to 16 bits and arranges it as the left operand of the next product, which sums over its columns. */
template <int N>
__device__ __forceinline__ void fragment_operand(uint32_t (&a)[N / 8][4], const float (&p)[N]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) { a[i / 4][i % 4] = pack2(p[2 * i], p[2 * i + 1]); }
}

/* Replaces p by the values that fragment_operand rounded it to. */
template <int N>
__device__ __forceinline__ void fragment_rounded(float (&p)[N], const uint32_t (&a)[N / 8][4]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const float2 v = unpack2(a[i / 4][i % 4]);
        p[2 * i] = v.x;
        p[2 * i + 1] = v.y;
    }
}

#endif  // PRECISION_FP32
#endif
