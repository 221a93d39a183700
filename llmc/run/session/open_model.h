/* open_model.h -- checks that a job fits into memory, and makes its model: the memory table, the choice of --recompute auto, the
 * weights of the session's folder or new ones.
 */
#ifndef LLMC_OPEN_MODEL_H
#define LLMC_OPEN_MODEL_H

#include "llmc/base/utils.h"
#include "llmc/dist/agree.h"           // defines: agree_most
#include "llmc/run/session/memory.h"   // defines: MemoryTable, MemoryRoom, memory_check, memory_choose_recompute, print_memory
#include "llmc/run/session/session.h"  // defines: Session, session_load_weights, session_draw_weights, session_load_adapters
#include "llmc/run/session/trainer.h"  // defines: Trainer

typedef struct {
    const Trainer* trainer;
    const Session* session;
} MemoryQuestion;

/* Returns the bytes that a run with the options `o` needs (a MemoryNeed). */
static inline uint64_t job_memory_need(void* question, const Options* o) {
    const MemoryQuestion* q = (const MemoryQuestion*)question;
    MemoryTable table;
    memset(&table, 0, sizeof table);
    q->trainer->measure(q->trainer, q->session, o, &table);
    return memory_total(&table);
}

/* Names what the memory is for: the files whose numbers decide its size. */
static inline void job_memory_text(const Trainer* t, const Session* s, char* text, size_t cap) {
    const char* words = !s->data.has_tokenizer   ? s->chosen.train
                        : s->data.tokenizer.path ? s->data.tokenizer.path
                                                 : "the built-in tokenizer";
    ModelConfig preset;
    if (s->start.dir[0]) {
        snprintf(text, cap, "%s: the model of %s/config.json", t->memory, s->start.base_dir);
    } else if (config_preset(&preset, s->chosen.model, 1) && preset.vocab_size != 1) {  // it has its own vocabulary
        snprintf(text, cap, "%s: the model %s", t->memory, s->chosen.model);
    } else {
        snprintf(text, cap, "%s: the model %s with the vocabulary of %s", t->memory, s->chosen.model, words);
    }
}

/* --recompute auto: takes the cheapest value that fits on every rank. They share passes through the layers, so all take the
 * value of the rank with the least room. */
static inline void job_choose_recompute(Session* s, const MemoryRoom* room, FILE* screen) {
    Recompute* r = &s->chosen.recompute;
    char text[OPTION_TEXT];
    memory_choose_recompute(room, &s->chosen);
    agree_most(s->process.team, r->blocks, RECOMPUTE_LEVELS);
    Recompute chosen = *r;
    chosen.automatic = false;
    if (screen) { fprintf(screen, "memory  --recompute auto takes %s\n", recompute_text(&chosen, text, sizeof text)); }
}

/* Prints the memory table to `screen` (or NULL) and refuses a job that does not fit. */
static inline void job_check_memory(const Trainer* t, Session* s, FILE* screen) {
    const Options* o = &s->chosen;
    MemoryQuestion question = {t, s};
    const MemoryRoom room = {t->available(t, o), session_share(s).groups, s->spec.config.num_layers, job_memory_need,
                             &question};
    MemoryTable table;
    Error e = NO_ERROR;
    if (o->recompute.automatic && job_trains(s->process.job)) { job_choose_recompute(s, &room, screen); }
    memset(&table, 0, sizeof table);
    t->measure(t, s, o, &table);
    if (screen) { print_memory(screen, &table, room.have); }
    char what[3 * PATH_CAP];
    job_memory_text(t, s, what, sizeof what);
    must(memory_check(&table, &room, what, o, &e), &e);
}

/* Creates a model and gives it the weights of the session's folder, or new ones. */
static inline void* job_open_model(const Trainer* t, Session* s) {
    void* model = t->create(t, s);
    const StateSlot weights = t->slot(model, SLOT_WEIGHTS);
    if (s->start.dir[0]) {
        session_load_weights(s, weights);
    } else {
        session_draw_weights(s, weights);
    }
    if (s->spec.config.lora.rank > 0) {
        const StateSlot adapters = t->slot(model, SLOT_MASTER);
        session_load_adapters(s, adapters);
    }
    return model;
}

/* Reads the weights that job_open_model() would load. Nothing holds them, but reading checks them. */
static inline void job_check_weights(Session* s) {
    if (s->start.dir[0]) { session_load_weights(s, slot_to(NULL, NULL)); }
    if (session_has_adapters(s)) { session_load_adapters(s, slot_to(NULL, NULL)); }
}

#endif
