/* key.h -- the key that another machine has to give: the first line of a file, as a header can carry it. */
#ifndef SERVE_KEY_H
#define SERVE_KEY_H

#include "llmc/base/utils.h"  // first, since it asks for the functions beyond C11

enum { LEAST_KEY = 16 };  // characters

/* Reads the key of a file, or ends the program. */
static inline char* key_read(const char* file) {
    size_t size = 0, n = 0;
    Error e = NO_ERROR;
    char* key = read_file(file, &size, 4096, &e);
    must(key != NULL, &e);
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

#endif
