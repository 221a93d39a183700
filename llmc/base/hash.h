/* hash.h -- hashing with a secret seed, for tables whose keys come out of a file.
 *
 * Whoever writes a file knows this code, but not the seed of the process that reads it, so no file can make its keys collide
 * (Crosby and Wallach, "Denial of Service via Algorithmic Complexity Attacks", 2003). The result of a look-up does not depend
 * on the seed. One step multiplies 64 x 64 -> 128 bits and folds both halves together, as in wyhash. Unlike in a 64-bit
 * product, a flip of the top bit then changes bits that depend on the seed.
 */
#ifndef LLMC_HASH_H
#define LLMC_HASH_H

#include "llmc/base/utils.h"  // defines: now_seconds

#include <sys/random.h>

typedef struct {
    uint64_t add, times;
} HashSeed;

/* Draws a seed. Falls back on the clock where the system gives no random numbers: only speed depends on it. */
static inline HashSeed hash_seed(void) {
    HashSeed seed;
    if (getrandom(&seed, sizeof seed, GRND_NONBLOCK) != (ssize_t)sizeof seed) {
        const double now = now_seconds();
        memcpy(&seed.add, &now, sizeof now);
        seed.times = seed.add * 0xD6E8FEB86659FD93u;
    }
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

/* Returns the hash of n bytes with this key. */
static inline uint64_t hash_place(HashSeed seed, uint64_t key, size_t n) {
    return hash_mix(seed, key + n * 0xD6E8FEB86659FD93u);
}

#endif
