/* test_checkpoint.c -- checkpoints: the reader returns what the writer wrote, and finds damage. If the process dies or the disk
 * fills up at any point, the last whole checkpoint stays. */
#define _GNU_SOURCE 1
#include <unistd.h>

static void fault_point(const char* where);

/* Replaces fsync(): only a point to die at. The tests check the order of the steps, not the disk. */
static int test_fsync(int fd) {
    fault_point("fsync");
    return fd < 0 ? -1 : 0;
}
#define fsync test_fsync

#include <dirent.h>
#include <errno.h>

/* Replaces readdir(): call number readdir_fails_at returns NULL, with this errno: EIO is an error, 0 the end of the folder. */
static long readdirs_seen, readdir_fails_at = -1;
static int readdir_error = EIO;
static struct dirent* test_readdir(DIR* d) {
    if (readdirs_seen++ != readdir_fails_at) { return readdir(d); }
    errno = readdir_error;
    return NULL;
}
#define readdir test_readdir
#define LLMC_FAULT_POINT(where) fault_point(where)
#define TENSOR_READ_PIECE 61  // elements: small models are read in many batches
#include "llmc/files/checkpoint.h"

#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "dev/test/test.h"

static long faults_seen, fault_at = -1;  // the process ends at fault point number fault_at

static void fault_point(const char* where) {
    (void)where;
    if (faults_seen++ == fault_at) { _exit(42); }
}

// ---------------------------------------------------------------------------------------------------------------------
// a small run: its weights, m and v depend only on the step, so the step determines a checkpoint's content

typedef struct {
    float* arena;
    size_t lo, hi;
} Side;

/* Elements [lo, hi) of the arena as ranges. Stays valid for the next seven calls. */
static const ArenaRanges* range(size_t lo, size_t hi) {
    static ArenaRange items[8];
    static ArenaRanges lists[8];
    static int next;
    const int i = next++ % 8;
    items[i].first = lo;
    items[i].count = hi - lo;
    lists[i].items = &items[i];
    lists[i].count = 1;
    return &lists[i];
}

static ModelConfig small_config(void) {
    ModelConfig c;
    config_preset(&c, "d1", 50);
    c.hidden_size = 12;
    c.head_dim = 6;
    c.num_heads = 2;
    c.num_kv_heads = 1;
    c.num_layers = 3;
    c.intermediate_size = 20;
    return c;
}

static ModelConfig small;
static ParamTable table;

/* All elements, which are 0. */
static Side new_side(void) {
    const Side s = {(float*)test_memory(table.elements * sizeof(float)), 0, table.elements};
    return s;
}

static void fill(float* arena, const ParamTable* t, uint64_t step, int salt) {
    for (int i = 0; i < t->count; i++) {
        for (size_t k = 0; k < param_size(&t->items[i]); k++) {
            arena[t->items[i].offset + k] = (float)((double)(k * 31 + (size_t)i * 7 + (size_t)salt) * 0.001 + (double)step);
        }
    }
}

static bool give(void* ctx, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    (void)e;
    memcpy(dst, ((Side*)ctx)->arena + p->offset + first, n * sizeof(float));
    return true;
}

static bool take(void* ctx, const Param* p, size_t first, size_t n, const float* src, Error* e) {
    Side* s = (Side*)ctx;
    (void)e;
    CHECK(p->offset + first >= s->lo && p->offset + first + n <= s->hi, "%s: outside of the rank's range", p->name);
    memcpy(s->arena + p->offset + first, src, n * sizeof(float));
    return true;
}

static TrainerState small_state(uint64_t step, int world_size) {
    TrainerState s;
    memset(&s, 0, sizeof s);
    s.step = step;
    s.seed = UINT64_MAX - 5;  // does not fit in a double
    s.data_row = step * 4 + ((uint64_t)1 << 60) + 1;
    s.tokens = step * 100;
    s.updates = step - 1;
    s.row_order = ROW_ORDER;
    s.data = 0x0123456789ABCDEFu;
    s.fingerprint = 0xFEDCBA9876543210u;
    strcpy(s.build, "a \"compiler\"");
    strcpy(s.run, "00000000000000aa");
    strcpy(s.parent_run, "00000000000000bb");
    s.parent_step = 1;
    s.world_size = world_size;
    s.loss_scale = 65536.0;
    s.scale_good = 17;
    s.schedule = schedule_make(SCHEDULE_WSD, 90, 2, 1, 1.0 / 3, 0, SHAPE_ROOT);
    schedule_shorten(&s.schedule, 3, 50);
    for (int i = 0; i < 200; i++) { outlier_update(&s.loss, 1.0 / (i + 3)); }
    for (int i = 0; i < 5; i++) { outlier_update(&s.grad_norm, 1e-300 / (i + 3)); }
    s.options = "{\"lr\": 0.001, \"out\": \"x\"}";
    return s;
}

/* Writes one checkpoint of the small run, as `world_size` ranks. */
static bool timed_now;  // save() writes timed checkpoints

static bool save(const char* out, uint64_t step, int world_size, const char* source_dir, Error* e) {
    Side w = new_side(), m = new_side(), v = new_side();
    fill(w.arena, &table, step, 0);
    fill(m.arena, &table, step, 1);
    fill(v.arena, &table, step, 2);
    const StateSlot slots[2] = {{"m", SAFE_F32, give, NULL, &m, NULL}, {"v", SAFE_F32, give, NULL, &v, NULL}};
    TrainerState s = small_state(step, world_size);
    s.timed = timed_now;
    Checkpoint k;
    SideFiles files = {NULL, 0, 0};
    if (source_dir) { files = side_files_read(source_dir); }
    bool ok = checkpoint_begin(&k, out, step, e);
    ok = ok && checkpoint_model(&k, &small, NULL, &table, slot_from(SAFE_F32, give, &w), e);
    for (int r = 0; ok && r < world_size; r++) {
        const size_t lo = table.elements * (size_t)r / (size_t)world_size,
                     hi = table.elements * (size_t)(r + 1) / (size_t)world_size;
        ok = checkpoint_state(&k, r, &table, range(lo, hi), slots, 2, e);
    }
    if (ok) { checkpoint_side_files(&k, &files); }
    ok = ok && checkpoint_commit(&k, &s, e);
    if (!ok) { checkpoint_abort(&k); }
    side_files_free(&files);
    return ok;
}

static bool same_params(const float* a, const float* b, const ParamTable* t) {
    for (int i = 0; i < t->count; i++) {
        const Param* p = &t->items[i];
        if (memcmp(a + p->offset, b + p->offset, param_size(p) * sizeof(float)) != 0) { return false; }
    }
    return true;
}

/* Loads the newest checkpoint as `ranks` ranks and checks weights, m and v for its step. Returns the step; 0: none. */
static uint64_t load_newest(const char* out, int ranks) {
    ModelConfig found;
    TrainerState s;
    Error e = NO_ERROR;
    char dir[PATH_CAP];
    const bool ok = checkpoint_find(out, CHECKPOINT_RUN, NULL, dir, &s, &e);
    CHECK(ok, "%s", e.msg);
    if (!ok || !dir[0]) {
        trainer_state_free(&s);
        return 0;
    }
    Side side[3] = {new_side(), new_side(), new_side()}, want = new_side();
    CHECK(model_check(dir, &found, &e) && model_load(dir, &found, &table, slot_to(take, &side[0]), &e), "%s", e.msg);
    const StateSlot slots[2] = {{"m", SAFE_F32, NULL, take, &side[1], NULL}, {"v", SAFE_F32, NULL, take, &side[2], NULL}};
    for (int r = 0; r < ranks; r++) {
        for (int i = 1; i < 3; i++) {
            side[i].lo = table.elements * (size_t)r / (size_t)ranks;
            side[i].hi = table.elements * (size_t)(r + 1) / (size_t)ranks;
        }
        CHECK(state_load(dir, s.world_size, &table, range(side[1].lo, side[1].hi), slots, 2, &e), "%s", e.msg);
    }
    for (int i = 0; i < 3; i++) {
        fill(want.arena, &table, s.step, i);
        CHECK(same_params(side[i].arena, want.arena, &table), "%s: slot %d differs from what was saved", dir, i);
    }
    const uint64_t step = s.step;
    trainer_state_free(&s);
    return step;
}

static void clean(const char* dir) {
    Error e = NO_ERROR;
    if (!remove_tree(dir, &e)) { printf("    %s\n", e.msg); }
}

static void put_file(const char* dir, const char* name, const char* text) { test_put(test_path(dir, name), text); }

static bool has(const char* dir, const char* name) { return file_exists(test_path(dir, name)); }

// ---------------------------------------------------------------------------------------------------------------------

TEST(what_was_saved_is_read_back) {
    char dir[PATH_CAP];
    Error e = NO_ERROR;
    TrainerState s;
    const char* out = test_folder();
    CHECK(save(out, 7, 1, NULL, &e), "%s", e.msg);
    CHECK(load_newest(out, 1) == 7, "wrong step");
    CHECK(checkpoint_find(out, CHECKPOINT_RUN, NULL, dir, &s, &e), "%s", e.msg);
    const TrainerState want = small_state(7, 1);
    CHECK(s.seed == want.seed && s.data_row == want.data_row && s.tokens == want.tokens && s.updates == want.updates,
          "integers");
    CHECK(s.fingerprint == want.fingerprint && s.world_size == 1 && s.loss_scale == want.loss_scale && s.scale_good == 17,
          "numbers");
    CHECK(s.row_order == ROW_ORDER && s.data == want.data && strcmp(s.build, want.build) == 0 && !s.not_finite, "fingerprints");
    CHECK(strcmp(s.run, want.run) == 0 && strcmp(s.parent_run, want.parent_run) == 0 && s.parent_step == 1, "the run");
    s.schedule.lr = want.schedule.lr;  // it is an option
    CHECK(s.schedule.steps == 50 && s.schedule.count == want.schedule.count, "the schedule differs");
    for (int i = 0; i < want.schedule.count; i++) {
        const Phase a = s.schedule.phases[i], b = want.schedule.phases[i];
        CHECK(a.from == b.from && a.to == b.to && a.first == b.first && a.last == b.last && a.shape == b.shape, "phase %d", i);
    }
    CHECK(memcmp(&s.loss, &want.loss, sizeof s.loss) == 0, "the full window differs");
    CHECK(memcmp(&s.grad_norm, &want.grad_norm, sizeof s.grad_norm) == 0, "the partial window differs");
    double lr = 0;
    CHECK(json_double(&s.json, s.saved_options, "lr", 0, 1, &lr, &e) && lr == 0.001, "%s", e.msg);
    trainer_state_free(&s);
}

/* Reads a state in which the first `from` is replaced by `to` ("": cut out), with its checksum made right. */
static bool read_changed(const char* text, const char* from, const char* to, TrainerState* s, Error* e) {
    const char* at = strstr(text, from);
    char* changed = (char*)xmalloc(strlen(text) + strlen(to) + 64);
    CHECK(at != NULL, "no %s in the state", from);
    const char* tail = strstr(text, trainer_state_tail);
    int n =
        sprintf(changed, "%.*s%s%.*s", (int)(at - text), text, to, (int)(tail - at - (long)strlen(from)), at + strlen(from));
    n += sprintf(changed + n, "%s%" PRIu32 "\n}\n", trainer_state_tail, crc_of(changed, (size_t)n));
    return trainer_state_from_text(s, changed, (size_t)n, "state", e);
}

/* Returns the text of the state of the small run's step 9. */
static const char* state_text(void) {
    Error e = NO_ERROR;
    const char* out = test_folder();
    CHECK(save(out, 9, 1, NULL, &e), "%s", e.msg);
    return test_text(test_path(out, "step_00000009/trainer_state.json"));
}

TEST(later_formats_are_refused_and_the_first_is_read_without_what_it_lacks) {
    TrainerState s;
    Error e = NO_ERROR;
    const char* text = state_text();
    CHECK(!read_changed(text, "\"format\": 2", "\"format\": 3", &s, &e) && contains(e.msg, "format is 3"), "%s", e.msg);
    trainer_state_free(&s);
    static const char* const added[] = {"row_order", "data_fingerprint", "parent_step", "build",
                                        "run",       "parent_run",       "not_finite"};
    for (size_t i = 0; i < sizeof added / sizeof *added; i++) {
        char key[64];
        memset(&e, 0, sizeof e);
        snprintf(key, sizeof key, "  \"%s\"", added[i]);
        CHECK(!read_changed(text, key, "  \"other\"", &s, &e) && contains(e.msg, added[i]), "%s: %s", added[i], e.msg);
        trainer_state_free(&s);
    }
    memset(&e, 0, sizeof e);
    CHECK(!read_changed(text, "00000000000000aa", "00000000000000aaa", &s, &e) && contains(e.msg, "run"), "%s", e.msg);
    trainer_state_free(&s);
    static const char* const wrong[][3] = {
        {"\"steps\": 50", "\"steps\": -1", "steps"},
        {"\"phases\": [", "\"phases\": [], \"other\": [", "phases"},
        {"\"from\": 2", "\"from\": 0", "from"},
        {"\"to\": 2,", "\"to\": -1,", "to"},
        {"\"first\": 0.0,", "\"first\": -0.1,", "first"},
        {"\"last\": 1.0,", "\"last\": 1.1,", "last"},
        {"\"rise\"", "\"fall\"", "shape"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        memset(&e, 0, sizeof e);
        CHECK(!read_changed(text, wrong[i][0], wrong[i][1], &s, &e) && contains(e.msg, wrong[i][2]), "%s: %s", wrong[i][1],
              e.msg);
        trainer_state_free(&s);
    }
}

/* 16-bit weights are rounded, and the state has the exact weights, unless 16 bits hold the exact weights themselves. */
TEST(weights_of_16_bits_have_masters_unless_these_are_bfloat16) {
    static const struct {
        const char *dtype, *member;
        bool master;
    } cases[] = {{"f32", "", false},
                 {"bf16", "", true},
                 {"f16", "", true},
                 {"bf16", "\"bf16_weights\": false, ", true},
                 {"f32", "\"bf16_weights\": true, ", false},
                 {"bf16", "\"bf16_weights\": true, ", false},
                 {"f16", "\"bf16_weights\": true, ", true},
                 {"f16", "\"f32_weights\": true, ", false}};
    const char* text = state_text();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        TrainerState s;
        Error e = NO_ERROR;
        char to[128];
        snprintf(to, sizeof to, "%s\"options\": {\"export_dtype\": \"%s\", ", cases[i].member, cases[i].dtype);
        CHECK(read_changed(text, "\"options\": {", to, &s, &e), "%s: %s", to, e.msg);
        CHECK(trainer_state_has_master(&s) == cases[i].master, "%s", to);
        trainer_state_free(&s);
    }
    TrainerState s;
    Error e = NO_ERROR;
    CHECK(
        !read_changed(text, "\"options\": {", "\"bf16_weights\": 1, \"options\": {", &s, &e) && contains(e.msg, "bf16_weights"),
        "%s", e.msg);
    trainer_state_free(&s);
}

TEST(every_run_gets_an_id_of_its_own_and_a_branch_knows_its_parent) {
    TrainerState s = small_state(9, 1);
    RunId other;
    trainer_state_branch(&s);
    run_id_draw(other);
    CHECK(strcmp(s.parent_run, "00000000000000aa") == 0 && s.parent_step == 9, "%s at %d", s.parent_run, (int)s.parent_step);
    CHECK(strlen(s.run) == 16 && strspn(s.run, "0123456789abcdef") == 16, "\"%s\"", s.run);
    CHECK(strcmp(s.run, other) != 0 && strcmp(s.run, s.parent_run) != 0, "two runs have the id %s", s.run);
}

TEST(any_number_of_ranks_reads_what_any_number_wrote) {
    for (int writers = 1; writers <= 7; writers += 2) {
        for (int readers = 1; readers <= 5; readers += 2) {
            Error e = NO_ERROR;
            const char* out = test_folder();
            CHECK(save(out, 3, writers, NULL, &e), "%s", e.msg);
            CHECK(load_newest(out, readers) == 3, "%d ranks wrote, %d read", writers, readers);
        }
    }
}

TEST(a_state_that_lacks_or_repeats_elements_is_refused) {
    Error e = NO_ERROR;
    const char* out = test_folder();
    Side side = new_side();
    const StateSlot m = {"m", SAFE_F32, give, take, &side, NULL}, other = {"master", SAFE_BF16, give, NULL, &side, NULL};
    CHECK(state_save(out, 0, &table, range(0, 1000), &m, 1, NULL, &e), "%s", e.msg);
    CHECK(state_save(out, 1, &table, range(1001, table.elements), &m, 1, NULL, &e), "%s", e.msg);
    FAILS(&e, state_load(out, 2, &table, range(0, table.elements), &m, 1, &e), "each once");
    CHECK(state_save(out, 1, &table, range(999, table.elements), &m, 1, NULL, &e), "%s", e.msg);
    FAILS(&e, state_load(out, 2, &table, range(0, table.elements), &m, 1, &e), "each once");
    CHECK(state_save(out, 1, &table, range(1000, table.elements), &m, 1, NULL, &e), "%s", e.msg);
    CHECK(state_load(out, 2, &table, range(0, table.elements), &m, 1, &e), "%s", e.msg);
    FAILS(&e, state_load(out, 2, &table, range(0, table.elements), &other, 1, &e), "does not keep");
    StateSlot two[2] = {m, other};
    CHECK(!state_load(out, 2, &table, range(0, table.elements), two, 2, &e) && contains(e.msg, "master."),
          "a slot is missing: %s", e.msg);
}

TEST(a_state_that_is_not_finite_is_refused_by_file_tensor_and_index) {
    Side side = new_side();
    const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 9; i++) {
        char where[64];
        Error e = NO_ERROR;
        const Param* p = &table.items[i % 3];
        const size_t at = p->rows > 1 ? 3 * p->cols + 5 : 5;
        const StateSlot slot = {i % 2 ? "v" : "master", SAFE_F32, give, take, &side, NULL};
        const char* out = test_folder();
        side.arena[p->offset + at] = bad[i / 3];
        CHECK(state_save(out, 0, &table, range(0, table.elements), &slot, 1, NULL, &e), "%s", e.msg);
        side.arena[p->offset + at] = 0;
        CHECK(!state_load(out, 1, &table, range(0, table.elements), &slot, 1, &e), "%s %g was taken", p->name, bad[i / 3]);
        snprintf(where, sizeof where, p->rows > 1 ? "at [3, 5]" : "at [5]");
        CHECK(contains(e.msg, "state_rank00000.safetensors: tensor ") && contains(e.msg, p->name) && contains(e.msg, where),
              "%s", e.msg);
        side.arena[p->offset + at] = 0;
    }
}

TEST(a_mean_of_squares_below_0_is_refused) {
    Side side = new_side();
    const float values[] = {-1e-30f, -0.0f, 0.0f, 1e-30f};
    for (int i = 0; i < 8; i++) {
        Error e = NO_ERROR;
        const StateSlot slot = {i < 4 ? "v" : "m", SAFE_F32, give, take, &side, NULL};
        const char* out = test_folder();
        side.arena[table.items[0].offset + 3] = values[i % 4];
        CHECK(state_save(out, 0, &table, range(0, table.elements), &slot, 1, NULL, &e), "%s", e.msg);
        CHECK(state_load(out, 1, &table, range(0, table.elements), &slot, 1, &e) == (i != 0), "%s %g: %s", slot.name,
              values[i % 4], e.msg);
        CHECK(i != 0 || (contains(e.msg, "tensor v.") && contains(e.msg, "is -1e-30 at [0, 3], wanted a number of at least 0")),
              "%s", e.msg);
    }
}

TEST(moments_in_bf16_come_back_exactly) {
    Error e = NO_ERROR;
    const char* out = test_folder();
    Side a = new_side(), b = new_side();
    fill(a.arena, &table, 1, 3);
    for (size_t i = 0; i < table.elements; i++) { a.arena[i] = f32_from_bf16(bf16_from_f32(a.arena[i])); }
    const StateSlot slot = {"m", SAFE_BF16, give, NULL, &a, NULL}, back = {"m", SAFE_BF16, NULL, take, &b, NULL};
    CHECK(state_save(out, 0, &table, range(0, table.elements), &slot, 1, NULL, &e), "%s", e.msg);
    CHECK(state_load(out, 1, &table, range(0, table.elements), &back, 1, &e), "%s", e.msg);
    CHECK(same_params(a.arena, b.arena, &table), "differs");
}

/* Changes one file of a checkpoint: cuts it, lengthens it, flips a bit of byte `at`, or removes it. */
static void damage(const char* path, char how, long at) {
    struct stat st;
    if (stat(path, &st) != 0) { die("%s: %s", path, strerror(errno)); }
    if (how == 'd') {
        unlink(path);
        return;
    }
    if (how == 'c' || how == 'l') {
        if (truncate(path, st.st_size + (how == 'c' ? -1 : 1)) != 0) { die("%s: %s", path, strerror(errno)); }
        return;
    }
    FILE* f = fopen(path, "r+b");
    fseek(f, at, SEEK_SET);
    const int c = fgetc(f);
    fseek(f, at, SEEK_SET);
    fputc(c ^ 1, f);
    fclose(f);
}

TEST(checksums_tell_how_far_they_are) {
    char path[PATH_CAP];
    uint64_t size = 0;
    uint32_t crc = 0;
    Error e = NO_ERROR;
    const char* out = test_folder();
    CHECK(save(out, 7, 1, NULL, &e) && path_join(path, out, "step_00000007/model.safetensors", &e), "%s", e.msg);
    Progress p = progress_begin(NULL, "check", 0, "B");
    CHECK(file_sum(path, &size, &crc, &p, &e), "%s", e.msg);
    CHECK(size > 0 && p.done == size, "%llu of %llu bytes", (unsigned long long)p.done, (unsigned long long)size);
}

TEST(a_damaged_checkpoint_is_passed_over) {
    static const char* const files[] = {"config.json", "model.safetensors", "state_rank00000.safetensors", "trainer_state.json",
                                        "model.safetensors.index.json"};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        for (const char* how = "clfd"; *how; how++) {
            char path[PATH_CAP + 64], dir[PATH_CAP];
            Error e = NO_ERROR;
            TrainerState s;
            const char* out = test_folder();
            CHECK(save(out, 1, 1, NULL, &e) && save(out, 2, 1, NULL, &e), "%s", e.msg);
            snprintf(path, sizeof path, "%s/step_00000002/%s", out, files[i]);
            damage(path, *how, 20);
            CHECK(load_newest(out, 1) == 1, "%s damaged by %c: not passed over", files[i], *how);
            snprintf(path, sizeof path, "%s/step_00000001/%s", out, files[i]);
            damage(path, *how, 20);
            CHECK(!checkpoint_find(out, CHECKPOINT_RUN, NULL, dir, &s, &e) && contains(e.msg, files[i]), "all damaged, but: %s",
                  e.msg);
            trainer_state_free(&s);
        }
    }
}

TEST(every_flipped_bit_of_trainer_state_is_found) {
    Error e = NO_ERROR;
    const char* out = test_folder();
    CHECK(save(out, 9, 1, NULL, &e), "%s", e.msg);
    const char *path = test_path(out, "step_00000009/trainer_state.json"), *text = test_text(path);
    const size_t size = strlen(text);
    size_t accepted = 0;
    for (size_t bit = 0; bit < size * 8; bit++) {
        char* copy = xstrdup(text);
        copy[bit / 8] = (char)(copy[bit / 8] ^ (1 << bit % 8));
        TrainerState s;
        memset(&e, 0, sizeof e);
        if (trainer_state_from_text(&s, copy, size, path, &e)) { accepted++; }
        trainer_state_free(&s);
    }
    CHECK(accepted == 0, "%zu flipped bits were not found", accepted);
}

TEST(the_step_must_be_the_folders) {
    char dir[PATH_CAP];
    Error e = NO_ERROR;
    TrainerState s;
    const char* out = test_folder();
    CHECK(save(out, 5, 1, NULL, &e), "%s", e.msg);
    const char* from = test_path(out, "step_00000005");
    const char* to = test_path(out, "step_00000006");
    CHECK(rename(from, to) == 0, "rename");
    CHECK(!checkpoint_find(out, CHECKPOINT_RUN, NULL, dir, &s, &e) && contains(e.msg, "step is 5"), "%s", e.msg);
    trainer_state_free(&s);
    memset(&e, 0, sizeof e);
    CHECK(checkpoint_open(to, CHECKPOINT_RUN, NULL, dir, &s, &e) && s.step == 5,
          "a folder that is named outright may have any name: %s", e.msg);
    trainer_state_free(&s);
}

TEST(resume_paths_are_understood) {
    char dir[PATH_CAP];
    Error e = NO_ERROR;
    TrainerState s;
    const char* out = test_folder();
    CHECK(checkpoint_find(out, CHECKPOINT_RUN, NULL, dir, &s, &e) && dir[0] == 0, "an empty folder has no checkpoint: %s",
          e.msg);
    FAILS(&e, checkpoint_open(out, CHECKPOINT_RUN, NULL, dir, &s, &e), "no checkpoint");
    FAILS(&e, checkpoint_open("/nonexistent/x", CHECKPOINT_RUN, NULL, dir, &s, &e), "missing");
    CHECK(save(out, 1, 1, NULL, &e) && save(out, 2, 1, NULL, &e), "%s", e.msg);
    CHECK(checkpoint_open(out, CHECKPOINT_RUN, NULL, dir, &s, &e) && s.step == 2, "%s", e.msg);
    trainer_state_free(&s);
    const char* path = test_path(out, "step_00000001");
    CHECK(checkpoint_open(path, CHECKPOINT_RUN, NULL, dir, &s, &e) && s.step == 1, "%s", e.msg);
    trainer_state_free(&s);
}

TEST(old_checkpoints_are_pruned_and_majors_and_the_newest_stay) {
    Error e = NO_ERROR;
    const char* out = test_folder();
    for (uint64_t step = 1; step <= 9; step++) { CHECK(save(out, step, 1, NULL, &e), "%s", e.msg); }
    checkpoint_prune(out, 0, 4, 9);
    CHECK(has(out, "step_00000001"), "keep 0 keeps all");
    checkpoint_prune(out, 2, 4, 9);
    static const int stay[] = {4, 8, 9};
    for (int step = 1, k = 0; step <= 9; step++) {
        char name[32];
        snprintf(name, sizeof name, "step_%08d", step);
        const bool want = k < 3 && stay[k] == step;
        if (want) { k++; }
        CHECK(has(out, name) == want, "%s is %s", name, want ? "gone" : "still there");
    }
    // a run set back to step 4 writes step 5: later steps stay, and 5 survives any keep
    CHECK(save(out, 5, 1, NULL, &e), "%s", e.msg);
    checkpoint_prune(out, 1, 0, 5);
    CHECK(has(out, "step_00000005") && has(out, "step_00000008") && has(out, "step_00000009"), "took too much");
    CHECK(!has(out, "step_00000004"), "4 is not major any more, but still there");
    checkpoint_prune(out, 1000, 0, 9);
    CHECK(has(out, "step_00000005"), "keep above the count");
}

TEST(timed_checkpoints_give_way_to_any_later_one_and_do_not_count) {
    Error e = NO_ERROR;
    const char* out = test_folder();
    for (uint64_t step = 1; step <= 6; step++) {
        timed_now = step % 2 == 0;
        CHECK(save(out, step, 1, NULL, &e), "%s", e.msg);
    }
    timed_now = false;
    checkpoint_prune(out, 0, 0, 4);
    CHECK(!has(out, "step_00000002") && has(out, "step_00000004") && has(out, "step_00000006"), "timed ones before 4 go alone");
    CHECK(has(out, "step_00000001") && has(out, "step_00000003"), "keep 0 keeps the others");
    checkpoint_prune(out, 2, 0, 6);
    CHECK(has(out, "step_00000006") && !has(out, "step_00000004"), "the newest timed one stays, the one before goes");
    CHECK(has(out, "step_00000005") && has(out, "step_00000003") && !has(out, "step_00000001"),
          "a timed one counts for --keep");
}

TEST(an_existing_step_is_replaced) {
    Error e = NO_ERROR;
    const char* out = test_folder();
    CHECK(save(out, 2, 1, NULL, &e), "%s", e.msg);
    const char* path = test_path(out, "step_00000002/model.safetensors");
    damage(path, 'f', 500);
    CHECK(save(out, 2, 2, NULL, &e), "%s", e.msg);
    CHECK(load_newest(out, 1) == 2, "the new one is not there");
    CHECK(!has(out, "step_00000002.tmp"), "the old one was left behind");
}

TEST(files_of_the_source_folder_come_along) {
    char dir[PATH_CAP];
    Error e = NO_ERROR;
    TrainerState s;
    const char *out = test_folder(), *from = test_folder(), *again = test_folder();
    static const char* const files[][2] = {
        {"tokenizer.json", "{}"},
        {"LICENSE", "free"},
        {"tokenizer.model", "IQ== 0\nIg== 1\n"},
        {"config.json", "{\"old\": 1}"},
        {"model-00001-of-00002.safetensors", "x"},
        {"model.safetensors.index.json", "x"},
        {"pytorch_model.bin", "x"},
        {".hidden", "x"},
        {"notes.txt", "x"},
        {"tokenizer.safetensors", "x"},
        {"chat_template.jinja", "{{ messages }}"},
        {"additional_chat_templates/rag.jinja", "x"},
        {"additional_chat_templates/notes.txt", "x"},
        {"trainer_state.json", "x"},
        {"state_rank00001.safetensors", "x"},
    };
    CHECK(mkdir(test_path(from, "additional_chat_templates"), 0777) == 0 && mkdir(test_path(from, "folder"), 0777) == 0,
          "mkdir");
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) { put_file(from, files[i][0], files[i][1]); }
    CHECK(save(out, 1, 1, from, &e), "%s", e.msg);
    CHECK(checkpoint_find(out, CHECKPOINT_RUN, NULL, dir, &s, &e), "%s", e.msg);
    CHECK(has(dir, "tokenizer.json") && has(dir, "LICENSE"), "tokenizer or licence missing");
    CHECK(has(dir, "original/tokenizer.model") && !has(dir, "tokenizer.model"), "tiktoken's vocabulary belongs into original/");
    CHECK(!has(dir, "pytorch_model.bin") && !has(dir, ".hidden") && !has(dir, "notes.txt"), "took too much");
    const FileSum* index = file_sums_find(&s.files, "model.safetensors.index.json");
    CHECK(index && index->size > 1 && !has(dir, "tokenizer.safetensors"), "took too much");
    CHECK(has(dir, "chat_template.jinja") && has(dir, "additional_chat_templates/rag.jinja") &&
              !has(dir, "additional_chat_templates/notes.txt"),
          "a chat template is missing");
    CHECK(!has(dir, "model-00001-of-00002.safetensors") && !has(dir, "state_rank00001.safetensors") && !has(dir, "folder"),
          "took too much");
    trainer_state_free(&s);
    // a run that starts from this checkpoint passes them on
    clean(from);
    CHECK(save(again, 2, 1, dir, &e), "%s", e.msg);
    CHECK(checkpoint_find(again, CHECKPOINT_RUN, NULL, dir, &s, &e) && has(dir, "original/tokenizer.model") &&
              has(dir, "LICENSE"),
          "%s", e.msg);
    trainer_state_free(&s);
}

TEST(side_files_outlive_their_folder) {
    const char *from = test_folder(), *to = test_folder();
    put_file(from, "LICENSE", "free");
    put_file(from, "README.md", "read");
    put_file(to, "README.md", "there already");
    SideFiles files = side_files_read(from);
    clean(from);
    side_files_write(&files, to);
    CHECK(strcmp(test_text(test_path(to, "LICENSE")), "free") == 0, "LICENSE");
    CHECK(strcmp(test_text(test_path(to, "README.md")), "there already") == 0, "README.md was overwritten");
    side_files_free(&files);
    files = side_files_read("/nonexistent/folder");
    CHECK(files.count == 0, "files of a folder that does not exist");
    side_files_free(&files);
}

static void make_link(const char* target, const char* dir, const char* name) {
    const char* path = test_path(dir, name);
    if (symlink(target, path) != 0) { die("%s: %s", path, strerror(errno)); }
}

/* Makes a download cache: snapshots/1 holds links into blobs. */
TEST(links_are_followed_within_the_folder_and_its_cache_alone) {
    char blobs[PATH_CAP + 32];
    Error e = NO_ERROR;
    const char* root = test_folder();
    const char* from = test_path(root, "snapshots/1");
    snprintf(blobs, sizeof blobs, "%s/blobs", root);
    CHECK(make_directories(from, &e) && make_directories(blobs, &e), "%s", e.msg);
    put_file(root, "secret", "x");
    put_file(blobs, "cafe", "{}");
    put_file(from, "notes.txt", "free");
    make_link("../../blobs/cafe", from, "tokenizer.json");
    make_link("notes.txt", from, "LICENSE");
    make_link("../../secret", from, "README.md");
    make_link("/etc/hostname", from, "NOTICE");
    make_link("nowhere", from, "merges.txt");
    make_link("../../secret", from, "chat_template.jinja");  // it decides the ids of texts: from anywhere, as tokenizer.json
    CHECK(mkfifo(strcat(strcpy(blobs, from), "/vocab.json"), 0600) == 0, "mkfifo");
    put_file(from, "chat_template.json", "x");
    CHECK(path_join(blobs, from, "chat_template.json", &e), "%s", e.msg);
    CHECK(truncate(blobs, SIDE_FILE_MAX + 1) == 0, "truncate");
    SideFiles files = side_files_read(from);
    CHECK(files.count == 3 && side_files_have(&files, "tokenizer.json") && side_files_have(&files, "LICENSE") &&
              side_files_have(&files, "chat_template.jinja"),
          "%zu files", files.count);
    side_files_free(&files);
}

TEST(side_files_have_a_limit_in_all) {
    char path[PATH_CAP + 32];
    const char* from = test_folder();
    for (int i = 0; i < 5; i++) {
        snprintf(path, sizeof path, "%s/tokenizer.%d", from, i);
        put_file(from, path + strlen(from) + 1, "x");
        CHECK(truncate(path, SIDE_FILE_MAX - 1) == 0, "truncate");
    }
    put_file(from, "LICENSE", "x");
    SideFiles files = side_files_read(from);
    CHECK(files.bytes <= (size_t)SIDE_FILES_MAX && files.count == 5, "%zu files, %zu bytes", files.count, files.bytes);
    side_files_free(&files);
}

TEST(removing_a_folder_follows_no_link) {
    Error e = NO_ERROR;
    const char* out = test_folder();
    const char* kept = test_folder();
    put_file(kept, "precious", "x");
    make_link(kept, out, "step_00000005.tmp");
    const char* path = test_path(out, "step_00000006.tmp");
    CHECK(mkdir(path, 0777) == 0, "mkdir");
    make_link(kept, path, "link");
    CHECK(checkpoint_remove_stale(out, NULL, &e), "%s", e.msg);
    CHECK(has(kept, "precious"), "the link's target was emptied");
    CHECK(!has(out, "step_00000005.tmp") && !has(out, "step_00000006.tmp"), "the stale folders are still there");
}

/* Makes every readdir() call fail in turn: a half-read folder must never count as a whole one. */
TEST(a_folder_that_cannot_be_read_is_no_end_of_it) {
    long errors = 0;
    for (long n = 0;; n++) {
        char dir[PATH_CAP];
        Error e = NO_ERROR;
        TrainerState s;
        uint64_t* steps = NULL;
        size_t count = 0;
        const char* out = test_folder();
        const char* from = test_folder();
        put_file(from, "LICENSE", "free");
        CHECK(save(out, 1, 1, NULL, &e), "%s", e.msg);
        readdirs_seen = 0;
        readdir_fails_at = n;
        const bool saved = save(out, 2, 1, from, &e);
        const bool listed = checkpoint_list(out, &steps, &count, &e);
        checkpoint_prune(out, 1, 0, 2);
        const bool cleaned = checkpoint_remove_stale(out, NULL, &e);
        const bool reached = readdirs_seen > n;
        readdir_fails_at = -1;
        errors += !saved || !listed || !cleaned;
        CHECK(!listed || count == (saved ? 2u : 1u), "call %ld: %zu checkpoints are listed", n, count);
        CHECK(saved || contains(e.msg, strerror(EIO)), "call %ld: %s", n, e.msg);
        memset(&e, 0, sizeof e);
        CHECK(checkpoint_find(out, CHECKPOINT_RUN, NULL, dir, &s, &e) && s.step == (saved ? 2u : 1u), "call %ld: %s", n, e.msg);
        CHECK(!saved || has(dir, "model.safetensors"), "call %ld", n);
        trainer_state_free(&s);
        free(steps);
        clean(out);
        clean(from);
        if (!reached) { break; }
    }
    CHECK(errors >= 5, "%ld errors: the calls are gone", errors);
}

/* Saves a checkpoint of a step whose loss was not finite, by the run `run`. */
static void save_ruined(const char* out, uint64_t step, const char* run) {
    char path[PATH_CAP + 64], *at = NULL;
    size_t size = 0;
    Error e = NO_ERROR;
    CHECK(save(out, step, 1, NULL, &e), "%s", e.msg);
    snprintf(path, sizeof path, "%s/step_%08d/trainer_state.json", out, (int)step);
    char* text = read_file(path, &size, 1 << 20, &e);
    char* changed = (char*)xmalloc(size + 64);
    CHECK(text && (at = strstr(text, "00000000000000aa")), "%s", e.msg);
    memcpy(at, run, 16);
    at = strstr(text, "\"not_finite\": false");
    const char *rest = at + strlen("\"not_finite\": false"), *tail = strstr(text, trainer_state_tail);
    int n = sprintf(changed, "%.*s\"not_finite\": true%.*s", (int)(at - text), text, (int)(tail - rest), rest);
    n += sprintf(changed + n, "%s%" PRIu32 "\n}\n", trainer_state_tail, crc_of(changed, (size_t)n));
    CHECK(write_file(path, changed, (size_t)n, &e), "%s", e.msg);
    free(text);
    free(changed);
}

/* Returns the step from which a run resumes if all checkpoints are of steps that were not finite; 0: none. */
static uint64_t ruined_found(const char* out) {
    char dir[PATH_CAP];
    Error e = NO_ERROR;
    TrainerState s;
    const uint64_t step = checkpoint_find(out, CHECKPOINT_RUN, NULL, dir, &s, &e) ? s.step : 0;
    trainer_state_free(&s);
    return step;
}

TEST(of_ruined_checkpoints_the_newest_of_the_run_that_wrote_last_is_taken) {
    const char* out = test_folder();
    for (uint64_t step = 1; step <= 3; step++) { save_ruined(out, step, "00000000000000aa"); }
    CHECK(ruined_found(out) == 3, "step %d", (int)ruined_found(out));
    put_file(out, "log.jsonl",
             "{\"event\":\"resume\",\"step\":2,\"run\":\"00000000000000cc\",\"parent_run\":\"00000000000000aa\","
             "\"parent_step\":2}\n");
    CHECK(ruined_found(out) == 2, "step %d of a run that was set back to step 2", (int)ruined_found(out));
}

/* Half of a folder that a killed process left must not be published with the new one. */
TEST(a_temporary_folder_that_was_left_is_emptied) {
    Error e = NO_ERROR;
    const char* out = test_folder();
    const char* path = test_path(out, "x.tmp");
    CHECK(make_directories(path, &e), "%s", e.msg);
    put_file(path, "adapter_config.json", "{}");
    const int fd = create_temporary_folder(path, &e);
    CHECK(fd >= 0 && is_directory(path) && !has(path, "adapter_config.json"), "%s", e.msg);
    put_file(path, "config.json", "{}");
    CHECK(create_temporary_folder(path, &e) < 0 && contains(e.msg, "another process is writing") && has(path, "config.json"),
          "a folder that a process writes: %s", e.msg);
    close(fd);
}

/* A network file system may drop names from a listing without a word. The list must hold every written file all the same. */
TEST(a_folder_that_hides_files_does_not_seal_a_checkpoint_without_them) {
    static const char* const wanted[] = {"config.json", "model.safetensors", "LICENSE", "model.safetensors.index.json",
                                         "state_rank00000.safetensors"};
    readdir_error = 0;
    for (long n = 0;; n++) {
        char dir[PATH_CAP];
        Error e = NO_ERROR;
        TrainerState s;
        const char* out = test_folder();
        put_file(out, "LICENSE", "free");
        readdirs_seen = 0;
        readdir_fails_at = n;
        const bool saved = save(out, 1, 1, out, &e);
        const bool reached = readdirs_seen > n;
        readdir_fails_at = -1;
        CHECK(saved && checkpoint_find(out, CHECKPOINT_RUN, NULL, dir, &s, &e), "call %ld: %s", n, e.msg);
        for (size_t i = 0; saved && i < sizeof wanted / sizeof *wanted; i++) {
            // the licence is copied from a folder whose listing was cut, and then the copy lacks it
            const bool there = has(dir, wanted[i]);
            CHECK(there || strcmp(wanted[i], "LICENSE") == 0, "call %ld: %s was not written", n, wanted[i]);
            CHECK(!there || file_sums_find(&s.files, wanted[i]), "call %ld: %s is not listed", n, wanted[i]);
        }
        trainer_state_free(&s);
        clean(out);
        if (!reached) { break; }
    }
    readdir_error = EIO;
}

TEST(a_file_that_is_lost_before_the_end_is_missed) {
    static const char* const files[] = {"config.json", "model.safetensors", "state_rank00000.safetensors"};
    Side w = new_side();
    const StateSlot m = {"m", SAFE_F32, give, NULL, &w, NULL};
    for (int how = 0; how < 2; how++) {
        for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
            Error e = NO_ERROR;
            Checkpoint k;
            const TrainerState s = small_state(1, 1);
            const char* out = test_folder();
            CHECK(checkpoint_begin(&k, out, 1, &e) && checkpoint_model(&k, &small, NULL, &table, m, &e) &&
                      checkpoint_state(&k, 0, &table, range(0, table.elements), &m, 1, &e),
                  "%s", e.msg);
            const char* path = test_path(k.tmp, files[i]);
            damage(path, how ? 'c' : 'd', 0);
            CHECK(!checkpoint_commit(&k, &s, &e) && contains(e.msg, files[i]), "%s, %d: %s", files[i], how, e.msg);
            CHECK(!has(out, "step_00000001") && !has(out, "step_00000001.tmp"), "%s, %d", files[i], how);
        }
    }
}

/* Makes step_00000001 (of one rank) and a new copy of it (of two ranks). A run that dies between the two renames of an exchange
 * leaves both. `damaged`: 1 the new folder, 2 the old one, 3 both. */
static void cut_exchange(const char* out, int damaged) {
    char from[PATH_CAP + 64], to[PATH_CAP + 64];
    Error e = NO_ERROR;
    static const char* const names[2] = {"step_00000001.tmp", "step_00000001.old.tmp"};
    for (int old = 1; old >= 0; old--) {
        CHECK(save(out, 1, old ? 1 : 2, NULL, &e), "%s", e.msg);
        snprintf(from, sizeof from, "%s/step_00000001", out);
        snprintf(to, sizeof to, "%s/%s", out, names[old]);
        CHECK(rename(from, to) == 0, "rename");
        strcat(to, "/model.safetensors");
        if (damaged & (1 << old)) { damage(to, 'f', 300); }
    }
}

TEST(an_exchange_that_was_cut_in_two_is_ended) {
    for (int damaged = 0; damaged < 4; damaged++) {
        char dir[PATH_CAP];
        Error e = NO_ERROR;
        TrainerState s;
        const char* out = test_folder();
        cut_exchange(out, damaged);
        CHECK(checkpoint_remove_stale(out, NULL, &e), "%s", e.msg);
        CHECK(checkpoint_find(out, CHECKPOINT_RUN, NULL, dir, &s, &e), "damaged %d: %s", damaged, e.msg);
        const int want = damaged == 3 ? 0 : damaged & 1 ? 1 : 2;
        CHECK(want ? s.world_size == want : dir[0] == 0, "damaged %d: ranks %d", damaged, s.world_size);
        CHECK(!has(out, "step_00000001.tmp") && !has(out, "step_00000001.old.tmp"), "copies are left");
        trainer_state_free(&s);
        // beside a whole step, copies are only in the way
        CHECK(save(out, 1, 3, NULL, &e), "%s", e.msg);
        cut_exchange(out, 0);
        CHECK(save(out, 1, 3, NULL, &e) && checkpoint_remove_stale(out, NULL, &e), "%s", e.msg);
        CHECK(checkpoint_find(out, CHECKPOINT_RUN, NULL, dir, &s, &e) && s.world_size == 3, "%s", e.msg);
        trainer_state_free(&s);
    }
}

TEST(a_step_may_be_a_link_to_another_disk) {
    Error e = NO_ERROR;
    const char* out = test_folder();
    const char* disk = test_folder();
    CHECK(save(out, 1, 1, NULL, &e), "%s", e.msg);
    const char* from = test_path(out, "step_00000001");
    const char* to = test_path(disk, "moved");
    CHECK(rename(from, to) == 0, "rename");
    make_link(to, out, "step_00000001");
    CHECK(load_newest(out, 1) == 1, "not read through the link");
    CHECK(save(out, 1, 2, NULL, &e), "the link is not replaced: %s", e.msg);
    CHECK(load_newest(out, 1) == 1 && has(to, "model.safetensors"), "the link's target was touched");
    clean(from);
    make_link(to, out, "step_00000001");
    CHECK(save(out, 2, 1, NULL, &e), "%s", e.msg);
    checkpoint_prune(out, 1, 0, 2);
    CHECK(!has(out, "step_00000001") && !has(out, "step_00000001.tmp"), "the link was not pruned");
    CHECK(has(to, "model.safetensors"), "the link's target was emptied");
}

TEST(a_lock_is_a_regular_file_of_its_own) {
    char text[32];
    const char* out = test_folder();
    const char* path = test_path(out, ".lock");
    put_file(out, "precious", "precious");
    for (int kind = 0; kind < 3; kind++) {
        Error e = NO_ERROR;
        int fd = -1;
        CHECK((kind == 0 ? symlink("precious", path) : kind == 1 ? mkfifo(path, 0600) : mkdir(path, 0700)) == 0, "make");
        CHECK(!out_lock(&fd, out, &e) && contains(e.msg, ".lock: is a") && fd == -1, "kind %d: %s", kind, e.msg);
        remove(path);
    }
    path = test_path(out, "precious");
    FILE* f = fopen(path, "rb");
    CHECK(f && fgets(text, sizeof text, f) && strcmp(text, "precious") == 0, "written through a link");
    fclose(f);
    for (int kind = 0; kind < 3; kind++) {  // a hard link: a lock of another folder gives way, another file is refused
        static const char* const texts[] = {"1234\n", "1234", "12 months\n"};
        Error e = NO_ERROR;
        int fd = -1;
        put_file(out, "other", texts[kind]);
        snprintf(text, sizeof text, "%s", texts[kind]);
        path = test_path(out, ".lock");
        CHECK(link(test_path(out, "other"), path) == 0, "%s", strerror(errno));
        const bool locked = out_lock(&fd, out, &e);
        CHECK(locked == (kind == 0) && (locked || contains(e.msg, "hard link")), "kind %d: %s", kind, e.msg);
        size_t size = 0;
        char* left = read_file(test_path(out, "other"), &size, 64, &e);
        CHECK(left && strcmp(left, text) == 0 && file_exists(path), "kind %d: the other file, or .lock, has changed", kind);
        free(left);
        out_unlock(&fd);
        unlink(path);
    }
}

TEST(a_folder_that_is_moved_away_is_not_shared_with_another_run) {
    char aside[PATH_CAP + 8];
    Error e = NO_ERROR;
    int ours = -1, other = -1;
    const char* out = test_folder();
    snprintf(aside, sizeof aside, "%s.aside", out);
    CHECK(out_lock(&ours, out, &e) && out_keep(&ours, out, &e), "%s", e.msg);
    CHECK(rename(out, aside) == 0, "rename");
    CHECK(out_keep(&ours, out, &e) && has(out, ".lock"), "made again: %s", e.msg);
    FAILS(&e, out_lock(&other, out, &e), "another run");
    clean(out);
    CHECK(out_lock(&other, out, &e), "%s", e.msg);
    CHECK(!out_keep(&ours, out, &e) && contains(e.msg, "another run's folder now") && contains(e.msg, out), "shared: %s",
          e.msg);
    CHECK(ours < 0, "the lock is lost, and the run can tell");
    e.msg[0] = 0;
    out_unlock(&other);
    CHECK(!out_keep(&ours, out, &e), "that run's checkpoints are there though it has ended");
}

/* Loads a checkpoint as --generate does: trainer_state.json, then the weights. */
static bool load_model_alone(const char* dir, Error* e) {
    TrainerState s;
    ModelConfig c;
    bool ok = checkpoint_read(dir, CHECKPOINT_MODEL, NULL, &s, e) && model_check(dir, &c, e);
    if (ok) {
        Side side = new_side();
        ok = model_load_sums(dir, &c, &table, &s.files, NULL, slot_to(take, &side), NULL, e);
    }
    trainer_state_free(&s);
    return ok;
}

TEST(the_model_alone_needs_no_state_and_is_checked_while_it_is_read) {
    Error e = NO_ERROR;
    TrainerState s;
    const char* out = test_folder();
    CHECK(save(out, 1, 3, NULL, &e), "%s", e.msg);
    const char* dir = test_path(out, "step_00000001");
    const char* path = test_path(dir, "state_rank00001.safetensors");
    damage(path, 'f', 300);
    CHECK(load_model_alone(dir, &e), "a damaged state: %s", e.msg);
    damage(path, 'd', 0);
    CHECK(load_model_alone(dir, &e), "no state: %s", e.msg);
    CHECK(!checkpoint_read(dir, CHECKPOINT_RUN, NULL, &s, &e), "the run cannot go on without it");
    trainer_state_free(&s);
    path = test_path(dir, "model.safetensors");
    struct stat st;
    CHECK(stat(path, &st) == 0, "stat");
    uint64_t header = 0;
    FILE* f = fopen(path, "rb");
    CHECK(fread(&header, 1, 8, f) == 8, "the header's length");
    fclose(f);
    for (long at = 0; at < st.st_size; at += 257) {
        memset(&e, 0, sizeof e);
        damage(path, 'f', at);
        CHECK(!load_model_alone(dir, &e) && contains(e.msg, dir), "byte %ld: %s", at, e.msg);
        CHECK(at < 8 + (long)header || contains(e.msg, "the checksum is "), "byte %ld: %s", at, e.msg);
        damage(path, 'f', at);  // flip it back
    }
    memset(&e, 0, sizeof e);
    CHECK(load_model_alone(dir, &e), "%s", e.msg);
    damage(path, 'c', 0);
    CHECK(!load_model_alone(dir, &e) && contains(e.msg, "bytes long"), "cut: %s", e.msg);
}

static void* lives_on(void* unused) {
    const struct timespec time = {0, 300000000};
    while (!process_is_ending(getpid())) { sched_yield(); }
    nanosleep(&time, NULL);
    _exit(0);
    return unused;
}

/* A process whose first thread has ended is ending for the kernel, but keeps the lock as long as another thread lives. */
TEST(a_run_waits_for_a_killed_one_that_is_not_gone_yet) {
    char text[8];
    Error e = NO_ERROR;
    int fd = -1, ready[2];
    const char* out = test_folder();
    CHECK(pipe(ready) == 0, "pipe");
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        pthread_t thread;
        alarm(10);
        const bool ok = out_lock(&fd, out, &e) && pthread_create(&thread, NULL, lives_on, NULL) == 0;
        if (write(ready[1], ok ? "y" : "n", 1) != 1) { _exit(1); }
        syscall(SYS_exit, 0);  // of this thread alone, without the ends of OpenMP
    }
    CHECK(read(ready[0], text, 1) == 1 && text[0] == 'y', "the first run got no lock");
    for (const double until = now_seconds() + 5; !process_is_ending(child) && now_seconds() < until;) { sched_yield(); }
    CHECK(out_lock(&fd, out, &e) && !process_is_ending(getpid()), "%s", e.msg);
    waitpid(child, NULL, 0);
    CHECK(!process_is_ending(child) && !process_is_ending(0), "a process that is gone");
    out_unlock(&fd);
}

TEST(a_second_run_in_one_folder_is_refused_while_the_first_lives) {
    char text[8];
    Error e = NO_ERROR;
    const char* out = test_folder();
    int ready[2], done[2];
    CHECK(pipe(ready) == 0 && pipe(done) == 0, "pipe");
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        int fd = -1;
        close(done[1]);
        const bool ok = out_lock(&fd, out, &e);
        if (write(ready[1], ok ? "y" : "n", 1) != 1) { _exit(1); }
        if (read(done[0], text, 1) < 0) { _exit(1); }  // waits until the parent closes its end
        _exit(0);                                      // does not unlock, as if killed
    }
    int fd = -1;
    close(done[0]);
    CHECK(read(ready[0], text, 1) == 1 && text[0] == 'y', "the first run got no lock");
    char number[32];
    snprintf(number, sizeof number, "process %ld", (long)child);
    CHECK(!out_lock(&fd, out, &e) && contains(e.msg, out) && contains(e.msg, number), "not refused by name: %s", e.msg);
    close(done[1]);
    waitpid(child, NULL, 0);
    memset(&e, 0, sizeof e);
    CHECK(out_lock(&fd, out, &e), "after the first ended: %s", e.msg);
    out_unlock(&fd);
    CHECK(out_lock(&fd, out, &e), "after unlocking: %s", e.msg);
    out_unlock(&fd);
    close(ready[0]);
    close(ready[1]);
}

/* Writes step 2 and removes step 1 in a child that dies at fault point n. Returns whether it died there. */
static bool die_at(const char* out, long n) {
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        Error e = NO_ERROR;
        faults_seen = 0;
        fault_at = n;
        if (!save(out, 2, 2, NULL, &e)) { _exit(1); }
        checkpoint_prune(out, 1, 0, 2);
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && (WEXITSTATUS(status) == 42 || WEXITSTATUS(status) == 0), "status %d", status);
    return WIFEXITED(status) && WEXITSTATUS(status) == 42;
}

TEST(a_process_that_dies_anywhere_leaves_a_whole_checkpoint) {
    long n = 0, kept_old = 0, kept_new = 0;
    for (bool died = true; died; n++) {
        Error e = NO_ERROR;
        const char* out = test_folder();
        CHECK(save(out, 1, 1, NULL, &e), "%s", e.msg);
        // every other time, a damaged step 2 exists already and is replaced
        if (n % 2) {
            CHECK(save(out, 2, 1, NULL, &e), "%s", e.msg);
            const char* path = test_path(out, "step_00000002/model.safetensors");
            damage(path, 'c', 0);
        }
        died = die_at(out, n);
        const uint64_t step = load_newest(out, 1);
        CHECK(step == 1 || step == 2, "died at point %ld: step %d", n, (int)step);
        kept_old += step == 1;
        kept_new += step == 2;
        // the next run cleans up and continues
        CHECK(checkpoint_remove_stale(out, NULL, &e), "%s", e.msg);
        CHECK(!has(out, "step_00000002.tmp") && !has(out, "step_00000001.tmp"), "died at point %ld: .tmp left", n);
        CHECK(load_newest(out, 1) == step, "died at point %ld: cleaning lost the checkpoint", n);
        CHECK(save(out, 3, 1, NULL, &e) && load_newest(out, 1) == 3, "died at point %ld: %s", n, e.msg);
    }
    CHECK(n > 50 && kept_old > 50 && kept_new >= 3, "%ld points, %ld old, %ld new: the points are gone", n, kept_old, kept_new);
}

TEST(a_full_disk_keeps_the_old_checkpoint_and_removes_the_partial_one) {
    // a limit on the file size stands in for a full disk: writes fail after that many bytes
    for (rlim_t limit = 0; limit < 60000; limit = limit * 2 + 1) {
        Error e = NO_ERROR;
        const char* out = test_folder();
        CHECK(save(out, 1, 1, NULL, &e), "%s", e.msg);
        fflush(stdout);
        const pid_t child = fork();
        if (child == 0) {
            struct rlimit r;
            r.rlim_cur = r.rlim_max = limit;
            signal(SIGXFSZ, SIG_IGN);
            if (setrlimit(RLIMIT_FSIZE, &r) != 0) { _exit(3); }
            const bool saved = save(out, 2, 1, NULL, &e);
            _exit(saved ? 0 : contains(e.msg, "step_00000002.tmp/") && contains(e.msg, strerror(EFBIG)) ? 1 : 2);
        }
        int status = 0;
        waitpid(child, &status, 0);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) <= 1, "limit %ld: status %d, wanted an error with file and cause",
              (long)limit, WEXITSTATUS(status));
        const bool saved = WEXITSTATUS(status) == 0;
        CHECK(!saved || limit > 10000, "limit %ld: cannot have worked", (long)limit);
        CHECK(!has(out, "step_00000002.tmp"), "limit %ld: the partial checkpoint was left", (long)limit);
        CHECK(load_newest(out, 1) == (saved ? 2u : 1u), "limit %ld: the old checkpoint is gone", (long)limit);
    }
}

TEST(names_that_leave_the_folder_are_refused) {
    static const char* const bad[] = {"", "/etc/passwd", "../x", "a/../x", "a//x", ".lock", "a/", "a/.b"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) { CHECK(!checkpoint_good_name(bad[i]), "\"%s\" passed", bad[i]); }
    CHECK(checkpoint_good_name("config.json") && checkpoint_good_name("original/tokenizer.model"), "good names");
    static const char* const not_steps[] = {"step_",         "step_1",         "step_00000001.tmp",
                                            "step_0000000x", "xstep_00000001", "step_000000010000000000000"};
    uint64_t step = 0;
    for (size_t i = 0; i < sizeof not_steps / sizeof *not_steps; i++) {
        CHECK(!checkpoint_step_of(not_steps[i], &step), "\"%s\" passed", not_steps[i]);
    }
    CHECK(checkpoint_step_of("step_123456789", &step) && step == 123456789, "nine digits");
}

TEST(a_thousand_openings_leak_no_descriptor) {
    char dir[PATH_CAP];
    Error e = NO_ERROR;
    const char* out = test_folder();
    CHECK(save(out, 1, 3, NULL, &e), "%s", e.msg);
    const int before = open("/dev/null", O_RDONLY);
    for (int i = 0; i < 1000; i++) {
        TrainerState s;
        ModelConfig c;
        CHECK(checkpoint_find(out, CHECKPOINT_RUN, NULL, dir, &s, &e) && model_check(dir, &c, &e), "%s", e.msg);
        trainer_state_free(&s);
    }
    const int after = open("/dev/null", O_RDONLY);
    CHECK(after == before + 1, "descriptors grew from %d to %d", before, after);
    close(before);
    close(after);
}

int main(void) {
    small = small_config();
    table = param_table(&small);
    return test_all();
}
