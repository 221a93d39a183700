#!/bin/sh
# choose.sh TOPIC ... -- asks this machine what make cannot know. The answer goes to stdout. What was not found, and what that
# costs, is a line on stderr. POSIX's tools are enough, since macOS has no others. CC, CXX and NVCC are commands with their flags.
set -u
export LC_ALL=C PATH="$PATH:/usr/lib/wsl/lib" # where WSL has nvidia-smi; sudo forgets it
topic=$1
shift
tmp=$(mktemp -d "${TMPDIR:-/tmp}/llama3_make_XXXXXX" 2>/dev/null || mktemp -d ./llama3_make_XXXXXX) || exit 1
trap 'rm -rf "$tmp"' EXIT
say() { echo "make: $*" >&2; }
fail() { echo "error: $*" >&2 && exit 1; }

get() { # get NAME [VERSION [OTHER]]: the command that installs a library on this system. OTHER: its name on Arch and Alpine
    case "$(. /etc/os-release 2>/dev/null && echo "$ID ${ID_LIKE:-}") $(uname)" in
        *debian* | *ubuntu*) echo "apt-get install $1-dev${2:-}" ;;
        *fedora* | *rhel*) echo "dnf install $1-devel${2:-}" ;;
        *suse*) echo "zypper install $1-devel${2:-}" ;;
        *arch*) echo "pacman -S ${3:-$1}" ;;
        *alpine*) echo "apk add ${3:-$1}-dev" ;;
        *Darwin*) echo "brew install $1" ;;
        *) echo "install $1" ;;
    esac
}
builds() { # builds HEADER FLAGS [FUNCTION]: prints the flags if a program with that header builds with them, without a warning
    printf '#include <%s>\nint main(void) { volatile unsigned long f = (unsigned long)%s; return f == 1; }\n' "$1" "${3:-0}" >"$tmp/probe.c"
    eval "$CC \"\$tmp/probe.c\" -Werror $2 -o \"\$tmp/probe\"" >"$tmp/log" 2>&1 && echo "$2"
}
cards() { nvidia-smi --query-gpu=compute_cap,name --format=csv,noheader 2>&1 | tr -d '\r' | grep -E '^ *1?[0-9]\.[0-9] *(,|$)'; }
cuda_version() { eval "$NVCC --version" 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p'; }
# toolkit: the folder that nvcc itself says it belongs to
toolkit() { eval "$NVCC --dryrun -x cu /dev/null" 2>&1 | sed -n 's/^#\$ TOP=//p' | sed 's|/bin/\.\.$||'; }
word() { sed 's/[ ()&;]/\\&/g'; } # makes a path one word of the shell

case $topic in openmp | march | library) eval "$CC --version" >/dev/null 2>&1 || exit ;; esac # make itself names a missing compiler
case $topic in
    openmp)
        [ "${1:-}" != 0 ] || { echo -Wno-unknown-pragmas && exit; }
        builds omp.h -fopenmp && exit
        for at in /opt/homebrew/opt/libomp /usr/local/opt/libomp; do # Homebrew's, for the compiler of Apple
            builds omp.h "-Xpreprocessor -fopenmp -I$at/include -L$at/lib -lomp" && exit
        done
        say "no OpenMP ($(get libomp "" openmp)): the programs will run on one thread"
        echo -Wno-unknown-pragmas
        ;;
    march)
        case $(eval "$CC -dumpmachine") in a*) builds stdio.h -mcpu=native && exit ;; esac # ARM
        builds stdio.h -march=native || builds stdio.h -mcpu=native || # POWER
            say "code for every CPU of its kind: $CC knows no -march=native; MARCH= sets another"
        ;;
    opt)
        # with these the layers' loops are as fast as with -O3, which takes longer to build; clang has no such flags
        builds stdio.h "-O2 -ftree-vectorize -fvect-cost-model=dynamic -fipa-cp-clone" || echo -O3
        ;;
    library) # library HEADER FLAG FUNCTION [NAME COST]: 1 if it is there, else 0
        builds "$1" "$2" "$3" >/dev/null && echo 1 && exit
        [ $# -lt 5 ] || say "no $4 ($(get "$4")): $5"
        echo 0
        ;;
    missing)
        fail "$1 was not found: $(get "$1")"
        ;;
    page) # page FILE: the page as a C array, and for its policy the SHA-256 of its style and its script, in base64
        for tool in od awk base64; do command -v $tool >/dev/null || fail "$tool was not found: it is needed to build ./serve"; done
        for block in style script; do
            { echo && sed "1,/^<$block>\$/d;/^<\/$block>\$/,\$d" "$1"; } >"$tmp/block"
            sum=$({ sha256sum || shasum -a 256 || openssl dgst -sha256 -r; } <"$tmp/block" 2>/dev/null | cut -c 1-64)
            [ ${#sum} -eq 64 ] || fail "neither sha256sum, shasum nor openssl was found: one is needed to build ./serve"
            octal=$(echo "$sum" | awk 'function nibble(i) { return index("0123456789abcdef", substr($0, i, 1)) - 1 }
                { for (i = 1; i < 64; i += 2) { printf "\\%03o", 16 * nibble(i) + nibble(i + 1) } }')
            echo "#define SERVE_$(echo $block | tr a-z A-Z) \"'sha256-$(printf "$octal" | base64)'\"" || exit 1
        done
        echo "static const unsigned char serve_page[] = {" && od -An -v -tx1 "$1" | sed 's/[0-9a-f][0-9a-f]/0x&,/g' && echo "};"
        ;;
    nvcc) # nvcc HOME: the compiler in a folder that was given, else in PATH, else where systems have it
        for at in ${1:+"$1/bin/nvcc"} "$(command -v nvcc)" /usr/local/cuda/bin/nvcc /usr/lib/cuda/bin/nvcc /opt/cuda/bin/nvcc; do
            [ ! -x "$at" ] || { echo "$at" | word && exit; }
        done
        ;;
    archs) # the architectures of the cards that can be used, each as the highest that nvcc knows
        for card in $(cards | sed 's/,.*//' | tr -d ' .' | awk '$1 >= 75'); do
            eval "${NVCC:-false} --list-gpu-code" 2>/dev/null |
                awk -F_ -v c="$card" '/^sm_[0-9]+$/ && $2 <= c && $2 > most { most = $2 } END { print most ? most : c }'
        done
        ;;
    cards) # cards ARCHS HOME: says what nvcc builds for; without ARCHS, only why no card can be used
        [ -z "$1" ] || say "CUDA $(cuda_version) in $(toolkit), for GPU_ARCH=\"$1\""
        [ -z "${2:-}" ] || [ -x "$2/bin/nvcc" ] || say "CUDA_HOME=$2 was not taken: it has no bin/nvcc"
        cards | awk -F, '$1 < 7.5 { print "make: the GPU" $2 " of compute capability " $1 " is too old: 7.5 (T4) or newer is needed" }' >&2
        why=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>&1 | head -n 1)
        command -v nvidia-smi >/dev/null || why="not found"
        [ -n "$NVCC" ] || [ -z "$(cards)" ] || say "nvcc was not found: the GPU is not used without a CUDA toolkit, 12 or 13"
        [ -n "$(cards)" ] || [ "$1$why" = "not found" ] || say "no GPU is seen (nvidia-smi: ${why:-no card})${1:+; set GPU_ARCH=}"
        ;;
    libraries) # cuBLAS for the linker and, by -rpath, for the loader. The wheels of pip have it in lib, with a version alone
        top=$(toolkit)
        for lib in "$top"/lib64/libcublasLt.so* "$top"/lib/libcublasLt.so* "$top"/targets/*/lib/libcublasLt.so*; do
            [ -e "$lib" ] || continue
            at=$(cd "${lib%/*}" && pwd | word) of=${lib##*libcublasLt}
            [ "$of" = .so ] && of="-lcublas -lcublasLt" || of="-l:libcublas$of -l:libcublasLt$of"
            echo "-L$at -Xlinker -rpath -Xlinker $at $of" && exit
        done
        echo "-lcublas -lcublasLt"
        ;;
    headers) # the toolkit's headers for another compiler: where nvcc itself has them, or those of packages without nvcc
        eval "$NVCC --dryrun -x cu /dev/null" 2>&1 | sed -n 's/^#\$ INCLUDES=//p' | tr -d '"' | sed 's/-I/-isystem /g' | grep . && exit
        [ -n "${1:-}" ] || set -- /usr/local/cuda /usr build/cuda/lib/python3*/site-packages/nvidia/cu* "${VIRTUAL_ENV:-.venv}"/lib/python3*/site-packages/nvidia/cu*
        for at; do
            [ ! -f "$at/include/nvtx3/nvToolsExt.h" ] || [ ! -f "$at/include/cublasLt.h" ] || { echo "-isystem $(echo "$at" | word)/include" && exit; }
        done
        ;;
    check) # check LIBRARIES: compiles and links a program with cuBLAS. A toolkit that cannot do so is told in one line
        version=$(cuda_version)
        [ "${version%.*}" -ge 12 ] 2>/dev/null || [ -z "$version" ] ||
            fail "$NVCC is CUDA $version, wanted 12 or 13: install a newer CUDA toolkit, or set NVCC=/path/to/nvcc"
        printf '#include <%s>\n' cuda_bf16.h cuda_fp8.h nvtx3/nvToolsExt.h cublasLt.h >"$tmp/k.cu"
        echo '__global__ void k() {} int main() { k<<<1, 1>>>(); return !cublasLtGetVersion(); }' >>"$tmp/k.cu"
        eval "$NVCC -std=c++17 \"\$tmp/k.cu\" -o \"\$tmp/k\" $1" >"$tmp/log" 2>&1 && exit
        of=-$(echo "$version" | tr . -) newest=$(sed -nE 's/.* (later|less) than ([0-9]+).*/\2/p' "$tmp/log" | head -n 1)
        # the file that is not there
        part=$(sed -n 's/.*fatal error: \(.*\): No such.*/\1/p; s/.*cannot find -l:*\([^: ]*\).*/\1/p; s/.*: \(.*\): \(command \)*not found/\1/p' "$tmp/log" | head -n 1)
        case ${part##*/bin/},$(cat "$tmp/log") in
            cublas* | libcublas*) fail "cuBLAS is not in the CUDA toolkit $(toolkit): $(get libcublas "$of" cuda)" ;;
            cuda_* | cuda.h* | cudart* | cudadevrt*) fail "$part is not in the CUDA toolkit $(toolkit): $(get cuda-cudart "$of" cuda)" ;;
            nv/* | cuda/*) fail "$part is not in the CUDA toolkit $(toolkit): install cuda-cccl$of" ;;
            nvtx3*) fail "$part is not in the CUDA toolkit $(toolkit): install cuda-nvtx$of" ;;
            crt/* | cicc,* | ptxas,* | fatbinary,* | cudafe++,* | nvlink,*)
                fail "the CUDA toolkit $(toolkit) is not whole: it lacks $part; install cuda-nvcc$of" ;;
            *unsupported\ GNU*) fail "CUDA $version takes g++ up to version $newest: install g++-$newest, and make CUDA_CXX=g++-$newest" ;;
            *unsupported\ clang*) fail "CUDA $version takes clang++ before version $newest: install such a one or g++, and set CUDA_CXX" ;;
            *host\ compiler\ prop*) fail "the compiler of the host's code: $(head -n 1 "$tmp/log"); install g++, or set CUDA_CXX" ;;
            *"exception specification"*) fail "CUDA $version does not compile with this C library's headers: install a newer CUDA toolkit" ;;
            *) fail "$NVCC does not work: $(grep -im 1 -e error -e fatal "$tmp/log" || head -n 1 "$tmp/log" | grep . || echo it does not say why)" ;;
        esac
        ;;
esac
