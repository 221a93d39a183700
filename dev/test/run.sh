#!/bin/sh
# run.sh PYTHON TEST_PROGRAM... -- runs the test programs and the Python tests and adds up their results.
# A test program ends with "N passed, N failed, N skipped"; one that ends otherwise, such as by a crash, counts as one failure.
# A+B are run side by side. Python tests (dev/test/python/test_*.py) need pytest; if PYTHON lacks it, they are skipped by name.
# PYTHON=none runs no Python tests.
# A test that vanishes is a failure, too: passed + failed + skipped of each program is the number in dev/test/counts.txt. A file
# of Python tests may be skipped whole. COUNTS=write writes the numbers of this run there.
python=$1
counts=dev/test/counts.txt
shift
passed=0 failed=0 skipped=0
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT

count_matches() { # count_matches NAME TESTS: compares with the list; "18/24" there: one or the other, by what the CPU has
    case "$1 ${BIN:-}" in *sanitize*) return 0 ;; esac # the same programs, without the tests that a sanitizer cannot run
    program=${1#./}
    listed=$(awk -v name="$program" '$1 == name { print $2 }' $counts)
    case "/$listed/" in */"$2"/*) return 0 ;; esac
    if [ "${COUNTS:-}" = write ]; then
        { grep -v "^$program " $counts; echo "$program $2"; } | LC_ALL=C sort >"$log.counts" && cp "$log.counts" $counts
        rm -f "$log.counts"
        return 0
    fi
    echo "FAIL $1 ran $2 tests, $counts lists ${listed:-none}: if tests were added or removed, make test COUNTS=write"
    return 1
}

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
    [ "$p$f$s" = 001 ] || count_matches "$1" $((p + f + s)) || f=$((f + 1))
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

# side_by_side TEST...: runs them at the same time, and then shows them one after the other
side_by_side() {
    start=$(date +%s)
    for test in "$@"; do
        {
            case $test in
                *.py) "$python" -m pytest -q -rfEs -p no:cacheprovider "$test" 2>&1 ;;
                *) "$test" 2>"$log.$(basename "$test").errors" ;;
            esac >"$log.$(basename "$test")"
            echo $? >"$log.$(basename "$test").status"
        } &
    done
    wait
    for test in "$@"; do
        side=$log.$(basename "$test")
        echo "== $test"
        mv "$side" "$log"
        cat "$log"
        [ "$(cat "$side.status")" -eq 0 ] || tail -n 50 "$side.errors" 2>/dev/null
        count "$test" "$(cat "$side.status")"
        rm -f "$side.status" "$side.errors"
    done
    echo "   $(($(date +%s) - start)) s"
}

for program in "$@"; do
    case $program in
        *+*) side_by_side $(echo "$program" | tr + ' ') ;;
        *) run "$program" "$program" ;;
    esac
done

set --
for file in dev/test/python/test_*.py; do
    [ -e "$file" ] && [ "$python" != none ] || continue
    if ! "$python" -c 'import pytest' 2>/dev/null; then
        echo "skip $file: $python has no pytest (see requirements.txt)"
        skipped=$((skipped + 1))
        continue
    fi
    set -- "$@" "$file"
    [ $# -lt 2 ] || { side_by_side "$@" && set --; }
done
[ $# -eq 0 ] || side_by_side "$@"

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
