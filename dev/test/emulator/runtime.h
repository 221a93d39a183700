/* runtime.h -- the functions that the emulator's parts call of each other.
 */
#ifndef EMULATOR_RUNTIME_H
#define EMULATOR_RUNTIME_H

#include <cuda_runtime.h>

#include <functional>
#include <map>

/* Queues work on a stream, after the works queued there. If a graph captures the stream, the graph gets the work, and each
 * launch runs it. The work runs later, on a thread of the emulator. */
void emulator_queue(cudaStream_t stream, std::function<void()> work);

/* Queues a kernel as emulator_queue() does if its launch is possible; else leaves and returns the error that CUDA would.
 * together: all blocks must be resident at once (a cooperative launch)   body: one thread of it */
cudaError_t emulator_launch(dim3 grid, dim3 block, size_t shared, cudaStream_t stream, bool together,
                            std::function<void()> body);

/* Returns how many blocks a multiprocessor holds, at most 4, if a block has `threads` threads and `shared` bytes of shared
 * memory. The emulated card counts no registers. */
int emulator_resident(int threads, size_t shared);

/* Runs all blocks of a grid, one after the other; body() is run by each thread. */
void emulator_run_grid(dim3 grid, dim3 block, size_t shared, const std::function<void()>& body);

/* Returns whether the host's memory is pinned there, so that kernels reach it. */
extern "C" bool emulator_is_pinned(const void* p);

/* Draws a number below n from EMULATOR_SEED; without a seed always 0. */
unsigned emulator_choose(unsigned n);

/* The sanitizer of shadow.cpp; nothing in other builds, except where memory comes from. */
#ifdef EMULATED_SANITIZE
#define SHADOW(function) function;
#define UNSEEN __attribute__((noinline, no_sanitize("thread")))  // an operation of the card, which says itself what it does
enum { SHADOW_GAP = 64 << 10 };                                  // before and behind dynamic shared memory
#else
#define SHADOW(function) \
    inline function {}
#define UNSEEN
enum { SHADOW_GAP = 0 };
#endif
typedef std::map<const void*, unsigned> ShadowWorks;  // works of streams
enum ShadowAccess { SHADOW_READ, SHADOW_WRITE, SHADOW_ATOMIC };
enum { SHADOW_SHARED = 231 << 10 };  // bytes of dynamic shared memory
#define SHADOW_HERE __builtin_return_address(0)

/* The running thread accesses memory. line: an address in the code that does it */
SHADOW(void shadow_access(const void*, size_t, ShadowAccess, const void*))
/* Does the same by an atomic operation, which also orders what comes before and after it, behind a fence. */
SHADOW(void shadow_atomic(const void*, size_t, const void*))
SHADOW(void shadow_fence(void))
/* What a thread did before it releases an object comes before what another does after it acquires the object. */
SHADOW(void shadow_release(const void*))
SHADOW(void shadow_acquire(const void*))
/* A copy that will write shared memory, or read it, has begun; it has ended. A line that is NULL is the caller's. */
SHADOW(void shadow_begins(const void*, size_t, ShadowAccess, const void*))
SHADOW(void shadow_ends(const void*, size_t))
/* TMA accesses memory from now on, or no longer. TMA or wgmma reads memory; what was written before is fenced for it. */
SHADOW(void shadow_copier(bool))
SHADOW(void shadow_copier_reads(const void*, size_t, const void*))
SHADOW(void shadow_proxy_fence(void))
/* A product of wgmma with sums in these registers has begun; it takes place from now on, or has ended; wgmma_fence(). */
SHADOW(void shadow_product(const void*, size_t))
SHADOW(void shadow_multiply(const void*, bool))
SHADOW(void shadow_product_fence(void))
/* The running thread comes to the block's barrier; the stacks of all threads */
SHADOW(void shadow_wait(const void*))
SHADOW(void shadow_stacks(const void*, size_t))
/* All threads of a block, or some lanes of some warps, have come to the same place. */
SHADOW(void shadow_barrier(void))
SHADOW(void shadow_meet(const unsigned*, unsigned, unsigned))
SHADOW(void shadow_grid(size_t, const void*))
SHADOW(void shadow_block(size_t))
SHADOW(void shadow_block_ended(void))
SHADOW(void shadow_refused(dim3, dim3, size_t, const void*))
SHADOW(void shadow_allow(const void*, size_t))
/* Some threads of a stuck block wait there. */
SHADOW(void shadow_stuck(unsigned, const void*))
/* Reports that the running thread broke a rule of the card. In a kernel it does not return, since the block cannot go on. */
SHADOW(void shadow_died(const char*, const void*))
/* Memory of the card was written by the running work, which is no kernel; from: NULL or the source, of which some may not be
 * written; the call that queued it */
SHADOW(void shadow_written(const void*, size_t, const void*, const void*))
/* A work knows what another one came after; it runs from now on, and is counted on its stream. */
SHADOW(void shadow_sees(ShadowWorks*, const ShadowWorks&))
SHADOW(void shadow_work(const void*, ShadowWorks*))
/* Names a tensor (rows, width) with a pitch, of elements of `each` bytes; whether kernels only read it. */
SHADOW(void shadow_name(const void*, const char*, size_t, size_t, size_t, size_t, bool))
#ifdef EMULATED_SANITIZE
void* shadow_take(size_t bytes, bool pinned);  // pinned: the host writes there, too
void shadow_give_back(void* p, const void* line);
unsigned shadow_faults(void);  // how many so far
#endif

/* Ends the program with a line that says which rule of a card it broke. */
[[noreturn]] void emulator_die(const char* format, ...) __attribute__((format(printf, 1, 2)));

#endif
