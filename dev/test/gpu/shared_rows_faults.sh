#!/bin/sh
# shared_rows_faults.sh [plant] -- tests on two GPUs that "2 GPUs share rows" finds faults: plants each into a copy of the sources
# and trains 3 steps in FP32 on two GPUs that share rows, and on one. The losses must then differ; without a fault they must not.
# `plant` only tells whether each expression still changes its file. Builds JOBS at a time, about a minute
# each, and then runs one after the other. Run from the project's root. GPU_ARCH: as in the Makefile.
set -u
root=$PWD folder=$(mktemp -d "${TEST_TMP:-/tmp}/llama3_shared_faults_XXXXXX") || exit 1
trap 'rm -rf "$folder"' EXIT
trap 'exit 130' INT TERM

# NAME | FILE | SED | FLAGS
faults() {
    cat <<'END'
none | README.md | s/^# llama3/# Llama3/ | --documents mask
heads go to the wrong rank | llmc/gpu/sequence.cuh | s/const int p = (int)(block \/ T % g\.parts);/const int p = (int)((block \/ T + !BACK) % g.parts);/ | --documents cross
positions of the second half begin at 0 again | llmc/gpu/sequence.cuh | s/rope(q, qkv, starts, table, 0, whole);/rope(q, qkv, starts, table, 0, AttentionShape{whole.B * p->parts, s.T, whole.NH, whole.NKV, whole.HD});/ | --documents cross
starts of the first half alone | llmc/gpu/feed.cuh | s/data->starts, num_starts \*/data->starts, num_starts \/ f->parts */ | --documents mask
the second rank has the first half, too | llmc/run/row_parts.h | s/b \* T + (size_t)p->share\.part \* count/b * T/ | --documents cross
the output of another block in backward | llmc/gpu/sequence.cuh | s/if (!fresh) {/if (false) {/ | --documents cross
gradients of heads are not sent back | llmc/gpu/sequence.cuh | s/^    heads_to_rows(q, p, dqkv, dqkv, s);// | --documents cross
END
}

# losses LOG: of its steps, with gradient norms
losses() { sed -n 's/.*"event":"step","step":\([0-9]*\),"loss":\([^,]*\),.*"gnorm":\([^,]*\),.*/\2\n\3/p' "$1"; }

# apart A B: prints how far the numbers of two files are apart, the most, relative
apart() {
    paste "$1" "$2" | awk '{ d = $1 - $2; d = d < 0 ? -d : d; d /= $2; if (!(d <= most)) { most = d } n++ } END { print n == 6 ? most : "nothing" }'
}

# plant_one NAME FILE EXPRESSION FLAGS: plants the fault into a copy of the sources, and builds it unless `plant` is asked for
plant_one() {
    here=$folder/$planted
    sed "$3" "$2" >"$folder/changed"
    if cmp -s "$2" "$folder/changed"; then
        echo "FAIL fault $1 is planted: the expression changes nothing in $2" && failed=$((failed + 1))
        return
    fi
    planted=$((planted + 1))
    [ "$mode" != plant ] || return 0
    mkdir -p "$here/build" && cp -r llmc Makefile README.md train_llama3.cu tokenize "$here" && ln -s "$root/dev" "$here/dev" && cp "$folder/changed" "$here/$2" || exit 1
    printf '%s | %s | %s\n' "$here" "$4" "$1" >>"$folder/planted"
    (cd "$here" && make -s train_llama3cu PRECISION=FP32 LIBEDIT=0 >log 2>&1) &
    [ $((planted % JOBS)) -ne 0 ] || wait
}

planted=0 failed=0 mode=${1:-run} JOBS=${JOBS:-$(nproc 2>/dev/null || echo 2)}
[ "$mode" = plant ] || [ "$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')" -ge 2 ] || { echo "skip faults of shared rows: it needs 2 GPUs" && exit 0; }
faults >"$folder/table"
: >"$folder/planted"
while IFS= read -r line <&3; do
    name=${line%% | *} line=${line#* | }
    file=${line%% | *} line=${line#* | }
    plant_one "$name" "$file" "${line%% | *}" "${line#* | }"
done 3<"$folder/table"
wait
while IFS= read -r line <&3; do
    here=${line%% | *} line=${line#* | }
    flags=${line%% | *} name=${line#* | }
    cd "$here" || exit 1
    [ -x train_llama3cu ] || { tail -n 5 log && echo "FAIL fault $name compiles" && exit 1; }
    awk 'BEGIN { for (d = 0; d < 40; d++) { t = ""; for (i = 0; i < 40 + d % 7 * 30; i++) { s = (s * 171 + 11213) % 53125; t = t " w" s % 90 } print "{\"text\": \"" t "\"}" } }' >text.jsonl
    ./tokenize -o data.bin text.jsonl >log 2>&1 || exit 1
    common="--model d6 --train data.bin --seq 512 --batch 2 --steps 3 --lr 1e-3 --sample-tokens 0 $flags"
    { ./train_llama3cu $common --out one && ./train_llama3cu $common --out two --gpus 2 --seq-parallel 2; } >log 2>&1 || tail -n 3 log
    losses one/log.jsonl >one.txt
    losses two/log.jsonl >two.txt
    far=$(apart one.txt two.txt)
    if [ "$name" = none ]; then
        awk -v far="$far" 'BEGIN { exit !(far ~ /^[0-9]/ && far < 1e-5) }'
    else
        awk -v far="$far" 'BEGIN { exit !(far ~ /^[0-9]/ && far > 1e-5) }'
    fi
    right=$?
    [ $right -eq 0 ] && echo "ok   fault $name: losses and norms are $far apart" || { echo "FAIL fault $name: losses and norms are $far apart" && failed=$((failed + 1)); }
    cd "$root" && rm -rf "$here"
done 3<"$folder/planted"
echo "$planted planted, $failed failed"
[ $failed -eq 0 ]
