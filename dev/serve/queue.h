/* queue.h -- the clients of ./serve with their requests, and the process that answers their questions:
 * TRAINER --model CHECKPOINT --answer.
 *
 * The process starts with the first question. It gets one question after the other, and a new process takes its place where a
 * question is for another checkpoint, or where it has ended. A checkpoint that was written again is another one. The lines of
 * the process (run/jobs/answer.h) are passed on as they come. It writes no files, so it may be killed.
 */
#ifndef SERVE_QUEUE_H
#define SERVE_QUEUE_H

#include "dev/serve/buffer.h"       // defines: Buffer, buffer_add, buffer_text, buffer_error, buffer_waits
#include "dev/serve/run_log.h"      // defines: LogPlace
#include "llmc/base/lines.h"        // defines: Lines, lines_read, lines_next
#include "llmc/base/os.h"           // defines: os_changed, os_own
#include "llmc/base/text.h"         // defines: text_starts
#include "llmc/files/checkpoint.h"  // defines: checkpoint_list, checkpoint_path

#include <ftw.h>
#include <microhttpd.h>
#include <sys/socket.h>
#include <sys/wait.h>

enum {
    MOST_CLIENTS = 32,
    MOST_QUESTIONS = 17,   // one is answered, the others wait
    LOAD_SECONDS = 600,    // for the first line of a process
    ANSWER_SECONDS = 120,  // for the lines after it, and for each later answer
};

static const uint64_t NEWEST = UINT64_MAX;  // for a step: the newest checkpoint's

typedef struct Server Server;
typedef struct Client Client;
typedef enum MHD_Result Respond(Client* c);

/* A connection with its request. A client that waits for something is suspended: libmicrohttpd does not look at it. */
struct Client {
    Server* server;
    struct MHD_Connection* connection;  // NULL: a free place
    int fd;
    bool suspended;
    // the request; all zeros: none
    double since;      // when it began; 0: it is whole
    Respond* respond;  // once it is whole
    Buffer body;
    char run[PATH_CAP];  // the folder of the run that it is about
    bool named;          // ?run= named it, so it may be no link
    uint64_t step;       // of the checkpoint that it asks, or NEWEST
    uint64_t turn;       // of its question that waits: the least is next; 0: none waits
    unsigned status;     // of its response; 0: not known before the first line of the answer
    bool follows;        // the log, from `place` on
    LogPlace place;
    double began, sent;  // when it began to follow; when it was last sent events or a comment
    Buffer out;
    bool done;  // nothing follows `out`
};

typedef struct {
    pid_t pid;           // 0: none
    struct stat folder;  // of its checkpoint, before the process read it
    bool loads;          // it has not written a line yet
    Lines lines;         // from it
    Buffer to_write;     // to it, by the same socket
    FILE* errors;
} Process;

typedef struct {
    const char* trainer;
    Client clients[MOST_CLIENTS];
    uint64_t turns;  // so far
    bool busy;       // the last line of an answer is still to come
    Client* asking;  // who gets it; NULL: its client is gone
    double since;    // of this answer, or of its first line if the process had to load
    Process process;
} Queue;

static inline void wake(Client* c) {
    if (c->suspended) { MHD_resume_connection(c->connection); }
    c->suspended = false;
}

static inline void suspend(Client* c) {
    MHD_suspend_connection(c->connection);
    c->suspended = true;
}

/* Ends a question with an error. */
static inline void question_fail(Client* c, const char* why) {
    if (c->status == 0) { c->status = MHD_HTTP_SERVICE_UNAVAILABLE; }
    buffer_error(&c->out, why);
    c->done = true;
    wake(c);
}

// ---------------------------------------------------------------------------------------------------------------------
// the process

/* Ends the process, and the question that it answers: with `late`, or with the last error that it wrote if that is NULL. */
static inline void queue_end(Queue* q, const char* late) {
    Process* p = &q->process;
    char line[1024], why[1024];
    int status = 0;
    kill(p->pid, SIGKILL);
    waitpid(p->pid, &status, 0);
    snprintf(why, sizeof why, "the process that answers ended: exit status %d", WEXITSTATUS(status));
    if (WIFSIGNALED(status)) { snprintf(why, sizeof why, "the process that answers ended: %s", strsignal(WTERMSIG(status))); }
    rewind(p->errors);
    while (fgets(line, sizeof line, p->errors)) {
        fputs(line, stderr);
        if (text_starts(line, "error: ")) { snprintf(why, sizeof why, "%.*s", (int)strcspn(line, "\n") - 7, line + 7); }
    }
    if (q->asking) { question_fail(q->asking, late ? late : why); }
    fclose(p->errors);
    close(p->lines.fd);
    free(p->lines.text);
    free(p->to_write.text);
    *p = (Process){0};
    q->asking = NULL;
    q->busy = false;
}

/* Starts the process, or leaves nothing open. */
static inline bool queue_start(Queue* q, const char* checkpoint, Error* e) {
    int ends[2] = {-1, -1};
    FILE* errors = tmpfile();
    const bool opened = errors && socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0;
    for (int i = 0; i < 2; i++) { os_own(ends[i], true); }
    const pid_t pid = opened ? fork() : -1;
    if (pid < 0) {
        fail(e, "%s: cannot be started: %s", q->trainer, strerror(errno));
        for (int i = 0; i < 2 && opened; i++) { close(ends[i]); }
        if (errors) { fclose(errors); }
        return false;
    }
    if (pid == 0) {
        const int files[] = {ends[1], ends[1], fileno(errors)};
        for (int i = 0; i < 3; i++) { dup2(files[i], i); }
        fcntl(files[2], F_SETFD, FD_CLOEXEC);  // as the socket is
        execl(q->trainer, q->trainer, "--model", checkpoint, "--answer", (char*)NULL);
        die("%s: cannot be started: %s", q->trainer, strerror(errno));
    }
    close(ends[1]);
    q->process = (Process){.pid = pid, .loads = true, .lines.fd = ends[0], .errors = errors};
    return true;
}

/* Returns whether a link has taken the place of a client's run since it began. */
static inline bool run_left(const Client* c) {
    struct stat st;
    return c->named && (lstat(c->run, &st) != 0 || !S_ISDIR(st.st_mode));
}

/* For nftw(): returns whether it has come to something that may lead out of a folder, or is not of the folder's owner. */
static inline int is_foreign(const char* path, const struct stat* st, int type, struct FTW* at) {
    static uid_t owner;
    (void)path, (void)type, owner = at->level == 0 ? st->st_uid : owner;
    return (!S_ISREG(st->st_mode) && !S_ISDIR(st->st_mode)) || st->st_uid != owner;
}

/* Finds the folder of the checkpoint that a client asks, and checks that its trainer follows no link there. */
static inline bool checkpoint_of(const Client* c, char dir[PATH_CAP], Error* e) {
    uint64_t *steps = NULL, step = c->step;
    size_t count = 0;
    if (run_left(c)) { return fail(e, "%s: is no folder of a run any more", c->run); }
    if (step == NEWEST) {
        if (!checkpoint_list(c->run, &steps, &count, e)) { return false; }
        if (count == 0) { return fail(e, "the run has no checkpoint yet"); }
        step = steps[0];
        free(steps);
    }
    if (!checkpoint_path(dir, c->run, step, "", e)) { return false; }
    const int found = nftw(dir, is_foreign, 8, FTW_PHYS);
    return found == 0 || fail(e, "%s: %s", dir, found > 0 ? "is or holds a link, wanted its owner's files" : strerror(errno));
}

// ---------------------------------------------------------------------------------------------------------------------
// its questions

/* Counts the questions that wait; *first is the one that came first, or NULL. */
static inline int queue_count(Queue* q, Client** first) {
    int count = 0;
    *first = NULL;
    for (Client* c = q->clients; c < q->clients + MOST_CLIENTS; c++) {
        count += c->turn > 0;
        if (c->turn > 0 && (!*first || c->turn < (*first)->turn)) { *first = c; }
    }
    return count;
}

/* Gives a question to the process, or to a new one if it is for another checkpoint. */
static inline bool queue_ask(Queue* q, Client* c, Error* e) {
    Process* p = &q->process;
    char dir[PATH_CAP];
    struct stat now, *was = &p->folder;
    if (!checkpoint_of(c, dir, e)) { return false; }
    if (stat(dir, &now) != 0) { return fail(e, "%s: cannot be read: %s", dir, strerror(errno)); }
    const struct timespec s = os_changed(&now), t = os_changed(was);
    const bool same = now.st_dev == was->st_dev && now.st_ino == was->st_ino && s.tv_sec == t.tv_sec && s.tv_nsec == t.tv_nsec;
    if (p->pid > 0 && !same) { queue_end(q, NULL); }
    if (p->pid == 0 && !queue_start(q, dir, e)) { return false; }
    p->folder = now;
    buffer_add(&p->to_write, c->body.text, c->body.size);
    q->busy = true;
    q->asking = c;
    q->since = now_seconds();
    return true;
}

/* Asks the questions that wait, as long as no answer is running, and ends an answer that takes too long. */
static inline void queue_go_on(Queue* q) {
    const int most = q->process.loads ? LOAD_SECONDS : ANSWER_SECONDS;
    Client* c = NULL;
    if (q->busy && now_seconds() - q->since > most) {
        char late[64];
        snprintf(late, sizeof late, "%s took more than %d seconds", q->process.loads ? "loading" : "the answer", most);
        queue_end(q, late);
    }
    while (!q->busy && queue_count(q, &c) > 0) {
        Error e = NO_ERROR;
        c->turn = 0;
        if (!queue_ask(q, c, &e)) { question_fail(c, e.msg); }
    }
}

/* Takes back the question of a client that leaves. A running answer is stopped; its last line is still to come. */
static inline void queue_leave(Queue* q, Client* c) {
    c->turn = 0;
    if (q->asking != c) { return; }
    q->asking = NULL;
    buffer_text(&q->process.to_write, "{\"stop\": true}\n");
}

/* Writes what the process takes now. If it has ended, its lines end, too. */
static inline void queue_write(Queue* q) {
    Buffer* b = &q->process.to_write;
    const ssize_t n = send(q->process.lines.fd, b->text + b->at, buffer_waits(b), MSG_DONTWAIT);
    b->at += n > 0 ? (size_t)n : 0;
}

/* Passes on what the process has written. */
static inline void queue_read(Queue* q) {
    Lines* l = &q->process.lines;
    size_t n = 0;
    lines_read(l, false);
    for (const char* line; (line = lines_next(l, &n)); l->at += n) {
        Client* c = q->asking;
        const bool last = !text_starts(line, "{\"text\": ");
        if (q->process.loads) { q->since = now_seconds(); }
        q->process.loads = false;
        if (last) { q->busy = false, q->asking = NULL; }
        if (!c) { continue; }
        if (c->status == 0) { c->status = text_starts(line, "{\"error\": ") ? MHD_HTTP_BAD_REQUEST : MHD_HTTP_OK; }
        buffer_add(&c->out, line, n);
        c->done = last;
        wake(c);
    }
    if (l->ended) { queue_end(q, NULL); }
}

#endif
