/* folder.h -- walks and removes folders; writes and flushes whole files. */
#ifndef LLMC_FOLDER_H
#define LLMC_FOLDER_H

#include "llmc/base/utils.h"

#include <dirent.h>

/* Gets the next entry, without "." and ".."; *entry is NULL at the end. readdir() also returns NULL on an error: only errno
 * tells them apart. */
static inline bool folder_next(DIR* d, const char* path, struct dirent** entry, Error* e) {
    do {
        errno = 0;
        *entry = readdir(d);
        if (!*entry && errno) { return fail(e, "%s: reading the folder failed: %s", path, strerror(errno)); }
    } while (*entry && (strcmp((*entry)->d_name, ".") == 0 || strcmp((*entry)->d_name, "..") == 0));
    return true;
}

/* Tells whether `dir` holds a file of this name. */
static inline bool folder_has(const char* dir, const char* name) {
    char path[PATH_CAP];
    Error ignored = NO_ERROR;
    return path_join(path, dir, name, &ignored) && file_exists(path);
}

/* Flushes a file that was written and closed elsewhere. */
static inline bool sync_file(const char* path, Error* e) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    bool ok = fd >= 0 && fsync(fd) == 0;
    const int cause = errno;
    if (fd >= 0) { close(fd); }
    return ok || fail(e, "%s: cannot flush the file: %s", path, strerror(cause));
}

/* Writes a whole file and flushes it. Removes the file if that fails. */
static inline bool write_file(const char* path, const void* data, size_t size, Error* e) {
    FILE* f = fopen(path, "wb");
    if (!f) { return fail(e, "%s: cannot make the file: %s", path, strerror(errno)); }
    LLMC_FAULT_POINT("file");
    bool ok = fwrite(data, 1, size, f) == size || fail(e, "%s: writing failed: %s", path, strerror(errno));
    ok = close_output(f, path, e) && ok;
    if (!ok) { unlink(path); }
    return ok;
}

/* Tells whether `path` is a folder itself, not a link to one. */
static inline bool is_own_directory(const char* path) {
    struct stat st;
    return lstat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

/* Removes a folder and what is in it. Fails on a folder more than four levels down, which no checkpoint has. */
static inline bool remove_tree_at(const char* path, int depth, Error* e) {
    DIR* d = opendir(path);
    if (!d) { return fail(e, "%s: cannot open the folder: %s", path, strerror(errno)); }
    struct dirent* entry = NULL;
    bool ok = true;
    while (ok && (ok = folder_next(d, path, &entry, e)) && entry) {
        char inside[PATH_CAP];
        ok = path_join(inside, path, entry->d_name, e);
        if (ok && is_own_directory(inside) && depth < 4) {
            ok = remove_tree_at(inside, depth + 1, e);
        } else if (ok && unlink(inside) != 0) {
            ok = fail(e, "%s: cannot remove the file: %s", inside, strerror(errno));
        }
    }
    closedir(d);
    return ok && (rmdir(path) == 0 || fail(e, "%s: cannot remove the folder: %s", path, strerror(errno)));
}

/* Removes a folder, or a file in its place, if there is one. Follows no link: if `path` is a link, removes the link itself. */
static inline bool remove_tree(const char* path, Error* e) {
    struct stat st;
    if (lstat(path, &st) != 0) { return true; }
    if (S_ISDIR(st.st_mode)) { return remove_tree_at(path, 0, e); }
    return unlink(path) == 0 || fail(e, "%s: cannot remove it: %s", path, strerror(errno));
}

#endif
