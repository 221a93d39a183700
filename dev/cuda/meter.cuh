/* meter.cuh -- how the zoo predicts and measures: what this card does in this run, times in turns with a copy, and long runs
 * with watts and clock from NVML.
 */
#ifndef ZOO_METER_CUH
#define ZOO_METER_CUH

#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "llmc/cuda/cuda_common.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// watts

/* One reading of NVML, taken when its energy counter changed. */
struct Sample {
    double at;      // now_seconds()
    double joules;  // since the driver was loaded
    double mhz;     // of the multiprocessors
};

static std::vector<Sample> samples;
static std::mutex samples_lock;
static std::atomic<bool> metering{true};

/* Records samples until `metering` ends. The NVML functions are looked up by name: not every machine has its header. */
static void meter() {
    void* nvml = dlopen("libnvidia-ml.so.1", RTLD_LAZY);
    if (!nvml) { return; }
    enum { NVML_SM_CLOCK = 1 };
    int (*init)(void) = (int (*)(void))dlsym(nvml, "nvmlInit_v2");
    int (*find)(const char*, void**) = (int (*)(const char*, void**))dlsym(nvml, "nvmlDeviceGetHandleByPciBusId_v2");
    int (*energy)(void*, unsigned long long*) =
        (int (*)(void*, unsigned long long*))dlsym(nvml, "nvmlDeviceGetTotalEnergyConsumption");
    int (*clock)(void*, int, unsigned*) = (int (*)(void*, int, unsigned*))dlsym(nvml, "nvmlDeviceGetClockInfo");
    char bus[32];
    void* card = NULL;
    CUDA_CHECK(cudaDeviceGetPCIBusId(bus, sizeof bus, 0));
    if (!init || !find || !energy || !clock || init() != 0 || find(bus, &card) != 0) { return; }
    unsigned long long before = 0, millijoules = 0;
    while (metering) {
        unsigned mhz = 0;
        if (energy(card, &millijoules) == 0 && millijoules != before && clock(card, NVML_SM_CLOCK, &mhz) == 0) {
            const std::lock_guard<std::mutex> hold(samples_lock);
            samples.push_back({now_seconds(), 1e-3 * (double)millijoules, (double)mhz});
            before = millijoules;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

struct Rate {
    double ms;          // of one launch
    double watts, mhz;  // means; NAN without two samples
};

/* Returns a rate with the watts and the clock between two moments. */
static Rate metered(double ms, double from, double to) {
    const std::lock_guard<std::mutex> hold(samples_lock);
    const Sample *first = NULL, *last = NULL;
    double mhz = 0;
    int count = 0;
    for (const Sample& s : samples) {
        if (s.at < from || s.at > to) { continue; }
        if (!first) { first = &s; }
        last = &s;
        mhz += s.mhz;
        count++;
    }
    if (count < 2) { return {ms, NAN, NAN}; }
    return {ms, (last->joules - first->joules) / (last->at - first->at), mhz / count};
}

/* Runs `launch`, which queues work on stream 0, back to back. The card first settles for a third of `seconds`; then come the
 * `seconds` that count. Two batches of launches are queued at a time, so that the card never waits for the host. */
static Rate run_for(double seconds, const std::function<void()>& launch) {
    enum { BATCH_MS = 10, MOST = 500 };
    cudaEvent_t done[2];
    for (cudaEvent_t& event : done) { CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming)); }
    launch();  // also loads its code
    CUDA_CHECK(cudaDeviceSynchronize());
    const double start = now_seconds();
    launch();
    CUDA_CHECK(cudaDeviceSynchronize());
    const int batch = (int)fmin(MOST, 1 + 1e-3 * BATCH_MS / (now_seconds() - start));
    double from = 0, to = 0;
    int first = 0;  // the batch whose end is `from`
    for (int i = 0;; i++) {
        for (int k = 0; k < batch; k++) { launch(); }
        CUDA_CHECK(cudaEventRecord(done[i % 2], 0));
        if (i == 0) { continue; }
        CUDA_CHECK(cudaEventSynchronize(done[(i - 1) % 2]));
        to = now_seconds();
        if (from == 0 && to - start > seconds / 3) {
            from = to;
            first = i - 1;
        } else if (from > 0 && to - from >= seconds) {
            const double ms = (to - from) * 1e3 / ((double)batch * (i - 1 - first));
            const Rate rate = metered(ms, from, to);
            CUDA_CHECK(cudaDeviceSynchronize());
            for (cudaEvent_t event : done) { CUDA_CHECK(cudaEventDestroy(event)); }
            return rate;
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// what this card does

/* The work by which a time is predicted. */
struct Work {
    double sectors;       // of 32 bytes, that memory moves
    double products = 0;  // floating-point operations, of those that cuBLASLt does as well
    double lanes = 0;     // instructions of single threads
    double trips = 0;     // to memory, one after the other, of the thread that has the most
    double launches = 1;
    double after = 0;  // sectors that further kernels move after all this
    double host = 0;   // seconds of the host, or of its link to the card, in a file that measures them
};

/* The rates of this run. */
static struct {
    double copy = 1, lanes = 1;      // bytes/s, read and written; instructions of single threads/s
    double trip = 0, launch = 0;     // seconds
    double product = 0;              // floating-point operations/s of cuBLASLt; 0: not measured
    double sms = 0, cache = 0;       // multiprocessors; bytes of the L2 cache
    int major = 0;                   // of its compute capability
    size_t bytes = (size_t)1 << 30;  // of the copies
    char *from, *to;
} card;

/* The parts of a predicted time, in seconds. The first four run beside each other; the others come on top. */
struct Terms {
    double memory, trips, lanes, products, launches, more;
    double seconds() const { return fmax(fmax(memory, trips), fmax(lanes, products)) + launches + more; }
};

static Terms terms_of(const Work& w) {
    return {32 * w.sectors / card.copy, w.trips * card.trip,
            w.lanes / card.lanes,       w.products > 0 ? w.products / card.product : 0,
            w.launches * card.launch,   32 * w.after / card.copy + w.host};
}
static double seconds_of(const Work& w) { return terms_of(w).seconds(); }

/* Takes what the driver knows about this card. */
static void know_card() {
    card.sms = (double)device_attribute(cudaDevAttrMultiProcessorCount);
    card.cache = (double)device_attribute(cudaDevAttrL2CacheSize);
    card.major = device_attribute(cudaDevAttrComputeCapabilityMajor);
}

/* Of the card in `card`, which predictions may have from a file. */
static inline double sms() {
    if (card.sms == 0) { know_card(); }
    return card.sms;
}

/* Returns the share of bytes that have left the L2 cache before a kernel reads them again, if it touches so many in between. */
static inline double missing(double bytes) { return sms() > 0 ? fmax(0, 1 - 0.5 * card.cache / bytes) : 0; }

/* Returns the blocks of a kernel that a multiprocessor holds, by the driver of this machine. */
template <typename Kernel>
static double blocks_of_sm(Kernel kernel, int threads) {
    return (double)blocks_at_once(kernel, threads, 0) / (double)device_attribute(cudaDevAttrMultiProcessorCount);
}

struct Turns {
    double ms;    // of one launch, the median
    double copy;  // bytes/s of the copies between
};

/* Times `launch`, in graphs of `count` launches, in turns with copies. Its argument counts launches, so that they can rotate
 * over several tensors. The host queues a graph while the copy runs, so the host's part is not timed. With `on_host` there is
 * no graph, and the host's clock times the launches from the first call to the end of the last one's work. */
static Turns in_turns(int count, const std::function<void(int, cudaStream_t)>& launch, bool on_host = false) {
    enum { ROUNDS = 11, FEW = 3 };
    float ms[ROUNDS], copy[ROUNDS];
    cudaStream_t s;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t events[3];
    CUDA_CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    for (cudaEvent_t& event : events) { CUDA_CHECK(cudaEventCreate(&event)); }
    CUDA_CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < count && !on_host; i++) { launch(i, s); }
    CUDA_CHECK(cudaStreamEndCapture(s, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CUDA_CHECK(cudaGraphLaunch(exec, s));
    int rounds = ROUNDS;
    for (int i = 0; i < rounds; i++) {
        CUDA_CHECK(cudaEventRecord(events[0], s));
        CUDA_CHECK(cudaMemcpyAsync(card.to, card.from, card.bytes, cudaMemcpyDeviceToDevice, s));
        CUDA_CHECK(cudaEventRecord(events[1], s));
        if (on_host) { CUDA_CHECK(cudaEventSynchronize(events[1])); }
        const double start = now_seconds();
        CUDA_CHECK(cudaGraphLaunch(exec, s));
        for (int k = 0; k < count && on_host; k++) { launch(k, s); }
        CUDA_CHECK(cudaEventRecord(events[2], s));
        CUDA_CHECK(cudaEventSynchronize(events[2]));
        const double host_ms = 1e3 * (now_seconds() - start);
        CUDA_CHECK(cudaEventElapsedTime(&copy[i], events[0], events[1]));
        CUDA_CHECK(cudaEventElapsedTime(&ms[i], events[1], events[2]));
        if (on_host) { ms[i] = (float)host_ms; }
        if (ms[i] > 1000) { rounds = FEW; }
    }
    qsort(ms, (size_t)rounds, sizeof *ms, compare_floats);
    qsort(copy, (size_t)rounds, sizeof *copy, compare_floats);
    CUDA_CHECK(cudaGraphExecDestroy(exec));
    CUDA_CHECK(cudaGraphDestroy(graph));
    for (cudaEvent_t event : events) { CUDA_CHECK(cudaEventDestroy(event)); }
    CUDA_CHECK(cudaStreamDestroy(s));
    return {(double)ms[rounds / 2] / count, 2e3 * (double)card.bytes / (double)copy[rounds / 2]};
}

__global__ void nothing_kernel() {}

/* Follows a chain of addresses, `step` words apart. All bits of the memory are 0. */
__global__ void chase_kernel(uint32_t* memory, size_t step, int count) {
    size_t at = 0;
    for (int i = 0; i < count; i++) { at += step + memory[at]; }
    memory[0] = at == 1;
}

static void measure_card() {
    enum { LAUNCHES = 100, TRIPS = 1000 };
    CUDA_CHECK(cudaMalloc((void**)&card.from, card.bytes));
    CUDA_CHECK(cudaMalloc((void**)&card.to, card.bytes));
    CUDA_CHECK(cudaMemset(card.from, 0, card.bytes));
    const Turns launches = in_turns(LAUNCHES, [](int, cudaStream_t s) { nothing_kernel<<<1, 32, 0, s>>>(); });
    const Turns trips =
        in_turns(1, [](int, cudaStream_t s) { chase_kernel<<<1, 1, 0, s>>>((uint32_t*)card.from, 1 << 14, TRIPS); });
    know_card();
    // sm_75 and sm_80 have 64 lanes, others 128
    const bool half = card.major == 7 || (card.major == 8 && device_attribute(cudaDevAttrComputeCapabilityMinor) == 0);
    card.launch = 1e-3 * launches.ms;
    card.trip = 1e-3 * trips.ms / TRIPS;
    card.copy = trips.copy;
    card.lanes = sms() * (half ? 64 : 128) * 1e3 * device_attribute(cudaDevAttrClockRate);
}

/* Fills n elements: numbers in [-scale, scale), from 0 to -scale if it is negative, or int32_t below scale. */
template <typename T>
__global__ void fill_kernel(T* x, size_t n, float scale) {
    const size_t stride = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
        const float u = (float)((uint32_t)(i ^ i >> 16) * 2654435761u >> 8) / 16777216.0f;
        if constexpr (std::is_same<T, int32_t>::value) {
            x[i] = min((int32_t)(u * scale), (int32_t)scale - 1);  // u * scale may round to scale
        } else {
            x[i] = from_float<T>(scale < 0 ? u * -scale : (2 * u - 1) * scale);
        }
    }
}

template <typename T>
static void fill(T* x, size_t n, float scale) {
    fill_kernel<<<1024, 256>>>(x, n, scale);
    CUDA_CHECK_LAUNCH("fill_kernel");
}

#endif
