#!/bin/sh
# test_bad_input.sh -- gives the programs every kind of file in place of every other kind, damaged debug states, and a weight that
# is nan. Each time the program must exit with status 1. It must print one error line that names the file, and at most one hint.
# dev/test/crash/mutate.py cuts, extends and changes every other kind of file.
# The address space is limited, so a program that allocates by a damaged size fails the test. Run from the project's root after
# `make`.
. dev/test/lib.sh
cd "$tmp" || exit 1
words 1500 1 >text.txt
"$bin/tokenize" -o data.bin text.txt >/dev/null
export OMP_NUM_THREADS=1
train --model d1 --steps 2 --out run --train data.bin >/dev/null 2>&1 || exit 1
checkpoint=run/step_00000002
limit="ulimit -v ${MEMORY:-300000}"  # KiB; a run needs about 100 MiB of address space. Sanitizers need MEMORY=unlimited

# refused FILE COMMAND...: runs the command, whose error must name FILE. Counts and prints wrong outcomes ($wrong).
# $may_pass=1: the change may leave a valid file, such as another digit or name, so status 0 is accepted too.
wrong=0 runs=0
refused() {
    refused_file=$1
    shift
    runs=$((runs + 1))
    ($limit && exec "$@") >stdout 2>stderr </dev/null
    refused_status=$?
    [ $refused_status -eq 0 ] && [ "${may_pass:-0}" -eq 1 ] && return
    if [ $refused_status -ne 1 ] || ! error_is_well_formed || ! grep '^error: ' stderr | grep -qF -- "$refused_file"; then
        wrong=$((wrong + 1))
        echo "    ${what:-}: status $refused_status: $(tail -n 2 stderr | tr '\n' '|' | cut -c 1-300)"
    fi
}
verdict() { # verdict NAME: reports all calls of refused() since the last verdict
    if [ $wrong -eq 0 ] && [ $runs -gt 0 ]; then ok "$1 ($runs runs)"; else bad "$1" "$wrong of $runs runs"; fi
    wrong=0 runs=0
}

# --- one kind in place of another --------------------------------------------------------------------------------------------

mkdir kinds && cp "$pairs/gqa2_untied_rope8.state.safetensors" kinds/debug_state.safetensors
cp $checkpoint/model.safetensors $checkpoint/config.json $checkpoint/tokenizer.json $checkpoint/trainer_state.json \
    $checkpoint/state_rank00000.safetensors data.bin text.txt run/log.jsonl kinds
: >kinds/nothing
printf 'IQ== 0\nIg== 1\n' >kinds/tokenizer.model
dd if=/dev/zero of=kinds/zeros bs=4096 count=1 2>/dev/null
mkdir kinds/folder

for kind in kinds/*; do
    name=${kind#kinds/}
    what="$name as --model" may_pass=0
    refused "$kind" "$bin/train_llama3" --threads 1 --model "$kind" --train data.bin --steps 1 --out out
    what="$name as --resume"
    refused "$kind" "$bin/train_llama3" --threads 1 --resume "$kind" --train data.bin --steps 1 --out out
    what="$name as --train"
    [ "$name" = data.bin ] || refused "$kind" "$bin/train_llama3" --threads 1 --model d1 --train "$kind" --steps 1 --out out
    what="$name as --val"
    [ "$name" = data.bin ] || refused "$kind" "$bin/train_llama3" --threads 1 --model d1 --train data.bin --val "$kind" --steps 1 --out out
    case $name in tokenizer.*) continue ;; esac
    what="$name as --tokenizer"
    refused "$kind" "$bin/train_llama3" --threads 1 --model d1 --train data.bin --tokenizer "$kind" --steps 1 --out out
    what="$name as tokenize's --tokenizer"
    refused "$kind" "$bin/tokenize" --tokenizer "$kind" -o out.bin text.txt
done
verdict "each kind of file given as each argument is refused"

# as the questions of --answer: every line gets an error
for kind in kinds/*; do
    [ -f "$kind" ] || continue
    runs=$((runs + 1))
    ($limit && exec "$bin/train_llama3" --threads 1 --model $checkpoint --answer <"$kind") >stdout 2>stderr &&
        [ "$(grep -c '^{"error": "question.*"}$' stdout)" -eq "$(($(wc -l <"$kind")))" ] && continue
    wrong=$((wrong + 1))
    echo "    $kind as questions: $(head -n 1 stdout | cut -c 1-100) $(tail -n 1 stderr | cut -c 1-200)"
done
verdict "every kind of file is an error a line as the questions of --answer"
check "and nothing was written" test ! -e out -a ! -e out.bin

# in place of each file of a model folder, of a checkpoint, of a debug state
for place in config.json model.safetensors trainer_state.json state_rank00000.safetensors; do
    for kind in kinds/*; do
        name=${kind#kinds/}
        rm -rf broken && mkdir broken && cp -r $checkpoint/* broken && rm broken/$place && cp -r "$kind" broken/$place
        cmp -s $checkpoint/$place broken/$place 2>/dev/null && continue
        what="$name as $place"
        refused "broken/$place" "$bin/train_llama3" --threads 1 --resume broken --train data.bin --out out
        case $place in *state*) continue ;; esac
        refused "broken" "$bin/train_llama3" --threads 1 --model broken --generate x --tokens 2
    done
done
for kind in kinds/*; do
    what="$kind as a debug state"
    [ "$kind" = kinds/debug_state.safetensors ] || refused "$kind" "$bin/test_llama3" "$pairs/gqa2_untied_rope8" "$kind"
done
verdict "each kind of file in the place of each file of a folder is refused"

# a broken default tokenizer is no error: texts are then ids
for kind in kinds/*; do
    rm -rf broken && mkdir broken && cp -r $checkpoint/* broken && rm broken/tokenizer.json && cp -r "$kind" broken/tokenizer.json
    runs=$((runs + 1))
    ($limit && exec "$bin/train_llama3" --threads 1 --model broken --generate "5 6" --tokens 2) >stdout 2>stderr
    status=$?
    cmp -s $checkpoint/tokenizer.json broken/tokenizer.json 2>/dev/null && continue
    [ $status -eq 0 ] && grep -q '^warning: broken/tokenizer.json' stderr && grep -q '^5 6' stdout && continue
    [ $status -eq 1 ] && [ "$kind" = kinds/tokenizer.model ] && continue  # valid, but has no token for this text
    wrong=$((wrong + 1))
    echo "    $kind as tokenizer.json: status $status: $(tail -n 2 stderr)"
done
verdict "a folder whose tokenizer is of another kind works with ids"

# --- damaged files -----------------------------------------------------------------------------------------------------------

state() { refused "$tmp/state" "$bin/test_llama3" "$pairs/gqa2_untied_rope8" "$tmp/state"; }
good=kinds/debug_state.safetensors size=$(($(wc -c <kinds/debug_state.safetensors)))
for keep in 0 1 8 9 40 200 1025 $((size / 2)) $((size - 3)); do
    what="a debug state cut to $keep of $size bytes"
    head -c "$keep" $good >state
    state
done
what="a debug state with a byte behind it"
{ cat $good && printf x; } >state
state
may_pass=1
for i in $(seq 0 101 4000); do
    what="a debug state with bit $((i % 8)) of byte $i flipped"
    cp $good state
    printf "\\$(printf '%03o' $(($(od -An -tu1 -j "$i" -N 1 $good) ^ (1 << i % 8))))" | dd of=state bs=1 seek="$i" conv=notrunc 2>/dev/null
    state
done
may_pass=0
verdict "a debug state that is cut, extended or changed is refused, or still valid"

# a nan weight: the last four bytes of the file are an F32
rm -rf broken && cp -r $checkpoint broken && rm broken/trainer_state.json
{ head -c $(($(wc -c <kinds/model.safetensors) - 4)) kinds/model.safetensors && printf '\000\000\300\177'; } >broken/model.safetensors
for job in "--generate x --tokens 2" "--eval --val data.bin --batch 2 --seq 32" "--train data.bin --batch 2 --seq 32 --steps 1 --out out"; do
    what="a weight that is nan, $job"
    refused "broken/model.safetensors: tensor lm_head.weight is nan at [256, 63], wanted a finite number" \
        "$bin/train_llama3" --threads 1 --model broken $job
done
verdict "a weight that is not finite is refused by name"

check "and nothing was written" test ! -e out
cd "$root" || exit 1
summary
