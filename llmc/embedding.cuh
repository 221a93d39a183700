/* embedding.cuh -- rows of a table by token, and its gradient, on the GPU. The oracle is embedding.h.
 *
 * Backward without atomics on floats: the (token, position) pairs are sorted by token, equal tokens staying in the order
 * of their positions (a stable radix sort, three small kernels a digit), and every run of equal tokens is summed in that
 * order in fp32. A run may be one position or, in a byte vocabulary, a fifth of the batch; so the sorted list is cut into
 * chunks of EMBEDDING_CHUNK pairs, a block a chunk. Runs inside of a chunk are added to the table at once; the ends of
 * runs that cross into other chunks are kept, and a second kernel adds each such run up, chunk after chunk.
 *
 * The caller has checked that 0 <= token < V.
 */
#ifndef LLMC_EMBEDDING_CUH
#define LLMC_EMBEDDING_CUH

#include "cuda_common.cuh"

template <int W>
__global__ void embedding_forward_kernel(floatX* out, const floatX* table, const int32_t* tokens, size_t N, int C,
                                         size_t pitch) {
    for (size_t n = (size_t)blockIdx.x * blockDim.y + threadIdx.y; n < N; n += (size_t)gridDim.x * blockDim.y) {
        const floatX* row = table + (size_t)tokens[n] * C;
        for (int c = threadIdx.x * W; c < C; c += blockDim.x * W) { store_vec(out + n * pitch + c, load_vec<W>(row + c)); }
    }
}

/* out: (N, C), pitch   table: (V, C)   tokens: (N) */
static inline void embedding_forward_cuda(floatX* out, const floatX* table, const int32_t* tokens, size_t N, int C,
                                          size_t pitch, cudaStream_t stream) {
    if (N == 0) { return; }
    const bool wide = C % VECTOR<floatX> == 0;
    const int vectors = wide ? C / VECTOR<floatX> : C;
    const int x = (int)size_min(256, round_up((size_t)vectors, 32));
    const dim3 block(x, 256 / x);
    const int grid = (int)size_min(ceil_div(N, block.y), 1 << 20);
    if (wide) {
        embedding_forward_kernel<VECTOR<floatX>><<<grid, block, 0, stream>>>(out, table, tokens, N, C, pitch);
    } else {
        embedding_forward_kernel<1><<<grid, block, 0, stream>>>(out, table, tokens, N, C, pitch);
    }
    CUDA_CHECK_LAUNCH("embedding_forward_kernel");
}

// ---------------------------------------------------------------------------------------------------------------------
// a stable radix sort of (token, position), SORT_BITS bits at a time; each warp owns a tile of SORT_TILE pairs

enum {
    SORT_BITS = 9,  // two rounds for a vocabulary of up to 2^18
    SORT_DIGITS = 1 << SORT_BITS,
    SORT_TILE = 512,
    SORT_WARPS = 4,  // in a block
    EMBEDDING_CHUNK = 64,
    EMBEDDING_COLUMNS = 128,  // threads of a block, each with one vector of columns
};

/* counts: (SORT_DIGITS, tiles), how often each digit occurs in each tile. Integer atomics: no order shows. */
__global__ void sort_count_kernel(int* counts, const int32_t* keys, int N, int tiles, int shift) {
    __shared__ int histogram[SORT_WARPS][SORT_DIGITS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = blockIdx.x * SORT_WARPS + warp;
    for (int d = lane; d < SORT_DIGITS; d += 32) { histogram[warp][d] = 0; }
    __syncwarp();
    if (tile >= tiles) { return; }
    const int end = min(N, (tile + 1) * SORT_TILE);
    for (int i = tile * SORT_TILE + lane; i < end; i += 32) {
        atomicAdd(&histogram[warp][(keys[i] >> shift) & (SORT_DIGITS - 1)], 1);
    }
    __syncwarp();
    for (int d = lane; d < SORT_DIGITS; d += 32) { counts[(size_t)d * tiles + tile] = histogram[warp][d]; }
}

/* Exclusive prefix sums of counts (n), in place: one block of 1024 threads, each with a piece of the array. */
__global__ void __launch_bounds__(1024) sort_scan_kernel(int* counts, int n) {
    __shared__ int sums[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int before = 0;  // sum of all earlier rounds
    for (int start = 0; start < n; start += 4 * 1024) {
        int x[4], own = 0;
        const int at = start + 4 * (int)threadIdx.x;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            x[k] = at + k < n ? counts[at + k] : 0;
            own += x[k];
        }
        int inclusive = own;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, inclusive, d);
            if (lane >= d) { inclusive += other; }
        }
        if (lane == 31) { sums[warp] = inclusive; }
        __syncthreads();
        int warps = sums[lane];
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, warps, d);
            if (lane >= d) { warps += other; }
        }
        const int earlier = __shfl_sync(0xffffffffu, warps, warp > 0 ? warp - 1 : 0);
        int sum = before + (warp > 0 ? earlier : 0) + inclusive - own;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (at + k < n) { counts[at + k] = sum; }
            sum += x[k];
        }
        before += __shfl_sync(0xffffffffu, warps, 31);
        __syncthreads();
    }
}

/* Puts each pair where the scanned counts say. positions NULL: pair i has position i. Lanes with equal digits find each
 * other, and their order is that of the lanes: the sort is stable. */
__global__ void sort_scatter_kernel(int32_t* keys_out, int32_t* positions_out, const int32_t* keys, const int32_t* positions,
                                    const int* counts, int N, int tiles, int shift) {
    __shared__ int next[SORT_WARPS][SORT_DIGITS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = blockIdx.x * SORT_WARPS + warp;
    if (tile >= tiles) { return; }
    for (int d = lane; d < SORT_DIGITS; d += 32) { next[warp][d] = counts[(size_t)d * tiles + tile]; }
    __syncwarp();
    const int end = min(N, (tile + 1) * SORT_TILE);
    for (int start = tile * SORT_TILE; start < end; start += 32) {
        const int i = start + lane;
        const int key = i < end ? keys[i] : 0;
        const int digit = i < end ? (key >> shift) & (SORT_DIGITS - 1) : SORT_DIGITS;
        const unsigned peers = __match_any_sync(0xffffffffu, digit);
        const int rank = __popc(peers & ((1u << lane) - 1));
        int base = 0;
        if (i < end) { base = next[warp][digit]; }
        __syncwarp();
        if (i < end) {
            if (rank == 0) { next[warp][digit] = base + __popc(peers); }
            keys_out[base + rank] = key;
            positions_out[base + rank] = positions ? positions[i] : i;
        }
        __syncwarp();
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// sums of runs of equal tokens

template <int W, typename Grad>
__device__ __forceinline__ void add_to_row(Grad* row, const float (&sum)[W]) {
    Vec<Grad, W> g = load_vec<W>(row);
#pragma unroll
    for (int k = 0; k < W; k++) { g.v[k] = from_float<Grad>(to_float(g.v[k]) + sum[k]); }
    store_vec(row, g);
}

/* A block a chunk (x) and group of columns (y). partial: (chunks, 2, C), [0] the piece of a run that began in an earlier
 * chunk, [1] of one that began here and goes on in the next. */
template <int W, typename Grad>
__global__ void __launch_bounds__(EMBEDDING_COLUMNS)
    embedding_chunk_kernel(Grad* dtable, float* partial, const floatX* dout, const int32_t* keys, const int32_t* positions,
                           int N, int C, size_t pitch) {
    __shared__ int32_t key[EMBEDDING_CHUNK + 2], position[EMBEDDING_CHUNK];  // key: with both neighbours
    const int chunk = blockIdx.x, first = chunk * EMBEDDING_CHUNK, count = min(EMBEDDING_CHUNK, N - first);
    for (int i = threadIdx.x; i < count + 2; i += blockDim.x) {
        const int at = first + i - 1;
        key[i] = at >= 0 && at < N ? keys[at] : -1;
        if (i < count) { position[i] = positions[first + i]; }
    }
    __syncthreads();
    const int c = (blockIdx.y * EMBEDDING_COLUMNS + threadIdx.x) * W;
    if (c >= C) { return; }
    float sum[W] = {};
    bool began_here = key[0] != key[1];
    Vec<floatX, W> next = load_vec<W>(dout + (size_t)position[0] * pitch + c);
    for (int i = 0; i < count; i++) {
        const Vec<floatX, W> d = next;
        if (i + 1 < count) { next = load_vec<W>(dout + (size_t)position[i + 1] * pitch + c); }
#pragma unroll
        for (int k = 0; k < W; k++) { sum[k] += to_float(d.v[k]); }
        const bool ends = key[i + 2] != key[i + 1];
        if (!ends && i + 1 < count) { continue; }
        if (ends && began_here) {
            add_to_row<W>(dtable + (size_t)key[i + 1] * C + c, sum);
        } else {
            Vec<float, W> kept;
#pragma unroll
            for (int k = 0; k < W; k++) { kept.v[k] = sum[k]; }
            store_vec(partial + ((size_t)chunk * 2 + (began_here ? 1 : 0)) * C + c, kept);
        }
#pragma unroll
        for (int k = 0; k < W; k++) { sum[k] = 0; }
        began_here = true;
    }
}

/* Adds up the runs that cross chunks; a block for each chunk in which one may begin. */
template <int W, typename Grad>
__global__ void __launch_bounds__(EMBEDDING_COLUMNS)
    embedding_run_kernel(Grad* dtable, const float* partial, const int32_t* keys, int N, int C) {
    const int chunk = blockIdx.x, last = (chunk + 1) * EMBEDDING_CHUNK - 1;
    if (last + 1 >= N) { return; }
    const int key = keys[last];
    // the chunk's last run began in it unless the run fills the chunk and the chunk before ends with the same token
    const bool fills = keys[chunk * EMBEDDING_CHUNK] == key && chunk > 0 && keys[chunk * EMBEDDING_CHUNK - 1] == key;
    if (keys[last + 1] != key || fills) { return; }
    const int c = (blockIdx.y * EMBEDDING_COLUMNS + threadIdx.x) * W;
    if (c >= C) { return; }
    Vec<float, W> sum = load_vec<W>(partial + ((size_t)chunk * 2 + 1) * C + c);
    for (int next = chunk + 1; next * EMBEDDING_CHUNK < N && keys[next * EMBEDDING_CHUNK] == key; next++) {
        const Vec<float, W> piece = load_vec<W>(partial + (size_t)next * 2 * C + c);
#pragma unroll
        for (int k = 0; k < W; k++) { sum.v[k] += piece.v[k]; }
    }
    add_to_row<W>(dtable + (size_t)key * C + c, sum.v);
}

/* Bytes of scratch that embedding_backward_cuda() wants. */
static inline size_t embedding_backward_scratch_cuda(size_t N, int C) {
    const size_t tiles = ceil_div(N, SORT_TILE), chunks = ceil_div(N, EMBEDDING_CHUNK);
    return 4 * round_up(N * sizeof(int32_t), 256) + round_up(SORT_DIGITS * tiles * sizeof(int), 256) +
           chunks * 2 * (size_t)C * sizeof(float);
}

/* dtable: (V, C) +=   scratch: bytes as above   dout: (N, C), pitch   tokens: (N). N < 2^31. */
template <typename Grad>
static void embedding_backward_cuda(Grad* dtable, void* scratch, const floatX* dout, const int32_t* tokens, size_t N, int C,
                                    int V, size_t pitch, cudaStream_t stream) {
    if (N == 0) { return; }
    assert(N < ((size_t)1 << 31) - SORT_TILE);
    const int n = (int)N, tiles = (int)ceil_div(N, SORT_TILE), chunks = (int)ceil_div(N, EMBEDDING_CHUNK);
    char* at = (char*)scratch;
    int32_t* buffers[4];
    for (int i = 0; i < 4; i++) {
        buffers[i] = (int32_t*)at;
        at += round_up(N * sizeof(int32_t), 256);
    }
    int* counts = (int*)at;
    float* partial = (float*)(at + round_up(SORT_DIGITS * (size_t)tiles * sizeof(int), 256));

    const int32_t *keys = tokens, *positions = NULL;
    const int sort_blocks = (int)ceil_div((size_t)tiles, SORT_WARPS);
    for (int shift = 0, round = 0; shift == 0 || (shift < 31 && (V - 1) >> shift > 0); shift += SORT_BITS, round ^= 1) {
        sort_count_kernel<<<sort_blocks, 32 * SORT_WARPS, 0, stream>>>(counts, keys, n, tiles, shift);
        CUDA_CHECK_LAUNCH("sort_count_kernel");
        sort_scan_kernel<<<1, 1024, 0, stream>>>(counts, SORT_DIGITS * tiles);
        CUDA_CHECK_LAUNCH("sort_scan_kernel");
        sort_scatter_kernel<<<sort_blocks, 32 * SORT_WARPS, 0, stream>>>(buffers[2 * round], buffers[2 * round + 1], keys,
                                                                         positions, counts, n, tiles, shift);
        CUDA_CHECK_LAUNCH("sort_scatter_kernel");
        keys = buffers[2 * round];
        positions = buffers[2 * round + 1];
    }

    constexpr int WIDE = VECTOR<floatX>;
    const bool wide = C % WIDE == 0;
    const dim3 grid(chunks, (unsigned)ceil_div((size_t)C, (size_t)EMBEDDING_COLUMNS * (wide ? WIDE : 1)));
    if (wide) {
        embedding_chunk_kernel<WIDE>
            <<<grid, EMBEDDING_COLUMNS, 0, stream>>>(dtable, partial, dout, keys, positions, n, C, pitch);
        CUDA_CHECK_LAUNCH("embedding_chunk_kernel");
        embedding_run_kernel<WIDE><<<grid, EMBEDDING_COLUMNS, 0, stream>>>(dtable, partial, keys, n, C);
    } else {
        embedding_chunk_kernel<1><<<grid, EMBEDDING_COLUMNS, 0, stream>>>(dtable, partial, dout, keys, positions, n, C, pitch);
        CUDA_CHECK_LAUNCH("embedding_chunk_kernel");
        embedding_run_kernel<1><<<grid, EMBEDDING_COLUMNS, 0, stream>>>(dtable, partial, keys, n, C);
    }
    CUDA_CHECK_LAUNCH("embedding_run_kernel");
}

#endif
