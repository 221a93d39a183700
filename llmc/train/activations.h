/* activations.h -- what the forward pass of a block leaves for its backward pass, as a table. Both trainers make their
 * BlockActivations of it and lay out their memory by it. The search for a tensor that is not finite (not_finite.h) walks it. So
 * a new activation is one line here.
 *
 *   X(type, field, shape, width, group, name)
 *
 *   type   floatX: the type of the weights, float on the CPU; float: fp32 in every build
 *   shape  of N = B*T rows of `width` elements, one row for each token
 *   width  in terms of the model's configuration `c`
 *   group  of --recompute on a GPU, which may compute the activation again: norms, gate_up or block (run/cli/recompute.h)
 *   name   for messages; NULL: the search leaves it out
 */
#ifndef LLMC_ACTIVATIONS_H
#define LLMC_ACTIVATIONS_H

#include "llmc/config.h"  // defines: q_width, qkv_width

/* PADDED: a GPU pads each row. BY_HEADS: as PADDED; but ranks that share rows hold whole rows of some heads (dist/sequence.h).
 * DENSE: rows follow one another everywhere. */
typedef enum { PADDED, BY_HEADS, DENSE } ActivationShape;

/* h, the residual stream as it enters the block, is not in the table: it is the output of the block before. */
#define BLOCK_ACTIVATIONS(X)                                                                                                \
    X(floatX, norm1, PADDED, c->hidden_size, norms, NULL)           /* rmsnorm(h) */                                        \
    X(float, rstd1, DENSE, 1, block, NULL)                          /* 1 / rms of h */                                      \
    X(floatX, qkv, BY_HEADS, qkv_width(c), block, "q, k, v")        /* after RoPE */                                        \
    X(float, lse, DENSE, c->num_heads, block, NULL)                 /* (B, NH, T) log-sum-exp of the scores */              \
    X(floatX, att, PADDED, q_width(c), block, "attention's output") /* before its product o */                              \
    X(floatX, mid, PADDED, c->hidden_size, block, "the residual stream after attention")                                    \
    X(floatX, norm2, PADDED, c->hidden_size, norms, NULL)                             /* rmsnorm(mid) */                    \
    X(float, rstd2, DENSE, 1, block, NULL)                                            /* 1 / rms of mid */                  \
    X(floatX, gate_up, PADDED, 2 * (size_t)c->intermediate_size, gate_up, "gate, up") /* backward overwrites it on a GPU */ \
    X(floatX, act, PADDED, c->intermediate_size, norms, "swiglu's output")            /* silu(gate) * up */

#endif
