/* nccl.cuh -- NCCL, opened at run time: a run on one GPU needs none, and the same program runs with the version that is there.
 *
 * nccl_open() looks for libnccl.so.2 where the loader looks (LD_LIBRARY_PATH, ldconfig), then in NCCL_HOME/lib, NCCL_HOME/lib64
 * and the CUDA toolkit. NCCL 2.19 is the oldest that will do. Functions that came later are NULL in an older library, and the
 * caller asks: `if (nccl.AlltoAll)`. The library stays loaded to the end of the program, since it has threads.
 *
 * Types and constants are those of nccl.h. Without it, or with one older than 2.19, LLMC_NCCL is 0: nccl_open() then fails and
 * says why, and nothing else is defined. A newer nccl.h than the library is fine: a ncclConfig_t tells its own size.
 *
 * What NCCL wants of its callers (its user guide, and the sources of 2.28):
 * - All ranks make the same calls with the same sizes in the same order on each communicator.
 * - CommWindowRegister is called by all ranks, with memory of MemAlloc at a multiple of 4096 bytes. Where GPUs cannot reach one
 *   another's memory it registers nothing symmetric and still succeeds; the collectives then run as usual.
 * - With NCCL_WIN_COLL_SYMMETRIC a collective's buffers lie at the same offset of the window on all ranks.
 * - Policy NCCL_CTA_POLICY_ZERO lets copy engines move the data of AllGather, AlltoAll, Gather and Scatter, if both buffers are
 *   in symmetric windows and all ranks on one host. Otherwise, and in all that reduces, NCCL launches its kernels as usual.
 * - The first call of a kind allocates and connects: it is made before a stream is captured.
 * - CommDestroy and CommAbort wait until each graph that captured a call of the communicator is destroyed: it goes first.
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
#define NCCL_OLDEST 21900  // as ncclGetVersion() tells it: 2.19.0, the first with ncclMemAlloc
#if defined(NCCL_VERSION_CODE) && NCCL_VERSION_CODE >= NCCL_OLDEST
#define LLMC_NCCL 1
#else
#define LLMC_NCCL 0
#endif

#if !LLMC_NCCL

typedef struct {
    int version;
} Nccl;

/* Fails: there was no nccl.h when the program was built. */
static inline bool nccl_open(Nccl* n, Error* e) {
    n->version = 0;
    return fail(e,
                "NCCL: this program was built without it, wanted for several GPUs\n"
                "  hint: install nccl.h of NCCL 2.19 or newer (libnccl-dev), or set NCCL_HOME, and build again");
}

#else

#include <dlfcn.h>
#include <limits.h>

/* F(version that has it first, type of the result, name without "nccl", arguments). Windows are void*, since nccl.h knows
 * ncclWindow_t only from 2.27 on. */
#define NCCL_FUNCTIONS(F)                                                                                                    \
    F(20000, ncclResult_t, GetVersion, (int* version))                                                                       \
    F(20000, const char*, GetErrorString, (ncclResult_t result))                                                             \
    F(21300, const char*, GetLastError, (ncclComm_t comm))                                                                   \
    F(20000, ncclResult_t, GetUniqueId, (ncclUniqueId * id))                                                                 \
    F(21400, ncclResult_t, CommInitRankConfig,                                                                               \
      (ncclComm_t * comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config))                                       \
    F(21400, ncclResult_t, CommFinalize, (ncclComm_t comm))                                                                  \
    F(20000, ncclResult_t, CommDestroy, (ncclComm_t comm))                                                                   \
    F(20400, ncclResult_t, CommAbort, (ncclComm_t comm))                                                                     \
    F(20400, ncclResult_t, CommGetAsyncError, (ncclComm_t comm, ncclResult_t * error))                                       \
    F(20000, ncclResult_t, GroupStart, (void))                                                                               \
    F(20000, ncclResult_t, GroupEnd, (void))                                                                                 \
    F(20700, ncclResult_t, Send,                                                                                             \
      (const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream))                 \
    F(20700, ncclResult_t, Recv,                                                                                             \
      (void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream))                         \
    F(20000, ncclResult_t, AllReduce,                                                                                        \
      (const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)) \
    F(20000, ncclResult_t, ReduceScatter,                                                                                    \
      (const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)) \
    F(20000, ncclResult_t, AllGather,                                                                                        \
      (const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream))                 \
    F(20000, ncclResult_t, Broadcast,                                                                                        \
      (const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream))       \
    F(21900, ncclResult_t, MemAlloc, (void** memory, size_t bytes))                                                          \
    F(21900, ncclResult_t, MemFree, (void* memory))                                                                          \
    F(22700, ncclResult_t, CommWindowRegister, (ncclComm_t comm, void* memory, size_t bytes, void** window, int flags))      \
    F(22700, ncclResult_t, CommWindowDeregister, (ncclComm_t comm, void* window))                                            \
    F(22800, ncclResult_t, AlltoAll,                                                                                         \
      (const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream))

typedef struct {
    int version;          // of the library, as ncclGetVersion() tells it: 22809 is 2.28.9
    char file[PATH_MAX];  // that the library was loaded from
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

/* Loads the library. If a file is there but cannot be loaded, the error tells the loader's reason. */
static inline void* nccl_load(Error* e) {
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

/* Waits until a non-blocking communicator has done what was asked for. Fails on its error and after `seconds`; the caller then
 * calls CommAbort(). */
static inline bool nccl_wait(const Nccl* n, ncclComm_t comm, double seconds, const char* what, Error* e) {
    for (const double start = now_seconds();;) {
        ncclResult_t state = ncclSuccess;
        if (!nccl_ok(n, n->CommGetAsyncError(comm, &state), comm, what, e) || !nccl_ok(n, state, comm, what, e)) {
            return false;
        }
        if (state == ncclSuccess) { return true; }
        if (now_seconds() - start > seconds) { return fail(e, "NCCL: %s: not done after %.0f s", what, seconds); }
        const struct timespec pause = {0, 1000000};
        nanosleep(&pause, NULL);
    }
}

#endif  // LLMC_NCCL
#endif
