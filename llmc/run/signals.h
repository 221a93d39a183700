/* signals.h -- how a run is asked to end: the first SIGINT or SIGTERM, or a screen that is gone, sets a flag that the training
 * loop looks at between steps; the second SIGINT or SIGTERM ends the process at once.
 */
#ifndef LLMC_SIGNALS_H
#define LLMC_SIGNALS_H

#include "llmc/base/utils.h"

#include <signal.h>

static volatile sig_atomic_t run_signal;  // the first SIGINT or SIGTERM; a handler can only speak through a global

static inline void run_on_signal(int signal_number) {
    if (run_signal == SIGINT || run_signal == SIGTERM) { _exit(130); }  // the second one ends at once
    run_signal = signal_number;
}

/* The screen is gone: `run | tee log` lost its tee to the same Ctrl-C, or the terminal was closed. */
static inline void run_on_lost_screen(int signal_number) {
    if (!run_signal) { run_signal = signal_number; }
}

/* From now on SIGINT and SIGTERM only set a flag: the step is finished, a checkpoint written, and the run ends with 0. So does
 * a run that nobody reads any longer (SIGPIPE, SIGHUP), unless it was started to go on all the same (nohup). */
static inline void run_catch_signals(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = run_on_signal;
    sigemptyset(&action.sa_mask);
    action.sa_flags = SA_RESTART;  // reads and writes of files go on
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
