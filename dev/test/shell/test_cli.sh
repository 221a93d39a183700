#!/bin/sh
# test_cli.sh -- runs the programs as a user does: jobs and flags, resuming byte for byte, signals, the lock, damaged
# checkpoints, a full disk, unsuitable data, generation. Run from the project's root after `make`; needs no Python.
. dev/test/lib.sh
cd "$tmp" || exit 1
words 4000 1 >text.txt && words 400 2 >short.txt
"$bin/tokenize" -o data.bin text.txt >/dev/null && "$bin/tokenize" -o val.bin short.txt >/dev/null || exit 1
for i in 1 2 3; do words $((60 + 20 * i)) $i >shard.txt && "$bin/tokenize" -o shard$i.bin shard.txt >/dev/null; done

# --- usage -----------------------------------------------------------------------------------------------------------------

expect "help is on stdout" 0 "--val-every" train --help
check "help says nothing on stderr" test ! -s "$tmp/stderr"
expect "the version is told" 0 "llama3.c" train --version
expect "an unknown flag names its neighbour" 2 "did you mean --batch" train --batchs 3
expect "a flag of the GPU is refused by name" 2 "train_llama3cu" train --tf32
expect "--fp8 too" 2 "train_llama3cu" train --fp8
expect "a value out of range is refused" 2 "--batch: is \"0\", wanted an integer" train --batch 0
expect "two jobs at once are refused" 2 "--eval and --dry-run" train --eval --dry-run
expect "a stray argument is refused" 2 "data.bin" train data.bin
expect "a total batch that is no multiple is refused" 2 "--total-batch" train --total-batch 65
expect "tokenize: an unknown flag names its neighbour" 2 "did you mean --tokenizer" "$bin/tokenize" --tokenzier x
expect "tokenize: without files" 2 "" "$bin/tokenize" -o x.bin
expect "without data the command that makes it is named" 1 "--train: is not given, and the default" train
expect "help into a full disk is an error" 1 "standard output" sh -c "\"$bin/train_llama3\" --help >/dev/full"

# small stacks are enough: musl gives a thread 128 KiB
if [ -n "${BIN:-}" ]; then
    skip "every job runs with little stack" "sanitizers need more" 6
else
    # shellcheck disable=SC3045  # dash and bash have it
    little() { (ulimit -s 256 && OMP_STACKSIZE=128k "$@"); }
    little_train() { little "$bin/train_llama3" --threads 3 --batch 2 --seq 32 "$@"; }
    check "tokenize runs with little stack" little \
        "$bin/tokenize" --tokenizer "$root/dev/data/tinytales" --val-fraction 0.1 -o little.bin text.txt
    for preset in d2 d6; do
        check "$preset trains with little stack" \
            little_train --model $preset --train data.bin --val data.bin --val-every 2 --steps 2 \
            --sample-every 2 --sample-tokens 4 --out little_$preset
    done
    check "a run resumes with little stack" little_train --resume little_d2 --steps 3
    check "a model is evaluated with little stack" little_train --eval --model little_d2 --val data.bin
    check "a model generates with little stack" little_train --generate "the cat" --model little_d2
fi
expect "a model that does not fit is refused with the shortfall" 1 " short)" \
    train --model llama3.1-70b --train data.bin --out bad

mkdir empty && cp data.bin empty && cd empty || exit 1
expect "a dry run shows the plan" 0 "plan    12 steps" train --model d1 --train data.bin --steps 12 --dry-run
expect "a dry run shows the plan of --minutes" 0 " steps fit into 3 minutes" \
    train --model d1 --train data.bin --minutes 3 --dry-run
check "a dry run shows the memory" grep -q "^memory  need" "$tmp/stdout"
check "a dry run writes nothing" test "$(ls -A)" = data.bin
cd "$tmp" || exit 1
expect "a dry run reads the data" 1 "missing.bin" train --model d1 --train missing.bin --dry-run

# --- resuming is the same byte for byte --------------------------------------------------------------------------------------

# resumed NAME STEPS STOP FLAGS...: compares an uninterrupted run with one stopped and resumed on other numbers of threads
resumed() {
    r_name=$1 r_steps=$2 r_stop=$3
    shift 3
    rm -rf whole parts
    train --model d1 --steps "$r_steps" --out whole "$@" >"$tmp/whole.txt" 2>&1 &&
        train --model d1 --steps "$r_steps" --out parts --stop-after "$r_stop" --threads 2 "$@" >"$tmp/parts.txt" 2>&1 &&
        resume --out parts >>"$tmp/parts.txt" 2>&1 ||
        { tail -n 2 "$tmp/parts.txt" && bad "$r_name: the runs end well" && return; }
    r_last=$(printf 'step_%08d' "$r_steps")
    check "$r_name: the same checkpoint" same_checkpoint "whole/$r_last" "parts/$r_last"
    check "$r_name: the same log" same_steps whole/log.jsonl parts/log.jsonl
}
resumed "stopped and resumed" 20 10 --train data.bin --val val.bin --val-every 5 --val-batches 3 --sample-every 5 \
    --sample-tokens 16 --warmup 4
check "samples and validations are in the log" test "$(steps_of whole/log.jsonl | wc -l)" -eq 28
check "the log is one JSON object a line" test "$(grep -cv '^{"event":.*}$' parts/log.jsonl)" -eq 0
check "the resumed log tells of both runs" test "$(grep -cE '"event":"(config|resume|end)"' parts/log.jsonl)" -eq 3
resumed "over shuffled shards and epochs, in several micro-batches" 20 7 --train 'shard*.bin' --total-batch 192 --seq 48
check "epochs were passed" grep -qE ' ([2-9]|[1-9][0-9])\.[0-9]+ epochs' whole.txt
resumed "with weights exported as bf16" 12 5 --train data.bin --export-dtype bf16 --schedule wsd
check "a bf16 checkpoint keeps the exact weights" \
    grep -q '"master.model.norm.weight"' whole/step_00000012/state_rank00000.safetensors
check "a bf16 export says so" grep -q '"torch_dtype": "bfloat16"' whole/step_00000012/config.json
resumed "with f16 weights and the linear schedule" 6 3 --train data.bin --export-dtype f16 --schedule linear
resumed "with updates skipped as outliers" 150 140 --train data.bin --skip-norm-z 1 --skip-loss-z 1 --lr 1e-6 \
    --schedule constant
check "updates were skipped before and after" \
    test "$(grep '"skipped"' whole/log.jsonl | grep -cE '"step":1(3[0-9]|4[1-9])')" -ge 2

rm -rf parts
for stop in 3 4 9 15; do train --model d1 --steps 15 --out parts --train data.bin --resume --stop-after $stop >/dev/null 2>&1; done
train --model d1 --steps 15 --out whole15 --train data.bin >/dev/null 2>&1
check "--resume begins a run, too, and may cut it anywhere" same_checkpoint whole15/step_00000015 parts/step_00000015

train --model d1 --steps 8 --out back --train data.bin --checkpoint-every 2 >/dev/null 2>&1
cp -r back/step_00000008 first8 && cp -r back back0
resume back/step_00000004 --out back >/dev/null 2>&1
check "set back to an earlier checkpoint" same_checkpoint first8 back/step_00000008
check "a log that was set back has every step once" test "$(grep -c '"event":"step"' back/log.jsonl)" -eq 8

# someone put a link, or a file, where the run is about to write a checkpoint
for place in link file; do
    rm -rf placed elsewhere && cp -r back0 placed && mv placed/step_00000008 elsewhere
    if [ $place = link ]; then ln -s ../elsewhere placed/step_00000008; else echo mine >placed/step_00000008; fi
    touch placed/step_00000006.tmp
    expect "a $place in a checkpoint's place is no end" 0 "saved   placed/step_00000008" \
        resume placed/step_00000004 --out placed
    check "a $place in a checkpoint's place: it is replaced" test ! -L placed/step_00000008
    check "a $place in a checkpoint's place: by the run's own" same_checkpoint first8 placed/step_00000008
    check "a $place in a checkpoint's place: the folder that a link leads to stays" diff -r first8 elsewhere
    check "a $place in a checkpoint's place: nothing else is left" sh -c "! ls placed | grep tmp"
done

expect "going on elsewhere does not touch another run" 1 "back holds the checkpoints of another run" \
    resume back0/step_00000002 --out back
check "nor its log" test "$(grep -c '"event":"step"' back/log.jsonl)" -eq 8
expect "going on in a new folder" 0 "aside/step_00000008" resume back0/step_00000002 --out aside
check "ends the same" cmp back/step_00000008/model.safetensors aside/step_00000008/model.safetensors
expect "another --model is not what is resumed" 0 "--model: d2 is not used" resume aside/step_00000008 --out aside --model d2

expect "a total batch fits the rows of the run that is resumed" 0 "(2 x 2 x 32)" resume --out aside --steps 10 --total-batch 128
expect "or is refused with them" 1 "= 2 * 32 * 1 = 64" resume --out aside --steps 12 --total-batch 100

train --model d1 --steps 5 --out one --train data.bin --threads 1 --grad-clip 0.5 >/dev/null
train --model d1 --steps 5 --out two --train data.bin --threads 2 --grad-clip 0.5 >/dev/null
check "one thread and two: the same checkpoint" same_checkpoint one/step_00000005 two/step_00000005
train --model d1 --steps 5 --out seed --train data.bin --seed 43 --grad-clip 0.5 >/dev/null
check "another seed: other weights" sh -c '! cmp -s one/step_00000005/model.safetensors seed/step_00000005/model.safetensors'

train --model d1 --minutes 0.004 --schedule wsd --decay 7 --out minutes --train data.bin >minutes.txt
steps=$(sed -n 's/^timed .*: \([0-9,]*\) steps fit.*/\1/p' minutes.txt | tr -d ,)
last=$(printf 'step_%08d' "${steps:-0}")
train --model d1 --steps "${steps:-0}" --schedule wsd --decay 7 --out counted --train data.bin >/dev/null
check "--minutes is the run that --steps with its number makes" same_checkpoint "minutes/$last" "counted/$last"

# the laws of dial.h choose what a new model dN is not given
dial() { "$bin/train_llama3" --threads 1 --sample-tokens 0 --seq 32 --train data.bin "$@"; }
expect "a new model gets its batch, steps, rate and warm-up" 0 "dial    --warmup " dial --model d1 --dry-run
check "each with its reason" test "$(grep -cE '^dial    --(steps|total-batch|batch|lr|warmup) [^:]+: .+' stdout)" -eq 5
check "of little data four epochs" grep -qE '^plan .* (4\.00|3\.9[0-9]) epochs' stdout
check "a step of a power of two of rows" sh -c 'n=$(sed -n "s/^dial    --total-batch \([0-9]*\):.*/\1/p" stdout) && n=$((n / 32)) && [ $n -ge 4 ] && [ $((n & (n - 1))) -eq 0 ]'
expect "a flag that is given stays" 0 "lr=0.002" dial --model d1 --lr 2e-3 --batch 2 --steps 40 --warmup 3 --dry-run
check "and nothing is chosen then" sh -c '! grep -q "^dial" stdout && grep -q "^plan    40 steps of 64 tokens (1 x 2 x 32)" stdout'
expect "a total batch need not be a multiple of --batch's default" 0 " (3 x 1 x 32)" dial --model d1 --total-batch 96 --dry-run
dial --model d1 --train shard1.bin --total-batch 1024 --steps 2 --stop-after 1 --out held >/dev/null 2>&1
expect "a batch of few rows of data is one that resumes" 0 "resume" dial --train shard1.bin --resume --out held
for f in "--train shard1.bin --total-batch 4096" "--steps 9" "--steps 90000"; do dial --model d1 --dry-run $f; done >reasons
check "each reason is the one that counted" test "$(grep -cE '^dial    --(steps 1: 4,096 tokens, 12.8 epochs|total-batch 128: fewer rows are|total-batch [0-9]+: as the data)' reasons)" -eq 3
expect "a guess of --minutes is called one" 0 ", a guess" dial --model d1 --minutes 1 --dry-run
check "a dry run names the rate and the warm-up of the steps that fit" test "$(grep -cE '^dial    --(lr|warmup) ' stdout)" -eq 2
check "no flag is shown before" sh -c '! grep -qE "(lr|warmup)=" stdout'
guess() { dial --model d1 --dry-run "$@" | sed -n 's/.* D = \([0-9,]*\) tokens, a guess/\1/p' | tr -d ,; }
check "more threads are expected to train on more" test "$(guess --minutes 1e-4 --threads 2)" -gt "$(guess --minutes 1e-4)" -o "$(getconf _NPROCESSORS_ONLN)" -eq 1
check "but on four epochs at most" test "$(guess --minutes 99)" -eq "$(guess --minutes 9)"
expect "a decay that is given comes before the warm-up" 0 "plan    100 steps" dial --model d1 --schedule wsd --decay 98 --steps 100 --dry-run
check "which says so" grep -q "^dial    --warmup 2: what --decay leaves" stdout
rate() { dial --model d1 --dry-run "$@" | sed -n 's/^dial    --lr \([^:]*\):.*/\1/p'; }
check "four times the batch has twice the rate" awk "BEGIN { q = $(rate --steps 1000 --batch 16 --model d6) / $(rate --steps 4000 --batch 4 --model d6); exit !(q > 1.9 && q < 2.1) }"
check "Muon's is twice AdamW's" awk "BEGIN { q = $(rate --steps 1000 --batch 4 --model d6 --optimizer muon) / $(rate --steps 1000 --batch 4 --model d6); exit !(q > 1.9 && q < 2.1) }"
dial --model d1 --steps 100 --stop-after 2 --out dialled >/dev/null 2>&1
expect "a run that is resumed keeps them" 0 "resume" dial --resume --strict-resume --steps 100 --stop-after 4 --out dialled
for batch in 2 64; do dial --resume --batch $batch --out dialled --dry-run; done >batches 2>&1
check "a --batch that is given is the step if it does not fit into it" test "$(grep -c "^warning: --total-batch: is 2048, was " batches)" -eq 1
check "and chooses none" sh -c '! grep -q "^dial" stdout && [ "$(grep -o "\"warmup\":[0-9]*" dialled/log.jsonl | sort -u)" = "\"warmup\":5" ]'
expect "a folder has its own defaults" 0 "lr=0.0003" dial --model dialled --steps 3 --dry-run
dial --model d1 --steps 2 --lr 3e-4 --out plain >/dev/null 2>&1
expect "run.flags keep a given flag that has its default" 0 "lr=0.0003" dial @plain/step_00000002/run.flags --dry-run

tokens=1024
[ -z "${BIN:-}" ] || tokens=256  # a build with sanitizers makes as many steps of fewer tokens
background --model d1 --train data.bin --minutes 0.1 --batch 8 --total-batch $tokens --schedule linear --final-lr-frac 0 --warmup 0 \
    --checkpoint-every 10 --out slower
wait_for has_steps slower/log.jsonl 3
slow_down $pid &
finish
planned_text=$(sed -n 's/^timed .*: \([0-9,]*\) steps fit.*/\1/p' background)
planned=$(echo "$planned_text" | tr -d ,)
shortened=$(sed -n 's/^{"event":"plan","step":\([0-9]*\),"steps":\([0-9]*\),.*/\1 \2/p' slower/log.jsonl | tail -n 1)
at=${shortened% *} steps=${shortened#* } from=$(((${shortened% *} + 9) / 10 * 10))
last=$(printf 'step_%08d' "${steps:-0}") next=$(printf 'step_%08d' "$from")
check "a run whose steps become slower ends with fewer" test "$finished" -eq 0 -a "${steps:-$planned}" -lt "$planned" -a -d "slower/$last"
check "and says so" sh -c "tr -d , <background | grep -q '^plan    $steps steps instead of .*; the rate goes from .* to 0 by then'"
check "its rate falls without a jump, and to its end" \
    awk -F '"lr":' '/"event":"step"/ { rate[n++] = $2 + 0 } END { fall = 1.001 * (rate[n - 2] - rate[n - 1])
        for (i = 1; i < n; i++) { if (rate[i] > rate[i - 1] || rate[i - 1] - rate[i] > fall) { exit 1 } }
        exit n < 10 || rate[n - 1] > fall }' slower/log.jsonl
cp -r slower replayed
for step in replayed/step_*; do [ "$(echo "$step" | sed 's/.*step_0*//')" -gt "$from" ] && rm -r "$step"; done
expect "a run that is resumed after that has the same end" 0 "saved   replayed/$last" resume --out replayed --minutes 9
check "and the same bits" same_checkpoint "slower/$last" "replayed/$last"
steps_of slower/log.jsonl >slower.txt && steps_of replayed/log.jsonl >replayed.txt
check "and the same log" cmp slower.txt replayed.txt
first=$(sed -n 's/^{"event":"plan","step":\([0-9]*\),.*/\1/p' slower/log.jsonl | head -n 1)
if [ "${first:-0}" -gt 10 ]; then
    expect "a checkpoint from before has the first plan" 0 "plan    $planned_text steps" \
        resume slower/step_00000010 --out before --dry-run
else
    skip "a checkpoint from before has the first plan" "its steps became slower by step 10"
fi
expect "--steps sets the end anew" 0 "plan    300 steps" resume "slower/$next" --out anew --steps 300 --dry-run

expect "an --out without a name" 2 "--out: is empty" train --model d1 --steps 0 --out "" --train data.bin
expect "no step at all exports the new model" 0 "saved" train --model d1 --steps 0 --out zero --train data.bin
check "and its checkpoint is there" test -s zero/step_00000000/model.safetensors

# --- checkpoints -----------------------------------------------------------------------------------------------------------

train --model d1 --steps 12 --out kept --train data.bin --checkpoint-every 1 --keep 2 --major-every 5 >/dev/null
check "--keep and --major-every keep what they say" \
    test "$(cd kept && echo step_*)" = "step_00000005 step_00000010 step_00000011 step_00000012"
expect "a new run over old checkpoints is refused" 1 "kept holds the checkpoints of another run, up to step 12" \
    train --model d1 --steps 3 --out kept --train data.bin
expect "a run that is over has nothing to resume" 0 "nothing is left to train" resume --out kept

# damaged NAME COMMAND: damages the newest checkpoint with COMMAND; the one before it must be used
damaged() {
    rm -rf hurt && cp -r damage hurt
    (cd hurt/step_00000006 && sh -c "$2") >/dev/null 2>&1
    expect "$1: the checkpoint before is taken" 0 "taking the checkpoint before" resume --out hurt
    check "$1: and the run ends the same" same_checkpoint damage/step_00000006 hurt/step_00000006
}
train --model d1 --steps 6 --out damage --train data.bin --checkpoint-every 3 >/dev/null
damaged "weights cut short" 'truncate -s -1 model.safetensors'
damaged "a flipped bit of the state" 'printf X | dd of=state_rank00000.safetensors bs=1 seek=100000 conv=notrunc'
damaged "a file gone" 'rm tokenizer.json'
damaged "a changed trainer_state.json" 'sed -i s/64/65/ trainer_state.json'
damaged "an empty trainer_state.json" ': >trainer_state.json'
rm -rf hurt && cp -r damage hurt && rm hurt/*/config.json
expect "all damaged: refused" 1 "config.json" resume --out hurt
expect "a checkpoint that is named must be whole" 1 "hurt/step_00000003/config.json" \
    train --out other --resume hurt/step_00000003
expect "resuming from a folder without one is refused" 1 "empty: holds no checkpoint" train --out other --resume empty

mkdir model && cp "$pairs"/gqa2_untied_rope8/* model && echo terms >model/LICENSE
token_file ids.bin 2000 97
expect "fine-tuning a folder on llm.c's own token files" 0 "there is no tokenizer" \
    train --model model --steps 2 --out tuned --train ids.bin
check "files beside the weights come along" cmp model/LICENSE tuned/step_00000002/LICENSE
cp -r model model0 && rm -rf model && resume --out tuned --steps 4 >/dev/null 2>&1
check "and the run goes on without the folder it began with" cmp tuned/step_00000004/LICENSE tuned/step_00000002/LICENSE

# remove the folder that a run started from, and its newest checkpoint, while it trains
mkdir -p gone/original && cp "$pairs"/gqa2_untied_rope8/* gone && echo terms >gone/LICENSE && echo card >gone/README.md
printf 'IQ== 0\nIg== 1\n' >gone/original/tokenizer.model
background --model gone --steps 1000000 --out removed --train ids.bin --schedule constant --checkpoint-every 5 --keep 3
wait_for has_steps removed/log.jsonl 1
rm -rf gone
wait_for test -e removed/step_00000005
rm -rf removed/step_*[05]
from=$(grep -c '"event":"step"' removed/log.jsonl)
wait_for has_steps removed/log.jsonl $((from + 20))
kill -INT $pid
finish
last=$(ls removed | grep '^step_' | tail -n 1)
check "removing the model's folder or the newest checkpoint ends no run" test $finished -eq 0
check "and checkpoints keep the files beside the weights" \
    sh -c "cmp model0/LICENSE removed/$last/LICENSE && test -s removed/$last/README.md -a -s removed/$last/original/tokenizer.model"
check "the last one is told" grep -qx "saved   removed/$last" "$tmp/background"
resume --out removed --stop-after 1 >/dev/null 2>&1
check "and can be resumed" test $? -eq 0

# checkpoints hold the run's tokenizer
cp "$root/dev/data/tinytales/tokenizer.json" moved.json && cp moved.json other.json
"$bin/tokenize" --tokenizer moved.json -o tales.bin text.txt >/dev/null
train --model d1 --steps 4 --out moved --train tales.bin --tokenizer moved.json --stop-after 2 >/dev/null 2>&1
cp -r moved moved2 && mv moved.json away.json
expect "a run goes on though the file of --tokenizer has moved" 0 "saved   moved/step_00000004" resume --out moved
check "with the same tokenizer" cmp moved/step_00000004/tokenizer.json moved/step_00000002/tokenizer.json
expect "a --tokenizer on the command line is taken all the same" 1 "nowhere.json" resume --out moved2 --tokenizer nowhere.json
expect "and is what the run goes on with" 0 "saved" resume --out moved2 --tokenizer away.json

# a job that does not train reads the weights once, and no optimizer state
train --model d1 --steps 2 --out model1 --train data.bin >/dev/null && weights=model1/step_00000002/model.safetensors
rm model1/step_00000002/state_rank00000.safetensors
expect "a checkpoint without its state generates" 0 "x" "$bin/train_llama3" --model model1 --generate x --tokens 2
expect "and is named outright" 0 "" "$bin/train_llama3" --model model1/step_00000002 --generate x --tokens 2
expect "but is not resumed" 1 "state_rank00000.safetensors: is missing" resume --out model1
cp $weights whole.safetensors
printf X | dd of=$weights bs=1 seek=100000 conv=notrunc 2>/dev/null
for job in "--generate x" "--eval --val val.bin" "--train data.bin --steps 1 --out damaged" "--train data.bin --dry-run"; do
    expect "a flipped byte of the weights is found: $job" 1 "model.safetensors: the checksum is" train --model model1 $job
done
expect "also where the folder is named outright" 1 "the file is damaged" \
    "$bin/train_llama3" --model model1/step_00000002 --generate x
cp whole.safetensors $weights
cp -r model0 trained && echo '{"best_metric": null, "epoch": 1.0}' >trained/trainer_state.json
expect "a trainer_state.json of transformers' Trainer is no hindrance" 0 "5 6" \
    "$bin/train_llama3" --model trained --generate "5 6" --tokens 2

# --- signals and the lock ----------------------------------------------------------------------------------------------------

for signal in INT TERM; do
    background --model d1 --steps 1000000 --lr 3e-4 --warmup 0 --out signal$signal --train data.bin --schedule constant
    wait_for has_steps signal$signal/log.jsonl 3
    if [ $signal = INT ]; then
        expect "a second run in the same --out is refused" 1 "another run (process" \
            train --model d1 --steps 3 --out signalINT --train data.bin
        expect "so is resuming there" 1 "another run (process" \
            train --model d1 --train data.bin --steps 3 --out signalINT --resume
    fi
    kill -$signal $pid
    finish
    last=$(grep '"event":"step"' signal$signal/log.jsonl | tail -n 1 | sed 's/.*"step":\([0-9]*\).*/\1/')
    check "SIG$signal: the run ends with status 0" test $finished -eq 0
    check "SIG$signal: with a checkpoint of its last step" \
        test -s "signal$signal/$(printf 'step_%08d' "$last")/trainer_state.json"
    check "SIG$signal: and says so" grep -q '"event":"end","step":'"$last"',"reason":"signal"' signal$signal/log.jsonl
done
train --model d1 --steps "$last" --lr 3e-4 --warmup 0 --out unsignalled --train data.bin --schedule constant >/dev/null
check "and the weights are those of that step" \
    cmp "signalTERM/$(printf 'step_%08d' "$last")/model.safetensors" "unsignalled/$(printf 'step_%08d' "$last")/model.safetensors"

# a grace period is short: the run drops the step, and between a signal and the end it only writes the checkpoint
background --model d2 --batch 1 --seq 64 --total-batch 262144 --steps 9 --lr 3e-4 --val-every 1 --out grace --train data.bin \
    --val val.bin
wait_for test -s grace/log.jsonl
sleep 0.3
kill -TERM $pid
finish
check "a signal in a step: it is dropped, its validation left out" \
    test "$(grep -oE '"event":"(step|val|checkpoint)"' grace/log.jsonl | tr -d '\n')" = '"event":"checkpoint"'
resume --model d2 --out grace --total-batch 64 --steps 1 >/dev/null
train --model d2 --batch 1 --seq 64 --steps 1 --lr 3e-4 --out graceless --train data.bin --val val.bin >/dev/null
check "a dropped step leaves no trace in the next" \
    cmp grace/step_00000001/model.safetensors graceless/step_00000001/model.safetensors

background --model d6 --batch 8 --seq 256 --steps 5 --out twice --train data.bin --tokenizer "$tmp/none"
finish
check "a missing tokenizer is no hang" test $finished -eq 1
background --model d8 --batch 8 --seq 512 --steps 5 --out twice --train data.bin
wait_for test -s twice/log.jsonl
sleep 0.3
kill -INT $pid && kill -TERM $pid
finish
check "the second signal ends at once" test $finished -eq 130 -o $finished -eq 143
check "and leaves no checkpoint" test -z "$(ls -d twice/step_???????? 2>/dev/null)"

# ms_until COMMAND...: prints the milliseconds until the command succeeds, at most about 20 s
ms_until() {
    ms_from=$(date +%s%N)
    wait_for "$@"
    echo $((($(date +%s%N) - ms_from) / 1000000))
}

# The bound allows for a busy machine: two idle cores need less than 500 ms.
if [ -n "${BIN:-}" ]; then
    skip "how soon signals are obeyed" "a program with sanitizers is too slow" 4
else
    background --threads 2 --model d6 --batch 4 --seq 256 --total-batch 1048576 --steps 5 --out soon --train data.bin
    wait_for test -s soon/log.jsonl
    sleep 0.5
    kill -TERM $pid
    check "a signal in a long step: saving begins soon" test "$(ms_until sh -c 'ls -d soon/step_*')" -lt 3000
    finish
    background --threads 2 --model d6 --batch 4 --seq 256 --steps 5 --val-every 1 --val-batches 1000000 --out sooner \
        --train data.bin --val data.bin
    wait_for has_steps sooner/log.jsonl 1
    kill -TERM $pid
    check "a signal in a validation: so it does" test "$(ms_until sh -c 'ls -d sooner/step_00000001*')" -lt 3000
    finish
    check "and the validation is left out" test $finished -eq 0 -a "$(grep -c '"event":"val"' sooner/log.jsonl)" -eq 0
    background --model d4 --steps 5 --sample-tokens 200000 --sample-every 1 --temperature 0 --out sampled --train data.bin
    wait_for has_steps sampled/log.jsonl 1
    kill -TERM $pid
    check "a signal in a sample: so it does" test "$(ms_until sh -c 'ls -d sampled/step_*')" -lt 3000
    finish
fi

background --model d1 --steps 1000000 --out usr1 --train data.bin --schedule constant --signal-status 75
wait_for has_steps usr1/log.jsonl 3
kill -USR1 $pid
check "SIGUSR1 writes a checkpoint" wait_for sh -c 'ls usr1/step_*/trainer_state.json'
saves() { [ "$(grep -c '"event":"checkpoint"' usr1/log.jsonl)" -eq "$1" ]; }
wait_for saves 1
kill -USR2 $pid
check "so does SIGUSR2" wait_for saves 2
check "and the run goes on" kill -0 $pid
kill -TERM $pid
finish
check "--signal-status is the status of a stopped run" test $finished -eq 75
background --model d1 --steps 1000000 --out xcpu --train data.bin --schedule constant
wait_for has_steps xcpu/log.jsonl 3
kill -XCPU $pid
kill -XCPU $pid
finish
check "SIGXCPU saves and ends, and a second one changes nothing" test $finished -eq 0 -a -d "$(ls -d xcpu/step_*)"
expect "a run that ends by itself has status 0" 0 "done" \
    resume --out usr1 --signal-status 75 --stop-after $(($(grep -c '"event":"step"' usr1/log.jsonl) + 2))

# --- timed checkpoints -------------------------------------------------------------------------------------------------------

timed="--model d1 --train data.bin --steps 1000000 --schedule constant --checkpoint-minutes 0.001"
background $timed --out timed
wait_for sh -c 'ls timed/step_*/trainer_state.json'
before=$(ls -d timed/step_* | head -n 1)
check "a timed checkpoint says what it is" grep -q '"kind": "timed"' "$before/trainer_state.json"
check "the next one replaces it" wait_for test ! -e "$before"
kill -9 $pid
finish
rm -rf timed/*.tmp
check "there is never more than one" test "$(ls -d timed/step_* | wc -l)" -eq 1
at=$(ls timed | sed -n 's/step_0*//p')
resume --out timed --stop-after $((at + 3)) >/dev/null
train --model d1 --train data.bin --steps 1000000 --schedule constant --checkpoint-minutes 0 --out untimed \
    --stop-after $((at + 3)) >/dev/null
last=$(printf 'step_%08d' $((at + 3)))
check "the last checkpoint replaces a timed one" test "$(cd timed && ls -d step_*)" = "$last"
check "and timed checkpoints change no bit" cmp timed/$last/model.safetensors untimed/$last/model.safetensors
check "of the state" cmp timed/$last/state_rank00000.safetensors untimed/$last/state_rank00000.safetensors

background --model d1 --train data.bin --steps 1000000 --schedule constant --out taken --checkpoint-minutes 0
wait_for has_steps taken/log.jsonl 3
mv taken taken_aside && mkdir taken && : >taken/.lock
kill -TERM $pid
finish
check "a run whose folder another one has taken ends with an error" test $finished -eq 1
check "that says so" grep -q "^error: taken: is another run's folder now" background
check "and what is lost" grep -q "^  hint: the steps after 0 are lost" background

# --- errors that are not the model's -----------------------------------------------------------------------------------------

# saved_at DIR: prints the step that, by the hint in $tmp/stderr, is saved in DIR, if DIR holds it
saved_at() {
    sa_step=$(sed -n "s|^  hint: step \([0-9]*\) is saved in $1/step_0*[0-9]*: .*--resume$|\1|p" "$tmp/stderr")
    [ -n "$sa_step" ] && [ -s "$1/$(printf 'step_%08d' "$sa_step")/trainer_state.json" ] && echo "$sa_step"
}
token_file clean.bin 3009 97 && token_file late.bin 3008 97 97 && cp late.bin badval.bin && token_file high.bin 500 97 97
data="--model $pairs/gqa2_untied_rope8 --batch 1 --seq 16 --steps 400 --schedule constant --checkpoint-minutes 0"
expect "a bad token late in the data ends the run" 1 "late.bin: token 3008 is id 97" train $data --train late.bin --out late
last=$(saved_at late)
check "its hint names the checkpoint of the last whole step" test -n "$last"
train $data --train clean.bin --out clean --stop-after "$last" >/dev/null
same=$(printf 'step_%08d' "$last")
check "which has the weights of that step" cmp late/$same/model.safetensors clean/$same/model.safetensors
check "and its state" cmp late/$same/state_rank00000.safetensors clean/$same/state_rank00000.safetensors
check "the log tells the reason" grep -q '"event":"end","step":'"$last"',"reason":"error"' late/log.jsonl
expect "resumed over the same data: the same end" 1 "token 3008 is id 97" resume --out late
check "and the same hint" test "$(saved_at late)" = "$last"
cp clean.bin late.bin
expect "with the data mended the run goes on" 0 "saved   late" resume --out late --stop-after $((last + 2))
expect "a bad token in the first batch: nothing is saved" 1 "nothing is saved" \
    train --model "$pairs/gqa2_untied_rope8" --train high.bin --batch 24 --seq 20 --steps 3 --out none_done
check "nor is a checkpoint there" test -z "$(ls none_done | grep step)"
expect "bad validation data ends a run, too" 1 "badval.bin: token 3008 is id 97" \
    train $data --train clean.bin --val badval.bin --val-every 2 --val-batches 1000 --out badval
check "with its checkpoint" test "$(saved_at badval)" = 2
cp data.bin cut.bin
background --model d1 --train cut.bin --steps 1000000 --schedule constant --out cut --checkpoint-minutes 0
wait_for has_steps cut/log.jsonl 3
: >cut.bin
finish
cp background stderr
check "a file that is cut while it is read: status 1" test $finished -eq 1
check "and a checkpoint" test -n "$(saved_at cut)"

# The log is near the limit on file sizes, the checkpoint far from it.
unit=$(sh -c "trap '' XFSZ; ulimit -f 1; head -c 4096 /dev/zero >unit" 2>/dev/null; wc -c <unit)
train --model d1 --train data.bin --steps 500 --schedule constant --stop-after 2 --out nolog >/dev/null
awk -v n=$((1200000 - 8000 - $(wc -c <nolog/log.jsonl))) 'BEGIN { for (i = 0; i < n; i += 100) printf "%099d\n", i }' >filler
sed -i '$d' nolog/log.jsonl  # a resumed run cuts the log at its end
cat filler >>nolog/log.jsonl
expect "a log that cannot be written ends the run" 1 "nolog/log.jsonl: writing failed" \
    sh -c "trap '' XFSZ; ulimit -f $((1200000 / unit)); '$bin/train_llama3' --threads 1 --out nolog --resume"
last=$(saved_at nolog)
check "with a checkpoint all the same" test "${last:-0}" -gt 2

# --- divergence --------------------------------------------------------------------------------------------------------------

ruin="--lr 1e3 --weight-decay 1000 --grad-clip 0 --schedule constant"
train --model d1 --train data.bin --steps 60 --schedule constant --checkpoint-every 2 --keep 1 --stop-after 4 \
    --out ruined >/dev/null
expect "ten steps that are not finite end the run" 1 "the last 10 steps is not finite, first in " resume --out ruined $ruin
healthy=$(sed -n 's/^  hint: \(.*\) is from before: .*/\1/p' "$tmp/stderr")
check "the hint names a checkpoint from before" grep -q '"not_finite": false' "$healthy/trainer_state.json"
check "which --keep has not removed, and later ones say what they are" \
    test "$(grep -l '"not_finite": true' ruined/*/trainer_state.json | wc -l)" -ge 5
check "the log tells the reason" grep -q '"reason":"not finite"' ruined/log.jsonl
last=$(grep -c '"event":"step"' ruined/log.jsonl)
rm -rf ruined
expect "so does a run whose last step is not finite" 1 "is not finite, first in " \
    train --model d1 --train data.bin --steps $((last - 8)) $ruin --out ruined2

cp -r "$pairs/mha_odd" huge && chmod u+w huge/*
printf '\000\000\177\177%.0s' $(seq 1024) | dd of=huge/model.safetensors bs=1 seek=$(($(wc -c <huge/model.safetensors) - 4096)) conv=notrunc 2>/dev/null
token_file huge.bin 3000 97
expect "--eval of a loss that is not finite is an error" 1 "huge: the loss on huge.bin is " \
    "$bin/train_llama3" --model huge --val huge.bin --batch 2 --seq 16 --eval

# --- a screen that is gone ---------------------------------------------------------------------------------------------------

# under nohup a run continues
if hangup_is_ignored; then
    skip "a closed terminal: the run ends with a checkpoint" "SIGHUP is ignored here"
else
    background --model d1 --steps 1000000 --out hangup --train data.bin --schedule constant
    wait_for has_steps hangup/log.jsonl 3
    kill -HUP $pid
    finish
    check "a closed terminal: the run ends with a checkpoint" \
        sh -c "test $finished -eq 0 && test -s hangup/step_*/trainer_state.json"
fi
train --model d1 --steps 1000000 --out piped --train data.bin --schedule constant | head -n 1 >/dev/null
check "a screen that nobody reads any longer: with a checkpoint, too" sh -c "test -s piped/step_*/trainer_state.json"
train --model d1 --steps 3 --out closed --train data.bin --sample-tokens 4 --sample-every 2 <&- >&- 2>&-
check "without stdin, stdout and stderr a run is the same" \
    sh -c "grep -qx '[0-9]*' closed/.lock && test -s closed/step_00000003/trainer_state.json"

# --- a full disk -------------------------------------------------------------------------------------------------------------

# full NAME COMMAND...: resumes the run in $disk from step 2 and meets a full disk
full() {
    f_name=$1
    shift
    cp -r "$disk/step_00000002" before
    expect "$f_name: one clear error" 1 "$disk/" "$@"
    check "$f_name: the checkpoint before is whole" diff -r before "$disk/step_00000002"
    check "$f_name: nothing half-made stays" test "$(cd "$disk" && ls)" = "log.jsonl
step_00000002"
    check "$f_name: the log has whole lines" test "$(grep -cv '^{"event":.*}$' "$disk/log.jsonl")" -eq 0
    rm -rf before
}
train --model d1 --steps 4 --out nofull --train data.bin >/dev/null
disk=disk
train --model d1 --steps 4 --out $disk --train data.bin --stop-after 2 >/dev/null
full "a limit on files in the state" sh -c "trap '' XFSZ; ulimit -f 1000; '$bin/train_llama3' --threads 1 --out disk --resume"
full "a limit on files in the weights" sh -c "trap '' XFSZ; ulimit -f 500; '$bin/train_llama3' --threads 1 --out disk --resume"
expect "a first checkpoint that fails names no other" 1 "none is saved yet" \
    sh -c "trap '' XFSZ; ulimit -f 500; '$bin/train_llama3' --threads 1 --model d1 --train data.bin --batch 2 --seq 32 --steps 2 --out nofirst"
resume --out $disk >/dev/null
check "with room again the run ends as if nothing had been" same_checkpoint nofull/step_00000004 $disk/step_00000004
expect "a limit on files in the log: one clear error" 1 "log.jsonl: writing failed" \
    sh -c "trap '' XFSZ; ulimit -f 8; '$bin/train_llama3' --threads 1 --model d1 --train data.bin --batch 2 --seq 32 --steps 100 --out torn"
check "and no torn line" test "$(grep -cv '^{"event":.*}$' torn/log.jsonl)" -eq 0 -a -s torn/log.jsonl
mkdir ram
if mount -t tmpfs -o size=2m none ram 2>/dev/null; then
    disk=ram/out
    train --model d1 --steps 4 --out $disk --train data.bin --stop-after 2 >/dev/null
    full "a full disk" resume --out $disk
    dd if=/dev/zero of=ram/rest bs=1024 2>/dev/null
    full "not a byte left" resume --out $disk
    expect "tokenize: a full disk" 1 "ram/x.bin" "$bin/tokenize" -o ram/x.bin text.txt
    check "tokenize: nothing half-made stays" test "$(ls ram)" = "out
rest"
    umount ram
else
    skip "a full disk" "a small tmpfs cannot be mounted here (the limit on files stands in for it)" 10
fi

# --- data --------------------------------------------------------------------------------------------------------------------

expect "a pattern without a match" 1 "none*.bin: no such token file" train --model d1 --train 'none*.bin' --out bad
expect "a folder for a file" 1 "empty: is a folder" train --model d1 --train empty --out bad
expect "a shard shorter than a row" 1 "val.bin: holds" train --model d1 --train val.bin --seq 4096 --out bad
expect "fewer rows than a batch" 1 "wanted at least 128" train --model d1 --train val.bin --batch 128 --out bad
expect "text for a token file" 1 "text.txt: magic is" train --model d1 --train text.txt --out bad
expect "a vocabulary larger than the model's" 1 "vocabulary is 257 tokens, but the model has only 97" \
    train --model "$pairs/gqa2_untied_rope8" --train data.bin --out bad
for words in '\002\000\000\000' '\000\000\000\177'; do
    cp data.bin words.bin && printf "$words" | dd of=words.bin bs=1 seek=12 conv=notrunc 2>/dev/null
    expect "a wrong vocabulary size in the header of the data" 1 "words.bin: vocabulary is" \
        train --model d1 --train words.bin --out bad
done
printf '\000\000\000\000\000\000\000\000' | dd of=words.bin bs=1 seek=24 conv=notrunc 2>/dev/null
expect "a model too large for the memory is told with what makes it large" 1 "with the vocabulary of words.bin needs" \
    train --model d1 --train words.bin --out bad
expect "data of another tokenizer" 1 "made with another tokenizer" \
    train --model d1 --train data.bin --tokenizer "$root/dev/data/tinytales/tokenizer.json" --out bad
expect "a token beyond the vocabulary" 1 "token 500 is id 97, wanted below 97" \
    train --model "$pairs/gqa2_untied_rope8" --train high.bin --seq 20 --steps 30 --out high
check "and the steps before it are saved" test -n "$(saved_at high)"
for file in "--train high.bin" "--train data97.bin --val high.bin"; do
    token_file data97.bin 500 97
    expect "a dry run reads every id: $file" 1 "high.bin: token 500 is id 97, wanted below 97" \
        train --model "$pairs/gqa2_untied_rope8" --seq 20 --dry-run $file
done
cp val.bin flipped.bin && printf X | dd of=flipped.bin bs=1 seek=2000 conv=notrunc 2>/dev/null
for file in "--train flipped.bin" "--train data.bin --val flipped.bin"; do
    expect "a dry run finds a changed byte: $file" 1 "flipped.bin: the checksum of its tokens is" \
        train --model d1 --dry-run $file
done
expect "a dry run says that the data is whole" 0 "scan    val.bin: all ids are below 257" \
    train --model d1 --dry-run --train data.bin --val val.bin
expect "a file of llm.c's, without a checksum, is whole too" 0 "scan    data97.bin" \
    train --model "$pairs/gqa2_untied_rope8" --dry-run --train data97.bin
: >empty.jsonl
expect "an empty .jsonl holds no text" 1 "empty.jsonl: holds no text" "$bin/tokenize" -o none.bin empty.jsonl
token_file mixed1.bin 500 97 && cp data.bin mixed2.bin
"$bin/tokenize" --tokenizer "$root/dev/data/tinytales/tokenizer.json" -o mixed3.bin text.txt >/dev/null
expect "shards of two tokenizers" 1 "mixed3.bin: " train --model d1 --train 'mixed[23].bin' --out bad
expect "a folder that cannot be made" 1 "text.txt" train --model d1 --steps 1 --train data.bin --out text.txt/out
check "none of these made a folder" test ! -e bad
expect "a validation file shorter than a batch is used whole" 0 "validation loss" \
    train --model d1 --steps 2 --out short --train data.bin --val shard1.bin --batch 20 --val-batches 50
loss=$(sed -n 's/.*"event":"val","step":2,"loss":\([0-9.]*\).*/\1/p' short/log.jsonl)
expect "--eval says what validation said" 0 "loss $(printf '%.6f' "$loss")" \
    train --eval --model short --val shard1.bin --batch 20
check "its tables are not on stderr" test "$(grep -cvE '^(warning|error|  hint|using)' "$tmp/stderr")" -eq 0
expect "in batches of any size" 0 "loss $(printf '%.6f' "$loss" | cut -c 1-6)" \
    train --eval --model short --val shard1.bin --batch 3
expect "--eval into a full disk" 1 "standard output" \
    sh -c "'$bin/train_llama3' --eval --model short --val shard1.bin --seq 32 >/dev/full"
expect "--eval of a preset is refused" 1 "is a preset" train --eval --model d1 --val val.bin
expect "a model that is not there" 1 "nowhere is neither a folder nor a preset" train --model nowhere --train data.bin

# --- text --------------------------------------------------------------------------------------------------------------------

generate() { "$bin/train_llama3" --model short --generate "the cat" --tokens 40 "$@" 2>/dev/null; }
generate --temperature 0 >greedy1 && generate --temperature 0 --threads 1 >greedy2
check "greedy text is the same twice" cmp greedy1 greedy2
check "and begins with the prompt" grep -q '^the cat' greedy1
generate --seed 5 >sampled1 && generate --seed 5 >sampled2 && generate --seed 6 >sampled3
check "sampled text is the same for one seed" cmp sampled1 sampled2
check "and another for another" sh -c '! cmp -s sampled1 sampled3'
expect "text into a full disk is an error" 1 "standard output: writing failed" \
    sh -c "'$bin/train_llama3' --model short --generate x >/dev/full"
"$bin/train_llama3" --model short --generate x --tokens 2 >newest && "$bin/train_llama3" --model short/step_00000002 --generate x --tokens 2 >named
check "the newest checkpoint of a folder is taken" cmp newest named
expect "chat without a template is refused by name" 1 "has no chat template" train --chat --model short
names='<|start_header_id|> <|end_header_id|> <|eot_id|>' id=257
added=$(for name in $names; do echo ",{\"id\":$id,\"content\":\"$name\",\"special\":true}" && id=$((id + 1)); done | tr -d '\n')
mkdir words && sed "s/\"special\":true}],/\"special\":true}$added],/" short/step_00000002/tokenizer.json >words/tokenizer.json
"$bin/tokenize" --tokenizer words -o words/data.bin text.txt >/dev/null
expect "a tokenizer with the template's tokens trains a model" 0 "vocabulary 260" \
    train --model d1 --steps 2 --train words/data.bin --out talker
printf 'hello\n\n/clear\nhow are you?\n/quit\nunread\n' | "$bin/train_llama3" --model talker --chat --system 'be brief' --tokens 8 --temperature 0 >answers 2>"$tmp/stderr"
check "which chats" test $? -eq 0 -a "$(wc -l <answers)" -ge 2
check "and which is taken over with its template" grep -q 'start_header_id' talker/step_00000002/tokenizer_config.json
expect "generating without a model" 1 "is missing" train --generate x --out nowhere
expect "ids stand for text without a tokenizer" 0 "5 6 7" \
    "$bin/train_llama3" --model "$pairs/gqa2_untied_rope8" --generate "5 6 7" --tokens 3
expect "a prompt that is no ids then" 1 "wanted ids from 0 to 96" train --model "$pairs/gqa2_untied_rope8" --generate "the cat"
expect "a tokenizer larger than the model" 1 \
    "tokenizer.json: has 257 tokens, but the model $pairs/gqa2_untied_rope8 has only 97" train --model "$pairs/gqa2_untied_rope8" --tokenizer short/step_00000002 --generate "the cat"
cp -r short/step_00000002 more # a pad token was added to the tokenizer, and the model not resized (unslothai/unsloth#978)
sed -i 's/"special":true}\],$/"special":true},{"id":257,"content":"<pad>","lstrip":false,"rstrip":false,"normalized":false,"special":false}],/' more/tokenizer.json
echo '{"ctx": "a<pad>", "choices": ["b", "c"], "label": 0}' >more/task.jsonl
expect "but not by its added tokens" 0 "the cat" train --model more --generate "the cat" --tokens 2
expect "a text that has one is refused" 1 'token 3 of the text is "<pad>" (257), but the model has only 257 tokens' \
    train --model more --generate "ab<pad>" --tokens 2
"$bin/tokenize" --tokenizer more -o more/data.bin text.txt >/dev/null
expect "data of that tokenizer trains" 0 "more/out/step_00000003" train --model more --train more/data.bin --steps 3 --out more/out
expect "and its export to GGUF works" 0 "exported" train --model more --export more/x.gguf
printf 'the cat <pad>' | cat text.txt - >more/pad.txt && "$bin/tokenize" --tokenizer more -o more/pad.bin more/pad.txt >/dev/null
expect "data with the token is refused before the first step" 1 "is id 257, wanted below 257" \
    train --model more --train more/pad.bin --steps 3 --out more/never
expect "and so is a question of a task" 1 '"<pad>" (257)' train --model more --eval --tasks more/task.jsonl
expect "the trained model's tokenizer is its own" 0 "the cat" train --model short/step_00000002 --generate "the cat" --tokens 2

printf '%s\n' '{"text":"a cat \u00e9\ud83d\ude00\n\u0000b"}' '{"text":""}' >lines.jsonl
"$bin/tokenize" --jsonl <lines.jsonl >ids.jsonl
check "tokenize: an empty text is no ids" test "$(tail -n 1 ids.jsonl)" = '{"ids": []}'
"$bin/tokenize" --decode <ids.jsonl | "$bin/tokenize" --jsonl >again.jsonl
check "tokenize: there and back" cmp ids.jsonl again.jsonl
"$bin/tokenize" --val-fraction 0.2 -o split.bin text.txt >/dev/null
check "tokenize: --val-fraction writes two files" test -s split_train.bin -a -s split_val.bin
expect "tokenize: a missing file" 1 "missing.txt" "$bin/tokenize" -o x.bin text.txt missing.txt
check "tokenize: writes nothing then" test ! -e x.bin
cp text.txt only.txt && ln only.txt link.bin
expect "tokenize: a text is not written over" 1 "would be overwritten" "$bin/tokenize" -o only.txt only.txt
expect "tokenize: nor under another name" 1 "would be overwritten" "$bin/tokenize" -o link.bin short.txt only.txt
check "tokenize: and is as it was" cmp text.txt only.txt
"$bin/tokenize" --train-bpe 300 -o own_tokenizer/tokenizer.json text.txt >/dev/null
expect "tokenize: nor is the tokenizer" 1 "would be overwritten" \
    "$bin/tokenize" --tokenizer own_tokenizer -o own_tokenizer/tokenizer.json text.txt
expect "tokenize: a file that may not grow is an error" 1 "File too large" \
    sh -c "ulimit -f 1; '$bin/tokenize' -o limited.bin text.txt"
check "tokenize: and nothing of it is left" sh -c '! ls | grep ^limited'
expect "tokenize: a folder for the token file" 1 "wanted the name of a file" "$bin/tokenize" -o words text.txt
expect "tokenize: makes the folder it writes into" 0 "new/folder/x_val.bin" \
    "$bin/tokenize" --val-fraction 0.1 -o new/folder/x.bin text.txt

# ./tokenize reads streams like files. It refuses other formats than text by name, with the command that converts them
tokens="$bin/tokenize --threads 1"
$tokens -o whole.bin text.txt >/dev/null
for input in '-' '/dev/stdin' '/dev/fd/0'; do
    rm -f piped.bin
    check "tokenize: $input gives the file's tokens" \
        sh -c "cat text.txt | $tokens -o piped.bin $input && cmp whole.bin piped.bin"
done
rm -f piped.bin
check "tokenize: a file as stdin, too" sh -c "$tokens -o piped.bin - <text.txt && cmp whole.bin piped.bin"
words 3000000 3 >long.txt && $tokens -o long_file.bin long.txt >/dev/null  # longer than a batch
check "tokenize: a long stream gives the file's tokens" \
    sh -c "cat long.txt | $tokens -o long_pipe.bin - && cmp long_file.bin long_pipe.bin"
rm -f long*
printf '%s\n' '{"body":"a cat","text":1}' '' '{"body":"b"}' >field.jsonl && printf '{"text":"a cat"}\n{"text":"b"}\n' >named.jsonl
$tokens -o named.bin named.jsonl >/dev/null
expect "tokenize: --show into a full disk" 1 "stdout: writing failed" sh -c "$tokens --show 1 named.bin >/dev/full"
check "tokenize: --field names the text of a .jsonl" sh -c "$tokens --field body -o field.bin field.jsonl && cmp named.bin field.bin"
check "tokenize: with --field, stdin is lines of JSON" sh -c "cat field.jsonl | $tokens --field body -o field.bin - && cmp named.bin field.bin"
check "tokenize: without it, plain text" sh -c "cat named.jsonl | $tokens -o field.bin - | grep '^1 document'"
expect "tokenize: a line of stdin without the field" 1 "stdin:3: text is missing" sh -c "{ cat named.jsonl; echo '{}'; } | $tokens --field text -o bad.bin -"
expect "tokenize: --field on a plain text" 2 "cat text.txt | ./tokenize --field body -o bad.bin -" $tokens --field body -o bad.bin text.txt
expect "tokenize: a stream of lines of JSON without --field" 0 "warning: stdin: begins with a line of JSON" sh -c "cat named.jsonl | $tokens -o field.bin -"
check "tokenize: --bytes takes it as it is" sh -c "! cat named.jsonl | $tokens --bytes -o field.bin - 2>&1 | grep warning"
expect "tokenize: no stream of tokens" 2 "--out is -, wanted the name of a file" $tokens -o - text.txt
expect "tokenize: stdin twice" 2 "given twice" $tokens -o bad.bin - /dev/stdin
mkfifo pipe && expect "tokenize: a pipe by its name" 1 "pipe: is a pipe, wanted a regular file, or - for stdin" $tokens -o bad.bin pipe
printf '\357\273\277' | cat - text.txt >mark.txt
check "tokenize: a byte order mark is no text" \
    sh -c "$tokens -o mark.bin mark.txt && cmp whole.bin mark.bin && cat mark.txt | $tokens -o mark.bin - && cmp whole.bin mark.bin"

printf '\037\213\010\000abc' >k.gz && printf '\050\265\057\375abc' >k.zst && printf '\3757zXZ\000abc' >k.xz && printf 'BZh91AY&SYabc' >k.bz2
printf 'PAR1\025\004' >k.parquet && printf 'ARROW1\000\000' >k.arrow && printf '\377\376a\000b\000' >k.utf16
printf 'm\000e\000o\000w\000' >k.utf16le && printf '\000m\000e\000o\000w' >k.utf16be && printf '[\n {"text": "a"}]' >k.json
printf '\377\376\000\000m\000\000\000' >k.utf32
{ words 10 1 && printf '\351\n'; } >k.latin1 && cp k.gz k.jsonl.gz && : >k.empty && printf '\357\273\277' >k.mark
printf '%%PDF-1.7\n%%\342\343\317\323\n' >k.pdf && printf ' \n\t\r\n' >k.blank
cp whole.bin k.tokens && { words 300000 1 && head -c 200000 /dev/urandom; } >k.tail
refuses() { # refuses FILE WORDS HINT: as a file and as a stream
    expect "tokenize: $1 as a file" 1 "$1: $2" $tokens -o bad.bin $1
    [ -z "$3" ] || check "tokenize: and the hint says $3" grep -qF -- "$3" stderr
    expect "tokenize: $1 through a pipe" 1 "stdin: $2" sh -c "cat $1 | $tokens -o bad.bin -"
}
refuses k.gz "is a gzip archive" "zcat k.gz | ./tokenize -o bad.bin -"
refuses k.jsonl.gz "is a gzip archive" "zcat k.jsonl.gz | ./tokenize --field text -o bad.bin -"
refuses k.zst "is a zstd archive" "zstdcat k.zst | ./tokenize -o bad.bin -"
refuses k.xz "is an xz archive" "xzcat k.xz | "
refuses k.bz2 "is a bzip2 archive" "bzcat k.bz2 | "
refuses k.parquet "is a Parquet file" "hf.py --rows k.parquet | ./tokenize --field text -o bad.bin -"
refuses k.arrow "is an Arrow file" "hf.py --rows k.arrow | "
refuses k.utf16 "is UTF-16 text" "iconv -f UTF-16 -t UTF-8 k.utf16 | ./tokenize -o bad.bin -"
refuses k.utf16le "is UTF-16 text" "iconv -f UTF-16LE -t UTF-8 k.utf16le | "
refuses k.utf32 "is UTF-32 text" "iconv -f UTF-32 -t UTF-8 k.utf32 | "
refuses k.utf16be "is UTF-16 text" "iconv -f UTF-16BE -t UTF-8 k.utf16be | "
refuses k.json "is a JSON array" "jq -c '.[]' k.json | ./tokenize --field text -o bad.bin -"
refuses k.latin1 "2.0 % of its bytes are no UTF-8" "iconv -f LATIN1 -t UTF-8 k.latin1 | ./tokenize -o bad.bin -"
refuses k.tail "" "--bytes takes them as they are"
refuses k.empty "holds no text" ""
refuses k.mark "holds no text" ""
refuses k.tokens "is a token file" ""
refuses k.pdf "is a PDF document" "pdftotext - - < k.pdf | ./tokenize -o bad.bin -"
refuses k.blank "holds no text: it is blank" ""
printf '{"score": NaN, "text": "a"}\n{"text": "b", "n": [-Infinity]}\n' >k.nan.jsonl && printf '{"text": null}\n' >k.null.jsonl
expect "tokenize: numbers that are not finite beside the text" 0 "2 documents" $tokens -o nan.bin k.nan.jsonl
expect "tokenize: a null is called null" 1 "k.null.jsonl:1: text is null, wanted a string" $tokens -o bad.bin k.null.jsonl
expect "tokenize: an empty file among others" 1 "k.empty: holds no text" $tokens -o bad.bin text.txt k.empty
check "tokenize: nothing is written for what is refused" sh -c '! ls | grep "^bad[.]"'
expect "tokenize: --bytes takes any bytes" 0 "1 document" $tokens --bytes -o any.bin k.latin1
expect "tokenize: also those of an archive" 0 "1 document" $tokens --bytes -o any.bin k.gz
{ words 100 1 && printf '\351\n'; } >few.txt
expect "tokenize: a byte in a hundred may be wrong" 0 "1 document" $tokens -o any.bin few.txt
expect "tokenize: a new folder is named" 0 "made folder made/by" $tokens -o made/by/it.bin text.txt
expect "tokenize: --version" 0 "tokenize (llama3.c) " $tokens --version

# --- names of folders --------------------------------------------------------------------------------------------------------

expect "slashes behind --out are not shown" 0 "saved   slash/step_00000001" train --model d1 --train data.bin --steps 1 --out slash//
check "nor logged with a checkpoint" sh -c 'grep event.:.checkpoint slash/log.jsonl | grep -qv "slash//"'
cp -r slash spoilt && printf '\377' | dd of=spoilt/step_00000001/model.safetensors bs=1 seek=9000 conv=notrunc 2>/dev/null
mkdir wanted
expect "an export that fails" 1 "checksum" "$bin/train_llama3" --model spoilt/step_00000001 --export wanted/
check "leaves the empty folder that was there" test -d wanted -a -z "$(ls -A wanted)" -a ! -e wanted.tmp
expect "an empty folder is taken" 0 "exported slash/step_00000001" "$bin/train_llama3" --model slash --export wanted/
check "and filled" test -s wanted/config.json -a -s wanted/model.safetensors -a ! -e wanted.tmp
expect "one with files is refused" 1 "--export: wanted exists, wanted a new folder" "$bin/train_llama3" --model slash --export wanted
for target in contested contested.gguf; do
    case $target in *.gguf) touch $target.tmp ;; *) mkdir $target.tmp && touch $target.tmp/config.json ;; esac
    expect "an export to $target while another process writes it" 1 "$target.tmp: another process is writing this" \
        flock $target.tmp "$bin/train_llama3" --model slash --export $target
    check "leaves the other's file" test -e $target.tmp -a ! -e $target
    expect "what a killed export left at $target is replaced" 0 "exported" "$bin/train_llama3" --model slash --export $target
    check "with nothing beside it" test -e $target -a ! -e $target.tmp
done

# --- small things that nothing else looks at -----------------------------------------------------------------------------------

check "flags are printed in columns" sh -c "'$bin/train_llama3' --model d1 --train data.bin --dry-run | sed -n '/^Model and data/,/^Text/p' | grep -q '^Training  '"
check "which begin alike" sh -c "! '$bin/train_llama3' --model d1 --train data.bin --dry-run | sed -n '/^Model and data/,/^Text/p' | grep -vE '^.{16} [a-z]'"
train --model d1 --train data.bin --steps 1 --out tiny >/dev/null 2>&1 && cp -r tiny/step_00000001 odd_config
sed -i 's/{/{"num_hidden_layer": 1,/' odd_config/config.json
expect "a field that is one letter off is told" 0 'the field "num_hidden_layer" is unknown and ignored' \
    "$bin/train_llama3" --model odd_config --generate a --tokens 1
train --model tiny --lora 4 --train data.bin --steps 1 --out adapted >/dev/null 2>&1
check "the last line asks with the first words of the data" sh -c "'$bin/train_llama3' --model tiny --train data.bin --seq 32 --batch 2 --steps 1 \
    --sample-tokens 0 --out asks 2>/dev/null | tail -n 1 | grep -qF -- '--generate \"$(cut -c 1-12 text.txt | head -n 1)'"
expect "@@ stands for the text @" 0 "@home" "$bin/train_llama3" --model tiny --generate @@home --tokens 1
expect "another alpha than the adapters have is refused" 1 "--lora-alpha: is 1, but the adapters of" \
    train --model adapted --lora-alpha 1 --train data.bin --steps 1 --out adapted2
tr e '\000' <short.txt >zeros.txt && "$bin/tokenize" --bytes -o zeros.bin zeros.txt >/dev/null
train --model d1 --train data.bin --val zeros.bin --val-batches 1 --steps 1 --out zeros >/dev/null 2>&1
check "every byte is text for bits per byte, also 0" awk -F '[:,}]' '/"event":"val"/ { n += ($6 - $8 * log(2)) ^ 2 < 1e-10 }
    END { exit n != 1 }' zeros/log.jsonl

# --- the memory plan -----------------------------------------------------------------------------------------------------------

# bounds NAME FLAGS...: the process stays below the plan, by at most 8 MiB or 5 %
bounds() {
    b_name=$1
    shift
    "$bin/train_llama3" --train data.bin --steps 1 --sample-tokens 8 --seq 32 --out bound "$@" >bound.txt 2>&1
    rm -rf bound
    check "the plan bounds $b_name" awk '$1 $2 == "memoryneed" { need = $3 } /^done/ { peak = $(NF - 1) }
        END { print need, peak; exit !(peak > 0 && peak <= need && (need - peak <= 8 || need - peak <= need / 20)) }' bound.txt
}
if [ -z "${BIN:-}" ]; then
    token_file large.bin 2000 2000
    train --model d2 --train data.bin --steps 1 --out small >/dev/null 2>&1
    bounds "the smallest run" --model d1 --batch 1 --threads 1 --sample-tokens 0
    bounds "one thread" --model d2 --batch 4 --threads 1
    bounds "eight threads" --model d2 --batch 4 --threads 8
    bounds "rows of one token" --model d2 --batch 1 --seq 1
    bounds "long rows" --model d1 --batch 1 --seq 1024
    bounds "many micro-batches" --model d2 --batch 8 --seq 64 --total-batch 2048
    bounds "documents and a validation" --model d2 --batch 4 --documents mask --val data.bin --val-batches 2
    bounds "adapters" --model small --lora 8 --batch 4
    bounds "a model that was trained" --model small --batch 4
    bounds "a larger vocabulary" --model d2 --batch 4 --tokenizer "$root/dev/data/tinytales/tokenizer.json" --train large.bin
    bounds "checkpoints" --model d3 --batch 2 --steps 3 --checkpoint-every 1
    bounds "a larger model" --model d4 --batch 1 --seq 64
    case $(ldd "$bin/train_llama3" 2>/dev/null) in
        *libgomp*)
            expect "threads that cannot start" 1 "error: --threads: of 8 threads only" \
                sh -c "ulimit -d 30000; '$bin/train_llama3' --model d1 --train data.bin --threads 8 --out few"
            expect "also of tokenize" 1 "error: --threads: of 8 threads only" \
                sh -c "ulimit -d 30000; '$bin/tokenize' --threads 8 -o few.bin text.txt"
            ;;
        *) skip "threads that cannot start" "OpenMP is not GNU's" 2 ;;
    esac
else
    skip "the memory plan" "sanitizers take memory of their own" 14
fi
cd "$root" || exit 1
summary
