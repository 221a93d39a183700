/* swiglu.cu -- SwiGLU in steps. The formulas stand in llmc/swiglu.h, the lesson is dev/doc/swiglu.md.
 *
 *   make -C dev/cuda swiglu && build/zoo/swiglu [forward|backward|recompute|product] [N...]
 *
 * The forward pass reads gate and up and writes out: 3 N F elements. The backward pass reads dout, gate and up and writes two
 * gradients: 5 N F. The ladder `recompute` also wants the output again, which a training step did not keep. The last ladder
 * measures a whole layer: the product that makes gate and up, and SwiGLU.
 */
#include "llmc/matmul_sm90.cuh"
#include "llmc/swiglu.cuh"
#include "llmc/swiglu.h"
#include "dev/cuda/product.cuh"

/* Returns the sectors of `tensors` tensors (N, F). */
static double sectors(const Case& c, double tensors) { return tensors * (double)(c.n[0] * c.n[1]) * sizeof(floatX) / 32; }

/* Blocks of 256 threads along a row, a row of blocks for each row. */
static dim3 grid_of(size_t N, size_t vectors) { return dim3((unsigned)N, blocks_for(vectors, 256)); }

// ---------------------------------------------------------------------------------------------------------------------
// forward 1: a thread an element. Gate and up are two tensors, each from a product of its own.
enum { GATE_UP, GATE, UP, OUT };  // tensors of the ladder `forward`

__global__ void forward1_kernel(floatX* out, const floatX* gate, const floatX* up, int F, size_t pitch) {
    const int f = blockIdx.y * 256 + threadIdx.x;
    if (f >= F) { return; }
    const size_t at = blockIdx.x * pitch + f;
    const float g = to_float(gate[at]);
    out[at] = from_float<floatX>(g * swiglu_sigmoid(g) * to_float(up[at]));
}

static void forward1(const Case& c, cudaStream_t stream) {
    forward1_kernel<<<grid_of(c.n[0], c.n[1]), 256, 0, stream>>>(c.at<floatX>(OUT), c.at<floatX>(GATE), c.at<floatX>(UP),
                                                                 (int)c.n[1], c.pitch(c.n[1]));
}

// Some 35 instructions an element. A thread waits for memory once; an SM holds 2048 threads.
static double trips(const Case& c, double elements) { return (double)(c.n[0] * c.n[1]) / elements / (2048 * sms()); }
static Work predict_forward1(const Case& c) { return {sectors(c, 3), 0, 35.0 * (double)(c.n[0] * c.n[1]), trips(c, 1)}; }

// forward 2: 16 bytes a thread. In 16 bits a load brings 8 elements for one instruction, and 8 times as many bytes are on their
// way to an SM.
template <int W>
__global__ void forward2_kernel(floatX* out, const floatX* gate, const floatX* up, int F, size_t pitch, size_t out_pitch) {
    const int f = (blockIdx.y * 256 + threadIdx.x) * W;
    if (f >= F) { return; }
    const size_t at = blockIdx.x * pitch + f;
    store_vec(out + blockIdx.x * out_pitch + f, swiglu_vector(load_vec<W>(gate + at), load_vec<W>(up + at)));
}

static void in_vectors(floatX* out, const floatX* gate, const floatX* up, size_t N, int F, size_t pitch, size_t out_pitch,
                       cudaStream_t stream) {
    constexpr int W = VECTOR<floatX>;
    auto* kernel = F % W == 0 ? forward2_kernel<W> : forward2_kernel<1>;
    kernel<<<grid_of(N, (size_t)(F % W == 0 ? F / W : F)), 256, 0, stream>>>(out, gate, up, F, pitch, out_pitch);
}

static void forward2(const Case& c, cudaStream_t stream) {
    const size_t pitch = c.pitch(c.n[1]);
    in_vectors(c.at<floatX>(OUT), c.at<floatX>(GATE), c.at<floatX>(UP), c.n[0], (int)c.n[1], pitch, pitch, stream);
}

// __expf and __fdividef leave about 12 instructions an element
static Work predict_forward2(const Case& c) {
    return {sectors(c, 3), 0, 15.0 * (double)(c.n[0] * c.n[1]), trips(c, VECTOR<floatX>)};
}

// forward 3: gate and up are the halves of a row, as one product with the weights of both writes it. The same kernel and bytes,
// but one product of twice the width instead of two.
static void forward3(floatX* out, const floatX* gate_up, SwigluShape s, cudaStream_t stream) {
    in_vectors(out, gate_up, gate_up + s.F, s.N, s.F, s.gate_up_pitch, s.out_pitch, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// backward 1: a thread an element, by the formulas
enum { DGATE_UP, DOUT, BGATE_UP };  // tensors of the ladder `backward`

__global__ void backward1_kernel(floatX* dgate_up, const floatX* dout, const floatX* gate_up, int F, size_t gate_up_pitch,
                                 size_t out_pitch) {
    const int f = blockIdx.y * 256 + threadIdx.x;
    if (f >= F) { return; }
    const size_t at = blockIdx.x * gate_up_pitch + f;
    const float g = to_float(gate_up[at]), u = to_float(gate_up[at + F]), d = to_float(dout[blockIdx.x * out_pitch + f]);
    const float s = swiglu_sigmoid(g);
    dgate_up[at] = from_float<floatX>(d * u * s * (1.0f + g * (1.0f - s)));
    dgate_up[at + F] = from_float<floatX>(d * g * s);
}

static void backward1(floatX* dgate_up, floatX*, const floatX* dout, const floatX* gate_up, SwigluShape s,
                      cudaStream_t stream) {
    backward1_kernel<<<grid_of(s.N, (size_t)s.F), 256, 0, stream>>>(dgate_up, dout, gate_up, s.F, s.gate_up_pitch, s.out_pitch);
}

static Work predict_backward1(const Case& c) { return {sectors(c, 5), 0, 45.0 * (double)(c.n[0] * c.n[1]), trips(c, 1)}; }

// backward 2: 16 bytes a thread
template <int W>
__global__ void backward2_kernel(floatX* dgate_up, const floatX* dout, const floatX* gate_up, int F, size_t gate_up_pitch,
                                 size_t out_pitch) {
    const int f = (blockIdx.y * 256 + threadIdx.x) * W;
    if (f >= F) { return; }
    const size_t at = blockIdx.x * gate_up_pitch + f;
    const SwigluGradient<W> g = swiglu_gradient(load_vec<W>(gate_up + at), load_vec<W>(gate_up + at + F),
                                                load_vec<W>(dout + blockIdx.x * out_pitch + f));
    store_vec(dgate_up + at, g.dgate);
    store_vec(dgate_up + at + F, g.dup);
}

static void backward2(floatX* dgate_up, floatX*, const floatX* dout, const floatX* gate_up, SwigluShape s,
                      cudaStream_t stream) {
    const int W = s.F % VECTOR<floatX> == 0 ? VECTOR<floatX> : 1;
    auto* kernel = W == 1 ? backward2_kernel<1> : backward2_kernel<VECTOR<floatX>>;
    kernel<<<grid_of(s.N, (size_t)(s.F / W)), 256, 0, stream>>>(dgate_up, dout, gate_up, s.F, s.gate_up_pitch, s.out_pitch);
}

static Work predict_backward2(const Case& c) {
    return {sectors(c, 5), 0, 25.0 * (double)(c.n[0] * c.n[1]), trips(c, VECTOR<floatX>)};
}

// recompute 2: a step that kept gate and up, but not the output, computes it again with the forward pass: 3 and 5 tensors
enum { CHANGED, AGAIN, RDOUT };  // tensors of the ladder `recompute`

static void recompute2(floatX* gate_up, floatX* out, const floatX* dout, const floatX*, SwigluShape s, cudaStream_t stream) {
    forward3(out, gate_up, s, stream);
    backward2(gate_up, NULL, dout, gate_up, s, stream);
}

static Work predict_recompute2(const Case& c) { return {sectors(c, 3), 0, 0, 0, 2, sectors(c, 5)}; }

// recompute 3: the backward pass has gate and up in registers anyway, so the output costs its store: 6 tensors. It runs in
// place, so no room for gradients is needed.
static Work predict_recompute3(const Case& c) { return {sectors(c, 6), 0, 30.0 * (double)(c.n[0] * c.n[1])}; }

// ---------------------------------------------------------------------------------------------------------------------
// product: x (N, C) times w (2F, C), and SwiGLU. 0 the product alone; 4 the product, then forward 4; 5 one kernel, which has
// gate and up of an element in one thread's sums. So 5 saves reading them again.
enum { X, W_GATE_UP, SUMS, ACT };  // tensors of the ladder `product`

static void product(const Case& c, cudaStream_t stream) {
    product_cuda(c, SUMS, X, W_GATE_UP, c.n[0], c.n[1], 2 * c.n[2], stream);
}

static void product_and_swiglu(const Case& c, cudaStream_t stream) {
    product(c, stream);
    swiglu_forward_cuda(c.at<floatX>(ACT), c.at<floatX>(SUMS), {c.n[0], (int)c.n[2], 2 * c.n[2], c.n[2]}, stream);
}

static void product_with_swiglu(const Case& c, cudaStream_t stream) {
    matmul_swiglu_cuda(c.at<floatX>(SUMS), c.at<floatX>(ACT), c.at<floatX>(X), c.at<floatX>(W_GATE_UP),
                       {c.n[0], 2 * c.n[2], c.n[1]}, stream);
}

static Work predict_product_and_swiglu(const Case& c) {
    return {c.bytes / 32, c.flops, 0, 0, 2, 3.0 * (double)(c.n[0] * c.n[2]) * sizeof(floatX) / 32};
}

// ---------------------------------------------------------------------------------------------------------------------

static SwigluShape shape_of(const Case& c) { return {c.n[0], (int)c.n[1], c.pitch(2 * c.n[1]), c.pitch(c.n[1])}; }

template <auto* LAUNCH>
static void forward(const Case& c, cudaStream_t stream) {
    LAUNCH(c.at<floatX>(OUT), c.at<floatX>(GATE_UP), shape_of(c), stream);
}
template <auto* LAUNCH>
static void backward(const Case& c, cudaStream_t stream) {
    LAUNCH(c.at<floatX>(DGATE_UP), NULL, c.at<floatX>(DOUT), c.at<floatX>(BGATE_UP), shape_of(c), stream);
}
template <auto* LAUNCH>
static void recompute(const Case& c, cudaStream_t stream) {
    LAUNCH(c.at<floatX>(CHANGED), c.at<floatX>(AGAIN), c.at<floatX>(RDOUT), c.at<floatX>(CHANGED), shape_of(c), stream);
}

static void make_forward(Case& c) {
    const size_t N = c.n[0], F = c.n[1];
    c.rows("gate_up", READ, N, 2 * F, 2);
    c.rows("gate", READ, N, F);
    c.rows("up", READ, N, F);
    c.rows("out", WRITE, N, F);
    c.bytes = 32 * sectors(c, 3);
}
static void values_forward(Case& c) {  // gate and up hold what the halves of gate_up hold
    for (size_t i = 0; i < c.n[0] * c.n[1]; i++) {
        const float* row = &c.tensors[GATE_UP].start[i / c.n[1] * 2 * c.n[1] + i % c.n[1]];
        c.tensors[GATE].start[i] = row[0], c.tensors[UP].start[i] = row[c.n[1]];
    }
}
static void oracle_forward(Case& c) { swiglu_forward(c[OUT], c[GATE_UP], c.n[0], (int)c.n[1]); }

static void make_backward(Case& c) {
    c.rows("dgate_up", WRITE, c.n[0], 2 * c.n[1]);
    c.rows("dout", READ, c.n[0], c.n[1]);
    c.rows("gate_up", READ, c.n[0], 2 * c.n[1], 2);
    c.bytes = 32 * sectors(c, 5);
}
static void oracle_backward(Case& c) { swiglu_backward(c[DGATE_UP], c[DOUT], c[BGATE_UP], c.n[0], (int)c.n[1]); }

static void make_recompute(Case& c) {
    c.rows("gate_up", CHANGE, c.n[0], 2 * c.n[1], 2);
    c.rows("out", WRITE, c.n[0], c.n[1]);
    c.rows("dout", READ, c.n[0], c.n[1]);
    c.bytes = 32 * sectors(c, 6);
}
static void oracle_recompute(Case& c) {
    const Floats gate_up = c.tensors[CHANGED].start;
    swiglu_forward(c[AGAIN], gate_up.data(), c.n[0], (int)c.n[1]);
    swiglu_backward(c[CHANGED], c[RDOUT], gate_up.data(), c.n[0], (int)c.n[1]);
}

static void make_product(Case& c) {
    const size_t N = c.n[0], C = c.n[1], F = c.n[2];
    c.tensor<floatX>("x", READ, N, C, 2);
    c.tensor<floatX>("w", READ, 2 * F, C);
    c.tensor<floatX>("gate_up", WRITE, N, 2 * F);
    c.tensor<floatX>("act", WRITE, N, F);
    c.bytes = sizeof(floatX) * (double)(N * C + 2 * F * C + 3 * N * F);
    c.flops = 2.0 * (double)N * (double)C * (double)(2 * F);
}
static void values_product(Case& c) { to_sixteenths(c, X, W_GATE_UP); }
static void oracle_product(Case& c) {
    product_oracle(c, SUMS, X, W_GATE_UP, c.n[0], c.n[1], 2 * c.n[2]);
    to_floatX(c.tensors[SUMS].host);
    swiglu_forward(c[ACT], c[SUMS], c.n[0], (int)c.n[2]);
}

static const Shape odd = {{33, 97}}, tail = {{67, 520}}, wide = {{130, 256}}, classic = {{8192, 768}}, large = {{65536, 8192}};

#include "dev/cuda/main.cuh"

int main(int argc, char** argv) {
    const Ladder f("forward", "N,F", make_forward, values_forward, oracle_forward, {odd, tail, wide}, {classic}, {large},
                   {{1, "an element a thread, two tensors", 0, forward1, predict_forward1},
                    {2, "16 bytes a thread", 0, forward2, predict_forward2},
                    {3, "gate and up packed in a row", 0, forward<forward3>, predict_forward2},
                    {4, "two rows in flight", BOLD, forward<swiglu_forward_cuda>, predict_forward2}});
    const Ladder b("backward", "N,F", make_backward, NULL, oracle_backward, {odd, tail, wide}, {classic}, {large},
                   {{1, "an element a thread", 0, backward<backward1>, predict_backward1},
                    {2, "16 bytes a thread", 0, backward<backward2>, predict_backward2},
                    {3, "two rows in flight", BOLD, backward<swiglu_backward_cuda>, predict_backward2}});
    const Ladder r("recompute", "N,F", make_recompute, NULL, oracle_recompute, {odd, tail, wide}, {classic}, {large},
                   {{2, "forward again, then backward", 0, recompute<recompute2>, predict_recompute2},
                    {3, "in one pass, in place", BOLD, recompute<swiglu_backward_cuda>, predict_recompute3}});
    const Ladder p("product", "N,C,F", make_product, values_product, oracle_product,
                   {{{256, 64, 256}}, {{512, 192, 512}}, {{256, 64, 1024}}}, {{{8192, 768, 2048}}}, {{{65536, 2048, 8192}}},
                   {{0, "cuBLASLt, the product alone", REFERENCE, product, predict_product},
                    {4, "cuBLASLt, then two rows in flight", BOLD, product_and_swiglu, predict_product_and_swiglu},
                    {5, "in the product's epilogue", BOLD | SM90 | ONLY_16, product_with_swiglu, predict_product}});
    return zoo(argc, argv, "swiglu", {f, b, r, p});
}
