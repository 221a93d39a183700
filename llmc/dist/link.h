/* link.h -- messages of one size over TCP, for the ranks of a run (team.h).
 *
 * A message has 256 bytes; integers are little-endian:
 *
 *     at   bytes
 *      0       8  token     of this connection and direction, from the run's key (team.h); 0 before both ends have it
 *      8       4  kind      1 and up; team_state.h lists them
 *     12       4  rank      of the sender
 *     16       8  sequence  how many collectives the sender has entered
 *     24       8  place     what the sender is at: step << 8 | phase
 *     32       4  size      bytes used of the payload; the rest are zero
 *     36       4  rest      bytes of the same text or table that the next messages of this kind will bring
 *     40     216  payload
 *
 * A link neither waits nor fails when it sends: it keeps what the system does not take at once, and sends it later. A reader
 * finds out that the other end is gone, after it has read everything that the other end sent.
 */
#ifndef LLMC_LINK_H
#define LLMC_LINK_H

#include "llmc/base/os.h"  // first, since it asks for the functions beyond C11; defines: os_own, os_wait

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

enum { MESSAGE_BYTES = 256, MESSAGE_PAYLOAD = 216 };

typedef struct {
    uint64_t token;
    uint32_t kind, rank;
    uint64_t sequence, place;
    uint32_t size, rest;
    unsigned char payload[MESSAGE_PAYLOAD];
} Message;

typedef struct {
    int fd;              // -1: none
    double heard;        // time of the last message or, before the first one, of the connection; now_seconds()
    unsigned char* out;  // (out_size) bytes to send; the first `sent` of them are gone
    size_t sent, out_size, out_cap;
    Message in;  // the message that is being read, in_size bytes of it
    size_t in_size;
} Link;

typedef enum { LINK_WAITS, LINK_MESSAGE, LINK_CLOSED } LinkState;

/* Takes a connected socket that does not block. */
static inline void link_begin(Link* l, int fd) {
    const int on = 1;
    memset(l, 0, sizeof *l);
    l->fd = fd;
    l->heard = now_seconds();
    if (fd >= 0) { setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on); }
}

/* Closes the connection; what was not sent is dropped. May be called twice. */
static inline void link_close(Link* l) {
    if (l->fd >= 0) { close(l->fd); }
    free(l->out);
    memset(l, 0, sizeof *l);
    l->fd = -1;
}

static inline bool link_is_sending(const Link* l) { return l->sent < l->out_size; }

/* Sends what the system takes now. */
static inline void link_flush(Link* l) {
    while (link_is_sending(l)) {
        const ssize_t n = send(l->fd, l->out + l->sent, l->out_size - l->sent, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) { continue; }
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) { return; }
        if (n < 0) { break; }  // nobody will read it; link_receive() reports that
        l->sent += (size_t)n;
    }
    l->sent = l->out_size = 0;
}

static inline void link_send(Link* l, const Message* m) {
    if (l->fd < 0) { return; }
    l->out = (unsigned char*)xreserve(l->out, l->out_size, MESSAGE_BYTES, &l->out_cap, 1);
    memcpy(l->out + l->out_size, m, MESSAGE_BYTES);
    l->out_size += MESSAGE_BYTES;
    link_flush(l);
}

/* Reads what has come, at most up to the end of a message, which then is l->in. */
static inline LinkState link_receive(Link* l) {
    if (l->in_size == MESSAGE_BYTES) { l->in_size = 0; }
    while (l->in_size < MESSAGE_BYTES) {
        const ssize_t n = recv(l->fd, (char*)&l->in + l->in_size, MESSAGE_BYTES - l->in_size, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) { continue; }
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) { return LINK_WAITS; }
        if (n <= 0) { return LINK_CLOSED; }
        l->in_size += (size_t)n;
    }
    return LINK_MESSAGE;
}

// ---------------------------------------------------------------------------------------------------------------------
// making a connection

static inline struct addrinfo* link_resolve(const char* address, int port, Error* e) {
    struct addrinfo wanted, *found = NULL;
    char service[16];
    memset(&wanted, 0, sizeof wanted);
    wanted.ai_family = AF_UNSPEC;
    wanted.ai_socktype = SOCK_STREAM;
    snprintf(service, sizeof service, "%d", port);
    const int rc = getaddrinfo(address, service, &wanted, &found);
    if (rc == 0) { return found; }
    fail(e, "%s: no host of this name is known: %s", address, rc == EAI_SYSTEM ? strerror(errno) : gai_strerror(rc));
    return NULL;
}

static inline int link_socket(const struct addrinfo* a) {
    return os_own(socket(a->ai_family, a->ai_socktype, a->ai_protocol), false);
}

/* Listens on the first of these addresses that belongs to this host, and writes it to `numeric` in digits. Returns the
 * socket, or -1 with the cause in errno. */
static inline int link_listen_one(const struct addrinfo* a, char* numeric, size_t cap) {
    const int on = 1;
    int cause = 0;
    for (; a; a = a->ai_next) {
        const int fd = link_socket(a);
        if (fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
            bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, 1024) == 0) {
            getnameinfo(a->ai_addr, a->ai_addrlen, numeric, (socklen_t)cap, NULL, 0, NI_NUMERICHOST);
            return fd;
        }
        if (cause == 0 || errno == EADDRINUSE) { cause = errno; }
        if (fd >= 0) { close(fd); }
    }
    errno = cause;
    return -1;
}

/* Listens on this address alone. Returns the socket, or -1 on an error. */
static inline int link_listen(const char* address, int port, char* numeric, size_t cap, Error* e) {
    struct addrinfo* all = link_resolve(address, port, e);
    if (!all) { return -1; }
    const int fd = link_listen_one(all, numeric, cap), cause = errno;
    freeaddrinfo(all);
    if (fd < 0 && cause == EADDRINUSE) {
        fail(e, "port %d of %s is taken by another program\n  hint: choose another one with --port", port, address);
    } else if (fd < 0 && cause == EADDRNOTAVAIL) {
        fail(e, "%s: is not an address of this host, wanted that of the host where rank 0 runs", address);
    } else if (fd < 0) {
        fail(e, "cannot listen on port %d of %s: %s", port, address, strerror(cause));
    }
    return fd;
}

/* Waits for the end of connect(). Returns false with the cause in errno. */
static inline bool link_connected(int fd, double seconds) {
    int cause = ETIMEDOUT;
    socklen_t size = sizeof cause;
    if (os_wait(fd, POLLOUT, seconds)) { getsockopt(fd, SOL_SOCKET, SO_ERROR, &cause, &size); }
    errno = cause;
    return cause == 0;
}

/* Tries each address of a host once, for at most `seconds`. Returns a connected socket, or -1 on an error, whose text is
 * just the system's words for the cause. */
static inline int link_connect(const char* address, int port, double seconds, Error* e) {
    struct addrinfo* all = link_resolve(address, port, e);
    int cause = 0;
    for (const struct addrinfo* a = all; a; a = a->ai_next) {
        const int fd = link_socket(a);
        if (fd >= 0 && (connect(fd, a->ai_addr, a->ai_addrlen) == 0 ||
                        ((errno == EINPROGRESS || errno == EINTR) && link_connected(fd, seconds)))) {
            freeaddrinfo(all);
            return fd;
        }
        cause = errno;
        if (fd >= 0) { close(fd); }
    }
    if (all) {
        freeaddrinfo(all);
        fail(e, "%s", strerror(cause));
    }
    return -1;
}

#endif
