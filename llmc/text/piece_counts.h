/* piece_counts.h -- the distinct pieces of a text and how often each occurs, which is all that bpe.h needs of it.
 *
 * The text is split by Llama 3's pattern (pieces.h), document by document, and read as a stream: memory grows with the distinct
 * pieces alone. Each thread counts into a small table of its own, and folds it into the table of all pieces. The order of the
 * pieces in a table depends on its secret seed (hash.h); nothing may depend on that order.
 */
#ifndef LLMC_PIECE_COUNTS_H
#define LLMC_PIECE_COUNTS_H

#include "llmc/base/hash.h"    // defines: HashSeed, hash_key, hash_place, load8
#include "llmc/base/utils.h"   // defines: xcalloc, xrealloc
#include "llmc/text/pieces.h"  // defines: scan_llama3, scan_class, scan_run

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
static inline void piece_counts_add_key(PieceCounts* c, uint64_t key, const char* s, size_t n, uint64_t times) {
    size_t i = hash_place(c->seed, key, n) & c->mask;
    for (; c->slots[i].count; i = (i + 1) & c->mask) {
        PieceSlot* slot = &c->slots[i];
        if (slot->key == key && slot->len == n && (n <= 8 || memcmp(c->bytes + slot->at, s, n) == 0)) {
            slot->count += times;
            return;
        }
    }
    if (n > c->cap_bytes - c->num_bytes) {
        c->cap_bytes = c->num_bytes + c->num_bytes / 2 + n + 4096;
        c->bytes = (char*)xrealloc(c->bytes, c->cap_bytes);
    }
    const PieceSlot slot = {key, times, c->num_bytes, n};
    memcpy(c->bytes + c->num_bytes, s, n);
    c->num_bytes += n;
    c->slots[i] = slot;
    if (++c->used * 4 > c->mask * 3) { piece_counts_grow(c); }
}

static inline void piece_counts_add(PieceCounts* c, const char* s, size_t n, uint64_t times) {
    piece_counts_add_key(c, hash_key(c->seed, s, n), s, n, times);
}

/* Counts the pieces of a text: a document, or a part of one that begins and ends at a piece_border(). */
static inline void piece_counts_text(PieceCounts* c, const char* text, size_t len) {
    const uint8_t *s = (const uint8_t*)text, *end = s + len, *p;
    for (; s < end; s = p) {
        p = scan_llama3(s, end, 3);
        const size_t n = (size_t)(p - s);
        const bool one_load = n <= 8 && end - s >= 8;
        const uint64_t key =
            one_load ? load8((const char*)s) & (UINT64_MAX >> (64 - 8 * n)) : hash_key(c->seed, (const char*)s, n);
        piece_counts_add_key(c, key, (const char*)s, n, 1);
    }
}

/* Adds the counts of one table to another, and empties it. */
static inline void piece_counts_fold(PieceCounts* into, PieceCounts* from) {
    for (size_t i = 0; i <= from->mask; i++) {
        const PieceSlot* slot = &from->slots[i];
        if (slot->count) { piece_counts_add_key(into, slot->key, from->bytes + slot->at, slot->len, slot->count); }
    }
    memset(from->slots, 0, (from->mask + 1) * sizeof(PieceSlot));
    from->used = from->num_bytes = 0;
}

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

#endif
