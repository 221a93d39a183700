/* head_rows.h -- the number of tokens whose logits exist at one time on a GPU. The head and its gradients are computed in
 * chunks of so many tokens, and each chunk reads and writes the gradient of the head (V, C) once: larger chunks move less, and
 * take more memory.
 *
 *   8192   if LLMC_HEAD_ROWS allows it, the head is trained, the micro-batch holds more than 4096 tokens, and the logits grow
 *          by no more than 16 bytes for each parameter of the head, which is what its training takes: growth = 4096 V X bytes
 *          (X of an element), so it is so from C = 256 X on
 *   4096   else: fewer would give the products too few tiles
 *
 * The rule knows only what a checkpoint pins (the model, its adapters, --batch, --seq) and the build. So a run that goes on
 * adds up in the same order. It does not look at flags that promise the same bits, such as --recompute, or at the free memory.
 */
#ifndef LLMC_HEAD_ROWS_H
#define LLMC_HEAD_ROWS_H

#include "llmc/config.h"  // defines: ModelConfig

/* Most tokens of a chunk. 4096 until a card has shown what 8192 gain: make train_llama3cu
 * NVCCFLAGS_EXTRA=-DLLMC_HEAD_ROWS=8192, and dev/bench_gpu.py --trainer-before compares the two. */
#ifndef LLMC_HEAD_ROWS
#define LLMC_HEAD_ROWS 4096
#endif

enum { HEAD_ROWS_LEAST = 4096, HEAD_STATE_BYTES = 16 /* of a parameter: weight, gradient, master, m, v */ };

/* Returns the tokens of a chunk under the limit `most`. tokens: of a micro-batch; element: bytes of a logit */
static inline size_t head_rows_below(size_t most, const ModelConfig* c, bool train, size_t tokens, size_t element) {
    const bool sums_up = train && c->lora.rank == 0 && tokens > HEAD_ROWS_LEAST;
    const size_t least = HEAD_ROWS_LEAST, C = (size_t)c->hidden_size;
    return sums_up && most > least && (most - least) * element <= HEAD_STATE_BYTES * C ? most : least;
}

static inline size_t head_rows(const ModelConfig* c, bool train, size_t tokens, size_t element) {
    return head_rows_below(LLMC_HEAD_ROWS, c, train, tokens, element);
}

#endif
