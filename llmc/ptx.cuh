/* ptx.cuh -- the few instructions that CUDA C++ has no name for, one function each: tensor-core products, fragment loads,
 * asynchronous copies, and the packing of two 16-bit numbers. Layouts are those of the PTX ISA ("Matrix Fragments for
 * mma.m16n8k16"); what a kernel builds from them is its own affair.
 *
 * Below sm_80 there is no cp.async and no m16n8k16: the product is two m16n8k8, whose fragments are the halves of the
 * bigger one's, and a kernel brings its tiles through registers (llmc/attention.cuh does).
 */
#ifndef LLMC_PTX_CUH
#define LLMC_PTX_CUH

#include "cuda_common.cuh"

/* The 32-bit address of shared memory that the instructions below take. */
__device__ __forceinline__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Hides where x comes from: what depends on it is computed after this place, not kept in registers from before a loop. */
__device__ __forceinline__ void compute_here(uint32_t& x) { asm volatile("" : "+r"(x)); }

// ---------------------------------------------------------------------------------------------------------------------
// copies from global to shared memory that run behind the program's back (sm_80 and newer)

template <int BYTES>  // 4, 8 or 16; all zeros land where `valid` is false, and nothing is read
__device__ __forceinline__ void copy_async(uint32_t dst, const void* src, bool valid) {
#if __CUDA_ARCH__ >= 800
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(dst), "l"(src), "n"(BYTES), "r"(valid ? BYTES : 0)
                     : "memory");
    }
#else
    __trap();
#endif
}

/* Closes the group of copies started since the last commit. */
__device__ __forceinline__ void copy_async_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/* Waits until at most PENDING of this thread's newest groups are still under way. */
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// 16-bit tensor-core products

#ifndef PRECISION_FP32

/* Two floats rounded to floatX in one register, `lo` in the low half. */
__device__ __forceinline__ uint32_t pack2(float lo, float hi) {
#ifdef PRECISION_BF16
    __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
#else
    __half2 v = __floats2half2_rn(lo, hi);
#endif
    return *reinterpret_cast<uint32_t*>(&v);
}

/* Four 8x8 matrices; lanes 8i .. 8i+7 give the addresses of the rows of matrix i (16 bytes each). */
__device__ __forceinline__ void load_matrix_x4(uint32_t r[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

/* The same, each matrix transposed. */
__device__ __forceinline__ void load_matrix_x4_trans(uint32_t r[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

/* d (16x8, fp32) += a (16x16) b (16x8) */
__device__ __forceinline__ void mma_16x8x16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
#ifdef PRECISION_BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#elif defined(PRECISION_FP16)
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[2]), "r"(a[3]), "r"(b1));
#else
    __trap();
#endif
}

#endif  // PRECISION_FP32
#endif
