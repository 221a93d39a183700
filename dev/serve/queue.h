/* queue.h -- the questions of the clients, and the process that answers them: TRAINER --model CHECKPOINT --answer.
 *
 * The process starts with the first question. It gets one question after the other, and a new process takes its place where a
 * question is for another checkpoint, or where it has ended. A checkpoint that was written again is another one. The lines of
 * the process (run/jobs/answer.h) are passed on as they come. It writes no files, so it may be killed.
 */
#ifndef SERVE_QUEUE_H
#define SERVE_QUEUE_H

#include "dev/serve/buffer.h"       // defines: Buffer, buffer_add, buffer_text, buffer_error, buffer_waits
#include "dev/serve/client.h"       // defines: Client, wake
#include "llmc/base/lines.h"        // defines: Lines, lines_read, lines_next
#include "llmc/base/os.h"           // defines: os_changed, os_own
#include "llmc/base/text.h"         // defines: text_starts
#include "llmc/files/checkpoint.h"  // defines: checkpoint_list, checkpoint_path

#include <sys/socket.h>
#include <sys/wait.h>

enum {
    MOST_QUESTIONS = 17,   // one is answered, the others wait
    LOAD_SECONDS = 600,    // for the first line of a process
    ANSWER_SECONDS = 120,  // for the lines after it, and for each later answer
};

static const uint64_t NEWEST = UINT64_MAX;  // for a step: the newest checkpoint's

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
    Client* waiting[MOST_QUESTIONS];
    int num_waiting;
    bool busy;       // the last line of an answer is still to come
    Client* asking;  // who gets it; NULL: its client is gone
    double since;    // of this answer, or of its first line if the process had to load
    Process process;
} Queue;

/* Ends a question with an error. */
static inline void question_fail(Client* c, const char* why) {
    if (c->status == 0) { c->status = MHD_HTTP_SERVICE_UNAVAILABLE; }
    buffer_error(&c->out, why);
    c->done = true;
    wake(c);
}

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

/* Finds the folder of the checkpoint that a client asks. A link there may lead out of the run. */
static inline bool queue_find(const Client* c, char dir[PATH_CAP], struct stat* folder, Error* e) {
    uint64_t *steps = NULL, step = c->step;
    size_t count = 0;
    if (step == NEWEST) {
        if (!checkpoint_list(c->run, &steps, &count, e)) { return false; }
        if (count == 0) { return fail(e, "the run has no checkpoint yet"); }
        step = steps[0];
        free(steps);
    }
    if (!checkpoint_path(dir, c->run, step, "", e)) { return false; }
    if (lstat(dir, folder) != 0) { return fail(e, "%s: cannot be read: %s", dir, strerror(errno)); }
    return S_ISDIR(folder->st_mode) || fail(e, "%s: is %s, wanted a folder", dir, file_kind(folder->st_mode));
}

static inline bool is_same_folder(const struct stat* a, const struct stat* b) {
    const struct timespec s = os_changed(a), t = os_changed(b);
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino && s.tv_sec == t.tv_sec && s.tv_nsec == t.tv_nsec;
}

/* Gives a question to the process, or to a new one if it is for another checkpoint. */
static inline bool queue_ask(Queue* q, Client* c, Error* e) {
    Process* p = &q->process;
    char dir[PATH_CAP];
    struct stat folder;
    if (!queue_find(c, dir, &folder, e)) { return false; }
    if (p->pid > 0 && !is_same_folder(&folder, &p->folder)) { queue_end(q, NULL); }
    if (p->pid == 0 && !queue_start(q, dir, e)) { return false; }
    p->folder = folder;
    buffer_add(&p->to_write, c->body.text, c->body.size);
    q->busy = true;
    q->asking = c;
    q->since = now_seconds();
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
    while (!q->busy && q->num_waiting > 0) {
        Error e = NO_ERROR;
        Client* c = q->waiting[0];
        memmove(q->waiting, q->waiting + 1, (size_t)--q->num_waiting * sizeof c);
        if (!queue_ask(q, c, &e)) { question_fail(c, e.msg); }
    }
}

/* Takes the question of a client, a line of JSON; false: too many wait. */
static inline bool queue_take(Queue* q, Client* c) {
    if (q->busy + q->num_waiting == MOST_QUESTIONS) { return false; }
    q->waiting[q->num_waiting++] = c;
    return true;
}

/* Takes back the question of a client that leaves. A running answer is stopped; its last line is still to come. */
static inline void queue_leave(Queue* q, const Client* c) {
    int kept = 0;
    for (int i = 0; i < q->num_waiting; i++) {
        if (q->waiting[i] != c) { q->waiting[kept++] = q->waiting[i]; }
    }
    q->num_waiting = kept;
    if (q->asking != c) { return; }
    q->asking = NULL;
    buffer_text(&q->process.to_write, "{\"stop\": true}\n");
}

/* Writes what the process takes now. If it has ended, its lines end, too. */
static inline void queue_write(Queue* q) {
    Buffer* b = &q->process.to_write;
    const ssize_t n = send(q->process.lines.fd, b->text + b->at, buffer_waits(b), MSG_DONTWAIT | MSG_NOSIGNAL);
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
