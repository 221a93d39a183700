/* buffer.h -- bytes that wait for their reader, and how ./serve writes text into them. */
#ifndef SERVE_BUFFER_H
#define SERVE_BUFFER_H

#include "llmc/base/utils.h"  // first, since it asks for the functions beyond C11

#include "llmc/files/json.h"  // defines: json_write_text

/* text[at .. size) waits. All zeros: nothing was written. */
typedef struct {
    char* text;
    size_t at, size;
} Buffer;

static inline size_t buffer_waits(const Buffer* b) { return b->size - b->at; }

static inline void buffer_add(Buffer* b, const char* text, size_t n) {
    if (b->at > 0) { memmove(b->text, b->text + b->at, b->size -= b->at); }
    b->at = 0;
    b->text = (char*)xrealloc(b->text, b->size + n + 1);
    memcpy(b->text + b->size, text, n);
    b->text[b->size += n] = 0;
}

static inline void buffer_text(Buffer* b, const char* text) { buffer_add(b, text, strlen(text)); }

static inline void buffer_error(Buffer* b, const char* why) {
    char* text = NULL;
    size_t size = 0;
    FILE* f = xopen_memory(&text, &size);
    fputs("{\"error\": ", f);
    json_write_text(f, why);
    fputs("}\n", f);
    xclose_memory(f, &text);
    buffer_add(b, text, size);
    free(text);
}

#endif
