/* together.h -- a run of several ranks: how they meet, and what they decide together: whether all are well, whether to end or to
 * save, what rank 0 measured.
 *
 * All ranks call the same functions in the same order, and get the same answer. A process that is alone has no team (NULL)
 * and decides at once. Where a rank is lost, the team ends the process itself and names the cause (dist/team.h).
 *
 * Rank 0 has the screen, the log and --out. The others' stdout goes nowhere; their errors carry their number.
 */
#ifndef LLMC_TOGETHER_H
#define LLMC_TOGETHER_H

#include "llmc/base/crc.h"  // defines: crc_of
#include "llmc/base/utils.h"
#include "llmc/dist/launch.h"  // defines: launch_parent_fd
#include "llmc/dist/ranks.h"   // defines: Ranks
#include "llmc/dist/team.h"    // defines: Team, TeamField, team_open, team_gather, team_close, TEAM_PAYLOAD
#include "llmc/run/session.h"  // defines: Session
#include "llmc/run/signals.h"  // defines: run_together

/* Gets every rank's `bytes` bytes, in rank order. */
static inline void together_gather(Team* team, const void* mine, size_t bytes, void* all /* (ranks, bytes) */) {
    Error e = NO_ERROR;
    must(team_gather(team, mine, bytes, all, &e), &e);
}

/* Replaces the value by rank 0's. */
static inline void together_take_first(Team* team, void* value, size_t bytes) {
    if (!team) { return; }
    char* all = (char*)xmalloc((size_t)team->run.ranks * bytes);
    together_gather(team, value, bytes, all);
    memcpy(value, all, bytes);
    free(all);
}

/* Returns whether all ranks are well. If not, *e is the first error that a rank has, with its number, or stays this rank's
 * own. */
static inline bool together_ok(Team* team, bool ok, Error* e) {
    if (!team) { return ok; }
    const int ranks = team->run.ranks;
    bool* all = (bool*)xmalloc((size_t)ranks * sizeof *all);
    together_gather(team, &ok, sizeof ok, all);
    int bad = 0;
    while (bad < ranks && all[bad]) { bad++; }
    free(all);
    if (bad == ranks) { return true; }
    // its message travels in pieces
    Error text = *e;
    char* pieces = (char*)xmalloc((size_t)ranks * TEAM_PAYLOAD);
    for (size_t at = 0; at < sizeof text.msg; at += TEAM_PAYLOAD) {
        const size_t bytes = size_min(TEAM_PAYLOAD, sizeof text.msg - at);
        together_gather(team, text.msg + at, bytes, pieces);
        memcpy(text.msg + at, pieces + (size_t)bad * bytes, bytes);
    }
    free(pieces);
    // a finished message, whose hint has its own line
    if (bad != team->run.rank) { snprintf(e->msg, sizeof e->msg, "rank %d: %.1000s", bad, text.msg); }
    return false;
}

/* Adds up each of `count` values over the ranks, in their order. */
static inline void together_add(Team* team, double* values, size_t count) {
    enum { MOST = TEAM_PAYLOAD / sizeof(double) };
    if (!team) { return; }
    double* all = (double*)xmalloc((size_t)team->run.ranks * MOST * sizeof *all);
    for (size_t at = 0; at < count; at += MOST) {
        const size_t n = size_min(MOST, count - at);
        together_gather(team, values + at, n * sizeof *all, all);
        memset(values + at, 0, n * sizeof *all);
        for (int r = 0; r < team->run.ranks; r++) {
            for (size_t i = 0; i < n; i++) { values[at + i] += all[(size_t)r * n + i]; }
        }
    }
    free(all);
}

/* What the ranks ask for between two steps. */
typedef struct {
    bool end;    // any rank got a signal
    bool save;   // any rank got SIGUSR1
    bool timed;  // by rank 0's clock --checkpoint-minutes asks for a checkpoint
} Wishes;

/* Joins the wishes of all ranks. */
static inline Wishes together_wish(Team* team, Wishes mine) {
    if (!team) { return mine; }
    const int ranks = team->run.ranks;
    Wishes* all = (Wishes*)xmalloc((size_t)ranks * sizeof *all);
    together_gather(team, &mine, sizeof mine, all);
    Wishes w = all[0];
    for (int i = 1; i < ranks; i++) {
        w.end = w.end || all[i].end;
        w.save = w.save || all[i].save;
    }
    free(all);
    return w;
}

// ---------------------------------------------------------------------------------------------------------------------
// meeting

enum { TOGETHER_SECONDS = 300 };  // that the ranks have to meet: the first run on a machine loads from cold disks

/* Makes the process one of several ranks, before it prints a line. */
static inline void together_begin(const Ranks* r) {
    if (r->ranks == 1) { return; }
    run_together = 1;
    if (r->rank == 0) { return; }
    snprintf(message_rank, sizeof message_rank, "rank %d: ", r->rank);
    if (!freopen("/dev/null", "w", stdout)) { die("/dev/null: cannot be opened: %s", strerror(errno)); }
}

/* Writes a value that must be the same on all ranks; of one that is too long, its end and a hash. */
static inline void together_field(TeamField* f, const char* name, const char* value) {
    const size_t length = strlen(value), most = sizeof f->value - 24;
    f->name = name;
    if (length < most) {
        snprintf(f->value, sizeof f->value, "%s", value);
    } else {
        const uint32_t crc = crc_of(value, length);
        snprintf(f->value, sizeof f->value, "%08" PRIx32 " ..%s", crc, value + length - (most - 16));
    }
}

/* Meets the other ranks, and compares what must be the same on all: the build, all flags but --threads, the data, the checkpoint
 * that the run resumes. Does nothing if the process is alone. */
static inline void together_open(Session* s, Team* team, const Ranks* r) {
    enum { MOST = NUM_OPTIONS + 4 };
    const Options* o = &s->options;
    char names[NUM_OPTIONS][OPTION_TEXT], value[OPTION_TEXT], text[128];
    int count = 0;
    uint64_t data = 0;
    Error e = NO_ERROR;
    if (r->ranks == 1) { return; }
    TeamField* fields = (TeamField*)xcalloc(MOST, sizeof *fields);
    together_field(&fields[count++], "this build", s->build);
    for (int i = 0; i < NUM_OPTIONS; i++) {
        if (i == OPT_threads) { continue; }
        together_field(&fields[count++], option_flag(i, names[i]), option_text(o, i, value));
    }
    if (s->has_train) {
        must(mix_fingerprint(&s->mix, &data, &e), &e);
        snprintf(text, sizeof text, "%016" PRIx64, data);
        together_field(&fields[count++], "the fingerprint of the data", text);
    }
    snprintf(text, sizeof text, s->resumed ? "step %llu" : "none", (unsigned long long)s->state.step);
    together_field(&fields[count++], "the checkpoint to resume", text);
    team_init(team);
    team->parent_fd = launch_parent_fd();
    must(team_open(team, r, fields, count, TOGETHER_SECONDS, &e), &e);
    free(fields);
    s->team = team;
}

/* Checks that all ranks see the same --out: each reads a token that rank 0 writes there. */
static inline void together_share_out(const Session* s) {
    char path[PATH_CAP], text[32], name[TEAM_HOST];
    size_t size = 0;
    Error e = NO_ERROR;
    if (!s->team) { return; }
    const int length = snprintf(text, sizeof text, "%016" PRIx64 "\n", s->team->run.token);
    bool ok = path_join(path, s->options.out, ".ranks", &e);
    if (ok && s->rank == 0) { ok = write_file(path, text, (size_t)length, &e); }
    if (!together_ok(s->team, ok, &e)) { must(false, &e); }
    if (s->rank > 0) {
        char* found = read_file(path, &size, 64, &e);
        ok = found && size == (size_t)length && memcmp(found, text, size) == 0;
        free(found);
        snprintf(name, sizeof name, "%s", s->team->host);
        if (!ok) {
            e.msg[0] = 0;
            fail(&e, "--out: %s on host %s is not the folder that rank 0 writes: all ranks need one they share", s->options.out,
                 name);
        }
    }
    const bool shared = together_ok(s->team, ok, &e);
    if (s->rank == 0) { unlink(path); }
    must(shared, &e);
}

/* Tells the others where this rank is. */
static inline void together_at(const Session* s, TeamPhase phase, int64_t step) {
    if (s->team) { team_at(s->team, phase, (uint64_t)step, 0); }
}

/* Leaves the others: all ranks do so at the end. */
static inline void together_close(Session* s) {
    if (s->team) { team_close(s->team); }
    s->team = NULL;
}

#endif
