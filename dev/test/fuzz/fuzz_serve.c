/* fuzz_serve.c -- the bytes are a request to ./serve, of a line for each part, and behind an empty line the log of a run. No
 * request is let in that lacks the server's name or key. The run is described by valid JSON. */
#include "fuzz.h"
#include "dev/serve/address.h"
#include "dev/serve/runs.h"

static bool is_one_of(const char* text, const char* a, const char* b) { return !strcmp(text, a) || !strcmp(text, b); }

/* Judges a request, and what lets it in. */
static void check_request(char* text) {
    char* parts[7];
    for (int i = 0; i < 7; i++) { parts[i] = text, text += strcspn(text, "\n"), text += *text ? (*text = 0, 1) : 0; }
    const Request r = {parts[0], parts[1], parts[2], parts[3], parts[4], parts[5], parts[6]};
    static const char key[] = "0123456789abcdef", bearer[] = "Bearer 0123456789abcdef";
    Address a;
    const char* why = NULL;
    REQUIRE(address_read(&a, "127.0.0.1", "8080"));
    a.port = 8080;
    const bool page = is_one_of(r.url, "/", "/"), post = is_one_of(r.url, "/generation", "/generation");
    const char* methods = post ? "POST" : page || is_one_of(r.url, "/health", "/log") ? "GET, HEAD" : NULL;
    const unsigned status = request_judge(&a, key, &r, methods, &why);
    REQUIRE((status == 0) == (why == NULL) && (status == 0 || (status >= 400 && status < 500)));
    if (status) { return; }
    REQUIRE(strcasecmp(r.host, "127.0.0.1:8080") == 0 || strcasecmp(r.host, "localhost:8080") == 0);
    REQUIRE(!*r.origin || (strncmp(r.origin, "http://", 7) == 0 && strcasecmp(r.origin + 7, r.host) == 0));
    REQUIRE(page || !*r.site || is_one_of(r.site, "same-origin", "none"));
    REQUIRE(page || is_one_of(r.url, "/health", "/health") || strcmp(r.authorization, bearer) == 0);
    REQUIRE(methods && (post ? is_one_of(r.method, "POST", "POST") : is_one_of(r.method, "GET", "HEAD")));
}

/* Checks what the server says of its folder, in which there is one run. */
static void check_runs(Runs* r, const char* path) {
    char* text = NULL;
    size_t size = 0;
    Json j;
    Error e = NO_ERROR;
    r->path = path;
    FILE* f = xopen_memory(&text, &size);
    runs_write(f, r);
    xclose_memory(f, &text);
    REQUIRE(json_parse(&j, xcopy_text(text, size), size, "run", &e));
    REQUIRE(json_root(&j)->type == JSON_OBJECT && json_get(&j, json_root(&j), "time"));
    json_free(&j);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static Runs runs = {.home = -1};
    char path[PATH_CAP], above[PATH_CAP], *text = fuzz_text(data, size), *rest = strstr(text, "\n\n");
    const size_t head = rest ? (size_t)(rest + 2 - text) : size;
    if (runs.home < 0) { runs.home = open(".", O_RDONLY | O_DIRECTORY); }
    mkdir(fuzz_path(above, "runs"), 0700);
    mkdir(fuzz_path(path, "runs/run"), 0700);
    fuzz_write(fuzz_path(path, "runs/run/log.jsonl"), data + head, size - head);
    check_runs(&runs, above);
    if (rest) { rest[1] = 0; }
    check_request(text);
    free(text);
    return fchdir(runs.home);
}
