/* nccl.cuh -- NCCL, opened at run time: a run on one GPU needs none, and the same program runs with any installed version.
 *
 * nccl_open() looks for libnccl.so.2 where the loader looks (LD_LIBRARY_PATH, ldconfig), then in NCCL_HOME/lib, NCCL_HOME/lib64
 * and the CUDA toolkit. NCCL 2.19 is the oldest that will do. Functions that came later are NULL in an older library, and the
 * caller asks: `if (nccl.AlltoAll)`. The library stays loaded to the end of the program, since it has threads.
 *
 * Types and constants come from nccl.h. Without it, or with one older than 2.19, LLMC_NCCL is 0: nccl_open() then fails and
 * says why, and nothing else is defined. A newer nccl.h than the library is fine: a ncclConfig_t holds its own size, and a
 * setting that an older library refuses is given only to newer libraries.
 *
 * NCCL's rules for its callers (its user guide, and the sources of 2.28):
 * - All ranks make the same calls with the same sizes in the same order on each communicator.
 * - CommWindowRegister is called by all ranks, with memory of MemAlloc at a multiple of 4096 bytes. Where GPUs cannot reach one
 *   another's memory it registers nothing symmetric and still succeeds; the collectives then run as usual.
 * - With NCCL_WIN_COLL_SYMMETRIC a collective's buffers lie at the same offset of the window on all ranks.
 * - Policy NCCL_CTA_POLICY_ZERO lets copy engines move the data of AllGather, AlltoAll, Gather and Scatter, if both buffers are
 *   in symmetric windows and all ranks on one host. Otherwise, and in collectives that add, NCCL launches its kernels as usual.
 *   On two H200s this policy did not slow down a step of 1B, and NCCL took 0.43 GiB less (dev/results).
 * - The first call of a kind allocates and connects: it is made before a stream is captured.
 * - CommDestroy waits until each graph that captured a call of the communicator is destroyed: destroy the graphs first.
 * - Replays and other calls of one communicator follow one another: on one stream, or with events between.
 */
#ifndef LLMC_NCCL_CUH
#define LLMC_NCCL_CUH

#include "llmc/base/utils.h"

#if defined(__has_include)
#if __has_include(<nccl.h>)
#include <nccl.h>
#endif
#endif
#define NCCL_OLDEST 21900  // as ncclGetVersion() reports it: 2.19.0, the first with ncclMemAlloc
#if defined(NCCL_VERSION_CODE) && NCCL_VERSION_CODE >= NCCL_OLDEST
#define LLMC_NCCL 1
#else
#define LLMC_NCCL 0
#endif

/* The invitation that rank 0 writes and all ranks need to join. */
typedef struct {
    char bytes[128];
} NcclId;

/* The bytes that NCCL is expected to take of a card for a rank's first group, and for each further one: by nvidia-smi on two
 * H200s of one host with NCCL 2.28.3. Its kernels need more than the copy engines, which a build with an older NCCL lacks, and
 * which the variable turns off. */
static inline size_t nccl_expected_bytes(int groups) {
#ifdef NCCL_CTA_POLICY_ZERO
    const char* policy = getenv("NCCL_CTA_POLICY");
    const size_t first = policy && strcmp(policy, "2") != 0 ? 1344 : 900;
#else
    const size_t first = 1344;
#endif
    return groups > 0 ? (first + (size_t)(groups - 1) * 600) << 20 : 0;
}

#if !LLMC_NCCL

/* The ranks of a run, as NCCL connects them. */
typedef struct {
    int ranks;
} NcclGroup;

/* Fails: there was no nccl.h when the program was built. */
static inline bool nccl_invite(NcclId* id, Error* e) {
    (void)id;
    return fail(e,
                "NCCL: this program was built without it, wanted for several GPUs\n"
                "  hint: install nccl.h of NCCL 2.19 or newer (libnccl-dev), or set NCCL_HOME, and build again");
}
static inline bool nccl_join(NcclGroup* g, const NcclId* id, int rank, int ranks, double seconds, Error* e) {
    (void)g, (void)rank, (void)ranks, (void)seconds;
    return nccl_invite((NcclId*)id, e);
}
static inline void nccl_leave(NcclGroup* g) { (void)g; }
static inline cudaError_t nccl_alloc(NcclGroup*, void**, size_t) { return cudaErrorMemoryAllocation; }
static inline void nccl_free(const NcclGroup*, void*) {}
static inline void nccl_all_to_all(const NcclGroup*, const void*, void*, size_t, cudaStream_t, const char*) {}
static inline void nccl_all_to_all_parts(const NcclGroup*, const void*, void*, size_t, int, cudaStream_t, const char*) {}
static inline void nccl_all_gather(const NcclGroup*, const void*, void*, size_t, cudaStream_t, const char*) {}
static inline void nccl_broadcast(const NcclGroup*, void*, size_t, int, cudaStream_t, const char*) {}
static inline void nccl_begin(const NcclGroup*, const char*) {}
static inline void nccl_send(const NcclGroup*, const void*, size_t, int, cudaStream_t, const char*) {}
static inline void nccl_receive(const NcclGroup*, void*, size_t, int, cudaStream_t, const char*) {}
static inline void nccl_end(const NcclGroup*, const char*) {}

#else

#include <dlfcn.h>
#include <limits.h>

/* F(version that has it first, type of the result, name without "nccl", arguments). Windows are void*, since nccl.h knows
 * ncclWindow_t only from 2.27 on. */
#define NCCL_FUNCTIONS(F)                                                                                               \
    F(20000, ncclResult_t, GetVersion, (int* version))                                                                  \
    F(20000, const char*, GetErrorString, (ncclResult_t result))                                                        \
    F(21300, const char*, GetLastError, (ncclComm_t comm))                                                              \
    F(20000, ncclResult_t, GetUniqueId, (ncclUniqueId * id))                                                            \
    F(21400, ncclResult_t, CommInitRankConfig,                                                                          \
      (ncclComm_t * comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config))                                  \
    F(21400, ncclResult_t, CommFinalize, (ncclComm_t comm))                                                             \
    F(20000, ncclResult_t, CommDestroy, (ncclComm_t comm))                                                              \
    F(20400, ncclResult_t, CommGetAsyncError, (ncclComm_t comm, ncclResult_t * error))                                  \
    F(20000, ncclResult_t, GroupStart, (void))                                                                          \
    F(20000, ncclResult_t, GroupEnd, (void))                                                                            \
    F(20700, ncclResult_t, Send,                                                                                        \
      (const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream))            \
    F(20700, ncclResult_t, Recv,                                                                                        \
      (void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream))                    \
    F(20000, ncclResult_t, AllGather,                                                                                   \
      (const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream))            \
    F(20000, ncclResult_t, Broadcast,                                                                                   \
      (const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream))  \
    F(21900, ncclResult_t, MemAlloc, (void** memory, size_t bytes))                                                     \
    F(21900, ncclResult_t, MemFree, (void* memory))                                                                     \
    F(22700, ncclResult_t, CommWindowRegister, (ncclComm_t comm, void* memory, size_t bytes, void** window, int flags)) \
    F(22700, ncclResult_t, CommWindowDeregister, (ncclComm_t comm, void* window))                                       \
    F(22800, ncclResult_t, AlltoAll,                                                                                    \
      (const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream))

typedef struct {
    int version;          // of the library, as ncclGetVersion() reports it: 22809 is 2.28.9
    char file[PATH_MAX];  // file that the library was loaded from
#define NCCL_POINTER(since, result, name, arguments) result(*name) arguments;
    NCCL_FUNCTIONS(NCCL_POINTER)
#undef NCCL_POINTER
} Nccl;

typedef struct {
    char text[16];
} NcclVersion;

/* Writes a version as people do: 22809 becomes "2.28.9". Up to 2.8 the major version was counted in thousands. */
static inline NcclVersion nccl_version_text(int version) {
    NcclVersion v;
    const int major = version < 10000 ? 1000 : 10000;
    snprintf(v.text, sizeof v.text, "%d.%d.%d", version / major % 100, version % major / 100, version % 100);
    return v;
}

/* Loads the library. If a file exists but cannot be loaded, the error has the loader's reason. */
static inline void* nccl_load(Error* e) {
    setenv("NCCL_NVLS_ENABLE", "0", 0);  // ranks only move bytes: NVLink's multicast, which adds, has no use here
    static const char* const places[][2] = {{"", "libnccl.so.2"},
                                            {"NCCL_HOME", "lib/libnccl.so.2"},
                                            {"NCCL_HOME", "lib64/libnccl.so.2"},
                                            {"", "/usr/local/cuda/lib64/libnccl.so.2"},
                                            {"", "/usr/local/cuda/lib/libnccl.so.2"}};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        char path[PATH_MAX];
        const char* const home = places[i][0][0] ? getenv(places[i][0]) : "";
        if (!home || (places[i][0][0] && !home[0])) { continue; }
        snprintf(path, sizeof path, "%s%s%s", home, home[0] ? "/" : "", places[i][1]);
        void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (library) { return library; }
        const char* const reason = dlerror();
        if (reason && !strstr(reason, "No such file")) {
            fail(e, "%s: cannot be loaded: %s", path, reason);
            return NULL;
        }
    }
    fail(e,
         "libnccl.so.2: not found, wanted for several GPUs\n"
         "  hint: install NCCL (libnccl2), or name its folder in LD_LIBRARY_PATH or NCCL_HOME");
    return NULL;
}

/* Opens NCCL and finds its functions. Fails if it is missing or older than NCCL_OLDEST. */
static inline bool nccl_open(Nccl* n, Error* e) {
    memset(n, 0, sizeof *n);
    void* library = nccl_load(e);
    if (!library) { return false; }
    const char* missing = NULL;
#define NCCL_FIND(since, result, name, arguments)     \
    *(void**)&n->name = dlsym(library, "nccl" #name); \
    if (!n->name && since <= NCCL_OLDEST && !missing) { missing = "nccl" #name; }
    NCCL_FUNCTIONS(NCCL_FIND)
#undef NCCL_FIND
    Dl_info where;
    const bool known = n->GetVersion && dladdr((void*)n->GetVersion, &where) != 0 && where.dli_fname;
    snprintf(n->file, sizeof n->file, "%s", known ? where.dli_fname : "libnccl.so.2");
    if (!n->GetVersion || n->GetVersion(&n->version) != ncclSuccess) { return fail(e, "%s: tells no version", n->file); }
    if (n->version < NCCL_OLDEST) {
        return fail(e,
                    "%s: is NCCL %s, wanted %s or newer\n"
                    "  hint: install a newer NCCL, or name its folder in LD_LIBRARY_PATH",
                    n->file, nccl_version_text(n->version).text, nccl_version_text(NCCL_OLDEST).text);
    }
    if (missing) { return fail(e, "%s: NCCL %s lacks %s", n->file, nccl_version_text(n->version).text, missing); }
    return true;
}

/* Passes a result on. what: what was asked for ("all-gather of block 3"). ncclInProgress is no error; see nccl_wait(). */
static inline bool nccl_ok(const Nccl* n, ncclResult_t result, ncclComm_t comm, const char* what, Error* e) {
    if (result == ncclSuccess || result == ncclInProgress) { return true; }
    const char* const last = n->GetLastError(comm);
    return fail(e, "NCCL: %s: %s%s%s", what, n->GetErrorString(result), last && last[0] ? ": " : "", last ? last : "");
}

/* Waits until a non-blocking communicator has done what was asked for. Fails on its error and after `seconds`: then
 * it cannot be used any more. */
static inline bool nccl_wait(const Nccl* n, ncclComm_t comm, double seconds, const char* what, Error* e) {
    for (const double start = now_seconds();;) {
        ncclResult_t state = ncclSuccess;
        if (!nccl_ok(n, n->CommGetAsyncError(comm, &state), comm, what, e) || !nccl_ok(n, state, comm, what, e)) {
            return false;
        }
        if (state == ncclSuccess) { return true; }
        if (now_seconds() - start > seconds) { return fail(e, "NCCL: %s: not done after %.0f s", what, seconds); }
        const struct timespec pause = {0, 1000000};
        if (now_seconds() - start > 2e-3) { nanosleep(&pause, NULL); }  // a step's calls are done at once
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// the ranks of a run

enum { NCCL_WINDOWS = 8 };

typedef struct {
    Nccl api;
    ncclComm_t comm;
    int rank, ranks;
    void* windows[NCCL_WINDOWS];  // that nccl_alloc() registered
    int num_windows;
} NcclGroup;

/* Waits until the group has done what was asked for; ends the program if it cannot. */
static inline void nccl_must(const NcclGroup* g, ncclResult_t result, const char* what) {
    enum { NCCL_SECONDS = 60 };
    Error e = NO_ERROR;
    // even if the call succeeded: NCCL 2.28 also succeeds while it still registers a window
    must(nccl_ok(&g->api, result, g->comm, what, &e) && nccl_wait(&g->api, g->comm, NCCL_SECONDS, what, &e), &e);
}

/* Opens NCCL and writes the invitation of a new group. */
static inline bool nccl_invite(NcclId* id, Error* e) {
    Nccl n;
    ncclUniqueId unique;
    static_assert(sizeof unique == sizeof *id, "an id has 128 bytes");
    if (!nccl_open(&n, e) || !nccl_ok(&n, n.GetUniqueId(&unique), NULL, "a new group", e)) { return false; }
    memcpy(id, &unique, sizeof *id);
    return true;
}

/* Becomes rank `rank` of the group that `id` invites to, on the current device. All ranks call this; fails if one does not come
 * within `seconds`. */
static inline bool nccl_join(NcclGroup* g, const NcclId* id, int rank, int ranks, double seconds, Error* e) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId unique;
    memset(g, 0, sizeof *g);
    g->rank = rank;
    g->ranks = ranks;
    config.blocking = 0;
    memcpy(&unique, id, sizeof unique);
    if (!nccl_open(&g->api, e)) { return false; }
#ifdef NCCL_CTA_POLICY_ZERO
    if (g->api.version >= 22800) { config.CTAPolicy = NCCL_CTA_POLICY_ZERO; }  // 2.27 has policies, and refuses this one
#endif
    return nccl_ok(&g->api, g->api.CommInitRankConfig(&g->comm, ranks, unique, rank, &config), NULL, "joining", e) &&
           nccl_wait(&g->api, g->comm, seconds, "joining", e);
}

/* Leaves the group. Graphs that hold its calls are gone by then. */
static inline void nccl_leave(NcclGroup* g) {
    for (int i = 0; i < g->num_windows; i++) {
        nccl_must(g, g->api.CommWindowDeregister(g->comm, g->windows[i]), "leaving a window");
    }
    g->num_windows = 0;
    if (!g->comm) { return; }
    nccl_must(g, g->api.CommFinalize(g->comm), "leaving");
    g->api.CommDestroy(g->comm);  // frees what is left of it: nothing can be asked of it any more
    g->comm = NULL;
}

/* Takes memory of the GPU that all ranks may reach where the hardware lets them. All ranks call this in the same order, with
 * the same size. Fails if there is too little memory. */
static inline cudaError_t nccl_alloc(NcclGroup* g, void** memory, size_t bytes) {
    const Nccl* n = &g->api;
    if (n->MemAlloc(memory, bytes) != ncclSuccess) { return cudaErrorMemoryAllocation; }
#if NCCL_VERSION_CODE >= 22700
    if (n->CommWindowRegister && n->CommWindowDeregister && g->num_windows < NCCL_WINDOWS) {
        void** window = &g->windows[g->num_windows++];
        nccl_must(g, n->CommWindowRegister(g->comm, *memory, bytes, window, NCCL_WIN_COLL_SYMMETRIC), "a window");
    }
#endif
    return cudaSuccess;
}

/* Gives back what nccl_alloc() took, after nccl_leave(). */
static inline void nccl_free(const NcclGroup* g, void* memory) {
    if (g->api.MemFree(memory) != ncclSuccess) { die("NCCL: memory could not be given back"); }
}

/* Sends parts (k, r) of `from` (count, ranks, bytes) to rank r, and puts what rank r sent here into parts (r, k) of `to`
 * (ranks, count, bytes). */
static inline void nccl_all_to_all_parts(const NcclGroup* g, const void* from, void* to, size_t bytes, int count,
                                         cudaStream_t stream, const char* what) {
    const Nccl* n = &g->api;
    nccl_must(g, n->GroupStart(), what);
    for (int r = 0; r < g->ranks; r++) {
        for (int k = 0; k < count; k++) {
            const char* part = (const char*)from + ((size_t)k * (size_t)g->ranks + (size_t)r) * bytes;
            char* place = (char*)to + ((size_t)r * (size_t)count + (size_t)k) * bytes;
            nccl_must(g, n->Send(part, bytes, ncclUint8, r, g->comm, stream), what);
            nccl_must(g, n->Recv(place, bytes, ncclUint8, r, g->comm, stream), what);
        }
    }
    nccl_must(g, n->GroupEnd(), what);
}

/* Sends part r of `from` (ranks, bytes) to rank r, and puts what rank r sent here into part r of `to` (ranks, bytes). */
static inline void nccl_all_to_all(const NcclGroup* g, const void* from, void* to, size_t bytes, cudaStream_t stream,
                                   const char* what) {
    const Nccl* n = &g->api;
    if (n->AlltoAll) {
        nccl_must(g, n->AlltoAll(from, to, bytes, ncclUint8, g->comm, stream), what);
        return;
    }
    nccl_all_to_all_parts(g, from, to, bytes, 1, stream, what);
}

/* Puts every rank's `from` (bytes) into its part of `to` (ranks, bytes). `from` may be this rank's part of `to`. */
static inline void nccl_all_gather(const NcclGroup* g, const void* from, void* to, size_t bytes, cudaStream_t stream,
                                   const char* what) {
    nccl_must(g, g->api.AllGather(from, to, bytes, ncclUint8, g->comm, stream), what);
}

/* Copies rank `root`'s `memory` (bytes) to all ranks. */
static inline void nccl_broadcast(const NcclGroup* g, void* memory, size_t bytes, int root, cudaStream_t stream,
                                  const char* what) {
    nccl_must(g, g->api.Broadcast(memory, memory, bytes, ncclUint8, root, g->comm, stream), what);
}

/* Sends and receives (bytes) between nccl_begin() and nccl_end() are one operation. */
static inline void nccl_begin(const NcclGroup* g, const char* what) { nccl_must(g, g->api.GroupStart(), what); }
static inline void nccl_end(const NcclGroup* g, const char* what) { nccl_must(g, g->api.GroupEnd(), what); }
static inline void nccl_send(const NcclGroup* g, const void* from, size_t bytes, int to_rank, cudaStream_t stream,
                             const char* what) {
    nccl_must(g, g->api.Send(from, bytes, ncclUint8, to_rank, g->comm, stream), what);
}
static inline void nccl_receive(const NcclGroup* g, void* to, size_t bytes, int from_rank, cudaStream_t stream,
                                const char* what) {
    nccl_must(g, g->api.Recv(to, bytes, ncclUint8, from_rank, g->comm, stream), what);
}

#endif  // LLMC_NCCL
#endif
