/* team.h -- the ranks of a run as a team: they meet, agree, and end together. Tensors go another way (NCCL).
 *
 * Rank 0 listens on the run's address; every other rank has one connection, to rank 0, over which messages of one size go
 * (link.h):
 *
 *   HELLO   to 0    how many ranks and fields there are, the host; then FIELD for each: its name and value, which must be as
 *                   those of rank 0
 *   JOINED  from 0  the host of rank 0. START: all have joined; rank 0 then no longer listens
 *   BEAT    both    every heartbeat_seconds. It says only what is in the head of every message: where the sender is
 *   GIVE    to 0    this rank's part of a collective. RESULT from 0: the parts of all, in as many messages as they need
 *   ERROR   to 0    the cause why this rank ends. From 0: the line that every rank prints, in as many messages as it needs
 *
 * Who connects, but says no hello with the token of the run, is dropped; so is who stays silent.
 *
 * One thread in each rank owns the connections: it alone reads and writes, never waits for one of them, and so sees at any time
 * who is silent or gone. A collective hands its bytes to this thread (mutex, condition variable, a pipe that wakes it) instead of
 * using the sockets itself: two threads on one socket would need a lock, and who held it while it waits for a rank that is
 * stopped would keep the watch from telling. A collective costs two changes of threads more (about 20 microseconds) and never
 * waits for a heartbeat. Before all have joined, and after the end, the calling thread does this work.
 *
 * Rank 0 watches the others: whose connection closes, who is silent for silent_seconds, and who alone is behind all others for
 * hang_seconds while it stands still in phase "step". The others watch rank 0 alike, but for the last. What is found ends every
 * rank: each prints one line, "error: rank 3 on host node7 was silent for 20 s, last seen in step 1200", and ends with status 1
 * from its thread, whatever its training thread waits for. Ranks that hang together are not told from ranks that work long.
 * Time in which this process itself did not run (Ctrl-Z, a machine that sleeps) is not counted as silence of the others.
 */
#ifndef LLMC_TEAM_H
#define LLMC_TEAM_H

#include "llmc/base/utils.h"  // first, since it asks for the functions beyond C11; defines: Error, fail, xcalloc, now_seconds
#include "llmc/dist/link.h"   // defines: Link, Message, link_send, link_receive, link_listen, link_connect
#include "llmc/dist/ranks.h"  // defines: Ranks

#include <math.h>
#include <pthread.h>
#include <signal.h>

enum {
    TEAM_PAYLOAD = MESSAGE_PAYLOAD,  // most bytes that a rank gives to a collective
    TEAM_NAME = 32,                  // bytes of a field's name, with the NUL
    TEAM_VALUE = TEAM_PAYLOAD - TEAM_NAME,
    TEAM_HOST = 72,
    TEAM_STRANGERS = 64,      // connections that have not said hello
    TEAM_LINGER_SECONDS = 2,  // to pass on why the run ends
    TEAM_CONNECT_SECONDS = 3,
};

/* What a rank is doing. Only PHASE_STEP has a limit of time. */
typedef enum {
    PHASE_STARTING,
    PHASE_LOADING,
    PHASE_TUNING,
    PHASE_STEP,
    PHASE_VALIDATION,
    PHASE_SAMPLING,
    PHASE_WRITING,
    PHASES
} TeamPhase;

/* What must be the same on all ranks. Longer values are hashed by the caller; they are cut here. */
typedef struct {
    const char* name;  // up to 31 bytes
    char value[TEAM_VALUE];
} TeamField;

typedef enum {
    TEAM_HELLO = 1,
    TEAM_FIELD,
    TEAM_JOINED,
    TEAM_START,
    TEAM_BEAT,
    TEAM_GIVE,
    TEAM_RESULT,
    TEAM_ERROR,
} TeamKind;

/* The payload of HELLO. */
typedef struct {
    uint32_t ranks, fields;
    char host[TEAM_HOST];
} TeamHello;

/* The other end of a connection. */
typedef struct {
    Link link;
    bool joined, refused, greeted;  // greeted: it has said HELLO, and `fields_seen` of its fields
    uint32_t rank, fields, fields_seen;
    char host[TEAM_HOST];
    uint64_t sequence, place;  // where it was last; see link.h
    bool has_given;            // its part of the collective came: given_size bytes
    size_t given_size;
    unsigned char given[TEAM_PAYLOAD];
} TeamMember;

typedef struct {
    // set by team_init(); may be changed before team_open()
    double heartbeat_seconds, silent_seconds;
    double hang_seconds;  // 0: no limit
    int parent_fd;        // the reading end of a pipe whose writing end the parent holds; -1: none

    Ranks run;
    bool open, threaded;
    char host[TEAM_HOST];  // of this rank
    pthread_t thread;
    int wake[2];     // a pipe: a byte ends the thread's poll()
    uint64_t place;  // where the training thread is; atomic

    // between the training thread and the other, under the mutex
    pthread_mutex_t mutex;
    pthread_cond_t given;  // `asked` is false again
    bool asked;            // the training thread waits in a collective
    bool closing;          // that is the last one
    bool quit;
    uint64_t sequence;  // of collectives
    size_t bytes;       // each rank's part
    unsigned char mine[TEAM_PAYLOAD];
    unsigned char* all;  // (ranks, bytes)

    // the thread's own
    const TeamField* fields;  // (count), until all have joined
    int count;
    int listener;          // -1: none
    char numeric[64];      // its address in digits
    TeamMember* members;   // (slots). Rank 0: the ranks and, behind them, strangers; members[0] is itself. Others: rank 0
    struct pollfd* polls;  // (3 + slots)
    int slots, arrived;    // arrived: members that have joined, with this one
    bool started, collecting;
    bool ended;  // the last collective is done: connections may close
    uint64_t entered;
    double turned, beaten;  // when the loop ran last, and when it sent its last beat
    int behind;             // rank 0: who alone is behind all others, -1: nobody; since when, and where it was then
    double behind_since;
    uint64_t behind_sequence, behind_place;
    Error failure;  // why the run ends
    Error cause;    // why rank 0 could not be reached
    char text[1024];
    size_t text_size;  // of an ERROR that is being read
} Team;

// ---------------------------------------------------------------------------------------------------------------------
// words

/* Returns the name of a phase. */
static inline const char* team_phase_name(TeamPhase phase) {
    static const char* const names[PHASES] = {"starting", "loading", "tuning", "step", "validation", "sampling", "writing"};
    return (unsigned)phase < PHASES ? names[phase] : "unknown";
}

/* Writes where a rank was: "in step 1200", "in phase writing, step 1200". */
static inline void team_seen(char* out, size_t cap, uint64_t place) {
    const TeamPhase phase = (TeamPhase)(place & 0xFF);
    const unsigned long long step = place >> 24;
    if (phase == PHASE_STEP) {
        snprintf(out, cap, "in step %llu", step);
    } else {
        snprintf(out, cap, step ? "in phase %s, step %llu" : "in phase %s", team_phase_name(phase), step);
    }
}

/* Records that the run ends, for what member `rank` did. */
static void team_blame(Team* t, int rank, const char* what) {
    const TeamMember* m = &t->members[rank];
    char seen[64];
    team_seen(seen, sizeof seen, m->place);
    fail(&t->failure, "rank %d on host %s %s, last seen %s", rank, m->host, what, seen);
}

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

/* Prints a line on stderr, unless nobody takes it. stdio may be locked by a thread that is stuck. */
static inline void team_print(const char* kind, const char* text) {
    char line[1100];
    struct pollfd p = {STDERR_FILENO, POLLOUT, 0};
    const int n = snprintf(line, sizeof line, "%s%s\n", kind, text);
    if (poll(&p, 1, 1000) > 0 && write(STDERR_FILENO, line, (size_t)n) < 0) { return; }
}

// ---------------------------------------------------------------------------------------------------------------------
// sending

/* Sends a text or table in as many messages as it needs, one at least. */
static inline void team_send(Team* t, TeamMember* to, TeamKind kind, const void* data, size_t size) {
    const unsigned char* from = (const unsigned char*)data;
    do {
        Message m;
        memset(&m, 0, sizeof m);
        m.token = t->run.token;
        m.kind = kind;
        m.rank = (uint32_t)t->run.rank;
        m.sequence = t->entered;
        m.place = __atomic_load_n(&t->place, __ATOMIC_RELAXED);
        m.size = (uint32_t)size_min(size, TEAM_PAYLOAD);
        m.rest = (uint32_t)(size - m.size);
        if (m.size > 0) { memcpy(m.payload, from, m.size); }
        from += m.size;
        size -= m.size;
        link_send(&to->link, &m);
    } while (size > 0);
}

/* Sends to every member. */
static inline void team_send_all(Team* t, TeamKind kind, const void* data, size_t size) {
    for (int i = 0; i < t->slots; i++) {
        if (t->members[i].joined) { team_send(t, &t->members[i], kind, data, size); }
    }
}

/* Rank 0 tells all others why the run ends. */
static inline void team_tell_failure(Team* t) {
    if (t->run.rank == 0) { team_send_all(t, TEAM_ERROR, t->failure.msg, strlen(t->failure.msg)); }
}

/* Sends what is still to be sent and waits until the other ends have closed: who closes a connection with unread bytes in it
 * resets it, and the other end may lose what it has not read. */
static inline void team_linger(Team* t, double seconds) {
    const double until = now_seconds() + seconds;
    for (bool waits = true; waits && now_seconds() < until;) {
        waits = false;
        for (int i = 0; i < t->slots; i++) {
            TeamMember* m = &t->members[i];
            LinkState state = m->joined || m->refused ? LINK_MESSAGE : LINK_CLOSED;
            if (m->link.fd < 0) { continue; }
            link_flush(&m->link);
            if (!link_is_sending(&m->link)) { shutdown(m->link.fd, SHUT_WR); }
            while (state == LINK_MESSAGE) { state = link_receive(&m->link); }
            if (state == LINK_CLOSED) { link_close(&m->link); }
            waits = waits || state == LINK_WAITS;
        }
        if (waits) { poll(NULL, 0, 5); }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// rank 0 is told hello

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
    t->arrived++;
    team_send(t, seat, TEAM_JOINED, t->host, sizeof t->host);
}

/* The run ends if a member's value is not that of rank 0. */
static inline void team_compare(Team* t, const TeamMember* m, const char* name, const char* theirs, const char* ours) {
    if (strcmp(theirs, ours) == 0) { return; }
    fail(&t->failure, "rank %u on host %s: %s is \"%s\", but rank 0 has \"%s\"", m->rank, m->host, name, theirs, ours);
}

static inline void team_compare_numbers(Team* t, const TeamMember* m, const char* name, uint32_t theirs, int ours) {
    char a[16], b[16];
    snprintf(a, sizeof a, "%u", theirs);
    snprintf(b, sizeof b, "%d", ours);
    team_compare(t, m, name, a, b);
}

static inline void team_compare_field(Team* t, const TeamMember* m, const unsigned char* payload) {
    char name[TEAM_NAME], value[TEAM_VALUE];
    if (m->fields_seen >= (uint32_t)t->count) { return; }  // their number differs, which was told
    const TeamField* ours = &t->fields[m->fields_seen];
    snprintf(name, sizeof name, "%.*s", TEAM_NAME - 1, (const char*)payload);
    snprintf(value, sizeof value, "%.*s", TEAM_VALUE - 1, (const char*)payload + TEAM_NAME);
    team_compare(t, m, "a field", name, ours->name);
    team_compare(t, m, name, value, ours->value);
}

/* Takes a message of one that has not joined. Returns false if it makes no sense. */
static inline bool team_take_hello(Team* t, TeamMember* m) {
    const Message* in = &m->link.in;
    if (in->kind == TEAM_HELLO && !m->greeted) {
        TeamHello hello;
        memcpy(&hello, in->payload, sizeof hello);
        snprintf(m->host, sizeof m->host, "%.*s", TEAM_HOST - 1, hello.host);
        m->greeted = true;
        m->rank = in->rank;
        m->fields = hello.fields;
        team_compare_numbers(t, m, "the number of ranks", hello.ranks, t->run.ranks);
        team_compare_numbers(t, m, "the number of fields", hello.fields, t->count);
    } else if (in->kind == TEAM_FIELD && m->greeted && m->fields_seen < m->fields) {
        team_compare_field(t, m, in->payload);
        m->fields_seen++;
    } else {
        return false;
    }
    m->place = in->place;
    if (m->fields_seen == m->fields) { team_admit(t, m); }
    return true;
}

static inline void team_accept(Team* t) {
    for (int i = t->run.ranks; i < t->slots; i++) {
        TeamMember* m = &t->members[i];
        if (m->link.fd >= 0) { continue; }
        const int fd = accept4(t->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) { return; }
        memset(m, 0, sizeof *m);
        link_begin(&m->link, fd);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// the others look for rank 0

static inline void team_say_hello(Team* t) {
    TeamMember* zero = &t->members[0];
    TeamHello hello;
    memset(&hello, 0, sizeof hello);
    hello.ranks = (uint32_t)t->run.ranks;
    hello.fields = (uint32_t)t->count;
    snprintf(hello.host, sizeof hello.host, "%s", t->host);
    team_send(t, zero, TEAM_HELLO, &hello, sizeof hello);
    for (int i = 0; i < t->count; i++) {
        char field[TEAM_PAYLOAD] = {0};
        snprintf(field, TEAM_NAME, "%s", t->fields[i].name);
        snprintf(field + TEAM_NAME, TEAM_VALUE, "%s", t->fields[i].value);
        team_send(t, zero, TEAM_FIELD, field, sizeof field);
    }
}

static inline void team_reach(Team* t) {
    Error cause = NO_ERROR;
    const int fd = link_connect(t->run.address, t->run.port, TEAM_CONNECT_SECONDS, &cause);
    if (fd < 0) {
        t->cause = cause;
        return;
    }
    t->cause.msg[0] = 0;
    fail(&t->cause, "what listens there says nothing");
    link_begin(&t->members[0].link, fd);
    team_say_hello(t);
}

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
    const size_t total = (size_t)t->run.ranks * t->bytes, brought = (size_t)in->size + in->rest;
    zero->place = in->place;
    switch (in->kind) {
        case TEAM_BEAT: return zero->joined;
        case TEAM_START: return t->started = zero->joined;
        case TEAM_JOINED:
            snprintf(zero->host, sizeof zero->host, "%.*s", TEAM_HOST - 1, (const char*)in->payload);
            return zero->joined = true;
        case TEAM_RESULT:
            if (!t->collecting || in->sequence != t->entered || brought > total) { return false; }
            memcpy(t->all + total - brought, in->payload, in->size);
            if (in->rest == 0) { team_end_collective(t); }
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

// ---------------------------------------------------------------------------------------------------------------------
// reading

/* Rank 0 takes a message of a member. Returns false if it makes no sense. */
static inline bool team_take_from_member(Team* t, TeamMember* m) {
    const Message* in = &m->link.in;
    if (in->rank != m->rank || in->rest != 0) { return false; }
    m->sequence = in->sequence;
    m->place = in->place;
    if (in->kind == TEAM_ERROR) {
        fail(&t->failure, "rank %u on host %s: %.*s", m->rank, m->host, (int)in->size, (const char*)in->payload);
        return true;
    }
    if (in->kind != TEAM_GIVE) { return in->kind == TEAM_BEAT; }
    if (m->has_given) { return false; }
    m->has_given = true;
    m->given_size = in->size;
    memcpy(m->given, in->payload, in->size);
    return true;
}

static inline bool team_take(Team* t, TeamMember* m) {
    if (m->link.in.token != t->run.token || m->link.in.size > TEAM_PAYLOAD) { return false; }
    if (m->refused) { return true; }
    if (t->run.rank > 0) { return team_take_from_zero(t, m); }
    return m->joined ? team_take_from_member(t, m) : team_take_hello(t, m);
}

/* Closes a connection. That of a member ends the run, unless the run is at its end. */
static inline void team_lose(Team* t, TeamMember* m, const char* how) {
    link_close(&m->link);
    if (m->joined && !t->ended) { team_blame(t, (int)(m - t->members), how); }
    t->cause.msg[0] = 0;
    if (t->run.rank > 0 && !m->joined) { fail(&t->cause, "what listens there is not rank 0 of this run"); }
}

static inline void team_read(Team* t, TeamMember* m, double now) {
    while (m->link.fd >= 0) {
        const LinkState state = link_receive(&m->link);
        if (state == LINK_WAITS) { return; }
        if (state == LINK_CLOSED) {
            team_lose(t, m, "ended or was killed: its connection closed");
        } else if (!team_take(t, m)) {
            team_lose(t, m, "sent what is no message of this run");
        } else {
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
    snprintf(what, sizeof what, "hangs: it is alone behind all others for %g s", t->hang_seconds);
    team_blame(t, last, what);
}

/* Looks for members that are silent, and drops strangers that are. A rank that rank 0 has not answered waits: rank 0 may be busy
 * with others. */
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
    const bool has_room = t->listener >= 0;
    bool free_slot = false;
    for (int i = 0; i < t->slots; i++) {
        const Link* l = &t->members[i].link;
        const struct pollfd p = {l->fd, (short)(POLLIN | (link_is_sending(l) ? POLLOUT : 0)), 0};
        t->polls[3 + i] = p;
        free_slot = free_slot || (i >= t->run.ranks && l->fd < 0);
    }
    const struct pollfd first[3] = {
        {t->wake[0], POLLIN, 0}, {t->parent_fd, POLLIN, 0}, {has_room && free_slot ? t->listener : -1, POLLIN, 0}};
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
    if (t->polls[2].revents) { team_accept(t); }
    team_work(t);
    team_beat(t, now);
    team_watch(t, now);
}

/* Ends this process, and with it the run. */
LLMC_NORETURN static inline void team_end(Team* t) {
    team_tell_failure(t);
    team_print("error: ", t->failure.msg);
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

static inline void team_wake(Team* t) {
    if (write(t->wake[1], "", 1) < 0) { return; }  // it is full: the thread will wake
}

// ---------------------------------------------------------------------------------------------------------------------
// opening and closing

/* Sets the times that users get: a beat every 2 s, 20 s of silence, 60 s alone behind. No parent is watched. */
static inline void team_init(Team* t) {
    memset(t, 0, sizeof *t);
    t->heartbeat_seconds = 2;
    t->silent_seconds = 20;
    t->hang_seconds = 60;
    t->parent_fd = -1;
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
    t->listener = t->wake[0] = t->wake[1] = t->behind = -1;
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

/* Says after a while what is waited for: on rank 0, and once on each host where rank 0 does not answer. */
static inline void team_tell_waiting(const Team* t) {
    char text[512], missing[128];
    if (t->run.rank == 0) {
        team_list_missing(t, missing, sizeof missing);
        snprintf(text, sizeof text, "%s at %s (%s), port %d", missing, t->run.address, t->numeric, t->run.port);
    } else {
        snprintf(text, sizeof text, "rank 0 at %s, port %d", t->run.address, t->run.port);
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
        fail(&t->failure, "rank 0 did not answer at %s, port %d, within %g s: %s", t->run.address, t->run.port, timeout,
             t->cause.msg);
    }
}

/* Waits until all have joined, or something is wrong: then rank 0 stays for a while, to tell those who come, too. A rank that
 * has joined leaves it to rank 0 how long it waits for the others. */
static inline void team_wait_for_all(Team* t, double timeout) {
    const bool zero = t->run.rank == 0;
    const double begin = now_seconds();
    double until = begin + timeout, next = begin;
    bool told = false, failed = false;
    for (double now = begin; now < until || (!zero && t->members[0].joined); now = now_seconds()) {
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

static inline bool team_join(Team* t, double timeout, Error* e) {
    const Ranks* r = &t->run;
    if (r->rank == 0) { t->listener = link_listen(r->address, r->port, t->numeric, sizeof t->numeric, e); }
    if (r->rank == 0 && t->listener < 0) { return false; }
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

/* Meets the other ranks of `r` within `timeout` seconds and compares the fields (count) with those of rank 0, in their order.
 * team_init() comes first. Fails if a rank is missing, has other fields, or ends meanwhile: all that have come then get the same
 * error; and if rank 0 cannot listen. A run of one rank opens no socket. Do not move the team in memory until it is closed. */
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

/* Says where this rank is. Costs nothing; for the training thread, at each step, bucket (of fewer than 65,536) and phase. */
static inline void team_at(Team* t, TeamPhase phase, uint64_t step, int bucket) {
    __atomic_store_n(&t->place, step << 24 | (uint64_t)(bucket & 0xFFFF) << 8 | (uint64_t)phase, __ATOMIC_RELAXED);
}

/* Gives `bytes` (at most TEAM_PAYLOAD, as many on every rank) and gets those of all ranks, in their order. All ranks call it, one
 * thread of each. If another rank fails meanwhile, this process ends. */
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

/* Tells all other ranks that this one ends, and why: they print the first line of `cause` with its name, and end. For the
 * training thread, before it ends the process with its own error. Takes two seconds at most. */
static inline void team_fail(Team* t, const char* cause) {
    const int length = (int)strcspn(cause, "\n");
    if (!t->open) { return; }
    team_stop_thread(t);
    if (t->run.ranks > 1) {
        fail(&t->failure, "rank %d on host %s: %.*s", t->run.rank, t->host, length, cause);
        team_tell_failure(t);
        if (t->run.rank > 0) { team_send(t, &t->members[0], TEAM_ERROR, cause, size_min((size_t)length, TEAM_PAYLOAD)); }
        team_linger(t, TEAM_LINGER_SECONDS);
    }
    team_free(t);
}

/* The clean end, on all ranks: a barrier, after which they may go. Does nothing if the team is not open. */
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
