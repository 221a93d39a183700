/* test_sequence.c -- rows that several ranks share (--seq-parallel): each token is on one rank; the exchange of parts of rows
 * for heads, and back; attention over heads of whole rows. All are compared with one process that holds whole rows. */
#include "llmc/attention.h"
#include "llmc/base/rand.h"
#include "llmc/dist/sequence.h"
#include "llmc/rope.h"
#include "llmc/run/loop/validate.h"

#include "dev/test/oracles.h"
#include "dev/test/test.h"

enum { BOS = 5, TOKENS = 3000 };

/* Writes a token file of documents of about 20 tokens and returns its path. */
static const char* write_tokens(void) {
    const TokenFileHeader h = {2, 1000, TOKENS, 0, false, 0, false, 0, false};
    const char* path = test_file("data.bin");
    int32_t words[TOKENFILE_WORDS];
    uint16_t ids[TOKENS];
    for (uint64_t i = 0; i < TOKENS; i++) {
        ids[i] = philox_below(3, RAND_SAMPLE, 0, i, 20) == 0 ? BOS : (uint16_t)(10 + philox_below(3, RAND_SAMPLE, 1, i, 900));
    }
    ids[0] = BOS;
    tokenfile_header(words, &h);
    FILE* f = fopen(path, "wb");
    if (!f || fwrite(words, sizeof words, 1, f) != 1 || fwrite(ids, sizeof ids, 1, f) != 1 || fclose(f) != 0) {
        die("%s", path);
    }
    return path;
}

/* Compares the tokens that each of groups x parts ranks gets in two steps with the rows that one rank reads. */
static void check_rows(const char* path, Documents documents, int B, int T, int groups, int parts) {
    const RowRule rule = {documents, BOS, 0, true, NULL, NULL};
    const size_t row = (size_t)T, n = (size_t)T / (size_t)parts, all = (size_t)(B * groups) * row, own = (size_t)B * n;
    int32_t *x = (int32_t*)xmalloc(2 * all * sizeof *x), *y = x + all;
    int32_t *part_x = (int32_t*)xmalloc(2 * own * sizeof *x), *part_y = part_x + own;
    DataLoader one, *loaders = (DataLoader*)xcalloc((size_t)(groups * parts), sizeof *loaders);
    RowParts* shared = (RowParts*)xcalloc((size_t)(groups * parts), sizeof *shared);
    BatchSource* sources = (BatchSource*)xcalloc((size_t)(groups * parts), sizeof *sources);
    Error e = NO_ERROR;
    must(dataloader_open(&one, path, (BatchShare){B * groups, T, 0, 1}, 7, true, &rule, &e), &e);
    for (int r = 0; r < groups * parts; r++) {
        const SequenceShare share = sequence_share(r, groups * parts, parts);
        must(dataloader_open(&loaders[r], path, (BatchShare){B, T, share.group, share.groups}, 7, true, &rule, &e), &e);
        const BatchSource whole = batches_of(&loaders[r]);
        sources[r] = row_parts_of(&shared[r], &whole, share, T);
    }
    bool same = true;
    for (int step = 0; step < 2; step++) {
        must(dataloader_next(&one, x, y, &e), &e);
        for (int r = 0; r < groups * parts; r++) {
            must(batch_read(&sources[r], B, (int)n, part_x, part_y, &e), &e);
            for (size_t b = 0; b < (size_t)B; b++) {
                const size_t in_step = (size_t)(r / parts * B) + b, first = in_step * row + (size_t)(r % parts) * n;
                same = same && memcmp(part_x + b * n, x + first, n * sizeof *x) == 0;
                same = same && memcmp(part_y + b * n, y + first, n * sizeof *y) == 0;
                same = same && (!one.starts || memcmp(sources[r].starts + b * row, one.starts + in_step * row, row * 4) == 0);
            }
        }
    }
    CHECK(same, "B %d, T %d, %d groups of %d", B, T, groups, parts);
    for (int r = 0; r < groups * parts; r++) {
        row_parts_free(&shared[r]);
        dataloader_close(&loaders[r]);
    }
    dataloader_close(&one);
    free(sources);
    free(shared);
    free(loaders);
    free(part_x);
    free(x);
}

TEST(every_token_of_a_step_is_on_one_rank) {
    const char* path = write_tokens();
    for (int parts = 1; parts <= 8; parts += parts < 4 ? 1 : 4) {
        for (int groups = 1; groups <= 3; groups++) {
            for (int B = 1; B <= 3; B++) {
                for (int d = DOCUMENTS_CROSS; d <= DOCUMENTS_MASK; d++) {
                    check_rows(path, (Documents)d, B, 24, groups, parts);
                }
            }
        }
    }
}

TEST(members_of_a_group_are_neighbours) {
    for (int parts = 1; parts <= 8; parts++) {
        for (int ranks = parts; ranks <= 4 * parts; ranks += parts) {
            for (int r = 0; r < ranks; r++) {
                const SequenceShare s = sequence_share(r, ranks, parts);
                CHECK(s.groups * s.row_ranks == ranks && s.group * s.row_ranks + s.part == r && s.part < s.row_ranks &&
                          s.group < s.groups,
                      "rank %d of %d in %d parts", r, ranks, parts);
            }
        }
    }
    const SequenceShare none = sequence_share(3, 5, 0);
    CHECK(none.row_ranks == 1 && none.part == 0 && none.groups == 5 && none.group == 3, "without the flag");
}

// ---------------------------------------------------------------------------------------------------------------------
// heads for parts of rows

static float* random_floats(size_t n, uint32_t stream) {
    float* x = (float*)xmalloc((n + 1) * sizeof *x);
    rand_normal(x, 0, n, 1, 77, stream);
    return x;
}

/* Copies part p of the rows x (B, T parts, width) to out (B, T, width), or back. */
static void copy_part(float* out, float* x, AttentionShape s, int parts, int p, bool back) {
    const size_t part = (size_t)s.T * heads_width(s);
    for (size_t b = 0; b < (size_t)s.B; b++) {
        float *own = out + b * part, *all = x + (b * (size_t)parts + (size_t)p) * part;
        memcpy(back ? all : own, back ? own : all, part * sizeof *x);
    }
}

/* Does the members' all-to-all to row b: block q of member p becomes block p of member q. s: of a part */
static void exchange(float** to, float** from, AttentionShape s, int parts) {
    const size_t block = (size_t)s.T * heads_width(s) / (size_t)parts;
    for (int b = 0; b < s.B; b++) {
        for (int p = 0; p < parts; p++) {
            for (int q = 0; q < parts; q++) {
                memcpy(to[q] + (size_t)(b * parts + p) * block, from[p] + (size_t)(b * parts + q) * block,
                       block * sizeof(float));
            }
        }
    }
}

/* Writes each member's heads from whole rows x, or with `back` rows from heads. */
static void share_rows(float* x, float** heads, AttentionShape s, int parts, bool back) {
    float *pieces[8], *rows = (float*)xmalloc((size_t)(s.B * s.T) * heads_width(s) * sizeof *rows);
    for (int p = 0; p < parts; p++) { pieces[p] = (float*)xmalloc((size_t)(s.B * s.T) * heads_width(s) * sizeof(float)); }
    if (back) { exchange(pieces, heads, s, parts); }
    for (int p = 0; p < parts; p++) {
        if (!back) { copy_part(rows, x, s, parts, p, false); }
        heads_pack(pieces[p], rows, s, parts, back);
        if (back) { copy_part(rows, x, s, parts, p, true); }
    }
    if (!back) { exchange(heads, pieces, s, parts); }
    for (int p = 0; p < parts; p++) { free(pieces[p]); }
    free(rows);
}

// B, T of a part, NH, NKV, HD, parts, longest document
static const int shapes[][7] = {{1, 4, 4, 2, 6, 2, 0},   {3, 5, 2, 2, 10, 2, 7}, {2, 3, 8, 4, 4, 4, 5},
                                {1, 7, 12, 4, 64, 2, 9}, {2, 1, 8, 8, 2, 8, 3},  {1, 2, 16, 8, 128, 8, 0},
                                {3, 6, 6, 3, 8, 3, 4},   {2, 9, 3, 1, 12, 1, 6}, {1, 33, 4, 2, 64, 2, 20}};

TEST(each_head_finds_its_place_and_back) {
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const int* c = shapes[i];
        const int parts = c[5], T = c[1], whole = T * parts;
        for (int NKV = 0; NKV <= c[3]; NKV += c[3]) {
            const AttentionShape s = {c[0], T, c[2], NKV, c[4]}, h = heads_shape(s, parts);
            const size_t width = heads_width(s), own = heads_width(h), HD = (size_t)s.HD;
            const size_t n = (size_t)(s.B * whole) * width;
            float *x = random_floats(n, (uint32_t)i), *again = (float*)xcalloc(n + 1, sizeof *again), *heads[8];
            for (int p = 0; p < parts; p++) { heads[p] = (float*)xcalloc((size_t)(s.B * whole) * own, sizeof(float)); }
            share_rows(x, heads, s, parts, false);
            bool right = true;
            for (size_t row = 0; row < (size_t)(s.B * whole); row++) {
                for (int head = 0; head < s.NH + 2 * s.NKV; head++) {
                    // query head, or key or value head: each member has equally many heads of a kind, one after another
                    const int kind = head < s.NH ? 0 : head < s.NH + s.NKV ? 1 : 2, many = kind == 0 ? s.NH : s.NKV;
                    const int of_kind = kind == 0 ? head : kind == 1 ? head - s.NH : head - s.NH - s.NKV;
                    const int p = of_kind / (many / parts), local = of_kind % (many / parts);
                    const int at = kind == 0 ? local : kind == 1 ? h.NH + local : h.NH + h.NKV + local;
                    right = right &&
                            memcmp(heads[p] + row * own + (size_t)at * HD, x + row * width + (size_t)head * HD, HD * 4) == 0;
                }
            }
            CHECK(right, "shape %zu, NKV %d: a head is elsewhere", i, NKV);
            share_rows(again, heads, s, parts, true);
            CHECK(memcmp(x, again, n * sizeof *x) == 0, "shape %zu, NKV %d: back", i, NKV);
            for (int p = 0; p < parts; p++) { free(heads[p]); }
            free(again);
            free(x);
        }
    }
}

/* Runs RoPE and attention, forward and backward. */
static void run_attention(float* qkv, float* out, float* lse, float* dqkv, const float* dout, const int32_t* starts,
                          const float* table, AttentionShape s) {
    void* scratch = xmalloc(size_max(attention_forward_scratch(), attention_backward_scratch(s)));
    rope_forward(qkv, starts, table, 0, s);
    attention_forward(out, lse, scratch, qkv, starts, s);
    attention_backward(dqkv, scratch, dout, out, lse, qkv, starts, s);
    rope_backward(dqkv, starts, table, 0, s);
    free(scratch);
}

TEST(attention_by_heads_has_the_bits_of_attention_over_whole_rows) {
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const int* c = shapes[i];
        const int parts = c[5];
        const AttentionShape s = {c[0], c[1], c[2], c[3], c[4]}, h = heads_shape(s, parts);
        const AttentionShape all = {s.B, s.T * parts, s.NH, s.NKV, s.HD};
        const size_t N = (size_t)(s.B * all.T), width = heads_width(s), Q = (size_t)(s.NH * s.HD);
        ModelConfig config;
        memset(&config, 0, sizeof config);
        config.head_dim = s.HD;
        config.rope_theta = 500;
        float *table = random_floats((size_t)(all.T * s.HD), 0), *qkv = random_floats(N * width, 1),
              *dout = random_floats(N * Q, 2);
        rope_table(table, all.T, &config);
        int32_t* starts = random_starts(s.B, all.T, c[6]);
        float *qkvs[8], *outs[8], *dqkvs[8], *douts[8];
        for (int p = 0; p < parts; p++) {
            qkvs[p] = (float*)xcalloc(N, heads_width(h) * 4);
            dqkvs[p] = (float*)xcalloc(N, heads_width(h) * 4);
            outs[p] = (float*)xcalloc(N, Q * 4);
            douts[p] = (float*)xcalloc(N, Q * 4);
        }
        share_rows(qkv, qkvs, s, parts, false);
        share_rows(dout, douts, heads_out(s), parts, false);
        float *out = (float*)xcalloc(N, Q * 4), *lse = (float*)xcalloc(N * (size_t)s.NH, 4),
              *dqkv = (float*)xcalloc(N, width * 4);
        float *got = (float*)xcalloc(N, Q * 4), *dgot = (float*)xcalloc(N, width * 4);
        for (int p = 0; p < parts; p++) { run_attention(qkvs[p], outs[p], lse, dqkvs[p], douts[p], starts, table, h); }
        share_rows(got, outs, heads_out(s), parts, true);
        share_rows(dgot, dqkvs, s, parts, true);
        run_attention(qkv, out, lse, dqkv, dout, starts, table, all);
        CHECK(memcmp(out, got, N * Q * 4) == 0, "shape %zu: forward", i);
        CHECK(memcmp(dqkv, dgot, N * width * 4) == 0, "shape %zu: backward", i);
        float* const rest[] = {table, qkv, dout, out, lse, dqkv, got, dgot};
        for (size_t k = 0; k < sizeof rest / sizeof *rest; k++) { free(rest[k]); }
        for (int p = 0; p < parts; p++) { free(qkvs[p]), free(dqkvs[p]), free(outs[p]), free(douts[p]); }
        free(starts);
    }
}

int main(void) { return test_all(); }
