/* matmul_choice.h -- the algorithm chosen for a matrix product on the GPU, and the key that the choice depends on. matmul.cuh
 * compares these numbers and files/matmul_plans.h stores them; neither CUDA nor JSON is needed here.
 */
#ifndef LLMC_MATMUL_CHOICE_H
#define LLMC_MATMUL_CHOICE_H

#include <stdint.h>

/* D (M, N) = op(A) (M, K) op(B) (K, N) [+ C], all row-major. Every field is a number, so that keys compare as memory and one
 * table names them in the plan file. */
typedef enum {
    KEY_M,
    KEY_N,
    KEY_K,
    KEY_TRANS_A,
    KEY_TRANS_B,
    KEY_TYPE_A,  // cudaDataType_t
    KEY_TYPE_B,
    KEY_TYPE_D,  // also of C
    KEY_LD_A,    // elements from one row to the next
    KEY_LD_B,
    KEY_LD_C,
    KEY_LD_D,
    KEY_ADD,      // whether C is added
    KEY_SCALED,   // a MatmulScaling
    KEY_ALIGN_A,  // bytes
    KEY_ALIGN_B,
    KEY_ALIGN_C,
    KEY_ALIGN_D,
    KEY_BATCH,  // products of one shape in one launch; each factor and result lies matrix_stride() after the one before
    NUM_KEY_FIELDS
} MatmulKeyField;

/* The scales of a product's factors. "Fast" sums stay in the tensor cores' own precision until the end: on Hopper about 14 bits
 * of each sum, for a sixth more speed. */
typedef enum { NOT_SCALED, SCALED_TENSORS, SCALED_ROWS, SCALED_ROWS_FAST, SCALED_TENSORS_FAST } MatmulScaling;

static const char* const matmul_key_names[NUM_KEY_FIELDS] = {
    "m",    "n",    "k",   "trans_a", "trans_b", "type_a",  "type_b",  "type_d",  "ld_a",  "ld_b",
    "ld_c", "ld_d", "add", "scaled",  "align_a", "align_b", "align_c", "align_d", "batch",
};

typedef struct {
    int64_t v[NUM_KEY_FIELDS];
} MatmulKey;

enum { MATMUL_ALGO_WORDS = 8 };  // of 64 bits, in cublasLtMatmulAlgo_t

typedef struct {
    MatmulKey key;
    uint64_t algo[MATMUL_ALGO_WORDS];  // the image of a cublasLtMatmulAlgo_t
} MatmulChoice;

#endif
