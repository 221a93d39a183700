/* shim.c -- fails, kills or records system calls and allocations of a program: LD_PRELOAD=shim.so. Needs x86-64 Linux, glibc.
 *
 * A seccomp filter turns each watched system call into SIGSYS. The handler counts the call, then makes it itself or fails it.
 * So the shim also sees calls that libc makes inside of fclose() or readdir(), and needs no tracer. Allocations are counted
 * where the program or libc asks for them. A library such as libgomp ends in its own way without memory, so its allocations are
 * not counted.
 *
 *   FAULT_CLASS=NAME   read write open close fsync rename unlink mkdir list stat truncate lock seek mmap malloc
 *   FAULT_AT=K         the K-th call of the class fails. 0 or absent: none
 *   FAULT_FROM=1       and all after it
 *   FAULT_DO=N|kill    the error number, or kill -9 before the call. A close that fails closes all the same.
 *   FAULT_BELOW=PATH   counts only calls on files whose path starts with PATH
 *   FAULT_ARM=TEXT     counts from the first mkdir() of a path with this text. The filter is installed only then, so it never
 *                      touches CUDA's threads, which started before.
 *   FAULT_COUNTS=FILE  at exit: one line "CLASS COUNT" each
 *   FAULT_TRACE=FILE   appends every change below FAULT_BELOW: a line "OP PATH PATH2 OFFSET LENGTH", then LENGTH bytes
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { READ, WRITE, OPEN, CLOSE, FSYNC, RENAME, UNLINK, MKDIR, LIST, STAT, TRUNCATE, LOCK, SEEK, MMAP, MALLOC, CLASSES };
static const char* const class_names[CLASSES] = {"read", "write", "open",     "close", "fsync", "rename", "unlink", "mkdir",
                                                 "list", "stat",  "truncate", "lock",  "seek",  "mmap",   "malloc"};

// how the first arguments of a call name its files
typedef enum { NOTHING, FD, PATH, AT_PATH, PATHS, AT_PATHS } Names;
static const struct {
    int number, class;
    Names names;
} calls[] = {
    {SYS_read, READ, FD},
    {SYS_pread64, READ, FD},
    {SYS_write, WRITE, FD},
    {SYS_pwrite64, WRITE, FD},
    {SYS_open, OPEN, PATH},
    {SYS_openat, OPEN, AT_PATH},
    {SYS_close, CLOSE, FD},
    {SYS_fsync, FSYNC, FD},
    {SYS_fdatasync, FSYNC, FD},
    {SYS_rename, RENAME, PATHS},
    {SYS_renameat, RENAME, AT_PATHS},
    {SYS_renameat2, RENAME, AT_PATHS},
    {SYS_unlink, UNLINK, PATH},
    {SYS_unlinkat, UNLINK, AT_PATH},
    {SYS_rmdir, UNLINK, PATH},
    {SYS_mkdir, MKDIR, PATH},
    {SYS_mkdirat, MKDIR, AT_PATH},
    {SYS_getdents64, LIST, FD},
    {SYS_newfstatat, STAT, AT_PATH},
    {SYS_ftruncate, TRUNCATE, FD},
    {SYS_flock, LOCK, FD},
    {SYS_lseek, SEEK, FD},
    {SYS_mmap, MMAP, NOTHING},
};
enum { CALLS = sizeof calls / sizeof *calls, PATH_SIZE = 4096 };

static int fault_class = -1, fault_error = EIO;
static long fault_at;
static bool fault_from, fault_kills;
static const char *below, *arm, *counts_path;
static int trace = -1;
static atomic_bool armed;
static atomic_long counts[CLASSES];
static atomic_flag trace_lock = ATOMIC_FLAG_INIT;
static uintptr_t text[2][2];  // address ranges of the program and of libc

// Makes a system call that the filter lets pass. Takes the arguments of syscall(), but returns -errno.
long shim_call(long number, ...) __attribute__((visibility("hidden")));
extern const char shim_return[] __attribute__((visibility("hidden")));
__asm__(
    ".text\n.hidden shim_call\n.hidden shim_return\n.globl shim_call\n.globl shim_return\n"
    "shim_call: mov %rdi, %rax\n mov %rsi, %rdi\n mov %rdx, %rsi\n mov %rcx, %rdx\n mov %r8, %r10\n mov %r9, %r8\n"
    "mov 8(%rsp), %r9\n syscall\n"
    "shim_return: ret\n");

// Counts a call of the class; returns true if it must fail. Kills the process here if FAULT_DO=kill.
static bool must_fail(int class) {
    if (!atomic_load(&armed)) { return false; }
    const long n = atomic_fetch_add(&counts[class], 1) + 1;
    if (class != fault_class || fault_at == 0 || (fault_from ? n < fault_at : n != fault_at)) { return false; }
    if (fault_kills) { shim_call(SYS_kill, (long)getpid(), (long)SIGKILL); }
    return true;
}

// --- paths -------------------------------------------------------------------------------------------------------------

// Appends s to out, which holds n bytes; returns the new length.
static size_t append(char* out, size_t n, const char* s) {
    while (*s && n + 1 < PATH_SIZE) { out[n++] = *s++; }
    out[n] = 0;
    return n;
}

// Writes the path of an open file; "" if it has none.
static size_t path_of_fd(int fd, char* out) {
    char link[32], digits[12];
    size_t i = sizeof digits - 1;
    digits[i] = 0;
    for (int v = fd; v > 0 || i == sizeof digits - 1; v /= 10) { digits[--i] = (char)('0' + v % 10); }
    append(link, append(link, 0, "/proc/self/fd/"), digits + i);
    const long n = fd < 0 ? 0 : shim_call(SYS_readlink, link, out, (long)PATH_SIZE - 1);
    out[n > 0 ? n : 0] = 0;
    return n > 0 ? (size_t)n : 0;
}

static void path_at(int folder, const char* path, char* out) {
    size_t n = 0;
    out[0] = 0;
    if (path[0] != '/' && folder == AT_FDCWD) {
        const long length = shim_call(SYS_readlink, "/proc/self/cwd", out, (long)PATH_SIZE - 1);
        n = length > 0 ? (size_t)length : 0;
    } else if (path[0] != '/') {
        n = path_of_fd(folder, out);
    }
    if (n > 0 && path[0]) { n = append(out, n, "/"); }
    append(out, n, path);
}

// Writes the paths that a call's arguments `a` name. `second` is "" for a call with one path.
static void paths_of(Names names, const long* a, char* first, char* second) {
    first[0] = second[0] = 0;
    if (names == FD) { path_of_fd((int)a[0], first); }
    if (names == PATH || names == PATHS) { path_at(AT_FDCWD, (const char*)a[0], first); }
    if (names == AT_PATH || names == AT_PATHS) { path_at((int)a[0], (const char*)a[1], first); }
    if (names == PATHS) { path_at(AT_FDCWD, (const char*)a[1], second); }
    if (names == AT_PATHS) { path_at((int)a[2], (const char*)a[3], second); }
}

static bool is_below(const char* path) { return !below || strncmp(path, below, strlen(below)) == 0; }

// --- the trace ---------------------------------------------------------------------------------------------------------

static void trace_line(const char* op, const char* path, const char* path2, long offset, const void* data, long length) {
    char line[2 * PATH_SIZE + 64];
    const int n = snprintf(line, sizeof line, "%s %s %s %ld %ld\n", op, path, *path2 ? path2 : "-", offset, length);
    while (atomic_flag_test_and_set(&trace_lock)) {}
    shim_call(SYS_write, (long)trace, line, (long)n);
    if (data) { shim_call(SYS_write, (long)trace, data, length); }
    atomic_flag_clear(&trace_lock);
}

// Records a call that succeeded with `result`. `position`: where a write() began.
static void record(int number, int class, const long* a, long result, long position, const char* path, const char* path2) {
    const char* data = (const char*)a[1];
    if (class == WRITE) { trace_line("write", path, "", number == SYS_write ? position : a[3], data, result); }
    if (class == TRUNCATE) { trace_line("truncate", path, "", a[1], NULL, 0); }
    if (class == FSYNC) { trace_line("fsync", path, "", 0, NULL, 0); }
    if (class == MKDIR) { trace_line("mkdir", path, "", 0, NULL, 0); }
    if (class == UNLINK) { trace_line("unlink", path, "", 0, NULL, 0); }
    if (class == RENAME) {
        trace_line(number == SYS_renameat2 && a[4] == RENAME_EXCHANGE ? "exchange" : "rename", path, path2, 0, NULL, 0);
    }
    const long flags = number == SYS_open ? a[1] : a[2];
    if (class == OPEN && flags & O_CREAT) { trace_line("create", path, "", 0, NULL, 0); }
    if (class == OPEN && flags & O_TRUNC) { trace_line("truncate", path, "", 0, NULL, 0); }
}

// --- the filter --------------------------------------------------------------------------------------------------------

static long answer(int i, const long* a) {
    char path[PATH_SIZE], path2[PATH_SIZE];
    const int class = calls[i].class;
    paths_of(calls[i].names, a, path, path2);
    const bool console = calls[i].names == FD && a[0] <= 2;
    const bool ours = !console && (calls[i].names == NOTHING ? !below : is_below(path));
    if (ours && must_fail(class)) {
        if (class == CLOSE) { shim_call(calls[i].number, a[0]); }
        return -fault_error;
    }
    const bool traced = ours && trace >= 0;
    const long position = traced && calls[i].number == SYS_write ? shim_call(SYS_lseek, a[0], 0L, (long)SEEK_CUR) : 0;
    const long result = shim_call(calls[i].number, a[0], a[1], a[2], a[3], a[4], a[5]);
    if (traced && result >= 0) { record(calls[i].number, class, a, result, position, path, path2); }
    return result;
}

static void on_call(int signal, siginfo_t* info, void* context) {
    greg_t* r = ((ucontext_t*)context)->uc_mcontext.gregs;
    const long a[6] = {r[REG_RDI], r[REG_RSI], r[REG_RDX], r[REG_R10], r[REG_R8], r[REG_R9]};
    (void)signal;
    for (int i = 0; i < CALLS; i++) {
        if (calls[i].number == info->si_syscall) { r[REG_RAX] = answer(i, a); }
    }
}

static void install_filter(void) {
    const uintptr_t own = (uintptr_t)shim_return;
    struct sock_filter code[8 + CALLS];
    size_t n = 0;
#define LOAD(field) (struct sock_filter) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (uint32_t)(field))
#define SKIP_UNLESS(value, count) (struct sock_filter) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)(value), 0, count)
    code[n++] = LOAD(offsetof(struct seccomp_data, instruction_pointer));
    code[n++] = SKIP_UNLESS(own, 3);
    code[n++] = LOAD(offsetof(struct seccomp_data, instruction_pointer) + 4);
    code[n++] = SKIP_UNLESS(own >> 32, 1);
    code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    code[n++] = LOAD(offsetof(struct seccomp_data, nr));
    for (int i = 0; i < CALLS; i++) {
        const uint8_t to_trap = (uint8_t)(CALLS - i);
        code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)calls[i].number, to_trap, 0);
    }
    code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP);
    const struct sock_fprog program = {(unsigned short)n, code};
    const struct sigaction action = {.sa_sigaction = on_call, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART};
    if (sigaction(SIGSYS, &action, NULL) != 0 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
        perror("shim: cannot install the filter");
        _exit(125);
    }
}

// --- replacements of libc's functions ----------------------------------------------------------------------------------

void* __libc_malloc(size_t size);
void* __libc_calloc(size_t count, size_t size);
void* __libc_realloc(void* p, size_t size);
void* __libc_memalign(size_t alignment, size_t size);

static bool no_memory(const void* caller) {
    const uintptr_t p = (uintptr_t)caller;
    const bool ours = (p >= text[0][0] && p < text[0][1]) || (p >= text[1][0] && p < text[1][1]);
    if (!ours || !must_fail(MALLOC)) { return false; }
    errno = ENOMEM;
    return true;
}

#define FAILS no_memory(__builtin_return_address(0))
void* malloc(size_t size) { return FAILS ? NULL : __libc_malloc(size); }
void* calloc(size_t count, size_t size) { return FAILS ? NULL : __libc_calloc(count, size); }
void* realloc(void* p, size_t size) { return FAILS ? NULL : __libc_realloc(p, size); }
void* aligned_alloc(size_t alignment, size_t size) { return FAILS ? NULL : __libc_memalign(alignment, size); }
int posix_memalign(void** p, size_t alignment, size_t size) {
    *p = FAILS ? NULL : __libc_memalign(alignment, size);
    return *p ? 0 : ENOMEM;
}

// A blocked SIGSYS kills the process, so no mask may block it.
int pthread_sigmask(int how, const sigset_t* set, sigset_t* old) {
    sigset_t open_set;
    if (set) {
        open_set = *set;
        if (how != SIG_UNBLOCK) { sigdelset(&open_set, SIGSYS); }
    }
    const long result = shim_call(SYS_rt_sigprocmask, (long)how, set ? &open_set : NULL, old, 8L);
    return (int)-result;
}

int mkdir(const char* path, mode_t mode) {
    if (arm && !atomic_load(&armed) && strstr(path, arm)) {
        atomic_store(&armed, true);
        install_filter();
    }
    return (int)syscall(SYS_mkdir, path, mode);
}

// --- start and end -----------------------------------------------------------------------------------------------------

static int find_text(struct dl_phdr_info* info, size_t size, void* first) {
    const int which = *(int*)first ? 0 : strstr(info->dlpi_name, "/libc.so") ? 1 : -1;
    (void)size;
    *(int*)first = 0;
    for (int i = 0; which >= 0 && i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type != PT_LOAD || !(info->dlpi_phdr[i].p_flags & PF_X)) { continue; }
        text[which][0] = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
        text[which][1] = text[which][0] + info->dlpi_phdr[i].p_memsz;
    }
    return 0;
}

__attribute__((constructor)) static void start(void) {
    const char* class = getenv("FAULT_CLASS"), *at = getenv("FAULT_AT"), *action = getenv("FAULT_DO");
    const char* trace_path = getenv("FAULT_TRACE");
    int first = 1;
    for (int i = 0; class && i < CLASSES; i++) {
        if (strcmp(class, class_names[i]) == 0) { fault_class = i; }
    }
    fault_at = at ? atol(at) : 0;
    fault_from = getenv("FAULT_FROM") != NULL;
    fault_kills = action && strcmp(action, "kill") == 0;
    if (action && !fault_kills) { fault_error = atoi(action); }
    below = getenv("FAULT_BELOW");
    arm = getenv("FAULT_ARM");
    counts_path = getenv("FAULT_COUNTS");
    if (trace_path) { trace = open(trace_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666); }
    dl_iterate_phdr(find_text, &first);
    if (arm) { return; }
    install_filter();
    atomic_store(&armed, true);
}

__attribute__((destructor)) static void end(void) {
    if (!counts_path) { return; }
    atomic_store(&armed, false);
    FILE* f = fopen(counts_path, "w");
    if (!f) { return; }
    for (int i = 0; i < CLASSES; i++) { fprintf(f, "%s %ld\n", class_names[i], atomic_load(&counts[i])); }
    fclose(f);
}
