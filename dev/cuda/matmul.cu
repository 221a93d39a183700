/* matmul.cu -- a matrix product in steps: out (N, OC) = x (N, C) w (OC, C)^T, as every linear layer has it. Sums go along the
 * rows of both factors.
 *
 *   make -C dev/cuda matmul && build/zoo/matmul [forward] [N...]
 *
 * N C OC multiplications and additions, and (N C + OC C + N OC) elements. A product differs from all other layers: it has far
 * more arithmetic than bytes, so the question is how often an element is read again, and from where. Versions 1 to 5 are for
 * fp32 without TF32, versions 6 to 8 for 16 bits. Version 0 is cuBLASLt.
 */
#include "llmc/matmul_sm90.cuh"
#include "dev/cuda/product.cuh"

enum { X, W, OUT };

struct Sizes {
    int N, C, OC;
};

static double macs(const Case& c) { return (double)c.n[0] * (double)c.n[1] * (double)c.n[2]; }

// Instructions of a thread for one multiplication, as the unit of `lanes`. A load from shared memory by a warp takes the place
// of 4 warps' additions, since 32 lanes a clock load and 128 add.
static Work predict_lanes(const Case& c, double instructions) { return {c.bytes / 32, 0, instructions * macs(c)}; }

/* A tile of sums. 16 tiles of rows follow each other in each column of tiles, so their part of x stays in the L2 cache. */
struct Tile {
    int row, column;
    __device__ Tile(Sizes s, int BM, int BN, int index) {
        const int GROUP = 16, rows = (s.N + BM - 1) / BM, columns = (s.OC + BN - 1) / BN, in_group = GROUP * columns;
        const int first = index / in_group * GROUP, rest = index % in_group, high = min(GROUP, rows - first);
        row = (first + rest % high) * BM;
        column = rest / high * BN;
    }
};

static unsigned tiles(Sizes s, int BM, int BN) { return (unsigned)(ceil_div(s.N, BM) * ceil_div(s.OC, BN)); }

// ---------------------------------------------------------------------------------------------------------------------
// 1: a thread a sum. Neighboring threads take neighboring rows of x, so each load of a warp touches 32 sectors.

__global__ void forward1_kernel(float* out, const float* x, const float* w, Sizes s) {
    const int n = blockIdx.x * 32 + threadIdx.x, o = blockIdx.y * 32 + threadIdx.y;
    if (n >= s.N || o >= s.OC) { return; }
    float sum = 0;
    for (int k = 0; k < s.C; k++) { sum += x[(size_t)n * s.C + k] * w[(size_t)o * s.C + k]; }
    out[(size_t)n * s.OC + o] = sum;
}

static void forward1(float* out, const float* x, const float* w, Sizes s, cudaStream_t stream) {
    const dim3 grid(blocks_for(s.N, 32), blocks_for(s.OC, 32));
    forward1_kernel<<<grid, dim3(32, 32), 0, stream>>>(out, x, w, s);
}

// The L1 cache takes a clock for each of the 32 sectors of a warp's load: as long as 128 instructions.
static Work predict_forward1(const Case& c) { return predict_lanes(c, 128 + 4); }

// ---------------------------------------------------------------------------------------------------------------------
// 2: a warp a sum. Its lanes read neighboring elements of a row, so a load is 4 whole sectors. Nothing is used twice.

__global__ void forward2_kernel(float* out, const float* x, const float* w, Sizes s) {
    const int n = blockIdx.x, o = blockIdx.y * 8 + threadIdx.y;
    if (o >= s.OC) { return; }
    float sum = 0;
    for (int k = threadIdx.x; k < s.C; k += 32) { sum += x[(size_t)n * s.C + k] * w[(size_t)o * s.C + k]; }
    sum = warp_sum(sum);
    if (threadIdx.x == 0) { out[(size_t)n * s.OC + o] = sum; }
}

static void forward2(float* out, const float* x, const float* w, Sizes s, cudaStream_t stream) {
    forward2_kernel<<<dim3((unsigned)s.N, blocks_for(s.OC, 8)), dim3(32, 8), 0, stream>>>(out, x, w, s);
}

// Two loads of a warp from the L1 cache, and what the loop needs; the sum of a warp costs 10 more steps for every C / 32.
static Work predict_forward2(const Case& c) { return predict_lanes(c, 2 * 4 + 4 + 10 * 32 / (double)c.n[1]); }

// ---------------------------------------------------------------------------------------------------------------------
// 3: a block computes a tile of 32 x 32 sums, and reads its rows once into shared memory, 32 elements of each at a time. So an
// element from memory is used 32 times.

__global__ void forward3_kernel(float* out, const float* x, const float* w, Sizes s) {
    __shared__ float xs[32][33], ws[32][33];  // 33: the 32 rows of a column lie in 32 banks
    const int tx = threadIdx.x, ty = threadIdx.y, n0 = blockIdx.x * 32, o0 = blockIdx.y * 32;
    float sum = 0;
    for (int k0 = 0; k0 < s.C; k0 += 32) {
        const bool in = k0 + tx < s.C;
        xs[ty][tx] = in && n0 + ty < s.N ? x[(size_t)(n0 + ty) * s.C + k0 + tx] : 0;
        ws[ty][tx] = in && o0 + ty < s.OC ? w[(size_t)(o0 + ty) * s.C + k0 + tx] : 0;
        __syncthreads();
        for (int k = 0; k < 32; k++) { sum += xs[ty][k] * ws[tx][k]; }
        __syncthreads();
    }
    if (n0 + ty < s.N && o0 + tx < s.OC) { out[(size_t)(n0 + ty) * s.OC + o0 + tx] = sum; }
}

static void forward3(float* out, const float* x, const float* w, Sizes s, cudaStream_t stream) {
    const dim3 grid(blocks_for(s.N, 32), blocks_for(s.OC, 32));
    forward3_kernel<<<grid, dim3(32, 32), 0, stream>>>(out, x, w, s);
}

// Two loads from shared memory for an addition.
static Work predict_forward3(const Case& c) { return predict_lanes(c, 2 * 4 + 1); }

// ---------------------------------------------------------------------------------------------------------------------
// 4: a thread computes 4 x 4 sums of a tile of 64 x 64. It loads 8 values from shared memory for 16 additions.

__global__ void __launch_bounds__(256) forward4_kernel(float* out, const float* x, const float* w, Sizes s) {
    __shared__ float xs[16][65], ws[16][65];  // [k][row]
    const Tile tile(s, 64, 64, blockIdx.x);
    const int k = threadIdx.x % 16, first = threadIdx.x / 16, tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    float sum[4][4] = {};
    for (int k0 = 0; k0 < s.C; k0 += 16) {
        for (int r = first; r < 64; r += 16) {
            const bool in = k0 + k < s.C;
            xs[k][r] = in && tile.row + r < s.N ? x[(size_t)(tile.row + r) * s.C + k0 + k] : 0;
            ws[k][r] = in && tile.column + r < s.OC ? w[(size_t)(tile.column + r) * s.C + k0 + k] : 0;
        }
        __syncthreads();
        for (int i = 0; i < 16; i++) {
            float a[4], b[4];
#pragma unroll
            for (int j = 0; j < 4; j++) { a[j] = xs[i][ty + 16 * j], b[j] = ws[i][tx + 16 * j]; }
#pragma unroll
            for (int j = 0; j < 16; j++) { sum[j / 4][j % 4] += a[j / 4] * b[j % 4]; }
        }
        __syncthreads();
    }
#pragma unroll
    for (int j = 0; j < 16; j++) {
        const int n = tile.row + ty + j / 4 * 16, o = tile.column + tx + j % 4 * 16;
        if (n < s.N && o < s.OC) { out[(size_t)n * s.OC + o] = sum[j / 4][j % 4]; }
    }
}

static void forward4(float* out, const float* x, const float* w, Sizes s, cudaStream_t stream) {
    forward4_kernel<<<tiles(s, 64, 64), 256, 0, stream>>>(out, x, w, s);
}

static Work predict_forward4(const Case& c) { return predict_lanes(c, 8 * 4 / 16.0 + 1); }

// ---------------------------------------------------------------------------------------------------------------------
// 5: 8 x 8 sums a thread, of a tile of 128 x 128, and 16 bytes a load: 4 loads for 64 additions. The next part of the factors
// travels to registers during the additions, and two buffers in shared memory take turns, so a part costs one barrier. C and OC
// are multiples of 4.

enum { BK5 = 8, PITCH5 = 132 };  // 132: the two halves of a warp store to other banks

/* Returns elements k to k + 3 of a row; past the end of the row or matrix they are 0. */
__device__ __forceinline__ Vec<float, 4> load4(const float* m, int row, int rows, int k, int C) {
    return row < rows && k < C ? load_vec<4>(m + (size_t)row * C + k) : Vec<float, 4>{};
}

__global__ void __launch_bounds__(256, 2) forward5_kernel(float* out, const float* x, const float* w, Sizes s) {
    __shared__ __align__(16) float xs[2][BK5][PITCH5], ws[2][BK5][PITCH5];  // [buffer][k][row]
    const Tile tile(s, 128, 128, blockIdx.x);
    const int row = threadIdx.x / 2, k = threadIdx.x % 2 * 4;  // of what this thread brings: k to k + 3
    // a warp has 32 x 64 sums, a lane rows y to y + 3 and y + 16 to y + 19, columns z to z + 3 and z + 32 to z + 35
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int y = warp / 2 * 32 + lane / 8 * 4, z = warp % 2 * 64 + lane % 8 * 4;
    float sum[8][8] = {};
    Vec<float, 4> a, b;
    auto fetch = [&](int k0) {
        a = load4(x, tile.row + row, s.N, k0 + k, s.C);
        b = load4(w, tile.column + row, s.OC, k0 + k, s.C);
    };
    auto keep = [&](int buffer) {
#pragma unroll
        for (int i = 0; i < 4; i++) { xs[buffer][k + i][row] = a.v[i], ws[buffer][k + i][row] = b.v[i]; }
    };
    fetch(0);
    keep(0);
    __syncthreads();
    for (int k0 = 0, buffer = 0; k0 < s.C; k0 += BK5, buffer ^= 1) {
        const bool more = k0 + BK5 < s.C;
        if (more) { fetch(k0 + BK5); }
#pragma unroll 2
        for (int i = 0; i < BK5; i++) {
            Vec<float, 4> p[2], q[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                p[h] = load_vec<4>(&xs[buffer][i][y + 16 * h]);
                q[h] = load_vec<4>(&ws[buffer][i][z + 32 * h]);
            }
#pragma unroll
            for (int j = 0; j < 64; j++) { sum[j / 8][j % 8] += p[j / 32].v[j / 8 % 4] * q[j % 8 / 4].v[j % 4]; }
        }
        if (more) { keep(buffer ^ 1); }
        __syncthreads();
    }
#pragma unroll
    for (int j = 0; j < 16; j++) {  // row j / 2, half j % 2
        const int n = tile.row + y + j / 8 * 16 + j / 2 % 4, o = tile.column + z + j % 2 * 32;
        Vec<float, 4> v;
#pragma unroll
        for (int i = 0; i < 4; i++) { v.v[i] = sum[j / 2][j % 2 * 4 + i]; }
        if (n < s.N && o < s.OC) { store_vec(out + (size_t)n * s.OC + o, v); }
    }
}

static void forward5(float* out, const float* x, const float* w, Sizes s, cudaStream_t stream) {
    forward5_kernel<<<tiles(s, 128, 128), 256, 0, stream>>>(out, x, w, s);
}

// Loads run beside additions here, so only the additions count, and a tenth for the instructions of loads and addresses.
static Work predict_forward5(const Case& c) { return predict_lanes(c, 1.1); }

#ifndef PRECISION_FP32
// ---------------------------------------------------------------------------------------------------------------------
// 6: tensor cores. From here on factors have 16 bits, and C and OC are multiples of 8, so each 16 bytes lie in one row. A warp
// multiplies 16 x 16 by 16 x 8 in one instruction; it has 64 x 32 sums of a tile of 128 x 128. A block loads a part of the
// factors, waits, multiplies, waits.

enum { PITCH6 = 80 };  // rows of 32 elements, 80 bytes apart: 8 rows of a chunk lie in all 32 banks

__global__ void __launch_bounds__(256) forward6_kernel(floatX* out, const floatX* x, const floatX* w, Sizes s) {
    __shared__ __align__(16) char xs[128 * PITCH6], ws[128 * PITCH6];
    const Tile tile(s, 128, 128, blockIdx.x);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, y = warp / 4 * 64, z = warp % 4 * 32;
    const uint32_t x_place = shared_address(xs) + (y + lane % 16) * PITCH6 + lane / 16 * 16;
    const uint32_t w_place = shared_address(ws) + (z + lane % 8 + lane / 16 * 8) * PITCH6 + lane / 8 % 2 * 16;
    float sum[4][4][4] = {};
    for (int k0 = 0; k0 < s.C; k0 += 32) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = threadIdx.x / 4 + 64 * i, chunk = threadIdx.x % 4, k = k0 + 8 * chunk;
            const uint4 zero = make_uint4(0, 0, 0, 0);
            const int n = tile.row + row, o = tile.column + row;
            *(uint4*)(xs + row * PITCH6 + chunk * 16) = k < s.C && n < s.N ? *(const uint4*)(x + (size_t)n * s.C + k) : zero;
            *(uint4*)(ws + row * PITCH6 + chunk * 16) = k < s.C && o < s.OC ? *(const uint4*)(w + (size_t)o * s.C + k) : zero;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 2; k++) {  // 16 elements at a time
            uint32_t a[4][4], b[2][4];
#pragma unroll
            for (int i = 0; i < 4; i++) { load_matrix_x4(a[i], x_place + 16 * i * PITCH6 + 32 * k); }
#pragma unroll
            for (int j = 0; j < 2; j++) { load_matrix_x4(b[j], w_place + 16 * j * PITCH6 + 32 * k); }
#pragma unroll
            for (int i = 0; i < 16; i++) {
                mma_16x8x16(sum[i / 4][i % 4], a[i / 4], b[i % 4 / 2][i % 2 * 2], b[i % 4 / 2][i % 2 * 2 + 1]);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 32; i++) {  // tile of 16 rows, of 8 columns, half of the rows
        const int row = tile.row + y + i / 8 * 16 + i % 2 * 8 + lane / 4,
                  column = tile.column + z + i / 2 % 4 * 8 + lane % 4 * 2;
        const float* pair = sum[i / 8][i / 2 % 4] + i % 2 * 2;
        if (row < s.N && column < s.OC) { *(uint32_t*)(out + (size_t)row * s.OC + column) = pack2(pair[0], pair[1]); }
    }
}

static void forward6(floatX* out, const floatX* x, const floatX* w, Sizes s, cudaStream_t stream) {
    forward6_kernel<<<tiles(s, 128, 128), 256, 0, stream>>>(out, x, w, s);
}

// Two blocks of an SM take turns at loading and multiplying. For each part a block also waits for a trip to the L2 cache, which
// takes a third of a trip to memory.
static Work predict_forward6(const Case& c) { return {c.bytes / 32, c.flops / (0.6 * mma_rate())}; }

// ---------------------------------------------------------------------------------------------------------------------
// 7: copies that pass through no register: cp.async fills buffers while the warps multiply from the oldest. A swizzle takes the
// place of padding. A tile is 128 x 256, and a warp has 64 x 64 sums: a loaded element is used 64 times from registers. While
// the tensor cores multiply, a warp loads its next 16 elements of each row. A block has several tiles. Its copies run ahead of
// its products, so the copies for a tile begin before the sums of the tile before it are written.

enum { BM7 = 128, BN7 = 256, STAGE7 = (BM7 + BN7) * 128 };  // bytes: rows of 64 elements, x above w

/* The swizzle: chunk c of a row lies at place c ^ key of the row. A load of a matrix takes one chunk from each of 8 rows. The
 * keys of the 8 rows differ, so the chunks lie in all 32 banks. In w the rows of a load are r, r + 1, r + 8, r + 9 ... r + 25.
 * So the sums of a lane, two columns of each of four tiles, are 8 neighbors, which the lane writes as 16 bytes. */
struct Swizzled {
    int row, key;  // of this lane
    __device__ Swizzled(int row) : row(row), key(row < BM7 ? row % 8 : row / 8 % 4 * 2 + row % 2) {}
    __device__ int operator()(int chunk) const { return row * 128 + ((chunk ^ key) << 4); }
};

template <int STAGES>
__global__ void __launch_bounds__(256, 1) forward7_kernel(floatX* out, const floatX* x, const floatX* w, Sizes s, int count) {
    extern __shared__ char buffers[];
    const uint32_t base = shared_address(buffers);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, y = warp / 4 * 64, z = warp % 4 * 64;

    // this thread copies a chunk of 8 elements of every 32nd row, of the part of tile `ahead` that begins at k0
    const int first = threadIdx.x / 8, chunk = threadIdx.x % 8;
    const int x_to = Swizzled(first)(chunk), w_to = Swizzled(BM7 + first)(chunk);
    int ahead = blockIdx.x, k0 = 0, to = 0;
    Tile from(s, BM7, BN7, ahead);
    auto copy = [&](int i) {  // past the last row it copies the last one, whose sums nobody writes
        const bool of_x = i < BM7 / 32, in = ahead < count && k0 + 8 * chunk < s.C;
        const int row = of_x ? min(from.row + first + 32 * i, s.N - 1) : min(from.column + first + 32 * i - BM7, s.OC - 1);
        const floatX* source = (of_x ? x : w) + (int64_t)row * s.C + (in ? k0 + 8 * chunk : 0);
        copy_async<16>(base + to * STAGE7 + (of_x ? x_to + i * 4096 : w_to + i * 4096 - BM7 * 128), source, in);
    };
    auto end_part = [&] {
        copy_async_commit();
        to = (to + 1) % STAGES;
        k0 += 64;
        if (k0 < s.C) { return; }
        k0 = 0;
        ahead += gridDim.x;
        if (ahead < count) { from = Tile(s, BM7, BN7, ahead); }
    };
    // a warp's factors of 16 elements, two of them: one is multiplied, the other loaded
    uint32_t a[2][4][4], b[2][4][4];
    const Swizzled x_at(y + lane % 16), w_at(BM7 + z + lane % 8 / 2 * 8 + lane % 2 + lane / 16 * 2);
    auto load = [&](int stage, int q) {
        const uint32_t xs = base + stage * STAGE7 + x_at(2 * q + lane / 16),
                       ws = base + stage * STAGE7 + w_at(2 * q + lane / 8 % 2);
#pragma unroll
        for (int i = 0; i < 4; i++) { load_matrix_x4(a[q % 2][i], xs + i * 16 * 128); }
#pragma unroll
        for (int j = 0; j < 4; j++) { load_matrix_x4(b[q % 2][j], ws + (j / 2 * 32 + j % 2 * 4) * 128); }
    };
    for (int i = 0; i < STAGES - 1; i++) {
#pragma unroll
        for (int j = 0; j < 12; j++) { copy(j); }
        end_part();
    }
    copy_async_wait<STAGES - 2>();
    __syncthreads();
    load(0, 0);
    for (int index = blockIdx.x, stage = 0; index < count; index += gridDim.x) {
        float sum[4][8][4] = {};
        for (int k = 0; k < s.C; k += 64) {
#pragma unroll
            for (int q = 0; q < 4; q++) {
                if (q == 3) {
                    end_part();
                    copy_async_wait<STAGES - 2>();
                    __syncthreads();  // the next buffer is full, and all warps have loaded the last of this one
                    stage = (stage + 1) % STAGES;
                }
                load(stage, (q + 1) % 4);
#pragma unroll
                for (int i = 4 * q; i < 4 * q + 4 && q < 3; i++) { copy(i); }
#pragma unroll
                for (int i = 0; i < 32; i++) {
                    const uint32_t* pair = b[q % 2][i / 8] + i / 4 % 2 * 2;
                    mma_16x8x16(sum[i % 4][i / 4], a[q % 2][i % 4], pair[0], pair[1]);
                }
            }
        }
        const Tile tile(s, BM7, BN7, index);
#pragma unroll
        for (int i = 0; i < 16; i++) {  // tile of 16 rows, half of the rows, four tiles of 8 columns
            const int row = tile.row + y + i / 4 * 16 + i / 2 % 2 * 8 + lane / 4,
                      column = tile.column + z + i % 2 * 32 + lane % 4 * 8;
            uint32_t v[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float* pair = sum[i / 4][i % 2 * 4 + j] + i / 2 % 2 * 2;
                v[j] = pack2(pair[0], pair[1]);
            }
            if (row < s.N && column < s.OC) {
                *(uint4*)(out + (size_t)row * s.OC + column) = make_uint4(v[0], v[1], v[2], v[3]);
            }
        }
    }
}

// four buffers of 48 KB on a card with 228 KB of shared memory, three on one with 164, two on one with 100
static void forward7(floatX* out, const floatX* x, const floatX* w, Sizes s, cudaStream_t stream) {
    const int stages = min(4, (int)shared_limit(forward7_kernel<2>) / STAGE7), bytes = stages * STAGE7;
    auto* kernel = stages == 4 ? forward7_kernel<4> : stages == 3 ? forward7_kernel<3> : forward7_kernel<2>;
    CUDA_CHECK(cudaFuncSetAttribute((const void*)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    const int count = (int)tiles(s, BM7, BN7);
    kernel<<<(unsigned)min(count, (int)sms()), 256, bytes, stream>>>(out, x, w, s, count);
}

// The warps never wait for memory; they wait for each other once in 64 elements, and no warp multiplies while it writes.
static Work predict_forward7(const Case& c) { return {c.bytes / 32, c.flops / (0.9 * mma_rate())}; }

// ---------------------------------------------------------------------------------------------------------------------
// 8: the trainer's, for Hopper: one thread copies by TMA, two warpgroups multiply from shared memory by wgmma

static void forward8(floatX* out, const floatX* x, const floatX* w, Sizes s, cudaStream_t stream) {
    typedef MatmulTiles<SPLIT_ROWS, 0, EPILOGUE_STORE> Tiles;
    matmul_tiles_launch<Tiles>(out, x, w, {(size_t)s.N, (size_t)s.OC, (size_t)s.C}, stream);
}
#else
static void forward6(float*, const float*, const float*, Sizes, cudaStream_t) {}
static void forward7(float*, const float*, const float*, Sizes, cudaStream_t) {}
static void forward8(float*, const float*, const float*, Sizes, cudaStream_t) {}
static const auto predict_forward6 = predict_forward5, predict_forward7 = predict_forward5;
#endif

static Work predict_forward8(const Case& c) { return {c.bytes / 32, c.flops / 0.93}; }

// ---------------------------------------------------------------------------------------------------------------------

static void cublas(const Case& c, cudaStream_t stream) { product_cuda(c, OUT, X, W, c.n[0], c.n[1], c.n[2], stream); }

template <typename T, void LAUNCH(T*, const T*, const T*, Sizes, cudaStream_t)>
static void forward(const Case& c, cudaStream_t stream) {
    LAUNCH(c.at<T>(OUT), c.at<T>(X), c.at<T>(W), {(int)c.n[0], (int)c.n[1], (int)c.n[2]}, stream);
}

static void make(Case& c) {
    c.tensor<floatX>("x", READ, c.n[0], c.n[1]);
    c.tensor<floatX>("w", READ, c.n[2], c.n[1]);
    c.tensor<floatX>("out", WRITE, c.n[0], c.n[2]);
    c.bytes = sizeof(floatX) * (double)(c.n[0] * c.n[1] + c.n[2] * c.n[1] + c.n[0] * c.n[2]);
    c.flops = 2 * macs(c);
}
static void values(Case& c) { to_sixteenths(c, X, W); }
static void oracle(Case& c) { product_oracle(c, OUT, X, W, c.n[0], c.n[1], c.n[2]); }

#include "dev/cuda/main.cuh"

int main(int argc, char** argv) {
    const bool fp32 = sizeof(floatX) == 4;  // 8 takes whole tiles alone
    const Shape odd = fp32 ? Shape{{33, 44, 76}} : Shape{{131, 72, 136}, 6, 7};
    const Shape tail = fp32 ? Shape{{150, 36, 132}} : Shape{{768, 192, 256}}, classic = {{8192, 768, 3072}};
    const Shape large = fp32 ? Shape{{32768, 2048, 8192}} : Shape{{65536, 2048, 8192}};
    const Ladder l("forward", "N,C,OC", make, values, oracle, {odd, tail, {{512, 64, 512}}}, {classic}, {large},
                   {{0, "cuBLASLt", REFERENCE, cublas, predict_product},
                    {1, "a thread a sum", ONLY_FP32, forward<float, forward1>, predict_forward1},
                    {2, "a warp a sum, whole sectors", ONLY_FP32, forward<float, forward2>, predict_forward2},
                    {3, "tiles of 32 x 32 in shared memory", ONLY_FP32, forward<float, forward3>, predict_forward3},
                    {4, "64 x 64, 4 x 4 sums a thread", ONLY_FP32, forward<float, forward4>, predict_forward4},
                    {5, "128 x 128, 8 x 8, 16 bytes, two buffers", ONLY_FP32, forward<float, forward5>, predict_forward5},
                    {6, "tensor cores: mma", ONLY_16, forward<floatX, forward6>, predict_forward6},
                    {7, "cp.async, swizzle, 64 x 64 a warp", ONLY_16 | SM80, forward<floatX, forward7>, predict_forward7},
                    {8, "TMA and wgmma", BOLD | ONLY_16 | SM90, forward<floatX, forward8>, predict_forward8}});
    return zoo(argc, argv, "matmul", {l});
}
