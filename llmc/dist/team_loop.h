/* team_loop.h -- the loop of a team (team.h): reads what the others send, moves collectives on, sends beats, and watches.
 *
 * One thread in each rank owns the connections: it alone reads and writes, never waits for one of them, and so sees at any time
 * who is silent or gone. A collective hands its bytes to this thread (mutex, condition variable, a pipe that wakes it) instead
 * of using the sockets itself: two threads on one socket would need a lock. A thread that held the lock while it waits for a
 * stopped rank would keep the watch from reporting that rank. A collective never waits for a heartbeat: with two ranks on one
 * host it takes 0.1 to 0.3 ms (two busy cores). Before all have joined, and after the end, the calling thread does this
 * work.
 */
#ifndef LLMC_TEAM_LOOP_H
#define LLMC_TEAM_LOOP_H

#include "llmc/base/utils.h"       // first, since it asks for the functions beyond C11; defines: fail, now_seconds
#include "llmc/dist/link.h"        // defines: Message, link_receive, link_flush, link_close
#include "llmc/dist/team_hello.h"  // defines: team_take_hello, team_take_nonce, team_say_hello, team_place, team_accept
#include "llmc/dist/team_state.h"  // defines: Team, TeamMember, team_send, team_send_all, team_blame, team_speaks

#include <math.h>

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
static inline bool team_take_from_zero(Team* t, TeamMember* zero) {
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
        case TEAM_TOLD: snprintf(t->told, sizeof t->told, "%.*s", (int)in->size, (const char*)in->payload); return true;
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
static inline bool team_take_from_member(Team* t, TeamMember* m) {
    const Message* in = &m->link.in;
    if (in->rank != m->rank || in->rest != 0) { return false; }
    m->sequence = in->sequence;
    m->place = in->place;
    if (in->kind == TEAM_ERROR) {
        team_take_cause(t, (int)m->rank, m->host, (const char*)in->payload, (int)in->size);
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
static inline bool team_take(Team* t, TeamMember* m) {
    const Message* in = &m->link.in;
    if (!team_fits(in) || m->met != (in->kind != TEAM_NONCE)) { return false; }
    if (!m->met) {
        team_take_nonce(t, m, in->payload);
        if (t->run.rank > 0) { team_say_hello(t); }
        return true;
    }
    if (in->token != m->hears) { return false; }
    if (m->refused) { return true; }
    if (t->run.rank > 0) { return team_take_from_zero(t, m); }
    return m->joined ? team_take_from_member(t, m) : team_take_hello(t, m);
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
        } else if (!team_take(t, m)) {
            team_lose(t, m, "sent what is no message of this run");
        } else if (m->greeted || t->run.rank > 0) {  // a stranger gains no time by what it says before its hello
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

/* Orders two members by the collectives they have entered, then by step, then by bucket. */
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
    team_tell_failure(t);
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

#endif
