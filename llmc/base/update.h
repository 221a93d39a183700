/* update.h -- the hyperparameters and outcomes of a step's update, shared by the CPU and the GPU trainer.
 */
#ifndef LLMC_UPDATE_H
#define LLMC_UPDATE_H

typedef enum { UPDATE_APPLIED, UPDATE_NOT_FINITE, UPDATE_OUTLIER_LOSS, UPDATE_OUTLIER_NORM } UpdateVerdict;

/* Constant during a run. */
typedef struct {
    double beta1, beta2, eps, weight_decay;
    double grad_clip;                 // largest gradient norm; 0: no clipping
    double skip_loss_z, skip_norm_z;  // skip steps with a higher z-score; 0: never
    double loss_weight;               // 1 / tokens of a step, over all ranks
    int scale_interval;               // finite steps until the loss scale doubles; 0: the scale is fixed
} StepHyper;

#endif
