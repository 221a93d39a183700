/* siphash.h -- SipHash-2-4, a hash with a secret key (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012).
 *
 * Without the key nobody can compute the hash of a new text, however many hashes of other texts they have seen. So the hash of
 * random bytes that the reader drew proves that the sender has the key (dist/team_hello.h).
 */
#ifndef LLMC_SIPHASH_H
#define LLMC_SIPHASH_H

#include "llmc/base/utils.h"  // first, since it asks for the functions beyond C11

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
