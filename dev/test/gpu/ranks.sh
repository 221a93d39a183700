# ranks.sh -- tests of test_gpu.sh: ./train_llama3cu on two GPUs. They need both to themselves; with fewer they are skipped.

ranked="--model d3 --seq 256 --steps 20 --lr 1e-3 --warmup 5"

# two VARIANT FLAGS...: runs the trainer on two GPUs; skips the test where there are fewer
two() {
    [ "$(nvidia-smi -L | grep -c '^GPU')" -ge 2 ] || { echo "it needs 2 GPUs" && exit 77; }
    cu "$@" --gpus 2
}

# close_steps FIRST ALL A B: of two logs, loss and norm of the first step differ by at most FIRST of the larger, the losses of all
# steps by at most ALL
close_steps() {
    for of in "$3" "$4"; do
        sed -n 's/.*"event":"step","step":\([0-9]*\),"loss":\([^,]*\),.*"gnorm":\([^,]*\),.*/\1 \2 \3/p' "$of/log.jsonl"
    done | awk -v first="$1" -v all="$2" '
        function apart(a, b) { return a == b ? 0 : (a > b ? a - b : b - a) / (a > b ? a : b) }
        $1 in loss {
            n++
            if ($1 == 1) { one = apart(loss[1], $2); norm = apart(gnorm[1], $3) }
            if (apart(loss[$1], $2) > most) { most = apart(loss[$1], $2) }
            next
        }
        { loss[$1] = $2; gnorm[$1] = $3 }
        END {
            printf "REMARK first loss %.1e, norm %.1e, all losses %.1e apart\n", one, norm, most
            exit !(n == 20 && one <= first && norm <= first && most <= all)
        }'
}

# same_ranks A B STEP: the checkpoints of two runs of two ranks have the same bits
same_ranks() {
    sr=$(printf 'step_%08d' "$3")
    same_end "$1" "$2" "$3" && cmp "$1/$sr/state_rank00001.safetensors" "$2/$sr/state_rank00001.safetensors"
}

two_are_one() {
    d=$tmp/two_$1
    shift
    two fp32 $ranked --train "$tmp/data_train.bin" --batch 2 "$@" --total-batch 4096 --out "$d/two" || exit $?
    cu fp32 $ranked --train "$tmp/data_train.bin" --batch 4 "$@" --total-batch 4096 --out "$d/one" && close_steps 1e-6 1e-4 "$d/one" "$d/two"
}

# a 16-bit gradient of 2 ranks is rounded once on each: as far from fp32 as that of two micro-batches
two_are_near_in_16_bits() {
    d=$tmp/two_16
    two bf16 $ranked --train "$tmp/data_train.bin" --batch 4 --out "$d/two" || exit $?
    cu bf16 $ranked --train "$tmp/data_train.bin" --batch 8 --out "$d/one" && close_steps 1e-3 5e-3 "$d/one" "$d/two"
}

two_have_one_result() {
    d=$tmp/two_bits
    two bf16 $ranked --train "$tmp/data_train.bin" --batch 4 --total-batch 8192 --out "$d/a" || exit $?
    two bf16 $ranked --train "$tmp/data_train.bin" --batch 4 --total-batch 8192 --out "$d/b" && same_ranks "$d/a" "$d/b" 20 &&
        two bf16 $ranked --train "$tmp/data_train.bin" --batch 4 --total-batch 8192 --no-graph --out "$d/c" && same_ranks "$d/a" "$d/c" 20 &&
        NCCL_PROTO=LL two bf16 $ranked --train "$tmp/data_train.bin" --batch 4 --total-batch 8192 --out "$d/d" && same_ranks "$d/a" "$d/d" 20 &&
        NCCL_PROTO=Simple NCCL_P2P_DISABLE=1 two bf16 $ranked --train "$tmp/data_train.bin" --batch 4 --total-batch 8192 --out "$d/e" &&
        same_ranks "$d/a" "$d/e" 20
}

two_go_on_as_one() {
    d=$tmp/two_resumed
    two bf16 $ranked --train "$tmp/data_train.bin" --batch 4 --total-batch 8192 --out "$d/whole" || exit $?
    two bf16 $ranked --train "$tmp/data_train.bin" --batch 4 --total-batch 8192 --out "$d/parts" --stop-after 10 &&
        cp -r "$d/parts" "$d/one" && two bf16 --resume --out "$d/parts" && same_ranks "$d/whole" "$d/parts" 20 || return 1
    # on one GPU, saved again without a step, the state is the same; and back on two
    cu bf16 --resume --out "$d/one" --stop-after 15 && two bf16 --resume --out "$d/one" && close_steps 1e-3 5e-3 "$d/whole" "$d/one"
}

two_split_and_lean() {
    d=$tmp/two_lean
    lean="--master split --moments bf16 --grad-dtype fp32 --recompute block"
    two bf16 $ranked $lean --train "$tmp/data_train.bin" --batch 4 --out "$d/whole" || exit $?
    two bf16 $ranked $lean --train "$tmp/data_train.bin" --batch 4 --out "$d/parts" --stop-after 10 && two bf16 --resume --out "$d/parts" &&
        same_ranks "$d/whole" "$d/parts" 20
}

# rank_pid RANK: prints the process of a rank of $pid
rank_pid() {
    for rp in $(pgrep -P "$pid"); do
        tr '\0' '\n' <"/proc/$rp/environ" 2>/dev/null | grep -qx "LLAMA3_RANK=$1" && echo "$rp"
    done
}

two_survive_kills() {
    d=$tmp/two_killed last=0 i=0
    two bf16 $ranked --steps 1 --train "$tmp/data_train.bin" --batch 4 --out "$d/begun" || exit $?
    flags="--model d2 --train $tmp/data_train.bin --batch 8 --seq 256 --steps 100000 --schedule constant --checkpoint-every 1 --keep 3"
    while [ $i -lt 6 ]; do
        i=$((i + 1))
        "$build/bf16/train_llama3cu" --sample-tokens 0 $flags --gpus 2 --out "$d/run" --resume >"$d/screen" 2>&1 &
        pid=$!
        wait_for grep -q "^ *$((last + 2))/" "$d/screen" || { tail -n 3 "$d/screen" && echo "error: no step" && return 1; }
        kill -9 "$(rank_pid $((i % 2)))"
        wait $pid
        [ $? -ne 0 ] || { tail -n 3 "$d/screen" && echo "error: it ended well" && return 1; }
        grep -q '^error: .*rank' "$d/screen" || { tail -n 3 "$d/screen" && echo "error: the rank is not named" && return 1; }
        last=$(ls "$d/run" | sed -n 's/^step_0*\([0-9]*\)$/\1/p' | sort -n | tail -n 1)
    done
    stop=$((last + 2))
    echo "REMARK $i kills over $last steps"
    cu bf16 $flags --gpus 2 --out "$d/run" --resume --stop-after $stop && cu bf16 $flags --gpus 2 --out "$d/never" --checkpoint-every 0 --stop-after $stop &&
        same_ranks "$d/never" "$d/run" $stop
}

# overwrite FILE TENSOR BYTE OCTALS COUNT: writes COUNT times these bytes into a tensor of a safetensors file, from that byte on
overwrite() {
    ow_header=$(od -An -tu8 -N8 "$1" | tr -d ' ')
    ow_offset=$(head -c $((8 + ow_header)) "$1" | tail -c "$ow_header" | sed 's/.*"'"$2"'":{[^}]*"data_offsets":\[\([0-9]*\),.*/\1/')
    printf "$4%.0s" $(seq "$5") | dd of="$1" bs=1 seek=$((8 + ow_header + ow_offset + $3)) conv=notrunc 2>/dev/null
}

# poisoned_model FROM TO TOKEN: a copy of a d1 model in BF16 in which the residual stream of one token overflows: its embedding is
# as large as numbers get, half of it negative, and attention adds 1e37
poisoned_model() {
    mkdir -p "$2" && cp "$1/config.json" "$1/model.safetensors" "$2" && chmod u+w "$2/model.safetensors" &&
        overwrite "$2/model.safetensors" model.embed_tokens.weight $((128 * $3)) '\177\177\177\377' 32 &&
        overwrite "$2/model.safetensors" model.layers.0.self_attn.o_proj.weight 0 '\361\174' 4096
}

# one row of twelve has a token that makes the loss infinite: the step that takes it, on one rank, is skipped by both
two_skip_together() {
    d=$tmp/two_poisoned
    mkdir -p "$d" && token_file "$d/rows.bin" 193 96 || return 1
    cu bf16 --model d1 --train "$d/rows.bin" --batch 1 --seq 16 --steps 0 --out "$d/base" || return 1
    printf '\140\000' | dd of="$d/rows.bin" bs=1 seek=$((1024 + 2 * 37)) conv=notrunc 2>/dev/null
    poisoned_model "$d/base/step_00000000" "$d/model" 96 || return 1
    for seed in 1 2; do
        two bf16 --model "$d/model" --train "$d/rows.bin" --batch 1 --seq 16 --steps 6 --seed $seed --out "$d/two_$seed" || exit $?
        cu bf16 --model "$d/model" --train "$d/rows.bin" --batch 2 --seq 16 --steps 6 --seed $seed --out "$d/one_$seed" || return 1
        for n in one two; do sed -n 's/.*"event":"step","step":\([0-9]*\),.*"skipped":"skipped: not finite.*/\1/p' "$d/${n}_$seed/log.jsonl" >"$d/$n"; done
        [ "$(grep -c . "$d/two")" -eq 1 ] && cmp "$d/one" "$d/two" || { echo "error: skipped: $(cat "$d/one") and $(cat "$d/two")" && return 1; }
    done
}

# --- two GPUs that share rows; d6 has 2 key heads, one for each

sharing="--model d6 --seq 512 --steps 20 --lr 1e-3 --warmup 5 --batch 2 --total-batch 2048"

# two_share_rows NAME FLAGS...: half of each row on each GPU: the losses of one GPU with the same micro-batches
two_share_rows() {
    d=$tmp/shared_$1 name=$1
    shift
    case $name in
        documents) documents_written "$tmp" && set -- "$@" --train "$tmp/masked.bin" --val "$tmp/documents.bin" --documents mask || return 1 ;;
        adapters)
            cu fp32 $ranked --model d6 --train "$tmp/data_train.bin" --batch 4 --steps 5 --out "$d/base" || return 1
            set -- "$@" --model "$d/base/step_00000005" --lora 4 --train "$tmp/data_train.bin" --val "$tmp/data_train.bin"
            ;;
        *) set -- "$@" --train "$tmp/data_train.bin" --val "$tmp/data_train.bin" ;;
    esac
    two fp32 $sharing "$@" --val-every 5 --val-batches 3 --seq-parallel 2 --out "$d/two" || exit $?
    cu fp32 $sharing "$@" --val-every 5 --val-batches 3 --out "$d/one" && close_steps 1e-6 1e-4 "$d/one" "$d/two" || return 1
    for of in one two; do
        sed -n 's/.*"event":"val".*"loss":\([^,}]*\).*/\1/p' "$d/$of/log.jsonl" >"$d/$of.val"
        sed -n 's/.*"trained":\([0-9]*\).*/\1/p' "$d/$of/log.jsonl" >"$d/$of.trained"
    done
    cmp "$d/one.trained" "$d/two.trained" || { echo "error: other targets are trained" && return 1; }
    paste "$d/one.val" "$d/two.val" | awk '{ x = $1 / $2 - 1; if (x > 1e-4 || x < -1e-4) { print "error: validations of " $0; exit bad = 1 } }
        END { exit bad }'
}

# BF16: twice, without a graph, with blocks computed again, stopped and resumed. Then one GPU goes on, and two that share nothing
two_share_rows_with_one_result() {
    d=$tmp/shared_bits
    shared="$sharing --train $tmp/data_train.bin --seq-parallel 2"
    two bf16 $shared --out "$d/a" || exit $?
    two bf16 $shared --out "$d/b" && same_ranks "$d/a" "$d/b" 20 || return 1
    for change in --no-graph "--recompute block" "--recompute norm+swiglu"; do
        two bf16 $shared $change --out "$d/$change" && same_ranks "$d/a" "$d/$change" 20 || { echo "error: with $change" && return 1; }
    done
    NCCL_P2P_DISABLE=1 two bf16 $shared --out "$d/c" && same_ranks "$d/a" "$d/c" 20 &&
        two bf16 $shared --out "$d/parts" --stop-after 10 && cp -r "$d/parts" "$d/one" && two bf16 --resume --seq-parallel 2 --out "$d/parts" &&
        same_ranks "$d/a" "$d/parts" 20 && cu bf16 --resume --out "$d/one" --stop-after 15 && two bf16 --resume --out "$d/one" --batch 1 &&
        close_steps 1e-3 5e-3 "$d/a" "$d/one"
}

two_share_rows_in_16_bits() {
    d=$tmp/shared_16
    two bf16 $sharing --train "$tmp/data_train.bin" --seq-parallel 2 --out "$d/two" || exit $?
    cu bf16 $sharing --train "$tmp/data_train.bin" --out "$d/one" && close_steps 1e-3 5e-3 "$d/one" "$d/two"
}
