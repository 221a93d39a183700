# lanes.sh -- the scheduler of test_gpu.sh, which sources it: selects tests, waits for builds, runs lanes of tests in parallel,
# limits the time, and prints the report.
#
# test_gpu.sh defines tests(), a list of
#   lane NAME                                      the tests that follow run one after the other, parallel to other lanes
#   lane NAME alone                                the tests that follow run after all other lanes have ended
#   quick [after OTHER] "NAME" COMMAND...          a test of both modes; waits for the end of the test OTHER
#   full  [after OTHER] "NAME" COMMAND...          a test of mode `all` only
# COMMAND may be a function. It prints why it fails, or returns 77 and prints why it is skipped. Selecting a test also selects
# its OTHER.

began=$(date +%s)
results=$tmp/results build=$root/build/gpu cores=$(nproc)
: >"$results"
OMP_NUM_THREADS=$(((cores + 3) / 4))
export OMP_NUM_THREADS CUDA_CACHE_MAXSIZE=4294967296
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
no_gpu=
nvidia-smi -L 2>/dev/null | grep -q '^GPU' || no_gpu="no GPU here"
[ -n "$no_gpu" ] || [ -n "$nvcc" ] || no_gpu="nvcc is not installed"
oldest=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d ' .\r' | sort -n | head -n 1)
case $oldest in 3? | 5? | 6? | 70 | 72) no_gpu="the GPU is older than sm_75" ;; esac

elapsed() { echo $(($(date +%s) - began)); }
say() { printf '%s\n' "$1" | tee -a "$results"; }
in_all() { [ "$mode" = all ] || [ -n "$no_gpu" ]; } # without a GPU, name every test as skipped

# limit SECONDS COMMAND...: runs the command for at most SECONDS, and until at most 45 s past the budget. A command that the
# budget ends is no failure
limit() {
    limit_s=$1 limit_left=$((budget + 45 - $(elapsed))) limit_cut=
    shift
    [ $limit_left -ge "$limit_s" ] || { limit_s=$((limit_left > 5 ? limit_left : 5)) && limit_cut=yes; }
    timeout -k 5 "$limit_s" "$@"
    limit_status=$?
    if [ $limit_status -eq 124 ]; then
        echo "no end after $limit_s s: $*"
        [ -z "$limit_cut" ] || touch "$t_log.cut"
    fi
    return $limit_status
}

# --- the list ----------------------------------------------------------------------------------------------------------------

lane() { lane=$1 alone=${2:-beside}; }
quick() { entry quick "$@"; }
full() { entry full "$@"; }

# entry quick|full [after OTHER] NAME COMMAND...: handles one test of the list as $doing says
entry() {
    e_mode=$1 e_after=
    shift
    [ "$1" != after ] || { e_after=$2 && shift 2; }
    case $doing in
        table) printf '%s\t%s\t%s\t%s\t%s\n' "$e_mode" "$lane" "$alone" "$1" "$e_after" ;;
        names) ! is_chosen "$1" || echo "$1" ;;
        commands) ! is_chosen "$1" || { e_name=$1 && shift && echo "$e_name: $*"; } ;;
        "lane $lane")
            is_chosen "$1" || return 0
            [ -z "$e_after" ] || [ -n "$no_gpu" ] || while ! has_ended "$e_after"; do sleep 0.5; done
            run_test "$@"
            ;;
    esac
}

is_chosen() { grep -qxF -- "$1" "$tmp/chosen"; }
has_ended() { cut -c6- "$results" | awk -v name="$1" 'index($0, name " (") == 1 || index($0, name ":") == 1 { found = 1 } END { exit !found }'; }

# is_named NAME WORD...: true if a WORD equals NAME, or is no test's name but matches NAME as a pattern (grep -E). Always true
# without WORDs
is_named() {
    n_name=$1
    shift
    [ $# -gt 0 ] || return 0
    for n_word in "$@"; do
        if cut -f 4 "$tmp/table" | grep -qxF -- "$n_word"; then
            [ "$n_name" != "$n_word" ] || return 0
        elif printf '%s\n' "$n_name" | grep -qE -- "$n_word"; then
            return 0
        fi
    done
    return 1
}

# choose WORD...: writes the names of the tests to run to $tmp/chosen
choose() {
    doing=table && tests >"$tmp/table"
    while IFS='	' read -r c_mode _ _ c_name c_after; do
        [ "$mode" = all ] || [ "$c_mode" = quick ] || { [ "$wanted" = run ] && [ -n "$no_gpu" ]; } || continue
        ! is_named "$c_name" "$@" || printf '%s\n' "$c_name" "$c_after"
    done <"$tmp/table" >"$tmp/chosen"
    [ -s "$tmp/chosen" ] || { echo "error: no test is named $*; --list prints the names" >&2 && exit 2; }
}

# run_test NAME COMMAND...: runs a test and prints its line of the report
run_test() {
    t_name=$1
    shift
    [ -z "$no_gpu" ] || { say "skip $t_name: $no_gpu" && return 0; }
    [ "$(elapsed)" -lt "$budget" ] || { say "skip $t_name: out of time, BUDGET is $budget s" && return 0; }
    t_log=$(mktemp "$tmp/log_XXXXXX") t_from=$(date +%s)
    ("$@") >"$t_log" 2>&1 </dev/null
    t_status=$? t_s=$(($(date +%s) - t_from))
    [ ! -e "$t_log.cut" ] || t_status="cut"
    case $t_status in
        cut) say "skip $t_name: no end after $t_s s, when time was up: BUDGET is $budget s" ;;
        0) say "ok   $t_name ($t_s s)$(sed -n 's/^REMARK / -- /p' "$t_log" | tr '\n' ' ')" ;;
        77) say "skip $t_name: $(tail -n 1 "$t_log")" ;;
        *)
            say "FAIL $t_name ($t_s s)"
            { grep -E 'FAIL|^error|hint:|rror:|no end after|^ +[^ ]+\.(cu|c|h|cuh):[0-9]+: ' "$t_log" | head -n 20 && echo ... && tail -n 6 "$t_log"; } | cut -c1-240 | sed 's/^/    /'
            ;;
    esac
    rm -f "$t_log" "$t_log.cut"
}

# run_lanes beside|alone: runs the lanes of that kind
run_lanes() {
    for l_name in $(awk -F '\t' -v which="$1" '$3 == which && !seen[$2]++ { print $2 }' "$tmp/table"); do
        doing="lane $l_name"
        if [ -n "$no_gpu" ]; then tests; else tests & fi
    done
    wait
}

# --- builds: VARIANT is a folder of links to the sources in which the Makefile builds ------------------------------------------

variable_of() {
    case $1 in
        fp32) echo PRECISION=FP32 ;;
        bf16 | bf16_illegal) echo PRECISION=BF16 ;;
        fp16) echo PRECISION=FP16 ;;
        bf16_ptx80) echo PRECISION=BF16 PTX_ONLY=80 ;;
        fp16_ptx75) echo PRECISION=FP16 PTX_ONLY=75 ;;
    esac
}

# make_illegal FILE: puts a trainer there whose rank 1 begins its sixth step with a write to an illegal address
make_illegal() {
    rm -f "$1"
    sed 's/^    runner_begin(&m->runner, lr);$/&\n    if (m->layout.rank == 1 \&\& m->runner.queued == 5) { step_begin_cuda((StepState*)4096, 0, lr, m->queue.stream); }/' "$root/train_llama3.cu" >"$1"
    ! cmp -s "$root/train_llama3.cu" "$1" || { echo "error: no fault could be planted into train_llama3.cu" && return 1; }
}

# make_variant VARIANT: makes its folder
make_variant() {
    mkdir -p "$build/$1/build"
    for file in Makefile llmc dev train_llama3.c train_llama3.cu test_llama3.cu; do ln -sfn "$root/$file" "$build/$1/$file"; done
    [ "$1" != bf16_illegal ] || make_illegal "$build/$1/train_llama3.cu" || exit 1
    case $1.$oldest in bf16*.7?) return ;; esac
    make -s -C "$build/$1" NVCC="$nvcc" $(variable_of "$1") build/cuda_flags # now, before several makes write it at once
}

# build_one VARIANT TARGET: builds it unless another process does. Writes the status to build/gpu/VARIANT.TARGET.done, or 77
# if this GPU cannot run it
build_one() {
    build_log=$build/$1.$(basename "$2")
    mkdir "$build_log.claimed" 2>/dev/null || return 0
    case $1.$oldest in bf16*.7?) echo "BF16 needs sm_80 or newer" >"$build_log.log" && echo 77 >"$build_log.done" && return ;; esac
    make -s -C "$build/$1" NVCC="$nvcc" $(variable_of "$1") "$2" >"$build_log.log" 2>&1
    echo $? >"$build_log.done"
}

# Builds all targets in this order, one for each core in parallel.
build_all() {
    targets=
    for v in bf16 fp32 fp16; do targets="$targets $v:test_llama3cu $v:train_llama3cu"; done
    for v in bf16 fp32; do targets="$targets $v:build/test_kernels_cu $v:build/test_attention_cu $v:build/test_determinism_cu"; done
    if in_all; then
        for v in bf16_ptx80 fp16_ptx75; do targets="$targets $v:test_llama3cu $v:build/test_kernels_cu $v:build/test_attention_cu"; done
        targets="$targets bf16_illegal:train_llama3cu fp16:build/test_kernels_cu fp16:build/test_attention_cu fp16:build/test_determinism_cu bf16:build/test_wgmma_cu fp16:build/test_wgmma_cu"
    fi
    running=0 pids=
    for target in $targets; do
        build_one "${target%%:*}" "${target#*:}" &
        pids="$pids $!" running=$((running + 1))
        if [ $running -ge "$cores" ]; then
            set -- $pids
            wait "$1"
            shift
            pids=$* running=$((running - 1))
        fi
    done
    wait
    touch "$tmp/built"
}

# start_builds WORD...: builds everything in the background; with WORDs, each test builds what it needs
start_builds() {
    mkdir -p "$build"
    rm -rf "$build"/*.done "$build"/*.claimed
    for v in fp32 bf16 fp16 $(! in_all || echo bf16_ptx80 fp16_ptx75 bf16_illegal); do make_variant "$v"; done
    if [ $# -eq 0 ]; then build_all & else touch "$tmp/built"; fi
}

# need VARIANT PROGRAM: waits for the build, or builds it; skips the test if this GPU cannot run it
need() {
    need_mark=$build/$1.$2
    if [ -e "$tmp/built" ]; then
        case $2 in *_llama3cu) build_one "$1" "$2" ;; *) build_one "$1" "build/$2" ;; esac
    fi
    while [ ! -s "$need_mark.done" ]; do sleep 0.3; done
    [ "$(cat "$need_mark.done")" -ne 77 ] || { cat "$need_mark.log" && exit 77; }
    [ "$(cat "$need_mark.done")" -eq 0 ] || { tail -n 5 "$need_mark.log" && echo "error: $1 $2 was not built" && return 1; }
}

# cu VARIANT FLAGS...: runs the trainer of that build; later flags override
cu() {
    cu_v=$1
    shift
    need "$cu_v" train_llama3cu && limit "${CU_LIMIT:-100}" "$build/$cu_v/train_llama3cu" --sample-tokens 0 --val-every 0 "$@"
}

# --- all of it -----------------------------------------------------------------------------------------------------------------

# Builds the CPU programs and writes the tokens for the trainers.
make_data() {
    for file in "${TEXT:-}" data/tinyshakespeare.txt "${TEST_DATA:-}/tinyshakespeare.txt"; do
        [ ! -s "$file" ] || { text=$file && break; }
    done
    [ -n "${text:-}" ] || { words 200000 1 >"$tmp/words.txt" && text=$tmp/words.txt; }
    make -s -j2 train_llama3 tokenize >"$tmp/make.log" 2>&1 && "$bin/tokenize" -o "$tmp/data.bin" --val-fraction 0.1 "$text" >/dev/null ||
        { cat "$tmp/make.log" && echo "FAIL the CPU programs are built" && echo "0 passed, 1 failed, 0 skipped" && exit 1; }
}

# run_tests [--list|--commands] [quick|all] [WORD...]
run_tests() {
    wanted=run mode=quick
    case ${1:-} in --list) wanted=names && shift ;; --commands) wanted=commands && shift ;; esac
    case ${1:-} in
        quick | all) mode=$1 && shift ;;
        -h | --help) echo "usage: $0 [--list|--commands] [quick|all] [NAME or PATTERN...]" >&2 && exit 2 ;;
        ?*) mode=all ;;
    esac
    case $mode in quick) budget=${BUDGET:-230} ;; all) budget=${BUDGET:-2400} ;; esac
    choose "$@"
    [ "$wanted" = run ] || { doing=$wanted && tests && exit 0; }
    if [ -z "$no_gpu" ]; then
        start_builds "$@"
        make_data
        echo "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1), $("$nvcc" --version | sed -n 's/.*release \([^,]*\),.*/nvcc \1/p'), $mode, text $text"
    fi
    run_lanes beside
    [ -n "$no_gpu" ] || echo "     builds and lanes: $(elapsed) s"
    run_lanes alone
    [ -n "$no_gpu" ] || grep '^FAIL' "$results" | sed 's/^FAIL/    failed:/'
    passed=$(grep -c '^ok' "$results") failed=$(grep -c '^FAIL' "$results") skipped=$(grep -c '^skip' "$results")
    summary
}
