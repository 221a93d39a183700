/* output.h -- the one door to files that are written: opens, flushes, renames and locks them.
 *
 * Reading (open_input() in utils.h) follows links; a download cache is nothing but links. Writing does not: a folder that came
 * from elsewhere may hold a link `log.jsonl` to a file of yours. So for the last part of a path
 *   1. a file is opened for writing, cut or locked only if it is a regular file itself;
 *   2. a rename replaces only a regular file;
 *   3. a temporary file is made by whoever writes it (O_EXCL).
 * Folders before the last part may be links: --out may lie on another disk. folder.h makes and removes folders.
 *
 * The files of a run's folder are read by the same rule (open_inside()): a link there could show a file of yours to others.
 */
#ifndef LLMC_OUTPUT_H
#define LLMC_OUTPUT_H

#include "llmc/base/os.h"  // defines: os_flush

#include <sys/file.h>

/* Checks that a file of this name, if there is one, is a regular file. */
static inline bool is_replaceable(const char* path, Error* e) {
    struct stat st;
    if (lstat(path, &st) != 0) { return errno == ENOENT || fail(e, "%s: cannot tell what it is: %s", path, strerror(errno)); }
    if (S_ISREG(st.st_mode)) { return true; }
    return fail(e, "%s: is %s, wanted a regular file or none", path, file_kind(st.st_mode));
}

/* Opens the file `name` of a run's folder for reading: a regular file that belongs to the folder's owner, since a link or a
 * hard link may lead to a file of somebody else. Returns -1 on an error; errno is ENOENT if there is none. */
static inline int open_inside(const char* dir, const char* name, Error* e) {
    char path[PATH_CAP];
    struct stat st, folder;
    if (!path_join(path, dir, name, e)) { return -1; }
    const int fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && stat(dir, &folder) == 0 && st.st_uid == folder.st_uid) {
        return fd;
    }
    const int cause = fd < 0 && errno != ELOOP ? errno : 0;
    fail(e, "%s: %s", path, cause ? strerror(cause) : "is no regular file of the folder's owner, wanted one that is no link");
    if (fd >= 0) { close(fd); }
    errno = cause;
    return -1;
}

/* Opens a regular file with the flags of open(); O_CREAT makes it. Returns -1 on an error. */
static inline int open_output(const char* path, int flags, Error* e) {
    struct stat st;
    if (!is_replaceable(path, e)) { return -1; }  // opening a device could already do something
    const int fd = open(path, flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
    if (fd < 0) {
        fail(e, "%s: cannot open for writing: %s", path, strerror(errno));
        return -1;
    }
    const bool seen = fstat(fd, &st) == 0 || fail(e, "%s: cannot tell what it is: %s", path, strerror(errno));
    if (seen && S_ISREG(st.st_mode)) { return fd; }
    fail(e, "%s: is not a regular file any more", path);
    close(fd);
    return -1;
}

/* Makes a file, or empties the regular file of this name. Returns NULL on an error; it leaves no emptied file behind. */
static inline FILE* create_output(const char* path, Error* e) {
    const int fd = open_output(path, O_RDWR | O_CREAT, e);
    if (fd < 0) { return NULL; }
    const bool empty = ftruncate(fd, 0) == 0;
    FILE* f = empty ? fdopen(fd, "w+b") : NULL;
    if (f) { return f; }
    fail(e, "%s: cannot make the file: %s", path, strerror(errno));
    if (empty) { unlink(path); }
    close(fd);
    return NULL;
}

/* Flushes a new file to disk and closes it. Removes it if that fails: half of a file must not pass for a whole one. Check the
 * result: a full disk may show up only here. */
static inline bool close_output(FILE* f, const char* path, Error* e) {
    errno = 0;  // forget what an earlier call left there
    bool ok = fflush(f) == 0 && !ferror(f) && os_flush(fileno(f));
    int cause = ok ? 0 : errno;
    if (fclose(f) != 0) {
        cause = ok ? errno : cause;
        ok = false;
    }
    if (!ok) { unlink(path); }
    return ok ||
           fail(e, "%s: writing failed: %s", path, cause ? strerror(cause) : "an earlier write failed; is the disk full?");
}

/* Writes a whole file and flushes it. Removes the file if that fails. */
static inline bool write_file(const char* path, const void* data, size_t size, Error* e) {
    FILE* f = create_output(path, e);
    if (!f) { return false; }
    LLMC_FAULT_POINT("file");
    bool ok = fwrite(data, 1, size, f) == size || fail(e, "%s: writing its %zu bytes failed: %s", path, size, strerror(errno));
    ok = close_output(f, path, e) && ok;
    if (!ok) { unlink(path); }
    return ok;
}

/* Flushes a file that was written and closed elsewhere. */
static inline bool sync_file(const char* path, Error* e) {
    const int fd = open_output(path, O_RDONLY, e);
    if (fd < 0) { return false; }
    const bool ok = os_flush(fd) || fail(e, "%s: cannot flush the file: %s", path, strerror(errno));
    close(fd);
    return ok;
}

/* Flushes a folder's entries: a rename or a new file in it then survives a power cut. */
static inline bool sync_directory(const char* path, Error* e) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool ok = fd >= 0 && os_flush(fd);
    int cause = errno;
    if (fd >= 0) { close(fd); }
    return ok || fail(e, "%s: cannot flush the folder: %s", path, strerror(cause));
}

// ---------------------------------------------------------------------------------------------------------------------
// locks

/* Returns whether `path` is the open file itself: not removed, moved or replaced since. */
static inline bool is_open_file(int fd, const char* path) {
    struct stat a, b;
    return fstat(fd, &a) == 0 && lstat(path, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

/* Opens a file with the flags of open() and locks it. Returns its descriptor, which holds the lock until it is closed or the
 * process ends in any way; -1 on an error. If another process holds the lock, sets *busy and returns the file without it. */
static inline int open_locked(const char* path, int flags, bool* busy, Error* e) {
    *busy = false;
    for (;;) {
        const int fd = open_output(path, flags, e);
        if (fd < 0) { return -1; }
        *busy = flock(fd, LOCK_EX | LOCK_NB) != 0;
        if (*busy && errno != EWOULDBLOCK) {
            fail(e, "%s: cannot lock the file: %s", path, strerror(errno));
            close(fd);
            return -1;
        }
        // the previous owner may have removed or renamed the file between our two calls
        if (*busy || is_open_file(fd, path)) { return fd; }
        close(fd);
    }
}

/* Makes a temporary file of this name and locks it. Replaces a file that a killed process left; fails if a living process
 * has it. The lock ends with the last descriptor of the file. Returns NULL on an error. */
static inline FILE* create_temporary(const char* path, Error* e) {
    for (;;) {
        bool busy = false;
        int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        const bool made = fd >= 0;
        if (!made && errno == EEXIST) {
            fd = open_locked(path, O_RDWR, &busy, e);
        } else if (!made) {
            fail(e, "%s: cannot make the file: %s", path, strerror(errno));
        }
        if (fd < 0) { return NULL; }
        if (busy) {
            fail(e, "%s: another process is writing this file, wanted a name of its own\n  hint: wait for it to end", path);
            close(fd);
            return NULL;
        }
        if (made && flock(fd, LOCK_EX | LOCK_NB) == 0 && is_open_file(fd, path)) {
            FILE* f = fdopen(fd, "w+b");
            if (f) { return f; }
            fail(e, "%s: cannot open: %s", path, strerror(errno));
            unlink(path);
            close(fd);
            return NULL;
        }
        // another process took our file for a dead process's before we locked it, or this file is a dead process's: try again
        if (!made) { unlink(path); }
        close(fd);
    }
}

/* Gives a finished file its name. */
static inline bool rename_output(const char* from, const char* to, Error* e) {
    return is_replaceable(to, e) &&
           (rename(from, to) == 0 || fail(e, "%s: cannot rename to %s: %s", from, to, strerror(errno)));
}

#endif
