/* data_fingerprint.h -- tells token files apart by their names, sizes, headers and samples of their tokens. */
#ifndef LLMC_DATA_FINGERPRINT_H
#define LLMC_DATA_FINGERPRINT_H

#include "llmc/base/utils.h"

#include "llmc/base/crc.h"
#include "llmc/files/dataloader.h"

/* Computes the fingerprint of the shards, the same in any folder. Reads at most 1024 blocks of 4 KiB, evenly spread, or two a
 * shard if there are more shards: the first block, which holds the header, and the last. */
static inline bool dataloader_fingerprint(const DataLoader* d, uint64_t* fingerprint, Error* e) {
    enum { BLOCK = 4096, BLOCKS = 1024 };
    const uint64_t each = size_max(2, (size_t)BLOCKS / (size_t)d->num_shards);
    char block[BLOCK];
    Crc low, high;  // of all, and of all but the names and sizes: two halves that differ
    crc_begin(&low);
    crc_begin(&high);
    for (int i = 0; i < d->num_shards; i++) {
        const char* path = d->shards[i].path;
        const char* slash = strrchr(path, '/');
        uint64_t size = 0;
        FILE* f = open_input(path, &size, e);
        if (!f) { return false; }
        crc_add(&low, slash ? slash + 1 : path, strlen(slash ? slash + 1 : path) + 1);
        crc_add(&low, &size, sizeof size);
        const size_t n = size_min(size, BLOCK);
        const uint64_t last = size - n;
        bool ok = true;
        for (uint64_t k = 0; ok && k < each; k++) {
            const uint64_t at = (uint64_t)((double)last * ((double)k / (double)(each - 1)));
            ok = read_at(fileno(f), k + 1 == each ? last : at, block, n, path, "the file", e);
            crc_add(&low, block, n);
            crc_add(&high, block, n);
        }
        fclose(f);
        if (!ok) { return false; }
    }
    *fingerprint = (uint64_t)crc_end(&high) << 32 | crc_end(&low);
    return true;
}

#endif
