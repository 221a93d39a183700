/* test_dataloader.c -- llmc/files/dataloader.h against a naive model of its specification: the order of rows for every rank,
 * seed and place to resume at, and its quality; large files; every refusal and its message. */
#include "dev/test/test.h"
#include "llmc/files/dataloader.h"

#include <math.h>

static const RowRule cross = {DOCUMENTS_CROSS, -1, 0, false, NULL, NULL};

// ---------------------------------------------------------------------------------------------------------------------
// making files

typedef struct {
    int width, vocab;
    uint64_t fingerprint;
} Kind;

static uint32_t token_at(int shard, uint64_t i) { return (uint32_t)((i * 7 + (uint64_t)shard * 1009 + i / 13) % 3001); }

static bool trained_at(int shard, uint64_t i) { return (i * i + (uint64_t)shard) % 5 < 2; }

/* Writes a shard whose token i is token_at(shard, i), and with a mask whose bit i is trained_at(shard, i). */
static void write_masked_shard(const char* name, int shard, uint64_t n, Kind kind, bool masked) {
    TokenFileHeader h = {kind.width, kind.vocab, n, kind.fingerprint, true, 0, masked, 0, false};
    const size_t bytes = (size_t)tokenfile_bytes(&h);
    unsigned char* data = (unsigned char*)xcalloc(bytes, 1);
    for (uint64_t i = 0; i < n; i++) {
        uint32_t id = token_at(shard, i);
        uint16_t narrow = (uint16_t)id;
        memcpy(data + TOKENFILE_HEADER_BYTES + i * (size_t)kind.width, kind.width == 2 ? (void*)&narrow : (void*)&id,
               (size_t)kind.width);
        if (masked) { data[tokenfile_mask_at(&h) + i / 8] |= (unsigned char)(trained_at(shard, i) << i % 8); }
    }
    h.crc = crc_of(data + TOKENFILE_HEADER_BYTES, bytes - TOKENFILE_HEADER_BYTES);
    int32_t words[TOKENFILE_WORDS];
    tokenfile_header(words, &h);
    memcpy(data, words, sizeof words);
    test_write(test_file(name), data, bytes);
    free(data);
}

static void write_shard(const char* name, int shard, uint64_t n, Kind kind) { write_masked_shard(name, shard, n, kind, false); }

// ---------------------------------------------------------------------------------------------------------------------
// the naive model: writes out the whole stream of (shard, row) pairs, epoch after epoch

enum { T = 8, SHARDS = 3 };
static const uint64_t shard_tokens[SHARDS] = {8 * 11 + 1, 8 * 5 + 7, 8 * 23};  // 11, 5 and 22 rows
enum { ROWS = 11 + 5 + 22 };

typedef struct {
    int shard;
    uint64_t row;
} Place;

static void swap_places(Place* a, Place* b) {
    Place t = *a;
    *a = *b;
    *b = t;
}

/* Writes out order 2 of a shard of n rows: all of the cipher's a * b inputs, round by round, then the walks. */
static void naive_rows(uint64_t* order /* (n) */, uint64_t n, uint64_t seed, int shard, uint64_t epoch) {
    static uint64_t next[4096];
    const Philox k = philox(seed, RAND_ORDER_ROWS, (uint32_t)shard, epoch);
    const uint64_t key = (uint64_t)k.v[0] << 32 | k.v[1];
    uint64_t a = 2, b = 1;
    while (a * a < n) { a += 2; }
    while (a * b < n) { b++; }
    for (uint64_t x = 0; x < a * b; x++) {
        uint64_t l = x % a, r = x / a;
        for (uint32_t round = 0; round < 16; round++) {
            if (round % 2 == 0) {
                l = (l + philox_below(key, RAND_ORDER_ROWS, round, r, a)) % a;
            } else {
                r = (r + philox_below(key, RAND_ORDER_ROWS, round, l, b)) % b;
            }
        }
        next[x] = a * r + l;
    }
    for (uint64_t x = 0; x < n; x++) {
        order[x] = next[x];
        while (order[x] >= n) { order[x] = next[order[x]]; }
    }
}

static void naive_epoch(Place* out /* (ROWS) */, uint64_t epoch, uint64_t seed, bool shuffle) {
    Place shards[SHARDS];
    uint64_t rows[ROWS];
    for (int i = 0; i < SHARDS; i++) {
        shards[i].shard = i;
        shards[i].row = 0;
    }
    for (int i = SHARDS - 1; shuffle && i >= 1; i--) {
        swap_places(&shards[i],
                    &shards[philox_below(seed, RAND_SHUFFLE_SHARDS, (uint32_t)epoch, (uint64_t)i, (uint64_t)i + 1)]);
    }
    for (int k = 0; k < SHARDS; k++) {
        int shard = shards[k].shard, n = (int)((shard_tokens[shard] - 1) / T);
        naive_rows(rows, (uint64_t)n, seed, shard, epoch);
        for (int i = 0; i < n; i++, out++) {
            out->shard = shard;
            out->row = shuffle ? rows[i] : (uint64_t)i;
        }
    }
}

static void write_three_shards(int width) {
    test_elsewhere();
    Kind kind = {width, 3001, 77};
    const char* names[SHARDS] = {"data_000.bin", "data_001.bin", "data_002.bin"};
    for (int i = 0; i < SHARDS; i++) { write_shard(names[i], i, shard_tokens[i], kind); }
}

static bool row_is(const int32_t* x, const int32_t* y, Place place) {
    for (uint64_t t = 0; t < T; t++) {
        uint64_t i = place.row * T + t;
        if ((uint32_t)x[t] != token_at(place.shard, i) || (uint32_t)y[t] != token_at(place.shard, i + 1)) { return false; }
    }
    return true;
}

enum { EPOCHS = 4 };

/* Reads from row `start` to the end of EPOCHS epochs as every rank; compares each row with the model. */
static void compare_with_model(int B, int ranks, uint64_t seed, bool shuffle, uint64_t start) {
    static Place stream[EPOCHS * ROWS];
    for (uint64_t epoch = 0; epoch < EPOCHS; epoch++) { naive_epoch(stream + epoch * ROWS, epoch, seed, shuffle); }
    int32_t x[8 * T], y[8 * T];
    for (int rank = 0; rank < ranks; rank++) {
        DataLoader d;
        Error e = NO_ERROR;
        bool ok = dataloader_open(&d, test_file("data_*.bin"), (BatchShare){B, T, rank, ranks}, seed, shuffle, &cross, &e);
        CHECK(ok, "%s", e.msg);
        if (!ok) { return; }
        CHECK(d.rows_per_epoch == ROWS, "%llu rows", (unsigned long long)d.rows_per_epoch);
        dataloader_seek(&d, start);
        for (uint64_t base = start; base + (uint64_t)(ranks * B) <= EPOCHS * ROWS; base += (uint64_t)(ranks * B)) {
            CHECK(d.row == base, "row is %llu, wanted %llu", (unsigned long long)d.row, (unsigned long long)base);
            CHECK(dataloader_next(&d, x, y, &e), "%s", e.msg);
            for (int b = 0; b < B; b++) {
                Place want = stream[base + (uint64_t)(rank * B + b)];
                CHECK(row_is(x + b * T, y + b * T, want), "rank %d of %d, batch at %llu, row %d is not row %llu of shard %d",
                      rank, ranks, (unsigned long long)base, b, (unsigned long long)want.row, want.shard);
            }
        }
        dataloader_close(&d);
    }
}

TEST(order_equals_the_model) {
    for (int width = 2; width <= 4; width += 2) {
        write_three_shards(width);
        compare_with_model(1, 1, 42, false, 0);
        compare_with_model(1, 1, 42, true, 0);
        compare_with_model(3, 1, 7, true, 0);  // batches across the end of an epoch and of a shard
        compare_with_model(4, 3, 9, true, 0);
        compare_with_model(8, 4, 1, false, 0);  // a batch larger than the smallest shard
    }
}

TEST(any_row_can_be_resumed_at) {
    write_three_shards(2);
    for (uint64_t start = 0; start < 2 * ROWS + 3; start++) { compare_with_model(3, 2, 5, true, start); }
}

/* Returns the number of this row in an epoch without shuffle, or -1. */
static int place_in_plain_order(const int32_t* x, const int32_t* y) {
    Place plain[ROWS];
    naive_epoch(plain, 0, 0, false);
    for (int i = 0; i < ROWS; i++) {
        if (row_is(x, y, plain[i])) { return i; }
    }
    return -1;
}

/* Checks that all ranks together read each row of an epoch once, from row `start` on. */
static void ranks_share_each_epoch(int B, int ranks, bool shuffle, uint64_t start) {
    int seen[EPOCHS][ROWS] = {{0}};
    int32_t x[2 * T], y[2 * T];
    uint64_t end = start;
    for (int rank = 0; rank < ranks; rank++) {
        DataLoader d;
        Error e = NO_ERROR;
        CHECK(dataloader_open(&d, test_file("data_*.bin"), (BatchShare){B, T, rank, ranks}, 42, shuffle, &cross, &e), "%s",
              e.msg);
        dataloader_seek(&d, start);
        for (; d.row + (uint64_t)(ranks * B) <= EPOCHS * ROWS; end = d.row) {
            const uint64_t first = d.row + (uint64_t)(rank * B);
            CHECK(dataloader_next(&d, x, y, &e), "%s", e.msg);
            for (uint64_t b = 0; b < (uint64_t)B; b++) {
                const int place = place_in_plain_order(x + b * T, y + b * T);
                CHECK(place >= 0, "no row of the files");
                if (place >= 0) { seen[(first + b) / ROWS][place]++; }
            }
        }
        dataloader_close(&d);
    }
    for (uint64_t epoch = (start + ROWS - 1) / ROWS; (epoch + 1) * ROWS <= end; epoch++) {
        for (int i = 0; i < ROWS; i++) {
            CHECK(seen[epoch][i] == 1, "%d ranks, batch %d, epoch %d: row %d came %d times", ranks, B, (int)epoch, i,
                  seen[epoch][i]);
        }
    }
}

TEST(every_rank_gets_its_own_rows_of_every_epoch) {
    static const int ranks[] = {1, 2, 3, 8};
    static const uint64_t starts[] = {0, 5, ROWS - 1};
    write_three_shards(2);
    for (size_t r = 0; r < sizeof ranks / sizeof *ranks; r++) {
        for (size_t s = 0; s < sizeof starts / sizeof *starts; s++) {
            for (int B = 1; B <= 2; B++) {
                for (int shuffle = 0; shuffle < 2; shuffle++) {
                    compare_with_model(B, ranks[r], 42, shuffle, starts[s]);
                    ranks_share_each_epoch(B, ranks[r], shuffle, starts[s]);
                }
            }
        }
    }
}

TEST(seeking_back_reads_the_same_again) {
    write_three_shards(2);
    DataLoader d;
    Error e = NO_ERROR;
    int32_t x[2][4 * T], y[2][4 * T];
    CHECK(dataloader_open(&d, test_file("data_*.bin"), (BatchShare){4, T, 0, 1}, 3, true, &cross, &e), "%s", e.msg);
    uint64_t places[] = {0, 30, 0, 4, 3 * ROWS + 1, 4, 8};
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        for (int twice = 0; twice < 2; twice++) {
            dataloader_seek(&d, places[i]);
            CHECK(dataloader_next(&d, x[twice], y[twice], &e), "%s", e.msg);
        }
        CHECK(memcmp(x[0], x[1], sizeof x[0]) == 0 && memcmp(y[0], y[1], sizeof y[0]) == 0, "at %llu",
              (unsigned long long)places[i]);
    }
    dataloader_close(&d);
}

TEST(every_row_comes_once_an_epoch_and_epochs_differ) {
    write_three_shards(2);
    DataLoader d;
    Error e = NO_ERROR;
    CHECK(dataloader_open(&d, test_file("data_*.bin"), (BatchShare){1, T, 0, 1}, 11, true, &cross, &e), "%s", e.msg);
    int order[3][ROWS], moved = 0;
    for (int epoch = 0; epoch < 3; epoch++) {
        int seen[SHARDS][32] = {{0}};
        for (int i = 0; i < ROWS; i++) {
            int shard;
            uint64_t row;
            dataloader_locate(&d, (uint64_t)(epoch * ROWS + i), &shard, &row);
            CHECK(row < d.shards[shard].num_rows, "row %llu of shard %d", (unsigned long long)row, shard);
            seen[shard][row]++;
            order[epoch][i] = shard * 32 + (int)row;
            if (epoch > 0) { moved += order[epoch][i] != order[epoch - 1][i]; }
        }
        for (int s = 0; s < SHARDS; s++) {
            for (uint64_t r = 0; r < d.shards[s].num_rows; r++) { CHECK(seen[s][r] == 1, "%d times", seen[s][r]); }
        }
    }
    CHECK(moved > ROWS, "only %d rows changed their places in two epochs", moved);
    dataloader_close(&d);
}

TEST(without_a_thread_the_batches_are_the_same) {
    write_three_shards(4);
    DataLoader a, b;
    Error e = NO_ERROR;
    int32_t x[2][2 * T], y[2][2 * T];
    CHECK(dataloader_open(&a, test_file("data_*.bin"), (BatchShare){2, T, 0, 1}, 6, true, &cross, &e), "%s", e.msg);
    CHECK(dataloader_open(&b, test_file("data_*.bin"), (BatchShare){2, T, 0, 1}, 6, true, &cross, &e), "%s", e.msg);
    b.thread_tried = true;  // as if pthread_create had failed
    for (int i = 0; i < 2 * ROWS; i++) {
        CHECK(dataloader_next(&a, x[0], y[0], &e) && dataloader_next(&b, x[1], y[1], &e), "%s", e.msg);
        CHECK(memcmp(x[0], x[1], sizeof x[0]) == 0 && memcmp(y[0], y[1], sizeof y[0]) == 0, "batch %d", i);
    }
    CHECK(a.threaded, "no thread was started");
    CHECK(!b.threaded, "a thread was started");
    dataloader_close(&a);
    dataloader_close(&b);
    dataloader_close(&b);
}

TEST(a_name_with_brackets_is_taken_as_it_stands) {
    Kind kind = {2, 3001, 1};
    write_shard("set[1].bin", 0, 100, kind);
    DataLoader d;
    Error e = NO_ERROR;
    CHECK(dataloader_open(&d, test_file("set[1].bin"), (BatchShare){1, T, 0, 1}, 0, true, &cross, &e), "%s", e.msg);
    CHECK(d.num_shards == 1 && d.num_tokens == 100, "%d shards", d.num_shards);
    dataloader_close(&d);
}

TEST(files_of_llm_c_with_zeros_in_the_new_words_are_read) {
    unsigned char data[TOKENFILE_HEADER_BYTES + 2 * 50] = {0};
    int32_t words[3] = {TOKENFILE_MAGIC16, 1, 50};
    memcpy(data, words, sizeof words);
    test_write(test_file("old.bin"), data, sizeof data);
    DataLoader d;
    Error e = NO_ERROR;
    CHECK(dataloader_open(&d, test_file("old.bin"), (BatchShare){1, T, 0, 1}, 0, true, &cross, &e), "%s", e.msg);
    CHECK(d.vocab_size == 0 && d.fingerprint == 0 && d.num_tokens == 50, "header misread");
    CHECK(dataloader_check_vocab(&d, 10, 12345, &e), "%s", e.msg);
    dataloader_close(&d);
}

// ---------------------------------------------------------------------------------------------------------------------
// whether the order of rows is as good as a random permutation. Each count below comes from independent keys. So its chi-square
// is known, and a good order passes a check with a probability of 1 - e^-25 (Laurent and Massart, "Adaptive estimation of a
// quadratic functional", 2000, lemma 1).

enum { KEYS = 20000, BINS = 128 };

static double chi_square_limit(int dof) { return dof + 2 * sqrt(dof * 25.0) + 2 * 25.0; }

static void check_even(const uint32_t* counts, int bins, const char* what, uint64_t n) {
    double sum = 0, total = 0;
    for (int i = 0; i < bins; i++) { total += counts[i]; }
    for (int i = 0; i < bins; i++) { sum += (counts[i] - total / bins) * (counts[i] - total / bins) / (total / bins); }
    CHECK(sum <= chi_square_limit(bins - 1), "%llu rows, %s: chi-square %.1f, wanted at most %.1f", (unsigned long long)n, what,
          sum, chi_square_limit(bins - 1));
}

/* Returns which of `bins` equal parts of [0, n) a value is in. */
static int bin_of(uint64_t value, uint64_t n, int bins) {
    return (int)(value < n ? (unsigned __int128)value * (unsigned)bins / n : 0);
}

TEST(each_shard_length_is_permuted) {
    static bool seen[400];
    for (uint64_t n = 1; n <= 400; n++) {
        memset(seen, 0, sizeof seen);
        for (uint64_t x = 0; x < n; x++) {
            const uint64_t row = dataloader_order_row(x, n, 42, 3, 9);
            CHECK(row < n && !seen[row], "%llu rows: row %llu comes twice or does not exist", (unsigned long long)n,
                  (unsigned long long)row);
            if (row < n) { seen[row] = true; }
        }
    }
}

/* Any place may get any row. Its neighbour, the next epoch and another shard say nothing about it. */
TEST(rows_are_spread_evenly) {
    static const uint64_t lengths[] = {2, 3, 4, 5, 7, 9, 10, 16, 64, 100, 1000, 4294967311ull, 1000000000000ull};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        const uint64_t n = lengths[i], places[] = {0, n / 2, n - 1};
        const int bins = n < BINS ? (int)n : n == 1000 ? 100 : BINS;  // a divisor of n, or far below it
        for (size_t p = 0; p < 3; p++) {
            const uint64_t x = places[p], neighbour = (x + 1) % n;
            uint32_t at[BINS] = {0}, step[BINS] = {0}, epoch[BINS] = {0}, shard[BINS] = {0};
            for (uint64_t seed = 0; seed < KEYS; seed++) {
                const uint64_t row = dataloader_order_row(x, n, seed, 0, 0);
                at[bin_of(row, n, bins)]++;
                // the distance from place to place is 1 ... n-1
                const int steps = n < BINS ? (int)n - 1 : bins;
                step[bin_of((dataloader_order_row(neighbour, n, seed, 0, 0) + n - row) % n - 1, n - 1, steps)]++;
                epoch[bin_of((dataloader_order_row(x, n, seed, 0, 1) + n - row) % n, n, bins)]++;
                shard[bin_of((dataloader_order_row(x, n, seed, 1, 0) + n - row) % n, n, bins)]++;
            }
            check_even(at, bins, "the rows at a place", n);
            if (n > 2) { check_even(step, n < BINS ? (int)n - 1 : bins, "the distance of neighbours", n); }
            check_even(epoch, bins, "the distance of epochs", n);
            check_even(shard, bins, "the distance of shards", n);
        }
    }
}

/* In a random permutation of n things, the length of the cycle through a thing is uniform on 1 ... n. */
TEST(cycles_have_every_length) {
    for (uint64_t n = 5; n <= 100; n += 19) {
        uint32_t length[BINS] = {0};
        for (uint64_t seed = 0; seed < KEYS; seed++) {
            int steps = 1;
            for (uint64_t x = dataloader_order_row(0, n, seed, 0, 0); x != 0 && steps < (int)n; steps++) {
                x = dataloader_order_row(x, n, seed, 0, 0);
            }
            length[steps - 1]++;
        }
        check_even(length, (int)n, "the lengths of cycles", n);
    }
}

/* Correlates each row with the next row of its epoch: a random order's correlation has a deviation of 1 / sqrt(n). */
TEST(neighbours_in_an_epoch_are_not_correlated) {
    const uint64_t n = 200000;
    double sum = 0, last = 0;
    for (uint64_t x = 0; x < n; x++) {
        const double row = (double)dataloader_order_row(x, n, 1, 0, 0) / (double)n - 0.5;  // mean 0, variance 1/12
        sum += last * row;
        last = row;
    }
    const double correlation = 12 * sum / (double)n, limit = sqrt(2 * 25.0 / (double)n);
    CHECK(fabs(correlation) < limit, "correlation %.5f, wanted below %.5f", correlation, limit);
}

// ---------------------------------------------------------------------------------------------------------------------
// large files (sparse: holes read as token 0)

static bool write_sparse(const char* name, Kind kind, uint64_t n, const uint64_t* marks, int num_marks) {
    const char* path = test_file(name);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0666);
    TokenFileHeader h = {kind.width, kind.vocab, n, kind.fingerprint, false, 0, false, 0, false};
    int32_t words[TOKENFILE_WORDS];
    tokenfile_header(words, &h);
    bool ok = fd >= 0 && ftruncate(fd, (off_t)(TOKENFILE_HEADER_BYTES + n * (uint64_t)kind.width)) == 0;
    ok = ok && pwrite(fd, words, sizeof words, 0) == (ssize_t)sizeof words;
    for (int i = 0; ok && i < num_marks; i++) {
        uint32_t id = (uint32_t)i + 1;
        off_t at = (off_t)(TOKENFILE_HEADER_BYTES + marks[i] * (uint64_t)kind.width);
        ok = pwrite(fd, &id, (size_t)kind.width, at) == kind.width;
    }
    if (fd >= 0) { close(fd); }
    return ok;
}

static bool sparse_files_work(void) {
    test_elsewhere();
    Kind kind = {2, 0, 0};
    bool ok = write_sparse("probe.bin", kind, (1ull << 31) + 100, NULL, 0);
    test_elsewhere();
    return ok;
}

/* Reads 2^31 + 1,000,000 tokens of two bytes: beyond 4 GiB, and beyond the largest count of the header's word 2. */
TEST(more_than_2_to_the_31_tokens_are_read) {
    if (!sparse_files_work()) {
        SKIP("more_than_2_to_the_31_tokens_are_read", "this file system has no sparse files of 4 GiB");
        return;
    }
    const int long_T = 1 << 20;
    uint64_t n = (1ull << 31) + 1000000, row = (n - 1) / (uint64_t)long_T - 1, first = row * (uint64_t)long_T;
    uint64_t marks[] = {first, first + 5, first + (uint64_t)long_T, (1ull << 30) + 3};  // ids 1, 2, 3, 4
    Kind kind = {2, 100, 9};
    CHECK(write_sparse("big.bin", kind, n, marks, 4), "cannot write");
    DataLoader d;
    Error e = NO_ERROR;
    bool ok = dataloader_open(&d, test_file("big.bin"), (BatchShare){1, long_T, 0, 1}, 0, false, &cross, &e);
    CHECK(ok, "%s", e.msg);
    if (!ok) { return; }
    CHECK(d.num_tokens == n, "%llu tokens", (unsigned long long)d.num_tokens);
    int32_t *x = (int32_t*)xmalloc((size_t)long_T * 4), *y = (int32_t*)xmalloc((size_t)long_T * 4);
    dataloader_seek(&d, row);
    CHECK(dataloader_next(&d, x, y, &e), "%s", e.msg);
    CHECK(x[0] == 1 && x[5] == 2 && x[6] == 0 && y[4] == 2 && y[long_T - 1] == 3, "the last row is not what was written");
    dataloader_seek(&d, (1ull << 30) / (uint64_t)long_T);
    CHECK(dataloader_next(&d, x, y, &e), "%s", e.msg);
    CHECK(x[3] == 4 && y[2] == 4, "the row past 2 GiB is not what was written");
    free(x);
    free(y);
    dataloader_close(&d);
}

// ---------------------------------------------------------------------------------------------------------------------
// the fingerprint

static uint64_t fingerprint_of(const char* pattern) {
    DataLoader d;
    Error e = NO_ERROR;
    uint64_t print = 0;
    CHECK(dataloader_open(&d, pattern, (BatchShare){1, T, 0, 1}, 0, true, &cross, &e) && dataloader_fingerprint(&d, &print, &e),
          "%s", e.msg);
    dataloader_close(&d);
    return print;
}

static void flip_bit(const char* path, uint64_t at) {
    unsigned char byte = 0;
    const int fd = open(path, O_RDWR);
    CHECK(fd >= 0 && pread(fd, &byte, 1, (off_t)at) == 1, "read");
    byte ^= 1;
    CHECK(pwrite(fd, &byte, 1, (off_t)at) == 1 && close(fd) == 0, "write");
}

TEST(the_fingerprint_tells_data_by_content_not_by_folder) {
    write_three_shards(2);
    const uint64_t before = fingerprint_of(test_file("data_*.bin"));
    for (uint64_t i = 0; i < shard_tokens[1]; i++) {  // small files are read whole: every token counts
        flip_bit(test_file("data_001.bin"), TOKENFILE_HEADER_BYTES + 2 * i);
        CHECK(fingerprint_of(test_file("data_*.bin")) != before, "token %llu does not count", (unsigned long long)i);
        flip_bit(test_file("data_001.bin"), TOKENFILE_HEADER_BYTES + 2 * i);
    }
    CHECK(fingerprint_of(test_file("data_00[01].bin")) != before, "a shard less has the same fingerprint");
    CHECK(mkdir(test_file("moved"), 0777) == 0, "mkdir");
    const char* names[SHARDS] = {"data_000.bin", "data_001.bin", "data_002.bin"};
    const char* moved[SHARDS] = {"moved/data_000.bin", "moved/data_001.bin", "moved/data_002.bin"};
    for (int i = 0; i < SHARDS; i++) { CHECK(rename(test_file(names[i]), test_file(moved[i])) == 0, "rename"); }
    CHECK(fingerprint_of(test_file("moved/*.bin")) == before, "another folder has another fingerprint");
    CHECK(rename(test_file(moved[2]), test_file("moved/other.bin")) == 0, "rename");
    CHECK(fingerprint_of(test_file("moved/*.bin")) != before, "another name has the same fingerprint");
    for (int i = 0; i < SHARDS; i++) { unlink(test_file(i < 2 ? moved[i] : "moved/other.bin")); }
}

TEST(the_fingerprint_reads_the_ends_of_a_large_file) {
    const uint64_t n = 1 << 23;  // 16 MiB: 4 times the bytes that are read
    const uint64_t ends[] = {0, n - 1};
    Kind kind = {2, 100, 9};
    CHECK(write_sparse("a.bin", kind, n, NULL, 0), "write");
    const uint64_t before = fingerprint_of(test_file("a.bin"));
    for (int i = 0; i < 2; i++) {
        CHECK(write_sparse("a.bin", kind, n, &ends[i], 1), "write");
        CHECK(fingerprint_of(test_file("a.bin")) != before, "token %llu does not count", (unsigned long long)ends[i]);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// refusals

/* Checks that opening fails with a message that contains all of the parts. */
static void refuses(const char* pattern, int B, int seq, int ranks, const char* part1, const char* part2, const char* part3) {
    DataLoader d;
    Error e = NO_ERROR;
    bool ok = dataloader_open(&d, pattern, (BatchShare){B, seq, 0, ranks}, 1, true, &cross, &e);
    CHECK(!ok, "%s was opened; wanted '%s'", pattern, part1);
    if (ok) {
        dataloader_close(&d);
        return;
    }
    CHECK(strstr(e.msg, part1) && strstr(e.msg, part2) && strstr(e.msg, part3), "'%s' has not '%s', '%s' and '%s'", e.msg,
          part1, part2, part3);
    const char* line = strchr(e.msg, '\n');
    CHECK(!line || (strncmp(line, "\n  hint: ", 9) == 0 && !strchr(line + 1, '\n')), "'%s' is more than a line and a hint",
          e.msg);
    dataloader_close(&d);
}

TEST(what_is_no_file_is_refused) {
    refuses(test_file("nothing_*.bin"), 1, T, 1, "nothing_*.bin", "no such token file", "./tokenize");
    refuses(test_file("nothing.bin"), 1, T, 1, "nothing.bin", "no such token file", "hint");
    refuses(test_here(), 1, T, 1, test_here(), "is a folder, wanted a token file", "*_train.bin");
    CHECK(mkdir(test_file("sub_1.bin"), 0777) == 0, "mkdir");
    refuses(test_file("sub_*.bin"), 1, T, 1, "sub_1.bin", "is a folder", "wanted a regular file");
    CHECK(mkfifo(test_file("pipe.bin"), 0666) == 0, "mkfifo");
    refuses(test_file("pipe.bin"), 1, T, 1, "pipe.bin", "is a pipe", "wanted a regular file");
    if (geteuid() != 0) {
        Kind kind = {2, 0, 0};
        write_shard("locked.bin", 0, 100, kind);
        chmod(test_file("locked.bin"), 0);
        refuses(test_file("locked.bin"), 1, T, 1, "locked.bin", "cannot open", "Permission denied");
    }
}

/* Writes a good file of 100 tokens with one header word changed, or cut to `bytes`. */
static void refuses_header_of(bool masked, int word, int32_t value, int64_t bytes, const char* part1, const char* part2) {
    unsigned char data[TOKENFILE_HEADER_BYTES + 300] = {0};
    int32_t words[TOKENFILE_WORDS];
    TokenFileHeader h = {2, 3001, 100, 5, false, 0, masked, 0, false};
    tokenfile_header(words, &h);
    if (word >= 0) { words[word] = value; }
    memcpy(data, words, sizeof words);
    test_write(test_file("bad.bin"), data, bytes >= 0 ? (size_t)bytes : (size_t)tokenfile_bytes(&h));
    refuses(test_file("bad.bin"), 1, T, 1, "bad.bin", part1, part2);
}

static void refuses_header(int word, int32_t value, int64_t bytes, const char* part1, const char* part2) {
    refuses_header_of(false, word, value, bytes, part1, part2);
}

TEST(a_reader_takes_any_id_until_it_has_a_limit) {
    TokenFileHeader h = {4, 0, 1, 0, false, 0, false, 0, false};
    int32_t words[TOKENFILE_WORDS + 1], id = 0;
    unsigned char raw[4], data[TOKENFILE_HEADER_BYTES + 4] = {0};
    TokenReader r;
    Error e = NO_ERROR;
    tokenfile_header(words, &h);
    words[TOKENFILE_WORDS] = INT32_MAX;
    memcpy(data, words, sizeof words - 4);
    memcpy(data + TOKENFILE_HEADER_BYTES, &words[TOKENFILE_WORDS], 4);
    test_write(test_file("one.bin"), data, sizeof data);
    CHECK(tokenfile_open(&r, test_file("one.bin"), &e) && tokenfile_read_ids(&r, 0, 1, raw, &id, "a token", &e), "%s", e.msg);
    CHECK(id == INT32_MAX, "%d", id);
    tokenfile_close(&r);
}

TEST(a_damaged_header_is_refused) {
    refuses_header(0, 20240519, -1, "magic is 20240519", "20240520");
    refuses_header(0, TOKENFILE_MAGIC32, -1, "version is 1", "wanted 7");
    refuses_header(1, 0, -1, "version is 0", "wanted 1");
    refuses_header(1, 2, -1, "token count is 100 of 2 bytes each and a bit of the mask", "holds 94");
    refuses_header(1, 3, -1, "version is 3", "wanted 1 (or 2: with a mask) beside magic 20240520");
    refuses_header(2, 101, -1, "token count", "word 2");
    refuses_header(2, -5, -1, "token count (word 2) is -5", "wanted 0 or more");
    refuses_header(3, -1, -1, "vocabulary size (word 3) is -1", "wanted 0 or more");
    refuses_header(4, 99, -1, "token count (word 2) is 100", "99");
    refuses_header(5, 1, -1, "token count (word 2) is 100", "4294967396");
    refuses_header(5, INT32_MIN, -1, "token count", "word 2");
    refuses_header(8, 2, -1, "word 8 of the header is 2", "wanted 1");
    refuses_header(8, -1, -1, "word 8 of the header is -1", "wanted 1");
    for (int word = 9; word < TOKENFILE_WORDS; word += word == 9 ? 3 : 1) {  // 10 and 11 are a hash
        char want[64];
        snprintf(want, sizeof want, "word %d of the header is 7", word);
        refuses_header(word, 7, -1, want, "wanted 0");
    }
    refuses_header(-1, 0, 0, "is an empty file", "wanted a token file");
    for (int64_t bytes = 93; bytes < TOKENFILE_HEADER_BYTES; bytes += 93) {
        refuses_header(-1, 0, bytes, "header", "cut short");
    }
    refuses_header(-1, 0, TOKENFILE_HEADER_BYTES, "token count is 100", "holds 0");
    refuses_header(-1, 0, TOKENFILE_HEADER_BYTES + 199, "token count is 100", "holds 99");
    refuses_header(-1, 0, TOKENFILE_HEADER_BYTES + 201, "token count is 100", "cut or extended");
    refuses_header(-1, 0, TOKENFILE_HEADER_BYTES + 202, "token count is 100", "holds 101");
    const char* text = "This is something else, and so on and on, a text that is long enough to fill a whole header: ";
    char other[2000];
    for (size_t i = 0; i < sizeof other; i++) { other[i] = text[i % strlen(text)]; }
    test_write(test_file("other.bin"), other, sizeof other);
    refuses(test_file("other.bin"), 1, T, 1, "other.bin", "magic is", "not a token file");
    memcpy(other, "{\"id\"", 5);
    test_write(test_file("other.bin"), other, sizeof other);
    refuses(test_file("other.bin"), 1, T, 1, "other.bin: is JSON text, wanted a token file", "\n  hint: ", "./tokenize");
    memcpy(other, "\x1f\x8b\x08", 3);
    test_write(test_file("other.bin"), other, 100);
    refuses(test_file("other.bin"), 1, T, 1, "other.bin: is a gzip archive", "\n  hint: zcat ", " | ./tokenize");
}

TEST(a_mask_of_the_wrong_size_is_refused) {
    const char* count = "token count is 100 of 2 bytes each and a bit of the mask";
    refuses_header_of(true, 1, 1, -1, "token count is 100 of 2 bytes each,", "holds 106");
    refuses_header_of(true, 1, 3, -1, "version is 3", "wanted 1 (or 2: with a mask)");
    refuses_header_of(true, 12, 2, -1, "word 12 of the header is 2", "wanted 0, or with a mask 1");
    refuses_header_of(true, 12, 1, -1, "token count is 100", "holds 9");
    refuses_header_of(true, -1, 0, TOKENFILE_HEADER_BYTES, count, "holds 0");
    refuses_header_of(true, -1, 0, TOKENFILE_HEADER_BYTES + 200, count, "holds 94");
    refuses_header_of(true, -1, 0, TOKENFILE_HEADER_BYTES + 212, count, "holds 99");
    refuses_header_of(true, -1, 0, TOKENFILE_HEADER_BYTES + 214, count, "cut or extended");
    for (uint64_t n = 1; n < 2000; n++) {
        for (int width = 2; width <= 4; width += 2) {
            const TokenFileHeader h = {width, 0, n, 0, false, 0, true, 0, false};
            Error e = NO_ERROR;
            CHECK(tokenfile_bytes(&h) == 1024 + n * (uint64_t)width + (n + 7) / 8, "%llu tokens", (unsigned long long)n);
            CHECK(tokenfile_check_size(&h, tokenfile_bytes(&h), "file", &e), "%s", e.msg);
            CHECK(!tokenfile_check_size(&h, tokenfile_bytes(&h) - 1, "file", &e), "%llu tokens", (unsigned long long)n);
            CHECK(!tokenfile_check_size(&h, tokenfile_bytes(&h) + 1, "file", &e), "%llu tokens", (unsigned long long)n);
        }
    }
}

/* llm.c's readers, and ours of the time before masks, know one version for each magic and refuse any other. */
TEST(readers_that_know_no_mask_refuse_it_by_its_version) {
    const TokenFileHeader old16 = {2, 0, 9, 0, false, 0, false, 0, false}, old32 = {4, 0, 9, 0, false, 0, false, 0, false};
    const TokenFileHeader new16 = {2, 0, 9, 0, false, 0, true, 0, false}, new32 = {4, 0, 9, 0, false, 0, true, 0, false};
    const TokenFileHeader* headers[] = {&old16, &old32, &new16, &new32};
    const int32_t want[4][2] = {{20240520, 1}, {20240801, 7}, {20240520, 2}, {20240801, 8}};
    for (int i = 0; i < 4; i++) {
        int32_t words[TOKENFILE_WORDS];
        Error e = NO_ERROR;
        TokenFileHeader h;
        tokenfile_header(words, headers[i]);
        CHECK(words[0] == want[i][0] && words[1] == want[i][1], "magic %d, version %d", words[0], words[1]);
        CHECK(tokenfile_check(&h, words, tokenfile_bytes(headers[i]), "file", &e), "%s", e.msg);
        CHECK(h.masked == (i >= 2), "case %d: masked is %d", i, h.masked);
    }
}

TEST(shards_that_differ_are_refused_by_both_names) {
    Kind a = {2, 3001, 5}, wide = {4, 3001, 5}, vocab = {2, 3002, 5}, other = {2, 3001, 6}, unknown = {2, 0, 0};
    write_shard("s0.bin", 0, 100, a);
    write_shard("s1.bin", 0, 100, unknown);
    write_shard("s2.bin", 0, 100, wide);
    refuses(test_file("s*.bin"), 1, T, 1, "s2.bin: has uint32", "s0.bin has uint16", "alike");
    write_shard("s2.bin", 0, 100, vocab);
    refuses(test_file("s*.bin"), 1, T, 1, "s2.bin: vocabulary is 3002", "s0.bin it is 3001", "alike");
    write_shard("s2.bin", 0, 100, other);
    refuses(test_file("s*.bin"), 1, T, 1, "s2.bin: was made with another tokenizer", "s0.bin", "alike");
    write_shard("s0.bin", 0, 100, unknown);
    write_shard("s1.bin", 0, 100, a);
    refuses(test_file("s*.bin"), 1, T, 1, "s2.bin: was made with another tokenizer", "s1.bin", "alike");
    write_shard("s2.bin", 0, 100, unknown);
    DataLoader d;
    Error e = NO_ERROR;
    CHECK(dataloader_open(&d, test_file("s*.bin"), (BatchShare){1, T, 0, 1}, 0, true, &cross, &e), "%s", e.msg);
    CHECK(d.vocab_size == 3001 && d.fingerprint == 5, "what one shard tells holds for all");
    dataloader_close(&d);
}

TEST(too_little_data_is_refused) {
    Kind kind = {2, 3001, 5};
    write_shard("a.bin", 0, 100, kind);
    write_shard("b.bin", 0, 8, kind);
    refuses(test_file("*.bin"), 1, T, 1, "b.bin: holds 8 tokens", "wanted at least 9",
            "--seq 7 or less, or leave this file out");
    write_shard("b.bin", 0, 0, kind);
    refuses(test_file("*.bin"), 1, T, 1, "b.bin: holds 0 tokens", "there is no text", "");
    write_shard("b.bin", 0, 9, kind);
    refuses(test_file("*.bin"), 14, T, 1, "holds 13 rows", "wanted at least 14", "smaller --batch");
    refuses(test_file("*.bin"), 7, T, 2, "holds 13 rows", "--batch 7 on 2 ranks", "hint");
    refuses(test_file("a.bin"), 1, INT32_MAX, 1, "a.bin: holds 100 tokens", "wanted at least 2147483648", "hint");
    refuses(test_file("a.bin"), INT32_MAX, 1, 8, "holds 99 rows", "wanted at least 17179869176", "hint");
}

TEST(another_vocabulary_or_tokenizer_is_refused) {
    Kind kind = {2, 3001, 5};
    write_shard("a.bin", 0, 100, kind);
    DataLoader d;
    Error e = NO_ERROR;
    CHECK(dataloader_open(&d, test_file("a.bin"), (BatchShare){1, T, 0, 1}, 0, true, &cross, &e), "%s", e.msg);
    CHECK(!dataloader_check_vocab(&d, 3000, 0, &e), "3,001 tokens fitted a model of 3,000");
    CHECK(strstr(e.msg, "a.bin: vocabulary is 3001 tokens, but the model has only 3000\n  hint: "), "%s", e.msg);
    e.msg[0] = 0;
    CHECK(!dataloader_check_vocab(&d, 3001, 6, &e), "another fingerprint was taken");
    CHECK(strstr(e.msg, "a.bin: was made with another tokenizer (fingerprint 0000000000000005)") && strstr(e.msg, "hint: "),
          "%s", e.msg);
    e.msg[0] = 0;
    CHECK(dataloader_check_vocab(&d, 3001, 5, &e) && dataloader_check_vocab(&d, 4000, 0, &e), "%s", e.msg);
    // the run's own tokenizer may have more tokens than the model, if the data has none of them
    int most = 0;
    for (uint64_t i = 0; i < 100; i++) { most = (int)token_at(0, i) > most ? (int)token_at(0, i) : most; }
    CHECK(dataloader_check_vocab(&d, most + 1, 5, &e), "%s", e.msg);
    CHECK(!dataloader_check_vocab(&d, most, 5, &e) && strstr(e.msg, ", wanted below "), "%s", e.msg);
    dataloader_close(&d);
}

TEST(a_token_outside_the_vocabulary_is_named) {
    Kind kinds[] = {{2, 2000, 5}, {2, 0, 0}, {4, 2000, 5}, {4, 0, 0}};
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        test_elsewhere();
        write_shard("a.bin", 0, 1001, kinds[k]);
        uint64_t bad = 0;
        while (token_at(0, bad) < 2000) { bad++; }
        char want[200];
        snprintf(want, sizeof want, "a.bin: token %llu is id %u, wanted below 2000", (unsigned long long)bad, token_at(0, bad));
        DataLoader d;
        Error e = NO_ERROR;
        int32_t x[T], y[T];
        CHECK(dataloader_open(&d, test_file("a.bin"), (BatchShare){1, T, 0, 1}, 0, false, &cross, &e), "%s", e.msg);
        CHECK(dataloader_check_vocab(&d, 2000, 0, &e), "%s", e.msg);
        uint64_t good = 0;
        while (dataloader_next(&d, x, y, &e)) { good++; }
        CHECK(good == (bad - 1) / T, "%llu rows were given before the bad one", (unsigned long long)good);
        CHECK(strstr(e.msg, want), "'%s' has not '%s'", e.msg, want);
        CHECK(d.row == good, "the position moved on");
        Error again = NO_ERROR;
        CHECK(!dataloader_next(&d, x, y, &again) && strcmp(again.msg, e.msg) == 0, "the second time: '%s'", again.msg);
        dataloader_close(&d);
    }
}

TEST(an_id_past_int32_is_refused) {
    Kind kind = {4, 0, 0};
    write_shard("a.bin", 0, 100, kind);
    FILE* f = fopen(test_file("a.bin"), "r+b");
    uint32_t id = 0x80000000u;
    CHECK(f && fseek(f, TOKENFILE_HEADER_BYTES + 4 * 3, SEEK_SET) == 0 && fwrite(&id, 4, 1, f) == 1 && fclose(f) == 0, "write");
    DataLoader d;
    Error e = NO_ERROR;
    int32_t x[T], y[T];
    CHECK(dataloader_open(&d, test_file("a.bin"), (BatchShare){1, T, 0, 1}, 0, false, &cross, &e), "%s", e.msg);
    CHECK(!dataloader_next(&d, x, y, &e) && strstr(e.msg, "token 3 is id 2147483648"), "%s", e.msg);
    dataloader_close(&d);
    id--;  // the last that is none
    f = fopen(test_file("a.bin"), "r+b");
    CHECK(f && fseek(f, TOKENFILE_HEADER_BYTES + 4 * 3, SEEK_SET) == 0 && fwrite(&id, 4, 1, f) == 1 && fclose(f) == 0, "write");
    CHECK(dataloader_open(&d, test_file("a.bin"), (BatchShare){1, T, 0, 1}, 0, false, &cross, &e) &&
              dataloader_next(&d, x, y, &e),
          "%s", e.msg);
    dataloader_close(&d);
}

/* Returns the error of a scan of all of the data, or "" if it finds none. */
static const char* scan(const char* pattern) {
    static Error e;
    DataLoader d;
    e.msg[0] = 0;
    const bool ok =
        dataloader_open(&d, pattern, (BatchShare){1, T, 0, 1}, 0, true, &cross, &e) && dataloader_scan(&d, NULL, &e);
    CHECK(ok == !e.msg[0], "%s", e.msg);
    dataloader_close(&d);
    return e.msg;
}

TEST(a_scan_finds_each_changed_bit_and_each_wrong_id) {
    Kind kind = {2, 3001, 5}, small = {4, 3001, 5};
    write_shard("a.bin", 0, 100, kind);
    write_shard("b.bin", 1, 60, kind);
    CHECK(!*scan(test_file("*.bin")), "%s", scan(test_file("*.bin")));
    for (uint64_t byte = 0; byte < 120; byte++) {
        flip_bit(test_file("b.bin"), TOKENFILE_HEADER_BYTES + byte);
        const char* error = scan(test_file("*.bin"));
        CHECK(strstr(error, "b.bin: "), "byte %llu: '%s'", (unsigned long long)byte, error);
        CHECK(strstr(error, "checksum of its tokens is") || strstr(error, "wanted below 3001"), "'%s'", error);
        flip_bit(test_file("b.bin"), TOKENFILE_HEADER_BYTES + byte);
    }
    CHECK(!*scan(test_file("*.bin")), "%s", scan(test_file("*.bin")));
    flip_bit(test_file("b.bin"), 9 * 4);
    CHECK(strstr(scan(test_file("*.bin")), "b.bin: the checksum of its tokens is"), "%s", scan(test_file("*.bin")));
    test_elsewhere();
    write_shard("a.bin", 0, 700000, small);  // several pieces; the last token lies after the last row
    CHECK(!*scan(test_file("a.bin")), "%s", scan(test_file("a.bin")));
    const uint32_t id = 3001;
    const int fd = open(test_file("a.bin"), O_WRONLY);
    CHECK(fd >= 0 && pwrite(fd, &id, 4, TOKENFILE_HEADER_BYTES + 4 * 699999) == 4 && close(fd) == 0, "write");
    CHECK(strstr(scan(test_file("a.bin")), "a.bin: token 699999 is id 3001, wanted below 3001"), "%s",
          scan(test_file("a.bin")));
}

TEST(a_scan_reads_the_mask) {
    const uint64_t lengths[] = {96, 97, 103, 700000};
    for (size_t k = 0; k < 4; k++) {
        const Kind kind = {2, 3001, 5};
        const TokenFileHeader h = {2, 3001, lengths[k], 5, true, 0, true, 0, false};
        const uint64_t mask = tokenfile_mask_at(&h), end = tokenfile_bytes(&h);
        test_elsewhere();
        write_masked_shard("m.bin", 2, lengths[k], kind, true);
        CHECK(!*scan(test_file("m.bin")), "%s", scan(test_file("m.bin")));
        for (uint64_t byte = mask; byte < end; byte += 1 + (end - mask) / 13) {
            flip_bit(test_file("m.bin"), byte);
            CHECK(strstr(scan(test_file("m.bin")), "m.bin: the checksum of its tokens and mask is"), "byte %llu: '%s'",
                  (unsigned long long)byte, scan(test_file("m.bin")));
            flip_bit(test_file("m.bin"), byte);
        }
        if (lengths[k] % 8 == 0) { continue; }
        unsigned char last = 0x80;
        const int fd = open(test_file("m.bin"), O_RDWR);
        CHECK(fd >= 0 && pwrite(fd, &last, 1, (off_t)end - 1) == 1 && close(fd) == 0, "write");
        CHECK(strstr(scan(test_file("m.bin")), "m.bin: the bits behind the mask's last are not all 0"), "%s",
              scan(test_file("m.bin")));
    }
}

/* Damages the only shard, or one of two, in the middle of a run; then makes it whole again. */
static void damage_during_a_run(int shards, bool vanish, off_t bytes, const char* part1, const char* part2) {
    test_elsewhere();
    Kind kind = {2, 3001, 5};
    write_shard("s0.bin", 0, 801, kind);
    if (shards == 2) { write_shard("s1.bin", 1, 801, kind); }
    DataLoader d;
    Error e = NO_ERROR;
    int32_t x[2][T], y[2][T];
    const char* last = test_file(shards == 2 ? "s1.bin" : "s0.bin");
    const uint64_t row = shards == 2 ? 100 : 50;  // the first of the second shard, or the middle of the only one
    CHECK(dataloader_open(&d, test_file("s*.bin"), (BatchShare){1, T, 0, 1}, 0, false, &cross, &e), "%s", e.msg);
    dataloader_seek(&d, row);
    CHECK(dataloader_next(&d, x[0], y[0], &e), "%s", e.msg);
    dataloader_seek(&d, 0);
    CHECK(dataloader_next(&d, x[1], y[1], &e) && dataloader_next(&d, x[1], y[1], &e), "%s", e.msg);
    dataloader_wait(&d);
    CHECK(vanish ? rename(last, test_file("away")) == 0 : truncate(last, bytes) == 0, "damage");
    dataloader_seek(&d, row);
    for (int twice = 0; twice < 2; twice++) {
        e.msg[0] = 0;
        CHECK(!dataloader_next(&d, x[1], y[1], &e), "a damaged shard was read");
        CHECK(strstr(e.msg, part1) && strstr(e.msg, part2), "'%s' has not '%s' and '%s'", e.msg, part1, part2);
        CHECK(d.row == row, "the position moved to %llu", (unsigned long long)d.row);
    }
    if (vanish) {
        CHECK(rename(test_file("away"), last) == 0, "rename");
    } else {
        write_shard(shards == 2 ? "s1.bin" : "s0.bin", shards - 1, 801, kind);
    }
    CHECK(dataloader_next(&d, x[1], y[1], &e), "%s", e.msg);
    CHECK(memcmp(x[0], x[1], sizeof x[0]) == 0 && memcmp(y[0], y[1], sizeof y[0]) == 0, "other tokens after the repair");
    dataloader_close(&d);
}

TEST(a_shard_that_changes_during_a_run_is_an_error_that_can_be_mended) {
    for (int shards = 1; shards <= 2; shards++) {
        damage_during_a_run(shards, false, TOKENFILE_HEADER_BYTES + 200, "has 1224 bytes, wanted 2626",
                            "cut while it was in use");
        damage_during_a_run(shards, false, TOKENFILE_HEADER_BYTES + 1600, "has 2624 bytes", "cut while it was in use");
        damage_during_a_run(shards, false, 0, "has 0 bytes", "cut while it was in use");
        damage_during_a_run(shards, false, 4096, "has 4096 bytes", "extended while it was in use");
    }
    damage_during_a_run(2, true, 0, "s1.bin", "No such file");  // a single shard would still be open, and readable
}

int main(void) { return test_all(); }
