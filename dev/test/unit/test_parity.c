/* test_parity.c -- tests which errors of a 16-bit trainer's later steps test_llama3.cu accepts, and which it refuses. The CPU
 * trainer stands in for a 16-bit trainer, so no GPU is needed; its fp32 results are well within the 16-bit limits.
 * Also tests the whole CPU trainer on rows that hold documents: a row's loss and gradients equal the sums over its documents,
 * each computed alone. This catches a layer that mixes tokens of two documents, and a wrong position. */
#define main parity_main
#include "test_llama3.cu"
#undef main
#include "dev/test/oracles.h"
#include "dev/test/test.h"

enum { LATE_STEP = 2 };  // the first step judged by PyTorch's own errors
static int planted_step, steps_made;
static float logit_factor = 1;  // what planted_logits() multiplies the logits by
static const char model_dir[] = "dev/test/pairs/mha_odd", committed[] = "dev/test/pairs/mha_odd.state.safetensors";

/* Takes a step on the CPU; at planted_step it returns a gradient norm 2 % too large. */
static double planted_error(void* model, const int* x, const int* y, const float* hyper, double* norm) {
    const double loss = cpu_step(model, x, y, hyper, norm);
    if (++steps_made == planted_step) { *norm *= 1.02; }
    return loss;
}

static void planted_logits(void* model, const int* x, float* out) {
    const Llama* m = ((Tested*)model)->model;
    cpu_logits(model, x, out);
    for (size_t i = 0; i < (size_t)m->B * m->T * m->config.vocab_size; i++) { out[i] *= logit_factor; }
}

/* Returns the number of failed comparisons on a state with the error planted at `step` (0: nowhere). The comparisons go to
 * `report`, since those that fail are wanted. */
static int failures_with_error_at(int step, const char* state, FILE* report) {
    TestedTrainer t = tested_cpu;
    t.bits = 16;
    t.kind = "bf16";
    t.step = planted_error;
    t.logits = planted_logits;
    planted_step = step;
    steps_made = 0;
    fflush(stdout);
    const int screen = dup(1);
    if (screen < 0 || dup2(fileno(report), 1) < 0) { die("cannot redirect stdout: %s", strerror(errno)); }
    const int failures = check_pair(&t, model_dir, state);
    fflush(stdout);
    dup2(screen, 1);
    close(screen);
    return failures;
}

/* Checks how many comparisons fail with the error planted at `step`, and prints all comparisons if the number is wrong. */
static void expect_failures(int wanted, int step, const char* state, const char* otherwise) {
    FILE* report = tmpfile();
    if (!report) { die("no temporary file: %s", strerror(errno)); }
    const int failures = failures_with_error_at(step, state, report);
    CHECK(failures == wanted, "%s: %d comparisons fail, wanted %d", otherwise, failures, wanted);
    rewind(report);
    for (int c = getc(report); failures != wanted && c != EOF; c = getc(report)) { putchar(c); }
    fclose(report);
}

/* Copies the committed state, replacing every `from` by `to`, a word of the same length. Returns the copy's path. */
static const char* copy_with(const char* from, const char* to) {
    Error e = NO_ERROR;
    size_t size = 0;
    const char* path = test_file("state.safetensors");
    char* bytes = read_file(committed, &size, 1 << 20, &e);
    must(bytes != NULL, &e);
    for (size_t i = 0; i + strlen(from) <= size; i++) {
        if (memcmp(bytes + i, from, strlen(from)) == 0) { memcpy(bytes + i, to, strlen(to)); }
    }
    test_write(path, bytes, size);
    free(bytes);
    return path;
}

TEST(a_late_norm_2_percent_off_fails) {
    expect_failures(0, 0, committed, "the trainer is wrong without a planted error");
    expect_failures(1, LATE_STEP, committed, "the error passes");
}

TEST(without_the_yardstick_late_steps_are_not_judged) {
    const char* state = copy_with("bf16_error.grad_norms", "bf16_ERROR.grad_norms");
    expect_failures(0, LATE_STEP, state, "the error is judged");
    expect_failures(1, 1, state, "the first step is not judged");
}

TEST(logits_are_judged_by_pytorch_s_own_error) {
    logit_factor = 1.03f;
    expect_failures(1, 0, committed, "3 % pass where PyTorch is off by 1 %");
    expect_failures(0, 0, copy_with("bf16_error.logits\":\"0.0", "bf16_error.logits\":\"0.5"),
                    "PyTorch's own error is not read");
    logit_factor = 1;
}

/* Returns a State whose metadata holds only these fp16 errors of the losses. */
static State state_with(const char* losses) {
    const char* path = test_file("errors.safetensors");
    Error e = NO_ERROR;
    State s;
    char file[256];
    memset(&s, 0, sizeof s);
    const uint64_t length =
        (uint64_t)snprintf(file + 8, sizeof file - 8, "{\"__metadata__\":{\"fp16_error.losses\":\"%s\"}}", losses);
    memcpy(file, &length, 8);
    test_write(path, file, 8 + length);
    s.path = path;
    s.bits = 16;
    s.kind = "fp16";
    must(safetensors_open(&s.st, path, &e), &e);
    return s;
}

TEST(the_limit_is_three_times_pytorch_s_own_error_and_1_percent_at_least) {
    State s = state_with("0.5 0.001 0.02");
    const double first = step_limit_16bit(&s, "losses", 1), second = step_limit_16bit(&s, "losses", 2),
                 third = step_limit_16bit(&s, "losses", 3);
    CHECK(first == 0.01, "the first step has no yardstick but 1 %%: %g", first);
    CHECK(second == 0.01, "%g", second);
    CHECK(fabs(third - 0.06) < 1e-12, "%g", third);
    CHECK(isinf(step_limit_16bit(&s, "grad_norms", 2)), "no yardstick, no limit");
    safetensors_close(&s.st);
}

// ---------------------------------------------------------------------------------------------------------------------
// rows of documents

enum { ROWS = 3, LENGTH = 150, LONGEST = 60 };

/* Adds the model's gradients, with a weight of 1 / (ROWS LENGTH) for each token, to `sum`. Returns the sum of all losses. */
static double add_gradients(double* sum, void* tested, const int32_t* x, const int32_t* y) {
    Llama* m = ((Tested*)tested)->model;
    cpu_tokens(m, x, y);
    llama_zero_gradients(m);
    llama_forward(m);
    llama_loss(m, 1.0f / (ROWS * LENGTH));
    llama_backward(m);
    double loss = 0;
    for (int i = 0; i < m->B * m->T; i++) { loss += (double)m->losses[i]; }
    for (size_t i = 0; i < m->trained.elements; i++) { sum[i] += (double)m->grads[i]; }
    return loss;
}

TEST(rows_have_the_loss_and_the_gradients_of_each_document_alone) {
    Tested* packed = (Tested*)cpu_open("dev/test/pairs/documents", ROWS, LENGTH, 0);
    const ParamTable* t = &packed->model->trained;
    int32_t *starts = random_starts(ROWS, LENGTH, LONGEST), x[ROWS * LENGTH + 1];
    double *got = (double*)xcalloc(t->elements, sizeof *got), *want = (double*)xcalloc(t->elements, sizeof *want);
    for (size_t i = 0; i <= ROWS * LENGTH; i++) {
        x[i] = (int32_t)philox_below(3, RAND_SAMPLE, 0, i, (uint64_t)packed->model->config.vocab_size);
    }
    cpu_divide(packed, starts);
    const double loss = add_gradients(got, packed, x, x + 1);
    double loss_alone = 0;
    int documents = 0;
    for (int n = 0, end; n < ROWS * LENGTH; n = end, documents++) {
        for (end = n + 1; end % LENGTH > 0 && starts[end] == starts[n]; end++) {}
        void* alone = cpu_open("dev/test/pairs/documents", 1, end - n, 0);
        loss_alone += add_gradients(want, alone, x + n, x + n + 1);
        cpu_close(alone);
    }
    CHECK(documents > 2 * ROWS, "only %d documents", documents);
    CHECK(fabs(loss - loss_alone) <= 1e-5 * loss_alone, "the loss is %.9g, wanted %.9g", loss, loss_alone);
    for (int i = 0; i < t->count; i++) {
        double worst = 0, largest = 0;
        for (size_t k = t->items[i].offset; k < t->items[i].offset + param_size(&t->items[i]); k++) {
            worst = fmax(worst, fabs(got[k] - want[k]));
            largest = fmax(largest, fabs(want[k]));
        }
        CHECK(worst <= 1e-5 * largest, "the gradient of %s is off by %g of its largest element", t->items[i].name,
              worst / largest);
    }
    cpu_close(packed);
    free(starts), free(got), free(want);
}

int main(void) { return test_all(); }
