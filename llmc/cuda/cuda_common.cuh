/* cuda_common.cuh -- what every .cuh relies on: the element type, checked calls, memory in parts, 16-byte vectors, reductions
 * in a fixed order, the architecture a kernel was compiled for, and ranges for profilers.
 *
 * floatX is the type of weights, activations and (by default) gradients: float, __nv_bfloat16 or __half, chosen by
 * -DPRECISION_FP32, _BF16 or _FP16. All arithmetic is in fp32.
 *
 * Conventions of every launcher <op>_cuda: it takes the arguments of the oracle <op> in <op>.h in the same order, a shape with
 * row pitches (elements from one row to the next), then the stream. It allocates nothing and does not synchronize. Tensors
 * start at multiples of 16 bytes and pitches are multiples of 16 bytes (row_pitch). Any width works; multiples of 16 bytes are
 * fast. No sum depends on the order in which blocks happen to run.
 */
#ifndef LLMC_CUDA_COMMON_CUH
#define LLMC_CUDA_COMMON_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <nvtx3/nvToolsExt.h>
#include <assert.h>
#include <type_traits>

#include "llmc/base/utils.h"

#if defined(PRECISION_FP32) + defined(PRECISION_BF16) + defined(PRECISION_FP16) != 1
#error "define exactly one of PRECISION_FP32, PRECISION_BF16, PRECISION_FP16"
#endif
#if defined(PRECISION_FP32)
typedef float floatX;
#define PRECISION_NAME "FP32"
#elif defined(PRECISION_BF16)
typedef __nv_bfloat16 floatX;
#define PRECISION_NAME "BF16"
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "bfloat16 needs sm_80 or newer: build with PRECISION=FP16 or FP32"
#endif
#else
typedef __half floatX;
#define PRECISION_NAME "FP16"
#endif

constexpr bool IS_BF16 = PRECISION_NAME[0] == 'B', IS_FP16 = !IS_BF16 && PRECISION_NAME[2] == '1';
static_assert(IS_BF16 + IS_FP16 + (sizeof(floatX) == 4) == 1, "a build has one precision");

// ---------------------------------------------------------------------------------------------------------------------
// checked calls

static inline void cuda_check(cudaError_t status, const char* what, const char* file, int line) {
    if (status == cudaSuccess) { return; }
    die("%s:%d: %s: %s (%s)", file, line, what, cudaGetErrorString(status), cudaGetErrorName(status));
}

/* CUDA_CHECK(cudaFree(p)): ends the program with the call's text and CUDA's reason. */
#define CUDA_CHECK(call) cuda_check((call), #call, __FILE__, __LINE__)

/* After a <<<launch>>>: names the kernel whose launch was refused. */
#define CUDA_CHECK_LAUNCH(kernel) cuda_check(cudaGetLastError(), "launch of " kernel, __FILE__, __LINE__)

/* Copies host memory to the device in the order of `stream`, and waits, because pageable memory may be gone after the call. */
static inline void copy_in(void* device, const void* host, size_t bytes, cudaStream_t stream) {
    CUDA_CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

static inline void copy_out(void* host, const void* device, size_t bytes, cudaStream_t stream) {
    CUDA_CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

/* Makes an event that orders streams and takes no time. */
static inline cudaEvent_t event_new(void) {
    cudaEvent_t event;
    CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
}

/* Lets a stream wait for everything that `other` has queued so far. */
static inline void stream_wait(cudaStream_t stream, cudaStream_t other, cudaEvent_t event) {
    CUDA_CHECK(cudaEventRecord(event, other));
    CUDA_CHECK(cudaStreamWaitEvent(stream, event));
}

/* Returns an attribute of the current device; cheap enough to call at every launch. */
static inline int device_attribute(cudaDeviceAttr attribute) {
    int device = 0, value = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
    return value;
}

constexpr int SMALL_L2 = 55 << 20;  // bytes: an H100's L2 cache (50 MiB) is smaller, an H200's (60 MiB) is not

static inline void device_name(char name[256]) {
    cudaDeviceProp properties;
    int device = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    snprintf(name, 256, "%s", properties.name);
}

/* Returns the architecture that a kernel's body was compiled for, as 75, 80 or 90: the __CUDA_ARCH__ of the body. The device's
 * own capability says less: PTX for sm_75 also runs on a newer card, with the sm_75 body. */
template <typename Kernel>
static int compiled_arch(Kernel kernel) {
    cudaFuncAttributes a;
    CUDA_CHECK(cudaFuncGetAttributes(&a, (const void*)kernel));
    return a.ptxVersion;
}

/* Returns the bytes of dynamic shared memory that a block of a kernel may have. Code for sm_75 gets a T4's 64 KB on every card,
 * so that what runs there also runs on a T4. */
template <typename Kernel>
static size_t shared_limit(Kernel kernel) {
    cudaFuncAttributes a;
    CUDA_CHECK(cudaFuncGetAttributes(&a, (const void*)kernel));
    const size_t card = (size_t)device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    return (a.ptxVersion < 80 ? size_min(card, 64 << 10) : card) - a.sharedSizeBytes;
}

/* Returns the blocks of a kernel that run at a time on the current device, at least 1. shared: dynamic bytes of each block */
template <typename Kernel>
static size_t blocks_at_once(Kernel kernel, int threads, size_t shared) {
    int per_sm = 0;
    CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, threads, shared));
    return (size_t)device_attribute(cudaDevAttrMultiProcessorCount) * size_max(1, (size_t)per_sm);
}

constexpr int MAX_GRID_YZ = 65535;  // blocks of a grid's second and third dimension

/* Returns how many tiles of `rows` rows N rows have, for one of these dimensions; too many end the program. what: N's name */
static inline unsigned grid_tiles(const char* what, size_t N, int rows) {
    const size_t tiles = ceil_div(N, (size_t)rows);
    if (tiles > (size_t)MAX_GRID_YZ) { die("%s is %zu, wanted at most %zu", what, N, (size_t)MAX_GRID_YZ * (size_t)rows); }
    return (unsigned)tiles;
}

/* Shows a named range in Nsight's timeline for the lifetime of the object. */
struct ProfileRange {
    explicit ProfileRange(const char* name) { nvtxRangePushA(name); }
    ~ProfileRange() { nvtxRangePop(); }
    ProfileRange(const ProfileRange&) = delete;
    ProfileRange& operator=(const ProfileRange&) = delete;
};

// ---------------------------------------------------------------------------------------------------------------------
// memory

/* A region that the same code first measures (base NULL) and then hands out in parts. Units: bytes. */
typedef struct {
    char* base;
    size_t used;
} Arena;

template <typename T>
static T* take(Arena* a, size_t count) {
    T* p = a->base ? (T*)(a->base + a->used) : NULL;
    a->used += round_up(count * sizeof(T), 256);
    return p;
}

// ---------------------------------------------------------------------------------------------------------------------
// numbers

__host__ __device__ __forceinline__ float to_float(float x) { return x; }
__host__ __device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__host__ __device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

/* Rounds to nearest, ties to even. */
template <typename T>
__host__ __device__ __forceinline__ T from_float(float x) {
    if constexpr (std::is_same_v<T, __half>) {
        return __float2half_rn(x);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        return __float2bfloat16_rn(x);
    } else {
        return T(x);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// vectors: the widest access of a thread is 16 bytes

template <typename T>
constexpr int VECTOR = 16 / (int)sizeof(T);  // elements in 16 bytes

/* W neighboring elements that are loaded and stored together. */
template <typename T, int W>
struct alignas(sizeof(T) * W) Vec {
    T v[W];
};
template <typename T>
using Pack = Vec<T, VECTOR<T>>;

/* The type that accesses so many bytes. STREAM is for data that this kernel touches once and that would only evict other data
 * from the caches. */
template <int BYTES>
struct Word {
    static_assert(BYTES == 2 || BYTES == 4 || BYTES == 8 || BYTES == 16, "a thread has no such access");
    typedef std::conditional_t<
        BYTES == 16, uint4, std::conditional_t<BYTES == 8, uint2, std::conditional_t<BYTES == 4, unsigned int, unsigned short>>>
        type;
};

template <bool STREAM, int W, typename T>
__device__ __forceinline__ Vec<T, W> load_as(const T* p) {
    if constexpr (sizeof(T) * W > 16) {
        Vec<T, W> v;
#pragma unroll
        for (int k = 0; k < W; k += VECTOR<T>) {
            const Pack<T> part = load_as<STREAM, VECTOR<T>>(p + k);
#pragma unroll
            for (int i = 0; i < VECTOR<T>; i++) { v.v[k + i] = part.v[i]; }
        }
        return v;
    } else {
        typedef typename Word<(int)sizeof(T) * W>::type word;
        union {
            word bits;
            Vec<T, W> vec;
        } u = {STREAM ? __ldcs((const word*)p) : *(const word*)p};
        return u.vec;
    }
}

template <bool STREAM, typename T, int W>
__device__ __forceinline__ void store_as(T* p, const Vec<T, W>& v) {
    if constexpr (sizeof(T) * W > 16) {
#pragma unroll
        for (int k = 0; k < W; k += VECTOR<T>) {
            Pack<T> part;
#pragma unroll
            for (int i = 0; i < VECTOR<T>; i++) { part.v[i] = v.v[k + i]; }
            store_as<STREAM>(p + k, part);
        }
    } else {
        typedef typename Word<(int)sizeof(T) * W>::type word;
        union {
            Vec<T, W> vec;
            word bits;
        } u = {v};
        if constexpr (STREAM) {
            __stcs((word*)p, u.bits);
        } else {
            *(word*)p = u.bits;
        }
    }
}

/* Load and store W elements at p, a multiple of W elements; vectors over 16 bytes use accesses of 16 bytes. */
template <int W, typename T>
__device__ __forceinline__ Vec<T, W> load_vec(const T* p) {
    return load_as<false, W>(p);
}
template <int W, typename T>
__device__ __forceinline__ Vec<T, W> load_stream(const T* p) {
    return load_as<true, W>(p);
}
template <typename T, int W>
__device__ __forceinline__ void store_vec(T* p, const Vec<T, W>& v) {
    store_as<false>(p, v);
}
template <typename T, int W>
__device__ __forceinline__ void store_stream(T* p, const Vec<T, W>& v) {
    store_as<true>(p, v);
}

/* A vector as it is in memory. Vectors that stay in registers between uses have this form: in a Vec, each 16-bit element would
 * take a register. */
template <typename T, int W>
struct Held {
    typename Word<(int)sizeof(T) * W>::type bits;
};

template <int W, typename T>
__device__ __forceinline__ Held<T, W> hold_stream(const T* p) {
    return Held<T, W>{__ldcs((const decltype(Held<T, W>::bits)*)p)};
}

template <int W, typename T>
__device__ __forceinline__ Held<T, W> hold(const T* p) {
    return Held<T, W>{*(const decltype(Held<T, W>::bits)*)p};
}

template <typename T, int W>
__device__ __forceinline__ Held<T, W> hold(const Vec<T, W>& v) {
    union {
        Vec<T, W> vec;
        Held<T, W> held;
    } u = {v};
    return u.held;
}

template <typename T, int W>
__device__ __forceinline__ Vec<T, W> unpack(const Held<T, W>& h) {
    union {
        Held<T, W> held;
        Vec<T, W> vec;
    } u = {h};
    return u.vec;
}

/* Makes the compiler forget what it knows about a vector. Otherwise it would keep each element's fp32 conversion from the first
 * use to the next, in twice the registers. */
template <typename T, int W>
__device__ __forceinline__ void forget(Held<T, W>& h) {
    if constexpr (sizeof(T) == 2 && W == 8) {
        asm volatile("" : "+r"(h.bits.x), "+r"(h.bits.y), "+r"(h.bits.z), "+r"(h.bits.w));
    }
}

/* Load two neighboring elements as floats, and store them; p is a multiple of two elements. */
template <typename T>
__device__ __forceinline__ float2 load2(const T* p) {
    const Vec<T, 2> v = load_vec<2>(p);
    return make_float2(to_float(v.v[0]), to_float(v.v[1]));
}
template <typename T>
__device__ __forceinline__ void store2(T* p, float x, float y) {
    Vec<T, 2> v;
    v.v[0] = from_float<T>(x);
    v.v[1] = from_float<T>(y);
    store_vec(p, v);
}

/* Returns the elements from one row of `width` to the next: a multiple of 16 bytes, in wide rows a multiple of a cache line.
 * A warp's 512 bytes then are four lines and not parts of five. */
template <typename T>
static inline size_t row_pitch(size_t width) {
    return round_up(width, (width * sizeof(T) > 1024 ? 128 : 16) / sizeof(T));
}

template <typename T>
static inline bool is_aligned16(const T* p) {
    return (uintptr_t)p % 16 == 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// reductions: butterflies, which give every lane the same bits

template <typename T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) { x += __shfl_xor_sync(0xffffffffu, x, mask); }
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) { x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask)); }
    return x;
}

/* Returns the sum over a block of whole warps in every thread. `shared` has 32 values and is free for reuse only after the next
 * __syncthreads(). */
template <typename T>
__device__ __forceinline__ T block_sum(T x, T* shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    x = warp_sum(x);
    if (lane == 0) { shared[warp] = x; }
    __syncthreads();
    x = lane < (int)blockDim.x / 32 ? shared[lane] : T(0);
    return warp_sum(x);
}

#endif
