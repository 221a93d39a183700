/* generate.h -- text from a model: the loop of --generate, of samples while training and of --chat.
 *
 * The model is a callback that takes tokens at a position and returns the logits behind the last one; it keeps its own KV
 * cache, of which this file only knows the length. Text leaves through a streaming decoder: a character is printed when
 * all of its bytes are there. Where there is no tokenizer, prompts and results are ids separated by spaces.
 *
 * A text ends at an EOS id, or at BOS: token files separate documents with BOS, so that is what a model trained on them
 * says when it is done.
 *
 * Chat is Llama 3's template, with the special tokens looked up by name and the texts encoded as plain text, so that
 * nobody can type a header:
 *   <|begin_of_text|> then for each message <|start_header_id|>ROLE<|end_header_id|>\n\nTEXT<|eot_id|>
 * The answer follows "assistant"'s header and ends at <|eot_id|>. Left to others: sampling (sampler.h).
 */
#ifndef LLMC_GENERATE_H
#define LLMC_GENERATE_H

#include "llmc/base/utils.h"
#include "llmc/config.h"
#include "llmc/run/sampler.h"
#include "llmc/text/tokenizer.h"

/* Feeds `count` tokens at positions pos .. pos + count - 1 and returns the logits (V) behind the last of them, valid until
 * the next call; NULL and an error where that fails. */
typedef const float* (*NextLogits)(void* model, const int32_t* tokens, int count, int pos, Error* e);

/* Tokens that grow. */
typedef struct {
    int32_t* ids;
    size_t cap, count;
} TokenList;

static inline void token_list_add(TokenList* l, int32_t id) {
    if (l->count == l->cap) {
        l->cap = l->cap ? l->cap * 2 : 64;
        l->ids = (int32_t*)xrealloc(l->ids, l->cap * sizeof(int32_t));
    }
    l->ids[l->count++] = id;
}

static inline void token_list_text(TokenList* l, const Tokenizer* t, const char* text, size_t len) {
    l->count = tokenizer_encode(t, text, len, false, &l->ids, &l->cap, l->count);
}

static inline void token_list_free(TokenList* l) {
    free(l->ids);
    memset(l, 0, sizeof *l);
}

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

/* The tokens of a prompt: BOS (the configuration's, else the tokenizer's) and the text. Without a tokenizer the text is ids.
 * Never empty: where there is no BOS and no text it is token 0. */
static inline bool prompt_tokens(TokenList* l, const char* text, const ModelConfig* c, const Tokenizer* t, Error* e) {
    const int V = c->vocab_size;
    const int bos = c->bos_id >= 0 && c->bos_id < V ? c->bos_id : t ? t->bos_id : -1;
    if (bos >= 0 && bos < V) { token_list_add(l, bos); }
    if (t) {
        token_list_text(l, t, text, strlen(text));
    } else {
        for (const char* p = text + strspn(text, " "); *p; p += strspn(p, " ")) {
            char* end = NULL;
            long id = *p >= '0' && *p <= '9' ? strtol(p, &end, 10) : -1;
            if (id < 0 || id >= V || (*end && *end != ' ')) {
                return fail(e,
                            "the prompt is \"%.100s\", wanted ids from 0 to %d, since the model has no tokenizer\n"
                            "  hint: --tokenizer names one",
                            text, V - 1);
            }
            token_list_add(l, (int32_t)id);
            p = end;
        }
    }
    if (l->count == 0) { token_list_add(l, 0); }
    for (size_t i = 0; i < l->count; i++) {
        if (l->ids[i] >= V) {
            return fail(
                e, "the prompt's token %zu is %d, but the model's vocabulary has only %d\n  hint: is it the model's tokenizer?",
                i, l->ids[i], V);
        }
    }
    return true;
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
        fflush(g->out);  // a screen that is gone must not end a training run: whoever has but the text looks at ferror()
    }
    token_list_free(&tokens);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// chat

typedef struct {
    int begin, start_header, end_header, eot;
} ChatTokens;

/* Finds the template's tokens, or names the one that is missing. */
static inline bool chat_tokens(ChatTokens* c, const Tokenizer* t, int vocab_size, Error* e) {
    static const char* const names[] = {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"};
    int* ids[] = {&c->begin, &c->start_header, &c->end_header, &c->eot};
    if (!t) { return fail(e, "--chat: the model has no tokenizer, wanted one with Llama 3's chat tokens"); }
    for (int i = 0; i < 4; i++) {
        *ids[i] = tokenizer_find(t, names[i]);
        if (*ids[i] < 0) { return fail(e, "--chat: the tokenizer has no token %s, wanted Llama 3's chat tokens", names[i]); }
        if (*ids[i] >= vocab_size) {
            return fail(e, "--chat: %s is token %d, but the model's vocabulary has only %d", names[i], *ids[i], vocab_size);
        }
    }
    return true;
}

static inline void chat_header(TokenList* l, const ChatTokens* c, const Tokenizer* t, const char* role) {
    token_list_add(l, c->start_header);
    token_list_text(l, t, role, strlen(role));
    token_list_add(l, c->end_header);
    token_list_text(l, t, "\n\n", 2);
}

/* A message without white space at its ends, as the template has it. */
static inline void chat_message(TokenList* l, const ChatTokens* c, const Tokenizer* t, const char* role, const char* text) {
    static const char space[] = " \t\r\n\v\f";
    size_t len;
    text += strspn(text, space);
    len = strlen(text);
    while (len > 0 && strchr(space, text[len - 1])) { len--; }
    chat_header(l, c, t, role);
    token_list_text(l, t, text, len);
    token_list_add(l, c->eot);
}

/* Reads messages from `in`, one a line, and answers to g->out, each answer at most max_tokens long. /clear forgets the
 * conversation, /quit or the end of the input ends it. A conversation that no longer fits into the context is forgotten,
 * too, which is said. `system` may be NULL. */
static inline bool chat(Generator* g, const char* system, int max_tokens, FILE* in, Error* e) {
    ChatTokens c;
    if (!chat_tokens(&c, g->tokenizer, g->config->vocab_size, e)) { return false; }
    generator_stop_at(g, c.eot);
    generator_stop_at(g, tokenizer_find(g->tokenizer, "<|eom_id|>"));
    const bool interactive = isatty(fileno(in));
    TokenList turn;
    memset(&turn, 0, sizeof turn);
    char* line = NULL;
    size_t cap = 0;
    int pos = 0, last = -1;
    if (interactive) { fprintf(stderr, "one message a line; /clear forgets the conversation, /quit ends\n"); }
    for (;;) {
        if (interactive) {
            fputs("> ", g->out);
            fflush(g->out);
        }
        if (getline(&line, &cap, in) < 0) { break; }
        line[strcspn(line, "\r\n")] = 0;
        if (strcmp(line, "/quit") == 0) { break; }
        if (strcmp(line, "/clear") == 0) {
            pos = 0;
            continue;
        }
        if (line[strspn(line, " \t")] == 0) { continue; }
        for (;;) {
            turn.count = 0;
            if (pos == 0) {
                token_list_add(&turn, c.begin);
                if (system && *system) { chat_message(&turn, &c, g->tokenizer, "system", system); }
            } else {
                // the last token of an answer is chosen, but not in the cache; a cut answer is closed all the same
                if (last >= 0 && !generator_stops(g, last)) { token_list_add(&turn, last); }
                token_list_add(&turn, c.eot);
            }
            chat_message(&turn, &c, g->tokenizer, "user", line);
            chat_header(&turn, &c, g->tokenizer, "assistant");
            if (turn.count + 1 <= (size_t)(g->context - pos) || pos == 0) { break; }
            warn("the conversation fills the context of %d tokens; it is forgotten and begins anew", g->context);
            pos = 0;
        }
        if (turn.count + 1 > (size_t)g->context) {
            warn("the message takes %zu tokens, but the context holds %d; it is left out", turn.count, g->context);
            continue;
        }
        g->text_len = 0;
        if (!generate_from(g, turn.ids, (int)turn.count, &pos, max_tokens, &last, e)) { break; }
        fputc('\n', g->out);
        fflush(g->out);
        if (pos == g->context && !generator_stops(g, last)) {
            warn("the answer ends with the context of %d tokens", g->context);
        }
    }
    if (interactive) { fputc('\n', g->out); }
    free(line);
    token_list_free(&turn);
    return e->msg[0] == 0;
}

#endif
