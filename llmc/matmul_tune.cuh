/* matmul_tune.cuh -- other algorithms for the matrix products: which there are, how --tune times them inside of a running step,
 * and the file that keeps the choices.
 *
 * Candidates of a product are the heuristic's algorithms (cublasLtMatmulAlgoGetHeuristic), the first one foremost, and variants
 * of the best of them with other cluster shapes, another order of blocks (CTA swizzling), other tiles and other numbers of
 * stages (the cuBLAS manual, "cuBLASLt API"). All of them pass cublasLtMatmulAlgoCheck, fit into our workspace and sum in a
 * fixed order: what splits k joins the parts in fp32 behind it. So any choice gives the same bits from run to run.
 *
 * matmul_trials.h decides. MatmulTuner stands between its numbers and cuBLASLt: while it listens, matmul_product() asks it for
 * the algorithm of each call, and an event before and behind the call tell how long it took, at the clock and the power of the
 * step that runs. gpu/tune.cuh runs the steps. files/matmul_plans.h describes the plan file; runs with one plan file are
 * bitwise equal.
 */
#ifndef LLMC_MATMUL_TUNE_CUH
#define LLMC_MATMUL_TUNE_CUH

#include "llmc/files/matmul_plans.h"  // defines: MatmulSetup, matmul_plans_write, matmul_plans_read
#include "llmc/matmul.cuh"
#include "llmc/matmul_trials.h"  // defines: Trials, TRIALS_CANDIDATES, trials_pick, trials_record, trials_open, trials_close

// ---------------------------------------------------------------------------------------------------------------------
// candidates

/* The algorithms of a product, the heuristic's first choice first. */
typedef struct {
    cublasLtMatmulAlgo_t algos[TRIALS_CANDIDATES];
    int count;
} MatmulAlgos;

/* How many candidates there may be behind each step of matmul_algos(), so that no knob takes all places. */
enum { ALGOS_NAMED = 12, ALGOS_CLUSTERS = 24, ALGOS_SWIZZLES = 28, ALGOS_TILES = 40, ALGOS_STAGES = TRIALS_CANDIDATES };

/* Tells whether an algorithm that splits k joins the parts in fp32, behind the product. */
static inline bool matmul_sums_in_order(const cublasLtMatmulAlgo_t* algo) {
    int32_t splits = 1;
    uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_NONE;
    size_t written;
    cublasLtMatmulAlgoConfigGetAttribute(algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &splits, sizeof splits, &written);
    cublasLtMatmulAlgoConfigGetAttribute(algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme, sizeof scheme, &written);
    return splits == 0 || splits == 1 || scheme == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
}

/* Adds an algorithm to a list of less than `most` if it runs, sums in a fixed order, and is not there yet. */
static inline void matmul_add_algo(const MatmulContext* c, const MatmulPlan* p, MatmulAlgos* list, int most,
                                   const cublasLtMatmulAlgo_t* algo) {
    cublasLtMatmulHeuristicResult_t result;
    bool is_new = list->count < most && matmul_sums_in_order(algo);
    for (int i = 0; is_new && i < list->count; i++) { is_new = memcmp(&list->algos[i], algo, sizeof *algo) != 0; }
    if (is_new &&
        cublasLtMatmulAlgoCheck(c->handle, p->product, p->a, p->b, p->c, p->d, algo, &result) == CUBLAS_STATUS_SUCCESS &&
        result.workspaceSize <= c->workspace_bytes) {
        list->algos[list->count++] = *algo;
    }
}

/* Adds variants of the first `varied` algorithms of a list with each of the values of one attribute. */
template <typename T, int COUNT>
static void matmul_vary(const MatmulContext* c, const MatmulPlan* p, MatmulAlgos* list, int most, int varied,
                        cublasLtMatmulAlgoConfigAttributes_t attribute, const T (&values)[COUNT]) {
    for (const T value : values) {
        for (int i = 0; i < varied; i++) {
            cublasLtMatmulAlgo_t algo = list->algos[i];
            T own = 0;
            size_t written;
            const cublasStatus_t has = cublasLtMatmulAlgoConfigGetAttribute(&algo, attribute, &own, sizeof own, &written);
            if (has != CUBLAS_STATUS_SUCCESS || own == value) { continue; }  // algorithms for older cards lack some
            if (attribute == CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID && own == CUBLASLT_CLUSTER_SHAPE_AUTO) { continue; }
            if (cublasLtMatmulAlgoConfigSetAttribute(&algo, attribute, &value, sizeof value) == CUBLAS_STATUS_SUCCESS) {
                matmul_add_algo(c, p, list, most, &algo);
            }
        }
    }
}

/* Lists the candidates of a plan. The first is the heuristic's first choice. */
static inline MatmulAlgos matmul_algos(MatmulContext* c, const MatmulPlan* p) {
    static const uint16_t clusters[] = {
        CUBLASLT_CLUSTER_SHAPE_2x1x1, CUBLASLT_CLUSTER_SHAPE_1x2x1, CUBLASLT_CLUSTER_SHAPE_1x1x1, CUBLASLT_CLUSTER_SHAPE_2x2x1,
        CUBLASLT_CLUSTER_SHAPE_4x1x1, CUBLASLT_CLUSTER_SHAPE_1x4x1, CUBLASLT_CLUSTER_SHAPE_4x2x1, CUBLASLT_CLUSTER_SHAPE_2x4x1};
    static const uint32_t swizzles[] = {1, 0};
    static const uint32_t tiles[] = {CUBLASLT_MATMUL_TILE_128x256, CUBLASLT_MATMUL_TILE_256x128, CUBLASLT_MATMUL_TILE_128x128,
                                     CUBLASLT_MATMUL_TILE_128x192, CUBLASLT_MATMUL_TILE_192x128, CUBLASLT_MATMUL_TILE_64x256,
                                     CUBLASLT_MATMUL_TILE_256x64,  CUBLASLT_MATMUL_TILE_64x128,  CUBLASLT_MATMUL_TILE_128x64};
    static const uint32_t stages[] = {CUBLASLT_MATMUL_STAGES_64x4,  CUBLASLT_MATMUL_STAGES_64x3,  CUBLASLT_MATMUL_STAGES_64x5,
                                      CUBLASLT_MATMUL_STAGES_64x6,  CUBLASLT_MATMUL_STAGES_128x3, CUBLASLT_MATMUL_STAGES_128x2,
                                      CUBLASLT_MATMUL_STAGES_128x4, CUBLASLT_MATMUL_STAGES_32x4};
    cublasLtMatmulHeuristicResult_t named[TRIALS_CANDIDATES];
    MatmulAlgos list;
    list.algos[0] = p->algo;
    list.count = 1;
    const int found = matmul_candidates(c, p, named, TRIALS_CANDIDATES);
    for (int i = 0; i < found; i++) { matmul_add_algo(c, p, &list, ALGOS_NAMED, &named[i].algo); }
    const int named_count = list.count;
    matmul_vary(c, p, &list, ALGOS_CLUSTERS, named_count < 3 ? named_count : 3, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID,
                clusters);
    matmul_vary(c, p, &list, ALGOS_SWIZZLES, named_count < 4 ? named_count : 4, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, swizzles);
    matmul_vary(c, p, &list, ALGOS_TILES, named_count < 2 ? named_count : 2, CUBLASLT_ALGO_CONFIG_TILE_ID, tiles);
    matmul_vary(c, p, &list, ALGOS_STAGES, 1, CUBLASLT_ALGO_CONFIG_STAGES_ID, stages);
    for (int i = 0; i < found; i++) { matmul_add_algo(c, p, &list, ALGOS_STAGES, &named[i].algo); }
    return list;
}

// ---------------------------------------------------------------------------------------------------------------------
// times inside of a step

enum { TUNER_CALLS = 4096 };  // of a step that are timed, at most; the others take their plan's algorithm

/* A call of a step that runs. */
typedef struct {
    int product, candidate;
    bool ran;
    cudaEvent_t begin, end;
} TimedCall;

typedef struct {
    MatmulContext* matmul;
    Trials trials;       // product i is plan i of the context
    MatmulAlgos* algos;  // of each product
    TimedCall* calls;    // TUNER_CALLS
    float* us;           // (TUNER_CALLS) their times; below 0: it did not run
    int num_calls;       // of this step
    bool timed;          // the call that runs is the last of them
} MatmulTuner;

/* Counts the candidates for the trials. */
static inline void matmul_tuner_count(MatmulTuner* t) {
    for (int i = 0; i < t->trials.num_products; i++) { t->trials.products[i].count = t->algos[i].count; }
}

/* Lists the candidates of all plans made so far: run a micro-step of each kind first. */
static inline MatmulTuner matmul_tuner_open(MatmulContext* c) {
    MatmulTuner t;
    memset(&t, 0, sizeof t);
    t.matmul = c;
    trials_open(&t.trials, c->num_plans);
    t.algos = (MatmulAlgos*)xcalloc((size_t)t.trials.num_products + 1, sizeof *t.algos);
    t.calls = (TimedCall*)xcalloc(TUNER_CALLS, sizeof *t.calls);
    t.us = (float*)xcalloc(TUNER_CALLS, sizeof *t.us);
    for (int i = 0; i < t.trials.num_products; i++) { t.algos[i] = matmul_algos(c, &c->plans[i]); }
    matmul_tuner_count(&t);
    for (int i = 0; i < TUNER_CALLS; i++) {
        CUDA_CHECK(cudaEventCreate(&t.calls[i].begin));
        CUDA_CHECK(cudaEventCreate(&t.calls[i].end));
    }
    return t;
}

static inline void matmul_tuner_close(MatmulTuner* t) {
    for (int i = 0; i < TUNER_CALLS; i++) {
        CUDA_CHECK(cudaEventDestroy(t->calls[i].begin));
        CUDA_CHECK(cudaEventDestroy(t->calls[i].end));
    }
    free(t->calls);
    free(t->us);
    free(t->algos);
    trials_close(&t->trials);
}

/* Gives every plan the algorithm that is chosen for it. */
static inline void matmul_tuner_use(MatmulTuner* t, const bool* chosen) {
    for (int i = 0; i < t->trials.num_products; i++) {
        MatmulPlan* p = &t->matmul->plans[i];
        const TrialProduct* product = &t->trials.products[i];
        const int k = chosen[i] ? product->challenger : 0;
        p->algo = t->algos[i].algos[k];
        p->us = (float)product->us[k];
        p->heuristic_us = (float)product->us[0];
    }
}

static inline const cublasLtMatmulAlgo_t* matmul_tuner_begin(void* tuner, int plan, cudaStream_t stream) {
    MatmulTuner* t = (MatmulTuner*)tuner;
    t->timed = plan < t->trials.num_products && t->num_calls < TUNER_CALLS;
    if (!t->timed) { return &t->matmul->plans[plan].algo; }
    TimedCall* call = &t->calls[t->num_calls++];
    call->product = plan;
    call->candidate = trials_pick(&t->trials, plan);
    CUDA_CHECK(cudaEventRecord(call->begin, stream));
    return &t->algos[plan].algos[call->candidate];
}

static inline void matmul_tuner_end(void* tuner, bool ran, cudaStream_t stream) {
    MatmulTuner* t = (MatmulTuner*)tuner;
    if (!t->timed) { return; }
    TimedCall* call = &t->calls[t->num_calls - 1];
    call->ran = ran;
    CUDA_CHECK(cudaEventRecord(call->end, stream));
}

/* Lets the tuner choose the algorithm of each call from now on, or no longer. */
static inline void matmul_tuner_listen(MatmulTuner* t, bool on) {
    t->matmul->trials = on ? t : NULL;
    t->matmul->trial_begin = matmul_tuner_begin;
    t->matmul->trial_end = matmul_tuner_end;
    t->num_calls = 0;
}

/* Reads the times of a step, which the card has finished. */
static inline void matmul_tuner_read(MatmulTuner* t) {
    for (int i = 0; i < t->num_calls; i++) {
        const TimedCall* call = &t->calls[i];
        float ms = -1;
        if (call->ran) { CUDA_CHECK(cudaEventElapsedTime(&ms, call->begin, call->end)); }
        t->us[i] = 1000 * ms;
    }
}

/* Takes these times into account. */
static inline void matmul_tuner_record(MatmulTuner* t) {
    for (int i = 0; i < t->num_calls; i++) { trials_record(&t->trials, t->calls[i].product, t->calls[i].candidate, t->us[i]); }
}

// ---------------------------------------------------------------------------------------------------------------------
// plan files

static inline void matmul_gpu_name(char name[256]) {
    cudaDeviceProp properties;
    int device = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    snprintf(name, 256, "%s", properties.name);
}

/* Returns what choices depend on: GPU, its multiprocessors, cuBLASLt, workspace and compute type. */
static inline MatmulSetup matmul_setup(const MatmulContext* c) {
    MatmulSetup s;
    matmul_gpu_name(s.gpu);
    s.sms = device_attribute(cudaDevAttrMultiProcessorCount);
    s.cublaslt = (int64_t)cublasLtGetVersion();
    s.workspace = (int64_t)c->workspace_bytes;
    s.compute = (int64_t)c->compute;
    return s;
}

/* Lists the choices of all plans, for free(). */
static inline MatmulChoice* matmul_choices(const MatmulContext* c) {
    MatmulChoice* choices = (MatmulChoice*)xcalloc(MATMUL_MAX_PLANS, sizeof *choices);
    for (int i = 0; i < c->num_plans; i++) {
        const MatmulPlan* p = &c->plans[i];
        choices[i].key = p->key;
        memcpy(choices[i].algo, &p->algo, sizeof p->algo);
        choices[i].us = p->us;
        choices[i].heuristic_us = p->heuristic_us;
    }
    return choices;
}

/* Gives the plans made so far the algorithms of `count` choices, where one is for them. */
static inline void matmul_adopt(MatmulContext* c, MatmulChoice* choices, int count) {
    MatmulContext other = *c;
    other.saved = choices;
    other.num_saved = count;
    for (int i = 0; i < c->num_plans; i++) {
        const MatmulPlan before = c->plans[i];
        if (!matmul_use_saved(&other, &c->plans[i])) { c->plans[i] = before; }
    }
}

/* Writes the choices of all plans. */
static inline bool matmul_save_plans(const MatmulContext* c, const char* path, Error* e) {
    const MatmulSetup setup = matmul_setup(c);
    MatmulChoice* choices = matmul_choices(c);
    const bool ok = matmul_plans_write(path, &setup, choices, c->num_plans, e);
    free(choices);
    return ok;
}

/* Reads choices for the plans that will be made from now on. A file from another GPU, cuBLASLt or setting is an error, which
 * *elsewhere tells. The caller may turn it into a warning: then the heuristic chooses. */
static inline bool matmul_load_plans(MatmulContext* c, const char* path, bool* elsewhere, Error* e) {
    const MatmulSetup setup = matmul_setup(c);
    return matmul_plans_read(path, &setup, c->saved, MATMUL_MAX_PLANS, &c->num_saved, elsewhere, e);
}

#endif
