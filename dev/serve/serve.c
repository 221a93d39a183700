/* serve.c -- a page beside runs: shows their logs while they grow, and asks their checkpoints for texts.
 *
 *   GET /              the page (page.html)
 *   GET /runs          {"folder": "OUT", "newest": false, "runs": [{"name": "", "state": "running", "loss": 3.9, ...}, ...]}
 *   GET /log           the events of a run's log as server-sent events. "event: reset": all come anew, as the log was cut;
 *                      "event: peak": see run_log.h. ?end=1: the response ends with the log; ?first=1&last=9: these steps alone
 *   GET /checkpoints   {"chat": true, "checkpoints": [{"name": "step_00000100", "step": 100}, ...]}, the oldest first
 *   GET /health        {"answers": false, "waiting": 0}, without a key, too
 *   POST /generation   a question (llmc/text/question.h), perhaps with "checkpoint": "step_00000100". The response has the
 *                      lines of --answer (llmc/run/jobs/answer.h) as they come. An error before the first has its own status
 *
 * In a folder of runs, ?run=NAME says which. The server listens on 127.0.0.1 or the --host given, and wants its key: a port is
 * open to all users of a machine. Host, Origin and Sec-Fetch-Site must name it, so no page of another site reaches it; its page
 * runs no script but its own. It reads the runs' folders by open_inside(), in one thread, and writes nothing. A client that
 * closes one direction hangs up.
 */
#include "llmc/base/utils.h"  // first, since it asks for the functions beyond C11

#include "dev/serve/address.h"  // defines: Address, address_read, address_name, key_draw, key_read, Request, request_judge
#include "dev/serve/buffer.h"   // defines: Buffer, buffer_add, buffer_error, buffer_text, buffer_waits
#include "dev/serve/queue.h"    // defines: Client, Queue, queue_count, queue_leave, queue_read, queue_write, suspend, wake
#include "dev/serve/run_log.h"  // defines: log_send, runs_write, run_find

#include "llmc/text/text_rules.h"  // defines: TextRules, text_rules_find_template, text_rules_free

#include "build/serve_page.h"  // defines: serve_page, SERVE_STYLE, SERVE_SCRIPT

#include <sys/resource.h>

enum {
    MOST_OF_ADDRESS = 8,  // clients from one other machine
    SPARE_CLIENTS = 8,    // places that those who follow a log do not take
    MOST_BODY = 256 << 10,
    LEAST_FILES = 64,      // a client needs one, and so do the process that answers, the log and what is always open
    REQUEST_SECONDS = 10,  // for a request, and for the next part of a response
    COMMENT_SECONDS = 5,
    TICK_MS = 250,
};

struct Server {
    Address address;
    const char* folder;  // a run's, or of runs
    bool newest;         // the page opens the newest run
    char* key;           // NULL: none
    bool shows_key;      // it was drawn
    Queue queue;
    double next_tick;
};

// ---------------------------------------------------------------------------------------------------------------------
// responses

static Respond respond_answer, respond_health, respond_page;

static enum MHD_Result respond(const Client* c, unsigned status, const char* type, struct MHD_Response* r) {
    const char* const headers[][2] = {
        {"Content-Type", type},
        {"Content-Security-Policy",
         "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
         "frame-ancestors 'none'; style-src " SERVE_STYLE "; script-src " SERVE_SCRIPT},
        {"X-Content-Type-Options", "nosniff"},
        {"Referrer-Policy", "no-referrer"},
        {"Cache-Control", "no-store"},
        {"Cross-Origin-Resource-Policy", "same-origin"},
        {status == MHD_HTTP_METHOD_NOT_ALLOWED ? "Allow" : NULL, c->respond == respond_answer ? "POST" : "GET, HEAD"},
        {status == MHD_HTTP_UNAUTHORIZED ? "WWW-Authenticate" : NULL, "Bearer"},
        {status == MHD_HTTP_TOO_MANY_REQUESTS ? "Retry-After" : NULL, "10"},
        {c->respond == respond_page || c->respond == respond_health ? "Connection" : NULL, "close"},  // they need no key
    };
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++) {
        if (headers[i][0]) { MHD_add_response_header(r, headers[i][0], headers[i][1]); }
    }
    const enum MHD_Result result = MHD_queue_response(c->connection, status, r);
    MHD_destroy_response(r);
    return result;
}

/* Responds with the JSON in c->out. */
static enum MHD_Result respond_json(const Client* c, unsigned status) {
    const Buffer* b = &c->out;
    return respond(c, status, "application/json", MHD_create_response_from_buffer(b->size, b->text, MHD_RESPMEM_MUST_COPY));
}

static enum MHD_Result refuse(Client* c, unsigned status, const char* why) {
    buffer_error(&c->out, why);
    return respond_json(c, status);
}

/* Gives the next bytes of a response. A client for which there are none yet is suspended. */
static ssize_t give(void* client, uint64_t at, char* out, size_t most) {
    Client* c = (Client*)client;
    (void)at;
    if (c->follows && !c->done && buffer_waits(&c->out) == 0) {
        if (!run_left(c)) { log_send(c->run, &c->place, &c->out); }
        c->done = c->place.ends && buffer_waits(&c->out) == 0;
        const bool quiet = buffer_waits(&c->out) == 0 && now_seconds() - c->sent > COMMENT_SECONDS;
        if (quiet && !c->done) { buffer_text(&c->out, ":\n\n"); }
        if (buffer_waits(&c->out) > 0) { c->sent = now_seconds(); }
    }
    const size_t n = size_min(most, buffer_waits(&c->out));
    if (n == 0 && c->done) { return MHD_CONTENT_READER_END_OF_STREAM; }
    if (n == 0) { suspend(c); }
    if (n > 0) { memcpy(out, c->out.text + c->out.at, n); }
    c->out.at += n;
    return (ssize_t)n;
}

static enum MHD_Result respond_stream(const Client* c, unsigned status, const char* type) {
    return respond(c, status, type, MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 1 << 14, give, (void*)c, NULL));
}

// ---------------------------------------------------------------------------------------------------------------------
// requests

static const char* value_of(const Client* c, enum MHD_ValueKind kind, const char* name) {
    const char* value = MHD_lookup_connection_value(c->connection, kind, name);
    return value ? value : "";
}

static const char* header(const Client* c, const char* name) { return value_of(c, MHD_HEADER_KIND, name); }
static const char* argument(const Client* c, const char* name) { return value_of(c, MHD_GET_ARGUMENT_KIND, name); }

static enum MHD_Result respond_page(Client* c) {
    return respond(c, MHD_HTTP_OK, "text/html; charset=utf-8",
                   MHD_create_response_from_buffer(sizeof serve_page, (void*)serve_page, MHD_RESPMEM_PERSISTENT));
}

static enum MHD_Result respond_log(Client* c) {
    const char *first = argument(c, "first"), *last = argument(c, "last");
    Error e = NO_ERROR;
    const int fd = folder_has(c->run, "log.jsonl") ? open_inside(c->run, "log.jsonl", &e) : -1;
    if (fd < 0 && e.msg[0]) { return refuse(c, MHD_HTTP_FORBIDDEN, e.msg); }
    if (fd >= 0) { close(fd); }
    c->place = (LogPlace){.ranges = *first || *last, .first = strtod(first, NULL), .last = strtod(last, NULL)};
    c->place.ends = c->place.ranges || *argument(c, "end");
    c->place.id = c->place.ranges ? 0 : strtoull(header(c, "Last-Event-ID"), NULL, 10);
    c->follows = true;
    c->began = c->sent = now_seconds();
    return respond_stream(c, MHD_HTTP_OK, "text/event-stream");
}

static enum MHD_Result respond_runs(Client* c) {
    FILE* f = xopen_memory(&c->out.text, &c->out.size);
    fputs("{\"folder\": ", f);
    json_write_text(f, c->server->folder);
    fprintf(f, ", \"newest\": %s, \"runs\": [", c->server->newest ? "true" : "false");
    runs_write(f, c->server->folder);
    fputs("]}\n", f);
    xclose_memory(f, &c->out.text);
    return respond_json(c, MHD_HTTP_OK);
}

/* Returns whether the newest checkpoint has a form of a chat. */
static bool has_chat(Client* c) {
    char dir[PATH_CAP], path[PATH_CAP], config[PATH_CAP];
    size_t size = 0;
    Error e = NO_ERROR;
    Tokenizer t = {.path = path};
    TextRules r = {.tokenizer = &t};
    c->step = NEWEST;
    if (!checkpoint_of(c, dir, &e) || !path_join(path, dir, "tokenizer.json", &e)) { return false; }
    t.config = path_join(config, dir, "tokenizer_config.json", &e) ? read_file(config, &size, 16 << 20, &e) : NULL;
    const bool found = text_rules_find_template(&r, &e) && r.chat_template;
    free(t.config);
    text_rules_free(&r);
    return found;
}

static enum MHD_Result respond_checkpoints(Client* c) {
    uint64_t* steps = NULL;
    size_t count = 0;
    Error e = NO_ERROR;
    if (!checkpoint_list(c->run, &steps, &count, &e)) { return refuse(c, MHD_HTTP_INTERNAL_SERVER_ERROR, e.msg); }
    FILE* f = xopen_memory(&c->out.text, &c->out.size);
    fprintf(f, "{\"chat\": %s, \"checkpoints\": [", has_chat(c) ? "true" : "false");
    while (count-- > 0) {
        fprintf(f, "{\"name\": \"step_%08" PRIu64 "\", \"step\": %" PRIu64 "}", steps[count], steps[count]);
        fputs(count > 0 ? ", " : "", f);
    }
    fputs("]}\n", f);
    xclose_memory(f, &c->out.text);
    free(steps);
    return respond_json(c, MHD_HTTP_OK);
}

static enum MHD_Result respond_health(Client* c) {
    Queue* q = &c->server->queue;
    Client* first = NULL;
    char text[80];
    snprintf(text, sizeof text, "{\"answers\": %s, \"waiting\": %d}\n", q->busy ? "true" : "false", queue_count(q, &first));
    buffer_text(&c->out, text);
    return respond_json(c, MHD_HTTP_OK);
}

/* Begins the response to a question once its status is known. */
static enum MHD_Result answer(Client* c) {
    if (c->status > 0) { return respond_stream(c, c->status, "application/x-ndjson"); }
    suspend(c);
    return MHD_YES;
}

/* Takes a question as one line, and suspends its client until the first line of the answer comes. */
static enum MHD_Result respond_answer(Client* c) {
    Queue* q = &c->server->queue;
    Client* first = NULL;
    Json j;
    char path[PATH_CAP];
    Error e = NO_ERROR;
    buffer_text(&c->body, "\n");
    if (!json_parse_line(&j, c->body.text, c->body.size - 1, "question", &e)) { return refuse(c, MHD_HTTP_BAD_REQUEST, e.msg); }
    const JsonNode *root = json_root(&j), *chosen = json_get(&j, root, "checkpoint");
    const char* name = NULL;
    c->step = NEWEST;
    const bool there = !chosen || (json_text(&j, root, "checkpoint", &name, &e) && checkpoint_step_of(name, &c->step) &&
                                   path_join(path, c->run, name, &e) && is_directory(path));
    const bool stop = json_get(&j, root, "stop") != NULL;
    json_free(&j);
    if (stop) { return refuse(c, MHD_HTTP_BAD_REQUEST, "question: wanted no member stop: leaving stops an answer"); }
    if (!there) { return refuse(c, MHD_HTTP_NOT_FOUND, "question: checkpoint is not one of the run's"); }
    if (queue_count(q, &first) + q->busy == MOST_QUESTIONS) {
        return refuse(c, MHD_HTTP_TOO_MANY_REQUESTS, "too many questions wait");
    }
    for (char* p = c->body.text; p + 1 < c->body.text + c->body.size; p++) { *p = strchr("\r\n", *p) ? ' ' : *p; }
    c->turn = ++q->turns;
    return answer(c);
}

static const struct {
    const char *url, *methods;
    Respond* respond;
    bool of_run;  // ?run= names it. Without a key nobody learns which runs there are
} routes[] = {
    {"/", "GET, HEAD", respond_page, false},         {"/runs", "GET, HEAD", respond_runs, false},
    {"/log", "GET, HEAD", respond_log, true},        {"/checkpoints", "GET, HEAD", respond_checkpoints, true},
    {"/health", "GET, HEAD", respond_health, false}, {"/generation", "POST", respond_answer, true},
};
enum { NUM_ROUTES = sizeof routes / sizeof *routes };

/* Returns the status with which a request is refused before its body is read, and why; 0: it is not. */
static unsigned judge(const Server* s, Client* c, const char* url, const char* method, const char** why) {
    Request r = {.method = method, .url = url, .host = header(c, "Host"), .origin = header(c, "Origin")};
    r.site = header(c, "Sec-Fetch-Site"), r.authorization = header(c, "Authorization"), r.type = header(c, "Content-Type");
    int i = 0;
    while (i < NUM_ROUTES && strcmp(url, routes[i].url) != 0) { i++; }
    c->respond = i < NUM_ROUTES ? routes[i].respond : NULL, c->named = *argument(c, "run");
    const unsigned status = request_judge(&s->address, s->key, &r, i < NUM_ROUTES ? routes[i].methods : NULL, why);
    if (status || !routes[i].of_run || run_find(c->run, s->folder, argument(c, "run"))) { return status; }
    *why = "there is no such run";
    return MHD_HTTP_NOT_FOUND;
}

/* libmicrohttpd calls this when the head of a request has come, for each part of its body, and at its end. It calls this again
 * for a client that was suspended before its response, once the client is woken. */
static enum MHD_Result handle(void* server, struct MHD_Connection* connection, const char* url, const char* method,
                              const char* version, const char* part, size_t* size, void** request) {
    Client* c = (Client*)MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT)->socket_context;
    const char* why = NULL;
    (void)version;
    if (!*request) {
        const unsigned status = judge((Server*)server, *request = c, url, method, &why);
        return status ? refuse(c, status, why) : MHD_YES;
    }
    if (*size > 0) {
        if (c->body.size <= MOST_BODY) { buffer_add(&c->body, part, size_min(*size, MOST_BODY + 1 - c->body.size)); }
        *size = 0;
        return MHD_YES;
    }
    if (c->since == 0) { return answer(c); }  // the client was woken
    c->since = 0;
    if (c->body.size > MOST_BODY) { return refuse(c, MHD_HTTP_CONTENT_TOO_LARGE, "the question has more than 256 KiB"); }
    return c->respond(c);
}

/* Ends the request of a place, if it has one. The place waits for another one or, without a connection, is free. */
static void client_renew(Client* c, Server* s, struct MHD_Connection* connection, int fd) {
    queue_leave(&s->queue, c);
    free(c->body.text);
    free(c->out.text);
    free(c->place.kept);
    *c = (Client){.server = s, .connection = connection, .fd = fd, .since = connection ? now_seconds() : 0};
}

static void on_completed(void* server, struct MHD_Connection* connection, void** request, enum MHD_RequestTerminationCode why) {
    Client* c = (Client*)*request;
    (void)why;
    if (c) { client_renew(c, (Server*)server, connection, c->fd); }
}

static void on_connection(void* server, struct MHD_Connection* connection, void** context,
                          enum MHD_ConnectionNotificationCode code) {
    Server* s = (Server*)server;
    Client *oldest = NULL, *place = NULL;  // a place is found, since libmicrohttpd counts the connections, too
    int places = 0;
    if (code == MHD_CONNECTION_NOTIFY_CLOSED) {
        client_renew((Client*)*context, s, NULL, -1);
        return;
    }
    for (Client* c = s->queue.clients; c < s->queue.clients + MOST_CLIENTS; c++) {
        if (!c->connection) { places++, place = c; }
        if (c->follows && (!oldest || c->began < oldest->began)) { oldest = c; }
    }
    if (oldest && places <= SPARE_CLIENTS) { shutdown(oldest->fd, SHUT_RDWR), oldest->follows = false; }
    client_renew(place, s, connection, MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd);
    *context = place;
}

// ---------------------------------------------------------------------------------------------------------------------
// the loop

/* Waits for requests, for answers and for the next tick, and serves them. At a tick the clients that follow look for events. */
static void serve(Server* s, struct MHD_Daemon* daemon) {
    Queue* q = &s->queue;
    const int listens = MHD_get_daemon_info(daemon, MHD_DAEMON_INFO_LISTEN_FD)->listen_fd;
    const bool gets = buffer_waits(&q->process.to_write) > 0;
    MHD_UNSIGNED_LONG_LONG wait = TICK_MS;
    MHD_socket most = 0;
    fd_set sets[3], *reads = &sets[0], *writes = &sets[1];
    for (int i = 0; i < 3; i++) { FD_ZERO(&sets[i]); }
    MHD_get_fdset(daemon, reads, writes, &sets[2], &most);
    if (MHD_get_timeout(daemon, &wait) != MHD_YES || wait > TICK_MS) { wait = TICK_MS; }
    struct pollfd fds[MOST_CLIENTS + 2];
    for (int i = 0; i < MOST_CLIENTS; i++) {  // libmicrohttpd looks at no hang-up of a client that is suspended
        const Client* c = &q->clients[i];
        const bool watched = c->suspended || c->since > 0;
        fds[i] = (struct pollfd){c->connection ? c->fd : -1, watched ? OS_HANGUP : 0, 0};
        if (c->connection && FD_ISSET(c->fd, reads)) { fds[i].events |= POLLIN; }
        if (c->connection && FD_ISSET(c->fd, writes)) { fds[i].events |= POLLOUT; }
    }
    struct pollfd* process = &fds[MOST_CLIENTS];
    process[0] = (struct pollfd){q->process.pid > 0 ? q->process.lines.fd : -1, (short)(gets ? POLLIN | POLLOUT : POLLIN), 0};
    process[1] = (struct pollfd){FD_ISSET(listens, reads) ? listens : -1, POLLIN, 0};
    poll(fds, MOST_CLIENTS + 2, (int)wait);
    const double now = now_seconds();
    const bool ticks = now >= s->next_tick;
    if (ticks) { s->next_tick = now + TICK_MS / 1e3; }
    for (int i = 0; i < MOST_CLIENTS; i++) {
        Client* c = &q->clients[i];
        const bool left = (c->suspended || c->since > 0) && fds[i].revents & ~(POLLIN | POLLOUT);
        if (ticks && c->follows) { wake(c); }
        if (!left && (c->since == 0 || now - c->since < REQUEST_SECONDS)) { continue; }
        shutdown(c->fd, SHUT_RDWR);  // libmicrohttpd may overlook the end of a request that is cut off, but not this
        queue_leave(q, c);
        question_fail(c, "the client has left");  // nobody reads this, but it ends the response
    }
    if (process->revents & POLLOUT) { queue_write(q); }
    if (process->revents & ~POLLOUT) { queue_read(q); }
    MHD_run(daemon);
    queue_go_on(q);
}

static const char usage[] =
    "usage: ./serve [OUT] [FLAG...]\n\n"
    "Shows a run on a page while it trains or afterwards, and asks its checkpoints. OUT is the --out of a run, or a folder of\n"
    "runs; without it, the page shows the newest run in the folder out.\n\n"
    "  --port N         8080; 0 takes a free port\n"
    "  --host ADDRESS   127.0.0.1, which this machine alone reaches; another address of it lets other machines in\n"
    "  --key-file FILE  the first line of FILE is the key; without it, a key is drawn at each start\n"
    "  --no-key         every user of this machine may read the runs and ask them\n"
    "  --trainer FILE   ./train_llama3, which answers questions\n"
    "  --version, --help";

/* Reads the command line, and opens the server's address and folder. Returns whether the program continues. */
static bool server_init(Server* s, char** argv) {
    static const char* const flags[] = {"--port", "--host", "--key-file", "--trainer"};
    const char *port = "8080", *host = "127.0.0.1", *key_file = NULL;
    const char** const values[] = {&port, &host, &key_file, &s->queue.trainer};
    bool no_key = false;
    for (char** a = argv + 1; *a; a++) {
        int f = 0;
        while (f < 4 && strcmp(*a, flags[f]) != 0) { f++; }
        const bool help = strcmp(*a, "--help") == 0 || strcmp(*a, "-h") == 0;
        if (help || strcmp(*a, "--version") == 0) { return puts(help ? usage : "serve (llama3.c) " LLMC_VERSION) < 0; }
        if (f < 4 && a[1]) {
            *values[f] = *++a;
        } else if (strcmp(*a, "--no-key") == 0) {
            no_key = true;
        } else if (f == 4 && **a != '-' && **a && !s->folder) {
            s->folder = *a;
        } else {
            die_usage("%s: %s\n  hint: ./serve --help", *a, f < 4 ? "has no value" : "is not expected");
        }
    }
    char* end = NULL;
    const long number = strtol(port, &end, 10);
    if (number < 0 || number > 65535 || *end || end == port) {
        die_usage("--port: is \"%s\", wanted a number from 0 to 65535", port);
    }
    if (!address_read(&s->address, host, port)) {
        die_usage("--host: is \"%s\", wanted an IPv4 or IPv6 address of this machine, by which browsers reach it", host);
    }
    if (no_key && key_file) { die_usage("--no-key: is given with --key-file, wanted one of them"); }
    if (no_key && !s->address.is_local) { die_usage("--no-key: other machines reach %s, wanted a key", host); }
    s->newest = !s->folder;
    s->folder = s->folder ? s->folder : "out";
    if (!is_directory(s->folder)) {
        die("%s: is no folder, wanted the --out of a run, or a folder of runs\n  hint: make quickstart trains a small model",
            s->folder);
    }
    if (access(s->queue.trainer, X_OK) != 0) {
        die("%s: cannot be run: %s\n  hint: make train_llama3", s->queue.trainer, strerror(errno));
    }
    s->key = no_key ? NULL : key_file ? key_read(key_file) : key_draw();
    s->shows_key = s->key && !key_file;
    return true;
}

int main(int argc, char** argv) {
    Server s = {.queue = {.trainer = "./train_llama3"}};
    struct rlimit files;
    (void)argc;
    if (!server_init(&s, argv)) { return 0; }
    // without a free descriptor libmicrohttpd would look at the same new connection again and again
    if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < LEAST_FILES) {
        die("the limit of open files is %d, wanted at least %d\n  hint: ulimit -n %d", (int)files.rlim_cur, LEAST_FILES,
            LEAST_FILES);
    }
    signal(SIGPIPE, SIG_IGN);
    Address* a = &s.address;
    const unsigned flags = MHD_ALLOW_SUSPEND_RESUME | (a->socket.ss_family == AF_INET6 ? MHD_USE_IPv6 : 0);
    const unsigned most_of_address = a->is_local ? MOST_CLIENTS : MOST_OF_ADDRESS;
    struct MHD_Daemon* daemon = MHD_start_daemon(
        flags, 0, NULL, NULL, handle, &s, MHD_OPTION_SOCK_ADDR, &a->socket, MHD_OPTION_CONNECTION_LIMIT, (unsigned)MOST_CLIENTS,
        MHD_OPTION_PER_IP_CONNECTION_LIMIT, most_of_address, MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)REQUEST_SECONDS,
        MHD_OPTION_NOTIFY_COMPLETED, on_completed, &s, MHD_OPTION_NOTIFY_CONNECTION, on_connection, &s, MHD_OPTION_END);
    if (!daemon) { die("the server cannot listen there: %s\n  hint: --port 0 takes a free port", strerror(errno)); }
    address_name(a, MHD_get_daemon_info(daemon, MHD_DAEMON_INFO_BIND_PORT)->port);
    printf("serve   http://%s/ shows %s; Ctrl-C ends it\n", a->names[0], s.folder);
    if (s.shows_key) { printf("open    http://%s/#key=%s\n", a->names[0], s.key); }
    fflush(stdout);
    for (;;) { serve(&s, daemon); }
}
