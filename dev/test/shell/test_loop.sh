#!/bin/sh
# test_loop.sh -- compares the source of the two trainers: the training loops are the same text, and the parts come in the same
# order. Also checks limits on lines per file. Run from the project's root.
. dev/test/lib.sh

loop() { sed -n '/^static void train(const Trainer/,/^}/p' "$1"; }
parts() {
    sed -n '/^\/\/ ---/{n;s/^\/\/ \([a-z]*\( step\)\{0,1\}\).*/\1/p}' "$1" |
        grep -E '^(memory|forward|backward|update|generation|training step|the)$'
}

loop train_llama3.c >"$tmp/loop_c" && loop train_llama3.cu >"$tmp/loop_cu"
parts train_llama3.c >"$tmp/parts_c" && parts train_llama3.cu >"$tmp/parts_cu"
check "the training loop is at most 60 lines" test "$(wc -l <"$tmp/loop_c")" -le 60
check "the training loop is found" test "$(wc -l <"$tmp/loop_c")" -ge 10
check "both trainers have the same training loop" cmp "$tmp/loop_c" "$tmp/loop_cu"
check "memory comes first" grep -q memory "$tmp/parts_c"
check "both trainers have their parts in the same order" cmp "$tmp/parts_c" "$tmp/parts_cu"
check "train_llama3.c has at most 700 lines" test "$(wc -l <train_llama3.c)" -le 700
check "train_llama3.cu has at most 1160 lines" test "$(wc -l <train_llama3.cu)" -le 1160
check "no file of llmc/ has more than 900 lines" \
    test -z "$(wc -l llmc/*.h llmc/*.cuh llmc/*/*.h llmc/*/*.cuh llmc/*/*/*.h | awk '$1 > 900 && $2 != "total"')"
summary
