/* team_hello.h -- the ranks of a team (team.h) say who they are, and rank 0 takes or refuses them.
 *
 * Rank 0 drops a connection that does not say hello with the token of the run. A rank whose fields differ from rank 0's joins
 * all the same, so that it gets the reason for the end together with all others.
 */
#ifndef LLMC_TEAM_HELLO_H
#define LLMC_TEAM_HELLO_H

#include "llmc/base/utils.h"       // first, since it asks for the functions beyond C11; defines: Error, fail
#include "llmc/dist/link.h"        // defines: Message, link_begin, link_connect
#include "llmc/dist/team_state.h"  // defines: Team, TeamMember, TeamField, TeamHello, team_send

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

#endif
