/* outlier.h -- finds steps whose loss or gradient norm stands out: the z-score of a value against the last 128.
 *
 *   z = (x - mean of the window) / standard deviation of the window (population)
 *
 * Before the window is full there is no score (NAN), so a run's steep start is never skipped. A value that is not finite
 * does not enter the window, and its score is +inf. The window is plain doubles in a ring: the checkpoint saves the whole
 * struct field by field, and a resumed run skips the same steps. Sums are taken over the window each time, since running
 * sums drift and would depend on where a run was resumed.
 */
#ifndef LLMC_OUTLIER_H
#define LLMC_OUTLIER_H

#include "llmc/base/utils.h"
#include <math.h>

enum { OUTLIER_WINDOW = 128 };

/* Starts as zeros. */
typedef struct {
    double values[OUTLIER_WINDOW];  // ring
    int count;                      // values in it, up to OUTLIER_WINDOW
    int next;                       // where the next one goes
} Outlier;

/* The z-score of x against the values before it; then x enters the window. */
LLMC_HOST_DEVICE static inline double outlier_update(Outlier* o, double x) {
    if (!isfinite(x)) { return INFINITY; }
    double z = NAN;
    if (o->count == OUTLIER_WINDOW) {
        double mean = 0.0, variance = 0.0;
        for (int i = 0; i < OUTLIER_WINDOW; i++) { mean += o->values[i]; }
        mean /= OUTLIER_WINDOW;
        for (int i = 0; i < OUTLIER_WINDOW; i++) { variance += (o->values[i] - mean) * (o->values[i] - mean); }
        variance /= OUTLIER_WINDOW;
        z = variance > 0.0 ? (x - mean) / sqrt(variance) : (x == mean ? 0.0 : INFINITY * (x - mean));
    }
    o->values[o->next] = x;
    o->next = (o->next + 1) % OUTLIER_WINDOW;
    if (o->count < OUTLIER_WINDOW) { o->count++; }
    return z;
}

/* Whether a step with score z is skipped under a threshold from the command line (0: never). Only values above the
 * window count: a loss that falls is no accident. */
LLMC_HOST_DEVICE static inline bool outlier_skip(double z, double threshold) { return threshold > 0.0 && z > threshold; }

#endif
