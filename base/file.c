/* File access behind one seam: map, read, write, and a counter with which tests make the n-th
 * operation fail. Owns the mappings it hands out until file_unmap. */
#include "base/base.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static atomic_uint_fast64_t fail_countdown;
static atomic_int fail_errno;

void file_fail_at(uint64_t n, int error)
{
    atomic_store(&fail_errno, error);
    atomic_store(&fail_countdown, n);
}

static bool injected(void)
{
    if (!atomic_load_explicit(&fail_countdown, memory_order_relaxed) ||
        atomic_fetch_sub(&fail_countdown, 1) != 1)
        return false;
    errno = atomic_load(&fail_errno);
    return true;
}

static int check_regular(const struct stat *st, const char *path, struct err *e)
{
    return S_ISREG(st->st_mode)
               ? 0
               : err_set(e, ERR_USAGE, "'%s' is %s; name a file", path,
                         S_ISDIR(st->st_mode) ? "a directory" : "not a regular file");
}

static int open_regular(int *fd, struct stat *st, const char *path, struct err *e)
{
    /* Not blocking: opening a pipe would wait for its writer. To a regular file it means nothing.
     */
    *fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (*fd < 0)
        return err_errno(e, "cannot open '%s'", path);
    int rc = fstat(*fd, st) ? err_errno(e, "cannot read '%s'", path) : check_regular(st, path, e);
    if (rc)
        close(*fd);
    return rc;
}

int file_check_target(const char *path, struct err *e)
{
    struct stat st;
    return stat(path, &st) ? 0 : check_regular(&st, path, e);
}

int file_map(struct mapped *m, const char *path, struct err *e)
{
    int fd;
    struct stat st;
    *m = (struct mapped){0};
    if (open_regular(&fd, &st, path, e))
        return -1;
    if (st.st_size == 0) {
        close(fd);
        m->data = (const uint8_t *)"";
        return 0;
    }
    void *p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    int no = errno;
    close(fd);
    errno = no;
    if (p == MAP_FAILED)
        return err_errno(e, "cannot map '%s'", path);
    m->data = p;
    m->n = (size_t)st.st_size;
    m->mtime_ns = st.st_mtim.tv_sec * INT64_C(1000000000) + st.st_mtim.tv_nsec;
    return 0;
}

void file_unmap(struct mapped *m)
{
    if (m->n)
        munmap((void *)(uintptr_t)m->data, m->n);
    *m = (struct mapped){0};
}

void file_forget(const struct mapped *m)
{
    if (m->n) /* never written to, so nothing is lost; where it fails the pages only stay longer */
        madvise((void *)(uintptr_t)m->data, m->n, MADV_DONTNEED);
}

/* At most n bytes, 0 at the end of the file; -1 with errno. */
static ssize_t read_some(int fd, void *dst, size_t n, uint64_t off)
{
    ssize_t got;
    do
        got = injected() ? -1 : pread(fd, dst, n, (off_t)off);
    while (got < 0 && errno == EINTR);
    return got;
}

/* Read, not mapped: a file that shrinks meanwhile ends early and is no signal. */
int file_read_all(struct buf *out, const char *path, size_t max_bytes, struct err *e)
{
    char piece[16384];
    int fd, rc = 0;
    struct stat st;
    size_t at = 0;
    if (open_regular(&fd, &st, path, e))
        return -1;
    for (ssize_t got = 1; !rc && got; at += (size_t)got) {
        got = read_some(fd, piece, sizeof piece, at);
        if (got < 0)
            rc = err_errno(e, "cannot read '%s' at byte %zu", path, at);
        else if ((size_t)got > max_bytes - at)
            rc = err_set(e, ERR_LIMIT, "'%s' has more than the %zu bytes allowed here", path,
                         max_bytes);
        else
            buf_put(out, piece, (size_t)got);
        if (!rc && out->failed)
            rc = err_set(e, ERR_MEMORY, "out of memory reading '%s'", path);
    }
    close(fd);
    return rc;
}

int file_pread(int fd, void *dst, size_t n, uint64_t off, const char *name, struct err *e)
{
    for (char *p = dst; n;) {
        ssize_t got = read_some(fd, p, n, off);
        if (got < 0)
            return err_errno(e, "cannot read '%s' at byte %llu", name, (unsigned long long)off);
        if (got == 0)
            return err_set(e, ERR_CORRUPT, "'%s' ends at byte %llu, %zu bytes early", name,
                           (unsigned long long)off, n);
        p += got;
        off += (uint64_t)got;
        n -= (size_t)got;
    }
    return 0;
}

int file_pwrite(int fd, const void *src, size_t n, uint64_t off, const char *name, struct err *e)
{
    for (const char *p = src; n;) {
        ssize_t put = injected() ? -1 : pwrite(fd, p, n, (off_t)off);
        if (put < 0 && errno == EINTR)
            continue;
        if (put < 0)
            return err_errno(e, "cannot write '%s' at byte %llu", name, (unsigned long long)off);
        p += put;
        off += (uint64_t)put;
        n -= (size_t)put;
    }
    return 0;
}

int file_write_all(const char *path, const void *p, size_t n, struct err *e)
{
    char tmp[4200];
    if (snprintf(tmp, sizeof tmp, "%s.tmp%ld", path, (long)getpid()) >= (int)sizeof tmp)
        return err_set(e, ERR_LIMIT, "path too long: '%.200s...'", path);
    if (file_check_target(path, e))
        return -1;
    int fd = open(tmp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0)
        return err_errno(e, "cannot create '%s'", tmp);
    int rc = file_pwrite(fd, p, n, 0, tmp, e);
    if (!rc && fsync(fd))
        rc = err_errno(e, "cannot write '%s'", tmp);
    close(fd);
    if (!rc && rename(tmp, path))
        rc = err_errno(e, "cannot rename '%s' to '%s'", tmp, path);
    if (rc)
        unlink(tmp);
    return rc;
}
