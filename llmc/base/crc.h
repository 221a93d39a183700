/* crc.h -- computes CRC-32C (Castagnoli, RFC 3720 section 12.1; polynomial 0x1EDC6F41, reflected), the checksum of our files.
 *
 * It finds every error burst of up to 32 bits and misses other damage with a probability of 2^-32. It guards against bad
 * disks and incomplete copies, not against an adversary. It uses the SSE4.2 instruction if the compiler targets it, otherwise
 * tables, eight bytes a step ("slicing by 8").
 */
#ifndef LLMC_CRC_H
#define LLMC_CRC_H

#include "llmc/base/utils.h"

#if defined(__SSE4_2__) && defined(__x86_64__) && !defined(__CUDACC__)
#include <nmmintrin.h>
#define LLMC_CRC_INSTRUCTION 1
#endif

#define CRC_POLYNOMIAL 0x82F63B78u  // reflected: the coefficient of x^0 is the highest bit, and x^32 is left out

typedef struct {
    uint32_t value;  // CRC of the bytes so far, complemented
#ifndef LLMC_CRC_INSTRUCTION
    uint32_t table[8][256];  // table[k][b]: the effect of byte b followed by k bytes
#endif
} Crc;

static inline void crc_begin(Crc* c) {
    c->value = 0xFFFFFFFFu;
#ifndef LLMC_CRC_INSTRUCTION
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t r = b;
        for (int bit = 0; bit < 8; bit++) { r = r >> 1 ^ (r & 1 ? CRC_POLYNOMIAL : 0); }
        c->table[0][b] = r;
    }
    for (uint32_t b = 0; b < 256; b++) {
        for (int k = 1; k < 8; k++) { c->table[k][b] = c->table[k - 1][b] >> 8 ^ c->table[0][c->table[k - 1][b] & 0xFF]; }
    }
#endif
}

static inline void crc_add(Crc* c, const void* data, size_t bytes) {
    const unsigned char* p = (const unsigned char*)data;
    uint32_t r = c->value;
    for (; bytes >= 8; bytes -= 8, p += 8) {
        uint64_t word;  // little-endian, like every format here
        memcpy(&word, p, 8);
#ifdef LLMC_CRC_INSTRUCTION
        r = (uint32_t)_mm_crc32_u64(r, word);
#else
        word ^= r;
        r = 0;
        for (int k = 0; k < 8; k++) { r ^= c->table[7 - k][word >> (8 * k) & 0xFF]; }
#endif
    }
    for (; bytes > 0; bytes--, p++) {
#ifdef LLMC_CRC_INSTRUCTION
        r = _mm_crc32_u8(r, *p);
#else
        r = r >> 8 ^ c->table[0][(r ^ *p) & 0xFF];
#endif
    }
    c->value = r;
}

static inline uint32_t crc_end(const Crc* c) { return ~c->value; }

static inline uint32_t crc_of(const void* data, size_t bytes) {
    Crc c;
    crc_begin(&c);
    crc_add(&c, data, bytes);
    return crc_end(&c);
}

// ---------------------------------------------------------------------------------------------------------------------
// combining the checksums of parts, in any order

/* Returns a * b modulo the polynomial. */
static inline uint32_t crc_multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (; a; a <<= 1) {  // bit by bit, from the coefficient of x^0 on
        if (a >> 31) { product ^= b; }
        b = b >> 1 ^ (b & 1 ? CRC_POLYNOMIAL : 0);  // b * x
    }
    return product;
}

/* Returns a part's share of the checksum of the whole: its own checksum times x^(8 * bytes_behind), where bytes_behind
 * counts the bytes after it. The XOR of the shares of all parts, in any order, is the checksum of the whole. */
static inline uint32_t crc_shift(uint32_t crc, uint64_t bytes_behind) {
    uint32_t power = 1u << 23;  // x^8, then its squares
    for (; bytes_behind; bytes_behind >>= 1) {
        if (bytes_behind & 1) { crc = crc_multiply(crc, power); }
        power = crc_multiply(power, power);
    }
    return crc;
}

#endif
