/* bench_tiles.cu -- times the tiles of attention's mma kernels as cards with less shared memory would run them.
 *
 *   make build/bench_tiles_cu PTX_ONLY=80 PRECISION=BF16    or PTX_ONLY=75 PRECISION=FP16, for the code of a T4
 *   build/bench_tiles_cu                                    bench_tiles.py makes tables of it
 *
 * It needs a card with 228 KB of shared memory. Dynamic shared memory is padded until a multiprocessor holds as many blocks as
 * one with 164, 100 or 64 KB. Such a card differs also in its tensor cores, caches and clock, which this cannot show.
 *
 * A line has T HD B NH NKV, the kernel, its tiles (numbers as in MmaTiles), the card's KB, blocks x warps of a multiprocessor
 * and the median milliseconds. `before`: such a card took these tiles when all cards took the same. `now`: it takes them today.
 * First the program checks that all tiles of a kernel give the same bits.
 */
#include <map>
#include <string>
#include <type_traits>

#include "attention_timing.cuh"

enum { PART_FORWARD, PART_KV, PART_Q, NUM_PARTS };
static const char* part_names[NUM_PARTS] = {"forward", "dK_dV", "dQ"};

template <typename Tiles>
static void launch_forward(const Buffers* b, int B, int bytes) {
    attention_launch(attention_forward_mma_kernel<Tiles, false>, attention_grid(B, b->args.NH, b->args.T, Tiles::BM),
                     Tiles::THREADS, bytes, 0, b->out, b->lse, b->qkv, b->args);
}
template <typename Tiles>
static void launch_kv(const Buffers* b, int B, int bytes) {
    attention_launch(attention_backward_kv_mma_kernel<Tiles, false>, attention_grid(B, b->args.NKV, b->args.T, Tiles::BN),
                     Tiles::THREADS, bytes, 0, b->dqkv, (const float2*)b->scratch, b->dout, b->qkv, b->args);
}
template <typename Tiles>
static void launch_q(const Buffers* b, int B, int bytes) {
    attention_launch(attention_backward_q_mma_kernel<Tiles, false>, attention_grid(B, b->args.NH, b->args.T, Tiles::BM),
                     Tiles::THREADS, bytes, 0, b->dqkv, (const float2*)b->scratch, b->dout, b->qkv, b->args);
}

/* Returns whether such a card takes these tiles of the program's list. */
template <typename Tiles, typename List>
static bool is_chosen(Multiprocessor m) {
    bool same = false;
    mma_choose(
        List(), [&](auto tiles) { same = std::is_same<decltype(tiles), Tiles>::value; }, m, Tiles::ASYNC);
    return same;
}

typedef struct {
    int part, HD;
    bool async, before;
    const char* tiles;
    void (*launch)(const Buffers* b, int B, int bytes);
    const void* kernel;
    int warps, bytes;
    int (*all_warps)(Multiprocessor m, bool async);
    bool (*chosen)(Multiprocessor m);
} Candidate;

// clang-format off
#define TILES(part, Type, List, launch, kernel, HD, ASYNC, before, ...) \
    {part, HD, ASYNC, before, #__VA_ARGS__, launch<Type<HD, __VA_ARGS__, ASYNC>>, \
     (const void*)kernel<Type<HD, __VA_ARGS__, ASYNC>, false>, Type<HD, __VA_ARGS__, ASYNC>::WARPS, \
     Type<HD, __VA_ARGS__, ASYNC>::SMEM, mma_warps<Type<HD, __VA_ARGS__, ASYNC>>, \
     is_chosen<Type<HD, __VA_ARGS__, ASYNC>, MmaTiles<HD>::List>}
#define FORWARD(...) TILES(PART_FORWARD, MmaForwardTiles, Forward, launch_forward, attention_forward_mma_kernel, __VA_ARGS__)
#define KV(...)      TILES(PART_KV, MmaKVTiles, BackwardKV, launch_kv, attention_backward_kv_mma_kernel, __VA_ARGS__)
#define Q(...)       TILES(PART_Q, MmaQTiles, BackwardQ, launch_q, attention_backward_q_mma_kernel, __VA_ARGS__)
static const Candidate candidates[] = {
    FORWARD(64, true, true, 64, 2, 4, 2),
    KV(64, true, true, 64, 32, 2, 4, 2), KV(64, true, false, 64, 32, 2, 8, 1), KV(64, true, false, 64, 32, 1, 8, 1),
    Q(64, true, true, 64, 32, 2, 4, 2), Q(64, true, false, 64, 32, 2, 8, 1), Q(64, true, false, 64, 32, 1, 8, 1),
    FORWARD(128, true, true, 32, 2, 4, 2),
    KV(128, true, true, 64, 64, 1, 4, 2), KV(128, true, false, 64, 64, 1, 8, 1), KV(128, true, false, 32, 32, 1, 8, 1),
    Q(128, true, true, 32, 32, 2, 4, 2), Q(128, true, false, 32, 32, 2, 8, 1), Q(128, true, false, 32, 32, 1, 8, 1),
    FORWARD(64, false, true, 64, 1, 4, 2), FORWARD(64, false, false, 64, 2, 4, 2),
    KV(64, false, true, 64, 32, 1, 4, 2), KV(64, false, false, 64, 32, 1, 8, 1),
    Q(64, false, true, 64, 32, 1, 4, 2),
    FORWARD(128, false, true, 32, 1, 4, 2),
    KV(128, false, true, 32, 32, 1, 4, 1),
    Q(128, false, true, 32, 32, 1, 4, 1),
};
// clang-format on

/* Returns the blocks of a candidate that a multiprocessor of this card holds. bytes: of dynamic shared memory */
static int blocks_of(const Candidate& c, int bytes) {
    int blocks = 0;
    CUDA_CHECK(cudaFuncSetAttribute(c.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, c.kernel, c.warps * 32, (size_t)bytes));
    return blocks;
}

/* Returns the bytes with which it holds at most so many. */
static int padded_bytes(const Candidate& c, int blocks) {
    const Multiprocessor m = mma_multiprocessor();
    return blocks_of(c, c.bytes) > blocks ? (m.shared / (blocks + 1) - m.reserved) / 128 * 128 + 128 : c.bytes;
}

/* Returns the candidates for this head dimension in the code that this card loaded. */
static std::vector<Candidate> candidates_of(int HD) {
    std::vector<Candidate> found;
    for (const Candidate& c : candidates) {
        if (c.HD == HD && c.async == mma_is_async()) { found.push_back(c); }
    }
    return found;
}

/* Allocates a shape's data, and computes out, lse and the statistics, which the backward kernels read. */
static Buffers prepare(const Shape& s) {
    Buffers b = allocate(&s);
    const Candidate forward = candidates_of(s.HD)[0];
    forward.launch(&b, s.B, forward.bytes);
    attention_stats((float2*)b.scratch, b.dout, b.out, b.lse, s.B, b.args, 0);
    return b;
}

/* Ends the program if a candidate and the kernel's first candidate give other bits. */
static void check_bits(int HD) {
    const Shape s = {{1, 777, 4, 2, HD}, ""};
    Buffers b = prepare(s);
    std::vector<char> want[NUM_PARTS];
    for (const Candidate& c : candidates_of(HD)) {
        const size_t pitch = c.part == PART_FORWARD ? b.args.out_pitch : b.args.qkv_pitch;
        std::vector<char> got((size_t)s.T * pitch * sizeof(floatX));
        floatX* result = c.part == PART_FORWARD ? b.out : b.dqkv;
        CUDA_CHECK(cudaMemset(result, 0xff, got.size()));
        c.launch(&b, s.B, c.bytes);
        CUDA_CHECK(cudaMemcpy(got.data(), result, got.size(), cudaMemcpyDeviceToHost));
        if (want[c.part].empty()) { want[c.part] = got; }
        if (got != want[c.part]) { die("%s, head_dim %d, tiles %s: other bits", part_names[c.part], HD, c.tiles); }
    }
    release(&b);
}

static void print_line(const Shape& s, const char* part, const char* tiles, int KB, int blocks, int warps, float ms,
                       const char* marks) {
    printf("%5d %3d %3d %3d %3d | %-10s | %-15s | %3d KB | %d x %d | %9.4f |%s\n", s.T, s.HD, s.B, s.NH, s.NKV, part, tiles, KB,
           blocks, warps, ms, marks);
    fflush(stdout);
}

/* Times one candidate as it is, and as on the other cards for which its code is meant. */
static void bench_candidate(const Candidate& c, const Shape& s, const Buffers& b) {
    std::map<int, float> ms;  // by bytes
    for (int capability : {90, 80, 86, 75}) {
        const Multiprocessor m = multiprocessor_of(capability);
        const int wanted = c.all_warps(m, c.async) / c.warps;
        const bool runs = c.async ? capability >= 80 : capability == 75 || capability == 90;
        if (!runs || wanted == 0) { continue; }
        const int bytes = capability == 90 ? c.bytes : padded_bytes(c, wanted);
        if (!ms.count(bytes)) {
            ms[bytes] = time_ms([&]() { c.launch(&b, s.B, bytes); });
        }
        const std::string marks = std::string(c.before ? " before" : "") + (c.chosen(m) ? " now" : "");
        print_line(s, part_names[c.part], c.tiles, m.shared >> 10, blocks_of(c, bytes), c.warps, ms[bytes], marks.c_str());
    }
}

int main() {
    cudaDeviceProp p;
    CUDA_CHECK(cudaGetDeviceProperties(&p, 0));
    const int shared = mma_multiprocessor().shared >> 10, wanted = multiprocessor_of(90).shared >> 10;
    if (shared < wanted) { die("bench_tiles needs %d KB of shared memory, but %s has %d", wanted, p.name, shared); }
    printf("%s, %s, code for sm_%d\n", p.name, PRECISION_NAME, compiled_arch(attention_stats_kernel<8, 8>));
    for (int HD : {64, 128}) { check_bits(HD); }
    for (const Shape& s : shapes) {
        if (s.document > 0 || (s.T == 1024 && s.NH == 12)) { continue; }  // a row length once
        Buffers b = prepare(s);
        const auto statistics = [&]() { attention_stats((float2*)b.scratch, b.dout, b.out, b.lse, s.B, b.args, 0); };
        print_line(s, "statistics", "-", 0, 0, 0, time_ms(statistics), "");
        for (const Candidate& c : candidates_of(s.HD)) { bench_candidate(c, s, b); }
        release(&b);
    }
    return 0;
}
