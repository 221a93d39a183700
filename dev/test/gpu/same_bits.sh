#!/bin/bash
# same_bits.sh OLD NEW [PRECISION...] -- shows on a card that a change of the sources changes no bit. Builds ./train_llama3cu in
# both source trees, trains d12 for 20 steps with each set of flags, and compares every loss, every gradient norm and the last
# checkpoint's tensors. Prints a line a case. Exit 1 if any bit differs. PRECISION: FP32 BF16 (default: both). KEEP=DIR builds
# there and keeps the programs: DIR/PRECISION/{old,new}/train_llama3cu, for dev/bench/bench_gpu.py --trainer-before
old=$(cd "$1" && pwd) new=$(cd "$2" && pwd) || exit 2
shift 2
precisions=${*:-FP32 BF16}
tales=$new/dev/data/tinytales
work=${KEEP:-$(mktemp -d "${TEST_TMP:-/tmp}/same_bits_XXXXXX")}
[ -n "${KEEP:-}" ] || trap 'rm -rf "$work"' EXIT

build() { # build TREE PRECISION: keeps the program as train_PRECISION in a copy of its tree
    mkdir -p "$work/$2" && cp -r "$1" "$work/$2/$3"
    make -s -C "$work/$2/$3" train_llama3cu PRECISION="$2" >"$work/$2/$3.log" 2>&1 || tail -n 20 "$work/$2/$3.log"
}

cases() { # cases PRECISION: "NAME | FLAGS"
    cat <<END
all kept |
norms and swiglu recomputed | --recompute norm+swiglu
ffn recomputed | --recompute ffn
block recomputed | --recompute block
four micro-batches, documents | --total-batch 32768 --documents mask
LoRA | --lora 8 --model $work/$1/base
LoRA, block recomputed | --lora 8 --model $work/$1/base --recompute block
END
    [ "$1" = BF16 ] || return 0
    cat <<END
fp8 | --fp8
fp8, block recomputed, four micro-batches | --fp8 --recompute block --total-batch 32768
fp8 and the head's | --fp8 --fp8-head
split master, bf16 moments | --master split --moments bf16
no graph | --no-graph
END
}

train() { # train PROGRAM OUT FLAGS...
    "$1" --model d12 --tokenizer "$tales" --train "$tales/tinytales_train.bin" --batch 8 --seq 1024 --lr 1e-3 --warmup 5 --steps 20 \
        --sample-tokens 40 --sample-every 20 --val-every 0 --out "$2" "${@:3}" >"$2.txt" 2>&1 || { tail -n 3 "$2.txt"; return 1; }
}

figures() { grep -hoE '"(loss|gnorm)":[^,}]*|"text":.*' "$1/log.jsonl"; cat "$1"/step_*/*.safetensors | sha256sum; }

make -s -C "$new" tokenize dev/data/tinytales/tinytales_train.bin >/dev/null || exit 2
for precision in $precisions; do
    build "$old" "$precision" old & build "$new" "$precision" new &
done
wait
differing=0
for precision in $precisions; do
    here=$work/$precision
    train "$here/old/train_llama3cu" "$here/first" --steps 1 && mv "$here/first/step_00000001" "$here/base" || exit 2
    while IFS='|' read -r name flags; do
        result=same
        # shellcheck disable=SC2086 # flags are words
        for side in old new; do train "$here/$side/train_llama3cu" "$here/$side.out" $flags || result="FAILED ($side)"; done
        [ "$result" != same ] || cmp -s <(figures "$here/old.out") <(figures "$here/new.out") || result=DIFFERENT
        [ "$result" = same ] || differing=1
        echo "$precision, $name: $result, last loss $(grep -o '"loss":[^,]*' "$here/new.out/log.jsonl" | tail -n 1)"
        rm -rf "$here"/*.out
    done < <(cases "$precision")
done
exit $differing
