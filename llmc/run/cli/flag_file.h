/* flag_file.h -- flags in a file, for @FILE on the command line: one flag a line, followed by its value. Checkpoints hold their
 * run's flags as run.flags.
 *
 *   # a comment; empty lines are skipped, too
 *   --model d6
 *   --train data/web_*.bin
 *   --prompt "two\nlines"
 *
 * A value is the rest of the line as it is: the shell's quotes, '#' and blanks inside belong to it. Only a value that both
 * begins and ends with '"' is a quoted one: \n is a newline there, and \ before another character means that character. A byte
 * order mark at the start does not count.
 */
#ifndef LLMC_FLAG_FILE_H
#define LLMC_FLAG_FILE_H

#include "llmc/base/text.h"  // defines: text_mark
#include "llmc/base/utils.h"

#include <ctype.h>

typedef struct {
    const char* path;
    char* text;     // text of the whole file, into which the arguments point; the caller frees it
    char* next;     // the next line
    int line;       // number of the last line that was read
    char raw[100];  // the start of that line
} FlagFile;

static inline bool flag_file_open(FlagFile* f, const char* path, Error* e) {
    size_t size = 0;
    memset(f, 0, sizeof *f);
    f->path = path;
    f->text = f->next = read_file(path, &size, (uint64_t)1 << 20, e);
    if (!f->text) { return false; }
    if (strlen(f->text) == size) {
        f->next += text_mark(f->text);
        return true;
    }
    free(f->text);
    f->text = NULL;
    return fail(e, "%s: holds a byte 0, wanted a text with a flag a line", path);
}

/* Takes the quotes off a value in place. */
static inline void flag_unquote(char* value) {
    char* out = value;
    const char* end = value + strlen(value) - 1;
    for (const char* p = value + 1; p < end; p++) {
        const bool escape = *p == '\\' && p + 1 < end;
        if (escape) { p++; }
        *out++ = escape && *p == 'n' ? '\n' : *p;
    }
    *out = 0;
}

/* Turns a line such as "--lr 3e-4" into the argument "--lr=3e-4", in place. */
static inline void flag_join(char* line) {
    const size_t name = strcspn(line, " \t=");
    if (!line[name]) { return; }
    char* value = line + name + 1;
    if (line[name] != '=') { value += strspn(value, " \t"); }
    const size_t length = strlen(value);
    if (length >= 2 && value[0] == '"' && value[length - 1] == '"') { flag_unquote(value); }
    line[name] = '=';
    memmove(line + name + 1, value, strlen(value) + 1);
}

/* Returns whether a word of a value looks like a flag: the line holds several. */
static inline bool flag_holds_flag(const char* value) {
    for (const char* p = value; *p; p++) {
        const bool starts = p == value || p[-1] == ' ';
        if (starts && p[0] == '-' && (p[1] == '-' || isalpha((unsigned char)p[1]))) { return true; }
    }
    return false;
}

/* Returns the next flag as one argument, "--name" or "--name=value"; NULL at the end. */
static inline char* flag_file_next(FlagFile* f) {
    while (*f->next) {
        char* line = f->next + strspn(f->next, " \t");
        char* end = line + strcspn(line, "\n");
        f->next = end + (*end == '\n');
        f->line++;
        while (end > line && strchr(" \t\r\n", end[-1])) { end--; }
        *end = 0;
        if (*line == 0 || *line == '#') { continue; }
        snprintf(f->raw, sizeof f->raw, "%s", line);
        flag_join(line);
        return line;
    }
    return NULL;
}

/* Writes a flag and its value as a line that flag_file_next() reads back. */
static inline void flag_write(FILE* f, const char* flag, const char* value) {
    const size_t n = strlen(value);
    const bool plain = n > 0 && !strchr(value, '\n') && !strchr(" \t\"", value[0]) && !strchr(" \t\r", value[n - 1]);
    fprintf(f, "%s %s", flag, plain ? value : "\"");
    for (const char* p = plain ? "" : value; *p; p++) {
        if (strchr("\"\\\n", *p)) { fputc('\\', f); }
        fputc(*p == '\n' ? 'n' : *p, f);
    }
    fputs(plain ? "\n" : "\"\n", f);
}

#endif
