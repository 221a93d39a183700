/* recipe.h -- what decides a step's update: its hyperparameters, outliers among losses and gradient norms, the verdict whether
 * to update, and the clip factor. Shared by the CPU and the GPU trainer.
 *
 * An outlier is a step whose loss or gradient norm stands out, by the z-score of a value against the 128 before it.
 *
 *   z = (x - mean of the window) / standard deviation of the window (population)
 *
 * Until the window is full there is no score (NAN), so a run's steep start is never skipped. A value that is not finite
 * scores +inf and does not enter the window. The window is a ring of doubles. A checkpoint saves all of it, so a resumed run
 * skips the same steps. Each score sums the whole window anew: running sums drift and would depend on where a run resumed.
 */
#ifndef LLMC_RECIPE_H
#define LLMC_RECIPE_H

#include "llmc/base/utils.h"  // defines: LLMC_HOST_DEVICE

#include <math.h>

// ---------------------------------------------------------------------------------------------------------------------
// outliers

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

// ---------------------------------------------------------------------------------------------------------------------
// the norm of the gradients

enum { NORM_CHUNK = 16384 };  // elements of one partial sum: fixed, so that the norm is the same for any thread count

/* Returns the bytes of scratch that global_norm() needs. */
static inline size_t global_norm_scratch(size_t n) { return ceil_div(n, NORM_CHUNK) * sizeof(double); }

/* Returns sqrt(sum of g^2) over g (n), summed in double. */
static inline double global_norm(const float* g, size_t n, void* scratch) {
    enum { LANES = 32 };  // running sums: enough for several vectors of doubles
    const size_t chunks = ceil_div(n, NORM_CHUNK);
    double* partial = (double*)scratch;
#pragma omp parallel for schedule(static)
    for (size_t k = 0; k < chunks; k++) {
        const float* gc = g + k * NORM_CHUNK;
        const size_t count = size_min(n - k * NORM_CHUNK, NORM_CHUNK);
        double lane[LANES] = {0};
        size_t i = 0;
        for (; i + LANES <= count; i += LANES) {
            for (size_t j = 0; j < LANES; j++) { lane[j] += (double)gc[i + j] * (double)gc[i + j]; }
        }
        for (; i < count; i++) { lane[i % LANES] += (double)gc[i] * (double)gc[i]; }
        for (int j = 1; j < LANES; j++) { lane[0] += lane[j]; }
        partial[k] = lane[0];
    }
    double sum = 0;
    for (size_t k = 0; k < chunks; k++) { sum += partial[k]; }
    return sqrt(sum);
}

// ---------------------------------------------------------------------------------------------------------------------
// the decision

typedef enum { UPDATE_APPLIED, UPDATE_NOT_FINITE, UPDATE_OUTLIER_LOSS, UPDATE_OUTLIER_NORM } UpdateVerdict;

/* Constant during a run. */
typedef struct {
    double beta1, beta2, eps, weight_decay;
    double muon_momentum, muon_lr_scale;
    double grad_clip;                 // largest gradient norm; 0: no clipping
    double skip_loss_z, skip_norm_z;  // skip steps with a higher z-score; 0: never
    double tokens;                    // tokens of a step, over all ranks
    double loss_weight;               // 1 / tokens
    int scale_interval;               // finite steps until the loss scale doubles; 0: the scale is fixed
} Hyperparameters;

/* Decides whether to update: skips losses and norms that are not finite, and outliers by their z-scores. */
LLMC_HOST_DEVICE static inline UpdateVerdict update_verdict(double loss, double norm, double loss_z, double norm_z,
                                                            const Hyperparameters* h) {
    return !isfinite(loss) || !isfinite(norm)     ? UPDATE_NOT_FINITE
           : outlier_skip(loss_z, h->skip_loss_z) ? UPDATE_OUTLIER_LOSS
           : outlier_skip(norm_z, h->skip_norm_z) ? UPDATE_OUTLIER_NORM
                                                  : UPDATE_APPLIED;
}

/* Returns the factor that turns sums over a step's tokens, weighted with 1 / tokens, into means over its trained targets. It
 * is exactly 1 if all tokens are trained. It is known only at the end of the step, so all micro-batches and ranks share it. */
LLMC_HOST_DEVICE static inline double trained_factor(const Hyperparameters* h, double trained) { return h->tokens / trained; }

/* Returns the factor that brings the gradient's norm down to max_norm (0: no limit), as PyTorch's clip_grad_norm_ does. */
LLMC_HOST_DEVICE static inline double clip_factor(double norm, double max_norm) {
    return max_norm > 0 && norm > max_norm ? max_norm / (norm + 1e-6) : 1.0;
}

#endif
