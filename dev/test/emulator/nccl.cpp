/* nccl.cpp -- becomes the libnccl.so.2 of the emulator: the functions that llmc/gpu/nccl.cuh calls, for ranks that are
 * processes of one host. It treats pretended hosts as this one.
 *
 * Every call is a list of messages, which go through a socket from each rank to each other. Before a message goes a note that
 * describes its call. The receiver must have the same note, or the program ends; NCCL would hang or pass wrong bytes on. So in
 * a collective each rank sends every rank a message, if only the note. Also checked: buffers that overlap; buffers whose places
 * in the symmetric windows, and windows whose sizes, differ between ranks; memory that is freed before its window; and calls
 * after a call that is still in progress.
 *
 * If a rank is gone, the work that waits for it ends, and the communicator reports ncclRemoteError; within a host, NCCL would
 * wait for ever.
 *
 * Not emulated: blocking communicators, other types than bytes, reductions, collectives in groups, groups of several
 * communicators or streams, several windows of one memory. All settings are accepted and make no difference.
 */
#include <nccl.h>

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "runtime.h"  // defines: emulator_queue, emulator_die

enum { NOWHERE = -1 };
enum { POLLS = 3 };      // calls of CommGetAsyncError that report ncclInProgress after each call
enum { LOOK_MS = 100 };  // after which a waiting thread checks the communicator for an error

/* Describes the call of a message. It has no gaps, since it is compared as bytes. */
struct Note {
    char name[16];
    long long number;    // counts the messages from one rank to another, in the order of the host's calls
    long long bytes;     // of a part
    long long root;      // or NOWHERE
    long long from, to;  // place_of() the buffers
    long long windows;   // as in ncclComm
};

struct Message {
    bool send;
    int peer;
    char* at;
    size_t bytes;
    Note note;
};

/* A rank's end of a communicator. */
struct ncclComm {
    std::shared_ptr<ncclComm> self;  // until it is left; queued or captured work holds it, too
    ncclUniqueId id;
    int rank;
    std::vector<int> listeners, in, out;  // sockets, by the other rank
    std::vector<long long> issued[2];     // messages from each rank, and to each
    bool joined, finalized;
    int polls;                       // calls that will report ncclInProgress
    long long windows;               // a number that stands for the registered windows: their sizes, in order
    std::atomic<int> lost{NOWHERE};  // a rank that is gone, or this rank after an abort: nothing waits any more

    int ranks() const { return (int)out.size(); }
    ~ncclComm() {
        for (const auto& sockets : {listeners, in, out}) { std::for_each(sockets.begin(), sockets.end(), close); }
    }
};

/* Memory of ncclMemAlloc(), which has at most one window. */
struct ncclWindow_vidmem {
    long long bytes;
    ncclComm_t comm;   // of the window, or NULL
    long long number;  // the communicator's `windows`, with this one
};

static std::map<char*, ncclWindow_vidmem> memories;

// ---------------------------------------------------------------------------------------------------------------------
// messages

/* Moves bytes of a message. Returns false if the other end is gone. */
static bool move(ncclComm_t comm, const Message& m, char* at, size_t bytes) {
    struct pollfd channel = {(m.send ? comm->out : comm->in)[(size_t)m.peer], (short)(m.send ? POLLOUT : POLLIN), 0};
    while (bytes > 0 && comm->lost == NOWHERE) {
        const ssize_t n =
            m.send ? send(channel.fd, at, bytes, MSG_DONTWAIT | MSG_NOSIGNAL) : recv(channel.fd, at, bytes, MSG_DONTWAIT);
        if (n > 0) {
            at += n, bytes -= (size_t)n;
        } else if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
            poll(&channel, 1, LOOK_MS);
        } else {
            comm->lost = m.peer;
        }
    }
    return bytes == 0;
}

static std::string text_of(const Note& n) {
    char text[200];
    snprintf(text, sizeof text, "%s %lld of %lld bytes, root %d, windows %lld, in which from %lld to %lld", n.name, n.number,
             n.bytes, (int)n.root, n.windows, n.from, n.to);
    return text;
}

/* Sends or receives a message, its note first. */
static bool transfer(ncclComm_t comm, const Message& m) {
    Note note = m.note;
    if (!move(comm, m, (char*)&note, sizeof note)) { return false; }
    if (memcmp(&note, &m.note, sizeof note) != 0) {
        emulator_die("nccl: rank %d is at %s, but rank %d at %s", comm->rank, text_of(m.note).c_str(), m.peer,
                     text_of(note).c_str());
    }
    return move(comm, m, m.at, m.bytes);
}

/* Exchanges messages with the other ranks. A second thread sends them. */
static void exchange(ncclComm_t comm, const std::vector<Message>& messages) {
    const auto transfer_all = [&](bool send) {
        return std::all_of(messages.begin(), messages.end(), [&](auto& m) { return m.send != send || transfer(comm, m); });
    };
    std::thread sender(transfer_all, true);
    transfer_all(false);
    sender.join();
}

// ---------------------------------------------------------------------------------------------------------------------
// the state of communicators

static ncclResult_t state_of(ncclComm_t comm) {
    const bool leaving = comm->finalized && comm->self.use_count() > 1;  // NCCL, too, waits for graphs that hold its calls
    if (comm->lost != NOWHERE) { return ncclRemoteError; }
    return !comm->joined || comm->polls > 0 || leaving ? ncclInProgress : ncclSuccess;
}

/* Begins a call; returns false if the communicator has an error. Ends the program if it cannot be used now. */
static bool begin(ncclComm_t comm, const char* call) {
    const ncclResult_t state = state_of(comm);
    if (state == ncclInProgress) { emulator_die("nccl%s: the communicator is still busy with an earlier call", call); }
    if (comm->finalized) { emulator_die("nccl%s: the communicator was finalized", call); }
    return state == ncclSuccess;
}

static bool overlap(const Message& a, const Message& b) { return a.at < b.at + b.bytes && b.at < a.at + a.bytes; }

/* Queues messages. A rank may send to itself in place. */
static ncclResult_t queue(ncclComm_t comm, cudaStream_t stream, std::vector<Message> messages) {
    for (const Message& m : messages) {
        for (const Message& other : messages) {
            const bool in_place = m.peer == comm->rank && other.send && m.at == other.at && m.bytes == other.bytes;
            if (!m.send && &m != &other && !in_place && overlap(m, other)) {
                emulator_die("nccl%s: buffers overlap: %zu bytes at %p, %zu at %p", m.note.name, m.bytes, m.at, other.bytes,
                             other.at);
            }
        }
    }
    for (Message& m : messages) {
        m.note.number = comm->issued[m.send][(size_t)m.peer]++;
        m.note.windows = comm->windows;
    }
    // every rank takes messages by their distance in ranks: at the lowest distance every waiting rank has a partner, so none is
    // stuck
    const int n = comm->ranks();
    const auto shift = [&](const Message& m) { return (m.send ? m.peer - comm->rank + n : comm->rank - m.peer + n) % n; };
    std::stable_sort(messages.begin(), messages.end(), [&](auto& a, auto& b) { return shift(a) < shift(b); });
    comm->polls = POLLS;
    emulator_queue(stream, [self = comm->self, messages] { exchange(self.get(), messages); });
    return ncclInProgress;
}

ncclResult_t ncclGetVersion(int* version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
    return result == ncclRemoteError ? "remote process exited or there was a network error" : "unhandled cuda error";
}

const char* ncclGetLastError(ncclComm_t comm) {
    static thread_local char text[64];
    const int lost = comm ? comm->lost.load() : NOWHERE;
    snprintf(text, sizeof text, lost == NOWHERE ? "" : "rank %d is gone", lost);
    return text;
}

// ---------------------------------------------------------------------------------------------------------------------
// joining and leaving

/* The address at which a rank listens to another: a name outside of any file system. */
static struct sockaddr_un address_of(const ncclUniqueId& id, int from, int to) {
    struct sockaddr_un address = {AF_UNIX, ""};
    snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "%.60s.%d.%d", id.internal, from, to);
    return address;
}

/* Connects a rank with ranks that listen already and are not connected yet. Returns whether it is connected with all. */
static bool connect_ranks(ncclComm_t comm) {
    bool all = true;
    for (int r = 0; r < comm->ranks(); r++) {
        const struct sockaddr_un to = address_of(comm->id, comm->rank, r);
        int *in = &comm->in[(size_t)r], *out = &comm->out[(size_t)r];
        if (*in == NOWHERE) { *in = accept4(comm->listeners[(size_t)r], NULL, NULL, SOCK_CLOEXEC); }
        const bool reached = connect(*out, (const struct sockaddr*)&to, sizeof to) == 0 || errno == EISCONN;
        all = all && *in != NOWHERE && reached;
    }
    return all;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    static int number;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "emulated-nccl.%d.%d", getpid(), number++);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
    if (config->blocking != 0 || rank < 0 || rank >= ranks) {
        emulator_die("ncclCommInitRankConfig: rank %d of %d, or of a blocking communicator", rank, ranks);
    }
    ncclComm_t c = *comm = new ncclComm();
    c->self.reset(c);
    c->id = id;
    c->rank = rank;
    c->polls = POLLS;
    c->in.resize((size_t)ranks, NOWHERE);
    for (auto& issued : c->issued) { issued.resize((size_t)ranks); }
    for (int r = 0; r < ranks; r++) {
        const struct sockaddr_un from = address_of(id, r, rank);
        const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        c->listeners.push_back(listener);
        c->out.push_back(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
        if (bind(listener, (const struct sockaddr*)&from, sizeof from) != 0 || listen(listener, 1) != 0) {
            emulator_die("ncclCommInitRankConfig: rank %d: %s", rank, strerror(errno));  // also where two ranks have one number
        }
    }
    return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
    *error = state_of(comm);
    if (!comm->joined) {
        comm->joined = connect_ranks(comm);
    } else if (comm->polls > 0) {
        comm->polls--;
    }
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    if (!begin(comm, "CommFinalize")) { return ncclRemoteError; }
    comm->finalized = true;
    comm->polls = POLLS;
    return ncclInProgress;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    comm->lost = comm->rank;
    std::shared_ptr<ncclComm>().swap(comm->self);
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (comm->self.use_count() > 1) { emulator_die("ncclCommDestroy: a stream or a graph holds calls of the communicator"); }
    return ncclCommAbort(comm);
}

// ---------------------------------------------------------------------------------------------------------------------
// memory

/* Returns where a buffer lies in a communicator's windows, or NOWHERE. Each rank must have the same place. */
static long long place_of(ncclComm_t comm, const void* buffer) {
    const auto next = memories.upper_bound((char*)buffer);
    if (next == memories.begin()) { return NOWHERE; }
    const auto& [at, memory] = *std::prev(next);
    const long long offset = (const char*)buffer - at;
    return memory.comm == comm && offset < memory.bytes ? memory.number + offset : (long long)NOWHERE;
}

ncclResult_t ncclMemAlloc(void** memory, size_t bytes) {
    if (cudaMalloc(memory, bytes) != cudaSuccess) { return ncclUnhandledCudaError; }
    memories[(char*)*memory] = {(long long)bytes, NULL, 0};
    return ncclSuccess;
}

ncclResult_t ncclMemFree(void* memory) {
    const auto found = memories.find((char*)memory);
    if (found == memories.end() || found->second.comm) { emulator_die("ncclMemFree: of other memory, or with a window"); }
    memories.erase(found);
    cudaFree(memory);
    return ncclSuccess;
}

/* Takes only whole allocations, as the program registers them. */
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* memory, size_t bytes, ncclWindow_t* window, int flags) {
    const auto found = memories.find((char*)memory);
    if (!begin(comm, "CommWindowRegister")) { return ncclRemoteError; }
    if (found == memories.end() || found->second.comm || found->second.bytes != (long long)bytes ||
        flags != NCCL_WIN_COLL_SYMMETRIC) {
        emulator_die("ncclCommWindowRegister: %zu bytes at %p, flags %d", bytes, memory, flags);
    }
    comm->windows = 31 * comm->windows + (long long)bytes;
    comm->polls = POLLS;
    found->second = {(long long)bytes, comm, comm->windows};
    *window = &found->second;
    return ncclSuccess;  // NCCL says so although it still registers
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
    if (window->comm != comm) { emulator_die("ncclCommWindowDeregister: this is no window of the communicator"); }
    window->comm = NULL;
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

ncclResult_t ncclGroupStart() {
    group.depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
    if (group.depth == 0) { emulator_die("ncclGroupEnd: no group was started"); }
    if (--group.depth > 0 || group.messages.empty()) { return ncclSuccess; }
    std::vector<Message> messages;
    messages.swap(group.messages);
    return queue(group.comm, group.stream, messages);
}

static ncclResult_t add_message(bool send, const void* at, size_t bytes, ncclDataType_t type, int peer, ncclComm_t comm,
                                cudaStream_t stream) {
    const bool same = group.messages.empty() || (group.comm == comm && group.stream == stream);
    if (type != ncclUint8 || peer < 0 || peer >= comm->ranks() || !same) {
        emulator_die("ncclSend or ncclRecv: type %d, rank %d, or a group of several communicators or streams", type, peer);
    }
    if (!begin(comm, "Send or ncclRecv")) { return ncclRemoteError; }
    ncclGroupStart();
    group.comm = comm;
    group.stream = stream;
    group.messages.push_back({send, peer, (char*)at, bytes, {"Send", 0, (long long)bytes, NOWHERE, NOWHERE, NOWHERE, 0}});
    return ncclGroupEnd();
}

ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return add_message(true, from, count, type, peer, comm, stream);
}

ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return add_message(false, to, count, type, peer, comm, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// collectives

/* Sends each rank a part of `from`, and receives a part from each. Parts are `step` apart; step 0 sends all ranks the same
 * part. Only `root` sends, unless it is NOWHERE. */
static ncclResult_t collective(const char* name, const void* from, size_t from_step, void* to, size_t to_step, size_t bytes,
                               ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    if (group.depth > 0 || type != ncclUint8) { emulator_die("nccl%s: type %d, or in a group", name, type); }
    if (!begin(comm, name)) { return ncclRemoteError; }
    const int rank = comm->rank;
    const auto part = [](const void* at, size_t step, int r) { return (char*)at + (size_t)r * step; };
    const auto bytes_from = [=](int r) { return root == NOWHERE || root == r ? bytes : 0; };
    const bool in_place = part(from, from_step, rank) == part(to, to_step, rank);
    Note note = {"", 0, (long long)bytes, root, place_of(comm, in_place ? to : from), place_of(comm, to), 0};
    strncpy(note.name, name, sizeof note.name - 1);
    std::vector<Message> messages;
    for (int r = 0; r < comm->ranks(); r++) {
        messages.push_back({true, r, part(from, from_step, r), bytes_from(rank), note});
        messages.push_back({false, r, part(to, to_step, r), bytes_from(r), note});
    }
    return queue(comm, stream, messages);
}

ncclResult_t ncclAllGather(const void* from, void* to, size_t bytes, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    return collective("AllGather", from, 0, to, bytes, bytes, type, NOWHERE, comm, stream);
}

ncclResult_t ncclAlltoAll(const void* from, void* to, size_t bytes, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
    return collective("AlltoAll", from, bytes, to, bytes, bytes, type, NOWHERE, comm, stream);
}

ncclResult_t ncclBroadcast(const void* from, void* to, size_t bytes, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
    if (from != to || root < 0 || root >= comm->ranks()) { emulator_die("ncclBroadcast: root %d, or not in place", root); }
    return collective("Broadcast", from, 0, to, 0, bytes, type, root, comm, stream);
}
