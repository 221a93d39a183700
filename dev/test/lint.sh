#!/bin/sh
# lint.sh -- static checks: every header compiles alone without warnings, with gcc and clang as C11 and (llmc) C++17. So does every
# .cuh with nvcc, and every C file with clang (for gcc: make WERROR=1 test). No function of a program may take more than 64 KiB
# of stack: threads may have 128 KiB (musl), and what runs on them calls little else. The tests may take more. shellcheck reads
# the shell scripts, and ruff the Python files. No line of C or CUDA has more than 128 columns. Each fault that is planted where a
# GPU is still changes its file. Skips a missing tool by name.
set -u
failed=0
warnings="-Wall -Wextra -Werror -Wno-unknown-pragmas"

run() { # run NAME COMMAND...
    name=$1
    shift
    "$@" || { failed=$((failed + 1)) && echo "FAIL $name"; }
}
have() { command -v "$1" >/dev/null || { echo "skip $1: it is not installed" && false; }; }

nvcc=$(command -v "${NVCC:-nvcc}" || command -v /usr/local/cuda/bin/nvcc || echo nvcc)
sources() {
    if have clang; then
        for file in *.c test_llama3.cu $(find dev -name '*.c'); do
            run "clang: $file" clang -std=c11 -O1 -march=native -c -o /dev/null $warnings -I. -x c "$file"
        done
    fi
    if have "$nvcc"; then
        for header in $(find llmc -name '*.cuh'); do # compiling to PTX is the fastest way to check host functions and kernels
            echo "#include \"$header\"" | run "nvcc: $header" "$nvcc" -x cu - -ptx -o /dev/null -arch=compute_90a -std=c++17 \
                -DPRECISION_BF16 -Werror all-warnings -diag-suppress 177 -I.
        done
    fi
    [ $failed -eq 0 ]
}
log=$(mktemp) || exit 1
trap 'rm -f "$log" "$log.faults"' EXIT
trap 'exit 130' INT TERM
sources >"$log" 2>&1 & # beside all that follows: it takes about half of the time
sources=$!

for cc in gcc clang; do
    have $cc || continue
    for header in $(find llmc dev/data -name '*.h'); do
        echo "#include \"$header\"" | run "$cc, C11: $header" $cc -std=c11 -fsyntax-only $warnings -I. -x c -
        case $header in dev/*) continue ;; esac
        echo "#include \"$header\"" | run "$cc, C++17: $header" $cc -std=c++17 -fsyntax-only $warnings \
            -Wno-missing-field-initializers -I. -x c++ -
    done
done
if have gcc; then
    for file in train_llama3.c dev/data/*.c; do
        run "stack frames: $file" gcc -std=c11 -O3 -march=native -fopenmp -c -o /dev/null $warnings -Wstack-usage=65536 \
            -I. "$file"
    done
fi
if have shellcheck; then
    run shellcheck shellcheck -s sh -S warning -e SC1091,SC2010,SC2034,SC2046,SC2154 $(find dev -name '*.sh')
    run "shellcheck: slurm.sbatch" shellcheck -s bash -S warning dev/scripts/slurm.sbatch
fi
# clang-format breaks code at 128 columns, but not comments
too_long() { awk 'length > 128 { print FILENAME ":" FNR ": " length " columns"; found = 1 } END { exit found }' "$@"; }
run "lines of at most 128 columns" too_long *.c *.cu $(find llmc dev -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cpp')
plants() { dev/test/faults/test_gpu_faults.sh plant >"$log.faults" || { grep FAIL "$log.faults" && false; }; }
run "faults for a GPU" plants
run "seeds of the fuzzers" dev/test/fuzz/fuzz.sh check
if have python3; then
    run "comments behind includes" python3 dev/test/defines.py
fi
# names that are unknown or unused (F), syntax (E9), pylint's errors (PLE), and of bugbear: shared default arguments, statements
# without effect, unused or late-bound loop variables
ruff=$(command -v ruff || command -v build/venv/bin/ruff || echo ruff)
if have "$ruff"; then run ruff "$ruff" check --quiet --no-cache --isolated --select F,E9,PLE,B006,B007,B018,B023 *.py dev; fi
wait $sources || failed=$((failed + 1))
cat "$log"
[ $failed -eq 0 ] && echo "no complaints"
