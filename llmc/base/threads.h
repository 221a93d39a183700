/* threads.h -- tells how many threads OpenMP uses; checks that their stacks are large enough.
 *
 * Layers allocate nothing: their temporary memory is on the stack. A thread that OpenMP starts has a stack of the C library's
 * default size (8 MiB with glibc, 128 KiB with musl) or of $OMP_STACKSIZE. A stack that is too small crashes the program
 * without a message. So call matmul_stack_check() (matmul.h), which calls stack_check(), once before the first layer.
 */
#ifndef LLMC_THREADS_H
#define LLMC_THREADS_H

#include "llmc/base/utils.h"

#include <sys/resource.h>
#ifdef _OPENMP
#include <omp.h>
#include <pthread.h>
#endif

/* Returns the number of threads of the next parallel region. */
static inline size_t max_threads(void) {
#ifdef _OPENMP
    return (size_t)omp_get_max_threads();
#else
    return 1;
#endif
}

/* Returns the bytes of stack that each thread of a parallel region has left, not counting the caller's. SIZE_MAX if the caller
 * is the only thread. */
static inline size_t worker_stack(void) {
    size_t least = SIZE_MAX;
#ifdef _OPENMP
#pragma omp parallel reduction(min : least)
    {
        pthread_attr_t attr;
        void* lowest = NULL;
        size_t size = 0;
        if (omp_get_thread_num() != 0 && pthread_getattr_np(pthread_self(), &attr) == 0) {
            // the stack grows down and its upper part is in use: count what is below this frame
            if (pthread_attr_getstack(&attr, &lowest, &size) == 0) { least = (size_t)((char*)&attr - (char*)lowest); }
            pthread_attr_destroy(&attr);
        }
    }
#endif
    return least;
}

/* Checks that the main thread, which calls this, may use `caller` bytes of stack, and every other thread `worker` bytes. */
static inline bool stack_check(size_t caller, size_t worker, Error* e) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_STACK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < caller) {
        return fail(e, "the stack may grow to %zu KiB, wanted %zu KiB\n  hint: run ulimit -s %zu first",
                    (size_t)limit.rlim_cur >> 10, caller >> 10, round_up(caller, 1 << 20) >> 10);
    }
    const size_t found = worker_stack();
    if (found >= worker) { return true; }
    return fail(e, "OpenMP's threads have %zu KiB of stack, wanted %zu KiB\n  hint: set OMP_STACKSIZE=%zuM", found >> 10,
                worker >> 10, ceil_div(worker, 1 << 20));
}

#endif
