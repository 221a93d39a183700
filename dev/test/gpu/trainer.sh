# trainer.sh -- tests of test_gpu.sh: ./train_llama3cu against the CPU trainer, against itself, killed, resumed, with bad input.

losses_of() { sed -n 's/.*"event":"step","step":\([0-9]*\),"loss":\([^,]*\),.*/\1 \2/p' "$1"; }

# close_losses LIMIT A B: two logs have the same steps, with losses at most LIMIT apart
close_losses() {
    cl=$(mktemp -d "$tmp/losses_XXXXXX") # lanes run side by side
    losses_of "$2" >"$cl/a" && losses_of "$3" >"$cl/b"
    paste -d ' ' "$cl/a" "$cl/b" | awk -v limit="$1" '
        $1 != $3 || !($2 - $4 <= limit && $4 - $2 <= limit) { bad++; print "FAIL step " $1 ": " $2 " and " $4 }
        { d = $2 > $4 ? $2 - $4 : $4 - $2; if (d > worst) { worst = d } }
        END { printf "REMARK %d steps, %.1e apart\n", NR, worst; exit bad > 0 || NR == 0 }'
}

# same_end A B STEP: the checkpoints of two runs have the same weights and state, bit for bit
same_end() {
    se=$(printf 'step_%08d' "$3")
    cmp "$1/$se/model.safetensors" "$2/$se/model.safetensors" && cmp "$1/$se/state_rank00000.safetensors" "$2/$se/state_rank00000.safetensors"
}

cpu_and_gpu_train_alike() {
    flags="--model d3 --train $tmp/data_train.bin --batch 4 --seq 256 --steps 20 --lr 1e-3 --warmup 5"
    cu fp32 $flags --out "$tmp/alike_gpu" && limit 100 "$bin/train_llama3" --sample-tokens 0 $flags --out "$tmp/alike_cpu" &&
        close_losses 1e-4 "$tmp/alike_gpu/log.jsonl" "$tmp/alike_cpu/log.jsonl"
}

# sources_of LOG: prints each step's losses by source, a line each
sources_of() { sed -n 's/.*"event":"step","step":\([0-9]*\),.*"sources":\[\([^]]*\)\].*/\1,\2/p' "$1" | awk -F, '{ for (i = 2; i <= NF; i++) { print $1 "." i " " $i } }'; }

# The rate is 3e-4. At 1e-3 the run would be no measure: the gradient's norm jumps from 2 to 63 at step 10, in
# PyTorch's fp64 as well, and magnifies roundings of the weights. There three builds of the CPU trainer and PyTorch's fp32 are
# up to 8e-5 apart, and 2e-5 to 5e-5 off fp64. At 3e-4 two builds are 3e-8 apart, and the limit is 1e-5. Gradients
# of the second micro-batch that are 1 % too small make 4e-5.
a_mix_trains_alike() {
    flags="--model d3 --train $tmp/data_train.bin:0.7,$tmp/data_val.bin:0.3 --batch 4 --seq 256 --total-batch 2048 --steps 20 --lr 3e-4 --warmup 5"
    cu fp32 $flags --out "$tmp/mix_gpu" && limit 100 "$bin/train_llama3" --sample-tokens 0 $flags --out "$tmp/mix_cpu" &&
        close_losses 1e-5 "$tmp/mix_gpu/log.jsonl" "$tmp/mix_cpu/log.jsonl" || return 1
    for on in gpu cpu; do sources_of "$tmp/mix_$on/log.jsonl" >"$tmp/sources_$on"; done
    paste -d ' ' "$tmp/sources_gpu" "$tmp/sources_cpu" | awk '
        $1 != $3 || ($2 == "null") != ($4 == "null") || $2 - $4 > 1e-5 || $4 - $2 > 1e-5 { bad++; print "FAIL step and source " $1 ": " $2 " and " $4 }
        END { exit bad > 0 || NR != 40 }'
}

# masked_copy FROM TO: a token file of two bytes a token with a mask: of each 8 tokens, 3 are trained
masked_copy() {
    mc_mask=$((($(wc -c <"$1") - 1024 + 15) / 16))
    { head -c 4 "$1" && printf '\002\000\000\000' && head -c 32 "$1" | tail -c 24 && head -c 8 /dev/zero && tail -c +41 "$1" &&
        head -c "$mc_mask" /dev/zero | tr '\000' '\025'; } >"$2"
}

# documents_written DIR: token files of documents, a line of the text each: documents.bin and, with a mask, masked.bin
documents_written() {
    mkdir -p "$1"
    sed -n '/./ { s/[\\"]/\\&/g; s/.*/{"text": "&"}/p; }' "$text" | tr '\t' ' ' >"$1/documents.jsonl"
    "$bin/tokenize" -o "$1/documents.bin" "$1/documents.jsonl" >/dev/null && masked_copy "$1/documents.bin" "$1/masked.bin"
}

# Rows of documents, with and without a mask, in micro-batches whose trained targets differ in number. The rate is 3e-4,
# as in a_mix_trains_alike(). At 1e-3, words in place of a text make the gradient's norm jump from 5 to 77, and two
# builds of the CPU trainer are 4e-5 apart. At 3e-4 the norm never exceeds 12, and the two builds are 2e-7 apart.
# Gradients of the second micro-batch that are 1 % too small make 1e-4.
documents_train_alike() {
    documents_written "$tmp" || return 1
    for data in documents masked; do
        for mode in cross pack mask; do
            d=$tmp/documents_${data}_$mode
            flags="--model d3 --train $tmp/$data.bin --val $tmp/$data.bin --val-batches 2 --documents $mode --batch 2 --seq 128
                   --total-batch 512 --steps 20 --lr 3e-4 --warmup 5 --val-every 5"
            cu fp32 $flags --out "${d}_gpu" && limit 100 "$bin/train_llama3" --sample-tokens 0 $flags --out "${d}_cpu" &&
                close_losses 1e-5 "${d}_gpu/log.jsonl" "${d}_cpu/log.jsonl" || return 1
            for on in gpu cpu; do grep '"event":"val"' "${d}_$on/log.jsonl" | sed 's/"val"/"step"/' >"$tmp/val_$on"; done
            close_losses 1e-5 "$tmp/val_gpu" "$tmp/val_cpu" || return 1
            for on in gpu cpu; do sed -n 's/.*"trained":\([0-9]*\).*/\1/p' "${d}_$on/log.jsonl" >"$tmp/trained_$on"; done
            cmp "$tmp/trained_gpu" "$tmp/trained_cpu" || return 1
        done
    done
}

# starts from a folder that PyTorch wrote: grouped heads, RoPE scaling, an untied head
a_folder_trains_alike() {
    token_file "$tmp/folder.bin" 20000 97
    flags="--model $pairs/gqa2_untied_rope8 --train $tmp/folder.bin --batch 2 --seq 32 --steps 20 --lr 1e-3 --warmup 5"
    cu fp32 $flags --out "$tmp/folder_gpu" && limit 100 "$bin/train_llama3" --sample-tokens 0 $flags --out "$tmp/folder_cpu" &&
        close_losses 1e-4 "$tmp/folder_gpu/log.jsonl" "$tmp/folder_cpu/log.jsonl"
}

tf32_is_near() {
    for flag in "" --tf32; do
        cu fp32 $flag --model d3 --train "$tmp/data_train.bin" --batch 4 --seq 256 --steps 5 --lr 1e-3 --out "$tmp/tf32_$flag" || return 1
    done
    ! cmp -s "$tmp/tf32_/step_00000005/model.safetensors" "$tmp/tf32_--tf32/step_00000005/model.safetensors" || { echo "error: --tf32 changes no bit" && return 1; }
    close_losses 2e-3 "$tmp/tf32_/log.jsonl" "$tmp/tf32_--tf32/log.jsonl"
}

precisions_train_alike() {
    flags="--model d3 --train $tmp/data_train.bin --batch 4 --seq 256 --steps 20 --lr 1e-3 --warmup 5"
    for v in fp32 bf16 fp16; do cu $v $flags --out "$tmp/precision_$v" || return 1; done
    close_losses 0.03 "$tmp/precision_fp32/log.jsonl" "$tmp/precision_bf16/log.jsonl" &&
        close_losses 0.03 "$tmp/precision_fp32/log.jsonl" "$tmp/precision_fp16/log.jsonl"
}

greedy_text_is_the_cpu_s() {
    cu fp32 --model d3 --train "$tmp/data_train.bin" --batch 8 --seq 256 --steps 300 --lr 2e-3 --warmup 20 --out "$tmp/trained" || return 1
    m=$tmp/trained/step_00000300
    for prompt in "ROMEO:" "the "; do
        talk="--model $m --tokens 200 --temperature 0"
        limit 60 "$bin/train_llama3" $talk --generate "$prompt" >"$tmp/greedy_cpu" && cu fp32 $talk --generate "$prompt" >"$tmp/greedy_gpu" || return 1
        [ "$(wc -c <"$tmp/greedy_gpu")" -ge 200 ] || { echo "error: only $(wc -c <"$tmp/greedy_gpu") bytes" && return 1; }
        cmp "$tmp/greedy_cpu" "$tmp/greedy_gpu" && continue
        has_torch && "$python" "$root/dev/test/gpu/gpu_pairs.py" --gap "$m" "$prompt" "$tmp/greedy_cpu" "$tmp/greedy_gpu" || return 1
    done
    echo "REMARK loss $(losses_of "$tmp/trained/log.jsonl" | tail -n 1 | cut -d ' ' -f 2)"
}

# many long rows, where a changing order of sums would show
long="--model d3 --batch 8 --seq 1024 --steps 20 --warmup 4 --lr 1e-3"

no_master_trains_alike() { # weights in bfloat16 alone, rounded stochastically
    flags="--model d3 --train $tmp/data_train.bin --batch 4 --seq 256 --steps 20 --lr 1e-3 --warmup 5"
    cu bf16 $flags --out "$tmp/no_master_fp32" && cu bf16 $flags --master none --moments bf16 --out "$tmp/no_master_none" &&
        close_losses 0.03 "$tmp/no_master_fp32/log.jsonl" "$tmp/no_master_none/log.jsonl"
}

# parts_are_the_whole VARIANT NAME FLAGS...: 10 steps and 10 more have the bits of 20 at once
parts_are_the_whole() {
    v=$1 d=$tmp/parts_$2
    shift 2
    cu "$v" $long --train "$tmp/data_train.bin" --val "$tmp/data_val.bin" "$@" --out "$d/whole" &&
        cu "$v" $long --train "$tmp/data_train.bin" --val "$tmp/data_val.bin" "$@" --out "$d/parts" --stop-after 10 &&
        cu "$v" --resume --out "$d/parts" && same_end "$d/whole" "$d/parts" 20 &&
        steps_of "$d/whole/log.jsonl" | grep -v '"val"' >"$d/a" && steps_of "$d/parts/log.jsonl" | grep -v '"val"' | cmp "$d/a" -
}

# other_choices PLAN OUT: gives each product the algorithm of the previous product of its kind
other_choices() {
    awk '{ kind = $0; sub(/.*"trans_a"/, "", kind); sub(/"ld_a".*"add"/, "", kind); sub(/, "align_a".*/, "", kind) }
        /"algo"/ {
            algo = $0; sub(/.*"algo": "/, "", algo); sub(/".*/, "", algo)
            if (kind in before) { sub(/"algo": "[0-9a-f]*/, "\"algo\": \"" before[kind]) }
            before[kind] = algo
        }
        { print }' "$1" >"$2" && ! cmp -s "$1" "$2" || { echo "error: $1 has no other choices" && return 1; }
}

# has_choices PLAN OTHER CHECKPOINT: the checkpoint has choices of OTHER that PLAN does not have
has_choices() { grep -vxFf "$1" "$2" | grep -qxFf - "$3/matmul_plan.json" || { echo "error: $3 has no choice of $2" && return 1; }; }

# plans_are_carried NAME PROGRAM FLAGS...: a run takes other choices than the heuristic's from a plan file. The checkpoint of step 10 carries them to a run in another folder, after the plan file is removed.
plans_are_carried() {
    d=$tmp/plans_$1 pc=$2
    shift 2
    $pc bf16 "$@" --train "$tmp/data_train.bin" --out "$d/first" --steps 1 && other_choices "$d/first/step_00000001/matmul_plan.json" "$d/plan.json" &&
        $pc bf16 "$@" --train "$tmp/data_train.bin" --out "$d/whole" --plan "$d/plan.json" --checkpoint-every 10 &&
        has_choices "$d/first/step_00000001/matmul_plan.json" "$d/plan.json" "$d/whole/step_00000010" && mkdir "$d/parts" &&
        cp -r "$d/whole/step_00000010" "$d/parts" && rm "$d/plan.json" && $pc bf16 --resume --out "$d/parts" && same_end "$d/whole" "$d/parts" 20 &&
        cmp "$d/whole/step_00000020/matmul_plan.json" "$d/parts/step_00000020/matmul_plan.json"
}

# A plan of another card, number of multiprocessors, workspace or shape is not used: the run warns once and continues.
plans_from_elsewhere_are_not_used() {
    d=$tmp/elsewhere run="--model d2 --train $tmp/data_train.bin --seq 64 --steps 2"
    mkdir -p "$d"
    cu bf16 $run --batch 2 --out "$d/first" && cp "$d/first/step_00000002/matmul_plan.json" "$d/own" &&
        sed 's/"gpu": "[^"]*"/"gpu": "another"/' "$d/own" >"$d/gpu" && sed 's/"sms": [0-9]*/"sms": 1/' "$d/own" >"$d/sms" &&
        sed 's/"cublaslt": [0-9]*/"cublaslt": 7/' "$d/own" >"$d/cublaslt" && sed 's/"workspace": [0-9]*/"workspace": 1/' "$d/own" >"$d/workspace" || return 1
    for field in gpu sms cublaslt workspace; do
        cu bf16 $run --batch 2 --plan "$d/$field" --out "$d/run_$field" >"$d/log" 2>&1 || return 1
        [ "$(grep -c '^warning: ' "$d/log")" -eq 1 ] && grep "^warning: $d/$field: $field is .*cuBLASLt chooses again" "$d/log" &&
            same_end "$d/first" "$d/run_$field" 2 || return 1
    done
    cu bf16 $run --batch 4 --plan "$d/own" --out "$d/shape" >"$d/log" 2>&1 && [ "$(grep -c '^warning: ' "$d/log")" -eq 1 ] &&
        grep "^warning: $d/own: has no choice that runs here for " "$d/log" || return 1
    cu bf16 $run --batch 2 --plan "$d/own" --out "$d/same" >"$d/log" 2>&1 && ! grep '^warning: ' "$d/log"
}

graph_changes_no_bit() {
    d=$tmp/graph
    for total in 8192 32768; do
        cu bf16 $long --train "$tmp/data_train.bin" --total-batch $total --steps 5 --out "$d/on_$total" &&
            cu bf16 $long --train "$tmp/data_train.bin" --total-batch $total --steps 5 --out "$d/off_$total" --no-graph &&
            same_end "$d/on_$total" "$d/off_$total" 5 || return 1
    done
    documents_written "$d" || return 1
    for graph in on off; do
        cu bf16 $long --train "$d/masked.bin" --val "$d/documents.bin" --val-every 2 --total-batch 32768 --steps 5 \
            --out "$d/documents_$graph" $([ $graph = on ] || echo --no-graph) || return 1
    done
    same_end "$d/documents_on" "$d/documents_off" 5
}

# killed_runs_go_on N: kills with -9 N times, at moments spread over the time of about six steps
killed_runs_go_on() {
    kills=$1 d=$tmp/killed seed=$(date +%s) last=0 i=0
    flags="--model d2 --train $tmp/data_train.bin --batch 8 --seq 256 --steps 100000 --schedule constant --checkpoint-every 1 --keep 3"
    need bf16 train_llama3cu && mkdir -p "$d" || return 1
    while [ $i -lt "$kills" ]; do
        i=$((i + 1)) seed=$(((seed * 171 + 11213) % 53125))
        "$build/bf16/train_llama3cu" --sample-tokens 0 $flags --out "$d/run" --resume >"$d/screen" 2>&1 &
        pid=$!
        # each run lives for up to a second after its first step: before that it has nothing to lose
        wait_for grep -q "^ *$((last + 1))/" "$d/screen" || { tail -n 3 "$d/screen" && echo "error: no step" && return 1; }
        sleep "$(awk -v r="$seed" 'BEGIN { printf "%.3f", r / 53125 }')"
        kill -9 $pid 2>/dev/null
        wait $pid
        [ $? -eq 137 ] || { tail -n 3 "$d/screen" && echo "error: it ended by itself" && return 1; }
        now=$(ls "$d/run" 2>/dev/null | sed -n 's/^step_0*\([0-9]*\)$/\1/p' | sort -n | tail -n 1)
        [ "${now:-0}" -ge $last ] || { echo "error: step $last was lost, ${now:-0} is the newest" && return 1; }
        last=${now:-0}
    done
    stop=$((last + 2))
    echo "REMARK $kills kills over $last steps"
    [ $last -ge "$kills" ] || { echo "error: too few steps were taken between the kills" && return 1; }
    cu bf16 $flags --out "$d/run" --resume --stop-after $stop && cu bf16 $flags --out "$d/never" --checkpoint-every 0 --stop-after $stop &&
        same_end "$d/never" "$d/run" $stop && same_steps "$d/never/log.jsonl" "$d/run/log.jsonl"
}

# With one token per step, the first scaled gradients exceed 65504. The loss scale is halved until they fit; then the run
# learns.
fp16_finds_its_scale() {
    d=$tmp/scale
    cu fp16 --model d2 --train "$tmp/data_train.bin" --batch 1 --seq 1 --steps 30 --lr 1e-3 --out "$d" || return 1
    grep -q '"step":1,.*"skipped":"skipped: not finite, loss scale now 32768"' "$d/log.jsonl" || { grep -m 2 '"step"' "$d/log.jsonl" && echo "error: step 1 should be skipped" && return 1; }
    skips=$(grep -c '"skipped"' "$d/log.jsonl")
    echo "REMARK $skips of 30 steps skipped"
    [ "$skips" -lt 20 ] && tail -n 2 "$d/log.jsonl" | head -n 1 | grep -qv skipped
}

# overwrite FILE TENSOR BYTE OCTALS COUNT: writes these bytes COUNT times into a tensor of a safetensors file, from byte BYTE of
# the tensor on
overwrite() {
    ow_header=$(od -An -tu8 -N8 "$1" | tr -d ' ')
    ow_offset=$(head -c $((8 + ow_header)) "$1" | tail -c "$ow_header" | sed 's/.*"'"$2"'":{[^}]*"data_offsets":\[\([0-9]*\),.*/\1/')
    printf "$4%.0s" $(seq "$5") | dd of="$1" bs=1 seek=$((8 + ow_header + ow_offset + $3)) conv=notrunc 2>/dev/null
}

# Weights near the largest float are finite, so they are read, but the results overflow. Every step must be skipped and say so,
# and the final weights must equal the initial ones.
huge_weights() { # huge_weights DIR: a model's folder
    cp -r "$pairs/mha_odd" "$1" && chmod u+w "$1"/* || return 1
    huge_size=$(wc -c <"$1/model.safetensors")
    printf '\000\000\177\177%.0s' $(seq 1024) | dd of="$1/model.safetensors" bs=1 seek=$((huge_size - 4096)) conv=notrunc 2>/dev/null
}

what_is_not_finite_is_never_applied() {
    v=$1 d=$tmp/huge_$1
    huge_weights "$d.model" && token_file "$d.bin" 3000 97 || return 1
    cu "$v" --model "$d.model" --train "$d.bin" --batch 2 --seq 16 --steps 0 --out "$d/before" || return 1
    if cu "$v" --model "$d.model" --train "$d.bin" --batch 2 --seq 16 --steps 3 --out "$d/after" 2>"$d.errors"; then echo "error: status 0" && return 1; fi
    grep '^error: the loss or gradient norm of the last 3 steps is not finite, first in ' "$d.errors" || { cat "$d.errors" && return 1; }
    [ "$(grep -c '"skipped":"skipped: not finite' "$d/after/log.jsonl")" -eq 3 ] || { grep '"step"' "$d/after/log.jsonl" && echo "error: wanted 3 skipped steps" && return 1; }
    cmp "$d/before/step_00000000/model.safetensors" "$d/after/step_00000003/model.safetensors"
}

debug_names_the_tensor() {
    d=$tmp/debug
    huge_weights "$d.model" && token_file "$d.bin" 3000 97 || return 1
    cu bf16 --model "$d.model" --train "$d.bin" --batch 2 --seq 16 --steps 1 --debug --out "$d" >"$d.log" 2>&1
    grep '^debug   not finite: ' "$d.log" || { tail -n 4 "$d.log" && echo "error: --debug names no tensor" && return 1; }
}

# A nan weight is refused; the message names file, tensor and position.
nan_is_refused() {
    d=$tmp/nan
    cp -r "$pairs/mha_odd" "$d.model" && chmod u+w "$d.model"/* && token_file "$d.bin" 3000 97 || return 1
    nan_size=$(wc -c <"$d.model/model.safetensors")
    printf '\000\000\300\177' | dd of="$d.model/model.safetensors" bs=1 seek=$((nan_size - 4)) conv=notrunc 2>/dev/null
    if cu bf16 --model "$d.model" --train "$d.bin" --batch 2 --seq 16 --steps 1 --out "$d" >"$d.log" 2>&1; then
        echo "error: it was trained on" && return 1
    fi
    grep "^error: $d.model/model.safetensors: .*weight is nan at" "$d.log" || { tail -n 2 "$d.log" && return 1; }
}

# Every job reads --plan and refuses a file of another format.
plan_is_for_every_job() {
    d=$tmp/plan
    cu bf16 --model d2 --train "$tmp/data_train.bin" --batch 2 --seq 64 --steps 1 --out "$d" && cp "$d/step_00000001/matmul_plan.json" "$d.json" || return 1
    cu bf16 --model "$d" --val "$tmp/data_train.bin" --batch 2 --seq 64 --val-batches 2 --eval --plan "$d.json" || return 1
    cu bf16 --model "$d" --generate a --tokens 4 --plan "$d.json" || return 1
    echo '{"format": "else"}' >"$d.bad"
    for job in "--val $tmp/data_train.bin --batch 2 --seq 64 --eval" "--generate a --tokens 4"; do
        if cu bf16 --model "$d" $job --plan "$d.bad" >"$d.log" 2>&1; then echo "error: $job takes it" && return 1; fi
        grep "^error: $d.bad: format is" "$d.log" || { tail -n 2 "$d.log" && return 1; }
    done
}

# The first token of a checkpoint with 1B parameters in a warm page cache takes at most 2 s, median of three runs.
first_token_is_soon() {
    d=$tmp/first
    cu bf16 --master split --moments bf16 --model llama3.2-1b --train "$tmp/data_train.bin" --batch 1 --seq 16 --steps 0 --out "$d" >"$d.log" 2>&1 || { tail -n 2 "$d.log" && return 1; }
    for first_i in 1 2 3 4; do
        first_from=$(date +%s%N)
        cu bf16 --model "$d" --generate 1 --tokens 1 >"$d.text" 2>>"$d.log" || { tail -n 2 "$d.log" && return 1; }
        echo $((($(date +%s%N) - first_from) / 1000000)) >>"$d.ms"
    done
    first_ms=$(tail -n 3 "$d.ms" | sort -n | sed -n 2p)
    first_from=$(date +%s%N)
    limit 100 "$bin/train_llama3" --model "$d" --generate 1 --tokens 1 >"$d.text" 2>>"$d.log" || { tail -n 2 "$d.log" && return 1; }
    echo "REMARK $first_ms ms, $(tr '\n' ' ' <"$d.ms"); on the CPU $((($(date +%s%N) - first_from) / 1000000)) ms"
    rm -rf "$d"
    [ "$first_ms" -le 2000 ]
}

outliers_are_skipped() {
    d=$tmp/outlier
    cu bf16 --model d2 --train "$tmp/data_train.bin" --batch 2 --seq 64 --steps 300 --lr 1e-5 --skip-loss-z 0.5 --out "$d" || return 1
    skips=$(grep -c '"skipped":"skipped: loss z' "$d/log.jsonl")
    echo "REMARK $skips of 300 steps skipped"
    [ "$skips" -gt 0 ] && [ "$skips" -lt 100 ] || return 1
    # checkpoints hold the windows of losses: a stopped and resumed run skips the same steps
    cu bf16 --model d2 --train "$tmp/data_train.bin" --batch 2 --seq 64 --steps 300 --lr 1e-5 --skip-loss-z 0.5 --stop-after 170 --out "$d.parts" &&
        cu bf16 --resume --out "$d.parts" && same_end "$d" "$d.parts" 300 && same_steps "$d/log.jsonl" "$d.parts/log.jsonl"
}

# ended_early ERRORS: prints the step that the hint says is saved, and fails without one
ended_early() {
    grep '^error: ' "$1" >&2
    sed -n 's/^  hint: step \([1-9][0-9]*\) is saved in .*/\1/p' "$1" | grep .
}

# A bad token in the last row of the file ends the run somewhere in its epoch. The run saves the last whole step, bit for bit,
# and resumes from it after the data is mended.
bad_token_saves_the_last_step() {
    d=$tmp/bad_token
    mkdir -p "$d" && token_file "$d/clean.bin" 3009 97 && token_file "$d/late.bin" 3008 97 97 || return 1
    flags="--model $pairs/gqa2_untied_rope8 --batch 2 --seq 16 --total-batch 64 --steps 400 --schedule constant"
    if cu bf16 $flags --train "$d/late.bin" --out "$d/late" 2>"$d/errors"; then echo "error: status 0" && return 1; fi
    step=$(ended_early "$d/errors") || { cat "$d/errors" && echo "error: no step is saved" && return 1; }
    cu bf16 $flags --train "$d/clean.bin" --stop-after "$step" --out "$d/clean" && same_end "$d/late" "$d/clean" "$step" || return 1
    cp "$d/clean.bin" "$d/late.bin" && cu bf16 --resume --out "$d/late" --stop-after $((step + 2)) &&
        cu bf16 --resume --out "$d/clean" --stop-after $((step + 2)) && same_end "$d/late" "$d/clean" $((step + 2)) && echo "REMARK step $step"
}

# watched FLAGS...: runs the BF16 trainer in the background as $pid, with its screen in $d.screen, for at most 60 s
watched() {
    need bf16 train_llama3cu || return 1
    "$build/bf16/train_llama3cu" --sample-tokens 0 --val-every 0 "$@" >"$d.screen" 2>&1 &
    pid=$!
    (sleep 60 && kill -9 $pid) 2>/dev/null &
}

# Small batches make the validation last for seconds; SIGTERM ends it, and the step before it is saved.
term_ends_a_validation() {
    d=$tmp/val_term
    watched --model d2 --train "$tmp/data_train.bin" --val "$tmp/data_train.bin" --batch 1 --seq 16 --steps 100 --val-every 1 --val-batches 1000000 --out "$d" &&
        wait_for has_steps "$d/log.jsonl" 1 || { tail -n 3 "$d.screen" && return 1; }
    from=$(date +%s%N)
    kill -TERM $pid
    wait $pid
    status=$? ms=$((($(date +%s%N) - from) / 1000000))
    echo "REMARK $ms ms from the signal to the end"
    [ $status -eq 0 ] && [ -s "$d/step_00000001/model.safetensors" ] && ! grep '"event":"val"' "$d/log.jsonl" && [ $ms -lt 5000 ] && return 0
    tail -n 3 "$d.screen" "$d/log.jsonl"
    return 1
}

usr1_saves_and_the_run_goes_on() {
    d=$tmp/usr1
    watched --model d2 --train "$tmp/data_train.bin" --batch 4 --seq 256 --steps 1000000 --schedule constant --signal-status 75 --out "$d" &&
        wait_for has_steps "$d/log.jsonl" 3 || { tail -n 3 "$d.screen" && return 1; }
    kill -USR1 $pid
    wait_for sh -c "ls $d/step_*/trainer_state.json" && first=$(ls "$d" | grep '^step_' | head -n 1)
    steps=$(grep -c '"event":"step"' "$d/log.jsonl")
    wait_for has_steps "$d/log.jsonl" $((steps + 3)) || echo "error: it does not go on"
    kill -TERM $pid
    wait $pid
    status=$?
    at=$(echo "${first:-}" | sed 's/step_0*//')
    [ $status -eq 75 ] && [ -n "$at" ] && cu bf16 --model d2 --train "$tmp/data_train.bin" --batch 4 --seq 256 --steps 1000000 --schedule constant \
        --stop-after "$at" --out "$d.whole" && same_end "$d" "$d.whole" "$at" && return 0
    tail -n 3 "$d.screen"
    echo "error: status $status, first checkpoint '${first:-}'"
    return 1
}

# A learning rate ruins the weights: ten steps that are not finite end the run; the healthy checkpoint stays.
ruin_ends_the_run() {
    v=$1 d=$tmp/ruin_$1
    flags="--model d2 --train $tmp/data_train.bin --batch 2 --seq 64 --steps 200 --schedule constant --checkpoint-every 2 --keep 1"
    cu "$v" $flags --stop-after 4 --out "$d" || return 1
    if cu "$v" $flags --resume --lr 1e3 --weight-decay 1000 --grad-clip 0 --out "$d" 2>"$d.errors"; then echo "error: status 0" && return 1; fi
    grep '^error: the loss or gradient norm of the last 1[0-9] steps is not finite, first in ' "$d.errors" || { cat "$d.errors" && return 1; }
    healthy=$(sed -n 's/^  hint: \(.*\) is from before: .*/\1/p' "$d.errors")
    grep -q '"not_finite": false' "$healthy/trainer_state.json" && grep -q '"not_finite": true' "$d"/step_*/trainer_state.json &&
        tail -n 1 "$d/log.jsonl" | grep '"reason":"not finite"'
}

# Checkpoints by the clock drain the steps in flight at moments that no two runs share.
timed_checkpoints_change_no_bit() {
    v=$1 d=$tmp/timed_$1
    flags="--model d2 --train $tmp/data_train.bin --batch 2 --seq 64 --steps 1500 --lr 1e-4"
    cu "$v" $flags --checkpoint-minutes 0 --out "$d/off" && cu "$v" $flags --checkpoint-minutes 0.0001 --out "$d/on" || return 1
    echo "REMARK $(grep -c '"event":"checkpoint"' "$d/on/log.jsonl") checkpoints"
    [ "$(grep -c '"event":"checkpoint"' "$d/on/log.jsonl")" -ge 2 ] && [ "$(ls -d "$d"/on/step_* | wc -l)" -eq 1 ] &&
        same_end "$d/on" "$d/off" 1500 && same_steps "$d/on/log.jsonl" "$d/off/log.jsonl"
}

# a model wide enough for kernels that compute SwiGLU and RoPE with their products
joined_layers_have_one_result() {
    has_hopper || return
    d=$tmp/joined flags="--model d12 --train $tmp/data_train.bin --batch 4 --seq 1024 --steps 6 --warmup 2"
    cu bf16 $flags --profile 1 --out "$d/profile" >"$d.txt" || return 1
    for row in "qkv rope" "gate up swiglu" "down dx swiglu"; do
        grep -q "^$row  *[0-9]" "$d.txt" || { cat "$d.txt" && echo "error: no row $row" && return 1; }
    done
    cu bf16 $flags --out "$d/whole" && cu bf16 $flags --no-graph --recompute block --out "$d/again" && same_end "$d/whole" "$d/again" 6 &&
        cu bf16 $flags --stop-after 3 --out "$d/parts" && cu bf16 --resume --out "$d/parts" && same_end "$d/whole" "$d/parts" 6
}

profile_has_a_table() {
    v=$1
    cu "$v" --model d3 --train "$tmp/data_train.bin" --batch 8 --seq 1024 --profile 2 --out "$tmp/profile_$v" >"$tmp/profile_$v.txt" || return 1
    for row in operation attention "attention backward" "gate up dw" rmsnorm cross-entropy adamw; do
        grep -q "^$row  *[0-9c]" "$tmp/profile_$v.txt" || { cat "$tmp/profile_$v.txt" && echo "error: no row $row" && return 1; }
    done
    awk '/^operation/ { on = 1; next } on { for (i = 2; i <= NF; i++) if ($i ~ /%$/) { sum += $i; break } }
         END { printf "shares sum to %.1f%%\n", sum; exit !(sum > 99 && sum < 101) }' "$tmp/profile_$v.txt"
}

# ends_well_at SIGNAL: the run exits with 0, leaves a checkpoint, and can be resumed
ends_well_at() {
    d=$tmp/signal_$1
    need bf16 train_llama3cu || return 1
    "$build/bf16/train_llama3cu" --sample-tokens 0 --model d2 --train "$tmp/data_train.bin" --batch 4 --seq 256 --steps 1000000 \
        --schedule constant --out "$d" >"$d.screen" 2>&1 &
    pid=$!
    wait_for has_steps "$d/log.jsonl" 3 || { kill -9 $pid && tail -n 3 "$d.screen" && echo "error: no step was made" && return 1; }
    kill -"$1" $pid
    (sleep 30 && kill -9 $pid) 2>/dev/null &
    wait $pid
    status=$?
    newest=$(ls "$d" | grep '^step_' | tail -n 1)
    [ $status -eq 0 ] && [ -s "$d/$newest/model.safetensors" ] && tail -n 1 "$d/log.jsonl" | grep -q '"reason":"signal"' &&
        cu bf16 --resume --out "$d" --stop-after $(($(echo "$newest" | sed 's/step_0*//') + 2)) && return 0
    tail -n 3 "$d.screen" "$d/log.jsonl"
    echo "error: status $status, newest checkpoint '$newest'"
    return 1
}

generation_speaks() {
    for v in bf16 fp16; do
        cu $v --model "$tmp/trained/step_00000300" --generate "ROMEO:" --tokens 100 --temperature 0 >"$tmp/text" || return 1
        [ "$(wc -c <"$tmp/text")" -ge 100 ] || { echo "error: too short" && cat "$tmp/text" && return 1; }
    done
}
