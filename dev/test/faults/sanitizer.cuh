#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cuda_pipeline.h>
#include <math_constants.h>
#include <mma.h>
#include "llmc/cuda/warpgroups.cuh"
/* sanitizer.cuh -- versions of RMSNorm's forward pass with a fault each. Of each, the sanitizer of the emulated
 * card must say the kind and the line that a comment names; test_zoo_faults.sh compares. A file for MINE.
 */
__device__ float square_of(const floatX* x, int C) {
    float square = 0;
    for (int c = threadIdx.x; c < C; c += blockDim.x) { square += to_float(x[c]) * to_float(x[c]); }
    return square;
}
__device__ void write_row(floatX* out, float* rstd, const floatX* x, const floatX* weight, RowShape rows, float r) {
    const size_t n = blockIdx.x, at = n * rows.pitch;
    if (threadIdx.x == 0) { rstd[n] = r; }
    for (int c = threadIdx.x; c < rows.C; c += blockDim.x) {
        out[at + c] = from_float<floatX>(to_float(x[at + c]) * r * to_float(weight[c]));
    }
}
__device__ float root_of(float square, RowShape rows, float eps) { return 1.0f / sqrtf(square / (float)rows.C + eps); }

#define PARAMETERS floatX *out, float *rstd, const floatX *x, const floatX *weight, RowShape rows, float eps
#define LAUNCHED(name) static const Mine name##_mine("forward", #name, forward<name##_launch>);
#define VERSION_OF(name, grid, block, shared)                                               \
    static void name##_launch(PARAMETERS, cudaStream_t stream) {                            \
        name<<<(unsigned)(grid), block, shared, stream>>>(out, rstd, x, weight, rows, eps); \
    }                                                                                       \
    LAUNCHED(name)
#define A_BLOCK_A_ROW(name) VERSION_OF(name, rows.N, 256, 0)
#define SOUND                  \
    __shared__ float sums[32]; \
    FINISH(block_sum(square_of(x + blockIdx.x * rows.pitch, rows.C), sums))
#define FINISH(square) write_row(out, rstd, x, weight, rows, root_of(square, rows, eps))

__global__ void first_barrier_missing(PARAMETERS) {
    __shared__ float sums[256];
    const int t = threadIdx.x;
    sums[t] = square_of(x + blockIdx.x * rows.pitch, rows.C);
    for (int half = 128; half > 0; half /= 2) {
        if (t < half) { sums[t] += sums[t + half]; }  // FAULT race between threads
        __syncthreads();
    }
    FINISH(sums[0]);
}
A_BLOCK_A_ROW(first_barrier_missing)

__global__ void barriers_of_tree_missing(PARAMETERS) {
    __shared__ float sums[256];
    const int t = threadIdx.x;
    sums[t] = square_of(x + blockIdx.x * rows.pitch, rows.C);
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if (t < half) { sums[t] += sums[t + half]; }  // FAULT race between threads
    }
    __syncthreads();
    FINISH(sums[0]);
}
A_BLOCK_A_ROW(barriers_of_tree_missing)

__global__ void last_barrier_missing(PARAMETERS) {
    __shared__ float total;
    __shared__ float sums[32];
    const float sum = block_sum(square_of(x + blockIdx.x * rows.pitch, rows.C), sums);
    if (threadIdx.x == 0) { total = sum; }
    FINISH(total);  // FAULT race between threads
}
A_BLOCK_A_ROW(last_barrier_missing)

__global__ void buffer_used_again(PARAMETERS) {
    __shared__ float sums[32];
    const float first = block_sum(square_of(x + blockIdx.x * rows.pitch, rows.C), sums);
    const float again = block_sum(1.0f, sums);  // FAULT race between threads
    FINISH(first + 0 * again);
}
A_BLOCK_A_ROW(buffer_used_again)

__global__ void written_too_early(PARAMETERS) {
    __shared__ float tile[256];
    float square = 0;
    for (int first = 0; first < rows.C; first += 256) {
        const int c = first + (int)threadIdx.x;
        tile[threadIdx.x] = c < rows.C ? to_float(x[blockIdx.x * rows.pitch + c]) : 0;  // FAULT race between threads
        __syncthreads();
        for (int i = 0; i < 256; i++) { square += tile[i] * tile[i]; }
    }
    FINISH(square);
}
A_BLOCK_A_ROW(written_too_early)

__global__ void half_of_a_neighbor(PARAMETERS) {  // the call that makes a __half also stores it
    __shared__ __half halves[256];
    __shared__ float sums[32];
    halves[threadIdx.x] = __float2half(1.0f);
    const float one = __half2float(halves[(threadIdx.x + 32) % 256]);  // FAULT race between threads
    FINISH(block_sum(square_of(x + blockIdx.x * rows.pitch, rows.C), sums) * one);
}
A_BLOCK_A_ROW(half_of_a_neighbor)

__global__ void exchange_of_a_warp(PARAMETERS) {
    __shared__ float lanes[32];
    float sum = warp_sum(square_of(x + blockIdx.x * rows.pitch, rows.C));
    lanes[threadIdx.x] = sum;
    sum = lanes[threadIdx.x ^ 1];  // FAULT race between threads of a warp
    FINISH(sum);
}
VERSION_OF(exchange_of_a_warp, rows.N, 32, 0)

__global__ void all_threads_add_in_memory(PARAMETERS) {
    __shared__ float sums[32];
    const float sum = block_sum(square_of(x + blockIdx.x * rows.pitch, rows.C), sums);
    FINISH(sum);
    rstd[blockIdx.x] += 0;  // FAULT race between threads
}
A_BLOCK_A_ROW(all_threads_add_in_memory)

__global__ void all_threads_add_in_shared(PARAMETERS) {
    __shared__ float sum;
    if (threadIdx.x == 0) { sum = 0; }
    __syncthreads();
    sum += square_of(x + blockIdx.x * rows.pitch, rows.C);  // FAULT race between threads
    __syncthreads();
    FINISH(sum);
}
A_BLOCK_A_ROW(all_threads_add_in_shared)

__global__ void blocks_add_to_one_address(PARAMETERS) {
    SOUND;
    if (threadIdx.x == 0 && blockIdx.x > 0) { rstd[0] += 0; }  // FAULT race between blocks
}
A_BLOCK_A_ROW(blocks_add_to_one_address)

__global__ void blocks_overlap(PARAMETERS) {
    SOUND;
    if (blockIdx.x + 1 < rows.N) { out[(blockIdx.x + 1) * rows.pitch + threadIdx.x % 8] = weight[0]; }  // FAULT race between
}
A_BLOCK_A_ROW(blocks_overlap)

static __device__ unsigned arrived;  // blocks
template <bool FENCE>
__device__ void last_block_reads(PARAMETERS) {
    __shared__ float sums[32];
    __shared__ bool last;
    FINISH(block_sum(square_of(x + blockIdx.x * rows.pitch, rows.C), sums));
    if (threadIdx.x == 0) {
        if (FENCE) { __threadfence(); }
        last = atomicAdd(&arrived, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last || threadIdx.x > 0) { return; }
    float sum = 0;
    for (unsigned n = 0; n < gridDim.x; n++) { sum += rstd[n]; }  // FAULT race between blocks
    arrived = sum == 1e30f;
}
__global__ void fence_missing(PARAMETERS) { last_block_reads<false>(out, rstd, x, weight, rows, eps); }
A_BLOCK_A_ROW(fence_missing)

__global__ void fence(PARAMETERS) { last_block_reads<true>(out, rstd, x, weight, rows, eps); }  // FAULT none
A_BLOCK_A_ROW(fence)

// everyday CUDA: each line is a kernel, on 256 words of 0 and the tensor x
struct OneLine {
    const char* text;
    void (*run)(unsigned*, unsigned*, const floatX*);
};
static std::vector<OneLine> one_lines;
#define ONE_AT(one, run, known, ...)                                                                       \
    __global__ void __launch_bounds__(256) one(unsigned* wrong, unsigned* word, const floatX* x) {         \
        if (!(__VA_ARGS__)) { atomicAdd(wrong, 1u); }                                                      \
    }                                                                                                      \
    static void run(unsigned* wrong, unsigned* word, const floatX* x) { one<<<1, 256>>>(wrong, word, x); } \
    static const bool known = (one_lines.push_back({#__VA_ARGS__, run}), true);
#define ONE_OF(line, ...) ONE_AT(one_##line, run_##line, known_##line, __VA_ARGS__)
#define ONE_LINE(line, ...) ONE_OF(line, __VA_ARGS__)
#define ONE(...) ONE_LINE(__LINE__, __VA_ARGS__)
#define FLOATS ((float*)word + threadIdx.x)
namespace cg = cooperative_groups;
static __constant__ float two_and_three[2] = {2, 3};
static __device__ float* word_of_thread(void) {
    __shared__ float words[256];
    return &words[threadIdx.x];
}
#define WORD word_of_thread()
static __device__ float product_of_ones(void) {
    using namespace nvcuda::wmma;
    __shared__ __half ones[256];
    __shared__ float product[256];
    fragment<matrix_a, 16, 16, 16, __half, row_major> a;
    fragment<matrix_b, 16, 16, 16, __half, col_major> b;
    fragment<accumulator, 16, 16, 16, float> c;
    ones[threadIdx.x] = __float2half(1.0f);
    __syncthreads();
    fill_fragment(c, 0.0f);
    load_matrix_sync(a, ones, 16);
    load_matrix_sync(b, ones, 16);
    mma_sync(c, a, b, c);
    if (threadIdx.x < 32) { store_matrix_sync(product, c, 16, mem_row_major); }
    __syncthreads();
    return product[threadIdx.x];
}
ONE(rsqrtf(4.0f) == 0.5f && normcdff(0) == 0.5f)
ONE(to_float(__ldg(x)) == to_float(__ldcg(x)))
ONE(atomicCAS(word, 0u, 0u) == 0)
ONE(atomicExch(word, 0u) == 0)
ONE((__threadfence(), __threadfence_block(), true))
ONE(__activemask() >> threadIdx.x % 32 & 1)
ONE(__any_sync(~0u, threadIdx.x % 32 == 3) && !__all_sync(~0u, threadIdx.x % 32 == 3))
ONE(__reduce_add_sync(~0u, 1) == 32 && __reduce_max_sync(~0u, threadIdx.x % 32) == 31)
ONE(threadIdx.x % warpSize < 32)
ONE(clock64() > 0)
ONE(__low2float(__hfma2(__float2half2_rn(2), __float2half2_rn(3), __float2half2_rn(1))) == 7)
ONE(fdividef(1, 2) == 0.5f && __fdividef(1, 4) == 0.25f)
ONE(__frcp_rn(2) == 0.5f)
ONE(__saturatef(2) == 1 && __saturatef(-2) == 0)
ONE(__syncthreads_or(threadIdx.x == 5) && !__syncthreads_and(threadIdx.x == 5) && __syncthreads_count(1) == 256)
ONE(__umulhi(1u << 31, 4) == 2 && __mulhi(-(1 << 30), 8) == -2)
ONE(product_of_ones() == 16)
ONE((__pipeline_memcpy_async(WORD, two_and_three, 4), __pipeline_commit(), __pipeline_wait_prior(0), *WORD == 2))
ONE(cg::reduce(cg::tiled_partition<32>(cg::this_thread_block()), 1, cg::plus<int>()) == 32)
ONE((cg::sync(cg::this_thread_block()), cg::this_grid().thread_rank() == threadIdx.x))
ONE(cg::tiled_partition<4>(cg::this_thread_block()).shfl_up(threadIdx.x, 1) == threadIdx.x - (threadIdx.x % 4 > 0))
ONE(reinterpret_cast<const float4*>(FLOATS - threadIdx.x)->w == 0 && make_float4(1, 2, 3, 4).w == 4)
ONE(__bfloat1622float2(__floats2bfloat162_rn(1, 2)).y == 2 && __half22float2(__floats2half2_rn(1, 2)).y == 2)
ONE(two_and_three[1] == 3)
ONE((assert(blockDim.x == 256), printf("") == 0))
ONE(atomicOr(word, 0u) == 0 && atomicAnd(word, 0u) == 0 && atomicXor(word, 0u) == 0 && atomicInc(word, 0u) == 0)
ONE(atomicAdd((float*)word, 0.0f) == 0 && atomicMax((int*)word, 0) == 0 && atomicMin(word, 5u) == 0)
ONE(__shfl_up_sync(~0u, threadIdx.x, 1, 8) == threadIdx.x - (threadIdx.x % 8 > 0) && __shfl_xor_sync(~0u, 7, 1) == 7)
ONE(__popc(7) == 3 && __popcll(7) == 3 && __ffs(4) == 3 && __clz(1) == 31 && __clzll(1) == 63 && __brev(1) == 1u << 31)
ONE(__float2int_rn(2.5f) == 2 && __float2int_ru(2.5f) == 3 && __int2float_rn(2) == 2 && __float_as_uint(1) == 0x3f800000)
ONE(__half2float(hexp(__float2half(0))) == 1 && __bfloat162float(hrsqrt(__float2bfloat16(4))) == 0.5f)
ONE(fminf(CUDART_INF_F, NAN) > 1e30f && (int)CUDART_PI_F == 3)

static void everyday_launch(PARAMETERS, cudaStream_t stream) {  // FAULT none
    rmsnorm_forward_cuda(out, rstd, x, weight, rows, eps, stream);
    for (const OneLine& one : one_lines) {
        unsigned *words, wrong = 0;
        CUDA_CHECK(cudaMalloc(&words, 2048));
        CUDA_CHECK(cudaMemset(words, 0, 2048));
        one.run(words, words + 256, x);
        CUDA_CHECK(cudaMemcpy(&wrong, words, 4, cudaMemcpyDeviceToHost));
        CUDA_CHECK(cudaFree(words));
        CHECK(wrong == 0, "%s is false", one.text);
    }
}
LAUNCHED(everyday)

__global__ void a_block_too_many(PARAMETERS) {
    __shared__ float sums[32];
    const float sum = block_sum(square_of(x, rows.C), sums);
    const size_t n = blockIdx.x;
    if (threadIdx.x == 0) { rstd[n] = root_of(sum, rows, eps); }  // FAULT out of bounds of device memory
}
VERSION_OF(a_block_too_many, rows.N + 1, 256, 0)

__global__ void in_front(PARAMETERS) {
    SOUND;
    if (blockIdx.x == 0 && threadIdx.x == 3) { sincosf(eps, rstd - 1, rstd + 1); }  // FAULT out of bounds of device memory
}
A_BLOCK_A_ROW(in_front)

__global__ void behind_its_row(PARAMETERS) {  // where rows have padding
    SOUND;
    if (rows.pitch == (size_t)rows.C) { return; }
    out[blockIdx.x * rows.pitch + rows.C] = 0;  // FAULT out of bounds of a row
}
VERSION_OF(behind_its_row, rows.N, 32, 0)

__global__ void far_away(PARAMETERS) {
    SOUND;
    if (threadIdx.x == 3) { rstd[(size_t)1 << 48] = 0; }  // FAULT an address where no memory is
}
A_BLOCK_A_ROW(far_away)

__global__ void reads_a_row_too_many(PARAMETERS) {
    __shared__ float sums[32];
    const float next = to_float(x[(blockIdx.x + 1) * rows.pitch]);  // FAULT out of bounds of device memory
    FINISH(block_sum(square_of(x + blockIdx.x * rows.pitch, rows.C), sums) + 0 * fmaxf(0, next));
}
A_BLOCK_A_ROW(reads_a_row_too_many)

__global__ void no_column_guard(PARAMETERS) {
    __shared__ float sums[32];
    const float r = root_of(block_sum(square_of(x + blockIdx.x * rows.pitch, rows.C), sums), rows, eps);
    for (int c = threadIdx.x; c < (rows.C + 255) / 256 * 256; c += 256) {
        out[blockIdx.x * rows.pitch + c] = from_float<floatX>(r * to_float(weight[c]));  // FAULT out of bounds of device memory
    }
}
A_BLOCK_A_ROW(no_column_guard)

__global__ void sum_not_set_to_zero(PARAMETERS) {
    __shared__ float sum;
    atomicAdd(&sum, square_of(x + blockIdx.x * rows.pitch, rows.C));  // FAULT shared memory is read that no thread
    __syncthreads();
    FINISH(sum);
}
A_BLOCK_A_ROW(sum_not_set_to_zero)

__global__ void tail_not_filled(PARAMETERS) {
    __shared__ float tile[1024];
    for (int c = threadIdx.x; c < rows.C; c += 256) { tile[c] = to_float(x[blockIdx.x * rows.pitch + c]); }
    __syncthreads();
    float square = 0;
    for (int c = 0; c < 1024; c++) { square += c < rows.C ? tile[c] * tile[c] : 0 * tile[c]; }  // FAULT shared memory is read
    FINISH(square);
}
A_BLOCK_A_ROW(tail_not_filled)

__global__ void of_the_host(PARAMETERS) {
    SOUND;  // FAULT an address of the host's memory
}
static void of_the_host_launch(PARAMETERS, cudaStream_t stream) {
    const std::vector<floatX> ones((size_t)rows.C, from_float<floatX>(1.0f));
    of_the_host<<<(unsigned)rows.N, 256, 0, stream>>>(out, rstd, x, ones.data(), rows, eps);
    CUDA_CHECK(cudaDeviceSynchronize());
}
LAUNCHED(of_the_host)

__global__ void output_read_first(PARAMETERS) {
    __shared__ float sums[32];
    const float before = to_float(out[blockIdx.x * rows.pitch]);  // FAULT device memory is read that nobody has written
    __syncthreads();
    FINISH(block_sum(square_of(x + blockIdx.x * rows.pitch, rows.C), sums) + (before == 1e30f));
}
A_BLOCK_A_ROW(output_read_first)

__global__ void past_dynamic(PARAMETERS) {
    extern __shared__ float row[];
    for (int c = threadIdx.x; c < rows.C; c += 256) { row[c + 1] = 0; }  // FAULT out of bounds of dynamic shared memory
    SOUND;
}
VERSION_OF(past_dynamic, rows.N, 256, rows.C * sizeof(float))

__global__ void small_array(PARAMETERS) {
    __shared__ float small[8];
    __shared__ float sums[32];
    small[threadIdx.x] = 0;  // FAULT out of bounds of an array
    FINISH(block_sum(square_of(x + blockIdx.x * rows.pitch, rows.C), sums));
}
VERSION_OF(small_array, rows.N, 128, 0)

struct Square {
    float of, root;
};
__global__ void behind_registers(PARAMETERS) {
    Square last[2];
    for (int k = 0; k < 2; k++) { last[k + 1] = Square{(float)rows.C, eps}; }  // FAULT out of bounds of an array
    SOUND;
    rstd[blockIdx.x] += 0 * last[0].of;
}
VERSION_OF(behind_registers, rows.N, 1, 0)

__global__ void barrier_in_a_branch(PARAMETERS) {
    __shared__ float copies[32];
    copies[threadIdx.x] = eps;
    if (threadIdx.x % 2 == 0) {
        __syncthreads();
        copies[threadIdx.x] += 1;
    } else {
        __syncthreads();  // FAULT threads of a warp at two barriers
    }
    SOUND;
}
VERSION_OF(barrier_in_a_branch, rows.N, 32, 0)

__global__ void half_a_mask(PARAMETERS) {
    float square = square_of(x + blockIdx.x * rows.pitch, rows.C);
    for (int k = 16; k > 0; k /= 2) { square += __shfl_xor_sync(0xffff, square, k); }  // FAULT a rule of the card is broken
    FINISH(square);
}
VERSION_OF(half_a_mask, rows.N, 32, 0)

__global__ void some_lanes_alone(PARAMETERS) {
    float square = square_of(x + blockIdx.x * rows.pitch, rows.C);
    if (threadIdx.x < 31) {
        __syncwarp();  // FAULT a rule of the card is broken
    } else {
        __syncthreads();
    }
    FINISH(square);
}
VERSION_OF(some_lanes_alone, rows.N, 32, 0)

__global__ void small_array_by_pointer(PARAMETERS) {
    __shared__ float small[8];
    __shared__ float sums[32];
    float* p = small;
    p[threadIdx.x] = 0;  // FAULT out of bounds of static shared memory
    FINISH(block_sum(square_of(x + blockIdx.x * rows.pitch, rows.C), sums));
}
VERSION_OF(small_array_by_pointer, rows.N, 128, 0)

__global__ void odd_address(PARAMETERS) {
    __shared__ float sums[32];
    const float2 pair = *(const float2*)(weight + 1);  // FAULT misaligned access
    FINISH(block_sum(square_of(x + blockIdx.x * rows.pitch, rows.C), sums) + 0 * (pair.x + pair.y));
}
A_BLOCK_A_ROW(odd_address)

__global__ void copy_not_waited_for(PARAMETERS) {
    __shared__ float tile[2][128];
    const float* from = (const float*)(x + blockIdx.x * rows.pitch);
    float square = 0;
    for (int k = 0; k < 3; k++) {
        if (k < 2) { __pipeline_memcpy_async(&tile[k][threadIdx.x], &from[threadIdx.x % 32], 4); }
        __pipeline_commit();
        __pipeline_wait_prior(2);
        if (k > 0) { square += tile[k - 1][threadIdx.x]; }  // FAULT memory of a copy that is under way
    }
    __pipeline_wait_prior(0);
    FINISH(square);
}
VERSION_OF(copy_not_waited_for, rows.N, 128, 0)

static void second_stream_launch(PARAMETERS, cudaStream_t stream) {
    static cudaStream_t second;
    if (!second) { CUDA_CHECK(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking)); }
    rmsnorm_forward_cuda(out, rstd, x, weight, rows, eps, stream);
    CUDA_CHECK(cudaMemsetAsync(rstd, 0, rows.N * sizeof(float), second));  // FAULT race between streams
}
LAUNCHED(second_stream)

__global__ void adds_to(float* sums) { sums[blockIdx.x] += 1; }  // FAULT memory that was freed
static void freed_too_early_launch(PARAMETERS, cudaStream_t stream) {
    float* sums;
    CUDA_CHECK(cudaMallocAsync((void**)&sums, rows.N * sizeof(float), stream));
    CUDA_CHECK(cudaMemsetAsync(sums, 0, rows.N * sizeof(float), stream));
    CUDA_CHECK(cudaFreeAsync(sums, stream));
    adds_to<<<(unsigned)rows.N, 1, 0, stream>>>(sums);
    rmsnorm_forward_cuda(out, rstd, x, weight, rows, eps, stream);
}
LAUNCHED(freed_too_early)

__global__ void input_written(PARAMETERS) {
    SOUND;
    if (threadIdx.x == 0) { ((floatX*)weight)[blockIdx.x % rows.C] = x[0]; }  // FAULT an input is written
}
A_BLOCK_A_ROW(input_written)

__global__ void too_much_static(PARAMETERS) {
    __shared__ float tile[52][256];
    tile[blockIdx.x % 52][threadIdx.x] = eps;  // FAULT too much static shared memory
    FINISH(square_of(x, rows.C) + tile[0][threadIdx.x]);
}
A_BLOCK_A_ROW(too_much_static)

__global__ void __launch_bounds__(128) bounds_of_launch(PARAMETERS) {  // FAULT a rule of the card is broken
    SOUND;
}
A_BLOCK_A_ROW(bounds_of_launch)

__device__ float endless(float x, const float* weights) { return x < 0 ? x : endless(x * weights[0], weights) + x; }
__global__ void endless_calls(PARAMETERS) { FINISH(endless(1, (const float*)x)); }  // FAULT a rule of the card is broken
A_BLOCK_A_ROW(endless_calls)

static __device__ volatile int ready;
__global__ void spins(PARAMETERS) {
    SOUND;
    while (threadIdx.x == 0 && ready == 0) {}  // FAULT a rule of the card is broken
    if (threadIdx.x == 32) { ready = 1; }
}
A_BLOCK_A_ROW(spins)

// a product of zeros by wgmma, of which one word is missing
template <bool READERS, bool FENCE, bool WAIT>
__device__ __forceinline__ float product_of_zeros(char* tile) {
    float sums[32];
    for (int i = threadIdx.x; i < 2048; i += 128) { ((float*)tile)[i] = 0; }  // of a and of b: 64 rows of 64
    if (READERS) { fence_async_readers(); }
    __syncthreads();
    if (FENCE) { wgmma_fence(); }
#ifndef PRECISION_FP32
    const uint32_t at = matrix_rows(matrix_address(shared_address(tile)));
    wgmma_shared<64, 0>(sums, at, at, 0);
    wgmma_commit();
    if (WAIT) { wgmma_wait<0>(); }
#endif
    return sums[threadIdx.x % 32];
}
#define PRODUCT(...)               \
    extern __shared__ char smem[]; \
    __shared__ float sums[32];     \
    FINISH(block_sum(square_of(x + blockIdx.x * rows.pitch, rows.C) + product_of_zeros<__VA_ARGS__>(wgmma_tiles(smem)), sums))
__global__ void sound_product(PARAMETERS) { PRODUCT(true, true, true); }  // FAULT none
VERSION_OF(sound_product, rows.N, 128, 9 << 10)
__global__ void readers_not_fenced(PARAMETERS) { PRODUCT(false, true, true); }  // FAULT a fence is missing
VERSION_OF(readers_not_fenced, rows.N, 128, 9 << 10)
__global__ void product_not_fenced(PARAMETERS) { PRODUCT(true, false, true); }  // FAULT a fence is missing
VERSION_OF(product_not_fenced, rows.N, 128, 9 << 10)
__global__ void product_not_waited_for(PARAMETERS) { PRODUCT(true, true, false); }  // FAULT registers of a product
VERSION_OF(product_not_waited_for, rows.N, 128, 9 << 10)

__global__ void nothing(void) { asm volatile(""); }
__global__ void beside_nothing(PARAMETERS) { SOUND; }
static void beside_nothing_launch(PARAMETERS, cudaStream_t stream) {  // FAULT none
    CUDA_CHECK(cudaFuncSetAttribute((const void*)nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 << 10));
    nothing<<<1, 32, 100 << 10, stream>>>();
    beside_nothing<<<(unsigned)rows.N, 256, 0, stream>>>(out, rstd, x, weight, rows, eps);
}
LAUNCHED(beside_nothing)

__global__ void much_shared(PARAMETERS) { SOUND; }
VERSION_OF(much_shared, rows.N, 256, 100 << 10)  // FAULT too much dynamic shared memory

__global__ void many_threads(PARAMETERS) { FINISH(square_of(x, rows.C)); }
VERSION_OF(many_threads, rows.N, 2048, 0)  // FAULT a launch that a card refuses
