/* agree.h -- what the ranks of a run decide together: each brings its own value, and all get the same answer.
 *
 * All ranks call the same functions in the same order. A process that is alone has no team (NULL) and decides at once. If a
 * rank is lost meanwhile, the team ends the process and names the cause (team.h).
 */
#ifndef LLMC_AGREE_H
#define LLMC_AGREE_H

#include "llmc/base/utils.h"       // defines: Error, must, xmalloc, xcalloc, size_min
#include "llmc/dist/ranks.h"       // defines: RankPlace, ranks_hosts
#include "llmc/dist/team.h"        // defines: team_gather
#include "llmc/dist/team_state.h"  // defines: Team, TEAM_PAYLOAD

/* Gets every rank's `bytes` bytes, in rank order. */
static inline void agree_gather(Team* team, const void* mine, size_t bytes, void* all /* (ranks, bytes) */) {
    Error e = NO_ERROR;
    must(team_gather(team, mine, bytes, all, &e), &e);
}

/* Replaces the value by the value of `rank`, in pieces if it is long. */
static inline void agree_from(Team* team, int rank, void* value, size_t bytes) {
    if (!team) { return; }
    char* all = (char*)xcalloc((size_t)team->run.ranks, TEAM_PAYLOAD);
    for (size_t at = 0; at < bytes; at += TEAM_PAYLOAD) {
        const size_t n = size_min(TEAM_PAYLOAD, bytes - at);
        agree_gather(team, (char*)value + at, n, all);
        memcpy((char*)value + at, all + (size_t)rank * n, n);
    }
    free(all);
}

/* Replaces the value by rank 0's value. */
static inline void agree_first(Team* team, void* value, size_t bytes) { agree_from(team, 0, value, bytes); }

/* Returns whether all ranks are well. If not, *e becomes the error of the first rank that is not, with its number; on that
 * rank *e stays as it is. */
static inline bool agree_ok(Team* team, bool ok, Error* e) {
    if (!team) { return ok; }
    const int ranks = team->run.ranks;
    const unsigned char mine = ok;  // not bool: another process's byte may be neither 0 nor 1
    unsigned char* all = (unsigned char*)xmalloc((size_t)ranks);
    agree_gather(team, &mine, sizeof mine, all);
    int bad = 0;
    while (bad < ranks && all[bad]) { bad++; }
    free(all);
    if (bad == ranks) { return true; }
    Error text = *e;
    agree_from(team, bad, text.msg, sizeof text.msg);
    // a finished message, whose hint has its own line
    if (bad != team->run.rank) { snprintf(e->msg, sizeof e->msg, "rank %d: %.1000s", bad, text.msg); }
    return false;
}

/* Compares texts of at most `most` bytes that came from all ranks. Such a text may lack its NUL. Fails if a text differs from
 * rank 0's text, and names the first. */
static inline bool agree_texts(const char* name, const char* all /* (ranks, most) */, int ranks, size_t most, Error* e) {
    for (int r = 1; r < ranks; r++) {
        const char* theirs = all + (size_t)r * most;
        if (strncmp(theirs, all, most) == 0) { continue; }
        return fail(e, "rank %d: %s is \"%.*s\", but rank 0 has \"%.*s\"", r, name, (int)most, theirs, (int)most, all);
    }
    return true;
}

/* Adds up each of `count` values over the ranks, in their order. */
static inline void agree_add(Team* team, double* values, size_t count) {
    enum { MOST = TEAM_PAYLOAD / sizeof(double) };
    if (!team) { return; }
    double* all = (double*)xmalloc((size_t)team->run.ranks * MOST * sizeof *all);
    for (size_t at = 0; at < count; at += MOST) {
        const size_t n = size_min(MOST, count - at);
        agree_gather(team, values + at, n * sizeof *all, all);
        memset(values + at, 0, n * sizeof *all);
        for (int r = 0; r < team->run.ranks; r++) {
            for (size_t i = 0; i < n; i++) { values[at + i] += all[(size_t)r * n + i]; }
        }
    }
    free(all);
}

/* Replaces each of `count` values by the largest of all ranks. */
static inline void agree_most(Team* team, int* values, size_t count) {
    if (!team) { return; }
    int* all = (int*)xmalloc((size_t)team->run.ranks * count * sizeof *all);
    agree_gather(team, values, count * sizeof *all, all);
    for (size_t i = 0; i < (size_t)team->run.ranks * count; i++) {
        if (all[i] > values[i % count]) { values[i % count] = all[i]; }
    }
    free(all);
}

/* Returns ranks_hosts() of the run. */
static inline int agree_hosts(Team* team) {
    const int ranks = team->run.ranks;
    const RankPlace mine = {team->run.local_rank, team->run.local_ranks};
    RankPlace* all = (RankPlace*)xcalloc((size_t)ranks, sizeof *all);
    agree_gather(team, &mine, sizeof mine, all);
    const int hosts = ranks_hosts(all, ranks);
    free(all);
    return hosts;
}

#endif
