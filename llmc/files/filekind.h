/* filekind.h -- what a file that is not what it should be looks like, so that an error can say so.
 */
#ifndef LLMC_FILEKIND_H
#define LLMC_FILEKIND_H

#include "llmc/base/utils.h"

/* What a file that is not what it should be looks like, from its first n bytes; NULL where nothing is recognised. */
static inline const char* file_looks_like(const char* head, size_t n) {
    // clang-format off
    static const struct { const char *start, *what; } kinds[] = {
        {"GGUF", "a GGUF file"},
        {"PK\003\004", "a zip archive (PyTorch's .bin and .pth are such)"},
        {"\200\002", "a Python pickle"},
        {"\200\004", "a Python pickle"},
        {"version https://git-lfs", "a Git LFS pointer (git lfs pull fetches the file itself)"},
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
    // a safetensors header: its length in 8 bytes, the upper four 0 and followed by an object; asked first, for the lower
    // bytes of a length may be the first ones of any other kind
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
