/* ptx.cuh -- the few instructions that CUDA C++ has no name for, one function each: tensor-core products, fragment loads,
 * asynchronous copies, barriers in shared memory, and the packing of two 16-bit numbers. Layouts are the PTX ISA's
 * ("Matrix Fragments for mma.m16n8k16", "Asynchronous Warpgroup Level Matrix Shared Memory Layout").
 *
 * Below sm_80, cp.async and m16n8k16 do not exist. There the product is two m16n8k8, whose fragments are halves of the larger
 * product's fragments, and a kernel loads its tiles through registers, as attention_mma.cuh does. The last section exists only
 * in code for sm_90a. A kernel that needs what its architecture lacks still compiles but must not run: copy_async, barrier_init
 * and barrier_wait, which every such kernel calls early, trap there; the others do nothing.
 * dev/test/cuda/test_wgmma.cu checks the last section instruction by instruction.
 */
#ifndef LLMC_PTX_CUH
#define LLMC_PTX_CUH

#include "llmc/cuda/cuda_common.cuh"

/* Returns the 32-bit address of shared memory that the instructions below take. */
__device__ __forceinline__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Return 1 / x and 1 / sqrt(x) for a normal number x, with relative errors of about 2^-23. */
__device__ __forceinline__ float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float inverse_root_fast(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Hides x's origin from the compiler. So it computes values that depend on x here, and keeps none of them in registers from
 * before a loop. */
__device__ __forceinline__ void compute_here(uint32_t& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void compute_here(size_t& x) { asm volatile("" : "+l"(x)); }

/* Waits until so many threads of the block, whole warps, have come to barrier `id` (1 to 15; 0 belongs to __syncthreads). */
__device__ __forceinline__ void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Returns the nanoseconds of the card's clock. */
__device__ __forceinline__ uint64_t card_clock(void) {
    uint64_t nanoseconds;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
}

// ---------------------------------------------------------------------------------------------------------------------
// asynchronous copies from global to shared memory (sm_80 and newer)

template <int BYTES>  // 4, 8 or 16; if `valid` is false it writes zeros and reads nothing
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

/* Waits until at most the PENDING newest groups of this thread are still in flight. */
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// 16-bit tensor-core products

#ifndef PRECISION_FP32

/* Rounds two floats to floatX and packs them into one register, `lo` in the low half. */
__device__ __forceinline__ uint32_t pack2(float lo, float hi) {
#ifdef PRECISION_BF16
    __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
#else
    __half2 v = __floats2half2_rn(lo, hi);
#endif
    return *reinterpret_cast<uint32_t*>(&v);
}

/* Returns what pack2 packed. */
__device__ __forceinline__ float2 unpack2(uint32_t x) {
#ifdef PRECISION_BF16
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
#else
    return __half22float2(*reinterpret_cast<__half2*>(&x));
#endif
}

/* Loads four 8x8 matrices; lanes 8i .. 8i+7 give the addresses of the rows of matrix i (16 bytes each). */
__device__ __forceinline__ void load_matrix_x4(uint32_t r[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

/* Does the same, with each matrix transposed. */
__device__ __forceinline__ void load_matrix_x4_trans(uint32_t r[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

/* Computes d (16x8, fp32) += a (16x16) b (16x8). */
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
// sm_90a: barriers that count bytes, copies by the tensor memory accelerator (TMA), products of four warps

// ASM_SM90: an instruction in code for sm_90a, nothing in other code
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define PTX_HAS_SM90A 1
#define ASM_SM90(...) asm volatile(__VA_ARGS__)
#else
#define PTX_HAS_SM90A 0
#define ASM_SM90(...)
#endif

/* Initializes a barrier, 8 bytes of shared memory. A phase ends when `arrivals` threads have arrived and all announced bytes
 * have been written. The parity of the first phase is 0. */
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
#if PTX_HAS_SM90A
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#else
    __trap();
#endif
}

/* Makes initialized barriers visible to TMA; for the other threads a __syncthreads() must follow. */
__device__ __forceinline__ void barrier_init_done() { ASM_SM90("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    ASM_SM90("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Arrives, and announces bytes that copies must write before the phase can end. */
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    ASM_SM90("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

/* Arrives at the barrier at the same place in the shared memory of a block of the cluster. Only for what this thread has read:
 * what it wrote need not be visible there. So the arrival has the scope of a block, as CUTLASS has it. By the letter of the
 * PTX ISA, order between blocks needs .release.cluster here and .acquire.cluster at the wait; their cost is not known. */
__device__ __forceinline__ void barrier_arrive_in(uint32_t barrier, uint32_t block) {
    ASM_SM90(
        "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(barrier),
        "r"(block)
        : "memory");
}

constexpr int CLUSTER_BLOCKS = 2;  // neighboring blocks of a kernel that runs in clusters

/* Waits for all threads of the cluster that have not ended. Their earlier writes are visible afterwards. */
__device__ __forceinline__ void cluster_sync() {
    ASM_SM90("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

#ifdef BARRIER_TIMEOUT
__device__ unsigned long long barrier_stuck;  // the first wait that timed out: block, thread, what it waited for, 1

/* Returns whether a wait since `start` is to end: it is too long, or another one was. what: 31 bits */
__device__ __forceinline__ bool barrier_gives_up(uint64_t start, uint32_t what) {
    if (*(volatile unsigned long long*)&barrier_stuck != 0) { return true; }
    if (card_clock() - start <= BARRIER_TIMEOUT) { return false; }
    atomicCAS(&barrier_stuck, 0ull,
              (unsigned long long)blockIdx.x << 48 | (unsigned long long)threadIdx.x << 32 | (uint64_t)what << 1 | 1);
    return true;
}
#endif

/* Waits for the end of the phase of that parity; returns at once if the next phase has begun. Afterwards all that threads or
 * TMA wrote before the arrivals is visible. With BARRIER_TIMEOUT (tests), a wait of more than that many nanoseconds records
 * itself in barrier_stuck and gives up, and so do all other waits: results are wrong, but the kernel ends. */
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
#if PTX_HAS_SM90A
#ifdef BARRIER_TIMEOUT
    const uint64_t start = card_clock();
    for (uint32_t done = 0; !done && !barrier_gives_up(start, barrier << 1 | parity);) {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
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

/* Copies a box of a tensor map (coordinates c0 to c3 in the map's order) to dst and reports the bytes to the barrier; elements
 * outside the tensor become zeros. One thread calls it. */
__device__ __forceinline__ void copy_box_4d(uint32_t dst, const void* map, int c0, int c1, int c2, int c3, uint32_t barrier) {
    ASM_SM90(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
            dst),
        "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier)
        : "memory");
}

/* Does the same in each block of the cluster whose bit is set in `blocks`. The box goes to the same place in each block's
 * shared memory, and the barrier at the same place in each block counts the bytes. */
__device__ __forceinline__ void copy_box_4d_to(uint32_t blocks, uint32_t dst, const void* map, int c0, int c1, int c2, int c3,
                                               uint32_t barrier) {
    ASM_SM90(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(dst),
        "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier), "h"((uint16_t)blocks)
        : "memory");
}

/* Copies `bytes` bytes. bytes, src and dst are multiples of 16. One thread calls it. */
__device__ __forceinline__ void copy_bytes(uint32_t dst, const void* src, uint32_t bytes, uint32_t barrier) {
    ASM_SM90("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src),
             "r"(bytes), "r"(barrier)
             : "memory");
}

/* Makes this thread's reads and writes of shared memory visible to TMA and wgmma. If another thread issues these, a barrier
 * must follow. */
__device__ __forceinline__ void fence_async_readers() { ASM_SM90("fence.proxy.async.shared::cta;" ::: "memory"); }

/* Copies from shared memory to a box of a tensor map; elements outside the tensor are dropped. One thread calls it. */
__device__ __forceinline__ void store_box_4d(const void* map, uint32_t src, int c0, int c1, int c2, int c3) {
    ASM_SM90("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(map), "r"(c0), "r"(c1),
             "r"(c2), "r"(c3), "r"(src)
             : "memory");
}

/* Closes the group of boxes that this thread stored since the last commit. */
__device__ __forceinline__ void store_commit() { ASM_SM90("cp.async.bulk.commit_group;" ::: "memory"); }

/* Waits until at most the PENDING newest groups of this thread still read shared memory. */
template <int PENDING>
__device__ __forceinline__ void store_wait() {
    ASM_SM90("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

/* Waits until the flag, which other blocks set, is at least n. Their writes before they set it are visible afterwards. */
__device__ __forceinline__ void flag_wait(const uint32_t* flag, uint32_t n) {
#if PTX_HAS_SM90A
#ifdef BARRIER_TIMEOUT
    const uint64_t start = card_clock();
#endif
    for (uint32_t now = 0;;) {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(flag) : "memory");
        if (now >= n) { return; }
#ifdef BARRIER_TIMEOUT
        if (barrier_gives_up(start, n << 1)) { return; }
#endif
    }
#endif
}

/* Sets a flag after all writes that this thread made or has seen. */
__device__ __forceinline__ void flag_set(uint32_t* flag, uint32_t n) {
    ASM_SM90("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(n) : "memory");
}

/* Adds four floats to four floats in memory, at a multiple of 16 bytes, without waiting. */
__device__ __forceinline__ void add_in_memory(float* to, float4 x) {
    ASM_SM90("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
             : "memory");
}

/* Set the registers that each thread of the calling warpgroup may use from here on; other warpgroups can take the registers
 * given up. */
template <int N>
__device__ __forceinline__ void registers_lower() {
    ASM_SM90("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void registers_raise() {
    ASM_SM90("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

#ifndef PRECISION_FP32

/* Stores four 8x8 matrices, the reverse of load_matrix_x4. */
__device__ __forceinline__ void store_matrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    ASM_SM90("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1), "r"(r2),
             "r"(r3)
             : "memory");
}

/* Stores the same with each of the four matrices transposed. */
__device__ __forceinline__ void store_matrix_x4_transposed(uint32_t address, const uint32_t (&r)[4]) {
    ASM_SM90("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
             "r"(r[2]), "r"(r[3])
             : "memory");
}

/* wgmma: the four warps of a warpgroup compute d (64 x N, fp32) = or += a (64 x 16) b (16 x N) asynchronously. The sequence of
 * calls:
 *
 *   wgmma_fence();  wgmma_...(d, ...);  wgmma_...(d, ...);  wgmma_commit();  wgmma_wait<pending groups>();  wgmma_hold(d);
 *
 * From the first to the last of these calls, do not touch d or a's registers; wgmma_hold makes the compiler believe that d
 * changed only at that point. Warp w of the group has rows 16 w .. 16 w + 15 of d in the layout of mma_16x8x16: with g = lane /
 * 4 and t = lane % 4, d[4 n .. 4 n + 3] are the elements (g, 8 n + 2 t), (g, 8 n + 2 t + 1), (g + 8, 8 n + 2 t) and (g + 8, 8 n
 * + 2 t + 1). An a in registers has the layout of mma_16x8x16 as well.
 *
 * Operands in shared memory lie in blocks of 64 columns, in rows of 128 bytes. Chunk c (16 bytes) of row r is stored at chunk
 * c ^ (r % 8), and a block starts at a multiple of 1024 bytes ("128B swizzle"). The products below take a descriptor's lower
 * half. The upper half is the same for all: 1024 bytes from eight rows to the next eight, and the kind of swizzle.
 *   matrix_rows     the tile's rows are rows of a or columns of b, so sums go along a row. 16 columns further: + 2
 *   matrix_columns  sums go over the tile's rows, so b is the tile itself and a its transpose. 16 rows further: + 128.
 *                   block_bytes: distance to the next 64 columns
 * A descriptor has room for 18 bits of an address. In a cluster, the bits above them hold the block's rank: matrix_address()
 * drops them. */
enum { MATRIX_UPPER_HALF = 0x40000000 | 1024 >> 4 };
__device__ __forceinline__ uint32_t matrix_address(uint32_t address) { return address & 0x3ffff; }
__device__ __forceinline__ uint32_t matrix_rows(uint32_t address) { return address >> 4 | 1 << 16; }
__device__ __forceinline__ uint32_t matrix_columns(uint32_t address, uint32_t block_bytes) {
    return address >> 4 | block_bytes >> 4 << 16;
}

/* Orders earlier accesses to registers before the products that follow. */
__device__ __forceinline__ void wgmma_fence() { ASM_SM90("wgmma.fence.sync.aligned;" ::: "memory"); }

/* Closes the group of products issued since the last commit. */
__device__ __forceinline__ void wgmma_commit() { ASM_SM90("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/* Waits until at most the PENDING newest groups are still in flight. */
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    ASM_SM90("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
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
#define WGMMA_NAMES_80 WGMMA_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_NAMES_96 WGMMA_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_NAMES_112 WGMMA_NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"                                       \
    ", %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_NAMES_128 WGMMA_NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119"                                  \
    ", %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_D8(i) WGMMA_D4(i), WGMMA_D4(i + 4)
#define WGMMA_D_16 WGMMA_D8(0), WGMMA_D8(8)
#define WGMMA_D_32 WGMMA_D8(0), WGMMA_D8(8), WGMMA_D8(16), WGMMA_D8(24)
#define WGMMA_D_48 WGMMA_D_32, WGMMA_D8(32), WGMMA_D8(40)
#define WGMMA_D_64 WGMMA_D_48, WGMMA_D8(48), WGMMA_D8(56)
#define WGMMA_D_96 WGMMA_D_64, WGMMA_D8(64), WGMMA_D8(72), WGMMA_D8(80), WGMMA_D8(88)
#define WGMMA_D_128 WGMMA_D_96, WGMMA_D8(96), WGMMA_D8(104), WGMMA_D8(112), WGMMA_D8(120)
// x0, x1 ...: the numbers of the operands after d. The two ones are the signs of a and b.
#define WGMMA_SS(N, REGS, x0, x1, x2, x3, x4)                                                                               \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #x2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16" WGMMA_TYPES        \
                 "{" WGMMA_NAMES_##REGS "}, %" #x0 ", %" #x1 ", p, 1, 1, %" #x4 ", %" #x3 ";}"                              \
                 : WGMMA_D_##REGS : "l"(a_desc), "l"(b_desc), "r"(add), "n"(B_COLUMNS), "n"(A_COLUMNS))
#define WGMMA_RS(N, REGS, x0, x1, x2, x3, x4, x5, x6)                                                                       \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #x5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16" WGMMA_TYPES        \
                 "{" WGMMA_NAMES_##REGS "}, {%" #x0 ", %" #x1 ", %" #x2 ", %" #x3 "}, %" #x4 ", p, 1, 1, %" #x6 ";}"        \
                 : WGMMA_D_##REGS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_desc), "r"(add), "n"(B_COLUMNS))
// clang-format on

/* Computes d += a b if `add`, otherwise d = a b. a is given by matrix_columns if A_COLUMNS is 1, otherwise by matrix_rows; b
 * likewise. */
template <int N, int B_COLUMNS, int A_COLUMNS = 0>
__device__ __forceinline__ void wgmma_shared(float (&d)[N / 2], uint32_t a, uint32_t b, int add) {
#if PTX_HAS_SM90A
    const uint64_t a_desc = (uint64_t)MATRIX_UPPER_HALF << 32 | a, b_desc = (uint64_t)MATRIX_UPPER_HALF << 32 | b;
    static_assert(N == 32 || N == 64 || N == 128 || N == 256, "no such product");
    if constexpr (N == 32) {
        WGMMA_SS(32, 16, 16, 17, 18, 19, 20);
    } else if constexpr (N == 64) {
        WGMMA_SS(64, 32, 32, 33, 34, 35, 36);
    } else if constexpr (N == 128) {
        WGMMA_SS(128, 64, 64, 65, 66, 67, 68);
    } else {
        WGMMA_SS(256, 128, 128, 129, 130, 131, 132);
    }
#endif
}

/* Does the same with a in registers. */
template <int N, int B_COLUMNS>
__device__ __forceinline__ void wgmma_registers(float (&d)[N / 2], const uint32_t (&a)[4], uint32_t b, int add) {
#if PTX_HAS_SM90A
    const uint64_t b_desc = (uint64_t)MATRIX_UPPER_HALF << 32 | b;
    static_assert(N == 64 || N == 128, "no such product");
    if constexpr (N == 64) {
        WGMMA_RS(64, 32, 32, 33, 34, 35, 36, 37, 38);
    } else {
        WGMMA_RS(128, 64, 64, 65, 66, 67, 68, 69, 70);
    }
#endif
}

#endif  // PRECISION_FP32
#endif
