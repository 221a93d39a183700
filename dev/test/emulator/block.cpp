/* block.cpp -- runs the blocks of a grid on the emulated card, one after the other. Each thread of a block is a fiber: it has
 * its own stack, and runs until it waits for a word to change. Barriers and exchanges of a warp are such words. A waiting
 * thread gets its turns, too, but the scheduler looks at its word, and continues its fiber only when the word has changed.
 *
 * For x86-64 and 64-bit ARM: emulator_switch() is the only machine code.
 */
#include "device.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <map>
#include <vector>

enum { MOST_THREADS = 1024, WARPS = MOST_THREADS / 32, BARRIERS = 16 };
// an odd number of pages and of cache lines, so that the stacks' tops are not in the same places of TLB and cache
enum { STACK = (65 << 12) + (3 << 6) };

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;
uint64_t emulator_block;
unsigned emulator_thread;

static char shared_memory[SHADOW_SHARED + 2 * SHADOW_GAP] __attribute__((aligned(1024)));
char* const emulator_shared = shared_memory + SHADOW_GAP;

static unsigned warps, alive;                 // of the running block
static const void* asked_from[MOST_THREADS];  // the code that called a barrier or an exchange which has not ended

void emulator_die(const char* format, ...) {
    char text[256];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    shadow_died(text, asked_from[emulator_thread] ? asked_from[emulator_thread] : SHADOW_HERE);
    fprintf(stderr, "emulated card: %s%s\n", text, alive ? "\n  hint: make emulated-sanitize says at which line" : "");
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
#ifdef __aarch64__
enum { SAVED = 20, RETURN = 11 };  // words that a switch leaves on a stack, and which of them is the address to return to
asm(R"(
.text
.globl emulator_switch
emulator_switch:
    sub sp, sp, #160
    stp x19, x20, [sp]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
)");
#else
enum { SAVED = 7, RETURN = 6 };
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
#endif

/* Threads of the running block. */
static struct Thread {
    void* at;   // where it goes on
    int stack;  // its number
    uint3 index;
    bool begun;
    const unsigned* awaited;  // waits until this word is no longer `old`; NULL: waits for no word
    unsigned old;
} threads[MOST_THREADS];
static int free_stacks[MOST_THREADS], num_free;          // the stack given back last is taken next: it is in the cache
static unsigned lanes_alive[WARPS], lanes_ready[WARPS];  // ready: waits for no barrier and no exchange
static void* scheduler;
static const std::function<void()>* thread_body;

[[noreturn]] static void die_stuck(void) {
    std::map<const void*, unsigned> places;
    for (unsigned t = 32 * warps; t-- > 0;) {
        if (lanes_alive[t / 32] >> t % 32 & 1) { emulator_thread = t, places[asked_from[t]]++; }
    }
    for (const auto& p : places) { shadow_stuck(p.second, p.first); }
    emulator_die("block (%u, %u, %u) is stuck: %u threads wait for others, this one among them", blockIdx.x, blockIdx.y,
                 blockIdx.z, alive);
}

static inline unsigned rotated(unsigned lanes, unsigned by) { return lanes >> by | lanes << (-by & 31); }

/* Makes the next thread that can run the running one. Within a warp this is the next lane that is ready, or by chance the one
 * after it. A warp gives its turn to another one by chance, or if no lane can run: so its stacks stay in the cache. A ready
 * thread may wait for a word, which no thread changes during the search. */
static void next_turn(void) {
    const unsigned first = (emulator_thread + 1) % 32, drawn = choose(256);
    unsigned warp = emulator_thread / 32, ready = drawn == 255 ? 0 : rotated(lanes_ready[warp], first), searched = 0;
    const unsigned others = ready & (ready - 1);
    const Thread* t;
    if (drawn % 2 && others) { ready = others; }
    do {
        while (ready == 0) {
            if (searched++ > warps) { die_stuck(); }
            warp = warp + 1 < warps ? warp + 1 : 0;
            ready = rotated(lanes_ready[warp], first);
        }
        emulator_thread = 32 * warp + (first + (unsigned)__builtin_ctz(ready)) % 32;
        ready &= ready - 1;
        t = &threads[emulator_thread];
    } while (t->awaited && *t->awaited == t->old);
}

static void thread_main(void);

/* Gives a thread the stack on which it begins. */
static void begin(Thread* t) {
    static char* const stacks = (char*)mmap(NULL, (size_t)MOST_THREADS * STACK, PROT_READ | PROT_WRITE,
                                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) { emulator_die("no memory for the stacks of threads"); }
    shadow_stacks(stacks, (size_t)MOST_THREADS * STACK);
    t->begun = true;
    t->stack = free_stacks[--num_free];
    void** top = (void**)(stacks + (size_t)(t->stack + 1) * STACK);
    top -= SAVED + SAVED % 2;  // keeps the stack aligned as after a call
    memset(top, 0, SAVED * sizeof *top);
    top[RETURN] = (void*)thread_main;  // where the first switch returns to
    t->at = top;
}

/* Continues the running thread; the fiber that calls this is saved. */
static void go_on(void** save) {
    Thread* t = &threads[emulator_thread];
    if (!t->begun) { begin(t); }
    emulator_switch(save, t->at);
}

/* Lets other threads run until this one can. */
static inline void let_others_run(void) {
    Thread* self = &threads[emulator_thread];
    next_turn();
    go_on(&self->at);
    threadIdx = self->index;
}

static inline void wake(unsigned warp, unsigned lanes) { lanes_ready[warp] |= lanes; }

/* Waits until another thread wakes this one. */
static inline void fall_asleep(void) {
    lanes_ready[emulator_thread / 32] &= ~(1u << emulator_thread % 32);
    let_others_run();
}

// ---------------------------------------------------------------------------------------------------------------------
// waiting for others

void emulator_wait(const unsigned* word, unsigned old, const void* from) {
    if (*word != old) { return; }
    Thread* self = &threads[emulator_thread];
    self->awaited = word, self->old = old;
    asked_from[emulator_thread] = from;
    let_others_run();
    asked_from[emulator_thread] = NULL;
    self->awaited = NULL;
}

// a barrier of the block, or one of the named ones
struct Barrier {
    unsigned arrived;
    int sum, sum_of_turn;
    unsigned asleep[WARPS];
};
static Barrier block_barrier, named[BARRIERS];

static void release(Barrier* b) {
    if (b == &block_barrier) { shadow_barrier(); }
    b->sum_of_turn = b->sum;
    b->arrived = 0, b->sum = 0;
    for (unsigned w = 0; w < warps; w++) {
        wake(w, b->asleep[w]);
        b->asleep[w] = 0;
    }
}

static void arrive(Barrier* b, unsigned wanted, const void* from) {
    asked_from[emulator_thread] = from;
    if (++b->arrived == wanted) {
        if (b != &block_barrier) {
            b->asleep[emulator_thread / 32] |= 1u << emulator_thread % 32;
            shadow_meet(b->asleep, 0, warps);
        }
        release(b);
    } else {
        b->asleep[emulator_thread / 32] |= 1u << emulator_thread % 32;
        fall_asleep();
    }
    asked_from[emulator_thread] = NULL;
}

int emulator_barrier(int x) {
    shadow_wait(SHADOW_HERE);
    block_barrier.sum += x;
    arrive(&block_barrier, alive, SHADOW_HERE);
    return block_barrier.sum_of_turn;
}

void emulator_barrier_of(int id, int wanted) {
    if (id < 0 || id >= BARRIERS) { emulator_die("barrier %d: a block has %d", id, BARRIERS); }
    arrive(&named[id], (unsigned)wanted, SHADOW_HERE);
}

/* Lanes that exchange, found by the lowest lane. Two sets of slots take turns: no lane writes the second set before all lanes
 * have read the first. */
static struct Exchange {
    unsigned arrived, turn, mask;
    EmulatorSlots slots[2];
} exchanges[WARPS][32];
static unsigned exchanges_begun[WARPS];

/* Returns whether the exchange ended. */
static inline bool exchange_if_all_came(Exchange* x, unsigned warp) {
    if (x->arrived == 0 || x->arrived != (x->mask & lanes_alive[warp])) { return false; }
    x->slots[x->turn++ % 2].lanes = x->arrived;
    shadow_meet(&x->arrived, warp, 1);
    wake(warp, x->arrived);
    x->arrived = 0;
    exchanges_begun[warp]--;
    return true;
}

const EmulatorSlots* emulator_exchange(unsigned mask, uint64_t first, uint64_t second, uint64_t third) {
    const unsigned lane = emulator_thread % 32, warp = emulator_thread / 32;
    asked_from[emulator_thread] = SHADOW_HERE;
    if (!(mask >> lane & 1)) { emulator_die("lane %u takes part in an exchange whose mask, %08x, lacks it", lane, mask); }
    Exchange* x = &exchanges[warp][__builtin_ctz(mask)];
    EmulatorSlots* slots = &x->slots[x->turn % 2];
    if (x->arrived == 0) {
        x->mask = mask;
        exchanges_begun[warp]++;
    }
    if (x->mask != mask) { emulator_die("lanes of a warp wait with different masks, %08x and %08x", x->mask, mask); }
    const uint64_t mine[3] = {first, second, third};
    memcpy(&slots->at[lane], mine, sizeof mine);
    x->arrived |= 1u << lane;
    if (!exchange_if_all_came(x, warp)) { fall_asleep(); }
    asked_from[emulator_thread] = NULL;
    return slots;
}

unsigned emulator_alive(void) { return lanes_alive[emulator_thread / 32]; }

/* The fiber of a thread. When the thread ends, the fiber goes on as a thread that has not begun, if that is the next. */
static void thread_main(void) {
    for (;;) {
        const Thread* self = &threads[emulator_thread];
        const unsigned warp = emulator_thread / 32, lane = 1u << emulator_thread % 32;
        threadIdx = self->index;
        (*thread_body)();
        alive--;
        lanes_alive[warp] &= ~lane, lanes_ready[warp] &= ~lane;
        if (block_barrier.arrived > 0 && block_barrier.arrived == alive) { release(&block_barrier); }
        for (int i = 0; i < 32 && exchanges_begun[warp] > 0; i++) { exchange_if_all_came(&exchanges[warp][i], warp); }
        if (alive > 0) { next_turn(); }
        if (alive == 0 || threads[emulator_thread].begun) {
            void* nowhere;
            free_stacks[num_free++] = self->stack;
            emulator_switch(&nowhere, alive == 0 ? scheduler : threads[emulator_thread].at);
        }
        threads[emulator_thread].begun = true;
        threads[emulator_thread].stack = self->stack;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// blocks

static void run_block(size_t shared) {
    emulator_block++;
    memset(emulator_shared, 0xff, shared);
    alive = 0;
    for (unsigned z = 0; z < blockDim.z; z++) {
        for (unsigned y = 0; y < blockDim.y; y++) {
            for (unsigned x = 0; x < blockDim.x; x++) { threads[alive++].index = make_uint3(x, y, z); }
        }
    }
    for (unsigned i = 0; i < alive; i++) { threads[i].begun = false; }
    warps = (alive + 31) / 32;
    for (unsigned w = 0; w < warps; w++) {
        lanes_alive[w] = lanes_ready[w] = alive - 32 * w < 32 ? (1u << alive % 32) - 1 : 0xffffffffu;
    }
    while (num_free < MOST_THREADS) { free_stacks[num_free] = num_free, num_free++; }  // before the first block
    emulator_thread = choose(alive);
    go_on(&scheduler);
}

void emulator_run_grid(dim3 grid, dim3 block, size_t shared, const std::function<void()>& body) {
    const size_t blocks = (size_t)grid.x * grid.y * grid.z, first = emulator_choose((unsigned)blocks);
    gridDim = grid;
    blockDim = block;
    thread_body = &body;
    for (size_t k = 0; k < blocks; k++) {
        const size_t i = (first + k) % blocks;
        blockIdx = make_uint3((unsigned)(i % grid.x), (unsigned)(i / grid.x % grid.y), (unsigned)(i / grid.x / grid.y));
        shadow_block(i);
        run_block(shared);
        shadow_block_ended();
    }
}
