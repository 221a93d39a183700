/* fuzz_logger.c -- opens the bytes as the log.jsonl of a run that resumes; the first byte gives the step. The log must keep
 * whole lines from its start, none of a later step, and the next event must follow them. What a resumed run learns from the log
 * is what the last event says. */
#include "fuzz.h"
#include "llmc/files/log_history.h"
#include "llmc/files/logger.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    char path[PATH_CAP];
    if (size < 1) { return 0; }
    fuzz_write(fuzz_path(path, "log.jsonl"), data + 1, size - 1);
    Logger g;
    LogHistory h;
    Error e = NO_ERROR;
    const int64_t step = data[0];
    must(log_history_read(&h, fuzz_folder(), (uint64_t)step, &e), &e);
    REQUIRE(strlen(h.run) < sizeof h.run && strlen(h.parent_run) < sizeof h.parent_run);
    must(logger_open(&g, fuzz_folder(), step, &e) && log_val(&g, step, 1.5, NAN, &e), &e);
    size_t length = 0, line = 0;
    char* text = read_file(path, &length, 1 << 24, &e);
    char want[64];
    const size_t last = (size_t)snprintf(want, sizeof want, "{\"event\":\"val\",\"step\":%d,\"loss\":1.5}\n", (int)step);
    REQUIRE(text && length >= last && memcmp(text + length - last, want, last) == 0);
    const size_t kept = length - last;
    REQUIRE(kept <= size - 1 && memcmp(text, data + 1, kept) == 0 && (kept == 0 || text[kept - 1] == '\n'));
    for (size_t i = 0; i < kept; i++) {
        if (text[i] != '\n') { continue; }
        Json j;
        int64_t at = 0;
        if (json_parse(&j, fuzz_text(text + line, i - line), i - line, "line", &e)) {
            REQUIRE(!json_node_int(&j, json_get(&j, json_root(&j), "step"), &at) || at <= step);
            json_free(&j);
        }
        e.msg[0] = 0;
        line = i + 1;
    }
    free(text);
    must(log_checkpoint(&g, step, "here", 7, &e) && log_history_read(&h, fuzz_folder(), (uint64_t)step, &e), &e);
    REQUIRE(h.has_weights && h.weights == 7);
    logger_close(&g);
    return 0;
}
