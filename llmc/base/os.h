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

#include "llmc/base/utils.h"  // defines: ceil_div, die, size_min

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

/* Has a function run before the constructors of the libraries and of the program. It gets main()'s arguments and the
 * environment, and may call no library. Does nothing on macOS. */
#ifdef __APPLE__
#define OS_RUN_FIRST(function)
#else
#define OS_RUN_FIRST(function) \
    __attribute__((section(".preinit_array"), used)) static void (*const os_first)(int, char**, char**) = function;
#endif

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

/* Opens a file to read it; NULL: it is not there. */
static inline FILE* open_in(const char* dir, const char* name) {
    char path[2 * PATH_CAP];
    const int n = snprintf(path, sizeof path, "%s/%s", dir, name);
    return n < (int)sizeof path ? fopen(path, "r") : NULL;
}

/* Returns whether a process of this machine is ending or about to be killed, by Linux's /proc/PID/stat: field 9 has PF_EXITING,
 * or field 31 a SIGKILL. A large process keeps its files, and so its locks, for seconds after that. */
static inline bool process_is_ending(long pid) {
    char name[64], line[1024] = "";
    bool ending = false;
    snprintf(name, sizeof name, "%ld/stat", pid);
    FILE* f = open_in("/proc", name);
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

/* Returns number `which`, 0 or 1, of the two that a file may begin with; UINT64_MAX for "max" or a missing file. */
static inline uint64_t read_number(const char* dir, const char* name, int which) {
    unsigned long long n[2];
    FILE* f = open_in(dir, name);
    const int found = f ? fscanf(f, "%llu %llu", &n[0], &n[1]) : 0;
    if (f) { fclose(f); }
    return found > which ? (uint64_t)n[which] : UINT64_MAX;
}

/* Returns the number after `key` in a file of "key number" or "key: number kB" lines, kB in bytes; UINT64_MAX if missing. */
static inline uint64_t read_field(const char* dir, const char* name, const char* key) {
    char line[256];
    uint64_t found = UINT64_MAX;
    FILE* f = open_in(dir, name);
    while (f && found == UINT64_MAX && fgets(line, sizeof line, f)) {
        const size_t n = strlen(key);
        unsigned long long value;
        if (strncmp(line, key, n) == 0 && sscanf(line + n, "%*1[ :]%llu", &value) == 1) {
            found = (uint64_t)value * (strstr(line, "kB") ? 1024 : 1);
        }
    }
    if (f) { fclose(f); }
    return found;
}

/* Returns the least that the cgroups of this process (containers, Slurm) leave of the resource that `controller` manages.
 * left_in() returns how much the cgroup of a folder leaves; `v1`: of version 1. UINT64_MAX: no limit. /proc and /sys are in
 * `root`: "", or a folder in tests. */
static inline uint64_t cgroups_least(const char* root, const char* controller, uint64_t (*left_in)(const char* dir, bool v1)) {
    uint64_t least = UINT64_MAX;
    // inside a container the cgroup is mounted as the root; outside, the limits of all ancestors apply too
    char line[PATH_CAP / 2], list[PATH_CAP], word[32], dir[2 * PATH_CAP];
    snprintf(word, sizeof word, ",%s,", controller);
    FILE* f = open_in(root, "proc/self/cgroup");
    while (f && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        char* first = strchr(line, ':');  // "4:cpu,cpuacct:/path", or in version 2 "0::/path"
        char* own = first ? strchr(first + 1, ':') : NULL;
        if (!own) { continue; }
        *first++ = *own++ = 0;
        snprintf(list, sizeof list, ",%s,", first);
        const bool v1 = *first != 0, ours = v1 ? strstr(list, word) != NULL : strcmp(line, "0") == 0;
        for (char* end = own + strlen(own); ours && end; end = strrchr(own, '/')) {
            *end = 0;  // "/a/b", "/a", ""
            snprintf(dir, sizeof dir, "%s/sys/fs/cgroup%s%s%s", root, v1 ? "/" : "", v1 ? controller : "", own);
            const uint64_t left = left_in(dir, v1);
            if (left < least) { least = left; }
        }
    }
    if (f) { fclose(f); }
    return least;
}

/* Returns the bytes left below a cgroup's limit. Inactive page cache counts as available. */
static inline uint64_t cgroup_memory(const char* dir, bool v1) {
    const uint64_t limit = read_number(dir, v1 ? "memory.limit_in_bytes" : "memory.max", 0);
    const uint64_t usage = read_number(dir, v1 ? "memory.usage_in_bytes" : "memory.current", 0);
    const uint64_t cache = read_field(dir, "memory.stat", v1 ? "total_inactive_file" : "inactive_file");
    if (limit >= (uint64_t)1 << 60 || usage == UINT64_MAX) { return UINT64_MAX; }
    const uint64_t used = cache == UINT64_MAX ? usage : usage - size_min(cache, usage);
    return limit > used ? limit - used : 0;
}

/* Returns the cores that a cgroup's share of time comes to, rounded up. */
static inline uint64_t cgroup_cores(const char* dir, bool v1) {
    // "200000 100000", or "max 100000"; version 1 has two files, and -1 for no limit, which is read as a large number
    const uint64_t quota = read_number(dir, v1 ? "cpu.cfs_quota_us" : "cpu.max", 0), most = (uint64_t)1 << 60;
    const uint64_t period = v1 ? read_number(dir, "cpu.cfs_period_us", 0) : read_number(dir, "cpu.max", 1);
    return quota == 0 || period == 0 || quota > most || period > most ? UINT64_MAX : ceil_div(quota, period);
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
    const uint64_t have = read_field("/proc", "meminfo", "MemAvailable");
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
        uint64_t used = read_field("/proc/self", "status", "VmSize");
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
    const uint64_t peak = read_field("/proc/self", "status", "VmHWM");
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
    char name[128] = "CPU";
#ifdef __APPLE__
    size_t size = sizeof name;
    sysctlbyname("machdep.cpu.brand_string", name, &size, NULL, 0);
#else
    char line[256];
    FILE* f = fopen("/proc/cpuinfo", "r");
    while (f && fgets(line, sizeof line, f) &&
           sscanf(line, "model name : %127[^\n]", name) + sscanf(line, "Model : %127[^\n]", name) < 1) {}
    if (f) { fclose(f); }
#endif
    snprintf(out, cap, "%s", name);
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
