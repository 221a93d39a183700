/* update.h -- the numbers by which a training step decides whether and how to update, the same for both trainers.
 */
#ifndef LLMC_UPDATE_H
#define LLMC_UPDATE_H

typedef enum { UPDATE_APPLIED, UPDATE_NOT_FINITE, UPDATE_OUTLIER_LOSS, UPDATE_OUTLIER_NORM } UpdateVerdict;

/* What does not change in a run. */
typedef struct {
    double beta1, beta2, eps, weight_decay;
    double grad_clip;                 // largest norm; 0: any
    double skip_loss_z, skip_norm_z;  // outliers with a higher score are skipped; 0: none is
    double loss_weight;               // 1 / tokens of a step, over all ranks
    int scale_interval;               // finite steps until the loss scale doubles; 0: it stays
} StepHyper;

#endif
