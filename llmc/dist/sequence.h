/* sequence.h -- with --seq-parallel several ranks share each row of tokens. This file says which part a rank computes, and how
 * the ranks exchange parts of rows for heads around attention (Jacobs et al., "DeepSpeed Ulysses", 2023, arXiv 2309.14509).
 *
 *   ranks      0 1 | 2 3 | ...    with n = 2 ranks a row: neighbours are a group, and each group reads its own rows of a batch
 *   a row      T tokens: part p is tokens [p T / n, (p + 1) T / n); rank r computes part r % n of the rows of group r / n
 *   attention  sees whole rows, but each rank only NH / n query heads and NKV / n key and value heads: the heads from
 *              p NH / n and from p NKV / n on. So a query head and its key head are on one rank
 *
 * All other layers work on single tokens and see the part alone. To get from parts of rows to heads, a rank packs its tokens by
 * the heads of each member. The group exchanges the pieces, and each piece arrives in its place:
 *
 *   rows    (B, T / n, all heads)         of this rank
 *   pieces  (B, n, T / n, heads / n)      piece (b, p) is for member p
 *   heads   (B, T, heads / n)             piece (b, p) came from member p: its tokens are the p-th of row b
 *
 * The way back is the same in reverse. Below, T of an AttentionShape counts the tokens of a part, and NH and NKV count all
 * heads. NKV = 0 means a row of attention's output.
 */
#ifndef LLMC_SEQUENCE_H
#define LLMC_SEQUENCE_H

#include "llmc/base/utils.h"
#include "llmc/config.h"  // defines: AttentionShape

/* A rank's share of the rows of a step. */
typedef struct {
    int row_ranks, part;  // ranks that share each row, and this rank's part of it; row_ranks = 1: whole rows
    int groups, group;    // groups of ranks that share rows, and this rank's group
} SequenceShare;

/* Returns the share of rank `rank` of `ranks`, a multiple of `row_ranks`. */
static inline SequenceShare sequence_share(int rank, int ranks, int row_ranks) {
    const int n = row_ranks > 1 ? row_ranks : 1;
    const SequenceShare share = {n, rank % n, ranks / n, rank / n};
    return share;
}

/* Returns the shape of attention on one rank: whole rows, and its heads. */
static inline AttentionShape heads_shape(AttentionShape s, int row_ranks) {
    const AttentionShape heads = {s.B, s.T * row_ranks, s.NH / row_ranks, s.NKV / row_ranks, s.HD};
    return heads;
}

/* Returns the shape of attention's output. */
static inline AttentionShape heads_out(AttentionShape s) {
    const AttentionShape out = {s.B, s.T, s.NH, 0, s.HD};
    return out;
}

/* Returns the elements of a row's heads. */
static inline size_t heads_width(AttentionShape s) { return (size_t)(s.NH + 2 * s.NKV) * (size_t)s.HD; }

#endif
