/* faults: counts the file operations of one process, and at one of them kills it, fails it or writes short.
 *
 * A library for LD_PRELOAD. It does nothing until the process calls faults_arm, which tests/fault_fixtures.py does in a
 * child that it has forked; what that child starts in turn is not counted. Operations on files below `root` count, and
 * those on the three standard streams and on pipes that are written, wherever these lead. Each is one line of the trace:
 *
 *     NUMBER <tab> OPERATION <tab> PATH <tab> OTHER PATH <tab> RESULT
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum action { NONE, KILL_BEFORE, KILL_AFTER, FAIL, FAIL_FROM, TEAR, SHORT };

static char root[PATH_MAX];
static size_t root_length;
static enum action action;
static long at, counted;
static __thread long number; /* of this thread's operation */
static int parameter; /* of FAIL: errno; of TEAR and SHORT: how many thousandths of the bytes are written */
static int trace = -1;
static pid_t armed;
static char only[256]; /* the operations that FAIL_FROM fails, as ",write,create,"; "" for all */

/* from: the root; trace_path: "" for no trace; the others as above. Returns 0. */
int faults_arm(const char *from, const char *trace_path, long which_number, int what, int with, const char *which) {
    snprintf(root, sizeof root, "%s", from);
    root_length = strlen(root);
    at = which_number, action = what, parameter = with, counted = 0;
    snprintf(only, sizeof only, "%s", which);
    if (*trace_path) {
        int low = syscall(SYS_openat, AT_FDCWD, trace_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
        trace = syscall(SYS_fcntl, low, F_DUPFD_CLOEXEC, 200); /* out of the way of the numbers that a tool gets */
        syscall(SYS_close, low);
    }
    armed = getpid();
    return 0;
}

static _Noreturn void die(void) {
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
}

static int below_root(const char *path) {
    return strncmp(path, root, root_length) == 0 && (path[root_length] == '/' || path[root_length] == 0);
}

static int of_descriptor(int fd, char *path) {
    char link[64];
    if (fd >= 0 && fd <= 2) {
        snprintf(path, PATH_MAX, "%s", (const char *[]){"<stdin>", "<stdout>", "<stderr>"}[fd]);
        return 1;
    }
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return 1;
}

static void absolute(int directory, const char *given, char *path) {
    char base[PATH_MAX] = "";
    if (*given == '/') {
        snprintf(path, PATH_MAX, "%s", given);
        return;
    }
    if (directory != AT_FDCWD) of_descriptor(directory, base);
    else if (syscall(SYS_getcwd, base, sizeof base) < 0) *base = 0;
    snprintf(path, PATH_MAX, "%.2000s/%.2000s", base, given);
}

/* One counted operation: 0, let it be done; -1, it has failed (errno is set); else how many thousandths of it to write. */
static int begin(const char *operation, const char *path) {
    number = __atomic_add_fetch(&counted, 1, __ATOMIC_SEQ_CST);
    if (action == FAIL_FROM && number >= at && *path == '/') {
        char word[64];
        snprintf(word, sizeof word, ",%s,", operation);
        if (!*only || strstr(only, word)) {
            errno = parameter;
            return -1;
        }
    }
    if (number != at) return 0;
    switch (action) {
    case KILL_BEFORE: die();
    case FAIL: errno = parameter; return -1;
    case TEAR: /* the N-th may be another one than it was in an earlier run, where there are threads */
        if (strcmp(operation, "write") != 0) die();
        return parameter;
    case SHORT: return strcmp(operation, "write") == 0 ? parameter : 0;
    default: return 0;
    }
}

static void end(const char *operation, const char *path, const char *other, long result) {
    int kept = errno;
    if (trace >= 0) {
        char line[2 * PATH_MAX + 128];
        int length = snprintf(line, sizeof line, "%ld\t%s\t%s\t%s\t%ld\n", number, operation, path, other, result);
        syscall(SYS_write, trace, line, (size_t)length);
    }
    if (number == at && action == KILL_AFTER) die();
    errno = kept;
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

#define IS_ARMED (armed && armed == getpid())

/* An operation on one or two paths, of which one lies below the root. */
#define ON_PATHS(operation, failed, call) \
    if (!IS_ARMED || !(below_root(path) || below_root(other))) return call; \
    long result = begin(operation, path) < 0 ? failed : (long)(call); \
    end(operation, path, other, result); \
    return result

#define PLACE(directory, given) \
    char path[PATH_MAX] = "", other[PATH_MAX] = ""; \
    if (IS_ARMED) absolute(directory, given, path)

static const char *opening(int flags) {
    return flags & O_CREAT ? "create" : flags & O_DIRECTORY ? "open-directory" : "open";
}

static mode_t mode_of(int flags, va_list rest) {
    return flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
}

#define OPEN(name) \
    int name(const char *given, int flags, ...) { \
        REAL(int, #name, const char *, int, ...); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = mode_of(flags, rest); \
        va_end(rest); \
        PLACE(AT_FDCWD, given); \
        ON_PATHS(opening(flags), -1, real(given, flags, mode)); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
    int name(int directory, const char *given, int flags, ...) { \
        REAL(int, #name, int, const char *, int, ...); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = mode_of(flags, rest); \
        va_end(rest); \
        PLACE(directory, given); \
        ON_PATHS(opening(flags), -1, real(directory, given, flags, mode)); \
    }
OPENAT(openat)
OPENAT(openat64)

DIR *opendir(const char *given) {
    REAL(DIR *, "opendir", const char *);
    PLACE(AT_FDCWD, given);
    if (!IS_ARMED || !below_root(path)) return real(given);
    DIR *result = begin("list", path) < 0 ? NULL : real(given);
    end("list", path, other, result ? 0 : -1);
    return result;
}

int link(const char *from, const char *to) {
    REAL(int, "link", const char *, const char *);
    PLACE(AT_FDCWD, from);
    if (IS_ARMED) absolute(AT_FDCWD, to, other);
    ON_PATHS("link", -1, real(from, to));
}

int linkat(int old, const char *from, int new, const char *to, int flags) {
    REAL(int, "linkat", int, const char *, int, const char *, int);
    PLACE(old, from);
    if (IS_ARMED) absolute(new, to, other);
    ON_PATHS("link", -1, real(old, from, new, to, flags));
}

int rename(const char *from, const char *to) {
    REAL(int, "rename", const char *, const char *);
    PLACE(AT_FDCWD, from);
    if (IS_ARMED) absolute(AT_FDCWD, to, other);
    ON_PATHS("rename", -1, real(from, to));
}

int renameat(int old, const char *from, int new, const char *to) {
    REAL(int, "renameat", int, const char *, int, const char *);
    PLACE(old, from);
    if (IS_ARMED) absolute(new, to, other);
    ON_PATHS("rename", -1, real(old, from, new, to));
}

int symlink(const char *leads, const char *given) {
    REAL(int, "symlink", const char *, const char *);
    PLACE(AT_FDCWD, given);
    ON_PATHS("symlink", -1, real(leads, given));
}

int mkdir(const char *given, mode_t mode) {
    REAL(int, "mkdir", const char *, mode_t);
    PLACE(AT_FDCWD, given);
    ON_PATHS("mkdir", -1, real(given, mode));
}

int unlink(const char *given) {
    REAL(int, "unlink", const char *);
    PLACE(AT_FDCWD, given);
    ON_PATHS("unlink", -1, real(given));
}

int unlinkat(int directory, const char *given, int flags) {
    REAL(int, "unlinkat", int, const char *, int);
    PLACE(directory, given);
    ON_PATHS(flags & AT_REMOVEDIR ? "rmdir" : "unlink", -1, real(directory, given, flags));
}

int rmdir(const char *given) {
    REAL(int, "rmdir", const char *);
    PLACE(AT_FDCWD, given);
    ON_PATHS("rmdir", -1, real(given));
}

/* An operation on a descriptor of a file below the root, or of a standard stream. */
#define ON_DESCRIPTOR(operation, call) \
    char path[PATH_MAX] = "", other[] = ""; \
    if (!IS_ARMED || !of_descriptor(fd, path) || !(*path == '<' || below_root(path))) return call; \
    long result = begin(operation, path) < 0 ? -1 : (long)(call); \
    end(operation, path, other, result); \
    return result

int fsync(int fd) {
    REAL(int, "fsync", int);
    ON_DESCRIPTOR("fsync", real(fd));
}

int fdatasync(int fd) {
    REAL(int, "fdatasync", int);
    ON_DESCRIPTOR("fsync", real(fd));
}

int ftruncate(int fd, off_t length) {
    REAL(int, "ftruncate", int, off_t);
    ON_DESCRIPTOR("truncate", real(fd, length));
}

int ftruncate64(int fd, off64_t length) {
    REAL(int, "ftruncate64", int, off64_t);
    ON_DESCRIPTOR("truncate", real(fd, length));
}

ssize_t read(int fd, void *bytes, size_t count) {
    REAL(ssize_t, "read", int, void *, size_t);
    ON_DESCRIPTOR("read", real(fd, bytes, count));
}

/* A descriptor is closed whether or not close says that it failed. */
int close(int fd) {
    REAL(int, "close", int);
    char path[PATH_MAX] = "";
    if (!IS_ARMED || fd <= 2 || !of_descriptor(fd, path) || !below_root(path)) return real(fd);
    int failed = begin("close", path) < 0, error = errno;
    int result = real(fd);
    if (failed) errno = error, result = -1;
    end("close", path, "", result);
    return result;
}

ssize_t write(int fd, const void *bytes, size_t count) {
    REAL(ssize_t, "write", int, const void *, size_t);
    char path[PATH_MAX] = "";
    if (!IS_ARMED || !of_descriptor(fd, path) || !(*path == '<' || !strncmp(path, "pipe:", 5) || below_root(path)))
        return real(fd, bytes, count);
    int thousandths = begin("write", path);
    ssize_t result = -1;
    if (thousandths >= 0) {
        size_t part = thousandths ? count * (size_t)thousandths / 1000 : count;
        result = real(fd, bytes, part || !count ? part : 1);
        if (thousandths && action == TEAR) die();
    }
    end("write", *path == 'p' ? "<pipe>" : path, "", result);
    return result;
}
