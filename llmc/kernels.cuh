/* kernels.cuh -- which kernel computes which operation on which card. Every operation that has several kernels has rows in the
 * table below, the preferred kernel first; its launcher takes the first row whose condition holds. --profile prints the rows
 * that a run takes.
 *
 * A condition reads what was compiled into the program and loaded by the card, the sizes of the operation, and the card's
 * multiprocessors, shared memory and L2 cache. It never reads the card's name or compute capability: a new card may also have
 * loaded PTX for sm_75, and then it has the kernels of a T4. So sizes, flags and the card decide alone, and every step of a run
 * computes, and recomputes, the same way.
 *
 * Not here: cuBLASLt's algorithms (matmul.cuh), the tiles that attention_mma.cuh takes by the room of a multiprocessor, and
 * whether a kernel reads vectors or single elements. The last two change no bit.
 */
#ifndef LLMC_KERNELS_CUH
#define LLMC_KERNELS_CUH

#include "llmc/attention_common.cuh"  // defines: attention_launch_resident
#include "llmc/attention_walk.h"      // defines: walk_order, walk_time, walk_time_of_two_kernels
#include "llmc/config.h"              // defines: AttentionShape
#include "llmc/cuda/cuda_common.cuh"  // defines: device_attribute, compiled_arch
#include "llmc/cuda/warpgroups.cuh"   // defines: has_wgmma, wgmma_probe_kernel

/* What the choices read about the card. */
typedef struct {
    bool wgmma;      // it loaded code for sm_90a, and the build has kernels of 16 bits
    bool async;      // it loaded code for sm_80 or newer
    bool together;   // it starts the blocks of a grid together, if it has wgmma
    int processors;  // multiprocessors
    size_t shared;   // bytes of shared memory that a block may have
    size_t l2;       // bytes of the L2 cache
} Card;

__global__ static void whole_processor_kernel(int* none) {
    if (none) { *none = 0; }  // the emulated card's sanitizer sees kernels that write
}

/* Asks the driver whether it starts a block on each multiprocessor together. It may refuse that to a process with a part of the
 * card: a share under MPS, or a green context. */
static inline bool card_starts_together(void) {
    const unsigned processors = (unsigned)device_attribute(cudaDevAttrMultiProcessorCount);
    cudaStream_t apart;  // others may be captured
    CUDA_CHECK(cudaStreamCreateWithFlags(&apart, cudaStreamNonBlocking));
    const cudaError_t status = attention_launch_resident(whole_processor_kernel, dim3(processors), 32,
                                                         (int)shared_limit(whole_processor_kernel), apart, (int*)NULL);
    cudaGetLastError();  // a refused launch leaves its error there, too
    CUDA_CHECK(cudaStreamDestroy(apart));
    return status == cudaSuccess;
}

/* Returns the current device; a process uses one. */
static inline const Card* this_card(void) {
    static const Card c = {sizeof(floatX) == 2 && has_wgmma(),
                           compiled_arch(wgmma_probe_kernel) >= 80,
                           sizeof(floatX) == 2 && has_wgmma() && card_starts_together(),
                           device_attribute(cudaDevAttrMultiProcessorCount),
                           (size_t)device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
                           (size_t)device_attribute(cudaDevAttrL2CacheSize)};
    return &c;
}

typedef enum {
    CHOOSE_ATTENTION,
    CHOOSE_ATTENTION_BACKWARD,
    CHOOSE_GATE_UP,    // the product of gate and up, and SwiGLU
    CHOOSE_DOWN_DX,    // dx of down, and SwiGLU's gradient
    CHOOSE_QKV,        // the product of q, k and v, and RoPE
    CHOOSE_SYMMETRIC,  // x x^T, of `width` rows
    CHOOSE_CROSSENTROPY
} KernelChoice;

/* The sizes of an operation, as far as its rows read them. */
typedef struct {
    AttentionShape attention;  // of attention and of RoPE
    bool documents;            // rows are divided
    bool apart;                // 8 bits, adapters or an exchange come between a product and what follows it
    size_t rows, width, sum;   // of a product: sums of rows x width over `sum`; width: of SwiGLU's output, of a row of logits
} KernelSizes;

// ---------------------------------------------------------------------------------------------------------------------
// attention

/* Tests and benchmarks choose a kernel, the program uses AUTO. */
typedef enum {
    ATTENTION_AUTO,
    ATTENTION_PLAIN,
    ATTENTION_MMA,
    ATTENTION_WGMMA,
    ATTENTION_WALK,  // differs from WGMMA in the backward pass alone
    NUM_ATTENTION_KERNELS
} AttentionKernel;

static inline bool attention_tensor_cores(int HD) { return sizeof(floatX) == 2 && (HD == 64 || HD == 128); }

static inline KernelSizes attention_sizes(AttentionShape shape, bool documents) {
    KernelSizes s = {};
    s.attention = shape, s.documents = documents;
    return s;
}

// tokens of a row: shorter rows have no room for the sums; longer rows were not tried
constexpr int WALK_LEAST_TOKENS = 1024, WALK_MOST_TOKENS = 1 << 22;

/* Returns whether the backward pass of such rows may be one walk: then its scratch has room for the sums. */
static inline bool attention_may_walk(int T, int HD) {
    return attention_tensor_cores(HD) && T >= WALK_LEAST_TOKENS && T <= WALK_MOST_TOKENS;
}

// the time of a walk's product, in products of the two kernels: fitted to rows of 1024 to 32768 tokens on an H100 and an H200.
// At head_dim 128 the sums of all heads in progress take 67 MB, which an L2 cache of 60 MiB holds better than one of 50
constexpr double WALK_PRODUCT_64 = 1.13, WALK_PRODUCT_128 = 1.15, WALK_PRODUCT_128_SMALL_L2 = 1.27;

/* Whether a walk takes less time than two kernels. It has fewer pieces of work, so it may leave more of the card idle. */
static inline bool attention_walks(const Card* c, const KernelSizes* s) {
    const AttentionShape a = s->attention;
    if (!c->wgmma || !c->together || s->documents || !attention_may_walk(a.T, a.HD)) { return false; }
    const WalkOrder o = walk_order(a.B, a.NKV, a.T, c->processors);
    const double of_128 = c->l2 < SMALL_L2 ? WALK_PRODUCT_128_SMALL_L2 : WALK_PRODUCT_128;
    return (a.HD == 64 ? WALK_PRODUCT_64 : of_128) * walk_time(o) < walk_time_of_two_kernels(o, a.NH / a.NKV, c->processors);
}

// ---------------------------------------------------------------------------------------------------------------------
// products: our own kernel also computes the layer that follows

typedef enum { PRODUCT_APART, PRODUCT_JOINED, PRODUCT_JOINED_TURNS, PRODUCT_HALF } ProductKernel;

/* Whether the sums are whole tiles, enough for all multiprocessors, and nothing comes between. */
static inline bool product_joins(const Card* c, const KernelSizes* s) {
    return c->wgmma && !s->apart && s->rows % (128 * CLUSTER_BLOCKS) == 0 && s->width % 256 == 0 && s->sum % 64 == 0 &&
           s->rows / 128 * (s->width / 256) >= (size_t)c->processors;
}

constexpr size_t TURNS_MOST_SUM_SMALL_L2 = 1024;  // longer sums are faster by rows there (measured: 1280 to 4096)

/* Whether the consumers of SwiGLU's product take tiles in turns. Then they read 1.5 times as many bytes of the factors from
 * the L2 cache, and one writes while the other multiplies. With an H100's cache the reads cost more than this hides, unless
 * the sums are short. With an H200's they never did. */
static inline bool product_takes_turns(const Card* c, const KernelSizes* s) {
    return product_joins(c, s) && (c->l2 >= SMALL_L2 || s->sum <= TURNS_MOST_SUM_SMALL_L2);
}

// ---------------------------------------------------------------------------------------------------------------------
// cross-entropy with gradient: where a block keeps its row

typedef enum { CE_HELD, CE_ROW, CE_LOOPED, NUM_CE_WAYS } CrossentropyWay;

enum {
    CE_BLOCK_PACKS = 4096,  // held: vectors of a row that fit a block's registers
    CE_VIA = 6,             // row: vectors of a thread that pass through shared memory
    CE_DIRECT = 2,          // vectors that go straight into registers
    CE_STAY = 8,            // vectors that stay in shared memory
    CE_ROW_THREADS = 1024,  //   threads of a block, at most
    CE_ROW_STATIC = 1024,   //   bytes of shared memory besides vectors, at most
};

static inline size_t crossentropy_packs(size_t V) { return ceil_div(V, VECTOR<floatX>); }
static inline size_t crossentropy_row_threads(size_t V) {
    return round_up(ceil_div(crossentropy_packs(V), CE_VIA + CE_DIRECT + CE_STAY), 32);
}
static inline size_t crossentropy_row_shared(size_t V) { return (CE_VIA + CE_STAY) * crossentropy_row_threads(V) * 16; }

// ---------------------------------------------------------------------------------------------------------------------
// the table

typedef struct {
    KernelChoice choice;
    int kernel;        // an AttentionKernel, ProductKernel or CrossentropyWay
    const char* name;  // of the kernel, then when it is taken
    const char* when;
    bool (*takes)(const Card* c, const KernelSizes* s);
} KernelRow;

#define TAKES(condition) [](const Card* c, const KernelSizes* s) { return (void)c, (void)s, condition; }
static const KernelRow kernel_table[] = {
    {CHOOSE_ATTENTION, ATTENTION_WGMMA, "wgmma", "code for sm_90a, 16 bits, head_dim 64 or 128",
     TAKES(c->wgmma&& attention_tensor_cores(s->attention.HD))},
    {CHOOSE_ATTENTION, ATTENTION_MMA, "mma", "16 bits, head_dim 64 or 128", TAKES(attention_tensor_cores(s->attention.HD))},
    {CHOOSE_ATTENTION, ATTENTION_PLAIN, "plain", "any even head_dim up to 256, FP32", TAKES(true)},
    {CHOOSE_ATTENTION_BACKWARD, ATTENTION_WALK, "walk", "as wgmma, in long rows without documents, where it is faster",
     attention_walks},
    {CHOOSE_ATTENTION_BACKWARD, ATTENTION_WGMMA, "wgmma", "code for sm_90a, 16 bits, head_dim 64 or 128",
     TAKES(c->wgmma&& attention_tensor_cores(s->attention.HD))},
    {CHOOSE_ATTENTION_BACKWARD, ATTENTION_MMA, "mma", "16 bits, head_dim 64 or 128",
     TAKES(attention_tensor_cores(s->attention.HD))},
    {CHOOSE_ATTENTION_BACKWARD, ATTENTION_PLAIN, "plain", "any even head_dim up to 256, FP32", TAKES(true)},
    {CHOOSE_GATE_UP, PRODUCT_JOINED_TURNS, "joined, tiles in turns", "as by rows, with a large L2 cache or short sums",
     product_takes_turns},
    {CHOOSE_GATE_UP, PRODUCT_JOINED, "joined, by rows", "code for sm_90a, whole tiles that fill the card, nothing between",
     product_joins},
    {CHOOSE_GATE_UP, PRODUCT_APART, "cuBLASLt, then swiglu", "otherwise", TAKES(true)},
    {CHOOSE_DOWN_DX, PRODUCT_JOINED, "joined, by rows", "code for sm_90a, whole tiles that fill the card, nothing between",
     product_joins},
    {CHOOSE_DOWN_DX, PRODUCT_APART, "cuBLASLt, then swiglu", "otherwise", TAKES(true)},
    {CHOOSE_QKV, PRODUCT_JOINED, "joined, by rows", "code for sm_90a, head_dim 64 or 128, whole tiles, nothing between",
     TAKES(attention_tensor_cores(s->attention.HD) && product_joins(c, s))},
    {CHOOSE_QKV, PRODUCT_APART, "cuBLASLt, then rope", "otherwise", TAKES(true)},
    {CHOOSE_SYMMETRIC, PRODUCT_HALF, "half, mirrored", "code for sm_90a, whole tiles, four of them in a row or more",
     TAKES(c->wgmma && s->width % (128 * CLUSTER_BLOCKS) == 0 && s->width >= 256 * CLUSTER_BLOCKS && s->sum % 64 == 0)},
    {CHOOSE_SYMMETRIC, PRODUCT_APART, "cuBLASLt", "otherwise", TAKES(true)},
    {CHOOSE_CROSSENTROPY, CE_HELD, "held", "a row fits a block's registers",
     TAKES(crossentropy_packs(s->width) <= CE_BLOCK_PACKS)},
    {CHOOSE_CROSSENTROPY, CE_ROW, "row", "code for sm_80 or newer, a row fits registers and shared memory",
     TAKES(c->async&& crossentropy_row_threads(s->width) <= CE_ROW_THREADS &&
           crossentropy_row_shared(s->width) + CE_ROW_STATIC <= c->shared)},
    {CHOOSE_CROSSENTROPY, CE_LOOPED, "looped", "any row", TAKES(true)},
};
#undef TAKES

/* Returns the row of the kernel that computes an operation of these sizes. */
static inline const KernelRow* kernel_row(KernelChoice choice, const KernelSizes& s, const Card* c = this_card()) {
    const KernelRow* row = kernel_table;
    while (row->choice != choice || !row->takes(c, &s)) { row++; }  // the last row of a choice takes everything
    return row;
}

/* Returns whether a kernel of the table can compute an operation of these sizes, preferred or not. */
static inline bool kernel_takes(KernelChoice choice, int kernel, const KernelSizes& s, const Card* c = this_card()) {
    for (const KernelRow& row : kernel_table) {
        if (row.choice == choice && row.kernel == kernel) { return row.takes(c, &s); }
    }
    return false;
}

/* Returns whether a kernel of attention runs on this card at this head dimension. A walk runs wherever wgmma does. */
static inline bool attention_has_kernel(AttentionKernel kernel, int HD) {
    const AttentionKernel of_forward = kernel == ATTENTION_WALK ? ATTENTION_WGMMA : kernel;
    return kernel == ATTENTION_AUTO || kernel_takes(CHOOSE_ATTENTION, of_forward, attention_sizes({1, 1, 1, 1, HD}, false));
}

/* Prints the row of an operation. */
static inline void print_kernel(const char* operation, KernelChoice choice, const KernelSizes& s) {
    const KernelRow* row = kernel_row(choice, s);
    printf("%-20s %-22s  %s\n", operation, row->name, row->when);
}

#endif
