# lost_ranks.sh -- tests of test_gpu.sh: one of two ranks is killed, stopped, or ended by its card. The others name it in time,
# all ranks end, and the last checkpoint is whole. The run resumes from it with the bits of an undisturbed run.

lost="--model d4 --batch 4 --seq 256 --steps 100000 --schedule constant --keep 3"

# rank_pid RANK: prints the process of a rank of $pid
rank_pid() {
    for rp in $(pgrep -P "$pid"); do
        tr '\0' '\n' <"/proc/$rp/environ" 2>/dev/null | grep -qx "LLAMA3_RANK=$1" && echo "$rp"
    done
}

# newest FOLDER: prints the step of its last checkpoint, or 0
newest() { ls "$1" 2>/dev/null | sed -n 's/^step_0*\([0-9]*\)$/\1/p' | sort -n | tail -n 1 | grep . || echo 0; }

# begin_two DIR VARIANT FLAGS...: starts the trainer on two GPUs as process $pid, which prints to DIR/screen
begin_two() {
    bt_dir=$1 bt_v=$2
    shift 2
    "$build/$bt_v/train_llama3cu" --sample-tokens 0 --val-every 0 $lost --train "$tmp/data_train.bin" --gpus 2 --out "$bt_dir/run" "$@" >"$bt_dir/screen" 2>&1 &
    pid=$!
}

# give_up TEXT: ends process $pid and its $ranks, and the test
give_up() {
    tail -n 3 "$d/screen"
    echo "error: $1"
    kill -9 $(pgrep -P $pid) $pid ${ranks:-} 2>/dev/null
    wait $pid
    return 1
}

# has_taken STEP: the run has printed this step
has_taken() { grep -q "^ *$1/" "$d/screen"; }

# live PIDS: one of these processes lives
live() {
    for live_pid in "$@"; do ! kill -0 "$live_pid" 2>/dev/null || return 0; done
    return 1
}

# all_end SECONDS PIDS: the run and its ranks end in this time, the run with an error
all_end() {
    ae_from=$(date +%s) ae_for=$1
    shift
    while live $pid "$@" && [ $(($(date +%s) - ae_from)) -lt "$ae_for" ]; do sleep 0.1; done
    ! live $pid || { give_up "no end after $ae_for s"; return 1; }
    ! live "$@" || { give_up "a rank goes on after $ae_for s"; return 1; }
    wait $pid
    ae_status=$?
    [ $ae_status -ne 0 ] || { give_up "it ended well"; return 1; }
}

# goes_on DIR: the last checkpoint in DIR/run is whole, and two more steps have the bits of an unbroken run
goes_on() {
    go_last=$(newest "$1/run") go_stop=$(($(newest "$1/run") + 2))
    [ "$go_last" -gt 0 ] || { echo "error: no checkpoint" && return 1; }
    cu bf16 --verify "$1/run" || { echo "error: a checkpoint is not whole" && return 1; }
    cu bf16 $lost --train "$tmp/data_train.bin" --gpus 2 --out "$1/run" --resume --checkpoint-every 0 --stop-after $go_stop &&
        cu bf16 $lost --train "$tmp/data_train.bin" --gpus 2 --out "$1/never" --checkpoint-every 0 --stop-after $go_stop && same_ranks "$1/never" "$1/run" $go_stop
}

# two_survive_kills N: kills N times with -9, ranks in turns. Every third kill comes while a checkpoint is written, the others
# up to a second after the first step
two_survive_kills() {
    d=$tmp/two_killed last=0 i=0 within=0 from=$(date +%s)
    two bf16 $lost --train "$tmp/data_train.bin" --stop-after 1 --out "$d/begun" || exit $?
    while [ $i -lt "$1" ]; do
        i=$((i + 1))
        begin_two "$d" bf16 --checkpoint-every 1 --resume
        wait_for has_taken $((last + 2)) || { give_up "no step"; return 1; }
        ranks=$(rank_pid 0)\ $(rank_pid 1) victim=$(rank_pid $((i % 2)))
        if [ $((i % 3)) -eq 0 ]; then
            for tries in $(seq 2000); do ls "$d/run" | grep -q 'step_.*\.tmp' && break; done
        else
            sleep "$(awk -v i=$i 'BEGIN { printf "%.2f", i * 7 % 20 / 20 }')"
        fi
        kill -9 "$victim"
        all_end 40 $ranks || return 1
        grep -q '^error: .*rank' "$d/screen" || { give_up "the rank is not named"; return 1; }
        ! ls "$d/run" | grep -q '\.tmp' || within=$((within + 1))
        [ "$(newest "$d/run")" -ge $last ] || { echo "error: step $last was lost" && return 1; }
        last=$(newest "$d/run")
    done
    took=$(($(date +%s) - from))
    echo "REMARK $i kills in $took s over $last steps, $within within the writing of a checkpoint"
    [ $took -le 300 ] || { echo "error: $i kills took $took s" && return 1; }
    [ $within -gt 0 ] || { echo "error: no kill came within the writing of a checkpoint" && return 1; }
    goes_on "$d"
}

# named_in SECONDS PATTERN: within this time a line of the screen has the pattern
named_in() {
    ni_from=$(date +%s)
    until grep -qE "$2" "$d/screen"; do
        [ $(($(date +%s) - ni_from)) -lt "$1" ] && kill -0 $pid 2>/dev/null || break
        sleep 0.1
    done
    grep -qE "$2" "$d/screen" || { give_up "not told in $1 s: $2"; return 1; }
    echo "REMARK after $(($(date +%s) - ni_from)) s: $(grep -m 1 -E "$2" "$d/screen")"
}

# a_stopped_rank_is_named RANK: the rank is silent for 20 s; then all ranks end, the stopped rank by SIGKILL
a_stopped_rank_is_named() {
    d=$tmp/two_stopped_$1
    two bf16 $lost --train "$tmp/data_train.bin" --stop-after 1 --out "$d/begun" || exit $?
    begin_two "$d" bf16 --checkpoint-every 50
    wait_for has_steps "$d/run/log.jsonl" 60 || { give_up "no step"; return 1; }
    ranks=$(rank_pid 0)\ $(rank_pid 1)
    kill -STOP "$(rank_pid "$1")"
    named_in 32 "^error: (rank [0-9]: )?rank $1 on host [^ ]+ was silent for 20 s, last seen in " && all_end 40 $ranks && goes_on "$d"
}

# In this build rank 1 takes its sixth step with one of our kernels that writes to an illegal address. The test runs on this
# host, where rank 1 reports the error itself. Where processes may have their own host name, it also runs on two hosts, and rank
# 0 reports the error, too
a_cuda_error_is_named() {
    d=$tmp/two_illegal cause='(illegal memory access|cudaErrorIllegalAddress|unhandled cuda error)'
    [ "$(nvidia-smi -L | grep -c '^GPU')" -ge 2 ] || { echo "it needs 2 GPUs" && return 77; }
    need bf16 train_llama3cu && need bf16_illegal train_llama3cu && mkdir -p "$d" || return 1
    begin_two "$d" bf16_illegal --checkpoint-every 2
    named_in 60 "^error: rank 1: .*$cause" && all_end 40 $pid || return 1
    [ "$(newest "$d/run")" -ge 2 ] && [ "$(newest "$d/run")" -le 6 ] || { echo "error: step $(newest "$d/run") is the last" && return 1; }
    goes_on "$d" || return 1
    unshare --uts hostname pretended >/dev/null 2>&1 || { echo "REMARK no names of hosts here" && return 0; }
    d=$d/hosts
    mkdir -p "$d"
    for rank in 0 1; do
        RANK=$rank WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + $$ % 10000)) CUDA_VISIBLE_DEVICES=$rank \
            NCCL_HOSTID=pretended$rank NCCL_SOCKET_IFNAME=lo limit 90 unshare --uts sh -c 'hostname "$0" && exec "$@"' pretended$rank \
            "$build/bf16_illegal/train_llama3cu" --sample-tokens 0 --val-every 0 $lost --train "$tmp/data_train.bin" --checkpoint-every 2 --out "$d/run" >"$d/screen$rank" 2>&1 &
        eval pid$rank=$!
    done
    wait $pid0
    zero=$?
    wait $pid1
    [ "$zero $?" = "1 1" ] || { tail -n 3 "$d"/screen? && echo "error: they did not end with 1" && return 1; }
    grep -qE "^error: rank 1 on host pretended1: .*$cause" "$d/screen0" || { tail -n 3 "$d/screen0" && echo "error: rank 0 does not name rank 1" && return 1; }
    echo "REMARK $(grep -m 1 '^error: rank 1' "$d/screen0")"
    goes_on "$d"
}
