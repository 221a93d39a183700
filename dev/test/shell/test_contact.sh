#!/bin/sh
# test_contact.sh -- tests a newcomer's first steps: no flag at all, flags of other trainers, flags in a file, the lines of a
# run, Ctrl-C, a run that is already over, scripts of Python without their packages. Run from the project's root after `make`.
. dev/test/lib.sh
cd "$tmp" || exit 1
words 4000 1 >text.txt && words 400 2 >short.txt
"$bin/tokenize" -o data.bin text.txt >/dev/null && "$bin/tokenize" -o val.bin short.txt >/dev/null || exit 1

# --- usage -----------------------------------------------------------------------------------------------------------------

expect "no flag at all is no run" 2 "make quickstart" "$bin/train_llama3"
check "but tells what there is" grep -q '^usage: ' stdout
check "and makes nothing" test ! -e out
for flag in --learning-rate=--lr --max-steps=--steps --num-epochs=--epochs --block-size=--seq --save-every=--checkpoint-every \
    --gradient_accumulation_steps=--total-batch --max-length=--seq --num-gpus=--gpus \
    --device=train_llama3cu --dtype=PRECISION --bf16=PRECISION --lr-scheduler=--schedule --load_in_4bit=--lora \
    --lora-dropout=--patience --push-to-hub=upload --quantize=--export-dtype --packing=--documents; do
    expect "a peer's ${flag%%=*} is known" 2 "${flag#*=}" train "${flag%%=*}" 3
done
for columns in 80 72 100; do
    COLUMNS=$columns "$bin/train_llama3" --help | sed 's|^usage: .*/|usage: |' >help.txt # the program's path may be long
    check "--help fits into $columns columns" awk -v most=$columns 'length > most { exit 1 }' help.txt
done

expect "a model of the hub is not here" 1 "hint: python3 dev/data/model.py owner/name downloads it from the hub to models/name" \
    train --model owner/name --train data.bin
mkdir -p lost/up/checkpoint-500 lost/up/checkpoint-1000 lost/hub/models--a--b/snapshots/abc lost/gguf lost/meta lost/empty models
mkdir -p lost/zero lost/fsdp/pytorch_model_fsdp_0 lost/trainer
touch lost/zero/zero_to_fp32.py
for folder in zero fsdp trainer; do cp "$pairs/gqa2_untied_rope8/config.json" lost/$folder; done
cp "$pairs/gqa2_untied_rope8/model.safetensors" lost/trainer && echo '{"global_step": 5}' >lost/trainer/trainer_state.json
touch lost/up/checkpoint-500/config.json lost/up/checkpoint-1000/adapter_config.json lost/meta/params.json lost/up/log.jsonl \
    lost/hub/models--a--b/snapshots/abc/config.json lost/up/checkpoint-500/model.safetensors lost/gguf/x.gguf
cp -r lost/up/checkpoint-500 models/Known-1B
# what is given as --model, and the words of the error: one hint for each cause
while IFS='|' read -r given words; do
    expect "--model $given" 1 "$words" train --model "$given" --train data.bin
done <<'END'
lost/up|hint: did you mean lost/up/checkpoint-1000?
lost/hub|hint: did you mean lost/hub/models--a--b/snapshots/abc?
lost/hub/models--a--b|hint: did you mean lost/hub/models--a--b/snapshots/abc?
lost/up/checkpoint-500/config.json|hint: did you mean lost/up/checkpoint-500?
lost/up/checkpoint-500/model.safetensors|hint: did you mean lost/up/checkpoint-500?
lost/up/checkpoint-50|hint: did you mean lost/up/checkpoint-500?
lost/zero|hint: in that folder, python3 zero_to_fp32.py
lost/fsdp|hint: accelerate merge-weights
lost/gguf|--export writes GGUF, but no job reads it
lost/gguf/x.gguf|--export writes GGUF, but no job reads it
lost/meta|hint: the hub has the same model in Hugging Face's format
lost/empty|lost/empty holds no checkpoint, wanted a folder step_NNNNNNNN in it, or a model with a config.json
lost/up/log.jsonl|is a file, wanted a folder with config.json and model.safetensors
D4|hint: did you mean d4?
Llama-3.2-1B|hint: did you mean llama3.2-1b?
losst|hint: did you mean lost?
owner/Known-1B|hint: did you mean models/Known-1B?
https://huggingface.co/owner/New-1B|hint: python3 dev/data/model.py owner/New-1B downloads it
out/step_00000100|out/step_00000100 is missing, wanted a model's folder
gpt2|hint: python3 dev/data/model.py OWNER/NAME downloads a folder of the Hugging Face hub
END
expect "nor is its tokenizer" 1 "hint: python3 dev/data/model.py owner/name downloads it from the hub" \
    train --model d1 --tokenizer owner/name --train data.bin
check "with the hint on a line of its own" grep -q '^  hint: python' stderr
mkdir slow && touch slow/vocab.json
expect "a slow tokenizer says how to make it a fast one" 1 "writes a tokenizer.json" train --model d1 --tokenizer slow --train data.bin
expect "and one that is nowhere has no hint" 1 "error: gone.json: cannot open: No such file or directory" \
    train --model d1 --tokenizer gone.json --train data.bin
train --model d1 --train data.bin --steps 1 --sample-tokens 0 --out own >/dev/null
expect "--eval says what it wants" 1 "error: --val: is not given, wanted a token file, or questions in --tasks" train --model own --eval
expect "--tasks says what writes questions" 1 "hint: python3 dev/data/tasks.py hellaswag writes" train --model own --eval --tasks hellaswag
mkdir plain && cp own/step_00000001/config.json own/step_00000001/model.safetensors plain
expect "a run of transformers' Trainer is not resumed" 1 "hint: --model with its folder starts a new run from its weights" \
    resume lost/trainer --train data.bin
expect "nor is a model's folder" 1 "plain: holds no checkpoint, wanted a folder step_NNNNNNNN in it: --model takes its weights" \
    resume plain --train data.bin
expect "--lora is no folder" 2 "hint: --model takes a folder of adapters" train --model own --lora plain
expect "--lora-base is not the adapters" 1 "hint: --model takes the adapters' folder" train --model own --lora-base plain --train data.bin
expect "a tokenizer is sought in the folders below" 1 "hint: did you mean own/step_00000001?" train --model d1 --tokenizer own --train data.bin
expect "--prompt is no --generate" 1 "--generate TEXT continues a text" train --model own --prompt hello
expect "--train says what makes its files" 1 "hint: ./tokenize makes token files from text" train --model d1
expect "./tokenize asks for the name of the token file" 2 "--out is missing, wanted -o OUT.bin for the token file" "$bin/tokenize" text.txt
expect "and names its jobs without a file" 2 "wanted -o OUT.bin, --train-bpe, --jsonl, --decode or --show" "$bin/tokenize"
expect "an export that looks like a file is refused" 1 "x.bin looks like a file, wanted the name of a folder" \
    train --model own --export x.bin
check "and makes nothing" test ! -e x.bin
expect "--verify names a model's folder as such" 1 "error: plain: is a model's folder, wanted a run or a checkpoint" \
    "$bin/train_llama3" --verify plain
expect "a tokenizer's name without .json is a folder" 0 "made folder bpe" "$bin/tokenize" --train-bpe 300 -o bpe text.txt
check "which --tokenizer takes" "$bin/tokenize" --tokenizer bpe -o bpe.bin text.txt
expect "an input that is missing" 1 "error: gone.txt" "$bin/tokenize" --train-bpe 300 -o bpe2/x.json gone.txt
check "leaves no new folder" test ! -e bpe2
mkfifo pipe && { "$bin/tokenize" --train-bpe 300 -o bpe3/x.json - <pipe >/dev/null 2>&1 & } && pid=$! && exec 9>pipe
wait_for test -d bpe3 && kill $pid && exec 9>&-
wait $pid 2>/dev/null
check "nor does a signal" test ! -e bpe3
printf '{"id":1,"content":"a"}\n' >named.jsonl && printf '{"messages":[{"role":"user","content":"a"}]}\n' >chat.jsonl
expect "a text in another field is found" 1 "  hint: --field content" "$bin/tokenize" -o named.bin named.jsonl
check "on a line of its own" grep -q '^  hint: --field content' stderr
expect "a chat is told that --chat takes it" 1 "  hint: a conversation is no text; --chat" \
    "$bin/tokenize" -o chat.bin chat.jsonl
check "on a line of its own, too" grep -q '^  hint: a conversation is no text' stderr
expect "what is not set is not shown" 0 "checkpoint-minutes=10" train --model d1 --train data.bin --total-batch 64 --dry-run
check "such as other lengths" \
    sh -c "grep -q ' total-batch=64 ' stdout && ! grep -qE 'steps=-1|minutes=0|epochs=0|top-k=0' stdout"

# --- make, the zoo and the page ------------------------------------------------------------------------------------------------

refuses() { # refuses WORDS make's arguments
    words=$1 && shift
    ! env -u MAKEFLAGS -u MAKELEVEL make -C "$root" "$@" >makes.txt 2>&1 && grep -qF "$words" makes.txt
}
check "make train says what there is" refuses "error: make train: there is no such target; make quickstart" train
check "the zoo's files, ladders and versions are listed" grep -q '^rmsnorm forward 1 2 3 4 5; backward 1 2 3 4$' <<END
$(env -u MAKEFLAGS -u MAKELEVEL make -s -C "$root/dev/cuda")
END
check "a target of the zoo with a typing error" refuses "there is no such target; did you mean rmsnorm?" -C dev/cuda rmsnrom
check "a file of the zoo with a typing error" refuses "rmsnrom: unknown; did you mean rmsnorm?; FILES are some of: adamw" -C dev/cuda test FILES=rmsnrom
check "a variant without architecture" refuses "FP32: unknown" -C dev/cuda test-emulated FILES=rmsnorm.cu VARIANTS=FP32
check "MINE without its file of the zoo" refuses "needs FILES: the file whose ladder it extends" -C dev/cuda test-emulated MINE=$0
check "MINE with a typing error runs no old program" refuses "MINE: there is no file build/mien.cuh" \
    -C dev/cuda test-emulated FILES=rmsnorm VARIANTS=FP32_90 MINE=build/mien.cuh

# --- flags in a file ---------------------------------------------------------------------------------------------------------

while IFS='|' read -r line words; do
    printf '# ours\n%s\n' "$line" >odd.flags
    expect "a file with the line $line" 2 "odd.flags:2: \"$line\" is $words" "$bin/train_llama3" @odd.flags
done <<'END'
model: d3|no flag
model = d3|no flag
--model d1 --batch 2|more than one flag
--resume --out x|more than one flag
--batch=2 -t 64|more than one flag
END
check "with a hint" grep -q '^  hint: a file of flags has one a line, as --model d4' stderr
printf -- '--model d1\n--train data.bin\n--prompt a --batch of words\n--steps -1\n--dry-run\n' >odd.flags
expect "a text may look like flags" 0 "prompt=a --batch of words" "$bin/train_llama3" @odd.flags

cat >mine.flags <<'END'
# a comment

--model d1
  --train   data.bin
--steps=4
--prompt "two\nlines \"and\" \\ "
--system it's # no comment
--no-chat
END
expect "flags of a file" 0 "steps=4" train @mine.flags --out filed
check "a quoted value" grep -qF '"prompt":"two\nlines \"and\" \\ "' filed/log.jsonl
check "a value is the rest of its line" grep -qF '"system":"it'"'"'s # no comment"' filed/log.jsonl
expect "a later flag wins" 0 "plan    2 steps" train @mine.flags --steps 2 --dry-run
expect "an earlier one does not" 0 "plan    4 steps" train --steps 2 @mine.flags --dry-run
printf -- '--model d1\n--learning_rate 3\n' >wrong.flags
expect "a wrong flag is named with its line" 2 "wrong.flags:2: unknown flag --learning_rate" train @wrong.flags
check "with its hint" grep -q '^  hint: did you mean --lr?$' stderr
printf 'model d1\n' >wrong.flags
expect "a line without a flag" 2 'wrong.flags:1: "model d1" is no flag' train @wrong.flags
expect "a file that is not there" 2 "nowhere.flags: cannot open" train @nowhere.flags
printf -- '--model d1\n\000' >wrong.flags
expect "a file that is no text" 2 "wrong.flags: holds a byte 0" train @wrong.flags
expect "a folder of flags" 2 "is a folder" train @.

train @mine.flags --lr 2e-3 --val val.bin --val-every 2 --out first >/dev/null 2>&1
check "a checkpoint carries its run's flags" test -s first/step_00000004/run.flags
check "which say nothing of this process" sh -c '! grep -qE "^--(out|threads|resume|stop-after) " first/step_00000004/run.flags'
train @first/step_00000004/run.flags --out again >/dev/null 2>&1
check "and start the same run" same_checkpoint first/step_00000004 again/step_00000004
check "with the same log" same_steps first/log.jsonl again/log.jsonl
expect "the flags are summed up with the rest" 0 "whole " "$bin/train_llama3" --verify first
expect "which is an error if it cannot be told" 1 "standard output: writing failed" sh -c "'$bin/train_llama3' --verify first >/dev/full"
echo "--lr 9" >>first/step_00000004/run.flags
expect "and so cannot change unseen" 1 "run.flags" train --resume first/step_00000004 --out other

# --- how long ------------------------------------------------------------------------------------------------------------------

train --model d1 --train val.bin --epochs 3 --dry-run >plan.txt
check "--epochs counts steps" grep -qE '^plan .* (2\.9[0-9]|3\.00) epochs' plan.txt
train --model d1 --train data.bin --epochs 0.5 --dry-run >plan.txt
check "a part of an epoch" grep -qE '^plan .* 0\.(49|50) epochs' plan.txt
expect "--epochs and --steps are two lengths" 2 "--epochs and --steps" train --train data.bin --epochs 2 --steps 5
expect "--epochs and --minutes are two lengths" 2 "--epochs and --minutes" train --train data.bin --epochs 2 --minutes 5
train --model d1 --train val.bin --epochs 2 --out epochs >/dev/null 2>&1
steps=$(ls epochs | sed -n 's/^step_0*//p')
train --model d1 --train val.bin --steps "${steps:-0}" --out steps >/dev/null 2>&1
check "--epochs is the run that --steps with its number makes" same_checkpoint epochs/step_* steps/step_*
expect "a part of an epoch that holds no step" 1 "--epochs: 0.0001 of" train --model d1 --train data.bin --epochs 0.0001 --dry-run
expect "a warm-up longer than the run" 0 "warning: --warmup: 5 of 4 steps" train @mine.flags --warmup 5 --dry-run
train @mine.flags --warmup 4 --dry-run >/dev/null 2>stderr
check "one as long as the run is no matter" sh -c '! grep -q warmup stderr'
for flag in --patience=--val --checkpoint-best=--val --eval-every=--tasks; do
    given="${flag%%=*} 3" && [ "$given" != "--checkpoint-best 3" ] || given=--checkpoint-best
    expect "${flag%%=*} wants ${flag#*=}" 0 "warning: ${flag%%=*}: does nothing without ${flag#*=}" train @mine.flags $given --dry-run
done
train @mine.flags --val val.bin --patience 3 --checkpoint-best --dry-run >/dev/null 2>stderr
check "with it there is nothing to say" sh -c '! grep -q "does nothing" stderr'

# --- the lines of a run --------------------------------------------------------------------------------------------------------

train --model d1 --train data.bin --val val.bin --val-every 30 --checkpoint-every 50 --steps 120 --out lines >lines.txt 2>&1
shown=$(grep -c '^ *[0-9]*/120 ' lines.txt)
check "the screen shows as many steps as a person can read" test "$shown" -ge 40 -a "$shown" -lt 80
check "the log has them all" test "$(grep -c '"event":"step"' lines/log.jsonl)" -eq 120
check "the last step is shown" grep -q '^120/120 ' lines.txt
check "validations are shown" test "$(grep -c '^validation loss' lines.txt)" -eq 4
check "checkpoints are shown" grep -qx 'saved   lines/step_00000050' lines.txt
check "the last one once" test "$(grep -c 'lines/step_00000120$' lines.txt)" -eq 1
check "on a CPU there are flop/s" grep -q 'tok/s flop/s ' lines.txt
train --model d1 --train data.bin --steps 150 --skip-norm-z 1 --lr 1e-6 --out skips >skips.txt 2>&1
check "skips are all shown" test "$(grep -c 'skipped' skips.txt)" -eq "$(grep -c '"skipped"' skips/log.jsonl)"
check "and there are some behind the first screen" test "$(grep 'skipped' skips.txt | grep -cE '^ *1[0-4][0-9]/')" -ge 1

expect "a run that is over says so" 0 "already at step 120 of --steps 5: nothing is left to train" resume --out lines --steps 5
check "and names its checkpoint" grep -qx 'newest  lines/step_00000120' stdout
check "without saving it again" sh -c '! grep -q "^saved" stdout'
expect "the short form of resuming takes the run's flags" 0 "plan    121 steps of 64 tokens" resume --out lines --steps 121
expect "evaluation names its data" 0 "data    val.bin: " train --eval --model lines --val val.bin

expect "a dry run tells how long the run takes" 0 " ms a step: 50 steps take 0:0" train --model d1 --train data.bin --steps 50 --dry-run
expect "of a run with --minutes, how far it gets" 0 " steps fit into 1 minutes" train --model d1 --train data.bin --minutes 1 --dry-run
expect "a run that goes on has the steps that it began with" 0 "--minutes set the number of steps when the run began: it has 121" resume --out lines --minutes 1 --dry-run
cp -r lines lines2
expect "of a run that goes on, the rest" 0 " ms a step: 10 steps take 0:0" resume --out lines --steps 131 --dry-run
check "and leaves it alone" diff -r lines lines2
train --model d1 --train data.bin --steps 1 --sample-tokens 5 --out cut >cut.txt 2>&1
check "a sample that is cut says so" grep -q '^sample  .* …$' cut.txt
check "the log has the text alone" sh -c '! grep -q … cut/log.jsonl'
expect "so has --generate" 0 "the" train --generate "the" --tokens 3 --model cut
check "to the last byte" sh -c '! grep -q … stdout'
check "the next command goes on with the data's words" \
    grep -qF -- "--generate \"$(head -n 1 text.txt | cut -d ' ' -f 1-4)\"" cut.txt
expect "or with --prompt" 0 '--generate "a \"b\" \$c"' \
    train --model d1 --train data.bin --steps 1 --prompt 'a "b" $c' --out prompt
token_file ids.bin 400 99
train --model d1 --train ids.bin --steps 1 --out ids >ids.txt 2>&1
check "or with ids, if there is no tokenizer" grep -qE -- '--generate "[0-9]+ [0-9]+ [0-9]+ [0-9]+"' ids.txt

"$bin/tokenize" --tokenizer "$root/dev/data/tinytales" -o tales.bin text.txt >/dev/null
train --model d1 --tokenizer "$root/dev/data/tinytales" --train tales.bin --steps 1 --out talks >/dev/null 2>&1
expect "a date in a form that has none" 1 "--date: the chat template has no date" train --model talks --chat --date x
check "the form does without" train --model talks --chat </dev/null

background --model d1 --train data.bin --steps 100000 --out stopped
wait_for has_steps stopped/log.jsonl 2
kill -INT $pid
finish
check "Ctrl-C says at once what it does" grep -q '^stop    saves the last whole step' background
check "and then does it" grep -q '^saved   stopped/step_' background
background --model d1 --train data.bin --steps 100000 --out stopped_too
wait_for has_steps stopped_too/log.jsonl 1
kill -ILL $pid
finish
check "an instruction that this CPU lacks is an error" grep -q '^error: this program was built for another CPU' background

# --- longer rows than the model is for ---------------------------------------------------------------------------------------

cp -r first/step_00000004 short && rm short/trainer_state.json && sed -i 's/"max_position_embeddings": [0-9]*/"max_position_embeddings": 16/' short/config.json
expect "rows longer than the model's" 0 "warning: --seq: is 32, but short is for 16 positions" \
    train --model short --train data.bin --steps 1 --out longer
check "their length is in the checkpoint" grep -q '"max_position_embeddings": 32' longer/step_00000001/config.json
check "the source's else" grep -q '"max_position_embeddings": 8192' first/step_00000004/config.json

# --- a text and its context ----------------------------------------------------------------------------------------------------

expect "a text ends at the model's context, and says so" 0 "warning: the text is cut off: it fills the model's context of 16 tokens" \
    train --model short --generate "the cat" --tokens 1000 --temperature 0
cp stdout cut_off.txt
expect "a shorter text says nothing" 0 "the cat" train --model short --generate "the cat" --tokens 3
check "on stderr" test ! -s stderr
check "what the context holds is the text" sh -c "test \$(wc -c <cut_off.txt) -ge 12 -a \$(wc -c <cut_off.txt) -lt 100"
expect "a prompt that fills the context is refused" 1 \
    "error: --generate: the prompt has 16 tokens, but the model's context holds 16, and at least one must be generated" \
    train --model short --generate "123456789012345"
check "before anything is computed" test ! -s stdout
head -c 1048577 /dev/zero | tr '\0' a >long.txt
expect "a prompt in a file has a limit" 1 "error: long.txt: is 1048577 bytes long, wanted at most 1048576" \
    train --model short --generate @long.txt
printf '\357\273\277the cat\n' >marked.txt
train --model short --generate @marked.txt --tokens 3 --temperature 0 >marked
train --model short --generate "the cat" --tokens 3 --temperature 0 >unmarked
check "a byte order mark is no text" cmp unmarked marked
printf '\357\273\277--model short\n--tokens 3\n' >marked.flags
expect "nor is it a flag" 0 "the cat" train @marked.flags --generate "the cat"

# --- runs and their names ------------------------------------------------------------------------------------------------------

line=$(printf 'a\nline')
for name in 'my run' "it's" 'a$HOME;b' "$line" 'back\slash'; do
    train --model d1 --train data.bin --steps 1 --sample-tokens 0 --out "named/$name" >next.txt 2>&1
    sed -n 's/^next *//p' next.txt >next.sh && echo ' --tokens 2' >>next.sh && tr -d '\n' <next.sh >next1.sh
    check "the next command works with the name $(echo "$name" | tr '\n' ' ')" bash next1.sh
done
expect "--verify takes a folder of runs" 0 "whole   named/my run/step_00000001: step 1" "$bin/train_llama3" --verify named
check "and checks them all" test "$(grep -c '^whole ' stdout)" -eq 5
printf 'x' >>"named/it's/step_00000001/config.json"
expect "one that is damaged is named" 1 "error: named: damaged checkpoints: 1 of 5" "$bin/train_llama3" --verify named
mkdir named/empty
expect "a folder without runs is refused" 1 "error: named/empty: holds no checkpoint" "$bin/train_llama3" --verify named/empty
expect "there is nothing to resume in a folder without a checkpoint" 1 \
    "error: --resume: typo holds no checkpoint, and neither --model nor --train says what to train" resume --out typo
check "and it is not made" test ! -e typo

# --- one line for what is wrong ------------------------------------------------------------------------------------------------

gzip -kf text.txt
expect "a packed text is no token file" 1 "hint: zcat text.txt.gz | ./tokenize --tokenizer DIR -o OUT.bin -" \
    train --model d1 --train text.txt.gz
expect "nor are lines of JSON" 1 "named.jsonl: is JSON text, wanted a token file" train --model d1 --train named.jsonl
check "with the hint on a line of its own" grep -q '^  hint: make one from text' stderr
expect "a blank behind a comma is shown" 1 '" val.bin" begins with a blank' train --model d1 --train 'data.bin:0.5, val.bin:0.5'
cp val.bin ' val.bin'
expect "a file's name may begin with one" 0 "source   val.bin: 50.00 %" \
    train --model d1 --train 'data.bin:0.5, val.bin:0.5' --steps 1 --dry-run
expect "a tokenizer without the tokens of a chat" 1 "hint: models made for chats have one" train --model again --chat
expect "an export" 0 "exported" "$bin/train_llama3" --model talks --export mine.gguf
expect "replaces no file" 1 "--export: mine.gguf exists, wanted a new name" "$bin/train_llama3" --model talks --export mine.gguf
expect "the folder of another run is refused" 1 "holds the checkpoints of another run" train --model d1 --train data.bin --out lines
check "at once" test ! -s stdout
cores=$(getconf _NPROCESSORS_ONLN)
expect "many more threads than cores" 0 "warning: --threads: $((2 * cores + 1)) on $cores core" \
    train --model d1 --train data.bin --steps 1 --dry-run --threads $((2 * cores + 1))
{ printf '"Hello," ' && cat text.txt; } >said.txt && "$bin/tokenize" -o said.bin said.txt >/dev/null
expect "a text that begins with a quotation" 0 '--generate "Hello,"' train --model d1 --train said.bin --steps 1 --out said
check "one step is told as one" grep -q '^done    1 step in ' stdout
train --model d1 --train data.bin --minutes 60 --dry-run >plan.txt
check "one layer is no layers" grep -q ' 1 layer, 1 head, 1 kv head of 64' plan.txt
check "an epoch has a number of tokens" grep -qE '^plan .* epochs of [0-9,]+ tokens$' plan.txt
check "many steps have commas" grep -qE '^timed .*: [0-9]{1,3}(,[0-9]{3})+ steps fit' plan.txt
expect "a dry run needs no data" 0 "plan    1 step of 64 tokens (1 x 2 x 32)" train --model again --dry-run
check "to plan the memory" grep -q '^memory  need ' stdout
expect "but a vocabulary" 1 "--train: is not given" train --model d1 --dry-run
# --- scripts of Python, without any package, from another folder ---------------------------------------------------------------

bare() { python3 -S -E -B "$@"; } # without site-packages
installs() { # installs PACKAGES SCRIPT FLAGS...: the script ends with the command that installs the packages
    packages=$1 script=$2
    shift 2
    expect "$script $*: names what is missing" 1 "is not installed" bare "$root/$script" "$@"
    check "and the command for all of it" grep -qE "^  hint: (python3 -m venv .*)?pip install $packages\$" stderr
}
scripts="train_llama3.py $(cd "$root" && ls dev/*.py dev/data/*.py dev/bench/*.py dev/test/gpu/*.py) dev/test/python/check_llama_cpp.py"
if command -v python3 >/dev/null; then
    for script in $scripts; do
        bare "$root/$script" --help >script.txt 2>&1 || grep -q "^error: .* is not installed" script.txt || echo "$script"
        ! grep -q Traceback script.txt || echo "$script"
    done </dev/null >tracebacks.txt
    check "no script ends in a traceback" test ! -s tracebacks.txt
    installs "torch numpy safetensors" train_llama3.py
    installs "torch numpy safetensors" dev/bench/bench_cpu.py
    installs "torch numpy safetensors" dev/bench/bench_gpu.py
    installs "datasets zstandard" dev/data/hf.py owner/name -o hub
    installs "datasets" dev/data/tasks.py piqa
    installs "huggingface_hub" dev/data/model.py owner/name
    installs "tensorboard" dev/track.py first --tensorboard board
    installs "matplotlib" dev/plot.py first
    for script in train_llama3.py dev/plot.py dev/doc/check.py dev/bench/bench_cpu.py; do
        expect "$script --help needs no package" 0 "${script##*/} " bare "$root/$script" --help
    done
    expect "a folder that cannot be made" 1 "error: /proc/none: No such file" bare "$root/dev/data/conversations.py" -o /proc/none

    # --- one page about a card, where PyTorch is not installed

    page() { # page TRAINER MINUTES [DEVICE]
        rm -f page.md
        bare "$root/dev/bench/bench_gpu.py" --minutes "$2" --device "${3:-cpu}" --shapes d1:512:2:32 --seconds 0.1 --out page.md --trainer "$1"
    }
    cat >needy <<END
#!/bin/sh
case " \$* " in *" --weight-decay 0.2 "*) exec "$bin/train_llama3" "\$@" ;; esac
echo "error: --max-memory: too little" >&2
echo "  hint: these flags fit: --weight-decay 0.2" >&2
exit 1
END
    chmod +x needy
    expect "one page about a card needs no PyTorch" 0 "wrote page.md" page "$bin/train_llama3" 0.5
    check "and says so" grep -q "^- PyTorch did not run: " page.md
    check "it has our speed" grep -qE '^\| ours \| [0-9,]+ \| [0-9.]+ ' page.md
    check "and no ratio" sh -c '! grep -q Ratio page.md'
    expect "a run that does not fit takes the flags of the hint" 0 "wrote page.md" page ./needy 0.5
    check "in its turns as well" grep -qE '^\| ours \| [0-9,]+ \| [0-9.]+ ' page.md
    expect "where the time is over, the page says so" 0 "wrote page.md" page "$bin/train_llama3" 0.001
    check "in the row" grep -q '^| ours | failed | the time was over after ' page.md
    printf '#!/bin/sh\nexit 1\n' >mute && chmod +x mute
    expect "a trainer that cannot run" 1 "error: no message" page ./mute 0.5
    mkdir cards && printf '#!/bin/sh\ncase " $* " in *query-gpu=name*) echo Tesla T4 ;; *compute_cap*) echo 7.5 ;; *) echo 560.35 ;; esac\n' >cards/nvidia-smi
    chmod +x cards/nvidia-smi
    (PATH=$tmp/cards:$PATH && page "$bin/train_llama3" 0.5 cuda) >/dev/null 2>&1
    check "the page names the card" sh -c 'grep -qx "# Tesla T4" page.md && grep -q "^- compute capability 7.5" page.md'
else
    skip "scripts of Python" "python3 is not installed" 28
fi
summary
