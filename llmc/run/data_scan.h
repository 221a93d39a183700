/* data_scan.h -- reads all data of a run for --dry-run, every id and every checksum, and shows on stdout how far such a scan
 * is, after two seconds.
 */
#ifndef LLMC_DATA_SCAN_H
#define LLMC_DATA_SCAN_H

#include "llmc/base/utils.h"        // defines: now_seconds
#include "llmc/files/dataloader.h"  // defines: DataLoader, dataloader_scan

#include <unistd.h>

typedef struct {
    FILE* screen;
    const char* word;    // what is done
    uint64_t done, all;  // bytes; all 0: unknown
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
    fprintf(s->screen, "%s%-7s ", s->terminal ? "\r" : "", s->word);
    if (s->all > 0) {
        fprintf(s->screen, "%5.1f %% of %.1f GB", 100.0 * (double)s->done / (double)s->all, (double)s->all * 1e-9);
    } else {
        fprintf(s->screen, "%.1f GB", (double)s->done * 1e-9);
    }
    fprintf(s->screen, ", %.2f GB/s%s", (double)s->done * 1e-9 / (now - s->start), s->terminal ? "" : "\n");
    fflush(s->screen);
}

/* Begins to show progress. `all`: bytes to read; 0: unknown. */
static inline DataScan data_scan_begin(FILE* screen, const char* word, uint64_t all) {
    const double now = now_seconds();
    const DataScan s = {screen, word, 0, all, now, now, isatty(fileno(screen)) != 0, false};
    return s;
}

static inline void data_scan_end(const DataScan* s) {
    if (s->shown && s->terminal) { fprintf(s->screen, "\n"); }
}

/* Scans the data behind `pattern` (for the message). Fails on the first id that is no token and the first wrong checksum. */
static inline bool data_scan(const DataLoader* d, const char* pattern, FILE* screen, Error* e) {
    DataScan s =
        data_scan_begin(screen, "scan", d->num_tokens * (uint64_t)d->token_bytes + (d->masked ? d->num_tokens / 8 : 0));
    const bool ok = dataloader_scan(d, data_scan_progress, &s, e);
    data_scan_end(&s);
    if (ok) { fprintf(screen, "scan    %s: all ids are below %lld\n", pattern, (long long)d->vocab_limit); }
    return ok;
}

#endif
