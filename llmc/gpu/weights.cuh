/* weights.cuh -- a model's weights on the device and, element by element, what belongs to them: the exact ("master") weight and
 * the optimizer's m and v, which may lie in the host's memory (host_stream.cuh). Copies them to and from the host: pieces of a
 * tensor, as floats, through a staging buffer, in the order of the model's stream.
 */
#ifndef LLMC_WEIGHTS_CUH
#define LLMC_WEIGHTS_CUH

#include "llmc/optim/master.cuh"       // defines: master_set_cuda, master_get_cuda
#include "llmc/optim/optimizer.h"      // defines: MasterKind, SlotKind, slot_names, HeldState, held_here, held_place
#include "llmc/base/float16.h"         // defines: bf16_from_f32, f32_from_bf16
#include "llmc/base/utils.h"           // defines: die_usage
#include "llmc/dist/buckets.h"         // defines: Buckets, shard_local, shard_left
#include "llmc/files/tensor_stream.h"  // defines: StateSlot, MODEL_PIECE
#include "llmc/cuda/cuda_common.cuh"
#include "llmc/gpu/host_stream.cuh"  // defines: HostStream, HostArray, host_stream_pass, host_stream_lay_out

enum { WEIGHTS_STAGED = 4 };

typedef struct {
    floatX* params;
    floatX* trained;  // those with a master weight, m and v: params, or LoRA's adapters
    void* master;     // float or uint16_t, by master_kind
    void* m;          // float or bfloat16
    void* v;
    HostStream* host;  // master, m and v lie in the host's memory, and pass through the card; NULL: they lie on the card
    MasterKind master_kind;
    bool bf16_moments;
    HeldState held;  // lays out master, m and v
    Buckets shards;  // with several ranks, this rank holds them of its shards alone; otherwise all zero
    int rank;
    // ZeRO 3: `params` lacks the blocks, elements [blocks_first, blocks_end); `own` holds this rank's shards of them. With
    // --offload weights it holds the only rank's blocks, in the host's memory, where kernels reach them as well
    Buckets blocks;  // buckets of all weights; otherwise all zero
    size_t blocks_first, blocks_end;
    floatX* own;
    cudaStream_t stream;

    // pieces on their way between host and device, several at a time
    float* pinned[WEIGHTS_STAGED];   // (MODEL_PIECE) on the host
    float* staging[WEIGHTS_STAGED];  // (MODEL_PIECE) on the device
    cudaEvent_t staged[WEIGHTS_STAGED];
    uint64_t pieces;
} WeightArena;

/* Refuses master weights that this build does not have. */
static inline void master_check(MasterKind wanted) {
    if (IS_BF16 || wanted == MASTER_FP32) { return; }
    die_usage("--master %s this is a build for %s, wanted PRECISION=BF16",
              wanted == MASTER_SPLIT ? "split: a weight's upper half is its BF16 value;"
                                     : "none: rounded stochastically are BF16 weights;",
              PRECISION_NAME);
}

/* Returns the form of a run's master weights. A checkpoint may come from another build, whose flag means nothing here. */
static inline MasterKind master_kind_of(MasterKind wanted) {
    return IS_BF16 ? wanted : sizeof(floatX) == 4 ? MASTER_NONE : MASTER_FP32;
}

static inline size_t master_bytes(MasterKind kind) {
    return kind == MASTER_FP32 ? sizeof(float) : kind == MASTER_SPLIT ? sizeof(uint16_t) : 0;
}
static inline size_t moment_bytes(bool bf16) { return bf16 ? sizeof(uint16_t) : sizeof(float); }

/* Returns the elements of the table that this rank has whole: all, or with ZeRO 3 all but the blocks. */
static inline size_t weights_whole(const WeightArena* a, const ParamTable* t) {
    return t->elements - (a->blocks_end - a->blocks_first);
}

/* Lays out the buffers of pieces on their way between host and device. */
static inline void weights_lay_out_staging(WeightArena* a, Arena* device, Arena* pinned) {
    for (int i = 0; i < WEIGHTS_STAGED; i++) {
        a->staging[i] = take<float>(device, MODEL_PIECE);
        a->pinned[i] = take<float>(pinned, MODEL_PIECE);
    }
}

/* Returns the bytes of an element of SLOT_MASTER, SLOT_M or SLOT_V. */
static inline size_t state_width(const WeightArena* a, SlotKind kind) {
    return kind == SLOT_MASTER ? master_bytes(a->master_kind) : moment_bytes(a->bf16_moments);
}

/* Lays out master weights, m and v, and the windows through which they pass if they lie on the host. Weights on the host pass
 * beside them, except under `adapters`. */
static inline void weights_lay_out_state(WeightArena* a, bool adapters, Arena* master, Arena* m, Arena* v, Arena* windows) {
    const size_t* n = a->held.elements;
    if (a->master_kind != MASTER_NONE) { a->master = take<char>(master, n[SLOT_MASTER] * state_width(a, SLOT_MASTER)); }
    a->m = take<char>(m, n[SLOT_M] * state_width(a, SLOT_M));
    a->v = take<char>(v, n[SLOT_V] * state_width(a, SLOT_V));
    const size_t passing = a->blocks.ranks == 1 && !adapters ? sizeof(floatX) : 0;
    const size_t bytes = state_width(a, SLOT_MASTER) + 2 * state_width(a, SLOT_M) + passing;
    if (a->host) { host_stream_lay_out(a->host, n[SLOT_M], bytes, windows); }
}

/* Makes the events; the model lays out the buffers. */
static inline void weights_open(WeightArena* a, cudaStream_t stream) {
    a->stream = stream;
    for (cudaEvent_t& event : a->staged) { event = event_new(); }
    host_stream_open(a->host);
}

static inline void weights_close(WeightArena* a) {
    host_stream_close(a->host);
    for (int i = 0; i < WEIGHTS_STAGED; i++) { CUDA_CHECK(cudaEventDestroy(a->staged[i])); }
}

/* Returns the elements from `at` on that are on one rank. */
static inline size_t state_run(const WeightArena* a, size_t at) {
    return a->shards.ranks <= 1 ? SIZE_MAX : shard_left(&a->shards, at);
}

/* Returns where the master weight, m or v of element `at` lies. It is fp32, or has 16 bits. NULL: it has none here. */
static inline char* state_at(const WeightArena* a, SlotKind kind, size_t at) {
    void* base = kind == SLOT_MASTER ? a->master : kind == SLOT_M ? a->m : a->v;
    const size_t place = base && held_here(&a->held, at) ? held_place(&a->held, kind, at) : SIZE_MAX;
    return place == SIZE_MAX ? NULL : (char*)base + place * state_width(a, kind);
}

/* The state of elements [first, first + count) while kernels update it. NULL: it has none, or they were not asked for. */
typedef struct {
    size_t first, count;
    void *master, *m, *v;
    const void* grads;  // NULL: they are not on the host
    floatX* weights;    // NULL: they are not, either
} StatePiece;

/* Returns whether a weight lies in the host's memory. */
static inline bool weight_on_host(const WeightArena* a, size_t at) {
    return a->blocks.ranks == 1 && at >= a->blocks_first && at < a->blocks_end;
}

/* Calls use(piece), which queues kernels on `stream`, for the elements [first, first + count) of one held range: once, or for
 * each piece that passes through the card.   slots: bits of the SlotKinds that the kernels use
 * grads: on the host, or {NULL} */
template <typename Use>
static void state_pieces(const WeightArena* a, unsigned slots, HostArray grads, ArenaRange elements, cudaStream_t stream,
                         const Use& use) {
    const size_t first = elements.first;
    HostArray arrays[HOST_ARRAYS] = {{NULL, 0, false}, {NULL, 0, false}, {NULL, 0, false}, grads, {NULL, 0, false}};
    bool any = grads.data;
    if (slots >> SLOT_WEIGHTS & 1 && a->trained == a->params && weight_on_host(a, first)) {
        arrays[4] = {(char*)(a->own + (first - a->blocks_first)), sizeof(floatX), false};
        any = true;
    }
    for (const SlotKind kind : {SLOT_MASTER, SLOT_M, SLOT_V}) {
        char* data = slots >> kind & 1 ? state_at(a, kind, first) : NULL;
        arrays[kind - SLOT_MASTER] = {data, state_width(a, kind), false};
        any = any || data;
    }
    if (!a->host || !any) {
        use(StatePiece{first, elements.count, arrays[0].data, arrays[1].data, arrays[2].data, NULL, NULL});
        return;
    }
    host_stream_pass(a->host, arrays, elements.count, stream, [&](size_t at, size_t n, void* const* parts) {
        use(StatePiece{first + at, n, parts[0], parts[1], parts[2], parts[3], (floatX*)parts[4]});
    });
}

/* Returns where the weight of element `at` lies, and in *run how many elements follow it there. NULL: another rank has them. */
static inline floatX* weight_at(const WeightArena* a, size_t at, size_t* run) {
    size_t local = 0;
    *run = SIZE_MAX;
    if (a->blocks.ranks == 0) { return a->params + at; }
    if (at >= a->blocks_end) { return a->params + (at - (a->blocks_end - a->blocks_first)); }
    *run = at < a->blocks_first ? a->blocks_first - at : shard_left(&a->blocks, at);
    if (at < a->blocks_first) { return a->params + at; }
    const bool here = shard_local(&a->blocks, a->rank, at, &local);
    return here ? a->own + (local - a->blocks_first / (size_t)a->blocks.ranks) : NULL;
}

/* Returns where a weight that this rank trains lies. */
static inline floatX* trained_at(const WeightArena* a, size_t at) {
    size_t run = 0;
    return a->trained == a->params ? weight_at(a, at, &run) : a->trained + at;
}

/* Measures the link to the host by the first pieces of the state, and prints what it adds to a step of `step` seconds, with
 * `more` bytes that arrive beside it. A forward pass of `forward` seconds hides as much; 0: it waits for all pieces. All ranks
 * measure, the `first` one prints. */
static inline void weights_print_price(const WeightArena* a, double more, double forward, double step, bool first) {
    const ArenaRange range = a->held.ranges.items[0];
    const size_t n = size_min(range.count, 32 * a->host->piece), *all = a->held.elements;
    const unsigned slots = a->held.items[0].rule->slots;
    const bool weights = a->blocks.ranks == 1 && a->trained == a->params;  // pass as well
    double passed = 0, bytes = more + (weights ? (double)((a->blocks_end - a->blocks_first) * sizeof(floatX)) : 0);
    for (const SlotKind kind : {SLOT_MASTER, SLOT_M, SLOT_V}) {
        passed += slots >> kind & 1 ? (double)(n * state_width(a, kind)) : 0;
        bytes += (double)(all[kind] * state_width(a, kind));
    }
    const double begin = now_seconds();
    host_stream_begin(a->host);
    state_pieces(a, slots, {NULL, 0, false}, {range.first, n}, a->stream, [](StatePiece) {});
    host_stream_finish(a->host);
    const double rate = passed / (now_seconds() - begin), pass = bytes / rate, hidden = fmin(pass, forward);
    char of_it[32] = "";
    if (hidden > 0) { snprintf(of_it, sizeof of_it, ", hidden %.2g", hidden); }
    if (!first) { return; }
    printf("offload moves %.2f GB a step, each way at %.1f GB/s: about %.3g s of %.3g s%s\n", 1e-9 * bytes, 1e-9 * rate, pass,
           step + pass - hidden, of_it);
}

/* Sets n weights from element `at` of `weights`, and their master weights if these are trained. Returns when `src` is free
 * again, before the device has them all. */
static inline void store_piece(WeightArena* a, floatX* weights, size_t at, size_t n, const float* src) {
    const int slot = (int)(a->pieces++ % WEIGHTS_STAGED);
    CUDA_CHECK(cudaEventSynchronize(a->staged[slot]));  // of WEIGHTS_STAGED pieces ago
    memcpy(a->pinned[slot], src, n * sizeof(float));
    CUDA_CHECK(cudaMemcpyAsync(a->staging[slot], a->pinned[slot], n * sizeof(float), cudaMemcpyHostToDevice, a->stream));
    for (size_t i = 0, run; i < n; i += run) {
        void* master = weights == a->trained ? state_at(a, SLOT_MASTER, at + i) : NULL;
        void* on_card = master && a->host ? a->staging[(slot + 1) % WEIGHTS_STAGED] : master;
        floatX* to = weights == a->params ? weight_at(a, at + i, &run) : weights + at + i;
        if (weights != a->params) { run = n; }
        run = size_min(run, size_min(weights == a->trained ? state_run(a, at + i) : n, n - i));
        if (!to) { continue; }  // of another rank
        master_set_cuda(to, on_card, master ? a->master_kind : MASTER_NONE, a->staging[slot] + i, run, a->stream);
        if (on_card != master) {
            const size_t bytes = run * state_width(a, SLOT_MASTER);
            CUDA_CHECK(cudaMemcpyAsync(master, on_card, bytes, cudaMemcpyDeviceToHost, a->stream));
        }
    }
    CUDA_CHECK(cudaEventRecord(a->staged[slot], a->stream));
}

/* dst (n) = what lies in the first staging buffer. */
static inline void copy_out_staged(const WeightArena* a, float* dst, size_t n) {
    copy_out(a->pinned[0], a->staging[0], n * sizeof(float), a->stream);
    memcpy(dst, a->pinned[0], n * sizeof(float));
}

/* Writes elements [at, at + n), which this rank has, to `to` on the device: the exact weights, which the optimizer updates, or
 * the weights that the model computes with. Uses the second staging buffer. */
static inline void weights_get(const WeightArena* a, bool exact, size_t at, size_t n, float* to) {
    size_t run = 0;
    void* master = exact ? state_at(a, SLOT_MASTER, at) : NULL;
    const floatX* from = exact ? trained_at(a, at) : weight_at(a, at, &run);
    if (master && a->host) {
        CUDA_CHECK(cudaMemcpyAsync(a->staging[1], master, n * state_width(a, SLOT_MASTER), cudaMemcpyHostToDevice, a->stream));
        master = a->staging[1];
    }
    master_get_cuda(to, from, master, master ? a->master_kind : MASTER_NONE, n, a->stream);
}

// the sinks and sources of the slots. Where no rank has all weights, a checkpoint takes the source of sharded_blocks.cuh

template <SlotKind KIND>
static bool store_weights(void* arena, const Param* p, size_t first, size_t n, const float* src, Error*) {
    WeightArena* a = (WeightArena*)arena;
    store_piece(a, KIND == SLOT_MASTER ? a->trained : a->params, p->offset + first, n, src);
    return true;
}

template <SlotKind KIND>
static bool fetch_weights(void* arena, const Param* p, size_t first, size_t n, float* dst, Error*) {
    const WeightArena* a = (const WeightArena*)arena;
    weights_get(a, KIND == SLOT_MASTER, p->offset + first, n, a->staging[0]);
    copy_out_staged(a, dst, n);
    return true;
}

/* Copies m or v between the host and where it lies, and waits. */
static inline void moment_copy(const WeightArena* a, void* to, const void* from, size_t n, cudaMemcpyKind kind) {
    const size_t bytes = n * state_width(a, SLOT_M);
    if (a->host) {
        memcpy(to, from, bytes);
    } else {
        CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, kind, a->stream));
        CUDA_CHECK(cudaStreamSynchronize(a->stream));
    }
}

template <SlotKind KIND>
static bool store_moment(void* arena, const Param* p, size_t first, size_t n, const float* src, Error*) {
    const WeightArena* a = (const WeightArena*)arena;
    uint16_t* bits = (uint16_t*)xmalloc(n * sizeof(uint16_t));
    for (size_t i = 0; a->bf16_moments && i < n; i++) { bits[i] = bf16_from_f32(src[i]); }
    moment_copy(a, state_at(a, KIND, p->offset + first), a->bf16_moments ? (const void*)bits : src, n, cudaMemcpyHostToDevice);
    free(bits);
    return true;
}

template <SlotKind KIND>
static bool fetch_moment(void* arena, const Param* p, size_t first, size_t n, float* dst, Error*) {
    const WeightArena* a = (const WeightArena*)arena;
    uint16_t* bits = (uint16_t*)xmalloc(n * sizeof(uint16_t));
    moment_copy(a, a->bf16_moments ? (void*)bits : dst, state_at(a, KIND, p->offset + first), n, cudaMemcpyDeviceToHost);
    for (size_t i = 0; a->bf16_moments && i < n; i++) { dst[i] = f32_from_bf16(bits[i]); }
    free(bits);
    return true;
}

static inline StateSlot weights_slot(WeightArena* a, SlotKind kind) {
    const SafeDtype moment = a->bf16_moments ? SAFE_BF16 : SAFE_F32;
    const SafeDtype exact = IS_BF16 && a->master_kind == MASTER_NONE ? SAFE_BF16 : SAFE_F32;
    switch (kind) {
        case SLOT_M: return {slot_names[kind], moment, fetch_moment<SLOT_M>, store_moment<SLOT_M>, a, NULL};
        case SLOT_V: return {slot_names[kind], moment, fetch_moment<SLOT_V>, store_moment<SLOT_V>, a, NULL};
        case SLOT_MASTER: return {slot_names[kind], exact, fetch_weights<SLOT_MASTER>, store_weights<SLOT_MASTER>, a, NULL};
        default: return {slot_names[kind], SAFE_F32, fetch_weights<SLOT_WEIGHTS>, store_weights<SLOT_WEIGHTS>, a, NULL};
    }
}

#endif
