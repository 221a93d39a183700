/* arena.cuh -- the GPU trainer's memory: regions that are allocated once and handed out in parts. */
#ifndef LLMC_ARENA_CUH
#define LLMC_ARENA_CUH

#include "llmc/base/utils.h"  // defines: round_up

/* A region that the same code first measures (base NULL) and then hands out. Units: bytes. */
typedef struct {
    char* base;
    size_t used;
} Arena;

template <typename T>
static T* take(Arena* a, size_t count) {
    T* p = a->base ? (T*)(a->base + a->used) : NULL;
    a->used += round_up(count * sizeof(T), 256);
    return p;
}

#endif
