/* team_hello.h -- the ranks of a team (team.h) prove that they belong to the run and say who they are; rank 0 takes or refuses
 * them.
 *
 * Both ends of a connection first send random bytes, a NONCE. Each direction then has a token, which all later messages carry:
 *
 *     token = SipHash(key of LLAMA3_TOKEN, direction (1 byte), run's name (8), nonce of rank 0 (16), nonce of the other (16))
 *
 * So the first message with the right token proves that its sender has the key, and the proof is worth nothing on another
 * connection or in the other direction. This guards the meeting, not the wire: whoever reads and changes packets between two
 * ranks sees the tokens and can use them.
 *
 * Rank 0 drops a connection that does not say hello with its token. It has room for TEAM_STRANGERS of them; if all places are
 * taken and another connection waits, the oldest stranger leaves after TEAM_GRACE_SECONDS, so that ranks come through a crowd
 * of connections that say nothing. A rank whose fields differ from rank 0's joins all the same, so that it gets the reason for
 * the end together with all others.
 */
#ifndef LLMC_TEAM_HELLO_H
#define LLMC_TEAM_HELLO_H

#include "llmc/base/utils.h"       // first, since it asks for the functions beyond C11; defines: Error, fail
#include "llmc/base/hash.h"        // defines: siphash
#include "llmc/dist/link.h"        // defines: Message, link_begin, link_close, link_connect
#include "llmc/dist/team_state.h"  // defines: Team, TeamMember, TeamField, TeamHello, team_send

#include <sys/random.h>

// ---------------------------------------------------------------------------------------------------------------------
// both ends draw bytes

/* Begins a connection with this end's NONCE. */
static inline void team_begin(Team* t, TeamMember* m, int fd) {
    memset(m, 0, sizeof *m);
    link_begin(&m->link, fd);
    if (getrandom(m->nonce, sizeof m->nonce, 0) != (ssize_t)sizeof m->nonce) {
        fail(&t->failure, "the system gives no random numbers: %s", strerror(errno));
        return;
    }
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

// ---------------------------------------------------------------------------------------------------------------------
// rank 0 gets a hello

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
    team_send(t, seat, TEAM_JOINED, t->host, sizeof t->host);
}

/* Ends the run if a member's value differs from rank 0's. */
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
    if (m->fields_seen >= (uint32_t)t->count) { return; }  // their number differs, which was reported
    const TeamField* ours = &t->fields[m->fields_seen];
    snprintf(name, sizeof name, "%.*s", TEAM_NAME - 1, (const char*)payload);
    snprintf(value, sizeof value, "%.*s", TEAM_VALUE - 1, (const char*)payload + TEAM_NAME);
    team_compare(t, m, "a field", name, ours->name);
    team_compare(t, m, name, value, ours->value);
}

/* Takes a message from a rank that has not joined. Returns false if it makes no sense. */
static inline bool team_receive_hello(Team* t, TeamMember* m) {
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

/* Returns the place for one more stranger: a free place, or the place of the stranger who has owed its hello longest, if that
 * is long enough. NULL: there is none now. */
static inline TeamMember* team_place(Team* t, double now) {
    TeamMember* oldest = NULL;
    for (TeamMember* m = t->members + t->run.ranks; m < t->members + t->slots; m++) {
        if (m->link.fd < 0) { return m; }
        if (!m->greeted && (!oldest || m->link.heard < oldest->link.heard)) { oldest = m; }
    }
    return oldest && now - oldest->link.heard >= TEAM_GRACE_SECONDS ? oldest : NULL;
}

static inline void team_accept(Team* t, double now) {
    for (TeamMember* m = team_place(t, now); m; m = team_place(t, now)) {
        const int fd = accept4(t->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) { return; }
        link_close(&m->link);
        team_begin(t, m, fd);
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
        t->turned_away = false;
        return;
    }
    if (!t->turned_away) {
        t->cause.msg[0] = 0;
        fail(&t->cause, "what listens there says nothing");
    }
    team_begin(t, &t->members[0], fd);
}

#endif
