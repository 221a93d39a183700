# memory.sh -- tests of test_gpu.sh: the memory table agrees with the memory in use. They need the card to themselves.

# 100,000 tokens: one command's arguments hold only a fifth of them
wide_data() {
    [ -s "$tmp/wide.bin" ] && return
    token_file "$tmp/part.bin" 20000 32768
    {
        printf "$(little_endian 4 20240520 1 100000)"
        dd if=/dev/zero bs=1012 count=1 2>/dev/null
        for _ in 1 2 3 4 5; do tail -c +1025 "$tmp/part.bin"; done
    } >"$tmp/wide.bin"
}

# hidden_memory: prints the GiB that some drivers take while a context exists. nvidia-smi counts them as used. CUDA counts them
# neither as used nor in the card's total: a dry run prints that total, less the memory in use and 64 MiB (DRIVER_REST)
hidden_memory() {
    used >"$tmp/card_before"
    cu bf16 --model d1 --train "$tmp/wide.bin" --dry-run >"$tmp/hidden" || return 1
    nvidia-smi --query-gpu=memory.total,memory.reserved --format=csv,noheader,nounits | awk -F, -v before="$(cat "$tmp/card_before")" \
        -v have="$(awk '$1 == "memory" && $2 == "need" { print $6 }' "$tmp/hidden")" '
        NR == 1 { hidden = ($1 - $2 - before - 64) / 1024 - have; print (hidden > 0 ? hidden : 0) }'
}

used() { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | head -n 1; }

# card_memory COMMAND...: runs it, and writes to $tmp/card how many GiB of the card it took at most, beyond the memory in use
# before, and without the hidden memory
card_memory() {
    wide_data
    card_hidden=$(hidden_memory) || return 1
    used >"$tmp/card_before"
    nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits -lms 50 >"$tmp/card_used" &
    card_pid=$!
    "$@"
    card_status=$?
    kill $card_pid 2>/dev/null
    wait $card_pid 2>/dev/null
    awk -v before="$(cat "$tmp/card_before")" -v hidden="$card_hidden" '
        $1 > most { most = $1 }
        END { printf "%.3f\n", (most - before) / 1024 - hidden }' "$tmp/card_used" >"$tmp/card"
    return $card_status
}

# table_is_true VARIANT FLAGS...: the memory table and the step lines are within 3 % of the card's memory in use
table_is_true() {
    v=$1
    shift
    wide_data
    card_memory cu "$v" --model d12 --train "$tmp/wide.bin" --seq 1024 --steps 20 --out "$(mktemp -d "$tmp/table_XXXXXX")" "$@" >"$tmp/table" || return 1
    awk -v card="$(cat "$tmp/card")" '
        function gib(number, unit) { return number * (unit == "KiB" ? 1 / 1048576 : unit == "MiB" ? 1 / 1024 : 1) }
        function near(a, b) { return a > 0 && b > 0 && a / b < 1.03 && b / a < 1.03 }
        $1 == "memory" && $2 == "need" { need = gib($3, $4) }
        $1 ~ /^ *[0-9]+\/[0-9]+$/ { said = $8; sub("G", "", said); steps++ }
        END {
            printf "REMARK table %.2f GiB, said %.2f GiB, the card shows %.2f GiB, %+.1f%%\n", need, said, card, 100 * (need / card - 1)
            exit !(steps > 0 && near(need, card) && near(said, card))
        }' "$tmp/table"
}

# Limits memory to the 15 GiB of a T4. A run that does not fit is refused, and the message names flags that fit. A run with
# these flags stays within the limit.
hint_fits() {
    wide_data
    flags="--model d12 --train $tmp/wide.bin --seq 1024 --batch 64 --steps 3 --max-memory 15G"
    cu "$1" $flags --out "$tmp/refused_$1" >"$tmp/refused.out" 2>&1 && { echo "error: it was not refused" && return 1; }
    hint=$(sed -n 's/^  hint: these flags fit: *//p' "$tmp/refused.out")
    [ -n "$hint" ] && [ ! -e "$tmp/refused_$1" ] || { tail -n 3 "$tmp/refused.out" && echo "error: no flags, or traces" && return 1; }
    echo "REMARK $hint"
    card_memory cu "$1" $flags $hint --out "$tmp/fits_$1" >"$tmp/fits.out" || return 1
    echo "REMARK the card shows $(cat "$tmp/card") GiB"
    awk '{ exit !($1 > 1 && $1 <= 15) }' "$tmp/card"
}
