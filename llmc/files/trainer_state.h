/* trainer_state.h -- reads and writes trainer_state.json: where a run stands (step, data position, outlier windows, options),
 * which run it is, what the numbers depend on, and the size and CRC-32C of every other file of the checkpoint. Its last line
 * holds the CRC-32C of everything before it.
 *
 * A run has an id, drawn at random when it begins. Resuming keeps it. A run that is set back to an earlier step, or continues
 * in another folder, is a new one: "parent_run" and "parent_step" say where it branched off. A resumed run compares the
 * fingerprints of data, tokenizer and build, and ROW_ORDER, and so finds what has changed. "bf16_weights" says that the run has
 * no master weights: a checkpoint's weights in BF16 are then the exact ones.
 *
 * The training loop keeps a TrainerState up to date.
 */
#ifndef LLMC_TRAINER_STATE_H
#define LLMC_TRAINER_STATE_H

#include "llmc/base/os.h"  // defines: os_random

#include <inttypes.h>
#include <math.h>

#include "llmc/base/crc.h"
#include "llmc/optim/recipe.h"
#include "llmc/files/file_sums.h"
#include "llmc/files/filekind.h"
#include "llmc/files/json.h"
#include "llmc/files/output.h"
#include "llmc/optim/schedule.h"  // defines: Schedule, Phase, shape_names

enum {
    TRAINER_STATE_FORMAT = 2,
    CHECKPOINT_MAX_RANKS = 100000,
    ROW_ORDER = 2,       // the order of rows that dataloader.h describes
    ROW_ORDER_LEFT = 3,  // of data with answers that do not fit in a row; older builds trained them without their questions
};

typedef char RunId[17];  // 16 hexadecimal digits; "": none

/* Work that was due at a step, but left out because the run ended: bits of TrainerState.owed. */
enum { OWED_TASKS = 1, OWED_SAMPLE = 2 };

/* The results of validations. Steps count from 1, so 0 is none. */
typedef struct {
    uint64_t step, best_step;  // steps of the newest validation, and of the validation with the lowest loss
    double loss, best;         // their losses
    uint64_t since_best;       // validations after that one
} Validations;

typedef struct {
    uint64_t step;            // steps done
    uint64_t seed;            // `seed` and `step` are the whole state of the counter-based random numbers
    uint64_t data_row;        // DataLoader.row: rows consumed by all ranks since the run began
    uint64_t tokens;          // tokens trained on, with padding
    uint64_t padding;         // of them; 0 in files without the member
    uint64_t updates;         // updates: steps that were not skipped
    uint64_t row_order;       // ROW_ORDER of the build that wrote it
    uint64_t data;            // fingerprint of the training files; 0: unknown
    uint64_t fingerprint;     // of the tokenizer; 0: none
    char build[160];          // what rounds: compiler, instructions, precision, card; "": unknown
    RunId run;                // this run
    RunId parent_run;         // the run that it branched off from; "": none
    uint64_t parent_step;     // and the step where
    bool not_finite;          // the last step's loss or gradient, or a value saved, is not finite: resumed only if it is named
    uint64_t bad_steps;       // how many steps in a row were not finite, until this one
    uint64_t owed;            // bits of what a resumed run makes up for; a validation has its own step, in `val`
    bool timed;               // written by --checkpoint-minutes: any later checkpoint replaces it
    char optimizer[32];       // the rule whose state lies beside it (optim/optimizer.h); "adamw" in files without the member
    int world_size;           // ranks, one state file each
    double loss_scale;        // of FP16 training; 1 otherwise
    uint64_t scale_good;      // finite steps since the loss scale last changed
    Outlier loss, grad_norm;  // the last values, to score the next one
    Validations val;          // none in files without the member
    Schedule schedule;        // of the run; its peak rate is in the options. Count 0: a file of an older version
    bool bf16_weights;        // the exact weights, which the optimizer updates, are bfloat16: there are no master weights
    bool f32_weights;         // the weights are in F32, whatever --export-dtype says: one would be infinite there
    uint64_t base;            // with LoRA, the checksum of the base's weights (model_sum()); 0: none, or unknown
    const char* options;      // for writing: the run's options, a JSON object (options_json_text)
    // set by trainer_state_read(); release them with trainer_state_free()
    FileSums files;
    Json json;
    const JsonNode* saved_options;  // in `json`
    char path[PATH_CAP];
} TrainerState;

static inline void trainer_state_free(TrainerState* s) {
    file_sums_free(&s->files);
    json_free(&s->json);
    s->saved_options = NULL;
}

// The integers and texts of the file: one table each for the writer and the reader.
// clang-format off
static const struct { const char* name; size_t offset; } trainer_state_integers[] = {
    {"step", offsetof(TrainerState, step)},
    {"seed", offsetof(TrainerState, seed)},
    {"data_row", offsetof(TrainerState, data_row)},
    {"row_order", offsetof(TrainerState, row_order)},
    {"tokens", offsetof(TrainerState, tokens)},
    {"updates", offsetof(TrainerState, updates)},
    {"data_fingerprint", offsetof(TrainerState, data)},
    {"tokenizer_fingerprint", offsetof(TrainerState, fingerprint)},
    {"parent_step", offsetof(TrainerState, parent_step)},
    {"loss_scale_good_steps", offsetof(TrainerState, scale_good)},
};
static const struct { const char* name; size_t offset, cap; } trainer_state_texts[] = {
    {"build", offsetof(TrainerState, build), sizeof((TrainerState*)0)->build},
    {"run", offsetof(TrainerState, run), sizeof(RunId)},
    {"parent_run", offsetof(TrainerState, parent_run), sizeof(RunId)},
};
// clang-format on
enum {
    NUM_TRAINER_STATE_INTEGERS = sizeof trainer_state_integers / sizeof *trainer_state_integers,
    NUM_TRAINER_STATE_TEXTS = sizeof trainer_state_texts / sizeof *trainer_state_texts,
};

/* Draws the id of a new run. */
static inline void run_id_draw(RunId id) {
    uint64_t bits = 0;
    os_random(&bits, sizeof bits);
    snprintf(id, sizeof(RunId), "%016" PRIx64, bits);
}

/* Returns whether the checkpoint's weights are rounded: then its state holds the exact ones, as "master". */
static inline bool trainer_state_has_master(const TrainerState* s) {
    const char* dtype = json_string(&s->json, json_get(&s->json, s->saved_options, "export_dtype"), NULL);
    return dtype && !s->f32_weights && (strcmp(dtype, "f16") == 0 || (strcmp(dtype, "bf16") == 0 && !s->bf16_weights));
}

/* Turns the state into the state of a new run, which branches off from the run and step that it holds. */
static inline void trainer_state_branch(TrainerState* s) {
    memcpy(s->parent_run, s->run, sizeof s->run);
    s->parent_step = s->step;
    run_id_draw(s->run);
}

// The last line of the file: the CRC-32C of everything before it.
static const char trainer_state_tail[] = ",\n  \"crc32c\": ";

// ---------------------------------------------------------------------------------------------------------------------
// writing

static inline void outlier_write(FILE* f, const Outlier* o) {
    fprintf(f, "{\"next\": %d, \"values\": [", o->next);
    for (int i = 0; i < o->count; i++) {
        if (i) { fputs(", ", f); }
        json_write_double(f, o->values[i]);
    }
    fputs("]}", f);
}

/* The newest validation is written only if it is of this step: it then is the loss of these weights. */
static inline void validations_write(FILE* f, const TrainerState* s) {
    const bool here = s->val.step == s->step;
    fprintf(f, "{\"step\": %" PRIu64 ", \"loss\": ", here ? s->val.step : 0);
    json_write_double(f, here ? s->val.loss : 0);
    fprintf(f, ", \"best_step\": %" PRIu64 ", \"best\": ", s->val.best_step);
    json_write_double(f, s->val.best);
    fprintf(f, ", \"since_best\": %" PRIu64 "}", s->val.since_best);
}

static inline void schedule_write(FILE* f, const Schedule* s) {
    fprintf(f, ",\n  \"schedule\": {\"steps\": %" PRId64 ", \"phases\": [", s->steps);
    for (int i = 0; i < s->count; i++) {
        const Phase* p = &s->phases[i];
        fprintf(f, "%s\n    {\"from\": %" PRId64 ", \"to\": %" PRId64 ", \"first\": ", i ? "," : "", p->from, p->to);
        json_write_double(f, p->first);
        fputs(", \"last\": ", f);
        json_write_double(f, p->last);
        fprintf(f, ", \"shape\": \"%s\"}", shape_names[p->shape]);
    }
    fputs("\n  ]}", f);
}

/* Writes and flushes the file. `files` lists all other files of the checkpoint. */
static inline bool trainer_state_write(const TrainerState* s, const FileSums* files, const char* path, Error* e) {
    char* text = NULL;
    size_t length = 0;
    FILE* f = open_memstream(&text, &length);
    if (!f) { return fail(e, "%s: out of memory", path); }
    fprintf(f, "{\n  \"format\": %d", TRAINER_STATE_FORMAT);
    for (int i = 0; i < NUM_TRAINER_STATE_INTEGERS; i++) {
        uint64_t value;
        memcpy(&value, (const char*)s + trainer_state_integers[i].offset, sizeof value);
        fprintf(f, ",\n  \"%s\": %" PRIu64, trainer_state_integers[i].name, value);
    }
    for (int i = 0; i < NUM_TRAINER_STATE_TEXTS; i++) {
        fprintf(f, ",\n  \"%s\": ", trainer_state_texts[i].name);
        json_write_text(f, (const char*)s + trainer_state_texts[i].offset);
    }
    fprintf(f, ",\n  \"not_finite\": %s", s->not_finite ? "true" : "false");
    fprintf(f, ",\n  \"kind\": \"%s\"", s->timed ? "timed" : "kept");
    fprintf(f, ",\n  \"optimizer\": \"%s\"", s->optimizer);
    fprintf(f, ",\n  \"world_size\": %d,\n  \"loss_scale\": ", s->world_size);
    json_write_double(f, s->loss_scale);
    fputs(",\n  \"loss_window\": ", f);
    outlier_write(f, &s->loss);
    fputs(",\n  \"grad_norm_window\": ", f);
    outlier_write(f, &s->grad_norm);
    fputs(",\n  \"validation\": ", f);
    validations_write(f, s);
    if (s->schedule.count) { schedule_write(f, &s->schedule); }
    if (s->bf16_weights) { fputs(",\n  \"bf16_weights\": true", f); }
    if (s->f32_weights) { fputs(",\n  \"f32_weights\": true", f); }
    if (s->bad_steps) { fprintf(f, ",\n  \"bad_steps\": %" PRIu64, s->bad_steps); }
    if (s->padding) { fprintf(f, ",\n  \"padding\": %" PRIu64, s->padding); }
    if (s->owed) { fprintf(f, ",\n  \"owed\": %" PRIu64, s->owed); }
    if (s->base) { fprintf(f, ",\n  \"base_crc32c\": %" PRIu64, s->base); }
    fprintf(f, ",\n  \"options\": %s,\n  \"files\": [", s->options ? s->options : "{}");
    for (size_t i = 0; i < files->count; i++) {
        fprintf(f, "%s\n    {\"name\": ", i ? "," : "");
        json_write_string(f, files->items[i].name, strlen(files->items[i].name));
        fprintf(f, ", \"size\": %" PRIu64 ", \"crc32c\": %" PRIu32 "}", files->items[i].size, files->items[i].crc);
    }
    fputs("\n  ]", f);
    fflush(f);
    if (!ferror(f)) { fprintf(f, "%s%" PRIu32 "\n}\n", trainer_state_tail, crc_of(text, length)); }
    if (fclose(f) != 0 || !text) {
        free(text);
        return fail(e, "%s: out of memory", path);
    }
    const bool ok = write_file(path, text, length, e);
    free(text);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// reading

static inline bool outlier_read(const Json* j, const char* key, Outlier* o, Error* e) {
    const JsonNode* window = json_get(j, json_root(j), key);
    const JsonNode* values = json_get(j, window, "values");
    memset(o, 0, sizeof *o);
    int64_t next = 0;
    if (!window || window->type != JSON_OBJECT) { return json_wanted(j, json_root(j), key, e, "an object"); }
    if (!values || values->type != JSON_ARRAY || json_length(values) > OUTLIER_WINDOW) {
        return json_wanted(j, window, "values", e, "an array of at most %d numbers", OUTLIER_WINDOW);
    }
    for (const JsonNode* n = json_first(j, values); n; n = json_next(j, n)) {
        if (!json_node_double(j, n, &o->values[o->count]) || !isfinite(o->values[o->count])) {
            return json_wanted(j, window, "values", e, "finite numbers");
        }
        o->count++;
    }
    // until the ring is full, the next value goes after the last
    const bool full = o->count == OUTLIER_WINDOW;
    if (!json_int(j, window, "next", full ? 0 : o->count, full ? OUTLIER_WINDOW - 1 : o->count, &next, e)) { return false; }
    o->next = (int)next;
    return true;
}

/* Reads the member "validation", which older files lack. */
static inline bool validations_read(const Json* j, Validations* v, Error* e) {
    const JsonNode* n = json_get(j, json_root(j), "validation");
    v->loss = n ? NAN : 0;
    return !n || (json_u64(j, n, "step", &v->step, e) && json_double_or(j, n, "loss", -1e300, 1e300, &v->loss, e) &&
                  json_u64(j, n, "best_step", &v->best_step, e) && json_double(j, n, "best", -1e300, 1e300, &v->best, e) &&
                  json_u64(j, n, "since_best", &v->since_best, e));
}

static inline bool schedule_read(const Json* j, Schedule* s, Error* e) {
    const JsonNode* n = json_get(j, json_root(j), "schedule");
    const JsonNode* phases = json_get(j, n, "phases");
    if (!n && json_get(j, json_root(j), "shortened")) {
        return fail(e, "%s: --minutes of an older version shortened this run, and how is not read any more", j->path);
    }
    if (!n) { return true; }  // a file of an older version
    if (!json_int(j, n, "steps", 0, INT32_MAX, &s->steps, e)) { return false; }
    if (!phases || phases->type != JSON_ARRAY || json_length(phases) < 1 || json_length(phases) > MOST_PHASES) {
        return json_wanted(j, n, "phases", e, "an array of 1 to %d phases", MOST_PHASES);
    }
    for (const JsonNode* p = json_first(j, phases); p; p = json_next(j, p)) {
        Phase* phase = &s->phases[s->count++];
        int shape = 0;
        while (shape < NUM_SHAPES && !json_is_string(j, json_get(j, p, "shape"), shape_names[shape])) { shape++; }
        if (shape == NUM_SHAPES) { return json_wanted(j, p, "shape", e, "rise, linear, cosine or root"); }
        phase->shape = (PhaseShape)shape;
        if (!json_int(j, p, "from", s->count > 1 ? phase[-1].from + 1 : 0, INT32_MAX, &phase->from, e) ||
            !json_int(j, p, "to", phase->from, INT32_MAX, &phase->to, e) ||
            !json_double(j, p, "first", 0, 1, &phase->first, e) || !json_double(j, p, "last", 0, 1, &phase->last, e)) {
            return false;
        }
    }
    return true;
}

/* Takes the loss of a validation. Returns whether it is the lowest so far; a loss that is not finite never is. */
static inline bool validations_add(Validations* v, uint64_t step, double loss) {
    const bool best = isfinite(loss) && (v->best_step == 0 || loss < v->best);
    v->step = step;
    v->loss = loss;
    v->since_best++;
    if (best) {
        v->best_step = step;
        v->best = loss;
        v->since_best = 0;
    }
    return best;
}

/* Returns whether a name stays inside the checkpoint: no part of it is empty or starts with a dot. */
static inline bool checkpoint_good_name(const char* name) {
    if (strlen(name) >= sizeof(((FileSum*)0)->name)) { return false; }
    for (const char* p = name;; p++) {
        if (*p == '.' || *p == '/' || *p == 0) { return false; }
        p = strchr(p, '/');
        if (!p) { return true; }
    }
}

static inline bool trainer_state_files(TrainerState* s, Error* e) {
    const Json* j = &s->json;
    const JsonNode* files = json_get(j, json_root(j), "files");
    if (!files || files->type != JSON_ARRAY) { return json_wanted(j, json_root(j), "files", e, "an array"); }
    for (const JsonNode* n = json_first(j, files); n; n = json_next(j, n)) {
        const char* name = NULL;
        uint64_t size = 0;
        int64_t crc = 0;
        if (!json_text(j, n, "name", &name, e) || !json_u64(j, n, "size", &size, e) ||
            !json_int(j, n, "crc32c", 0, UINT32_MAX, &crc, e)) {
            return false;
        }
        if (!checkpoint_good_name(name)) { return json_wanted(j, n, "name", e, "the name of a file in this folder"); }
        file_sums_add(&s->files, name, size, (uint32_t)crc);
    }
    return true;
}

/* Reads the texts, and a flag. */
static inline bool trainer_state_texts_read(TrainerState* s, Error* e) {
    const Json* j = &s->json;
    const JsonNode* root = json_root(j);
    for (int i = 0; i < NUM_TRAINER_STATE_TEXTS; i++) {
        const char *name = trainer_state_texts[i].name, *text = NULL;
        const size_t cap = trainer_state_texts[i].cap;
        if (!json_text(j, root, name, &text, e)) { return false; }
        if (strlen(text) >= cap) { return json_wanted(j, root, name, e, "a text of at most %zu bytes", cap - 1); }
        memcpy((char*)s + trainer_state_texts[i].offset, text, strlen(text) + 1);
    }
    return json_bool(j, root, "not_finite", &s->not_finite, e);
}

/* Reads the fields of a text whose checksum was right. */
static inline bool trainer_state_parse(TrainerState* s, Error* e) {
    const Json* j = &s->json;
    const JsonNode* root = json_root(j);
    int64_t number = 0;
    if (!json_int(j, root, "format", TRAINER_STATE_FORMAT, TRAINER_STATE_FORMAT, &number, e)) { return false; }
    for (int i = 0; i < NUM_TRAINER_STATE_INTEGERS; i++) {
        uint64_t value = 0;
        if (!json_u64(j, root, trainer_state_integers[i].name, &value, e)) { return false; }
        memcpy((char*)s + trainer_state_integers[i].offset, &value, sizeof value);
    }
    if (!trainer_state_texts_read(s, e) || !json_int(j, root, "world_size", 1, CHECKPOINT_MAX_RANKS, &number, e) ||
        !json_double(j, root, "loss_scale", 1e-30, 1e30, &s->loss_scale, e) || !outlier_read(j, "loss_window", &s->loss, e) ||
        !outlier_read(j, "grad_norm_window", &s->grad_norm, e) || !validations_read(j, &s->val, e) ||
        !schedule_read(j, &s->schedule, e) || !trainer_state_files(s, e) || !json_u64_or(j, root, "base_crc32c", &s->base, e) ||
        !json_bool_or(j, root, "bf16_weights", &s->bf16_weights, e) ||
        !json_bool_or(j, root, "f32_weights", &s->f32_weights, e) || !json_u64_or(j, root, "bad_steps", &s->bad_steps, e) ||
        !json_u64_or(j, root, "owed", &s->owed, e) || !json_u64_or(j, root, "padding", &s->padding, e)) {
        return false;
    }
    s->world_size = (int)number;
    const char* word = json_string(j, json_get(j, root, "optimizer"), NULL);
    if (word && (strlen(word) >= sizeof s->optimizer || word[strspn(word, "abcdefghijklmnopqrstuvwxyz0123456789_")])) {
        return json_wanted(j, root, "optimizer", e, "the name of one");
    }
    snprintf(s->optimizer, sizeof s->optimizer, "%s", word ? word : "adamw");
    const char* kind = json_string(j, json_get(j, root, "kind"), NULL);
    s->timed = kind && strcmp(kind, "timed") == 0;
    s->saved_options = json_get(j, root, "options");
    if (!s->saved_options || s->saved_options->type != JSON_OBJECT) { return json_wanted(j, root, "options", e, "an object"); }
    return true;
}

/* Returns whether the text ends in the line with its own checksum, byte for byte as the writer puts it. */
static inline bool trainer_state_whole(const char* text, size_t length) {
    char tail[64];
    for (size_t n = sizeof trainer_state_tail; n < sizeof tail && n <= length; n++) {
        const char* at = text + length - n;
        if (memcmp(at, trainer_state_tail, sizeof trainer_state_tail - 1) != 0) { continue; }
        const int wanted = snprintf(tail, sizeof tail, "%s%" PRIu32 "\n}\n", trainer_state_tail, crc_of(text, length - n));
        return (size_t)wanted == n && memcmp(at, tail, n) == 0;
    }
    return false;
}

/* Reads a text of `length` bytes; takes it over as json_parse() does. Free *s with trainer_state_free(), also after a
 * failure. */
static inline bool trainer_state_from_text(TrainerState* s, char* text, size_t length, const char* path, Error* e) {
    memset(s, 0, sizeof *s);
    if (snprintf(s->path, sizeof s->path, "%s", path) >= (int)sizeof s->path) {
        free(text);
        return fail(e, "%.100s...: the path is too long", path);
    }
    const bool whole = trainer_state_whole(text, length);  // before the parser decodes strings in place
    if (!json_parse(&s->json, text, length, s->path, e)) { return false; }
    if (!whole && !json_get(&s->json, json_root(&s->json), "crc32c")) {
        return fail(e,
                    "%s: is no state of this program's runs; transformers' Trainer calls its own so\n"
                    "  hint: --model with its folder starts a new run from its weights",
                    s->path);
    }
    if (!whole) {
        return fail(e, "%s: crc32c in its last line does not match the text before it: the file is damaged", s->path);
    }
    return trainer_state_parse(s, e);
}

static inline bool trainer_state_read(TrainerState* s, const char* path, Error* e) {
    memset(s, 0, sizeof *s);
    size_t length = 0;
    char* text = read_file(path, &length, 64 << 20, e);
    const char* kind = text ? file_looks_like(text, length) : NULL;
    if (kind && strcmp(kind, "JSON text") != 0) {
        free(text);
        return fail(e, "%s: is %s, wanted a checkpoint's JSON text", path, kind);
    }
    return text && trainer_state_from_text(s, text, length, path, e);
}

#endif
