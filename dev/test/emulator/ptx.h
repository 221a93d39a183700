/* ptx.h -- stands in for llmc/cuda/ptx.cuh on the emulated card: the same functions, in C++.
 *
 * A card's asynchronous work happens here as late as the program allows: the copies and products of a group run when the thread
 * waits for that group. So a missing wait shows. Two things happen at once: TMA loads, and a product reads its factors in
 * registers. A change of these registers that comes too early does not show. A cluster has one block. Sums go term by term in
 * fp32, and exp2_fast() is exact. An address in shared memory is its distance from the block's dynamic shared memory.
 */
#ifndef EMULATOR_PTX_H
#define EMULATOR_PTX_H

#include "llmc/cuda/cuda_common.cuh"

__device__ __forceinline__ uint32_t shared_address(const void* p) { return (uint32_t)((const char*)p - emulator_shared); }
inline char* emulated_shared(uint32_t address) { return emulator_shared + (int32_t)address; }

__device__ __forceinline__ float exp2_fast(float x) { return exp2f(x); }

/* Off by up to a unit in the last place, as on a card: every second result is rounded up instead of to nearest. */
__device__ __forceinline__ float reciprocal_fast(float x) {
    const float y = 1 / x;
    return fmaf(x, y, -1) * x < 0 ? nextafterf(y, INFINITY) : y;
}
__device__ __forceinline__ float inverse_root_fast(float x) { return (float)(1 / sqrt((double)x)); }

__device__ __forceinline__ void compute_here(uint32_t&) {}
__device__ __forceinline__ void compute_here(size_t&) {}

__device__ __forceinline__ void barrier_sync(int id, int threads) { emulator_barrier_of(id, threads); }

__device__ __forceinline__ uint64_t card_clock(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

// ---------------------------------------------------------------------------------------------------------------------
// asynchronous work of a thread, in the groups of device.h

inline EmulatedGroups emulated_products[1024], emulated_stores[1024];

template <int BYTES>
__device__ __forceinline__ void copy_async(uint32_t dst, const void* src, bool valid) {
    if (EMULATED_ARCH < 800) { __trap(); }
    if (dst % BYTES || (valid && (size_t)src % BYTES)) {
        emulator_die("copy_async<%d>: an address is no multiple of it", BYTES);
    }
    emulated_copy_async(emulated_shared(dst), src, BYTES, valid ? BYTES : 0);
}
__device__ __forceinline__ void copy_async_commit() { emulated_copies[emulator_thread].commit(); }
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
    emulated_copies[emulator_thread].wait(PENDING);
}

// ---------------------------------------------------------------------------------------------------------------------
// 16-bit tensor-core products

#ifndef PRECISION_FP32

__device__ __forceinline__ uint32_t pack2(float lo, float hi) {
    const floatX pair[2] = {from_float<floatX>(lo), from_float<floatX>(hi)};
    uint32_t bits;
    memcpy(&bits, pair, sizeof bits);
    return bits;
}
__device__ __forceinline__ float2 unpack2(uint32_t x) {
    floatX pair[2];
    memcpy(pair, &x, sizeof x);
    return make_float2(to_float(pair[0]), to_float(pair[1]));
}

/* Collects the addresses of the rows from the lanes, and calls part(matrix, rows) for the four matrices. */
template <typename Part>
inline void emulated_load_matrix(uint32_t r[4], uint32_t address, const Part& part) {
    if (address % 16) { emulator_die("load_matrix_x4: a row starts at %u, wanted a multiple of 16", address); }
    const EmulatorSlots* all = emulator_exchange(0xffffffffu, address);
    for (int i = 0; i < 4; i++) {
        const char* rows[8];
        for (int k = 0; k < 8; k++) { rows[k] = emulated_shared(all->at[8 * i + k].words[0]); }
        part(&r[i], rows);
    }
}
__device__ __forceinline__ void load_matrix_x4(uint32_t r[4], uint32_t address) {
    const unsigned g = emulator_lane() / 4, t = emulator_lane() % 4;
    emulated_load_matrix(r, address, [=](uint32_t* to, const char* const* rows) { memcpy(to, rows[g] + 4 * t, 4); });
}
__device__ __forceinline__ void load_matrix_x4_trans(uint32_t r[4], uint32_t address) {
    const unsigned g = emulator_lane() / 4, t = emulator_lane() % 4;
    emulated_load_matrix(r, address, [=](uint32_t* to, const char* const* rows) {
        memcpy(to, rows[2 * t] + 2 * g, 2);
        memcpy((char*)to + 2, rows[2 * t + 1] + 2 * g, 2);
    });
}

inline uint64_t two_words(uint32_t low, uint32_t high) { return (uint64_t)high << 32 | low; }

/* Puts rows g and g + 8 of a (16 x 16), which lies in the lanes' registers (first words of `all`), into rows. */
inline void emulated_left_rows(float (&rows)[2][16], const EmulatorSlot* all) {
    const unsigned g = emulator_lane() / 4;
    for (int k = 0; k < 16; k++) {
        const uint32_t* a = all[g * 4 + k % 8 / 2].words + k / 8 * 2;
        for (int r = 0; r < 2; r++) {
            const float2 pair = unpack2(a[r]);
            rows[r][k] = k % 2 ? pair.y : pair.x;
        }
    }
}

__device__ __forceinline__ void mma_16x8x16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
    const EmulatorSlot* all =
        emulator_exchange(0xffffffffu, two_words(a[0], a[1]), two_words(a[2], a[3]), two_words(b0, b1))->at;
    float rows[2][16];
    emulated_left_rows(rows, all);
    for (int e = 0; e < 2; e++) {
        const unsigned column = emulator_lane() % 4 * 2 + e;
        for (int k = 0; k < 16; k++) {
            const float2 pair = unpack2(all[column * 4 + k % 8 / 2].words[4 + k / 8]);
            const float b = k % 2 ? pair.y : pair.x;
            d[e] += rows[0][k] * b;
            d[2 + e] += rows[1][k] * b;
        }
    }
}

#endif  // PRECISION_FP32

// ---------------------------------------------------------------------------------------------------------------------
// sm_90a

#define PTX_HAS_SM90A (EMULATED_ARCH == 900)

/* The 8 bytes of a barrier. */
struct EmulatedBarrier {
    int32_t bytes;  // bytes announced and not yet written
    uint8_t arrivals, missing;
    uint16_t phase;
};
inline EmulatedBarrier* emulated_barrier(uint32_t barrier) {
    if (barrier % 8) { emulator_die("a barrier lies at %u, wanted a multiple of 8", barrier); }
    return (EmulatedBarrier*)emulated_shared(barrier);
}
UNSEEN inline void emulated_end_phase(EmulatedBarrier* b) {
    if (b->missing > 0 || b->bytes != 0) { return; }
    b->missing = b->arrivals;
    b->phase++;
}

UNSEEN __device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
    if (!PTX_HAS_SM90A) { __trap(); }
    shadow_access(emulated_barrier(barrier), 8, SHADOW_WRITE, SHADOW_HERE);
    *emulated_barrier(barrier) = {0, (uint8_t)arrivals, (uint8_t)arrivals, 0};
}
__device__ __forceinline__ void barrier_init_done() { shadow_proxy_fence(); }
UNSEEN __device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    EmulatedBarrier* b = emulated_barrier(barrier);
    shadow_access(b, 8, SHADOW_READ, SHADOW_HERE);
    shadow_release(b);
    if (b->missing == 0) { emulator_die("more threads arrive at a barrier than it was initialized for"); }
    b->bytes += (int32_t)bytes;
    b->missing--;
    emulated_end_phase(b);
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) { barrier_arrive_expect(barrier, 0); }
UNSEEN __device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    const EmulatedBarrier* b = emulated_barrier(barrier);
    const uint32_t* word = (const uint32_t*)&b->arrivals;  // with the phase; it changes when a thread arrives, too
    shadow_access(b, 8, SHADOW_READ, SHADOW_HERE);
    while (b->phase % 2 == parity) { emulator_wait(word, *word, SHADOW_HERE); }
    shadow_acquire(b);
}

/* "128B swizzle": moves the chunk of 16 bytes of an address by the number of its row. */
inline uint32_t emulated_swizzle(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

/* The emulated contents of a CUtensorMap: elements of 2 bytes, in boxes of rows of 128 bytes, swizzled. */
struct EmulatedMap {
    const char* base;
    uint64_t dims[4], strides[3];
    uint32_t box[4];
};

UNSEEN inline void emulated_written(uint32_t barrier, uint32_t bytes) {
    EmulatedBarrier* b = emulated_barrier(barrier);
    shadow_copier_reads(b, 8, SHADOW_HERE);
    shadow_release(b);
    b->bytes -= (int32_t)bytes;
    emulated_end_phase(b);
}

/* Calls visit(place in the tensor, or NULL outside of it, address in shared memory) for each element of a box. Returns the
 * box's bytes. */
template <typename Visit>
inline uint32_t emulated_box(const void* map, int c0, int c1, int c2, int c3, uint32_t address, const Visit& visit) {
    const EmulatedMap* m = (const EmulatedMap*)map;
    uint32_t at = address;
    if (address % 128) { emulator_die("a box lies at %u in shared memory, wanted a multiple of 128", address); }
    for (uint32_t i3 = 0; i3 < m->box[3]; i3++) {
        for (uint32_t i2 = 0; i2 < m->box[2]; i2++) {
            for (uint32_t i1 = 0; i1 < m->box[1]; i1++) {
                const uint64_t x1 = (uint64_t)c1 + i1, x2 = (uint64_t)c2 + i2, x3 = (uint64_t)c3 + i3;
                const bool inside = x1 < m->dims[1] && x2 < m->dims[2] && x3 < m->dims[3];
                char* row = (char*)m->base + x3 * m->strides[2] + x2 * m->strides[1] + x1 * m->strides[0];
                for (uint32_t i0 = 0; i0 < m->box[0]; i0++, at += 2) {
                    const uint64_t x0 = (uint64_t)c0 + i0;
                    visit(inside && x0 < m->dims[0] ? row + 2 * x0 : NULL, emulated_swizzle(at));
                }
            }
        }
    }
    return at - address;
}

__device__ __forceinline__ void copy_box_4d(uint32_t dst, const void* map, int c0, int c1, int c2, int c3, uint32_t barrier) {
    shadow_copier(true);
    const uint32_t bytes = emulated_box(map, c0, c1, c2, c3, dst, [](const char* element, uint32_t at) {
        const uint16_t zero = 0;
        memcpy(emulated_shared(at), element ? (const void*)element : &zero, 2);
    });
    shadow_copier(false);
    emulated_written(barrier, bytes);
}

__device__ __forceinline__ void store_box_4d(const void* map, uint32_t src, int c0, int c1, int c2, int c3) {
#ifdef EMULATED_SANITIZE
    emulated_box(map, c0, c1, c2, c3, src, [](char*, uint32_t at) {
        shadow_copier_reads(emulated_shared(at), 2, NULL);
        shadow_begins(emulated_shared(at), 2, SHADOW_READ, NULL);
    });
#endif
    emulated_stores[emulator_thread].add([=] {
        shadow_copier(true);
        emulated_box(map, c0, c1, c2, c3, src, [](char* element, uint32_t at) {
            shadow_ends(emulated_shared(at), 2);
            if (element) { memcpy(element, emulated_shared(at), 2); }
        });
        shadow_copier(false);
    });
}
__device__ __forceinline__ void store_commit() { emulated_stores[emulator_thread].commit(); }
template <int PENDING>
__device__ __forceinline__ void store_wait() {
    emulated_stores[emulator_thread].wait(PENDING);
}
__device__ __forceinline__ void fence_async_readers() { shadow_proxy_fence(); }

UNSEEN __device__ __forceinline__ void copy_bytes(uint32_t dst, const void* src, uint32_t bytes, uint32_t barrier) {
    if (dst % 16 || (size_t)src % 16 || bytes % 16) { emulator_die("copy_bytes: wanted multiples of 16"); }
    shadow_copier(true);
    shadow_access(src, bytes, SHADOW_READ, SHADOW_HERE);
    shadow_access(emulated_shared(dst), bytes, SHADOW_WRITE, SHADOW_HERE);
    shadow_copier(false);
    memcpy(emulated_shared(dst), src, bytes);
    emulated_written(barrier, bytes);
}

// a block is alone in its cluster
constexpr int CLUSTER_BLOCKS = 1;
__device__ __forceinline__ void barrier_arrive_in(uint32_t barrier, uint32_t) { barrier_arrive(barrier); }
__device__ __forceinline__ void copy_box_4d_to(uint32_t, uint32_t dst, const void* map, int c0, int c1, int c2, int c3,
                                               uint32_t barrier) {
    copy_box_4d(dst, map, c0, c1, c2, c3, barrier);
}
__device__ __forceinline__ void cluster_sync() { __syncthreads(); }

// blocks run one after the other, so a flag that is not set yet may belong to a block that has not begun
UNSEEN __device__ __forceinline__ void flag_wait(const uint32_t* flag, uint32_t n) {
    while (*flag < n) { emulator_wait(flag, *flag, SHADOW_HERE); }
    shadow_access(flag, sizeof *flag, SHADOW_ATOMIC, SHADOW_HERE);
    shadow_acquire(flag);
}
UNSEEN __device__ __forceinline__ void flag_set(uint32_t* flag, uint32_t n) {
    shadow_access(flag, sizeof *flag, SHADOW_ATOMIC, SHADOW_HERE);
    shadow_release(flag);
    *flag = n;
}
UNSEEN __device__ __forceinline__ void add_in_memory(float* to, float4 x) {
    shadow_access(to, sizeof x, SHADOW_ATOMIC, SHADOW_HERE);
    to[0] += x.x, to[1] += x.y, to[2] += x.z, to[3] += x.w;
}

template <int N>
__device__ __forceinline__ void registers_lower() {}
template <int N>
__device__ __forceinline__ void registers_raise() {}

#ifndef PRECISION_FP32

__device__ __forceinline__ void store_matrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    const unsigned g = emulator_lane() / 4, t = emulator_lane() % 4;
    const uint32_t r[4] = {r0, r1, r2, r3};
    if (address % 16) { emulator_die("store_matrix_x4: a row starts at %u, wanted a multiple of 16", address); }
    const EmulatorSlots* all = emulator_exchange(0xffffffffu, address);
    for (unsigned i = 0; i < 4; i++) { memcpy(emulated_shared(all->at[8 * i + g].words[0]) + 4 * t, &r[i], 4); }
}

__device__ __forceinline__ void store_matrix_x4_transposed(uint32_t address, const uint32_t (&r)[4]) {
    const unsigned g = emulator_lane() / 4, t = emulator_lane() % 4;
    if (address % 16) { emulator_die("store_matrix_x4_transposed: a row starts at %u, wanted a multiple of 16", address); }
    const EmulatorSlots* all = emulator_exchange(0xffffffffu, address);
    for (unsigned i = 0; i < 4; i++) {  // this lane has elements (g, 2 t) and (g, 2 t + 1) of each matrix
        memcpy(emulated_shared(all->at[8 * i + 2 * t].words[0]) + 2 * g, (const char*)&r[i], 2);
        memcpy(emulated_shared(all->at[8 * i + 2 * t + 1].words[0]) + 2 * g, (const char*)&r[i] + 2, 2);
    }
}

__device__ __forceinline__ uint32_t matrix_address(uint32_t address) { return address & 0x3ffff; }
__device__ __forceinline__ uint32_t matrix_rows(uint32_t address) { return address >> 4 | 1 << 16; }
__device__ __forceinline__ uint32_t matrix_columns(uint32_t address, uint32_t block_bytes) {
    return address >> 4 | block_bytes >> 4 << 16;
}
__device__ __forceinline__ void wgmma_fence() { shadow_product_fence(); }
__device__ __forceinline__ void wgmma_commit() { emulated_products[emulator_thread].commit(); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    emulated_products[emulator_thread].wait(PENDING);
}
template <int N>
__device__ __forceinline__ void wgmma_hold(float (&)[N]) {}

/* Returns an element of an operand in shared memory: `across` counts rows of a or columns of b, `k` counts terms of the sum. */
inline const floatX* emulated_element_at(uint32_t descriptor, bool columns, uint32_t across, uint32_t k) {
    const uint32_t start = (descriptor & 0x3fff) << 4, block_bytes = descriptor >> 16 << 4;
    const uint32_t at = columns ? start + k * 128 + across % 64 * 2 + across / 64 * block_bytes : start + across * 128 + k * 2;
    return (const floatX*)emulated_shared(emulated_swizzle(at));
}
inline float emulated_element(uint32_t descriptor, bool columns, uint32_t across, uint32_t k) {
    return to_float(*emulated_element_at(descriptor, columns, across, k));
}
/* Begins a product with these sums. One thread of a warpgroup asks whether b is fenced. */
template <int N>
inline void emulated_begin_product(const float* d, uint32_t b, bool columns) {
    shadow_product(d, N / 2 * sizeof *d);
#ifdef EMULATED_SANITIZE
    for (uint32_t i = 0; emulator_thread % 128 == 0 && i < N * 16; i++) {
        shadow_copier_reads(emulated_element_at(b, columns, i / 16, i % 16), 2, NULL);
    }
#endif
}

/* Computes this thread's part of d: two neighbouring columns of each eight, first of row g of a, then of row g + 8. */
template <int N>
inline void emulated_product(float* d, const float (&rows)[2][16], uint32_t b, bool columns, bool add, unsigned lane) {
    const float* const sums = d;
    shadow_multiply(sums, true);
    for (uint32_t first = lane % 4 * 2; first < N; first += 8, d += 4) {
        float d0 = add ? d[0] : 0, d1 = add ? d[1] : 0, d2 = add ? d[2] : 0, d3 = add ? d[3] : 0;  // in registers
        for (uint32_t k = 0; k < 16; k++) {
            const float left = emulated_element(b, columns, first, k), right = emulated_element(b, columns, first + 1, k);
            d0 += rows[0][k] * left, d1 += rows[0][k] * right;
            d2 += rows[1][k] * left, d3 += rows[1][k] * right;
        }
        d[0] = d0, d[1] = d1, d[2] = d2, d[3] = d3;
    }
    shadow_multiply(sums, false);
}

template <int N, int B_COLUMNS, int A_COLUMNS = 0>
__device__ __forceinline__ void wgmma_shared(float (&d)[N / 2], uint32_t a, uint32_t b, int add) {
    float* const out = d;
    const unsigned lane = emulator_lane(), row = emulator_thread / 32 % 4 * 16 + lane / 4;
    emulated_begin_product<N>(out, b, B_COLUMNS);
#ifdef EMULATED_SANITIZE
    for (unsigned i = 0; i < 32; i++) {
        shadow_copier_reads(emulated_element_at(a, A_COLUMNS, row + i / 16 * 8, i % 16), 2, NULL);
    }
#endif
    emulated_products[emulator_thread].add([=] {
        float rows[2][16];
        for (unsigned i = 0; i < 32; i++) { rows[i / 16][i % 16] = emulated_element(a, A_COLUMNS, row + i / 16 * 8, i % 16); }
        emulated_product<N>(out, rows, b, B_COLUMNS, add, lane);
    });
}

template <int N, int B_COLUMNS>
__device__ __forceinline__ void wgmma_registers(float (&d)[N / 2], const uint32_t (&a)[4], uint32_t b, int add) {
    struct Rows {
        float at[2][16];
    } rows;
    float* const out = d;
    const unsigned lane = emulator_lane();
    emulated_left_rows(rows.at, emulator_exchange(0xffffffffu, two_words(a[0], a[1]), two_words(a[2], a[3]))->at);
    emulated_begin_product<N>(out, b, B_COLUMNS);
    emulated_products[emulator_thread].add([=] { emulated_product<N>(out, rows.at, b, B_COLUMNS, add, lane); });
}

#endif  // PRECISION_FP32
#endif
