/* fuzz_dataloader.c -- reads the bytes as one or two token files. Files that open must give every row of two epochs, each
 * token below the vocabulary size, or an error. Files that a scan calls whole must give every row. The first byte sets B, T,
 * shuffle and the thread. The next two say where the second file begins (0: no second file), how rows are made, and the id of
 * BOS. */
#include "fuzz.h"
#include "llmc/files/dataloader.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    char first[PATH_CAP], second[PATH_CAP], pattern[PATH_CAP];
    if (size < 3) { return 0; }
    fuzz_path(first, "0.bin");
    fuzz_path(second, "1.bin");
    fuzz_path(pattern, "*.bin");
    size_t cut = (size_t)data[1] | (size_t)(data[2] & 63) << 8, rest = size - 3;
    bool two = cut > 0 && cut < rest;
    fuzz_write(first, data + 3, two ? cut : rest);
    if (two) { fuzz_write(second, data + 3 + cut, rest - cut); }
    const int B = 1 + (data[0] & 3), T = 1 + (data[0] >> 2 & 15);
    DataLoader d;
    Error e = NO_ERROR;
    const RowRule rule = {(Documents)(data[2] >> 6), data[1], 0, true, NULL, NULL};
    bool ok = dataloader_open(&d, pattern, (BatchShare){B, T, 0, 1}, 1, data[0] >> 6 & 1, &rule, &e);
    fuzz_check_error(ok, &e);
    if (ok) {
        int32_t x[4 * 16], y[4 * 16];
        d.thread_tried = data[0] >> 7;  // half of the inputs run without a thread
        uint64_t print;
        Error bad = NO_ERROR, refused = NO_ERROR;
        REQUIRE(d.num_tokens * (uint64_t)d.token_bytes <= size);
        REQUIRE(dataloader_fingerprint(&d, &print, &bad));
        fuzz_check_error(dataloader_check_vocab(&d, 1 + data[0], 1, &refused), &refused);
        ok = dataloader_check_vocab(&d, 70000, 0, &e);
        const bool whole = ok && dataloader_scan(&d, NULL, &bad);
        REQUIRE(!ok || whole == !bad.msg[0]);
        while (ok && d.row < 2 * d.rows_per_epoch) {
            ok = dataloader_next(&d, x, y, &e);
            for (int i = 0; ok && i < B * T; i++) {
                REQUIRE(x[i] >= 0 && x[i] < d.vocab_limit && y[i] >= -1 && y[i] < d.vocab_limit);
                REQUIRE(d.indexed || i % T == 0 || x[i] == y[i - 1]);
                REQUIRE(!d.starts || (d.starts[i] >= 0 && d.starts[i] <= i % T));
            }
        }
        fuzz_check_error(ok, &e);
        REQUIRE(ok || !whole);
        dataloader_close(&d);
    }
    unlink(first);
    if (two) { unlink(second); }
    return 0;
}
