/* generate.h -- text from a model: the loop of --generate, of samples while training and of --chat.
 *
 * The model is a callback: it takes tokens at a position and returns the logits after the last one. It owns its KV cache;
 * this file knows only the cache's length. A streaming decoder prints a character once all of its bytes are there; control
 * characters reach a terminal as \xNN, a file or pipe as they are. Without a tokenizer, prompts and results are ids separated
 * by spaces.
 *
 * A text ends at an EOS id or at BOS, and where a signal asks a training run for its end. Token files separate documents with BOS, so a model trained on them ends with BOS.
 *
 * Elsewhere: sampling (sampler.h), the tokens of a prompt (prompt.h), the format of chat messages (chat.h).
 */
#ifndef LLMC_GENERATE_H
#define LLMC_GENERATE_H

#include "llmc/base/utils.h"      // defines: fail, warn, xrealloc
#include "llmc/config.h"          // defines: ModelConfig, MAX_EOS
#include "llmc/run/prompt.h"      // defines: prompt_tokens
#include "llmc/run/sampler.h"     // defines: Sampler, sampler_next
#include "llmc/run/signals.h"     // defines: run_stop_requested
#include "llmc/text/chat.h"       // defines: ChatTokens, chat_tokens, chat_header, chat_message
#include "llmc/text/text.h"       // defines: print_escaped
#include "llmc/text/tokenizer.h"  // defines: Tokenizer, TokenList, TokenDecoder, decoder_push

/* Feeds `count` tokens at positions pos .. pos + count - 1 and returns the logits (V) after the last one, valid until the
 * next call. Returns NULL and sets *e on failure. */
typedef const float* (*NextLogits)(void* model, const int32_t* tokens, int count, int pos, Error* e);

typedef struct {
    NextLogits next;
    void* model;
    const ModelConfig* config;
    const Tokenizer* tokenizer;  // NULL: texts are ids
    Sampler* sampler;
    uint32_t stream;  // random stream: the step while training, else 0
    uint64_t draws;   // index of the next draw
    int context;      // positions in the model's KV cache
    FILE* out;        // gets the text as it is generated; NULL: no output
    bool terminal;    // `out` is one: no text may drive it
    bool ellipsis;    // generate() shows where max_tokens cut the text, on `out` alone
    char* text;       // the whole text, NUL-terminated, for the log
    size_t text_len, text_cap;
    TokenDecoder decoder;
    int32_t stops[MAX_EOS + 8];
    int num_stops;
} Generator;

static inline void generator_stop_at(Generator* g, int id) {
    if (id >= 0 && g->num_stops < (int)(sizeof g->stops / sizeof *g->stops)) { g->stops[g->num_stops++] = id; }
}

/* Sets up a generator. `tokenizer` may be NULL. The caller owns the sampler, whose V must be the model's. */
static inline void generator_init(Generator* g, NextLogits next, void* model, const ModelConfig* c, const Tokenizer* tokenizer,
                                  Sampler* sampler, int context, FILE* out) {
    memset(g, 0, sizeof *g);
    g->next = next;
    g->model = model;
    g->config = c;
    g->tokenizer = tokenizer;
    g->sampler = sampler;
    g->context = context;
    g->out = out;
    g->terminal = out && isatty(fileno(out));
    if (tokenizer) {
        decoder_init(&g->decoder, tokenizer);
        generator_stop_at(g, tokenizer->bos_id);
        generator_stop_at(g, tokenizer->eos_id);
    }
    generator_stop_at(g, c->bos_id);
    for (int i = 0; i < c->num_eos; i++) { generator_stop_at(g, c->eos_ids[i]); }
}

static inline void generator_free(Generator* g) {
    if (g->tokenizer) { decoder_free(&g->decoder); }
    free(g->text);
    memset(g, 0, sizeof *g);
}

static inline bool generator_stops(const Generator* g, int id) {
    for (int i = 0; i < g->num_stops; i++) {
        if (g->stops[i] == id) { return true; }
    }
    return false;
}

/* Prints `len` bytes of text and appends them to g->text. */
static inline void generator_emit(Generator* g, const char* text, size_t len) {
    if (g->out && len > 0) {
        if (g->terminal) {
            print_escaped(g->out, text, len);
        } else {
            fwrite(text, 1, len, g->out);
        }
        fflush(g->out);
    }
    if (g->text_len + len + 1 > g->text_cap) {
        g->text_cap = (g->text_len + len + 1) * 2;
        g->text = (char*)xrealloc(g->text, g->text_cap);
    }
    memcpy(g->text + g->text_len, text, len);
    g->text_len += len;
    g->text[g->text_len] = 0;
}

/* Emits the characters that one more token completes, or the id if there is no text for it. */
static inline void generator_emit_token(Generator* g, int id) {
    size_t len = 0;
    char number[16];
    if (g->tokenizer && id < g->tokenizer->vocab_size) {
        const char* text = decoder_push(&g->decoder, id, &len);
        generator_emit(g, text, len);
    } else {
        // a padded vocabulary has ids without text
        const char* format = g->tokenizer ? "<%d>" : g->text_len ? " %d" : "%d";
        len = (size_t)snprintf(number, sizeof number, format, id);
        generator_emit(g, number, len);
    }
}

static inline void generator_flush(Generator* g) {
    if (!g->tokenizer) { return; }
    size_t len = 0;
    const char* text = decoder_flush(&g->decoder, &len);
    generator_emit(g, text, len);
}

/* Feeds `count` tokens at *pos and generates up to max_tokens more, until a stop token. Advances *pos. Sets *last to the last
 * sampled token, which is not in the cache: a stop token or the last one that fits; -1 if none was sampled. */
static inline bool generate_from(Generator* g, const int32_t* tokens, int count, int* pos, int max_tokens, int* last,
                                 Error* e) {
    *last = -1;
    if (count > g->context - *pos) {
        return fail(e, "%d tokens at position %d do not fit into the context of %d", count, *pos, g->context);
    }
    const float* logits = g->next(g->model, tokens, count, *pos, e);
    *pos += count;
    for (int made = 0; logits && made < max_tokens && !run_stop_requested(); made++) {
        const int id = sampler_next(g->sampler, logits, g->stream, g->draws++);
        if (id < 0) { return fail(e, "the logits at position %d are all nan: the model's weights are broken", *pos - 1); }
        *last = id;
        if (generator_stops(g, id)) { break; }
        generator_emit_token(g, id);
        if (made + 1 == max_tokens || *pos == g->context) { break; }
        const int32_t token = id;
        logits = g->next(g->model, &token, 1, *pos, e);
        *pos += 1;
    }
    generator_flush(g);
    return e->msg[0] == 0;
}

/* Emits `prompt` and then at most max_tokens generated tokens. g->text holds the whole text until the next call. */
static inline bool generate(Generator* g, const char* prompt, int max_tokens, Error* e) {
    TokenList tokens;
    memset(&tokens, 0, sizeof tokens);
    g->text_len = 0;
    g->draws = 0;
    generator_emit(g, "", 0);
    bool ok = prompt_tokens(&tokens, prompt, g->config, g->tokenizer, e);
    if (ok && tokens.count >= (size_t)g->context) {
        ok = fail(e, "the prompt has %zu tokens, but the context holds %d, and at least one must be generated", tokens.count,
                  g->context);
    }
    if (ok) {
        int pos = 0, last;
        generator_emit(g, prompt, strlen(prompt));
        ok = generate_from(g, tokens.ids, (int)tokens.count, &pos, max_tokens, &last, e);
        const bool cut = ok && last >= 0 && !generator_stops(g, last);
        if (cut && g->ellipsis && g->out) { fputs(" …", g->out); }
    }
    if (ok && g->out) {
        if (g->text_len == 0 || g->text[g->text_len - 1] != '\n') { fputc('\n', g->out); }
        fflush(g->out);  // the caller checks ferror(): a lost screen must not end a training run
    }
    token_list_free(&tokens);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// chat

typedef struct {
    Generator* g;
    ChatTokens tokens;
    const char* system;  // system message at the start; NULL: none
    TokenList turn;      // tokens to feed before the next answer
    int pos;             // tokens in the model's KV cache
    int last;            // last token of the answer, sampled but not in the cache; -1: none
} Conversation;

/* Fills c->turn: BOS and system message, or the end of the previous answer; then the message and the answer's header. */
static inline void conversation_turn(Conversation* c, const char* message) {
    const Tokenizer* t = c->g->tokenizer;
    c->turn.count = 0;
    if (c->pos == 0) {
        token_list_add(&c->turn, c->tokens.begin);
        if (c->system && *c->system) { chat_message(&c->turn, &c->tokens, t, "system", c->system); }
    } else {
        // close the answer even if it was cut off
        if (c->last >= 0 && !generator_stops(c->g, c->last)) { token_list_add(&c->turn, c->last); }
        token_list_add(&c->turn, c->tokens.eot);
    }
    chat_message(&c->turn, &c->tokens, t, "user", message);
    chat_header(&c->turn, &c->tokens, t, "assistant");
}

/* Answers one message with at most max_tokens tokens. Forgets a conversation that fills the context, and skips a message that
 * alone does not fit; warns of both. */
static inline bool conversation_answer(Conversation* c, const char* message, int max_tokens, Error* e) {
    Generator* g = c->g;
    conversation_turn(c, message);
    if (c->pos > 0 && c->turn.count + 1 > (size_t)(g->context - c->pos)) {
        warn("the conversation fills the context of %d tokens: it is forgotten and begins anew", g->context);
        c->pos = 0;
        conversation_turn(c, message);
    }
    if (c->turn.count + 1 > (size_t)g->context) {
        warn("the message has %zu tokens, but the context holds %d: it is left out", c->turn.count, g->context);
        return true;
    }
    g->text_len = 0;
    if (!generate_from(g, c->turn.ids, (int)c->turn.count, &c->pos, max_tokens, &c->last, e)) { return false; }
    fputc('\n', g->out);
    fflush(g->out);
    if (c->pos == g->context && !generator_stops(g, c->last)) {
        warn("the answer is cut off: it fills the context of %d tokens", g->context);
    }
    return true;
}

/* Reads messages from `in`, one per line, and writes each answer, at most max_tokens tokens, to g->out. /clear forgets the
 * conversation; /quit or the end of the input ends the chat. `system` may be NULL. */
static inline bool chat(Generator* g, const char* system, int max_tokens, FILE* in, Error* e) {
    Conversation c;
    memset(&c, 0, sizeof c);
    c.g = g;
    c.system = system;
    c.last = -1;
    if (!chat_tokens(&c.tokens, g->tokenizer, g->config->vocab_size, e)) { return false; }
    generator_stop_at(g, c.tokens.eot);
    generator_stop_at(g, tokenizer_find(g->tokenizer, "<|eom_id|>"));
    const bool interactive = isatty(fileno(in));
    if (interactive) { fprintf(stderr, "one message per line; /clear forgets the conversation, /quit ends the chat\n"); }
    char* line = NULL;
    size_t cap = 0;
    for (bool ok = true; ok;) {
        if (interactive) {
            fputs("> ", g->out);
            fflush(g->out);
        }
        if (getline(&line, &cap, in) < 0) { break; }
        line[strcspn(line, "\r\n")] = 0;
        if (strcmp(line, "/quit") == 0) { break; }
        if (strcmp(line, "/clear") == 0) {
            c.pos = 0;
        } else if (line[strspn(line, " \t")] != 0) {
            ok = conversation_answer(&c, line, max_tokens, e);
        }
    }
    if (interactive) { fputc('\n', g->out); }
    free(line);
    token_list_free(&c.turn);
    return e->msg[0] == 0;
}

#endif
