/* nccl.cpp -- becomes the libnccl.so.2 of the emulator: what llmc/gpu/nccl.cuh calls of NCCL, for ranks that are processes of
 * one host. Pretended hosts are not told from true ones.
 *
 * Every call is a list of messages. One message at a time is under way from each rank to each other one: it lies in their slot
 * of the communicator's memory, a piece at a time, with a note of the call it belongs to. Both ends must have the same note, or
 * the program ends, where NCCL would hang or pass wrong bytes on. So in a collective each rank has a message for every rank, if
 * only the note. Also checked: buffers that overlap, buffers at other places of the symmetric windows than on other ranks,
 * windows of other sizes than there, memory that is given back before its window, and calls behind one that is still in
 * progress. Memory of ncclMemAlloc() is NaN until it is written.
 *
 * The communicator's memory has no name: rank 0 makes it, and the others open it among the files of rank 0's process. A rank
 * locks its byte of that file as long as it lives, so the others see when it is gone. Then the work that waits for it ends, and
 * the communicator has the error ncclRemoteError; within a host, NCCL would wait for ever.
 *
 * What it does not do: blocking communicators, other types than bytes and floats, other reductions than sums (in rank order),
 * collectives in groups, groups of several communicators or streams. All settings are accepted and make no difference.
 */
#include <nccl.h>

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <vector>

#include "runtime.h"  // defines: emulator_queue, emulator_die

enum { ROOM = 256 << 10, MAX_WINDOWS = 32, NOWHERE = -1 };
enum { POLLS = 3 };              // of CommGetAsyncError that tell ncclInProgress behind each call
enum { YIELDS = 100 };           // of who waits; then it sleeps 0.1 ms at a time
enum { LOOK = 600 };             // turns, about 0.1 s, after which it looks whether the others live
enum { TELL = 60 * 10 * LOOK };  // turns after which it says what it waits for

/* What a message belongs to. It has no gaps, since it is compared as bytes. */
struct Note {
    char name[16];
    uint64_t number;   // of the messages from one rank to another, in the order of the host's calls
    uint64_t bytes;    // of a part
    int64_t from, to;  // place_of() the buffers
    int64_t root;      // or NOWHERE
};

struct alignas(64) Slot {
    std::atomic<int> full;
    Note note;
    char data[ROOM];
};

/* What the ranks share. All zero at first. */
struct Shared {
    std::atomic<int> joined;
    std::atomic<size_t> windows[MAX_WINDOWS];  // bytes of those that were registered
    Slot slots[1];                             // (ranks, ranks): from each to each
};

/* A rank's end of a communicator. What is queued or captured holds it, too. */
struct Link {
    int file, rank, ranks;
    size_t mapped;
    Shared* shared;
    std::atomic<ncclResult_t> error{ncclSuccess};  // with one, nothing waits any more
    char reason[64] = "";

    ~Link() { munmap(shared, mapped), close(file); }
    bool lock() {
        struct flock byte = {F_WRLCK, SEEK_SET, rank, 1, 0};
        return fcntl(file, F_OFD_SETLK, &byte) == 0;
    }
    bool lives(int other) {
        struct flock byte = {F_WRLCK, SEEK_SET, other, 1, 0};
        return other == rank || fcntl(file, F_OFD_GETLK, &byte) != 0 || byte.l_type != F_UNLCK;
    }
};

struct ncclComm {
    std::shared_ptr<Link> link;
    std::vector<uint64_t> issued[2];  // messages from each rank, and to each
    int windows;                      // registered so far
    int polls;                        // that will tell ncclInProgress
    bool finalized;
};

// ---------------------------------------------------------------------------------------------------------------------
// messages

struct Message {
    bool send;
    int peer;
    char* at;
    size_t bytes;
    Note note;
    size_t done;
    bool through;
};

static void print_note(char text[200], const Note& n) {
    snprintf(text, 200, "%s of %zu bytes (message %zu, root %d, from %lld to %lld of windows)", n.name, (size_t)n.bytes,
             (size_t)n.number, (int)n.root, (long long)n.from, (long long)n.to);
}

/* Moves the next piece of a message. Returns false if the other end has to move first. */
static bool move_piece(Link* l, Message* m) {
    Slot* slot = &l->shared->slots[m->send ? l->rank * l->ranks + m->peer : m->peer * l->ranks + l->rank];
    const size_t n = std::min(m->bytes - m->done, (size_t)ROOM);
    if (slot->full == (int)m->send) { return false; }
    if (m->send) {
        slot->note = m->note;
        memcpy(slot->data, m->at + m->done, n);
    } else if (memcmp(&slot->note, &m->note, sizeof m->note) != 0) {
        char mine[200], other[200];
        print_note(mine, m->note);
        print_note(other, slot->note);
        emulator_die("nccl: rank %d is at %s, but rank %d at %s", l->rank, mine, m->peer, other);
    } else {
        memcpy(m->at + m->done, slot->data, n);
    }
    m->done += n;
    slot->full = m->send;
    return true;
}

/* Moves a piece of each message that can; those of one peer and direction follow one another. Removes what is through. */
static bool move_pieces(Link* l, std::vector<Message>* messages) {
    bool moved = false;
    std::vector<char> had(2 * (size_t)l->ranks);
    for (Message& m : *messages) {
        char* turn = &had[2 * (size_t)m.peer + m.send];
        const bool moves = !*turn && move_piece(l, &m);
        *turn = 1;
        moved |= moves;
        m.through = moves && m.done == m.bytes;
    }
    const auto through = [](const Message& m) { return m.through; };
    messages->erase(std::remove_if(messages->begin(), messages->end(), through), messages->end());
    return moved;
}

/* Exchanges messages with the other ranks. Returns false if one of them is gone, or the communicator was aborted. */
static bool exchange(Link* l, std::vector<Message> messages) {
    const struct timespec pause = {0, 100000};
    for (int turn = 1; !messages.empty() && l->error == ncclSuccess; turn++) {
        const auto is_lost = [&](const Message& m) { return turn % LOOK == 0 && !l->lives(m.peer); };
        const auto lost = std::find_if(messages.begin(), messages.end(), is_lost);
        const int lost_rank = lost == messages.end() ? NOWHERE : lost->peer;
        if (move_pieces(l, &messages)) {  // also what a rank sent before it was gone
            turn = 0;
        } else if (lost_rank != NOWHERE) {
            snprintf(l->reason, sizeof l->reason, "rank %d is gone", lost_rank);
            l->error = ncclRemoteError;
        } else if (turn < YIELDS) {
            sched_yield();
        } else {
            nanosleep(&pause, NULL);
        }
        if (turn == TELL) {
            char text[200];
            print_note(text, messages[0].note);
            fprintf(stderr, "nccl: rank %d has waited a minute for rank %d at %s\n", l->rank, messages[0].peer, text);
        }
    }
    return messages.empty();
}

// ---------------------------------------------------------------------------------------------------------------------
// the state of communicators

static ncclResult_t state_of(ncclComm_t comm) {
    const Link* l = comm->link.get();
    const bool leaving = comm->finalized && comm->link.use_count() > 1;  // NCCL also waits for graphs that hold its calls
    if (l->error != ncclSuccess) { return l->error; }
    return l->shared->joined < l->ranks || comm->polls > 0 || leaving ? ncclInProgress : ncclSuccess;
}

/* Returns the communicator's error, if it has one. Ends the program if it cannot be used now. */
static ncclResult_t begin(ncclComm_t comm, const char* call) {
    const ncclResult_t state = state_of(comm);
    if (state == ncclInProgress) { emulator_die("nccl%s: the communicator is still busy with an earlier call", call); }
    if (comm->finalized) { emulator_die("nccl%s: the communicator was finalized", call); }
    return state;
}

/* Queues messages, and what is done with what they bring. */
static ncclResult_t queue(ncclComm_t comm, cudaStream_t stream, std::vector<Message> messages, std::function<void()> then) {
    for (Message& m : messages) { m.note.number = comm->issued[m.send][(size_t)m.peer]++; }
    emulator_queue(stream, [link = comm->link, messages, then] {
        if (exchange(link.get(), messages) && then) { then(); }
    });
    comm->polls = POLLS;
    return ncclInProgress;
}

ncclResult_t ncclGetVersion(int* version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
    switch (result) {
        case ncclSuccess: return "no error";
        case ncclUnhandledCudaError: return "unhandled cuda error";
        case ncclSystemError: return "unhandled system error";
        case ncclRemoteError: return "remote process exited or there was a network error";
        default: return "an error that the emulator has not";
    }
}

const char* ncclGetLastError(ncclComm_t comm) { return comm ? comm->link->reason : ""; }

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
    *error = state_of(comm);
    if (comm->polls > 0 && comm->link->shared->joined == comm->link->ranks) { comm->polls--; }
    return ncclSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// joining and leaving

/* What an id holds: the process that made it, and its file. */
struct Invitation {
    pid_t pid;
    int file;
};

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    const Invitation v = {getpid(), memfd_create("nccl", MFD_CLOEXEC)};
    memset(id, 0, sizeof *id);
    memcpy(id, &v, sizeof v);
    return v.file < 0 ? ncclSystemError : ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
    if (config->blocking != 0) { emulator_die("ncclCommInitRankConfig: of a blocking communicator"); }
    if (rank < 0 || rank >= ranks) { emulator_die("ncclCommInitRankConfig: rank %d of %d", rank, ranks); }
    Invitation v;
    char path[64];
    memcpy(&v, &id, sizeof v);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", v.pid, v.file);
    const int file = v.pid == getpid() ? v.file : open(path, O_RDWR | O_CLOEXEC);
    const size_t bytes = sizeof(Shared) + (size_t)ranks * (size_t)ranks * sizeof(Slot);
    if (file < 0 || ftruncate(file, (off_t)bytes) != 0) { return ncclSystemError; }  // the process is gone
    void* shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shared == MAP_FAILED) { emulator_die("ncclCommInitRankConfig: no memory: %s", strerror(errno)); }
    const std::vector<uint64_t> none((size_t)ranks);
    Link* l = new Link{file, rank, ranks, bytes, (Shared*)shared};
    if (!l->lock()) { emulator_die("ncclCommInitRankConfig: there are two ranks %d", rank); }
    l->shared->joined++;
    *comm = new ncclComm{std::shared_ptr<Link>(l), {none, none}, 0, POLLS, false};
    return ncclInProgress;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    const ncclResult_t state = begin(comm, "CommFinalize");
    comm->finalized = true;
    comm->polls = POLLS;
    return state == ncclSuccess ? ncclInProgress : state;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    comm->link->error = ncclInvalidUsage;
    delete comm;
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (comm->link.use_count() > 1) { emulator_die("ncclCommDestroy: a stream or a graph holds calls of the communicator"); }
    return ncclCommAbort(comm);
}

// ---------------------------------------------------------------------------------------------------------------------
// memory

struct ncclWindow_vidmem {
    ncclComm_t comm;
    int number;  // of the communicator's
    char* at;
    size_t bytes;
};

static std::map<char*, size_t> allocated;
static std::vector<ncclWindow_t> windows;

static bool overlap(const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
    return (char*)a < (char*)b + b_bytes && (char*)b < (char*)a + a_bytes;
}

/* Returns where a buffer lies in a communicator's windows, or NOWHERE. Each rank must have the same. */
static int64_t place_of(ncclComm_t comm, const void* buffer) {
    for (const ncclWindow_t w : windows) {
        if (w->comm == comm && overlap(w->at, w->bytes, buffer, 1)) {
            return ((int64_t)w->number << 48) + ((char*)buffer - w->at);
        }
    }
    return NOWHERE;
}

ncclResult_t ncclMemAlloc(void** memory, size_t bytes) {
    *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*memory == MAP_FAILED) { return ncclUnhandledCudaError; }
    memset(*memory, 0xFF, bytes);
    allocated[(char*)*memory] = bytes;
    return ncclSuccess;
}

ncclResult_t ncclMemFree(void* memory) {
    if (allocated.count((char*)memory) == 0) { emulator_die("ncclMemFree: of other memory than that of ncclMemAlloc"); }
    const size_t bytes = allocated[(char*)memory];
    for (const ncclWindow_t w : windows) {
        if (overlap(w->at, w->bytes, memory, bytes)) { emulator_die("ncclMemFree: of memory with a window"); }
    }
    munmap(memory, bytes);
    allocated.erase((char*)memory);
    return ncclSuccess;
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* memory, size_t bytes, ncclWindow_t* window, int flags) {
    const ncclResult_t state = begin(comm, "CommWindowRegister");
    if (state != ncclSuccess) { return state; }
    const auto found = allocated.find((char*)memory);  // only whole memories, as the program does it
    if (found == allocated.end() || bytes > found->second || flags != NCCL_WIN_COLL_SYMMETRIC || comm->windows == MAX_WINDOWS) {
        emulator_die("ncclCommWindowRegister: window %d of %zu bytes at %p, flags %d", comm->windows, bytes, memory, flags);
    }
    size_t others = 0;
    if (!comm->link->shared->windows[comm->windows].compare_exchange_strong(others, bytes) && others != bytes) {
        emulator_die("ncclCommWindowRegister: %zu bytes on rank %d, %zu on another", bytes, comm->link->rank, others);
    }
    *window = new ncclWindow_vidmem{comm, comm->windows++, (char*)memory, bytes};
    windows.push_back(*window);
    comm->polls = POLLS;
    return ncclSuccess;  // as NCCL says although it still registers
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
    const auto found = std::find(windows.begin(), windows.end(), window);
    if (found == windows.end() || window->comm != comm) { emulator_die("ncclCommWindowDeregister: this is no window"); }
    windows.erase(found);
    delete window;
    return ncclSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// sends and receives

/* The sends and receives since ncclGroupStart(). */
static struct {
    int depth;
    ncclComm_t comm;
    cudaStream_t stream;
    std::vector<Message> messages;
} group;

static size_t bytes_of(size_t count, ncclDataType_t type) {
    if (type != ncclUint8 && type != ncclFloat32) { emulator_die("nccl: type %d", (int)type); }
    return type == ncclUint8 ? count : count * sizeof(float);
}

ncclResult_t ncclGroupStart() {
    group.depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
    if (group.depth == 0) { emulator_die("ncclGroupEnd: no group was started"); }
    if (--group.depth > 0 || group.messages.empty()) { return ncclSuccess; }
    std::vector<Message> messages;
    messages.swap(group.messages);
    for (const Message& m : messages) {
        for (const Message& other : messages) {
            if (!m.send && &m != &other && overlap(m.at, m.bytes, other.at, other.bytes)) {
                emulator_die("ncclGroupEnd: buffers overlap: %zu bytes at %p, %zu at %p", m.bytes, m.at, other.bytes, other.at);
            }
        }
    }
    return queue(group.comm, group.stream, messages, nullptr);
}

static ncclResult_t add_message(bool send, const void* at, size_t bytes, int peer, ncclComm_t comm, cudaStream_t stream) {
    const ncclResult_t state = begin(comm, send ? "Send" : "Recv");
    if (state != ncclSuccess) { return state; }
    if (peer < 0 || peer >= comm->link->ranks) { emulator_die("nccl%s: rank %d", send ? "Send" : "Recv", peer); }
    if (!group.messages.empty() && (group.comm != comm || group.stream != stream)) {
        emulator_die("nccl%s: a group of several communicators or streams", send ? "Send" : "Recv");
    }
    ncclGroupStart();
    group.comm = comm;
    group.stream = stream;
    group.messages.push_back({send, peer, (char*)at, bytes, {"Send", 0, bytes, NOWHERE, NOWHERE, NOWHERE}, 0, false});
    return ncclGroupEnd();
}

ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return add_message(true, from, bytes_of(count, type), peer, comm, stream);
}

ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return add_message(false, to, bytes_of(count, type), peer, comm, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// collectives

struct Buffers {
    const void* from;
    bool from_parts;  // it has a part for each rank, else one for all
    void* to;
    bool to_parts;         // it has room for a part of each rank, else for one
    const void* in_place;  // where `from` may lie although it overlaps `to`
};

/* Checks the buffers, and returns the note of a call. bytes: of a part */
static Note note_of(ncclComm_t comm, const char* name, const Buffers& b, size_t bytes, int root) {
    const size_t all = (size_t)comm->link->ranks * bytes, from = b.from_parts ? all : bytes, to = b.to_parts ? all : bytes;
    const bool in_place = b.from == b.in_place;
    if (!in_place && overlap(b.from, from, b.to, to)) {
        emulator_die("nccl%s: buffers overlap: %zu bytes at %p, %zu at %p", name, from, b.from, to, b.to);
    }
    const void* whole = std::min(b.from, (const void*)b.to);  // of buffers in place, of which one is a part of the other
    const int64_t from_place = place_of(comm, in_place ? whole : b.from), to_place = place_of(comm, in_place ? whole : b.to);
    Note note = {"", 0, bytes, from_place, to_place, root};
    strncpy(note.name, name, sizeof note.name - 1);
    return note;
}

/* Sends parts, and puts those that come in their places, or into landing (ranks, bytes); root: the one rank that sends, or
 * NOWHERE. Then does `then`. */
static ncclResult_t collective(const char* name, const Buffers& b, size_t bytes, int root, ncclComm_t comm, cudaStream_t stream,
                               char* landing = NULL, std::function<void()> then = nullptr) {
    const ncclResult_t state = begin(comm, name);
    if (state != ncclSuccess) { return state; }
    if (group.depth > 0) { emulator_die("nccl%s: in a group", name); }
    const Note note = note_of(comm, name, b, bytes, root);
    std::vector<Message> messages;
    for (int r = 0; r < comm->link->ranks; r++) {
        const size_t part = (size_t)r * bytes;
        char* from = (char*)b.from + (b.from_parts ? part : 0);
        char* to = landing ? landing + part : (char*)b.to + (b.to_parts ? part : 0);
        messages.push_back({true, r, from, root == NOWHERE || root == comm->link->rank ? bytes : 0, note, 0, false});
        messages.push_back({false, r, to, root == NOWHERE || root == r ? bytes : 0, note, 0, false});
    }
    return queue(comm, stream, messages, then);
}

/* Adds up the floats that all ranks have for this one. Nothing in llmc/ calls it. */
static ncclResult_t collective_sum(const char* name, const Buffers& b, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                   ncclComm_t comm, cudaStream_t stream) {
    if (op != ncclSum || type != ncclFloat32) { emulator_die("nccl%s: operation %d, type %d", name, (int)op, (int)type); }
    const size_t ranks = (size_t)comm->link->ranks;
    const auto landing = std::make_shared<std::vector<float>>(ranks * count);
    const auto add = [landing, ranks, count, to = (float*)b.to] {
        for (size_t i = 0; i < count; i++) {
            to[i] = (*landing)[i];
            for (size_t r = 1; r < ranks; r++) { to[i] += (*landing)[r * count + i]; }
        }
    };
    return collective(name, b, count * sizeof(float), NOWHERE, comm, stream, (char*)landing->data(), add);
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
    return collective_sum("AllReduce", {from, false, to, false, to}, count, type, op, comm, stream);
}

ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream) {
    const void* in_place = (float*)to - (size_t)comm->link->rank * count;
    return collective_sum("ReduceScatter", {from, true, to, false, in_place}, count, type, op, comm, stream);
}

ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    const size_t bytes = bytes_of(count, type);
    const void* in_place = (char*)to + (size_t)comm->link->rank * bytes;
    return collective("AllGather", {from, false, to, true, in_place}, bytes, NOWHERE, comm, stream);
}

ncclResult_t ncclAlltoAll(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
    return collective("AlltoAll", {from, true, to, true, NULL}, bytes_of(count, type), NOWHERE, comm, stream);
}

ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
    if (root < 0 || root >= comm->link->ranks) { emulator_die("ncclBroadcast: root %d", root); }
    if (from != to) { emulator_die("ncclBroadcast: not in place"); }
    return collective("Broadcast", {from, false, to, false, to}, bytes_of(count, type), root, comm, stream);
}
