/* chat.h -- --chat: a conversation, a message a line.
 *
 *   """        starts and ends a message of several lines
 *   /help, /clear, /quit     commands; another word after a '/' is refused, unless a blank precedes the '/'
 *   Ctrl-C     ends the answer, at an empty line the chat
 *
 * At a terminal the chat shows a prompt, and at the start a line about the chat's template. For a file or pipe it writes bare
 * answers. The template writes the whole conversation for each answer, since it may change what it wrote before. The model's
 * cache keeps as much of it as is the same.
 *
 * At a terminal, and if the Makefile found libedit (LLMC_LIBEDIT), a line can be edited. The arrows bring back earlier lines of
 * this run, which are written nowhere, and Ctrl-R searches them. Ctrl-C clears the line. Text that the terminal pastes in
 * brackets stays one line with newlines in it. Without libedit there is only the terminal's own editing. It cuts lines at 4,095
 * bytes, so a line of that length is refused.
 *
 * Ctrl-C ends the read at an empty line, and without libedit at any line. The terminal is in its usual state between reads.
 *
 * Elsewhere: tokens of messages (text/chat.h), the text of an answer (generate.h).
 */
#ifndef LLMC_RUN_CHAT_H
#define LLMC_RUN_CHAT_H

#include "llmc/base/utils.h"           // defines: warn, xreserve
#include "llmc/run/loop/generate.h"    // defines: Generator, generate_from, generator_prefix, generator_stops
#include "llmc/run/loop/sampler.h"     // defines: sampler_forget, sampler_see
#include "llmc/run/session/signals.h"  // defines: run_catch_interrupt, run_signal_came, run_stop_requested, run_stop_done
#include "llmc/text/chat.h"            // defines: ChatForm, ChatWriter, chat_ask
#include "llmc/base/text.h"            // defines: text_starts, print_escaped

#include <pthread.h>
#include <sys/select.h>

#ifdef LLMC_LIBEDIT
#include <locale.h>
#define Tokenizer LibeditTokenizer  // a type of histedit.h that has the name of ours
#include <histedit.h>
#undef Tokenizer
#define LINE_WHY_PLAIN ""
#else
#define LINE_WHY_PLAIN ": this program was built without libedit"
#endif

// ---------------------------------------------------------------------------------------------------------------------
// lines

typedef struct {
    FILE *file, *out;
    bool terminal;       // both are a terminal: prompts are shown and Ctrl-C is caught
    bool interrupted;    // Ctrl-C ended the last read
    const char* prompt;  // prompt of the current read
    char* line;          // the last line, without its end
    size_t cap;
    bool edited;  // lines can be edited
#ifdef LLMC_LIBEDIT
    EditLine* edit;
    History* history;
#endif
} LineInput;

enum { TERMINAL_LINE = 4095 };  // most bytes of a line that Linux's terminals pass on by themselves

/* Waits at a terminal for a line, or for Ctrl-C, also where it came just before the wait. Returns whether it was Ctrl-C. */
static inline bool line_interrupts(const LineInput* in) {
    fd_set keys;
    sigset_t interrupt, before;
    sigemptyset(&interrupt);
    sigaddset(&interrupt, SIGINT);
    pthread_sigmask(SIG_BLOCK, &interrupt, &before);
    do {  // pselect() lets it in again: it cannot come between the look and the wait
        FD_ZERO(&keys);
        FD_SET(fileno(in->file), &keys);
    } while (!run_signal_came() && pselect(fileno(in->file) + 1, &keys, NULL, NULL, NULL, &before) < 0 && errno == EINTR);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    const bool came = run_signal_came();
    if (came) { run_stop_done(); }
    return came;
}

/* Reads a line without editing. */
static inline char* line_read_plain(LineInput* in) {
    in->interrupted = false;
    if (in->terminal) {
        fputs(in->prompt, in->out);
        fflush(in->out);
        in->interrupted = line_interrupts(in);
        if (in->interrupted) { return NULL; }
    }
    const ssize_t length = getline(&in->line, &in->cap, in->file);
    if (in->terminal) { clearerr(in->file); }
    if (length < 0) { return NULL; }
    in->line[strcspn(in->line, "\r\n")] = 0;
    if (in->terminal && length > TERMINAL_LINE) {
        warn("the terminal cuts lines at %d bytes: this one is left out, wanted shorter lines between \"\"\" and \"\"\"",
             TERMINAL_LINE);
        in->line[0] = 0;
    }
    return in->line;
}

#ifdef LLMC_LIBEDIT

#define PASTE_ON "\033[?2004h"  // asks the terminal to enclose pasted text in ESC[200~ and ESC[201~
#define PASTE_OFF "\033[?2004l"

static inline LineInput* line_of(EditLine* edit) {
    void* in = NULL;
    el_get(edit, EL_CLIENTDATA, &in);
    return (LineInput*)in;
}

static inline char* line_prompt(EditLine* edit) { return (char*)line_of(edit)->prompt; }

/* Ctrl-C: clears the line, or ends the read if there is nothing to clear. */
static inline unsigned char line_on_interrupt(EditLine* edit, int key) {
    const LineInfoW* line = el_wline(edit);
    const int length = (int)(line->lastchar - line->buffer);
    (void)key;
    if (length == 0) {
        line_of(edit)->interrupted = true;
        return CC_EOF;
    }
    el_cursor(edit, (int)(line->lastchar - line->cursor));
    el_deletestr(edit, length);
    return CC_REFRESH;
}

/* Ctrl-Z: stops the program, as the terminal does while it turns keys into signals. */
static inline unsigned char line_on_suspend(EditLine* edit, int key) {
    (void)edit, (void)key;
    raise(SIGTSTP);
    return CC_REFRESH;
}

/* ESC[200~: takes what is pasted, up to ESC[201~, into the line. Control characters other than newline and tab are dropped. */
static inline unsigned char line_on_paste(EditLine* edit, int key) {
    static const wchar_t end[] = L"\033[201~";
    enum { END = sizeof end / sizeof *end - 1 };
    wchar_t *text = NULL, c = 0;
    size_t n = 0, kept = 0, cap = 0;
    (void)key;
    while (el_wgetc(edit, &c) == 1) {
        text = (wchar_t*)xreserve(text, n, 2, &cap, sizeof *text);  // with the NUL
        text[n++] = c;
        if (n < END || memcmp(text + n - END, end, END * sizeof *end) != 0) { continue; }
        n -= END;
        break;
    }
    for (size_t i = 0; i < n; i++) {
        c = text[i] == L'\r' ? L'\n' : text[i];
        if (c == L'\n' || c == L'\t' || (c >= 0x20 && (c < 0x7F || c > 0x9F))) { text[kept++] = c; }
    }
    if (kept > 0) {
        text[kept] = 0;
        el_winsertstr(edit, text);
    }
    free(text);
    return CC_REFRESH;
}

/* Sets up editing, unless the terminal cannot move its cursor. */
static inline void line_edit_open(LineInput* in) {
    HistEvent event;
    const char* kind = getenv("TERM");
    if (!in->terminal || !kind || !*kind || strcmp(kind, "dumb") == 0) { return; }
    setlocale(LC_CTYPE, "");
    if (MB_CUR_MAX == 1) { setlocale(LC_CTYPE, OS_UTF8_LOCALE); }  // terminals speak UTF-8, also where LC_ALL=C
    in->history = history_init();
    in->edit = el_init("llama3", in->file, in->out, stderr);
    in->edited = in->history && in->edit;
    if (!in->edited) { return; }
    history(in->history, &event, H_SETSIZE, 1000);
    history(in->history, &event, H_SETUNIQUE, 1);
    el_set(in->edit, EL_CLIENTDATA, in);
    el_set(in->edit, EL_EDITOR, "emacs");
    el_set(in->edit, EL_PROMPT, line_prompt);
    el_set(in->edit, EL_HIST, history, in->history);
    el_set(in->edit, EL_SIGNAL, 1);                   // restores the terminal before a signal ends the program
    el_set(in->edit, EL_SETTY, "-d", "-isig", NULL);  // while a line is edited, Ctrl-C and Ctrl-Z are keys
    el_set(in->edit, EL_ADDFN, "line-interrupt", "clear the line", line_on_interrupt);
    el_set(in->edit, EL_ADDFN, "line-suspend", "stop the program", line_on_suspend);
    el_set(in->edit, EL_ADDFN, "line-paste", "take pasted text", line_on_paste);
    el_set(in->edit, EL_BIND, "^C", "line-interrupt", NULL);
    el_set(in->edit, EL_BIND, "^Z", "line-suspend", NULL);
    el_set(in->edit, EL_BIND, "^R", "em-inc-search-prev", NULL);
    el_set(in->edit, EL_BIND, "\\e[200~", "line-paste", NULL);
}

/* Reads a line with editing. */
static inline char* line_read_edited(LineInput* in) {
    int length = 0;
    HistEvent event;
    in->interrupted = false;
    fputs(PASTE_ON, in->out);
    fflush(in->out);
    const char* got = el_gets(in->edit, &length);
    fputs(PASTE_OFF, in->out);
    fflush(in->out);
    if (!got || length <= 0) { return NULL; }
    in->line = (char*)xreserve(in->line, 0, (size_t)length + 1, &in->cap, 1);
    memcpy(in->line, got, (size_t)length);
    in->line[length - (got[length - 1] == '\n')] = 0;
    in->line[length] = 0;
    if (in->line[strspn(in->line, " \t\n")]) { history(in->history, &event, H_ENTER, in->line); }
    return in->line;
}

#endif

/* Prepares to read lines from `file`, with prompts on `out` if both are a terminal. */
static inline void line_open(LineInput* in, FILE* file, FILE* out) {
    memset(in, 0, sizeof *in);
    in->file = file;
    in->out = out;
    in->terminal = isatty(fileno(file)) && isatty(fileno(out));
    if (in->terminal) { run_catch_interrupt(); }
#ifdef LLMC_LIBEDIT
    line_edit_open(in);
#endif
}

static inline void line_close(LineInput* in) {
#ifdef LLMC_LIBEDIT
    if (in->edit) { el_end(in->edit); }
    if (in->history) { history_end(in->history); }
#endif
    free(in->line);
    memset(in, 0, sizeof *in);
}

/* Reads the next line, without its end; it is valid until the next call. NULL: the input has ended, or Ctrl-C ended the
 * read. */
static inline char* line_read(LineInput* in, const char* prompt) {
    in->prompt = prompt;
#ifdef LLMC_LIBEDIT
    if (in->edited) { return line_read_edited(in); }
#endif
    return line_read_plain(in);
}

// ---------------------------------------------------------------------------------------------------------------------
// answers

typedef struct {
    Generator* g;
    ChatWriter* writer;
    const char* system;  // message at the start; NULL: none
    int max_tokens;      // of an answer
    ChatMessages talk;   // so far
} Conversation;

static inline void conversation_add(Conversation* c, const char* role, const char* text) {
    chat_messages_add(&c->talk, NULL, role, xstrdup(text), strlen(text), false);
}

/* Forgets the messages; the system message stays. */
static inline void conversation_forget(Conversation* c) {
    chat_messages_free(&c->talk);
    if (c->system && *c->system) { conversation_add(c, "system", c->system); }
}

/* Takes the last message back. */
static inline void conversation_take_back(Conversation* c) { free(c->talk.items[--c->talk.count].text); }

/* Answers one message. Forgets a conversation that fills the context, and skips a message that alone does not fit; warns of
 * both. Ctrl-C ends the answer; before its first token it takes the message back. */
static inline bool conversation_answer(Conversation* c, const char* message, Error* e) {
    Generator* g = c->g;
    const TokenList* tokens = &c->writer->encoder->out;
    const uint64_t draws = g->draws;
    const bool goes_on = c->talk.count > 0 && chat_is_answer(&c->talk.items[c->talk.count - 1]);
    int last = -1;
    conversation_add(c, "user", message);
    if (!chat_ask(c->writer, &c->talk, e)) { return false; }
    if (goes_on && tokens->count + 1 > (size_t)g->context) {
        warn("the conversation fills the context of %d tokens: it is forgotten and begins anew", g->context);
        conversation_forget(c);
        conversation_add(c, "user", message);
        if (!chat_ask(c->writer, &c->talk, e)) { return false; }
    }
    if (tokens->count + 1 > (size_t)g->context) {
        warn("the message has %zu tokens, but the context holds %d: it is left out", tokens->count, g->context);
        conversation_take_back(c);
        return true;
    }
    g->text_len = 0;
    int pos = generator_prefix(g, tokens);
    const int count = (int)tokens->count - pos;
    sampler_forget(g->sampler);
    sampler_see(g->sampler, tokens->ids, pos);
    if (!generate_from(g, tokens->ids + pos, count, NULL, &pos, c->max_tokens, &last, e)) { return false; }
    fputc('\n', g->out);
    fflush(g->out);
    if (g->draws > draws) {
        chat_messages_add(&c->talk, NULL, "assistant", xcopy_text(g->text, g->text_len), g->text_len, false);
    } else {
        conversation_take_back(c);
    }
    if (run_stop_requested()) {
        run_stop_done();
    } else if (pos == g->context && !generator_stops(g, last)) {
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
    return n > 1 && strchr(" \t\n", line[n]);  // or the line's end
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

/* Prints where the chat's template stands, without what a terminal would obey. `edited`: lines can be edited. */
static inline void chat_greet(FILE* out, const ChatForm* form, bool edited) {
    const char* path = form->rules->chat_template ? form->rules->template_path : "Llama 3";
    fputs("chat by the template of ", out);
    print_escaped(out, path, strlen(path));
    if (form->date) {
        fputs(", dated ", out);
        print_escaped(out, form->date, strlen(form->date));
    }
    fputs("; /help lists the commands\n", out);
    if (!edited) { fputs("lines cannot be edited here, and Ctrl-C ends the chat at any line" LINE_WHY_PLAIN "\n", out); }
}

/* Obeys a command; false: the chat ends. */
static inline bool chat_command(Conversation* c, char* line) {
    for (size_t n = strlen(line); n > 0 && strchr(" \t", line[n - 1]); n--) { line[n - 1] = 0; }
    if (strcmp(line, "/quit") == 0) { return false; }
    if (strcmp(line, "/clear") == 0) {
        conversation_forget(c);
    } else if (strcmp(line, "/help") == 0) {
        chat_help(c->g->out);
    } else {
        warn("%.100s is no command, wanted /help, /clear or /quit", line);
    }
    return true;
}

/* Reads messages from `file` and writes the answers, of at most max_tokens tokens, to g->out, until /quit or the end of the
 * input. `system`: the message at the start, or NULL. */
static inline bool chat(Generator* g, ChatWriter* writer, const char* system, int max_tokens, FILE* file, Error* e) {
    Conversation c = {g, writer, system, max_tokens, {NULL, 0, 0, NULL}};
    LineInput in;
    conversation_forget(&c);
    g->end_of_turn = writer->form->end_of_turn;
    line_open(&in, file, g->out);
    if (in.terminal) { chat_greet(g->out, writer->form, in.edited); }
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
    chat_messages_free(&c.talk);
    return e->msg[0] == 0;
}

#endif
