/* gradients.cuh -- where the gradients of a model lie on the device.
 *
 * Gradients of matrices have one type, though the head's may be fp32. Gradients of norms, and of any tensor that is no matrix,
 * are fp32 and lie apart, as the table's arena of vectors. One GPU, and ZeRO 1, hold all of them, laid out as the trained
 * tensors. In ZeRO 2 and 3 the gradients of matrices lie in a ring (dist/zero.h), which every micro-step overwrites. Before
 * that, each rank has sent them to their owners, who add them up.
 *
 * One GPU with one micro-step a step lends this memory to activations. The backward pass goes from the last block to the first:
 * when it writes the gradients of block l, it has read the activations of all later blocks. So activations of block l may lie
 * anywhere below its own gradients. With more micro-steps, the gradients of earlier ones need this memory. With several GPUs,
 * gradients may still be on their way from it.
 *
 *   the gradients   | embedding  | block 0 | block 1 | block 2 | block 3 | norm, head |
 *   activations         |    of 1    |    of 2    |    of 3    |  (block 0 has its own memory)
 *
 * Gaps between tensors, and the places of norms among the matrices, are zero when the gradients are summed or sent. They begin
 * as zero and stay so, unless activations have lain there: then they are zeroed after the backward pass. In the ring head and
 * embedding take turns in one place, where the gaps are zeroed each time.
 */
#ifndef LLMC_GRADIENTS_CUH
#define LLMC_GRADIENTS_CUH

#include "llmc/config.h"              // defines: ModelConfig, ParamTable, param_at, param_offset
#include "llmc/dist/zero.h"           // defines: GradientRing, gradient_part
#include "llmc/cuda/arena.cuh"        // defines: Arena, take
#include "llmc/cuda/cuda_common.cuh"  // defines: floatX, CUDA_CHECK

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
    bool lends;  // activations lie here until the backward pass writes

    void* all;  // without a ring: of the matrices, elements [first, end) of the trained tensors
    size_t first, end;
    float* apart;  // (apart_size) the norms' gradients; then, without a ring, the head's if fp32_head
    size_t apart_size;
    GradientRing ring;
    void* parts[GRADIENT_PARTS];
} Gradients;

enum { MOST_16BIT_SUMS = 64 };  // in bfloat16, 256 additions lose more than 1 %

/* Returns whether gradients of `sums` additions a step add up in fp32. `automatic` (--grad-dtype auto) keeps a gradient in fp32
 * above MOST_16BIT_SUMS, and adapters always, since they are small. */
static inline bool gradients_need_fp32(bool automatic, int64_t sums, bool adapters) {
    return sizeof(floatX) == 4 || (automatic && (sums > MOST_16BIT_SUMS || adapters));
}

static inline size_t gradients_bytes(bool fp32) { return fp32 ? sizeof(float) : sizeof(floatX); }

/* Returns the elements of the norms' gradients. The gap after a norm has a gradient as well: zero. */
static inline size_t norms_size(const Gradients* g) { return g->trained.vector_elements; }

/* Returns the elements of the bucket of the head, or of an embedding that is tied to it, and sets *first to its first
 * element. */
static inline size_t head_bucket(const Gradients* g, size_t* first) {
    *first = g->config.tied ? 0 : param_offset(&g->trained, P_FINAL_NORM, -1);
    return (g->config.tied ? g->trained.items[1].offset : g->trained.elements) - *first;
}

/* Returns whether this tensor is the head, or an embedding that is tied to it. */
static inline bool is_head(const ModelConfig* c, ParamKind kind) {
    return kind == P_LM_HEAD || (c->tied && kind == P_EMBEDDING);
}

/* Finds the gradient of an element in the ring. */
static inline Gradient gradient_in_ring(const Gradients* g, size_t at) {
    size_t first = 0, head = 0;
    const int part = gradient_part(&g->ring, at, &first);
    head_bucket(g, &head);
    const bool fp32 = g->fp32 || (g->fp32_head && part == PART_ENDS && first == head);
    return {(char*)g->parts[part] + (at - first) * gradients_bytes(fp32), fp32};
}

/* Finds the gradient of an element of the trained tensors that belongs to no norm. */
static inline Gradient gradient_of_element(const Gradients* g, size_t at) {
    if (g->in_ring) { return gradient_in_ring(g, at); }
    if (at >= g->first && at < g->end) { return {(char*)g->all + (at - g->first) * gradients_bytes(g->fp32), g->fp32}; }
    size_t first = 0;
    head_bucket(g, &first);
    return {g->apart + norms_size(g) + (at - first), true};
}

/* Finds the gradient of a tensor; {NULL} if it is frozen. */
static inline Gradient gradient_of(const Gradients* g, ParamKind kind, int l) {
    const Param* p = param_at(&g->trained, kind, l);
    if (!p) { return {NULL, g->fp32}; }
    if (!param_specs[p->kind].matrix) { return {g->apart + p->vector_offset, true}; }
    return gradient_of_element(g, p->offset);
}

/* Lays out the gradients. With fp32_head, the head's bucket moves from `all` to `apart`; it is the first bucket (tied) or the
 * last. */
static inline void gradients_lay_out_all(Gradients* g, Arena* a) {
    const bool head_apart = g->fp32_head && g->config.lora.rank == 0;
    size_t first = 0;
    const size_t head = head_apart ? head_bucket(g, &first) : 0;
    g->first = head_apart && first == 0 ? head : 0;
    g->end = head_apart && first > 0 ? first : g->trained.elements;
    g->apart_size = norms_size(g) + head;
    g->all = take<char>(a, (g->end - g->first) * gradients_bytes(g->fp32));
    g->apart = take<float>(a, g->apart_size);
}

/* Does the same for the ring. */
static inline void gradients_lay_out_ring(Gradients* g, Arena* a) {
    size_t first = 0;
    const size_t head = head_bucket(g, &first) * gradients_bytes(g->fp32 || g->fp32_head), own = gradients_bytes(g->fp32);
    g->ring = gradient_ring_of(&g->trained, g->config.num_layers, g->config.tied);
    g->parts[PART_ENDS] = take<char>(a, size_max(head, g->ring.first_block * own));
    g->parts[PART_LAST_NORM] = take<char>(a, g->config.tied ? (g->ring.elements - g->ring.end) * own : 0);
    for (int i = 0; i < GRADIENT_BLOCKS; i++) { g->parts[PART_BLOCK + i] = take<char>(a, g->ring.block * own); }
    g->apart_size = norms_size(g);
    g->apart = take<float>(a, g->apart_size);
}

static inline void gradients_lay_out(Gradients* g, Arena* a) {
    if (g->in_ring) {
        gradients_lay_out_ring(g, a);
    } else {
        gradients_lay_out_all(g, a);
    }
}

/* Finds memory for `bytes` of block l's activations, below its gradients and below *top, where the activations of later blocks
 * begin. Ask for the last block first, with *top = SIZE_MAX. Returns false if there is no room; otherwise lowers *top, and
 * *place hands out the memory. A tied embedding's gradient lends nothing, since the head writes it first. */
static inline bool gradients_lend(const Gradients* g, int l, size_t bytes, size_t* top, Arena* place) {
    if (!g->lends) { return false; }
    const size_t one = gradients_bytes(g->fp32), own = (param_offset(&g->trained, P_INPUT_NORM, l) - g->first) * one;
    const size_t least = g->config.tied ? (param_offset(&g->trained, P_INPUT_NORM, 0) - g->first) * one : 0;
    const size_t end = size_min(own, *top);
    if (end < least + bytes) { return false; }
    *top = (end - bytes) / 256 * 256;  // take()'s unit
    *place = {(char*)g->all, *top};
    return true;
}

/* Zeroes elements [from, to) of the trained tensors. */
static inline void gradients_zero_elements(const Gradients* g, size_t from, size_t to, cudaStream_t stream) {
    const Gradient at = gradient_of_element(g, from);
    if (to > from) { CUDA_CHECK(cudaMemsetAsync(at.data, 0, (to - from) * gradients_bytes(at.fp32), stream)); }
}

/* Call between the backward pass of the head and the backward pass of the blocks. In the `first` micro-step, zeroes the norms'
 * gradients, to which each micro-step adds. In the ring, zeroes the gaps beside the head. */
static inline void gradients_zero(const Gradients* g, bool first, cudaStream_t stream) {
    const size_t norms = norms_size(g), V = (size_t)g->config.vocab_size * g->config.hidden_size;  // norms 0: frozen
    if (first && norms > 0) { CUDA_CHECK(cudaMemsetAsync(g->apart, 0, norms * sizeof(float), stream)); }
    if (g->in_ring && !g->config.tied) {
        const size_t head = param_offset(&g->trained, P_LM_HEAD, -1);
        gradients_zero_elements(g, g->ring.end, head, stream);
        gradients_zero_elements(g, head + V, g->ring.elements, stream);
    }
}

/* Call before the backward pass of the embedding, which adds to its gradient. Zeroes it in the `first` micro-step, in the ring
 * in each, but not if it is tied: then the head has just written it. */
static inline void gradients_zero_embedding(const Gradients* g, bool first, cudaStream_t stream) {
    const bool trained = g->config.lora.rank == 0 && !g->config.tied;
    if (trained && (first || g->in_ring)) { gradients_zero_elements(g, 0, param_offset(&g->trained, P_INPUT_NORM, 0), stream); }
}

/* Call after the backward pass. Zeroes the gaps, and the places of norms among the matrices, where activations have lain. */
static inline void gradients_zero_gaps(const Gradients* g, cudaStream_t stream) {
    for (int i = 0; g->lends && i < g->trained.count; i++) {
        const Param* p = &g->trained.items[i];
        const size_t next = i + 1 < g->trained.count ? p[1].offset : g->trained.elements;
        if (p->offset < g->first || p->offset >= g->end) { continue; }  // the head's, apart
        gradients_zero_elements(g, p->offset + (param_specs[p->kind].matrix ? param_size(p) : 0), next, stream);
    }
}

#endif
