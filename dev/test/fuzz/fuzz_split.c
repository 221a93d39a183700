/* fuzz_split.c -- splits a token file of the bytes into training and validation, as ./tokenize --val-fraction does. The first
 * byte gives the fraction and whether there is a mask, the second the separator and the width of a token. Both parts must have
 * a token, and together they must be the whole. If a document begins near the wanted place, the cut must be there; with a
 * mask, the cut may be at any place. */
#include "fuzz.h"

#define main tokenize_main
#include "dev/data/tokenize.c"
#undef main

enum { MOST = 4096, REPEAT = 5, REPEATED = MOST - 8 };  // the longest inputs are repeated, to pass the size of a copied piece

static uint8_t marks[MOST * REPEAT];

/* The marks of these tests: odd tokens are trained, and documents start at the separator. */
static void add_all(TokenFile* w, const int32_t* ids, size_t n, int separator) {
    Error e = NO_ERROR;
    must(token_file_add(w, ids, n, &e), &e);
    for (size_t i = 0; w->masked && i < n; i++) {
        marks[i] = (uint8_t)((ids[i] & 1) * TOKEN_IS_TRAINED + (ids[i] == separator) * TOKEN_STARTS);
    }
    if (w->masked) { token_file_mask(w, marks, n); }
}

static void check_mask(const TokenFile* w, const int32_t* ids) {
    uint64_t trained = 0;
    for (uint64_t i = 0; w->masked && i < w->count; i++) {
        REQUIRE(tokenfile_bit(w->mask, i) == (ids[i] & 1));
        trained += ids[i] & 1;
    }
    REQUIRE(w->trained == trained);
    for (uint64_t i = w->count; i < 8 * w->mask_cap; i++) { REQUIRE(!tokenfile_bit(w->mask, i)); }
}

static void read_all(TokenFile* w, int32_t* ids) {
    Error e = NO_ERROR;
    for (uint64_t at = 0; at < w->count; at += CONVERT_TOKENS) {
        must(token_file_read(w, ids + at, at, size_min(CONVERT_TOKENS, w->count - at), &e), &e);
    }
}

/* Closes and removes a file that gets no name. */
static void discard(TokenFile* w) {
    if (!w->f) { return; }
    fclose(w->f);
    free(w->mask);
    free(w->starts);
    close(w->lock);
    unlink(w->tmp);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static int32_t ids[MOST * REPEAT], back[MOST * REPEAT];
    char path[PATH_CAP];
    if (size < 2 || size > MOST) { return 0; }
    const double fraction = (data[0] + 0.5) / 256;
    const bool masked = data[0] & 1;
    const int separator = data[1] & 1 ? data[1] >> 2 : -1, bytes = data[1] & 2 ? 4 : 2;
    const size_t n = (size - 2) * (size >= REPEATED ? REPEAT : 1);
    for (size_t i = 0; i < n; i++) { ids[i] = data[2 + i % (size - 2)]; }
    TokenFile train, val;
    Error e = NO_ERROR;
    memset(&train, 0, sizeof train);
    memset(&val, 0, sizeof val);
    must(token_file_create(&train, fuzz_path(path, "train.bin"), bytes, masked, &e), &e);
    add_all(&train, ids, n, separator);
    uint64_t cut = 0;
    bool border = false;
    for (size_t i = 1; i < n; i++) { border = border || ids[i] == separator; }
    const bool ok = find_cut(&train, fraction, separator, &cut, &e);
    fuzz_check_error(ok, &e);
    REQUIRE(ok == (n >= 2 && (border || !masked)));
    if (ok) {
        must(token_file_create(&val, fuzz_path(path, "val.bin"), bytes, masked, &e) && split_off(&train, &val, cut, &e), &e);
        REQUIRE(cut > 0 && cut < n && train.count == cut && val.count == n - cut);
        read_all(&train, back);
        read_all(&val, back + cut);
        REQUIRE(memcmp(ids, back, n * sizeof *ids) == 0);
        check_mask(&train, ids);
        check_mask(&val, ids + cut);
        REQUIRE(!masked || ids[cut] == separator);
        const double wanted = (double)n * (1 - fraction), reach = (double)n * fraction / 2;
        bool near = false;
        for (size_t i = 1; i < n; i++) { near = near || (ids[i] == separator && fabs((double)i - wanted) < reach - 1); }
        REQUIRE(!near || ids[cut] == separator);
    }
    discard(&train);
    discard(&val);
    return 0;
}
