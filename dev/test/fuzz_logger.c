/* fuzz_logger.c -- opens the bytes as the log.jsonl of a run that resumes; the first byte gives the step. The log must keep
 * whole lines from its start, none of a later step, and the next event must follow them. */
#include "llmc/files/logger.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

static char folder[1024];

static void remove_folder(void) {
    char path[1100];
    snprintf(path, sizeof path, "%s/log.jsonl", folder);
    unlink(path);
    rmdir(folder);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    char path[1100];
    if (size < 1) { return 0; }
    if (!folder[0]) {
        const char* base = getenv("TEST_TMP");
        snprintf(folder, sizeof folder, "%s/fuzz_logger_XXXXXX", base && *base ? base : "/tmp");
        if (!mkdtemp(folder)) { die("%s: cannot make a folder", folder); }
        atexit(remove_folder);
    }
    snprintf(path, sizeof path, "%s/log.jsonl", folder);
    FILE* f = fopen(path, "wb");
    if (!f || fwrite(data + 1, 1, size - 1, f) != size - 1 || fclose(f) != 0) { die("%s: cannot write", path); }
    Logger g;
    Error e = NO_ERROR;
    const int64_t step = data[0];
    if (!logger_open(&g, folder, step, &e) || !log_val(&g, step, 1.5, &e)) { die("%s", e.msg); }
    logger_close(&g);
    size_t length = 0, line = 0;
    char* text = read_file(path, &length, 1 << 24, &e);
    char want[64];
    const size_t last = (size_t)snprintf(want, sizeof want, "{\"event\":\"val\",\"step\":%d,\"loss\":1.5}\n", (int)step);
    if (!text || length < last || memcmp(text + length - last, want, last) != 0) { abort(); }
    const size_t kept = length - last;
    if (kept > size - 1 || memcmp(text, data + 1, kept) != 0 || (kept > 0 && text[kept - 1] != '\n')) { abort(); }
    for (size_t i = 0; i < kept; i++) {
        if (text[i] != '\n') { continue; }
        Json j;
        int64_t at = 0;
        char* copy = (char*)xmalloc(i - line + 1);
        memcpy(copy, text + line, i - line);
        copy[i - line] = 0;
        if (json_parse(&j, copy, i - line, "line", &e)) {
            if (json_node_int(&j, json_get(&j, json_root(&j), "step"), &at) && at > step) { abort(); }
            json_free(&j);
        }
        e.msg[0] = 0;
        line = i + 1;
    }
    free(text);
    return 0;
}
