/* tokenizer.h -- byte-level BPE: text to token ids and back, exactly as `tokenizers` and `tiktoken` do it.
 *
 * Encoding has three steps:
 *   1. Cut the names of added tokens out of the text, leftmost and longest first. Names of special tokens are cut out only if
 *      the caller allows it (`specials`); otherwise they are plain text.
 *   2. Split the rest into pieces (a word with its space, up to three digits, ...): pieces.h.
 *   3. A piece that is a token is that token. In any other piece, merge the pair of neighbours with the lowest rank, leftmost
 *      first, until no pair has a rank (Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units").
 *      tiktoken ranks a pair by the id of the merged bytes, Hugging Face by its place in the merge list; both become one
 *      table of (left id, right id) -> (rank, merged id). If tokenizer.json does not set `ignore_merges`, a piece counts as
 *      a token only if merging its bytes gives that token.
 *
 * Bytes that are not UTF-8 are allowed: each is a symbol of its own, neither letter nor number nor space. So decoding the
 * tokens of any bytes gives the same bytes, if the vocabulary has all 256 of them, as tiktoken's must. Invariants: ids are 0
 * .. vocab_size-1 without holes; a loaded Tokenizer is constant, so threads may share it; each thread that encodes has its own
 * TokenEncoder.
 * Elsewhere: tokenizer files (tokenizer_read.h, tokenizer_write.h), chat messages (chat.h), files of token ids
 * (tokenfile.h).
 */
#ifndef LLMC_TOKENIZER_H
#define LLMC_TOKENIZER_H

#include "llmc/base/hash.h"         // defines: HashSeed, hash_seed, hash_key, hash_key_within, hash_place, hash_mix, load8
#include "llmc/base/utf8.h"         // defines: utf8_decode
#include "llmc/base/utils.h"        // defines: die, xmalloc, xcalloc, xreserve, size_max
#include "llmc/text/merge_queue.h"  // defines: MergeQueue, merge_queue_push, merge_queue_pop
#include "llmc/text/pieces.h"       // defines: scan_llama3, scan_gpt2
#include "llmc/text/unicode.h"      // defines: unicode_is_digit

#include <assert.h>

// flags of an id; LSTRIP, RSTRIP: an added token takes the white space before and behind its name, as phi-4's do
enum { TOKEN_ADDED = 1, TOKEN_SPECIAL = 2, TOKEN_NORMALIZED = 4, TOKEN_LSTRIP = 8, TOKEN_RSTRIP = 16 };
enum { SPLIT_NONE, SPLIT_LLAMA3, SPLIT_GPT2 };
enum { DIGITS_IN_WORDS, DIGITS_EACH, DIGITS_RUNS };  // what the Digits pre-tokenizer cuts out

enum {
    TOKEN_LEN_MAX = 1024,         // most bytes in a token of tokenizer.model, and in the name of an added token
    TOKEN_SHORT_PIECE = 64,       // bytes of the longest piece that is merged by linear scans
    TOKEN_CACHE_SLOTS = 1 << 12,  // slots of the cache of pieces that become several tokens
    TOKEN_CACHE_BYTES = 24,       // longest piece in the cache
    TOKEN_CACHE_IDS = 8,          // most ids of a piece in the cache
};

/* An open-addressed hash table over the bytes of tokens. Up to 8 bytes are their own key; longer ones are hashed and
 * compared. */
typedef struct {
    uint64_t key;
    int32_t id;
    uint32_t len;  // 0: empty
} TokenSlot;

typedef struct {
    TokenSlot* slots;
    size_t mask;  // number of slots - 1
    HashSeed seed;
    const char* base;  // bytes of token i: base + at[i]
    const uint32_t* at;
} TokenTable;

/* Names of added tokens in the order of their bytes: a trie laid flat, where the names with a common start lie together. */
typedef struct {
    const char* text;
    uint32_t len;
    int32_t id;
} AddedName;

typedef struct {
    AddedName* names;
    size_t count;
} AddedNames;

typedef struct {
    uint64_t pair;  // left id << 32 | right id; UINT64_MAX: empty
    uint32_t rank;
    int32_t id;  // of the merged token
} MergeSlot;

typedef struct {
    int vocab_size;
    int bos_id;            // beginning of text, which also separates documents; -1: none
    int eos_id;            // end of text; -1: none
    uint64_t fingerprint;  // hash of ids, bytes and special flags; never 0

    char* bytes;           // of all tokens, concatenated
    uint32_t* at;          // (vocab_size + 1) where each token starts in `bytes`
    uint8_t* flags;        // (vocab_size) TOKEN_*
    size_t max_token_len;  // bytes of the longest token

    HashSeed seed;                       // seed of all tables; ids do not depend on it
    TokenTable pieces;                   // tokens that may be a whole piece
    AddedNames added[2];                 // names of added tokens: those not TOKEN_NORMALIZED, the others
    bool added_first[256];               // bytes that a name starts with
    bool has_specials, has_plain_added;  // kinds of added tokens that exist
    MergeSlot* merges;
    size_t merge_mask, num_merges;
    uint32_t num_ranks;     // highest rank + 1
    int32_t byte_ids[256];  // -1: the vocabulary lacks the byte, and `tokenizers` drops it

    int split;       // SPLIT_*
    int max_digits;  // SPLIT_LLAMA3: most digits in a piece
    int digits;      // DIGITS_*

    char* path;    // path of the file this came from, or NULL
    char* source;  // text of the tokenizer.json this came from, or NULL
    char* config;  // text of the tokenizer_config.json beside it; or NULL

    // what the files beside it call BOS, EOS and pad, whether or not they are tokens; NULL: nothing. bos_id and eos_id are the
    // tokens of these names, otherwise tokens with a usual name
    char *bos_name, *eos_name, *pad_name;
} Tokenizer;

// ---------------------------------------------------------------------------------------------------------------------
// tables

/* Returns the slot of the n >= 1 bytes at s, whose hash_key() is `key`, or the empty one where they belong. */
static inline TokenSlot* token_table_slot(const TokenTable* t, uint64_t key, const char* s, size_t n) {
    for (size_t i = hash_place(t->seed, key, n) & t->mask;; i = (i + 1) & t->mask) {
        TokenSlot* slot = &t->slots[i];
        if (slot->key == key && slot->len == n && (n <= 8 || memcmp(t->base + t->at[slot->id], s, n) == 0)) { return slot; }
        if (slot->len == 0) { return slot; }
    }
}

/* Returns the id of these bytes, or -1. */
static inline int32_t token_table_find_key(const TokenTable* t, uint64_t key, const char* s, size_t n) {
    const TokenSlot* slot = token_table_slot(t, key, s, n);
    return slot->len ? slot->id : -1;
}

static inline int32_t token_table_find(const TokenTable* t, const char* s, size_t n) {
    return n == 0 ? -1 : token_table_find_key(t, hash_key(t->seed, s, n), s, n);
}

static inline size_t token_table_slots(size_t count) {
    size_t slots = 16;
    while (slots < count * 2) { slots *= 2; }
    return slots;
}

/* Makes an empty table with room for `count` tokens. */
static inline void token_table_init(TokenTable* t, size_t count, const char* base, const uint32_t* at, HashSeed seed) {
    size_t slots = token_table_slots(count);
    t->seed = seed;
    t->slots = (TokenSlot*)xcalloc(slots, sizeof(TokenSlot));
    t->mask = slots - 1;
    t->base = base;
    t->at = at;
}

/* Adds token `id`, the n bytes at base + at[id]. If the table has these bytes already, their id stays. */
static inline void token_table_add(TokenTable* t, int32_t id, size_t n) {
    const char* s = t->base + t->at[id];
    if (n == 0) { return; }
    const TokenSlot added = {hash_key(t->seed, s, n), id, (uint32_t)n};
    TokenSlot* slot = token_table_slot(t, added.key, s, n);
    if (slot->len == 0) { *slot = added; }
}

/* Returns the slot of a pair, or the empty one where it belongs. */
static inline MergeSlot* merge_slot(const Tokenizer* t, uint64_t pair) {
    size_t i = hash_mix(t->seed, pair) & t->merge_mask;
    while (t->merges[i].pair != pair && t->merges[i].pair != UINT64_MAX) { i = (i + 1) & t->merge_mask; }
    return &t->merges[i];
}

static inline const MergeSlot* merge_find(const Tokenizer* t, int32_t left, int32_t right) {
    const MergeSlot* m = merge_slot(t, (uint64_t)(uint32_t)left << 32 | (uint32_t)right);
    return m->pair == UINT64_MAX ? NULL : m;
}

static inline void merges_init(Tokenizer* t, size_t count) {
    size_t slots = token_table_slots(count);
    t->merges = (MergeSlot*)xmalloc(slots * sizeof(MergeSlot));
    t->merge_mask = slots - 1;
    for (size_t i = 0; i < slots; i++) { t->merges[i].pair = UINT64_MAX; }
}

/* Adds a merge of the pair left id << 32 | right id. A pair listed twice gets its later rank, as in `tokenizers`. */
static inline void merge_add(Tokenizer* t, uint64_t pair, uint32_t rank, int32_t id) {
    const MergeSlot added = {pair, rank, id};
    MergeSlot* slot = merge_slot(t, pair);
    t->num_merges += slot->pair == UINT64_MAX;
    *slot = added;
    if (rank >= t->num_ranks) { t->num_ranks = rank + 1; }
}

/* Lists the splits of a token into two tokens, as left id << 32 | right id; returns their number, which is less than the
 * token's bytes. `lengths` (max_token_len + 1) says for each length whether a token has it; NULL: any may. The key of each
 * start grows out of the one before: see hash_key(). */
static inline size_t token_splits(const Tokenizer* t, int id, const bool* lengths, uint64_t* splits) {
    const char* s = t->bytes + t->at[id];
    const size_t n = t->at[id + 1] - t->at[id];
    uint64_t h = 0;
    size_t count = 0;
    for (size_t i = 1; i < n; i++) {
        if (i > 8 && i % 8 == 1) { h = hash_mix(t->seed, h ^ load8(s + i - 9)); }
        if (lengths && !(lengths[i] && lengths[n - i])) { continue; }
        const uint64_t key = i <= 8 ? load_short(s, i) : hash_mix(t->seed, h ^ load8(s + i - 8));
        const int32_t left = token_table_find_key(&t->pieces, key, s, i);
        const int32_t right = left < 0 ? -1 : token_table_find(&t->pieces, s + i, n - i);
        if (right >= 0) { splits[count++] = (uint64_t)left << 32 | (uint32_t)right; }
    }
    return count;
}

// ---------------------------------------------------------------------------------------------------------------------
// step 3: merging

typedef struct {
    uint8_t len, count;  // len 0: empty
    char bytes[TOKEN_CACHE_BYTES];
    int32_t ids[TOKEN_CACHE_IDS];
} PieceCacheSlot;

/* A node of the linked list of a long piece's parts. Node i starts as the piece's i-th byte that has a token. */
typedef struct {
    int32_t id;
    uint32_t rank;        // rank of the pair with the next part; UINT32_MAX: none
    uint32_t prev, next;  // UINT32_MAX: none
} MergeNode;

/* A growing list of token ids. All zeros is an empty list; release it with token_list_free(). */
typedef struct {
    int32_t* ids;
    size_t cap, count;
} TokenList;

static inline void token_list_reserve(TokenList* l, size_t more) {
    l->ids = (int32_t*)xreserve(l->ids, l->count, more, &l->cap, sizeof *l->ids);
}

static inline void token_list_add(TokenList* l, int32_t id) {
    token_list_reserve(l, 1);
    l->ids[l->count++] = id;
}

static inline void token_list_free(TokenList* l) {
    free(l->ids);
    memset(l, 0, sizeof *l);
}

/* One thread's state for encoding with one tokenizer. `out` is the result; set its count to 0 to start over. */
typedef struct {
    const Tokenizer* t;
    TokenList out;
    PieceCacheSlot* cache;  // allocated by the first text of 1024 bytes or more
    MergeNode* nodes;       // (node_cap) room for the longest piece so far
    size_t node_cap;
    MergeQueue queue;
    const uint8_t *text, *ours, *control;  // of encoder_marked(), otherwise NULL
} TokenEncoder;

static inline void encoder_init(TokenEncoder* enc, const Tokenizer* t) {
    memset(enc, 0, sizeof *enc);
    enc->t = t;
}

static inline void encoder_free(TokenEncoder* enc) {
    token_list_free(&enc->out);
    free(enc->cache);
    free(enc->nodes);
    merge_queue_free(&enc->queue);
    memset(enc, 0, sizeof *enc);
}

/* Appends the ids of a piece of n <= TOKEN_SHORT_PIECE bytes. Scans all pairs for the lowest rank, up to n times. */
static inline void merge_short(TokenEncoder* enc, const uint8_t* s, size_t n) {
    const Tokenizer* t = enc->t;
    int32_t id[TOKEN_SHORT_PIECE], merged[TOKEN_SHORT_PIECE];  // id of each part; of its merge with the right neighbour
    uint32_t rank[TOKEN_SHORT_PIECE];                          // rank of that merge; UINT32_MAX: none
    size_t count = 0;
    for (size_t i = 0; i < n; i++) {
        if (t->byte_ids[s[i]] >= 0) { id[count++] = t->byte_ids[s[i]]; }
    }
    for (size_t first = 0, last = count - 1; count > 0;) {
        for (size_t i = first; i <= last; i++) {
            const MergeSlot* m = i + 1 < count ? merge_find(t, id[i], id[i + 1]) : NULL;
            rank[i] = m ? m->rank : UINT32_MAX;
            merged[i] = m ? m->id : -1;
        }
        size_t best = 0;
        for (size_t i = 1; i < count; i++) { best = rank[i] < rank[best] ? i : best; }
        if (count < 2 || rank[best] == UINT32_MAX) { break; }
        id[best] = merged[best];
        size_t tail = count - best - 2;
        memmove(id + best + 1, id + best + 2, tail * sizeof *id);
        memmove(merged + best + 1, merged + best + 2, tail * sizeof *merged);
        memmove(rank + best + 1, rank + best + 2, tail * sizeof *rank);
        count--;
        first = best ? best - 1 : 0;
        last = best;
    }
    if (count == 0) { return; }  // no byte of the piece has a token; enc->out.ids may still be NULL
    token_list_reserve(&enc->out, count);
    memcpy(enc->out.ids + enc->out.count, id, count * sizeof *id);
    enc->out.count += count;
}

/* Returns the rank of the merge of node i and its next node; UINT32_MAX: none. */
static inline uint32_t merge_rank(const TokenEncoder* enc, uint32_t i) {
    const MergeNode* node = &enc->nodes[i];
    const MergeSlot* m = node->next == UINT32_MAX ? NULL : merge_find(enc->t, node->id, enc->nodes[node->next].id);
    return m ? m->rank : UINT32_MAX;
}

/* Queues the merge of node i (UINT32_MAX: no node), unless a neighbour's merge comes before it: then it cannot be next. */
static inline void merge_offer(TokenEncoder* enc, uint32_t i) {
    if (i == UINT32_MAX) { return; }
    const MergeNode *nodes = enc->nodes, *node = &nodes[i];
    if (node->rank == UINT32_MAX || nodes[node->next].rank < node->rank) { return; }
    if (node->prev != UINT32_MAX && nodes[node->prev].rank <= node->rank) { return; }
    merge_queue_push(&enc->queue, node->rank, i);
}

/* Merges node i with the next one; queues the merges that this brings before the merges of their neighbours. */
static inline void merge_nodes(TokenEncoder* enc, uint32_t i) {
    MergeNode *nodes = enc->nodes, *left = &nodes[i], *right = &nodes[left->next];
    const uint32_t prev = left->prev, next = right->next, right_rank = right->rank;
    left->id = merge_find(enc->t, left->id, right->id)->id;
    left->next = next;
    right->rank = UINT32_MAX;
    if (next != UINT32_MAX) { nodes[next].prev = i; }
    left->rank = merge_rank(enc, i);
    if (prev != UINT32_MAX) {
        const uint32_t before = nodes[prev].prev, prev_rank = nodes[prev].rank;
        nodes[prev].rank = merge_rank(enc, prev);
        if (before != UINT32_MAX && nodes[before].rank > prev_rank) { merge_offer(enc, before); }
        merge_offer(enc, prev);
    }
    merge_offer(enc, i);
    if (next != UINT32_MAX && nodes[next].rank >= right_rank) { merge_offer(enc, next); }
}

/* Appends the ids of a piece of any length, with a linked list of parts and a queue of merges. A queue entry is stale if its
 * node's rank has changed since. */
static inline void merge_long(TokenEncoder* enc, const uint8_t* s, size_t n) {
    const Tokenizer* t = enc->t;
    if (n >= UINT32_MAX) { die("a run of %zu bytes without a border between words is too long to encode", n); }
    enc->nodes = (MergeNode*)xreserve(enc->nodes, 0, n, &enc->node_cap, sizeof(MergeNode));
    uint32_t count = 0;
    for (size_t i = 0; i < n; i++) {
        if (t->byte_ids[s[i]] < 0) { continue; }
        MergeNode node = {t->byte_ids[s[i]], UINT32_MAX, count ? count - 1 : UINT32_MAX, count + 1};
        enc->nodes[count++] = node;
    }
    if (count == 0) { return; }
    enc->nodes[count - 1].next = UINT32_MAX;
    merge_queue_start(&enc->queue, n, t->num_ranks);
    for (uint32_t i = 0; i < count; i++) { enc->nodes[i].rank = merge_rank(enc, i); }
    for (uint32_t i = count; i > 0; i--) { merge_offer(enc, i - 1); }  // a list gives its newest entry first
    for (uint64_t first; (first = merge_queue_pop(&enc->queue)) != UINT64_MAX;) {
        const uint32_t i = (uint32_t)first;
        if (enc->nodes[i].rank == first >> 32) { merge_nodes(enc, i); }
    }
    token_list_reserve(&enc->out, count);
    for (uint32_t i = 0; i != UINT32_MAX; i = enc->nodes[i].next) { enc->out.ids[enc->out.count++] = enc->nodes[i].id; }
}

static inline void merge_piece(TokenEncoder* enc, const uint8_t* s, size_t n) {
    if (enc->t->num_merges == 0) {
        token_list_reserve(&enc->out, n);
        for (size_t i = 0; i < n; i++) {
            if (enc->t->byte_ids[s[i]] >= 0) { enc->out.ids[enc->out.count++] = enc->t->byte_ids[s[i]]; }
        }
    } else if (n <= TOKEN_SHORT_PIECE) {
        merge_short(enc, s, n);
    } else {
        merge_long(enc, s, n);
    }
}

/* Appends the ids of a piece through the cache. Not inlined: the loop over pieces that are whole tokens stays small. */
__attribute__((noinline, unused)) static void encode_parts(TokenEncoder* enc, const uint8_t* s, size_t n, uint64_t key) {
    if (!enc->cache || n > TOKEN_CACHE_BYTES) {
        merge_piece(enc, s, n);
        return;
    }
    PieceCacheSlot* slot = &enc->cache[hash_place(enc->t->seed, key, n) & (TOKEN_CACHE_SLOTS - 1)];
    if (slot->len == n && memcmp(slot->bytes, s, n) == 0) {
        token_list_reserve(&enc->out, TOKEN_CACHE_IDS);
        memcpy(enc->out.ids + enc->out.count, slot->ids, sizeof slot->ids);
        enc->out.count += slot->count;
        return;
    }
    size_t first = enc->out.count;
    merge_piece(enc, s, n);
    if (enc->out.count - first <= TOKEN_CACHE_IDS) {
        slot->len = (uint8_t)n;
        slot->count = (uint8_t)(enc->out.count - first);
        memcpy(slot->bytes, s, n);
        memcpy(slot->ids, enc->out.ids + first, slot->count * sizeof(int32_t));
    }
}

/* Appends the ids of the piece s[0 .. n); bytes up to `end` may be read. */
static inline void encode_piece(TokenEncoder* enc, const uint8_t* s, size_t n, const uint8_t* end) {
    const char* text = (const char*)s;
    if (n > enc->t->max_token_len) {
        merge_piece(enc, s, n);
        return;
    }
    const uint64_t key = hash_key_within(enc->t->seed, text, n, (const char*)end);
    int32_t id = token_table_find_key(&enc->t->pieces, key, text, n);
    if (id >= 0) {
        token_list_add(&enc->out, id);
    } else {
        encode_parts(enc, s, n, key);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// encoding

/* Appends the ids of text without added tokens. If the tokenizer uses Digits, the text is all digits or has none. */
static inline void encode_words(TokenEncoder* enc, const uint8_t* s, const uint8_t* end) {
    const int split = enc->t->split, max_digits = enc->t->max_digits;
    for (const uint8_t* p = end; s < end; s = p) {
        if (split == SPLIT_LLAMA3) { p = scan_llama3(s, end, max_digits); }
        if (split == SPLIT_GPT2) { p = scan_gpt2(s, end); }
        encode_piece(enc, s, (size_t)(p - s), end);
    }
}

static inline void encode_plain(TokenEncoder* enc, const uint8_t* s, const uint8_t* end) {
    if (enc->t->digits == DIGITS_IN_WORDS) {
        encode_words(enc, s, end);
        return;
    }
    const uint8_t* start = s;  // first byte not encoded yet
    bool in_digits = false;
    while (s < end) {
        uint32_t c;
        int len = utf8_decode(s, (size_t)(end - s), &c);
        bool digit = c < 0x80 ? c - '0' < 10 : unicode_is_digit(c);
        if (digit != in_digits || (digit && enc->t->digits == DIGITS_EACH)) {
            encode_words(enc, start, s);
            start = s;
            in_digits = digit;
        }
        s += len ? len : 1;
    }
    encode_words(enc, start, end);
}

/* Returns the first of the names [lo, hi), equal before byte d and longer than d, whose byte d is at least c. Looks near lo
 * first: if only few names drop out at each byte, a walk takes time in proportion to its length. */
static inline const AddedName* added_from(const AddedName* lo, const AddedName* hi, size_t d, int c) {
    size_t step = 1;
    while (lo + step < hi && (uint8_t)lo[step].text[d] < c) {
        lo += step;
        step *= 2;
    }
    if (lo + step < hi) { hi = lo + step; }
    while (lo < hi) {
        const AddedName* middle = lo + (hi - lo) / 2;
        if ((uint8_t)middle->text[d] < c) {
            lo = middle + 1;
        } else {
            hi = middle;
        }
    }
    return lo;
}

/* Returns the longest of these names that the text at s starts with, or NULL. */
static inline const AddedName* added_find(const AddedNames* a, const char* s, const char* end) {
    const AddedName *lo = a->names, *hi = lo + a->count, *longest = NULL;
    for (size_t d = 0; lo < hi; d++) {
        if (lo->len == d) { longest = lo++; }  // if names have a common start, the shortest comes first
        if (lo == hi || s + d == end) { break; }
        const int c = (uint8_t)s[d];
        lo = added_from(lo, hi, d, c);
        if (lo < hi && (uint8_t)hi[-1].text[d] != c) { hi = added_from(lo, hi, d, c + 1); }
    }
    return longest;
}

/* Returns the name that starts at s, NULL if none does, or if it is special and may not be a token there. *skip becomes the
 * bytes to skip where no name starts. A special name is skipped whole, since no other name is looked for inside it; with marks
 * only up to the next marked byte, where a name may begin that counts. */
static inline const AddedName* added_at(const TokenEncoder* enc, const AddedNames* names, const uint8_t* s, const uint8_t* end,
                                        bool specials, size_t* skip) {
    const AddedName* name = added_find(names, (const char*)s, (const char*)end);
    *skip = 1;
    if (!name || !((enc->t->flags[name->id] & TOKEN_SPECIAL) || (enc->ours && enc->control[name->id]))) { return name; }
    if (specials && !enc->ours) { return name; }
    *skip = name->len;
    if (!specials) { return NULL; }
    const uint8_t* ours = enc->ours + (s - enc->text);
    size_t run = 0;  // marked bytes at s
    while (run < name->len && ours[run]) { run++; }
    if (run == name->len) { return name; }
    for (*skip = 1; *skip < name->len && !ours[*skip];) { (*skip)++; }
    return run ? added_find(names, (const char*)s, (const char*)s + run) : NULL;
}

/* Returns the end of the white space that starts at s. */
static inline const uint8_t* space_end(const uint8_t* s, const uint8_t* end) {
    uint32_t c = 0;
    int n = 0;
    while (s < end && (n = utf8_decode(s, (size_t)(end - s), &c)) > 0 && unicode_class(c) == UNICODE_SPACE) { s += n; }
    return s;
}

/* Returns the start of the white space that ends at s. */
static inline const uint8_t* space_start(const uint8_t* start, const uint8_t* s) {
    for (const uint8_t* at = s; at > start; s = at) {
        do { at--; } while (at > start && (*at & 0xC0) == 0x80);
        if (space_end(at, s) != s) { break; }
    }
    return s;
}

/* Cuts added tokens out of the text in two passes, as `tokenizers` does: first those that are not `normalized`, then the
 * others in what is left. */
static inline void encode_added(TokenEncoder* enc, const uint8_t* s, const uint8_t* end, bool specials, int normalized) {
    const Tokenizer* t = enc->t;
    const uint8_t *start = s, *blank = s;  // blank: the end of the white space behind a token
    while (s <= end) {
        const AddedName* name = NULL;
        size_t skip = 1;
        if (s < end && t->added_first[*s]) { name = added_at(enc, &t->added[normalized != 0], s, end, specials, &skip); }
        if (s < end && !name) {
            s += skip;
            continue;
        }
        const int flags = name ? t->flags[name->id] : 0;
        const uint8_t* stop = flags & TOKEN_LSTRIP ? space_start(start, s) : s;
        if (stop > start && normalized) { encode_plain(enc, start, stop); }
        if (stop > start && !normalized) { encode_added(enc, start, stop, specials, TOKEN_NORMALIZED); }
        if (!name) { break; }
        s += name->len;  // a name may begin in the white space of a token, too, or stand in it
        if ((flags & TOKEN_RSTRIP) && s > blank) { blank = space_end(s, end); }
        stop = flags & TOKEN_RSTRIP ? blank : s;
        if (!(flags & TOKEN_LSTRIP) || stop > start) { token_list_add(&enc->out, name->id); }
        start = stop;
    }
}

/* Appends the ids of a text to enc->out.ids. With `specials`, names of special tokens become those tokens; otherwise they are
 * text, and the ids equal tiktoken's encode_ordinary(). Adds no BOS or EOS. */
static inline void encoder_text(TokenEncoder* enc, const char* text, size_t len, bool specials) {
    const uint8_t *s = (const uint8_t*)text, *end = s + len;
    if (len == 0) { return; }
    if (!enc->cache && len >= 1024) { enc->cache = (PieceCacheSlot*)xcalloc(TOKEN_CACHE_SLOTS, sizeof(PieceCacheSlot)); }
    if (enc->t->has_plain_added || (specials && enc->t->has_specials)) {
        encode_added(enc, s, end, specials, 0);
    } else {
        encode_plain(enc, s, end);
    }
}

/* Appends the ids of a text whose special names are tokens only where every byte of the name is `ours`; others are text. So are
 * the names of other added tokens that have a 1 in `control`. */
static inline void encoder_marked(TokenEncoder* enc, const char* text, const uint8_t* ours /* (len) 0 or 1 */, size_t len,
                                  const uint8_t* control /* (vocab_size) */) {
    enc->text = (const uint8_t*)text;
    enc->ours = ours;
    enc->control = control;
    encoder_text(enc, text, len, true);
    enc->ours = NULL;
}

/* Appends the ids of a text to a list: encoder_text() for occasional use. */
static inline void tokenizer_encode(const Tokenizer* t, const char* text, size_t len, bool specials, TokenList* l) {
    TokenEncoder enc;
    encoder_init(&enc, t);
    enc.out = *l;
    encoder_text(&enc, text, len, specials);
    *l = enc.out;
    memset(&enc.out, 0, sizeof enc.out);
    encoder_free(&enc);
}

// ---------------------------------------------------------------------------------------------------------------------
// decoding

/* Returns the bytes of a token, which must be in range. They are not a C string: they may hold NULs or a part of a
 * character. */
static inline const char* tokenizer_token(const Tokenizer* t, int id, size_t* len) {
    assert(id >= 0 && id < t->vocab_size);
    *len = t->at[id + 1] - t->at[id];
    return t->bytes + t->at[id];
}

/* Returns the bytes of text that a token stands for: none for a special token, nor for an id that the tokenizer lacks. */
static inline size_t tokenizer_text_bytes(const Tokenizer* t, int id) {
    return id < t->vocab_size && !(t->flags[id] & TOKEN_SPECIAL) ? t->at[id + 1] - t->at[id] : 0;
}

/* Returns the id of the added token whose name is these bytes, or -1. */
static inline int tokenizer_find_bytes(const Tokenizer* t, const char* name, size_t len) {
    for (int i = 0; i < 2; i++) {
        const AddedName* found = added_find(&t->added[i], name, name + len);
        if (found && found->len == len) { return found->id; }
    }
    return -1;
}

/* Returns the id of the special (or other added) token of this name, or -1. */
static inline int tokenizer_find(const Tokenizer* t, const char* name) { return tokenizer_find_bytes(t, name, strlen(name)); }

/* Returns the id of a token of this name (or NULL): an added one, otherwise any; or -1. */
static inline int tokenizer_find_any(const Tokenizer* t, const char* name) {
    const int added = name ? tokenizer_find(t, name) : -1;
    return name && added < 0 ? token_table_find(&t->pieces, name, strlen(name)) : added;
}

/* Turns ids into text as they come: each push gives the characters that are complete. Bytes that cannot become UTF-8 turn
 * into U+FFFD, one for each maximal part of a character (as in Python's errors="replace" and Rust's lossy decoding). So the
 * output is always valid UTF-8. For the raw bytes, join the bytes of tokenizer_token(). */
typedef struct {
    const Tokenizer* t;
    char* in;       // (max_token_len + 3) bytes not given out yet: the start of a character
    size_t num_in;  // bytes in `in`: 0 to 3 between calls
    char* out;      // (3 * (max_token_len + 3)) the last result: at worst each byte becomes U+FFFD
} TokenDecoder;

static inline void decoder_init(TokenDecoder* d, const Tokenizer* t) {
    d->t = t;
    d->num_in = 0;
    d->in = (char*)xmalloc(t->max_token_len + 3);
    d->out = (char*)xmalloc(3 * (t->max_token_len + 3));
}

static inline void decoder_free(TokenDecoder* d) {
    free(d->in);
    free(d->out);
    memset(d, 0, sizeof *d);
}

/* Classifies the n >= 1 bytes at s. Returns 1 if a whole character starts there, and sets *used to its length. Returns 0 if
 * the n bytes are the start of a character. Otherwise returns -1, and sets *used to the bytes that one U+FFFD replaces. */
static inline int utf8_step(const char* s, size_t n, size_t* used) {
    uint32_t c;
    int len = utf8_decode((const uint8_t*)s, n, &c);
    *used = len ? (size_t)len : 1;
    if (len) { return 1; }
    // s is ill-formed or cut short: find the longest part that other bytes could complete, by trying to complete it
    const uint8_t lead = (uint8_t)s[0];
    const size_t want = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
    if (lead < 0xC2 || lead > 0xF4) { return -1; }
    uint8_t trial[4] = {lead, lead == 0xE0 ? (uint8_t)0xA0 : lead == 0xF0 ? (uint8_t)0x90 : (uint8_t)0x80, 0x80, 0x80};
    for (size_t i = 1; i < want && i < n; i++) {
        trial[i] = (uint8_t)s[i];
        if (!utf8_decode(trial, want, &c)) { return -1; }
        *used = i + 1;
    }
    return *used == n ? 0 : -1;
}

/* Adds a token, which must be in range. Returns the text that is complete now, maybe empty; valid until the next call. */
static inline const char* decoder_push(TokenDecoder* d, int id, size_t* len) {
    size_t len_in, used, at = 0, out = 0;
    const char* token = tokenizer_token(d->t, id, &len_in);
    memcpy(d->in + d->num_in, token, len_in);
    const size_t n = d->num_in + len_in;
    int step = 1;
    for (; at < n; at += used) {
        step = utf8_step(d->in + at, n - at, &used);
        if (step == 0) { break; }
        const char* from = step > 0 ? d->in + at : "\xEF\xBF\xBD";
        const size_t bytes = step > 0 ? used : 3;
        memcpy(d->out + out, from, bytes);
        out += bytes;
    }
    d->num_in = n - at;
    memmove(d->in, d->in + at, d->num_in);
    *len = out;
    return d->out;
}

/* Returns the rest at the end of the text: U+FFFD if it ends within a character, otherwise nothing. */
static inline const char* decoder_flush(TokenDecoder* d, size_t* len) {
    *len = d->num_in ? 3 : 0;
    d->num_in = 0;
    return "\xEF\xBF\xBD";
}

// ---------------------------------------------------------------------------------------------------------------------
// making a tokenizer

static inline void tokenizer_free(Tokenizer* t) {
    free(t->bytes);
    free(t->at);
    free(t->flags);
    free(t->pieces.slots);
    free(t->added[0].names);
    free(t->added[1].names);
    free(t->merges);
    free(t->path);
    free(t->source);
    free(t->config);
    free(t->bos_name);
    free(t->eos_name);
    free(t->pad_name);
    memset(t, 0, sizeof *t);
}

/* Orders added names by their bytes, and equal ones by their ids. */
static inline int compare_added_names(const void* a, const void* b) {
    const AddedName *x = (const AddedName*)a, *y = (const AddedName*)b;
    const int bytes = memcmp(x->text, y->text, x->len < y->len ? x->len : y->len);
    return bytes ? bytes : x->len != y->len ? (x->len > y->len) - (x->len < y->len) : (x->id > y->id) - (x->id < y->id);
}

/* Lists the names of the added tokens from the flags. If two tokens have one name, the name stands for the first. */
static inline void tokenizer_list_added(Tokenizer* t) {
    AddedName* all = (AddedName*)xmalloc((size_t)t->vocab_size * sizeof(AddedName));
    size_t count = 0;
    for (int i = 0; i < t->vocab_size; i++) {
        const uint32_t len = t->at[i + 1] - t->at[i];
        if (!(t->flags[i] & TOKEN_ADDED) || len == 0) { continue; }
        AddedName name = {t->bytes + t->at[i], len, i};
        all[count++] = name;
    }
    qsort(all, count, sizeof *all, compare_added_names);
    for (int k = 0; k < 2; k++) {
        free(t->added[k].names);  // of other flags
        t->added[k].names = (AddedName*)xmalloc(count * sizeof(AddedName));
        t->added[k].count = 0;
    }
    for (size_t i = 0; i < count; i++) {
        if (i > 0 && all[i].len == all[i - 1].len && memcmp(all[i].text, all[i - 1].text, all[i].len) == 0) { continue; }
        const uint8_t flags = t->flags[all[i].id];
        AddedNames* a = &t->added[(flags & TOKEN_NORMALIZED) != 0];
        a->names[a->count++] = all[i];
        t->added_first[(uint8_t)all[i].text[0]] = true;
        t->has_specials = t->has_specials || (flags & TOKEN_SPECIAL);
        t->has_plain_added = t->has_plain_added || !(flags & TOKEN_SPECIAL);
    }
    free(all);
}

/* Lists the added tokens; sets max_token_len, BOS and EOS (by name) and the fingerprint. */
static inline void tokenizer_index(Tokenizer* t) {
    uint64_t h = 0xCBF29CE484222325u;  // FNV-1a over (length, special?, bytes) of each token
    t->max_token_len = 0;
    for (int i = 0; i < t->vocab_size; i++) {
        uint32_t len = t->at[i + 1] - t->at[i];
        t->max_token_len = size_max(t->max_token_len, len);
        for (int b = 0; b < 4; b++) { h = (h ^ (len >> 8 * b & 0xFF)) * 0x100000001B3u; }
        h = (h ^ (t->flags[i] & TOKEN_SPECIAL)) * 0x100000001B3u;
        for (uint32_t b = t->at[i]; b < t->at[i + 1]; b++) { h = (h ^ (uint8_t)t->bytes[b]) * 0x100000001B3u; }
    }
    t->fingerprint = h ? h : 1;
    tokenizer_list_added(t);

    static const char* const begins[] = {"<|begin_of_text|>", "<|endoftext|>", "<s>", "<bos>"};
    static const char* const ends[] = {"<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>"};
    t->bos_id = t->eos_id = -1;
    for (int i = 0; i < 4; i++) {
        if (t->bos_id < 0) { t->bos_id = tokenizer_find(t, begins[i]); }
        if (t->eos_id < 0) { t->eos_id = tokenizer_find(t, ends[i]); }
    }
}

/* Allocates what holds `count` tokens of `bytes` bytes in all. */
static inline void tokenizer_allocate(Tokenizer* t, int count, size_t bytes) {
    t->vocab_size = count;
    t->bytes = (char*)xmalloc(bytes);
    t->at = (uint32_t*)xcalloc((size_t)count + 1, sizeof(uint32_t));
    if (!t->flags) { t->flags = (uint8_t*)xcalloc((size_t)count, 1); }
    token_table_init(&t->pieces, (size_t)count, t->bytes, t->at, t->seed);
}

/* Makes the built-in tokenizer: byte b is token b, and <|begin_of_text|> is 256. */
static inline void tokenizer_bytes(Tokenizer* t) {
    static const char bos[] = "<|begin_of_text|>";
    memset(t, 0, sizeof *t);
    t->seed = hash_seed();
    tokenizer_allocate(t, 257, 256 + sizeof bos);
    merges_init(t, 0);
    for (int b = 0; b < 256; b++) {
        t->bytes[b] = (char)b;
        t->at[b] = (uint32_t)b;
        t->byte_ids[b] = b;
        token_table_add(&t->pieces, b, 1);
    }
    memcpy(t->bytes + 256, bos, sizeof bos);
    t->at[256] = 256;
    t->at[257] = 256 + sizeof bos - 1;
    t->flags[256] = TOKEN_ADDED | TOKEN_SPECIAL;
    tokenizer_index(t);
}

#endif
