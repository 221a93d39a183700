#!/bin/sh
# test_scripts.sh -- runs the scripts of dev/scripts with a trainer that needs no GPU (ranks_trainer.c), and stubs for Slurm's
# commands: they start the ranks that they name, pass signals on, and resume an ended run. Tests the time limit of
# dev/test/run.sh, too. Run from the project's root.
. dev/test/lib.sh
trainer=$bin/build/ranks_trainer
[ -n "${BIN:-}" ] && trainer=$bin/ranks_trainer
scripts=$root/dev/scripts
cd "$tmp" || exit 1
words 4000 1 >text.txt && "$bin/tokenize" -o data.bin text.txt >/dev/null || exit 1
flags="--threads 1 --model d1 --train data.bin --seq 32 --batch 1 --total-batch 768 --lr 3e-3 --sample-tokens 0 --val-every 0"
short="$flags --steps 20"
long="$flags --steps 1000000"
export RANKS_MEMORY="$tmp/memory"

# the trainer, with --gpus in the place of --ranks
cat >trainer <<END
#!/bin/sh
gpus=
[ "\$1" != --gpus ] || { gpus="--ranks \$2" && shift 2; }
exec "$trainer" \$gpus "\$@"
END
chmod +x trainer
export TRAINER="$tmp/trainer"

# the same runs without a script
for n in 2 4; do
    rm -f memory && "$trainer" --ranks $n $short --out plain$n >/dev/null 2>&1
done

# last_step OUT: prints the folder of its log's last step
last_step() { sed -n 's/^{"event":"step","step":\([0-9]*\).*/\1/p' "$1/log.jsonl" | tail -n 1 | xargs printf "$1/step_%08d"; }
# goes_on OUT: the run makes more steps than it has made by now
goes_on() { wait_for has_steps "$1/log.jsonl" $(($(grep -c '"event":"step"' "$1/log.jsonl") + 3)); }
saved() { ls "$1" | grep -q '^step_[0-9]*$'; }

# --- one host ----------------------------------------------------------------------------------------------------------------

one_host() { rm -f memory && "$scripts/one_host.sh" "$@"; }
"$scripts/one_host.sh" >out.txt 2>&1
check "one_host.sh without flags tells its usage" test $? -eq 2 -a "$(grep -c usage out.txt)" -eq 1
expect "one_host.sh" 0 "saved   one/step_00000007" one_host 2 $short --out one --stop-after 7
expect "again: it goes on" 0 "saved   one/step_00000020" one_host 2 $short --out one
check "with the bits of a run that was never stopped" same_checkpoint plain2/step_00000020 one/step_00000020
rm -f memory
"$scripts/one_host.sh" 2 $long --out asked --signal-status 75 >out.txt 2>&1 </dev/null &
pid=$! started=$!
wait_for has_steps asked/log.jsonl 3
kill -USR1 $pid
check "SIGUSR1 writes a checkpoint" wait_for saved asked
check "and the run goes on" goes_on asked
kill -TERM $pid
finish
check "SIGTERM ends it" test $finished -eq 75
check "with the last step" test -d "$(last_step asked)"

# --- two hosts: both are this one ----------------------------------------------------------------------------------------------

export PORT=$((21000 + $$ % 9000))
two_hosts() { # two_hosts GPUS FLAGS...: starts the scripts of both hosts as $first and $second
    gpus=$1
    shift
    rm -f memory
    PORT=$((PORT + 1))
    "$scripts/two_hosts.sh" 0 of 2 127.0.0.1 "$gpus" "$@" >host0 2>&1 </dev/null &
    first=$!
    "$scripts/two_hosts.sh" 1 of 2 127.0.0.1 "$gpus" "$@" >host1 2>&1 </dev/null &
    second=$!
    started="$first $second"
}
# child_of PID: prints a process that PID started
child_of() { grep -l "^PPid:[[:space:]]*$1\$" /proc/[0-9]*/status 2>/dev/null | head -n 1 | tr -dc 0-9; }
both_end() { # both_end: waits for them, and sets $ended to their statuses
    wait $first
    ended=$?
    wait $second
    ended="$ended $?"
    started=
}
"$scripts/two_hosts.sh" 0 2 127.0.0.1 1 >out.txt 2>&1
check "two_hosts.sh with wrong words tells its usage" test $? -eq 2 -a "$(grep -c usage out.txt)" -eq 1
printf '#!/bin/sh\necho "$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE"\n' >show && chmod +x show
TRAINER=$tmp/show "$scripts/two_hosts.sh" 1 of 2 127.0.0.1 2 | sort >out.txt
check "the ranks of a host follow one another" test "$(cat out.txt)" = "2 of 4, 0 of 2
3 of 4, 1 of 2"
two_hosts 2 $short --out two --stop-after 7
both_end
check "two_hosts.sh" test "$ended" = "0 0" -a -d two/step_00000007
check "the run has a secret of its own" grep -qxE '[0-9a-f]{32}' two/.token
check "which only this user can read" test "$(stat -c %a two/.token)" = 600 -a "$(ls -A two | grep -c token)" -eq 1
check "and nothing is said of a meeting without one" sh -c "! grep -q '^network' host0"
cp two/.token token
check "host 0 has the screen" sh -c "grep -q 'saved   two/step_00000007' host0 && ! grep -q saved host1"
two_hosts 2 $short --out two
both_end
check "again: both go on" test "$ended" = "0 0"
check "with the same secret" cmp token two/.token
check "with the bits of four ranks" same_checkpoint plain4/step_00000020 two/step_00000020
two_hosts 1 $long --out both --signal-status 75
wait_for has_steps both/log.jsonl 3
kill -USR1 $first
check "SIGUSR1 to one writes a checkpoint" wait_for saved both
check "and both go on" goes_on both
kill -TERM $second
both_end
check "SIGTERM to one ends both" test "$ended" = "75 75"
check "with the last step" test -d "$(last_step both)"
two_hosts 2 $long --out lost
wait_for has_steps lost/log.jsonl 3
kill -9 "$(child_of $second)"
both_end
check "a rank that dies ends both" sh -c "set -- $ended; test \$1 -ne 0 -a \$2 -ne 0"
printf '#!/bin/sh\necho "$LLAMA3_TOKEN"\n' >show
printf -- '--model d1\n--out in_file\n' >out.flags
shown() { TRAINER=$tmp/show "$scripts/two_hosts.sh" 0 of 2 127.0.0.1 1 "$@"; }
check "--out of a file of flags has the secret" test "$(shown @out.flags)" = "$(cat in_file/.token)"
check "a secret that is set counts" test "$(LLAMA3_TOKEN='of the user' shown --out unused)" = "of the user" -a ! -e unused
# one rank a host, started by hand without a secret
for rank in 0 1; do
    RANK=$rank WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((PORT + 1)) \
        "$trainer" $short --out open >open$rank 2>&1 </dev/null &
done
wait
check "without a secret the limit is said, once" test "$(cat open0 open1 | grep -c "^network LLAMA3_TOKEN is not set: .* port $((PORT + 1)) of 127.0.0.1 ")" -eq 1

# --- Slurm -------------------------------------------------------------------------------------------------------------------

# srun starts two tasks on a node, and writes their processes to the file tasks; scontrol writes its arguments
mkdir slurm
cat >slurm/srun <<'END'
#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_NODELIST=localhost SLURM_NODEID=0
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" &
first=$!
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" &
echo "$first $!" >tasks
echo "$LLAMA3_TOKEN" >>tokens
wait $first
a=$?
wait $!
b=$?
exit $((a > b ? a : b))
END
cat >slurm/scontrol <<'END'
#!/bin/sh
echo "$*" >>told
END
chmod +x slurm/srun slurm/scontrol
job() { rm -f memory tasks && SLURM_JOB_ID=$$ PATH=$tmp/slurm:$PATH bash "$scripts/slurm.sbatch" "$@"; }
check "slurm.sbatch is a script" bash -n "$scripts/slurm.sbatch"
expect "a job" 0 "saved   job/step_00000020" job $short --out job
check "with the bits of two ranks" same_checkpoint plain2/step_00000020 job/step_00000020
check "it is finished, and not queued again" test ! -e told
check "srun passes on a secret" grep -qxE '[0-9a-f]{32}' tokens
job $long --out queued >out.txt 2>&1 </dev/null &
pid=$! started=$!
wait_for has_steps queued/log.jsonl 3
kill -TERM $(cat tasks)
finish
check "SIGTERM to its ranks ends it" test $finished -eq 0
check "with the last step" test -d "$(last_step queued)"
check "and queues it again" test "$(cat told)" = "requeue $$"
rm told
step=$(last_step queued | sed 's/.*_0*//')
export SLURM_RESTART_COUNT=1
expect "it goes on" 0 "resume  queued/step_" job $long --out queued --stop-after $((step + 2))
job $long --out killed >out.txt 2>&1 </dev/null &
pid=$! started=$!
wait_for has_steps killed/log.jsonl 3
kill -9 "$(sed 's/ .*//' tasks)"
finish
check "a rank that dies fails the job" test $finished -ne 0
check "which is not queued again" test ! -e told

# --- dev/test/run.sh -----------------------------------------------------------------------------------------------------------

cat >hangs.sh <<END
#!/bin/sh
echo "ok   a test"
sleep 61 &
echo \$! >$tmp/child
sleep 61
echo "1 passed, 0 failed, 0 skipped"
END
chmod +x hangs.sh
(cd "$root" && LIMIT=1 PYTHON=false dev/test/run.sh "$tmp/hangs.sh") >out.txt 2>&1
check "a test that hangs fails at its limit" test $? -eq 1 -a "$(tail -n 1 out.txt)" = "0 passed, 1 failed, 0 skipped"
check "and is named" grep -q "^FAIL $tmp/hangs.sh did not end within 1 s" out.txt
ended() { ! kill -0 "$(cat child)" 2>/dev/null; }
check "what it started ends with it" wait_for ended
rm child
(cd "$root" && PYTHON=false exec dev/test/run.sh "$tmp/hangs.sh") >out.txt 2>&1 & # the subshell becomes run.sh
wait_for test -s child && kill $!
wait $!
check "a signal ends the tests that run, at once" test $? -eq 130
check "and what they started" wait_for ended
summary
