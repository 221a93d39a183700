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

/* The tile of a block: `group` tiles of rows after each other in each column of tiles, so that their part of x stays in the L2
 * cache. */
struct Tile {
    int row, column;
    __device__ Tile(Sizes s, int BM, int BN) {
        const int GROUP = 16, rows = (s.N + BM - 1) / BM, columns = (s.OC + BN - 1) / BN, in_group = GROUP * columns;
        const int first = blockIdx.x / in_group * GROUP, rest = blockIdx.x % in_group, high = min(GROUP, rows - first);
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
    const Tile tile(s, 64, 64);
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
// travels to registers during the additions, and two buffers in shared memory take turns, so a part costs one barrier.

enum { BK5 = 8, PITCH5 = 132 };  // 132: the two halves of a warp store to other banks

/* Loads elements k to k + 3 of a row into v; past the end of the row or matrix they are 0. */
template <bool WHOLE>
__device__ __forceinline__ void load4(float (&v)[4], const float* m, int row, int rows, int k, int C) {
    const float* p = m + (size_t)row * C + k;
    if (WHOLE && row < rows && k < C) {
        const Vec<float, 4> all = load_vec<4>(p);
#pragma unroll
        for (int i = 0; i < 4; i++) { v[i] = all.v[i]; }
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) { v[i] = !WHOLE && row < rows && k + i < C ? p[i] : 0; }
    }
}

/* WHOLE: C and OC are multiples of 4. */
template <bool WHOLE>
__global__ void __launch_bounds__(256, WHOLE ? 2 : 1) forward5_kernel(float* out, const float* x, const float* w, Sizes s) {
    __shared__ __align__(16) float xs[2][BK5][PITCH5], ws[2][BK5][PITCH5];  // [buffer][k][row]
    const Tile tile(s, 128, 128);
    const int row = threadIdx.x / 2, k = threadIdx.x % 2 * 4;  // of what this thread brings: k to k + 3
    // a warp has 32 x 64 sums, a lane rows y to y + 3 and y + 16 to y + 19, columns z to z + 3 and z + 32 to z + 35
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int y = warp / 2 * 32 + lane / 8 * 4, z = warp % 2 * 64 + lane % 8 * 4;
    float sum[8][8] = {}, a[4], b[4];
    auto fetch = [&](int k0) {
        load4<WHOLE>(a, x, tile.row + row, s.N, k0 + k, s.C);
        load4<WHOLE>(b, w, tile.column + row, s.OC, k0 + k, s.C);
    };
    auto keep = [&](int buffer) {
#pragma unroll
        for (int i = 0; i < 4; i++) { xs[buffer][k + i][row] = a[i], ws[buffer][k + i][row] = b[i]; }
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
        if (n >= s.N) { continue; }
        if (WHOLE) {
            Vec<float, 4> v;
#pragma unroll
            for (int i = 0; i < 4; i++) { v.v[i] = sum[j / 2][j % 2 * 4 + i]; }
            if (o < s.OC) { store_vec(out + (size_t)n * s.OC + o, v); }
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (o + i < s.OC) { out[(size_t)n * s.OC + o + i] = sum[j / 2][j % 2 * 4 + i]; }
            }
        }
    }
}

static void forward5(float* out, const float* x, const float* w, Sizes s, cudaStream_t stream) {
    auto* kernel = s.C % 4 || s.OC % 4 ? forward5_kernel<false> : forward5_kernel<true>;
    kernel<<<tiles(s, 128, 128), 256, 0, stream>>>(out, x, w, s);
}

// Loads run beside additions here, so only the additions count, and a tenth for the instructions of loads and addresses.
static Work predict_forward5(const Case& c) { return predict_lanes(c, 1.1); }

#ifndef PRECISION_FP32
// ---------------------------------------------------------------------------------------------------------------------
// 16 bits: C and OC are multiples of 8, so that each 16 bytes lie in one row

/* Adds to the sums of a warp, MT tiles of 16 rows by NT tiles of 8 columns, the products over 16 elements from chunk `k` of 8
 * on. x(row, chunk) and w(row, chunk) are addresses in shared memory. */
template <int MT, int NT, typename Place>
__device__ __forceinline__ void multiply16(float (&sum)[MT][NT][4], const Place& x, const Place& w, int y, int z, int k) {
    const int lane = threadIdx.x % 32;
    uint32_t a[MT][4];
#pragma unroll
    for (int i = 0; i < MT; i++) { load_matrix_x4(a[i], x(y + 16 * i + lane % 16, k + lane / 16)); }
#pragma unroll
    for (int j = 0; j < NT; j += 2) {
        uint32_t b[4];
        load_matrix_x4(b, w(z + 8 * j + lane % 8 + lane / 16 * 8, k + lane / 8 % 2));
#pragma unroll
        for (int i = 0; i < MT; i++) {
            mma_16x8x16(sum[i][j], a[i], b[0], b[1]);
            mma_16x8x16(sum[i][j + 1], a[i], b[2], b[3]);
        }
    }
}

/* Writes a warp's sums, whose first row is n and whose first column is o. */
template <int MT, int NT>
__device__ __forceinline__ void write_sums(floatX* out, const float (&sum)[MT][NT][4], int n, int o, Sizes s) {
    n += threadIdx.x % 32 / 4, o += threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < MT * NT * 2; i++) {
        const int row = n + i / 2 / NT * 16 + i % 2 * 8, column = o + i / 2 % NT * 8;
        const float* pair = sum[i / 2 / NT][i / 2 % NT] + i % 2 * 2;
        if (row < s.N && column < s.OC) { *(uint32_t*)(out + (size_t)row * s.OC + column) = pack2(pair[0], pair[1]); }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// 6: tensor cores. A warp multiplies 16 x 16 by 16 x 8 in one instruction; it has 64 x 32 sums of a tile of 128 x 128. A block
// loads a part of the factors, waits, multiplies, waits.

struct Padded {  // rows of 32 elements, 80 bytes apart: 8 rows of a chunk lie in all 32 banks
    uint32_t base;
    __device__ uint32_t operator()(int row, int chunk) const { return base + row * 80 + chunk * 16; }
};

__global__ void __launch_bounds__(256) forward6_kernel(floatX* out, const floatX* x, const floatX* w, Sizes s) {
    __shared__ __align__(16) char xs[128 * 80], ws[128 * 80];
    const Tile tile(s, 128, 128);
    const int warp = threadIdx.x / 32, y = warp / 4 * 64, z = warp % 4 * 32;
    const Padded xp = {shared_address(xs)}, wp = {shared_address(ws)};
    float sum[4][4][4] = {};
    for (int k0 = 0; k0 < s.C; k0 += 32) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = threadIdx.x / 4 + 64 * i, chunk = threadIdx.x % 4, k = k0 + 8 * chunk;
            const uint4 zero = make_uint4(0, 0, 0, 0);
            const int n = tile.row + row, o = tile.column + row;
            *(uint4*)(xs + row * 80 + chunk * 16) = k < s.C && n < s.N ? *(const uint4*)(x + (size_t)n * s.C + k) : zero;
            *(uint4*)(ws + row * 80 + chunk * 16) = k < s.C && o < s.OC ? *(const uint4*)(w + (size_t)o * s.C + k) : zero;
        }
        __syncthreads();
        multiply16(sum, xp, wp, y, z, 0);
        multiply16(sum, xp, wp, y, z, 2);
        __syncthreads();
    }
    write_sums(out, sum, tile.row + y, tile.column + z, s);
}

static void forward6(floatX* out, const floatX* x, const floatX* w, Sizes s, cudaStream_t stream) {
    forward6_kernel<<<tiles(s, 128, 128), 256, 0, stream>>>(out, x, w, s);
}

// Two blocks of an SM take turns at loading and multiplying; a part takes a block a trip to the L2 cache, a third of a trip to
// memory, besides.
static Work predict_forward6(const Case& c) { return {c.bytes / 32, c.flops / (0.6 * mma_rate())}; }

// ---------------------------------------------------------------------------------------------------------------------
// 7: copies that pass no register: cp.async fills four buffers while the warps multiply from the oldest. A swizzle takes the
// place of padding. A tile is 128 x 256, and a warp has 64 x 64 sums: a loaded element is used 64 times from registers.

enum { BM7 = 128, BN7 = 256, STAGES7 = 4, STAGE7 = (BM7 + BN7) * 64 };  // bytes: rows of 32 elements

struct Swizzled {  // two rows fill the 32 banks; chunk c of row r lies at place c ^ (r / 2 % 4)
    uint32_t base;
    __device__ uint32_t operator()(int row, int chunk) const { return base + row * 64 + ((chunk ^ (row / 2 & 3)) << 4); }
};

__global__ void __launch_bounds__(256, 1) forward7_kernel(floatX* out, const floatX* x, const floatX* w, Sizes s) {
    extern __shared__ char buffers[];
    const Tile tile(s, BM7, BN7);
    const int warp = threadIdx.x / 32, y = warp / 4 * 64, z = warp % 4 * 64, steps = (s.C + 31) / 32;
    const uint32_t base = shared_address(buffers);
    auto fetch = [&](int step) {
        const int chunk = threadIdx.x % 4, k = step * 32 + 8 * chunk;
        const Swizzled at = {base + step % STAGES7 * STAGE7};  // the rows of x, then the rows of w
#pragma unroll
        for (int i = 0; i < (BM7 + BN7) / 64; i++) {
            const int row = threadIdx.x / 4 + 64 * i, from = i < BM7 / 64 ? tile.row + row : tile.column + row - BM7;
            const bool in = step < steps && k < s.C && from < (i < BM7 / 64 ? s.N : s.OC);
            copy_async<16>(at(row, chunk), (i < BM7 / 64 ? x : w) + (in ? (size_t)from * s.C + k : 0), in);
        }
        copy_async_commit();
    };
    float sum[4][8][4] = {};
    for (int i = 0; i < STAGES7 - 1; i++) { fetch(i); }
    for (int step = 0; step < steps; step++) {
        copy_async_wait<STAGES7 - 2>();
        __syncthreads();  // this buffer is full, and all warps have left the buffer that is filled next
        fetch(step + STAGES7 - 1);
        const Swizzled xp = {base + step % STAGES7 * STAGE7}, wp = {xp.base + BM7 * 64};
        multiply16(sum, xp, wp, y, z, 0);
        multiply16(sum, xp, wp, y, z, 2);
    }
    write_sums(out, sum, tile.row + y, tile.column + z, s);
}

static void forward7(floatX* out, const floatX* x, const floatX* w, Sizes s, cudaStream_t stream) {
    CUDA_CHECK(
        cudaFuncSetAttribute((const void*)forward7_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, STAGES7 * STAGE7));
    forward7_kernel<<<tiles(s, BM7, BN7), 256, STAGES7 * STAGE7, stream>>>(out, x, w, s);
}

// The warps never wait for memory; they wait for each other once in 32 elements, and a tile's end is bare of products.
static Work predict_forward7(const Case& c) { return {c.bytes / 32, c.flops / (0.9 * mma_rate())}; }

// ---------------------------------------------------------------------------------------------------------------------
// 8: the trainer's, for Hopper: one thread copies by TMA, two warpgroups multiply from shared memory by wgmma

static void forward8(floatX* out, const floatX* x, const floatX* w, Sizes s, cudaStream_t stream) {
    typedef MatmulTiles<SPLIT_ROWS, 0, EPILOGUE_STORE> Tiles;
    matmul_tiles_launch<Tiles>(out, x, w, (size_t)s.N, (size_t)s.OC, (size_t)s.C, stream);
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
    const Shape odd = fp32 ? Shape{{33, 45, 71}} : Shape{{131, 72, 136}, 6, 7};
    const Shape tail = fp32 ? Shape{{150, 36, 132}} : Shape{{256, 192, 256}}, classic = {{8192, 768, 3072}};
    const Shape large = fp32 ? Shape{{32768, 2048, 8192}} : Shape{{65536, 2048, 8192}};
    const Ladder l("forward", "N,C,OC", make, values, oracle, {odd, tail, {{512, 64, 256}}}, {classic}, {large},
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
