/* test_ranks.c -- tests which rank a process is by the variables of each launcher, Slurm's lists, the refusals, and which
 * signals count. test_launch.sh has the processes. */
#include "llmc/dist/launch.h"
#include "dev/test/test.h"

// ---------------------------------------------------------------------------------------------------------------------
// an environment: NAME=VALUE in lines. Later lines count

static char environment[4096];

static char* variable(const char* name) {
    static char values[8][512];
    static int next;
    const size_t length = strlen(name);
    const char* found = NULL;
    for (const char* line = environment; line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, name, length) == 0 && line[length] == '=') { found = line + length + 1; }
    }
    if (!found) { return NULL; }
    char* value = values[next++ % 8];
    snprintf(value, sizeof values[0], "%.*s", (int)strcspn(found, "\n"), found);
    return value;
}

/* Finds the ranks of `base` and `more`; returns the error, or "". */
static const char* find(Ranks* r, const char* base, const char* more, int port) {
    static Error e;
    memset(&e, 0, sizeof e);
    snprintf(environment, sizeof environment, "%s\n%s", base, more);
    const bool found = ranks_find(r, variable, port, &e);
    CHECK(found == !e.msg[0], "an error if it fails, and only then: %s", e.msg);
    return e.msg;
}

/* Expects this process to be rank `rank` of `ranks`, local rank `local` of `locals`, by `launcher`. */
static void expect(const char* base, const char* more, const char* launcher, int rank, int ranks, int local, int locals) {
    Ranks r;
    const char* error = find(&r, base, more, 0);
    CHECK(!*error, "%s: %s", more, error);
    if (*error) { return; }
    CHECK(launcher ? r.launcher && strcmp(r.launcher, launcher) == 0 : !r.launcher, "%s: launcher %s", more,
          r.launcher ? r.launcher : "none");
    CHECK(r.rank == rank && r.ranks == ranks, "%s: rank %d of %d, wanted %d of %d", more, r.rank, r.ranks, rank, ranks);
    CHECK(r.local_rank == local && r.local_ranks == locals, "%s: local rank %d of %d, wanted %d of %d", more, r.local_rank,
          r.local_ranks, local, locals);
}

static void expect_place(const char* base, const char* more, const char* address, int port) {
    Ranks r;
    const char* error = find(&r, base, more, 0);
    CHECK(!*error && strcmp(r.address, address) == 0, "%s: address %s, wanted %s %s", more, r.address, address, error);
    CHECK(r.port == port, "%s: port %d, wanted %d", more, r.port, port);
}

/* Expects an error with `text`, one line and at most one hint. */
static void refuse(const char* base, const char* more, const char* text) {
    Ranks r;
    const char *error = find(&r, base, more, 0), *second = strchr(error, '\n');
    CHECK(*error && strstr(error, text), "%s: wanted \"%s\" in \"%s\"", more, text, error);
    CHECK(!second || (strncmp(second, "\n  hint: ", 9) == 0 && !strchr(second + 1, '\n')), "%s", error);
}

static Ranks ranks_of(const char* base, const char* more, int port) {
    Ranks r;
    const char* error = find(&r, base, more, port);
    CHECK(!*error, "%s: %s", more, error);
    return r;
}

// ---------------------------------------------------------------------------------------------------------------------
// what the launchers set on rank 5 of 8, the second of four on the second host; `ours` knows one host

static const char ours[] =
    "LLAMA3_RANK=5\nLLAMA3_RANKS=8\nLLAMA3_LOCAL_RANK=5\nLLAMA3_LOCAL_RANKS=8\nLLAMA3_ADDRESS=127.0.0.1\nLLAMA3_PORT=23456\n"
    "LLAMA3_TOKEN=0123456789abcdef0123456789abcdef\nLLAMA3_PARENT_FD=4";
static const char torchrun[] =
    "RANK=5\nWORLD_SIZE=8\nLOCAL_RANK=1\nLOCAL_WORLD_SIZE=4\nGROUP_RANK=1\nMASTER_ADDR=node1\nMASTER_PORT=29400\n"
    "TORCHELASTIC_RUN_ID=job7\nTORCHELASTIC_RESTART_COUNT=0\nTORCHELASTIC_USE_AGENT_STORE=False\nOMP_NUM_THREADS=1";
static const char openmpi[] =
    "OMPI_COMM_WORLD_RANK=5\nOMPI_COMM_WORLD_SIZE=8\nOMPI_COMM_WORLD_LOCAL_RANK=1\nOMPI_COMM_WORLD_LOCAL_SIZE=4\n"
    "PMIX_NAMESPACE=1234567\nPMIX_RANK=5\nMASTER_ADDR=node1";
static const char mpich[] = "PMI_RANK=5\nPMI_SIZE=8\nMPI_LOCALRANKID=1\nMPI_LOCALNRANKS=4\nPMI_FD=7\nMASTER_ADDR=node1";
static const char srun[] =
    "SLURM_JOB_ID=4711\nSLURM_JOB_NODELIST=node[01-04]\nSLURM_STEP_ID=0\nSLURM_STEPID=0\nSLURM_PROCID=5\nSLURM_NTASKS=8\n"
    "SLURM_STEP_NUM_TASKS=8\nSLURM_LOCALID=1\nSLURM_NODEID=1\nSLURM_STEP_NODELIST=node[03-04]\nSLURM_TASKS_PER_NODE=4(x2)\n"
    "SLURM_STEP_TASKS_PER_NODE=4(x2)\nSLURM_GTIDS=4,5,6,7";

TEST(without_a_launcher_a_process_is_alone) {
    expect("", "", NULL, 0, 1, 0, 1);
    expect("", "HOME=/root\nMASTER_ADDR=node1\nMASTER_PORT=29500\nWORLD_SIZE=8\nSLURM_PROCID=3", NULL, 0, 1, 0, 1);
    expect("", "RANK=", NULL, 0, 1, 0, 1);
    const Ranks r = ranks_of("", "", 4321);
    CHECK(r.port == 0 && !r.address[0] && r.name == 0 && !r.secret, "nobody to connect to");
}

TEST(each_launcher_tells_the_rank) {
    expect(ours, "", "--gpus", 5, 8, 5, 8);
    expect(torchrun, "", "torchrun", 5, 8, 1, 4);
    expect(openmpi, "", "mpirun", 5, 8, 1, 4);
    expect(mpich, "", "mpirun", 5, 8, 1, 4);
    expect(srun, "", "srun", 5, 8, 1, 4);
    expect(srun, "SLURM_STEP_NUM_TASKS=\nSLURM_STEP_TASKS_PER_NODE=", "srun", 5, 8, 1, 4);
}

TEST(one_rank_is_a_run) {
    expect(ours, "LLAMA3_RANK=0\nLLAMA3_RANKS=1\nLLAMA3_LOCAL_RANK=0\nLLAMA3_LOCAL_RANKS=1", "--gpus", 0, 1, 0, 1);
    expect(torchrun, "RANK=0\nWORLD_SIZE=1\nLOCAL_RANK=0\nLOCAL_WORLD_SIZE=1", "torchrun", 0, 1, 0, 1);
    expect("", "SLURM_JOB_ID=1\nSLURM_STEP_ID=0\nSLURM_PROCID=0\nSLURM_NTASKS=1\nSLURM_LOCALID=0\nSLURM_TASKS_PER_NODE=1",
           "srun", 0, 1, 0, 1);
}

TEST(the_innermost_launcher_counts) {
    char all[4000];
    snprintf(all, sizeof all, "%s\n%s", srun, mpich);
    expect(all, "PMI_RANK=2\nMASTER_ADDR=node1", "mpirun", 2, 8, 1, 4);
    snprintf(all, sizeof all, "%s\n%s", srun, openmpi);
    expect(all, "SLURM_PROCID=1\nSLURM_STEP_NUM_TASKS=2", "mpirun", 5, 8, 1, 4);
    snprintf(all, sizeof all, "%s\n%s", srun, torchrun);
    expect(all, "SLURM_PROCID=1\nSLURM_STEP_NUM_TASKS=2", "torchrun", 5, 8, 1, 4);
    snprintf(all, sizeof all, "%s\n%s", torchrun, ours);
    expect(all, "RANK=1", "--gpus", 5, 8, 5, 8);
    expect(srun, "PMI_RANK=6\nPMI_SIZE=8\nPMI_FD=7", "srun", 5, 8, 1, 4);
}

// ---------------------------------------------------------------------------------------------------------------------
// Slurm

TEST(slurm_counts_only_in_a_step) {
    expect(srun, "SLURM_STEP_ID=", NULL, 0, 1, 0, 1);
    expect(srun, "SLURM_STEP_ID=4294967291", NULL, 0, 1, 0, 1);
    expect(srun, "SLURM_STEP_ID=4294967290", NULL, 0, 1, 0, 1);
    expect(srun, "SLURM_STEP_ID=4294967280", NULL, 0, 1, 0, 1);
    expect(srun, "SLURM_STEP_ID=99999999999999999999", NULL, 0, 1, 0, 1);
    expect(srun, "SLURM_STEP_ID=batch", NULL, 0, 1, 0, 1);
    expect(srun, "SLURM_STEP_ID=-5", NULL, 0, 1, 0, 1);
    expect(srun, "SLURM_STEP_ID=0.batch", NULL, 0, 1, 0, 1);
    expect(srun, "SLURM_STEP_ID=12", "srun", 5, 8, 1, 4);
    expect(srun, "SLURM_STEP_ID=4294967279", "srun", 5, 8, 1, 4);
}

TEST(the_step_comes_before_the_job) {
    // srun --preserve-env -n 1 --pty in a job of 16 tasks
    expect(srun,
           "SLURM_NTASKS=16\nSLURM_TASKS_PER_NODE=8(x2)\nSLURM_STEP_NUM_TASKS=1\nSLURM_STEP_TASKS_PER_NODE=1\nSLURM_PROCID=0\n"
           "SLURM_LOCALID=0\nSLURM_NODEID=0",
           "srun", 0, 1, 0, 1);
}

TEST(tasks_of_this_node_are_counted) {
    static const struct {
        const char* list;
        int node, here, total;
    } cases[] = {{"1", 0, 1, 1},
                 {"8", 0, 8, 8},
                 {"4(x2)", 1, 4, 8},
                 {"4(x2)", 2, 0, 8},
                 {"4(x3),2", 2, 4, 14},
                 {"4(x3),2", 3, 2, 14},
                 {"4(x3),2", 4, 0, 14},
                 {"1,2,3(x2),4", 3, 3, 13},
                 {"1,2,3(x2),4", 4, 4, 13},
                 {"1024", 0, 1024, 1024},
                 {"1(x1024)", 1023, 1, 1024}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int here = -1, total = -1;
        CHECK(ranks_count_tasks(cases[i].list, cases[i].node, &here, &total), "%s is a list", cases[i].list);
        CHECK(here == cases[i].here && total == cases[i].total, "%s, node %d: %d of %d", cases[i].list, cases[i].node, here,
              total);
    }
    const char* wrong =
        "|,|x|4(|4(x|4(x)|4(x2|4(2)|4,|,4|4 |-4|4(x2)3|4(x0)|0|1025|4(x-2)|512(x3)|4(x2),|4;4|4(x2]|99999999999999999999|"
        "1(x99999999999999999999)";
    for (const char* list; (list = test_next(&wrong, '|')) != NULL;) {
        int here, total;
        CHECK(!ranks_count_tasks(list, 0, &here, &total), "\"%s\" is no list", list);
    }
    expect(srun, "SLURM_STEP_TASKS_PER_NODE=4,3,1\nSLURM_NODEID=2\nSLURM_PROCID=7\nSLURM_LOCALID=0", "srun", 7, 8, 0, 1);
    expect(srun, "SLURM_NODEID=", "srun", 5, 8, 1, 4);  // all nodes have the same number
    refuse(srun, "SLURM_STEP_TASKS_PER_NODE=4,4\nSLURM_NODEID=", "SLURM_NODEID is not set");
    refuse(srun, "SLURM_STEP_TASKS_PER_NODE=4,4\nSLURM_NODEID=2", "SLURM_STEP_TASKS_PER_NODE is \"4,4\"");
    refuse(srun, "SLURM_STEP_TASKS_PER_NODE=4", "SLURM_STEP_TASKS_PER_NODE is \"4\", wanted the tasks of each node, 8 in all");
    refuse(srun, "SLURM_STEP_TASKS_PER_NODE=four", "SLURM_STEP_TASKS_PER_NODE is \"four\"");
    refuse(srun, "SLURM_STEP_TASKS_PER_NODE=\nSLURM_TASKS_PER_NODE=5", "variable SLURM_TASKS_PER_NODE is \"5\"");
    refuse(srun, "SLURM_STEP_TASKS_PER_NODE=\nSLURM_TASKS_PER_NODE=", "SLURM_STEP_TASKS_PER_NODE is not set");
}

TEST(the_first_host_of_a_list_is_found) {
    static const char* const lists[][2] = {{"node1", "node1"},
                                           {"node1,node2", "node1"},
                                           {"node[003-010,12],x", "node003"},
                                           {"node[7]", "node7"},
                                           {"node[7,9]", "node7"},
                                           {"n[00-99]-ib0,m", "n00-ib0"},
                                           {"rack[0-1]n[05-06]", "rack0n05"},
                                           {"a.b.example,c", "a.b.example"},
                                           {"[10-12]", "10"},
                                           {"x[1],y[2]", "x1"},
                                           {"10.0.0.[17-18]", "10.0.0.17"}};
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
        char host[64];
        const bool found = ranks_first_host(host, sizeof host, lists[i][0]);
        CHECK(found && strcmp(host, lists[i][1]) == 0, "%s: %s, wanted %s", lists[i][0], found ? host : "nothing", lists[i][1]);
    }
    static const char* const wrong[] = {"",          ",node1", "node[",      "node[]",     "node[1", "node[1-", "node[1,",
                                        "node[a-b]", "node]",  "node[1[2]]", "node[1-[2]", "n[1x]",  "node[-1]"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        char host[64];
        CHECK(!ranks_first_host(host, sizeof host, wrong[i]), "\"%s\" is no list", wrong[i]);
    }
    char host[6];
    CHECK(ranks_first_host(host, sizeof host, "n[0001]") && strcmp(host, "n0001") == 0, "it fits");
    CHECK(!ranks_first_host(host, sizeof host, "n[00001]") && !ranks_first_host(host, sizeof host, "node01"), "it does not");
}

// ---------------------------------------------------------------------------------------------------------------------
// where rank 0 is

TEST(the_address_is_found) {
    expect_place(ours, "MASTER_ADDR=node9\nMASTER_PORT=1", "127.0.0.1", 23456);
    expect_place(torchrun, "", "node1", 29400);
    const int port = ranks_of(srun, "", 0).port;
    expect_place(srun, "", "node03", port);
    expect_place(srun, "MASTER_ADDR=10.1.2.3\nMASTER_PORT=29500", "10.1.2.3", 29500);
    expect_place(srun, "SLURM_STEP_NODELIST=\nSLURM_STEP_TASKS_PER_NODE=8", "127.0.0.1", port);
    expect_place(openmpi, "MASTER_ADDR=\nOMPI_COMM_WORLD_LOCAL_SIZE=8\nMASTER_PORT=77", "127.0.0.1", 77);
    expect_place(openmpi, "SLURM_STEP_NODELIST=other\nMASTER_PORT=77", "node1", 77);
    refuse(openmpi, "MASTER_ADDR=", "MASTER_ADDR is not set\n  hint: set MASTER_ADDR to the host of rank 0, such as mpirun -x");
    refuse(openmpi, "MASTER_ADDR=\nSLURM_STEP_NODELIST=node1", "MASTER_ADDR is not set");
    refuse(torchrun, "MASTER_ADDR=", "the 8 ranks are on several hosts");
    refuse(srun, "SLURM_STEP_NODELIST=", "MASTER_ADDR is not set");
    refuse(srun, "SLURM_STEP_NODELIST=node[", "SLURM_STEP_NODELIST is \"node[\"");
    char name[400] = "MASTER_ADDR=";
    memset(name + 12, 'x', 255);
    expect_place(torchrun, name, name + 12, 29400);
    memset(name + 12, 'x', 256);
    refuse(torchrun, name, "MASTER_ADDR has 256 bytes");
}

TEST(the_port_is_free_of_torchruns_store) {
    expect_place(torchrun, "TORCHELASTIC_USE_AGENT_STORE=True", "node1", 29401);
    expect_place(torchrun, "TORCHELASTIC_USE_AGENT_STORE=False", "node1", 29400);
    expect_place(torchrun, "TORCHELASTIC_USE_AGENT_STORE=", "node1", 29400);
    expect_place(torchrun, "TORCHELASTIC_USE_AGENT_STORE=True\nMASTER_PORT=65535", "node1", 65534);
    expect_place(openmpi, "TORCHELASTIC_USE_AGENT_STORE=True\nMASTER_PORT=29400", "node1", 29400);
}

TEST(a_port_is_the_same_for_all_ranks_of_a_run) {
    const char* const bases[] = {ours, torchrun, openmpi, mpich, srun};
    for (int i = 0; i < 5; i++) {
        CHECK(ranks_of(bases[i], "MASTER_PORT=x\nLLAMA3_PORT=x", 4321).port == 4321, "--port overrides");
    }
    const int port = ranks_of(srun, "", 0).port;
    CHECK(ranks_of(srun, "SLURM_PROCID=0\nSLURM_LOCALID=0\nSLURM_NODEID=0", 0).port == port, "on every rank");
    CHECK(ranks_of(srun, "SLURM_STEP_ID=1", 0).port != port, "another step may run on the same node");
    CHECK(ranks_of(openmpi, "", 0).port != ranks_of(openmpi, "PMIX_NAMESPACE=1234568", 0).port, "so may another mpirun");
    bool seen[RANKS_PORT_LAST + 1] = {false};
    int different = 0;
    for (int job = 1; job <= 1000; job++) {
        char line[64];
        snprintf(line, sizeof line, "SLURM_JOB_ID=%d", job);
        const int p = ranks_of(srun, line, 0).port;
        CHECK(p >= RANKS_PORT_FIRST && p <= RANKS_PORT_LAST, "port %d", p);
        if (p < 0 || p > RANKS_PORT_LAST) { continue; }
        different += !seen[p];
        seen[p] = true;
    }
    CHECK(different > 900, "1000 jobs have %d ports", different);
}

TEST(a_name_is_the_same_for_all_ranks_of_a_run) {
    static const struct {
        const char *base, *rank, *run;
    } cases[] = {{torchrun, "RANK=0\nLOCAL_RANK=0", "TORCHELASTIC_RUN_ID=job8"},
                 {openmpi, "OMPI_COMM_WORLD_RANK=0\nOMPI_COMM_WORLD_LOCAL_RANK=0", "PMIX_NAMESPACE=1234568"},
                 {mpich, "PMI_RANK=0\nMPI_LOCALRANKID=0", "PMIX_NAMESPACE=1"},
                 {srun, "SLURM_PROCID=0\nSLURM_LOCALID=0\nSLURM_NODEID=0", "SLURM_JOB_ID=4712"},
                 {srun, "SLURM_PROCID=7\nSLURM_LOCALID=3", "SLURM_STEP_ID=1"},
                 {srun, "SLURM_PROCID=7\nSLURM_LOCALID=3", "SLURM_RESTART_COUNT=1"},
                 {srun, "SLURM_PROCID=7", "SLURM_JOB_ID=471\nSLURM_STEP_ID=10"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const uint64_t name = ranks_of(cases[i].base, "", 0).name;
        CHECK(ranks_of(cases[i].base, cases[i].rank, 0).name == name, "%s: on every rank", cases[i].rank);
        CHECK(ranks_of(cases[i].base, cases[i].run, 0).name != name, "%s: another run has another", cases[i].run);
    }
}

static bool same_key(SipKey a, SipKey b) { return a.low == b.low && a.high == b.high; }

/* LLAMA3_TOKEN is the key under every launcher, to its last character. */
TEST(a_secret_is_the_key_of_each_launcher) {
    const char* const bases[] = {ours, torchrun, openmpi, mpich, srun};
    for (int i = 0; i < 5; i++) {
        const Ranks r = ranks_of(bases[i], "LLAMA3_TOKEN=correct horse battery staple", 0);
        CHECK(r.secret && r.key.low != 0 && r.key.high != 0 && r.key.low != r.key.high, "%s: it has a key", r.launcher);
        CHECK(same_key(ranks_of(bases[i], "LLAMA3_TOKEN=correct horse battery staple", 0).key, r.key), "on every rank");
        const Ranks other = ranks_of(bases[i], "LLAMA3_TOKEN=correct horse battery stapld", 0);
        CHECK(other.key.low != r.key.low && other.key.high != r.key.high, "%s: another secret, another key", r.launcher);
        CHECK(i == 0 || !ranks_of(bases[i], "LLAMA3_TOKEN=", 0).secret, "%s: without it there is none", r.launcher);
    }
}

/* The vectors that the authors published with SipHash: key 00 01 .. 0f, text 00 01 .. of each length; appendix A of the paper
 * has the one of 15 bytes. */
TEST(siphash_has_its_published_values) {
    static const uint64_t values[] = {0x726FDB47DD0E0E31u, 0x74F839C593DC67FDu, 0x0D6C8009D9A94F5Au, 0x85676696D7FB7E2Du,
                                      0xCF2794E0277187B7u, 0x18765564CD99A68Du, 0xCBC9466E58FEE3CEu, 0xAB0200F58B01D137u,
                                      0x93F5F5799A932462u, 0x9E0082DF0BA9E4B0u, 0x7A5DBBC594DDB9F3u, 0xF4B32F46226BADA7u,
                                      0x751E8FBC860EE5FBu, 0x14EA5627C0843D90u, 0xF723CA908E7AF2EEu, 0xA129CA6149BE45E5u,
                                      0x3F2ACC7F57C29BDBu, 0x699AE9F52CBE4794u};
    const SipKey key = {0x0706050403020100u, 0x0F0E0D0C0B0A0908u};
    unsigned char text[64];
    for (size_t i = 0; i < sizeof text; i++) { text[i] = (unsigned char)i; }
    for (size_t n = 0; n < sizeof values / sizeof values[0]; n++) {
        CHECK(siphash(key, text, n) == values[n], "%zu bytes: %016" PRIx64, n, siphash(key, text, n));
    }
    CHECK(siphash(key, text, 63) == 0x958A324CEB064572u, "63 bytes: %016" PRIx64, siphash(key, text, 63));
}

// ---------------------------------------------------------------------------------------------------------------------

TEST(wrong_numbers_are_refused_by_name) {
    static const struct {
        const char* base;
        const char* names[4];  // rank, ranks, local rank, local ranks
    } all[] = {
        {ours, {"LLAMA3_RANK", "LLAMA3_RANKS", "LLAMA3_LOCAL_RANK", "LLAMA3_LOCAL_RANKS"}},
        {torchrun, {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}},
        {openmpi, {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"}},
        {mpich, {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"}},
        {srun, {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", NULL}},
    };
    static const char* const wrong[4][8] = {
        {"8", "-1", "x", " 5", "5 ", "+5", "0x5", "18446744073709551621"},
        {"0", "1025", "-8", "8.0", "8\t", "99999999999999999999", "eight", "4294967304"},
        {"8", "-1", "1e0", "x", "1,", "100", "0-", "4294967297"},
        {"0", "9", "-4", "four", "4;", "1024", "99999999999999999999", "4.5"},
    };
    for (size_t l = 0; l < sizeof all / sizeof all[0]; l++) {
        for (int field = 0; field < 4 && all[l].names[field]; field++) {
            char line[128], text[128];
            for (int i = 0; i < 8; i++) {
                snprintf(line, sizeof line, "%s=%s", all[l].names[field], wrong[field][i]);
                snprintf(text, sizeof text, "variable %s is \"", all[l].names[field]);
                refuse(all[l].base, line, text);
            }
        }
    }
    refuse(torchrun,
           "WORLD_SIZE=", "variable WORLD_SIZE is not set, but RANK is, as by torchrun\n  hint: set WORLD_SIZE, or unset RANK");
    refuse(torchrun, "LOCAL_WORLD_SIZE=", "LOCAL_WORLD_SIZE is not set");
    refuse(openmpi, "OMPI_COMM_WORLD_SIZE=", "OMPI_COMM_WORLD_SIZE is not set, but OMPI_COMM_WORLD_RANK is, as by mpirun");
    refuse(mpich, "PMI_RANK=", "PMI_RANK is not set, but MPI_LOCALRANKID is");
    refuse(srun, "SLURM_PROCID=", "SLURM_PROCID is not set, but SLURM_STEP_ID is, as by srun");
    refuse(srun, "SLURM_STEP_NUM_TASKS=\nSLURM_NTASKS=", "SLURM_STEP_NUM_TASKS is not set");
    refuse(srun, "SLURM_STEP_NUM_TASKS=\nSLURM_NTASKS=0", "SLURM_NTASKS is \"0\"");
    refuse(torchrun, "LOCAL_RANK=4", "LOCAL_RANK is \"4\", wanted an integer from 0 to 3");
}

TEST(wrong_ports_and_tokens_are_refused_by_name) {
    static const char* const ports[] = {"0", "65536", "-1", "http", "29400 ", "99999999999999999999"};
    for (size_t i = 0; i < sizeof ports / sizeof ports[0]; i++) {
        char line[64];
        snprintf(line, sizeof line, "MASTER_PORT=%s", ports[i]);
        refuse(torchrun, line, "MASTER_PORT is \"");
        refuse(srun, line, "MASTER_PORT is \"");
    }
    const char* const bases[] = {ours, torchrun, openmpi, mpich, srun};
    for (int i = 0; i < 5; i++) {
        const char* const line = "LLAMA3_TOKEN=hunter2hunter2!";
        refuse(bases[i], line, "LLAMA3_TOKEN has 15 characters, wanted at least 16, such as openssl rand -hex 16");
        Ranks r;
        CHECK(!strstr(find(&r, bases[i], line, 0), "hunter2"), "the message shows the secret");
    }
    refuse(ours, "LLAMA3_TOKEN=", "LLAMA3_TOKEN has 0 characters");
}

TEST(a_rank_takes_the_device_of_its_local_rank) {
    Ranks r = ranks_of(torchrun, "", 0);
    CHECK(ranks_device(&r, 4) == 1 && ranks_device(&r, 8) == 1, "that of its local rank");
    CHECK(ranks_device(&r, 1) == 0, "the only one it sees");
    CHECK(ranks_device(&r, 3) == -1 && ranks_device(&r, 2) == -1 && ranks_device(&r, 0) == -1, "too few for this host");
    r = ranks_of("", "", 0);
    CHECK(ranks_device(&r, 8) == 0 && ranks_device(&r, 1) == 0 && ranks_device(&r, 0) == -1, "a process alone");
}

// ---------------------------------------------------------------------------------------------------------------------

TEST(without_a_parent_there_is_no_pipe) {
    int ends[2];
    char number[16];
    CHECK(pipe(ends) == 0, "a pipe");
    unsetenv("LLAMA3_PARENT_FD");
    CHECK(launch_parent_fd() == -1, "no variable");
    static const char* const wrong[] = {"", "x", "-1", "999999", "99999999999999999999", "0x1"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        setenv("LLAMA3_PARENT_FD", wrong[i], 1);
        CHECK(launch_parent_fd() == -1, "\"%s\"", wrong[i]);
    }
    const int file = open("/dev/null", O_RDONLY);
    snprintf(number, sizeof number, "%d", file);
    setenv("LLAMA3_PARENT_FD", number, 1);
    CHECK(launch_parent_fd() == -1, "no pipe");
    snprintf(number, sizeof number, "%dx", ends[0]);
    setenv("LLAMA3_PARENT_FD", number, 1);
    CHECK(launch_parent_fd() == -1, "no number");
    snprintf(number, sizeof number, "%d", ends[0]);
    setenv("LLAMA3_PARENT_FD", number, 1);
    CHECK(launch_parent_fd() == ends[0] && fcntl(ends[0], F_GETFD) == FD_CLOEXEC, "that is it");
    close(file);
    close(ends[0]);
    close(ends[1]);
}

TEST(hosts_are_counted_where_they_are_alike) {
    static const struct {
        int ranks, hosts;
        RankPlace places[6];
    } cases[] = {
        {4, 2, {{0, 2}, {1, 2}, {0, 2}, {1, 2}}},                  // two of each
        {6, 2, {{0, 3}, {1, 3}, {2, 3}, {0, 3}, {1, 3}, {2, 3}}},  // three of each
        {6, 3, {{0, 2}, {1, 2}, {0, 2}, {1, 2}, {0, 2}, {1, 2}}},
        {4, 1, {{0, 4}, {1, 4}, {2, 4}, {3, 4}}},          // one host
        {4, 1, {{0, 1}, {0, 1}, {0, 1}, {0, 1}}},          // one rank of each
        {4, 1, {{0, 2}, {0, 2}, {1, 2}, {1, 2}}},          // dealt out one by one
        {5, 1, {{0, 3}, {1, 3}, {2, 3}, {0, 2}, {1, 2}}},  // not equally many
        {4, 1, {{0, 2}, {1, 2}, {1, 2}, {0, 2}}},          // in another order
        {1, 1, {{0, 1}}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int hosts = ranks_hosts(cases[i].places, cases[i].ranks);
        CHECK(hosts == cases[i].hosts, "case %zu: %d hosts, wanted %d", i, hosts, cases[i].hosts);
    }
}

int main(void) { return test_all(); }
