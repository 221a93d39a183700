/* test_session.c -- tests which rows of the data each rank gets from the session, and that a long validation tells how far it
 * is. */
#include "llmc/base/utils.h"

static double seconds;  // that have passed, as a test sets them
static double set_seconds(void) { return seconds; }
#define now_seconds set_seconds

#include "llmc/run/jobs.h"
#include "llmc/run/open.h"

#include "test.h"

static char folder[PATH_CAP], file[PATH_CAP + 32];

enum { T = 4, ROWS = 24, BATCH = 4 };

/* Writes tokens that count up: the first token of row i is i * T. */
static void write_tokens(void) {
    int32_t header[256] = {20240520, 1, ROWS * T + 1};
    FILE* f = fopen(file, "wb");
    fwrite(header, sizeof header, 1, f);
    for (int i = 0; i <= ROWS * T; i++) {
        const uint16_t token = (uint16_t)i;
        fwrite(&token, sizeof token, 1, f);
    }
    fclose(f);
}

/* Opens the data of a training run as rank `rank` of `ranks`. */
static void open_data(Session* s, int batch, int rank, int ranks) {
    memset(s, 0, sizeof *s);
    s->job = JOB_TRAIN;
    s->rank = rank;
    s->ranks = ranks;
    s->options.batch = batch;
    s->options.seq = T;
    s->options.train = s->options.val = file;
    session_open_data(s);
}

/* Returns the rows that a rank reads in `batches` batches, one bit per row. */
static uint32_t rows_of(DataLoader* d, int batch, int batches) {
    int32_t x[ROWS * T], y[ROWS * T];
    uint32_t rows = 0;
    Error e = NO_ERROR;
    for (int i = 0; i < batches; i++) {
        CHECK(dataloader_next(d, x, y, &e), "%s", e.msg);
        for (int b = 0; b < batch; b++) { rows |= 1u << x[b * T] / T; }
    }
    return rows;
}

static void every_rank_trains_on_rows_of_its_own_and_validates_on_all(void) {
    for (int ranks = 1; ranks <= 4; ranks++) {
        for (int batch = 1; batch <= 2; batch++) {
            uint32_t seen = 0;
            for (int rank = 0; rank < ranks; rank++) {
                Session s;
                open_data(&s, batch, rank, ranks);
                const uint32_t rows = rows_of(&s.train, batch, ROWS / ranks / batch);
                CHECK((rows & seen) == 0, "batch %d, rank %d of %d: rows of another rank", batch, rank, ranks);
                seen |= rows;
                CHECK(rows_of(&s.val, 1, ROWS) == (1u << ROWS) - 1, "rank %d of %d: validation is not whole", rank, ranks);
                mix_close(&s.mix);
                dataloader_close(&s.val);
            }
            CHECK(seen == (1u << ROWS) - 1, "batch %d, %d ranks: an epoch lacks rows", batch, ranks);
        }
    }
}

/* A trainer that takes 3 seconds for the losses of BATCH rows, all of them 2. */
static bool slow_queue_losses(void* model, const BatchSource* data, Error* e) {
    int32_t x[ROWS * T], y[ROWS * T];
    (void)model;
    return batch_read(data, BATCH, T, x, y, e);
}

static const float* slow_wait_losses(void* model) {
    float* losses = (float*)model;
    seconds += 3;
    for (int i = 0; i < ROWS * T; i++) { losses[i] = 2; }
    return losses;
}

static void a_long_validation_tells_how_far_it_is(void) {
    float losses[ROWS * T];
    char text[256];
    Session s;
    Trainer slow;
    ValidationLoss l;
    Error e = NO_ERROR;
    FILE* screen = tmpfile();
    memset(&slow, 0, sizeof slow);
    slow.in_flight = 1;
    slow.queue_losses = slow_queue_losses;
    slow.wait_losses = slow_wait_losses;
    open_data(&s, BATCH, 0, 1);
    CHECK(validate(&slow, &s, losses, UINT64_MAX, screen, &l, &e), "%s", e.msg);
    CHECK(l.loss == 2 && l.trained == ROWS * T, "loss %g of %llu targets", l.loss, (unsigned long long)l.trained);
    rewind(screen);
    text[fread(text, 1, sizeof text - 1, screen)] = 0;
    CHECK(strcmp(text, "val      66.7 % of 24 rows, 1.3 rows/s, 0:06 left\n") == 0, "a file gets a line every ten seconds: %s",
          text);
    fclose(screen);
    mix_close(&s.mix);
    dataloader_close(&s.val);
}

int main(void) {
    test_folder(folder);
    snprintf(file, sizeof file, "%s/tokens.bin", folder);
    write_tokens();
    RUN(every_rank_trains_on_rows_of_its_own_and_validates_on_all);
    RUN(a_long_validation_tells_how_far_it_is);
    unlink(file);
    rmdir(folder);
    return test_summary();
}
