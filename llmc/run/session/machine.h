/* machine.h -- the machine of a run: the threads that compute, and the names of processor and GPU (base/os.h asks the system).
 * It also names the properties of a CPU build that decide how results are rounded.
 */
#ifndef LLMC_MACHINE_H
#define LLMC_MACHINE_H

#include "llmc/base/os.h"       // defines: os_cores, os_cores_to_use, os_processor
#include "llmc/base/threads.h"  // defines: max_threads, threads_start
#include "llmc/matmul_amx.h"    // defines: LLMC_AMX, amx_available

/* Sets the number of OpenMP's threads, starts them and returns it. 0: all cores of this process. OpenMP knows which those
 * are, but not how much of their time a container gets. */
static inline int machine_threads(int wanted) {
#ifdef _OPENMP
    const uint64_t cores = os_cores_to_use();
    if (wanted > 0) {
        omp_set_num_threads(wanted);
    } else if (!getenv("OMP_NUM_THREADS") && cores < (uint64_t)omp_get_max_threads()) {
        omp_set_num_threads((int)cores);
    }
#endif
    (void)wanted;
    threads_start();
    return (int)max_threads();
}

/* Writes what the CPU trainer's results depend on besides the run's options: "FP32, GCC 12.2.0, AVX-512, FMA, AMX". */
static inline void cpu_build(char* out, size_t cap) {
    const char *compiler = "GCC ", *vectors = "SSE", *fma = "", *amx = "";
#ifdef __clang__
    compiler = "";  // its version begins with its name
#endif
#ifdef __AVX__
    vectors = "AVX";
#endif
#ifdef __AVX512F__
    vectors = "AVX-512";
#endif
#ifdef __aarch64__
    vectors = "NEON";
#endif
#ifdef LLMC_PLAIN
    vectors = "plain loops";
#endif
#ifdef __FMA__
    fma = ", FMA";
#endif
#ifdef LLMC_AMX
    if (amx_available()) { amx = ", AMX"; }
#endif
    snprintf(out, cap, "FP32, %s%.60s, %s%s%s", compiler, __VERSION__, vectors, fma, amx);
}

/* Writes "Intel(R) Xeon(R) Platinum 8480, 2 cores, 2 threads" for the screen and the log, the GPU's name first if `gpu` is not
 * NULL. Returns `out`. */
static inline const char* run_machine(const char* gpu, int threads, char* out, size_t cap) {
    char cpu[128];
    os_processor(cpu, sizeof cpu);
    snprintf(out, cap, "%.100s%s%.100s, %ld cores, %d thread%s", gpu ? gpu : "", gpu ? ", " : "", cpu, os_cores(), threads,
             threads == 1 ? "" : "s");
    return out;
}

#endif
