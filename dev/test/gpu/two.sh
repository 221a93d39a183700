#!/bin/sh
# two.sh FOLDER as-one|zero-bits|on-host [FLAGS...] -- for test_gpu_faults.sh: FOLDER/train_llama3cu on two GPUs, with FLAGS. Run
# from the project's root.
#   as-one     Built for FP32, it trains on two GPUs as on one, in two micro-batches or one on each GPU: loss and norm of the first
#              step, and the losses of all 20 steps. The run on one GPU leaves out --seq-parallel 2. FOLDER/tokenize writes the
#              data, documents of 40 to 220 words.
#   zero-bits  It has the same bits with ZeRO 1, 2 and 3. One case has one micro-batch a step, which computes for longer than
#              blocks travel. Another (ZeRO 2 and 3) has four small micro-batches, also with a slow exchange.
#   on-host    On one GPU, or an emulated one, it has the same bits with each --offload: two micro-batches, then Muon. The copies
#              to the emulated host are late.
. dev/test/lib.sh
folder=$1 job=$2
shift 2
flags=$* alone=$(echo " $* " | sed 's/ --seq-parallel 2 / /')

# run OUT FLAGS...
run() {
    run_out=$tmp/$1
    shift
    ends_well "$folder/train_llama3cu" $common --train "$tmp/data.bin" --lr 1e-3 --sample-tokens 0 --out "$run_out" "$@"
}
# same A B: the two checkpoints have the same bits
same() {
    for file in model state_rank00000 state_rank00001; do
        [ $file$job != state_rank00001on-host ] || continue
        cmp "$tmp/$1/step_00000006/$file.safetensors" "$tmp/$2/step_00000006/$file.safetensors" || return 1
    done
}
on_host() { # a run that ends as not finite has other bits
    (run host "$@") && { same card host && return || return 1; }
    grep -q "is not finite" "$tmp/log" && return 1
    exit 3
}
if [ "$job" = as-one ]; then
    awk 'BEGIN {
        for (d = 0; d < 200; d++) {
            text = ""
            for (i = 0; i < 40 + d % 7 * 30; i++) { s = (s * 171 + 11213) % 53125; text = text " w" s % 90 }
            print "{\"text\": \"" text "\"}"
        }
    }' >"$tmp/text.jsonl"
    ends_well "$folder/tokenize" -o "$tmp/data.bin" "$tmp/text.jsonl"
    common="--model d6 --seq 512 --batch 2 --total-batch 2048 --steps 20 --warmup 5 --val-every 0"
    run two --gpus 2 $flags
    run one $alone
    check "two GPUs train as one" close_steps 1e-6 1e-4 "$tmp/one" "$tmp/two"
elif [ "$job" = on-host ]; then
    echo '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
        "num_attention_heads": 2, "num_hidden_layers": 5, "vocab_size": 64, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "tie_word_embeddings": false}' >"$tmp/small.json"
    mkdir "$tmp/model" && ends_well "$folder/build/copy" random "$tmp/small.json" "$tmp/model" && token_file "$tmp/data.bin" 6000 64
    export EMULATOR_LATE=1 EMULATOR_SEED=1
    common="--model $tmp/model --seq 32 --batch 2 --steps 6 --grad-clip 0.01 --master split --moments bf16 $flags"
    for rule in "adamw --total-batch 128" muon; do
        run card --optimizer $rule
        for place in optimizer gradients weights; do
            check "--offload $place, $rule: the bits of off" on_host --optimizer $rule --offload $place
            rm -r "$tmp/host" && EMULATOR_SEED=$((EMULATOR_SEED + 1))
        done
        rm -r "$tmp/card"
    done
else
    token_file "$tmp/data.bin" 20000 97
    common="--gpus 2 --model d7 --seq 64 --steps 6 --grad-clip 0.01 $flags"
    run one --seq 1024 --batch 4
    for zero in 2 3; do run one$zero --seq 1024 --batch 4 --zero $zero && check "ZeRO $zero has the bits of 1" same one one$zero; done
    run two --batch 1 --total-batch 512 --zero 2 --no-graph
    run three --batch 1 --total-batch 512 --zero 3
    check "ZeRO 3 has the bits of 2, in four micro-batches" same two three
    export NCCL_P2P_DISABLE=1 NCCL_PROTO=Simple
    for zero in 2 3; do run slow$zero --batch 1 --total-batch 512 --zero $zero && check "ZeRO $zero has its bits where what travels is slow" same two slow$zero; done
fi
summary
