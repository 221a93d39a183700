/* data_scan.h -- reads all data of a run for --dry-run: every id and every checksum, with progress on stdout after two seconds.
 */
#ifndef LLMC_DATA_SCAN_H
#define LLMC_DATA_SCAN_H

#include "llmc/base/utils.h"        // defines: now_seconds
#include "llmc/files/dataloader.h"  // defines: DataLoader, dataloader_scan

#include <unistd.h>

typedef struct {
    FILE* screen;
    uint64_t done, all;  // bytes
    double start, last;  // seconds; of the last line
    bool terminal, shown;
} DataScan;

/* Shows how far the scan is, at most every two seconds. At a terminal each line takes the place of the one before. */
static inline void data_scan_progress(void* ctx, size_t bytes) {
    DataScan* s = (DataScan*)ctx;
    const double now = now_seconds();
    s->done += bytes;
    if (now - s->last < 2) { return; }
    s->last = now;
    s->shown = true;
    fprintf(s->screen, "%sscan    %5.1f %% of %.1f GB, %.2f GB/s%s", s->terminal ? "\r" : "",
            100.0 * (double)s->done / (double)s->all, (double)s->all * 1e-9, (double)s->done * 1e-9 / (now - s->start),
            s->terminal ? "" : "\n");
    fflush(s->screen);
}

/* Scans the data behind `pattern` (for the message). Fails on the first id that is no token and the first wrong checksum. */
static inline bool data_scan(const DataLoader* d, const char* pattern, FILE* screen, Error* e) {
    const double now = now_seconds();
    DataScan s = {screen, 0, d->num_tokens * (uint64_t)d->token_bytes, now, now, isatty(fileno(screen)) != 0, false};
    const bool ok = dataloader_scan(d, data_scan_progress, &s, e);
    if (s.shown && s.terminal) { fprintf(screen, "\n"); }
    if (ok) { fprintf(screen, "scan    %s: all ids are below %lld\n", pattern, (long long)d->vocab_limit); }
    return ok;
}

#endif
