/* memory.h -- the memory table that a run prints before it allocates, and the search for flags that fit.
 *
 * A run that does not fit is refused. The message gives the shortfall and a change of flags that fits, found by calling the
 * trainer's own measure() (trainer.h) for each candidate. The same search finds the blocks of --recompute auto, and --zero
 * beside them.
 */
#ifndef LLMC_MEMORY_H
#define LLMC_MEMORY_H

#include "llmc/base/utils.h"
#include "llmc/dist/sequence.h"        // defines: sequence_share
#include "llmc/quantise.h"             // defines: QUANTISE_WIDTH
#include "llmc/run/cli/options.h"      // defines: Options, option_text
#include "llmc/run/cli/recompute.h"    // defines: recompute_set, recompute_limit
#include "llmc/base/text.h"            // defines: text_bytes
#include "llmc/run/session/trainer.h"  // defines: Trainer, MemoryTable
#include "llmc/train/step.h"           // defines: ModelUse
#include <math.h>

/* Returns the bytes that the model takes of the device, or those `apart`, on the host of a GPU. */
static inline uint64_t memory_total(const MemoryTable* m, bool apart) {
    uint64_t sum = 0;
    for (int i = 0; i < m->count; i++) { sum += m->apart[i] == apart ? m->bytes[i] : 0; }
    return sum;
}

/* Returns whether more lies on the host than the buffers of copies, as with --offload. */
static inline bool memory_offloads(const MemoryTable* m) {
    int rows = 0;
    for (int i = 0; i < m->count; i++) { rows += m->apart[i] && m->bytes[i] > 0; }
    return rows > 1;
}

/* Prints the table without rows of zero bytes. With --offload the host has a column of its own. `have`: available bytes, 0:
 * unknown. */
static inline void print_memory(FILE* f, const MemoryTable* m, uint64_t have) {
    char text[32], of[32];
    const bool columns = memory_offloads(m);
    if (columns) { fprintf(f, "memory  %-22s %12s %12s\n", "", "card", "host"); }
    for (int i = 0; i < m->count; i++) {
        if (m->bytes[i] == 0) { continue; }
        const int width = columns && m->apart[i] ? 25 : 12;
        fprintf(f, "memory  %-22s %*s\n", m->names[i], width, text_bytes(m->bytes[i], text, sizeof text));
    }
    fprintf(f, "memory  %-22s %12s of %s\n", "need", text_bytes(memory_total(m, false), text, sizeof text),
            have ? text_bytes(have, of, sizeof of) : "an unknown size");
    if (!columns) { return; }
    fprintf(f, "memory  %-22s %25s of %s\n", "need, on the host", text_bytes(memory_total(m, true), text, sizeof text),
            m->host ? text_bytes(m->host, of, sizeof of) : "an unknown size");
}

/* The room for a job's model. */
typedef struct {
    const Trainer* trainer;
    const ModelConfig* config;
    ModelUse use;
    uint64_t have;  // available bytes; 0: unknown
} MemoryRoom;

static inline MemoryRoom memory_room(const Trainer* t, const ModelConfig* c, const ModelUse* use, const Options* o) {
    const MemoryRoom room = {t, c, *use, t->available(t, o)};
    return room;
}

/* Returns the memory of a run with the options `o`, which the job has or the search tries. */
static inline MemoryTable memory_measure(const MemoryRoom* room, const Options* o) {
    ModelUse use = room->use;
    MemoryTable table;
    memset(&table, 0, sizeof table);
    use.B = use.B > 0 ? o->batch : 0;
    use.T = o->seq;
    room->trainer->measure(room->trainer, room->config, &use, o, &table);
    return table;
}

/* Returns the bytes of main memory by which --offload takes too much; 0: it fits, or what there is is unknown. */
static inline uint64_t memory_host_short(const MemoryTable* m) {
    const uint64_t need = memory_total(m, true);
    return memory_offloads(m) && m->host && need > m->host ? need - m->host : 0;
}

static inline bool memory_fits(const MemoryRoom* room, const Options* o) {
    const MemoryTable table = memory_measure(room, o);
    return memory_total(&table, false) <= room->have && memory_host_short(&table) == 0;
}

/* Finds the smallest number of blocks with which --recompute fits at a level, and at the levels before it in all blocks.
 * Returns false if nothing fits; then *o recomputes in all blocks. */
static inline bool memory_fit_level(const MemoryRoom* room, Options* o, int level) {
    recompute_set(&o->recompute, (RecomputeLevel)level, ALL_BLOCKS);
    if (!memory_fits(room, o)) { return false; }
    Options fewer = *o;
    for (int n = 1; n < room->config->num_layers - 1; n++) {  // one less than all blocks is all: the last never recomputes
        recompute_set(&fewer.recompute, (RecomputeLevel)level, n);
        if (!memory_fits(room, &fewer)) { continue; }
        o->recompute = fewer.recompute;
        break;
    }
    return true;
}

/* Returns the first value of --recompute in the order of cost that fits, or the last. */
static inline Recompute memory_find_recompute(const MemoryRoom* room, const Options* options) {
    Options o = *options;
    recompute_limit(&o.recompute, 0);
    if (room->have == 0 || memory_fits(room, &o)) { return o.recompute; }
    for (int level = 0; level < RECOMPUTE_LEVELS && !memory_fit_level(room, &o, level); level++) {}
    return o.recompute;
}

/* Returns whether --recompute auto may choose --zero: nobody has given it, and each value has the same bits. That holds with
 * one micro-batch a step, and for adapters, which every value sends in the same way (gpu/exchange.cuh). */
static inline bool memory_chooses_zero(const MemoryRoom* room, const Options* o) {
    const int groups = sequence_share(room->use.rank, room->use.ranks, o->seq_parallel).groups;
    const bool one = o->total_batch == 0 || o->total_batch == (int64_t)o->batch * o->seq * groups;
    return room->use.ranks > 1 && o->recompute.automatic && !o->given[OPT_zero] && (one || o->lora > 0);
}

/* Returns what --recompute and --zero add to the time of a step, in per cent. Norms and SwiGLU move bytes: 1.3 % at 8B, 5 % at
 * 126M. With gate and up a block takes 20 %: 16 of 32 blocks of 8B took 10 % (dev/results/nvidia-h100.md). A whole block is a
 * forward pass, a third of a step. ZeRO 2 and 3 took 1.0 and 1.7 % of 8B on four H200s of one host. */
static inline double memory_cost(const Options* o, int layers) {
    static const double levels[RECOMPUTE_LEVELS] = {2, 18, 13}, zeros[] = {0, 1, 1.7};
    Recompute r = o->recompute;
    double cost = zeros[o->zero];
    recompute_limit(&r, layers);
    for (int i = 0; i < RECOMPUTE_LEVELS; i++) { cost += levels[i] * r.blocks[i] / layers; }
    return cost;
}

/* --recompute auto: sets *o to the value that fits. Where it may choose --zero, sets the pair that fits at the least cost. If
 * nothing fits, takes the last. `most`: the last value of --zero to try */
static inline void memory_find_pair(const MemoryRoom* room, Options* o, Zero most) {
    double least = INFINITY;
    if (!o->given[OPT_zero]) { o->zero = ZERO_1; }  // an earlier choice does not count
    Options next = *o;
    for (const int last = memory_chooses_zero(room, o) ? (int)most : o->zero; next.zero <= last; next.zero++) {
        next.recompute = memory_find_recompute(room, &next);
        const bool fits = room->have == 0 || memory_fits(room, &next);
        const double cost = fits ? memory_cost(&next, room->config->num_layers) : INFINITY;
        if (cost >= least && least < INFINITY) { continue; }
        least = cost;
        o->zero = next.zero;
        o->recompute = next.recompute;
    }
}

/* Returns the last value of --offload that a run may take: several GPUs share gradients with --zero. */
static inline int memory_offload_most(const MemoryRoom* room) {
    return room->use.ranks > 1 ? OFFLOAD_OPTIMIZER : OFFLOAD_WEIGHTS;
}

/* Writes to `hint` the first change of flags that fits. Returns false if nothing fits. A --zero that --recompute auto has
 * chosen counts as not given, since with the hint's flags auto chooses again. Tries, in this order:
 *   1. several GPUs share more (--zero)
 *   2. on a GPU, recomputation in as few blocks as possible: the results stay the same
 *   3. a smaller micro-batch, with the same tokens per step
 *   4. on a GPU, more on the host: the results stay the same; or less, if the host lacks the memory
 *   5. on a GPU, smaller optimizer state; no master weights last, because weights are then rounded otherwise
 *   6. on a GPU, gradients that add up in the weights' type
 *   7. shorter rows */
static inline bool memory_find_fit(char* hint, size_t cap, const Options* chosen, const MemoryRoom* room) {
    Options typed = *chosen;
    const Options* options = &typed;
    if (!typed.given[OPT_zero]) { typed.zero = ZERO_1; }
    const bool gpu = options->trainer == ON_GPU;
    const int ranks = sequence_share(room->use.rank, room->use.ranks, options->seq_parallel).groups;
    const int64_t total = options->total_batch ? options->total_batch : (int64_t)options->batch * options->seq * ranks;
    const bool stays = options->given[OPT_offload] && options->offload == OFFLOAD_OFF;
    const int offloads = stays ? 1 : memory_offload_most(room) - OFFLOAD_OFF + 1;
    for (int seq = options->seq; seq >= 1; seq /= 2) {
        for (int variant = 0; variant < (gpu ? 12 * offloads : 1); variant++) {  // each state with each --offload, twice
            const int state = variant / offloads % 6;                            // bit 0: bf16 moments; above it: a MasterKind
            const bool param = variant / offloads >= 6;
            if (param && options->grad_dtype != GRAD_DTYPE_AUTO) { break; }
            int offload = variant % offloads ? OFFLOAD_OFF + variant % offloads - 1 : options->offload;
            if (variant % offloads && offload >= options->offload) { offload++; }  // first the value as it is, then the others
            for (int batch = options->batch; batch >= 1; batch--) {
                if (total % ((int64_t)batch * seq * ranks) != 0) { continue; }
                if (options->seq_parallel > 1 && seq % options->seq_parallel != 0) { continue; }
                const int parts = options->seq_parallel > 1 ? options->seq_parallel : 1;
                if (options->fp8 && (int64_t)batch * seq / parts % QUANTISE_WIDTH != 0) { continue; }
                const int levels = 1 + (gpu ? (int)RECOMPUTE_LEVELS : 0);  // first the value as it is
                const int zeros = (gpu && ranks * options->seq_parallel > 1 ? (int)ZERO_3 : options->zero) - options->zero + 1;
                for (int k = 0; k < levels * zeros; k++) {
                    const int level = k / zeros - 1;
                    Options o = *options;
                    o.zero = options->zero + k % zeros;
                    o.seq = seq;
                    o.batch = batch;
                    o.offload = offload;
                    if (batch != options->batch || seq != options->seq) { o.total_batch = total; }  // as the hint will say
                    if (param) { o.grad_dtype = GRAD_DTYPE_PARAM; }
                    if (state & 1) { o.moments = MOMENTS_BF16; }
                    if (state / 2 > o.master) { o.master = state / 2; }  // each is smaller than the one before
                    if (!(level < 0 ? memory_fits(room, &o) : memory_fit_level(room, &o, level))) { continue; }
                    int n = snprintf(hint, cap, "these flags fit:");
                    char word[OPTION_TEXT];
                    const int changed[] = {OPT_zero,    OPT_recompute, OPT_batch,      OPT_offload,
                                           OPT_moments, OPT_master,    OPT_grad_dtype, OPT_seq};
                    for (int i = 0; i < 8; i++) {
                        char before[OPTION_TEXT], after[OPTION_TEXT];
                        const char* now = option_text(&o, changed[i], after);
                        if (strcmp(now, option_text(options, changed[i], before)) == 0) { continue; }
                        n += snprintf(hint + n, cap - (size_t)n, " %s %s", option_flag(changed[i], word), now);
                    }
                    if ((batch != options->batch || seq != options->seq) && !options->given[OPT_total_batch]) {
                        snprintf(hint + n, cap - (size_t)n, " --total-batch %lld", (long long)total);
                    }
                    return true;
                }
            }
        }
    }
    return false;
}

/* Prints the memory table to `screen` (or NULL) and refuses a run that does not fit; with an unknown size refuses nothing.
 * `what` says whose memory it is, and for what. */
static inline bool memory_check(const MemoryRoom* room, const Options* o, const char* what, FILE* screen, Error* e) {
    const MemoryTable table = memory_measure(room, o);
    const uint64_t total = memory_total(&table, false), have = room->have;
    char a[32], b[32], c[32], hint[256];
    if (screen) { print_memory(screen, &table, have); }
    const bool on_card = have == 0 || total <= have;
    if (on_card && memory_host_short(&table) == 0) { return true; }
    if (!memory_find_fit(hint, sizeof hint, o, room)) {
        snprintf(hint, sizeof hint, "try a smaller --model; this one is too large at any --batch and --seq");
    }
    if (on_card) {
        return fail(e, "--offload: needs %s of main memory, %s available (%s short)\n  hint: %s",
                    text_bytes(memory_total(&table, true), a, sizeof a), text_bytes(table.host, b, sizeof b),
                    text_bytes(memory_host_short(&table), c, sizeof c), hint);
    }
    return fail(e, "%s needs %s, %s available (%s short)\n  hint: %s", what, text_bytes(total, a, sizeof a),
                text_bytes(have, b, sizeof b), text_bytes(total - have, c, sizeof c), hint);
}

#endif
