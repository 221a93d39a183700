/* lora.h -- LoRA (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021). A weight matrix W stays as it is; two
 * small matrices beside it, A (r, C) and B (OC, r), are trained instead. fp32.
 *
 *   t  = s x A^T            s = alpha / r             x: (N, C), t: (N, r), kept for backward
 *   y += t B^T              y = x W^T, the product that they are beside
 *
 *   dt  = s dy B
 *   dx += dt A,    dA += dt^T x,    dB += dy^T t
 *
 * B begins as zero, so a new adapter has no effect. Up to three matrices share their input x and the rows of y: q, k, v, and
 * gate, up. Their A matrices lie one below the other, so one product makes t (N, parts r) for all. Each B makes a part of y's
 * columns. matmul.h computes the products, on views of y, t and their gradients.
 */
#ifndef LLMC_LORA_H
#define LLMC_LORA_H

#include "llmc/config.h"  // defines: ModelConfig, ParamTable, lora_pairs, param_at, lora_scale
#include "llmc/matmul.h"  // defines: matmul_vectors

enum { LORA_PARTS = 3 };

/* The adapters beside one product. Offsets are in the arena that holds the adapters, or their gradients. */
typedef struct {
    int parts;  // 0: no adapters, all functions return at once
    int r;
    float scale;
    int C, OC;                                 // widths of x and y
    size_t a;                                  // offset of A (parts r, C)
    size_t b[LORA_PARTS];                      // offset of each B (width, r)
    int first[LORA_PARTS], width[LORA_PARTS];  // its columns of y
} Lora;

/* The arenas of the adapters, and the rows between A and B of one product. */
typedef struct {
    const float* w;  // the adapters
    float* dw;       // their gradients, which accumulate
    float* t;        // (N, parts r) forward writes them for backward
    float* dt;       // (N, parts r) room for their gradient
} LoraMemory;

/* Returns the first of lora_pairs beside a product of a block; the last product's pairs end at NUM_LORA_PAIRS. */
static inline int lora_first_pair(int linear) {
    static const int first[BLOCK_LINEARS + 1] = {0, 3, 4, 6, NUM_LORA_PAIRS};
    return first[linear];
}

/* Returns the elements of a row of t beside a product of a block. */
static inline int lora_width(const LoraConfig* l, int linear) {
    int width = 0;
    for (int i = lora_first_pair(linear); i < lora_first_pair(linear + 1); i++) { width += l->on >> i & 1 ? l->rank : 0; }
    return width;
}

/* Returns the largest of them. */
static inline int lora_most_width(const LoraConfig* l) {
    int most = 0;
    for (int i = 0; i < BLOCK_LINEARS; i++) {
        if (lora_width(l, i) > most) { most = lora_width(l, i); }
    }
    return most;
}

/* Finds the adapters beside a product of a layer in the table of adapters; the head has none. */
static inline Lora lora_at(const ModelConfig* c, const ParamTable* adapters, LinearKind linear, int layer) {
    Lora l;
    memset(&l, 0, sizeof l);
    if (c->lora.rank == 0 || linear == LINEAR_HEAD) { return l; }
    l.r = c->lora.rank;
    l.scale = lora_scale(&c->lora);
    for (int i = lora_first_pair(linear); i < lora_first_pair(linear + 1); i++) {
        size_t rows = 0, cols = 0;
        param_shape(c, lora_pairs[i].matrix, &rows, &cols);
        if (c->lora.on >> i & 1) {
            if (l.parts == 0) { l.a = param_at(adapters, lora_pairs[i].a, layer)->offset; }
            l.b[l.parts] = param_at(adapters, lora_pairs[i].b, layer)->offset;
            l.first[l.parts] = l.OC;
            l.width[l.parts++] = (int)rows;
        }
        l.OC += (int)rows;
        l.C = (int)cols;
    }
    return l;
}

// ---------------------------------------------------------------------------------------------------------------------
// the plain loops

/* Writes m->t and adds to y (N, OC) from x (N, C). */
static inline void lora_forward_plain(float* y, const LoraMemory* m, const float* x, const Lora* l, size_t N) {
    const float* w = m->w;
    float* t = m->t;
    const size_t C = (size_t)l->C, OC = (size_t)l->OC, r = (size_t)l->r, R = (size_t)l->parts * r;
#pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        float *t_row = t + n * R, *y_row = y + n * OC;
        for (size_t k = 0; k < R; k++) {
            float sum = 0;
            for (size_t c = 0; c < C; c++) { sum += x[n * C + c] * w[l->a + k * C + c]; }
            t_row[k] = l->scale * sum;
        }
        for (int p = 0; p < l->parts; p++) {
            for (size_t o = 0; o < (size_t)l->width[p]; o++) {
                const float* b = w + l->b[p] + o * r;
                for (size_t k = 0; k < r; k++) { y_row[(size_t)l->first[p] + o] += t_row[(size_t)p * r + k] * b[k]; }
            }
        }
    }
}

/* Adds to dx (N, C) and to the adapters' gradients m->dw, from dy (N, OC), x (N, C) and the forward pass's m->t. Writes
 * m->dt. */
static inline void lora_backward_plain(float* dx, const LoraMemory* m, const float* dy, const float* x, const Lora* l,
                                       size_t N) {
    const float *w = m->w, *t = m->t;
    float *dw = m->dw, *dt = m->dt;
    const size_t C = (size_t)l->C, OC = (size_t)l->OC, r = (size_t)l->r, R = (size_t)l->parts * r;
    for (size_t n = 0; n < N; n++) {
        for (size_t i = 0; i < R; i++) {
            const size_t p = i / r, k = i % r, first = (size_t)l->first[p];
            float sum = 0;
            for (size_t o = 0; o < (size_t)l->width[p]; o++) {
                sum += dy[n * OC + first + o] * w[l->b[p] + o * r + k];
                dw[l->b[p] + o * r + k] += dy[n * OC + first + o] * t[n * R + i];
            }
            dt[n * R + i] = l->scale * sum;
            for (size_t c = 0; c < C; c++) {
                dx[n * C + c] += dt[n * R + i] * w[l->a + i * C + c];
                dw[l->a + i * C + c] += dt[n * R + i] * x[n * C + c];
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// the functions that the model calls take the plain loops' arguments, and scratch of matmul_scratch() bytes

static inline void lora_rescale(float* t, float scale, size_t n) {
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) { t[i] *= scale; }
}

static inline void lora_forward(float* y, void* scratch, const LoraMemory* m, const float* x, const Lora* l, size_t N) {
    if (l->parts == 0) { return; }
    if (IS_PLAIN) {
        lora_forward_plain(y, m, x, l, N);
        return;
    }
    const size_t C = (size_t)l->C, OC = (size_t)l->OC, r = (size_t)l->r, R = (size_t)l->parts * r;
    matmul_vectors(sum_in(m->t, NULL, R), scratch, by_rows(x, C), transposed(by_rows(m->w + l->a, C)), N, R, C);
    lora_rescale(m->t, l->scale, N * R);
    for (size_t p = 0; p < (size_t)l->parts; p++) {
        float* part = y + l->first[p];
        matmul_vectors(sum_in(part, part, OC), scratch, by_rows(m->t + p * r, R), transposed(by_rows(m->w + l->b[p], r)), N,
                       (size_t)l->width[p], r);
    }
}

static inline void lora_backward(float* dx, void* scratch, const LoraMemory* m, const float* dy, const float* x, const Lora* l,
                                 size_t N) {
    if (l->parts == 0) { return; }
    if (IS_PLAIN) {
        lora_backward_plain(dx, m, dy, x, l, N);
        return;
    }
    const size_t C = (size_t)l->C, OC = (size_t)l->OC, r = (size_t)l->r, R = (size_t)l->parts * r;
    float* dt = m->dt;
    for (size_t p = 0; p < (size_t)l->parts; p++) {
        const size_t width = (size_t)l->width[p];
        const MatrixView d = by_rows(dy + l->first[p], OC);
        float* db = m->dw + l->b[p];
        matmul_vectors(sum_in(dt + p * r, NULL, R), scratch, d, by_rows(m->w + l->b[p], r), N, r, width);
        matmul_vectors(sum_in(db, db, r), scratch, transposed(d), by_rows(m->t + p * r, R), width, r, N);
    }
    lora_rescale(dt, l->scale, N * R);
    float* da = m->dw + l->a;
    matmul_vectors(sum_in(da, da, C), scratch, transposed(by_rows(dt, R)), by_rows(x, C), R, C, N);
    matmul_vectors(sum_in(dx, dx, C), scratch, by_rows(dt, R), by_rows(m->w + l->a, C), N, C, R);
}

// ---------------------------------------------------------------------------------------------------------------------
// merging

/* Adds s B A to elements [first, first + n) of a matrix (rows, C). */
static inline void lora_merge(float* w, size_t first, size_t n, const float* a, const float* b, const LoraConfig* l, size_t C) {
    const size_t r = (size_t)l->rank;
    const float scale = lora_scale(l);
#pragma omp parallel for schedule(static) if (n * r > 1 << 16)  // GGUF takes a row at a time
    for (size_t i = 0; i < n; i++) {
        const size_t row = (first + i) / C, c = (first + i) % C;
        float sum = 0;
        for (size_t k = 0; k < r; k++) { sum += b[row * r + k] * a[k * C + c]; }
        w[i] += scale * sum;
    }
}

#endif
