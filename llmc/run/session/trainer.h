/* trainer.h -- the interface of a trainer: a table of functions. train_llama3.c and train_llama3.cu each fill in one;
 * dispatch.h and training.h work with either.
 *
 * `model` is the trainer's own Llama. A function that runs out of memory, or fails on the GPU, ends the program itself.
 */
#ifndef LLMC_TRAINER_H
#define LLMC_TRAINER_H

#include "llmc/base/utils.h"
#include "llmc/train/not_finite.h"  // defines: TENSOR_TEXT
#include "llmc/run/cli/options.h"   // defines: Options
#include "llmc/run/session/save.h"  // defines: AddFiles
#include "llmc/train/step.h"        // defines: ModelUse, BatchSource, NextLogits, Recipe, Metrics

/* The memory of a model, a row a kind. */
enum { MEMORY_ROWS = 20 };

typedef struct {
    const char* names[MEMORY_ROWS];
    uint64_t bytes[MEMORY_ROWS];
    bool apart[MEMORY_ROWS];  // not counted: main memory of a GPU run
    int count;
    uint64_t host;  // bytes of main memory that a GPU run may take; 0: unknown
} MemoryTable;

static inline void memory_add_row(MemoryTable* m, const char* name, uint64_t bytes, bool apart) {
    if (m->count == MEMORY_ROWS) { return; }
    m->names[m->count] = name;
    m->apart[m->count] = apart;
    m->bytes[m->count++] = bytes;
}

static inline void memory_add(MemoryTable* m, const char* name, uint64_t bytes) { memory_add_row(m, name, bytes, false); }

typedef struct Trainer Trainer;
struct Trainer {
    const char* precision;  // "FP32", "BF16", "FP16"
    SafeDtype dtype;        // type of the weights that the model computes with
    const char* memory;     // subject of messages about memory: "memory", or the GPU's name
    void* device;           // the trainer's own data; NULL on the CPU
    const char* missing;    // why there is no device: then only measure() and available() may be called; NULL: there is one
    bool scales_loss;       // FP16: gradients are computed with a loss scale
    int in_flight;          // maximum number of queued steps, or of queued validation batches
    double peak_flops;      // FLOP/s of the device; 0: unknown

    // memory: measure() fills the memory table; available() returns the usable bytes (0: unknown); memory_used() returns the
    // bytes that the process holds (GPU) or its peak (CPU)
    void (*measure)(const Trainer* t, const ModelConfig* c, const ModelUse* use, const Options* o, MemoryTable* table);
    uint64_t (*available)(const Trainer* t, const Options* o);
    // ranks meet on their devices
    void* (*create)(const Trainer* t, const ModelConfig* c, const ModelUse* use, const Options* o, Team* team);
    void (*destroy)(void* model);
    uint64_t (*memory_used)(const void* model);

    // weights and optimizer state
    StateSlot (*slot)(void* model, SlotKind kind);
    // weights that rank 0 writes but does not have all of: a slot whose source all ranks call in the same order (save.h);
    // without a source if slot() has them all. Or NULL
    StateSlot (*collect)(void* model, SlotKind kind);
    AddFiles add_files;  // adds the trainer's own files to a checkpoint; or NULL

    // training: prepare() (or NULL) runs before the first step, and in other jobs with `recipe` NULL; `resumed` is the
    // checkpoint that the run resumes, or NULL; step() returns false if the step is dropped (step.h); forget() wipes all
    // traces of steps at learning rate 0; name_not_finite() writes the name of the first tensor that is not finite, in the
    // order of computation, and returns false if there is none
    void (*prepare)(void* model, const Recipe* recipe, const Options* o, const char* resumed);
    bool (*step)(void* model, const Recipe* recipe, double lr, Error* e);
    Metrics (*result)(void* model, const Recipe* recipe);
    double (*busy_ms)(const void* model);  // time of the step that result() returned last: see run/loop/slowest.h; or NULL
    void (*forget)(void* model, const Recipe* recipe);
    void (*profile)(void* model, const Recipe* recipe, int warm_up);  // or NULL
    bool (*name_not_finite)(void* model, char name[TENSOR_TEXT]);

    // inference: queue the losses (B, T) of the next batch, then wait for them. Returns false, with nothing queued, if the
    // batch cannot be read, or without an error if a signal asked for the end
    bool (*queue_losses)(void* model, const BatchSource* data, Error* e);
    const float* (*wait_losses)(void* model);
    NextLogits next_logits;
};

#endif
