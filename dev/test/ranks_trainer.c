/* ranks_trainer.c -- the CPU trainer as a run of several ranks, for tests without a GPU: the program's own session, training
 * loop, data, checkpoints and layers, with the weights replicated and the optimizer sharded (ZeRO 1).
 *
 *   ranks_trainer [--ranks N] [--hang-timeout S] FLAGS...   starts N ranks on this machine; without --ranks it is a rank of
 *                                                           torchrun, mpirun or srun, or alone. FLAGS are train_llama3's
 *
 * In the place of a GPU's network stands a file that the ranks map into memory, $RANKS_MEMORY: each rank writes its gradients
 * there, adds up the shards that it owns in rank order, updates them, and leaves the new weights for the others.
 * $RANKS_HANG: a rank and a step, such as 1:5, in which it stands still. $RANKS_SLOW: a rank that is slow.
 *
 * With RANKS_ZERO=3 the ranks behave as if each had its shards of the weights alone (--zero 3): a checkpoint gets each piece of
 * a weight from its owners, and a rank that passes the layers where another one does something else ends the run.
 */
#define main train_llama3_main  // its loop is wanted, but another main
#include "train_llama3.c"
#undef main

#include "llmc/dist/buckets.h"  // defines: Buckets, buckets_list, shard_of, ordered_sum
#include "llmc/dist/launch.h"   // defines: launch_ranks
#include "llmc/dist/ranks.h"    // defines: Ranks, RANKS_MAX, ranks_find
#include "llmc/run/together.h"  // defines: together_begin, together_open, together_ok, together_add

#include <sys/mman.h>

/* The memory that all ranks see. */
typedef struct {
    float* grads;   // (ranks, elements)
    float* params;  // (elements) the weights after an update
    Buckets buckets;
} Exchange;
static Exchange exchange;  // one model a process

/* Maps the exchange of a model with `elements` trained elements. */
static void exchange_open(const Session* s) {
    const size_t elements = s->trained.elements, bytes = ((size_t)s->ranks + 1) * elements * sizeof(float);
    const char* path = getenv("RANKS_MEMORY");
    const int fd = path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0) { die("RANKS_MEMORY: wanted a file that can be written"); }
    float* all = (float*)mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (all == MAP_FAILED) { die("%s: cannot be mapped", path); }
    close(fd);
    exchange.grads = all;
    exchange.params = all + (size_t)s->ranks * elements;
    exchange.buckets = buckets_list(&s->trained);
}

static void barrier(const StepPlan* plan) {
    Error e = NO_ERROR;
    must(team_barrier(plan->team, &e), &e);
}

/* Adds up the gradients of this rank's shards over all ranks. Returns the sum of their squares. */
static double sum_shards(Llama* m, const StepPlan* plan) {
    const Ranks* r = &plan->team->run;
    const size_t elements = m->trained.elements;
    double square = 0;
    memcpy(exchange.grads + (size_t)r->rank * elements, m->grads, elements * sizeof(float));
    barrier(plan);
    for (int b = 0; b < exchange.buckets.count; b++) {
        const ArenaRange shard = shard_of(&exchange.buckets.items[b], r->rank, r->ranks);
        const float* parts[RANKS_MAX];
        for (int i = 0; i < r->ranks; i++) { parts[i] = exchange.grads + (size_t)i * elements + shard.first; }
        square += ordered_sum(m->grads + shard.first, parts, r->ranks, shard.count, false);
    }
    return square;
}

/* Updates this rank's shards and takes the others' weights. */
static void update_shards(Llama* m, const StepPlan* plan, AdamW hyper) {
    const Ranks* r = &plan->team->run;
    const double weight_decay = hyper.weight_decay;
    float* params = trained_params(m);
    for (int b = 0; b < exchange.buckets.count; b++) {
        const ArenaRange shard = shard_of(&exchange.buckets.items[b], r->rank, r->ranks);
        for (int i = 0; i < m->trained.count; i++) {
            const Param* p = &m->trained.items[i];
            size_t first = 0;
            const size_t n = state_part(p, shard, &first), at = p->offset + first;
            hyper.weight_decay = param_specs[p->kind].matrix ? weight_decay : 0.0;
            if (n > 0) { adamw_update(params + at, m->grads + at, m->m + at, m->v + at, n, &hyper); }
        }
        memcpy(exchange.params + shard.first, params + shard.first, shard.count * sizeof(float));
    }
    barrier(plan);
    memcpy(params, exchange.params, m->trained.elements * sizeof(float));
}

/* Takes twice as long, and at least 20 ms, for what this rank computes where $RANKS_SLOW is its number. */
static void be_slow_if_asked(const StepPlan* plan, double start) {
    const char* text = getenv("RANKS_SLOW");
    if (text && atoi(text) == plan->team->run.rank) {
        const double seconds = fmax(0.02, 2 * (now_seconds() - start));
        const struct timespec time = {(time_t)seconds, (long)(1e9 * (seconds - floor(seconds)))};
        nanosleep(&time, NULL);
    }
}

static double busy_ms;  // of the last step
static double ranks_busy_ms(const void* model) {
    (void)model;
    return busy_ms;
}

/* Stands still where $RANKS_HANG asks for it. */
static void hang_if_asked(const StepPlan* plan) {
    const char* text = getenv("RANKS_HANG");
    char here[64];
    snprintf(here, sizeof here, "%d:%llu", plan->team->run.rank, (unsigned long long)plan->run->step);
    while (text && strcmp(text, here) == 0) { pause(); }
}

/* train_step() of several ranks. */
static bool ranks_step(void* model, const StepPlan* plan, double lr, Error* e) {
    Llama* m = (Llama*)model;
    StepResult* r = &m->result;
    AdamW hyper;
    const double start = now_seconds();
    hang_if_asked(plan);
    const bool ok = step_gradients(m, plan, lr, e);
    be_slow_if_asked(plan, start);
    busy_ms = (now_seconds() - start) * 1e3;
    if (!together_ok(plan->team, ok, e)) { return false; }
    double sums[3] = {sum_shards(m, plan), r->loss, r->trained};
    together_add(plan->team, sums, 3);
    together_add(plan->team, r->sources.sum, (size_t)r->sources.count);
    together_add(plan->team, r->sources.tokens, (size_t)r->sources.count);
    r->loss = sums[1] / plan->team->run.ranks;
    r->trained = sums[2];
    if (step_decide(m, plan, sqrt(sums[0]), &hyper)) { update_shards(m, plan, hyper); }
    r->ms = (now_seconds() - start) * 1e3;
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// what ranks of ZeRO 3 do together

static Team* zero_team;  // NULL: they have all weights

/* Ends the run if the ranks are not all at the same place, as collectives of another kind would never end. */
static void meet(const char* place) {
    char mine[32] = "", all[RANKS_MAX][sizeof mine];
    Error e = NO_ERROR;
    if (!zero_team) { return; }
    snprintf(mine, sizeof mine, "%s", place);
    must(team_gather(zero_team, mine, sizeof mine, all, &e), &e);
    for (int r = 0; r < zero_team->run.ranks; r++) {
        if (strcmp(all[r], mine) != 0) { die("passes apart: here %s, on rank %d %s", mine, r, all[r]); }
    }
}

/* A TensorSource: every rank leaves what it owns of a piece for rank 0. */
static bool zero_piece(void* model, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    const float* params = trained_params((Llama*)model) + p->offset + first;
    const Ranks* r = &zero_team->run;
    float* shared = exchange.grads;
    size_t local = 0;
    (void)e;
    for (size_t i = 0; r->rank == 0 && i < n; i++) { shared[i] = NAN; }
    meet(p->name);
    for (size_t i = 0; i < n; i++) {
        if (shard_owner(&exchange.buckets, p->offset + first + i, &local) == r->rank) { shared[i] = params[i]; }
    }
    meet("the piece is there");
    if (r->rank == 0) { memcpy(dst, shared, n * sizeof *dst); }
    return true;
}

static StateSlot zero_collect(void* model, SlotKind kind) {
    const StateSlot slot = {slot_names[kind], SAFE_F32, zero_team ? zero_piece : NULL, NULL, model};
    return slot;
}

static bool zero_queue_losses(void* model, const BatchSource* data, Error* e) {
    meet("losses");
    return cpu_trainer.queue_losses(model, data, e);
}

static const float* zero_next_logits(void* model, const int32_t* tokens, int count, int pos, Error* e) {
    meet("logits");
    return cpu_trainer.next_logits(model, tokens, count, pos, e);
}

static bool zero_name_not_finite(void* model, char name[TENSOR_TEXT]) {
    meet("name");
    return cpu_trainer.name_not_finite(model, name);
}

/* Makes the ranks those of --zero 3. */
static void zero_open(Trainer* trainer, Session* s) {
    zero_team = s->team;
    s->options.zero = ZERO_3;
    trainer->collect = zero_collect;
    trainer->queue_losses = zero_queue_losses;
    trainer->next_logits = zero_next_logits;
    trainer->name_not_finite = zero_name_not_finite;
}

static const char* variable(const char* name) { return getenv(name); }

/* Takes the first two words away if they are this flag and its value, which it returns; NULL: they are not. */
static const char* take_flag(const char* flag, int* argc, char** argv) {
    if (*argc < 3 || strcmp(argv[1], flag) != 0) { return NULL; }
    const char* value = argv[2];
    memmove(argv + 1, argv + 3, (size_t)(*argc - 2) * sizeof *argv);  // and the NULL behind
    *argc -= 2;
    return value;
}

int main(int argc, char** argv) {
    char* all[256];  // that the parent's ranks get
    Error e = NO_ERROR;
    Session s;
    Ranks ranks;
    Team team;
    must(ranks_find(&ranks, variable, 0, &e), &e);
    if (argc >= 256) { die("wanted at most 255 words"); }
    memcpy(all, argv, ((size_t)argc + 1) * sizeof *argv);
    const int words = argc;
    const char* count = take_flag("--ranks", &argc, argv);
    const char* hang = take_flag("--hang-timeout", &argc, argv);
    if (count && !ranks.launcher) {
        const int status = launch_ranks(atoi(count), words, all, &e);
        must(!e.msg[0], &e);
        return status;
    }
    together_begin(&team, &ranks, argc, argv, ON_CPU);
    session_open(&s, argc, argv, ON_CPU, ranks.rank, ranks.ranks);
    if (hang) { s.options.hang_timeout = atof(hang); }  // the CPU trainer has no such flag
    run_machine(NULL, machine_threads(s.options.threads), s.machine, sizeof s.machine);
    together_open(&s, &team, &ranks);
    Trainer trainer = cpu_trainer;
    if (s.team) {
        trainer.step = ranks_step;
        trainer.busy_ms = ranks_busy_ms;
        exchange_open(&s);
        if (getenv("RANKS_ZERO")) { zero_open(&trainer, &s); }
    }
    run_job(&trainer, &s, train);
    together_close(&s, false);
    session_close(&s);
    return s.status;
}
