/* threads.h -- how many threads OpenMP uses, and which of them is calling. Without OpenMP there is one.
 *
 * Layers allocate nothing, and their stack frames are small (dev/test/lint.sh has the limit): a thread that OpenMP starts may
 * have as little stack as 128 KiB, musl's default. Larger buffers lie in scratch memory that the caller gives, with a part
 * for each thread.
 */
#ifndef LLMC_THREADS_H
#define LLMC_THREADS_H

#include <stddef.h>
#ifdef _OPENMP
#include <omp.h>
#endif

/* Returns the number of threads of the next parallel region. */
static inline size_t max_threads(void) {
#ifdef _OPENMP
    return (size_t)omp_get_max_threads();
#else
    return 1;
#endif
}

/* Returns the number of the calling thread in its parallel region, 0 and up. */
static inline size_t thread_number(void) {
#ifdef _OPENMP
    return (size_t)omp_get_thread_num();
#else
    return 0;
#endif
}

#endif
