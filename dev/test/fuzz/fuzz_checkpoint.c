/* fuzz_checkpoint.c -- edits a folder of two checkpoints as the bytes say, then finds, verifies, cleans, prunes and sets aside
 * checkpoints. Edits cut, change, exchange or remove files, put links or folders in their place, and rename checkpoints. The
 * checkpoint that is found must be whole; every newer checkpoint must be damaged or belong to a run that was set back. Nothing
 * outside the folder may change. The bits of the first byte (below) choose what else is done. */
#define FILE_SUM_PIECE 256  // small buffers: allocating takes most of the time
#define TENSOR_READ_PIECE 64
#define LOG_LINE_MAX 1024
#include "fuzz.h"
#include "llmc/run/jobs/verify.h"

enum { STEPS = 2, MOST_FILES = 16 };
enum { KEEP_2 = 1, MAJOR = 2, FIND_MODEL = 4, BY_NAME = 8, SET_BACK = 16, VERIFY = 32, SET_ASIDE = 64 };  // of the first byte

static ModelConfig config;
static ParamTable table;
static char out[PATH_CAP], whole[PATH_CAP], outside[PATH_CAP], precious[PATH_CAP];
static char names[MOST_FILES][64];  // of the files of a checkpoint
static int num_names;

/* Writes the checkpoints into the folder `whole`, where no input changes them. */
static void make_checkpoints(void) {
    Error e = NO_ERROR;
    fuzz_tiny_model(&config);
    table = param_table(&config);
    ArenaRange range;
    const ArenaRanges owned = whole_arena(&table, &range);
    fuzz_path(out, "out");
    fuzz_path(whole, "whole");
    fuzz_path(outside, "outside");
    fuzz_path(precious, "outside/precious");
    must(make_directories(outside, &e), &e);
    fuzz_write(precious, "keep", 4);
    for (uint64_t step = 1; step <= STEPS; step++) {
        Checkpoint k;
        TrainerState s;
        const StateSlot slots[2] = {{"m", SAFE_F32, fuzz_give, NULL, NULL, NULL}, {"v", SAFE_F32, fuzz_give, NULL, NULL, NULL}};
        memset(&s, 0, sizeof s);
        s.step = step;
        s.world_size = 1;
        s.loss_scale = 1;
        s.schedule = schedule_make(SCHEDULE_CONSTANT, STEPS, 0, 1, 1, 0, SHAPE_ROOT);
        must(checkpoint_begin(&k, whole, step, &e) && checkpoint_model(&k, &config, NULL, &table, slots[0], &e) &&
                 checkpoint_state(&k, 0, &table, &owned, slots, 2, &e) && checkpoint_commit(&k, &s, &e),
             &e);
    }
    char path[PATH_CAP];
    struct dirent* entry = NULL;
    fuzz_path(path, "whole/step_00000001");
    DIR* d = opendir(path);
    while (folder_next(d, path, &entry, &e) && entry) {
        snprintf(names[num_names++], sizeof *names, "%.63s", entry->d_name);
        REQUIRE(num_names < MOST_FILES);
    }
    closedir(d);
    qsort(names, (size_t)num_names, sizeof *names, (int (*)(const void*, const void*))strcmp);
}

/* Fills OUT with hard links to the checkpoints' files: edits replace them. */
static void fill_out(void) {
    Error e = NO_ERROR;
    must(remove_tree(out, &e) && make_directories(out, &e), &e);
    for (int step = 1; step <= STEPS; step++) {
        char to[2 * PATH_CAP], from[2 * PATH_CAP];
        snprintf(to, sizeof to, "%s/step_%08d", out, step);
        REQUIRE(mkdir(to, 0700) == 0);
        for (int i = 0; i < num_names; i++) {
            snprintf(from, sizeof from, "%s/step_%08d/%s", whole, step, names[i]);
            snprintf(to, sizeof to, "%s/step_%08d/%s", out, step, names[i]);
            REQUIRE(link(from, to) == 0);
        }
    }
}

/* Writes the log of a run that was set back to step 1 and then reached other weights at step 2. */
static void write_log(void) {
    static const char log[] =
        "{\"event\":\"resume\",\"step\":1,\"run\":\"b\",\"parent_run\":\"a\",\"parent_step\":1}\n"
        "{\"event\":\"checkpoint\",\"step\":2,\"weights_crc32c\":7}\n";
    char path[PATH_CAP + 16];
    snprintf(path, sizeof path, "%s/log.jsonl", out);
    fuzz_write(path, log, sizeof log - 1);
}

/* Corrects the checksum of a trainer_state.json: its reader refuses any other before it reads the text. */
static char* with_checksum(char* text, size_t* size) {
    char *tail = NULL, *next = text;
    while ((next = strstr(next, trainer_state_tail))) { tail = next++; }
    if (!tail) { return text; }
    char* out_text = NULL;
    FILE* f = open_memstream(&out_text, size);
    fwrite(text, 1, (size_t)(tail - text), f);
    fprintf(f, "%s%" PRIu32 "\n}\n", trainer_state_tail, crc_of(text, (size_t)(tail - text)));
    fclose(f);
    free(text);
    return out_text;
}

typedef enum { EDIT_BYTE, EDIT_CUT, EDIT_REPLACE, EDIT_REMOVE, EDIT_SWAP, EDIT_LINK, EDIT_FOLDER, EDIT_RENAME, NUM_EDITS } Edit;

/* Makes one edit from four bytes, and for some edits from more. Returns how many bytes it used. */
static size_t edit(const uint8_t* data, size_t size) {
    static const char* const folders[] = {"step_00000002", "step_00000009",     "step_00000002.tmp",
                                          "step_12",       "step_00000003.tmp", "step_00000001.old.tmp"};
    const Edit kind = (Edit)(data[0] % NUM_EDITS);
    const int step = 1 + (data[0] >> 4) % STEPS, file = data[1] % num_names;
    char path[2 * PATH_CAP], other[2 * PATH_CAP];
    Error e = NO_ERROR;
    snprintf(path, sizeof path, "%s/step_%08d/%s", out, step, names[file]);
    if (kind == EDIT_RENAME) {
        snprintf(path, sizeof path, "%s/step_%08d", out, step);
        snprintf(other, sizeof other, "%s/%s", out, folders[data[1] % (sizeof folders / sizeof *folders)]);
        rename(path, other);
        return 2;
    }
    size_t length = 0, used = 4;
    char* text = read_file(path, &length, 1 << 20, &e);
    if (!text) { return used; }  // an earlier edit took it
    const size_t at = length ? (data[2] | (size_t)data[3] << 8) % length : 0;
    unlink(path);
    switch (kind) {
        case EDIT_BYTE:
            if (length && size > 4) { text[at] = (char)data[used++]; }
            break;
        case EDIT_CUT: length = at; break;
        case EDIT_REPLACE:  // up to `at` bytes of the input
            length = size_min(at, size - used);
            free(text);
            text = fuzz_text(data + used, length);
            used += length;
            break;
        case EDIT_SWAP:  // the other step's file
            free(text);
            snprintf(other, sizeof other, "%s/step_%08d/%s", whole, 1 + data[2] % STEPS, names[data[3] % num_names]);
            text = read_file(other, &length, 1 << 20, &e);
            break;
        case EDIT_LINK: REQUIRE(symlink(data[2] & 1 ? outside : precious, path) == 0); break;
        case EDIT_FOLDER: REQUIRE(mkdir(path, 0700) == 0); break;
        default: break;
    }
    if (kind < EDIT_REMOVE || kind == EDIT_SWAP) {
        if (strcmp(names[file], "trainer_state.json") == 0 && data[0] & 8) { text = with_checksum(text, &length); }
        fuzz_write(path, text, length);
    }
    free(text);
    return used;
}

/* Checks the files that the state lists. The check shares only the checksum with the reader. */
static void check_whole(const char* dir, const TrainerState* s) {
    for (size_t i = 0; i < s->files.count; i++) {
        const FileSum* f = &s->files.items[i];
        char path[2 * PATH_CAP];
        size_t length = 0;
        Error e = NO_ERROR;
        snprintf(path, sizeof path, "%s/%s", dir, f->name);
        char* text = read_file(path, &length, 1 << 20, &e);
        REQUIRE(text && length == f->size && crc_of(text, length) == f->crc);
        free(text);
    }
}

/* Checks that no sound checkpoint up to the step `set_back` is newer than `found`, and that every checkpoint that --verify
 * passes can be read. */
static void check_newest(const char* found, uint64_t found_step, uint64_t set_back, bool verified) {
    uint64_t* steps = NULL;
    size_t count = 0;
    Error e = NO_ERROR;
    must(checkpoint_list(out, &steps, &count, &e), &e);
    for (size_t i = 0; i < count; i++) {
        char dir[PATH_CAP];
        TrainerState s;
        Error cause = NO_ERROR;
        const bool newer = !*found || steps[i] > found_step;
        REQUIRE(checkpoint_path(dir, out, steps[i], "", &cause));
        if (!newer && !verified) { continue; }
        const bool sound = checkpoint_read(dir, CHECKPOINT_RUN, NULL, &s, &cause);
        REQUIRE(!newer || !sound || s.step > set_back || !checkpoint_check_found(&s, steps[i], &cause));
        REQUIRE(!verified || !verify_checkpoint(dir, NULL) || (sound && (set_back == UINT64_MAX || s.step != 2)));
        trainer_state_free(&s);
    }
    free(steps);
}

/* Loads the weights of a checkpoint that was found for the model alone. */
static void load_model(const char* dir, const TrainerState* s) {
    ModelConfig c;
    Error e = NO_ERROR;
    bool ok = model_check(dir, &c, &e);
    if (ok) {
        ParamTable t = param_table(&c);
        ok = model_load_sums(dir, &c, &t, &s->files, NULL, slot_to(NULL, NULL), NULL, &e);
        param_table_free(&t);
    }
    fuzz_check_error(ok, &e);
}

/* Finds the newest checkpoint in every way. */
static void find(uint8_t how) {
    char dir[PATH_CAP], model_dir[PATH_CAP];
    TrainerState s, model;
    Error e = NO_ERROR, ignored = NO_ERROR, cause = NO_ERROR;
    const bool ok = checkpoint_find(out, CHECKPOINT_RUN, NULL, dir, &s, &e);
    fuzz_check_error(ok, &e);
    if (ok && dir[0]) { check_whole(dir, &s); }
    check_newest(ok ? dir : "", s.step, how & SET_BACK ? 1 : UINT64_MAX, how & VERIFY);
    if (how & BY_NAME) {  // also opens the checkpoint that it found
        const bool opened = checkpoint_open(out, CHECKPOINT_RUN, NULL, model_dir, &model, &cause);
        fuzz_check_error(opened, &cause);
        REQUIRE(opened == (ok && dir[0]) && (!opened || model.step == s.step));
        trainer_state_free(&model);
    }
    if (how & BY_NAME && ok && dir[0]) {
        must(checkpoint_open(dir, CHECKPOINT_RUN, NULL, model_dir, &model, &ignored) && strcmp(dir, model_dir) == 0, &ignored);
        trainer_state_free(&model);
    }
    if (how & FIND_MODEL) {
        const bool has_model = checkpoint_find(out, CHECKPOINT_MODEL, NULL, model_dir, &model, &ignored);
        REQUIRE(!has_model || !ok || model.step >= s.step);
        if (has_model && model_dir[0]) { load_model(model_dir, &model); }
        trainer_state_free(&model);
    }
    trainer_state_free(&s);
}

/* Removes leftovers of runs and old checkpoints, then sets aside the checkpoints after step 1. */
static void clean(uint8_t how) {
    Error stale = NO_ERROR, e = NO_ERROR, aside = NO_ERROR;
    fuzz_check_error(checkpoint_remove_stale(out, NULL, &stale), &stale);
    const int keep = how & KEEP_2 ? 2 : 1;
    checkpoint_prune(out, keep, how & MAJOR ? 2 : 0, STEPS);
    uint64_t* steps = NULL;
    size_t count = 0, moved = 0;
    int kept = 0;
    must(checkpoint_list(out, &steps, &count, &e), &e);
    for (size_t i = 0; i < count; i++) { kept += steps[i] <= STEPS && !(how & MAJOR && steps[i] % 2 == 0); }
    REQUIRE(kept <= keep);
    const size_t later = count > 0 && steps[0] > 1 ? count - (steps[count - 1] <= 1) : 0;
    free(steps);
    if (!(how & SET_ASIDE)) { return; }
    must(checkpoint_set_aside(out, 1, &moved, &aside) && checkpoint_list(out, &steps, &count, &aside), &aside);
    REQUIRE(moved == later && (count == 0 || steps[0] <= 1));
    free(steps);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (!num_names) { make_checkpoints(); }
    if (size < 1) { return 0; }
    fill_out();
    for (size_t at = 1; at + 4 <= size;) { at += edit(data + at, size - at); }
    if (data[0] & SET_BACK) { write_log(); }
    find(data[0]);
    clean(data[0]);
    size_t length = 0;
    Error e = NO_ERROR;
    char* text = read_file(precious, &length, 64, &e);
    REQUIRE(text && length == 4);
    free(text);
    return 0;
}
