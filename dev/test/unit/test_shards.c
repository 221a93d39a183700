/* test_shards.c -- what each rank of a run owns. Buckets and shards of every preset, for 1 to 64 ranks; the ordered sum and
 * AdamW on shards against the whole; the optimizer state that any number of ranks writes and any other reads; checkpoints that
 * several processes write. */
#define _GNU_SOURCE 1
#include <unistd.h>

/* Replaces pread(): counts the bytes read. */
static size_t bytes_read;
static ssize_t test_pread(int fd, void* out, size_t bytes, off_t offset) {
    const ssize_t n = pread(fd, out, bytes, offset);
    if (n > 0) { __atomic_fetch_add(&bytes_read, (size_t)n, __ATOMIC_RELAXED); }
    return n;
}
#define pread test_pread

#include "llmc/base/utils.h"

static size_t bucket_most = (size_t)64 << 20;  // a small limit cuts small models' buckets
#define BUCKET_MOST bucket_most

#include "llmc/optim/optimizer.h"
#include "llmc/base/threads.h"
#include "llmc/dist/buckets.h"
#include "llmc/dist/zero.h"
#include "llmc/files/folder.h"
#include "llmc/files/optimizer_state.h"

#include "dev/test/oracles.h"
#include "dev/test/test.h"

enum { MOST_RANKS = 64 };

/* Returns the number of ranks that a test of many models takes after this one: each up to 16, then 28, 40, 52 and 64. */
static int next_ranks(int ranks) { return ranks + (ranks < 16 ? 1 : 12); }

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

/* Checks that the pieces tile the arena, and that each is of one bucket, aligned and bounded. No smaller number of pieces would
 * do. */
static void check_pieces(const char* name, const ModelConfig* c, const ParamTable* t, const Buckets* list) {
    const size_t unit = (size_t)PARAM_ALIGN * (size_t)t->ranks, most = bucket_most / unit * unit;
    size_t at = 0;
    int k = 0;
    for (int i = 0; i < t->count && k < list->count;) {
        const int layer = t->items[i].layer;
        const int wanted = layer < 0 && i > 0 ? c->num_layers : layer;
        do { i++; } while (i < t->count && t->items[i].layer == layer);
        const size_t end = i < t->count ? t->items[i].offset : t->elements;
        const size_t pieces = ceil_div(end - at, most);
        size_t shortest = SIZE_MAX, longest = 0;
        for (size_t n = 0; n < pieces && k < list->count; n++, k++) {
            const Bucket* b = &list->items[k];
            CHECK(b->first == at && b->layer == wanted, "%s, %d ranks: piece %d is at %zu of %d, wanted %zu of %d", name,
                  t->ranks, k, b->first, b->layer, at, wanted);
            CHECK(b->count > 0 && b->count % unit == 0 && b->first % unit == 0 && b->count <= most,
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

/* Checks the shards of every piece: they are equal, aligned and adjacent, and the right rank owns both ends of each. `each`:
 * checks the owner of every element. */
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
    for (int ranks = 1; ranks <= MOST_RANKS; ranks = next_ranks(ranks)) {
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

TEST(every_preset_is_shared_out_equally) {
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

TEST(adapters_are_shared_out_equally) {
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

TEST(each_element_has_one_owner_and_each_owner_one_element) {
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

TEST(ranks_are_added_in_their_order) {
    enum { N = 1000 };
    float *parts[MOST_RANKS], out[N], before[N], wanted[N], added[N];
    size_t reversed_differs = 0;
    fill_mixed(before, N, 77);
    for (int r = 0; r < MOST_RANKS; r++) {
        parts[r] = (float*)xmalloc(N * sizeof(float));
        fill_mixed(parts[r], N, (uint64_t)r);
    }
    for (int ranks = 1; ranks <= MOST_RANKS; ranks++) {
        const double squares = ordered_sum(out, (const float* const*)parts, ranks, N, false);
        double all = 0, all_added = 0;
        size_t wrong = 0;
        for (int i = 0; i < N; i++) {
            volatile float sum = 0, reversed = 0, both = 0;  // volatile: each addition is rounded
            for (int r = 0; r < ranks; r++) {
                sum = sum + parts[r][i];
                reversed = reversed + parts[ranks - 1 - r][i];
            }
            wrong += float_bits(sum) != float_bits(out[i]);
            reversed_differs += float_bits(reversed) != float_bits(out[i]);
            both = before[i] + sum;
            wanted[i] = both;
            all += (double)out[i] * (double)out[i];
            all_added += (double)wanted[i] * (double)wanted[i];
        }
        CHECK(wrong == 0, "%d ranks: %zu sums are wrong", ranks, wrong);
        CHECK(fabs(squares - all) <= 1e-12 * all, "%d ranks: the squares add up to %g, wanted %g", ranks, squares, all);
        // the next micro-batch of a step: its sum is added to the sum before
        memcpy(added, before, sizeof added);
        const double squares_added = ordered_sum(added, (const float* const*)parts, ranks, N, true);
        CHECK(memcmp(added, wanted, sizeof added) == 0, "%d ranks: a sum is added otherwise", ranks);
        CHECK(fabs(squares_added - all_added) <= 1e-12 * all_added, "%d ranks: added squares are %g, wanted %g", ranks,
              squares_added, all_added);
    }
    CHECK(reversed_differs > N, "the order makes no difference: the test cannot fail");

    // the sum may take the place of a part; one rank's sum is its part, bit for bit; a NaN of any rank stays
    parts[0][0] = -0.0f;
    memcpy(out, parts[0], sizeof out);
    ordered_sum(parts[0], (const float* const*)parts, 1, N, false);
    CHECK(memcmp(out, parts[0], sizeof out) == 0, "one rank's gradients are changed");
    parts[5][7] = NAN;
    ordered_sum(out, (const float* const*)parts, 9, N, false);
    ordered_sum(parts[3], (const float* const*)parts, 9, N, false);
    CHECK(isnan(out[7]) && isnan(parts[3][7]) && memcmp(out, parts[3], sizeof out) == 0, "the sum in the place of a part");
    for (int r = 0; r < MOST_RANKS; r++) { free(parts[r]); }
}

// ---------------------------------------------------------------------------------------------------------------------
// ZeRO 2 and 3: the ring of gradients, and the ring of gathered blocks

/* Checks the ring of one model's gradients: a bucket lies in one part, and neighbours lie in different parts. All blocks'
 * tensors lie at the same places, so that the gaps between them stay unchanged. */
static void check_gradient_ring(const char* name, const ModelConfig* c, int ranks) {
    ParamTable t = param_table_for(c, ranks);
    Buckets list = buckets_list(&t);
    const GradientRing r = gradient_ring_of(&t, c->num_layers, c->tied);
    int before = -1;
    size_t first = 0, last = 0;
    for (int i = 0; i < list.count; i++) {
        const Bucket* b = &list.items[i];
        const int part = gradient_part(&r, b->first, &first);
        const bool same = gradient_part(&r, b->first + b->count - 1, &last) == part && last == first && first <= b->first;
        const bool begins = i == 0 || b->layer != list.items[i - 1].layer;
        const int wanted = gradient_part_of(b->layer, c->num_layers, c->tied);
        CHECK(same && part == wanted, "%s, %d ranks: bucket %d lies in part %d, wanted %d", name, ranks, i, part, wanted);
        CHECK(!begins || first == b->first, "%s: bucket %d does not begin its part", name, i);
        CHECK(!begins || part != before, "%s: bucket %d takes the part of the one before", name, i);
        before = part;
    }
    for (int i = 0; i < t.count; i++) {
        const Param* p = &t.items[i];
        const int part = gradient_part(&r, p->offset, &first);
        if (p->layer < 0) { continue; }
        CHECK(p->offset - first == param_offset(&t, p->kind, 0) - r.first_block, "%s: %s lies elsewhere than in block 0", name,
              p->name);
        CHECK(part >= PART_BLOCK && part < GRADIENT_PARTS, "%s: part %d", name, part);
    }
    buckets_free(&list);
    param_table_free(&t);
}

/* Checks that the tensors that are no matrices fill their arena in order, each with its gap. */
static void check_vectors(const char* name, const ParamTable* t) {
    size_t end = 0;
    for (int i = 0; i < t->count; i++) {
        const Param* p = &t->items[i];
        CHECK(param_at(t, p->kind, p->layer) == p, "%s: %s is not found", name, p->name);
        if (param_specs[p->kind].matrix) { continue; }
        CHECK(p->vector_offset == end, "%s: %s lies at %zu, wanted %zu", name, p->name, p->vector_offset, end);
        end += (i + 1 < t->count ? p[1].offset : t->elements) - p->offset;
    }
    CHECK(t->vector_elements == end, "%s: %zu elements of vectors, wanted %zu", name, t->vector_elements, end);
}

/* Checks the owners of the matrices of one model, whose work differs by less than two of its largest matrices. */
static void check_deal(const char* name, const ModelConfig* c, int ranks) {
    ParamTable t = trained_table_for(c, ranks);
    Deal deal = deal_matrices(&t);
    double work[MOST_RANKS] = {0}, least = INFINITY, most = 0;
    const DealtMatrix* last[MOST_RANKS] = {NULL};  // of each rank
    int dealt = 0;
    for (int i = 0; i < t.count; i++) {
        unsigned long long owners = 0;
        for (int k = 0; k < deal.count; k++) {
            const DealtMatrix* m = &deal.items[k];
            dealt += m->param == &t.items[i];
            if (i > 0 || m->param->layer != 0) { continue; }
            CHECK(ranks < 7 || !(owners >> m->owner & 1), "%s, %d ranks: rank %d has two matrices", name, ranks, m->owner);
            owners |= 1ull << m->owner;
        }
    }
    CHECK(deal.count == 7 * c->num_layers && dealt == deal.count, "%s: %d of %d matrices have an owner", name, dealt,
          deal.count);
    for (int k = 0; k < deal.count; k++) {
        const DealtMatrix* m = &deal.items[k];
        CHECK(k == 0 || m->round >= m[-1].round, "%s, %d ranks: rounds are not in their order", name, ranks);
        const DealtMatrix* before = last[m->owner];
        const bool first = !before || before->round < m->round;
        CHECK(m->place == (first ? 0 : before->place + 1), "%s, %d ranks: place %d in round %d", name, ranks, m->place,
              m->round);
        CHECK(m->round == (first ? (before ? before->round + 1 : 0) : before->round), "%s: a rank skips round %d", name,
              m->round);
        CHECK(first || deal_same_shape(m->param, before->param), "%s, %d ranks: two shapes in a round", name, ranks);
        CHECK(m->place == 0 || ((size_t)m->place + 1) * param_size(m->param) <= MATRICES_MOST, "%s: a round is too long", name);
        last[m->owner] = m;
        work[m->owner] += m->flops;
    }
    for (int r = 0; r < ranks; r++) {
        least = fmin(least, work[r]);
        most = fmax(most, work[r]);
    }
    const double largest = (double)c->hidden_size * c->hidden_size * c->intermediate_size;
    CHECK(most - least < 2 * largest, "%s, %d ranks: the work is between %g and %g", name, ranks, least, most);
    free(deal.items);
    param_table_free(&t);
}

TEST(each_whole_matrix_has_one_owner) {
    static const char* const names[] = {"d1", "d3", "d12", "llama3.2-1b", "llama3.1-8b", "llama3.1-70b"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        ModelConfig c = preset(names[i], 300);
        c.optimizer = 1;
        for (int ranks = 1; ranks <= MOST_RANKS; ranks = next_ranks(ranks)) { check_deal(names[i], &c, ranks); }
        c.optimizer = 0;
        ParamTable t = trained_table_for(&c, 4);
        Deal deal = deal_matrices(&t);
        CHECK(deal.count == 0, "AdamW takes %d whole matrices", deal.count);
        free(deal.items);
        param_table_free(&t);
    }
}

/* Each slot has one place for each element whose rule keeps it, in the order of the arena; m has room for all, v for
 * AdamW's. */
TEST(slots_hold_what_rules_keep) {
    ModelConfig c = preset("d3", 300);
    bucket_most = 3 * PARAM_ALIGN * MOST_RANKS;
    for (int k = 0; k < 12; k++) {
        c.optimizer = k % 2;
        ParamTable t = trained_table_for(&c, 1 + k / 2 * 3);
        Buckets list = buckets_list(&t);
        size_t all[NUM_SLOTS] = {0}, wanted = 0, local = 0;
        for (int rank = 0; rank < t.ranks; rank++) {
            ArenaRanges own = shard_ranges(&list, rank);
            HeldState held = held_state(&t, &own);
            size_t next[NUM_SLOTS] = {0};
            for (size_t at = 0; at < t.elements; at++) {
                const bool here = held_here(&held, at);
                CHECK(here == shard_local(&list, rank, at, &local), "rank %d, element %zu", rank, at);
                for (int slot = SLOT_MASTER; here && slot < NUM_SLOTS; slot++) {
                    const size_t place = held_place(&held, (SlotKind)slot, at);
                    CHECK(place == SIZE_MAX || place == next[slot]++, "%s of element %zu", slot_names[slot], at);
                }
                CHECK(!here || held_place(&held, SLOT_MASTER, at) == local, "rank %d, element %zu is its %zu", rank, at, local);
            }
            for (int slot = SLOT_MASTER; slot < NUM_SLOTS; slot++) {
                CHECK(held.elements[slot] == next[slot], "%s has %zu elements", slot_names[slot], held.elements[slot]);
                all[slot] += next[slot];
            }
            CHECK(t.optimizer || t.ranks > 1 || held.ranges.count == 1, "%zu ranges", held.ranges.count);
            held_free(&held);
            free(own.items);
        }
        for (int i = 0; i < t.count; i++) {
            const size_t end = i + 1 < t.count ? t.items[i + 1].offset : t.elements;
            if (slot_kept(&t, &t.items[i], "v")) { wanted += end - t.items[i].offset; }
        }
        CHECK(all[SLOT_M] == t.elements && all[SLOT_V] == wanted, "%zu elements of m, %zu of v", all[SLOT_M], all[SLOT_V]);
        CHECK((wanted < t.elements) == (c.optimizer == 1), "%zu elements have v", wanted);
        buckets_free(&list);
        param_table_free(&t);
    }
    bucket_most = (size_t)64 << 20;
}

TEST(norms_lie_apart_in_their_order) {
    for (int ranks = 1; ranks <= 64; ranks *= 4) {
        for (int tied = 0; tied < 2; tied++) {
            ModelConfig c = preset("d3", 300);
            c.tied = tied;
            ParamTable t = param_table_for(&c, ranks);
            check_vectors("d3", &t);
            const size_t last = tied ? t.elements - param_offset(&t, P_FINAL_NORM, -1) : 256;
            CHECK(t.vector_elements == 2 * 3 * 256 + last, "%zu elements of norms", t.vector_elements);  // of 192
            CHECK(param_at(&t, P_LM_HEAD, -1)->kind == (tied ? P_EMBEDDING : P_LM_HEAD), "the head");
            CHECK(!param_at(&t, P_Q, 3) && !param_at(&t, P_Q_A, 0), "tensors that the model does not have");
            param_table_free(&t);
            c.lora.rank = 4;
            c.lora.on = 1;
            t = trained_table_for(&c, ranks);
            check_vectors("adapters", &t);
            CHECK(t.vector_elements == 0 && !param_at(&t, P_FINAL_NORM, -1) && !param_at(&t, P_LM_HEAD, -1), "frozen tensors");
            param_table_free(&t);
        }
    }
}

/* Some blocks may have a third norm; here the final norm's kind stands for it. */
TEST(a_third_norm_has_a_place) {
    const ModelConfig c = preset("d3", 300);
    for (int ranks = 1; ranks <= 8; ranks *= 8) {
        ParamTable t = param_table_open(&c, ranks);
        param_table_add(&t, &c, P_EMBEDDING, -1);
        for (int l = 0; l < 3; l++) {
            param_table_add_block(&t, &c, PLACE_BLOCK, l);
            if (l != 1) { param_table_add(&t, &c, P_FINAL_NORM, l); }
        }
        param_table_add(&t, &c, P_FINAL_NORM, -1);
        param_table_add(&t, &c, P_LM_HEAD, -1);
        param_table_close(&t);
        check_vectors("three norms", &t);
        CHECK(!param_at(&t, P_FINAL_NORM, 1), "block 1 has a third norm");
        CHECK(param_at(&t, P_DOWN, 2)->layer == 2 && param_at(&t, P_FINAL_NORM, 2)[-1].kind == P_DOWN, "behind down");
        CHECK(param_at(&t, P_INPUT_NORM, 1)->offset % bucket_align(&t) == 0, "block 1 does not begin a bucket");
        param_table_free(&t);
    }
}

TEST(gradients_take_turns_in_a_ring) {
    for (int ranks = 2; ranks <= 64; ranks *= 2) {
        const ModelConfig small = preset("d3", 300), one = preset("d1", 97);
        check_gradient_ring("d3", &small, ranks);
        check_gradient_ring("d1", &one, ranks);
        for (size_t i = 0; i < sizeof presets / sizeof *presets; i++) {
            const ModelConfig c = preset(presets[i].name, 0);
            check_gradient_ring(presets[i].name, &c, ranks);
        }
    }
}

/* The slots as a device would see them: work is done in the order in which it is queued. */
typedef struct {
    GatherRing ring;
    int holds[GATHER_SLOTS];  // the block in each slot after all queued work
    int gathers, late;        // all gathers, and the gathers that a block needs at once
} Gathering;

/* Asks for block l, as a layer does. */
static void ask_for(Gathering* g, int l) {
    int list[GATHER_SLOTS];
    const int count = gather_ring_next(&g->ring, l, list);
    for (int i = 0; i < count; i++) {
        const int slot = list[i] % GATHER_SLOTS;
        // the device waits for all earlier work; but block l itself computes from now on
        CHECK(g->holds[slot] != l, "block %d is overwritten by %d while it computes", l, list[i]);
        g->holds[slot] = list[i];
        g->gathers++;
        g->late += list[i] == l;
    }
    CHECK(g->holds[l % GATHER_SLOTS] == l, "block %d computes with the weights of %d", l, g->holds[l % GATHER_SLOTS]);
    CHECK(g->holds[0] != g->holds[1] || g->holds[0] < 0, "a block lies in two slots");
}

static void pass_begins(Gathering* g) {
    gather_ring_reset(&g->ring);
    for (int i = 0; i < GATHER_SLOTS; i++) { g->holds[i] = -1; }  // after an update they are stale
    g->gathers = g->late = 0;
}

TEST(blocks_are_gathered_in_time) {
    for (int L = 1; L <= 12; L++) {
        Gathering g;
        memset(&g, 0, sizeof g);
        g.ring.blocks = L;
        for (int again = 0; again < 2; again++) {  // a micro-step; its backward pass may ask twice (recompute)
            pass_begins(&g);
            for (int l = 0; l < L; l++) { ask_for(&g, l); }
            CHECK(g.gathers == L && g.late == 1, "%d blocks: forward gathers %d, %d late", L, g.gathers, g.late);
            for (int l = L - 1; l >= 0; l--) {
                ask_for(&g, l);
                ask_for(&g, l);
            }
            const int wanted = L > GATHER_SLOTS ? 2 * L - GATHER_SLOTS : L;
            CHECK(g.gathers == wanted && g.late == 1, "%d blocks: a micro-step gathers %d, %d late", L, g.gathers, g.late);
        }
        for (int again = 0; again < 3; again++) {  // tokens of a sample
            pass_begins(&g);
            for (int l = 0; l < L; l++) { ask_for(&g, l); }
            CHECK(g.gathers == L && g.late == 1, "%d blocks: a token gathers %d, %d late", L, g.gathers, g.late);
        }
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
 * that follows it. */
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

/* Takes the same step on the shards of all ranks, with the norm of the whole arena. Returns the norm from the ranks'
 * squares. */
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
            mine += ordered_sum(own[rank].g + at, parts, t->ranks, shard.count, false);
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
        param_init(whole.p + p->offset, p, 0, param_size(p), (uint32_t)i, c, 1);
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

TEST(adamw_on_shards_gives_the_bits_of_the_whole) {
    ModelConfig c = preset("d2", 61);
    c.hidden_size = 36;  // gaps behind norms
    c.head_dim = 18;
    c.intermediate_size = 50;
    for (int ranks = 1; ranks <= MOST_RANKS; ranks = next_ranks(ranks)) { check_update(&c, ranks); }
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

// ---------------------------------------------------------------------------------------------------------------------
// state files

static ModelConfig tiny_model(void) {
    ModelConfig c = preset("d3", 300);
    c.hidden_size = 12;
    c.head_dim = 6;
    c.num_heads = 2;
    c.num_kv_heads = 1;
    c.intermediate_size = 20;
    return c;
}

/* One rank of a run, with its own elements of each kind of state. */
typedef struct {
    ParamTable table;
    Buckets buckets;
    ArenaRanges own;
    HeldState held;
    int rank;
    float* local[3];  // (shard_elements) m, v, master
} Rank;

/* One kind of state of a rank: the context of a slot's functions. */
typedef struct {
    Rank* rank;
    int kind;
} RankState;

static const SlotKind kinds[3] = {SLOT_M, SLOT_V, SLOT_MASTER};

static Rank rank_open(const ModelConfig* c, int rank, int ranks) {
    Rank r;
    r.table = trained_table_for(c, ranks);
    r.buckets = buckets_list(&r.table);
    r.own = shard_ranges(&r.buckets, rank);
    r.held = held_state(&r.table, &r.own);
    r.rank = rank;
    for (int k = 0; k < 3; k++) { r.local[k] = (float*)xcalloc(shard_elements(&r.buckets), sizeof(float)); }
    return r;
}

static void rank_close(Rank* r) {
    for (int k = 0; k < 3; k++) { free(r->local[k]); }
    free(r->own.items);
    held_free(&r->held);
    buckets_free(&r->buckets);
    param_table_free(&r->table);
}

/* Returns where n elements of a parameter lie among the rank's own elements; they must be adjacent there. */
static float* place(const RankState* s, const Param* p, size_t first, size_t n) {
    const Rank* r = s->rank;
    const size_t at = p->offset + first;
    const bool kept = slot_kept(&r->table, p, slot_names[kinds[s->kind]]);
    const bool own = kept && held_here(&r->held, at) && held_here(&r->held, at + n - 1) &&
                     arena_range_at(&r->held.ranges, at) == arena_range_at(&r->held.ranges, at + n - 1);
    CHECK(own, "rank %d does not hold elements %zu to %zu of %s", r->rank, first, first + n - 1, p->name);
    return own ? r->local[s->kind] + held_place(&r->held, kinds[s->kind], at) : NULL;
}

static bool give(void* ctx, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    const float* at = place((const RankState*)ctx, p, first, n);
    if (!at) { return fail(e, "not this rank's"); }
    memcpy(dst, at, n * sizeof(float));
    return true;
}

static bool take(void* ctx, const Param* p, size_t first, size_t n, const float* src, Error* e) {
    float* at = place((const RankState*)ctx, p, first, n);
    if (!at) { return fail(e, "not this rank's"); }
    memcpy(at, src, n * sizeof(float));
    return true;
}

/* Returns the state of an element of a parameter, the same for any number of ranks. bf16 holds its bits, too, since m is saved
 * in bf16. */
static float state_value(int kind, int param, size_t i) {
    const uint32_t bits = ((uint32_t)kind * 77u + (uint32_t)param * 1009u + (uint32_t)i * 31u + 1) * 2654435761u;
    const float x = float_from_bits((bits & 0x80FF0000u) | 0x3F000000u);
    return kind == 1 ? fabsf(x) + (float)i : i % 97 == 5 ? -0.0f : x;
}

/* Fills the state of a rank, or checks it. Gaps are 0. Returns the number of elements that differ. */
static size_t rank_values(Rank* r, bool fill) {
    size_t wrong = 0;
    float* want = (float*)xcalloc(shard_elements(&r->buckets), sizeof(float));
    for (int k = 0; k < 3; k++) {
        memset(want, 0, shard_elements(&r->buckets) * sizeof(float));
        for (int i = 0; i < r->table.count; i++) {
            const Param* p = &r->table.items[i];
            for (size_t n = 0; n < param_size(p) && slot_kept(&r->table, p, slot_names[kinds[k]]); n++) {
                const size_t at = p->offset + n;
                if (held_here(&r->held, at)) { want[held_place(&r->held, kinds[k], at)] = state_value(k, i, n); }
            }
        }
        for (size_t i = 0; i < shard_elements(&r->buckets); i++) {
            if (fill) { r->local[k][i] = want[i]; }
            wrong += float_bits(r->local[k][i]) != float_bits(want[i]);
        }
    }
    free(want);
    return wrong;
}

static void rank_slots(Rank* r, RankState states[3], StateSlot slots[3]) {
    for (int k = 0; k < 3; k++) {
        const RankState state = {r, k};
        const StateSlot slot = {slot_names[kinds[k]], k == 0 ? SAFE_BF16 : SAFE_F32, give, take, &states[k], NULL};
        states[k] = state;
        slots[k] = slot;
    }
}

static bool rank_save(const char* dir, Rank* r, Error* e) {
    RankState states[3];
    StateSlot slots[3];
    rank_slots(r, states, slots);
    return state_save(dir, r->rank, &r->table, &r->own, slots, 3, NULL, e);
}

static bool rank_load(const char* dir, int written_by, Rank* r, Error* e) {
    RankState states[3];
    StateSlot slots[3];
    rank_slots(r, states, slots);
    return state_load(dir, written_by, &r->table, &r->own, slots, 3, e);
}

/* Writes the state of a run of `ranks` ranks. */
static void save_all(const char* dir, const ModelConfig* c, int ranks) {
    for (int i = 0; i < ranks; i++) {
        Error e = NO_ERROR;
        Rank r = rank_open(c, i, ranks);
        rank_values(&r, true);
        CHECK(rank_save(dir, &r, &e), "rank %d of %d: %s", i, ranks, e.msg);
        rank_close(&r);
    }
}

/* Loads the state that `writers` ranks wrote into `from` as `readers` ranks, checks it, and writes it again to `to`. */
static void load_all(const char* from, int writers, const char* to, const ModelConfig* c, int readers) {
    for (int i = 0; i < readers; i++) {
        Error e = NO_ERROR;
        Rank r = rank_open(c, i, readers);
        CHECK(rank_load(from, writers, &r, &e), "rank %d of %d reads what %d wrote: %s", i, readers, writers, e.msg);
        const size_t wrong = rank_values(&r, false);
        CHECK(wrong == 0, "rank %d of %d reads what %d wrote: %zu elements differ", i, readers, writers, wrong);
        CHECK(rank_save(to, &r, &e), "rank %d of %d: %s", i, readers, e.msg);
        rank_close(&r);
    }
}

/* Returns whether the state files of two runs, each of `ranks` ranks, hold the same bytes. */
static bool same_files(const char* a, const char* b, int ranks) {
    bool same = true;
    for (int i = 0; i < ranks; i++) {
        char name[64];
        size_t x_size = 0, y_size = 0;
        Error e = NO_ERROR;
        state_file_name(name, i);
        char* x = read_file(test_path(a, name), &x_size, 1 << 28, &e);
        char* y = read_file(test_path(b, name), &y_size, 1 << 28, &e);
        same = same && x && y && x_size == y_size && memcmp(x, y, x_size) == 0;
        free(x);
        free(y);
    }
    return same;
}

/* Passes the state from each number of ranks to the next. Then compares the last files with the files that as many ranks write
 * at first. */
static void check_chain(const ModelConfig* c, const int* ranks, int count) {
    const char *from = test_folder(), *fresh = test_folder();
    save_all(from, c, ranks[0]);
    for (int i = 1; i < count; i++) {
        const char* to = test_folder();
        load_all(from, ranks[i - 1], to, c, ranks[i]);
        from = to;
    }
    save_all(fresh, c, ranks[count - 1]);
    CHECK(same_files(from, fresh, ranks[count - 1]), "the files that went from %d ranks to %d differ from fresh ones", ranks[0],
          ranks[count - 1]);
}

TEST(any_number_of_ranks_reads_the_shards_of_any_other) {
    static const int chains[][5] = {{8, 4, 1, 8, 1}, {3, 5, 2, 7, 3}, {1, 64, 12, 1, 16}};
    ModelConfig c = tiny_model();
    for (int k = 0; k < 3; k++) { check_chain(&c, chains[k], 5); }
    c.optimizer = 1;  // keeps no v of most tensors
    for (int k = 0; k < 3; k++) { check_chain(&c, chains[k], 5); }
    bucket_most = 1024;  // several parts of a parameter in a file
    check_chain(&c, chains[1], 5);
    c.optimizer = 0;
    check_chain(&c, chains[0], 5);
    check_chain(&c, chains[1], 5);
    c.tied = true;
    check_chain(&c, chains[0], 4);
    c.lora.rank = 3;
    c.lora.alpha = 1;
    c.lora.on = 0x7F;
    check_chain(&c, chains[0], 4);
    check_chain(&c, chains[1], 4);
    bucket_most = (size_t)64 << 20;
}

/* Returns the bytes that a rank reads of `writers` ranks' files, without the bytes of headers. */
static size_t data_read(const char* dir, int writers, Rank* r) {
    Error e = NO_ERROR;
    const ArenaRanges own = r->own, none = {NULL, 0};
    bytes_read = 0;
    r->own = none;
    CHECK(rank_load(dir, writers, r, &e), "%s", e.msg);
    const size_t headers = bytes_read;
    r->own = own;
    bytes_read = 0;
    CHECK(rank_load(dir, writers, r, &e), "%s", e.msg);
    return bytes_read - headers;
}

TEST(a_rank_reads_no_more_than_it_owns) {
    const ModelConfig c = tiny_model();
    const char* dir = test_folder();
    bucket_most = 1024;
    save_all(dir, &c, 8);
    size_t all = 0;
    for (int i = 0; i < 3; i++) {
        Rank r = rank_open(&c, i, 3);
        size_t wanted = 0, first = 0;
        for (int k = 0; k < r.table.count; k++) {
            for (size_t n = 0; n < r.own.count; n++) { wanted += state_part(&r.table.items[k], r.own.items[n], &first) * 10; }
        }
        const size_t got = data_read(dir, 8, &r);  // 2 + 4 + 4 bytes an element
        CHECK(got == wanted, "rank %d reads %zu bytes, wanted %zu", i, got, wanted);
        all += got;
        if (i == 2) { CHECK(all == r.table.num_params * 10, "all read %zu bytes", all); }
        rank_close(&r);
    }
    bucket_most = (size_t)64 << 20;
}

/* Replaces the first `from` in a file by `to`, which is as long. */
static void patch(const char* path, const char* from, const char* to) {
    size_t size = 0;
    Error e = NO_ERROR;
    char* text = read_file(path, &size, 1 << 28, &e);
    char* at = text ? (char*)memmem(text, size, from, strlen(from)) : NULL;
    if (!at) { die("%s: holds no %s", path, from); }
    memcpy(at, to, strlen(to));
    if (!write_file(path, text, size, &e)) { die("%s", e.msg); }
    free(text);
}

/* Loads as each of 3 ranks. Every load must fail, with `file` and `words` in its message. */
static void check_refused(const char* what, const char* dir, int writers, const char* file, const char* words) {
    const ModelConfig c = tiny_model();
    for (int i = 0; i < 3; i++) {
        Error e = NO_ERROR;
        Rank r = rank_open(&c, i, 3);
        const bool ok = rank_load(dir, writers, &r, &e);
        CHECK(!ok && contains(e.msg, dir) && contains(e.msg, file) && contains(e.msg, words), "%s, rank %d: %s", what, i,
              e.msg);
        rank_close(&r);
    }
}

TEST(parts_that_lack_or_repeat_elements_or_are_damaged_are_refused_by_name) {
    const ModelConfig c = tiny_model();
    Error e = NO_ERROR;
    const char* const second = "state_rank00001.safetensors";
    const char* dir = test_folder();
    bucket_most = 1024;
    save_all(dir, &c, 4);
    Rank r = rank_open(&c, 1, 4);
    rank_values(&r, true);

    const ArenaRange kept = r.own.items[0];  // of the embedding
    const char* const embedding = "m.model.embed_tokens.weight";
    r.own.items[0].count--;
    CHECK(rank_save(dir, &r, &e), "%s", e.msg);
    check_refused("an element is missing", dir, 4, embedding, "each once");
    r.own.items[0].count = kept.count;
    r.own.count--;
    CHECK(rank_save(dir, &r, &e), "%s", e.msg);
    check_refused("the last range is missing", dir, 4, "m.lm_head.weight", "each once");
    r.own.count++;
    CHECK(rank_save(dir, &r, &e), "%s", e.msg);
    save_all(dir, &c, 4);
    Rank other = rank_open(&c, 1, 3);
    rank_values(&other, true);
    CHECK(rank_save(dir, &other, &e), "%s", e.msg);
    check_refused("a file of another number of ranks", dir, 4, second, "each once");
    rank_close(&other);
    CHECK(rank_save(dir, &r, &e), "%s", e.msg);

    patch(test_path(dir, second), "m.model.embed_tokens.weight@256", "m.model.embed_tokens.weight@255");
    check_refused("a part that overlaps the one before", dir, 4, second,
                  "@255\" starts at element 255, but the parts before it end at 256");
    patch(test_path(dir, second), "m.model.embed_tokens.weight@255", "m.model.embed_tokens.weight@25x");
    check_refused("a part without a number", dir, 4, second, "wanted its first element");
    CHECK(rank_save(dir, &r, &e), "%s", e.msg);
    patch(test_path(dir, second), "m.model.embed_tokens.weight@1280", "m.model.embed_tokens.weight@3599");
    check_refused("a part behind the end", dir, 4, second, "embed_tokens.weight@3599");
    CHECK(rank_save(dir, &r, &e), "%s", e.msg);
    patch(test_path(dir, second), "v.model.layers.1.", "v.model.layers.7.");
    check_refused("a parameter of another model", dir, 4, second, "belongs to no parameter");
    CHECK(rank_save(dir, &r, &e), "%s", e.msg);

    CHECK(truncate(test_path(dir, second), 5000) == 0, "truncate");
    check_refused("a file that is cut short", dir, 4, second, "");
    CHECK(unlink(test_path(dir, second)) == 0, "unlink");
    check_refused("a file that is missing", dir, 4, second, "");
    rank_close(&r);
    bucket_most = (size_t)64 << 20;
}

TEST(a_value_that_is_not_finite_is_refused_by_who_reads_it) {
    const ModelConfig c = tiny_model();
    Error e = NO_ERROR;
    const char* dir = test_folder();
    save_all(dir, &c, 4);
    Rank r = rank_open(&c, 2, 4);
    rank_values(&r, true);
    size_t local = 0;
    const size_t at = r.own.items[0].first + 5;
    CHECK(shard_local(&r.buckets, 2, at, &local), "not this rank's");
    r.local[2][local] = NAN;
    CHECK(rank_save(dir, &r, &e), "%s", e.msg);
    rank_close(&r);
    for (int i = 0; i < 4; i++) {
        r = rank_open(&c, i, 4);
        e.msg[0] = 0;
        CHECK(rank_load(dir, 4, &r, &e) == (i != 2), "rank %d: %s", i, e.msg);
        CHECK(i != 2 || (contains(e.msg, "state_rank00002") && contains(e.msg, "master.model.embed_tokens.weight")), "%s",
              e.msg);
        rank_close(&r);
    }
}

/* Writes a rank's state file without its data: a file with a hole. */
static void save_header(const char* dir, const Rank* r, const StateSlot* slots) {
    char name[64];
    Error e = NO_ERROR;
    SafeWriter w;
    const size_t most = 3 * ((size_t)r->table.count + r->own.count);
    SafeTensor* tensors = (SafeTensor*)xcalloc(most, sizeof(SafeTensor));
    TensorSpan* spans = (TensorSpan*)xcalloc(most, sizeof(TensorSpan));
    StateName* names = (StateName*)xcalloc(most, sizeof(StateName));
    const size_t count = state_list(&r->table, &r->own, slots, 3, tensors, spans, names);
    state_file_name(name, r->rank);
    must(count <= most && safewriter_open(&w, test_path(dir, name), tensors, count, &e), &e);
    if (fflush(w.f) != 0 || ftruncate(fileno(w.f), (off_t)w.total) != 0) { die("%s: %s", name, strerror(errno)); }
    fclose(w.f);
    free(tensors);
    free(spans);
    free(names);
}

TEST(the_state_of_70b_on_64_ranks_opens_quickly) {
    const ModelConfig c = preset("llama3.1-70b", 0);
    const StateSlot slots[3] = {{"m", SAFE_F32, NULL, NULL, NULL, NULL},
                                {"v", SAFE_F32, NULL, NULL, NULL, NULL},
                                {"master", SAFE_F32, NULL, NULL, NULL, NULL}};
    Error e = NO_ERROR;
    const char* dir = test_folder();
    Rank r;
    r.table = trained_table_for(&c, MOST_RANKS);
    r.buckets = buckets_list(&r.table);
    for (r.rank = 0; r.rank < MOST_RANKS; r.rank++) {
        r.own = shard_ranges(&r.buckets, r.rank);
        save_header(dir, &r, slots);
        if (r.rank + 1 < MOST_RANKS) { free(r.own.items); }
    }
    bytes_read = 0;
    const clock_t start = clock();
    CHECK(state_load(dir, MOST_RANKS, &r.table, &r.own, slots, 3, &e), "%s", e.msg);
    const double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;  // of this process: others may be busy
    printf("    %d files with %.1f MiB of headers: %.2f s\n", MOST_RANKS, (double)bytes_read / (1 << 20), seconds);
    CHECK(seconds < 10, "%g s", seconds);
    free(r.own.items);
    buckets_free(&r.buckets);
    param_table_free(&r.table);
}

int main(void) {
#ifdef _OPENMP
    omp_set_num_threads(1);  // thousands of short updates
#endif
    return test_all();
}
