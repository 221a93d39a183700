/* arena.cuh -- regions of memory that the same code first measures and then hands out.
 */
#ifndef LLMC_ARENA_CUH
#define LLMC_ARENA_CUH

#include "llmc/base/utils.h"  // defines: round_up

/* A region of memory; base NULL: it is only measured. Units: bytes. */
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
