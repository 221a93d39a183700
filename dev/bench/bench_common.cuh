/* bench_common.cuh -- the benchmarks' shared parts: long runs with watts and clock from NVML; device memory that the program
 * keeps; the fastest algorithm of a single product.
 */
#ifndef TEST_BENCH_COMMON_CUH
#define TEST_BENCH_COMMON_CUH

#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "matmul_timing.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// the meter

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
// memory and products

/* Takes n elements of device memory, which the program keeps to its end. */
template <typename T>
static T* take(size_t n) {
    T* p = NULL;
    CUDA_CHECK(cudaMalloc((void**)&p, n * sizeof(T)));
    return p;
}

/* Takes n elements filled with normals. */
template <typename T>
static T* take_random(size_t n) {
    T* p = take<T>(n);
    random_fill_cuda(p, n, n, 0);
    return p;
}

static MatmulContext* take_matmul() { return matmul_create(take<char>(matmul_workspace_bytes()), false); }

enum { CANDIDATES = 8 };

/* Returns the key of D (M, N) = op(A) op(B) with packed rows. */
static MatmulKey product_key(cudaDataType_t type, FactorSide a, FactorSide b, size_t M, size_t N, size_t K) {
    MatmulKey key;
    memset(&key, 0, sizeof key);
    int64_t* v = key.v;
    v[KEY_M] = (int64_t)M, v[KEY_N] = (int64_t)N, v[KEY_K] = (int64_t)K;
    v[KEY_TRANS_A] = a == TRANSPOSED, v[KEY_TRANS_B] = b == TRANSPOSED;
    v[KEY_TYPE_A] = v[KEY_TYPE_B] = type;
    v[KEY_TYPE_D] = CUDA_R_16BF;
    v[KEY_LD_A] = a == TRANSPOSED ? v[KEY_M] : v[KEY_K];
    v[KEY_LD_B] = b == TRANSPOSED ? v[KEY_K] : v[KEY_N];
    v[KEY_LD_C] = v[KEY_LD_D] = v[KEY_N];
    v[KEY_ALIGN_A] = v[KEY_ALIGN_B] = v[KEY_ALIGN_C] = v[KEY_ALIGN_D] = 256;
    return key;
}

/* Finds the fastest of the heuristic's algorithms for a plan's descriptors. Returns how many of them ran. */
static int choose(MatmulContext* ctx, const MatmulPlan* p, char* buffers[3], cublasLtMatmulAlgo_t* algo) {
    cublasLtMatmulHeuristicResult_t results[CANDIDATES];
    cublasLtMatmulAlgo_t algos[CANDIDATES];
    float us[CANDIDATES];
    const int count = matmul_candidates(ctx, p, results, CANDIDATES);
    for (int i = 0; i < count; i++) { algos[i] = results[i].algo; }
    const int ran = matmul_time_candidates(ctx, p, algos, count, us, buffers, 0, 0);
    const int best = matmul_fastest(us, count);
    if (best < 0) { return 0; }
    *algo = algos[best];
    return ran;
}

#endif
