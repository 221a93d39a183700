/* filekind.h -- recognizes common file types, for the error message about a wrong file.
 */
#ifndef LLMC_FILEKIND_H
#define LLMC_FILEKIND_H

#include "llmc/base/utils.h"

/* Names the kind of file that starts with these n bytes, or returns NULL. */
static inline const char* file_looks_like(const char* head, size_t n) {
    // clang-format off
    static const struct { const char *start, *what; } kinds[] = {
        {"GGUF", "a GGUF file"},
        {"PK\003\004", "a zip archive (as PyTorch's .bin and .pth files are)"},
        {"\200\002", "a Python pickle"},
        {"\200\004", "a Python pickle"},
        {"version https://git-lfs", "a Git LFS pointer (run git lfs pull to get the file itself)"},
        {"<!DOCTYPE", "an HTML page"},
        {"<!doctype", "an HTML page"},
        {"<html", "an HTML page"},
        {"\037\213", "a gzip archive"},
        {"\211HDF", "an HDF5 file"},
        {"\010\145\064\001", "a token file (uint16)"},
        {"\301\146\064\001", "a token file (uint32)"},
        {"IQ== ", "a tiktoken vocabulary"},
    };
    // clang-format on
    if (n == 0) { return "an empty file"; }
    // a safetensors file: 8 bytes of header length, the upper four 0, then an object. Check it first: the lower bytes of
    // the length may equal the first bytes of any other kind
    if (n >= 9 && memcmp(head + 4, "\0\0\0\0{", 5) == 0) { return "a safetensors file"; }
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        const size_t length = strlen(kinds[i].start);
        if (n >= length && memcmp(head, kinds[i].start, length) == 0) { return kinds[i].what; }
    }
    size_t i = 0;
    while (i < n && (head[i] == ' ' || head[i] == '\n' || head[i] == '\r' || head[i] == '\t')) { i++; }
    if (i < n && head[i] == '{') { return "JSON text"; }
    return NULL;
}

#endif
