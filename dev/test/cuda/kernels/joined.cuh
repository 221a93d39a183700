/* joined.cuh -- tests of our own products, which compute SwiGLU and RoPE in their epilogues. */
#ifndef TEST_KERNELS_JOINED_CUH
#define TEST_KERNELS_JOINED_CUH

#include <numeric>

#include "llmc/matmul_sm90.cuh"
#include "llmc/swiglu.cuh"
#include "matmul.cuh"
#include "rope.cuh"

#ifndef PRECISION_FP32  // FP32 has no such products
/* Counts in `taken` (rows, columns) how often each tile is taken. */
__global__ static void place_kernel(int* taken, MatmulTilesArgs s) {
    const uint32_t piece = blockIdx.x * blockDim.x + threadIdx.x;
    if (piece >= s.rows * s.columns) { return; }
    for (int rank = 0; rank < CLUSTER_BLOCKS; rank++) {
        const MatmulPlace place(s, piece, rank);
        atomicAdd(&taken[(uint32_t)place.row * s.columns + (uint32_t)place.column], 1);
    }
}

/* A list has a part for each cluster that is resident: another one would begin when one of these has ended. */
static void tiles_of_a_product_are_taken_once() {
    const char* fewer = getenv("EMULATOR_CLUSTERS");
    const size_t all = (size_t)device_attribute(cudaDevAttrMultiProcessorCount) / CLUSTER_BLOCKS;
    const size_t found = this_card()->wgmma ? matmul_tiles_clusters<MatmulTiles<SPLIT_ROWS, 0, EPILOGUE_SWIGLU>>() : all;
    CHECK(fewer ? found == (size_t)atoi(fewer) : found > 0 && found <= all, "%zu of %zu clusters", found, all);
    for (uint32_t rows : {1u, 7u, 12u}) {
        for (uint32_t columns : {1u, 5u}) {
            for (uint32_t group = 1; group <= rows; group++) {
                const MatmulTilesArgs s = {rows, columns, group, 0, 0, false};
                const size_t tiles = (size_t)rows * CLUSTER_BLOCKS * columns;
                const int* taken = upload(std::vector<int>(tiles));
                place_kernel<<<1, 64>>>((int*)taken, s);
                CUDA_CHECK_LAUNCH("place_kernel");
                const std::vector<int> got = download(taken, tiles);
                CHECK(std::count(got.begin(), got.end(), 1) == (long)tiles, "%u x %u pieces, groups of %u rows", rows, columns,
                      group);
                device_free_all();
            }
        }
    }
}

/* Returns multiples of 1/16, up to `most` of them, so that sums are exact. */
static Floats sixteenths(size_t n, int most) {
    Floats x = random_values<float>(n, 1);
    for (float& v : x) { v = (float)(int)fminf(fmaxf(v * 8, (float)-most), (float)most) / 16; }
    return x;
}

/* SwiGLU in a product's epilogue gives the bits of a separate product and SwiGLU. The inputs are such that no sum is
 * rounded. */
static void swiglu_joins_its_product() {
    // the first one has a whole group of tiles and a part of another; the third one has more tiles than a card has
    // multiprocessors, so a block has several; the last two have the widths of the 126M model and of Llama-3.2-1B
    const size_t many = emulated ? 1024 : 2560, wide = emulated ? 768 : 1792, widest = emulated ? 256 : 4096;
    const size_t shapes[][3] = {{2304, 64, 256},     {768, 320, 512},   {many, 128, wide},
                                {256, 1024, widest}, {4096, 768, 2048}, {512, 2048, 8192}};
    if (!this_card()->wgmma) { return; }  // no code for this card
    for (auto& s : shapes) {
        const size_t N = s[0], C = s[1], F = s[2];
        if (emulated && C * F > 1 << 19) { continue; }  // takes minutes there
        MatmulContext* ctx = matmul_context();
        char what[64];
        snprintf(what, sizeof what, "N=%zu C=%zu F=%zu", N, C, F);
        const floatX *x = upload_rows<floatX>(sixteenths(N * C, 12), N, C, C),
                     *w = upload_rows<floatX>(sixteenths(2 * F * C, 6), 2 * F, C, C),
                     *down = upload_rows<floatX>(sixteenths(C * F, 6), C, F, F);
        floatX *gate_up = device_alloc<floatX>(N * 2 * F), *act = device_alloc<floatX>(N * F),
               *dact = device_alloc<floatX>(N * F), *want = device_alloc<floatX>(N * 2 * F),
               *want_grad = device_alloc<floatX>(N * 2 * F), *want_act = device_alloc<floatX>(N * F),
               *alone = device_alloc<floatX>(N * 2 * F);
        matmul_forward_cuda(ctx, output(want, 2 * F), operand(x, C), operand(w, C), NULL, {N, (int)C, (int)(2 * F)}, 0);
        swiglu_forward_cuda(want_act, want, {N, (int)F, 2 * F, F}, 0);
        matmul_backward_input_cuda(ctx, output(dact, F), operand(x, C), operand(down, F), {N, (int)F, (int)C}, 0);
        swiglu_backward_cuda(want_grad, NULL, dact, want, {N, (int)F, 2 * F, F}, 0);
        for (const bool turns : {false, true}) {  // the consumers of a block share each tile, or take tiles in turns
            const auto product = turns ? matmul_swiglu_split_cuda<SPLIT_TILES> : matmul_swiglu_split_cuda<SPLIT_ROWS>;
            const char* way = turns ? "in turns" : "together";
            for (floatX* p : {gate_up, alone}) { CUDA_CHECK(cudaMemset(p, 0xff, N * 2 * F * sizeof *p)); }
            CUDA_CHECK(cudaMemset(act, 0xff, N * F * sizeof *act));
            product(gate_up, act, x, w, {N, 2 * F, C}, 0);
            product(alone, NULL, x, w, {N, 2 * F, C}, 0);
            CHECK(same_bytes(gate_up, want, N * 2 * F) && same_bytes(alone, want, N * 2 * F), "%s, %s: gate and up differ",
                  what, way);
            CHECK(same_bytes(act, want_act, N * F), "%s, %s: SwiGLU differs", what, way);
        }
        CUDA_CHECK(cudaMemset(act, 0xff, N * F * sizeof *act));
        matmul_swiglu_backward_cuda(alone, act, x, down, gate_up, {N, F, C}, 0);
        matmul_swiglu_backward_cuda(gate_up, NULL, x, down, gate_up, {N, F, C}, 0);
        CHECK(same_bytes(alone, want_grad, N * 2 * F), "%s: the gradient differs", what);
        CHECK(same_bytes(gate_up, want_grad, N * 2 * F), "%s: in place differs from apart", what);
        CHECK(same_bytes(act, want_act, N * F), "%s: the output that backward repeats differs", what);
        matmul_destroy(ctx);
        device_free_all();
    }
}

/* A half product has the bits of the whole product: by rows and by columns of x, for each matrix of a launch, and with an
 * added matrix, if no sum is rounded. */
static void a_half_has_the_bits_of_the_whole() {
    const size_t unit = 128 * CLUSTER_BLOCKS, count = emulated ? 2 : 12;  // a card's blocks get several tiles each
    if (!this_card()->wgmma) { return; }                                  // no code for this card
    for (const size_t M : {unit, 3 * unit}) {
        for (const size_t K : {64, 192}) {
            const size_t n = M * K, square = M * M;
            const Floats x = random_values<floatX>(count * n, 1), ones = sixteenths(count * n, 6);
            Floats turned(count * n), want(count * square);
            for (size_t i = 0; i < count * n; i++) { turned[i / n * n + i % K * M + i % n / K] = x[i]; }
            for (size_t i = 0; i < count * square; i++) {
                const float *a = &ones[i / square * n + i % square / M * K], *b = &ones[i / square * n + i % M * K];
                want[i] =
                    to_float(from_float<floatX>(0.5f * std::inner_product(a, a + K, b, 0.0f) - 2 * (i % M == i % square / M)));
            }
            const floatX *rows = upload_rows<floatX>(x, count, n, n), *columns = upload_rows<floatX>(turned, count, n, n);
            floatX *whole = device_alloc<floatX>(count * square), *half = device_alloc<floatX>(count * square);
            for (size_t i = 0; i < count; i++) {
                matmul_tiles_launch<MatmulTiles<SPLIT_TILES, 0, EPILOGUE_STORE>>(whole + i * square, rows + i * n, rows + i * n,
                                                                                 {M, M, K}, 0);
            }
            for (const bool by_columns : {false, true}) {
                CUDA_CHECK(cudaMemset(half, 0xff, count * square * sizeof *half));
                matmul_symmetric_cuda(half, by_columns ? columns : rows, NULL, {M, K, (int)count, by_columns}, {}, 0);
                CHECK(same_bytes(half, whole, count * square), "M=%zu K=%zu, by %s: half of it differs", M, K,
                      by_columns ? "columns" : "rows");
            }
            Floats diagonal(count * square);
            for (size_t i = 0; i < count * M; i++) { diagonal[i / M * square + i % M * (M + 1)] = 1; }
            const floatX* added = upload_rows<floatX>(diagonal, count, square, square);
            matmul_symmetric_cuda(half, upload_rows<floatX>(ones, count, n, n), added, {M, K, (int)count, false}, {0.5f, -2.0f},
                                  0);
            CHECK(download_rows(half, count, square, square) == want, "M=%zu K=%zu: a sum with more differs", M, K);
            device_free_all();
        }
    }
}

/* The table's choices for cards that are not here. */
static void a_product_joins_where_it_gains() {
    const Card a100 = {false, true, true, 108, 163 << 10, 40 << 20}, h100 = {true, true, true, 132, 227 << 10, 50 << 20};
    Card h200 = h100;
    h200.l2 = 60 << 20;
    KernelSizes s = {{8, 1024, 32, 8, 64}, false, false, 8192, 4096, 2048};
    const auto is = [&](KernelChoice choice, const Card& c, ProductKernel kernel) {
        const KernelRow* row = kernel_row(choice, s, &c);
        CHECK(row->kernel == kernel, "%zu x %zu over %zu, %zu MB of L2: %s", s.rows, s.width, s.sum, c.l2 >> 20, row->name);
    };
    is(CHOOSE_GATE_UP, h100, PRODUCT_JOINED), is(CHOOSE_GATE_UP, h200, PRODUCT_JOINED_TURNS);
    is(CHOOSE_GATE_UP, a100, PRODUCT_APART), is(CHOOSE_QKV, a100, PRODUCT_APART), is(CHOOSE_DOWN_DX, a100, PRODUCT_APART);
    is(CHOOSE_QKV, h100, PRODUCT_JOINED), is(CHOOSE_DOWN_DX, h200, PRODUCT_JOINED);
    s.attention.HD = 96, is(CHOOSE_QKV, h100, PRODUCT_APART);
    s.sum = 1024, is(CHOOSE_GATE_UP, h100, PRODUCT_JOINED_TURNS);
    s.sum = 1025, is(CHOOSE_GATE_UP, h200, PRODUCT_APART), is(CHOOSE_DOWN_DX, h200, PRODUCT_APART);
    s.sum = 1024, s.rows = 1024, is(CHOOSE_DOWN_DX, h100, PRODUCT_APART);  // 128 tiles for 132 multiprocessors
    s.rows = 8192, s.apart = true, is(CHOOSE_DOWN_DX, h100, PRODUCT_APART), is(CHOOSE_GATE_UP, h200, PRODUCT_APART);
}

/* RoPE in a product's epilogue gives the bits of a separate product and RoPE. The inputs are such that no sum is rounded. */
static void rope_joins_its_product() {
    // B, T, C, NH, NKV, HD, longest document (0: none). Borders of q, k and v, and of sequences, fall inside of tiles and
    // between tiles. Then come two with more tiles than a card has multiprocessors, so a block has several. The last three have
    // the widths of the 126M model, of Llama-3.2-1B and of Llama-3.1-8B
    const int shapes[][7] = {{1, 256, 64, 2, 1, 64, 0},    {8, 96, 128, 6, 1, 64, 0},     {8, 96, 128, 6, 1, 64, 40},
                             {2, 384, 64, 12, 4, 64, 90},  {1, 256, 320, 2, 1, 128, 0},   {8, 96, 64, 4, 1, 128, 0},
                             {8, 96, 64, 4, 2, 128, 40},   {20, 128, 64, 32, 8, 64, 0},   {5, 512, 64, 16, 4, 128, 0},
                             {4, 1024, 768, 12, 4, 64, 0}, {1, 2048, 2048, 32, 8, 64, 0}, {1, 512, 4096, 32, 8, 128, 0}};
    if (!this_card()->wgmma) { return; }  // no code for this card
    for (auto& v : shapes) {
        const AttentionShape s = {v[0], v[1], v[3], v[4], v[5]};
        const size_t N = (size_t)s.B * s.T, C = (size_t)v[2], QKV = qkv_width(s);
        if (emulated && C * QKV > 1 << 19) { continue; }  // as above
        MatmulContext* ctx = matmul_context();
        char what[96];
        snprintf(what, sizeof what, "B=%d T=%d C=%zu NH=%d NKV=%d HD=%d documents=%d", s.B, s.T, C, s.NH, s.NKV, s.HD, v[6]);
        int32_t* starts = random_starts(s.B, s.T, v[6]);
        const int32_t* d_starts = upload_starts(starts, N);
        const float* d_table = upload(table_of_rope(s.T, s.HD));
        const floatX *x = upload_rows<floatX>(sixteenths(N * C, 12), N, C, C),
                     *w = upload_rows<floatX>(sixteenths(QKV * C, 6), QKV, C, C);
        floatX *qkv = device_alloc<floatX>(N * QKV), *want = device_alloc<floatX>(N * QKV);
        matmul_forward_cuda(ctx, output(want, QKV), operand(x, C), operand(w, C), NULL, {N, (int)C, (int)QKV}, 0);
        rope_forward_cuda(want, d_starts, d_table, 0, s, QKV, 0);
        CUDA_CHECK(cudaMemset(qkv, 0xff, N * QKV * sizeof *qkv));
        matmul_rope_cuda(qkv, x, w, d_starts, d_table, s, C, 0);
        CHECK(same_bytes(qkv, want, N * QKV), "%s: q, k or v differ", what);
        free(starts);
        matmul_destroy(ctx);
        device_free_all();
    }
}
#endif

#endif
