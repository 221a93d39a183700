/* ranks.h -- who this process is among the processes of a run: its rank, the address and port of rank 0, the run's name and
 * key.
 *
 * All of it comes from environment variables, which a launcher sets for each process that it starts:
 *
 *   --gpus      LLAMA3_RANK, LLAMA3_RANKS, LLAMA3_LOCAL_RANK, LLAMA3_LOCAL_RANKS, LLAMA3_ADDRESS, LLAMA3_PORT, LLAMA3_TOKEN;
 *               the parent of dist/launch.h sets them
 *   torchrun    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RUN_ID,
 *               TORCHELASTIC_USE_AGENT_STORE; or the same set by hand
 *   mpirun      Open MPI: OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE, PMIX_NAMESPACE
 *               MPICH, Intel MPI: PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
 *   srun        SLURM_PROCID, SLURM_STEP_NUM_TASKS (else SLURM_NTASKS), SLURM_LOCALID, SLURM_NODEID,
 *               SLURM_STEP_TASKS_PER_NODE (else SLURM_TASKS_PER_NODE), SLURM_STEP_NODELIST, SLURM_JOB_ID, SLURM_STEP_ID
 *
 * The first launcher of this list whose variables are set counts, because a launcher may start another one of the list below
 * it: mpirun starts its daemons with srun, and the daemons' children inherit SLURM_PROCID. An empty variable counts as missing.
 *
 * Slurm sets SLURM_PROCID and SLURM_NTASKS also in the shell of sbatch and salloc, where only one process runs. So they count
 * only in a step that srun started. SLURM_STEP_ID shows that: in these shells it is missing, or one of the reserved numbers
 * from 4294967280 (0xFFFFFFF0) on; 4294967291 is the batch script, 4294967290 the shell of salloc (slurm.h). The step's
 * variables come before the job's variables, because `srun --preserve-env` keeps the job's variables.
 *
 * The address of rank 0 is MASTER_ADDR. Without it, srun's ranks take the first host of SLURM_STEP_NODELIST, and others take
 * 127.0.0.1 if all ranks are on this host. The port is --port, otherwise MASTER_PORT, otherwise a number made of the run's
 * name. torchrun's agent may keep its own store at MASTER_PORT (TORCHELASTIC_USE_AGENT_STORE=True): then the run takes the next
 * port. All this is decided from the environment alone, so that all ranks decide the same way.
 *
 * LLAMA3_TOKEN is a secret of all ranks, of RANKS_SECRET characters or more. It makes the key by which ranks recognize each
 * other (dist/team.h). --gpus draws one at random; with other launchers the user sets one. Without it the key is known to
 * everybody, and the run's name alone separates it from other runs.
 */
#ifndef LLMC_RANKS_H
#define LLMC_RANKS_H

#include "llmc/base/hash.h"  // defines: SipKey, sip_key
#include "llmc/base/utils.h"

enum {
    RANKS_SECRET = 16,         // characters of LLAMA3_TOKEN, at least
    RANKS_MAX = 1024,          // processes of a run
    RANKS_PORT_FIRST = 20000,  // ports chosen here are below those that Linux gives to outgoing connections (32768 and more)
    RANKS_PORT_LAST = 32000
};

typedef struct {
    int rank, ranks;              // this process, and how many the run has
    int local_rank, local_ranks;  // the same among the ranks of this host
    char address[256];            // of rank 0
    int port;
    uint64_t name;         // a hash of the run's name
    SipKey key;            // of LLAMA3_TOKEN
    bool secret;           // LLAMA3_TOKEN is set; otherwise `key` is zero
    const char* launcher;  // "--gpus", "torchrun", "mpirun", "srun"; NULL: this process is alone
} Ranks;

/* Returns a variable of an environment, or NULL; getenv() reads this process's. */
typedef char* (*RanksVariable)(const char* name);

typedef struct {
    const char* launcher;
    const char* sign;  // is set where this launcher started the process
    const char *rank, *ranks, *local_rank, *local_ranks;
    const char *address, *port;
    const char* run[3];  // variables that name the run, where they are set
} RankVariables;

// clang-format off
static const RankVariables rank_variables[] = {
    {"--gpus", "LLAMA3_RANK",
     "LLAMA3_RANK", "LLAMA3_RANKS", "LLAMA3_LOCAL_RANK", "LLAMA3_LOCAL_RANKS", "LLAMA3_ADDRESS", "LLAMA3_PORT", {NULL}},
    {"torchrun", "RANK",
     "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", {"TORCHELASTIC_RUN_ID"}},
    {"mpirun", "OMPI_COMM_WORLD_RANK",
     "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
     "MASTER_ADDR", "MASTER_PORT", {"PMIX_NAMESPACE"}},
    {"mpirun", "MPI_LOCALRANKID",  // srun may set PMI_RANK, too, but not this one
     "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MASTER_ADDR", "MASTER_PORT", {"PMIX_NAMESPACE"}},
    {"srun", "SLURM_STEP_ID",
     "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
     "MASTER_ADDR", "MASTER_PORT", {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"}},
};
// clang-format on

// ---------------------------------------------------------------------------------------------------------------------
// reading variables

/* Returns a variable's text; NULL if it is missing or empty. */
static inline const char* ranks_text(RanksVariable variable, const char* name) {
    const char* text = variable(name);
    return text && *text ? text : NULL;
}

static inline bool ranks_is(const RankVariables* v, const char* launcher) { return strcmp(v->launcher, launcher) == 0; }

/* Reads digits and moves *text past them. Returns -1 if it finds none, or the number is above `max`. */
static inline int64_t ranks_digits(const char** text, int64_t max) {
    int64_t number = 0;
    const char* p = *text;
    for (; *p >= '0' && *p <= '9'; p++) {
        number = number * 10 + (*p - '0');
        if (number > max) { return -1; }
    }
    const bool found = p > *text;
    *text = p;
    return found ? number : -1;
}

/* Reads a variable of the launcher `v`, an integer of digits alone. */
static inline bool ranks_number(RanksVariable variable, const RankVariables* v, const char* name, int min, int max, int* number,
                                Error* e) {
    const char *text = ranks_text(variable, name), *end = text;
    if (!text) {
        return fail(e,
                    "the environment variable %s is not set, but %s is, as by %s\n"
                    "  hint: set %s, or unset %s to run this process alone",
                    name, v->sign, v->launcher, name, v->sign);
    }
    const int64_t found = ranks_digits(&end, max);
    if (found < min || *end) {
        return fail(e, "the environment variable %s is \"%.40s\", wanted an integer from %d to %d", name, text, min, max);
    }
    *number = (int)found;
    return true;
}

/* Returns a hash of the run's name: the same for all its ranks, and different for another run if the launcher names runs. */
static inline uint64_t ranks_run_hash(RanksVariable variable, const RankVariables* v) {
    uint64_t hash = 0xCBF29CE484222325u;  // FNV-1a
    for (int i = 0; i < 3 && v->run[i]; i++) {
        const char* text = ranks_text(variable, v->run[i]);
        for (const char* p = text ? text : ""; *p; p++) { hash = (hash ^ (uint8_t)*p) * 0x100000001B3u; }
        hash = (hash ^ 0xFF) * 0x100000001B3u;  // this byte is never in UTF-8 text, so "1", "23" differs from "12", "3"
    }
    return hash;
}

// ---------------------------------------------------------------------------------------------------------------------
// Slurm

/* Returns whether SLURM_STEP_ID belongs to a step that srun started. */
static inline bool ranks_in_step(RanksVariable variable) {
    const int64_t first_reserved = 0xFFFFFFF0;
    const char* text = ranks_text(variable, "SLURM_STEP_ID");
    return text && ranks_digits(&text, first_reserved - 1) >= 0 && !*text;
}

/* Writes the first host of a list such as "node[003-010,12],gpu7" to `out`: "node003". Returns false if it is no such list, or
 * the name does not fit. */
static inline bool ranks_first_host(char* out, size_t cap, const char* list) {
    size_t used = 0;
    for (const char* p = list; *p && *p != ',';) {
        const bool range = *p == '[';
        const char* from = p + range;
        const size_t length = range ? strspn(from, "0123456789") : 1;
        const char* end = range ? strpbrk(from + length, "[]") : from + 1;
        if (*p == ']' || length == 0 || length >= cap - used || !end) { return false; }
        if (range && (*end++ != ']' || !strchr("-,]", from[length]))) { return false; }
        memcpy(out + used, from, length);
        used += length;
        p = end;
    }
    out[used] = 0;
    return used > 0;
}

/* Reads a list such as "4(x3),2": four tasks on each of three nodes, two on the next. Counts the tasks of one node in *here,
 * which stays 0 if the list ends before it, and all in *total. Returns false if it is no such list, or of more tasks than
 * RANKS_MAX. */
static inline bool ranks_count_tasks(const char* list, int node, int* here, int* total) {
    int64_t nodes = 0, all = 0;
    *here = 0;
    for (const char* p = list;; p++) {
        const int64_t tasks = ranks_digits(&p, RANKS_MAX);
        int64_t repeat = 1;
        if (strncmp(p, "(x", 2) == 0) {
            p += 2;
            repeat = ranks_digits(&p, RANKS_MAX);
            if (*p++ != ')') { return false; }
        }
        if (tasks < 1 || repeat < 1) { return false; }
        if (node >= nodes && node < nodes + repeat) { *here = (int)tasks; }
        nodes += repeat;
        all += tasks * repeat;
        *total = (int)all;
        if (all > RANKS_MAX || (*p && *p != ',')) { return false; }
        if (!*p) { return true; }
    }
}

/* Finds how many ranks of a step are on this host. */
static inline bool ranks_slurm_local(Ranks* r, RanksVariable variable, const RankVariables* v, Error* e) {
    const char *name = v->local_ranks, *list = ranks_text(variable, name);
    if (!list) { list = ranks_text(variable, name = "SLURM_TASKS_PER_NODE"); }
    int node = 0, total = 0;
    if (!list) { return ranks_number(variable, v, v->local_ranks, 1, r->ranks, &node, e); }  // fails, and says why
    if (strchr(list, ',') && !ranks_number(variable, v, "SLURM_NODEID", 0, RANKS_MAX - 1, &node, e)) { return false; }
    const bool read = ranks_count_tasks(list, node, &r->local_ranks, &total);
    if (read && total == r->ranks && r->local_ranks > 0) { return true; }
    return fail(e, "the environment variable %s is \"%.80s\", wanted the tasks of each node, %d in all, such as 4(x2),1", name,
                list, r->ranks);
}

// ---------------------------------------------------------------------------------------------------------------------

/* Returns the variables of the launcher that started this process, or NULL. */
static inline const RankVariables* ranks_launcher(RanksVariable variable) {
    for (size_t i = 0; i < sizeof rank_variables / sizeof rank_variables[0]; i++) {
        const RankVariables* v = &rank_variables[i];
        if (ranks_text(variable, v->sign) && (!ranks_is(v, "srun") || ranks_in_step(variable))) { return v; }
    }
    return NULL;
}

static inline bool ranks_find_numbers(Ranks* r, RanksVariable variable, const RankVariables* v, Error* e) {
    const bool slurm = ranks_is(v, "srun");
    const bool job = slurm && !ranks_text(variable, v->ranks) && ranks_text(variable, "SLURM_NTASKS");
    return ranks_number(variable, v, job ? "SLURM_NTASKS" : v->ranks, 1, RANKS_MAX, &r->ranks, e) &&
           ranks_number(variable, v, v->rank, 0, r->ranks - 1, &r->rank, e) &&
           (slurm ? ranks_slurm_local(r, variable, v, e)
                  : ranks_number(variable, v, v->local_ranks, 1, r->ranks, &r->local_ranks, e)) &&
           ranks_number(variable, v, v->local_rank, 0, r->local_ranks - 1, &r->local_rank, e);
}

static inline bool ranks_find_address(Ranks* r, RanksVariable variable, const RankVariables* v, Error* e) {
    const char* address = ranks_text(variable, v->address);
    const char* list = ranks_is(v, "srun") ? ranks_text(variable, "SLURM_STEP_NODELIST") : NULL;
    if (!address && list) {
        return ranks_first_host(r->address, sizeof r->address, list) ||
               fail(e, "the environment variable SLURM_STEP_NODELIST is \"%.80s\", wanted hosts such as node[01-04]", list);
    }
    if (!address && r->local_ranks < r->ranks) {
        return fail(e,
                    "the address of rank 0 is not known: the %d ranks are on several hosts, and the environment variable %s is "
                    "not set\n  hint: set %s to the host of rank 0%s",
                    r->ranks, v->address, v->address, ranks_is(v, "mpirun") ? ", such as mpirun -x MASTER_ADDR=node1" : "");
    }
    if (!address) { address = "127.0.0.1"; }
    const size_t length = strlen(address);
    if (length >= sizeof r->address) {
        return fail(e, "the environment variable %s has %zu bytes, wanted a host's name or address of at most %zu", v->address,
                    length, sizeof r->address - 1);
    }
    memcpy(r->address, address, length + 1);
    return true;
}

static inline bool ranks_find_port(Ranks* r, RanksVariable variable, const RankVariables* v, int port, Error* e) {
    r->port = port ? port : RANKS_PORT_FIRST + (int)(r->name % (RANKS_PORT_LAST - RANKS_PORT_FIRST + 1));
    if (port || !ranks_text(variable, v->port)) { return true; }
    if (!ranks_number(variable, v, v->port, 1, 65535, &r->port, e)) { return false; }
    const char* store = ranks_text(variable, "TORCHELASTIC_USE_AGENT_STORE");
    if (ranks_is(v, "torchrun") && store && strcmp(store, "True") == 0) { r->port += r->port < 65535 ? 1 : -1; }
    return true;
}

static inline bool ranks_find_key(Ranks* r, RanksVariable variable, const RankVariables* v, Error* e) {
    const char* text = ranks_text(variable, "LLAMA3_TOKEN");
    const size_t length = text ? strlen(text) : 0;
    if (!text && !ranks_is(v, "--gpus")) { return true; }
    if (length < RANKS_SECRET) {  // the message does not show the secret
        return fail(
            e, "the environment variable LLAMA3_TOKEN has %zu characters, wanted at least %d, such as openssl rand -hex 16",
            length, RANKS_SECRET);
    }
    r->key = sip_key(text);
    r->secret = true;
    return true;
}

/* Finds who this process is. `port` is --port; 0: not given. Without a launcher it is rank 0 of 1, launcher NULL, and
 * has no port. Fails if variables are missing, wrong or contradict each other, and names them. */
static inline bool ranks_find(Ranks* r, RanksVariable variable, int port, Error* e) {
    memset(r, 0, sizeof *r);
    r->ranks = r->local_ranks = 1;
    const RankVariables* v = ranks_launcher(variable);
    if (!v) { return true; }
    r->launcher = v->launcher;
    r->name = ranks_run_hash(variable, v);
    return ranks_find_numbers(r, variable, v, e) && ranks_find_address(r, variable, v, e) &&
           ranks_find_port(r, variable, v, port, e) && ranks_find_key(r, variable, v, e);
}

/* Returns the device of this process, which sees `visible` devices: the device with its local rank's number, or 0 if the
 * launcher shows each process one device. -1: this host has fewer devices than ranks. */
static inline int ranks_device(const Ranks* r, int visible) {
    if (visible == 1) { return 0; }
    return visible < r->local_ranks ? -1 : r->local_rank;
}

/* The place of a rank among the ranks of its host. */
typedef struct {
    int local_rank, local_ranks;
} RankPlace;

/* Returns the number of hosts, if each host has the same number of ranks, more than one, and the ranks of a host are neighbours
 * in their order; else 1.   places: (ranks) */
static inline int ranks_hosts(const RankPlace* places, int ranks) {
    const int most = places[0].local_ranks;
    if (most <= 1 || most >= ranks || ranks % most != 0) { return 1; }
    for (int i = 0; i < ranks; i++) {
        if (places[i].local_ranks != most || places[i].local_rank != i % most) { return 1; }
    }
    return ranks / most;
}

#endif
