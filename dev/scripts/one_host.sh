#!/bin/sh
# one_host.sh -- trains on GPUs of this machine, and continues where the last run ended:
#
#   dev/scripts/one_host.sh all --model d12 --train 'data/*.bin' --batch 64 --seq 1024 --out out/run
#
# The first argument is the number of GPUs; the others are flags of train_llama3cu. The run continues from the newest whole
# checkpoint in --out; the first time there is none, and it starts at step 0. TRAINER: the program, if not ./train_llama3cu.
#
# SIGINT and SIGTERM end the run with a checkpoint; SIGUSR1 writes one, and the run continues. Each signal may go to this
# process alone. A launcher kills a run some time after SIGTERM, and the checkpoint has to be written before. It waits, by
# default:
#
#   docker stop    10 s    docker stop -t 300, or docker run --stop-timeout 300
#   Kubernetes     30 s    terminationGracePeriodSeconds: 300
#   systemd        90 s    TimeoutStopSec=300
#   torchrun       30 s    torchrun --shutdown-timeout 300, from PyTorch 2.12 on; fixed in earlier versions
#   mpirun          1 s    mpirun --mca odls_base_sigkill_timeout 300 (Open MPI 4)
#   Slurm          30 s    see slurm.sbatch
#
# The last three start the trainer without this script. If the time is too short, the run resumes from an earlier checkpoint:
# by SIGUSR1, --checkpoint-every or --checkpoint-minutes. A checkpoint of 8B parameters has 112 GB with fp32 master weights, m
# and v; the line `saved` and the log say how long yours takes.
set -u
if [ $# -lt 1 ]; then
    echo "usage: one_host.sh N|all FLAGS..." >&2
    exit 2
fi
gpus=$1
shift
exec "${TRAINER:-./train_llama3cu}" --gpus "$gpus" --resume "$@" # exec: docker's signals reach the trainer
