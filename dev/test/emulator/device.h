/* device.h -- everything that a kernel uses on the emulated card, as plain C++. It is included in front of every source
 * (-include), and the sources' launches K<<<grid, block, shared, stream>>>(arguments) have been rewritten as
 * [=](auto... a) { K(a...); } % LaunchOf(grid, block, shared, stream)(arguments).
 *
 * The threads of a block are fibers. One runs at a time, until it waits for others at a barrier or in a shuffle. Thread, block
 * and shared memory are globals; static shared memory keeps the values of the block before. So a read that lacks its barrier
 * sees old values, or values that another thread did not yet write. EMULATOR_SEED runs threads in other orders, and another
 * block first. Not emulated: how memory looks to threads that truly run at the same time (fences do nothing); the limits of
 * registers; blocks that wait for later blocks (with EMULATOR_PROCESSORS=1 such a kernel has one block). Only the sanitizer
 * (shadow.cpp) minds more than 48 KiB of dynamic shared memory without cudaFuncSetAttribute. Fast functions such as __expf are
 * exact. dev/doc/emulated-card.md lists what there is of CUDA.
 */
#ifndef EMULATOR_DEVICE_H
#define EMULATOR_DEVICE_H

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <math_constants.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <tuple>
#include <type_traits>
#include <vector>

#include "runtime.h"

// the toolkit's headers above are read as by a host compiler, our own sources as by nvcc for EMULATED_ARCH
#define __CUDACC__
#define __CUDA_ARCH__ EMULATED_ARCH
#if EMULATED_ARCH == 900
#define __CUDA_ARCH_FEAT_SM90_ALL
#endif
#define __CUDA_ARCH_LIST__ EMULATED_ARCH
#define __CUDACC_VER_MAJOR__ (CUDART_VERSION / 1000)
#define __CUDACC_VER_MINOR__ (CUDART_VERSION / 10 % 100)

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __cluster_dims__
#define __cluster_dims__(...)
#undef __shared__
#ifdef EMULATED_SANITIZE  // with a gap behind it
#define __shared__ static __attribute__((aligned(512)))
#else
#define __shared__ static  // one block runs at a time; the dynamic array is emulator_shared
#endif
#undef __forceinline__
#define __forceinline__ inline
#undef __device__
#define __device__
#undef __global__
#ifdef EMULATED_SANITIZE
#define __global__ __attribute__((noinline, flatten))  // g++ does not see what the call of a function stores
#define EMULATED_INLINE __attribute__((always_inline)) inline
#else
#define __global__
#define EMULATED_INLINE inline
#endif

// ---------------------------------------------------------------------------------------------------------------------
// threads

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
extern char* const emulator_shared;  // the dynamic shared memory of the block, full of NaN when it starts

extern uint64_t emulator_block;   // counts the blocks that have run
extern unsigned emulator_thread;  // the number of the running thread in its block

/* Lets the other threads of the block run until one has changed *word from `old`. If all threads of a block wait, it is stuck,
 * and ends the program. from: an address in the code that waits */
void emulator_wait(const unsigned* word, unsigned old, const void* from);

/* Gives a slot to the lanes of `mask`, two words in each argument. All these lanes must call this, except lanes that have
 * ended. Returns the slots of all lanes; they are valid until the exchange after the next. */
struct EmulatorSlot {
    uint32_t words[6];
};
struct EmulatorSlots {
    unsigned lanes;  // that came
    EmulatorSlot at[32];
};
const EmulatorSlots* emulator_exchange(unsigned mask, uint64_t first = 0, uint64_t second = 0, uint64_t third = 0);

/* Waits for the block's threads that have not ended; returns the sum of `x` over them. */
int emulator_barrier(int x);

/* Waits until so many threads of the block have come to barrier `id`. */
void emulator_barrier_of(int id, int threads);

/* A kernel's first words: __launch_bounds__(threads, ...) */
inline void emulator_bounds(unsigned threads, unsigned = 1, unsigned = 1) {
    const unsigned here = blockDim.x * blockDim.y * blockDim.z;
    if (here > threads) { emulator_die("a block of %u threads, where __launch_bounds__ says %u", here, threads); }
}

[[noreturn]] inline void emulated_trap(void) {
    emulator_die("trap in block (%u, %u, %u), thread (%u, %u, %u)", blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x,
                 threadIdx.y, threadIdx.z);
}
#define __trap() emulated_trap()

inline void __syncthreads(void) { emulator_barrier(0); }
inline int __syncthreads_count(int predicate) { return emulator_barrier(predicate != 0); }
inline int __syncthreads_or(int predicate) { return emulator_barrier(predicate != 0) > 0; }
inline int __syncthreads_and(int predicate) { return emulator_barrier(predicate == 0) == 0; }
inline void __threadfence(void) { shadow_fence(); }
inline void __threadfence_block(void) {}
inline void __threadfence_system(void) { shadow_fence(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulator_exchange(mask); }

inline unsigned emulator_lane(void) { return emulator_thread % 32; }

/* Returns the value of lane `from`, or the lane's own value unless `from` is `inside` the lanes that take part. */
template <typename T>
inline T emulator_shuffle(unsigned mask, T value, unsigned from, bool inside = true) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    uint64_t mine = 0;
    memcpy(&mine, &value, sizeof value);
    const EmulatorSlots* all = emulator_exchange(mask, mine);
    if (!inside) { return value; }
    if (!(all->lanes >> from & 1)) { emulator_die("a shuffle reads lane %u, but only the lanes %08x came", from, all->lanes); }
    memcpy(&value, &all->at[from], sizeof value);
    return value;
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int bits, unsigned width = 32) {
    const unsigned from = emulator_lane() ^ (unsigned)bits;
    return emulator_shuffle(mask, value, from, from / width <= emulator_lane() / width);
}
template <typename T>
inline T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
    return emulator_shuffle(mask, value, emulator_lane() / width * width + from % width);
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned by, unsigned width = 32) {
    return emulator_shuffle(mask, value, emulator_lane() - by, emulator_lane() % width >= by);
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned by, unsigned width = 32) {
    return emulator_shuffle(mask, value, emulator_lane() + by, emulator_lane() % width + by < width);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    const EmulatorSlots* all = emulator_exchange(mask, predicate != 0);
    unsigned set = 0;
    for (unsigned lane = 0; lane < 32; lane++) { set |= all->lanes >> lane & 1 && all->at[lane].words[0] ? 1u << lane : 0; }
    return set;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }
/* Combines a value of all lanes that come. */
template <typename T, typename Add>
inline T emulator_reduce(unsigned mask, T value, const Add& add) {
    const EmulatorSlots* all = emulator_exchange(mask, (unsigned)value);
    T sum = value;
    bool first = true;
    for (unsigned lane = 0; lane < 32; lane++) {
        if (!(all->lanes >> lane & 1)) { continue; }
        const T x = (T)all->at[lane].words[0];
        sum = first ? x : add(sum, x), first = false;
    }
    return sum;
}
template <typename T>
inline T __reduce_add_sync(unsigned mask, T value) {
    return emulator_reduce(mask, value, [](T a, T b) { return a + b; });
}
template <typename T>
inline T __reduce_max_sync(unsigned mask, T value) {
    return emulator_reduce(mask, value, [](T a, T b) { return a < b ? b : a; });
}
template <typename T>
inline T __reduce_min_sync(unsigned mask, T value) {
    return emulator_reduce(mask, value, [](T a, T b) { return b < a ? b : a; });
}
unsigned emulator_alive(void);  // lanes of the running warp that have not ended
inline unsigned __activemask(void) { return emulator_alive(); }
constexpr int warpSize = 32;
inline unsigned __match_any_sync(unsigned mask, unsigned value) {
    const EmulatorSlots* all = emulator_exchange(mask, value);
    unsigned same = 0;
    for (unsigned lane = 0; lane < 32; lane++) {
        same |= all->lanes >> lane & 1 && all->at[lane].words[0] == value ? 1u << lane : 0;
    }
    return same;
}

// ---------------------------------------------------------------------------------------------------------------------
// arithmetic

/* Keeps the compiler from contracting a result with the next operation. */
inline float emulated_rounded(float x) {
#ifdef __aarch64__
    asm("" : "+w"(x));
#else
    asm("" : "+x"(x));
#endif
    return x;
}
inline float __fadd_rn(float x, float y) { return emulated_rounded(emulated_rounded(x) + emulated_rounded(y)); }
inline float __fsub_rn(float x, float y) { return emulated_rounded(emulated_rounded(x) - emulated_rounded(y)); }
inline float __fmul_rn(float x, float y) { return emulated_rounded(emulated_rounded(x) * emulated_rounded(y)); }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline void __sincosf(float x, float* s, float* c) { *s = sinf(x), *c = cosf(x); }
/* The C library stores where the sanitizer does not see it. */
inline void emulated_sincosf(float x, float* s, float* c) {
    float sine, cosine;
    sincosf(x, &sine, &cosine);
    *s = sine, *c = cosine;
}
#define sincosf emulated_sincosf
inline unsigned __float_as_uint(float x) {
    unsigned u;
    memcpy(&u, &x, sizeof u);
    return u;
}
inline float __uint_as_float(unsigned u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    unsigned bytes = 0;
    for (int i = 0; i < 4; i++) { bytes |= (((uint64_t)y << 32 | x) >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i; }
    return bytes;
}
inline float rsqrtf(float x) { return (float)(1 / sqrt((double)x)); }
inline double rsqrt(double x) { return 1 / sqrt(x); }
inline float fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __saturatef(float x) { return x > 0 ? x < 1 ? x : 1 : 0; }  // of NaN: 0
inline unsigned __umulhi(unsigned x, unsigned y) { return (unsigned)((uint64_t)x * y >> 32); }
inline int __mulhi(int x, int y) { return (int)((int64_t)x * y >> 32); }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline unsigned __brev(unsigned x) {
    unsigned y = 0;
    for (int i = 0; i < 32; i++) { y |= (x >> i & 1) << (31 - i); }
    return y;
}
inline int __float_as_int(float x) { return (int)__float_as_uint(x); }
inline float __int_as_float(int x) { return __uint_as_float((unsigned)x); }
UNSEEN inline long long clock64(void) {
    static long long clocks;  // each look is later than the one before
    return clocks += 32;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __float2int_rn(float x) { return (int)nearbyintf(x); }
inline int __float2int_rz(float x) { return (int)x; }
inline int __float2int_rd(float x) { return (int)floorf(x); }
inline int __float2int_ru(float x) { return (int)ceilf(x); }
inline unsigned __float2uint_rn(float x) { return (unsigned)nearbyintf(x); }
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }
inline float __double2float_rn(double x) { return (float)x; }
inline float normcdff(float x) { return 0.5f * erfcf(-x * (float)M_SQRT1_2); }
#define __builtin_assume(x) ((void)0)

// of __half and __nv_bfloat16, and of two in a word
#define EMULATED_OF_16_BITS(name, value)    \
    template <typename T>                   \
    inline T name(T x) {                    \
        return (T)(float)(value((float)x)); \
    }
EMULATED_OF_16_BITS(hexp, expf)
EMULATED_OF_16_BITS(hlog, logf)
EMULATED_OF_16_BITS(hsqrt, sqrtf)
EMULATED_OF_16_BITS(hrsqrt, rsqrtf)
EMULATED_OF_16_BITS(htanh, tanhf)
template <typename T>
inline T __hfma(T a, T b, T c) {
    return (T)fmaf((float)a, (float)b, (float)c);
}
template <typename T>
inline T __hfma2(T a, T b, T c) {
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}

template <typename A, typename B>
inline std::common_type_t<A, B> min(A a, B b) {
    typedef std::common_type_t<A, B> T;
    if constexpr (std::is_floating_point_v<T>) { return std::fmin((T)a, (T)b); }  // a number, if one of them is NaN
    return (T)b < (T)a ? (T)b : (T)a;
}
template <typename A, typename B>
inline std::common_type_t<A, B> max(A a, B b) {
    typedef std::common_type_t<A, B> T;
    if constexpr (std::is_floating_point_v<T>) { return std::fmax((T)a, (T)b); }
    return (T)a < (T)b ? (T)b : (T)a;
}

// ---------------------------------------------------------------------------------------------------------------------
// memory

template <typename T>
inline T __ldg(const T* p) {
    return *p;
}
template <typename T>
inline void __stcs(T* p, T x) {
    *p = x;
}
#define __ldca __ldg
#define __ldcg __ldg
#define __ldcs __ldg
#define __stcg __stcs
#define __stwb __stcs

#define EMULATED_ATOMIC(name, changed)             \
    template <typename T>                          \
    UNSEEN T name(T* p, std::common_type_t<T> x) { \
        shadow_atomic(p, sizeof *p, SHADOW_HERE);  \
        const T old = *p;                          \
        *p = (changed);                            \
        return old;                                \
    }
EMULATED_ATOMIC(atomicAdd, old + x)
EMULATED_ATOMIC(atomicMax, old < x ? x : old)
EMULATED_ATOMIC(atomicMin, x < old ? x : old)
EMULATED_ATOMIC(atomicExch, x)
EMULATED_ATOMIC(atomicAnd, old& x)
EMULATED_ATOMIC(atomicOr, old | x)
EMULATED_ATOMIC(atomicXor, old ^ x)
EMULATED_ATOMIC(atomicInc, old < x ? old + 1 : 0)
EMULATED_ATOMIC(atomicDec, old&& old <= x ? old - 1 : x)
template <typename T>
UNSEEN T atomicCAS(T* p, std::common_type_t<T> expected, std::common_type_t<T> x) {
    shadow_atomic(p, sizeof *p, SHADOW_HERE);
    const T old = *p;
    if (!memcmp(&old, &expected, sizeof old)) { *p = x; }
    return old;
}
template <typename T>
inline T atomicSub(T* p, std::common_type_t<T> x) {
    return atomicAdd(p, (T)-x);
}

// asynchronous work of a thread, in groups. It is done when the thread waits for its group, so a missing wait shows
struct EmulatedGroups {
    typedef std::vector<std::function<void()>> Group;
    uint64_t block;  // that it belongs to
    Group open;
    std::deque<Group> closed;

    /* Forgets what an earlier block left. */
    void enter_block() {
        if (block != emulator_block) { open.clear(), closed.clear(), block = emulator_block; }
    }
    void add(std::function<void()> work) {
        enter_block();
        open.push_back(work);
    }
    void commit() {
        enter_block();
        closed.push_back(open);
        open.clear();
    }
    void wait(size_t pending) {
        enter_block();
        for (; closed.size() > pending; closed.pop_front()) {
            for (const auto& work : closed.front()) { work(); }
        }
    }
};
inline EmulatedGroups emulated_copies[1024];

UNSEEN inline void emulated_copy_now(char* to, const void* from, size_t bytes, size_t valid, const void* line) {
    shadow_ends(to, bytes);
    shadow_access(to, bytes, SHADOW_WRITE, line);
    memcpy(to, from, valid);
    memset(to + valid, 0, bytes - valid);
}
/* Begins a copy of `valid` bytes. The rest becomes zero. */
UNSEEN inline void emulated_copy_async(void* to, const void* from, size_t bytes, size_t valid) {
    const void* line = SHADOW_HERE;
    shadow_access(from, valid, SHADOW_READ, line);
    shadow_begins(to, bytes, SHADOW_WRITE, line);
    emulated_copies[emulator_thread].add([=] { emulated_copy_now((char*)to, from, bytes, valid, line); });
}
inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes, size_t zeros = 0) {
    emulated_copy_async(to, from, bytes, bytes - zeros);
}
inline void __pipeline_commit(void) { emulated_copies[emulator_thread].commit(); }
inline void __pipeline_wait_prior(size_t pending) { emulated_copies[emulator_thread].wait(pending); }

// ---------------------------------------------------------------------------------------------------------------------
// cooperative groups of a block and of tiles of a warp

namespace cooperative_groups {
struct thread_block {
    static void sync() { __syncthreads(); }
    static unsigned thread_rank() { return emulator_thread; }
    static unsigned size() { return blockDim.x * blockDim.y * blockDim.z; }
    static unsigned num_threads() { return size(); }
    static dim3 group_index() { return dim3(blockIdx.x, blockIdx.y, blockIdx.z); }
    static dim3 thread_index() { return dim3(threadIdx.x, threadIdx.y, threadIdx.z); }
};
inline thread_block this_thread_block() { return {}; }
struct grid_group {  // without sync(): blocks run one after the other
    static unsigned long long thread_rank() {
        const size_t rows = blockIdx.y + (size_t)gridDim.y * blockIdx.z;
        return (blockIdx.x + gridDim.x * rows) * thread_block::size() + emulator_thread;
    }
};
inline grid_group this_grid() { return {}; }
template <typename Group>
inline void sync(const Group& group) {
    group.sync();
}
template <unsigned N>
struct thread_block_tile {
    static unsigned mask() { return (N == 32 ? ~0u : (1u << N % 32) - 1) << emulator_lane() / N * N; }
    static void sync() { __syncwarp(mask()); }
    static constexpr unsigned size() { return N; }
    static constexpr unsigned num_threads() { return N; }
    static unsigned thread_rank() { return emulator_lane() % N; }
    static unsigned meta_group_rank() { return emulator_thread / N; }
    static unsigned meta_group_size() { return (thread_block::size() + N - 1) / N; }
    template <typename T>
    static T shfl(T x, unsigned from) {
        return emulator_shuffle(mask(), x, emulator_lane() / N * N + from % N);
    }
    template <typename T>
    static T shfl_xor(T x, unsigned bits) {
        return emulator_shuffle(mask(), x, emulator_lane() ^ bits);
    }
    template <typename T>
    static T shfl_up(T x, unsigned by) {
        return emulator_shuffle(mask(), x, emulator_lane() - by, thread_rank() >= by);
    }
    template <typename T>
    static T shfl_down(T x, unsigned by) {
        return emulator_shuffle(mask(), x, emulator_lane() + by, thread_rank() + by < N);
    }
    static int any(int x) { return __any_sync(mask(), x); }
    static int all(int x) { return __all_sync(mask(), x); }
    static unsigned ballot(int x) { return __ballot_sync(mask(), x) >> emulator_lane() / N * N; }
};
template <unsigned N>
inline thread_block_tile<N> tiled_partition(const thread_block&) {
    return {};
}
template <typename T>
struct plus {
    T operator()(T a, T b) const { return a + b; }
};
template <typename T>
struct greater {
    T operator()(T a, T b) const { return a < b ? b : a; }
};
template <typename T>
struct less {
    T operator()(T a, T b) const { return b < a ? b : a; }
};
template <unsigned N, typename T, typename Add>
inline T reduce(const thread_block_tile<N>& tile, T x, const Add& add) {
    for (unsigned bits = N / 2; bits > 0; bits /= 2) { x = add(x, tile.shfl_xor(x, bits)); }
    return x;
}
}  // namespace cooperative_groups

// ---------------------------------------------------------------------------------------------------------------------
// wmma of 16 x 16 x 16. Each lane holds 8 neighbours of a row, which is not how a card distributes them

namespace nvcuda {
namespace wmma {
struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };
template <typename Use, int M, int N, int K, typename T, typename Layout = row_major>
struct fragment {
    static_assert(M == 16 && N == 16 && K == 16, "the emulated card has wmma of 16 x 16 x 16 alone");
    static constexpr int num_elements = 8;
    T x[8];
    static size_t at(int i, size_t pitch, bool columns) {
        const size_t row = emulator_lane() / 2, column = emulator_lane() % 2 * 8 + (size_t)i;
        return columns ? column * pitch + row : row * pitch + column;
    }
};
template <typename Use, typename T, typename L>
inline void fill_fragment(fragment<Use, 16, 16, 16, T, L>& f, T x) {
    for (T& to : f.x) { to = x; }
}
template <typename Use, typename T, typename L>
inline void load_matrix_sync(fragment<Use, 16, 16, 16, T, L>& f, const T* p, unsigned pitch) {
    __syncwarp();
    for (int i = 0; i < 8; i++) { f.x[i] = p[f.at(i, pitch, std::is_same<L, col_major>::value)]; }
}
template <typename T>
inline void store_matrix_sync(T* p, const fragment<accumulator, 16, 16, 16, T>& f, unsigned pitch, layout_t layout) {
    for (int i = 0; i < 8; i++) { p[f.at(i, pitch, layout == mem_col_major)] = f.x[i]; }
    __syncwarp();
}
template <typename D, typename T, typename LA, typename LB, typename C>
inline void mma_sync(fragment<accumulator, 16, 16, 16, D>& d, const fragment<matrix_a, 16, 16, 16, T, LA>& a,
                     const fragment<matrix_b, 16, 16, 16, T, LB>& b, const fragment<accumulator, 16, 16, 16, C>& c) {
    T rows[2][256];
    for (int m = 0; m < 2; m++) {
        uint64_t words[2];
        memcpy(words, m ? b.x : a.x, 16);
        const EmulatorSlots* all = emulator_exchange(~0u, words[0], words[1]);
        for (int lane = 0; lane < 32; lane++) { memcpy((void*)&rows[m][8 * lane], &all->at[lane], 16); }
    }
    for (int i = 0; i < 8; i++) {
        const size_t at = d.at(i, 16, false);
        float sum = (float)c.x[i];
        for (size_t k = 0; k < 16; k++) { sum += (float)rows[0][at / 16 * 16 + k] * (float)rows[1][k * 16 + at % 16]; }
        d.x[i] = (D)sum;
    }
}
}  // namespace wmma
}  // namespace nvcuda

// ---------------------------------------------------------------------------------------------------------------------
// launches

template <typename... Arguments>
struct EmulatedLaunch {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
    std::tuple<Arguments...> arguments;
};

struct LaunchOf {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
    LaunchOf(dim3 grid, dim3 block, size_t shared = 0, cudaStream_t stream = NULL)
        : grid(grid), block(block), shared(shared), stream(stream) {}
    template <typename... Arguments>
    EmulatedLaunch<std::decay_t<Arguments>...> operator()(Arguments&&... arguments) const {
        return {grid, block, shared, stream, {arguments...}};
    }
};

template <typename Kernel, typename... Arguments>
EMULATED_INLINE void operator%(Kernel kernel, const EmulatedLaunch<Arguments...>& launch) {
    const std::tuple<Arguments...> arguments = launch.arguments;
    emulator_launch(launch.grid, launch.block, launch.shared, launch.stream, false,
                    [kernel, arguments] { std::apply(kernel, arguments); });
}

/* Stands for cudaLaunchKernelEx, a launch with attributes. The card knows one of them: cooperative. */
template <typename... Parameters, typename... Arguments>
inline cudaError_t emulated_launch(const cudaLaunchConfig_t* launch, void (*kernel)(Parameters...), Arguments&&... given) {
    bool together = false;
    for (unsigned i = 0; i < launch->numAttrs; i++) {
        const cudaLaunchAttribute& a = launch->attrs[i];
        if (a.id != cudaLaunchAttributeCooperative) { emulator_die("launch attribute %d is not known", (int)a.id); }
        together = a.val.cooperative != 0;
    }
    const std::tuple<std::decay_t<Parameters>...> arguments(given...);
    return emulator_launch(launch->gridDim, launch->blockDim, launch->dynamicSmemBytes, launch->stream, together,
                           [kernel, arguments] { std::apply(kernel, arguments); });
}
#define cudaLaunchKernelEx emulated_launch

template <typename Kernel>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel*, int threads, size_t shared) {
    *blocks = emulator_resident(threads, shared);
    return cudaSuccess;
}
template <typename T>
inline cudaError_t cudaMemcpyToSymbol(T& symbol, const void* from, size_t bytes) {
    return cudaMemcpy(&symbol, from, bytes, cudaMemcpyHostToDevice);
}
template <typename T>
inline cudaError_t cudaMemcpyFromSymbol(void* to, const T& symbol, size_t bytes) {
    return cudaMemcpy(to, &symbol, bytes, cudaMemcpyDeviceToHost);
}

#endif
