/* not_finite.h -- names the first element of a tensor that is inf or NaN, for runs that diverge and for --debug. The GPU's
 * search is in llmc/gpu/debug.cuh.
 */
#ifndef LLMC_NOT_FINITE_H
#define LLMC_NOT_FINITE_H

#include "llmc/base/utils.h"

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

/* Names the first element that is not finite of the first of `count` fp32 tensors without padding that has one. Returns false
 * if there is none. */
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

#endif
