/* test.h -- the smallest harness: each test is a function whose name reads as a sentence; main runs them and ends with
 * `return test_summary();`, whose last line is "N passed, N failed, N skipped". */
#ifndef LLMC_TEST_H
#define LLMC_TEST_H

#include "llmc/base/utils.h"

#include <sys/wait.h>
#include <unistd.h>

static int tests_passed, tests_failed, tests_skipped, checks_failed;

/* A failed check prints its place and its message, and the test continues: one run shows every failure. */
#define CHECK(cond, ...)                                          \
    do {                                                          \
        if (!(cond)) {                                            \
            checks_failed++;                                      \
            printf("    %s:%d: %s: ", __FILE__, __LINE__, #cond); \
            printf(__VA_ARGS__);                                  \
            printf("\n");                                         \
        }                                                         \
    } while (0)

/* Counts a test, which failed if a check has failed since the test before it. */
static inline void test_count(const char* name) {
    printf("%s %s\n", checks_failed ? "FAIL" : "ok  ", name);
    fflush(stdout);
    checks_failed ? tests_failed++ : tests_passed++;
    checks_failed = 0;
}
/* ONLY=NAME runs one test. */
static inline void test_run(const char* name, void (*test)(void)) {
    const char* only = getenv("ONLY");
    if (only && strcmp(only, name) != 0) { return; }
    checks_failed = 0;
    test();
    test_count(name);
}
#define RUN(test) test_run(#test, test)

#define SKIP(name, reason)                     \
    do {                                       \
        printf("skip %s: %s\n", name, reason); \
        tests_skipped++;                       \
    } while (0)

static inline int test_summary(void) {
    printf("%d passed, %d failed, %d skipped\n", tests_passed, tests_failed, tests_skipped);
    return tests_failed ? 1 : 0;
}

/* Runs a function in a child process, without its messages. Returns its exit status: 0 if it returns; -1 if it crashes. */
static inline int test_exit_status(void (*run)(const void*), const void* argument) {
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        if (!freopen("/dev/null", "w", stderr)) { _exit(3); }
        run(argument);
        _exit(0);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) { return -1; }
    return WEXITSTATUS(status);
}

/* A fresh folder for a test's files, below $TEST_TMP or /tmp. The caller removes it. */
static inline void test_folder(char* out /* PATH_CAP */) {
    const char* base = getenv("TEST_TMP");
    snprintf(out, PATH_CAP, "%s/llama3_test_XXXXXX", base && *base ? base : "/tmp");
    if (!mkdtemp(out)) { die("%s: cannot make a folder: %s", out, strerror(errno)); }
}

/* Returns the path of a file in a folder. It stays valid for the next seven calls. */
static inline const char* test_path(const char* folder, const char* name) {
    static char paths[8][PATH_CAP];
    static int next;
    char* path = paths[next++ % 8];
    snprintf(path, PATH_CAP, "%.2000s/%.1000s", folder, name);
    return path;
}

#endif
