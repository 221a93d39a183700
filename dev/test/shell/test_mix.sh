#!/bin/sh
# test_mix.sh -- training on several sources by weight: a run in parts equals a run in one part, the log has each source's loss,
# and the plan each source's share. Needs nothing but the CPU programs.
. dev/test/lib.sh
cd "$tmp" || exit 1
words 3000 1 >a.txt && words 3000 2 >b.txt && words 40 3 >c.txt
for name in a b c; do "$bin/tokenize" -o $name.bin $name.txt >/dev/null || exit 1; done

# go FLAGS...: eight steps of two micro-batches
go() { train --model d1 --train "$mix" --steps 8 --total-batch 128 --schedule constant --checkpoint-every 1 "$@"; }
mix='a.bin:0.6,b.bin:0.3,c.bin:0.1'

expect "a run over three sources" 0 "saved   whole/step_00000008" go --out whole
check "the plan has each source's share" sh -c "grep -c '^source  .*%.*tokens.*epochs' '$tmp/stdout' | grep -qx 3"
check "and the weight of each" grep -q "^source  c.bin: 9.99 % of the rows" "$tmp/stdout"
go --out parts --stop-after 3 >/dev/null 2>&1
expect "stopped and resumed" 0 "saved   parts/step_00000008" resume --out parts
check "without a warning" test ! -s "$tmp/stderr"
check "it has the same bits" same_checkpoint whole/step_00000008 parts/step_00000008
check "and the same losses" same_steps whole/log.jsonl parts/log.jsonl
cp -r whole back && rm -r back/step_*[4-8]
background --resume --out back
wait_for test -e back/step_00000005
kill -9 $pid
finish
expect "killed and resumed" 0 "" resume --out back
check "it has the same bits, too" same_checkpoint whole/step_00000008 back/step_00000008

# A step has 4 rows, so its loss is the mean of the sources' losses, weighted by their rows of these 4, which add up to 4.
weighted() {
    sed -n 's/.*"step","step":[0-9]*,"loss":\([^,]*\),.*"sources":\[\([^]]*\)\].*/\1,\2/p' "$1" | sed 's/null/0/g' | awk -F, '
        function near(x) { return x < 1e-6 && x > -1e-6 }
        { found = 0
          for (i = 0; i <= 4; i++) for (j = 0; i + j <= 4; j++) found += near(i * $2 + j * $3 + (4 - i - j) * $4 - 4 * $1)
          good += found > 0 && NF == 4 }
        END { exit !(NR == 8 && good == 8) }'
}
check "the loss of a step is the mean of its sources' losses" weighted whole/log.jsonl
check "a source without a row in a step has none" grep -q '"sources":\[[^]]*null' whole/log.jsonl

changed() { rm -rf changed && cp -r parts changed && rm -r changed/step_*[4-8] changed/log.jsonl; }
changed
expect "other weights: a warning" 0 "--train: a.bin:0.6,b.bin:0.2,c.bin:0.2 has the fingerprint" \
    resume --out changed --stop-after 4 --train 'a.bin:0.6,b.bin:0.2,c.bin:0.2'
changed
expect "refused by --strict-resume" 1 "--train: a.bin:0.6,b.bin:0.2,c.bin:0.2 has the fingerprint" \
    resume --out changed --strict-resume --train 'a.bin:0.6,b.bin:0.2,c.bin:0.2'
expect "the same weights in other numbers are no change" 0 "" \
    resume --out changed --strict-resume --train 'a.bin:6,b.bin:3,c.bin:1'

mix=a.bin && go --out one >/dev/null 2>&1 && mix=a.bin:3 && go --out three >/dev/null 2>&1
check "the weight of a single source changes nothing" \
    cmp one/step_00000008/model.safetensors three/step_00000008/model.safetensors
check "its log has no sources" test "$(grep -c '"sources"' three/log.jsonl)" -eq 0
mix='c.bin:1,a.bin:1'
expect "--dry-run reads every source" 0 "scan    a.bin: all ids are below 257" go --out dry --dry-run
expect "--minutes does not know the epochs yet" 0 "source  a.bin: 50.00 % of the rows" \
    train --model d1 --train "$mix" --minutes 1 --out dry --dry-run
mkdir folder && cp a.bin folder && echo '{' >folder/tokenizer.json
mix='folder/a.bin:1,b.bin:1'
expect "the tokenizer beside the first source is used" 0 "folder/tokenizer.json" go --out dry --dry-run

# refused TEXT MIX
refused() { expect "refused: $2" 1 "$1" train --model d1 --steps 1 --out refused --train "$2"; }
refused "the weight of b.bin is x, wanted a number above 0" 'a.bin:0.7,b.bin:x'
refused "the weight of a.bin is 0," 'a.bin:0,b.bin:1'
refused "the weight of b.bin is -1," 'a.bin:1,b.bin:-1'
refused "the weight of b.bin is inf," 'a.bin:1,b.bin:inf'
refused "b.bin has no weight" 'a.bin:1,b.bin'
refused "missing.bin: no such token file" 'a.bin:1,missing.bin:1'
check "nothing is written" test ! -e refused
cd "$root" || exit 1
summary
