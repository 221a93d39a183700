/* test_llama3.cu -- parity of the trainers with PyTorch.
 *
 *   ./test_llama3   [MODEL_DIR STATE_FILE]    the CPU trainer (this file compiled as C)
 *   ./test_llama3cu [MODEL_DIR STATE_FILE]    both trainers  (this file compiled as C and as CUDA, and linked)
 *
 * A debug state, written by train_llama3.py, holds one batch and what PyTorch made of it: logits, loss, the gradient of
 * every parameter, and the losses and gradient norms of N AdamW steps on that batch. The trainers' own code computes the
 * same: their sources are included here with main left out. Prints a line a tensor; exit 0 if all agree, else 1.
 * Without arguments it checks every pair committed under dev/test/pairs.
 *
 * Tolerances (fp32): logits 1e-4 absolute; each gradient 1e-4 of its own largest element; every loss 1e-4; norms 1e-4 of
 * max(norm, first norm). 16-bit: see check_gradient_16bit() and step_limit_16bit().
 */
#define TESTING  // leaves the trainers' main out

/* What is tested of a trainer. All arrays are host memory, fp32. */
#ifdef __cplusplus
extern "C" {
#endif
typedef struct {
    const char* name;
    int bits;                                                      // of the arithmetic: 32, or 16
    int bf16;                                                      // which of the 16
    void* (*open)(const char* model_dir, int B, int T);            // a model with the folder's weights
    void (*logits)(void* model, const int* x, float* out);         // (B, T, V)
    double (*gradients)(void* model, const int* x, const int* y);  // from zero; returns the mean loss
    void (*gradient)(void* model, const char* name, float* out);   // one parameter's, after gradients()
    double (*step)(void* model, const int* x, const int* y, const float* hyper, int step, double* norm);  // returns the loss
    void (*close)(void* model);
} TestedTrainer;
enum { HYPER_LR, HYPER_BETA1, HYPER_BETA2, HYPER_EPS, HYPER_WEIGHT_DECAY, HYPER_GRAD_CLIP, NUM_HYPER };

extern const TestedTrainer tested_cpu;
#ifdef __cplusplus
}
#endif

#ifndef __CUDACC__
// ---------------------------------------------------------------------------------------------------------------------
// the CPU trainer

#include "train_llama3.c"

static void* cpu_open(const char* dir, int B, int T) {
    ModelConfig config;
    Error e = NO_ERROR;
    if (!model_check(dir, &config, &e)) { die("%s", e.msg); }
    Llama* m = (Llama*)xmalloc(sizeof *m);
    *m = llama_create(&config, B, T, true, 0);
    if (!model_load(dir, &config, &m->table, store_tensor, m->params, &e)) { die("%s", e.msg); }
    return m;
}

static void cpu_logits(void* model, const int* x, float* out) {
    Llama* m = (Llama*)model;
    llama_forward(m, x);
    matmul_forward(out, m->norm_final, m->params + param_offset(&m->table, P_LM_HEAD, -1), NULL, (size_t)m->B * m->T,
                   m->config.hidden_size, m->config.vocab_size);
}

static double cpu_gradients(void* model, const int* x, const int* y) {
    Llama* m = (Llama*)model;
    llama_zero_gradients(m);
    llama_forward(m, x);
    double loss = llama_loss(m, y, 1.0f / ((float)m->B * (float)m->T));
    llama_backward(m, x);
    return loss;
}

static void cpu_gradient(void* model, const char* name, float* out) {
    Llama* m = (Llama*)model;
    for (int i = 0; i < m->table.count; i++) {
        const Param* p = &m->table.items[i];
        if (strcmp(p->name, name) == 0) { memcpy(out, m->grads + p->offset, param_size(p) * sizeof(float)); }
    }
}

static double cpu_step(void* model, const int* x, const int* y, const float* hyper, int step, double* norm) {
    Llama* m = (Llama*)model;
    double loss = cpu_gradients(m, x, y);
    *norm = global_norm(m->grads, m->table.elements, m->norm_scratch);
    AdamW a;
    a.lr = hyper[HYPER_LR];
    a.beta1 = hyper[HYPER_BETA1];
    a.beta2 = hyper[HYPER_BETA2];
    a.eps = hyper[HYPER_EPS];
    a.weight_decay = hyper[HYPER_WEIGHT_DECAY];
    a.grad_scale = clip_factor(*norm, hyper[HYPER_GRAD_CLIP]);
    a.step = step;
    llama_update(m, a);
    return loss;
}

static void cpu_close(void* model) {
    llama_free((Llama*)model);
    free(model);
}

const TestedTrainer tested_cpu = {"CPU fp32",    32,           false,    cpu_open, cpu_logits,
                                  cpu_gradients, cpu_gradient, cpu_step, cpu_close};

#endif

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------------------
// the CUDA trainer

#include "train_llama3.cu"

/* What may vary without changing what is computed: each variant is tested on every pair. */
typedef struct {
    const char* name;
    Recompute level;
    bool fp32_grads;
    MasterKind master;
    bool bf16_moments;
    int fill;  // byte that activations, workspace and gradients hold before the first run
} Variant;

static const Variant variants[] = {
#ifdef PRECISION_FP32
    {"GPU FP32", RECOMPUTE_NONE, true, MASTER_NONE, false, 0xFF},
    {"GPU FP32, recompute norm+swiglu", RECOMPUTE_NORM_SWIGLU, true, MASTER_NONE, false, 0x7F},
    {"GPU FP32, recompute ffn", RECOMPUTE_FFN, true, MASTER_NONE, false, 0xFF},
    {"GPU FP32, recompute block", RECOMPUTE_BLOCK, true, MASTER_NONE, false, 0xFF},
#else
    {"GPU " PRECISION_NAME, RECOMPUTE_NONE, false, MASTER_FP32, false, 0xFF},
    {"GPU " PRECISION_NAME ", recompute norm+swiglu, fp32 gradients", RECOMPUTE_NORM_SWIGLU, true, MASTER_FP32, false, 0x7F},
#ifdef PRECISION_BF16
    {"GPU " PRECISION_NAME ", recompute ffn, split master", RECOMPUTE_FFN, false, MASTER_SPLIT, false, 0xFF},
#endif
    {"GPU " PRECISION_NAME ", recompute block, bf16 moments", RECOMPUTE_BLOCK, false, MASTER_FP32, true, 0xFF},
#endif
};
static const Variant* variant = &variants[0];  // the one under test

/* What memory holds before a run. compute-sanitizer's initcheck knows only memory that nothing was written to: with the
 * environment variable NO_FILL it is left alone. */
static int fill_of(int fill) { return getenv("NO_FILL") ? NO_FILL : fill; }

/* The same for gradients, whose arena must be zero between its tensors: a step has to overwrite them. */
static void fill_gradients(Llama* m, int fill) {
    if (fill_of(fill) == NO_FILL) { return; }
    CUDA_CHECK(cudaMemset(m->norm_grads, fill, norm_grads_size(&m->config) * sizeof(float)));
    for (int i = 0; i < m->table.count; i++) {
        const Param* p = &m->table.items[i];
        if (param_specs[p->kind].matrix) {
            CUDA_CHECK(cudaMemset(grad_at(m, p->kind, p->layer), fill, param_size(p) * grad_bytes(&m->layout)));
        }
    }
    CUDA_CHECK(cudaDeviceSynchronize());
}

/* Large enough that a small gradient of a 16-bit build is no denormal; the test divides by it. */
static const float test_loss_scale = sizeof(floatX) == 2 && !std::is_same<floatX, __nv_bfloat16>::value ? 1024.0f : 1.0f;

static MatmulContext* test_matmul(void) {
    static MatmulContext* context = matmul_create(NULL, false);
    return context;
}

static void* cuda_open(const char* dir, int B, int T) {
    ModelConfig config;
    Layout layout;
    Error e = NO_ERROR;
    if (!model_check(dir, &config, &e)) { die("%s", e.msg); }
    memset(&layout, 0, sizeof layout);
    layout.B = B;
    layout.T = T;
    layout.train = true;
    layout.level = variant->level;
    layout.fp32_grads = variant->fp32_grads;
    layout.master = variant->master;
    layout.bf16_moments = variant->bf16_moments;
    Llama* m = (Llama*)xmalloc(sizeof *m);
    *m = llama_create(&config, &layout, test_matmul(), fill_of(variant->fill));
    fill_gradients(m, variant->fill);
    if (!model_load(dir, &config, &m->table, store_weights, m, &e)) { die("%s", e.msg); }
    StepState state;
    memset(&state, 0, sizeof state);
    state.loss_scale = test_loss_scale;
    copy_in(m, m->state, &state, sizeof state);
    return m;
}

static void cuda_tokens(Llama* m, const int* x, const int* y) {
    const size_t bytes = (size_t)m->layout.B * m->layout.T * sizeof(int32_t);
    copy_in(m, m->x, x, bytes);
    if (y) { copy_in(m, m->y, y, bytes); }
}

static void cuda_logits(void* model, const int* x, float* out) {
    Llama* m = (Llama*)model;
    const size_t N = (size_t)m->layout.B * m->layout.T, V = m->config.vocab_size, pitch = m->pitch.V;
    cuda_tokens(m, x, NULL);
    llama_forward(m);
    floatX* logits;  // the program itself never holds all of them
    CUDA_CHECK(cudaMalloc(&logits, N * pitch * sizeof(floatX)));
    linear(m, "head", logits, m->norm_final, m->params + param_offset(&m->table, P_LM_HEAD, -1), NULL, N, m->config.hidden_size,
           (int)V, m->pitch.C, pitch);
    floatX* host = (floatX*)xmalloc(N * pitch * sizeof(floatX));
    CUDA_CHECK(cudaStreamSynchronize(m->stream));
    CUDA_CHECK(cudaMemcpy(host, logits, N * pitch * sizeof(floatX), cudaMemcpyDeviceToHost));
    for (size_t n = 0; n < N; n++) {
        for (size_t v = 0; v < V; v++) { out[n * V + v] = to_float(host[n * pitch + v]); }
    }
    CUDA_CHECK(cudaFree(logits));
    free(host);
}

static double cuda_read_loss(Llama* m) {
    StepState state;
    CUDA_CHECK(cudaStreamSynchronize(m->stream));
    CUDA_CHECK(cudaMemcpy(&state, m->state, sizeof state, cudaMemcpyDeviceToHost));
    return state.loss_sum / ((double)m->layout.B * m->layout.T);
}

static double cuda_gradients(void* model, const int* x, const int* y) {
    Llama* m = (Llama*)model;
    cuda_tokens(m, x, y);
    step_begin_cuda(m->state, 0, 0.0, m->stream);
    llama_micro_step(m, 1.0f / ((float)m->layout.B * (float)m->layout.T), true);
    return cuda_read_loss(m);
}

static void cuda_gradient(void* model, const char* name, float* out) {
    Llama* m = (Llama*)model;
    for (int i = 0; i < m->table.count; i++) {
        const Param* p = &m->table.items[i];
        const size_t n = param_size(p);
        if (strcmp(p->name, name) != 0) { continue; }
        if (!param_specs[p->kind].matrix) {
            CUDA_CHECK(cudaMemcpy(out, norm_grad_at(m, p->kind, p->layer), n * sizeof(float), cudaMemcpyDeviceToHost));
        } else if (m->layout.fp32_grads) {
            CUDA_CHECK(cudaMemcpy(out, (float*)m->grads + p->offset, n * sizeof(float), cudaMemcpyDeviceToHost));
        } else {
            floatX* host = (floatX*)xmalloc(n * sizeof(floatX));
            CUDA_CHECK(cudaMemcpy(host, (floatX*)m->grads + p->offset, n * sizeof(floatX), cudaMemcpyDeviceToHost));
            for (size_t k = 0; k < n; k++) { out[k] = to_float(host[k]); }
            free(host);
        }
        for (size_t k = 0; k < n; k++) { out[k] /= test_loss_scale; }
    }
}

static double cuda_step(void* model, const int* x, const int* y, const float* hyper, int step, double* norm) {
    Llama* m = (Llama*)model;
    StepHyper h;
    StepState state;
    memset(&h, 0, sizeof h);
    h.beta1 = hyper[HYPER_BETA1];
    h.beta2 = hyper[HYPER_BETA2];
    h.eps = hyper[HYPER_EPS];
    h.weight_decay = hyper[HYPER_WEIGHT_DECAY];
    h.grad_clip = hyper[HYPER_GRAD_CLIP];
    h.loss_weight = 1.0 / ((double)m->layout.B * m->layout.T);
    cuda_tokens(m, x, y);
    step_begin_cuda(m->state, step, hyper[HYPER_LR], m->stream);
    llama_micro_step(m, (float)h.loss_weight, true);
    llama_update(m, &h, 0);
    CUDA_CHECK(cudaStreamSynchronize(m->stream));
    CUDA_CHECK(cudaMemcpy(&state, m->state, sizeof state, cudaMemcpyDeviceToHost));
    *norm = state.norm;
    return state.loss;
}

static void cuda_close(void* model) {
    llama_free((Llama*)model);
    free(model);
}

static TestedTrainer tested_variant(int i) {
    const int bits = 8 * (int)sizeof(floatX);
    const bool bf16 = std::is_same<floatX, __nv_bfloat16>::value;
    const TestedTrainer t = {variants[i].name, bits,          bf16,      cuda_open, cuda_logits,
                             cuda_gradients,   cuda_gradient, cuda_step, cuda_close};
    return t;
}

// ---------------------------------------------------------------------------------------------------------------------
// what needs no PyTorch: steps on seeded random tokens, compared with themselves

typedef struct {
    const char* config;  // a preset
    int vocab_size;
    Layout layout;
    int accumulate;  // micro-batches of layout.B rows
    int steps;
    int fill;   // byte that activations, workspace and gradients hold at first
    bool busy;  // another stream copies memory all the time
} Trial;

typedef struct {
    double loss, norm;  // of the last step
    uint64_t hash;      // of the bits of weights, master, m and v
} Outcome;

static uint64_t hash_device(uint64_t hash, const void* device, size_t bytes) {
    uint64_t* host = (uint64_t*)xcalloc(ceil_div(bytes, 8), 8);
    CUDA_CHECK(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < ceil_div(bytes, 8); i++) { hash = (hash ^ host[i]) * 0x9E3779B97F4A7C15ull + (hash >> 29); }
    free(host);
    return hash;
}

/* Runs a trial; without `hash` only its loss and norm are read back. */
static Outcome run_trial(const Trial* trial, bool hash = true) {
    ModelConfig config;
    if (!config_preset(&config, trial->config, trial->vocab_size)) { die("%s: is no preset", trial->config); }
    Llama model = llama_create(&config, &trial->layout, test_matmul(), fill_of(trial->fill)), *m = &model;
    fill_gradients(m, trial->fill);
    llama_init(m, 1);
    const size_t N = (size_t)m->layout.B * m->layout.T, tokens = N * trial->accumulate;
    int32_t* x = (int32_t*)xmalloc(tokens * sizeof(int32_t));
    int32_t* y = (int32_t*)xmalloc(tokens * sizeof(int32_t));
    StepState state;
    StepHyper h;
    memset(&state, 0, sizeof state);
    memset(&h, 0, sizeof h);
    state.loss_scale = test_loss_scale;
    copy_in(m, m->state, &state, sizeof state);
    h.beta1 = 0.9;
    h.beta2 = 0.95;
    h.eps = 1e-8;
    h.weight_decay = 0.1;
    h.grad_clip = 1.0;
    h.loss_weight = 1.0 / (double)tokens;
    char* noise = NULL;
    cudaStream_t noise_stream = NULL;
    const size_t noise_bytes = (size_t)256 << 20;
    if (trial->busy) {
        CUDA_CHECK(cudaMalloc(&noise, 2 * noise_bytes));
        CUDA_CHECK(cudaStreamCreateWithFlags(&noise_stream, cudaStreamNonBlocking));
    }
    for (int step = 0; step < trial->steps; step++) {
        for (size_t i = 0; i < tokens; i++) {
            const Philox r = philox(7, RAND_SAMPLE, (uint32_t)step, i);
            x[i] = (int32_t)(r.v[0] % (uint32_t)config.vocab_size);
            y[i] = (int32_t)(r.v[1] % (uint32_t)config.vocab_size);
        }
        step_begin_cuda(m->state, step, 1e-3, m->stream);
        for (int k = 0; k < trial->accumulate; k++) {
            if (trial->busy) {
                for (int i = 0; i < 20; i++) {
                    CUDA_CHECK(
                        cudaMemcpyAsync(noise, noise + noise_bytes, noise_bytes, cudaMemcpyDeviceToDevice, noise_stream));
                }
            }
            CUDA_CHECK(cudaStreamSynchronize(m->stream));
            cuda_tokens(m, x + k * N, y + k * N);
            llama_micro_step(m, (float)h.loss_weight, k == 0);
        }
        llama_update(m, &h, 1);
    }
    Outcome o;
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemcpy(&state, m->state, sizeof state, cudaMemcpyDeviceToHost));
    o.loss = state.loss;
    o.norm = state.norm;
    o.hash = 0;
    if (hash) {
        o.hash = hash_device(1, m->params, m->table.elements * sizeof(floatX));
        if (m->layout.master == MASTER_FP32) { o.hash = hash_device(o.hash, m->master, m->table.elements * 4); }
        o.hash = hash_device(o.hash, m->m, m->table.elements * (m->layout.bf16_moments ? 2 : 4));
        o.hash = hash_device(o.hash, m->v, m->table.elements * (m->layout.bf16_moments ? 2 : 4));
    }
    if (trial->busy) {
        CUDA_CHECK(cudaFree(noise));
        CUDA_CHECK(cudaStreamDestroy(noise_stream));
    }
    free(x);
    free(y);
    llama_free(m);
    return o;
}

static Trial trial_of(const char* config, int V, int B, int T, int accumulate, int steps) {
    Trial t;
    memset(&t, 0, sizeof t);
    t.config = config;
    t.vocab_size = V;
    t.layout.B = B;
    t.layout.T = T;
    t.layout.train = true;
    t.layout.fp32_grads = sizeof(floatX) == 4;
    t.layout.master = sizeof(floatX) == 4 ? MASTER_NONE : MASTER_FP32;
    t.accumulate = accumulate;
    t.steps = steps;
    return t;
}

static bool report_trial(bool ok, const char* what, const Outcome* a, const Outcome* b) {
    printf("%s %s: loss %.7f and %.7f, norm %.7f and %.7f, hash %016llx and %016llx\n", ok ? "ok  " : "FAIL", what, a->loss,
           b->loss, a->norm, b->norm, (unsigned long long)a->hash, (unsigned long long)b->hash);
    fflush(stdout);
    return ok;
}

/* Two ways to cut the same tokens into micro-batches: the same loss and norm. */
static bool same_step(const char* what, const Trial* whole, const Trial* parts) {
    const double limit = sizeof(floatX) == 4 ? 1e-5 : 1e-2;
    const Outcome a = run_trial(whole, false), b = run_trial(parts, false);
    return report_trial(fabs(a.loss - b.loss) <= limit * a.loss && fabs(a.norm - b.norm) <= limit * a.norm, what, &a, &b);
}

/* Tests of the GPU trainer alone; adds to the counts. */
static void check_alone(int* passed, int* failed, int* skipped) {
    Trial base = trial_of("d3", 1000, 8, 1000, 1, 20), t = base;
    base.fill = 0x00;
    const Outcome first = run_trial(&base);
    struct {
        const char* what;
        Trial trial;
    } same[7];
    int count = 0;
    same[count].what = "20 steps twice give the same bits";
    same[count++].trial = t;
    t.fill = 0xFF;
    same[count].what = "what memory held before does not show (0xFF)";
    same[count++].trial = t;
    t.fill = 0x7B;
    t.busy = true;
    same[count].what = "work on another stream does not show (0x7B)";
    same[count++].trial = t;
    for (int level = RECOMPUTE_NORM_SWIGLU; level <= RECOMPUTE_BLOCK; level++) {
        static const char* const names[] = {"", "recompute norm+swiglu gives the same bits",
                                            "recompute ffn gives the same bits", "recompute block gives the same bits"};
        t = base;
        t.layout.level = (Recompute)level;
        same[count].what = names[level];
        same[count++].trial = t;
    }
    for (int i = 0; i < count; i++) {
        const Outcome again = run_trial(&same[i].trial);
        *(report_trial(again.hash == first.hash, same[i].what, &first, &again) ? passed : failed) += 1;
    }
    Trial several = trial_of("d3", 1000, 2, 1000, 4, 5);
    several.fill = 0xFF;
    const Outcome kept = run_trial(&several);
    several.layout.level = RECOMPUTE_BLOCK;
    const Outcome recomputed = run_trial(&several);
    *(report_trial(recomputed.hash == kept.hash, "recompute block in 4 micro-batches gives the same bits", &kept, &recomputed)
          ? passed
          : failed) += 1;
    // in fp32, so that the mechanism is compared, and in the gradients' own type, which rounds after each micro-batch
    for (int own = 0; own <= (sizeof(floatX) == 2); own++) {
        Trial whole = trial_of("d2", 1000, 32, 256, 1, 2), parts = trial_of("d2", 1000, 1, 256, 32, 2);
        whole.layout.fp32_grads = parts.layout.fp32_grads = !own;
        *(same_step(own ? "32 micro-batches of 1 are one of 32, 16-bit gradients" : "32 micro-batches of 1 are one of 32",
                    &whole, &parts)
              ? passed
              : failed) += 1;
    }
    // what passes 2^31: rows of gate and up are 2F = 512 wide and those of the logits 1000; the other model has 3.2e9 weights
    struct {
        const char* what;
        Trial whole, parts;
        size_t bytes;
    } wide[] = {{"5 million tokens at once (B T 2F and B T V past 2^31) are four times a quarter",
                 trial_of("d1", 1000, 5120, 1024, 1, 1), trial_of("d1", 1000, 1280, 1024, 4, 1), (size_t)100 << 30},
                {"3.2e9 weights, gradients and moments: 4 rows at once are one after the other",
                 trial_of("llama3.2-3b", 0, 4, 64, 1, 1), trial_of("llama3.2-3b", 0, 1, 64, 4, 1), (size_t)75 << 30}};
    for (auto& w : wide) {
        size_t free_bytes = 0, total = 0;
        CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total));
        if (free_bytes < w.bytes) {
            printf("skip %s: needs %zu GiB of GPU memory\n", w.what, w.bytes >> 30);
            *skipped += 1;
            continue;
        }
        w.whole.layout.fp32_grads = w.parts.layout.fp32_grads = true;
        *(same_step(w.what, &w.whole, &w.parts) ? passed : failed) += 1;
    }
}

#endif

#if defined(__CUDACC__) || !defined(TEST_CPU_HALF)
// ---------------------------------------------------------------------------------------------------------------------
// the comparison

#include <dirent.h>

typedef struct {
    const char* path;
    SafeTensors st;
    int failures;
    int unjudged;  // 16-bit steps for which the state holds no yardstick
    int bits;      // of the trainer under test
    bool bf16;     // and their format
} State;

/* A tensor of the state in fp32; dies where it is missing or not of `count` elements. */
static float* state_tensor(State* s, const char* name, size_t count) {
    Error e = NO_ERROR;
    const SafeTensor* t = safetensors_find(&s->st, name);
    if (!t) { die("%s: tensor %s is missing", s->path, name); }
    if (t->count != count) { die("%s: tensor %s has %zu elements, wanted %zu", s->path, name, (size_t)t->count, count); }
    float* out = (float*)xmalloc(count * sizeof(float));
    if (!safetensors_read_f32(&s->st, t, 0, count, out, &e)) { die("%s", e.msg); }
    return out;
}

/* A number of the state's __metadata__. */
static float state_number(State* s, const char* key) {
    const char* text = safetensors_metadata(&s->st, key);
    char* end = NULL;
    double value = text ? strtod(text, &end) : 0;
    if (!text || end == text || *end) {
        die("%s: __metadata__.%s is %s, wanted a number", s->path, key, text ? text : "missing");
    }
    return (float)value;
}

static void report(State* s, bool ok, const char* name, const char* unit, double error, double limit) {
    printf("  %s %-50s %s %.3g (limit %.3g)\n", ok ? "ok  " : "FAIL", name, unit, error, limit);
    s->failures += !ok;
}

/* Largest absolute difference relative to `scale`. NaN anywhere fails: it is not <= the limit. */
static void check_close(State* s, const char* name, const float* got, const float* want, size_t n, double scale, double limit) {
    double worst = 0;
    for (size_t i = 0; i < n; i++) {
        double diff = fabs((double)got[i] - (double)want[i]) / scale;
        if (!(diff <= worst)) { worst = diff; }
        if (worst != worst) { break; }
    }
    report(s, worst <= limit, name, scale == 1.0 ? "abs" : "rel", worst, limit);
}

static double l2_norm(const float* a, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) { sum += (double)a[i] * a[i]; }
    return sqrt(sum);
}

/* The key under which the state's metadata carry PyTorch's own 16-bit error of a tensor, of the losses or of the norms. */
static const char* error_key(const State* s, const char* name, char* key, size_t size) {
    snprintf(key, size, "%s_error.%s", s->bf16 ? "bf16" : "fp16", name);
    return key;
}

/* What a gradient may be off in 16 bits: 2 %, or 1.5 times PyTorch's own error. */
static double limit_16bit(State* s, const char* name) {
    char key[96];
    error_key(s, name, key, sizeof key);
    return safetensors_metadata(&s->st, key) ? fmax(0.02, 1.5 * state_number(s, key)) : 0.02;
}

/* What the loss or the norm of 16-bit step `step` (from 1) may be off, relative: at the first step 1 %, later also 3 times
 * the largest error of PyTorch's own 16-bit runs up to that step, since rounding grows from step to step. INFINITY where the
 * state does not tell that error: nothing can be said of the step then. */
static double step_limit_16bit(State* s, const char* name, int step) {
    char key[96];
    const char* text = safetensors_metadata(&s->st, error_key(s, name, key, sizeof key));
    if (step == 1) { return 0.01; }
    if (!text) { return INFINITY; }
    double error = 0;
    for (int i = 0; i < step; i++) {
        char* end;
        error = strtod(text, &end);
        if (end == text || !(error >= 0)) { die("%s: __metadata__.%s has no number for step %d", s->path, key, i + 1); }
        text = end;
    }
    return fmax(0.01, 3 * error);
}

static void check_l2(State* s, const char* name, const float* got, const float* want, size_t n, double limit) {
    double diff = 0;
    for (size_t i = 0; i < n; i++) { diff += ((double)got[i] - want[i]) * ((double)got[i] - want[i]); }
    diff = sqrt(diff) / l2_norm(want, n);
    report(s, diff <= limit, name, "L2 ", diff, limit);
}

/* 16-bit arithmetic: relative L2 error as above, and the norm within 1 %. Cosine alone would be blind to scale. */
static void check_gradient_16bit(State* s, const char* name, const float* got, const float* want, size_t n) {
    const double off = fabs(l2_norm(got, n) / l2_norm(want, n) - 1);
    check_l2(s, name, got, want, n, limit_16bit(s, name));
    if (!(off <= 0.01)) { report(s, false, name, "norm off by", off, 0.01); }
}

static void check_gradient(State* s, const char* name, const float* got, const float* want, size_t n) {
    double largest = 0;
    for (size_t i = 0; i < n; i++) { largest = fmax(largest, fabs((double)want[i])); }
    if (s->bits == 16 && largest > 0) {
        check_gradient_16bit(s, name, got, want, n);
        return;
    }
    // all zero: that of q and k at T = 1, where only rounding is left
    check_close(s, name, got, want, n, largest > 0 ? largest : 1.0, 1e-4);
}

/* The loss or the norm of one AdamW step (from 1); `limit` is that of fp32, absolute. */
static void check_step(State* s, const char* name, const char* what, int step, double got, double want, double limit) {
    char label[64];
    if (s->bits == 16) { limit = step_limit_16bit(s, name, step) * want; }
    if (isinf(limit) && isfinite(got)) {
        s->unjudged++;
        return;
    }
    snprintf(label, sizeof label, "%s at step %d", what, step);
    report(s, fabs(got - want) <= limit, label, "abs", fabs(got - want), limit);
}

/* Every gradient tensor of the state belongs to a parameter; the reverse is checked by state_tensor(). */
static void check_no_extra_gradients(State* s, const ParamTable* table) {
    for (size_t i = 0; i < s->st.count; i++) {
        const char* name = s->st.tensors[i].name;
        if (strncmp(name, "grad.", 5) != 0) { continue; }
        bool known = false;
        for (int k = 0; k < table->count && !known; k++) { known = strcmp(table->items[k].name, name + 5) == 0; }
        if (!known) { report(s, false, name, "the model has no such parameter", 1, 0); }
    }
}

/* One pair on one trainer; returns the number of comparisons that failed. */
static int check_pair(const TestedTrainer* trainer, const char* model_dir, const char* state_path) {
    Error e = NO_ERROR;
    State s;
    ModelConfig config;
    memset(&s, 0, sizeof s);
    s.path = state_path;
    s.bits = trainer->bits;
    s.bf16 = trainer->bf16;
    if (!model_check(model_dir, &config, &e) || !safetensors_open(&s.st, state_path, &e)) { die("%s", e.msg); }
    const SafeTensor* shape = safetensors_find(&s.st, "x");
    if (!shape || shape->ndim != 2 || shape->dtype != SAFE_I32) {
        die("%s: tensor x is missing or not I32 (B, T)", state_path);
    }
    const int B = (int)shape->shape[0], T = (int)shape->shape[1], V = config.vocab_size;
    const size_t N = (size_t)B * T;
    printf("%s: %s, %s\n", trainer->name, model_dir, state_path);

    int32_t* x = (int32_t*)xmalloc(N * sizeof(int32_t));
    int32_t* y = (int32_t*)xmalloc(N * sizeof(int32_t));
    const SafeTensor* targets = safetensors_find(&s.st, "y");
    if (!targets || targets->count != N || targets->dtype != SAFE_I32) {
        die("%s: tensor y is missing or not I32 (B, T)", state_path);
    }
    if (!safetensors_read_raw(&s.st, shape, 0, N, x, &e) || !safetensors_read_raw(&s.st, targets, 0, N, y, &e)) {
        die("%s", e.msg);
    }
    for (size_t i = 0; i < N; i++) {
        if (x[i] < 0 || x[i] >= V || y[i] < 0 || y[i] >= V) {
            die("%s: a token is outside of the vocabulary of %d", state_path, V);
        }
    }
    void* model = trainer->open(model_dir, B, T);
    ParamTable table = param_table(&config);

    float* want = state_tensor(&s, "logits", N * V);
    float* got = (float*)xmalloc(N * V * sizeof(float));
    memset(got, 0xFF, N * V * sizeof(float));  // NaN: what is not written fails
    trainer->logits(model, x, got);
    if (s.bits == 16) {
        check_l2(&s, "logits", got, want, N * V, 0.02);
    } else {
        check_close(&s, "logits", got, want, N * V, 1.0, 1e-4);
    }
    free(want);
    free(got);

    want = state_tensor(&s, "loss", 1);
    const double loss_limit = s.bits == 16 ? 1e-2 * want[0] : 1e-4;
    double loss = trainer->gradients(model, x, y);
    report(&s, fabs(loss - want[0]) <= loss_limit, "loss", "abs", fabs(loss - want[0]), loss_limit);
    free(want);
    for (int i = 0; i < table.count; i++) {
        const Param* p = &table.items[i];
        char key[96];
        snprintf(key, sizeof key, "grad.%s", p->name);
        want = state_tensor(&s, key, param_size(p));
        got = (float*)xmalloc(param_size(p) * sizeof(float));
        memset(got, 0xFF, param_size(p) * sizeof(float));
        trainer->gradient(model, p->name, got);
        check_gradient(&s, p->name, got, want, param_size(p));
        free(want);
        free(got);
    }
    check_no_extra_gradients(&s, &table);

    const int steps = (int)state_number(&s, "steps");
    static const char* keys[NUM_HYPER] = {"learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip"};
    float hyper[NUM_HYPER];
    for (int i = 0; i < NUM_HYPER; i++) { hyper[i] = state_number(&s, keys[i]); }
    float* losses = state_tensor(&s, "losses", steps);
    float* norms = state_tensor(&s, "grad_norms", steps);
    for (int i = 0; i < steps; i++) {
        double norm = 0;
        loss = trainer->step(model, x, y, hyper, i + 1, &norm);
        check_step(&s, "losses", "loss", i + 1, loss, losses[i], 1e-4);
        check_step(&s, "grad_norms", "gradient norm", i + 1, norm, norms[i], 1e-4 * fmax(norms[i], norms[0]));
    }
    if (s.unjudged > 0) {
        printf(
            "  note: 16-bit steps from 2 on are not judged: the state lacks PyTorch's own errors, %s_error.losses and "
            "%s_error.grad_norms\n",
            s.bf16 ? "bf16" : "fp16", s.bf16 ? "bf16" : "fp16");
    }
    free(losses);
    free(norms);
    free(x);
    free(y);
    trainer->close(model);
    param_table_free(&table);
    safetensors_close(&s.st);
    return s.failures;
}

static int compare_names(const void* a, const void* b) { return strcmp(*(char* const*)a, *(char* const*)b); }

/* The names of the committed pairs: the folders of `dir`, sorted. */
static int list_pairs(const char* dir, char** names, int max) {
    DIR* d = opendir(dir);
    if (!d) {
        die("%s: cannot open the folder of the committed pairs: %s\n  hint: run from the project's root", dir, strerror(errno));
    }
    int count = 0;
    for (struct dirent* entry = readdir(d); entry && count < max; entry = readdir(d)) {
        char path[PATH_CAP];
        Error e = NO_ERROR;
        if (entry->d_name[0] == '.' || !path_join(path, dir, entry->d_name, &e) || !is_directory(path)) { continue; }
        names[count++] = xstrdup(entry->d_name);
    }
    closedir(d);
    qsort(names, count, sizeof *names, compare_names);
    return count;
}

enum { MAX_TRAINERS = 8 };

/* The trainers of this program: the CPU's, and the GPU's in each variant. */
static int list_trainers(TestedTrainer* trainers) {
    int count = 0;
    trainers[count++] = tested_cpu;
#ifdef __CUDACC__
    for (size_t i = 0; i < sizeof variants / sizeof *variants; i++) { trainers[count++] = tested_variant((int)i); }
#endif
    return count;
}

static int check_trainers(const char* model_dir, const char* state_path, int* passed) {
    TestedTrainer trainers[MAX_TRAINERS];
    const int count = list_trainers(trainers);
    int failed = 0;
    for (int i = 0; i < count; i++) {
#ifdef __CUDACC__
        if (i > 0) { variant = &variants[i - 1]; }
#endif
        if (check_pair(&trainers[i], model_dir, state_path)) {
            failed++;
        } else {
            *passed += 1;
        }
    }
    return failed;
}

int main(int argc, char** argv) {
    int passed = 0, failed = 0, skipped = 0;
    if (argc != 1 && argc != 3) { die_usage("usage: %s [MODEL_DIR STATE_FILE]", argv[0]); }
    if (argc == 3) {
        failed = check_trainers(argv[1], argv[2], &passed);
    } else {
        const char* dir = "dev/test/pairs";
        char* names[64];
        int count = list_pairs(dir, names, 64);
        for (int k = 0; k < count; k++) {
            char model[PATH_CAP], state[PATH_CAP];
            snprintf(model, sizeof model, "%s/%s", dir, names[k]);
            snprintf(state, sizeof state, "%s/%s.state.safetensors", dir, names[k]);
            failed += check_trainers(model, state, &passed);
            free(names[k]);
        }
        if (count == 0) { die("%s: holds no pair", dir); }
#ifdef __CUDACC__
        check_alone(&passed, &failed, &skipped);
#endif
    }
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed ? 1 : 0;
}

#endif
