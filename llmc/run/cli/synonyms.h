/* synonyms.h -- what the flags of other trainers are called here, for the hint after an unknown flag. A small edit distance
 * finds typing errors only: --save-every would become --val-every.
 */
#ifndef LLMC_SYNONYMS_H
#define LLMC_SYNONYMS_H

#include "llmc/base/utils.h"

typedef struct {
    const char* theirs;  // names without dashes, separated by spaces
    const char* hint;
} FlagSynonym;

static const FlagSynonym flag_synonyms[] = {
    {"learning-rate max-lr", "did you mean --lr?"},
    {"max-steps max-iters num-iterations num-steps", "did you mean --steps?"},
    {"num-epochs num-train-epochs", "did you mean --epochs?"},
    {"block-size seq-len seq-length sequence-length max-seq-len max-seq-length max-length context-length "
     "ctx-size",
     "did you mean --seq?"},
    {"batch-size micro-batch-size device-batch-size per-device-train-batch-size", "did you mean --batch?"},
    {"gradient-accumulation-steps grad-accum total-batch-size global-batch-size",
     "--total-batch N, the tokens of a step: batch * seq * micro-batches"},
    {"warmup-steps warmup-iters num-warmup-steps", "did you mean --warmup?"},
    {"lr-scheduler lr-scheduler-type lr-schedule lr-decay-style scheduler", "did you mean --schedule?"},
    {"decay-steps num-decay-steps lr-decay-steps lr-wsd-decay-steps cooldown cooldown-steps", "did you mean --decay?"},
    {"min-lr", "--final-lr-frac F, as a fraction of --lr"},
    {"max-grad-norm clip-grad gradient-clip gradient-clip-val", "did you mean --grad-clip?"},
    {"adam-beta1", "did you mean --beta1?"},
    {"adam-beta2", "did you mean --beta2?"},
    {"adam-eps adam-epsilon", "did you mean --eps?"},
    {"output-dir out-dir save-dir", "did you mean --out?"},
    {"dataset data data-path train-data train-file", "--train GLOB takes token files; ./tokenize makes them from text"},
    {"val-data val-file eval-data", "did you mean --val?"},
    {"lora-r lora-rank use-lora", "did you mean --lora?"},
    {"lora-target-modules target-modules lora-target", "did you mean --lora-on?"},
    {"adapter lora-path peft-model-id adapter-name-or-path", "--model takes a folder of adapters"},
    {"model-name-or-path init-from", "did you mean --model?"},
    {"n-layer num-layers depth", "--model dN is a new model of N layers"},
    {"eval-interval eval-steps", "did you mean --val-every?"},
    {"eval-iters val-iters", "did you mean --val-batches?"},
    {"save-every save-interval save-steps", "did you mean --checkpoint-every?"},
    {"save-total-limit", "did you mean --keep?"},
    {"resume-from resume-from-checkpoint", "did you mean --resume?"},
    {"max-new-tokens n-predict", "did you mean --tokens?"},
    {"num-threads", "did you mean --threads?"},
    {"log-every log-interval logging-steps", "log.jsonl in --out has every step; the screen shows about one a second"},
    {"wandb report-to", "dev/track.py follows log.jsonl into TensorBoard or Weights & Biases"},
    {"num-gpus nproc-per-node", "train_llama3cu has --gpus; CUDA_VISIBLE_DEVICES=N chooses a single one"},
    {"device", "train_llama3 runs on the CPU, train_llama3cu on the GPU"},
    {"dtype precision bf16 fp16", "train_llama3 computes in FP32, train_llama3cu in the PRECISION it is built with"},
    {"gradient-checkpointing activation-checkpointing", "train_llama3cu has --recompute"},
    {"eval-batch-size per-device-eval-batch-size", "did you mean --batch?"},
    {"eval-strategy evaluation-strategy", "did you mean --val-every?"},
    {"save-strategy", "did you mean --checkpoint-every?"},
    {"qlora load-in-4bit load-in-8bit quantization-bit",
     "weights are trained in 16 or 32 bits; --lora R needs the least memory"},
    {"quantize quantization outtype", "did you mean --export-dtype?"},
    {"lora-dropout", "there is no dropout; --patience N stops before a run overfits"},
    {"packing sample-packing", "rows are packed by themselves; --documents says how"},
    {"train-on-inputs", "./tokenize --chat trains the answers alone"},
    {"chat-template template", "the chat template is that of the model's folder"},
    {"push-to-hub hub-model-id", "a checkpoint is a Hugging Face folder: hf upload takes it as it lies"},
    {"vocab-size", "a new model has the vocabulary of its tokenizer; ./tokenize --train-bpe N makes one"},
    {"hidden-size n-embd n-head num-heads", "--model dN is a new model of N layers and N heads, 64 N wide"},
};

/* Returns the hint for another trainer's flag, a word without dashes in front and with '-' for '_'; NULL: it is none. */
static inline const char* flag_synonym(const char* word) {
    const size_t n = strlen(word);
    for (size_t i = 0; i < sizeof flag_synonyms / sizeof *flag_synonyms; i++) {
        for (const char* name = flag_synonyms[i].theirs; *name;) {
            const size_t length = strcspn(name, " ");
            if (length == n && memcmp(name, word, n) == 0) { return flag_synonyms[i].hint; }
            name += length + (name[length] == ' ');
        }
    }
    return NULL;
}

#endif
