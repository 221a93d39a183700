/* bench_mma_walk.cu -- times attention's backward pass in one walk of mma.sync beside its two kernels, at head_dim 128, under
 * the load of a whole second, when a card has reached its limit of power. Turns: walk, two, eight, eight, two, walk. `eight`:
 * two kernels with the tiles of a card with 164 KB, a block of eight warps.
 *
 *   make build/bench_mma_walk_cu PTX_ONLY=80 PRECISION=BF16 && build/bench_mma_walk_cu
 */
#include <unistd.h>

#include "attention_timing.cuh"

static void print_clock(void) {
    FILE* p = popen("nvidia-smi --query-gpu=clocks.sm,power.draw --format=csv,noheader,nounits", "r");
    int clock = 0;
    float watts = 0;
    if (p && fscanf(p, "%d, %f", &clock, &watts) == 2) { printf(" [%d MHz %.0f W]", clock, watts); }
    if (p) { pclose(p); }
}
template <typename F>
static double sustained(F f, double seconds) {
    cudaEvent_t a, b;
    cudaEventCreate(&a);
    cudaEventCreate(&b);
    f();
    cudaDeviceSynchronize();
    cudaEventRecord(a);
    f();
    cudaEventRecord(b);
    cudaDeviceSynchronize();
    float ms;
    cudaEventElapsedTime(&ms, a, b);
    int n = (int)(seconds * 1000 / ms) + 1;
    for (int i = 0; i < n / 3; i++) f();
    cudaEventRecord(a);
    for (int i = 0; i < n; i++) f();
    cudaEventRecord(b);
    usleep(seconds * 0.9e6);
    print_clock();
    cudaDeviceSynchronize();
    cudaEventElapsedTime(&ms, a, b);
    return ms / n;
}
int main(void) {
    static const Shape all[] = {{{4, 2048, 32, 8, 128}, "8B"}, {{1, 8192, 32, 8, 128}, "8B"}, {{1, 16384, 32, 8, 128}, "8B"}};
    for (const Shape& s : all) {
        Buffers b = allocate(&s);
        attention_forward_by(ATTENTION_MMA, b.out, b.lse, b.qkv, s.B, b.args, 0);
        attention_stats((float2*)b.scratch, b.dout, b.out, b.lse, s.B, b.args, 0);
        float* sums = (float*)((float2*)b.scratch + (size_t)s.B * b.args.NH * b.args.stat_rows);
        auto walk = [&]() {
            attention_mma_walk_backward<128>(b.dqkv, sums, (const float2*)b.scratch, b.dout, b.qkv, s.B, b.args, 0);
        };
        auto two = [&]() { attention_mma_backward<128>(b.dqkv, (const float2*)b.scratch, b.dout, b.qkv, s.B, b.args, 0); };
        auto padded = [&]() {
            typedef MmaKVTiles<128, 64, 64, 1, 8, 1, true> K;
            typedef MmaQTiles<128, 32, 32, 2, 8, 1, true> Q;
            attention_mma_backward_kv<K>(b.dqkv, (const float2*)b.scratch, b.dout, b.qkv, s.B, b.args, 0);
            attention_mma_backward_q<Q>(b.dqkv, (const float2*)b.scratch, b.dout, b.qkv, s.B, b.args, 0);
        };
        double sec = 1.0;
        printf("%5d", s.T);
        double w = sustained(walk, sec), t = sustained(two, sec), p = sustained(padded, sec), p2 = sustained(padded, sec),
               t2 = sustained(two, sec), w2 = sustained(walk, sec);
        printf(" walk %.3f %.3f two %.3f %.3f eight %.3f %.3f  two/walk %.3f eight/walk %.3f\n", w, w2, t, t2, p, p2,
               (t + t2) / (w + w2), (p + p2) / (w + w2));
        release(&b);
    }
}
