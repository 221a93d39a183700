/* bench_layers.c -- times every CPU layer, forward and backward, at the shapes of presets d4 and d6 with 4 x 256 tokens.
 *
 *   cc -std=c11 -ffp-contract=fast -O3 -march=native [-fopenmp] -I. dev/bench/bench_layers.c -o bench_layers -lm
 *   ./bench_layers [RUNS]
 *
 * Each figure is the fastest of RUNS runs (default 20). A product prints GFLOP/s, a pass over memory GB/s (every byte read and
 * written counted once). The last line adds up one training step.
 */
#include "llmc/optim/optimizer.h"
#include "llmc/attention.h"
#include "llmc/crossentropy.h"
#include "llmc/embedding.h"
#include "llmc/matmul.h"
#include "llmc/base/rand.h"
#include "llmc/rmsnorm.h"
#include "llmc/rope.h"
#include "llmc/swiglu.h"

static int runs = 20;
static double step_ms;

/* Runs STATEMENT and prints a line. `work`: FLOP or bytes of one run; `times`: how often a training step does it */
#define TIME(name, unit, work, times, STATEMENT)                                                          \
    do {                                                                                                  \
        double best = 1e30;                                                                               \
        for (int run = 0; run < runs; run++) {                                                            \
            const double start = now_seconds();                                                           \
            STATEMENT;                                                                                    \
            const double seconds = now_seconds() - start;                                                 \
            best = seconds < best ? seconds : best;                                                       \
        }                                                                                                 \
        printf("  %-28s %8.3f ms x %-3d %7.1f %s\n", name, best * 1e3, times, (work) / best / 1e9, unit); \
        step_ms += best * 1e3 * times;                                                                    \
    } while (0)

static float* normals(size_t n, double std, uint32_t id) {
    float* x = (float*)xmalloc((n + 1) * sizeof(float));
    rand_normal(x, 0, n, std, 1, id);
    return x;
}

/* Returns memory that begins at a cache line, as the trainer's does. */
static void* aligned(size_t bytes) {
    void* p = NULL;
    if (posix_memalign(&p, 64, bytes) != 0) { die("out of memory: could not allocate %zu bytes", bytes); }
    return p;
}

static void bench_product(const char* name, size_t N, int C, int OC, int times) {
    char line[64];
    float *x = normals(N * (size_t)C, 1, 1), *w = normals((size_t)OC * (size_t)C, 0.02, 2);
    float *y = normals(N * (size_t)OC, 1, 3), *dx = normals(N * (size_t)C, 1, 4), *dw = normals((size_t)OC * (size_t)C, 1, 5);
    void* scratch = aligned(matmul_scratch());
    const double flop = 2.0 * (double)N * C * OC;
    snprintf(line, sizeof line, "%s %dx%d", name, C, OC);
    TIME(line, "GFLOP/s", flop, times, matmul_forward(y, scratch, x, w, NULL, N, C, OC));
    TIME("  dx", "GFLOP/s", flop, times, matmul_backward_input(dx, scratch, y, w, N, C, OC));
    TIME("  dw", "GFLOP/s", flop, times, matmul_backward_weight(dw, scratch, y, x, N, C, OC));
    free(x), free(w), free(y), free(dx), free(dw), free(scratch);
}

static void bench(const char* preset, size_t B, int T, int V) {
    ModelConfig c;
    config_preset(&c, preset, V);
    const int C = c.hidden_size, F = c.intermediate_size, L = c.num_layers, NH = c.num_heads, NKV = c.num_kv_heads;
    const int HD = c.head_dim, Q = q_width(&c), QKV = qkv_width(&c);
    const size_t N = B * (size_t)T, n = N * (size_t)C;
    printf("%s: N %zu C %d heads %d/%d of %d F %d V %d, %d layers\n", preset, N, C, NH, NKV, HD, F, V, L);
    step_ms = 0;
    bench_product("qkv", N, C, QKV, L);
    bench_product("o", N, Q, C, L);
    bench_product("gate up", N, C, 2 * F, L);
    bench_product("down", N, F, C, L);
    bench_product("head", N, C, V, 1);
    const double products = step_ms, flop = 6.0 * (double)N * C * ((double)L * (QKV + Q + 3 * F) + V);
    printf("  products together            %8.3f ms       %7.1f GFLOP/s\n", products, flop / products / 1e6);

    float *qkv = normals(N * (size_t)QKV, 1, 1), *out = normals(N * (size_t)Q, 1, 2), *dqkv = normals(N * (size_t)QKV, 1, 3);
    float *lse = normals(N * (size_t)NH, 1, 4), *table = normals((size_t)(T * HD), 1, 5);
    const AttentionShape s = attention_shape(&c, (int)B, T);
    void* scratch = aligned(attention_backward_scratch(s));
    const double attention = 2.0 * (double)B * NH * HD * T * T;  // two products over half of T x T
    rope_table(table, T, &c);
    TIME("rope", "GB/s", 8.0 * (double)N * (Q + NKV * HD), L, rope_forward(qkv, NULL, table, 0, s));
    TIME("rope backward", "GB/s", 8.0 * (double)N * (Q + NKV * HD), L, rope_backward(qkv, NULL, table, 0, s));
    TIME("attention", "GFLOP/s", attention, L, attention_forward(out, lse, scratch, qkv, NULL, s));
    TIME("attention backward", "GFLOP/s", 2.5 * attention, L, attention_backward(dqkv, scratch, out, out, lse, qkv, NULL, s));
    TIME("attention, plain", "GFLOP/s", attention, 0, attention_forward_plain(out, lse, qkv, NULL, s));
    TIME("attention backward, plain", "GFLOP/s", 2.5 * attention, 0,
         attention_backward_plain(dqkv, out, out, lse, qkv, NULL, s));
    free(qkv), free(out), free(dqkv), free(lse), free(table), free(scratch);

    float *x = normals(n, 1, 1), *y = normals(n, 1, 2), *dx = normals(n, 1, 3), *w = normals((size_t)C, 1, 4);
    float *dw = normals((size_t)C, 1, 5), *rstd = normals(N, 1, 6);
    void* sums = xmalloc(rmsnorm_backward_scratch(N, C));
    TIME("rmsnorm", "GB/s", 8.0 * (double)n, 2 * L + 1, rmsnorm_forward(y, rstd, x, w, packed_rows(N, C), 1e-5f));
    TIME("rmsnorm backward", "GB/s", 16.0 * (double)n, 2 * L + 1,
         rmsnorm_backward(dx, dw, sums, y, x, w, rstd, packed_rows(N, C)));
    float *gate_up = normals(N * 2 * (size_t)F, 1, 1), *act = normals(N * (size_t)F, 1, 2),
          *dgate_up = normals(N * 2 * (size_t)F, 1, 3);
    TIME("swiglu", "GB/s", 12.0 * (double)N * F, L, swiglu_forward(act, gate_up, N, F));
    TIME("swiglu backward", "GB/s", 20.0 * (double)N * F, L, swiglu_backward(dgate_up, act, gate_up, N, F));
    free(gate_up), free(act), free(dgate_up);

    float *logits = normals(N * (size_t)V, 1, 1), *embedding = normals((size_t)V * (size_t)C, 1, 2);
    int32_t* tokens = (int32_t*)xmalloc(N * sizeof *tokens);
    for (size_t i = 0; i < N; i++) { tokens[i] = (int32_t)philox_below(1, RAND_SAMPLE, 0, i, (uint64_t)V); }
    TIME("cross-entropy", "GB/s", 8.0 * (double)N * V, 1, crossentropy_fused(rstd, logits, tokens, 1e-3f, N, V));
    TIME("embedding", "GB/s", 8.0 * (double)n, 1, embedding_forward(y, embedding, tokens, N, C));
    TIME("embedding backward", "GB/s", 12.0 * (double)n, 1, embedding_backward(embedding, y, tokens, N, C));
    free(x), free(y), free(dx), free(w), free(dw), free(rstd), free(sums), free(logits), free(embedding), free(tokens);

    ParamTable t = param_table(&c);
    const AdamW hyper = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f, 10};
    float *p = normals(t.elements, 0.02, 1), *g = normals(t.elements, 1, 2);
    float *m = (float*)xcalloc(t.elements, sizeof(float)), *v = (float*)xcalloc(t.elements, sizeof(float));
    void* parts = xmalloc(global_norm_scratch(t.elements));
    TIME("global norm", "GB/s", 4.0 * (double)t.elements, 1, (void)global_norm(g, t.elements, parts));
    TIME("adamw", "GB/s", 28.0 * (double)t.elements, 1, adamw_update(p, g, m, v, t.elements, &hyper));
    param_table_free(&t);
    free(p), free(g), free(m), free(v), free(parts);
    printf("  one step                     %8.3f ms, %.0f tokens/s, products %.0f %% of it\n\n", step_ms,
           (double)N / step_ms * 1e3, 100 * products / step_ms);
}

/* Times attention in one row of T tokens: undivided, and in documents of 500 tokens. */
static void bench_documents(int T) {
    ModelConfig c;
    config_preset(&c, "d4", 4096);
    const AttentionShape s = attention_shape(&c, 1, T);
    const size_t N = (size_t)T, Q = (size_t)q_width(&c), QKV = (size_t)qkv_width(&c);
    float *qkv = normals(N * QKV, 1, 1), *out = normals(N * Q, 1, 2), *dqkv = normals(N * QKV, 1, 3);
    float* lse = normals(N * (size_t)s.NH, 1, 4);
    int32_t* starts = (int32_t*)xmalloc(N * sizeof *starts);
    void* scratch = aligned(attention_backward_scratch(s));
    for (int t = 0; t < T; t++) { starts[t] = t - t % 500; }
    double pairs = 0;  // pairs of a query and a key that it sees, times two
    for (int t = 0; t < T; t++) { pairs += 2 * (t - starts[t] + 1); }
    const double flop = 2.0 * s.NH * s.HD, row = flop * T * T, documents = flop * pairs;
    printf("d4: a row of %d tokens, undivided and in documents of 500\n", T);
    TIME("attention", "GFLOP/s", row, 0, attention_forward(out, lse, scratch, qkv, NULL, s));
    TIME("attention backward", "GFLOP/s", 2.5 * row, 0, attention_backward(dqkv, scratch, out, out, lse, qkv, NULL, s));
    TIME("documents", "GFLOP/s", documents, 0, attention_forward(out, lse, scratch, qkv, starts, s));
    TIME("documents backward", "GFLOP/s", 2.5 * documents, 0, attention_backward(dqkv, scratch, out, out, lse, qkv, starts, s));
    free(qkv), free(out), free(dqkv), free(lse), free(starts), free(scratch);
}

int main(int argc, char** argv) {
    if (argc > 1) { runs = atoi(argv[1]); }
    bench("d4", 4, 256, 4096);
    bench("d6", 4, 256, 4096);
    bench_documents(8192);
    return 0;
}
