/* matmul_algos.cuh -- lists algorithms for a matrix product, for tests and benchmarks: the algorithms of cuBLASLt's heuristic,
 * and variants of the best ones with other cluster shapes and another order of blocks (CTA swizzling). All of them fit into the
 * workspace and sum in a fixed order: an algorithm that splits k joins the parts in fp32.
 */
#ifndef TEST_MATMUL_ALGOS_CUH
#define TEST_MATMUL_ALGOS_CUH

#include "llmc/matmul.cuh"

enum { MOST_ALGOS = 48 };

/* The algorithms of a product, the heuristic's first choice first. */
typedef struct {
    cublasLtMatmulAlgo_t algos[MOST_ALGOS];
    int count;
} MatmulAlgos;

/* How many candidates there may be after each step of matmul_algos(), so that no knob takes all places. */
enum { ALGOS_NAMED = 12, ALGOS_CLUSTERS = 24, ALGOS_SWIZZLES = 28 };

/* Returns whether an algorithm that splits k joins the parts in fp32. */
static inline bool matmul_sums_in_order(const cublasLtMatmulAlgo_t* algo) {
    int32_t splits = 1;
    uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_NONE;
    size_t written;
    cublasLtMatmulAlgoConfigGetAttribute(algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &splits, sizeof splits, &written);
    cublasLtMatmulAlgoConfigGetAttribute(algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme, sizeof scheme, &written);
    return splits == 0 || splits == 1 || scheme == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
}

/* Adds an algorithm to a list of less than `most` if it runs, sums in a fixed order, and is not in the list yet. */
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
    cublasLtMatmulHeuristicResult_t named[MOST_ALGOS];
    MatmulAlgos list;
    list.algos[0] = p->algo;
    list.count = 1;
    const int found = matmul_candidates(c, p, named, MOST_ALGOS);
    for (int i = 0; i < found; i++) { matmul_add_algo(c, p, &list, ALGOS_NAMED, &named[i].algo); }
    const int named_count = list.count;
    matmul_vary(c, p, &list, ALGOS_CLUSTERS, named_count < 3 ? named_count : 3, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID,
                clusters);
    matmul_vary(c, p, &list, ALGOS_SWIZZLES, named_count < 4 ? named_count : 4, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, swizzles);
    for (int i = 0; i < found; i++) { matmul_add_algo(c, p, &list, MOST_ALGOS, &named[i].algo); }
    return list;
}

#endif
