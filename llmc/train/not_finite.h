/* not_finite.h -- names the first element of a tensor that is inf or NaN, for runs that diverge and for --debug. A trainer
 * shows its tensors to a search one after the other, in the order of computation. The GPU's part is in llmc/gpu/debug.cuh.
 */
#ifndef LLMC_NOT_FINITE_H
#define LLMC_NOT_FINITE_H

#include "llmc/base/utils.h"
#include "llmc/config.h"  // defines: ParamTable, Param, param_size

#include <math.h>

enum { TENSOR_TEXT = 256 };  // bytes of a tensor's name with the position of an element

/* A tensor (rows, width). */
typedef struct {
    const char* name;  // NULL: nobody looks at it
    int layer;         // -1: none, or part of the name
    const void* data;
    size_t bytes;  // of an element: 4 are fp32, 2 the type of a 16-bit build's weights
    size_t rows, width, pitch;
} NamedTensor;

typedef struct {
    char* name;  // (TENSOR_TEXT) of the first element that was found
    bool found;
    size_t (*first)(const void* ctx, const NamedTensor* t);  // returns an element's index without padding; SIZE_MAX: none
    const void* ctx;
} FiniteSearch;

/* Looks through a tensor, unless an earlier one was found. */
static inline void search_tensor(FiniteSearch* s, NamedTensor t) {
    char layer[32] = "";
    if (s->found || !t.name) { return; }
    const size_t index = s->first(s->ctx, &t);
    if (index == SIZE_MAX) { return; }
    if (t.layer >= 0) { snprintf(layer, sizeof layer, " of layer %d", t.layer); }
    snprintf(s->name, TENSOR_TEXT, "%s%s, row %zu, column %zu", t.name, layer, index / t.width, index % t.width);
    s->found = true;
}

/* Looks through n elements of p, from `first` on, or of what belongs to them: `of` says what ("the gradient of "). */
static inline void search_param(FiniteSearch* s, const char* of, const Param* p, size_t first, size_t n, const void* data,
                                size_t bytes) {
    char text[160];
    const bool whole = n == param_size(p);
    snprintf(text, sizeof text, "%s%s", of, p->name);
    if (!whole) { snprintf(text, sizeof text, "%s%s from element %zu on", of, p->name, first); }
    const NamedTensor t = {text, -1, data, bytes, whole ? p->rows : 1, whole ? p->cols : n, whole ? p->cols : n};
    search_tensor(s, t);
}

/* Looks through an arena that a table lays out. */
static inline void search_arena(FiniteSearch* s, const char* of, const ParamTable* t, const void* arena, size_t bytes) {
    for (int i = 0; i < t->count; i++) {
        const Param* p = &t->items[i];
        search_param(s, of, p, 0, param_size(p), (const char*)arena + p->offset * bytes, bytes);
    }
}

/* Searches fp32 tensors on the host. */
static inline size_t first_not_finite(const void* ctx, const NamedTensor* t) {
    (void)ctx;
    for (size_t row = 0; row < t->rows; row++) {
        const float* x = (const float*)t->data + row * t->pitch;
        for (size_t i = 0; i < t->width; i++) {
            if (!isfinite(x[i])) { return row * t->width + i; }
        }
    }
    return SIZE_MAX;
}

static inline FiniteSearch finite_search(char name[TENSOR_TEXT]) {
    const FiniteSearch s = {name, false, first_not_finite, NULL};
    return s;
}

#endif
