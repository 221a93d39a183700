/* hash.h -- hashing with a secret: with a seed, for tables whose keys come out of a file, and with a key, for proofs.
 *
 * Whoever writes a file knows this code, but not the seed of the process that reads it, so no file can make its keys collide
 * (Crosby and Wallach, "Denial of Service via Algorithmic Complexity Attacks", 2003). The result of a look-up does not depend
 * on the seed. One step multiplies 64 x 64 -> 128 bits and folds both halves together, as in wyhash. Unlike in a 64-bit
 * product, a flip of the top bit then changes bits that depend on the seed.
 */
#ifndef LLMC_HASH_H
#define LLMC_HASH_H

#include "llmc/base/os.h"  // defines: os_random

typedef struct {
    uint64_t add, times;
} HashSeed;

/* Draws a seed. */
static inline HashSeed hash_seed(void) {
    HashSeed seed;
    os_random(&seed, sizeof seed);
    seed.times |= 1;
    return seed;
}

static inline uint64_t hash_mix(HashSeed seed, uint64_t x) {
    const unsigned __int128 product = (unsigned __int128)(x ^ seed.add) * seed.times;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t load8(const char* s) {
    uint64_t x;
    memcpy(&x, s, 8);
    return x;
}

/* Returns bytes s[0 .. n) zero-padded, 1 <= n <= 8; reads no others. */
static inline uint64_t load_short(const char* s, size_t n) {
    if (n == 8) { return load8(s); }
    if (n >= 4) {
        uint32_t a, b;
        memcpy(&a, s, 4);
        memcpy(&b, s + n - 4, 4);
        return a | (uint64_t)b << (8 * (n - 4));
    }
    const unsigned char* u = (const unsigned char*)s;
    return u[0] | (uint64_t)u[n >> 1] << (8 * (n >> 1)) | (uint64_t)u[n - 1] << (8 * (n - 1));
}

/* Returns the key of n >= 1 bytes: up to 8 bytes are their own key, longer ones are hashed. For texts of equal length, keys
 * are equal only if the bytes are (up to 8 bytes), or hardly ever otherwise (longer texts). */
static inline uint64_t hash_key(HashSeed seed, const char* s, size_t n) {
    if (n <= 8) { return load_short(s, n); }
    uint64_t h = 0;
    for (size_t i = 0; i + 8 < n; i += 8) { h = hash_mix(seed, h ^ load8(s + i)); }
    return hash_mix(seed, h ^ load8(s + n - 8));
}

/* Does the same with one load for most texts, since the bytes up to `end` may be read. */
static inline uint64_t hash_key_within(HashSeed seed, const char* s, size_t n, const char* end) {
    return n <= 8 && end - s >= 8 ? load8(s) & (UINT64_MAX >> (64 - 8 * n)) : hash_key(seed, s, n);
}

/* Returns the hash of n bytes with this key. */
static inline uint64_t hash_place(HashSeed seed, uint64_t key, size_t n) {
    return hash_mix(seed, key + n * 0xD6E8FEB86659FD93u);
}

// ---------------------------------------------------------------------------------------------------------------------
// SipHash-2-4, a hash with a secret key (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012). Without the key
// nobody can compute the hash of a new text, however many hashes of other texts they have seen. So the hash of random bytes
// that the reader drew proves that the sender has the key (dist/team.h).

typedef struct {
    uint64_t low, high;  // bytes 0 to 7 and 8 to 15 of the key, little-endian
} SipKey;

static inline uint64_t sip_rotate(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

/* Mixes the state so many times (section 2, SipRound). */
static inline void sip_rounds(uint64_t v[4], int rounds) {
    for (int i = 0; i < rounds; i++) {
        v[0] += v[1];
        v[2] += v[3];
        v[1] = sip_rotate(v[1], 13) ^ v[0];
        v[3] = sip_rotate(v[3], 16) ^ v[2];
        v[0] = sip_rotate(v[0], 32);
        v[2] += v[1];
        v[0] += v[3];
        v[1] = sip_rotate(v[1], 17) ^ v[2];
        v[3] = sip_rotate(v[3], 21) ^ v[0];
        v[2] = sip_rotate(v[2], 32);
    }
}

/* Returns the hash of n bytes. */
static inline uint64_t siphash(SipKey key, const void* data, size_t n) {
    const unsigned char* bytes = (const unsigned char*)data;
    uint64_t v[4] = {key.low ^ 0x736F6D6570736575u, key.high ^ 0x646F72616E646F6Du, key.low ^ 0x6C7967656E657261u,
                     key.high ^ 0x7465646279746573u};  // "somepseudorandomlygeneratedbytes"
    for (size_t at = 0; at <= n; at += 8) {
        uint64_t word = n - at < 8 ? (uint64_t)n << 56 : 0;  // the last word has the length and the bytes that are left
        for (size_t i = 0; i < 8 && at + i < n; i++) { word |= (uint64_t)bytes[at + i] << (8 * i); }
        v[3] ^= word;
        sip_rounds(v, 2);
        v[0] ^= word;
    }
    v[2] ^= 0xFF;
    sip_rounds(v, 4);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

/* Makes a key of a text, such as a password. */
static inline SipKey sip_key(const char* text) {
    const SipKey one = {0, 0}, other = {1, 0};
    const SipKey key = {siphash(one, text, strlen(text)), siphash(other, text, strlen(text))};
    return key;
}

#endif
