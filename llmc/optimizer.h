/* optimizer.h -- one update of a model's trained tensors. AdamW (adamw.h) is the rule; another rule is another file beside it
 * and another call here. The CUDA trainer's twin is gpu/optimizer.cuh.
 */
#ifndef LLMC_OPTIMIZER_H
#define LLMC_OPTIMIZER_H

#include "llmc/adamw.h"        // defines: AdamW, adamw_update
#include "llmc/base/update.h"  // defines: Hyperparameters
#include "llmc/config.h"       // defines: ParamTable, param_specs, param_size

/* The arenas of the trained tensors, all laid out by one table. */
typedef struct {
    float* params;
    const float* grads;
    float *m, *v;  // the optimizer's state: first and second moment
} OptimizerArenas;

/* Updates all tensors of a table. Weight decay acts on matrices only. grad_scale multiplies every gradient; `updates` counts
 * the updates of the run, from 1. */
static inline void optimizer_update(const ParamTable* t, OptimizerArenas a, const Hyperparameters* h, double lr,
                                    float grad_scale, int64_t updates) {
    for (int i = 0; i < t->count; i++) {
        const Param* p = &t->items[i];
        const double decay = param_specs[p->kind].matrix ? h->weight_decay : 0.0;
        const AdamW rule = {lr, h->beta1, h->beta2, h->eps, decay, grad_scale, updates};
        adamw_update(a.params + p->offset, a.grads + p->offset, a.m + p->offset, a.v + p->offset, param_size(p), &rule);
    }
}

#endif
