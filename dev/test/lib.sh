# lib.sh -- helpers of the shell tests. The tests source it at the project's root, where the programs under test
# are. It makes a temporary folder ($tmp, removed at the end), small texts and token files. It prints the report: "ok   NAME" or
# "FAIL NAME" for each test; summary() prints the last line and sets the exit status. BIN=DIR tests the programs of another
# build, such as one with sanitizers.
set -u
root=$PWD
bin=$(cd "${BIN:-.}" && pwd) || exit 1
tmp=$(mktemp -d "${TEST_TMP:-/tmp}/llama3_test_XXXXXX") || exit 1
cleanup() {
    status=$?
    for pid in ${started:-}; do kill -9 "$pid" 2>/dev/null; done
    rm -rf "$tmp"
    exit $status
}
trap cleanup EXIT
trap 'exit 130' INT TERM
passed=0 failed=0 skipped=0
pairs=$root/dev/test/pairs

ok() { passed=$((passed + 1)) && echo "ok   $1"; }
bad() { failed=$((failed + 1)) && echo "FAIL $1${2:+: $2}"; }
skip() { skipped=$((skipped + ${3:-1})) && echo "skip $1: $2"; }  # skip NAME REASON [N]: leaves out N tests
summary() {
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ]
}

# check NAME COMMAND...: the command succeeds
check() {
    check_name=$1
    shift
    if "$@" >"$tmp/check" 2>&1; then
        ok "$check_name"
    else
        bad "$check_name" "$*"
        head -n 5 "$tmp/check" | sed 's/^/    /'
    fi
}

# expect NAME STATUS TEXT COMMAND...: the command ends with this status. 0: TEXT is on stdout or stderr. 1 and 2: TEXT is on
# stderr, which ends with one line "error: ..." and at most one line "  hint: ..." after it. Other lines, such as warnings,
# may come first. Output stays in $tmp/stdout and $tmp/stderr.
expect() {
    expect_name=$1 expect_status=$2 expect_text=$3
    shift 3
    "$@" >"$tmp/stdout" 2>"$tmp/stderr" </dev/null
    expect_got=$?
    if [ "$expect_got" -ne "$expect_status" ]; then
        bad "$expect_name" "status $expect_got, wanted $expect_status: $(tail -n 2 "$tmp/stderr" | tr '\n' ' ')"
    elif [ "$expect_status" -eq 0 ]; then
        if cat "$tmp/stdout" "$tmp/stderr" | grep -qF -- "$expect_text"; then
            ok "$expect_name"
        else
            bad "$expect_name" "no '$expect_text'"
        fi
    elif error_is_well_formed && grep -qF -- "$expect_text" "$tmp/stderr"; then
        ok "$expect_name"
    else
        bad "$expect_name" "wanted '$expect_text' in: $(tail -n 3 "$tmp/stderr" | tr '\n' '|')"
    fi
}

# $tmp/stderr ends with one error line and at most one hint, which has a line of its own.
error_is_well_formed() {
    awk '/^error: / { errors++; at = NR } /^  hint: / { hints++ } /\\x0a  hint: / { errors++ }
         END { exit !(errors == 1 && hints <= 1 && NR == at + hints) }' "$tmp/stderr"
}

# words COUNT SEED: prints a text of that many words
words() {
    awk -v count="$1" -v s="$2" 'BEGIN {
        n = split("the a cat dog sat on mat and saw little bird fly over house then it said hello to moon", w, " ")
        for (i = 1; i <= count; i++) {
            s = (s * 171 + 11213) % 53125
            printf "%s%s", w[1 + s % n], i % 12 ? " " : ".\n"
        }
    }'
}

# little_endian BYTES NUMBER...: prints each number as octal escapes for printf
little_endian() {
    awk 'BEGIN {
        for (i = 2; i < ARGC; i++) {
            v = ARGV[i]
            for (b = 0; b < ARGV[1]; b++) { printf "\\%03o", v % 256; v = int(v / 256) }
        }
    }' "$@"
}

# token_file OUT COUNT VOCAB [ID]: writes a token file in llm.c's format (header words 3 to 255 zero): COUNT ids below
# VOCAB, then ID
token_file() {
    tf_ids=$(awk -v count="$2" -v v="$3" 'BEGIN {
        s = 7
        for (i = 0; i < count; i++) { s = (s * 171 + 11213) % 53125; printf "%d ", s % v }
    }')
    {
        printf "$(little_endian 4 20240520 1 $(($2 + (${4:+1} + 0))))"
        dd if=/dev/zero bs=1012 count=1 2>/dev/null
        printf "$(little_endian 2 $tf_ids ${4:-})"
    } >"$1"
}

# train FLAGS...: runs the trainer with small steps on one thread; later flags override
train() { "$bin/train_llama3" --threads 1 --batch 2 --seq 32 --sample-tokens 0 "$@"; }

# steps_of LOG: prints its steps, validations, answers and samples without times
steps_of() { grep -E '^\{"event":"(step|val|task|sample)"' "$1" | sed 's/,"ms":[^,]*,"tok_s":[^,]*,"seconds":[^,]*\(,"memory":[^,]*\)\{0,1\}//'; }

# same_steps A B: both logs have the same steps, and at least one
same_steps() {
    steps_of "$1" >"$tmp/steps_a" && steps_of "$2" >"$tmp/steps_b"
    [ -s "$tmp/steps_a" ] && cmp "$tmp/steps_a" "$tmp/steps_b"
}

# close_steps FIRST ALL A B [STEPS]: compares the logs of two runs of 20 steps, or STEPS. All are numbers. Loss and norm of the
# first step differ by at most FIRST of the larger, the losses of all steps by at most ALL
close_steps() {
    for of in "$3" "$4"; do
        sed -n 's/.*"event":"step","step":\([0-9]*\),"loss":\([^,]*\),.*"gnorm":\([^,]*\),.*/\1 \2 \3/p' "$of/log.jsonl"
    done | awk -v first="$1" -v all="$2" -v steps="${5:-20}" '
        function apart(a, b) { return a == b ? 0 : (a > b ? a - b : b - a) / (a > b ? a : b) }
        $2 !~ /^[0-9][0-9.e+-]*$/ || $3 !~ /^[0-9][0-9.e+-]*$/ { other = other " " $0; next }
        $1 in loss {
            n++
            if ($1 == 1) { one = apart(loss[1], $2); norm = apart(gnorm[1], $3) }
            if (apart(loss[$1], $2) > most) { most = apart(loss[$1], $2) }
            next
        }
        { loss[$1] = $2; gnorm[$1] = $3 }
        END {
            if (other != "") { print "error: no numbers:" other }
            printf "REMARK first loss %.1e, norm %.1e, all losses %.1e apart\n", one, norm, most
            exit !(other == "" && n == steps && one <= first && norm <= first && most <= all)
        }'
}

# same_checkpoint A B: both folders hold the same files, apart from the id of the run and its parent
same_checkpoint() {
    rm -rf "$tmp/same" && mkdir "$tmp/same" && cp -r "$1" "$tmp/same/a" && cp -r "$2" "$tmp/same/b" &&
        sed -i '/^  "\(run\|parent_run\|parent_step\|crc32c\)": /d' "$tmp"/same/[ab]/trainer_state.json &&
        diff -r "$tmp/same/a" "$tmp/same/b"
}

# ends_well COMMAND...: runs it, for at most 100 s. If it fails, shows its last lines and exits with 3, so that no test counts
# as failed
ends_well() {
    timeout -k 5 100 "$@" >"$tmp/log" 2>&1 && return
    tail -n 3 "$tmp/log"
    echo "error: does not end well: $*"
    exit 3
}

# hangup_is_ignored: succeeds if SIGHUP is ignored here, as under nohup; programs keep it so
hangup_is_ignored() { grep -q '^SigIgn:.*[13579bdf]$' /proc/self/status 2>/dev/null; }

# wait_for COMMAND...: repeats the command until it succeeds, for at most about 20 s; says if it has waited in vain
wait_for() {
    for wait_for_i in $(seq 400); do
        "$@" >/dev/null 2>&1 && return 0
        sleep 0.05
    done
    echo "     waited in vain for: $*"
    return 1
}

has_steps() { [ "$(grep -c '"event":"step"' "$1")" -ge "$2" ]; }

# slow_down PID: stops the process for two thirds of the time, until it ends
slow_down() { while kill -STOP "$1" && sleep 0.06 && kill -CONT "$1" && sleep 0.03; do :; done 2>/dev/null; }

# resume FLAGS...: resumes a run with its saved flags, on 3 threads
resume() { "$bin/train_llama3" --threads 3 --resume "$@"; }

# background FLAGS...: starts `train` in the background as process $pid. finish: waits for it and sets $finished to its status
background() {
    "$bin/train_llama3" --threads 1 --batch 2 --seq 32 --sample-tokens 0 "$@" >"$tmp/background" 2>&1 </dev/null &
    pid=$!
    started="${started:-} $pid"
}
finish() {
    wait "$pid" 2>/dev/null
    finished=$?
    started=
}
