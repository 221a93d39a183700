#!/bin/sh
# test_emulated_runs.sh [one|two|shared] -- tests train_llama3cu on emulated cards (dev/test/emulator) against the CPU trainer and
# against itself: in other orders, with and without graphs, recomputed, resumed. `one` card, `two` and more, cards that have
# `shared` rows, or all. Runs have 4 steps, with FULL=1 20. `make test-emulated` builds the programs and runs this.
#
# Every run has its own number. From this number the emulator draws the order of works and threads that the program leaves
# unordered. So "the same bits" says that no bit depends on this order. Memory starts as NaN.
. dev/test/lib.sh
. dev/test/gpu/trainer.sh
emulated=$root/build/emulated run=0

# A small model: rows of 32 tokens, two key heads for --seq-parallel, and enough blocks to take turns in all rings.
mkdir -p "$tmp/model" && cat >"$tmp/model.json" <<'END'
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "head_dim": 32,
 "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 5, "vocab_size": 64, "max_position_embeddings": 256,
 "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false, "hidden_act": "silu"}
END
"$bin/build/copy" random "$tmp/model.json" "$tmp/model" && token_file "$tmp/rows.bin" 6000 64 || exit 1

# One with wide layers: at 256 tokens, SwiGLU and RoPE have enough tiles to be joined with the products before them.
mkdir -p "$tmp/wide" && sed 's/"intermediate_size": 96/"intermediate_size": 512/; s/"head_dim": 32/"head_dim": 64/
    s/"num_attention_heads": 2/"num_attention_heads": 4/; s/"num_hidden_layers": 5/"num_hidden_layers": 2/' "$tmp/model.json" \
    >"$tmp/wide.json" && "$bin/build/copy" random "$tmp/wide.json" "$tmp/wide" || exit 1
wide="--model $tmp/wide --batch 8 --steps 2"
steps=$([ "${FULL:-0}" = 1 ] && echo 20 || echo 4)
half=$((steps / 2)) quarter=$((steps / 4))
flags="--model $tmp/model --train $tmp/rows.bin --seq 32 --batch 2 --steps $steps --lr 3e-3 --warmup 5 --sample-tokens 0 --val-every 0"

# cu PRECISION OUT FLAGS...: a run; with --resume in FLAGS, which come last, it continues
cu() {
    cu_program=$emulated/$1_90/train_llama3cu cu_out=$tmp/$2 run=$((run + 1))
    shift 2
    case " $* " in *" --resume "*) set -- --sample-tokens 0 "$@" ;; *) set -- $flags "$@" ;; esac
    EMULATOR_LATE=${late:-0} EMULATOR_SEED=$run LD_LIBRARY_PATH=$emulated timeout "${LIMIT:-300}" "$cu_program" "$@" --out "$cu_out"
}

step() { printf 'step_%08d' "$1"; } # the name of the checkpoint after a step

# same_bits A B [STEP]: two runs have the same weights and state
same_bits() {
    sb=$(step "${3:-$steps}")
    for sb_file in "$tmp/$1/$sb"/*.safetensors; do cmp "$sb_file" "$tmp/$2/$sb/$(basename "$sb_file")" || return 1; done
}

like_the_cpu() { # like_the_cpu NAME FLAGS...: the losses of the CPU trainer, in FP32
    l_name=$1
    shift
    cu FP32 "$l_name" "$@" && "$bin/train_llama3" $flags "$@" --out "$tmp/cpu_$l_name" &&
        close_losses 1e-5 "$tmp/$l_name/log.jsonl" "$tmp/cpu_$l_name/log.jsonl"
}

repeats() { # repeats NAME FLAGS...: the same bits in another order, without a graph, recomputed, and stopped and resumed
    r=$1
    shift
    cu BF16 "$r" "$@" && cu BF16 "${r}_again" "$@" && same_bits "$r" "${r}_again" &&
        cu BF16 "${r}_eager" "$@" --no-graph && same_bits "$r" "${r}_eager" &&
        cu BF16 "${r}_block" "$@" --recompute block && same_bits "$r" "${r}_block" &&
        cu BF16 "${r}_parts" "$@" --stop-after $half && cu BF16 "${r}_parts" --resume "$@" && same_bits "$r" "${r}_parts"
}

by_blocks() { # by_blocks NAME FLAGS...: the same bits when some blocks recompute, and when others do after the run was resumed
    b=$1
    shift
    cu BF16 "$b" "$@" && cu BF16 "${b}_some" "$@" --recompute ffn:2 --stop-after $half &&
        cu BF16 "${b}_some" "$@" --resume --recompute norm+swiglu,block:3 && same_bits "$b" "${b}_some"
}

blocks_are_counted() { # of norms, products gate and up, and attentions, a step takes so many. The last block never recomputes
    while read -r value norms gate_up attentions; do
        cu BF16 profiled --profile 1 --recompute "$value" >"$tmp/profile" </dev/null || return 1
        for operation in "rmsnorm $norms" "gate up $gate_up" "attention $attentions"; do
            grep -q "^${operation% *}  *${operation##* }  " "$tmp/profile" || { echo "$value: not $operation" && return 1; }
        done
    done <<'END'
none 11 5 5
norm+swiglu 19 5 5
ffn:2 15 7 5
norm+swiglu:3,ffn:2,block:1 17 7 6
norm+swiglu,block:3 19 8 8
block:5 19 9 9
END
}

# With shared rows each block exchanges q, k and v, attention's output, and the gradients of both. Backward exchanges the output
# once more, unless the block's attention ran last. A block that recomputes exchanges q, k, v and the output again.
exchanges_are_counted() {
    while read -r value exchanges; do
        cu BF16 profiled --gpus 2 --seq-parallel 2 --profile 1 --recompute "$value" >"$tmp/profile" </dev/null || return 1
        grep -q "^exchange of heads  *$exchanges  " "$tmp/profile" || { echo "$value: not $exchanges" && return 1; }
    done <<'END'
none 24
block:1 25
block 28
END
}

# The norm of the last block overflows. It is named, and not a block that shares its buffers with the last one.
ruined_block_is_named() {
    cp -r "$tmp/model" "$tmp/ruined" &&
        overwrite "$tmp/ruined/model.safetensors" model.layers.4.input_layernorm.weight 0 '\000\000\177\177' 64 || return 1
    for value in none norm+swiglu ffn:1 block; do
        cu BF16 ruin --model "$tmp/ruined" --steps 1 --recompute $value 2>"$tmp/errors" && echo "$value: status 0" && return 1
        grep "first in q, k, v of layer 4," "$tmp/errors" && rm -r "$tmp/ruin" || { cat "$tmp/errors" && return 1; }
    done
}

documents_by_blocks() { # rows hold documents
    words=$(sed 's/.*/{"text": "&"}/' "$root/README.md" | tr -d '\\`\t' | grep '^{"text": "[^"]*"}$' | head -150) &&
        echo "$words" >"$tmp/words.jsonl" && "$bin/tokenize" -o "$tmp/words.bin" "$tmp/words.jsonl" &&
        by_blocks documents --model d3 --train "$tmp/words.bin" --documents mask
}

# --recompute auto takes what fits into the room, the table says what the run then holds, and with more room the resumed run
# takes less: the same bits. The checkpoint keeps the flag, the log what it stood for.
auto_chooses() {
    large="--seq 256 --batch 8 --steps 2"
    cu BF16 large $large && cu BF16 auto $large --recompute auto --max-memory 70M --stop-after 1 >"$tmp/auto.out" &&
        grep -x "memory  --recompute auto takes ffn,block:3" "$tmp/auto.out" && grep "^memory  need  *70.0 MiB of 70.0 MiB$" "$tmp/auto.out" &&
        grep "peak memory 70.0 MiB" "$tmp/auto.out" && grep '"recompute":"auto"' "$tmp/auto/step_00000001/trainer_state.json" || return 1
    cu BF16 auto --resume --max-memory 76M >"$tmp/auto.out" && grep -x "memory  --recompute auto takes norm+swiglu,ffn:1" "$tmp/auto.out" &&
        [ "$(sed -n 's/.*"recompute":"\([^"]*\)".*/\1/p' "$tmp/auto/log.jsonl" | tr '\n' ' ')" = "ffn,block:3 norm+swiglu,ffn:1 " ] &&
        same_bits large auto 2
}

# Two cards of one host, of which the second has less room: both take what fits there.
cards_agree() {
    narrow="--seq 256 --batch 4 --steps 1" port=$((20000 + $$ % 10000))
    cu BF16 agreed $narrow --gpus 2 || return 1
    for rank in 0 1; do
        EMULATOR_MIB=$((8192 - 7156 * rank)) RANK=$rank WORLD_SIZE=2 LOCAL_RANK=$rank LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
            LD_LIBRARY_PATH=$emulated timeout 300 "$emulated/BF16_90/train_llama3cu" $flags $narrow --recompute auto --out "$tmp/agreeing" \
            >"$tmp/rank$rank.out" 2>&1 &
    done
    wait
    cat "$tmp"/rank?.out
    grep -x "memory  --recompute auto takes norm+swiglu,ffn:1 with --zero 1" "$tmp/rank0.out" && same_bits agreed agreeing 1
}

zeros_repeat() { # zeros_repeat NAME "ZEROS" FLAGS...: the same bits however two cards share the model
    z=$1 zeros=$2
    shift 2
    for zero in $zeros; do cu BF16 "${z}_$zero" --gpus 2 --zero "$zero" "$@" || return 1; done
    for zero in $zeros; do same_bits "${z}_${zeros%% *}" "${z}_$zero" || return 1; done
}

two_are_one() { # two_are_one NAME FLAGS...: two cards have the losses of one, in FP32
    t=$1
    shift
    cu FP32 "one_$t" --total-batch 128 && cu FP32 "two_$t" --total-batch 128 --gpus 2 "$@" &&
        close_steps 1e-6 1e-4 "$tmp/one_$t" "$tmp/two_$t" $steps
}

# has_joined NAMES FLAGS...: the wide model's operations with "swiglu" or "rope" in their names are NAMES
has_joined() {
    h=$1
    shift
    cu BF16 profiled $wide --steps 1 --profile 1 "$@" >"$tmp/profile" || return 1
    awk -F '  +' '$2 == "kernel" { exit } $1 ~ /swiglu|rope/ { print $1 }' "$tmp/profile" | sort | tr '\n' ',' | grep -x "$h"
}

layers_join() { # in the epilogue of the products before them: the same bits however often they are computed, and in any order
    has_joined "down dx swiglu,gate up swiglu,qkv rope," && cu BF16 joined $wide || return 1
    for change in --no-graph "--recompute norm+swiglu" "--recompute ffn" "--recompute block"; do
        cu BF16 joined_too $wide $change && same_bits joined joined_too 2 && rm -r "$tmp/joined_too" || return 1
    done
}

# The limits of both: in a sound build first losses and norms are 3e-5 apart, and losses 6e-6. With dgate and dup exchanged they
# are 7e-4 and 2e-4 apart.
# micro-batches too small to join, adapters and 8 bits leave SwiGLU and RoPE separate, with nearly the same losses
layers_are_apart() {
    cu BF16 apart $wide --batch 4 --total-batch 256 && close_steps 3e-4 1e-4 "$tmp/joined" "$tmp/apart" 2 &&
        for flag in "--batch 4" "--lora 4" --fp8; do has_joined "rope,swiglu,swiglu backward," $flag || return 1; done
}

layers_join_on_two_cards() {
    cu BF16 joined_one $wide --total-batch 512 || return 1
    for zero in 1 3; do
        cu BF16 "joined_$zero" $wide --gpus 2 --zero $zero && close_steps 3e-4 1e-4 "$tmp/joined_one" "$tmp/joined_$zero" 2 || return 1
    done
    same_bits joined_1 joined_3 2
}

# goes_on_elsewhere NAME "CARDS" FLAGS...: a quarter of the steps each on so many cards: as one card alone, the run NAME_one
goes_on_elsewhere() {
    g=$1 cards=$2 stop=0 again=
    shift 2
    [ -d "$tmp/${g}_one" ] || cu FP32 "${g}_one" "$@" || return 1
    for n in $cards; do
        stop=$((stop + quarter))
        cu FP32 "${g}_moved" $again "$@" --gpus $n --zero $((n % 3 + 1)) --stop-after $stop || return 1
        again=--resume
    done
    close_steps 1e-6 1e-4 "$tmp/${g}_one" "$tmp/${g}_moved" $steps
}

# moves NAME MOST FLAGS...: what lies on the host, up to MOST, has the bits of a run on the card, also where a resumed run finds it
# elsewhere, and where copies to the host are late, so that a checkpoint has to wait for them
moves() {
    m=$1 most=$2
    shift 2
    cu BF16 "$m" "$@" && late=1 && cu BF16 "${m}_host" "$@" --offload $most && late=0 && same_bits "$m" "${m}_host" &&
        cu BF16 "${m}_parts" "$@" --offload $most --stop-after $half &&
        cu BF16 "${m}_parts" --resume --strict-resume "$@" --offload off --stop-after $((half + quarter)) &&
        cu BF16 "${m}_parts" --resume --strict-resume "$@" --offload optimizer && same_bits "$m" "${m}_parts"
}

# The adapters of two blocks have fewer pieces than there are windows. There a step's first copies would overtake the last ones of
# the step before.
moves_once() {
    while read -r moved flags_of; do
        cu BF16 stays $flags_of </dev/null && cu BF16 moved_out $flags_of --offload $moved </dev/null && same_bits stays moved_out &&
            rm -r "$tmp/stays" "$tmp/moved_out" || return 1
    done <<END
optimizer --model $tmp/wide --lora 1 --lora-on qkvo --moments bf16
optimizer --gpus 3 $muon
gradients --master none --moments bf16 --fp8 --total-batch 384 --recompute block
weights $muon --fp8 --fp8-head --master split --moments bf16 --grad-clip 0.1
END
}

# Their copies lie in the place of the weights, or are made of gathered blocks: the same bits and samples. --eval computes as the
# last validation.
adapters_in_8_bits() {
    eights="--lora 4 --fp8 --moments bf16 --sample-tokens 9 --val $tmp/rows.bin --val-batches 2"
    for moved in off weights; do cu BF16 eights_$moved $eights --offload $moved >"$tmp/eights_$moved.out" || return 1; done
    for moved in off weights; do grep '^sample ' "$tmp/eights_$moved.out" >"$tmp/sample_$moved"; done
    [ -s "$tmp/sample_off" ] && cmp "$tmp/sample_off" "$tmp/sample_weights" && same_bits eights_off eights_weights || return 1
    LD_LIBRARY_PATH=$emulated "$emulated/BF16_90/train_llama3cu" --eval --fp8 --model "$tmp/eights_off" --val "$tmp/rows.bin" --val-batches 2 --batch 2 --seq 32 >"$tmp/eights_eval" &&
        grep "^loss $(sed -n 's/.*"event":"val".*"loss":\([0-9.]*\).*/\1/p' "$tmp/eights_off/log.jsonl" | tail -n 1 | xargs printf '%.6f') " "$tmp/eights_eval"
}

pinned_in_vain() { # one line names the limits and the flags that help
    ! EMULATOR_PINNED_MIB=1 cu BF16 unpinned --offload optimizer 2>"$tmp/errors" && cat "$tmp/errors" &&
        grep "^error: out of main memory: could not pin 2.0 MiB for master: .*; ulimit -l is .*, free for this process are " "$tmp/errors" &&
        grep "^  hint: --master split and --moments bf16 need less" "$tmp/errors"
}

# killed at any moment, each time resumed with the state in a place that is drawn: as a run that never stopped
killed_and_moved() {
    EMULATOR_SEED=1 LD_LIBRARY_PATH=$emulated BIN=$bin python3 dev/test/crash/walk.py --kills 5 --jobs 1 \
        --trainer "$emulated/BF16_90/train_llama3cu"
}

# branches NAME "MORE": a run that decays from a checkpoint in another folder, with flags MORE, and is resumed without them, has
# the bits of the run that planned this decay
branches() {
    held="--total-batch 128 --schedule constant --warmup 1" last=$((half + quarter))
    cu BF16 "trunk$1" $held --stop-after $half && cu BF16 "plan$1" $held --decay $half --stop-after $half || return 1
    cu BF16 "plan$1" --resume $2 --stop-after $last && cu BF16 "plan$1" --resume || return 1
    cu BF16 "tail$1" --resume "$tmp/trunk$1/$(step $half)" --decay $half $2 --stop-after $last >"$tmp/branch" &&
        grep -x "branch  step $half: the rate falls from 0.003 to 0.0003 in $half steps" "$tmp/branch" &&
        cu BF16 "tail$1" --resume && same_bits "plan$1" "tail$1"
}

# Muon takes whole matrices: a matrix that was cut, or joined with another, would show.
muon="--optimizer muon"
masters_are_alike() { # masters in fp32 and in halves have the same bits
    for kind in fp32 split; do cu BF16 "muon_$kind" $muon --master $kind --total-batch 128 || return 1; done
    cmp "$tmp/muon_fp32/$(step $steps)/model.safetensors" "$tmp/muon_split/$(step $steps)/model.safetensors"
}

whole_on_several() {
    cu FP32 whole_one --total-batch 384 $muon || return 1
    for n in 2 3; do
        cu FP32 whole_$n $muon --total-batch 384 --gpus $n --zero $n && close_steps 1e-6 1e-4 "$tmp/whole_one" "$tmp/whole_$n" $steps || return 1
    done
    zeros_repeat whole_zeros "1 2" $muon && zeros_repeat whole_none "1 3" $muon $none && { [ "${FULL:-0}" = 0 ] || repeats whole_two --gpus 2 $muon; }
}

whole_moves() {
    goes_on_elsewhere whole "1 3 2 1" $muon --total-batch 384 || return 1
    ! cu FP32 whole_moved --resume --gpus 2 --steps 20 --optimizer adamw 2>"$tmp/errors" &&
        grep "its state is of the optimizer muon, but this run's is adamw" "$tmp/errors"
}

# A plan file with other choices than the heuristic's, and with a field that older versions wrote, gives other bits. The
# checkpoint carries the choices to a run that has no plan file.
plans_are_kept() {
    cu BF16 own_plan && other_choices "$tmp/own_plan/$(step $steps)/matmul_plan.json" "$tmp/other.json" &&
        sed 's/"algo"/"us": 12.25, &/' "$tmp/other.json" >"$tmp/older.json" &&
        cu BF16 planned --plan "$tmp/older.json" --checkpoint-every $half && ! same_bits own_plan planned >"$tmp/differ" &&
        cmp "$tmp/other.json" "$tmp/planned/$(step $half)/matmul_plan.json" && mkdir "$tmp/planned_on" &&
        cp -r "$tmp/planned/$(step $half)" "$tmp/planned_on" && cu BF16 planned_on --resume && same_bits planned planned_on
}

# The limit: at this learning rate most steps are smaller than a unit of their weight. Over 20 steps, in which the loss falls by
# 1.04, the losses are at most 3.2e-3 apart; with weights rounded to nearest, 2.6e-2.
none="--master none --moments bf16"
no_master_is_near() { # no_master_is_near NAME FLAGS...: losses are near the losses with fp32 master weights
    near=$1
    shift
    token_file "$tmp/few.bin" 6000 4
    few="--train $tmp/few.bin --lr 3e-4 --warmup 0 --schedule constant --steps 20"
    cu BF16 "with_$near" $few "$@" && cu BF16 "without_$near" $few $none "$@" &&
        close_losses 6e-3 "$tmp/with_$near/log.jsonl" "$tmp/without_$near/log.jsonl"
}

# goes_on FROM TO STEP FLAGS...: a copy of run FROM, named TO, continues to STEP
goes_on() {
    g_from=$1 g_to=$2 g_stop=$3
    shift 3
    cp -r "$tmp/$g_from" "$tmp/$g_to" && cu BF16 "$g_to" --resume --stop-after "$g_stop" "$@" >"$tmp/$g_to.out"
}

rounded="are now rounded to bfloat16"
masters_change() { # the state holds no master; all weights become exact masters, which are rounded once, as a line says
    cu BF16 none_half $none --stop-after $half && "$bin/train_llama3" --verify "$tmp/none_half" || return 1
    ! grep -q '"master\.' "$tmp/none_half/$(step $half)/state_rank00000.safetensors" || return 1
    for kind in fp32 split; do goes_on none_half "to_$kind" $((half + quarter)) --master $kind || return 1; done
    same_bits to_fp32 to_split $((half + quarter)) && grep -q '"master\.' "$tmp/to_split/$(step $((half + quarter)))/state_rank00000.safetensors" || return 1
    for kind in fp32 split; do goes_on "to_$kind" "from_$kind" $steps --master none && grep -q "$rounded" "$tmp/from_$kind.out" || return 1; done
    same_bits from_fp32 from_split && goes_on none_half none_end $steps && ! grep "$rounded" "$tmp/none_end.out" || return 1
    cp -r "$tmp/none_half" "$tmp/precise" && cu FP32 precise --resume --stop-after $((half + 1)) && "$bin/train_llama3" --verify "$tmp/precise" &&
        grep -q '"master\.' "$tmp/precise/$(step $((half + 1)))/state_rank00000.safetensors" && cu BF16 precise --resume | grep -q "$rounded"
}

weights_are_saved_as() { # in any dtype: F32 holds the exact weights; beside F16 the state holds the exact ones
    cu BF16 none_f32 $none --export-dtype f32 --stop-after $half && cu BF16 none_f16 $none --export-dtype f16 --stop-after $half || return 1
    for dtype in f32 f16; do
        "$bin/train_llama3" --verify "$tmp/none_$dtype" && goes_on "none_$dtype" "${dtype}_to_bf16" $steps --export-dtype bf16 &&
            ! grep "$rounded" "$tmp/${dtype}_to_bf16.out" && same_bits none_end "${dtype}_to_bf16" || return 1
    done
    cp -r "$tmp/none_half" "$tmp/none_cpu" && "$bin/train_llama3" --resume --sample-tokens 0 --stop-after $((half + 1)) --out "$tmp/none_cpu"
}

in_full() { # in_full NAME COMMAND...: a test whose parts others test together. FULL=1 (make test-full) runs it
    if [ "${FULL:-0}" = 1 ]; then check "$@"; else skip "$1" "FULL=1 runs it"; fi
}

one_card() {
    check "the CPU trainer's losses" like_the_cpu plain
    check "the CPU trainer's losses, two micro-batches" like_the_cpu micro --total-batch 128
    check "the CPU trainer's losses, adapters" like_the_cpu lora --lora 4
    check "the same bits in any order, without a graph, recomputed, resumed" repeats plain16
    in_full "the same bits in any order ..., --fp8" repeats fp8 --fp8
    check "the same bits in any order ..., --fp8-head" repeats fp8_head --fp8 --fp8-head
    check "plans of an older version are read, and travel with the checkpoint: the same bits" plans_are_kept
    check "no master weights: losses are near those of fp32 masters" no_master_is_near masters
    in_full "no master weights: the same bits in any order, without a graph, recomputed, resumed" repeats none16 $none
    in_full "no master weights: the same bits in any order ..., fp32 moments, --fp8" repeats none_fp8 --master none --fp8
    in_full "no master weights: the same bits in any order ..., adapters beside 8 bits" repeats none_lora $none --lora 4 --fp8
    check "no master weights, and fp32 and split ones: a run goes on as another" masters_change
    check "no master weights: saved in any dtype, the same bits; the CPU trainer goes on" weights_are_saved_as
    check "Muon: the CPU trainer's losses" like_the_cpu muon $muon
    check "Muon: the same bits in any order, without a graph, recomputed, resumed" repeats muon16 $muon --total-batch 128
    check "Muon, no master weights, --fp8: the same bits in any order ..." repeats muon_none $muon $none --fp8
    check "Muon: master weights in fp32 and split have the same bits" masters_are_alike
    check "state, gradients and weights on the host, moved at resumes, two micro-batches: the same bits" moves host weights --total-batch 128 --master split --moments bf16
    check "state, gradients and weights on the host or the card, killed and moved: the same bits" killed_and_moved
    check "state on the host that cannot be pinned: one line says what limits it" pinned_in_vain
    check "on the host: adapters, Muon, 8 bits without masters, six micro-batches: the same bits" moves_once
    check "as many blocks recompute as --recompute says" blocks_are_counted
    check "what is not finite is named in its block, whatever recomputes" ruined_block_is_named
    check "some blocks recompute, and others after a resume: the same bits, two micro-batches" by_blocks blocks --total-batch 128
    check "some blocks recompute ...: the same bits, adapters beside 8 bits" by_blocks blocks_lora --lora 4 --fp8
    check "adapters beside 8 bits, in the place of the weights or gathered: the same bits, samples and validation" adapters_in_8_bits
    check "some blocks recompute ...: the same bits, documents" documents_by_blocks
    in_full "some blocks recompute ...: the same bits, --fp8" by_blocks blocks_fp8 --fp8
    check "--recompute auto takes what fits, and chooses anew: the same bits" auto_chooses
    check "a run that branches off to decay has the bits of one that planned it" branches one ""
    check "SwiGLU and RoPE join the products before them: the same bits in any order, without a graph, recomputed" layers_join
    check "SwiGLU and RoPE apart from them: nearly the same losses; adapters and 8 bits keep them apart" layers_are_apart
}

two_cards() {
    check "two cards have the losses of one" two_are_one plain
    check "two cards have the losses of one, ZeRO 3" two_are_one zero3 --zero 3
    check "two cards, ZeRO 1, 2 and 3: the same bits" zeros_repeat zeros "1 2 3"
    check "two cards, ZeRO 2 and 3, two micro-batches: the same bits" zeros_repeat zeros_micro "2 3" --total-batch 256
    in_full "two cards, ZeRO 1, 2 and 3, adapters beside 8 bits: the same bits" zeros_repeat zeros_fp8 "1 2 3" --lora 4 --fp8 --fp8-head
    in_full "two cards, ZeRO 1, 2 and 3, no master weights: the same bits" zeros_repeat zeros_none "1 2 3" $none
    check "two cards, ZeRO 1, 2 and 3, no master weights, --fp8 with the head: the same bits" zeros_repeat zeros_none_fp8 "1 2 3" $none --fp8 --fp8-head
    check "two cards, ZeRO 3, some blocks recompute, and others after a resume: the same bits" by_blocks blocks_zero --gpus 2 --zero 3
    check "two cards, ZeRO 3, state on the host: the same bits" moves host_zero optimizer --gpus 2 --zero 3 --moments bf16
    check "two cards, of which one has less room, agree on --recompute auto: the same bits" cards_agree
    in_full "two cards, SwiGLU and RoPE join: nearly the losses of one, ZeRO 1 and 3 with the same bits" layers_join_on_two_cards
    check "a run goes on on two, one, four and two cards" goes_on_elsewhere alone "2 1 4 2" --total-batch 256
    check "one, two and one card: a run that branches off to decay has the bits of one that planned it" branches two "--gpus 2"
    check "two and three cards, Muon: the losses of one; ZeRO 1, 2 and 3, and any order: the same bits" whole_on_several
    in_full "two cards, Muon, no master weights: losses are near those of fp32 masters" no_master_is_near muon --gpus 2 $muon
    check "one, three, two and one card, Muon: the losses of one; AdamW refuses its state" whole_moves
}

shared_rows() {
    check "two cards share rows with the losses of one" two_are_one shared --seq-parallel 2
    check "four cards in two groups share rows with the losses of one" two_are_one groups --seq-parallel 2 --gpus 4
    check "two cards share rows: the same bits in any order, without a graph, recomputed, resumed" repeats shared16 --gpus 2 --seq-parallel 2
    check "two cards share rows: the same bits in any order ..., --fp8 with the head" repeats shared_fp8 --gpus 2 --seq-parallel 2 --fp8 --fp8-head
    check "two cards share rows: no output is exchanged that is still there" exchanges_are_counted
    check "two cards share rows, some blocks recompute ...: the same bits" by_blocks blocks_shared --gpus 2 --seq-parallel 2
}

case ${1:-} in
one) one_card ;;
two) two_cards ;;
shared) shared_rows ;;
*) one_card; two_cards; shared_rows ;;
esac
summary
