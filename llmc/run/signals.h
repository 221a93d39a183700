/* signals.h -- signals that end a run: the first SIGINT or SIGTERM, or a lost screen, sets a flag that the training loop checks
 * between steps. A second SIGINT or SIGTERM ends the process at once.
 */
#ifndef LLMC_SIGNALS_H
#define LLMC_SIGNALS_H

#include "llmc/base/utils.h"

#include <signal.h>

static volatile sig_atomic_t run_signal;  // the signal that asked for the end; a handler needs a global

static inline void run_on_signal(int signal_number) {
    if (run_signal == SIGINT || run_signal == SIGTERM) { _exit(130); }  // the second one ends the process
    run_signal = signal_number;
}

/* Handles a lost screen: Ctrl-C also ended the tee of `run | tee log`, or the terminal was closed. */
static inline void run_on_lost_screen(int signal_number) {
    if (!run_signal) { run_signal = signal_number; }
}

/* Installs the handlers: SIGINT and SIGTERM only set a flag, upon which the run finishes the step, writes a checkpoint and
 * exits with 0. SIGPIPE and SIGHUP (no reader left) do the same, unless they were ignored from the start (nohup). */
static inline void run_catch_signals(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = run_on_signal;
    sigemptyset(&action.sa_mask);
    action.sa_flags = SA_RESTART;  // do not interrupt file reads and writes
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    action.sa_handler = run_on_lost_screen;
    static const int lost[] = {SIGPIPE, SIGHUP};
    for (int i = 0; i < 2; i++) {
        struct sigaction before;
        if (sigaction(lost[i], NULL, &before) == 0 && before.sa_handler != SIG_IGN) { sigaction(lost[i], &action, NULL); }
    }
}

static inline bool run_stop_requested(void) { return run_signal != 0; }

#endif
