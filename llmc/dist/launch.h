/* launch.h -- the parent of --gpus N: starts N copies of this program, one a rank. It ends when the copies end, and the copies
 * end when it ends.
 *
 * launch_ranks() starts /proc/self/exe with the same arguments; a copy knows that it is a rank by LLAMA3_RANK and the other
 * variables that dist/ranks.h reads. All must connect to 127.0.0.1 at a port that was free, and share a random secret. Output
 * goes where the parent's goes. The parent has no threads and never calls CUDA, whose state would not survive fork(): where
 * --gpus needs the number of devices, launch_count() asks a child for it.
 *
 * When a rank fails, the others normally learn it from their connection to each other (dist/team.h), say so, and end with
 * status 1. Ranks left after LAUNCH_TERM_SECONDS, such as ranks that wait for a rank that never came, get SIGTERM. Ranks left
 * LAUNCH_KILL_SECONDS later get SIGKILL. The parent's status is the status of the rank that failed first: 128 + N for signal N.
 * The parent reports a signal, because a killed rank cannot. If the first status is 1 and another rank then ends with another
 * error, the other status counts. For the connections of a dying process close at once, and other ranks end with 1. But a large
 * process takes seconds to give back its memory, and the parent sees its end only then.
 *
 * When the parent dies, also by SIGKILL, the kernel kills the ranks (PR_SET_PDEATHSIG). Each rank also has the read end of a
 * pipe whose only writer is the parent. poll() reports POLLHUP there when the parent is gone; see launch_parent_fd().
 *
 * SIGINT, SIGTERM, SIGHUP, SIGXCPU, SIGUSR1 and SIGUSR2 are for the ranks: the parent passes them on, and stays until all ranks
 * have ended. It does not pass on a SIGINT with si_code SI_KERNEL: Ctrl-C, which the terminal sends to all processes of the
 * group. Other senders signal the whole group, too: `kill -TERM -PGID`, timeout, Slurm. The parent cannot distinguish their
 * signal from a signal for itself alone, so a rank may get such a signal twice (run/session/signals.h counts it once).
 */
#ifndef LLMC_LAUNCH_H
#define LLMC_LAUNCH_H

#include "llmc/base/os.h"     // defines: os_end_with_parent, os_pipe, os_program, os_random, os_take_signal
#include "llmc/dist/link.h"   // defines: link_listen
#include "llmc/dist/ranks.h"  // defines: RANKS_MAX, RANKS_PORT_FIRST, RANKS_PORT_LAST

#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <sys/wait.h>

// until the ranks that are left get SIGTERM, and then until they get SIGKILL; tests have shorter times
#ifndef LAUNCH_TERM_SECONDS
#define LAUNCH_TERM_SECONDS 2.0
#define LAUNCH_KILL_SECONDS 10.0
#endif

// ---------------------------------------------------------------------------------------------------------------------
// in a rank

/* Returns the read end of the parent's pipe: poll() reports POLLHUP, and read() the end of the file, once the parent is gone.
 * Nothing is ever written to it. -1: this process was not started by launch_ranks(). */
static inline int launch_parent_fd(void) {
    const char* text = getenv("LLAMA3_PARENT_FD");
    char* end = NULL;
    const long fd = text && *text ? strtol(text, &end, 10) : -1;
    struct stat st;
    if (fd < 0 || fd > 1 << 20 || *end || fstat((int)fd, &st) != 0 || !S_ISFIFO(st.st_mode)) { return -1; }
    fcntl((int)fd, F_SETFD, FD_CLOEXEC);  // programs that the rank starts do not need it
    return (int)fd;
}

// ---------------------------------------------------------------------------------------------------------------------
// starting

typedef struct {
    int count, alive;
    pid_t parent, pids[RANKS_MAX];  // 0: has ended
    int port, parent_fd;
    uint64_t random[3];  // two make LLAMA3_TOKEN; the search for a port starts at the third
    char program[PATH_CAP];
    sigset_t before, awaited;  // the signals that were blocked before, and those that launch_wait() takes
    sigset_t asked;            // signals that went to the ranks: death by one of them is no news
    int status;                // the status that the parent returns; 0: no rank has failed
    int next;  // the signal for the ranks that are left at `deadline`: SIGTERM, then SIGKILL; 0: none has failed
    double deadline;
} Launch;

/* Ends this process when `parent` ends. A parent that ended before the call sends no signal any more. */
static inline void launch_end_with(pid_t parent) {
    LLMC_FAULT_POINT("forked");
    os_end_with_parent();
    if (getppid() != parent) { _exit(1); }
}

/* Returns a port of 127.0.0.1 that is free now; 0: none was found. The kernel gives a port of this range only to a process
 * that asks for it. So the port most likely stays free until rank 0 listens there. */
static inline int launch_free_port(uint64_t random) {
    const int ports = RANKS_PORT_LAST - RANKS_PORT_FIRST + 1;
    for (int i = 0; i < ports; i++) {
        char numeric[64];
        Error ignored = NO_ERROR;
        const int port = RANKS_PORT_FIRST + (int)((random + (uint64_t)i) % (uint64_t)ports);
        const int fd = link_listen("127.0.0.1", port, numeric, sizeof numeric, &ignored);
        if (fd < 0) { continue; }
        close(fd);
        return port;
    }
    return 0;
}

static inline bool launch_set(const char* name, long long value) {
    char text[32];
    snprintf(text, sizeof text, "%lld", value);
    return setenv(name, text, 1) == 0;
}

/* Becomes a rank: runs in the new process. */
LLMC_NORETURN static inline void launch_become(const Launch* l, int rank, char** argv) {
    char token[40];
    snprintf(token, sizeof token, "%016" PRIx64 "%016" PRIx64, l->random[0], l->random[1]);
    launch_end_with(l->parent);
    // without all of them, this copy would act as a parent
    const bool set = launch_set("LLAMA3_RANK", rank) && launch_set("LLAMA3_RANKS", l->count) &&
                     launch_set("LLAMA3_LOCAL_RANK", rank) && launch_set("LLAMA3_LOCAL_RANKS", l->count) &&
                     setenv("LLAMA3_ADDRESS", "127.0.0.1", 1) == 0 && launch_set("LLAMA3_PORT", l->port) &&
                     setenv("LLAMA3_TOKEN", token, 1) == 0 && launch_set("LLAMA3_PARENT_FD", l->parent_fd);
    fcntl(l->parent_fd, F_SETFD, 0);  // it stays open
    sigprocmask(SIG_SETMASK, &l->before, NULL);
    if (set) { execv(l->program, argv); }
    dprintf(STDERR_FILENO, "error: rank %d: cannot start %s: %s\n", rank, l->program, strerror(errno));
    _exit(127);
}

/* Blocks the signals that the parent takes when it waits. SIGHUP stays ignored under nohup. */
static inline void launch_block_signals(Launch* l) {
    static const int awaited[] = {SIGCHLD, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU};
    struct sigaction hangup;
    sigemptyset(&l->asked);
    sigemptyset(&l->awaited);
    for (size_t i = 0; i < sizeof awaited / sizeof *awaited; i++) { sigaddset(&l->awaited, awaited[i]); }
    if (sigaction(SIGHUP, NULL, &hangup) != 0 || hangup.sa_handler != SIG_IGN) { sigaddset(&l->awaited, SIGHUP); }
    sigset_t blocked = l->awaited;
    sigaddset(&blocked, SIGPIPE);  // a lost screen does not end the parent: it ends with the ranks
    sigprocmask(SIG_BLOCK, &blocked, &l->before);
    signal(SIGCHLD, SIG_DFL);  // where it is ignored, the kernel keeps no status
}

static inline bool launch_start(Launch* l, char** argv, Error* e) {
    int ends[2];
    l->parent = getpid();
    os_program(l->program);
    os_random(l->random, sizeof l->random);
    l->port = launch_free_port(l->random[2]);
    if (!l->port) { return fail(e, "--gpus: no port of 127.0.0.1 from %d to %d is free", RANKS_PORT_FIRST, RANKS_PORT_LAST); }
    if (!os_pipe(ends, true)) { return fail(e, "--gpus: cannot make a pipe: %s", strerror(errno)); }
    l->parent_fd = ends[0];  // ends[1] stays open as long as this process lives
    fflush(NULL);
    bool started = true;
    for (int rank = 0; rank < l->count && started; rank++) {
        const pid_t pid = fork();
        if (pid == 0) { launch_become(l, rank, argv); }
        started = pid > 0 || fail(e, "--gpus: cannot start rank %d of %d: %s", rank, l->count, strerror(errno));
        l->pids[rank] = started ? pid : 0;
        l->alive += started;
    }
    close(ends[0]);
    return started;
}

// ---------------------------------------------------------------------------------------------------------------------
// waiting

/* Sends a signal to the ranks that are left. */
static inline void launch_send(const Launch* l, int signal_number) {
    for (int rank = 0; rank < l->count; rank++) {
        if (l->pids[rank]) { kill(l->pids[rank], signal_number); }
    }
}

/* Notes how a rank ended: `status` is waitpid()'s. */
static inline void launch_note(Launch* l, int rank, int status) {
    const int signal_number = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    const int code = signal_number ? 128 + signal_number : WEXITSTATUS(status);
    const bool cause = l->status == 0 || (l->status == 1 && code != 1 && l->next != SIGKILL);
    if (code == 0 || !cause) { return; }
    if (l->status == 0) {
        l->next = SIGTERM;
        l->deadline = now_seconds() + LAUNCH_TERM_SECONDS;
    }
    l->status = code;
    if (signal_number && !sigismember(&l->asked, signal_number)) {
        fprintf(stderr, "error: rank %d was killed by signal %d (%s)\n", rank, signal_number, strsignal(signal_number));
    }
}

/* Notes the ranks that have ended. */
static inline void launch_reap(Launch* l) {
    for (int rank = 0; rank < l->count; rank++) {
        int status = 0;
        if (!l->pids[rank] || waitpid(l->pids[rank], &status, WNOHANG) != l->pids[rank]) { continue; }
        l->pids[rank] = 0;
        l->alive--;
        launch_note(l, rank, status);
    }
}

/* Waits for a signal, or until the deadline, and does what it asks for. */
static inline void launch_wait(Launch* l) {
    bool all = false;
    const double left = l->next ? fmax(0, l->deadline - now_seconds()) : 3600.0;
    const int got = os_take_signal(&l->awaited, left, &all);
    if (got > 0 && got != SIGCHLD) {
        sigaddset(&l->asked, got);
        if (got != SIGINT || !all) { launch_send(l, got); }
    }
    if (l->next && now_seconds() >= l->deadline) {
        launch_send(l, l->next);
        l->next = SIGKILL;
        l->deadline = now_seconds() + LAUNCH_KILL_SECONDS;
    }
}

/* Starts `count` ranks, waits until all have ended, and returns a status for main(). main() should return soon, because the
 * ranks' signals stay blocked here. -1: they could not be started, and the error says why. Call it once, in a process with
 * one thread that has not called CUDA. */
static inline int launch_ranks(int count, char** argv, Error* e) {
    Launch l;
    memset(&l, 0, sizeof l);
    l.count = count;
    if (count < 1 || count > RANKS_MAX) {
        fail(e, "--gpus: %d processes, wanted 1 to %d", count, RANKS_MAX);
        return -1;
    }
    launch_block_signals(&l);
    const bool started = launch_start(&l, argv, e);
    if (!started) {
        sigaddset(&l.asked, SIGKILL);
        launch_send(&l, SIGKILL);
    }
    for (launch_reap(&l); l.alive > 0; launch_reap(&l)) { launch_wait(&l); }
    return started ? l.status : -1;
}

/* Returns what count_devices() returns in a child process, where it may call CUDA. -1: the child died, or could not be
 * started. */
static inline int launch_count(int (*count_devices)(void)) {
    int ends[2], count = -1;
    const pid_t parent = getpid();
    if (!os_pipe(ends, true)) { return -1; }
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        launch_end_with(parent);
        count = count_devices();
        _exit(write(ends[1], &count, sizeof count) == (ssize_t)sizeof count ? 0 : 1);
    }
    close(ends[1]);
    ssize_t got = 0;
    while (child > 0 && (got = read(ends[0], &count, sizeof count)) < 0 && errno == EINTR) {}
    while (child > 0 && waitpid(child, NULL, 0) < 0 && errno == EINTR) {}
    close(ends[0]);
    return got == (ssize_t)sizeof count ? count : -1;
}

#endif
