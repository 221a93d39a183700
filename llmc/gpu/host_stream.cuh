/* host_stream.cuh -- arrays in the host's memory that kernels of the card update: they pass through the card piece by piece.
 *
 * A piece is copied into one of HOST_WINDOWS windows on the card, kernels update it there, and it is copied back. Copies have a
 * stream in each direction, since a card copies in both directions at a time. So piece k is updated while piece k + 1 arrives
 * and piece k - 1 leaves. The kernels are those of arrays on the card, so no bit depends on where the arrays lie.
 *
 *   in         | piece 0 -> window 0 | piece 1 -> window 1 | piece 2 -> window 2 | piece 3 -> window 0 | ...
 *   kernels                          | piece 0             | piece 1             | piece 2             | ...
 *   out                                    | window 0 -> piece 0 | window 1 -> piece 1 | window 2 -> piece 2 | ...
 *
 * The streams wait for each other by events alone. The host only queues.
 *
 *   stream that waits   for the event   recorded by the other stream   and may then
 *   in                  left            out: all that was queued       begin to read the arrays once more (host_stream_begin())
 *   in                  free            out: the window's last piece   copy another piece into the window
 *   kernels             there           in: the piece has arrived      update it
 *   out                 used            kernels: the piece is updated  copy it back
 *
 * The first pieces arrive before the kernels need them: `in` waits for no kernel but those that used its windows before.
 *
 * AdamW's kernels run on the exchange stream (exchange.cuh), beside the next forward pass. Those of whole matrices run on the
 * compute stream. The forward pass waits for each layer before it, and for all layers before the loss. Loss and backward pass
 * overwrite gradients, which the update has then read. Activations of a block lie in gradients of earlier layers alone
 * (gradients.cuh), which the update reads first. Gradients of blocks pass in the same way, through windows of a block each.
 */
#ifndef LLMC_HOST_STREAM_CUH
#define LLMC_HOST_STREAM_CUH

#include "llmc/cuda/cuda_common.cuh"  // defines: Arena, take, event_new, stream_wait
#include "llmc/cuda/ptx.cuh"          // defines: card_clock
#include "llmc/gpu/profile.cuh"       // defines: Profiler, Op

// Most elements of a piece. An H100 copied 43 to 45 GB/s each way, both ways at once, in copies of 64 MiB, 34 GB/s in copies of
// 4 MiB, and 23 GB/s in copies of 1 MiB. A piece has a copy for each array: of 16 MiB, or 32 in fp32.
#ifndef HOST_PIECE
#define HOST_PIECE (8 << 20)
#endif
// GB/s of each direction, at most. Only tests set it: a card then takes the time of a slower link. 0: no limit
#ifndef HOST_RATE
#define HOST_RATE 0
#endif
enum { HOST_WINDOWS = 3, HOST_ARRAYS = 5 };  // with two windows, a copy would wait for each update

/* An array in the host's memory. */
typedef struct {
    char* data;    // NULL: there is none
    size_t width;  // bytes of an element
    bool read;     // the kernels only read it: it does not go back
} HostArray;

typedef struct {
    char* data;  // (piece) elements of all arrays, one array after the other
    cudaEvent_t there, used, free;
} HostWindow;

typedef struct {
    size_t piece;   // elements
    size_t beside;  // bytes of an element of gradients, which pass with the state; 0: they lie on the card
    HostWindow windows[HOST_WINDOWS];
    HostWindow turns[HOST_WINDOWS];  // of the gradients of a block each (gradients.cuh)
    uint64_t pieces;                 // so far
    cudaStream_t in, out;
    cudaEvent_t left;
    uint64_t* begun;     // (3) on the card: nanoseconds at which the last copy in, out, and of a gather began
    Profiler* profiler;  // NULL: none
} HostStream;

/* Lays out windows for a state of `elements` at most, with `bytes` an element together. */
static inline void host_stream_lay_out(HostStream* s, size_t elements, size_t bytes, Arena* a) {
    s->piece = size_min(HOST_PIECE, round_up(elements, 256));
    for (HostWindow& w : s->windows) { w.data = take<char>(a, s->piece * (bytes + s->beside)); }
    s->begun = take<uint64_t>(a, 3);
}

/* Makes the streams and the events. These two, and host_stream_finish(), take NULL where nothing lies on the host. */
static inline void host_stream_open(HostStream* s) {
    if (!s) { return; }
    CUDA_CHECK(cudaStreamCreateWithFlags(&s->in, cudaStreamNonBlocking));
    CUDA_CHECK(cudaStreamCreateWithFlags(&s->out, cudaStreamNonBlocking));
    s->left = event_new();
    for (HostWindow* list : {s->windows, s->turns}) {
        for (HostWindow* w = list; w < list + HOST_WINDOWS; w++) {
            w->there = event_new(), w->used = event_new(), w->free = event_new();
        }
    }
}

static inline void host_stream_close(HostStream* s) {
    if (!s) { return; }
    CUDA_CHECK(cudaStreamDestroy(s->in));
    CUDA_CHECK(cudaStreamDestroy(s->out));
    CUDA_CHECK(cudaEventDestroy(s->left));
    for (const HostWindow* list : {s->windows, s->turns}) {
        for (const HostWindow* w = list; w < list + HOST_WINDOWS; w++) {
            for (cudaEvent_t event : {w->there, w->used, w->free}) { CUDA_CHECK(cudaEventDestroy(event)); }
        }
    }
}

/* Waits until the host has all that left the card. Then the host may read and write the arrays. */
static inline void host_stream_finish(const HostStream* s) {
    if (s) { CUDA_CHECK(cudaStreamSynchronize(s->out)); }
}

/* Call before elements pass that have passed before. */
static inline void host_stream_begin(HostStream* s) { stream_wait(s->in, s->out, s->left); }

/* Lets the next piece pass through the first window, so that the caller knows the windows of the following pieces. */
static inline void host_stream_align(HostStream* s) { s->pieces = round_up(s->pieces, HOST_WINDOWS); }

/* Holds a stream back until `bytes` could have passed since *begun. */
__global__ void host_pace_kernel(uint64_t* begun, double bytes) {
    while (bytes > 0 && (double)(card_clock() - *begun) * HOST_RATE < bytes) {}
    *begun = card_clock();
}

/* Call it with 0 before a copy on in, out, or a stream of gathers, and with its bytes after it. */
static inline void host_pace(const HostStream* s, cudaStream_t stream, double bytes) {
    if (HOST_RATE > 0) {
        host_pace_kernel<<<1, 1, 0, stream>>>(s->begun + (stream == s->in ? 0 : stream == s->out ? 1 : 2), bytes);
    }
    CUDA_CHECK_LAUNCH("host_pace_kernel");
}

/* Returns the bytes of an element of all arrays, or of those that go back. */
static inline double host_width(const HostArray arrays[HOST_ARRAYS], bool back) {
    size_t width = 0;
    for (int i = 0; i < HOST_ARRAYS; i++) { width += arrays[i].data && !(back && arrays[i].read) ? arrays[i].width : 0; }
    return (double)width;
}

/* Copies n elements from `first` on of each array into a window, or back. Writes where each array then lies on the card. */
static inline void host_window_copy(const HostWindow* w, const HostArray arrays[HOST_ARRAYS], size_t first, size_t n, bool back,
                                    void* parts[HOST_ARRAYS], cudaStream_t stream) {
    char* part = w->data;
    for (int i = 0; i < HOST_ARRAYS; i++) {
        const size_t bytes = n * arrays[i].width;
        parts[i] = arrays[i].data ? part : NULL;
        if (!arrays[i].data) { continue; }
        part += round_up(bytes, 256);
        if (back && arrays[i].read) { continue; }
        char* host = arrays[i].data + first * arrays[i].width;
        CUDA_CHECK(back ? cudaMemcpyAsync(host, parts[i], bytes, cudaMemcpyDeviceToHost, stream)
                        : cudaMemcpyAsync(parts[i], host, bytes, cudaMemcpyHostToDevice, stream));
    }
}

/* Queues the arrival of n elements of the arrays in a window, once it is free. */
static inline void host_window_arrive(const HostStream* s, const HostWindow* w, const HostArray arrays[HOST_ARRAYS],
                                      size_t first, size_t n, void* parts[HOST_ARRAYS], const char* name) {
    CUDA_CHECK(cudaStreamWaitEvent(s->in, w->free));
    Op op(s->profiler, s->in, name, 0, (double)n * host_width(arrays, false));
    host_pace(s, s->in, 0);
    host_window_copy(w, arrays, first, n, false, parts, s->in);
    host_pace(s, s->in, (double)n * host_width(arrays, false));
    CUDA_CHECK(cudaEventRecord(w->there, s->in));
}

/* Lets a stream wait for what arrives in a window. */
static inline void host_window_wait(const HostStream* s, const HostWindow* w, cudaStream_t stream, const char* name) {
    Op op(s->profiler, stream, name, 0, 0);
    CUDA_CHECK(cudaStreamWaitEvent(stream, w->there));
}

/* Queues the way back, behind all that `stream` has queued. The window is free afterwards. */
static inline void host_window_leave(const HostStream* s, const HostWindow* w, const HostArray arrays[HOST_ARRAYS],
                                     size_t first, size_t n, cudaStream_t stream, const char* name) {
    void* parts[HOST_ARRAYS];
    stream_wait(s->out, stream, w->used);
    Op op(s->profiler, s->out, name, 0, (double)n * host_width(arrays, true));
    host_pace(s, s->out, 0);
    host_window_copy(w, arrays, first, n, true, parts, s->out);
    host_pace(s, s->out, (double)n * host_width(arrays, true));
    CUDA_CHECK(cudaEventRecord(w->free, s->out));
}

/* Passes `count` elements of the arrays through the card: calls use(first, n, parts) for each piece, which queues on `stream`
 * the kernels that update n elements from `first` on; they lie at parts (HOST_ARRAYS) meanwhile. */
template <typename Use>
static void host_stream_pass(HostStream* s, const HostArray arrays[HOST_ARRAYS], size_t count, cudaStream_t stream,
                             const Use& use) {
    for (size_t first = 0, n; first < count; first += n) {
        const HostWindow* w = &s->windows[s->pieces++ % HOST_WINDOWS];
        void* parts[HOST_ARRAYS];
        n = size_min(s->piece, count - first);
        host_window_arrive(s, w, arrays, first, n, parts, "state from the host");
        host_window_wait(s, w, stream, "wait: state");
        use(first, n, parts);
        host_window_leave(s, w, arrays, first, n, stream, "state to the host");
    }
}

#endif
