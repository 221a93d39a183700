/* not_finite.h -- names the first element of a tensor that is inf or NaN, for runs that diverge and for --debug. The GPU's
 * search is in llmc/gpu/debug.cuh.
 */
#ifndef LLMC_NOT_FINITE_H
#define LLMC_NOT_FINITE_H

#include "llmc/base/utils.h"
#include "llmc/config.h"  // defines: ModelConfig, ParamTable, q_width, qkv_width

#include <math.h>

enum { TENSOR_TEXT = 256 };  // bytes of a tensor's name with the position of an element

/* A tensor (rows, width): fp32, or the type of the weights. */
typedef struct {
    const char* name;
    int layer;  // -1: none, or part of the name
    const void* data;
    bool fp32;
    size_t rows, width, pitch;
} NamedTensor;

/* Writes the name of element `index`, counted without padding. */
static inline void tensor_element_text(const NamedTensor* t, size_t index, char out[TENSOR_TEXT]) {
    char where[32] = "";
    if (t->layer >= 0) { snprintf(where, sizeof where, " of layer %d", t->layer); }
    snprintf(out, TENSOR_TEXT, "%s%s, row %zu, column %zu", t->name, where, index / t->width, index % t->width);
}

/* Looks through `count` fp32 tensors without padding, and names the first element that is not finite. Returns false if there
 * is none. */
static inline bool name_first_not_finite(const NamedTensor* list, int count, char out[TENSOR_TEXT]) {
    for (int i = 0; i < count; i++) {
        const float* x = (const float*)list[i].data;
        for (size_t k = 0; k < list[i].rows * list[i].width; k++) {
            if (isfinite(x[k])) { continue; }
            tensor_element_text(&list[i], k, out);
            return true;
        }
    }
    return false;
}

/* Names the first element that is not finite of an fp32 arena laid out by a table. `of` precedes the tensor's name. */
static inline bool name_param_not_finite(const ParamTable* t, const float* arena, const char* of, char out[TENSOR_TEXT]) {
    for (int i = 0; i < t->count; i++) {
        const Param* p = &t->items[i];
        char text[128];
        snprintf(text, sizeof text, "%s%s", of, p->name);
        const NamedTensor param = {text, -1, arena + p->offset, true, p->rows, p->cols, p->cols};
        if (name_first_not_finite(&param, 1, out)) { return true; }
    }
    return false;
}

enum { BLOCK_TENSORS = 6 };

/* Lists what the forward pass of block l leaves, in its order, from the rows at `data`: N rows; q, k, v in `parts`. */
static inline void block_tensors(NamedTensor list[BLOCK_TENSORS], const ModelConfig* c, int l, size_t N, int parts,
                                 const void* const data[BLOCK_TENSORS]) {
    static const char* const names[BLOCK_TENSORS] = {"the residual stream before attention", "q, k, v",  "attention's output",
                                                     "the residual stream after attention",  "gate, up", "swiglu's output"};
    const size_t C = (size_t)c->hidden_size, F = (size_t)c->intermediate_size, p = (size_t)parts;
    const size_t widths[BLOCK_TENSORS] = {C, (size_t)qkv_width(c) / p, (size_t)q_width(c), C, 2 * F, F};
    for (int i = 0; i < BLOCK_TENSORS; i++) {
        const NamedTensor t = {names[i], l, data[i], false, i == 1 ? N * p : N, widths[i], widths[i]};
        list[i] = t;
    }
}

#endif
