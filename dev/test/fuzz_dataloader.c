/* fuzz_dataloader.c -- reads the bytes as one or two token files. What opens must give every row of two epochs, each token
 * below the vocabulary size, or an error; what a scan finds whole gives every row. The first byte sets B, T, shuffle and the thread; the next two say where the second
 * file begins (0: no second file). */
#include "llmc/files/dataloader.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

static char folder[1024];

static void remove_folder(void) { rmdir(folder); }

static void write_part(const char* path, const uint8_t* data, size_t size) {
    FILE* f = fopen(path, "wb");
    if (!f || fwrite(data, 1, size, f) != size || fclose(f) != 0) { die("%s: cannot write", path); }
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    char first[1100], second[1100], pattern[1100];
    if (size < 3) { return 0; }
    if (!folder[0]) {
        const char* base = getenv("TEST_TMP");
        snprintf(folder, sizeof folder, "%s/fuzz_dataloader_XXXXXX", base && *base ? base : "/tmp");
        if (!mkdtemp(folder)) { die("%s: cannot make a folder", folder); }
        atexit(remove_folder);
    }
    snprintf(first, sizeof first, "%s/0.bin", folder);
    snprintf(second, sizeof second, "%s/1.bin", folder);
    snprintf(pattern, sizeof pattern, "%s/*.bin", folder);
    size_t cut = (size_t)data[1] | (size_t)data[2] << 8, rest = size - 3;
    bool two = cut > 0 && cut < rest;
    write_part(first, data + 3, two ? cut : rest);
    if (two) { write_part(second, data + 3 + cut, rest - cut); }
    const int B = 1 + (data[0] & 3), T = 1 + (data[0] >> 2 & 15);
    DataLoader d;
    Error e = NO_ERROR;
    bool ok = dataloader_open(&d, pattern, B, T, 0, 1, 1, data[0] >> 6 & 1, &e);
    if (ok == (e.msg[0] != 0)) { abort(); }
    if (ok) {
        int32_t x[4 * 16], y[4 * 16];
        d.thread_tried = data[0] >> 7;  // half of the inputs run without a thread
        if (d.num_tokens * (uint64_t)d.token_bytes > size) { abort(); }
        uint64_t print;
        Error bad = NO_ERROR;
        if (!dataloader_fingerprint(&d, &print, &bad)) { abort(); }
        ok = dataloader_check_vocab(&d, 70000, 0, &e);
        const bool whole = ok && dataloader_scan(&d, NULL, NULL, &bad);
        if (ok && whole == (bad.msg[0] != 0)) { abort(); }
        while (ok && d.row < 2 * d.rows_per_epoch) {
            ok = dataloader_next(&d, x, y, &e);
            for (int i = 0; ok && i < B * T; i++) {
                if (x[i] < 0 || x[i] >= d.vocab_limit || (i % T > 0 && x[i] != y[i - 1])) { abort(); }
            }
        }
        if (ok == (e.msg[0] != 0) || (whole && !ok)) { abort(); }
        dataloader_close(&d);
    }
    unlink(first);
    if (two) { unlink(second); }
    return 0;
}
