/* test_utils.c -- llmc/base/utils.h: the errors of a file that cannot be written. */
#define _GNU_SOURCE 1  // as in utils.h, which is included after stdio.h here
#include <errno.h>
#include <stdio.h>

static int close_cause;  // errno that fclose() fails with; 0: it works

/* Replaces fclose(): fails although the flush before it worked, as network file systems can. */
static int test_fclose(FILE* f) {
    const int result = fclose(f);
    if (close_cause == 0) { return result; }
    errno = close_cause;
    return EOF;
}
#define fclose test_fclose
#include "test.h"

static char path[PATH_CAP];

static void a_close_that_fails_tells_its_own_cause(void) {
    static const int stale[] = {0, ENOENT};
    for (int i = 0; i < 2; i++) {
        FILE* f = fopen(path, "wb");
        Error e = NO_ERROR;
        CHECK(f && fputs("text", f) >= 0, "cannot write %s", path);
        close_cause = EDQUOT;
        errno = stale[i];
        CHECK(!close_output(f, path, &e) && strstr(e.msg, strerror(EDQUOT)), "%s", e.msg);
        close_cause = 0;
    }
}

static void a_full_disk_is_told_as_such_whatever_failed_before(void) {
    FILE* f = fopen("/dev/full", "wb");
    Error e = NO_ERROR;
    CHECK(f && fputs("found full by the flush", f) >= 0, "cannot open /dev/full");
    errno = ENOENT;
    CHECK(!close_output(f, "x", &e) && strstr(e.msg, strerror(ENOSPC)), "%s", e.msg);

    f = fopen("/dev/full", "wb");
    setvbuf(f, NULL, _IONBF, 0);
    fputs("found full by this write", f);
    errno = ENOENT;
    e.msg[0] = 0;
    CHECK(!close_output(f, "x", &e) && strstr(e.msg, "disk full"), "%s", e.msg);
}

static void what_is_written_is_there_and_no_error(void) {
    FILE* f = fopen(path, "wb");
    Error e = NO_ERROR;
    size_t size = 0;
    CHECK(f && fputs("text", f) >= 0, "cannot write %s", path);
    errno = ENOENT;
    CHECK(close_output(f, path, &e) && e.msg[0] == 0, "%s", e.msg);
    char* text = read_file(path, &size, 100, &e);
    CHECK(text && size == 4 && strcmp(text, "text") == 0, "%s", e.msg);
    free(text);
}

int main(void) {
    char folder[PATH_CAP];
    test_folder(folder);
    snprintf(path, sizeof path, "%.4000s/file", folder);
    RUN(a_close_that_fails_tells_its_own_cause);
    RUN(a_full_disk_is_told_as_such_whatever_failed_before);
    RUN(what_is_written_is_there_and_no_error);
    unlink(path);
    rmdir(folder);
    return test_summary();
}
