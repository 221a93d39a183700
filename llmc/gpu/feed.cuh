/* feed.cuh -- brings batches of tokens to the GPU. The host reads them into pinned memory. The feed's own stream copies them to
 * the device while the GPU computes. The model's stream then puts them in place in its own order. Training and validation share
 * one feed. Steps: dev/cuda/overlap.cu.
 */
#ifndef LLMC_FEED_CUH
#define LLMC_FEED_CUH

#include "llmc/cuda/cuda_common.cuh"
#include "llmc/train/step.h"  // defines: BatchSource, batch_read

enum { IN_FLIGHT = 2 };  // steps or batches that may be queued

typedef struct {
    int B, T;
    int parts;                 // T counts the tokens of one of so many parts of a row (--seq-parallel); starts cover whole rows
    int32_t *x, *y;            // (B, T) on the device: the model's tokens and targets; sources and starts follow them
    int32_t* sources;          // (B) the source of each row, if the data has several
    int32_t* starts;           // (B, T parts) where each token's document starts in its row, or NULL (one a row)
    int32_t* starts_room;      // memory for `starts`, if the data has documents; otherwise NULL
    int32_t* host[IN_FLIGHT];  // pinned: the same numbers in this order
    int32_t* device[IN_FLIGHT];  // on the device
    cudaEvent_t copied[IN_FLIGHT], consumed[IN_FLIGHT];
    cudaStream_t stream, copy_stream;  // the model's stream, and the feed's own
    uint64_t batches;
} Feed;

/* Makes streams and events. The model lays out the buffers. */
static inline void feed_open(Feed* f, cudaStream_t stream) {
    f->stream = stream;
    CUDA_CHECK(cudaStreamCreateWithFlags(&f->copy_stream, cudaStreamNonBlocking));
    for (int i = 0; i < IN_FLIGHT; i++) {
        f->copied[i] = event_new();
        f->consumed[i] = event_new();
    }
}

static inline void feed_close(Feed* f) {
    for (int i = 0; i < IN_FLIGHT; i++) {
        CUDA_CHECK(cudaEventDestroy(f->copied[i]));
        CUDA_CHECK(cudaEventDestroy(f->consumed[i]));
    }
    CUDA_CHECK(cudaStreamDestroy(f->copy_stream));
}

/* Returns the number of a batch's starts. */
static inline size_t feed_num_starts(const Feed* f) { return (size_t)f->B * f->T * f->parts; }

/* Lays out the buffers of a feed of batches (B, T), where T is the length of one of `parts` parts of a row. documents: rows
 * may hold several documents */
static inline void feed_lay_out(Feed* f, int B, int T, int parts, bool documents, Arena* device, Arena* pinned) {
    const size_t N = (size_t)B * T, starts = documents ? N * parts : 0, slot = 2 * N + B + starts;
    f->B = B;
    f->T = T;
    f->parts = parts;
    f->x = take<int32_t>(device, slot);
    f->y = f->x + N;
    f->sources = f->y + N;
    f->starts_room = starts > 0 ? f->sources + B : NULL;
    for (int i = 0; i < IN_FLIGHT; i++) {
        f->device[i] = take<int32_t>(device, slot);
        f->host[i] = take<int32_t>(pinned, slot);
    }
}

/* Makes a batch of zeros, for micro-steps whose results nobody reads. */
static inline void feed_clear(const Feed* f) {
    const size_t bytes = (size_t)f->B * f->T * sizeof(int32_t);
    CUDA_CHECK(cudaMemsetAsync(f->x, 0, bytes, f->stream));
    CUDA_CHECK(cudaMemsetAsync(f->y, 0, bytes, f->stream));
    if (f->starts) { CUDA_CHECK(cudaMemsetAsync(f->starts, 0, feed_num_starts(f) * sizeof(int32_t), f->stream)); }
}

/* Decides whether rows of `data` are one document each. Steps captured in a graph keep what was decided before. */
static inline void feed_aim(Feed* f, const BatchSource* data) { f->starts = data->starts ? f->starts_room : NULL; }

/* Queues the next batch of `data` for x and y, and starts if it has some. Queues nothing if it cannot be read. */
static inline bool feed_next(Feed* f, const BatchSource* data, Error* e) {
    const size_t N = (size_t)f->B * f->T, B = f->B, num_starts = feed_num_starts(f);
    const size_t count = data->starts ? 2 * N + B + num_starts : data->num_sources > 0 ? 2 * N + B : 2 * N;
    const int slot = (int)(f->batches % IN_FLIGHT);
    int32_t* host = f->host[slot];
    CUDA_CHECK(cudaEventSynchronize(f->copied[slot]));  // the copy of IN_FLIGHT batches ago: frees the pinned memory
    if (!batch_read(data, f->B, f->T, host, host + N, e)) { return false; }
    if (data->num_sources > 0) { memcpy(host + 2 * N, data->sources, B * sizeof(int32_t)); }
    if (data->starts) { memcpy(host + 2 * N + B, data->starts, num_starts * sizeof(int32_t)); }
    feed_aim(f, data);
    f->batches++;
    CUDA_CHECK(cudaStreamWaitEvent(f->copy_stream, f->consumed[slot]));
    CUDA_CHECK(cudaMemcpyAsync(f->device[slot], host, count * sizeof(int32_t), cudaMemcpyHostToDevice, f->copy_stream));
    stream_wait(f->stream, f->copy_stream, f->copied[slot]);
    CUDA_CHECK(cudaMemcpyAsync(f->x, f->device[slot], count * sizeof(int32_t), cudaMemcpyDeviceToDevice, f->stream));
    CUDA_CHECK(cudaEventRecord(f->consumed[slot], f->stream));
    return true;
}

#endif
