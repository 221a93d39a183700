/* fp8.cuh -- --fp8: the matrices of the blocks, with --fp8-head also the head, multiply in 8 bits. cuBLASLt scales each row of
 * a factor.
 *
 * All else stays as it is: residual stream, norms, embedding, attention, gradients, optimizer. The 8 bits are e4m3; for the
 * logits' gradients they are e5m2. The scales are powers of two and come from the tensor itself (quantise.h). So a checkpoint
 * needs nothing more, and a resumed run computes the same bits.
 *
 * This file keeps the copies of the weights; linear.cuh multiplies with them, and says how each factor is scaled.
 *
 * Weights are quantised before the first step and after each update. Validation and --eval --fp8 compute as training does.
 * Text is generated in BF16.
 *
 * Frozen weights (--lora, --eval) are quantised once, when they are loaded. Both copies of a matrix, a byte a weight each, then
 * take its place, so --fp8 needs no memory for them. They have no dW, and a sample's blocks multiply in 8 bits, too. Adapters
 * multiply in BF16. Blocks that are gathered keep their BF16 weights, and have copies in their slots.
 *
 * The head is one more weight, outside of the blocks, so it has one copy of each kind. It takes the tokens in chunks, and the
 * gradients of a chunk's logits overwrite the shared buffer: so a pass quantises its x chunk by chunk. `largest` of x and of
 * the gradient covers the chunks so far, in their order. A head that is also the embedding stays in 16 bits as the embedding.
 *
 * Several GPUs: every rank makes the copies itself, from gathered weights. The exchange stream makes them after a gather and
 * before the event that announces it. So a stream that may read the weights may read their copies, and one rule says when both
 * may be overwritten (exchange.cuh). ZeRO 1 and 2 keep copies of all blocks, made once an update (fp8_follow()). ZeRO 3 keeps
 * copies of the gathered blocks alone, one a slot (fp8_follow_slot()); the head's copies are made as in ZeRO 1. All ranks have
 * the same weights and scales, so they make the same copies. --offload weights does as ZeRO 3, on the stream of its gathers.
 *
 * Counts: each rank counts the values that it quantises, except frozen weights. Rank 0 logs its own counts. With several GPUs
 * or --offload, weights are counted in a buffer of their own. fp8_take_counts() copies it at the update, where the streams are
 * synchronized: a step then reports the weights that it computed with. Otherwise it reports the weights after its update.
 *
 * Limits: BF16, compute capability 9.0, and widths, a rank's tokens of a micro-batch and, for the head, the
 * vocabulary in multiples of 16.
 */
#ifndef LLMC_FP8_CUH
#define LLMC_FP8_CUH

#include "llmc/config.h"              // defines: ModelConfig, ParamTable, param_offset, linear_shape
#include "llmc/dist/zero.h"           // defines: GATHER_SLOTS
#include "llmc/cuda/cuda_common.cuh"  // defines: Arena, take
#include "llmc/gpu/device.cuh"        // defines: Device
#include "llmc/gpu/exchange.cuh"      // defines: Exchange
#include "llmc/gpu/layers.cuh"        // defines: Queue
#include "llmc/gpu/weights.cuh"       // defines: WeightArena, weight_at
#include "llmc/quantise.cuh"          // defines: QuantisedRows, QuantisedWeights, quantise_grid, quantise_weights_cuda

/* The 8-bit copies of the weights; all NULL without --fp8, the head's without --fp8-head. */
typedef struct {
    QuantisedWeights of[NUM_LINEARS];  // the copies of the first block; the copies of the other blocks follow
    int blocks;                        // blocks with room for copies: all, or slots of them; block l has number l % blocks
    bool gathered;                     // slots, which are filled as blocks are gathered
    bool frozen;                       // no step changes the weights
    bool in_place;                     // the copies of the blocks lie where their weights lay, which were finite when loaded
    bool made;                         // the copies of frozen weights have been made
    bool apart;                        // a stream other than the model's makes the copies, and counts in a buffer of its own
    size_t first_block, block;         // elements of the arena before the first block, and from one to the next
    size_t first[BLOCK_LINEARS];       // elements from a block's start to the weight
    size_t head;                       // elements of the arena before the head
    int head_layer;                    // of its bucket
    uint32_t* largest;       // (L, NUM_LINEARS, 2) of each x and dout; the head uses the place of block 0; NULL: not trained
    size_t num_largest;      // 2 L NUM_LINEARS
    QuantiseCounts* counts;  // of weights; NULL: none
} Fp8;

/* The copies of one matrix, {NULL} without --fp8, and where its product's factors leave their largest values. */
typedef struct {
    QuantisedRows rows, columns;
    uint32_t *x_largest, *dout_largest;  // for the product's input and its output's gradient; NULL: not trained
} Fp8Copies;

// ---------------------------------------------------------------------------------------------------------------------
// opening

/* Refuses a model that --fp8 (`head`: and --fp8-head) does not take, before anything asks for a card. tokens: of a rank's
 * micro-batch; words: the flags that set them */
static inline void fp8_check(const ModelConfig* c, bool head, size_t tokens, const char* words) {
    if (!IS_BF16) { die_usage("--fp8: this is a build for %s, wanted PRECISION=BF16", PRECISION_NAME); }
    const struct {
        const char* name;
        int64_t size;
    } sizes[] = {{"hidden_size", c->hidden_size},
                 {"intermediate_size", c->intermediate_size},
                 {"num_attention_heads * head_dim", q_width(c)},
                 {"(num_attention_heads + 2 * num_key_value_heads) * head_dim", (int64_t)qkv_width(c)},
                 {words, (int64_t)tokens}};
    for (const auto& size : sizes) {
        if (size.size % QUANTISE_WIDTH == 0) { continue; }
        die("--fp8: %s is %lld, wanted a multiple of %d", size.name, (long long)size.size, (int)QUANTISE_WIDTH);
    }
    quantise_grid(tokens, c->hidden_size, TRANSPOSE_TILE, TRANSPOSE_TILE);  // refuses what the launcher of transposes would
    if (head && c->vocab_size % QUANTISE_WIDTH != 0) {
        die("--fp8-head: vocab_size is %d, wanted a multiple of %d", c->vocab_size, (int)QUANTISE_WIDTH);
    }
}

/* Refuses a card or a cuBLASLt that lacks scales for each row, before anything is allocated. */
static inline void fp8_check_device(const Device* d) {
    if (d->missing) { return; }
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

/* Lays out the copies of the blocks, or of the slots if blocks are `gathered`; with `head` also of the head. table: all
 * weights, which lie at `weights` unless they are gathered */
static inline void fp8_lay_out_copies(Fp8* f, const ModelConfig* c, const ParamTable* table, bool head, bool gathered,
                                      floatX* weights, Arena* memory) {
    f->blocks = gathered ? GATHER_SLOTS : c->num_layers;
    f->gathered = gathered;
    f->in_place = f->frozen && !gathered;
    f->first_block = param_offset(table, P_INPUT_NORM, 0);
    f->block = c->num_layers > 1 ? param_offset(table, P_INPUT_NORM, 1) - f->first_block : 0;
    f->head = param_offset(table, P_LM_HEAD, -1);
    f->head_layer = c->tied ? -1 : c->num_layers;
    f->num_largest = 2 * NUM_LINEARS * (size_t)c->num_layers;
    for (int i = 0; i < BLOCK_LINEARS; i++) { f->first[i] = param_offset(table, linear_params[i], 0) - f->first_block; }
    for (int i = 0; i < (head ? NUM_LINEARS : BLOCK_LINEARS); i++) {
        QuantisedWeights* w = &f->of[i];
        linear_shape(c, (LinearKind)i, &w->R, &w->C);
        const size_t R = (size_t)w->R, C = (size_t)w->C, count = i == LINEAR_HEAD ? 1 : (size_t)f->blocks;
        if (f->in_place && i != LINEAR_HEAD) {
            w->rows = (uint8_t*)(weights + f->first_block + f->first[i]);
            w->columns = w->rows + R * C;
        } else {
            w->rows = take<uint8_t>(memory, count * R * C);
            w->columns = take<uint8_t>(memory, count * R * C);
        }
        w->scales = take<float>(memory, count * (R + C));
    }
}

/* Lays out the buffer of one factor of a product, and unless weights are frozen the buffer of two transposes.
 * N: rows of a block; chunk: rows of the head; train: there is a backward pass */
static inline void fp8_lay_out_factors(Fp8* f, Queue* q, size_t N, size_t chunk, bool train, Arena* memory) {
    size_t most_bytes = 0, most_transposed = 0;
    for (int i = 0; i < NUM_LINEARS; i++) {
        const size_t R = (size_t)f->of[i].R, C = (size_t)f->of[i].C, rows = i == LINEAR_HEAD ? chunk : N;
        most_bytes = size_max(most_bytes, rows * size_max(train ? quantised_pitch(R) : 0, quantised_pitch(C)));
        if (f->in_place) { most_bytes = size_max(most_bytes, R * C * sizeof(floatX)); }  // see fp8_replace_weights()
        most_transposed = size_max(most_transposed, (R + C) * quantised_pitch(rows));
    }
    q->quantised.data = take<uint8_t>(memory, most_bytes);
    q->quantised.scale = take<float>(memory, N);
    if (!f->frozen) {
        q->transposes = take<uint8_t>(memory, most_transposed);
        for (float*& scale : q->transpose_scale) { scale = take<float>(memory, 1); }
        f->largest = take<uint32_t>(memory, f->num_largest);
    }
    f->counts = f->frozen ? NULL : f->apart ? take<QuantiseCounts>(memory, 1) : q->counts + QUANTISED_WEIGHT;
}

// ---------------------------------------------------------------------------------------------------------------------
// weights

/* Returns a product's copies for block l; for the head, l is 0. */
static inline QuantisedWeights fp8_copies(const Fp8* f, int product, int l) {
    QuantisedWeights w = f->of[product];
    const size_t at = (size_t)(l % f->blocks), R = (size_t)w.R, C = (size_t)w.C;
    const size_t block = f->in_place ? f->block * sizeof(floatX) : R * C;
    w.rows += at * block;
    w.columns += at * block;
    w.scales += at * (R + C);
    return w;
}

/* Returns the copies of a product of block l (the head: l = 0), with the places for its largest values. */
static inline Fp8Copies fp8_copies_of(const Fp8* f, LinearKind product, int l) {
    Fp8Copies c;
    memset(&c, 0, sizeof c);
    if (!f->of[product].rows) { return c; }
    if (f->largest) {
        c.x_largest = f->largest + 2 * ((size_t)l * NUM_LINEARS + (size_t)product);
        c.dout_largest = c.x_largest + 1;
    }
    const QuantisedWeights copies = fp8_copies(f, product, l);
    c.rows = {copies.rows, copies.scales, (size_t)copies.C, NULL, E4M3};
    c.columns = {copies.columns, copies.scales + copies.R, (size_t)copies.R, NULL, E4M3};
    return c;
}

/* Makes the copies of a product in `count` blocks from block l on. The weights of block l lie at `data`; the weights of each
 * later block lie f->block elements further. */
static inline void fp8_quantise_product(const Fp8* f, int product, const floatX* data, int l, int count, Profiler* profiler,
                                        cudaStream_t stream) {
    const QuantisedWeights w = fp8_copies(f, product, l);
    Op op(profiler, stream, "quantise weights", 0, 6.0 * count * w.R * w.C);
    quantise_weights_cuda(w, data, f->block, count, f->counts, stream);
}

/* Makes the copies of `count` blocks from block l on. The first block begins at `block`, each later one f->block elements
 * further. */
static inline void fp8_quantise_weights(const Fp8* f, const floatX* block, int l, int count, Profiler* profiler,
                                        cudaStream_t stream) {
    for (int i = 0; i < BLOCK_LINEARS; i++) { fp8_quantise_product(f, i, block + f->first[i], l, count, profiler, stream); }
}

/* Makes the copies of all blocks, which begin at `first`, in place of their matrices. Meanwhile the buffer of a product's
 * factor holds the matrix. */
static inline void fp8_replace_weights(const Fp8* f, const Queue* q, const floatX* first) {
    floatX* room = (floatX*)q->quantised.data;
    for (int i = 0; i < f->blocks * BLOCK_LINEARS; i++) {
        const int l = i / BLOCK_LINEARS, product = i % BLOCK_LINEARS;
        const size_t size = (size_t)f->of[product].R * (size_t)f->of[product].C;
        const floatX* matrix = first + (size_t)l * f->block + f->first[product];
        CUDA_CHECK(cudaMemcpyAsync(room, matrix, size * sizeof(floatX), cudaMemcpyDeviceToDevice, q->stream));
        fp8_quantise_product(f, product, room, l, 1, q->profiler, q->stream);
    }
}

/* Makes the copies of the head; nothing without --fp8-head. */
static inline void fp8_quantise_head(const Fp8* f, const WeightArena* a, Profiler* profiler, cudaStream_t stream) {
    size_t run = 0;
    if (f->of[LINEAR_HEAD].rows) { fp8_quantise_product(f, LINEAR_HEAD, weight_at(a, f->head, &run), 0, 1, profiler, stream); }
}

/* Makes the copies of all weights, except those that are made as blocks are gathered; nothing without --fp8. Call it when
 * weights are loaded or drawn and, with one GPU, after the update. Of frozen weights the first call makes them. */
static inline void fp8_refresh(Fp8* f, const Queue* q, const WeightArena* a) {
    if (!f->of[0].rows || f->made) { return; }
    f->made = f->frozen;
    if (f->apart) { CUDA_CHECK(cudaMemsetAsync(f->counts, 0, sizeof *f->counts, q->stream)); }
    if (f->in_place) {
        fp8_replace_weights(f, q, a->params + f->first_block);
    } else if (!f->gathered) {
        fp8_quantise_weights(f, a->params + f->first_block, 0, f->blocks, q->profiler, q->stream);
    }
    fp8_quantise_head(f, a, q->profiler, q->stream);
}

/* Call it after the gather of a bucket's weights: with the bucket's last piece it makes the copies of a block, or of the
 * head. */
static inline void fp8_follow(const Fp8* f, const Exchange* x, int bucket, const WeightArena* a) {
    const Bucket* b = &x->buckets.items[bucket];
    const bool last = bucket + 1 == x->buckets.count || b[1].layer != b->layer;
    if (!f->of[0].rows || f->frozen || !last) { return; }
    if (b->layer == f->head_layer) { fp8_quantise_head(f, a, x->profiler, x->stream); }
    if (f->gathered || b->layer < 0 || b->layer >= f->blocks) { return; }
    const floatX* block = a->params + f->first_block + (size_t)b->layer * f->block;
    fp8_quantise_weights(f, block, b->layer, 1, x->profiler, x->stream);
}

/* Call it after the gathers of block l into `slot`, which is l % GATHER_SLOTS: makes the block's copies on their stream. */
static inline void fp8_follow_slot(const Fp8* f, const Exchange* x, int l, const floatX* slot, cudaStream_t stream) {
    if (f->of[0].rows) { fp8_quantise_weights(f, slot, l, 1, x->profiler, stream); }
}

/* Where another stream makes copies, before the update: moves the counts of weights into the step's counts, and clears
 * them. The compute stream has waited for all copies that the step's passes read, so all counting is done. The next counting
 * waits for an event that is recorded after this call: `updated`, or `used` of the next pass. */
static inline void fp8_take_counts(const Fp8* f, const Queue* q) {
    if (!f->of[0].rows || !f->apart) { return; }
    CUDA_CHECK(
        cudaMemcpyAsync(q->counts + QUANTISED_WEIGHT, f->counts, sizeof *f->counts, cudaMemcpyDeviceToDevice, q->stream));
    CUDA_CHECK(cudaMemsetAsync(f->counts, 0, sizeof *f->counts, q->stream));
}

/* Opens a pass over a batch: its tensors have no largest values yet. */
static inline void fp8_begin(const Fp8* f, const Queue* q) {
    if (f->largest) { CUDA_CHECK(cudaMemsetAsync(f->largest, 0, f->num_largest * sizeof *f->largest, q->stream)); }
}

#endif
