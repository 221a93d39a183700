/* arena.h -- the CPU trainer's memory: regions that are mapped once and handed out in parts.
 */
#ifndef LLMC_ARENA_H
#define LLMC_ARENA_H

#include "llmc/base/utils.h"  // defines: die, round_up

#include <sys/mman.h>

/* A region that the same code first measures (base NULL) and then hands out, so the memory table cannot differ from what is
 * allocated. Units: floats. */
typedef struct {
    float* base;
    size_t used;
} Arena;

static inline float* take(Arena* a, size_t count) {
    float* p = a->base ? a->base + a->used : NULL;
    a->used += round_up(count, 16);  // 64 bytes: a cache line, and the widest vector
    return p;
}

/* Maps zeroed pages, huge ones if the system has them: products walk matrices in tiles, and small pages cost TLB misses. */
static inline float* map_memory(size_t bytes, const char* what) {
    void* p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) { die("out of memory: could not allocate %.1f MiB for %s", (double)bytes / (1 << 20), what); }
#ifdef MADV_HUGEPAGE
    madvise(p, bytes, MADV_HUGEPAGE);
#endif
    return (float*)p;
}

#endif
