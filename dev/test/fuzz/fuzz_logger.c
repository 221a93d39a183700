/* fuzz_logger.c -- opens the bytes as the log.jsonl of a run that resumes; the first byte gives the step. The log must keep
 * whole lines from its start, no line of a later step, and the next event must follow them. The resumed run must read the last
 * event's values from the log. A refused log stays as it is. */
#define LOG_LINE_MAX 1024  // an input has longer lines
#include "fuzz.h"
#include "llmc/files/logger.h"

/* Checks that the first `n` bytes of the log are whole lines of steps up to `step`. */
static void check_kept(const char* text, size_t n, int64_t step) {
    for (size_t line = 0, i = 0; i < n; i++) {
        if (text[i] != '\n') { continue; }
        Json j;
        Error e = NO_ERROR;
        int64_t at = 0;
        if (json_parse(&j, fuzz_text(text + line, i - line), i - line, "line", &e)) {
            REQUIRE(!json_node_int(&j, json_get(&j, json_root(&j), "step"), &at) || at <= step);
            json_free(&j);
        }
        line = i + 1;
    }
    REQUIRE(n == 0 || text[n - 1] == '\n');
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    char path[PATH_CAP];
    if (size < 1) { return 0; }
    fuzz_write(fuzz_path(path, "log.jsonl"), data + 1, size - 1);
    Logger g;
    LogHistory h;
    Error e = NO_ERROR, cause = NO_ERROR;
    const int64_t step = data[0];
    const bool known = log_history_read(&h, fuzz_folder(), (uint64_t)step, &cause);
    fuzz_check_error(known, &cause);
    REQUIRE(strlen(h.run) < sizeof h.run && strlen(h.parent_run) < sizeof h.parent_run);
    const bool ok = logger_open(&g, fuzz_folder(), step, &e);
    fuzz_check_error(ok, &e);
    REQUIRE(ok || !known);
    if (ok) { must(log_val(&g, step, 1.5, NAN, &e), &e); }
    size_t length = 0;
    char *text = read_file(path, &length, 1 << 24, &e), want[64];
    const size_t last =
        ok ? (size_t)snprintf(want, sizeof want, "{\"event\":\"val\",\"step\":%d,\"loss\":1.5}\n", (int)step) : 0;
    REQUIRE(text && length >= last && memcmp(text + length - last, want, last) == 0);
    const size_t kept = length - last;
    REQUIRE(kept <= size - 1 && memcmp(text, data + 1, kept) == 0 && (ok || kept == size - 1));
    if (ok) {
        check_kept(text, kept, step);
        must(log_checkpoint(&g, step, "here", 7, &e) && log_history_read(&h, fuzz_folder(), (uint64_t)step, &e), &e);
        REQUIRE(h.has_weights && h.weights == 7);
        logger_close(&g);
    }
    free(text);
    return 0;
}
