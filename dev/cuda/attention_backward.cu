/* attention_backward.cu -- attention's backward pass in steps. The formulas stand in llmc/attention.h, the lesson is
 * dev/doc/attention.md.
 *
 *   make -C dev/cuda attention_backward && build/zoo/attention_backward [backward] [N...]
 *
 *   P = exp(S - lse)     dV = P^T dO     dP = dO V^T     dS = P (dP - D) / sqrt(HD)     dQ = dS K     dK = dS^T Q
 *
 * Five products, with S = Q K^T. dQ is a sum over keys, dK and dV are sums over queries: a block that walks along one way meets
 * the other sums in pieces. So the question is who adds them, and in which order. Operations count for the causal half alone.
 * Version 0 is a product of cuBLASLt with as many.
 */
#include "llmc/attention.cuh"
#include "llmc/attention.h"
enum { PLAIN = 4 };  // the last version for any head size
#include "dev/cuda/attention_classic.cuh"

enum { DQKV, SPARE, DOUT, OUT, LSE, QKV };

/* The arguments of each version. */
struct Args {
    floatX* dqkv;  // (B T, QKV)
    void* spare;
    floatX *dout, *out;  // (B T, NH HD)
    float* lse;          // (B, NH, T)
    floatX* qkv;
    AttentionShape s;
    size_t pitch, out_pitch;
    void next_sequence() {
        dqkv += s.T * pitch, qkv += s.T * pitch, dout += s.T * out_pitch, out += s.T * out_pitch, lse += s.NH * s.T;
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// 1: a warp a query, a lane every 32nd element of the head. The warp keeps its dq. It adds to dk and dv of each key in memory,
// atomically, in any order, and beside the queries of all heads of the group. A second kernel rounds the sums.

/* A lane's elements of a head, 0 past its end. */
struct Part1 {
    float v[MAX_HEAD_DIM / 32] = {};
    __device__ Part1() {}
    __device__ Part1(const floatX* x, int HD) {
        each([&](float& mine, int d) { mine = d < HD ? to_float(x[d]) : 0; });
    }
    /* Calls f(element, its place in the head). */
    template <typename F>
    __device__ void each(const F& f) {
#pragma unroll
        for (int i = 0; i < MAX_HEAD_DIM / 32; i++) { f(v[i], (int)threadIdx.x + 32 * i); }
    }
    __device__ float dot(const Part1& x) {
        float sum = 0;
        each([&](float mine, int d) { sum += mine * x.v[d / 32]; });
        return warp_sum(sum);
    }
    __device__ void add(float weight, const Part1& x) {
        each([&](float& mine, int d) { mine += weight * x.v[d / 32]; });
    }
    __device__ void store(floatX* to, int HD) {
        each([&](float mine, int d) {
            if (d < HD) { to[d] = from_float<floatX>(mine); }
        });
    }
};

/* ADDS: to dkv. Otherwise keys3_kernel makes dk and dv, and gets D here (B, NH, T). */
template <bool ADDS>
__global__ void backward1_kernel(float* dkv, Args a) {
    const AttentionShape s = a.s;
    const int t = blockIdx.x * blockDim.y + threadIdx.y, h = blockIdx.y, b = blockIdx.z;
    if (t >= s.T) { return; }
    const int group = h / (s.NH / s.NKV);
    const size_t row = (size_t)b * s.T + t, place = row * a.out_pitch + h * s.HD, stat = ((size_t)b * s.NH + h) * s.T + t;
    Part1 q(a.qkv + row * a.pitch + h * s.HD, s.HD), dO(a.dout + place, s.HD), dq;
    const float scale = 1 / sqrtf((float)s.HD), lse = a.lse[stat], D = dO.dot(Part1(a.out + place, s.HD));
    for (int u = 0; u <= t; u++) {
        const size_t at = (size_t)b * s.T + u;
        const floatX* k = a.qkv + at * a.pitch + (s.NH + group) * s.HD;
        const Part1 key(k, s.HD);
        const float p = expf(q.dot(key) * scale - lse), ds = p * (dO.dot(Part1(k + s.NKV * s.HD, s.HD)) - D) * scale;
        dq.add(ds, key);
        if constexpr (ADDS) {
            float *dk = dkv + (at * 2 * s.NKV + group) * s.HD, *dv = dk + s.NKV * s.HD;
            q.each([&](float x, int d) {
                if (d < s.HD) { atomicAdd(&dk[d], ds * x), atomicAdd(&dv[d], p * dO.v[d / 32]); }
            });
        }
    }
    dq.store(a.dqkv + row * a.pitch + h * s.HD, s.HD);
    if (!ADDS && threadIdx.x == 0) { dkv[stat] = D; }
}

__global__ void backward1_round_kernel(floatX* dqkv, const float* dkv, AttentionShape s, size_t pitch) {
    const size_t width = (size_t)2 * s.NKV * s.HD, i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < s.B * s.T * width) { dqkv[i / width * pitch + s.NH * s.HD + i % width] = from_float<floatX>(dkv[i]); }
}

/* A grid of four rows a block, of so many heads. */
static dim3 rows_of(AttentionShape s, int heads) { return dim3(blocks_for(s.T, 4), (unsigned)heads, (unsigned)s.B); }

static void backward1(Args a, cudaStream_t stream) {
    const size_t n = (size_t)a.s.B * a.s.T * 2 * a.s.NKV * a.s.HD;
    float* dkv = (float*)a.spare;  // (B T, 2 NKV HD)
    CUDA_CHECK(cudaMemsetAsync(dkv, 0, n * sizeof(float), stream));
    backward1_kernel<true><<<rows_of(a.s, a.s.NH), dim3(32, 4), 0, stream>>>(dkv, a);
    backward1_round_kernel<<<blocks_for(n, 256), 256, 0, stream>>>(a.dqkv, dkv, a.s, a.pitch);
}

// The L2 cache adds: 2 HD atomic additions for each score, a sector of 8 at a time, at about the rate at which memory moves
// sectors.
static Work predict_backward1(const Case& c) { return {scores(c) / 2 * 2 * (double)c.n[4] / 8, 0, 0, 0, 3}; }

// ---------------------------------------------------------------------------------------------------------------------
// 2: the classic way, five products of cuBLASLt for all heads of a sequence. k and v are copied for each head of a group, and
// their gradients are added up over the group afterwards.

/* A warp a row: p = exp(S - lse) and ds = p (dP - D), zero above the diagonal. */
__global__ void gradient2_kernel(floatX* p, floatX* ds, const float* S, const float* dP, Args a) {
    const size_t row = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= (size_t)a.s.NH * a.s.T) { return; }
    const int t = (int)(row % a.s.T), h = (int)(row / a.s.T);
    const size_t at = t * a.out_pitch + h * a.s.HD;
    float D = 0;
    for (int d = threadIdx.x; d < a.s.HD; d += 32) { D += to_float(a.dout[at + d]) * to_float(a.out[at + d]); }
    D = warp_sum(D);
    for (size_t u = threadIdx.x, i = row * a.s.T + u; u < (size_t)a.s.T; u += 32, i += 32) {
        const float x = (int)u <= t ? expf(S[i] - a.lse[row]) : 0;
        p[i] = from_float<floatX>(x);
        ds[i] = from_float<floatX>((int)u <= t ? x * (dP[i] - D) : 0);
    }
}

/* Writes the sum of a group's heads of m (NH, T, HD), in their order, to head `first` + group of dqkv. */
__global__ void group_sum2_kernel(floatX* dqkv, const floatX* m, AttentionShape s, int first, size_t pitch) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)s.NKV * s.T * s.HD) { return; }
    const size_t d = i % s.HD, t = i / s.HD % s.T, kv = i / s.HD / s.T, heads = s.NH / s.NKV;
    float sum = 0;
    for (size_t h = kv * heads; h < (kv + 1) * heads; h++) { sum += to_float(m[(h * s.T + t) * s.HD + d]); }
    dqkv[t * pitch + (first + kv) * s.HD + d] = from_float<floatX>(sum);
}

static void group_sum2(floatX* dqkv, const floatX* m, AttentionShape s, int first, size_t pitch, cudaStream_t stream) {
    const size_t n = (size_t)s.NKV * s.T * s.HD;
    group_sum2_kernel<<<blocks_for(n, 256), 256, 0, stream>>>(dqkv, m, s, first, pitch);
}

static void backward2(Args a, cudaStream_t stream) {
    const AttentionShape s = a.s;
    const float scale = 1 / sqrtf((float)s.HD);
    Arena memory = {(char*)a.spare, 0};
    Heads x(&memory, s), d(&memory, s);  // q, k, v, dO, S, P and their gradients
    for (int b = 0; b < s.B; b++, a.next_sequence()) {
        split_heads(x, a.qkv, s, a.pitch, stream);
        permute(a.dout, x.out, s, 0, 1, a.out_pitch, stream);
        batched(matrices(x.scores), matrices(x.q), matrices(x.k, true), s.T, s.T, s.HD, s.NH, scale, stream);
        batched(matrices(d.scores), matrices(x.out), matrices(x.v, true), s.T, s.T, s.HD, s.NH, 1, stream);
        gradient2_kernel<<<blocks_for((size_t)s.NH * s.T, 8), dim3(32, 8), 0, stream>>>(x.p, d.p, x.scores, d.scores, a);
        batched(matrices(d.v), matrices(x.p, true), matrices(x.out), s.T, s.HD, s.T, s.NH, 1, stream);
        batched(matrices(d.q), matrices(d.p), matrices(x.k), s.T, s.HD, s.T, s.NH, scale, stream);
        batched(matrices(d.k), matrices(d.p, true), matrices(x.q), s.T, s.HD, s.T, s.NH, scale, stream);
        permute<true>(a.dqkv, d.q, s, 0, 1, a.pitch, stream);
        group_sum2(a.dqkv, d.k, s, s.NH, a.pitch, stream);
        group_sum2(a.dqkv, d.v, s, s.NH + s.NKV, a.pitch, stream);
    }
}

// Two squares of scores in fp32 and two in floatX are written once and read once or twice, and may stay in the L2 cache. The
// products do twice the operations, at a low share of the rate.
static Work predict_backward2(const Case& c) {
    const double one = 2 * scores(c) / (double)c.n[0], bytes = one * (sizeof(float) + sizeof(floatX)),
                 heads = 16.0 * (double)(c.n[0] * c.n[1] * c.n[2] * c.n[4]) * sizeof(floatX);
    return {0, 2 * c.flops / 0.6, 0, 0, 13.0 * (double)c.n[0], (2.3 * missing(bytes) * bytes * (double)c.n[0] + heads) / 32};
}

// ---------------------------------------------------------------------------------------------------------------------
// 3: each sum has an owner. A warp a query makes dq, as in 1. Then a warp a key walks over the queries that see it, of all
// heads of its group, and keeps dk and dv. No score is in memory and the order is fixed, but S and dP are computed twice.

__global__ void keys3_kernel(const float* D, Args a) {
    const AttentionShape s = a.s;
    const int u = blockIdx.x * blockDim.y + threadIdx.y, kv = blockIdx.y, b = blockIdx.z, group = s.NH / s.NKV;
    if (u >= s.T) { return; }
    const size_t first = (size_t)b * s.T, place = (first + u) * a.pitch + (s.NH + kv) * s.HD;
    const float scale = 1 / sqrtf((float)s.HD);
    Part1 k(a.qkv + place, s.HD), v(a.qkv + place + s.NKV * s.HD, s.HD), dk, dv;
    for (int h = kv * group; h < (kv + 1) * group; h++) {
        for (int t = u; t < s.T; t++) {
            const size_t stat = ((size_t)b * s.NH + h) * s.T + t;
            const Part1 q(a.qkv + (first + t) * a.pitch + h * s.HD, s.HD),
                dO(a.dout + (first + t) * a.out_pitch + h * s.HD, s.HD);
            const float p = expf(k.dot(q) * scale - a.lse[stat]);
            dk.add(p * (v.dot(dO) - D[stat]) * scale, q);
            dv.add(p, dO);
        }
    }
    dk.store(a.dqkv + place, s.HD);
    dv.store(a.dqkv + place + s.NKV * s.HD, s.HD);
}

static void backward3(Args a, cudaStream_t stream) {
    backward1_kernel<false><<<rows_of(a.s, a.s.NH), dim3(32, 4), 0, stream>>>((float*)a.spare, a);
    keys3_kernel<<<rows_of(a.s, a.s.NKV), dim3(32, 4), 0, stream>>>((const float*)a.spare, a);
}

// For a score and element 4 loads, of 4 additions each, and 7 additions; for a score in both kernels some 35 instructions of
// the whole warp.
static Work predict_backward3(const Case& c) {
    return {c.bytes / 32, 0, c.flops / 10 * (23 + 2 * 35 * 32 / (double)c.n[4]), 0, 2};
}

// ---------------------------------------------------------------------------------------------------------------------
// 4 to 7, the trainer's: tiles of queries meet tiles of keys, and those above the diagonal are skipped. 4, 5 and 6 have the two
// owners of 3. In 7 a block with a tile of keys also makes its part of dQ, and adds it when the block before it has added its
// own: an order again, in five products.

template <AttentionKernel KERNEL>
static void trainer(Args a, cudaStream_t stream) {
    attention_backward_cuda(a.dqkv, a.spare, a.dout, {a.qkv, a.out, a.lse}, a.s.B, attention_args(a.s, a.pitch, a.out_pitch),
                            stream, KERNEL);
}

// 4: seven products on the ordinary units, with about two loads from shared memory for four additions.
static Work predict_backward4(const Case& c) { return {c.bytes / 32, 0, 1.4 * c.flops / 2 * 2.2, 0, 3}; }
// 5: seven products; exponentials and the exchange of tiles hide half as well as in the forward pass.
static Work predict_backward5(const Case& c) { return {c.bytes / 32, 1.4 * c.flops / mma_rate() / 0.6, 0, 0, 3}; }
// 6: seven products.
static Work predict_backward6(const Case& c) { return {c.bytes / 32, 1.4 * c.flops / 0.75, 0, 0, 2}; }
// 7: five products, and dQ's sums in fp32 pass the L2 cache once for each tile of 128 keys.
static Work predict_backward7(const Case& c) { return {c.bytes / 32, c.flops / 0.65, 0, 0, 3}; }

static void backward0(Args a, cudaStream_t stream) {
    as_many((floatX*)a.spare, a.dout, a.out_pitch, a.qkv, a.pitch, a.s, 5, stream);
}

// ---------------------------------------------------------------------------------------------------------------------

template <void LAUNCH(Args, cudaStream_t)>
static void backward(const Case& c, cudaStream_t stream) {
    const AttentionShape s = shape_of(c);
    LAUNCH({c.at<floatX>(DQKV), c.at<char>(SPARE), c.at<floatX>(DOUT), c.at<floatX>(OUT), c.at<float>(LSE), c.at<floatX>(QKV),
            s, c.pitch(qkv_width(s)), c.pitch(out_width(s))},
           stream);
}

static void make(Case& c) {
    const AttentionShape s = shape_of(c);
    const size_t N = (size_t)s.B * s.T, most = size_max(N * s.T * sizeof(floatX), attention_backward_scratch_cuda(s, true)),
                 small = size_max(2 * Heads::bytes(s), N * 2 * s.NKV * s.HD * sizeof(float));
    // 2, 5, 6 and 7 round P and dS to 16 bits before they multiply them. 2 also rounds dk and dv of each head before it adds
    // them up. So an element may be as wrong as its largest terms are rounded.
    c.rows("dqkv", WRITE, N, qkv_width(s), 1, INFINITY);
    c.tensor<char>("scratch", SCRATCH, 1, s.T > 2048 ? most : size_max(most, small));
    c.rows("dout", READ, N, out_width(s));
    c.rows("out", READ, N, out_width(s));
    c.tensor<float>("lse", READ, 1, (size_t)s.NH * N);
    c.rows("qkv", READ, N, qkv_width(s));
    c.bytes = sizeof(floatX) * (double)N * (double)(2 * qkv_width(s) + 2 * out_width(s));
    c.flops = 5 * half_product(s);
}
static void values(Case& c) {  // out and lse are the forward pass's
    std::vector<char> scratch(attention_forward_scratch());
    Floats& out = c.tensors[OUT].start;
    attention_forward(out.data(), c.tensors[LSE].start.data(), scratch.data(), c.tensors[QKV].start.data(), NULL, shape_of(c));
    to_floatX(out);
}
static void oracle(Case& c) {
    std::vector<char> scratch(attention_backward_scratch(shape_of(c)));
    attention_backward(c[DQKV], scratch.data(), c[DOUT], c[OUT], c[LSE], c[QKV], NULL, shape_of(c));
}

#include "dev/cuda/main.cuh"

int main(int argc, char** argv) {
    const Ladder l(
        "backward", "B,T,NH,NKV,HD", make, values, oracle, TESTS, CLASSIC, LARGE,
        {{0, "cuBLASLt, a product of as many operations", REFERENCE, backward<backward0>, predict_product},
         {1, "atomic additions to dk and dv", ATOMICS, backward<backward1>, predict_backward1},
         {2, "classic: copies, five products of cuBLASLt", 0, backward<backward2>, predict_backward2},
         {3, "a warp a query, then a warp a key", 0, backward<backward3>, predict_backward3},
         {4, "tiles: seven products on the chip", BOLD, backward<trainer<ATTENTION_PLAIN>>, predict_backward4},
         {5, "mma", BOLD | ONLY_16, backward<trainer<ATTENTION_MMA>>, predict_backward5},
         {6, "wgmma, seven products", BOLD | ONLY_16 | SM90, backward<trainer<ATTENTION_WGMMA>>, predict_backward6},
         {7, "wgmma, one walk, five products", BOLD | ONLY_16 | SM90, backward<trainer<ATTENTION_WALK>>, predict_backward7}});
    return zoo(argc, argv, "attention_backward", {l});
}
