/* ptx.cuh -- the few instructions that CUDA C++ has no name for, one function each: tensor-core products, fragment loads,
 * asynchronous copies, barriers in shared memory, and the packing of two 16-bit numbers. Layouts are those of the PTX ISA
 * ("Matrix Fragments for mma.m16n8k16", "Asynchronous Warpgroup Level Matrix Shared Memory Layout"); what a kernel builds
 * from them is its own affair.
 *
 * Below sm_80 there is no cp.async and no m16n8k16: the product is two m16n8k8, whose fragments are the halves of the
 * bigger one's, and a kernel brings its tiles through registers. The last section exists in code for sm_90a alone.
 * A kernel that needs what its architecture lacks compiles all the same, and must not run: copy_async, barrier_init and
 * barrier_wait, without which no such kernel gets far, trap there; the others do nothing.
 * dev/test/test_wgmma.cu checks the last section instruction by instruction.
 */
#ifndef LLMC_PTX_CUH
#define LLMC_PTX_CUH

#include "llmc/gpu/cuda_common.cuh"

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

// ---------------------------------------------------------------------------------------------------------------------
// sm_90a: barriers that count bytes, copies by the tensor memory accelerator, products of four warps

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define PTX_HAS_SM90A 1
#else
#define PTX_HAS_SM90A 0
#endif

/* A barrier is 8 bytes of shared memory. A phase of it ends when `arrivals` threads have arrived and all bytes that were
 * announced are there; the parity of the first phase is 0. */
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
#if PTX_HAS_SM90A
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#else
    __trap();
#endif
}

/* Makes initialised barriers known to the copy engine; for the other threads a __syncthreads() follows. */
__device__ __forceinline__ void barrier_init_done() {
#if PTX_HAS_SM90A
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
#if PTX_HAS_SM90A
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

/* Arrives, and announces bytes that copies will bring before the phase may end. */
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
#if PTX_HAS_SM90A
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}

#ifdef BARRIER_TIMEOUT
__device__ unsigned long long barrier_stuck;  // the first wait that took too long: block, thread, barrier, parity, a 1
#endif

/* Waits for the end of the phase of that parity: returns at once when the phase after it is under way. What was written
 * before the arrivals, by threads or by the copy engine, is visible afterwards. With BARRIER_TIMEOUT (tests) a wait of more
 * than that many nanoseconds leaves its name in barrier_stuck and gives up, and so do all others: results are wrong, but it
 * ends. */
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
#if PTX_HAS_SM90A
#ifdef BARRIER_TIMEOUT
    uint64_t start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    for (uint32_t done = 0; !done && *(volatile unsigned long long*)&barrier_stuck == 0;) {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        if (!done && now - start > BARRIER_TIMEOUT) {
            atomicCAS(&barrier_stuck, 0ull,
                      (unsigned long long)blockIdx.x << 48 | (unsigned long long)threadIdx.x << 32 | (uint64_t)barrier << 2 |
                          parity << 1 | 1);
        }
    }
#else
    asm volatile(
        "{.reg .pred p;\n"
        "WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@!p bra WAIT;}" ::"r"(barrier),
        "r"(parity)
        : "memory");
#endif
#else
    __trap();
#endif
}

/* Brings the box of a tensor map (dimensions in the map's order, from element c0, block c1 ...) to dst and tells the barrier;
 * elements outside of the tensor become zeros. One thread calls it. */
__device__ __forceinline__ void copy_box_4d(uint32_t dst, const void* map, int c0, int c1, int c2, int c3, uint32_t barrier) {
#if PTX_HAS_SM90A
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
            dst),
        "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier)
        : "memory");
#endif
}

/* Brings `bytes` bytes; these, src and dst are multiples of 16. One thread calls it. */
__device__ __forceinline__ void copy_bytes(uint32_t dst, const void* src, uint32_t bytes, uint32_t barrier) {
#if PTX_HAS_SM90A
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src),
                 "r"(bytes), "r"(barrier)
                 : "memory");
#endif
}

/* Registers a thread of the calling warpgroup may use from here on; those given up are for the others. */
template <int N>
__device__ __forceinline__ void registers_lower() {
#if PTX_HAS_SM90A
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
#endif
}
template <int N>
__device__ __forceinline__ void registers_raise() {
#if PTX_HAS_SM90A
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
#endif
}

#ifndef PRECISION_FP32

/* wgmma: d (64 x N, fp32) = or += a (64 x 16) b (16 x N) by the four warps of a warpgroup, asynchronously. The life of a
 * product:
 *
 *   wgmma_fence();  wgmma_...(d, ...);  wgmma_...(d, ...);  wgmma_commit();  wgmma_wait<pending groups>();  wgmma_hold(d);
 *
 * Between the first and the last of these nobody may touch d or a's registers; wgmma_hold tells the compiler that d changed
 * only then. Warp w of the group has rows 16 w .. 16 w + 15 of d in the layout of mma_16x8x16: with g = lane / 4 and
 * t = lane % 4, d[4 n .. 4 n + 3] are the elements (g, 8 n + 2 t), (g, 8 n + 2 t + 1), (g + 8, 8 n + 2 t) and
 * (g + 8, 8 n + 2 t + 1). a in registers is laid out as there, too.
 *
 * Operands in shared memory lie in blocks of 64 columns: rows of 128 bytes, of which chunk c (16 bytes) of row r is stored at
 * chunk c ^ (r % 8), the block starting at a multiple of 1024 bytes ("128B swizzle"). The products below take a descriptor's
 * lower half; the upper one is the same for all: 1024 bytes from eight rows to the next eight, and the kind of swizzle.
 *   matrix_rows     the tile's rows are rows of a or columns of b: the sum goes along a row. 16 columns on: + 2
 *   matrix_columns  the tile's rows are what is summed over: b is the tile itself. 16 rows on: + 128. block_bytes: to the next
 *                   64 columns */
enum { MATRIX_UPPER_HALF = 0x40000000 | 1024 >> 4 };
__device__ __forceinline__ uint32_t matrix_rows(uint32_t address) { return address >> 4 | 1 << 16; }
__device__ __forceinline__ uint32_t matrix_columns(uint32_t address, uint32_t block_bytes) {
    return address >> 4 | block_bytes >> 4 << 16;
}

/* Orders what was done with registers before against the products that follow. */
__device__ __forceinline__ void wgmma_fence() {
#if PTX_HAS_SM90A
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

/* Closes the group of products issued since the last commit. */
__device__ __forceinline__ void wgmma_commit() {
#if PTX_HAS_SM90A
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

/* Waits until at most PENDING of the newest groups are still under way. */
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
#if PTX_HAS_SM90A
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#endif
}

template <int N>
__device__ __forceinline__ void wgmma_hold(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) { asm volatile("" : "+f"(d[i])::"memory"); }
}

// clang-format off
#ifdef PRECISION_BF16
#define WGMMA_TYPES ".f32.bf16.bf16 "
#else
#define WGMMA_TYPES ".f32.f16.f16 "
#endif
#define WGMMA_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_NAMES_32 WGMMA_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_NAMES_48 WGMMA_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_NAMES_64 WGMMA_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_D8(i) WGMMA_D4(i), WGMMA_D4(i + 4)
#define WGMMA_D_32 WGMMA_D8(0), WGMMA_D8(8), WGMMA_D8(16), WGMMA_D8(24)
#define WGMMA_D_48 WGMMA_D_32, WGMMA_D8(32), WGMMA_D8(40)
#define WGMMA_D_64 WGMMA_D_48, WGMMA_D8(48), WGMMA_D8(56)
// x0, x1 ...: the numbers of the operands behind d. The ones are the signs of a and b.
#define WGMMA_SS(N, REGS, x0, x1, x2, x3)                                                                                   \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #x2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16" WGMMA_TYPES        \
                 "{" WGMMA_NAMES_##REGS "}, %" #x0 ", %" #x1 ", p, 1, 1, 0, %" #x3 ";}"                                     \
                 : WGMMA_D_##REGS : "l"(a_desc), "l"(b_desc), "r"(add), "n"(B_COLUMNS))
#define WGMMA_RS(N, REGS, x0, x1, x2, x3, x4, x5, x6)                                                                       \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #x5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16" WGMMA_TYPES        \
                 "{" WGMMA_NAMES_##REGS "}, {%" #x0 ", %" #x1 ", %" #x2 ", %" #x3 "}, %" #x4 ", p, 1, 1, %" #x6 ";}"        \
                 : WGMMA_D_##REGS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_desc), "r"(add), "n"(B_COLUMNS))
// clang-format on

/* d += a b where `add`, else d = a b; a by its rows, b by matrix_columns where B_COLUMNS is 1 and else by matrix_rows. */
template <int N, int B_COLUMNS>
__device__ __forceinline__ void wgmma_shared(float (&d)[N / 2], uint32_t a, uint32_t b, int add) {
#if PTX_HAS_SM90A
    const uint64_t a_desc = (uint64_t)MATRIX_UPPER_HALF << 32 | a, b_desc = (uint64_t)MATRIX_UPPER_HALF << 32 | b;
    static_assert(N == 64 || N == 96 || N == 128, "no such product");
    if constexpr (N == 64) {
        WGMMA_SS(64, 32, 32, 33, 34, 35);
    } else if constexpr (N == 96) {
        WGMMA_SS(96, 48, 48, 49, 50, 51);
    } else {
        WGMMA_SS(128, 64, 64, 65, 66, 67);
    }
#endif
}

/* The same with a in registers. */
template <int N, int B_COLUMNS>
__device__ __forceinline__ void wgmma_registers(float (&d)[N / 2], const uint32_t (&a)[4], uint32_t b, int add) {
#if PTX_HAS_SM90A
    const uint64_t b_desc = (uint64_t)MATRIX_UPPER_HALF << 32 | b;
    static_assert(N == 64 || N == 96 || N == 128, "no such product");
    if constexpr (N == 64) {
        WGMMA_RS(64, 32, 32, 33, 34, 35, 36, 37, 38);
    } else if constexpr (N == 96) {
        WGMMA_RS(96, 48, 48, 49, 50, 51, 52, 53, 54);
    } else {
        WGMMA_RS(128, 64, 64, 65, 66, 67, 68, 69, 70);
    }
#endif
}

#endif  // PRECISION_FP32
#endif
