/* queue.h -- the clients of ./serve with their requests, and the process that answers their questions:
 * TRAINER --model CHECKPOINT --answer.
 *
 * The process starts with the first question. It gets one question after the other, and a new process takes its place where a
 * question is for another checkpoint, or where it has ended. A checkpoint that was written again is another one. The lines of
 * the process (run/jobs/answer.h) are passed on as they come. It writes no files, so it may be killed.
 */
#ifndef SERVE_QUEUE_H
#define SERVE_QUEUE_H

#include "dev/serve/runs.h"         // defines: Runs, run_enter
#include "llmc/base/lines.h"        // defines: Lines, lines_read, lines_next
#include "llmc/base/os.h"           // defines: os_changed, os_own
#include "llmc/base/text.h"         // defines: text_starts
#include "llmc/files/checkpoint.h"  // defines: checkpoint_list
#include "llmc/files/json.h"        // defines: json_write_text

#include <microhttpd.h>
#include <sys/socket.h>
#include <sys/wait.h>

enum {
    MOST_CLIENTS = 32,
    MOST_BODY = 256 << 10,  // bytes of a question
    MOST_QUESTIONS = 17,    // one is answered, the others wait
    LOAD_SECONDS = 600,     // for the first line of a process
    ANSWER_SECONDS = 120,   // for the lines after it, and for each later answer
};

/* Bytes that wait for their reader: text[at .. size). All zeros: nothing was written. */
typedef struct {
    char* text;
    size_t at, size;
} Buffer;

typedef struct Server Server;
typedef struct Client Client;

typedef struct {
    const char *url, *methods;
    enum MHD_Result (*respond)(Client* c);
    bool of_run;  // ?run= names it. Without a key nobody learns which runs there are
} Route;

/* A connection, which has one request. A client that waits for an answer is suspended: libmicrohttpd does not look at it. */
struct Client {
    Server* server;
    struct MHD_Connection* connection;  // NULL: a free place
    int fd;
    bool suspended, whole;  // whole: the request is
    double since;           // when the connection began, or when it was last woken
    const Route* route;     // NULL: there is none
    Buffer body;
    const char* run;      // that the request is about; "": the server's folder itself
    char checkpoint[40];  // that it asks; "": the newest
    Buffer out;
    bool done;  // nothing follows `out`
};

typedef struct {
    pid_t pid;           // 0: none
    struct stat folder;  // of its checkpoint, before the process read it
    bool loads;          // it has not written a line yet
    Lines lines;         // from it: answers, and messages. Questions go to it by the same socket
    char why[1024];      // it ended
} Process;

typedef struct {
    const char* trainer;
    Runs runs;
    Client clients[MOST_CLIENTS];
    Client* questions[MOST_QUESTIONS];  // in turn. NULL: the client of the running answer is gone
    int count;
    bool busy;     // the first one is asked, and the last line of its answer is still to come
    double since;  // of this answer, or of its first line if the process had to load
    Process process;
} Queue;

static inline size_t buffer_waits(const Buffer* b) { return b->size - b->at; }

static inline void buffer_add(Buffer* b, const char* text, size_t n) {
    if (b->at > 0) { memmove(b->text, b->text + b->at, b->size -= b->at); }
    b->at = 0;
    b->text = (char*)xrealloc(b->text, b->size + n + 1);
    memcpy(b->text + b->size, text, n);
    b->text[b->size += n] = 0;
}

static inline void buffer_error(Buffer* b, const char* why) {
    Buffer line = {0};
    FILE* f = xopen_memory(&line.text, &line.size);
    fputs("{\"error\": ", f);
    json_write_text(f, why);
    fputs("}\n", f);
    xclose_memory(f, &line.text);
    buffer_add(b, line.text, line.size);
    free(line.text);
}

static inline void wake(Client* c) {
    if (c->suspended) { MHD_resume_connection(c->connection); }
    c->suspended = false;
    c->since = now_seconds();
}

/* Ends a question with an error. */
static inline void question_fail(Client* c, const char* why) {
    buffer_error(&c->out, why);
    c->done = true;
    wake(c);
}

// ---------------------------------------------------------------------------------------------------------------------
// the process

static inline void queue_remove(Queue* q, int i) {
    q->count--;
    memmove(&q->questions[i], &q->questions[i + 1], (size_t)(q->count - i) * sizeof *q->questions);
}

/* Ends the process, and the question that it answers: with `late`, or with the last error that it wrote if that is NULL. */
static inline void queue_end(Queue* q, const char* late) {
    Process* p = &q->process;
    int status = 0;
    kill(p->pid, SIGKILL);
    waitpid(p->pid, &status, 0);
    if (!p->why[0]) {
        snprintf(p->why, sizeof p->why, "the process that answers ended: exit status %d", WEXITSTATUS(status));
        if (WIFSIGNALED(status)) { strcpy(strrchr(p->why, 'e'), strsignal(WTERMSIG(status))); }
    }
    if (q->busy && q->questions[0]) { question_fail(q->questions[0], late ? late : p->why); }
    if (q->busy) { queue_remove(q, 0); }
    close(p->lines.fd);
    free(p->lines.text);
    *p = (Process){0};
    q->busy = false;
}

/* Starts the process, or leaves nothing open. */
static inline bool queue_start(Queue* q, const char* checkpoint, Error* e) {
    int ends[2] = {-1, -1};
    const int room = 2 * MOST_BODY;  // for a question that waits until the process is loaded
    const bool opened = socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0;
    for (int i = 0; i < 2; i++) { os_own(ends[i], true); }
    const pid_t pid = opened ? fork() : -1;
    if (pid < 0) {
        fail(e, "%s: cannot be started: %s", q->trainer, strerror(errno));
        for (int i = 0; i < 2 && opened; i++) { close(ends[i]); }
        return false;
    }
    if (pid == 0) {
        for (int i = 0; i < 3; i++) { dup2(ends[1], i); }
        if (fchdir(q->runs.home) != 0) { die("the folder in which ./serve began: %s", strerror(errno)); }
        execl(q->trainer, q->trainer, "--model", checkpoint, "--answer", (char*)NULL);
        die("%s: cannot be started: %s", q->trainer, strerror(errno));
    }
    close(ends[1]);
    setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    q->process = (Process){.pid = pid, .loads = true, .lines.fd = ends[0]};
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// its questions

/* Gives a question to the process, or to a new one if it is for another checkpoint. */
static inline bool queue_ask(Queue* q, Client* c, Error* e) {
    Process* p = &q->process;
    char path[PATH_CAP], *name = c->checkpoint;
    uint64_t* steps = NULL;
    size_t count = 0;
    struct stat now, *was = &p->folder;
    if (!run_enter(&q->runs, c->run)) { return fail(e, "there is no such run any more"); }
    if (!*name && !checkpoint_list(".", &steps, &count, e)) { return false; }
    if (!*name && count == 0) { return fail(e, "the run has no checkpoint yet"); }
    if (!*name) { snprintf(name, sizeof c->checkpoint, "step_%08" PRIu64, steps[0]); }
    free(steps);
    if (!checkpoint_is_own(name, e)) { return false; }
    const int length = snprintf(path, PATH_CAP, "%s/%s%s%s", q->runs.path, c->run, *c->run ? "/" : "", name);
    if (length >= PATH_CAP) { return fail(e, "%s: its path is longer than %d bytes", name, PATH_CAP - 1); }
    if (stat(name, &now) != 0) { return fail(e, "%s: cannot be read: %s", name, strerror(errno)); }
    const struct timespec s = os_changed(&now), t = os_changed(was);
    const bool same = now.st_dev == was->st_dev && now.st_ino == was->st_ino && s.tv_sec == t.tv_sec && s.tv_nsec == t.tv_nsec;
    if (p->pid > 0 && !same) { queue_end(q, NULL); }
    if (p->pid == 0 && !queue_start(q, path, e)) { return false; }
    p->folder = now, q->busy = true, q->since = now_seconds();
    const ssize_t sent = send(p->lines.fd, c->body.text, c->body.size, MSG_DONTWAIT);
    // of a process that has ended, queue_read() takes the error first
    if (sent != (ssize_t)c->body.size && (sent >= 0 || errno == EAGAIN)) { queue_end(q, NULL); }
    return true;
}

/* Asks the questions that wait, as long as no answer is running, and ends an answer that takes too long. */
static inline void queue_go_on(Queue* q) {
    const int most = q->process.loads ? LOAD_SECONDS : ANSWER_SECONDS;
    if (q->busy && now_seconds() - q->since > most) {
        char late[64];
        snprintf(late, sizeof late, "%s took more than %d seconds", q->process.loads ? "loading" : "the answer", most);
        queue_end(q, late);
    }
    while (!q->busy && q->count > 0) {
        Client* c = q->questions[0];
        Error e = NO_ERROR;
        if (queue_ask(q, c, &e)) { continue; }
        queue_remove(q, 0);
        question_fail(c, e.msg);
    }
}

/* Takes back the question of a client that leaves. A running answer is stopped; its last line is still to come. */
static inline void queue_leave(Queue* q, const Client* c) {
    static const char stop[] = "{\"stop\": true}\n";
    int i = 0;
    while (i < q->count && q->questions[i] != c) { i++; }
    if (i == 0 && q->busy) {
        q->questions[0] = NULL;
        send(q->process.lines.fd, stop, sizeof stop - 1, MSG_DONTWAIT);
    } else if (i < q->count) {
        queue_remove(q, i);
    }
}

/* Passes on what the process has written: its answers to their client, its messages to our terminal. */
static inline void queue_read(Queue* q) {
    Process* p = &q->process;
    Lines* l = &p->lines;
    size_t n = 0;
    lines_read(l, false);
    for (const char* line; (line = lines_next(l, &n)); l->at += n) {
        if (*line != '{') {
            fwrite(line, 1, n, stderr);
            if (text_starts(line, "error: ")) { snprintf(p->why, sizeof p->why, "%.*s", (int)n - 8, line + 7); }
            continue;
        }
        if (p->loads) { q->since = now_seconds(); }
        p->loads = false;
        Client* c = q->busy ? q->questions[0] : NULL;
        const bool last = !text_starts(line, "{\"text\": ");
        if (last && q->busy) { queue_remove(q, 0); }
        if (last) { q->busy = false; }
        if (!c) { continue; }
        buffer_add(&c->out, line, n);
        c->done = last;
        wake(c);
    }
    if (l->ended) { queue_end(q, NULL); }
}

#endif
