/* dial.h -- the laws by which a new model of --model dN gets the flags of its training that are not given; choose.h applies
 * them.
 *
 *   N   weights that each token is multiplied with: those of the blocks and of the head, without the embedding
 *   D   tokens: by --steps or --epochs; else by --minutes (a guess) or DIAL_TOKENS_PER_WEIGHT * N, at most DIAL_EPOCHS epochs
 *   B   tokens of a step: DIAL_BATCH * D^DIAL_BATCH_D
 *   lr  DIAL_RATE * N^DIAL_RATE_N * D^DIAL_RATE_D, times sqrt(b / B) for a step of b tokens; Muon's times DIAL_RATE_MUON
 *
 * The forms and constants of B and lr are those of Li et al., "Predictable Scale: Part I" (arXiv 2503.04715), for AdamW, but
 * DIAL_RATE is half of their 1.79 by sweeps from d3 to d12 (dev/results/nvidia-h200-muon.md, which has Muon's factor, too).
 * The root is that of Malladi et al. (arXiv 2205.10287). 12 tokens a weight is what nanochat found to be best for a given
 * amount of computation, and up to four epochs are worth nearly as much as new text (Muennighoff et al., arXiv 2305.16264).
 *
 * --seq is not chosen: how much text the model sees at once is a wish, no matter of learning well. train_llama3.py reads the
 * constants from here, so each is one number. */
#ifndef LLMC_DIAL_H
#define LLMC_DIAL_H

#include "llmc/base/os.h"    // defines: os_cores
#include "llmc/base/text.h"  // defines: text_count
#include "llmc/run/cli/options.h"

#include <math.h>

#define DIAL_TOKENS_PER_WEIGHT 12
#define DIAL_EPOCHS 4
#define DIAL_ROWS 4  // of a step, at least: fewer are slower, and no better
#define DIAL_BATCH 0.58
#define DIAL_BATCH_D 0.571
#define DIAL_RATE 0.9
#define DIAL_RATE_N (-0.713)
#define DIAL_RATE_D 0.307
#define DIAL_RATE_MUON 2
#define DIAL_RATE_MOST 0.01   // where the law would ask for more: tiny models
#define DIAL_WARMUP 0.05      // of the steps
#define DIAL_MICRO_CPU 1024   // tokens of a micro-batch: more are no faster
#define DIAL_MICRO_GPU 65536  // the same on a GPU, if they fit into its memory
#define DIAL_CORE_FLOPS 5e10  // a guess of the speed, for the tokens of --minutes: once steps are timed, their number counts
#define DIAL_GPU_FLOPS 1e14   // the same of a GPU

/* What the laws start from. */
typedef struct {
    bool on;         // the run trains a new model dN
    double weights;  // N
    double data;     // tokens of an epoch; 0: there is no data
    int ranks;       // that train
} Dial;

static inline double dial_batch(double tokens) { return DIAL_BATCH * pow(tokens, DIAL_BATCH_D); }

/* Returns the highest rate of a run of `tokens` tokens, `batch` a step, to two digits. */
static inline double dial_rate(const Dial* d, double tokens, double batch, bool muon) {
    const double law = DIAL_RATE * pow(d->weights, DIAL_RATE_N) * pow(tokens, DIAL_RATE_D) * (muon ? DIAL_RATE_MUON : 1);
    char text[32];
    snprintf(text, sizeof text, "%.1e", fmin(law * sqrt(batch / dial_batch(tokens)), DIAL_RATE_MOST));
    return strtod(text, NULL);
}

/* Returns the power of two nearest to x. */
static inline int dial_power_of_two(double x) { return (int)exp2(fmin(round(log2(x)), 20)); }

/* Returns D by the flags, or by a guess for --minutes. For --steps, D is their number times B, which depends on D. */
static inline double dial_tokens(const Dial* d, const Options* o) {
    const double cores = o->threads > 0 ? fmin(o->threads, (double)os_cores()) : (double)os_cores();
    const double speed = o->trainer == ON_GPU ? DIAL_GPU_FLOPS * d->ranks : DIAL_CORE_FLOPS * cores;
    const double most = d->data > 0 ? DIAL_EPOCHS * d->data : INFINITY, wanted = DIAL_TOKENS_PER_WEIGHT * d->weights;
    if (o->minutes > 0) { return fmin(o->minutes * 60 * speed / (6 * d->weights), most); }
    if (o->epochs > 0) { return o->epochs * d->data; }
    if (o->given[OPT_steps]) { return o->steps < 0 ? d->data : pow(DIAL_BATCH * o->steps, 1 / (1 - DIAL_BATCH_D)); }
    return fmin(wanted, most);
}

/* Prints each flag that the laws have chosen, for `steps` steps of `batch` tokens, with its reason. */
static inline void dial_print(FILE* f, const Dial* d, const Options* o, int64_t steps, int64_t batch) {
    const double tokens = (double)steps * (double)batch, best = dial_batch(tokens);
    char text[OPTION_TEXT], a[32], b[32];
    if (!d->on || steps <= 0) { return; }
    text_count((uint64_t)tokens, a, sizeof a);
    if (!o->given[OPT_steps] && o->minutes == 0) {
        text_count((uint64_t)d->weights, b, sizeof b);
        fprintf(f, "dial    --steps %lld: %s tokens, ", (long long)steps, a);
        if (d->data > 0 && DIAL_EPOCHS * d->data < DIAL_TOKENS_PER_WEIGHT * d->weights) {
            fprintf(f, "%.3g epochs of the data; more text would be better, %d tokens for each of %s weights\n",
                    tokens / d->data, DIAL_TOKENS_PER_WEIGHT, b);
        } else {
            fprintf(f, "%.3g for each of %s weights\n", tokens / d->weights, b);
        }
    }
    if (!o->given[OPT_total_batch] && !o->given[OPT_batch]) {
        const double guess = o->minutes > 0 ? dial_tokens(d, o) : tokens, q = (double)batch / dial_batch(guess);
        fprintf(f, "dial    --total-batch %lld: %s %g D^%g = %s for D = ", (long long)batch,
                q > 1.5       ? "fewer rows are slower than these, above"
                : q * 1.5 < 1 ? "as the data is little, below"
                              : "about",
                DIAL_BATCH, DIAL_BATCH_D, text_count((uint64_t)dial_batch(guess), b, sizeof b));
        fprintf(f, "%s tokens%s\n", text_count((uint64_t)guess, b, sizeof b), o->minutes > 0 ? ", a guess" : "");
    }
    if (!o->given[OPT_batch]) { fprintf(f, "dial    --batch %d: the rows that are fast and fit\n", o->batch); }
    if (o->minutes > 0 && o->steps < 0) { return; }  // nothing can be timed
    if (!o->given[OPT_lr]) {
        fprintf(f, "dial    --lr %s: ", option_text(o, OPT_lr, text));
        if (o->lr == DIAL_RATE_MOST) {
            fprintf(f, "the highest, for a model this small\n");
        } else {
            fprintf(f, "%g N^%g D^%g%s, times sqrt(batch / %s)\n", DIAL_RATE, DIAL_RATE_N, DIAL_RATE_D,
                    o->optimizer ? ", twice for Muon" : "", text_count((uint64_t)best, b, sizeof b));
        }
    }
    if (!o->given[OPT_warmup] && o->warmup < (int)(DIAL_WARMUP * (double)steps)) {
        fprintf(f, "dial    --warmup %d: what --decay leaves\n", o->warmup);
    } else if (!o->given[OPT_warmup]) {
        fprintf(f, "dial    --warmup %d: %g %% of the steps\n", o->warmup, 100 * DIAL_WARMUP);
    }
}

#endif
