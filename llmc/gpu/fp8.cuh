/* fp8.cuh -- --fp8: the linear layers of the blocks, with --fp8-head also the head, multiply in 8 bits, where cuBLASLt has a
 * scale for each row.
 *
 *   forward   out = x W^T     x: 8 bits, a scale for each token     W: 8 bits, a scale for each output
 *   dx        dx = dout W     dout: a scale for each token          W: its transposed copy, a scale for each input
 *   dW        dW = dout^T x   dout: its transpose, one scale        x: its transpose, one scale
 *
 * All else stays as it is: residual stream, norms, embedding, attention, gradients, optimizer. The 8 bits are e4m3, but of the
 * logits' gradients e5m2. The scales are powers of two, from the tensor as it is now (quantise.h), so a run has nothing more to
 * save, and a resumed one computes the same bits.
 *
 * Weights are quantised once an update, right after AdamW, and before the first step (of several GPUs see below). Activations
 * and gradients are quantised just before their product: those of rmsnorm and swiglu as these write them, the others in one
 * pass. All products share one buffer for them; what is computed again has the same bits. Validation and --eval --fp8 compute
 * as training does. Text is generated in BF16.
 *
 * dW sums over the tokens, so that their scales cannot be applied to the sum: each factor has one scale, by its largest value.
 * What quantises the rows of a tensor leaves that value in `largest`, that of x already in the forward pass. dx makes the
 * transpose of dout from its 8-bit rows, by a shift of the exponents (quantise.h), 2 bytes a value, and leaves it for dW. x is
 * kept in 16 bits, or computed again with the same bits, so dW makes its transpose from these, 3 bytes a value, with the scale
 * that the forward pass has left: the same bits whatever is computed again. Both transposes share one buffer.
 *
 * The head is one more weight, outside of the blocks, so with one copy of each kind. It takes the tokens in chunks, and the
 * gradients of a chunk's logits overwrite the shared buffer: so its x is quantised chunk by chunk, in a pass. `largest` of x
 * and dout is that of the chunks so far, in their order. If the head is the embedding, too, that stays in 16 bits.
 *
 * The sums: forward keeps them in the tensor cores' own precision until the end (fast), as others do; dx, which sums over twice
 * the feed-forward width, and dW, which sums over all tokens, do not. On an H200 (dev/results/nvidia-h200-levers.md) the
 * products of a 1B model run at 1.87 times BF16's speed if all are fast, at 1.66 if none is, with scales for each row; those of
 * dW with one scale each, not fast, at 1.77.
 *
 * Several GPUs: every rank makes the copies from weights that have been gathered, on the stream of the exchange, right behind
 * the gather and before the event of it that the compute stream waits for.
 *
 *   ZeRO 1, 2  copies of all blocks. Behind the last piece of a block, once an update (fp8_follow()). The old copies are read
 *              last by the last forward and backward pass before; behind these the compute stream queues AdamW of the piece and
 *              the event `updated`, which the gather waits for. What reads the new ones waits for `gathered` of the piece.
 *              The head's copies are made so, too, also with ZeRO 3, where every rank has the head whole.
 *   ZeRO 3     copies of the blocks that are gathered, in as many slots, behind each gather of a block. What was in the slot
 *              is read last by products that the compute stream has queued before the event `used`, as is its 16-bit block:
 *              copies and block are always those of one weight. What reads the new ones waits for `there` of the slot.
 *
 * Both orders hold in a captured graph as for the weights themselves, and whatever passes the layers: training, validation,
 * samples. Since all weights and scales are alike on all ranks, so are the copies.
 *
 * Counts: each rank counts what it quantises, and rank 0 tells of its own. Of several, weights are counted beside the step, in
 * place of their own, which llama_update() takes over at a point where both streams have met (fp8_take_counts()): those of
 * the weights that the step has computed with. Of one, these are the weights behind its update.
 *
 * Limits: BF16, compute capability 9.0, no adapters, and widths, a rank's tokens of a micro-batch and, for the head, the
 * vocabulary in multiples of 16.
 */
#ifndef LLMC_FP8_CUH
#define LLMC_FP8_CUH

#include "llmc/config.h"               // defines: ModelConfig, ParamTable, param_offset
#include "llmc/dist/zero.h"            // defines: GATHER_SLOTS
#include "llmc/gpu/arena.cuh"          // defines: Arena, take
#include "llmc/gpu/device.cuh"         // defines: Device
#include "llmc/gpu/exchange.cuh"       // defines: Exchange
#include "llmc/gpu/layers.cuh"         // defines: Queue, linear, linear_backward_input
#include "llmc/gpu/weights.cuh"        // defines: WeightArena, weight_at
#include "llmc/quantise.cuh"           // defines: QuantisedRows, QuantisedWeights, QuantisedTranspose, quantise_rows_cuda
#include "llmc/rmsnorm_quantised.cuh"  // defines: rmsnorm_forward_quantised_cuda
#include "llmc/swiglu_quantised.cuh"   // defines: swiglu_forward_quantised_cuda, swiglu_backward_quantised_cuda
#include "llmc/run/session.h"          // defines: Session

constexpr bool FP8_FAST_FORWARD = true, FP8_FAST_DX = false, FP8_FAST_DW = false;

/* The linear layers: those of a block, then the head. */
enum { FP8_QKV, FP8_O, FP8_GATE_UP, FP8_DOWN, FP8_BLOCK, FP8_HEAD = FP8_BLOCK, NUM_FP8 };

/* For each of them: its weights, its input, and the gradient of its output; and whether the layer that makes these just before
 * has also quantised them. */
typedef struct {
    ParamKind weight;
    QuantisedKind x, dout;
    bool x_made, dout_made;
} Fp8Product;
static const Fp8Product fp8_products[NUM_FP8] = {{P_Q, QUANTISED_NORM, QUANTISED_DQKV, true, false},
                                                 {P_O, QUANTISED_ATT, QUANTISED_DH, false, false},
                                                 {P_GATE, QUANTISED_NORM, QUANTISED_DGATE_UP, true, true},
                                                 {P_DOWN, QUANTISED_ACT, QUANTISED_DH, true, false},
                                                 {P_LM_HEAD, QUANTISED_NORM, QUANTISED_DLOGITS, false, false}};

/* The 8-bit copies of the weights; all NULL without --fp8, the head's without --fp8-head. */
typedef struct {
    QuantisedWeights of[NUM_FP8];  // the first block's; the others follow
    int blocks;                    // with room for copies: all, or slots of them; block l has the (l % blocks)-th
    bool gathered;                 // slots, which are filled as blocks are gathered
    bool several;                  // GPUs
    size_t first_block, block;     // elements of the arena before the first block, and from one to the next
    size_t first[FP8_BLOCK];       // elements of a block before the weight
    size_t head;                   // elements of the arena before the head
    int head_layer;                // of its bucket
    uint32_t* largest;             // (L, NUM_FP8, 2) of each x and dout, the head's as block 0's; NULL: not trained
    size_t num_largest;            // 2 L NUM_FP8
    QuantiseCounts* counts;        // of weights; NULL: none
} Fp8;

/* A weight with its copies. */
typedef struct {
    const floatX* data;
    QuantisedRows rows, columns;  // without --fp8 {NULL}
    const Fp8Product* product;
    uint32_t *x_largest, *dout_largest;  // of the product's input and its output's gradient; NULL: not trained
} Weight;

// ---------------------------------------------------------------------------------------------------------------------
// opening

/* Refuses a run that --fp8 does not take, before anything asks for a card. */
static inline void fp8_check(const Session* s) {
    const Options* o = &s->options;
    const ModelConfig* c = &s->config;
    const bool computes = job_trains(s->job) || s->job == JOB_EVAL;
    if (o->fp8_head && !o->fp8) {
        die_usage("--fp8-head: the blocks' products are not in FP8, wanted --fp8 as well, or --no-fp8-head");
    }
    if (!o->fp8 || !computes) { return; }
    if (!IS_BF16) { die_usage("--fp8: this is a build for %s, wanted PRECISION=BF16", PRECISION_NAME); }
    if (c->lora.rank > 0) { die_usage("--fp8: the run trains adapters (--lora), wanted one that trains all weights"); }
    const struct {
        const char* name;
        int64_t size;
    } sizes[] = {
        {"hidden_size", c->hidden_size},
        {"intermediate_size", c->intermediate_size},
        {"num_attention_heads * head_dim", q_width(c)},
        {"(num_attention_heads + 2 * num_key_value_heads) * head_dim", (int64_t)qkv_width(c)},
        {session_share(s).parts > 1 ? "--batch * --seq / --seq-parallel" : "--batch * --seq", (int64_t)session_tokens(s)}};
    for (const auto& size : sizes) {
        if (size.size % QUANTISE_WIDTH == 0) { continue; }
        die("--fp8: %s is %lld, wanted a multiple of %d", size.name, (long long)size.size, (int)QUANTISE_WIDTH);
    }
    if (o->fp8_head && c->vocab_size % QUANTISE_WIDTH != 0) {
        die("--fp8-head: vocab_size is %d, wanted a multiple of %d", c->vocab_size, (int)QUANTISE_WIDTH);
    }
}

/* Refuses a card, or a cuBLASLt, without scales for each row, before anything is allocated. */
static inline void fp8_check_device(const Session* s, const Device* d) {
    const bool computes = job_trains(s->job) || s->job == JOB_EVAL;
    if (!s->options.fp8 || !computes || d->missing) { return; }
    const int major = device_attribute(cudaDevAttrComputeCapabilityMajor);
    const int minor = device_attribute(cudaDevAttrComputeCapabilityMinor);
    if (major != 9 || minor != 0) {
        die("--fp8: %s has compute capability %d.%d, wanted 9.0 (H100, H200), where cuBLASLt scales each row of a factor",
            d->name, major, minor);
    }
    if (!matmul_has_row_scales()) {
        die("--fp8: cuBLASLt is %zu, of the build %d, wanted at least %d, which scales each row of a factor",
            cublasLtGetVersion(), (int)CUBLAS_VERSION, (int)MATMUL_ROW_SCALES_VERSION);
    }
}

/* Lays out the copies of all weights in `weights`, or if blocks are `gathered` of those that are; and the buffer of one operand
 * in `workspace`, to `train` also that of two transposes. table: of all weights   N: rows of a block   chunk: rows of the head;
 * 0: that stays in 16 bits */
static inline void fp8_lay_out(Fp8* f, Queue* q, Arena* weights, Arena* workspace, const ModelConfig* c,
                               const ParamTable* table, size_t N, size_t chunk, bool gathered, bool train) {
    const int C = c->hidden_size, F = c->intermediate_size, Q = q_width(c), QKV = (int)qkv_width(c);
    const struct { int R, C; } sizes[NUM_FP8] = {{QKV, C}, {C, Q}, {2 * F, C}, {C, F}, {c->vocab_size, C}};
    size_t most_bytes = 0, most_transposed = 0;
    f->blocks = gathered ? GATHER_SLOTS : c->num_layers;
    f->gathered = gathered;
    f->several = table->ranks > 1;
    f->first_block = param_offset(table, P_INPUT_NORM, 0);
    f->block = c->num_layers > 1 ? param_offset(table, P_INPUT_NORM, 1) - f->first_block : 0;
    f->head = param_offset(table, P_LM_HEAD, -1);
    f->head_layer = c->tied ? -1 : c->num_layers;
    for (int i = 0; i < FP8_BLOCK; i++) { f->first[i] = param_offset(table, fp8_products[i].weight, 0) - f->first_block; }
    for (int i = 0; i < (chunk > 0 ? NUM_FP8 : FP8_BLOCK); i++) {
        QuantisedWeights* w = &f->of[i];
        const size_t R = (size_t)sizes[i].R, C = (size_t)sizes[i].C, rows = i == FP8_HEAD ? chunk : N;
        const size_t count = i == FP8_HEAD ? 1 : (size_t)f->blocks;
        w->R = sizes[i].R;
        w->C = sizes[i].C;
        w->rows = take<uint8_t>(weights, count * R * C);
        w->columns = take<uint8_t>(weights, count * R * C);
        w->scales = take<float>(weights, count * (R + C));
        most_bytes = size_max(most_bytes, rows * size_max(train ? quantised_pitch(R) : 0, quantised_pitch(C)));
        most_transposed = size_max(most_transposed, (R + C) * quantised_pitch(rows));
    }
    q->quantised.data = take<uint8_t>(workspace, most_bytes);
    q->quantised.scale = take<float>(workspace, N);
    if (train) {
        q->transposes = take<uint8_t>(workspace, most_transposed);
        for (float*& scale : q->transpose_scale) { scale = take<float>(workspace, 1); }
        f->num_largest = 2 * NUM_FP8 * (size_t)c->num_layers;
        f->largest = take<uint32_t>(workspace, f->num_largest);
    }
    f->counts = f->several ? take<QuantiseCounts>(workspace, 1) : q->counts ? q->counts + QUANTISED_WEIGHT : NULL;
}

// ---------------------------------------------------------------------------------------------------------------------
// weights

/* Returns a product's copies of block l; of the head l is 0. */
static inline QuantisedWeights fp8_copies(const Fp8* f, int product, int l) {
    QuantisedWeights w = f->of[product];
    const size_t at = (size_t)(l % f->blocks), R = (size_t)w.R, C = (size_t)w.C;
    w.rows += at * R * C;
    w.columns += at * R * C;
    w.scales += at * (R + C);
    return w;
}

/* Returns the weight at `data` of a product of block l, of the head 0, with its copies. */
static inline Weight fp8_weight(const Fp8* f, int product, int l, const floatX* data) {
    Weight w;
    memset(&w, 0, sizeof w);
    w.data = data;
    w.product = &fp8_products[product];
    if (!f->of[product].rows) { return w; }
    if (f->largest) {
        w.x_largest = f->largest + 2 * ((size_t)l * NUM_FP8 + (size_t)product);
        w.dout_largest = w.x_largest + 1;
    }
    const QuantisedWeights copies = fp8_copies(f, product, l);
    w.rows = {copies.rows, copies.scales, (size_t)copies.C, NULL, E4M3};
    w.columns = {copies.columns, copies.scales + copies.R, (size_t)copies.R, NULL, E4M3};
    return w;
}

/* Makes the copies of a product in `count` blocks from block l on, whose weights lie at `data` and f->block further each. */
static inline void fp8_quantise_product(const Fp8* f, int product, const floatX* data, int l, int count, Profiler* profiler,
                                        cudaStream_t stream) {
    const QuantisedWeights w = fp8_copies(f, product, l);
    Op op(profiler, stream, "quantise weights", 0, 6.0 * count * w.R * w.C);
    quantise_weights_cuda(w, data, f->block, count, f->counts, stream);
}

/* Makes the copies of `count` blocks from block l on, whose first elements lie at `block` and f->block further each. */
static inline void fp8_quantise_weights(const Fp8* f, const floatX* block, int l, int count, Profiler* profiler,
                                        cudaStream_t stream) {
    for (int i = 0; i < FP8_BLOCK; i++) { fp8_quantise_product(f, i, block + f->first[i], l, count, profiler, stream); }
}

/* Makes the copies of the head; nothing without --fp8-head. */
static inline void fp8_quantise_head(const Fp8* f, const WeightArena* a, Profiler* profiler, cudaStream_t stream) {
    size_t run = 0;
    if (f->of[FP8_HEAD].rows) { fp8_quantise_product(f, FP8_HEAD, weight_at(a, f->head, &run), 0, 1, profiler, stream); }
}

/* Makes the copies of all weights, except those that are made as blocks are gathered; nothing without --fp8. To be called when
 * weights are loaded or drawn, and with one GPU after AdamW. */
static inline void fp8_refresh(const Fp8* f, const Queue* q, const WeightArena* a) {
    if (!f->of[0].rows) { return; }
    if (f->several) { CUDA_CHECK(cudaMemsetAsync(f->counts, 0, sizeof *f->counts, q->stream)); }
    if (!f->gathered) { fp8_quantise_weights(f, a->params + f->first_block, 0, f->blocks, q->profiler, q->stream); }
    fp8_quantise_head(f, a, q->profiler, q->stream);
}

/* Behind the gather of a bucket's weights: with its last piece makes the copies of a block, or of the head. */
static inline void fp8_follow(const Fp8* f, const Exchange* x, int bucket, const WeightArena* a) {
    const Bucket* b = &x->buckets.items[bucket];
    const bool last = bucket + 1 == x->buckets.count || b[1].layer != b->layer;
    if (!f->of[0].rows || !last) { return; }
    if (b->layer == f->head_layer) { fp8_quantise_head(f, a, x->profiler, x->stream); }
    if (f->gathered || b->layer < 0 || b->layer >= f->blocks) { return; }
    const floatX* block = a->params + f->first_block + (size_t)b->layer * f->block;
    fp8_quantise_weights(f, block, b->layer, 1, x->profiler, x->stream);
}

/* Behind the gathers of block l into `slot`, slot l % GATHER_SLOTS: makes its copies. */
static inline void fp8_follow_slot(const Fp8* f, const Exchange* x, int l, const floatX* slot) {
    if (f->of[0].rows) { fp8_quantise_weights(f, slot, l, 1, x->profiler, x->stream); }
}

/* Of several GPUs, in front of AdamW: puts the counts of weights into the step's, and begins them anew. The compute stream has
 * waited for all copies that the step's passes read, so for all that was counted; and whatever counts next waits for events
 * that are recorded behind this: `updated`, or `used` of the next pass. */
static inline void fp8_take_counts(const Fp8* f, const Queue* q) {
    if (!f->of[0].rows) { return; }
    CUDA_CHECK(
        cudaMemcpyAsync(q->counts + QUANTISED_WEIGHT, f->counts, sizeof *f->counts, cudaMemcpyDeviceToDevice, q->stream));
    CUDA_CHECK(cudaMemsetAsync(f->counts, 0, sizeof *f->counts, q->stream));
}

// ---------------------------------------------------------------------------------------------------------------------
// products

/* Opens a pass over a batch: its tensors have no largest values yet. */
static inline void fp8_begin(const Fp8* f, const Queue* q) {
    if (f->largest) { CUDA_CHECK(cudaMemsetAsync(f->largest, 0, f->num_largest * sizeof *f->largest, q->stream)); }
}

/* Returns the shared buffer for rows of `width` of a kind of tensor, which leave their largest value in `largest`, and the
 * counts of the kind, or NULL. */
static inline QuantisedRows fp8_rows(const Queue* q, QuantisedKind kind, size_t width, uint32_t* largest) {
    return {q->quantised.data, q->quantised.scale, quantised_pitch(width), largest, quantised_format(kind)};
}
static inline QuantiseCounts* fp8_counts(const Queue* q, QuantisedKind kind) { return q->counts ? q->counts + kind : NULL; }

/* Return the places of the two transposes of a dW: the lines (OC, N) of dout's are in front of the lines (C, N) of x's. */
static inline QuantisedTranspose fp8_dout_t(const Queue* q, size_t N) {
    return {q->transposes, q->transpose_scale[0], quantised_pitch(N)};
}
static inline QuantisedTranspose fp8_x_t(const Queue* q, size_t N, int OC) {
    const size_t pitch = quantised_pitch(N);
    return {q->transposes + (size_t)OC * pitch, q->transpose_scale[1], pitch};
}

static inline cudaDataType_t fp8_type(Fp8Format f) { return f == E4M3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2; }
static inline Operand fp8_operand(QuantisedRows r, bool fast) {
    return operand_fp8_rows(r.data, r.scale, r.pitch, fast, fp8_type(r.format));
}
static inline Operand fp8_operand(QuantisedTranspose t, QuantisedKind kind) {
    return operand_fp8_tensor(t.data, t.scale, t.pitch, FP8_FAST_DW, fp8_type(quantised_format(kind)));
}

/* Returns the factor of the head's gradients that is multiplied behind their products, so that what is left of dloss for the
 * gradients of the logits is a power of two. A row's largest is often that of a target which was not expected, close to what is
 * left of dloss: e5m2 has a power of two, and would round another number, in all these rows alike. */
static inline float fp8_factor_behind(const Weight& head, float dloss) {
    int exponent = 0;
    return head.rows.data && dloss != 0 ? 2 * frexpf(dloss, &exponent) : 1.0f;
}

/* Quantises x (N, C) into rows `to` of the shared buffer, unless it is `made`, that is there already. */
static inline void fp8_quantise(const Queue* q, QuantisedRows to, QuantisedKind kind, bool made, const floatX* x, size_t N,
                                int C) {
    if (made) { return; }
    Op op(q->profiler, q->stream, "quantise", 0, 3.0 * (double)N * C);
    quantise_rows_cuda(to, x, N, C, pitch_of(C), fp8_counts(q, kind), q->stream);
}

/* As their namesakes in layers.cuh, in 8 bits if the weight has copies. A profile counts these operations at FP8's rate. */
static inline void linear(const Queue* q, const char* name, floatX* out, const floatX* x, const Weight& w,
                          const floatX* residual, size_t N, int C, int OC) {
    if (!w.rows.data) {
        linear(q, name, out, x, w.data, residual, N, C, OC);
        return;
    }
    const QuantisedRows rows = fp8_rows(q, w.product->x, (size_t)C, w.x_largest);
    fp8_quantise(q, rows, w.product->x, w.product->x_made, x, N, C);
    const Operand x8 = fp8_operand(rows, FP8_FAST_FORWARD), w8 = fp8_operand(w.rows, FP8_FAST_FORWARD);
    const double moved = (double)N * C + (double)OC * C + bytes_x((double)N * OC * (residual ? 2 : 1));
    Op op(q->profiler, q->stream, name, linear_flops(N, C, OC), moved, FP8_RATE);
    matmul_forward_cuda(q->matmul, out, x8, w8, residual, N, C, OC, pitch_of(OC), q->stream);
}

/* dx (N, C) = dout (N, OC) w is the forward product of dout with the transpose of w, (C, OC). Leaves the transpose of dout for
 * the next linear_backward_weight(), that of this weight. factor: see fp8_factor_behind() */
static inline void linear_backward_input(const Queue* q, const char* name, floatX* dx, const floatX* dout, const Weight& w,
                                         size_t N, int C, int OC, float factor = 1.0f) {
    if (!w.columns.data) {
        linear_backward_input(q, name, dx, dout, w.data, N, C, OC);
        return;
    }
    const QuantisedRows rows = fp8_rows(q, w.product->dout, (size_t)OC, w.dout_largest);
    fp8_quantise(q, rows, w.product->dout, w.product->dout_made, dout, N, OC);
    if (w.dout_largest) {
        Op op(q->profiler, q->stream, "transpose", 0, 2.0 * (double)N * OC);
        quantise_shifted_cuda(fp8_dout_t(q, N), rows, N, OC, fp8_counts(q, quantised_transpose(w.product->dout)), q->stream);
    }
    const Operand dout8 = fp8_operand(rows, FP8_FAST_DX), w8 = fp8_operand(w.columns, FP8_FAST_DX);
    const double moved = (double)N * OC + (double)OC * C + bytes_x((double)N * C);
    Op op(q->profiler, q->stream, name, linear_flops(N, C, OC), moved, FP8_RATE);
    matmul_forward_cuda(q->matmul, dx, dout8, w8, (const floatX*)NULL, N, OC, C, pitch_of(C), q->stream, factor);
}

/* dout's transpose is there: linear_backward_input() of this weight has left it. */
static inline void linear_backward_weight(const Queue* q, const char* name, Gradient dw, const floatX* dout, const floatX* x,
                                          const Weight& w, size_t N, int C, int OC, bool add, float factor = 1.0f) {
    if (!w.x_largest || !dw.data) {
        linear_backward_weight(q, name, dw, dout, x, N, C, OC, add);
        return;
    }
    const QuantisedTranspose x_t = fp8_x_t(q, N, OC);
    {
        Op op(q->profiler, q->stream, "transpose", 0, 3.0 * (double)N * C);
        quantise_transposed_cuda(x_t, x, w.x_largest, N, C, pitch_of(C), fp8_counts(q, quantised_transpose(w.product->x)),
                                 q->stream);
    }
    const double grad = (double)OC * C * (dw.fp32 ? sizeof(float) : sizeof(floatX)) * (add ? 2 : 1);
    Op op(q->profiler, q->stream, name, linear_flops(N, C, OC), (double)N * C + (double)N * OC + grad, FP8_RATE);
    const Operand d8 = fp8_operand(fp8_dout_t(q, N), w.product->dout), x8 = fp8_operand(x_t, w.product->x);
    if (dw.fp32) {
        matmul_backward_weight_transposed_cuda(q->matmul, (float*)dw.data, d8, x8, N, C, OC, add, q->stream, factor);
    } else {
        matmul_backward_weight_transposed_cuda(q->matmul, (floatX*)dw.data, d8, x8, N, C, OC, add, q->stream, factor);
    }
}

/* next: the weight whose product takes `out` */
static inline void rmsnorm(const Queue* q, floatX* out, float* rstd, const floatX* x, const floatX* w, size_t N, int C,
                           float eps, const Weight& next) {
    if (!next.rows.data) {
        rmsnorm(q, out, rstd, x, w, N, C, eps);
        return;
    }
    Op op(q->profiler, q->stream, "rmsnorm", 0, 5.0 * N * C);
    rmsnorm_forward_quantised_cuda(fp8_rows(q, next.product->x, (size_t)C, next.x_largest), out, rstd, x, w,
                                   {N, C, pitch_of(C)}, eps, fp8_counts(q, next.product->x), q->stream);
}

/* next: the weight whose product takes `out` */
static inline void swiglu(const Queue* q, floatX* out, const floatX* gate_up, size_t N, int F, const Weight& next) {
    if (!next.rows.data) {
        swiglu(q, out, gate_up, N, F);
        return;
    }
    Op op(q->profiler, q->stream, "swiglu", 0, 7.0 * N * F);
    swiglu_forward_quantised_cuda(fp8_rows(q, next.product->x, (size_t)F, next.x_largest), out, gate_up, N, F,
                                  pitch_of(2 * (size_t)F), pitch_of(F), fp8_counts(q, next.product->x), q->stream);
}

/* next: the weight whose dx takes dgate_up */
static inline void swiglu_backward(const Queue* q, floatX* dgate_up, floatX* out, const floatX* dout, const floatX* gate_up,
                                   size_t N, int F, const Weight& next) {
    if (!next.columns.data) {
        swiglu_backward(q, dgate_up, out, dout, gate_up, N, F);
        return;
    }
    Op op(q->profiler, q->stream, "swiglu backward", 0, (out ? 14.0 : 12.0) * N * F);
    swiglu_backward_quantised_cuda(fp8_rows(q, next.product->dout, 2 * (size_t)F, next.dout_largest), dgate_up, out, dout,
                                   gate_up, N, F, pitch_of(2 * (size_t)F), pitch_of(F), fp8_counts(q, next.product->dout),
                                   q->stream);
}

#endif
