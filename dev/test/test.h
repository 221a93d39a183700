/* test.h -- the smallest harness: each test is a function, TEST(name) { ... }, whose name reads as a sentence. main ends with
 * `return test_all();`, which runs them in the order of the file. The last line is "N passed, N failed, N skipped". */
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

/* Checks that a call fails, and that its error has these words; then clears the error. */
#define FAILS(error, call, words)                                          \
    do {                                                                   \
        CHECK(!(call) && strstr((error)->msg, words), "%s", (error)->msg); \
        (error)->msg[0] = 0;                                               \
    } while (0)

// ---------------------------------------------------------------------------------------------------------------------
// memory and files of a test. What these functions return lasts until the test ends; what is made in main lasts until then.
// The files lie in one folder below $TEST_TMP or /tmp, and go with the program.

typedef struct TestMemory {
    struct TestMemory* before;
    size_t size;  // with it the memory behind is aligned as malloc's
} TestMemory;
static TestMemory* test_kept;
static char test_root[PATH_CAP];  // "": not made yet
static const char* test_home;     // of the test; NULL: not made yet

/* Memory of zeros. */
static inline void* test_memory(size_t size) {
    TestMemory* m = (TestMemory*)xcalloc(1, sizeof *m + size);
    m->before = test_kept;
    m->size = size;
    test_kept = m;
    return m + 1;
}

/* The path of a file in a folder. */
static inline const char* test_path(const char* folder, const char* name) {
    const size_t size = strlen(folder) + strlen(name) + 2;
    char* path = (char*)test_memory(size);
    snprintf(path, size, "%s/%s", folder, name);
    return path;
}

/* A new folder. */
static inline const char* test_folder(void) {
    static int count;
    const char* path;
    if (!*test_root) {
        const char* base = getenv("TEST_TMP");
        snprintf(test_root, PATH_CAP, "%s/llama3_test_XXXXXX", base && *base ? base : "/tmp");
        if (!mkdtemp(test_root)) { die("%s: cannot make a folder: %s", test_root, strerror(errno)); }
    }
    do {  // a child process may have made the next one
        char name[16];
        snprintf(name, sizeof name, "%d", count++);
        path = test_path(test_root, name);
    } while (mkdir(path, 0700) != 0 && errno == EEXIST);
    return path;
}

/* The test's own folder, and the path of a file in it. */
static inline const char* test_here(void) {
    if (!test_home) { test_home = test_folder(); }
    return test_home;
}
static inline const char* test_file(const char* name) { return test_path(test_here(), name); }
/* From now on the test's own folder is a new one. */
static inline void test_elsewhere(void) { test_home = NULL; }

static inline void test_write(const char* path, const void* data, size_t size) {
    FILE* f = fopen(path, "wb");
    if (!f || fwrite(data, 1, size, f) != size || fclose(f) != 0) { die("%s: %s", path, strerror(errno)); }
}
static inline void test_put(const char* path, const char* text) { test_write(path, text, strlen(text)); }

/* A file's text. If it cannot be read, the test fails and the text is "". */
static inline const char* test_text(const char* path) {
    Error e = NO_ERROR;
    size_t size = 0;
    char* read = read_file(path, &size, 1 << 30, &e);
    char* text = (char*)test_memory(size + 1);
    CHECK(read, "%s", e.msg);
    if (read) { memcpy(text, read, size); }
    free(read);
    return text;
}

/* Returns the next part of a text, whose parts this character divides; NULL after the last. */
static inline const char* test_next(const char** rest, char divider) {
    if (!*rest) { return NULL; }
    const char* end = strchr(*rest, divider);
    const size_t size = end ? (size_t)(end - *rest) : strlen(*rest);
    char* part = (char*)test_memory(size + 1);
    memcpy(part, *rest, size);
    *rest = end ? end + 1 : NULL;
    return part;
}

static inline bool contains(const char* text, const char* part) { return strstr(text, part) != NULL; }

// ---------------------------------------------------------------------------------------------------------------------

/* Counts a test, which failed if a check has failed since the test before it. */
static inline void test_count(const char* name) {
    printf("%s %s\n", checks_failed ? "FAIL" : "ok  ", name);
    fflush(stdout);
    checks_failed ? tests_failed++ : tests_passed++;
    checks_failed = 0;
}
/* ONLY=NAME runs one test. One that calls SKIP() and returns has neither passed nor failed. */
static inline void test_run(const char* name, void (*test)(void)) {
    const char* only = getenv("ONLY");
    const int skipped = tests_skipped;
    if (only && strcmp(only, name) != 0) { return; }
    TestMemory* const before = test_kept;
    checks_failed = 0;
    test_home = NULL;
    test();
    for (TestMemory* m; (m = test_kept) != before; free(m)) { test_kept = m->before; }
    if (tests_skipped == skipped || checks_failed) { test_count(name); }
}
#define RUN(test) test_run(#test, test)

#define SKIP(name, reason)                     \
    do {                                       \
        printf("skip %s: %s\n", name, reason); \
        tests_skipped++;                       \
    } while (0)

static inline int test_summary(void) {
    char remove[PATH_CAP + 16];
    snprintf(remove, sizeof remove, "rm -rf '%s'", test_root);
    if (*test_root && system(remove) != 0) { printf("    %s fails\n", remove); }
    printf("%d passed, %d failed, %d skipped\n", tests_passed, tests_failed, tests_skipped);
    return tests_failed ? 1 : 0;
}

/* A test in the list of the program. */
typedef struct Test {
    const char* name;
    void (*run)(void);
    struct Test* next;
} Test;
static Test *tests_first, **tests_end = &tests_first;

static inline void test_add(Test* t) {
    *tests_end = t;
    tests_end = &t->next;
}
/* Defines a test. It is in the list before main begins. */
#define TEST(test)                                              \
    static void test(void);                                     \
    __attribute__((constructor)) static void test##_add(void) { \
        static Test t = {#test, test, NULL};                    \
        test_add(&t);                                           \
    }                                                           \
    static void test(void)

static inline int test_all(void) {
    for (const Test* t = tests_first; t; t = t->next) { test_run(t->name, t->run); }
    return test_summary();
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

#endif
