/* client.h -- a connection of ./serve with its request, and bytes that wait to be sent. A client that waits for something is
 * suspended: libmicrohttpd does not look at it until it is woken.
 */
#ifndef SERVE_CLIENT_H
#define SERVE_CLIENT_H

#include "llmc/base/utils.h"  // first, since it asks for the functions beyond C11

#include "llmc/files/json.h"  // defines: json_write_text

#include <microhttpd.h>
#include <netinet/in.h>

typedef struct Server Server;

/* Bytes that wait for their reader: text[at .. size). */
typedef struct {
    char* text;
    size_t at, size;
} Buffer;

/* A connection and its request. */
typedef struct {
    Server* server;
    struct MHD_Connection* connection;
    struct in_addr address;
    int fd;
    double since;  // when the request began; 0: it is whole
    bool follows;  // it reads /log
    bool asks, suspended, gone;
    Buffer body, out;
    bool done;        // nothing follows `out`
    unsigned status;  // of the answer; 0: not known before its first line
    bool newest;      // it asks the newest checkpoint, not the one of step `step`
    uint64_t step;
    uint64_t event;  // of the log: the next one; 0: it knows none
    double told;     // when it was last sent events or a comment
} Client;

static inline void buffer_add(Buffer* b, const char* text, size_t n) {
    if (b->at > 0) { memmove(b->text, b->text + b->at, b->size -= b->at); }
    b->at = 0;
    b->text = (char*)xrealloc(b->text, b->size + n + 1);
    memcpy(b->text + b->size, text, n);
    b->text[b->size += n] = 0;
}

static inline void buffer_free(Buffer* b) {
    free(b->text);
    memset(b, 0, sizeof *b);
}

static inline void buffer_text(Buffer* b, const char* text) { buffer_add(b, text, strlen(text)); }

/* Adds a text as JSON, between two pieces of JSON. */
static inline void buffer_json(Buffer* b, const char* before, const char* value, const char* after) {
    char* text = NULL;
    size_t size = 0;
    FILE* f = xopen_memory(&text, &size);
    fputs(before, f);
    json_write_text(f, value);
    fputs(after, f);
    xclose_memory(f, &text);
    buffer_add(b, text, size);
    free(text);
}

static inline void buffer_error(Buffer* b, const char* why) { buffer_json(b, "{\"error\": ", why, "}\n"); }

static inline void wake(Client* c) {
    if (c->suspended) { MHD_resume_connection(c->connection); }
    c->suspended = false;
}

static inline void suspend(Client* c) {
    MHD_suspend_connection(c->connection);
    c->suspended = true;
}

#endif
