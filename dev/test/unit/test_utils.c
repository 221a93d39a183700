/* test_utils.c -- llmc/base/utils.h, llmc/base/rand.h and llmc/files/output.h: the errors of a file that cannot be written, the
 * characters of a message that reach the terminal, and the known answers of Philox. */
#define _GNU_SOURCE 1  // as in utils.h, which is included after stdio.h here
#include <errno.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/wait.h>

static int close_cause;  // errno that fclose() fails with; 0: it works

/* Replaces fclose(): fails although the flush before it worked, as network file systems can. */
static int test_fclose(FILE* f) {
    const int result = fclose(f);
    if (close_cause == 0) { return result; }
    errno = close_cause;
    return EOF;
}
#define fclose test_fclose
#include "llmc/base/rand.h"
#include "llmc/files/output.h"
#include "dev/test/test.h"

static const char* path;

TEST(a_close_that_fails_tells_its_own_cause) {
    static const int stale[] = {0, ENOENT};
    for (int i = 0; i < 2; i++) {
        FILE* f = fopen(path, "wb");
        Error e = NO_ERROR;
        CHECK(f && fputs("text", f) >= 0, "cannot write %s", path);
        close_cause = EDQUOT;
        errno = stale[i];
        CHECK(!close_output(f, path, &e) && strstr(e.msg, strerror(EDQUOT)), "%s", e.msg);
        CHECK(access(path, F_OK) != 0, "half of %s stays", path);
        close_cause = 0;
    }
}

TEST(a_full_disk_is_told_as_such_whatever_failed_before) {
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

TEST(what_is_written_is_there_and_no_error) {
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

/* Checks the message that `text` gives as an argument, alone and passed on. */
static void shown(const char* text, const char* want) {
    char message[200];
    Error e = NO_ERROR, next = NO_ERROR, hinted = NO_ERROR;
    fail(&e, "%s: is bad, wanted %d", text, 7);
    snprintf(message, sizeof message, "%s: is bad, wanted 7", want);
    CHECK(strcmp(e.msg, message) == 0, "got %s", e.msg);
    fail(&next, "%s", e.msg);
    CHECK(strcmp(next.msg, e.msg) == 0, "passed on: %s", next.msg);
    fail(&hinted, "%s: is bad\n  hint: not %s", text, text);
    snprintf(message, sizeof message, "%s: is bad\n  hint: not %s", want, want);
    CHECK(strcmp(hinted.msg, message) == 0, "got %s", hinted.msg);
    e.msg[0] = 0;
    fail(&e, "%s", hinted.msg);
    CHECK(strcmp(e.msg, message) == 0, "passed on: %s", e.msg);
}

TEST(names_in_a_message_give_the_terminal_no_orders) {
    shown("plain.txt", "plain.txt");
    shown("no\x1b[2J\nerror: fake", "no\\x1b[2J\\x0aerror: fake");
    shown("a\n  hint: fake", "a\\x0a  hint: fake");
    shown("\x01\x1f\x7f\r\b", "\\x01\\x1f\\x7f\\x0d\\x08");
    shown("tab\tstays", "tab\tstays");
    shown("C1 \xc2\x80 \xc2\x9b \xc2\x9f", "C1 \\xc2\\x80 \\xc2\\x9b \\xc2\\x9f");
    shown("letters \xc2\xa0 \xc3\xa9 \xe2\x82\xac \xf0\x9f\xa6\x99", "letters \xc2\xa0 \xc3\xa9 \xe2\x82\xac \xf0\x9f\xa6\x99");
    shown("raw \x9b and \xe0\x82\x9b", "raw \\x9b and \\xe0\\x82\\x9b");
}

TEST(a_message_that_is_too_long_is_cut) {
    char text[3000];
    Error e = NO_ERROR;
    memset(text, 27, sizeof text - 1);
    text[sizeof text - 1] = 0;
    fail(&e, "%s\n  hint: %s", text, text);
    CHECK(strlen(e.msg) < sizeof e.msg && strspn(e.msg, "\\x1b") == strlen(e.msg), "%s", e.msg);
}

TEST(a_closed_stream_without_a_replacement_is_told) {
    int out[2], status = 0;
    char text[200] = "";
    CHECK(pipe(out) == 0, "pipe");
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        const struct rlimit none = {0, 0};
        dup2(out[1], 2);
        close(0);
        if (setrlimit(RLIMIT_NOFILE, &none) != 0) { _exit(2); }
        keep_standard_files();
        _exit(0);
    }
    close(out[1]);
    CHECK(read(out[0], text, sizeof text - 1) > 0, "not a word");
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 1, "status %d", status);
    CHECK(strncmp(text, "error: standard stream 0 is closed", 34) == 0, "%s", text);
    close(out[0]);
}

TEST(a_descriptor_is_not_passed_on_and_waits_only_if_asked) {
    int ends[2];
    char byte;
    for (int blocks = 0; blocks < 2; blocks++) {
        CHECK(os_pipe(ends, blocks) && os_own(-1, blocks) == -1, "pipe");
        for (int i = 0; i < 2; i++) {
            CHECK(fcntl(ends[i], F_GETFD) == FD_CLOEXEC, "end %d is inherited", i);
            CHECK(((fcntl(ends[i], F_GETFL) & O_NONBLOCK) == 0) == blocks, "end %d, blocks %d", i, blocks);
        }
        CHECK(blocks || (read(ends[0], &byte, 1) < 0 && errno == EAGAIN), "the empty pipe waits");
        const double start = now_seconds();
        CHECK(!os_wait(ends[0], POLLIN, 0.05) && now_seconds() - start >= 0.045, "nothing has come");
        close(ends[1]);
        CHECK(os_wait(ends[0], POLLIN, -1), "its other end is closed");
        close(ends[0]);
    }
}

TEST(names_are_exchanged_and_a_flush_that_fails_is_told) {
    char other[PATH_CAP + 2];
    struct stat before, after;
    Error e = NO_ERROR;
    snprintf(other, sizeof other, "%s.2", path);
    CHECK(write_file(path, "1", 1, &e) && write_file(other, "22", 2, &e) && stat(path, &before) == 0, "%s", e.msg);
    CHECK(os_exchange(path, other) && stat(path, &after) == 0 && after.st_size == 2, "no exchange: %s", strerror(errno));
    CHECK(stat(other, &after) == 0 && after.st_ino == before.st_ino, "%s is another file", other);
    CHECK(os_changed(&after).tv_sec == os_changed(&before).tv_sec, "an exchange is no change");
    unlink(other);
    CHECK(!os_exchange(path, other), "there is no other");
    CHECK(!os_flush(-1) && errno == EBADF, "flushed nothing: %s", strerror(errno));
}

/* The vectors of philox4x32-10 that its authors published with Random123 (tests/kat_vectors). */
TEST(philox_gives_its_published_answers) {
    static const struct {
        uint32_t counter[4], key[2], want[4];
    } vectors[] = {{{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
                   {{UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX},
                    {UINT32_MAX, UINT32_MAX},
                    {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
                   {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
                    {0xa4093822, 0x299f31d0},
                    {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}};
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) {
        const uint32_t *c = vectors[i].counter, *k = vectors[i].key;
        const Philox got = philox((uint64_t)k[1] << 32 | k[0], (RandPurpose)c[3], c[2], (uint64_t)c[1] << 32 | c[0]);
        CHECK(memcmp(got.v, vectors[i].want, sizeof got.v) == 0, "vector %zu: %08x %08x %08x %08x", i, got.v[0], got.v[1],
              got.v[2], got.v[3]);
    }
}

int main(void) {
    path = test_path(test_folder(), "file");
    return test_all();
}
