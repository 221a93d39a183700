#!/bin/sh
# test_launch.sh -- tests the parent of --gpus with a stub for the trainer (launch_stub.c): who the ranks are, how the death of
# a rank or of the parent ends the others, and which signals reach which process how often. Where mpirun is installed, its ranks
# are tested, too. Run from the project's root. CC: the compiler.
. dev/test/lib.sh
sanitizers=
[ -z "${BIN:-}" ] || sanitizers="-g -fsanitize=address,undefined -fno-sanitize-recover=all"
# shellcheck disable=SC2086  # several words
${CC:-cc} -std=c11 -O1 $sanitizers -I. dev/test/shell/launch_stub.c -o "$tmp/launch_stub" -lm -lpthread || exit 1
stub=$tmp/launch_stub
cd "$tmp" || exit 1

# soon COMMAND...: repeats the command until it succeeds, for at most about 40 s
soon() { wait_for "$@" || wait_for "$@"; }

# fresh: makes a new $folder for the ranks of a test
tests=0
fresh() {
    tests=$((tests + 1))
    folder=$tmp/ranks$tests
    mkdir "$folder"
}

# run WORD...: runs one rank a word
run() { "$stub" run "$folder" "$@"; }

# begin COMMAND...: starts the command in the background, as process $pid in its own group, and waits until its $all ranks are
# ready
begin() {
    setsid "$@" >"$tmp/out" 2>"$tmp/err" </dev/null &
    pid=$!
    started=$pid
    soon ready
}
ready() { [ "$(cat "$folder"/pid.* | wc -l)" -eq "$all" ]; }
ranks() { fresh && all=$# && begin "$stub" run "$folder" "$@"; }
rank_pid() { cat "$folder/pid.$1"; }

# is_alive PID: the process runs, and is no zombie
is_alive() { grep -q '^State:[[:space:]]*[^ZX[:space:]]' "/proc/$1/status" 2>/dev/null; }
is_gone() { ! is_alive "$1"; }
all_gone() {
    for gone_pid in $(cat "$folder"/pid.*); do is_gone "$gone_pid" || return 1; done
}

# has COUNT LINE NAME: each rank's file NAME has this line so often
has() {
    for has_file in "$folder/$3".*; do [ "$(grep -cx "$2" "$has_file")" -eq "$1" ] || return 1; done
}

# let_end: lets ranks that count signals exit, and waits for the end
let_end() {
    : >"$folder/end"
    finish
}

# --- who the ranks are -------------------------------------------------------------------------------------------------------

# shown N FILE LAUNCHER: by the output of `show`, each of N ranks knows its numbers, and all know the same address of rank 0
shown() {
    for i in $(seq 0 $(($1 - 1))); do echo "rank $i of $1, local $i of $1"; done >"$tmp/wanted"
    sed 's/, 127.*//' "$2" | sort | cmp - "$tmp/wanted" && sed 's/.*, 127/127/' "$2" | sort -u >"$tmp/place" &&
        [ "$(wc -l <"$tmp/place")" -eq 1 ] && grep -qE "^127\.0\.0\.1:[23][0-9]{4}, token [0-9a-f]{16}, $3\$" "$tmp/place"
}
fresh
run show show show >one
check "three ranks know who they are, and where rank 0 is" shown 3 one --gpus
fresh
run show >two
check "a single one, too" shown 1 two --gpus
check "another run has another token" test "$(cat one two | grep -o 'token [0-9a-f]*' | sort -u | wc -l)" -eq 2
fresh
# shellcheck disable=SC2046  # one word a rank
expect "too many are refused" 1 "--gpus: 1025 processes, wanted 1 to 1024" run $(yes show | head -n 1025)
"$stub" port >ports 2>&1
check "a port that is taken is not chosen" awk '{ exit !(NF == 2 && $1 != $2 && $1 >= 20000 && $2 <= 32000) }' ports
cp "$stub" deleted && exec 9<deleted && rm deleted
fresh
check "a program whose file is gone starts its ranks" /proc/self/fd/9 run "$folder" show show
cp check both
check "both of them" shown 2 both --gpus
exec 9<&-
expect "devices are counted by a child" 0 "5 devices" "$stub" count 5
expect "none are none" 0 "0 devices" "$stub" count 0
expect "a child that dies counts none" 0 "-1 devices" "$stub" count die

# --- a rank ends -------------------------------------------------------------------------------------------------------------

# ends NAME STATUS ERROR WORD...: the run ends with this status and only this error, and leaves no rank
ends() {
    ends_name=$1 ends_status=$2 ends_error=$3
    shift 3
    fresh
    run "$@" >out 2>err
    ends_got=$?
    if [ $ends_got -ne "$ends_status" ]; then
        bad "$ends_name" "status $ends_got, wanted $ends_status"
    elif [ "$(cat err)" != "$ends_error" ]; then
        bad "$ends_name" "wanted '$ends_error', got: $(head -n 3 err | tr '\n' '|')"
    elif ! all_gone; then
        bad "$ends_name" "a rank is left"
    else
        ok "$ends_name"
    fi
}
ends "also where they must be killed and it has 1" 1 "" exit:1 sleep
killed="error: rank 1 was killed by signal 9 (Killed)"
ends "when all end well the run does" 0 "" exit:0 exit:0 exit:0
ends "a rank that fails ends the others with its status" 3 "" sleep exit:3 sleep
ends "one that is killed is named" 137 "$killed" sleep kill:9 sleep
ends "and one that crashes" 134 "error: rank 0 was killed by signal 6 (Aborted)" kill:6 sleep
ends "what ignores SIGTERM is killed" 3 "" stay exit:3 stay
ends "what obeys it may take a while" 3 "" slow exit:3 slow
check "both have ended by themselves" test -e "$folder/done.0" -a -e "$folder/done.2"
ends "the status is that of the first" 3 "" exit:3 late-kill:9
ends "a rank that lost one which dies slowly is not the cause" 137 "$killed" exit:1 late-kill:9
ends "nor which ends slowly" 4 "" exit:1 late-exit:4

fresh
check "a parent that ignores SIGCHLD gets the status, too" \
    sh -c "IGNORE_CHILDREN=1 '$stub' run '$folder' exit:3 exit:3; test \$? -eq 3"

ranks sleep sleep sleep
check "tools show ranks by the program's name" grep -qx launch_stub "/proc/$(rank_pid 1)/comm"
kill -9 "$(rank_pid 1)"
finish
check "kill -9 of a rank from outside: the same" test $finished -eq 137 -a "$(cat err)" = "$killed"
check "and none is left" all_gone
ranks sleep sleep
kill -STOP "$(rank_pid 0)" && kill -9 "$(rank_pid 1)"
finish
check "a stopped rank does not hold up the end" test $finished -eq 137
check "and is not left" all_gone
ranks exit:0 count
soon is_gone "$(rank_pid 0)"
sleep 1.5
check "a rank that ends well has no effect on the others" test ! -s "$folder/came.1"
let_end
check "the run ends well, too" test $finished -eq 0

# --- the parent ends ---------------------------------------------------------------------------------------------------------

ranks stay stay stay stay stay stay stay stay
kill -9 $pid
check "kill -9 of the parent ends all ranks" soon all_gone
finish
ranks watch watch
kill -9 $pid
check "a rank sees by the pipe that its parent is gone" soon test -e "$folder/gone.0" -a -e "$folder/gone.1"
check "and ends" soon all_gone
finish

# running N: so many processes of this test run; the folder's name is in their command lines. (grep reads the name from a file,
# so its own command line lacks it.)
running() {
    printf %s "$folder" >pattern
    [ "$(grep -lsF -f pattern /proc/[0-9]*/cmdline | wc -l)" -eq "$1" ]
}
fresh
LATE=1 "$stub" run "$folder" sleep sleep >out 2>err </dev/null &
pid=$!
started=$pid
soon running 3
kill -9 $pid
finish
check "a rank whose parent is gone before it asks to end with it does not start" soon running 0
check "by itself" test ! -e "$folder/pid.0" -a ! -e "$folder/pid.1"
fresh
for i in 0 1 2 3 4 5 6 7 8 9; do
    "$stub" run "$folder" sleep sleep sleep sleep sleep sleep >out 2>err </dev/null &
    pid=$!
    sleep 0.00$i
    kill -9 $pid
    finish
done
check "kill -9 at any moment of the start leaves none" soon running 0

# --- signals -----------------------------------------------------------------------------------------------------------------

# passed_on SIGNAL: a signal to the parent alone reaches each rank once
passed_on() {
    kill -"$1" $pid
    check "SIG$1 to the parent reaches each rank once" soon has 1 "$1" came
}
ranks count count count
for signal in INT TERM USR1 USR2 XCPU; do passed_on $signal; done
kill -TERM $pid
check "a second SIGTERM, too" soon has 2 TERM came
sleep 0.5
check "and not once more" has 2 TERM came
check "no other signal came twice" sh -c "cat '$folder'/came.0 | sort | tr '\n' ' ' | grep -qx 'INT TERM TERM USR1 USR2 XCPU '"
check "the parent waits for the ranks" is_alive $pid
let_end
check "and ends with their status" test $finished -eq 0

ranks sleep sleep
kill -TERM $pid
finish
check "ranks that a passed signal kills end as a program does, without an error" test $finished -eq 143 -a ! -s err

fresh
all=2
begin "$stub" terminal "$folder" "$stub" run "$folder" count count
: >"$folder/press"
soon has 1 INT came
sleep 0.5
check "Ctrl-C at a terminal reaches each rank once" has 1 INT came
: >"$folder/press"
check "a second one, too" soon has 2 INT came
if hangup_is_ignored; then
    skip "hangups" "SIGHUP is ignored here" 2
    let_end
else
    kill -9 $pid
    soon has 1 HUP came
    sleep 0.5
    check "a closed terminal hangs up each rank" test 0 -lt "$(grep -c HUP "$folder/came.0")"
    let_end
    ranks count count
    passed_on HUP
    let_end
fi
fresh
all=2
begin nohup "$stub" run "$folder" count count
kill -HUP $pid
kill -USR1 $pid
soon has 1 USR1 came
check "under nohup a hangup does nothing" has 0 HUP came
let_end
check "and the run goes on to its end" test $finished -eq 0

# --- mpirun ------------------------------------------------------------------------------------------------------------------

if command -v mpirun >/dev/null; then
    mpi() { mpirun --allow-run-as-root --oversubscribe -n 3 "$stub" show; }
    mpi >one 2>err && mpi >two 2>>err
    check "mpirun: three ranks know who they are, and where rank 0 is" shown 3 one mpirun
    check "mpirun: another run has another token" test "$(cat one two | grep -o 'token [0-9a-f]*' | sort -u | wc -l)" -eq 2
else
    skip "mpirun's ranks" "mpirun is not installed" 2
fi
summary
