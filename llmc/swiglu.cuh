/* swiglu.cuh -- silu(gate) * up on packed gate|up rows on the GPU, and its gradient. The oracle is swiglu.h.
 *
 *   out = gate * s * up                s = 1 / (1 + e^-gate)
 *   dup = dout * gate * s              dgate = dout * up * s * (1 + gate * (1 - s))
 *
 * Backward can write the forward output again beside the gradients (it has gate and up in registers anyway), so that
 * recomputing `out` costs its store alone; and it may run in place, dgate_up over gate_up.
 * Bytes a row: forward 3F, backward 5F, 6F with `out` (times the size of an element).
 */
#ifndef LLMC_SWIGLU_CUH
#define LLMC_SWIGLU_CUH

#include "cuda_common.cuh"

__device__ __forceinline__ float sigmoid_x(float x) {
#ifdef PRECISION_FP32
    return 1.0f / (1.0f + expf(-x));
#else
    return __fdividef(1.0f, 1.0f + __expf(-x));  // e^-x = inf gives 0, as it should
#endif
}

template <int W>
__global__ void swiglu_forward_kernel(floatX* out, const floatX* gate_up, size_t N, int F, size_t gate_up_pitch,
                                      size_t out_pitch) {
    const int f = (blockIdx.y * blockDim.x + threadIdx.x) * W;
    const size_t n = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (f >= F || n >= N) { return; }
    const floatX* row = gate_up + n * gate_up_pitch + f;
    const Vec<floatX, W> gate = load_vec<W>(row), up = load_vec<W>(row + F);
    Vec<floatX, W> y;
#pragma unroll
    for (int k = 0; k < W; k++) {
        const float g = to_float(gate.v[k]);
        y.v[k] = from_float<floatX>(g * sigmoid_x(g) * to_float(up.v[k]));
    }
    store_vec(out + n * out_pitch + f, y);
}

/* dgate_up may be gate_up: each thread reads its elements before it writes them. out NULL: not wanted. */
template <int W>
__global__ void swiglu_backward_kernel(floatX* dgate_up, floatX* out, const floatX* dout, const floatX* gate_up, size_t N,
                                       int F, size_t gate_up_pitch, size_t out_pitch) {
    const int f = (blockIdx.y * blockDim.x + threadIdx.x) * W;
    const size_t n = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (f >= F || n >= N) { return; }
    const floatX* row = gate_up + n * gate_up_pitch + f;
    const Vec<floatX, W> gate = load_vec<W>(row), up = load_vec<W>(row + F), d = load_vec<W>(dout + n * out_pitch + f);
    Vec<floatX, W> dgate, dup, y;
#pragma unroll
    for (int k = 0; k < W; k++) {
        const float g = to_float(gate.v[k]), u = to_float(up.v[k]), dy = to_float(d.v[k]);
        const float s = sigmoid_x(g);
        y.v[k] = from_float<floatX>(g * s * u);
        dup.v[k] = from_float<floatX>(dy * g * s);
        dgate.v[k] = from_float<floatX>(dy * u * s * (1.0f + g * (1.0f - s)));
    }
    floatX* drow = dgate_up + n * gate_up_pitch + f;
    store_vec(drow, dgate);
    store_vec(drow + F, dup);
    if (out) { store_vec(out + n * out_pitch + f, y); }
}

/* Threads of a block over the vectors of a row (x) and rows (y), and the grid that covers (N, F): rows along x, which
 * may be 2^31 blocks long. */
static inline void swiglu_grid(dim3* grid, dim3* block, size_t N, int F, bool wide) {
    const size_t vectors = wide ? (size_t)F / VECTOR<floatX> : (size_t)F;
    const size_t x = size_min(256, round_up(vectors, 32));
    *block = dim3((unsigned)x, (unsigned)(256 / x));
    *grid = dim3((unsigned)ceil_div(N, 256 / x), (unsigned)ceil_div(vectors, x));
}

/* out: (N, F), out_pitch   gate_up: (N, 2F) gate then up, gate_up_pitch */
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

/* dgate_up: (N, 2F) =, gate_up_pitch, may be gate_up   out: (N, F) = the forward output again, out_pitch, or NULL
 * dout: (N, F), out_pitch   gate_up: (N, 2F), gate_up_pitch */
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
