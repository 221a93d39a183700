/* test_bpe.c -- tests bpe.h against a plain trainer, which counts every pair anew for each merge.
 * dev/test/python/test_bpe.py compares the program with `tokenizers`. */
#include "dev/data/bpe.h"

#include "dev/data/train_bpe.h"  // defines: Counting, counting_begin, counting_add, counting_end
#include "dev/test/test.h"
#include "llmc/text/tokenizer_write.h"  // defines: write_tokenizer_json

enum { MOST_PIECES = 64, MOST_BYTES = 48, MOST_TOKENS = 400 };

// ---------------------------------------------------------------------------------------------------------------------
// the plain trainer

typedef struct {
    uint32_t ids[MOST_PIECES][MOST_BYTES];
    size_t len[MOST_PIECES];
    uint64_t count[MOST_PIECES];
    size_t num_pieces;
} Plain;

/* Finds the pair that merges next. Returns false if there is none. */
static bool plain_best(const Plain* p, uint64_t* best) {
    uint64_t best_count = 0;
    for (size_t i = 0; i < p->num_pieces; i++) {
        for (size_t k = 0; k + 1 < p->len[i]; k++) {
            const uint64_t pair = (uint64_t)p->ids[i][k] << 32 | p->ids[i][k + 1];
            uint64_t count = 0;
            for (size_t j = 0; j < p->num_pieces; j++) {
                for (size_t m = 0; m + 1 < p->len[j]; m++) {
                    count += p->ids[j][m] == pair >> 32 && p->ids[j][m + 1] == (uint32_t)pair ? p->count[j] : 0;
                }
            }
            if (count > best_count || (count == best_count && pair < *best)) {
                best_count = count;
                *best = pair;
            }
        }
    }
    return best_count > 0;
}

static void plain_merge(Plain* p, uint64_t pair, uint32_t merged) {
    for (size_t i = 0; i < p->num_pieces; i++) {
        size_t out = 0;
        for (size_t k = 0; k < p->len[i]; out++) {
            const bool here = k + 1 < p->len[i] && p->ids[i][k] == pair >> 32 && p->ids[i][k + 1] == (uint32_t)pair;
            p->ids[i][out] = here ? merged : p->ids[i][k];
            k += here ? 2 : 1;
        }
        p->len[i] = out;
    }
}

/* Returns the id of a byte: its rank among GPT-2's stand-ins. */
static uint32_t id_of_byte(uint8_t byte) {
    uint16_t code[256];
    int16_t byte_of[512];
    uint32_t rank = 0;
    byte_stand_ins(code, byte_of);
    for (int b = 0; b < 256; b++) { rank += code[b] < code[byte]; }
    return rank;
}

static uint32_t random_below(uint64_t* state, uint32_t n) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33) % n;
}

/* Makes pieces of a few letters, in both forms. */
static void make_pieces(Plain* p, PieceCounts* c, uint64_t* state) {
    const uint32_t letters = 1 + random_below(state, 4), most = 2 + random_below(state, MOST_BYTES - 1);
    p->num_pieces = 0;
    piece_counts_init(c, hash_seed());
    for (size_t tries = random_below(state, MOST_PIECES) + 1; tries > 0; tries--) {
        char s[MOST_BYTES];
        const size_t n = 1 + random_below(state, most - 1), i = p->num_pieces, before = c->used;
        for (size_t k = 0; k < n; k++) {
            s[k] = (char)('a' + random_below(state, letters));
            p->ids[i][k] = id_of_byte((uint8_t)s[k]);
        }
        p->count[i] = 1 + random_below(state, 5);
        p->len[i] = n;
        piece_counts_add(c, hash_key(c->seed, s, n), s, n, p->count[i]);
        p->num_pieces += c->used > before;  // a piece that was there already: only its first form keeps to the count
        if (c->used == before) { piece_counts_add(c, hash_key(c->seed, s, n), s, n, UINT64_MAX - p->count[i] + 1); }
    }
}

// ---------------------------------------------------------------------------------------------------------------------

static void check_against_plain(bool low_limit) {
    static Plain p;
    uint64_t state = 7;
    for (int round = 0; round < 300; round++) {
        PieceCounts c;
        Bpe b;
        make_pieces(&p, &c, &state);
        bpe_begin(&b, &c, MOST_TOKENS);
        if (low_limit) {
            b.most_pairs = 2;
            bpe_collect(&b);
        }
        while (bpe_next(&b)) {
            uint64_t want = 0;
            const bool any = plain_best(&p, &want);
            const uint32_t merged = (uint32_t)b.num_tokens - 1;
            CHECK(any && b.merges[merged] == want, "round %d, token %u: pair %llx, wanted %llx", round, merged,
                  (unsigned long long)b.merges[merged], (unsigned long long)want);
            if (!any || b.merges[merged] != want) { break; }
            plain_merge(&p, want, merged);
        }
        uint64_t none = 0;
        CHECK(b.num_tokens == b.most || !plain_best(&p, &none), "round %d: ended after %zu tokens", round, b.num_tokens);
        bpe_free(&b);
        if (checks_failed) { return; }
    }
}

TEST(each_merge_is_that_of_a_trainer_that_counts_anew) { check_against_plain(false); }

TEST(pairs_below_the_floor_are_found_when_their_turn_comes) { check_against_plain(true); }

/* Learns one token from pieces with these counts, and checks what it spells. */
static void check_first(const char* const* pieces, const uint64_t* counts, size_t n, const char* want) {
    PieceCounts c;
    Bpe b;
    piece_counts_init(&c, hash_seed());
    for (size_t i = 0; i < n; i++) {
        const size_t len = strlen(pieces[i]);
        piece_counts_add(&c, hash_key(c.seed, pieces[i], len), pieces[i], len, counts[i]);
    }
    bpe_begin(&b, &c, 257);
    const bool learnt = bpe_next(&b);
    const uint64_t pair = (uint64_t)id_of_byte((uint8_t)want[0]) << 32 | id_of_byte((uint8_t)want[1]);
    CHECK(learnt && b.merges[256] == pair, "pair %llx, wanted %s", (unsigned long long)b.merges[256], want);
    bpe_free(&b);
}

TEST(a_piece_counted_three_thousand_million_times_merges_first) {
    const char* const pieces[] = {"xy", "pq"};
    check_first(pieces, (const uint64_t[]){2000000000u, 3000000000u}, 2, "pq");  // as int32, the higher count is negative
    check_first(pieces, (const uint64_t[]){3000000000u, 5000000000u}, 2, "pq");  // as uint32, 5e9 is below 3e9
}

TEST(of_equal_counts_the_lower_ids_merge_first) {
    check_first((const char* const[]){"zb", "ya"}, (const uint64_t[]){5, 5}, 2, "ya");
    check_first((const char* const[]){"yb", "ya"}, (const uint64_t[]){5, 5}, 2, "ya");
    check_first((const char* const[]){" b", "ya"}, (const uint64_t[]){5, 5}, 2, "ya");  // GPT-2's order: the space is late
}

TEST(overlapping_positions_count) {
    check_first((const char* const[]){"bbb", "ac"}, (const uint64_t[]){2, 3}, 2, "bb");  // 4 of bb, 3 of ac
}

// ---------------------------------------------------------------------------------------------------------------------

/* Makes a text of characters of all classes, some broken. Returns its length. */
static size_t make_text(char* s, size_t most, uint64_t* state) {
    static const char* const units[] = {"a",
                                        "s",
                                        "'",
                                        "1",
                                        " ",
                                        "\n",
                                        "\r",
                                        "!",
                                        "\t",
                                        "\xC3\xA9",
                                        "\xE4\xBD\xA0",
                                        "\xC2\xBC",
                                        "\xE2\x80\x83",
                                        "\xF0\x9F\x98\x80",
                                        "\xC5\xBF",
                                        "\xE4",
                                        "\xFF",
                                        "ll"};
    const size_t kinds = 2 + random_below(state, sizeof units / sizeof *units - 1),
                 wanted = random_below(state, (uint32_t)most - 8);
    size_t n = 0;
    uint32_t offset = random_below(state, sizeof units / sizeof *units);
    while (n < wanted) {
        const char* unit = units[(offset + random_below(state, (uint32_t)kinds)) % (sizeof units / sizeof *units)];
        memcpy(s + n, unit, strlen(unit));
        n += strlen(unit);
    }
    return n;
}

/* Marks where the pieces of s[from .. to) end. */
static void piece_ends(const char* s, size_t from, size_t to, bool* ends) {
    for (const uint8_t *p = (const uint8_t*)s + from, *end = (const uint8_t*)s + to; p < end;) {
        p = scan_llama3(p, end, 3);
        ends[p - (const uint8_t*)s] = true;
    }
}

TEST(a_text_cut_at_a_border_has_the_pieces_of_the_whole) {
    char s[200];
    bool whole[201], parts[201];
    uint64_t state = 3;
    int borders = 0, last_borders = 0;
    for (int round = 0; round < 10000; round++) {
        const size_t n = make_text(s, sizeof s, &state), known = n ? random_below(&state, (uint32_t)n + 1) : 0;
        const size_t last = piece_last_border(s, known);  // what is behind is not known yet
        memset(whole, 0, sizeof whole);
        piece_ends(s, 0, n, whole);
        last_borders += last > 0;
        for (size_t i = 1; i < n; i++) {
            if (!piece_border(s, i, n) && i != last) { continue; }
            borders++;
            memset(parts, 0, sizeof parts);
            piece_ends(s, 0, i, parts);
            piece_ends(s, i, n, parts);
            CHECK(memcmp(whole, parts, sizeof whole) == 0, "round %d: the cut at %zu of %zu", round, i, n);
        }
        if (checks_failed) { return; }
    }
    CHECK(borders > 20000 && last_borders > 5000, "%d borders, %d last ones: the test has become blind", borders, last_borders);
}

TEST(a_stream_of_digits_or_symbols_is_cut) {
    char s[1000];
    memset(s, '7', sizeof s);
    CHECK(piece_last_border(s, sizeof s) >= 990 && piece_last_border(s, sizeof s) % 3 == 0, "%zu",
          piece_last_border(s, sizeof s));
    for (size_t i = 0; i < sizeof s; i++) { s[i] = i % 5 ? '!' : ' '; }
    CHECK(piece_last_border(s, sizeof s) >= 980, "%zu", piece_last_border(s, sizeof s));
}

TEST(tables_folded_together_hold_the_counts_of_one_table) {
    PieceCounts one, all, own;
    uint64_t state = 11;
    char s[200];
    piece_counts_init(&one, hash_seed());
    piece_counts_init(&all, one.seed);
    piece_counts_init(&own, one.seed);
    for (int i = 0; i < 3000; i++) {
        const size_t n = make_text(s, sizeof s, &state);
        piece_counts_text(&one, s, n);
        piece_counts_text(&own, s, n);
        if (i % 100 == 99) { piece_counts_fold(&all, &own); }
    }
    CHECK(own.used == 0 && all.used == one.used && all.num_bytes == one.num_bytes, "%zu pieces, wanted %zu", all.used,
          one.used);
    CHECK(own.num_bytes == 0, "a table that was emptied keeps %zu bytes: it grows with the text", own.num_bytes);
    const size_t used = all.used;
    for (size_t i = 0; i <= one.mask; i++) {
        const PieceSlot* slot = &one.slots[i];
        if (!slot->count) { continue; }
        piece_counts_add(&all, slot->key, one.bytes + slot->at, slot->len, UINT64_MAX - slot->count + 2);
    }
    CHECK(all.used == used, "%zu pieces after the second look, wanted %zu", all.used, used);
    for (size_t i = 0; i <= all.mask; i++) {
        CHECK(all.slots[i].count <= 1, "a count differs by %llu", (unsigned long long)all.slots[i].count - 1);
    }
    piece_counts_free(&one);
    piece_counts_free(&all);
    piece_counts_free(&own);
}

TEST(a_piece_ends_with_its_document) {
    Counting c;
    counting_begin(&c);
    counting_add(&c, "a cat", 5);
    counting_add(&c, "alog", 4);
    counting_add(&c, "alog", 4);
    counting_end(&c);
    CHECK(c.all.used == 3 && c.all.num_bytes == strlen("a cat"
                                                       "alog"),
          "%zu pieces of %zu bytes", c.all.used, c.all.num_bytes);
    piece_counts_free(&c.all);
}

TEST(a_token_of_five_thousand_bytes_passes_writer_and_readers) {
    static char text[5000];
    uint64_t state = 5;
    PieceCounts c;
    Bpe b;
    Tokenizer t, back;
    TokenList ids = {NULL, 0, 0};
    Error e = NO_ERROR;
    char* json = NULL;
    size_t json_len = 0, len = 0;
    for (size_t i = 0; i < sizeof text; i++) { text[i] = (char)('a' + random_below(&state, 26)); }
    piece_counts_init(&c, hash_seed());
    piece_counts_text(&c, text, sizeof text);
    bpe_begin(&b, &c, 1 << 20);
    while (bpe_next(&b)) {}
    bpe_tokenizer(&t, &b, 2);
    bpe_free(&b);
    FILE* f = xopen_memory(&json, &json_len);
    write_tokenizer_json(f, &t);
    xclose_memory(f, &json);
    CHECK(t.max_token_len == sizeof text, "the longest token has %zu bytes", t.max_token_len);
    const bool ok = tokenizer_parse(&back, json, json_len, "tokenizer.json", &e);
    CHECK(ok && back.vocab_size == t.vocab_size && back.fingerprint == t.fingerprint, "%s", e.msg);
    if (ok) {
        tokenizer_encode(&back, text, sizeof text, false, &ids);
        CHECK(ids.count == 1 && ids.ids[0] == t.vocab_size - 3, "%zu tokens", ids.count);
        TokenDecoder d;
        decoder_init(&d, &back);
        const char* out = decoder_push(&d, ids.ids[0], &len);
        CHECK(len == sizeof text && memcmp(out, text, len) == 0, "%zu bytes", len);
        decoder_free(&d);
        tokenizer_free(&back);
    }
    token_list_free(&ids);
    tokenizer_free(&t);
    free(json);
}

int main(void) { return test_all(); }
