/* serve.c -- a page beside a run: shows its log while it grows, and asks its checkpoints for texts.
 *
 *   GET /              the page (page.html)
 *   GET /log           the events of OUT/log.jsonl as server-sent events. "event: reset": all come anew, as the log was cut
 *   GET /checkpoints   {"checkpoints": [{"name": "step_00000100", "step": 100}, ...]}, the oldest first
 *   GET /health        {"run": "OUT", ...}
 *   POST /generation   a question (llmc/text/question.h), perhaps with "checkpoint": "step_00000100". The response has the
 *                      lines of --answer (llmc/run/jobs/answer.h) as they come. An error before the first has its own status
 *
 * One thread does all: libmicrohttpd speaks HTTP, one child process (the trainer with --answer) gets one question after the
 * other, and four times a second the log is read. A client that waits is suspended: only its hanging up is noticed, and a
 * client that closes one direction hangs up, too.
 *
 * The server listens on 127.0.0.1, and elsewhere wants a key. Host and Origin must name it, so no page of another site reaches
 * it; its page runs no script but its own. It reads the run's folder and writes nothing. The run does not know of it.
 */
#include "llmc/base/utils.h"  // first, since it asks for the functions beyond C11

#include "dev/serve/run_log.h"      // defines: Log, log_open, log_look
#include "llmc/base/lines.h"        // defines: Lines, lines_read, lines_next
#include "llmc/base/text.h"         // defines: text_starts
#include "llmc/files/checkpoint.h"  // defines: checkpoint_list, checkpoint_paths, checkpoint_step_of
#include "llmc/files/json.h"        // defines: json_parse_line, json_get, json_string, json_write_text

#include "build/serve_page.h"  // defines: serve_page, SERVE_STYLE, SERVE_SCRIPT

#include <arpa/inet.h>
#include <microhttpd.h>
#include <signal.h>
#include <sys/wait.h>

enum {
    MOST_CLIENTS = 32,
    MOST_OF_ADDRESS = 8,  // of them from one other machine
    MOST_WAITING = 16,    // questions
    MOST_BODY = 256 << 10,
    REQUEST_SECONDS = 10,  // for a request, and for the next part of a response
    ANSWER_SECONDS = 120,
    COMMENT_SECONDS = 5,
    TICK_MS = 250,
    LEAST_KEY = 16,  // bytes
};

/* Bytes that wait for their reader: text[at .. size). */
typedef struct {
    char* text;
    size_t at, size;
} Buffer;

/* A connection and its request. */
typedef struct {
    struct Server* server;
    struct MHD_Connection* connection;
    struct in_addr address;
    int fd;
    double since;  // when the request began; 0: it is whole
    bool follows;  // it reads /log
    bool asks, suspended, gone;
    Buffer body, out;
    bool done;        // nothing follows `out`
    unsigned status;  // of the answer; 0: not known before its first line
    bool newest;      // it asks the newest checkpoint, not the one of step `step`
    uint64_t step;
    uint64_t event;  // of the log: the next one; 0: it knows none
    double told;     // when the log last told it something
} Client;

/* The process that answers. */
typedef struct {
    pid_t pid;      // 0: none
    uint64_t step;  // of its checkpoint
    Lines out;
    int in;
    FILE* errors;
    Buffer to_write;
    bool busy;              // the last line of an answer is to come
    double since, stopped;  // of this answer; stopped 0: not yet
} Child;

typedef struct Server {
    const char *run, *trainer;
    char hosts[2][64];  // what the header Host may be
    char* key;          // NULL: none
    Client* clients[MOST_CLIENTS];
    Client* waiting[MOST_WAITING];
    int num_waiting;
    Client* asking;  // whose question the child answers; NULL: nobody's, or its client is gone
    Child child;
    Log log;
} Server;

static void buffer_add(Buffer* b, const char* text, size_t n) {
    if (b->at > 0) { memmove(b->text, b->text + b->at, b->size -= b->at); }
    b->at = 0;
    b->text = (char*)xrealloc(b->text, b->size + n + 1);
    memcpy(b->text + b->size, text, n);
    b->text[b->size += n] = 0;
}

static void buffer_free(Buffer* b) {
    free(b->text);
    memset(b, 0, sizeof *b);
}

static void buffer_error(Buffer* b, const char* why) {
    char* text = NULL;
    size_t size = 0;
    FILE* f = xopen_memory(&text, &size);
    fputs("{\"error\": ", f);
    json_write_text(f, why);
    fputs("}\n", f);
    xclose_memory(f, &text);
    buffer_add(b, text, size);
    free(text);
}

static void wake(Client* c) {
    if (c->suspended) { MHD_resume_connection(c->connection); }
    c->suspended = false;
}

static void suspend(Client* c) {
    MHD_suspend_connection(c->connection);
    c->suspended = true;
}

// ---------------------------------------------------------------------------------------------------------------------
// the child

static void question_fail(Client* c, unsigned status, const char* why) {
    if (c->status == 0) { c->status = status; }
    buffer_error(&c->out, why);
    c->done = true;
    wake(c);
}

/* Ends the child, and its question with the last error that it wrote. It writes no files, so nothing is lost. */
static void child_end(Server* s) {
    Child* k = &s->child;
    char line[1024], why[1024];
    int status = 0;
    kill(k->pid, SIGKILL);
    waitpid(k->pid, &status, 0);
    snprintf(why, sizeof why, "the process that answers ended: %s", WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : "exit");
    rewind(k->errors);
    while (fgets(line, sizeof line, k->errors)) {
        fputs(line, stderr);
        if (text_starts(line, "error: ")) { snprintf(why, sizeof why, "%.*s", (int)strcspn(line, "\n") - 7, line + 7); }
    }
    if (s->asking) { question_fail(s->asking, MHD_HTTP_SERVICE_UNAVAILABLE, why); }
    s->asking = NULL;
    close(k->in);
    close(k->out.fd);
    fclose(k->errors);
    free(k->out.text);
    buffer_free(&k->to_write);
    memset(k, 0, sizeof *k);
}

static void child_start(Server* s, const char* checkpoint) {
    Child* k = &s->child;
    int in[2], out[2];
    k->errors = tmpfile();
    if (!k->errors || pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0 || (k->pid = fork()) < 0) {
        die("%s: cannot be started: %s", s->trainer, strerror(errno));
    }
    if (k->pid == 0) {
        dup2(in[0], STDIN_FILENO), dup2(out[1], STDOUT_FILENO), dup2(fileno(k->errors), STDERR_FILENO);
        signal(SIGPIPE, SIG_DFL);
        execl(s->trainer, s->trainer, "--model", checkpoint, "--answer", (char*)NULL);
        die("%s: cannot be started: %s", s->trainer, strerror(errno));
    }
    close(in[0]), close(out[1]);
    fcntl(in[1], F_SETFL, O_NONBLOCK);
    k->in = in[1], k->out.fd = out[0];
}

/* Writes what the child takes now. If it has ended, its output says so. */
static void child_write(Child* k) {
    const ssize_t n = write(k->in, k->to_write.text + k->to_write.at, k->to_write.size - k->to_write.at);
    k->to_write.at += n > 0 ? (size_t)n : 0;
}

/* Stops the answer. Its last line still has to come. */
static void child_stop(Child* k) {
    static const char stop[] = "{\"stop\": true}\n";
    if (!k->busy || k->stopped > 0) { return; }
    buffer_add(&k->to_write, stop, strlen(stop));
    k->stopped = now_seconds();
}

/* Asks the child; a new one if the question is for another checkpoint. */
static void child_ask(Server* s, Client* c) {
    Child* k = &s->child;
    uint64_t* steps = NULL;
    size_t count = 0;
    char dir[PATH_CAP], unused[PATH_CAP];
    Error e = NO_ERROR;
    const bool listed = checkpoint_list(s->run, &steps, &count, &e) && (count > 0 || fail(&e, "the run has no checkpoint yet"));
    const uint64_t step = !c->newest ? c->step : listed ? steps[0] : 0;
    free(steps);
    if (!listed || !checkpoint_paths(s->run, step, dir, unused, &e)) {
        question_fail(c, MHD_HTTP_SERVICE_UNAVAILABLE, e.msg);
        return;
    }
    if (k->pid > 0 && k->step != step) { child_end(s); }
    if (k->pid == 0) { child_start(s, dir); }
    k->step = step, k->busy = true, k->since = now_seconds(), k->stopped = 0;
    buffer_add(&k->to_write, c->body.text, c->body.size);
    s->asking = c;
}

/* Asks the questions that wait, while the child is free. */
static void child_next(Server* s) {
    while (!s->child.busy && s->num_waiting > 0) {
        Client* c = s->waiting[0];
        memmove(s->waiting, s->waiting + 1, (size_t)--s->num_waiting * sizeof c);
        child_ask(s, c);
    }
}

/* Passes on what the child has written. */
static void child_read(Server* s) {
    Child* k = &s->child;
    size_t n = 0;
    lines_read(&k->out, false);
    for (const char* line; (line = lines_next(&k->out, &n)); k->out.at += n) {
        Client* c = s->asking;
        const bool last = !text_starts(line, "{\"text\": ");
        if (last) { k->busy = false, s->asking = NULL; }
        if (!c) { continue; }
        if (c->status == 0) { c->status = text_starts(line, "{\"error\": ") ? MHD_HTTP_BAD_REQUEST : MHD_HTTP_OK; }
        buffer_add(&c->out, line, n);
        c->done = last;
        wake(c);
    }
    if (k->out.ended) { child_end(s); }
    child_next(s);
}

// ---------------------------------------------------------------------------------------------------------------------
// requests

static enum MHD_Result respond(const Client* c, unsigned status, const char* type, struct MHD_Response* r) {
    static const char* const headers[][2] = {
        {"Content-Security-Policy",
         "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
         "frame-ancestors 'none'; style-src " SERVE_STYLE "; script-src " SERVE_SCRIPT},
        {"X-Content-Type-Options", "nosniff"},
        {"Referrer-Policy", "no-referrer"},
        {"Cache-Control", "no-store"},
    };
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++) { MHD_add_response_header(r, headers[i][0], headers[i][1]); }
    MHD_add_response_header(r, "Content-Type", type);
    if (status == MHD_HTTP_TOO_MANY_REQUESTS) { MHD_add_response_header(r, "Retry-After", "10"); }
    const enum MHD_Result result = MHD_queue_response(c->connection, status, r);
    MHD_destroy_response(r);
    return result;
}

static enum MHD_Result refuse(const Client* c, unsigned status, const char* why) {
    Buffer b = {NULL, 0, 0};
    buffer_error(&b, why);
    return respond(c, status, "application/json", MHD_create_response_from_buffer(b.size, b.text, MHD_RESPMEM_MUST_FREE));
}

/* Writes the next events for a client. */
static void log_tell(const Log* l, Client* c) {
    static const char reset[] = "event: reset\ndata: {}\n\n";
    char head[64];
    if (c->event < l->first && c->event > 0) {
        buffer_add(&c->out, reset, strlen(reset));
        c->event = l->first;
    }
    for (size_t i = 0; i < l->count && c->out.size < 1 << 16; i++) {
        const Event* v = &l->events[i];
        if (v->id < c->event) { continue; }
        buffer_add(&c->out, head, (size_t)snprintf(head, sizeof head, "id: %" PRIu64 "\ndata: ", v->id));
        buffer_add(&c->out, v->text, strlen(v->text));
        buffer_add(&c->out, "\n\n", 2);
        c->event = v->id + 1;
    }
    c->told = now_seconds();
}

/* Gives the next bytes of a response. A client for which there are none yet is suspended. */
static ssize_t give(void* client, uint64_t at, char* out, size_t most) {
    Client* c = (Client*)client;
    (void)at;
    if (c->gone) { return MHD_CONTENT_READER_END_WITH_ERROR; }
    if (c->out.at == c->out.size) { c->out.at = c->out.size = 0; }
    if (c->follows && c->out.size == 0) { log_tell(&c->server->log, c); }
    const size_t n = size_min(most, c->out.size - c->out.at);
    if (n == 0 && c->done) { return MHD_CONTENT_READER_END_OF_STREAM; }
    if (n == 0) { suspend(c); }
    if (n > 0) { memcpy(out, c->out.text + c->out.at, n); }
    c->out.at += n;
    return (ssize_t)n;
}

static enum MHD_Result respond_stream(Client* c, unsigned status, const char* type) {
    return respond(c, status, type, MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 1 << 14, give, c, NULL));
}

static enum MHD_Result respond_checkpoints(const Client* c) {
    uint64_t* steps = NULL;
    size_t count = 0, size = 0;
    char* text = NULL;
    Error e = NO_ERROR;
    if (!checkpoint_list(c->server->run, &steps, &count, &e)) { return refuse(c, MHD_HTTP_INTERNAL_SERVER_ERROR, e.msg); }
    FILE* f = xopen_memory(&text, &size);
    fputs("{\"checkpoints\": [", f);
    while (count-- > 0) {
        const char* comma = count > 0 ? ", " : "";
        fprintf(f, "{\"name\": \"step_%08" PRIu64 "\", \"step\": %" PRIu64 "}%s", steps[count], steps[count], comma);
    }
    fputs("]}\n", f);
    xclose_memory(f, &text);
    free(steps);
    return respond(c, MHD_HTTP_OK, "application/json", MHD_create_response_from_buffer(size, text, MHD_RESPMEM_MUST_FREE));
}

static enum MHD_Result respond_health(const Server* s, const Client* c) {
    char* text = NULL;
    size_t size = 0;
    FILE* f = xopen_memory(&text, &size);
    fputs("{\"run\": ", f);
    json_write_text(f, s->run);
    fprintf(f, ", \"answers\": %s, \"waiting\": %d}\n", s->child.busy ? "true" : "false", s->num_waiting);
    xclose_memory(f, &text);
    return respond(c, MHD_HTTP_OK, "application/json", MHD_create_response_from_buffer(size, text, MHD_RESPMEM_MUST_FREE));
}

/* Begins the response to a question once its status is known. */
static enum MHD_Result answer(Client* c) {
    if (c->gone) { return MHD_NO; }
    if (c->status > 0) { return respond_stream(c, c->status, "application/x-ndjson"); }
    suspend(c);
    return MHD_YES;
}

/* Takes a question as one line, and suspends its client until the first line of the answer comes. */
static enum MHD_Result take_question(Server* s, Client* c) {
    Json j;
    char path[PATH_CAP];
    Error e = NO_ERROR;
    buffer_add(&c->body, "\n", 1);
    if (!json_parse_line(&j, c->body.text, c->body.size - 1, "question", &e)) { return refuse(c, MHD_HTTP_BAD_REQUEST, e.msg); }
    const JsonNode* root = json_root(&j);
    const char* name = json_string(&j, json_get(&j, root, "checkpoint"), NULL);
    c->newest = json_get(&j, root, "checkpoint") == NULL;
    const bool there =
        c->newest || (name && checkpoint_step_of(name, &c->step) && path_join(path, s->run, name, &e) && is_directory(path));
    const bool stop = json_get(&j, root, "stop") != NULL;
    json_free(&j);
    if (stop) { return refuse(c, MHD_HTTP_BAD_REQUEST, "question: wanted no member stop: leaving stops an answer"); }
    if (!there) { return refuse(c, MHD_HTTP_NOT_FOUND, "question: checkpoint is not one of the run's"); }
    if (s->num_waiting == MOST_WAITING) { return refuse(c, MHD_HTTP_TOO_MANY_REQUESTS, "too many questions wait"); }
    for (char* p = c->body.text; p + 1 < c->body.text + c->body.size; p++) { *p = strchr("\r\n", *p) ? ' ' : *p; }
    c->asks = true;
    s->waiting[s->num_waiting++] = c;
    child_next(s);
    return answer(c);
}

/* Compares in a time that depends on the length of `given` alone. */
static bool key_fits(const char* key, const char* given) {
    const size_t n = strlen(key), m = strlen(given);
    unsigned differs = n != m;
    for (size_t i = 0; i < n; i++) { differs |= (unsigned)(key[i] ^ (i < m ? given[i] : 0)); }
    return differs == 0;
}

static const char* header(const Client* c, const char* name) {
    const char* value = MHD_lookup_connection_value(c->connection, MHD_HEADER_KIND, name);
    return value ? value : "";
}

/* Returns the status with which a request is refused before its body is read, and why; 0: it is not. */
static unsigned judge(const Server* s, const Client* c, const char* url, const char* method, const char** why) {
    static const char* const urls[] = {"/", "/log", "/checkpoints", "/health", "/generation"};
    const char *host = header(c, "Host"), *origin = header(c, "Origin"), *key = header(c, "Authorization");
    const bool own = strcasecmp(host, s->hosts[0]) == 0 || strcasecmp(host, s->hosts[1]) == 0;
    const bool post = strcmp(url, "/generation") == 0;
    size_t known = 0;
    while (known < 5 && strcmp(url, urls[known]) != 0) { known++; }
    *why = "Host or Origin is not this server";
    if (!own || (*origin && (!text_starts(origin, "http://") || strcasecmp(origin + 7, host) != 0))) {
        return MHD_HTTP_FORBIDDEN;
    }
    *why = "the key is missing or wrong";
    if (s->key && known > 0 && !(text_starts(key, "Bearer ") && key_fits(s->key, key + 7))) { return MHD_HTTP_UNAUTHORIZED; }
    *why = "there is no such page";
    if (known == 5) { return MHD_HTTP_NOT_FOUND; }
    *why = post ? "wanted POST" : "wanted GET";
    if (strcmp(method, post ? "POST" : "GET") != 0) { return MHD_HTTP_METHOD_NOT_ALLOWED; }
    *why = "wanted Content-Type: application/json";
    if (post && strcasecmp(header(c, "Content-Type"), "application/json") != 0) { return MHD_HTTP_UNSUPPORTED_MEDIA_TYPE; }
    *why = "the question has more than 256 KiB";
    return strtoull(header(c, "Content-Length"), NULL, 10) > MOST_BODY ? MHD_HTTP_CONTENT_TOO_LARGE : 0;
}

/* Responds to a whole request. */
static enum MHD_Result route(Server* s, Client* c, const char* url) {
    if (strcmp(url, "/generation") == 0) { return take_question(s, c); }
    if (strcmp(url, "/checkpoints") == 0) { return respond_checkpoints(c); }
    if (strcmp(url, "/log") == 0) {
        const uint64_t last = strtoull(header(c, "Last-Event-ID"), NULL, 10);
        c->event = last >= s->log.next ? 1 : last + (last > 0);  // of a log that nobody knows: it begins anew
        c->follows = true;
        return respond_stream(c, MHD_HTTP_OK, "text/event-stream");
    }
    if (strcmp(url, "/health") == 0) { return respond_health(s, c); }
    return respond(c, MHD_HTTP_OK, "text/html; charset=utf-8",
                   MHD_create_response_from_buffer(sizeof serve_page, (void*)serve_page, MHD_RESPMEM_PERSISTENT));
}

/* libmicrohttpd calls this when the head of a request has come, for each part of its body, at its end, and when a client that
 * was suspended before its response goes on. */
static enum MHD_Result handle(void* server, struct MHD_Connection* connection, const char* url, const char* method,
                              const char* version, const char* part, size_t* size, void** request) {
    Server* s = (Server*)server;
    Client* c = (Client*)MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT)->socket_context;
    const char* why = NULL;
    (void)version;
    if (!c) { return MHD_NO; }
    if (!*request) {
        *request = c;
        const unsigned status = judge(s, c, url, method, &why);
        return status ? refuse(c, status, why) : MHD_YES;
    }
    if (*size > 0) {
        if (c->body.size <= MOST_BODY) { buffer_add(&c->body, part, size_min(*size, MOST_BODY + 1 - c->body.size)); }
        *size = 0;
        return MHD_YES;
    }
    c->since = 0;
    if (c->body.size > MOST_BODY) { return refuse(c, MHD_HTTP_CONTENT_TOO_LARGE, "the question has more than 256 KiB"); }
    return c->asks ? answer(c) : route(s, c, url);
}

/* Takes back the question of a client that is gone, or has its answer. */
static void leave(Server* s, Client* c) {
    int kept = 0;
    for (int i = 0; i < s->num_waiting; i++) {
        if (s->waiting[i] != c) { s->waiting[kept++] = s->waiting[i]; }
    }
    s->num_waiting = kept;
    if (s->asking != c) { return; }
    s->asking = NULL;
    child_stop(&s->child);
}

/* The end of a request: the connection may bring another one. */
static void on_completed(void* server, struct MHD_Connection* connection, void** request, enum MHD_RequestTerminationCode why) {
    Client* c = (Client*)*request;
    (void)connection, (void)why;
    if (!c) { return; }
    leave((Server*)server, c);
    buffer_free(&c->body);
    buffer_free(&c->out);
    c->follows = c->asks = c->done = false;
    c->status = 0;
    c->since = now_seconds();
}

static void on_connection(void* server, struct MHD_Connection* connection, void** context,
                          enum MHD_ConnectionNotificationCode code) {
    Server* s = (Server*)server;
    int i = 0;
    while (i < MOST_CLIENTS && s->clients[i] != *context) { i++; }  // *context of a new connection is NULL, as a free place is
    if (i == MOST_CLIENTS) { return; }
    if (code == MHD_CONNECTION_NOTIFY_CLOSED) {
        free(s->clients[i]);
        s->clients[i] = NULL;
        return;
    }
    Client* c = (Client*)xcalloc(1, sizeof *c);
    c->server = s;
    c->connection = connection;
    c->address =
        ((const struct sockaddr_in*)MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CLIENT_ADDRESS)->client_addr)
            ->sin_addr;
    c->fd = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
    c->since = now_seconds();
    *context = s->clients[i] = c;
}

static bool is_this_machine(struct in_addr a) { return ntohl(a.s_addr) >> 24 == 127; }

/* Admits a connection unless its address has too many; those of this machine share no limit. */
static enum MHD_Result on_arrival(void* server, const struct sockaddr* address, socklen_t length) {
    const Server* s = (const Server*)server;
    const struct in_addr from = ((const struct sockaddr_in*)address)->sin_addr;
    int count = 0;
    (void)length;
    for (int i = 0; i < MOST_CLIENTS; i++) { count += s->clients[i] && s->clients[i]->address.s_addr == from.s_addr; }
    return count < MOST_OF_ADDRESS || is_this_machine(from) ? MHD_YES : MHD_NO;
}

// ---------------------------------------------------------------------------------------------------------------------
// the loop

/* What depends on the time. */
static void tick(Server* s) {
    const double now = now_seconds();
    Child* k = &s->child;
    log_look(&s->log);
    for (int i = 0; i < MOST_CLIENTS; i++) {
        Client* c = s->clients[i];
        if (!c) { continue; }
        if (c->since > 0 && now - c->since > REQUEST_SECONDS) { shutdown(c->fd, SHUT_RDWR); }
        if (!c->follows) { continue; }
        if (c->suspended && now - c->told > COMMENT_SECONDS) {
            buffer_add(&c->out, ":\n\n", 3);
            c->told = now;
        }
        if ((c->event < s->log.next && s->log.count > 0) || c->out.size > c->out.at) { wake(c); }
    }
    if (k->busy && now - k->since > ANSWER_SECONDS) { child_stop(k); }
    if (k->busy && now - k->since > ANSWER_SECONDS + REQUEST_SECONDS) {
        child_end(s);
        child_next(s);
    }
}

/* Waits for requests, for the child and for the next tick, and serves them. */
static void serve(Server* s, struct MHD_Daemon* daemon, double* next_tick) {
    const Child* k = &s->child;
    const bool writes = k->to_write.at < k->to_write.size;
    struct pollfd fds[3 + MOST_CLIENTS] = {
        {MHD_get_daemon_info(daemon, MHD_DAEMON_INFO_EPOLL_FD)->epoll_fd, POLLIN, 0},
        {k->pid > 0 ? k->out.fd : -1, POLLIN, 0},
        {writes ? k->in : -1, POLLOUT, 0},
    };
    MHD_UNSIGNED_LONG_LONG wait = TICK_MS;
    if (MHD_get_timeout(daemon, &wait) != MHD_YES || wait > TICK_MS) { wait = TICK_MS; }
    for (int i = 0; i < MOST_CLIENTS; i++) {
        const Client* c = s->clients[i];
        fds[3 + i] = (struct pollfd){c && (c->suspended || c->since > 0) ? c->fd : -1, POLLRDHUP, 0};
    }
    poll(fds, 3 + MOST_CLIENTS, (int)wait);
    for (int i = 0; i < MOST_CLIENTS; i++) {
        Client* c = s->clients[i];
        if (fds[3 + i].revents == 0 || !c) { continue; }
        // libmicrohttpd may overlook the end of a request that is cut off, but not this
        if (!c->suspended) { shutdown(c->fd, SHUT_RDWR); }
        c->gone = true;
        leave(s, c);
        wake(c);
    }
    if (fds[2].revents) { child_write(&s->child); }
    if (fds[1].revents) { child_read(s); }
    if (now_seconds() >= *next_tick) {
        tick(s);
        *next_tick = now_seconds() + TICK_MS / 1e3;
    }
    MHD_run(daemon);
}

/* Reads the key: a line of a file. */
static char* read_key(const char* path) {
    size_t size = 0;
    Error e = NO_ERROR;
    char* key = read_file(path, &size, 4096, &e);
    must(key != NULL, &e);
    key[strcspn(key, "\r\n")] = 0;
    if (strlen(key) < LEAST_KEY) { die("%s: the key has %zu bytes, wanted at least %d", path, strlen(key), LEAST_KEY); }
    return key;
}

int main(int argc, char** argv) {
    static const char usage[] = "usage: ./serve OUT [--port 8080] [--host ADDRESS --key-file FILE] [--trainer ./train_llama3]";
    Server s;
    Error e = NO_ERROR;
    const char *host = "127.0.0.1", *port = "8080", *key_file = NULL;
    double next_tick = 0;
    memset(&s, 0, sizeof s);
    s.trainer = "./train_llama3";
    for (int i = 1; i < argc; i++) {
        const char** const values[] = {&port, &host, &key_file, &s.trainer};
        static const char* const flags[] = {"--port", "--host", "--key-file", "--trainer"};
        int f = 0;
        while (f < 4 && strcmp(argv[i], flags[f]) != 0) { f++; }
        if (f < 4 && i + 1 < argc) {
            *values[f] = argv[++i];
        } else if (f == 4 && argv[i][0] != '-' && !s.run) {
            s.run = argv[i];
        } else {
            die_usage("%s: is not expected\n  hint: %s", argv[i], usage);
        }
    }
    char* end = NULL;
    const long number = strtol(port, &end, 10);
    if (!s.run) { die_usage("no run is given\n  hint: %s", usage); }
    if (number < 0 || number > 65535 || *end || end == port) {
        die_usage("--port: is \"%s\", wanted a number from 0 to 65535", port);
    }
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)number)};
    if (inet_pton(AF_INET, host, &address.sin_addr) != 1 || address.sin_addr.s_addr == INADDR_ANY) {
        die_usage("--host: is \"%s\", wanted an IPv4 address of this machine, by which browsers reach it", host);
    }
    if (!is_this_machine(address.sin_addr) && !key_file) {
        die_usage("--host: %s is reached by other machines, wanted a --key-file, too", host);
    }
    if (!is_directory(s.run)) { die("%s: is no folder, wanted the --out of a run", s.run); }
    if (access(s.trainer, X_OK) != 0) { die("%s: cannot be run: %s\n  hint: make train_llama3", s.trainer, strerror(errno)); }
    s.key = key_file ? read_key(key_file) : NULL;
    must(log_open(&s.log, s.run, &e), &e);
    log_look(&s.log);
    signal(SIGPIPE, SIG_IGN);
    struct MHD_Daemon* daemon = MHD_start_daemon(
        MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME, 0, on_arrival, &s, handle, &s, MHD_OPTION_SOCK_ADDR, &address,
        MHD_OPTION_CONNECTION_LIMIT, (unsigned)MOST_CLIENTS, MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)REQUEST_SECONDS,
        MHD_OPTION_NOTIFY_COMPLETED, on_completed, &s, MHD_OPTION_NOTIFY_CONNECTION, on_connection, &s, MHD_OPTION_END);
    if (!daemon) { die("%s:%s: cannot listen there: %s", host, port, strerror(errno)); }
    const int bound = MHD_get_daemon_info(daemon, MHD_DAEMON_INFO_BIND_PORT)->port;
    snprintf(s.hosts[0], sizeof s.hosts[0], "%s:%d", host, bound);
    snprintf(s.hosts[1], sizeof s.hosts[1], "%s:%d", is_this_machine(address.sin_addr) ? "localhost" : host, bound);
    printf("serve   http://%s/ shows %s; Ctrl-C ends it\n", s.hosts[0], s.run);
    fflush(stdout);
    for (;;) { serve(&s, daemon, &next_tick); }
}
