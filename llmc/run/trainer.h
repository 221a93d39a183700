/* trainer.h -- a trainer as the rest of the program knows it: a table of functions. train_llama3.c and train_llama3.cu each
 * fill in one; jobs.h and training.h work with either.
 *
 * `model` is the trainer's own Llama. A function that fails for want of memory or of the GPU ends the program itself.
 */
#ifndef LLMC_TRAINER_H
#define LLMC_TRAINER_H

#include "llmc/base/utils.h"
#include "llmc/run/generate.h"  // defines: NextLogits
#include "llmc/run/memory.h"    // defines: MemoryTable
#include "llmc/run/session.h"   // defines: Session
#include "llmc/run/step.h"      // defines: BatchSource, StepPlan, StepResult

/* What can be read from a model and written into it, tensor by tensor. */
typedef enum {
    SLOT_WEIGHTS,  // those that the model computes with; writing them sets the exact ones, too
    SLOT_MASTER,   // the exact ones, which AdamW updates; the same where nothing is rounded
    SLOT_M,        // AdamW's moments
    SLOT_V,
    NUM_SLOTS
} SlotKind;
static const char* const slot_names[NUM_SLOTS] = {"weights", "master", "m", "v"};  // as state files name them

typedef struct Trainer Trainer;
struct Trainer {
    const char* precision;  // "FP32", "BF16", "FP16"
    const char* dtype;      // of the weights it computes with, as files name it
    const char* memory;     // what runs short, for messages: "memory", or the GPU's name
    void* device;           // the trainer's own, NULL on the CPU
    bool scales_loss;       // FP16: gradients are computed with a loss scale
    int in_flight;          // steps, or batches of validation, that may be queued before the first is waited for
    double peak_flops;      // of the device; 0: unknown

    // memory: the rows of the table, the bytes that may be used (0: unknown), a model, what the process holds of it now or
    // held at most
    void (*measure)(const Trainer* t, const Session* s, const Options* o, MemoryTable* table);
    uint64_t (*available)(const Trainer* t, const Options* o);
    void* (*create)(const Trainer* t, const Session* s);
    void (*destroy)(void* model);
    uint64_t (*memory_used)(const void* model);

    // weights and optimizer state
    void (*init)(void* model, uint64_t seed);
    StateSlot (*slot)(void* model, SlotKind kind);
    AddFiles add_files;  // to a checkpoint; or NULL

    // training: prepare() before the first step, forget() wipes all traces of steps at learning rate 0
    void (*prepare)(void* model, const StepPlan* plan, const Session* s);
    void (*step)(void* model, const StepPlan* plan, double lr);
    StepResult (*result)(void* model, const StepPlan* plan);
    void (*forget)(void* model, const StepPlan* plan);
    void (*profile)(void* model, const StepPlan* plan, int warm_up);  // or NULL
    void (*name_not_finite)(void* model);                             // --debug; or NULL

    // inference: the losses (B, T) of the next batch are queued, then waited for
    void (*queue_losses)(void* model, const BatchSource* data);
    const float* (*wait_losses)(void* model);
    NextLogits next_logits;
};

#endif
