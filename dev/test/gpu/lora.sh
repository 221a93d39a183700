# lora.sh -- tests of test_gpu.sh: --lora on the card against the CPU trainer and against itself, and the memory that --lora
# needs.

# lora_base: trains the model whose weights --lora freezes
lora_base() {
    [ -d "$tmp/lora_base" ] || cu fp32 --model d3 --train "$tmp/data_train.bin" --batch 4 --seq 256 --steps 30 --lr 2e-3 --out "$tmp/lora_base"
}

# same_adapters A B STEP: the checkpoints of two runs have the same adapters and state, bit for bit
same_adapters() {
    sa=$(printf 'step_%08d' "$3")
    cmp "$1/$sa/adapter_model.safetensors" "$2/$sa/adapter_model.safetensors" && cmp "$1/$sa/state_rank00000.safetensors" "$2/$sa/state_rank00000.safetensors"
}

adapters_train_as_on_the_cpu() {
    lora_base || return 1
    flags="--model $tmp/lora_base/step_00000030 --train $tmp/data_train.bin --lora 8 --batch 4 --seq 256 --total-batch 2048 --steps 20 --lr 5e-3 --warmup 5"
    cu fp32 $flags --out "$tmp/lora_gpu" && limit 100 "$bin/train_llama3" --sample-tokens 0 $flags --out "$tmp/lora_cpu" &&
        close_losses 1e-4 "$tmp/lora_gpu/log.jsonl" "$tmp/lora_cpu/log.jsonl" || return 1
    # both trainers generate the same text from the same adapters
    cu fp32 --model "$tmp/lora_gpu" --generate "ROMEO:" --tokens 60 --temperature 0 >"$tmp/lora_gpu.txt" || return 1
    limit 100 "$bin/train_llama3" --model "$tmp/lora_gpu" --generate "ROMEO:" --tokens 60 --temperature 0 >"$tmp/lora_cpu.txt" || return 1
    [ -s "$tmp/lora_gpu.txt" ] && cmp "$tmp/lora_gpu.txt" "$tmp/lora_cpu.txt"
}

# 20 steps in 16 bits stay near the same steps in fp32
adapters_train_alike_in_16_bits() {
    lora_base || return 1
    flags="--model $tmp/lora_base/step_00000030 --train $tmp/data_train.bin --lora 8 --batch 4 --seq 256 --steps 20 --lr 5e-3 --warmup 5"
    for v in fp32 bf16 fp16; do cu $v $flags --out "$tmp/lora_$v" || return 1; done
    close_losses 0.03 "$tmp/lora_fp32/log.jsonl" "$tmp/lora_bf16/log.jsonl" && close_losses 0.03 "$tmp/lora_fp32/log.jsonl" "$tmp/lora_fp16/log.jsonl"
}

# adapters_resume VARIANT NAME FLAGS...: 10 steps and 10 more have the bits of 20, and recomputation changes no bit
adapters_resume() {
    v=$1 name=$tmp/lora_parts_$2
    shift 2
    lora_base || return 1
    flags="--model $tmp/lora_base/step_00000030 --train $tmp/data_train.bin --lora 5 --batch 4 --seq 250 --steps 20 --lr 5e-3 $*"
    cu $v $flags --out "$name.whole" && cu $v $flags --out "$name.parts" --stop-after 10 && cu $v --out "$name.parts" --resume &&
        same_adapters "$name.whole" "$name.parts" 20 || return 1
    cu $v $flags --no-graph --out "$name.eager" && same_adapters "$name.whole" "$name.eager" 20 || return 1
    cu $v $flags --recompute block --out "$name.block" && same_adapters "$name.whole" "$name.block" 20
}

# lora_fits SIZE MODEL FLAGS...: the plan of a run with adapters fits into SIZE, including all memory that it takes of the card.
# Three steps stay within the plan. The weights are drawn: --dry-run takes a preset.
lora_fits() {
    size=$1
    shift
    wide_data
    CU_LIMIT=300 card_memory cu bf16 --model "$@" --lora 16 --train "$tmp/wide.bin" --dry-run --max-memory "$size" --out "$tmp/lora_fits" >"$tmp/lora_fits.out" || return 1
    grep -E '^memory' "$tmp/lora_fits.out" | sed 's/^/REMARK /'
    echo "REMARK the card shows $(cat "$tmp/card") GiB"
    awk -v most="${size%G}" '{ exit !($1 > 1 && $1 <= most) }' "$tmp/card"
}
