/* matmul.cu -- a matrix product in steps: out (N, OC) = x (N, C) w (OC, C)^T, as every linear layer has it, and its gradients
 * dx = dout w and dw += dout^T x. The lesson is dev/doc/matmul.md.
 *
 *   make -C dev/cuda matmul && build/zoo/matmul [forward|input|weight] [N...]
 *
 * N C OC multiplications and additions, and (N C + OC C + N OC) elements. A product differs from all other layers: it has far
 * more arithmetic than bytes, so the question is how often an element is read again, and from where. Versions 1 to 9 are for
 * fp32 without TF32, versions 10 to 20 for 16 bits. Version 0 is cuBLASLt, with which the trainer computes both gradients. The
 * kernels that the gradients share with the forward pass have the same number.
 */
#include "llmc/matmul_sm90.cuh"
#include "dev/cuda/product.cuh"

enum { X, W, OUT };

struct Sizes {
    int N, C, OC;
};

/* A factor: rows of K elements, along which sums go. If it is TURNED, memory has its transpose, (K, rows). The gradient of the
 * input turns w, the gradient of the weight both factors. */
template <bool TURNED>
struct Rows {
    const float* m;
    int rows, K;
    __device__ float operator()(int row, int k) const {  // 0 outside
        return row < rows && k < K ? m[TURNED ? (size_t)k * rows + row : (size_t)row * K + k] : 0;
    }
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

template <bool XT, bool WT, bool ADD>
__global__ void product1_kernel(float* out, Rows<XT> x, Rows<WT> w) {
    const int n = blockIdx.x * 32 + threadIdx.x, o = blockIdx.y * 32 + threadIdx.y;
    if (n >= x.rows || o >= w.rows) { return; }
    float sum = ADD ? out[(size_t)n * w.rows + o] : 0;
    for (int k = 0; k < x.K; k++) { sum += x(n, k) * w(o, k); }
    out[(size_t)n * w.rows + o] = sum;
}

template <bool XT = false, bool WT = false, bool ADD = false>
static void product1(float* out, const float* x, const float* w, Sizes s, cudaStream_t stream) {
    const dim3 grid(blocks_for(s.N, 32), blocks_for(s.OC, 32));
    product1_kernel<XT, WT, ADD><<<grid, dim3(32, 32), 0, stream>>>(out, Rows<XT>{x, s.N, s.C}, Rows<WT>{w, s.OC, s.C});
}

// The L1 cache takes a clock for each of the 32 sectors of a warp's load: as long as 128 instructions.
static Work predict_forward1(const Case& c) { return predict_lanes(c, 128 + 4); }
// Where x is turned, neighboring threads read neighboring elements of it, and all threads of a warp the same one of w.
static Work predict_weight1(const Case& c) { return predict_lanes(c, 2 * 4 + 4); }

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

/* Puts 32 x 32 elements of a factor into a tile [row][k]: neighboring threads read neighbors in memory. */
template <bool TURNED>
__device__ void load_tile3(float (&tile)[32][33], Rows<TURNED> f, int row, int k) {
    const int tx = threadIdx.x, ty = threadIdx.y;
    (TURNED ? tile[tx][ty] : tile[ty][tx]) = TURNED ? f(row + tx, k + ty) : f(row + ty, k + tx);
}

template <bool XT, bool WT, bool ADD>
__global__ void product3_kernel(float* out, Rows<XT> x, Rows<WT> w) {
    __shared__ float xs[32][33], ws[32][33];  // 33: the 32 rows of a column lie in 32 banks
    const int n = blockIdx.x * 32 + threadIdx.y, o = blockIdx.y * 32 + threadIdx.x;
    float sum = 0;
    for (int k0 = 0; k0 < x.K; k0 += 32) {
        load_tile3(xs, x, blockIdx.x * 32, k0);
        load_tile3(ws, w, blockIdx.y * 32, k0);
        __syncthreads();
        for (int k = 0; k < 32; k++) { sum += xs[threadIdx.y][k] * ws[threadIdx.x][k]; }
        __syncthreads();
    }
    if (n < x.rows && o < w.rows) { out[(size_t)n * w.rows + o] = sum + (ADD ? out[(size_t)n * w.rows + o] : 0); }
}

template <bool XT = false, bool WT = false, bool ADD = false>
static void product3(float* out, const float* x, const float* w, Sizes s, cudaStream_t stream) {
    const dim3 grid(blocks_for(s.N, 32), blocks_for(s.OC, 32));
    product3_kernel<XT, WT, ADD><<<grid, dim3(32, 32), 0, stream>>>(out, Rows<XT>{x, s.N, s.C}, Rows<WT>{w, s.OC, s.C});
}

// Two loads from shared memory for an addition.
static Work predict_forward3(const Case& c) { return predict_lanes(c, 2 * 4 + 1); }

// ---------------------------------------------------------------------------------------------------------------------
// 4, 5, 6: a thread computes 4 x 1, 4 x 4, 8 x 8 sums of a tile of 64 x 16, 64 x 64, 128 x 128. For I x J additions it loads
// I + J values from shared memory, and keeps them in registers.

enum { BK4 = 16 };

/* Puts R rows of a factor, BK4 elements of each, into a tile [k][row]. */
template <int R, bool TURNED>
__device__ void load_tile4(float (&tile)[BK4][R + 1], Rows<TURNED> f, int row, int k) {
    for (int i = threadIdx.x; i < BK4 * R; i += 256) {
        const int r = TURNED ? i % R : i / BK4, at = TURNED ? i / R : i % BK4;
        tile[at][r] = f(row + r, k + at);
    }
}

template <int I, int J, bool XT, bool WT, bool ADD>
__global__ void __launch_bounds__(256) product4_kernel(float* out, Rows<XT> x, Rows<WT> w) {
    __shared__ float xs[BK4][16 * I + 1], ws[BK4][16 * J + 1];
    const Tile tile({x.rows, x.K, w.rows}, 16 * I, 16 * J, blockIdx.x);
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    float sum[I][J] = {};
    for (int k0 = 0; k0 < x.K; k0 += BK4) {
        load_tile4<16 * I>(xs, x, tile.row, k0);
        load_tile4<16 * J>(ws, w, tile.column, k0);
        __syncthreads();
        for (int k = 0; k < BK4; k++) {
            float a[I], b[J];
#pragma unroll
            for (int i = 0; i < I; i++) { a[i] = xs[k][ty + 16 * i]; }
#pragma unroll
            for (int j = 0; j < J; j++) { b[j] = ws[k][tx + 16 * j]; }
#pragma unroll
            for (int i = 0; i < I * J; i++) { sum[i / J][i % J] += a[i / J] * b[i % J]; }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < I * J; i++) {
        const int n = tile.row + ty + i / J * 16, o = tile.column + tx + i % J * 16;
        float* to = out + (size_t)n * w.rows + o;
        if (n < x.rows && o < w.rows) { *to = sum[i / J][i % J] + (ADD ? *to : 0); }
    }
}

template <int I, int J, bool XT = false, bool WT = false, bool ADD = false>
static void product4(float* out, const float* x, const float* w, Sizes s, cudaStream_t stream) {
    const Rows<XT> a{x, s.N, s.C};
    const Rows<WT> b{w, s.OC, s.C};
    product4_kernel<I, J, XT, WT, ADD><<<tiles(s, 16 * I, 16 * J), 256, 0, stream>>>(out, a, b);
}

// A load from shared memory counts 4.
template <int I, int J>
static Work predict_product4(const Case& c) {
    return predict_lanes(c, (I + J) * 4.0 / (I * J) + 1);
}

// ---------------------------------------------------------------------------------------------------------------------
// 7: 16 bytes a load, from memory and from shared memory: 4 loads for 64 additions. The lanes of a warp have sums close to
// each other, so they load the same values. 8: the next part of the factors travels to registers during the additions. 9: two
// buffers in shared memory take turns, so a part costs one barrier. C and OC are multiples of 4.

enum { BK5 = 8, PITCH5 = 132 };  // 132: the two halves of a warp store to other banks

/* Returns elements k to k + 3 of a row; past the end of the row or matrix they are 0. */
__device__ __forceinline__ Vec<float, 4> load4(const float* m, int row, int rows, int k, int C) {
    return row < rows && k < C ? load_vec<4>(m + (size_t)row * C + k) : Vec<float, 4>{};
}

template <int BUFFERS, bool AHEAD>
__global__ void __launch_bounds__(256, 2) forward7_kernel(float* out, const float* x, const float* w, Sizes s) {
    __shared__ __align__(16) float xs[BUFFERS][BK5][PITCH5], ws[BUFFERS][BK5][PITCH5];  // [buffer][k][row]
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
    for (int k0 = 0, buffer = 0; k0 < s.C; k0 += BK5, buffer ^= BUFFERS - 1) {
        const bool more = k0 + BK5 < s.C;
        if (more && AHEAD) { fetch(k0 + BK5); }
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
        if (BUFFERS == 1) { __syncthreads(); }  // all have read the one buffer
        if (more && !AHEAD) { fetch(k0 + BK5); }
        if (more) { keep(buffer ^ (BUFFERS - 1)); }
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

template <int BUFFERS, bool AHEAD>
static void forward7(float* out, const float* x, const float* w, Sizes s, cudaStream_t stream) {
    forward7_kernel<BUFFERS, AHEAD><<<tiles(s, 128, 128), 256, 0, stream>>>(out, x, w, s);
}

// In 9 loads run beside additions, so only the additions count, and a tenth for the instructions of loads and addresses. A part
// is 64 * 8 additions of 8 warps on 4 schedulers, 1,024 clocks. In 7 a block then waits for two barriers and a trip to the L2
// cache of some 230 clocks, and the SM's other block covers half of that; in 8 it waits for the barriers alone.
static Work predict_forward7(const Case& c) { return predict_lanes(c, 1.1 * 1.15); }
static Work predict_forward8(const Case& c) { return predict_lanes(c, 1.1 * 1.05); }
static Work predict_forward9(const Case& c) { return predict_lanes(c, 1.1); }

#ifndef PRECISION_FP32
// ---------------------------------------------------------------------------------------------------------------------
// 10: tensor cores. From here on factors have 16 bits, and C and OC are multiples of 8, so each 16 bytes lie in one row. A warp
// multiplies 16 x 16 by 16 x 8 in one instruction; it has 64 x 32 sums of a tile of 128 x 128. A block loads a part of the
// factors, waits, multiplies, waits. A turned factor keeps its form in shared memory, and ldmatrix turns it.

enum { PITCH10 = 80, TURNED10 = 272 };  // bytes from row to row of 32 or 128 elements: 8 rows of a chunk lie in all 32 banks

/* Puts 128 rows of a factor (rows, K), 32 elements of each, into a tile [row][k], or [k][row] if it is turned. */
template <bool TURNED>
__device__ __forceinline__ void load_tile10(char* tile, const floatX* m, int row, int rows, int k0, int K) {
#pragma unroll
    for (int i = threadIdx.x; i < 512; i += 256) {
        const int line = TURNED ? i / 16 : i / 4, chunk = TURNED ? i % 16 : i % 4;
        const int r = row + (TURNED ? 8 * chunk : line), k = k0 + (TURNED ? line : 8 * chunk);
        *(uint4*)(tile + line * (TURNED ? TURNED10 : PITCH10) + chunk * 16) =
            k < K && r < rows ? *(const uint4*)(m + (TURNED ? (size_t)k * rows + r : (size_t)r * K + k))
                              : make_uint4(0, 0, 0, 0);
    }
}

template <bool XT, bool WT, bool ADD>
__global__ void __launch_bounds__(256) product10_kernel(floatX* out, const floatX* x, const floatX* w, Sizes s) {
    __shared__ __align__(16) char xs[128 * PITCH10], ws[128 * PITCH10];
    const Tile tile(s, 128, 128, blockIdx.x);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, y = warp / 4 * 64, z = warp % 4 * 32;
    const uint32_t x_place = shared_address(xs) + (XT ? (lane % 8 + lane / 16 * 8) * TURNED10 + (y + lane / 8 % 2 * 8) * 2
                                                      : (y + lane % 16) * PITCH10 + lane / 16 * 16);
    const uint32_t w_place = shared_address(ws) + (WT ? lane % 16 * TURNED10 + (z + lane / 16 * 8) * 2
                                                      : (z + lane % 8 + lane / 16 * 8) * PITCH10 + lane / 8 % 2 * 16);
    float sum[4][4][4] = {};
    for (int k0 = 0; k0 < s.C; k0 += 32) {
        load_tile10<XT>(xs, x, tile.row, s.N, k0, s.C);
        load_tile10<WT>(ws, w, tile.column, s.OC, k0, s.C);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 2; k++) {  // 16 elements at a time
            uint32_t a[4][4], b[2][4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                XT ? load_matrix_x4_trans(a[i], x_place + 32 * i + 16 * k * TURNED10)
                   : load_matrix_x4(a[i], x_place + 16 * i * PITCH10 + 32 * k);
            }
#pragma unroll
            for (int j = 0; j < 2; j++) {
                WT ? load_matrix_x4_trans(b[j], w_place + 32 * j + 16 * k * TURNED10)
                   : load_matrix_x4(b[j], w_place + 16 * j * PITCH10 + 32 * k);
            }
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
        if (row >= s.N || column >= s.OC) { continue; }
        floatX* to = out + (size_t)row * s.OC + column;
        *(uint32_t*)to = pack2(pair[0] + (ADD ? to_float(to[0]) : 0), pair[1] + (ADD ? to_float(to[1]) : 0));
    }
}

template <bool XT = false, bool WT = false, bool ADD = false>
static void product10(floatX* out, const floatX* x, const floatX* w, Sizes s, cudaStream_t stream) {
    product10_kernel<XT, WT, ADD><<<tiles(s, 128, 128), 256, 0, stream>>>(out, x, w, s);
}

// ---------------------------------------------------------------------------------------------------------------------
// 11: copies that pass through no register: cp.async fills buffers while the warps multiply from the oldest. A tile is 128 x
// 256, and a warp has 64 x 64 sums: a loaded element is used 64 times from registers. 12: a swizzle takes the place of
// padding. 13: while the tensor cores multiply, a warp loads its next 16 elements of each row. 14: a block has several tiles.
// Its copies run ahead of its products, so the copies for a tile begin before the sums of the tile before it are written.

enum { BM11 = 128, BN11 = 256, STAGE11 = (BM11 + BN11) * 128 };  // bytes: rows of 64 elements, x above w

/* The swizzle: chunk c of a row lies at place c ^ key of the row. A load of a matrix takes one chunk from each of 8 rows. The
 * keys of the 8 rows differ, so the chunks lie in all 32 banks. In w the rows of a load are r, r + 1, r + 8, r + 9 ... r + 25.
 * So the sums of a lane, two columns of each of four tiles, are 8 neighbors, which the lane writes as 16 bytes. */
template <bool SWIZZLE>
struct Swizzled {
    int row, key;  // of this lane
    __device__ Swizzled(int row) : row(row), key(!SWIZZLE ? 0 : row < BM11 ? row % 8 : row / 8 % 4 * 2 + row % 2) {}
    __device__ int operator()(int chunk) const { return row * 128 + ((chunk ^ key) << 4); }
};

template <int STAGES, bool SWIZZLE, bool AHEAD>
__global__ void __launch_bounds__(256, 1) forward11_kernel(floatX* out, const floatX* x, const floatX* w, Sizes s, int count) {
    extern __shared__ char buffers[];
    const uint32_t base = shared_address(buffers);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, y = warp / 4 * 64, z = warp % 4 * 64;

    // this thread copies a chunk of 8 elements of every 32nd row, of the part of tile `ahead` that begins at k0
    const int first = threadIdx.x / 8, chunk = threadIdx.x % 8;
    const int x_to = Swizzled<SWIZZLE>(first)(chunk), w_to = Swizzled<SWIZZLE>(BM11 + first)(chunk);
    int ahead = blockIdx.x, k0 = 0, to = 0;
    Tile from(s, BM11, BN11, ahead);
    auto copy = [&](int i) {  // past the last row it copies the last one, whose sums nobody writes
        const bool of_x = i < BM11 / 32, in = ahead < count && k0 + 8 * chunk < s.C;
        const int row = of_x ? min(from.row + first + 32 * i, s.N - 1) : min(from.column + first + 32 * i - BM11, s.OC - 1);
        const floatX* source = (of_x ? x : w) + (int64_t)row * s.C + (in ? k0 + 8 * chunk : 0);
        copy_async<16>(base + to * STAGE11 + (of_x ? x_to + i * 4096 : w_to + i * 4096 - BM11 * 128), source, in);
    };
    auto end_part = [&] {
        copy_async_commit();
        to = (to + 1) % STAGES;
        k0 += 64;
        if (k0 < s.C) { return; }
        k0 = 0;
        ahead += gridDim.x;
        if (ahead < count) { from = Tile(s, BM11, BN11, ahead); }
    };
    // a warp's factors of 16 elements, two of them: one is multiplied, the other loaded
    uint32_t a[2][4][4], b[2][4][4];
    const Swizzled<SWIZZLE> x_at(y + lane % 16), w_at(BM11 + z + lane % 8 / 2 * 8 + lane % 2 + lane / 16 * 2);
    auto load = [&](int stage, int q) {
        const uint32_t xs = base + stage * STAGE11 + x_at(2 * q + lane / 16),
                       ws = base + stage * STAGE11 + w_at(2 * q + lane / 8 % 2);
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
    if (AHEAD) { load(0, 0); }
    for (int index = blockIdx.x, stage = 0; index < count; index += gridDim.x) {
        float sum[4][8][4] = {};
        for (int k = 0; k < s.C; k += 64) {
#pragma unroll
            for (int q = 0; q < 4; q++) {
                if (!AHEAD) { load(stage, q); }
                if (q == 3) {
                    end_part();
                    copy_async_wait<STAGES - 2>();
                    __syncthreads();  // the next buffer is full, and all warps have loaded the last of this one
                    stage = (stage + 1) % STAGES;
                }
                if (AHEAD) { load(stage, (q + 1) % 4); }
#pragma unroll
                for (int i = 4 * q; i < 4 * q + 4 && q < 3; i++) { copy(i); }
#pragma unroll
                for (int i = 0; i < 32; i++) {
                    const uint32_t* pair = b[q % 2][i / 8] + i / 4 % 2 * 2;
                    mma_16x8x16(sum[i % 4][i / 4], a[q % 2][i % 4], pair[0], pair[1]);
                }
            }
        }
        const Tile tile(s, BM11, BN11, index);
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
template <bool SWIZZLE, bool AHEAD, bool SEVERAL>
static void forward11(floatX* out, const floatX* x, const floatX* w, Sizes s, cudaStream_t stream) {
    const int stages = min(4, (int)shared_limit(forward11_kernel<2, SWIZZLE, AHEAD>) / STAGE11), bytes = stages * STAGE11;
    auto* kernel = stages == 4   ? forward11_kernel<4, SWIZZLE, AHEAD>
                   : stages == 3 ? forward11_kernel<3, SWIZZLE, AHEAD>
                                 : forward11_kernel<2, SWIZZLE, AHEAD>;
    CUDA_CHECK(cudaFuncSetAttribute((const void*)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    const int count = (int)tiles(s, BM11, BN11);
    kernel<<<(unsigned)(SEVERAL ? min(count, (int)sms()) : count), 256, bytes, stream>>>(out, x, w, s, count);
}

// ---------------------------------------------------------------------------------------------------------------------
// 15 to 20: Hopper. One thread copies by TMA, two warpgroups multiply from shared memory by wgmma: the trainer's kernel, at
// first without most of it. 15: a buffer is filled, then multiplied. 16: a ring of four, so that copies run beside products.
// 17: a block has many tiles, 8 of rows in each column after each other, and copies for the next tile while it writes. 18: two
// blocks are a cluster, and copy a half of w's part to both. 19, the trainer's: sums go through shared memory, and TMA writes
// them. 20: the warpgroups take turns at tiles of 128 x 128: one writes while the other multiplies. 19 also computes dx, with w
// as its columns.

template <typename Tiles>
static void forward15(floatX* out, const floatX* x, const floatX* w, Sizes s, cudaStream_t stream) {
    matmul_tiles_launch<Tiles>(out, x, w, {(size_t)s.N, (size_t)s.OC, (size_t)s.C}, stream);
}
template <int STEP>
static constexpr auto hopper = forward15<MatmulTiles<SPLIT_ROWS, 0, EPILOGUE_STORE, 64, STEP>>;
static constexpr auto tiles_in_turns = forward15<MatmulTiles<SPLIT_TILES, 0, EPILOGUE_STORE>>;
static constexpr auto shared_tile_of_input = forward15<MatmulTiles<SPLIT_ROWS, 1, EPILOGUE_STORE>>;
#else
template <bool...>
static void product10(floatX*, const floatX*, const floatX*, Sizes, cudaStream_t) {}
template <bool...>
static void forward11(floatX*, const floatX*, const floatX*, Sizes, cudaStream_t) {}
enum { STEP_LOAD, STEP_RING, STEP_LIST, STEP_CLUSTER, STEP_BOXES };
template <int>
static constexpr auto hopper = product10<>;
static constexpr auto tiles_in_turns = product10<>, shared_tile_of_input = product10<>;
#endif

// 10: two blocks of an SM take turns at loading and multiplying. For each part a block also waits for a trip to the L2 cache,
// which takes a third of a trip to memory.
template <int PERCENT>
static Work predict_mma(const Case& c) {
    return {c.bytes / 32, c.flops / (0.01 * PERCENT * mma_rate())};
}

// 11: without a swizzle the 8 rows of a matrix lie in the same 4 banks, so a load takes 8 times as long: 8 warps need 8 loads
// of 32 clocks for 16 elements of each row, 2,048 clocks, where mma takes some 410. 12: with the swizzle it is 256, but a warp
// loads, then multiplies, and only one other warp of its scheduler multiplies meanwhile. 13: a block with one tile has nothing
// to copy while it writes. 14: the warps never wait for memory; they wait for each other once in 64 elements, and no warp
// multiplies while it writes.

// A part of 64 elements is 128 * 256 * 64 multiplications, 1,024 clocks at full rate. 15: a trip to the L2 cache, the copy and
// its barriers take some 800 more. In the order of columns all of x passes by once for each 256 columns. 16: a tile of 32 parts
// waits some 3,500 clocks, for its block's start, its first part and its stores. Each part comes from the L2 cache, 48 KB in
// 1,024 clocks for each SM, which is more than it delivers. 17: the stores alone remain. 18: a third less comes from the L2
// cache. 19: stores from registers fill half of a sector at a time. 20: tiles of 128 x 128 read a third more from shared
// memory.
template <int PERCENT, bool BY_COLUMNS = false>
static Work predict_hopper(const Case& c) {
    const double again = BY_COLUMNS ? (double)c.n[2] / 256 - 1 : 0;  // times that x comes from memory again
    return {(c.bytes + again * (double)(c.n[0] * c.n[1] * sizeof(floatX))) / 32, c.flops / (0.01 * PERCENT)};
}

// ---------------------------------------------------------------------------------------------------------------------

static void cublas(const Case& c, cudaStream_t stream) { product_cuda(c, OUT, X, W, c.n[0], c.n[1], c.n[2], stream); }

static void cublas_input(const Case& c, cudaStream_t stream) {
    const Operand dout = operand(c.at<floatX>(X), c.n[2]), w = operand(c.at<floatX>(W), c.n[1]);
    matmul_backward_input_cuda(product_context(), output(c.at<floatX>(OUT), c.n[1]), dout, w,
                               {c.n[0], (int)c.n[1], (int)c.n[2]}, stream);
}

static void cublas_weight(const Case& c, cudaStream_t stream) {
    const Operand dout = operand(c.at<floatX>(X), c.n[2]), x = operand(c.at<floatX>(W), c.n[1]);
    matmul_backward_weight_cuda(product_context(), output(c.at<floatX>(OUT), c.n[1]), dout, x,
                                {c.n[0], (int)c.n[1], (int)c.n[2]}, true, stream);
}

/* Launches a kernel with a thread for each sum of a tile of SIDE x SIDE. */
template <auto* KERNEL, int SIDE>
static void in_tiles(floatX* out, const floatX* x, const floatX* w, Sizes s, cudaStream_t stream) {
    KERNEL<<<dim3(blocks_for(s.OC, SIDE), blocks_for(s.N, SIDE)), dim3(SIDE, SIDE), 0, stream>>>(out, x, w, s);
}

/* Runs a product of a ladder: its first factor, its second one, and their rows and common width as Sizes. */
template <typename T, void LAUNCH(T*, const T*, const T*, Sizes, cudaStream_t)>
static void forward(const Case& c, cudaStream_t stream) {
    LAUNCH(c.at<T>(OUT), c.at<T>(X), c.at<T>(W), {(int)c.n[0], (int)c.n[1], (int)c.n[2]}, stream);
}
template <typename T, void LAUNCH(T*, const T*, const T*, Sizes, cudaStream_t)>
static void input(const Case& c, cudaStream_t stream) {
    LAUNCH(c.at<T>(OUT), c.at<T>(X), c.at<T>(W), {(int)c.n[0], (int)c.n[2], (int)c.n[1]}, stream);
}
template <typename T, void LAUNCH(T*, const T*, const T*, Sizes, cudaStream_t)>
static void weight(const Case& c, cudaStream_t stream) {
    LAUNCH(c.at<T>(OUT), c.at<T>(X), c.at<T>(W), {(int)c.n[2], (int)c.n[0], (int)c.n[1]}, stream);
}

/* Appends a matrix of two of the sizes. */
static void matrix(Case& c, const char* name, Role role, int rows, int width) {
    c.tensor<floatX>(name, role, c.n[rows], c.n[width]);
    c.bytes += (role == ADD ? 2 : 1) * sizeof(floatX) * (double)(c.n[rows] * c.n[width]);
    c.flops = 2 * macs(c);
}
static void make(Case& c) { matrix(c, "x", READ, 0, 1), matrix(c, "w", READ, 2, 1), matrix(c, "out", WRITE, 0, 2); }
static void make_input(Case& c) { matrix(c, "dout", READ, 0, 2), matrix(c, "w", READ, 2, 1), matrix(c, "dx", WRITE, 0, 1); }
static void make_weight(Case& c) { matrix(c, "dout", READ, 0, 2), matrix(c, "x", READ, 0, 1), matrix(c, "dw", ADD, 2, 1); }
static void values(Case& c) { to_sixteenths(c, X, W); }
static void oracle(Case& c) { product_oracle(c, OUT, X, W, c.n[0], c.n[1], c.n[2]); }
static void oracle_input(Case& c) {
    std::vector<char> scratch(matmul_scratch());
    matmul_backward_input(c[OUT], scratch.data(), c[X], c[W], c.n[0], (int)c.n[1], (int)c.n[2]);
}
static void oracle_weight(Case& c) {
    std::vector<char> scratch(matmul_scratch());
    matmul_backward_weight(c[OUT], scratch.data(), c[X], c[W], c.n[0], (int)c.n[1], (int)c.n[2]);
}

#include "dev/cuda/main.cuh"

int main(int argc, char** argv) {
    const bool fp32 = sizeof(floatX) == 4;  // 15 to 20 take whole tiles alone
    const Shape odd = fp32 ? Shape{{33, 44, 76}} : Shape{{131, 72, 136}, 10, 14};
    const Shape tail = fp32 ? Shape{{150, 36, 132}} : Shape{{768, 192, 256}}, classic = {{8192, 768, 3072}};
    const Shape large = fp32 ? Shape{{32768, 2048, 8192}} : Shape{{65536, 2048, 8192}}, whole = {{512, 64, 512}};
    const Ladder f(
        "forward", "N,C,OC", make, values, oracle, {odd, tail, whole}, {classic}, {large},
        {{0, "cuBLASLt", REFERENCE, cublas, predict_product},
         {1, "a thread a sum", ONLY_FP32, forward<float, product1>, predict_forward1},
         {2, "a warp a sum, whole sectors", ONLY_FP32, forward<float, forward2>, predict_forward2},
         {3, "tiles of 32 x 32 in shared memory", ONLY_FP32, forward<float, product3>, predict_forward3},
         {4, "64 x 16, 4 sums a thread", ONLY_FP32, forward<float, product4<4, 1>>, predict_product4<4, 1>},
         {5, "64 x 64, 4 x 4 sums a thread", ONLY_FP32, forward<float, product4<4, 4>>, predict_product4<4, 4>},
         {6, "128 x 128, 8 x 8 sums a thread", ONLY_FP32, forward<float, product4<8, 8>>, predict_product4<8, 8>},
         {7, "16 bytes a load, a warp's sums together", ONLY_FP32, forward<float, forward7<1, false>>, predict_forward7},
         {8, "the next part travels to registers", ONLY_FP32, forward<float, forward7<1, true>>, predict_forward8},
         {9, "two buffers, one barrier a part", ONLY_FP32, forward<float, forward7<2, true>>, predict_forward9},
         {10, "tensor cores: mma", ONLY_16, forward<floatX, product10>, predict_mma<60>},
         {11, "cp.async, 64 x 64 a warp", ONLY_16 | SM80, forward<floatX, forward11<false, false, false>>, predict_mma<20>},
         {12, "a swizzle", ONLY_16 | SM80, forward<floatX, forward11<true, false, false>>, predict_mma<75>},
         {13, "fragments ahead of their products", ONLY_16 | SM80, forward<floatX, forward11<true, true, false>>,
          predict_mma<85>},
         {14, "several tiles a block", ONLY_16 | SM80, forward<floatX, forward11<true, true, true>>, predict_mma<90>},
         {15, "TMA and wgmma: load, then multiply", ONLY_16 | SM90, forward<floatX, hopper<STEP_LOAD>>,
          predict_hopper<55, true>},
         {16, "a producer, a ring of buffers", ONLY_16 | SM90, forward<floatX, hopper<STEP_RING>>, predict_hopper<80, true>},
         {17, "a list of tiles a block, by groups", ONLY_16 | SM90, forward<floatX, hopper<STEP_LIST>>, predict_hopper<84>},
         {18, "clusters: w comes to two blocks at once", ONLY_16 | SM90, forward<floatX, hopper<STEP_CLUSTER>>,
          predict_hopper<90>},
         {19, "stores by TMA", BOLD | ONLY_16 | SM90, forward<floatX, hopper<STEP_BOXES>>, predict_hopper<93>},
         {20, "a tile is written beside the next", ONLY_16 | SM90, forward<floatX, tiles_in_turns>, predict_hopper<90>}});
    const Ladder i(
        "input", "N,C,OC", make_input, values, oracle_input, {odd, fp32 ? tail : Shape{{768, 256, 192}}, {{512, 256, 64}}},
        {classic}, {large},
        {{0, "cuBLASLt", BOLD | REFERENCE, cublas_input, predict_product},
         {1, "a thread a sum", ONLY_FP32, input<float, product1<false, true>>, predict_forward1},
         {3, "tiles of 32 x 32 in shared memory", ONLY_FP32, input<float, product3<false, true>>, predict_forward3},
         {5, "64 x 64, 4 x 4 sums a thread", ONLY_FP32, input<float, product4<4, 4, false, true>>, predict_product4<4, 4>},
         {6, "128 x 128, 8 x 8 sums a thread", ONLY_FP32, input<float, product4<8, 8, false, true>>, predict_product4<8, 8>},
         {10, "tensor cores: mma", ONLY_16, input<floatX, product10<false, true>>, predict_mma<60>},
         {19, "TMA and wgmma", ONLY_16 | SM90, input<floatX, shared_tile_of_input>, predict_hopper<93>}});
    const Ladder w(
        "weight", "N,C,OC", make_weight, values, oracle_weight, {odd, tail, whole}, {classic}, {large},
        {{0, "cuBLASLt", BOLD | REFERENCE, cublas_weight, predict_product},
         {1, "a thread a sum", ONLY_FP32, weight<float, product1<true, true, true>>, predict_weight1},
         {3, "tiles of 32 x 32 in shared memory", ONLY_FP32, weight<float, product3<true, true, true>>, predict_forward3},
         {5, "64 x 64, 4 x 4 sums a thread", ONLY_FP32, weight<float, product4<4, 4, true, true, true>>,
          predict_product4<4, 4>},
         {6, "128 x 128, 8 x 8 sums a thread", ONLY_FP32, weight<float, product4<8, 8, true, true, true>>,
          predict_product4<8, 8>},
         {10, "tensor cores: mma", ONLY_16, weight<floatX, product10<true, true, true>>, predict_mma<60>}});
    return zoo(argc, argv, "matmul", {f, i, w});
}
