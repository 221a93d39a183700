#!/bin/sh
# test_bad_input.sh -- gives the programs every kind of file: cut, extended, with flipped bits, and in place of every other
# kind. Each time the program must exit with status 1. It must print one error line that names the file, and at most one hint.
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

# --- cut and extended --------------------------------------------------------------------------------------------------------

# try FILE: runs the program that reads the changed file at $tmp/broken/FILE
try() {
    case $1 in
        data.bin) refused "broken/data.bin" "$bin/train_llama3" --threads 1 --model d1 --train broken/data.bin --batch 2 --seq 32 --steps 1 --dry-run ;;
        tokenizer.json | tokenizer.model) refused "broken/$1" "$bin/tokenize" --tokenizer "broken/$1" -o "$tmp/void.bin" text.txt ;;
        trainer_state.json | state_rank00000.safetensors) refused "broken/$1" "$bin/train_llama3" --threads 1 --resume broken --train data.bin --out out --dry-run ;;
        debug_state.safetensors) refused "broken/$1" "$bin/test_llama3" "$pairs/gqa2_untied_rope8" "broken/$1" ;;
        config.json) refused "broken/" "$bin/train_llama3" --threads 1 --model broken --train data.bin --batch 2 --seq 32 --steps 1 --dry-run ;;
        *) refused "broken/$1" "$bin/train_llama3" --threads 1 --model broken --train data.bin --batch 2 --seq 32 --steps 1 --dry-run ;;
    esac
}
rm -rf broken && cp -r $checkpoint broken && cp kinds/debug_state.safetensors kinds/tokenizer.model kinds/data.bin broken && cp -r broken good
for file in config.json model.safetensors tokenizer.json tokenizer.model trainer_state.json state_rank00000.safetensors data.bin debug_state.safetensors; do
    size=$(($(wc -c <good/$file)))
    for keep in 0 1 3 8 9 40 200 1024 1025 $((size / 2)) $((size - 3)); do
        [ "$keep" -lt $((size - 2)) ] || continue
        [ $file != tokenizer.model ] || [ "$keep" -lt 3 ] || continue # a prefix of whole lines is a valid tokenizer
        what="$file cut to $keep of $size bytes"
        head -c "$keep" good/$file >broken/$file
        try $file
    done
    case $file in
        *.json) tails='x { \000 ]' ;; # trailing white space is valid
        tokenizer.model) tails='x \000' ;;
        *) tails='x \000 \n xxxx' ;;
    esac
    for tail in $tails; do
        what="$file with '$tail' behind it"
        { cat good/$file && printf "$tail"; } >broken/$file
        try $file
    done
    cp good/$file broken/$file
done
verdict "every format cut or extended is refused"

# --- flipped bits ------------------------------------------------------------------------------------------------------------

# flip FILE BYTE BIT
flip() {
    old=$(od -An -tu1 -j "$2" -N 1 "good/$1")
    cp "good/$1" "broken/$1"
    printf "\\$(printf '%03o' $((old ^ (1 << $3))))" | dd of="broken/$1" bs=1 seek="$2" conv=notrunc 2>/dev/null
    what="$1 with bit $3 of byte $2 flipped"
}
for file in trainer_state.json state_rank00000.safetensors; do # a checksum covers every bit
    may_pass=0 size=$(($(wc -c <good/$file)))
    for i in 0 1 2 3 4 5 6 7 8 9 30 100 $((size / 3)) $((size / 2)) $((size - 4)) $((size - 1)); do
        flip $file "$i" $((i % 8))
        try $file
    done
    cp good/$file broken/$file
done
for i in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do # the header fields of llm.c, and our token count
    flip data.bin $i $((i * 3 % 8))
    try data.bin
    flip data.bin $((16 + i % 8)) $((i % 8))
    try data.bin
done
cp good/data.bin broken/data.bin
for i in 0 1 2 3 4 5 6 7; do # the length of the header
    for bit in 0 3 7; do
        flip model.safetensors $i $bit
        try model.safetensors
    done
done
cp good/model.safetensors broken/model.safetensors
verdict "flipped bits of headers and under checksums are refused"

# a nan weight: the last four bytes of the file are an F32
{ head -c $(($(wc -c <good/model.safetensors) - 4)) good/model.safetensors && printf '\000\000\300\177'; } >broken/model.safetensors
mv broken/trainer_state.json state.json
for job in "--generate x --tokens 2" "--eval --val data.bin --batch 2 --seq 32" "--train data.bin --batch 2 --seq 32 --steps 1 --out out"; do
    what="a weight that is nan, $job"
    refused "broken/model.safetensors: tensor lm_head.weight is nan at [256, 63], wanted a finite number" \
        "$bin/train_llama3" --threads 1 --model broken $job
done
cp good/model.safetensors broken/model.safetensors && mv state.json broken/trainer_state.json
verdict "a weight that is not finite is refused by name"

may_pass=1
for file in config.json tokenizer.json tokenizer.model model.safetensors debug_state.safetensors; do
    size=$(($(wc -c <good/$file)))
    [ $size -lt 4000 ] || size=4000
    for i in $(seq 0 $((size / 40 + 1)) $((size - 1))); do
        flip $file "$i" $((i % 8))
        try $file
    done
    cp good/$file broken/$file
done
verdict "flipped bits of texts are refused, or leave a valid file"
check "and nothing was written" test ! -e out
cd "$root" || exit 1
summary
