/* signals.h -- signals that a training run obeys.
 *
 *   SIGINT, SIGTERM   ask for the end. The run drops the step that it works on, saves the last whole one and ends. A second
 *                     one ends the process at once, with status 130 or 143
 *   SIGHUP, SIGPIPE   the same for a lost screen, where a second one does nothing
 *   SIGXCPU           the same at the limit of processor time (ulimit -t); the kernel sends it again every second
 *   SIGUSR1, SIGUSR2  ask for a checkpoint after the next whole step; the run continues
 *
 * In a chat at a terminal SIGINT ends the answer, and the chat continues.
 *
 * A run of several ranks ends on all of them after the same step: there a signal is only a wish, which counts once the ranks
 * have shared their wishes (together.h). One Ctrl-C may reach a rank several times, from the terminal and from its launcher:
 * signals within RUN_SAME_SIGNAL seconds count as one.
 *
 * A handler only sets a flag. In a run the handler of SIGINT and SIGTERM also prints a line, because a step may take seconds.
 * Loops over layers, micro-batches, validation batches and sampled tokens look at the flag. Jobs that have nothing to save, and
 * a run that still loads its files, keep the system's handlers: they end at once.
 */
#ifndef LLMC_SIGNALS_H
#define LLMC_SIGNALS_H

#include "llmc/base/utils.h"

#include <signal.h>

static volatile sig_atomic_t run_signal;       // the signal that asked for the end; a handler needs a global
static volatile sig_atomic_t run_save_signal;  // SIGUSR1 or SIGUSR2 came
static volatile sig_atomic_t run_terminal;     // stdout is a terminal
static volatile sig_atomic_t run_together;     // the process is one of several ranks
static volatile sig_atomic_t run_all_stop;     // all ranks have agreed to end
static volatile sig_atomic_t run_signal_time;  // time of the first signal, in seconds

enum { RUN_SAME_SIGNAL = 2 };  // seconds

/* Says what a signal does, on a line of its own at a terminal, because a terminal shows ^C. stdio may not be used here. */
static inline void run_tell_stop(void) {
    static const char text[] = "\nstop    saves the last whole step and ends; Ctrl-C again ends at once\n";
    const int skip = !run_terminal, cause = errno;
    if (write(STDOUT_FILENO, text + skip, sizeof text - 1 - (size_t)skip) < 0) { errno = cause; }
}

/* Notes a signal. The second one ends the process. Returns whether this signal is the first. */
static inline bool run_on_interrupt(int signal_number) {
    struct timespec now = {0, 0};
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (run_signal == SIGINT || run_signal == SIGTERM) {
        if (run_together && (int)now.tv_sec - run_signal_time <= RUN_SAME_SIGNAL) { return false; }
        _exit(128 + signal_number);
    }
    run_signal = signal_number;
    run_signal_time = (int)now.tv_sec;
    return true;
}

static inline void run_on_chat_interrupt(int signal_number) { run_on_interrupt(signal_number); }

static inline void run_on_signal(int signal_number) {
    if (run_on_interrupt(signal_number)) { run_tell_stop(); }
}

/* Handles a lost screen: Ctrl-C also ended the tee of `run | tee log`, or the terminal was closed. Also handles SIGXCPU. */
static inline void run_on_lost_screen(int signal_number) {
    if (!run_signal) { run_signal = signal_number; }
}

static inline void run_on_save_signal(int signal_number) { run_save_signal = signal_number; }

/* Catches a signal; reads and writes of files continue. */
static inline void run_catch_signal(int signal_number, void (*handler)(int)) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = handler;
    sigemptyset(&action.sa_mask);
    action.sa_flags = SA_RESTART;
    sigaction(signal_number, &action, NULL);
}

/* Catches SIGUSR1 and SIGUSR2, which would end the process. Called before files are loaded. */
static inline void run_catch_save_signals(void) {
    run_catch_signal(SIGUSR1, run_on_save_signal);
    run_catch_signal(SIGUSR2, run_on_save_signal);
}

/* Catches the signals that ask for the end. It catches SIGXCPU and the signals of a lost screen only if they were not ignored
 * from the start (nohup). */
static inline void run_catch_signals(void) {
    run_terminal = isatty(STDOUT_FILENO);
    run_catch_signal(SIGINT, run_on_signal);
    run_catch_signal(SIGTERM, run_on_signal);
    static const int lost[] = {SIGPIPE, SIGHUP, SIGXCPU};
    for (int i = 0; i < 3; i++) {
        struct sigaction before;
        if (sigaction(lost[i], NULL, &before) == 0 && before.sa_handler != SIG_IGN) {
            run_catch_signal(lost[i], run_on_lost_screen);
        }
    }
}

/* Catches Ctrl-C in a chat, where it ends an answer. */
static inline void run_catch_interrupt(void) { run_catch_signal(SIGINT, run_on_chat_interrupt); }

/* Asks for the end as a signal does: for the clock of run/loop/timing.h. */
static inline void run_ask_for_end(void) { run_signal = SIGALRM; }

/* Returns whether the run, or the rank, was asked to end. */
static inline bool run_signal_came(void) { return run_signal != 0; }

/* Returns whether a signal ends the run. */
static inline bool run_stop_requested(void) { return run_together ? run_all_stop : run_signal_came(); }
static inline void run_stop_done(void) { run_signal = 0; }
static inline bool run_save_requested(void) { return run_save_signal != 0; }
static inline void run_save_done(void) { run_save_signal = 0; }

#endif
