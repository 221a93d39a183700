/* matmul_amx.h -- the products of matmul.h on the matrix unit (AMX) of Xeons since Sapphire Rapids: fp32 in, fp32 out, as
 * accurate as fp32, and up to 2.7 times as fast as the vector units.
 *
 * The unit has no fp32 factors. TDPBF16PS multiplies a tile of 16 x 32 bf16 by one of 32 x 16 and adds the products in fp32
 * to a tile of 16 x 16: 16 times what the vector units multiply in that time. So each factor is split into three bf16 parts of
 * 8 significant bits, which together hold all 24 of its bits: a = a1 + a2 + a3 exactly, |a2| <= 2^-8 |a|, |a3| <= 2^-17 |a|.
 * A product of two parts has 16 bits and is exact in fp32. Six of the nine products are summed:
 *
 *   a b  ~  a1 b1 + a1 b2 + a2 b1 + a1 b3 + a2 b2 + a3 b1
 *
 * The rest, a2 b3 + a3 b2 + a3 b3, is at most about 2^-24 |a b|, as much as fp32 may round off the product (Henry, Tang,
 * Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations", 2019). The sums are
 * as accurate as the vector path's: a tile sums 32 products before it adds them to C.
 *
 * Differences from fp32: the unit reads and writes denormals as 0, so a factor may lose up to 2^-125 and a product 2^-123.
 * A sum within 1 % of the largest float may become infinite. Infinity times anything is NaN, because infinity has no second
 * part; an infinite factor never gives a finite number. Every finite factor down to the denormals, the largest too, is split
 * exactly.
 *
 * Memory: A and B are packed into panels of 32 rows or columns, 6 bytes a number, as tiles in the order in which amx_panel()
 * reads them. On Linux a process must ask before it uses the tiles. The answer decides at run time; -DLLMC_NO_AMX decides at
 * compile time. The order in which an element of C is summed depends on the shape alone, so the result is bitwise the same for
 * any number of threads.
 */
#ifndef LLMC_MATMUL_AMX_H
#define LLMC_MATMUL_AMX_H

#include "llmc/base/matrix.h"
#include "llmc/base/os.h"  // defines: os_allow_amx
#include "llmc/base/simd.h"
#include "llmc/base/threads.h"

#if !defined(LLMC_NO_AMX) && !defined(__CUDACC__) && defined(__AVX512DQ__) && \
    (defined(__AMX_BF16__) || defined(__AMXBF16__))  // the latter: Clang before 16
#define LLMC_AMX

#include <immintrin.h>

enum {
    AMX_EDGE = 16,                        // rows of every tile, columns of a tile of C
    AMX_DEPTH = 32,                       // numbers along k in a tile of A or B
    AMX_TILE = AMX_EDGE * AMX_DEPTH / 2,  // words of 32 bits in a tile: two bf16 of a factor, or one number of C
    AMX_ROW = 64,                         // bytes of a row of a tile
    AMX_PANEL = 2 * AMX_EDGE,             // rows of A or columns of B multiplied at once: 2 x 2 tiles of C
    AMX_STEP = 3 * 2 * AMX_TILE,          // words of a panel for AMX_DEPTH along k: three parts of two tiles
    AMX_BLOCK = 4 * AMX_PANEL,            // rows of A packed at once if A is transposed
    AMX_KC = 512,                         // longest run over k
    AMX_PACKED_A = AMX_BLOCK / AMX_PANEL * AMX_KC / AMX_DEPTH * AMX_STEP,  // words, 384 KiB: one for each thread
    AMX_PACKED_B = 12 * AMX_KC / AMX_DEPTH * AMX_STEP  // words, 1.1 MiB: one for all threads; half of a core's L2 cache
};

/* Returns whether the kernel lets this process use the tiles. Asks once; threads that ask together get the same answer. */
static inline bool amx_available(void) {
    enum { UNKNOWN, YES, NO };
    static int known = UNKNOWN;
    int state = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (state == UNKNOWN) {
        state = os_allow_amx() ? YES : NO;
        __atomic_store_n(&known, state, __ATOMIC_RELAXED);
    }
    return state == YES;
}

/* Sets up eight tiles of 16 rows of 64 bytes for the calling thread. */
static inline void amx_configure(void) {
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&config);
}

/* Stores the three parts of x and y in dst, 2 * AMX_TILE words apart; x takes the lower half of each word. Integer arithmetic
 * rounds a part to nearest (ties away from 0). That would round the largest floats to infinity, so the first part is made from
 * the number clamped to 0x1.fep127. A NaN may lose its mark in the first two parts, but not in the last, which is truncated. */
LLMC_INLINE void amx_split(uint32_t* dst, vf x, vf y) {
    const vf largest = vf_set(0x1.fep127f);
    const vu half = (vu)(vi){0} + 0x8000u, upper = (vu)(vi){0} + 0xffff0000u;
    enum { SMALLER_MAGNITUDE = 2 };  // the smaller magnitude, with the first operand's sign
    const vf low_x = (vf)_mm512_range_ps((__m512)x, (__m512)largest, SMALLER_MAGNITUDE);
    const vf low_y = (vf)_mm512_range_ps((__m512)y, (__m512)largest, SMALLER_MAGNITUDE);
    const vu x1 = ((vu)low_x + half) & upper, y1 = ((vu)low_y + half) & upper;
    const vf rest_x = x - (vf)x1, rest_y = y - (vf)y1;
    const vu x2 = ((vu)rest_x + half) & upper, y2 = ((vu)rest_y + half) & upper;
    const vu x3 = (vu)(rest_x - (vf)x2), y3 = (vu)(rest_y - (vf)y2);
    vf_store((float*)dst, (vf)(x1 >> 16 | y1));
    vf_store((float*)(dst + 2 * AMX_TILE), (vf)(x2 >> 16 | y2));
    vf_store((float*)(dst + 4 * AMX_TILE), (vf)(x3 >> 16 | (y3 & upper)));
}

/* Writes dst (16, 16) = the transpose of src, whose rows are `row` floats apart. Each of four rounds interleaves the vectors of
 * the upper half with the vectors of the lower half, which moves one bit of the row number into the column number. */
LLMC_INLINE void amx_transpose(float* dst, const float* src, size_t row) {
    const vi first = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}, second = first + 8;
    vf x[AMX_EDGE], y[AMX_EDGE];
    LLMC_UNROLL
    for (size_t i = 0; i < AMX_EDGE; i++) { x[i] = vf_load(src + i * row); }
    LLMC_UNROLL
    for (int round = 0; round < 4; round++) {
        LLMC_UNROLL
        for (int i = 0; i < AMX_EDGE / 2; i++) {
            y[2 * i] = (vf)_mm512_permutex2var_ps((__m512)x[i], (__m512i)first, (__m512)x[i + AMX_EDGE / 2]);
            y[2 * i + 1] = (vf)_mm512_permutex2var_ps((__m512)x[i], (__m512i)second, (__m512)x[i + AMX_EDGE / 2]);
        }
        LLMC_UNROLL
        for (int i = 0; i < AMX_EDGE; i++) { x[i] = y[i]; }
    }
    LLMC_UNROLL
    for (size_t i = 0; i < AMX_EDGE; i++) { vf_store(dst + i * AMX_EDGE, x[i]); }
}

/* Packs one tile of each part: the first n rows and `depth` columns of `from`; the rest of the tile becomes 0. Rows of `from`
 * are 16 rows of A or (is_b) 16 columns of B; its 32 columns go along k. TDPBF16PS wants two numbers along k in each word,
 * with the words of A as (i, k) and the words of B as (k, i). Any pairing works if A and B share it: k and k + 16 need no
 * shuffle. A source in the other orientation is transposed first. */
static inline void amx_pack_tile(uint32_t* dst, MatrixView from, size_t n, size_t depth, bool is_b) {
    float block[2][AMX_EDGE * AMX_EDGE] __attribute__((aligned(64)));
    const float* half[2] = {from.data, from.data + AMX_EDGE * from.col};
    const size_t lane = is_b ? from.row : from.col;
    size_t row = is_b ? from.col : from.row;
    if (n < AMX_EDGE || depth < AMX_DEPTH) {
        memset(block, 0, sizeof block);
        for (size_t i = 0; i < n; i++) {
            for (size_t k = 0; k < depth; k++) {
                const size_t q = k % AMX_EDGE;
                block[k / AMX_EDGE][is_b ? q * AMX_EDGE + i : i * AMX_EDGE + q] = from.data[i * from.row + k * from.col];
            }
        }
        half[0] = block[0], half[1] = block[1], row = AMX_EDGE;
    } else if (lane != 1) {
        for (int h = 0; h < 2; h++) {
            amx_transpose(block[h], half[h], lane);
            half[h] = block[h];
        }
        row = AMX_EDGE;
    }
    for (size_t r = 0; r < AMX_EDGE; r++) {
        amx_split(dst + r * AMX_EDGE, vf_load(half[0] + r * row), vf_load(half[1] + r * row));
    }
}

/* Packs the first n rows of `from` (rows of A or columns of B), `depth` along k, into consecutive panels; n and depth are
 * rounded up. All panels advance along k together, so that neighbors in memory are read together. */
static inline void amx_pack(uint32_t* dst, MatrixView from, size_t n, size_t depth, bool is_b) {
    const size_t panel = ceil_div(depth, AMX_DEPTH) * AMX_STEP;
    for (size_t k = 0; k < depth; k += AMX_DEPTH, dst += AMX_STEP) {
        for (size_t i = 0; i < round_up(n, AMX_PANEL); i += AMX_EDGE) {
            amx_pack_tile(dst + i / AMX_PANEL * panel + i % AMX_PANEL / AMX_EDGE * AMX_TILE, view_from(from, i, k),
                          i < n ? size_min(n - i, AMX_EDGE) : 0, size_min(depth - k, AMX_DEPTH), is_b);
        }
    }
}

/* Computes c (rows, cols) = a b + add; NULL for `add` adds nothing. a and b are packed panels of `steps` times 32 along k. */
static inline void amx_panel(float* c, const float* add, size_t c_row, size_t rows, size_t cols, const uint32_t* a,
                             const uint32_t* b, size_t steps) {
    float sum[AMX_PANEL * AMX_PANEL] __attribute__((aligned(64)));
    // tiles 0 to 3 are 2 x 2 of c; 4 and 5 hold a part of the two tiles of a, 6 and 7 of b
    __asm__ volatile("" ::: "memory");  // GCC's tile loads do not declare that they read memory: finish the packing first
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (size_t s = 0; s < steps; s++, a += AMX_STEP, b += AMX_STEP) {
#define LOAD_A(part)                                  \
    _tile_loadd(4, a + 2 * (part)*AMX_TILE, AMX_ROW); \
    _tile_loadd(5, a + (2 * (part) + 1) * AMX_TILE, AMX_ROW)
#define LOAD_B(part)                                  \
    _tile_loadd(6, b + 2 * (part)*AMX_TILE, AMX_ROW); \
    _tile_loadd(7, b + (2 * (part) + 1) * AMX_TILE, AMX_ROW)
#define MULTIPLY()           \
    _tile_dpbf16ps(0, 4, 6); \
    _tile_dpbf16ps(1, 4, 7); \
    _tile_dpbf16ps(2, 5, 6); \
    _tile_dpbf16ps(3, 5, 7)
        LOAD_A(2);
        LOAD_B(0);
        MULTIPLY();  // a3 b1
        LOAD_A(1);
        MULTIPLY();  // a2 b1
        LOAD_B(1);
        MULTIPLY();  // a2 b2
        LOAD_A(0);
        MULTIPLY();  // a1 b2
        LOAD_B(2);
        MULTIPLY();  // a1 b3
        LOAD_B(0);
        MULTIPLY();  // a1 b1
#undef LOAD_A
#undef LOAD_B
#undef MULTIPLY
    }
    if (!add && rows == AMX_PANEL && cols == AMX_PANEL) {
        const size_t row = c_row * sizeof *c;  // straight to c, not through `sum`
        _tile_stored(0, c, row);
        _tile_stored(1, c + AMX_EDGE, row);
        _tile_stored(2, c + AMX_EDGE * c_row, row);
        _tile_stored(3, c + AMX_EDGE * c_row + AMX_EDGE, row);
        return;
    }
    _tile_stored(0, sum, 2 * AMX_ROW);
    _tile_stored(1, sum + AMX_EDGE, 2 * AMX_ROW);
    _tile_stored(2, sum + AMX_EDGE * AMX_PANEL, 2 * AMX_ROW);
    _tile_stored(3, sum + AMX_EDGE * AMX_PANEL + AMX_EDGE, 2 * AMX_ROW);
    for (size_t i = 0; i < rows; i++) {
        for (size_t j = 0; j < cols; j += SIMD) {
            vf x = vf_load(sum + i * AMX_PANEL + j);
            if (add) { x += vf_load_upto(add + i * c_row + j, cols - j, 0.0f); }
            vf_store_upto(c + i * c_row + j, cols - j, x);
        }
    }
}

/* Returns the bytes of scratch: the packed block of B, then a block of A for each thread. */
static inline size_t amx_scratch(void) { return (AMX_PACKED_B + max_threads() * AMX_PACKED_A) * sizeof(uint32_t); }

/* Does what matmul_general() of matmul.h does. Call it only if amx_available(). scratch: amx_scratch() bytes */
static inline void amx_matmul(float* c, void* scratch, const float* add, MatrixView a, MatrixView b, size_t M, size_t N,
                              size_t K) {
    uint32_t* packed_b = (uint32_t*)scratch;
    const size_t kc = round_up(ceil_div(K, ceil_div(K, AMX_KC)), AMX_DEPTH);  // runs of equal length
    const bool half = !add && is_transpose(a, b);
    const size_t nc = AMX_PACKED_B / (kc / AMX_DEPTH * AMX_STEP) * AMX_PANEL;
    size_t mc = AMX_PANEL;
    if (a.col != 1) {  // read longer pieces of A's columns, but leave each thread about four blocks
        mc = size_min(AMX_BLOCK, round_up(ceil_div(M, 4 * max_threads()), AMX_PANEL));
    }
#pragma omp parallel
    {
        uint32_t* packed_a = packed_b + AMX_PACKED_B + thread_number() * AMX_PACKED_A;
        amx_configure();
        for (size_t j = 0; j < N; j += nc) {
            const size_t cols = size_min(N - j, nc);
            for (size_t k = 0; k < K; k += kc) {
                const size_t depth = size_min(K - k, kc), steps = ceil_div(depth, AMX_DEPTH), panel = steps * AMX_STEP;
                const float* from = k ? c : add;
#pragma omp for schedule(static)
                for (size_t q = 0; q < cols; q += AMX_PANEL) {
                    amx_pack(packed_b + q / AMX_PANEL * panel, transposed(view_from(b, k, j + q)),
                             size_min(cols - q, AMX_PANEL), depth, true);
                }
#pragma omp for schedule(dynamic)
                for (size_t i = 0; i < M; i += mc) {
                    const size_t rows = size_min(M - i, mc);
                    amx_pack(packed_a, view_from(a, i, k), rows, depth, false);
                    for (size_t q = 0; q < cols; q += AMX_PANEL) {
                        for (size_t r = 0; r < rows; r += AMX_PANEL) {
                            if (half && j + q + AMX_PANEL <= i + r) { continue; }
                            const size_t at = (i + r) * N + j + q;
                            amx_panel(c + at, from ? from + at : NULL, N, size_min(rows - r, AMX_PANEL),
                                      size_min(cols - q, AMX_PANEL), packed_a + r / AMX_PANEL * panel,
                                      packed_b + q / AMX_PANEL * panel, steps);
                        }
                    }
                }
            }
        }
        _tile_release();
    }
}

#endif
#endif
