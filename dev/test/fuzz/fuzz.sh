#!/bin/bash
# fuzz.sh seconds N|inputs N [STEM...] -- runs each fuzz target (fuzz_STEM.c) for N seconds or N inputs under AddressSanitizer
# and UndefinedBehaviorSanitizer, with the words of words.txt. A run begins with all seeds (STEM/ in seeds.tar); 0 inputs
# replay the seeds alone. New inputs stay in build/fuzz/STEM for the next run. A failing input is saved as
# build/fuzz/STEM-crash-* (-timeout-*, -oom-*, -leak-*); build/fuzz/fuzz_STEM FILE repeats it.
# fuzz.sh minimize [STEM...] -- replaces the seeds without a name by the fewest inputs of build/fuzz/STEM with the same reach.
# fuzz.sh add STEM FILE... -- adds seeds; fuzz.sh remove STEM NAME... removes them.
# fuzz.sh coverage [STEM...] -- counts the lines of the readers of input (readers.txt) that the targets reach with the inputs they
# have: build/fuzz/STEM and the seeds. It needs LLVM's llvm-profdata and llvm-cov.
# fuzz.sh check -- unpacks and packs all seeds: that must give the committed bytes. Each target has seeds, and the words are
# those of targets. It needs no clang.
# The seeds of all targets are one tar file, sorted, without times or owners, so that a changed seed changes its own bytes alone.
# To read its changes in git diff: git config diff.tar.textconv "tar --to-command='echo \"== \$TAR_FILENAME\"; cat; echo' -xf"
# CLANG: a clang with libFuzzer. JOBS: targets that run at a time. OPT: -O1, or -O0, which builds in a quarter of the time and
# runs at about half the speed: better for a few seconds.
set -u
export LC_ALL=C # the order of names
CLANG=${CLANG:-clang} OPT=${OPT:--O1}
test=dev/test/fuzz here=build/fuzz programs=build/fuzz
flags="-gline-tables-only -fsanitize=fuzzer,address,undefined -fno-sanitize-coverage=trace-cmp -fno-sanitize-recover=all"
most=65536  # bytes of a target's seeds without a name
targets=$(ls $test/fuzz_*.c | sed 's/.*fuzz_\(.*\)\.c/\1/')
mkdir -p $here || exit 1

# unpack STEM FOLDER; pack FOLDER: the same files always give the same bytes, on stdout
unpack() { mkdir -p "$2" && tar -xf $test/seeds.tar -C "$2" --strip-components=1 "$1"; }
pack() {
    (cd "$1" && find -- * -type f | sort |
        tar --format=ustar -b1 --mode=644 --mtime=@0 --owner=0 --group=0 --numeric-owner -cf - -T -)
}
afresh() { rm -rf $here/seeds && mkdir $here/seeds && tar -xf $test/seeds.tar -C $here/seeds; } # all seeds, in build/fuzz/seeds
pack_seeds() { # pack_seeds STEM: the folders become the committed file
    pack $here/seeds >$here/seeds.tar && mv $here/seeds.tar $test/seeds.tar &&
        echo "ok   $1 has $(ls "$here/seeds/$1" | wc -l) seeds, $(cat "$here/seeds/$1"/* | wc -c) bytes"
}

job=$1
shift
case $job in
check)
    afresh && pack $here/seeds | cmp - $test/seeds.tar ||
        { echo "FAIL $test/seeds.tar is packed otherwise than fuzz.sh add packs it" && exit 1; }
    [ "$(ls $here/seeds)" = "$targets" ] || { echo "FAIL $test/seeds.tar has folders that are no targets, or not all" && exit 1; }
    for stem in $(sed -n 's/^\[\(.*\)\]$/\1/p' $test/words.txt); do
        [ -f "$test/fuzz_$stem.c" ] || { echo "FAIL $test/words.txt has words for $stem, which is no target" && exit 1; }
    done
    exit 0
    ;;
add | remove)
    stem=$1
    shift
    afresh && mkdir -p "$here/seeds/$stem" || exit 1
    if [ "$job" = add ]; then cp -- "$@" "$here/seeds/$stem"; else (cd "$here/seeds/$stem" && rm -- "$@"); fi || exit 1
    pack_seeds "$stem"
    exit
    ;;
minimize) work=minimize ;;
coverage)
    work=cover programs=$here/coverage flags="-g -fsanitize=fuzzer -fprofile-instr-generate -fcoverage-mapping"
    mkdir -p $programs
    for tool in llvm-profdata llvm-cov; do
        command -v $tool >/dev/null || { echo "skip fuzz_coverage: $tool is missing" && echo "0 passed, 0 failed, 1 skipped" && exit 0; }
    done
    ;;
*)
    work=fuzz limit=$1
    shift
    ;;
esac
[ $# -gt 0 ] || set -- $targets

echo 'int LLVMFuzzerTestOneInput(const char* d, unsigned long n) { return d && n > 99; }' >$here/probe.c
if ! $CLANG -fsanitize=fuzzer,address,undefined $here/probe.c -o $here/probe 2>/dev/null; then
    for stem in "$@"; do echo "skip libFuzzer: fuzz_$stem, $CLANG is missing or lacks it (Debian: clang, libclang-rt-14-dev)"; done
    echo "0 passed, 0 failed, $# skipped"
    exit 0
fi

# compile STEM: builds the target unless it is newer than every source and has the same OPT. Comparisons are not traced: most are
# the sanitizer's own checks, and tracing them takes two thirds of the time. Comparisons of texts are traced all the same.
compile() {
    target=$programs/fuzz_$1
    [ -x "$target" ] && [ "$(cat "$target.opt" 2>/dev/null)" = "$OPT" ] &&
        [ -z "$(find llmc dev/test dev/data -name '*.[ch]' -newer "$target" | head -n 1)" ] && return
    $CLANG -std=c11 "$OPT" ${MARCH--march=native} $flags -Wno-unknown-pragmas -I. "$test/fuzz_$1.c" -o "$target" -lm -lpthread &&
        echo "$OPT" >"$target.opt"
}

stat() { sed -n "s/^stat::$1: *//p" "$here/$stem.log"; }

# fuzz STEM: runs the target and prints its line
fuzz() {
    stem=$1
    dict=$here/$stem.dict
    awk -v head="[$stem]" '/^\[/ { on = $0 == head; next } on' $test/words.txt >"$dict"
    start=$(date +%s)
    [ "$job" = seconds ] && bound=-max_total_time=$limit || bound=-runs=$limit
    # the targets' own output is closed: warnings would fill the log. An input takes milliseconds, and frees far less than the
    # quarantine holds. The timeout is long enough to mean a hang, since a busy machine may not run a target for many seconds
    ASAN_OPTIONS=quarantine_size_mb=16:${ASAN_OPTIONS-} \
        "$here/fuzz_$stem" "$bound" -timeout=120 -rss_limit_mb=2048 -print_final_stats=1 -verbosity=1 -close_fd_mask=3 \
        $([ -s "$dict" ] && echo "-dict=$dict") -artifact_prefix="$here/$stem-" "$here/$stem" >"$here/$stem.log" 2>&1
    status=$?
    seconds=$(($(date +%s) - start))
    findings=0 word=ok
    [ $status -eq 0 ] || { findings=1 && word=FAIL; }
    printf '%-4s %-24s %10s %8d %10s %9s %8d\n' $word "fuzz_$stem" "$(stat number_of_executed_units)" $seconds \
        "$(stat average_exec_per_sec)" "$(stat new_units_added)" $findings
    [ $status -eq 0 ] || grep -m 4 -E 'ERROR|runtime error|SUMMARY|Test unit written' "$here/$stem.log" | sed 's/^/    /'
    return $status
}

# minimize STEM: the smallest inputs come first, so that a limit on bytes costs the least
minimize() {
    seeds=$here/seeds/$1
    rm -rf "$here/$1.min" && mkdir -p "$here/$1.min"
    "$here/fuzz_$1" -set_cover_merge=1 -close_fd_mask=3 "$here/$1.min" "$here/$1" "$seeds" >"$here/$1.log" 2>&1 || return 1
    find "$seeds" -type f | grep -E '/[0-9a-f]{40}$' | while read -r old; do rm "$old"; done
    total=0
    ls -rS "$here/$1.min" | grep -E '^[0-9a-f]{40}$' | while read -r name; do
        size=$(wc -c <"$here/$1.min/$name")
        total=$((total + size))
        [ "$total" -gt $most ] && break
        cp "$here/$1.min/$name" "$seeds"
    done
    pack_seeds "$1"
}

# cover STEM: the lines that the target reaches
cover() {
    LLVM_PROFILE_FILE=$programs/$1.raw "$programs/fuzz_$1" -runs=0 -timeout=120 -close_fd_mask=3 -artifact_prefix="$here/$1-" \
        "$here/$1" >"$programs/$1.log" 2>&1 || { echo "FAIL fuzz_$1: see $programs/$1.log" && return 1; }
    llvm-profdata merge -sparse "$programs/$1.raw" -o "$programs/$1.profdata" && llvm-cov export -format=lcov \
        -instr-profile="$programs/$1.profdata" "$programs/fuzz_$1" >"$programs/$1.lcov"
}

# one STEM: a target that fails leaves its name in build/fuzz/failed
one() {
    if ! unpack "$1" "$here/$1"; then
        echo "FAIL fuzz_$1 has no seeds"
    elif ! compile "$1"; then
        echo "FAIL fuzz_$1 does not compile"
    elif $work "$1"; then
        return
    fi
    echo "$1" >>$here/failed
}

case $work in
    minimize) afresh && JOBS=1 || exit 1 ;; # since every target packs all seeds
    fuzz) printf '%-29s %10s %8s %10s %9s %8s\n' target inputs seconds "inputs/s" "new units" findings ;;
esac
: >$here/failed
running=0
for stem in "$@"; do
    one "$stem" &
    running=$((running + 1))
    [ $running -lt "${JOBS:-1}" ] || { wait -n; running=$((running - 1)); }
done
wait
failed=$(wc -l <$here/failed)
[ "$work$failed" != cover0 ] || exec python3 $test/coverage.py $test/readers.txt $programs/*.lcov
echo "$(($# - failed)) passed, $((failed)) failed, 0 skipped"
[ "$failed" -eq 0 ]
