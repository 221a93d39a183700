#!/bin/sh
# two_hosts.sh -- trains on the GPUs of two machines, or more, without torchrun, mpirun or Slurm. Start it on all of them within
# five minutes, each with its own number and otherwise the same arguments:
#
#   dev/scripts/two_hosts.sh 0 of 2 node1 8 --model llama3.1-8b --train 'data/*.bin' --batch 1 --seq 8192 --out /shared/run
#   dev/scripts/two_hosts.sh 1 of 2 node1 8 --model llama3.1-8b --train 'data/*.bin' --batch 1 --seq 8192 --out /shared/run
#
# The arguments are this host's number, the number of hosts, the name or address of host 0, the GPUs of each host, and the flags
# of train_llama3cu. The hosts share --out. They need the same build and data; a difference is refused by name. Host 0 has the
# screen.
#
# PORT (29500) of host 0 must be reachable, and so must NCCL's network: NCCL_SOCKET_IFNAME names its interface, NCCL_DEBUG=INFO
# prints the one it chose. TRAINER: the program, if not ./train_llama3cu. RUN_NAME: a different name for each run on one port.
# LLAMA3_TOKEN: the secret by which the ranks recognize each other. If it is not set, the first host draws one and leaves it in
# OUT/.token, which only this user can read.
#
# SIGTERM or SIGINT to one of the scripts ends the run on all hosts with a checkpoint; SIGUSR1 writes one. A rank that dies ends
# all ranks. The same commands continue from the newest whole checkpoint.
set -u
if [ $# -lt 5 ] || [ "$2" != of ]; then
    echo "usage: two_hosts.sh NUMBER of HOSTS ADDRESS_OF_HOST_0 GPUS FLAGS..." >&2
    exit 2
fi
host=$1 hosts=$3 gpus=$5
export MASTER_ADDR="$4" MASTER_PORT="${PORT:-29500}" TORCHELASTIC_RUN_ID="${RUN_NAME:-two_hosts}"
export WORLD_SIZE=$((hosts * gpus)) LOCAL_WORLD_SIZE="$gpus"
shift 5

# out_of FLAGS...: prints --out, which may stand in a file of flags
out_of() {
    out=out last=
    for word; do
        case $word in
        @*) found=$(sed -n 's/^[[:blank:]]*--out[[:blank:]=][[:blank:]]*//p' "${word#@}" | tail -n 1) && out=${found:-$out} ;;
        --out=*) out=${word#*=} ;;
        *) [ "$last" != --out ] && [ "$last" != -o ] || out=$word ;;
        esac
        last=$word
    done
    echo "$out"
}
if [ -z "${LLAMA3_TOKEN:-}" ]; then
    token=$(out_of "$@")/.token
    if [ ! -s "$token" ]; then # a link appears whole, and only once
        mine=$token.$host.$$
        mkdir -p "${token%/.token}" && (umask 077 && od -An -N16 -tx1 /dev/urandom | tr -d ' \n' >"$mine") || exit 1
        ln "$mine" "$token" 2>/dev/null || [ -s "$token" ] || cp "$mine" "$token"
        rm -f "$mine"
    fi
    LLAMA3_TOKEN=$(cat "$token") || exit 1
    export LLAMA3_TOKEN
fi

# the ranks of a host have consecutive numbers, as torchrun gives them
pids=
for local in $(seq 0 $((gpus - 1))); do
    RANK=$((host * gpus + local)) LOCAL_RANK=$local "${TRAINER:-./train_llama3cu}" --resume "$@" </dev/null &
    pids="$pids $!"
done

# a signal interrupts `wait`, which is then called again
came=
pass_on() {
    came=1
    # shellcheck disable=SC2086  # one word a process
    kill -s "$1" $pids 2>/dev/null
}
trap 'pass_on TERM' INT TERM XCPU  # a shell's background processes ignore SIGINT at first
trap 'pass_on USR1' USR1 USR2
trap 'pass_on HUP' HUP
status=0
for pid in $pids; do
    came=1
    while [ -n "$came" ]; do
        came=
        wait "$pid"
        got=$?
    done
    [ "$got" -eq 0 ] || status=$got
done
exit "$status"
