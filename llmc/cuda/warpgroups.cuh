/* warpgroups.cuh -- what kernels with Hopper's own instructions (code for sm_90a) share: the split of a block into a producer
 * and consumers, the ring of buffers between them, and maps of tensors for TMA. 16-bit builds.
 */
#ifndef LLMC_WARPGROUPS_CUH
#define LLMC_WARPGROUPS_CUH

#include <cuda.h>

#include "llmc/cuda/ptx.cuh"

/* A kernel whose size of shared memory shows whether the code for sm_90a was loaded: a GPU of compute capability 9.0 may
 * also have loaded PTX without these instructions. */
constexpr int PROBE_BYTES = 4096;
__global__ static void wgmma_probe_kernel(int* out) {
#if PTX_HAS_SM90A
    __shared__ volatile int used[PROBE_BYTES / 4];
    used[threadIdx.x] = threadIdx.x;
    __syncthreads();
    *out = used[threadIdx.x ^ 1];
#endif
}

static inline bool has_wgmma(void) {
    static cudaFuncAttributes a = {};
    if (a.maxThreadsPerBlock == 0) { CUDA_CHECK(cudaFuncGetAttributes(&a, (const void*)wgmma_probe_kernel)); }
    return a.sharedSizeBytes >= PROBE_BYTES;
}

#ifndef PRECISION_FP32

/* How threads and registers are split: WGS consumer warpgroups of 64 rows, BLOCKS blocks a multiprocessor, and
 * how many registers a thread of the producer keeps. */
template <int WGS, int BLOCKS, int PRODUCER_ = 24>
struct WarpgroupSplit {
    static constexpr int THREADS = 128 * (WGS + 1), ROWS = 64 * WGS;
    static constexpr int ENTRY = 65536 / (THREADS * BLOCKS) / 8 * 8;  // registers a thread at the kernel's start
    static constexpr int PRODUCER = PRODUCER_, FAIR = (ENTRY * (WGS + 1) - PRODUCER) / WGS / 8 * 8;
    static constexpr int CONSUMER = FAIR < 240 ? FAIR : 240;
};

/* In front of a kernel: how many neighboring blocks of its grid are a cluster. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define BLOCKS_OF_CLUSTER(n)
#else
#define BLOCKS_OF_CLUSTER(n) __cluster_dims__(n, 1, 1)
#endif

constexpr uint32_t NO_BARRIER = 1;  // stands for "no buffer is held"

/* Releases a buffer that the calling consumer warp has finished reading. TMA may then write the buffer, and no proxy fence
 * orders ordinary reads (statistics, ldmatrix) before TMA's writes. None is needed, because callers compute with what they
 * have read before they release: no read is in flight. Products have read their operands when wgmma_wait returns. What
 * threads write themselves, such as a piece's note, the barrier orders. */
__device__ __forceinline__ void ring_release(uint32_t empty) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) { barrier_arrive(empty); }
}

/* Releases a buffer into which each block of a cluster may copy. It releases the buffer in all blocks of the cluster. */
__device__ __forceinline__ void ring_release_cluster(uint32_t empty, int blocks = CLUSTER_BLOCKS) {
    __syncwarp();
    if (threadIdx.x % 32 < blocks) { barrier_arrive_in(empty, threadIdx.x % 32); }
}

/* A position in a ring of STAGES buffers. The barriers `full` and `empty` of a buffer lie side by side. */
template <int STAGES>
struct Ring {
    uint32_t barriers;
    int stage = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ explicit Ring(uint64_t* shared) : barriers(shared_address(shared)) {}
    __device__ __forceinline__ uint32_t full() const { return barriers + stage * 16; }
    __device__ __forceinline__ uint32_t empty() const { return barriers + stage * 16 + 8; }
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
    /* Goes past `count` buffers that others read. */
    __device__ __forceinline__ void skip(int count) {
        const int to = stage + count;
        stage = to % STAGES;
        phase ^= to / STAGES & 1;
    }
    /* Initializes the barriers; one thread calls it before anyone uses the ring. A buffer is empty once so many consumer warps
     * have released it. */
    __device__ __forceinline__ void init(int consumer_warps) const {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(barriers + i * 16, 1);
            barrier_init(barriers + i * 16 + 8, consumer_warps);
        }
    }
    /* Waits until the buffer is empty and announces its next contents; the producer calls it. */
    __device__ __forceinline__ void begin_fill(uint32_t bytes) const {
        barrier_wait(empty(), phase ^ 1);
        barrier_arrive_expect(full(), bytes);
    }
    __device__ __forceinline__ void wait_full() const { barrier_wait(full(), phase); }
    /* Goes past a buffer that the calling consumer warp has no use for. */
    __device__ __forceinline__ void pass() {
        wait_full();
        ring_release(empty());
        advance();
    }
};

/* Initializes rings of which so many consumer warps read each buffer. All threads of the block call it. */
template <typename... Rings>
__device__ __forceinline__ void rings_init(int consumer_warps, const Rings&... rings) {
    if (threadIdx.x == 0) {
        (rings.init(consumer_warps), ...);
        barrier_init_done();
    }
    __syncthreads();
}

/* Returns shared memory from the next multiple of 1024 on, as swizzled tiles need it. */
__device__ __forceinline__ char* wgmma_tiles(char* smem) { return smem + (0u - shared_address(smem)) % 1024; }

// ---------------------------------------------------------------------------------------------------------------------
// on the host

typedef CUresult (*TensorMapEncode)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                                    const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                    CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* Returns the driver's function, looked up at run time so that nothing links libcuda. */
static inline TensorMapEncode tensor_map_encode(void) {
    void* f = NULL;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found));
#else
    CUDA_CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &f, cudaEnableDefault, &found));
#endif
    if (found != cudaDriverEntryPointSuccess || f == NULL) {
        die("the CUDA driver has no cuTensorMapEncodeTiled\n  hint: install a driver for CUDA 12.0 or newer");
    }
    return (TensorMapEncode)f;
}

/* Returns a map of x (B, T, width), rows `pitch` apart, in boxes of `rows` rows by `columns` columns, a multiple of 64. Its
 * coordinates: 0, row, column / 64, the first dimension's index. Rows past T read as zeros and are not written. */
static inline CUtensorMap tensor_map(const floatX* x, size_t B, int T, size_t width, size_t pitch, int rows, int columns) {
    static const TensorMapEncode encode = tensor_map_encode();
    const cuuint64_t dims[4] = {64, (cuuint64_t)T, width / 64, B};
    const cuuint64_t strides[3] = {pitch * sizeof(floatX), 128, T * pitch * sizeof(floatX)};
    const cuuint32_t box[4] = {64, (cuuint32_t)rows, (cuuint32_t)columns / 64, 1}, steps[4] = {1, 1, 1, 1};
#ifdef PRECISION_BF16
    const CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
#else
    const CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
#endif
    CUtensorMap map;
    const CUresult status =
        encode(&map, type, 4, (void*)x, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) {
        die("no tensor map for B %zu, T %d, width %zu, pitch %zu (CUresult %d)", B, T, width, pitch, (int)status);
    }
    return map;
}

#endif  // PRECISION_FP32
#endif
