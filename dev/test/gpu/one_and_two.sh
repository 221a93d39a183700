#!/bin/sh
# one_and_two.sh FOLDER [FLAGS...] -- for test_gpu_faults.sh: FOLDER/train_llama3cu, built for FP32, trains on two GPUs as on
# one, in two micro-batches or one on each GPU. It compares loss and norm of the first step, and the losses of all 20 steps.
# Both runs take FLAGS, but the run on one GPU leaves out --seq-parallel 2. FOLDER/tokenize writes the data, documents of 40 to
# 220 words. Run from the project's root.
. dev/test/lib.sh
folder=$1
shift
flags=$* alone=$(echo " $* " | sed 's/ --seq-parallel 2 / /')

awk 'BEGIN {
    for (d = 0; d < 200; d++) {
        text = ""
        for (i = 0; i < 40 + d % 7 * 30; i++) { s = (s * 171 + 11213) % 53125; text = text " w" s % 90 }
        print "{\"text\": \"" text "\"}"
    }
}' >"$tmp/text.jsonl"
ends_well "$folder/tokenize" -o "$tmp/data.bin" "$tmp/text.jsonl"

# run OUT FLAGS...
run() {
    run_out=$tmp/$1
    shift
    ends_well "$folder/train_llama3cu" --model d6 --train "$tmp/data.bin" --seq 512 --batch 2 --total-batch 2048 --steps 20 --lr 1e-3 \
        --warmup 5 --sample-tokens 0 --val-every 0 --out "$run_out" "$@"
}
run two --gpus 2 $flags
run one $alone
check "two GPUs train as one" close_steps 1e-6 1e-4 "$tmp/one" "$tmp/two"
summary
