/* optimizer.cuh -- what an optimizer's kernels update on the GPU: where weights, gradients and state lie. gpu/update.cuh calls
 * the kernels.
 */
#ifndef LLMC_OPTIMIZER_CUH
#define LLMC_OPTIMIZER_CUH

#include "llmc/cuda/cuda_common.cuh"  // defines: floatX
#include "llmc/matmul.cuh"            // defines: MatmulContext
#include "llmc/optim/optimizer.h"     // defines: MasterKind
#include "llmc/optim/step_state.cuh"  // defines: StepState

/* A stretch of the arena: a tensor, or tensors without a gap between them (q, k, v; gate, up), and the gap after it. It reaches
 * from `first`, a multiple of PARAM_ALIGN, to the next stretch's `first`; the last one reaches the arena's end. The list is
 * sorted and lies on the device.
 * The kernel cannot distinguish a gap from weights. Gaps stay zero because their gradients are zero: `grad` is as long as the
 * stretch, round_up(size, PARAM_ALIGN), and zero behind the tensor. */
typedef struct {
    size_t first;
    const float* grad;  // its separate fp32 gradients (norms; large tensors accumulated in fp32), or NULL
    uint32_t tensor;    // ordinal, for the random bits
    int32_t decays;     // whether weight decay acts on it
} OptimizerStretch;

/* The arenas. Parameter element i is params[i]; its master, m and v are at i - state_first, because a rank may hold only a part
 * of them. `grads` holds elements [grads_first, grads_end), the first at grads[0]; stretches outside this range have separate
 * gradients. state_first, grads_first and grads_end are multiples of OPTIMIZER_VECTOR. */
template <typename Grad>
struct OptimizerTensors {
    floatX* params;
    const Grad* grads;
    size_t grads_first, grads_end;
    void* master;  // float or uint16_t by MasterKind; unused for MASTER_NONE
    void* m;       // float or __nv_bfloat16
    void* v;
    size_t state_first;
    const OptimizerStretch* stretches;
    int num_stretches;
};

enum { OPTIMIZER_VECTOR = 8 };  // elements; ranges to update begin and end at multiples of this

/* Elements [first, first + count) of a matrix, for a rule that takes it whole. Each pointer points to element `first`. */
typedef struct {
    size_t first, count;
    double root;      // of the longer side
    uint32_t tensor;  // ordinal, for the random bits
    floatX* params;
    void* master;       // in the parts' form
    void* m;            // as well
    const void* grads;  // as well
    float* u;           // what `prepare` writes; may be `grads`
    const floatX* x;    // what `update` applies
} MatrixPart;

/* Parts that a launch takes. */
typedef struct {
    const MatrixPart* items;  // on the device
    int count;
    size_t most;  // elements of the largest
    MasterKind master_kind;
    bool bf16_moments, fp32_grads;
    uint64_t seed;  // of the random bits
} MatrixParts;

/* The stages of a rule of whole matrices (optimizer.h). Those by element do nothing unless state->verdict is UPDATE_APPLIED.
 * `matrix` takes `count` matrices of one shape, matrix_stride() apart, and writes floatX over them. */
typedef struct {
    void (*prepare)(const MatrixParts* parts, const StepState* state, const Hyperparameters* h, cudaStream_t stream);
    void (*update)(const MatrixParts* parts, const StepState* state, const Hyperparameters* h, cudaStream_t stream);
    void (*matrix)(MatmulContext* matmul, float* u, size_t rows, size_t cols, int count, void* scratch, cudaStream_t stream);
    double (*flops)(size_t rows, size_t cols);
} RuleKernels;

#endif
