/* crossentropy.cu -- the loss of each row of logits, and its gradient, in steps. The formulas stand in llmc/crossentropy.h, the
 * lesson is dev/doc/crossentropy.md.
 *
 *   make -C dev/cuda crossentropy && build/zoo/crossentropy [forward|backward|head] [N...]
 *
 * Logits are the largest tensor of a training step: N tokens times V words. The loss reads them once: N V elements. The
 * gradient takes their place in memory, so `backward` reads and writes N V elements. `head` also has the three products around
 * it.
 */
#include "llmc/crossentropy.cuh"
#include "llmc/crossentropy.h"
#include "dev/cuda/product.cuh"

#include <float.h>

static RowShape rows_of(const Case& c) { return {c.n[0], (int)c.n[1], c.pitch(c.n[1])}; }

/* Predictions count the sectors of all logits at so many bytes each; the share of a second read that comes from memory,
 * if so many blocks of an SM have a row in progress; the trips of a thread for `passes` over its rows, with four loads in
 * flight. */
static const double ELEMENT = sizeof(floatX);
static double elements(const Case& c) { return (double)c.n[0] * (double)c.n[1]; }
static double sectors(const Case& c, double bytes) { return elements(c) * bytes / 32; }
static double again(const Case& c, double blocks) { return missing(blocks * sms() * (double)c.n[1] * ELEMENT); }
static double trips(const Case& c, double blocks, double threads, double passes) {
    return passes * (double)c.n[1] / (4 * threads) * fmax(1, (double)c.n[0] / (blocks * sms()));
}

/* Returns the maximum over a block in every thread. `shared` has 32 values. */
__device__ float block_max(float x, float* shared) {
    x = warp_max(x);
    if (threadIdx.x % 32 == 0) { shared[threadIdx.x / 32] = x; }
    __syncthreads();
    return warp_max(shared[threadIdx.x % (blockDim.x / 32)]);
}

/* The largest logit of a row, and the sum of e^(logit - max) over the row. */
struct RowSum {
    float max, sum;
};

__device__ float loss_of_row(RowSum s, int target, float target_logit) {
    return target < 0 ? 0 : logf(s.sum) + (s.max - target_logit);
}

// ---------------------------------------------------------------------------------------------------------------------
// forward 1: a block a row, in two passes. The first finds the maximum, without which e^logit could overflow. The second adds.

__device__ RowSum two_passes(const floatX* row, int V) {
    __shared__ float shared[2][32];
    float largest = -INFINITY, sum = 0;
    for (int v = threadIdx.x; v < V; v += blockDim.x) { largest = fmaxf(largest, to_float(row[v])); }
    largest = block_max(largest, shared[0]);
    for (int v = threadIdx.x; v < V; v += blockDim.x) { sum += expf(to_float(row[v]) - largest); }
    return {largest, block_sum(sum, shared[1])};
}

template <RowSum ROW(const floatX*, int)>
__global__ void __launch_bounds__(512)
    forward_kernel(float* losses, const floatX* logits, const int32_t* targets, RowShape rows) {
    const size_t n = blockIdx.x;
    const RowSum s = ROW(logits + n * rows.pitch, rows.C);
    const int target = targets[n];
    if (threadIdx.x == 0) { losses[n] = loss_of_row(s, target, to_float(logits[n * rows.pitch + max(target, 0)])); }
}

template <RowSum ROW(const floatX*, int), int THREADS>
static void forward_rows(float* losses, const floatX* logits, const int32_t* targets, RowShape rows, cudaStream_t stream) {
    forward_kernel<ROW><<<(unsigned)rows.N, THREADS, 0, stream>>>(losses, logits, targets, rows);
}
static constexpr auto forward1 = forward_rows<two_passes, 256>;

// 8 blocks of an SM have a row each in progress, far more than the cache holds. e^x is 9 instructions, the rest as many.
static Work predict_forward1(const Case& c) {
    return {sectors(c, (1 + again(c, 8)) * ELEMENT), 0, 20 * elements(c), trips(c, 8, 256, 2)};
}

// ---------------------------------------------------------------------------------------------------------------------
// forward 2: online, in one pass of 16-byte loads. When a thread meets a larger maximum, it multiplies its sum by
// e^(old - new): the sum then is as if the new maximum had been known from the start.

__device__ RowSum one_pass(const floatX* row, int V) {
    constexpr int W = VECTOR<floatX>;
    __shared__ float shared[2][32];
    const int full = V / W * W;
    RowSum s = {-FLT_MAX, 0};  // finite, because infinity - infinity is not a number
#pragma unroll 4
    for (int v = threadIdx.x * W; v < full; v += blockDim.x * W) {
        const Vec<floatX, W> x = load_vec<W>(row + v);
        float largest = s.max;
#pragma unroll
        for (int i = 0; i < W; i++) { largest = fmaxf(largest, to_float(x.v[i])); }
        s.sum *= expf(s.max - largest);
        s.max = largest;
#pragma unroll
        for (int i = 0; i < W; i++) { s.sum += expf(to_float(x.v[i]) - s.max); }
    }
    if (full + (int)threadIdx.x < V) {  // past the last whole vector
        const float x = to_float(row[full + threadIdx.x]), largest = fmaxf(s.max, x);
        s = {largest, s.sum * expf(s.max - largest) + expf(x - largest)};
    }
    const float largest = block_max(s.max, shared[0]);
    return {largest, block_sum(s.sum * expf(s.max - largest), shared[1])};
}

static constexpr auto forward2 = forward_rows<one_pass, 512>;

// Each logit is read once. Half an SM's warps are enough to keep memory at work: each of their threads has 64 bytes in flight.
static Work predict_forward2(const Case& c) { return {sectors(c, ELEMENT), 0, 14 * elements(c)}; }

// forward 3, the trainer's: one wave of blocks, each row after row, with the next vectors always in flight
static Work predict_forward3(const Case& c) { return {sectors(c, ELEMENT), 0, 8 * elements(c)}; }

// ---------------------------------------------------------------------------------------------------------------------
// backward 1: softmax, loss and gradient apart, as a framework runs them. The probabilities are in fp32, since p - 1 of a
// rounded p near 1 would be wrong.

enum { LOGITS, TARGETS, LOSSES };                           // tensors of the ladder `forward`
enum { DLOGITS, BTARGETS, BLOSSES, DLOSSES, PROBABILITY };  // of the ladder `backward`; dlogits holds the logits first

__global__ void softmax_kernel(float* p, const floatX* logits, RowShape rows) {
    const size_t n = blockIdx.x;
    const floatX* row = logits + n * rows.pitch;
    const RowSum s = two_passes(row, rows.C);
    for (int v = threadIdx.x; v < rows.C; v += blockDim.x) { p[n * rows.C + v] = expf(to_float(row[v]) - s.max) / s.sum; }
}

__global__ void loss_kernel(float* losses, const float* p, const int32_t* targets, RowShape rows) {
    const size_t n = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (n < rows.N) { losses[n] = targets[n] < 0 ? 0 : -logf(p[n * rows.C + targets[n]]); }
}

__global__ void gradient_kernel(floatX* dlogits, const float* p, const int32_t* targets, const float* dloss, RowShape rows) {
    const size_t n = blockIdx.x;
    const int v = blockIdx.y * blockDim.x + threadIdx.x, target = targets[n];
    if (v >= rows.C) { return; }
    const float d = target < 0 ? 0 : *dloss;
    dlogits[n * rows.pitch + v] = from_float<floatX>((p[n * rows.C + v] - (v == target)) * d);
}

static void backward1(const Case& c, cudaStream_t stream) {
    const RowShape rows = rows_of(c);
    const unsigned N = (unsigned)rows.N;
    float* p = (float*)c.at<char>(PROBABILITY);
    const int32_t* targets = c.at<int32_t>(BTARGETS);
    softmax_kernel<<<N, 256, 0, stream>>>(p, c.at<floatX>(DLOGITS), rows);
    loss_kernel<<<blocks_for(N, 256), 256, 0, stream>>>(c.at<float>(BLOSSES), p, targets, rows);
    const dim3 grid(N, blocks_for(rows.C, 256));
    gradient_kernel<<<grid, 256, 0, stream>>>(c.at<floatX>(DLOGITS), p, targets, c.at<float>(DLOSSES), rows);
}

// Three reads of the logits, of which the cache serves some, and a write of p. Then a read of p and a write of the gradient.
static Work predict_backward1(const Case& c) {
    const double first = sectors(c, (1 + 2 * again(c, 8)) * ELEMENT + 4);
    return {first, 0, 45 * elements(c), trips(c, 8, 256, 3), 3, sectors(c, 4 + ELEMENT)};
}

// ---------------------------------------------------------------------------------------------------------------------
// backward 2: one kernel. A block that knows its row's sum writes loss and gradient at once, the gradient over the logits. No
// other tensor exists.

/* ROW: the pass or passes that find a row's sum. The gradient goes W logits at a time, past the last W one by one. */
template <RowSum ROW(const floatX*, int), int W>
__global__ void __launch_bounds__(512)
    backward_kernel(float* losses, floatX* logits, const int32_t* targets, const float* dloss, RowShape rows) {
    const size_t n = blockIdx.x;
    const int full = rows.C / W * W, tail = full + threadIdx.x;
    floatX* row = logits + n * rows.pitch;
    const int target = targets[n];
    const float target_logit = to_float(row[max(target, 0)]);  // before a thread overwrites it
    const RowSum s = ROW(row, rows.C);
    const float d = target < 0 ? 0 : *dloss, factor = d / s.sum;
    auto gradient = [&](floatX x, int v) {
        return from_float<floatX>(expf(to_float(x) - s.max) * factor - (v == target ? d : 0));
    };
    for (int v = threadIdx.x * W; v < full; v += blockDim.x * W) {
        Vec<floatX, W> x = load_vec<W>(row + v);
#pragma unroll
        for (int i = 0; i < W; i++) { x.v[i] = gradient(x.v[i], v + i); }
        store_vec(row + v, x);
    }
    if (tail < rows.C) { row[tail] = gradient(row[tail], tail); }
    if (threadIdx.x == 0) { losses[n] = loss_of_row(s, target, target_logit); }
}

template <RowSum ROW(const floatX*, int), int W, int THREADS>
static void backward_rows(float* losses, floatX* logits, const int32_t* targets, float, const float* dloss, RowShape rows,
                          cudaStream_t stream) {
    backward_kernel<ROW, W><<<(unsigned)rows.N, THREADS, 0, stream>>>(losses, logits, targets, dloss, rows);
}
static constexpr auto backward2 = backward_rows<two_passes, 1, 256>;

static Work predict_backward2(const Case& c) {
    return {sectors(c, (2 + 2 * again(c, 8)) * ELEMENT), 0, 35 * elements(c), trips(c, 8, 256, 3)};
}

// ---------------------------------------------------------------------------------------------------------------------
// backward 3: maximum and sum in one pass (forward 2), then the gradient, by 16 bytes: two reads instead of three
static constexpr auto backward3 = backward_rows<one_pass, VECTOR<floatX>, 512>;

// As many rows are in progress as blocks fit. The first instructions are forward 2's.
static double moved3(const Case& c) {
    const double blocks = blocks_of_sm(backward_kernel<one_pass, VECTOR<floatX>>, 512);
    return sectors(c, (2 + again(c, blocks)) * ELEMENT);
}
static Work predict_backward3(const Case& c) { return {moved3(c), 0, 30 * elements(c)}; }

// ---------------------------------------------------------------------------------------------------------------------
// backward 4, the trainer's: the row stays in registers and shared memory between the passes, so it is read once. A row that is
// too long for both (128,256 elements of fp32) is read twice, the second time backwards: its end is still in the cache.

static double moved4(const Case& c) {
    const size_t N = c.n[0];
    const int V = (int)c.n[1];
    const bool kept = crossentropy_plan(CE_HELD, N, V).blocks + crossentropy_plan(CE_ROW, N, V).blocks > 0;
    const double blocks = blocks_of_sm(crossentropy_looped_kernel, CE_LOOP_THREADS);
    return sectors(c, (2 + (kept ? 0 : again(c, blocks))) * ELEMENT);
}
static Work predict_backward4(const Case& c) { return {moved4(c), 0, 20 * elements(c)}; }

// ---------------------------------------------------------------------------------------------------------------------
// head: logits = x w^T, the loss, and the gradients dx and dw. 0 the three products alone; 3 with all logits in memory; 4, as
// in the trainer, a chunk of rows after the other. The second chunk's logits overwrite the first one's, so they take a fraction
// of the memory, and dw adds up. The time is the same; the saved memory is a larger batch.

enum { X, W, HTARGETS, HDLOSSES, DX, DW, HLOSSES, HLOGITS };  // sizes N, V, C and rows of a chunk

typedef void Fused(float* losses, floatX* logits, const int32_t* targets, float dloss, const float* loss_scale, RowShape rows,
                   cudaStream_t);

template <Fused* LAUNCH, bool CHUNKS = false>
static void head(const Case& c, cudaStream_t stream) {
    const size_t N = c.n[0], C = c.n[2], chunk = CHUNKS ? c.n[3] : N, pitch = c.pitch(c.n[1]);
    const int V = (int)c.n[1], width = (int)C;
    floatX* logits = (floatX*)c.at<char>(HLOGITS);
    const Operand w = operand(c.at<floatX>(W), C), d = operand(logits, pitch);
    for (size_t n = 0; n < N; n += chunk) {
        const size_t rows = size_min(chunk, N - n);
        const Operand x = operand(c.at<floatX>(X) + n * C, C);
        matmul_forward_cuda(product_context(), output(logits, pitch), x, w, NULL, {rows, width, V}, stream);
        if (LAUNCH) {
            LAUNCH(c.at<float>(HLOSSES) + n, logits, c.at<int32_t>(HTARGETS) + n, 1, c.at<float>(HDLOSSES), {rows, V, pitch},
                   stream);
        }
        matmul_backward_input_cuda(product_context(), output(c.at<floatX>(DX) + n * C, C), d, w, {rows, width, V}, stream);
        matmul_backward_weight_cuda(product_context(), output(c.at<float>(DW), C), d, x, {rows, width, V}, n > 0, stream);
    }
}

static double chunks(const Case& c) { return (double)ceil_div(c.n[0], c.n[3]); }

static Work predict_head(const Case& c) { return {c.bytes / 32, c.flops, 0, 0, 4, moved3(c)}; }

// Each further chunk reads dw and writes it again.
static Work predict_head_chunks(const Case& c) {
    const double sums = 8 * (double)c.n[1] * (double)c.n[2] / 32;
    return {c.bytes / 32, c.flops, 0, 0, 4 * chunks(c), moved4(c) + (chunks(c) - 1) * sums};
}

// ---------------------------------------------------------------------------------------------------------------------

template <auto* LAUNCH>
static void forward(const Case& c, cudaStream_t stream) {
    LAUNCH(c.at<float>(LOSSES), c.at<floatX>(LOGITS), c.at<int32_t>(TARGETS), rows_of(c), stream);
}
template <Fused* LAUNCH>
static void backward(const Case& c, cudaStream_t stream) {
    LAUNCH(c.at<float>(BLOSSES), c.at<floatX>(DLOGITS), c.at<int32_t>(BTARGETS), 1, c.at<float>(DLOSSES), rows_of(c), stream);
}

static void make_forward(Case& c) {
    c.rows("logits", READ, c.n[0], c.n[1], 3);
    c.tensor<int32_t>("targets", READ, 1, c.n[0], (float)c.n[1]);
    c.tensor<float>("losses", WRITE, 1, c.n[0]);
    c.bytes = 32 * sectors(c, ELEMENT);
}
static void make_backward(Case& c) {
    c.rows("dlogits", CHANGE, c.n[0], c.n[1], 3);
    c.tensor<int32_t>("targets", READ, 1, c.n[0], (float)c.n[1]);
    c.tensor<float>("losses", WRITE, 1, c.n[0]);
    c.tensor<float>("dlosses", READ, 1, c.n[0]);  // all equal; kernels read the first
    c.tensor<char>("probability", SCRATCH, 1, 4 * c.n[0] * c.n[1]);
    c.bytes = 32 * sectors(c, 2 * ELEMENT);
}

/* The same logits and targets in both ladders. Every fifth row has no target. dloss is as large as a loss scale: in fp16, the
 * gradients of rare words would be too small otherwise. */
static void set_targets(Tensor& t, size_t V) {
    for (size_t n = 0; n < t.ints.size(); n++) { t.ints[n] = n % 5 == 3 ? -1 : (int32_t)(n % 7 == 0 ? V - 1 : n * 7919 % V); }
}
static void values(Case& c) {
    Floats& x = c.tensors[LOGITS].start;
    rand_normal(x.data(), 0, x.size(), 3, 1234, 1);
    to_floatX(x);
    set_targets(c.tensors[TARGETS], c.n[1]);
    if (c.tensors.size() > DLOSSES) { c.tensors[DLOSSES].start.assign(c.n[0], 4096); }
}

static void oracle_forward(Case& c) { crossentropy_forward(c[LOSSES], c[LOGITS], c.ints(TARGETS), c.n[0], (int)c.n[1]); }
static void oracle_backward(Case& c) {
    crossentropy_fused(c[BLOSSES], c[DLOGITS], c.ints(BTARGETS), c[DLOSSES][0], c.n[0], (int)c.n[1]);
}

static void make_head(Case& c) {
    const size_t N = c.n[0], V = c.n[1], C = c.n[2];
    c.tensor<floatX>("x", READ, N, C);
    c.tensor<floatX>("w", READ, V, C);
    c.tensor<int32_t>("targets", READ, 1, N, (float)V);
    c.tensor<float>("dlosses", READ, 1, N);
    // judged as a whole: if a dlogit rounds the other way than the oracle's, its row of dx is half a unit off
    c.tensor<floatX>("dx", WRITE, N, C, 1, INFINITY);
    c.tensor<float>("dw", WRITE, V, C);
    c.tensor<float>("losses", WRITE, 1, N);
    c.tensor<char>("logits", SCRATCH, 1, N * c.pitch(V) * sizeof(floatX));
    c.flops = 6 * (double)N * (double)V * (double)C;
    c.bytes = (double)(2 * N * C + V * C) * ELEMENT + 4.0 * (double)(V * C) + 32 * sectors(c, 3 * ELEMENT);
}
static void values_head(Case& c) {
    to_sixteenths(c, X, W);
    set_targets(c.tensors[HTARGETS], c.n[1]);
    c.tensors[HDLOSSES].start.assign(c.n[0], 64);
}
static void oracle_head(Case& c) {
    const size_t N = c.n[0], V = c.n[1], C = c.n[2];
    Floats logits(N * V);
    std::vector<char> scratch(matmul_scratch());
    matmul_forward(logits.data(), scratch.data(), c[X], c[W], NULL, N, (int)C, (int)V);
    to_floatX(logits);
    crossentropy_fused(c[HLOSSES], logits.data(), c.ints(HTARGETS), c[HDLOSSES][0], N, (int)V);
    to_floatX(logits);
    matmul_backward_input(c[DX], scratch.data(), logits.data(), c[W], N, (int)C, (int)V);
    std::fill_n(c[DW], V * C, 0.0f);
    matmul_backward_weight(c[DW], scratch.data(), logits.data(), c[X], N, (int)C, (int)V);
}

static const Shape odd = {{33, 97}}, tail = {{9, 9001}}, padded_rows = {{130, 256}}, classic = {{1024, 32000}},
                   large = {{8192, 128256}};

#include "dev/cuda/main.cuh"

int main(int argc, char** argv) {
    const Ladder f("forward", "N,V", make_forward, values, oracle_forward, {odd, tail, padded_rows}, {classic}, {large},
                   {{1, "a block a row, two passes", 0, forward<forward1>, predict_forward1},
                    {2, "online: one pass, 16 bytes", 0, forward<forward2>, predict_forward2},
                    {3, "one wave, next loads in flight", BOLD, forward<crossentropy_forward_cuda>, predict_forward3}});
    const Ladder b("backward", "N,V", make_backward, values, oracle_backward, {odd, tail, padded_rows}, {classic}, {large},
                   {{1, "softmax, loss, gradient apart", 0, backward1, predict_backward1},
                    {2, "fused, in place", 0, backward<backward2>, predict_backward2},
                    {3, "online, 16 bytes", 0, backward<backward3>, predict_backward3},
                    {4, "row in registers and shared memory", BOLD, backward<crossentropy_fused_cuda>, predict_backward4}});
    const Ladder h(
        "head", "N,V,C,chunk", make_head, values_head, oracle_head,
        {{{33, 97, 24, 16}}, {{40, 200, 32, 24}}, {{64, 256, 64, 32}}}, {{{4096, 8192, 768, 1024}}},
        {{{8192, 128256, 2048, 4096}}},
        {{0, "cuBLASLt, the three products alone", REFERENCE, head<nullptr>, predict_product},
         {3, "all logits in memory, version 3", 0, head<backward3>, predict_head},
         {4, "a chunk of rows at a time, version 4", BOLD, head<crossentropy_fused_cuda, true>, predict_head_chunks}});
    return zoo(argc, argv, "crossentropy", {f, b, h});
}
