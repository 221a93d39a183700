#!/bin/sh
# run.sh PYTHON TEST_PROGRAM... -- runs the test programs and the Python tests and adds up their results.
# A test program ends with "N passed, N failed, N skipped"; one that ends otherwise, such as by a crash, counts as one failure.
# Python tests (dev/test/test_*.py) need pytest; if PYTHON lacks it, they are skipped by name. PYTHON=none runs no Python tests.
python=$1
shift
passed=0 failed=0 skipped=0
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT

count() { # count NAME STATUS: adds up the numbers of the log's summary line
    line=$(grep -E '[0-9]+ (passed|failed|skipped|error)' "$log" | tail -n 1)
    number() { printf '%s\n' "$line" | grep -oE "[0-9]+ $1" | head -n 1 | grep -oE '[0-9]+'; }
    p=$(number passed) f=$(number failed) s=$(number skipped) e=$(number error)
    p=${p:-0} f=$((${f:-0} + ${e:-0})) s=${s:-0}
    if [ "$2" -ne 0 ] && [ "$f" -eq 0 ]; then
        echo "FAIL $1 ended with status $2"
        f=1
    fi
    if [ $((p + f + s)) -eq 0 ]; then
        echo "FAIL $1 ran no test"
        f=1
    fi
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
}

run() { # run NAME COMMAND...: shows stdout as it comes, and stderr, which holds provoked warnings, only on failure
    name=$1
    shift
    echo "== $name"
    start=$(date +%s)
    { "$@" 2>"$log.errors"; echo $? > "$log.status"; } | tee "$log"
    [ "$(cat "$log.status")" -eq 0 ] || tail -n 50 "$log.errors"
    count "$name" "$(cat "$log.status")"
    rm -f "$log.status" "$log.errors"
    echo "   $(($(date +%s) - start)) s"
}

run_two() { # run_two FILE [FILE]: runs two Python test files in parallel; each keeps one core busy
    start=$(date +%s)
    for file in "$@"; do
        { "$python" -m pytest -q -rs -p no:cacheprovider "$file" >"$log.$(basename "$file")" 2>&1; echo $? >"$log.$(basename "$file").status"; } &
    done
    wait
    for file in "$@"; do
        echo "== $file"
        mv "$log.$(basename "$file")" "$log"
        cat "$log"
        count "$file" "$(cat "$log.$(basename "$file").status")"
        rm -f "$log.$(basename "$file").status"
    done
    echo "   $(($(date +%s) - start)) s"
}

for program in "$@"; do
    run "$program" "$program"
done

set --
for file in dev/test/test_*.py; do
    [ -e "$file" ] && [ "$python" != none ] || continue
    if ! "$python" -c 'import pytest' 2>/dev/null; then
        echo "skip $file: $python has no pytest (see requirements.txt)"
        skipped=$((skipped + 1))
        continue
    fi
    set -- "$@" "$file"
    [ $# -lt 2 ] || { run_two "$@" && set --; }
done
[ $# -eq 0 ] || run_two "$@"

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
