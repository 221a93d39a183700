#!/bin/sh
# long_rows.sh [FOLDER [FLAGS...]] -- trains Llama 3.1's 8B with random weights on two GPUs of 141 GB that share each row.
#
# It trains 3 steps of 32,768 tokens, then 2 of 131,072, and prints their lines, with memory and tokens/s. The data are random
# tokens in FOLDER (default out/long_rows). The script kills a run after its steps, because its checkpoint would have up to
# 112 GB. FLAGS go to the trainer. Run it from the project's root. GPUS=N: GPUs that share a row (2). ROWS="N ...": lengths of
# rows, with 3 steps of each, or 2 above 32,768 tokens. TRAINER: the program, if not ./train_llama3cu.
set -u
out=${1:-out/long_rows} gpus=${GPUS:-2} trainer=${TRAINER:-./train_llama3cu}
[ $# -eq 0 ] || shift
mkdir -p "$out" || exit 1

# llm.c's format: 20240520, version 1, 600,000 tokens of 16 bits
{
    printf '\210\330\064\001\001\000\000\000\300\047\011\000'
    head -c 1012 /dev/zero
    head -c 1200000 /dev/urandom
} >"$out/random.bin"

# steps_done: prints how many steps the log has
steps_done() { cat "$out/$seq/log.jsonl" 2>/dev/null | grep -c '"event":"step"'; }

# train SEQ STEPS FLAGS...: trains STEPS steps, each of one row of SEQ tokens
train() {
    seq=$1 steps=$2
    shift 2
    rm -rf "${out:?}/$seq"
    "$trainer" --gpus "$gpus" --seq-parallel "$gpus" --model llama3.1-8b --train "$out/random.bin" --batch 1 --seq "$seq" --recompute block \
        --steps 1000 --lr 1e-5 --schedule constant --sample-tokens 0 --val-every 0 --checkpoint-minutes 0 --out "$out/$seq" "$@" >"$out/$seq.txt" 2>&1 &
    pid=$!
    trap 'kill -9 $(pgrep -P $pid) $pid 2>/dev/null; exit 130' INT TERM
    while kill -0 $pid 2>/dev/null && [ "$(steps_done)" -lt "$steps" ]; do sleep 1; done
    ranks=$(pgrep -P $pid)
    kill -9 $ranks $pid 2>/dev/null
    wait $pid 2>/dev/null
    echo "rows of $seq tokens:"
    grep -E '^memory  need|^plan |^ *step |^ *[0-9]+/1000 |^error|^  hint' "$out/$seq.txt"
    grep -s '"event":"step"' "$out/$seq/log.jsonl"
    [ "$(steps_done)" -ge "$steps" ]
}

for length in ${ROWS:-32768 131072}; do
    case $length in *[!0-9]*) echo "error: ROWS has $length, wanted numbers of tokens" >&2 && exit 1 ;; esac
    train "$length" $((length > 32768 ? 2 : 3)) "$@" || exit 1
done
