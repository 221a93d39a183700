#!/bin/sh
# test_no_gpu.sh -- tests ./train_llama3cu without a GPU: --dry-run --max-memory SIZE reports whether a run would fit into a
# GPU. A GPU of this machine is hidden. The memory tables are compared with the memory in use on an H200. Run from the project's
# root.
. dev/test/lib.sh
[ -x "$bin/train_llama3cu" ] || {
    skip "what a run on a GPU would take" "there is no train_llama3cu" 187
    summary
    exit
}
export CUDA_VISIBLE_DEVICES=
mkdir "$tmp/work" && cd "$tmp/work" || exit 1
data=$tmp/data.bin words=$tmp/words.bin

# zeros OUT VOCAB THOUSANDS: writes a token file with so many times the token 0; VOCAB 0: the vocabulary is unknown
zeros() {
    printf "$(little_endian 4 20240520 1 $(($3 * 1000)) "$2")"
    dd if=/dev/zero bs=1008 count=1 2>/dev/null
    dd if=/dev/zero bs=2000 count="$3" 2>/dev/null
} >"$1"
zeros "$data" 0 70
zeros "$words" 32768 70
zeros "$tmp/long.bin" 0 600

cu() { "$bin/train_llama3cu" --train "$data" "$@"; }
plan() { cu --sample-tokens 0 --dry-run "$@"; }

# ---------------------------------------------------------------------------------------------------------------------
# what it says, and does not do

expect "without --max-memory a dry run needs a GPU" 1 "no GPU can be used: " cu --model d2 --dry-run
check "and is told how it does not" grep -q "^  hint: .*--dry-run --max-memory 80G" "$tmp/stderr"
expect "training needs a GPU" 1 "no GPU can be used: " cu --model d2 --max-memory 80G
expect "evaluating needs a GPU" 1 "no GPU can be used: " cu --model "$pairs/gqa2_untied_rope8" --eval --val "$data" --max-memory 80G
# no driver, and drivers that are stubs: STUB_VERSION is for this CUDA, STUB_INIT the status of every call
mkdir "$tmp/driver" && cat >"$tmp/driver/driver.c" <<'END'
#include <stdlib.h>
#include <string.h>
int cuDriverGetVersion(int* version) { return *version = atoi(getenv("STUB_VERSION")), 0; }
int cuInit(unsigned flags) { return (void)flags, atoi(getenv("STUB_INIT")); }
int cuGetProcAddress(const char* name, void** found, int version, unsigned long long flags) {
    *found = !strcmp(name, "cuDriverGetVersion") ? (void*)cuDriverGetVersion : (void*)cuInit;
    if (strncmp(name, "cuGetProc", 9) == 0) { *found = (void*)cuGetProcAddress; }
    return 0;
}
int cuGetProcAddress_v2(const char* n, void** p, int v, unsigned long long f) { return cuGetProcAddress(n, p, v, f); }
END
${CC:-cc} -w -shared -fPIC "$tmp/driver/driver.c" -o "$tmp/driver/libcuda.so.1" || exit 1
driver() { # driver VERSION STATUS ENV...
    driver_version=$1 driver_status=$2
    shift 2
    env "$@" LD_LIBRARY_PATH="$tmp/driver" STUB_VERSION="$driver_version" STUB_INIT="$driver_status" "$bin/train_llama3cu" --model d2 --train "$data"
}
expect "no driver" 1 "no GPU can be used: $([ -e /.dockerenv ] && echo this container was || echo no NVIDIA driver is)" cu --model d2
expect "a driver that is too old" 1 "the driver is for CUDA 11.2, this build for 1" driver 11020 999 A=
expect "cards that are hidden" 1 "CUDA_VISIBLE_DEVICES hides all cards" driver 99000 100 CUDA_VISIBLE_DEVICES=
expect "a driver without cards" 1 "no GPU can be used: th" driver 99000 100 -u CUDA_VISIBLE_DEVICES
check "is another line" sh -c '! grep -q hides "$0"' "$tmp/stderr"
expect "a driver that fails" 1 "unsupported display driver" driver 99000 803 A=
expect "a dry run with --max-memory needs none" 0 "timed   nothing: no GPU can be used here: " cu --model d2 --batch 4 --steps 68 --dry-run --max-memory 80G
check "it names no card" grep -q "^machine no GPU, " "$tmp/stdout"
check "it shows the memory" grep -q "^memory  need .* of 80.00 GiB$" "$tmp/stdout"
check "the context is an estimate" grep -q "^memory  context, estimated   *[0-9.]* MiB$" "$tmp/stdout"
check "the workspace is an estimate" grep -q "^memory  workspace, estimated  *[0-9.]* [MG]iB$" "$tmp/stdout"
check "it shows the plan" grep -q "^plan    68 steps of 1,024 tokens (1 x 4 x 256)" "$tmp/stdout"
check "it reads the data" grep -q "^scan    .*data.bin: all ids are below 50257$" "$tmp/stdout"
check "it writes nothing" test -z "$(ls -A)"
expect "it needs no data" 0 "timed   nothing: there is no data" \
    "$bin/train_llama3cu" --model llama3.2-1b --dry-run --max-memory 80G
expect "the plan of --minutes" 0 "plan    the steps that fit into 3 minutes" plan --model d2 --minutes 3 --max-memory 80G
expect "a plan that is too large" 1 "error: --max-memory: the model d12 with the vocabulary of $words needs " \
    plan --model d12 --train "$words" --seq 1024 --batch 64 --max-memory 15G
check "is refused with flags that fit" grep -q "^  hint: these flags fit: --recompute " "$tmp/stderr"
expect "a preset has its own vocabulary" 1 "error: --max-memory: the model llama3.2-1b needs " plan --model llama3.2-1b --max-memory 10G

# ---------------------------------------------------------------------------------------------------------------------
# every file is read

token_file "$tmp/high.bin" 500 90 97
expect "a token that the model does not have" 1 "high.bin: token 500 is id 97, wanted below 97" \
    plan --model "$pairs/gqa2_untied_rope8" --seq 20 --train "$tmp/high.bin" --max-memory 80G
cp -r "$pairs/gqa2_untied_rope8" broken
printf '\377\377\377\177' | dd of=broken/model.safetensors bs=1 seek=$(($(wc -c <broken/model.safetensors) - 4)) conv=notrunc 2>/dev/null
token_file "$tmp/low.bin" 500 90
expect "a folder's weights" 0 "timed   nothing: " plan --model "$pairs/gqa2_untied_rope8" --train "$tmp/low.bin" --seq 20 --max-memory 80G
expect "a weight that is nan" 1 "broken/model.safetensors: " plan --model broken --train "$tmp/low.bin" --seq 20 --max-memory 80G
train --model d1 --train "$words" --steps 4 --stop-after 2 --out run >/dev/null 2>&1
expect "a run that goes on" 0 "resume  run/step_00000002, step 2" plan --resume run --max-memory 80G
check "the card that it will have is not guessed" test "$(grep -c 'this build is' "$tmp/stderr")" -eq 0

# ---------------------------------------------------------------------------------------------------------------------
# the usual shapes fit, or are refused with flags that fit

precision=$(plan --model d1 --max-memory 80G 2>/dev/null | sed -n 's/^model .*, \([BFP0-9]*\)$/\1/p')

# built_for PRECISIONS NAME: succeeds if this build is for one of them, else skips the test
built_for() {
    case " $1 " in *" $precision "*) return 0 ;; esac
    skip "$2" "this build is for $precision, wanted $1"
    return 1
}

gib() { sed -n 's/^memory  need  *\([0-9.]* [KMG]iB\) of .*/\1/p' "$1" | awk '{ print $1 / ($2 == "MiB" ? 1024 : $2 == "KiB" ? 1048576 : 1) }'; }

# fits SIZE FLAGS...: a plan within SIZE GiB, with the flags of the hint if it has one
fits() {
    size=$1
    shift
    if ! plan "$@" --max-memory "${size}G" >first 2>refused; then
        hint=$(sed -n 's/^  hint: these flags fit: *//p' refused)
        [ -n "$hint" ] || { cat refused && return 1; }
        awk -v need="$(gib first)" -v size="$size" 'BEGIN { exit !(need > size) }' || return 1
        plan "$@" $hint --max-memory "${size}G" >first || return 1
    fi
    awk -v need="$(gib first)" -v size="$size" 'BEGIN { exit !(need > 0.9 && need <= size) }'
}

for card in 15 24 80; do check "126M fits into $card GiB" fits $card --model d12 --train "$words" --seq 1024 --batch 64; done
for card in 24 48 80; do check "1B T=2048 fits into $card GiB" fits $card --model llama3.2-1b --seq 2048 --batch 16; done
check "1B T=8192 fits into 40 GiB" fits 40 --model llama3.2-1b --seq 8192 --batch 4
check "3B T=8192 fits into 48 GiB" fits 48 --model llama3.2-3b --seq 8192 --batch 1
for card in 141 180; do check "8B T=8192 fits into $card GiB" fits $card --model llama3.1-8b --seq 8192 --batch 1; done
name="8B T=8192 fits into 79 GiB"
built_for BF16 "$name" && check "$name" fits 79 --model llama3.1-8b --seq 8192 --batch 1

# the forms of master weights: split ones before none, where they fit
eight="--model llama3.1-8b --seq 8192 --batch 1"
name="what does not fit is told --master split"
built_for BF16 "$name" && expect "$name" 1 "hint: these flags fit: --recompute norm+swiglu,ffn:19 --moments bf16 --master split" plan $eight --offload off --max-memory 79G
name="where that does not fit either it is told --master none"
built_for BF16 "$name" && expect "$name" 1 "hint: these flags fit: --recompute norm+swiglu:18 --moments bf16 --master none" plan $eight --offload off --max-memory 77G
eight_bytes() { # weights, gradients, m and v have 2 bytes a parameter, without master weights
    plan $eight --recompute ffn --master none --moments bf16 --max-memory 79G >table || return 1
    [ "$(grep -c '^memory  \(weights\|gradients\|m\|v\)  *14.96 GiB$' table)" -eq 4 ] && ! grep '^memory  master' table
}
name="8B T=8192 in 8 bytes a parameter fits into 79 GiB"
built_for BF16 "$name" && check "$name" eight_bytes

# with one micro-batch a step, 12.8 GiB of 8B's activations lie in the gradients' memory
lent() {
    plan $eight --max-memory 400G >table && one=$(gib table) && plan $eight --total-batch 16384 --max-memory 400G >table &&
        awk -v one="$one" -v two="$(gib table)" 'BEGIN { print one " of " two; exit !(two - one > 12.7 && two - one < 12.9) }'
}
name="one micro-batch needs less than two"
built_for BF16 "$name" && check "$name" lent

# --recompute by block: the smallest number that fits
lean8="$eight --master none --moments bf16"
fewest() { plan $lean8 --recompute norm+swiglu:18 --max-memory 77G && ! plan $lean8 --recompute norm+swiglu:17 --max-memory 77G; }
name="one block less than the hint's does not fit"
built_for BF16 "$name" && check "$name" fewest
name="--recompute auto takes the value of the hint"
built_for BF16 "$name" && expect "$name" 0 "memory  --recompute auto takes norm+swiglu:18" plan $lean8 --recompute auto --max-memory 77G
name="and on 8 cards, which need less, a cheaper one"
built_for BF16 "$name" && expect "$name" 0 "memory  --recompute auto takes norm+swiglu:5 with --zero 1" plan $eight --gpus 8 --recompute auto --max-memory 69000M
expect "and nothing where all fits" 0 "memory  --recompute auto takes none" plan --model d2 --recompute auto --max-memory 80G
name="if nothing is enough, the hint has other flags"
built_for BF16 "$name" && expect "$name" 1 "hint: these flags fit: --moments bf16" \
    plan --model d12 --train "$words" --seq 256 --batch 8 --recompute auto --offload off --max-memory 2870M

# the state on the host: the hint names it before a smaller state, whose results are others; auto takes the least
name="what does not fit is told --offload optimizer"
built_for BF16 "$name" && expect "$name" 1 "hint: these flags fit: --offload optimizer" plan $eight --max-memory 79G
name="--offload auto takes nothing that it need not"
built_for BF16 "$name" && expect "$name" 0 "memory  --offload auto takes off" plan $lean8 --recompute auto --offload auto --max-memory 77G
name="and what is needed"
built_for BF16 "$name" && expect "$name" 0 "memory  --offload auto takes optimizer" plan $eight --recompute auto --offload auto --max-memory 77G
name="the table has columns for card and host"
built_for BF16 "$name" && check "$name" sh -c "tr -s ' ' <'$tmp/stdout' | grep -x 'memory m 29.92 GiB' && tr -s ' ' <'$tmp/stdout' | grep '^memory need, on the host 89.7. GiB of an unknown size'"
name="with it a new model keeps the rows that then fit"
built_for BF16 "$name" && expect "$name" 0 "(1 x 4 x 1024)" plan --model d24 --train "$words" --seq 1024 --offload auto --max-memory 9G
in_order() { # the order of cost needs less and less; with two micro-batches, since gradients then lend no memory
    for value in none norm+swiglu:1 norm+swiglu:30 norm+swiglu norm+swiglu,ffn:1 norm+swiglu,ffn:30 ffn ffn,block:1 ffn,block:30 block; do
        plan $eight --total-batch 16384 --recompute $value --max-memory 400G >table && gib table || return 1
    done | awk 'NR > 1 && $1 >= last { bad++ } { print; last = $1 } END { exit bad > 0 || NR != 10 }'
}
check "the values of --recompute in the order of cost need less and less" in_order
expect "more blocks than there are" 1 "--recompute: is ffn:33, but the model has 32 blocks" plan $eight --recompute ffn:33 --max-memory 80G
expect "no block" 2 "--recompute: is \"ffn:0\", wanted none, auto, or levels such as ffn" plan $eight --recompute ffn:0 --max-memory 80G
for kind in "split: a weight's upper half is its BF16 value" "none: rounded stochastically are BF16 weights"; do
    name="--master ${kind%%:*} needs a build for BF16"
    built_for "FP32 FP16" "$name" && expect "$name" 2 "error: --master $kind; this is a build for $precision, wanted PRECISION=BF16" \
        plan --model d2 --master "${kind%%:*}" --max-memory 80G
done

windows_hold_what_passes() { # under adapters no weights do
    for place in optimizer weights; do
        plan --model llama3.2-1b --lora 16 --offload $place --max-memory 40G | grep '^memory  windows ' >"windows_$place" || return 1
    done
    cmp windows_optimizer windows_weights
}
check "adapters: no window has room for weights that stay frozen" windows_hold_what_passes
check "adapters of 1B T=4096 fit into 7 GiB" fits 7 --model llama3.2-1b --lora 16 --seq 4096 --batch 1
name="adapters of 8B T=4096 fit into 22 GiB"
built_for "BF16 FP16" "$name" && check "$name" fits 22 --model llama3.1-8b --lora 16 --seq 4096 --batch 1
name="adapters of 70B T=8192 fit into 180 GiB"
built_for "BF16 FP16" "$name" && check "$name" fits 180 --model llama3.1-70b --lora 16 --seq 8192 --batch 1
name="70B whole fits into 180 GiB with most of it on the host"
built_for BF16 "$name" && expect "$name" 1 "hint: these flags fit: --recompute ffn,block:20 --offload gradients" \
    plan --model llama3.1-70b --seq 8192 --batch 1 --max-memory 180G
expect "and into 6 GiB not at all" 1 "try a smaller --model" plan --model llama3.1-70b --seq 8192 --batch 1 --max-memory 6G

# ---------------------------------------------------------------------------------------------------------------------
# --fp8

if [ "$precision" = BF16 ]; then
    fp8() { plan --fp8 --max-memory 140G "$@"; }
    expect "--fp8 is planned without a card" 0 "timed   nothing: " fp8 --model llama3.2-1b --seq 2048 --batch 16
    # a byte for each weight and for its transpose: 16 blocks of 60,817,408 weights, and their scales
    check "its copies of the weights are in the table" grep -q "^memory  fp8 weights  *1.82 GiB$" "$tmp/stdout"
    # 1.11 GiB without --fp8; for 32,768 tokens it adds 8-bit rows 16,384 wide, their transpose, and a transpose 2,048 wide
    check "so are its rows and transposes" grep -q "^memory  workspace, estimated  *2.17 GiB$" "$tmp/stdout"
    plan --max-memory 140G --model llama3.2-1b --seq 2048 --batch 16 >without
    check "without it there are none" test "$(grep -c "fp8" without)" -eq 0
    # ZeRO 3 keeps the copies of 3 blocks, with 37,888 scales each
    for gpus in "2 --zero 1" "2 --zero 2" "2 --zero 3"; do
        case $gpus in *3) size="350.0 MiB" ;; *) size="1.82 GiB" ;; esac
        expect "--fp8 is planned for several GPUs, $gpus" 0 "timed   nothing: " fp8 --model llama3.2-1b --seq 2048 --batch 16 --gpus $gpus
        check "each has copies of $size" grep -q "^memory  fp8 weights  *$size$" "$tmp/stdout"
    done
    expect "--fp8-head is planned" 0 "timed   nothing: " fp8 --fp8-head --model llama3.2-1b --seq 2048 --batch 16
    # 128,256 x 2,048 weights more, and their scales; the blocks' room for rows and transposes also holds the head's
    check "its copies are in the table" grep -q "^memory  fp8 weights  *2.30 GiB$" "$tmp/stdout"
    check "its rows and transposes share room" grep -q "^memory  workspace, estimated  *2.17 GiB$" "$tmp/stdout"
    expect "--fp8-head needs --fp8" 2 "error: --fp8-head: the blocks' products are not in FP8, wanted --fp8 as well" \
        plan --fp8-head --max-memory 140G --model llama3.2-1b --seq 2048 --batch 16
    expect "--fp8-head takes a vocabulary of multiples of 16" 1 "error: --fp8-head: vocab_size is 97, wanted a multiple of 16" \
        fp8 --fp8-head --model "$pairs/fp8" --train "$tmp/low.bin" --seq 16
    expect "--fp8 takes shared rows" 0 "timed   nothing: " fp8 --model d6 --batch 1 --seq 32 --gpus 2 --seq-parallel 2
    expect "--fp8 takes multiples of 16 on each GPU" 1 "error: --fp8: --batch * --seq / --seq-parallel is 24, wanted a multiple of 16" \
        fp8 --model d6 --batch 1 --seq 48 --gpus 2 --seq-parallel 2
    # 16 blocks of 37,888 scales
    expect "--fp8 is planned beside adapters" 0 "timed   nothing: " fp8 --model llama3.2-1b --seq 2048 --batch 16 --lora 16
    check "its copies take the place of the weights" grep -q "^memory  fp8 weights  *4.0 MiB$" "$tmp/stdout"
    check "and it has no transposes" grep -q "^memory  workspace, estimated  *1.61 GiB$" "$tmp/stdout"
    expect "--fp8 takes multiples of 16" 1 "error: --fp8: hidden_size is 40, wanted a multiple of 16" \
        fp8 --model "$pairs/gqa2_untied_rope8" --train "$tmp/low.bin" --seq 20
    expect "of tokens as well" 1 "error: --fp8: --batch * --seq is 60, wanted a multiple of 16" fp8 --model d2 --batch 3 --seq 20
else
    expect "--fp8 needs a build for BF16" 2 "error: --fp8: this is a build for $precision, wanted PRECISION=BF16" \
        plan --fp8 --model d2 --max-memory 80G
    skip "what --fp8 takes" "this build is for $precision, wanted BF16" 21
fi

# a plan knows the limits of the launchers
expect "rows too long for attention's plain kernels" 1 "error: --seq, for the kernels of this head_dim, is 2097152, wanted at most 2097120" \
    "$bin/train_llama3cu" --model "$pairs/gqa2_untied_rope8" --seq 2097152 --batch 1 --dry-run --max-memory 4000G
name="--fp8: too many tokens in a micro-batch"
built_for BF16 "$name" && expect "$name" 1 "error: --fp8: the number of tokens of a micro-batch is 8388608, wanted at most 8388480" \
    "$bin/train_llama3cu" --fp8 --model llama3.2-1b --batch 4096 --seq 2048 --dry-run --max-memory 4000G

# ---------------------------------------------------------------------------------------------------------------------
# several GPUs: a rank's table. ZeRO 1 divides the optimizer state, but neither weights nor gradients. ZeRO 2 also divides
# gradients, ZeRO 3 also the blocks' weights

# mib RANKS TABLE: prints "RANKS MIB ROUNDING NAME" for each line of the table; ROUNDING: the largest error of the printed
# digits
mib() {
    awk -v ranks="$1" '/^memory  / {
        at = /^memory  need / ? 3 : NF - 1
        unit = $(at + 1) == "GiB" ? 1024 : $(at + 1) == "KiB" ? 1 / 1024 : 1
        name = $2
        for (i = 3; i < at; i++) { name = name " " $i }
        print ranks, $at * unit, unit * (unit > 1 ? 0.005 : 0.05), name
    }' "$2"
}

# tables FLAGS...: writes the tables of 1 to 64 ranks, on an H200 with enough memory, to the file `tables`. A step has two
# micro-batches of 8,192 tokens: with one, the gradients of a single rank lend memory to its activations
tables() {
    : >tables
    for n in 1 2 4 8 16 32 64; do
        plan "$@" --gpus $n --total-batch $((n * 16384)) --steps 9 --max-memory 4000G >table 2>&1 || { cat table && return 1; }
        mib $n table >>tables
        [ $n -eq 1 ] || grep -q "^plan .* x $n processes)" table || return 1
    done
}

adds_up() {
    awk '{ slack[$1] += $3 } $4 == "need" { need[$1] = $2; next } !/pinned/ { sum[$1] += $2 }
         END { for (n in need) { d = sum[n] - need[n]; ranks++; if (d > slack[n] || -d > slack[n]) { exit bad = 1 } }
               exit bad || ranks != 7 }' tables
}

# divided NAME: the row equals one rank's row, divided by the ranks; whole NAME: it equals one rank's row. Padding of less than
# 1 % and cudaMalloc's 2 MiB may come on top
divided() { same_but "$1" 1; }
whole() { same_but "$1" 0; }
same_but() {
    awk -v name="$1" -v divides="$2" '$1 == 1 && $0 ~ " " name "$" { one = $2; slack = $3 }
        $0 ~ " " name "$" { n = divides ? $1 : 1; d = $2 - one / n; most = $3 + slack / n + 0.01 * one / n + 2
                            rows++; if (d > most || -d > most) { print; exit bad = 1 } }
        END { exit bad || rows != 7 }' tables
}
optimizer() {
    [ "$precision" = FP32 ] || divided master || return 1
    divided m && divided v
}
# exchange: from two ranks on the table has room for arriving gradients, and for as many fp32 sums as moments
exchange() {
    awk '$4 == "landing" { rows++; if ($1 == 1 || $2 <= 0) { bad = 1 } } $4 == "m" { m[$1] = $2 }
         $4 == "fp32" && $5 == "sums" { sums[$1] = $2 }
         END { for (n in sums) { rows++; if (sums[n] != m[n]) { bad = 1 } } exit bad || rows != 12 }' tables
}
# row NAME RANKS: prints the row's MiB; at NAME RANKS MIB: the row is within 8 MiB of that
row() { awk -v name="$1" -v ranks="$2" '$1 == ranks && $0 ~ " " name "$" { print $2 }' tables; }
at() { row "$1" "$2" | awk -v want="$3" '{ n++; d = $1 - want; bad = d > 8 || -d > 8; print $1 " of " want } END { exit bad || n != 1 }'; }
less_than() { # less_than FILE: each rank needs less than in that file's tables
    awk 'NR == FNR { if ($4 == "need") { more[$1] = $2 } next } $4 == "need" && $1 > 1 { n++; if ($2 >= more[$1]) { bad = 1 } }
         END { exit bad || n != 6 }' "$1" tables
}

# refused MODEL RANKS: 70 % of a rank's need is refused in one line; with the hint's flags, if it names some, the run fits
refused() {
    plan $1 --gpus "$2" --steps 9 --max-memory 4000G >table 2>&1
    size=$(mib "$2" table | awk '$4 == "need" { print int(0.7 * $2) "M" }')
    ! plan $1 --gpus "$2" --steps 9 --max-memory "$size" >first 2>"$tmp/stderr" || return 1
    cat "$tmp/stderr"
    error_is_well_formed && grep -q "^error: --max-memory: the model " "$tmp/stderr" || return 1
    hint=$(sed -n 's/^  hint: these flags fit: *//p' "$tmp/stderr")
    [ -n "$hint" ] || { grep -q "^  hint: try a smaller --model; " "$tmp/stderr" && return 0; }
    plan $1 --gpus "$2" --steps 9 $hint --max-memory "$size" >first
}
all_refused() { for n in 2 8 64; do refused "$1" $n || return 1; done; }

for model in d2 d12 llama3.2-1b llama3.2-3b llama3.1-8b llama3.1-70b; do
    case ${FULL:-0}.$model in # the others have their forms: tied and untied, small and large
        0.d12 | 0.llama3.2-3b) skip "$model: tables for 1 to 64 ranks, and what is refused" "FULL=1 runs them" 11 && continue ;;
    esac
    shape="--model $model --train $tmp/long.bin --seq 2048 --batch 4"
    check "$model: there are tables for 1 to 64 ranks" tables $shape
    check "$model: they add up" adds_up
    check "$model: optimizer state is shared out" optimizer
    check "$model: weights and gradients are not" eval 'whole weights && whole gradients'
    check "$model: activations, logits and context neither" eval 'whole activations && whole logits && whole "context, estimated"'
    check "$model: an exchange from two ranks on" exchange
    check "$model: what is refused tells flags that fit" all_refused "$shape"
    cp tables before
    for zero in 2 3; do
        check "$model: there are tables of ZeRO $zero" tables $shape --zero $zero
        check "$model: they add up, with optimizer state shared out" eval 'adds_up && optimizer && exchange'
        case $model in
            llama3.1*) check "$model: ZeRO $zero needs less than $((zero - 1))" less_than before && cp tables before ;;
        esac
    done
done
# 128256 x 4096 of the embedding and of the head, 32 blocks of 218112000 (4096 are the final norm)
wide=1
[ "$precision" = FP32 ] && wide=2
tables --model llama3.1-8b --train "$tmp/long.bin" --seq 2048 --batch 4 --zero 2
check "8B, ZeRO 2: gradients of the ends and of two blocks" at gradients 8 $((1836 * wide))
tables --model llama3.1-8b --train "$tmp/long.bin" --seq 2048 --batch 4 --zero 3
check "8B, ZeRO 3: gradients of the ends and of two blocks" at gradients 8 $((1836 * wide))
check "8B, ZeRO 3: weights of the ends, an eighth of the blocks, and three blocks" at weights 8 $((4916 * wide))
name="what does not fit is told --zero"
built_for BF16 "$name" && expect "$name" 1 "hint: these flags fit: --zero 2" \
    plan --model llama3.1-8b --train "$tmp/long.bin" --seq 2048 --batch 1 --recompute block --master split --moments bf16 --gpus 64 --steps 1 --max-memory 24G
# --recompute auto chooses --zero with one micro-batch a step, where it changes no bits
name="--recompute auto: 8B on four cards of 80 GB" four="--model llama3.1-8b --train $tmp/long.bin --seq 8192 --recompute auto --master split --moments bf16 --steps 1 --max-memory 78G"
if [ "$precision" = BF16 ]; then
    expect "$name: a row" 0 "auto takes none with --zero 1" plan $four --gpus 4 --batch 1
    expect "$name: two rows" 0 "auto takes norm+swiglu with --zero 3" plan $four --gpus 4 --batch 2
    expect "$name: two rows, shared" 0 "auto takes none with --zero 1" plan $four --gpus 4 --batch 2 --seq-parallel 2
    expect "$name: two rows, --zero 1" 0 "auto takes norm+swiglu,ffn:10" plan $four --gpus 4 --batch 2 --zero 1
    expect "$name: two micro-batches" 0 "auto takes norm+swiglu:24" plan $four --gpus 4 --batch 1 --total-batch 65536
    check "$name: and says why not" grep -q "^memory  --zero 2 needs less, but rounds" "$tmp/stdout"
else
    skip "$name" "this build is for $precision, wanted BF16" 6
fi
expect "a resumed run keeps its --zero" 0 "memory  --recompute auto takes none" plan --resume run --batch 2 --gpus 2 --recompute auto --max-memory 80G
check "that a run of one card had" grep -q "auto takes none$" "$tmp/stdout"
expect "--zero without several GPUs has no effect" 0 "timed   nothing: " plan --model d2 --zero 3 --max-memory 80G
name="8B T=8192 with fp32 master weights and moments fits into 79 GiB on 8 GPUs"
eight="--model llama3.1-8b --seq 8192 --batch 1 --recompute norm+swiglu"
built_for BF16 "$name" && check "$name" plan $eight --gpus 8 --max-memory 79G
name="8B T=8192 with fp32 master weights and moments fits into 80 GB on 8 GPUs, nothing recomputed"
eight="--model llama3.1-8b --seq 8192 --batch 1 --zero 2"
built_for BF16 "$name" && check "$name" plan $eight --gpus 8 --max-memory 74G # 80 GB are 74.5 GiB
name="70B T=8192 fits into 141 GB on 8 GPUs"
seventy="--model llama3.1-70b --seq 8192 --batch 1 --zero 3 --recompute block --master split --moments bf16"
built_for BF16 "$name" && check "$name" plan $seventy --gpus 8 --max-memory 131G # 141 GB are 131.3 GiB

# ---------------------------------------------------------------------------------------------------------------------
# several GPUs that share rows

share="--model d6 --train $words --seq 256 --batch 2 --steps 9 --max-memory 80G"
plan $share --gpus 4 >alone && plan $share --gpus 4 --seq-parallel 1 | cmp - alone
check "--seq-parallel 1 is as without" test $? -eq 0
expect "two groups of two" 0 "9 steps of 1,024 tokens (1 x 2 x 256 x 2 groups of 2 processes)" plan $share --gpus 4 --seq-parallel 2
expect "a group of two" 0 "9 steps of 1,024 tokens (2 x 2 x 256 x 1 group of 2 processes)" \
    plan $share --gpus 2 --seq-parallel 2 --total-batch 1024
expect "a step of part of the groups' rows" 1 "--total-batch: is 1536, wanted a multiple of batch * seq * groups of processes = 2 * 256 * 2" \
    plan $share --gpus 4 --seq-parallel 2 --total-batch 1536
expect "parts that do not divide the processes" 1 "--seq-parallel: is 2, wanted a divisor of the 3 processes" plan $share --gpus 3 --seq-parallel 2
expect "a row" 1 "--seq-parallel: is 2, wanted a divisor of the 255 tokens of a row" plan $share --gpus 2 --seq-parallel 2 --seq 255
expect "the query heads" 1 "--seq-parallel: is 4, wanted a divisor of the 6 query heads" plan $share --gpus 4 --seq-parallel 4
expect "the key heads" 1 "--seq-parallel: is 3, wanted a divisor of the 2 key heads" plan $share --gpus 3 --seq-parallel 3 --seq 255
expect "a process alone has nothing to share" 1 "--seq-parallel: is 2, but there is one process" plan $share --seq-parallel 2
check "and is told how there are more" grep -q "^  hint: --gpus 2 " "$tmp/stderr"
expect "0 parts" 2 "--seq-parallel" plan $share --gpus 2 --seq-parallel 0
expect "a text is not shared" 2 "--seq-parallel: shares the rows of a training step" cu --model run --generate the --seq-parallel 2
expect "a validation alone neither" 2 "--seq-parallel: shares the rows of a training step" cu --model run --eval --val "$words" --gpus 2 --seq-parallel 2

# row FILE NAME: prints the MiB of that row of FILE's table
row() { mib 1 "$1" | awk -v name="$2" '$4 == name { print $2 }'; }
# parted PARTS LEVEL: a card holds 8B's activations of one PARTS-th of a row, and all weights
parted() {
    long="--model llama3.1-8b --train $tmp/long.bin --seq 32768 --batch 1 --steps 1 --recompute $2 --gpus 8 --zero 2 --max-memory 4000G"
    plan $long >whole && plan $long --seq-parallel "$1" >part || return 1
    for name in activations weights; do echo "$name $(row whole $name) $(row part $name)"; done |
        awk -v parts="$1" '{ n = $1 == "weights" ? 1 : parts; d = $3 * n / $2 - 1; if (d > 0.05 || d < -0.05) { print; exit bad = 1 } } END { exit bad || NR != 2 }'
}
for level in none block; do for n in 2 4 8; do check "8B in $n parts, $level: activations are divided" parted $n $level; done; done
zeros "$tmp/longest.bin" 0 140
for seq in 32768 131072; do
    name="8B T=$seq fits into two cards of 139 GiB"
    built_for BF16 "$name" && check "$name" plan --model llama3.1-8b --train "$tmp/longest.bin" --seq $seq --batch 1 --steps 1 \
        --recompute block --gpus 2 --seq-parallel 2 --max-memory 139G
done
name="what does not fit is told flags that do, in parts of rows"
built_for BF16 "$name" && expect "$name" 1 "hint: these flags fit: --recompute norm+swiglu:16" plan --model llama3.1-8b --train "$words" --seq 32768 --batch 1 \
    --steps 1 --gpus 2 --seq-parallel 2 --max-memory 139G

# ---------------------------------------------------------------------------------------------------------------------
# several GPUs: who starts the ranks, and what ranks refuse

for wrong in 0 x 2x -1 1025; do
    expect "--gpus '$wrong'" 2 "--gpus: is \"$wrong\", wanted a number from 1 to 1024, or all" cu --model d1 --gpus "$wrong"
done
expect "--gpus ''" 2 "--gpus: is empty, wanted N|all" cu --model d1 --gpus ""
expect "--gpus all needs a GPU" 1 "--gpus all: no GPU can be used here" cu --model d1 --gpus all
expect "a dry run, too, and asks for a number" 1 "hint: give their number" plan --model d1 --gpus all --max-memory 80G
expect "no GPU for two ranks is told once" 1 "error: no GPU can be used: " cu --model d1 --gpus 2 --out none
check "and nothing is written" test ! -e none
cp -r run text
expect "a text is for one process" 1 "error: no GPU can be used: " cu --gpus 2 --model text --generate "the"
check "which is not one of several" sh -c "! grep -q 'rank [0-9]' '$tmp/stderr'"

# torch RANK RANKS FLAGS...: process RANK of RANKS that torchrun started on this host
torch() {
    rank=$1 ranks=$2
    shift 2
    RANK=$rank WORLD_SIZE=$ranks LOCAL_RANK=$rank LOCAL_WORLD_SIZE=$ranks MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 \
        timeout 60 "$bin/train_llama3cu" --train "$data" "$@"
}
dry="--model d1 --sample-tokens 0 --steps 9 --dry-run --max-memory 80G"
expect "a dry run of torchrun's four is that of rank 0" 0 "x 4 processes)" torch 0 4 $dry
torch 1 4 $dry >"$tmp/stdout" 2>&1
check "the others have nothing to say" test $? -eq 0 -a ! -s "$tmp/stdout"
expect "--gpus may say the same" 0 "x 4 processes)" torch 0 4 $dry --gpus 4
expect "but not another number" 1 "--gpus: is 2, but torchrun started 4 processes on this host" torch 0 4 --model d1 --gpus 2
torch 3 4 --model d1 --gpus 2 >"$tmp/stdout" 2>"$tmp/stderr"
check "which is told once" test $? -eq 1 -a ! -s "$tmp/stderr"
expect "a launcher of one process leaves it to --gpus" 0 "x 2 processes)" torch 0 1 $dry --gpus 2

small="--model $pairs/gqa2_untied_rope8 --train $tmp/low.bin --seq 20"
for n in 1 2; do
    for flag in "--lora 4" "--lora 4 --zero 3" "--export-dtype f32" "--zero 2"; do
        expect "$n GPUs take $flag" 0 "timed   nothing: " plan $small $flag --gpus $n --steps 4 --max-memory 80G
    done
done
expect "a run in FP32 goes on in this build on two" 0 "x 2 processes)" plan --resume run --batch 1 --gpus 2 --max-memory 80G
check "nothing is written" test ! -e none

# ---------------------------------------------------------------------------------------------------------------------
# the tables are those of a card: GiB by nvidia-smi on an H200, from dev/results/nvidia-h200.md

# near NEED CARD: both are within 0.1 GiB
near() {
    echo "the table needs $1 GiB"
    awk -v need="$1" -v card="$2" 'BEGIN { d = need - card; exit !(need > 0 && d < 0.1 && d > -0.1) }'
}

# held PRECISION GIB WHAT FLAGS...: the table of this build needs what the card held
held() {
    held_as=$1 card=$2 what=$3
    shift 3
    built_for "$held_as" "$what: an H200 held $card GiB" || return
    plan "$@" --max-memory 141G >table 2>&1
    check "$what: an H200 held $card GiB" near "$(gib table)" "$card"
}

# four with two micro-batches: they were measured before a step of one lent the gradients' memory
lean="--master split --moments bf16" wide="--model d12 --train $words" d12="--model d12 --seq 1024"
held BF16 20.5 "126M" $wide --seq 1024 --batch 64
held BF16 19.8 "126M, lean" $wide --seq 1024 --batch 64 $lean
held BF16 58.7 "1B T=2048" --model llama3.2-1b --seq 2048 --batch 16
held BF16 51.8 "1B T=2048, lean" --model llama3.2-1b --seq 2048 --batch 16 $lean
held BF16 58.7 "1B T=8192" --model llama3.2-1b --seq 8192 --batch 4
held BF16 51.8 "1B T=8192, lean" --model llama3.2-1b --seq 8192 --batch 4 $lean
held BF16 111.4 "8B T=8192, lean" --model llama3.1-8b --seq 8192 --batch 1 --total-batch 16384 $lean
held BF16 10.716 "d12 B=64, ffn recomputed" $d12 --batch 64 --recompute ffn
held FP16 10.724 "d12 B=64, ffn recomputed" $d12 --batch 64 --recompute ffn
held BF16 7.96 "d12 B=16" $d12 --batch 16
held BF16 4.43 "d12 B=16, block recomputed" $d12 --batch 16 --total-batch 32768 --recompute block
held BF16 4.92 "d12 B=8, lean" $d12 --batch 8 --total-batch 16384 $lean
held BF16 4.70 "d12 B=4, samples and validation" $d12 --batch 4 --total-batch 8192 --sample-tokens 64 --val "$data"
held FP32 8.32 "d12 B=8" $d12 --batch 8
summary
