# ranks.sh -- tests of test_gpu.sh: ./train_llama3cu on two GPUs. The tests need both GPUs to themselves; with fewer GPUs they
# are skipped.

ranked="--model d3 --seq 256 --steps 20 --lr 1e-3 --warmup 5"

# two VARIANT FLAGS...: runs the trainer on two GPUs; skips the test where there are fewer
two() {
    [ "$(nvidia-smi -L | grep -c '^GPU')" -ge 2 ] || { echo "it needs 2 GPUs" && exit 77; }
    cu "$@" --gpus 2
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

# each of 2 ranks rounds its 16-bit gradient once: the sum is as far from fp32 as with two micro-batches
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
        NCCL_CTA_POLICY=0 two bf16 $ranked --train "$tmp/data_train.bin" --batch 4 --total-batch 8192 --out "$d/k" && same_ranks "$d/a" "$d/k" 20 &&
        NCCL_CTA_POLICY=0 NCCL_PROTO=LL two bf16 $ranked --train "$tmp/data_train.bin" --batch 4 --total-batch 8192 --out "$d/d" && same_ranks "$d/a" "$d/d" 20 &&
        NCCL_PROTO=Simple NCCL_P2P_DISABLE=1 two bf16 $ranked --train "$tmp/data_train.bin" --batch 4 --total-batch 8192 --out "$d/e" &&
        same_ranks "$d/a" "$d/e" 20
}

two_go_on_as_one() {
    d=$tmp/two_resumed
    two bf16 $ranked --train "$tmp/data_train.bin" --batch 4 --total-batch 8192 --out "$d/whole" || exit $?
    two bf16 $ranked --train "$tmp/data_train.bin" --batch 4 --total-batch 8192 --out "$d/parts" --stop-after 10 &&
        cp -r "$d/parts" "$d/one" && two bf16 --resume --out "$d/parts" && same_ranks "$d/whole" "$d/parts" 20 || return 1
    # the run continues on one GPU, then again on two
    cu bf16 --resume --out "$d/one" --stop-after 15 && two bf16 --resume --out "$d/one" && close_steps 1e-3 5e-3 "$d/whole" "$d/one"
}

two_split_and_lean() {
    d=$tmp/two_lean
    lean="--master split --moments bf16 --grad-dtype fp32 --recompute block"
    two bf16 $ranked $lean --train "$tmp/data_train.bin" --batch 4 --out "$d/whole" || exit $?
    two bf16 $ranked $lean --train "$tmp/data_train.bin" --batch 4 --out "$d/parts" --stop-after 10 && two bf16 --resume --out "$d/parts" &&
        same_ranks "$d/whole" "$d/parts" 20
}

# poisoned_model FROM TO TOKEN: a copy of a d1 model in BF16 in which the residual stream of one token overflows: its embedding
# holds the largest numbers, half of them negative, and attention adds 1e37
poisoned_model() {
    mkdir -p "$2" && cp "$1/config.json" "$1/model.safetensors" "$2" && chmod u+w "$2/model.safetensors" &&
        overwrite "$2/model.safetensors" model.embed_tokens.weight $((128 * $3)) '\177\177\177\377' 32 &&
        overwrite "$2/model.safetensors" model.layers.0.self_attn.o_proj.weight 0 '\361\174' 4096
}

# one row of twelve has a token that makes the loss infinite: one rank takes this row, and both ranks skip the step
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

# --- ZeRO 2 and 3 ------------------------------------------------------------------------------------------------------------

deep="--model d7 --seq 256 --steps 20 --lr 1e-3 --warmup 5" # enough blocks to take turns in all rings

# zeros_agree PRECISION NAME ZEROS FLAGS...: runs with these values of --zero on two GPUs have the same bits
zeros_agree() {
    v=$1 d=$tmp/zeros_$2 zeros=$3
    shift 3
    for zero in $zeros; do two "$v" $deep --train "$tmp/data_train.bin" "$@" --zero $zero --out "$d/$zero" || exit $?; done
    for zero in $zeros; do same_ranks "$d/${zeros%% *}" "$d/$zero" 20 || { echo "error: ZeRO $zero" && return 1; }; done
}

# the same with a model whose embedding is its head
tied_zeros_agree() {
    mkdir -p "$tmp/zeros_tied" && token_file "$tmp/zeros_tied/rows.bin" 4000 50 || return 1
    zeros_agree "$1" tied "1 2 3" --train "$tmp/zeros_tied/rows.bin" --model "$pairs/tied_gqa4_rope32" --batch 2 --seq 20
}

# apart A B: prints the largest relative difference between the losses of two runs
apart() {
    for of in "$1" "$2"; do sed -n 's/.*"event":"step","step":\([0-9]*\),"loss":\([^,]*\),.*/\1 \2/p' "$of/log.jsonl"; done |
        awk '!($1 in loss) { loss[$1] = $2; next } { n++; d = (loss[$1] - $2) / $2; d = d < 0 ? -d : d; if (d > most) { most = d } }
             END { if (n != 20) { most = 1 } print most + 0 }'
}

# with several micro-batches --zero 2 and 3 round the sum of a step at other places than --zero 1, and less often
zeros_are_near() {
    d=$tmp/zeros_near micro="--batch 2 --total-batch 4096"
    for v in fp32 bf16; do
        for zero in 1 2; do two $v $deep --train "$tmp/data_train.bin" $micro --zero $zero --out "$d/${v}_$zero" || exit $?; done
        cu $v $deep --train "$tmp/data_train.bin" $micro --out "$d/${v}_one" || return 1
    done
    own=$(apart "$d/bf16_one" "$d/fp32_one") two=$(apart "$d/bf16_2" "$d/fp32_one")
    echo "REMARK losses apart from FP32: one GPU $own, ZeRO 2 $two"
    close_steps 1e-6 1e-6 "$d/fp32_1" "$d/fp32_2" && awk -v own="$own" -v two="$two" 'BEGIN { exit !(own > 0 && two <= 1.5 * own) }'
}

# zeros_have_one_result ZEROS FLAGS...
zeros_have_one_result() {
    zeros=$1
    shift
    for zero in $zeros; do
        d=$tmp/zero_bits_$zero$* flags="$deep --train $tmp/data_train.bin --batch 2 --total-batch 4096 --zero $zero $*"
        two bf16 $flags --out "$d/a" || exit $?
        two bf16 $flags --no-graph --out "$d/b" && same_ranks "$d/a" "$d/b" 20 &&
            NCCL_PROTO=Simple NCCL_P2P_DISABLE=1 two bf16 $flags --out "$d/c" && same_ranks "$d/a" "$d/c" 20 || return 1
    done
}

# zeros_go_on_as_another FLAGS...: a run passes from shards of the weights to whole weights and back. It has one micro-batch a
# step, so that all values of --zero have the same bits
zeros_go_on_as_another() {
    d=$tmp/zeros_resumed$*
    two bf16 $deep --train "$tmp/data_train.bin" --batch 4 --zero 3 "$@" --out "$d/whole" || exit $?
    two bf16 $deep --train "$tmp/data_train.bin" --batch 4 --zero 3 "$@" --out "$d/parts" --stop-after 7 &&
        two bf16 --resume --out "$d/parts" --zero 1 --stop-after 14 && two bf16 --resume --out "$d/parts" --zero 3 &&
        same_ranks "$d/whole" "$d/parts" 20
}

# texts and validations equal those of whole weights; two ranks share three batches unevenly
# zeros_speak_alike FLAGS...
zeros_speak_alike() {
    d=$tmp/zeros_speak$*
    for zero in 1 3; do
        two bf16 $deep --train "$tmp/data_train.bin" --batch 4 --zero $zero "$@" --out "$d/$zero" --sample-tokens 20 --sample-every 10 \
            --val "$tmp/data_train.bin" --val-every 10 --val-batches 3 || exit $?
        sed -n 's/.*"event":"\(sample\|val\)",\(.*\)/\2/p' "$d/$zero/log.jsonl" >"$d/$zero.said"
    done
    [ "$(grep -c . "$d/1.said")" -eq 4 ] && cmp "$d/1.said" "$d/3.said" && same_ranks "$d/1" "$d/3" 20
}

# each rank holds its shards of the exact weights: 10 steps and 10 more have the bits of 20, and one GPU reads the same weights
# from the state
exact_weights_are_collected() {
    for zero in 1 3; do
        d=$tmp/exact_$zero flags="$deep --train $tmp/data_train.bin --batch 4 --zero $zero"
        two bf16 $flags --export-dtype f32 --out "$d/whole" || exit $?
        two bf16 $flags --export-dtype f32 --out "$d/parts" --stop-after 10 && two bf16 --resume --out "$d/parts" &&
            same_ranks "$d/whole" "$d/parts" 20 && two bf16 $flags --out "$d/half" --stop-after 10 &&
            cu bf16 --resume "$d/half/step_00000010" --out "$d/written" --export-dtype f32 --lr 0 --steps 11 || return 1
        two bf16 $flags --export-dtype f32 --out "$d/exact" --stop-after 10 &&
            cmp "$d/exact/step_00000010/model.safetensors" "$d/written/step_00000011/model.safetensors" || return 1
    done
}

adapters_are_collected() {
    for zero in 1 3; do
        d=$tmp/two_adapters_$zero
        [ -d "$tmp/adapters_base" ] || cu bf16 --model d4 --train "$tmp/data_train.bin" --seq 256 --steps 5 --out "$tmp/adapters_base" || return 1
        flags="--model $tmp/adapters_base --lora 4 --train $tmp/data_train.bin --seq 256 --batch 4 --steps 20 --lr 1e-3 --zero $zero"
        two bf16 $flags --out "$d/whole" || exit $?
        two bf16 $flags --out "$d/parts" --stop-after 10 && two bf16 --resume --out "$d/parts" || return 1
        for file in adapter_model state_rank00000 state_rank00001; do
            cmp "$d/whole/step_00000020/$file.safetensors" "$d/parts/step_00000020/$file.safetensors" || return 1
        done
        cmp "$d/whole/step_00000020/adapter_model.safetensors" "$tmp/two_adapters_1/whole/step_00000020/adapter_model.safetensors" || return 1
    done
}

two_carry_plans() {
    plans_are_carried two two $deep --batch 4 --zero 2 && same_ranks "$tmp/plans_two/whole" "$tmp/plans_two/parts" 20
}

# after ten steps that are not finite all ranks look for the tensor, and the run ends
zeros_are_ruined_together() {
    d=$tmp/zeros_ruined
    two bf16 $ranked --steps 1 --train "$tmp/data_train.bin" --batch 4 --out "$d/begun" || exit $?
    limit 100 "$build/bf16/train_llama3cu" --sample-tokens 0 $deep --gpus 2 --zero 3 --train "$tmp/data_train.bin" --batch 4 --lr 1e3 --weight-decay 1000 --grad-clip 0 \
        --steps 200 --out "$d/run" >"$d/screen" 2>&1
    [ $? -eq 1 ] && grep -q 'is not finite, first in' "$d/screen" || { tail -n 3 "$d/screen" && echo "error: it is not told" && return 1; }
}

# --- two GPUs that share rows; d6 has 2 key heads, one for each

sharing="--model d6 --seq 512 --steps 20 --lr 1e-3 --warmup 5 --batch 2 --total-batch 2048"

# two_share_rows NAME FLAGS...: each GPU holds half of each row; losses equal one GPU's with the same micro-batches
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

# two_share_rows_with_one_result FAR FLAGS...: in BF16 a run has the same bits when it is repeated, without a graph, with blocks
# recomputed, and when it is stopped and resumed. Then it continues on one GPU, and on two that share no rows, with losses at
# most FAR apart
two_share_rows_with_one_result() {
    far=$1
    shift
    d=$tmp/shared_bits$*
    shared="$sharing --train $tmp/data_train.bin --seq-parallel 2 $*"
    two bf16 $shared --out "$d/a" || exit $?
    two bf16 $shared --out "$d/b" && same_ranks "$d/a" "$d/b" 20 || return 1
    for change in --no-graph "--recompute block" "--recompute norm+swiglu"; do
        two bf16 $shared $change --out "$d/$change" && same_ranks "$d/a" "$d/$change" 20 || { echo "error: with $change" && return 1; }
    done
    NCCL_P2P_DISABLE=1 two bf16 $shared --out "$d/c" && same_ranks "$d/a" "$d/c" 20 &&
        two bf16 $shared --out "$d/parts" --stop-after 10 && cp -r "$d/parts" "$d/one" && two bf16 --resume --seq-parallel 2 --out "$d/parts" &&
        same_ranks "$d/a" "$d/parts" 20 && cu bf16 --resume --out "$d/one" --stop-after 15 && two bf16 --resume --out "$d/one" --batch 1 &&
        close_steps 1e-3 "$far" "$d/a" "$d/one"
}

# two_share_rows_and_blocks FLAGS...: ZeRO 1, 2 and 3 have the same bits
two_share_rows_and_blocks() {
    d=$tmp/shared_zero$*
    shared="--model d6 --seq 512 --steps 20 --lr 1e-3 --warmup 5 --batch 2 --train $tmp/data_train.bin --seq-parallel 2 $*"
    for zero in 1 2 3; do two bf16 $shared --zero $zero --out "$d/$zero" || exit $?; done
    same_ranks "$d/1" "$d/2" 20 && same_ranks "$d/1" "$d/3" 20
}

# median_apart A B: prints the median of the relative differences between the losses of two runs of 20 steps
median_apart() {
    paste "$1/losses" "$2/losses" | awk '{ d = ($2 - $4) / $4; print d < 0 ? -d : d }' | sort -g | awk '{ d[NR] = $1 } END { print NR == 20 ? (d[10] + d[11]) / 2 : "nothing" }'
}

# In 20 steps at this rate 16-bit rounding alone changes losses by percents. So two GPUs may be as far from FP32 as one GPU is.
# One GPU runs with the micro-batches of two GPUs and with other micro-batches, which round at other places. The test compares
# medians: in FP32, too, a step may have a norm many times its neighbours' norms, and there losses differ by a tenth. A fault of
# a single step shows in two_share_rows_with_one_result()
two_share_rows_in_16_bits() {
    d=$tmp/shared_16$* own=0 shared="$sharing --train $tmp/data_train.bin"
    two bf16 $shared "$@" --seq-parallel 2 --out "$d/two" || exit $?
    cu fp32 $shared --out "$d/fp32" && cu bf16 $shared "$@" --out "$d/one" && cu bf16 $shared "$@" --batch 1 --out "$d/one_1" &&
        cu bf16 $shared "$@" --batch 4 --out "$d/one_4" || return 1
    for of in fp32 two one one_1 one_4; do losses_of "$d/$of/log.jsonl" >"$d/$of/losses"; done
    echo "gradient norms of two: $(sed -n 's/.*"event":"step".*"gnorm":\([0-9.]*\).*/\1/p' "$d/two/log.jsonl" | tr '\n' ' ')"
    for of in two one one_1 one_4; do
        median=$(median_apart "$d/$of" "$d/fp32")
        echo "REMARK $of: $median from FP32 in the median, $(apart "$d/$of" "$d/fp32") at most"
        case $of in two) two=$median ;; *) own=$(awk -v a="$own" -v b="$median" 'BEGIN { print (a > b ? a : b) }') ;; esac
    done
    close_steps 1e-3 1 "$d/one" "$d/two" && awk -v own="$own" -v two="$two" 'BEGIN { exit !(own > 0 && two + 0 == two && two <= 2 * own) }' && return 0
    paste -d ' ' "$d/fp32/losses" "$d/one/losses" "$d/two/losses" | awk '{ print "error: step " $1 ": FP32 " $2 ", one GPU " $4 ", two " $6 }' | tail -n 20
    return 1
}
