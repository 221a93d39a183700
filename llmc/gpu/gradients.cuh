/* gradients.cuh -- where the gradients of a model lie on the device.
 *
 * Gradients of matrices have one type, though the head's may be fp32. Gradients of norms, and of any tensor that is no matrix,
 * are fp32 and lie in `extra`, as the table's arena of vectors. One GPU, and ZeRO 1, hold all of them, laid out as the trained
 * tensors. In ZeRO 2 and 3 the gradients of matrices lie in a ring (dist/zero.h), which every micro-step overwrites. Before
 * that, each rank has sent them to their owners, who add them up.
 *
 * --offload gradients (one GPU): gradients of the blocks' matrices lie in the host's memory. Blocks take turns in a ring of
 * three. The backward pass of block l adds to the sums of earlier micro-steps, which have arrived, with the kernels of sums on
 * the card, and so with the same bits. Then the sums leave. The last micro-step of a step squares them before that. In the
 * first one nothing arrives.
 *
 *   in         | sums of l - 2 arrive            | sums of l - 3 arrive      | ...
 *   compute    | block l                         | block l - 1               | block l - 2 ...       (backward)
 *   out                                          | sums of l leave           | sums of l - 1 leave   ...
 *
 * The streams wait as for the state (host_stream.cuh), with a window for each part of the ring: the sums of l - 3 go into the
 * part of block l, and so arrive once that block has left. The next step's sums leave once the update has read these.
 *
 * With one micro-step a step, one GPU and ZeRO 1 lend this memory to activations. The backward pass goes from the last block to
 * the first: when it writes the gradients of block l, it has read the activations of all later blocks. So activations of block
 * l may lie anywhere below its own gradients. With more micro-steps, the gradients of earlier ones need this memory. Gradients
 * on their way to their owners lie above, and all have arrived before the next forward pass begins. A ring lends nothing:
 * blocks take turns in it throughout the backward pass.
 *
 *   the gradients   | embedding  | block 0 | block 1 | block 2 | block 3 | norm, head |
 *   activations         |    of 1    |    of 2    |    of 3    |  (block 0 has its own memory)
 *
 * Gaps between tensors, and the places of norms among the matrices, are zero when the gradients are summed or sent. They begin
 * as zero and stay so, unless activations have lain there: then they are zeroed after the backward pass of the blocks, or
 * with each block if it is sent. In the ring head and embedding take turns in one place, where the gaps are zeroed each time.
 */
#ifndef LLMC_GRADIENTS_CUH
#define LLMC_GRADIENTS_CUH

#include "llmc/config.h"              // defines: ModelConfig, ParamTable, param_at, param_offset
#include "llmc/dist/buckets.h"        // defines: Bucket, Buckets
#include "llmc/dist/zero.h"           // defines: GradientRing, gradient_part
#include "llmc/cuda/cuda_common.cuh"  // defines: floatX, CUDA_CHECK
#include "llmc/gpu/host_stream.cuh"   // defines: HostStream, HostArray, host_window_arrive, host_window_leave
#include "llmc/optim/step_state.cuh"  // defines: norm_partial_cuda

/* A micro-step by its place in its step. The first overwrites the gradients of matrices, the others add to them; in a ring all
 * overwrite. With several ranks the last one of a step sends, in a ring each one. With gradients in the host's memory the last
 * one squares the blocks' sums. */
typedef unsigned MicroKind;
enum { MICRO_FIRST = 1, MICRO_LAST = 2, MICRO_KINDS = 4 };

/* The gradient of a tensor, in fp32 or floatX. */
typedef struct {
    void* data;  // NULL: the tensor is frozen, nothing is computed
    bool fp32;
} Gradient;

typedef struct {
    ModelConfig config;
    ParamTable trained;  // the model's
    bool fp32;           // gradients of all matrices are fp32; otherwise floatX
    bool fp32_head;      // of the head alone
    bool in_ring;
    bool lends;        // activations lie here until the backward pass writes
    bool sent;         // to owners, block by block
    HostStream* host;  // the blocks' gradients lie in the host's memory; NULL: on the card

    void* all;  // without a ring: of the matrices, elements [first, end) of the trained tensors
    size_t first, end;
    size_t lent, lent_end;  // activations use bytes [lent, lent_end) of `all`; lent_end 0: none
    float* extra;           // (extra_size) in fp32: the norms' gradients; then, without a ring, the head's if fp32_head
    size_t extra_size;
    GradientRing ring;
    void* parts[GRADIENT_PARTS];

    char* home;  // (blocks) with `host`: elements [ring.first_block, ring.end) there; the ring then holds blocks alone

    Buckets buckets;  // of the trained tensors, for the norm
    double* squares;  // (buckets, NORM_BUCKET) at most: sums of squares of each bucket's gradients, one after the other
} Gradients;

enum { NORM_BUCKET = 264 };  // sums of squares of a bucket: two for each multiprocessor of an H100

enum { MOST_16BIT_SUMS = 64 };  // in bfloat16, 256 additions lose more than 1 %

/* Returns whether gradients of `sums` additions a step add up in fp32. `automatic` (--grad-dtype auto) keeps a gradient in fp32
 * above MOST_16BIT_SUMS, and adapters always, since they are small. */
static inline bool gradients_need_fp32(bool automatic, int64_t sums, bool adapters) {
    return sizeof(floatX) == 4 || (automatic && (sums > MOST_16BIT_SUMS || adapters));
}

static inline size_t gradients_bytes(bool fp32) { return fp32 ? sizeof(float) : sizeof(floatX); }

/* Returns the elements of the norms' gradients. The gap after a norm has a gradient as well: zero. */
static inline size_t norms_size(const Gradients* g) { return g->trained.vector_elements; }

/* Returns the bucket of the head, or of an embedding that is tied to it. */
static inline ArenaRange head_bucket(const Gradients* g) {
    if (g->config.tied) { return {0, g->trained.items[1].offset}; }
    const size_t first = param_offset(&g->trained, P_FINAL_NORM, -1);
    return {first, g->trained.elements - first};
}

/* Returns whether this tensor is the head, or an embedding that is tied to it. */
static inline bool is_head(const ModelConfig* c, ParamKind kind) {
    return kind == P_LM_HEAD || (c->tied && kind == P_EMBEDDING);
}

/* Finds the gradient of an element in the ring. */
static inline Gradient gradient_in_ring(const Gradients* g, size_t at) {
    size_t first = 0;
    const int part = gradient_part(&g->ring, at, &first);
    const bool fp32 = g->fp32 || (g->fp32_head && part == PART_ENDS && first == head_bucket(g).first);
    return {(char*)g->parts[part] + (at - first) * gradients_bytes(fp32), fp32};
}

/* Returns whether the gradient of an element lies in the host's memory. */
static inline bool gradient_on_host(const Gradients* g, size_t at) {
    return g->host && at >= g->ring.first_block && at < g->ring.end;
}

/* Returns the elements of the blocks, if their gradients lie in the host's memory. */
static inline size_t gradients_away(const Gradients* g) { return g->host ? g->ring.end - g->ring.first_block : 0; }

/* Finds the gradient of an element of the trained tensors that belongs to no norm; on the card, in its part of a ring. */
static inline Gradient gradient_of_element(const Gradients* g, size_t at) {
    if (g->in_ring || gradient_on_host(g, at)) { return gradient_in_ring(g, at); }
    if (at >= g->first && at < g->end) {
        const size_t away = at < g->ring.end ? 0 : gradients_away(g);
        return {(char*)g->all + (at - g->first - away) * gradients_bytes(g->fp32), g->fp32};
    }
    return {g->extra + norms_size(g) + (at - head_bucket(g).first), true};
}

/* Finds the gradient of a tensor; {NULL} if it is frozen. */
static inline Gradient gradient_of(const Gradients* g, ParamKind kind, int l) {
    const Param* p = param_at(&g->trained, kind, l);
    if (!p) { return {NULL, g->fp32}; }
    if (!param_specs[p->kind].matrix) { return {g->extra + p->vector_offset, true}; }
    return gradient_of_element(g, p->offset);
}

static inline void gradients_lay_out_ring(Gradients* g, Arena* a) {
    const size_t own = gradients_bytes(g->fp32), head = head_bucket(g).count * gradients_bytes(g->fp32 || g->fp32_head);
    g->ring = gradient_ring_of(&g->trained, g->config.num_layers, g->config.tied);
    g->parts[PART_ENDS] = take<char>(a, size_max(head, g->ring.first_block * own));
    g->parts[PART_LAST_NORM] = take<char>(a, g->config.tied ? (g->ring.elements - g->ring.end) * own : 0);
    for (int i = 0; i < GRADIENT_BLOCKS; i++) { g->parts[PART_BLOCK + i] = take<char>(a, g->ring.block * own); }
}

/* Lays out the ring of blocks whose gradients lie in the host's memory, and their place there. */
static inline void gradients_lay_out_host(Gradients* g, Arena* a, Arena* host) {
    const size_t own = gradients_bytes(g->fp32);
    if (!g->host) { return; }
    g->ring = gradient_ring_of(&g->trained, g->config.num_layers, g->config.tied);
    g->ring.turns = HOST_BLOCKS;
    g->host->beside = own;
    g->home = take<char>(host, gradients_away(g) * own);
    for (int i = 0; i < HOST_BLOCKS; i++) {
        g->parts[PART_BLOCK + i] = g->host->turns[i].data = take<char>(a, g->ring.block * own);
    }
}

/* Lays out the gradients. Without a ring, fp32_head moves the head's bucket from `all` to `extra`; it is the first bucket
 * (tied) or the last. host: takes what lies there */
static inline void gradients_lay_out(Gradients* g, Arena* a, Arena* host) {
    const bool moves = !g->in_ring && g->fp32_head && g->config.lora.rank == 0;
    const ArenaRange head = moves ? head_bucket(g) : ArenaRange{g->trained.elements, 0};
    g->first = moves && head.first == 0 ? head.count : 0;
    g->end = head.first > 0 ? head.first : g->trained.elements;
    g->extra_size = norms_size(g) + head.count;
    g->lent_end = 0;
    if (g->in_ring) {
        gradients_lay_out_ring(g, a);
    } else {
        gradients_lay_out_host(g, a, host);
        g->all = take<char>(a, (g->end - g->first - gradients_away(g)) * gradients_bytes(g->fp32));
    }
    g->extra = take<float>(a, g->extra_size);
    g->squares = take<double>(a, (size_t)g->buckets.count * NORM_BUCKET);
}

/* Finds memory for `bytes` of block l's activations, below its gradients and below *top, where the activations of later blocks
 * begin. Ask for the last block first, with *top = SIZE_MAX. Returns false if there is no room; otherwise lowers *top, and
 * *place hands out the memory. A tied embedding's gradient lends nothing, since the head writes it first. */
static inline bool gradients_lend(Gradients* g, int l, size_t bytes, size_t* top, Arena* place) {
    if (!g->lends) { return false; }
    const size_t one = gradients_bytes(g->fp32), own = (param_offset(&g->trained, P_INPUT_NORM, l) - g->first) * one;
    const size_t least = g->config.tied ? (param_offset(&g->trained, P_INPUT_NORM, 0) - g->first) * one : 0;
    const size_t end = size_min(own, *top);
    if (end < least + bytes) { return false; }
    *top = (end - bytes) / 256 * 256;  // take()'s unit
    *place = {(char*)g->all, *top};
    g->lent = *top;
    if (g->lent_end == 0) { g->lent_end = end; }
    return true;
}

/* Zeroes elements [from, to) of the trained tensors. */
static inline void gradients_zero_elements(const Gradients* g, size_t from, size_t to, cudaStream_t stream) {
    const Gradient at = gradient_of_element(g, from);
    if (to > from) { CUDA_CHECK(cudaMemsetAsync(at.data, 0, (to - from) * gradients_bytes(at.fp32), stream)); }
}

/* Returns whether a micro-step adds to the gradients of matrices. */
static inline bool gradients_add(const Gradients* g, MicroKind kind) { return !(kind & MICRO_FIRST) && !g->in_ring; }

/* Zeroes the norms' gradients in the first micro-step of a step: each adds to them. In the ring, zeroes the gaps beside the
 * head, where the embedding's gradient has lain. */
static inline void gradients_zero_ends(const Gradients* g, MicroKind kind, cudaStream_t stream) {
    const size_t norms = norms_size(g), V = (size_t)g->config.vocab_size * g->config.hidden_size;  // norms 0: frozen
    if (kind & MICRO_FIRST && norms > 0) { CUDA_CHECK(cudaMemsetAsync(g->extra, 0, norms * sizeof(float), stream)); }
    if (g->in_ring && !g->config.tied) {
        const size_t head = param_offset(&g->trained, P_LM_HEAD, -1);
        gradients_zero_elements(g, g->ring.end, head, stream);
        gradients_zero_elements(g, head + V, g->ring.elements, stream);
    }
}

enum { GAPS_OF_BLOCK = 16 };  // more than its tensors

/* Gaps between the matrices of a block, in units of 16 bits from its start on; blocks are `stride` units apart. */
typedef struct {
    ArenaRange items[GAPS_OF_BLOCK];
    int count;
    size_t stride;
} BlockGaps;

__global__ static void gradients_zero_gaps_kernel(uint16_t* gradients, BlockGaps gaps) {
    gradients += blockIdx.x * gaps.stride;
    for (int i = 0; i < gaps.count; i++) {
        for (size_t k = threadIdx.x; k < gaps.items[i].count; k += blockDim.x) { gradients[gaps.items[i].first + k] = 0; }
    }
}

/* Zeroes the gaps of blocks [from, to), and the places of norms among their matrices, where activations have lain. Those of the
 * embedding are zeroed with it, and the last block and the ends lend nothing. */
static inline void gradients_zero_gaps(const Gradients* g, int from, int to, cudaStream_t stream) {
    const GradientRing all = gradient_ring_of(&g->trained, g->config.num_layers, g->config.tied);
    const size_t one = gradients_bytes(g->fp32), end = g->first + ceil_div(g->lent_end, one);
    BlockGaps gaps = {{}, 0, all.block * one / 2};
    if (g->lent_end == 0 || end <= all.first_block) { return; }
    const size_t begin = size_max(g->first + g->lent / one, all.first_block) - all.first_block;
    const int first = std::max(from, (int)(begin / all.block));
    const int last = std::min(to, (int)ceil_div(end - all.first_block, all.block));
    for (const Param* p = &g->trained.items[1]; p->layer == 0; p++) {
        const size_t at = p->offset + (param_specs[p->kind].matrix ? param_size(p) : 0), next = p[1].offset;
        if (next > at) { gaps.items[gaps.count++] = {(at - all.first_block) * one / 2, (next - at) * one / 2}; }
    }
    if (first >= last) { return; }
    void* const data = gradient_of_element(g, all.first_block + (size_t)first * all.block).data;
    gradients_zero_gaps_kernel<<<(unsigned)(last - first), 256, 0, stream>>>((uint16_t*)data, gaps);
    CUDA_CHECK_LAUNCH("gradients_zero_gaps_kernel");
}

/* Zeroes the embedding's gradient where a micro-step does not add to an earlier one's. A tied one stays: the head has just
 * written it. */
static inline void gradients_zero_embedding(const Gradients* g, MicroKind kind, cudaStream_t stream) {
    const bool trained = g->config.lora.rank == 0 && !g->config.tied;
    if (trained && !gradients_add(g, kind)) {
        gradients_zero_elements(g, 0, param_offset(&g->trained, P_INPUT_NORM, 0), stream);
    }
}

/* Call just before the backward pass of a layer, as exchange_send_layer() after it. Zeroes the gradients to which that pass
 * adds. The head's backward pass comes before the final norm's (layer L). When the embedding's (-1) begins, no activation is
 * left. */
static inline void gradients_zero(const Gradients* g, int layer, MicroKind kind, cudaStream_t stream) {
    if (layer == g->config.num_layers) { gradients_zero_ends(g, kind, stream); }
    if (layer < 0 && !g->sent) { gradients_zero_gaps(g, 0, g->config.num_layers, stream); }
    if (layer < 0) { gradients_zero_embedding(g, kind, stream); }
}

// ---------------------------------------------------------------------------------------------------------------------
// norm

/* Queues the sums of squares of the matrices' gradients: of block `layer`, or (-1) of all layers whose gradients are not on the
 * host. Returns the number of sums of all layers. Neighbours of one size share a launch. */
static inline int gradients_square(const Gradients* g, int layer, cudaStream_t stream) {
    int count = 0;
    for (int i = 0, rows; i < g->buckets.count; i += rows) {
        const Bucket* b = &g->buckets.items[i];
        const Gradient at = gradient_of_element(g, b->first);
        const void* data = (layer < 0 ? !gradient_on_host(g, b->first) : b->layer == layer) ? at.data : NULL;
        double* to = g->squares + count;
        for (rows = 1; layer < 0 && i + rows < g->buckets.count && b[rows].count == b->count; rows++) {
            const char* next = (const char*)at.data + rows * b->count * gradients_bytes(at.fp32);
            if (gradient_of_element(g, b[rows].first).data != next) { break; }
        }
        count += at.fp32 ? norm_partial_cuda(to, (const float*)data, rows, b->count, NORM_BUCKET, stream)
                         : norm_partial_cuda(to, (const floatX*)data, rows, b->count, NORM_BUCKET, stream);
    }
    return count;
}

// ---------------------------------------------------------------------------------------------------------------------
// gradients in the host's memory

/* Returns where gradients lie in the host's memory, from element `at` of a block on; {NULL}: on the card. */
static inline HostArray gradients_home(const Gradients* g, size_t at) {
    const size_t own = gradients_bytes(g->fp32);
    if (!gradient_on_host(g, at)) { return {NULL, 0, false}; }
    return {g->home + (at - g->ring.first_block) * own, own, true};
}

/* Returns the bytes that leave the card in a micro-step, come back in the next one, and arrive again for the update. */
static inline double gradients_passing(const Gradients* g) { return (double)(gradients_away(g) * gradients_bytes(g->fp32)); }

/* Prints what passes in a micro-step, if anything does. */
static inline void gradients_print_price(const Gradients* g) {
    if (!g->host) { return; }
    printf("offload %.2f GB of gradients leave the card in each micro-step, and come back in the next\n",
           1e-9 * gradients_passing(g));
}

/* Call before the gradients of block l are written: they are the sums of earlier micro-steps then. Queues the arrival of the
 * next ones. Where the block is sent afterwards, zeroes its gaps, on which no activation is left. */
static inline void gradients_expect(Gradients* g, int l, MicroKind kind, cudaStream_t stream) {
    const int last = g->config.num_layers - 1, ahead = HOST_BLOCKS - 1;
    if (g->sent) { gradients_zero_gaps(g, l, l + 1, stream); }
    if (!g->host) { return; }
    for (int next = l == last ? l : l - ahead; next >= 0 && next >= l - ahead; next--) {
        HostArray arrays[HOST_ARRAYS] = {};
        void* parts[HOST_ARRAYS];
        if (!(kind & MICRO_FIRST)) { arrays[0] = gradients_home(g, g->ring.first_block + (size_t)next * g->ring.block); }
        host_window_arrive(g->host, &g->host->turns[next % g->ring.turns], arrays, 0, g->ring.block, parts,
                           "gradients from the host");
    }
    host_window_wait(g->host, &g->host->turns[l % g->ring.turns], stream, "wait: gradients");
}

/* Call after the backward pass of block l. */
static inline void gradients_leave(Gradients* g, int l, MicroKind kind, cudaStream_t stream) {
    HostArray arrays[HOST_ARRAYS] = {};
    if (!g->host) { return; }
    if (kind & MICRO_LAST) { gradients_square(g, l, stream); }
    arrays[0] = gradients_home(g, g->ring.first_block + (size_t)l * g->ring.block);
    arrays[0].read = false;
    host_window_leave(g->host, &g->host->turns[l % g->ring.turns], arrays, 0, g->ring.block, stream, "gradients to the host");
}

#endif
