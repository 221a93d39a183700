/* runtime.cpp -- the CUDA runtime of the emulated card: memory, streams, events, graphs.
 *
 * Everything that the program queues is a Work. A Work waits for earlier works of its stream, and for works named by events.
 * The card's thread runs works one at a time, in any order that these waits allow (EMULATOR_SEED draws one). It begins only
 * when the program waits for something, or has queued nothing for a while. So work without an order, and host memory that is
 * used again too early, show. A graph is a list of such works; a launch copies them.
 *
 * With EMULATOR_LATE=1 copies to pinned memory of the host run when nothing else can, and not soon, unless the program waits
 * for them: so a wait that it lacks shows. With EMULATOR_PINNED_MIB no more can be pinned at once.
 *
 * Memory of the card is memory of the host, full of NaN. The program sees EMULATOR_GPUS (8) cards of EMULATOR_MIB (8192) each.
 * With EMULATOR_PART=3 it starts together only blocks for which three of a card's multiprocessors have room.
 * With EMULATOR_CAPABILITY=120 they are newer than the code: cards of compute capability 12.0, with their shared memory.
 */
#include "runtime.h"

#include "llmc/cuda/occupancy.cuh"  // defines: multiprocessor_of, resident_blocks

#include <cuda.h>

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

struct Event;
struct Graph;
struct Stream;
struct Work {
    std::function<void()> run;
    std::vector<std::shared_ptr<Work>> after;
    const Event* external;  // in a graph: each launch also waits for the work recorded there last
    Graph* graph;           // the graph that captured it, or NULL
    const Stream* stream;   // on which it was queued, or from which it was captured
    bool late;              // it copies to the host, with EMULATOR_LATE=1
    bool done;
    ShadowWorks seen;  // of each stream, how many works come before the end of this one
};
typedef std::shared_ptr<Work> WorkPtr;

struct Graph {
    std::vector<WorkPtr> works;  // each after the works it waits for
    WorkPtr begin;               // stands for the work queued before the launch
};

struct Stream {
    WorkPtr last;
    std::vector<WorkPtr> joined;  // by events, since then
    Graph* graph;                 // the graph that captures it
    WorkPtr before_capture;
};

struct Event {
    WorkPtr work;
    std::shared_ptr<double> seconds;
};

enum { HOLD_WORKS = 64 };  // how many works run, on average, while a stream is held back

static std::mutex mutex;
static std::condition_variable wake_card, wake_host;
static std::vector<WorkPtr> queued;  // in the order of the program
static bool running, stopped;        // whether the card runs a work; whether it has been stopped
static int waiting;                  // threads of the host
static Stream* const legacy = new Stream();
static std::vector<Stream*> streams(1, legacy);
static ShadowWorks host_seen;  // that the host has waited for
static std::map<void*, size_t> device_memory, pinned_memory;
static size_t bytes_used;
static int device;
static thread_local cudaError_t last_error;
// static shared memory that every kernel says it has: by 4 KiB the program knows code for sm_90a (has_wgmma)
static const unsigned STATIC_SHARED = EMULATED_ARCH == 900 ? 4096 : 0;

static int setting(const char* name, int otherwise) {
    const char* text = getenv(name);
    return text ? atoi(text) : otherwise;
}

static bool late_copies(void) {
    static const int late = setting("EMULATOR_LATE", 0);
    return late;
}

/* Returns the card's compute capability as 75 or 120. A card runs the code of older ones, except sm_90a's. */
static int capability(void) {
    static const int code = EMULATED_ARCH / 10, card = setting("EMULATOR_CAPABILITY", code);
    if (card < code || (code == 90 && card != 90)) { emulator_die("a card of %d does not run code for sm_%d", card, code); }
    return card;
}

static Multiprocessor multiprocessor(void) { return multiprocessor_of(capability()); }

/* Returns the most shared memory of a block: dynamic, and static. */
static unsigned most_shared(void) { return (unsigned)(multiprocessor().shared - multiprocessor().reserved) + STATIC_SHARED; }

int emulator_resident(int threads, size_t shared) {
    return std::min(4, resident_blocks(multiprocessor(), threads, 1, (int)shared));
}

static int processors(void) { return setting("EMULATOR_PROCESSORS", 4); }

/* A part of the card with an odd number of multiprocessors holds fewer clusters than all of them could: EMULATOR_CLUSTERS. */
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t*) {
    *clusters = setting("EMULATOR_CLUSTERS", processors());
    return cudaSuccess;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static cudaError_t result(cudaError_t status) {
    if (status != cudaSuccess) { last_error = status; }
    return status;
}

// ---------------------------------------------------------------------------------------------------------------------
// work

static bool is_ready(const Work& w) {
    return std::all_of(w.after.begin(), w.after.end(), [](const WorkPtr& before) { return before->done; });
}

/* Returns one of the works that are ready, in the order of the program or as EMULATOR_SEED draws it. Now and then it draws a
 * stream and holds it back: this stream then runs only if no other stream can. Without this no stream would fall far behind
 * another, and a missing wait between them might never show. */
static size_t choose(const std::vector<size_t>& ready) {
    static const Stream* held_back;
    std::vector<size_t> others;
    if (emulator_choose(HOLD_WORKS) == HOLD_WORKS - 1) { held_back = streams[emulator_choose((unsigned)streams.size())]; }
    for (const size_t i : ready) {
        if (queued[i]->stream != held_back && !queued[i]->late) { others.push_back(i); }
    }
    for (const size_t i : ready) {
        if (others.empty() && !queued[i]->late) { return i; }
    }
    const std::vector<size_t>& from = others.empty() ? ready : others;
    return from[emulator_choose((unsigned)from.size())];
}

/* The card's thread: runs queued works until it is stopped. */
static void run_queued(void) {
    std::unique_lock<std::mutex> lock(mutex);
    bool rested = false;  // before a late work
    while (!stopped) {
        while (queued.empty() || waiting == 0) {
            const size_t before = queued.size();
            wake_card.wait_for(lock, std::chrono::milliseconds(20));
            if (stopped) { return; }
            if (!queued.empty() && queued.size() == before) { break; }
        }
        std::vector<size_t> ready;
        for (size_t i = 0; i < queued.size(); i++) {
            if (is_ready(*queued[i])) { ready.push_back(i); }
        }
        if (ready.empty()) { emulator_die("of %zu works none can run", queued.size()); }
        const size_t i = choose(ready);
        const WorkPtr w = queued[i];
        if (w->late && !rested) {
            rested = true;
            wake_card.wait_for(lock, std::chrono::milliseconds(2));
            continue;
        }
        rested = false;
        queued.erase(queued.begin() + (long)i);
        running = true;
        for (const WorkPtr& before : w->after) { shadow_sees(&w->seen, before->seen); }
        shadow_work(w->stream, &w->seen);
        lock.unlock();
        w->run();
        lock.lock();
        running = false;
        w->run = nullptr;
        w->after.clear();
        w->done = true;
        wake_host.notify_all();
    }
}

/* At the program's end: waits for the running work. No other work begins: it would use objects that are destroyed from now
 * on. */
static void stop_card(void) {
    std::unique_lock<std::mutex> lock(mutex);
    stopped = true;
    wake_host.wait(lock, [] { return !running; });
}

static void start_card(void) {
    static bool started;
    if (started) { return; }
    started = true;
    atexit(stop_card);
    std::thread(run_queued).detach();
}

/* Lists a work and all that it waits for. */
static void collect(const WorkPtr& w, std::set<WorkPtr>& all) {
    if (all.insert(w).second) {
        for (const WorkPtr& before : w->after) { collect(before, all); }
    }
}

/* Lets the program wait for some works, some of them NULL. So these are not late. */
static void wait_for(std::unique_lock<std::mutex>& lock, const std::vector<WorkPtr>& works) {
    std::set<WorkPtr> all;
    for (const WorkPtr& w : works) {
        if (w && late_copies()) { collect(w, all); }
    }
    for (const WorkPtr& w : all) { w->late = false; }
    waiting++;
    wake_card.notify_all();
    wake_host.wait(lock,
                   [&] { return std::all_of(works.begin(), works.end(), [](const WorkPtr& w) { return !w || w->done; }); });
    waiting--;
    for (const WorkPtr& w : works) {
        if (w) { shadow_sees(&host_seen, w->seen); }
    }
}

static Stream* stream_of(cudaStream_t s) { return s ? (Stream*)s : legacy; }

/* Appends work to a stream, whose lock the caller holds. */
static WorkPtr append(Stream* s, std::function<void()> run) {
    const WorkPtr w = std::make_shared<Work>();
    w->run = run;
    w->graph = s->graph;
    w->stream = s;
    w->after = s->joined;
    w->seen = host_seen;
    if (s->last) { w->after.push_back(s->last); }
    s->joined.clear();
    s->last = w;
    (s->graph ? s->graph->works : queued).push_back(w);
    start_card();
    return w;
}

void emulator_queue(cudaStream_t stream, std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex);
    append(stream_of(stream), work);
}

cudaError_t emulator_launch(dim3 grid, dim3 block, size_t shared, cudaStream_t stream, bool together,
                            std::function<void()> body) {
    const size_t threads = (size_t)block.x * block.y * block.z, blocks = (size_t)grid.x * grid.y * grid.z;
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535 || threads == 0 || threads > 1024 ||
        block.z > 64) {
        shadow_refused(grid, block, shared, SHADOW_HERE);
        return result(cudaErrorInvalidConfiguration);
    }
    if (shared > most_shared()) {
        shadow_refused(grid, block, shared, SHADOW_HERE);
        return result(cudaErrorInvalidValue);
    }
    if (together && blocks > (size_t)setting("EMULATOR_PART", processors()) * emulator_resident((int)threads, shared)) {
        return result(cudaErrorCooperativeLaunchTooLarge);
    }
    const void* const line = SHADOW_HERE;
    emulator_queue(stream, [=] {
        shadow_grid(shared, line);
        emulator_run_grid(grid, block, shared, body);
    });
    return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// streams and events

/* Lets a graph capture the works that are queued on a stream from now on. */
static void capture(Stream* s, Graph* g) {
    s->before_capture = append(s, [] {});
    s->last = nullptr;
    s->graph = g;
}

static cudaError_t synchronize(Stream* s) {
    std::unique_lock<std::mutex> lock(mutex);
    if (s->graph) { return result(cudaErrorStreamCaptureUnsupported); }
    std::vector<WorkPtr> works = s->joined;
    works.push_back(s->last);
    wait_for(lock, works);
    return cudaSuccess;
}

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) {
    std::lock_guard<std::mutex> lock(mutex);
    streams.push_back(new Stream());
    *s = (cudaStream_t)streams.back();
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) { return cudaStreamCreateWithPriority(s, flags, 0); }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { return synchronize(stream_of(s)); }
cudaError_t cudaStreamDestroy(cudaStream_t s) {
    synchronize((Stream*)s);
    std::lock_guard<std::mutex> lock(mutex);
    streams.erase(std::find(streams.begin(), streams.end(), (Stream*)s));
    delete (Stream*)s;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0, *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void) {
    std::vector<Stream*> all;
    {
        std::lock_guard<std::mutex> lock(mutex);
        all = streams;
    }
    cudaError_t status = cudaSuccess;
    for (Stream* s : all) { status = std::max(status, synchronize(s)); }
    return status;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) {
    *e = (cudaEvent_t) new Event();
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) {
    delete (Event*)e;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    std::lock_guard<std::mutex> lock(mutex);
    Event* e = (Event*)event;
    const std::shared_ptr<double> seconds = std::make_shared<double>(0);
    e->seconds = seconds;
    e->work = append(stream_of(stream), [seconds] { *seconds = now(); });
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    std::lock_guard<std::mutex> lock(mutex);
    Stream* s = stream_of(stream);
    const Event* e = (const Event*)event;
    if (flags == cudaEventWaitExternal) {
        if (!s->graph) { return result(cudaErrorIllegalState); }
        append(s, [] {})->external = e;
        return cudaSuccess;
    }
    if (!e->work) { return cudaSuccess; }
    if (e->work->graph != s->graph) {
        if (s->graph || !e->work->graph) { return result(cudaErrorStreamCaptureIsolation); }
        capture(s, e->work->graph);  // the graph captures this stream, too
    }
    s->joined.push_back(e->work);
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    std::unique_lock<std::mutex> lock(mutex);
    const WorkPtr w = ((Event*)event)->work;
    if (w && w->graph) { return result(cudaErrorCapturedEvent); }
    wait_for(lock, {w});
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
    *ms = (float)(1e3 * (*((Event*)end)->seconds - *((Event*)begin)->seconds));
    return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// graphs

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    std::lock_guard<std::mutex> lock(mutex);
    Stream* s = (Stream*)stream;
    Graph* g = new Graph();
    capture(s, g);
    s->last = g->begin = std::make_shared<Work>();
    g->begin->graph = g;
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* status) {
    *status = stream_of(s)->graph ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    std::lock_guard<std::mutex> lock(mutex);
    Stream* s = (Stream*)stream;
    Graph* g = s->graph;
    std::set<WorkPtr> before_end;
    collect(s->last, before_end);
    for (const WorkPtr& w : s->joined) { collect(w, before_end); }
    for (Stream* other : streams) {
        if (other->graph != g) { continue; }
        if (other != s && other->last && !before_end.count(other->last)) { return result(cudaErrorStreamCaptureUnjoined); }
        other->graph = NULL;
        other->last = other->before_capture;
        other->joined.clear();
    }
    *graph = (cudaGraph_t)g;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
    *exec = (cudaGraphExec_t) new Graph(*(Graph*)graph);
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }  // the objects that it holds belong to its only copy, too
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    for (const WorkPtr& w : ((Graph*)exec)->works) {  // events may still name these works, but need not keep their functions
        w->run = nullptr;
        w->after.clear();
    }
    delete (Graph*)exec;
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    std::lock_guard<std::mutex> lock(mutex);
    const Graph* g = (const Graph*)exec;
    Stream* s = stream_of(stream);
    std::map<WorkPtr, WorkPtr> copies;
    copies[g->begin] = append(s, [] {});
    for (const WorkPtr& w : g->works) {
        const WorkPtr copy = std::make_shared<Work>();
        copy->run = w->run;
        copy->stream = w->stream;
        copy->seen = host_seen;
        for (const WorkPtr& before : w->after) { copy->after.push_back(copies.at(before)); }
        if (w->external && w->external->work) { copy->after.push_back(w->external->work); }
        copies[w] = copy;
        queued.push_back(copy);
    }
    for (const auto& copy : copies) { s->joined.push_back(copy.second); }
    append(s, [] {});
    return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// memory

static cudaError_t take(std::map<void*, size_t>& from, void** p, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    const size_t all = (bytes / 512 + 1) * 512;
    if (&from == &device_memory && bytes_used + all > (size_t)setting("EMULATOR_MIB", 8192) << 20) {
        return result(cudaErrorMemoryAllocation);
    }
#ifdef EMULATED_SANITIZE
    *p = shadow_take(bytes, &from == &pinned_memory);
#else
    *p = aligned_alloc(512, all);
#endif
    if (!*p) { return result(cudaErrorMemoryAllocation); }
    memset(*p, 0xff, all);
    from[*p] = all;
    if (&from == &device_memory) { bytes_used += all; }
    return cudaSuccess;
}
static void give_back_now(std::map<void*, size_t>& to, std::map<void*, size_t>::iterator found, const void* line) {
    void* const p = found->first;
    if (&to == &device_memory) { bytes_used -= found->second; }
    memset(p, 0xff, found->second);
#ifdef EMULATED_SANITIZE
    shadow_give_back(p, line);
#else
    (void)line;
    free(p);
#endif
    to.erase(found);
}
static cudaError_t give_back(std::map<void*, size_t>& to, void* p, const void* line) {
    if (!p) { return cudaSuccess; }
    const cudaError_t status = cudaDeviceSynchronize();
    if (status != cudaSuccess) { return status; }
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = to.find(p);
    if (found == to.end()) { return result(cudaErrorInvalidValue); }
    give_back_now(to, found, line);
    return cudaSuccess;
}
bool emulator_is_pinned(const void* p) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto next = pinned_memory.upper_bound((void*)p);
    if (next == pinned_memory.begin()) { return false; }
    const auto block = std::prev(next);
    return (const char*)p < (const char*)block->first + block->second;
}

cudaError_t cudaMalloc(void** p, size_t bytes) { return take(device_memory, p, bytes); }
cudaError_t cudaFree(void* p) { return give_back(device_memory, p, SHADOW_HERE); }
cudaError_t cudaMallocAsync(void** p, size_t bytes, cudaStream_t) { return take(device_memory, p, bytes); }
cudaError_t cudaFreeAsync(void* p, cudaStream_t stream) {
    std::lock_guard<std::mutex> lock(mutex);
    const void* const line = SHADOW_HERE;
    if (!device_memory.count(p)) { return result(cudaErrorInvalidValue); }
    append(stream_of(stream), [=] {
        std::lock_guard<std::mutex> lock(mutex);
        give_back_now(device_memory, device_memory.find(p), line);
    });
    return cudaSuccess;
}
cudaError_t cudaMallocHost(void** p, size_t bytes) { return take(pinned_memory, p, bytes); }
cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned) {
    if (bytes > (size_t)setting("EMULATOR_PINNED_MIB", 1 << 20) << 20) { return result(cudaErrorMemoryAllocation); }
    std::lock_guard<std::mutex> lock(mutex);
    pinned_memory[p] = bytes;
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* p) {
    const cudaError_t status = cudaDeviceSynchronize();
    std::lock_guard<std::mutex> lock(mutex);
    return pinned_memory.erase(p) ? status : result(cudaErrorInvalidValue);
}
cudaError_t cudaFreeHost(void* p) { return give_back(pinned_memory, p, SHADOW_HERE); }
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
    *total = (size_t)setting("EMULATOR_MIB", 8192) << 20;
    *free_bytes = *total - bytes_used;
    return cudaSuccess;
}

static void copy_now(void* to, const void* from, size_t bytes, const void* line) {
    memcpy(to, from, bytes);
    shadow_written(to, bytes, from, line);
}

/* Host memory that is not pinned is read, or written, before the call returns. */
static cudaError_t queue_copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream,
                              const void* line) {
    if (kind == cudaMemcpyHostToDevice && !emulator_is_pinned(from)) {
        const std::vector<char> copy((const char*)from, (const char*)from + bytes);
        emulator_queue(stream, [=] { copy_now(to, copy.data(), bytes, line); });
        return cudaSuccess;
    }
    const bool out = kind == cudaMemcpyDeviceToHost, pinned = emulator_is_pinned(to);
    {
        std::lock_guard<std::mutex> lock(mutex);
        append(stream_of(stream), [=] { copy_now(to, from, bytes, line); })->late = out && pinned && late_copies();
    }
    return out && !pinned ? cudaStreamSynchronize(stream) : cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    return queue_copy(to, from, bytes, kind, stream, SHADOW_HERE);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    queue_copy(to, from, bytes, kind, NULL, SHADOW_HERE);
    return cudaStreamSynchronize(NULL);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t rows,
                              cudaMemcpyKind kind, cudaStream_t stream) {
    if (kind != cudaMemcpyDeviceToDevice) { emulator_die("cudaMemcpy2DAsync: only within the card"); }
    const void* const line = SHADOW_HERE;
    emulator_queue(stream, [=] {
        for (size_t r = 0; r < rows; r++) {
            copy_now((char*)to + r * to_pitch, (const char*)from + r * from_pitch, width, line);
        }
    });
    return cudaSuccess;
}
static cudaError_t queue_set(void* p, int value, size_t bytes, cudaStream_t stream, const void* line) {
    emulator_queue(stream, [=] {
        memset(p, value, bytes);
        shadow_written(p, bytes, NULL, line);
    });
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
    return queue_set(p, value, bytes, stream, SHADOW_HERE);
}
cudaError_t cudaMemset(void* p, int value, size_t bytes) { return queue_set(p, value, bytes, NULL, SHADOW_HERE); }

// ---------------------------------------------------------------------------------------------------------------------
// the card

cudaError_t cudaGetDeviceCount(int* count) {
    *count = setting("EMULATOR_GPUS", 8);
    return *count > 0 ? cudaSuccess : result(cudaErrorNoDevice);
}
cudaError_t cudaSetDevice(int d) {
    device = d;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int* d) {
    *d = device;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int d) {
    snprintf(text, (size_t)size, "0000:%02x:00.0", d + 1);
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "emulated card, sm_%d", capability());
    p->major = capability() / 10, p->minor = capability() % 10;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: *value = capability() / 10; break;
        case cudaDevAttrComputeCapabilityMinor: *value = capability() % 10; break;
        case cudaDevAttrMultiProcessorCount: *value = processors(); break;
        case cudaDevAttrClockRate: *value = 1000000; break;
        case cudaDevAttrL2CacheSize: *value = 60 << 20; break;
        case cudaDevAttrCooperativeLaunch: *value = 1; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)most_shared(); break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = multiprocessor().shared; break;
        case cudaDevAttrReservedSharedMemoryPerBlock: *value = multiprocessor().reserved; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = multiprocessor().threads; break;
        case cudaDevAttrMaxBlocksPerMultiprocessor: *value = multiprocessor().blocks; break;
        default: emulator_die("cudaDeviceGetAttribute: %d is not known", (int)attribute);
    }
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
    memset(a, 0, sizeof *a);
    a->ptxVersion = a->binaryVersion = EMULATED_ARCH / 10;
    a->sharedSizeBytes = STATIC_SHARED;
    a->maxThreadsPerBlock = 1024;
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
    shadow_allow(kernel, (size_t)value);
    const bool known = attribute == cudaFuncAttributeMaxDynamicSharedMemorySize && value <= (int)most_shared();
    return known ? cudaSuccess : result(cudaErrorInvalidValue);
}
cudaError_t cudaGetLastError(void) {
    const cudaError_t e = last_error;
    last_error = cudaSuccess;
    return e;
}
const char* cudaGetErrorName(cudaError_t) { return "emulated"; }
const char* cudaGetErrorString(cudaError_t e) {
    static thread_local char text[64];
    snprintf(text, sizeof text, "%serror %d of the emulated card",
             e == cudaErrorInvalidConfiguration ? "invalid configuration argument, "
             : e == cudaErrorMemoryAllocation   ? "out of memory, "
                                                : "",
             (int)e);
    return text;
}

/* The driver's cuTensorMapEncodeTiled; it writes an EmulatedMap (ptx.h). */
static CUresult encode_map(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* base, const cuuint64_t* dims,
                           const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
                           CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    const bool aligned = ((size_t)base | strides[0] | strides[1] | strides[2]) % 16 == 0;
    const bool fits = box[0] <= 64 && *std::min_element(box, box + 4) > 0 && *std::max_element(box, box + 4) <= 256;
    if (rank != 4 || swizzle != CU_TENSOR_MAP_SWIZZLE_128B || !aligned || !fits) { return CUDA_ERROR_INVALID_VALUE; }
    char* to = (char*)map;
    memcpy(to, &base, 8);
    memcpy(to + 8, dims, 32);
    memcpy(to + 40, strides, 24);
    memcpy(to + 64, box, 16);
    return CUDA_SUCCESS;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
    const bool known = strcmp(name, "cuTensorMapEncodeTiled") == 0;
    *f = known ? (void*)encode_map : NULL;
    *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
}
