/* team_state.h -- a rank's knowledge of its team (team.h), and how it sends to the others.
 *
 * Rank 0 listens on the run's address; every other rank has one connection, to rank 0, over which messages of one size go
 * (link.h):
 *
 *   NONCE   both    the first message: random bytes, from which both ends make the tokens of all later messages (team.h)
 *   HELLO   to 0    the number of ranks and the program's version, which must equal rank 0's; the host
 *   JOINED  from 0  the host of rank 0. START: all have joined; rank 0 then no longer listens
 *   BEAT    both    every heartbeat_seconds. It has only the head of every message: where the sender is
 *   GIVE    to 0    this rank's part of a collective. RESULT from 0: the parts of all, in as many messages as they need
 *   ERROR   to 0    the cause why this rank ends. From 0: the line that is printed, in as many messages as it needs
 *   PRINTED from 0  before an ERROR: the host where the rank that fails prints its error itself
 */
#ifndef LLMC_TEAM_STATE_H
#define LLMC_TEAM_STATE_H

#include "llmc/base/utils.h"  // first, since it asks for the functions beyond C11; defines: Error, fail, size_min, now_seconds
#include "llmc/dist/link.h"   // defines: Link, Message, link_send, link_flush, link_receive, link_close
#include "llmc/dist/ranks.h"  // defines: Ranks

#include <pthread.h>

enum {
    TEAM_PAYLOAD = MESSAGE_PAYLOAD,  // most bytes that a rank gives to a collective
    TEAM_HOST = 72,                  // bytes of a host's name, with the NUL
    TEAM_VERSION = 32,
    TEAM_RANDOM = 16,         // bytes of a NONCE
    TEAM_STRANGERS = 256,     // connections that have not said hello
    TEAM_GRACE_SECONDS = 1,   // how long a stranger keeps its place if others wait for one
    TEAM_LINGER_SECONDS = 2,  // stays so long to pass on why the run ends
    TEAM_CONNECT_SECONDS = 3,
    TEAM_PATIENCE = 12,  // a rank that is connected, but gets no answer, waits this many times as long
};

/* A rank's current activity. Only PHASE_STEP has a limit of time. */
typedef enum {
    PHASE_STARTING,
    PHASE_LOADING,
    PHASE_PREPARING,
    PHASE_STEP,
    PHASE_VALIDATION,
    PHASE_SAMPLING,
    PHASE_WRITING,
    PHASES
} TeamPhase;

typedef enum {
    TEAM_NONCE = 1,
    TEAM_HELLO,
    TEAM_JOINED,
    TEAM_START,
    TEAM_BEAT,
    TEAM_GIVE,
    TEAM_RESULT,
    TEAM_ERROR,
    TEAM_PRINTED,
    TEAM_KINDS
} TeamKind;

/* The payload of HELLO. */
typedef struct {
    uint32_t ranks;
    char host[TEAM_HOST], version[TEAM_VERSION];
} TeamHello;

/* The other end of a connection. */
typedef struct {
    Link link;
    unsigned char nonce[TEAM_RANDOM];  // that this process drew
    bool met;                          // the other end's NONCE has come, so that the next two are valid
    uint64_t says, hears;              // tokens of the messages to it and from it
    bool joined, refused;              // its HELLO has come
    uint32_t rank;
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
    TeamHello hello;  // of this rank
    pthread_t thread;
    int wake[2];     // a pipe: a byte ends the thread's poll()
    uint64_t place;  // where the training thread is (team_at()); atomic

    // shared by the training thread and the other, under the mutex
    pthread_mutex_t mutex;
    pthread_cond_t given;  // `asked` is false again
    bool asked;            // the training thread waits in a collective
    bool closing;          // the current collective is the last one
    bool quit;
    uint64_t sequence;  // of collectives
    size_t bytes;       // each rank's part
    unsigned char mine[TEAM_PAYLOAD];
    unsigned char* all;  // (ranks, bytes)

    // the thread's own
    int listener;          // -1: none
    char numeric[64];      // its address in digits
    TeamMember* members;   // (slots). Rank 0: the ranks, then strangers; members[0] is itself. Others: rank 0
    struct pollfd* polls;  // (3 + slots)
    int slots, arrived;    // arrived: members that have joined, with this one
    bool started, collecting;
    bool ended;  // the last collective is done: connections may close
    uint64_t entered;
    double turned, beaten;  // when the loop ran last, and when it sent its last beat
    int behind;             // rank 0: who alone is behind all others, -1: nobody; since when, and where it was then
    double behind_since;
    uint64_t behind_sequence, behind_place;
    Error failure;               // why the run ends
    bool lost;                   // the cause: this rank has found that another one is lost
    char printed_on[TEAM_HOST];  // the host that has printed the cause already; "": none
    Error cause;                 // why rank 0 could not be reached
    bool turned_away;            // the cause: what listens there ended the last connection
    char text[1024];
    size_t text_size;  // bytes so far of an ERROR that is being read
    size_t missing;    // bytes of a RESULT that have not come
} Team;

/* Returns whether a message has a known kind, and a length that messages of this kind have. */
static inline bool team_fits(const Message* m) {
    static const struct {
        uint32_t least, most;  // bytes of the payload
        bool more;             // others may continue it
    } sizes[TEAM_KINDS] = {
        {1, 0, false},                                  // no message has kind 0
        {TEAM_RANDOM, TEAM_RANDOM, false},              // NONCE
        {sizeof(TeamHello), sizeof(TeamHello), false},  // HELLO
        {TEAM_HOST, TEAM_HOST, false},                  // JOINED
        {0, 0, false},                                  // START
        {0, 0, false},                                  // BEAT
        {0, TEAM_PAYLOAD, false},                       // GIVE
        {0, TEAM_PAYLOAD, true},                        // RESULT
        {1, TEAM_PAYLOAD, true},                        // ERROR
        {1, TEAM_HOST - 1, false},                      // PRINTED
    };
    if (m->kind >= TEAM_KINDS || m->size < sizes[m->kind].least || m->size > sizes[m->kind].most) { return false; }
    return m->rest == 0 || (sizes[m->kind].more && m->size == TEAM_PAYLOAD);
}

// ---------------------------------------------------------------------------------------------------------------------
// words

/* Writes where a rank was: "in step 1200", "in phase writing, step 1200". */
static inline void team_seen(char* out, size_t cap, uint64_t place) {
    static const char* const names[PHASES] = {"starting", "loading", "preparing", "step", "validation", "sampling", "writing"};
    const unsigned phase = place & 0xFF;  // another process's byte may be any number
    const unsigned long long step = place >> 8;
    if (phase == PHASE_STEP) {
        snprintf(out, cap, "in step %llu", step);
    } else {
        snprintf(out, cap, step ? "in phase %s, step %llu" : "in phase %s", phase < PHASES ? names[phase] : "unknown", step);
    }
}

/* Records that the run ends because of member `rank`. */
static inline void team_blame(Team* t, int rank, const char* what) {
    const TeamMember* m = &t->members[rank];
    char seen[64];
    team_seen(seen, sizeof seen, m->place);
    t->lost = t->lost || !t->failure.msg[0];
    fail(&t->failure, "rank %d on host %s %s, last seen %s", rank, m->host, what, seen);
}

/* Prints a line on stderr, unless nobody takes it. stdio may be locked by a thread that is stuck. */
static inline void team_print(const char* kind, const char* text) {
    char line[1100];
    const int n = snprintf(line, sizeof line, "%s%s\n", kind, text);
    if (os_wait(STDERR_FILENO, POLLOUT, 1) && write(STDERR_FILENO, line, (size_t)n) < 0) { return; }
}

// ---------------------------------------------------------------------------------------------------------------------
// sending

/* Sends a text or table in as many messages as it needs, one at least. */
static inline void team_send(Team* t, TeamMember* to, TeamKind kind, const void* data, size_t size) {
    const unsigned char* from = (const unsigned char*)data;
    do {
        Message m;
        memset(&m, 0, sizeof m);
        m.token = to->says;
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

/* Rank 0 sends all others the reason why the run ends. */
static inline void team_send_failure(Team* t) {
    if (t->run.rank > 0) { return; }
    if (t->printed_on[0]) { team_send_all(t, TEAM_PRINTED, t->printed_on, strlen(t->printed_on)); }
    team_send_all(t, TEAM_ERROR, t->failure.msg, strlen(t->failure.msg));
}

/* Records that the run ends for an error that a rank on this host prints itself. */
static inline void team_note_cause(Team* t, int rank, const char* host, const char* cause, int length) {
    if (t->failure.msg[0]) { return; }
    snprintf(t->printed_on, sizeof t->printed_on, "%s", host);
    fail(&t->failure, "rank %d on host %s: %.*s", rank, host, length, cause);
}

/* Returns whether this rank prints why the run ends. One rank of a host does: its first, or its second if the first is rank 0
 * and lost. */
static inline bool team_speaks(const Team* t) {
    const bool beside_lost_zero = t->run.rank > 0 && t->lost && t->run.rank == t->run.local_rank;
    return strcmp(t->printed_on, t->hello.host) != 0 && t->run.local_rank == (beside_lost_zero ? 1 : 0);
}

/* Sends all pending bytes and waits until the other ends have closed. Closing a connection with unread bytes would reset it,
 * and the other end might lose bytes that it has not read. */
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

#endif
