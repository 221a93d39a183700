/* optimizer.h -- the table of optimizers, the global norm of the gradients, where a rank's part of the optimizer's state lies, and
 * one update on the CPU. The CUDA trainer's twins are optimizer.cuh and gpu/update.cuh.
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
    double weight_decay;  // of the tensor: matrices alone decay
} UpdateStep;

typedef struct {
    const char* word;               // names it in trainer_state.json
    bool (*takes)(ParamKind kind);  // whether it updates these tensors; NULL: all
    unsigned slots;                 // bit SLOT_M, SLOT_V: the state that it keeps
    // on elements a (n)
    void (*prepare)(OptimizerArenas a, size_t n, const UpdateStep* step);  // NULL: its unit is an element
    void (*update)(OptimizerArenas a, size_t n, const UpdateStep* step);
    void (*matrix)(float* x, size_t rows, size_t cols, void* scratch);  // x (rows, cols)
    size_t (*scratch)(size_t rows, size_t cols);                        // bytes; also on the GPU
} OptimizerRule;

static inline void adamw_rule(OptimizerArenas a, size_t n, const UpdateStep* step) {
    const Hyperparameters* h = step->hyper;
    const AdamW rule = {step->lr, h->beta1, h->beta2, h->eps, step->weight_decay, step->grad_scale, step->updates};
    adamw_update(a.params, a.grads, a.m, a.v, n, &rule);
}

#ifdef TEST_RULES  // a file of the tests, which adds a row and chooses it
#include TEST_RULES
#else
#define TEST_ROWS
#define RULE_OF_RUN 0
#endif

static const OptimizerRule optimizer_rules[] = {
    {"adamw", NULL, 1 << SLOT_M | 1 << SLOT_V, NULL, adamw_rule, NULL, NULL},  // updates what another rule does not take
    TEST_ROWS};

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

/* Returns whether the state of a tensor has this slot, by its name. All have master weights. */
static inline bool slot_kept(const ParamTable* t, const Param* p, const char* slot) {
    const SlotKind kind = strcmp(slot, slot_names[SLOT_M]) == 0   ? SLOT_M
                          : strcmp(slot, slot_names[SLOT_V]) == 0 ? SLOT_V
                                                                  : SLOT_MASTER;
    return kind == SLOT_MASTER || (rule_of(t, p->kind)->slots >> kind & 1);
}

// ---------------------------------------------------------------------------------------------------------------------
// the state that a rank holds

/* Elements [first, first + count) of the arena of trained tensors: of one rule, and adjacent in each slot. */
typedef struct {
    size_t first, count;
    const OptimizerRule* rule;
    size_t place[NUM_SLOTS];  // where they begin in the slot's arena; SLOT_WEIGHTS is not used
} HeldRange;

typedef struct {
    HeldRange* items;  // in the order of the arena
    int count;
    size_t elements[NUM_SLOTS];  // of each slot's arena
} HeldState;

/* Lists the state of a rank that owns these ranges. Each tensor has the gap behind it. Free `items`. */
static inline HeldState held_state(const ParamTable* t, const ArenaRanges* own) {
    HeldState list;
    memset(&list, 0, sizeof list);
    list.items = (HeldRange*)xcalloc((size_t)t->count + own->count, sizeof(HeldRange));
    int i = 0;  // the tensor that holds a range's first element
    for (size_t r = 0; r < own->count; r++) {
        const size_t end = own->items[r].first + own->items[r].count;
        for (size_t at = own->items[r].first, stop; at < end; at = stop) {
            while (i + 1 < t->count && t->items[i + 1].offset <= at) { i++; }
            stop = size_min(end, i + 1 < t->count ? t->items[i + 1].offset : t->elements);
            const OptimizerRule* rule = rule_of(t, t->items[i].kind);
            HeldRange* h = list.count > 0 ? &list.items[list.count - 1] : NULL;
            if (!h || h->rule != rule || h->first + h->count != at) {
                h = &list.items[list.count++];
                h->first = at;
                h->rule = rule;
                memcpy(h->place, list.elements, sizeof h->place);
            }
            h->count += stop - at;
            for (int slot = SLOT_MASTER; slot < NUM_SLOTS; slot++) {
                if (slot == SLOT_MASTER || (rule->slots >> slot & 1)) { list.elements[slot] += stop - at; }
            }
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

/* Returns the first held range that ends behind element `at` of the arena; their end if there is none. */
static inline const HeldRange* held_from(const HeldState* list, size_t at) {
    int below = 0, above = list->count;
    while (below < above) {
        const int middle = (below + above) / 2;
        if (list->items[middle].first + list->items[middle].count > at) {
            above = middle;
        } else {
            below = middle + 1;
        }
    }
    return list->items + below;
}

/* Returns the range that holds element `at`; NULL: it is another rank's. */
static inline const HeldRange* held_at(const HeldState* list, size_t at) {
    const HeldRange* h = held_from(list, at);
    return h < list->items + list->count && h->first <= at ? h : NULL;
}

/* Returns the place of element `at`, which the rank holds, in a slot's arena. */
static inline size_t held_place(const HeldState* list, SlotKind slot, size_t at) {
    const HeldRange* h = held_at(list, at);
    return h->place[slot] + (at - h->first);
}

// ---------------------------------------------------------------------------------------------------------------------
// the norm, and the update

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

/* Returns the bytes of scratch that the norm and the update need. */
static inline size_t optimizer_scratch(const ParamTable* t) {
    size_t most = global_norm_scratch(t->elements);
    for (int i = 0; i < t->count; i++) {
        const OptimizerRule* rule = rule_of(t, t->items[i].kind);
        if (rule->scratch) { most = size_max(most, rule->scratch(t->items[i].rows, t->items[i].cols)); }
    }
    return most;
}

/* Returns where element `at` lies in arenas of the whole table. */
static inline OptimizerArenas optimizer_at(OptimizerArenas a, const HeldState* held, size_t at) {
    const unsigned slots = held_at(held, at)->rule->slots;
    const OptimizerArenas there = {a.params + at, a.grads + at, slots >> SLOT_M & 1 ? a.m + held_place(held, SLOT_M, at) : NULL,
                                   slots >> SLOT_V & 1 ? a.v + held_place(held, SLOT_V, at) : NULL};
    return there;
}

/* Updates all tensors of a table, whose state is held whole. Weight decay acts on matrices only. Overwrites gradients. */
static inline void optimizer_update(const ParamTable* t, const HeldState* held, OptimizerArenas a, UpdateStep step,
                                    void* scratch) {
    for (int i = 0; i < t->count; i++) {
        const Param* p = &t->items[i];
        const OptimizerRule* rule = rule_of(t, p->kind);
        const OptimizerArenas own = optimizer_at(a, held, p->offset);
        step.weight_decay = param_specs[p->kind].matrix ? step.hyper->weight_decay : 0.0;
        if (rule->prepare) {
            rule->prepare(own, param_size(p), &step);
            rule->matrix(own.grads, p->rows, p->cols, scratch);
        }
        rule->update(own, param_size(p), &step);
    }
}

#endif
