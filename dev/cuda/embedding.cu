/* embedding.cu -- the embedding in steps: a table row for each token, and the table's gradient. The oracle is llmc/embedding.h.
 *
 *   make -C dev/cuda embedding && build/zoo/embedding [forward|backward] [N...]
 *
 * Tokens are uniform below V. With a vocabulary of words most rows of the table occur once or never; with one of bytes each row
 * occurs N / V times, and then the additions to one row must not wait for each other. The gradient is in fp32.
 */
#include "llmc/embedding.cuh"
#include "llmc/embedding.h"
#include "dev/cuda/zoo.cuh"

/* The sectors of N rows, and of the rows of the table that occur. */
static double sectors(const Case& c, size_t element) { return (double)(c.n[0] * c.n[1] * element) / 32; }
static double occurring(const Case& c, size_t element) {
    const double V = (double)c.n[2], rows = V * (1 - exp(-(double)c.n[0] / V));
    return rows * (double)(c.n[1] * element) / 32;
}

// ---------------------------------------------------------------------------------------------------------------------
// forward 1: a thread an element. Each looks its token up and divides by C for it.
enum { OUT, TABLE, TOKENS };  // tensors of the forward ladder

__global__ void forward1_kernel(floatX* out, const floatX* table, const int32_t* tokens, size_t N, int C, size_t pitch) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, n = i / C, c = i % C;
    if (n < N) { out[n * pitch + c] = table[(size_t)tokens[n] * C + c]; }
}

static void forward1(floatX* out, const floatX* table, const int32_t* tokens, RowShape rows, cudaStream_t stream) {
    const size_t N = rows.N;
    forward1_kernel<<<blocks_for(N * rows.C, 256), 256, 0, stream>>>(out, table, tokens, N, rows.C, rows.pitch);
}

// The token, then the row: two trips, the first to a cache. A division of 64 bits is some 80 instructions.
static double table_reads(const Case& c) {
    const double table = (double)(c.n[1] * c.n[2] * sizeof(floatX)), again = missing(table);
    return occurring(c, sizeof(floatX)) + again * (sectors(c, sizeof(floatX)) - occurring(c, sizeof(floatX)));
}
static Work predict_forward1(const Case& c) {
    const double elements = (double)(c.n[0] * c.n[1]);
    return {table_reads(c) + sectors(c, sizeof(floatX)), 0, 100 * elements, 1.5 * elements / (2048 * sms())};
}

// forward 2: 16 bytes a load. A thread first reads the tokens of four rows, so that the loads of the four rows are in flight
// together.
static Work predict_forward2(const Case& c) { return {table_reads(c) + sectors(c, sizeof(floatX))}; }

// ---------------------------------------------------------------------------------------------------------------------
// backward 1: a thread an element, which adds to the table atomically: in any order, so the bits change from run to run
enum { DTABLE, SPARE, DOUT, BTOKENS };  // tensors of the backward ladder

__global__ void backward1_kernel(float* dtable, const floatX* dout, const int32_t* tokens, int C, size_t pitch) {
    const size_t n = blockIdx.x;
    for (int c = threadIdx.x; c < C; c += 256) { atomicAdd(&dtable[(size_t)tokens[n] * C + c], to_float(dout[n * pitch + c])); }
}

static void backward1(float* dtable, void*, const floatX* dout, const int32_t* tokens, int, RowShape rows,
                      cudaStream_t stream) {
    backward1_kernel<<<(unsigned)rows.N, 256, 0, stream>>>(dtable, dout, tokens, rows.C, rows.pitch);
}

// An addition is a sector of 8 floats in the L2 cache. Memory reads and writes each row of the table that occurs.
static Work predict_backward1(const Case& c) {
    const double moved = sectors(c, sizeof(floatX)) + 2 * occurring(c, 4);
    return {moved + sectors(c, 4), 0, 20 * (double)(c.n[0] * c.n[1]), 2 * (double)c.n[0] / (8 * sms())};
}

// backward 2: the tokens are sorted, with their positions, so that equal ones are neighbors: a run. The warp of a run's first
// token adds up the run's rows in their order; the other warps have nothing to do. The same bits each time. But a run of
// thousands is one warp's work, and so as slow as thousands of trips to memory.
template <int W>
__global__ void backward2_kernel(float* dtable, const floatX* dout, const int2* pairs, int N, int C, size_t pitch) {
    const int first = blockIdx.x * blockDim.y + threadIdx.y;
    if (first >= N || (first > 0 && pairs[first - 1].x == pairs[first].x)) { return; }
    const int token = pairs[first].x;
    for (int c = threadIdx.x * W; c < C; c += 32 * W) {
        float* row = dtable + (size_t)token * C + c;
        float sum[W] = {};
        for (int i = first; i < N && pairs[i].x == token; i++) {
            const Vec<floatX, W> d = load_vec<W>(dout + (size_t)pairs[i].y * pitch + c);
#pragma unroll
            for (int k = 0; k < W; k++) { sum[k] += to_float(d.v[k]); }
        }
#pragma unroll
        for (int k = 0; k < W; k++) { row[k] += sum[k]; }
    }
}

static void backward2(float* dtable, void* scratch, const floatX* dout, const int32_t* tokens, int V, RowShape rows,
                      cudaStream_t stream) {
    const EmbeddingScratch s = embedding_scratch(scratch, rows.N, rows.C);
    const int2* pairs = embedding_sort_cuda(&s, tokens, rows.N, V, stream);
    auto* kernel = rows.C % VECTOR<floatX> == 0 ? backward2_kernel<VECTOR<floatX>> : backward2_kernel<1>;
    kernel<<<blocks_for(rows.N, 8), dim3(32, 8), 0, stream>>>(dtable, dout, pairs, (int)rows.N, rows.C, rows.pitch);
}

// The sort by two digits is three launches, which move the pairs, and takes some 20 trips. A warp takes two trips a row of its
// run, for the pair and the row, for each 32 vectors of columns.
static Work predict_backward2(const Case& c) {
    const double N = (double)c.n[0], run = fmax(1, N / (double)c.n[2]), parts = (double)c.n[1] / (32 * VECTOR<floatX>);
    const double turns = fmax(1, N / run / (64 * sms()));  // of warps that have a run
    return {sectors(c, sizeof(floatX)) + 2 * occurring(c, 4) + N, 0, 0, 20 + turns * (1 + 1.5 * run * parts), 4};
}

// backward 3: as 2, but the sorted list is cut into chunks of 32, so that a long run is the work of many blocks, whose sums a
// second kernel adds up in their order
static Work predict_backward3(const Case& c) {
    return {sectors(c, sizeof(floatX)) + 2 * occurring(c, 4) + (double)c.n[0],
            0,
            0,
            20,
            5,
            2 * (double)(c.n[0] / 32) * (double)c.n[1] * 4 / 32 * (c.n[0] / c.n[2] > 32 ? 1 : 0)};
}

// ---------------------------------------------------------------------------------------------------------------------

static RowShape rows_of(const Case& c) { return {c.n[0], (int)c.n[1], c.pitch(c.n[1])}; }

template <auto* LAUNCH>
static void forward(const Case& c, cudaStream_t stream) {
    LAUNCH(c.at<floatX>(OUT), c.at<floatX>(TABLE), c.at<int32_t>(TOKENS), rows_of(c), stream);
}
template <auto* LAUNCH>
static void backward(const Case& c, cudaStream_t stream) {
    LAUNCH(c.at<float>(DTABLE), c.at<char>(SPARE), c.at<floatX>(DOUT), c.at<int32_t>(BTOKENS), (int)c.n[2], rows_of(c), stream);
}

static void make_forward(Case& c) {
    c.rows("out", WRITE, c.n[0], c.n[1]);
    c.tensor<floatX>("table", READ, c.n[2], c.n[1]);
    c.tensor<int32_t>("tokens", READ, 1, c.n[0], (float)c.n[2]);
    c.bytes = 32 * (sectors(c, sizeof(floatX)) + occurring(c, sizeof(floatX)));
}
static void oracle_forward(Case& c) { embedding_forward(c[OUT], c[TABLE], c.ints(TOKENS), c.n[0], (int)c.n[1]); }

static void make_backward(Case& c) {
    c.tensor<float>("dtable", ADD, c.n[2], c.n[1]);
    c.tensor<char>("scratch", SCRATCH, 1, embedding_backward_scratch_cuda(c.n[0], (int)c.n[1]));
    c.rows("dout", READ, c.n[0], c.n[1]);
    c.tensor<int32_t>("tokens", READ, 1, c.n[0], (float)c.n[2]);
    c.bytes = 32 * (sectors(c, sizeof(floatX)) + 2 * occurring(c, 4));
}
static void oracle_backward(Case& c) { embedding_backward(c[DTABLE], c[DOUT], c.ints(BTOKENS), c.n[0], (int)c.n[1]); }

static const Shape odd = {{33, 13, 5}}, tail = {{300, 40, 3}}, wide = {{130, 64, 257}}, words = {{8192, 768, 32768}},
                   bytes = {{8192, 768, 257}}, large = {{262144, 2048, 128256}};

#include "dev/cuda/main.cuh"

int main(int argc, char** argv) {
    const Ladder f("forward", "N,C,V", make_forward, NULL, oracle_forward, {odd, tail, wide}, {words}, {large},
                   {{1, "an element a thread", 0, forward<forward1>, predict_forward1},
                    {2, "16 bytes a thread, four rows in flight", BOLD, forward<embedding_forward_cuda>, predict_forward2}});
    const Ladder b("backward", "N,C,V", make_backward, NULL, oracle_backward, {odd, tail, wide}, {words, bytes}, {large},
                   {{1, "atomic additions", ATOMICS, backward<backward1>, predict_backward1},
                    {2, "tokens sorted, a run a warp", 0, backward<backward2>, predict_backward2},
                    {3, "sorted, chunks of 32", BOLD, backward<embedding_backward_cuda<float>>, predict_backward3}});
    return zoo(argc, argv, "embedding", {f, b});
}
