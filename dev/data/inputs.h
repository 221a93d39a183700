/* inputs.h -- opens the inputs of ./tokenize: files and streams.
 *
 * It decompresses and decodes nothing. An input that is not UTF-8 text is refused by name (filekind.h), with the command that
 * converts it.
 */
#ifndef DATA_INPUTS_H
#define DATA_INPUTS_H

#include "dev/data/encode_units.h"
#include "dev/data/tokenize_flags.h"
#include "llmc/base/text.h"       // defines: text_starts
#include "llmc/base/utils.h"      // defines: fail, warn, open_to_read
#include "llmc/files/filekind.h"  // defines: text_kind_of
#include "llmc/files/json.h"      // defines: Json, json_parse_line, json_free

typedef struct {
    const char *path, *name;  // as given; for messages
    FILE* f;
    uint64_t size;  // 0 if `endless`
    bool endless;   // a pipe, a socket or a terminal
    bool lines;     // a document a line
} Input;

/* Opens a file, or the stream that -, /dev/stdin or /dev/fd/N names. */
static inline bool input_open(Input* in, const Args* a, const char* path, Error* e) {
    const int given = descriptor_of(path);
    struct stat st;
    memset(in, 0, sizeof *in);
    in->path = path;
    in->name = given == 0 ? "stdin" : path;
    in->lines = holds_lines(a, path);
    if (given < 0) {
        const int fd = open_to_read(path, "a regular file, or - for stdin", &in->size, e);
        in->f = fd >= 0 ? fdopen(fd, "rb") : NULL;
        return in->f != NULL || fail(e, "%s: cannot open: %s", path, strerror(errno));
    }
    const int fd = fcntl(given, F_DUPFD_CLOEXEC, 0);
    in->f = fd >= 0 && fstat(fd, &st) == 0 ? fdopen(fd, "rb") : NULL;
    if (!in->f) { return fail(e, "%s: cannot read: %s", in->name, strerror(errno)); }
    in->endless = !S_ISREG(st.st_mode);
    in->size = in->endless ? 0 : (uint64_t)st.st_size;
    return true;
}

/* Returns the length of the byte order mark at the start of an input; it does not belong to the text. */
static inline size_t mark_length(const Args* a, const char* head, size_t n) {
    return !a->bytes && n >= 3 && memcmp(head, "\xEF\xBB\xBF", 3) == 0 ? 3 : 0;
}

static inline bool is_blank(const char* s, size_t n) {
    size_t i = 0;
    while (i < n && s[i] && strchr(" \t\r\n\f\v", s[i])) { i++; }
    return i == n;
}

/* Returns whether a text begins with a list of messages, which may be a line of --chat. */
static inline bool begins_with_messages(const char* head, size_t n) {
    static const char* const members[] = {"\"role\"", "\"from\"", "\"content\"", "\"value\""};
    size_t i = 0;
    bool begins = false;
    while (i < n && head[i] && strchr(" \t\r\n[{", head[i])) { i++; }
    for (int k = 0; k < 4; k++) { begins |= n - i > strlen(members[k]) && text_starts(head + i, members[k]); }
    return begins;
}

/* Checks that the first bytes of an input are text. */
static inline bool input_check_start(const Input* in, const Args* a, const char* head, size_t n, Error* e) {
    char command[2 * PATH_CAP];
    const FileKind object = {"a JSON object over several lines", "jq -c .", false, true};
    size_t blank = 1;
    while (blank < n && (head[blank] == ' ' || head[blank] == '\r')) { blank++; }
    const bool spread = in->lines && blank < n && head[0] == '{' && head[blank] == '\n';
    const FileKind kind = spread ? object : text_kind_of(head, n);
    if (n == mark_length(a, head, n)) { return fail(e, "%s: holds no text: it is empty", in->name); }
    if (kind.is_text || a->bytes || (a->chat && begins_with_messages(head, n))) { return true; }
    if (!kind.to_text) { return fail(e, "%s: is %s, wanted UTF-8 text", in->name, kind.what); }
    reading_command(command, sizeof command, a, kind.to_lines || in->lines || strstr(in->path, ".json"));
    const char* column = a->chat && strstr(kind.to_text, "hf.py") ? " --column messages" : "";
    return fail(e, "%s: is %s, wanted UTF-8 text\n  hint: %s %s%s | %s", in->name, kind.what, kind.to_text,
                descriptor_of(in->path) < 0 ? in->path : "FILE", column, command);
}

/* Warns of lines of JSON or rows of csv that are read as one text: without --field, a stream is plain text, and so is any file
 * but .jsonl and .ndjson. */
static inline void input_warn_of_rows(const Input* in, const Args* a, const char* text, size_t n) {
    const char* newline = (const char*)memchr(text, '\n', n);
    Json j;
    Error no_json = NO_ERROR;
    if (fnmatch("*.[ct]sv", in->path, FNM_CASEFOLD) == 0) {
        warn("%s: is taken as one text: python3 dev/data/hf.py --rows prints a column of it as lines of JSON", in->name);
    }
    if (in->lines || a->bytes || !newline || *text != '{') { return; }
    if (!json_parse_line(&j, text, (size_t)(newline - text), in->name, &no_json)) { return; }
    json_free(&j);
    warn("%s: begins with a line of JSON, and is taken as text: %s, if each line is a document", in->name,
         descriptor_of(in->path) >= 0 ? "give --field NAME" : "give it a name that ends with .jsonl");
}

/* Fails at a byte that is not UTF-8, if the n bytes at s, which begin at `offset` of the input, have one. */
static inline bool input_check_utf8(const Input* in, const char* s, size_t n, uint64_t offset, Error* e) {
    const size_t at = first_no_character(s, n);
    return at == n || fail(e, "%s: byte 0x%02x at offset %llu is no UTF-8, wanted UTF-8 text alone", in->name, (uint8_t)s[at],
                           (unsigned long long)(offset + at));
}

/* Checks that at most one byte in a hundred, of the bytes read so far, lies outside of UTF-8 characters. */
static inline bool input_check_characters(const Input* in, const Args* a, uint64_t no_characters, uint64_t bytes, Error* e) {
    char command[2 * PATH_CAP];
    if (a->bytes || no_characters * 100 <= bytes) { return true; }
    return fail(e,
                "%s: %.1f %% of its bytes are no UTF-8, wanted at most 1 %%\n"
                "  hint: iconv -f LATIN1 -t UTF-8 %s | %s, if it is Latin-1; --bytes takes them as they are",
                in->name, 100.0 * (double)no_characters / (double)bytes, descriptor_of(in->path) < 0 ? in->path : "FILE",
                reading_command(command, sizeof command, a, false));
}

#endif
