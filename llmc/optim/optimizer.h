/* optimizer.h -- the table of optimizers, where a rank's part of the optimizer's state lies,
 * and one update on the CPU. The CUDA trainer's twins are optimizer.cuh and gpu/update.cuh.
 *
 * A rule is a row of `optimizer_rules` and a pair of files beside adamw.h and adamw.cuh. A run has one rule. The tensors that
 * it does not take are AdamW's, so a run may keep m of all tensors, but v of a few. Each slot of the state has an arena without
 * room for the other tensors.
 *
 * A rule's unit is an element or a matrix. With several ranks every rank updates its own elements (dist/buckets.h). A rule that
 * needs a whole matrix has three stages, the first and the last element by element: `prepare` writes over the gradient what
 * `matrix` takes, `matrix` replaces it, and `update` applies it. Between the stages the ranks pass the matrix to its owner, and
 * back. A matrix is one tensor of Hugging Face: q, k and v are three.
 */
#ifndef LLMC_OPTIMIZER_H
#define LLMC_OPTIMIZER_H

#include "llmc/config.h"        // defines: ParamTable, ArenaRanges, param_specs, param_size
#include "llmc/optim/adamw.h"   // defines: AdamW, adamw_update
#include "llmc/optim/muon.h"    // defines: muon_prepare, muon_orthogonalize, muon_rate, muon_update, muon_scratch
#include "llmc/optim/recipe.h"  // defines: Hyperparameters

/* The form of the master weights beside 16-bit ones: fp32; the lower 16 bits; none, with stochastic rounding. */
typedef enum { MASTER_FP32, MASTER_SPLIT, MASTER_NONE } MasterKind;

/* Parts of a model that can be read and written tensor by tensor. */
typedef enum {
    SLOT_WEIGHTS,  // the weights that the model computes with; unless LoRA freezes them, writing also sets the master weights
    SLOT_MASTER,   // the exact weights that the optimizer updates, in a dtype that holds them: without master weights they
                   // equal SLOT_WEIGHTS; with LoRA the adapters
    SLOT_M,        // the optimizer's moments
    SLOT_V,
    NUM_SLOTS
} SlotKind;
static const char* const slot_names[NUM_SLOTS] = {"weights", "master", "m", "v"};  // as state files name them

// ---------------------------------------------------------------------------------------------------------------------
// the table of rules

/* The arenas of the trained tensors, or where a range of elements begins in each. */
typedef struct {
    float *params, *grads;
    float *m, *v;  // NULL: the rule keeps none
} OptimizerArenas;

/* The numbers of one update. */
typedef struct {
    const Hyperparameters* hyper;
    double lr;
    float grad_scale;     // multiplies every gradient
    int64_t updates;      // of the run, counted from 1
    const Param* param;   // the tensor
    double weight_decay;  // of it: matrices alone decay
} UpdateStep;

typedef struct {
    const char* word;               // names it in trainer_state.json
    bool (*takes)(ParamKind kind);  // whether it updates these tensors; NULL: all
    unsigned slots;                 // bits SLOT_M, SLOT_V: the state that it keeps; and SLOT_MASTER
    // on elements a (n)
    void (*prepare)(OptimizerArenas a, size_t n, const UpdateStep* step);  // NULL: its unit is an element
    void (*update)(OptimizerArenas a, size_t n, const UpdateStep* step);
    void (*matrix)(float* x, size_t rows, size_t cols, void* scratch);  // x (rows, cols)
    // bytes for matrices of one shape, of elements of `width` bytes; also on the GPU
    size_t (*scratch)(size_t rows, size_t cols, size_t width, size_t count);
} OptimizerRule;

static inline void adamw_rule(OptimizerArenas a, size_t n, const UpdateStep* step) {
    const Hyperparameters* h = step->hyper;
    const AdamW rule = {step->lr, h->beta1, h->beta2, h->eps, step->weight_decay, step->grad_scale, step->updates};
    adamw_update(a.params, a.grads, a.m, a.v, n, &rule);
}

/* Muon trains the matrices of blocks: neither embedding nor head, and no adapters. */
static inline bool muon_takes(ParamKind kind) { return param_specs[kind].matrix && param_specs[kind].place == PLACE_BLOCK; }
static inline size_t muon_bytes(size_t rows, size_t cols, size_t width, size_t count) {
    return muon_scratch(rows, cols, width, count).end;
}
static inline void muon_prepare_rule(OptimizerArenas a, size_t n, const UpdateStep* step) {
    muon_prepare(a.grads, a.m, n, step->hyper->muon_momentum, step->grad_scale);
}
static inline void muon_update_rule(OptimizerArenas a, size_t n, const UpdateStep* step) {
    const double rate = muon_rate(step->lr, step->hyper->muon_lr_scale, step->param->rows, step->param->cols);
    muon_update(a.params, a.grads, n, 1.0 - step->lr * step->weight_decay, rate);
}

// the words of --optimizer, in this order
static const OptimizerRule optimizer_rules[] = {
    {"adamw", NULL, 1 << SLOT_MASTER | 1 << SLOT_M | 1 << SLOT_V, NULL, adamw_rule, NULL, NULL},  // of what no other takes
    {"muon", muon_takes, 1 << SLOT_MASTER | 1 << SLOT_M, muon_prepare_rule, muon_update_rule, muon_orthogonalize, muon_bytes}};

/* Returns the row of a word; -1 if there is none. */
static inline int optimizer_find(const char* word) {
    int row = (int)(sizeof optimizer_rules / sizeof *optimizer_rules) - 1;
    while (row >= 0 && strcmp(optimizer_rules[row].word, word) != 0) { row--; }
    return row;
}

/* Returns the rule that updates a tensor. */
static inline const OptimizerRule* rule_of(const ParamTable* t, ParamKind kind) {
    const OptimizerRule* rule = &optimizer_rules[t->optimizer];
    return !rule->takes || rule->takes(kind) ? rule : &optimizer_rules[0];
}

/* Returns whether the state of a tensor has this slot, by its name. */
static inline bool slot_kept(const ParamTable* t, const Param* p, const char* slot) {
    int kind = NUM_SLOTS - 1;
    while (kind > SLOT_MASTER && strcmp(slot_names[kind], slot) != 0) { kind--; }
    return rule_of(t, p->kind)->slots >> kind & 1;
}

// ---------------------------------------------------------------------------------------------------------------------
// the state that a rank holds

/* A range of the state has one rule, and one place in each slot's arena. */
typedef struct {
    const OptimizerRule* rule;
    size_t place[NUM_SLOTS];  // of the first element; SLOT_WEIGHTS is not used
} HeldRange;

typedef struct {
    ArenaRanges ranges;          // of the trained tensors, in the order of the arena
    HeldRange* items;            // of each range
    size_t elements[NUM_SLOTS];  // of each slot's arena
} HeldState;

static inline void held_free(HeldState* list) {
    free(list->ranges.items);
    free(list->items);
}

/* Lists the state of a rank that owns these ranges. A tensor's range includes the gap up to the next tensor. Free with
 * held_free(). */
static inline HeldState held_state(const ParamTable* t, const ArenaRanges* own) {
    HeldState list;
    memset(&list, 0, sizeof list);
    ArenaRange* range = list.ranges.items = (ArenaRange*)xcalloc((size_t)t->count + own->count + 1, sizeof *range);
    list.items = (HeldRange*)xcalloc((size_t)t->count + own->count, sizeof(HeldRange));
    int i = 0;  // the tensor that holds a range's first element
    for (size_t r = 0; r < own->count; r++) {
        const size_t end = own->items[r].first + own->items[r].count;
        for (size_t at = own->items[r].first, stop; at < end; at = stop) {
            while (i + 1 < t->count && t->items[i + 1].offset <= at) { i++; }
            stop = size_min(end, i + 1 < t->count ? t->items[i + 1].offset : t->elements);
            const OptimizerRule* rule = rule_of(t, t->items[i].kind);
            if (list.ranges.count == 0 || list.items[list.ranges.count - 1].rule != rule || range->first + range->count != at) {
                HeldRange* h = &list.items[list.ranges.count];
                range = &list.ranges.items[list.ranges.count++];
                range->first = at;
                h->rule = rule;
                memcpy(h->place, list.elements, sizeof h->place);
            }
            range->count += stop - at;
            for (int slot = 0; slot < NUM_SLOTS; slot++) { list.elements[slot] += rule->slots >> slot & 1 ? stop - at : 0; }
        }
    }
    return list;
}

/* Lists the state of the only rank. */
static inline HeldState held_whole(const ParamTable* t) {
    ArenaRange range;
    const ArenaRanges all = whole_arena(t, &range);
    return held_state(t, &all);
}

/* Returns whether the rank holds element `at`. */
static inline bool held_here(const HeldState* list, size_t at) {
    const size_t r = arena_range_at(&list->ranges, at);
    return r < list->ranges.count && list->ranges.items[r].first <= at;
}

/* Returns the place of element `at`, which the rank holds, in a slot's arena; SIZE_MAX if its rule does not keep the slot. */
static inline size_t held_place(const HeldState* list, SlotKind slot, size_t at) {
    const size_t r = arena_range_at(&list->ranges, at);
    const HeldRange* h = &list->items[r];
    return h->rule->slots >> slot & 1 ? h->place[slot] + (at - list->ranges.items[r].first) : SIZE_MAX;
}

// ---------------------------------------------------------------------------------------------------------------------
// the update

/* Returns the bytes of scratch that the rules of whole matrices need on the CPU, where products need theirs, too. It is enough
 * for global_norm(). */
static inline size_t optimizer_scratch(const ParamTable* t) {
    size_t most = global_norm_scratch(t->elements);
    for (int i = 0; i < t->count; i++) {
        const OptimizerRule* rule = rule_of(t, t->items[i].kind);
        if (rule->scratch) { most = size_max(most, rule->scratch(t->items[i].rows, t->items[i].cols, sizeof(float), 1)); }
    }
    return most;
}

/* Returns where element `at` lies in arenas of the whole table. */
static inline OptimizerArenas optimizer_at(OptimizerArenas a, const HeldState* held, size_t at) {
    const size_t m = held_place(held, SLOT_M, at), v = held_place(held, SLOT_V, at);
    const OptimizerArenas there = {a.params + at, a.grads + at, m == SIZE_MAX ? NULL : a.m + m, v == SIZE_MAX ? NULL : a.v + v};
    return there;
}

/* Returns the numbers of an update for a tensor. */
static inline UpdateStep step_of(UpdateStep step, const Param* p) {
    step.param = p;
    step.weight_decay = param_specs[p->kind].matrix ? step.hyper->weight_decay : 0.0;
    return step;
}

/* Updates all tensors of a table, whose state is held whole. Weight decay acts on matrices only. Overwrites gradients. */
static inline void optimizer_update(const ParamTable* t, const HeldState* held, OptimizerArenas a, UpdateStep step,
                                    void* scratch) {
    for (int i = 0; i < t->count; i++) {
        const Param* p = &t->items[i];
        const OptimizerRule* rule = rule_of(t, p->kind);
        const OptimizerArenas own = optimizer_at(a, held, p->offset);
        step = step_of(step, p);
        if (rule->prepare) {
            rule->prepare(own, param_size(p), &step);
            rule->matrix(own.grads, p->rows, p->cols, scratch);
        }
        rule->update(own, param_size(p), &step);
    }
}

#endif
