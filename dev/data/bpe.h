/* bpe.h -- learns a vocabulary of byte-level BPE (Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword
 * Units"), with the ids that `tokenizers` gives. The rules:
 *   pieces   Llama 3's pattern splits each document as a whole (pieces.h). A pair of neighbours never spans two pieces.
 *   counts   A pair counts once for each position where it begins, overlapping ones included: aaa has two. Counts have 64 bits.
 *   merges   The pair with the highest count merges first; of equal counts the lower left id, then the lower right id. It
 *            merges at all its positions, from left to right. Learning stops if no pair is left.
 *   ids      The 256 bytes in the order of GPT-2's stand-ins, the merged tokens as learnt, the special tokens.
 *
 * No merge spells an existing token t. Merges inside a stretch between two borders depend on its bytes alone, because no merge
 * crosses a border that exists later. A pair that spells t is such a stretch, and so was the first t. Both became t in the same
 * step, so the pair does not exist.
 *
 * Bpe lays the distinct pieces (PieceCounts) out as nodes, a node a byte, between separators. The token of n bytes at node i
 * has its id in nodes i and i + n - 1, so both of its neighbours are found without links. Invariants:
 *   1. A pair gets its list of places once: in the merge that makes its newer token. After that its count only falls.
 *   2. A place in a list is stale unless both tokens of the pair still begin where they began. So lists need no removal.
 *   3. An entry of the heap has at least its pair's count. The top entry is exact, or it sinks to the place of its count.
 *   4. Each pair whose count is `floor` or more has a slot in the table and an entry. If they become too many, the floor rises;
 *      if none is left above the floor, a new pass over the nodes finds the others.
 * So a merge costs the places of its pair and the pairs that it changes, in short pieces and in long ones.
 * Elsewhere: the files of a tokenizer (tokenizer_write.h), the inputs and the command line (dev/data/tokenize.c).
 */
#ifndef DATA_BPE_H
#define DATA_BPE_H

#include "llmc/base/hash.h"            // defines: HashSeed, hash_key_within, hash_place, hash_mix
#include "llmc/base/utils.h"           // defines: die, xmalloc, xcalloc, xrealloc, xreserve, size_min, size_max
#include "llmc/text/pieces.h"          // defines: scan_class, scan_llama3, scan_run
#include "llmc/text/tokenizer.h"       // defines: Tokenizer, tokenizer_allocate, token_table_add, tokenizer_index
#include "llmc/text/tokenizer_read.h"  // defines: byte_stand_ins

// ---------------------------------------------------------------------------------------------------------------------
// where a text may be cut, so that its pieces by Llama 3's pattern stay the same

/* Returns the class of the last character of s[0 .. n), n >= 1. */
static inline int piece_last_class(const uint8_t* s, size_t n) {
    size_t start = n - 1, len;
    while (start > 0 && n - start < 4 && (s[start] & 0xC0) == 0x80) { start--; }
    const int cls = scan_class(s + start, s + n, &len);
    return start + len == n ? cls : UNICODE_OTHER;  // its last byte is no part of a character
}

/* Returns whether a text may be cut in front of s[i], 0 < i: both parts then have the pieces of the whole, whatever is in front
 * and behind. True between a letter or a number and another class, where every piece ends, but not in the last 3 bytes of
 * s[0 .. n). */
static inline bool piece_border(const char* s, size_t i, size_t n) {
    const uint8_t* u = (const uint8_t*)s;
    size_t len;
    if (i + 4 > n || (u[i] & 0xC0) == 0x80) { return false; }
    const int cls = piece_last_class(u, i);
    return (cls == UNICODE_LETTER || cls == UNICODE_NUMBER) && scan_class(u + i, u + n, &len) != cls;
}

/* Returns the last place where the text s[0 .. n), with more to come, may be cut; 0: none is known. A piece begins at s. */
static inline size_t piece_last_border(const char* s, size_t n) {
    for (size_t i = n; i > 0 && n - i < 1 << 16; i--) {  // a scan from the start is faster than more steps back
        if (piece_border(s, i, n)) { return i; }
    }
    const uint8_t *start = (const uint8_t*)s, *end = start + n, *p = start, *last = start;
    while (p < end) {
        p = scan_llama3(p, end, 3);
        if (scan_run(p, end, UNICODE_SPACE) + 4 > end) { break; }  // what is to come could change where the piece ends
        // white space at the end of a text is one piece, but the last space before a word belongs to the word
        const bool newline = p[-1] == '\n' || p[-1] == '\r';
        if (newline || piece_last_class(start, (size_t)(p - start)) != UNICODE_SPACE) { last = p; }
    }
    return (size_t)(last - start);
}

// ---------------------------------------------------------------------------------------------------------------------
// the distinct pieces of a text and how often each occurs, which is all that learning needs of it. The text is read as a
// stream, document by document: memory grows with the distinct pieces alone. Each thread counts into a small table of its own,
// and folds it into the table of all pieces. The order of the pieces in a table depends on its secret seed (hash.h); nothing
// may depend on that order.

typedef struct {
    uint64_t key;    // hash_key() of the bytes
    uint64_t count;  // 0: the slot is empty
    size_t at;       // of the piece in `bytes`
    size_t len;
} PieceSlot;

typedef struct {
    HashSeed seed;
    PieceSlot* slots;
    size_t mask, used;  // number of slots - 1; slots with a piece
    char* bytes;        // of all pieces, concatenated
    size_t num_bytes, cap_bytes;
} PieceCounts;

/* Makes an empty table. Tables that are folded together have one seed. */
static inline void piece_counts_init(PieceCounts* c, HashSeed seed) {
    memset(c, 0, sizeof *c);
    c->seed = seed;
    c->mask = 1023;
    c->slots = (PieceSlot*)xcalloc(c->mask + 1, sizeof(PieceSlot));
}

static inline void piece_counts_free(PieceCounts* c) {
    free(c->slots);
    free(c->bytes);
    memset(c, 0, sizeof *c);
}

static inline void piece_counts_grow(PieceCounts* c) {
    PieceSlot* old = c->slots;
    const size_t slots = c->mask + 1;
    c->mask = 2 * slots - 1;
    c->slots = (PieceSlot*)xcalloc(2 * slots, sizeof(PieceSlot));
    for (size_t k = 0; k < slots; k++) {
        if (!old[k].count) { continue; }
        size_t i = hash_place(c->seed, old[k].key, old[k].len) & c->mask;
        while (c->slots[i].count) { i = (i + 1) & c->mask; }
        c->slots[i] = old[k];
    }
    free(old);
}

/* Counts the piece s[0 .. n), n >= 1, whose hash_key() is `key`, `times` > 0 times. */
static inline void piece_counts_add(PieceCounts* c, uint64_t key, const char* s, size_t n, uint64_t times) {
    size_t i = hash_place(c->seed, key, n) & c->mask;
    for (; c->slots[i].count; i = (i + 1) & c->mask) {
        PieceSlot* slot = &c->slots[i];
        if (slot->key == key && slot->len == n && (n <= 8 || memcmp(c->bytes + slot->at, s, n) == 0)) {
            slot->count += times;
            return;
        }
    }
    c->bytes = (char*)xreserve(c->bytes, c->num_bytes, n, &c->cap_bytes, 1);
    const PieceSlot slot = {key, times, c->num_bytes, n};
    memcpy(c->bytes + c->num_bytes, s, n);
    c->num_bytes += n;
    c->slots[i] = slot;
    if (++c->used * 4 > c->mask * 3) { piece_counts_grow(c); }
}

/* Counts the pieces of a text: a document, or a part of one that begins and ends at a piece_border(). */
static inline void piece_counts_text(PieceCounts* c, const char* text, size_t len) {
    for (const char *s = text, *end = s + len, *p; s < end; s = p) {
        p = (const char*)scan_llama3((const uint8_t*)s, (const uint8_t*)end, 3);
        const size_t n = (size_t)(p - s);
        piece_counts_add(c, hash_key_within(c->seed, s, n, end), s, n, 1);
    }
}

/* Adds the counts of one table to another, and empties it. */
static inline void piece_counts_fold(PieceCounts* into, PieceCounts* from) {
    for (size_t i = 0; i <= from->mask; i++) {
        const PieceSlot* slot = &from->slots[i];
        if (slot->count) { piece_counts_add(into, slot->key, from->bytes + slot->at, slot->len, slot->count); }
    }
    memset(from->slots, 0, (from->mask + 1) * sizeof(PieceSlot));
    from->used = from->num_bytes = 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// learning

#define BPE_SEPARATOR UINT32_MAX
#define BPE_DEAD (UINT32_MAX - 1)  // the id of a node where a token began that is now the end of another

typedef struct {
    uint32_t id;     // of the token that begins or ends here, BPE_SEPARATOR or BPE_DEAD; other nodes are not read
    uint32_t piece;  // its index in `weights`
} BpeNode;

typedef struct {
    uint64_t pair;   // left id << 32 | right id
    uint64_t count;  // now; 0: merged, or no place is left
    size_t at;       // of its list in `places`
    uint32_t n;      // places in the list; 0: the slot is empty
} BpePair;

typedef unsigned __int128 BpeEntry;  // of the heap: count << 64 | ~pair; the highest comes first

/* A token beside the places of a merge. */
typedef struct {
    uint64_t weight;  // of the places beside it
    size_t at;        // next free place in the list of the pair with it; SIZE_MAX: the pair is below the floor
    uint32_t n;       // places; 0: not met
} BpeMet;

typedef struct {
    HashSeed seed;
    BpeNode* nodes;
    size_t num_nodes;
    uint64_t* weights;  // count of each piece

    BpePair* pairs;                 // an open-addressed table
    size_t mask, used, most_pairs;  // number of slots - 1; slots with a pair; more pairs raise the floor
    uint64_t floor;
    BpeEntry* heap;
    size_t heap_count;
    uint32_t* places;  // the lists of all pairs, each ascending
    size_t num_places, cap_places;

    size_t num_tokens, most;  // tokens so far; at most
    uint32_t* len;            // (most) bytes of each token
    uint64_t* merges;         // (most) of a byte: its value; of a merged token: left id << 32 | right id
    BpeMet* of[2];            // (most) by id: the tokens left and right of the places of a merge
    uint32_t* met[2];         // (num_met) ids of those that were met
    size_t num_met[2];
    uint32_t (*beside)[2];  // (cap_beside) ids left and right of each place; BPE_SEPARATOR: none, or the next place has it
    size_t cap_beside;
} Bpe;

static inline BpeEntry bpe_entry(const BpePair* p) { return (BpeEntry)p->count << 64 | ~p->pair; }

/* Lets entry i of the heap sink to its place. */
static inline void bpe_sink(Bpe* b, size_t i) {
    const BpeEntry x = b->heap[i];
    for (size_t child; (child = 2 * i + 1) < b->heap_count; i = child) {
        child += child + 1 < b->heap_count && b->heap[child + 1] > b->heap[child];
        if (b->heap[child] <= x) { break; }
        b->heap[i] = b->heap[child];
    }
    b->heap[i] = x;
}

/* Returns the slot of a pair, or the empty one where it belongs. */
static inline BpePair* bpe_find(const Bpe* b, uint64_t pair) {
    size_t i = hash_mix(b->seed, pair) & b->mask;
    while (b->pairs[i].n && b->pairs[i].pair != pair) { i = (i + 1) & b->mask; }
    return &b->pairs[i];
}

/* Makes the table and the heap anew, from the pairs that are not below the floor. Raises it if they are too many, but not above
 * the highest count. */
static inline void bpe_rebuild(Bpe* b) {
    BpePair* old = b->pairs;
    const size_t old_slots = b->mask + 1;
    uint64_t live = 0, slots = 1 << 10, top = 0;
    for (size_t i = 0; i < old_slots; i++) { top = old[i].count > top ? old[i].count : top; }
    for (;; b->floor *= 2) {
        live = 0;
        for (size_t i = 0; i < old_slots; i++) { live += old[i].count >= b->floor; }
        if (live <= b->most_pairs || b->floor > top / 2) { break; }
    }
    while (slots < 3 * live) { slots *= 2; }
    b->pairs = (BpePair*)xcalloc(slots, sizeof(BpePair));
    b->heap = (BpeEntry*)xrealloc(b->heap, slots * sizeof(BpeEntry));
    b->mask = slots - 1;
    b->used = b->heap_count = 0;
    for (size_t i = 0; i < old_slots; i++) {
        if (old[i].count < b->floor) { continue; }
        *bpe_find(b, old[i].pair) = old[i];
        b->heap[b->used++] = bpe_entry(&old[i]);
    }
    free(old);
    b->heap_count = b->used;
    for (size_t i = live / 2; i > 0; i--) { bpe_sink(b, i - 1); }
}

/* Puts a pair into its empty slot and on the heap. All slots may move. */
static inline void bpe_add(Bpe* b, BpePair* slot, BpePair pair) {
    const BpeEntry x = bpe_entry(&pair);
    size_t i = b->heap_count++;
    for (; i > 0 && b->heap[(i - 1) / 2] < x; i = (i - 1) / 2) { b->heap[i] = b->heap[(i - 1) / 2]; }
    b->heap[i] = x;
    *slot = pair;
    if (++b->used * 4 > b->mask * 3) { bpe_rebuild(b); }
}

/* Makes room for n more places and returns where they begin. */
static inline size_t bpe_places(Bpe* b, size_t n) {
    const size_t at = b->num_places;
    b->places = (uint32_t*)xreserve(b->places, at, n, &b->cap_places, sizeof(uint32_t));
    b->num_places += n;
    return at;
}

/* Returns the pair that begins at node i, or UINT64_MAX. *next is the node behind its left token. */
static inline uint64_t bpe_pair_at(const Bpe* b, size_t i, size_t* next) {
    const uint32_t id = b->nodes[i].id;
    *next = i + (id == BPE_SEPARATOR ? 1 : b->len[id]);
    return id == BPE_SEPARATOR || b->nodes[*next].id == BPE_SEPARATOR ? UINT64_MAX : (uint64_t)id << 32 | b->nodes[*next].id;
}

/* Finds all pairs anew, with the lowest floor that most_pairs allows. */
static inline void bpe_collect(Bpe* b) {
    const size_t most_pairs = b->most_pairs;
    memset(b->pairs, 0, (b->mask + 1) * sizeof(BpePair));
    b->floor = 1;
    b->most_pairs = SIZE_MAX;  // no count is final yet
    b->used = b->heap_count = b->num_places = 0;
    for (size_t i = 0, next; i < b->num_nodes; i = next) {
        const BpePair one = {bpe_pair_at(b, i, &next), b->weights[b->nodes[i].piece], 0, 1};
        if (one.pair == UINT64_MAX) { continue; }
        BpePair* p = bpe_find(b, one.pair);
        p->count += p->n ? one.count : 0;
        if (p->n++ == 0) { bpe_add(b, p, one); }
    }
    b->most_pairs = most_pairs;
    bpe_rebuild(b);
    for (size_t i = 0; i <= b->mask; i++) { b->pairs[i].at = bpe_places(b, b->pairs[i].n); }
    for (size_t i = 0, next; i < b->num_nodes; i = next) {
        const uint64_t pair = bpe_pair_at(b, i, &next);
        BpePair* p = bpe_find(b, pair);  // of UINT64_MAX: an empty slot
        if (p->n) { b->places[p->at++] = (uint32_t)i; }
    }
    for (size_t i = 0; i <= b->mask; i++) { b->pairs[i].at -= b->pairs[i].n; }
}

/* Begins to learn `most` tokens at most, 256 or more, from the pieces of a table, which it frees. */
static inline void bpe_begin(Bpe* b, PieceCounts* c, size_t most) {
    const BpeNode separator = {BPE_SEPARATOR, 0};
    uint16_t code[256];
    int16_t byte_of[512];
    uint32_t id_of[256], pieces = 0;
    memset(b, 0, sizeof *b);
    if (c->num_bytes + c->used >= BPE_DEAD) { die("the text's distinct pieces have more than 4 GiB: too much to learn from"); }
    b->seed = c->seed;
    b->most = size_min(most, 256 + c->num_bytes);  // each merge takes a token from some piece
    b->most_pairs = size_max(1 << 16, (c->num_bytes + c->used) / 32);
    b->len = (uint32_t*)xcalloc(b->most, sizeof(uint32_t));
    b->merges = (uint64_t*)xcalloc(b->most, sizeof(uint64_t));
    b->mask = 1023;
    b->pairs = (BpePair*)xcalloc(1024, sizeof(BpePair));
    b->heap = (BpeEntry*)xmalloc(1024 * sizeof(BpeEntry));
    b->weights = (uint64_t*)xcalloc(c->used + 1, sizeof(uint64_t));
    b->nodes = (BpeNode*)xmalloc((c->num_bytes + c->used + 1) * sizeof(BpeNode));
    byte_stand_ins(code, byte_of);
    for (int i = 0; i < 512; i++) {
        if (byte_of[i] < 0) { continue; }
        id_of[byte_of[i]] = (uint32_t)b->num_tokens;
        b->len[b->num_tokens] = 1;
        b->merges[b->num_tokens++] = (uint64_t)byte_of[i];
    }
    b->nodes[b->num_nodes++] = separator;
    for (const PieceSlot* slot = c->slots; slot <= c->slots + c->mask; slot++) {
        if (!slot->count) { continue; }
        for (size_t k = 0; k < slot->len; k++) {
            const BpeNode node = {id_of[(uint8_t)c->bytes[slot->at + k]], pieces};
            b->nodes[b->num_nodes++] = node;
        }
        b->nodes[b->num_nodes++] = separator;
        b->weights[pieces++] = slot->count;
    }
    piece_counts_free(c);
    for (int k = 0; k < 2; k++) {
        b->of[k] = (BpeMet*)xcalloc(b->most, sizeof(BpeMet));
        b->met[k] = (uint32_t*)xmalloc(b->most * sizeof(uint32_t));
    }
    bpe_collect(b);
}

static inline void bpe_free(Bpe* b) {
    void* const all[] = {b->nodes,  b->weights, b->pairs, b->heap,  b->places, b->len,
                         b->merges, b->beside,  b->of[0], b->of[1], b->met[0], b->met[1]};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) { free(all[i]); }
    memset(b, 0, sizeof *b);
}

/* Adds a place beside a token. */
static inline void bpe_meet(Bpe* b, int side, uint32_t id, uint64_t weight) {
    if (id == BPE_SEPARATOR) { return; }
    if (b->of[side][id].n++ == 0) { b->met[side][b->num_met[side]++] = id; }
    b->of[side][id].weight += weight;
}

/* Merges a pair at all its places, from left to right. Leaves the merged places in its list, of which it returns the number;
 * their neighbours are in b->beside, and summed up in b->of. Where two places touch, the right one has the pair of both. */
static inline size_t bpe_merge_places(Bpe* b, const BpePair* p, uint32_t merged) {
    const uint32_t left = (uint32_t)(p->pair >> 32), right = (uint32_t)p->pair;
    const uint32_t left_len = b->len[left], len = b->len[merged];
    uint32_t* list = b->places + p->at;
    uint64_t weight = 0, count = 0;
    for (uint32_t i = 0; i < p->n; i++) {
        BpeNode* node = &b->nodes[list[i]];
        if (i + 16 < p->n) { __builtin_prefetch(&b->nodes[list[i + 16]]); }
        if (node->id != left || node[left_len].id != right) { continue; }  // stale
        node[left_len].id = BPE_DEAD;
        node->id = node[len - 1].id = merged;
        if (count > 0 && node[-1].id == merged) { b->beside[count - 1][1] = BPE_SEPARATOR; }
        if (count > 0) { bpe_meet(b, 1, b->beside[count - 1][1], weight); }
        weight = b->weights[node->piece];
        bpe_meet(b, 0, node[-1].id, weight);
        b->beside[count][0] = node[-1].id;
        b->beside[count][1] = node[len].id;
        list[count++] = list[i];
    }
    if (count > 0) { bpe_meet(b, 1, b->beside[count - 1][1], weight); }
    return count;
}

/* Takes the places beside a token away from the old pair with it, and gives them to the new one. */
static inline void bpe_replace(Bpe* b, BpeMet* met, uint64_t old_pair, uint64_t new_pair) {
    BpePair* old = bpe_find(b, old_pair);
    assert(old->count == 0 || old->count >= met->weight);
    if (old->count) { old->count -= met->weight; }
    met->at = met->weight < b->floor ? SIZE_MAX : bpe_places(b, met->n);
    const BpePair pair = {new_pair, met->weight, met->at, met->n};
    if (met->at != SIZE_MAX) { bpe_add(b, bpe_find(b, new_pair), pair); }
}

/* Learns one token from the pair in a slot. */
static inline void bpe_merge(Bpe* b, BpePair* slot) {
    const BpePair p = *slot;
    const uint64_t left = p.pair >> 32, right = (uint32_t)p.pair, merged = b->num_tokens++;
    b->merges[merged] = p.pair;
    b->len[merged] = b->len[left] + b->len[right];
    slot->count = 0;
    b->beside = (uint32_t(*)[2])xreserve(b->beside, 0, p.n, &b->cap_beside, sizeof *b->beside);
    const size_t count = bpe_merge_places(b, &p, (uint32_t)merged);
    for (int side = 0; side < 2; side++) {
        BpeMet* of = b->of[side];
        for (size_t k = 0; k < b->num_met[side]; k++) {
            const uint64_t id = b->met[side][k], was = side == 0 && id == merged ? right : id;
            bpe_replace(b, &of[id], side ? right << 32 | was : was << 32 | left, side ? merged << 32 | id : id << 32 | merged);
        }
        for (size_t k = 0; k < count; k++) {
            const uint32_t id = b->beside[k][side];
            if (id == BPE_SEPARATOR || of[id].at == SIZE_MAX) { continue; }
            b->places[of[id].at++] = b->places[p.at + k] - (side ? 0 : b->len[id]);
        }
        while (b->num_met[side] > 0) { memset(&of[b->met[side][--b->num_met[side]]], 0, sizeof *of); }
    }
}

/* Learns the next token; false if there are `most` tokens, or no pair is left. */
static inline bool bpe_next(Bpe* b) {
    while (b->num_tokens < b->most && (b->heap_count > 0 || b->floor > 1)) {
        if (b->heap_count == 0) {
            bpe_collect(b);
            continue;
        }
        BpePair* p = bpe_find(b, ~(uint64_t)b->heap[0]);
        const bool exact = b->heap[0] >> 64 == p->count;
        b->heap[0] = exact || p->count < b->floor ? b->heap[--b->heap_count] : bpe_entry(p);
        bpe_sink(b, 0);
        if (!exact) { continue; }
        bpe_merge(b, p);
        return true;
    }
    return false;
}

/* Makes the Tokenizer of the tokens learnt and of the first `specials` names of Llama 3, for tokenizer_write.h. It has no table
 * of merges: load the file to encode. */
static inline void bpe_tokenizer(Tokenizer* t, const Bpe* b, size_t specials) {
    size_t bytes = 40 * specials;
    for (size_t i = 0; i < b->num_tokens; i++) { bytes += b->len[i]; }
    if (bytes > UINT32_MAX) { die("the tokens have 4 GiB or more in all: too much for a tokenizer"); }
    memset(t, 0, sizeof *t);
    t->seed = hash_seed();
    t->split = SPLIT_LLAMA3;
    t->max_digits = 3;
    tokenizer_allocate(t, (int)(b->num_tokens + specials), bytes);
    for (size_t id = 0, n; id < (size_t)t->vocab_size; id++) {
        char* out = t->bytes + t->at[id];
        if (id < b->num_tokens) {
            const uint64_t left = b->merges[id] >> 32, right = (uint32_t)b->merges[id];
            n = b->len[id];
            memcpy(out, n > 1 ? t->bytes + t->at[left] : (const char*)&b->merges[id], n > 1 ? b->len[left] : 1);
            if (n > 1) { memcpy(out + b->len[left], t->bytes + t->at[right], b->len[right]); }
            assert(token_table_find(&t->pieces, out, n) < 0);  // see the top of the file
            token_table_add(&t->pieces, (int32_t)id, n);
        } else {
            n = (size_t)snprintf(out, 40, "<|%s|>", llama3_named[id - b->num_tokens].name);
            t->flags[id] = TOKEN_ADDED | TOKEN_SPECIAL;
        }
        t->at[id + 1] = t->at[id] + (uint32_t)n;
    }
    tokenizer_index(t);
}

#endif
