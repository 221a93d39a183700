/* swiglu.cuh -- silu(gate) * up on packed gate|up rows on the GPU, and its gradient. The oracle is swiglu.h, where the formulas
 * stand.
 *
 * Backward can also write the forward output again. It has gate and up in registers anyway, so recomputing `out` costs only its
 * store. It may run in place, dgate_up over gate_up.
 * Bytes a row: forward 3F, backward 5F, 6F with `out` (times the size of an element). Steps: dev/cuda/swiglu.cu.
 */
#ifndef LLMC_SWIGLU_CUH
#define LLMC_SWIGLU_CUH

#include "llmc/quantise.cuh"  // defines: QuantisedRows, quantise_row, largest_of
#include "llmc/cuda/cuda_common.cuh"

__device__ __forceinline__ float swiglu_sigmoid(float x) {
#ifdef PRECISION_FP32
    return 1.0f / (1.0f + expf(-x));
#else
    return __fdividef(1.0f, 1.0f + __expf(-x));  // e^-x = inf gives 0, as wanted
#endif
}

template <int W>
__device__ __forceinline__ Vec<floatX, W> swiglu_vector(const Vec<floatX, W>& gate, const Vec<floatX, W>& up) {
    Vec<floatX, W> y;
#pragma unroll
    for (int k = 0; k < W; k++) {
        const float g = to_float(gate.v[k]);
        y.v[k] = from_float<floatX>(g * swiglu_sigmoid(g) * to_float(up.v[k]));
    }
    return y;
}

template <int W>
struct SwigluGradient {
    Vec<floatX, W> dgate, dup, y;  // y: the forward output again
};

template <int W>
__device__ __forceinline__ SwigluGradient<W> swiglu_gradient(const Vec<floatX, W>& gate, const Vec<floatX, W>& up,
                                                             const Vec<floatX, W>& d) {
    SwigluGradient<W> r;
#pragma unroll
    for (int k = 0; k < W; k++) {
        const float g = to_float(gate.v[k]), u = to_float(up.v[k]), dy = to_float(d.v[k]);
        const float s = swiglu_sigmoid(g);
        r.y.v[k] = from_float<floatX>(g * s * u);
        r.dup.v[k] = from_float<floatX>(dy * g * s);
        r.dgate.v[k] = from_float<floatX>(dy * u * s * (1.0f + g * (1.0f - s)));
    }
    return r;
}

/* How rows of gate_up (N, 2 F), gate then up, and of the output (N, F) lie; pitches in elements. */
typedef struct {
    size_t N;
    int F;
    size_t gate_up_pitch, out_pitch;
} SwigluShape;

enum { SWIGLU_ROWS = 2, SWIGLU_THREADS = 256 };  // rows of a thread: loads of both are in flight at once

template <int W>
__global__ void __launch_bounds__(SWIGLU_THREADS)
    swiglu_forward_kernel(floatX* out, const floatX* gate_up, size_t N, int F, size_t gate_up_pitch, size_t out_pitch) {
    const int f = (blockIdx.y * blockDim.x + threadIdx.x) * W;
    const size_t first = (size_t)blockIdx.x * blockDim.y * SWIGLU_ROWS + threadIdx.y;
    if (f >= F) { return; }
    Vec<floatX, W> gate[SWIGLU_ROWS], up[SWIGLU_ROWS];
#pragma unroll
    for (int r = 0; r < SWIGLU_ROWS; r++) {
        const size_t n = first + r * blockDim.y;
        if (n < N) {
            gate[r] = load_stream<W>(gate_up + n * gate_up_pitch + f);
            up[r] = load_stream<W>(gate_up + n * gate_up_pitch + F + f);
        }
    }
#pragma unroll
    for (int r = 0; r < SWIGLU_ROWS; r++) {
        const size_t n = first + r * blockDim.y;
        if (n < N) { store_vec(out + n * out_pitch + f, swiglu_vector(gate[r], up[r])); }
    }
}

/* dgate_up may be gate_up: each thread reads its elements before it writes them. out: NULL if not wanted */
template <int W>
__global__ void __launch_bounds__(SWIGLU_THREADS)
    swiglu_backward_kernel(floatX* dgate_up, floatX* out, const floatX* dout, const floatX* gate_up, size_t N, int F,
                           size_t gate_up_pitch, size_t out_pitch) {
    const int f = (blockIdx.y * blockDim.x + threadIdx.x) * W;
    const size_t first = (size_t)blockIdx.x * blockDim.y * SWIGLU_ROWS + threadIdx.y;
    if (f >= F) { return; }
    Vec<floatX, W> gate[SWIGLU_ROWS], up[SWIGLU_ROWS], d[SWIGLU_ROWS];
#pragma unroll
    for (int r = 0; r < SWIGLU_ROWS; r++) {
        const size_t n = first + r * blockDim.y;
        if (n < N) {
            gate[r] = load_stream<W>(gate_up + n * gate_up_pitch + f);
            up[r] = load_stream<W>(gate_up + n * gate_up_pitch + F + f);
            d[r] = load_stream<W>(dout + n * out_pitch + f);
        }
    }
#pragma unroll
    for (int r = 0; r < SWIGLU_ROWS; r++) {
        const size_t n = first + r * blockDim.y;
        if (n < N) {
            const SwigluGradient<W> g = swiglu_gradient(gate[r], up[r], d[r]);
            floatX* drow = dgate_up + n * gate_up_pitch + f;
            store_vec(drow, g.dgate);
            store_vec(drow + F, g.dup);
            if (out) { store_vec(out + n * out_pitch + f, g.y); }
        }
    }
}

/* Sets a block's threads over vectors of a row (x) and rows (y), and the grid that covers (N, F). The grid's rows go along x,
 * which may be 2^31 blocks long. */
static inline void swiglu_grid(dim3* grid, dim3* block, size_t N, int F, bool wide) {
    const size_t vectors = wide ? (size_t)F / VECTOR<floatX> : (size_t)F;
    const size_t x = size_min(SWIGLU_THREADS, round_up(vectors, 32)), y = SWIGLU_THREADS / x;
    *block = dim3((unsigned)x, (unsigned)y);
    *grid = dim3((unsigned)ceil_div(N, y * SWIGLU_ROWS), (unsigned)ceil_div(vectors, x));
}

/* Writes out (N, F) from gate_up (N, 2F). */
static inline void swiglu_forward_cuda(floatX* out, const floatX* gate_up, SwigluShape s, cudaStream_t stream) {
    if (s.N == 0) { return; }
    const bool wide = s.F % VECTOR<floatX> == 0;
    auto* const kernel = wide ? swiglu_forward_kernel<VECTOR<floatX>> : swiglu_forward_kernel<1>;
    dim3 grid, block;
    swiglu_grid(&grid, &block, s.N, s.F, wide);
    kernel<<<grid, block, 0, stream>>>(out, gate_up, s.N, s.F, s.gate_up_pitch, s.out_pitch);
    CUDA_CHECK_LAUNCH("swiglu_forward_kernel");
}

/* Writes dgate_up (N, 2F), which may be gate_up, and out (N, F) unless it is NULL: the forward output again. dout: (N, F),
 * out_pitch   gate_up: (N, 2F) */
static inline void swiglu_backward_cuda(floatX* dgate_up, floatX* out, const floatX* dout, const floatX* gate_up, SwigluShape s,
                                        cudaStream_t stream) {
    if (s.N == 0) { return; }
    const bool wide = s.F % VECTOR<floatX> == 0;
    auto* const kernel = wide ? swiglu_backward_kernel<VECTOR<floatX>> : swiglu_backward_kernel<1>;
    dim3 grid, block;
    swiglu_grid(&grid, &block, s.N, s.F, wide);
    kernel<<<grid, block, 0, stream>>>(dgate_up, out, dout, gate_up, s.N, s.F, s.gate_up_pitch, s.out_pitch);
    CUDA_CHECK_LAUNCH("swiglu_backward_kernel");
}

// ---------------------------------------------------------------------------------------------------------------------
// for products in 8 bits: the same, and what it writes once more, quantised, with the bits of quantise_rows_cuda(). A block
// takes a row, and converts it once it is complete, from the cache. Bytes a row: forward 7F, backward 12F, 14F with `out`
// (BF16)

__global__ void __launch_bounds__(QUANTISE_ROW_THREADS)
    swiglu_forward_quantised_kernel(QuantisedRows q, floatX* out, const floatX* gate_up, int F, size_t gate_up_pitch,
                                    size_t out_pitch, QuantiseCounts* counts) {
    constexpr int W = VECTOR<floatX>;
    const floatX* gate = gate_up + blockIdx.x * gate_up_pitch;
    floatX* row = out + blockIdx.x * out_pitch;
    uint32_t largest = 0;
    for (int f = threadIdx.x * W; f < F; f += blockDim.x * W) {
        const Vec<floatX, W> y = swiglu_vector(load_stream<W>(gate + f), load_stream<W>(gate + F + f));
        store_vec(row + f, y);
        largest = largest_of(y, largest);
    }
    quantise_row(q, blockIdx.x, row, F, largest, counts);
}

/* dgate_up may be gate_up: each thread reads its elements before it writes them. out: NULL if not wanted */
__global__ void __launch_bounds__(QUANTISE_ROW_THREADS)
    swiglu_backward_quantised_kernel(QuantisedRows q, floatX* dgate_up, floatX* out, const floatX* dout, const floatX* gate_up,
                                     int F, size_t gate_up_pitch, size_t out_pitch, QuantiseCounts* counts) {
    constexpr int W = VECTOR<floatX>;
    const floatX *gate = gate_up + blockIdx.x * gate_up_pitch, *d = dout + blockIdx.x * out_pitch;
    floatX* row = dgate_up + blockIdx.x * gate_up_pitch;
    uint32_t largest = 0;
    for (int f = threadIdx.x * W; f < F; f += blockDim.x * W) {
        const SwigluGradient<W> g =
            swiglu_gradient(load_stream<W>(gate + f), load_stream<W>(gate + F + f), load_stream<W>(d + f));
        store_vec(row + f, g.dgate);
        store_vec(row + F + f, g.dup);
        if (out) { store_vec(out + blockIdx.x * out_pitch + f, g.y); }
        largest = largest_of(g.dup, largest_of(g.dgate, largest));
    }
    quantise_row(q, blockIdx.x, row, 2 * F, largest, counts);
}

/* Writes out (N, F) as swiglu_forward_cuda(), and q.rows (N, F) from it. F is a multiple of QUANTISE_WIDTH. */
static inline void swiglu_forward_quantised_cuda(QuantisedOutput q, floatX* out, const floatX* gate_up, SwigluShape s,
                                                 cudaStream_t stream) {
    if (s.N == 0) { return; }
    assert(s.F % QUANTISE_WIDTH == 0 && q.rows.pitch % QUANTISE_WIDTH == 0);
    swiglu_forward_quantised_kernel<<<(unsigned)s.N, quantise_threads((size_t)s.F), 0, stream>>>(
        q.rows, out, gate_up, s.F, s.gate_up_pitch, s.out_pitch, q.counts);
    CUDA_CHECK_LAUNCH("swiglu_forward_quantised_kernel");
}

/* Writes dgate_up (N, 2F) and out as swiglu_backward_cuda(), and q.rows (N, 2F) from dgate_up. */
static inline void swiglu_backward_quantised_cuda(QuantisedOutput q, floatX* dgate_up, floatX* out, const floatX* dout,
                                                  const floatX* gate_up, SwigluShape s, cudaStream_t stream) {
    if (s.N == 0) { return; }
    assert(s.F % QUANTISE_WIDTH == 0 && q.rows.pitch % QUANTISE_WIDTH == 0);
    swiglu_backward_quantised_kernel<<<(unsigned)s.N, quantise_threads(2 * (size_t)s.F), 0, stream>>>(
        q.rows, dgate_up, out, dout, gate_up, s.F, s.gate_up_pitch, s.out_pitch, q.counts);
    CUDA_CHECK_LAUNCH("swiglu_backward_quantised_kernel");
}

#endif
