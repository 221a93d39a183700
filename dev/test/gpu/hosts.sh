# hosts.sh -- tests of test_gpu.sh: several hosts, pretended on one host. Each has two ranks, on the same two cards. Ranks of
# different hosts exchange through sockets, and sums have two levels.

# pretend_hosts HOSTS PRECISION FLAGS...: runs two ranks on each of HOSTS pretended hosts
pretend_hosts() {
    [ "$(nvidia-smi -L | grep -c '^GPU')" -ge 2 ] || { echo "it needs 2 GPUs" && exit 77; }
    ph_ranks=$((2 * $1)) ph_v=$2 ph_port=$((20000 + $$ % 10000)) ph_pids='' ph_status=0
    shift 2
    need "$ph_v" train_llama3cu || return 1
    for rank in $(seq 0 $((ph_ranks - 1))); do
        RANK=$rank WORLD_SIZE=$ph_ranks LOCAL_RANK=$((rank % 2)) LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$ph_port \
            NCCL_HOSTID=pretended$((rank / 2)) NCCL_SOCKET_IFNAME=lo \
            limit $((40 * ph_ranks)) "$build/$ph_v/train_llama3cu" --sample-tokens 0 --val-every 0 "$@" &
        ph_pids="$ph_pids $!"
    done
    for ph_pid in $ph_pids; do wait "$ph_pid" || ph_status=1; done
    return $ph_status
}

# same_hosts A B STEP RANKS: the checkpoints of two runs, each of RANKS ranks, have the same bits
same_hosts() {
    same_end "$1" "$2" "$3" || return 1
    for sh_rank in $(seq 1 $(($4 - 1))); do
        sh_file=$(printf 'step_%08d/state_rank%05d.safetensors' "$3" "$sh_rank")
        cmp "$1/$sh_file" "$2/$sh_file" || return 1
    done
}

# hosts_are_one HOSTS: so many hosts have the losses of one GPU
hosts_are_one() {
    d=$tmp/hosts_$1
    mkdir -p "$d"
    pretend_hosts "$1" fp32 $ranked --train "$tmp/data_train.bin" --batch $((4 / $1)) --out "$d/hosts" >"$d/screen" 2>&1 ||
        { status=$? && tail -n 3 "$d/screen" && exit $status; }
    grep -q "^hosts   $1 of 2 ranks" "$d/screen" || { echo "error: no sums in two levels" && return 1; }
    cu fp32 $ranked --train "$tmp/data_train.bin" --batch 8 --out "$d/one" && close_steps 1e-6 1e-4 "$d/one" "$d/hosts"
}

# hosts_have_one_result HOSTS STEPS: ZeRO 1, 2 and 3, and a run without a graph, have the same bits
hosts_have_one_result() {
    d=$tmp/hosts_bits_$1 flags="$deep --steps $2 --train $tmp/data_train.bin --batch $((4 / $1))"
    for zero in 1 2 3; do pretend_hosts "$1" bf16 $flags --zero $zero --out "$d/$zero" || exit $?; done
    pretend_hosts "$1" bf16 $flags --no-graph --out "$d/0" || return 1
    for of in 0 2 3; do same_hosts "$d/1" "$d/$of" "$2" $((2 * $1)) || { echo "error: ZeRO $of (0: 1 without a graph)" && return 1; }; done
}

# as_many RANKS PRECISION FLAGS...: the trainer on one GPU, or on so many ranks of pretended hosts
as_many() {
    am=$1
    shift
    if [ "$am" -eq 1 ]; then cu "$@"; else pretend_hosts $((am / 2)) "$@"; fi
}

# eight_go_on_as_four_and_one: a run with a fixed number of tokens a step changes its number of ranks. First without training,
# so that each state must equal the state before: after 130 steps on one GPU each number of ranks takes one step of noise. The
# noise's loss stands out, so the step is skipped. Then with training, compared with an unbroken run.
eight_go_on_as_four_and_one() {
    d=$tmp/hosts_chain small="--model d2 --seq 64 --batch 1 --total-batch 512 --lr 1e-3 --schedule constant"
    mkdir -p "$d" && token_file "$d/noise.bin" 9000 256 || return 1
    cu fp32 $small --train "$tmp/data_train.bin" --steps 130 --out "$d/begun" || return 1
    from=$d/begun/step_00000130 step=130
    for ranks in 8 4 1 8; do
        step=$((step + 1))
        as_many $ranks fp32 --resume "$from" --train "$d/noise.bin" --skip-loss-z 2 --steps $step --out "$d/$step" || exit $?
        grep -q '"event":"step","step":'$step',.*"skipped":"skipped: loss z' "$d/$step/log.jsonl" || { tail -n 1 "$d/$step/log.jsonl" && echo "error: step $step was not skipped" && return 1; }
        from=$d/$step/step_00000$step
        [ "$(find "$from" -name 'state_rank*' | wc -l)" -eq $ranks ] || { echo "error: $from is not of $ranks ranks" && return 1; }
        cmp "$d/begun/step_00000130/model.safetensors" "$from/model.safetensors" || return 1
    done
    cmp "$d/begun/step_00000130/state_rank00000.safetensors" "$d/133/step_00000133/state_rank00000.safetensors" || return 1
    for rank in 0 1 2 3 4 5 6 7; do
        cmp "$d/131/step_00000131/state_rank0000$rank.safetensors" "$d/134/step_00000134/state_rank0000$rank.safetensors" || return 1
    done
    cu fp32 $ranked --train "$tmp/data_train.bin" --batch 8 --total-batch 2048 --out "$d/whole" || return 1
    as_many 8 fp32 $ranked --train "$tmp/data_train.bin" --batch 1 --total-batch 2048 --out "$d/chain" --stop-after 5 &&
        as_many 4 fp32 --resume --out "$d/chain" --stop-after 10 && as_many 1 fp32 --resume --out "$d/chain" --stop-after 15 &&
        as_many 8 fp32 --resume --out "$d/chain" && close_steps 1e-6 1e-4 "$d/whole" "$d/chain"
}
