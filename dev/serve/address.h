/* address.h -- where ./serve listens, and the names by which a browser's header Host calls it; the key; and which requests are
 * refused before anything of them is read. */
#ifndef SERVE_ADDRESS_H
#define SERVE_ADDRESS_H

#include "llmc/base/utils.h"  // first, since it asks for the functions beyond C11

#include "llmc/base/text.h"            // defines: text_starts
#include "llmc/files/trainer_state.h"  // defines: run_id_draw

#include <netdb.h>

typedef struct {
    struct sockaddr_storage socket;
    bool is_local;  // only this machine reaches it
    char host[64];  // as in a URL: an IPv6 address in brackets, shortened as browsers do
    int port;
} Address;

/* Reads an address; false: it is none, or it stands for all addresses of a machine and so names none. */
static inline bool address_read(Address* a, const char* host, const char* port) {
    char text[60] = "";
    struct addrinfo want = {.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV, .ai_socktype = SOCK_STREAM}, *found = NULL;
    memset(a, 0, sizeof *a);
    if (getaddrinfo(host, port, &want, &found) != 0) { return false; }
    memcpy(&a->socket, found->ai_addr, found->ai_addrlen);
    getnameinfo(found->ai_addr, found->ai_addrlen, text, sizeof text, NULL, 0, NI_NUMERICHOST);
    freeaddrinfo(found);
    a->is_local = text_starts(text, "127.") || strcmp(text, "::1") == 0;
    snprintf(a->host, sizeof a->host, strchr(text, ':') ? "[%s]" : "%s", text);
    return *text && strcmp(text, "0.0.0.0") != 0 && strcmp(text, "::") != 0;
}

/* Returns whether a header Host names the address. Browsers leave port 80 out. */
static inline bool address_has(const Address* a, const char* host) {
    char given[80], wanted[80];
    const char* last = strrchr(host, ']');  // the end of an IPv6 address
    bool found = false;
    snprintf(given, sizeof given, "%s%s", host, strchr(last ? last : host, ':') ? "" : ":80");
    for (int local = 0; local <= a->is_local; local++) {
        snprintf(wanted, sizeof wanted, "%s:%d", local ? "localhost" : a->host, a->port);
        found |= strcasecmp(given, wanted) == 0;
    }
    return found;
}

enum { LEAST_KEY = 16 };  // characters of the key that a request has to give: as a header can carry them

/* Draws a key of 128 bits. */
static inline char* key_draw(void) {
    RunId first, second;
    char text[2 * sizeof(RunId)];
    run_id_draw(first), run_id_draw(second);
    snprintf(text, sizeof text, "%s%s", first, second);
    return xstrdup(text);
}

/* Reads the key of a file that its owner alone can read, or ends the program. */
static inline char* key_read(const char* file) {
    struct stat st;
    size_t size = 0, n = 0;
    Error e = NO_ERROR;
    char* key = read_file(file, &size, 4096, &e);
    must(key != NULL, &e);
    if (stat(file, &st) != 0 || (st.st_mode & 077) != 0) {
        die("%s: other users can read this key or change it, wanted a file for you alone\n  hint: chmod 600 %s", file, file);
    }
    while (n < size && key[n] >= ' ' && key[n] <= '~') { n++; }
    if (n < LEAST_KEY || (n < size && key[n] != '\r' && key[n] != '\n')) {
        die("%s: wanted a key of at least %d printable ASCII characters in its first line", file, LEAST_KEY);
    }
    key[n] = 0;
    return key;
}

/* Compares in a time that depends on the two lengths alone, not on where the two differ. */
static inline bool key_fits(const char* key, const char* given) {
    const size_t n = strlen(key), m = strlen(given);
    unsigned differs = n != m;
    for (size_t i = 0; i < n; i++) { differs |= (unsigned)(key[i] ^ (i < m ? given[i] : 0)); }
    return differs == 0;
}

/* The head of a request. A header that is missing is "". */
typedef struct {
    const char *method, *url, *host, *origin, *site /* Sec-Fetch-Site */, *authorization, *type;
} Request;

/* Returns the status with which a request is refused before its body is read, and why; 0: it is not. The page and /health say
 * nothing about a run and need no key; other sites may link to the page. `key`: NULL: none. `methods` of this url: "POST", or
 * "GET, HEAD"; NULL: there is no such url. */
static inline unsigned request_judge(const Address* a, const char* key, const Request* r, const char* methods,
                                     const char** why) {
    const bool page = strcmp(r->url, "/") == 0, post = methods && strcmp(methods, "POST") == 0;
    const bool foreign = *r->site && strcmp(r->site, "same-origin") != 0 && strcmp(r->site, "none") != 0;
    const bool named = *r->origin && text_starts(r->origin, "http://") && strcasecmp(r->origin + 7, r->host) == 0;
    const bool json = strncasecmp(r->type, "application/json", 16) == 0 && strchr("; \t", r->type[16]);
    const struct {
        bool refused;
        unsigned status;
        const char* why;
    } rules[] = {
        {!address_has(a, r->host) || (*r->origin && !named), 403, "Host or Origin is not the address that this server printed"},
        {foreign && !page, 403, "the page of another site asks"},
        {key && !page && strcmp(r->url, "/health") != 0 &&
             !(text_starts(r->authorization, "Bearer ") && key_fits(key, r->authorization + 7)),
         401, "the key is missing or wrong"},
        {!methods, 404, "there is no such page"},
        {methods && strcmp(r->method, post ? "POST" : "GET") != 0 && (post || strcmp(r->method, "HEAD") != 0), 405,
         post ? "wanted POST" : "wanted GET"},
        {post && !json, 415, "wanted Content-Type: application/json"},
    };
    size_t i = 0;
    while (i < sizeof rules / sizeof *rules && !rules[i].refused) { i++; }
    *why = i < sizeof rules / sizeof *rules ? rules[i].why : NULL;
    return *why ? rules[i].status : 0;
}

#endif
