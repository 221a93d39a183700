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

# table_is_true VARIANT FLAGS...: without the CUDA context, the table is within 3 % of the memory in use during the steps
table_is_true() {
    v=$1
    shift
    wide_data
    cu "$v" --model d12 --train "$tmp/wide.bin" --seq 1024 --steps 4 --out "$(mktemp -d "$tmp/table_XXXXXX")" "$@" >"$tmp/table" || return 1
    awk '
        function gib(number, unit) { return number * (unit == "KiB" ? 1 / 1048576 : unit == "MiB" ? 1 / 1024 : 1) }
        $1 == "memory" && $2 == "context" { context = gib($3, $4) }
        $1 == "memory" && $2 == "need" { need = gib($3, $4) }
        $1 ~ /^ *[0-9]+\/[0-9]+$/ { held = $8; sub("G", "", held); steps++ }
        END {
            off = (need - context) / (held - context) - 1
            printf "REMARK table %.2f GiB, held %.2f GiB, %+.1f%%\n", need - context, held - context, 100 * off
            exit !(steps > 0 && context > 0 && off < 0.03 && off > -0.03)
        }' "$tmp/table"
}

# Limits memory to the 15 GiB of a T4. A run that does not fit is refused with flags that fit, and those run within the limit.
hint_fits() {
    wide_data
    flags="--model d12 --train $tmp/wide.bin --seq 1024 --batch 64 --steps 3 --max-memory 15G"
    cu "$1" $flags --out "$tmp/refused_$1" >"$tmp/refused.out" 2>&1 && { echo "error: it was not refused" && return 1; }
    hint=$(sed -n 's/^  hint: these flags fit: *//p' "$tmp/refused.out")
    [ -n "$hint" ] && [ ! -e "$tmp/refused_$1" ] || { tail -n 3 "$tmp/refused.out" && echo "error: no flags, or traces" && return 1; }
    echo "REMARK $hint"
    cu "$1" $flags $hint --out "$tmp/fits_$1" >"$tmp/fits.out" || return 1
    awk '$1 ~ /^ *[0-9]+\/[0-9]+$/ { held = $8; sub("G", "", held); if (held > most) { most = held + 0 } }
         END { printf "REMARK %.2f GiB held\n", most; exit !(most > 1 && most <= 15) }' "$tmp/fits.out"
}
