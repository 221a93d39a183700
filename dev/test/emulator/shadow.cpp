/* shadow.cpp -- the sanitizer of the emulated card: finds accesses out of bounds, reads of what nobody wrote, races, misaligned
 * vectors and too much shared memory in kernels, and says which line of which file did so, by which thread, to which tensor.
 *
 * g++ -fsanitize=thread puts a call in front of each load and store; these functions are here, in place of its library. Each
 * granule of memory has a cell: who wrote it last, and two that have read it since. An access must come after them: in a later
 * phase (a phase ends at a barrier of the block), or after a warp's exchange, a barrier or an atomic operation that the other
 * thread came to later and this one earlier. Each thread counts these events and keeps what it knows of the others' counts, as
 * in C. Flanagan, S. Freund: FastTrack, PLDI 2009. A kernel or a copy counts likewise what came before it on each stream.
 *
 * Shared memory also knows which copies are under way there. Writes that TMA or wgmma will read need a fence after them, and
 * so do registers that wgmma adds to; both are events of a thread, too.
 *
 * Cards' memory lies far apart in one stretch of addresses. Statics of a kernel are found in the program's table of symbols.
 * What is neither, such as a fiber's stack, is not judged. dev/doc/emulated-card.md says what is found, and what cannot be.
 */
#include "runtime.h"

#include <cxxabi.h>
#include <elf.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

extern uint3 blockIdx;  // of device.h
extern dim3 blockDim, gridDim;
extern char* const emulator_shared;
extern unsigned emulator_thread;

#ifdef PRECISION_FP32
enum { GRANULE = 4 };
#else
enum { GRANULE = 2 };
#endif
enum {
    MOST_THREADS = 1024,
    SLOT_BITS = 20,
    MOST_PRINTED = 20,
    MOST_COPIED = 16 << 20,
    MOST_GRIDS = 1000,
    MOST_CALLS = 4096,
    UNASKED_SHARED = 48 << 10
};
static const size_t CARD_BYTES = (size_t)64 << 30;

struct Stamp {
    uint32_t line, block, event;  // return address of the access; block: numbered over all grids, from 1 on
    uint16_t phase, thread : 10, bytes : GRANULE, atomic : 1, by_copier : 1;  // by_copier: by TMA
};
struct Cell {
    Stamp writer, readers[2];
};
/* What is under way at a granule of shared memory: a copy that will write there, or one that will read it. */
struct Flight {
    uint32_t line;  // 0: nothing
    uint16_t thread, reads;
};
struct Region {
    uintptr_t begin;
    size_t bytes;
    Cell* cells;
    uint8_t* written;  // a bit a byte
    bool of_block;     // shared memory
    Flight* flights;
};
struct Allocation {
    uintptr_t begin;
    size_t bytes, rows, width, pitch, each;  // each: bytes of an element, 0: not known
    std::string name;
    bool input;      // kernels only read it
    uint32_t freed;  // the call that freed it, or 0
};
struct Symbol {
    uintptr_t begin;
    size_t bytes;
    std::string name;
    bool shared;
    size_t of_function;  // bytes of all static shared memory there
};

#define HERE __builtin_return_address(0)
static thread_local bool on_card;  // whether this thread runs a kernel now
static Region card, statics, dynamic;
static std::vector<Allocation*> slots(CARD_BYTES >> SLOT_BITS), freed_slots(slots.size());
static std::vector<Symbol> symbols(1);         // objects; those before it are not judged
static std::vector<uint16_t> symbol_of;        // of each 4 bytes of `statics`; 0: none
static std::map<uintptr_t, size_t> functions;  // addresses and sizes, but for the lambdas and templates of launches
static std::map<uintptr_t, size_t> allowed;    // functions and their dynamic shared memory
static unsigned faults;
static bool copying;                                     // whether a copy runs now, not a kernel
static std::set<std::pair<std::string, uint32_t>> told;  // kinds and addresses
static std::set<std::string> printed;                    // kinds and places: the compiler may have copied a line

// ---------------------------------------------------------------------------------------------------------------------
// what happened before

struct Clocks {
    uint64_t when;   // the phase that it is about
    uint32_t warps;  // that are not all 0
    uint32_t of[MOST_THREADS];
};
struct Object {
    Clocks clocks;
    uint32_t grid;
    std::map<uint32_t, uint32_t> blocks;  // phase and thread up to which a block is known
};

/* The blocks of a grid, or one for a copy, and its place among the works of its stream. */
struct Grid {
    uint32_t first, end;
    unsigned place;
    dim3 blocks, threads;  // of a kernel
};
static std::map<const void*, std::vector<Grid>> grids;       // of streams
static std::vector<Grid> unordered;                          // those that neither come before the running work nor after it
static const void* stream;                                   // of the running work
static ShadowWorks works;                                    // that have run
static uint32_t grid_first = 1, grid_end = 1, block_number;  // of the running grid and block
static size_t dynamic_bytes;
static uint16_t phase;
static uint64_t phases;  // over all blocks
static Clocks known[MOST_THREADS];
static uint32_t events[MOST_THREADS];
static bool fenced[MOST_THREADS];
static std::map<uint32_t, uint32_t> known_blocks;
static std::map<const void*, Object> objects;

static Clocks* current(Clocks* c) {
    if (c->when == phases) { return c; }
    for (uint32_t w = c->warps; w; w &= w - 1) { memset(&c->of[32 * __builtin_ctz(w)], 0, 32 * sizeof *c->of); }
    c->when = phases, c->warps = 0;
    return c;
}
static void learn(Clocks* to, const Clocks* from) {
    to->warps |= from->warps;
    for (uint32_t w = from->warps; w; w &= w - 1) {
        const int at = 32 * __builtin_ctz(w);
        for (int i = at; i < at + 32; i++) { to->of[i] = std::max(to->of[i], from->of[i]); }
    }
}
/* A thread tells what it knows, and what it has done until now. */
static void tell(Clocks* to, unsigned thread) {
    learn(current(to), current(&known[thread]));
    to->of[thread] = events[thread]++;
    to->warps |= 1u << thread / 32;
}

static bool is_before(const Stamp& s, bool of_block) {
    if (s.block == block_number) {
        return s.phase < phase || s.thread == emulator_thread || current(&known[emulator_thread])->of[s.thread] >= s.event;
    }
    if (of_block) { return true; }
    if (s.block < grid_first) {
        return std::none_of(unordered.begin(), unordered.end(),
                            [&](const Grid& g) { return s.block - g.first < g.end - g.first; });
    }
    const auto found = known_blocks.find(s.block);
    if (found == known_blocks.end()) { return false; }
    const uint32_t until = found->second / MOST_THREADS;
    return s.phase < until || (s.phase == until && s.thread == found->second % MOST_THREADS);
}

void shadow_sees(ShadowWorks* to, const ShadowWorks& from) {
    for (const auto& w : from) { (*to)[w.first] = std::max((*to)[w.first], w.second); }
}
void shadow_work(const void* of, ShadowWorks* seen) {
    stream = of;
    unordered.clear();
    for (const auto& g : grids) {  // the last ones of each stream
        for (size_t i = g.second.size(); i-- > 0 && g.second[i].place > (*seen)[g.first];) { unordered.push_back(g.second[i]); }
    }
    (*seen)[of] = ++works[of];
}
/* Numbers the blocks of the running work. */
static void begin_grid(dim3 blocks, dim3 threads) {
    std::vector<Grid>& all = grids[stream];
    grid_first = grid_end;
    grid_end += blocks.x * blocks.y * blocks.z;
    if (all.size() == 2 * MOST_GRIDS) { all.erase(all.begin(), all.begin() + MOST_GRIDS); }
    all.push_back({grid_first, grid_end, works[stream], blocks, threads});
}

void shadow_barrier(void) { phase++, phases++; }

void shadow_meet(const unsigned* lanes, unsigned first_warp, unsigned warps) {
    static Clocks all;
    all.when = 0;
    for (int turn = 0; turn < 2; turn++) {
        for (unsigned w = 0; w < warps; w++) {
            for (uint32_t left = lanes[w]; left; left &= left - 1) {
                const unsigned thread = 32 * (first_warp + w) + (unsigned)__builtin_ctz(left);
                turn == 0 ? tell(&all, thread) : learn(&known[thread], &all);
            }
        }
    }
}

void shadow_release(const void* object) {
    Object& o = objects[object];
    tell(&o.clocks, emulator_thread);
    if (o.grid != grid_first) { o.blocks.clear(), o.grid = grid_first; }
    for (const auto& b : known_blocks) { o.blocks[b.first] = std::max(o.blocks[b.first], b.second); }
    o.blocks[block_number] = phase * MOST_THREADS + emulator_thread;
}
void shadow_acquire(const void* object) {
    const auto found = objects.find(object);
    if (found == objects.end()) { return; }
    learn(current(&known[emulator_thread]), current(&found->second.clocks));
    if (found->second.grid != grid_first) { return; }
    for (const auto& b : found->second.blocks) { known_blocks[b.first] = std::max(known_blocks[b.first], b.second); }
}
void shadow_fence(void) { fenced[emulator_thread] = true; }

// ---------------------------------------------------------------------------------------------------------------------
// what a fault says

static struct Calls {
    uint32_t depth, lines[62];  // return addresses
} calls[MOST_THREADS];

/* Returns functions and their FILE:LINE in turns, of the code at some addresses. What is inlined there comes first. One process
 * reads the program's tables, which takes longer than a look into them. */
static std::vector<std::string> functions_at(const std::vector<uint32_t>& addresses) {
    static FILE *to, *from;
    std::vector<std::string> all;
    int in[2], out[2];
    if (!to && !pipe2(in, O_CLOEXEC) && !pipe2(out, O_CLOEXEC)) {
        char program[4096] = "", name[] = "addr2line", how[] = "-aifCe";
        char* const words[] = {name, how, program, NULL};
        pid_t child;
        posix_spawn_file_actions_t files;
        posix_spawn_file_actions_init(&files);
        posix_spawn_file_actions_adddup2(&files, in[0], 0);
        posix_spawn_file_actions_adddup2(&files, out[1], 1);
        if (readlink("/proc/self/exe", program, sizeof program - 1) < 0 ||
            posix_spawnp(&child, name, &files, NULL, words, environ)) {
            emulator_die("addr2line, which names the lines of code, can't be run; package binutils has it");
        }
        posix_spawn_file_actions_destroy(&files);
        close(in[0]), close(out[1]);
        to = fdopen(in[1], "w"), from = fdopen(out[0], "r");
    }
    if (!to) { emulator_die("no pipe to addr2line"); }
    for (const uint32_t address : addresses) { fprintf(to, "0x%x\n", address - 1); }
    fprintf(to, "0x0\n");  // answered by 0 and two lines
    fflush(to);
    char line[4096];
    for (int left = -1; left != 0 && fgets(line, sizeof line, from); left -= left > 0) {
        if (!strncmp(line, "0x", 2)) {
            left = strtoull(line, NULL, 16) ? -1 : 3;
        } else if (left < 0) {
            all.push_back(line);
        }
    }
    return all;
}

/* Returns whether a place is in the emulator, in a library, or not known. */
static bool is_foreign(const std::string& at) {
    return at.find("emulator/") != std::string::npos || at[0] == '?' || at.back() == '?' || at.compare(0, 5, "/usr/") == 0;
}

/* Returns "FILE:LINE, called at FILE:LINE, in KERNEL" of the code that returns to an address, from functions with these return
 * addresses. What is inlined there from the emulator is left out. */
static std::string place(uint32_t line, const Calls* from) {
    char here[4096] = "";
    if (!getcwd(here, sizeof here)) { return "?"; }
    std::string first, last, in;
    std::vector<uint32_t> addresses(1, line);
    for (uint32_t i = from ? std::min(from->depth, 62u) : 0; i > 0; i--) { addresses.push_back(from->lines[i - 1]); }
    const std::vector<std::string> all = functions_at(addresses);
    for (size_t i = 0; i + 1 < all.size(); i += 2) {
        const char *const function = all[i].c_str(), *const file = all[i + 1].c_str();
        std::string at(file, strcspn(file, " \n"));
        if (!first.empty() && (strstr(function, "std::") || strstr(function, "auto:1"))) { break; }  // the launch
        if (!first.empty() && !strncmp(function, "operator()", 10)) { continue; }  // or a lambda in the kernel
        if (at.compare(0, strlen(here), here) == 0) { at = at.substr(strlen(here) + 1); }
        if (is_foreign(at)) {
            if (!first.empty()) { break; }  // who calls the kernel
            continue;
        }
        if (first.empty()) { first = at; }
        last = at;
        in = std::string(function, strcspn(function, "(<\n"));
        in = in.substr(in.find_last_of(" :") + 1);
    }
    return first + (first == last ? "" : ", called at " + last) + ", in " + in;
}

static std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
static std::string text(const char* format, ...) {
    char out[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(out, sizeof out, format, list);
    va_end(list);
    return out;
}

static std::string thread_of(uint32_t block, unsigned thread) {
    Grid grid = {grid_first, grid_end, 0, gridDim, blockDim};
    for (const Grid& g : unordered) { grid = block - g.first < g.end - g.first ? g : grid; }
    const uint32_t b = block - grid.first;
    const dim3 n = grid.blocks, t = grid.threads;
    if (t.x == 0) { return "a copy"; }
    return text("block (%u, %u, %u), thread (%u, %u, %u)", b % n.x, b / n.x % n.y, b / n.x / n.y, thread % t.x,
                thread / t.x % t.y, thread / t.x / t.y);
}

/* Counts a fault, and prints it unless this line has had its kind before. */
static void fault(const char* kind, uint32_t line, const std::string& what, const Stamp* other = NULL, const char* did = "") {
    faults++;
    if (!told.insert({kind, line}).second || printed.size() >= MOST_PRINTED) { return; }
    const std::string head = kind + (": " + place(line, on_card ? &calls[emulator_thread] : NULL));
    if (!printed.insert(head).second) { return; }
    printf("%s\n    %s", head.c_str(), what.c_str());
    if (on_card || copying) { printf("\n    by %s", copying ? "a copy" : thread_of(block_number, emulator_thread).c_str()); }
    if (other) {
        printf("\n    %s by %s, at %s", did, thread_of(other->block, other->thread).c_str(), place(other->line, NULL).c_str());
    }
    printf("\n");
    fflush(stdout);
}
unsigned shadow_faults(void) { return faults; }

[[noreturn]] static void stop(void) {
    printf("the sanitizer found %u fault%s at %zu place%s\n", faults, faults == 1 ? "" : "s", printed.size(),
           printed.size() == 1 ? "" : "s");
    fflush(stdout);
    _Exit(1);
}

/* Names an element of an allocation. */
static std::string element(const Allocation& a, uintptr_t at) {
    const long byte = (long)(at - a.begin), each = (long)a.each;
    const std::string name = a.name.empty() ? "an allocation of " + std::to_string(a.bytes) + " bytes" : a.name;
    if (each == 0 || byte < 0) { return text("byte %ld of %s", byte, name.c_str()); }
    const long row = byte / each / (long)a.pitch, column = byte / each % (long)a.pitch;
    if (a.rows == 1) { return text("%s[%ld], of %zu elements", name.c_str(), row * (long)a.pitch + column, a.width); }
    return text("%s, row %ld, column %ld, of %zu rows of %zu", name.c_str(), row, column, a.rows, a.width);
}

/* Names an address: of a tensor, or of the one that is nearest; of shared memory. */
static std::string address(const Region& r, uintptr_t at, size_t size) {
    if (&r == &dynamic) { return text("byte %ld of %zu bytes of dynamic shared memory", (long)(at - r.begin), dynamic_bytes); }
    if (&r == &statics) {
        size_t i = (at - r.begin) / 4;
        while (i > 0 && !symbol_of[i]) { i--; }
        const Symbol& s = symbols[symbol_of[i]];
        return s.bytes == size
                   ? s.name
                   : text("%s[%zu], of %zu elements of %zu bytes", s.name.c_str(), (at - s.begin) / size, s.bytes / size, size);
    }
    const size_t slot = (at - r.begin) >> SLOT_BITS;
    for (size_t d = 0; d < slots.size(); d++) {
        const Allocation *before = d <= slot ? slots[slot - d] : NULL,
                         *after = slot + d < slots.size() ? slots[slot + d] : NULL;
        if (before && after) { return element(at - before->begin - before->bytes < after->begin - at ? *before : *after, at); }
        if (before || after) { return element(before ? *before : *after, at); }
    }
    return "memory that was not allocated";
}

// ---------------------------------------------------------------------------------------------------------------------
// accesses

static const char* kind_of(const Region& r) {
    return &r == &card      ? "out of bounds of device memory"
           : &r == &dynamic ? "out of bounds of dynamic shared memory"
                            : "out of bounds of static shared memory";
}

/* Returns the region of an access, or NULL if it is not judged. *inside: whether something there has all its bytes. */
static Region* region_of(uintptr_t at, size_t size, bool* inside) {
    if (at - card.begin < card.bytes) {
        const Allocation* a = slots[(at - card.begin) >> SLOT_BITS];
        *inside = a && at - a->begin + size <= a->bytes;
        return &card;
    }
    if (at - dynamic.begin + SHADOW_GAP < dynamic.bytes + 2 * SHADOW_GAP) {
        *inside = at >= dynamic.begin && at - dynamic.begin + size <= dynamic_bytes;
        return &dynamic;
    }
    if (at - statics.begin >= statics.bytes) { return NULL; }
    const size_t i = (at - statics.begin) / 4;
    const uint16_t of = symbol_of[i];
    if (of) {
        *inside = at - symbols[of].begin + size <= symbols[of].bytes;
        return symbols[of].name.empty() ? NULL : &statics;
    }
    *inside = false;  // a gap: behind shared memory, or it is not judged
    for (size_t k = i; k > 0 && i - k < 128; k--) {
        if (symbol_of[k]) { return symbols[symbol_of[k]].shared ? &statics : NULL; }
    }
    return NULL;
}

static uint32_t last_line;  // of an access
static bool copier;         // whether TMA accesses memory now

static const char* race_of(const Stamp& s) {
    if (s.block < grid_first) { return "race between streams"; }
    if (s.block != block_number) { return "race between blocks"; }
    return s.thread / 32 == emulator_thread / 32 ? "race between threads of a warp" : "race between threads";
}

static void judge(Region& r, uintptr_t at, size_t size, ShadowAccess how, uint32_t line) {
    const bool of_block = r.of_block && (&r == &dynamic || symbols[symbol_of[(at - r.begin) / 4]].shared);
    const size_t in_function = &r == &statics ? symbols[symbol_of[(at - r.begin) / 4]].of_function : 0;
    if (in_function > UNASKED_SHARED) {
        fault("too much static shared memory", line,
              text("%zu bytes in a function, of at most %d: ", in_function, UNASKED_SHARED) + address(r, at, size));
    }
    bool written_before = how == SHADOW_WRITE;  // any of it: a copied struct or vector has parts that nobody uses
    for (uintptr_t p = at, end = at + size; p < end;) {
        const uintptr_t granule = (p - r.begin) / GRANULE, next = std::min(end, r.begin + (granule + 1) * GRANULE);
        const unsigned bytes = ((1u << (next - p)) - 1) << (p - r.begin) % GRANULE, bit = (p - r.begin) % 8;
        uint8_t* const written = &r.written[(p - r.begin) / 8];
        const uint8_t bits = (uint8_t)(((1u << (next - p)) - 1) << bit);
        Cell* const c = &r.cells[granule];
        Stamp now = {line,
                     block_number,
                     events[emulator_thread],
                     phase,
                     (uint16_t)(emulator_thread % MOST_THREADS),
                     (uint16_t)bytes,
                     how == SHADOW_ATOMIC,
                     copier};
        auto races = [&](const Stamp& s) { return s.bytes & bytes && !(s.atomic && now.atomic) && !is_before(s, of_block); };
        const Flight flight = of_block ? r.flights[granule] : Flight();
        if (flight.line && !(flight.reads && how == SHADOW_READ)) {
            const Stamp begun = {flight.line, block_number, 0, 0, (uint16_t)(flight.thread % MOST_THREADS), 0, 0, 0};
            fault("memory of a copy that is under way", line,
                  (how == SHADOW_READ ? "reads " : "writes ") + address(r, at, size), &begun,
                  "the copy was begun, and not waited for,");
            return;
        }
        written_before = written_before || *written & bits;
        if (!written_before && next == end && !copying) {
            fault(of_block ? "shared memory is read that no thread of the block has written"
                           : "device memory is read that nobody has written",
                  line, "reads " + address(r, at, size));
            *written |= bits;
        }
        const char* const verb = how == SHADOW_READ ? "reads " : how == SHADOW_WRITE ? "writes " : "adds to ";
        if (races(c->writer)) {
            fault(race_of(c->writer), line, verb + address(r, at, size), &c->writer,
                  "written, with nothing between that orders them,");
        }
        if (how == SHADOW_READ) {
            const bool first = c->readers[0].thread == emulator_thread || is_before(c->readers[0], of_block);
            c->readers[!first] = now;
            if (first) { c->readers[1] = now; }
        } else {
            for (const Stamp& s : c->readers) {
                if (!races(s)) { continue; }
                fault(race_of(s), line, verb + address(r, at, size), &s, "read, with nothing between that orders them,");
                break;
            }
            *written |= bits;
            c->writer = now;
        }
        p = next;
    }
}

void shadow_copier(bool now) { copier = now; }

/* Returns the flights at an address of shared memory, and in *count of how many granules; NULL elsewhere. */
static Flight* flights_at(const void* p, size_t bytes, size_t* count) {
    bool inside = false;
    const uintptr_t at = (uintptr_t)p;
    Region* const r = region_of(at, bytes, &inside);
    if (!r || !inside || !r->flights || (r == &statics && !symbols[symbol_of[(at - r->begin) / 4]].shared)) { return NULL; }
    *count = (at - r->begin + bytes - 1) / GRANULE - (at - r->begin) / GRANULE + 1;
    return &r->flights[(at - r->begin) / GRANULE];
}

void shadow_begins(const void* p, size_t bytes, ShadowAccess how, const void* line) {
    size_t count;
    Flight* f = on_card ? flights_at(p, bytes, &count) : NULL;
    if (!f) { return how == SHADOW_WRITE ? shadow_access(p, bytes, how, line) : void(); }  // outside of shared memory
    for (size_t i = 0; i < count; i++) {
        f[i] = {(uint32_t)(uintptr_t)(line ? line : HERE), (uint16_t)emulator_thread, how == SHADOW_READ};
    }
}
void shadow_ends(const void* p, size_t bytes) {
    size_t count;
    if (Flight* f = on_card ? flights_at(p, bytes, &count) : NULL) { memset(f, 0, count * sizeof *f); }
}

/* fence.proxy.async: TMA and wgmma see what was written before. */
static Clocks seen[MOST_THREADS];  // known at a thread's last such fence
static uint16_t seen_phase[MOST_THREADS];

void shadow_proxy_fence(void) {
    Clocks& c = *current(&seen[emulator_thread]);
    learn(&c, current(&known[emulator_thread]));
    c.of[emulator_thread] = events[emulator_thread]++;
    c.warps |= 1u << emulator_thread / 32;
    seen_phase[emulator_thread] = phase;
}

/* TMA or wgmma will read what a thread wrote: this thread or the running one needs a fence since then. */
void shadow_copier_reads(const void* p, size_t bytes, const void* line) {
    bool inside = false;
    const uintptr_t at = (uintptr_t)p;
    Region* const r = on_card ? region_of(at, bytes, &inside) : NULL;
    if (!r || !inside || !r->flights) { return; }
    const Stamp& s = r->cells[(at - r->begin) / GRANULE].writer;
    if (s.block != block_number || s.by_copier) { return; }
    for (const unsigned thread : {(unsigned)s.thread, emulator_thread}) {
        const Clocks& c = seen[thread];
        if (c.when && (s.phase < seen_phase[thread] || (s.phase == seen_phase[thread] && c.of[s.thread] >= s.event))) {
            return;
        }
    }
    fault("a fence is missing", (uint32_t)(uintptr_t)(line ? line : HERE), "TMA or wgmma reads " + address(*r, at, bytes), &s,
          "written, without fence_async_readers() since then,");
}

/* The sums of products of wgmma, in registers of a thread. */
struct Sums {
    uintptr_t begin, end;
    uint32_t line;  // of the product that was begun last
    int under_way;  // products
    bool used;      // by other instructions, since the last fence
};
static std::vector<Sums> sums[MOST_THREADS];
static bool product_fence[MOST_THREADS];  // whether there was one
static bool multiplying;                  // whether the card uses registers now

void shadow_product(const void* d, size_t bytes) {
    if (!on_card) { return; }
    const uintptr_t begin = (uintptr_t)d, end = begin + bytes;
    std::vector<Sums>& all = sums[emulator_thread];
    auto at = std::find_if(all.begin(), all.end(), [=](const Sums& s) { return s.begin == begin && s.end == end; });
    if (at == all.end()) {
        all.erase(std::remove_if(all.begin(), all.end(), [=](const Sums& s) { return s.begin < end && begin < s.end; }),
                  all.end());
        at = all.insert(all.end(), Sums{begin, end, 0, 0, !product_fence[emulator_thread]});
    }
    at->line = (uint32_t)(uintptr_t)HERE;
    at->under_way++;
    if (!at->used) { return; }
    at->used = false;
    fault("a fence is missing", at->line, "a product takes registers that were used without wgmma_fence() since then");
}
void shadow_product_fence(void) {
    if (!on_card) { return; }
    product_fence[emulator_thread] = true;
    for (Sums& s : sums[emulator_thread]) { s.used = false; }
}
/* The products of a group take place: from d on, or all if d is NULL. */
void shadow_multiply(const void* d, bool now) {
    multiplying = now;
    for (Sums& s : sums[emulator_thread]) { s.under_way -= !now && s.begin == (uintptr_t)d; }
}
static void use_registers(uintptr_t at, ShadowAccess how, uint32_t line) {
    for (Sums& s : sums[emulator_thread]) {
        if (multiplying || at < s.begin || at >= s.end) { continue; }
        s.used = true;
        if (s.under_way <= 0) { continue; }
        const Stamp begun = {s.line, block_number, 0, 0, (uint16_t)(emulator_thread % MOST_THREADS), 0, 0, 0};
        fault("registers of a product that is under way", line,
              text("%s sum %zu", how == SHADOW_READ ? "reads" : "writes", (at - s.begin) / sizeof(float)), &begun,
              "the product was begun, and not waited for,");
    }
}

static uintptr_t stacks, stacks_end;  // of threads
void shadow_stacks(const void* begin, size_t bytes) { stacks = (uintptr_t)begin, stacks_end = stacks + bytes; }

/* An address that is no card's: of a stack, of the program, or of the host, which a card does not reach. The code that hands a
 * kernel its arguments reads them there. */
static void outside(uintptr_t at, ShadowAccess how, uint32_t line) {
    extern char __executable_start, _end;
    static std::map<uint32_t, bool> of_kernel;  // whether this code is a kernel's
    if (at >= stacks && at < stacks_end) { return use_registers(at, how, line); }
    if (at >= (uintptr_t)&__executable_start && at < (uintptr_t)&_end) { return; }
    if (at < 4096 || emulator_is_pinned((const void*)at)) { return; }
    if (!of_kernel.count(line)) {
        const std::vector<std::string> all = functions_at({line});
        const std::string function = all.empty() ? "" : all[0];  // of the table of symbols: a kernel, or a launch
        of_kernel[line] = all.size() > 1 && !is_foreign(all[1]) && function.find("auto:1") == std::string::npos &&
                          function.substr(0, function.find_first_of("(<")).find("std::") == std::string::npos;
    }
    if (!of_kernel[line]) { return; }
    fault("an address of the host's memory", line, text("%s %p", how == SHADOW_READ ? "reads" : "writes", (void*)at));
}

/* Returns whether a byte of a tensor lies behind the width of its row, where no kernel may write. */
static bool is_padding(uintptr_t at) {
    const Allocation* a = slots[(at - card.begin) >> SLOT_BITS];
    return a->each > 0 && (at - a->begin) / a->each % a->pitch >= a->width;
}

void shadow_access(const void* p, size_t size, ShadowAccess how, const void* line) {
    if (!on_card || size == 0) { return; }
    const uint32_t here = last_line = (uint32_t)(uintptr_t)line;
    bool inside = true;
    const uintptr_t at = (uintptr_t)p;
    const char* const verb = how == SHADOW_READ ? "reads " : "writes ";
    Region* const r = region_of(at, size, &inside);
    if (!r) { return outside(at, how, here); }
    const size_t slot = r == &card ? (at - card.begin) >> SLOT_BITS : 0;
    if (r == &card && !slots[slot] && freed_slots[slot]) {
        const Allocation& freed = *freed_slots[slot];
        return fault("memory that was freed", here, verb + element(freed, at) + "\n    freed at " + place(freed.freed, NULL));
    }
    const bool padding = inside && r == &card && how != SHADOW_READ && is_padding(at + size - 1);
    if (!inside || padding) {
        return fault(padding ? "out of bounds of a row" : kind_of(*r), here, verb + address(*r, at, size));
    }
    if (r == &card && how != SHADOW_READ && slots[slot]->input) {
        fault("an input is written", here, verb + address(*r, at, size));
    }
    judge(*r, at, size, how, here);
}

static struct Wait {
    uint64_t when;
    uint32_t line;
    uint16_t thread;
} waits[MOST_THREADS / 32];  // of the first lane of a warp that came to the barrier

void shadow_wait(const void* line) {
    Wait& w = waits[emulator_thread / 32];
    const Wait here = {phases, (uint32_t)(uintptr_t)line, (uint16_t)emulator_thread};
    if (w.when != phases) { w = here; }
    static std::set<std::pair<uint32_t, uint32_t>> seen;  // the compiler may have copied one barrier
    if (w.line == here.line || !seen.insert({w.line, here.line}).second) { return; }
    if (place(w.line, NULL) == place(here.line, NULL)) { return; }
    const Stamp other = {w.line, block_number, 0, 0, w.thread, 0, 0, 0};
    fault("threads of a warp at two barriers", here.line, "waits", &other, "for those that wait");
}

/* line: maybe of a function of the emulator; last: of the access before. Strings here may call functions that access memory. */
[[noreturn]] static void broken(uint32_t line, uint32_t last, const std::string& rule) {
    const std::vector<std::string> all = functions_at({line});
    const std::string file = all.empty() ? "?" : all.back().substr(0, all.back().find_first_of(" \n"));
    fault("a rule of the card is broken", is_foreign(file) ? last : line, rule);
    stop();
}

static std::string waiting;
void shadow_stuck(unsigned threads, const void* line) {
    waiting += text("\n    %u at ", threads) + place((uint32_t)(uintptr_t)line, NULL);
}

void shadow_died(const char* rule, const void* line) {
    if (!on_card) { return; }
    const uint32_t last = last_line;
    broken((uint32_t)(uintptr_t)line, last, rule + waiting);
}

void shadow_atomic(const void* p, size_t size, const void* line) {
    if (!on_card) { return; }
    shadow_access(p, size, SHADOW_ATOMIC, line);
    shadow_acquire(p);
    if (fenced[emulator_thread]) { shadow_release(p); }
}

static void aligned_access(const void* p, size_t size, ShadowAccess how, const void* line) {
    bool inside;
    if (on_card && (uintptr_t)p % size && region_of((uintptr_t)p, size, &inside)) {
        fault("misaligned access", (uint32_t)(uintptr_t)line,
              text("%s %zu bytes at an address that is no multiple of %zu: ", how == SHADOW_READ ? "reads" : "writes", size,
                   size) +
                  address(*region_of((uintptr_t)p, size, &inside), (uintptr_t)p, size));
        stop();
    }
    shadow_access(p, size, how, line);
}

#define OF_SIZE(n)                                                                     \
    void __tsan_read##n(void* p) { aligned_access(p, n, SHADOW_READ, HERE); }          \
    void __tsan_write##n(void* p) { aligned_access(p, n, SHADOW_WRITE, HERE); }        \
    void __tsan_unaligned_read##n(void* p) { shadow_access(p, n, SHADOW_READ, HERE); } \
    void __tsan_unaligned_write##n(void* p) { shadow_access(p, n, SHADOW_WRITE, HERE); }
/* The host's code has atomic operations, too. */
#define OF_ATOMIC(bits, T)                                                                                   \
    T __tsan_atomic##bits##_load(const T* p, int) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }           \
    void __tsan_atomic##bits##_store(T* p, T x, int) { __atomic_store_n(p, x, __ATOMIC_SEQ_CST); }           \
    T __tsan_atomic##bits##_exchange(T* p, T x, int) { return __atomic_exchange_n(p, x, __ATOMIC_SEQ_CST); } \
    T __tsan_atomic##bits##_fetch_add(T* p, T x, int) { return __atomic_fetch_add(p, x, __ATOMIC_SEQ_CST); } \
    T __tsan_atomic##bits##_fetch_sub(T* p, T x, int) { return __atomic_fetch_sub(p, x, __ATOMIC_SEQ_CST); } \
    bool __tsan_atomic##bits##_compare_exchange_strong(T* p, T* old, T x, int, int) {                        \
        return __atomic_compare_exchange_n(p, old, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);            \
    }                                                                                                        \
    bool __tsan_atomic##bits##_compare_exchange_weak(T* p, T* old, T x, int, int) {                          \
        return __atomic_compare_exchange_n(p, old, x, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);             \
    }

static bool watched;  // the first thread of a grid whose kernel needs to have asked for its shared memory
static bool entered;  // whether it called a function, as a kernel does that has an access
static std::mutex allowing;

extern "C" {
OF_SIZE(1);
OF_SIZE(2);
OF_SIZE(4);
OF_SIZE(8);
OF_SIZE(16);
OF_ATOMIC(8, uint8_t);
OF_ATOMIC(32, uint32_t);
OF_ATOMIC(64, uint64_t);
void __tsan_init(void) {}
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_read_range(void* p, size_t n) { shadow_access(p, n, SHADOW_READ, HERE); }
void __tsan_write_range(void* p, size_t n) { shadow_access(p, n, SHADOW_WRITE, HERE); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

void __tsan_func_exit(void) {
    if (on_card) { calls[emulator_thread].depth--; }
}
void __tsan_func_entry(void* caller) {
    if (!on_card) { return; }
    Calls& c = calls[emulator_thread];
    if (c.depth < 62) { c.lines[c.depth] = (uint32_t)(uintptr_t)caller; }
    if (c.depth++ == MOST_CALLS) { broken((uint32_t)(uintptr_t)HERE, 0, "calls are nested 4096 deep"); }
    if (!watched) { return; }
    const auto next = functions.upper_bound((uintptr_t)HERE);
    if (next == functions.begin() || (uintptr_t)HERE - std::prev(next)->first >= std::prev(next)->second) { return; }
    entered = true;
    const std::lock_guard<std::mutex> lock(allowing);
    const auto found = allowed.find(std::prev(next)->first);
    watched = found == allowed.end() || found->second < dynamic_bytes;
}

/* What -fsanitize=object-size calls if an object does not have all of what is read or written, among others. */
struct ObjectData {
    const char* file;
    uint32_t line, column;
    const void* type;
    uint8_t align, what;
};
void __ubsan_handle_type_mismatch_v1(const ObjectData* d, uintptr_t at) {
    if (!on_card) { return; }
    fault("out of bounds of an array", (uint32_t)(uintptr_t)HERE,
          text("%s %p, behind its end", d->what ? "writes" : "reads", (void*)at));
}

/* What -fsanitize=bounds calls if an index lies outside of an array's type. */
struct BoundsData {
    const char* file;
    uint32_t line, column;
    const struct Type {
        uint16_t kind, info;
        char name[1];
    } * array;
};
void __ubsan_handle_out_of_bounds(const BoundsData* d, uintptr_t index) {
    if (!on_card) { return; }
    fault("out of bounds of an array", (uint32_t)(uintptr_t)HERE,
          text("element %ld of an array that is %s", (long)index, d->array->name));
}
}

// ---------------------------------------------------------------------------------------------------------------------
// memory, grids and blocks

static void* reserve(size_t bytes) {
    void* p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) { emulator_die("the sanitizer needs %zu GiB of addresses: ulimit -v unlimited", bytes >> 30); }
    return p;
}

static Region region(void* begin, size_t bytes, bool of_block) {
    return {(uintptr_t)begin,
            bytes,
            (Cell*)reserve((bytes / GRANULE + 1) * sizeof(Cell)),
            (uint8_t*)reserve(bytes / 8 + 1),
            of_block,
            of_block ? (Flight*)reserve((bytes / GRANULE + 1) * sizeof(Flight)) : NULL};
}

/* Reads the program's own table of symbols. */
static void read_symbols(void) {
    FILE* f = fopen("/proc/self/exe", "rb");
    std::vector<char> all;
    char part[65536];
    for (size_t n; f && (n = fread(part, 1, sizeof part, f)) > 0;) { all.insert(all.end(), part, part + n); }
    if (f) { fclose(f); }
    const Elf64_Ehdr* head = (const Elf64_Ehdr*)all.data();
    const Elf64_Shdr* sections = (const Elf64_Shdr*)(all.data() + head->e_shoff);
    symbol_of.resize(statics.bytes / 4 + 1);
    std::map<std::string, size_t> of_function;
    std::vector<std::string> functions_of(1);
    for (int i = 0; i < head->e_shnum; i++) {
        if (sections[i].sh_type != SHT_SYMTAB) { continue; }
        const Elf64_Sym* list = (const Elf64_Sym*)(all.data() + sections[i].sh_offset);
        const char* names = all.data() + sections[sections[i].sh_link].sh_offset;
        bool own_file = false;
        for (size_t k = 0; k < sections[i].sh_size / sizeof *list; k++) {
            const Elf64_Sym& s = list[k];
            const std::string name = names + s.st_name;
            if (ELF64_ST_TYPE(s.st_info) == STT_FILE) { own_file = name.size() > 4 && name.substr(name.size() - 4) == ".cpp"; }
            const bool launches =
                name.compare(0, 3, "_ZZ") == 0 || name.compare(0, 4, "_ZSt") == 0 || name.compare(0, 5, "_ZNSt") == 0;
            if (ELF64_ST_TYPE(s.st_info) == STT_FUNC && !launches) { functions[s.st_value] = s.st_size; }
            if (ELF64_ST_TYPE(s.st_info) != STT_OBJECT || s.st_value - statics.begin >= statics.bytes || s.st_size == 0) {
                continue;
            }
            const bool own = (own_file && ELF64_ST_BIND(s.st_info) == STB_LOCAL) || name.find("emulat") != std::string::npos ||
                             name.compare(0, 4, "_ZGV") == 0 || name.compare(0, 4, "_ZSt") == 0 ||
                             (name.find("Idx") != std::string::npos && name.size() < 10) || name == "blockDim" ||
                             name == "gridDim";
            const size_t end = name.find('.');
            char* plain = abi::__cxa_demangle(name.substr(0, end).c_str(), NULL, NULL, NULL);
            std::string shown = plain ? plain : name, in;
            free(plain);
            if (shown.rfind("::") != std::string::npos) {
                in = shown.substr(0, shown.rfind("::")), shown = shown.substr(shown.rfind("::") + 2);
            }
            const bool zeros = s.st_shndx < head->e_shnum && sections[s.st_shndx].sh_type == SHT_NOBITS;
            const bool shared = !own && name.compare(0, 3, "_ZZ") == 0 && zeros && s.st_value % 512 == 0;
            if (shared) { of_function[in] += s.st_size; }
            if (!shared) { memset(&statics.written[(s.st_value - statics.begin) / 8], 255, s.st_size / 8 + 1); }
            symbols.push_back({s.st_value, s.st_size, own ? "" : shown, shared, 0});
            functions_of.push_back(in);
            const size_t first = (s.st_value - statics.begin) / 4, last = (s.st_value + s.st_size - 1 - statics.begin) / 4;
            for (size_t at = first; at <= last; at++) { symbol_of[at] = (uint16_t)(symbols.size() - 1); }
        }
    }
    for (size_t i = 1; i < symbols.size(); i++) {
        symbols[i].of_function = symbols[i].shared ? of_function[functions_of[i]] : 0;
    }
}

static uintptr_t program_counter(void* context) {
#if defined(__x86_64__)
    return (uintptr_t)((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP] + 1;
#else
    return (uintptr_t)((ucontext_t*)context)->uc_mcontext.pc + 1;
#endif
}

/* An address that is nowhere: says where the program was. */
static void on_signal(int number, siginfo_t* info, void* context) {
    if (!on_card) {
        signal(number, SIG_DFL);
        return;
    }
    fault("an address where no memory is", (uint32_t)program_counter(context),
          info->si_code == SI_KERNEL ? "reads or writes far from all memory" : text("reads or writes %p", info->si_addr));
    stop();
}

/* Every few seconds of work: says where a thread runs on and on, as one that waits for another without a barrier does. */
static void on_timer(int, siginfo_t*, void* context) {
    static uint64_t before;
    static int same;
    const uint64_t now = (uint64_t)block_number << 32 | (uint64_t)phase << 16 | emulator_thread;
    same = on_card && now == before ? same + 1 : 0;
    before = now;
    if (same < 3) { return; }
    const uint32_t last = last_line;
    broken((uint32_t)program_counter(context), last,
           "a thread runs on and on: its loop has no end, or it waits for others without a barrier");
}

static void begin(void) {
    extern char __data_start, _end;
    card = region(reserve(CARD_BYTES), CARD_BYTES, false);
    dynamic = region(emulator_shared, SHADOW_SHARED, true);
    char* const data = &__data_start - (uintptr_t)&__data_start % 16;
    statics = region(data, (size_t)(&_end - data), true);
    read_symbols();
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (const int number : {SIGSEGV, SIGBUS}) { sigaction(number, &action, NULL); }
    const itimerval often = {{3, 0}, {3, 0}};
    action.sa_sigaction = on_timer;
    action.sa_flags |= SA_RESTART;
    sigaction(SIGPROF, &action, NULL);
    setitimer(ITIMER_PROF, &often, NULL);
    atexit([] {
        if (faults > 0) { stop(); }
    });
}
static const int begun = (begin(), 0);

void* shadow_take(size_t bytes, bool pinned) {
    static size_t next = slots.size() / 2;
    const size_t need = (bytes >> SLOT_BITS) + 1;  // and one on each side
    for (size_t tried = 0, run = 0; tried < 2 * slots.size(); tried++, next++) {
        if (next + 1 >= slots.size()) { next = 1, run = 0; }
        run = slots[next] || slots[next + 1] || slots[next - 1] ? 0 : run + 1;
        if (run < need) { continue; }
        const uintptr_t at = card.begin + ((next - need + 1) << SLOT_BITS);
        Allocation* a = new Allocation{at, bytes, 0, 0, 0, 0, "", false, 0};
        for (size_t s = next - need + 1; s <= next; s++) { slots[s] = a; }
        next += 2;
        if (pinned) { memset(&card.written[(at - card.begin) / 8], 255, bytes / 8 + 1); }
        return (void*)at;
    }
    return NULL;
}

static Allocation* allocation(const void* p) {
    return (uintptr_t)p - card.begin < card.bytes ? slots[((uintptr_t)p - card.begin) >> SLOT_BITS] : NULL;
}

void shadow_give_back(void* p, const void* line) {
    Allocation* a = allocation(p);
    const size_t first = (a->begin - card.begin) >> SLOT_BITS, count = (a->bytes >> SLOT_BITS) + 1, bytes = count << SLOT_BITS;
    for (size_t s = first; s < first + count; s++) { slots[s] = NULL, freed_slots[s] = a; }
    madvise(p, bytes, MADV_DONTNEED);
    madvise(&card.cells[(first << SLOT_BITS) / GRANULE], bytes / GRANULE * sizeof(Cell), MADV_DONTNEED);
    madvise(&card.written[(first << SLOT_BITS) / 8], bytes / 8, MADV_DONTNEED);
    a->freed = (uint32_t)(uintptr_t)line;
}

void shadow_name(const void* p, const char* name, size_t rows, size_t width, size_t pitch, size_t each, bool input) {
    Allocation* a = allocation(p);
    if (a) { a->name = name, a->rows = rows, a->width = width, a->pitch = pitch, a->each = each, a->input = input; }
}

/* The running work copies: it must have an order with what others did there. */
static void copy_accesses(const void* p, size_t bytes, ShadowAccess how, const void* line) {
    const size_t at = ((uintptr_t)p - card.begin) / GRANULE * GRANULE, end = (uintptr_t)p - card.begin + bytes;
    if (!allocation(p) || bytes > MOST_COPIED) { return; }
    for (size_t i = at; i < end; i += GRANULE) {
        const uint8_t is = card.written[i / 8];
        judge(card, card.begin + i, GRANULE, how, (uint32_t)(uintptr_t)line);
        if (how == SHADOW_READ) { card.written[i / 8] = is; }
    }
}

void shadow_written(const void* to, size_t bytes, const void* from, const void* line) {
    if (bytes == 0) { return; }
    emulator_thread = 0;
    const std::vector<Grid>& all = grids[stream];
    if (all.empty() || all.back().place != works[stream]) { begin_grid(dim3(1), dim3(0)); }  // once for all its rows
    block_number = grid_first, phase = 0, events[0] = 1, phases++, copying = true;
    if (from) { copy_accesses(from, bytes, SHADOW_READ, line); }
    copy_accesses(to, bytes, SHADOW_WRITE, line);
    copying = false;
    if (!allocation(to)) { return; }
    const size_t at = (uintptr_t)to - card.begin, of = (uintptr_t)from - card.begin;
    for (size_t i = 0; i < bytes;) {  // whole bytes of bits where possible
        if ((at + i) % 8 == 0 && bytes - i >= 8 && (!allocation(from) || of % 8 == at % 8)) {
            card.written[(at + i) / 8] = allocation(from) ? card.written[(of + i) / 8] : 255;
            i += 8;
        } else {
            const bool is = !allocation(from) || (card.written[(of + i) / 8] >> (of + i) % 8 & 1);
            card.written[(at + i) / 8] =
                (uint8_t)((card.written[(at + i) / 8] & ~(1u << (at + i) % 8)) | (unsigned)is << (at + i) % 8);
            i++;
        }
    }
}

void shadow_allow(const void* kernel, size_t bytes) {
    const std::lock_guard<std::mutex> lock(allowing);
    size_t& most = allowed[(uintptr_t)kernel];  // the launches before may not have run yet
    most = std::max(most, bytes);
}

void shadow_refused(dim3 grid, dim3 block, size_t shared, const void* line) {
    fault("a launch that a card refuses", (uint32_t)(uintptr_t)line,
          text("grid (%u, %u, %u), block (%u, %u, %u): %u threads, of at most 1024; %zu bytes of dynamic shared memory", grid.x,
               grid.y, grid.z, block.x, block.y, block.z, block.x * block.y * block.z, shared));
}

static const void* launched;  // where the running grid was

void shadow_grid(size_t shared, const void* line) {
    static char signal_stack[1 << 16];
    static thread_local bool has_stack;
    stack_t stack = {};
    stack.ss_sp = signal_stack, stack.ss_size = sizeof signal_stack;
    if (!has_stack) { sigaltstack(&stack, NULL), has_stack = true; }
    launched = line;
    dynamic_bytes = shared;
    watched = shared > UNASKED_SHARED, entered = false;
    grid_first = 0;  // its first block tells the numbers
}

void shadow_block(size_t index) {
    if (grid_first == 0) { begin_grid(gridDim, blockDim); }
    block_number = grid_first + (uint32_t)index;
    shadow_barrier();
    phase = 0;
    memset(dynamic.written, 0, dynamic_bytes / 8 + 1);
    memset(dynamic.flights, 0, (dynamic_bytes / GRANULE + 1) * sizeof *dynamic.flights);
    for (const Symbol& s : symbols) {
        if (!s.shared) { continue; }
        uint8_t* const bits = &statics.written[(s.begin - statics.begin) / 8];  // it begins at a multiple of 512
        memset(bits, 0, s.bytes / 8);
        bits[s.bytes / 8] &= (uint8_t)(255u << s.bytes % 8);
        memset(&statics.flights[(s.begin - statics.begin) / GRANULE], 0, (s.bytes / GRANULE + 1) * sizeof *statics.flights);
    }
    std::fill(events, events + MOST_THREADS, 1);
    std::fill(fenced, fenced + MOST_THREADS, false);
    std::fill(product_fence, product_fence + MOST_THREADS, false);
    for (Clocks& c : seen) { c.when = 0; }
    for (std::vector<Sums>& s : sums) { s.clear(); }
    copier = multiplying = false;
    known_blocks.clear();
    on_card = true;
}

void shadow_block_ended(void) {
    for (const Flight *f = dynamic.flights, *end = f + dynamic_bytes / GRANULE; f < end; f++) {
        if (f->line && f->reads) {  // by TMA
            emulator_thread = f->thread;
            fault("memory of a copy that is under way", f->line, "the block ends before the copy has");
            break;
        }
    }
    on_card = false;
    if (watched && entered) {
        fault("too much dynamic shared memory", (uint32_t)(uintptr_t)launched,
              text("%zu bytes: above %d a card wants cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, "
                   "%zu)",
                   dynamic_bytes, UNASKED_SHARED, dynamic_bytes));
    }
    watched = false;
}
