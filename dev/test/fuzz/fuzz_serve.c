/* fuzz_serve.c -- the bytes are a request to ./serve, of a line for each part, and behind an empty line the log of its run. No
 * request is let in that lacks the server's name or key. A follower of the log, which grows meanwhile, gets whole events in
 * their order; all but steps and validations; and the peaks of these. The run is described by valid JSON. */
#define LONGEST_LINE 512  // an input has longer lines
#define MOST_BUCKETS 4
#include "fuzz.h"
#include "dev/serve/address.h"
#include "dev/serve/run_log.h"

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
    address_name(&a, 8080);
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

typedef struct {
    const char* log;  // all of it
    uint64_t end;     // of the last event that came
    int thinned;      // steps and validations that came
    int others;       // other events
    double greatest;  // loss of a step that came
} Seen;

/* Reads what a client gets now, and checks each event against the log. */
static void follow(LogPlace* p, Seen* seen) {
    for (Buffer out = {NULL, 0, 0};; free(out.text), out = (Buffer){NULL, 0, 0}) {
        log_send(fuzz_folder(), p, &out);
        if (out.size == 0) { return; }
        for (const char* at = out.text; at < out.text + out.size;) {
            if (text_starts(at, "event: peak\n")) { at += 12; }
            char* data = NULL;
            REQUIRE(text_starts(at, "id: "));
            const uint64_t end = strtoull(at + 4, &data, 10) >> 24;
            REQUIRE(text_starts(data, "\ndata: ") && end > seen->end);
            const char *line = data + 7, *newline = strchr(line, '\n');
            const size_t n = newline ? (size_t)(newline + 1 - line) : 0;
            REQUIRE(n > 0 && newline[1] == '\n' && n <= LONGEST_LINE && n <= end && !memcmp(seen->log + end - n, line, n));
            REQUIRE(end == n || seen->log[end - n - 1] == '\n');
            if (log_is(line, "step")) { seen->greatest = fmax(seen->greatest, log_number(line, n, "\"loss\":")); }
            const bool thins = log_is(line, "step") || log_is(line, "val");
            seen->thinned += thins, seen->others += !thins;
            seen->end = end;
            at = newline + 2;
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    char path[PATH_CAP], *text = fuzz_text(data, size), *rest = strstr(text, "\n\n"), *described = NULL;
    char* log = rest ? rest + 2 : text + strlen(text);
    for (size_t i = 0; i < size; i++) { text[i] = text[i] ? text[i] : ' '; }  // so that a line is a text
    const size_t n = strlen(log), half = n / 2;
    Seen seen = {log, 0, 0, 0, -INFINITY}, want = {log, 0, 0, 0, -INFINITY};
    LogPlace place = {0}, near = {.ranges = true, .ends = true, .first = 2, .last = 5};
    Json j;
    Error e = NO_ERROR;
    fuzz_path(path, "log.jsonl");
    fuzz_write(path, log, half);
    follow(&place, &seen);
    fuzz_write(path, log, n);
    follow(&place, &seen);
    for (const char *line = log, *end; (end = strchr(line, '\n')); line = end + 1) {
        const size_t length = (size_t)(end + 1 - line);
        if (length > LONGEST_LINE) { continue; }
        want.others += text_starts(line, "{\"event\":") && !log_is(line, "step") && !log_is(line, "val");
        if (log_is(line, "step")) { want.greatest = fmax(want.greatest, log_number(line, length, "\"loss\":")); }
    }
    REQUIRE(seen.others == want.others && seen.greatest == want.greatest);
    Seen some = {log, 0, 0, 0, -INFINITY};
    follow(&near, &some);
    REQUIRE(some.others == 0 && some.greatest <= want.greatest && some.thinned <= 2 * MOST_BUCKETS * NUM_PEAKS);
    free(place.kept);
    free(near.kept);
    FILE* f = xopen_memory(&described, &size);
    runs_write(f, fuzz_folder());
    xclose_memory(f, &described);
    REQUIRE(json_parse(&j, xcopy_text(described, size), size, "run", &e));
    json_free(&j);
    free(described);
    if (rest) { rest[1] = 0; }
    check_request(text);
    free(text);
    return 0;
}
