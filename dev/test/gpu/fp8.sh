# fp8.sh -- tests of test_gpu.sh: runs with --fp8. Kernels and products are in test_kernels_cu, gradients in
# test_llama3cu, equal bits of steps in test_determinism_cu.

# has_hopper: succeeds on a card of compute capability 9.0, else says why not
has_hopper() {
    case $(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1) in
        9.0) return 0 ;;
        *) echo "needs a card of compute capability 9.0" && return 77 ;;
    esac
}

# head_data: writes the text in a vocabulary that --fp8-head takes; the built-in tokenizer's is no multiple of 16
head_data() {
    [ -s "$tmp/head_val.bin" ] || "$bin/tokenize" --tokenizer dev/data/tinytales -o "$tmp/head.bin" --val-fraction 0.1 "$text" >/dev/null
}
head_flags="--fp8 --fp8-head --train $tmp/head_train.bin --val $tmp/head_val.bin"

# shares_are_small LOG: each step reports for each kind of tensor which share was lost, and the share is small. Transposes lose
# more, above all dqkv's: one scale serves all tokens, and the gradients of q and k are much smaller than v's. Beside adapters
# there are neither transposes nor shares of weights.
shares_are_small() {
    grep '"event":"step"' "$1" | sed 's/.*"quantised":{\(.*\)}.*/\1/; s/"\([a-z_]*\)":\[\([^,]*\),\([^]]*\)\],*/\1 \2 \3\n/g' | awk '
        NF == 3 {
            count++
            flushed[$1] = $2 > flushed[$1] ? $2 : flushed[$1]
            subnormal[$1] = $3 > subnormal[$1] ? $3 : subnormal[$1]
            most = $1 ~ /_t$/ ? 0.25 : 0.05
            bad += !($2 >= 0 && $2 <= most && $3 >= 0 && $3 <= 0.5) || $2 == "null"
        }
        END {
            printf "REMARK at most flushed, subnormal:"
            for (k in flushed) {
                kinds++
                if (flushed[k] > 0.002 || subnormal[k] > 0.002) { printf " %s %.3f %.3f", k, flushed[k], subnormal[k] }
            }
            printf "\n"
            wanted = !("weight" in flushed) ? 6 : "dlogits" in flushed ? 15 : 13
            exit bad > 0 || kinds != wanted || count % wanted != 0
        }'
}

# validation and --eval compute as training does: the loss of the checkpoint equals the last validation's
fp8_trains_like_bf16() {
    has_hopper || return
    flags="--model d3 --train $tmp/data_train.bin --val $tmp/data_val.bin --val-batches 4 --val-every 20 --batch 4 --seq 256 --steps 20 --lr 3e-4 --warmup 5"
    for flag in "" --fp8; do cu bf16 $flag $flags --out "$tmp/fp8_like$flag" || return 1; done
    ! grep -q quantised "$tmp/fp8_like/log.jsonl" && shares_are_small "$tmp/fp8_like--fp8/log.jsonl" || return 1
    m=step_00000020/model.safetensors
    ! cmp -s "$tmp/fp8_like/$m" "$tmp/fp8_like--fp8/$m" || { echo "error: --fp8 changes no bit" && return 1; }
    close_losses 0.02 "$tmp/fp8_like/log.jsonl" "$tmp/fp8_like--fp8/log.jsonl" || return 1
    for flag in "" --fp8; do
        cu bf16 $flag --eval --model "$tmp/fp8_like--fp8/step_00000020" --val "$tmp/data_val.bin" --val-batches 4 --batch 4 --seq 256 >"$tmp/fp8_eval$flag" || return 1
    done
    for flag in "" --fp8; do sed -n 's/^loss \([0-9.]*\) .*/\1/p' "$tmp/fp8_eval$flag" >"$tmp/fp8_loss$flag"; done
    ! cmp -s "$tmp/fp8_loss" "$tmp/fp8_loss--fp8" || { echo "error: --eval --fp8 is --eval" && return 1; }
    sed -n 's/.*"event":"val".*"loss":\([0-9.]*\).*/\1/p' "$tmp/fp8_like--fp8/log.jsonl" | tail -n 1 | xargs printf '%.6f\n' | cmp - "$tmp/fp8_loss--fp8"
}

# the same beside adapters
fp8_adapters_train_like_bf16() {
    has_hopper && lora_base || return
    flags="--model $tmp/lora_base/step_00000030 --train $tmp/data_train.bin --lora 8 --batch 4 --seq 256 --steps 20 --lr 5e-3 --warmup 5"
    for flag in "" --fp8; do cu bf16 $flag $flags --out "$tmp/fp8_lora$flag" || return 1; done
    m=step_00000020/adapter_model.safetensors
    ! cmp -s "$tmp/fp8_lora/$m" "$tmp/fp8_lora--fp8/$m" || { echo "error: --fp8 changes no bit" && return 1; }
    shares_are_small "$tmp/fp8_lora--fp8/log.jsonl" && close_losses 0.02 "$tmp/fp8_lora/log.jsonl" "$tmp/fp8_lora--fp8/log.jsonl"
}

fp8_graph_changes_no_bit() {
    has_hopper || return
    for graph in on off; do
        cu bf16 --fp8 $long --train "$tmp/data_train.bin" --total-batch 32768 --steps 5 --out "$tmp/fp8_graph_$graph" $([ $graph = on ] || echo --no-graph) || return 1
    done
    same_end "$tmp/fp8_graph_on" "$tmp/fp8_graph_off" 5
}

fp8_parts_are_the_whole() {
    has_hopper || return
    parts_are_the_whole bf16 "$@"
}

fp8_head_parts_are_the_whole() {
    has_hopper || return
    head_data && parts_are_the_whole bf16 "$1" $head_flags
}

# its gradients of logits, in e5m2, lose little. Its 8-bit copies follow the weights, or the loss would not fall with BF16's
fp8_head_trains_like_bf16() {
    has_hopper || return
    head_data || return 1
    flags="--model d3 $head_flags --val-batches 4 --val-every 20 --batch 4 --seq 256 --steps 20 --lr 3e-4 --warmup 5"
    cu bf16 $flags --out "$tmp/fp8_head" && cu bf16 $flags --no-fp8 --no-fp8-head --out "$tmp/fp8_head_bf16" &&
        cu bf16 $flags --no-fp8-head --out "$tmp/fp8_head_blocks" || return 1
    m=step_00000020/model.safetensors
    ! cmp -s "$tmp/fp8_head/$m" "$tmp/fp8_head_blocks/$m" || { echo "error: --fp8-head changes no bit" && return 1; }
    grep -q '"dlogits_t"' "$tmp/fp8_head/log.jsonl" && ! grep -q '"dlogits_t"' "$tmp/fp8_head_blocks/log.jsonl" &&
        shares_are_small "$tmp/fp8_head/log.jsonl" && close_losses 0.02 "$tmp/fp8_head_bf16/log.jsonl" "$tmp/fp8_head/log.jsonl"
}

# the plan file names products with scales, and a resumed run reads their plans
fp8_plans_travel() {
    has_hopper || return
    plans_are_carried fp8 cu --fp8 $long || return 1
    for scaled in 1 2 3; do grep -c "\"scaled\": $scaled" "$tmp/plans_fp8/whole/step_00000010/matmul_plan.json" || return 1; done
}

# the memory table and the profile include the memory and the kernels of --fp8
fp8_memory_is_true() {
    has_hopper || return
    table_is_true bf16 --batch 16 --fp8
}

fp8_head_memory_is_true() {
    has_hopper || return
    head_data && table_is_true bf16 --batch 16 $head_flags
}

fp8_profile_has_rows() {
    has_hopper || return
    cu bf16 --fp8 --model d3 --train "$tmp/data_train.bin" --batch 8 --seq 1024 --profile 2 --out "$tmp/fp8_profile" >"$tmp/fp8_profile.txt" || return 1
    for row in quantise "quantise weights" transpose "gate up" "gate up dx" "gate up dw"; do
        grep -q "^$row  *[0-9]" "$tmp/fp8_profile.txt" || { cat "$tmp/fp8_profile.txt" && echo "error: no row $row" && return 1; }
    done
}

# FP32 and FP16 builds refuse --fp8. On a card of another compute capability a BF16 build refuses it, by name and before it
# takes memory
fp8_is_refused() {
    cu fp32 --fp8 --model d3 --train "$tmp/data_train.bin" --out "$tmp/fp8_refused" >"$tmp/fp8_refused.txt" 2>&1 && { echo "error: FP32 takes it" && return 1; }
    grep "^error: --fp8: this is a build for FP32" "$tmp/fp8_refused.txt" || { cat "$tmp/fp8_refused.txt" && return 1; }
    has_hopper >"$tmp/fp8_card.txt" && return
    cu bf16 --fp8 --model d3 --train "$tmp/data_train.bin" --out "$tmp/fp8_refused" >"$tmp/fp8_refused.txt" 2>&1 && { echo "error: this card takes it" && return 1; }
    grep "^error: --fp8: .* has compute capability" "$tmp/fp8_refused.txt" && [ ! -e "$tmp/fp8_refused" ]
}

# --- two GPUs

# with_fp8 TEST ARGUMENTS...: a test of ranks.sh, on cards that have --fp8
with_fp8() {
    has_hopper || return
    "$@"
}

# each rank makes the same 8-bit copies of the gathered weights in every ZeRO, and reports their shares
fp8_zeros_agree() {
    has_hopper || return
    fza_name=$1
    fza_zeros=$2
    zeros_agree bf16 "$@" || return 1
    for zero in $fza_zeros; do shares_are_small "$tmp/zeros_$fza_name/$zero/log.jsonl" || { echo "error: shares of ZeRO $zero" && return 1; }; done
}

# the same with a model whose embedding is its head
fp8_head_zeros_agree() {
    has_hopper || return
    token_file "$tmp/fp8_head_rows.bin" 4000 112 &&
        fp8_zeros_agree fp8_head "1 2 3" --train "$tmp/fp8_head_rows.bin" --model "$pairs/fp8_head" --batch 2 --seq 32 --fp8 --fp8-head
}

# as two_are_near_in_16_bits(), with a wider limit: 8-bit sums in another order are farther apart. Stale copies of the weights,
# or no copies, would be farther still
fp8_two_are_near_one() {
    has_hopper || return
    d=$tmp/fp8_two
    for zero in 1 3; do two bf16 --fp8 $ranked --train "$tmp/data_train.bin" --batch 4 --zero $zero --out "$d/$zero" || exit $?; done
    cu bf16 --fp8 $ranked --train "$tmp/data_train.bin" --batch 8 --out "$d/one" || return 1
    for zero in 1 3; do close_steps 2e-3 1e-2 "$d/one" "$d/$zero" || return 1; done
}
