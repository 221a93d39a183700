/* watched.h -- shows the progress of weights and states: from files or the generator into a model, or from a model into a
 * checkpoint. It stands between a reader or writer (tensor_stream.h) and the trainer's sinks and sources, and counts. It also
 * shows the progress of the checksums when a checkpoint is read (file_sums.h).
 *
 *   draw     50.0 % of 357,881,600 weights, 29,562,380 weights/s, 0:06 left
 *   check    22.1 % of 5.43 GB, 5.98 GB/s, 0:01 left
 */
#ifndef LLMC_WATCHED_H
#define LLMC_WATCHED_H

#include "llmc/files/file_sums.h"
#include "llmc/files/tensor_stream.h"  // defines: StateSlot, count_good
#include "llmc/run/screen/progress.h"  // defines: Progress, progress_add

typedef struct {
    Progress* progress;  // progress of all that is watched together, in elements
    StateSlot slot;      // whose sink, which may be NULL, and source are called
    bool not_finite;     // the source gave a value that is not finite
} Watched;

/* A TensorSink, and a TensorSource. */
static inline bool watched_take(void* watched, const Param* p, size_t first, size_t n, const float* src, Error* e) {
    const Watched* w = (const Watched*)watched;
    progress_add(w->progress, n);
    return !w->slot.sink || w->slot.sink(w->slot.ctx, p, first, n, src, e);
}
static inline bool watched_give(void* watched, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    Watched* w = (Watched*)watched;
    progress_add(w->progress, n);
    if (!w->slot.source(w->slot.ctx, p, first, n, dst, e)) { return false; }
    w->not_finite |= count_good(dst, n, false) < n;
    return true;
}

/* Returns a slot that stands for `slot`; *w watches it until it is no longer used. */
static inline StateSlot watch(Watched* w, StateSlot slot, Progress* progress) {
    w->progress = progress;
    w->slot = slot;
    w->not_finite = false;
    slot.sink = watched_take;
    slot.source = watched_give;
    slot.ctx = w;
    return slot;
}

// ---------------------------------------------------------------------------------------------------------------------
// checksums

static Progress sums_progress;  // progress of the checkpoint that is read; total 0: none is

static inline void sums_told(uint64_t bytes, uint64_t total) {
    if (sums_progress.total != total) { sums_progress = progress_begin(sums_progress.screen, "check", total, "B"); }
    progress_add(&sums_progress, bytes);
    if (bytes > 0) { return; }
    progress_end(&sums_progress);
    sums_progress.total = 0;
}

/* Lets `screen`, which may be NULL, show the progress of checksums of checkpoints that are read from now on. */
static inline void sums_watch(FILE* screen) {
    sums_progress = progress_begin(screen, "check", 0, "B");
    file_sums_told = sums_told;
}

#endif
