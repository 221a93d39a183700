/* filekind.h -- what a file that is not what it should be looks like, so that an error can say so.
 */
#ifndef LLMC_FILEKIND_H
#define LLMC_FILEKIND_H

#include "llmc/base/utils.h"

/* What a file that is not what it should be looks like, from its first n bytes; NULL where nothing is recognised. */
static inline const char* file_looks_like(const char* head, size_t n) {
    // clang-format off
    static const struct { const char* start; unsigned char length; const char* what; } kinds[] = {
        {"GGUF", 4, "a GGUF file"},
        {"PK\003\004", 4, "a zip archive (PyTorch's .bin and .pth are such)"},
        {"\200\002", 2, "a Python pickle"},
        {"\200\004", 2, "a Python pickle"},
        {"version https://git-lfs", 23, "a Git LFS pointer (git lfs pull fetches the file itself)"},
        {"<!DOCTYPE", 9, "an HTML page"},
        {"<!doctype", 9, "an HTML page"},
        {"<html", 5, "an HTML page"},
        {"\037\213", 2, "a gzip archive"},
        {"\211HDF", 4, "an HDF5 file"},
        {"\010\145\064\001", 4, "a token file (uint16)"},
        {"\301\146\064\001", 4, "a token file (uint32)"},
        {"IQ== ", 5, "a tiktoken vocabulary"},
    };
    // clang-format on
    if (n == 0) { return "an empty file"; }
    // a safetensors header: its length in 8 bytes, the upper four 0 and followed by an object; asked first, for the lower
    // bytes of a length may be the first ones of any other kind
    if (n >= 9 && memcmp(head + 4, "\0\0\0\0{", 5) == 0) { return "a safetensors file"; }
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (n >= kinds[i].length && memcmp(head, kinds[i].start, kinds[i].length) == 0) { return kinds[i].what; }
    }
    size_t i = 0;
    while (i < n && (head[i] == ' ' || head[i] == '\n' || head[i] == '\r' || head[i] == '\t')) { i++; }
    if (i < n && head[i] == '{') { return "JSON text"; }
    return NULL;
}

#endif
