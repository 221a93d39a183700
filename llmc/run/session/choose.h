/* choose.h -- builds the options that count, `chosen`, from the options as typed, `given`, and from what was found. Each
 * function is one choice, and nothing else writes options. They run in this order: choose_typed, _saved, _lora, _total_batch,
 * _data, _eval_rows, _to_dial, _sampling, _rows, _dial, _steps, _rate, _branch, _batch, _dtype, _offload, _recompute, _minutes,
 * _rate again.
 */
#ifndef LLMC_CHOOSE_H
#define LLMC_CHOOSE_H

#include "llmc/base/utils.h"

#include "llmc/dist/agree.h"          // defines: agree_first, agree_most
#include "llmc/run/cli/options.h"     // defines: Options, options_copy, options_merge, options_read_text, option_own_text
#include "llmc/run/session/dial.h"    // defines: Dial, dial_tokens, dial_batch, dial_rate
#include "llmc/run/session/memory.h"  // defines: MemoryRoom, memory_fits, memory_find_pair, memory_chooses_zero,
                                      // memory_find_recompute, memory_offload_most
#include "llmc/run/session/session.h"
#include "llmc/text/text_rules.h"  // defines: Sampling

/* Settles --out. A run that resumes from --resume PATH continues in the folder of PATH, unless --out is given. Slashes at the
 * end, which a shell adds to the name of a folder, are removed. */
static inline bool choose_out(Options* chosen, Error* e) {
    char parent[PATH_CAP];
    const char* out = chosen->out;
    if (chosen->resume && !chosen->given[OPT_out] && is_directory(chosen->resume)) {
        out = chosen->resume;
        if (folder_is_checkpoint(out)) {
            if (!checkpoint_parent(out, parent, e)) { return false; }
            out = parent;
        }
    }
    char* text = xstrdup(out);
    for (size_t n = strlen(text); n > 1 && text[n - 1] == '/'; n--) { text[n - 1] = 0; }
    option_own_text(chosen, OPT_out, text);
    return true;
}

static inline void choose_typed(Options* chosen, const Options* given) {
    Error e = NO_ERROR;
    options_copy(chosen, given);
    must(choose_out(chosen, &e) && options_read_text(chosen, OPT_generate, &e) && options_read_text(chosen, OPT_system, &e),
         &e);
}

/* Returns the options of a checkpoint. The caller calls options_free(). */
static inline Options saved_options(const TrainerState* state, OptionScope trainer) {
    Options was;
    Error e = NO_ERROR;
    options_default(&was, trainer);
    must(options_merge(&was, &state->json, state->saved_options, &e), &e);
    return was;
}

/* Restores the options of the checkpoint `dir`. Its model is the model of the run, whatever --model says. `groups` of ranks
 * take the tokens that a step had, since another number of processes takes other micro-batches, not other steps. (A run with
 * --seq-parallel has these tokens in its options, see choose_total_batch().) */
static inline void choose_saved(Options* chosen, const TrainerState* state, const char* dir, int groups) {
    char* model = NULL;
    Error e = NO_ERROR;
    if (chosen->given[OPT_model] && json_bytes(&state->json, state->saved_options, "model", &model, &e) &&
        strcmp(chosen->model, model) != 0) {
        warn("--model: %s is not used, the run resumes with the model of %s", chosen->model, dir);
        chosen->given[OPT_model] = false;
    }
    free(model);
    must(options_merge(chosen, &state->json, state->saved_options, &e), &e);
    chosen->given[OPT_zero] = true;  // --recompute auto does not choose it again
    if (state->world_size == groups || chosen->total_batch != 0) { return; }
    Options was = saved_options(state, chosen->trainer);
    chosen->total_batch = (int64_t)was.batch * was.seq * state->world_size;
    options_free(&was);
}

static inline void choose_lora(Options* chosen, const LoraConfig* lora) {
    if (lora->rank == 0) { return; }
    chosen->lora = lora->rank;
    chosen->lora_alpha = lora->alpha;
}

/* With --seq-parallel the tokens of a step depend on the groups. A run that resumes without the flag finds them here. A --batch
 * on the command line of a resumed run into which its step cannot be cut becomes the whole step, which the run then reports. */
static inline void choose_total_batch(Options* chosen, int groups) {
    const int64_t micro = (int64_t)chosen->batch * chosen->seq * groups;
    const bool yields = chosen->given[OPT_batch] && !chosen->given[OPT_total_batch] && chosen->total_batch % micro != 0;
    if (!yields && (chosen->seq_parallel == 1 || chosen->total_batch != 0)) { return; }
    chosen->total_batch = micro;
    chosen->given[OPT_total_batch] |= yields;
}

/* Takes the sampling and the most tokens of the model's folder, unless flags give them. Without do_sample the folder takes the
 * most probable token, unless a flag asks for draws; --seed does where the folder says neither. What the folder leaves out is
 * as in `transformers` if the folder draws, otherwise as the flags are. s->temperature becomes the temperature of draws. */
static inline void choose_sampling(Options* chosen, Sampling* s) {
    const bool* given = chosen->given;
    const bool asked = given[OPT_temperature] || given[OPT_top_k] || given[OPT_top_p] || (given[OPT_seed] && !s->stated);
    if (!given[OPT_temperature] && (s->temperature >= 0 || s->draws)) {
        chosen->temperature = s->temperature >= 0 ? s->temperature : 1;
    }
    if (!given[OPT_top_p] && (s->top_p >= 0 || s->draws)) { chosen->top_p = s->top_p >= 0 ? s->top_p : 1; }
    if (!given[OPT_top_k] && (s->top_k >= 0 || s->draws)) { chosen->top_k = s->top_k >= 0 ? (int)s->top_k : 50; }
    if (!given[OPT_tokens] && s->max_new_tokens > 0) { chosen->tokens = (int)s->max_new_tokens; }
    s->temperature = chosen->temperature;
    if (!s->draws && !asked) { chosen->temperature = 0; }
}

#define DEFAULT_DATA "dev/data/tinytales/"

/* Sets --train and --val to the tinytales data if --train is missing (with --eval: --val, if --tasks is missing too). A new
 * model without --tokenizer then gets the data's tokenizer. If the data has not been built, a dry run does without, if the
 * vocabulary is known; else fails. */
static inline bool choose_data(Options* chosen, Error* e) {
    const bool wanted = chosen->eval ? !chosen->val && !chosen->tasks : !chosen->train;
    if (!wanted) { return true; }
    const char* missing = chosen->eval ? DEFAULT_DATA "tinytales_val.bin" : DEFAULT_DATA "tinytales_train.bin";
    if (!file_exists(missing)) {
        ModelConfig preset;
        const bool plain = config_preset(&preset, chosen->model, 1) && preset.vocab_size == 1 && !chosen->tokenizer;
        if (chosen->dry_run && chosen->epochs == 0 && !plain) { return true; }
        if (chosen->eval) { return fail(e, "--val: is not given, wanted a token file, or questions in --tasks"); }
        return fail(e, "--train: is not given, and the default %s does not exist\n  hint: %s", missing,
                    chosen->given[OPT_prompt]    ? "--prompt is for samples in training; --generate TEXT continues a text"
                    : is_directory(DEFAULT_DATA) ? "make " DEFAULT_DATA "tinytales_train.bin"
                                                 : "./tokenize makes token files from text");
    }
    if (!chosen->train) { chosen->train = DEFAULT_DATA "tinytales_train.bin"; }
    if (!chosen->val && file_exists(DEFAULT_DATA "tinytales_val.bin")) { chosen->val = DEFAULT_DATA "tinytales_val.bin"; }
    if (!chosen->tokenizer && !is_directory(chosen->model)) { chosen->tokenizer = DEFAULT_DATA "tokenizer.json"; }
    return true;
}

enum { EVAL_MOST = 1024 };  // tokens of a row, where neither --seq nor a run says more

/* With --eval, rows of --val are as long as in the run that wrote the model, or else as the model's context allows. */
static inline void choose_eval_rows(Options* chosen, const Start* start, int max_positions) {
    const int context = max_positions < EVAL_MOST ? max_positions : EVAL_MOST;
    if (!chosen->given[OPT_seq]) { chosen->seq = start->seq > 0 ? start->seq : context; }
}

/* With --eval and --tasks, rows are as long as the longest question, within --seq, otherwise within the model's context. */
static inline void choose_rows(Options* chosen, const Tasks* tasks, int max_positions) {
    const int most = chosen->given[OPT_seq] ? chosen->seq : max_positions;
    chosen->seq = (int)size_min(tasks_longest(tasks), (size_t)most);
}

/* Notes whether the run trains a new model dN, whose flags the laws of dial.h choose. Data is then opened for one row, since
 * its size decides the batch. */
static inline void choose_to_dial(Options* chosen, Dial* d, const Start* start) {
    ModelConfig preset;
    d->on = !start->dir[0] && chosen->lora == 0 && config_preset(&preset, chosen->model, 1) && preset.vocab_size == 1;
    if (d->on && !chosen->given[OPT_batch]) { chosen->batch = 1; }
}

/* Takes the tokens of a step, the rows of a micro-batch and the steps that dial.h has for the data of `rows` rows and `groups`
 * of ranks. A given --batch also is the whole step. A run reads data at most DIAL_EPOCHS times for the sake of larger steps. */
static inline void choose_dial(Options* chosen, const Dial* d, uint64_t rows, int groups) {
    const bool* given = chosen->given;
    const double tokens = dial_tokens(d, chosen), row = (double)chosen->seq * groups;
    if (!d->on) { return; }
    if (!given[OPT_batch] && !given[OPT_total_batch]) {
        double best = dial_batch(tokens);
        if (given[OPT_steps] && chosen->steps > 0 && d->data > 0) { best = fmin(best, DIAL_EPOCHS * d->data / chosen->steps); }
        int share = dial_power_of_two(fmax(best / row, DIAL_ROWS));
        while (share > 1 && d->data > 0 && (uint64_t)share * (uint64_t)groups > rows) { share /= 2; }
        chosen->total_batch = (int64_t)share * chosen->seq * groups;
    }
    if (!given[OPT_batch]) {
        const int most = chosen->trainer == ON_GPU ? DIAL_MICRO_GPU : DIAL_MICRO_CPU;
        const int64_t share = chosen->total_batch / chosen->seq / groups;
        const double held = d->data > 0 ? (double)(rows / (uint64_t)groups) : INFINITY;  // a resumed run refuses larger batches
        chosen->batch = 1;
        for (int n = 2; share > 0 && share % n == 0 && n * chosen->seq <= most && n <= held; n *= 2) { chosen->batch = n; }
    }
    if (!given[OPT_steps] && chosen->epochs == 0 && chosen->minutes == 0) {
        const double step = chosen->total_batch ? (double)chosen->total_batch : chosen->batch * row;
        chosen->steps = (int)fmin(fmax(1, tokens / step), 2e9);
    }
}

/* Takes the rate and the warm-up that dial.h has for `steps` steps of `batch` tokens. A given --decay comes before the warm-up.
 * Both are 0 until the steps of --minutes are known. */
static inline void choose_rate(Options* chosen, const Dial* d, int64_t steps, int64_t batch) {
    const bool known = chosen->minutes == 0 || chosen->steps >= 0;
    const double tokens = (double)steps * (double)batch, before = (double)(steps - chosen->decay);
    if (!d->on || steps <= 0) { return; }
    if (!chosen->given[OPT_lr]) { chosen->lr = known ? dial_rate(d, tokens, (double)batch, chosen->optimizer != 0) : 0; }
    if (!chosen->given[OPT_warmup]) { chosen->warmup = known ? (int)fmax(fmin(DIAL_WARMUP * (double)steps, before), 0) : 0; }
}

/* memory_find_pair() for these ranks. Across hosts, ZeRO 3 would send all weights over a network in each pass, so 2 is the
 * last. A dry run knows of one host. */
static inline void find_pair(const MemoryRoom* room, Options* o, const Team* team) {
    const bool across = team && team->run.local_ranks < team->run.ranks;
    if (o->recompute.automatic) { memory_find_pair(room, o, across ? ZERO_2 : ZERO_3); }
}

/* Halves the rows of a micro-batch until they fit, with what --recompute auto may do, or one is left. Returns how often. */
static inline int halve_batch(Options* o, const MemoryRoom* room, const Team* team) {
    for (int halvings = 0;; halvings++, o->batch /= 2) {
        find_pair(room, o, team);
        if (o->batch == 1 || memory_fits(room, o)) { return halvings; }
    }
}

/* Halves the micro-batch of dial.h until every rank has room for it. The tokens of a step stay. Room is made in the order of
 * memory_find_fit(): --recompute auto gives what it can, then the rows are halved, and --offload auto moves more to the
 * host where one row is too much. */
static inline void choose_batch(Options* chosen, const Dial* d, const MemoryRoom* room, Team* team) {
    if (!d->on || chosen->given[OPT_batch]) { return; }
    const bool automatic = chosen->offload == OFFLOAD_AUTO;
    const int most = automatic ? memory_offload_most(room) : chosen->offload;
    bool fits = room->have == 0;
    int halvings = 0;
    for (int offload = automatic ? OFFLOAD_OFF : most; !fits && offload <= most; offload++) {  // as choose_offload() will find
        Options o = *chosen;
        o.offload = offload;
        halvings = halve_batch(&o, room, team);
        fits = memory_fits(room, &o);
    }
    agree_most(team, &halvings, 1);
    chosen->batch >>= halvings;
}

/* From here on a run with --epochs is one with --steps. */
static inline void choose_steps(Options* chosen, int64_t steps) {
    if (chosen->epochs == 0) { return; }
    chosen->steps = (int)steps;
    chosen->given[OPT_steps] = true;
}

/* A branch ends with its decay. */
static inline void choose_branch(Options* chosen, int64_t end) { chosen->steps = (int)end; }

/* Returns the word of --export-dtype that stands for weights of this dtype; F32 stands in for a dtype without a word. */
static inline ExportDtype export_dtype_of(SafeDtype dtype) {
    return dtype == SAFE_BF16 ? EXPORT_BF16 : dtype == SAFE_F16 ? EXPORT_F16 : EXPORT_F32;
}

/* Returns the dtype that a word of --export-dtype other than auto stands for. */
static inline SafeDtype safe_dtype_of(ExportDtype word) {
    return word == EXPORT_BF16 ? SAFE_BF16 : word == EXPORT_F16 ? SAFE_F16 : SAFE_F32;
}

/* Without --export-dtype, checkpoints have the dtype of the build, which another build that resumes the run then keeps.
 * Adapters are exact, since they are small. */
static inline void choose_dtype(Options* chosen, SafeDtype build, bool adapters) {
    if (adapters) { chosen->export_dtype = EXPORT_F32; }
    if (chosen->export_dtype == EXPORT_AUTO) { chosen->export_dtype = export_dtype_of(build); }
}

/* --offload auto: takes the least that fits on every rank, with what --recompute auto may do. Checkpoints keep the word auto
 * here, too. */
static inline void choose_offload(Options* chosen, const MemoryRoom* room, Team* team) {
    char text[OPTION_TEXT];
    if (chosen->offload != OFFLOAD_AUTO) { return; }
    Options o = *chosen;
    bool fits = false;
    for (o.offload = OFFLOAD_OFF; !fits && o.offload <= memory_offload_most(room); o.offload++) {
        o.recompute = chosen->recompute;
        find_pair(room, &o, team);
        fits = memory_fits(room, &o);
        chosen->offload = o.offload;
    }
    agree_most(team, &chosen->offload, 1);
    printf("memory  --offload auto takes %s\n", option_text(chosen, OPT_offload, text));
    chosen->offload_auto = true;
}

/* --recompute auto: takes the cheapest value that fits on every rank, and --zero with it where that is free to choose. They
 * share passes through the layers, so all take the values of the rank with the least room. Checkpoints keep the word auto,
 * since a resumed run chooses anew, for its card; its --zero stays. */
static inline void choose_recompute(Options* chosen, const MemoryRoom* room, Team* team) {
    char text[OPTION_TEXT], with[32] = "";
    if (!chosen->recompute.automatic) { return; }
    find_pair(room, chosen, team);
    agree_most(team, &chosen->zero, 1);
    chosen->recompute = memory_find_recompute(room, chosen);
    agree_most(team, chosen->recompute.blocks, RECOMPUTE_LEVELS);
    Recompute blocks = chosen->recompute;
    blocks.automatic = false;
    if (memory_chooses_zero(room, chosen)) { snprintf(with, sizeof with, " with --zero %d", chosen->zero + 1); }
    printf("memory  --recompute auto takes %s%s\n", recompute_text(&blocks, text, sizeof text), with);
    if (blocks.blocks[0] > 0 && room->use.ranks > 1 && !chosen->given[OPT_zero] && !with[0]) {
        printf(
            "memory  --zero 2 needs less, but rounds the sums of several micro-batches in another way: auto keeps --zero 1\n");
    }
}

/* --minutes: takes the steps that rank 0 has found to fit. Log and checkpoints record them, and a resumed run keeps them. */
static inline void choose_minutes(Options* chosen, int64_t steps, Team* team) {
    chosen->steps = (int)steps;
    agree_first(team, &chosen->steps, sizeof chosen->steps);
}

#endif
