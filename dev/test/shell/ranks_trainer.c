/* ranks_trainer.c -- the CPU trainer as a run of several ranks, for tests without a GPU: the program's own session, training
 * loop, data, checkpoints and layers, with the weights replicated and the optimizer sharded (ZeRO 1).
 *
 *   ranks_trainer [--ranks N] [--hang-timeout S] FLAGS...   starts N ranks on this machine; without --ranks it is a rank of
 *                                                           torchrun, mpirun or srun, or alone. FLAGS are train_llama3's
 *
 * A file that the ranks map into memory, $RANKS_MEMORY, stands in for the GPUs' network. Each rank writes its gradients there,
 * adds up its own shards in rank order, updates them, and leaves the new weights for the others. $RANKS_HANG: a rank and a
 * step, such as 1:5, in which the rank stands still. $RANKS_SLOW: a rank that is slow.
 *
 * With RANKS_ZERO=3 the ranks behave as if each held only its shards of the weights (--zero 3). A checkpoint gets each piece of
 * a weight from its owners. If one rank passes the layers while another does something else, the run ends.
 *
 * With --seq-parallel ranks share rows, as train_llama3cu's ranks do. The trainer's functions see parts of rows. Its calls of
 * RoPE and attention come here: the same memory exchanges parts of rows for heads, and back (dist/sequence.h).
 */
#include "llmc/attention.h"
#include "llmc/rope.h"
static void shared_rope_forward(float* qkv, const int32_t* starts, const float* table, int first_pos, AttentionShape s);
static void shared_rope_backward(float* dqkv, const int32_t* starts, const float* table, int first_pos, AttentionShape s);
static void shared_attention_forward(float* out, float* lse, void* scratch, const float* qkv, const int32_t* starts,
                                     AttentionShape s);
static void shared_attention_backward(float* dqkv, void* scratch, float* dout, const float* out, const float* lse,
                                      const float* qkv, const int32_t* starts, AttentionShape s);
#define rope_forward shared_rope_forward
#define rope_backward shared_rope_backward
#define attention_forward shared_attention_forward
#define attention_backward shared_attention_backward
#define main train_llama3_main  // this file uses its loop, but has its own main
#include "train_llama3.c"
#undef main
#undef rope_forward
#undef rope_backward
#undef attention_forward
#undef attention_backward

#include "llmc/dist/buckets.h"          // defines: Buckets, buckets_list, shard_of, deal_matrices
#include "llmc/dist/launch.h"           // defines: launch_ranks
#include "llmc/dist/ranks.h"            // defines: Ranks, RANKS_MAX, ranks_find
#include "llmc/dist/sequence.h"         // defines: SequenceShare, heads_shape, heads_out, heads_width
#include "llmc/run/session/together.h"  // defines: together_begin, together_open
#include "llmc/dist/agree.h"            // defines: agree_ok, agree_add

#include <sys/mman.h>

#include "dev/test/oracles.h"

/* The memory that all ranks see. */
typedef struct {
    float* grads;   // (ranks, elements)
    float* params;  // (elements) the weights after an update
    Buckets buckets;
    SequenceShare share;
    Team* team;
    bool shares;   // whether ranks share rows now: in a step or a validation, but not while a text is generated
    float* rooms;  // (ranks, room) the ranks' exchange around attention
    size_t room;
    float* pieces;  // (room) each of this rank alone
    float* heads;
    float* table;  // RoPE's table for whole rows
} Exchange;
static Exchange exchange;  // one model a process

/* Maps the exchange of a model with `elements` trained elements. */
static void exchange_open(const ModelSpec* m, const Process* p, const Options* o) {
    const size_t elements = m->trained.elements, ranks = (size_t)p->ranks;
    const size_t room = (size_t)o->batch * (size_t)o->seq * (size_t)qkv_width(&m->config);
    const size_t bytes = ((ranks + 1) * elements + ranks * room) * sizeof(float);
    const char* path = getenv("RANKS_MEMORY");
    const int fd = path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0) { die("RANKS_MEMORY: wanted a file that can be written"); }
    float* all = (float*)mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (all == MAP_FAILED) { die("%s: cannot be mapped", path); }
    close(fd);
    exchange.grads = all;
    exchange.params = all + ranks * elements;
    exchange.rooms = exchange.params + elements;
    exchange.room = room;
    exchange.share = process_share(p, o);
    exchange.team = p->team;
    exchange.pieces = (float*)xmalloc(room * sizeof(float));
    exchange.heads = (float*)xmalloc(room * sizeof(float));
    exchange.table = (float*)xmalloc((size_t)o->seq * (size_t)m->config.head_dim * sizeof(float));
    rope_table(exchange.table, o->seq, &m->config);
    exchange.buckets = buckets_list(&m->trained);
}

static void barrier(void) {
    Error e = NO_ERROR;
    must(team_barrier(exchange.team, &e), &e);
}

// ---------------------------------------------------------------------------------------------------------------------
// attention of shared rows; s: of a part

/* Block p of each row of `from` goes to member p; member p's block takes its place in `to`. */
static void swap_blocks(float* to, const float* from, AttentionShape s) {
    const size_t parts = (size_t)exchange.share.row_ranks, part = (size_t)exchange.share.part,
                 group = (size_t)exchange.share.group;
    const size_t block = (size_t)s.T * heads_width(s) / parts, blocks = (size_t)s.B * parts;
    memcpy(exchange.rooms + (group * parts + part) * exchange.room, from, blocks * block * sizeof(float));
    barrier();
    for (size_t i = 0; i < blocks; i++) {
        const float* theirs = exchange.rooms + (group * parts + i % parts) * exchange.room;
        memcpy(to + i * block, theirs + (i - i % parts + part) * block, block * sizeof(float));
    }
    barrier();
}

/* Both may be one buffer. */
static void rows_to_heads(float* heads, float* rows, AttentionShape s) {
    heads_pack(exchange.pieces, rows, s, exchange.share.row_ranks, false);
    swap_blocks(heads, exchange.pieces, s);
}

static void heads_to_rows(float* rows, const float* heads, AttentionShape s) {
    swap_blocks(exchange.pieces, heads, s);
    heads_pack(exchange.pieces, rows, s, exchange.share.row_ranks, true);
}

static void shared_rope_forward(float* qkv, const int32_t* starts, const float* table, int first_pos, AttentionShape s) {
    if (exchange.shares) { rows_to_heads(qkv, qkv, s); }
    rope_forward(qkv, starts, exchange.shares ? exchange.table : table, first_pos,
                 exchange.shares ? heads_shape(s, exchange.share.row_ranks) : s);
}

static void shared_rope_backward(float* dqkv, const int32_t* starts, const float* table, int first_pos, AttentionShape s) {
    rope_backward(dqkv, starts, exchange.shares ? exchange.table : table, first_pos,
                  exchange.shares ? heads_shape(s, exchange.share.row_ranks) : s);
    if (exchange.shares) { heads_to_rows(dqkv, dqkv, s); }
}

static void shared_attention_forward(float* out, float* lse, void* scratch, const float* qkv, const int32_t* starts,
                                     AttentionShape s) {
    attention_forward(out, lse, scratch, qkv, starts, exchange.shares ? heads_shape(s, exchange.share.row_ranks) : s);
    if (exchange.shares) { heads_to_rows(out, out, heads_out(s)); }
}

static void shared_attention_backward(float* dqkv, void* scratch, float* dout, const float* out, const float* lse,
                                      const float* qkv, const int32_t* starts, AttentionShape s) {
    if (!exchange.shares) {
        attention_backward(dqkv, scratch, dout, out, lse, qkv, starts, s);
        return;
    }
    memcpy(exchange.heads, out, (size_t)s.B * (size_t)s.T * heads_width(heads_out(s)) * sizeof(float));
    rows_to_heads(exchange.heads, exchange.heads, heads_out(s));
    rows_to_heads(dout, dout, heads_out(s));
    const AttentionShape heads = heads_shape(s, exchange.share.row_ranks);
    void* own = xmalloc(attention_backward_scratch(heads));
    attention_backward(dqkv, own, dout, exchange.heads, lse, qkv, starts, heads);
    free(own);
}

/* Makes a model for batches of parts of rows. */
static void* ranks_create(const Trainer* t, const ModelConfig* c, const ModelUse* use, const Options* o, Team* team) {
    ModelUse parts = *use;
    parts.T /= exchange.share.row_ranks;
    return trainer_create(t, c, &parts, o, team);
}

/* queue_losses() with several ranks. */
static bool ranks_queue_losses(void* model, const BatchSource* data, Error* e) {
    exchange.shares = exchange.share.row_ranks > 1;
    const bool ok = queue_losses(model, data, e);
    exchange.shares = false;
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// the optimizer, sharded

/* Adds up the gradients of this rank's shards over all ranks. Returns the sum of their squares. */
static double sum_shards(Llama* m, const Recipe* recipe) {
    const Ranks* r = &recipe->team->run;
    const size_t elements = m->trained.elements;
    double square = 0;
    memcpy(exchange.grads + (size_t)r->rank * elements, m->grads, elements * sizeof(float));
    barrier();
    for (int b = 0; b < exchange.buckets.count; b++) {
        const ArenaRange shard = shard_of(&exchange.buckets.items[b], r->rank, r->ranks);
        const float* parts[RANKS_MAX];
        for (int i = 0; i < r->ranks; i++) { parts[i] = exchange.grads + (size_t)i * elements + shard.first; }
        square += ordered_sum(m->grads + shard.first, parts, r->ranks, shard.count, false);
    }
    return square;
}

/* Applies a stage of the rules to this rank's elements: `prepare`, or else `update`. */
static void update_own(Llama* m, const Recipe* recipe, UpdateStep step, bool prepare) {
    const OptimizerArenas arenas = {trained_params(m), m->grads, m->m, m->v};
    for (int b = 0; b < exchange.buckets.count; b++) {
        const ArenaRange shard = shard_of(&exchange.buckets.items[b], recipe->team->run.rank, recipe->team->run.ranks);
        for (int i = 0; i < m->trained.count; i++) {
            const Param* p = &m->trained.items[i];
            const OptimizerRule* rule = rule_of(&m->trained, p->kind);
            size_t first = 0;
            const size_t n = state_part(p, shard, &first);
            step = step_of(step, p);
            if (n == 0 || (prepare && !rule->prepare)) { continue; }
            (prepare ? rule->prepare : rule->update)(optimizer_at(arenas, &m->held, p->offset + first), n, &step);
        }
    }
}

/* Copies this rank's elements of `from` to `to`, and then the elements of all ranks back. */
static void share_own(const Recipe* recipe, float* to, float* from, size_t elements) {
    for (int b = 0; b < exchange.buckets.count; b++) {
        const ArenaRange shard = shard_of(&exchange.buckets.items[b], recipe->team->run.rank, recipe->team->run.ranks);
        memcpy(to + shard.first, from + shard.first, shard.count * sizeof(float));
    }
    barrier();
    memcpy(from, to, elements * sizeof(float));
    barrier();
}

/* Updates this rank's shards and takes the others' weights. Before that, owners of matrices take and return them. */
static void update_shards(Llama* m, const Recipe* recipe, float grad_scale) {
    const UpdateStep step = {&recipe->hyper, m->result.lr, grad_scale, (int64_t)recipe->run->updates, NULL, 0};
    const size_t elements = m->trained.elements;
    Deal deal = deal_matrices(&m->trained);
    update_own(m, recipe, step, true);
    if (deal.count > 0) { share_own(recipe, exchange.params, m->grads, elements); }
    for (int i = 0; i < deal.count; i++) {
        const Param* p = deal.items[i].param;
        if (deal.items[i].owner != recipe->team->run.rank) { continue; }
        rule_of(&m->trained, p->kind)->matrix(m->grads + p->offset, p->rows, p->cols, m->scratch);
        memcpy(exchange.params + p->offset, m->grads + p->offset, param_size(p) * sizeof(float));
    }
    barrier();
    for (int i = 0; i < deal.count; i++) {
        const Param* p = deal.items[i].param;
        memcpy(m->grads + p->offset, exchange.params + p->offset, param_size(p) * sizeof(float));
    }
    barrier();
    free(deal.items);
    update_own(m, recipe, step, false);
    share_own(recipe, exchange.params, trained_params(m), elements);
}

/* On rank $RANKS_SLOW: sleeps for twice the time of this step's computing, at least 20 ms. */
static void be_slow_if_asked(const Recipe* recipe, double start) {
    const char* text = getenv("RANKS_SLOW");
    if (text && atoi(text) == recipe->team->run.rank) {
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

/* Stands still at the rank and step of $RANKS_HANG. */
static void hang_if_asked(const Recipe* recipe) {
    const char* text = getenv("RANKS_HANG");
    char here[64];
    snprintf(here, sizeof here, "%d:%llu", recipe->team->run.rank, (unsigned long long)recipe->run->step);
    while (text && strcmp(text, here) == 0) { pause(); }
}

/* train_step() with several ranks. */
static bool ranks_step(void* model, const Recipe* recipe, double lr, Error* e) {
    Llama* m = (Llama*)model;
    Metrics* r = &m->result;
    float grad_scale = 0;
    const double start = now_seconds();
    hang_if_asked(recipe);
    exchange.shares = exchange.share.row_ranks > 1;
    const bool ok = step_gradients(m, recipe, lr, e);
    exchange.shares = false;
    be_slow_if_asked(recipe, start);
    busy_ms = (now_seconds() - start) * 1e3;
    if (!agree_ok(recipe->team, ok, e)) { return false; }
    double sums[3] = {sum_shards(m, recipe), r->loss, r->trained};
    agree_add(recipe->team, sums, 3);
    agree_add(recipe->team, r->sources.sum, (size_t)r->sources.count);
    agree_add(recipe->team, r->sources.tokens, (size_t)r->sources.count);
    r->loss = sums[1] / recipe->team->run.ranks;
    r->trained = sums[2];
    if (step_decide(m, recipe, sqrt(sums[0]), &grad_scale)) { update_shards(m, recipe, grad_scale); }
    r->ms = (now_seconds() - start) * 1e3;
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// collective work of ZeRO 3's ranks

static Team* zero_team;  // NULL: each rank has all weights

/* Ends the run unless all ranks are at the same place: on GPUs collectives of different kinds would never end. */
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

/* A TensorSource: every rank leaves its own elements of a piece for rank 0. */
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
    const StateSlot slot = {slot_names[kind], SAFE_F32, zero_team ? zero_piece : NULL, NULL, model, NULL};
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

/* Makes the ranks behave as with --zero 3. */
static void zero_open(Trainer* trainer, Program* p) {
    zero_team = p->process.team;
    p->chosen.zero = ZERO_3;
    trainer->collect = zero_collect;
    trainer->queue_losses = zero_queue_losses;
    trainer->next_logits = zero_next_logits;
    trainer->name_not_finite = zero_name_not_finite;
}

/* If the first two words are this flag and its value, removes them and returns the value; else returns NULL. */
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
    Program p;
    Ranks ranks;
    Team team;
    must(ranks_find(&ranks, getenv, 0, &e), &e);
    if (argc >= 256) { die("wanted at most 255 words"); }
    memcpy(all, argv, ((size_t)argc + 1) * sizeof *argv);
    const char* count = take_flag("--ranks", &argc, argv);
    const char* hang = take_flag("--hang-timeout", &argc, argv);
    if (count && !ranks.launcher) {
        const int status = launch_ranks(atoi(count), all, &e);
        must(!e.msg[0], &e);
        return status;
    }
    OptionScope scope = ON_CPU;  // --seq-parallel is a flag of the other trainer
    for (int i = 1; i < argc; i++) { scope = strcmp(argv[i], "--seq-parallel") == 0 ? ON_GPU : scope; }
    const FoundCheckpoint found = together_begin(&team, &ranks, argc, argv, scope);
    program_open(&p, argc, argv, scope, ranks.rank, ranks.ranks, found);
    if (hang) { p.chosen.hang_timeout = atof(hang); }  // the CPU trainer has no such flag
    run_machine(NULL, machine_threads(p.chosen.threads), p.process.machine, sizeof p.process.machine);
    together_open(&p, &team, &ranks);
    Trainer trainer = cpu_trainer;
    if (p.process.team) {
        trainer.create = ranks_create;
        trainer.step = ranks_step;
        trainer.busy_ms = ranks_busy_ms;
        trainer.queue_losses = ranks_queue_losses;
        exchange_open(&p.spec, &p.process, &p.chosen);
        if (getenv("RANKS_ZERO")) { zero_open(&trainer, &p); }
    }
    const int status = run_job(&trainer, &p);
    together_close(p.process.team, false);
    program_close(&p);
    return status;
}
