/* serve.c -- a page beside runs: shows their logs while they grow, and asks their checkpoints for texts.
 *
 *   GET /              the page (page.html)
 *   GET /runs          {"folder": "OUT", "newest": false, "runs": [{"name": "", "state": "running", "loss": 3.9, ...}, ...]}
 *   GET /log           a part of a run's log.jsonl: ?from=0&to=99 names its bytes; at most 8 MiB come
 *   GET /health        {"answers": false, "waiting": 0}, without a key, too
 *   POST /generation   a question (llmc/text/question.h), perhaps with "checkpoint": "step_00000100". The response has the
 *                      lines of --answer (llmc/run/jobs/answer.h) as they come
 *
 * In a folder of runs, ?run=NAME says which. The server listens on 127.0.0.1 or the --host given, and wants its key: a port is
 * open to all users of a machine. Host, Origin and Sec-Fetch-Site must name it, so no page of another site reaches it; its page
 * runs no script but its own. It reads the runs' folders by open_inside(), in one thread, and writes nothing. A connection has
 * one request. A client that closes one direction hangs up.
 */
#include "llmc/base/utils.h"  // first, since it asks for the functions beyond C11

#include "dev/serve/address.h"  // defines: Address, address_read, key_draw, key_read, Request, request_judge
#include "dev/serve/queue.h"    // defines: Client, Queue, queue_go_on, queue_leave, queue_read, question_fail
#include "dev/serve/runs.h"     // defines: runs_write, run_enter

#include "build/serve_page.h"  // defines: serve_page, SERVE_STYLE, SERVE_SCRIPT

enum {
    MOST_LOG = 8 << 20,    // bytes of a response
    LEAST_FILES = 96,      // a client needs two, and so does the process that answers; some are always open
    REQUEST_SECONDS = 10,  // for a request, and for the next part of a response
    TICK_MS = 250,
};

struct Server {
    Address address;
    bool newest;     // the page opens the newest run
    char* key;       // NULL: none
    bool shows_key;  // it was drawn
    Queue queue;
};

// ---------------------------------------------------------------------------------------------------------------------
// responses

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
        {"Connection", "close"},
        {status == MHD_HTTP_METHOD_NOT_ALLOWED ? "Allow" : NULL, c->route ? c->route->methods : NULL},
        {status == MHD_HTTP_UNAUTHORIZED ? "WWW-Authenticate" : NULL, "Bearer"},
        {status == MHD_HTTP_TOO_MANY_REQUESTS ? "Retry-After" : NULL, "10"},
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
    struct MHD_Response* r = MHD_create_response_from_buffer(c->out.size, c->out.text, MHD_RESPMEM_MUST_COPY);
    return respond(c, status, "application/json", r);
}

static enum MHD_Result refuse(Client* c, unsigned status, const char* why) {
    buffer_error(&c->out, why);
    return respond_json(c, status);
}

/* Gives the next bytes of an answer. A client for which there are none yet is suspended. */
static ssize_t give(void* client, uint64_t at, char* out, size_t most) {
    Client* c = (Client*)client;
    const size_t n = size_min(most, buffer_waits(&c->out));
    (void)at;
    if (n == 0 && c->done) { return MHD_CONTENT_READER_END_OF_STREAM; }
    if (n == 0) { MHD_suspend_connection(c->connection); }
    if (n > 0) { memcpy(out, c->out.text + c->out.at, n); }
    c->suspended = n == 0;
    c->out.at += n;
    return (ssize_t)n;
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
    struct stat st = {0};
    Error e = NO_ERROR;
    const int fd = open_inside(".", "log.jsonl", &e);
    if (fd < 0 && errno != ENOENT) { return refuse(c, MHD_HTTP_FORBIDDEN, e.msg); }
    const uint64_t size = fd >= 0 && fstat(fd, &st) == 0 ? (uint64_t)st.st_size : 0;
    const uint64_t from = size_min(strtoull(argument(c, "from"), NULL, 10), size);
    const uint64_t to = *argument(c, "to") ? size_min(strtoull(argument(c, "to"), NULL, 10), size) : size;
    const size_t bytes = to > from ? size_min(to - from, MOST_LOG) : 0;
    return respond(c, MHD_HTTP_OK, "application/x-ndjson",
                   fd < 0 ? MHD_create_response_from_buffer(0, NULL, MHD_RESPMEM_PERSISTENT)
                          : MHD_create_response_from_fd_at_offset64(bytes, fd, from));
}

static enum MHD_Result respond_runs(Client* c) {
    FILE* f = xopen_memory(&c->out.text, &c->out.size);
    fputs("{\"folder\": ", f);
    json_write_text(f, c->server->queue.runs.path);
    fprintf(f, ", \"newest\": %s, \"runs\": [", c->server->newest ? "true" : "false");
    runs_write(f, &c->server->queue.runs);
    fputs("]}\n", f);
    xclose_memory(f, &c->out.text);
    return respond_json(c, MHD_HTTP_OK);
}

static enum MHD_Result respond_health(Client* c) {
    const Queue* q = &c->server->queue;
    FILE* f = xopen_memory(&c->out.text, &c->out.size);
    fprintf(f, "{\"answers\": %s, \"waiting\": %d}\n", q->busy ? "true" : "false", q->count - q->busy);
    xclose_memory(f, &c->out.text);
    return respond_json(c, MHD_HTTP_OK);
}

/* Takes a question as one line. */
static enum MHD_Result respond_answer(Client* c) {
    Queue* q = &c->server->queue;
    Json j;
    Error e = NO_ERROR;
    buffer_add(&c->body, "\n", 1);
    if (!json_parse_line(&j, c->body.text, c->body.size - 1, "question", &e)) { return refuse(c, MHD_HTTP_BAD_REQUEST, e.msg); }
    const JsonNode *root = json_root(&j), *chosen = json_get(&j, root, "checkpoint");
    const char* name = "";
    uint64_t step = 0;
    const bool there =
        !chosen || (json_text(&j, root, "checkpoint", &name, &e) && checkpoint_step_of(name, &step) && is_directory(name));
    snprintf(c->checkpoint, sizeof c->checkpoint, "%s", name);
    const bool stop = json_get(&j, root, "stop") != NULL;
    json_free(&j);
    if (stop) { return refuse(c, MHD_HTTP_BAD_REQUEST, "question: wanted no member stop: leaving stops an answer"); }
    if (!there) { return refuse(c, MHD_HTTP_NOT_FOUND, "question: checkpoint is not one of the run's"); }
    if (q->count == MOST_QUESTIONS) { return refuse(c, MHD_HTTP_TOO_MANY_REQUESTS, "too many questions wait"); }
    for (char* p = c->body.text; p + 1 < c->body.text + c->body.size; p++) { *p = strchr("\r\n", *p) ? ' ' : *p; }
    q->questions[q->count++] = c;
    return respond(c, MHD_HTTP_OK, "application/x-ndjson",
                   MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 1 << 14, give, c, NULL));
}

static const Route routes[] = {
    {"/", "GET, HEAD", respond_page, false},     {"/health", "GET, HEAD", respond_health, false},
    {"/runs", "GET, HEAD", respond_runs, false}, {"/generation", "POST", respond_answer, true},
    {"/log", "GET, HEAD", respond_log, true},
};
enum { NUM_ROUTES = sizeof routes / sizeof *routes };

/* Returns the status with which a request is refused before its body is read, and why; 0: it is not. */
static unsigned judge(const Server* s, Client* c, const char* url, const char* method, const char** why) {
    Request r = {.method = method, .url = url, .host = header(c, "Host"), .origin = header(c, "Origin")};
    r.site = header(c, "Sec-Fetch-Site"), r.authorization = header(c, "Authorization"), r.type = header(c, "Content-Type");
    for (int i = 0; i < NUM_ROUTES; i++) {
        if (strcmp(url, routes[i].url) == 0) { c->route = &routes[i]; }
    }
    c->run = argument(c, "run");
    return request_judge(&s->address, s->key, &r, c->route ? c->route->methods : NULL, why);
}

/* libmicrohttpd calls this when the head of a request has come, for each part of its body, and at its end. */
static enum MHD_Result handle(void* server, struct MHD_Connection* connection, const char* url, const char* method,
                              const char* version, const char* part, size_t* size, void** request) {
    Server* s = (Server*)server;
    Client* c = (Client*)MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT)->socket_context;
    const char* why = NULL;
    (void)version;
    if (!*request) {
        const unsigned status = judge(s, *request = c, url, method, &why);
        return status ? refuse(c, status, why) : MHD_YES;
    }
    if (*size > 0) {
        if (c->body.size <= MOST_BODY) { buffer_add(&c->body, part, size_min(*size, MOST_BODY + 1 - c->body.size)); }
        *size = 0;
        return MHD_YES;
    }
    c->whole = true;
    if (c->body.size > MOST_BODY) { return refuse(c, MHD_HTTP_CONTENT_TOO_LARGE, "the question has more than 256 KiB"); }
    if (c->route->of_run && !run_enter(&s->queue.runs, c->run)) { return refuse(c, MHD_HTTP_NOT_FOUND, "no such run"); }
    return c->route->respond(c);
}

/* Gives a new connection a place, or frees the place of one that ends. */
static void on_connection(void* server, struct MHD_Connection* connection, void** place,
                          enum MHD_ConnectionNotificationCode code) {
    Server* s = (Server*)server;
    Client* c = s->queue.clients;
    if (code == MHD_CONNECTION_NOTIFY_CLOSED) {
        c = (Client*)*place;
        queue_leave(&s->queue, c);
        free(c->body.text);
        free(c->out.text);
        *c = (Client){0};
        return;
    }
    while (c->connection) { c++; }  // libmicrohttpd counts the connections, too
    *c = (Client){.server = s, .connection = connection, .since = now_seconds()};
    c->fd = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
    *place = c;
}

// ---------------------------------------------------------------------------------------------------------------------
// the loop

/* Ends the connection of a client that has left, or takes too long: ten seconds for a request and, where no place is free, one
 * second for whatever does not wait for the server. */
static void look_after(Queue* q, Client* c, bool full) {
    char byte;
    const ssize_t n = recv(c->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    const bool left = n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
    const double seconds = now_seconds() - c->since;
    const bool late = !c->suspended && ((full && seconds > 1) || (!c->whole && seconds > REQUEST_SECONDS));
    const bool sends = c->whole && !c->suspended;  // libmicrohttpd sees by itself that its client has left
    if (!late && (!left || sends)) { return; }
    shutdown(c->fd, SHUT_RDWR);  // libmicrohttpd may overlook the end of a request that is cut off, but not this
    queue_leave(q, c);
    if (c->suspended) { question_fail(c, "the client has left"); }  // nobody reads this, but it ends the response
}

/* Waits for requests, for answers and for the next tick, and serves them. */
static void serve(Server* s, struct MHD_Daemon* daemon) {
    Queue* q = &s->queue;
    const int listens = MHD_get_daemon_info(daemon, MHD_DAEMON_INFO_LISTEN_FD)->listen_fd;
    const int process = q->process.pid > 0 ? q->process.lines.fd : -1;
    MHD_UNSIGNED_LONG_LONG wait = TICK_MS;
    MHD_socket most = process;
    fd_set reads = {0}, writes = {0}, errors = {0};
    bool full = true;
    MHD_get_fdset(daemon, &reads, &writes, &errors, &most);
    for (Client* c = q->clients; c < q->clients + MOST_CLIENTS; c++) { full = full && c->connection; }
    if (full) { FD_CLR(listens, &reads); }  // otherwise libmicrohttpd would close the next connection
    if (process >= 0) { FD_SET(process, &reads); }
    if (MHD_get_timeout(daemon, &wait) != MHD_YES || wait > TICK_MS) { wait = TICK_MS; }
    struct timeval time = {0, (int)wait * 1000};
    if (select(most + 1, &reads, &writes, &errors, &time) < 0) { return; }  // a signal
    for (Client* c = q->clients; c < q->clients + MOST_CLIENTS; c++) {
        if (c->connection) { look_after(q, c, full); }
    }
    if (process >= 0 && FD_ISSET(process, &reads)) { queue_read(q); }
    MHD_run_from_select(daemon, &reads, &writes, &errors);
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
    Runs* runs = &s->queue.runs;
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
        } else if (f == 4 && **a != '-' && **a && !runs->path) {
            runs->path = *a;
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
    s->newest = !runs->path;
    if (s->newest) { runs->path = "out"; }
    runs->home = open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (!run_enter(runs, "") || fchdir(runs->home) != 0) {
        die("%s: is no folder, wanted the --out of a run, or a folder of runs\n  hint: make quickstart trains a small model",
            runs->path);
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
    struct MHD_Daemon* daemon =
        MHD_start_daemon(flags, 0, NULL, NULL, handle, &s, MHD_OPTION_SOCK_ADDR, &a->socket, MHD_OPTION_CONNECTION_LIMIT,
                         (unsigned)MOST_CLIENTS, MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)REQUEST_SECONDS,
                         MHD_OPTION_NOTIFY_CONNECTION, on_connection, &s, MHD_OPTION_END);
    if (!daemon) { die("the server cannot listen there: %s\n  hint: --port 0 takes a free port", strerror(errno)); }
    a->port = MHD_get_daemon_info(daemon, MHD_DAEMON_INFO_BIND_PORT)->port;
    printf("serve   http://%s:%d/ shows %s; Ctrl-C ends it\n", a->host, a->port, s.queue.runs.path);
    if (s.shows_key) { printf("open    http://%s:%d/#key=%s\n", a->host, a->port, s.key); }
    fflush(stdout);
    for (;;) { serve(&s, daemon); }
}
