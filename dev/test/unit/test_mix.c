/* test_mix.c -- llmc/files/mix.h against a naive model that walks through the whole stream. The model says from which source
 * and which of its rows each row comes, for every rank and place to resume at. Also tests shares, texts that name files, and
 * every refusal with its message. */
#include "dev/test/test.h"
#include "llmc/files/mix.h"
#include "llmc/train/step.h"

static const char* folder;

enum { T = 4, SOURCES = 3, SEED = 77, ROWS = 3 * MIX_BLOCK };
static const uint64_t source_rows[SOURCES] = {3000, 700, 5};  // an epoch of the last source is less than its share of a block
static const double weights[SOURCES] = {0.5, 0.2, 0.3};

static const char* in_folder(const char* name) { return test_path(folder, name); }

/* Writes a token file of `rows` rows. Token i is `base` + i. */
static void write_tokens(const char* name, int base, uint64_t rows, int vocab, uint64_t fingerprint) {
    const TokenFileHeader h = {4, vocab, rows * T + 1, fingerprint, false, 0, false, 0, false};
    int32_t words[TOKENFILE_WORDS];
    tokenfile_header(words, &h);
    FILE* f = fopen(in_folder(name), "wb");
    fwrite(words, sizeof words, 1, f);
    for (int32_t i = 0; i <= (int32_t)(rows * T); i++) {
        const int32_t token = base + i;
        fwrite(&token, sizeof token, 1, f);
    }
    if (fclose(f) != 0) { die("%s: cannot write the test's file", name); }
}

/* Source s has the tokens from s * 100000 on. */
static int source_of(int32_t token) { return token / 100000; }

/* Returns the text of the test's mix. */
static const char* text_of(double a, double b, double c) {
    static char text[4 * PATH_CAP];
    snprintf(text, sizeof text, "%s:%g,%s:%g,%s:%g", in_folder("a*.bin"), a, in_folder("b.bin"), b, in_folder("c.bin"), c);
    return text;
}

static const RowRule cross = {DOCUMENTS_CROSS, -1, 0, false, NULL, NULL};

static void open_mix(Mix* m, DataLoader* stream, const char* text, int B, int rank, int ranks) {
    Error e = NO_ERROR;
    if (!mix_open(m, stream, text, (BatchShare){B, T, rank, ranks}, SEED, &cross, &e)) { die("%s", e.msg); }
}

// ---------------------------------------------------------------------------------------------------------------------
// the order

/* Writes out the first token of each row: the block's permutation gives the row's source, and a loader of this source alone
 * gives its next row. */
static void naive_stream(int32_t* first /* (ROWS) */, const int* share /* (SOURCES) */) {
    static const char* const names[SOURCES] = {"a*.bin", "b.bin", "c.bin"};
    DataLoader alone[SOURCES];
    int order[MIX_BLOCK];
    int32_t x[T], y[T];
    Error e = NO_ERROR;
    for (int s = 0; s < SOURCES; s++) {
        CHECK(dataloader_open(&alone[s], in_folder(names[s]), (BatchShare){1, T, 0, 1}, SEED, true, &cross, &e), "%s", e.msg);
    }
    for (uint32_t block = 0; block < ROWS / MIX_BLOCK; block++) {
        for (int i = 0; i < MIX_BLOCK; i++) { order[i] = i; }
        for (int i = MIX_BLOCK - 1; i >= 1; i--) {
            const int j = (int)philox_below(SEED, RAND_MIX, block, (uint64_t)i, (uint64_t)i + 1), t = order[i];
            order[i] = order[j];
            order[j] = t;
        }
        for (int i = 0; i < MIX_BLOCK; i++) {
            const int s = order[i] < share[0] ? 0 : order[i] < share[0] + share[1] ? 1 : 2;
            CHECK(dataloader_next(&alone[s], x, y, &e), "%s", e.msg);
            first[block * MIX_BLOCK + (uint32_t)i] = x[0];
        }
    }
    for (int s = 0; s < SOURCES; s++) { dataloader_close(&alone[s]); }
}

TEST(each_source_gives_its_own_rows_in_its_own_order) {
    static int32_t want[ROWS];
    static const int ranks[] = {1, 2, 3, 8};
    Mix m;
    DataLoader stream;
    Error e = NO_ERROR;
    open_mix(&m, &stream, text_of(weights[0], weights[1], weights[2]), 1, 0, 1);
    const int share[SOURCES] = {m.sources[0].share, m.sources[1].share, m.sources[2].share};
    naive_stream(want, share);
    mix_close(&m);
    for (int i = 0; i < 4; i++) {
        for (int B = 1; B <= 3; B += 2) {
            for (int rank = 0; rank < ranks[i]; rank++) {
                int wrong = 0, wrong_source = 0;
                int32_t x[3 * T], y[3 * T];
                open_mix(&m, &stream, text_of(weights[0], weights[1], weights[2]), B, rank, ranks[i]);
                for (uint64_t row = (uint64_t)(rank * B); row + 3 <= ROWS; row += (uint64_t)(B * ranks[i])) {
                    CHECK(mix_next(&m, x, y, &e), "%s", e.msg);
                    for (int b = 0; b < B; b++) {
                        const int32_t token = want[row + (uint64_t)b];
                        wrong += x[b * T] != token || y[b * T + T - 1] != token + T;
                        wrong_source += m.batch_sources[b] != source_of(token);
                    }
                }
                CHECK(wrong == 0 && wrong_source == 0, "rank %d of %d, B %d: %d rows, %d sources", rank, ranks[i], B, wrong,
                      wrong_source);
                mix_close(&m);
            }
        }
    }
}

TEST(losses_add_up_by_source) {
    enum { B = 3, BATCHES = 40 };
    Mix m;
    DataLoader stream;
    Metrics r;
    Error e = NO_ERROR;
    int32_t x[B * T], y[B * T];
    double sum[SOURCES] = {0}, tokens[SOURCES] = {0};
    memset(&r, 0, sizeof r);
    open_mix(&m, &stream, text_of(1, 2, 1), B, 0, 1);
    const BatchSource data = batches_of_mix(&m);
    for (int k = 0; k < BATCHES; k++) {
        float losses[B * T];
        CHECK(batch_read(&data, B, T, x, y, &e), "%s", e.msg);
        for (int i = 0; i < B * T; i++) {
            const bool trained = i % 3 > 0;
            losses[i] = trained ? (float)(k * B * T + i) : 0;
            if (!trained) { y[i] = -1; }
            sum[source_of(x[i])] += losses[i];
            tokens[source_of(x[i])] += trained;
        }
        step_add_sources(&r, &data, losses, y, T);
    }
    CHECK(r.sources.count == SOURCES, "%d sources", r.sources.count);
    for (int s = 0; s < SOURCES; s++) {
        CHECK(tokens[s] > 0 && r.sources.sum[s] == sum[s] && r.sources.tokens[s] == tokens[s], "source %d: %g of %g tokens", s,
              r.sources.sum[s], r.sources.tokens[s]);
    }
    mix_close(&m);
}

TEST(a_run_resumed_anywhere_reads_on) {
    static const uint64_t places[] = {0, 1, 4095, 4096, 4097, 9000, 12000};
    Mix m, resumed;
    DataLoader stream, resumed_stream;
    Error e = NO_ERROR;
    int32_t x[T], y[T], want[T];
    for (int i = 0; i < 7; i++) {
        open_mix(&m, &stream, text_of(1, 2, 3), 1, 0, 1);
        open_mix(&resumed, &resumed_stream, text_of(1, 2, 3), 1, 0, 1);
        for (uint64_t row = 0; row < places[i]; row++) { CHECK(mix_next(&m, x, y, &e), "%s", e.msg); }
        dataloader_seek(&resumed_stream, places[i]);
        for (int row = 0; row < 100; row++) {
            CHECK(mix_next(&m, want, y, &e) && mix_next(&resumed, x, y, &e), "%s", e.msg);
            CHECK(memcmp(x, want, sizeof x) == 0, "row %llu + %d", (unsigned long long)places[i], row);
        }
        mix_close(&m);
        mix_close(&resumed);
    }
}

TEST(a_distant_row_is_found_at_once) {
    Mix m;
    DataLoader stream;
    uint64_t position, counts[SOURCES];
    const uint64_t row = (uint64_t)1 << 43;
    open_mix(&m, &stream, text_of(1, 1, 2), 1, 0, 1);
    const int s = mix_locate(&m, m.caller_block, row + 1, &position);
    mix_count(&m, row + 1, counts);
    CHECK(counts[0] + counts[1] + counts[2] == row + 1, "%llu", (unsigned long long)counts[0]);
    CHECK(counts[s] == position, "source %d gives row %llu, wanted %llu", s, (unsigned long long)position,
          (unsigned long long)counts[s]);
    mix_close(&m);
}

TEST(the_shares_of_a_block_are_exact) {
    static const double cases[][SOURCES] = {{0.5, 0.2, 0.3}, {1, 1, 1}, {1e-3, 1, 1},
                                            {1e9, 1e9, 1e6}, {6, 3, 1}, {0.6, 0.3, 0.1}};
    static const int want[][SOURCES] = {{2048, 819, 1229}, {1366, 1365, 1365}, {2, 2047, 2047},
                                        {2047, 2047, 2},   {2458, 1229, 409},  {2458, 1229, 409}};
    for (int i = 0; i < 6; i++) {
        Mix m;
        DataLoader stream;
        uint64_t before[SOURCES] = {0}, counts[SOURCES];
        open_mix(&m, &stream, text_of(cases[i][0], cases[i][1], cases[i][2]), 1, 0, 1);
        for (uint64_t block = 1; block <= 3; block++) {
            int seen[SOURCES] = {0};
            for (uint64_t row = 0; row < MIX_BLOCK; row++) {
                uint64_t position;
                seen[mix_locate(&m, m.caller_block, (block - 1) * MIX_BLOCK + row, &position)]++;
            }
            mix_count(&m, block * MIX_BLOCK, counts);
            for (int s = 0; s < SOURCES; s++) {
                CHECK(seen[s] == want[i][s], "case %d, source %d has %d rows, wanted %d", i, s, seen[s], want[i][s]);
                CHECK(counts[s] == before[s] + (uint64_t)want[i][s], "case %d, source %d", i, s);
                before[s] = counts[s];
            }
        }
        mix_close(&m);
    }
}

TEST(one_source_is_read_as_without_a_mix) {
    char text[PATH_CAP + 8];
    for (int weighted = 0; weighted <= 1; weighted++) {
        Mix m;
        DataLoader stream, plain;
        int32_t x[2 * T], y[2 * T], want_x[2 * T], want_y[2 * T];
        uint64_t a = 0, b = 1;
        Error e = NO_ERROR;
        snprintf(text, sizeof text, "%s%s", in_folder("a*.bin"), weighted ? ":0.7" : "");
        open_mix(&m, &stream, text, 2, 1, 2);
        CHECK(dataloader_open(&plain, in_folder("a*.bin"), (BatchShare){2, T, 1, 2}, SEED, true, &cross, &e), "%s", e.msg);
        CHECK(!stream.read_row && !m.batch_sources && stream.rows_per_epoch == plain.rows_per_epoch, "it is no plain loader");
        CHECK(mix_fingerprint(&m, &a, &e) && dataloader_fingerprint(&plain, &b, &e) && a == b, "another fingerprint");
        for (int i = 0; i < 2000; i++) {
            CHECK(dataloader_next(&stream, x, y, &e) && dataloader_next(&plain, want_x, want_y, &e), "%s", e.msg);
            CHECK(memcmp(x, want_x, sizeof x) == 0 && memcmp(y, want_y, sizeof y) == 0, "batch %d", i);
        }
        mix_close(&m);
        dataloader_close(&plain);
    }
}

static uint64_t fingerprint_of(const char* text) {
    Mix m;
    DataLoader stream;
    uint64_t print = 0;
    Error e = NO_ERROR;
    open_mix(&m, &stream, text, 1, 0, 1);
    CHECK(mix_fingerprint(&m, &print, &e), "%s", e.msg);
    mix_close(&m);
    return print;
}

TEST(the_fingerprint_covers_sources_and_weights) {
    const uint64_t print = fingerprint_of(text_of(0.5, 0.2, 0.3));
    char other[2 * PATH_CAP];
    CHECK(print == fingerprint_of(text_of(5, 2, 3)), "the same shares");
    CHECK(print != fingerprint_of(text_of(0.5, 0.3, 0.2)), "other weights");
    snprintf(other, sizeof other, "%s:0.5,%s:0.5", in_folder("a*.bin"), in_folder("b.bin"));
    CHECK(print != fingerprint_of(other), "a source less");
    write_tokens("c.bin", 200001, source_rows[2], 300000, 5);
    const uint64_t changed = fingerprint_of(text_of(0.5, 0.2, 0.3));
    CHECK(changed != print, "another file of the last source");
    write_tokens("c.bin", 200000, source_rows[2], 300000, 5);
    CHECK(print == fingerprint_of(text_of(0.5, 0.2, 0.3)), "the file as it was");
}

TEST(an_epoch_of_the_mix_is_one_of_all_sources_together) {
    Mix m;
    DataLoader stream;
    open_mix(&m, &stream, text_of(1, 1, 1), 1, 0, 1);
    CHECK(stream.rows_per_epoch == source_rows[0] + source_rows[1] + source_rows[2], "%llu",
          (unsigned long long)stream.rows_per_epoch);
    CHECK(stream.num_tokens == m.sources[0].data->num_tokens + m.sources[1].data->num_tokens + m.sources[2].data->num_tokens,
          "tokens");
    CHECK(mix_num_files(&m) == 4 && stream.vocab_size == 300000 && stream.fingerprint == 5, "files, vocabulary, tokenizer");
    mix_close(&m);
}

// ---------------------------------------------------------------------------------------------------------------------
// the text

/* Checks the parts of a text: PATTERN=WEIGHT, each followed by a blank; weight 0: none. Names are below the folder. */
static void parts_are(const char* text, const char* want) {
    Mix m;
    char got[1024] = "";
    Error e = NO_ERROR;
    CHECK(mix_parse(&m, text, &e), "%s: %s", text, e.msg);
    for (int i = 0; i < m.count; i++) {
        snprintf(got + strlen(got), sizeof got - strlen(got), "%s=%g ", m.sources[i].pattern, m.sources[i].weight);
    }
    CHECK(strcmp(got, want) == 0, "%s: %s, wanted %s", text, got, want);
    mix_free_patterns(&m);
}

TEST(a_file_by_its_very_name_wins) {
    char old[PATH_CAP];
    if (!getcwd(old, sizeof old) || chdir(folder) != 0) { die("%s: cannot enter", folder); }
    parts_are("a*.bin:0.7,b.bin:0.3", "a*.bin=0.7 b.bin=0.3 ");
    parts_are("a*.bin", "a*.bin=0 ");
    parts_are("missing.bin", "missing.bin=0 ");
    parts_are("x:y.bin", "x:y.bin=0 ");
    parts_are("b.bin:2", "b.bin=2 ");
    parts_are("missing:0.5,gone:1e-1", "missing=0.5 gone=0.1 ");
    write_tokens("b.bin:2", 0, 1, 0, 0);
    write_tokens("d,e.bin", 0, 1, 0, 0);
    write_tokens("f:1,b.bin", 0, 1, 0, 0);
    parts_are("b.bin:2", "b.bin:2=0 ");
    parts_are("b.bin:2:0.5,c.bin:1", "b.bin:2=0.5 c.bin=1 ");
    parts_are("d,e.bin", "d,e.bin=0 ");
    parts_are("d,*.bin", "d,*.bin=0 ");
    parts_are("[d,x],e.bin:0.25,c.bin:1", "[d,x],e.bin=0.25 c.bin=1 ");
    parts_are("c.bin:1,d,e.bin:3", "c.bin=1 d,e.bin=3 ");
    parts_are("f:1,b.bin", "f:1,b.bin=0 ");
    unlink("b.bin:2");
    unlink("d,e.bin");
    unlink("f:1,b.bin");
    if (chdir(old) != 0) { die("%s: cannot enter", old); }
}

static void refused(const char* text, const char* want) {
    Mix m;
    DataLoader stream;
    Error e = NO_ERROR;
    const bool ok = mix_open(&m, &stream, text, (BatchShare){1, T, 0, 1}, SEED, &cross, &e);
    CHECK(!ok && strstr(e.msg, want), "%s: %s, wanted %s", text, ok ? "no error" : e.msg, want);
    if (ok) { mix_close(&m); }
}

TEST(every_text_that_makes_no_mix_is_refused_by_name) {
    char old[PATH_CAP], many[256] = "b.bin:1";
    if (!getcwd(old, sizeof old) || chdir(folder) != 0) { die("%s: cannot enter", folder); }
    refused("b.bin:x,c.bin:1", "the weight of b.bin is x, wanted a number above 0");
    refused("c.bin:1,b.bin:", "the weight of b.bin is , wanted");
    refused("c.bin:1,b.bin:0", "the weight of b.bin is 0, wanted");
    refused("c.bin:1,b.bin:-0.5", "the weight of b.bin is -0.5, wanted");
    refused("c.bin:1,b.bin:inf", "the weight of b.bin is inf, wanted");
    refused("c.bin:1,b.bin:nan", "the weight of b.bin is nan, wanted");
    refused("c.bin:1,b.bin:1e300", "the weight of b.bin is 1e300, wanted");
    refused("c.bin:1,b.bin:0.5x", "the weight of b.bin is 0.5x, wanted");
    refused("b.bin:0", "the weight of b.bin is 0, wanted");
    refused("c.bin:1,b.bin", "b.bin has no weight, wanted one for each of the 2 parts");
    refused("c.bin,b.bin", "c.bin has no weight");
    refused("c.bin:1,b.bin:1,", "a part is empty");
    refused("c.bin:1,,b.bin:1", "a part is empty");
    refused("c.bin:1,b.bin:1e-5", "the weight of b.bin is 1e-05 of 1.00001 in all, too small for one row in 4096");
    refused("c.bin:1,missing.bin:1", "missing.bin: no such token file");
    write_tokens("other.bin", 0, 8, 300000, 6);
    refused("c.bin:1,other.bin:1", "other.bin: was made with another tokenizer (fingerprint 0000000000000006)");
    write_tokens("other.bin", 0, 8, 299999, 5);
    refused("c.bin:1,other.bin:1", "other.bin: vocabulary is 299999 tokens, but in c.bin it is 300000: wanted all alike");
    unlink("other.bin");
    for (int i = 0; i < MIX_MOST; i++) { strcat(many, ",:1"); }
    refused(many, "has more than 32 parts");
    if (chdir(old) != 0) { die("%s: cannot enter", old); }
}

TEST(a_token_outside_the_vocabulary_names_its_file) {
    Mix m;
    DataLoader stream;
    int32_t x[T], y[T];
    bool ok = true;
    Error e = NO_ERROR;
    open_mix(&m, &stream, text_of(1, 1, 1), 1, 0, 1);
    CHECK(!mix_check_vocab(&m, 250000, 0, &e) && strstr(e.msg, "vocabulary is 300000"), "%s", e.msg);
    CHECK(mix_check_vocab(&m, 300000, 5, &e), "%s", e.msg);
    truncate(in_folder("c.bin"), 100);
    e.msg[0] = 0;
    for (int i = 0; ok && i < 100; i++) { ok = mix_next(&m, x, y, &e); }
    CHECK(!ok && strstr(e.msg, "c.bin: has 100 bytes"), "%s", e.msg);
    const uint64_t row = stream.row;
    write_tokens("c.bin", 200000, source_rows[2], 300000, 5);
    e.msg[0] = 0;
    CHECK(mix_next(&m, x, y, &e) && source_of(x[0]) == 2 && stream.row == row + 1, "%s", e.msg);
    mix_close(&m);
}

int main(void) {
    folder = test_folder();
    write_tokens("a0.bin", 0, 1000, 300000, 5);
    write_tokens("a1.bin", 10000, 2000, 0, 0);
    write_tokens("b.bin", 100000, source_rows[1], 300000, 0);
    write_tokens("c.bin", 200000, source_rows[2], 300000, 5);
    return test_all();
}
