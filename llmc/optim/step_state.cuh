/* step_state.cuh -- all that changes from step to step, in one struct on the device: learning rate, mean loss, gradient norm,
 * and the decision whether to update. The oracles are optimizer.h (the norm) and recipe.h.
 *
 * Kernels read the StepState, so a step needs no answer from the host and can be captured in a graph once. The host copies it
 * back one step late for the log, and at checkpoints. In order:
 *
 *   step_begin_cuda      sets the learning rate and the step's number, clears the sums
 *   loss_sum_cuda        for each micro-batch: adds its token losses, and counts its trained targets; both also by the source
 *                        of each row, if the data has several (mix.h)
 *   norm_square_cuda     for each array of gradients: its sum of squares, in parts
 *   (several GPUs: the exchange makes these parts with its sums; exchange_sum_step() adds up the StepStates in rank order)
 *   step_decide_cuda     adds up these parts; mean loss, norm, clip factor, outliers, loss scale; whether this step updates
 *   the optimizer        reads all of it (gpu/update.cuh)
 */
#ifndef LLMC_STEP_STATE_CUH
#define LLMC_STEP_STATE_CUH

#include "llmc/base/sources.h"  // defines: SourceLosses
#include "llmc/optim/recipe.h"  // defines: outlier_update, Hyperparameters, update_verdict
#include "llmc/cuda/cuda_common.cuh"
#include "llmc/cuda/ptx.cuh"  // defines: card_clock
#include "llmc/quantise.h"    // defines: QuantiseCounts, NUM_QUANTISED

typedef struct {
    // kept from step to step: what a checkpoint saves
    int64_t updates;      // updates applied so far
    float loss_scale;     // gradients are too large by this factor; 1 except in FP16
    int32_t scale_good;   // finite steps since loss_scale last changed
    Outlier loss_window;  // detectors
    Outlier norm_window;
    // of this step
    int64_t step;  // its number, also for the random bits
    SourceLosses sources;
    double loss_sum;     // sum of the losses of all tokens so far
    double trained;      // targets so far
    double norm_square;  // squared norm of the gradients, too large by loss_scale^2
    double lr;
    float loss;            // mean over the trained targets
    float norm;            // norm of the gradients, before clipping
    float loss_z, norm_z;  // z-scores of loss and norm against the last steps, NaN if there are too few
    int32_t verdict;       // an UpdateVerdict
    // for the optimizer
    float grad_scale;          // clip factor * tokens / trained targets / loss_scale
    float step_size;           // lr / (1 - beta1^t)
    float sqrt_correction2;    // sqrt(1 - beta2^t)
    float decay;               // 1 - lr * weight_decay
    uint64_t began, computed;  // nanoseconds of the card's clock: the step, and with several GPUs the end of its backward pass
    // counts of this step with --fp8, otherwise zero
    QuantiseCounts quantised[NUM_QUANTISED];
} StepState;

enum { LOSS_SCALE_MAX_LOG2 = 24 };

// ---------------------------------------------------------------------------------------------------------------------
// the step's numbers

__global__ void step_begin_kernel(StepState* s, int64_t step, double lr) {
    s->began = s->computed = card_clock();
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

__global__ void step_computed_kernel(StepState* s) { s->computed = card_clock(); }

/* Stores the time at which the step's backward pass is done, before the ranks wait for one another. */
static inline void step_computed_cuda(StepState* state, cudaStream_t stream) {
    step_computed_kernel<<<1, 1, 0, stream>>>(state);
    CUDA_CHECK_LAUNCH("step_computed_kernel");
}

/* Block 0 sums up all rows, block 1 + s the rows of source s. */
__global__ void __launch_bounds__(1024) loss_sum_kernel(StepState* state, const float* losses, const int32_t* targets,
                                                        const int32_t* sources, int B, int T, bool first) {
    __shared__ double shared[2][32];
    const int s = (int)blockIdx.x - 1;
    double sum = 0, trained = 0;
    if (s < 0) {
        for (size_t i = threadIdx.x, n = (size_t)B * T; i < n; i += blockDim.x) {
            sum += (double)losses[i];
            trained += targets[i] >= 0;
        }
    }
    for (int b = 0; s >= 0 && b < B; b++) {
        if (sources[b] != s) { continue; }
        for (int t = threadIdx.x; t < T; t += blockDim.x) {
            sum += (double)losses[(size_t)b * T + t];
            trained += targets[(size_t)b * T + t] >= 0;
        }
    }
    sum = block_sum(sum, shared[0]);
    trained = block_sum(trained, shared[1]);
    if (threadIdx.x != 0) { return; }
    if (s < 0) {
        state->loss_sum += sum;
        state->trained += trained;
    } else {
        state->sources.sum[s] = (first ? 0 : state->sources.sum[s]) + sum;
        state->sources.tokens[s] = (first ? 0 : state->sources.tokens[s]) + trained;
    }
}

/* Adds the sum of losses (B, T) to state->loss_sum, and the number of targets (B, T) that are not -1 to state->trained. With
 * num_sources > 0, also adds both to state->sources by the source of each row, or overwrites them if `first`.   sources: (B) */
static inline void loss_sum_cuda(StepState* state, const float* losses, const int32_t* targets, const int32_t* sources,
                                 int num_sources, int B, int T, bool first, cudaStream_t stream) {
    loss_sum_kernel<<<1 + num_sources, 1024, 0, stream>>>(state, losses, targets, sources, B, T, first);
    CUDA_CHECK_LAUNCH("loss_sum_kernel");
}

enum {
    NORM_BLOCKS = 4096,  // most partial sums of one call; fixed, so the order of additions depends on n only
    NORM_THREADS = 256,
    NORM_UNROLL = 4,
    NORM_LISTS = 2,  // arrays of gradients, at most
};

/* The partial sums of squares of a step's gradients, a list for each array. */
typedef struct {
    double* partial[NORM_LISTS];  // on the device
    int count[NORM_LISTS];        // of each list
    int lists;
} NormSums;

/* Returns the bytes of scratch that norm_sums() needs. */
static inline size_t norm_square_scratch_cuda(void) { return NORM_LISTS * NORM_BLOCKS * sizeof(double); }

static inline NormSums norm_sums(void* scratch) {
    NormSums s;
    memset(&s, 0, sizeof s);
    for (int i = 0; i < NORM_LISTS; i++) { s.partial[i] = (double*)scratch + (size_t)i * NORM_BLOCKS; }
    return s;
}

/* Writes partial[row][block] = sum of squares of the block's share of a row of g (rows, n), n a multiple of a vector. */
template <typename Grad>
__global__ void __launch_bounds__(NORM_THREADS) norm_partial_kernel(double* partial, const Grad* g, size_t n) {
    constexpr int W = VECTOR<Grad>;
    __shared__ double shared[32];
    g += blockIdx.y * n;
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
    if (threadIdx.x == 0) { partial[blockIdx.y * gridDim.x + blockIdx.x] = sum; }
}

/* Queues the sums of squares of g (rows, n), rows of a multiple of 16 bytes, in `most` parts of a row at most. Returns their
 * number; with g NULL that is all. */
template <typename Grad>
static int norm_partial_cuda(double* partial, const Grad* g, int rows, size_t n, int most, cudaStream_t stream) {
    assert(n % VECTOR<Grad> == 0 && is_aligned16(g));
    const size_t round = (size_t)NORM_THREADS * NORM_UNROLL * VECTOR<Grad>;
    const int blocks = (int)size_min((size_t)most, ceil_div(n, round));
    if (g && blocks > 0) { norm_partial_kernel<<<dim3(blocks, rows), NORM_THREADS, 0, stream>>>(partial, g, n); }
    CUDA_CHECK_LAUNCH("norm_partial_kernel");
    return rows * blocks;
}

/* Queues the sums of squares of g (n), a multiple of 16 bytes, as the next list of `sums`. */
template <typename Grad>
static void norm_square_cuda(NormSums* sums, const Grad* g, size_t n, cudaStream_t stream) {
    if (n == 0) { return; }
    assert(sums->lists < NORM_LISTS);
    sums->count[sums->lists] = norm_partial_cuda(sums->partial[sums->lists], g, 1, n, NORM_BLOCKS, stream);
    sums->lists++;
}

enum { SUM_BLOCKS = 264, SUM_THREADS = 256 };

/* out (n) = parts[0] + parts[1] + ... of all ranks, (n) each, added in rank order in fp32; with ADD `out` plus this sum.
 * Each block writes the sum of squares of its share of `out` to partials (SUM_BLOCKS). n is a multiple of a vector. */
template <typename Grad, bool ADD>
__global__ void __launch_bounds__(SUM_THREADS)
    ordered_sum_kernel(float* out, double* partials, const Grad* parts, int ranks, size_t n) {
    constexpr int W = VECTOR<Grad>;
    __shared__ double shared[32];
    double squares = 0;
    for (size_t i = ((size_t)blockIdx.x * SUM_THREADS + threadIdx.x) * W; i < n; i += (size_t)SUM_BLOCKS * SUM_THREADS * W) {
        Vec<Grad, W> part = load_stream<W>(parts + i);
        Vec<float, W> sum;
        float square = 0;
#pragma unroll
        for (int k = 0; k < W; k++) { sum.v[k] = to_float(part.v[k]); }
        for (int r = 1; r < ranks; r++) {
            part = load_stream<W>(parts + (size_t)r * n + i);
#pragma unroll
            for (int k = 0; k < W; k++) { sum.v[k] += to_float(part.v[k]); }
        }
        if constexpr (ADD) {
            const Vec<float, W> before = load_stream<W>(out + i);
#pragma unroll
            for (int k = 0; k < W; k++) { sum.v[k] = before.v[k] + sum.v[k]; }
        }
#pragma unroll
        for (int k = 0; k < W; k++) { square += sum.v[k] * sum.v[k]; }
        squares += (double)square;
        store_vec(out + i, sum);
    }
    squares = block_sum(squares, shared);
    if (threadIdx.x == 0) { partials[blockIdx.x] = squares; }
}

/* Adds up gradients (ranks, n) as above; with `add` onto `out`. */
static inline void ordered_sum_cuda(float* out, double* partials, const void* parts, bool fp32, int ranks, size_t n, bool add,
                                    cudaStream_t stream) {
    if (fp32) {
        auto* kernel = add ? ordered_sum_kernel<float, true> : ordered_sum_kernel<float, false>;
        kernel<<<SUM_BLOCKS, SUM_THREADS, 0, stream>>>(out, partials, (const float*)parts, ranks, n);
    } else {
        auto* kernel = add ? ordered_sum_kernel<floatX, true> : ordered_sum_kernel<floatX, false>;
        kernel<<<SUM_BLOCKS, SUM_THREADS, 0, stream>>>(out, partials, (const floatX*)parts, ranks, n);
    }
    CUDA_CHECK_LAUNCH("ordered_sum_kernel");
}

enum {
    NORM_SUM_THREADS = 256,  // few enough for the registers of the decision
    NORM_SUM_EACH = 4,       // sums of a thread: 1024 in all, 32 for each warp's turn; this fixes the order of additions
};

/* Returns the sum of a list in every thread of a block of NORM_SUM_THREADS. */
__device__ __forceinline__ double norm_list_sum(const double* partial, int count, double (&shared)[32]) {
    constexpr int ALL = NORM_SUM_THREADS * NORM_SUM_EACH;
    static_assert(ALL == 32 * 32, "a sum for each lane of 32 warps");
#pragma unroll
    for (int k = 0; k < NORM_SUM_EACH; k++) {
        double sum = 0;
        for (int i = k * NORM_SUM_THREADS + threadIdx.x; i < count; i += ALL) { sum += partial[i]; }
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) { shared[(k * NORM_SUM_THREADS + threadIdx.x) / 32] = sum; }
    }
    __syncthreads();
    return warp_sum(shared[threadIdx.x % 32]);
}

__global__ void __launch_bounds__(NORM_SUM_THREADS) norm_finish_kernel(StepState* s, const double* partial, int count) {
    __shared__ double shared[32];
    const double sum = norm_list_sum(partial, count, shared);
    if (threadIdx.x == 0) { s->norm_square += sum; }
}

/* Adds a list (count) to state->norm_square. */
static inline void norm_finish_cuda(StepState* state, const double* partial, int count, cudaStream_t stream) {
    norm_finish_kernel<<<1, NORM_SUM_THREADS, 0, stream>>>(state, partial, count);
    CUDA_CHECK_LAUNCH("norm_finish_kernel");
}

static_assert(sizeof(Outlier) % sizeof(uint64_t) == 0, "a window is copied in words of 64 bits");

/* Copies a window by all threads of the block. */
__device__ __forceinline__ void copy_window(Outlier* to, const Outlier* from) {
    for (int i = threadIdx.x; i < (int)(sizeof(Outlier) / sizeof(uint64_t)); i += blockDim.x) {
        ((uint64_t*)to)[i] = ((const uint64_t*)from)[i];
    }
}

/* One block: all threads add up the lists and bring the windows into shared memory. Then one thread each of four warps scores
 * the loss, scores the norm, and computes the powers for a step that is applied. All sums have the order of the C code. */
__global__ void __launch_bounds__(NORM_SUM_THREADS) step_decide_kernel(StepState* s, NormSums sums, Hyperparameters h) {
    __shared__ double shared[NORM_LISTS][32];
    __shared__ Outlier loss_window, norm_window;
    __shared__ double loss, norm, loss_z, norm_z, power1, power2;
    copy_window(&loss_window, &s->loss_window);
    copy_window(&norm_window, &s->norm_window);
    double norm_square = s->norm_square;
#pragma unroll
    for (int i = 0; i < NORM_LISTS; i++) { norm_square += norm_list_sum(sums.partial[i], sums.count[i], shared[i]); }
    const double scale = (double)s->loss_scale, factor = trained_factor(&h, s->trained);
    if (threadIdx.x == 0) {
        loss = s->loss_sum * h.loss_weight * factor;
        loss_z = outlier_update(&loss_window, loss);
    } else if (threadIdx.x == 32) {
        norm = sqrt(norm_square) / scale * factor;
        norm_z = outlier_update(&norm_window, norm);
    } else if (threadIdx.x == 64) {
        power1 = pow(h.beta1, (double)(s->updates + 1));
    } else if (threadIdx.x == 96) {
        power2 = pow(h.beta2, (double)(s->updates + 1));
    }
    __syncthreads();
    copy_window(&s->loss_window, &loss_window);
    copy_window(&s->norm_window, &norm_window);
    if (threadIdx.x != 0) { return; }
    s->norm_square = norm_square;
    s->loss = (float)loss;
    s->norm = (float)norm;
    s->loss_z = (float)loss_z;
    s->norm_z = (float)norm_z;
    s->verdict = update_verdict(loss, norm, loss_z, norm_z, &h);
    s->grad_scale = (float)(clip_factor(norm, h.grad_clip) * factor / scale);
    if (s->verdict == UPDATE_APPLIED) {
        s->updates++;
        s->step_size = (float)(s->lr / (1.0 - power1));
        s->sqrt_correction2 = (float)sqrt(1.0 - power2);
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

/* Computes the rest of StepState from the step's sums: loss, norm, scores, verdict, the optimizer's factors, loss scale.
 * sums: added to state->norm_square first; with several GPUs they are empty */
static inline void step_decide_cuda(StepState* state, const NormSums* sums, const Hyperparameters* hyper, cudaStream_t stream) {
    step_decide_kernel<<<1, NORM_SUM_THREADS, 0, stream>>>(state, *sums, *hyper);
    CUDA_CHECK_LAUNCH("step_decide_kernel");
}

#endif
