#!/bin/sh
# lint.sh -- static checks. Every header compiles alone without warnings: .h as C11 with gcc, .cuh for the emulated card. All .h
# of llmc compile together as C++17 with gcc and clang. clang reads every C file (gcc: make WERROR=1 test). FULL=1 compiles
# headers alone with each compiler in each language, and .cuh with nvcc. Without FULL nvcc warns only when it builds. Rooms of
# llmc include only files of lower floors, files and functions are short, and one file knows what only Linux or macOS has. Shell
# scripts are read by shellcheck, Python files by ruff. No line of C or CUDA has more than 128 columns. Each fault that
# test_gpu_faults.sh plants still changes its file. Each promise of dev/test/promises.txt still stands in its file, and so does
# its test. A missing tool is skipped and named.
set -u
failed=0
warnings="-Wall -Wextra -Werror -Wno-unknown-pragmas"

run() { # run NAME COMMAND...
    name=$1
    shift
    "$@" || { failed=$((failed + 1)) && echo "FAIL $name"; }
}
have() { command -v "$1" >/dev/null || { echo "skip $1: it is not installed" && false; }; }

headers=$(find llmc -name '*.h') layers=$(find llmc -name '*.cuh') full=${FULL:-0}
nvcc=$(command -v "${NVCC:-nvcc}" || command -v /usr/local/cuda/bin/nvcc || echo nvcc)
emulator=$PWD/dev/test/emulator

# alone NAME HEADER COMMAND...: compiles a file that only includes the header
alone() {
    alone_name=$1 header=$2
    shift 2
    run "$alone_name: $header" "$@" -I. - <<END
#include "$header"
END
}
c11() { for header in "$@"; do alone "$cc, C11" "$header" $cc -std=c11 -fsyntax-only $warnings -x c; done; }
cpp="-std=c++17 -fsyntax-only $warnings -Wno-missing-field-initializers -x c++"
together() { for header in $headers; do echo "#include \"$header\""; done | $cc $cpp -I. -; }
cpp17() { for header in "$@"; do alone "$cc, C++17" "$header" $cc $cpp; done; }
for_emulator() { # in build/emulated/sources, where launches are rewritten; device.h is compiled once, and takes most of the time
    make -s build/emulated/sources && cd build/emulated/sources || return 1
    card="g++ -std=c++17 -fopenmp -Wno-psabi -DEMULATED_ARCH=900 -DPRECISION_BF16 -I$emulator -isystem ${nvcc%/bin/nvcc}/include"
    run "emulated card: device.h" $card -x c++-header "$emulator/device.h" -o ../device.h.gch
    for header in $layers; do alone "emulated card" "$header" $card -fsyntax-only -include ../device.h -x c++; done
}
with_nvcc() { # compiling to PTX is the fastest way
    for header in $layers; do
        alone nvcc "$header" "$nvcc" -ptx -o /dev/null -arch=compute_90a -std=c++17 -DPRECISION_BF16 -Werror all-warnings \
            -diag-suppress 177 -x cu
    done
}
sources() {
    if have "$nvcc"; then
        (for_emulator && [ $failed -eq 0 ]) || failed=$((failed + 1))
        [ "$full" = 0 ] || with_nvcc
    fi
    if have clang; then
        serve=dev/serve/serve.c
        if ! echo '#include <microhttpd.h>' | clang -E -x c - >/dev/null 2>&1; then
            echo "skip libmicrohttpd: clang: $serve, it is not installed" && serve=
        fi
        make -s build/serve_page.h || return 1
        for file in *.c test_llama3.cu $serve $(find dev -name '*.c' ! -path dev/serve/serve.c); do
            run "clang: $file" clang -std=c11 -march=native -fsyntax-only $warnings -I. -x c "$file"
        done
    fi
    [ $failed -eq 0 ]
}
# the words of a file without line breaks and the marks of comments
words_of() { tr '\n' ' ' <"$1" | sed 's/ \*\+ / /g; s, // , ,g; s/  */ /g'; }
# promised_in FILE: the promises of a page or a header that must be listed: rows of tables, and lines with a number
promised_in() {
    case $1 in
        *.md) sed -n '/^## Promises/,/^## Figures/s/^| \([^|]*[^| -]\) *|.*/\1/p; /^## Threat model/,/^### /s/^[0-9].*/&/p' "$1" ;;
        *) sed -n '1,/\*\//s/^ \*  *\([0-9]\. \)/\1/p' "$1" ;;
    esac | grep -vxE 'promise|11\. .*'
}
promises() { # each line of dev/test/promises.txt names words and a test that exist, and no promise lacks a line
    list=dev/test/promises.txt
    grep -v '^#' $list | while IFS='|' read -r file promise test name; do
        file=${file% } promise=${promise# } promise=${promise% } test=${test# } test=${test% } name=${name# }
        words_of "$file" | grep -qF -- "$promise" || echo "$file: does not say any more: $promise"
        case $name in *"(") grep -q "[^a-z_]${name%?}[()]" "$test" ;; *) grep -qF -- "$name" "$test" ;; esac ||
            echo "$test: has no $name, which holds the promise of $file: $promise"
    done
    for file in dev/doc/reliability.md $(find llmc/files -name '*.h'); do
        sed -n "s,^$file | \(.*\) | [^|]* | [^|]*,\1,p" $list >"$log.listed"
        promised_in "$file" | grep -vFf "$log.listed" | sed "s,^,$list: lacks a line of $file: ,"
    done
}
no_broken_promise() { promises >"$log.promises" && cat "$log.promises" && [ ! -s "$log.promises" ]; }
log=$(mktemp) || exit 1
trap 'rm -f "$log" "$log".*' EXIT
trap 'exit 130' INT TERM
sources >"$log" 2>&1 & # runs in the background beside the checks below: it takes about half of the time
sources=$!

for cc in gcc clang; do
    have $cc || continue
    [ $cc$full = clang0 ] || c11 $headers $(find dev/data -name '*.h')
    [ "$full" = 0 ] || cpp17 $headers
    run "$cc, C++17: all headers together" together
done
run "promises: dev/test/promises.txt" no_broken_promise
if have shellcheck; then
    bash=$(grep -lrE '^#!.*bash' dev --include='*.sh') lacks=SC1091,SC2010,SC2034,SC2046,SC2154
    run "shellcheck, sh" shellcheck -s sh -S warning -e $lacks $(find dev -name '*.sh' | grep -vxF "$bash")
    run "shellcheck, bash" shellcheck -s bash -S warning -e $lacks $bash .ci/run dev/scripts/slurm.sbatch
fi
# clang-format breaks code at 128 columns, but not comments
too_long() { awk 'length > 128 { print FILENAME ":" FNR ": " length " columns"; found = 1 } END { exit found }' "$@"; }
run "lines of at most 128 columns" too_long *.c *.cu \
    $(find llmc dev -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cpp')
# what one system alone has, or does in its own way
own='__(APPLE|linux|ELF)__|getrandom|accept4|pipe2|SOCK_CLOEXEC|ppoll|sem_[a-z]*wait|sigtimedwait|prctl|st_mtim[^e]|fsync\(.*;|versionsort|renameat2|"/proc'
one_room() { ! grep -rnE "$own" llmc dev/data dev/serve *.c *.cu --include='*.[ch]*' --exclude=os.h; }
run "only llmc/base/os.h knows the system" one_room
plants() { dev/test/faults/test_gpu_faults.sh plant >"$log.faults" || { grep FAIL "$log.faults" && false; }; }
run "faults for a GPU" plants
run "seeds of the fuzzers" dev/test/fuzz/fuzz.sh check
if have python3; then
    run "readers of input" python3 dev/test/fuzz/coverage.py dev/test/fuzz/readers.txt
    run "comments behind includes" python3 dev/test/defines.py
    run "floors" python3 dev/test/floors.py
    run "sizes" python3 dev/test/sizes.py
fi
# names that are unknown or unused (F), syntax (E9), pylint's errors (PLE), and of bugbear: shared default arguments, statements
# without effect, unused or late-bound loop variables
ruff=$(command -v ruff || command -v build/venv/bin/ruff || echo ruff)
if have "$ruff"; then run ruff "$ruff" check --quiet --no-cache --isolated --select F,E9,PLE,B006,B007,B018,B023 *.py dev; fi
wait $sources || failed=$((failed + 1))
cat "$log"
[ $failed -eq 0 ] && echo "no complaints"
