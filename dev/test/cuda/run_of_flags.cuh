/* run_of_flags.cuh -- shared by the tests of the CUDA trainer: the program and the model of a run, made from flags
 * by the trainer's own functions. The includer defines TESTING, which leaves the trainer's main out.
 */
#ifndef TEST_RUN_OF_FLAGS_CUH
#define TEST_RUN_OF_FLAGS_CUH

#include "train_llama3.cu"

/* Makes the program of one process that trains `config` with these flags, separated by spaces, without samples. */
static Program* program_of(const ModelConfig* config, const char* flags) {
    enum { MOST_WORDS = 32 };
    Program* p = (Program*)xcalloc(1, sizeof *p);
    char* words = xstrdup(flags);
    char* argv[MOST_WORDS] = {(char*)"", (char*)"--sample-tokens=0"};
    int argc = 2;
    Error e = NO_ERROR;
    for (char* word = strtok(words, " "); word && argc < MOST_WORDS; word = strtok(NULL, " ")) { argv[argc++] = word; }
    if (options_parse(&p->chosen, argc, argv, ON_GPU, &e) != OPTIONS_OK) { die("%s: %s", flags, e.msg); }
    free(words);  // no option points into `words`: none of the flags has a text
    p->process.job = JOB_TRAIN;
    p->process.ranks = 1;
    p->spec.config = *config;
    must(plan_make(&p->run.plan, &p->chosen, 1, &e), &e);
    p->run.state.schedule = plan_schedule(&p->chosen, p->chosen.steps);
    return p;
}

/* Returns the byte that memory holds before a run. For compute-sanitizer's initcheck memory counts as uninitialized only until
 * it is filled: the environment variable NO_FILL keeps memory unfilled. */
static int fill_of(int fill) { return getenv("NO_FILL") ? NO_FILL : fill; }

/* Fills the gradients, which a step has to overwrite. Gaps between tensors stay zero, as the arena needs them. */
static void fill_gradients(Llama* m, int fill) {
    if (fill_of(fill) == NO_FILL) { return; }
    for (int i = 0; i < m->trained.count; i++) {
        const Param* p = &m->trained.items[i];
        const Gradient g = grad_at(m, p->kind, p->layer);
        CUDA_CHECK(cudaMemsetAsync(g.data, fill, param_size(p) * (g.fp32 ? sizeof(float) : sizeof(floatX)), m->queue.stream));
    }
    CUDA_CHECK(cudaStreamSynchronize(m->queue.stream));
}

static MatmulContext* test_matmul(void) {
    static MatmulContext* context = matmul_create(NULL, false);
    return context;
}

/* Makes a program's model without memory. */
static Llama open_model(const Program* p) {
    const ModelUse use = model_use(&p->process, &p->chosen, &p->spec.config, &p->data);
    return llama_open(&p->spec.config, &use, &p->chosen, test_matmul());
}

/* Makes a program's model. fp32_head: only the head's gradient is in fp32, as in a run that has long sums for the head alone.
 * apart: gradients lend no memory to activations. fill: the byte that activations, workspace and gradients hold at first */
static Llama* model_of(const Program* p, bool fp32_head, bool apart, int fill) {
    Llama* m = (Llama*)xmalloc(sizeof *m);
    *m = open_model(p);
    m->grads.fp32_head = m->grads.fp32_head || fp32_head;
    m->grads.lends = m->grads.lends && !apart;
    llama_create(m, fill_of(fill));
    fill_gradients(m, fill);
    return m;
}

/* Large enough that a small gradient of a 16-bit build is no denormal; the test divides by it. */
static const float test_loss_scale = IS_FP16 ? 1024.0f : 1.0f;

/* Does the rest of trainer_prepare() after the weights are loaded: makes 8-bit copies, and begins at step 0. */
static void start_run(Llama* m, TrainerState* run) {
    fp8_refresh(&m->fp8, &m->queue, &m->weights);
    run->loss_scale = test_loss_scale;
    runner_restore(&m->runner, run);
}

/* Returns whether this card's products take a scale for each row of a factor, as --fp8 needs. */
static bool has_fp8(void) {
    return IS_BF16 && device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
           device_attribute(cudaDevAttrComputeCapabilityMinor) == 0 && matmul_has_row_scales();
}

/* Copies one parameter's gradient to `out`, host memory. Returns the number of its elements; 0 if no parameter has that
 * name. */
static size_t read_gradient(const Llama* m, const char* name, float* out) {
    for (int i = 0; i < m->trained.count; i++) {
        const Param* p = &m->trained.items[i];
        const size_t n = param_size(p);
        if (strcmp(p->name, name) != 0) { continue; }
        const Gradient g = grad_at(m, p->kind, p->layer);
        if (g.fp32) {
            copy_out(out, g.data, n * sizeof(float), m->queue.stream);
        } else {
            floatX* host = (floatX*)xmalloc(n * sizeof(floatX));
            copy_out(host, g.data, n * sizeof(floatX), m->queue.stream);
            for (size_t k = 0; k < n; k++) { out[k] = to_float(host[k]); }
            free(host);
        }
        for (size_t k = 0; k < n; k++) { out[k] /= test_loss_scale; }
        return n;
    }
    return 0;
}

#endif
