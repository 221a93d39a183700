/* update.cuh -- a step's update on the GPU: norm of the gradients, decision, and each rule over its tensors. AdamW takes ranges
 * of elements, a rule of whole matrices goes stage by stage. The twin of optim/optimizer.h. The host reads the outcome from the
 * StepState later (runner.cuh).
 */
#ifndef LLMC_GPU_UPDATE_CUH
#define LLMC_GPU_UPDATE_CUH

#include "llmc/dist/buckets.h"        // defines: Deal, deal_matrices, shard_owner, shard_left
#include "llmc/optim/adamw.cuh"       // defines: adamw_factors, adamw_update_cuda
#include "llmc/optim/muon.cuh"        // defines: muon_prepare_cuda, muon_update_cuda, muon_orthogonalize_cuda
#include "llmc/gpu/exchange.cuh"      // defines: Exchange, exchange_matrices
#include "llmc/gpu/gradients.cuh"     // defines: Gradients, Gradient, gradient_of, is_head
#include "llmc/gpu/layers.cuh"        // defines: Queue
#include "llmc/gpu/weights.cuh"       // defines: WeightArena, master_bytes, moment_bytes, moment_at, master_at, trained_at
#include "llmc/optim/optimizer.cuh"   // defines: OptimizerStretch, OptimizerTensors, MatrixPart, RuleKernels
#include "llmc/optim/step_state.cuh"  // defines: StepState, NormSums, norm_sums, norm_square_cuda, step_decide_cuda
#include "llmc/train/step.h"          // defines: Recipe

// The kernels of optimizer_rules, row by row. AdamW has no stages.
static const RuleKernels rule_kernels[] = {{NULL, NULL, NULL}, {muon_prepare_cuda, muon_update_cuda, muon_orthogonalize_cuda}};

typedef struct {
    OptimizerStretch* stretches;  // (trained tensors) on the device; the model lays them out
    int num_stretches;
    Deal deal;      // the matrices that are updated whole
    float* matrix;  // (the largest of them) one of them
} Optimizer;

/* Elements to update. */
typedef struct {
    ArenaRange elements;
    floatX* weights;      // of the first element
    const void* grads;    // of the elements `of_grads`
    ArenaRange of_grads;  // the other elements have separate gradients
} UpdateRange;

/* Lays out its buffers. */
static inline void optimizer_lay_out(Optimizer* o, const ParamTable* trained, Arena* a) {
    size_t most = 0;
    for (int i = 0; i < trained->count; i++) {
        const Param* p = &trained->items[i];
        if (rule_of(trained, p->kind)->prepare) { most = size_max(most, param_size(p)); }
    }
    o->stretches = take<OptimizerStretch>(a, trained->count);
    o->matrix = take<float>(a, round_up(most, 128));  // two matrices in 16 bits begin at multiples of 256 bytes
}

/* Lists the stretches of the trained tensors, with their weight decay and the gradients that are extra, in fp32. With several
 * ranks the sums of all gradients, except the norms' gradients, lie in the exchange. */
static inline void optimizer_open(Optimizer* o, const Gradients* g, bool alone, cudaStream_t stream) {
    o->deal = deal_matrices(&g->trained);
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

/* Updates AdamW's tensors of a range, if `state` says that the step updates. */
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
    t.stretches = o->stretches;
    t.num_stretches = o->num_stretches;
    const size_t end = r.elements.first + r.elements.count, moment = moment_bytes(a->bf16_moments);
    const ArenaRanges* held = &a->held.ranges;
    for (size_t i = arena_range_at(held, r.elements.first); i < held->count && held->items[i].first < end; i++) {
        const ArenaRange range = held->items[i];
        const HeldRange* h = &a->held.items[i];
        if (h->rule->prepare) { continue; }
        t.state_first = range.first - h->place[SLOT_MASTER];
        t.master = a->master;
        t.m = (char*)a->m + (h->place[SLOT_M] - h->place[SLOT_MASTER]) * moment;  // as if it had a place for all elements
        t.v = (char*)a->v + (h->place[SLOT_V] - h->place[SLOT_MASTER]) * moment;
        adamw_update_cuda(&t, size_max(range.first, r.elements.first), size_min(range.first + range.count, end), state,
                          adamw_factors(&recipe->hyper, recipe->seed), a->master_kind, a->bf16_moments, q->stream);
    }
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
    optimizer_update<Grad>(o, q, a, state, recipe, {all, a->trained, g->all, of_grads});
}

/* Queues norm, decision and update of all trained tensors, on the only rank. */
static inline void optimizer_update_all(const Optimizer* o, const Queue* q, const WeightArena* a, const Gradients* g,
                                        StepState* state, const Recipe* recipe) {
    auto* update = g->fp32 ? optimizer_update_all_as<float> : optimizer_update_all_as<floatX>;
    update(o, q, a, g, state, recipe);
}

// ---------------------------------------------------------------------------------------------------------------------
// whole matrices

/* Returns elements [at, at + count) of the arena, which are of matrix p and on this rank. */
static MatrixPart matrix_part(const WeightArena* a, const Gradients* g, const Param* p, size_t at, size_t count,
                              uint64_t seed) {
    MatrixPart part;
    part.first = at - p->offset;
    part.count = count;
    part.rows = p->rows;
    part.cols = p->cols;
    part.tensor = (uint32_t)(p - g->trained.items);
    part.seed = seed;
    part.params = trained_at(a, at);
    part.master = master_at(a, at);
    part.master_kind = a->master_kind;
    part.m = moment_at(a, SLOT_M, at);
    part.bf16_moments = a->bf16_moments;
    return part;
}

/* Updates the matrices whose rule takes them whole, after the decision. With several ranks the sums of their gradients are
 * complete, and what a rank prepares takes the place of its sums. */
static void matrices_update(const Optimizer* o, const Queue* q, const WeightArena* a, const Gradients* g, Exchange* x,
                            const StepState* state, const Recipe* recipe) {
    typedef void (*Stage)(const MatrixPart*, const StepState*, const Hyperparameters*, cudaStream_t);
    const RuleKernels* kernels = &rule_kernels[g->trained.optimizer];
    const Deal* d = &o->deal;
    const auto by_elements = [&](Stage stage, const Param* p) {  // on the elements of a matrix that this rank holds
        const size_t end = p->offset + param_size(p);
        for (size_t at = p->offset, run = end - at, local = 0; at < end && x->ranks > 1; at += run) {
            const int holder = shard_owner(&x->buckets, at, &local);
            run = size_min(shard_left(&x->buckets, at), end - at);
            if (holder != x->rank) { continue; }
            MatrixPart part = matrix_part(a, g, p, at, run, recipe->seed);
            part.grads = part.x = x->sums + local;
            part.fp32_grads = true;
            stage(&part, state, &recipe->hyper, q->stream);
        }
        if (x->ranks > 1) { return; }
        const Gradient grad = gradient_of(g, p->kind, p->layer);
        MatrixPart part = matrix_part(a, g, p, p->offset, param_size(p), recipe->seed);
        part.grads = grad.data;
        part.fp32_grads = grad.fp32;
        part.x = o->matrix;
        stage(&part, state, &recipe->hyper, q->stream);
    };
    const auto whole = [&](const Param* p) {
        Op op(q, "whole matrices", 0, 0);
        kernels->matrix(q->matmul, o->matrix, p->rows, p->cols, q->scratch, q->stream);
    };
    for (int i = 0; i < d->count; i++) {
        by_elements(kernels->prepare, d->items[i].param);
        if (x->ranks > 1) { continue; }
        whole(d->items[i].param);
        by_elements(kernels->update, d->items[i].param);
    }
    for (int i = 0, next; i < d->count && x->ranks > 1; i = next) {
        const Param* mine = NULL;
        for (next = i; next < d->count && d->items[next].round == d->items[i].round; next++) {
            if (d->items[next].owner == x->rank) { mine = d->items[next].param; }
        }
        exchange_matrices(x, &d->items[i], next - i, o->matrix, false);
        if (mine) { whole(mine); }
        exchange_matrices(x, &d->items[i], next - i, o->matrix, true);
    }
    for (int i = 0; i < d->count && x->ranks > 1; i++) { by_elements(kernels->update, d->items[i].param); }
}

#endif
