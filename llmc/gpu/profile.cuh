/* profile.cuh -- shows where a step's time goes. Nsight's timeline has a range for each operation. With --profile, a table
 * lists all operations, with their share of the card's limits. The layers, the optimizer and the exchanges make an Op for each.
 *
 * With several GPUs the exchange runs on its own stream and has its own table. Its time is hidden as long as the step does not
 * wait for it: the operations "wait: ..." of the step's stream are the rest.
 */
#ifndef LLMC_PROFILE_CUH
#define LLMC_PROFILE_CUH

#include "llmc/cuda/cuda_common.cuh"  // defines: ProfileRange, CUDA_CHECK

constexpr double FP8_RATE = 2;  // fp8 operations in the time of one in BF16, on cards of compute capability 9.0
enum { PROFILE_MAX = 16384, PROFILE_ROWS = 128 };

typedef struct {
    const char* name;
    double flops, bytes;  // the least the operation must do and move
    double rate;          // rate of the operations, as a multiple of the rate of the build's type
    bool beside;          // runs on another stream than the step
    cudaEvent_t begin, end;
} ProfiledOp;

typedef struct {
    ProfiledOp ops[PROFILE_MAX];
    int count;
    cudaStream_t stream;  // the step's
} Profiler;

/* Makes a profiler of the steps on this stream; the caller frees it. */
static inline Profiler* profiler_new(cudaStream_t stream) {
    Profiler* p = (Profiler*)xcalloc(1, sizeof *p);
    p->stream = stream;
    return p;
}

/* The range of one block's pass. */
struct LayerRange {
    char name[24];
    ProfileRange range;
    explicit LayerRange(int l) : range(name_of(l)) {}
    const char* name_of(int l) {
        snprintf(name, sizeof name, "layer %d", l);
        return name;
    }
};

/* Measures one operation, from construction to the end of its scope. With a NULL `profiler` it adds nothing to the table. */
struct Op {
    ProfileRange range;
    ProfiledOp* op = NULL;
    cudaStream_t stream;
    Op(Profiler* profiler, cudaStream_t on, const char* name, double flops, double bytes, double rate = 1)
        : range(name), stream(on) {
        if (!profiler || profiler->count == PROFILE_MAX) { return; }
        op = &profiler->ops[profiler->count++];
        op->name = name;
        op->flops = flops;
        op->bytes = bytes;
        op->rate = rate;
        op->beside = on != profiler->stream;
        CUDA_CHECK(cudaEventCreate(&op->begin));
        CUDA_CHECK(cudaEventCreate(&op->end));
        CUDA_CHECK(cudaEventRecord(op->begin, stream));
    }
    /* On the stream of a queue (layers.cuh). */
    template <typename Queue>
    Op(const Queue* q, const char* name, double flops, double bytes, double rate = 1)
        : Op(q->profiler, q->stream, name, flops, bytes, rate) {}
    ~Op() {
        if (op) { CUDA_CHECK(cudaEventRecord(op->end, stream)); }
    }
};

/* Measures a copy on this card in TB/s, bytes read plus bytes written. The contents of `memory` (bytes) are lost. */
static inline double measure_copy(void* memory, size_t bytes, cudaStream_t stream) {
    enum { REPEATS = 5 };
    cudaEvent_t begin, end;
    float ms[REPEATS];
    CUDA_CHECK(cudaDeviceSynchronize());  // what a step sends may still be on its way
    bytes = size_min(bytes / 2, (size_t)2 << 30);
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    for (int i = 0; i < REPEATS; i++) {
        CUDA_CHECK(cudaEventRecord(begin, stream));
        CUDA_CHECK(cudaMemcpyAsync((char*)memory + bytes, memory, bytes, cudaMemcpyDeviceToDevice, stream));
        CUDA_CHECK(cudaEventRecord(end, stream));
        CUDA_CHECK(cudaEventSynchronize(end));
        CUDA_CHECK(cudaEventElapsedTime(&ms[i], begin, end));
    }
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    qsort(ms, REPEATS, sizeof *ms, compare_floats);
    return 2.0 * (double)bytes / (ms[REPEATS / 2] * 1e-3) * 1e-12;
}

typedef struct {
    const char* name;
    int calls;
    double ms, flops, bytes;
    double rate;  // as in ProfiledOp
} ProfileRow;

static inline int compare_rows(const void* a, const void* b) {
    const double x = ((const ProfileRow*)a)->ms, y = ((const ProfileRow*)b)->ms;
    return (x < y) - (x > y);
}

/* Sums the operations of the step, or those beside it, by name, the longest first; returns the number of rows. */
static inline int profile_sum(const Profiler* p, bool beside, ProfileRow rows[PROFILE_ROWS]) {
    int count = 0;
    for (int i = 0; i < p->count; i++) {
        float ms = 0;
        int k = 0;
        if (p->ops[i].beside != beside) { continue; }
        CUDA_CHECK(cudaEventElapsedTime(&ms, p->ops[i].begin, p->ops[i].end));
        while (k < count && strcmp(rows[k].name, p->ops[i].name) != 0) { k++; }
        if (k == PROFILE_ROWS) { continue; }
        if (k == count) { memset(&rows[count++], 0, sizeof *rows); }
        rows[k].name = p->ops[i].name;
        rows[k].rate = p->ops[i].rate;
        rows[k].calls++;
        rows[k].ms += ms;
        rows[k].flops += p->ops[i].flops;
        rows[k].bytes += p->ops[i].bytes;
    }
    qsort(rows, (size_t)count, sizeof *rows, compare_rows);
    return count;
}

/* Returns amount / ms; 0 if ms is below an event's resolution, such as a wait for data that has arrived. */
static inline double profile_rate(double amount, double ms) { return ms > 0 ? amount / ms : 0; }

/* Prints what ran beside a step that waited for it `waited` ms. */
static inline void print_exchange(const Profiler* p, double waited) {
    ProfileRow rows[PROFILE_ROWS];
    const int count = profile_sum(p, true, rows);
    double total = 0;
    if (count == 0) { return; }
    printf("%-20s %6s %9s %7s %9s %9s\n", "beside the step", "calls", "ms", "", "", "GB/s");
    for (int i = 0; i < count; i++) {
        total += rows[i].ms;
        printf("%-20s %6d %9.3f %7s %9s %9.0f\n", rows[i].name, rows[i].calls, rows[i].ms, "", "",
               profile_rate(rows[i].bytes, rows[i].ms) * 1e-6);
    }
    printf("exchange: %.2f ms, of which the step waited for %.2f ms\n", total, waited);
}

/* Prints the operations of one finished step. An operation's last column is its share of the nearer ceiling: the card's peak in
 * FLOP/s (for products in fp8 twice as high), or the bandwidth `copy` (TB/s). step_ms: the whole step's time */
static inline void print_profile(const Profiler* p, double peak_flops, double copy, double step_ms) {
    ProfileRow rows[PROFILE_ROWS];
    const int count = profile_sum(p, false, rows);
    double total = 0, waited = 0;
    for (int i = 0; i < count; i++) {
        total += rows[i].ms;
        waited += strncmp(rows[i].name, "wait: ", 6) == 0 ? rows[i].ms : 0;
    }
    printf(
        "profile of one step: %.2f ms, of which %.2f ms in these; ceilings: %.0f TFLOP/s (data sheet), copy %.2f TB/s "
        "(measured)\n",
        step_ms, total, peak_flops * 1e-12, copy);
    if (p->count == PROFILE_MAX) { printf("the table counts only the first %d operations\n", PROFILE_MAX); }
    printf("%-20s %6s %9s %7s %9s %9s %8s\n", "operation", "calls", "ms", "share", "TFLOP/s", "GB/s", "ceiling");
    for (int i = 0; i < count; i++) {
        const ProfileRow* r = &rows[i];
        const double tflops = profile_rate(r->flops, r->ms) * 1e-9, gbs = profile_rate(r->bytes, r->ms) * 1e-6;
        const double by_flops = peak_flops > 0 ? tflops * 1e12 / (peak_flops * r->rate) : 0, by_bytes = gbs * 1e-3 / copy;
        printf("%-20s %6d %9.3f %6.1f%% %9.1f %9.0f %7.1f%%\n", r->name, r->calls, r->ms, 100 * r->ms / total, tflops, gbs,
               100 * (by_flops > by_bytes ? by_flops : by_bytes));
    }
    print_exchange(p, waited);
}

#endif
