#!/bin/sh
# gpu.sh -- a sample of the crash tests on the GPU trainer, in a few minutes: 60 kills, 60 failed writes, fsyncs and renames,
# and 40 failed allocations. All hit while a checkpoint is written. Each run is then resumed and must end in the bits of the run
# without a fault. Prints a table last; exits 0 or 1. Needs gcc, make, nvcc and python3, no tracer. Run from the root.
#
# TRAINER: the program under test (default ./train_llama3cu, built first). JOBS: runs at once.
set -eu
trainer=${TRAINER:-./train_llama3cu}
make -s tokenize "$(basename "$trainer")"
exec python3 dev/test/crash/sweep.py kill error malloc --card --trainer "$trainer" \
    --sample 60 --sample 60 --sample 40 --jobs "${JOBS:-6}"
