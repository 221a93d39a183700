/* overlap.cu -- copies between host and card beside the card's work, in steps. The last one is the feed that brings the trainer
 * its tokens, llmc/gpu/feed.cuh.
 *
 *   make -C dev/cuda overlap && build/zoo/overlap [copies|step] [N...]
 *
 *   copies   n floats go to the card in chunks, are worked on, and come back. The work on a chunk takes as long as its copy one
 *            way. So a card that does one thing at a time takes three times as long as one that does all three at once.
 *   step     A training step wants B T tokens and as many targets, which the host first reads. A step is 1 ms of work here.
 *
 * The calls of the host are a part of this, so its clock times them (ON_HOST), and no graph queues them. The tests ask whether
 * every value that arrives, and every result that comes back, is the one that was sent.
 */
#include <map>

#include "llmc/gpu/feed.cuh"  // defines: Feed, feed_open, feed_lay_out, feed_next
#include "dev/cuda/zoo.cuh"

/* Works on x for 2 `rounds` multiplications, which wait for each other, and change nothing in the end. */
__device__ float work(float x, unsigned rounds, float up, float down) {
#pragma unroll 8
    for (unsigned i = 0; i < rounds; i++) { x = x * up * down; }
    return x;
}

static const double STEP = 1e-3, CALL = 2e-6;  // seconds of a step; of a call that queues something

static Work host_work(double seconds) { return {0, 0, 0, 0, 0, 0, seconds}; }

/* Multiplications that the card does in so many seconds, if each of n threads has as many; few if nothing is timed. */
static unsigned rounds_for(double seconds, double n) {
    return card.launch > 0 ? (unsigned)(seconds * card.lanes / (2 * n)) : 3;
}

/* Returns the bytes/s from pinned memory to the card, measured once; 1 if nothing is timed. */
static double link_rate() {
    static double rate = 1;
    if (rate > 1 || card.launch == 0) { return rate; }
    const size_t bytes = 64 << 20;
    void* pinned;
    CUDA_CHECK(cudaMallocHost(&pinned, bytes));
    for (int i = 0; i < 5; i++) {  // the first one is slower
        const double start = now_seconds();
        CUDA_CHECK(cudaMemcpy(card.to, pinned, bytes, cudaMemcpyHostToDevice));
        rate = fmax(rate, (double)bytes / (now_seconds() - start));
    }
    CUDA_CHECK(cudaFreeHost(pinned));
    return rate;
}

// ---------------------------------------------------------------------------------------------------------------------
// copies 1 to 4: from memory that is pageable or pinned, on one stream or eight

enum { ARRIVED, OUT, BACK };  // tensors of the ladder `copies`; `back` has what has come back to the host, in a test

/* The host's arrays. */
struct Host {
    std::vector<float> memory;
    float *in[2], *out[2];  // [pinned]
};

/* Returns the arrays of n floats. In a test, `in` holds what the oracle expects to arrive, and `out` NaN. */
static Host& host_of(const Case& c) {
    static std::map<size_t, Host> made;
    const size_t n = c.n[0];
    Host& h = made[n];
    if (h.memory.empty()) {
        h.memory.resize(2 * n);
        h.in[0] = h.memory.data(), h.out[0] = h.in[0] + n;
        CUDA_CHECK(cudaMallocHost((void**)&h.in[1], 2 * n * sizeof(float)));
        h.out[1] = h.in[1] + n;
    }
    for (int pinned = 0; pinned < 2 && !c.tensors[ARRIVED].start.empty(); pinned++) {
        memcpy(h.in[pinned], c.tensors[ARRIVED].start.data(), n * sizeof(float));
        memset((void*)h.out[pinned], 0xff, n * sizeof(float));
    }
    return h;
}

enum { STREAMS = 8 };

/* Eight streams. They begin after the work that `stream` has queued, and its next work waits for theirs. */
struct Fork {
    cudaStream_t streams[STREAMS];
    cudaEvent_t begin, end[STREAMS];
    Fork() {
        CUDA_CHECK(cudaEventCreateWithFlags(&begin, cudaEventDisableTiming));
        for (int i = 0; i < STREAMS; i++) {
            CUDA_CHECK(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
            CUDA_CHECK(cudaEventCreateWithFlags(&end[i], cudaEventDisableTiming));
        }
    }
    void open(cudaStream_t stream) {
        CUDA_CHECK(cudaEventRecord(begin, stream));
        for (cudaStream_t s : streams) { CUDA_CHECK(cudaStreamWaitEvent(s, begin)); }
    }
    void join(cudaStream_t stream) {
        for (int i = 0; i < STREAMS; i++) {
            CUDA_CHECK(cudaEventRecord(end[i], streams[i]));
            CUDA_CHECK(cudaStreamWaitEvent(stream, end[i]));
        }
    }
};

__global__ void work_kernel(float* out, const float* in, size_t n, unsigned rounds, float up, float down) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { out[i] = 2 * work(in[i], rounds, up, down); }
}

template <bool PINNED, bool MANY>
static void copies(const Case& c, cudaStream_t stream) {
    static Fork* fork = MANY ? new Fork() : NULL;
    Host& h = host_of(c);
    const size_t n = c.n[0], chunk = ceil_div(n, c.n[1]);
    const unsigned rounds = rounds_for(4 * (double)n / link_rate(), (double)n);
    float *arrived = c.at<float>(ARRIVED), *out = c.at<float>(OUT);
    if (MANY) { fork->open(stream); }
    for (size_t i = 0; i < n; i += chunk) {
        const size_t now = size_min(chunk, n - i), bytes = now * sizeof(float);
        cudaStream_t s = MANY ? fork->streams[i / chunk % STREAMS] : stream;
        CUDA_CHECK(cudaMemcpyAsync(arrived + i, h.in[PINNED] + i, bytes, cudaMemcpyHostToDevice, s));
        work_kernel<<<blocks_for(now, 256), 256, 0, s>>>(out + i, arrived + i, now, rounds, 4, 0.25f);
        CUDA_CHECK(cudaMemcpyAsync(h.out[PINNED] + i, out + i, bytes, cudaMemcpyDeviceToHost, s));
    }
    if (MANY) { fork->join(stream); }
    if (c.tensors[ARRIVED].start.empty()) { return; }  // nothing is compared
    CUDA_CHECK(cudaMemcpyAsync(c.at<float>(BACK), h.out[PINNED], n * sizeof(float), cudaMemcpyHostToDevice, stream));
}

/* So many times the copy of all floats one way, and `calls` for a chunk that the host or the card takes besides. */
static Work predict_copies(const Case& c, double times, double calls) {
    return host_work(times * 4 * (double)c.n[0] / link_rate() + calls * CALL * (double)c.n[1]);
}

// 1: pageable memory, one stream. The driver first copies pageable memory to pinned memory of its own, and the call waits for
// it: as if the copies were twice as long. 2 + 1 + 2 times one copy.
static Work predict_copies1(const Case& c) { return predict_copies(c, 5, 3); }

// 2: pinned memory, one stream. The card reads it itself, and the calls return at once. But a stream does one thing at a time:
// copy, work, copy.
static Work predict_copies2(const Case& c) { return predict_copies(c, 3, 3); }

// 3: pageable memory, eight streams. The call for a copy still waits, so no two chunks are on their way.
static Work predict_copies3(const Case& c) { return predict_copies(c, 5, 3); }

// 4: pinned memory, eight streams. A chunk arrives while the one before is worked on and the one before that goes back. Only
// the first arrival and the last way back are alone. With many chunks, the host's three calls for each take longer than its
// copy.
static Work predict_copies4(const Case& c) {
    const double chunks = (double)c.n[1], copy = 4 * (double)c.n[0] / link_rate();
    return predict_copies(c, fmax(1 + 2 / chunks, 3 * CALL * chunks / copy), 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// step 1: the host reads a batch, copies it, waits for the copy, queues the step and waits for its end. So the card waits for
// the host, and the host for the card.

enum { SEEN };  // the tensor of the ladder `step`: for each step the tokens and targets that it found

__global__ void step_kernel(float* seen, const int32_t* x, const int32_t* y, size_t N, unsigned rounds, float up, float down) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= N) { return; }
    seen[i] = work((float)x[i], rounds, up, down);
    seen[N + i] = work((float)y[i], rounds, up, down);
}

static void step(const Case& c, size_t k, const int32_t* x, const int32_t* y, cudaStream_t stream) {
    const size_t N = c.n[0] * c.n[1];
    const unsigned rounds = rounds_for(STEP, 2 * (double)N);
    step_kernel<<<blocks_for(N, 256), 256, 0, stream>>>(c.at<float>(SEEN) + k * 2 * N, x, y, N, rounds, 4, 0.25f);
}

/* A source of batches: token k of an endless text; a target is the token after. */
struct Text {
    size_t at, count;
};
static int32_t token(size_t k) { return (int32_t)(k * 7919 % 50021); }
static bool next_batch(void* ctx, int32_t* x, int32_t* y, Error*) {
    Text* t = (Text*)ctx;
    for (size_t i = 0; i < t->count; i++) { x[i] = token(t->at + i), y[i] = token(t->at + i + 1); }
    t->at += t->count;
    return true;
}

/* The feed for batches (B, T), which exists once, as in the trainer. */
static Feed& feed_of(const Case& c, cudaStream_t stream) {
    static std::map<std::pair<size_t, size_t>, Feed> made;
    Feed& f = made[{c.n[0], c.n[1]}];
    Arena device = {}, pinned = {};
    for (int pass = 0; pass < 2 && f.copy_stream == NULL; pass++) {  // measures, then hands out
        feed_lay_out(&f, (int)c.n[0], (int)c.n[1], 1, false, &device, &pinned);
        if (pass == 1) { feed_open(&f, stream); }
        if (pass == 0) { CUDA_CHECK(cudaMalloc((void**)&device.base, device.used)); }
        if (pass == 0) { CUDA_CHECK(cudaMallocHost((void**)&pinned.base, pinned.used)); }
        device.used = pinned.used = 0;
    }
    f.stream = stream;
    return f;
}

template <bool FED>
static void steps(const Case& c, cudaStream_t stream) {
    const size_t N = c.n[0] * c.n[1];
    Feed& f = feed_of(c, stream);
    Text text = {0, N};
    Error e = {};
    const BatchSource source = {next_batch, &text, (int)c.n[0], 0, NULL, NULL};
    std::vector<int32_t> batch(2 * N);
    for (size_t k = 0; k < c.n[2]; k++) {
        if (FED) {
            if (!feed_next(&f, &source, &e)) { die("overlap: the feed has no batch"); }
        } else {
            batch_read(&source, f.B, f.T, &batch[0], &batch[N], &e);
            copy_in(f.x, &batch[0], N * sizeof(int32_t), stream);
            copy_in(f.y, &batch[N], N * sizeof(int32_t), stream);
        }
        step(c, k, f.x, f.y, stream);
        if (!FED) { CUDA_CHECK(cudaStreamSynchronize(stream)); }
    }
}

// The host makes a token and a target in some 4 ns, where a trainer would read them from a file. Copies of 4 bytes each are
// pageable, and three calls wait.
static double reading(const Case& c) { return 4e-9 * (double)(c.n[0] * c.n[1]); }
static Work predict_steps1(const Case& c) {
    const double copy = 2 * 8 * (double)(c.n[0] * c.n[1]) / link_rate();
    return host_work((double)c.n[2] * (STEP + reading(c) + copy + 3 * 10 * CALL));
}

// step 5, the trainer's: the host reads the next batch during the step, to pinned memory, and a stream of its own copies it.
// Two batches may be on their way. The steps follow each other, so only the first batch is waited for.
static Work predict_steps5(const Case& c) {
    return host_work((double)c.n[2] * STEP + reading(c) + 8 * (double)(c.n[0] * c.n[1]) / link_rate());
}

// ---------------------------------------------------------------------------------------------------------------------

static void make_copies(Case& c) {
    c.tensor<float>("arrived", WRITE, 1, c.n[0]);
    c.tensor<float>("out", WRITE, 1, c.n[0]);
    c.tensor<float>("back", WRITE, 1, c.n[0]);
    c.bytes = 8 * (double)c.n[0];
}
static void oracle_copies(Case& c) {  // `arrived` has its start values: they are what the host sends
    for (size_t i = 0; i < c.n[0]; i++) { c[OUT][i] = c[BACK][i] = 2 * c[ARRIVED][i]; }
}

static void make_steps(Case& c) {
    c.tensor<float>("seen", WRITE, c.n[2], 2 * c.n[0] * c.n[1]);
    c.bytes = 8 * (double)(c.n[0] * c.n[1] * c.n[2]);
}
static void oracle_steps(Case& c) {
    const size_t N = c.n[0] * c.n[1];
    for (size_t i = 0; i < N * c.n[2]; i++) {
        c[SEEN][i / N * 2 * N + i % N] = (float)token(i);
        c[SEEN][i / N * 2 * N + N + i % N] = (float)token(i + 1);
    }
}

#include "dev/cuda/main.cuh"

int main(int argc, char** argv) {
    const size_t n = 1 << 24;
    const Ladder l("copies", "n,chunks", make_copies, NULL, oracle_copies, {{{1001, 7}}, {{4099, 8}}, {{8192, 32}}},
                   {{{n, 8}}, {{n, 32}}, {{n, 128}}, {{n, 512}}}, {{{16 * n, 32}}},
                   {{1, "pageable, serial", ON_HOST, copies<false, false>, predict_copies1},
                    {2, "pinned, serial", ON_HOST, copies<true, false>, predict_copies2},
                    {3, "pageable, eight streams", ON_HOST, copies<false, true>, predict_copies3},
                    {4, "pinned, eight streams", ON_HOST, copies<true, true>, predict_copies4}});
    const Ladder s("step", "B,T,steps", make_steps, NULL, oracle_steps, {{{3, 5, 4}}, {{2, 33, 7}}, {{4, 64, 9}}},
                   {{{64, 2048, 32}}}, {},
                   {{1, "read, copy, wait, step, wait", ON_HOST, steps<false>, predict_steps1},
                    {5, "the feed: the next batch during the step", ON_HOST | BOLD, steps<true>, predict_steps5}});
    return zoo(argc, argv, "overlap", {l, s});
}
