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

echo '#include "llmc/base/utils.h"' | ${CC:-cc} -std=c11 -w -U__BYTE_ORDER__ -D__BYTE_ORDER__=4321 -fsyntax-only -I"$root" -x c - >made.txt 2>&1
check "so is a system whose numbers have another order" grep -q 'error.*64-bit little-endian' made.txt

# an instruction that no processor knows
printf '#include "llmc/base/utils.h"\nint main(void) { __builtin_trap(); }\n' >trap.c
${CC:-cc} -std=c11 -D_GNU_SOURCE -I"$root" trap.c -o trap
case $(uname -m) in
    x86_64) expect "an instruction that this CPU lacks is told" 1 "built for another CPU" ./trap ;;
    *) skip "an instruction that this CPU lacks" "__builtin_trap() may be no such instruction here" ;;
esac
check "a library counts where its functions can be linked" \
    test "$(for f in puts no_such; do CC="${CC:-cc}" "$root/dev/make/choose.sh" library stdio.h -lm $f 2>/dev/null; done | paste -sd ' ' -)" = "1 0"
unset CC MARCH OPENMP LIBEDIT OPT

# --- what a change of flags builds again: with compilers that are stubs, in a folder of links to the sources -----------------

mkdir -p tree/build "a stub" bin && for file in Makefile llmc dev train_llama3.c train_llama3.cu; do ln -s "$root/$file" tree/; done
cat >cc <<END
#!/bin/sh
case " \$* " in
    *" -dumpmachine "*) cat "$tmp/machine" ;;
    *" -dM "*) cat "$tmp/version" ;;
    *" -E "*) exec cc "\$@" ;;
    *" -ledit "*) case "\$*" in *-L/edit*) ;; *) [ ! -e "$tmp/no_edit" ] || exit 1 ;; esac ;;
    *"-march=native "*probe*) [ ! -e "$tmp/no_march" ] || exit 1 ;;
    *"-Xpreprocessor -fopenmp "*) [ ! -e "$tmp/no_libomp" ] || exit 1 ;;
    *"-fopenmp "*) [ ! -e "$tmp/no_openmp" ] || exit 1 ;;
esac
for word; do [ "\$last" != -o ] || : >"\$word"; last=\$word; done
END
cat >nvcc <<END
#!/bin/sh
case " \$* " in
    *" --version "*) echo "Cuda compilation tools, release \$(cat "$tmp/release"), V1" && exit ;;
    *" --dryrun "*) echo "#\$ TOP=$tmp/toolkit" && exit ;;
    *"/k.cu "*) cat "$tmp/says" && [ ! -s "$tmp/says" ] || exit 1 ;;
esac
for word; do [ "\$last" != -o ] || : >"\$word"; last=\$word; done
END
mkdir -p toolkit/lib && : >toolkit/lib/libcublasLt.so.13 && : >says && echo x86_64-linux >machine && echo 13.0 >release && echo "#define V 1" >version
chmod +x cc nvcc && cp cc "a stub/cc" && cp cc cc2 && cp nvcc "a stub/nvcc" && cp nvcc nvcc2
mk() { # mk SETTINGS...: make with the stubs; its output in made.txt
    (cd tree && PATH="$tmp/bin:$PATH" make CC="$tmp/cc" NVCC="$tmp/nvcc" "$@") >made.txt 2>&1
}
again() { # again PROGRAM NAME SETTINGS...: with these settings the program is built once more, but only once
    again_program=$1 again_name=$2
    shift 2
    mk "$again_program" "$@" && grep -q -- "-o $again_program " made.txt && mk "$again_program" "$@" && ! grep -q -- "-o $again_program " made.txt
    check "$again_name builds $again_program again" test $? -eq 0
}
again train_llama3 "no setting"
for setting in CC="$tmp/cc2" MARCH=-mother OPENMP=0 LIBEDIT=0 OPT=-O1 CFLAGS_EXTRA=-g CFLAGS="-DA='b c'" CPPFLAGS=-DX LDFLAGS=-s LDLIBS=-lx; do
    again train_llama3 "$setting" "$setting"
done
for setting in FULL= FULL=1; do again build/test_config "$setting" "$setting"; done
echo "#define V 2" >version
again train_llama3 "another version of the compiler"
again train_llama3cu "no setting"
for setting in NVCC="$tmp/nvcc2" GPU_ARCH=90 CUDA_CXX=g++-13 OPENMP=0 PRECISION=FP32 CXXFLAGS=-g; do again train_llama3cu "$setting" "$setting"; done
echo 13.1 >release
again train_llama3cu "another version of nvcc"
mk -n train_llama3 CFLAGS="-O1 -g" CPPFLAGS=-DX LDFLAGS=-s LDLIBS=-lx
check "a packager's flags replace none of ours" grep -q -- "-std=c11 .*-fopenmp .*-DX -O1 -g .* -s -lm -lpthread .*-lx" made.txt
mk -n train_llama3cu CPPFLAGS="-Wp,-DX" LDFLAGS=-Wl,-z,now
check "and reach the compiler behind nvcc" grep -qF -- ' -Wp\,-DX  -Wl\,-z\,now' made.txt
: >no_edit && mk -n train_llama3 LDFLAGS=-L/edit
check "a library that is where they say is found" grep -q -- "-L/edit .*-ledit" made.txt
mk -n train_llama3
check "one that is not there is told, with the package" grep -qE '^make: no libedit \(.*\): --chat will not edit lines' made.txt
rm no_edit && (export TMPDIR=/none && mk -n train_llama3)
check "without a folder for temporary files the choice is the same" grep -q -- "-fopenmp .*-ledit" made.txt
again train_llama3 "a compiler in a path with spaces" CC="$tmp/a stub/cc"
again train_llama3cu "an nvcc in a path with spaces" NVCC="$tmp/a stub/nvcc"
(cd tree && PATH="$tmp/a stub:$PATH" make train_llama3cu) >made.txt 2>&1
check "so does one in PATH" grep -q "a.* stub/nvcc.* -o train_llama3cu " made.txt
mkdir -p "a cuda/bin" && cp nvcc "a cuda/bin/"
(cd tree && CUDA_HOME="$tmp/a cuda" make train_llama3cu) >made.txt 2>&1
check "and one in CUDA_HOME" grep -q "a.* cuda/bin/nvcc.* -o train_llama3cu " made.txt
mk -B train_llama3cu
check "the loader finds cuBLAS where the linker did" grep -q -- "-rpath -Xlinker $tmp/toolkit/lib -l:libcublas.so.13 -l:libcublasLt.so.13" made.txt

# --- what is generated is whole, or is not there --------------------------------------------------------------------------------

page=tree/build/serve_page.h
(ulimit -f 8 && mk build/serve_page.h) 2>/dev/null
check "a full disk leaves no half of the page" test ! -e "$page"
mk build/serve_page.h
check "the page is there with room" sh -c "tail -n 1 $page | grep -qx '};' && grep -q \"SERVE_STYLE .'sha256-[A-Za-z0-9+/]*=*'.\" $page"
for tool in sh mkdir mktemp rm mv cat sed awk cut tr cksum printf uname head grep base64 dirname env; do
    ln -sf "$(command -v $tool)" bin/ 2>/dev/null
done
rm "$page" && (cd tree && PATH="$tmp/bin" "$(command -v make)" CC="$tmp/cc" NVCC= build/serve_page.h) >made.txt 2>&1
check "a missing tool is named" grep -q '^error: od was not found' made.txt
ln -s "$(command -v od)" bin/ && (cd tree && PATH="$tmp/bin" "$(command -v make)" CC="$tmp/cc" NVCC= build/serve_page.h) >made.txt 2>&1
check "so are tools of which one is needed" grep -q '^error: neither sha256sum' made.txt
check "and there is no page" test ! -e "$page"
rm -r bin/*

# --- what make could not see -----------------------------------------------------------------------------------------------------

echo arm64-apple-darwin >machine && : >no_openmp && mk -n train_llama3
check "Apple's clang takes Homebrew's libomp" grep -q -- "-Xpreprocessor -fopenmp -I/opt/homebrew/opt/libomp/include -L.* -lomp" made.txt
check "and the flag of ARM for this CPU" grep -q -- "-mcpu=native" made.txt
echo powerpc64le >machine && : >no_march && mk -n train_llama3
check "so does POWER's" grep -q -- "-mcpu=native" made.txt
rm no_march && : >no_libomp && mk -n train_llama3
check "no OpenMP is told, with the package" grep -qE '^make: no OpenMP \(.*\): the programs will run on one thread' made.txt
rm no_openmp no_libomp
smi() { printf '#!/bin/sh\nprintf "%%b\\n" "%s"\n' "$1" >bin/nvidia-smi && chmod +x bin/nvidia-smi; } # smi TEXT: what it prints
sees() { # sees TEXT MESSAGE: make says so
    smi "$1" && mk -n train_llama3cu "${3:-A=}" && grep -qF -- "make: $2" made.txt
    check "make says: $2" test $? -eq 0
}
mk -n train_llama3cu
check "no nvidia-smi is told" grep -q '^make: no GPU is seen (nvidia-smi: not found); set GPU_ARCH=' made.txt
check "so is the toolkit, and for what it builds" grep -q "^make: CUDA 13.1 in $tmp/toolkit, for GPU_ARCH=\"80\"" made.txt
sees "NVIDIA-SMI has failed" "no GPU is seen (nvidia-smi: NVIDIA-SMI has failed)"
sees "6.1, Tesla P40" "the GPU Tesla P40 of compute capability 6.1 is too old: 7.5 (T4) or newer is needed"
sees "7.0, Tesla V100\r\n9.0, NVIDIA H100\r" 'CUDA 13.1 in'
check "the newer card beside it is taken" grep -q 'for GPU_ARCH="90"' made.txt
sees "9.0, NVIDIA H100" "CUDA_HOME=/none was not taken: it has no bin/nvcc" CUDA_HOME=/none
smi "6.1, Tesla P40" && mk -n quickstart && grep -q '^make: the GPU Tesla P40 .* is too old' made.txt
check "a quickstart says why it does not use the GPU" grep -q 'too old' made.txt

smi "9.0, NVIDIA H100" && mk -n quickstart NVCC=
check "so does one without a toolkit" grep -q '^make: nvcc was not found: the GPU is not used' made.txt
mk -n quickstart
check "it does use one that will do" grep -q "^./train_llama3cu --model" made.txt

# --- a toolkit that will not do ----------------------------------------------------------------------------------------------------

will_not_do() { # will_not_do RELEASE TEXT ERROR: where nvcc fails with that text
    echo "$1" >release && printf '%b\n' "$2" >says && mk train_llama3cu
    check "nvcc $1, $3: one line" test "$(grep -c '^error: ' made.txt).$(grep -c -- '-o train_llama3cu' made.txt)" = 1.0
    check "$3" grep -q "^error: .*$3" made.txt
}
will_not_do 11.8 "" "is CUDA 11.8, wanted 12 or 13"
will_not_do 13.0 "k.cu:1:10: fatal error: cublasLt.h: No such file or directory" "cuBLAS is not in the CUDA toolkit $tmp/toolkit: .*cublas"
will_not_do 12.4 "/usr/bin/ld: cannot find -lcublasLt: No such file" "cuBLAS is not in .*12-4\\|cuBLAS is not in"
will_not_do 12.0 "fatal error: cuda_runtime.h: No such file or directory" "cuda_runtime.h is not in the CUDA toolkit .*cudart"
will_not_do 12.8 "/usr/bin/ld: cannot find -lcudart_static: No such file or directory" "cudart_static is not in the CUDA toolkit .*cudart"
will_not_do 12.8 "/a/cuda_fp16.h:9:10: fatal error: nv/target: No such file or directory" "nv/target is not in .*install cuda-cccl-12-8"
will_not_do 12.8 "k.cu:3:10: fatal error: nvtx3/nvToolsExt.h: No such file or directory" "is not in .*install cuda-nvtx-12-8"
will_not_do 12.1 "sh: 1: $tmp/bin/../nvvm/bin/cicc: not found" "is not whole: .*install cuda-nvcc-12-1"
will_not_do 12.1 "sh: line 1: ptxas: command not found" "is not whole: it lacks ptxas; install cuda-nvcc-12-1"
will_not_do 12.2 "In file included from cuda_runtime.h: error: #error -- unsupported GNU version! gcc versions later than 12 are not supported!" "make CUDA_CXX=g++-12"
will_not_do 12.2 "error: -- unsupported clang version! clang version must be less than 16 and greater than 3.2 ." "takes clang++ before version 16: "
will_not_do 13.0 "g++-99: No such file or directory\\nnvcc fatal   : Failed to preprocess host compiler properties." "the host's code: g++-99: No such file"
will_not_do 13.0 "error: exception specification is incompatible with that of previous function" "install a newer CUDA toolkit"
will_not_do 13.0 "nvcc fatal   : Unsupported gpu architecture 'compute_140'" "does not work: nvcc fatal   : Unsupported gpu"
will_not_do 13.0 "Segmentation fault" "does not work: Segmentation fault"
: >says

# --- what is installed -----------------------------------------------------------------------------------------------------------

: >tree/serve && mk install DESTDIR="$tmp/a room" prefix=/opt MICROHTTPD=0
check "make install copies programs, manual page and completion" \
    sh -c 'cd "$0" && ls -R . | grep -cE "^(train_llama3|train_llama3cu|tokenize|serve|train_llama3.1)$" | grep -qx 6' "$tmp/a room/opt"
page="$tmp/a room/opt/share/man/man1/train_llama3.1"
flags=$(sed -n 's/^OPTION([A-Z]*, \([a-z0-9_]*[a-z0-9]\)_*,.*/\1/p' "$root/llmc/run/cli/options.def" | tr _ -)
missing=$(for flag in $flags; do
    grep -qF -- "$(echo "--$flag" | sed 's/-/\\-/g')\\fR" "$page" && grep -q -- " --${flag}[ \"]" "$tmp/a room/opt/share/bash-completion/completions/train_llama3" ||
        echo "$flag"
done)
check "the page and the completion have every flag ($missing)" test -z "$missing" -a -n "$flags"
check "with its help" grep -q '^.&Hugging Face model folder to start from, .* (default d4)$' "$page"
if command -v bash >/dev/null; then
    check "bash completes the words of a choice" bash -c '. "$0" && COMP_WORDS=(train_llama3 --schedule l) COMP_CWORD=2 &&
        _train_llama3 && [ "${COMPREPLY[*]}" = linear ]' "$tmp/a room/opt/share/bash-completion/completions/train_llama3"
else
    skip "bash completes the words of a choice" "bash is not installed"
fi
make -C "$root" help >made.txt 2>&1
check "make help has the targets, without marks" sh -c 'grep -q "^make quickstart STEPS=N  *the programs" made.txt && ! grep -q "[]\`[]" made.txt'

# --- nvcc itself -------------------------------------------------------------------------------------------------------------------

make -s -C "$root" emulated NVCC= CUDA_HOME=/none PRECISION=FP32 EMULATED_ARCH=80 >made.txt 2>&1
check "make emulated names what is missing" grep -q '^error: no headers of the CUDA toolkit were found' made.txt
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
