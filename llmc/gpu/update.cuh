/* update.cuh -- a step's update on the GPU: norm of the gradients, decision, and the optimizer over a range of the trained
 * tensors. The twin of optim/optimizer.h. AdamW (adamw.cuh) is the rule; another rule is another kernel beside it and another call
 * here. The host reads the outcome from the StepState later (runner.cuh).
 */
#ifndef LLMC_GPU_UPDATE_CUH
#define LLMC_GPU_UPDATE_CUH

#include "llmc/optim/adamw.cuh"       // defines: adamw_update_cuda
#include "llmc/gpu/gradients.cuh"     // defines: Gradients, gradient_of, is_head
#include "llmc/gpu/layers.cuh"        // defines: Queue
#include "llmc/gpu/weights.cuh"       // defines: WeightArena, master_bytes, moment_bytes
#include "llmc/optim/optimizer.cuh"   // defines: OptimizerStretch, OptimizerTensors
#include "llmc/optim/step_state.cuh"  // defines: StepState, NormSums, norm_sums, norm_square_cuda, step_decide_cuda
#include "llmc/train/step.h"          // defines: Recipe

typedef struct {
    OptimizerStretch* stretches;  // (trained tensors) on the device; the model lays them out
    int num_stretches;
} Optimizer;

/* Elements to update. */
typedef struct {
    ArenaRange elements;
    floatX* weights;      // of the first element
    const void* grads;    // of the elements `of_grads`
    ArenaRange of_grads;  // the other elements have separate gradients
    size_t state_first;   // the element whose master, m and v come first
} UpdateRange;

/* Lists the stretches of the trained tensors, with their weight decay and the gradients that are extra, in fp32. With several
 * ranks the sums of all gradients, except the norms' gradients, lie in the exchange. */
static inline void optimizer_open(Optimizer* o, const Gradients* g, bool alone, cudaStream_t stream) {
    OptimizerStretch* list = (OptimizerStretch*)xcalloc(g->trained.count, sizeof *list);
    for (int i = 0; i < g->trained.count; i++) {
        const Param* p = &g->trained.items[i];
        if (p->joined) { continue; }
        OptimizerStretch* s = &list[o->num_stretches++];
        const bool head = g->fp32_head && alone && is_head(&g->config, p->kind);
        const bool extra = !param_specs[p->kind].matrix || head;
        s->first = p->offset;
        s->tensor = (uint32_t)i;
        s->decays = param_specs[p->kind].matrix;
        s->grad = extra ? (const float*)gradient_of(g, p->kind, p->layer).data : NULL;
    }
    copy_in(o->stretches, list, o->num_stretches * sizeof *list, stream);
    free(list);
}

/* Updates a range, if `state` says that the step updates. */
template <typename Grad>
static void optimizer_update(const Optimizer* o, const Queue* q, const WeightArena* a, const StepState* state,
                             const Recipe* recipe, UpdateRange r) {
    const double moved = 4 * moment_bytes(a->bf16_moments) + 2 * master_bytes(a->master_kind) + sizeof(Grad) +
                         sizeof(floatX) * (a->master_kind == MASTER_FP32 ? 1 : 2);
    Op op(q, "adamw", 0, (double)r.elements.count * moved);
    OptimizerTensors<Grad> t;
    t.params = r.weights - r.elements.first;  // as if all weights lay there
    t.grads = (const Grad*)r.grads;
    t.grads_first = r.of_grads.first;
    t.grads_end = r.of_grads.first + r.of_grads.count;
    t.master = a->master;
    t.m = a->m;
    t.v = a->v;
    t.state_first = r.state_first;
    t.stretches = o->stretches;
    t.num_stretches = o->num_stretches;
    adamw_update_cuda(&t, r.elements.first, r.elements.first + r.elements.count, state, &recipe->hyper, a->master_kind,
                      a->bf16_moments, recipe->seed, q->stream);
}

template <typename Grad>
static void optimizer_update_all_as(const Optimizer* o, const Queue* q, const WeightArena* a, const Gradients* g,
                                    StepState* state, const Recipe* recipe) {
    const ArenaRange all = {0, g->trained.elements}, of_grads = {g->first, g->end - g->first};
    NormSums norm = norm_sums(q->scratch);
    {
        Op op(q, "gradient norm", 0, (double)of_grads.count * sizeof(Grad));
        norm_square_cuda(&norm, (const Grad*)g->all, of_grads.count, q->stream);
        norm_square_cuda(&norm, g->extra, g->extra_size, q->stream);
    }
    step_decide_cuda(state, &norm, &recipe->hyper, q->stream);
    optimizer_update<Grad>(o, q, a, state, recipe, {all, a->trained, g->all, of_grads, 0});
}

/* Queues norm, decision and update of all trained tensors, on the only rank. */
static inline void optimizer_update_all(const Optimizer* o, const Queue* q, const WeightArena* a, const Gradients* g,
                                        StepState* state, const Recipe* recipe) {
    auto* update = g->fp32 ? optimizer_update_all_as<float> : optimizer_update_all_as<floatX>;
    update(o, q, a, g, state, recipe);
}

#endif
