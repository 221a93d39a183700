# sanitizer.sh -- tests of test_gpu.sh: compute-sanitizer must report nothing on our kernels. Reports on kernels of cuBLAS,
# which read padding, do not count.

our_kernels() { grep -hoE '\b[a-z0-9_]+_kernel\b' "$root"/llmc/*.cuh "$root"/llmc/*/*.cuh | sort -u | tr '\n' '|' | sed 's/|$//'; }

# is_silent TOOL NAME SECONDS COMMAND...: runs the command under the tool. Its tests pass, and the tool reports nothing on our
# kernels
is_silent() {
    tool=$1 name=$2 seconds=$3 log=$(mktemp "$tmp/$1.XXXXXX")
    shift 3
    sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null) ||
        { echo "compute-sanitizer is not installed" && exit 77; }
    # check only our kernels where possible. initcheck must watch all kernels to know what was written; under CUDA 13's racecheck,
    # cuBLAS kernels that are filtered out trap
    filter=
    case $tool in initcheck | racecheck) ;; *) ! "$sanitizer" --help | grep -q 'kernel-name ' || filter="--kernel-name kns=_kernel" ;; esac
    [ "$tool" != memcheck ] || filter="$filter --report-api-errors no"
    limit "$seconds" "$sanitizer" --tool "$tool" --show-backtrace no --print-limit 2000 $filter "$@" >"$log" 2>&1
    if grep -qi 'device not supported' "$log"; then echo "compute-sanitizer does not support this machine" && exit 77; fi
    grep -qE '^========= (ERROR|RACECHECK) SUMMARY' "$log" || { echo "error: no report:" && tail -n 4 "$log" && return 1; }
    grep -qE ' 0 failed' "$log" || { grep -E 'FAIL|error' "$log" | head -n 4 && echo "error: the program failed under $tool" && return 1; }
    if grep -E '^=========' "$log" | grep -E "\b($(our_kernels))\b" >"$log.ours"; then
        echo "error: $tool, $name: $(grep -c . "$log.ours") lines on our kernels:"
        sed -E 's/.*\b(at|by|Race reported)/\1/' "$log.ours" | grep -oE "($(our_kernels)).{0,80}" | sort | uniq -c | sort -rn | head -n 5
        grep -B 2 -m 2 -E "\b($(our_kernels))\b" "$log"
        return 1
    fi
    echo "REMARK $name: $(grep -E 'SUMMARY' "$log" | tail -n 1 | sed 's/=* *//') in kernels of cuBLAS"
}

# sanitize TOOL VARIANT PAIR...: runs test_llama3cu on each pair under the tool
sanitize() {
    s_tool=$1 v=$2
    shift 2
    need "$v" test_llama3cu || return 1
    # memory that the test fills counts as initialized, so FP32 does not fill. 16-bit builds must fill, because initcheck does
    # not see the writes of cuBLAS' kernels for Hopper
    [ "$s_tool $v" != "initcheck fp32" ] || export NO_FILL=1
    count=0
    for pair in "$@"; do
        dir=$tmp/pairs/$pair
        [ -d "$dir" ] || dir=$pairs/$pair
        [ -d "$dir" ] || continue
        count=$((count + 1))
        is_silent "$s_tool" "$pair" 100 "$build/$v/test_llama3cu" "$dir" "$dir.state.safetensors" || return 1
    done
    [ $count -gt 0 ] || { echo "no pair to run on" && return 1; }
}

# sanitize_kernels TOOL VARIANT: runs under the tool the kernels that only several GPUs use: ordered sums, heads for parts of
# rows, the norm and the losses of parts, AdamW on a shard
sanitize_kernels() {
    need "$2" test_kernels_cu || return 1
    for test in ordered_sums_agree heads_are_packed attention_by_heads norm_and_loss_sums losses_add_up adamw_takes_gradients_from_a_window; do
        # the tool does not follow the mbarrier that gives a stage of the ring back (dev/results/nvidia-h200.md)
        [ "$1 $test" != "racecheck attention_by_heads" ] || continue
        is_silent "$1" $test 150 "$build/$2/build/test_kernels_cu" $test || return 1
        ! grep -q '^0 passed' "$log" || { echo "error: no test is named $test" && return 1; }
    done
}
