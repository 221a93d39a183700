/* recompute.h -- the value of --recompute: which blocks recompute which of their activations in the backward pass.
 *
 *   none | auto | LEVEL[:N][,LEVEL[:N]]...
 *
 * A level recomputes its group of activations and the groups of the levels before it, in the first N blocks; without N in all.
 * ffn:18 recomputes in 18 blocks, and the others keep everything. A list names each level after a cheaper one, for fewer
 * blocks: norm+swiglu,ffn:7 recomputes norms and SwiGLU in all blocks, and in 7 of them also gate and up.
 *
 * The first blocks recompute, because the backward pass comes to them last: with several GPUs they then compute while gradients
 * are still on their way. The last block keeps its activations in the buffers that these blocks share. Nothing overwrites them
 * before its backward pass, so it need not recompute.
 *
 * In the order of cost, a level is taken in more and more blocks. The next level begins when all blocks recompute at this one.
 * Each level takes more arithmetic for a byte than the level before: norms and SwiGLU, then the products gate and up, then
 * qkv, attention and its product o.
 */
#ifndef LLMC_RECOMPUTE_H
#define LLMC_RECOMPUTE_H

#include "llmc/base/utils.h"

#include <limits.h>

typedef enum { RECOMPUTE_NORM_SWIGLU, RECOMPUTE_FFN, RECOMPUTE_BLOCK, RECOMPUTE_LEVELS } RecomputeLevel;
static const char* const recompute_levels[RECOMPUTE_LEVELS] = {"norm+swiglu", "ffn", "block"};

enum { ALL_BLOCKS = INT_MAX };

typedef struct {
    int blocks[RECOMPUTE_LEVELS];  // the first blocks recompute at this level or a later one: never more than the level before
    bool automatic;                // auto: `blocks` is what the memory search chose (run/session/memory.h)
} Recompute;

/* The groups of activations that a block recomputes. */
typedef struct {
    bool norms, gate_up, block;  // outputs of norms and SwiGLU; of gate and up; all the rest but the residual stream
} Recomputed;

static inline Recomputed recompute_at(const Recompute* r, int l) {
    const Recomputed again = {l < r->blocks[RECOMPUTE_NORM_SWIGLU], l < r->blocks[RECOMPUTE_FFN],
                              l < r->blocks[RECOMPUTE_BLOCK]};
    return again;
}

/* Sets a place in the order of cost: `blocks` recompute at this level, all others at the level before it. */
static inline void recompute_set(Recompute* r, RecomputeLevel level, int blocks) {
    for (int i = 0; i < RECOMPUTE_LEVELS; i++) { r->blocks[i] = i < (int)level ? ALL_BLOCKS : i == (int)level ? blocks : 0; }
}

/* Limits every level to the first `most` blocks. */
static inline void recompute_limit(Recompute* r, int most) {
    for (int i = 0; i < RECOMPUTE_LEVELS; i++) { r->blocks[i] = r->blocks[i] < most ? r->blocks[i] : most; }
}

/* Parses a value. Returns false, without a change, if it is wrong. */
static inline bool recompute_read(Recompute* r, const char* text) {
    Recompute found;
    memset(&found, 0, sizeof found);
    found.automatic = strcmp(text, "auto") == 0;
    int known = 0;  // levels whose number of blocks is known
    for (const char* at = text; !found.automatic && strcmp(text, "none") != 0; at++) {
        const size_t length = strcspn(at, ":,");
        int level = 0, blocks = ALL_BLOCKS;
        while (level < RECOMPUTE_LEVELS &&
               (strlen(recompute_levels[level]) != length || memcmp(recompute_levels[level], at, length) != 0)) {
            level++;
        }
        at += length;
        if (*at == ':') {
            char* end = NULL;
            const long long n = at[1] >= '0' && at[1] <= '9' ? strtoll(at + 1, &end, 10) : 0;
            if (n < 1 || n >= ALL_BLOCKS) { return false; }
            blocks = (int)n;
            at = end;
        }
        if (level == RECOMPUTE_LEVELS || level < known || (known > 0 && blocks >= found.blocks[known - 1])) { return false; }
        while (known <= level) { found.blocks[known++] = blocks; }
        if (!*at) { break; }
        if (*at != ',') { return false; }
    }
    *r = found;
    return true;
}

/* Writes the value as the user would type it, and returns `out`. */
static inline const char* recompute_text(const Recompute* r, char* out, size_t cap) {
    size_t n = 0;
    snprintf(out, cap, r->automatic ? "auto" : "none");
    for (int i = 0; !r->automatic && i < RECOMPUTE_LEVELS; i++) {
        if (r->blocks[i] == (i + 1 < RECOMPUTE_LEVELS ? r->blocks[i + 1] : 0)) { continue; }
        n += (size_t)snprintf(out + n, cap - n, "%s%s", n > 0 ? "," : "", recompute_levels[i]);
        if (r->blocks[i] != ALL_BLOCKS) { n += (size_t)snprintf(out + n, cap - n, ":%d", r->blocks[i]); }
    }
    return out;
}

#endif
