/* rope.cuh -- tests of RoPE, also by positions in documents. */
#ifndef TEST_KERNELS_ROPE_CUH
#define TEST_KERNELS_ROPE_CUH

#include "llmc/rope.cuh"
#include "llmc/rope.h"
#include "dev/test/oracles.h"
#include "kernel_test.cuh"

/* Returns the table (positions, HD) of a model without scaling. */
static Floats table_of_rope(int positions, int HD) {
    ModelConfig c;
    memset(&c, 0, sizeof c);
    c.head_dim = HD;
    c.rope_theta = 500000;
    Floats table((size_t)positions * HD);
    rope_table(table.data(), positions, &c);
    return table;
}

/* Uploads the starts of documents (N); NULL stays NULL. */
static const int32_t* upload_starts(const int32_t* starts, size_t N) {
    return starts ? upload(std::vector<int32_t>(starts, starts + N)) : NULL;
}

static void rope_turns_q_and_k_and_leaves_v() {
    // B, T, first_pos, NH, NKV, HD, longest document (0: none)
    const int shapes[][7] = {{2, 17, 0, 6, 2, 10, 0},   {1, 33, 5, 4, 4, 12, 0},    {3, 100, 0, 12, 4, 64, 0},
                             {1, 50, 7, 32, 8, 128, 0}, {2, 9, 0, 3, 1, 16, 0},     {1, 20, 3, 5, 1, 96, 0},
                             {1, 5, 0, 2, 1, 256, 0},   {1, 1, 999, 9, 3, 64, 0},   {2, 300, 0, 1, 1, 2, 0},
                             {2, 17, 0, 6, 2, 10, 5},   {3, 100, 0, 12, 4, 64, 40}, {2, 50, 7, 32, 8, 128, 20},
                             {2, 300, 0, 1, 1, 2, 1}};
    for (auto& s : shapes) {
        const int B = s[0], T = s[1], first = s[2], NH = s[3], NKV = s[4], HD = s[5];
        const size_t N = (size_t)B * T, width = (size_t)(NH + 2 * NKV) * HD, pitch = padded(width);
        char what[96];
        snprintf(what, sizeof what, "rope B=%d T=%d NH=%d NKV=%d HD=%d documents=%d", B, T, NH, NKV, HD, s[6]);
        int32_t* starts = random_starts(B, T, s[6]);
        const int32_t* d_starts = upload_starts(starts, N);
        const Floats table = table_of_rope(first + T, HD);
        const Floats qkv = random_values<floatX>(N * width, 1);
        const AttentionShape shape = {B, T, NH, NKV, HD};
        float* d_table = upload(table);
        for (int backward = 0; backward < 2; backward++) {
            Floats want = qkv;
            (backward ? rope_backward : rope_forward)(want.data(), starts, table.data(), first, shape);
            const Floats got = twice(what, [&] {
                floatX* d = upload_rows<floatX>(qkv, N, width, pitch);
                (backward ? rope_backward_cuda : rope_forward_cuda)(d, d_starts, d_table, first, shape, pitch, 0);
                return download_rows(d, N, width, pitch);
            });
            compare(what, got, want);
            bool same = true;
            for (size_t n = 0; n < N; n++) {
                for (size_t i = (size_t)(NH + NKV) * HD; i < width; i++) {
                    same = same && got[n * width + i] == qkv[n * width + i];
                }
            }
            CHECK(same, "%s: v was changed", what);
        }
        free(starts);
        device_free_all();
    }
}

#endif
