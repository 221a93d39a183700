/* softmax.cu -- the softmax of attention's scores in steps, as the classic way runs it between its two products. The lesson is
 * dev/doc/attention.md.
 *
 *   make -C dev/cuda softmax && build/zoo/softmax [forward] [N...]
 *
 *   p_tu = e^(s_tu - max_w s_tw) / sum_w e^(s_tw - max_w s_tw)      for u <= t, otherwise 0
 *
 * The scores of H heads are H matrices (T, T). Row t sees the columns up to the diagonal, u <= t. A mask has left minus
 * infinity above it, whose e^x is 0. Versions 1 to 3 believe the mask and read every score. Version 4 knows where the diagonal
 * is. Any version must write every weight, and must read half of the scores: 1.5 H T T elements. attention_forward.cu shows
 * that no score needs to be in memory at all.
 */
#include "dev/cuda/zoo.cuh"

#include <float.h>

enum { SCORES, P };

/* H matrices (T, T) of floatX. */
struct Squares {
    size_t rows;  // H T
    int T;
    size_t pitch;  // elements from one row to the next
};
static Squares squares_of(const Case& c) { return {c.n[0] * c.n[1], (int)c.n[1], c.pitch(c.n[1])}; }

static double elements(const Case& c) { return (double)(c.n[0] * c.n[1] * c.n[1]); }
static double sectors(const Case& c) { return elements(c) * sizeof(floatX) / 32; }

/* When a row is read again, this share of it comes from memory. rows: rows in progress on an SM, each read and written. */
static double again(const Case& c, double rows) {
    return missing(fmin(rows * sms(), (double)(c.n[0] * c.n[1])) * 2 * (double)c.n[1] * sizeof(floatX));
}

/* Launches a kernel with so many rows a block and threads a row. */
template <auto* KERNEL, int ROWS, int THREADS>
static void in_rows(floatX* p, const floatX* s, Squares m, cudaStream_t stream) {
    KERNEL<<<blocks_for(m.rows, ROWS), THREADS == 1 ? dim3(ROWS) : dim3(THREADS, ROWS), 0, stream>>>(p, s, m);
}

// ---------------------------------------------------------------------------------------------------------------------
// 1: a thread a row, in three passes, as the formula stands. The first finds the maximum, without which e^s could overflow. The
// second adds, the third divides. The threads of a warp read 32 rows at a time, a sector for each element.
__global__ void softmax1_kernel(floatX* p, const floatX* s, Squares m) {
    const size_t row = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= m.rows) { return; }
    s += row * m.pitch, p += row * m.pitch;
    float largest = -INFINITY, sum = 0;
    for (int u = 0; u < m.T; u++) { largest = fmaxf(largest, to_float(s[u])); }
    for (int u = 0; u < m.T; u++) { sum += expf(to_float(s[u]) - largest); }
    for (int u = 0; u < m.T; u++) { p[u] = from_float<floatX>(expf(to_float(s[u]) - largest) / sum); }
}

// Each store writes its sector anew. A thread waits once for each sector of its row, three times.
static Work predict_softmax1(const Case& c) {
    const double stores = elements(c), trips = 3 * (double)(c.n[1] * sizeof(floatX)) / 32;
    return {(1 + 2 * again(c, 2048)) * sectors(c) + stores, 0, 0, trips * fmax(1, (double)(c.n[0] * c.n[1]) / (2048 * sms()))};
}

// ---------------------------------------------------------------------------------------------------------------------
// 2: a warp a row. Neighboring lanes read neighboring elements, so a load is a few whole sectors, and shuffles join what the
// lanes have found. Still three passes.
__global__ void softmax2_kernel(floatX* p, const floatX* s, Squares m) {
    const size_t row = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= m.rows) { return; }
    s += row * m.pitch, p += row * m.pitch;
    float largest = -INFINITY, sum = 0;
    for (int u = threadIdx.x; u < m.T; u += 32) { largest = fmaxf(largest, to_float(s[u])); }
    largest = warp_max(largest);
    for (int u = threadIdx.x; u < m.T; u += 32) { sum += expf(to_float(s[u]) - largest); }
    sum = warp_sum(sum);
    for (int u = threadIdx.x; u < m.T; u += 32) { p[u] = from_float<floatX>(expf(to_float(s[u]) - largest) / sum); }
}

// e^x and a division are some 12 and 10 instructions. All 64 warps of an SM have a row, and a lane has 4 loads in flight.
static double trips(const Case& c, double passes) {
    return passes * (double)c.n[1] / 128 * fmax(1, (double)(c.n[0] * c.n[1]) / (64 * sms()));
}
static Work predict_softmax2(const Case& c) { return {(2 + 2 * again(c, 64)) * sectors(c), 0, 50 * elements(c), trips(c, 3)}; }

// ---------------------------------------------------------------------------------------------------------------------
// 3: online. One pass finds the maximum and the sum: a lane that meets a larger maximum multiplies its sum by e^(old - new), as
// if the new one had been known from the start. So a row is read twice. Attention on the chip rests on this step.
__global__ void softmax3_kernel(floatX* p, const floatX* s, Squares m) {
    const size_t row = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= m.rows) { return; }
    s += row * m.pitch, p += row * m.pitch;
    float mine = -FLT_MAX, sum = 0;  // finite, because infinity - infinity is not a number
    for (int u = threadIdx.x; u < m.T; u += 32) {
        const float x = to_float(s[u]), before = mine;
        mine = fmaxf(mine, x);
        sum = sum * expf(before - mine) + expf(x - mine);
    }
    const float largest = warp_max(mine);
    sum = warp_sum(sum * expf(mine - largest));
    for (int u = threadIdx.x; u < m.T; u += 32) { p[u] = from_float<floatX>(expf(to_float(s[u]) - largest) / sum); }
}

// A pass less, for an e^x more: these are in a chain, each waiting for the one before.
static Work predict_softmax3(const Case& c) { return {(2 + again(c, 64)) * sectors(c), 0, 60 * elements(c), trips(c, 2.5)}; }
// The two loops have 24 and 31 instructions. Half of the e^x are 0, and dividing a 0 takes some 50 instructions more.
static Work correct_softmax3(const Case& c) { return {(2 + again(c, 64)) * sectors(c), 0, 80 * elements(c), trips(c, 2.5)}; }

// ---------------------------------------------------------------------------------------------------------------------
// 4: in registers, the causal half. A lane loads 16 bytes at a time, and only up to the diagonal. It keeps them to the end, so
// the row is read once, and e^x computed once. It multiplies by 1 / sum. The zeros above the diagonal cost their store alone.
template <int K>  // vectors of a lane
__global__ void softmax4_kernel(floatX* p, const floatX* s, Squares m) {
    constexpr int W = VECTOR<floatX>;
    const size_t row = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= m.rows) { return; }
    const int end = (int)(row % m.T) + 1, first = threadIdx.x * W;  // of the row; of the lane
    s += row * m.pitch, p += row * m.pitch;
    Vec<floatX, W> x[K];
    float e[K][W], largest = -INFINITY, sum = 0;
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (first + 32 * W * k < end) { x[k] = load_vec<W>(s + first + 32 * W * k); }
    }
#pragma unroll
    for (int i = 0; i < K * W; i++) {
        e[i / W][i % W] = first + i / W * 32 * W + i % W < end ? to_float(x[i / W].v[i % W]) : -INFINITY;
        largest = fmaxf(largest, e[i / W][i % W]);
    }
    largest = warp_max(largest);
#pragma unroll
    for (int i = 0; i < K * W; i++) { sum += e[i / W][i % W] = expf(e[i / W][i % W] - largest); }
    const float share = 1 / warp_sum(sum);
#pragma unroll
    for (int k = 0; k < K; k++) {
        const int u = first + 32 * W * k;
#pragma unroll
        for (int i = 0; i < W; i++) { x[k].v[i] = from_float<floatX>(e[k][i] * share); }
        if (u + W <= m.T) {
            store_vec(p + u, x[k]);
        } else {  // the row's last vector is not whole
#pragma unroll
            for (int i = 0; i < W; i++) {
                if (u + i < m.T) { p[u + i] = x[k].v[i]; }
            }
        }
    }
}

template <int K>
static void softmax4_launch(floatX* p, const floatX* s, Squares m, cudaStream_t stream) {
    if constexpr (K < 16) {
        if (m.T > 32 * VECTOR<floatX> * K) { return softmax4_launch<2 * K>(p, s, m, stream); }
    }
    if (m.T > 32 * VECTOR<floatX> * K) { die("softmax 4: rows of %d, at most %d fit", m.T, 32 * VECTOR<floatX> * K); }
    softmax4_kernel<K><<<blocks_for(m.rows, 4), dim3(32, 4), 0, stream>>>(p, s, m);
}

static void softmax4(floatX* p, const floatX* s, Squares m, cudaStream_t stream) { softmax4_launch<1>(p, s, m, stream); }

static Work predict_softmax4(const Case& c) { return {1.5 * sectors(c), 0, 40 * elements(c) / 2 + 10 * elements(c)}; }

// ---------------------------------------------------------------------------------------------------------------------

template <void LAUNCH(floatX*, const floatX*, Squares, cudaStream_t)>
static void forward(const Case& c, cudaStream_t stream) {
    LAUNCH(c.at<floatX>(P), c.at<floatX>(SCORES), squares_of(c), stream);
}

static void make(Case& c) {
    c.rows("scores", READ, c.n[0] * c.n[1], c.n[1], 3);
    c.rows("p", WRITE, c.n[0] * c.n[1], c.n[1]);
    c.bytes = 1.5 * 32 * sectors(c);
}
static void values(Case& c) {  // the mask; and rows whose e^s overflows without the maximum
    for (size_t i = 0; i < c.tensors[SCORES].start.size(); i++) {
        float& s = c.tensors[SCORES].start[i];
        s = i % c.n[1] <= i / c.n[1] % c.n[1] ? to_float(from_float<floatX>(s + 100.0f * (float)(i / c.n[1] % 3))) : -INFINITY;
    }
}
static void oracle(Case& c) {
    const size_t T = c.n[1];
    for (size_t row = 0; row < c.n[0] * T; row++) {
        const float* s = c[SCORES] + row * T;
        double sum = 0;
        const float largest = *std::max_element(s, s + T);
        for (size_t u = 0; u < T; u++) { sum += exp((double)s[u] - (double)largest); }
        for (size_t u = 0; u < T; u++) { c[P][row * T + u] = (float)(exp((double)s[u] - (double)largest) / sum); }
    }
}

static const Shape odd = {{3, 33}}, tail = {{1, 331}}, padded_rows = {{1, 1032}}, classic = {{12, 1024}}, large = {{64, 2048}};

#include "dev/cuda/main.cuh"

int main(int argc, char** argv) {
    const Ladder l("forward", "H,T", make, values, oracle, {odd, tail, padded_rows}, {classic}, {large},
                   {{1, "a thread a row, three passes", 0, forward<in_rows<softmax1_kernel, 64, 1>>, predict_softmax1},
                    {2, "a warp a row, three passes", 0, forward<in_rows<softmax2_kernel, 8, 32>>, predict_softmax2},
                    {3, "online: maximum and sum in one pass", 0, forward<in_rows<softmax3_kernel, 8, 32>>, predict_softmax3,
                     correct_softmax3},
                    {4, "in registers, the causal half", 0, forward<softmax4>, predict_softmax4}});
    return zoo(argc, argv, "softmax", {l});
}
