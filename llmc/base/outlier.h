/* outlier.h -- finds steps whose loss or gradient norm stands out, by the z-score of a value against the 128 before it.
 *
 *   z = (x - mean of the window) / standard deviation of the window (population)
 *
 * Until the window is full there is no score (NAN), so a run's steep start is never skipped. A value that is not finite
 * scores +inf and does not enter the window. The window is a ring of doubles. A checkpoint saves all of it, so a resumed run
 * skips the same steps. Each score sums the whole window anew: running sums drift and would depend on where a run resumed.
 */
#ifndef LLMC_OUTLIER_H
#define LLMC_OUTLIER_H

#include "llmc/base/utils.h"
#include <math.h>

enum { OUTLIER_WINDOW = 128 };

/* All zeros is an empty window. */
typedef struct {
    double values[OUTLIER_WINDOW];  // ring
    int count;                      // values in it, up to OUTLIER_WINDOW
    int next;                       // index of the next value
} Outlier;

/* Returns the z-score of x against the values before it, then adds x to the window. */
LLMC_HOST_DEVICE static inline double outlier_update(Outlier* o, double x) {
    if (!isfinite(x)) { return INFINITY; }
    double z = NAN;
    if (o->count == OUTLIER_WINDOW) {
        double mean = 0.0, variance = 0.0;
#ifdef __CUDA_ARCH__
#pragma unroll 8  // the whole window would not fit into a thread's registers
#endif
        for (int i = 0; i < OUTLIER_WINDOW; i++) { mean += o->values[i]; }
        mean /= OUTLIER_WINDOW;
#ifdef __CUDA_ARCH__
#pragma unroll 8
#endif
        for (int i = 0; i < OUTLIER_WINDOW; i++) { variance += (o->values[i] - mean) * (o->values[i] - mean); }
        variance /= OUTLIER_WINDOW;
        z = variance > 0.0 ? (x - mean) / sqrt(variance) : (x == mean ? 0.0 : INFINITY * (x - mean));
    }
    o->values[o->next] = x;
    o->next = (o->next + 1) % OUTLIER_WINDOW;
    if (o->count < OUTLIER_WINDOW) { o->count++; }
    return z;
}

/* Returns whether to skip a step with score z, given a threshold (0: never skip). Only values above the mean count: a falling
 * loss is good news. */
LLMC_HOST_DEVICE static inline bool outlier_skip(double z, double threshold) { return threshold > 0.0 && z > threshold; }

#endif
