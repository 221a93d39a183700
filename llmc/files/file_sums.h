/* file_sums.h -- sizes and CRC-32C checksums of a checkpoint's files. */
#ifndef LLMC_FILE_SUMS_H
#define LLMC_FILE_SUMS_H

#include "llmc/base/utils.h"

#include <fnmatch.h>
#include <inttypes.h>

#include "llmc/base/crc.h"
#include "llmc/base/progress.h"  // defines: Progress, progress_add

#ifndef FILE_SUM_PIECE
#define FILE_SUM_PIECE (1 << 20)  // bytes a thread reads at once; tests set it smaller
#endif

typedef struct {
    char name[256];  // relative to the checkpoint's folder
    uint64_t size;
    uint32_t crc;
} FileSum;

typedef struct {
    FileSum* items;
    size_t count;
} FileSums;

static inline void file_sums_add(FileSums* sums, const char* name, uint64_t size, uint32_t crc) {
    if (!sums) { return; }
    sums->items = (FileSum*)xrealloc(sums->items, (sums->count + 1) * sizeof(FileSum));
    FileSum* s = &sums->items[sums->count++];
    memset(s, 0, sizeof *s);
    memcpy(s->name, name, size_min(strlen(name), sizeof s->name - 1));
    s->size = size;
    s->crc = crc;
}

static inline void file_sums_free(FileSums* sums) {
    free(sums->items);
    memset(sums, 0, sizeof *sums);
}

/* Returns the entry of this name, or NULL. */
static inline const FileSum* file_sums_find(const FileSums* sums, const char* name) {
    for (size_t i = 0; i < sums->count; i++) {
        if (strcmp(sums->items[i].name, name) == 0) { return &sums->items[i]; }
    }
    return NULL;
}

/* Returns the CRC-32C of a checkpoint's weights: of its weight files one after the other. */
static inline uint32_t file_sums_weights(const FileSums* sums) {
    uint32_t crc = 0;
    for (size_t i = 0; i < sums->count; i++) {
        const FileSum* s = &sums->items[i];
        const bool adapters = strcmp(s->name, "adapter_model.safetensors") == 0;  // it holds either adapters or a model
        if (adapters || fnmatch("model*.safetensors", s->name, 0) == 0) { crc = crc_shift(crc, s->size) ^ s->crc; }
    }
    return crc;
}

static inline int file_sums_compare(const void* a, const void* b) {
    return strcmp(((const FileSum*)a)->name, ((const FileSum*)b)->name);
}

/* Computes the size and checksum of a file. All threads read it together. `progress` (or NULL) counts the bytes. */
static inline bool file_sum(const char* path, uint64_t* size, uint32_t* crc, Progress* progress, Error* e) {
    FILE* f = open_input(path, size, e);
    if (!f) { return false; }
    const uint64_t total = *size, pieces = (total + FILE_SUM_PIECE - 1) / FILE_SUM_PIECE;
    uint32_t sum = 0;
    bool ok = true;
#pragma omp parallel if (pieces > 1) reduction(^ : sum) reduction(&& : ok)
    {
        char* piece = (char*)xmalloc(FILE_SUM_PIECE);
        Error cause = NO_ERROR;
#pragma omp for schedule(dynamic)
        for (uint64_t i = 0; i < pieces; i++) {
            const size_t n = size_min((size_t)(total - i * FILE_SUM_PIECE), FILE_SUM_PIECE);
            ok = ok && read_at(fileno(f), i * FILE_SUM_PIECE, piece, n, path, "the file", &cause);
            if (ok) { sum ^= crc_shift(crc_of(piece, n), total - i * FILE_SUM_PIECE - n); }
#pragma omp critical(file_sum_progress)
            if (ok) { progress_add(progress, n); }
        }
        free(piece);
#pragma omp critical
        if (!ok) { fail(e, "%s", cause.msg); }
    }
    fclose(f);
    *crc = sum;
    return ok;
}

/* Checks a file's checksum against the recorded one. */
static inline bool file_sum_check(const FileSum* wanted, const char* path, uint32_t crc, Error* e) {
    if (crc == wanted->crc) { return true; }
    return fail(e, "%s: the checksum is %" PRIu32 ", wanted %" PRIu32 " as trainer_state.json says: the file is damaged", path,
                crc, wanted->crc);
}

#endif
