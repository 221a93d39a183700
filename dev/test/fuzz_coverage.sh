#!/bin/sh
# fuzz_coverage.sh [STEM...] -- tells how many lines of the readers of input (dev/test/readers.txt) the fuzz targets reach with
# the inputs they have: those of build/fuzz/STEM and the committed seeds. Needs clang and LLVM's llvm-profdata and llvm-cov.
set -u
CLANG=${CLANG:-clang}
here=build/fuzz/coverage
mkdir -p $here || exit 1
[ $# -gt 0 ] || set -- $(ls dev/test/fuzz_*.c | sed 's/.*fuzz_\(.*\)\.c/\1/')
for tool in $CLANG llvm-profdata llvm-cov; do
    command -v "$tool" >/dev/null && continue
    echo "skip fuzz_coverage: $tool is missing" && echo "0 passed, 0 failed, 1 skipped" && exit 0
done
fail() { # fail STEM WHAT: a target that breaks says nothing of coverage
    echo "FAIL fuzz_$1 $2"
    echo "0 passed, 1 failed, 0 skipped"
    exit 1
}

for stem in "$@"; do
    target=$here/fuzz_$stem
    if [ ! -x "$target" ] || [ -n "$(find llmc dev/test dev/data -name '*.[ch]' -newer "$target" | head -n 1)" ]; then
        $CLANG -std=c11 -O1 -g ${MARCH--march=native} -fsanitize=fuzzer -fprofile-instr-generate -fcoverage-mapping \
            -Wno-unknown-pragmas -I. "dev/test/fuzz_$stem.c" -o "$target" -lm -lpthread || fail "$stem" "does not compile"
    fi
    mkdir -p "build/fuzz/$stem"
    rm -f "$here/$stem.lcov"
    LLVM_PROFILE_FILE=$here/$stem.raw "$target" -runs=0 -timeout=120 -close_fd_mask=3 -artifact_prefix="build/fuzz/$stem-" \
        "build/fuzz/$stem" "dev/test/corpus/$stem" >"$here/$stem.log" 2>&1 || fail "$stem" "fails: see $here/$stem.log"
    llvm-profdata merge -sparse "$here/$stem.raw" -o "$here/$stem.profdata" &&
        llvm-cov export -format=lcov -instr-profile="$here/$stem.profdata" "$target" >"$here/$stem.lcov" || exit 1
done
python3 dev/test/fuzz_coverage.py dev/test/readers.txt $here/*.lcov
