/* screen.h -- the output of a training run: the model, a line and a log event per step, validation, the summary.
 *
 * train_llama3.py prints step lines with the same columns, widths and number formats.
 */
#ifndef LLMC_SCREEN_H
#define LLMC_SCREEN_H

#include "llmc/base/utils.h"
#include "llmc/base/text.h"         // defines: text_count, text_plural, text_bytes, text_clock, print_names
#include "llmc/config.h"            // defines: ModelConfig, ParamTable
#include "llmc/optim/optimizer.h"   // defines: rule_of, optimizer_rules
#include "llmc/files/logger.h"      // defines: Logger, logger_begin, logger_end, log_sources, log_quantised
#include "llmc/train/mfu.h"         // defines: flops_per_token, mfu_text
#include "llmc/files/dataloader.h"  // defines: DataLoader
#include "llmc/text/tokenizer.h"    // defines: Tokenizer, TokenDecoder, decoder_push
#include "llmc/train/step.h"        // defines: Metrics

#include <math.h>

static inline void print_model(FILE* f, const char* name, const ModelConfig* c, const ParamTable* t, const char* precision) {
    char count[32];
    print_names(
        f,
        "model   %s: %s parameters, vocabulary %d, width %d, %d layer%s, %d head%s, %d kv head%s of %d, ffn %d, %s, %s\n"
        "        RoPE theta %g%s, RMSNorm eps %g\n",
        name, text_count(t->num_params, count, sizeof count), c->vocab_size, c->hidden_size, c->num_layers,
        text_plural(c->num_layers), c->num_heads, text_plural(c->num_heads), c->num_kv_heads, text_plural(c->num_kv_heads),
        c->head_dim, c->intermediate_size, c->tied ? "tied" : "untied", precision, c->rope_theta,
        c->rope_llama3 ? " scaled as llama3" : "", (double)c->rms_eps);
}

/* Prints the adapters of LoRA and their share of the model. */
static inline void print_lora(FILE* f, const LoraConfig* l, uint64_t trained, uint64_t frozen) {
    char count[32];
    fprintf(f, "lora    rank %d, alpha %g, on", l->rank, l->alpha);
    for (int i = 0; i < NUM_LORA_PAIRS; i++) {
        if (l->on >> i & 1) { fprintf(f, " %s", lora_pairs[i].name); }
    }
    fprintf(f, ": %s parameters are trained, %.2f %% of the model\n", text_count(trained, count, sizeof count),
            100.0 * (double)trained / (double)(trained + frozen));
}

/* Prints which weights the rule of --optimizer trains. */
static inline void print_optimizer(FILE* f, const ParamTable* t) {
    int matrices = 0;
    uint64_t elements = 0;
    for (int i = 0; i < t->count; i++) {
        if (rule_of(t, t->items[i].kind) == &optimizer_rules[0]) { continue; }
        matrices++;
        elements += param_size(&t->items[i]);
    }
    fprintf(f, "%-7s %d matrices, %.1f %% of the weights; AdamW trains the others\n", optimizer_rules[t->optimizer].word,
            matrices, 100.0 * (double)elements / (double)t->num_params);
}

typedef struct {
    int64_t steps;
    double tokens_per_step, flops_per_token;
    double peak_flops;  // FLOP/s of all devices; 0: unknown, or a CPU
    int lines;          // step lines since the start of the run
    double shown;       // now_seconds() of the last one
    double started, last_time;
    double interval;  // smoothed seconds from step to step, with all that happens in between
    int64_t intervals;
    double step_seconds;  // sum over all steps, for the summary
    int64_t first_step, last_step;
    double last_loss, last_val;
    double tok_s;                                  // tokens per second of the last step, without padding
    uint64_t padding, run_padding, first_padding;  // tokens of the last step, of the run, and of the run before this start
    uint64_t memory;                               // bytes in use
    int ranks;
} StepLines;

// Every step is shown for the first seconds, but not more than fit on a screen; then about one a second. The log has them all.
enum { STEP_HEADER_EVERY = 40, STEP_FIRST_SECONDS = 10, STEP_FIRST_LINES = 40 };

/* Starts the step lines of a run of `steps` steps, of which `first_step` are already done. */
static inline void step_lines_init(StepLines* s, int64_t steps, int64_t tokens_per_step, int64_t first_step,
                                   double flops_per_token, double peak_flops) {
    memset(s, 0, sizeof *s);
    s->steps = steps;
    s->tokens_per_step = (double)tokens_per_step;
    s->flops_per_token = flops_per_token;
    s->peak_flops = peak_flops;
    s->first_step = s->last_step = first_step;
    s->started = s->last_time = now_seconds();
    s->last_loss = s->last_val = NAN;
}

/* Counts one step, and prints its line if one is due. `step` counts from 1; `memory` is in bytes; `note` (or NULL) ends the
 * line, such as "skipped: loss z 7.1". The estimated time left includes what happens between steps. */
static inline void step_line(FILE* f, StepLines* s, int64_t step, int64_t stop, const Metrics* r, uint64_t memory,
                             const char* note) {
    char width_text[32], number[32], mfu[16], eta[32];
    const int width = snprintf(width_text, sizeof width_text, "%lld", (long long)s->steps);
    const double now = now_seconds();
    // average over about the last 50 intervals, without the first, when caches are cold
    if (s->intervals > 0) {
        double weight = 1.0 / (double)(s->intervals < 50 ? s->intervals : 50);
        s->interval += weight * (now - s->last_time - s->interval);
    }
    const double interval = s->intervals > 0 ? s->interval : r->ms * 1e-3;
    s->intervals++;
    s->last_time = now;
    s->last_step = step;
    s->last_loss = r->loss;
    s->memory = memory;
    s->step_seconds += r->ms * 1e-3;
    s->run_padding += s->padding;
    s->tok_s = r->ms > 0 ? (s->tokens_per_step - (double)s->padding) / r->ms * 1e3 : 0.0;
    const bool first = s->lines < STEP_FIRST_LINES && now - s->started < STEP_FIRST_SECONDS;
    if (!first && !note && step != stop && now - s->shown < 1.0) { return; }  // skipped and last steps are always shown
    s->shown = now;
    if (s->lines % STEP_HEADER_EVERY == 0) {
        fprintf(f, "%*s %9s %8s %9s %8s %9s %6s %7s %8s\n", 2 * width + 1, "step", "loss", "gnorm", "lr", "ms", "tok/s",
                s->peak_flops > 0 ? "MFU" : "flop/s", "mem", "eta");
    }
    s->lines++;
    // loss and gnorm are never negative; fabs() drops the sign of a nan
    fprintf(f, "%*lld/%s %9.4f %8.3f %9.2e %8.1f %9s %6s %6.2fG %8s%s%s\n", width, (long long)step, width_text, fabs(r->loss),
            fabs(r->norm), r->lr, r->ms, text_count((uint64_t)(s->tok_s + 0.5), number, sizeof number),
            mfu_text(s->tok_s * s->flops_per_token, s->peak_flops, mfu, sizeof mfu), (double)memory / (1 << 30),
            text_clock((double)(stop - step) * interval, eta, sizeof eta), note ? "  " : "", note ? note : "");
    fflush(f);
}

/* Logs the step that step_line() has counted. seconds: the time since the process began. tokens: counted since the run began.
 * `counted`: the number of trained targets differs from step to step, and is logged. skipped: the reason for a skipped update,
 * or NULL. */
static inline bool log_step(Logger* g, const StepLines* s, const Metrics* r, double seconds, uint64_t tokens, bool counted,
                            const char* skipped, Error* e) {
    FILE* f = logger_begin(g, "step", s->last_step);
    log_double(f, "loss", r->loss);
    log_double(f, "gnorm", r->norm);
    log_double(f, "lr", r->lr);
    fprintf(f, ",\"ms\":%.3f,\"tok_s\":%.1f,\"seconds\":%.3f", r->ms, s->tok_s, seconds);
    if (s->memory > 0) { log_int(f, "memory", (int64_t)s->memory); }
    log_int(f, "tokens", (int64_t)tokens);
    if (s->run_padding > 0) { log_int(f, "padding", (int64_t)s->run_padding); }
    if (counted) { log_int(f, "trained", (int64_t)r->trained); }
    if (r->sources.count > 0) { log_sources(f, &r->sources); }
    log_quantised(f, r->quantised);
    if (skipped) { log_text(f, "skipped", skipped); }
    return logger_end(g, e);
}

/* Prints a validation. `bpb`: bits per byte; NaN: unknown. */
static inline void print_validation(FILE* f, StepLines* s, int64_t step, double loss, double bpb) {
    s->last_val = loss;
    fprintf(f, "validation loss %.4f", loss);
    if (!isnan(bpb)) { fprintf(f, ", %.4f bits per byte,", bpb); }
    fprintf(f, " at step %lld\n", (long long)step);
    fflush(f);
}

/* Prints the slowest of several ranks: see slowest.h. */
static inline void print_slowest(FILE* f, int64_t step, int rank, const char* host, double ms, double others_ms) {
    print_names(f,
                "slow    rank %d on host %s computes %.1f ms a step, %.0f %% longer than the median of the others, %.1f ms, at "
                "step %lld\n",
                rank, host, ms, 100 * (ms / others_ms - 1), others_ms, (long long)step);
    fflush(f);
}

static inline void print_task(FILE* f, int64_t step, const char* name, double acc, double acc_norm, size_t questions) {
    print_names(f, "task    acc %.4f  acc_norm %.4f  questions %zu  %s at step %lld\n", acc, acc_norm, questions, name,
                (long long)step);
    fflush(f);
}

/* Ends a text after `most` words, and before what a terminal or a shell would obey. Such characters at its start, and blanks,
 * are left out. */
static inline void first_words_cut(char* text, int most) {
    int words = 0;
    size_t n = strspn(text, " \t\r\n\"\\$`!");
    memmove(text, text + n, strlen(text + n) + 1);
    for (n = 0; text[n] && !strchr("\"\\$`!", text[n]); n++) {
        const size_t length = plain_char_length(text + n, strlen(text + n));
        if (length == 0 || (text[n] == ' ' && ++words == most)) { break; }
        n += length - 1;
    }
    while (n > 0 && text[n - 1] == ' ') { n--; }
    text[n] = 0;
}

/* Writes a prompt that suits the data, for the command that a run proposes at its end: the first words of the first token file,
 * or its first ids if there is no tokenizer (`t` is NULL); "" if they cannot be read. */
static inline void first_words(const DataLoader* d, const Tokenizer* t, char* out, size_t cap) {
    enum { MOST_TOKENS = 32, MOST_WORDS = 4 };
    unsigned char raw[4 * MOST_TOKENS];
    int32_t ids[MOST_TOKENS];
    size_t used = 0;
    Error e = NO_ERROR;
    TokenReader file;
    const size_t count = size_min((size_t)d->shards[0].num_tokens, t ? MOST_TOKENS : MOST_WORDS);
    bool ok = tokenfile_open(&file, d->shards[0].path, &e);
    file.limit = d->vocab_limit;
    ok = ok && tokenfile_read_ids(&file, 0, count, raw, ids, "a row", &e);
    TokenDecoder decoder;
    tokenfile_close(&file);
    if (t) { decoder_init(&decoder, t); }
    out[0] = 0;
    for (size_t i = 0; ok && i < count && used < cap; i++) {
        const bool edge = t && (ids[i] == t->bos_id || ids[i] == t->eos_id);
        size_t length = 0;
        if (edge && i > 0) { break; }
        if (edge) { continue; }
        const char* text = t ? decoder_push(&decoder, ids[i], &length) : NULL;
        used += (size_t)(t ? snprintf(out + used, cap - used, "%.*s", (int)length, text)
                           : snprintf(out + used, cap - used, "%s%d", i > 0 ? " " : "", ids[i]));
    }
    if (t) { decoder_free(&decoder); }
    first_words_cut(out, MOST_WORDS);
}

/* Prints a text in double quotes, as a shell takes it, up to the first control character. */
static inline void print_quoted(FILE* f, const char* text) {
    fputc('"', f);
    for (size_t length; *text && (length = plain_char_length(text, strlen(text))) > 0; text += length) {
        if (strchr("\"\\$`", *text)) { fputc('\\', f); }
        fwrite(text, 1, length, f);
    }
    fputc('"', f);
}

/* Prints the summary of a run: steps, speed, the checkpoint, and the commands to use it. `checkpoint` may be NULL. `prompt` is
 * the prompt of the proposed command; NULL: the command chats. */
static inline void print_summary(FILE* f, const StepLines* s, const char* program, const char* checkpoint, const char* prompt,
                                 uint64_t memory) {
    const int64_t steps = s->last_step - s->first_step;
    char clock[32], tokens[32], bytes[32];
    fprintf(f, "done    %lld step%s in %s", (long long)steps, text_plural(steps),
            text_clock(now_seconds() - s->started, clock, sizeof clock));
    if (steps > 0) { fprintf(f, ", loss %.4f", s->last_loss); }
    if (!isnan(s->last_val)) { fprintf(f, ", validation %.4f", s->last_val); }
    if (steps > 0 && s->step_seconds > 0) {
        const double padding = (double)(s->run_padding - s->first_padding);
        const double tok_s = (s->tokens_per_step * (double)steps - padding) / s->step_seconds;
        fprintf(f, ", %.1f ms a step, %s tokens/s", s->step_seconds / (double)steps * 1e3,
                text_count((uint64_t)(tok_s + 0.5), tokens, sizeof tokens));
        if (s->ranks > 1) { fprintf(f, " (%s a rank)", text_count((uint64_t)(tok_s / s->ranks + 0.5), tokens, sizeof tokens)); }
    }
    fprintf(f, ", peak memory %s\n", text_bytes(memory, bytes, sizeof bytes));
    if (!checkpoint) { return; }
    print_names(f, "%s %s\n", steps > 0 || s->first_step == 0 ? "saved  " : "newest ", checkpoint);
    fputs("next    ", f);
    print_word(f, program);
    fputs(" --model ", f);
    print_word(f, checkpoint);
    fputs(prompt ? " --generate " : " --chat", f);
    if (prompt) { print_quoted(f, prompt); }
    fputc('\n', f);
    if (s->last_step < s->steps) { fprintf(f, "        to continue training: the same command with --resume\n"); }
}

#endif
