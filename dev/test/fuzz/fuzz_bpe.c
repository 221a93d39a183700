/* fuzz_bpe.c -- learns a vocabulary from the bytes as text. The first byte gives the most tokens, and the second how few
 * pairs raise the floor. Pieces counted in parts, cut at borders, must have the counts of the whole text. The merges must
 * depend neither on the floor nor on the seed of the tables. The file must be read again, and must encode each token that is
 * a piece to itself. */
#include "fuzz.h"
#include "dev/data/bpe.h"
#include "llmc/text/tokenizer_write.h"

enum { MOST = 4096 };

/* Requires that both tables have the same pieces and counts. */
static void check_same(const PieceCounts* a, PieceCounts* b) {
    const size_t used = b->used;
    REQUIRE(a->used == used && a->num_bytes == b->num_bytes);
    for (size_t i = 0; i <= a->mask; i++) {
        const PieceSlot* slot = &a->slots[i];
        if (slot->count) { piece_counts_add(b, slot->key, a->bytes + slot->at, slot->len, UINT64_MAX - slot->count + 2); }
    }
    REQUIRE(b->used == used);
    for (size_t i = 0; i <= b->mask; i++) { REQUIRE(b->slots[i].count <= 1); }
}

/* Counts a text in parts of about `part` bytes, as a stream of batches. */
static void count_in_parts(PieceCounts* all, const char* text, size_t len, size_t part) {
    PieceCounts own;
    piece_counts_init(&own, all->seed);
    for (size_t at = 0, n = part; at < len;) {
        n = size_min(n, len - at);
        const size_t cut = at + n == len ? n : piece_last_border(text + at, n);
        REQUIRE(cut <= n);
        piece_counts_text(&own, text + at, cut);
        piece_counts_fold(all, &own);
        at += cut;
        n = cut ? part : 2 * n;
    }
    piece_counts_free(&own);
}

static void learn(Bpe* b, const char* text, size_t len, size_t most, size_t most_pairs) {
    PieceCounts c;
    piece_counts_init(&c, hash_seed());
    piece_counts_text(&c, text, len);
    bpe_begin(b, &c, most);
    b->most_pairs = most_pairs;
    if (most_pairs < SIZE_MAX) { bpe_collect(b); }
    while (bpe_next(b)) {}
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    PieceCounts whole, parts;
    Bpe b, limited;
    Tokenizer t, back;
    Error e = NO_ERROR;
    char* json = NULL;
    size_t json_len = 0;
    if (size < 3 || size > MOST) { return 0; }
    char* text = fuzz_text(data + 2, size - 2);
    const size_t len = size - 2, most = 256 + data[0] * (size_t)4;
    piece_counts_init(&whole, hash_seed());
    piece_counts_init(&parts, whole.seed);
    piece_counts_text(&whole, text, len);
    count_in_parts(&parts, text, len, 1 + data[1]);
    check_same(&whole, &parts);
    piece_counts_free(&whole);
    piece_counts_free(&parts);

    learn(&b, text, len, most, SIZE_MAX);
    learn(&limited, text, len, most, data[1]);
    REQUIRE(b.num_tokens == limited.num_tokens && b.num_tokens <= most);
    REQUIRE(memcmp(b.merges, limited.merges, b.num_tokens * sizeof *b.merges) == 0);
    bpe_tokenizer(&t, &b, 2);
    FILE* f = xopen_memory(&json, &json_len);
    write_tokenizer_json(f, &t);
    xclose_memory(f, &json);
    REQUIRE(tokenizer_parse(&back, json, json_len, "tokenizer.json", &e) && back.fingerprint == t.fingerprint);
    for (int id = 256; id < (int)b.num_tokens; id++) {
        TokenList ids = {NULL, 0, 0};
        size_t n;
        const char* s = tokenizer_token(&back, id, &n);
        if (scan_llama3((const uint8_t*)s, (const uint8_t*)s + n, 3) == (const uint8_t*)s + n) {
            tokenizer_encode(&back, s, n, false, &ids);
            REQUIRE(ids.count == 1 && ids.ids[0] == id);
        }
        token_list_free(&ids);
    }
    tokenizer_free(&back);
    tokenizer_free(&t);
    bpe_free(&b);
    bpe_free(&limited);
    free(json);
    free(text);
    return 0;
}
