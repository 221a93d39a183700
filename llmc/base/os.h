/* os.h -- the operating system: what Linux and macOS do in different ways, or only one of them does, and what they say about
 * memory and processor. This is the only file that asks which system it is compiled for (dev/test/lint.sh checks that).
 *
 * The rest of the program keeps to POSIX.1-2008, mmap(), flock() and what both have: CLOCK_MONOTONIC, O_NOFOLLOW, pselect().
 * Where one way serves both, no call is used that macOS lacks: poll() with a pipe in place of sem_timedwait(), fcntl() in
 * place of accept4() and pipe2(). A child might inherit a descriptor between the two calls, but no process of ours that has
 * threads starts programs.
 */
#ifndef LLMC_OS_H
#define LLMC_OS_H

#include "llmc/base/utils.h"  // defines: Error, path_join, ceil_div

#include <math.h>
#include <poll.h>
#include <signal.h>
#include <sys/random.h>
#include <sys/resource.h>
#ifdef __APPLE__
#include <mach-o/dyld.h>
#include <mach/mach.h>
#include <sys/sysctl.h>
#include <xlocale.h>  // towlower_l
#define OS_UTF8_LOCALE "UTF-8"
#define OS_HANGUP POLLHUP  // for poll(): the other end of a socket has closed it, in one direction at least
#else
#include <sys/prctl.h>
#include <sys/syscall.h>
#define OS_UTF8_LOCALE "C.UTF-8"
#define OS_HANGUP POLLRDHUP
#endif

/* Writes `bytes` random bytes, at most 256, or ends the program. */
static inline void os_random(void* out, size_t bytes) {
    if (getentropy(out, bytes) != 0) { die("the system gives no random numbers: %s", strerror(errno)); }
}

// ---------------------------------------------------------------------------------------------------------------------
// descriptors

/* Makes a descriptor the process's own: programs that it starts do not get it. With `blocks` false, reads and writes do not
 * wait. Returns `fd`, which may be -1 with the cause in errno. */
static inline int os_own(int fd, bool blocks) {
    if (fd < 0) { return fd; }
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    if (!blocks) { fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK); }
    return fd;
}

/* Makes a pipe of the process's own. Returns false with the cause in errno. */
static inline bool os_pipe(int ends[2], bool blocks) {
    if (pipe(ends) != 0) { return false; }
    for (int i = 0; i < 2; i++) { os_own(ends[i], blocks); }
    return true;
}

/* Waits until `events` of poll() are true of fd, for at most `seconds`; below 0: for ever. Returns whether they are. False: the
 * time is over, or a signal came. */
static inline bool os_wait(int fd, short events, double seconds) {
    struct pollfd p = {fd, events, 0};
    return poll(&p, 1, seconds < 0 ? -1 : (int)ceil(1e3 * seconds)) > 0;
}

/* Flushes a file or folder down to the disk. On macOS fsync() leaves the bytes in the drive's cache, and F_FULLFSYNC empties
 * that, too; some file systems there lack it. Returns false with the cause in errno. */
static inline bool os_flush(int fd) {
#ifdef __APPLE__
    if (fcntl(fd, F_FULLFSYNC) == 0) { return true; }
    if (errno != ENOTSUP && errno != EINVAL && errno != ENOTTY) { return false; }
#endif
    return fsync(fd) == 0;
}

/* Exchanges two names in one step. Returns false where the system or the file system cannot. */
static inline bool os_exchange(const char* a, const char* b) {
#if defined(__APPLE__)
    return renamex_np(a, b, RENAME_SWAP) == 0;
#elif defined(RENAME_EXCHANGE)
    return renameat2(AT_FDCWD, a, AT_FDCWD, b, RENAME_EXCHANGE) == 0;
#else
    (void)a, (void)b;
    return false;
#endif
}

/* Returns when a file or folder was changed. */
static inline struct timespec os_changed(const struct stat* st) {
#ifdef __APPLE__
    return st->st_mtimespec;
#else
    return st->st_mtim;
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// processes

/* Asks the kernel to kill this process when its parent ends. Does nothing on macOS. */
static inline void os_end_with_parent(void) {
#ifndef __APPLE__
    prctl(PR_SET_PDEATHSIG, SIGKILL);
#endif
}

/* Takes one of the blocked signals `set`, and waits at most `seconds` (macOS: 10 ms). *all: the kernel sent it to the
 * whole group of processes, as Ctrl-C does; macOS does not say so. Returns the signal, or -1. */
static inline int os_take_signal(const sigset_t* set, double seconds, bool* all) {
    *all = false;
#ifdef __APPLE__
    sigset_t come;
    int got = -1;
    poll(NULL, 0, (int)fmin(1e3 * seconds, 10));
    sigpending(&come);
    for (int i = 1; i < NSIG && got < 0; i++) {
        if (sigismember(set, i) && sigismember(&come, i)) { sigwait(set, &got); }
    }
    return got;
#else
    siginfo_t info;
    const struct timespec time = {(time_t)seconds, (long)(fmod(seconds, 1) * 1e9)};
    const int got = sigtimedwait(set, &info, &time);
    *all = got > 0 && info.si_code == SI_KERNEL;
    return got;
#endif
}

/* Finds this program's path, which tools such as top show; /proc/self/exe if another file has taken that path by now. */
static inline void os_program(char* path /* PATH_CAP */) {
#ifdef __APPLE__
    uint32_t size = PATH_CAP;
    if (_NSGetExecutablePath(path, &size) != 0) { path[0] = 0; }
#else
    static const char self[] = "/proc/self/exe";
    struct stat ours, found;
    const ssize_t length = readlink(self, path, PATH_CAP - 1);
    path[length > 0 ? length : 0] = 0;
    const bool same =
        stat(self, &ours) == 0 && stat(path, &found) == 0 && ours.st_dev == found.st_dev && ours.st_ino == found.st_ino;
    if (!same) { memcpy(path, self, sizeof self); }
#endif
}

/* Returns whether a process of this machine is ending or about to be killed, by Linux's /proc/PID/stat: field 9 has PF_EXITING,
 * or field 31 a SIGKILL. A large process keeps its files, and so its locks, for seconds after that. */
static inline bool process_is_ending(long pid) {
    char path[64], line[1024] = "";
    bool ending = false;
    snprintf(path, sizeof path, "/proc/%ld/stat", pid);
    FILE* f = fopen(path, "r");
    const char* at = f && fgets(line, sizeof line, f) ? strrchr(line, ')') : NULL;  // behind field 2, a name with any bytes
    for (int field = 3; at && (at = strchr(at, ' ')); field++, at++) {
        const unsigned long long value = strtoull(at, NULL, 10);
        ending = ending || (field == 9 && value & 4) || (field == 31 && value & 1 << (SIGKILL - 1));
    }
    if (f) { fclose(f); }
    return ending;
}

// ---------------------------------------------------------------------------------------------------------------------
// memory and cores, within the limits of cgroups and ulimit

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

/* Returns the number of the system's cores. */
static inline long os_cores(void) { return sysconf(_SC_NPROCESSORS_ONLN); }

/* Returns the number of cores that should compute, at most: those that the cgroups allow. Of Apple's processors these are the
 * fast ones: the threads of a loop wait for the slowest. */
static inline uint64_t os_cores_to_use(void) {
#ifdef __APPLE__
    int fast = 0;
    size_t size = sizeof fast;
    if (sysctlbyname("hw.perflevel0.logicalcpu", &fast, &size, NULL, 0) == 0 && fast > 0) { return (uint64_t)fast; }
#endif
    return cgroups_cores("");
}

/* Returns the bytes that the system could give now, or all its memory if it does not say; UINT64_MAX: unknown. */
static inline uint64_t system_available(void) {
    const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
#ifdef __APPLE__
    vm_statistics64_data_t v;
    mach_msg_type_number_t count = HOST_VM_INFO64_COUNT;
    if (host_statistics64(mach_host_self(), HOST_VM_INFO64, (host_info64_t)&v, &count) == KERN_SUCCESS) {
        return ((uint64_t)v.free_count + v.inactive_count) * (uint64_t)page;
    }
#endif
    const uint64_t have = read_field("/proc/meminfo", "MemAvailable");
    return have == UINT64_MAX && pages > 0 && page > 0 ? (uint64_t)pages * (uint64_t)page : have;
}

/* Returns the bytes of main memory available now: the system's own figure, within the limits of this process's cgroups and of
 * ulimit -v. 0: unknown. */
static inline uint64_t host_memory_available(void) {
    uint64_t have = system_available();
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
#ifdef __APPLE__
    return (uint64_t)usage.ru_maxrss;
#else
    return (uint64_t)usage.ru_maxrss * 1024;
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// the processor

/* Writes the processor's name; "CPU" if the system does not say. ARM's Linux names the board instead ("Raspberry Pi 5"). */
static inline void os_processor(char* out, size_t cap) {
    snprintf(out, cap, "CPU");
#ifdef __APPLE__
    if (sysctlbyname("machdep.cpu.brand_string", out, &cap, NULL, 0) != 0) { snprintf(out, cap, "CPU"); }
#else
    char line[256];
    bool found = false;
    FILE* f = fopen("/proc/cpuinfo", "r");
    while (f && !found && fgets(line, sizeof line, f)) {
        const char* colon = strchr(line, ':');
        found = colon && (strncmp(line, "model name", 10) == 0 || strncmp(line, "Model", 5) == 0);
        line[strcspn(line, "\n")] = 0;
        if (found) { snprintf(out, cap, "%.120s", colon + 1 + strspn(colon + 1, " ")); }
    }
    if (f) { fclose(f); }
#endif
}

/* Asks the kernel for the tiles of AMX (arch_prctl: ARCH_REQ_XCOMP_PERM of XTILEDATA). Returns whether they may be used. */
static inline bool os_allow_amx(void) {
#if defined(__linux__) && defined(__x86_64__)
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
    return false;
#endif
}

#endif
