#!/bin/sh
# machines.sh -- builds for machines that are not here, with -Werror: macOS of both processors by zig's compiler and headers
# (package ziglang), ARM Linux by Debian's gcc, and this machine's own by clang. qemu then runs the ARM programs: parity with
# PyTorch, unit tests, losses beside those of ./train_llama3, a kill and a resume. Each build has a copy of the sources.
. dev/test/lib.sh
zig="${PYTHON:-python3} -m ziglang cc"
arm=aarch64-linux-gnu
for tool in zig:"$zig --version" qemu-aarch64:"qemu-aarch64 --version" $arm-gcc:"$arm-gcc --version" clang:"clang --version"; do
    ${tool#*:} >/dev/null 2>&1 || { skip "${tool%%:*}" "it is not installed" 18 && summary && exit; }
done

# build NAME TARGETS FLAG...: makes them in $tmp/NAME; its output is in $tmp/NAME.log
build() {
    build_targets=$2 build_in=$tmp/$1
    shift 2
    mkdir "$build_in" && tar c --exclude='*.bin' --exclude='*.jsonl' Makefile *.c *.cu llmc dev | tar x -C "$build_in" &&
        make -C "$build_in" $build_targets WERROR=1 LIBEDIT=0 MICROHTTPD=0 NVCC= MARCH= "$@" >"$build_in.log" 2>&1
}
mac="train_llama3 tokenize test_llama3"
# clang takes longer than all else; -O1 has the same warnings. test_llama3 has the source of train_llama3 in it
{
    build macos-arm64 "$mac" CC="$zig -target aarch64-macos" OPENMP=0 OPT=-O1
    echo $? >"$tmp/macos-arm64.rc"
    build macos-x86_64 "tokenize test_llama3" CC="$zig -target x86_64-macos" OPENMP=0 OPT=-O1
    echo $? >"$tmp/macos-x86_64.rc"
} &
macs=$!

check "builds for ARM Linux with default flags" build linux-arm64 "$mac build/test_utils build/test_logger" CC=$arm-gcc
run() { timeout -k 5 200 qemu-aarch64 -L /usr/$arm "$@"; }
for program in test_llama3 build/test_utils build/test_logger; do
    check "ARM: $program passes" run "$tmp/linux-arm64/$program"
done
token_file "$tmp/tokens.bin" 3000 97
flags="--model $pairs/fp8 --train $tmp/tokens.bin --batch 4 --seq 64 --steps 400 --checkpoint-every 4 --sample-tokens 0 --threads 1"
check "trains here" "$bin/train_llama3" $flags --stop-after 12 --out "$tmp/here"
check "ARM: trains" run "$tmp/linux-arm64/train_llama3" $flags --stop-after 12 --out "$tmp/whole"
check "ARM: 12 losses as here" close_steps 1e-5 1e-5 "$tmp/here" "$tmp/whole" 12
qemu-aarch64 -L /usr/$arm "$tmp/linux-arm64/train_llama3" $flags --out "$tmp/cut" >"$tmp/log" 2>&1 &
started=$!
for _ in $(seq 600); do [ -d "$tmp/cut/step_00000004" ] && break || sleep 0.05; done
kill -9 $started
wait $started 2>/dev/null
check "ARM: killed after a checkpoint" test -d "$tmp/cut/step_00000004" -a ! -d "$tmp/cut/step_00000012"
check "ARM: resumes" run "$tmp/linux-arm64/train_llama3" $flags --stop-after 12 --resume --out "$tmp/cut"
check "ARM: as if never killed" cmp "$tmp/whole/step_00000012/model.safetensors" "$tmp/cut/step_00000012/model.safetensors"

headers=$(NVCC='' dev/make/choose.sh headers) card=build/emulated/FP32_90/zoo/rmsnorm
if [ -n "$headers" ] && command -v $arm-g++ >/dev/null; then
    check "ARM: the emulated card builds" make -s -C "$tmp/linux-arm64" $card PRECISION=FP32 EMULATED_ARCH=90 \
        CC=$arm-gcc CXX=$arm-g++ NVCC= MARCH= CUDA_INCLUDE="$headers"
    check "ARM: its kernels pass" run "$tmp/linux-arm64/$card"
else
    skip "the emulated card on ARM" "$arm-g++ or the headers of the CUDA toolkit are not installed" 2
fi

check "builds with clang" build clang "test_llama3" CC=clang OPT=-O1
check "clang: test_llama3 passes" "$tmp/clang/test_llama3"
wait $macs
for name in macos-arm64 macos-x86_64; do
    check "$name compiles and links" grep -qx 0 "$tmp/$name.rc"
    grep -E "error:|warning:" "$tmp/$name.log"
    check "$name is a program for macOS" sh -c "od -An -tx1 -N4 '$tmp/$name/test_llama3' | grep -q 'cf fa ed fe'"
done
summary
