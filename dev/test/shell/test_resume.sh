#!/bin/sh
# test_resume.sh [first] -- resuming: which run resumes, from which checkpoint, over which data. Needs nothing but the CPU
# programs. first: only its first part, for faults/test_file_faults.sh.
. dev/test/lib.sh
cd "$tmp" || exit 1
words 3000 1 >text.txt && words 3000 2 >other.txt
"$bin/tokenize" -o data.bin text.txt >/dev/null && "$bin/tokenize" -o other.bin other.txt >/dev/null || exit 1

# go FLAGS...: runs to step 6 with a checkpoint at each step
go() { train --model d1 --train data.bin --steps 6 --lr 3e-4 --schedule constant --checkpoint-every 1 "$@"; }
# member NAME CHECKPOINT: prints a member of its state
member() { sed -n "s/^  \"$1\": \"*\([^\",]*\)\"*,*$/\1/p" "$2/trainer_state.json"; }
# resumed_from STEP: the last command resumed from that step
resumed_from() { grep -q "^resume .*step_0*$1," "$tmp/stdout"; }
no_warning() { ! grep -q '^warning' "$tmp/stderr"; }

# --- a validation, answers and a sample that were due when the run ended --------------------------------------------------------

validation_of() { grep '"validation"' "$1/trainer_state.json"; }
printf '{"ctx": "the", "choices": [" cat", " dog"], "label": 0}\n' >questions.jsonl
validated() {
    go --val val.bin --val-every 2 --val-batches 1 --tasks questions.jsonl --eval-every 2 --sample-every 2 --sample-tokens 5 "$@"
}
spoil() { printf '\377\377' | dd of=val.bin bs=1 seek=1064 conv=notrunc 2>/dev/null; } # a token outside of the vocabulary
cp other.bin val.bin && validated --out seen >/dev/null 2>&1 && spoil
expect "a validation that cannot be read ends the run" 1 "step 2 is saved in cut/step_00000002" validated --out cut
expect "a resumed run that cannot read it either still owes it, the answers and the sample" 1 "step 2 is saved in cut/step_00000002" \
    resume --out cut
check "as its checkpoint says" sh -c "grep owed cut/step_00000002/trainer_state.json | grep -q 3"
cp other.bin val.bin
expect "a resumed run makes it, the answers and the sample" 0 "saved   cut/step_00000006" resume --out cut
check "in their places" same_steps seen/log.jsonl cut/log.jsonl
check "answers and samples, too" sh -c "grep -c '\"event\":\"\(task\|sample\)\"' seen/log.jsonl | grep -qx 6"
check "the log says how it was resumed" grep -q '"event":"resume".*"argv":\["[^"]*train_llama3","--threads","3","--resume"' cut/log.jsonl
check "owes nothing then" sh -c "! grep -q owed cut/step_*/trainer_state.json"
check "saves the validation in that step's checkpoint" test "$(validation_of cut/step_00000002)" = "$(validation_of seen/step_00000002)"
check "and ends as one that was not cut" same_checkpoint seen/step_00000006 cut/step_00000006
cp -r seen cut4 && rm -r cut4/step_00000006 cut4/step_00000005 cut4/step_00000004 && spoil
expect "the last one fails" 1 "step 4 is saved in cut4/step_00000004" resume --out cut4 --stop-after 4
cp other.bin val.bin
expect "a run that is at its end makes it" 0 "validation loss" resume --out cut4 --stop-after 4
check "and saves it" test "$(validation_of cut4/step_00000004)" = "$(validation_of seen/step_00000004)"

# --- another tokenizer beside data that names none -----------------------------------------------------------------------------

token_file plain.bin 4000 256 && mkdir names && cp seen/step_00000006/tokenizer.json names
sed 's/begin_of_text/begin_of_teXt/' names/tokenizer.json >names/other.json
go --train plain.bin --tokenizer names/tokenizer.json --out named --stop-after 2 >/dev/null 2>&1
expect "another tokenizer: refused by --strict-resume" 1 "--tokenizer: has the fingerprint" \
    resume --out named --strict-resume --tokenizer names/other.json
expect "another tokenizer: a warning" 0 "--tokenizer: has the fingerprint" resume --out named --stop-after 3 --tokenizer names/other.json

[ "${1:-}" != first ] || { summary && exit; exit 1; }

# --- which run resumes -------------------------------------------------------------------------------------------------------

go --out whole >/dev/null 2>&1 && go --out parts --stop-after 3 >/dev/null 2>&1
check "a run has an id" sh -c "echo $(member run whole/step_00000006) | grep -qxE '[0-9a-f]{16}'"
check "and another run another" test "$(member run whole/step_00000006)" != "$(member run parts/step_00000003)"
expect "a plain resume" 0 "saved   parts/step_00000006" resume --out parts
check "keeps the id" test "$(member run parts/step_00000006)" = "$(member run parts/step_00000003)"
check "has no parent" test -z "$(member parent_run parts/step_00000006)"
check "and is silent" no_warning
check "the same run twice differs in its id alone" same_checkpoint whole/step_00000006 parts/step_00000006
check "the log has the id" \
    sh -c "grep '\"event\":\"config\"' parts/log.jsonl | grep -q '\"run\":\"$(member run parts/step_00000003)\"'"

cp -r whole back
expect "a run that is set back says where later checkpoints are" 0 "aside   3 checkpoints after step 3 in back" \
    resume back/step_00000003 --out back --lr 1e-2 --stop-after 4
check "they are kept" same_checkpoint whole/step_00000006 back/step_00000006.set_back
check "it is a new run" test "$(member run back/step_00000004)" != "$(member run whole/step_00000006)"
check "which knows its parent" \
    test "$(member parent_run back/step_00000004) $(member parent_step back/step_00000004)" = "$(member run whole/step_00000006) 3"
expect "--resume goes on with the run that wrote last" 0 "" resume --out back --stop-after 5
check "from its step" resumed_from 4
check "as that run" test "$(member run back/step_00000005)" = "$(member run back/step_00000004)"
expect "set back a second time" 0 "aside   2 checkpoints after step 3 in back" \
    resume back/step_00000003 --out back --stop-after 4
check "nothing is overwritten" sh -c "ls back | grep -c 'step_00000004.set_back' | grep -qx 2"
expect "the newest checkpoint by name is a plain resume" 0 "" resume back/step_00000004 --out back --stop-after 5
check "of the same run" test "$(member run back/step_00000005)" = "$(member run back/step_00000004)"

rm -rf own && cp -r whole own
expect "without --out, a run named by its checkpoint is set back in its own folder" 0 "aside   4 checkpoints after step 2 in own" \
    resume own/step_00000002 --stop-after 3
expect "a run named by its folder goes on there, too" 0 "saved   own/step_00000004" resume own/ --stop-after 4
(cd own/step_00000003 && resume . --train ../../data.bin --stop-after 4) >"$tmp/stdout" 2>&1
check "and so does one named from inside its checkpoint" test -d own/step_00000004.set_back -a -d own/step_00000004 -a ! -e out

rm -rf killed && cp -r whole killed
background --resume killed/step_00000003 --out killed --steps 1000000 --checkpoint-every 0
wait_for test -e killed/step_00000004.set_back
kill -9 $pid
finish
expect "a run set back and killed before its first checkpoint goes on" 0 "" resume --out killed --stop-after 4
check "from where it was set back" resumed_from 3
check "as a run of its own" \
    test "$(member parent_run killed/step_00000004) $(member parent_step killed/step_00000004)" = "$(member run whole/step_00000006) 3"
check "whose id the log had already" test "$(grep -c "\"run\":\"$(member run killed/step_00000004)\"" killed/log.jsonl)" -eq 2

# the run was killed between the log's line and the renaming: later steps of the abandoned run still exist
rm -rf killed && cp -r back killed && rm -r killed/step_*[45] && cp -r whole/step_00000005 whole/step_00000006 killed
sed -i '/"event":"\(step\|checkpoint\|end\)","step":[4-9]/d' killed/log.jsonl
expect "a run set back and killed before later checkpoints were moved goes on" 0 "" resume --out killed --stop-after 4
check "from there, too" resumed_from 3
check "as itself" test "$(member run killed/step_00000004)" = "$(member run back/step_00000004)"
check "and the other run's checkpoints are moved aside" test -d killed/step_00000006.set_back -a ! -e killed/step_00000006

expect "a run that goes on in another folder" 0 "" resume whole/step_00000002 --out elsewhere --stop-after 3
check "is a new one, too" \
    test "$(member parent_run elsewhere/step_00000003) $(member parent_step elsewhere/step_00000003)" = "$(member run whole/step_00000002) 2"
mkdir disk && mv elsewhere/step_00000003 disk && ln -s ../disk/step_00000003 elsewhere/step_00000003
expect "a checkpoint may be a link to another disk" 0 "" resume elsewhere/step_00000003 --out elsewhere --stop-after 4

go --out pruned --keep 2 --stop-after 4 >/dev/null 2>&1 && cp -r whole/step_00000002 pruned
resume --out pruned --stop-after 4 >/dev/null 2>&1
check "a run that died before it removed an old checkpoint removes it when it goes on" \
    test "$(cd pruned && echo step_*)" = "step_00000003 step_00000004"

# --- what has changed --------------------------------------------------------------------------------------------------------

# changed NAME TEXT FLAGS...: resuming with these flags warns with TEXT, and is refused with --strict-resume
changed() {
    c_name=$1 c_text=$2
    shift 2
    rm -rf changed && cp -r whole changed && rm -r changed/step_*[3-6] changed/log.jsonl
    expect "$c_name: refused by --strict-resume" 1 "$c_text" resume --out changed --strict-resume "$@"
    expect "$c_name: a warning" 0 "$c_text" resume --out changed --stop-after 3 "$@"
    check "$c_name: one line" test "$(grep -c '^warning' "$tmp/stderr") $(wc -l <"$tmp/stderr")" = "1 1"
}
changed "a flag" "--grad-clip: is 2, was 1 in changed/step_00000002" --grad-clip 2
changed "a rate" "the rate goes from 3.00e-04 to 1.00e-02 at step 2: --lr: is 0.01, was 0.0003 in changed/step_00000002" --lr 1e-2
changed "a schedule" "the rate goes from 3.00e-04 to 2.10e-04 at step 2: --steps: is 4, was 6; --schedule: is linear, was constant" \
    --steps 4 --schedule linear --final-lr-frac 0.4
changed "other data" "--train: other.bin has the fingerprint" --train other.bin
cp data.bin same.bin && cp data.bin kept.bin && mkdir moved && cp data.bin moved
rm -rf changed && cp -r whole changed && rm -r changed/step_*[3-6]
expect "the same data in another folder is no change" 0 "" \
    resume --out changed --stop-after 3 --train moved/data.bin --strict-resume
expect "nor is what auto stands for" 0 "" resume --out changed --stop-after 3 --export-dtype auto --strict-resume
expect "of rows, too" 0 "" resume --out changed --stop-after 3 --documents cross --strict-resume
expect "nor is a flag that says the same again" 0 "" resume --out changed --stop-after 4 --lr 3e-4 --strict-resume
cp other.bin data.bin
changed "other data in the same file" "--train: data.bin has the fingerprint"
cp kept.bin data.bin

cp -r whole sparse && truncate -s 1G sparse/log.jsonl
expect "a log with a hole in it is refused, not read through" 1 \
    "sparse/log.jsonl: the line at byte $(stat -c %s whole/log.jsonl) is longer than" resume --out sparse

# state SCRIPT CHECKPOINT: edits its trainer_state.json and makes all sizes and checksums right
state() {
    sed -i "$1" "$2/trainer_state.json" && python3 -c '
import re, sys
table = []
for byte in range(256):
    for bit in range(8): byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    table.append(byte)
def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data: crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF
folder = sys.argv[1] + "/"
text = re.sub(r",\n  \"crc32c\": \d+\n}\n$", "", open(folder + "trainer_state.json").read())
def listed(m):
    data = open(folder + m[1], "rb").read()
    return "\"name\": \"%s\", \"size\": %d, \"crc32c\": %d" % (m[1], len(data), crc32c(data))
text = re.sub(r"\"name\": \"(\S+)\", \"size\": \d+, \"crc32c\": \d+", listed, text)
open(folder + "trainer_state.json", "w").write(text + ",\n  \"crc32c\": %d\n}\n" % crc32c(text.encode()))' "$2"
}
if python3 -c '' 2>/dev/null; then
    rm -rf edited && cp -r whole edited && rm -r edited/step_*[4-6]
    state 's/"build": "[^"]*"/"build": "another"/' edited/step_00000003
    expect "another build is told" 0 "was (another): it may round elsewhere" resume --out edited --stop-after 3
    state 's/"row_order": 2/"row_order": 1/' edited/step_00000003
    expect "so is another order of rows" 0 "in edited/step_00000003 it was 1: rows of this epoch may come twice" \
        resume --out edited --stop-after 3
    state 's/"format": 2/"format": 3/' edited/step_00000003
    expect "a later format is passed over" 0 "trainer_state.json: format is 3" resume --out edited --stop-after 2
    check "and the checkpoint before it taken" resumed_from 2
    rm -rf ruined && cp -r whole ruined
    state 's/"not_finite": false/"not_finite": true/' ruined/step_00000006
    expect "a checkpoint of a step that was not finite is passed over" 0 "not_finite is true" resume --out ruined --stop-after 5
    check "and the one before it taken" resumed_from 5
    rm -rf ruined && cp -r whole ruined && rm -r ruined/step_*[1-5]
    state 's/"not_finite": false/"not_finite": true/' ruined/step_00000006
    cp -r ruined spare
    expect "the only one is taken with a warning" 0 "no older checkpoint is whole: resuming all the same" \
        resume --out spare --stop-after 6
    state 's/"not_finite": true/"not_finite": true, "bad_steps": 10/' ruined/step_00000006
    cp -r ruined spare10
    expect "unless ten such steps ended the run" 1 "the last 10 steps is not finite, first in a step before this start" \
        resume --out spare10 --steps 7
    expect "another job does not take it" 1 "hint: --model PATH takes it all the same" train --model ruined --generate x
    expect "but by name" 0 "" resume ruined/step_00000006 --out ruined
    rm -rf mute && cp -r whole mute && echo '{' >mute/step_00000006/tokenizer.json && state '' mute/step_00000006
    expect "a run does not go on without the tokenizer that it had" 1 "mute/step_00000006/tokenizer.json" resume --out mute
    state '/"name": "tokenizer.json"/d' mute/step_00000006 && rm mute/step_00000006/tokenizer.json
    rm -rf strange && cp -r mute strange && cp -r mute mixed && mkdir beside && cp data.bin whole/step_00000006/tokenizer.json beside
    expect "where it is gone, the same one from elsewhere serves" 0 \
        "mute/step_00000006: holds no tokenizer: taking the built-in one" resume --out mute --steps 7
    check "and the next checkpoint has it again" cmp mute/step_00000007/tokenizer.json whole/step_00000006/tokenizer.json
    state 's/"tokenizer_fingerprint": [0-9]*/"tokenizer_fingerprint": 7/' strange/step_00000006
    expect "also one beside the first of several sources" 0 "holds no tokenizer: taking beside, which is the same" \
        resume --out mixed --train 'beside/data.bin:1,moved/data.bin:1' --steps 7
    expect "but no other one" 1 "strange/step_00000006: holds no tokenizer, but the run had one" resume --out strange
    rm -rf timed && cp -r whole timed && state 's/"kind": "kept"/"kind": "timed"/' timed/step_00000006
    expect "a run that ends at a timed checkpoint" 0 "" resume --out timed --stop-after 6
    check "makes it one that stays" grep -q '"kind": "kept"' timed/step_00000006/trainer_state.json
    check "with the same bits" same_checkpoint whole/step_00000006 timed/step_00000006
    state 's/"\(lr\)":/"recompute":"ffn","\1":/' whole/step_00000002
    expect "flags of the other trainer" 0 "" resume whole/step_00000002 --out passed --stop-after 3
    check "pass through" grep -q '"recompute":"ffn"' passed/step_00000003/trainer_state.json
else
    skip "edited states" "there is no python3" 18
fi

rm -rf hurt && cp -r whole hurt && rm hurt/step_00000006/tokenizer.json
sed -i 's/"weights_crc32c":[0-9]*/"weights_crc32c":7/' hurt/log.jsonl && cp whole/step_00000006/tokenizer.json hurt/step_00000006
expect "weights that the log does not know are refused" 1 "hurt/log.jsonl says 7 at step 6" resume --out hurt

# --- --verify ----------------------------------------------------------------------------------------------------------------

verify() { "$bin/train_llama3" --verify "$@"; }
expect "every checkpoint of a folder is checked" 0 \
    "whole   parts/step_00000003: step 3, run $(member run parts/step_00000003)" verify parts
check "a line each" test "$(grep -c '^whole ' "$tmp/stdout")" -eq 6
expect "or one that is named" 0 "whole   parts/step_00000004: step 4" verify parts/step_00000004
expect "a folder without any is an error" 1 "moved: holds no checkpoint" verify moved
expect "so is a file" 1 "data.bin is no folder" verify data.bin
expect "--verify is a job of its own" 2 "two jobs" verify parts --eval

# unsound NAME TEXT COMMAND: step 5 is not whole after COMMAND
unsound() {
    rm -rf bad && cp -r parts bad
    (cd bad/step_00000005 && eval "$3") >/dev/null 2>&1
    expect "$1" 1 "bad: damaged checkpoints: 1 of 6" verify bad
    check "$1: told by name" grep -q "^damaged bad/step_00000005.*$2" "$tmp/stdout"
}
# number FILE TENSOR BYTES: overwrites the first number of a tensor in FILE with these bytes
number() {
    python3 -c '
import json, struct, sys
path, tensor, octets = sys.argv[1], sys.argv[2], bytes.fromhex(sys.argv[3])
data = bytearray(open(path, "rb").read())
size = struct.unpack("<Q", data[:8])[0]
at = 8 + size + json.loads(data[8:8 + size])[tensor]["data_offsets"][0]
data[at:at + len(octets)] = octets
open(path, "wb").write(data)' "$@"
}
unsound "a flipped byte" "state_rank00000.safetensors: the checksum is" \
    'printf X | dd of=state_rank00000.safetensors bs=1 seek=100000 conv=notrunc'
unsound "a file cut short" "model.safetensors: is" 'truncate -s -1 model.safetensors'
unsound "a file gone" "tokenizer.json: is missing" 'rm tokenizer.json'
unsound "a changed state" "trainer_state.json: crc32c" 'sed -i s/64/65/ trainer_state.json'
if python3 -c '' 2>/dev/null; then
    norm=model.norm.weight
    unsound "weights that are not finite, with the right checksum" "tensor $norm is nan at .0" \
        "number model.safetensors $norm 0000c07f; state '' .; rm ../log.jsonl"
    unsound "a state that is not finite" "tensor m.$norm is inf at .0" \
        "number state_rank00000.safetensors m.$norm 0000807f; state '' ."
    unsound "a mean of squares below 0" "tensor v.$norm is -1 at .0" \
        "number state_rank00000.safetensors v.$norm 000080bf; state '' ."
    rm -rf bad && cp -r parts bad && number bad/step_00000005/state_rank00000.safetensors m.$norm 0000c07f && state '' bad/step_00000005
    expect "nor is one that is not finite" 1 "state_rank00000.safetensors: tensor m.$norm is nan at [0]" \
        resume bad/step_00000005 --out bad
    unsound "weights that are not those in the log" "log.jsonl says" \
        "number model.safetensors $norm 0000803f0000803f; state '' ."
else
    skip "tensors that are not finite" "there is no python3" 9
fi

# --- weights that 16 bits cannot hold ----------------------------------------------------------------------------------------

# f16 FLAGS...: trains a model in which one weight is 70000
f16() {
    train --model large --train data.bin --steps 4 --lr 1e-5 --schedule constant --checkpoint-every 1 --keep 1 \
        --export-dtype f16 "$@"
}
if python3 -c '' 2>/dev/null; then
    large="tensor model.embed_tokens.weight is 70000 at [0, 0], which is infinite in F16"
    cp -r whole/step_00000006 large && rm large/trainer_state.json
    number large/model.safetensors model.embed_tokens.weight 00b88847
    expect "a checkpoint whose weights F16 cannot hold" 0 "at [0, 0], which is infinite in F16: this checkpoint has its weights in F32" \
        f16 --out wide
    check "is whole" verify wide
    check "is read" "$bin/train_llama3" --model wide --generate x --tokens 1
    check "says so" grep -q '"torch_dtype": "float32"' wide/step_00000004/config.json
    check "keeps the flag" grep -q '"export_dtype":"f16"' wide/step_00000004/trainer_state.json
    f16 --out halves --stop-after 2 >"$tmp/log" 2>&1 && resume --out halves >"$tmp/log" 2>&1
    check "and the run resumes in the same bits" same_checkpoint wide/step_00000004 halves/step_00000004
    cp -r large small && number small/model.safetensors model.embed_tokens.weight 0000003f
    f16 --model small --out half >"$tmp/log" 2>&1 && f16 --model small --out spoiled --stop-after 2 >"$tmp/log" 2>&1
    number spoiled/step_00000002/model.safetensors model.embed_tokens.weight 007c && rm spoiled/log.jsonl
    state '' spoiled/step_00000002
    expect "rounded weights that are infinite do not stop a run whose state is whole" 0 \
        "model.embed_tokens.weight is inf at [0, 0], wanted a finite number: the run resumes with the exact weights" \
        resume --out spoiled
    check "which ends in the same bits" same_checkpoint half/step_00000004 spoiled/step_00000004
    export_as() { "$bin/train_llama3" --model large --export "$1" --export-dtype "$2"; }
    expect "an export as F16 is refused by name" 1 "$large" export_as merged f16
    check "and leaves nothing" test ! -e merged -a ! -e merged.tmp
    expect "so is a GGUF file" 1 "error: --export: $large" export_as large.gguf f16
    expect "whose Q8_0 holds more" 0 "as Q8_0 to large.gguf" export_as large.gguf q8_0
    number large/model.safetensors model.embed_tokens.weight 4054094b
    expect "but not all" 1 "is 9e+06 at [0, 0], which is infinite in Q8_0" export_as larger.gguf q8_0
    expect "BF16 holds both" 0 "as BF16 to larger.gguf" export_as larger.gguf bf16
else
    skip "weights that 16 bits cannot hold" "there is no python3" 14
fi

# --- a path that is not UTF-8 ------------------------------------------------------------------------------------------------

odd=$(printf 'odd\233') && mkdir "$odd" && cp data.bin "$odd" && cp -r whole/step_00000006 "$odd/model"
go --train "$odd/data.bin" --model "$odd/model" --lora 2 --steps 2 --out odd --stop-after 1 >/dev/null 2>&1
expect "a run remembers paths that are not UTF-8" 0 "saved   odd/step_00000002" resume --out odd --strict-resume
check "and the log is JSON" sh -c "! LC_ALL=C grep -q '$(printf '\233')' odd/log.jsonl"

# --- a run that branches off to decay ------------------------------------------------------------------------------------------

held() {
    train --model d1 --train data.bin --val other.bin --val-every 40 --val-batches 1 --seq 64 --lr 1e-3 --warmup 8 --checkpoint-every 1 \
        --keep 1 --major-every 40 --final-lr-frac 0 "$@"
}
for run in "trunk --schedule constant --steps 200" "early --schedule constant --steps 200 --stop-after 7" "cosine --steps 9 --stop-after 4"; do
    held --out $run >/dev/null 2>&1
done
cp -r trunk untouched
for at in 80 160; do
    shape=linear rate=0.00095
    [ $at = 160 ] || shape=1-sqrt rate=0.000776
    held --schedule constant --steps $((at + 40)) --decay 40 --decay-shape $shape --out planned$at >/dev/null
    step=step_$(printf %08d $at) end=step_$(printf %08d $((at + 40)))
    expect "a branch at step $at says what its rate does" 0 "branch  step $at: the rate falls from 0.001 to 0 in 40 steps" \
        resume trunk/$step --out tail --decay 40 --decay-shape $shape --stop-after $((at + 2)) --strict-resume
    check "so does its log, if it ends early" grep -q "^ended   at step $((at + 2)) of $((at + 40)): the rate is $rate here" "$tmp/stdout"
    background --seq 64 --resume --out tail
    seen=tail/step_$(printf %08d $((at + 9))) tries=0 # in a tight loop, since the last step comes after some 50 ms
    while [ ! -e "$seen" ] && [ $((tries += 1)) -lt 1000000 ]; do :; done
    kill -9 $pid
    finish
    expect "killed, it goes on" 0 "" resume --out tail --decay 40
    check "to the checkpoint of the run that planned its decay" same_checkpoint planned$at/$end tail/$end
    rm -rf tail
done
check "the trunk is as it was" diff -r trunk untouched
rm -rf tail && mkdir tail && cp -r trunk/step_00000160 tail
expect "and goes on" 0 "" resume --out tail --steps 201 --stop-after 200
check "as if there were no branch" cmp trunk/step_00000200/model.safetensors tail/step_00000200/model.safetensors
expect "in the trunk's folder no branch starts" 1 "--decay: is 20, was 0 in trunk/step_00000160" resume trunk/step_00000160 --decay 20
expect "nor in the warm-up" 1 "--decay: 20 steps and --warmup 8 do not fit into the 27 steps" resume early --out tail2 --decay 20
expect "nor after a decay" 1 "the rate at planned160/step_00000200 is 0 already" resume planned160/step_00000200 --out tail2 --decay 20
expect "nor on a rate that always falls" 1 "--decay: the schedule is cosine" resume cosine/step_00000004 --out tail2 --decay 20
expect "nor does a run decay that has no trunk" 1 "--decay: the schedule is linear" held --schedule linear --decay 20 --out tail2
expect "a decay's shape needs a decay" 1 "--decay-shape: is of no use" held --decay-shape cosine --out tail2
check "of all these there is no trace" test ! -e tail2

# --- the lock ----------------------------------------------------------------------------------------------------------------

background --model d1 --train data.bin --steps 1000000 --schedule constant --checkpoint-every 1 --keep 1 --out busy
wait_for test -e busy/step_00000002
expect "a run that resumes asks for the lock before it looks" 1 "busy: another run (process $pid) is writing" resume --out busy
kill -STOP $pid && rm -rf busy/step_*/model.safetensors
expect "a reader beside a run is told of it" 1 "hint: another run is writing into busy" \
    "$bin/train_llama3" --model busy --generate x --tokens 1
kill -KILL $pid && kill -CONT $pid 2>/dev/null
finish
expect "a dry run takes no lock" 0 "" train --model d1 --train data.bin --out dry --resume --dry-run
check "and leaves no trace" test ! -e dry

cd "$root" || exit 1
summary
