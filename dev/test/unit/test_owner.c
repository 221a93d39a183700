/* test_owner.c -- the guard of --out among hosts: hosts are faked by their names and the ids of their boots. */
#include "llmc/run/session/owner.h"

#include "llmc/files/folder.h"  // folder_next, remove_tree
#include "dev/test/test.h"

#include <sys/wait.h>

enum { PATIENCE = 60 };  // seconds after which a test gives up

static char out[PATH_CAP];

/* A process on host a, b or c. */
static Owner on_host(const char* letter) {
    Owner o;
    owner_init(&o);
    snprintf(o.host, sizeof o.host, "host-%s", letter);
    snprintf(o.boot, sizeof o.boot, "boot-%s", letter);
    o.settle_seconds = 0;
    return o;
}

static const char* owner_path(void) { return test_path(out, ".owner"); }

/* Makes the owner's file this old. */
static void make_old(double seconds) {
    struct timespec times[2];
    clock_gettime(CLOCK_REALTIME, &times[0]);
    times[0].tv_sec -= (time_t)seconds;
    times[1] = times[0];
    CHECK(utimensat(AT_FDCWD, owner_path(), times, 0) == 0, "%s", strerror(errno));
}

/* Writes the file of a process on a host that died without removing it. */
static void leave_behind(const char* letter, double age) {
    Owner o = on_host(letter);
    Error e = NO_ERROR;
    CHECK(owner_take(&o, out, false, &e), "%s", e.msg);
    owner_stop(&o);
    owner_current = NULL;
    make_old(age);
}

static const char* owner_host(void) {
    static OwnerFile f;
    Owner o = on_host("x");
    snprintf(o.path, sizeof o.path, "%s", owner_path());
    f = owner_look(&o);
    return f.there ? f.host : "nobody";
}

/* Counts the files of the folder. */
static int count_files(void) {
    struct dirent* entry = NULL;
    Error e = NO_ERROR;
    DIR* d = opendir(out);
    int count = 0;
    while (d && folder_next(d, out, &entry, &e) && entry) { count++; }
    if (d) { closedir(d); }
    return count;
}

static void a_folder_of_nobody_is_taken_and_given_back(void) {
    Owner a = on_host("a"), plain;
    Error e = NO_ERROR;
    owner_init(&plain);
    CHECK(plain.renew_seconds == 60 && plain.fresh_seconds == 180 && plain.host[0] && plain.boot[0], "what users get");
    owner_release(&a);  // nothing
    CHECK(owner_take(&a, out, false, &e), "%s", e.msg);
    CHECK(strcmp(owner_host(), "host-a") == 0 && count_files() == 1, "of %s, %d files", owner_host(), count_files());
    CHECK(owner_keep(&a, out, &e), "%s", e.msg);
    owner_release(&a);
    owner_release(&a);
    CHECK(count_files() == 0, "%d files are left", count_files());
}

static void a_run_on_another_host_is_refused_by_name(void) {
    Owner a = on_host("a"), b = on_host("b");
    Error e = NO_ERROR;
    char wanted[PATH_CAP];
    CHECK(owner_take(&a, out, false, &e), "%s", e.msg);
    make_old(100);
    snprintf(wanted, sizeof wanted, "%.1000s: a run on host host-a (process %ld) is writing into this folder: it said so 1",
             out, (long)getpid());
    CHECK(!owner_take(&b, out, false, &e), "it is taken");
    CHECK(strncmp(e.msg, wanted, strlen(wanted)) == 0 && strstr(e.msg, "hint: ") && strstr(e.msg, "its claim ends in "), "%s",
          e.msg);
    CHECK(!b.path[0] && !b.threaded && count_files() == 1, "%d files", count_files());
    owner_release(&b);
    CHECK(strcmp(owner_host(), "host-a") == 0, "of %s", owner_host());
    owner_release(&a);
}

static void a_dead_one_of_this_host_gives_way_at_once(void) {
    Owner a = on_host("a");
    Error e = NO_ERROR;
    leave_behind("a", 0);
    snprintf(a.host, sizeof a.host, "another-container");
    a.settle_seconds = PATIENCE;  // nobody else takes the folder: the process does not wait
    const double begin = now_seconds();
    CHECK(owner_take(&a, out, false, &e), "%s", e.msg);
    CHECK(now_seconds() - begin < PATIENCE && strcmp(owner_host(), "another-container") == 0, "of %s", owner_host());
    owner_release(&a);
    CHECK(count_files() == 0, "%d files are left", count_files());
}

static void an_old_one_of_another_host_is_taken_over(void) {
    Owner b = on_host("b");
    Error e = NO_ERROR;
    leave_behind("a", 179 - 10);  // on a slow machine some seconds pass before the process looks
    CHECK(!owner_take(&b, out, false, &e), "a young one is taken");
    make_old(181);
    memset(&e, 0, sizeof e);
    CHECK(owner_take(&b, out, false, &e), "%s", e.msg);
    CHECK(strcmp(owner_host(), "host-b") == 0, "of %s", owner_host());
    owner_release(&b);
    CHECK(count_files() == 0, "%d files are left", count_files());
}

static void an_owner_from_the_future_is_alive_but_not_for_ever(void) {
    Owner a = on_host("a"), b = on_host("b");
    Error e = NO_ERROR;
    leave_behind("a", -3600);
    CHECK(!owner_take(&b, out, false, &e) && strstr(e.msg, "host-a") && strstr(e.msg, "its claim ends in 180 s"), "%s", e.msg);
    b.fresh_seconds = 1;
    owner_nap(1.1);
    memset(&e, 0, sizeof e);
    CHECK(owner_take(&b, out, false, &e), "its claim has not ended: %s", e.msg);
    owner_release(&b);
    leave_behind("a", -3600);
    const double begin = now_seconds();
    CHECK(owner_take(&b, out, true, &e), "%s", e.msg);
    CHECK(now_seconds() - begin > 0.8, "it did not wait");
    owner_release(&b);
    a.renew_seconds = 0.05;
    b.fresh_seconds = PATIENCE;
    CHECK(owner_take(&a, out, false, &e), "%s", e.msg);
    make_old(-3600);
    CHECK(!owner_take(&b, out, true, &e) && strstr(e.msg, "host-a"), "it is taken from one that lives: %s", e.msg);
    owner_release(&a);
    CHECK(count_files() == 0, "%d files are left", count_files());
}

static void a_resumed_run_waits_whether_the_owner_lives(void) {
    Owner b = on_host("b"), a = on_host("a");
    Error e = NO_ERROR;
    leave_behind("a", 0);
    b.fresh_seconds = 1;
    const double begin = now_seconds();
    CHECK(owner_take(&b, out, true, &e), "%s", e.msg);
    CHECK(now_seconds() - begin > 0.8, "it did not wait");
    owner_release(&b);
    a.renew_seconds = 0.05;
    CHECK(owner_take(&a, out, false, &e), "%s", e.msg);
    b.fresh_seconds = PATIENCE;
    CHECK(!owner_take(&b, out, true, &e), "it is taken from one that lives");
    CHECK(strstr(e.msg, "host-a") != NULL, "%s", e.msg);
    owner_release(&a);
    // an owner that ends while the other process waits
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        a = on_host("a");
        Error ignored = NO_ERROR;
        const bool taken = owner_take(&a, out, false, &ignored);
        owner_nap(0.5);
        owner_release(&a);
        _exit(!taken);
    }
    while (strcmp(owner_host(), "nobody") == 0) { owner_nap(0.01); }
    memset(&e, 0, sizeof e);
    CHECK(owner_take(&b, out, true, &e), "%s", e.msg);
    CHECK(waitpid(child, NULL, 0) == child && strcmp(owner_host(), "host-b") == 0, "of %s", owner_host());
    owner_release(&b);
    CHECK(count_files() == 0, "%d files are left", count_files());
}

static void the_owner_is_renewed(void) {
    Owner a = on_host("a");
    Error e = NO_ERROR;
    struct stat st;
    a.renew_seconds = 0.1;
    CHECK(owner_take(&a, out, false, &e), "%s", e.msg);
    make_old(1000);
    const double until = now_seconds() + PATIENCE;
    do {
        owner_nap(0.02);
        CHECK(stat(owner_path(), &st) == 0, "it is gone");
    } while (time(NULL) - st.st_mtime > 500 && now_seconds() < until);
    CHECK(time(NULL) - st.st_mtime < 500, "it is still old");
    owner_release(&a);
}

static void one_that_was_taken_over_notices_and_leaves_the_other_alone(void) {
    Owner a = on_host("a"), b = on_host("b");
    Error e = NO_ERROR;
    CHECK(owner_take(&a, out, false, &e), "%s", e.msg);
    make_old(1000);  // as if it had not run
    CHECK(owner_take(&b, out, false, &e), "%s", e.msg);
    make_old(1000);
    owner_renew(&a);
    const OwnerFile f = owner_look(&b);
    CHECK(time(NULL) - f.time.tv_sec > 500, "it renews what is not its own");
    Owner copy = a;
    copy.threaded = false;
    owner_release(&copy);
    CHECK(strcmp(owner_host(), "host-b") == 0, "it removes what is not its own: of %s", owner_host());
    CHECK(!owner_keep(&a, out, &e) && strstr(e.msg, "host host-b") && !a.path[0] && !a.threaded, "%s", e.msg);
    owner_release(&a);
    CHECK(strcmp(owner_host(), "host-b") == 0, "of %s", owner_host());
    memset(&e, 0, sizeof e);
    CHECK(owner_keep(&b, out, &e), "%s", e.msg);
    owner_release(&b);
}

static void a_file_that_was_removed_is_made_again(void) {
    Owner a = on_host("a");
    Error e = NO_ERROR;
    CHECK(owner_take(&a, out, false, &e), "%s", e.msg);
    unlink(owner_path());
    CHECK(owner_keep(&a, out, &e), "%s", e.msg);
    CHECK(strcmp(owner_host(), "host-a") == 0 && count_files() == 1, "of %s", owner_host());
    owner_release(&a);
}

static void what_is_no_owner_is_that_of_an_unknown_host(void) {
    Owner a = on_host("a");
    Error e = NO_ERROR;
    CHECK(write_file(owner_path(), "?", 1, &e), "%s", e.msg);
    CHECK(!owner_take(&a, out, false, &e) && strstr(e.msg, "host unknown"), "%s", e.msg);
    make_old(1000);
    memset(&e, 0, sizeof e);
    CHECK(owner_take(&a, out, false, &e), "%s", e.msg);
    owner_release(&a);
    CHECK(symlink("elsewhere", owner_path()) == 0, "%s", strerror(errno));
    CHECK(!owner_take(&a, out, false, &e) && strstr(e.msg, "is a link"), "%s", e.msg);
    unlink(owner_path());
    CHECK(count_files() == 0, "%d files are left", count_files());
}

/* How a child ends after it has taken the folder. */
typedef enum { RETURNS, DIES, IS_KILLED } End;

static void child_takes(const char* letter, End end) {
    Owner o = on_host(letter);
    Error e = NO_ERROR;
    if (!freopen("/dev/null", "w", stderr)) { _exit(3); }
    fflush(stdout);
    if (!owner_take(&o, out, false, &e)) { _exit(2); }
    if (end == IS_KILLED) { raise(SIGKILL); }
    if (end == DIES) { die("an error"); }
    exit(0);
}

static void one_that_cannot_be_read_is_not_taken_for_old(void) {
    Owner a = on_host("a"), b = on_host("b");
    Error e = NO_ERROR;
    if (geteuid() == 0) { return; }  // root reads all: test_crash.sh has such calls fail
    CHECK(owner_take(&a, out, false, &e), "%s", e.msg);
    chmod(owner_path(), 0);
    CHECK(owner_keep(&a, out, &e), "%s", e.msg);
    CHECK(!owner_take(&b, out, false, &e) && strstr(e.msg, "host unknown"), "%s", e.msg);
    chmod(owner_path(), 0600);
    owner_release(&a);
}

static void an_error_removes_the_file_and_a_kill_leaves_it(void) {
    static const char* const left[] = {"nobody", "nobody", "host-a"};
    for (int end = RETURNS; end <= IS_KILLED; end++) {
        int status = 0;
        fflush(stdout);
        const pid_t child = fork();
        if (child == 0) { child_takes("a", (End)end); }
        waitpid(child, &status, 0);
        CHECK(end == IS_KILLED ? WIFSIGNALED(status) : WIFEXITED(status) && WEXITSTATUS(status) == (end == DIES), "status %x",
              (unsigned)status);
        CHECK(strcmp(owner_host(), left[end]) == 0, "end %d: of %s", end, owner_host());
        CHECK(count_files() == (end == IS_KILLED), "%d files are left", count_files());
    }
    unlink(owner_path());
}

static void of_two_that_replace_a_dead_owner_the_first_gives_way(void) {
    int status = 0;
    Error e = NO_ERROR;
    leave_behind("z", 1000);
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        Owner b = on_host("b");
        b.settle_seconds = 3;
        if (!freopen("/dev/null", "w", stdout)) { _exit(3); }
        _exit(owner_take(&b, out, false, &e) ? 10 : strstr(e.msg, "host host-c (process 7) took this folder") ? 11 : 12);
    }
    while (strcmp(owner_host(), "host-b") != 0) { owner_nap(0.01); }
    static const char text[] = "host-c 7 00000000000000ff boot-c\n";
    CHECK(write_file(test_path(out, "c"), text, sizeof text - 1, &e), "%s", e.msg);
    CHECK(rename(test_path(out, "c"), owner_path()) == 0, "%s", strerror(errno));
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 11, "status %x", (unsigned)status);
    CHECK(strcmp(owner_host(), "host-c") == 0 && count_files() == 1, "of %s, %d files", owner_host(), count_files());
    unlink(owner_path());
}

static void one_of_many_hosts_gets_the_folder(void) {
    enum { HOSTS = 8 };
    for (int old = 0; old < 2; old++) {  // a folder of nobody, and the folder of a dead host
        pid_t children[HOSTS];
        int got = 0, status = 0, start[2];
        if (old) { leave_behind("z", 1000); }
        CHECK(pipe(start) == 0, "no pipe");
        fflush(stdout);
        for (int i = 0; i < HOSTS; i++) {
            children[i] = fork();
            if (children[i] > 0) { continue; }
            const char letter[2] = {(char)('a' + i), 0};
            Owner o = on_host(letter);
            Error e = NO_ERROR;
            char byte;
            o.settle_seconds = 2;
            close(start[1]);
            if (!freopen("/dev/null", "w", stdout) || read(start[0], &byte, 1) != 0) { _exit(3); }  // all start at once
            const bool taken = owner_take(&o, out, false, &e);
            if (taken) { owner_stop(&o); }
            _exit(taken ? 10 : 11);
        }
        close(start[0]);
        close(start[1]);
        for (int i = 0; i < HOSTS; i++) {
            waitpid(children[i], &status, 0);
            CHECK(WIFEXITED(status) && WEXITSTATUS(status) >= 10, "status %x", (unsigned)status);
            got += WEXITSTATUS(status) == 10;
        }
        CHECK(got == 1, "%d of %d hosts took it, old %d", got, HOSTS, old);
        CHECK(count_files() == 1, "%d files", count_files());
        unlink(owner_path());
    }
}

int main(void) {
    Error e = NO_ERROR;
    test_folder(out);
    RUN(a_folder_of_nobody_is_taken_and_given_back);
    RUN(a_run_on_another_host_is_refused_by_name);
    RUN(a_dead_one_of_this_host_gives_way_at_once);
    RUN(an_old_one_of_another_host_is_taken_over);
    RUN(an_owner_from_the_future_is_alive_but_not_for_ever);
    RUN(a_resumed_run_waits_whether_the_owner_lives);
    RUN(the_owner_is_renewed);
    RUN(one_that_was_taken_over_notices_and_leaves_the_other_alone);
    RUN(a_file_that_was_removed_is_made_again);
    RUN(what_is_no_owner_is_that_of_an_unknown_host);
    RUN(one_that_cannot_be_read_is_not_taken_for_old);
    RUN(an_error_removes_the_file_and_a_kill_leaves_it);
    RUN(of_two_that_replace_a_dead_owner_the_first_gives_way);
    RUN(one_of_many_hosts_gets_the_folder);
    remove_tree(out, &e);
    return test_summary();
}
