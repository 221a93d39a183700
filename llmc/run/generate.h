/* generate.h -- text from a model: the loop of --generate, of samples while training and of --chat.
 *
 * The model is a callback that takes tokens at a position and returns the logits behind the last one; it keeps its own KV
 * cache, of which this file only knows the length. Text leaves through a streaming decoder: a character is printed when
 * all of its bytes are there. Where there is no tokenizer, prompts and results are ids separated by spaces.
 *
 * A text ends at an EOS id, or at BOS: token files separate documents with BOS, so that is what a model trained on them
 * says when it is done.
 *
 * Left to others: sampling (sampler.h), the tokens of a prompt (prompt.h), the format of chat messages (chat.h).
 */
#ifndef LLMC_GENERATE_H
#define LLMC_GENERATE_H

#include "llmc/base/utils.h"      // defines: fail, warn, xrealloc
#include "llmc/config.h"          // defines: ModelConfig, MAX_EOS
#include "llmc/run/prompt.h"      // defines: prompt_tokens
#include "llmc/run/sampler.h"     // defines: Sampler, sampler_next
#include "llmc/text/chat.h"       // defines: ChatTokens, chat_tokens, chat_header, chat_message
#include "llmc/text/tokenizer.h"  // defines: Tokenizer, TokenList, TokenDecoder, decoder_push

/* Feeds `count` tokens at positions pos .. pos + count - 1 and returns the logits (V) behind the last of them, valid until
 * the next call; NULL and an error where that fails. */
typedef const float* (*NextLogits)(void* model, const int32_t* tokens, int count, int pos, Error* e);

typedef struct {
    NextLogits next;
    void* model;
    const ModelConfig* config;
    const Tokenizer* tokenizer;  // NULL: ids stand for text
    Sampler* sampler;
    uint32_t stream;  // of the random numbers: the step while training, else 0
    uint64_t draws;   // index of the next draw
    int context;      // positions that the model's cache holds
    FILE* out;        // where text goes as it comes; NULL: nowhere
    char* text;       // all of it, for the log; NUL behind it
    size_t text_len, text_cap;
    TokenDecoder decoder;
    int32_t stops[MAX_EOS + 8];
    int num_stops;
} Generator;

static inline void generator_stop_at(Generator* g, int id) {
    if (id >= 0 && g->num_stops < (int)(sizeof g->stops / sizeof *g->stops)) { g->stops[g->num_stops++] = id; }
}

/* `tokenizer` may be NULL. The sampler is shared; its V is the model's. */
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

/* Prints and keeps `len` bytes of text. */
static inline void generator_emit(Generator* g, const char* text, size_t len) {
    if (g->out && len > 0) {
        fwrite(text, 1, len, g->out);
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

/* The text of one more token: its characters that are whole now, or its number. */
static inline void generator_emit_token(Generator* g, int id) {
    size_t len = 0;
    char number[16];
    if (g->tokenizer && id < g->tokenizer->vocab_size) {
        const char* text = decoder_push(&g->decoder, id, &len);
        generator_emit(g, text, len);
    } else {
        // a padded vocabulary has ids that no text stands for
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

/* Feeds `count` tokens at *pos and writes up to max_tokens more, until a stop; *pos moves on. *last is the token that was
 * chosen last and is not in the cache: a stop, or the last one of max_tokens, or -1 where nothing was chosen. */
static inline bool generate_from(Generator* g, const int32_t* tokens, int count, int* pos, int max_tokens, int* last,
                                 Error* e) {
    *last = -1;
    if (count > g->context - *pos) {
        return fail(e, "%d tokens at position %d: do not fit into a context of %d", count, *pos, g->context);
    }
    const float* logits = g->next(g->model, tokens, count, *pos, e);
    *pos += count;
    for (int made = 0; logits && made < max_tokens; made++) {
        const int id = sampler_next(g->sampler, logits, g->stream, g->draws++);
        if (id < 0) { return fail(e, "the model's logits at position %d are no numbers: its weights are broken", *pos - 1); }
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

/* A whole text: `prompt` as it is, then what the model writes behind it, at most max_tokens. The text also stays in g->text
 * until the next call. */
static inline bool generate(Generator* g, const char* prompt, int max_tokens, Error* e) {
    TokenList tokens;
    memset(&tokens, 0, sizeof tokens);
    g->text_len = 0;
    g->draws = 0;
    generator_emit(g, "", 0);
    bool ok = prompt_tokens(&tokens, prompt, g->config, g->tokenizer, e);
    if (ok && tokens.count >= (size_t)g->context) {
        ok = fail(e, "the prompt is %zu tokens long, but the context holds %d, and one has to be written", tokens.count,
                  g->context);
    }
    if (ok) {
        int pos = 0, last;
        generator_emit(g, prompt, strlen(prompt));
        ok = generate_from(g, tokens.ids, (int)tokens.count, &pos, max_tokens, &last, e);
    }
    if (ok && g->out) {
        if (g->text_len == 0 || g->text[g->text_len - 1] != '\n') { fputc('\n', g->out); }
        fflush(g->out);  // its failure is the caller's to find, by ferror(): a lost screen must not end a training run
    }
    token_list_free(&tokens);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// chat

typedef struct {
    Generator* g;
    ChatTokens tokens;
    const char* system;  // message in front of all; NULL: none
    TokenList turn;      // tokens to feed before the next answer
    int pos;             // tokens in the model's cache
    int last;            // the answer's last token, chosen but not in the cache; -1: none
} Conversation;

/* Fills c->turn: the beginning, or what closes the answer before; the message; the header of the answer. */
static inline void conversation_turn(Conversation* c, const char* message) {
    const Tokenizer* t = c->g->tokenizer;
    c->turn.count = 0;
    if (c->pos == 0) {
        token_list_add(&c->turn, c->tokens.begin);
        if (c->system && *c->system) { chat_message(&c->turn, &c->tokens, t, "system", c->system); }
    } else {
        // an answer that was cut is closed all the same
        if (c->last >= 0 && !generator_stops(c->g, c->last)) { token_list_add(&c->turn, c->last); }
        token_list_add(&c->turn, c->tokens.eot);
    }
    chat_message(&c->turn, &c->tokens, t, "user", message);
    chat_header(&c->turn, &c->tokens, t, "assistant");
}

/* Answers one message with at most max_tokens. A conversation that fills the context is forgotten, a message that is too long
 * for it alone is left out; both are said. */
static inline bool conversation_answer(Conversation* c, const char* message, int max_tokens, Error* e) {
    Generator* g = c->g;
    conversation_turn(c, message);
    if (c->pos > 0 && c->turn.count + 1 > (size_t)(g->context - c->pos)) {
        warn("the conversation fills the context of %d tokens; it is forgotten and begins anew", g->context);
        c->pos = 0;
        conversation_turn(c, message);
    }
    if (c->turn.count + 1 > (size_t)g->context) {
        warn("the message takes %zu tokens, but the context holds %d; it is left out", c->turn.count, g->context);
        return true;
    }
    g->text_len = 0;
    if (!generate_from(g, c->turn.ids, (int)c->turn.count, &c->pos, max_tokens, &c->last, e)) { return false; }
    fputc('\n', g->out);
    fflush(g->out);
    if (c->pos == g->context && !generator_stops(g, c->last)) {
        warn("the answer ends with the context of %d tokens", g->context);
    }
    return true;
}

/* Reads messages from `in`, one a line, and answers to g->out, each answer at most max_tokens long. /clear forgets the
 * conversation, /quit or the end of the input ends it. `system` may be NULL. */
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
    if (interactive) { fprintf(stderr, "one message a line; /clear forgets the conversation, /quit ends\n"); }
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
