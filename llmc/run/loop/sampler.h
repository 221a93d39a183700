/* sampler.h -- samples the next token from logits: the penalty, temperature, then top-k, then top-p, then one draw.
 *
 *   penalty (Keskar et al., "CTRL", 2019) divides the positive logits of tokens that the text has, and multiplies negative ones
 *   w[i] = exp((logits[i] - max) / temperature)
 *   top-k keeps the k largest w; top-p (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020) keeps the
 *   fewest of these, largest first, that hold at least p of their sum. Tokens are ranked by w, ties by the lower id.
 *   Temperature 0 and top-p 0 take the first token of the ranking.
 *
 * A draw is a pure function of (logits, seed, stream, index), by Philox (rand.h). One threshold token ends the kept set;
 * quickselect finds it in O(V) without a sort. The draw walks the kept ids in ascending order.
 * NaN logits are never chosen, a +inf logit always is. If all logits are NaN, there is no token (-1).
 */
#ifndef LLMC_SAMPLER_H
#define LLMC_SAMPLER_H

#include "llmc/base/utils.h"  // first, since it asks for the functions beyond C11; defines: xmalloc
#include "llmc/base/rand.h"   // defines: philox, philox_double, RAND_SAMPLE
#include <math.h>

typedef struct {
    double temperature;  // 0: greedy
    int top_k;           // 0: off
    double top_p;        // 1: off; 0: greedy
    uint64_t seed;
    int V;
    float penalty;     // of the tokens in `seen`; 1: off
    bool* seen;        // (V) tokens of the prompt and the text; NULL: no penalty
    float* penalised;  // (V) the logits after the penalty
    double* weights;   // (V)
    int32_t* order;    // (V) ids, partitioned by the selection: better ones first
} Sampler;

static inline void sampler_init(Sampler* s, int V, double temperature, int top_k, double top_p, uint64_t seed) {
    memset(s, 0, sizeof *s);
    s->temperature = temperature;
    s->top_k = top_k;
    s->top_p = top_p;
    s->seed = seed;
    s->V = V;
    s->penalty = 1;
    s->weights = (double*)xmalloc((size_t)V * sizeof(double));
    s->order = (int32_t*)xmalloc((size_t)V * sizeof(int32_t));
}

/* Sets the penalty. The caller shows each token to sampler_see(). */
static inline void sampler_penalise(Sampler* s, double penalty) {
    s->penalty = (float)penalty;
    if (penalty == 1) { return; }
    s->seen = (bool*)xcalloc((size_t)s->V, sizeof(bool));
    s->penalised = (float*)xmalloc((size_t)s->V * sizeof(float));
}

/* Forgets the tokens of the text before. */
static inline void sampler_forget(Sampler* s) {
    if (s->seen) { memset(s->seen, 0, (size_t)s->V * sizeof(bool)); }
}

/* Remembers tokens of the text. */
static inline void sampler_see(Sampler* s, const int32_t* tokens, int count) {
    for (int i = 0; s->seen && i < count; i++) { s->seen[tokens[i]] = true; }
}

static inline void sampler_free(Sampler* s) {
    free(s->seen);
    free(s->penalised);
    free(s->weights);
    free(s->order);
    memset(s, 0, sizeof *s);
}

/* Returns the lowest id with the largest logit; -1 if all are NaN. */
static inline int sample_greedy(const float* logits /* (V) */, int V) {
    int best = -1;
    for (int i = 0; i < V; i++) {
        if (logits[i] == logits[i] && (best < 0 || logits[i] > logits[best])) { best = i; }
    }
    return best;
}

/* Returns whether token a ranks before token b. */
static inline bool sample_before(const double* w, int32_t a, int32_t b) { return w[a] > w[b] || (w[a] == w[b] && a < b); }

/* Partitions order[0 .. n): order[0 .. result] become the fewest best-ranked ids whose measures sum to at least `need`. A
 * token's measure is its weight, or 1 if `by_count`. Returns that last index. */
static inline int sample_select(const double* w, int32_t* order, int n, double need, bool by_count) {
    int lo = 0, hi = n;
    while (hi - lo > 1) {
        // median of three as the pivot, parked at the end
        int mid = lo + (hi - lo) / 2, last = hi - 1, pick = mid;
        const bool first_mid = sample_before(w, order[lo], order[mid]);
        const bool mid_last = sample_before(w, order[mid], order[last]);
        const bool first_last = sample_before(w, order[lo], order[last]);
        if (first_mid != mid_last) { pick = first_mid == first_last ? last : lo; }
        int32_t pivot = order[pick];
        order[pick] = order[last];
        order[last] = pivot;
        int at = lo;
        double front = 0.0;  // measure of order[lo .. at)
        for (int i = lo; i < last; i++) {
            int32_t id = order[i];
            if (sample_before(w, id, pivot)) {
                order[i] = order[at];
                order[at++] = id;
                front += by_count ? 1.0 : w[id];
            }
        }
        order[last] = order[at];
        order[at] = pivot;
        const double with_pivot = front + (by_count ? 1.0 : w[pivot]);
        if (front >= need) {
            hi = at;
        } else if (with_pivot >= need || at + 1 == hi) {
            return at;
        } else {
            need -= with_pivot;
            lo = at + 1;
        }
    }
    return lo < n ? lo : n - 1;
}

/* Returns the token of draw `index` of the stream, or -1 if all logits are NaN. */
static inline int sampler_next(Sampler* s, const float* logits /* (V) */, uint32_t stream, uint64_t index) {
    for (int i = 0; s->seen && i < s->V; i++) {
        const float x = logits[i];
        s->penalised[i] = !s->seen[i] ? x : x < 0 ? x * s->penalty : x / s->penalty;
    }
    if (s->seen) { logits = s->penalised; }
    const int best = sample_greedy(logits, s->V);
    if (best < 0 || s->temperature <= 0.0 || s->top_p <= 0.0 || s->top_k == 1 || isinf(logits[best])) { return best; }
    double total = 0.0;
    int n = 0;
    for (int i = 0; i < s->V; i++) {
        double x = ((double)logits[i] - (double)logits[best]) / s->temperature;
        s->weights[i] = logits[i] == logits[i] ? exp(x) : -1.0;  // -1 ranks last
        if (s->weights[i] < 0.0) { continue; }
        total += s->weights[i];
        s->order[n++] = i;
    }
    int32_t threshold = -1;  // the last kept token; -1: all are kept
    if (s->top_k > 0 && s->top_k < n) {
        n = sample_select(s->weights, s->order, n, s->top_k, true) + 1;
        threshold = s->order[n - 1];
        total = 0.0;
        for (int i = 0; i < n; i++) { total += s->weights[s->order[i]]; }
    }
    if (s->top_p < 1.0) {
        // quick filter: all tokens below `least` together weigh less than the share to drop, so none of them is kept
        const double least = (1.0 - s->top_p) * total / n;
        int m = 0;
        for (int i = 0; i < n; i++) {
            if (s->weights[s->order[i]] >= least) { s->order[m++] = s->order[i]; }
        }
        n = m;
        int last = sample_select(s->weights, s->order, n, s->top_p * total, false);
        threshold = s->order[last];
    }
    // sum in the order of the walk below, so that rounding cannot carry the target past the end
    double kept = 0.0;
    for (int i = 0; i < s->V; i++) {
        if (threshold >= 0 && i != threshold && !sample_before(s->weights, i, threshold)) { s->weights[i] = -1.0; }
        if (s->weights[i] > 0.0) { kept += s->weights[i]; }
    }
    const double target = kept * philox_double(philox(s->seed, RAND_SAMPLE, stream, index), 0, 1);
    double sum = 0.0;
    int chosen = best;
    for (int i = 0; i < s->V; i++) {
        if (!(s->weights[i] > 0.0)) { continue; }
        sum += s->weights[i];
        chosen = i;
        if (sum > target) { break; }
    }
    return chosen;
}

#endif
