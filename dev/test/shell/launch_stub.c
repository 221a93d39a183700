/* launch_stub.c -- for test_launch.sh: stands in for the trainer.
 *
 *   launch_stub show                         prints who this process is
 *   launch_stub count N | die                prints what launch_count() returns for a child that counts N devices, or dies
 *   launch_stub port                         takes a port that launch_free_port() finds free; prints this port, and the port
 *                                            that it finds next
 *   launch_stub terminal DIR COMMAND...      runs a command at a terminal of its own; presses Ctrl-C when DIR/press appears
 *   launch_stub run DIR WORD...              as --gpus: starts one rank a word, which says what it does:
 *
 *     show       prints who it is                      exit:N     exits with N. late-exit:N: a moment later
 *     sleep      sleeps                                kill:N     gets signal N. late-kill:N: a moment later
 *     stay       ignores SIGTERM                       watch      sees by the pipe that its parent is gone: DIR/gone.RANK
 *     slow       ends 1.5 s after SIGTERM: DIR/done.RANK
 *     count      writes a line for each signal to DIR/came.RANK; exits when DIR/end exists
 *
 * With LATE set, a new process waits for the death of its parent before it does anything. With IGNORE_CHILDREN set, SIGCHLD is
 * ignored when the parent begins.
 * A rank first writes its process id to DIR/pid.RANK and waits until all have. No process lives for more than 100 s.
 */
#define LAUNCH_TERM_SECONDS 1.0
#define LAUNCH_KILL_SECONDS 3.0
#define LLMC_FAULT_POINT(where) wait_if_late()
static void wait_if_late(void);
#include "llmc/dist/launch.h"

#include <poll.h>
#include <sys/ioctl.h>

static void nap(double seconds) {
    const struct timespec time = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&time, NULL);
}

static void wait_if_late(void) {
    const pid_t parent = getppid();
    while (getenv("LATE") && getppid() == parent) { nap(0.01); }
}

static void show(void) {
    Ranks r;
    Error e = NO_ERROR;
    must(ranks_find(&r, getenv, 0, &e), &e);
    printf("rank %d of %d, local %d of %d, %s:%d, token %016" PRIx64 ", %s\n", r.rank, r.ranks, r.local_rank, r.local_ranks,
           r.address, r.port, r.name ^ r.key.low, r.launcher ? r.launcher : "alone");
}

// ---------------------------------------------------------------------------------------------------------------------
// ranks

static const char* name_in(const char* folder, const char* name, int rank) {
    static char path[PATH_CAP];
    snprintf(path, sizeof path, "%s/%s.%d", folder, name, rank);
    return path;
}

static int open_line(const char* folder, const char* name, int rank) {
    const int fd = open(name_in(folder, name, rank), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fd < 0) { die("%s: cannot open: %s", name_in(folder, name, rank), strerror(errno)); }
    return fd;
}

static int came_fd;

static void on_signal(int number) {
    const char* line = number == SIGINT    ? "INT\n"
                       : number == SIGTERM ? "TERM\n"
                       : number == SIGHUP  ? "HUP\n"
                       : number == SIGXCPU ? "XCPU\n"
                       : number == SIGUSR2 ? "USR2\n"
                                           : "USR1\n";
    const size_t length = strlen(line);
    if (write(came_fd, line, length) != (ssize_t)length) { _exit(99); }
}

static void catch_signals(const char* folder, int rank) {
    static const int caught[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU};
    struct sigaction action;
    came_fd = open_line(folder, "came", rank);
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal;
    sigfillset(&action.sa_mask);
    for (int i = 0; i < 6; i++) { sigaction(caught[i], &action, NULL); }
}

static void wait_for_all(const char* folder, int rank, int ranks) {
    const int fd = open_line(folder, "pid", rank);
    dprintf(fd, "%d\n", (int)getpid());
    close(fd);
    for (int i = 0; i < ranks; i++) {
        while (!file_exists(name_in(folder, "pid", i))) { nap(0.01); }
    }
}

static int watch(const char* folder, int rank) {
    struct pollfd parent = {launch_parent_fd(), POLLIN, 0};
    prctl(PR_SET_PDEATHSIG, 0);
    wait_for_all(folder, rank, rank + 1);
    if (parent.fd < 0 || poll(&parent, 1, -1) != 1 || !(parent.revents & POLLHUP)) { return 98; }
    close(open_line(folder, "gone", rank));
    return 1;
}

static int end_slowly(const char* folder, int rank, int ranks) {
    sigset_t term;
    int got = 0;
    sigemptyset(&term);
    sigaddset(&term, SIGTERM);
    sigprocmask(SIG_BLOCK, &term, NULL);
    wait_for_all(folder, rank, ranks);
    sigwait(&term, &got);
    nap(LAUNCH_TERM_SECONDS + 0.5);
    close(open_line(folder, "done", rank));
    return 0;
}

static int be_rank(const char* folder, int rank, int ranks, const char* word) {
    const char* number = strchr(word, ':');
    const int n = number ? atoi(number + 1) : 0;
    if (strcmp(word, "count") == 0) { catch_signals(folder, rank); }
    if (strcmp(word, "stay") == 0) { signal(SIGTERM, SIG_IGN); }
    if (strcmp(word, "watch") == 0) { return watch(folder, rank); }
    if (strcmp(word, "slow") == 0) { return end_slowly(folder, rank, ranks); }
    wait_for_all(folder, rank, ranks);
    if (strcmp(word, "show") == 0) {
        show();
        return 0;
    }
    if (strncmp(word, "late-", 5) == 0) { nap(0.2); }
    if (strstr(word, "exit:")) { return n; }
    if (strstr(word, "kill:")) { raise(n); }
    char end[PATH_CAP];
    snprintf(end, sizeof end, "%s/end", folder);
    while (strcmp(word, "count") != 0 || !file_exists(end)) { nap(0.02); }
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------

static int devices;
static int count_devices(void) {
    if (devices < 0) { raise(SIGKILL); }
    return devices;
}

static void take_port(void) {
    struct sockaddr_in address;
    const int fd = socket(AF_INET, SOCK_STREAM, 0), port = launch_free_port((uint64_t)getpid());
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons((uint16_t)port);
    if (bind(fd, (const struct sockaddr*)&address, sizeof address) != 0 || listen(fd, 1) != 0) {
        die("port %d is not free: %s", port, strerror(errno));
    }
    printf("%d %d\n", port, launch_free_port((uint64_t)getpid()));
    close(fd);
}

/* Runs a command as the leader of a session with a terminal, and copies its output to stdout. Returns its status. */
static int at_terminal(const char* folder, char** command) {
    char press[PATH_CAP], text[4096];
    snprintf(press, sizeof press, "%s/press", folder);
    const int terminal = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (terminal < 0 || grantpt(terminal) != 0 || unlockpt(terminal) != 0) { die("no terminal: %s", strerror(errno)); }
    const char* name = ptsname(terminal);
    const pid_t child = fork();
    if (child == 0) {
        setsid();
        signal(SIGINT, SIG_DFL);  // a shell that runs this in the background ignores it
        const int fd = open(name, O_RDWR);
        if (fd < 0 || ioctl(fd, TIOCSCTTY, 0) != 0) { die("%s: is no terminal: %s", name, strerror(errno)); }
        dup2(fd, STDIN_FILENO);
        dup2(fd, STDOUT_FILENO);
        execv(command[0], command);
        _exit(127);
    }
    for (;;) {
        struct pollfd output = {terminal, POLLIN, 0};
        int status = 0;
        if (poll(&output, 1, 20) == 1) {
            const ssize_t length = read(terminal, text, sizeof text);
            if (length > 0 && fwrite(text, 1, (size_t)length, stdout) != (size_t)length) { return 97; }
        }
        if (file_exists(press) && unlink(press) == 0 && write(terminal, "\003", 1) != 1) { return 97; }
        if (waitpid(child, &status, WNOHANG) == child) {
            return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        }
    }
}

int main(int argc, char** argv) {
    Error e = NO_ERROR;
    alarm(100);
    if (argc == 2 && strcmp(argv[1], "show") == 0) {
        show();
    } else if (argc == 2 && strcmp(argv[1], "port") == 0) {
        take_port();
    } else if (argc == 3 && strcmp(argv[1], "count") == 0) {
        devices = strcmp(argv[2], "die") == 0 ? -1 : atoi(argv[2]);
        printf("%d devices\n", launch_count(count_devices));
    } else if (argc >= 4 && strcmp(argv[1], "terminal") == 0) {
        return at_terminal(argv[2], argv + 3);
    } else if (argc >= 4 && strcmp(argv[1], "run") == 0) {
        const char* rank = getenv("LLAMA3_RANK");
        if (rank) { return be_rank(argv[2], atoi(rank), argc - 3, argv[3 + atoi(rank)]); }
        if (getenv("IGNORE_CHILDREN")) { signal(SIGCHLD, SIG_IGN); }
        const int status = launch_ranks(argc - 3, argv, &e);
        must(status >= 0, &e);
        return status;
    } else {
        die_usage("usage: launch_stub show | port | count N | terminal DIR COMMAND... | run DIR WORD...");
    }
    return 0;
}
