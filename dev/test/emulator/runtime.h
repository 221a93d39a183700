/* runtime.h -- the functions that the emulator's parts call of each other.
 */
#ifndef EMULATOR_RUNTIME_H
#define EMULATOR_RUNTIME_H

#include <cuda_runtime.h>

#include <functional>

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

/* Draws a number below n from EMULATOR_SEED; without a seed always 0. */
unsigned emulator_choose(unsigned n);

/* Ends the program with a line that says which rule of a card it broke. */
[[noreturn]] void emulator_die(const char* format, ...) __attribute__((format(printf, 1, 2)));

#endif
