#!/bin/sh
# test_gpu.sh [quick|all] [PATTERN] -- everything that only a real GPU can show. PATTERN (as grep -E has it): only tests with
# such a name; the larger pairs and compute-sanitizer need the test that writes the pairs: 'written|sanitizer'.
#
# Builds each precision, and PTX-only binaries of older architectures, in a folder of its own under build/gpu with the
# project's Makefile; then runs five lanes of tests side by side, and at the end, alone, those that measure memory. Prints
# "ok   NAME (seconds)" or "FAIL NAME" as tests end, and last "N passed, N failed, N skipped". Without a GPU each test
# reports itself as skipped, by name. Every program has a limit of its own; BUDGET=SECONDS for all (quick 230, all 530): what
# is not begun by then is skipped, by name. PYTHON with torch and safetensors writes the larger pairs; TEXT=FILE is trained on.
. dev/test/lib.sh
mode=${1:-quick} only=${2:-} python=${PYTHON:-python3} build=$root/build/gpu results=$tmp/results
case $mode in quick) budget=${BUDGET:-230} ;; all) budget=${BUDGET:-530} ;; *) echo "usage: $0 [quick|all] [WORD]" >&2 && exit 2 ;; esac
began=$(date +%s)
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
no_gpu=
nvidia-smi -L 2>/dev/null | grep -q '^GPU' || no_gpu="no GPU here"
[ -n "$no_gpu" ] || [ -n "$nvcc" ] || no_gpu="nvcc is not installed"
oldest=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d ' .\r' | sort -n | head -n 1)
case $oldest in 3? | 5? | 6? | 70 | 72) no_gpu="the GPU is older than sm_75" ;; esac
: >"$results"
cores=$(nproc)
OMP_NUM_THREADS=$(((cores + 3) / 4))
export OMP_NUM_THREADS CUDA_CACHE_MAXSIZE=4294967296

# --- the frame ---------------------------------------------------------------------------------------------------------------

elapsed() { echo $(($(date +%s) - began)); }
say() { printf '%s\n' "$1" | tee -a "$results"; }

# limit SECONDS COMMAND...: at most that long, and not far past the budget
limit() {
    limit_s=$1 limit_left=$((budget + 45 - $(elapsed)))
    shift
    [ $limit_left -ge "$limit_s" ] || limit_s=$((limit_left > 5 ? limit_left : 5))
    timeout -k 5 "$limit_s" "$@"
    limit_status=$?
    [ $limit_status -ne 124 ] || echo "no end after $limit_s s: $*"
    return $limit_status
}

# that NAME COMMAND...: a test. COMMAND may be a function here; it says why it fails, or returns 77 and says why it was skipped.
# QUICK tests belong to both modes, others to `all`.
that() {
    that_name=$1
    shift
    printf '%s\n' "$that_name" | grep -qE -- "$only" || return 0
    [ -z "$no_gpu" ] || { say "skip $that_name: $no_gpu" && return 0; }
    [ "$(elapsed)" -lt "$budget" ] || { say "skip $that_name: out of time, BUDGET is $budget s" && return 0; }
    that_log=$(mktemp "$tmp/log_XXXXXX") that_from=$(date +%s)
    ("$@") >"$that_log" 2>&1 </dev/null
    that_status=$? that_s=$(($(date +%s) - that_from))
    case $that_status in
        0) say "ok   $that_name ($that_s s)$(sed -n 's/^REMARK / -- /p' "$that_log" | tr '\n' ' ')" ;;
        77) say "skip $that_name: $(tail -n 1 "$that_log")" ;;
        *)
            say "FAIL $that_name ($that_s s)"
            { grep -E 'FAIL|^error|hint:|rror:|no end after' "$that_log" | head -n 12 && echo ... && tail -n 6 "$that_log"; } | cut -c1-180 | sed 's/^/    /'
            ;;
    esac
    rm -f "$that_log"
}
in_all() { [ "$mode" = all ] || [ -n "$no_gpu" ]; }  # what is skipped is named in full

# --- builds: VARIANT is a folder of links to the sources in which the Makefile builds ------------------------------------------

variable_of() {
    case $1 in
        fp32) echo PRECISION=FP32 ;;
        bf16) echo PRECISION=BF16 ;;
        fp16) echo PRECISION=FP16 ;;
        bf16_ptx80) echo PRECISION=BF16 PTX_ONLY=80 ;;
        fp16_ptx75) echo PRECISION=FP16 PTX_ONLY=75 ;;
    esac
}

# build_one VARIANT TARGET: leaves its status in build/gpu/VARIANT.TARGET.done, 77 where this GPU cannot run it
build_one() {
    build_log=$build/$1.$(basename "$2")
    case $1.$oldest in bf16*.7?) echo "BF16 needs sm_80 or newer" >"$build_log.log" && echo 77 >"$build_log.done" && return ;; esac
    make -s -C "$build/$1" NVCC="$nvcc" $(variable_of "$1") "$2" >"$build_log.log" 2>&1
    echo $? >"$build_log.done"
}

# In the order of the list, as many at a time as there are cores.
build_all() {
    mkdir -p "$build"
    rm -f "$build"/*.done
    variants="fp32 bf16 fp16"
    targets=
    for v in bf16 fp32 fp16; do targets="$targets $v:test_llama3cu $v:train_llama3cu"; done
    for v in bf16 fp32; do targets="$targets $v:build/test_kernels_cu $v:build/test_attention_cu"; done
    if in_all; then
        variants="$variants bf16_ptx80 fp16_ptx75"
        for v in bf16_ptx80 fp16_ptx75; do targets="$targets $v:test_llama3cu $v:build/test_kernels_cu $v:build/test_attention_cu"; done
        targets="$targets fp16:build/test_kernels_cu fp16:build/test_attention_cu bf16:build/test_wgmma_cu fp16:build/test_wgmma_cu"
    fi
    for v in $variants; do
        mkdir -p "$build/$v/build"
        for file in Makefile llmc dev train_llama3.c train_llama3.cu test_llama3.cu; do ln -sfn "$root/$file" "$build/$v/$file"; done
        case $v.$oldest in bf16*.7?) continue ;; esac
        make -s -C "$build/$v" NVCC="$nvcc" $(variable_of $v) build/cuda_flags  # before several makes would write it
    done
    running=0 pids=
    for target in $targets; do
        build_one "${target%%:*}" "${target#*:}" &
        pids="$pids $!" running=$((running + 1))
        if [ $running -ge "$cores" ]; then
            set -- $pids
            wait "$1"
            shift
            pids=$* running=$((running - 1))
        fi
    done
    wait
}

# need VARIANT TARGET: waits for the build; ends the test as skipped where there is none
need() {
    need_mark=$build/$1.$2
    while [ ! -s "$need_mark.done" ]; do sleep 0.3; done
    [ "$(cat "$need_mark.done")" -ne 77 ] || { cat "$need_mark.log" && exit 77; }
    [ "$(cat "$need_mark.done")" -eq 0 ] || { tail -n 5 "$need_mark.log" && echo "error: $1 $2 was not built" && return 1; }
}

# cu VARIANT FLAGS...: that build's trainer; flags given later hold
cu() {
    cu_v=$1
    shift
    need "$cu_v" train_llama3cu && limit "${CU_LIMIT:-100}" "$build/$cu_v/train_llama3cu" --sample-tokens 0 --val-every 0 "$@"
}

compiler_is_content() {
    for v in bf16:train_llama3cu fp32:train_llama3cu bf16:test_attention_cu; do need "${v%%:*}" "${v#*:}" || return 1; done
    ! grep -iE 'spill|serializ' "$build"/*.log
}

# --- programs that test themselves -------------------------------------------------------------------------------------------

# program LIMIT VARIANT TARGET [ARGUMENT...]: it ends well
program() {
    p_limit=$1 p_variant=$2 p_target=$3
    shift 3
    need "$p_variant" "$p_target" || return 1
    p_path=$build/$p_variant/$p_target
    [ -x "$p_path" ] || p_path=$build/$p_variant/build/$p_target
    cd "$build/$p_variant" && limit "$p_limit" "$p_path" "$@" >"$tmp/$p_variant.$p_target.out" 2>&1
    p_status=$?
    # a failure behind its heading
    awk '/^[^ ]/ { heading = $0; sub(/, [^,]*state.safetensors$/, "", heading); sub("dev/test/pairs/", "", heading) }
         /^ +FAIL/ { print "FAIL " heading " |" $0; next } { print }' "$tmp/$p_variant.$p_target.out"
    echo "REMARK $(tail -n 1 "$tmp/$p_variant.$p_target.out")"
    return $p_status
}

# committed LIMIT VARIANT: the committed pairs alone, without the trials of memory and bits
committed() {
    for pair in mha_odd gqa2_untied_rope8 tied_gqa4_rope32; do
        program "$1" "$2" test_llama3cu "dev/test/pairs/$pair" "dev/test/pairs/$pair.state.safetensors" || return 1
    done
}

has_torch() { "$python" -c 'import torch, safetensors' 2>/dev/null || { echo "$python has no torch or no safetensors (see requirements.txt)" && return 1; }; }

pairs_written() {
    has_torch || return 77
    if in_all; then set -- ; else set -- --cases hd10 hd64_groups2 hd128_groups2 hd256_groups1 one_token tiny; fi
    limit 150 "$python" dev/test/gpu_pairs.py --out "$tmp/pairs" --jobs $((cores / 2 + 1)) "$@" && touch "$tmp/pairs/whole"
}

# pair_passes VARIANT PAIR: leaves its output; a limit that lets PTX be compiled
pair_passes() { limit 150 "$build/$1/test_llama3cu" "$tmp/pairs/$2" "$tmp/pairs/$2.state.safetensors" >"$tmp/pair.$1.$2" 2>&1; }

# pairs_pass VARIANT
pairs_pass() {
    [ -e "$tmp/pairs/whole" ] || { echo "the pairs were not written" && return 77; }
    need "$1" test_llama3cu || return 1
    p_running=0 p_failed=0 p_passed=0
    for p_state in "$tmp"/pairs/*.state.safetensors; do
        pair_passes "$1" "$(basename "${p_state%.state.safetensors}")" &
        p_running=$((p_running + 1))
        [ $((p_running % 4)) -ne 0 ] || wait
    done
    wait
    for p_out in "$tmp/pair.$1".*; do
        if grep -q ' 0 failed' "$p_out"; then
            p_passed=$((p_passed + 1))
        else
            p_failed=$((p_failed + 1))
            echo "FAIL ${p_out##*.}: $(tail -n 1 "$p_out")"
            awk '/^[^ ]/ { heading = $0; sub(/: .*/, "", heading) } /^ +FAIL/ { print "FAIL  " heading $0 }' "$p_out" | head -n 4
        fi
    done
    echo "REMARK $p_passed pairs"
    [ $p_failed -eq 0 ] && [ $p_passed -gt 0 ]
}

# --- compute-sanitizer: what it says of our kernels. cuBLAS has its own, which read padding and are not ours to change --------------

our_kernels() { grep -hoE '\b[a-z0-9_]+_kernel\b' "$root"/llmc/*.cuh "$root"/llmc/*/*.cuh | sort -u | tr '\n' '|' | sed 's/|$//'; }

# sanitize TOOL VARIANT PAIR...
sanitize() {
    tool=$1 v=$2
    shift 2
    sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null) ||
        { echo "compute-sanitizer is not installed" && return 77; }
    need "$v" test_llama3cu || return 1
    # others' kernels are left alone where they need not be watched to know what was written; racecheck of CUDA 13 makes those of
    # cuBLAS that it leaves alone trap
    filter=
    case $tool in initcheck | racecheck) ;; *) ! "$sanitizer" --help | grep -q 'kernel-name ' || filter="--kernel-name kns=_kernel" ;; esac
    [ "$tool" != memcheck ] || filter="$filter --report-api-errors no"
    count=0
    for pair in "$@"; do
        dir=$tmp/pairs/$pair
        [ -d "$dir" ] || dir=$pairs/$pair
        [ -d "$dir" ] || continue
        count=$((count + 1)) log=$tmp/$tool.$v.$pair
        # what the test fills counts as initialised, so FP32 does not fill; in 16 bits it must, for initcheck does not see what
        # cuBLAS' kernels for Hopper write
        [ "$tool $v" != "initcheck fp32" ] || export NO_FILL=1
        limit 100 "$sanitizer" --tool "$tool" --show-backtrace no --print-limit 2000 $filter \
            "$build/$v/test_llama3cu" "$dir" "$dir.state.safetensors" >"$log" 2>&1
        if grep -qi 'device not supported' "$log"; then echo "compute-sanitizer does not support this machine" && return 77; fi
        grep -qE '^========= (ERROR|RACECHECK) SUMMARY' "$log" || { echo "error: no report:" && tail -n 4 "$log" && return 1; }
        grep -qE ' 0 failed' "$log" || { grep -E 'FAIL|error' "$log" | head -n 4 && echo "error: the program failed under $tool" && return 1; }
        if grep -E '^=========' "$log" | grep -E "\b($(our_kernels))\b" >"$log.ours"; then
            echo "error: $tool, $pair: $(grep -c . "$log.ours") lines on our kernels:"
            sed -E 's/.*\b(at|by|Race reported)/\1/' "$log.ours" | grep -oE "($(our_kernels)).{0,80}" | sort | uniq -c | sort -rn | head -n 5
            grep -B 2 -m 2 -E "\b($(our_kernels))\b" "$log"
            return 1
        fi
        echo "REMARK $pair: $(grep -E 'SUMMARY' "$log" | tail -n 1 | sed 's/=* *//') in kernels of cuBLAS"
    done
    [ $count -gt 0 ] || { echo "no pair to run on" && return 1; }
}

# --- the trainer ---------------------------------------------------------------------------------------------------------------

losses_of() { sed -n 's/.*"event":"step","step":\([0-9]*\),"loss":\([^,]*\),.*/\1 \2/p' "$1"; }

# close_losses LIMIT A B: two logs, the same steps
close_losses() {
    losses_of "$2" >"$tmp/losses_a" && losses_of "$3" >"$tmp/losses_b"
    paste -d ' ' "$tmp/losses_a" "$tmp/losses_b" | awk -v limit="$1" '
        $1 != $3 || !($2 - $4 <= limit && $4 - $2 <= limit) { bad++; print "FAIL step " $1 ": " $2 " and " $4 }
        { d = $2 > $4 ? $2 - $4 : $4 - $2; if (d > worst) { worst = d } }
        END { printf "REMARK %d steps, %.1e apart\n", NR, worst; exit bad > 0 || NR == 0 }'
}

# same_end A B STEP: two runs' checkpoints hold the same weights and the same state, to the bit
same_end() {
    se=$(printf 'step_%08d' "$3")
    cmp "$1/$se/model.safetensors" "$2/$se/model.safetensors" && cmp "$1/$se/state_rank00000.safetensors" "$2/$se/state_rank00000.safetensors"
}

cpu_and_gpu_train_alike() {
    flags="--model d3 --train $tmp/data_train.bin --batch 4 --seq 256 --steps 20 --lr 1e-3 --warmup 5"
    cu fp32 $flags --out "$tmp/alike_gpu" && limit 100 "$bin/train_llama3" --sample-tokens 0 $flags --out "$tmp/alike_cpu" &&
        close_losses 1e-4 "$tmp/alike_gpu/log.jsonl" "$tmp/alike_cpu/log.jsonl"
}

# from a folder that PyTorch wrote: grouped heads, its RoPE scaling, an untied head
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
        has_torch && "$python" "$root/dev/test/gpu_pairs.py" --gap "$m" "$prompt" "$tmp/greedy_cpu" "$tmp/greedy_gpu" || return 1
    done
    echo "REMARK loss $(losses_of "$tmp/trained/log.jsonl" | tail -n 1 | cut -d ' ' -f 2)"
}

# long rows and many of them: where an order of additions that changes would show
long="--model d3 --batch 8 --seq 1024 --steps 20 --warmup 4 --lr 1e-3"

# parts_are_the_whole VARIANT NAME FLAGS...: 20 steps at once, and 10 and 10
parts_are_the_whole() {
    v=$1 d=$tmp/parts_$2
    shift 2
    cu "$v" $long --train "$tmp/data_train.bin" --val "$tmp/data_val.bin" "$@" --out "$d/whole" &&
        cu "$v" $long --train "$tmp/data_train.bin" --val "$tmp/data_val.bin" "$@" --out "$d/parts" --stop-after 10 &&
        cu "$v" --resume --out "$d/parts" && same_end "$d/whole" "$d/parts" 20 &&
        steps_of "$d/whole/log.jsonl" | grep -v '"val"' >"$d/a" && steps_of "$d/parts/log.jsonl" | grep -v '"val"' | cmp "$d/a" -
}

# One tuning, whose choice the checkpoint of step 10 carries to a run in another folder, without the file of the first.
tuned_parts_are_the_whole() {
    d=$tmp/tuned
    mkdir -p "$d"
    cu bf16 $long --train "$tmp/data_train.bin" --out "$d/first" --steps 1 --tune --plan "$d/plan.json" && test -s "$d/plan.json" &&
        cu bf16 $long --train "$tmp/data_train.bin" --out "$d/whole" --plan "$d/plan.json" --checkpoint-every 10 &&
        test -s "$d/whole/step_00000010/matmul_plan.json" && mkdir "$d/parts" && cp -r "$d/whole/step_00000010" "$d/parts" &&
        rm "$d/plan.json" && cu bf16 --resume --out "$d/parts" && same_end "$d/whole" "$d/parts" 20 &&
        cmp "$d/whole/step_00000020/matmul_plan.json" "$d/parts/step_00000020/matmul_plan.json"
}

# A run that tunes and is resumed uses the checkpoint's choice and does not tune again, which could choose otherwise.
resuming_does_not_tune_again() {
    d=$tmp/tune_resume
    cu bf16 $long --train "$tmp/data_train.bin" --out "$d/whole" --tune --checkpoint-every 10 && mkdir "$d/parts" &&
        cp -r "$d/whole/step_00000010" "$d/parts" && cu bf16 --resume --out "$d/parts" >"$d/log" || { tail -n 3 "$d/log"; return 1; }
    ! grep '^tuned' "$d/log" && same_end "$d/whole" "$d/parts" 20
}

graph_changes_no_bit() {
    d=$tmp/graph
    for total in 8192 32768; do
        cu bf16 $long --train "$tmp/data_train.bin" --total-batch $total --steps 5 --out "$d/on_$total" &&
            cu bf16 $long --train "$tmp/data_train.bin" --total-batch $total --steps 5 --out "$d/off_$total" --no-graph &&
            same_end "$d/on_$total" "$d/off_$total" 5 || return 1
    done
}

# killed N: with -9 at moments spread over a life of about six steps
killed_runs_go_on() {
    kills=$1 d=$tmp/killed seed=$(date +%s) last=0 i=0
    flags="--model d2 --train $tmp/data_train.bin --batch 8 --seq 256 --steps 100000 --schedule constant --checkpoint-every 1 --keep 3"
    from=$(date +%s%N)
    cu bf16 $flags --out "$d/timed" --stop-after 6 || return 1
    span=$((($(date +%s%N) - from) / 1000000))
    while [ $i -lt "$kills" ]; do
        i=$((i + 1)) seed=$(((seed * 171 + 11213) % 53125))
        "$build/bf16/train_llama3cu" --sample-tokens 0 $flags --out "$d/run" --resume >"$d/screen" 2>&1 &
        pid=$!
        # from half of a life on: in the first half CUDA starts, and nothing is there to lose
        sleep "$(awk -v r="$seed" -v span=$span 'BEGIN { printf "%.3f", (0.5 + 0.7 * r / 53125) * span / 1000 }')"
        kill -9 $pid 2>/dev/null
        wait $pid
        [ $? -eq 137 ] || { tail -n 3 "$d/screen" && echo "error: it ended by itself" && return 1; }
        now=$(ls "$d/run" 2>/dev/null | sed -n 's/^step_0*\([0-9]*\)$/\1/p' | sort -n | tail -n 1)
        [ "${now:-0}" -ge $last ] || { echo "error: step $last was lost, ${now:-0} is the newest" && return 1; }
        last=${now:-0}
    done
    stop=$((last + 2))
    echo "REMARK $kills kills over $last steps"
    cu bf16 $flags --out "$d/run" --resume --stop-after $stop && cu bf16 $flags --out "$d/never" --checkpoint-every 0 --stop-after $stop &&
        same_end "$d/never" "$d/run" $stop && same_steps "$d/never/log.jsonl" "$d/run/log.jsonl"
}

# One token a step makes the first gradients pass 65504: the scale is halved until they fit, and the run learns after that.
fp16_finds_its_scale() {
    d=$tmp/scale
    cu fp16 --model d2 --train "$tmp/data_train.bin" --batch 1 --seq 1 --steps 30 --lr 1e-3 --out "$d" || return 1
    grep -q '"step":1,.*"skipped":"skipped: not finite, loss scale now 32768"' "$d/log.jsonl" || { grep -m 2 '"step"' "$d/log.jsonl" && echo "error: step 1 should be skipped" && return 1; }
    skips=$(grep -c '"skipped"' "$d/log.jsonl")
    echo "REMARK $skips of 30 steps skipped"
    [ "$skips" -lt 20 ] && tail -n 2 "$d/log.jsonl" | head -n 1 | grep -qv skipped
}

# A folder with a NaN: no step is applied, each says so, and the weights of the end are those of the start.
nan_is_never_applied() {
    v=$1 d=$tmp/nan_$1
    cp -r "$pairs/mha_odd" "$d.model" && chmod u+w "$d.model"/* || return 1
    size=$(wc -c <"$d.model/model.safetensors")
    printf '\000\000\300\177' | dd of="$d.model/model.safetensors" bs=1 seek=$((size - 4)) conv=notrunc 2>/dev/null
    token_file "$d.bin" 3000 97
    cu "$v" --model "$d.model" --train "$d.bin" --batch 2 --seq 16 --steps 0 --out "$d/before" >"$d.log" 2>&1
    status=$?
    [ $status -eq 0 ] || { cat "$d.log" && grep -qi 'nan\|finite' "$d.log" && echo "REMARK refused when read" && return 0; }
    cu "$v" --model "$d.model" --train "$d.bin" --batch 2 --seq 16 --steps 3 --out "$d/after" || return 1
    [ "$(grep -c '"skipped":"skipped: not finite' "$d/after/log.jsonl")" -eq 3 ] || { grep '"step"' "$d/after/log.jsonl" && echo "error: wanted 3 skipped steps" && return 1; }
    cmp "$d/before/step_00000000/model.safetensors" "$d/after/step_00000003/model.safetensors"
}

debug_names_the_tensor() {
    d=$tmp/nan_bf16
    [ -d "$d.model" ] || { echo "the folder with a NaN is missing" && return 1; }
    cu bf16 --model "$d.model" --train "$d.bin" --batch 2 --seq 16 --steps 1 --debug --out "$d/debug" >"$d.debug" 2>&1
    grep -iE 'head|norm|embed|logits|layer' "$d.debug" | grep -iE 'finite|nan|inf' || { tail -n 4 "$d.debug" && echo "error: --debug names no tensor" && return 1; }
}

outliers_are_skipped() {
    d=$tmp/outlier
    cu bf16 --model d2 --train "$tmp/data_train.bin" --batch 2 --seq 64 --steps 300 --lr 1e-5 --skip-loss-z 0.5 --out "$d" || return 1
    skips=$(grep -c '"skipped":"skipped: loss z' "$d/log.jsonl")
    echo "REMARK $skips of 300 steps skipped"
    [ "$skips" -gt 0 ] && [ "$skips" -lt 100 ] || return 1
    # the windows of losses are in the checkpoint: stopped and resumed, the same steps are skipped
    cu bf16 --model d2 --train "$tmp/data_train.bin" --batch 2 --seq 64 --steps 300 --lr 1e-5 --skip-loss-z 0.5 --stop-after 170 --out "$d.parts" &&
        cu bf16 --resume --out "$d.parts" && same_end "$d" "$d.parts" 300 && same_steps "$d/log.jsonl" "$d.parts/log.jsonl"
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

# ends_well_at SIGNAL
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

# --- memory: alone on the card ---------------------------------------------------------------------------------------------------

# 100,000 tokens: five times what fits into one argument of a command
wide_data() {
    [ -s "$tmp/wide.bin" ] && return
    token_file "$tmp/part.bin" 20000 32768
    {
        printf "$(little_endian 4 20240520 1 100000)"
        dd if=/dev/zero bs=1012 count=1 2>/dev/null
        for _ in 1 2 3 4 5; do tail -c +1025 "$tmp/part.bin"; done
    } >"$tmp/wide.bin"
}

# table_is_true VARIANT FLAGS...: what the table says beside the context is within 3 % of what the steps hold beside it
table_is_true() {
    v=$1
    shift
    wide_data
    cu "$v" --model d12 --train "$tmp/wide.bin" --seq 1024 --steps 4 --out "$(mktemp -d "$tmp/table_XXXXXX")" "$@" >"$tmp/table" || return 1
    awk '
        function gib(number, unit) { return number * (unit == "KiB" ? 1 / 1048576 : unit == "MiB" ? 1 / 1024 : 1) }
        $1 == "memory" && $2 == "context" { context = gib($3, $4) }
        $1 == "memory" && $2 == "need" { need = gib($3, $4) }
        $1 ~ /^ *[0-9]+\/[0-9]+$/ { held = $8; sub("G", "", held); steps++ }
        END {
            off = (need - context) / (held - context) - 1
            printf "REMARK table %.2f GiB, held %.2f GiB, %+.1f%%\n", need - context, held - context, 100 * off
            exit !(steps > 0 && context > 0 && off < 0.03 && off > -0.03)
        }' "$tmp/table"
}

# A T4 has 15 GiB. What does not fit is refused with flags that do, and these run within it.
hint_fits() {
    wide_data
    flags="--model d12 --train $tmp/wide.bin --seq 1024 --batch 64 --steps 3 --max-memory 15G"
    cu "$1" $flags --out "$tmp/refused_$1" >"$tmp/refused.out" 2>&1 && { echo "error: it was not refused" && return 1; }
    hint=$(sed -n 's/^  hint: these flags fit: *//p' "$tmp/refused.out")
    [ -n "$hint" ] && [ ! -e "$tmp/refused_$1" ] || { tail -n 3 "$tmp/refused.out" && echo "error: no flags, or traces" && return 1; }
    echo "REMARK $hint"
    cu "$1" $flags $hint --out "$tmp/fits_$1" >"$tmp/fits.out" || return 1
    awk '$1 ~ /^ *[0-9]+\/[0-9]+$/ { held = $8; sub("G", "", held); if (held > most) { most = held + 0 } }
         END { printf "REMARK %.2f GiB held\n", most; exit !(most > 1 && most <= 15) }' "$tmp/fits.out"
}

# --- all of it --------------------------------------------------------------------------------------------------------------------

lane_parity() {
    that "test_llama3cu, FP32" program 240 fp32 test_llama3cu
    that "test_llama3cu, BF16" program 240 bf16 test_llama3cu
    in_all || return 0
    that "test_llama3cu, FP16" program 240 fp16 test_llama3cu
    for v in fp32 bf16 fp16 bf16_ptx80 fp16_ptx75; do that "test_attention, $v" program 150 $v test_attention_cu; done
}

lane_kernels() {
    that "every layer against its oracle, fp32" program 120 fp32 test_kernels_cu
    that "every layer against its oracle, bf16" program 120 bf16 test_kernels_cu
    that "ptxas warns of no spills and of no serialized wgmma" compiler_is_content
    in_all || return 0
    that "every layer against its oracle, fp16" program 120 fp16 test_kernels_cu
    that "every layer against its oracle, BF16 from sm_80 PTX" program 150 bf16_ptx80 test_kernels_cu
    that "every layer against its oracle, FP16 from sm_75 PTX" program 150 fp16_ptx75 test_kernels_cu
    that "committed pairs, BF16 from sm_80 PTX" committed 150 bf16_ptx80
    that "committed pairs, FP16 from sm_75 PTX" committed 150 fp16_ptx75
    that "Hopper's building blocks, BF16" program 60 bf16 test_wgmma_cu
    that "Hopper's building blocks, FP16" program 60 fp16 test_wgmma_cu
}

lane_pairs() {
    that "larger pairs are written by PyTorch" pairs_written
    touch "$tmp/pairs_tried"
    that "larger pairs pass in FP32" pairs_pass fp32
    that "larger pairs pass in BF16" pairs_pass bf16
    in_all || return 0
    that "larger pairs pass in FP16" pairs_pass fp16
    that "larger pairs pass in BF16 from sm_80 PTX" pairs_pass bf16_ptx80
    that "larger pairs pass in FP16 from sm_75 PTX" pairs_pass fp16_ptx75
}

lane_sanitizer() {
    if [ -z "$no_gpu" ]; then while [ ! -e "$tmp/pairs_tried" ]; do sleep 0.5; done; fi
    that "compute-sanitizer memcheck is silent on our kernels" sanitize memcheck bf16 tiny_hd64 tiny_hd128 tiny_hd12
    in_all || return 0
    for tool in racecheck synccheck initcheck; do
        that "compute-sanitizer $tool is silent on our kernels" sanitize $tool bf16 tiny_hd64 tiny_hd128 tiny_hd12
    done
    that "compute-sanitizer memcheck, FP32" sanitize memcheck fp32 tiny_hd12
    that "compute-sanitizer racecheck, FP32" sanitize racecheck fp32 tiny_hd12
    that "compute-sanitizer initcheck, FP32, in memory that nothing filled" sanitize initcheck fp32 tiny_hd64 tiny_hd12
}

lane_trainer() {
    that "20 steps of FP32 have the CPU trainer's losses" cpu_and_gpu_train_alike
    that "20 steps of FP32 from PyTorch's folder have the CPU trainer's losses" a_folder_trains_alike
    that "20 steps whole, and 10 and 10: the same bits, BF16" parts_are_the_whole bf16 bf16
    that "greedy text of a trained model is the CPU trainer's" greedy_text_is_the_cpu_s
    that "a captured graph changes no bit" graph_changes_no_bit
    that "tuned plans travel with the checkpoint: the same bits" tuned_parts_are_the_whole
    that "--profile prints a table" profile_has_a_table bf16
    that "SIGINT ends with a checkpoint and status 0" ends_well_at INT
    that "killed with -9 and resumed: nothing is lost" killed_runs_go_on "$(in_all && echo 8 || echo 3)"
    that "FP16 finds its loss scale" fp16_finds_its_scale
    that "a NaN is never applied, BF16" nan_is_never_applied bf16
    in_all || return 0
    that "a NaN is never applied, FP32" nan_is_never_applied fp32
    that "--debug names the tensor that is not finite" debug_names_the_tensor
    that "resuming a tuned run does not tune again" resuming_does_not_tune_again
    that "10 and 10: the same bits, split master and bf16 moments" parts_are_the_whole bf16 split --master split --moments bf16
    that "10 and 10: the same bits, fp32 gradients in 4 micro-batches" parts_are_the_whole bf16 micro --grad-dtype fp32 --batch 2 --total-batch 8192
    that "10 and 10: the same bits, FP16 with its loss scale" parts_are_the_whole fp16 fp16
    that "10 and 10: the same bits, FP32, block recomputed" parts_are_the_whole fp32 fp32 --recompute block
    that "10 and 10: the same bits, weights saved as F32" parts_are_the_whole bf16 f32 --export-dtype f32
    that "FP32, BF16 and FP16 train alike" precisions_train_alike
    that "TF32 trains like FP32" tf32_is_near
    that "outliers are skipped, the same ones after a resume" outliers_are_skipped
    that "--profile in FP32" profile_has_a_table fp32
    that "SIGTERM too ends with a checkpoint" ends_well_at TERM
    that "BF16 and FP16 generate" generation_speaks
}

lane_memory() {
    that "15 GiB: refused with flags that run, BF16" hint_fits bf16
    that "the memory table is true, d12 B=16" table_is_true bf16 --batch 16
    in_all || return 0
    that "15 GiB: refused with flags that run, FP16" hint_fits fp16
    that "the memory table is true, one block recomputed" table_is_true bf16 --batch 16 --recompute block
    that "the memory table is true, split master, bf16 moments" table_is_true bf16 --batch 8 --master split --moments bf16
    that "the memory table is true, FP32" table_is_true fp32 --batch 8
    that "the memory table is true with samples and validation" table_is_true bf16 --batch 4 --sample-tokens 64 --sample-every 1 --val-every 1 --val-batches 2 --val "$tmp/wide.bin"
}

if [ -z "$no_gpu" ]; then
    build_all &
    for file in "${TEXT:-}" data/tinyshakespeare.txt "${TEST_DATA:-}/tinyshakespeare.txt"; do
        [ ! -s "$file" ] || { text=$file && break; }
    done
    [ -n "${text:-}" ] || { words 200000 1 >"$tmp/words.txt" && text=$tmp/words.txt; }
    make -s -j2 train_llama3 tokenize >"$tmp/make.log" 2>&1 && "$bin/tokenize" -o "$tmp/data.bin" --val-fraction 0.1 "$text" >/dev/null ||
        { cat "$tmp/make.log" && echo "FAIL the CPU programs are built" && echo "0 passed, 1 failed, 0 skipped" && exit 1; }
    echo "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1), $("$nvcc" --version | sed -n 's/.*release \([^,]*\),.*/nvcc \1/p'), $mode, text $text"
    for lane in parity kernels pairs sanitizer trainer; do lane_$lane & done
    wait
    echo "     builds and lanes: $(elapsed) s"
else
    for lane in parity kernels pairs sanitizer trainer; do lane_$lane; done
fi
lane_memory
if [ -z "$no_gpu" ]; then grep '^FAIL' "$results" | sed 's/^FAIL/    failed:/'; fi
passed=$(grep -c '^ok' "$results") failed=$(grep -c '^FAIL' "$results") skipped=$(grep -c '^skip' "$results")
summary
