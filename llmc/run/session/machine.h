/* machine.h -- the machine of a run: available main memory and cores within the limits of cgroups and ulimit, the peak memory
 * of this process, and the names of processor and GPU. It also names the properties of a CPU build that decide how results are
 * rounded.
 */
#ifndef LLMC_MACHINE_H
#define LLMC_MACHINE_H

#include "llmc/base/utils.h"    // defines: Error, path_join
#include "llmc/base/threads.h"  // defines: max_threads
#include "llmc/matmul_amx.h"    // defines: LLMC_AMX, amx_available
#include "llmc/base/text.h"     // defines: text_starts

#include <sys/resource.h>

/* Returns the number in a file that holds one number; UINT64_MAX for "max" or a missing file. */
static inline uint64_t read_number(const char* path) {
    unsigned long long value = 0;
    FILE* f = fopen(path, "r");
    if (!f) { return UINT64_MAX; }
    bool ok = fscanf(f, "%llu", &value) == 1;
    fclose(f);
    return ok ? (uint64_t)value : UINT64_MAX;
}

/* Returns the number after `key` in a file of "key number" or "key: number kB" lines, kB in bytes; UINT64_MAX if missing. */
static inline uint64_t read_field(const char* path, const char* key) {
    char line[256];
    uint64_t found = UINT64_MAX;
    FILE* f = fopen(path, "r");
    if (!f) { return UINT64_MAX; }
    while (found == UINT64_MAX && fgets(line, sizeof line, f)) {
        size_t n = strlen(key);
        unsigned long long value;
        if (strncmp(line, key, n) == 0 && (line[n] == ' ' || line[n] == ':') && sscanf(line + n + 1, "%llu", &value) == 1) {
            found = (uint64_t)value * (strstr(line, "kB") ? 1024 : 1);
        }
    }
    fclose(f);
    return found;
}

/* Returns the bytes left below a cgroup's limit, UINT64_MAX if it has none. Inactive page cache counts as available. */
static inline uint64_t cgroup_available(const char* dir, const char* limit_name, const char* usage_name, const char* cache) {
    char path[PATH_CAP];
    Error e = NO_ERROR;
    if (!path_join(path, dir, limit_name, &e)) { return UINT64_MAX; }
    uint64_t limit = read_number(path);
    if (!path_join(path, dir, usage_name, &e)) { return UINT64_MAX; }
    uint64_t usage = read_number(path);
    if (limit >= (uint64_t)1 << 60 || usage == UINT64_MAX || !path_join(path, dir, "memory.stat", &e)) { return UINT64_MAX; }
    uint64_t reclaimable = read_field(path, cache);
    if (reclaimable != UINT64_MAX) { usage -= reclaimable < usage ? reclaimable : usage; }
    return limit > usage ? limit - usage : 0;
}

/* Returns whether a comma-separated list has a word. */
static inline bool list_has(const char* list, const char* word) {
    for (;;) {
        const size_t n = strcspn(list, ",");
        if (n == strlen(word) && memcmp(list, word, n) == 0) { return true; }
        if (!list[n]) { return false; }
        list += n + 1;
    }
}

/* Returns how much of a resource a cgroup leaves. `dir` is the cgroup's folder; `v1`: it is of version 1. UINT64_MAX: no
 * limit. */
typedef uint64_t (*CgroupLeft)(const char* dir, bool v1);

/* Returns the least that the cgroups of this process (containers, Slurm) leave of the resource that `controller` manages.
 * /proc and /sys are in `root`: "", or a folder in tests. */
static inline uint64_t cgroups_least(const char* root, const char* controller, CgroupLeft left_in) {
    uint64_t least = UINT64_MAX;
    // inside a container the cgroup is mounted as the root; outside, the limits of all ancestors apply too
    char line[PATH_CAP / 2], dir[2 * PATH_CAP];
    snprintf(dir, sizeof dir, "%s/proc/self/cgroup", root);
    FILE* f = fopen(dir, "r");
    while (f && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        char* list = strchr(line, ':');  // "4:cpu,cpuacct:/path", or in version 2 "0::/path"
        char* own = list ? strchr(list + 1, ':') : NULL;
        if (!own) { continue; }
        *list++ = *own++ = 0;
        const bool v1 = *list != 0, ours = v1 ? list_has(list, controller) : strcmp(line, "0") == 0;
        while (ours) {
            snprintf(dir, sizeof dir, "%s/sys/fs/cgroup%s%s%s", root, v1 ? "/" : "", v1 ? controller : "",
                     strcmp(own, "/") == 0 ? "" : own);
            const uint64_t left = left_in(dir, v1);
            if (left < least) { least = left; }
            char* slash = strrchr(own, '/');
            if (!slash || !*own) { break; }
            *slash = 0;  // "/a/b" -> "/a" -> ""
        }
    }
    if (f) { fclose(f); }
    return least;
}

static inline uint64_t cgroup_memory(const char* dir, bool v1) {
    return v1 ? cgroup_available(dir, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
              : cgroup_available(dir, "memory.max", "memory.current", "inactive_file");
}

/* Returns the cores that a cgroup's share of time comes to, rounded up. */
static inline uint64_t cgroup_cores(const char* dir, bool v1) {
    char path[PATH_CAP];
    Error e = NO_ERROR;
    unsigned long long quota = 0, period = 0;
    if (!path_join(path, dir, v1 ? "cpu.cfs_quota_us" : "cpu.max", &e)) { return UINT64_MAX; }
    FILE* f = fopen(path, "r");  // "200000 100000", or "max 100000"; version 1 has two files, and -1 for no limit
    if (!f) { return UINT64_MAX; }
    const int numbers = fscanf(f, "%llu %llu", &quota, &period);
    fclose(f);
    if (v1 && path_join(path, dir, "cpu.cfs_period_us", &e)) { period = read_number(path); }
    const unsigned long long most = 1ull << 60;  // most microseconds: -1, read as unsigned, is above and means none
    if (numbers != (v1 ? 1 : 2) || quota == 0 || period == 0 || quota > most || period > most) { return UINT64_MAX; }
    return ceil_div(quota, period);
}

/* Returns the bytes left below the limits of this process's cgroups, UINT64_MAX if there are none. */
static inline uint64_t cgroups_available(const char* root) { return cgroups_least(root, "memory", cgroup_memory); }

/* Returns the number of cores that this process's cgroups allow, UINT64_MAX if they do not limit it. */
static inline uint64_t cgroups_cores(const char* root) { return cgroups_least(root, "cpu", cgroup_cores); }

/* Sets the number of OpenMP's threads and returns it. 0: all cores of this process. OpenMP knows which those are, but not how
 * much of their time a container gets. */
static inline int machine_threads(int wanted) {
#ifdef _OPENMP
    const uint64_t cores = cgroups_cores("");
    if (wanted > 0) {
        omp_set_num_threads(wanted);
    } else if (!getenv("OMP_NUM_THREADS") && cores < (uint64_t)omp_get_max_threads()) {
        omp_set_num_threads((int)cores);
    }
#endif
    (void)wanted;
    return (int)max_threads();
}

/* Returns the bytes of main memory available now: the system's own figure, within the limits of this process's cgroups and of
 * ulimit -v. 0: unknown. */
static inline uint64_t host_memory_available(void) {
    uint64_t have = read_field("/proc/meminfo", "MemAvailable");
    if (have == UINT64_MAX) {
        long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
        have = pages > 0 && page > 0 ? (uint64_t)pages * (uint64_t)page : UINT64_MAX;
    }
    const uint64_t left = cgroups_available("");
    if (left < have) { have = left; }
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
        uint64_t used = read_field("/proc/self/status", "VmSize");
        uint64_t cap = (uint64_t)limit.rlim_cur;
        if (used != UINT64_MAX) { cap -= used < cap ? used : cap; }
        if (cap < have) { have = cap; }
    }
    return have == UINT64_MAX ? 0 : have;
}

/* Returns the peak resident size of this process so far, in bytes. Linux's ru_maxrss also counts the memory before exec,
 * such as the memory of a large parent; VmHWM does not. */
static inline uint64_t host_memory_peak(void) {
    struct rusage usage;
    const uint64_t peak = read_field("/proc/self/status", "VmHWM");
    if (peak != UINT64_MAX) { return peak; }
    getrusage(RUSAGE_SELF, &usage);
    return (uint64_t)usage.ru_maxrss * 1024;
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
    char line[256], cpu[128] = "CPU";
    FILE* f = fopen("/proc/cpuinfo", "r");
    while (f && fgets(line, sizeof line, f)) {
        const char* colon = strchr(line, ':');
        if (text_starts(line, "model name") && colon) {
            line[strcspn(line, "\n")] = 0;
            snprintf(cpu, sizeof cpu, "%.120s", colon + 1 + strspn(colon + 1, " "));
            break;
        }
    }
    if (f) { fclose(f); }
    snprintf(out, cap, "%.100s%s%.100s, %ld cores, %d thread%s", gpu ? gpu : "", gpu ? ", " : "", cpu,
             sysconf(_SC_NPROCESSORS_ONLN), threads, threads == 1 ? "" : "s");
    return out;
}

#endif
