/* test_logger.c -- llmc/files/logger.h: the parts of its log that a resumed run reads, and the files that the logger refuses to
 * write. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

/* Replaces fsync(), and counts its calls. */
static int syncs;
static int test_fsync(int fd) {
    syncs++;
    return fsync(fd);
}
#define fsync test_fsync

/* Replaces malloc(), calloc() and realloc(): call number allocation_fails_at finds no memory. */
static long allocations, allocation_fails_at = -1;
static int no_memory(void) {
    if (allocations++ != allocation_fails_at) { return 0; }
    errno = ENOMEM;
    return 1;
}
static void* test_malloc(size_t n) { return no_memory() ? NULL : malloc(n); }
static void* test_calloc(size_t count, size_t n) { return no_memory() ? NULL : calloc(count, n); }
static void* test_realloc(void* p, size_t n) { return no_memory() ? NULL : realloc(p, n); }
#define malloc test_malloc
#define calloc test_calloc
#define realloc test_realloc
#include "llmc/files/logger.h"
#undef malloc
#undef calloc
#undef realloc
#undef fsync
#include "dev/test/test.h"

static const char *folder, *path, *other;

static bool holds(const char* name, const char* text) {
    size_t size = 0;
    Error e = NO_ERROR;
    char* found = read_file(name, &size, 1 << 24, &e);
    const bool same = found && size == strlen(text) && memcmp(found, text, size) == 0;
    free(found);
    return same;
}

#define LINES "{\"event\":\"config\"}\n{\"event\":\"step\",\"step\":1}\nnot ours\n{\"event\":\"step\",\"step\":2}\n"
#define LATER "{\"event\":\"step\",\"step\":3}\n"

TEST(a_log_is_cut_to_its_step) {
    static const char* const tails[] = {"", LATER, LATER "torn", "torn", "{\"event\":\"end\",\"step\":2}\n"};
    for (size_t i = 0; i < sizeof tails / sizeof *tails; i++) {
        char text[400];
        Logger g;
        Error e = NO_ERROR;
        snprintf(text, sizeof text, "%s%s", LINES, tails[i]);
        test_write(path, text, strlen(text));
        CHECK(logger_open(&g, folder, 2, &e), "%s", e.msg);
        logger_close(&g);
        CHECK(holds(path, LINES), "tail %zu", i);
    }
}

TEST(a_log_is_cut_before_what_a_run_makes_again) {
    static const char val[] = "{\"event\":\"val\",\"step\":2}\n", sample[] = "{\"event\":\"sample\",\"step\":2}\n";
    static const struct {
        const char* again[3];
        bool val, sample;  // stay
    } cases[] = {{{NULL}, true, true},
                 {{"sample", NULL}, true, false},
                 {{"val", "sample", NULL}, false, false},
                 {{"step 2", "task", NULL}, true, true}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[400], want[400];
        Logger g;
        Error e = NO_ERROR;
        snprintf(text, sizeof text, "{\"event\":\"val\",\"step\":1}\n%s%s%s%s", LINES, val, sample, LATER);
        snprintf(want, sizeof want, "{\"event\":\"val\",\"step\":1}\n%s%s%s", LINES, cases[i].val ? val : "",
                 cases[i].sample ? sample : "");
        test_write(path, text, strlen(text));
        CHECK(logger_open_before(&g, folder, 2, cases[i].again, &e), "%s", e.msg);
        logger_close(&g);
        CHECK(holds(path, want), "case %zu", i);
    }
}

TEST(lines_lie_anywhere_in_a_log_of_any_length) {
    const size_t lines = 70000, size = lines * strlen(LATER);
    char* text = (char*)malloc(size + 1);
    for (size_t i = 0; i < lines; i++) { memcpy(text + i * strlen(LATER), LATER, strlen(LATER)); }
    text[size] = 0;
    memcpy(text + size - 3, "4}", 2);  // the last line has a longer number: step 34
    test_write(path, text, size);
    Logger g;
    Error e = NO_ERROR;
    CHECK(logger_open(&g, folder, 3, &e), "%s", e.msg);
    logger_close(&g);
    text[size - strlen(LATER)] = 0;
    CHECK(holds(path, text), "cut elsewhere");
    free(text);
}

TEST(missing_memory_is_not_the_end_of_the_log) {
    long refused = 0;
    for (long n = 0;; n++) {
        Logger g;
        Error e = NO_ERROR;
        test_write(path, LINES LATER, strlen(LINES LATER));
        allocations = 0;
        allocation_fails_at = n;
        const bool opened = logger_open(&g, folder, 2, &e);
        const bool reached = allocations > n;
        allocation_fails_at = -1;
        logger_close(&g);
        refused += !opened;
        CHECK(opened || strstr(e.msg, "out of memory"), "allocation %ld: %s", n, e.msg);
        CHECK(holds(path, opened ? LINES : LINES LATER), "allocation %ld: the log is damaged", n);
        if (!reached) { break; }
    }
    CHECK(refused > 5, "%ld allocations", refused);
}

TEST(a_line_without_an_end_is_refused) {
    const size_t size = LOG_LINE_MAX + 10;
    char* text = (char*)malloc(size);
    Logger g;
    Error e = NO_ERROR;
    memset(text, 'x', size);
    memcpy(text, LINES, strlen(LINES));
    test_write(path, text, size);
    CHECK(logger_open(&g, folder, 2, &e), "a torn line of less than 1 MiB: %s", e.msg);
    logger_close(&g);
    CHECK(holds(path, LINES), "the torn line stayed");
    test_write(path, text, size);
    CHECK(truncate(path, (off_t)1 << 40) == 0, "truncate");  // zeros without end
    CHECK(!logger_open(&g, folder, 2, &e) && strstr(e.msg, "log.jsonl: the line at byte 80 is longer than"), "%s", e.msg);
    free(text);
    unlink(path);
}

TEST(a_line_of_the_longest_length_is_read) {
    static const char head[] = "{\"event\":\"checkpoint\",\"step\":2,\"weights_crc32c\":7,\"x\":\"", tail[] = "\"}\n";
    char* text = (char*)malloc(2 * LOG_LINE_MAX);
    memset(text, 'x', 2 * LOG_LINE_MAX);
    for (int line = 0; line < 2; line++) {
        memcpy(text + line * LOG_LINE_MAX, head, sizeof head - 1);
        memcpy(text + (line + 1) * LOG_LINE_MAX - (sizeof tail - 1), tail, sizeof tail - 1);
    }
    text[LOG_LINE_MAX + sizeof head] = 0;  // the second is no event
    test_write(path, text, 2 * LOG_LINE_MAX);
    LogHistory h;
    Error e = NO_ERROR;
    CHECK(log_history_read(&h, folder, 2, &e) && h.has_weights && h.weights == 7, "%s", e.msg);
    free(text);
    unlink(path);
}

TEST(only_a_regular_file_is_a_log) {
    Logger g;
    test_write(other, "precious", 8);
    for (int kind = 0; kind < 4; kind++) {
        unlink(path);
        const int made = kind == 0   ? symlink(other, path)
                         : kind == 1 ? symlink("nowhere", path)
                         : kind == 2 ? mkfifo(path, 0600)
                                     : mkdir(path, 0700);
        CHECK(made == 0, "%s", strerror(errno));
        for (int64_t step = -1; step <= 0; step++) {
            Error e = NO_ERROR;
            CHECK(!logger_open(&g, folder, step, &e) && strstr(e.msg, "log.jsonl: is a ") && strstr(e.msg, "wanted a regular"),
                  "kind %d, step %d: %s", kind, (int)step, e.msg);
        }
    }
    CHECK(holds(other, "precious"), "written through a link");
    rmdir(path);
}

TEST(a_log_that_was_moved_away_begins_again) {
    Logger g;
    Error e = NO_ERROR;
    CHECK(logger_open(&g, folder, -1, &e) && log_val(&g, 1, 1.5, NAN, &e), "%s", e.msg);
    CHECK(logger_reopen(&g, &e) && log_val(&g, 2, 1.5, NAN, &e), "%s", e.msg);
    CHECK(rename(path, other) == 0, "rename");
    CHECK(logger_reopen(&g, &e) && log_val(&g, 3, 1.5, NAN, &e), "%s", e.msg);
    logger_close(&g);
    CHECK(holds(other, "{\"event\":\"val\",\"step\":1,\"loss\":1.5}\n{\"event\":\"val\",\"step\":2,\"loss\":1.5}\n"),
          "the old log");
    CHECK(holds(path, "{\"event\":\"val\",\"step\":3,\"loss\":1.5}\n"), "the new log");
}

/* A backup of hard links shares the log of its original. */
TEST(a_log_with_another_name_is_copied) {
    const char before[] = LINES LATER;
    Logger g;
    Error e = NO_ERROR;
    syncs = 0;
    for (int64_t step = -1; step <= 2; step += 3) {
        unlink(path);
        unlink(other);
        test_write(other, before, strlen(before));
        CHECK(link(other, path) == 0 && logger_open(&g, folder, step, &e), "%s", e.msg);
        logger_close(&g);
        CHECK(holds(other, before), "step %d: the other file was cut", (int)step);
        CHECK(holds(path, step < 0 ? "" : LINES), "step %d: the log", (int)step);
    }
    CHECK(logger_open(&g, folder, 2, &e) && unlink(other) == 0 && link(path, other) == 0, "%s", e.msg);  // while a run writes
    CHECK(logger_reopen(&g, &e) && log_val(&g, 3, 1.5, NAN, &e), "%s", e.msg);
    logger_close(&g);
    CHECK(holds(other, LINES) && holds(path, LINES "{\"event\":\"val\",\"step\":3,\"loss\":1.5}\n"), "a log with a new name");
    CHECK(syncs == 3, "%d of 3 copies were flushed before they got the name", syncs);
}

TEST(a_line_of_any_texts_can_be_read_back) {
    const size_t size = 3 * LOG_LINE_MAX;
    char* long_text = (char*)malloc(size + 1);
    memset(long_text, 1, size);
    long_text[size] = 0;
    char* argv[] = {long_text, long_text, long_text};
    size_t room = LOG_TEXT_MAX, length = 0;
    char* options = NULL;
    FILE* f = xopen_memory(&options, &length);
    for (int i = 0; i < 20; i++) {
        fputc(i ? ',' : '[', f);
        json_write_part(f, long_text, size, &room);
    }
    fputc(']', f);
    xclose_memory(f, &options);
    char out[PATH_CAP];
    memset(out, 1, sizeof out);
    out[sizeof out - 1] = 0;
    Logger g;
    LogHistory h;
    Error e = NO_ERROR;
    TrainerState s;
    memset(&s, 0, sizeof s);
    strcpy(s.run, "00000000000000aa");
    const LoggedRun run = {"train_llama3", "FP32", "", options, 3, argv};
    CHECK(logger_open(&g, folder, -1, &e) && log_resume(&g, &s, out, &run, &e), "%s", e.msg);
    CHECK(log_sample(&g, 0, long_text, size, &e) && log_task(&g, 0, long_text, 0, 0, 1, &e), "%s", e.msg);
    logger_close(&g);
    CHECK(log_history_read(&h, folder, 0, &e) && strcmp(h.run, s.run) == 0, "%s", e.msg);
    CHECK(logger_open(&g, folder, 0, &e), "%s", e.msg);
    logger_close(&g);
    char* text = read_file(path, &length, 1 << 24, &e);
    CHECK(text && length > 3 * 6 * (LOG_TEXT_MAX - 10) && memcmp(text + length - 2, "}\n", 2) == 0, "%zu bytes", length);
    free(text);
    free(options);
    free(long_text);
}

TEST(a_text_that_is_cut_ends_in_an_ellipsis) {
    static const struct {
        const char* text;
        size_t room;
        const char* wanted;
    } cases[] = {{"abcdef", 6, "\"abcdef\""},
                 {"abcdef", 5, "\"ab\xE2\x80\xA6\""},
                 {"a\xC3\xA9"
                  "cdef",
                  5, "\"a\xE2\x80\xA6\""},
                 {"abcdef", 0, "\"\xE2\x80\xA6\""}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char* text = NULL;
        size_t size = 0, room = cases[i].room;
        FILE* f = xopen_memory(&text, &size);
        json_write_part(f, cases[i].text, strlen(cases[i].text), &room);
        xclose_memory(f, &text);
        CHECK(strcmp(text, cases[i].wanted) == 0 && room == 0, "case %zu: %s, room %zu", i, text, room);
        free(text);
    }
}

int main(void) {
    folder = test_folder();
    path = test_path(folder, "log.jsonl");
    other = test_path(folder, "other");
    return test_all();
}
