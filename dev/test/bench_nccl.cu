/* bench_nccl.cu -- measures the ways in which GPUs of one host can exchange gradients and weights.
 *
 *   make build/bench_nccl_cu && build/bench_nccl_cu [--parts ways,graph,overlap,start,share,abort] [--gpus N] [--limit 30]
 *
 * ways     GB/s of each way alone: bytes that a GPU sends to others over the time, and whether every element arrived.
 * graph    captures each way, replays it 20 times with new data and checks each replay; how many nodes of the graph are kernels
 *          (which take multiprocessors) and how many are copies; ms of a replay.
 * overlap  products on one stream, communication on another of high priority, launched as backward would: each exchange waits
 *          for a product. "hidden" is the share of the communication's time that the two together do not take longer.
 * start    seconds until communicators are usable, blocking and not.
 * share    several ranks on a GPU, by NCCL_HOSTID on hosts that only pretend to be different, and without.
 * abort    how long ncclCommAbort takes while a rank never arrives.
 *
 * The program starts one process a rank before any call of CUDA; they share a little memory. A list of questions goes to one
 * set of processes. If one fails or takes longer than --limit seconds, the set is killed, the question's line says so, and a
 * new set gets the rest. NVLink multicast stays off. All ways but the reductions move arbitrary bits, which differ by rank,
 * place and round; what is reduced are small integers, whose sums are exact in bf16.
 */
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "llmc/gpu/nccl.cuh"  // defines: Nccl, nccl_open, nccl_ok, nccl_wait
#include "llmc/matmul.cuh"
#include "matmul_timing.cuh"

#if !LLMC_NCCL || NCCL_VERSION_CODE < 22800
#error "bench_nccl needs nccl.h of NCCL 2.28 or newer: install libnccl-dev"
#endif
#ifndef PRECISION_BF16
#error "bench_nccl exchanges bf16: build with PRECISION=BF16"
#endif

enum { MAX_RANKS = 16, NUM_BUCKETS = 3, REPLAYS = 20, PRODUCTS = 8 };
static const size_t bucket_mb[NUM_BUCKETS] = {14, 122, 436};  // a block's gradients: 126M, 1B, 8B
static const int bucket_repeats[NUM_BUCKETS] = {200, 50, 20};

// ---------------------------------------------------------------------------------------------------------------------
// questions

typedef enum { ALL_TO_ALL, SEND_RECV, REDUCE_SCATTER, COPIES, ALL_GATHER } Op;
typedef enum { PLAIN, SYMMETRIC } Memory;
typedef enum { WAYS, GRAPH, OVERLAP, START, SHARE, ABORT_START, ABORT_OP, ABORT_GRAPH } Kind;

typedef struct {
    const char* name;
    Op op;
    Memory memory;
} Way;
static const Way ways[] = {{"all-to-all", ALL_TO_ALL, PLAIN},
                           {"all-to-all symmetric", ALL_TO_ALL, SYMMETRIC},
                           {"send and receive", SEND_RECV, PLAIN},
                           {"reduce-scatter", REDUCE_SCATTER, PLAIN},
                           {"reduce-scatter symmetric", REDUCE_SCATTER, SYMMETRIC},
                           {"copies to peers", COPIES, PLAIN},
                           {"all-gather", ALL_GATHER, PLAIN},
                           {"all-gather symmetric", ALL_GATHER, SYMMETRIC}};
enum { NUM_WAYS = sizeof ways / sizeof *ways };

/* How a communicator is made. */
typedef struct {
    const char* name;
    int max_ctas;  // 0: NCCL's choice
    bool zero, nonblocking;
} Config;
static const Config configs[] = {{"default", 0, false, false},  {"4 CTAs", 4, false, false},
                                 {"8 CTAs", 8, false, false},   {"16 CTAs", 16, false, false},
                                 {"zero CTAs", 0, true, false}, {"non-blocking", 0, false, true}};
enum { DEFAULT, CTAS_4, CTAS_8, CTAS_16, ZERO, NONBLOCKING };

typedef struct {
    Kind kind;
    int config;
    const Way* way;
    double limit;    // seconds; 0: --limit
    int host_ranks;  // ranks of a pretended host; 0: one true host
    int gpus;        // GPUs that the ranks use
    int ranks;
    const char* name;
} Question;

/* What the processes share. */
typedef struct {
    volatile int at[MAX_RANKS];         // the question that each rank is at
    volatile unsigned arrived, passed;  // of the barrier
    volatile int failed;                // 1: `message` is being written, 2: it holds
    char message[1024];
    ncclUniqueId id;
    cudaIpcMemHandle_t handles[MAX_RANKS];
    int count;  // rank 0's choice, for all
} Shared;

static Shared* shared;
static int rank, ranks;
static Nccl nccl;

/* Records why this process cannot go on. */
static void record(const char* text) {
    if (!__sync_bool_compare_and_swap(&shared->failed, 0, 1)) { return; }
    snprintf(shared->message, sizeof shared->message, "rank %d: %s", rank, text);
    __sync_synchronize();
    shared->failed = 2;
}

LLMC_PRINTF(1, 2) static void give_up(const char* fmt, ...) {
    char text[900];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    record(text);
    _exit(3);
}

static void nccl_check(ncclResult_t result, ncclComm_t comm, const char* what) {
    Error e = NO_ERROR;
    if (!nccl_ok(&nccl, result, comm, what, &e)) { give_up("%s", e.msg); }
}
#define NCCL_CHECK(comm, call) nccl_check(call, comm, #call)

/* Waits until all ranks are here. */
static void barrier() {
    const unsigned round = shared->passed;
    if (__sync_add_and_fetch(&shared->arrived, 1) == (unsigned)ranks) {
        shared->arrived = 0;
        __sync_synchronize();
        shared->passed = round + 1;
    }
    while (shared->passed == round) { sched_yield(); }
    __sync_synchronize();
}

// ---------------------------------------------------------------------------------------------------------------------
// data: a function of rank, place and round

__host__ __device__ static inline uint32_t mix(uint32_t x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}
__host__ __device__ static inline uint32_t noise(int rank, size_t i, uint32_t round) {
    return mix((uint32_t)i ^ mix((uint32_t)rank * 0x9e3779b9u + round));
}
__device__ static inline float small_integer(int rank, size_t i, uint32_t round) {
    return (float)(noise(rank, i, round) % 17) - 8;
}
__device__ static inline uint16_t value(int rank, size_t i, uint32_t round, bool number) {
    return number ? __bfloat16_as_ushort(__float2bfloat16_rn(small_integer(rank, i, round))) : (uint16_t)noise(rank, i, round);
}

/* Writes what a rank sends. first: the place of x[0] */
__global__ void fill_kernel(uint16_t* x, size_t n, int rank, size_t first, uint32_t round, bool number) {
    const size_t stride = (size_t)gridDim.x * blockDim.x;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += stride) {
        x[i] = value(rank, first + i, round, number);
    }
}

/* Counts what did not arrive. count: elements of a slice */
__global__ void check_kernel(const uint16_t* x, size_t count, Op op, int rank, int ranks, uint32_t round, unsigned* wrong) {
    const size_t n = op == REDUCE_SCATTER ? count : count * ranks, stride = (size_t)gridDim.x * blockDim.x;
    unsigned found = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += stride) {
        uint16_t expected;
        if (op == REDUCE_SCATTER) {
            float sum = 0;
            for (int r = 0; r < ranks; r++) { sum += small_integer(r, rank * count + i, round); }
            expected = __bfloat16_as_ushort(__float2bfloat16_rn(sum));
        } else {
            const int from = (int)(i / count);
            expected = value(from, op == ALL_GATHER ? i : rank * count + i % count, round, false);
        }
        found += x[i] != expected && !(op == REDUCE_SCATTER && (uint16_t)(x[i] << 1) == 0 && (uint16_t)(expected << 1) == 0);
    }
    if (found) { atomicAdd(wrong, found); }
}

// ---------------------------------------------------------------------------------------------------------------------
// a rank

static size_t slice_of(int bucket) { return bucket_mb[bucket] * 1000000 / 2 / (size_t)ranks / 1024 * 1024; }

typedef struct {
    cudaStream_t compute, side;  // side: of the communication, with high priority
    cudaEvent_t start, end, end_products, fork[PRODUCTS];
    ncclComm_t comm;
    int config;                   // of comm; -1: there is none
    double seconds;               // that comm took to be made
    uint16_t *send[2], *recv[2];  // by Memory
    void* windows[2];
    uint16_t* peers[MAX_RANKS];  // their plain recv
    unsigned* wrong;
    MatmulContext* matmul;
    floatX *x, *w, *y;
} Rank;
static Rank self;

static ncclUniqueId take_id() {
    barrier();
    if (rank == 0) { NCCL_CHECK(NULL, nccl.GetUniqueId(&shared->id)); }
    barrier();
    return shared->id;
}

static ncclConfig_t nccl_config(const Config& c) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    if (c.max_ctas) { config.maxCTAs = c.max_ctas; }
    if (c.zero) { config.CTAPolicy = NCCL_CTA_POLICY_ZERO; }
    config.blocking = !c.nonblocking;
    return config;
}

static void drop_comm() {
    if (self.config < 0) { return; }
    for (void*& window : self.windows) {
        if (window) { NCCL_CHECK(self.comm, nccl.CommWindowDeregister(self.comm, window)); }
        window = NULL;
    }
    NCCL_CHECK(self.comm, nccl.CommDestroy(self.comm));
    self.config = -1;
}

/* Makes the communicator of a configuration, if it is not there. */
static void take_comm(int config) {
    if (self.config == config) { return; }
    drop_comm();
    const ncclUniqueId id = take_id();
    ncclConfig_t c = nccl_config(configs[config]);
    const double start = now_seconds();
    NCCL_CHECK(NULL, nccl.CommInitRankConfig(&self.comm, ranks, id, rank, &c));
    Error e = NO_ERROR;
    if (configs[config].nonblocking && !nccl_wait(&nccl, self.comm, 20, "start", &e)) { give_up("%s", e.msg); }
    self.seconds = now_seconds() - start;
    self.config = config;
}

static void fill_buffers(Memory m, size_t elements) {
    for (uint16_t* x : {self.send[m], self.recv[m]}) {
        fill_kernel<<<1024, 256, 0, self.side>>>(x, elements, rank, 0, 0, false);
        CUDA_CHECK_LAUNCH("fill_kernel");
    }
    CUDA_CHECK(cudaStreamSynchronize(self.side));
}

/* Takes the buffers of a kind of memory, with noise, and registers symmetric ones with the communicator. */
static void take_buffers(Memory m) {
    const size_t elements = slice_of(NUM_BUCKETS - 1) * (size_t)ranks, bytes = 2 * elements;
    if (m == PLAIN) {
        if (self.send[m]) { return; }
        CUDA_CHECK(cudaMalloc((void**)&self.send[m], bytes));
        CUDA_CHECK(cudaMalloc((void**)&self.recv[m], bytes));
        fill_buffers(m, elements);
        return;
    }
    if (!nccl.CommWindowRegister) { give_up("NCCL %s has no windows", nccl_version_text(nccl.version).text); }
    if (!self.send[m]) {
        NCCL_CHECK(self.comm, nccl.MemAlloc((void**)&self.send[m], bytes));
        NCCL_CHECK(self.comm, nccl.MemAlloc((void**)&self.recv[m], bytes));
        fill_buffers(m, elements);
    }
    if (self.windows[0]) { return; }
    NCCL_CHECK(self.comm, nccl.CommWindowRegister(self.comm, self.send[m], bytes, &self.windows[0], NCCL_WIN_COLL_SYMMETRIC));
    NCCL_CHECK(self.comm, nccl.CommWindowRegister(self.comm, self.recv[m], bytes, &self.windows[1], NCCL_WIN_COLL_SYMMETRIC));
    if (!self.windows[0] || !self.windows[1]) { give_up("NCCL registers no windows here"); }
}

/* Maps the others' plain recv. */
static void take_peers() {
    if (self.peers[rank]) { return; }
    self.peers[rank] = self.recv[PLAIN];
    CUDA_CHECK(cudaIpcGetMemHandle(&shared->handles[rank], self.recv[PLAIN]));
    barrier();
    for (int r = 0; r < ranks; r++) {
        if (r == rank) { continue; }
        CUDA_CHECK(cudaIpcOpenMemHandle((void**)&self.peers[r], shared->handles[r], cudaIpcMemLazyEnablePeerAccess));
    }
    barrier();
}

/* Makes all that a way needs. */
static void prepare(int config, const Way* way) {
    take_comm(config);
    take_buffers(way->memory);
    if (way->op == COPIES) { take_peers(); }
    if (way->op == ALL_TO_ALL && !nccl.AlltoAll) { give_up("NCCL %s has no AlltoAll", nccl_version_text(nccl.version).text); }
}

/* Queues an exchange of a bucket. count: elements of a slice. All-gather is in place: the rank's own slice lies in recv. */
static void exchange(const Way* way, size_t count, cudaStream_t stream) {
    uint16_t *send = self.send[way->memory], *recv = self.recv[way->memory];
    const ncclDataType_t type = ncclBfloat16;
    switch (way->op) {
        case ALL_TO_ALL: NCCL_CHECK(self.comm, nccl.AlltoAll(send, recv, count, type, self.comm, stream)); break;
        case REDUCE_SCATTER:
            NCCL_CHECK(self.comm, nccl.ReduceScatter(send, recv, count, type, ncclSum, self.comm, stream));
            break;
        case ALL_GATHER:
            NCCL_CHECK(self.comm, nccl.AllGather(recv + rank * count, recv, count, type, self.comm, stream));
            break;
        case SEND_RECV:
            NCCL_CHECK(self.comm, nccl.GroupStart());
            for (int r = 0; r < ranks; r++) {
                NCCL_CHECK(self.comm, nccl.Send(send + r * count, count, type, r, self.comm, stream));
                NCCL_CHECK(self.comm, nccl.Recv(recv + r * count, count, type, r, self.comm, stream));
            }
            NCCL_CHECK(self.comm, nccl.GroupEnd());
            break;
        case COPIES:
            for (int i = 0; i < ranks; i++) {
                const int r = (rank + i) % ranks;
                CUDA_CHECK(
                    cudaMemcpyAsync(self.peers[r] + rank * count, send + r * count, 2 * count, cudaMemcpyDefault, stream));
            }
            break;
    }
}

/* Runs `launch` on new data and counts what did not arrive. Copies know nothing of the other side: the host waits for it. */
template <typename Launch>
static unsigned checked(const Way* way, size_t count, uint32_t round, Launch launch) {
    uint16_t *send = self.send[way->memory], *recv = self.recv[way->memory];
    const bool gather = way->op == ALL_GATHER;
    unsigned wrong = 0;
    CUDA_CHECK(cudaMemsetAsync(self.wrong, 0, sizeof wrong, self.side));
    if (round == 0) { CUDA_CHECK(cudaMemsetAsync(recv, 0xa5, 2 * count * ranks, self.side)); }
    fill_kernel<<<1024, 256, 0, self.side>>>(gather ? recv + rank * count : send, gather ? count : count * ranks, rank,
                                             gather ? rank * count : 0, round, way->op == REDUCE_SCATTER);
    CUDA_CHECK_LAUNCH("fill_kernel");
    if (way->op == COPIES) {
        CUDA_CHECK(cudaStreamSynchronize(self.side));
        barrier();
    }
    launch();
    if (way->op == COPIES) {
        CUDA_CHECK(cudaStreamSynchronize(self.side));
        barrier();
    }
    check_kernel<<<1024, 256, 0, self.side>>>(recv, count, way->op, rank, ranks, round, self.wrong);
    CUDA_CHECK_LAUNCH("check_kernel");
    CUDA_CHECK(cudaMemcpyAsync(&wrong, self.wrong, sizeof wrong, cudaMemcpyDeviceToHost, self.side));
    CUDA_CHECK(cudaStreamSynchronize(self.side));
    return wrong;
}

/* Returns the ms of one of `repeats` launches on the side stream. */
template <typename Launch>
static float timed(int repeats, Launch launch) {
    float ms = 0;
    for (int i = 0; i < 3; i++) { launch(); }
    CUDA_CHECK(cudaStreamSynchronize(self.side));
    barrier();
    CUDA_CHECK(cudaEventRecord(self.start, self.side));
    for (int i = 0; i < repeats; i++) { launch(); }
    CUDA_CHECK(cudaEventRecord(self.end, self.side));
    CUDA_CHECK(cudaStreamSynchronize(self.side));
    barrier();
    CUDA_CHECK(cudaEventElapsedTime(&ms, self.start, self.end));
    return ms / (float)repeats;
}

/* Returns the sum over ranks. */
static unsigned total(unsigned mine) {
    barrier();
    if (rank == 0) { shared->count = 0; }
    barrier();
    __sync_fetch_and_add(&shared->count, (int)mine);
    barrier();
    return (unsigned)shared->count;
}

/* Prints on rank 0. */
LLMC_PRINTF(1, 2) static void say(const char* fmt, ...) {
    if (rank != 0) { return; }
    va_list ap;
    va_start(ap, fmt);
    vprintf(fmt, ap);
    va_end(ap);
    fflush(stdout);
}

static double sent_bytes(size_t count) { return 2.0 * (double)count * (ranks - 1); }

static void ask_ways(const Question* q) {
    prepare(q->config, q->way);
    char line[512] = "";
    unsigned wrong = 0;
    for (int b = 0; b < NUM_BUCKETS; b++) {
        const size_t count = slice_of(b), used = strlen(line);
        const auto launch = [&] { exchange(q->way, count, self.side); };
        for (uint32_t round = 0; round < 2; round++) { wrong += checked(q->way, count, round, launch); }
        const float ms = timed(bucket_repeats[b], launch);
        snprintf(line + used, sizeof line - used, " | %3zu MB %7.3f ms %6.1f GB/s", bucket_mb[b], ms,
                 sent_bytes(count) / ms * 1e-6);
    }
    wrong = total(wrong);
    say("%s%s | %u wrong\n", q->name, line, wrong);
}

typedef struct {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    int kernels, copies, others;
} Captured;

static Captured capture(const Way* way, size_t count) {
    Captured c = {NULL, NULL, 0, 0, 0};
    cudaGraphNode_t nodes[512];
    size_t found = 512;
    CUDA_CHECK(cudaStreamBeginCapture(self.side, cudaStreamCaptureModeThreadLocal));
    exchange(way, count, self.side);
    CUDA_CHECK(cudaStreamEndCapture(self.side, &c.graph));
    CUDA_CHECK(cudaGraphGetNodes(c.graph, nodes, &found));
    for (size_t i = 0; i < found; i++) {
        cudaGraphNodeType type;
        if (cudaGraphNodeGetType(nodes[i], &type) != cudaSuccess) { (void)cudaGetLastError(), type = cudaGraphNodeTypeCount; }
        int* const kind = type == cudaGraphNodeTypeKernel   ? &c.kernels
                          : type == cudaGraphNodeTypeMemcpy ? &c.copies
                                                            : &c.others;
        ++*kind;
    }
    CUDA_CHECK(cudaGraphInstantiate(&c.exec, c.graph, 0));
    return c;
}

static void drop_captured(Captured* c) {
    CUDA_CHECK(cudaGraphExecDestroy(c->exec));
    CUDA_CHECK(cudaGraphDestroy(c->graph));
}

static void ask_graph(const Question* q) {
    prepare(q->config, q->way);
    const size_t count = slice_of(1);
    unsigned wrong = checked(q->way, count, 0, [&] { exchange(q->way, count, self.side); });  // allocates and connects
    barrier();
    Captured c = capture(q->way, count);
    const auto launch = [&] { CUDA_CHECK(cudaGraphLaunch(c.exec, self.side)); };
    for (uint32_t round = 1; round <= REPLAYS; round++) { wrong += checked(q->way, count, round, launch); }
    const float ms = timed(REPLAYS, launch);
    // what is not captured still works after replays
    wrong += checked(q->way, count, REPLAYS + 1, [&] { exchange(q->way, count, self.side); });
    wrong = total(wrong);
    say("%s | %zu MB, %d kernels, %d copies, %d other nodes | %d replays: %u wrong | %7.3f ms %6.1f GB/s\n", q->name,
        bucket_mb[1], c.kernels, c.copies, c.others, (int)REPLAYS, wrong, ms, sent_bytes(count) / ms * 1e-6);
    drop_captured(&c);
}

// ---------------------------------------------------------------------------------------------------------------------
// communication beside products

enum { ROWS = 16384, OUT_WIDTH = 8192, WIDTH = 2048 };

static void product() {
    matmul_forward_cuda(self.matmul, self.y, operand(self.x, WIDTH), operand(self.w, WIDTH), (const floatX*)NULL, ROWS, WIDTH,
                        OUT_WIDTH, OUT_WIDTH, self.compute);
}

static void take_products() {
    if (self.matmul) { return; }
    void* workspace = NULL;
    CUDA_CHECK(cudaMalloc(&workspace, matmul_workspace_bytes()));
    self.matmul = matmul_create(workspace, false);
    CUDA_CHECK(cudaMalloc((void**)&self.x, sizeof(floatX) * ROWS * WIDTH));
    CUDA_CHECK(cudaMalloc((void**)&self.w, sizeof(floatX) * OUT_WIDTH * WIDTH));
    CUDA_CHECK(cudaMalloc((void**)&self.y, sizeof(floatX) * ROWS * OUT_WIDTH));
    random_fill_cuda(self.x, (size_t)ROWS * WIDTH, 1, self.compute);
    random_fill_cuda(self.w, (size_t)OUT_WIDTH * WIDTH, 2, self.compute);
    for (int i = 0; i < 30; i++) { product(); }  // the card gets as warm as it will be
    CUDA_CHECK(cudaStreamSynchronize(self.compute));
}

typedef struct {
    float all, products;  // ms from the start to the end of both, and of the products
} Beside;

/* Runs PRODUCTS products, if there shall be any, and so many exchanges, each after one of the products but the last. */
static Beside beside(const Way* way, size_t count, bool products, int exchanges) {
    enum { ROUNDS = 6 };
    Beside sum = {0, 0};
    for (int round = 0; round < ROUNDS; round++) {
        CUDA_CHECK(cudaDeviceSynchronize());
        barrier();
        CUDA_CHECK(cudaEventRecord(self.start, self.compute));
        CUDA_CHECK(cudaStreamWaitEvent(self.side, self.start, 0));
        for (int i = 0, sent = 0; i < PRODUCTS; i++) {
            if (products) { product(); }
            CUDA_CHECK(cudaEventRecord(self.fork[i], self.compute));
            for (; sent < exchanges && sent * (PRODUCTS - 1) / exchanges <= i; sent++) {
                CUDA_CHECK(cudaStreamWaitEvent(self.side, self.fork[i], 0));
                exchange(way, count, self.side);
            }
        }
        CUDA_CHECK(cudaEventRecord(self.end_products, self.compute));
        CUDA_CHECK(cudaEventRecord(self.end, self.side));
        CUDA_CHECK(cudaStreamWaitEvent(self.compute, self.end, 0));
        CUDA_CHECK(cudaEventRecord(self.end, self.compute));
        CUDA_CHECK(cudaDeviceSynchronize());
        float all = 0, ended = 0;
        CUDA_CHECK(cudaEventElapsedTime(&all, self.start, self.end));
        CUDA_CHECK(cudaEventElapsedTime(&ended, self.start, self.end_products));
        if (round == 0) { continue; }
        sum.all += all / (ROUNDS - 1), sum.products += ended / (ROUNDS - 1);
    }
    return sum;
}

static void ask_overlap(const Question* q) {
    prepare(q->config, q->way);
    take_products();
    for (int b = 1; b < NUM_BUCKETS; b++) {
        const size_t count = slice_of(b);
        const float products = beside(q->way, count, true, 0).all;
        const float one = beside(q->way, count, false, 4).all / 4;
        barrier();
        if (rank == 0) { shared->count = (int)fmax(1, fmin(60, round(0.5 * products / one))); }
        barrier();
        const int exchanges = shared->count;
        const float alone = beside(q->way, count, false, exchanges).all;
        const Beside both = beside(q->way, count, true, exchanges);
        say("%s | %2d x %3zu MB | products %6.3f ms | communication %6.3f ms | both %6.3f ms, products end at %6.3f | hidden "
            "%5.1f %%\n",
            q->name, exchanges, bucket_mb[b], products, alone, both.all, both.products,
            100 * (products + alone - both.all) / alone);
        barrier();
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// starting, sharing, aborting

static void ask_start(const Question* q) {
    take_comm(q->config);
    say("%s | usable after %.2f s\n", q->name, self.seconds);
}

static void ask_share(const Question* q) {
    const Way* way = &ways[0];
    take_comm(q->config);
    take_buffers(PLAIN);
    const size_t count = slice_of(0);
    const auto launch = [&] { exchange(way, count, self.side); };
    unsigned wrong = 0;
    for (uint32_t round = 0; round < 3; round++) { wrong += checked(way, count, round, launch); }
    wrong = total(wrong);
    const float ms = timed(3, launch);
    say("%s | starts in %.2f s | all-to-all of %zu MB: %u wrong, %.3f ms\n", q->name, self.seconds, bucket_mb[0], wrong, ms);
}

/* Rank 0 starts a communicator that the others never join, and aborts it. */
static void ask_abort_start(const Question* q) {
    const ncclUniqueId id = take_id();
    if (rank == 0) {
        ncclConfig_t c = nccl_config(configs[NONBLOCKING]);
        ncclResult_t state = ncclSuccess;
        ncclComm_t comm = NULL;
        NCCL_CHECK(NULL, nccl.CommInitRankConfig(&comm, ranks, id, rank, &c));
        sleep(2);
        NCCL_CHECK(comm, nccl.CommGetAsyncError(comm, &state));
        const double start = now_seconds();
        const ncclResult_t result = nccl.CommAbort(comm);
        say("%s | after 2 s: %s | abort returns after %.2f s: %s\n", q->name, nccl.GetErrorString(state), now_seconds() - start,
            nccl.GetErrorString(result));
    }
    barrier();
}

/* Rank 0 starts an exchange that the others never start, as it is or in a graph, and aborts the communicator. Graphs that use
 * it are destroyed first, since NCCL waits for their end. */
static void ask_abort_op(const Question* q) {
    prepare(q->config, q->way);
    const size_t count = slice_of(0);
    unsigned wrong = 0;
    for (uint32_t round = 0; round < 2; round++) {
        wrong += checked(q->way, count, round, [&] { exchange(q->way, count, self.side); });
    }
    barrier();
    Captured c = {NULL, NULL, 0, 0, 0};
    if (q->kind == ABORT_GRAPH) { c = capture(q->way, count); }
    barrier();
    if (rank == 0) {
        if (c.exec) {
            CUDA_CHECK(cudaGraphLaunch(c.exec, self.side));
        } else {
            exchange(q->way, count, self.side);
        }
        sleep(1);
        const cudaError_t before = cudaStreamQuery(self.side);
        const double start = now_seconds();
        if (c.exec) { drop_captured(&c); }
        const ncclResult_t result = nccl.CommAbort(self.comm);
        const double aborted = now_seconds();
        say("%s | %u wrong before | after 1 s: %s | abort returns after %.2f s: %s\n", q->name, wrong, cudaGetErrorName(before),
            aborted - start, nccl.GetErrorString(result));
        const cudaError_t after = cudaStreamSynchronize(self.side);
        say("%s | the stream ends %.2f s later: %s\n", q->name, now_seconds() - aborted, cudaGetErrorName(after));
    }
    barrier();
}

static void ask(const Question* q) {
    switch (q->kind) {
        case WAYS: ask_ways(q); break;
        case GRAPH: ask_graph(q); break;
        case OVERLAP: ask_overlap(q); break;
        case START: ask_start(q); break;
        case SHARE: ask_share(q); break;
        case ABORT_START: ask_abort_start(q); break;
        case ABORT_OP:
        case ABORT_GRAPH: ask_abort_op(q); break;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// processes

/* Tells whether the processes that answer `a` can answer `b` after it: not after an abort. */
static bool same_processes(const Question* a, const Question* b) {
    return a->ranks == b->ranks && a->gpus == b->gpus && a->host_ranks == b->host_ranks && a->kind < ABORT_START;
}

/* A rank's process: opens its GPU and NCCL, and answers questions [from, to). */
LLMC_NORETURN static void rank_main(const Question* q, int from, int to) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    message_last = record;
    snprintf(message_rank, sizeof message_rank, "rank %d: ", rank);
    if (q[from].host_ranks) {
        char host[32];
        snprintf(host, sizeof host, "pretended-%d", rank / q[from].host_ranks);
        setenv("NCCL_HOSTID", host, 1);
        setenv("NCCL_NET", "Socket", 1);
    }
    CUDA_CHECK(cudaSetDevice(rank % q[from].gpus));
    Error e = NO_ERROR;
    if (!nccl_open(&nccl, &e)) { give_up("%s", e.msg); }
    int least = 0, greatest = 0;
    self.config = -1;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&self.compute, cudaStreamNonBlocking, least));
    CUDA_CHECK(cudaStreamCreateWithPriority(&self.side, cudaStreamNonBlocking, greatest));
    for (cudaEvent_t* event : {&self.start, &self.end, &self.end_products}) { CUDA_CHECK(cudaEventCreate(event)); }
    for (cudaEvent_t& event : self.fork) { CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming)); }
    CUDA_CHECK(cudaMalloc((void**)&self.wrong, sizeof *self.wrong));
    for (int i = from; i < to; i++) {
        shared->at[rank] = i;
        barrier();
        ask(&q[i]);
    }
    shared->at[rank] = to;
    barrier();
    _exit(0);
}

static double limit_seconds = 30;

/* Waits for the processes of questions [from, to). Returns the question at which they stopped, `to` if they answered all, and
 * why they stopped. */
static int watch(const Question* q, pid_t* pids, int count, int from, int to, char* why, size_t cap) {
    int at = from, running = count;
    double since = now_seconds(), failed_at = 0;
    why[0] = 0;
    while (running > 0) {
        const double now = now_seconds(), limit = q[at].limit > 0 ? q[at].limit : limit_seconds;
        for (int r = 0; r < count; r++) {
            int status = 0;
            if (pids[r] == 0 || waitpid(pids[r], &status, WNOHANG) != pids[r]) { continue; }
            pids[r] = 0;
            running--;
            if (status == 0) { continue; }
            if (!failed_at) { failed_at = now; }
            if (WIFSIGNALED(status)) { snprintf(why, cap, "rank %d ended by signal %d", r, WTERMSIG(status)); }
        }
        int slowest = to;
        for (int r = 0; r < count; r++) { slowest = shared->at[r] < slowest ? shared->at[r] : slowest; }
        if (slowest > at && slowest < to) { at = slowest, since = now; }
        if (shared->failed == 2 && !failed_at) { failed_at = now; }
        if (failed_at && now - failed_at > 0.5) { break; }  // the others may still wait for the one that failed
        if (now - since > limit) {
            snprintf(why, cap, "killed after %.0f s", limit);
            break;
        }
        usleep(2000);
    }
    for (int r = 0; r < count; r++) {
        if (pids[r] != 0) { kill(pids[r], SIGKILL); }
    }
    for (const double killed = now_seconds(); running > 0 && now_seconds() - killed < 10; usleep(2000)) {
        for (int r = 0; r < count; r++) {
            if (pids[r] != 0 && waitpid(pids[r], NULL, WNOHANG) == pids[r]) { pids[r] = 0, running--; }
        }
    }
    if (running > 0) { die("bench_nccl: the driver does not let go of %d killed ranks", running); }
    if (!why[0] && !failed_at) { return to; }
    if (!why[0]) { snprintf(why, cap, "%s", shared->failed == 2 ? shared->message : "a rank ended without a reason"); }
    return at;
}

/* Asks all questions, in one set of processes as long as that works. */
static void ask_all(const Question* q, int n) {
    for (int from = 0; from < n;) {
        int to = from + 1;
        while (to < n && same_processes(&q[to - 1], &q[to])) { to++; }
        memset((void*)shared, 0, sizeof *shared);
        for (int r = 0; r < MAX_RANKS; r++) { shared->at[r] = from; }
        pid_t pids[MAX_RANKS];
        ranks = q[from].ranks;
        fflush(stdout);
        for (int r = 0; r < ranks; r++) {
            pids[r] = fork();
            if (pids[r] < 0) { die("bench_nccl: fork: %s", strerror(errno)); }
            if (pids[r] == 0) {
                rank = r;
                rank_main(q, from, to);
            }
        }
        char why[1024];
        const int stopped = watch(q, pids, ranks, from, to, why, sizeof why);
        if (stopped < to) { printf("%s | failed: %s\n", q[stopped].name, why), fflush(stdout); }
        from = stopped < to ? stopped + 1 : to;
    }
}

/* Returns the number of GPUs; a process of its own asks, since none may have called CUDA before it forks. */
static int count_gpus() {
    const pid_t pid = fork();
    if (pid == 0) {
        int n = 0;
        _exit(cudaGetDeviceCount(&n) == cudaSuccess ? n : 0);
    }
    int status = 0;
    if (pid < 0 || waitpid(pid, &status, 0) != pid || !WIFEXITED(status)) { return 0; }
    return WEXITSTATUS(status);
}

enum { MAX_QUESTIONS = 128 };
static Question questions[MAX_QUESTIONS];
static char names[MAX_QUESTIONS][128];
static int num_questions;

static void add(const char* part, const char* name, Question q) {
    if (num_questions == MAX_QUESTIONS) { die("bench_nccl: more than %d questions", (int)MAX_QUESTIONS); }
    snprintf(names[num_questions], sizeof *names, "%-7s | %-12s | %-24s", part, configs[q.config].name, name);
    q.name = names[num_questions];
    questions[num_questions++] = q;
}

/* Adds a part for all ways that differ in a configuration. */
static void add_ways(const char* part, Kind kind, int config, int gpus) {
    for (const Way& way : ways) {
        const bool copies = way.memory == SYMMETRIC && way.op != REDUCE_SCATTER;  // what zero CTAs change
        const bool collective = way.op != COPIES && way.op != SEND_RECV;
        const bool wanted = config == DEFAULT || (config == ZERO ? copies : kind == OVERLAP && collective);
        if (wanted) { add(part, way.name, {kind, config, &way, 0, 0, gpus, gpus, NULL}); }
    }
}

static bool has_part(const char* parts, const char* part) {
    const size_t n = strlen(part);
    for (const char* p = parts; p; p = strchr(p, ',') ? strchr(p, ',') + 1 : NULL) {
        if (strncmp(p, part, n) == 0 && (p[n] == 0 || p[n] == ',')) { return true; }
    }
    return false;
}

int main(int argc, char** argv) {
    const char* parts = "start,ways,graph,overlap,share,abort";
    int gpus = 2;
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 < argc && strcmp(argv[i], "--parts") == 0) {
            parts = argv[i + 1];
        } else if (i + 1 < argc && strcmp(argv[i], "--gpus") == 0) {
            gpus = atoi(argv[i + 1]);
        } else if (i + 1 < argc && strcmp(argv[i], "--limit") == 0) {
            limit_seconds = atof(argv[i + 1]);
        } else {
            die_usage("usage: %s [--parts start,ways,graph,overlap,share,abort] [--gpus 2] [--limit 30]", argv[0]);
        }
    }
    setenv("NCCL_NVLS_ENABLE", "0", 1);
    setenv("NCCL_SOCKET_IFNAME", "lo", 0);  // all ranks are on this host
    Error e = NO_ERROR;
    must(nccl_open(&nccl, &e), &e);  // also tells the version; calls nothing of CUDA
    const int there = count_gpus();
    if (there < gpus || gpus < 2 || gpus > MAX_RANKS / 2) {
        die("bench_nccl: %d GPUs here, wanted --gpus %d of 2 to 8", there, gpus);
    }
    printf("NCCL %s of %s, nccl.h %s, %d of %d GPUs\n", nccl_version_text(nccl.version).text, nccl.file,
           nccl_version_text(NCCL_VERSION_CODE).text, gpus, there);
    shared = (Shared*)mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) { die("bench_nccl: mmap: %s", strerror(errno)); }
    const double begin = now_seconds();
    const int many = 4 * gpus < MAX_RANKS ? 4 * gpus : MAX_RANKS;
    const bool start = has_part(parts, "start");
    if (start) { add("start", "blocking", {START, DEFAULT, NULL, 0, 0, gpus, gpus, NULL}); }
    for (int c = DEFAULT; c <= ZERO; c++) {  // each communicator is made once
        if (has_part(parts, "ways")) { add_ways("ways", WAYS, c, gpus); }
        if (has_part(parts, "graph")) { add_ways("graph", GRAPH, c, gpus); }
        if (has_part(parts, "overlap")) { add_ways("overlap", OVERLAP, c, gpus); }
    }
    if (start) { add("start", "non-blocking", {START, NONBLOCKING, NULL, 0, 0, gpus, gpus, NULL}); }
    if (has_part(parts, "share")) {
        add("share", "hosts of all GPUs", {SHARE, DEFAULT, NULL, 25, gpus, gpus, many, NULL});
        add("share", "4 hosts of GPU 0", {SHARE, DEFAULT, NULL, 25, 1, 1, 4, NULL});
        add("share", "2 on GPU 0, one host", {SHARE, DEFAULT, NULL, 25, 0, 1, 2, NULL});
    }
    if (has_part(parts, "abort")) {
        add("abort", "a rank does not start", {ABORT_START, NONBLOCKING, NULL, 15, 0, gpus, gpus, NULL});
        add("abort", "a rank sends nothing", {ABORT_OP, DEFAULT, &ways[0], 15, 0, gpus, gpus, NULL});
        add("abort", "a rank replays nothing", {ABORT_GRAPH, DEFAULT, &ways[0], 15, 0, gpus, gpus, NULL});
        add("abort", "a rank sends nothing", {ABORT_OP, ZERO, &ways[1], 15, 0, gpus, gpus, NULL});
    }
    ask_all(questions, num_questions);
    printf("%.0f s\n", now_seconds() - begin);
    return 0;
}
