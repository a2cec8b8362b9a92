/* The plain GGUF file or files that an import reads and a link points at. Reads by pread, not by
 * mapping, so that a file that shrinks meanwhile is an error and not a signal. Owns the
 * descriptors. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "store/store_internal.h"

static struct link_shard shard_of(const struct stat *st)
{
    return (struct link_shard){(uint64_t)st->st_size,
                               (int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec};
}

int source_stat(struct link_shard *now, const char *path, uint32_t i, uint32_t n, struct err *e)
{
    char file[STORE_PATH_BYTES];
    struct stat st;
    if (shard_path(file, sizeof file, path, i, n))
        return err_set(e, ERR_LIMIT, "path too long: '%.200s'", path);
    if (stat(file, &st))
        return err_errno(e, "'%s'", file);
    *now = shard_of(&st);
    return 0;
}

static int open_one(struct source_file *f, const char *path, uint32_t i, uint32_t n, struct err *e)
{
    char file[STORE_PATH_BYTES];
    struct stat st;
    if (shard_path(file, sizeof file, path, i, n))
        return err_set(e, ERR_LIMIT, "path too long: '%.200s'", path);
    if (!(f->path = mem_strdup(file)))
        return err_set(e, ERR_MEMORY, "out of memory opening '%s'", file);
    f->fd = open(file, O_RDONLY | O_CLOEXEC);
    if (f->fd < 0 || fstat(f->fd, &st))
        return err_errno(e, "cannot open '%s'", file);
    f->at_open = shard_of(&st);
    posix_fadvise(f->fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    return 0;
}

int source_open(struct source *src, const char *path, uint32_t n, struct err *e)
{
    *src = (struct source){.n = n, .files = mem_array(n, sizeof *src->files)};
    if (!src->files)
        return err_set(e, ERR_MEMORY, "out of memory opening '%s'", path);
    for (uint32_t i = 0; i < n; i++)
        src->files[i].fd = -1;
    for (uint32_t i = 0; i < n; i++)
        if (open_one(&src->files[i], path, i, n, e))
            return -1;
    return 0;
}

int source_read(struct source *src, void *dst, uint32_t shard, uint64_t offset, size_t n,
                struct err *e)
{
    return file_pread(src->files[shard].fd, dst, n, offset, src->files[shard].path, e);
}

int source_unchanged(const struct source *src, struct err *e)
{
    for (uint32_t i = 0; i < src->n; i++) {
        const struct source_file *f = &src->files[i];
        struct stat st;
        if (fstat(f->fd, &st))
            return err_errno(e, "cannot read '%s'", f->path);
        struct link_shard now = shard_of(&st);
        if (memcmp(&now, &f->at_open, sizeof now))
            return err_set(e, ERR_BUSY,
                           "'%s' was changed while it was read; try again when it is "
                           "complete",
                           f->path);
    }
    return 0;
}

int source_digest(char digest[65], struct source *src, struct err *e)
{
    struct hasher *h = NULL;
    int rc = hasher_new(&h, e);
    for (uint32_t i = 0; !rc && i < src->n; i++) {
        uint64_t size = src->files[i].at_open.n_bytes;
        for (uint64_t at = 0; !rc && at < size; at += STORE_CHUNK_BYTES) {
            size_t n = (size_t)MIN(size - at, (uint64_t)STORE_CHUNK_BYTES);
            rc = source_read(src, hasher_buffer(h), i, at, n, e);
            if (!rc)
                hasher_push(h, n);
        }
    }
    if (!rc)
        rc = source_unchanged(src, e);
    digest[0] = 0;
    if (!rc)
        hasher_digest(digest, h);
    hasher_free(h);
    return rc;
}

void source_fini(struct source *src)
{
    for (uint32_t i = 0; src->files && i < src->n; i++) {
        if (src->files[i].fd >= 0)
            close(src->files[i].fd);
        mem_free(src->files[i].path);
    }
    mem_free(src->files);
    *src = (struct source){0};
}
