#!/bin/sh
# fuzz.sh SECONDS [STEM...] -- runs each fuzz target (dev/test/fuzz_STEM.c) for SECONDS, starting from its committed seeds
# (dev/test/corpus/STEM), under AddressSanitizer and UndefinedBehaviorSanitizer. New inputs stay in build/fuzz/STEM for the
# next run. A failing input is saved as build/fuzz/STEM-crash-* (-timeout-*, -oom-*). CLANG: a clang with libFuzzer.
set -u
seconds=${1:-20}
[ $# -eq 0 ] || shift
CLANG=${CLANG:-clang}
here=build/fuzz
passed=0 failed=0 skipped=0
mkdir -p $here || exit 1
[ $# -gt 0 ] || set -- $(ls dev/test/fuzz_*.c | sed 's/.*fuzz_\(.*\)\.c/\1/')

echo 'int LLVMFuzzerTestOneInput(const char* d, unsigned long n) { return d && n > 99; }' >$here/probe.c
if ! $CLANG -fsanitize=fuzzer,address,undefined $here/probe.c -o $here/probe 2>/dev/null; then
    for stem in "$@"; do echo "skip fuzz_$stem: $CLANG is missing or has no libFuzzer (Debian: clang, libclang-rt-14-dev)"; done
    echo "0 passed, 0 failed, $# skipped"
    exit 0
fi
for stem in "$@"; do
    mkdir -p "$here/$stem" && cp dev/test/corpus/"$stem"/* "$here/$stem" 2>/dev/null
    if ! $CLANG -std=c11 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -Wno-unknown-pragmas -I. \
        "dev/test/fuzz_$stem.c" -o "$here/fuzz_$stem" -lm -lpthread; then
        failed=$((failed + 1))
        echo "FAIL fuzz_$stem does not compile"
    elif "$here/fuzz_$stem" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 -verbosity=1 \
        -artifact_prefix="$here/$stem-" "$here/$stem" >"$here/$stem.log" 2>&1; then
        passed=$((passed + 1))
        echo "ok   fuzz_$stem: $(sed -n 's/^stat::number_of_executed_units: *//p' "$here/$stem.log") inputs in $seconds s"
    else
        failed=$((failed + 1))
        echo "FAIL fuzz_$stem: see $here/$stem.log"
        grep -m 3 -E 'ERROR|runtime error|SUMMARY|Test unit written' "$here/$stem.log" | sed 's/^/    /'
    fi
done
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
