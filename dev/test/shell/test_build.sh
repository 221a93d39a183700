#!/bin/sh
# test_build.sh -- tests what make chooses and says, with compilers, nvcc and nvidia-smi that are stubs: what each setting rebuilds,
# for which cards it compiles, and what a toolkit that will not do is told. Run from the project's root.
. dev/test/lib.sh
cd "$tmp" || exit 1
unset MAKEFLAGS MAKELEVEL GPU_ARCH PTX_ONLY PRECISION NVCC CUDA_HOME

# --- flags that break a promise --------------------------------------------------------------------------------------------------

for flags in -ffast-math -Ofast "-O2 -ffinite-math-only"; do
    echo '#include "llmc/base/utils.h"' | ${CC:-cc} -std=c11 $flags -fsyntax-only -I"$root" -x c - >made.txt 2>&1
    check "$flags is refused where it is compiled" grep -q 'error.*without -ffast-math' made.txt
done

make -s -C "$root" emulated NVCC= CUDA_HOME=/none PRECISION=FP32 EMULATED_ARCH=80 >made.txt 2>&1
check "make emulated names what is missing" grep -q '^error: nvcc was not found' made.txt
(cd "$root" && make -s require-nvcc NVCC=/nowhere/nvcc) >made.txt 2>&1
check "so does an nvcc that is not there" grep -q '^error: /nowhere/nvcc was not found: install' made.txt
check "before it compiles" sh -c '! grep -q "fatal error" made.txt'

# --- for which cards make compiles -------------------------------------------------------------------------------------------

# codes CARDS KNOWN [SETTING]: prints what make would compile on a machine with these cards, with an nvcc that knows these
# architectures: the machine codes, then the PTX
codes() {
    mkdir -p cards
    printf '#!/bin/sh\nprintf "%%s\\n" %s\n' "$1" >cards/nvidia-smi
    printf '#!/bin/sh\nprintf "sm_%%s\\n" %s\n' "$2" >cards/nvcc
    chmod +x cards/nvidia-smi cards/nvcc
    env -u MAKEFLAGS -u GPU_ARCH -u PTX_ONLY -u PRECISION PATH="$tmp/cards:$PATH" \
        make -n -B -C "$root" NVCC="$tmp/cards/nvcc" ${3:+"$3"} train_llama3cu 2>&1 |
        grep "^$tmp/cards/nvcc" | grep -oE 'code=[a-z]+_[0-9a]+' | sed 's/^code=//' | paste -sd ' ' -
}
cuda13="75 80 86 87 88 89 90 90a 100 103 100f 110 120 121" cuda12="50 60 70 75 80 86 87 89 90 90a"
for arch in 75 80 86 87 89 100 103 110 120 121; do
    check "a card of $arch gets its own code" test "$(codes "${arch%?}.${arch#"${arch%?}"}" "$cuda13")" = "sm_$arch compute_$arch"
done
check "a card of 90 gets Hopper's code" test "$(codes 9.0 "$cuda13")" = "sm_90a compute_90"
check "a card that nvcc does not know gets the highest PTX below it" test "$(codes 12.0 "$cuda12")" = "sm_90a compute_90"
check "or the code of its generation" test "$(codes 12.1 "75 90 100 103 120")" = "sm_120 compute_120"
check "the PTX is the highest card's" test "$(codes "12.0 9.0 9.0" "$cuda13")" = "sm_120 sm_90a compute_120"
check "so it is of a given list" test "$(codes 9.0 "$cuda13" GPU_ARCH="120 86 100")" = "sm_86 sm_100 sm_120 compute_120"
check "a card before 75 is ignored" test "$(codes "6.1 8.9" "$cuda13")" = "sm_89 compute_89"
check "nvcc itself refuses a card older than all that it knows" test "$(codes 7.5 "80 90 120")" = "sm_75 compute_75"
check "without a card the code is an A100's" test "$(codes "" "$cuda13")" = "sm_80 compute_80"
for arch in sm_90 90a 200 900 9 72 "80 sm_90"; do
    env -u MAKEFLAGS -u PTX_ONLY make -n -C "$root" GPU_ARCH="$arch" train_llama3cu >made.txt 2>&1
    check "GPU_ARCH=$arch is refused" grep -q "GPU_ARCH is $arch, wanted numbers such as 75, 90 or 120" made.txt
done

summary
