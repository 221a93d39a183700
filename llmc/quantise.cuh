/* quantise.cuh -- rows of activations, and rows and columns of weights, in 8 bits with a scale each, on the GPU. The oracle is
 * quantise.h, which describes format and scales; results have the oracle's bits.
 *
 * Rows: a block takes a row and reads it twice: once for the largest value, once, from the cache, to convert it. 3 bytes an
 * element of memory (BF16). A kernel that writes a row can end with quantise_row() and saves the first read:
 * rmsnorm.cuh, swiglu.cuh.
 * Transposes, for the products that sum over the rows: a block takes a tile, 16 elements of 4 rows a thread. A column's 4 bytes
 * are one word of its line in shared memory, `tile` (column, rows / 4). Groups of 4 words of a line change places by the
 * column's part of the tile, so neither the writes by columns nor the reads by lines meet in a bank. A transpose has one scale,
 * from the largest value of all rows, which the kernels that made the rows stored (QuantisedRows.largest). 2 bytes an element
 * from 8-bit rows, 3 from 16 bits.
 * Weights: a product in fp8 wants both factors with the summed index innermost. Forward sums over the inputs, dx over the
 * outputs, so a weight W (OC, C) has two copies: `rows` (OC, C) with a scale for each output, and `columns` (C, OC), its
 * transpose, with a scale for each input. One pass finds both kinds of maxima and keeps them where the scales will lie. They
 * are maxima of integers, so their order does not matter. A second pass converts both copies. 6 bytes a weight, once an update
 * or gather.
 *
 * Counts (QuantiseCounts) are of a sample, one row in QUANTISE_SAMPLE, so that they cost nothing: integers, in any order.
 */
#ifndef LLMC_QUANTISE_CUH
#define LLMC_QUANTISE_CUH

#include <cuda_fp8.h>

#include "llmc/base/matrix.h"  // defines: RowShape
#include "llmc/cuda/cuda_common.cuh"
#include "llmc/quantise.h"  // defines: QuantiseCounts, Fp8Format, quantise_scale, quantise_factor, QUANTISE_WIDTH

enum {
    QUANTISE_ROW_THREADS = 512,
    QUANTISE_SAMPLE = 61,        // one row in this many is counted; prime: not always the first token of a row of text
    QUANTISE_MAX_ROWS = 64,      // rows of a tile of the pass for maxima
    QUANTISE_MAX_COLUMNS = 256,  // its columns: 32 lanes of 8
    QUANTISE_TILE = 64,          // rows and columns of a tile of the pass that converts
    QUANTISE_PITCH = 64 + 4,     // bytes of a tile's rows in shared memory
    QUANTISE_THREADS = 256,
    TRANSPOSE_TILE = 128,  // rows and columns of a tile of a transpose
    TRANSPOSE_ROWS = 4,    // rows of a word
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
    ROWS_AT_ONCE = 1,  // without instructions for e4m3, a single row takes most registers
#else
    ROWS_AT_ONCE = TRANSPOSE_ROWS,
#endif
};

typedef Vec<uint8_t, QUANTISE_WIDTH> Quantised16;

/* Eight-bit rows on the device, `pitch` bytes apart, with a scale each. */
typedef struct {
    uint8_t* data;  // NULL: none
    float* scale;
    size_t pitch;
    uint32_t* largest;  // rises to the bits of the rows' largest magnitude; NULL: not wanted
    Fp8Format format;
} QuantisedRows;

/* Where a layer writes its output in 8 bits as well. */
typedef struct {
    QuantisedRows rows;
    QuantiseCounts* counts;  // a sample's counts are added to it; NULL: none
} QuantisedOutput;

/* The transpose of rows: eight-bit lines, one for each column, `pitch` bytes apart, with one scale on the device for all. */
typedef struct {
    uint8_t* data;
    float* scale;
    size_t pitch;
} QuantisedTranspose;

/* Returns the bytes from one row of `width` to the next. */
static inline size_t quantised_pitch(size_t width) { return row_pitch<uint8_t>(width); }

__device__ __forceinline__ float to_float(__nv_fp8_e4m3 x) { return (float)x; }
__device__ __forceinline__ float to_float(__nv_fp8_e5m2 x) { return (float)x; }

template <typename T>
__device__ __forceinline__ uint32_t magnitude_bits(T x) {
    return __float_as_uint(to_float(x)) & 0x7FFFFFFFu;
}

/* Returns the larger of `largest` and the largest magnitude of W elements, as bits. */
template <typename T, int W>
__device__ __forceinline__ uint32_t largest_of(const Vec<T, W>& x, uint32_t largest) {
#pragma unroll
    for (int k = 0; k < W; k++) { largest = max(largest, magnitude_bits(x.v[k])); }
    return largest;
}

__device__ __forceinline__ uint32_t warp_largest(uint32_t x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) { x = max(x, __shfl_xor_sync(0xffffffffu, x, mask)); }
    return x;
}

/* Converts 16 elements with a factor for each; `factor(k)` returns the factor of element k. A factor that is NaN gives NaN. */
template <Fp8Format F, typename T, typename Factor>
__device__ __forceinline__ Quantised16 quantise16(const Vec<T, QUANTISE_WIDTH>& x, const Factor& factor) {
    Quantised16 q;
#pragma unroll
    for (int k = 0; k < QUANTISE_WIDTH; k += 2) {
        const float2 pair = make_float2(to_float(x.v[k]) * factor(k), to_float(x.v[k + 1]) * factor(k + 1));
        const __nv_fp8x2_storage_t two = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, F == E4M3 ? __NV_E4M3 : __NV_E5M2);
        q.v[k] = isnan(pair.x) ? FP8_NAN : (uint8_t)(two & 0xff);
        q.v[k + 1] = isnan(pair.y) ? FP8_NAN : (uint8_t)(two >> 8);
    }
    return q;
}

/* Returns the counts of 16 elements: flushed in the upper half, subnormal in the lower. */
template <Fp8Format F, typename T>
__device__ __forceinline__ unsigned long long counts16(const Quantised16& q, const Vec<T, QUANTISE_WIDTH>& x) {
    unsigned long long counts = 0;
#pragma unroll
    for (int k = 0; k < QUANTISE_WIDTH; k++) {
        const unsigned magnitude = q.v[k] & 0x7Fu;
        if (magnitude == 0 && to_float(x.v[k]) != 0.0f) { counts += 1ull << 32; }
        if (magnitude > 0 && magnitude < (unsigned)fp8_least_normal(F)) { counts++; }
    }
    return counts;
}

__device__ __forceinline__ void add_counts(QuantiseCounts* to, unsigned long long counts, unsigned long long values) {
    atomicAdd((unsigned long long*)&to->values, values);
    atomicAdd((unsigned long long*)&to->flushed, counts >> 32);
    atomicAdd((unsigned long long*)&to->subnormal, counts & 0xffffffffu);
}

// ---------------------------------------------------------------------------------------------------------------------
// rows

/* Quantises row n, which the threads of this block have written to memory. largest: of the elements that the thread has seen;
 * the block has seen the whole row. All threads of the block call it: whole warps, (threads) or (32, warps). The block has
 * this row alone. */
template <Fp8Format F = E4M3, typename T>
__device__ __forceinline__ void quantise_row(QuantisedRows q, size_t n, const T* row, int C, uint32_t largest,
                                             QuantiseCounts* counts) {
    constexpr int W = QUANTISE_WIDTH;
    __shared__ uint32_t maxima[32];
    __shared__ unsigned long long sums[32];
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
    const int lane = thread % 32, warp = thread / 32, warps = threads / 32;
    largest = warp_largest(largest);
    if (lane == 0) { maxima[warp] = largest; }
    __syncthreads();
    largest = warp_largest(lane < warps ? maxima[lane] : 0);

    const float scale = quantise_scale(largest, F), factor = quantise_factor(scale);
    const bool counted = counts && n % QUANTISE_SAMPLE == 0;
    unsigned long long count = 0;
    if (thread == 0) { q.scale[n] = scale; }
    if (thread == 0 && q.largest) { atomicMax(q.largest, largest); }
    for (int c = thread * W; c < C; c += threads * W) {
        const Vec<T, W> v = load_vec<W>(row + c);
        const Quantised16 to = quantise16<F>(v, [&](int) { return factor; });
        store_vec(q.data + n * q.pitch + c, to);
        if (counted) { count += counts16<F>(to, v); }
    }
    if (!counted) { return; }  // all threads of the block or none
    count = warp_sum(count);
    if (lane == 0) { sums[warp] = count; }
    __syncthreads();
    if (warp > 0) { return; }
    count = warp_sum(lane < warps ? sums[lane] : 0);
    if (lane == 0) { add_counts(counts, count, (unsigned long long)C); }
}

/* Returns the threads of a block for rows of `width`. */
static inline unsigned quantise_threads(size_t width) {
    return (unsigned)size_min(QUANTISE_ROW_THREADS, round_up(width / QUANTISE_WIDTH, 32));
}

template <Fp8Format F, typename T>
__global__ void __launch_bounds__(QUANTISE_ROW_THREADS)
    quantise_rows_kernel(QuantisedRows q, const T* x, int C, size_t x_pitch, QuantiseCounts* counts) {
    constexpr int W = QUANTISE_WIDTH;
    const T* row = x + blockIdx.x * x_pitch;
    uint32_t largest = 0;
    for (int c = threadIdx.x * W; c < C; c += blockDim.x * W) { largest = largest_of(load_vec<W>(row + c), largest); }
    quantise_row<F>(q, blockIdx.x, row, C, largest, counts);
}

/* Writes q (N, C) from x (rows). counts: NULL, or a sample's counts are added to it. C is a multiple of QUANTISE_WIDTH. */
template <typename T>
static void quantise_rows_cuda(QuantisedRows q, const T* x, RowShape rows, QuantiseCounts* counts, cudaStream_t stream) {
    if (rows.N == 0) { return; }
    assert(rows.C % QUANTISE_WIDTH == 0 && q.pitch % QUANTISE_WIDTH == 0);
    auto* const kernel = q.format == E4M3 ? quantise_rows_kernel<E4M3, T> : quantise_rows_kernel<E5M2, T>;
    kernel<<<(unsigned)rows.N, quantise_threads((size_t)rows.C), 0, stream>>>(q, x, rows.C, rows.pitch, counts);
    CUDA_CHECK_LAUNCH("quantise_rows_kernel");
}

// ---------------------------------------------------------------------------------------------------------------------
// tiles

/* Returns a grid with a block for each tile of `count` matrices (rows, columns). */
static inline dim3 quantise_grid(size_t rows, int columns, int tile_rows, int tile_columns, int count = 1) {
    return dim3((unsigned)ceil_div((size_t)columns, (size_t)tile_columns),
                grid_tiles("--fp8: the number of tokens of a micro-batch", rows, tile_rows),
                grid_tiles("--fp8: the number of blocks", (size_t)count, 1));
}

// ---------------------------------------------------------------------------------------------------------------------
// transposes

/* T: the type of the rows, floatX or 8 bits in the format F. scales: the scales of 8-bit rows, otherwise NULL. Counts the
 * first row of the tiles on a diagonal. */
template <Fp8Format F, typename T>
__global__ void __launch_bounds__(QUANTISE_THREADS)
    quantise_transpose_kernel(QuantisedTranspose q, const T* x, const float* scales, const uint32_t* largest, size_t N, int C,
                              size_t x_pitch, QuantiseCounts* counts) {
    constexpr int W = QUANTISE_WIDTH, PARTS = TRANSPOSE_TILE / W, WORDS = TRANSPOSE_TILE / TRANSPOSE_ROWS, GROUP = 4;
    __shared__ alignas(16) uint32_t tile[TRANSPOSE_TILE][WORDS];
    const size_t first_row = (size_t)blockIdx.y * TRANSPOSE_TILE;
    const int first_column = blockIdx.x * TRANSPOSE_TILE;
    const int line = threadIdx.x / PARTS, part = threadIdx.x % PARTS;  // first for words by columns, later for columns by rows
    const float scale = quantise_scale(*largest, F), factor = quantise_factor(scale);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) { *q.scale = scale; }
    const bool counted = counts && blockIdx.x == blockIdx.y % gridDim.x && line == 0;
    const size_t n = first_row + line * TRANSPOSE_ROWS;
    const int c = first_column + part * W;
    if (n < N && c < C) {
        uint32_t words[W] = {};
#pragma unroll ROWS_AT_ONCE
        for (int r = 0; r < TRANSPOSE_ROWS; r++) {
            const Vec<T, W> v = load_vec<W>(x + (n + r) * x_pitch + c);
            const float shift = scales ? scales[n + r] * factor : factor;
            const Quantised16 row = quantise16<F>(v, [&](int) { return shift; });
            if (counted && r == 0) { add_counts(counts, counts16<F>(row, v), W); }
#pragma unroll
            for (int k = 0; k < W; k++) { words[k] |= (uint32_t)row.v[k] << (8 * r); }
        }
#pragma unroll
        for (int k = 0; k < W; k++) { tile[part * W + k][line ^ (part * GROUP)] = words[k]; }
    }
    __syncthreads();
    const size_t row = first_row + part * W;
#pragma unroll
    for (int k = 0; k < TRANSPOSE_TILE; k += QUANTISE_THREADS / PARTS) {
        const int column = first_column + k + line;
        if (column >= C || row >= N) { continue; }
        const Vec<uint32_t, GROUP> rows = load_vec<GROUP>(&tile[k + line][(part ^ ((k + line) / W)) * GROUP]);
        store_vec((uint32_t*)(q.data + column * q.pitch + row), rows);
    }
}
static_assert(QUANTISE_THREADS * TRANSPOSE_ROWS * (int)QUANTISE_WIDTH == TRANSPOSE_TILE * TRANSPOSE_TILE,
              "each thread has 16 columns of 4 rows");

template <Fp8Format F, typename T>
static void quantise_transpose_launch(QuantisedTranspose q, const T* x, const float* scales, const uint32_t* largest,
                                      RowShape rows, QuantiseCounts* counts, cudaStream_t stream) {
    if (rows.N == 0) { return; }
    assert(rows.N % QUANTISE_WIDTH == 0 && rows.C % QUANTISE_WIDTH == 0 && q.pitch % QUANTISE_WIDTH == 0);
    const dim3 grid = quantise_grid(rows.N, rows.C, TRANSPOSE_TILE, TRANSPOSE_TILE);
    quantise_transpose_kernel<F>
        <<<grid, QUANTISE_THREADS, 0, stream>>>(q, x, scales, largest, rows.N, rows.C, rows.pitch, counts);
    CUDA_CHECK_LAUNCH("quantise_transpose_kernel");
}

/* Writes the transpose q (C, N), in e4m3, of x (rows). largest: the largest magnitude of x, on the device. counts as above. N
 * and C are multiples of QUANTISE_WIDTH. */
template <typename T>
static void quantise_transposed_cuda(QuantisedTranspose q, const T* x, const uint32_t* largest, RowShape rows,
                                     QuantiseCounts* counts, cudaStream_t stream) {
    quantise_transpose_launch<E4M3>(q, x, NULL, largest, rows, counts, stream);
}

/* Writes the transpose q (C, N) of x (N, C), in its format, shifted from its scales to the one scale that x.largest gives. */
static inline void quantise_shifted_cuda(QuantisedTranspose q, QuantisedRows x, size_t N, int C, QuantiseCounts* counts,
                                         cudaStream_t stream) {
    const RowShape rows = {N, C, x.pitch};
    if (x.format == E4M3) {
        quantise_transpose_launch<E4M3>(q, (const __nv_fp8_e4m3*)x.data, x.scale, x.largest, rows, counts, stream);
    } else {
        quantise_transpose_launch<E5M2>(q, (const __nv_fp8_e5m2*)x.data, x.scale, x.largest, rows, counts, stream);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// weights

/* The two copies, in e4m3, of one matrix (R, C) in each of several blocks, packed; the copies of the k-th block lie k
 * strides further. R and C are multiples of QUANTISE_WIDTH. */
typedef struct {
    uint8_t* rows;     // (R, C)
    uint8_t* columns;  // (C, R)
    float* scales;     // (R + C) of the rows, then of the columns; at first the bits of their largest magnitudes
    int R, C;
} QuantisedWeights;

/* Tile: QUANTISE_MAX_ROWS rows x QUANTISE_MAX_COLUMNS columns. A warp takes every 8th of its rows, a lane 8 columns. */
template <typename T>
__global__ void __launch_bounds__(QUANTISE_THREADS) quantise_maxima_kernel(QuantisedWeights q, const T* w, size_t stride) {
    constexpr int W = 8, WARPS = QUANTISE_THREADS / 32;
    __shared__ uint32_t columns[WARPS][QUANTISE_MAX_COLUMNS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first_row = blockIdx.y * QUANTISE_MAX_ROWS, first_column = blockIdx.x * QUANTISE_MAX_COLUMNS;
    const int c = first_column + lane * W;
    uint32_t* scales = (uint32_t*)q.scales + blockIdx.z * (size_t)(q.R + q.C);
    uint32_t column[W] = {};
    w += blockIdx.z * stride;
    for (int r = first_row + warp; r < min(q.R, first_row + QUANTISE_MAX_ROWS); r += WARPS) {
        uint32_t row = 0;
        if (c < q.C) {
            const Vec<T, W> v = load_vec<W>(w + (size_t)r * q.C + c);
            row = largest_of(v, 0);
#pragma unroll
            for (int k = 0; k < W; k++) { column[k] = max(column[k], magnitude_bits(v.v[k])); }
        }
        row = warp_largest(row);
        if (lane == 0) { atomicMax(&scales[r], row); }
    }
#pragma unroll
    for (int k = 0; k < W; k++) { columns[warp][lane * W + k] = column[k]; }
    __syncthreads();
    uint32_t largest = 0;  // a thread's own column: there are as many threads as columns
    for (int k = 0; k < WARPS; k++) { largest = max(largest, columns[k][threadIdx.x]); }
    if (first_column + (int)threadIdx.x < q.C) { atomicMax(&scales[q.R + first_column + threadIdx.x], largest); }
}
static_assert((int)QUANTISE_MAX_COLUMNS == (int)QUANTISE_THREADS, "a thread has a column of the tile");

/* Turns the bits of largest magnitudes into scales, in place. */
__global__ void __launch_bounds__(QUANTISE_THREADS) quantise_scales_kernel(float* scales, size_t n) {
    const size_t i = (size_t)blockIdx.x * QUANTISE_THREADS + threadIdx.x;
    if (i < n) { scales[i] = quantise_scale(__float_as_uint(scales[i]), E4M3); }
}

/* Tile: QUANTISE_TILE rows x as many columns. First a thread has 16 elements of row threadIdx.x / 4; the columns' copy goes
 * through shared memory, `tile` (row, column), from which a thread takes 16 rows of column threadIdx.x / 4: four threads write
 * the 64 bytes of a row of the transpose. Counts the first row of the tiles on a diagonal, in both copies. */
template <typename T>
__global__ void __launch_bounds__(QUANTISE_THREADS)
    quantise_weights_kernel(QuantisedWeights q, const T* w, size_t stride, QuantiseCounts* counts) {
    constexpr int W = QUANTISE_WIDTH, QUARTERS = QUANTISE_TILE / W;
    __shared__ alignas(16) uint8_t tile[QUANTISE_TILE][QUANTISE_PITCH];
    const int first_row = blockIdx.y * QUANTISE_TILE, first_column = blockIdx.x * QUANTISE_TILE;
    const int line = threadIdx.x / QUARTERS, part = threadIdx.x % QUARTERS * W;  // first for rows, later for columns
    const size_t size = (size_t)q.R * q.C;
    const bool counted = counts && blockIdx.x == blockIdx.y % gridDim.x && line == 0;
    const float *row_scales = q.scales + blockIdx.z * (size_t)(q.R + q.C), *column_scales = row_scales + q.R;
    w += blockIdx.z * stride;
    const int r = first_row + line, c = first_column + part;
    if (r < q.R && c < q.C) {
        const Vec<T, W> v = load_vec<W>(w + (size_t)r * q.C + c);
        const float factor = quantise_factor(row_scales[r]);
        const Quantised16 row = quantise16<E4M3>(v, [&](int) { return factor; });
        const Quantised16 columns = quantise16<E4M3>(v, [&](int k) { return quantise_factor(column_scales[c + k]); });
        store_vec(q.rows + blockIdx.z * size + (size_t)r * q.C + c, row);
#pragma unroll
        for (int k = 0; k < W; k += 4) {
            Vec<uint8_t, 4> four;
#pragma unroll
            for (int i = 0; i < 4; i++) { four.v[i] = columns.v[k + i]; }
            store_vec(&tile[line][part + k], four);
        }
        if (counted) { add_counts(counts, counts16<E4M3>(row, v) + counts16<E4M3>(columns, v), 2 * W); }
    }
    __syncthreads();
    const int column = first_column + line, row = first_row + part;
    if (column >= q.C || row >= q.R) { return; }
    Quantised16 down;
#pragma unroll
    for (int k = 0; k < W; k++) { down.v[k] = tile[part + k][line]; }
    store_vec(q.columns + blockIdx.z * size + (size_t)column * q.R + row, down);
}

/* Writes both copies of a matrix (R, C) of each of `blocks` blocks, whose weights lie `stride` elements apart from w on.
 * counts: as above, here of both copies. */
template <typename T>
static void quantise_weights_cuda(QuantisedWeights q, const T* w, size_t stride, int blocks, QuantiseCounts* counts,
                                  cudaStream_t stream) {
    assert(q.R % QUANTISE_WIDTH == 0 && q.C % QUANTISE_WIDTH == 0);
    const size_t scales = (size_t)blocks * (size_t)(q.R + q.C);
    const auto grid = [&](int rows, int columns) { return quantise_grid((size_t)q.R, q.C, rows, columns, blocks); };
    CUDA_CHECK(cudaMemsetAsync(q.scales, 0, scales * sizeof(float), stream));
    quantise_maxima_kernel<<<grid(QUANTISE_MAX_ROWS, QUANTISE_MAX_COLUMNS), QUANTISE_THREADS, 0, stream>>>(q, w, stride);
    CUDA_CHECK_LAUNCH("quantise_maxima_kernel");
    quantise_scales_kernel<<<(unsigned)ceil_div(scales, QUANTISE_THREADS), QUANTISE_THREADS, 0, stream>>>(q.scales, scales);
    CUDA_CHECK_LAUNCH("quantise_scales_kernel");
    quantise_weights_kernel<<<grid(QUANTISE_TILE, QUANTISE_TILE), QUANTISE_THREADS, 0, stream>>>(q, w, stride, counts);
    CUDA_CHECK_LAUNCH("quantise_weights_kernel");
}

#endif
