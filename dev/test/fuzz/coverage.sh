#!/bin/sh
# coverage.sh [STEM...] -- counts the lines of the readers of input (readers.txt) that the fuzz targets reach with the inputs
# they have: build/fuzz/STEM and the committed seeds (STEM/ in seeds.tar). Needs clang and LLVM's llvm-profdata and llvm-cov.
set -u
CLANG=${CLANG:-clang}
test=dev/test/fuzz here=build/fuzz/coverage
mkdir -p $here || exit 1
[ $# -gt 0 ] || set -- $(ls $test/fuzz_*.c | sed 's/.*fuzz_\(.*\)\.c/\1/')
for tool in $CLANG llvm-profdata llvm-cov; do
    command -v "$tool" >/dev/null && continue
    echo "skip fuzz_coverage: $tool is missing" && echo "0 passed, 0 failed, 1 skipped" && exit 0
done
fail() { # fail STEM WHAT: ends, since the coverage of a broken target means nothing
    echo "FAIL fuzz_$1 $2"
    echo "0 passed, 1 failed, 0 skipped"
    exit 1
}

for stem in "$@"; do
    target=$here/fuzz_$stem
    if [ ! -x "$target" ] || [ -n "$(find llmc dev/test dev/data -name '*.[ch]' -newer "$target" | head -n 1)" ]; then
        $CLANG -std=c11 -O1 -g ${MARCH--march=native} -fsanitize=fuzzer -fprofile-instr-generate -fcoverage-mapping \
            -Wno-unknown-pragmas -I. "$test/fuzz_$stem.c" -o "$target" -lm -lpthread || fail "$stem" "does not compile"
    fi
    mkdir -p "build/fuzz/$stem" && tar -xf $test/seeds.tar -C build/fuzz "$stem" || fail "$stem" "has no seeds"
    rm -f "$here/$stem.lcov"
    LLVM_PROFILE_FILE=$here/$stem.raw "$target" -runs=0 -timeout=120 -close_fd_mask=3 -artifact_prefix="build/fuzz/$stem-" \
        "build/fuzz/$stem" >"$here/$stem.log" 2>&1 || fail "$stem" "fails: see $here/$stem.log"
    llvm-profdata merge -sparse "$here/$stem.raw" -o "$here/$stem.profdata" &&
        llvm-cov export -format=lcov -instr-profile="$here/$stem.profdata" "$target" >"$here/$stem.lcov" || exit 1
done
python3 $test/coverage.py $test/readers.txt $here/*.lcov
