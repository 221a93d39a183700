#!/bin/sh
# test_zoo_faults.sh -- tests that `make -C dev/cuda test-emulated` finds faults: each fault of the table is planted into a copy
# of a file of the zoo, whose tests must then fail, by a comparison and not by a crash. A fault that does not change its file is
# a failure, too. With `sanitizer`: that the emulated card's sanitizer names kind and line of each fault of sanitizer.cuh, and
# nothing else. Run from the project's root; it needs what the emulator needs, but no GPU.
. dev/test/lib.sh

# FILE | PRECISION | SED -E
faults() {
    cat <<'END'
rmsnorm | FP32 | /^        __syncthreads\(\);$/d
rmsnorm | FP32 | s/\(float\)rows\.C \+ eps\)/(float)rows.C)/
rmsnorm | BF16 | s/k < count; k\+\+/k < count - 1; k++/
rope | FP32 | s/\(blockIdx\.x % s\.T\) \* s\.HD/blockIdx.x * s.HD/
rope | BF16 | s/k < \(s\.NH \+ s\.NKV\) \* half/k < s.NH * half/
rope | FP32 | /rotate2_kernel\(f/,/^}/s/__syncthreads\(\);//
layout | FP32 | /permute2_kernel\(f/,/^}/s/__syncthreads\(\);//
layout | BF16 | s/h \/ group \* s\.HD;/h % s.NKV * s.HD;/
layout | FP32 | s/h < group; h\+\+/h < group - 1; h++/
layout | BF16 | s/largest = warp_largest\(largest\);//
softmax | FP32 | s/sum \* expf\(before - mine\)/sum/
softmax | BF16 | s/i % W < end \?/i % W < end - 1 ?/
swiglu | BF16 | s/gate_up \+ s\.F, s\.N/gate_up, s.N/
swiglu | FP32 | s/\(1\.0f \+ g \* \(1\.0f - s\)\)/(1.0f + g * s)/
matmul | BF16 | /the next buffer is full/s/__syncthreads\(\);//
matmul | BF16 | s/ahead \+= gridDim\.x/ahead += 1/
crossentropy | BF16 | s/s\.sum \*= expf\(s\.max - largest\);//
embedding | BF16 | s/i < N && pairs/i < N - 1 \&\& pairs/
adamw | FP32 | s/k % 4 != 0 \? f\.decay : 1/f.decay/
adamw | FP32 | s/FIRST \? 0 : sum\[i\]/0/
adamw | BF16 | s/\/ f\.sqrt_correction2//
attention_forward | FP32 | s/expf\(maxima\[w\] - best\) \* sums/sums/
attention_backward | FP32 | s/int t = u; t < s\.T/int t = u + 1; t < s.T/
overlap | FP32 | s/CUDA_CHECK\(cudaStreamWaitEvent\(stream, end\[i\]\)\);//
overlap | FP32 | s/out \+ i, arrived \+ i, now/out + i, arrived, now/
attention_forward | FP32 | s/NH \+ h \/ \(s\.NH \/ s\.NKV\)\)/NH + h % s.NKV)/
attention_backward | FP32 | s/group = h \/ \(s\.NH \/ s\.NKV\);/group = h % s.NKV;/
END
}

# command FILE PRECISION: prints the command that builds the file's program from $tmp/FILE.cu
command_of() {
    make -n -W "dev/cuda/$1.cu" PRECISION="$2" EMULATED_ARCH=90 "build/emulated/$2_90/zoo/$1" |
        sed -e ':more' -e '/\\$/{N;s/\\\n//;b more' -e '}' | grep -e '-x c++' |
        sed "s|build/emulated/zoo/$1.cu|$tmp/$1.cu|; s|-o build/emulated/[^ ]*|-o $tmp/program|"
}

is_caught() { # is_caught FILE PRECISION SED
    sed -E "$3" "dev/cuda/$1.cu" >"$tmp/planted" && ! cmp -s "$tmp/planted" "dev/cuda/$1.cu" || { echo "nothing was planted" && return 1; }
    sed -z -E -f dev/test/emulator/launches.sed "$tmp/planted" >"$tmp/$1.cu" && command_of "$1" "$2" | sh || return 1
    EMULATOR_SEED=1 timeout 120 "$tmp/program" >"$tmp/log" 2>&1
    tail -n 1 "$tmp/log" | grep -q ' [1-9][0-9]* failed'
}

# is_named VERSION KIND LINE: the program's report of this kind names the line
is_named() {
    timeout 120 build/emulated/BF16_90_sanitized/zoo/rmsnorm forward "$1" >"$tmp/log" 2>&1
    status=$?
    [ "$2" != none ] || { [ $status -eq 0 ] && return; }
    [ $status -eq 1 ] && awk -v kind="$2" -v at="sanitizer.cuh:$3," '/^[^ ]/ { of_kind = index($0, kind) == 1 }
        of_kind && index($0, at) { found = 1 } END { exit !found }' "$tmp/log"
}
if [ "${1:-}" = sanitizer ]; then
    kernels=dev/test/faults/sanitizer.cuh
    make -s SANITIZE=1 PRECISION=BF16 EMULATED_ARCH=90 MINE=$kernels build/emulated/BF16_90_sanitized/zoo/rmsnorm >"$tmp/log" 2>&1 ||
        { cat "$tmp/log" && exit 1; }
    awk '/\/\/ FAULT / { line = FNR; kind = $0; sub(/.* FAULT /, "", kind) }
        /^(A_BLOCK_A_ROW|VERSION_OF|LAUNCHED)\(/ { sub(/^[A-Z_]*\(/, ""); sub(/[,)].*/, ""); print $0 "|" line "|" kind }' $kernels >"$tmp/faults"
    version=5
    while IFS='|' read -r name line kind; do
        version=$((version + 1))
        check "$name: $kind" is_named $version "$kind" "$line"
    done <"$tmp/faults"
    check "versions are listed if one is not there" sh -c 'build/emulated/BF16_90_sanitized/zoo/rmsnorm forward 99 2>&1 |
        grep -q "no version 99; there are forward 1 2 3"'
    for line in "A10|no such card .* A100 SXM" "A100 --shape 1,2,3|no prediction for 1,2,3; forward takes the sizes N,C" "A100 --shape 0,8|wanted classic"; do
        check "--predict ${line%|*}" sh -c "build/emulated/BF16_90_sanitized/zoo/rmsnorm --predict ${line%|*} 2>&1 | grep '${line#*|}'"
    done
    for line in 'static float mine = one + two;|^[^ ]*mine.cuh:1:21: error: .*one' \
        "__device__ float two = 2;|mine.cuh: it adds no version to a ladder, so nothing of it would run"; do
        echo "${line%%|*}" >"$tmp/mine.cuh"
        check "MINE says: ${line#*|}" sh -c "make -s -C dev/cuda test-emulated FILES=softmax VARIANTS=FP32_90 MINE=$tmp/mine.cuh 2>&1 |
            tee /dev/stderr | grep -q '${line#*|}'"
    done
    check "the rest of the file has no fault" timeout 120 build/emulated/BF16_90_sanitized/zoo/rmsnorm 1 2 3 4 5
    summary
    exit
fi

make -s -C dev/cuda test-emulated >"$tmp/sound" 2>&1 || { tail -n 5 "$tmp/sound" && exit 1; }
faults >"$tmp/faults"
while read -r line; do
    file=${line%% | *} rest=${line#* | }
    check "$line" is_caught "$file" "${rest%% | *}" "${rest#* | }"
done <"$tmp/faults"
summary
