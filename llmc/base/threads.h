/* threads.h -- how many threads OpenMP uses, which of them is calling, and how they wait for each other. Without OpenMP there
 * is one.
 *
 * Layers allocate nothing, and their stack frames are small (dev/test/lint.sh has the limit): a thread that OpenMP starts may
 * have as little stack as 128 KiB, musl's default. Larger buffers lie in scratch memory that the caller gives, with a part
 * for each thread.
 */
#ifndef LLMC_THREADS_H
#define LLMC_THREADS_H

#include "llmc/base/os.h"  // defines: OS_RUN_FIRST

#include <pthread.h>
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

static inline void* threads_wait(void* gate) {
    pthread_mutex_lock((pthread_mutex_t*)gate);
    pthread_mutex_unlock((pthread_mutex_t*)gate);
    return NULL;
}

/* Starts the threads of the next parallel regions. OpenMP's library would end the program without an error line if one could
 * not start: so this first tries whether as many can live at once. */
static inline void threads_start(void) {
#ifdef _OPENMP
    const size_t count = max_threads();
    pthread_t* threads = (pthread_t*)xmalloc(count * sizeof *threads);
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    size_t started = 1;  // the calling one
    int cause = 0;
    pthread_mutex_lock(&gate);
    while (started < count && (cause = pthread_create(&threads[started], NULL, threads_wait, &gate)) == 0) { started++; }
    pthread_mutex_unlock(&gate);
    for (size_t i = 1; i < started; i++) { pthread_join(threads[i], NULL); }
    free(threads);
    if (started < count) {
        die("--threads: of %zu threads only %zu can be started: %s\n  hint: give --threads %zu, or raise the limits of ulimit",
            count, started, strerror(cause), started);
    }
#pragma omp parallel
    (void)thread_number();
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// waiting
//
// At the end of a parallel loop a thread spins for a while, and then sleeps. By default GNU's libgomp spins 300,000 times, and
// LLVM's libomp for 200 ms. If other programs use the cores, such a thread keeps a core from the thread that all wait for. A
// sleeping thread wakes late, which costs an idle machine 8 % of a step. So threads spin for a short time (dev/doc/training.md
// has the figures), unless the user has chosen.
//
// libgomp reads its variable in its constructor, before any constructor of the program and before main(). The functions in
// .preinit_array run before all constructors (Linux). The environment has no room for one more entry, so the variable stands
// in the place of PATH until the constructors of the libraries are done: none of them looks for programs. A static program, an
// environment without PATH, and a C library without .preinit_array (musl) keep the default. libomp reads its variables in the
// first parallel region.

#ifdef _OPENMP
static char threads_spin[] = "GOMP_SPINCOUNT=2000";  // 15 to 100 us, by the processor
static struct {
    char **place, *text;
} threads_path;  // the entry of the environment that threads_spin replaces, and the entry's text

/* Returns the first entry of the environment that begins with `name`; NULL: none. Calls no library: none is ready yet. */
static inline char** threads_variable(char** environment, const char* name) {
    for (; *environment; environment++) {
        size_t n = 0;
        while (name[n] && (*environment)[n] == name[n]) { n++; }
        if (!name[n]) { return environment; }
    }
    return NULL;
}

static inline void threads_before_libraries(int argc, char** argv, char** environment) {
    (void)argc, (void)argv;
    if (threads_variable(environment, "OMP_WAIT_POLICY") || threads_variable(environment, "GOMP_SPINCOUNT=")) { return; }
    threads_path.place = threads_variable(environment, "PATH=");
    if (!threads_path.place) { return; }
    threads_path.text = *threads_path.place;
    *threads_path.place = threads_spin;
}
OS_RUN_FIRST(threads_before_libraries)

__attribute__((constructor)) static void threads_after_libraries(void) {
    if (threads_path.place) { *threads_path.place = threads_path.text; }
#ifdef __clang__
    if (getenv("OMP_WAIT_POLICY") || getenv("KMP_BLOCKTIME")) { return; }
    setenv("KMP_BLOCKTIME", "1", 0);  // ms, and no shorter time is possible ...
    setenv("KMP_USE_YIELD", "2", 0);  // ... so they offer their core to others meanwhile
#endif
}
#endif

#endif
