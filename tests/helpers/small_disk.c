/* A small disk for who may not mount one: writes to files below SMALL_DISK_AT take from the count of free bytes in
   SMALL_DISK_CONTROL (two numbers of 64 bits: free bytes, errno), which all processes share; removing a file gives back.
   What does not fit is written in part, or fails with that errno, as on a real disk. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static volatile int64_t *control;
static const char *root;

__attribute__((constructor)) static void begin(void) {
    const char *file = getenv("SMALL_DISK_CONTROL");
    root = getenv("SMALL_DISK_AT");
    int handle = file && root ? open(file, O_RDWR | O_CLOEXEC) : -1;
    if (handle < 0) return;
    void *at = mmap(NULL, 16, PROT_READ | PROT_WRITE, MAP_SHARED, handle, 0);
    close(handle);
    if (at != MAP_FAILED) control = at;
}

static int below(const char *path) { return control && !strncmp(path, root, strlen(root)); }

static int ours(int handle) {
    char link[64], path[PATH_MAX];
    if (!control) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return below(path);
}

/* How many of `wanted` bytes there is room for, taken from it; -1 with errno set if for none. */
static int64_t take(int64_t wanted) {
    int64_t room, granted;
    do {
        room = control[0];
        granted = wanted < room ? wanted : room;
        if (granted <= 0 && wanted > 0) return errno = (int)control[1], -1;
    } while (!__sync_bool_compare_and_swap(&control[0], room, room - granted));
    return granted;
}

static void give(int64_t bytes) { __sync_fetch_and_add(&control[0], bytes); }

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int handle, const void *data, size_t size) {
    if (!ours(handle)) return REAL(write)(handle, data, size);
    int64_t granted = take(size);
    return granted < 0 ? -1 : REAL(write)(handle, data, granted);
}

ssize_t pwrite64(int handle, const void *data, size_t size, off64_t at) {
    if (!ours(handle)) return REAL(pwrite64)(handle, data, size, at);
    int64_t granted = take(size);
    return granted < 0 ? -1 : REAL(pwrite64)(handle, data, granted, at);
}

ssize_t writev(int handle, const struct iovec *parts, int count) {
    if (!ours(handle)) return REAL(writev)(handle, parts, count);
    size_t all = 0;
    for (int i = 0; i < count; i++) all += parts[i].iov_len;
    int64_t granted = take(all);
    if (granted < 0) return -1;
    if ((size_t)granted == all) return REAL(writev)(handle, parts, count);
    give(granted - (granted < (int64_t)parts[0].iov_len ? granted : (int64_t)parts[0].iov_len));
    return REAL(write)(handle, parts[0].iov_base, granted < (int64_t)parts[0].iov_len ? granted : (int64_t)parts[0].iov_len);
}

ssize_t copy_file_range(int from, off64_t *a, int to, off64_t *b, size_t size, unsigned flags) {
    if (ours(to)) return errno = EXDEV, -1; /* so that the caller writes */
    return REAL(copy_file_range)(from, a, to, b, size, flags);
}

static void forget(const char *path, int at) {
    char whole[PATH_MAX];
    struct stat found;
    if (!control || fstatat(at, path, &found, AT_SYMLINK_NOFOLLOW) || !S_ISREG(found.st_mode) || found.st_nlink > 1)
        return;
    if (path[0] != '/') {
        char link[64], folder[PATH_MAX];
        if (at == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
        else snprintf(link, sizeof link, "/proc/self/fd/%d", at);
        ssize_t length = readlink(link, folder, sizeof folder - 1);
        if (length <= 0) return;
        folder[length] = 0;
        if (snprintf(whole, sizeof whole, "%s/%s", folder, path) >= (int)sizeof whole) return;
        path = whole;
    }
    if (below(path)) give(found.st_size);
}

int unlink(const char *path) {
    forget(path, AT_FDCWD);
    return REAL(unlink)(path);
}

int unlinkat(int at, const char *path, int flags) {
    forget(path, at);
    return REAL(unlinkat)(at, path, flags);
}

int rename(const char *from, const char *to) {
    forget(to, AT_FDCWD);
    return REAL(rename)(from, to);
}

int mkdir(const char *path, mode_t mode) {
    if (below(path) && control[0] <= 0) return errno = (int)control[1], -1;
    return REAL(mkdir)(path, mode);
}

static int64_t size_of(const char *path) {
    struct stat found;
    return stat(path, &found) || !S_ISREG(found.st_mode) ? -1 : found.st_size;
}

static int64_t emptied(const char *path, int flags) { return (flags & O_TRUNC) ? size_of(path) : -1; }

int open(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t mode = va_arg(more, mode_t);
    va_end(more);
    int64_t size = emptied(path, flags);
    int handle = REAL(open)(path, flags, mode);
    if (handle >= 0 && size > 0 && ours(handle)) give(size);
    return handle;
}

int open64(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t mode = va_arg(more, mode_t);
    va_end(more);
    int64_t size = emptied(path, flags);
    int handle = REAL(open64)(path, flags, mode);
    if (handle >= 0 && size > 0 && ours(handle)) give(size);
    return handle;
}

int ftruncate64(int handle, off64_t length) {
    struct stat found;
    int64_t less = ours(handle) && !fstat(handle, &found) ? found.st_size - length : 0;
    int result = REAL(ftruncate64)(handle, length);
    if (!result && less > 0) give(less);
    return result;
}
