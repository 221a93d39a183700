/* queue.h -- the questions of the clients, and the process that answers them: TRAINER --model CHECKPOINT --answer.
 *
 * The process starts with the first question. It gets one question after the other, and a new process takes its place where a
 * question is for another checkpoint, or where it has ended. A checkpoint that was written again is another one. The lines of
 * the process (run/jobs/answer.h) are passed on as they come. It writes no files, so it may be killed.
 */
#ifndef SERVE_QUEUE_H
#define SERVE_QUEUE_H

#include "dev/serve/client.h"       // defines: Client, Buffer, buffer_add, buffer_free, buffer_error, wake
#include "llmc/base/lines.h"        // defines: Lines, lines_read, lines_next
#include "llmc/base/text.h"         // defines: text_starts
#include "llmc/files/checkpoint.h"  // defines: checkpoint_list, checkpoint_paths

#include <signal.h>
#include <sys/wait.h>

enum {
    MOST_WAITING = 16,
    LOAD_SECONDS = 600,    // for the first line of a process
    ANSWER_SECONDS = 120,  // for the lines after it, and for each later answer
    STOP_SECONDS = 10,
};

typedef struct {
    const char *run, *trainer;
    Client* waiting[MOST_WAITING];
    int num_waiting;
    Client* asking;  // whose question is answered; NULL: nobody's, or its client is gone
    bool busy;       // the last line of the answer is still to come
    double since;    // of this answer, or of its first line if the process had to load
    bool stopped;
    // the process
    pid_t pid;           // 0: none
    bool loads;          // it has not written a line yet
    struct stat folder;  // of its checkpoint, before the process read it
    int in;
    Buffer to_write;
    Lines out;
    FILE* errors;
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
    char line[1024], why[1024];
    int status = 0;
    kill(q->pid, SIGKILL);
    waitpid(q->pid, &status, 0);
    snprintf(why, sizeof why, "the process that answers ended: exit status %d", WEXITSTATUS(status));
    if (WIFSIGNALED(status)) { snprintf(why, sizeof why, "the process that answers ended: %s", strsignal(WTERMSIG(status))); }
    rewind(q->errors);
    while (fgets(line, sizeof line, q->errors)) {
        fputs(line, stderr);
        if (text_starts(line, "error: ")) { snprintf(why, sizeof why, "%.*s", (int)strcspn(line, "\n") - 7, line + 7); }
    }
    if (q->asking) { question_fail(q->asking, late ? late : why); }
    close(q->in);
    close(q->out.fd);
    fclose(q->errors);
    free(q->out.text);
    buffer_free(&q->to_write);
    memset(&q->out, 0, sizeof q->out);
    q->asking = NULL;
    q->busy = false;
    q->pid = 0;
}

/* Starts the process, or leaves nothing open. */
static inline bool queue_start(Queue* q, const char* checkpoint, Error* e) {
    int in[2] = {-1, -1}, out[2] = {-1, -1};
    q->errors = tmpfile();
    if (!q->errors || pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0 || (q->pid = fork()) < 0) {
        fail(e, "%s: cannot be started: %s", q->trainer, strerror(errno));
        const int opened[] = {in[0], in[1], out[0], out[1]};
        for (int i = 0; i < 4 && opened[i] >= 0; i++) { close(opened[i]); }
        if (q->errors) { fclose(q->errors); }
        q->pid = 0;
        return false;
    }
    if (q->pid == 0) {
        const int files[] = {in[0], out[1], fileno(q->errors)};
        for (int i = 0; i < 3; i++) { dup2(files[i], i); }
        fcntl(files[2], F_SETFD, FD_CLOEXEC);  // as the pipes are
        signal(SIGPIPE, SIG_DFL);
        execl(q->trainer, q->trainer, "--model", checkpoint, "--answer", (char*)NULL);
        die("%s: cannot be started: %s", q->trainer, strerror(errno));
    }
    close(in[0]);
    close(out[1]);
    fcntl(in[1], F_SETFL, O_NONBLOCK);
    q->in = in[1];
    q->out.fd = out[0];
    q->loads = true;
    return true;
}

static inline bool is_same_folder(const struct stat* a, const struct stat* b) {
    return a->st_ino == b->st_ino && a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

/* Gives a question to the process, or to a new one if it is for another checkpoint. */
static inline void queue_ask(Queue* q, Client* c) {
    uint64_t* steps = NULL;
    size_t count = 0;
    char dir[PATH_CAP], unused[PATH_CAP];
    Error e = NO_ERROR;
    const bool listed = checkpoint_list(q->run, &steps, &count, &e) && (count > 0 || fail(&e, "the run has no checkpoint yet"));
    const uint64_t step = !c->newest ? c->step : listed ? steps[0] : 0;
    struct stat now;
    free(steps);
    const bool there = listed && checkpoint_paths(q->run, step, dir, unused, &e) &&
                       (stat(dir, &now) == 0 || fail(&e, "%s: cannot be read: %s", dir, strerror(errno)));
    if (there && q->pid > 0 && !is_same_folder(&now, &q->folder)) { queue_end(q, NULL); }
    if (!there || (q->pid == 0 && !queue_start(q, dir, &e))) {
        question_fail(c, e.msg);
        return;
    }
    buffer_add(&q->to_write, c->body.text, c->body.size);
    q->folder = now;
    q->asking = c;
    q->busy = true;
    q->stopped = false;
    q->since = now_seconds();
}

/* Asks the questions that wait, as long as no answer is running. */
static inline void queue_go_on(Queue* q) {
    while (!q->busy && q->num_waiting > 0) {
        Client* c = q->waiting[0];
        memmove(q->waiting, q->waiting + 1, (size_t)--q->num_waiting * sizeof c);
        queue_ask(q, c);
    }
}

/* Takes the question of a client, a line of JSON; false: too many wait. */
static inline bool queue_take(Queue* q, Client* c) {
    if (q->num_waiting == MOST_WAITING) { return false; }
    q->waiting[q->num_waiting++] = c;
    queue_go_on(q);
    return true;
}

/* Stops the running answer; its last line is still to come. */
static inline void queue_stop(Queue* q) {
    if (q->busy && !q->stopped) { buffer_text(&q->to_write, "{\"stop\": true}\n"); }
    q->stopped = true;
}

/* Takes back the question of a client that leaves. */
static inline void queue_leave(Queue* q, const Client* c) {
    int kept = 0;
    for (int i = 0; i < q->num_waiting; i++) {
        if (q->waiting[i] != c) { q->waiting[kept++] = q->waiting[i]; }
    }
    q->num_waiting = kept;
    if (q->asking != c) { return; }
    q->asking = NULL;
    queue_stop(q);
}

static inline bool queue_writes(const Queue* q) { return q->pid > 0 && q->to_write.at < q->to_write.size; }

/* Writes what the process takes now. If it has ended, its output says so. */
static inline void queue_write(Queue* q) {
    const ssize_t n = write(q->in, q->to_write.text + q->to_write.at, q->to_write.size - q->to_write.at);
    q->to_write.at += n > 0 ? (size_t)n : 0;
}

/* Passes on what the process has written. */
static inline void queue_read(Queue* q) {
    size_t n = 0;
    lines_read(&q->out, false);
    for (const char* line; (line = lines_next(&q->out, &n)); q->out.at += n) {
        Client* c = q->asking;
        if (q->loads) { q->since = now_seconds(); }
        q->loads = false;
        const bool last = !text_starts(line, "{\"text\": ");
        if (last) { q->busy = false, q->asking = NULL; }
        if (!c) { continue; }
        if (c->status == 0) { c->status = text_starts(line, "{\"error\": ") ? MHD_HTTP_BAD_REQUEST : MHD_HTTP_OK; }
        buffer_add(&c->out, line, n);
        c->done = last;
        wake(c);
    }
    if (q->out.ended) { queue_end(q, NULL); }
    queue_go_on(q);
}

/* Stops an answer that takes too long, and ends a process that does not stop. */
static inline void queue_tick(Queue* q) {
    const int most = q->loads ? LOAD_SECONDS : ANSWER_SECONDS;
    const double seconds = q->busy ? now_seconds() - q->since : 0;
    char late[64];
    if (seconds > most) { queue_stop(q); }
    if (seconds < most + STOP_SECONDS) { return; }
    snprintf(late, sizeof late, "%s took more than %d seconds", q->loads ? "loading" : "the answer", most);
    queue_end(q, late);
    queue_go_on(q);
}

#endif
