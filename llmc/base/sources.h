/* sources.h -- a run's losses by the source of their tokens. files/mix.h mixes the sources. */
#ifndef LLMC_SOURCES_H
#define LLMC_SOURCES_H

enum { MIX_MOST = 32 };  // sources of training data

/* Training losses by source, since they were cleared. */
typedef struct {
    int count;             // sources; 0: there is only one
    double sum[MIX_MOST];  // sum of the losses of each source's tokens
    double tokens[MIX_MOST];
} SourceLosses;

#endif
