/* runner.cuh -- keeps steps in flight: the host queues a step and reads the metrics of the previous one. Each kind of
 * micro-step is captured in a CUDA graph. Validation batches are queued the same way, and their losses copied back.
 */
#ifndef LLMC_RUNNER_CUH
#define LLMC_RUNNER_CUH

#include "llmc/cuda/cuda_common.cuh"  // defines: CUDA_CHECK, copy_in
#include "llmc/gpu/feed.cuh"          // defines: IN_FLIGHT
#include "llmc/gpu/gradients.cuh"     // defines: Gradients, MicroKind, MICRO_FIRST, MICRO_LAST, MICRO_KINDS
#include "llmc/optim/step_state.cuh"  // defines: StepState, step_begin_cuda
#include "llmc/train/step.h"          // defines: Recipe, Metrics

/* Returns the kind of a step's micro-step k. The last one has its own with several processes, or gradients on the host. */
static inline MicroKind micro_kind(const Recipe* recipe, const Gradients* g, int k) {
    return (k == 0 ? MICRO_FIRST : 0u) | ((recipe->team || g->host) && k == recipe->accumulate - 1 ? MICRO_LAST : 0u);
}

/* Lists the kinds of micro-steps that a step has, in their order. Returns their number. */
static inline int micro_kinds(const Recipe* recipe, const Gradients* g, MicroKind list[MICRO_KINDS]) {
    int count = 0;
    for (int k = 0; k < recipe->accumulate; k++) {
        const MicroKind kind = micro_kind(recipe, g, k);
        if (count == 0 || list[count - 1] != kind) { list[count++] = kind; }
    }
    return count;
}

typedef struct {
    StepState* state;              // on the device
    StepState* decided;            // on the device: the state of an update beside the next step
    StepState* result[IN_FLIGHT];  // pinned
    cudaEvent_t begin[IN_FLIGHT], end[IN_FLIGHT];
    cudaGraphExec_t micro[MICRO_KINDS];  // NULL: not captured
    int64_t queued, reported;            // steps, counted from the schedule's step 0
    double busy_ms;                      // of the step reported last, up to the end of its backward pass; 0: one GPU
    cudaStream_t stream;

    const float* losses;            // (N) of the batch, on the device
    float* host_losses[IN_FLIGHT];  // (N) pinned
    cudaEvent_t losses_end[IN_FLIGHT];
    size_t num_losses;  // N
    uint64_t losses_queued, losses_read;
} Runner;

/* Makes the events. The model lays out the buffers. */
static inline void runner_open(Runner* t, cudaStream_t stream) {
    t->stream = stream;
    for (int i = 0; i < IN_FLIGHT; i++) {
        CUDA_CHECK(cudaEventCreate(&t->begin[i]));
        CUDA_CHECK(cudaEventCreate(&t->end[i]));
        t->losses_end[i] = event_new();
    }
}

static inline void runner_close(Runner* t) {
    for (int i = 0; i < IN_FLIGHT; i++) {
        CUDA_CHECK(cudaEventDestroy(t->begin[i]));
        CUDA_CHECK(cudaEventDestroy(t->end[i]));
        CUDA_CHECK(cudaEventDestroy(t->losses_end[i]));
    }
    for (int kind = 0; kind < MICRO_KINDS; kind++) {
        if (t->micro[kind]) { CUDA_CHECK(cudaGraphExecDestroy(t->micro[kind])); }
    }
}

/* Lays out the state of a step, and its copies on the host. */
static inline void runner_lay_out(Runner* t, Arena* device, Arena* pinned) {
    t->state = take<StepState>(device, 1);
    t->decided = take<StepState>(device, 1);
    for (int i = 0; i < IN_FLIGHT; i++) { t->result[i] = take<StepState>(pinned, 1); }
}

/* Lays out the copies of the losses (N) of a batch. */
static inline void runner_lay_out_losses(Runner* t, const float* losses, size_t N, Arena* pinned) {
    t->losses = losses;
    t->num_losses = N;
    for (int i = 0; i < IN_FLIGHT; i++) { t->host_losses[i] = take<float>(pinned, N); }
}

/* Puts a run's state on the device: the state of a checkpoint, or a new one. */
static inline void runner_restore(Runner* t, const TrainerState* run) {
    StepState s;
    memset(&s, 0, sizeof s);
    s.updates = (int64_t)run->updates;
    s.loss_window = run->loss;
    s.norm_window = run->grad_norm;
    s.loss_scale = (float)run->loss_scale;
    s.scale_good = (int32_t)run->scale_good;
    copy_in(t->state, &s, sizeof s, t->stream);
    t->queued = t->reported = (int64_t)run->step;
}

/* Waits for all that is queued, and returns the seconds of what `queue` then queues. */
template <typename Work>
static double runner_time(const Runner* t, const Work& queue) {
    CUDA_CHECK(cudaStreamSynchronize(t->stream));
    const double begin = now_seconds();
    queue();
    CUDA_CHECK(cudaStreamSynchronize(t->stream));
    return now_seconds() - begin;
}

/* Captures into the graph t->micro[kind] what `micro_step` queues. */
static inline void runner_capture(Runner* t, void (*micro_step)(void* model, const Recipe* recipe, MicroKind kind), void* model,
                                  const Recipe* recipe, MicroKind kind) {
    cudaGraph_t graph;
    CUDA_CHECK(cudaStreamBeginCapture(t->stream, cudaStreamCaptureModeThreadLocal));
    micro_step(model, recipe, kind);
    CUDA_CHECK(cudaStreamEndCapture(t->stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&t->micro[kind], graph, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));
}

/* Opens the next step; runner_end() closes it. */
static inline void runner_begin(Runner* t, double lr) {
    CUDA_CHECK(cudaEventRecord(t->begin[t->queued % IN_FLIGHT], t->stream));
    step_begin_cuda(t->state, t->queued, lr, t->stream);
}

/* Returns what the update reads while the next step begins. Its forward pass waits for the update. */
static inline const StepState* runner_keep_decided(const Runner* t) {
    CUDA_CHECK(cudaMemcpyAsync(t->decided, t->state, sizeof(StepState), cudaMemcpyDeviceToDevice, t->stream));
    return t->decided;
}

static inline void runner_end(Runner* t) {
    const int slot = (int)(t->queued++ % IN_FLIGHT);
    CUDA_CHECK(cudaMemcpyAsync(t->result[slot], t->state, sizeof(StepState), cudaMemcpyDeviceToHost, t->stream));
    CUDA_CHECK(cudaEventRecord(t->end[slot], t->stream));
}

/* Waits for the oldest queued step, updates the run's state, and returns the result; ms is the step's time on the GPU. */
static inline Metrics runner_wait(Runner* t, const Recipe* recipe) {
    const int slot = (int)(t->reported++ % IN_FLIGHT);
    Metrics r;
    float ms = 0;
    CUDA_CHECK(cudaEventSynchronize(t->end[slot]));
    CUDA_CHECK(cudaEventElapsedTime(&ms, t->begin[slot], t->end[slot]));
    const StepState* s = t->result[slot];
    t->busy_ms = 1e-6 * (double)(s->computed - s->began);
    TrainerState* run = recipe->run;
    run->step = (uint64_t)t->reported;
    run->tokens += recipe->tokens;
    run->updates = (uint64_t)s->updates;
    run->loss = s->loss_window;
    run->grad_norm = s->norm_window;
    run->loss_scale = s->loss_scale;
    run->scale_good = (uint64_t)s->scale_good;
    r.loss = s->loss;
    r.norm = s->norm;
    r.lr = s->lr;
    r.ms = ms;
    r.verdict = (UpdateVerdict)s->verdict;
    r.loss_z = s->loss_z;
    r.norm_z = s->norm_z;
    r.loss_scale = s->loss_scale;
    r.trained = s->trained;
    r.sources = s->sources;
    r.sources.count = recipe->data.num_sources;
    memcpy(r.quantised, s->quantised, sizeof r.quantised);
    return r;
}

/* Queues the copy of the batch's losses to the host. */
static inline void runner_queue_losses(Runner* t) {
    const int slot = (int)(t->losses_queued++ % IN_FLIGHT);
    CUDA_CHECK(
        cudaMemcpyAsync(t->host_losses[slot], t->losses, t->num_losses * sizeof(float), cudaMemcpyDeviceToHost, t->stream));
    CUDA_CHECK(cudaEventRecord(t->losses_end[slot], t->stream));
}

/* Returns the losses (N) of the oldest queued batch, valid until IN_FLIGHT more are queued. */
static inline const float* runner_wait_losses(Runner* t) {
    const int slot = (int)(t->losses_read++ % IN_FLIGHT);
    CUDA_CHECK(cudaEventSynchronize(t->losses_end[slot]));
    return t->host_losses[slot];
}

#endif
