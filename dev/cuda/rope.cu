/* rope.cu -- rotary position embedding in steps. The formulas stand in llmc/rope.h, the lesson is dev/doc/rope.md.
 *
 *   make -C dev/cuda rope && build/zoo/rope [table|rotate|qkv] [N...]
 *
 * A model makes its table of cosines and sines once. Then each layer rotates q and k in place: 2 N (NH + NKV) HD elements. The
 * backward pass is the same kernel with the sign of the sine changed. The last ladder measures a whole layer: the product that
 * makes qkv, and the rotation.
 */
#include "llmc/matmul_sm90.cuh"
#include "llmc/rope.cuh"
#include "llmc/rope.h"
#include "dev/cuda/product.cuh"

static const float THETA = 500000;

static size_t width_of(AttentionShape s) { return (size_t)(s.NH + 2 * s.NKV) * (size_t)s.HD; }

static ModelConfig config_of(size_t HD) {
    ModelConfig config;
    memset(&config, 0, sizeof config);
    config.head_dim = (int)HD;
    config.rope_theta = (double)THETA;
    return config;
}

// ---------------------------------------------------------------------------------------------------------------------
// table 1: a thread a position. It writes a row, so a warp's store touches 32 rows.
enum { FREQUENCIES, COS_SIN };  // tensors of the ladder `table`

__global__ void table1_kernel(float* cos_sin, const float* inv_freq, int T, int HD) {
    const int t = blockIdx.x * blockDim.x + threadIdx.x, half = HD / 2;
    if (t >= T) { return; }
    float* row = cos_sin + (size_t)t * HD;
    for (int i = 0; i < half; i++) { sincosf((float)t * inv_freq[i], &row[half + i], &row[i]); }
}

static void table1(const Case& c, cudaStream_t stream) {
    table1_kernel<<<blocks_for(c.n[0], 64), 64, 0, stream>>>(c.at<float>(COS_SIN), c.at<float>(FREQUENCIES), (int)c.n[0],
                                                             (int)c.n[1]);
}

// A thread computes HD/2 pairs one after the other. A sine and cosine, of some 60 instructions that wait for each other, take
// half as long as a trip to memory. The stores stay in the L2 cache.
static Work predict_table1(const Case& c) { return {(double)c.n[0] * (double)c.n[1], 0, 0, (double)c.n[1] / 4}; }

// table 2: a thread a pair. Neighboring threads write neighboring elements, and HD/2 times as many threads work.
__global__ void table2_kernel(float* cos_sin, const float* inv_freq, int T, int HD) {
    const int half = HD / 2, k = blockIdx.x * blockDim.x + threadIdx.x, t = k / half, i = k % half;
    if (t >= T) { return; }
    float* row = cos_sin + (size_t)t * HD + i;
    sincosf((float)t * inv_freq[i], &row[half], &row[0]);
}

static void table2(const Case& c, cudaStream_t stream) {
    table2_kernel<<<blocks_for(c.n[0] * c.n[1] / 2, 256), 256, 0, stream>>>(c.at<float>(COS_SIN), c.at<float>(FREQUENCIES),
                                                                            (int)c.n[0], (int)c.n[1]);
}

static Work predict_table2(const Case& c) { return {(double)c.n[0] * (double)c.n[1] / 8, 0, 0, 2}; }

// ---------------------------------------------------------------------------------------------------------------------
// rotate 1: each pair of each head computes its angle, in double where the table does so, as in a model's first draft
enum { QKV, TABLE };  // tensors of the ladder `rotate`

static double pairs(const Case& c) { return (double)(c.n[0] * c.n[1] * (c.n[2] + c.n[3]) * c.n[4] / 2); }

/* Rotates x[0] and x[half]. */
__device__ __forceinline__ void turn(floatX* x, int half, float cosine, float sine) {
    const float a = to_float(x[0]), b = to_float(x[half]);
    x[0] = from_float<floatX>(a * cosine - b * sine);
    x[half] = from_float<floatX>(b * cosine + a * sine);
}

__global__ void rotate1_kernel(floatX* qkv, AttentionShape s, size_t pitch, float theta) {
    const int half = s.HD / 2, t = blockIdx.x % s.T;
    for (int k = threadIdx.x; k < (s.NH + s.NKV) * half; k += blockDim.x) {
        const int h = k / half, i = k % half;
        const float inv_freq = 1.0f / (float)pow((double)theta, (double)((float)(2 * i) / (float)s.HD));
        float sine, cosine;
        sincosf((float)t * inv_freq, &sine, &cosine);
        turn(qkv + blockIdx.x * pitch + (size_t)h * s.HD + i, half, cosine, sine);
    }
}

static void rotate1(floatX* qkv, const int32_t*, const float*, int, AttentionShape s, size_t pitch, cudaStream_t stream) {
    rotate1_kernel<<<(unsigned)(s.B * s.T), 256, 0, stream>>>(qkv, s, pitch, THETA);
}

// pow() in double is some 200 instructions at half the rate, or at 1/32 where a card has few such units
static Work predict_rotate1(const Case& c) { return {pairs(c) * 4 * sizeof(floatX) / 32, 0, 460 * pairs(c)}; }

// rotate 2: the table. It is small, so it stays in the caches, and memory moves q and k alone.
template <bool SHARED>
__global__ void rotate2_kernel(floatX* qkv, const float* cos_sin, AttentionShape s, size_t pitch) {
    __shared__ float shared[SHARED ? 256 : 1];
    const int half = s.HD / 2;
    const float* row = cos_sin + (size_t)(blockIdx.x % s.T) * s.HD;
    if constexpr (SHARED) {
        for (int i = threadIdx.x; i < s.HD; i += blockDim.x) { shared[i] = row[i]; }
        __syncthreads();
        row = shared;
    }
    for (int k = threadIdx.x; k < (s.NH + s.NKV) * half; k += blockDim.x) {
        const int h = k / half, i = k % half;
        turn(qkv + blockIdx.x * pitch + (size_t)h * s.HD + i, half, row[i], row[half + i]);
    }
}

template <bool SHARED>
static void rotate2(floatX* qkv, const int32_t*, const float* cos_sin, int, AttentionShape s, size_t pitch,
                    cudaStream_t stream) {
    rotate2_kernel<SHARED><<<(unsigned)(s.B * s.T), 256, 0, stream>>>(qkv, cos_sin, s, pitch);
}

// Some 30 instructions a pair. A block takes a trip for every 256 pairs of its token; 8 blocks share an SM.
static double rounds(const Case& c) { return ceil((double)((c.n[2] + c.n[3]) * c.n[4] / 2) / 256); }
static Work predict_rotate2(const Case& c) {
    return {pairs(c) * 4 * sizeof(floatX) / 32, 0, 30 * pairs(c), rounds(c) * (double)(c.n[0] * c.n[1]) / (8 * sms())};
}

// The measured times fit this: the store to qkv may change what the next loads read, so a block waits once in each round, and
// once at its start, as long as two trips of a lone thread. rmsnorm's backward 2 waits so, too.
static Work correct_rounds(const Case& c, double more) {
    const double waits = 2 * (rounds(c) + 1) + more;
    return {pairs(c) * 4 * sizeof(floatX) / 32, 0, 30 * pairs(c), waits * (double)(c.n[0] * c.n[1]) / (8 * sms())};
}
static Work correct_rotate2(const Case& c) { return correct_rounds(c, 0); }

// rotate 3: the token's row of the table goes to shared memory, for all heads. But a block now waits for it first, and the L1
// cache did nearly the same. A table's row comes from the L2 cache, in half a trip.
static Work predict_rotate3(const Case& c) {
    return {pairs(c) * 4 * sizeof(floatX) / 32, 0, 30 * pairs(c), (rounds(c) + 0.5) * (double)(c.n[0] * c.n[1]) / (8 * sms())};
}

static Work correct_rotate3(const Case& c) { return correct_rounds(c, 0.5); }

// rotate 4: a thread takes 16 bytes of the first half of a head and 16 of the second, so it divides once for 4 or 8 pairs
template <int W>
__global__ void rotate4_kernel(floatX* qkv, const float* cos_sin, AttentionShape s, unsigned vectors, size_t pitch) {
    const unsigned k = blockIdx.x * blockDim.x + threadIdx.x, lanes = s.HD / 2 / W, heads = s.NH + s.NKV;
    if (k >= vectors) { return; }
    const unsigned i = k % lanes * W, h = k / lanes % heads, n = k / lanes / heads;
    floatX* x = qkv + n * pitch + h * s.HD + i;
    const float* row = cos_sin + (size_t)(n % s.T) * s.HD + i;
    Vec<floatX, W> a = load_vec<W>(x), b = load_vec<W>(x + s.HD / 2);
    rope_vectors(a, b, load_vec<W>(row), load_vec<W>(row + s.HD / 2));
    store_vec(x, a);
    store_vec(x + s.HD / 2, b);
}

static void rotate4(floatX* qkv, const int32_t*, const float* cos_sin, int, AttentionShape s, size_t pitch,
                    cudaStream_t stream) {
    const bool wide = s.HD / 2 % VECTOR<floatX> == 0;
    const unsigned vectors = (unsigned)(s.B * s.T * (s.NH + s.NKV) * (s.HD / 2 / (wide ? VECTOR<floatX> : 1)));
    auto* kernel = wide ? rotate4_kernel<VECTOR<floatX>> : rotate4_kernel<1>;
    kernel<<<blocks_for(vectors, 256), 256, 0, stream>>>(qkv, cos_sin, s, vectors, pitch);
}

static Work predict_rotate4(const Case& c) { return {pairs(c) * 4 * sizeof(floatX) / 32}; }

// ---------------------------------------------------------------------------------------------------------------------
// qkv: the product that makes q, k and v, x (N, C) times w (QKV, C), and the rotation. 0 the product alone; 5 the product, then
// rotate 5; 6 one kernel, which rotates its sums before it writes them. So 6 saves the whole pass.
enum { PX, PW, PTABLE, PQKV };  // tensors of the ladder `qkv`

static AttentionShape product_shape(const Case& c) { return {(int)c.n[0], (int)c.n[1], (int)c.n[3], (int)c.n[4], (int)c.n[5]}; }

static void product(const Case& c, cudaStream_t stream) {
    product_cuda(c, PQKV, PX, PW, c.n[0] * c.n[1], c.n[2], width_of(product_shape(c)), stream);
}

static void product_and_rope(const Case& c, cudaStream_t stream) {
    product(c, stream);
    const AttentionShape s = product_shape(c);
    rope_forward_cuda(c.at<floatX>(PQKV), NULL, c.at<float>(PTABLE), 0, s, width_of(s), stream);
}

static void product_with_rope(const Case& c, cudaStream_t stream) {
    matmul_rope_cuda(c.at<floatX>(PQKV), c.at<floatX>(PX), c.at<floatX>(PW), NULL, c.at<float>(PTABLE), product_shape(c),
                     c.n[2], stream);
}

static Work predict_product_and_rope(const Case& c) {
    const double turned = (double)(c.n[0] * c.n[1] * (c.n[3] + c.n[4]) * c.n[5]);
    return {c.bytes / 32, c.flops, 0, 0, 2, 2 * turned * sizeof(floatX) / 32};
}

// ---------------------------------------------------------------------------------------------------------------------

typedef void Rotate(floatX* qkv, const int32_t* starts, const float* cos_sin, int first_pos, AttentionShape, size_t pitch,
                    cudaStream_t);

static AttentionShape shape_of(const Case& c) { return {(int)c.n[0], (int)c.n[1], (int)c.n[2], (int)c.n[3], (int)c.n[4]}; }

template <Rotate* LAUNCH>
static void rotate(const Case& c, cudaStream_t stream) {
    LAUNCH(c.at<floatX>(QKV), NULL, c.at<float>(TABLE), 0, shape_of(c), c.pitch(width_of(shape_of(c))), stream);
}

static void make_table(Case& c) {
    c.tensor<float>("inv_freq", READ, 1, c.n[1] / 2);
    c.tensor<float>("cos_sin", WRITE, c.n[0], c.n[1]);
    c.bytes = 4.0 * (double)(c.n[0] * c.n[1]);
}
static void values_table(Case& c) {
    const ModelConfig config = config_of(c.n[1]);
    rope_inv_freq(c.tensors[FREQUENCIES].start.data(), &config);
}
static void set_table(Floats& cos_sin, size_t T, size_t HD) {
    const ModelConfig config = config_of(HD);
    rope_table(cos_sin.data(), (int)T, &config);
}
static void oracle_table(Case& c) { set_table(c.tensors[COS_SIN].host, c.n[0], c.n[1]); }

static void make_rotate(Case& c) {
    c.rows("qkv", CHANGE, c.n[0] * c.n[1], width_of(shape_of(c)));
    c.tensor<float>("cos_sin", READ, c.n[1], c.n[4]);
    c.bytes = pairs(c) * 4 * sizeof(floatX);
}
static void values_rotate(Case& c) { set_table(c.tensors[TABLE].start, c.n[1], c.n[4]); }
static void oracle_rotate(Case& c) { rope_forward(c[QKV], NULL, c[TABLE], 0, shape_of(c)); }

static void make_qkv(Case& c) {
    const size_t N = c.n[0] * c.n[1], C = c.n[2], width = width_of(product_shape(c));
    c.tensor<floatX>("x", READ, N, C, 2);
    c.tensor<floatX>("w", READ, width, C);
    c.tensor<float>("cos_sin", READ, c.n[1], c.n[5]);
    c.tensor<floatX>("qkv", WRITE, N, width);
    c.bytes = sizeof(floatX) * (double)(N * C + width * C + N * width);
    c.flops = 2.0 * (double)N * (double)C * (double)width;
}
static void values_qkv(Case& c) {
    to_sixteenths(c, PX, PW);
    set_table(c.tensors[PTABLE].start, c.n[1], c.n[5]);
}
static void oracle_qkv(Case& c) {
    product_oracle(c, PQKV, PX, PW, c.n[0] * c.n[1], c.n[2], width_of(product_shape(c)));
    to_floatX(c.tensors[PQKV].host);
    rope_forward(c[PQKV], NULL, c[PTABLE], 0, product_shape(c));
}

#include "dev/cuda/main.cuh"

int main(int argc, char** argv) {
    const Shape t1 = {{33, 10}}, t2 = {{257, 96}}, t3 = {{64, 128}}, positions = {{2048, 64}};
    const Shape odd = {{2, 17, 3, 1, 10}}, tail = {{1, 33, 6, 2, 24}}, wide = {{1, 401, 4, 2, 64}};
    const Shape classic = {{8, 1024, 12, 4, 64}}, other = {{8, 1024, 8, 2, 96}, 1, 3}, large = {{64, 2048, 32, 8, 64}};
    const Shape q1 = {{1, 256, 64, 2, 1, 64}}, q2 = {{8, 96, 128, 6, 1, 64}}, q3 = {{2, 384, 64, 12, 4, 64}};
    const Shape layer = {{8, 1024, 768, 12, 4, 64}}, large_layer = {{64, 2048, 2048, 32, 8, 64}};
    const Ladder t("table", "T,HD", make_table, values_table, oracle_table, {t1, t2, t3}, {positions}, {},
                   {{1, "a thread a position", 0, table1, predict_table1},
                    {2, "a thread a pair, whole sectors", 0, table2, predict_table2}});
    const Ladder r("rotate", "B,T,NH,NKV,HD", make_rotate, values_rotate, oracle_rotate, {odd, tail, wide}, {classic, other},
                   {large},
                   {{1, "sine and cosine on the fly", 0, rotate<rotate1>, predict_rotate1},
                    {2, "the table", 0, rotate<rotate2<false>>, predict_rotate2, correct_rotate2},
                    {3, "the table's row in shared memory", 0, rotate<rotate2<true>>, predict_rotate3, correct_rotate3},
                    {4, "16 bytes of both halves", 0, rotate<rotate4>, predict_rotate4},
                    {5, "four heads a thread", BOLD, rotate<rope_forward_cuda>, predict_rotate4}});
    const Ladder q("qkv", "B,T,C,NH,NKV,HD", make_qkv, values_qkv, oracle_qkv, {q1, q2, q3}, {layer}, {large_layer},
                   {{0, "cuBLASLt, the product alone", REFERENCE, product, predict_product},
                    {5, "cuBLASLt, then four heads a thread", BOLD, product_and_rope, predict_product_and_rope},
                    {6, "in the product's epilogue", BOLD | SM90 | ONLY_16, product_with_rope, predict_product}});
    return zoo(argc, argv, "rope", {t, r, q});
}
