/* test_determinism.cu -- compares steps of the CUDA trainer with themselves, on seeded random tokens. Steps have the same bits
 * when they are repeated, beside other work, whatever memory held before, at each level of recomputation, and with activations
 * in the gradients' memory. Steps are nearly the same if their rows are cut into other micro-batches, also past 2^31 elements.
 *
 *   make build/test_determinism_cu && build/test_determinism_cu [WORD]     only the tests whose name contains WORD
 *
 * A trial is a run by flags: its session, model, recipe and learning rate are the trainer's own (run_of_flags.cuh).
 */
#define TESTING
#include "run_of_flags.cuh"

#include "dev/test/test.h"

// ---------------------------------------------------------------------------------------------------------------------
// trials

typedef struct {
    const char* preset;
    int vocab_size;
    const char* flags;
    const char* more;  // flags; NULL: none
    bool fp32_head;    // see model_of()
    bool apart;        // see model_of()
    int fill;          // byte that activations, workspace and gradients hold at first
    bool busy;         // another stream copies memory all the time
    bool tied;         // the head is the embedding
} Trial;

typedef struct {
    double loss, norm;  // of the last step
    uint64_t hash;      // of the bits of weights, master, m and v; 0: not computed
    bool gaps;          // all of them are zero in the gap after each tensor
    int lent;           // blocks whose activations lie in memory of the gradients
} Outcome;

/* A trial that is running. Its tokens are random, and depend only on step and position. */
typedef struct {
    Program* p;
    Llama* m;
    Recipe recipe;
    Metrics last;
    uint64_t batches;
    char* noise;  // NULL: no other stream is busy
    cudaStream_t noise_stream;
} Running;

enum { NOISE_BYTES = 256 << 20 };

static bool trial_next(void* running, int32_t* x, int32_t* y, Error* e) {
    Running* r = (Running*)running;
    const uint64_t accumulate = (uint64_t)r->p->run.plan.accumulate, count = (uint64_t)r->m->use.B * r->m->use.T;
    const uint64_t V = (uint64_t)r->p->spec.config.vocab_size, first = r->batches % accumulate * count;
    const uint32_t step = (uint32_t)(r->batches++ / accumulate);
    (void)e;
    for (uint64_t i = 0; i < count; i++) {
        const Philox random = philox(7, RAND_SAMPLE, step, first + i);
        x[i] = (int32_t)(random.v[0] % V);
        y[i] = (int32_t)(random.v[1] % V);
    }
    for (int i = 0; r->noise && i < 20; i++) {
        CUDA_CHECK(cudaMemcpyAsync(r->noise, r->noise + NOISE_BYTES, NOISE_BYTES, cudaMemcpyDeviceToDevice, r->noise_stream));
    }
    return true;
}

static void trial_program(Running* r, const Trial* trial) {
    char flags[256];
    ModelConfig config;
    if (!config_preset(&config, trial->preset, trial->vocab_size)) { die("%s: is no preset", trial->preset); }
    config.tied = config.tied || trial->tied;
    snprintf(flags, sizeof flags, "--lr 1e-3 --schedule constant %s %s", trial->flags, trial->more ? trial->more : "");
    r->p = program_of(&config, flags);
    snprintf(r->p->start.dir, PATH_CAP, "%s", trial->preset);  // the adapters name their base model
    lora_of_flags(&r->p->spec.config.lora, &r->p->start, &r->p->chosen, JOB_TRAIN);
}

static void trial_open(Running* r, const Trial* trial) {
    Error e = NO_ERROR;
    memset(r, 0, sizeof *r);
    trial_program(r, trial);
    Llama* m = r->m = model_of(r->p, trial->fp32_head, trial->apart, trial->fill);
    const ModelConfig* c = &m->config;
    const StateSlot weights = trainer_slot(m, SLOT_WEIGHTS), trained = trainer_slot(m, SLOT_MASTER);
    must(tensors_draw(c, &m->table, 1, weights, &e), &e);
    if (c->lora.rank > 0) { must(tensors_draw(c, &m->trained, 1, trained, &e), &e); }
    start_run(m, &r->p->run.state);
    r->p->data.mix.count = 1;
    r->p->data.mix.stream = &r->p->data.train;
    r->recipe = training_recipe(IS_FP16, &r->p->chosen, &r->p->data.mix, &r->p->run, NULL);
    r->recipe.data = {trial_next, r, m->use.B};
    if (trial->busy) {
        CUDA_CHECK(cudaMalloc(&r->noise, 2 * (size_t)NOISE_BYTES));
        CUDA_CHECK(cudaStreamCreateWithFlags(&r->noise_stream, cudaStreamNonBlocking));
    }
}

/* Takes the trial's steps. One stays in flight, as in a real run. */
static void trial_steps(Running* r) {
    Llama* m = r->m;
    Error e = NO_ERROR;
    for (int64_t step = 0; step < r->p->run.state.schedule.steps; step++) {
        must(train_step(m, &r->recipe, learning_rate(&r->p->run.state.schedule, step), &e), &e);
        if (m->runner.queued - m->runner.reported == IN_FLIGHT) { r->last = step_result(m, &r->recipe); }
    }
    while (m->runner.reported < m->runner.queued) { r->last = step_result(m, &r->recipe); }
}

static void trial_close(Running* r) {
    if (r->noise) {
        CUDA_CHECK(cudaFree(r->noise));
        CUDA_CHECK(cudaStreamDestroy(r->noise_stream));
    }
    trainer_destroy(r->m);
    free(r->p);
}

/* Hashes the bits of weights, master, m and v. Sets *gaps to whether all elements between tensors are zero in each of them. */
static uint64_t hash_model(const Llama* m, bool* gaps) {
    const WeightArena* a = &m->weights;
    const struct {
        const void* data;
        size_t bytes;
        const ParamTable* table;
    } arenas[] = {{a->params, sizeof(floatX), &m->table},
                  {a->trained, sizeof(floatX), &m->trained},
                  {a->master, a->master ? master_bytes(a->master_kind) : 0, &m->trained},
                  {a->m, moment_bytes(a->bf16_moments), &m->trained},
                  {a->v, moment_bytes(a->bf16_moments), &m->trained}};
    uint64_t hash = 1;
    *gaps = true;
    exchange_wait_all_gathered(&m->exchange);
    host_stream_finish(a->host);
    for (const auto& arena : arenas) {
        const size_t bytes = arena.table->elements * arena.bytes;
        char* host = (char*)xcalloc(ceil_div(bytes, 8), 8);
        if (bytes > 0 && a->host && arena.data != a->params && arena.data != a->trained) {
            memcpy(host, arena.data, bytes);
        } else if (bytes > 0) {
            copy_out(host, arena.data, bytes, m->queue.stream);
        }
        for (size_t i = 0; i < ceil_div(bytes, 8); i++) {
            hash = (hash ^ ((const uint64_t*)host)[i]) * 0x9E3779B97F4A7C15ull + (hash >> 29);
        }
        for (int i = 0; i < arena.table->count; i++) {
            const Param* p = &arena.table->items[i];
            const size_t end = i + 1 < arena.table->count ? p[1].offset : arena.table->elements;
            for (size_t k = (p->offset + param_size(p)) * arena.bytes; k < end * arena.bytes; k++) {
                *gaps = *gaps && host[k] == 0;
            }
        }
        free(host);
    }
    return hash;
}

/* Runs a trial. Without `hash`, reads back only loss and norm. */
static Outcome run_trial(const Trial* trial, bool hash = true) {
    Running r;
    trial_open(&r, trial);
    trial_steps(&r);
    Outcome o = {r.last.loss, r.last.norm, 0, true, 0};
    const Gradients* g = &r.m->grads;
    const char *begin = (const char*)g->all, *end = begin + (g->end - g->first) * gradients_bytes(g->fp32);
    for (int l = 0; l < r.m->config.num_layers; l++) {
        const char* h = (const char*)r.m->blocks[l].h;
        o.lent += h >= begin && h < end;
    }
    if (hash) { o.hash = hash_model(r.m, &o.gaps); }
    trial_close(&r);
    return o;
}

static const char* outcome_text(const Outcome* o, char* text /* 96 */) {
    const int length = snprintf(text, 96, "loss %.7f, norm %.7f", o->loss, o->norm);
    if (o->hash) { snprintf(text + length, 96 - length, ", hash %016llx", (unsigned long long)o->hash); }
    return text;
}

/* Checks that a trial ends with the bits of `want`, another trial's outcome. */
static void check_same(const Outcome* want, const Trial* trial, const char* what) {
    char a[96], b[96];
    const Outcome got = run_trial(trial);
    CHECK(got.hash == want->hash, "%s: %s, wanted %s", what, outcome_text(&got, a), outcome_text(want, b));
}

static Trial trial_with(const Trial* base, const char* more) {
    Trial t = *base;
    t.more = more;
    return t;
}

/* First nothing, then each level in all blocks, and in some. */
static const char* const recompute_flags[] = {"--recompute none",  "--recompute norm+swiglu", "--recompute ffn",
                                              "--recompute block", "--recompute block:1",     "--recompute norm+swiglu,ffn:1"};

// ---------------------------------------------------------------------------------------------------------------------
// the same bits

static const Trial twenty_steps = {"d3", 1000, "--batch 8 --seq 1000 --steps 20"};

static void twenty_steps_repeat_their_bits() {
    Trial t = twenty_steps;
    const Outcome first = run_trial(&t);
    check_same(&first, &t, "once more");
    t.fill = 0xFF;
    check_same(&first, &t, "memory held 0xFF before");
    t.fill = 0x7B;
    t.busy = true;
    check_same(&first, &t, "beside work on another stream, memory held 0x7B before");
}

static void recomputation_gives_the_same_bits() {
    const Outcome first = run_trial(&twenty_steps);
    for (const char* level : recompute_flags) {
        if (level == recompute_flags[0]) { continue; }
        const Trial t = trial_with(&twenty_steps, level);
        check_same(&first, &t, level);
    }
}

static void recomputation_in_micro_batches_gives_the_same_bits() {
    Trial t = {"d3", 1000, "--batch 2 --seq 1000 --total-batch 8000 --steps 5"};
    t.fill = 0xFF;
    const Outcome kept = run_trial(&t);
    t.more = "--recompute block";
    check_same(&kept, &t, t.more);
}

/* The adapters train beside frozen weights, with every level of recomputation. */
static void recomputation_gives_adapters_the_same_bits() {
    const Trial base = {"d3", 1001, "--batch 4 --seq 128 --total-batch 1024 --steps 5 --lora 6 --lora-on all"};
    const Outcome kept = run_trial(&base);
    CHECK(kept.gaps, "gaps between tensors are not zero");
    for (const char* level : recompute_flags) {
        Trial t = trial_with(&base, level);
        t.fill = 0xFF;
        check_same(&kept, &t, level);
    }
}

/* With longer rows fewer blocks find room below their gradients. A tied embedding's gradient is written first, so it lends
 * nothing; in fp32 it lies apart. Gradients of an earlier micro-step need the memory themselves. With state on the host the
 * next forward pass overwrites gradients while others are still read. */
static void activations_in_memory_of_the_gradients_give_the_same_bits() {
    static const struct {
        const char* flags;
        int lent;  // blocks
        bool tied, fp32_head;
    } runs[] = {{"--batch 1 --seq 64", 3},
                {"--batch 2 --seq 64", 2},
#ifndef EMULATED_ARCH  // whose time goes with the rows
                {"--batch 3 --seq 64", 1},
                {"--batch 6 --seq 64", 0},
#endif
                {"--batch 1 --seq 64", 2, true},
                {"--batch 2 --seq 64", 2, true, true},
                {"--batch 2 --seq 64", 2, false, true},
                {"--batch 1 --seq 64 --total-batch 128", 0},
                {"--batch 2 --seq 64 --recompute norm+swiglu", 2},
                {"--batch 2 --seq 64 --fp8", 2},
                {"--batch 1 --seq 64 --offload optimizer", 3},
                {"--batch 2 --seq 64 --offload optimizer --recompute block", 3},
                {"--batch 2 --seq 64 --grad-dtype fp32", sizeof(floatX) == 4 ? 2 : 3}};
    for (const auto& run : runs) {
        if (strstr(run.flags, "--fp8") && !has_fp8()) { continue; }
        Trial t = {"d3", 1001, run.flags, "--steps 2 --offload off", run.fp32_head && sizeof(floatX) == 2};
        t.tied = run.tied;
        t.apart = true;
        const Outcome apart = run_trial(&t);
        t.apart = false;
        t.more = "--steps 2";
        t.fill = 0xFF;
        const Outcome lent = run_trial(&t);
        char a[96], b[96];
        CHECK(lent.hash == apart.hash && lent.gaps, "%s, tied %d: %s, wanted %s", run.flags, run.tied, outcome_text(&lent, a),
              outcome_text(&apart, b));
        CHECK(apart.lent == 0 && lent.lent == run.lent, "%s, tied %d: %d blocks, wanted %d", run.flags, run.tied, lent.lent,
              run.lent);
    }
}

/* The activations of block 2 end where its gradients begin. So they lie on the gradient that this test ruins. */
static void a_gradient_is_named_before_activations_overwrite_it() {
    Running r;
    char name[TENSOR_TEXT] = "";
    const Trial t = {"d3", 1001, "--batch 1 --seq 64 --steps 1"};
    trial_open(&r, &t);
    trial_steps(&r);
    CUDA_CHECK(cudaMemset(grad_at(r.m, P_DOWN, 1).data, 0xFF, sizeof(floatX)));
    const bool found = trainer_name_not_finite(r.m, name);
    CHECK(found && strstr(name, "the gradient of model.layers.1.mlp.down_proj.weight"), "%s", name);
    trial_close(&r);
}

/* C = 192: a norm does not end at a multiple of PARAM_ALIGN, and AdamW must not train the gap up to the next tensor. */
static void gaps_between_tensors_stay_zero() {
    static const char* const masters[] = {"--master fp32", "--master none", "--master split"};
    for (int i = 0; i < (IS_BF16 ? 3 : 1); i++) {
        Trial t = {"d3", 1001, "--batch 2 --seq 64 --total-batch 256 --steps 3", masters[i]};
        t.fp32_head = i == 2;
        t.fill = 0xFF;
        const Outcome o = run_trial(&t);
        CHECK(o.gaps, "%s", masters[i]);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// sums of gradients over many micro-batches

#ifdef PRECISION_BF16
/* Returns one parameter's gradient after the steps of a trial: (count) floats; the caller frees them. */
static float* trial_gradient(const Trial* trial, const char* name, size_t* count) {
    Running r;
    trial_open(&r, trial);
    trial_steps(&r);
    float* out = (float*)xmalloc(r.m->trained.elements * sizeof(float));
    *count = read_gradient(r.m, name, out);
    trial_close(&r);
    return out;
}

/* Returns the relative L2 difference of one parameter's gradient between two trials. */
static double gradients_differ(const Trial* a, const Trial* b, const char* name) {
    size_t n = 0;
    float *x = trial_gradient(a, name, &n), *y = trial_gradient(b, name, &n);
    double diff = 0, sum = 0;
    for (size_t i = 0; i < n; i++) {
        diff += ((double)x[i] - y[i]) * ((double)x[i] - y[i]);
        sum += (double)y[i] * y[i];
    }
    free(x);
    free(y);
    return sqrt(diff / sum);
}

/* This is why a run sums such gradients in fp32, as below. */
static void sums_of_256_micro_batches_in_bfloat16_are_off_by_1_percent() {
    const Trial base = {"d2", 1000, "--batch 1 --seq 64 --total-batch 16384 --steps 1"};
    const Trial own = trial_with(&base, "--grad-dtype param"), exact = trial_with(&base, "--grad-dtype fp32");
    Trial head = own;
    head.fp32_head = true;
    double error = gradients_differ(&own, &exact, "model.layers.0.mlp.down_proj.weight");
    CHECK(error > 0.01, "a matrix is off by %.3f %%", 100 * error);
    error = gradients_differ(&own, &exact, "lm_head.weight");
    CHECK(error > 0.01, "the head is off by %.3f %%", 100 * error);
    error = gradients_differ(&head, &exact, "lm_head.weight");
    CHECK(error == 0, "the head's alone in fp32 are off by %.3f %%", 100 * error);
}

static void a_run_sums_in_fp32_what_gets_more_than_64_additions() {
    static const struct {
        const char* flags;
        bool fp32_grads, fp32_head;
    } runs[] = {{"--batch 1 --seq 64 --total-batch 16384", true, false},
                {"--batch 64 --seq 1024 --total-batch 524288", false, true},  // the head adds chunk by chunk
                {"--batch 64 --seq 1024", false, false},
                {"--batch 1 --seq 64 --total-batch 16384 --grad-dtype param", false, false}};
    for (const auto& run : runs) {
        Running r;
        const Trial t = {"d2", 1000, run.flags, "--steps 1"};
        trial_program(&r, &t);
        Llama m = open_model(r.p);
        CHECK(m.grads.fp32 == run.fp32_grads && m.grads.fp32_head == run.fp32_head, "%s: all %d, the head's %d", run.flags,
              m.grads.fp32, m.grads.fp32_head);
        llama_close(&m);
        free(r.p);
    }
}
#endif

/* Checks that two ways to cut the same tokens into micro-batches give the same loss and norm. */
static void check_same_step(const Trial* whole, const Trial* parts) {
    const double limit = sizeof(floatX) == 4 ? 1e-5 : 1e-2;
    char at_once[96], in_parts[96];
    const Outcome a = run_trial(whole, false), b = run_trial(parts, false);
    CHECK(fabs(a.loss - b.loss) <= limit * a.loss && fabs(a.norm - b.norm) <= limit * a.norm, "%s %s: %s, in parts %s",
          whole->flags, whole->more, outcome_text(&a, at_once), outcome_text(&b, in_parts));
}

/* Gradients are summed in fp32, so that the test compares the mechanism, and in their own type, which rounds after each
 * micro-batch. */
static void micro_batches_of_one_row_are_one_of_32() {
    static const char* const dtypes[] = {"--grad-dtype fp32", "--grad-dtype param"};
    for (int i = 0; i <= (sizeof(floatX) == 2); i++) {
        const Trial whole = {"d2", 1000, "--batch 32 --seq 256 --steps 2", dtypes[i]};
        const Trial parts = {"d2", 1000, "--batch 1 --seq 256 --total-batch 8192 --steps 2", dtypes[i]};
        check_same_step(&whole, &parts);
    }
}

/* Rows of gate and up are 2F = 512 wide and rows of the logits 1000: B T 2F and B T V pass 2^31. */
static void five_million_tokens_at_once_are_four_times_a_quarter() {
    const Trial whole = {"d1", 1000, "--batch 5120 --seq 1024 --steps 1", "--grad-dtype fp32"};
    const Trial parts = {"d1", 1000, "--batch 1280 --seq 1024 --total-batch 5242880 --steps 1", "--grad-dtype fp32"};
    check_same_step(&whole, &parts);
}

static void four_rows_of_3_billion_weights_are_one_after_the_other() {
    const Trial whole = {"llama3.2-3b", 0, "--batch 4 --seq 64 --steps 1", "--grad-dtype fp32"};
    const Trial parts = {"llama3.2-3b", 0, "--batch 1 --seq 64 --total-batch 256 --steps 1", "--grad-dtype fp32"};
    check_same_step(&whole, &parts);
}

// ---------------------------------------------------------------------------------------------------------------------
// --fp8: every way to run gives the same bits, other bits than BF16, and nearly BF16's loss

/* Checks that the loss of an 8-bit trial is near BF16's, and that its bits differ from the bits of `other`. */
static void check_near(const Outcome* fp8, const Outcome* bf16, const Outcome* other) {
    char a[96], b[96];
    CHECK(fabs(fp8->loss - bf16->loss) <= 0.02 * bf16->loss, "%s, in BF16 %s", outcome_text(fp8, a), outcome_text(bf16, b));
    CHECK(fp8->hash != other->hash, "the bits are those without");
}

static void check_fp8_repeats(const Trial* plain) {
    const Trial base = trial_with(plain, "--fp8");
    const Outcome bf16 = run_trial(plain), first = run_trial(&base);
    check_near(&first, &bf16, &bf16);
    for (const char* level : recompute_flags) {
        char more[64];
        snprintf(more, sizeof more, "--fp8 %s", level);
        Trial t = trial_with(&base, more);
        t.fill = 0xFF;
        t.busy = level == recompute_flags[0];
        check_same(&first, &t, more);
    }
}

static void fp8_is_near_bf16_and_repeats_its_bits() {
    const Trial plain = {"d3", 1000, "--batch 4 --seq 512 --total-batch 4096 --steps 10"};
    check_fp8_repeats(&plain);
}

static void fp8_beside_adapters_is_near_bf16_and_repeats_its_bits() {
    const Trial plain = {"d3", 1000, "--batch 4 --seq 512 --total-batch 4096 --steps 5 --lora 16"};
    check_fp8_repeats(&plain);
}

/* The logits take two chunks. */
static void fp8_head_is_near_bf16_and_repeats_its_bits() {
    const Trial plain = {"d3", 1008, "--batch 10 --seq 512 --steps 10"};
    const Trial blocks = trial_with(&plain, "--fp8");
    Trial head = trial_with(&plain, "--fp8 --fp8-head");
    const Outcome bf16 = run_trial(&plain), without = run_trial(&blocks), first = run_trial(&head);
    check_near(&first, &bf16, &without);
    head.more = "--fp8 --fp8-head --recompute block";
    head.fill = 0xFF;
    head.busy = true;
    check_same(&first, &head, "recomputed, beside other work");
}

// ---------------------------------------------------------------------------------------------------------------------

static const struct {
    const char* name;
    void (*run)();
    size_t gib;  // GiB of the card's memory that the test needs; 0: little
    bool fp8;    // whether it needs a card with --fp8
} tests[] = {
#define ENTRY(test, ...) \
    { #test, test, __VA_ARGS__ }
    ENTRY(twenty_steps_repeat_their_bits, 0, false),
    ENTRY(recomputation_gives_the_same_bits, 0, false),
    ENTRY(recomputation_in_micro_batches_gives_the_same_bits, 0, false),
    ENTRY(recomputation_gives_adapters_the_same_bits, 0, false),
    ENTRY(activations_in_memory_of_the_gradients_give_the_same_bits, 0, false),
    ENTRY(a_gradient_is_named_before_activations_overwrite_it, 0, false),
    ENTRY(gaps_between_tensors_stay_zero, 0, false),
#ifdef PRECISION_BF16
    ENTRY(sums_of_256_micro_batches_in_bfloat16_are_off_by_1_percent, 0, false),
    ENTRY(a_run_sums_in_fp32_what_gets_more_than_64_additions, 0, false),
#endif
    ENTRY(micro_batches_of_one_row_are_one_of_32, 0, false),
    ENTRY(five_million_tokens_at_once_are_four_times_a_quarter, 100, false),
    ENTRY(four_rows_of_3_billion_weights_are_one_after_the_other, 75, false),
    ENTRY(fp8_is_near_bf16_and_repeats_its_bits, 0, true),
    ENTRY(fp8_beside_adapters_is_near_bf16_and_repeats_its_bits, 0, true),
    ENTRY(fp8_head_is_near_bf16_and_repeats_its_bits, 0, true),
};

int main(int argc, char** argv) {
    for (auto& test : tests) {
        size_t free_bytes = 0, total = 0;
        if (argc > 1 && !strstr(test.name, argv[1])) { continue; }
        CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total));
        if (test.fp8 && !has_fp8()) {
            SKIP(test.name, "needs BF16 and a card of compute capability 9.0");
        } else if (free_bytes >> 30 < test.gib) {
            printf("    needs %zu GiB\n", test.gib);
            SKIP(test.name, "the card has too little memory");
        } else {
            test_run(test.name, test.run);
        }
    }
    return test_summary();
}
