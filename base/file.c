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

static int open_regular(int *fd, struct stat *st, const char *path, struct err *e)
{
    *fd = open(path, O_RDONLY | O_CLOEXEC);
    if (*fd < 0)
        return err_errno(e, "cannot open '%s'", path);
    if (fstat(*fd, st) == 0 && S_ISREG(st->st_mode))
        return 0;
    bool dir = S_ISDIR(st->st_mode);
    close(*fd);
    return err_set(e, ERR_USAGE, "'%s' is %s; name a file", path,
                   dir ? "a directory" : "not a regular file");
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
    return 0;
}

void file_unmap(struct mapped *m)
{
    if (m->n)
        munmap((void *)(uintptr_t)m->data, m->n);
    *m = (struct mapped){0};
}

int file_read_all(struct buf *out, const char *path, size_t max_bytes, struct err *e)
{
    struct mapped m;
    if (file_map(&m, path, e))
        return -1;
    int rc = 0;
    if (m.n > max_bytes)
        rc = err_set(e, ERR_LIMIT, "'%s' has %zu bytes, more than the %zu allowed here", path, m.n,
                     max_bytes);
    else
        buf_put(out, m.data, m.n);
    if (!rc && out->failed)
        rc = err_set(e, ERR_MEMORY, "out of memory reading '%s'", path);
    file_unmap(&m);
    return rc;
}

int file_pread(int fd, void *dst, size_t n, uint64_t off, const char *name, struct err *e)
{
    for (char *p = dst; n;) {
        ssize_t got = injected() ? -1 : pread(fd, p, n, (off_t)off);
        if (got < 0 && errno == EINTR)
            continue;
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
