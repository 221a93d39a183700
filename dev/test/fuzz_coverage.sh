#!/bin/sh
# fuzz_coverage.sh [STEM...] -- tells how many lines of the readers of input (dev/test/readers.txt) the fuzz targets reach with
# the inputs they have: those of build/fuzz/STEM and the committed seeds. Needs clang and LLVM's llvm-profdata and llvm-cov.
set -u
CLANG=${CLANG:-clang}
here=build/fuzz/coverage
mkdir -p $here || exit 1
[ $# -gt 0 ] || set -- $(ls dev/test/fuzz_*.c | sed 's/.*fuzz_\(.*\)\.c/\1/')
for tool in $CLANG llvm-profdata llvm-cov; do
    command -v "$tool" >/dev/null || { echo "skip fuzz_coverage: $tool is missing" && echo "0 passed, 0 failed, 1 skipped" && exit 0; }
done
for stem in "$@"; do
    $CLANG -std=c11 -O1 -g ${MARCH--march=native} -fsanitize=fuzzer -fprofile-instr-generate -fcoverage-mapping \
        -Wno-unknown-pragmas -I. "dev/test/fuzz_$stem.c" -o "$here/fuzz_$stem" -lm -lpthread || exit 1
    mkdir -p "build/fuzz/$stem"
    LLVM_PROFILE_FILE=$here/$stem.raw "$here/fuzz_$stem" -runs=0 -close_fd_mask=3 "build/fuzz/$stem" "dev/test/corpus/$stem" \
        >"$here/$stem.log" 2>&1 || { echo "FAIL fuzz_$stem: see $here/$stem.log" && exit 1; }
    llvm-profdata merge -sparse "$here/$stem.raw" -o "$here/$stem.profdata" &&
        llvm-cov export -format=lcov -instr-profile="$here/$stem.profdata" "$here/fuzz_$stem" >"$here/$stem.lcov" || exit 1
done
python3 dev/test/fuzz_coverage.py dev/test/readers.txt $here/*.lcov
