/* together.h -- a run of several ranks: how they meet, and what they decide together: whether all are well, whether to end or
 * to save, what rank 0 measured.
 *
 * All ranks call the same functions in the same order, and get the same answer. A process that is alone has no team (NULL)
 * and decides at once. Where a rank is lost, the team ends the process itself and names the cause (dist/team.h).
 *
 * Rank 0 has the screen, the log and --out. The others' stdout goes nowhere; their errors carry their number.
 */
#ifndef LLMC_TOGETHER_H
#define LLMC_TOGETHER_H

#include "llmc/base/crc.h"  // defines: crc_of
#include "llmc/base/utils.h"
#include "llmc/dist/agree.h"           // defines: agree_gather, agree_first, agree_texts
#include "llmc/dist/launch.h"          // defines: launch_parent_fd
#include "llmc/dist/ranks.h"           // defines: Ranks
#include "llmc/dist/team.h"            // defines: team_open, team_close
#include "llmc/dist/team_state.h"      // defines: Team
#include "llmc/run/cli/options.h"      // defines: Options, options_parse
#include "llmc/run/session/session.h"  // defines: Program, Data
#include "llmc/run/session/signals.h"  // run_together

/* The ranks' wishes between two steps. */
typedef struct {
    uint8_t end;     // any rank got a signal; not bool, since another process's byte may be neither 0 nor 1
    uint8_t save;    // any rank got SIGUSR1 or SIGUSR2
    uint8_t timed;   // rank 0's clock says that --checkpoint-minutes asks for a checkpoint
    uint8_t failed;  // any rank has an error
    float busy_ms;   // time that a rank computed in the step reported last, without waiting for others; 0: unknown
    int64_t steps;   // where rank 0's clock says that --minutes ends the run
} Wishes;

/* Joins the wishes of all ranks. `busy_ms` then has the value of each rank; a process alone leaves it unchanged. */
static inline Wishes together_wish(Team* team, Wishes mine, float* busy_ms /* (ranks) */) {
    if (!team) { return mine; }
    const int ranks = team->run.ranks;
    Wishes* all = (Wishes*)xmalloc((size_t)ranks * sizeof *all);
    agree_gather(team, &mine, sizeof mine, all);
    Wishes w = all[0];
    for (int i = 0; i < ranks; i++) { busy_ms[i] = all[i].busy_ms; }
    for (int i = 1; i < ranks; i++) {
        w.end = w.end || all[i].end;
        w.save = w.save || all[i].save;
        w.failed = w.failed || all[i].failed;
    }
    free(all);
    return w;
}

// ---------------------------------------------------------------------------------------------------------------------
// meeting

enum { TOGETHER_SECONDS = 300 };  // time for the ranks to meet: the first run on a machine loads from cold disks

/* Ends a rank that failed. exit() would unload libraries under threads of their own, such as NCCL's, and a crash there would
 * hide the error. */
LLMC_NORETURN static inline void together_exit(void) {
    fflush(NULL);
    _exit(1);
}

/* Leaves the others: all ranks do so at the end. With `failed`, for an error that all ranks know, one rank of each host
 * continues and prints it; the others end here. */
static inline void together_close(Team* team, bool failed) {
    if (!team || !team->open) { return; }
    const bool tells = team->run.local_rank == 0;
    team_close(team);
    if (failed && !tells) { together_exit(); }
}

/* Ends the run for an error that all ranks know. */
LLMC_NORETURN static inline void together_die(Team* team, const Error* e) {
    together_close(team, true);
    die("%s", e->msg);
}

/* Rank 0 reports the checkpoint that it resumes to the others, before they open theirs. Returns the checkpoint; the other
 * ranks report nothing. */
static inline FoundCheckpoint together_share_checkpoint(Team* team, bool resumed, uint64_t step) {
    FoundCheckpoint found = {true, resumed, step};
    agree_first(team, &found, sizeof found);
    return found;
}

static Team* together_team;  // the team that hears of the error that ends this rank; a hook needs a global

/* Passes on the error that ends this rank: message_last of utils.h. The team's own thread cannot pass it on, and just ends. */
static inline void together_tell(const char* text) {
    Team* t = together_team;
    message_last = NULL;
    if (!t->threaded || !pthread_equal(pthread_self(), t->thread)) { team_fail(t, text); }
    together_exit();
}

/* Connects to the other ranks, or refuses a rank of another version. */
static inline void together_meet(Team* team, const Ranks* r) {
    Error e = NO_ERROR;
    must(team_open(team, r, LLMC_VERSION, TOGETHER_SECONDS, &e), &e);
    together_team = team;
    message_last = together_tell;
}

/* Returns whether the command line asks for a job that one process does alone, such as --help or a chat. Rank 0 reports
 * wrong usage. */
static inline bool together_is_for_one(int argc, char** argv, OptionScope trainer) {
    Options o;
    Error ignored = NO_ERROR;
    const OptionsResult result = options_parse(&o, argc, argv, trainer, &ignored);
    const bool is = o.generate || o.chat || o.answer || o.export_ || o.verify;
    options_free(&o);
    return result == OPTIONS_HELP || result == OPTIONS_SHOW_VERSION || (result == OPTIONS_OK && is);
}

/* Makes the process one of several ranks, before it opens its program. Rank 0 opens its program first. So errors in flags or
 * files are printed once, the others find --out cleaned, and they take the checkpoint that rank 0 has read whole. Rank 0
 * alone does a job of one process: then *r says so, and the others end here. Returns the checkpoint that rank 0 has
 * reported. */
static inline FoundCheckpoint together_begin(Team* team, Ranks* r, int argc, char** argv, OptionScope trainer) {
    if (r->ranks > 1 && together_is_for_one(argc, argv, trainer)) {
        if (r->rank > 0) { exit(0); }
        r->ranks = r->local_ranks = 1;
    }
    if (r->ranks == 1) { return no_report; }
    run_together = 1;
    Error e = NO_ERROR;
    team_init(team);
    team->parent_fd = launch_parent_fd();
    if (r->rank == 0) {
        must(team_listen(team, r, &e), &e);  // the others then know that it has started, while it reads its files
        if (!r->secret && r->local_ranks < r->ranks) {
            printf(
                "network LLAMA3_TOKEN is not set: until all ranks have met, whoever reaches port %d of %s can join or end the "
                "run\n",
                r->port, r->address);
        }
        return no_report;
    }
    snprintf(message_rank, sizeof message_rank, "rank %d: ", r->rank);
    if (!freopen("/dev/null", "w", stdout)) { die("/dev/null: cannot be opened: %s", strerror(errno)); }
    together_meet(team, r);
    return together_share_checkpoint(team, false, 0);
}

/* Reads --gpus: a number, -1 for all, 0 if it is not given. Ends the program if it is neither. */
static inline int together_gpus(const Options* o) {
    if (!o->gpus) { return 0; }
    if (strcmp(o->gpus, "all") == 0) { return -1; }
    char* end = NULL;
    const long count = strtol(o->gpus, &end, 10);
    if (*end || end == o->gpus || count < 1 || count > RANKS_MAX) {
        die_usage("--gpus: is \"%.80s\", wanted a number from 1 to %d, or all", o->gpus, RANKS_MAX);
    }
    return (int)count;
}

/* Returns the number of ranks that this process is to start by --gpus; 0: none, it is a rank itself, or alone. If a launcher
 * started several processes, these are the ranks, and --gpus may only repeat their number. If a launcher started a single
 * process, --gpus decides. */
static inline int together_count(const Options* o, const Ranks* r, int (*count_devices)(void)) {
    const int gpus = together_gpus(o);
    if (r->ranks > 1 && gpus > 0 && gpus != r->local_ranks) {
        if (r->local_rank > 0) { exit(1); }  // one rank of a host prints it
        die("--gpus: is %d, but %s started %d %s on this host\n"
            "  hint: leave out --gpus, or start one process without %s",
            gpus, r->launcher, r->local_ranks, r->local_ranks == 1 ? "process" : "processes", r->launcher);
    }
    if (r->ranks > 1) { return 0; }
    if (gpus >= 0) { return gpus; }
    const int count = launch_count(count_devices);
    if (count < 1 && o->dry_run) { die("--gpus all: no GPU can be used here\n  hint: give their number, such as --gpus 8"); }
    if (count < 1) { die("--gpus all: no GPU can be used here"); }
    return count;
}

/* Finds out who this process is, before it opens its program. With --gpus N it becomes the parent of N ranks, and ends when
 * they have ended. A dry run is one process, which measures as rank 0 of N. Returns what together_begin() does. */
static inline FoundCheckpoint together_start(Team* team, Ranks* r, int argc, char** argv, OptionScope trainer,
                                             int (*count_devices)(void)) {
    Options o;
    Error e = NO_ERROR, ignored = NO_ERROR;
    const bool read = options_parse(&o, argc, argv, trainer, &ignored) == OPTIONS_OK;
    must(ranks_find(r, getenv, read ? o.port : 0, &e), &e);
    const int count = read && !together_is_for_one(argc, argv, trainer) ? together_count(&o, r, count_devices) : 0;
    const bool dry = read && o.dry_run;
    options_free(&o);
    if (dry) {
        if (r->rank > 0) { exit(0); }
        if (count > 0) { r->ranks = count; }
        r->local_ranks = 1;
        r->launcher = NULL;
        return no_report;
    }
    if (count > 1) {
        const int status = launch_ranks(count, argv, &e);
        must(!e.msg[0], &e);
        exit(status);
    }
    return together_begin(team, r, argc, argv, trainer);
}

/* Ends the run if a text is not the same on all ranks. If a text is too long for a message, its end and a checksum are
 * compared. */
static inline void together_compare(Team* team, const char* name, const char* text) {
    enum { MOST = TEAM_PAYLOAD };
    char mine[MOST] = {0};
    const size_t length = strlen(text);
    Error e = NO_ERROR;
    if (length < MOST) {
        memcpy(mine, text, length);
    } else {
        snprintf(mine, MOST, "%08" PRIx32 " ..%s", crc_of(text, length), text + length - (MOST - 16));
    }
    char* all = (char*)xmalloc((size_t)team->run.ranks * MOST);
    agree_gather(team, mine, MOST, all);
    const bool same = agree_texts(name, all, team->run.ranks, MOST, &e);
    free(all);
    if (!same) { together_die(team, &e); }
}

/* together_compare() for a fingerprint. */
static inline void together_compare_print(Team* team, const char* name, uint64_t print) {
    char text[32];
    snprintf(text, sizeof text, "%016" PRIx64, print);
    together_compare(team, name, text);
}

/* Compares the files that each rank has read itself. */
static inline void together_compare_files(Team* team, const Data* d) {
    uint64_t train = 0, val = 0;
    Error e = NO_ERROR;
    must(!d->has_train || mix_fingerprint(&d->mix, &train, &e), &e);
    must(!d->has_val || dataloader_fingerprint(&d->val, &val, &e), &e);
    together_compare_print(team, "the fingerprint of --train", train);
    together_compare_print(team, "the fingerprint of --val", val);
    together_compare_print(team, "the fingerprint of the tokenizer", data_tokenizer_print(d));
    together_compare_print(team, "the fingerprint of --tasks", d->has_tasks ? tasks_fingerprint(&d->tasks) : 0);
}

/* Compares the weights that each rank has loaded, by their checksum. */
static inline void together_compare_weights(Team* team, uint32_t crc) {
    if (team) { together_compare_print(team, "the checksum of the weights", crc); }
}

/* Meets the other ranks once the program is open, and compares what must be the same on all: the build, all flags but
 * --threads, the data, the tokenizer, the checkpoint that the run resumes. Does nothing if the process is alone. */
static inline void together_open(Program* p, Team* team, const Ranks* r) {
    const Options* o = &p->chosen;
    const uint64_t step = p->run.state.step;
    char name[OPTION_TEXT], value[OPTION_TEXT], text[64];
    if (r->ranks == 1 || p->process.job == JOB_DRY_RUN) { return; }
    if (r->rank == 0) {
        team->hang_seconds = o->hang_timeout;  // only rank 0 watches for that
        together_meet(team, r);
        together_share_checkpoint(team, p->start.resumed, step);
    }
    p->process.team = team;
    together_compare(team, "this build", p->process.build);
    for (int i = 0; i < NUM_OPTIONS; i++) {
        if (i != OPT_threads) { together_compare(team, option_flag(i, name), option_text(o, i, value)); }
    }
    together_compare_files(team, &p->data);
    snprintf(text, sizeof text, p->start.resumed ? "step %llu" : "none", (unsigned long long)step);
    together_compare(team, "the checkpoint to resume", text);
}

/* Checks that all ranks see the same --out: each reads a random number that rank 0 writes there. */
static inline void together_share_out(Team* team, const char* out) {
    char path[PATH_CAP], text[32];
    size_t size = 0;
    uint64_t number = 0;
    Error e = NO_ERROR;
    if (!team) { return; }
    const bool first = team->run.rank == 0;
    os_random(&number, sizeof number);
    agree_first(team, &number, sizeof number);
    const size_t length = (size_t)snprintf(text, sizeof text, "%016" PRIx64 "\n", number);
    bool ok = path_join(path, out, ".ranks", &e) && (!first || write_file(path, text, length, &e));
    if (!agree_ok(team, ok, &e)) { together_die(team, &e); }
    if (!first) {
        Error ignored = NO_ERROR;
        char* found = read_file(path, &size, 64, &ignored);
        ok = found && size == length && memcmp(found, text, size) == 0;
        free(found);
        if (!ok) {
            fail(&e, "--out: %s on host %s is not the folder of rank 0: all ranks must share it", out, team->hello.host);
        }
    }
    const bool shared = agree_ok(team, ok, &e);
    if (first) { unlink(path); }
    if (!shared) { together_die(team, &e); }
}

#endif
