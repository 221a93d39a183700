/* test_session.c -- tests which rows of the data each rank gets from the session. */
#include "llmc/run/open.h"

#include "test.h"

static char folder[PATH_CAP], file[PATH_CAP + 32];

enum { T = 4, ROWS = 24 };

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

int main(void) {
    test_folder(folder);
    snprintf(file, sizeof file, "%s/tokens.bin", folder);
    write_tokens();
    RUN(every_rank_trains_on_rows_of_its_own_and_validates_on_all);
    unlink(file);
    rmdir(folder);
    return test_summary();
}
