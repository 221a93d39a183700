/* open_model.h -- makes the model of a job: says what it is for, and gives it the weights of the folder to start from or new
 * ones. memory.h checks before that it fits.
 */
#ifndef LLMC_OPEN_MODEL_H
#define LLMC_OPEN_MODEL_H

#include "llmc/base/utils.h"
#include "llmc/base/progress.h"        // defines: progress_begin, progress_end
#include "llmc/files/tensor_stream.h"  // defines: Passed, StateSlot
#include "llmc/run/session/session.h"  // defines: Process, Start, ModelSpec, Data, Run, run_must_read
#include "llmc/run/session/trainer.h"  // defines: Trainer
#include "llmc/text/question.h"        // defines: prompt_tokens

// ---------------------------------------------------------------------------------------------------------------------
// what the model is for

/* Returns the positions that the job's KV cache needs: the prompt and the generated text, with --generate at most the model's
 * context. 0: the job generates nothing. */
static inline int job_context(Job job, const Options* o, const ModelConfig* c, const TextRules* rules) {
    enum { CHAT_CONTEXT = 8192 };
    const bool samples = job_trains(job);
    const size_t most = (size_t)c->max_positions;
    if (job == JOB_EVAL || job == JOB_EXPORT || (samples && o->sample_tokens == 0)) { return 0; }
    if (job == JOB_CHAT || job == JOB_ANSWER) { return (int)size_min(most, CHAT_CONTEXT); }
    TokenList prompt;
    Error e = NO_ERROR;
    memset(&prompt, 0, sizeof prompt);
    must(prompt_tokens(&prompt, samples ? o->prompt : o->generate, rules, &e), &e);
    if (!samples && prompt.count >= most) {
        die("--generate: the prompt has %zu tokens, but the model's context holds %zu, and at least one must be generated",
            prompt.count, most);
    }
    size_t count = prompt.count + (size_t)(samples ? o->sample_tokens : o->tokens);
    if (!samples) { count = size_min(count, most); }
    token_list_free(&prompt);
    if (count > INT32_MAX / 2) { die("--%s: is %zu tokens too long", samples ? "sample-tokens" : "tokens", count); }
    return (int)count;
}

/* Returns what the job needs of a model. */
static inline ModelUse model_use(const Process* p, const Options* o, const ModelConfig* c, const Data* d) {
    const bool trains = job_trains(p->job), batches = trains || p->job == JOB_EVAL;
    const int context = job_context(p->job, o, c, &d->rules);
    const ModelUse use = {p->rank, p->ranks, batches ? o->batch : 0, o->seq, trains, data_has_documents(d), context};
    return use;
}

/* Names what the memory is for: the files whose numbers decide its size. */
static inline void memory_text(const char* memory, const Start* start, const Options* o, const Data* d,
                               char text[3 * PATH_CAP]) {
    enum { CAP = 3 * PATH_CAP };
    const Tokenizer* t = data_tokenizer(d);
    const char* words = !t ? o->train : t->path ? t->path : "the built-in tokenizer";
    ModelConfig preset;
    if (start->dir[0]) {
        snprintf(text, CAP, "%s: the model of %s/config.json", memory, start->base_dir);
    } else if (config_preset(&preset, o->model, 1) && preset.vocab_size != 1) {  // it has its own vocabulary
        snprintf(text, CAP, "%s: the model %s", memory, o->model);
    } else {
        snprintf(text, CAP, "%s: the model %s with the vocabulary of %s", memory, o->model, words);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// weights

/* Loads the weights of base_dir into the trainer's slot. With LoRA, checks as far as possible that the adapters were trained
 * beside these weights, and remembers their checksum. Rounded weights may be infinite if the run resumes with exact ones. */
static inline void load_weights(const Start* start, const ModelSpec* m, Run* run, const Process* p, StateSlot weights) {
    const FileSums* known = start->has_adapters ? &start->base_sums : &start->sums;
    const bool lora = m->config.lora.rank > 0;
    char folder[PATH_CAP];
    uint32_t crc = 0;
    Error e = NO_ERROR, not_finite = NO_ERROR;
    Passed passed = {progress_begin(process_screen(p), "load", m->table.num_params, "weights"), false};
    weights.passed = &passed;
    const bool ok = checkpoint_parent(start->base_dir, folder, &e) &&
                    model_load_sums(start->base_dir, &m->config, &m->table, known->count > 0 ? known : NULL,
                                    lora || p->team ? &crc : NULL, weights, start->saved_master ? &not_finite : NULL, &e);
    progress_end(&passed.progress);
    run_must_read(run, ok, folder, &e);
    if (not_finite.msg[0] && p->rank == 0) { warn("%s: the run resumes with the exact weights of its state", not_finite.msg); }
    if (run->state.base && lora && run->state.base != crc) {
        die("%s: the weights' checksum is %" PRIu32 ", but the adapters of %s were trained beside weights with %" PRIu64
            "\n  hint: give their base model with --lora-base",
            start->base_dir, crc, start->dir, run->state.base);
    }
    run->state.base = lora ? crc : 0;
    run->weights = crc;
}

/* Draws new weights into the trainer's slot. */
static inline void draw_weights(const ModelSpec* m, uint64_t seed, FILE* screen, StateSlot weights) {
    Error e = NO_ERROR;
    Passed passed = {progress_begin(screen, "draw", m->table.num_params, "weights"), false};
    weights.passed = &passed;
    const bool ok = tensors_draw(&m->config, &m->table, seed, weights, &e);
    progress_end(&passed.progress);
    must(ok, &e);
}

/* Loads the adapters of the folder to start from into the trainer's slot, or draws new ones. */
static inline void load_adapters(const Start* start, const ModelSpec* m, uint64_t seed, StateSlot to) {
    const FileSums* sums = start->sums.count > 0 ? &start->sums : NULL;
    Error e = NO_ERROR;
    must(start->has_adapters ? adapter_load(start->dir, &m->trained, sums, to, &e)
                             : tensors_draw(&m->config, &m->trained, seed, to, &e),
         &e);
}

/* Loads what this rank owns of the optimizer state into the slots; `ranks` have written it. */
static inline void load_states(const Start* start, const ModelSpec* m, int ranks, FILE* screen, StateSlot* slots,
                               int num_slots) {
    Error e = NO_ERROR;
    Passed passed = {progress_begin(screen, "load", (uint64_t)num_slots * spec_owned(m), "values"), false};
    for (int i = 0; i < num_slots; i++) { slots[i].passed = &passed; }
    const bool ok = state_load(start->dir, ranks, &m->trained, &m->owned, slots, num_slots, &e);
    progress_end(&passed.progress);
    must(ok, &e);
}

/* Creates a model and gives it the weights of the folder to start from, or new ones. */
static inline void* model_create(const Trainer* t, const ModelUse* use, const Options* o, const Start* start,
                                 const ModelSpec* m, Run* run, const Process* p) {
    void* model = t->create(t, &m->config, use, o, p->team);
    const uint64_t seed = (uint64_t)o->seed;
    if (start->dir[0]) {
        load_weights(start, m, run, p, t->slot(model, SLOT_WEIGHTS));
    } else {
        draw_weights(m, seed, process_screen(p), t->slot(model, SLOT_WEIGHTS));
    }
    if (m->config.lora.rank > 0) { load_adapters(start, m, seed, t->slot(model, SLOT_MASTER)); }
    return model;
}

/* Reads the weights that model_create() would load. Nothing holds them, but reading checks them. */
static inline void check_weights(const Start* start, const ModelSpec* m, Run* run, const Process* p) {
    if (start->dir[0]) { load_weights(start, m, run, p, slot_to(NULL, NULL)); }
    if (start->has_adapters) { load_adapters(start, m, 0, slot_to(NULL, NULL)); }
}

#endif
