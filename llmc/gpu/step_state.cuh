/* step_state.cuh -- all that changes from step to step, in one struct on the device: learning rate, mean loss, gradient norm,
 * and the decision whether to update. The oracles are adamw.h (the norm) and outlier.h.
 *
 * Kernels read the StepState, so a step needs no answer from the host and can be captured in a graph once. The host copies it
 * back one step late for the log, and at checkpoints. In order:
 *
 *   step_begin_cuda      sets the learning rate and the step's number, clears the sums
 *   loss_sum_cuda        for each micro-batch: adds its token losses, and counts its trained targets
 *   source_losses_cuda   the same by the source of each row, if the data has several (mix.h)
 *   norm_square_cuda     for each array of gradients: adds its sum of squares
 *   (several GPUs: sum loss_sum, trained and norm_square, neighboring fields, over the ranks here)
 *   step_decide_cuda     mean loss, norm, clip factor, outliers, loss scale; whether this step updates at all
 *   adamw_update_cuda    reads all of it (llmc/adamw.cuh)
 */
#ifndef LLMC_STEP_STATE_CUH
#define LLMC_STEP_STATE_CUH

#include "llmc/base/outlier.h"
#include "llmc/base/update.h"
#include "llmc/files/mix.h"  // defines: SourceLosses
#include "llmc/gpu/cuda_common.cuh"
#include "llmc/quantise.h"  // defines: QuantiseCounts, NUM_QUANTISED

typedef struct {
    // kept from step to step: what a checkpoint saves
    int64_t updates;      // AdamW steps applied so far
    float loss_scale;     // gradients are too large by this factor; 1 except in FP16
    int32_t scale_good;   // finite steps since loss_scale last changed
    Outlier loss_window;  // detectors
    Outlier norm_window;
    // of this step
    int64_t step;  // its number, also for the random bits
    SourceLosses sources;
    double loss_sum;     // of the losses of all tokens so far
    double trained;      // targets so far
    double norm_square;  // of the gradients, too large by loss_scale^2
    double lr;
    float loss;            // mean over the trained targets
    float norm;            // of the gradients, before clipping
    float loss_z, norm_z;  // z-scores of both against the last steps, NaN if these are too few
    int32_t verdict;       // an UpdateVerdict
    // what AdamW reads
    float grad_scale;        // clip factor * tokens / trained targets / loss_scale
    float step_size;         // lr / (1 - beta1^t)
    float sqrt_correction2;  // sqrt(1 - beta2^t)
    float decay;             // 1 - lr * weight_decay
    // of this step with --fp8, else zero
    QuantiseCounts quantised[NUM_QUANTISED];
} StepState;

enum { LOSS_SCALE_MAX_LOG2 = 24 };

// ---------------------------------------------------------------------------------------------------------------------
// the step's numbers

__global__ void step_begin_kernel(StepState* s, int64_t step, double lr) {
    s->step = step;
    s->lr = lr;
    s->loss_sum = 0;
    s->trained = 0;
    s->norm_square = 0;
}

/* Starts step `step` with learning rate `lr`. */
static inline void step_begin_cuda(StepState* state, int64_t step, double lr, cudaStream_t stream) {
    step_begin_kernel<<<1, 1, 0, stream>>>(state, step, lr);
    CUDA_CHECK_LAUNCH("step_begin_kernel");
}

__global__ void __launch_bounds__(1024) loss_sum_kernel(StepState* s, const float* losses, const int32_t* targets, size_t n) {
    __shared__ double shared[2][32];
    double sum = 0, trained = 0;
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) {
        sum += (double)losses[i];
        trained += targets[i] >= 0;
    }
    sum = block_sum(sum, shared[0]);
    trained = block_sum(trained, shared[1]);
    if (threadIdx.x == 0) {
        s->loss_sum += sum;
        s->trained += trained;
    }
}

/* Adds the sum of losses (n) to state->loss_sum, and the number of targets (n) that are not -1 to state->trained. */
static inline void loss_sum_cuda(StepState* state, const float* losses, const int32_t* targets, size_t n, cudaStream_t stream) {
    loss_sum_kernel<<<1, 1024, 0, stream>>>(state, losses, targets, n);
    CUDA_CHECK_LAUNCH("loss_sum_kernel");
}

/* Block s sums up the rows of source s. */
__global__ void __launch_bounds__(1024) source_losses_kernel(StepState* state, const float* losses, const int32_t* targets,
                                                             const int32_t* sources, int B, int T, bool first) {
    __shared__ double shared[2][32];
    const int s = blockIdx.x;
    double sum = 0, trained = 0;
    for (int b = 0; b < B; b++) {
        if (sources[b] != s) { continue; }
        for (int t = threadIdx.x; t < T; t += blockDim.x) {
            sum += (double)losses[(size_t)b * T + t];
            trained += targets[(size_t)b * T + t] >= 0;
        }
    }
    sum = block_sum(sum, shared[0]);
    trained = block_sum(trained, shared[1]);
    if (threadIdx.x == 0) {
        state->sources.sum[s] = (first ? 0 : state->sources.sum[s]) + sum;
        state->sources.tokens[s] = (first ? 0 : state->sources.tokens[s]) + trained;
    }
}

/* Adds the losses (B, T) and the number of trained targets (B, T) to state->sources, by the source of each row; overwrites them
 * if `first`.   sources: (B) */
static inline void source_losses_cuda(StepState* state, const float* losses, const int32_t* targets, const int32_t* sources,
                                      int num_sources, int B, int T, bool first, cudaStream_t stream) {
    source_losses_kernel<<<num_sources, 1024, 0, stream>>>(state, losses, targets, sources, B, T, first);
    CUDA_CHECK_LAUNCH("source_losses_kernel");
}

enum {
    NORM_BLOCKS = 4096,  // most partial sums of one call; fixed, so the order of additions depends on n only
    NORM_THREADS = 256,
    NORM_UNROLL = 4,
};

/* Returns the bytes of scratch that norm_square_cuda() needs. */
static inline size_t norm_square_scratch_cuda(void) { return NORM_BLOCKS * sizeof(double); }

/* Writes partial[block] = sum of squares of the block's share of g (n, a multiple of a vector). */
template <typename Grad>
__global__ void __launch_bounds__(NORM_THREADS) norm_partial_kernel(double* partial, const Grad* g, size_t n) {
    constexpr int W = VECTOR<Grad>;
    __shared__ double shared[32];
    const size_t round = (size_t)NORM_THREADS * NORM_UNROLL * W;
    double sum = 0;
    for (size_t start = blockIdx.x * round; start < n; start += gridDim.x * round) {
        Vec<Grad, W> x[NORM_UNROLL];
        float part = 0;
#pragma unroll
        for (int k = 0; k < NORM_UNROLL; k++) {
            const size_t i = start + (size_t)(k * NORM_THREADS + threadIdx.x) * W;
            if (i < n) {
                x[k] = load_vec<W>(g + i);
            } else {
#pragma unroll
                for (int j = 0; j < W; j++) { x[k].v[j] = from_float<Grad>(0.0f); }
            }
        }
#pragma unroll
        for (int k = 0; k < NORM_UNROLL; k++) {
#pragma unroll
            for (int j = 0; j < W; j++) { part += to_float(x[k].v[j]) * to_float(x[k].v[j]); }
        }
        sum += (double)part;
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) { partial[blockIdx.x] = sum; }
}

__global__ void __launch_bounds__(1024) norm_finish_kernel(StepState* s, const double* partial, int count) {
    __shared__ double shared[32];
    double sum = 0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) { sum += partial[i]; }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) { s->norm_square += sum; }
}

/* Adds the sum of squares of g (n) to state->norm_square. n is a multiple of 16 bytes. scratch: bytes as above */
template <typename Grad>
static void norm_square_cuda(StepState* state, void* scratch, const Grad* g, size_t n, cudaStream_t stream) {
    if (n == 0) { return; }
    assert(n % VECTOR<Grad> == 0 && is_aligned16(g));
    const size_t round = (size_t)NORM_THREADS * NORM_UNROLL * VECTOR<Grad>;
    const int blocks = (int)size_min(NORM_BLOCKS, ceil_div(n, round));
    norm_partial_kernel<<<blocks, NORM_THREADS, 0, stream>>>((double*)scratch, g, n);
    CUDA_CHECK_LAUNCH("norm_partial_kernel");
    norm_finish_kernel<<<1, 1024, 0, stream>>>(state, (const double*)scratch, blocks);
    CUDA_CHECK_LAUNCH("norm_finish_kernel");
}

__global__ void step_decide_kernel(StepState* s, StepHyper h) {
    const double scale = (double)s->loss_scale, factor = trained_factor(&h, s->trained);
    const double loss = s->loss_sum * h.loss_weight * factor, norm = sqrt(s->norm_square) / scale * factor;
    const double loss_z = outlier_update(&s->loss_window, loss), norm_z = outlier_update(&s->norm_window, norm);
    s->loss = (float)loss;
    s->norm = (float)norm;
    s->loss_z = (float)loss_z;
    s->norm_z = (float)norm_z;
    s->verdict = update_verdict(loss, norm, loss_z, norm_z, &h);
    s->grad_scale = (float)(clip_factor(norm, h.grad_clip) * factor / scale);
    if (s->verdict == UPDATE_APPLIED) {
        s->updates++;
        s->step_size = (float)(s->lr / (1.0 - pow(h.beta1, (double)s->updates)));
        s->sqrt_correction2 = (float)sqrt(1.0 - pow(h.beta2, (double)s->updates));
        s->decay = (float)(1.0 - s->lr * h.weight_decay);
    }
    if (h.scale_interval > 0) {
        if (s->verdict == UPDATE_NOT_FINITE) {
            s->loss_scale = fmaxf(s->loss_scale * 0.5f, 1.0f);
            s->scale_good = 0;
        } else if (++s->scale_good >= h.scale_interval) {
            s->loss_scale = fminf(s->loss_scale * 2.0f, (float)(1 << LOSS_SCALE_MAX_LOG2));
            s->scale_good = 0;
        }
    }
}

/* Computes the rest of StepState from the step's sums: loss, norm, scores, verdict, AdamW's factors, loss scale. */
static inline void step_decide_cuda(StepState* state, const StepHyper* hyper, cudaStream_t stream) {
    step_decide_kernel<<<1, 1, 0, stream>>>(state, *hyper);
    CUDA_CHECK_LAUNCH("step_decide_kernel");
}

#endif
