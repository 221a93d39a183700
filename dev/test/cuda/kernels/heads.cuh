/* heads.cuh -- tests how ranks that share rows exchange heads for parts of rows. */
#ifndef TEST_KERNELS_HEADS_CUH
#define TEST_KERNELS_HEADS_CUH

#include "llmc/gpu/sequence.cuh"
#include "dev/test/oracles.h"
#include "rope.cuh"

static void heads_are_packed_and_unpacked() {
    // B, T of a part, NH, NKV (0: attention's output), HD, parts
    const int shapes[][6] = {{1, 17, 4, 2, 64, 2},  {3, 33, 12, 4, 64, 2},   {3, 33, 12, 4, 64, 4}, {1, 50, 32, 8, 128, 8},
                             {3, 9, 32, 8, 128, 4}, {1, 129, 32, 0, 128, 2}, {3, 20, 12, 0, 64, 4}, {2, 7, 4, 2, 12, 2},
                             {2, 5, 2, 2, 10, 2},   {1, 3, 8, 8, 2, 8},      {1, 1, 2, 2, 256, 2},  {3, 4, 6, 3, 6, 1}};
    for (auto& s : shapes) {
        const AttentionShape shape = {s[0], s[1], s[2], s[3], s[4]};
        const int parts = s[5];
        const size_t N = (size_t)s[0] * s[1], width = heads_width(shape), own = width / parts;
        const size_t pitch = row_pitch<floatX>(width), own_pitch = row_pitch<floatX>(own);
        char what[96];
        snprintf(what, sizeof what, "heads B=%d T=%d NH=%d NKV=%d HD=%d parts=%d", s[0], s[1], s[2], s[3], s[4], parts);
        Floats rows = random_values<floatX>(N * width, 1), pieces(N * width);
        heads_pack(pieces.data(), rows.data(), shape, parts, false);
        compare(what,
                twice(what,
                      [&] {
                          floatX *from = upload_rows<floatX>(rows, N, width, pitch),
                                 *to = device_alloc<floatX>(N * parts * own_pitch);
                          heads_pack_cuda(to, from, shape, parts, false, 0);
                          return download_rows(to, N * parts, own, own_pitch);
                      }),
                pieces, 0, 0);
        compare(what,
                twice(what,
                      [&] {
                          floatX *from = upload_rows<floatX>(pieces, N * parts, own, own_pitch),
                                 *to = device_alloc<floatX>(N * pitch);
                          heads_pack_cuda(from, to, shape, parts, true, 0);
                          return download_rows(to, N, width, pitch);
                      }),
                rows, 0, 0);
        device_free_all();
    }
}

/* Does the members' all-to-all on one card: block q of member p of each row becomes block p of member q. */
static void exchange_blocks(const std::vector<floatX*>& to, const std::vector<floatX*>& from, AttentionShape s) {
    const size_t parts = to.size(), block = (size_t)s.T * row_pitch<floatX>(heads_width(s) / parts);
    for (size_t i = 0; i < s.B * parts * parts; i++) {
        const size_t b = i / parts / parts, p = i / parts % parts, q = i % parts;
        CUDA_CHECK(cudaMemcpyAsync(to[q] + (b * parts + p) * block, from[p] + (b * parts + q) * block, block * sizeof(floatX),
                                   cudaMemcpyDeviceToDevice, 0));
    }
}

/* Returns each member's heads (B, T parts, heads / parts) of rows x (B, T parts, all heads). */
static std::vector<floatX*> share_rows(const Floats& x, AttentionShape s, int parts) {
    const size_t width = heads_width(s), part = (size_t)s.T * width, room = (size_t)s.B * s.T * heads_room(width, parts);
    std::vector<floatX*> pieces, heads;
    for (int p = 0; p < parts; p++) {
        Floats rows;
        for (int b = 0; b < s.B; b++) {
            const size_t first = (size_t)(b * parts + p) * part;
            rows.insert(rows.end(), x.begin() + first, x.begin() + first + part);
        }
        pieces.push_back(device_alloc<floatX>(room));
        heads.push_back(device_alloc<floatX>(room));
        floatX* on_device = upload_rows<floatX>(rows, (size_t)s.B * s.T, width, row_pitch<floatX>(width));
        heads_pack_cuda(pieces[p], on_device, s, parts, false, 0);
    }
    exchange_blocks(heads, pieces, s);
    return heads;
}

/* Returns the rows of the members' heads. */
static Floats unshare_rows(const std::vector<floatX*>& heads, AttentionShape s) {
    const int parts = (int)heads.size();
    const size_t width = heads_width(s), part = (size_t)s.T * width, pitch = row_pitch<floatX>(width);
    std::vector<floatX*> pieces;
    for (int p = 0; p < parts; p++) { pieces.push_back(device_alloc<floatX>((size_t)s.B * s.T * heads_room(width, parts))); }
    exchange_blocks(pieces, heads, s);
    Floats x((size_t)s.B * parts * part);
    for (int p = 0; p < parts; p++) {
        floatX* on_device = device_alloc<floatX>((size_t)s.B * s.T * pitch);
        heads_pack_cuda(pieces[p], on_device, s, parts, true, 0);
        const Floats rows = download_rows(on_device, (size_t)s.B * s.T, width, pitch);
        for (int b = 0; b < s.B; b++) {
            std::copy_n(rows.begin() + b * part, part, x.begin() + (size_t)(b * parts + p) * part);
        }
    }
    return x;
}

/* Runs RoPE and attention, forward and backward. */
static void run_attention(floatX* qkv, floatX* out, floatX* dqkv, const floatX* dout, const int32_t* starts, const float* table,
                          AttentionShape s) {
    const size_t pitch = row_pitch<floatX>(heads_width(s)), out_pitch = row_pitch<floatX>((size_t)s.NH * s.HD);
    float* lse = device_alloc<float>((size_t)s.B * s.NH * s.T);
    char* scratch = device_alloc<char>(attention_backward_scratch_cuda(s));
    rope_forward_cuda(qkv, starts, table, 0, s, pitch, 0);
    const AttentionArgs args = attention_args(s, pitch, out_pitch, starts, table);
    attention_forward_cuda(out, lse, qkv, s.B, args, 0);
    attention_backward_cuda(dqkv, scratch, dout, {qkv, out, lse}, s.B, args, 0);
}

static void attention_by_heads_is_that_over_whole_rows() {
    // B, T of a part, NH, NKV, HD, parts, longest document (0: none)
    const int several = sanitized ? 70 : emulated ? 140 : 300;  // tiles of attention
    const int shapes[][7] = {{1, 64, 4, 2, 64, 2, 0},       {2, 33, 12, 4, 64, 4, 0},   {3, 50, 4, 2, 64, 2, 40},
                             {1, several, 8, 2, 128, 2, 0}, {2, 20, 16, 8, 128, 8, 30}, {2, 9, 4, 2, 12, 2, 0},
                             {3, 11, 2, 2, 10, 2, 7}};
    for (auto& c : shapes) {
        if (sanitized && c[2] > 12) { continue; }  // takes a minute
        const int parts = c[5];
        const AttentionShape s = {c[0], c[1], c[2], c[3], c[4]}, heads = heads_shape(s, parts);
        const AttentionShape all = {s.B, s.T * parts, s.NH, s.NKV, s.HD};
        const size_t N = (size_t)s.B * all.T, width = heads_width(s), Q = (size_t)s.NH * s.HD;
        const size_t pitch = row_pitch<floatX>(width), out_pitch = row_pitch<floatX>(Q);
        char what[96];
        snprintf(what, sizeof what, "shared B=%d T=%d NH=%d NKV=%d HD=%d parts=%d", s.B, all.T, s.NH, s.NKV, s.HD, parts);
        int32_t* starts = random_starts(s.B, all.T, c[6]);
        const int32_t* d_starts = upload_starts(starts, N);
        const float* d_table = upload(table_of_rope(all.T, s.HD));
        const Floats qkv = random_values<floatX>(N * width, 1), dout = random_values<floatX>(N * Q, 1);
        std::vector<floatX*> qkvs = share_rows(qkv, s, parts), douts = share_rows(dout, heads_out(s), parts), outs, dqkvs;
        for (int p = 0; p < parts; p++) {
            outs.push_back(device_alloc<floatX>((size_t)s.B * s.T * heads_room(Q, parts)));
            dqkvs.push_back(device_alloc<floatX>((size_t)s.B * s.T * heads_room(width, parts)));
            run_attention(qkvs[p], outs[p], dqkvs[p], douts[p], d_starts, d_table, heads);
        }
        floatX *w_qkv = upload_rows<floatX>(qkv, N, width, pitch), *w_dout = upload_rows<floatX>(dout, N, Q, out_pitch);
        floatX *w_out = device_alloc<floatX>(N * out_pitch), *w_dqkv = device_alloc<floatX>(N * pitch);
        run_attention(w_qkv, w_out, w_dqkv, w_dout, d_starts, d_table, all);
        compare(what, unshare_rows(outs, heads_out(s)), download_rows(w_out, N, Q, out_pitch), ulp, 1e-4f);
        compare(what, unshare_rows(dqkvs, s), download_rows(w_dqkv, N, width, pitch), 2 * ulp, 1e-3f);
        free(starts);
        device_free_all();
    }
}

#endif
