/* filekind.h -- recognizes kinds of files by their first bytes: for the error about a wrong file, and to keep what is no text
 * out of token files.
 */
#ifndef LLMC_FILEKIND_H
#define LLMC_FILEKIND_H

#include "llmc/base/utils.h"

typedef struct {
    const char* what;     // "a gzip archive"; NULL: unknown
    const char* to_text;  // a command that prints the text of the file named after it; NULL: no text, or text already
    bool is_text;
    bool to_lines;  // the command prints a JSON object a line
} FileKind;

/* Returns the byte order of UTF-16 without a mark: half of a European text's bytes are 0. NULL: the text is not UTF-16. */
static inline const char* utf16_order(const char* head, size_t n) {
    size_t zeros[2] = {0, 0};
    for (size_t i = 0; i < n; i++) { zeros[i & 1] += head[i] == 0; }
    for (int odd = 0; odd < 2 && n >= 4; odd++) {
        if (4 * zeros[odd] > n && zeros[1 - odd] == 0) {
            return odd ? "iconv -f UTF-16LE -t UTF-8" : "iconv -f UTF-16BE -t UTF-8";
        }
    }
    return NULL;
}

/* Names the kind of file that starts with these n bytes; .what is NULL if no kind is known. A few thousand bytes are enough. */
static inline FileKind file_kind_of(const char* head, size_t n) {
    // clang-format off
    static const struct { const char* start; FileKind kind; } kinds[] = {
        {"GGUF", {"a GGUF file", NULL, false, false}},
        {"PK\003\004", {"a zip archive (as PyTorch's .bin and .pth files are)", "unzip -p", false, false}},
        {"\200\002", {"a Python pickle", NULL, false, false}},
        {"\200\004", {"a Python pickle", NULL, false, false}},
        {"version https://git-lfs", {"a Git LFS pointer (run git lfs pull to get the file itself)", NULL, false, false}},
        {"<!DOCTYPE", {"an HTML page", NULL, true, false}},
        {"<!doctype", {"an HTML page", NULL, true, false}},
        {"<html", {"an HTML page", NULL, true, false}},
        {"\037\213", {"a gzip archive", "zcat", false, false}},
        {"\050\265\057\375", {"a zstd archive", "zstdcat", false, false}},
        {"\3757zXZ", {"an xz archive", "xzcat", false, false}},
        {"BZh91AY&SY", {"a bzip2 archive", "bzcat", false, false}},
        {"\004\042\115\030", {"an lz4 archive", "lz4cat", false, false}},
        {"%PDF-", {"a PDF document", "pdftotext - - <", false, false}},
        {"PAR1", {"a Parquet file", "python3 dev/data/hf.py --rows", false, true}},
        {"ARROW1", {"an Arrow file", "python3 dev/data/hf.py --rows", false, true}},
        {"\377\377\377\377", {"an Arrow file", "python3 dev/data/hf.py --rows", false, true}},
        {"\377\376", {"UTF-16 text", "iconv -f UTF-16 -t UTF-8", false, false}},
        {"\376\377\377\377", {NULL, NULL, true, false}},  // no character: a number, such as a hostile length
        {"\376\377", {"UTF-16 text", "iconv -f UTF-16 -t UTF-8", false, false}},
        {"\211HDF", {"an HDF5 file", NULL, false, false}},
        {"\210\330\064\001", {"a token file (uint16)", NULL, false, false}},
        {"\241\331\064\001", {"a token file (uint32)", NULL, false, false}},
        {"IQ== ", {"a tiktoken vocabulary", NULL, true, false}},
    };
    const FileKind empty = {"an empty file", NULL, false, false}, safetensors = {"a safetensors file", NULL, false, false},
                   utf32 = {"UTF-32 text", "iconv -f UTF-32 -t UTF-8", false, false},
                   json = {"JSON text", NULL, true, false}, unknown = {NULL, NULL, true, false};
    // clang-format on
    if (n == 0) { return empty; }
    // a safetensors file: 8 bytes of header length, the upper four 0, then an object. Check it first: the lower bytes of
    // the length may equal the first bytes of any other kind
    if (n >= 9 && memcmp(head + 4, "\0\0\0\0{", 5) == 0) { return safetensors; }
    if (n >= 4 && (memcmp(head, "\377\376\0\0", 4) == 0 || memcmp(head, "\0\0\376\377", 4) == 0)) { return utf32; }
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        const size_t length = strlen(kinds[i].start);
        if (n >= length && memcmp(head, kinds[i].start, length) == 0) { return kinds[i].kind; }
    }
    size_t i = 0;
    while (i < n && (head[i] == ' ' || head[i] == '\n' || head[i] == '\r' || head[i] == '\t')) { i++; }
    return i < n && head[i] == '{' ? json : unknown;
}

/* Names the kind of file that starts with these n bytes, or returns NULL. */
static inline const char* file_looks_like(const char* head, size_t n) { return file_kind_of(head, n).what; }

/* Does the same for a file that will be read as text. It may be UTF-16 without a mark. A JSON array of objects is one value
 * there, not a document a line. */
static inline FileKind text_kind_of(const char* head, size_t n) {
    const FileKind array = {"a JSON array", "jq -c '.[]'", false, true}, found = file_kind_of(head, n);
    const FileKind utf16 = {"UTF-16 text", utf16_order(head, size_min(n, 4096)), false, false};
    if (!found.what && utf16.to_text) { return utf16; }
    size_t i = 0, brackets = 0;
    for (; i < n && strchr(" \n\r\t[", head[i]) && head[i] && brackets < 2; i++) { brackets += head[i] == '['; }
    return i < n && brackets == 1 && head[i] == '{' ? array : found;
}

#endif
