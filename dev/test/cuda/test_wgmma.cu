/* test_wgmma.cu -- tests Hopper's instructions as ptx.cuh wraps them, one by one, and the pieces that attention_sm90.cuh builds
 * from them. So a mistake shows here before a whole attention kernel is wrong. Inputs are small integers: every result is
 * exact.
 *
 *   nvcc -std=c++17 -O3 -DPRECISION_BF16 -DBARRIER_TIMEOUT=200000000ull -gencode arch=compute_90a,code=sm_90a \
 *        -diag-suppress 177 -I. -o test_wgmma dev/test/cuda/test_wgmma.cu && ./test_wgmma
 *
 * BARRIER_TIMEOUT (nanoseconds) turns a wait that would last forever into a message. Without sm_90a code and a GPU that runs
 * it, all tests are skipped.
 */
#include <vector>

#include "llmc/attention.cuh"
#include "dev/test/test.h"

#ifndef PRECISION_FP32

/* Returns the numbers that tests multiply: -3 .. 3, different for every seed. */
__host__ __device__ static inline int small(uint32_t i, uint32_t seed) {
    uint32_t z = (i + 1) * 2654435761u + seed * 0x9e3779b9u;
    z = (z ^ z >> 15) * 0x85ebca6bu;
    return (int)((z ^ z >> 13) % 7) - 3;
}

/* Waits for the GPU, and fails the test if a kernel's wait for a barrier timed out. */
static void finish(void) {
    CUDA_CHECK(cudaDeviceSynchronize());
#ifdef BARRIER_TIMEOUT
    unsigned long long stuck = 0;
    CUDA_CHECK(cudaMemcpyFromSymbol(&stuck, barrier_stuck, sizeof stuck));
    CHECK(stuck == 0, "block %llu thread %llu waited too long for the barrier at %llu, parity %llu", stuck >> 48,
          stuck >> 32 & 0xffff, (stuck & 0xffffffff) >> 2, stuck >> 1 & 1);
    stuck = 0;
    CUDA_CHECK(cudaMemcpyToSymbol(barrier_stuck, &stuck, sizeof stuck));
#endif
}

template <typename T>
struct Device {
    T* p;
    size_t n;
    explicit Device(size_t n_) : n(n_) {
        CUDA_CHECK(cudaMalloc((void**)&p, n * sizeof(T)));
        CUDA_CHECK(cudaMemset(p, 0xff, n * sizeof(T)));
    }
    explicit Device(const std::vector<T>& v) : Device(v.size()) {
        CUDA_CHECK(cudaMemcpy(p, v.data(), n * sizeof(T), cudaMemcpyHostToDevice));
    }
    ~Device() { CUDA_CHECK(cudaFree(p)); }
    std::vector<T> fetch() const {
        std::vector<T> v(n);
        finish();
        CUDA_CHECK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
        return v;
    }
};

/* Returns rows x cols small numbers. */
static std::vector<floatX> matrix(size_t rows, size_t cols, uint32_t seed) {
    std::vector<floatX> m(rows * cols);
    for (size_t i = 0; i < m.size(); i++) { m[i] = from_float<floatX>((float)small((uint32_t)i, seed)); }
    return m;
}

/* Returns the byte offset of element (r, c) in a swizzled tile of `rows` rows. */
__host__ __device__ static inline uint32_t swizzled(int rows, int r, int c) {
    return (uint32_t)(c / 64 * rows * 128 + r * 128 + ((c % 64 / 8 ^ r % 8) << 4) + c % 8 * 2);
}

/* Writes a row-major matrix into a swizzled tile with ordinary stores. */
__device__ static void fill_tile(char* tile, const floatX* src, int rows, int cols) {
    for (int i = threadIdx.x; i < rows * cols; i += blockDim.x) {
        *(floatX*)(tile + swizzled(rows, i / cols, i % cols)) = src[i];
    }
}

/* Return the row and column of element i of a thread's accumulator. */
__host__ __device__ static inline int result_row(int thread, int i) {
    return thread % 128 / 32 * 16 + thread % 32 / 4 + i % 4 / 2 * 8;
}
__host__ __device__ static inline int result_col(int thread, int i) { return i / 4 * 8 + thread % 4 * 2 + i % 2; }

// ---------------------------------------------------------------------------------------------------------------------
// copies

__global__ void copy_box_kernel(char* out, const __grid_constant__ CUtensorMap map, int row, int block, int b, uint32_t bytes) {
    extern __shared__ __align__(128) char smem[];
    __shared__ uint64_t barrier;
    char* tile = wgmma_tiles(smem);
    if (threadIdx.x == 0) {
        barrier_init(shared_address(&barrier), 1);
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        barrier_arrive_expect(shared_address(&barrier), bytes);
        copy_box_4d(shared_address(tile), &map, 0, row, block, b, shared_address(&barrier));
    }
    barrier_wait(shared_address(&barrier), 0);
    for (uint32_t i = threadIdx.x; i < bytes; i += blockDim.x) { out[i] = tile[i]; }
}

static void copy_engine_writes_swizzled_tiles_and_zeros_past_the_end(void) {
    const int T = 200, heads = 5;
    const size_t B = 3;
    for (int HD : {64, 128}) {
        const size_t width = (size_t)heads * HD, pitch = width + 24;
        Device<floatX> x(matrix(B * T, pitch, 1));
        const std::vector<floatX> host = matrix(B * T, pitch, 1);
        for (int rows : {64, 96, 128, 192}) {
            const CUtensorMap map = tensor_map(x.p, B, T, width, pitch, rows, HD);
            for (int first : {0, 64, 150, 192}) {
                const int head = (first + rows) / 32 % heads, b = (first / 50 + rows / 64) % (int)B;
                Device<char> out((size_t)rows * HD * 2);
                attention_launch(copy_box_kernel, dim3(1), 128, rows * HD * 2 + 1024, 0, out.p, map, first, head * HD / 64, b,
                                 (uint32_t)rows * HD * 2);
                const std::vector<char> got = out.fetch();
                int wrong = 0;
                for (int r = 0; r < rows; r++) {
                    for (int c = 0; c < HD; c++) {
                        const float want =
                            first + r < T ? to_float(host[((size_t)b * T + first + r) * pitch + head * HD + c]) : 0;
                        wrong += to_float(*(const floatX*)&got[swizzled(rows, r, c)]) != want;
                    }
                }
                CHECK(wrong == 0, "HD %d, %d rows from token %d, head %d, sequence %d: %d of %d elements wrong", HD, rows,
                      first, head, b, wrong, rows * HD);
            }
        }
    }
}

__global__ void copy_bytes_kernel(float2* out, const float2* src, int n) {
    __shared__ __align__(128) float2 buffer[128];
    __shared__ uint64_t barrier;
    if (threadIdx.x == 0) {
        barrier_init(shared_address(&barrier), 1);
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        barrier_arrive_expect(shared_address(&barrier), n * 8);
        copy_bytes(shared_address(buffer), src, n * 8, shared_address(&barrier));
    }
    barrier_wait(shared_address(&barrier), 0);
    if (threadIdx.x < n) { out[threadIdx.x] = buffer[threadIdx.x]; }
}

static void copy_engine_brings_plain_bytes(void) {
    std::vector<float2> host(256);
    for (int i = 0; i < 256; i++) { host[i] = make_float2((float)i, -(float)i); }
    Device<float2> src(host);
    for (int n : {64, 128}) {
        Device<float2> out(n);
        copy_bytes_kernel<<<1, 128>>>(out.p, src.p + 64, n);
        CUDA_CHECK_LAUNCH("copy_bytes_kernel");
        const std::vector<float2> got = out.fetch();
        int wrong = 0;
        for (int i = 0; i < n; i++) { wrong += got[i].x != host[64 + i].x || got[i].y != host[64 + i].y; }
        CHECK(wrong == 0, "%d pairs: %d wrong", n, wrong);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// products

/* Computes c (A_ROWS x N) = a (A_ROWS x HD) b (N x HD)^T and c2 = a2 b2^T, 64 rows a warpgroup; a warpgroup reads the first
 * result while the second product is in flight. */
template <int HD, int N, int A_ROWS>
__global__ void scores_kernel(float* c, float* c2, const floatX* a, const floatX* b, const floatX* a2, const floatX* b2) {
    extern __shared__ __align__(128) char smem[];
    char *a_tile = wgmma_tiles(smem), *b_tile = a_tile + A_ROWS * HD * 2, *a2_tile = b_tile + N * HD * 2;
    char* b2_tile = a2_tile + A_ROWS * HD * 2;
    fill_tile(a_tile, a, A_ROWS, HD);
    fill_tile(b_tile, b, N, HD);
    fill_tile(a2_tile, a2, A_ROWS, HD);
    fill_tile(b2_tile, b2, N, HD);
    fence_async_readers();
    __syncthreads();
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    float d[N / 2], d2[N / 2];
    wgmma_fence();
    wgmma_scores<HD, N, A_ROWS>(d, matrix_rows(shared_address(a_tile) + warpgroup * 64 * 128),
                                matrix_rows(shared_address(b_tile)));
    wgmma_commit();
    wgmma_scores<HD, N, A_ROWS>(d2, matrix_rows(shared_address(a2_tile) + warpgroup * 64 * 128),
                                matrix_rows(shared_address(b2_tile)));
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_hold(d);
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        c[(warpgroup * 64 + result_row(threadIdx.x, i)) * N + result_col(threadIdx.x, i)] = d[i];
    }
    wgmma_wait<0>();
    wgmma_hold(d2);
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        c2[(warpgroup * 64 + result_row(threadIdx.x, i)) * N + result_col(threadIdx.x, i)] = d2[i];
    }
}

static int wrong_scores(const std::vector<float>& c, const std::vector<floatX>& a, const std::vector<floatX>& b, int M, int N,
                        int K) {
    int wrong = 0;
    for (int i = 0; i < M; i++) {
        for (int j = 0; j < N; j++) {
            float want = 0;
            for (int k = 0; k < K; k++) { want += to_float(a[i * K + k]) * to_float(b[j * K + k]); }
            wrong += c[i * N + j] != want;
        }
    }
    return wrong;
}

template <int HD, int N, int A_ROWS>
static void check_scores(void) {
    const std::vector<floatX> a = matrix(A_ROWS, HD, 2), b = matrix(N, HD, 3), a2 = matrix(A_ROWS, HD, 4),
                              b2 = matrix(N, HD, 5);
    Device<floatX> d_a(a), d_b(b), d_a2(a2), d_b2(b2);
    Device<float> c((size_t)A_ROWS * N), c2((size_t)A_ROWS * N);
    attention_launch(scores_kernel<HD, N, A_ROWS>, dim3(1), A_ROWS * 2, 4 * (A_ROWS + N) * HD + 1024, 0, c.p, c2.p,
                     (const floatX*)d_a.p, (const floatX*)d_b.p, (const floatX*)d_a2.p, (const floatX*)d_b2.p);
    const int wrong = wrong_scores(c.fetch(), a, b, A_ROWS, N, HD), wrong2 = wrong_scores(c2.fetch(), a2, b2, A_ROWS, N, HD);
    CHECK(wrong == 0, "HD %d N %d, %d rows: %d of %d wrong", HD, N, A_ROWS, wrong, A_ROWS * N);
    CHECK(wrong2 == 0, "HD %d N %d, %d rows, second product: %d of %d wrong", HD, N, A_ROWS, wrong2, A_ROWS * N);
}

static void products_of_two_shared_tiles_by_rows(void) {
    check_scores<64, 64, 64>();
    check_scores<64, 128, 64>();
    check_scores<64, 128, 192>();
    check_scores<128, 64, 64>();
    check_scores<128, 64, 128>();
    check_scores<128, 128, 128>();
}

/* Computes c (64 x HD) = a (64 x K, from registers) b (K x HD), added to c0 in every element. */
template <int HD, int K>
__global__ void values_kernel(float* c, const floatX* a, const floatX* b, float c0) {
    extern __shared__ __align__(128) char smem[];
    char* b_tile = wgmma_tiles(smem);
    fill_tile(b_tile, b, K, HD);
    fence_async_readers();
    __syncthreads();
    float left[K / 2], d[HD / 2];
    uint32_t operand[K / 16][4];
#pragma unroll
    for (int i = 0; i < K / 2; i++) { left[i] = to_float(a[result_row(threadIdx.x, i) * K + result_col(threadIdx.x, i)]); }
#pragma unroll
    for (int i = 0; i < HD / 2; i++) { d[i] = c0; }
    fragment_operand(operand, left);
    wgmma_fence();
    wgmma_values<HD, K>(d, operand, matrix_columns(shared_address(b_tile), K * 128));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(d);
#pragma unroll
    for (int i = 0; i < HD / 2; i++) { c[result_row(threadIdx.x, i) * HD + result_col(threadIdx.x, i)] = d[i]; }
}

template <int HD, int K>
static void check_values(void) {
    const std::vector<floatX> a = matrix(64, K, 6), b = matrix(K, HD, 7);
    Device<floatX> d_a(a), d_b(b);
    Device<float> c((size_t)64 * HD);
    attention_launch(values_kernel<HD, K>, dim3(1), 128, K * HD * 2 + 1024, 0, c.p, (const floatX*)d_a.p, (const floatX*)d_b.p,
                     5.0f);
    const std::vector<float> got = c.fetch();
    int wrong = 0;
    for (int i = 0; i < 64; i++) {
        for (int j = 0; j < HD; j++) {
            float want = 5;
            for (int k = 0; k < K; k++) { want += to_float(a[i * K + k]) * to_float(b[k * HD + j]); }
            wrong += got[i * HD + j] != want;
        }
    }
    CHECK(wrong == 0, "HD %d K %d: %d of %d wrong", HD, K, wrong, 64 * HD);
}

static void products_of_registers_and_a_shared_tile_by_columns(void) {
    check_values<64, 64>();
    check_values<64, 96>();
    check_values<64, 128>();
    check_values<128, 64>();
    check_values<128, 96>();
    check_values<128, 128>();
}

/* Computes out (64 x HD) = (a b^T) v with a (64 x HD), b (N x HD), v (N x HD): the first product's result is the second
 * product's operand. */
template <int HD, int N>
__global__ void chain_kernel(floatX* out, size_t pitch, int valid, const floatX* a, const floatX* b, const floatX* v, float f) {
    extern __shared__ __align__(128) char smem[];
    char *a_tile = wgmma_tiles(smem), *b_tile = a_tile + 64 * HD * 2, *v_tile = b_tile + N * HD * 2;
    fill_tile(a_tile, a, 64, HD);
    fill_tile(b_tile, b, N, HD);
    fill_tile(v_tile, v, N, HD);
    fence_async_readers();
    __syncthreads();
    float s[N / 2], d[HD / 2];
    uint32_t operand[N / 16][4];
    wgmma_fence();
    wgmma_scores<HD, N, 64>(s, matrix_rows(shared_address(a_tile)), matrix_rows(shared_address(b_tile)));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(s);
    fragment_operand(operand, s);
    fragment_clear(d);
    wgmma_fence();
    wgmma_values<HD, N>(d, operand, matrix_columns(shared_address(v_tile), N * 128));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(d);
    const int row = threadIdx.x / 32 * 16;
    wgmma_store<HD>(out + row * pitch, pitch, valid - row, d, f, 2 * f);
}

template <int HD, int N>
static void check_chain(void) {
    std::vector<floatX> a = matrix(64, HD, 8), b = matrix(N, HD, 9), v = matrix(N, HD, 10);
    for (size_t i = 0; i < a.size(); i++) {
        a[i] = from_float<floatX>(i % 5 == 0 ? to_float(a[i]) : 0);
    }  // makes scores exact in 16 bits
    for (size_t i = 0; i < v.size(); i++) { v[i] = from_float<floatX>(i / HD % 16 == 3 ? to_float(v[i]) : 0); }
    Device<floatX> d_a(a), d_b(b), d_v(v);
    const size_t pitch = HD + 8;
    const int valid = 51;
    Device<floatX> out(64 * pitch);
    attention_launch(chain_kernel<HD, N>, dim3(1), 128, (64 + 2 * N) * HD * 2 + 1024, 0, out.p, pitch, valid,
                     (const floatX*)d_a.p, (const floatX*)d_b.p, (const floatX*)d_v.p, 0.25f);
    const std::vector<floatX> got = out.fetch();
    int wrong = 0, touched = 0;
    for (int i = 0; i < 64; i++) {
        for (int j = 0; j < (int)pitch; j++) {
            float want = 0;
            for (int u = 0; u < N && j < HD; u++) {
                float score = 0;
                for (int k = 0; k < HD; k++) { score += to_float(a[i * HD + k]) * to_float(b[u * HD + k]); }
                want += score * to_float(v[u * HD + j]);
            }
            const float is = to_float(got[i * pitch + j]);
            if (i < valid && j < HD) {
                wrong += is != to_float(from_float<floatX>(want * (i % 16 < 8 ? 0.25f : 0.5f)));
            } else {
                touched += !isnan(is);
            }
        }
    }
    CHECK(wrong == 0, "HD %d N %d: %d of %d wrong", HD, N, wrong, valid * HD);
    CHECK(touched == 0, "HD %d N %d: %d elements outside the rows were written", HD, N, touched);
}

static void results_become_operands_and_are_stored(void) {
    check_chain<64, 64>();
    check_chain<64, 128>();
    check_chain<128, 64>();
    check_chain<128, 128>();
}

// ---------------------------------------------------------------------------------------------------------------------
// the ring, registers that move, clusters, the work list

enum { RING_STAGES = 3, RING_ROWS = 64, RING_TILES = 40 };

/* The producer loads the tiles of x (RING_TILES x RING_ROWS x 64) through a ring; consumer warpgroup w writes (w + 1) times
 * each tile. */
__global__ void __launch_bounds__(WarpgroupSplit<2, 1>::THREADS, 1)
    ring_kernel(float* out, const __grid_constant__ CUtensorMap map) {
    extern __shared__ __align__(128) char smem[];
    __shared__ uint64_t barriers[2 * RING_STAGES];
    char* tiles = wgmma_tiles(smem);
    Ring<RING_STAGES> ring(barriers);
    if (threadIdx.x == 0) {
        ring.init(8);
        barrier_init_done();
    }
    __syncthreads();
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        registers_lower<WarpgroupSplit<2, 1>::PRODUCER>();
        if (threadIdx.x != 0) { return; }
        for (int i = 0; i < RING_TILES; i++) {
            ring.begin_fill(RING_ROWS * 128);
            copy_box_4d(shared_address(tiles) + ring.stage * RING_ROWS * 128, &map, 0, i * RING_ROWS, 0, 0, ring.full());
            ring.advance();
        }
    } else {
        registers_raise<WarpgroupSplit<2, 1>::CONSUMER>();
        for (int i = 0; i < RING_TILES; i++) {
            ring.wait_full();
            for (int e = threadIdx.x % 128; e < RING_ROWS * 64; e += 128) {
                const floatX x = *(const floatX*)(tiles + ring.stage * RING_ROWS * 128 + swizzled(RING_ROWS, e / 64, e % 64));
                out[((warpgroup - 1) * RING_TILES + i) * RING_ROWS * 64 + e] = to_float(x) * warpgroup;
            }
            ring_release(ring.empty());
            ring.advance();
        }
    }
}

static void tiles_pass_through_a_ring_in_order(void) {
    const std::vector<floatX> x = matrix(RING_TILES * RING_ROWS, 64, 11);
    Device<floatX> d_x(x);
    const size_t n = x.size();
    Device<float> out(2 * n);
    const CUtensorMap map = tensor_map(d_x.p, 1, RING_TILES * RING_ROWS, 64, 64, RING_ROWS, 64);
    attention_launch(ring_kernel, dim3(1), WarpgroupSplit<2, 1>::THREADS, RING_STAGES * RING_ROWS * 128 + 1024, 0, out.p, map);
    const std::vector<float> got = out.fetch();
    size_t wrong = 0;
    for (size_t i = 0; i < 2 * n; i++) { wrong += got[i] != to_float(x[i % n]) * (i < n ? 1 : 2); }
    CHECK(wrong == 0, "%zu of %zu wrong", wrong, 2 * n);
}

enum { PAIR_STEPS = 7 };

/* Two blocks of a cluster compute c (128 x 256), 64 rows a block, from PAIR_STEPS steps of 64 of the summed index. Each block
 * copies one half of b's part to both blocks. A warp writes its 16 rows of c through shared memory, in boxes of 64 columns. */
template <int B_COLUMNS>
__global__ void BLOCKS_OF_CLUSTER(2) __launch_bounds__(160, 1)
    pair_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                const __grid_constant__ CUtensorMap c_map) {
    enum { STAGES = 2, A_BYTES = 64 * 128, HALF_BYTES = 128 * 128, STAGE_BYTES = A_BYTES + 2 * HALF_BYTES };
    extern __shared__ __align__(128) char smem[];
    __shared__ uint64_t barriers[2 * STAGES];
    const uint32_t stages = shared_address(wgmma_tiles(smem)), boxes = stages + STAGES * STAGE_BYTES;
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, rank = blockIdx.x % 2;
    Ring<STAGES> ring(barriers);
    if (threadIdx.x == 0) {
        ring.init(2 * 4);
        barrier_init_done();
    }
    cluster_sync();
    if (warp == 4) {
        for (int i = 0; lane == 0 && i < PAIR_STEPS; i++) {
            const uint32_t a = stages + ring.stage * STAGE_BYTES, half = a + A_BYTES + rank * HALF_BYTES;
            ring.begin_fill(STAGE_BYTES);
            copy_box_4d(a, &a_map, 0, rank * 64, i, 0, ring.full());
            copy_box_4d_to(3, half, &b_map, 0, B_COLUMNS ? i * 64 : rank * 128, B_COLUMNS ? rank * 2 : i, 0, ring.full());
            ring.advance();
        }
    } else {
        float d[128];
        for (int i = 0; i < PAIR_STEPS; i++) {
            const uint32_t a = matrix_address(stages) + ring.stage * STAGE_BYTES, b = a + A_BYTES;
            ring.wait_full();
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; k++) {
                wgmma_shared<256, B_COLUMNS>(d, matrix_rows(a) + k * 2,
                                             B_COLUMNS ? matrix_columns(b, 64 * 128) + k * 128 : matrix_rows(b) + k * 2,
                                             i > 0 || k > 0);
            }
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_hold(d);
            ring_release_cluster(ring.empty());
            ring.advance();
        }
        const uint32_t box = boxes + warp * 2048;
#pragma unroll
        for (int q = 0; q < 4; q++) {
            if (lane == 0) { store_wait<0>(); }
            __syncwarp();
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float* x = d + q * 32 + j * 8;
                store_matrix_x4(box + lane % 16 * 128 + ((2 * j + lane / 16) ^ lane % 8) * 16, pack2(x[0], x[1]),
                                pack2(x[2], x[3]), pack2(x[4], x[5]), pack2(x[6], x[7]));
            }
            fence_async_readers();
            __syncwarp();
            if (lane == 0) {
                store_box_4d(&c_map, box, 0, rank * 64 + warp * 16, q, 0);
                store_commit();
            }
        }
        if (lane == 0) { store_wait<0>(); }
    }
    __syncwarp();
    cluster_sync();
}

template <int B_COLUMNS>
static void check_pair(void) {
    const int K = PAIR_STEPS * 64, N = 256, M = 128, valid = 75;
    const std::vector<floatX> a = matrix(M, K, 12), b = matrix(B_COLUMNS ? K : N, B_COLUMNS ? N : K, 13);
    Device<floatX> d_a(a), d_b(b), c((size_t)M * N);
    auto* kernel = pair_kernel<B_COLUMNS>;
    attention_launch(kernel, dim3(2), 160, 2 * (64 + 256) * 128 + 4 * 2048 + 1024, 0, tensor_map(d_a.p, 1, M, K, K, 64, 64),
                     B_COLUMNS ? tensor_map(d_b.p, 1, K, N, N, 64, 128) : tensor_map(d_b.p, 1, N, K, K, 128, 64),
                     tensor_map(c.p, 1, valid, N, N, 16, 64));
    const std::vector<floatX> got = c.fetch();
    int wrong = 0, touched = 0;
    for (int i = 0; i < M; i++) {
        for (int j = 0; j < N; j++) {
            float want = 0;
            for (int k = 0; k < K; k++) { want += to_float(a[i * K + k]) * to_float(b[B_COLUMNS ? k * N + j : j * K + k]); }
            const float is = to_float(got[i * N + j]);
            wrong += i < valid && is != to_float(from_float<floatX>(want));
            touched += i >= valid && !isnan(is);
        }
    }
    CHECK(wrong == 0, "b by %s: %d of %d wrong", B_COLUMNS ? "columns" : "rows", wrong, valid * N);
    CHECK(touched == 0, "b by %s: %d elements outside the tensor were written", B_COLUMNS ? "columns" : "rows", touched);
}

static void a_pair_of_blocks_shares_a_factor_and_stores_boxes(void) {
    check_pair<0>();
    check_pair<1>();
}

__global__ void work_kernel(int* turns, uint32_t pieces) {
    WorkList work(pieces);
    for (uint32_t piece; work.next(&piece);) { atomicAdd(&turns[piece], 1); }
}

static void every_piece_of_work_is_done_once(void) {
    for (int pieces : {1, 5, 131, 132, 133, 1000, 2048}) {
        for (int blocks : {1, 7, 132}) {
            Device<int> turns(std::vector<int>(pieces, 0));
            const int grid = blocks < pieces ? blocks : pieces;
            work_kernel<<<grid, 1>>>(turns.p, (uint32_t)pieces);
            CUDA_CHECK_LAUNCH("work_kernel");
            const std::vector<int> got = turns.fetch();
            int wrong = 0;
            for (int t : got) { wrong += t != 1; }
            CHECK(wrong == 0, "%d pieces, %d blocks: %d not done exactly once", pieces, blocks, wrong);
        }
    }
}

#endif  // PRECISION_FP32

int main(void) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        SKIP("Hopper's instructions", "no GPU");
        return test_summary();
    }
#ifndef PRECISION_FP32
    if (has_wgmma()) {
        RUN(every_piece_of_work_is_done_once);
        RUN(copy_engine_brings_plain_bytes);
        RUN(copy_engine_writes_swizzled_tiles_and_zeros_past_the_end);
        RUN(products_of_two_shared_tiles_by_rows);
        RUN(products_of_registers_and_a_shared_tile_by_columns);
        RUN(results_become_operands_and_are_stored);
        RUN(tiles_pass_through_a_ring_in_order);
        RUN(a_pair_of_blocks_shares_a_factor_and_stores_boxes);
        return test_summary();
    }
#endif
    SKIP("Hopper's instructions", "no sm_90a code or no GPU for it");
    return test_summary();
}
