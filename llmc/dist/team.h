/* team.h -- the ranks of a run as a team: they meet, agree, and end together. Tensors go another way (NCCL).
 *
 *   Team t;
 *   team_init(&t);                                            // then its times and parent_fd may be changed
 *   must(team_listen(&t, &ranks, &e), &e);                    // on rank 0, long before the next line, or not at all
 *   must(team_open(&t, &ranks, LLMC_VERSION, 120, &e), &e);   // meets the others
 *   team_at(&t, PHASE_STEP, step);                            // says where this rank is
 *   team_gather(&t, &mine, sizeof mine, all, &e);             // the one collective
 *   team_close(&t);                                           // or team_fail(&t, cause), and the others print it
 *
 * Callers build barrier, broadcast (rank 0's part), maximum, agreement and the decision to stop from team_gather().
 *
 * Rank 0 watches the others for three failures: a connection closes; a rank is silent for silent_seconds; one rank alone is
 * behind all others for hang_seconds while it stands still in phase "step". (It compares the collectives entered, then the
 * step.) The others watch rank 0 for the first two. Any of these ends every rank. One rank of each host prints a line,
 * "error: rank 3 on host node7 was silent for 20 s, last seen in step 1200". Each rank ends with status 1 from a thread of its
 * own, whatever its training thread waits for. So does a rank whose parent is gone. The watch cannot distinguish ranks that
 * hang together from ranks that work long. Time in which this process itself did not run (Ctrl-Z, a machine that sleeps) does
 * not count as silence of the others.
 *
 * One thread in each rank owns the connections: it alone reads and writes, never waits for one of them, and so sees at any time
 * who is silent or gone. A collective hands its bytes to this thread (mutex, condition variable, a pipe that wakes it) instead
 * of using the sockets itself: two threads on one socket would need a lock. A thread that held the lock while it waits for a
 * stopped rank would keep the watch from reporting that rank. A collective never waits for a heartbeat: with two ranks on one
 * host it takes 0.1 to 0.3 ms (two busy cores). Before all have joined, and after the end, the calling thread does this work.
 *
 * The ranks first prove that they belong to the run. Both ends of a connection send random bytes, a NONCE. Each direction then
 * has a token, which all later messages carry:
 *
 *     token = SipHash(key of LLAMA3_TOKEN, direction (1 byte), run's name (8), nonce of rank 0 (16), nonce of the other (16))
 *
 * So the first message with the right token proves that its sender has the key, and the proof is worth nothing on another
 * connection or in the other direction. This guards the meeting, not the wire: whoever reads and changes packets between two
 * ranks sees the tokens and can use them.
 *
 * Rank 0 drops a connection that does not say hello with its token. It has room for TEAM_STRANGERS of them; if all places are
 * taken and another connection waits, the oldest stranger leaves after TEAM_GRACE_SECONDS, so that ranks come through a crowd
 * of connections that say nothing. A rank whose version differs from rank 0's joins all the same, so that it gets the reason
 * for the end together with all others.
 *
 * Elsewhere: the messages (link.h), their kinds (team_state.h).
 */
#ifndef LLMC_TEAM_H
#define LLMC_TEAM_H

#include "llmc/base/utils.h"  // first, since it asks for the functions beyond C11; defines: Error, fail, xcalloc
#include "llmc/base/hash.h"   // defines: siphash
#include "llmc/dist/link.h"   // defines: Message, link_begin, link_listen, link_connect, link_receive, link_flush, link_close
#include "llmc/dist/ranks.h"  // defines: Ranks
#include "llmc/dist/team_state.h"  // defines: Team, TeamMember, TeamHello, team_send, team_blame, team_print, team_linger

#include <math.h>
#include <pthread.h>
#include <signal.h>

// ---------------------------------------------------------------------------------------------------------------------
// recognizing each other

/* Begins a connection with this end's NONCE. */
static inline void team_begin(Team* t, TeamMember* m, int fd) {
    memset(m, 0, sizeof *m);
    link_begin(&m->link, fd);
    os_random(m->nonce, sizeof m->nonce);
    team_send(t, m, TEAM_NONCE, m->nonce, sizeof m->nonce);
}

/* Takes the other end's NONCE, and makes the tokens of both directions. */
static inline void team_receive_nonce(const Team* t, TeamMember* m, const unsigned char* theirs /* (TEAM_RANDOM) */) {
    enum { NAME = 1, ZERO = 9, OTHER = 9 + TEAM_RANDOM, BYTES = 9 + 2 * TEAM_RANDOM };
    const bool zero = t->run.rank == 0;
    unsigned char text[BYTES] = {0};
    memcpy(text + NAME, &t->run.name, sizeof t->run.name);
    memcpy(text + ZERO, zero ? m->nonce : theirs, TEAM_RANDOM);
    memcpy(text + OTHER, zero ? theirs : m->nonce, TEAM_RANDOM);
    const uint64_t to_zero = siphash(t->run.key, text, BYTES);
    text[0] = 1;
    const uint64_t from_zero = siphash(t->run.key, text, BYTES);
    m->says = zero ? from_zero : to_zero;
    m->hears = zero ? to_zero : from_zero;
    m->met = true;
}

/* Answers a connection with an error; it is closed when the other end has closed it, or after a while. */
static inline void team_refuse(Team* t, TeamMember* m, const char* text) {
    team_send(t, m, TEAM_ERROR, text, strlen(text));
    m->refused = true;
}

static inline void team_admit(Team* t, TeamMember* m) {
    char text[256];
    if (m->rank == 0 || m->rank >= (uint32_t)t->run.ranks) {
        snprintf(text, sizeof text, "rank %u on host %s: wanted a rank from 1 to %d", m->rank, m->host, t->run.ranks - 1);
        team_refuse(t, m, t->failure.msg[0] ? t->failure.msg : text);
        return;
    }
    TeamMember* seat = &t->members[m->rank];
    if (seat->joined) {
        snprintf(text, sizeof text, "rank %u has already joined this run, from host %s", m->rank, seat->host);
        team_refuse(t, m, text);
        return;
    }
    *seat = *m;
    memset(m, 0, sizeof *m);
    m->link.fd = -1;
    seat->joined = true;
    seat->link.heard = now_seconds();
    t->arrived++;
    team_send(t, seat, TEAM_JOINED, t->hello.host, TEAM_HOST);
}

/* Takes the HELLO of a rank, and ends the run if it differs from rank 0's. Returns false if the message is another. */
static inline bool team_receive_hello(Team* t, TeamMember* m) {
    TeamHello hello;
    if (m->link.in.kind != TEAM_HELLO) { return false; }
    memcpy(&hello, m->link.in.payload, sizeof hello);
    hello.version[TEAM_VERSION - 1] = 0;
    snprintf(m->host, sizeof m->host, "%.*s", TEAM_HOST - 1, hello.host);
    m->rank = m->link.in.rank;
    m->place = m->link.in.place;
    if (hello.ranks != t->hello.ranks) {
        fail(&t->failure, "rank %u on host %s: the number of ranks is \"%u\", but rank 0 has \"%u\"", m->rank, m->host,
             hello.ranks, t->hello.ranks);
    } else if (strcmp(hello.version, t->hello.version) != 0) {
        fail(&t->failure, "rank %u on host %s: the version of llama3.c is \"%s\", but rank 0 has \"%s\"", m->rank, m->host,
             hello.version, t->hello.version);
    }
    team_admit(t, m);
    return true;
}

/* Returns the place for one more stranger: a free place, or the place of the stranger who has owed its hello longest, if that
 * is long enough. NULL: there is none now. */
static inline TeamMember* team_place(Team* t, double now) {
    TeamMember* oldest = NULL;
    for (TeamMember* m = t->members + t->run.ranks; m < t->members + t->slots; m++) {
        if (m->link.fd < 0) { return m; }
        if (!m->refused && (!oldest || m->link.heard < oldest->link.heard)) { oldest = m; }
    }
    return oldest && now - oldest->link.heard >= TEAM_GRACE_SECONDS ? oldest : NULL;
}

static inline void team_accept(Team* t, double now) {
    for (TeamMember* m = team_place(t, now); m; m = team_place(t, now)) {
        const int fd = os_own(accept(t->listener, NULL, NULL), false);
        if (fd < 0) { return; }
        link_close(&m->link);
        team_begin(t, m, fd);
    }
}

/* Tries to connect to rank 0. */
static inline void team_reach(Team* t) {
    Error cause = NO_ERROR;
    const int fd = link_connect(t->run.address, t->run.port, TEAM_CONNECT_SECONDS, &cause);
    if (fd < 0) {
        t->cause = cause;
        t->turned_away = false;
        return;
    }
    if (!t->turned_away) {
        t->cause.msg[0] = 0;
        fail(&t->cause, "what listens there says nothing");
    }
    team_begin(t, &t->members[0], fd);
}

// ---------------------------------------------------------------------------------------------------------------------
// reading

/* Gives a collective that is done back to the training thread. */
static inline void team_end_collective(Team* t) {
    t->collecting = false;
    pthread_mutex_lock(&t->mutex);
    t->ended = t->closing;
    t->asked = false;
    pthread_cond_signal(&t->given);
    pthread_mutex_unlock(&t->mutex);
}

/* Takes a message of rank 0. Returns false if it makes no sense. */
static inline bool team_receive_from_zero(Team* t, TeamMember* zero) {
    const Message* in = &zero->link.in;
    const size_t brought = (size_t)in->size + in->rest;
    zero->place = in->place;
    switch (in->kind) {
        case TEAM_BEAT: return zero->joined;
        case TEAM_START: return t->started = zero->joined;
        case TEAM_JOINED:
            snprintf(zero->host, sizeof zero->host, "%.*s", TEAM_HOST - 1, (const char*)in->payload);
            return zero->joined = true;
        case TEAM_RESULT:
            if (!t->collecting || in->sequence != t->entered || brought != t->missing) { return false; }
            t->missing = in->rest;
            memcpy(t->all + (size_t)t->run.ranks * t->bytes - brought, in->payload, in->size);
            if (in->rest == 0) { team_end_collective(t); }
            return true;
        case TEAM_PRINTED:
            snprintf(t->printed_on, sizeof t->printed_on, "%.*s", (int)in->size, (const char*)in->payload);
            return true;
        case TEAM_ERROR:
            if (t->text_size + in->size >= sizeof t->text) { return false; }
            memcpy(t->text + t->text_size, in->payload, in->size);
            t->text_size += in->size;
            if (in->rest == 0) { fail(&t->failure, "%.*s", (int)t->text_size, t->text); }
            return true;
        default: return false;
    }
}

/* Rank 0 takes a message of a member. Returns false if it makes no sense. */
static inline bool team_receive_from_member(Team* t, TeamMember* m) {
    const Message* in = &m->link.in;
    if (in->rank != m->rank || in->rest != 0) { return false; }
    m->sequence = in->sequence;
    m->place = in->place;
    if (in->kind == TEAM_ERROR) {
        team_note_cause(t, (int)m->rank, m->host, (const char*)in->payload, (int)in->size);
        return true;
    }
    if (in->kind != TEAM_GIVE) { return in->kind == TEAM_BEAT; }
    if (m->has_given) { return false; }
    m->has_given = true;
    m->given_size = in->size;
    memcpy(m->given, in->payload, in->size);
    return true;
}

/* Takes a message. Returns false if it makes no sense. */
static inline bool team_receive(Team* t, TeamMember* m) {
    const Message* in = &m->link.in;
    if (!team_fits(in) || m->met != (in->kind != TEAM_NONCE)) { return false; }
    if (!m->met) {
        team_receive_nonce(t, m, in->payload);
        if (t->run.rank > 0) { team_send(t, m, TEAM_HELLO, &t->hello, sizeof t->hello); }
        return true;
    }
    if (in->token != m->hears) { return false; }
    if (m->refused) { return true; }
    if (t->run.rank > 0) { return team_receive_from_zero(t, m); }
    return m->joined ? team_receive_from_member(t, m) : team_receive_hello(t, m);
}

/* Closes a connection. Losing a member ends the run, unless the run is at its end. */
static inline void team_lose(Team* t, TeamMember* m, const char* how) {
    link_close(&m->link);
    if (m->joined && !t->ended) { team_blame(t, (int)(m - t->members), how); }
    t->cause.msg[0] = 0;
    if (t->run.rank > 0 && !m->joined) {
        fail(&t->cause, "what listens there is not rank 0 of this run, or has another LLAMA3_TOKEN");
        t->turned_away = true;
    }
}

static inline void team_read(Team* t, TeamMember* m, double now) {
    while (m->link.fd >= 0) {
        const LinkState state = link_receive(&m->link);
        if (state == LINK_WAITS) { return; }
        if (state == LINK_CLOSED) {
            team_lose(t, m, "ended or was killed: its connection closed");
        } else if (!team_receive(t, m)) {
            team_lose(t, m, "sent what is no message of this run");
        } else if (m->joined || m->refused || t->run.rank > 0) {  // a stranger gains no time by what it says before its hello
            m->link.heard = now;
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// the collective

/* Takes a collective over from the training thread. */
static inline void team_begin_collective(Team* t) {
    pthread_mutex_lock(&t->mutex);
    const bool begins = t->asked && !t->collecting;
    if (begins) {
        t->collecting = true;
        t->entered = t->sequence;
        t->missing = (size_t)t->run.ranks * t->bytes;
    }
    pthread_mutex_unlock(&t->mutex);
    if (!begins) { return; }  // from here on the training thread waits, and its fields are ours
    if (t->run.rank > 0) { team_send(t, &t->members[0], TEAM_GIVE, t->mine, t->bytes); }
}

/* Rank 0 looks whether every member has given its part, and then sends them to all. */
static inline void team_collect(Team* t) {
    memcpy(t->all, t->mine, t->bytes);
    for (int r = 1; r < t->run.ranks; r++) {
        const TeamMember* m = &t->members[r];
        if (!m->has_given) { return; }
        if (m->sequence != t->entered || m->given_size != t->bytes) {
            fail(&t->failure,
                 "rank %d on host %s gives %zu bytes to collective %llu, but rank 0 gives %zu bytes to collective %llu", r,
                 m->host, m->given_size, (unsigned long long)m->sequence, t->bytes, (unsigned long long)t->entered);
            return;
        }
        memcpy(t->all + (size_t)r * t->bytes, m->given, t->bytes);
    }
    for (int r = 1; r < t->run.ranks; r++) { t->members[r].has_given = false; }
    team_send_all(t, TEAM_RESULT, t->all, (size_t)t->run.ranks * t->bytes);
    team_end_collective(t);
}

static inline void team_work(Team* t) {
    if (!t->collecting) { team_begin_collective(t); }
    if (t->collecting && t->run.rank == 0) { team_collect(t); }
}

// ---------------------------------------------------------------------------------------------------------------------
// the watch

/* Orders two members by the collectives they have entered, then by step. */
static inline int team_order(const TeamMember* a, const TeamMember* b) {
    const uint64_t at_a = a->place >> 8, at_b = b->place >> 8;
    if (a->sequence != b->sequence) { return a->sequence < b->sequence ? -1 : 1; }
    return at_a < at_b ? -1 : at_a > at_b;
}

/* Rank 0 looks for a rank that alone is behind all others and stands still in a step. */
static inline void team_watch_order(Team* t, double now) {
    int last = 0;
    bool alone = true;
    t->members[0].sequence = t->entered;
    t->members[0].place = __atomic_load_n(&t->place, __ATOMIC_RELAXED);
    for (int r = 1; r < t->run.ranks; r++) {
        const int order = team_order(&t->members[r], &t->members[last]);
        if (order <= 0) { alone = order < 0; }
        if (order < 0) { last = r; }
    }
    const TeamMember* m = &t->members[last];
    if (!alone || (m->place & 0xFF) != PHASE_STEP) { last = -1; }
    if (last < 0 || last != t->behind || m->sequence != t->behind_sequence || m->place != t->behind_place) {
        t->behind = last;
        t->behind_sequence = m->sequence;
        t->behind_place = m->place;
        t->behind_since = now;
    }
    if (last < 0 || t->hang_seconds <= 0 || now - t->behind_since < t->hang_seconds) { return; }
    char what[64];
    snprintf(what, sizeof what, "hangs: it has been alone behind all others for %g s", t->hang_seconds);
    team_blame(t, last, what);
}

/* Looks for silent members, and drops silent strangers. A rank that rank 0 has not answered waits: rank 0 may be
 * busy with others. */
static inline void team_watch(Team* t, double now) {
    char what[64];
    snprintf(what, sizeof what, "was silent for %g s", t->silent_seconds);
    for (int i = 0; i < t->slots && !t->ended; i++) {
        TeamMember* m = &t->members[i];
        if (m->link.fd < 0 || now - m->link.heard < t->silent_seconds) { continue; }
        if (m->joined) {
            team_blame(t, i, what);
        } else if (t->run.rank == 0) {
            link_close(&m->link);
        }
    }
    if (t->run.rank == 0 && t->started && !t->ended) { team_watch_order(t, now); }
}

/* Does not count the time in which this process did not run. */
static inline void team_forgive(Team* t, double now) {
    const double pause = now - t->turned;
    t->turned = now;
    if (pause < 2 * t->heartbeat_seconds) { return; }
    for (int i = 0; i < t->slots; i++) { t->members[i].link.heard += pause; }
    t->behind_since += pause;
}

// ---------------------------------------------------------------------------------------------------------------------
// the loop

/* Waits until something happens, for at most `seconds`. */
static inline void team_poll(Team* t, double seconds) {
    const bool has_room = t->listener >= 0 && team_place(t, now_seconds()) != NULL;
    for (int i = 0; i < t->slots; i++) {
        const Link* l = &t->members[i].link;
        const struct pollfd p = {l->fd, (short)(POLLIN | (link_is_sending(l) ? POLLOUT : 0)), 0};
        t->polls[3 + i] = p;
    }
    const struct pollfd first[3] = {
        {t->wake[0], POLLIN, 0}, {t->parent_fd, POLLIN, 0}, {has_room ? t->listener : -1, POLLIN, 0}};
    memcpy(t->polls, first, sizeof first);
    if (poll(t->polls, (nfds_t)(3 + t->slots), (int)ceil(1e3 * fmax(seconds, 0))) > 0) { return; }
    for (int i = 0; i < 3 + t->slots; i++) { t->polls[i].revents = 0; }  // nothing, or a signal
}

/* Looks at a pipe on which nothing is written: it can only end. */
static inline void team_read_parent(Team* t) {
    char byte;
    const ssize_t n = read(t->parent_fd, &byte, 1);
    if (n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN)) {
        fail(&t->failure, "the process that started this run is gone");
    }
}

static inline void team_beat(Team* t, double now) {
    if (now - t->beaten < t->heartbeat_seconds) { return; }
    t->beaten = now;
    team_send_all(t, TEAM_BEAT, NULL, 0);
}

/* One turn of the loop, of `seconds` at most. The run ends if t->failure has a text afterwards. */
static inline void team_turn(Team* t, double seconds) {
    char bytes[64];
    team_poll(t, fmin(seconds, t->beaten + t->heartbeat_seconds - now_seconds()));
    const double now = now_seconds();
    team_forgive(t, now);
    if (t->polls[0].revents && read(t->wake[0], bytes, sizeof bytes) < 0) { t->polls[0].revents = 0; }
    if (t->polls[1].revents) { team_read_parent(t); }
    for (int i = 0; i < t->slots; i++) {
        TeamMember* m = &t->members[i];
        if (t->polls[3 + i].revents & POLLOUT) { link_flush(&m->link); }
        if (t->polls[3 + i].revents) { team_read(t, m, now); }
    }
    if (t->polls[2].revents) { team_accept(t, now); }
    team_work(t);
    team_beat(t, now);
    team_watch(t, now);
}

/* Ends this process, and with it the run. */
LLMC_NORETURN static inline void team_end(Team* t) {
    team_send_failure(t);
    if (team_speaks(t)) { team_print("error: ", t->failure.msg); }
    if (t->run.rank == 0) { team_linger(t, TEAM_LINGER_SECONDS); }
    _exit(1);
}

static inline void* team_thread(void* team) {
    Team* t = (Team*)team;
    for (bool quit = false; !quit;) {
        team_turn(t, t->heartbeat_seconds);
        if (t->failure.msg[0]) { team_end(t); }
        pthread_mutex_lock(&t->mutex);
        quit = t->quit;
        pthread_mutex_unlock(&t->mutex);
    }
    return NULL;
}

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
static inline void team_print_waiting(const Team* t) {
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
    bool printed = false, failed = false;
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
        if (!printed && now - begin >= 2) {
            team_print_waiting(t);
            printed = true;
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
    team_send_failure(t);
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

static inline void team_prepare(Team* t, const Ranks* r, const char* version) {
    char* host = t->hello.host;
    t->run = *r;
    t->hello.ranks = (uint32_t)r->ranks;
    snprintf(t->hello.version, TEAM_VERSION, "%s", version);
    t->wake[0] = t->wake[1] = t->behind = -1;
    t->arrived = 1;
    t->turned = now_seconds();
    t->slots = r->ranks == 1 ? 0 : r->rank == 0 ? r->ranks + TEAM_STRANGERS : 1;
    t->members = (TeamMember*)xcalloc((size_t)t->slots, sizeof *t->members);
    t->polls = (struct pollfd*)xcalloc((size_t)t->slots + 3, sizeof *t->polls);
    t->all = (unsigned char*)xcalloc((size_t)r->ranks, TEAM_PAYLOAD);
    for (int i = 0; i < t->slots; i++) { t->members[i].link.fd = -1; }
    if (gethostname(host, TEAM_HOST - 1) != 0 || !host[0]) { snprintf(host, TEAM_HOST, "unknown"); }
    if (t->slots > 0 && r->rank == 0) { memcpy(t->members[0].host, host, TEAM_HOST); }
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

/* Meets the other ranks of `r` within `timeout` seconds, and compares their versions with rank 0's. Call team_init() first.
 * Fails if a rank is missing, has another version, or ends meanwhile: then all ranks that have come get the same error. Also
 * fails if rank 0 cannot listen. A run of one rank opens no socket. Do not move the team in memory until it is closed. */
static inline bool team_open(Team* t, const Ranks* r, const char* version, double timeout, Error* e) {
    team_prepare(t, r, version);
    const bool watches = r->ranks > 1 || t->parent_fd >= 0;
    bool ok = !watches || os_pipe(t->wake, false) || fail(e, "cannot make a pipe: %s", strerror(errno));
    ok = ok && (r->ranks == 1 || team_join(t, timeout, e));
    ok = ok && (!watches || team_start_thread(t, e));
    t->open = ok;
    if (!ok) { team_free(t); }
    return ok;
}

/* Says where this rank is; nothing if it is alone. Costs nothing. The training thread calls it at each step and phase. */
static inline void team_at(Team* t, TeamPhase phase, int64_t step) {
    if (t) { __atomic_store_n(&t->place, (uint64_t)step << 8 | (uint64_t)phase, __ATOMIC_RELAXED); }
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
        team_note_cause(t, t->run.rank, t->hello.host, cause, length);
        team_send_failure(t);
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
