/* device.cuh -- the GPU of a run: its memory, its peak FLOP/s and the matrix products' context.
 *
 * Other processes may use the card as well, so what a run takes is counted: the sizes of its own allocations, and the drop in
 * free memory while the context, cuBLAS and the kernels load. NVML, which comes with the driver, reports the free memory before
 * there is a context. Without NVML, all memory in use counts as memory of the context.
 *
 * --dry-run with --max-memory needs no card: device_missing() then stands for a card, with the memory that context and
 * libraries are expected to take.
 */
#ifndef LLMC_DEVICE_CUH
#define LLMC_DEVICE_CUH

#include "llmc/base/os.h"        // defines: host_memory_available, read_number
#include "llmc/base/progress.h"  // defines: Progress, progress_begin, progress_add, progress_end
#include "llmc/base/text.h"      // defines: text_bytes
#include "llmc/base/utils.h"
#include "llmc/cuda/cuda_common.cuh"  // defines: IS_BF16, CUDA_CHECK
#include "llmc/matmul.cuh"            // defines: MatmulContext, matmul_create
#include "llmc/dist/ranks.h"          // defines: Ranks, ranks_device
#include "llmc/gpu/nccl.cuh"          // defines: NcclGroup, nccl_alloc, nccl_free
#include "llmc/train/mfu.h"           // defines: gpu_peak_flops

#include <ctype.h>
#include <dlfcn.h>
#include <sys/mman.h>

typedef struct {
    char name[256];
    size_t total;       // bytes of the card
    size_t others;      // memory in use before this process started
    size_t context;     // taken by this process before its model
    uint64_t host;      // main memory that this process may take; 0: unknown
    double peak_flops;  // 0: unknown
    MatmulContext* matmul;
    const char* missing;  // why there is no card: context and workspace are then estimates; NULL: there is one
} Device;

/* The bytes that context, cuBLAS and all kernels are expected to take of a card that is missing. On an H200 (dev/results, code
 * for sm_90a) it was 860 MiB by cudaMemGetInfo(), 900 by nvidia-smi. */
#define EXPECTED_CONTEXT ((size_t)900 << 20)

/* The bytes that a run keeps free for graphs and whatever else the driver takes meanwhile. An H200 held up to 0.05 GiB more
 * than the memory table says (dev/results/nvidia-h200.md). */
#define DRIVER_REST ((size_t)64 << 20)

/* Returns the bytes in use on a card according to NVML, which needs no context; 0 if NVML is missing. */
static inline size_t device_memory_in_use(const char* pci_bus_id) {
    typedef struct {
        unsigned version;
        unsigned long long total, reserved, free, used;
    } Memory;
    size_t used = 0;
    void* nvml = dlopen("libnvidia-ml.so.1", RTLD_LAZY);
    if (!nvml) { return 0; }
    int (*init)(void) = (int (*)(void))dlsym(nvml, "nvmlInit_v2");
    int (*find)(const char*, void**) = (int (*)(const char*, void**))dlsym(nvml, "nvmlDeviceGetHandleByPciBusId_v2");
    int (*ask)(void*, Memory*) = (int (*)(void*, Memory*))dlsym(nvml, "nvmlDeviceGetMemoryInfo_v2");
    int (*shutdown)(void) = (int (*)(void))dlsym(nvml, "nvmlShutdown");
    void* card = NULL;
    Memory memory = {sizeof(Memory) | 2u << 24, 0, 0, 0, 0};  // the second version does not count what the driver reserves
    if (init && find && ask && shutdown && init() == 0) {
        if (find(pci_bus_id, &card) == 0 && ask(card, &memory) == 0) { used = (size_t)memory.used; }
        shutdown();
    }
    dlclose(nvml);
    return used;
}

/* Returns what stands for a card that is missing: it can measure a model, but hold none. Its workspace is the largest of any
 * card. No call of CUDA may be made. */
static inline Device device_missing(const char* why) {
    Device d;
    memset(&d, 0, sizeof d);
    snprintf(d.name, sizeof d.name, "no GPU");
    d.context = EXPECTED_CONTEXT;
    d.missing = why;
    d.matmul = (MatmulContext*)xcalloc(1, sizeof *d.matmul);
    d.matmul->workspace_bytes = MATMUL_WORKSPACE_SM90;
    return d;
}

/* Returns the number of cards that this process sees. */
static inline int device_count(void) {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

/* Returns why no card can be used. */
static inline const char* device_absence(cudaError_t status) {
    const int cuda = CUDART_VERSION;
    int driver = 0;  // the CUDA that the driver is for
    cudaDriverGetVersion(&driver);
    const bool none = driver == 0 || status == cudaErrorNoDevice || status == cudaSuccess;
    if (driver != 0 && none && getenv("CUDA_VISIBLE_DEVICES")) { return "CUDA_VISIBLE_DEVICES hides all cards"; }
    if (none && (access("/.dockerenv", F_OK) == 0 || access("/run/.containerenv", F_OK) == 0)) {
        return "this container was started without GPUs, wanted such as docker run --gpus all";
    }
    if (none) { return driver == 0 ? "no NVIDIA driver is installed" : "the driver sees no card"; }
    if (status != cudaErrorInsufficientDriver) { return cudaGetErrorString(status); }
    char* text = (char*)xmalloc(128);
    snprintf(text, 128, "the driver is for CUDA %d.%d, this build for %d.%d: update the driver, or build with an older toolkit",
             driver / 1000, driver % 1000 / 10, cuda / 1000, cuda % 1000 / 10);
    return text;
}

/* Returns the main memory for each of the ranks on this host. Never inlined: its buffers would lie in main's frame. */
__attribute__((noinline)) static uint64_t device_host_memory(const Ranks* ranks) {
    return host_memory_available() / (uint64_t)ranks->local_ranks;
}

/* Opens the card of this rank. With `trains`, loads all kernels; afterwards only the model takes memory. tf32: FP32 builds may
 * round factors. Ends the program if no card is found, unless one may be `missing`. */
static inline Device device_open(const Ranks* ranks, bool trains, bool tf32, bool missing) {
    Device d;
    cudaDeviceProp properties;
    size_t free_bytes = 0;
    char bus[32] = "";
    memset(&d, 0, sizeof d);
    // Training loads every kernel now: one loaded later would take memory that the memory table misses. This takes 1.2 s, most
    // of it for cuBLAS' kernels; other jobs load a kernel when they first need it.
    setenv("CUDA_MODULE_LOADING", trains ? "EAGER" : "LAZY", 0);
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess || count == 0) {
        const char* why = device_absence(status);
        if (missing) { return device_missing(why); }
        die("no GPU can be used: %s\n  hint: ./train_llama3 runs on the CPU, with the same flags; --dry-run --max-memory 80G "
            "tells what would fit into a GPU of 80 GiB",
            why);
    }
    if (tf32 && sizeof(floatX) != 4) { die_usage("--tf32: this is a build for %s, wanted PRECISION=FP32", PRECISION_NAME); }
    const int card = ranks_device(ranks, count);
    if (card < 0) { die("%d ranks are on this host, wanted at most %d, one for each GPU", ranks->local_ranks, count); }
    CUDA_CHECK(cudaSetDevice(card));
    CUDA_CHECK(cudaDeviceGetPCIBusId(bus, sizeof bus, card));
    d.others = device_memory_in_use(bus);
    CUDA_CHECK(cudaGetDeviceProperties(&properties, card));
    snprintf(d.name, sizeof d.name, "%s", properties.name);
    const PeakKind kinds[] = {tf32 ? PEAK_TF32 : PEAK_FP32, PEAK_BF16, PEAK_FP16};
    d.peak_flops = gpu_peak_flops(d.name, kinds[IS_BF16 ? 1 : IS_FP16 ? 2 : 0]);
    d.matmul = matmul_create(NULL, tf32);
    d.host = device_host_memory(ranks);
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &d.total));
    d.context = d.total - free_bytes - size_min(d.others, d.total - free_bytes);
    return d;
}

static inline void device_close(Device* d) {
    if (d->missing) {
        free(d->matmul);
    } else {
        matmul_destroy(d->matmul);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// what a model takes of it, and of the host

/* The kinds of memory: name, and whether it begins as zero, for the gaps between its tensors. */
#define MEMORY_KINDS(X)                                                   \
    X(WEIGHTS, "weights", true)                                           \
    X(ADAPTERS, "adapters", true)                                         \
    X(GRADIENTS, "gradients", true)                                       \
    X(MASTER, "master", true)                                             \
    X(M, "m", true)                                                       \
    X(V, "v", true)                                                       \
    X(WINDOWS, "windows", false) /* of what lies on the host */           \
    X(FP8, "fp8 weights", false)                                          \
    X(ACTIVATIONS, "activations", false)                                  \
    X(LOGITS, "logits", false)                                            \
    X(WORKSPACE, "workspace", false)                                      \
    X(LANDING, "landing", false) /* what arrives from other ranks */      \
    X(SUMS, "fp32 sums", false)  /* over the ranks */                     \
    X(CACHE, "KV cache", false)                                           \
    X(HOME, "gradients of blocks", false) /* on the host, as all below */ \
    X(BLOCKS, "weights of blocks", true)                                  \
    X(PINNED, "pinned, on the host", false)
#define MEMORY_ENUM(kind, name, zero) MEM_##kind,
#define MEMORY_ROW(kind, name, zero) {name, zero},
typedef enum { MEMORY_KINDS(MEMORY_ENUM) NUM_MEM } MemoryKind;
static const struct {
    const char* name;
    bool begins_zero;
} memory_kinds[NUM_MEM] = {MEMORY_KINDS(MEMORY_ROW)};

typedef enum { ON_CARD, ON_CARD_EXCHANGED, ON_HOST } MemoryPlace;

/* Maps zeroed memory of the host, in huge pages and near the card where the system does that. NULL: there is none. */
static inline char* memory_map(size_t bytes) {
    enum { PREFERRED = 1 };  // MPOL_PREFERRED of numaif.h
    char device[32] = "", dir[64];
    int card = 0;
    CUDA_CHECK(cudaGetDevice(&card));
    CUDA_CHECK(cudaDeviceGetPCIBusId(device, sizeof device, card));
    for (char* c = device; *c; c++) { *c = (char)tolower(*c); }
    snprintf(dir, sizeof dir, "/sys/bus/pci/devices/%s", device);
    const uint64_t node = read_number(dir, "numa_node", 0);
    const unsigned long nodes = node < 64 ? 1ul << node : 0;
    void* p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) { return NULL; }
    madvise(p, bytes, MADV_HUGEPAGE);
    if (nodes) { syscall(SYS_mbind, p, bytes, PREFERRED, &nodes, 64ul, 0ul); }
    return (char*)p;
}

/* Takes pinned and zeroed memory of the host. Threads touch it first, which takes most of the time, and a line shows how far
 * they are. Ends the program if the memory is not there. */
static inline void* memory_pin(size_t bytes, const char* name) {
    enum { TOUCHED = 256 << 20 };  // bytes, then the line may be written again
    char need[32], most[32], left[32];
    char* p = memory_map(bytes);
    Progress progress = progress_begin(stdout, "pin", bytes, "B");
    for (size_t at = 0, n; p && at < bytes; at += n) {
        n = size_min(TOUCHED, bytes - at);
#pragma omp parallel for
        for (int64_t k = 0; k < (int64_t)n; k += 4096) { ((volatile char*)p)[at + (size_t)k] = 0; }
        progress_add(&progress, n);
    }
    progress_end(&progress);
    const cudaError_t status = p ? cudaHostRegister(p, bytes, cudaHostRegisterDefault) : cudaErrorMemoryAllocation;
    if (status == cudaSuccess) { return p; }
    struct rlimit limit;
    const bool limited = getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
    die("out of main memory: could not pin %s for %s: %s; ulimit -l is %s, free for this process are %s\n"
        "  hint: --master split and --moments bf16 need less; docker run --ulimit memlock=-1, or .wslconfig, allow more",
        text_bytes(bytes, need, sizeof need), name, cudaGetErrorString(status),
        limited ? text_bytes(limit.rlim_cur, most, sizeof most) : "unlimited",
        text_bytes(host_memory_available(), left, sizeof left));
}

/* Takes `bytes` for what `name` says; ends the program if they are not there. `all`: the group of all ranks, for memory that
 * they exchange. */
static inline void* memory_take(MemoryPlace place, NcclGroup* all, size_t bytes, const char* name) {
    void* p = NULL;
    if (place == ON_HOST) { return memory_pin(bytes, name); }
    const cudaError_t status = place == ON_CARD_EXCHANGED ? nccl_alloc(all, &p, bytes) : cudaMalloc(&p, bytes);
    if (status != cudaSuccess) {
        die("out of GPU memory: could not allocate %.2f GiB for %s: %s\n  hint: does another process use the card?",
            (double)bytes / (1 << 30), name, cudaGetErrorString(status));
    }
    return p;
}

static inline void memory_give_back(MemoryPlace place, NcclGroup* all, void* p, size_t bytes) {
    if (!p) { return; }
    if (place == ON_CARD_EXCHANGED) { nccl_free(all, p); }
    if (place == ON_CARD) { CUDA_CHECK(cudaFree(p)); }
    if (place == ON_HOST) { CUDA_CHECK(cudaHostUnregister(p)); }
    if (place == ON_HOST) { munmap(p, bytes); }
}

/* Fills memory with a byte: of the card in the order of the stream, of the host at once. */
static inline void memory_fill(MemoryPlace place, void* p, int byte, size_t bytes, cudaStream_t stream) {
    if (place == ON_HOST) {
        memset(p, byte, bytes);
    } else {
        CUDA_CHECK(cudaMemsetAsync(p, byte, bytes, stream));
    }
}

// ---------------------------------------------------------------------------------------------------------------------

#define TEXT_OF(...) #__VA_ARGS__
#define TEXT_OF_MACRO(...) TEXT_OF(__VA_ARGS__)

/* Writes what the results depend on besides the run's options and plans: "BF16, CUDA 12.8 for 900, cuBLASLt 120803, NVIDIA
 * H200". */
static inline void device_build(const Device* d, char* out, size_t cap) {
    snprintf(out, cap, "%s, CUDA %d.%d for %s, cuBLASLt %zu, %.80s", PRECISION_NAME, __CUDACC_VER_MAJOR__, __CUDACC_VER_MINOR__,
             TEXT_OF_MACRO(__CUDA_ARCH_LIST__), cublasLtGetVersion(), d->name);
}

/* Returns the bytes that other processes and the driver leave to this one, its context included. */
static inline uint64_t device_memory(const Device* d) { return d->total - d->others - (d->missing ? 0 : DRIVER_REST); }

#endif
