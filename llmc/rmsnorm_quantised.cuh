/* rmsnorm_quantised.cuh -- rmsnorm_forward_cuda() for products in 8 bits: it writes its output twice, the second time
 * quantised, with the bits of quantise_rows_cuda(). A block takes a row, with the same warps and so with the same sums. It
 * converts the row once it is complete, from the cache. Bytes a row: 5C (BF16).
 */
#ifndef LLMC_RMSNORM_QUANTISED_CUH
#define LLMC_RMSNORM_QUANTISED_CUH

#include "llmc/quantise.cuh"  // defines: QuantisedRows, quantise_row, largest_of
#include "llmc/rmsnorm.cuh"   // defines: rmsnorm_block, rmsnorm_forward_rows

template <int K>
__global__ void __launch_bounds__(RMSNORM_THREADS)
    rmsnorm_forward_quantised_kernel(QuantisedRows q, floatX* out, float* rstd, const floatX* x, const floatX* weight,
                                     RowShape rows, float eps, QuantiseCounts* counts) {
    constexpr int W = VECTOR<floatX>;
    uint32_t largest = 0;
    rmsnorm_forward_rows<W, K>(out, rstd, x, weight, rows.N, rows.C, eps, rows.pitch,
                               [&](const Vec<floatX, W>& o) { largest = largest_of(o, largest); });
    quantise_row(q, blockIdx.x, out + blockIdx.x * rows.pitch, rows.C, largest, counts);
}

/* Writes out (rows) and rstd (N) as rmsnorm_forward_cuda(), and q (rows) from out. C is a multiple of QUANTISE_WIDTH. */
static inline void rmsnorm_forward_quantised_cuda(QuantisedRows q, floatX* out, float* rstd, const floatX* x,
                                                  const floatX* weight, RowShape rows, float eps, QuantiseCounts* counts,
                                                  cudaStream_t stream) {
    if (rows.N == 0) { return; }
    assert(rows.C % QUANTISE_WIDTH == 0 && q.pitch % QUANTISE_WIDTH == 0);
    void (*const kernels[])(QuantisedRows, floatX*, float*, const floatX*, const floatX*, RowShape, float, QuantiseCounts*) = {
        rmsnorm_forward_quantised_kernel<1>, rmsnorm_forward_quantised_kernel<2>, rmsnorm_forward_quantised_kernel<3>,
        rmsnorm_forward_quantised_kernel<4>};
    static_assert(sizeof kernels / sizeof *kernels == RMSNORM_PACKS, "a kernel for each number of vectors");
    RmsnormBlock b = rmsnorm_block(rows.C, 32);
    b.block.z = 1;
    kernels[b.packs - 1]<<<(unsigned)rows.N, b.block, 0, stream>>>(q, out, rstd, x, weight, rows, eps, counts);
    CUDA_CHECK_LAUNCH("rmsnorm_forward_quantised_kernel");
}

#endif
