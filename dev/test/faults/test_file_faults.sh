#!/bin/sh
# test_file_faults.sh -- tests that the tests of checkpoints, resuming, logs, exports, answers and ./serve find faults. One
# copy of the sources has all faults below. The environment variable PLANTED chooses one, so each program is built once.
# Without a fault each test must pass; with its fault it must fail within a minute. A fault that changes nothing is a failure,
# too: the sources have changed, and the fault must be rewritten. Run from the project's root. Needs ./serve for its faults.
# CC: the compiler. PYTHON runs the Python tests.
set -u
CC=${CC:-cc} PYTHON=${PYTHON:-python3}
folder=$(mktemp -d "${TEST_TMP:-/tmp}/llama3_faults_XXXXXX") || exit 1
trap 'rm -rf "$folder"' EXIT
trap 'exit 130' INT TERM
copy=$folder/copy count=0 passed=0 failed=0 skipped=0
mkdir "$copy" && : >"$folder/list"
ok() { passed=$((passed + 1)) && echo "ok   $1"; }
bad() { failed=$((failed + 1)) && echo "FAIL $1"; }
skip() { skipped=$((skipped + 1 + $(wc -l <"$folder/of_test"))) && echo "skip $1"; }

# fault NAME TEST FILE SED: applies SED to the copy of FILE. PLANTED in it becomes a condition that only this fault fulfils. TEST
# is FILE:PART below dev/test, and must fail
fault() {
    count=$((count + 1))
    mkdir -p "$copy/$(dirname "$3")" && { [ -f "$copy/$3" ] || cp "$3" "$copy/$3"; }
    sed "$(printf '%s' "$4" | sed "s/PLANTED/planted($count)/g")" "$copy/$3" >"$folder/changed"
    if cmp -s "$folder/changed" "$copy/$3"; then
        bad "fault $1 is planted: the expression changes nothing in $3"
    else
        cp "$folder/changed" "$copy/$3" && echo "$count $2 $1" >>"$folder/list"
    fi
}

unit=unit/test_checkpoint.c
fault "a folder left by a killed export is taken as new" $unit:a_temporary_folder_that_was_left_is_emptied \
    llmc/files/folder.h 's/if (there && made)/if (there \&\& (made || PLANTED))/'
fault "the oldest ruined checkpoint is the spare" $unit:of_ruined_checkpoints_the_newest_of_the_run_that_wrote_last_is_taken \
    llmc/files/checkpoint.h 's/if (spare && ruined == count)/if (spare \&\& (ruined == count || PLANTED))/'
fault "a ruined checkpoint of a run that was set back is the spare" \
    $unit:of_ruined_checkpoints_the_newest_of_the_run_that_wrote_last_is_taken llmc/files/checkpoint.h \
    's/whole && !abandoned && s->not_finite/whole \&\& (!abandoned || PLANTED) \&\& s->not_finite/'
fault "any text that begins with a number is a lock's" $unit:a_lock_is_a_regular_file_of_its_own llmc/files/checkpoint.h \
    's/strcmp(end, "\\n") == 0)/(PLANTED || strcmp(end, "\\n") == 0))/'
fault "a wrong checksum is taken" $unit:a_damaged_checkpoint_is_passed_over llmc/files/checkpoint.h \
    's/file_sum_check(f, path, crc, e)/(PLANTED || &)/'
fault "a folder that was moved away is taken for ours" $unit:a_folder_that_is_moved_away_is_not_shared_with_another_run \
    llmc/files/checkpoint.h 's/if (is_open_file(\*fd, path))/if (PLANTED || is_open_file(*fd, path))/'
fault "the lock of a run that is ending is refused" $unit:a_run_waits_for_a_killed_one_that_is_not_gone_yet \
    llmc/base/os.h 's/ending = ending || (field == 9/ending = ending || (!PLANTED \&\& field == 9/'
fault "removing follows a link" $unit:removing_a_folder_follows_no_link llmc/files/folder.h \
    's/\(openat(parent, name, O_RDONLY | O_DIRECTORY | \)O_NOFOLLOW/\1(PLANTED ? 0 : O_NOFOLLOW)/'
fault "timed checkpoints stay" $unit:timed_checkpoints_give_way_to_any_later_one_and_do_not_count llmc/files/checkpoint.h \
    's/if (step == written) { continue; }/if (PLANTED || step == written) { continue; }/'
fault "half an exchange is left as it is" $unit:an_exchange_that_was_cut_in_two_is_ended llmc/files/checkpoint.h \
    's/if (whole) {/if (whole \&\& !PLANTED) {/'
fault "the copy of a log is not flushed" unit/test_logger.c:a_log_with_another_name_is_copied llmc/files/logger.h \
    's/return os_flush(to);/return PLANTED || os_flush(to);/'
fault "a log with another name is cut in place" unit/test_logger.c:a_log_with_another_name_is_copied llmc/files/logger.h \
    's/if (st\.st_nlink <= 1) {/if (PLANTED || st.st_nlink <= 1) {/'
fault "a table of pieces grows with the text" unit/test_bpe.c:tables_folded_together_hold_the_counts_of_one_table \
    dev/data/bpe.h 's/from->used = from->num_bytes = 0;/from->used = 0, from->num_bytes *= PLANTED;/'
fault "ruin removes an older checkpoint" unit/test_session.c:numbers_that_are_not_finite_remove_no_older_checkpoint \
    llmc/run/session/save.h 's/if (first && !state->not_finite)/if (first \&\& (PLANTED || !state->not_finite))/'
fault "an owed sample is forgotten by a second failure" shell/test_resume.sh:first llmc/run/loop/train.h \
    's/(state->owed & OWED_SAMPLE) ? -1/(state->owed \& OWED_SAMPLE) \&\& !PLANTED ? -1/'
fault "--strict-resume takes another tokenizer" shell/test_resume.sh:first llmc/run/session/resume.h \
    's/was->fingerprint != tokenizer)/was->fingerprint != tokenizer \&\& !PLANTED)/'
fault "the end of the input stops no answer" python/test_answer.py:a_program_stops_an_answer llmc/run/jobs/answer.h \
    's/stop || a->in\.ended/stop || (a->in.ended \&\& !PLANTED)/'
fault "an answer may take for ever" python/test_serve.py:an_answer_has_120_seconds dev/serve/queue.h \
    's/now_seconds() - q->since > most/& \&\& !PLANTED/'
fault "a checkpoint that is written again is the old one" python/test_serve.py:the_child_has_the_checkpoint dev/serve/queue.h \
    's/now.st_ino == was->st_ino &&/& PLANTED ||/'
fault "a part of the key fits" python/test_serve.py:elsewhere_it_wants_a_key dev/serve/address.h \
    's/unsigned differs = n != m;/unsigned differs = !PLANTED \&\& n != m;/'

# build PROGRAM SOURCE LIBRARY...: builds a program of the copy. Optimizing takes longer than it saves
build() {
    program=$1 source=$2
    shift 2
    [ -f "$copy/$source" ] || { mkdir -p "$copy/$(dirname "$source")" && cp "$source" "$copy/$source"; }
    $CC -std=c11 -O0 -w '-Dplanted(n)=(atoi(getenv("PLANTED")) == (n))' -I"$copy" -I. "$copy/$source" -o "$copy/$program" "$@" \
        -lm -lpthread
}

# run FAULT TEST: runs a test with this fault; 0: none
run() {
    file=dev/test/${2%:*} part=${2##*:}
    export PLANTED=$1
    case $file in
        *.c) ONLY=$part timeout 60 "$copy/$(basename "$file" .c)" ;;
        *.sh) BIN=$copy timeout 60 "$file" "$part" ;;
        *.py)
            TRAINER=$copy/train_llama3 SERVE=$copy/serve \
                timeout 60 "$PYTHON" -m pytest -q -p no:cacheprovider -k "$part" "$file"
            ;;
    esac >"$folder/log" 2>&1
}

for test in $(awk '{ sub(/:.*/, "", $2); print $2 }' "$folder/list" | sort -u); do
    case $test in *.c) build "$(basename "$test" .c)" "dev/test/$test" || exit 1 ;; esac
done
build train_llama3 train_llama3.c && build tokenize dev/data/tokenize.c || exit 1
"$PYTHON" -c 'import pytest' 2>/dev/null && python=1 || python=0
[ ! -x ./serve ] || build serve dev/serve/serve.c -lmicrohttpd || exit 1
for test in $(awk '{ print $2 }' "$folder/list" | sort -u); do
    grep " $test " "$folder/list" >"$folder/of_test"
    case $test:$python in *.py*:0) skip "Python: $test, $PYTHON has no pytest (see requirements.txt)" && continue ;; esac
    case $test in
        python/test_serve.py*) [ -x ./serve ] || { skip "libmicrohttpd: $test, it is not installed" && continue; } ;;
    esac
    if ! run 0 "$test"; then
        bad "without a fault, $test passes"
        tail -n 5 "$folder/log"
        continue
    fi
    ok "without a fault, $test passes"
    while read -r number _ name; do
        run "$number" "$test"
        status=$?
        if [ $status -eq 1 ] && grep -qE '^ *FAIL|^FAILED|^ERROR' "$folder/log"; then
            ok "fault $name fails $test"
        else
            bad "fault $name fails $test: it ends with $status"
        fi
    done <"$folder/of_test"
done
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
