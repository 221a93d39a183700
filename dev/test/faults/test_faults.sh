#!/bin/sh
# test_faults.sh -- tests that the tests find faults. Plants each fault below into its own copy of the sources; ./test_llama3
# must then fail on the committed pairs, or build/test_bpe, by a comparison and not by a crash. A fault that does not change its
# file, or does not compile, is a failure too: the sources have changed, and the fault must be rewritten. Two of three faults
# are only planted, unless FULL=1 (make test-full): each takes two seconds to build and run.
# Run from the project's root. CC: the compiler. JOBS: number of faults in parallel.
set -u
CC=${CC:-cc} JOBS=${JOBS:-$(nproc 2>/dev/null || echo 2)}
folder=$(mktemp -d "${TEST_TMP:-/tmp}/llama3_faults_XXXXXX") || exit 1
trap 'rm -rf "$folder"' EXIT
trap 'exit 130' INT TERM
count=0

# copy_of FOLDER: copies the sources that include other sources. They find all files that the copy lacks in this tree
copy_of() { mkdir -p "$1/dev/test" && cp train_llama3.c test_llama3.cu "$1" && ln -sfn "$PWD/dev/test/pairs" "$1/dev/test/pairs"; }

# build FOLDER: builds its test as ./planted: test_llama3, which reads dev/test/pairs in the current folder, or what $tested names.
# Optimizing takes longer than it saves. Without assert(), a fault must fail a comparison
tested=test_llama3.cu
build() {
    source=$1/$tested
    [ -f "$source" ] || source=$tested
    $CC -std=c11 -O0 -w -DNDEBUG -I"$1" -I. -x c "$source" -x none -o "$1/planted" -lm -lpthread >"$1/log" 2>&1
}

# result KIND NAME: saves a line of the report, printed later in the order of the faults
result() { echo "$1 $2" >"$here/result"; }

# plant NAME FILE SED: applies SED to FILE in a copy of the sources, and runs the test
plant() {
    copy_of "$here" && mkdir -p "$here/$(dirname "$2")" && sed "$3" "$2" >"$here/$2" || exit 1
    if cmp -s "$2" "$here/$2"; then
        result "FAIL" "fault $1 is planted: the expression changes nothing in $2"
    elif [ "${FULL:-0}" != 1 ] && [ $((count % 3)) -ne 1 ]; then
        result "skip" "fault $1 is caught: FULL=1 runs it"
    elif ! build "$here"; then
        sed 's/^/    /' "$here/log" | head -n 5
        result "FAIL" "fault $1 compiles"
    else
        (cd "$here" && timeout 300 ./planted >log 2>&1)
        status=$?
        if [ $status -eq 1 ] && grep -q '^ *FAIL' "$here/log"; then
            result "ok  " "fault $1 is caught by $(grep -c '^ *FAIL' "$here/log") comparisons"
        else
            result "FAIL" "fault $1 is caught: $tested ended with $status"
        fi
    fi
    rm -f "$here/planted"
}

fault() { # fault NAME FILE SED
    count=$((count + 1))
    here=$folder/$(printf '%03d' $count)
    mkdir -p "$here"
    plant "$@" &
    [ $((count % JOBS)) -ne 0 ] || wait
}

# the unchanged sources must pass, or every fault would count as caught
unchanged() {
    if ! copy_of "$folder/none" || ! build "$folder/none" || ! (cd "$folder/none" && ./planted >log 2>&1); then
        tail -n 5 "$folder/none/log"
        echo "FAIL the sources without a fault pass $tested"
        echo "0 passed, 1 failed, 0 skipped"
        exit 1
    fi
    echo "ok   the sources without a fault pass $tested"
}
unchanged

# a sed expression too long for its line
l2='s/step = step_of(step, p);/& step.weight_decay = 0.0;'
l2="$l2 for (size_t k = 0; k < param_size(p); k++) { own.grads[k] += (float)step.hyper->weight_decay * own.params[k]; }/"

fault "eps of 1e-6 for the model's own" train_llama3.c 's/m->config\.rms_eps/1e-6f/'
fault "gate and up swapped" llmc/swiglu.h 's/\*gate = gate_up + n \* 2 \* width, \*up = gate + width/*up = gate_up + n * 2 * width, *gate = up + width/'
fault "kv head h % NKV for h / group" llmc/attention.h 's/h \/ (NH \/ NKV)/h % NKV/'
fault "backward alone with kv head h % NKV" llmc/attention.h 's/kv \* group/kv/'
fault "RoPE factor 8 for 32" llmc/rope.h 's/(float)c->rope_factor/8.0f/'
fault "no RoPE scaling" llmc/rope.h 's/if (c->rope_llama3)/if (0)/'
fault "theta 10000 for the model's own" llmc/rope.h 's/(double)(float)c->rope_theta/10000.0/'
fault "RoPE pairs neighbours" llmc/rope.h 's/x\[i\]/x[2 * i]/g; s/x\[i + half\]/x[2 * i + 1]/g'
fault "cosine for sine in RoPE" llmc/rope.h 's/sine = cosine + half/sine = cosine/'
fault "sine of the wrong sign in RoPE's backward" llmc/rope.h '/rope_backward/,/^}/ s/-1\.0f/1.0f/'
fault "residual left out beside attention" train_llama3.c 's/\(linear(scratch, s->mid, &w->o, s->att, \)s->h/\1NULL/'
fault "residual of the block's start beside the feed-forward" train_llama3.c 's/\(linear(scratch, h_next, &w->down, s->act, \)s->mid/\1s->h/'
fault "gradients times 2" train_llama3.c 's/\(crossentropy_fused(.*\)dloss,/\12 * dloss,/'
fault "queries see one key of the future" llmc/attention.h 's/q + i < key/q + i + 1 < key/'
fault "documents see one another" llmc/attention.h 's/return starts ? (size_t)starts\[a\.starts + t\] : 0/return 0/'
fault "documents start one token early" llmc/attention.h 's/? (size_t)starts\[a\.starts + t\]/& - (starts[a.starts + t] > 0)/'
fault "documents start where the first row's do" llmc/attention.h 's/a\.starts = b \* T;/a.starts = 0;/'
fault "backward lets documents in one tile see one another" llmc/attention.h '/^static inline void attention_gradient_tile/,/^}/ s/ || k0 + j < latest//'
fault "RoPE turns back by positions in the row, not in the document" llmc/rope.h 's/rope_rotate(dqkv, starts,/rope_rotate(dqkv, NULL,/'
fault "generation sees one key less" train_llama3.c 's/r->first_pos + (int)i + 1, shape/r->first_pos + (int)i, shape/'
fault "no scale on the scores" llmc/attention.h 's/1\.0f \/ sqrtf((float)HD)/1.0f/'
fault "tied gradient without the embedding's part" train_llama3.c 's/^ *embedding_backward(/    if (!m->config.tied) &/'
fault "gradient of the residual stream set instead of added to" llmc/rmsnorm.h 's/dxn\[c\] += /dxn[c] = /'
fault "gradient of a token's row set instead of added to" llmc/embedding.h 's/row\[c\] += d\[c\]/row[c] = d[c]/'
fault "norm gradient without its mean term" llmc/rmsnorm.h 's/- xn\[c\] \* mean_term//'
fault "SiLU's derivative without its second term" llmc/swiglu.h 's/ \* (1\.0f + g \* (1\.0f - s))//'
fault "loss of the wrong target" llmc/crossentropy.h 's/row\[target\]/row[target ? target - 1 : 0]/'
fault "the head of an untied model is the embedding" llmc/config.h 's/P_DOWN, P_LM_HEAD}/P_DOWN, P_EMBEDDING}/'
fault "weight decay on norms" llmc/optim/optimizer.h 's/\.matrix ? step\.hyper->weight_decay : 0\.0/.matrix ? step.hyper->weight_decay : step.hyper->weight_decay/'
fault "no weight decay on the embedding" llmc/optim/optimizer.h 's/\.matrix ? step\.hyper/.matrix \&\& p->kind != P_EMBEDDING ? step.hyper/'
fault "weight decay inside the gradient (Adam for AdamW)" llmc/optim/optimizer.h "$l2"
fault "no bias correction of the first moment" llmc/optim/adamw.h 's/correction1 = .*/correction1 = 1.0;/'
fault "no bias correction of the second moment" llmc/optim/adamw.h 's/correction2 = .*/correction2 = 1.0;/'
fault "beta1 for beta2" llmc/optim/optimizer.h 's/h->beta1, h->beta2/h->beta1, h->beta1/'
joined='int w = i, last = i; while (w \&\& t->items[w].joined) { w--; } while (last + 1 < t->count \&\& t->items[last + 1].joined) { last++; }'
joined="$joined size_t rows = 0; for (int k = w; k <= last; k++) { rows += t->items[k].rows; if (k > i) {"
joined="$joined rule->prepare(optimizer_at(a, held, t->items[k].offset), param_size(\&t->items[k]), \&step); } }"
micro='for (int i = 0; k + 1 < recipe->accumulate \&\& i < m->trained.count; i++) { const Param* p = \&m->trained.items[i];'
micro="$micro const OptimizerRule* rule = rule_of(\&m->trained, p->kind); const UpdateStep step = {\&recipe->hyper, lr, 1, 1, p, 0};"
micro="$micro const OptimizerArenas a = {m->params, m->grads, m->m, m->v}; if (!rule->prepare) { continue; }"
micro="$micro rule->prepare(optimizer_at(a, \&m->held, p->offset), param_size(p), \&step);"
micro="$micro rule->matrix(m->grads + p->offset, p->rows, p->cols, m->scratch); }"
resumes='s/^    memcpy(host_slot_at.*src,.*/const HostSlot* s = (HostSlot*)slot;'
resumes="$resumes if (s->kind == KIND \&\& held_place(s->held, SLOT_V, p->offset) == SIZE_MAX) { return true; } &/"
fault "Muon: no Newton-Schulz runs" llmc/optim/optimizer.h 's/^ *rule->matrix(.*//'
fault "Muon: AdamW trains all" llmc/optim/optimizer.h 's/param_specs\[kind\]\.place == PLACE_BLOCK; }/false; }/'
fault "Muon: q, k and v are one matrix, and gate and up" llmc/optim/optimizer.h \
    "s/rule->prepare(own,.*/if (!p->joined) { & }/; s/rule->matrix(own\.grads, p->rows, .*/$joined if (!p->joined) { rule->matrix(own.grads, rows, p->cols, scratch); }/"
fault "Muon: the scale of the smaller side" llmc/optim/muon.h 's/(double)size_max(rows, cols)/(double)size_min(rows, cols)/'
fault "Muon: the scale of half the rows" llmc/optim/optimizer.h 's/lr_scale, step->param->rows,/lr_scale, step->param->rows \/ 2,/'
fault "Muon: the moment is lost between steps" llmc/optim/muon.h 's/m\[i\] += rest \* (gi - m\[i\]);/m[i] = rest * gi;/'
fault "Muon: no look ahead (Nesterov's)" llmc/optim/muon.h 's/g\[i\] = m\[i\] + .*/g[i] = m[i];/'
fault "Muon: decay at the scaled rate" llmc/optim/optimizer.h 's/1\.0 - step->lr \* step->weight_decay, rate/1.0 - rate * step->weight_decay, rate/'
fault "Muon: Newton-Schulz runs once a micro-batch" train_llama3.c "s/^        llama_backward(m);/& $micro/"
fault "Muon: the moment is lost at a resume" llmc/files/optimizer_state.h "$(echo "$resumes" | sed s/KIND/SLOT_M/)"
fault "Muon: another model is resumed" llmc/files/optimizer_state.h "$(echo "$resumes" | sed s/KIND/SLOT_MASTER/)"
fault "no clipping" llmc/optim/recipe.h 's/max_norm > 0 && norm > max_norm/0/'
fault "gradients kept from step to step" train_llama3.c '/^static void llama_zero_gradients/,/^}/ s/memset(/if (m->m[0] == 0) &/'
fault "adapters without alpha / r" llmc/config.h 's/l->alpha \/ l->rank/1/'
fault "adapters' part of y without its scale" llmc/lora.h 's/lora_rescale(m->t, l->scale/lora_rescale(m->t, 1.0f/'
fault "adapters' gradient without its scale" llmc/lora.h 's/lora_rescale(dt, l->scale/lora_rescale(dt, 1.0f/'
fault "gradients of A and B exchanged" llmc/lora.h 's/float\* da = m->dw + l->a;/float* da = m->dw + l->b[0];/; s/float\* db = m->dw + l->b\[p\]/float* db = m->dw + l->a/'
fault "no gradient through A to its input" llmc/lora.h '/matmul_vectors(sum_in(dx, dx, C)/d'
fault "every adapter adds to q or gate" llmc/lora.h 's/l\.first\[l\.parts\] = l\.OC/l.first[l.parts] = 0/'
fault "the base is trained beside the adapters" train_llama3.c 's/^ *optimizer_update(&m->trained/for (size_t k = 0; m->adapters \&\& k < m->table.elements; k++) { m->params[k] *= 1 - 1e-3f; }\n&/'
wait

tested=dev/test/unit/test_bpe.c
unchanged
overlap='b->nodes[i - 1].id == (uint32_t)one.pair \&\& one.pair >> 32 == (uint32_t)one.pair'
join='static char joined[99]; static size_t n; memcpy(joined + n, text, len); n += len; piece_counts_free(own);'
join="$join piece_counts_init(own, c->all.seed); piece_counts_text(own, joined, n);"
fault "of equal counts the higher ids merge first" dev/data/bpe.h 's/| ~p->pair/| p->pair/; s/~(uint64_t)b->heap/(uint64_t)b->heap/'
fault "a stale count decides" dev/data/bpe.h 's/const bool exact = .*/const bool exact = true;/'
fault "overlapping pairs count once" dev/data/bpe.h "s/p->n ? one.count : 0/p->n \&\& !($overlap) ? one.count : 0/"
fault "a piece continues in the next document" dev/data/train_bpe.h "s/piece_counts_text(own, text, len);/$join/"
fault "counts have 32 bits" dev/data/bpe.h 's/uint64_t count;\(.*slot is empty\)/int32_t count;\1/'
wait

cat "$folder"/[0-9]*/result
passed=$(cat "$folder"/[0-9]*/result | grep -c '^ok') skipped=$(cat "$folder"/[0-9]*/result | grep -c '^skip')
failed=$((count - passed - skipped))
echo "$((passed + 2)) passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
