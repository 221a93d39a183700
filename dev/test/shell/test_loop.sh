#!/bin/sh
# test_loop.sh -- compares the source of the two trainers: the parts come in the same order, and both run one short training
# loop. Run from the project's root.
. dev/test/lib.sh

parts() {
    sed -n '/^\/\/ ---/{n;s/^\/\/ \([a-z]*\( step\)\{0,1\}\).*/\1/p}' "$1" |
        grep -E '^(memory|forward|backward|update|generation|training step|the)$'
}

sed -n '/^static inline int train(const Trainer/,/^}/p' llmc/run/loop/train.h >"$tmp/loop"
parts train_llama3.c >"$tmp/parts_c" && parts train_llama3.cu >"$tmp/parts_cu"
check "the training loop is at most 60 lines" test "$(wc -l <"$tmp/loop")" -le 60
check "the training loop is found" test "$(wc -l <"$tmp/loop")" -ge 10
check "both trainers run it" sh -c '[ "$(grep -l "run_job(&.*, &p);" train_llama3.c train_llama3.cu | wc -l)" = 2 ]'
check "memory comes first" grep -q memory "$tmp/parts_c"
check "both trainers have their parts in the same order" cmp "$tmp/parts_c" "$tmp/parts_cu"
summary
