/* block.cpp -- runs the blocks of a grid on the emulated card, one after the other. Each thread of a block is a fiber: it has
 * its own stack, and runs until it waits for a word to change. Barriers and exchanges of a warp are such words. A waiting
 * thread gets its turns, too, but the scheduler looks at its word, and continues its fiber only when the word has changed.
 *
 * For x86-64: emulator_switch() is the only machine code.
 */
#include "device.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <vector>

enum { MOST_THREADS = 1024, WARPS = MOST_THREADS / 32, SHARED = 231 << 10, BARRIERS = 16 };
// an odd number of pages and of cache lines, so that the stacks' tops are not in the same places of TLB and cache
enum { STACK = (65 << 12) + (3 << 6) };

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

static char shared_memory[SHARED] __attribute__((aligned(1024)));
char* const emulator_shared = shared_memory;

void emulator_die(const char* format, ...) {
    va_list list;
    va_start(list, format);
    fprintf(stderr, "emulated card: ");
    vfprintf(stderr, format, list);
    fprintf(stderr, "\n");
    va_end(list);
    _Exit(1);
}

static unsigned chance = getenv("EMULATOR_SEED") ? (unsigned)atoi(getenv("EMULATOR_SEED")) : 0;

static inline unsigned choose(unsigned n) {
    if (chance == 0 || n < 2) { return 0; }
    chance ^= chance << 13, chance ^= chance >> 17, chance ^= chance << 5;  // Marsaglia's xorshift
    return chance % n;
}

unsigned emulator_choose(unsigned n) { return choose(n); }

// ---------------------------------------------------------------------------------------------------------------------
// fibers

/* Saves the callee-saved registers on the stack, and continues on another stack with the registers saved there. */
extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.globl emulator_switch
emulator_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");

/* Threads of the running block. */
static struct Thread {
    void* at;   // where it goes on
    int stack;  // its number
    uint3 index;
    bool begun, ended;
    const unsigned* awaited;  // waits until this word is no longer `old`
    unsigned old;
} threads[MOST_THREADS];
static int free_stacks[MOST_THREADS], num_free;  // the stack given back last is taken next: it is in the cache
static unsigned count, current, alive;
static unsigned idle;  // turns since anything changed
static void* scheduler;
static const std::function<void()>* thread_body;

void emulator_progress(void) { idle = 0; }

/* Makes the next thread that can run the current one. */
static void next_turn(void) {
    const Thread* t;
    do {
        if (++idle > 64 * MOST_THREADS) {  // by chance a turn comes late
            emulator_die("block (%u, %u, %u) is stuck: %u of its %u threads wait", blockIdx.x, blockIdx.y, blockIdx.z, alive,
                         count);
        }
        current += 1 + choose(2);
        if (current >= count) { current = 0; }
        t = &threads[current];
    } while (t->ended || (t->awaited && *t->awaited == t->old));
}

void emulator_wait(const unsigned* word, unsigned old) {
    if (*word != old) { return; }
    const unsigned self = current;
    threads[self].awaited = word, threads[self].old = old;
    next_turn();
    emulator_switch(&threads[self].at, threads[current].begun ? threads[current].at : scheduler);
    threads[self].awaited = NULL;
    threadIdx = threads[self].index;
}

// a barrier of the block, or one of the named ones
struct Barrier {
    unsigned arrived, turn;
    int sum, sum_of_turn;
};
static Barrier block_barrier, named[BARRIERS];

static void release(Barrier* b) {
    b->sum_of_turn = b->sum;
    b->arrived = 0, b->sum = 0;
    b->turn++;
    emulator_progress();
}

// ---------------------------------------------------------------------------------------------------------------------
// waiting for others

int emulator_barrier(int x) {
    Barrier* b = &block_barrier;
    const unsigned turn = b->turn;
    b->sum += x;
    emulator_progress();
    if (++b->arrived == alive) {
        release(b);
    } else {
        emulator_wait(&b->turn, turn);
    }
    return b->sum_of_turn;
}

void emulator_barrier_of(int id, int wanted) {
    if (id < 0 || id >= BARRIERS) { emulator_die("barrier %d: a block has %d", id, BARRIERS); }
    Barrier* b = &named[id];
    const unsigned turn = b->turn;
    emulator_progress();
    if (++b->arrived == (unsigned)wanted) {
        release(b);
    } else {
        emulator_wait(&b->turn, turn);
    }
}

/* Lanes that exchange, found by the lowest lane. Two sets of slots take turns: no lane writes the second set before all lanes
 * have read the first. */
static struct Exchange {
    unsigned arrived, turn, mask;
    EmulatorSlots slots[2];
} exchanges[WARPS][32];
static unsigned lanes_alive[WARPS], exchanges_begun[WARPS];

static void exchange_if_all_came(Exchange* x, unsigned warp) {
    if (x->arrived == 0 || x->arrived != (x->mask & lanes_alive[warp])) { return; }
    x->slots[x->turn++ % 2].lanes = x->arrived;
    x->arrived = 0;
    exchanges_begun[warp]--;
    emulator_progress();
}

const EmulatorSlots* emulator_exchange(unsigned mask, const EmulatorSlot& mine) {
    const unsigned lane = current % 32, warp = current / 32;
    if (!(mask >> lane & 1)) { emulator_die("lane %u waits for lanes %08x, of which it is none", lane, mask); }
    Exchange* x = &exchanges[warp][__builtin_ctz(mask)];
    const unsigned turn = x->turn;
    if (x->arrived == 0) {
        x->mask = mask;
        exchanges_begun[warp]++;
    }
    if (x->mask != mask) { emulator_die("lanes of a warp wait with different masks, %08x and %08x", x->mask, mask); }
    x->slots[turn % 2].at[lane] = mine;
    x->arrived |= 1u << lane;
    emulator_progress();
    exchange_if_all_came(x, warp);
    emulator_wait(&x->turn, turn);
    return &x->slots[turn % 2];
}

static void thread_main(void) {
    const unsigned self = current, warp = self / 32;
    threadIdx = threads[self].index;
    (*thread_body)();
    threads[self].ended = true;
    alive--;
    lanes_alive[warp] &= ~(1u << self % 32);
    emulator_progress();
    if (block_barrier.arrived > 0 && block_barrier.arrived == alive) { release(&block_barrier); }
    for (int i = 0; i < 32 && exchanges_begun[warp] > 0; i++) { exchange_if_all_came(&exchanges[warp][i], warp); }
    free_stacks[num_free++] = threads[self].stack;
    emulator_switch(&threads[self].at, scheduler);
}

/* Gives a thread the stack on which it begins. */
static void begin_thread(Thread* t) {
    static char* const stacks = (char*)mmap(NULL, (size_t)MOST_THREADS * STACK, PROT_READ | PROT_WRITE,
                                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) { emulator_die("no memory for the stacks of threads"); }
    t->begun = true;
    t->stack = free_stacks[--num_free];
    void** top = (void**)(stacks + (size_t)(t->stack + 1) * STACK);
    *--top = NULL;                // keeps the stack aligned as after a call
    *--top = (void*)thread_main;  // where the first switch returns to
    top -= 6;                     // its registers
    memset(top, 0, 6 * sizeof *top);
    t->at = top;
}

// ---------------------------------------------------------------------------------------------------------------------
// blocks

uint64_t emulator_block;

static void run_block(size_t shared) {
    count = blockDim.x * blockDim.y * blockDim.z;
    idle = 0;
    emulator_block++;
    memset(shared_memory, 0xff, shared);
    for (unsigned i = 0; i < count; i++) {
        threads[i].index = make_uint3(i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y);
        threads[i].begun = threads[i].ended = false;
        threads[i].awaited = NULL;
        lanes_alive[i / 32] |= 1u << i % 32;
    }
    for (num_free = 0; num_free < MOST_THREADS; num_free++) { free_stacks[num_free] = num_free; }
    alive = count;
    current = emulator_choose(count);
    while (alive > 0) {
        if (threads[current].ended) { next_turn(); }
        if (!threads[current].begun) { begin_thread(&threads[current]); }
        emulator_switch(&scheduler, threads[current].at);
    }
}

void emulator_run_grid(dim3 grid, dim3 block, size_t shared, const std::function<void()>& body) {
    const size_t blocks = (size_t)grid.x * grid.y * grid.z, first = emulator_choose((unsigned)blocks);
    gridDim = grid;
    blockDim = block;
    thread_body = &body;
    for (size_t k = 0; k < blocks; k++) {
        const size_t i = (first + k) % blocks;
        blockIdx = make_uint3((unsigned)(i % grid.x), (unsigned)(i / grid.x % grid.y), (unsigned)(i / grid.x / grid.y));
        run_block(shared);
    }
}
