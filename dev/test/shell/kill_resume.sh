#!/bin/sh
# kill_resume.sh [KILLS] -- kills a run with -9 at random moments, and resumes it each time. The run writes a checkpoint every
# step. At the end its checkpoint and log must equal a run's that was never killed, byte for byte but for the run's id. SEED=N
# repeats the random moments, as far as timing allows. Run from the project's root after `make`.
. dev/test/lib.sh
kills=${1:-12} seed=${SEED:-$(date +%s)}
cd "$tmp" || exit 1
words 3000 1 >text.txt && words 300 2 >short.txt && words 2000 3 >more.txt
for name in text short more; do "$bin/tokenize" -o $name.bin $name.txt >/dev/null || exit 1; done
flags="--model d1 --train text.bin:0.7,more.bin:0.3 --val short.bin --val-every 3 --val-batches 2 --total-batch 128 --steps 1000000
       --schedule constant --checkpoint-every 1 --keep 3 --export-dtype bf16"

step_of() { ls "$1" 2>/dev/null | sed -n 's/^step_0*\([0-9]*\)$/\1/p' | sort -n | tail -n 1; }

# The moments are spread over the time of about six steps, measured here, so that they hit starting, training, writing, renaming
# and pruning.
from=$(date +%s%N)
train $flags --out timed --stop-after 6 >/dev/null 2>&1 || { bad "the run ends well" && summary; exit 1; }
span=$((($(date +%s%N) - from) / 1000000))
killed=0 halves=0 refusals=0 last=0 i=0
while [ $i -lt "$kills" ]; do
    i=$((i + 1)) seed=$(((seed * 171 + 11213) % 53125))
    background $flags --out killed --resume --threads $((1 + i % 3))
    sleep "$(awk -v r=$seed -v span=$span 'BEGIN { printf "%.3f", r / 53125 * span / 1000 + 0.005 }')"
    kill -9 "$pid" 2>/dev/null
    finish
    [ $finished -eq 137 ] && killed=$((killed + 1))
    [ $finished -eq 137 ] || { refusals=$((refusals + 1)) && tail -n 3 "$tmp/background"; }
    ls killed 2>/dev/null | grep -q '\.tmp$' && halves=$((halves + 1))
    now=$(step_of killed)
    [ "${now:-0}" -ge $last ] || bad "kill $i: no checkpoint is lost" "step $last, then ${now:-0}"
    last=${now:-0}
done
echo "    $killed kills over $last steps of about $((span / 6)) ms, $halves of them inside of a checkpoint"
check "every time the run went on until it was killed" test $refusals -eq 0
stop=$((last + 2))
train $flags --out killed --resume --stop-after $stop >"$tmp/end" 2>&1 &&
    train $flags --out never --stop-after $stop >/dev/null 2>&1
name=$(printf 'step_%08d' $stop)
check "the checkpoint is that of a run never killed" same_checkpoint never/$name killed/$name
check "and the log" same_steps never/log.jsonl killed/log.jsonl
check "nothing half-made stays" test "$(ls killed | wc -l)" -eq 4
cd "$root" || exit 1
summary
