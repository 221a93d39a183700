# programs.sh -- tests of test_gpu.sh: runs the test programs, and test_llama3cu on the committed pairs and on larger pairs.

compiler_is_content() {
    for v in bf16:train_llama3cu fp32:train_llama3cu bf16:test_attention_cu; do need "${v%%:*}" "${v#*:}" || return 1; done
    ! grep -iE 'spill|serializ' "$build"/*.log
}

# program LIMIT VARIANT TARGET [ARGUMENT...]: the program exits with 0
program() {
    p_limit=$1 p_variant=$2 p_target=$3
    shift 3
    need "$p_variant" "$p_target" || return 1
    p_path=$build/$p_variant/$p_target
    [ -x "$p_path" ] || p_path=$build/$p_variant/build/$p_target
    cd "$build/$p_variant" && limit "$p_limit" "$p_path" "$@" >"$tmp/$p_variant.$p_target.out" 2>&1
    p_status=$?
    # put the heading in front of each failure
    awk '/^[^ ]/ { heading = $0; sub(/, [^,]*state.safetensors$/, "", heading); sub("dev/test/pairs/", "", heading) }
         /^ +FAIL/ { print "FAIL " heading " |" $0; next } { print }' "$tmp/$p_variant.$p_target.out"
    echo "REMARK $(tail -n 1 "$tmp/$p_variant.$p_target.out")"
    return $p_status
}

# committed LIMIT VARIANT: the committed pairs, each with a limit of its own
committed() {
    for pair in mha_odd gqa2_untied_rope8 tied_gqa4_rope32 documents fp8 lora_all lora_some; do
        program "$1" "$2" test_llama3cu "dev/test/pairs/$pair" "dev/test/pairs/$pair.state.safetensors" || return 1
    done
}

has_torch() { "$python" -c 'import torch, safetensors' 2>/dev/null || { echo "$python has no torch or no safetensors (see requirements.txt)" && return 1; }; }

pairs_written() {
    has_torch || return 77
    if in_all; then set -- ; else set -- --seeds 1 --cases hd10 hd64_documents hd64_groups2 hd128_groups2 hd256_groups1 one_token tiny; fi
    limit 240 "$python" dev/test/gpu/gpu_pairs.py --out "$tmp/pairs" --jobs $((cores / 2 + 1)) "$@" && touch "$tmp/pairs/whole"
}

# pair_passes VARIANT PAIR: saves the output; the time limit includes compiling PTX
pair_passes() { limit 150 "$build/$1/test_llama3cu" "$tmp/pairs/$2" "$tmp/pairs/$2.state.safetensors" >"$tmp/pair.$1.$2" 2>&1; }

# pairs_pass VARIANT SEEDS: all pairs whose seed is one of these digits
pairs_pass() {
    [ -e "$tmp/pairs/whole" ] || { echo "the pairs were not written" && return 77; }
    need "$1" test_llama3cu || return 1
    p_running=0 p_failed=0 p_passed=0
    for p_state in "$tmp"/pairs/*_s[$2].state.safetensors; do
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

# faults_are_caught LIMIT PATTERN: plants the faults of the table's lines that match. Waits until the builds for other tests are
# done
faults_are_caught() {
    while [ ! -e "$tmp/built" ]; do sleep 1; done
    # the architecture is the Makefile's choice
    limit "$1" env -u GPU_ARCH NVCC="$nvcc" TEST_TMP="$tmp" JOBS=$((cores > 4 ? cores - 2 : cores)) nice dev/test/faults/test_gpu_faults.sh run "$2" >"$tmp/faults.out" 2>&1
    f_status=$?
    cat "$tmp/faults.out"
    echo "REMARK $(tail -n 1 "$tmp/faults.out")"
    return $f_status
}

# faults in code for several GPUs; the cards cannot hold many such runs at a time
faults_between_gpus_are_caught() {
    [ "$(nvidia-smi -L | grep -c '^GPU')" -ge 2 ] || { echo "it needs 2 GPUs" && exit 77; }
    cores=8 && faults_are_caught 500 '[.]sh (as|zero)'
}
