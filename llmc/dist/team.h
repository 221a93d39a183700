/* team.h -- the ranks of a run as a team: they meet, agree, and end together. Tensors go another way (NCCL).
 *
 *   Team t;
 *   team_init(&t);                                            // then its times and parent_fd may be changed
 *   must(team_listen(&t, &ranks, &e), &e);                    // on rank 0, long before the next line, or not at all
 *   must(team_open(&t, &ranks, fields, count, 120, &e), &e);  // meets the others
 *   team_at(&t, PHASE_STEP, step, bucket);                    // says where this rank is
 *   team_gather(&t, &mine, sizeof mine, all, &e);             // the one collective
 *   team_close(&t);                                           // or team_fail(&t, cause), and the others print it
 *
 * Callers build barrier, broadcast (rank 0's part), maximum, agreement and the decision to stop from team_gather().
 *
 * Rank 0 watches the others for three failures: a connection closes; a rank is silent for silent_seconds; one rank alone is
 * behind all others for hang_seconds while it stands still in phase "step". (It compares the collectives entered, then step,
 * then bucket.) The others watch rank 0 for the first two. Any of these ends every rank. One rank of each host prints a line,
 * "error: rank 3 on host node7 was silent for 20 s, last seen in step 1200". Each rank ends with status 1 from a thread of its
 * own, whatever its training thread waits for. So does a rank whose parent is gone. The watch cannot distinguish ranks that
 * hang together from ranks that work long. Time in which this process itself did not run (Ctrl-Z, a machine that sleeps) does
 * not count as silence of the others.
 *
 * How: link.h has the messages, team_state.h their kinds, team_hello.h how ranks join, team_loop.h the thread.
 */
#ifndef LLMC_TEAM_H
#define LLMC_TEAM_H

#include "llmc/base/utils.h"       // first, since it asks for the functions beyond C11; defines: Error, fail, xcalloc
#include "llmc/dist/link.h"        // defines: link_listen, link_close
#include "llmc/dist/ranks.h"       // defines: Ranks
#include "llmc/dist/team_hello.h"  // defines: team_reach
#include "llmc/dist/team_loop.h"   // defines: team_turn, team_thread
#include "llmc/dist/team_state.h"  // defines: Team, TeamField, TeamPhase, TEAM_PAYLOAD, team_print, team_linger

#include <math.h>
#include <pthread.h>
#include <signal.h>

// ---------------------------------------------------------------------------------------------------------------------
// meeting

/* Lists the ranks that have not joined: "ranks 3, 5 of 8", at most eight of them. */
static inline void team_list_missing(const Team* t, char* out, size_t cap) {
    const int missing = t->run.ranks - t->arrived;
    int listed = 0;
    size_t used = (size_t)snprintf(out, cap, missing == 1 ? "rank" : "ranks");
    for (int r = 1; r < t->run.ranks && listed < 8; r++) {
        if (t->members[r].joined) { continue; }
        used += (size_t)snprintf(out + used, cap - used, "%s %d", listed++ ? "," : "", r);
    }
    if (missing > listed) { used += (size_t)snprintf(out + used, cap - used, " and %d more", missing - listed); }
    snprintf(out + used, cap - used, " of %d", t->run.ranks);
}

/* Prints after a while what this rank waits for: on rank 0, and once on each host where rank 0 does not answer, and why. */
static inline void team_tell_waiting(const Team* t) {
    char text[512], missing[128];
    if (t->run.rank == 0) {
        team_list_missing(t, missing, sizeof missing);
        snprintf(text, sizeof text, "%s at %s (%s), port %d", missing, t->run.address, t->numeric, t->run.port);
    } else {
        snprintf(text, sizeof text, "rank 0 at %s, port %d: %.200s", t->run.address, t->run.port, t->cause.msg);
    }
    if (t->run.rank == 0 || (!t->members[0].joined && t->run.local_rank == 0)) { team_print("waiting for ", text); }
}

/* The time for joining is over. */
static inline void team_miss(Team* t, double timeout) {
    char missing[128];
    if (t->run.rank == 0) {
        team_list_missing(t, missing, sizeof missing);
        fail(&t->failure, "%s did not join at %s (%s), port %d, within %g s", missing, t->run.address, t->numeric, t->run.port,
             timeout);
    } else {
        fail(&t->failure, "rank 0 did not answer at %s, port %d, within %g s: %s", t->run.address, t->run.port,
             t->members[0].link.fd >= 0 ? TEAM_PATIENCE * timeout : timeout, t->cause.msg);
    }
}

/* Returns whether rank 0 has let this rank join. A rank that is only connected counts, too, for some time. */
static inline bool team_is_heard(const Team* t, double waited, double timeout) {
    const TeamMember* zero = &t->members[0];
    return zero->joined || (zero->link.fd >= 0 && waited < TEAM_PATIENCE * timeout);
}

/* Waits until all have joined, or something is wrong: then rank 0 stays for a while, to report the error to ranks that come
 * late. Rank 0 decides how long a joined rank waits for the others. A rank that is connected but has no answer yet waits
 * longer: rank 0 may listen while it still reads its files. */
static inline void team_wait_for_all(Team* t, double timeout) {
    const bool zero = t->run.rank == 0;
    const double begin = now_seconds();
    double until = begin + timeout, next = begin;
    bool told = false, failed = false;
    for (double now = begin; now < until || (!zero && team_is_heard(t, now - begin, timeout)); now = now_seconds()) {
        if (!zero && t->members[0].link.fd < 0 && now >= next) {
            team_reach(t);
            next = now + fmin(1.0, 0.1 + 0.2 * (now - begin));
        }
        team_turn(t, 0.1);
        if (t->failure.msg[0] && !failed) { until = fmin(until, now + t->silent_seconds); }
        failed = t->failure.msg[0] != 0;
        if (t->started || (failed && (!zero || t->arrived == t->run.ranks))) { return; }
        if (zero && t->arrived == t->run.ranks) {
            team_send_all(t, TEAM_START, NULL, 0);
            t->started = true;
            return;
        }
        if (!told && now - begin >= 2) {
            team_tell_waiting(t);
            told = true;
        }
    }
    team_miss(t, timeout);
}

/* Begins to listen, on rank 0, long before team_open(): the other ranks then know that rank 0 has started. */
static inline bool team_listen(Team* t, const Ranks* r, Error* e) {
    t->listener = link_listen(r->address, r->port, t->numeric, sizeof t->numeric, e);
    return t->listener >= 0;
}

static inline bool team_join(Team* t, double timeout, Error* e) {
    const Ranks* r = &t->run;
    if (r->rank == 0 && t->listener < 0 && !team_listen(t, r, e)) { return false; }
    team_wait_for_all(t, timeout);
    if (t->listener >= 0) { close(t->listener); }
    t->listener = -1;
    for (int i = r->ranks; i < t->slots; i++) {
        if (!t->members[i].refused) { link_close(&t->members[i].link); }
    }
    if (!t->failure.msg[0]) { return true; }
    team_tell_failure(t);
    if (r->rank == 0) { team_linger(t, TEAM_LINGER_SECONDS); }
    return fail(e, "%s", t->failure.msg);
}

// ---------------------------------------------------------------------------------------------------------------------
// opening and closing

static inline void team_wake(Team* t) {
    if (write(t->wake[1], "", 1) < 0) { return; }  // the pipe is full: the thread will wake anyway
}

/* Sets the times that users get: a beat every 2 s, 20 s of silence, 60 s alone behind. No parent is watched. */
static inline void team_init(Team* t) {
    memset(t, 0, sizeof *t);
    t->heartbeat_seconds = 2;
    t->silent_seconds = 20;
    t->hang_seconds = 60;
    t->parent_fd = t->listener = -1;
}

static inline void team_free(Team* t) {
    for (int i = 0; i < t->slots; i++) { link_close(&t->members[i].link); }
    if (t->listener >= 0) { close(t->listener); }
    for (int i = 0; i < 2; i++) {
        if (t->wake[i] >= 0) { close(t->wake[i]); }
    }
    pthread_mutex_destroy(&t->mutex);
    pthread_cond_destroy(&t->given);
    free(t->members);
    free(t->polls);
    free(t->all);
    t->members = NULL;
    t->polls = NULL;
    t->all = NULL;
    t->slots = 0;
    t->open = false;
}

static inline void team_prepare(Team* t, const Ranks* r, const TeamField* fields, int count) {
    t->run = *r;
    t->fields = fields;
    t->count = count;
    t->wake[0] = t->wake[1] = t->behind = -1;
    t->arrived = 1;
    t->turned = now_seconds();
    t->slots = r->ranks == 1 ? 0 : r->rank == 0 ? r->ranks + TEAM_STRANGERS : 1;
    t->members = (TeamMember*)xcalloc((size_t)t->slots, sizeof *t->members);
    t->polls = (struct pollfd*)xcalloc((size_t)t->slots + 3, sizeof *t->polls);
    t->all = (unsigned char*)xcalloc((size_t)r->ranks, TEAM_PAYLOAD);
    for (int i = 0; i < t->slots; i++) { t->members[i].link.fd = -1; }
    if (gethostname(t->host, sizeof t->host - 1) != 0 || !t->host[0]) { snprintf(t->host, sizeof t->host, "unknown"); }
    if (t->slots > 0 && r->rank == 0) { memcpy(t->members[0].host, t->host, sizeof t->host); }
    pthread_mutex_init(&t->mutex, NULL);
    pthread_cond_init(&t->given, NULL);
}

/* The thread blocks all signals: the training thread handles them. */
static inline bool team_start_thread(Team* t, Error* e) {
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    t->threaded = pthread_create(&t->thread, NULL, team_thread, t) == 0;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return t->threaded || fail(e, "no thread can be started to watch the ranks");
}

static inline void team_stop_thread(Team* t) {
    if (!t->threaded) { return; }
    pthread_mutex_lock(&t->mutex);
    t->quit = true;
    pthread_mutex_unlock(&t->mutex);
    team_wake(t);
    pthread_join(t->thread, NULL);
    t->threaded = false;
}

/* Meets the other ranks of `r` within `timeout` seconds, and compares its fields (count) with the fields of rank 0, in their
 * order. Call team_init() first. Fails if a rank is missing, has other fields, or ends meanwhile: then all ranks that have
 * come get the same error. Also fails if rank 0 cannot listen. A run of one rank opens no socket. Do not move the team in
 * memory until it is closed. */
static inline bool team_open(Team* t, const Ranks* r, const TeamField* fields, int count, double timeout, Error* e) {
    team_prepare(t, r, fields, count);
    const bool watches = r->ranks > 1 || t->parent_fd >= 0;
    bool ok = !watches || pipe2(t->wake, O_CLOEXEC | O_NONBLOCK) == 0 || fail(e, "cannot make a pipe: %s", strerror(errno));
    ok = ok && (r->ranks == 1 || team_join(t, timeout, e));
    ok = ok && (!watches || team_start_thread(t, e));
    t->open = ok;
    if (!ok) { team_free(t); }
    return ok;
}

/* Says where this rank is. Costs nothing. The training thread calls it at each step, bucket (of fewer than 65,536) and
 * phase. */
static inline void team_at(Team* t, TeamPhase phase, uint64_t step, int bucket) {
    __atomic_store_n(&t->place, step << 24 | (uint64_t)(bucket & 0xFFFF) << 8 | (uint64_t)phase, __ATOMIC_RELAXED);
}

/* Gives `bytes` (at most TEAM_PAYLOAD, the same number on every rank) and gets all ranks' bytes, in rank order. All ranks
 * call it, one thread of each. If another rank fails meanwhile, this process ends. */
static inline bool team_gather(Team* t, const void* mine, size_t bytes, void* all /* (ranks, bytes) */, Error* e) {
    if (!t->open) { return fail(e, "the team of the ranks is closed"); }
    if (bytes > TEAM_PAYLOAD) { return fail(e, "a rank gives %zu bytes, wanted at most %d", bytes, TEAM_PAYLOAD); }
    if (t->run.ranks == 1) {
        if (bytes > 0) { memcpy(all, mine, bytes); }
        return true;
    }
    pthread_mutex_lock(&t->mutex);
    if (bytes > 0) { memcpy(t->mine, mine, bytes); }
    t->bytes = bytes;
    t->sequence++;
    t->asked = true;
    team_wake(t);
    while (t->asked) { pthread_cond_wait(&t->given, &t->mutex); }
    if (bytes > 0) { memcpy(all, t->all, (size_t)t->run.ranks * bytes); }
    pthread_mutex_unlock(&t->mutex);
    return true;
}

/* Waits until all ranks are here. */
static inline bool team_barrier(Team* t, Error* e) { return team_gather(t, NULL, 0, NULL, e); }

/* Reports to all other ranks that this one ends, and why. They end; on other hosts they print the first line of `cause` with
 * this rank's name. The training thread calls it, prints the error itself and ends the process. Takes two seconds at most. */
static inline void team_fail(Team* t, const char* cause) {
    const int length = (int)strcspn(cause, "\n");
    if (!t->open) { return; }
    team_stop_thread(t);
    if (t->run.ranks > 1) {
        team_take_cause(t, t->run.rank, t->host, cause, length);
        team_tell_failure(t);
        if (t->run.rank > 0) { team_send(t, &t->members[0], TEAM_ERROR, cause, size_min((size_t)length, TEAM_PAYLOAD)); }
        team_linger(t, TEAM_LINGER_SECONDS);
    }
    team_free(t);
}

/* Ends the team cleanly on all ranks: a barrier, after which they may end. Does nothing if the team is not open. */
static inline void team_close(Team* t) {
    Error e = NO_ERROR;
    if (!t->open) { return; }
    pthread_mutex_lock(&t->mutex);
    t->closing = true;
    pthread_mutex_unlock(&t->mutex);
    team_barrier(t, &e);
    team_stop_thread(t);
    if (t->run.rank == 0) { team_linger(t, t->silent_seconds); }  // the others read the result, then close
    team_free(t);
}

#endif
