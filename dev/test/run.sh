#!/bin/sh
# run.sh TEST... -- runs test programs, shell tests (.sh) and Python tests (.py) and adds up their results. TEST:PART runs a
# part of a test, which takes its name. LANES of them run at a time: a lane for each core and one more, since some tests mostly
# wait, and at most 4. The longest run first, so that all lanes end at about the same time. A test's output is shown when the
# test ends. PYTHON runs the Python tests; if it lacks pytest, they are skipped and named. A test ends with "N passed, N failed, N
# skipped"; a test that ends otherwise, such as by a crash, counts as one failure. A test that vanishes is a failure, too:
# dev/test/counts.txt lists each test's number of passed + failed + skipped and its seconds. COUNTS=write writes the numbers of
# this run there. A file of Python tests may be skipped whole, with a line "skip Python: ...", or "skip TOOL: ..." if the reason
# is "TOOL is not installed". A test may take 20 times the seconds of the list, and at least 300 s; with sanitizers, five times
# as many. A test that takes longer is ended and counts as a failure. LIMIT=SECONDS sets another limit, 0 none.
set -u
counts=dev/test/counts.txt

count_matches() { # count_matches NAME TESTS: compares with the list; "18/24" there means one or the other, by the CPU
    case "$1 ${BIN:-} ${COUNTS:-}" in *sanitize* | *write) return 0 ;; esac # sanitizers: some tests cannot run under them
    listed=$(awk -v name="$1" '$1 == name { print $2 }' $counts)
    case "/$listed/" in */"$2"/*) return 0 ;; esac
    echo "FAIL $1 ran $2 tests, $counts lists ${listed:-none}: if tests were added or removed, make test COUNTS=write"
    return 1
}

count() { # count NAME STATUS: adds the numbers of the summary line in $log to the results
    line=$(grep -E '[0-9]+ (passed|failed|skipped|error)' "$log" | tail -n 1)
    number() { printf '%s\n' "$line" | grep -oE "[0-9]+ $1" | head -n 1 | grep -oE '[0-9]+'; }
    p=$(number passed) f=$(number failed) s=$(number skipped) e=$(number error)
    p=${p:-0} f=$((${f:-0} + ${e:-0})) s=${s:-0}
    case $1:$2:$p$f$s in
        *.py:5:001) # pytest's status where it has found no test
            reason=$(sed -n 's/^SKIPPED.*: //p' "$log" | tail -n 1)
            case $reason in *" is not installed") tool=${reason%% *} ;; *) tool=Python ;; esac
            echo "skip $tool: all of $1, $reason"
            echo "0 0 1 $1 $seconds" >>"$RESULTS/all"
            return
            ;;
    esac
    if [ -n "$limit" ] && [ "$seconds" -ge "$limit" ] && { [ "$2" -eq 124 ] || [ "$2" -eq 137 ]; }; then
        echo "FAIL $1 did not end within $limit s, its limit"
        echo "$p $((f + 1)) $s $1 $seconds" >>"$RESULTS/all"
        return
    fi
    if [ "$2" -ne 0 ] && [ "$f" -eq 0 ]; then
        echo "FAIL $1 ended with status $2"
        f=1
    fi
    if [ $((p + f + s)) -eq 0 ]; then
        echo "FAIL $1 ran no test"
        f=1
    fi
    count_matches "$1" $((p + f + s)) || f=$((f + 1))
    echo "$p $f $s $1 $seconds" >>"$RESULTS/all"
}

limited() { # limited COMMAND...: runs it, and ends it and what it started after $limit seconds. $log.pid: whom a signal has to end
    if [ -z "$limit" ]; then "$@"; else sh -c 'echo $PPID $$ >"$0" && exec timeout -k 10 "$@"' "$log.pid" "$limit" "$@"; fi
}

one() { # one LIMIT TEST: the turn of a lane. stderr holds provoked warnings, and is shown only if the test fails
    limit=$1 && shift
    [ "$limit" -gt 0 ] && command -v timeout >/dev/null || limit=
    log=$RESULTS/_$(echo "$1" | tr / _) # no hidden name
    start=$(date +%s)
    case $1 in
        *.py) limited "$PYTHON" -m pytest -q -rfEs -p no:cacheprovider "$1" ;;
        *:*) limited "${1%:*}" "${1##*:}" ;;
        *) limited "$1" ;;
    esac >"$log" 2>"$log.errors"
    status=$?
    rm -f "$log.pid" # another process may get this number
    seconds=$(($(date +%s) - start))
    {
        echo "== $1"
        cat "$log"
        [ $status -eq 0 ] || tail -n 50 "$log.errors"
        count "${1#./}" $status
        echo "   $seconds s"
    } >"$log.shown"
    until mkdir "$RESULTS/screen" 2>/dev/null; do sleep 0.05; done # lanes print in turn
    cat "$log.shown"
    rmdir "$RESULTS/screen"
}

if [ "${1:-}" = one ]; then
    [ $# -lt 3 ] || one "$2" "$3"
    exit 0
fi

export PYTHON="${PYTHON:-python3}" RESULTS JOBS=1 # JOBS: programs that such a test runs at a time
export OMP_WAIT_POLICY=passive                    # threads that spin while they wait would take the core of another lane
cores=$(nproc 2>/dev/null || echo 2)
lanes=${LANES:-$((cores < 4 ? cores + 1 : 4))}
RESULTS=$(mktemp -d "${TEST_TMP:-/tmp}/llama3_results_XXXXXX") || exit 1
trap 'rm -rf "$RESULTS"' EXIT
running=                                          # what starts the tests
trap 'kill $running 2>/dev/null; cat "$RESULTS"/*.pid 2>/dev/null | xargs kill 2>/dev/null; exit 130' INT TERM
touch "$RESULTS/queue" "$RESULTS/all"

skipped=0
"$PYTHON" -c 'import pytest' 2>/dev/null && pytest=1 || pytest=''
for test in "$@"; do
    case $pytest:$test in
        :*.py) echo "skip Python: all of $test, $PYTHON has no pytest (see requirements.txt)" && skipped=$((skipped + 1)) ;;
        *) echo "$test" >>"$RESULTS/queue" ;;
    esac
done

# a test that the list lacks counts as long; sanitized programs are slower, but in the same proportions
awk 'NR == FNR { seconds[$1] = $3; next }
     { name = $1; sub(/^\.\//, "", name); sub(/sanitize\/threads_/, "test_", name); sub(/sanitize\//, "", name)
       usual = seconds[name] == "" ? 60 : seconds[name]
       usual = 20 * (usual < 15 ? 15 : usual) * ("'"${BIN:-}"'" $1 ~ /sanitize/ ? 5 : 1)
       print (seconds[name] == "" ? 999 : seconds[name]), '"${LIMIT:-usual}"', $1 }' $counts "$RESULTS/queue" |
    sort -rn | cut -d ' ' -f 2,3 >"$RESULTS/sorted"
# a shell hears a signal only while it waits, but has what it starts beside itself ignore Ctrl-C, which some tests send
if env --default-signal=INT,QUIT true 2>/dev/null; then
    env --default-signal=INT,QUIT xargs -n 2 -P "$lanes" sh "$0" one <"$RESULTS/sorted" &
    running=$!
    wait $running
else
    xargs -n 2 -P "$lanes" sh "$0" one <"$RESULTS/sorted"
fi

if [ "${COUNTS:-}" = write ]; then
    awk 'NR == FNR { tests[$1] = $2; seconds[$1] = $3; next }
         $1 $2 $3 == "001" { next }
         { n = $1 + $2 + $3; if ("/" tests[$4] "/" !~ "/" n "/") { tests[$4] = n } seconds[$4] = $5 }
         END { for (name in tests) { print name, tests[name] (seconds[name] == "" ? "" : " " seconds[name]) } }' \
        $counts "$RESULTS/all" | LC_ALL=C sort >"$RESULTS/new" && cp "$RESULTS/new" $counts
fi
ran=$(wc -l <"$RESULTS/all") queued=$(wc -l <"$RESULTS/queue")
[ "$ran" -eq "$queued" ] || echo "FAIL $((queued - ran)) tests did not end" # such as when a lane was killed
awk -v skipped=$skipped -v lost=$((queued - ran)) '{ p += $1; f += $2; s += $3 }
    END { printf "%d passed, %d failed, %d skipped\n", p, f + lost, s + skipped; exit f + lost > 0 }' "$RESULTS/all"
