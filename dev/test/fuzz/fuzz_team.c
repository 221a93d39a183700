/* fuzz_team.c -- gives the bytes as messages to a rank of a run (llmc/dist/team.h): to rank 0 of three, from members and
 * strangers, or to rank 1, from rank 0. The sender has the key, so every token is right. Nothing may be read or written behind
 * a message or a buffer, and an error is one printable line.
 *
 * The first byte gives this rank, and whether all have met. Each message then has seven bytes for kind, sender, rank, sequence,
 * size and rest (2), and its payload. Kind 0 begins a collective of this rank. The bytes that a collective gathers are compared
 * as texts. */
#include "fuzz.h"
#include "llmc/dist/agree.h"
#include "llmc/dist/team.h"

enum { RANKS = 3, HEAD = 7, MOST_MESSAGES = 64 };

/* A rank's state between two messages. */
static void check(const Team* t) {
    REQUIRE(t->arrived >= 1 && t->arrived <= RANKS && t->text_size < sizeof t->text);
    REQUIRE(t->missing <= RANKS * t->bytes && strlen(t->printed_on) < sizeof t->printed_on);
    for (int i = 0; i < t->slots && i < RANKS + 2; i++) {
        REQUIRE(strlen(t->members[i].host) < TEAM_HOST && t->members[i].given_size <= TEAM_PAYLOAD);
    }
    fuzz_check_error(!t->failure.msg[0], &t->failure);
    for (const char* s = t->failure.msg; *s; s++) { REQUIRE((unsigned char)*s >= ' ' || *s == '\t'); }
}

/* Compares the parts of a collective that is done, in memory that ends where they end. */
static void compare(const Team* t) {
    const size_t size = RANKS * t->bytes;
    char* all = (char*)xmalloc(size);
    Error e = NO_ERROR;
    memcpy(all, t->all, size);
    const bool same = agree_texts("a field", all, RANKS, t->bytes, &e);
    fuzz_check_error(same, &e);
    free(all);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size == 0) { return 0; }
    const bool zero = !(data[0] & 1), met = data[0] & 2;
    Ranks run;
    Team t;
    memset(&run, 0, sizeof run);
    run.ranks = run.local_ranks = RANKS;
    run.rank = run.local_rank = !zero;
    team_init(&t);
    team_prepare(&t, &run, "1");
    for (int i = zero; met && i < (zero ? RANKS : 1); i++) {
        t.members[i].met = t.members[i].joined = true;
        t.members[i].rank = (uint32_t)i;
        t.arrived += zero;
    }
    t.started = met;
    size_t at = 1;
    for (int i = 0; i < MOST_MESSAGES && at + HEAD <= size && !t.failure.msg[0]; i++) {
        const uint8_t* head = data + at;
        TeamMember* m = &t.members[zero ? 1 + head[1] % (RANKS + 1) : 0];
        Message in;
        memset(&in, 0, sizeof in);
        in.token = head[0] == TEAM_NONCE ? 0 : m->hears;
        in.kind = head[0];
        in.rank = head[2];
        in.sequence = head[3];
        in.place = (uint64_t)head[3] << 8 | head[1];
        in.size = head[4];
        in.rest = (uint32_t)(head[5] | head[6] << 8);
        at += HEAD;
        const size_t n = size_min(size_min(in.size, TEAM_PAYLOAD), size - at);
        memcpy(in.payload, data + at, n);
        at += n;
        if (in.kind == 0) {
            if (t.asked || !t.started || in.size > TEAM_PAYLOAD) { continue; }
            memcpy(t.mine, in.payload, TEAM_PAYLOAD);
            t.bytes = in.size;
            t.sequence++;
            t.asked = true;
        } else {
            m->link.in = in;
            if (!team_receive(&t, m)) {
                team_lose(&t, m, "sent what is no message of this run");
                if (!m->joined) { team_begin(&t, m, -1); }  // another connection takes the place
            }
        }
        const bool waits = t.asked;
        team_work(&t);
        if (waits && !t.asked) { compare(&t); }
        check(&t);
    }
    team_watch(&t, now_seconds());
    check(&t);
    team_free(&t);
    return 0;
}
