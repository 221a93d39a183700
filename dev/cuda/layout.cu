/* layout.cu -- the moves that attention's classic way makes before and after its products, in steps: keys turned so that a
 * product can take them, and keys copied for each query head of a group. The lesson is dev/doc/attention.md.
 *
 *   make -C dev/cuda layout && build/zoo/layout [permute|repeat|backward|quantise] [N...]
 *
 *   permute    x (B, T, NH, HD) to out (B, NH, HD, T): 2 B T NH HD elements
 *   repeat     k (N, NKV, HD) to a copy (N, NH, HD), where head h is k's head h / (NH / NKV). To show what the copy is for, the
 *              ladder ends with its use: the score of each query with the key at its own position
 *   backward   a key's gradient is the sum over the copies of it
 *
 *   quantise   x (N, C) to 8 bits with a scale for each row, as products in fp8 want it. The oracle is llmc/quantise.h
 *
 * A move computes nothing. So each of them asks: is it needed? The trainer's attention needs none.
 */
#include "llmc/quantise.cuh"
#include "dev/cuda/zoo.cuh"

/* sectors(): of this many elements of floatX. trips(): how often an SM, which holds 2048 threads, takes new ones. */
static double sectors(double elements) { return elements * sizeof(floatX) / 32; }
static double trips(double threads) { return fmax(1, threads / (2048 * sms())); }

// ---------------------------------------------------------------------------------------------------------------------
// permute 1: a thread an element of out gathers its element of x. Neighboring threads have neighboring t, which lie a row of x
// apart. So a warp's store is whole sectors, but its load touches 32 and uses an element of each.
enum { X, OUT };  // tensors of the ladder `permute`

/* x: B matrices (T, C), C = NH HD; out: B matrices (C, T) */
struct Turn {
    unsigned B, T, C;
    size_t pitch, out_pitch;
};

__global__ void permute1_kernel(floatX* out, const floatX* x, Turn m) {
    const unsigned row = blockIdx.x, b = row / m.C, c = row % m.C, t = blockIdx.y * 256 + threadIdx.x;
    if (t < m.T) { out[row * m.out_pitch + t] = x[((size_t)b * m.T + t) * m.pitch + c]; }
}

static void permute1(floatX* out, const floatX* x, Turn m, cudaStream_t stream) {
    permute1_kernel<<<dim3(m.B * m.C, blocks_for(m.T, 256)), 256, 0, stream>>>(out, x, m);
}

// The L1 cache takes a clock for each of the 32 sectors of a warp's load: as long as 128 instructions. The other elements of
// the sectors are for the next blocks, which run at the same time, so they come from the L2 cache.
static double turned(const Case& c) { return (double)(c.n[0] * c.n[1] * c.n[2] * c.n[3]); }
static Work predict_permute1(const Case& c) { return {2 * sectors(turned(c)), 0, (128 + 12) * turned(c), trips(turned(c))}; }

// permute 2: through shared memory. A block reads a tile along the rows of x, and writes it along the rows of out, in words of
// 4 bytes: both whole sectors. A word has two neighbors of 16 bits, so two words of two rows change an element between them.
// A row of the tile has 33 places, so that the words of a column lie in many banks.
__global__ void permute2_kernel(floatX* out, const floatX* x, Turn m) {
    constexpr int E = 4 / sizeof(floatX), SIDE = 32 * E;  // elements of a word; the tile is SIDE x SIDE
    typedef Vec<floatX, E> Neighbors;
    __shared__ Neighbors tile[SIDE][33];  // [c][t / E]
    const unsigned c0 = blockIdx.x * SIDE, t0 = blockIdx.y * SIDE, b = blockIdx.z, lane = threadIdx.x, c = c0 + lane * E;
    Neighbors word[4][E];
#pragma unroll
    for (int k = 0; k < 4 * E; k++) {
        const unsigned t = t0 + (threadIdx.y + k / E * 8) * E + k % E;
        if (t < m.T && c < m.C) { word[k / E][k % E] = load_vec<E>(x + ((size_t)b * m.T + t) * m.pitch + c); }
    }
#pragma unroll
    for (int k = 0; k < 4 * E; k++) {
        Neighbors turned;
#pragma unroll
        for (int e = 0; e < E; e++) { turned.v[e] = word[k / E][e].v[k % E]; }
        tile[lane * E + k % E][threadIdx.y + k / E * 8] = turned;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 4 * E; k++) {
        const unsigned row = threadIdx.y + k * 8, t = t0 + lane * E;
        floatX* to = out + ((size_t)b * m.C + c0 + row) * m.out_pitch + t;
        if (c0 + row < m.C && t + E <= m.T) { store_vec(to, tile[row][lane]); }
        if (c0 + row < m.C && t + 1 == m.T && E > 1) { *to = tile[row][lane].v[0]; }  // half a word ends the row
    }
}

static void permute2(floatX* out, const floatX* x, Turn m, cudaStream_t stream) {
    const unsigned side = 128 / sizeof(floatX);
    permute2_kernel<<<dim3(blocks_for(m.C, side), blocks_for(m.T, side), m.B), dim3(32, 8), 0, stream>>>(out, x, m);
}

// A thread has 4 elements, or 16 of 16 bits, whose loads are in flight together.
static Work predict_permute2(const Case& c) {
    return {2 * sectors(turned(c)), 0, 25 * turned(c), trips(turned(c) / (sizeof(floatX) == 2 ? 16 : 4))};
}

// ---------------------------------------------------------------------------------------------------------------------
// repeat 1: a thread an element of the copy
enum { Q, K, COPY, SCORES };  // tensors of the ladder `repeat`

/* Query heads NH, key heads NKV, HD elements each, of N tokens. */
struct Heads {
    size_t N;
    int NH, NKV, HD;
    size_t q_pitch, k_pitch;
};
static Heads heads_of(const Case& c) {
    const size_t HD = c.n[3];
    return {c.n[0], (int)c.n[1], (int)c.n[2], (int)HD, c.pitch(c.n[1] * HD), c.pitch(c.n[2] * HD)};
}

/* W elements a thread */
template <int W>
__global__ void repeat_kernel(floatX* copy, const floatX* k, Heads s) {
    const int i = (blockIdx.y * 256 + threadIdx.x) * W, h = i / s.HD;
    if (h >= s.NH) { return; }
    const floatX* from = k + blockIdx.x * s.k_pitch + h / (s.NH / s.NKV) * s.HD + i % s.HD;
    store_vec(copy + blockIdx.x * s.q_pitch + i, load_vec<W>(from));
}

/* Eight lanes a query head: the product of its query with key head h / group. W elements a load */
template <int W>
__global__ void score_kernel(float* scores, const floatX* q, const floatX* k, Heads s, int group, size_t k_pitch) {
    const int h = blockIdx.y * 16 + threadIdx.x / 8;
    q += blockIdx.x * s.q_pitch + h * s.HD, k += blockIdx.x * k_pitch + h / group * s.HD;
    float sum = 0;
    for (int d = threadIdx.x % 8 * W; d < s.HD && h < s.NH; d += 8 * W) {
        const Vec<floatX, W> a = load_vec<W>(q + d), b = load_vec<W>(k + d);
#pragma unroll
        for (int i = 0; i < W; i++) { sum += to_float(a.v[i]) * to_float(b.v[i]); }
    }
    for (int step = 4; step > 0; step /= 2) { sum += __shfl_xor_sync(~0u, sum, step); }
    if (threadIdx.x % 8 == 0 && h < s.NH) { scores[blockIdx.x * (size_t)s.NH + h] = sum; }
}

static void score(float* scores, const floatX* q, const floatX* k, Heads s, int group, size_t k_pitch, cudaStream_t stream) {
    auto* kernel = s.HD % VECTOR<floatX> ? score_kernel<1> : score_kernel<VECTOR<floatX>>;
    kernel<<<dim3((unsigned)s.N, blocks_for(s.NH, 16)), 128, 0, stream>>>(scores, q, k, s, group, k_pitch);
}

template <int W>
static void repeat(const Case& c, cudaStream_t stream) {
    const Heads s = heads_of(c);
    floatX* copy = (floatX*)c.at<char>(COPY);
    if (s.HD % W) { return repeat<1>(c, stream); }
    repeat_kernel<W><<<dim3((unsigned)s.N, blocks_for(s.NH * s.HD, 256 * W)), 256, 0, stream>>>(copy, c.at<floatX>(K), s);
    score(c.at<float>(SCORES), c.at<floatX>(Q), copy, s, 1, s.q_pitch, stream);
}

static double queries(const Case& c) { return (double)(c.n[0] * c.n[1] * c.n[3]); }
static double keys(const Case& c) { return (double)(c.n[0] * c.n[2] * c.n[3]); }

// The use reads the queries and the copy, as far as it has left the L2 cache, and writes a float a head. Divisions by numbers
// that are known at run time alone take 20 instructions each.
static Work predict_copied(const Case& c, int W) {
    const double q = sectors(queries(c)), used = q + missing(queries(c) * sizeof(floatX)) * q + (double)(c.n[0] * c.n[1]) / 8;
    return {sectors(keys(c)) + q, 0, (60 + 4 * W) * queries(c) / W, trips(queries(c) / W), 2, used};
}
static Work predict_repeat1(const Case& c) { return predict_copied(c, 1); }

// repeat 2: 16 bytes a thread, so that the divisions serve 4 or 8 elements
static Work predict_repeat2(const Case& c) { return predict_copied(c, VECTOR<floatX>); }

// repeat 3: nothing. The use computes the address of the key that it wants, h / group. A key comes from memory once, for the
// other heads of the group from a cache, and no memory holds a copy.
static void repeat3(const Case& c, cudaStream_t stream) {
    const Heads s = heads_of(c);
    score(c.at<float>(SCORES), c.at<floatX>(Q), c.at<floatX>(K), s, s.NH / s.NKV, s.k_pitch, stream);
}

// Some 100 instructions and a trip for each of a head's 8 lanes
static Work predict_repeat3(const Case& c) {
    const double lanes = 8 * (double)(c.n[0] * c.n[1]);
    return {c.bytes / 32, 0, 100 * lanes, trips(lanes)};
}

// ---------------------------------------------------------------------------------------------------------------------
// backward 1: a thread an element of the copy's gradient adds it to the key's, atomically: in any order
enum { DK, DCOPY };  // tensors of the ladder `backward`; dk adds up over micro-batches, in fp32

__global__ void backward1_kernel(float* dk, const floatX* dcopy, Heads s) {
    const int i = blockIdx.y * 256 + threadIdx.x, h = i / s.HD, group = s.NH / s.NKV;
    if (h >= s.NH) { return; }
    atomicAdd(&dk[(blockIdx.x * (size_t)s.NKV + h / group) * s.HD + i % s.HD], to_float(dcopy[blockIdx.x * s.q_pitch + i]));
}

static void backward1(const Case& c, cudaStream_t stream) {
    const Heads s = heads_of(c);
    const dim3 grid((unsigned)s.N, blocks_for(s.NH * s.HD, 256));
    backward1_kernel<<<grid, 256, 0, stream>>>(c.at<float>(DK), c.at<floatX>(DCOPY), s);
}

// Each addition of 8 floats is a sector in the L2 cache.
static Work predict_backward1(const Case& c) { return {c.bytes / 32 + queries(c) / 8, 0, 60 * queries(c), trips(queries(c))}; }

// backward 2: a thread adds its group's heads in their order, 16 bytes at a time. The same bits each time, and one store. But
// the copies' gradients were written and read for it: attention with the index h / group adds them up where it computes them.
template <int W>
__global__ void backward2_kernel(float* dk, const floatX* dcopy, Heads s) {
    const int i = (blockIdx.y * 64 + threadIdx.x) * W, kv = i / s.HD, group = s.NH / s.NKV;
    if (kv >= s.NKV) { return; }
    const floatX* from = dcopy + blockIdx.x * s.q_pitch + kv * group * s.HD + i % s.HD;
    dk += blockIdx.x * (size_t)s.NKV * s.HD + i;
    Vec<float, W> sum = load_vec<W>(dk);
#pragma unroll 4
    for (int h = 0; h < group; h++) {
        const Vec<floatX, W> d = load_vec<W>(from + h * s.HD);
#pragma unroll
        for (int j = 0; j < W; j++) { sum.v[j] += to_float(d.v[j]); }
    }
    store_vec(dk, sum);
}

static void backward2(const Case& c, cudaStream_t stream) {
    const Heads s = heads_of(c);
    const int W = s.HD % VECTOR<floatX> ? 1 : VECTOR<floatX>;
    auto* kernel = W == 1 ? backward2_kernel<1> : backward2_kernel<VECTOR<floatX>>;
    kernel<<<dim3((unsigned)s.N, blocks_for(s.NKV * s.HD / W, 64)), 64, 0, stream>>>(c.at<float>(DK), c.at<floatX>(DCOPY), s);
}

// The heads of a group are independent loads, so they are one trip.
static Work predict_backward2(const Case& c) {
    return {c.bytes / 32, 0, 15 * keys(c) + 3 * queries(c), trips(keys(c) / VECTOR<floatX>)};
}

// ---------------------------------------------------------------------------------------------------------------------
// quantise 1: a kernel finds each row's scale, a warp a row. A second one converts, a thread an element.
enum { BYTES, SCALES, ROWS };  // tensors of the ladder `quantise`

__global__ void scales1_kernel(QuantisedRows q, const floatX* x, RowShape rows) {
    const size_t n = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    uint32_t largest = 0;
    if (n >= rows.N) { return; }
    for (int c = threadIdx.x; c < rows.C; c += 32) { largest = max(largest, magnitude_bits(x[n * rows.pitch + c])); }
    largest = warp_largest(largest);
    if (threadIdx.x == 0) { q.scale[n] = quantise_scale(largest, E4M3); }
}

__global__ void convert1_kernel(QuantisedRows q, const floatX* x, RowShape rows) {
    const int c = blockIdx.y * 256 + threadIdx.x;
    const size_t n = blockIdx.x;
    const float factor = quantise_factor(q.scale[n]);
    if (c < rows.C) {
        q.data[n * q.pitch + c] = __nv_cvt_float_to_fp8(to_float(x[n * rows.pitch + c]) * factor, __NV_SATFINITE, __NV_E4M3);
    }
}

static void quantise1(QuantisedRows q, const floatX* x, RowShape rows, QuantiseCounts*, cudaStream_t stream) {
    scales1_kernel<<<blocks_for(rows.N, 8), dim3(32, 8), 0, stream>>>(q, x, rows);
    convert1_kernel<<<dim3((unsigned)rows.N, blocks_for(rows.C, 256)), 256, 0, stream>>>(q, x, rows);
}

// All of x comes twice, as far as it has left the L2 cache; a conversion is some 15 instructions.
static Work predict_quantise1(const Case& c) {
    const double n = (double)(c.n[0] * c.n[1]), x = sectors(n);
    return {x, 0, 30 * n, trips(n), 2, missing(32 * x) * x + n / 32};
}

// quantise 2, the trainer's: a block a row, 16 elements a thread. The second read finds the row in a cache.
static Work predict_quantise2(const Case& c) { return {c.bytes / 32}; }

template <auto* LAUNCH>
static void quantise(const Case& c, cudaStream_t stream) {
    const QuantisedRows q = {(uint8_t*)c.at<char>(BYTES), c.at<float>(SCALES), c.n[1], NULL, E4M3};
    LAUNCH(q, c.at<floatX>(ROWS), {c.n[0], (int)c.n[1], c.pitch(c.n[1])}, NULL, stream);
}

static void make_quantise(Case& c) {
    c.tensor<char>("q", WRITE, c.n[0], c.n[1]);
    c.tensor<float>("scale", WRITE, 1, c.n[0]);
    c.rows("x", READ, c.n[0], c.n[1]);
    c.bytes = (double)(c.n[0] * c.n[1]) * (sizeof(floatX) + 1);
}
static void oracle_quantise(Case& c) {
    std::vector<uint8_t> q(c.n[0] * c.n[1]);
    quantise_rows(q.data(), c[SCALES], c[ROWS], c.n[0], c.n[1], E4M3);
    std::copy(q.begin(), q.end(), c[BYTES]);
}

// ---------------------------------------------------------------------------------------------------------------------

template <void LAUNCH(floatX*, const floatX*, Turn, cudaStream_t)>
static void permute(const Case& c, cudaStream_t stream) {
    const size_t C = c.n[2] * c.n[3];
    LAUNCH(c.at<floatX>(OUT), c.at<floatX>(X), {(unsigned)c.n[0], (unsigned)c.n[1], (unsigned)C, c.pitch(C), c.pitch(c.n[1])},
           stream);
}

static void make_permute(Case& c) {
    c.rows("x", READ, c.n[0] * c.n[1], c.n[2] * c.n[3]);
    c.rows("out", WRITE, c.n[0] * c.n[2] * c.n[3], c.n[1]);
    c.bytes = 2 * 32 * sectors(turned(c));
}
static void oracle_permute(Case& c) {
    const size_t B = c.n[0], T = c.n[1], C = c.n[2] * c.n[3];
    for (size_t i = 0; i < B * T * C; i++) { c[OUT][(i / T / C * C + i % C) * T + i / C % T] = c[X][i]; }
}

static void make_repeat(Case& c) {
    const Heads s = heads_of(c);
    c.rows("q", READ, s.N, c.n[1] * c.n[3]);
    c.rows("k", READ, s.N, c.n[2] * c.n[3]);
    c.tensor<char>("copy", SCRATCH, 1, s.N * s.q_pitch * sizeof(floatX));
    c.tensor<float>("scores", WRITE, s.N, c.n[1]);
    c.bytes = 32 * sectors(queries(c) + keys(c)) + 4.0 * (double)(c.n[0] * c.n[1]);
}
static void oracle_repeat(Case& c) {
    const size_t N = c.n[0], NH = c.n[1], NKV = c.n[2], HD = c.n[3];
    for (size_t n = 0; n < N; n++) {
        for (size_t h = 0; h < NH; h++) {
            double sum = 0;
            for (size_t d = 0; d < HD; d++) {
                sum += (double)c[Q][(n * NH + h) * HD + d] * (double)c[K][(n * NKV + h / (NH / NKV)) * HD + d];
            }
            c[SCORES][n * NH + h] = (float)sum;
        }
    }
}

static void make_backward(Case& c) {
    c.tensor<float>("dk", ADD, c.n[0], c.n[2] * c.n[3]);
    c.rows("dcopy", READ, c.n[0], c.n[1] * c.n[3]);
    c.bytes = 32 * sectors(queries(c)) + 8 * keys(c);
}
static void oracle_backward(Case& c) {
    const size_t NH = c.n[1], HD = c.n[3], group = NH / c.n[2];
    for (size_t i = 0; i < c.n[0] * NH * HD; i++) {  // i = (n NH + h) HD + d, and n NH / group = n NKV
        c[DK][i / HD / group * HD + i % HD] += c[DCOPY][i];
    }
}

#include "dev/cuda/main.cuh"

int main(int argc, char** argv) {
    const Shape p1 = {{2, 17, 3, 10}}, p2 = {{1, 70, 2, 24}}, p3 = {{2, 64, 2, 64}}, p4 = {{8, 1024, 12, 64}};
    const Shape odd = {{34, 6, 2, 10}}, tail = {{33, 12, 4, 24}}, wide = {{18, 8, 2, 128}}, classic = {{8192, 12, 4, 64}};
    const Shape large_turn = {{64, 4096, 32, 64}}, large = {{262144, 32, 8, 64}};
    const Ladder p("permute", "B,T,NH,HD", make_permute, NULL, oracle_permute, {p1, p2, p3}, {p4}, {large_turn},
                   {{1, "gather: a thread an element", 0, permute<permute1>, predict_permute1},
                    {2, "tiles through shared memory", 0, permute<permute2>, predict_permute2}});
    const Ladder r("repeat", "N,NH,NKV,HD", make_repeat, NULL, oracle_repeat, {odd, tail, wide}, {classic}, {large},
                   {{1, "a copy, an element a thread; its use", 0, repeat<1>, predict_repeat1},
                    {2, "a copy, 16 bytes a thread; its use", 0, repeat<VECTOR<floatX>>, predict_repeat2},
                    {3, "no copy: index h / group", 0, repeat3, predict_repeat3}});
    const Ladder b("backward", "N,NH,NKV,HD", make_backward, NULL, oracle_backward, {odd, tail, wide}, {classic}, {large},
                   {{1, "atomic additions", ATOMICS, backward1, predict_backward1},
                    {2, "sum of a group, in order", 0, backward2, predict_backward2}});
    const Ladder q("quantise", "N,C", make_quantise, NULL, oracle_quantise, {{{33, 48}}, {{67, 528}}, {{130, 256}}},
                   {{{8192, 768}}}, {{{262144, 2048}}},
                   {{1, "scales, then values", 0, quantise<quantise1>, predict_quantise1},
                    {2, "a block a row, 16 elements a thread", BOLD, quantise<quantise_rows_cuda<floatX>>, predict_quantise2}});
    return zoo(argc, argv, "layout", {p, r, b, q});
}
