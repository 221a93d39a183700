/* swiglu.cuh -- silu(gate) * up on packed gate|up rows on the GPU, and its gradient. The oracle is swiglu.h, where the formulas
 * stand.
 *
 * Backward can also write the forward output again. It has gate and up in registers anyway, so recomputing `out` costs only its
 * store. It may run in place, dgate_up over gate_up.
 * Bytes a row: forward 3F, backward 5F, 6F with `out` (times the size of an element). Steps: dev/cuda/swiglu.cu.
 */
#ifndef LLMC_SWIGLU_CUH
#define LLMC_SWIGLU_CUH

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

/* Writes out (N, F), out_pitch, from gate_up (N, 2F), gate then up, gate_up_pitch. */
static inline void swiglu_forward_cuda(floatX* out, const floatX* gate_up, size_t N, int F, size_t gate_up_pitch,
                                       size_t out_pitch, cudaStream_t stream) {
    if (N == 0) { return; }
    const bool wide = F % VECTOR<floatX> == 0;
    dim3 grid, block;
    swiglu_grid(&grid, &block, N, F, wide);
    if (wide) {
        swiglu_forward_kernel<VECTOR<floatX>><<<grid, block, 0, stream>>>(out, gate_up, N, F, gate_up_pitch, out_pitch);
    } else {
        swiglu_forward_kernel<1><<<grid, block, 0, stream>>>(out, gate_up, N, F, gate_up_pitch, out_pitch);
    }
    CUDA_CHECK_LAUNCH("swiglu_forward_kernel");
}

/* Writes dgate_up (N, 2F), gate_up_pitch, which may be gate_up, and out (N, F), out_pitch, unless it is NULL: the forward
 * output again. dout: (N, F), out_pitch   gate_up: (N, 2F), gate_up_pitch */
static inline void swiglu_backward_cuda(floatX* dgate_up, floatX* out, const floatX* dout, const floatX* gate_up, size_t N,
                                        int F, size_t gate_up_pitch, size_t out_pitch, cudaStream_t stream) {
    if (N == 0) { return; }
    const bool wide = F % VECTOR<floatX> == 0;
    dim3 grid, block;
    swiglu_grid(&grid, &block, N, F, wide);
    if (wide) {
        swiglu_backward_kernel<VECTOR<floatX>>
            <<<grid, block, 0, stream>>>(dgate_up, out, dout, gate_up, N, F, gate_up_pitch, out_pitch);
    } else {
        swiglu_backward_kernel<1><<<grid, block, 0, stream>>>(dgate_up, out, dout, gate_up, N, F, gate_up_pitch, out_pitch);
    }
    CUDA_CHECK_LAUNCH("swiglu_backward_kernel");
}

#endif
