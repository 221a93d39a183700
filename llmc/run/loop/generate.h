/* generate.h -- text from a model: the loop of --generate, of samples while training and of --chat's answers.
 *
 * The model is a callback: it takes tokens at a position and returns the logits after the last one. It owns its KV cache;
 * this file knows only the cache's length. A streaming decoder prints a character once all of its bytes have come; control
 * characters reach a terminal as \xNN, a file or pipe as they are. Without a tokenizer, prompts and results are ids separated
 * by spaces.
 *
 * A text ends at an EOS id or at BOS, and where a signal asks for its end. Token files separate documents with BOS, so a model
 * trained on them ends its texts with BOS.
 *
 * Elsewhere: sampling (sampler.h), the tokens of a prompt (question.h), conversations (chat.h).
 */
#ifndef LLMC_GENERATE_H
#define LLMC_GENERATE_H

#include "llmc/base/utils.h"           // defines: fail, xreserve
#include "llmc/files/json.h"           // defines: json_write_string
#include "llmc/text/question.h"        // defines: prompt_tokens
#include "llmc/run/loop/sampler.h"     // defines: Sampler, sampler_next, sampler_see, sampler_forget
#include "llmc/base/progress.h"        // defines: Progress, progress_begin, progress_add, progress_end
#include "llmc/run/session/signals.h"  // defines: run_stop_requested
#include "llmc/base/text.h"            // defines: print_escaped
#include "llmc/text/text_rules.h"      // defines: TextRules, text_rules_ends
#include "llmc/text/tokenizer.h"       // defines: Tokenizer, TokenList, TokenDecoder, decoder_push
#include "llmc/train/step.h"           // defines: NextLogits, DECODE_ROWS

typedef struct {
    NextLogits next;
    void* model;
    const TextRules* rules;
    const Tokenizer* tokenizer;  // of the rules; NULL: texts are ids
    Sampler* sampler;
    uint32_t stream;  // random stream: the step while training, otherwise 0
    uint64_t draws;   // index of the next draw
    int context;      // positions in the model's KV cache
    FILE* out;        // gets the text as it is generated; NULL: no output
    FILE* screen;     // shows the progress of reading a long prompt; NULL: none
    bool terminal;    // `out` is a terminal: no text may drive it
    bool json;        // each piece of text becomes a line {"text": "..."}
    bool ellipsis;    // generate() shows where max_tokens cut the text, on `out` alone
    char* text;       // the whole text, NUL-terminated, for the log
    size_t text_len, text_cap;
    TokenDecoder decoder;
    TokenList cached;  // what the model's KV cache holds
    int end_of_turn;   // ends a text besides the tokens of the rules; -1: none
} Generator;

/* Sets up a generator. The caller owns the sampler, whose V must equal the model's vocabulary. */
static inline void generator_init(Generator* g, NextLogits next, void* model, const TextRules* rules, Sampler* sampler,
                                  int context, FILE* out) {
    memset(g, 0, sizeof *g);
    g->next = next;
    g->model = model;
    g->rules = rules;
    g->tokenizer = rules->tokenizer;
    g->sampler = sampler;
    g->context = context;
    g->end_of_turn = -1;
    g->out = out;
    g->terminal = out && isatty(fileno(out));
    if (g->tokenizer) { decoder_init(&g->decoder, g->tokenizer); }
}

static inline void generator_free(Generator* g) {
    if (g->tokenizer) { decoder_free(&g->decoder); }
    free(g->text);
    token_list_free(&g->cached);
    memset(g, 0, sizeof *g);
}

static inline bool generator_stops(const Generator* g, int id) { return id == g->end_of_turn || text_rules_ends(g->rules, id); }

/* Returns how many of the first tokens the cache holds already; at least the last one is to be fed, for its logits. */
static inline int generator_prefix(const Generator* g, const TokenList* tokens) {
    size_t n = 0;
    while (n + 1 < tokens->count && n < g->cached.count && tokens->ids[n] == g->cached.ids[n]) { n++; }
    return (int)n;
}

/* Prints `len` bytes of text and appends them to g->text. */
static inline void generator_emit(Generator* g, const char* text, size_t len) {
    if (g->out && len > 0) {
        if (g->json) {
            fputs("{\"text\": ", g->out);
            json_write_string(g->out, text, len);
            fputs("}\n", g->out);
        } else if (g->terminal) {
            print_escaped(g->out, text, len);
        } else {
            fwrite(text, 1, len, g->out);
        }
        fflush(g->out);
    }
    g->text = (char*)xreserve(g->text, g->text_len, len + 1, &g->text_cap, 1);
    memcpy(g->text + g->text_len, text, len);
    g->text_len += len;
    g->text[g->text_len] = 0;
}

/* Emits the characters that one more token completes, or without a tokenizer the id. A padded vocabulary has ids without text,
 * of which transformers writes nothing, either. */
static inline void generator_emit_token(Generator* g, int id) {
    size_t len = 0;
    char number[16];
    if (!g->tokenizer) {
        len = (size_t)snprintf(number, sizeof number, g->text_len ? " %d" : "%d", id);
        generator_emit(g, number, len);
    } else if (id < g->tokenizer->vocab_size) {
        const char* text = decoder_push(&g->decoder, id, &len);
        generator_emit(g, text, len);
    }
}

static inline void generator_flush(Generator* g) {
    if (!g->tokenizer) { return; }
    size_t len = 0;
    const char* text = decoder_flush(&g->decoder, &len);
    generator_emit(g, text, len);
}

/* Feeds `count` tokens at *pos and advances it. Returns the logits after the last one; NULL on an error, or if a signal asks
 * for the end: then the cache may lack some of the tokens, and *pos stays. */
static inline const float* generator_feed(Generator* g, const int32_t* tokens, int count, int* pos, Error* e) {
    const float* logits = NULL;
    if (!text_rules_hold(g->rules, tokens, (size_t)count, e)) { return NULL; }
    Progress progress = progress_begin(count > DECODE_ROWS ? g->screen : NULL, "prompt", (uint64_t)count, "tokens");
    for (int done = 0; done < count && !run_stop_requested(); done += DECODE_ROWS) {
        const int rows = count - done < DECODE_ROWS ? count - done : DECODE_ROWS;
        logits = g->next(g->model, tokens + done, rows, *pos + done, e);
        if (!logits) { break; }
        progress_add(&progress, (uint64_t)rows);
    }
    progress_end(&progress);
    g->cached.count = size_min(g->cached.count, (size_t)*pos);
    if (!logits || run_stop_requested()) { return NULL; }
    sampler_see(g->sampler, tokens, count);
    for (int i = 0; i < count; i++) { token_list_add(&g->cached, tokens[i]); }
    *pos += count;
    return logits;
}

/* Feeds `count` tokens at *pos, emits `echo` (or NULL), and generates up to max_tokens more, until a stop token. Advances *pos.
 * Sets *last to the last sampled token if the cache lacks it (a stop token, or the last token that fits); otherwise to -1. A
 * signal before the first sampled token leaves *pos and *last as they are. */
static inline bool generate_from(Generator* g, const int32_t* tokens, int count, const char* echo, int* pos, int max_tokens,
                                 int* last, Error* e) {
    if (count > g->context - *pos) {
        return fail(e, "%d tokens at position %d do not fit into the context of %d", count, *pos, g->context);
    }
    if (*pos == 0) { sampler_forget(g->sampler); }
    const float* logits = generator_feed(g, tokens, count, pos, e);
    if (logits) { *last = -1; }
    if (echo) { generator_emit(g, echo, strlen(echo)); }
    for (int made = 0; logits && made < max_tokens && !run_stop_requested(); made++) {
        const int id = sampler_next(g->sampler, logits, g->stream, g->draws++);
        if (id < 0) { return fail(e, "the logits at position %d are all nan: the model's weights are broken", *pos - 1); }
        *last = id;
        if (generator_stops(g, id)) { break; }
        generator_emit_token(g, id);
        if (made + 1 == max_tokens || *pos == g->context) { break; }
        const int32_t token = id;
        logits = generator_feed(g, &token, 1, pos, e);
        if (logits) { *last = -1; }
    }
    generator_flush(g);
    return e->msg[0] == 0;
}

/* Emits `prompt` and then at most max_tokens generated tokens, or as many as the context holds, with a warning. g->text holds
 * the whole text until the next call. */
static inline bool generate(Generator* g, const char* prompt, int max_tokens, Error* e) {
    TokenList tokens;
    memset(&tokens, 0, sizeof tokens);
    g->text_len = 0;
    g->draws = 0;
    generator_emit(g, "", 0);
    bool ok = prompt_tokens(&tokens, prompt, g->rules, e);
    if (ok && tokens.count >= (size_t)g->context) {
        ok = fail(e, "the prompt has %zu tokens, but the context holds %d, and at least one must be generated", tokens.count,
                  g->context);
    }
    if (ok) {
        int pos = 0, last = -1;
        ok = generate_from(g, tokens.ids, (int)tokens.count, prompt, &pos, max_tokens, &last, e);
        const bool cut = ok && last >= 0 && !generator_stops(g, last), shown = cut && g->ellipsis;
        if (g->out && ok) {
            if (shown) { fputs(" …", g->out); }
            if (shown || g->text_len == 0 || g->text[g->text_len - 1] != '\n') { fputc('\n', g->out); }
            fflush(g->out);  // the caller checks ferror(): a lost screen must not end a training run
        }
        if (cut && pos == g->context) { warn("the text is cut off: it fills the model's context of %d tokens", g->context); }
    }
    token_list_free(&tokens);
    return ok;
}

#endif
