/* line_input.h -- reads lines that a person types, or lines of a file or pipe.
 *
 * At a terminal, and if the Makefile found libedit (LLMC_LIBEDIT), a line can be edited. The arrows bring back earlier lines of
 * this run, which are written nowhere, and Ctrl-R searches them. Ctrl-C clears the line. Text that the terminal pastes in
 * brackets stays one line with newlines in it. Without libedit there is only the terminal's own editing. It cuts lines at 4,095
 * bytes, so a line of that length is refused.
 *
 * Ctrl-C ends the read at an empty line, and without libedit at any line. The terminal is in its usual state between reads.
 */
#ifndef LLMC_LINE_INPUT_H
#define LLMC_LINE_INPUT_H

#include "llmc/base/utils.h"           // defines: warn, xrealloc
#include "llmc/run/session/signals.h"  // defines: run_catch_interrupt, run_signal_came, run_stop_done

#include <poll.h>
#include <pthread.h>

#ifdef LLMC_LIBEDIT
#include <locale.h>
#define Tokenizer LibeditTokenizer  // a type of histedit.h that has the name of ours
#include <histedit.h>
#undef Tokenizer
#endif

typedef struct {
    FILE *file, *out;
    bool terminal;       // both are a terminal: prompts are shown and Ctrl-C is caught
    bool interrupted;    // Ctrl-C ended the last read
    const char* prompt;  // prompt of the current read
    char* line;          // the last line, without its end
    size_t cap;
#ifdef LLMC_LIBEDIT
    EditLine* edit;  // NULL: plain reading
    History* history;
#endif
} LineInput;

#ifdef LLMC_LIBEDIT
#define LINE_WHY_PLAIN ""
#else
#define LINE_WHY_PLAIN ": this program was built without libedit"
#endif

enum { TERMINAL_LINE = 4095 };  // most bytes of a line that Linux's terminals pass on by themselves

/* Waits at a terminal for a line, or for Ctrl-C, also where it came just before the wait. Returns whether it was Ctrl-C. */
static inline bool line_interrupts(const LineInput* in) {
    struct pollfd keys = {.fd = fileno(in->file), .events = POLLIN};
    sigset_t interrupt, before;
    sigemptyset(&interrupt);
    sigaddset(&interrupt, SIGINT);
    pthread_sigmask(SIG_BLOCK, &interrupt, &before);  // ppoll() lets it in again: it cannot come between the look and the wait
    while (!run_signal_came() && ppoll(&keys, 1, NULL, &before) < 0 && errno == EINTR) {}
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
        if (n + 1 >= cap) {
            cap = 2 * cap + 256;
            text = (wchar_t*)xrealloc(text, cap * sizeof *text);
        }
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
    if (MB_CUR_MAX == 1) { setlocale(LC_CTYPE, "C.UTF-8"); }  // terminals speak UTF-8, also where LC_ALL=C
    in->history = history_init();
    in->edit = el_init("llama3", in->file, in->out, stderr);
    if (!in->history || !in->edit) { return; }
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

static inline void line_edit_close(LineInput* in) {
    if (in->edit) { el_end(in->edit); }
    if (in->history) { history_end(in->history); }
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
    if ((size_t)length + 1 > in->cap) { in->line = (char*)xrealloc(in->line, in->cap = (size_t)length + 1); }
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

/* Returns whether lines can be edited. */
static inline bool line_is_edited(const LineInput* in) {
#ifdef LLMC_LIBEDIT
    return in->edit != NULL;
#else
    (void)in;
    return false;
#endif
}

static inline void line_close(LineInput* in) {
#ifdef LLMC_LIBEDIT
    line_edit_close(in);
#endif
    free(in->line);
    memset(in, 0, sizeof *in);
}

/* Reads the next line, without its end; it is valid until the next call. NULL: the input has ended, or Ctrl-C ended the
 * read. */
static inline char* line_read(LineInput* in, const char* prompt) {
    in->prompt = prompt;
#ifdef LLMC_LIBEDIT
    if (in->edit) { return line_read_edited(in); }
#endif
    return line_read_plain(in);
}

#endif
