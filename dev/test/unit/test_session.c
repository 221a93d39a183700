/* test_session.c -- tests which rows of the data each rank gets, the seed, and the progress of a long
 * validation. Also tests the checkpoint that several ranks write together, each a process. */
#include "llmc/base/utils.h"

static double seconds;  // the time that has passed; a test sets it
static double set_seconds(void) { return seconds; }
#define now_seconds set_seconds
#include "llmc/base/progress.h"
#undef now_seconds

#include "llmc/base/threads.h"
#include "llmc/dist/launch.h"
#include "llmc/run/loop/validate.h"
#include "llmc/run/session/open.h"
#include "llmc/run/session/open_model.h"
#include "llmc/run/session/save.h"

#include <sys/wait.h>

#include "dev/test/test.h"

static const char *folder, *file;

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

/* A training run over the file, of a rank. */
typedef struct {
    Process process;
    Options options;
    Data data;
} DataRun;

/* Opens the data of a training run as rank `rank` of `ranks`. */
static void open_data(DataRun* r, int batch, int rank, int ranks, int64_t seed) {
    memset(r, 0, sizeof *r);
    r->process.job = JOB_TRAIN;
    r->process.rank = rank;
    r->process.ranks = ranks;
    r->options.batch = batch;
    r->options.seq = T;
    r->options.seed = seed;
    r->options.train = r->options.val = file;
    data_open(&r->data, &r->process, &r->options, row_rule(&r->data, (Documents)r->options.documents, true, -1));
}

static void close_data(DataRun* r) {
    mix_close(&r->data.mix);
    dataloader_close(&r->data.val);
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

TEST(every_rank_trains_on_rows_of_its_own_and_validates_on_all) {
    for (int ranks = 1; ranks <= 4; ranks++) {
        for (int batch = 1; batch <= 2; batch++) {
            uint32_t seen = 0;
            for (int rank = 0; rank < ranks; rank++) {
                DataRun r;
                open_data(&r, batch, rank, ranks, 0);
                const uint32_t rows = rows_of(&r.data.train, batch, ROWS / ranks / batch);
                CHECK((rows & seen) == 0, "batch %d, rank %d of %d: rows of another rank", batch, rank, ranks);
                seen |= rows;
                CHECK(rows_of(&r.data.val, 1, ROWS) == (1u << ROWS) - 1, "rank %d of %d: validation is not whole", rank, ranks);
                close_data(&r);
            }
            CHECK(seen == (1u << ROWS) - 1, "batch %d, %d ranks: an epoch lacks rows", batch, ranks);
        }
    }
}

/* A TensorSink: an arena. */
static bool keep(void* arena, const Param* p, size_t first, size_t n, const float* src, Error* e) {
    (void)e;
    memcpy((float*)arena + p->offset + first, src, n * sizeof *src);
    return true;
}

/* Draws the weights, or with `rank` the adapters, of a model of the flag --seed. Returns their number. */
static size_t drawn(const char* seed, int rank, float* arena) {
    char* argv[] = {"train_llama3", "--seed", (char*)seed};
    const Start start = {.dir = ""};
    Options o;
    ModelSpec m;
    memset(&m, 0, sizeof m);
    options_or_exit(&o, 3, argv, ON_CPU);
    config_preset(&m.config, "d1", 32);
    m.config.lora.rank = rank;
    m.config.lora.alpha = rank;
    m.config.lora.on = rank ? 1 : 0;
    m.table = param_table(&m.config);
    m.trained = trained_table(&m.config);
    if (rank > 0) {
        load_adapters(&start, &m, (uint64_t)o.seed, slot_to(keep, arena));
    } else {
        draw_weights(&m, (uint64_t)o.seed, stdout, slot_to(keep, arena));
    }
    const size_t n = m.trained.elements;
    param_table_free(&m.table);
    param_table_free(&m.trained);
    options_free(&o);
    return n;
}

/* 4294967303 is 2^32 + 7. */
TEST(all_64_bits_of_the_seed_choose_weights_and_order) {
    static float low[1 << 17], high[1 << 17], want[4];
    int32_t x[2][BATCH * T], y[BATCH * T];
    Error e = NO_ERROR;
    for (int rank = 0; rank <= 2; rank += 2) {
        const size_t n = drawn("7", rank, low);
        CHECK(n <= 1 << 17 && drawn("4294967303", rank, high) == n, "%zu elements", n);
        CHECK(memcmp(low, high, n * sizeof *low) != 0, "%s: the high half of the seed is lost", rank ? "adapters" : "weights");
        rank ? rand_even(want, 0, 4, 1 / sqrt(64.0), 4294967303u, 0) : rand_normal(want, 0, 4, 0.02, 4294967303u, 0);
        CHECK(memcmp(high, want, sizeof want) == 0, "%s: they begin with %g", rank ? "adapters" : "weights", (double)high[0]);
    }
    for (int i = 0; i < 2; i++) {
        DataRun r;
        open_data(&r, BATCH, 0, 1, (int64_t)i << 32);
        CHECK(dataloader_next(&r.data.train, x[i], y, &e), "%s", e.msg);
        close_data(&r);
    }
    CHECK(memcmp(x[0], x[1], sizeof x[0]) != 0, "the order of rows lacks the high half of the seed");
}

/* A run that began with the flag's default, 0, resumes with the same flags. */
TEST(lora_alpha_0_is_twice_the_rank_of_adapters_that_exist) {
    char* argv[] = {"train_llama3", "--lora-alpha", "0"};
    Start start = {.dir = "dev/test/pairs/lora_some"};
    const Process process = {.job = JOB_TRAIN};
    LoraConfig lora;
    Options given, chosen;
    options_or_exit(&given, 3, argv, ON_CPU);
    choose_typed(&chosen, &given);
    lora_of_folder(&lora, &start, &chosen, &process);
    choose_lora(&chosen, &lora);
    CHECK(lora.alpha == 16 && chosen.lora_alpha == 16, "alpha is %g", lora.alpha);
    CHECK(given.lora_alpha == 0, "a choice has changed what was typed: %g", given.lora_alpha);
    options_free(&chosen);
    options_free(&given);
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

TEST(a_long_validation_tells_how_far_it_is) {
    float losses[ROWS * T];
    char text[256];
    DataRun r;
    Trainer slow;
    ValidationLoss l;
    Error e = NO_ERROR;
    FILE* screen = tmpfile();
    memset(&slow, 0, sizeof slow);
    slow.in_flight = 1;
    slow.queue_losses = slow_queue_losses;
    slow.wait_losses = slow_wait_losses;
    open_data(&r, BATCH, 0, 1, 0);
    const Evaluator with = {&slow, losses, &r.process, &r.options, &r.data};
    CHECK(validate(&with, UINT64_MAX, screen, &l, &e), "%s", e.msg);
    CHECK(l.loss == 2 && l.trained == ROWS * T, "loss %g of %llu targets", l.loss, (unsigned long long)l.trained);
    rewind(screen);
    text[fread(text, 1, sizeof text - 1, screen)] = 0;
    CHECK(strcmp(text, "val      66.7 % of 24 rows, 1.3 rows/s, 0:06 left\n") == 0, "a file gets a line every ten seconds: %s",
          text);
    fclose(screen);
    close_data(&r);
}

// ---------------------------------------------------------------------------------------------------------------------
// checkpoints

enum { MOST_RANKS = 5 };

/* The fault of a checkpoint. */
typedef enum { NOTHING, NO_FOLDER, NO_WEIGHTS, NO_STATE, NO_FILE, CUT_STATE, OTHER_SUM, LARGE_WEIGHT, INFINITE } Fault;

/* One rank, for its functions. */
typedef struct {
    Fault fault;  // of this rank
    Fault any;    // of rank `bad`
    int bad;
} TestRank;

static float value_of(const Param* p, size_t i) { return (float)(p->kind * 1000 + p->layer + 2) + (float)i; }

static bool give(void* ctx, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    const TestRank* who = (const TestRank*)ctx;
    if (who->fault == NO_STATE) { return fail(e, "the disk is full"); }
    for (size_t i = 0; i < n; i++) { dst[i] = value_of(p, first + i); }
    if (who->fault == INFINITE) { dst[0] = INFINITY; }
    if (who->fault == LARGE_WEIGHT) { dst[0] = 65520; }
    return true;
}

static bool give_weights(void* ctx, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    TestRank sound = *(const TestRank*)ctx;
    if (sound.fault == NO_WEIGHTS) { return fail(e, "the disk is full"); }
    if (sound.fault != LARGE_WEIGHT) { sound.fault = NOTHING; }
    return give(&sound, p, first, n, dst, e);
}

static bool take(void* ctx, const Param* p, size_t first, size_t n, const float* src, Error* e) {
    (void)e;
    for (size_t i = 0; i < n; i++) { *(size_t*)ctx += src[i] == value_of(p, first + i); }
    return true;
}

/* An AddFiles: rank 0 calls it after all states are written and listed. It damages the state of rank `bad`, or its listed
 * checksum. */
static bool add_none(void* ctx, Checkpoint* k, Error* e) {
    const TestRank* p = (const TestRank*)ctx;
    char name[64], path[PATH_CAP];
    state_file_name(name, p->bad < 0 ? 0 : p->bad);
    if (p->any == CUT_STATE && path_join(path, k->tmp, name, e) && truncate(path, 1000) != 0) {
        die("%s: %s", path, strerror(errno));
    }
    for (size_t i = 0; p->any == OTHER_SUM && i < k->sums.count; i++) {
        if (strcmp(k->sums.items[i].name, name) == 0) { k->sums.items[i].crc ^= 1; }
    }
    return p->fault != NO_FILE || fail(e, "the disk is full");
}

/* Makes a program that writes step `step`. */
static void make_program(Program* p, int rank, int ranks, uint64_t step) {
    memset(p, 0, sizeof *p);
    options_default(&p->chosen, ON_CPU);
    p->chosen.out = folder;
    p->process.rank = rank;
    p->process.ranks = ranks;
    p->run.lock = -1;
    logger_none(&p->run.log);
    if (!config_preset(&p->spec.config, "d2", 40)) { die("no preset"); }
    p->run.state.step = step;
    p->run.state.loss_scale = 1;
    p->run.state.schedule = schedule_make(SCHEDULE_CONSTANT, 10, 0, 1, 1, 0, SHAPE_ROOT);
    strcpy(p->run.state.run, "00000000000000aa");
    spec_lay_out(&p->spec, &p->process);
}

/* The life of one rank: writes step 2, in which rank `bad` has a fault. Returns whether all is as it should be. */
static bool write_as_rank(const Ranks* r, Fault fault, int bad) {
    static Program p;
    static Team team;
    Error e = NO_ERROR;
    const int rank = r->rank, ranks = r->ranks;
    TestRank me = {rank == bad ? fault : NOTHING, fault, bad};
    make_program(&p, rank, ranks, 2);
    team_init(&team);
    must(team_open(&team, r, "", 120, &e), &e);
    p.process.team = ranks > 1 ? &team : NULL;
    if (me.fault == NO_FOLDER) { p.chosen.out = file; }
    p.chosen.keep = 1;
    const SafeDtype dtype = fault == LARGE_WEIGHT ? SAFE_F16 : SAFE_F32;
    TextRules rules;
    text_rules_init(&rules, NULL, &p.spec.config);
    const Saved what = {.process = &p.process,
                        .options = &p.chosen,
                        .start = &p.start,
                        .spec = &p.spec,
                        .rules = &rules,
                        .weights = slot_from(dtype, give_weights, &me),
                        .states = {{"m", SAFE_F32, give, NULL, &me, NULL}, {"v", SAFE_BF16, give, NULL, &me, NULL}},
                        .num_states = 2,
                        .add = add_none,
                        .add_ctx = &me};
    const bool saved = save_checkpoint(&what, &p.run, &e);
    team_close(&team);
    CHECK(e.too_large == (fault == LARGE_WEIGHT), "fault %d, rank %d: %s", fault, rank, e.msg);
    CHECK(p.run.state.not_finite == (fault == INFINITE), "fault %d, rank %d", fault, rank);
    // rank 0 checks the size that a rank reports; a reader also checks the checksum
    const bool wanted = fault == NOTHING || fault == OTHER_SUM || fault == INFINITE;
    const int who = fault == CUT_STATE ? 0 : bad;
    char other[64];
    snprintf(other, sizeof other, "rank %d: ", who);
    CHECK(saved == wanted, "fault %d, rank %d of %d: %s", fault, rank, ranks, e.msg);
    CHECK(wanted || (strstr(e.msg, other) != NULL) == (rank != who), "fault %d, rank %d of %d: %s", fault, rank, ranks, e.msg);
    CHECK(wanted || rank != who || e.msg[0], "fault %d, rank %d: no cause", fault, rank);
    CHECK(fault != CUT_STATE || rank != 0 || strstr(e.msg, "state_rank"), "%s", e.msg);
    CHECK(!p.run.newest[0] == !saved, "fault %d, rank %d: the newest is \"%s\"", fault, rank, p.run.newest);
    program_close(&p);
    return checks_failed == 0;
}

/* Lets so many processes write step 2 together. */
static void write_as_ranks(int ranks, Fault fault, int bad) {
    static uint64_t runs = 1;
    const uint64_t token = (uint64_t)getpid() << 16 | runs++;
    const int port = launch_free_port(token);
    fflush(stdout);
    pid_t pids[MOST_RANKS];
    for (int r = 0; r < ranks; r++) {
        pids[r] = fork();
        if (pids[r] != 0) { continue; }
        const Ranks rank = {r, ranks, r, ranks, "127.0.0.1", port, token, {0, 0}, false, "--gpus"};
        alarm(120);  // in case the ranks wait for a rank that is gone
        const bool ok = write_as_rank(&rank, fault, bad);
        fflush(stdout);
        _exit(ok ? 0 : 1);
    }
    for (int r = 0; r < ranks; r++) {
        int status = 0;
        CHECK(waitpid(pids[r], &status, 0) == pids[r] && status == 0, "fault %d: rank %d of %d ended with %d", fault, r, ranks,
              status);
    }
}

/* Returns how many elements of m one rank reads otherwise than `ranks` ranks wrote them. */
static size_t wrong_elements(const char* dir, int ranks) {
    Program p;
    Error e = NO_ERROR;
    size_t right = 0;
    make_program(&p, 0, 1, 2);
    const StateSlot slots[] = {{"m", SAFE_F32, NULL, take, &right, NULL}, {"v", SAFE_BF16, NULL, NULL, NULL, NULL}};
    CHECK(state_load(dir, ranks, &p.spec.trained, &p.spec.owned, slots, 2, &e), "%s", e.msg);
    const size_t wrong = p.spec.trained.num_params - right;
    program_close(&p);
    return wrong;
}

TEST(several_ranks_write_one_checkpoint) {
    const char* dir = test_path(folder, "step_00000002");
    for (int ranks = 1; ranks <= MOST_RANKS; ranks++) {
        TrainerState state;
        ModelConfig c;
        Error e = NO_ERROR;
        write_as_ranks(ranks, NOTHING, -1);
        CHECK(checkpoint_read(dir, CHECKPOINT_RUN, NULL, &state, &e) && model_check(dir, &c, &e), "%d ranks: %s", ranks, e.msg);
        CHECK(state.world_size == ranks, "%d ranks: world_size is %d", ranks, state.world_size);
        trainer_state_free(&state);
        CHECK(wrong_elements(dir, ranks) == 0, "%d ranks: the state differs", ranks);
        CHECK(remove_tree(dir, &e), "%s", e.msg);
    }
}

TEST(if_one_rank_fails_there_is_no_checkpoint_and_all_know) {
    static const Fault faults[] = {NO_FOLDER, NO_WEIGHTS, NO_STATE, NO_FILE, CUT_STATE};
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        for (int bad = 0; bad < 3; bad++) {
            const bool only_first = faults[i] == NO_FOLDER || faults[i] == NO_WEIGHTS || faults[i] == NO_FILE;
            if (only_first && bad > 0) { continue; }
            write_as_ranks(3, faults[i], bad);
            CHECK(!folder_has(folder, "step_00000002") && !folder_has(folder, "step_00000002.tmp"), "fault %d of rank %d",
                  faults[i], bad);
        }
    }
}

TEST(a_wrong_checksum_of_another_rank_is_found_by_the_reader) {
    TrainerState state;
    Error e = NO_ERROR;
    const char* dir = test_path(folder, "step_00000002");
    write_as_ranks(3, OTHER_SUM, 2);
    CHECK(!checkpoint_read(dir, CHECKPOINT_RUN, NULL, &state, &e) && strstr(e.msg, "state_rank00002") &&
              strstr(e.msg, "the checksum is"),
          "%s", e.msg);
    trainer_state_free(&state);
    CHECK(remove_tree(dir, &e), "%s", e.msg);
}

TEST(a_weight_that_16_bits_cannot_hold_is_refused_on_all_ranks) { write_as_ranks(3, LARGE_WEIGHT, 0); }

TEST(numbers_that_are_not_finite_remove_no_older_checkpoint) {
    Error e = NO_ERROR;
    const char* older = test_path(folder, "step_00000001");
    const char* dir = test_path(folder, "step_00000002");
    for (int ranks = 1; ranks <= 3; ranks += 2) {
        CHECK(make_directories(older, &e), "%s", e.msg);
        write_as_ranks(ranks, INFINITE, ranks - 1);
        CHECK(is_directory(older) && is_directory(dir), "%d ranks: a checkpoint is gone", ranks);
        write_as_ranks(ranks, NOTHING, -1);
        CHECK(!is_directory(older) && is_directory(dir), "%d ranks: --keep 1 keeps two", ranks);
        CHECK(remove_tree(dir, &e), "%s", e.msg);
    }
}

int main(void) {
#ifdef _OPENMP
    omp_set_num_threads(1);  // a child of fork() cannot use threads that OpenMP started before
#endif
    folder = test_folder();
    file = test_path(folder, "tokens.bin");
    write_tokens();
    return test_all();
}
