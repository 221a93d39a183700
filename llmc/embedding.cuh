/* embedding.cuh -- looks up a table row for each token on the GPU, and computes the table's gradient. The oracle is
 * embedding.h.
 *
 * Backward uses no atomics on floats. A stable radix sort orders the (token, position) pairs by token, then position, and every
 * run of equal tokens is summed in that order in fp32. A run may be one position or, in a byte vocabulary, a fifth of the
 * batch. So the sorted list is cut into chunks of EMBEDDING_CHUNK pairs, a block a chunk. A run belongs to the chunk in which
 * it begins, and that block follows it to the end of the next chunk. A run that is longer still leaves a partial sum for each
 * further chunk. A second kernel adds up these partial sums, in an order that depends on the run's length only.
 *
 * The caller has checked that 0 <= token < V. Steps: dev/cuda/embedding.cu.
 */
#ifndef LLMC_EMBEDDING_CUH
#define LLMC_EMBEDDING_CUH

#include "llmc/base/matrix.h"  // defines: RowShape
#include "llmc/cuda/cuda_common.cuh"

/* A block of (x, y) threads copies x vectors of columns of ROWS * y rows. A thread copies ROWS of them: it issues that many
 * loads before the first store. */
template <int W, int ROWS>
__global__ void __launch_bounds__(256)
    embedding_forward_kernel(floatX* out, const floatX* table, const int32_t* tokens, size_t N, int C, size_t pitch) {
    const int c = (blockIdx.y * blockDim.x + threadIdx.x) * W;
    if (c >= C) { return; }
    const size_t first = (size_t)blockIdx.x * blockDim.y * ROWS + threadIdx.y;
    int32_t token[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const size_t n = first + r * blockDim.y;
        token[r] = tokens[n < N ? n : N - 1];
    }
    Held<floatX, W> row[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) { row[r] = hold<W>(table + (size_t)token[r] * C + c); }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const size_t n = first + r * blockDim.y;
        if (n < N) { store_stream(out + n * pitch + c, unpack(row[r])); }
    }
}

/* Computes threads in x and blocks in y that cover `vectors`, at most `most` threads a block: whole warps, few of them idle. */
static inline void embedding_columns(size_t vectors, size_t most, unsigned* threads, unsigned* blocks) {
    *blocks = (unsigned)ceil_div(vectors, most);
    *threads = (unsigned)round_up(ceil_div(vectors, *blocks), 32);
}

/* Writes out (rows) from table (V, C) and tokens (N). */
static inline void embedding_forward_cuda(floatX* out, const floatX* table, const int32_t* tokens, RowShape rows,
                                          cudaStream_t stream) {
    if (rows.N == 0) { return; }
    enum { ROWS = 4 };
    constexpr int WIDE = VECTOR<floatX>;
    const bool wide = rows.C % WIDE == 0;
    unsigned x, columns;
    embedding_columns(wide ? rows.C / WIDE : rows.C, 256, &x, &columns);
    const dim3 block(x, 256 / x), grid((unsigned)ceil_div(rows.N, (size_t)block.y * ROWS), columns);
    auto* const kernel = wide ? embedding_forward_kernel<WIDE, ROWS> : embedding_forward_kernel<1, ROWS>;
    kernel<<<grid, block, 0, stream>>>(out, table, tokens, rows.N, rows.C, rows.pitch);
    CUDA_CHECK_LAUNCH("embedding_forward_kernel");
}

// ---------------------------------------------------------------------------------------------------------------------
// a stable radix sort of (token, position), SORT_BITS bits at a time
//
// The list is cut into tiles of whole rounds of SORT_KEYS keys, a block a tile, at most SORT_TILES tiles. That is few enough
// for each block to add up the counts of all tiles itself, so no scan kernel is needed. The scatter of one digit also counts
// the next one. A sort by d digits takes d + 1 launches. A single tile takes one launch, whose block sorts by all digits.

enum {
    SORT_BITS = 9,  // two digits for a vocabulary of up to 2^18
    SORT_DIGITS = 1 << SORT_BITS,
    SORT_MAX_DIGITS = 4,         // 9 bits each of a token's 31
    SORT_THREADS = SORT_DIGITS,  // a thread a digit wherever counts are added up
    SORT_WARPS = SORT_THREADS / 32,
    SORT_EACH = 4,  // keys of a thread in a round
    SORT_KEYS = SORT_EACH * SORT_THREADS,
    SORT_TILES = 128,
};

/* The state that the blocks of the sort share. */
typedef struct {
    int count[SORT_WARPS][SORT_DIGITS];  // each warp's counts; then where its next key goes
    int sums[SORT_WARPS];
} SortShared;

/* Writes counts (digits, tiles, SORT_DIGITS): [0] is how often each value of the first digit occurs in each tile; the rest, and
 * *num_runs, become zero. The atomics are on integers, so the order of additions does not matter. */
__device__ __forceinline__ void sort_count(SortShared& shared, int* counts, int* num_runs, const int32_t* tokens, int N,
                                           int tile_keys, int digits) {
    int* histogram = shared.count[0];
    const int thread = threadIdx.x, tile = blockIdx.x, tiles = gridDim.x;
    histogram[thread] = 0;
    for (int digit = 1; digit < digits; digit++) { counts[(digit * tiles + tile) * SORT_DIGITS + thread] = 0; }
    if (tile == 0 && thread == 0) { *num_runs = 0; }
    __syncthreads();
    const int first = tile * tile_keys, end = min(N, first + tile_keys);
    for (int start = first; start < end; start += SORT_KEYS) {
        int32_t key[SORT_EACH];
#pragma unroll
        for (int k = 0; k < SORT_EACH; k++) { key[k] = tokens[min(start + k * SORT_THREADS + thread, end - 1)]; }
#pragma unroll
        for (int k = 0; k < SORT_EACH; k++) {
            if (start + k * SORT_THREADS + thread < end) { atomicAdd(&histogram[key[k] & (SORT_DIGITS - 1)], 1); }
        }
    }
    __syncthreads();
    counts[tile * SORT_DIGITS + thread] = histogram[thread];
}

__global__ void __launch_bounds__(SORT_THREADS)
    sort_count_kernel(int* counts, int* num_runs, const int32_t* tokens, int N, int tile_keys, int digits) {
    __shared__ SortShared shared;
    sort_count(shared, counts, num_runs, tokens, N, tile_keys, digits);
}

/* A list of N pairs, cut into tiles. If pairs is NULL, pair i is (tokens[i], i). */
struct SortList {
    const int2* pairs;
    const int32_t* tokens;
    int N, tile_keys;

    /* Loads pairs from `at` on, 32 apart; those at `end` and beyond are never used. */
    __device__ __forceinline__ void load(int2 (&pair)[SORT_EACH], int at, int end) const {
#pragma unroll
        for (int k = 0; k < SORT_EACH; k++) {
            const int i = at + k * 32;
            pair[k] = make_int2(0, 0);
            if (i < end) { pair[k] = pairs ? pairs[i] : make_int2(tokens[i], i); }
        }
    }
};

/* Puts each pair where the counts of this digit say, and counts the next digit in the tiles of the new order (next_counts, NULL
 * for the last digit). In each round a warp has 32 * SORT_EACH consecutive keys. Lanes with equal digits find each other and
 * keep the order of lanes: the sort is stable. */
__device__ __forceinline__ void sort_scatter(SortShared& shared, int2* out, int* next_counts, const SortList& list,
                                             const int* counts, int shift) {
    int(*histogram)[SORT_DIGITS] = shared.count;
    int* sums = shared.sums;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, tile = blockIdx.x, tiles = gridDim.x;
    const int first = tile * list.tile_keys, end = min(list.N, first + list.tile_keys);
    int at = first + warp * 32 * SORT_EACH + lane;
    int2 pair[SORT_EACH];
    list.load(pair, at, end);

    // this tile's first key with digit `thread` comes after all smaller digits and after the same digit in earlier tiles
    int total = 0, earlier = 0;
#pragma unroll 16
    for (int t = 0; t < tiles; t++) {
        const int count = counts[t * SORT_DIGITS + thread];
        total += count;
        earlier += t < tile ? count : 0;
    }
    int inclusive = total;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, inclusive, d);
        if (lane >= d) { inclusive += other; }
    }
    if (lane == 31) { sums[warp] = inclusive; }
    __syncthreads();
    int next = earlier + inclusive - total;
#pragma unroll
    for (int w = 0; w < SORT_WARPS; w++) { next += w < warp ? sums[w] : 0; }

    for (int start = first; start < end; start += SORT_KEYS, at += SORT_KEYS) {
#pragma unroll
        for (int w = 0; w < SORT_WARPS; w++) { histogram[w][thread] = 0; }
        __syncthreads();
        int digit[SORT_EACH], rank[SORT_EACH];  // rank: among the equal digits of the warp
#pragma unroll
        for (int k = 0; k < SORT_EACH; k++) {
            const bool valid = at + k * 32 < end;
            digit[k] = valid ? (pair[k].x >> shift) & (SORT_DIGITS - 1) : SORT_DIGITS;
            const unsigned peers = __match_any_sync(0xffffffffu, digit[k]);
            const int lower = __popc(peers & ((1u << lane) - 1));
            const int before = valid ? histogram[warp][digit[k]] : 0;
            __syncwarp();
            if (valid && lower == 0) { histogram[warp][digit[k]] = before + __popc(peers); }
            __syncwarp();
            rank[k] = before + lower;
        }
        __syncthreads();
#pragma unroll
        for (int w = 0; w < SORT_WARPS; w++) {
            const int count = histogram[w][thread];
            histogram[w][thread] = next;
            next += count;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < SORT_EACH; k++) {
            if (at + k * 32 >= end) { continue; }
            const int to = histogram[warp][digit[k]] + rank[k];
            out[to] = pair[k];
            if (next_counts) {
                const int next_digit = (pair[k].x >> shift >> SORT_BITS) & (SORT_DIGITS - 1);
                atomicAdd(&next_counts[to / list.tile_keys * SORT_DIGITS + next_digit], 1);
            }
        }
        list.load(pair, at + SORT_KEYS, end);
        __syncthreads();
    }
}

__global__ void __launch_bounds__(SORT_THREADS)
    sort_scatter_kernel(int2* out, int* next_counts, const int2* pairs, const int32_t* tokens, const int* counts, int N,
                        int tile_keys, int shift) {
    __shared__ SortShared shared;
    sort_scatter(shared, out, next_counts, {pairs, tokens, N, tile_keys}, counts, shift);
}

/* Sorts a list of one tile by all digits. The block that sorts by a digit reads the result after the barrier. */
__global__ void __launch_bounds__(SORT_THREADS)
    sort_tile_kernel(int2* even, int2* odd, int* counts, int* num_runs, const int32_t* tokens, int N, int digits) {
    __shared__ SortShared shared;
    sort_count(shared, counts, num_runs, tokens, N, SORT_KEYS, digits);
    for (int digit = 0; digit < digits; digit++) {
        __syncthreads();
        int2 *out = digit % 2 ? odd : even, *pairs = digit == 0 ? NULL : digit % 2 ? even : odd;
        int* next = digit + 1 < digits ? counts + (digit + 1) * SORT_DIGITS : NULL;
        sort_scatter(shared, out, next, {pairs, tokens, N, SORT_KEYS}, counts + digit * SORT_DIGITS, digit * SORT_BITS);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// sums of runs of equal tokens

enum {
    EMBEDDING_CHUNK = 32,     // one pair for each lane
    EMBEDDING_COLUMNS = 128,  // most threads of a block that sums rows, each with one vector of columns
    EMBEDDING_ROWS = 4,       // rows that a thread has in flight
    RUN_WARPS = 8,            // warps that share the pieces of one long run
    RUN_PIECES = 8,           // pieces that a thread has in flight
};

template <int W>
__device__ __forceinline__ void store_sum(float* p, const float (&sum)[W]) {
    Vec<float, W> v;
#pragma unroll
    for (int k = 0; k < W; k++) { v.v[k] = sum[k]; }
    store_vec(p, v);
}

/* Part of a row of the table: read() loads it ahead of its use, write() stores row + sum. */
template <int W, typename Grad>
struct TableRow {
    static constexpr int PART = W < VECTOR<Grad> ? W : VECTOR<Grad>;
    Held<Grad, PART> part[W / PART];

    __device__ __forceinline__ void read(const Grad* row) {
#pragma unroll
        for (int i = 0; i < W / PART; i++) { part[i] = hold_stream<PART>(row + i * PART); }
    }
    __device__ __forceinline__ void write(Grad* row, const float (&sum)[W]) const {
#pragma unroll
        for (int i = 0; i < W / PART; i++) {
            Vec<Grad, PART> g = unpack(part[i]);
#pragma unroll
            for (int k = 0; k < PART; k++) { g.v[k] = from_float<Grad>(to_float(g.v[k]) + sum[i * PART + k]); }
            store_stream(row + i * PART, g);
        }
    }
};

/* A block takes a chunk (x) and a group of columns (y), and sums the pairs [begin, end), counted from the chunk's first:
 *   - a run that began in the previous chunk belongs to that chunk: this one begins after it;
 *   - of a run that began earlier still, the piece in this chunk goes to partial[chunk];
 *   - a run that begins here is followed to the end of the next chunk. If it continues past that, the sum so far goes to
 *     partial[chunk + 1], which that chunk leaves free, and chunk + 1 goes into the list `runs` (runs[0]: their number).
 * partial: (chunks, C). Every warp works this out for itself, with one pair for each lane. */
template <int W, typename Grad>
__global__ void __launch_bounds__(EMBEDDING_COLUMNS, 6)
    embedding_chunk_kernel(Grad* dtable, float* partial, int* runs, const floatX* dout, const int2* pairs, int N, int C,
                           size_t pitch) {
    constexpr int ROWS = EMBEDDING_ROWS;
    __shared__ int2 sorted[EMBEDDING_COLUMNS / 32][2 * EMBEDDING_CHUNK];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunk = blockIdx.x, first = chunk * EMBEDDING_CHUNK;
    const int2 none = make_int2(-1, 0);
    const int2 here = first + lane < N ? pairs[first + lane] : none;
    const int2 later = first + 32 + lane < N ? pairs[first + 32 + lane] : none;
    const int before = first > 0 ? pairs[first - 1].x : -1, older = first > 32 ? pairs[first - 33].x : -1;
    const int behind = first + 64 < N ? pairs[first + 64].x : -1;
    int2* mine = sorted[warp];
    mine[lane] = here;
    mine[32 + lane] = later;
    __syncwarp();

    // one bit for each pair: set if it is the last of its run
    int next = __shfl_down_sync(0xffffffffu, here.x, 1), next_later = __shfl_down_sync(0xffffffffu, later.x, 1);
    const int first_later = __shfl_sync(0xffffffffu, later.x, 0), key = __shfl_sync(0xffffffffu, here.x, 0);
    if (lane == 31) {
        next = first_later;
        next_later = behind;
    }
    const unsigned ends = __ballot_sync(0xffffffffu, here.x != next),
                   ends_later = __ballot_sync(0xffffffffu, later.x != next_later);

    int begin = 0, end = min(EMBEDDING_CHUNK, N - first), piece = -1;  // piece: the last pair of the piece for partial[chunk]
    const bool continued = before == key, crosses = end == EMBEDDING_CHUNK && !(ends >> 31);
    const int first_end = ends ? __ffs(ends) - 1 : EMBEDDING_CHUNK - 1;
    if (continued) {
        if (older == key) {
            piece = first_end;
        } else {
            begin = first_end + 1;
        }
    }
    if (begin >= end) { return; }
    const bool began_here = !(continued && ends == 0), is_long = crosses && began_here && ends_later == 0;
    if (crosses && began_here) { end = EMBEDDING_CHUNK + (ends_later ? __ffs(ends_later) : EMBEDDING_CHUNK); }
    if (is_long && blockIdx.y == 0 && threadIdx.x == 0) { runs[1 + atomicAdd(&runs[0], 1)] = chunk + 1; }

    const int c = (blockIdx.y * blockDim.x + threadIdx.x) * W;
    if (c >= C) { return; }
    unsigned long long last = (((unsigned long long)ends_later << 32 | ends) << (64 - end) >> (64 - end)) >> begin;
    float sum[W] = {};
    for (int i = begin; i < end; i += ROWS, last >>= ROWS) {
        Held<floatX, W> d[ROWS];
        TableRow<W, Grad> row[ROWS];
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            const int2 pair = mine[min(i + k, end - 1)];
            d[k] = hold_stream<W>(dout + (size_t)pair.y * pitch + c);
            if ((last >> k & 1) && i + k != piece) { row[k].read(dtable + (size_t)pair.x * C + c); }
        }
        __syncwarp();  // issue all loads before the first sum: keeps the compiler from moving sums between them
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            if (i + k >= end) { break; }
            const Vec<floatX, W> x = unpack(d[k]);
#pragma unroll
            for (int j = 0; j < W; j++) { sum[j] += to_float(x.v[j]); }
            if (i + k == piece) {
                store_sum<W>(partial + (size_t)chunk * C + c, sum);
            } else if (last >> k & 1) {
                row[k].write(dtable + (size_t)mine[i + k].x * C + c, sum);
            } else {
                continue;
            }
#pragma unroll
            for (int j = 0; j < W; j++) { sum[j] = 0; }
        }
    }
    if (is_long) { store_sum<W>(partial + (size_t)(chunk + 1) * C + c, sum); }
}

/* Adds up the pieces of the runs in the list. A block takes 32 vectors of columns (y) of a run. Each of its warps sums a range
 * of neighboring pieces, and the first warp adds up these sums. */
template <int W, typename Grad>
__global__ void __launch_bounds__(32 * RUN_WARPS)
    embedding_run_kernel(Grad* dtable, const float* partial, const int* runs, const int2* pairs, int N, int C) {
    __shared__ Vec<float, W> sums[RUN_WARPS][32];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, num_runs = runs[0];
    const int c = (blockIdx.y * 32 + lane) * W;
    for (int run = blockIdx.x; run < num_runs; run += gridDim.x) {
        const int first = runs[1 + run], key = pairs[first * EMBEDDING_CHUNK].x;
        int pieces = 0, found;
        do {
            const size_t at = (size_t)(first + pieces + thread) * EMBEDDING_CHUNK;
            found = __syncthreads_count(at < (size_t)N && pairs[at].x == key);
            pieces += found;
        } while (found == 32 * RUN_WARPS);
        const int each = (pieces + RUN_WARPS - 1) / RUN_WARPS, begin = min(warp * each, pieces),
                  end = min(begin + each, pieces);
        Vec<float, W> sum = {};
        const float* p = partial + (size_t)first * C + min(c, C - W);  // lanes past C read but do not write
        for (int i = begin; i < end; i += RUN_PIECES) {
            Vec<float, W> part[RUN_PIECES];
#pragma unroll
            for (int k = 0; k < RUN_PIECES; k++) { part[k] = load_vec<W>(p + (size_t)min(i + k, end - 1) * C); }
            __syncwarp();  // see embedding_chunk_kernel()
#pragma unroll
            for (int k = 0; k < RUN_PIECES; k++) {
                if (i + k >= end) { break; }
#pragma unroll
                for (int j = 0; j < W; j++) { sum.v[j] += part[k].v[j]; }
            }
        }
        sums[warp][lane] = sum;
        __syncthreads();  // the next run writes `sums` only after a barrier of its own
        if (warp == 0 && c < C) {
            TableRow<W, Grad> row;
            row.read(dtable + (size_t)key * C + c);
#pragma unroll
            for (int w = 1; w < RUN_WARPS; w++) {
#pragma unroll
                for (int j = 0; j < W; j++) { sum.v[j] += sums[w][lane].v[j]; }
            }
            row.write(dtable + (size_t)key * C + c, sum.v);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------

/* The parts of backward's scratch, each at a multiple of 256 bytes. */
typedef struct {
    int2* pairs[2];  // (N) each: token, position
    int* counts;     // (SORT_MAX_DIGITS, tiles, SORT_DIGITS)
    int* runs;       // their number, then for each run too long for one block the first chunk wholly inside it
    float* partial;  // (chunks, C)
    size_t bytes;    // of all
    int tile_keys, tiles, chunks;
} EmbeddingScratch;

static inline EmbeddingScratch embedding_scratch(void* scratch, size_t N, int C) {
    EmbeddingScratch s;
    s.tile_keys = SORT_KEYS * (int)size_max(1, ceil_div(N, (size_t)SORT_KEYS * SORT_TILES));
    s.tiles = (int)ceil_div(N, s.tile_keys);
    s.chunks = (int)ceil_div(N, EMBEDDING_CHUNK);
    s.bytes = 0;
    auto part = [&](size_t bytes) {
        void* p = (void*)((uintptr_t)scratch + s.bytes);
        s.bytes += round_up(bytes, 256);
        return p;
    };
    for (int i = 0; i < 2; i++) { s.pairs[i] = (int2*)part(N * sizeof(int2)); }
    s.counts = (int*)part((size_t)SORT_MAX_DIGITS * s.tiles * SORT_DIGITS * sizeof(int));
    s.runs = (int*)part((1 + (size_t)s.chunks) * sizeof(int));
    s.partial = (float*)part((size_t)s.chunks * C * sizeof(float));
    return s;
}

/* Returns the bytes of scratch that embedding_backward_cuda() needs. */
static inline size_t embedding_backward_scratch_cuda(size_t N, int C) { return embedding_scratch(NULL, N, C).bytes; }

/* Sorts the pairs (token, position) by token, then position, and returns where in the scratch they lie. Empties the list of
 * runs. tokens: (N), from 0 to V - 1 */
static inline const int2* embedding_sort_cuda(const EmbeddingScratch* s, const int32_t* tokens, size_t N, int V,
                                              cudaStream_t stream) {
    const int n = (int)N;
    int digits = 1;
    while (digits < SORT_MAX_DIGITS && (V - 1) >> (digits * SORT_BITS) > 0) { digits++; }
    if (s->tiles == 1) {
        sort_tile_kernel<<<1, SORT_THREADS, 0, stream>>>(s->pairs[0], s->pairs[1], s->counts, s->runs, tokens, n, digits);
        CUDA_CHECK_LAUNCH("sort_tile_kernel");
        return s->pairs[(digits - 1) % 2];
    }
    sort_count_kernel<<<s->tiles, SORT_THREADS, 0, stream>>>(s->counts, s->runs, tokens, n, s->tile_keys, digits);
    CUDA_CHECK_LAUNCH("sort_count_kernel");
    const int2* pairs = NULL;
    for (int digit = 0; digit < digits; digit++) {
        int *counts = s->counts + (size_t)digit * s->tiles * SORT_DIGITS, *next = counts + (size_t)s->tiles * SORT_DIGITS;
        int2* out = s->pairs[digit % 2];
        sort_scatter_kernel<<<s->tiles, SORT_THREADS, 0, stream>>>(out, digit + 1 < digits ? next : (int*)NULL, pairs, tokens,
                                                                   counts, n, s->tile_keys, digit * SORT_BITS);
        CUDA_CHECK_LAUNCH("sort_scatter_kernel");
        pairs = out;
    }
    return pairs;
}

/* Adds to dtable (V, C) from dout (rows) and tokens (N). scratch: bytes as above. N < 2^30. */
template <typename Grad>
static void embedding_backward_cuda(Grad* dtable, void* scratch, const floatX* dout, const int32_t* tokens, int V,
                                    RowShape rows, cudaStream_t stream) {
    if (rows.N == 0) { return; }
    assert(rows.N < (size_t)1 << 30);
    const int n = (int)rows.N, C = rows.C;
    const EmbeddingScratch room = embedding_scratch(scratch, rows.N, C);
    const int2* pairs = embedding_sort_cuda(&room, tokens, rows.N, V, stream);

    constexpr int WIDE = VECTOR<floatX>, RUN_WIDE = VECTOR<float>;
    const bool wide = C % WIDE == 0;
    unsigned threads, columns;
    embedding_columns(wide ? C / WIDE : C, EMBEDDING_COLUMNS, &threads, &columns);
    auto* const chunk = wide ? embedding_chunk_kernel<WIDE, Grad> : embedding_chunk_kernel<1, Grad>;
    chunk<<<dim3(room.chunks, columns), threads, 0, stream>>>(dtable, room.partial, room.runs, dout, pairs, n, C, rows.pitch);
    CUDA_CHECK_LAUNCH("embedding_chunk_kernel");
    if (room.chunks <= 2) { return; }  // one block follows any run to its end
    const size_t groups = ceil_div(wide ? C / RUN_WIDE : C, 32);
    const dim3 grid((unsigned)size_min(room.chunks, size_max(1, 2048 / groups)), (unsigned)groups);
    auto* const run = wide ? embedding_run_kernel<RUN_WIDE, Grad> : embedding_run_kernel<1, Grad>;
    run<<<grid, 32 * RUN_WARPS, 0, stream>>>(dtable, room.partial, room.runs, pairs, n, C);
    CUDA_CHECK_LAUNCH("embedding_run_kernel");
}

#endif
