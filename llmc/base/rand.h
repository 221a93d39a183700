/* rand.h -- random numbers as a pure function of their position: Philox 4x32-10 (Salmon et al., "Parallel Random Numbers:
 * As Easy as 1, 2, 3", SC 2011). There is no state to save: draw i of stream s under a seed has the same bits in C, CUDA and
 * Python, in any order and on any number of threads.
 *
 *   counter = (index low, index high, stream, purpose)    key = (seed low, seed high)
 *
 * `purpose` separates the uses; `stream` is the tensor, shard or step within one use.
 */
#ifndef LLMC_RAND_H
#define LLMC_RAND_H

#include "llmc/base/utils.h"

#include <math.h>

typedef enum {
    RAND_INIT = 0,            // weights; stream = ordinal of the tensor in the parameter table, index = element / 2
    RAND_SHUFFLE_SHARDS = 1,  // order of the shards; stream = epoch
    // 2 was row order 1
    RAND_SAMPLE = 3,         // sampled tokens; stream = step of training (0: --generate), index = token
    RAND_ROUND = 4,          // stochastic rounding of m and v; stream = tensor, index = step << 40 | element / 4
    RAND_TALES = 5,          // dev/data/tinytales.c; stream = story, index = draw
    RAND_ORDER_ROWS = 6,     // order of rows in a shard (row order 2); see llmc/files/dataloader.h
    RAND_MIX = 7,            // order of the sources in a block of rows; stream = block; see llmc/files/mix.h
    RAND_ADAPTERS = 8,       // LoRA's A; stream = ordinal of the tensor among the adapters, index = element / 2
    RAND_ROUND_WEIGHTS = 9,  // stochastic rounding of weights; stream = tensor, index = step << 40 | element / 8
} RandPurpose;

typedef struct {
    uint32_t v[4];
} Philox;

LLMC_HOST_DEVICE static inline Philox philox(uint64_t seed, RandPurpose purpose, uint32_t stream, uint64_t index) {
    uint32_t c0 = (uint32_t)index, c1 = (uint32_t)(index >> 32), c2 = stream, c3 = (uint32_t)purpose;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
#ifdef __CUDA_ARCH__
        asm("" : "+r"(c0), "+r"(c2));  // hides that they are halves; otherwise nvcc multiplies 64-bit factors
#endif
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    Philox r = {{c0, c1, c2, c3}};
    return r;
}

/* Returns words a, b of a draw as a double in [0, 1) with 53 random bits. */
LLMC_HOST_DEVICE static inline double philox_double(Philox r, int a, int b) {
    uint64_t bits = ((uint64_t)r.v[a] << 32 | r.v[b]) >> 11;
    return (double)bits * (1.0 / 9007199254740992.0);
}

/* Returns an integer in [0, n): the high half of a 64 x 64 bit product. The bias, below n / 2^64, is negligible. */
static inline uint64_t philox_below(uint64_t seed, RandPurpose purpose, uint32_t stream, uint64_t index, uint64_t n) {
    Philox r = philox(seed, purpose, stream, index);
    uint64_t x = (uint64_t)r.v[0] << 32 | r.v[1];
    return (uint64_t)(((unsigned __int128)x * n) >> 64);
}

/* Fills x[0..n) with elements [first, first + n) of a tensor of normals with deviation `std`; first is even. Elements 2i and
 * 2i+1 are the Box-Muller pair of draw i, computed in double and rounded once: the error of a libm's log, sqrt, sin or cos
 * almost never reaches the float. */
static inline void rand_normal(float* x, size_t first, size_t n, double std, uint64_t seed, uint32_t tensor) {
    const double two_pi = 6.283185307179586476925286766559;
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < (n + 1) / 2; i++) {
        Philox r = philox(seed, RAND_INIT, tensor, first / 2 + i);
        double radius = sqrt(-2.0 * log(1.0 - philox_double(r, 0, 1)));  // 1 - u is never zero
        double angle = two_pi * philox_double(r, 2, 3);
        x[2 * i] = (float)(std * (radius * cos(angle)));
        if (2 * i + 1 < n) { x[2 * i + 1] = (float)(std * (radius * sin(angle))); }
    }
}

/* Does the same for numbers that are evenly distributed in [-bound, bound). Draw i makes elements 2i and 2i+1. */
static inline void rand_even(float* x, size_t first, size_t n, double bound, uint64_t seed, uint32_t tensor) {
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) {
        const Philox r = philox(seed, RAND_ADAPTERS, tensor, (first + i) / 2);
        x[i] = (float)(bound * (2.0 * philox_double(r, (int)(i % 2) * 2, (int)(i % 2) * 2 + 1) - 1.0));
    }
}

#endif
