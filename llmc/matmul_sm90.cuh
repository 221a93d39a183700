/* matmul_sm90.cuh -- matrix products of 16-bit factors with Hopper's own instructions (code for sm_90a), and SwiGLU, its
 * gradient and RoPE computed from sums that are still in registers. Of symmetric products only half is computed.
 *
 *   forward           out (N, OC)      = x (N, C) W^T                        W: (OC, C)
 *   backward input    dx (N, C)        = dout (N, OC) W                      W: (OC, C)
 *   SwiGLU            gate_up (N, 2 F) = x (N, C) W^T, act (N, F) = silu(gate) * up
 *   SwiGLU backward   dact (N, F) = dout (N, C) W, which stays here; dgate_up (N, 2 F), and act again   W: (C, F)
 *   RoPE              qkv (N, QKV)     = x (N, C) W^T, in which q and k are rotated
 *   symmetric         out (M, M)       = x x^T [+ added], with factors, of each of several x (M, K); or x^T x of x (K, M)
 *
 * Sums are rounded before SwiGLU or RoPE takes them, so that results have the bits of the kernels of swiglu.cuh and rope.cuh.
 * Widths and N are multiples of a tile.
 *
 * A block is a producer and two consumer warpgroups. It computes tiles in steps of 64 of the summed index. The producer is one
 * thread, which copies a step's part of both factors by TMA into a ring of STAGES buffers. In a cluster of two, the blocks have
 * neighboring tiles of rows and the same columns: each copies one half of B's part to both, so B is read once a cluster. A
 * buffer is then empty when the consumers of both blocks have released it.
 *
 *   producer     A0 B0   A1 B1   A2 B2   A3 B3 | wait empty 0, A4 B4 ...
 *   consumers    wait full 0, 4 products | wait full 1, 4 products, wait for 0's, release 0      | ...
 *
 * The products of a step start before the products of the previous step have ended. So the tensor cores always have work,
 * except while consumers write. The consumers split the work in one of two ways:
 *
 *   SPLIT_ROWS    each has 64 rows of a tile of 128 x 256. The factors are read least often, but the tensor cores rest while
 *                 both write
 *   SPLIT_TILES   they take tiles of 128 x 128 in turns: one multiplies while the other writes. This is for SwiGLU, which
 *                 writes three values for two sums, where the L2 cache delivers the factors fast enough, and for symmetric
 *                 products, which write two
 *
 * A consumer passes its turn on when its last step is in the ring. A barrier distinguishes only two adjacent phases, so no
 * thread may wait two phases ahead.
 *
 * Each warp writes 16 rows at a time through BOXES boxes of 64 columns in shared memory, by TMA. SwiGLU's gradient gets gate
 * and up through the ring, as more steps of a tile, one for 64 columns. It writes dgate and dup from the same place. One thread
 * holds both elements that RoPE turns together. It reads the angles of a row once for all heads in the tile, while the last
 * products run.
 *
 * Blocks are persistent. They take tiles in the order of a list: MATMUL_GROUP tiles of rows after each other in each column of
 * tiles. So this part of A stays in the L2 cache while B passes by, once a group. A symmetric product's list has the tiles on
 * and above the diagonal, matrix after matrix. Element (j, i) is the sum of the products of (i, j) in the same order, so a warp
 * also writes the transpose of its tile, and the result has the bits of the whole product.
 *
 * On an H200 (dev/results/nvidia-h200-kernels.md), with tiles split by rows, sums alone have 89 to 98.6 % of the speed of
 * cuBLASLt's best. With SwiGLU, measured in turns, they are 0.6 to 10 % faster forward than cuBLASLt and swiglu.cuh, and 4 to
 * 12 % backward. On an H100 (nvidia-h100.md) SwiGLU's forward pass is 3 to 11 % faster with the split that is chosen there.
 */
#ifndef LLMC_MATMUL_SM90_CUH
#define LLMC_MATMUL_SM90_CUH

#include "llmc/config.h"             // defines: AttentionShape
#include "llmc/kernels.cuh"          // defines: kernel_row, PRODUCT_JOINED_TURNS
#include "llmc/base/matrix.h"        // defines: ProductShape, SumFactors, SymmetricShape
#include "llmc/cuda/warpgroups.cuh"  // defines: Ring, WarpgroupSplit, tensor_map
#include "llmc/rope.cuh"             // defines: rope_vectors
#include "llmc/swiglu.cuh"           // defines: swiglu_vector, swiglu_gradient

#ifndef PRECISION_FP32

/* The share of each of the two consumers: half of a tile's rows, or every second tile. */
enum MatmulSplit { SPLIT_ROWS, SPLIT_TILES };

enum MatmulEpilogue { EPILOGUE_STORE, EPILOGUE_SWIGLU, EPILOGUE_SWIGLU_BACKWARD, EPILOGUE_ROPE, EPILOGUE_SYMMETRIC };
// the first is bench_product's

/* The steps that led to this kernel, for dev/cuda/matmul.cu: a buffer is filled, then multiplied; a ring of them; a list of
 * tiles for a block, by groups; clusters; stores through boxes. Each has those before it. */
enum MatmulStep { STEP_LOAD, STEP_RING, STEP_LIST, STEP_CLUSTER, STEP_BOXES };

/* B_COLUMNS: whether sums go over the rows of B in memory (backward input), otherwise along them (forward).   HD: columns of
 * a head, 64 or 128, for RoPE */
template <MatmulSplit SPLIT, int B_COLUMNS_, MatmulEpilogue EPILOGUE, int HD_ = 64, int STEP = STEP_BOXES>
struct MatmulTiles : WarpgroupSplit<2, 1, 40> {
    static constexpr int B_COLUMNS = B_COLUMNS_, HD = HD_;
    static constexpr bool SWIGLU = EPILOGUE == EPILOGUE_SWIGLU, GRADIENT = EPILOGUE == EPILOGUE_SWIGLU_BACKWARD,
                          ROPE = EPILOGUE == EPILOGUE_ROPE, SYMMETRIC = EPILOGUE == EPILOGUE_SYMMETRIC;
    static constexpr int A_COLUMNS = SYMMETRIC && B_COLUMNS;    // both factors are x
    static constexpr int TURNS = SPLIT == SPLIT_TILES ? 2 : 1;  // consumers that take turns
    static constexpr int BANDS = TURNS;                         // bands of 64 rows that a consumer has of a tile
    static constexpr int BM = 128, BN = 256 / TURNS, BK = 64, BOXES = 2;
    static constexpr int STAGES = STEP < STEP_RING ? 1 : TURNS == 2 ? 6 : 4;
    static constexpr int CLUSTER = STEP < STEP_CLUSTER ? 1 : CLUSTER_BLOCKS;
    static constexpr bool LIST = STEP >= STEP_LIST, BOXED = STEP >= STEP_BOXES;
    static constexpr int A_BYTES = BM * BK * 2, HALF_BYTES = BN / 2 * BK * 2, STAGE_BYTES = A_BYTES + 2 * HALF_BYTES;
    static constexpr int READ_BYTES = BM * 64 * 2;  // bytes of gate or up that a step of SwiGLU's gradient reads
    static constexpr int BOX_BYTES = 16 * 64 * 2, SMEM = STAGES * STAGE_BYTES + 8 * BOXES * BOX_BYTES + 1024;
    static_assert(HD == 64 || HD == 128, "a head is one box or two");
    static_assert(BANDS == 1 || !(GRADIENT || ROPE), "these write one band");
    static_assert(2 * READ_BYTES <= STAGE_BYTES, "gate and up are read through a buffer");
};

/* For RoPE's epilogue. Row t of each T rows is at position t, minus starts (rows) unless that is NULL. */
struct MatmulRope {
    const float* table;     // (positions, HD) of rope.cuh
    const int32_t* starts;  // see attention.h
    int T, columns;         // columns: of q and k, which are rotated, in front of v
};

struct MatmulTilesArgs {
    uint32_t rows, columns;  // tiles: rows counts a cluster's tiles as one
    uint32_t group;          // tiles of rows in a group
    int steps;               // of BK
    int F;                   // distance from gate to up, for the epilogues of SwiGLU
    bool writes_act;         // whether they write act
    MatmulRope rope;
    floatX* sums;           // out, for lanes that write without boxes
    uint32_t pieces, each;  // of all matrices, of one
    const floatX* added;    // NULL, or (matrices, M, M): out = factors.product * sums + factors.added * added
    SumFactors factors;
    CUtensorMap a, b;      // the factors
    CUtensorMap out, act;  // the outputs: sums, or what the epilogue makes of them; act of SwiGLU
    CUtensorMap gate_up;   // what SwiGLU's gradient reads
};

/* The place of a cluster's piece of work. */
struct MatmulPlace {
    int row, column;  // tiles
    int matrix = 0;
    bool mirrored = false;  // the tile's transpose is nobody's piece
    __device__ __forceinline__ MatmulPlace(const MatmulTilesArgs& s, uint32_t piece, int rank, int cluster = CLUSTER_BLOCKS) {
        const uint32_t in_group = s.group * s.columns, first = piece / in_group * s.group, rest = piece % in_group;
        const uint32_t rows = min(s.group, s.rows - first);
        row = (int)(first + rest % rows) * cluster + rank;
        column = (int)(rest / rows);
    }
    /* The same in the list of a symmetric product: each row of clusters begins at the diagonal. */
    template <typename Tiles>
    static __device__ __forceinline__ MatmulPlace of(const MatmulTilesArgs& s, uint32_t piece, int rank) {
        MatmulPlace place(s, piece, rank, Tiles::CLUSTER);
        if (!Tiles::SYMMETRIC) { return place; }
        uint32_t rest = piece % s.each, first = 0;
        for (; rest >= s.columns - first; first += Tiles::CLUSTER) { rest -= s.columns - first; }
        place.row = (int)first + rank;
        place.column = (int)(first + rest);
        place.matrix = (int)(piece / s.each);
        place.mirrored = rest >= Tiles::CLUSTER;
        return place;
    }
};

/* 16 rows by 64 columns of a warp, rounded: x[4 j .. 4 j + 3] hold columns 16 j .. 16 j + 15, as load_matrix_x4 leaves them. */
struct MatmulBox {
    uint32_t x[16];

    /* Returns the address that this lane gives for columns 16 j .. 16 j + 15 of a swizzled box. */
    static __device__ __forceinline__ uint32_t at(uint32_t box, int j) {
        const int lane = threadIdx.x % 32;
        return box + lane % 16 * 128 + ((2 * j + lane / 16) ^ lane % 8) * 16;
    }
    /* Takes columns 64 q .. 64 q + 63 of sums. */
    template <int N>
    __device__ __forceinline__ void round(const float (&d)[N], int q) {
#pragma unroll
        for (int i = 0; i < 16; i++) { x[i] = pack2(d[32 * q + 2 * i], d[32 * q + 2 * i + 1]); }
    }
    __device__ __forceinline__ void load(uint32_t box) {
#pragma unroll
        for (int j = 0; j < 4; j++) { load_matrix_x4(x + 4 * j, at(box, j)); }
    }
    __device__ __forceinline__ void store(uint32_t box, int j) const {
        store_matrix_x4(at(box, j), x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]);
    }
    /* Writes to rows `width` apart from registers: 4 bytes a lane, so 16 of each of 8 rows at a time. */
    __device__ __forceinline__ void write(floatX* to, size_t width) const {
        to += threadIdx.x % 32 / 4 * width + threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < 16; i++) { *(uint32_t*)(to + i % 2 * 8 * width + i / 2 * 8) = x[i]; }
    }
    /* The two elements of x[i], and back. */
    __device__ __forceinline__ Vec<floatX, 2> pair(int i) const { return unpack(Held<floatX, 2>{x[i]}); }
    __device__ __forceinline__ void set(int i, const Vec<floatX, 2>& v) { x[i] = hold(v).bits; }
};

/* The angles of a warp's 16 rows: cosine[i] and sine[i] turn x[i] of a head's first box and its partner half a head on. */
template <int HD>
struct MatmulAngles {
    Vec<float, 2> cosine[HD / 8], sine[HD / 8];

    __device__ __forceinline__ void load(const MatmulRope& rope, int row) {
        const int lane = threadIdx.x % 32;
        const float* tables[2];  // table rows for rows lane / 4 and lane / 4 + 8
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int n = row + lane / 4 + i * 8, position = n % rope.T - (rope.starts ? rope.starts[n] : 0);
            tables[i] = rope.table + (size_t)position * HD + lane % 4 * 2;
        }
#pragma unroll
        for (int i = 0; i < HD / 8; i++) {
            cosine[i] = load_vec<2>(tables[i % 2] + i / 2 * 8);
            sine[i] = load_vec<2>(tables[i % 2] + i / 2 * 8 + HD / 2);
        }
    }
    __device__ __forceinline__ void turn(MatmulBox (&head)[HD / 64]) const {
#pragma unroll
        for (int i = 0; i < HD / 8; i++) {
            MatmulBox &first = head[0], &second = head[HD / 64 - 1];
            const int behind = (i + HD / 8) % 16;
            Vec<floatX, 2> a = first.pair(i), b = second.pair(behind);
            rope_vectors(a, b, cosine[i], sine[i]);
            first.set(i, a);
            second.set(behind, b);
        }
    }
};

/* The boxes in shared memory through which a warp writes. */
template <typename Tiles>
struct MatmulBoxes {
    const char* memory;
    uint32_t boxes;
    int turn = 0;
    __device__ __forceinline__ explicit MatmulBoxes(const char* p) : memory(p), boxes(shared_address(p)) {}
    /* Writes a box to rows row .. row + 15, columns 64 block .. 64 block + 63. */
    __device__ __forceinline__ void write(const MatmulBox& box, const CUtensorMap* map, int row, int block, int matrix = 0) {
        const uint32_t at = boxes + turn * Tiles::BOX_BYTES;
        const bool leader = threadIdx.x % 32 == 0;
        if (leader) { store_wait<Tiles::BOXES - 1>(); }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 4; j++) { box.store(at, j); }
        fence_async_readers();
        __syncwarp();
        if (leader) {
            store_box_4d(map, at, 0, row, block, matrix);
            store_commit();
        }
        turn = turn + 1 == Tiles::BOXES ? 0 : turn + 1;
    }
    /* Writes the transpose of a box: 64 rows of 16, `width` apart. */
    __device__ __forceinline__ void write_transposed(const MatmulBox& box, floatX* to, size_t width) {
        const int at = turn * Tiles::BOX_BYTES, lane = threadIdx.x % 32;
        const auto half = [&](int row, int i) { return at + row * 32 + (i ^ row / 4 % 2) * 16; };  // of a row
        if (lane == 0) { store_wait<Tiles::BOXES - 1>(); }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint32_t x[4] = {box.x[4 * j], box.x[4 * j + 1], box.x[4 * j + 2], box.x[4 * j + 3]};
            store_matrix_x4_transposed(boxes + half(16 * j + lane / 16 * 8 + lane % 8, lane / 8 % 2), x);
        }
        __syncwarp();
#pragma unroll
        for (int row = lane / 2; row < 64; row += 16) {
            *(uint4*)(to + row * width + lane % 2 * 8) = *(const uint4*)(memory + half(row, lane % 2));
        }
        __syncwarp();
    }
};

/* Whose turn it is to multiply, of two consumers that take tiles in turns. The first one begins. */
struct MatmulTurn {
    uint32_t barriers, phase;
    int consumer;
    __device__ __forceinline__ MatmulTurn(uint64_t* shared, int consumer_)
        : barriers(shared_address(shared)), phase(consumer_ ^ 1), consumer(consumer_) {}
    static __device__ __forceinline__ void init(uint64_t* shared) {
        for (int i = 0; i < 2; i++) { barrier_init(shared_address(shared + i), 4); }
    }
    __device__ __forceinline__ void wait() const { barrier_wait(barriers + consumer * 8, phase); }
    __device__ __forceinline__ void pass() {
        ring_release(barriers + (consumer ^ 1) * 8);
        phase ^= 1;
    }
};

/* Write a warp's 16 rows from row `row` on, of the tile of column `column`. d: this lane's sums */
template <typename Tiles>
__device__ __forceinline__ void matmul_write_sums(MatmulBoxes<Tiles>& boxes, const MatmulTilesArgs& s,
                                                  const float (&d)[Tiles::BN / 2], int row, int column) {
#pragma unroll
    for (int q = 0; q < Tiles::BN / 64; q++) {
        MatmulBox box;
        box.round(d, q);
        const int block = column * (Tiles::BN / 64) + q;
        if (Tiles::BOXED) { boxes.write(box, &s.out, row, block); }
        if (!Tiles::BOXED) { box.write(s.sums + row * (size_t)(s.columns * Tiles::BN) + block * 64, s.columns * Tiles::BN); }
    }
}

/* Write a tile of a symmetric result, and its transpose unless another piece has it. */
template <typename Tiles>
__device__ __forceinline__ void matmul_write_symmetric(MatmulBoxes<Tiles>& boxes, const MatmulTilesArgs& s,
                                                       float (&d)[Tiles::BN / 2], int row, const MatmulPlace& place) {
    const size_t M = (size_t)s.columns * Tiles::BN, matrix = place.matrix * M * M;
#pragma unroll
    for (int q = 0; q < Tiles::BN / 64; q++) {
        const int block = place.column * (Tiles::BN / 64) + q, lane = threadIdx.x % 32;
        MatmulBox box;
        if (s.added) {
            const floatX* added = s.added + matrix + (size_t)(row + lane / 4) * M + block * 64 + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const Vec<floatX, 2> v = load_vec<2>(added + i % 2 * 8 * M + i / 2 * 8);
                float* sums = d + 32 * q + 2 * i;
                sums[0] = __fmaf_rn(s.factors.product, sums[0], __fmul_rn(s.factors.added, to_float(v.v[0])));
                sums[1] = __fmaf_rn(s.factors.product, sums[1], __fmul_rn(s.factors.added, to_float(v.v[1])));
            }
        }
        box.round(d, q);
        boxes.write(box, &s.out, row, block, place.matrix);
        if (place.mirrored) { boxes.write_transposed(box, s.sums + matrix + (size_t)block * 64 * M + row, M); }
    }
}

/* The first half of the columns is gate, the second one up. */
template <typename Tiles>
__device__ __forceinline__ void matmul_write_swiglu(MatmulBoxes<Tiles>& boxes, const MatmulTilesArgs& s,
                                                    const float (&d)[Tiles::BN / 2], int row, int column) {
    constexpr int BLOCKS = Tiles::BN / 128;
#pragma unroll
    for (int q = 0; q < BLOCKS; q++) {
        const int block = column * BLOCKS + q;
        MatmulBox gate, up;
        gate.round(d, q);
        up.round(d, q + BLOCKS);
        boxes.write(gate, &s.out, row, block);
        boxes.write(up, &s.out, row, s.F / 64 + block);
        if (!s.writes_act) { continue; }
#pragma unroll
        for (int i = 0; i < 16; i++) { gate.set(i, swiglu_vector(gate.pair(i), up.pair(i))); }
        boxes.write(gate, &s.act, row, block);
    }
}

template <typename Tiles>
__device__ __forceinline__ void matmul_write_rope(MatmulBoxes<Tiles>& boxes, const MatmulTilesArgs& s,
                                                  const float (&d)[Tiles::BN / 2], int row, int column,
                                                  const MatmulAngles<Tiles::HD>& angles) {
    constexpr int HEAD_BOXES = Tiles::HD / 64;
#pragma unroll
    for (int q = 0; q < Tiles::BN / 64; q += HEAD_BOXES) {
        const int block = column * (Tiles::BN / 64) + q;
        MatmulBox head[HEAD_BOXES];
#pragma unroll
        for (int i = 0; i < HEAD_BOXES; i++) { head[i].round(d, q + i); }
        if (block * 64 < s.rope.columns) { angles.turn(head); }
#pragma unroll
        for (int i = 0; i < HEAD_BOXES; i++) { boxes.write(head[i], &s.out, row, block + i); }
    }
}

/* Overwrites gate and up (16 x 64 each) at their places in shared memory with their gradients, and d, the gradient of the
 * output, with the output. */
__device__ __forceinline__ void matmul_swiglu_gradient(MatmulBox& d, uint32_t gate_smem, uint32_t up_smem) {
    MatmulBox gate, up;
    gate.load(gate_smem);
    up.load(up_smem);
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const SwigluGradient<2> g = swiglu_gradient(gate.pair(i), up.pair(i), d.pair(i));
        gate.set(i, g.dgate);
        up.set(i, g.dup);
        d.set(i, g.y);
        if (i % 4 == 3) {
            gate.store(gate_smem, i / 4);
            up.store(up_smem, i / 4);
        }
    }
}

/* Gate and up come through the ring, 64 columns of each a step. Their gradients are written from where they lay. */
template <typename Tiles>
__device__ __forceinline__ void matmul_write_swiglu_gradient(MatmulBoxes<Tiles>& boxes, const MatmulTilesArgs& s,
                                                             const float (&d)[Tiles::BN / 2], int row, int column,
                                                             Ring<Tiles::STAGES>& ring, uint32_t stages) {
    const bool leader = threadIdx.x % 32 == 0;
    uint32_t held;
#pragma unroll
    for (int q = 0; q < Tiles::BN / 64; q++) {
        const int block = column * (Tiles::BN / 64) + q;
        const uint32_t gate_smem = stages + ring.stage * Tiles::STAGE_BYTES + row % Tiles::BM * 128;
        const uint32_t up_smem = gate_smem + Tiles::READ_BYTES;
        MatmulBox box;
        ring.wait_full();
        box.round(d, q);
        matmul_swiglu_gradient(box, gate_smem, up_smem);
        fence_async_readers();
        if (q > 0) {  // the previous gradients have left their buffer
            if (leader) { store_wait<0>(); }
            ring_release_cluster(held);
        }
        __syncwarp();
        if (leader) {
            store_box_4d(&s.out, gate_smem, 0, row, block, 0);
            store_box_4d(&s.out, up_smem, 0, row, s.F / 64 + block, 0);
            store_commit();
        }
        if (s.writes_act) { boxes.write(box, &s.act, row, block); }
        held = ring.empty();
        ring.advance();
    }
    if (leader) { store_wait<0>(); }
    ring_release_cluster(held);
}

/* Runs in the producer's thread: copies the factors that the consumers of this block's tiles read into the ring. */
template <typename Tiles>
__device__ __forceinline__ void matmul_produce(Ring<Tiles::STAGES>& ring, uint32_t stages, const MatmulTilesArgs& s, int rank) {
    constexpr int BN = Tiles::BN;
    for (uint32_t piece = blockIdx.x / Tiles::CLUSTER; piece < s.pieces; piece += gridDim.x / Tiles::CLUSTER) {
        const MatmulPlace place = MatmulPlace::of<Tiles>(s, piece, rank);
        const int row = place.row * Tiles::BM;
#pragma unroll 1
        for (int k = 0; k < s.steps; k++) {
            const uint32_t a = stages + ring.stage * Tiles::STAGE_BYTES;
            ring.begin_fill(Tiles::STAGE_BYTES);
            copy_box_4d(a, &s.a, 0, Tiles::A_COLUMNS ? k * Tiles::BK : row, Tiles::A_COLUMNS ? row / 64 : k, place.matrix,
                        ring.full());
#pragma unroll
            for (int i = 0; i < 2 / Tiles::CLUSTER; i++) {  // the emulated card has clusters of one block
                const int half = rank + i;
                const int n = Tiles::SWIGLU ? half * s.F + place.column * (BN / 2) : place.column * BN + half * (BN / 2);
                const int b_row = Tiles::B_COLUMNS ? k * Tiles::BK : n, b_block = Tiles::B_COLUMNS ? n / 64 : k;
                const uint32_t b = a + Tiles::A_BYTES + half * Tiles::HALF_BYTES;
                copy_box_4d_to((1 << Tiles::CLUSTER) - 1, b, &s.b, 0, b_row, b_block, place.matrix, ring.full());
            }
            ring.advance();
        }
#pragma unroll 1
        for (int q = 0; Tiles::GRADIENT && q < BN / 64; q++) {
            const uint32_t gate = stages + ring.stage * Tiles::STAGE_BYTES;
            const int block = place.column * (BN / 64) + q;
            ring.begin_fill(2 * Tiles::READ_BYTES);
            copy_box_4d(gate, &s.gate_up, 0, row, block, 0, ring.full());
            copy_box_4d(gate + Tiles::READ_BYTES, &s.gate_up, 0, row, s.F / 64 + block, 0, ring.full());
            ring.advance();
        }
    }
}

template <typename Tiles>
__global__ void BLOCKS_OF_CLUSTER(Tiles::CLUSTER) __launch_bounds__(Tiles::THREADS, 1)
    matmul_tiles_kernel(const __grid_constant__ MatmulTilesArgs s) {
#if PTX_HAS_SM90A
    constexpr int BM = Tiles::BM, BN = Tiles::BN, TURNS = Tiles::TURNS, BANDS = Tiles::BANDS;
    extern __shared__ __align__(128) char smem[];
    __shared__ uint64_t barriers[2 * Tiles::STAGES], turns[2];
    // layout: A, first half of B, second half of B of each of STAGES; boxes of each consumer warp
    const char* boxes_smem = wgmma_tiles(smem) + Tiles::STAGES * Tiles::STAGE_BYTES;
    const uint32_t stages = shared_address(wgmma_tiles(smem));
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), rank = blockIdx.x % Tiles::CLUSTER;
    Ring<Tiles::STAGES> ring(barriers);
    if (threadIdx.x == 0) {
        ring.init(8 / TURNS * Tiles::CLUSTER);  // warps that read a buffer
        MatmulTurn::init(turns);
        barrier_init_done();
    }
    cluster_sync();
    if (warpgroup == 0) {
        registers_lower<Tiles::PRODUCER>();
        if (threadIdx.x == 0) { matmul_produce<Tiles>(ring, stages, s, rank); }
    } else {
        registers_raise<Tiles::CONSUMER>();
        const int consumer = warpgroup - 1, warp = threadIdx.x / 32 % 4;
        const int turn = TURNS == 1 ? 0 : consumer, first_row = TURNS == 1 ? consumer * 64 : 0;  // first_row: of a tile
        const uint32_t clusters = gridDim.x / Tiles::CLUSTER;
        MatmulBoxes<Tiles> boxes(boxes_smem + (consumer * 4 + warp) * Tiles::BOXES * Tiles::BOX_BYTES);
        MatmulTurn mine(turns, turn);
        float acc[BANDS][BN / 2];
        if (turn > 0) { ring.skip(s.steps); }
        for (uint32_t piece = blockIdx.x / Tiles::CLUSTER + turn * clusters; piece < s.pieces; piece += TURNS * clusters) {
            const MatmulPlace place = MatmulPlace::of<Tiles>(s, piece, rank);
            uint32_t held;                           // the `empty` barrier of the buffer that pending products read
            const auto multiply = [&](bool first) {  // first: acc is not read, so its registers are free between tiles
                const uint32_t stage = matrix_address(stages) + ring.stage * Tiles::STAGE_BYTES;
                const uint32_t a_smem = stage + first_row * 128, b_smem = stage + Tiles::A_BYTES;
                const uint32_t a = Tiles::A_COLUMNS ? matrix_columns(a_smem, Tiles::BK * 128) : matrix_rows(a_smem);
                const uint32_t b = Tiles::B_COLUMNS ? matrix_columns(b_smem, Tiles::BK * 128) : matrix_rows(b_smem);
                if (Tiles::STAGES == 1 && !first) { wgmma_wait<0>(), ring_release_cluster(held, Tiles::CLUSTER); }
                ring.wait_full();
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < Tiles::BK / 16; i++) {
#pragma unroll
                    for (int band = 0; band < BANDS; band++) {
                        wgmma_shared<BN, Tiles::B_COLUMNS, Tiles::A_COLUMNS>(
                            acc[band], a + band * (64 * 128 >> 4) + i * (Tiles::A_COLUMNS ? 128 : 2),
                            b + i * (Tiles::B_COLUMNS ? 128 : 2), !first || i > 0);
                    }
                }
                wgmma_commit();
                wgmma_wait<1>();
                if (!first && Tiles::STAGES > 1) { ring_release_cluster(held, Tiles::CLUSTER); }
                held = ring.empty();
                ring.advance();
            };
            if constexpr (TURNS > 1) { mine.wait(); }
            multiply(true);
#pragma unroll 1
            for (int k = 1; k < s.steps; k++) { multiply(false); }
            if constexpr (TURNS > 1) {
                mine.pass();
                ring.skip(s.steps);
            }
            const int row = place.row * BM + first_row + warp * 16;
            MatmulAngles<Tiles::HD> angles;
            if (Tiles::ROPE && place.column * BN < s.rope.columns) { angles.load(s.rope, row); }
            wgmma_wait<0>();
#pragma unroll
            for (int band = 0; band < BANDS; band++) { wgmma_hold(acc[band]); }
            ring_release_cluster(held, Tiles::CLUSTER);

            if constexpr (Tiles::ROPE) {
                matmul_write_rope(boxes, s, acc[0], row, place.column, angles);
            } else if constexpr (Tiles::GRADIENT) {
                matmul_write_swiglu_gradient(boxes, s, acc[0], row, place.column, ring, stages);
            } else {
#pragma unroll
                for (int band = 0; band < BANDS; band++) {
                    if constexpr (Tiles::SWIGLU) {
                        matmul_write_swiglu(boxes, s, acc[band], row + band * 64, place.column);
                    } else if constexpr (Tiles::SYMMETRIC) {
                        matmul_write_symmetric(boxes, s, acc[band], row + band * 64, place);
                    } else {
                        matmul_write_sums(boxes, s, acc[band], row + band * 64, place.column);
                    }
                }
            }
        }
        if (threadIdx.x % 32 == 0) { store_wait<0>(); }
    }
    __syncwarp();
    cluster_sync();  // nobody copies to a block that has ended, or arrives there
#else
    __trap();
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// launchers

// Tiles of rows in a group, each as high as a cluster. An H100 or an H200 runs 66 clusters at a time, which compute 8 tiles of
// rows in about 8 columns. With 256 columns a tile, that is nearly a square, which needs the fewest rows of both factors.
// Clusters in one row of tiles copy the same part of A, clusters in one column the same part of B. One of them reads it from
// memory, and the L2 cache gives it to the others.
// Measured in dev/results/nvidia-h100.md.
constexpr size_t MATMUL_GROUP = 8;

/* Returns how many clusters of this kernel run at a time, one block a multiprocessor. Where a part of the card has an odd
 * number of multiprocessors, they are less than half of all. A list for more would wait for the last cluster twice as long. */
template <typename Tiles>
static inline size_t matmul_tiles_clusters() {
    static const size_t found = [] {
        const void* kernel = (const void*)matmul_tiles_kernel<Tiles>;
        const size_t most = (size_t)device_attribute(cudaDevAttrMultiProcessorCount) / Tiles::CLUSTER;
        cudaLaunchConfig_t launch = {};
        int resident = 0;
        launch.gridDim = dim3((unsigned)(most * Tiles::CLUSTER)), launch.blockDim = dim3(Tiles::THREADS);
        launch.dynamicSmemBytes = Tiles::SMEM;
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tiles::SMEM));
        CUDA_CHECK(cudaOccupancyMaxActiveClusters(&resident, kernel, &launch));
        return size_min(most, size_max(1, (size_t)resident));
    }();
    return found;
}

template <typename Tiles>
static inline void matmul_tiles_start(const MatmulTilesArgs& s, cudaStream_t stream) {
    const size_t clusters = matmul_tiles_clusters<Tiles>();
    const unsigned blocks = (unsigned)(size_min(Tiles::LIST ? clusters : SIZE_MAX, s.pieces) * Tiles::CLUSTER);
    auto* kernel = matmul_tiles_kernel<Tiles>;
    kernel<<<blocks, Tiles::THREADS, Tiles::SMEM, stream>>>(s);
    CUDA_CHECK_LAUNCH("matmul_tiles_kernel");
}

/* Computes M x N sums over K, and what the epilogue makes of them, from the packed matrices a (M, K) and b (N, K), or (K, N)
 * if B_COLUMNS. Writes out; with SwiGLU and its gradient also act, unless act is NULL. The gradient reads gate_up. */
template <typename Tiles>
static inline void matmul_tiles_launch(floatX* out, const floatX* a, const floatX* b, ProductShape p, cudaStream_t stream,
                                       floatX* act = NULL, const floatX* gate_up = NULL,
                                       const MatmulRope& rope = MatmulRope()) {
    const size_t M = p.M, N = p.N, K = p.K;
    constexpr int BM = Tiles::BM, BN = Tiles::BN, BK = Tiles::BK;
    const size_t cluster_rows = (size_t)BM * Tiles::CLUSTER, F = Tiles::GRADIENT ? N : N / 2,
                 width = Tiles::GRADIENT ? 2 * N : N;
    assert(M > 0 && N > 0 && K > 0 && M % cluster_rows == 0 && N % BN == 0 && K % BK == 0);
    MatmulTilesArgs s;
    s.a = tensor_map(a, 1, (int)M, K, K, BM, BK);
    s.b = Tiles::B_COLUMNS ? tensor_map(b, 1, (int)K, N, N, BK, BN / 2) : tensor_map(b, 1, (int)N, K, K, BN / 2, BK);
    s.out = tensor_map(out, 1, (int)M, width, width, 16, 64);
    s.act = act ? tensor_map(act, 1, (int)M, F, F, 16, 64) : s.out;
    s.gate_up = gate_up ? tensor_map(gate_up, 1, (int)M, width, width, BM, 64) : s.out;
    s.rows = (uint32_t)(M / cluster_rows), s.columns = (uint32_t)(N / BN), s.steps = (int)(K / BK);
    s.group = Tiles::LIST ? (uint32_t)size_min(s.rows, MATMUL_GROUP) : s.rows;
    s.F = (int)F, s.writes_act = act != NULL, s.rope = rope, s.sums = out, s.pieces = s.each = s.rows * s.columns;
    matmul_tiles_start<Tiles>(s, stream);
}

template <int COLUMNS>
static inline void matmul_symmetric_as(floatX* out, const floatX* x, const floatX* added, SymmetricShape p, SumFactors f,
                                       cudaStream_t stream) {
    typedef MatmulTiles<SPLIT_TILES, COLUMNS, EPILOGUE_SYMMETRIC> Tiles;
    static_assert(Tiles::BM == Tiles::BN, "a tile's transpose is a tile");
    const size_t cluster_rows = (size_t)Tiles::BM * Tiles::CLUSTER, rows = COLUMNS ? p.K : p.M, cols = COLUMNS ? p.M : p.K;
    const auto map = [&](int height) {  // boxes of `height` rows of S, or columns
        return tensor_map(x, (size_t)p.count, (int)rows, cols, cols, COLUMNS ? Tiles::BK : height,
                          COLUMNS ? height : Tiles::BK);
    };
    assert(p.count > 0 && p.M % cluster_rows == 0 && p.K % Tiles::BK == 0);
    MatmulTilesArgs s = {};
    s.a = map(Tiles::BM), s.b = map(Tiles::BN / 2);
    s.out = s.act = s.gate_up = tensor_map(out, (size_t)p.count, (int)p.M, p.M, p.M, 16, 64);
    s.rows = (uint32_t)(p.M / cluster_rows), s.columns = (uint32_t)(p.M / Tiles::BN), s.steps = (int)(p.K / Tiles::BK);
    s.group = s.rows, s.sums = out, s.added = added, s.factors = f;
    s.each = s.rows * s.columns - Tiles::CLUSTER * s.rows * (s.rows - 1) / 2, s.pieces = s.each * (uint32_t)p.count;
    matmul_tiles_start<Tiles>(s, stream);
}

/* Writes out = S of SymmetricShape, or f.product S + f.added `added` unless that is NULL: count symmetric matrices (M, M). M is
 * a multiple of 128 CLUSTER_BLOCKS, K of 64. */
static inline void matmul_symmetric_cuda(floatX* out, const floatX* x, const floatX* added, SymmetricShape p, SumFactors f,
                                         cudaStream_t stream) {
    (p.columns ? matmul_symmetric_as<1> : matmul_symmetric_as<0>)(out, x, added, p, f, stream);
}

/* Writes gate_up (M, N) = x (M, K) w^T, w: (N, K), and its SwiGLU act (M, N / 2) unless act is NULL. */
template <MatmulSplit SPLIT>
static inline void matmul_swiglu_split_cuda(floatX* gate_up, floatX* act, const floatX* x, const floatX* w, ProductShape p,
                                            cudaStream_t stream) {
    matmul_tiles_launch<MatmulTiles<SPLIT, 0, EPILOGUE_SWIGLU>>(gate_up, x, w, p, stream, act);
}

/* Does so with the split that kernels.cuh chooses, which changes no bit. */
static inline void matmul_swiglu_cuda(floatX* gate_up, floatX* act, const floatX* x, const floatX* w, ProductShape p,
                                      cudaStream_t stream) {
    KernelSizes s = {};
    s.rows = p.M, s.width = p.N / 2, s.sum = p.K;
    const bool turns = kernel_row(CHOOSE_GATE_UP, s)->kernel == PRODUCT_JOINED_TURNS;
    (turns ? matmul_swiglu_split_cuda<SPLIT_TILES> : matmul_swiglu_split_cuda<SPLIT_ROWS>)(gate_up, act, x, w, p, stream);
}

/* Writes dgate_up (M, 2 N), which may be gate_up, from gate_up (M, 2 N) and dact = dout (M, K) w, w: (K, N). Writes act (M, N)
 * again unless it is NULL. */
static inline void matmul_swiglu_backward_cuda(floatX* dgate_up, floatX* act, const floatX* dout, const floatX* w,
                                               const floatX* gate_up, ProductShape p, cudaStream_t stream) {
    matmul_tiles_launch<MatmulTiles<SPLIT_ROWS, 1, EPILOGUE_SWIGLU_BACKWARD>>(dgate_up, dout, w, p, stream, act, gate_up);
}

/* Writes qkv (B T, QKV) = x (B T, C) w^T, w: (QKV, C), with q and k rotated as by rope_forward_cuda() from position 0 on. */
static inline void matmul_rope_cuda(floatX* qkv, const floatX* x, const floatX* w, const int32_t* starts, const float* cos_sin,
                                    AttentionShape s, size_t C, cudaStream_t stream) {
    const size_t N = (size_t)s.B * s.T, QKV = (size_t)(s.NH + 2 * s.NKV) * s.HD;
    const MatmulRope rope = {cos_sin, starts, s.T, (s.NH + s.NKV) * s.HD};
    auto* launch = s.HD == 64 ? matmul_tiles_launch<MatmulTiles<SPLIT_ROWS, 0, EPILOGUE_ROPE, 64>>
                              : matmul_tiles_launch<MatmulTiles<SPLIT_ROWS, 0, EPILOGUE_ROPE, 128>>;
    launch(qkv, x, w, {N, QKV, C}, stream, NULL, NULL, rope);
}

#else  // there are none in FP32

static inline void matmul_swiglu_cuda(floatX*, floatX*, const floatX*, const floatX*, ProductShape, cudaStream_t) {}
static inline void matmul_swiglu_backward_cuda(floatX*, floatX*, const floatX*, const floatX*, const floatX*, ProductShape,
                                               cudaStream_t) {}
static inline void matmul_rope_cuda(floatX*, const floatX*, const floatX*, const int32_t*, const float*, AttentionShape, size_t,
                                    cudaStream_t) {}
static inline void matmul_symmetric_cuda(floatX*, const floatX*, const floatX*, SymmetricShape, SumFactors, cudaStream_t) {}

#endif  // PRECISION_FP32
#endif
