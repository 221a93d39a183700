/* chat.h -- --chat: a conversation, a message a line.
 *
 *   """        starts and ends a message of several lines
 *   /help, /clear, /quit     commands; another word after a '/' is refused, unless a blank precedes the '/'
 *   Ctrl-C     ends the answer, at an empty line the chat
 *
 * At a terminal the chat shows a prompt, and at the start a line about the chat's format. For a file or pipe it writes bare
 * answers. An answer stays in the model's cache for the next one.
 *
 * Elsewhere: tokens of messages (text/chat.h), lines (line_input.h), the text of an answer (generate.h).
 */
#ifndef LLMC_RUN_CHAT_H
#define LLMC_RUN_CHAT_H

#include "llmc/base/utils.h"           // defines: warn
#include "llmc/run/loop/generate.h"    // defines: Generator, generate_from, generator_stop_at_turn, generator_stops
#include "llmc/run/jobs/line_input.h"  // defines: LineInput, LINE_WHY_PLAIN, line_open, line_is_edited, line_read, line_close
#include "llmc/run/session/signals.h"  // defines: run_stop_requested, run_stop_done
#include "llmc/text/chat.h"            // defines: ChatFormat, chat_tokens, chat_begin, chat_header, chat_message
#include "llmc/base/text.h"            // defines: text_starts, print_escaped

typedef struct {
    const char* system;  // system message at the start; NULL: none
    const char* date;    // date in Llama 3.1's system message; NULL: the form of Llama 3
    int max_tokens;      // of an answer
} ChatOptions;

typedef struct {
    Generator* g;
    ChatOptions options;
    ChatFormat format;
    TokenList turn;  // tokens to feed before the next answer
    int pos;         // tokens in the model's KV cache
    int last;        // last token of the answer, sampled but not in the cache; -1: none
} Conversation;

// ---------------------------------------------------------------------------------------------------------------------
// answers

/* Fills c->turn: the start of the conversation, or the end of the previous answer; then the message and the answer's header. */
static inline void conversation_turn(Conversation* c, const char* message) {
    const Tokenizer* t = c->g->tokenizer;
    c->turn.count = 0;
    if (c->pos == 0) {
        const char* system = c->options.system ? c->options.system : "";
        chat_begin(&c->turn, &c->format, t, system, strlen(system));
    } else {
        // close the answer even if it was cut off
        if (c->last >= 0 && !generator_stops(c->g, c->last)) { token_list_add(&c->turn, c->last); }
        token_list_add(&c->turn, c->format.eot);
    }
    chat_message(&c->turn, &c->format, t, "user", message, strlen(message));
    chat_header(&c->turn, &c->format, t, "assistant");
}

/* Answers one message. Forgets a conversation that fills the context, and skips a message that alone does not fit; warns of
 * both. Ctrl-C ends the answer; before its first token it takes the message back. */
static inline bool conversation_answer(Conversation* c, const char* message, Error* e) {
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
    if (!generate_from(g, c->turn.ids, (int)c->turn.count, NULL, &c->pos, c->options.max_tokens, &c->last, e)) { return false; }
    fputc('\n', g->out);
    fflush(g->out);
    if (run_stop_requested()) {
        run_stop_done();
    } else if (c->pos == g->context && !generator_stops(g, c->last)) {
        warn("the answer is cut off: it fills the context of %d tokens", g->context);
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// messages and commands

/* Reads on to the """ that ends a message; `first` is the text after the """ that starts it. Returns the message, which the
 * caller frees; NULL if Ctrl-C took it back. The end of the input ends it, too. */
static inline char* chat_read_block(LineInput* in, const char* first) {
    char* text = NULL;
    size_t size = 0;
    FILE* f = xopen_memory(&text, &size);
    for (const char* line = first; line; line = line_read(in, "... ")) {
        size_t n = strlen(line);
        while (n > 0 && strchr(" \t", line[n - 1])) { n--; }
        const bool ends = n >= 3 && memcmp(line + n - 3, "\"\"\"", 3) == 0;
        fprintf(f, "%.*s\n", (int)(ends ? n - 3 : strlen(line)), line);
        if (ends) { break; }
    }
    xclose_memory(f, &text);
    if (!in->interrupted) { return text; }
    free(text);
    return NULL;
}

/* Returns whether a line is a command: '/' and one word of letters. */
static inline bool chat_is_command(const char* line) {
    if (*line != '/') { return false; }
    const size_t n = 1 + strspn(line + 1, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ");
    return n > 1 && (!line[n] || strchr(" \t\n", line[n]));
}

static inline void chat_help(FILE* out) {
    fputs(
        "/help    shows these lines\n"
        "/clear   forgets the conversation\n"
        "/quit    ends the chat, as Ctrl-D and Ctrl-C do at an empty line\n"
        "\"\"\"      starts and ends a message of several lines\n"
        "Ctrl-C   ends an answer\n",
        out);
}

/* Prints the chat's format, and its date without what a terminal would obey. `edited`: lines can be edited. */
static inline void chat_greet(FILE* out, const char* date, bool edited) {
    fprintf(out, "chat in the form of Llama 3%s", date ? ".1, dated " : "");
    if (date) { print_escaped(out, date, strlen(date)); }
    fputs("; /help lists the commands\n", out);
    if (!edited) { fputs("lines cannot be edited here, and Ctrl-C ends the chat at any line" LINE_WHY_PLAIN "\n", out); }
}

/* Obeys a command; false: the chat ends. */
static inline bool chat_command(Conversation* c, char* line) {
    for (size_t n = strlen(line); n > 0 && strchr(" \t", line[n - 1]); n--) { line[n - 1] = 0; }
    if (strcmp(line, "/quit") == 0) { return false; }
    if (strcmp(line, "/clear") == 0) {
        c->pos = 0;
    } else if (strcmp(line, "/help") == 0) {
        chat_help(c->g->out);
    } else {
        warn("%.100s is no command, wanted /help, /clear or /quit", line);
    }
    return true;
}

/* Reads messages from `file` and writes the answers to g->out, until /quit or the end of the input. */
static inline bool chat(Generator* g, const ChatOptions* options, FILE* file, Error* e) {
    Conversation c;
    LineInput in;
    memset(&c, 0, sizeof c);
    c.g = g;
    c.options = *options;
    c.last = -1;
    if (!chat_tokens(&c.format, g->tokenizer, g->config->vocab_size, e)) { return false; }
    c.format.date = options->date;
    generator_stop_at_turn(g);
    line_open(&in, file, g->out);
    if (in.terminal) { chat_greet(g->out, options->date, line_is_edited(&in)); }
    bool ok = true;
    char* line;
    while (ok && (line = line_read(&in, "> "))) {
        if (text_starts(line, "\"\"\"")) {
            char* block = chat_read_block(&in, line + 3);
            ok = !block || conversation_answer(&c, block, e);
            free(block);
        } else if (chat_is_command(line)) {
            if (!chat_command(&c, line)) { break; }
        } else if (line[strspn(line, " \t\n")]) {
            ok = conversation_answer(&c, line, e);
        }
    }
    if (in.terminal && !line) { fputc('\n', g->out); }  // after Ctrl-D and Ctrl-C the shell's prompt gets a line of its own
    line_close(&in);
    token_list_free(&c.turn);
    return e->msg[0] == 0;
}

#endif
