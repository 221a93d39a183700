/* tokenizer.h -- byte-level BPE tokenizers: text to token ids and back, exactly as `tokenizers` and `tiktoken` do it.
 *
 * Two kinds of file are read, told apart by content:
 *   tokenizer.json   of Hugging Face: model BPE over bytes (GPT-2's printable stand-ins for bytes), split by Llama 3's or
 *                    GPT-2's pattern, before that by Digits (SmolLM) where asked. Anything that would split or merge in
 *                    another way (normalizers, other pre-tokenizers, models, prefixes, dropout) is refused by name.
 *   tokenizer.model  of tiktoken: lines "base64-of-the-bytes rank". It has no special names and gets Llama 3.1's 256
 *                    behind the last rank.
 *
 * Encoding has three steps:
 *   1. Names of added tokens are cut out of the text, leftmost and longest first. Special ones only where the caller allows
 *      them (`specials`); else they are plain text.
 *   2. What is left is split into pieces (a word with its space, up to three digits, ...) by a scanner written by hand for
 *      each pattern, over the Unicode classes of unicode.h.
 *   3. A piece that is a token is that token. In any other, the pair of neighbours with the lowest rank is merged, leftmost
 *      first, until no pair has a rank (Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units").
 *      tiktoken ranks a pair by the id of the merged bytes, Hugging Face by its place in the merge list; both become one
 *      table of (left id, right id) -> (rank, merged id). tokenizer.json without `ignore_merges` keeps step 3's first
 *      sentence only for tokens that their own merges reach.
 *
 * Bytes that are not UTF-8 are allowed: each is a symbol of its own, neither letter nor number nor space; so any bytes come
 * back from decoding as they were (where the vocabulary has all 256 bytes, which tiktoken's kind must).
 * Invariants: ids are 0 .. vocab_size-1 without holes; a loaded Tokenizer is never written to and may be shared by threads;
 * each thread that encodes has its own TokenEncoder. Left to others: token files (tokenfile.h), chat format (run.h).
 */
#ifndef LLMC_TOKENIZER_H
#define LLMC_TOKENIZER_H

#include "llmc/base/utils.h"
#include "llmc/files/json.h"
#include "llmc/text/text.h"
#include "llmc/text/unicode.h"

#include <assert.h>

enum { TOKEN_ADDED = 1, TOKEN_SPECIAL = 2, TOKEN_NORMALIZED = 4 };  // flags of an id
enum { SPLIT_NONE, SPLIT_LLAMA3, SPLIT_GPT2 };
enum { DIGITS_IN_WORDS, DIGITS_EACH, DIGITS_RUNS };  // what the Digits pre-tokenizer cuts out

enum {
    TOKEN_PIECE_MAX = 1024,       // bytes of a token of tokenizer.model: its splits are tried one by one
    TOKEN_SHORT_PIECE = 64,       // bytes up to which a piece is merged by linear scans
    TOKEN_CACHE_SLOTS = 1 << 12,  // of the cache of pieces that are several tokens
    TOKEN_CACHE_BYTES = 24,       // longest piece in it
    TOKEN_CACHE_IDS = 8,          // most ids of a piece in it
    TOKEN_FILE_MAX = 1 << 29,     // bytes of a tokenizer file
};

/* Open addressing by the bytes of a token: up to 8 bytes are their own key, longer ones are hashed and compared. */
typedef struct {
    uint64_t key;
    int32_t id;
    uint32_t len;  // 0: empty
} TokenSlot;

typedef struct {
    TokenSlot* slots;
    size_t mask;       // number of slots - 1
    const char* base;  // bytes of token i: base + at[i]
    const uint32_t* at;
} TokenTable;

typedef struct {
    uint64_t pair;  // left id << 32 | right id; UINT64_MAX: empty
    uint32_t rank;
    int32_t id;  // of the merged token
} MergeSlot;

typedef struct {
    int vocab_size;
    int bos_id;            // begin of text, which also separates documents; -1: none
    int eos_id;            // end of text; -1: none
    uint64_t fingerprint;  // over ids, bytes and specials; never 0

    char* bytes;       // of all tokens, one behind the other
    uint32_t* at;      // (vocab_size + 1) where each starts
    uint8_t* flags;    // (vocab_size) TOKEN_*
    size_t max_piece;  // bytes of the longest token

    TokenTable pieces;                   // what a whole piece may be
    TokenTable added;                    // names of added tokens
    bool added_first[256];               // which bytes they start with
    bool has_specials, has_plain_added;  // of which kinds there are
    uint32_t* added_lens;                // their distinct lengths, longest first
    size_t num_added_lens;
    MergeSlot* merges;
    size_t merge_mask, num_merges;
    int32_t byte_ids[256];  // -1: the vocabulary lacks the byte, and `tokenizers` drops it

    int split;       // SPLIT_*
    int max_digits;  // SPLIT_LLAMA3: digits a piece
    int digits;      // DIGITS_*

    char* source;  // text of the tokenizer.json this came from, with a post-processor that adds BOS; or NULL
    char* config;  // text of the tokenizer_config.json beside it; or NULL
} Tokenizer;

// ---------------------------------------------------------------------------------------------------------------------
// tables

static inline uint64_t token_load8(const char* s) {
    uint64_t x;
    memcpy(&x, s, 8);
    return x;
}

/* Bytes s[0 .. n) zero-padded, 1 <= n <= 8, without reading behind them. */
static inline uint64_t token_load_short(const char* s, size_t n) {
    if (n == 8) { return token_load8(s); }
    if (n >= 4) {
        uint32_t a, b;
        memcpy(&a, s, 4);
        memcpy(&b, s + n - 4, 4);
        return a | (uint64_t)b << (8 * (n - 4));
    }
    const unsigned char* u = (const unsigned char*)s;
    return u[0] | (uint64_t)u[n >> 1] << (8 * (n >> 1)) | (uint64_t)u[n - 1] << (8 * (n - 1));
}

static inline uint64_t token_mix(uint64_t h) {
    h *= 0x9E3779B97F4A7C15u;
    return h ^ h >> 32;
}

static inline uint64_t token_key(const char* s, size_t n) {
    if (n <= 8) { return token_load_short(s, n); }
    uint64_t h = n;
    for (size_t i = 0; i + 8 < n; i += 8) { h = token_mix(h ^ token_load8(s + i)); }
    return token_mix(h ^ token_load8(s + n - 8));
}

static inline size_t token_home(uint64_t key, size_t n) { return (size_t)token_mix(key + n * 0xD6E8FEB86659FD93u); }

/* The id of these bytes, whose token_key is `key`, or -1. */
static inline int32_t token_table_find_key(const TokenTable* t, uint64_t key, const char* s, size_t n) {
    for (size_t i = token_home(key, n) & t->mask;; i = (i + 1) & t->mask) {
        const TokenSlot* slot = &t->slots[i];
        if (slot->key == key && slot->len == n && (n <= 8 || memcmp(t->base + t->at[slot->id], s, n) == 0)) { return slot->id; }
        if (slot->len == 0) { return -1; }
    }
}

static inline int32_t token_table_find(const TokenTable* t, const char* s, size_t n) {
    return n == 0 ? -1 : token_table_find_key(t, token_key(s, n), s, n);
}

static inline size_t token_table_slots(size_t count) {
    size_t slots = 16;
    while (slots < count * 2) { slots *= 2; }
    return slots;
}

/* A table with room for `count` tokens. */
static inline void token_table_init(TokenTable* t, size_t count, const char* base, const uint32_t* at) {
    size_t slots = token_table_slots(count);
    t->slots = (TokenSlot*)xcalloc(slots, sizeof(TokenSlot));
    t->mask = slots - 1;
    t->base = base;
    t->at = at;
}

/* Adds a token of n bytes, which lie at base + at[id]; what is there already stays. */
static inline void token_table_add(TokenTable* t, int32_t id, size_t n) {
    const char* s = t->base + t->at[id];
    if (n == 0 || token_table_find(t, s, n) >= 0) { return; }
    uint64_t key = token_key(s, n);
    size_t i = token_home(key, n) & t->mask;
    while (t->slots[i].len) { i = (i + 1) & t->mask; }
    t->slots[i].key = key;
    t->slots[i].id = id;
    t->slots[i].len = (uint32_t)n;
}

static inline const MergeSlot* merge_find(const Tokenizer* t, int32_t left, int32_t right) {
    uint64_t pair = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    for (size_t i = token_mix(pair) & t->merge_mask;; i = (i + 1) & t->merge_mask) {
        const MergeSlot* m = &t->merges[i];
        if (m->pair == pair) { return m; }
        if (m->pair == UINT64_MAX) { return NULL; }
    }
}

static inline void merges_init(Tokenizer* t, size_t count) {
    size_t slots = token_table_slots(count);
    t->merges = (MergeSlot*)xmalloc(slots * sizeof(MergeSlot));
    t->merge_mask = slots - 1;
    for (size_t i = 0; i < slots; i++) { t->merges[i].pair = UINT64_MAX; }
}

/* A pair listed twice has its later rank, as in `tokenizers`. */
static inline void merge_add(Tokenizer* t, int32_t left, int32_t right, uint32_t rank, int32_t id) {
    uint64_t pair = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    size_t i = token_mix(pair) & t->merge_mask;
    while (t->merges[i].pair != UINT64_MAX && t->merges[i].pair != pair) { i = (i + 1) & t->merge_mask; }
    t->num_merges += t->merges[i].pair == UINT64_MAX;
    t->merges[i].pair = pair;
    t->merges[i].rank = rank;
    t->merges[i].id = id;
}

// ---------------------------------------------------------------------------------------------------------------------
// step 2: pieces

/* Class of the character at s < end and its length in bytes; a byte that is not UTF-8 is one character of class OTHER. */
static inline int scan_class(const uint8_t* s, const uint8_t* end, size_t* len) {
    int cls = unicode_byte_class[*s];
    *len = 1;
    if (cls != UNICODE_NOT_ASCII) { return cls; }
    uint32_t c;
    int n = utf8_decode(s, (size_t)(end - s), &c);
    if (n == 0) { return UNICODE_OTHER; }
    *len = (size_t)n;
    return unicode_class(c);
}

/* Behind the run of characters of one class that starts at s. */
static inline const uint8_t* scan_run(const uint8_t* s, const uint8_t* end, int cls) {
    while (s < end) {
        int byte_cls = unicode_byte_class[*s];
        size_t len = 1;
        if (byte_cls == UNICODE_NOT_ASCII) { byte_cls = scan_class(s, end, &len); }
        if (byte_cls != cls) { break; }
        s += len;
    }
    return s;
}

/* scan_run for letters: 8 ASCII bytes at a time while they last. */
static inline const uint8_t* scan_letters(const uint8_t* s, const uint8_t* end) {
    const uint64_t ones = 0x0101010101010101u, high = 0x8080808080808080u;
    while (end - s >= 8) {
        uint64_t x = token_load8((const char*)s);
        uint64_t lower = (x | 0x20 * ones) & ~high;
        // the high bit of each byte: from 'a' on, from behind 'z' on, not ASCII
        uint64_t letter = (lower + (0x80 - 'a') * ones) & ~(lower + (0x80 - 'z' - 1) * ones) & ~x & high;
        if (letter != high) {
            s += __builtin_ctzll(letter ^ high) >> 3;
            return *s < 0x80 ? s : scan_run(s, end, UNICODE_LETTER);
        }
        s += 8;
    }
    return scan_run(s, end, UNICODE_LETTER);
}

/* Length of 's 't 're 've 'm 'll 'd at s, or 0; `fold`: in any case, for which U+017F is an s, too. */
static inline size_t scan_contraction(const uint8_t* s, const uint8_t* end, bool fold) {
    if (end - s < 2) { return 0; }
    const uint8_t lower = fold ? 0x20 : 0;
    const uint8_t a = s[1] | lower;
    if (a == 's' || a == 't' || a == 'm' || a == 'd') { return 2; }
    if (end - s < 3) { return 0; }
    if (fold && s[1] == 0xC5 && s[2] == 0xBF) { return 3; }
    const uint8_t b = s[2] | lower;
    return (b == 'e' && (a == 'r' || a == 'v')) || (a == 'l' && b == 'l') ? 3 : 0;
}

/* Behind the piece of white space at s, of which the first character is `len` bytes long: \s*[\r\n]+ where `newlines`, then
 * \s+(?!\S), then \s+. */
static inline const uint8_t* scan_space(const uint8_t* s, const uint8_t* end, bool newlines) {
    const uint8_t *p = s, *last = s, *behind_newline = NULL;
    size_t len;
    while (p < end && scan_class(p, end, &len) == UNICODE_SPACE) {
        if (*p == '\r' || *p == '\n') { behind_newline = p + 1; }
        last = p;
        p += len;
    }
    if (newlines && behind_newline) { return behind_newline; }
    return p == end || last == s ? p : last;  // the last one is left to the word behind it
}

/* Behind the piece that starts at s < end, by Llama 3's pattern:
 *   (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+ */
static inline const uint8_t* scan_llama3(const uint8_t* s, const uint8_t* end, int max_digits) {
    size_t len, next_len;
    int cls = scan_class(s, end, &len);
    if (cls == UNICODE_LETTER) { return scan_letters(s + len, end); }
    if (cls == UNICODE_NUMBER) {
        const uint8_t* p = s + len;
        for (int i = 1; i < max_digits && p < end && scan_class(p, end, &len) == UNICODE_NUMBER; i++) { p += len; }
        return p;
    }
    if (*s == '\'') {
        size_t n = scan_contraction(s, end, true);
        if (n) { return s + n; }
    }
    const uint8_t* p = s + len;
    int next = p < end ? scan_class(p, end, &next_len) : UNICODE_SPACE;
    if (next == UNICODE_LETTER && *s != '\r' && *s != '\n') { return scan_letters(p + next_len, end); }
    if (cls == UNICODE_OTHER || (*s == ' ' && next == UNICODE_OTHER)) {
        p = scan_run(p, end, UNICODE_OTHER);
        while (p < end && (*p == '\r' || *p == '\n')) { p++; }
        return p;
    }
    return scan_space(s, end, true);
}

/* Behind the piece that starts at s < end, by GPT-2's pattern:
 *   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ */
static inline const uint8_t* scan_gpt2(const uint8_t* s, const uint8_t* end) {
    size_t len;
    if (*s == '\'') {
        size_t n = scan_contraction(s, end, false);
        if (n) { return s + n; }
    }
    const uint8_t* p = *s == ' ' && end - s > 1 ? s + 1 : s;
    int cls = scan_class(p, end, &len);
    if (cls == UNICODE_SPACE) { return scan_space(s, end, false); }
    return cls == UNICODE_LETTER ? scan_letters(p + len, end) : scan_run(p + len, end, cls);
}

// ---------------------------------------------------------------------------------------------------------------------
// step 3: merging

typedef struct {
    uint8_t len, count;  // len 0: empty
    char bytes[TOKEN_CACHE_BYTES];
    int32_t ids[TOKEN_CACHE_IDS];
} PieceCacheSlot;

/* A node of the list of a long piece's parts; the part at node i starts at the piece's i-th byte. */
typedef struct {
    int32_t id;
    uint32_t rank;        // of the pair with the next part, UINT32_MAX: none
    uint32_t prev, next;  // UINT32_MAX: none
} MergeNode;

/* What one thread needs for encoding with one tokenizer. ids[0 .. count) is the result; set count to 0 to begin anew. */
typedef struct {
    const Tokenizer* t;
    int32_t* ids;
    size_t count, cap;
    PieceCacheSlot* cache;  // allocated with the first long text
    MergeNode* nodes;       // of the longest piece so far
    uint64_t* heap;         // rank << 32 | node, smallest on top
    size_t node_cap, heap_count, heap_cap;
} TokenEncoder;

static inline void encoder_init(TokenEncoder* o, const Tokenizer* t) {
    memset(o, 0, sizeof *o);
    o->t = t;
}

static inline void encoder_free(TokenEncoder* o) {
    free(o->ids);
    free(o->cache);
    free(o->nodes);
    free(o->heap);
    memset(o, 0, sizeof *o);
}

static inline void encoder_reserve(TokenEncoder* o, size_t more) {
    if (o->cap - o->count >= more) { return; }
    o->cap = size_max(o->cap + o->cap / 2, o->count + more + 256);
    o->ids = (int32_t*)xrealloc(o->ids, o->cap * sizeof(int32_t));
}

/* Appends the ids of a piece of n <= TOKEN_SHORT_PIECE bytes: finds the lowest rank by looking at all, n times. */
static inline void merge_short(TokenEncoder* o, const uint8_t* s, size_t n) {
    const Tokenizer* t = o->t;
    int32_t id[TOKEN_SHORT_PIECE], merged[TOKEN_SHORT_PIECE];  // of a part, of it and its right neighbour
    uint32_t rank[TOKEN_SHORT_PIECE];                          // of the part and its right neighbour
    size_t count = 0;
    for (size_t i = 0; i < n; i++) {
        if (t->byte_ids[s[i]] >= 0) { id[count++] = t->byte_ids[s[i]]; }
    }
    for (size_t i = 0; i < count; i++) {
        const MergeSlot* m = i + 1 < count ? merge_find(t, id[i], id[i + 1]) : NULL;
        rank[i] = m ? m->rank : UINT32_MAX;
        merged[i] = m ? m->id : -1;
    }
    for (;;) {
        size_t best = 0;
        for (size_t i = 1; i < count; i++) { best = rank[i] < rank[best] ? i : best; }
        if (count < 2 || rank[best] == UINT32_MAX) { break; }
        id[best] = merged[best];
        size_t tail = count - best - 2;
        memmove(id + best + 1, id + best + 2, tail * sizeof *id);
        memmove(merged + best + 1, merged + best + 2, tail * sizeof *merged);
        memmove(rank + best + 1, rank + best + 2, tail * sizeof *rank);
        count--;
        for (size_t i = best ? best - 1 : 0; i <= best; i++) {
            const MergeSlot* m = i + 1 < count ? merge_find(t, id[i], id[i + 1]) : NULL;
            rank[i] = m ? m->rank : UINT32_MAX;
            merged[i] = m ? m->id : -1;
        }
    }
    if (count == 0) { return; }  // no byte of the piece has a token; there may be no memory yet
    encoder_reserve(o, count);
    memcpy(o->ids + o->count, id, count * sizeof *id);
    o->count += count;
}

static inline void merge_heap_push(TokenEncoder* o, uint32_t rank, uint32_t node) {
    if (o->heap_count == o->heap_cap) {
        o->heap_cap = o->heap_cap * 2 + 256;
        o->heap = (uint64_t*)xrealloc(o->heap, o->heap_cap * sizeof(uint64_t));
    }
    uint64_t x = (uint64_t)rank << 32 | node;
    size_t i = o->heap_count++;
    for (; i > 0 && o->heap[(i - 1) / 2] > x; i = (i - 1) / 2) { o->heap[i] = o->heap[(i - 1) / 2]; }
    o->heap[i] = x;
}

static inline uint64_t merge_heap_pop(TokenEncoder* o) {
    uint64_t top = o->heap[0], x = o->heap[--o->heap_count];
    size_t i = 0, n = o->heap_count;
    for (size_t child; (child = 2 * i + 1) < n; i = child) {
        child += child + 1 < n && o->heap[child + 1] < o->heap[child];
        if (o->heap[child] >= x) { break; }
        o->heap[i] = o->heap[child];
    }
    o->heap[i] = x;
    return top;
}

/* Looks the pair of node i and its next up, and remembers it. */
static inline void merge_long_pair(TokenEncoder* o, uint32_t i) {
    MergeNode* node = &o->nodes[i];
    const MergeSlot* m = node->next == UINT32_MAX ? NULL : merge_find(o->t, node->id, o->nodes[node->next].id);
    node->rank = m ? m->rank : UINT32_MAX;
    if (m) { merge_heap_push(o, m->rank, i); }
}

/* Appends the ids of a piece of any length: a list of parts and a heap of pairs, n log n. An entry of the heap is stale when
 * its node has another rank by now. */
static inline void merge_long(TokenEncoder* o, const uint8_t* s, size_t n) {
    const Tokenizer* t = o->t;
    if (n >= UINT32_MAX) { die("a run of %zu bytes without a border between words is too long to encode", n); }
    if (o->node_cap < n) {
        o->node_cap = n;
        o->nodes = (MergeNode*)xrealloc(o->nodes, n * sizeof(MergeNode));
    }
    uint32_t count = 0;
    for (size_t i = 0; i < n; i++) {
        if (t->byte_ids[s[i]] < 0) { continue; }
        MergeNode node = {t->byte_ids[s[i]], UINT32_MAX, count ? count - 1 : UINT32_MAX, count + 1};
        o->nodes[count++] = node;
    }
    if (count == 0) { return; }
    o->nodes[count - 1].next = UINT32_MAX;
    o->heap_count = 0;
    for (uint32_t i = 0; i < count; i++) { merge_long_pair(o, i); }
    while (o->heap_count > 0) {
        uint64_t top = merge_heap_pop(o);
        MergeNode* left = &o->nodes[(uint32_t)top];
        if (left->rank != (uint32_t)(top >> 32)) { continue; }
        MergeNode* right = &o->nodes[left->next];
        left->id = merge_find(t, left->id, right->id)->id;
        left->next = right->next;
        right->rank = UINT32_MAX;
        if (left->next != UINT32_MAX) { o->nodes[left->next].prev = (uint32_t)top; }
        merge_long_pair(o, (uint32_t)top);
        if (left->prev != UINT32_MAX) { merge_long_pair(o, left->prev); }
    }
    encoder_reserve(o, count);
    for (uint32_t i = 0; i != UINT32_MAX; i = o->nodes[i].next) { o->ids[o->count++] = o->nodes[i].id; }
}

static inline void merge_piece(TokenEncoder* o, const uint8_t* s, size_t n) {
    if (o->t->num_merges == 0) {
        encoder_reserve(o, n);
        for (size_t i = 0; i < n; i++) {
            if (o->t->byte_ids[s[i]] >= 0) { o->ids[o->count++] = o->t->byte_ids[s[i]]; }
        }
    } else if (n <= TOKEN_SHORT_PIECE) {
        merge_short(o, s, n);
    } else {
        merge_long(o, s, n);
    }
}

/* merge_piece through the cache. Out of line, so that the loop over whole-token pieces stays small. */
__attribute__((noinline, unused)) static void encode_parts(TokenEncoder* o, const uint8_t* s, size_t n, uint64_t key) {
    if (!o->cache || n > TOKEN_CACHE_BYTES) {
        merge_piece(o, s, n);
        return;
    }
    PieceCacheSlot* slot = &o->cache[token_home(key, n) & (TOKEN_CACHE_SLOTS - 1)];
    if (slot->len == n && memcmp(slot->bytes, s, n) == 0) {
        encoder_reserve(o, TOKEN_CACHE_IDS);
        memcpy(o->ids + o->count, slot->ids, sizeof slot->ids);
        o->count += slot->count;
        return;
    }
    size_t first = o->count;
    merge_piece(o, s, n);
    if (o->count - first <= TOKEN_CACHE_IDS) {
        slot->len = (uint8_t)n;
        slot->count = (uint8_t)(o->count - first);
        memcpy(slot->bytes, s, n);
        memcpy(slot->ids, o->ids + first, slot->count * sizeof(int32_t));
    }
}

/* Appends the ids of the piece s .. s+n, of a text that may be read up to `end`. */
static inline void encode_piece(TokenEncoder* o, const uint8_t* s, size_t n, const uint8_t* end) {
    const char* text = (const char*)s;
    uint64_t key;
    if (n <= 8 && end - s >= 8) {
        key = token_load8(text) & (UINT64_MAX >> (64 - 8 * n));
    } else if (n <= o->t->max_piece) {
        key = token_key(text, n);
    } else {
        merge_piece(o, s, n);
        return;
    }
    int32_t id = token_table_find_key(&o->t->pieces, key, text, n);
    if (id >= 0) {
        encoder_reserve(o, 1);
        o->ids[o->count++] = id;
    } else {
        encode_parts(o, s, n, key);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// encoding

/* Appends the ids of text without added tokens and, where Digits is used, on one side of a border between digits and others. */
static inline void encode_words(TokenEncoder* o, const uint8_t* s, const uint8_t* end) {
    const int max_digits = o->t->max_digits;
    const uint8_t* p;
    switch (o->t->split) {
        case SPLIT_LLAMA3:
            for (; s < end; s = p) {
                p = scan_llama3(s, end, max_digits);
                encode_piece(o, s, (size_t)(p - s), end);
            }
            break;
        case SPLIT_GPT2:
            for (; s < end; s = p) {
                p = scan_gpt2(s, end);
                encode_piece(o, s, (size_t)(p - s), end);
            }
            break;
        default:
            if (s < end) { encode_piece(o, s, (size_t)(end - s), end); }
            break;
    }
}

static inline void encode_plain(TokenEncoder* o, const uint8_t* s, const uint8_t* end) {
    if (o->t->digits == DIGITS_IN_WORDS) {
        encode_words(o, s, end);
        return;
    }
    const uint8_t* start = s;  // of the characters not encoded yet
    bool in_digits = false;
    while (s < end) {
        uint32_t c;
        int len = utf8_decode(s, (size_t)(end - s), &c);
        bool digit = c < 0x80 ? c - '0' < 10 : unicode_is_digit(c);
        if (digit != in_digits || (digit && o->t->digits == DIGITS_EACH)) {
            encode_words(o, start, s);
            start = s;
            in_digits = digit;
        }
        s += len ? len : 1;
    }
    encode_words(o, start, end);
}

/* The longest added token at s whose TOKEN_NORMALIZED flag is `normalized`, or -1. */
static inline int32_t added_find(const Tokenizer* t, const uint8_t* s, const uint8_t* end, int normalized) {
    for (size_t i = 0; i < t->num_added_lens; i++) {
        size_t n = t->added_lens[i];
        if (n > (size_t)(end - s)) { continue; }
        int32_t id = token_table_find(&t->added, (const char*)s, n);
        if (id >= 0 && (t->flags[id] & TOKEN_NORMALIZED) == normalized) { return id; }
    }
    return -1;
}

/* Cuts added tokens out of the text, in two passes as `tokenizers` does: first those that are not `normalized`, then, in what
 * is left, the others. A special name that is not asked for is skipped whole: no other name is looked for inside it. */
static inline void encode_added(TokenEncoder* o, const uint8_t* s, const uint8_t* end, bool specials, int normalized) {
    const Tokenizer* t = o->t;
    const uint8_t* start = s;
    while (s <= end) {
        int32_t id = -1;
        if (s < end) {
            if (!t->added_first[*s]) {
                s++;
                continue;
            }
            id = added_find(t, s, end, normalized);
            if (id < 0) {
                s++;
                continue;
            }
            if ((t->flags[id] & TOKEN_SPECIAL) && !specials) {
                s += t->at[id + 1] - t->at[id];
                continue;
            }
        }
        if (normalized) {
            encode_plain(o, start, s);
        } else {
            encode_added(o, start, s, specials, TOKEN_NORMALIZED);
        }
        if (id < 0) { break; }
        encoder_reserve(o, 1);
        o->ids[o->count++] = id;
        s += t->at[id + 1] - t->at[id];
        start = s;
    }
}

/* Appends the ids of a text to o->ids. `specials`: names of special tokens in it become those tokens; else they are text, and
 * the ids equal tiktoken's encode_ordinary. No BOS or EOS is added. */
static inline void encoder_text(TokenEncoder* o, const char* text, size_t len, bool specials) {
    const uint8_t *s = (const uint8_t*)text, *end = s + len;
    if (len == 0) { return; }
    if (!o->cache && len >= 1024) { o->cache = (PieceCacheSlot*)xcalloc(TOKEN_CACHE_SLOTS, sizeof(PieceCacheSlot)); }
    if (o->t->has_plain_added || (specials && o->t->has_specials)) {
        encode_added(o, s, end, specials, 0);
    } else {
        encode_plain(o, s, end);
    }
}

/* encoder_text for a text now and then: writes the ids at (*ids)[at], which grows by realloc, and returns the number of ids
 * in it then. */
static inline size_t tokenizer_encode(const Tokenizer* t, const char* text, size_t len, bool specials, int32_t** ids,
                                      size_t* cap, size_t at) {
    TokenEncoder o;
    encoder_init(&o, t);
    o.ids = *ids;
    o.cap = *cap;
    o.count = at;
    encoder_text(&o, text, len, specials);
    *ids = o.ids;
    *cap = o.cap;
    at = o.count;
    o.ids = NULL;
    encoder_free(&o);
    return at;
}

/* Whether a text may be cut in front of s[i], 0 < i < its length, so that both parts alone encode to the ids of the whole:
 * between a newline and a printable ASCII character. A newline ends each piece of white space or of symbols that holds
 * one, and no piece begins with one and goes on with such a character. Where tokenizer_may_cut() says so. */
static inline bool text_border(const char* s, size_t i) { return s[i - 1] == '\n' && s[i] > ' ' && s[i] < 0x7F; }

/* Whether texts may be cut at borders: not where whole texts are merged, nor where an added token's name has a line's end in
 * it. */
static inline bool tokenizer_may_cut(const Tokenizer* t) {
    if (t->split == SPLIT_NONE && t->num_merges > 0) { return false; }
    for (int id = 0; id < t->vocab_size; id++) {
        const uint32_t len = t->at[id + 1] - t->at[id];
        if ((t->flags[id] & TOKEN_ADDED) && len > 1 && memchr(t->bytes + t->at[id], '\n', len - 1)) { return false; }
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// decoding

/* The bytes of a token: they are no C string, may hold NULs and be a part of a character. Not for ids out of range. */
static inline const char* tokenizer_piece(const Tokenizer* t, int id, size_t* len) {
    assert(id >= 0 && id < t->vocab_size);
    *len = t->at[id + 1] - t->at[id];
    return t->bytes + t->at[id];
}

/* The id of a special (or other added) token by its name, or -1. */
static inline int tokenizer_find(const Tokenizer* t, const char* name) {
    return token_table_find(&t->added, name, strlen(name));
}

/* Turns ids into text bit by bit: each push gives the characters that are whole by now. Bytes that no more bytes could make
 * UTF-8 become U+FFFD, one for each maximal part of a character (as Python's errors="replace" and Rust's lossy decoding do),
 * so what comes out is always valid UTF-8; a tool that wants the raw bytes joins tokenizer_piece's. */
typedef struct {
    const Tokenizer* t;
    char* in;       // (max_piece + 3) bytes not given out yet: the beginning of a character
    size_t num_in;  // 0 to 3 between calls
    char* out;      // (3 * (max_piece + 3)) the last result: at worst each byte becomes U+FFFD
} TokenDecoder;

static inline void decoder_init(TokenDecoder* d, const Tokenizer* t) {
    d->t = t;
    d->num_in = 0;
    d->in = (char*)xmalloc(t->max_piece + 3);
    d->out = (char*)xmalloc(3 * (t->max_piece + 3));
}

static inline void decoder_free(TokenDecoder* d) {
    free(d->in);
    free(d->out);
    memset(d, 0, sizeof *d);
}

/* At s (n >= 1 bytes): 1 and *used = its length for a whole character; 0 where the n bytes begin one; else -1 and *used = how
 * many bytes one U+FFFD stands for. */
static inline int utf8_step(const char* s, size_t n, size_t* used) {
    uint32_t c;
    int len = utf8_decode((const uint8_t*)s, n, &c);
    *used = len ? (size_t)len : 1;
    if (len) { return 1; }
    // s is ill-formed or cut short: the longest part that some bytes would complete is found by trying to
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

/* The text that became whole with this token, valid until the next call; it may be empty. Not for ids out of range. */
static inline const char* decoder_push(TokenDecoder* d, int id, size_t* len) {
    size_t piece_len, used, at = 0, out = 0;
    const char* piece = tokenizer_piece(d->t, id, &piece_len);
    memcpy(d->in + d->num_in, piece, piece_len);
    const size_t n = d->num_in + piece_len;
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

/* What is left at the end of the text: U+FFFD where it ends within a character, else nothing. */
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
    free(t->added.slots);
    free(t->added_lens);
    free(t->merges);
    free(t->source);
    free(t->config);
    memset(t, 0, sizeof *t);
}

static inline int compare_lengths_down(const void* a, const void* b) {
    uint32_t x = *(const uint32_t*)a, y = *(const uint32_t*)b;
    return (x < y) - (x > y);
}

/* The tables of added tokens, from the flags; and max_piece, BOS and EOS by name, and the fingerprint. */
static inline void tokenizer_index(Tokenizer* t) {
    size_t num_added = 0, distinct = 0;
    uint64_t h = 0xCBF29CE484222325u;  // FNV-1a over (length, special?, bytes) of each token
    t->max_piece = 0;
    for (int i = 0; i < t->vocab_size; i++) {
        uint32_t len = t->at[i + 1] - t->at[i];
        num_added += (t->flags[i] & TOKEN_ADDED) != 0;
        t->max_piece = size_max(t->max_piece, len);
        for (int b = 0; b < 4; b++) { h = (h ^ (len >> 8 * b & 0xFF)) * 0x100000001B3u; }
        h = (h ^ (t->flags[i] & TOKEN_SPECIAL)) * 0x100000001B3u;
        for (uint32_t b = t->at[i]; b < t->at[i + 1]; b++) { h = (h ^ (uint8_t)t->bytes[b]) * 0x100000001B3u; }
    }
    t->fingerprint = h ? h : 1;
    token_table_init(&t->added, num_added, t->bytes, t->at);
    t->added_lens = (uint32_t*)xmalloc(num_added * sizeof(uint32_t));
    for (int i = 0; i < t->vocab_size; i++) {
        size_t len = t->at[i + 1] - t->at[i];
        if (!(t->flags[i] & TOKEN_ADDED) || len == 0) { continue; }
        token_table_add(&t->added, i, len);
        t->added_first[(uint8_t)t->bytes[t->at[i]]] = true;
        t->has_specials = t->has_specials || (t->flags[i] & TOKEN_SPECIAL);
        t->has_plain_added = t->has_plain_added || !(t->flags[i] & TOKEN_SPECIAL);
        t->added_lens[t->num_added_lens++] = (uint32_t)len;
    }
    qsort(t->added_lens, t->num_added_lens, sizeof(uint32_t), compare_lengths_down);
    for (size_t i = 0; i < t->num_added_lens; i++) {
        if (i == 0 || t->added_lens[i] != t->added_lens[distinct - 1]) { t->added_lens[distinct++] = t->added_lens[i]; }
    }
    t->num_added_lens = distinct;

    static const char* const begins[] = {"<|begin_of_text|>", "<|endoftext|>", "<s>", "<bos>"};
    static const char* const ends[] = {"<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>"};
    t->bos_id = t->eos_id = -1;
    for (int i = 0; i < 4; i++) {
        if (t->bos_id < 0) { t->bos_id = tokenizer_find(t, begins[i]); }
        if (t->eos_id < 0) { t->eos_id = tokenizer_find(t, ends[i]); }
    }
}

/* The name of Llama 3.1's k-th special token, 0 <= k < 256 (llama-models, models/llama3/tokenizer.py, gives the same list). */
static inline void llama3_special(char* out /* (40) */, int k) {
    // clang-format off
    static const struct { int k; const char* name; } named[] = {
        {0, "begin_of_text"}, {1, "end_of_text"}, {4, "finetune_right_pad_id"}, {6, "start_header_id"}, {7, "end_header_id"},
        {8, "eom_id"}, {9, "eot_id"}, {10, "python_tag"},
    };
    // clang-format on
    int before = 0;  // named ones below k
    for (size_t i = 0; i < sizeof named / sizeof *named; i++) {
        if (named[i].k == k) {
            snprintf(out, 40, "<|%s|>", named[i].name);
            return;
        }
        before += named[i].k < k;
    }
    snprintf(out, 40, "<|reserved_special_token_%d|>", k - before);
}

/* 256 bytes, of which byte b is token b, and <|begin_of_text|> = 256. */
static inline void tokenizer_bytes(Tokenizer* t) {
    static const char bos[] = "<|begin_of_text|>";
    memset(t, 0, sizeof *t);
    t->vocab_size = 257;
    t->bytes = (char*)xmalloc(256 + sizeof bos);
    t->at = (uint32_t*)xmalloc(258 * sizeof(uint32_t));
    t->flags = (uint8_t*)xcalloc(257, 1);
    token_table_init(&t->pieces, 256, t->bytes, t->at);
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

// ---------------------------------------------------------------------------------------------------------------------
// tokenizer.model

static inline int base64_value(char c) {
    if (c >= 'A' && c <= 'Z') { return c - 'A'; }
    if (c >= 'a' && c <= 'z') { return c - 'a' + 26; }
    if (c >= '0' && c <= '9') { return c - '0' + 52; }
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* Decodes n characters to out, which has room for n / 4 * 3 bytes; false where they are no base64 with its padding. */
static inline bool base64_decode(char* out, size_t* out_len, const char* s, size_t n) {
    if (n == 0 || n % 4 != 0) { return false; }
    size_t pad = s[n - 1] != '=' ? 0 : s[n - 2] != '=' ? 1 : 2, len = 0;
    for (size_t i = 0; i < n; i += 4) {
        uint32_t bits = 0;
        for (size_t k = 0; k < 4; k++) {
            int v = i + k >= n - pad ? 0 : base64_value(s[i + k]);
            if (v < 0) { return false; }
            bits = bits << 6 | (uint32_t)v;
        }
        for (int shift = 16; shift >= 0; shift -= 8) { out[len++] = (char)(bits >> shift); }
    }
    *out_len = len - pad;
    return true;
}

/* One line of tokenizer.model: *s moves behind it. The bytes go to out, which has room for as many as the line has. */
static inline bool tiktoken_line(const char** s, const char* end, char* out, size_t* out_len, int64_t* rank, size_t line,
                                 const char* path, Error* e) {
    const char* p = *s;
    const char* newline = (const char*)memchr(p, '\n', (size_t)(end - p));
    const char* stop = newline ? newline : end;
    const char* space = (const char*)memchr(p, ' ', (size_t)(stop - p));
    *s = newline ? newline + 1 : end;
    if (!space || !base64_decode(out, out_len, p, (size_t)(space - p))) {
        return fail(e, "%s:%zu: is no line \"BASE64 RANK\" of a tiktoken vocabulary", path, line);
    }
    if (*out_len > TOKEN_PIECE_MAX) {
        return fail(e, "%s:%zu: token is %zu bytes long, wanted at most %d", path, line, *out_len, TOKEN_PIECE_MAX);
    }
    int64_t value = 0;
    const char* digit = space + 1;
    for (; digit < stop && *digit >= '0' && *digit <= '9' && value < INT32_MAX; digit++) {
        value = value * 10 + (*digit - '0');
    }
    if (digit == space + 1 || digit != stop) {
        char shown[40];
        return fail(e, "%s:%zu: rank is \"%s\", wanted a number", path, line,
                    show_text(shown, sizeof shown, space + 1, (size_t)(stop - space - 1)));
    }
    *rank = value;
    return true;
}

/* The merge table by tiktoken's rule: two neighbours that together are a token merge, and rank as it. */
static inline void tiktoken_merges(Tokenizer* t, int num_ranks) {
    for (int pass = 0; pass < 2; pass++) {  // count, then fill
        size_t count = 0;
        for (int id = 0; id < num_ranks; id++) {
            const char* s = t->bytes + t->at[id];
            size_t n = t->at[id + 1] - t->at[id];
            for (size_t i = 1; i < n; i++) {
                int32_t left = token_table_find(&t->pieces, s, i);
                int32_t right = left < 0 ? -1 : token_table_find(&t->pieces, s + i, n - i);
                if (right < 0) { continue; }
                count++;
                if (pass) { merge_add(t, left, right, (uint32_t)id, id); }
            }
        }
        if (!pass) { merges_init(t, count); }
    }
}

static inline bool tokenizer_parse_tiktoken(Tokenizer* t, const char* text, size_t len, const char* path, Error* e) {
    const char *s = text, *end = text + len;
    size_t lines = 0, out_len = 0, line = 0, used = 0;
    for (const char* p = text; p < end; p++) { lines += *p != '\n' && (p == text || p[-1] == '\n'); }  // not the empty ones
    int64_t rank = 0, num_ranks = 0;
    // the bytes in the order of the file, then in the order of ranks
    char* read = (char*)xmalloc(len);
    size_t* read_at = (size_t*)xmalloc((lines + 1) * sizeof(size_t));
    int64_t* line_of = (int64_t*)xmalloc(lines * sizeof(int64_t));
    bool ok = true;
    for (size_t i = 0; i < lines; i++) { line_of[i] = -1; }
    while (ok && s < end) {
        line++;
        if (*s == '\n') {
            s++;
            continue;
        }
        ok = tiktoken_line(&s, end, read + used, &out_len, &rank, line, path, e);
        if (!ok) { break; }
        if (rank >= (int64_t)lines || line_of[rank] >= 0) {
            ok = fail(e, "%s:%zu: rank is %lld, wanted each of 0 to the number of lines - 1 once", path, line, (long long)rank);
            break;
        }
        line_of[rank] = num_ranks;
        read_at[num_ranks++] = used;
        used += out_len;
        read_at[num_ranks] = used;
    }
    for (int64_t i = 0; ok && i < num_ranks; i++) {
        ok = line_of[i] >= 0 ||
             fail(e, "%s: no line has rank %lld, but there are %lld lines", path, (long long)i, (long long)num_ranks);
    }
    if (ok) {
        t->vocab_size = (int)num_ranks + 256;
        t->bytes = (char*)xmalloc(used + 256 * 40);
        t->at = (uint32_t*)xmalloc(((size_t)t->vocab_size + 1) * sizeof(uint32_t));
        t->flags = (uint8_t*)xcalloc((size_t)t->vocab_size, 1);
        token_table_init(&t->pieces, (size_t)num_ranks, t->bytes, t->at);
        t->at[0] = 0;
    }
    for (int id = 0; ok && id < (int)num_ranks; id++) {
        size_t from = read_at[line_of[id]], n = read_at[line_of[id] + 1] - from;
        memcpy(t->bytes + t->at[id], read + from, n);
        t->at[id + 1] = t->at[id] + (uint32_t)n;
        int32_t twin = token_table_find(&t->pieces, t->bytes + t->at[id], n);
        ok = twin < 0 || fail(e, "%s: ranks %d and %d are the same bytes", path, twin, id);
        token_table_add(&t->pieces, id, n);
    }
    for (int b = 0; ok && b < 256; b++) {
        char byte = (char)b;
        t->byte_ids[b] = token_table_find(&t->pieces, &byte, 1);
        ok = t->byte_ids[b] >= 0 || fail(e, "%s: has no token for the single byte 0x%02x, so not every text has ids", path, b);
    }
    if (ok) {
        for (int k = 0; k < 256; k++) {
            int id = (int)num_ranks + k;
            llama3_special(t->bytes + t->at[id], k);
            t->at[id + 1] = t->at[id] + (uint32_t)strlen(t->bytes + t->at[id]);
            t->flags[id] = TOKEN_ADDED | TOKEN_SPECIAL;
        }
        t->split = SPLIT_LLAMA3;
        t->max_digits = 3;
        tiktoken_merges(t, (int)num_ranks);
        tokenizer_index(t);
    }
    free(read);
    free(read_at);
    free(line_of);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// tokenizer.json

/* GPT-2's printable stand-in for each byte: itself where it is printable, else the next character from U+0100 on. */
static inline void byte_stand_ins(uint16_t* code /* (256) */, int16_t* byte_of /* (512), -1: none */) {
    int extra = 0x100;
    for (int i = 0; i < 512; i++) { byte_of[i] = -1; }
    for (int b = 0; b < 256; b++) {
        bool printable = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
        code[b] = (uint16_t)(printable ? b : extra++);
        byte_of[code[b]] = (int16_t)b;
    }
}

/* Turns n bytes of stand-ins into the bytes they stand for; a string with any other character is taken as it is, and no piece
 * can be such a token. Returns the number of bytes; *plain tells whether all were stand-ins. */
static inline size_t bytes_from_stand_ins(char* out, const char* s, size_t n, const int16_t* byte_of, bool* plain) {
    size_t len = 0;
    for (size_t i = 0; i < n;) {
        uint32_t c;
        int used = utf8_decode((const uint8_t*)s + i, n - i, &c);
        if (used == 0 || c >= 512 || byte_of[c] < 0) {
            memcpy(out, s, n);
            *plain = false;
            return n;
        }
        out[len++] = (char)byte_of[c];
        i += (size_t)used;
    }
    *plain = true;
    return len;
}

/* Whether the member is absent, null, false, 0 or "": then it asks for nothing. */
static inline bool json_is_off(const Json* j, const JsonNode* object, const char* key) {
    const JsonNode* n = json_get(j, object, key);
    double value = 1;
    return !n || n->type == JSON_FALSE || (n->type == JSON_STRING && n->length == 0) ||
           (json_node_double(j, n, &value) && value == 0);
}

static inline bool json_is_string(const Json* j, const JsonNode* n, const char* want) {
    size_t len = 0;
    const char* s = json_string(j, n, &len);
    return s && len == strlen(want) && memcmp(s, want, len) == 0;
}

// Llama 3's split pattern; `digits` is what it takes for a number
#define LLAMA3_PATTERN(digits)                                           \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" digits \
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|"                     \
    "\\s+(?!\\S)|\\s+"

/* A Split step: one of the patterns that are known. */
static inline bool parse_split(Tokenizer* t, const Json* j, const JsonNode* step, Error* e) {
    // clang-format off
    static const struct { const char* pattern; int split, max_digits; } known[] = {
        {LLAMA3_PATTERN("\\p{N}{1,3}"), SPLIT_LLAMA3, 3},
        {LLAMA3_PATTERN("\\p{N}{1,2}"), SPLIT_LLAMA3, 2},
        {LLAMA3_PATTERN("\\p{N}"), SPLIT_LLAMA3, 1},
        {"'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+", SPLIT_GPT2, 0},
    };
    // clang-format on
    const JsonNode* pattern = json_get(j, step, "pattern");
    const JsonNode* regex = json_get(j, pattern, "Regex");
    if (!regex) { return json_wanted(j, step, "pattern", e, "{\"Regex\": the split pattern of Llama 3 or GPT-2}"); }
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (!json_is_string(j, regex, known[i].pattern)) { continue; }
        // the patterns match every character, so keeping the matches and cutting at them are the same
        bool invert = !json_is_off(j, step, "invert");
        if (!json_is_string(j, json_get(j, step, "behavior"), invert ? "Removed" : "Isolated")) {
            return json_wanted(j, step, "behavior", e, "\"%s\"", invert ? "Removed" : "Isolated");
        }
        t->split = known[i].split;
        t->max_digits = known[i].max_digits;
        return true;
    }
    return json_wanted(j, pattern, "Regex", e, "the split pattern of Llama 3 or GPT-2");
}

/* One step of the pre-tokenizer. `*stage`: 0 nothing yet, 1 behind Digits, 2 behind Split, 3 behind ByteLevel. */
static inline bool parse_pre_tokenizer_step(Tokenizer* t, const Json* j, const JsonNode* step, int* stage, Error* e) {
    const JsonNode* type = json_get(j, step, "type");
    if (json_is_string(j, type, "Digits") && *stage < 1) {
        t->digits = json_is_off(j, step, "individual_digits") ? DIGITS_RUNS : DIGITS_EACH;
        *stage = 1;
        return true;
    }
    if (json_is_string(j, type, "Split") && *stage < 2) {
        *stage = 2;
        return parse_split(t, j, step, e);
    }
    if (!json_is_string(j, type, "ByteLevel") || *stage == 3) {
        return json_wanted(j, step, "type", e, "Digits, Split and ByteLevel, each at most once and in this order");
    }
    if (!json_is_off(j, step, "add_prefix_space")) {
        return json_wanted(j, step, "add_prefix_space", e, "false: with it decoding would not give the text back");
    }
    bool use_regex = true;  // the default of `tokenizers`
    if (!json_bool_or(j, step, "use_regex", true, &use_regex, e)) { return false; }
    if (use_regex && *stage == 2) { return json_wanted(j, step, "use_regex", e, "false behind a Split"); }
    if (use_regex) { t->split = SPLIT_GPT2; }
    *stage = 3;
    return true;
}

static inline bool parse_pre_tokenizer(Tokenizer* t, const Json* j, Error* e) {
    const JsonNode* node = json_get(j, json_root(j), "pre_tokenizer");
    int stage = 0;
    t->split = SPLIT_NONE;
    if (!node) { return json_wanted(j, json_root(j), "pre_tokenizer", e, "one that ends in ByteLevel (byte-level BPE)"); }
    if (json_is_string(j, json_get(j, node, "type"), "Sequence")) {
        const JsonNode* steps = json_get(j, node, "pretokenizers");
        if (!steps || steps->type != JSON_ARRAY) { return json_wanted(j, node, "pretokenizers", e, "an array"); }
        for (const JsonNode* step = json_first(j, steps); step; step = json_next(j, step)) {
            if (!parse_pre_tokenizer_step(t, j, step, &stage, e)) { return false; }
        }
        return stage == 3 || json_wanted(j, node, "pretokenizers", e, "ByteLevel as its last step (byte-level BPE)");
    }
    if (!parse_pre_tokenizer_step(t, j, node, &stage, e)) { return false; }
    return stage == 3 || json_wanted(j, node, "type", e, "ByteLevel, or a Sequence that ends in it (byte-level BPE)");
}

/* Everything that `tokenizers` would do beyond splitting and merging has to be off. */
static inline bool parse_refusals(const Json* j, const JsonNode* model, Error* e) {
    const JsonNode* root = json_root(j);
    const JsonNode* normalizer = json_get(j, root, "normalizer");
    if (normalizer) {
        const JsonNode* steps = json_get(j, normalizer, "normalizers");
        if (!json_is_string(j, json_get(j, normalizer, "type"), "Sequence") || !steps || steps->length > 0) {
            return json_wanted(j, normalizer, "type", e, "no normalizer at all: it would change the text");
        }
    }
    const JsonNode* decoder = json_get(j, root, "decoder");
    if (decoder && !json_is_string(j, json_get(j, decoder, "type"), "ByteLevel")) {
        return json_wanted(j, decoder, "type", e, "ByteLevel");
    }
    if (json_get(j, model, "type") && !json_is_string(j, json_get(j, model, "type"), "BPE")) {
        return json_wanted(j, model, "type", e, "BPE");
    }
    static const char* const off[] = {"dropout", "continuing_subword_prefix", "end_of_word_suffix"};
    for (int i = 0; i < 3; i++) {
        if (!json_is_off(j, model, off[i])) { return json_wanted(j, model, off[i], e, "null"); }
    }
    return true;
}

/* While a tokenizer.json is read: the names in it and their ids. */
typedef struct {
    Tokenizer* t;
    const Json* j;
    const JsonNode *model, *vocab, *merges, *added;
    uint32_t* name_at;   // (vocab_size) where the name of each id starts in j->text
    uint32_t* name_len;  // (vocab_size) its bytes; UINT32_MAX: no name yet
    TokenTable names;    // of model.vocab
    int16_t byte_of[512];
} VocabReader;

/* Gives every id its name, from model.vocab and added_tokens: ids 0 .. n-1, each once. */
static inline bool parse_names(VocabReader* r, Error* e) {
    const Json* j = r->j;
    Tokenizer* t = r->t;
    const size_t num_added = r->added ? r->added->length : 0;
    const int64_t most = (int64_t)(r->vocab->length + num_added);
    int64_t id = 0, count = 0;
    char shown[64];
    if (most == 0 || most > INT32_MAX) { return json_wanted(j, r->model, "vocab", e, "1 to 2^31 - 1 tokens"); }
    r->name_at = (uint32_t*)xcalloc((size_t)most, sizeof(uint32_t));
    r->name_len = (uint32_t*)xmalloc((size_t)most * sizeof(uint32_t));
    t->flags = (uint8_t*)xcalloc((size_t)most, 1);
    for (int64_t i = 0; i < most; i++) { r->name_len[i] = UINT32_MAX; }
    token_table_init(&r->names, r->vocab->length, j->text, r->name_at);
    for (const JsonNode* n = json_first(j, r->vocab); n; n = json_next(j, n)) {
        const char* name = show_text(shown, sizeof shown, j->text + n->key, n->key_len);
        if (!json_node_int(j, n, &id) || id < 0 || id >= most || r->name_len[id] != UINT32_MAX) {
            char found[64];
            return fail(e, "%s: model.vocab gives \"%s\" the id %s, wanted each of 0 to %lld once", j->path, name,
                        json_show(found, sizeof found, j, n), (long long)most - 1);
        }
        r->name_at[id] = n->key;
        r->name_len[id] = n->key_len;
        token_table_add(&r->names, (int32_t)id, n->key_len);
        count++;
    }
    for (const JsonNode* n = r->added ? json_first(j, r->added) : NULL; n; n = json_next(j, n)) {
        static const char* const off[] = {"lstrip", "rstrip", "single_word"};
        const JsonNode* content = json_get(j, n, "content");
        bool special = false, normalized = false;
        for (int i = 0; i < 3; i++) {
            if (!json_is_off(j, n, off[i])) { return json_wanted(j, n, off[i], e, "false"); }
        }
        if (!content || content->type != JSON_STRING || content->length == 0) {
            return json_wanted(j, n, "content", e, "the text of the token");
        }
        if (!json_int(j, n, "id", 0, most - 1, &id, e) || !json_bool_or(j, n, "special", false, &special, e) ||
            !json_bool_or(j, n, "normalized", !special, &normalized, e)) {
            return false;
        }
        int32_t listed = token_table_find(&r->names, j->text + content->at, content->length);
        bool fresh = r->name_len[id] == UINT32_MAX;
        if (listed >= 0 ? listed != id : !fresh) {
            return fail(e, "%s: added_tokens gives \"%s\" the id %lld, but %s", j->path,
                        show_text(shown, sizeof shown, j->text + content->at, content->length), (long long)id,
                        listed >= 0 ? "model.vocab another one" : "that is taken by another token");
        }
        if (t->flags[id] & TOKEN_ADDED) { return json_wanted(j, n, "id", e, "an id of its own"); }
        if (fresh) {
            r->name_at[id] = content->at;
            r->name_len[id] = content->length;
            count++;
        }
        t->flags[id] = (uint8_t)(TOKEN_ADDED | (special ? TOKEN_SPECIAL : 0) | (normalized ? TOKEN_NORMALIZED : 0));
    }
    for (int64_t i = 0; i < count; i++) {
        if (r->name_len[i] == UINT32_MAX) { return fail(e, "%s: no token has the id %lld", j->path, (long long)i); }
    }
    t->vocab_size = (int)count;
    return true;
}

/* The bytes of every token, and the table of those that a piece may be. */
static inline void parse_bytes(VocabReader* r) {
    Tokenizer* t = r->t;
    size_t total = 0;
    for (int i = 0; i < t->vocab_size; i++) { total += r->name_len[i]; }
    t->bytes = (char*)xmalloc(total);
    t->at = (uint32_t*)xmalloc(((size_t)t->vocab_size + 1) * sizeof(uint32_t));
    t->at[0] = 0;
    token_table_init(&t->pieces, (size_t)t->vocab_size, t->bytes, t->at);
    for (int i = 0; i < t->vocab_size; i++) {
        const char* name = r->j->text + r->name_at[i];
        size_t n = r->name_len[i];
        bool plain = false;
        char* out = t->bytes + t->at[i];
        size_t len = bytes_from_stand_ins(out, name, n, r->byte_of, &plain);
        if (t->flags[i] & TOKEN_ADDED) {  // its name is text; a piece only where model.vocab has it as such
            plain = plain && len == n && memcmp(out, name, n) == 0 && token_table_find(&r->names, name, n) == i;
            memcpy(out, name, n);
        } else {
            n = len;
        }
        t->at[i + 1] = t->at[i] + (uint32_t)n;
        if (plain) { token_table_add(&t->pieces, i, n); }
    }
}

/* One merge, the index-th of model.merges. `joined` is a buffer of `cap` bytes that grows. */
static inline bool parse_merge(VocabReader* r, const JsonNode* n, size_t index, uint32_t rank, char** joined, size_t* cap,
                               Error* e) {
    const char *a = NULL, *b = NULL;
    size_t a_len = 0, b_len = 0;
    if (n->type == JSON_STRING) {
        a = r->j->text + n->at;
        b = (const char*)memchr(a, ' ', n->length);
        a_len = b ? (size_t)(b - a) : 0;
        b = b ? b + 1 : NULL;
        b_len = b ? n->length - a_len - 1 : 0;
    } else if (n->type == JSON_ARRAY && n->length == 2) {
        a = json_string(r->j, json_first(r->j, n), &a_len);
        b = json_string(r->j, json_next(r->j, json_first(r->j, n)), &b_len);
    }
    if (!a || !b || memchr(n->type == JSON_STRING ? b : "", ' ', n->type == JSON_STRING ? b_len : 0)) {
        return fail(e, "%s: model.merges.%zu is no pair, wanted \"a b\" or [\"a\", \"b\"]", r->j->path, index);
    }
    if (a_len + b_len > *cap) {
        *cap = 2 * (a_len + b_len);
        *joined = (char*)xrealloc(*joined, *cap);
    }
    if (a_len + b_len > 0) {
        memcpy(*joined, a, a_len);
        memcpy(*joined + a_len, b, b_len);
    }
    int32_t left = token_table_find(&r->names, a, a_len), right = token_table_find(&r->names, b, b_len);
    int32_t both = token_table_find(&r->names, *joined, a_len + b_len);
    if (left < 0 || right < 0 || both < 0) {
        char shown[64];
        return fail(e, "%s: model.merges.%zu needs the token \"%s\", which model.vocab does not have", r->j->path, index,
                    left < 0    ? show_text(shown, sizeof shown, a, a_len)
                    : right < 0 ? show_text(shown, sizeof shown, b, b_len)
                                : show_text(shown, sizeof shown, *joined, a_len + b_len));
    }
    merge_add(r->t, left, right, rank, both);
    return true;
}

static inline bool parse_merges(VocabReader* r, Error* e) {
    char* joined = NULL;
    size_t cap = 0, index = 0;
    uint32_t rank = 0;
    bool ok = true;
    merges_init(r->t, r->merges->length);
    for (const JsonNode* n = json_first(r->j, r->merges); ok && n; n = json_next(r->j, n), index++) {
        size_t len = 0;
        const char* s = json_string(r->j, n, &len);
        if (s && len >= 8 && memcmp(s, "#version", 8) == 0) { continue; }  // the first line of GPT-2's merges.txt
        ok = parse_merge(r, n, index, rank++, &joined, &cap, e);
    }
    free(joined);
    return ok;
}

/* The id of each single byte. A byte that the vocabulary lacks is `unk_token` where there is one, else dropped. */
static inline bool parse_byte_ids(VocabReader* r, Error* e) {
    const char* unk_name = NULL;
    size_t unk_len = 0;
    int32_t unk = -1;
    if (!json_is_off(r->j, r->model, "unk_token")) {
        unk_name = json_string(r->j, json_get(r->j, r->model, "unk_token"), &unk_len);
        if (!unk_name) { return json_wanted(r->j, r->model, "unk_token", e, "null or the name of a token"); }
        unk = token_table_find(&r->names, unk_name, unk_len);
    }
    for (int b = 0; b < 256; b++) {
        char byte = (char)b;
        int32_t id = token_table_find(&r->t->pieces, &byte, 1);
        // bytes 0xC0, 0xC1 and from 0xF5 on do not occur in UTF-8, and trained vocabularies often lack them
        bool in_utf8 = b != 0xC0 && b != 0xC1 && b < 0xF5;
        if (id < 0 && in_utf8 &&
            (!json_is_off(r->j, r->model, "byte_fallback") || (unk >= 0 && !json_is_off(r->j, r->model, "fuse_unk")))) {
            return fail(e, "%s: model.vocab lacks byte 0x%02x, wanted all bytes where byte_fallback or fuse_unk is true",
                        r->j->path, b);
        }
        r->t->byte_ids[b] = id >= 0 ? id : unk;
    }
    return true;
}

/* Without ignore_merges a piece that is a token need not become it: keeps in t->pieces those that merging gives. */
static inline void keep_reachable_pieces(Tokenizer* t) {
    TokenEncoder o;
    TokenSlot* old = t->pieces.slots;
    const size_t slots = t->pieces.mask + 1;
    encoder_init(&o, t);
    t->pieces.slots = (TokenSlot*)xcalloc(slots, sizeof(TokenSlot));
    for (size_t i = 0; i < slots; i++) {
        if (old[i].len == 0) { continue; }
        const int32_t id = old[i].id;
        o.count = 0;
        merge_piece(&o, (const uint8_t*)t->bytes + t->at[id], old[i].len);
        if (o.count == 1 && o.ids[0] == id) { token_table_add(&t->pieces, id, old[i].len); }
    }
    free(old);
    encoder_free(&o);
}

static inline bool tokenizer_parse_json(Tokenizer* t, const Json* j, Error* e) {
    VocabReader r;
    uint16_t code[256];
    memset(&r, 0, sizeof r);
    byte_stand_ins(code, r.byte_of);
    r.t = t;
    r.j = j;
    const JsonNode* root = json_root(j);
    r.model = json_get(j, root, "model");
    r.vocab = json_get(j, r.model, "vocab");
    r.merges = json_get(j, r.model, "merges");
    r.added = json_get(j, root, "added_tokens");
    if (!r.model || r.model->type != JSON_OBJECT) {
        return json_wanted(j, root, "model", e, "an object: is this a tokenizer.json?");
    }
    if (!parse_refusals(j, r.model, e)) { return false; }
    if (!r.vocab || r.vocab->type != JSON_OBJECT) { return json_wanted(j, r.model, "vocab", e, "an object of token: id"); }
    if (!r.merges || r.merges->type != JSON_ARRAY) { return json_wanted(j, r.model, "merges", e, "an array of pairs"); }
    if (r.added && r.added->type != JSON_ARRAY) { return json_wanted(j, root, "added_tokens", e, "an array"); }
    if (!parse_pre_tokenizer(t, j, e)) { return false; }
    bool ignore_merges = false;
    bool ok = json_bool_or(j, r.model, "ignore_merges", false, &ignore_merges, e) && parse_names(&r, e);
    if (ok) {
        parse_bytes(&r);
        ok = parse_byte_ids(&r, e) && parse_merges(&r, e);
    }
    if (ok) {
        tokenizer_index(t);
        if (!ignore_merges) { keep_reachable_pieces(t); }
    }
    free(r.name_at);
    free(r.name_len);
    free(r.names.slots);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// loading

/* Reads a tokenizer from `len` bytes of text of either kind; `path` names it in messages. */
static inline bool tokenizer_parse(Tokenizer* t, const char* text, size_t len, const char* path, Error* e) {
    memset(t, 0, sizeof *t);
    const char* kind = file_looks_like(text, len);
    bool ok;
    if (kind && strcmp(kind, "JSON text") == 0) {
        Json j;
        char* copy = (char*)memcpy(xmalloc(len + 1), text, len);
        copy[len] = 0;
        ok = json_parse(&j, copy, len, path, e);
        if (ok) {
            ok = tokenizer_parse_json(t, &j, e);
            json_free(&j);
        }
        if (ok) {
            t->source = (char*)memcpy(xmalloc(len + 1), text, len);
            t->source[len] = 0;
        }
    } else {
        const char* line_end = (const char*)memchr(text, '\n', len);
        const char* space = (const char*)memchr(text, ' ', line_end ? (size_t)(line_end - text) : len);
        char first[TOKEN_PIECE_MAX];
        size_t n = space ? (size_t)(space - text) : 0, got;
        if (n == 0 || n > sizeof first || !base64_decode(first, &got, text, n)) {
            if (len >= 9 && memcmp(text, "\x0A\x0E\x0A\x05<unk>", 9) == 0) { kind = "a SentencePiece model (Llama 2's kind)"; }
            return fail(e, "%s: is %s, wanted a tokenizer.json or tiktoken's tokenizer.model", path,
                        kind ? kind : "no tokenizer that is known");
        }
        ok = tokenizer_parse_tiktoken(t, text, len, path, e);
    }
    if (!ok) { tokenizer_free(t); }
    return ok;
}

/* The id that a tokenizer_config.json names in `key`, as text or as {"content": text}; *id stays where it names none. */
static inline bool config_token(const Tokenizer* t, const Json* j, const char* key, int* id, Error* e) {
    const JsonNode* n = json_get(j, json_root(j), key);
    size_t len = 0;
    if (n && n->type == JSON_OBJECT) { n = json_get(j, n, "content"); }
    if (!n) { return true; }
    const char* name = json_string(j, n, &len);
    int found = name ? token_table_find(&t->added, name, len) : -1;
    if (found < 0) { return json_wanted(j, json_root(j), key, e, "the name of an added token of tokenizer.json"); }
    *id = found;
    return true;
}

/* bos_token and eos_token of the tokenizer_config.json in the same folder, if there is one. */
static inline bool tokenizer_read_config(Tokenizer* t, const char* folder, Error* e) {
    char path[PATH_CAP];
    size_t len = 0;
    Json j;
    if (!path_join(path, folder, "tokenizer_config.json", e)) { return false; }
    if (!file_exists(path)) { return true; }
    t->config = read_file(path, &len, 16 << 20, e);
    if (!t->config) { return false; }
    char* copy = (char*)memcpy(xmalloc(len + 1), t->config, len + 1);
    if (!json_parse(&j, copy, len, path, e)) { return false; }
    bool ok = json_root(&j)->type == JSON_OBJECT || fail(e, "%s: is no JSON object", path);
    ok = ok && config_token(t, &j, "bos_token", &t->bos_id, e) && config_token(t, &j, "eos_token", &t->eos_id, e);
    json_free(&j);
    return ok;
}

/* Loads a tokenizer from a file of either kind, or from the tokenizer.json or tokenizer.model of a folder. BOS and EOS are
 * what the folder's tokenizer_config.json names, else the usual names (<|begin_of_text|>, <|endoftext|> ...), else -1. */
static inline bool tokenizer_load(Tokenizer* t, const char* path, Error* e) {
    char file[PATH_CAP], folder[PATH_CAP];
    memset(t, 0, sizeof *t);
    if (is_directory(path)) {
        if (!path_join(file, path, "tokenizer.json", e)) { return false; }
        if (!file_exists(file) && !path_join(file, path, "tokenizer.model", e)) { return false; }
        if (!file_exists(file)) { return fail(e, "%s: has no tokenizer.json and no tokenizer.model in it", path); }
    } else {
        if (strlen(path) >= sizeof file) { return fail(e, "%.200s...: the path is too long", path); }
        strcpy(file, path);
    }
    size_t len = 0;
    char* text = read_file(file, &len, TOKEN_FILE_MAX, e);
    if (!text) { return false; }
    bool ok = tokenizer_parse(t, text, len, file, e);
    free(text);
    if (!ok) { return false; }
    strcpy(folder, file);
    char* slash = strrchr(folder, '/');
    const char* name = slash ? slash + 1 : file;
    if (slash) { slash[slash == folder] = 0; }
    if (strcmp(name, "tokenizer.json") == 0 || strcmp(name, "tokenizer.model") == 0) {
        ok = tokenizer_read_config(t, slash ? folder : ".", e);
    }
    if (!ok) { tokenizer_free(t); }
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// saving

/* Behind the JSON string that starts at s, in text that has been parsed before. */
static inline const char* json_skip_string(const char* s) {
    for (s++; *s != '"'; s++) { s += *s == '\\'; }
    return s + 1;
}

static inline const char* json_skip_blank(const char* s) { return s + strspn(s, " \t\r\n"); }

/* Where the value of the top-level member `key` stands in the text of a JSON object; false where there is none. */
static inline bool json_find_member(const char* text, const char* key, const char** from, const char** to) {
    const char* s = json_skip_blank(text) + 1;
    const size_t key_len = strlen(key);
    while (*(s = json_skip_blank(s)) == '"') {
        const bool found = strncmp(s + 1, key, key_len) == 0 && s[key_len + 1] == '"';
        *from = s = json_skip_blank(json_skip_blank(json_skip_string(s)) + 1);
        for (int depth = 0; depth > 0 || (*s != ',' && *s != '}');) {
            depth += (*s == '{' || *s == '[') - (*s == '}' || *s == ']');
            s = *s == '"' ? json_skip_string(s) : s + 1;
        }
        *to = s;
        if (found) { return true; }
        s += *s == ',';
    }
    return false;
}

/* The text of a JSON object with the value of `key` replaced, or the member put in front where it is absent; all else stays
 * byte for byte. Returns memory for free(). */
static inline char* json_with_member(const char* text, const char* key, const char* value) {
    const char *from = NULL, *to = NULL;
    const bool there = json_find_member(text, key, &from, &to);
    const size_t size = strlen(text) + strlen(key) + strlen(value) + 16;
    char* out = (char*)xmalloc(size);
    if (!there) { from = to = json_skip_blank(text) + 1; }
    const size_t head = (size_t)(from - text);
    memcpy(out, text, head);
    if (there) {
        snprintf(out + head, size - head, "%s%s", value, to);
    } else {
        const char* comma = *json_skip_blank(to) == '}' ? "" : ",";
        snprintf(out + head, size - head, "\n  \"%s\": %s%s%s", key, value, comma, to);
    }
    return out;
}

/* Replaces *text, which is freed, by json_with_member of it. */
static inline void json_set_member(char** text, const char* key, const char* value) {
    char* changed = json_with_member(*text, key, value);
    free(*text);
    *text = changed;
}

/* A token's bytes as a JSON string. */
static inline void write_token_text(FILE* f, const Tokenizer* t, int id) {
    size_t len;
    const char* s = tokenizer_piece(t, id, &len);
    json_write_string(f, s, len);
}

/* A token as a JSON string of GPT-2's stand-ins; its bytes are s[0 .. n). */
static inline void write_stand_ins(FILE* f, const uint16_t* code, const char* s, size_t n) {
    char name[2 * TOKEN_PIECE_MAX];
    size_t len = 0;
    for (size_t i = 0; i < n; i++) { len += utf8_encode(name + len, code[(uint8_t)s[i]]); }
    json_write_string(f, name, len);
}

/* The post-processor that puts BOS in front, as `tokenizers` writes it. */
static inline void write_post_processor(FILE* f, const Tokenizer* t) {
    static const char sequence[] = "{\"Sequence\":{\"id\":\"%c\",\"type_id\":%d}}";
    fputs("{\"type\":\"TemplateProcessing\"", f);
    for (int pair = 0; pair < 2; pair++) {
        fputs(pair ? ",\"pair\":[" : ",\"single\":[", f);
        for (int i = 0; i <= pair; i++) {
            fputs(i ? ",{\"SpecialToken\":{\"id\":" : "{\"SpecialToken\":{\"id\":", f);
            write_token_text(f, t, t->bos_id);
            fprintf(f, ",\"type_id\":%d}},", i);
            fprintf(f, sequence, 'A' + i, i);
        }
        fputc(']', f);
    }
    fputs(",\"special_tokens\":{", f);
    write_token_text(f, t, t->bos_id);
    fputs(":{\"id\":", f);
    write_token_text(f, t, t->bos_id);
    fprintf(f, ",\"ids\":[%d],\"tokens\":[", t->bos_id);
    write_token_text(f, t, t->bos_id);
    fputs("]}}}", f);
}

/* Whether a post-processor is, or has in its Sequence, a TemplateProcessing that begins with the token `name`. */
static inline bool post_processor_adds(const Json* j, const JsonNode* node, const char* name, size_t len) {
    const JsonNode* list = json_get(j, node, "processors");
    if (json_is_string(j, json_get(j, node, "type"), "Sequence") && list && list->type == JSON_ARRAY) {
        for (const JsonNode* n = json_first(j, list); n; n = json_next(j, n)) {
            if (json_get(j, n, "single") && post_processor_adds(j, n, name, len)) { return true; }
        }
        return false;
    }
    const JsonNode* single = json_get(j, node, "single");
    const JsonNode* first = single && single->type == JSON_ARRAY ? json_first(j, single) : NULL;
    size_t id_len = 0;
    const char* id = first ? json_string(j, json_get(j, json_get(j, first, "SpecialToken"), "id"), &id_len) : NULL;
    return id && id_len == len && memcmp(id, name, len) == 0;
}

/* Whether the post-processor of t->source begins with BOS already. */
static inline bool source_adds_bos(const Tokenizer* t) {
    const char *from, *to;
    Json j;
    Error ignored = NO_ERROR;
    if (!json_find_member(t->source, "post_processor", &from, &to)) { return false; }
    const size_t len = (size_t)(to - from);
    char* copy = (char*)memcpy(xmalloc(len + 1), from, len);
    copy[len] = 0;
    if (!json_parse(&j, copy, len, "post_processor", &ignored)) { return false; }
    size_t name_len;
    const char* name = tokenizer_piece(t, t->bos_id, &name_len);
    const bool adds = post_processor_adds(&j, json_root(&j), name, name_len);
    json_free(&j);
    return adds;
}

/* The splits of token `id` into two tokens, in the order of their ids: the merges that lead to it by tiktoken's rule. */
static inline void write_merges_of(FILE* f, const Tokenizer* t, const uint16_t* code, int id, bool* first) {
    uint64_t splits[TOKEN_PIECE_MAX];
    size_t n, count = 0;
    const char* s = tokenizer_piece(t, id, &n);
    for (size_t i = 1; i < n; i++) {
        int32_t left = token_table_find(&t->pieces, s, i);
        int32_t right = left < 0 ? -1 : token_table_find(&t->pieces, s + i, n - i);
        if (right < 0) { continue; }
        uint64_t split = (uint64_t)left << 32 | (uint32_t)right;
        size_t at = count++;
        for (; at > 0 && splits[at - 1] > split; at--) { splits[at] = splits[at - 1]; }
        splits[at] = split;
    }
    for (size_t i = 0; i < count; i++) {
        fputs(*first ? "\n[" : ",\n[", f);
        *first = false;
        for (int side = 0; side < 2; side++) {
            size_t len;
            const char* part = tokenizer_piece(t, (int)(side ? splits[i] & UINT32_MAX : splits[i] >> 32), &len);
            if (side) { fputc(',', f); }
            write_stand_ins(f, code, part, len);
        }
        fputc(']', f);
    }
}

/* A tokenizer.json for a tokenizer that did not come from one: tiktoken's kind or the built-in bytes. */
static inline void write_tokenizer_json(FILE* f, const Tokenizer* t) {
    uint16_t code[256];
    int16_t byte_of[512];
    bool first = true;
    byte_stand_ins(code, byte_of);
    fputs("{\n\"version\": \"1.0\",\n\"truncation\": null,\n\"padding\": null,\n\"added_tokens\": [", f);
    for (int id = 0; id < t->vocab_size; id++) {
        if (!(t->flags[id] & TOKEN_ADDED)) { continue; }
        fprintf(f, "%s\n{\"id\":%d,\"content\":", first ? "" : ",", id);
        first = false;
        write_token_text(f, t, id);
        fputs(",\"single_word\":false,\"lstrip\":false,\"rstrip\":false,\"normalized\":false,\"special\":true}", f);
    }
    fputs("],\n\"normalizer\": null,\n\"pre_tokenizer\": ", f);
    static const char bytes[] = "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":true,\"use_regex\":false}";
    if (t->split == SPLIT_LLAMA3) {
        fputs("{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":", f);
        json_write_string(f, LLAMA3_PATTERN("\\p{N}{1,3}"), strlen(LLAMA3_PATTERN("\\p{N}{1,3}")));
        fprintf(f, "},\"behavior\":\"Isolated\",\"invert\":false},%s]}", bytes);
    } else {
        fputs(bytes, f);
    }
    fputs(",\n\"post_processor\": ", f);
    write_post_processor(f, t);
    fputs(",\n\"decoder\": {\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":true,\"use_regex\":false},\n",
          f);
    fputs("\"model\": {\"type\":\"BPE\",\"dropout\":null,\"unk_token\":null,\"continuing_subword_prefix\":null,", f);
    fputs("\"end_of_word_suffix\":null,\"fuse_unk\":false,\"byte_fallback\":false,\"ignore_merges\":true,\n\"vocab\": {", f);
    first = true;
    for (int id = 0; id < t->vocab_size; id++) {
        if (t->flags[id] & TOKEN_ADDED) { continue; }
        fputs(first ? "\n" : ",\n", f);
        first = false;
        size_t len;
        const char* s = tokenizer_piece(t, id, &len);
        write_stand_ins(f, code, s, len);
        fprintf(f, ":%d", id);
    }
    fputs("},\n\"merges\": [", f);
    first = true;
    for (int id = 0; id < t->vocab_size; id++) {
        if (!(t->flags[id] & TOKEN_ADDED)) { write_merges_of(f, t, code, id, &first); }
    }
    fputs("]}\n}\n", f);
}

/* Llama 3's chat format as a template for `transformers`, for tokenizers that have its special tokens. */
#define LLAMA3_CHAT_TEMPLATE                                                                                    \
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n" \
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"                                                     \
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"

/* The text of a tokenizer_config.json: the one the tokenizer came with, or a new one; BOS, EOS and the class are set in it. */
static inline char* tokenizer_config_text(const Tokenizer* t, int max_length) {
    static const struct {
        const char *key, *value;
    } fixed[] = {
        // any other class would build its own post-processor in place of the file's
        {"tokenizer_class", "\"PreTrainedTokenizerFast\""},
        {"clean_up_tokenization_spaces", "false"},  // else decode would drop the space in " ."
    };
    const char *from, *to, *names[2] = {"eos_token", "bos_token"};
    const int ids[2] = {t->eos_id, t->bos_id};
    char* text = xstrdup(t->config ? t->config : "{\n}\n");
    char* value = NULL;
    size_t size = 0;
    if (!t->config && tokenizer_find(t, "<|start_header_id|>") >= 0 && tokenizer_find(t, "<|end_header_id|>") >= 0 &&
        tokenizer_find(t, "<|eot_id|>") >= 0) {
        FILE* f = open_memstream(&value, &size);
        json_write_string(f, LLAMA3_CHAT_TEMPLATE, strlen(LLAMA3_CHAT_TEMPLATE));
        fclose(f);
        json_set_member(&text, "chat_template", value);
        free(value);
    }
    if (!t->config && max_length > 0) {
        char number[16];
        snprintf(number, sizeof number, "%d", max_length);
        json_set_member(&text, "model_max_length", number);
    }
    for (int i = 0; i < 2; i++) {
        if (ids[i] < 0) { continue; }
        FILE* f = open_memstream(&value, &size);
        write_token_text(f, t, ids[i]);
        fclose(f);
        json_set_member(&text, names[i], value);
        free(value);
    }
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++) { json_set_member(&text, fixed[i].key, fixed[i].value); }
    if (json_find_member(text, "add_bos_token", &from, &to)) { json_set_member(&text, "add_bos_token", "true"); }
    return text;
}

/* Writes tokenizer.json and tokenizer_config.json to a folder, for this program and for `transformers`, where encoding then
 * puts BOS in front of a text. A tokenizer that came from a tokenizer.json is written as it was but for the post-processor.
 * `max_length`: tokens a model of this folder was trained on, for a new tokenizer_config.json; 0: not said. */
static inline bool tokenizer_save(const Tokenizer* t, const char* folder, int max_length, Error* e) {
    char path[PATH_CAP];
    if (!path_join(path, folder, "tokenizer.json", e)) { return false; }
    FILE* f = fopen(path, "wb");
    if (!f) { return fail(e, "%s: cannot write: %s", path, strerror(errno)); }
    if (!t->source) {
        write_tokenizer_json(f, t);
    } else if (t->bos_id < 0 || source_adds_bos(t)) {
        fputs(t->source, f);
    } else {
        char* value = NULL;
        size_t size = 0;
        FILE* memory = open_memstream(&value, &size);
        write_post_processor(memory, t);
        fclose(memory);
        char* text = json_with_member(t->source, "post_processor", value);
        fputs(text, f);
        free(text);
        free(value);
    }
    if (!close_output(f, path, e) || !path_join(path, folder, "tokenizer_config.json", e)) { return false; }
    f = fopen(path, "wb");
    if (!f) { return fail(e, "%s: cannot write: %s", path, strerror(errno)); }
    char* text = tokenizer_config_text(t, max_length);
    fputs(text, f);
    free(text);
    return close_output(f, path, e);
}

#undef LLAMA3_PATTERN
#endif
