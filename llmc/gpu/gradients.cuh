/* gradients.cuh -- where the gradients of a model lie on the device.
 *
 * Gradients of matrices have one type, though the head's may be fp32. Gradients of norms, and of any tensor that is no matrix,
 * are fp32 and lie apart, as the table's arena of vectors. One GPU, and ZeRO 1, hold all of them, laid out as the trained
 * tensors. In ZeRO 2 and 3 the gradients of matrices lie in a ring (dist/zero.h), which every micro-step overwrites. Before
 * that, each rank has sent them to their owners, who add them up.
 *
 * Gaps between the tensors of a bucket stay zero, since they are sent along. In the ring head and embedding take turns in one
 * place, where the gaps are zeroed each time.
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
static inline size_t norm_rows_size(const Gradients* g) { return g->trained.vector_elements; }

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
    return {g->apart + norm_rows_size(g) + (at - first), true};
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
    g->apart_size = norm_rows_size(g) + head;
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
    g->apart_size = norm_rows_size(g);
    g->apart = take<float>(a, g->apart_size);
}

static inline void gradients_lay_out(Gradients* g, Arena* a) {
    if (g->in_ring) {
        gradients_lay_out_ring(g, a);
    } else {
        gradients_lay_out_all(g, a);
    }
}

/* Zeroes elements [from, to) of the trained tensors. */
static inline void gradients_zero_elements(const Gradients* g, size_t from, size_t to, cudaStream_t stream) {
    const Gradient at = gradient_of_element(g, from);
    if (to > from) { CUDA_CHECK(cudaMemsetAsync(at.data, 0, (to - from) * gradients_bytes(at.fp32), stream)); }
}

/* Call between the backward pass of the head and the backward pass of the blocks. Zeroes what a micro-step accumulates into:
 * in the `first` micro-step the gradients of the norms and of the embedding. It leaves the embedding's gradient alone in two
 * cases: if it is tied, because the head has just written it, and if it lies in the ring, because gradients_zero_embedding()
 * zeroes it later. In the ring, zeroes the gaps beside the head. */
static inline void gradients_zero(const Gradients* g, bool first, cudaStream_t stream) {
    const ModelConfig* c = &g->config;
    const size_t norms = norm_rows_size(g), V = (size_t)c->vocab_size * c->hidden_size;  // norms 0: frozen
    if (first && norms > 0) { CUDA_CHECK(cudaMemsetAsync(g->apart, 0, norms * sizeof(float), stream)); }
    if (g->in_ring && !c->tied) {
        const size_t head = param_offset(&g->trained, P_LM_HEAD, -1);
        gradients_zero_elements(g, g->ring.end, head, stream);
        gradients_zero_elements(g, head + V, g->ring.elements, stream);
    }
    if (!g->in_ring && first && !c->tied && c->lora.rank == 0) { gradients_zero_elements(g, 0, V, stream); }
}

/* Zeroes the embedding's bucket in the ring, before its gradient is computed: the place held the head's gradient until that
 * was sent. */
static inline void gradients_zero_embedding(const Gradients* g, cudaStream_t stream) {
    if (g->in_ring && !g->config.tied) { gradients_zero_elements(g, 0, g->ring.first_block, stream); }
}

#endif
