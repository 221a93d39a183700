#!/bin/sh
# test_several_ranks.sh -- a run of several ranks: they see the rows of one process, agree on every decision, own shards of the
# optimizer, write one checkpoint, and end together. The trainer is the CPU's (ranks_trainer.c). Run from the project's root.
. dev/test/lib.sh
trainer=$bin/build/ranks_trainer
[ -n "${BIN:-}" ] && trainer=$bin/ranks_trainer
cd "$tmp" || exit 1
words 4000 1 >text.txt && words 1500 2 >val.txt
"$bin/tokenize" -o data.bin text.txt >/dev/null && "$bin/tokenize" -o val.bin val.txt >/dev/null || exit 1

# a run of 24 rows a step, on one thread for each rank
flags="--threads 1 --model d1 --train data.bin --val val.bin --seq 32 --batch 1 --total-batch 768 --lr 3e-3 --sample-tokens 0 \
    --steps 20 --val-every 10"
export RANKS_MEMORY="$tmp/memory"
# ranks N FLAGS...: this run on N ranks
ranks() {
    n=$1
    shift
    rm -f "$RANKS_MEMORY"
    "$trainer" --ranks "$n" $flags "$@"
}
hang='' log=background
# background_ranks N FLAGS...: starts the same run in the background, as process $pid that prints to $tmp/$log; it runs for long
background_ranks() {
    n=$1
    shift
    rm -f "$RANKS_MEMORY"
    "$trainer" --ranks "$n" $hang $flags --steps 100000 --val-every 0 "$@" >"$tmp/$log" 2>&1 </dev/null &
    pid=$!
    started="${started:-} $pid"
}
# column KEY EVENT LOG: prints the number KEY of each such event of the log
column() { sed -n "s/^{\"event\":\"$2\".*\"$1\":\([^,}]*\).*/\1/p" "$3"; }
# close_to LIMIT KEY A B: the steps' numbers of two logs differ by at most LIMIT, relative to the larger one
close_to() {
    column "$2" step "$3" >"$tmp/a" && column "$2" step "$4" >"$tmp/b"
    paste "$tmp/a" "$tmp/b" | awk -v limit="$1" '
        { d = $1 - $2; d = d < 0 ? -d : d; m = $1 > $2 ? $1 : $2; if (d > limit * m) { exit bad = 1 } n++ }
        END { exit bad || n < 1 }'
}
# rank_pid RANK: prints the process of a rank of $pid
rank_pid() {
    for p in /proc/[0-9]*; do
        [ "$(sed -n 's/^PPid:[[:space:]]*//p' "$p/status" 2>/dev/null)" = "$pid" ] &&
            tr '\0' '\n' <"$p/environ" | grep -qx "LLAMA3_RANK=$1" && echo "${p#/proc/}"
    done
}
# chain NAME "COUNTS" FLAGS...: the run NAME_chain goes on for 5 steps on each of these numbers of ranks
chain() {
    c=$1 counts=$2
    shift 2
    for n in $counts; do
        stop=$(($(ls "${c}_chain" 2>/dev/null | sed -n 's/^step_0*//p' | tail -n 1) + 5))
        expect "$c: $n ranks go on to step $stop" 0 "saved   ${c}_chain/$(printf 'step_%08d' $stop)" \
            ranks $n "$@" --out "${c}_chain" --resume --stop-after $stop
    done
}
first_step() { grep -m 1 '"event":"step"' "$1/log.jsonl" >"$tmp/first.$2"; }

# --- the same run on 1 to 6 processes ----------------------------------------------------------------------------------------

"$bin/train_llama3" $flags --out one >/dev/null 2>&1
for n in 2 3 6; do
    expect "$n ranks" 0 "saved   out$n/step_00000020" ranks $n --out out$n
    first_step one a && first_step out$n b
    check "$n ranks: loss of the first step within 1e-6" close_to 1e-6 loss "$tmp/first.a" "$tmp/first.b"
    check "$n ranks: norm of the first step within 1e-6" close_to 1e-6 gnorm "$tmp/first.a" "$tmp/first.b"
    check "$n ranks: losses of all steps within 1e-4" close_to 1e-4 loss one/log.jsonl out$n/log.jsonl
    check "$n ranks: a state file each" test "$(find out$n/step_00000020 -name 'state_rank*' | wc -l)" -eq $n
    check "$n ranks: the checkpoint is whole" "$bin/train_llama3" --verify out$n/step_00000020
    check "$n ranks: one line a step" test "$(column loss step out$n/log.jsonl | wc -l)" -eq 20
done
check "one of them alone is the plain trainer" "$trainer" $flags --out alone
check "with its bits" same_checkpoint one/step_00000020 alone/step_00000020
ranks 3 --out again >/dev/null 2>&1
check "twice the same bits" same_checkpoint out3/step_00000020 again/step_00000020

RANKS_SLOW=1 && export RANKS_SLOW
expect "a rank that is slow is told, by the time that it computes" 0 "slow    rank 1 on host $(uname -n) computes " ranks 3 --out slow --steps 40
unset RANKS_SLOW
check "once" test "$(grep -c '^slow ' "$tmp/stdout")" -eq 1
check "also in the log" grep -q '^{"event":"slowest","step":20,"rank":1,"host":"[^"]*","busy_ms":[0-9.]*,"others_ms":[0-9.]*}$' slow/log.jsonl
check "the summary has the speed of all and of each" grep -q '^done .* tokens/s ([0-9,]* a rank)' "$tmp/stdout"

# several ranks validate a model that one process trained: sums of rows add up in the order of rows
for n in 1 2 5; do
    ranks $n --model one/step_00000020 --lr 0 --steps 1 --batch 3 --total-batch 2880 --val-batches 4 --out eval$n >/dev/null 2>&1
done
check "a validation" test -n "$(column loss val eval1/log.jsonl)"
check "2 ranks: the same digits" test "$(column loss val eval2/log.jsonl)" = "$(column loss val eval1/log.jsonl)"
check "5 ranks, one of which has no batch: the same digits" test "$(column loss val eval5/log.jsonl)" = "$(column loss val eval1/log.jsonl)"

# --- ranks that share rows ---------------------------------------------------------------------------------------------------

token_file ids.bin 2000 97 && token_file val_ids.bin 501 97
# shared N PARTS FLAGS...: a run on N ranks, PARTS of which share each row, of a model with 4 query and 2 key heads
shared() {
    n=$1 parts=$2
    shift 2
    rm -f "$RANKS_MEMORY"
    "$trainer" --ranks "$n" $small --seq-parallel "$parts" "$@"
}
small="--threads 1 --model $pairs/gqa2_untied_rope8 --train ids.bin --val val_ids.bin --seq 20 --batch 1 --total-batch 240 --lr 3e-3 \
    --sample-tokens 0 --steps 20 --val-every 10 --val-batches 11"
near() { awk -v a="$1" -v b="$2" 'BEGIN { d = a - b; exit !(a > 0 && d < 1e-7 * a && -d < 1e-7 * a) }'; }
# are_one NAME FLAGS...: 2, 4 and 6 ranks that share rows train as one process does; without FULL=1, 2 and 6 only those of `plain`
are_one() {
    what=$1
    shift
    "$bin/train_llama3" $small "$@" --out whole_$what >/dev/null 2>&1
    for n in 2 4 6; do
        [ $n -eq 4 ] || [ $what = plain ] || [ "${FULL:-0}" = 1 ] ||
            { skip "$n ranks share rows, $what" "FULL=1 runs it" 4 && continue; }
        expect "$n ranks share rows, $what" 0 "saved   shared_$what$n/step_00000020" shared $n 2 "$@" --out shared_$what$n
        first_step whole_$what a && first_step shared_$what$n b
        check "$n ranks share rows, $what: loss of the first step within 1e-6" close_to 1e-6 loss "$tmp/first.a" "$tmp/first.b"
        check "$n ranks share rows, $what: its norm within 1e-6" close_to 1e-6 gnorm "$tmp/first.a" "$tmp/first.b"
        check "$n ranks share rows, $what: losses of all steps within 1e-4" \
            close_to 1e-4 loss whole_$what/log.jsonl shared_$what$n/log.jsonl
    done
}
are_one plain
cp -r "$pairs/gqa2_untied_rope8" separated && sed 's/"bos_token_id": null/"bos_token_id": 7/' "$pairs/gqa2_untied_rope8/config.json" >separated/config.json
are_one documents --model separated --documents mask
are_one adapters --lora 4 --batch 2
{ head -c 4 ids.bin && printf '\002\000\000\000' && tail -c +9 ids.bin && head -c 250 /dev/zero | tr '\000' '\025'; } >masked.bin
are_one masked --model separated --train masked.bin
check "masked: as many targets are trained" \
    test "$(column trained step whole_masked/log.jsonl)" = "$(column trained step shared_masked4/log.jsonl)"
are_one mixed --train ids.bin:0.7,val_ids.bin:0.3
check "mixed: the first step's losses by source" \
    near "$(column sources step whole_mixed/log.jsonl | head -n 1 | tr -d '[')" "$(column sources step shared_mixed4/log.jsonl | head -n 1 | tr -d '[')"
for n in 2 6; do
    shared $n 2 --model whole_plain/step_00000020 --lr 0 --steps 1 --batch 3 --total-batch 360 --out shared_eval$n >/dev/null 2>&1
done
"$bin/train_llama3" $small --model whole_plain/step_00000020 --lr 0 --steps 1 --batch 3 --total-batch 360 --out whole_eval >/dev/null 2>&1
check "a validation over shared rows" test -n "$(column loss val whole_eval/log.jsonl)"
check "2 ranks: the same within 1e-7" near "$(column loss val whole_eval/log.jsonl)" "$(column loss val shared_eval2/log.jsonl)"
check "6 ranks: the same digits" test "$(column loss val shared_eval6/log.jsonl)" = "$(column loss val shared_eval2/log.jsonl)"
for i in 0 1 2 3 4 5 6 7 8 9; do
    echo "{\"ctx\": \"the bird $i sat\", \"choices\": [\"on it\", \"dog $i\", \"over the moon\"], \"label\": $((i % 3))}"
done >tasks.jsonl
asked="--model d6 --lr 0 --steps 1 --seq 32 --batch 2 --total-batch 128 --val-every 0 --tasks tasks.jsonl"
"$bin/train_llama3" $flags $asked --out whole_tasks >/dev/null 2>&1
ranks 4 $asked --seq-parallel 2 --out shared_tasks >/dev/null 2>&1
check "questions are answered" test -n "$(column acc_norm task whole_tasks/log.jsonl)"
check "and alike where rows are shared" \
    test "$(column acc task whole_tasks/log.jsonl; column acc_norm task whole_tasks/log.jsonl)" = \
    "$(column acc task shared_tasks/log.jsonl; column acc_norm task shared_tasks/log.jsonl)"
shared 4 2 --out shared_again >/dev/null 2>&1
check "shared rows: twice the same bits" same_checkpoint shared_plain4/step_00000020 shared_again/step_00000020
shared 4 2 --out shared_parts --stop-after 7 >/dev/null 2>&1
expect "stopped and resumed" 0 "saved   shared_parts/step_00000020" shared 4 2 --out shared_parts --resume
check "with the same bits" same_checkpoint shared_plain4/step_00000020 shared_parts/step_00000020
shared 4 2 --total-batch 0 --batch 3 --out shared_pinned --stop-after 7 >/dev/null 2>&1
expect "a step has the tokens of the groups" 0 "120 tokens (2 x 3 x 20)" \
    "$bin/train_llama3" --threads 1 --out shared_pinned --resume --stop-after 10
check "also where one process goes on" grep -q '"total_batch": *120' shared_pinned/step_00000010/trainer_state.json
rm -f "$RANKS_MEMORY"
expect "or others share rows" 0 "120 tokens (1 x 6 x 20 x 1 group of 2 processes)" \
    "$trainer" --ranks 2 --threads 1 --seq-parallel 2 --out shared_pinned --resume --batch 6
expect "parts that do not divide the ranks" 1 "--seq-parallel: is 2, wanted a divisor of the 3 processes" shared 3 2 --out refused
expect "a row" 1 "--seq-parallel: is 2, wanted a divisor of the 21 tokens of a row" shared 2 2 --seq 21 --total-batch 0 --out refused
expect "the heads" 1 "--seq-parallel: is 4, wanted a divisor of the 2 key heads" shared 4 4 --out refused
check "leave nothing behind" test ! -e refused

# --- Muon takes whole matrices ------------------------------------------------------------------------------------------------

muon="--model d2 --optimizer muon"
"$trainer" $flags $muon --out whole1 >/dev/null 2>&1
for n in 2 3; do
    expect "$n ranks, whole matrices" 0 "saved   whole$n/step_00000020" ranks $n $muon --out whole$n
    check "$n ranks, whole matrices: losses within 1e-4" close_to 1e-4 loss whole1/log.jsonl whole$n/log.jsonl
done
ranks 3 $muon --out whole_again >/dev/null 2>&1
check "twice the same bits" same_checkpoint whole3/step_00000020 whole_again/step_00000020
ranks 3 $muon --out whole_parts --stop-after 7 >/dev/null 2>&1
expect "stopped and resumed" 0 "saved   whole_parts/step_00000020" ranks 3 --out whole_parts --resume
check "with the same bits" same_checkpoint whole3/step_00000020 whole_parts/step_00000020
chain whole "1 3" $muon
check "m of a matrix lies on several ranks, v on none" \
    test "$(cat whole_chain/step_00000010/state_rank* | tr ',' '\n' | grep -ac '"m.model.layers.0.mlp.up_proj.weight@')$(
        cat whole_chain/step_00000010/state_rank* | grep -ac '"v.model.layers.0.mlp')" = 20
chain whole "2 1" $muon
check "the losses are those of one process" close_to 1e-4 loss whole1/log.jsonl whole_chain/log.jsonl
expect "AdamW does not take its state" 1 "its state is of the optimizer muon, but this run's is adamw" \
    "$bin/train_llama3" --resume --out whole_chain --steps 30 --optimizer adamw

# --- two hosts: network namespaces with a cable between them -------------------------------------------------------------------

host_a=llmc_a_$$ host_b=llmc_b_$$
end_hosts() { # ends the processes that still run on them
    for host in $host_a $host_b; do ip netns pids $host 2>/dev/null; done | xargs -r kill -9
}
cut_hosts() { end_hosts; ip netns del $host_a 2>/dev/null; ip netns del $host_b 2>/dev/null; }
make_hosts() {
    ip netns add $host_a && ip netns add $host_b &&
        ip link add cable netns $host_a type veth peer name cable netns $host_b &&
        ip -n $host_a addr add 10.83.0.1/24 dev cable && ip -n $host_b addr add 10.83.0.2/24 dev cable &&
        for host in $host_a $host_b; do ip -n $host link set lo up && ip -n $host link set cable up; done
}
# on_host RANK FLAGS...: one rank of two, each on its own host
on_host() {
    rank=$1 host=$host_a
    shift
    [ "$rank" -eq 0 ] || host=$host_b
    RANK=$rank WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=${address:-10.83.0.1} MASTER_PORT=29500 \
        ip netns exec $host "$trainer" $flags "$@" </dev/null
}
trap 'ended=$?; cut_hosts; (exit $ended); cleanup' EXIT
hosts=
if make_hosts 2>/dev/null; then
    rm -f "$RANKS_MEMORY"
    on_host 1 --out hosts >"$tmp/rank1" 2>&1 &
    expect "two hosts" 0 "saved   hosts/step_00000020" on_host 0 --out hosts
    wait $!
    check "both end well" test $? -eq 0
    check "with the bits of two ranks on one host" same_checkpoint out2/step_00000020 hosts/step_00000020
    # hosts_wait ADDRESS_0 ADDRESS_1: starts both ranks; each takes its ADDRESS as rank 0's
    hosts_wait() {
        rm -f "$RANKS_MEMORY"
        address=$2 on_host 1 --out wrong >"$tmp/rank1" 2>&1 &
        second=$!
        address=$1 on_host 0 --out wrong >"$tmp/rank0" 2>&1 &
        first=$!
    }
    hosts_wait 10.83.0.2 10.83.0.2
    wait $first
    check "the address of another host ends rank 0" test $? -eq 1
    check "which tells it" grep -q '^error: 10.83.0.2: is not an address of this host, wanted that of the host where rank 0 runs' "$tmp/rank0"
    check "and rank 1 tells where it looks" wait_for grep -q '^waiting for rank 0 at 10.83.0.2, port 29500' "$tmp/rank1"
    end_hosts
    hosts_wait 10.83.0.1 10.83.0.9
    check "an address of nobody: rank 1 tells where it looks" wait_for grep -q '^waiting for rank 0 at 10.83.0.9, port 29500' "$tmp/rank1"
    check "and rank 0 for whom it waits, and where" \
        wait_for grep -q '^waiting for rank 1 of 2 at 10.83.0.1 (10.83.0.1), port 29500' "$tmp/rank0"
    end_hosts
    wait $first $second 2>/dev/null
    rm -f "$RANKS_MEMORY"
    on_host 1 --out cut --steps 1000000 --val-every 0 --checkpoint-every 5 >"$tmp/cut1" 2>&1 &
    second=$!
    on_host 0 --out cut --steps 1000000 --val-every 0 --checkpoint-every 5 >"$tmp/cut0" 2>&1 &
    first=$!
    wait_for has_steps cut/log.jsonl 6
    ip -n $host_a link set cable down # its ranks see this after 20 s, and the end of the run is checked below
    rm -f "$RANKS_MEMORY"
    hosts=made
fi

# so are the ranks of a run of which one is stopped
log=silent && background_ranks 3 --out still && log=background
wait_for has_steps still/log.jsonl 3
kill -STOP "$(rank_pid 1)"
silent=$pid

# --- what one process does alone ---------------------------------------------------------------------------------------------

expect "--help ends all ranks" 0 "--total-batch" "$trainer" --ranks 3 --help
expect "--verify, too" 0 "whole   one/step_00000020" "$trainer" --ranks 3 --verify one
expect "a model is exported once" 0 "exported one/step_00000020" "$trainer" --ranks 3 --model one --export exported
"$trainer" --ranks 3 --model exported --generate "the cat" --tokens 4 >"$tmp/text" 2>&1
check "a text comes once" sh -c "grep -o 'the cat' '$tmp/text' | grep -c . | grep -qx 1"

# --- resuming ----------------------------------------------------------------------------------------------------------------

ranks 3 --out parts --stop-after 7 >/dev/null 2>&1
expect "stopped and resumed" 0 "saved   parts/step_00000020" ranks 3 --out parts --resume
check "it has the same bits" same_checkpoint out3/step_00000020 parts/step_00000020
chain adamw "4 2 1 6"
check "the losses are those of one process" close_to 1e-4 loss one/log.jsonl adamw_chain/log.jsonl
cp -r out3 bad && rm -r bad/step_00000020 && ranks 3 --out bad --resume --steps 20 --checkpoint-every 7 >/dev/null 2>&1
printf '\377' | dd of=bad/step_00000020/state_rank00002.safetensors bs=1 seek=9000 conv=notrunc 2>/dev/null
expect "the newest checkpoint is damaged: all ranks take the one before" 0 "resume  bad/step_00000014, step 14" ranks 3 --out bad --resume
check "which one of them tells" test "$(grep -c 'taking the checkpoint before it' "$tmp/stderr")" -eq 1
check "with the same bits" cmp out3/step_00000020/model.safetensors bad/step_00000020/model.safetensors
expect "none is left: all start at step 0" 0 "fresh holds no checkpoint yet" ranks 3 --out fresh --resume --stop-after 2
expect "a checkpoint by its name" 0 "saved   elsewhere/step_00000016" \
    ranks 3 --resume bad/step_00000014 --out elsewhere --stop-after 16
expect "a folder of checkpoints" 0 "resume  bad/step_00000020" ranks 3 --resume bad --out further --steps 22
expect "5 ranks cannot take the step's tokens" 1 "--total-batch" ranks 5 --out adamw_chain --resume --steps 30
ranks 2 --total-batch 0 --batch 6 --seq 32 --steps 4 --stop-after 2 --out pinned >/dev/null 2>&1
expect "the tokens of a step stay on another number of ranks" 0 "384 tokens (4 x 3 x 32)" \
    "$trainer" --threads 1 --out pinned --resume --batch 3
expect "also where they don't fit, which tells what does" 1 "these flags fit: --batch 4" ranks 3 --out pinned --resume --batch 5 --steps 8

# the ranks' states hold the exact weights of a checkpoint in 16 bits: one process writes them, by a step at rate 0
ranks 3 --out half --export-dtype bf16 --stop-after 7 >/dev/null 2>&1
ranks 3 --out exact --stop-after 7 >/dev/null 2>&1
check "a checkpoint in 16 bits goes on alone" "$bin/train_llama3" --threads 1 --resume half/step_00000007 --out written \
    --export-dtype f32 --lr 0 --steps 8
check "and its exact weights are written" cmp exact/step_00000007/model.safetensors written/step_00000008/model.safetensors

# --- weights in shards (--zero 3): all ranks pass the layers at the same places, and write the weights together -----------------

RANKS_ZERO=3
export RANKS_ZERO
expect "weights in shards" 0 "saved   parted/step_00000020" ranks 3 --out parted --sample-tokens 5 --sample-every 10
for file in model state_rank00000 state_rank00001 state_rank00002; do
    check "they are written whole: $file" cmp out3/step_00000020/$file.safetensors parted/step_00000020/$file.safetensors
done
check "with samples" test "$(grep -c '"event":"sample"' parted/log.jsonl)" -eq 2
check "and the same validation" test "$(column loss val parted/log.jsonl)" = "$(column loss val out3/log.jsonl)"
ranks 5 --model one/step_00000020 --lr 0 --steps 1 --batch 3 --total-batch 2880 --val-batches 4 --out evalzero >/dev/null 2>&1
check "a rank without a batch passes one, too: the same digits" test "$(column loss val evalzero/log.jsonl)" = "$(column loss val eval1/log.jsonl)"
ranks 2 --out parted_half --export-dtype bf16 --stop-after 7 >/dev/null 2>&1
expect "a checkpoint in 16 bits goes on in other shards" 0 "saved   parted_half/step_00000020" ranks 3 --out parted_half --resume
(
    trap '' XFSZ
    ulimit -f 128
    timeout 60 "$trainer" --ranks 3 $flags --out full >"$tmp/stdout" 2>"$tmp/stderr"
    echo $? >"$tmp/status"
)
check "a full disk ends all ranks" test "$(cat "$tmp/status")" -eq 1
check "and is told" grep -q "^error: .*model.safetensors.*File too large" "$tmp/stderr"
check "nothing half written stays" test -z "$(ls full | grep step_)"
expect "steps that are not finite are named by all" 1 "is not finite, first in" ranks 3 --lr 1e3 --beta1 0 --beta2 0 --eps 1e-30 --weight-decay 1e3 --val-every 0 --steps 200 --out nan
for of in plain sharded; do
    [ $of = sharded ] && export RANKS_ZERO || unset RANKS_ZERO
    ranks 3 --model one/step_00000020 --lora 3 --steps 5 --out lora_$of >/dev/null 2>&1
    RANKS_ZERO=3
done
check "adapters in shards are written whole" cmp lora_plain/step_00000005/adapter_model.safetensors lora_sharded/step_00000005/adapter_model.safetensors
unset RANKS_ZERO

# --- ending ------------------------------------------------------------------------------------------------------------------

background_ranks 3 --out asked
wait_for has_steps asked/log.jsonl 3
kill -USR1 "$(rank_pid 2)"
check "SIGUSR1 to one rank saves" wait_for sh -c 'ls asked | grep -q step_'
check "and the run goes on" wait_for has_steps asked/log.jsonl $(($(grep -c '"event":"step"' asked/log.jsonl) + 3))
kill -INT "$(rank_pid 1)"
wait_for grep -q '"event":"end"' asked/log.jsonl || kill -9 $pid
finish
check "SIGINT to one rank ends them all" test "$finished" -eq 0
check "with the last step" test -d "asked/step_$(printf %08d "$(column step step asked/log.jsonl | tail -n 1)")"
background_ranks 3 --out stopped
wait_for has_steps stopped/log.jsonl 3
kill -TERM $pid
finish
check "SIGTERM ends a run well" test "$finished" -eq 0
check "with a checkpoint" "$bin/train_llama3" --verify stopped
last=$(column step step stopped/log.jsonl | tail -n 1)
check "of the last step" test -d "stopped/step_$(printf %08d "$last")"

background_ranks 3 --steps -1 --minutes 0.1 --checkpoint-every 5 --out slower
wait_for has_steps slower/log.jsonl 3
slow_down "$(rank_pid 0)" &
finish
last=$(column steps plan slower/log.jsonl | tail -n 1) at=$(column step plan slower/log.jsonl | tail -n 1)
check "if rank 0's steps become slower, all ranks end sooner" test "$finished" -eq 0 -a -d "slower/step_$(printf %08d "${last:-1}")"
middle=slower/step_$(printf %08d $(((${at:-0} + 4) / 5 * 5)))
rm -f "$RANKS_MEMORY"
expect "2 ranks that resume have the same end" 0 "saved   sooner/step_$(printf %08d "${last:-1}")" \
    "$trainer" --ranks 2 --threads 1 --resume "$middle" --out sooner

background_ranks 3 --out pressed
wait_for has_steps pressed/log.jsonl 3
pids="$(rank_pid 0) $(rank_pid 1) $(rank_pid 2)"
for times in 1 2 3; do kill -INT $pids $pid 2>/dev/null; done
finish
check "one Ctrl-C counts once, however often it arrives" test "$finished" -eq 0
check "it ends the run with its last step" test -d "pressed/step_$(printf %08d "$(column step step pressed/log.jsonl | tail -n 1)")"

background_ranks 3 --out killed --checkpoint-every 2
wait_for has_steps killed/log.jsonl 3
kill -9 "$(rank_pid 2)"
finish
check "a rank that is killed ends the run" test "$finished" -ne 0
check "and is named" grep -q "rank 2" "$tmp/background"
check "its checkpoints are whole" "$bin/train_llama3" --verify killed
last=$(ls killed | sed -n 's/^step_0*\([0-9]*\)$/\1/p' | tail -n 1)
expect "and the run goes on" 0 "saved   killed/step_" ranks 2 --out killed --resume --steps 100000 --stop-after $((last + 2))

# named NAME HOW LOG: the run has ended with 1, and one line says HOW of rank 1
named() {
    check "$1: ends the run" test "$finished" -eq 1
    check "$1: is told once, with rank, host and step" sh -c "grep -c '^error: ' '$3' | grep -qx 1 &&
        grep -q '^error: rank 1 on host .* $2, last seen in step [0-9]' '$3'"
}
export RANKS_HANG=1:5 # rank 1 stands still in step 5
log=hangs.txt && background_ranks 3 --out hangs && minute=$pid
wait_for has_steps hangs/log.jsonl 4
hang="--hang-timeout 0" log=hangs0.txt && background_ranks 3 --out hangs0 && ever=$pid
wait_for has_steps hangs0/log.jsonl 4
hang="--hang-timeout 2" log=background && background_ranks 3 --out hangs2
sleep 6
check "by default a rank may stand still for a minute" kill -0 $minute
check "--hang-timeout 0: as long as it likes" kill -0 $ever
kill -9 $minute $ever
finish
named "a rank that hangs" "hangs: it has been alone behind all others for 2 s" "$tmp/background"
hang=''
unset RANKS_HANG
pid=$silent
finish
named "a rank that is stopped" "was silent for 20 s" silent

expect "what rank 0 alone refuses is told once" 1 "one holds the checkpoints of another run" ranks 3 --out one

# --- what does not fit together ----------------------------------------------------------------------------------------------

# by_hand RANK FLAGS...: one rank of two, as torchrun's variables would start it
by_hand() {
    rank=$1
    shift
    RANK=$rank WORLD_SIZE=2 LOCAL_RANK=$rank LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
        "$trainer" --threads 1 --model d1 --train "$tmp/data.bin" --seq 32 --batch 1 --sample-tokens 0 --steps 3 "$@"
}
port=$((21000 + $$ % 9000))
# refused NAME PATTERN DIR FLAGS_0 FLAGS_1: the two ranks, the second one in DIR, end with 1, and rank 0 reports PATTERN
refused() {
    port=$((port + 1))
    by_hand 0 $4 >"$tmp/zero" 2>&1 </dev/null &
    (cd "$3" && by_hand 1 $5) >"$tmp/rank1" 2>&1 </dev/null
    one=$?
    wait $!
    check "$1: ends both" test "$one $?" = "1 1"
    check "$1: is told once" sh -c "cat '$tmp/zero' '$tmp/rank1' | grep -c '^error: ' | grep -qx 1 && grep -q '$2' '$tmp/zero'"
}
refused "another flag" '^error: rank 1: --lr is "0.002", but rank 0 has "0.001"' . "--out flags --lr 1e-3" "--out flags --lr 2e-3"
check "and nothing is written" test ! -e flags
mkdir -p other/shared && echo 0123456789abcdef >other/shared/.ranks
refused "an --out that is not shared" '^error: rank 1: --out: shared on host .* is not the folder of rank 0' other "--out shared" "--out shared"
# differs FILE PATTERN FLAGS: the second rank's folder has another FILE
differs() {
    refused "another $1" "^error: rank 1: $2 is \"[0-9a-f]*\", but rank 0 has \"[0-9a-f]*\"" other "--out $tmp/x $3" "--out $tmp/x $3"
}
token_file plain.bin 4000 256 && cp -r plain.bin val.bin exported other
echo '{"ctx": "the cat", "choices": [" sat", " ran"], "label": 0}' >tasks.jsonl
sed 's/ran/sang/' tasks.jsonl >other/tasks.jsonl
words 1500 3 >other.txt && "$bin/tokenize" -o other/val.bin other.txt >/dev/null
differs "--val" "the fingerprint of --val" "--val val.bin"
differs "--tasks" "the fingerprint of --tasks" "--tasks tasks.jsonl"
sed -i 's/begin_of_text/begin_of_teXt/' other/exported/tokenizer*.json
differs "tokenizer" "the fingerprint of the tokenizer" "--train plain.bin --tokenizer exported/tokenizer.json"
printf '\001' | dd of=other/exported/model.safetensors bs=1 seek=9000 conv=notrunc 2>/dev/null
cp exported/tokenizer*.json other/exported
differs "model" "the checksum of the weights" "--model exported"
check "and nothing is written, either" test ! -e x

# --- the end of the run on two hosts ------------------------------------------------------------------------------------------

if [ -n "$hosts" ]; then
    wait $first
    check "a cut cable ends rank 0" test $? -eq 1
    wait $second
    check "and rank 1" test $? -eq 1
    check "each names the other" sh -c "grep -q '^error: rank 1 on host .* silent for 20 s' '$tmp/cut0' &&
        grep -q '^error: .*rank 0 on host .* silent for 20 s' '$tmp/cut1'"
    check "the last checkpoint is whole" "$bin/train_llama3" --verify cut
else
    skip "two hosts" "network namespaces cannot be made here (as root, with iproute2)" 12
fi
summary
