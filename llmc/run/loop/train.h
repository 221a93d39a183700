/* train.h -- the training loop of both trainers. training.h holds the functions that the loop calls. */
#ifndef LLMC_TRAIN_H
#define LLMC_TRAIN_H

#include "llmc/run/loop/training.h"    // defines: Training, Due, training_open, training_due, training_report, training_close
#include "llmc/run/session/session.h"  // defines: Program, run_lr
#include "llmc/run/session/trainer.h"  // defines: Trainer

/* Returns the exit status of the program. */
static inline int train(const Trainer* trainer, Program* p) {
    Training t;
    if (!training_open(&t, trainer, p)) { return 0; }
    for (Due due = training_due(&t); !due.end;) {
        if (!training_stops(&t)) {
            t.queued += trainer->step(t.model, &t.recipe, run_lr(t.run, t.options, t.queued), &t.error);
        }
        due = training_due(&t);
        // steps may stay in flight until something is due
        while (t.reported < t.queued - (due.drain ? 0 : trainer->in_flight - 1)) {
            const Metrics r = trainer->result(t.model, &t.recipe);
            training_report(&t, &r);
        }
        if (due.validation || due.tasks) { training_evaluate(&t, &due); }
        if (due.sample) { training_sample(&t); }
        if (due.checkpoint || due.timed) { training_checkpoint(&t, due.timed); }
    }
    return training_close(&t);
}

#endif
