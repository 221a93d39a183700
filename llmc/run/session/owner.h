/* owner.h -- guards --out against a run on another host.
 *
 * On one host the lock of OUT/.lock decides (files/checkpoint.h): the kernel drops it when its process ends in any way. Between
 * hosts the lock depends on the file system. NFS usually passes it on; Lustre without -o flock, and some others, do not. So the
 * process that has the lock also owns
 *
 *   OUT/.owner   "HOST PID TOKEN BOOT\n": the host's name, the process, a random number, the id of the host's boot
 *
 * and renews its time each minute, from a thread of its own: loading, a validation or a step may take longer.
 *
 *   1. An owner of this boot is dead, since the lock was free: it is replaced at once. The boot, not the name,
 *      distinguishes hosts: containers on one host have their own names, but one kernel, and so one lock.
 *   2. An owner on another host that is younger than three minutes is alive: the run is refused. With --resume it first waits:
 *      if the owner is renewed, the run is refused; if the owner gets three minutes old, the run starts. So a run whose host
 *      died continues by itself elsewhere.
 *   3. An older one is replaced, with a note.
 *   4. An owner from the future is alive: the file server's clock was set back, or a host wrote the time by a fast clock of its
 *      own. The file gets the server's time of now, so that its claim ends in three minutes unless its owner renews it.
 *   5. The owner looks before each checkpoint: if another one has taken its place, it writes nothing more and ends.
 *
 * Ages are by the file server's clock, read from a file touched just now: the hosts' clocks may differ. The three minutes of
 * waiting are by a clock that nobody sets. The file gets its name by link(), which fails if the name exists, or by rename()
 * where it replaces an owner. A moment later the host reads it again, because two hosts may do that at the same time.
 *
 * Limits: it is a guard, no lock. A host that does not run for three minutes (a paused virtual machine) loses --out to another
 * one, and notices only before its next checkpoint. Where a host sees others' files late (NFS with nocto or long actimeo), two
 * hosts that replace a dead owner in the same seconds may both continue until then. The log then has lines of both runs.
 */
#ifndef LLMC_OWNER_H
#define LLMC_OWNER_H

#include "llmc/base/utils.h"  // first, since it asks for the functions beyond C11; defines: Error, fail, path_join, read_file

#include "llmc/base/crc.h"      // defines: crc_of
#include "llmc/files/output.h"  // defines: write_file, rename_output
#include "llmc/base/text.h"     // defines: print_names

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <sys/random.h>

enum { OWNER_HOST = 72, OWNER_BOOT = 40, OWNER_TEXT = 256 };

typedef struct {
    // set by owner_init(); tests change them
    char host[OWNER_HOST], boot[OWNER_BOOT];
    double renew_seconds, fresh_seconds;
    double settle_seconds;  // after which a replaced file is read again

    char path[PATH_CAP];  // "": nothing is owned
    char temporary[PATH_CAP];
    uint64_t token;
    pid_t process;
    bool threaded, quit;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
} Owner;

static Owner* owner_current;  // this process's file, to be removed when it ends; a hook needs a global

/* The contents of OUT/.owner. */
typedef struct {
    bool there;
    struct timespec time;  // of its last renewal
    char host[OWNER_HOST], boot[OWNER_BOOT];
    long process;
    unsigned long long token;
} OwnerFile;

/* Writes the id of this boot or, without /proc, the host's name. */
static inline void owner_boot(char* boot /* OWNER_BOOT */, const char* host) {
    const int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    const ssize_t n = fd >= 0 ? read(fd, boot, OWNER_BOOT - 1) : 0;
    boot[n > 0 ? n : 0] = 0;
    boot[strcspn(boot, " \n")] = 0;
    if (!boot[0]) { snprintf(boot, OWNER_BOOT, "%.39s", host); }
    if (fd >= 0) { close(fd); }
}

/* Sets who this process is, and the times that users get. */
static inline void owner_init(Owner* o) {
    memset(o, 0, sizeof *o);
    if (gethostname(o->host, sizeof o->host - 1) != 0 || !o->host[0]) { snprintf(o->host, sizeof o->host, "unknown"); }
    for (char* p = o->host; *p; p++) {
        if ((unsigned char)*p <= ' ') { *p = '_'; }
    }
    owner_boot(o->boot, o->host);
    o->renew_seconds = 60;
    o->fresh_seconds = 180;
    o->settle_seconds = 2;
}

// ---------------------------------------------------------------------------------------------------------------------
// the file

/* Reads OUT/.owner. A file of another form, or one that cannot be read, counts as the file of an unknown host, with token 0. */
static inline OwnerFile owner_look(const Owner* o) {
    OwnerFile f;
    char text[OWNER_TEXT] = "";
    struct stat st;
    memset(&f, 0, sizeof f);
    const int fd = open(o->path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) {
        f.there = errno != ENOENT;
        if (lstat(o->path, &st) == 0) { f.time = st.st_mtim; }  // it exists, but cannot be read
    } else {
        const ssize_t n = read(fd, text, sizeof text - 1);
        text[n > 0 ? n : 0] = 0;
        f.there = fstat(fd, &st) != 0 || st.st_nlink > 0;
        if (f.there) { f.time = st.st_mtim; }
        close(fd);
    }
    if (sscanf(text, "%71s %ld %16llx %39s", f.host, &f.process, &f.token, f.boot) == 4) { return f; }
    snprintf(f.host, sizeof f.host, "unknown");
    f.token = 0;
    f.boot[0] = 0;
    return f;
}

static inline bool owner_is_mine(const Owner* o, const OwnerFile* f) { return f->there && f->token == o->token; }

/* Returns how many seconds ago a file was renewed, by the clock of the file system. */
static inline double owner_age(const Owner* o, const OwnerFile* f) {
    struct stat st;
    const bool touched = utimensat(AT_FDCWD, o->temporary, NULL, AT_SYMLINK_NOFOLLOW) == 0 && lstat(o->temporary, &st) == 0;
    if (!touched) { return 0; }  // unknown: counts as new
    return (double)(st.st_mtim.tv_sec - f->time.tv_sec) + 1e-9 * (double)(st.st_mtim.tv_nsec - f->time.tv_nsec);
}

/* Names the temporary file OUT/.owner if none exists. NFS may lose an answer: then the number of links decides. */
static inline bool owner_link(const Owner* o) {
    struct stat st;
    return link(o->temporary, o->path) == 0 || (lstat(o->temporary, &st) == 0 && st.st_nlink == 2);
}

static inline void owner_nap(double seconds) {
    const struct timespec time = {(time_t)seconds, (long)(1e9 * (seconds - floor(seconds)))};
    nanosleep(&time, NULL);
}

/* Puts the temporary file in the place of OUT/.owner, and checks after a while whether it still has that name. */
static inline bool owner_replace(const Owner* o, double settle_seconds, Error* e) {
    if (!rename_output(o->temporary, o->path, e)) { return false; }
    owner_nap(settle_seconds);
    const OwnerFile now = owner_look(o);
    return owner_is_mine(o, &now) ||
           fail(e, "%s: a run on host %s (process %ld) took this folder at the same time\n  hint: choose another --out",
                o->path, now.host, now.process);
}

// ---------------------------------------------------------------------------------------------------------------------
// taking

static inline bool owner_refuse(const Owner* o, const OwnerFile* f, double age, Error* e) {
    return fail(e,
                "%.*s: a run on host %s (process %ld) is writing into this folder: it said so %.0f s ago\n"
                "  hint: wait for it to end, or choose another --out; if it was killed, its claim ends in %.0f s",
                (int)(strlen(o->path) - strlen("/.owner")), o->path, f->host, f->process, fmax(age, 0), o->fresh_seconds - age);
}

/* Waits until the owner, of age `age`, is old, or is gone. Refuses if it is renewed meanwhile. */
static inline bool owner_outlive(const Owner* o, OwnerFile* f, double age, Error* e) {
    const double until = now_seconds() + o->fresh_seconds - age;
    print_names(stdout, "owner   %s is of host %s (process %ld), %.0f s old: waiting up to %.0f s to see whether it is alive\n",
                o->path, f->host, f->process, fmax(age, 0), o->fresh_seconds - age);
    fflush(stdout);
    for (double left; f->there && (left = until - now_seconds()) > 0;) {
        owner_nap(fmin(5, fmax(0.01, left)));
        const OwnerFile now = owner_look(o);
        const bool renewed = now.time.tv_sec != f->time.tv_sec || now.time.tv_nsec != f->time.tv_nsec;
        if (now.there && renewed) { return owner_refuse(o, &now, fmax(owner_age(o, &now), 0), e); }
        *f = now;
    }
    return true;
}

/* Makes OUT/.owner this process's by the rules above. */
static inline bool owner_claim(const Owner* o, bool waits, Error* e) {
    if (owner_link(o)) { return true; }
    OwnerFile f = owner_look(o);
    if (f.there && strcmp(f.boot, o->boot) == 0) { return owner_replace(o, 0, e); }
    double age = f.there ? owner_age(o, &f) : 0;
    if (f.there && age < 0) {
        if (utimensat(AT_FDCWD, o->path, NULL, AT_SYMLINK_NOFOLLOW) != 0) { errno = 0; }  // then only waiting helps
        f = owner_look(o);
        age = 0;
    }
    if (f.there && age < o->fresh_seconds) {
        if (!waits) { return owner_refuse(o, &f, age, e); }
        if (!owner_outlive(o, &f, age, e)) { return false; }
        age = owner_age(o, &f);
    }
    if (!f.there && owner_link(o)) { return true; }
    if (f.there) {
        print_names(stdout, "owner   %s was of host %s (process %ld), %.0f s old: it is taken over\n", o->path, f.host,
                    f.process, age);
    }
    return owner_replace(o, o->settle_seconds, e);  // also where the file system has no links
}

/* Writes the temporary file and claims OUT/.owner with it. Each host has one name for it, and the lock keeps the host's
 * other processes away from it. */
static inline bool owner_write(Owner* o, const char* out, bool waits, Error* e) {
    char name[32], text[OWNER_TEXT];
    snprintf(name, sizeof name, ".owner.%08" PRIx32, crc_of(o->boot, strlen(o->boot)));
    const int length =
        snprintf(text, sizeof text, "%s %ld %016llx %s\n", o->host, (long)o->process, (unsigned long long)o->token, o->boot);
    if (!path_join(o->path, out, ".owner", e) || !path_join(o->temporary, out, name, e)) { return false; }
    if (!is_replaceable(o->path, e)) { return false; }
    unlink(o->temporary);  // left by a killed process: it may be a second name of .owner
    const bool ok = write_file(o->temporary, text, (size_t)length, e) && owner_claim(o, waits, e);
    unlink(o->temporary);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// keeping

/* Renews the file's time, if the file still belongs to this process. */
static inline void owner_renew(const Owner* o) {
    const OwnerFile f = owner_look(o);
    if (owner_is_mine(o, &f) && utimensat(AT_FDCWD, o->path, NULL, AT_SYMLINK_NOFOLLOW) != 0) { errno = 0; }  // next time
}

static inline void* owner_thread(void* owner) {
    Owner* o = (Owner*)owner;
    pthread_mutex_lock(&o->mutex);
    while (!o->quit) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        const double nanoseconds = (double)until.tv_nsec + 1e9 * o->renew_seconds;
        until.tv_sec += (time_t)(nanoseconds / 1e9);
        until.tv_nsec = (long)fmod(nanoseconds, 1e9);
        if (pthread_cond_timedwait(&o->wake, &o->mutex, &until) != ETIMEDOUT) { continue; }
        pthread_mutex_unlock(&o->mutex);
        owner_renew(o);
        pthread_mutex_lock(&o->mutex);
    }
    pthread_mutex_unlock(&o->mutex);
    return NULL;
}

/* Starts the thread, which blocks all signals. */
static inline void owner_start(Owner* o) {
    pthread_condattr_t clock;
    sigset_t all, old;
    pthread_mutex_init(&o->mutex, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&o->wake, &clock);
    pthread_condattr_destroy(&clock);
    o->quit = false;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    o->threaded = pthread_create(&o->thread, NULL, owner_thread, o) == 0;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (!o->threaded) { warn("%s: no thread can be started to renew it: runs on other hosts may take --out", o->path); }
}

static inline void owner_stop(Owner* o) {
    if (!o->threaded) { return; }
    pthread_mutex_lock(&o->mutex);
    o->quit = true;
    pthread_cond_signal(&o->wake);
    pthread_mutex_unlock(&o->mutex);
    pthread_join(o->thread, NULL);
    o->threaded = false;
    pthread_mutex_destroy(&o->mutex);
    pthread_cond_destroy(&o->wake);
}

static inline void owner_remove(const Owner* o) {
    const OwnerFile f = owner_look(o);
    if (owner_is_mine(o, &f)) { unlink(o->path); }
}

/* Removes the file if the process ends without owner_release(). For any thread. */
static inline void owner_leave(void) {
    const Owner* o = owner_current;
    owner_current = NULL;
    if (o && o->process == getpid()) { owner_remove(o); }  // not a child's
}

/* Takes OUT for this process, which holds its lock, until owner_release() or the end of the process. `waits`: see the second
 * rule above. Fails if a run on another host has it. */
static inline bool owner_take(Owner* o, const char* out, bool waits, Error* e) {
    static bool registered;
    o->process = getpid();
    if (getrandom(&o->token, sizeof o->token, 0) != (ssize_t)sizeof o->token || o->token == 0) {
        return fail(e, "%s: the system has no random numbers: %s", out, strerror(errno));
    }
    if (!owner_write(o, out, waits, e)) {
        o->path[0] = 0;
        return false;
    }
    owner_current = o;
    if (!registered && atexit(owner_leave) == 0) { registered = true; }
    owner_start(o);
    return true;
}

/* Checks that OUT still belongs to this process; if the file is gone, makes it again. If another run has it, path becomes
 * "". */
static inline bool owner_keep(Owner* o, const char* out, Error* e) {
    if (!o->path[0]) { return true; }
    const OwnerFile f = owner_look(o);
    if (owner_is_mine(o, &f) || (f.there && f.token == 0)) { return true; }  // or it cannot be read now
    if (!f.there) { return owner_write(o, out, false, e); }
    owner_stop(o);
    o->path[0] = 0;
    return fail(e, "%s: a run on host %s (process %ld) has taken this folder over: this one was not seen for %g s", out, f.host,
                f.process, o->fresh_seconds);
}

/* Gives OUT back. */
static inline void owner_release(Owner* o) {
    if (!o->path[0]) { return; }
    owner_stop(o);
    owner_remove(o);
    if (owner_current == o) { owner_current = NULL; }
    o->path[0] = 0;
}

#endif
