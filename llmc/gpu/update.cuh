/* update.cuh -- a step's update on the GPU: norm of the gradients, decision, and each rule over its tensors. AdamW takes ranges
 * of elements, a rule of whole matrices goes stage by stage. The twin of optim/optimizer.h. The host reads the outcome from the
 * StepState later (runner.cuh).
 */
#ifndef LLMC_GPU_UPDATE_CUH
#define LLMC_GPU_UPDATE_CUH

#include "llmc/dist/buckets.h"        // defines: Deal, deal_matrices, shard_owner, shard_left
#include "llmc/optim/adamw.cuh"       // defines: adamw_factors, adamw_update_cuda
#include "llmc/optim/muon.cuh"        // defines: muon_prepare_cuda, muon_update_cuda, muon_orthogonalize_cuda
#include "llmc/optim/muon.h"          // defines: muon_flops, muon_rate
#include "llmc/gpu/exchange.cuh"      // defines: Exchange, exchange_matrices
#include "llmc/gpu/gradients.cuh"     // defines: Gradients, gradient_of, is_head
#include "llmc/gpu/layers.cuh"        // defines: Queue
#include "llmc/gpu/weights.cuh"       // defines: WeightArena, StatePiece, state_pieces, state_at, state_width, trained_at
#include "llmc/optim/optimizer.cuh"   // defines: OptimizerStretch, OptimizerTensors, MatrixPart, MatrixParts, RuleKernels
#include "llmc/optim/step_state.cuh"  // defines: StepState, NormSums, norm_sums, norm_square_cuda, step_decide_cuda
#include "llmc/train/step.h"          // defines: Recipe

// The kernels of optimizer_rules, row by row. AdamW has no stages.
static const RuleKernels rule_kernels[] = {{NULL, NULL, NULL, NULL},
                                           {muon_prepare_cuda, muon_update_cuda, muon_orthogonalize_cuda, muon_flops}};

typedef struct {
    OptimizerStretch* stretches;  // (trained tensors) on the device; the model lays them out
    int num_stretches;
    Deal deal;              // the matrices that are updated whole
    MatrixParts parts;      // what this rank holds of them, in this order
    MatrixPart* part_room;  // (most_parts) on the device
    MatrixPart* part_list;  // the same on the host
    int* first_part;        // (matrices + 1) of each matrix
    int most_parts;
} Optimizer;

/* Elements to update. */
typedef struct {
    ArenaRange elements;
    floatX* weights;      // of the first element
    const void* grads;    // of the elements `of_grads`
    ArenaRange of_grads;  // the other elements have separate gradients
    bool fp32;            // the gradients are fp32; otherwise floatX
    HostArray home;       // gradients on the host, of the first element on; {NULL}: they lie at `grads`
} UpdateRange;

/* Lays out its buffers. A matrix has one part more for each bucket that ends in it, and for each piece (0: there are none) of
 * state on the host. */
static inline void optimizer_lay_out(Optimizer* o, const ParamTable* trained, const Buckets* buckets, size_t piece, Arena* a) {
    const size_t pieces = piece > 0 ? trained->elements / piece : 0;
    o->most_parts = trained->optimizer > 0 ? trained->count + buckets->count + (int)pieces : 0;
    o->stretches = take<OptimizerStretch>(a, trained->count);
    o->part_room = take<MatrixPart>(a, o->most_parts);
}

template <typename Grad>
static void optimizer_update_as(const Optimizer* o, const Queue* q, const WeightArena* a, const StepState* state,
                                const Recipe* recipe, UpdateRange r) {
    const double moved = 4 * state_width(a, SLOT_M) + 2 * state_width(a, SLOT_MASTER) + sizeof(Grad) +
                         sizeof(floatX) * (a->master_kind == MASTER_FP32 ? 1 : 2);
    OptimizerTensors<Grad> t;
    t.params = r.weights - r.elements.first;  // as if all weights lay there
    t.grads = (const Grad*)r.grads;
    t.grads_first = r.of_grads.first;
    t.grads_end = r.of_grads.first + r.of_grads.count;
    t.stretches = o->stretches;
    t.num_stretches = o->num_stretches;
    const size_t end = r.elements.first + r.elements.count;
    const ArenaRanges* held = &a->held.ranges;
    for (size_t i = arena_range_at(held, r.elements.first); i < held->count && held->items[i].first < end; i++) {
        const ArenaRange range = held->items[i];
        const OptimizerRule* rule = a->held.items[i].rule;
        const size_t first = size_max(range.first, r.elements.first), stop = size_min(range.first + range.count, end);
        if (rule->prepare) { continue; }
        HostArray home = r.home;
        if (home.data) { home.data += (first - r.elements.first) * home.width; }
        state_pieces(a, rule->slots | 1u << SLOT_WEIGHTS, home, {first, stop - first}, q->stream, [&](StatePiece s) {
            if (s.weights) { t.params = s.weights - s.first; }
            if (s.grads) { t.grads = (const Grad*)s.grads, t.grads_first = s.first, t.grads_end = s.first + s.count; }
            Op op(q, "adamw", 0, (double)s.count * moved);
            t.state_first = s.first;
            t.master = s.master;
            t.m = s.m;
            t.v = s.v;
            adamw_update_cuda(&t, s.first, s.first + s.count, state, adamw_factors(&recipe->hyper, recipe->seed),
                              a->master_kind, a->bf16_moments, q->stream);
        });
    }
}

/* Updates AdamW's tensors of a range, if `state` says that the step updates. */
static inline void optimizer_update(const Optimizer* o, const Queue* q, const WeightArena* a, const StepState* state,
                                    const Recipe* recipe, UpdateRange r) {
    auto* update = r.fp32 ? optimizer_update_as<float> : optimizer_update_as<floatX>;
    update(o, q, a, state, recipe, r);
}

/* Returns the elements [first, first + count) of the only rank, with their gradients. */
static inline UpdateRange update_range(const WeightArena* a, const Gradients* g, size_t first, size_t count) {
    UpdateRange r = {{first, count}, trained_at(a, first), g->all, {g->first, g->end - g->first}, g->fp32, {NULL, 0, false}};
    if (g->host) {
        r.grads = gradient_of_element(g, first).data;
        r.of_grads = r.elements;
        r.home = gradients_home(g, first);
    }
    return r;
}

/* Queues the norm of the gradients and the decision. With several ranks the exchange has added up the norm. */
static inline void optimizer_decide(const Queue* q, const Gradients* g, const Exchange* x, StepState* state,
                                    const Recipe* recipe) {
    NormSums norm = norm_sums(q->scratch);
    if (x->ranks <= 1) {
        const size_t count = g->trained.elements - gradients_away(g);
        Op op(q, "gradient norm", 0, (double)count * gradients_bytes(g->fp32));
        norm_square_cuda(&norm, g->extra, norms_size(g), q->stream);
        norm.partial[norm.lists] = g->squares;
        norm.count[norm.lists++] = gradients_square(g, -1, q->stream);
    }
    step_decide_cuda(state, &norm, &recipe->hyper, q->stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// whole matrices

/* Returns the bytes of scratch for the rounds of matrices of all owners. A round begins with the matrices themselves. */
static inline size_t matrices_room(const Param* p, int count) {
    return (size_t)count * matrix_stride(param_size(p)) * sizeof(float);
}
static inline size_t matrices_scratch(const ParamTable* t) {
    Deal d = deal_matrices(t);
    size_t most = 0;
    for (int i = 0; i < d.count; i++) {
        const Param* p = d.items[i].param;
        const int count = d.items[i].place + 1;
        const size_t own = rule_of(t, p->kind)->scratch(p->rows, p->cols, sizeof(floatX), (size_t)count);
        most = size_max(most, matrices_room(p, count) + own);
    }
    free(d.items);
    return most;
}

/* Lists what this rank holds of the matrices that are updated whole. With several ranks the sums of their gradients are
 * complete, and what a rank prepares takes the place of its sums; otherwise its place in the round. State on the host is in the
 * windows while a stage runs: part k of the stage in window k % HOST_WINDOWS. */
static inline void matrices_open(Optimizer* o, const Queue* q, const WeightArena* a, const Gradients* g, const Exchange* x) {
    o->deal = deal_matrices(&g->trained);
    MatrixPart* list = o->part_list = (MatrixPart*)xcalloc((size_t)o->most_parts, sizeof *list);
    o->first_part = (int*)xcalloc((size_t)o->deal.count + 1, sizeof *o->first_part);
    const bool alone = x->ranks <= 1;
    int stage = 0;  // its first part
    for (int i = 0; i < o->deal.count; i++) {
        const Param* p = o->deal.items[i].param;
        if (alone && i > 0 && o->deal.items[i].round != o->deal.items[i - 1].round) { stage = o->parts.count; }
        o->first_part[i] = o->parts.count;
        const size_t end = p->offset + param_size(p), place = (size_t)o->deal.items[i].place * matrix_stride(param_size(p));
        size_t stretch = 0, stretch_end = p->offset;  // exchange_matrices() sends X of a stretch from the stretch's first place
        for (size_t at = p->offset, run, local = 0; at < end; at += run) {
            const bool mine = alone || shard_owner(&x->buckets, at, &local) == x->rank;
            const size_t before = at - p->offset;
            run = size_min(alone ? SIZE_MAX : shard_left(&x->buckets, at), end - at);
            if (!mine) { continue; }
            if (at >= stretch_end) { stretch = local, stretch_end = at + run; }
            if (a->host) { run = size_min(run, a->host->piece); }
            char* window = a->host ? a->host->windows[(o->parts.count - stage) % HOST_WINDOWS].data : NULL;
            MatrixPart* part = &list[o->parts.count++];
            part->first = before;
            part->count = run;
            part->root = muon_rate(1.0, 1.0, p->rows, p->cols);
            part->tensor = (uint32_t)(p - g->trained.items);
            part->params = trained_at(a, at);
            if (window && weight_on_host(a, at)) {  // they arrive beside the master weights
                part->params = (floatX*)(window + round_up(run * state_width(a, SLOT_MASTER), 256));
            }
            part->master = window ? window : state_at(a, SLOT_MASTER, at);
            part->m = window ? window : state_at(a, SLOT_M, at);
            const char* grads = (const char*)gradient_of(g, p->kind, p->layer).data + before * gradients_bytes(g->fp32);
            if (g->host) { grads = window + round_up(run * state_width(a, SLOT_M), 256); }  // they arrive beside m
            part->grads = alone ? grads : (const char*)(x->sums + local);
            part->u = alone ? (float*)q->scratch + place + before : x->sums + local;
            part->x =
                alone ? (const floatX*)q->scratch + place + before : (const floatX*)(x->sums + stretch) + (local - stretch);
            o->parts.most = size_max(o->parts.most, run);
        }
    }
    o->first_part[o->deal.count] = o->parts.count;
    o->parts.items = o->part_room;
    o->parts.master_kind = a->master_kind;
    o->parts.bf16_moments = a->bf16_moments;
    o->parts.fp32_grads = x->ranks > 1 || g->fp32;
    copy_in(o->part_room, list, (size_t)o->parts.count * sizeof *list, q->stream);
}

static inline void optimizer_close(Optimizer* o) {
    free(o->deal.items);
    free(o->part_list);
    free(o->first_part);
}

/* Lists the stretches of the trained tensors, with their weight decay and the gradients that are extra, in fp32. With several
 * ranks the sums of all gradients, except the norms' gradients, lie in the exchange. */
static inline void optimizer_open(Optimizer* o, const Queue* q, const WeightArena* a, const Gradients* g, const Exchange* x) {
    OptimizerStretch* list = (OptimizerStretch*)xcalloc(g->trained.count, sizeof *list);
    for (int i = 0; i < g->trained.count; i++) {
        const Param* p = &g->trained.items[i];
        if (p->joined) { continue; }
        OptimizerStretch* s = &list[o->num_stretches++];
        const bool head = g->fp32_head && x->ranks <= 1 && is_head(&g->config, p->kind);
        const bool extra = !param_specs[p->kind].matrix || head;
        s->first = p->offset;
        s->tensor = (uint32_t)i;
        s->decays = param_specs[p->kind].matrix;
        s->grad = extra ? (const float*)gradient_of(g, p->kind, p->layer).data : NULL;
    }
    copy_in(o->stretches, list, o->num_stretches * sizeof *list, q->stream);
    free(list);
    matrices_open(o, q, a, g, x);
}

/* Updates the matrices whose rule takes them whole, after the decision, round by round. A launch takes a round's matrices; with
 * several ranks the launches by element take all that a rank holds. */
static void matrices_update(const Optimizer* o, const Queue* q, const WeightArena* a, const Gradients* g, Exchange* x,
                            const StepState* state, const Recipe* recipe) {
    typedef void (*Stage)(const MatrixParts*, const StepState*, const Hyperparameters*, cudaStream_t);
    const RuleKernels* kernels = &rule_kernels[g->trained.optimizer];
    const Deal* d = &o->deal;
    const bool alone = x->ranks <= 1;
    float* room = (float*)q->scratch;
    const auto by_elements = [&](Stage stage, SlotKind slot, const char* name, int first, int count) {
        MatrixParts parts = o->parts;
        parts.seed = recipe->seed;
        if (a->host) { host_stream_align(a->host); }
        for (int k = first; a->host && k < first + count; k++) {
            const MatrixPart* part = &o->part_list[k];
            const size_t at = g->trained.items[part->tensor].offset + part->first;
            parts.items = o->parts.items + k;
            parts.count = 1;
            parts.most = part->count;
            const HostArray grads = slot == SLOT_M ? gradients_home(g, at) : HostArray{NULL, 0, false};
            const unsigned slots = 1u << slot | (slot == SLOT_MASTER ? 1u << SLOT_WEIGHTS : 0);
            state_pieces(a, slots, grads, {at, part->count}, q->stream, [&](StatePiece) {
                Op op(q, name, 0, 0);
                stage(&parts, state, &recipe->hyper, q->stream);
            });
        }
        if (a->host) { return; }
        parts.items += first;
        parts.count = count;
        if (alone) { parts.most = o->part_list[first].count; }
        const double each = state_width(a, SLOT_M) + state_width(a, SLOT_MASTER) + sizeof(float) + sizeof(floatX);
        Op op(q, name, 0, each * (double)parts.most * count);
        if (count > 0) { stage(&parts, state, &recipe->hyper, q->stream); }
    };
    if (d->count == 0) { return; }
    if (!alone) { by_elements(kernels->prepare, SLOT_M, "matrices: prepare", 0, o->parts.count); }
    for (int i = 0, next; i < d->count; i = next) {
        const Param* p = NULL;
        int mine = 0;
        for (next = i; next < d->count && d->items[next].round == d->items[i].round; next++) {
            if (d->items[next].owner != x->rank) { continue; }
            p = d->items[next].param;
            mine++;
        }
        const int first = o->first_part[i], parts = o->first_part[next] - first;
        if (alone) { by_elements(kernels->prepare, SLOT_M, "matrices: prepare", first, parts); }
        if (!alone) { exchange_matrices(x, &d->items[i], next - i, room, false); }
        if (mine > 0) {
            Op op(q, "whole matrices", mine * kernels->flops(p->rows, p->cols), 0);
            kernels->matrix(q->matmul, room, p->rows, p->cols, mine, (char*)room + matrices_room(p, mine), q->stream);
        }
        if (!alone) { exchange_matrices(x, &d->items[i], next - i, room, true); }
        if (alone) { by_elements(kernels->update, SLOT_MASTER, "matrices: update", first, parts); }
    }
    if (!alone) { by_elements(kernels->update, SLOT_MASTER, "matrices: update", 0, o->parts.count); }
}

#endif
