/* test_team.c -- the ranks of a run as a team: real processes that meet over loopback, gather, fail and end. */
#include "dev/test/test.h"
#include "llmc/dist/team.h"
#include "llmc/dist/agree.h"
#include <dirent.h>
#include <sys/mman.h>
#include <sys/wait.h>

enum { MOST = 17, PATIENCE = 60 };  // children of a group; seconds after which a test gives up

typedef struct {
    pid_t pid;
    int err;  // its output on stderr
    char text[4096];
    size_t used;
    int status;  // of waitpid()
    bool ended;
} Child;

/* Processes of one run. Every child opens its team with these settings. */
typedef struct {
    Ranks run;
    char version[TEAM_VERSION];
    double timeout, heartbeat, silent, hang;
    double reads;                  // rank 0 listens, and reads its files for so many seconds; 0: it does not
    int parent[2];                 // the pipe of the parent; -1: none
    int ready[2], go[2];           // pipes: one gets a byte from each child that has opened its team, the other a byte for each
                                   // child that may continue
    bool apart;                    // each rank is the first rank of a host, so that each prints why the run ends
    int odd;                       // the rank that behaves differently; -1: none
    void (*body)(Team*, int odd);  // a child's work between opening and closing
    int count;
    Child child[MOST];
} Group;

static char host[TEAM_HOST];

static void nap(double seconds) { poll(NULL, 0, (int)(1e3 * seconds)); }

/* Returns a free port of loopback, outside of the range from which the system gives ports to programs. */
static int free_port(void) {
    static int next;
    for (;;) {
        Error e = NO_ERROR;
        char numeric[64];
        const int port = 20000 + ((int)getpid() * 37 + next++) % 12000;
        const int fd = link_listen("127.0.0.1", port, numeric, sizeof numeric, &e);
        if (fd < 0) { continue; }
        close(fd);
        return port;
    }
}

static void group_init(Group* g, int ranks, void (*body)(Team*, int)) {
    memset(g, 0, sizeof *g);
    g->run.ranks = g->run.local_ranks = ranks;
    snprintf(g->run.address, sizeof g->run.address, "127.0.0.1");
    g->run.port = free_port();
    g->run.key.low = 0x1234567890ABCDEFu ^ (uint64_t)getpid();
    g->run.launcher = "--gpus";
    g->timeout = PATIENCE;
    g->heartbeat = 0.1;
    g->silent = 20;
    g->apart = true;
    g->parent[0] = g->parent[1] = g->odd = -1;
    g->body = body;
    if (pipe(g->ready) != 0 || pipe(g->go) != 0) { die("pipe: %s", strerror(errno)); }
}

static void child_run(Group* g, int rank) {
    Team t;
    Error e = NO_ERROR;
    alarm(2 * PATIENCE);
    if (g->parent[1] >= 0) { close(g->parent[1]); }
    close(g->go[1]);
    g->run.rank = rank;
    g->run.local_rank = g->apart ? 0 : rank;
    team_init(&t);
    t.heartbeat_seconds = g->heartbeat;
    t.silent_seconds = g->silent;
    t.hang_seconds = g->hang;
    t.parent_fd = g->parent[0];
    if (g->reads > 0 && rank == 0) {
        must(team_listen(&t, &g->run, &e), &e);
        nap(g->reads);
    }
    if (!team_open(&t, &g->run, g->version, g->timeout, &e)) { die("%s", e.msg); }
    if (g->apart && rank != g->odd) { snprintf(t.hello.host, TEAM_HOST, "another"); }
    if (write(g->ready[1], "", 1) != 1) { die("ready: %s", strerror(errno)); }
    g->body(&t, g->odd);
    team_close(&t);
    exit(0);
}

/* Starts one more child as this rank. */
static Child* start(Group* g, int rank) {
    Child* c = &g->child[g->count++];
    int err[2];
    if (pipe(err) != 0) { die("pipe: %s", strerror(errno)); }
    fflush(stdout);
    c->pid = fork();
    if (c->pid == 0) {
        dup2(err[1], STDERR_FILENO);
        close(err[0]);
        close(err[1]);
        child_run(g, rank);
    }
    close(err[1]);
    c->err = err[0];
    return c;
}

static void start_all(Group* g) {
    for (int r = 0; r < g->run.ranks; r++) { start(g, r); }
}

/* Waits until `count` more children have opened their team. */
static void await_ready(Group* g, int count) {
    char byte;
    struct pollfd p = {g->ready[0], POLLIN, 0};
    for (int i = 0; i < count; i++) {
        if (poll(&p, 1, 1000 * PATIENCE) != 1 || read(g->ready[0], &byte, 1) != 1) {
            CHECK(false, "%d of %d ranks opened their team", i, count);
            return;
        }
    }
}

/* Lets `count` children continue that wait in wait_to_go(). */
static void let_go(Group* g, int count) {
    for (int i = 0; i < count; i++) {
        if (write(g->go[1], "", 1) != 1) { die("go: %s", strerror(errno)); }
    }
}

/* Reads what a child prints until it ends; kills it if it does not. */
static void await_end(Child* c) {
    struct pollfd p = {c->err, POLLIN, 0};
    const double until = now_seconds() + PATIENCE;
    for (ssize_t n = 1; n > 0 && !c->ended;) {
        if (poll(&p, 1, (int)(1e3 * fmax(0, until - now_seconds()))) != 1) {
            CHECK(false, "a rank does not end; it has printed: %s", c->text);
            break;
        }
        n = read(c->err, c->text + c->used, sizeof c->text - 1 - c->used);
        c->used += n > 0 ? (size_t)n : 0;
    }
    if (c->ended) { return; }
    if (now_seconds() >= until) { kill(c->pid, SIGKILL); }
    waitpid(c->pid, &c->status, 0);
    close(c->err);
    c->ended = true;
}

static void group_end(Group* g) {
    for (int i = 0; i < g->count; i++) { await_end(&g->child[i]); }
    for (int i = 0; i < 2; i++) {
        close(g->ready[i]);
        close(g->go[i]);
        if (g->parent[i] >= 0) { close(g->parent[i]); }
    }
}

/* Returns a child's output without the line that it waits for others: any child may print this line after a long wait. */
static const char* said(const Child* c) {
    const char* newline = strchr(c->text, '\n');
    return newline && strncmp(c->text, "waiting for ", 12) == 0 ? newline + 1 : c->text;
}

/* The child ended with status 0 and said nothing. */
static void expect_success(Child* c) {
    await_end(c);
    CHECK(WIFEXITED(c->status) && WEXITSTATUS(c->status) == 0 && !*said(c), "status %x: %s", (unsigned)c->status, c->text);
}

/* A run of so many ranks ends well. */
static void all_succeed(int ranks, void (*body)(Team*, int)) {
    Group g;
    group_init(&g, ranks, body);
    start_all(&g);
    for (int r = 0; r < ranks; r++) { expect_success(&g.child[r]); }
    group_end(&g);
}

/* The child ended with status 1 and said this error alone. */
LLMC_PRINTF(2, 3) static void expect_error(Child* c, const char* fmt, ...) {
    char wanted[1024], line[1100];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(wanted, sizeof wanted, fmt, ap);
    va_end(ap);
    snprintf(line, sizeof line, "error: %s\n", wanted);
    await_end(c);
    CHECK(WIFEXITED(c->status) && WEXITSTATUS(c->status) == 1, "status %x: %s", (unsigned)c->status, c->text);
    CHECK(strcmp(said(c), line) == 0, "wanted %s    but it printed: %s", line, c->text);
}

/* Connects as anybody may, once rank 0 listens. */
static int connect_to(const Group* g) {
    for (int i = 0; i < 20 * PATIENCE; i++) {
        Error e = NO_ERROR;
        const int fd = link_connect(g->run.address, g->run.port, 5, &e);
        if (fd >= 0) { return fd; }
        nap(0.05);
    }
    CHECK(false, "rank 0 does not listen");
    return -1;
}

// ---------------------------------------------------------------------------------------------------------------------
// what the children do

static void wait_to_go(Group* g) {
    char byte;
    if (read(g->go[0], &byte, 1) != 1) { die("go: %s", strerror(errno)); }
}

static Group* this_group;  // of a child that waits

static void do_nothing(Team* t, int odd) { (void)t, (void)odd; }

static unsigned char byte_of(int round, int rank, size_t i) { return (unsigned char)(31 * round + 7 * rank + (int)i); }

static void gather_rounds(Team* t, int rounds) {
    static unsigned char all[MOST * TEAM_PAYLOAD];
    for (int round = 0; round < rounds; round++) {
        Error e = NO_ERROR;
        unsigned char mine[TEAM_PAYLOAD];
        const size_t bytes = round % 3 == 0 ? 8 : (size_t)(round * 5) % (TEAM_PAYLOAD + 1);
        for (size_t i = 0; i < bytes; i++) { mine[i] = byte_of(round, t->run.rank, i); }
        memset(all, 0, sizeof all);
        must(team_gather(t, mine, bytes, all, &e), &e);
        for (int r = 0; r < t->run.ranks; r++) {
            for (size_t i = 0; i < bytes; i++) {
                if (all[(size_t)r * bytes + i] != byte_of(round, r, i)) { die("round %d: byte %zu of rank %d", round, i, r); }
            }
        }
    }
}

static void gather_1000(Team* t, int odd) {
    (void)odd;
    gather_rounds(t, 1000);
}

static void wait_and_gather(Team* t, int odd) {
    (void)odd;
    gather_rounds(t, 5);
    team_at(t, PHASE_STEP, 1200);
    gather_rounds(t, 1);  // reports to the others where this rank is
    if (write(this_group->ready[1], "", 1) != 1) { die("ready: %s", strerror(errno)); }
    wait_to_go(this_group);
    gather_rounds(t, 50);
}

// ---------------------------------------------------------------------------------------------------------------------
// gathering

TEST(a_place_reads_well) {
    static const struct {
        TeamPhase phase;
        int64_t step;
        const char* text;
    } cases[] = {{PHASE_STEP, 1200, "in step 1200"},
                 {PHASE_WRITING, 1000000000000, "in phase writing, step 1000000000000"},
                 {PHASE_STARTING, 0, "in phase starting"},
                 {PHASE_VALIDATION, 3, "in phase validation, step 3"},
                 {(TeamPhase)200, 0, "in phase unknown"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Team t;
        char seen[64];
        team_at(&t, cases[i].phase, cases[i].step);
        team_seen(seen, sizeof seen, t.place);
        CHECK(strcmp(seen, cases[i].text) == 0, "%s", seen);
    }
}

static int open_files(void) {
    int count = 0;
    DIR* dir = opendir("/proc/self/fd");
    while (dir && readdir(dir)) { count++; }
    if (dir) { closedir(dir); }
    return count;
}

TEST(one_rank_alone_opens_no_socket) {
    Team t;
    Error e = NO_ERROR;
    Ranks alone;
    int all = 0;
    const int seven = 7, before = open_files();
    memset(&alone, 0, sizeof alone);
    alone.ranks = alone.local_ranks = 1;
    team_init(&t);
    CHECK(t.heartbeat_seconds == 2 && t.silent_seconds == 20 && t.hang_seconds == 60 && t.parent_fd == -1, "defaults");
    CHECK(team_open(&t, &alone, "", 1, &e), "%s", e.msg);
    CHECK(open_files() == before, "%d files were open, now %d", before, open_files());
    CHECK(team_gather(&t, &seven, sizeof seven, &all, &e) && all == 7, "got %d", all);
    CHECK(team_barrier(&t, &e), "%s", e.msg);
    team_at(&t, PHASE_STEP, 1);
    team_close(&t);
    team_close(&t);
    CHECK(!team_barrier(&t, &e) && strstr(e.msg, "closed"), "closed: %s", e.msg);
}

TEST(all_ranks_get_the_bytes_of_all_in_order) {
    static const int counts[] = {2, 8, 16};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        const double begin = now_seconds();
        all_succeed(counts[i], gather_1000);
        printf("    1000 rounds of %d ranks: %.2f s\n", counts[i], now_seconds() - begin);
    }
}

TEST(what_is_sent_last_arrives_though_it_is_read_late) {
    enum { COUNT = 4000 };  // more than the system takes at once
    int pair[2], count = 0, status = 0;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) == 0, "no sockets");
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        Team t;
        TeamMember m;
        close(pair[1]);
        team_init(&t);
        memset(&m, 0, sizeof m);
        link_begin(&m.link, pair[0]);
        m.joined = true;
        t.members = &m;
        t.slots = 1;
        for (int i = 0; i < COUNT; i++) { team_send(&t, &m, TEAM_BEAT, NULL, 0); }
        team_linger(&t, PATIENCE);
        _exit(0);
    }
    close(pair[0]);
    nap(0.1);
    Link l;
    link_begin(&l, pair[1]);
    for (LinkState state = LINK_WAITS; state != LINK_CLOSED; state = link_receive(&l)) {
        struct pollfd p = {l.fd, POLLIN, 0};
        count += state == LINK_MESSAGE && l.in.kind == TEAM_BEAT;
        if (state == LINK_WAITS && poll(&p, 1, 1000 * PATIENCE) != 1) { break; }
    }
    CHECK(count == COUNT, "%d of %d messages came", count, COUNT);
    link_close(&l);
    waitpid(child, &status, 0);
}

/* Each value is the largest at another rank; the last is the same on all. */
static void bring_values(Team* t, int odd) {
    int values[] = {t->run.rank, -t->run.rank, t->run.rank == 1 ? 1 << 30 : 7, -3};
    (void)odd;
    agree_most(t, values, 4);
    if (values[0] != t->run.ranks - 1 || values[1] != 0 || values[2] != 1 << 30 || values[3] != -3) {
        die("%d %d %d %d", values[0], values[1], values[2], values[3]);
    }
}

TEST(ranks_agree_on_the_largest_values) {
    all_succeed(3, bring_values);
    int alone = 5;
    agree_most(NULL, &alone, 1);
    CHECK(alone == 5, "a process alone: %d", alone);
}

/* Texts of other processes may lack their NUL: nothing behind their bytes is read. */
TEST(texts_without_an_end_are_compared_within_their_bytes) {
    enum { RANKS = 3, PAGE = 4096 };
    char* pages = (char*)mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED && mprotect(pages + PAGE, PAGE, PROT_NONE) == 0, "no memory with an end");
    char* all = pages + PAGE - RANKS * TEAM_PAYLOAD;
    memset(all, 'A', RANKS * TEAM_PAYLOAD);
    Error e = NO_ERROR;
    CHECK(agree_texts("--lr", all, RANKS, TEAM_PAYLOAD, &e) && !e.msg[0], "equal texts: %s", e.msg);
    all[RANKS * TEAM_PAYLOAD - 1] = 'B';
    CHECK(!agree_texts("--lr", all, RANKS, TEAM_PAYLOAD, &e), "the last byte differs");
    CHECK(strncmp(e.msg, "rank 2: --lr is \"AAA", 20) == 0 && strstr(e.msg, "AAB\", but rank 0 has \"AAA"), "%s", e.msg);
    munmap(pages, 2 * PAGE);
}

static void too_many_bytes(Team* t, int odd) {
    Error e = NO_ERROR;
    char mine[TEAM_PAYLOAD + 1] = {0}, all[2 * sizeof mine];
    (void)odd;
    if (team_gather(t, mine, sizeof mine, all, &e) || !strstr(e.msg, "217 bytes, wanted at most 216")) { die("%s", e.msg); }
}

TEST(a_part_that_is_too_large_is_refused) { all_succeed(2, too_many_bytes); }

TEST(teams_open_and_close_again_and_again) {
    for (int i = 0; i < 20; i++) { all_succeed(5, do_nothing); }
}

static void odd_sequence(Team* t, int odd) {
    gather_rounds(t, 4);
    if (t->run.rank == odd) { t->sequence++; }
    gather_rounds(t, 1);
}

static void odd_size(Team* t, int odd) {
    Error e = NO_ERROR;
    char mine[16] = {0}, all[3 * sizeof mine];
    must(team_gather(t, mine, t->run.rank == odd ? 4 : 16, all, &e), &e);
}

TEST(a_rank_in_another_collective_is_named) {
    Group g;
    group_init(&g, 3, odd_sequence);
    g.odd = 2;
    start_all(&g);
    for (int r = 0; r < 3; r++) {
        expect_error(&g.child[r], "rank 2 on host %s gives 8 bytes to collective 6, but rank 0 gives 8 bytes to collective 5",
                     host);
    }
    group_end(&g);
    group_init(&g, 3, odd_size);
    g.odd = 1;
    start_all(&g);
    for (int r = 0; r < 3; r++) {
        expect_error(&g.child[r], "rank 1 on host %s gives 4 bytes to collective 1, but rank 0 gives 16 bytes to collective 1",
                     host);
    }
    group_end(&g);
}

// ---------------------------------------------------------------------------------------------------------------------
// meeting

static void rank_0_waits_for_late_ranks_and_says_so(void) {
    Group g;
    char line[256];
    group_init(&g, 4, gather_1000);
    start(&g, 2);
    nap(0.3);  // it finds nobody at first
    struct pollfd p = {start(&g, 0)->err, POLLIN, 0};
    CHECK(poll(&p, 1, 1000 * PATIENCE) == 1, "it says nothing");
    start(&g, 1);
    start(&g, 3);
    expect_success(&g.child[1]);
    snprintf(line, sizeof line, "waiting for ranks 1, 3 of 4 at 127.0.0.1 (127.0.0.1), port %d\n", g.run.port);
    CHECK(strcmp(g.child[1].text, line) == 0, "%s", g.child[1].text);
    for (int i = 0; i < 4; i++) {
        if (i != 1) { expect_success(&g.child[i]); }
    }
    group_end(&g);
}

static void missing_ranks_are_named_at_the_deadline(void) {
    Group g;
    group_init(&g, 12, do_nothing);
    g.timeout = 6;
    start(&g, 0);
    g.timeout = 3;  // until rank 0 is reached; then rank 0 decides
    start(&g, 3);
    for (int i = 0; i < 2; i++) {
        expect_error(&g.child[i],
                     "ranks 1, 2, 4, 5, 6, 7, 8, 9 and 2 more of 12 did not join at 127.0.0.1 (127.0.0.1), port %d, within 6 s",
                     g.run.port);
    }
    group_end(&g);
    group_init(&g, 2, do_nothing);
    g.timeout = 3;
    g.apart = true;
    start(&g, 1);
    expect_error(&g.child[0], "rank 0 did not answer at 127.0.0.1, port %d, within 3 s: Connection refused", g.run.port);
    char line[128];
    snprintf(line, sizeof line, "waiting for rank 0 at 127.0.0.1, port %d: Connection refused\n", g.run.port);
    CHECK(strncmp(g.child[0].text, line, strlen(line)) == 0, "%s", g.child[0].text);
    group_end(&g);
}

static void a_rank_0_that_reads_its_files_is_waited_for(void) {
    Group g;
    group_init(&g, 2, gather_1000);
    g.reads = 3;
    start(&g, 0);
    close(connect_to(&g));  // now it listens
    g.timeout = 0.5;        // rank 1 would not wait longer for a rank 0 that does not listen
    start(&g, 1);
    expect_success(&g.child[1]);
    expect_success(&g.child[0]);
    group_end(&g);
}

static void a_rank_of_another_run_or_key_is_turned_away(void) {
    Group g;
    group_init(&g, 3, gather_1000);
    start(&g, 0);
    start(&g, 1);
    close(connect_to(&g));
    g.timeout = 3;
    g.apart = true;
    g.run.name++;
    Child* other_run = start(&g, 2);
    g.run.name--;
    g.run.key.high++;
    Child* other_key = start(&g, 2);
    g.run.key.high--;
    g.timeout = PATIENCE;
    g.apart = false;
    for (int i = 0; i < 2; i++) {
        Child* c = i ? other_key : other_run;
        char line[160];
        expect_error(
            c,
            "rank 0 did not answer at 127.0.0.1, port %d, within 3 s: what listens there is not rank 0 of this run, or "
            "has another LLAMA3_TOKEN",
            g.run.port);
        snprintf(line, sizeof line, "waiting for rank 0 at 127.0.0.1, port %d: what listens there is not rank 0 of",
                 g.run.port);
        CHECK(strncmp(c->text, line, strlen(line)) == 0, "%s", c->text);  // known long before the time is over
    }
    start(&g, 2);
    expect_success(&g.child[0]);
    expect_success(&g.child[1]);
    expect_success(&g.child[4]);
    group_end(&g);
}

static void a_rank_of_another_version_is_refused_on_every_rank(void) {
    Group g;
    group_init(&g, 4, do_nothing);
    snprintf(g.version, sizeof g.version, "1.2");
    start(&g, 0);
    start(&g, 1);
    snprintf(g.version, sizeof g.version, "1.3");
    start(&g, 3);
    snprintf(g.version, sizeof g.version, "1.2");
    nap(0.5);  // rank 2 comes later and hears of the error, too
    start(&g, 2);
    for (int i = 0; i < 4; i++) {
        expect_error(&g.child[i], "rank 3 on host %s: the version of llama3.c is \"1.3\", but rank 0 has \"1.2\"", host);
    }
    group_end(&g);
}

TEST(versions_are_compared_to_their_last_byte) {
    for (int same = 0; same < 2; same++) {
        Group g;
        group_init(&g, 2, do_nothing);
        memset(g.version, 'x', TEAM_VERSION - 1);
        start(&g, 0);
        if (!same) { g.version[TEAM_VERSION - 2] = 'y'; }
        start(&g, 1);
        for (int i = 0; i < 2; i++) {
            await_end(&g.child[i]);
            CHECK(WEXITSTATUS(g.child[i].status) == !same, "same %d: %s", same, g.child[i].text);
            CHECK(same || strstr(g.child[i].text, "xxy\", but rank 0 has \"xxx"), "%s", g.child[i].text);
        }
        group_end(&g);
    }
}

TEST(another_number_of_ranks_is_refused) {
    for (int i = 0; i < 2; i++) {
        Group g;
        group_init(&g, 2, do_nothing);
        start(&g, 0);
        g.run.ranks = 5;
        Child* c = start(&g, i == 1 ? 4 : 1);
        expect_error(c, "rank %d on host %s: the number of ranks is \"5\", but rank 0 has \"2\"", i == 1 ? 4 : 1, host);
        if (i == 1) { kill(g.child[0].pid, SIGKILL); }  // it waits for rank 1, so that rank 1 hears it, too
        group_end(&g);
    }
}

TEST(a_second_rank_of_the_same_number_is_refused) {
    Group g;
    group_init(&g, 3, gather_1000);
    start(&g, 0);
    start(&g, 1);
    start(&g, 1);
    struct pollfd p[2] = {{g.child[1].err, POLLIN, 0}, {g.child[2].err, POLLIN, 0}};
    CHECK(poll(p, 2, 1000 * PATIENCE) == 1, "none or both were refused");
    const int refused = p[0].revents ? 1 : 2;
    expect_error(&g.child[refused], "rank 1 has already joined this run, from host %s", host);
    start(&g, 2);
    expect_success(&g.child[0]);
    expect_success(&g.child[3 - refused]);
    expect_success(&g.child[3]);
    group_end(&g);
}

static void a_port_that_is_taken_and_an_address_elsewhere_are_named(void) {
    Group g;
    Error e = NO_ERROR;
    char numeric[64];
    group_init(&g, 2, do_nothing);
    const int fd = link_listen("127.0.0.1", g.run.port, numeric, sizeof numeric, &e);
    g.timeout = 0.5;
    g.silent = 0.5;
    start(&g, 0);
    start(&g, 1);  // the test's own socket listens there and says nothing
    expect_error(&g.child[0], "port %d of 127.0.0.1 is taken by another program\n  hint: choose another one with --port",
                 g.run.port);
    expect_error(&g.child[1], "rank 0 did not answer at 127.0.0.1, port %d, within 6 s: what listens there says nothing",
                 g.run.port);
    close(fd);
    group_end(&g);
    group_init(&g, 2, do_nothing);
    snprintf(g.run.address, sizeof g.run.address, "192.0.2.1");  // of the addresses that are for documentation
    start(&g, 0);
    expect_error(&g.child[0], "192.0.2.1: is not an address of this host, wanted that of the host where rank 0 runs");
    group_end(&g);
}

// ---------------------------------------------------------------------------------------------------------------------
// strangers

static Message message_of(uint32_t kind, uint32_t rank) {
    Message m;
    memset(&m, 0, sizeof m);
    m.kind = kind;
    m.rank = rank;
    return m;
}

static void say(int fd, const void* data, size_t size) {
    CHECK(send(fd, data, size, MSG_NOSIGNAL) == (ssize_t)size, "%s", strerror(errno));
}

/* Waits for the next message, for a while. */
static LinkState hear(Link* l) {
    struct pollfd p = {l->fd, POLLIN, 0};
    LinkState state = LINK_WAITS;
    while (state == LINK_WAITS && poll(&p, 1, 1000 * PATIENCE) == 1) { state = link_receive(l); }
    return state;
}

/* The other end closes the connection, or resets it, with no word but its NONCE. */
static void expect_closed(int fd, int i) {
    Link l;
    link_begin(&l, fd);
    LinkState state = hear(&l);
    if (state == LINK_MESSAGE && l.in.kind == TEAM_NONCE) { state = hear(&l); }
    CHECK(state == LINK_CLOSED, "stranger %d is not dropped: state %d, kind %u", i, state, l.in.kind);
    link_close(&l);
}

/* Exchanges a NONCE with a rank by hand, as rank `rank`. `nonce`: what this end says, or NULL for the rank's own bytes.
 * Afterwards m->says is the token of messages to it. */
static void meet(const Group* g, int rank, int fd, TeamMember* m, const unsigned char* nonce) {
    Team t;
    Message mine = message_of(TEAM_NONCE, (uint32_t)rank);
    memset(&t, 0, sizeof t);
    memset(m, 0, sizeof *m);
    link_begin(&m->link, fd);
    t.run = g->run;
    t.run.rank = rank;
    CHECK(hear(&m->link) == LINK_MESSAGE && m->link.in.kind == TEAM_NONCE, "no NONCE comes");
    memcpy(m->nonce, nonce ? nonce : m->link.in.payload, TEAM_RANDOM);
    memcpy(mine.payload, m->nonce, TEAM_RANDOM);
    mine.size = TEAM_RANDOM;
    say(fd, &mine, sizeof mine);
    team_receive_nonce(&t, m, m->link.in.payload);
}
static const unsigned char some_bytes[] = "any sixteen byte";

TEST(strangers_do_no_harm) {
    enum { IDLE = 60 };
    Group g;
    int idle[IDLE];
    unsigned char noise[10000];
    group_init(&g, 3, wait_and_gather);
    this_group = &g;
    start(&g, 0);
    for (int i = 0; i < IDLE; i++) { idle[i] = connect_to(&g); }
    uint32_t random = 1;
    for (size_t i = 0; i < sizeof noise; i++) { noise[i] = (unsigned char)((random = random * 1664525u + 1013904223u) >> 24); }
    Message messages[] = {message_of(99, 1), message_of(TEAM_GIVE, 1), message_of(TEAM_BEAT, 1), message_of(TEAM_ERROR, 1)};
    messages[1].size = messages[3].size = TEAM_PAYLOAD;
    for (int i = 0; i < 12; i++) {
        const int fd = connect_to(&g);
        TeamMember m;
        if (i >= 8) {  // with the right token
            meet(&g, 1, fd, &m, some_bytes);
            messages[i - 8].token = m.says;
        }
        if (i < 4 || i >= 8) { say(fd, &messages[i % 8], MESSAGE_BYTES); }
        if (i == 4) { say(fd, noise, sizeof noise); }
        if (i == 5) { say(fd, noise, MESSAGE_BYTES); }
        if (i == 6) { say(fd, "GET / HTTP/1.0\r\n\r\n", 18); }
        if (i == 6 || i == 7) {
            close(fd);
        } else {
            expect_closed(fd, i);
        }
    }
    say(idle[0], noise, 100);  // half a message
    start(&g, 1);
    start(&g, 2);
    await_ready(&g, 6);
    Error e = NO_ERROR;
    CHECK(link_connect(g.run.address, g.run.port, 5, &e) < 0, "rank 0 still listens");
    for (int i = 0; i < IDLE; i++) { expect_closed(idle[i], 100 + i); }
    let_go(&g, 3);
    expect_success(&g.child[0]);
    for (int r = 1; r < 3; r++) { expect_success(&g.child[r]); }
    group_end(&g);
}

static void idle_connections_delay_ranks_by_at_most_5_s(void) {
    enum { IDLE = 600 };
    Group g;
    int idle[IDLE];
    group_init(&g, 2, do_nothing);
    start(&g, 0);
    for (int i = 0; i < IDLE; i++) { idle[i] = connect_to(&g); }
    const double begin = now_seconds();
    start(&g, 1);
    for (int r = 0; r < 2; r++) { expect_success(&g.child[r]); }
    const double seconds = now_seconds() - begin;
    CHECK(seconds < 5, "%d idle connections kept the ranks apart for %.1f s", IDLE, seconds);
    for (int i = 0; i < IDLE; i++) { close(idle[i]); }
    group_end(&g);
}

static void a_silent_stranger_is_dropped_in_time(void) {
    Group g;
    group_init(&g, 2, do_nothing);
    g.silent = 2;
    start(&g, 0);
    const double begin = now_seconds();
    expect_closed(connect_to(&g), 0);
    CHECK(now_seconds() - begin >= 1.9, "too early: after %.1f s", now_seconds() - begin);
    start(&g, 1);
    for (int r = 0; r < 2; r++) { expect_success(&g.child[r]); }
    group_end(&g);
}

/* Makes the hello of rank 1 of host "a\x1b[2Jb" to `zero`. */
static Message hello_to(const Group* g, const TeamMember* zero) {
    Message hello = message_of(TEAM_HELLO, 1);
    const TeamHello text = {(uint32_t)g->run.ranks, "a\033[2Jb", ""};
    memcpy(hello.payload, &text, sizeof text);
    hello.size = sizeof text;
    hello.token = zero->says;
    return hello;
}

/* Joins as that rank and sends `m`, whose token is the difference to the right one. Returns the connection. */
static int join_by_hand(const Group* g, Message m) {
    TeamMember zero;
    meet(g, 1, connect_to(g), &zero, some_bytes);
    const Message hello = hello_to(g, &zero);
    say(zero.link.fd, &hello, sizeof hello);
    const LinkState state = hear(&zero.link);
    CHECK(state == LINK_MESSAGE && zero.link.in.kind == TEAM_JOINED, "not joined: %d, kind %u", state, zero.link.in.kind);
    CHECK(zero.link.in.token == zero.hears && zero.hears != zero.says, "rank 0 does not prove that it has the key");
    m.token += zero.says;
    say(zero.link.fd, &m, sizeof m);
    return zero.link.fd;
}

/* A hello that was recorded, a hello without the key, and rank 0's own words sent back to it: none lets a stranger in. */
TEST(a_stranger_without_the_key_finds_no_way_in) {
    Group g;
    TeamMember zero;
    group_init(&g, 2, do_nothing);
    start(&g, 0);
    meet(&g, 1, connect_to(&g), &zero, some_bytes);
    Message hello = hello_to(&g, &zero);  // of a connection that rank 0 closed before it read this
    link_close(&zero.link);
    for (int i = 0; i < 4; i++) {
        TeamMember again;
        meet(&g, 1, connect_to(&g), &again, i == 2 ? NULL : some_bytes);
        if (i == 1) { hello.token = 0; }
        if (i == 2) { hello.token = again.hears; }
        if (i == 3) {  // a second NONCE in place of a proof
            hello = message_of(TEAM_NONCE, 1);
            hello.size = TEAM_RANDOM;
        }
        say(again.link.fd, &hello, sizeof hello);
        CHECK(hear(&again.link) == LINK_CLOSED, "case %d: kind %u", i, again.link.in.kind);
        link_close(&again.link);
    }
    start(&g, 1);
    for (int r = 0; r < 2; r++) { expect_success(&g.child[r]); }
    group_end(&g);
}

/* Something else listens where rank 0 should, and answers without the key: with what it has heard from the rank, or with what
 * it recorded when rank 0 answered another connection. */
TEST(a_listener_without_the_key_is_not_taken_for_rank_0) {
    Group g;
    Error e = NO_ERROR;
    char numeric[64];
    uint64_t recorded = 0;
    group_init(&g, 2, do_nothing);
    g.timeout = 0.5;
    const int listener = link_listen(g.run.address, g.run.port, numeric, sizeof numeric, &e);
    start(&g, 1);
    struct pollfd p = {listener, POLLIN, 0};
    TeamMember one;
    Message joined = message_of(TEAM_JOINED, 0);
    joined.size = TEAM_HOST;
    for (int i = 0; i < 3; i++) {
        CHECK(poll(&p, 1, 1000 * PATIENCE) == 1, "nobody comes");
        meet(&g, 0, accept(listener, NULL, NULL), &one, i == 0 ? NULL : some_bytes);
        CHECK(hear(&one.link) == LINK_MESSAGE && one.link.in.kind == TEAM_HELLO, "it says hello");
        joined.token = i == 0 ? one.link.in.token : recorded;
        recorded = one.says;
        if (i != 1) { say(one.link.fd, &joined, sizeof joined); }
        CHECK(i == 1 || hear(&one.link) == LINK_CLOSED, "case %d: rank 1 takes it for rank 0", i);
        link_close(&one.link);
    }
    await_end(&g.child[0]);
    CHECK(WEXITSTATUS(g.child[0].status) == 1 && strstr(g.child[0].text, "error: rank 0 did not answer at 127.0.0.1, port "),
          "status %x: %s", (unsigned)g.child[0].status, g.child[0].text);
    close(listener);
    group_end(&g);
}

TEST(a_member_that_sends_nonsense_is_named) {
    for (int i = 0; i < 9; i++) {
        Group g;
        group_init(&g, 2, gather_1000);
        start(&g, 0);
        Message m = message_of(TEAM_GIVE, 1);
        if (i == 0) { m.token++; }
        if (i == 1) { m.kind = TEAM_HELLO, m.size = sizeof(TeamHello); }
        if (i == 2) { m.rank = 0; }
        if (i == 3) { m.size = TEAM_PAYLOAD + 1; }
        if (i == 4) { m.rest = 8; }
        if (i == 5) { m.kind = TEAM_NONCE, m.size = TEAM_RANDOM; }
        if (i == 6) { m.kind = TEAM_BEAT, m.size = 1; }
        if (i == 7) { m.kind = TEAM_ERROR; }  // without a word
        if (i == 8) { m.kind = 0; }
        const int fd = join_by_hand(&g, m);
        await_end(&g.child[0]);
        CHECK(
            WEXITSTATUS(g.child[0].status) == 1 && strstr(g.child[0].text, "rank 1 on host a\\x1b[2Jb sent what is no message"),
            "case %d: %s", i, g.child[0].text);
        close(fd);
        group_end(&g);
    }
}

/* A rank 1 meets this process as rank 0, which answers its hello with JOINED, START and `m`, six times if it is a text. Its
 * token is the difference to the right one. */
static void answer_by_hand(Group* g, Message m) {
    Error e = NO_ERROR;
    char numeric[64];
    const int listener = link_listen(g->run.address, g->run.port, numeric, sizeof numeric, &e);
    start(g, 1);
    struct pollfd p = {listener, POLLIN, 0};
    CHECK(poll(&p, 1, 1000 * PATIENCE) == 1, "nobody comes");
    const int fd = accept(listener, NULL, NULL);
    TeamMember one;
    meet(g, 0, fd, &one, some_bytes);
    Message joined = message_of(TEAM_JOINED, 0), begin = message_of(TEAM_START, 0);
    snprintf((char*)joined.payload, sizeof joined.payload, "zero");
    joined.size = TEAM_HOST;
    joined.token = begin.token = one.says;
    m.token += one.says;
    say(fd, &joined, sizeof joined);
    say(fd, &begin, sizeof begin);
    await_ready(g, 1);
    while (one.link.in.kind != TEAM_GIVE && hear(&one.link) == LINK_MESSAGE) {}  // now it waits for a result
    for (int i = 0; i < (m.kind == TEAM_ERROR ? 6 : 1); i++) { send(fd, &m, sizeof m, MSG_NOSIGNAL); }
    await_end(&g->child[0]);
    link_close(&one.link);
    close(listener);
}

TEST(a_rank_0_that_sends_nonsense_is_named) {
    for (int i = 0; i < 10; i++) {
        Group g;
        group_init(&g, 2, gather_1000);
        Message m = message_of(TEAM_RESULT, 0);
        m.sequence = 1;
        m.size = 2 * 8;  // the first round's
        if (i == 0) { m.token++; }
        if (i == 1) { m.kind = TEAM_HELLO, m.size = sizeof(TeamHello); }
        if (i == 2) { m.sequence = 5; }
        if (i == 3) { m.rest = 1 << 30; }
        if (i == 4) { m.size = 400; }
        if (i == 6) { m.size = 8; }  // its start is missing
        if (i == 7) { m.kind = TEAM_PRINTED, m.size = TEAM_HOST; }
        if (i == 8) { m.kind = TEAM_JOINED, m.size = 5; }
        if (i == 9) { m.kind = TEAM_KINDS; }
        if (i == 5) {  // a text that has no end
            m.kind = TEAM_ERROR;
            m.size = TEAM_PAYLOAD;
            m.rest = 1 << 30;
            memset(m.payload, 'x', sizeof m.payload);
        }
        answer_by_hand(&g, m);
        expect_error(&g.child[0], "rank 0 on host zero sent what is no message of this run, last seen in phase starting");
        group_end(&g);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// failing

static void a_rank_that_is_killed_is_named_on_every_other(void) {
    for (int victim = 0; victim < 4; victim += 3) {
        Group g;
        group_init(&g, 4, wait_and_gather);
        this_group = &g;
        start_all(&g);
        await_ready(&g, 8);
        kill(g.child[victim].pid, SIGKILL);
        for (int r = 0; r < 4; r++) {
            if (r == victim) { continue; }
            expect_error(&g.child[r], "rank %d on host %s ended or was killed: its connection closed, last seen in step 1200",
                         victim, host);
        }
        group_end(&g);
    }
}

static void a_rank_that_is_gone_before_all_have_joined_is_named(void) {
    Group g;
    group_init(&g, 4, do_nothing);
    g.silent = 5;  // rank 0 waits that long for others, so that they hear it, too
    start(&g, 0);
    close(join_by_hand(&g, message_of(TEAM_BEAT, 1)));
    start(&g, 2);
    for (int i = 0; i < 2; i++) {
        await_end(&g.child[i]);
        CHECK(WEXITSTATUS(g.child[i].status) == 1, "status %x", (unsigned)g.child[i].status);
        CHECK(strstr(g.child[i].text,
                     "error: rank 1 on host a\\x1b[2Jb ended or was killed: its connection closed, last seen in "
                     "phase starting\n"),
              "%s", g.child[i].text);
    }
    group_end(&g);
}

static void fail_odd(Team* t, int odd) {
    gather_rounds(t, 3);
    if (t->run.rank == odd) {
        team_fail(t, "GPU 0: out of memory\n  hint: not for the others");
        team_fail(t, "again");
        die("mine");
    }
    gather_rounds(t, 1000);
}

TEST(the_cause_of_a_rank_that_fails_reaches_all) {
    for (int odd = 0; odd < 3; odd += 2) {
        Group g;
        group_init(&g, 4, fail_odd);
        g.odd = odd;
        start_all(&g);
        for (int r = 0; r < 4; r++) {
            if (r == odd) {
                expect_error(&g.child[r], "mine");
            } else {
                expect_error(&g.child[r], "rank %d on host %s: GPU 0: out of memory", odd, host);
            }
        }
        group_end(&g);
    }
}

/* The child ended with status 1 and left it to others to say why. */
static void expect_silence(Child* c) {
    await_end(c);
    CHECK(WIFEXITED(c->status) && WEXITSTATUS(c->status) == 1 && !*said(c), "status %x: %s", (unsigned)c->status, c->text);
}

TEST(one_rank_of_a_host_tells_why_a_run_ends) {
    for (int victim = 0; victim < 2; victim++) {
        Group g;
        group_init(&g, 4, wait_and_gather);
        g.apart = false;
        this_group = &g;
        start_all(&g);
        await_ready(&g, 8);
        kill(g.child[victim].pid, SIGKILL);
        expect_error(&g.child[1 - victim],
                     "rank %d on host %s ended or was killed: its connection closed, last seen in step 1200", victim, host);
        expect_silence(&g.child[2]);
        expect_silence(&g.child[3]);
        group_end(&g);
    }
    for (int odd = 0; odd < 3; odd += 2) {
        Group g;
        group_init(&g, 4, fail_odd);
        g.apart = false;
        g.odd = odd;
        start_all(&g);
        for (int r = 0; r < 4; r++) {
            if (r == odd) {
                expect_error(&g.child[r], "mine");
            } else {
                expect_silence(&g.child[r]);
            }
        }
        group_end(&g);
    }
}

static void ranks_end_with_the_process_that_started_them(void) {
    for (int ranks = 1; ranks <= 3; ranks++) {
        Group g;
        group_init(&g, ranks, wait_and_gather);
        this_group = &g;
        CHECK(pipe(g.parent) == 0, "pipe");
        start_all(&g);
        if (ranks == 3) { kill(g.child[0].pid, SIGKILL), nap(1); }  // the others still try to reach rank 0
        if (ranks < 3) { await_ready(&g, 2 * ranks); }
        close(g.parent[1]);
        g.parent[1] = -1;
        for (int r = ranks == 3; r < ranks; r++) {
            await_end(&g.child[r]);
            CHECK(WEXITSTATUS(g.child[r].status) == 1, "status %x", (unsigned)g.child[r].status);
            CHECK(strstr(g.child[r].text, "the process that started this run is gone") || ranks == 3, "%s", g.child[r].text);
        }
        group_end(&g);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// silence and standing still. The groups run at the same time, since each has to wait

static void stay_in_step_7(Team* t, int odd) {
    Error e = NO_ERROR;
    team_at(t, PHASE_STEP, 7);
    if (t->run.rank == odd) { wait_to_go(this_group); }
    team_at(t, PHASE_STEP, 8);
    must(team_barrier(t, &e), &e);
}

static void stay_writing(Team* t, int odd) {
    Error e = NO_ERROR;
    team_at(t, t->run.rank == odd ? PHASE_WRITING : PHASE_STEP, 7);
    if (t->run.rank == odd) { nap(5); }
    must(team_barrier(t, &e), &e);
}

static void go_on_slowly(Team* t, int odd) {
    Error e = NO_ERROR;
    team_at(t, PHASE_STEP, 100);
    for (int i = 0; i < 10 && t->run.rank == odd; i++) {
        team_at(t, PHASE_STEP, 7 + i);
        nap(0.5);
    }
    must(team_barrier(t, &e), &e);
}

static void both_stay(Team* t, int odd) {
    Error e = NO_ERROR;
    team_at(t, PHASE_STEP, 7);
    if (t->run.rank != odd) { nap(5); }
    must(team_barrier(t, &e), &e);
}

static void who_is_silent_or_stands_still_is_named_and_nobody_else(void) {
    static Group stopped, zero, paused, hangs, zero_hangs, quiet[3];
    static void (*const bodies[])(Team*, int) = {stay_writing, go_on_slowly, both_stay};
    Group* const waiting[] = {&stopped, &zero, &paused};
    Group* const hanging[] = {&hangs, &zero_hangs};
    for (int i = 0; i < 3; i++) {
        this_group = waiting[i];
        group_init(waiting[i], 3, wait_and_gather);
        waiting[i]->silent = 4;
        start_all(waiting[i]);
    }
    for (int i = 0; i < 2; i++) {
        this_group = hanging[i];
        group_init(hanging[i], 3, stay_in_step_7);
        hanging[i]->hang = 2.5;
        hanging[i]->odd = 1 - i;
        start_all(hanging[i]);
    }
    for (int i = 0; i < 3; i++) {
        group_init(&quiet[i], 3, bodies[i]);
        quiet[i].hang = 3;
        quiet[i].odd = 1;
        start_all(&quiet[i]);
    }
    for (int i = 0; i < 3; i++) { await_ready(waiting[i], 6); }
    kill(stopped.child[2].pid, SIGSTOP);
    kill(zero.child[0].pid, SIGSTOP);
    for (int r = 0; r < 3; r++) { kill(paused.child[r].pid, SIGSTOP); }
    nap(5);
    for (int r = 0; r < 3; r++) { kill(paused.child[r].pid, SIGCONT); }
    let_go(&paused, 3);
    for (int r = 0; r < 3; r++) { expect_success(&paused.child[r]); }
    for (int i = 0; i < 3; i++) {
        for (int r = 0; r < 3; r++) { expect_success(&quiet[i].child[r]); }
        group_end(&quiet[i]);
    }
    for (int r = 0; r < 3; r++) {
        if (r == 2) { kill(stopped.child[2].pid, SIGCONT); }  // it hears of the end when it wakes
        expect_error(&stopped.child[r], "rank 2 on host %s was silent for 4 s, last seen in step 1200", host);
    }
    for (int r = 1; r < 3; r++) {
        expect_error(&zero.child[r], "rank 0 on host %s was silent for 4 s, last seen in step 1200", host);
    }
    kill(zero.child[0].pid, SIGKILL);
    for (int i = 0; i < 2; i++) {
        for (int r = 0; r < 3; r++) {
            expect_error(&hanging[i]->child[r],
                         "rank %d on host %s hangs: it has been alone behind all others for 2.5 s, last seen in step 7", 1 - i,
                         host);
        }
        group_end(hanging[i]);
        group_end(waiting[i]);
    }
    group_end(&paused);
}

// ---------------------------------------------------------------------------------------------------------------------

typedef struct {
    const char* name;
    void (*run)(void);
    pid_t pid;
    int out;
} Waiting;

/* Runs tests that mostly wait at the same time, each in its own process. Prints their outputs one after another. */
static void run_side_by_side(Waiting* tests, int count) {
    fflush(stdout);
    for (int i = 0; i < count; i++) {
        int out[2];
        if (pipe(out) != 0) { die("pipe: %s", strerror(errno)); }
        tests[i].out = out[0];
        tests[i].pid = fork();
        if (tests[i].pid == 0) {
            dup2(out[1], STDOUT_FILENO);
            close(out[1]);
            checks_failed = 0;
            tests[i].run();
            exit(checks_failed > 0);
        }
        close(out[1]);
    }
    for (int i = 0; i < count; i++) {
        char text[4096];
        int status = 0;
        for (ssize_t n; (n = read(tests[i].out, text, sizeof text)) > 0;) { printf("%.*s", (int)n, text); }
        waitpid(tests[i].pid, &status, 0);
        close(tests[i].out);
        printf("%s %s\n", status ? "FAIL" : "ok  ", tests[i].name);
        tests_passed += status == 0;
        tests_failed += status != 0;
    }
}

#define WAITING(test) \
    { #test, test, 0, -1 }

int main(void) {
    signal(SIGPIPE, SIG_IGN);
    gethostname(host, sizeof host - 1);
    Waiting waiting[] = {
        WAITING(rank_0_waits_for_late_ranks_and_says_so),
        WAITING(missing_ranks_are_named_at_the_deadline),
        WAITING(a_rank_0_that_reads_its_files_is_waited_for),
        WAITING(a_rank_of_another_run_or_key_is_turned_away),
        WAITING(a_rank_of_another_version_is_refused_on_every_rank),
        WAITING(a_port_that_is_taken_and_an_address_elsewhere_are_named),
        WAITING(idle_connections_delay_ranks_by_at_most_5_s),
        WAITING(a_silent_stranger_is_dropped_in_time),
        WAITING(a_rank_that_is_killed_is_named_on_every_other),
        WAITING(a_rank_that_is_gone_before_all_have_joined_is_named),
        WAITING(ranks_end_with_the_process_that_started_them),
        WAITING(who_is_silent_or_stands_still_is_named_and_nobody_else),
    };
    run_side_by_side(waiting, (int)(sizeof waiting / sizeof *waiting));
    return test_all();
}
