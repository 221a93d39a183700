/* optimizer.h -- the global norm of the gradients, and one update of a model's trained tensors. AdamW (adamw.h) is the rule;
 * another rule is another file beside it, and another call here. The CUDA trainer's twin is gpu/update.cuh.
 */
#ifndef LLMC_OPTIMIZER_H
#define LLMC_OPTIMIZER_H

#include "llmc/optim/adamw.h"   // defines: AdamW, adamw_update
#include "llmc/optim/recipe.h"  // defines: Hyperparameters
#include "llmc/config.h"        // defines: ParamTable, param_specs, param_size

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

/* The form of the master weights beside 16-bit ones: fp32; the lower 16 bits; none, with stochastic rounding. */
typedef enum { MASTER_FP32, MASTER_SPLIT, MASTER_NONE } MasterKind;

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
