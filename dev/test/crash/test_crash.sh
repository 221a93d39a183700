#!/bin/sh
# test_crash.sh [full|gpu] -- runs the crash tests. Without `full` it runs a sample of each, evenly spread and the same each time,
# in a minute. BIN=DIR tests the programs of another build; sanitizers replace malloc, so under them only the damaged inputs
# run. `gpu` takes the GPU trainer (TRAINER, default ./train_llama3cu) instead: kills, failed writes, fsyncs and renames, and
# failed allocations, JOBS at a time, all while a checkpoint is written. Each run then ends in the bits of the run without a fault.
set -u
if [ "${1:-}" = gpu ]; then
    make -s tokenize "$(basename "${TRAINER:=./train_llama3cu}")" || exit 1
    exec python3 dev/test/crash/sweep.py kill error malloc --card --trainer "$TRAINER" \
        --sample 60 --sample 60 --sample 40 --jobs "${JOBS:-6}"
fi
log=$(mktemp "${TEST_TMP:-/tmp}/llama3_crash_log_XXXXXX") || exit 1
trap 'rm -f "$log"' EXIT
trap 'exit 130' INT TERM
full=$([ "${1:-}" = full ] && echo 1 || echo "")
status=0

part() { # part NAME COMMAND...
    echo "== $1"
    shift
    "$@" >"$log.part" 2>&1 || status=1
    grep -vE '^[0-9]+ passed' "$log.part"
    grep -E '^[0-9]+ passed' "$log.part" >>"$log" || echo "0 passed, 1 failed, 0 skipped" >>"$log"
    rm -f "$log.part"
}

if [ "${BIN:-}" != build/sanitize ]; then
    part sweeps python3 dev/test/crash/sweep.py $([ "$full" ] || echo --sample 48)
    part "power cut" python3 dev/test/crash/power_cut.py --resumes $([ "$full" ] && echo 1000 || echo 24)
    part "kills" python3 dev/test/crash/walk.py --kills $([ "$full" ] && echo 50 || echo 12)
    part "random walk" python3 dev/test/crash/walk.py --count $([ "$full" ] && echo 200 || echo 10)
fi
part "damaged inputs" python3 dev/test/crash/mutate.py --count $([ "$full" ] && echo 1200 || echo 96)
part "hostile numbers" python3 dev/test/crash/mutate.py --state --count $([ "$full" ] && echo 400 || echo 32)
awk '{ p += $1; f += $3; s += $5 } END { printf "%d passed, %d failed, %d skipped\n", p, f, s }' "$log"
exit $status
