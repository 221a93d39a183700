/* data_scan.h -- reads all data of a run for --dry-run: every id and every checksum. */
#ifndef LLMC_DATA_SCAN_H
#define LLMC_DATA_SCAN_H

#include "llmc/base/utils.h"
#include "llmc/files/dataloader.h"     // defines: DataLoader, dataloader_scan
#include "llmc/run/screen/progress.h"  // defines: Progress, progress_begin, progress_add, progress_end
#include "llmc/base/text.h"            // defines: print_names

/* A TokenFileProgress for a Progress. */
static inline void data_scan_add(void* progress, size_t bytes) { progress_add((Progress*)progress, bytes); }

/* Scans the data behind `pattern` (for the message). Fails on the first id that is no token and the first wrong checksum. */
static inline bool data_scan(const DataLoader* d, const char* pattern, FILE* screen, Error* e) {
    const uint64_t bits = d->masked ? d->num_tokens / 8 : 0;
    Progress p = progress_begin(screen, "scan", d->num_tokens * (uint64_t)d->token_bytes + bits, "B");
    const bool ok = dataloader_scan(d, data_scan_add, &p, e);
    progress_end(&p);
    if (ok) { print_names(screen, "scan    %s: all ids are below %lld\n", pattern, (long long)d->vocab_limit); }
    return ok;
}

#endif
