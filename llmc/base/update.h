/* update.h -- the hyperparameters and outcomes of a step's update, and the decision whether to update, shared by the CPU and
 * the GPU trainer.
 */
#ifndef LLMC_UPDATE_H
#define LLMC_UPDATE_H

#include "llmc/base/outlier.h"  // defines: outlier_skip
#include "llmc/base/utils.h"    // defines: LLMC_HOST_DEVICE

#include <math.h>

enum { MIX_MOST = 32 };  // sources of training data (files/mix.h)

/* Training losses by source, since they were cleared. */
typedef struct {
    int count;             // sources; 0: there is only one
    double sum[MIX_MOST];  // sum of the losses of each source's tokens
    double tokens[MIX_MOST];
} SourceLosses;

/* The form of the master weights beside 16-bit ones: fp32; the lower 16 bits; none, with stochastic rounding. */
typedef enum { MASTER_FP32, MASTER_SPLIT, MASTER_NONE } MasterKind;

typedef enum { UPDATE_APPLIED, UPDATE_NOT_FINITE, UPDATE_OUTLIER_LOSS, UPDATE_OUTLIER_NORM } UpdateVerdict;

/* Constant during a run. */
typedef struct {
    double beta1, beta2, eps, weight_decay;
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
