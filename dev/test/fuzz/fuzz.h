/* fuzz.h -- shared by the fuzz targets: files in memory, a tiny model, and checks.
 *
 * libFuzzer calls a target, which is one function, with one input after the other. The target gives the bytes to a reader of
 * the program, which must accept them or refuse them with one line. Then the target checks the accepted value. Readers that
 * want a path get a file in memory (tmpfs): a disk would be a hundred times slower.
 */
#ifndef LLMC_FUZZ_H
#define LLMC_FUZZ_H

#include "llmc/base/utils.h"
#include "llmc/config.h"

#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

/* Ends the run as a finding if `x` is false. */
#define REQUIRE(x) \
    if (!(x)) { fuzz_failed(#x, __FILE__, __LINE__); }

__attribute__((noinline, noreturn)) static void fuzz_failed(const char* what, const char* file, int line) {
    fprintf(stderr, "%s:%d: this is false: %s\n", file, line, what);
    abort();
}

/* Checks that a reader's result and its error fit together, and that the error is one line, or two with a hint. */
static inline void fuzz_check_error(bool ok, const Error* e) {
    const char* newline = strchr(e->msg, '\n');
    REQUIRE(ok == (e->msg[0] == 0));
    REQUIRE(!newline || (strncmp(newline, "\n  hint: ", 9) == 0 && !strchr(newline + 1, '\n')));
}

static char fuzz_folder_made[64];

static inline void fuzz_remove_folder(void) {
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", fuzz_folder_made);
    if (system(command) != 0) { fprintf(stderr, "%s: stays\n", fuzz_folder_made); }
}

/* Returns this process's folder in memory. It is removed at the end. */
static inline const char* fuzz_folder(void) {
    if (fuzz_folder_made[0]) { return fuzz_folder_made; }
    snprintf(fuzz_folder_made, sizeof fuzz_folder_made, "%s/fuzz_XXXXXX", access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    if (!mkdtemp(fuzz_folder_made)) { die("%s: cannot make the folder", fuzz_folder_made); }
    atexit(fuzz_remove_folder);
    return fuzz_folder_made;
}

/* Writes the path of a file in that folder. */
static inline const char* fuzz_path(char* path /* PATH_CAP */, const char* name) {
    snprintf(path, PATH_CAP, "%s/%s", fuzz_folder(), name);
    return path;
}

static inline void fuzz_write(const char* path, const void* data, size_t size) {
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (fd < 0 || write(fd, data, size) != (ssize_t)size || close(fd) != 0) { die("%s: %s", path, strerror(errno)); }
}

/* Returns the path of a file that holds these bytes, until the next call. */
static inline const char* fuzz_file(const uint8_t* data, size_t size) {
    static char path[PATH_CAP];
    fuzz_write(fuzz_path(path, "input"), data, size);
    return path;
}

/* Returns the bytes, ended by a NUL. The caller calls free(). */
static inline char* fuzz_text(const void* data, size_t size) {
    char* text = (char*)xmalloc(size + 1);
    if (size) { memcpy(text, data, size); }
    text[size] = 0;
    return text;
}

/* Weights that number their elements. */
static inline bool fuzz_give(void* ctx, const Param* p, size_t first, size_t n, float* dst, Error* e) {
    (void)ctx, (void)p, (void)e;
    for (size_t i = 0; i < n; i++) { dst[i] = (float)(first + i); }
    return true;
}

/* Checks elements that a reader gives: they lie in their parameter, and can be read. */
static inline void fuzz_taken(const Param* p, size_t first, size_t n, const float* src) {
    REQUIRE(first + n <= param_size(p) && n > 0);
    volatile float read = src[0] + src[n - 1];
    (void)read;
}

/* Sets up a model of a few dozen weights. */
static inline void fuzz_tiny_model(ModelConfig* c) {
    config_preset(c, "d1", 3);
    c->hidden_size = c->head_dim = 2;
    c->num_heads = c->num_kv_heads = c->intermediate_size = 1;
}

#endif
