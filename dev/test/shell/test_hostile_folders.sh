#!/bin/sh
# test_hostile_folders.sh -- folders that came from elsewhere, or change while a run uses them. A program must never write to a
# file through a link, and a pipe must not hang it. A name must not drive the terminal. Two runs must never share a folder. Run
# from the project's root after `make`.
. dev/test/lib.sh
cd "$tmp" || exit 1
words 3000 1 >text.txt
words 900 2 >other.txt
"$bin/tokenize" -o data.bin text.txt >/dev/null || exit 1
export OMP_NUM_THREADS=1

# run FLAGS...: a run that must not hang
run() { timeout 60 "$bin/train_llama3" --threads 1 --model d1 --batch 1 --seq 32 --sample-tokens 0 --train data.bin "$@"; }
# precious FILE...: makes files that no test may change
precious() { for p_file in "$@"; do echo precious >"$p_file"; done; }
untouched() { for u_file in "$@"; do [ "$(cat "$u_file")" = precious ] || return 1; done; }

# --- --out -------------------------------------------------------------------------------------------------------------------

run --steps 2 --checkpoint-every 1 --out good >/dev/null 2>&1 || exit 1

# hostile NAME TEXT: starts and resumes a run in out/, which must be refused with TEXT
hostile() {
    expect "$1: a new run" 1 "$2" run --steps 2 --out out
    rm -rf out/step_* && cp -r good/step_0000000* out
    expect "$1: a resumed run" 1 "$2" run --steps 4 --out out --resume
    rm -rf out && mkdir out
}
mkdir out
for file in log.jsonl .lock; do
    precious target && ln -s ../target out/$file
    hostile "$file is a link" "out/$file: is a link, wanted a regular file"
    ln -s ../new out/$file
    hostile "$file is a link to nothing" "out/$file: is a link, wanted a regular file"
    mkfifo out/$file
    hostile "$file is a pipe" "out/$file: is a pipe, wanted a regular file"
    mkdir out/$file
    hostile "$file is a folder" "out/$file: is a folder, wanted a regular file"
    if mknod out/$file c 1 3 2>/dev/null; then
        hostile "$file is a device" "out/$file: is a device, wanted a regular file"
    else
        skip "$file is a device" "devices cannot be made here" 2
    fi
done
# link NAME: a folder out/ with a hard link to a file of the user
link() { rm -rf out && mkdir out && precious target && ln target out/$1; }
link log.jsonl
check "log.jsonl is a hard link: the run has a log of its own" run --steps 2 --out out --stop-after 1
check "that it resumes from" run --out out --resume
link .lock
expect ".lock is a hard link: refused" 1 "out/.lock: is a hard link to another file" run --steps 2 --out out
rm -rf out backup && cp -r good out && cp -al out backup
check "a backup of hard links is resumed" run --steps 4 --out backup --resume
check "and its original stays as it is" diff -r good out
check "and is resumed, too" run --steps 3 --out out --resume
rm -rf out backup && mkdir out

check "no target was written or made" sh -c "grep -qx precious target && ! test -e new"

cp -r good out/run && { grep -v '"event":"end"' good/log.jsonl; head -c 3000000 /dev/zero; } >out/run/log.jsonl
expect "a log that never ends a line is refused" 1 "out/run/log.jsonl: the line at byte " run --steps 4 --out out/run --resume
rm -rf out

mkdir out elsewhere && precious elsewhere/file
ln -s ../elsewhere out/step_00000009.tmp && ln -s ../elsewhere out/step_00000001.tmp && ln -s ../elsewhere out/step_00000007.old.tmp
check "links in the place of unfinished checkpoints do not stop a run" run --steps 1 --out out
check "they are removed" test "$(ls out)" = "log.jsonl
step_00000001"
check "and what they pointed to stays" untouched elsewhere/file
rm -rf out

# a user moves folders to a bigger disk and leaves links behind
mkdir disk && cp -r good disk/out && ln -s disk/out out && mv out/step_00000001 disk/first && ln -s ../first out/step_00000001
check "--out and steps may be links" run --steps 3 --out out --resume --checkpoint-every 1 --keep 1
check "a step that is a link is pruned" test "$(ls disk/out)" = "log.jsonl
step_00000003"
check "but its files stay on their disk" test -s disk/first/model.safetensors
check "and the run goes on" run --steps 4 --out out --resume --stop-after 4
rm -rf out disk

# --- a folder that is gone while it is used ----------------------------------------------------------------------------------

long="--model d1 --train data.bin --steps 1000000 --schedule constant"
background $long --out moved --checkpoint-every 100
wait_for test -s moved/step_00000100/trainer_state.json
mv moved aside
wait_for grep -q '"event":"checkpoint"' moved/log.jsonl
expect "a folder that was moved away is made again, and locked" 1 "another run (process $pid)" run --steps 1 --out moved
kill -TERM $pid
finish
check "the run ends well" test $finished -eq 0 -a -n "$(ls -d moved/step_*)"
check "and says what happened" grep -q '^warning: moved: it, or .lock in it, was moved or removed' background
rm -rf moved aside

# moves the folder of a run 10 times, each time while a checkpoint is written
background $long --out moved --checkpoint-every 1 --keep 2
wait_for has_steps moved/log.jsonl 1
for i in $(seq 10); do
    wait_for sh -c 'until ls -d moved/step_*.tmp; do kill -0 '$pid' || exit 0; done'
    mv moved "aside$i" 2>/dev/null
    wait_for sh -c "grep -q checkpoint moved/log.jsonl || ! kill -0 $pid"
done
kill -TERM $pid
finish
check "a folder moved during a checkpoint: the run ends well" test $finished -eq 0 -a -n "$(ls -d moved/step_*)"
check "with warnings" test "$(grep -c '^warning: moved: it, or .lock in it, was moved or removed' background)" -ge 5
check "and with a log in each folder" sh -c 'for out in moved aside*; do grep -q checkpoint $out/log.jsonl || exit 1; done'
rm -rf moved aside*

background $long --out taken --checkpoint-every 1000
first=$pid
wait_for has_steps taken/log.jsonl 1
rm -rf taken
"$bin/train_llama3" --threads 1 --batch 2 --seq 32 --sample-tokens 0 $long --out taken >second 2>&1 </dev/null &
second=$!
started="$first $second"
wait_for has_steps taken/log.jsonl 1
kill -TERM $first
pid=$first
finish
started=$second
check "a folder that another run has taken: the first ends with an error" test $finished -eq 1
check "and names it" grep -q "^error: taken: is another run's folder now" background
kill -TERM $second
pid=$second
finish
check "the second is not disturbed" test $finished -eq 0
check "its log is its own" test "$(grep -c '"event":"config"' taken/log.jsonl)" -eq 1

# --- model folders -----------------------------------------------------------------------------------------------------------

model=good/step_00000002
mkdir -p cache/blobs cache/snapshots/1 && for file in config.json model.safetensors model.safetensors.index.json tokenizer.json generation_config.json; do
    cp $model/$file "cache/blobs/$file.blob" && ln -s "../../blobs/$file.blob" cache/snapshots/1/$file
done
echo card >cache/blobs/card && ln -s ../../blobs/card cache/snapshots/1/README.md
precious secret && ln -s ../../../secret cache/snapshots/1/LICENSE && ln -s nowhere cache/snapshots/1/NOTICE && mkfifo cache/snapshots/1/USE_POLICY.md
check "a download cache, which is nothing but links, is a model" \
    sh -c "'$bin/train_llama3' --threads 1 --model cache/snapshots/1 --train data.bin --batch 1 --seq 32 --steps 1 --sample-tokens 0 --out fromcache 2>'$tmp/warned'"
check "its files come along" \
    sh -c "cmp fromcache/step_00000001/README.md cache/blobs/card && cmp fromcache/step_00000001/generation_config.json $model/generation_config.json"
check "a secret outside of it does not" sh -c "! grep -rq precious fromcache"
check "what is left out is named in one line" \
    sh -c "test \$(grep -c '^warning: ' warned) -eq 1 && grep LICENSE warned | grep NOTICE | grep -q USE_POLICY.md"

cp -r $model nowhere && rm nowhere/config.json nowhere/trainer_state.json && ln -s gone nowhere/config.json
expect "a broken link config.json is named" 1 "nowhere/config.json: cannot open what this link points to" \
    "$bin/train_llama3" --model nowhere --generate x
cp $model/config.json nowhere/gone && rm nowhere/model.safetensors && sed 's/"model.safetensors"/"part\\u001b[2J\\n  hint: fake.safetensors"/' $model/model.safetensors.index.json >nowhere/model.safetensors.index.json
expect "an index that names a missing file is named" 1 \
    "nowhere/model.safetensors.index.json: weight_map names part?[2J?  hint: fake.safetensors, which is not in the folder" \
    "$bin/train_llama3" --model nowhere --generate x

# --- names that would drive the terminal -------------------------------------------------------------------------------------

evil=$(printf 'no\033[2J\nerror: fake.bin\n  hint: run this\302\233\177')
for job in "--model $evil --generate x" "--resume=$evil --train data.bin" "--model d1 --train=$evil"; do
    flag=${job%% "$evil"*}
    case $job in
        *--train=*) "$bin/train_llama3" --model d1 --train "$evil" --out evil ;;
        *--resume=*) "$bin/train_llama3" --model d1 --resume "$evil" --train data.bin ;;
        *) "$bin/train_llama3" --model "$evil" --generate x ;;
    esac >stdout 2>stderr </dev/null
    check "control bytes of a name are shown, not obeyed: ${flag%%=*}" \
        sh -c "! LC_ALL=C grep -q '[^[:print:][:space:]]' stderr && grep -qF 'no\\x1b[2J\\x0aerror: fake.bin\\x0a  hint: run this\\xc2\\x9b\\x7f' stderr && test \$(grep -c '^error: ' stderr) -eq 1"
done
"$bin/tokenize" -o out.bin "$evil" >stdout 2>stderr
check "so they are by tokenize" \
    grep -qF 'error: no\x1b[2J\x0aerror: fake.bin\x0a  hint: run this\xc2\x9b\x7f: cannot open' stderr

# --- tokenize ----------------------------------------------------------------------------------------------------------------

mkdir t && cd t || exit 1
tokens() { timeout 60 "$bin/tokenize" "$@"; }
for name in x.bin x.bin.tmp; do
    precious target && ln -s target $name
    expect "tokenize: $name is a link" 1 "$name: is a link" tokens -o x.bin ../other.txt
    check "whose target stays" untouched target
    rm $name && mkfifo $name
    expect "tokenize: $name is a pipe" 1 "$name: is a pipe" tokens -o x.bin ../other.txt
    rm $name
    if mknod $name c 1 3 2>/dev/null; then
        expect "tokenize: $name is a device" 1 "$name: is a device" tokens -o x.bin ../other.txt
        check "which stays one" test -c $name
        rm $name
    else
        skip "tokenize: $name is a device" "devices cannot be made here" 2
    fi
done
cp ../other.txt x.bin.tmp
expect "tokenize: OUT.tmp is an input" 1 "x.bin.tmp is the input" tokens -o x.bin x.bin.tmp
check "which stays" cmp x.bin.tmp ../other.txt

# x.bin.tmp is now a killed process's leftover
expect "tokenize: what a killed process left is replaced" 0 "wrote x.bin" tokens -o x.bin ../other.txt
check "and gone" test "$(ls)" = "target
x.bin"
tokens -o reference.bin ../other.txt >/dev/null
check "the file is right" cmp x.bin reference.bin
rm -f ./*

for i in $(seq 300); do cat ../text.txt; done >big.txt
many="big.txt big.txt big.txt big.txt big.txt big.txt big.txt big.txt"
for signal in TERM:143 HUP:129; do
    if [ $signal = HUP:129 ] && hangup_is_ignored; then skip "tokenize: SIGHUP ends it" "SIGHUP is ignored here" 2 && continue; fi
    "$bin/tokenize" --threads 1 --val-fraction 0.1 -o y.bin $many >/dev/null 2>&1 &
    one=$!
    started=$one
    wait_for test -s y_train.bin.tmp -a -e y_val.bin.tmp
    kill -${signal%:*} $one
    wait $one
    status=$?
    started=
    check "tokenize: SIG${signal%:*} ends it by this signal" test $status -eq ${signal#*:}
    check "tokenize: SIG${signal%:*} leaves nothing half-made" test "$(ls)" = big.txt
done
# sh ignores SIGINT in the background; the input is more than any machine reads in 0.3 s
timeout -s INT 0.3 "$bin/tokenize" --threads 1 -o y.bin $many $many $many $many $many $many $many $many $many $many >/dev/null 2>&1
check "tokenize: SIGINT leaves nothing half-made" test "$(ls)" = big.txt

"$bin/tokenize" --threads 1 -o both.bin big.txt big.txt big.txt big.txt >first 2>&1 &
one=$!
started=$one
wait_for test -s both.bin.tmp
expect "two tokenize into one file: the second is refused" 1 "both.bin.tmp: another process is writing this file" \
    tokens -o both.bin ../other.txt
wait $one
check "two tokenize into one file: the first ends well" test $? -eq 0
started=
"$bin/tokenize" -o reference.bin big.txt big.txt big.txt big.txt >/dev/null
check "and its file is whole" cmp both.bin reference.bin
rm -f ./*

# a tokenizer takes its name before it reads the text, which has no end yet
ln -s target link.json
expect "train-bpe: a link is refused at once" 1 "link.json: is a link" \
    sh -c "{ echo text; sleep 5; } | timeout 3 '$bin/tokenize' --train-bpe 300 -o link.json -"
mkfifo feed
"$bin/tokenize" --train-bpe 300 -o both.json - <feed >first 2>&1 &
one=$!
started=$one
exec 5>feed
wait_for test -e both.json.tmp
expect "two train-bpe into one file: the second is refused" 1 "both.json.tmp: another process is writing this file" \
    tokens --train-bpe 300 -o both.json ../other.txt
echo the first text >&5
exec 5>&-
wait $one
check "two train-bpe into one file: the first ends well" test $? -eq 0 -a -s both.json -a ! -e both.json.tmp
started=
rm -f ./*

"$bin/tokenize" -o z.bin --val-fraction 0.2 ../text.txt >/dev/null
check "tokenize: both parts of a split have their names, and nothing else stays" test "$(ls)" = "z_train.bin
z_val.bin"
rm z_val.bin && mkdir z_val.bin
expect "tokenize: a name that cannot be taken is found before the work" 1 "z_val.bin is a folder" \
    tokens -o z.bin --val-fraction 0.2 ../text.txt

cd "$root" || exit 1
summary
