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
 * max(norm, first norm). 16-bit: see check_gradient_16bit().
 */
#define TESTING  // leaves the trainers' main out

/* What is tested of a trainer. All arrays are host memory, fp32. */
#ifdef __cplusplus
extern "C" {
#endif
typedef struct {
    const char* name;
    int bits;                                                                  // of the arithmetic: 32, or 16
    void* (*open)(const char* model_dir, int B, int T);                        // a model with the folder's weights
    void (*logits)(void* model, const int* x, float* out);                     // (B, T, V)
    double (*gradients)(void* model, const int* x, const int* y);              // from zero; returns the mean loss
    void (*gradient)(void* model, const char* name, float* out);               // one parameter's, after gradients()
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
    Error e = {{0}};
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

const TestedTrainer tested_cpu = {"CPU fp32", 32, cpu_open, cpu_logits, cpu_gradients, cpu_gradient, cpu_step, cpu_close};

#endif

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------------------
// the CUDA trainer

#include "train_llama3.cu"

#endif

#if defined(__CUDACC__) || !defined(TEST_CPU_HALF)
// ---------------------------------------------------------------------------------------------------------------------
// the comparison

#include <dirent.h>

typedef struct {
    const char* path;
    SafeTensors st;
    int failures;
    int bits;  // of the trainer under test
} State;

/* A tensor of the state in fp32; dies where it is missing or not of `count` elements. */
static float* state_tensor(State* s, const char* name, size_t count) {
    Error e = {{0}};
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
    if (!text || end == text || *end) { die("%s: __metadata__.%s is %s, wanted a number", s->path, key, text ? text : "missing"); }
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

/* 16-bit arithmetic: the norm within 1 % and the relative L2 error at most 2 %, or 1.5 times the error that PyTorch's own
 * 16-bit run of this case makes, which the state may carry as error_16bit.<name>. Cosine alone would be blind to scale. */
static void check_gradient_16bit(State* s, const char* name, const float* got, const float* want, size_t n) {
    char key[96];
    snprintf(key, sizeof key, "error_16bit.%s", name);
    double limit = 0.02, diff = 0, norm = l2_norm(want, n);
    if (safetensors_find(&s->st, key)) {
        float* torch_error = state_tensor(s, key, 1);
        limit = fmax(limit, 1.5 * torch_error[0]);
        free(torch_error);
    }
    for (size_t i = 0; i < n; i++) { diff += ((double)got[i] - want[i]) * ((double)got[i] - want[i]); }
    diff = sqrt(diff) / norm;
    double off = fabs(l2_norm(got, n) / norm - 1);
    report(s, diff <= limit, name, "L2 ", diff, limit);
    if (!(off <= 0.01)) { report(s, false, name, "norm off by", off, 0.01); }
}

static void check_gradient(State* s, const char* name, const float* got, const float* want, size_t n) {
    if (s->bits == 16) {
        check_gradient_16bit(s, name, got, want, n);
        return;
    }
    double largest = 0;
    for (size_t i = 0; i < n; i++) { largest = fmax(largest, fabs((double)want[i])); }
    check_close(s, name, got, want, n, largest, 1e-4);
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
    Error e = {{0}};
    State s;
    ModelConfig config;
    memset(&s, 0, sizeof s);
    s.path = state_path;
    s.bits = trainer->bits;
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
    if (!targets || targets->count != N || targets->dtype != SAFE_I32) { die("%s: tensor y is missing or not I32 (B, T)", state_path); }
    if (!safetensors_read_raw(&s.st, shape, 0, N, x, &e) ||
        !safetensors_read_raw(&s.st, targets, 0, N, y, &e)) {
        die("%s", e.msg);
    }
    for (size_t i = 0; i < N; i++) {
        if (x[i] < 0 || x[i] >= V || y[i] < 0 || y[i] >= V) { die("%s: a token is outside of the vocabulary of %d", state_path, V); }
    }
    void* model = trainer->open(model_dir, B, T);
    ParamTable table = param_table(&config);

    float* want = state_tensor(&s, "logits", N * V);
    float* got = (float*)xmalloc(N * V * sizeof(float));
    memset(got, 0xFF, N * V * sizeof(float));  // NaN: what is not written fails
    trainer->logits(model, x, got);
    // 16 bits: relative to the largest logit, since rounding is relative
    double largest = 1.0;
    if (s.bits == 16) {
        for (size_t i = 0; i < N * V; i++) { largest = fmax(largest, fabs((double)want[i])); }
    }
    check_close(&s, "logits", got, want, N * V, largest, s.bits == 16 ? 2e-2 : 1e-4);
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
        char label[64];
        double norm = 0;
        loss = trainer->step(model, x, y, hyper, i + 1, &norm);
        const double limit = s.bits == 16 ? 1e-2 * losses[i] : 1e-4;
        const double norm_limit = s.bits == 16 ? 1e-2 * norms[i] : 1e-4 * fmax(norms[i], norms[0]);
        snprintf(label, sizeof label, "loss at step %d", i + 1);
        report(&s, fabs(loss - losses[i]) <= limit, label, "abs", fabs(loss - losses[i]), limit);
        snprintf(label, sizeof label, "gradient norm at step %d", i + 1);
        report(&s, fabs(norm - norms[i]) <= norm_limit, label, "abs", fabs(norm - norms[i]), norm_limit);
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
    if (!d) { die("%s: cannot open the folder of the committed pairs: %s\n  hint: run from the project's root", dir, strerror(errno)); }
    int count = 0;
    for (struct dirent* entry = readdir(d); entry && count < max; entry = readdir(d)) {
        char path[PATH_CAP];
        Error e = {{0}};
        if (entry->d_name[0] == '.' || !path_join(path, dir, entry->d_name, &e) || !is_directory(path)) { continue; }
        names[count++] = xstrdup(entry->d_name);
    }
    closedir(d);
    qsort(names, count, sizeof *names, compare_names);
    return count;
}

int main(int argc, char** argv) {
    static const TestedTrainer* trainers[] = {
        &tested_cpu,
#ifdef __CUDACC__
        &tested_cuda,
#endif
    };
    const int num_trainers = sizeof trainers / sizeof *trainers;
    int passed = 0, failed = 0;
    if (argc != 1 && argc != 3) { die_usage("usage: %s [MODEL_DIR STATE_FILE]", argv[0]); }
    if (argc == 3) {
        for (int i = 0; i < num_trainers; i++) { *(check_pair(trainers[i], argv[1], argv[2]) ? &failed : &passed) += 1; }
    } else {
        const char* dir = "dev/test/pairs";
        char* names[64];
        int count = list_pairs(dir, names, 64);
        for (int k = 0; k < count; k++) {
            char model[PATH_CAP], state[PATH_CAP];
            snprintf(model, sizeof model, "%s/%s", dir, names[k]);
            snprintf(state, sizeof state, "%s/%s.state.safetensors", dir, names[k]);
            for (int i = 0; i < num_trainers; i++) { *(check_pair(trainers[i], model, state) ? &failed : &passed) += 1; }
            free(names[k]);
        }
        if (count == 0) { die("%s: holds no pair", dir); }
    }
    printf("%d passed, %d failed, 0 skipped\n", passed, failed);
    return failed ? 1 : 0;
}

#endif
