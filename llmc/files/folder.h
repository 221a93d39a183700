/* folder.h -- walks, makes and removes folders. Removing follows no link: a link goes, what it points to stays. */
#ifndef LLMC_FOLDER_H
#define LLMC_FOLDER_H

#include "llmc/base/utils.h"
#include "llmc/files/output.h"

#include <dirent.h>

/* Gets the next entry, without "." and ".."; *entry is NULL at the end. readdir() also returns NULL on an error: only errno
 * distinguishes the two. */
static inline bool folder_next(DIR* d, const char* path, struct dirent** entry, Error* e) {
    do {
        errno = 0;
        *entry = readdir(d);
        if (!*entry && errno) { return fail(e, "%s: reading the folder failed: %s", path, strerror(errno)); }
    } while (*entry && (strcmp((*entry)->d_name, ".") == 0 || strcmp((*entry)->d_name, "..") == 0));
    return true;
}

/* Returns whether `dir` has an entry of this name, even a broken link: opening it gives the right error. */
static inline bool folder_has(const char* dir, const char* name) {
    char path[PATH_CAP];
    struct stat st;
    Error ignored = NO_ERROR;
    return path_join(path, dir, name, &ignored) && lstat(path, &st) == 0;
}

/* Returns whether two paths lead to the same file or folder. */
static inline bool same_file(const char* a, const char* b) {
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

/* Returns the last part of a path. */
static inline const char* file_name(const char* path) {
    const char* slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* Writes the folder part of a path or pattern to `out`; "." if there is none. */
static inline void folder_of(const char* path, char* out /* PATH_CAP */) {
    snprintf(out, PATH_CAP, "%s", path);
    char* slash = strrchr(out, '/');
    if (!slash) {
        snprintf(out, PATH_CAP, ".");
    } else {
        slash[slash == out] = 0;
    }
}

/* Compares the names of two entries for scandir(): numbers by their size, so that checkpoint-1000 follows checkpoint-500. */
static inline int folder_order(const struct dirent** a, const struct dirent** b) {
    const char *x = (*a)->d_name, *y = (*b)->d_name;
    for (; *x && *x == *y; x++) { y++; }
    const size_t m = strspn(x, "0123456789"), n = strspn(y, "0123456789");
    return m == n ? strcmp(x, y) : m < n ? -1 : 1;
}

/* Looks for folders below `dir`, down to `levels`, that hold one of `files` (NULL after the last). Returns how many there are,
 * and writes the last in the order of names and numbers to `last`. */
static inline int folder_below(const char* dir, const char* const* files, int levels, char last[PATH_CAP]) {
    struct dirent** names = NULL;
    Error ignored = NO_ERROR;
    int count = 0;
    const int listed = scandir(dir, &names, NULL, folder_order);
    for (int i = 0; i < listed; free(names[i++])) {
        char path[PATH_CAP];
        bool found = false;
        if (names[i]->d_name[0] == '.' || !path_join(path, dir, names[i]->d_name, &ignored)) { continue; }
        for (const char* const* f = files; !found && *f; f++) { found = folder_has(path, *f); }
        if (found) { snprintf(last, PATH_CAP, "%s", path); }
        const int deeper = levels - (strcmp(names[i]->d_name, "snapshots") != 0);  // the hub's cache has one floor more
        count += found ? 1 : deeper > 0 ? folder_below(path, files, deeper, last) : 0;
    }
    free(names);
    return count;
}

/* Makes a folder unless it exists, and flushes its parent. */
static inline bool make_directory(const char* path, Error* e) {
    char parent[PATH_CAP];
    if (mkdir(path, 0777) != 0) { return errno == EEXIST || fail(e, "%s: cannot make the folder: %s", path, strerror(errno)); }
    folder_of(path, parent);
    return sync_directory(parent, e);
}

/* Makes a folder and its parents, like mkdir -p. */
static inline bool make_directories(const char* path, Error* e) {
    char buf[PATH_CAP];
    if (strlen(path) >= sizeof buf) { return fail(e, "%.200s...: the path is longer than %d bytes", path, PATH_CAP - 1); }
    strcpy(buf, path);
    for (char* p = buf + 1; *p; p++) {
        if (*p != '/' || p[-1] == '/') { continue; }
        *p = 0;
        if (!make_directory(buf, e)) { return false; }
        *p = '/';
    }
    if (!make_directory(buf, e)) { return false; }
    return is_directory(path) || fail(e, "%s: is a file, wanted a folder", path);
}

enum { FOLDER_DEPTH = 5 };  // levels of folders that remove_tree() removes: no checkpoint has as many

/* Removes the entry `name` of the open folder `parent` and what is in it. Opens folders relative to their open parents, so
 * that nobody can put a link in a folder's place meanwhile. `path` is for messages. */
static inline bool remove_entry(int parent, const char* name, const char* path, int depth, Error* e) {
    const int fd = depth > 0 ? openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC) : -1;
    if (fd < 0 && (depth == 0 || errno == ENOTDIR || errno == ELOOP || errno == ENOENT)) {
        return unlinkat(parent, name, 0) == 0 || errno == ENOENT || fail(e, "%s: cannot remove it: %s", path, strerror(errno));
    }
    DIR* d = fd >= 0 ? fdopendir(fd) : NULL;
    if (!d) {
        fail(e, "%s: cannot open the folder: %s", path, strerror(errno));
        if (fd >= 0) { close(fd); }
        return false;
    }
    struct dirent* entry = NULL;
    bool ok = true;
    while (ok && (ok = folder_next(d, path, &entry, e)) && entry) {
        char inside[PATH_CAP];
        ok = path_join(inside, path, entry->d_name, e) && remove_entry(dirfd(d), entry->d_name, inside, depth - 1, e);
    }
    closedir(d);
    return ok &&
           (unlinkat(parent, name, AT_REMOVEDIR) == 0 || fail(e, "%s: cannot remove the folder: %s", path, strerror(errno)));
}

/* Removes a folder, or a file in its place; does nothing if neither exists. */
static inline bool remove_tree(const char* path, Error* e) { return remove_entry(AT_FDCWD, path, path, FOLDER_DEPTH, e); }

/* Makes a temporary folder of this name and locks it, as create_temporary() does with a file. Returns its descriptor, which
 * holds the lock until it is closed; -1 on an error. */
static inline int create_temporary_folder(const char* path, Error* e) {
    for (;;) {
        const bool made = mkdir(path, 0777) == 0;
        if (!made && errno != EEXIST) {
            fail(e, "%s: cannot make the folder: %s", path, strerror(errno));
            return -1;
        }
        const int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (fd < 0 && errno == ENOENT) { continue; }  // another process has renamed or removed it
        if (fd < 0) {
            fail(e, "%s: cannot open the folder: %s", path, strerror(errno));
            return -1;
        }
        const bool busy = flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;  // NFS locks no folder: none is busy there
        const bool there = !busy && is_open_file(fd, path);
        if (there && made) { return fd; }
        const bool ok = busy ? fail(e,
                                    "%s: another process is writing this folder, wanted a name of its own\n"
                                    "  hint: wait for it to end",
                                    path)
                             : !there || remove_tree(path, e);  // a killed process left it
        close(fd);
        if (!ok) { return -1; }
    }
}

#endif
