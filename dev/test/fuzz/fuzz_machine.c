/* fuzz_machine.c -- reads the bytes as texts of /proc and of cgroups, separated by NUL: /proc/self/cgroup, a limit, a usage,
 * memory.stat, cpu.max. The memory left must be at most the limit, and 0 if the usage exceeds the limit. strtoull() is the
 * oracle for numbers. */
#include "fuzz.h"
#include "llmc/files/folder.h"
#include "llmc/base/os.h"

enum { GROUP, LIMIT, USAGE, STATISTICS, SHARE, NUM_TEXTS };
enum { MOST_FOLDERS = 16 };  // in the paths of cgroups: the reader looks into each for limits

/* Writes a text to its file, unless an earlier input left it there: most inputs change one of the texts. */
static void write_text(int i, const char* path, const char* text) {
    static char* there[NUM_TEXTS];
    const size_t length = strlen(text);
    if (there[i] && strcmp(there[i], text) == 0) { return; }
    fuzz_write(path, text, length);
    free(there[i]);
    there[i] = fuzz_text(text, length);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static char folder[PATH_CAP], path[NUM_TEXTS][PATH_CAP];
    if (!folder[0]) {
        static const char* const names[NUM_TEXTS] = {"root/proc/self/cgroup", "root/sys/fs/cgroup/memory.max",
                                                     "root/sys/fs/cgroup/memory.current", "root/sys/fs/cgroup/memory.stat",
                                                     "root/sys/fs/cgroup/cpu.max"};
        Error e = NO_ERROR;
        must(make_directories(fuzz_path(folder, "root/proc/self"), &e), &e);
        must(make_directories(fuzz_path(folder, "root/sys/fs/cgroup"), &e), &e);
        fuzz_path(folder, "root");
        for (int i = 0; i < NUM_TEXTS; i++) { fuzz_path(path[i], names[i]); }
    }
    size_t folders = 0;
    for (size_t i = 0; i < size; i++) { folders += data[i] == '/'; }
    if (folders > MOST_FOLDERS) { return 0; }
    char *text = fuzz_text(data, size), *at = text, *part[NUM_TEXTS];
    for (int i = 0; i < NUM_TEXTS; i++) {
        part[i] = at < text + size ? at : text + size;
        write_text(i, path[i], part[i]);
        at = part[i] + strlen(part[i]) + 1;
    }
    const uint64_t left = cgroups_available(folder), limit = read_number("", path[LIMIT], 0);
    const uint64_t usage = read_number("", path[USAGE], 0);
    REQUIRE(left == UINT64_MAX || left <= limit);
    const uint64_t cache = read_field("", path[STATISTICS], "inactive_file");
    if (left != UINT64_MAX && (cache == UINT64_MAX || cache == 0)) { REQUIRE(left == (limit > usage ? limit - usage : 0)); }
    REQUIRE(cgroups_cores(folder) >= 1);
    char* end = NULL;
    errno = 0;
    const unsigned long long number = strtoull(part[LIMIT], &end, 10);
    REQUIRE(end == part[LIMIT] ? limit == UINT64_MAX : limit == number);
    free(text);
    return 0;
}
