/* ranks.h -- who this process is among those of a run. */
#ifndef LLMC_RANKS_H
#define LLMC_RANKS_H

#include <stdint.h>

typedef struct {
    int rank, ranks;              // this process, and how many the run has
    int local_rank, local_ranks;  // the same among those of this host
    char address[256];            // of rank 0
    int port;
    uint64_t token;        // of this run: messages with another are not its own
    const char* launcher;  // "--gpus", "torchrun", "mpirun", "srun"; NULL: this process is alone
} Ranks;

#endif
