/* documents.h -- rows of random documents, for the tests of layers that keep documents apart. */
#ifndef LLMC_DOCUMENTS_H
#define LLMC_DOCUMENTS_H

#include "llmc/base/rand.h"
#include "llmc/base/utils.h"

/* Returns the starts (B, T) of rows that hold documents of 1 to `longest` tokens. Each row has other documents. longest 0:
 * returns NULL. */
static inline int32_t* random_starts(int B, int T, int longest) {
    if (longest == 0) { return NULL; }
    int32_t* starts = (int32_t*)xmalloc((size_t)B * (size_t)T * sizeof *starts);
    for (size_t b = 0; b < (size_t)B; b++) {
        int end = 0;
        for (int t = 0, start = 0; t < T; t++) {
            if (t == end) {
                start = t;
                end += 1 + (int)philox_below(7, RAND_SAMPLE, (uint32_t)b, (uint64_t)t, (uint64_t)longest);
            }
            starts[b * (size_t)T + (size_t)t] = start;
        }
    }
    return starts;
}

#endif
