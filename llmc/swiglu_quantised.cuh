/* swiglu_quantised.cuh -- swiglu.cuh for products in 8 bits: it writes its output twice, the second time quantised, with the
 * bits of quantise_rows_cuda(). A block takes a row, and converts it once it is complete, from the cache. Bytes a row: forward
 * 7F, backward 12F, 14F with `out` (BF16).
 */
#ifndef LLMC_SWIGLU_QUANTISED_CUH
#define LLMC_SWIGLU_QUANTISED_CUH

#include "llmc/quantise.cuh"  // defines: QuantisedRows, quantise_row, largest_of
#include "llmc/swiglu.cuh"    // defines: swiglu_vector, swiglu_gradient

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

/* Writes out (N, F) as swiglu_forward_cuda(), and q (N, F) from it. F is a multiple of QUANTISE_WIDTH. */
static inline void swiglu_forward_quantised_cuda(QuantisedRows q, floatX* out, const floatX* gate_up, size_t N, int F,
                                                 size_t gate_up_pitch, size_t out_pitch, QuantiseCounts* counts,
                                                 cudaStream_t stream) {
    if (N == 0) { return; }
    assert(F % QUANTISE_WIDTH == 0 && q.pitch % QUANTISE_WIDTH == 0);
    swiglu_forward_quantised_kernel<<<(unsigned)N, quantise_threads((size_t)F), 0, stream>>>(q, out, gate_up, F, gate_up_pitch,
                                                                                             out_pitch, counts);
    CUDA_CHECK_LAUNCH("swiglu_forward_quantised_kernel");
}

/* Writes dgate_up (N, 2F) and out as swiglu_backward_cuda(), and q (N, 2F) from dgate_up. */
static inline void swiglu_backward_quantised_cuda(QuantisedRows q, floatX* dgate_up, floatX* out, const floatX* dout,
                                                  const floatX* gate_up, size_t N, int F, size_t gate_up_pitch,
                                                  size_t out_pitch, QuantiseCounts* counts, cudaStream_t stream) {
    if (N == 0) { return; }
    assert(F % QUANTISE_WIDTH == 0 && q.pitch % QUANTISE_WIDTH == 0);
    swiglu_backward_quantised_kernel<<<(unsigned)N, quantise_threads(2 * (size_t)F), 0, stream>>>(
        q, dgate_up, out, dout, gate_up, F, gate_up_pitch, out_pitch, counts);
    CUDA_CHECK_LAUNCH("swiglu_backward_quantised_kernel");
}

#endif
