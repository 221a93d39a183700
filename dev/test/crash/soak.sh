#!/bin/sh
# soak.sh [MINUTES] -- trains that long (20 by default) with a validation, a sample and a checkpoint every 50 steps. It watches
# the process: after the first tenth of the time, memory, open files, maps and threads must stay as they are. Memory may differ
# by 1 MiB, since the allocator's free lists settle late. Maps may differ by 2, and files by 2, which a checkpoint has open for
# a moment; threads not at all. TRAINER: the program under test. Run from the project's root after `make`.
. dev/test/lib.sh
minutes=${1:-20} trainer=${TRAINER:-$bin/train_llama3}
case $trainer in /*) ;; *) trainer=$root/$trainer ;; esac
cd "$tmp" || exit 1
words 9000 1 >text.txt && "$bin/tokenize" -o data.bin text.txt >/dev/null || exit 1
"$trainer" --model d1 --train data.bin --val data.bin --batch 2 --seq 64 --threads 1 --steps 1000000000 \
    --schedule constant --out out --val-every 50 --val-batches 2 --sample-every 50 --sample-tokens 32 \
    --checkpoint-every 50 --keep 2 >run.out 2>run.err &
pid=$!
started=$pid
field() { awk -v name="$1:" '$1 == name { print $2 }' "/proc/$pid/status"; }
seconds=$((minutes * 60)) from=$(date +%s) # 120 rows, or one a second
pause=$((seconds / 120 + 1))
wait_for test -s out/log.jsonl
sleep 2
while kill -0 "$pid" 2>/dev/null && [ $(($(date +%s) - from)) -lt $seconds ]; do
    files=$(ls "/proc/$pid/fd" | wc -l) maps=$(wc -l <"/proc/$pid/maps")
    echo "$(($(date +%s) - from)) $(field VmRSS) $files $maps $(field Threads)" >>rows
    sleep $pause
done
kill -TERM "$pid"
finish
printf '%8s %10s %6s %6s %8s\n' seconds rss_kib files maps threads
awk 'NR % 10 == 1 { printf "%8d %10d %6d %6d %8d\n", $1, $2, $3, $4, $5 }' rows

# spread COLUMN: the difference of the largest and the smallest number of a column, the first tenth left out
spread() {
    awk -v c="$1" -v warm=$((seconds / 10)) '
        $1 >= warm { if (!n++) { min = max = $c } if ($c > max) { max = $c } if ($c < min) { min = $c } }
        END { print n ? max - min : -1 }' rows
}
flat() { [ "$1" -ge 0 ] && [ "$1" -le "$2" ]; }
check "memory is flat (the spread is $(spread 2) KiB)" flat "$(spread 2)" 1024
check "no file stays open" flat "$(spread 3)" 2
check "no map stays" flat "$(spread 4)" 2
check "no thread stays" flat "$(spread 5)" 0
check "the run ends well when it is stopped" test "$finished" -eq 0
check "no word on stderr" test ! -s run.err
cd "$root" || exit 1
summary
