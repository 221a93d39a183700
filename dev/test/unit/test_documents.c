/* test_documents.c -- tests the whole CPU trainer on rows that hold documents: a row's loss and gradients equal the sums over
 * its documents, each computed alone. This catches a layer that mixes tokens of two documents, and a wrong position. */
#define main parity_main
#include "test_llama3.cu"
#undef main
#include "dev/test/documents.h"
#include "dev/test/test.h"

enum { ROWS = 3, LENGTH = 150, LONGEST = 60 };
static const char model_dir[] = "dev/test/pairs/documents";

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

static void rows_have_the_loss_and_the_gradients_of_each_document_alone(void) {
    Tested* packed = (Tested*)cpu_open(model_dir, ROWS, LENGTH);
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
        void* alone = cpu_open(model_dir, 1, end - n);
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

int main(void) {
    RUN(rows_have_the_loss_and_the_gradients_of_each_document_alone);
    return test_summary();
}
