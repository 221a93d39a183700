#!/bin/sh
# test_gpu_faults.sh [run|compile|plant|emulated] [PATTERN] -- tests that the GPU tests find faults. Plants each fault of the table below
# into its own copy of the sources; its test must then fail, by a comparison and not by a crash. A fault that does not change its
# file, or does not compile, is a failure too: the sources have changed, and the fault must be rewritten. Without a fault the same
# tests must pass. `compile` only plants and builds, `plant` only reports whether files change; neither needs a GPU. `emulated`
# runs those of two.sh on-host on the emulated card, which has been built. PATTERN (grep -E) selects lines of the table. Run from
# the project's root.
#
# JOBS: number of faults in parallel. NVCC, GPU_ARCH: as in the Makefile.
set -u
mode=${1:-run} pattern=${2:-.} JOBS=${JOBS:-$(nproc 2>/dev/null || echo 2)}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}  # threads of the CPU oracles
case $mode.$JOBS in run.[1-9]* | compile.[1-9]* | plant.[1-9]* | emulated.[1-9]*) ;; *) echo "usage: JOBS=N $0 [run|compile|plant|emulated] [PATTERN]" >&2 && exit 2 ;; esac

# NAME | PRECISION | TEST and its arguments | FILE | SED
pair=dev/test/pairs/gqa2_untied_rope8 tied=dev/test/pairs/tied_gqa4_rope32 documents=dev/test/pairs/documents lora=dev/test/pairs/lora_all fp8=dev/test/pairs/fp8 head=dev/test/pairs/fp8_head muon=dev/test/pairs/mha_odd
faults() {
    cat <<END
a walk is launched as if its blocks were alone | BF16 | test_attention_cu walk more_blocks | llmc/attention_common.cuh | s/together\.val\.cooperative = 1;//
kv head h % NKV for h / group, plain | FP32 | test_attention_cu plain every_group | llmc/attention_plain.cuh | s/kv_head = h \/ (s.NH \/ s.NKV);/kv_head = h % s.NKV;/
a block adds up partial sums before they are written | BF16 | test_kernels_cu norm_and_loss_sums_agree | llmc/cuda/cuda_common.cuh | /if (lane == 0) { shared\[warp\] = x; }/ { n; s/__syncthreads();// }
D of another row, plain | FP32 | test_attention_cu plain every_group | llmc/attention_plain.cuh | s/ds\[i\]\[j\] - stat\.y/ds[i][j] - stats[q0].y/
a query sees one key of the future, mma | BF16 | test_attention_cu mma every_group | llmc/attention_mma.cuh | s/warp_q0 + g - k0 - t \* 2;/warp_q0 + g - k0 - t * 2 + 1;/
a query skips a tile of its own document, mma | BF16 | test_attention_cu mma documents_at | llmc/attention_mma.cuh | s/starts\[q0\] \/ BN \* BN : 0/(starts[q0] + BN) \/ BN * BN : 0/
a key sees the next document's queries, mma | BF16 | test_attention_cu mma documents_at | llmc/attention_common.cuh | s/if (row + 8 < first)/if (false)/
a query sees keys of the document before, plain | FP32 | test_attention_cu plain documents_at | llmc/attention_plain.cuh | s/(!DOCUMENTS || first <= key)/(!DOCUMENTS || first <= key + 1)/
dK and dV without the last document of a tile, plain | FP32 | test_attention_cu plain documents_at | llmc/attention_plain.cuh | s/min(s\.T, k0 + BN) - 1, s\.T)/k0, s.T)/
the first slice's documents for all, plain | FP32 | test_attention_cu plain more_sequences | llmc/attention.cuh | s/s\.starts += row;//
positions in documents count from the row's start | FP32 | test_kernels_cu rope_turns | llmc/rope.cuh | s/DOCUMENTS ? starts\[n\] : 0/0/
RoPE turns back by positions in the row | FP32 | test_llama3cu $documents | llmc/rope.cuh | s/rope_rotate_cuda(dqkv, starts,/rope_rotate_cuda(dqkv, NULL,/
sums not rescaled to the new row max, wgmma | BF16 | test_attention_cu wgmma a_thousand | llmc/attention_sm90.cuh | s/acc\[i\] \*= rescale\[i % 4 \/ 2\];//
dK and dV from one query of the past, wgmma | BF16 | test_attention_cu wgmma a_thousand | llmc/attention_sm90.cuh | s/my_k0 + warp \* 16 + g - q0 - t \* 2);/my_k0 + warp * 16 + g - q0 - t * 2 - 1);/
D without half of its columns, wgmma | BF16 | test_attention_cu wgmma every_group | llmc/attention_sm90_parts.cuh | s/sum += __shfl_xor_sync(0xffffffffu, sum, 1);//
RoPE turned back with one element of a pair twice, wgmma | BF16 | test_attention_cu wgmma turned_back | llmc/attention_common.cuh | s/const float turned = x \* cosine/const float turned = y * cosine/
a query sees the document before, wgmma | BF16 | test_attention_cu wgmma documents_at | llmc/attention_sm90.cuh | s/k0 < first\.warp)/k0 + BN <= first.warp)/
a query skips a tile of its own document, wgmma | BF16 | test_attention_cu wgmma documents_at | llmc/attention_sm90.cuh | s/first\.warpgroup \/ BN \* BN/(first.warpgroup + BN) \/ BN * BN/
a key sees the next document's queries, wgmma | BF16 | test_attention_cu wgmma documents_at | llmc/attention_sm90.cuh | s/q0 + BM > end\.warp)/q0 > end.warp)/
a tile's first document ends for all its keys, wgmma | BF16 | test_attention_cu wgmma documents_at | llmc/attention_sm90.cuh | s/(int)(i - row), T)/(int)(i - row) \/ 64 * 64, T)/
parts of dq added out of turn, walk | BF16 | test_attention_cu walk many_rows | llmc/attention_sm90_walk.cuh | s/flag_wait(flag, before);//
dq without the other warpgroup's keys, walk | BF16 | test_attention_cu walk every_group | llmc/attention_sm90_walk.cuh | s/for (int k = 0; k < BN \/ 16; k++)/for (int k = 0; k < BN \/ 32; k++)/
dq without its first part, walk | BF16 | test_attention_cu walk a_thousand | llmc/attention_sm90_walk.cuh | s/int first_until = /int first_until = 64 + /
the next head's dq added to this one's, walk | BF16 | test_attention_cu walk a_thousand | llmc/attention_sm90_walk.cuh | s/(last ? k0 + BM : BM) \* HD/BM * HD/
one buffer for two tiles of ds, walk | BF16 | test_attention_cu walk a_thousand | llmc/attention_sm90_walk.cuh | s/walk_store_ds(ds_row + turns\.stage % 2/walk_store_ds(ds_row + turns.stage % 1/
dq not turned back, walk | BF16 | test_attention_cu walk turned_back | llmc/attention_sm90_walk.cuh | s/if (s\.cos_sin) { fragment_turn_back<HD>(dq, s, b, row); }//
keys of the next member, packed | BF16 | test_kernels_cu heads_are_packed | llmc/gpu/sequence.cuh | s/section == 0 ? g.q : g.kv) + (c - before)/section == 0 ? g.q : g.kv) + (c - before) + (section == 1 ? g.kv : 0)/
pieces without their pitch | FP32 | test_kernels_cu heads_are_packed | llmc/gpu/sequence.cuh | s/pieces + block \* g\.piece_pitch/pieces + block * (g.q + 2 * g.kv)/
width for pitch in rmsnorm | BF16 | test_kernels_cu rmsnorm_forward_agrees | llmc/rmsnorm.cuh | s/(x + n \* pitch + c)/(x + n * C + c)/
eps left out of rmsnorm | FP32 | test_llama3cu $tied | llmc/rmsnorm.cuh | s/ \/ (float)C + eps)/ \/ (float)C)/
RoPE turned forward in backward | FP32 | test_llama3cu $pair | llmc/rope.cuh | s/cos_sin, -1\.0f,/cos_sin, 1.0f,/
beta 0 for 1: the second micro-step overwrites | BF16 | test_kernels_cu matmul_agrees | llmc/matmul.cuh | s/accumulate ? dw.data : NULL/NULL/
beta 1 for 0: the first micro-step adds to what was there | FP32 | test_llama3cu $pair | llmc/gpu/gradients.cuh | s/return !(kind & MICRO_FIRST) \&\& !g->in_ring;/return true;/
loss scale not divided out | BF16 | test_kernels_cu decisions_follow | llmc/optim/step_state.cuh | s/h.grad_clip) \* factor \/ scale)/h.grad_clip) * factor)/
the window of losses is not kept | BF16 | test_kernels_cu decisions_follow | llmc/optim/step_state.cuh | s/copy_window(&s->loss_window, &loss_window);//
the norm of the second array is left out | BF16 | test_kernels_cu norm_and_loss_sums_agree | llmc/optim/step_state.cuh | s/i < NORM_LISTS; i++/i < 1; i++/
the bias correction is that of the step before | BF16 | test_kernels_cu decisions_follow | llmc/optim/step_state.cuh | s/pow(h\.beta1, (double)(s->updates + 1))/pow(h.beta1, (double)s->updates)/
losses of another source's rows | BF16 | test_kernels_cu losses_add_up | llmc/optim/step_state.cuh | s/if (sources\[b\] != s) { continue; }/if (sources[b] == s) { continue; }/
a sort of one tile returns the list before the last digit | BF16 | test_kernels_cu embedding_sort | llmc/embedding.cuh | s/s->pairs\[(digits - 1) % 2\]/s->pairs[digits % 2]/
weight decay on norms | FP32 | test_llama3cu $pair | llmc/optim/adamw.cuh | s/stretch\.decays ? state->decay : 1\.0f/state->decay/
a row without a target trains token 0 | BF16 | test_kernels_cu crossentropy_plans_agree | llmc/crossentropy.cuh | s/return target < 0 ? 0.0f : dloss \/ s.sum;/return dloss \/ s.sum;/
a row without a target has a loss | FP32 | test_kernels_cu crossentropy_agrees | llmc/crossentropy.cuh | s/return target < 0 ? 0.0f : (float)/return (float)/
a mean over all tokens for one over the trained targets | BF16 | test_kernels_cu a_step_is_divided | llmc/optim/step_state.cuh | s/factor = trained_factor(&h, s->trained)/factor = 1/
alpha / rank forgotten | BF16 | test_llama3cu $lora | llmc/lora.cuh | s/stream, {l->scale, 1\.0f})/stream)/
only the first adapter of a product in dx | BF16 | test_llama3cu $lora | llmc/lora.cuh | s/{N, C, R},$/{N, C, r},/
the last rank's gradients are missing in a sum | BF16 | test_kernels_cu ordered_sums_agree | llmc/optim/step_state.cuh | s/for (int r = 1; r < ranks; r++) {/for (int r = 1; r < ranks - 1; r++) {/
ranks are added up in another order | BF16 | test_kernels_cu ordered_sums_agree | llmc/optim/step_state.cuh | s/parts + (size_t)r \* n + i/parts + (size_t)(ranks - r) * n + i/
a sum is divided by the ranks once more | BF16 | test_kernels_cu ordered_sums_agree | llmc/optim/step_state.cuh | s/if constexpr (ADD) {/for (int k = 0; k < W; k++) { sum.v[k] \/= ranks; } if constexpr (ADD) {/
a micro-step's sum overwrites those before it | BF16 | test_kernels_cu ordered_sums_agree | llmc/optim/step_state.cuh | s/if constexpr (ADD)/if constexpr (false)/
gradients of two blocks change places | FP32 | two.sh as-one | llmc/gpu/exchange.cuh | /^static inline void exchange_send/,/^}/ s/x->sums + b->first/x->sums + x->buckets.items[bucket == 2 ? 3 : bucket == 3 ? 2 : bucket].first/
the gradients of one rank are missing | FP32 | two.sh as-one | llmc/optim/step_state.cuh | s/for (int r = 1; r < ranks; r++) {/for (int r = 1; r < ranks - 1; r++) {/
gradients of norms are those of one rank | FP32 | two.sh as-one | llmc/gpu/exchange.cuh | s/x->norms, true, x->ranks, x->norm/x->norms, true, 1, x->norm/
a step is divided by the ranks once more | FP32 | two.sh as-one | train_llama3.cu | s/(float)recipe->hyper.loss_weight/(float)(recipe->hyper.loss_weight \/ m->use.ranks)/
the loss is that of one rank | FP32 | two.sh as-one | llmc/gpu/exchange.cuh | /^__global__ void add_states_kernel/,/^}/ s/r < ranks/r < ranks - 1/
a bucket is left out of the norm | FP32 | two.sh as-one | llmc/gpu/exchange.cuh | s/norm_finish_cuda(state, x->partials, count,/norm_finish_cuda(state, x->partials, count - SUM_BLOCKS,/
weights of a bucket stay with their owners | FP32 | two.sh as-one | train_llama3.cu | s/^    exchange_gather(x, i, /    if (i != 2) exchange_gather(x, i, /
both ranks train the same rows | FP32 | two.sh as-one | llmc/files/dataloader.h | s/d->row + (uint64_t)d->rank \* (uint64_t)d->B/d->row/
heads go to the wrong rank | FP32 | two.sh as-one --seq-parallel 2 --documents cross | llmc/gpu/sequence.cuh | s/const int p = (int)(block \/ T % g\.parts);/const int p = (int)((block \/ T + !BACK) % g.parts);/
positions of the second half begin at 0 again | FP32 | two.sh as-one --seq-parallel 2 --documents cross | llmc/gpu/joined.cuh | s/const Rows heads = heads_of(r);/Rows heads = heads_of(r); if (r->shared) { heads.shape.B *= r->shared->parts; heads.shape.T = r->shape.T; }/
starts of the first half alone | FP32 | two.sh as-one --seq-parallel 2 --documents mask | llmc/gpu/feed.cuh | s/data->starts, num_starts \*/data->starts, num_starts \/ f->parts */
the second rank has the first half, too | FP32 | two.sh as-one --seq-parallel 2 --documents cross | llmc/run/loop/validate.h | s/b \* T + (size_t)p->share\.part \* count/b * T/
the output of another block in backward | FP32 | two.sh as-one --seq-parallel 2 --documents cross | llmc/gpu/sequence.cuh | s/if (!fresh) {/if (false) {/
gradients of heads are not sent back | FP32 | two.sh as-one --seq-parallel 2 --documents cross | llmc/gpu/sequence.cuh | s/^    heads_to_rows(q, p, dqkv, dqkv, r->shape);//
a part of the ring is written while it travels | BF16 | two.sh zero-bits | llmc/gpu/exchange.cuh | s/if (!g->in_ring || !used)/if (true)/
the head's gaps in the ring are not zeroed | BF16 | two.sh zero-bits | llmc/gpu/gradients.cuh | s/if (g->in_ring && !g->config.tied) {/if (false) {/
sums of a step begin with those of the step before | BF16 | two.sh zero-bits | llmc/gpu/exchange.cuh | s/add = g->in_ring && !(kind.*/add = g->in_ring;/
a block is gathered into the slot of another | BF16 | two.sh zero-bits | llmc/gpu/sharded_blocks.cuh | s/const int slot = l % GATHER_SLOTS;/const int slot = (l + (l == 5)) % GATHER_SLOTS;/
a block of the forward pass is not gathered again for the backward pass | BF16 | two.sh zero-bits | llmc/gpu/sharded_blocks.cuh | s/const Bucket\* b = bucket_at(/const Bucket* b = g->ring.step < 0 \&\& l == 2 ? end : bucket_at(/
a block is overwritten while it computes | BF16 | two.sh zero-bits | llmc/gpu/sharded_blocks.cuh | s/if (count > 0) {/if (count == GATHER_SLOTS) {/
scales of the two factors swapped | BF16 | test_kernels_cu products_of_quantised | llmc/matmul.cuh | s/A_SCALE_POINTER, &b, sizeof b/A_SCALE_POINTER, \&a, sizeof a/; s/B_SCALE_POINTER, &a, sizeof a/B_SCALE_POINTER, \&b, sizeof b/
scales of the weights' outputs for those of their inputs in dx | BF16 | test_llama3cu $fp8 | llmc/gpu/fp8.cuh | s/copies.scales + copies.R, (size_t)copies.R/copies.scales, (size_t)copies.R/
8-bit weights are those before the update | BF16 | test_llama3cu $fp8 | train_llama3.cu | /^static void llama_update/,/^}/ s/^    fp8_refresh.*//
several GPUs, the 8-bit copies of a block are those before the update | BF16 | two.sh zero-bits --fp8 | llmc/gpu/fp8.cuh | s/|| b->layer < 0 ||/|| b->layer < 1 ||/
several GPUs, 8-bit copies are made before the gather | BF16 | two.sh zero-bits --fp8 | train_llama3.cu | /^ *exchange_gather(x, i/ { h; d; }; /^ *fp8_follow(/ G
8-bit copies of a gathered block lie in the slot of another | BF16 | two.sh zero-bits --fp8 | llmc/gpu/fp8.cuh | s/fp8_quantise_weights(f, slot, l, 1/fp8_quantise_weights(f, slot, l + (l == 5), 1/
the transpose is not transposed | BF16 | test_kernels_cu quantised_weights | llmc/quantise.cuh | s/tile\[part + k\]\[line\]/tile[line][part + k]/
rows of activations lose their scales | BF16 | test_llama3cu $fp8 | llmc/quantise.cuh | s/q\.scale\[n\] = scale;/q.scale[n] = 1;/
a buffer is released before its products begin, joined SwiGLU | BF16 | test_kernels_cu swiglu_joins | llmc/matmul_sm90.cuh | s/^ *wgmma_fence();/ring_release_cluster(ring.empty()); for (const uint64_t from = card_clock(); card_clock() - from < 20000;) {} wgmma_fence();/; s/^ *if (!first.*ring_rel.*//; /wgmma_hold(acc/ { n; d; }
sums of a tile begin with those of the tile before, joined SwiGLU | BF16 | test_kernels_cu swiglu_joins | llmc/matmul_sm90.cuh | s/!first || i > 0);/true);/
both halves of the columns are the first one's, joined SwiGLU | BF16 | test_kernels_cu swiglu_joins | llmc/matmul_sm90.cuh | s/ + half \* (BN \/ 2);/;/
boxes are written as if they were not swizzled, joined SwiGLU | BF16 | test_kernels_cu swiglu_joins | llmc/matmul_sm90.cuh | s/((2 \* j + lane \/ 16) ^ lane % 8)/(2 * j + lane \/ 16)/
up is taken for gate, joined SwiGLU | BF16 | test_kernels_cu swiglu_joins | llmc/matmul_sm90.cuh | s/swiglu_vector(gate\.pair(i), up\.pair(i))/swiglu_vector(up.pair(i), gate.pair(i))/
the gradients of gate and up are exchanged, joined SwiGLU | BF16 | test_kernels_cu swiglu_joins | llmc/matmul_sm90.cuh | s/gate\.set(i, g\.dgate)/gate.set(i, g.dup)/; s/up\.set(i, g\.dup)/up.set(i, g.dgate)/
an output that is not wanted is written, joined SwiGLU | BF16 | test_kernels_cu swiglu_joins | llmc/matmul_sm90.cuh | s/if (!s\.writes_act) { continue; }//
the output is not written again, joined SwiGLU | BF16 | test_kernels_cu swiglu_joins | llmc/matmul_sm90.cuh | s/if (s\.writes_act) { boxes/if (false) { boxes/
a document's rows keep their positions in the row, joined RoPE | BF16 | test_kernels_cu rope_joins | llmc/matmul_sm90.cuh | s/n % rope\.T - (rope\.starts ? rope\.starts\[n\] : 0)/n % rope.T/
values are turned with the keys of their tile, joined RoPE | BF16 | test_kernels_cu rope_joins | llmc/matmul_sm90.cuh | s/if (block \* 64 < s\.rope\.columns)/if (column * Tiles::BN < s.rope.columns)/
the lower rows of a box have the angles of the upper ones, joined RoPE | BF16 | test_kernels_cu rope_joins | llmc/matmul_sm90.cuh | s/lane \/ 4 + i \* 8, position/lane \/ 4, position/
both halves of a tile's rows are the first one's, tiles in turns | BF16 | test_kernels_cu swiglu_joins | llmc/matmul_sm90.cuh | s/a + band \* (64 \* 128 >> 4) + i/a + i/
an address has its block's rank in the cluster, joined SwiGLU | BF16 | test_kernels_cu swiglu_joins | llmc/matmul_sm90.cuh | s/matrix_address(stages)/stages/
swiglu's 8-bit row is that of its gates alone | BF16 | test_kernels_cu swiglu_quantises | llmc/swiglu.cuh | s/largest_of(g\.dup, largest_of(g\.dgate, largest))/largest_of(g.dgate, largest)/
a column's scale from its row | BF16 | test_kernels_cu quantised_weights | llmc/quantise.cuh | s/quantise_factor(column_scales\[c + k\])/factor/
two columns of a transpose are exchanged | BF16 | test_kernels_cu transposes_are | llmc/quantise.cuh | s/tile\[part \* W + k\]\[line/tile[part * W + (k ^ 1)][line/
rows are shifted away from the scale of all | BF16 | test_kernels_cu transposes_are | llmc/quantise.cuh | s/scales\[n + r\] \* factor/factor \/ scales[n + r]/
a row of zeros counts with its scale | BF16 | test_kernels_cu transposes_are | llmc/quantise.cuh | s/atomicMax(q.largest, largest)/atomicMax(q.largest, __float_as_uint(448 * scale))/
a transpose of 16 bits loses its scale | BF16 | test_llama3cu $fp8 | llmc/quantise.cuh | s/{ \*q\.scale = scale; }/{ *q.scale = scales ? scale : 1; }/
the scale of x for that of dout in dW | BF16 | test_llama3cu $fp8 | llmc/gpu/linear.cuh | s/q->transpose_scale\[1\], pitch/q->transpose_scale[0], pitch/
largest values outlive their batch | BF16 | test_llama3cu $fp8 | train_llama3.cu | s/^    fp8_begin(&m->fp8, q);//
gradients of logits in e5m2 are multiplied as e4m3 | BF16 | test_llama3cu $head | llmc/gpu/linear.cuh | s/fast, fp8_type(r.format))/fast, CUDA_R_8F_E4M3)/
their transpose is multiplied as e4m3 | BF16 | test_llama3cu $head | llmc/gpu/linear.cuh | s/FP8_FAST_DW, fp8_type(quantised_format(kind)))/FP8_FAST_DW, CUDA_R_8F_E4M3)/
gradients of logits keep a factor that is no power of two | BF16 | test_llama3cu $head | llmc/gpu/linear.cuh | s/2 \* frexpf(dloss, &exponent) : 1.0f/1.0f : 1.0f/
gradients behind the head lose their factor | BF16 | test_llama3cu $head | llmc/gpu/linear.cuh | s/{N, l->OC, l->C}, q->stream, factor)/{N, l->OC, l->C}, q->stream)/
8-bit copies of the head are those before the update | BF16 | test_llama3cu $head | llmc/gpu/fp8.cuh | s/^    fp8_quantise_head(f, a, q->profiler, q->stream);/    static bool made = false; if (!made) { fp8_quantise_head(f, a, q->profiler, q->stream); } made = true;/
rows in e5m2 have the scales of e4m3 | BF16 | test_kernels_cu quantised_rows | llmc/quantise.cuh | s/quantise_scale(largest, F), factor/quantise_scale(largest, E4M3), factor/
rows in e5m2 are transposed as e4m3 | BF16 | test_kernels_cu transposes_are | llmc/quantise.cuh | s/if (x.format == E4M3)/if (true)/
dW from the transpose of the dout before | BF16 | test_llama3cu $fp8 | llmc/gpu/linear.cuh | /^ *linear_backward_input(q, dx, l, dy, N, factor);/ { h; d; }; /^ *linear_backward_weight(q, l, dy, x, N, add, factor);/ G
AdamW takes every value for a usual one | BF16 | test_kernels_cu adamw_rounds | llmc/optim/adamw.cuh | s/not_finite != 0/false/
quotients are not corrected | BF16 | test_kernels_cu quotients_and_roots | llmc/optim/adamw.cuh | s/return __fmaf_rn(too_large_by, -inverse, q)/return q/
SwiGLU's gradient takes gate for up | BF16 | test_kernels_cu swiglu_joins | llmc/matmul_sm90.cuh | s/s\.F \/ 64 + block, 0, ring\.full()/block, 0, ring.full()/
the last group of a product's tiles is taken for a full one | BF16 | test_kernels_cu tiles_of | llmc/matmul_sm90.cuh | s/min(s\.group, s\.rows - first)/s.group/
a block that keeps its activations has those of another | BF16 | test_determinism_cu recomputation_gives_the_same | train_llama3.cu | s/l + 1 < L ? (int)l : 0)/0)/
a block's activations lie on its gradients | BF16 | test_determinism_cu activations_in_memory | llmc/gpu/gradients.cuh | s/own = (param_offset(&g->trained, P_INPUT_NORM/own = (param_offset(\&g->trained, P_POST_NORM/
gaps hold activations when gradients are summed | BF16 | test_determinism_cu activations_in_memory | llmc/gpu/gradients.cuh | s/if (first >= last)/if (true)/
the embedding's gradient is zeroed while activations lie there | BF16 | test_determinism_cu activations_in_memory | train_llama3.cu | s/^    gradients_zero(&m->grads, -1.*//; s/^    gradients_zero(&m->grads, L.*/&\n    gradients_zero(\&m->grads, -1, kind, q->stream);/
activations lie on the gradient of a tied embedding | BF16 | test_determinism_cu activations_in_memory | llmc/gpu/gradients.cuh | s/least = g->config\.tied ?/least = false ?/
a gradient is looked for where activations lie | BF16 | test_determinism_cu a_gradient_is_named | train_llama3.cu | s/^    \/\/ first, as the forward pass may overwrite them.*/    llama_forward(m);/
weights without a master are rounded to nearest | BF16 | test_kernels_cu small_steps | llmc/optim/adamw.cuh | s/const uint32_t r = weight_random\.v\[k \/ 2\];/const uint32_t r = 0x80008000u;/
weights are rounded by the bits of other ones | BF16 | test_kernels_cu adamw_rounds | llmc/optim/adamw.cuh | s/if (W == 4 \&\& in_stretch % 8)/if (false)/
Muon: no Newton-Schulz runs | FP32 | test_llama3cu $muon | llmc/gpu/update.cuh | s/kernels->matrix(.*//
Muon: the rows of half a matrix | FP32 | test_llama3cu $muon | llmc/gpu/update.cuh | s/room, p->rows, p->cols, mine/room, p->rows \/ 2, p->cols, mine/
Muon: the scale of the rows of a shard | FP32 | test_llama3cu $muon | llmc/gpu/update.cuh | s/muon_rate(1\.0, 1\.0, p->rows,/muon_rate(1.0, 1.0, p->rows \/ 2,/
Muon: the first matrix of a launch for all | FP32 | test_llama3cu $muon | llmc/gpu/update.cuh | s/place = (size_t)o->deal.items\[i\].place/place = (size_t)0/
Muon: the scale of another matrix | BF16 | test_kernels_cu muon_agrees | llmc/optim/muon.cuh | s/(lr_scale \* part\.root)/lr_scale/
Muon: the norm of the first matrix for all | BF16 | test_kernels_cu newton | llmc/optim/muon.cuh | s/sums + blockIdx.y \* MUON_SUMS, muon_sums/sums, muon_sums/
Muon: half of a symmetric product is not mirrored | BF16 | test_kernels_cu a_half | llmc/matmul_sm90.cuh | s/place\.mirrored = rest >= Tiles::CLUSTER/place.mirrored = false/
Muon: the first matrix's A for all, by half | BF16 | test_kernels_cu a_half | llmc/matmul_sm90.cuh | s/added = s\.added + matrix +/added = s.added +/
Muon: the moment is lost between steps | FP32 | test_llama3cu $muon | llmc/optim/muon.cuh | s/m\[k\] = __fmaf_rn(rest, __fsub_rn(scaled, m\[k\]), m\[k\]);/m[k] = __fmul_rn(rest, scaled);/
Muon: Newton-Schulz runs once a micro-batch | FP32 | test_llama3cu $muon | train_llama3.cu | s/^        if (ok && !captured).*/& if (ok \&\& !(kind \& MICRO_LAST)) { matrices_update(\&m->optimizer, \&m->queue, \&m->weights, \&m->grads, \&m->exchange, m->runner.state, recipe); }/
Muon: the moment is lost at a resume | FP32 | test_llama3cu $muon | llmc/gpu/weights.cuh | s/moment_copy(a, state_at(.*HostToDevice);/if (held_place(\&a->held, SLOT_V, p->offset) != SIZE_MAX) { & }/
Muon: another model is resumed | FP32 | test_llama3cu $muon | llmc/gpu/weights.cuh | s/store_piece(a, KIND == .*/if (KIND != SLOT_MASTER || held_place(\&a->held, SLOT_V, p->offset) != SIZE_MAX) { & }/
Muon: weights without a master are rounded to nearest | BF16 | test_kernels_cu small_steps_of_muon | llmc/optim/muon.cuh | s/bits\.v\[k \/ 2\] >> k % 2 \* 16 & 0xffffu/0x8000u/
Muon: the low half of a split master dropped | BF16 | test_kernels_cu muon_agrees | llmc/optim/muon.cuh | s/= split_low(p\[k\]);/= 0;/
Muon: matrices of a rank's own gradients | FP32 | two.sh as-one --optimizer muon | llmc/gpu/update.cuh | s/exchange_matrices(x, .*false);//
Muon: owners keep their matrices | FP32 | two.sh as-one --optimizer muon | llmc/gpu/update.cuh | s/exchange_matrices(x, .*true);//
on the host: a step's first copies overtake the last ones of the step before | BF16 | two.sh on-host | llmc/gpu/host_stream.cuh | s/ stream_wait(s->in, s->out, s->left);//
on the host: a piece arrives in a window that has not left | BF16 | two.sh on-host | llmc/gpu/host_stream.cuh | s/^    CUDA_CHECK(cudaStreamWaitEvent(s->in, w->free));//
on the host: a piece is updated before it has arrived | BF16 | two.sh on-host | llmc/gpu/host_stream.cuh | s/^    CUDA_CHECK(cudaStreamWaitEvent(stream, w->there));//
on the host: a piece leaves before it is updated | BF16 | two.sh on-host | llmc/gpu/host_stream.cuh | s/^    stream_wait(s->out, stream, w->used);//
on the host: the update does not wait for the norm | BF16 | two.sh on-host | train_llama3.cu | s/^        stream_wait(x->stream, x->compute, x->decided);//
on the host: the forward pass does not wait for a layer's update | BF16 | two.sh on-host | llmc/gpu/exchange.cuh | s/if (last) { exchange_wait_uncaptured(/if (false) { exchange_wait_uncaptured(/
on the host: a block does not wait for its sums | BF16 | two.sh on-host | llmc/gpu/gradients.cuh | s/^    host_window_wait(g->host, .*//
on the host: sums of the first micro-batch are squared | BF16 | two.sh on-host | llmc/gpu/gradients.cuh | s/if (kind & MICRO_LAST) { gradients_sq/if (kind \& MICRO_FIRST) { gradients_sq/
on the host: a block is gathered into a slot in use | BF16 | two.sh on-host | llmc/gpu/sharded_blocks.cuh | s/if (count > 0) {/if (count == GATHER_SLOTS) {/
on the host: a block is gathered before its update has left | BF16 | two.sh on-host | llmc/gpu/sharded_blocks.cuh | s/if (x->buckets.items\[i\].layer == l) { CUDA.*/if (false) {}/
on the host: a gather waits for a block's update, not for its copies | BF16 | two.sh on-host | llmc/gpu/sharded_blocks.cuh | s/updated, a->host->out)/updated, x->stream)/
on the host: a block does not wait for its gather | BF16 | two.sh on-host | llmc/gpu/sharded_blocks.cuh | s/^    CUDA_CHECK(cudaStreamWaitEvent(x->compute, g->there.*//
on the host: a checkpoint does not wait for copies | BF16 | two.sh on-host | train_llama3.cu | s/^    host_stream_finish(m->weights.host);//
on the host: a stage of Muon begins in any window | BF16 | two.sh on-host | llmc/gpu/update.cuh | s/^ *if (a->host) { host_stream_align(a->host); }//
the split master's low half dropped | BF16 | test_kernels_cu adamw_agrees | llmc/optim/adamw.cuh | s/master\.v\[k \/ 2\] = lower_halves(.*;/master.v[k \/ 2] = 0;/
END
}

root=$PWD
faults | grep -qE -- "$pattern" || { echo "error: no fault matches $pattern" >&2 && exit 2; }
[ "$mode" != run ] || nvidia-smi -L 2>/dev/null | grep -q '^GPU' || {
    faults | grep -E -- "$pattern" | sed 's/ | .*//; s/^/skip fault /; s/$/: no GPU here/'
    echo "0 passed, 0 failed, $(faults | grep -cE -- "$pattern") skipped"
    exit 0
}
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d ' .\r')
NVCC=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
folder=$(mktemp -d "${TEST_TMP:-/tmp}/llama3_gpu_faults_XXXXXX") || exit 1
trap 'rm -rf "$folder"' EXIT
trap 'exit 130' INT TERM

# The functions below work in $here, a copy of the sources. $target and $arguments are the test's program and its arguments;
# $script, if set, runs the program.

copy_sources() {
    mkdir -p "$here/build" && cp -rp llmc Makefile train_llama3.c train_llama3.cu test_llama3.cu "$here" && ln -s "$root/dev" "$here/dev" &&
        { [ $mode != emulated ] || cp -rp build/emulated build/test_llama3_cpu.o build/cpu_flags "$here/build"; }
}

aim() { # aim TEST: sets $target, $script and $arguments; TEST names a pair by its model folder
    target=build/${1%% *} script='' arguments=${1#* }
    case $1 in
        test_llama3cu*) target=test_llama3cu arguments="$arguments $arguments.state.safetensors" ;;
        *.sh | *.sh\ *) target="train_llama3cu tokenize build/copy" script=dev/test/gpu/${1%% *} arguments=${1#*.sh} ;; # what two.sh runs
    esac
}

build() { # build PRECISION. On a slow link copies are late
    if [ $mode = emulated ]; then
        ln -s "build/emulated/$1_90/train_llama3cu" "$here" &&
            make -s -C "$here" PRECISION="$1" EMULATED_ARCH=90 "build/emulated/$1_90/train_llama3cu" build/copy >"$here/log" 2>&1
        return
    fi
    case $arguments in *on-host*) export NVCCFLAGS_EXTRA=-DHOST_RATE=0.01 ;; esac
    make -s -C "$here" NVCC="$NVCC" PRECISION="$1" ${GPU_ARCH:+GPU_ARCH="$GPU_ARCH"} $target >"$here/log" 2>&1
}

run_test() {
    if [ -n "$script" ]; then
        "$script" "$here" $arguments >"$here/log" 2>&1
    else
        (cd "$here" && timeout 120 "./$target" $arguments >log 2>&1)
    fi
}

# unfit PRECISION TEST: prints what this GPU lacks for the test; fails if it lacks nothing
unfit() {
    [ "$mode" = run ] || return 1
    case "$1 $2 sm_$capability" in
        *wgmma*sm_90 | *_joins*sm_90 | *a_half*sm_90) return 1 ;;
        *wgmma* | *_joins* | *a_half*) echo "needs sm_90" ;;
        *on-host*sm_[89]* | *on-host*sm_1*) return 1 ;;
        *.sh*fp8*sm_90) [ "$(nvidia-smi -L | grep -c '^GPU')" -lt 2 ] && echo "needs 2 GPUs" ;;
        *.sh*fp8*) echo "needs compute capability 9.0" ;;
        *on-host*) echo "needs sm_80 or newer" ;;
        *.sh*) [ "$(nvidia-smi -L | grep -c '^GPU')" -lt 2 ] && echo "needs 2 GPUs" ;;
        *products_of_quantised*sm_90 | *pairs/fp8*sm_90) return 1 ;;
        *products_of_quantised* | *pairs/fp8*) echo "needs compute capability 9.0" ;;
        BF16*sm_7?) echo "needs sm_80 or newer" ;;
        *) return 1 ;;
    esac
}

# The test failed by a comparison: the program reached its last line and named the failures.
compared() { grep -q '^ *FAIL' "$here/log" && tail -n 1 "$here/log" | grep -q ' [1-9][0-9]* failed'; }

result() { echo "$1 $2" | tee "$here/result"; }

log_tail() { tail -n 5 "$here/log" | cut -c1-180 | sed 's/^/    /'; }

plant() { # plant NAME PRECISION TEST FILE SED
    ! lacks=$(unfit "$2" "$3") || { result "skip" "fault $1: $lacks" && return; }
    aim "$3"
    if ! sed "$5" "$4" >"$here/changed"; then
        result "FAIL" "fault $1 is planted: $4 cannot be read"
    elif cmp -s "$4" "$here/changed"; then
        result "FAIL" "fault $1 is planted: the expression changes nothing in $4"
    elif [ "$mode" = plant ]; then
        result "ok  " "fault $1 is planted"
    elif ! copy_sources || ! mv "$here/changed" "$here/$4" || ! build "$2"; then
        log_tail
        result "FAIL" "fault $1 compiles"
    elif [ "$mode" = compile ]; then
        result "ok  " "fault $1 compiles"
    else
        run_test
        status=$?
        if [ $status -eq 1 ] && compared; then
            result "ok  " "fault $1 is caught by $3"
        else
            log_tail
            result "FAIL" "fault $1 is caught: $3 ended with $status"
        fi
    fi
    rm -rf "$here/llmc" "$here/build"
}

# Without a fault every test of the table must pass, or every fault would count as caught.
sound() { # sound PRECISION PROGRAM
    ! lacks=$(unfit "$1" "$2") || { result "skip" "without a fault $2 passes, $1: $lacks" && return; }
    aim "$2"
    if copy_sources && build "$1" && its_tests_pass "$@"; then
        result "ok  " "without a fault $2 passes, $1"
    else
        log_tail
        result "FAIL" "without a fault $2 passes, $1"
    fi
    rm -rf "$here/llmc" "$here/build"
}

its_tests_pass() {
    awk -F ' [|] ' -v precision="$1" -v program="$2 " '$2 == precision && index($3 " ", program) == 1 && !seen[$3]++ { print $3 }' "$folder/table" >"$here/tests"
    while IFS= read -r s_test; do
        ! s_lacks=$(unfit "$1" "$s_test") || continue
        aim "$s_test"
        run_test </dev/null || return 1
    done <"$here/tests"
}

count=0
next() { # next COMMAND...: runs it in the background in its own folder $here, JOBS at a time
    count=$((count + 1)) here=$folder/$(printf '%03d' $count)
    mkdir -p "$here"
    [ "$mode" != plant ] || { "$@" && return; }
    "$@" &
    while [ $((count - $(ended))) -ge "$JOBS" ]; do sleep 0.2; done
}
ended() { find "$folder" -name result | grep -c .; }

faults | grep -E -- "$pattern" | grep "$([ $mode != emulated ] || echo on-host)" >"$folder/table"
: >"$folder/sound"
[ "$mode" != run ] && [ "$mode" != emulated ] || awk -F ' [|] ' '$3 !~ /on-host/ { sub(/ .*/, "", $3) } !seen[$2, $3]++ { print $2 "|" $3 }' "$folder/table" >"$folder/sound"
while IFS='|' read -r precision program; do next sound "$precision" "$program"; done <"$folder/sound"
while IFS= read -r line; do
    name=${line%% | *} line=${line#* | }
    precision=${line%% | *} line=${line#* | }
    test=${line%% | *} line=${line#* | }
    next plant "$name" "$precision" "$test" "${line%% | *}" "${line#* | }"
done <"$folder/table"
wait

passed=$(cat "$folder"/[0-9]*/result | grep -c '^ok') skipped=$(cat "$folder"/[0-9]*/result | grep -c '^skip')
echo "$passed passed, $((count - passed - skipped)) failed, $skipped skipped"
[ $((passed + skipped)) -eq "$count" ]
