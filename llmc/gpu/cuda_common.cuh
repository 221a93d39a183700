/* cuda_common.cuh -- what every .cuh leans on: the element type, checked calls, 16-byte vectors, reductions in a fixed order,
 * which architecture a kernel was compiled for, and ranges for profilers.
 *
 * floatX is the type of weights, activations and (by default) gradients: float, __nv_bfloat16 or __half, chosen by
 * -DPRECISION_FP32, _BF16 or _FP16. All arithmetic is in fp32.
 *
 * Conventions of every launcher <op>_cuda: the arguments of the oracle <op> in <op>.h in its order, then row pitches
 * (elements from one row to the next), the stream last. Nothing is allocated and nothing synchronises. Tensors start at
 * multiples of 16 bytes and pitches are multiples of 16 bytes (row_pitch); any width is right, those that are a multiple
 * of 16 bytes are fast. No sum is left to the order in which blocks happen to run.
 */
#ifndef LLMC_CUDA_COMMON_CUH
#define LLMC_CUDA_COMMON_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <nvtx3/nvToolsExt.h>
#include <assert.h>

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

/* An attribute of the current device; cheap enough to ask at every launch. */
static inline int device_attribute(cudaDeviceAttr attribute) {
    int device = 0, value = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
    return value;
}

/* The architecture that the body of a kernel was compiled for, as 75, 80 or 90: what __CUDA_ARCH__ said in it. The
 * device's own capability says less: PTX for sm_75 also runs on a newer card, with the sm_75 body. */
template <typename Kernel>
static int compiled_arch(Kernel kernel) {
    cudaFuncAttributes a;
    CUDA_CHECK(cudaFuncGetAttributes(&a, (const void*)kernel));
    return a.ptxVersion;
}

/* Bytes of shared memory that a block of a kernel may have besides static ones. Code for sm_75 gets a T4's 64 KB on every
 * card, so that what runs there runs on a T4. */
template <typename Kernel>
static size_t shared_limit(Kernel kernel) {
    cudaFuncAttributes a;
    CUDA_CHECK(cudaFuncGetAttributes(&a, (const void*)kernel));
    const size_t card = (size_t)device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    return (a.ptxVersion < 80 ? size_min(card, 64 << 10) : card) - a.sharedSizeBytes;
}

/* Blocks of a kernel that run at one time on the current device, at least 1. shared: bytes that each has besides static ones */
template <typename Kernel>
static size_t blocks_at_once(Kernel kernel, int threads, size_t shared) {
    int per_sm = 0;
    CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, threads, shared));
    return (size_t)device_attribute(cudaDevAttrMultiProcessorCount) * size_max(1, (size_t)per_sm);
}

/* A named range in Nsight's timeline, as long as the object lives. */
struct ProfileRange {
    explicit ProfileRange(const char* name) { nvtxRangePushA(name); }
    ~ProfileRange() { nvtxRangePop(); }
    ProfileRange(const ProfileRange&) = delete;
    ProfileRange& operator=(const ProfileRange&) = delete;
};

// ---------------------------------------------------------------------------------------------------------------------
// numbers

__host__ __device__ __forceinline__ float to_float(float x) { return x; }
__host__ __device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__host__ __device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

/* Rounds to nearest, ties to even. */
template <typename T>
__host__ __device__ __forceinline__ T from_float(float x);
template <>
__host__ __device__ __forceinline__ float from_float<float>(float x) {
    return x;
}
template <>
__host__ __device__ __forceinline__ __half from_float<__half>(float x) {
    return __float2half_rn(x);
}
template <>
__host__ __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}

// ---------------------------------------------------------------------------------------------------------------------
// vectors: the widest access of a thread is 16 bytes

template <typename T>
constexpr int VECTOR = 16 / (int)sizeof(T);  // elements in 16 bytes

/* W neighbouring elements that travel together. */
template <typename T, int W>
struct alignas(sizeof(T) * W) Vec {
    T v[W];
};
template <typename T>
using Pack = Vec<T, VECTOR<T>>;

/* The access of that many bytes. STREAM is for data that this kernel touches once and that would only push out others of the
 * caches. */
template <int BYTES>
struct Word;
template <>
struct Word<2> {
    typedef unsigned short type;
};
template <>
struct Word<4> {
    typedef unsigned int type;
};
template <>
struct Word<8> {
    typedef uint2 type;
};
template <>
struct Word<16> {
    typedef uint4 type;
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

/* W elements at p, a multiple of so many; wider than 16 bytes in accesses of 16. */
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

/* A vector as it lies in memory. What stays in registers from one use to a later one is kept in this form: a Vec of 16-bit
 * elements would get a register for each. */
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

/* Makes the compiler forget what it knows of a vector. Otherwise it would keep each element's conversion to fp32 from the
 * first use to the next, in twice the registers. */
template <typename T, int W>
__device__ __forceinline__ void forget(Held<T, W>& h) {
    if constexpr (sizeof(T) == 2 && W == 8) {
        asm volatile("" : "+r"(h.bits.x), "+r"(h.bits.y), "+r"(h.bits.z), "+r"(h.bits.w));
    }
}

/* Two neighbouring elements as floats, and back; p is a multiple of two elements. */
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

/* Elements from one row of `width` to the next: whole 16 bytes, in wide rows whole cache lines, so that a warp's 512 bytes
 * are four lines and not parts of five. */
template <typename T>
static inline size_t row_pitch(size_t width) {
    return round_up(width, (width * sizeof(T) > 1024 ? 128 : 16) / sizeof(T));
}

template <typename T>
static inline bool is_aligned16(const T* p) {
    return (uintptr_t)p % 16 == 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// reductions: butterflies, so that every lane gets the same bits

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

/* The sum over a block of whole warps, in every thread. `shared` holds 32 values and is free for others only after the
 * next __syncthreads(). */
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
