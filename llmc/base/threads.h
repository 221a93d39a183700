/* threads.h -- how many threads OpenMP uses, and whether their stacks are large enough.
 *
 * Layers allocate nothing: what they need while they run lies on the stack. A thread that OpenMP starts has a stack of the
 * C library's default size (8 MiB with glibc, 128 KiB with musl) or of $OMP_STACKSIZE. One that is too small ends the
 * program without a word, so a program asks stack_check() once, before the first layer.
 */
#ifndef LLMC_THREADS_H
#define LLMC_THREADS_H

#include "llmc/base/utils.h"

#include <sys/resource.h>
#ifdef _OPENMP
#include <omp.h>
#include <pthread.h>
#endif

/* Threads of the next parallel region. */
static inline size_t max_threads(void) {
#ifdef _OPENMP
    return (size_t)omp_get_max_threads();
#else
    return 1;
#endif
}

/* Bytes of stack that every thread of a parallel region has left, the caller not counted. SIZE_MAX where it is alone. */
static inline size_t worker_stack(void) {
    size_t least = SIZE_MAX;
#ifdef _OPENMP
#pragma omp parallel reduction(min : least)
    {
        pthread_attr_t attr;
        void* lowest = NULL;
        size_t size = 0;
        if (omp_get_thread_num() != 0 && pthread_getattr_np(pthread_self(), &attr) == 0) {
            // its upper part already holds the thread's own data: what counts is what lies below us
            if (pthread_attr_getstack(&attr, &lowest, &size) == 0) { least = (size_t)((char*)&attr - (char*)lowest); }
            pthread_attr_destroy(&attr);
        }
    }
#endif
    return least;
}

/* Whether the main thread, which calls, may take `caller` bytes of stack, and each other thread `worker` bytes. */
static inline bool stack_check(size_t caller, size_t worker, Error* e) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_STACK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < caller) {
        return fail(e, "the stack may grow to %zu KiB, wanted %zu KiB\n  hint: ulimit -s %zu", (size_t)limit.rlim_cur >> 10,
                    caller >> 10, round_up(caller, 1 << 20) >> 10);
    }
    const size_t found = worker_stack();
    if (found >= worker) { return true; }
    return fail(e, "OpenMP's threads have %zu KiB of stack, wanted %zu KiB\n  hint: OMP_STACKSIZE=%zuM", found >> 10,
                worker >> 10, ceil_div(worker, 1 << 20));
}

#endif
