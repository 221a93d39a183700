/* test_shards.c -- what each rank of a run owns: buckets and shards of every preset, for 1 to 64 ranks; the ordered sum and
 * AdamW on shards against the same on the whole. */
#include "llmc/base/utils.h"

static size_t bucket_most = (size_t)64 << 20;  // a small limit cuts small models' buckets
#define BUCKET_MOST bucket_most

#include "llmc/adamw.h"
#include "llmc/base/threads.h"
#include "llmc/dist/buckets.h"

#include "test.h"

enum { MOST_RANKS = 64 };

// ---------------------------------------------------------------------------------------------------------------------
// shards

/* Checks that a table for so many ranks has the offsets of one rank's, but for the beginning of each bucket; with one rank
 * each tensor follows the one before it at the next multiple of PARAM_ALIGN. */
static void check_layout(const char* name, const ParamTable* t) {
    const size_t unit = (size_t)PARAM_ALIGN * (size_t)t->ranks;
    size_t at = 0, params = 0;
    for (int i = 0; i < t->count; i++) {
        const Param* p = &t->items[i];
        const bool begins = i == 0 || p->layer != t->items[i - 1].layer;
        if (!p->joined) { at = round_up(at, begins ? unit : PARAM_ALIGN); }
        CHECK(p->offset == at, "%s, %d ranks: %s is at %zu, wanted %zu", name, t->ranks, p->name, p->offset, at);
        CHECK(!begins || !p->joined, "%s: %s joins the bucket before", name, p->name);
        at += param_size(p);
        params += param_size(p);
    }
    CHECK(t->elements == round_up(at, unit) && t->num_params == params, "%s, %d ranks: %zu elements", name, t->ranks,
          t->elements);
}

/* Checks that the pieces tile the arena, that each is of one bucket, aligned and bounded, and that there are as few as can be. */
static void check_pieces(const char* name, const ModelConfig* c, const ParamTable* t, const Buckets* list) {
    const size_t unit = (size_t)PARAM_ALIGN * (size_t)t->ranks, most = bucket_most / unit * unit;
    size_t at = 0;
    int k = 0;
    for (int i = 0; i < t->count && k < list->count;) {
        const int layer = t->items[i].layer;
        const int wanted = layer < 0 && i > 0 ? c->num_layers : layer;
        while (i < t->count && t->items[i].layer == layer) { i++; }
        const size_t end = i < t->count ? t->items[i].offset : t->elements;
        const size_t pieces = ceil_div(end - at, most);
        size_t shortest = SIZE_MAX, longest = 0;
        for (size_t n = 0; n < pieces && k < list->count; n++, k++) {
            const Bucket* b = &list->items[k];
            CHECK(b->first == at && b->layer == wanted, "%s, %d ranks: piece %d is at %zu of %d, wanted %zu of %d", name,
                  t->ranks, k, b->first, b->layer, at, wanted);
            CHECK(b->count > 0 && b->count % unit == 0 && b->first % unit == 0 && b->count <= bucket_most,
                  "%s, %d ranks: piece %d has %zu elements", name, t->ranks, k, b->count);
            shortest = size_min(shortest, b->count);
            longest = size_max(longest, b->count);
            at += b->count;
        }
        CHECK(at == end, "%s, %d ranks: the bucket of layer %d ends at %zu, wanted %zu", name, t->ranks, layer, at, end);
        CHECK(longest - shortest <= unit, "%s, %d ranks: pieces of %zu and %zu", name, t->ranks, shortest, longest);
    }
    CHECK(k == list->count && at == t->elements, "%s, %d ranks: %d pieces with %zu elements", name, t->ranks, k, at);
}

/* Checks that element `at` belongs to `rank` alone, as its element `local`. */
static void check_element(const char* name, const Buckets* list, size_t at, int rank, size_t local) {
    size_t found = SIZE_MAX, other = 0;
    CHECK(shard_local(list, rank, at, &found) && found == local, "%s, %d ranks: element %zu is rank %d's %zu, wanted its %zu",
          name, list->ranks, at, rank, found, local);
    if (list->ranks == 1) { return; }
    CHECK(!shard_local(list, (rank + 1) % list->ranks, at, &other), "%s, %d ranks: element %zu has two owners", name,
          list->ranks, at);
}

/* Checks the shards of every piece: equal, aligned, one behind the other, and the ends of each owned by the right rank. With
 * `each`, does so for every element. */
static void check_shards(const char* name, const Buckets* list, bool each) {
    size_t local = 0;  // the same on all ranks
    for (int k = 0; k < list->count; k++) {
        const Bucket* b = &list->items[k];
        size_t at = b->first, count = 0;
        for (int r = 0; r < list->ranks; r++) {
            const ArenaRange shard = shard_of(b, r, list->ranks);
            count = r == 0 ? shard.count : count;
            CHECK(shard.first == at && shard.count == count && count % PARAM_ALIGN == 0,
                  "%s, %d ranks: rank %d has %zu elements of piece %d", name, list->ranks, r, shard.count, k);
            const size_t step = each ? 1 : size_max(1, shard.count - 1);
            for (size_t i = 0; i < shard.count; i += step) { check_element(name, list, at + i, r, local + i); }
            at += shard.count;
        }
        CHECK(at == b->first + b->count, "%s, %d ranks: the shards of piece %d end at %zu", name, list->ranks, k, at);
        local += count;
    }
    CHECK(local == shard_elements(list), "%s, %d ranks: %zu elements each, wanted %zu", name, list->ranks, local,
          shard_elements(list));
}

/* Checks that a rank's ranges are its shards, and whole if it is alone. */
static void check_ranges(const char* name, const ParamTable* t, const Buckets* list, int rank) {
    ArenaRanges own = shard_ranges(list, rank);
    size_t local = 0, end = 0;
    for (size_t i = 0; i < own.count; i++) {
        const ArenaRange range = own.items[i];
        CHECK(i == 0 || range.first > end, "%s: range %zu is not behind the one before", name, i);
        check_element(name, list, range.first, rank, local);
        local += range.count;
        end = range.first + range.count;
        check_element(name, list, end - 1, rank, local - 1);
    }
    CHECK(local == shard_elements(list) && end <= t->elements, "%s, %d ranks: %zu elements", name, list->ranks, local);
    CHECK(list->ranks > 1 || own.count == 1, "%s: %zu ranges for one rank", name, own.count);
    free(own.items);
}

static void check_model(const char* name, const ModelConfig* c, bool each) {
    for (int ranks = 1; ranks <= MOST_RANKS; ranks++) {
        ParamTable t = trained_table_for(c, ranks);
        Buckets list = buckets_list(&t);
        check_layout(name, &t);
        check_pieces(name, c, &t, &list);
        check_shards(name, &list, each);
        check_ranges(name, &t, &list, 0);
        check_ranges(name, &t, &list, ranks / 2);
        check_ranges(name, &t, &list, ranks - 1);
        buckets_free(&list);
        param_table_free(&t);
    }
}

static ModelConfig preset(const char* name, int vocab_size) {
    ModelConfig c;
    if (!config_preset(&c, name, vocab_size)) { die("%s is no preset", name); }
    return c;
}

static void every_preset_is_shared_out_equally(void) {
    for (int depth = 1; depth <= 12; depth++) {
        char name[16];
        snprintf(name, sizeof name, "d%d", depth);
        const ModelConfig small = preset(name, 257), large = preset(name, 32768);
        check_model(name, &small, false);
        check_model(name, &large, false);
    }
    for (size_t i = 0; i < sizeof presets / sizeof *presets; i++) {
        const ModelConfig c = preset(presets[i].name, 0);
        check_model(presets[i].name, &c, false);
    }
}

static void adapters_are_shared_out_equally(void) {
    static const char* const names[] = {"d1", "d3", "d12", "llama3.2-1b", "llama3.1-8b", "llama3.1-70b"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        for (int k = 0; k < NUM_LORA_PAIRS + 2; k++) {
            ModelConfig c = preset(names[i], 300);
            c.lora.rank = k % 2 ? 16 : 3;
            c.lora.alpha = 1;
            c.lora.on = k < NUM_LORA_PAIRS ? 1u << k : k == NUM_LORA_PAIRS ? 0x7F : 0x25;
            check_model(names[i], &c, false);
        }
    }
}

static void each_element_has_one_owner_and_each_owner_one_element(void) {
    ModelConfig c = preset("d2", 50);
    c.hidden_size = 12;
    c.head_dim = 6;
    c.intermediate_size = 20;
    check_model("a tiny model", &c, true);
    c.tied = true;
    check_model("a tiny tied model", &c, true);
    bucket_most = 3 * PARAM_ALIGN * MOST_RANKS;
    c = preset("d1", 300);
    check_model("a small model in pieces", &c, true);
    c.lora.rank = 8;
    c.lora.alpha = 1;
    c.lora.on = 0x7F;
    check_model("small adapters in pieces", &c, true);
    bucket_most = (size_t)64 << 20;
}

// ---------------------------------------------------------------------------------------------------------------------
// the sum in rank order, and AdamW on shards

/* Fills x with numbers of all sizes, so that the order in which they are added shows. */
static void fill_mixed(float* x, size_t n, uint64_t seed) {
    uint32_t bits = (uint32_t)seed * 2654435761u + 1;
    for (size_t i = 0; i < n; i++) {
        bits = bits * 1664525u + 1013904223u;  // a linear congruential generator: its upper bits are good enough
        x[i] = (float)(int32_t)bits * (float)(1 << (bits >> 8) % 19) * 1e-12f;
    }
}

static void ranks_are_added_in_their_order(void) {
    enum { N = 1000 };
    float *parts[MOST_RANKS], out[N];
    uint16_t *bf16[MOST_RANKS], *f16[MOST_RANKS], narrow[N];
    size_t reversed_differs = 0;
    for (int r = 0; r < MOST_RANKS; r++) {
        parts[r] = (float*)xmalloc(N * sizeof(float));
        bf16[r] = (uint16_t*)xmalloc(N * sizeof(uint16_t));
        f16[r] = (uint16_t*)xmalloc(N * sizeof(uint16_t));
        fill_mixed(parts[r], N, (uint64_t)r);
        for (int i = 0; i < N; i++) {
            bf16[r][i] = bf16_from_f32(parts[r][i]);
            f16[r][i] = f16_from_f32(parts[r][i]);
        }
    }
    for (int ranks = 1; ranks <= MOST_RANKS; ranks++) {
        for (int kind = 0; kind < 3; kind++) {
            const double squares = kind == 0   ? ordered_sum(out, (const float* const*)parts, ranks, N)
                                   : kind == 1 ? ordered_sum_16bit(out, (const uint16_t* const*)bf16, f32_from_bf16, ranks, N)
                                               : ordered_sum_16bit(out, (const uint16_t* const*)f16, f32_from_f16, ranks, N);
            double all = 0;
            size_t wrong = 0;
            for (int i = 0; i < N; i++) {
                volatile float sum = 0, reversed = 0;  // volatile: each addition is rounded
                for (int r = 0; r < ranks; r++) {
                    const int back = ranks - 1 - r;
                    sum = sum + (kind == 0 ? parts[r][i] : kind == 1 ? f32_from_bf16(bf16[r][i]) : f32_from_f16(f16[r][i]));
                    reversed = reversed + parts[back][i];
                }
                wrong += float_bits(sum) != float_bits(out[i]);
                reversed_differs += kind == 0 && float_bits(reversed) != float_bits(out[i]);
                all += (double)out[i] * (double)out[i];
            }
            CHECK(wrong == 0, "%d ranks, kind %d: %zu sums are wrong", ranks, kind, wrong);
            CHECK(fabs(squares - all) <= 1e-12 * all, "%d ranks: the squares add up to %g, wanted %g", ranks, squares, all);
        }
    }
    CHECK(reversed_differs > N, "the order makes no difference: the test cannot fail");
    round_sum(narrow, out, N, bf16_from_f32);
    for (int i = 0; i < N; i++) { CHECK(narrow[i] == bf16_from_f32(out[i]), "element %d is rounded otherwise", i); }

    // the sum may take the place of a part; one rank's is its own, bit for bit; a NaN of any rank stays
    parts[0][0] = -0.0f;
    memcpy(out, parts[0], sizeof out);
    ordered_sum(parts[0], (const float* const*)parts, 1, N);
    CHECK(memcmp(out, parts[0], sizeof out) == 0, "one rank's gradients are changed");
    parts[5][7] = NAN;
    ordered_sum(out, (const float* const*)parts, 9, N);
    ordered_sum(parts[3], (const float* const*)parts, 9, N);
    CHECK(isnan(out[7]) && isnan(parts[3][7]) && memcmp(out, parts[3], sizeof out) == 0, "the sum in the place of a part");
    for (int r = 0; r < MOST_RANKS; r++) {
        free(parts[r]);
        free(bf16[r]);
        free(f16[r]);
    }
}

/* Gradients and optimizer state: of the whole arena, or a rank's own elements. */
typedef struct {
    float *p, *g, *m, *v;
} Update;

static Update update_open(size_t n) {
    Update u;
    u.p = (float*)xcalloc(4 * n, sizeof(float));
    u.g = u.p + n;
    u.m = u.g + n;
    u.v = u.m + n;
    return u;
}

/* Updates elements [at, at + n) of u, which are elements [first, first + n) of the arena: tensor by tensor, each with the gap
 * behind it. */
static void update_range(const Update* u, const ParamTable* t, size_t first, size_t n, size_t at, AdamW hyper) {
    const double weight_decay = hyper.weight_decay;
    for (int i = 0; i < t->count; i++) {
        const size_t stop = i + 1 < t->count ? t->items[i + 1].offset : t->elements;
        const size_t begin = size_max(first, t->items[i].offset), end = size_min(first + n, stop);
        if (end <= begin) { continue; }
        const size_t k = at + begin - first;
        hyper.weight_decay = param_specs[t->items[i].kind].matrix ? weight_decay : 0;
        adamw_update(u->p + k, u->g + k, u->m + k, u->v + k, end - begin, &hyper);
    }
}

static AdamW hyper_of(int step, double norm) {
    const AdamW hyper = {1e-2, 0.9, 0.95, 1e-8, 0.1, (float)(1.0 / norm), step};
    return hyper;
}

/* Takes a step on the whole arena. Returns the gradient's norm. */
static double step_whole(const Update* u, const ParamTable* t, float* const* grads, int step) {
    memcpy(u->g, grads[0], t->elements * sizeof(float));
    for (int r = 1; r < t->ranks; r++) {
        for (size_t i = 0; i < t->elements; i++) { u->g[i] += grads[r][i]; }
    }
    double* scratch = (double*)xmalloc(global_norm_scratch(t->elements));
    const double norm = global_norm(u->g, t->elements, scratch);
    free(scratch);
    update_range(u, t, 0, t->elements, 0, hyper_of(step, norm));
    return norm;
}

/* Takes the same step on the shards of all ranks, with the norm of the whole arena. Returns the norm from the ranks' squares. */
static double step_shards(const Update* own, const ParamTable* t, const Buckets* list, float* const* grads, int step,
                          double norm) {
    double squares = 0;
    for (int rank = 0; rank < t->ranks; rank++) {
        double mine = 0;
        size_t at = 0;
        for (int k = 0; k < list->count; k++) {
            const ArenaRange shard = shard_of(&list->items[k], rank, t->ranks);
            const float* parts[MOST_RANKS];
            for (int r = 0; r < t->ranks; r++) { parts[r] = grads[r] + shard.first; }
            mine += ordered_sum(own[rank].g + at, parts, t->ranks, shard.count);
            update_range(&own[rank], t, shard.first, shard.count, at, hyper_of(step, norm));
            at += shard.count;
        }
        squares += mine;
    }
    return sqrt(squares);
}

/* Returns how many elements of an array of all ranks differ from the whole arena's, or, in a gap, from 0. */
static size_t wrong_elements(const ParamTable* t, const Buckets* list, const float* whole, const Update* own, size_t array,
                             size_t share) {
    size_t wrong = 0, local = 0;
    for (int i = 0; i < t->count; i++) {
        const Param* p = &t->items[i];
        const size_t end = p->offset + param_size(p), stop = i + 1 < t->count ? t->items[i + 1].offset : t->elements;
        for (size_t at = p->offset; at < stop; at++) {
            const int rank = shard_owner(list, at, &local);
            const float x = own[rank].p[array * share + local];
            wrong += float_bits(x) != float_bits(whole[at]) || (at >= end && float_bits(x) != 0);
        }
    }
    return wrong;
}

static void check_update(const ModelConfig* c, int ranks) {
    static const char* const names[] = {"weight", "gradient", "m", "v"};
    ParamTable t = trained_table_for(c, ranks);
    Buckets list = buckets_list(&t);
    const size_t share = shard_elements(&list);
    float* grads[MOST_RANKS];
    Update whole = update_open(t.elements), own[MOST_RANKS];
    for (int r = 0; r < ranks; r++) {
        grads[r] = (float*)xcalloc(t.elements, sizeof(float));
        own[r] = update_open(share);
    }
    for (int i = 0; i < t.count; i++) {
        const Param* p = &t.items[i];
        param_init(whole.p + p->offset, p, (uint32_t)i, c, 1);
        for (size_t k = p->offset; k < p->offset + param_size(p); k++) {
            size_t local = 0;
            const int rank = shard_owner(&list, k, &local);
            own[rank].p[local] = whole.p[k];
        }
    }
    for (int step = 1; step <= 2; step++) {
        for (int r = 0; r < ranks; r++) {
            for (int i = 0; i < t.count; i++) {
                const Param* p = &t.items[i];
                fill_mixed(grads[r] + p->offset, param_size(p), (uint64_t)(step * 1000 + r * 50 + i));
            }
        }
        const double norm = step_whole(&whole, &t, grads, step);
        const double sum = step_shards(own, &t, &list, grads, step, norm);
        CHECK(fabs(sum - norm) <= 1e-12 * norm, "%d ranks: the shards' norm is %.17g, wanted %.17g", ranks, sum, norm);
    }
    for (size_t a = 0; a < 4; a++) {
        const size_t wrong = wrong_elements(&t, &list, whole.p + a * t.elements, own, a, share);
        CHECK(wrong == 0, "%d ranks: %s differs in %zu of %zu elements", ranks, names[a], wrong, t.elements);
    }
    for (int r = 0; r < ranks; r++) {
        free(grads[r]);
        free(own[r].p);
    }
    free(whole.p);
    buckets_free(&list);
    param_table_free(&t);
}

static void adamw_on_shards_gives_the_bits_of_the_whole(void) {
    ModelConfig c = preset("d2", 61);
    c.hidden_size = 36;  // gaps behind norms
    c.head_dim = 18;
    c.intermediate_size = 50;
    for (int ranks = 1; ranks <= MOST_RANKS; ranks++) { check_update(&c, ranks); }
    bucket_most = PARAM_ALIGN * MOST_RANKS;
    for (int ranks = 1; ranks <= MOST_RANKS; ranks += 7) { check_update(&c, ranks); }
    c.tied = true;
    check_update(&c, 3);
    c.lora.rank = 5;
    c.lora.alpha = 1;
    c.lora.on = 0x7F;
    for (int ranks = 1; ranks <= MOST_RANKS; ranks += 9) { check_update(&c, ranks); }
    bucket_most = (size_t)64 << 20;
}

int main(void) {
#ifdef _OPENMP
    omp_set_num_threads(1);  // thousands of short updates
#endif
    RUN(every_preset_is_shared_out_equally);
    RUN(adapters_are_shared_out_equally);
    RUN(each_element_has_one_owner_and_each_owner_one_element);
    RUN(ranks_are_added_in_their_order);
    RUN(adamw_on_shards_gives_the_bits_of_the_whole);
    return test_summary();
}
