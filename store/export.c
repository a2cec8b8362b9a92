/* Giving a model back as the GGUF file or files that came in, byte for byte. Every chunk and the
 * digest of the whole are checked before a file gets its name; until then it is "<name>.partial",
 * removed on any failure. Owns nothing after return. */
#define _GNU_SOURCE /* renameat2 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "store/store_internal.h"

struct export
{
    const struct store_model *m;
    const char *path;
    bool replace;
    store_progress progress;
    void *user;
    struct hasher *hasher;
    uint64_t done_bytes;
    uint32_t n_made; /* partial files written so far */
    int first;       /* open to the end (-1: not yet): its lock keeps others off the set */
    int fd;          /* the one being written */
    uint64_t at;     /* its length */
    char name[STORE_PATH_BYTES];  /* its name now */
    char final[STORE_PATH_BYTES]; /* and the one it gets: for messages */
    /* from the store */
    sqlite3 *db;
    sqlite3_blob *blob;
    struct layout l;
    struct hash128 *sums;
    /* or from linked files */
    struct source src;
};

static int partial_name(char out[STORE_PATH_BYTES], const struct export *x, uint32_t i,
                        struct err *e)
{
    if (shard_path(out, STORE_PATH_BYTES - 8, x->path, i, x->m->n_shards))
        return err_set(e, ERR_LIMIT, "path too long: '%.200s'", x->path);
    strcat(out, ".partial");
    return 0;
}

static int write_out(struct export *x, const void *p, size_t n, struct err *e)
{
    if (file_pwrite(x->fd, p, n, x->at, x->final, e))
        return -1;
    x->at += n;
    x->done_bytes += n;
    if (x->progress && x->progress(x->user, x->done_bytes, x->m->n_bytes))
        return err_set(e, ERR_CANCELLED, "export of '%s' cancelled", x->m->name);
    return 0;
}

static int write_stored(struct export *x, uint32_t shard, struct err *e)
{
    const struct layout_shard *s = &x->l.shards[shard];
    hasher_put(x->hasher, s->header, s->header_bytes);
    int rc = write_out(x, s->header, s->header_bytes, e);
    for (int64_t k = s->first_chunk; !rc && k < s->first_chunk + s->n_chunks; k++) {
        size_t n = layout_chunk_bytes(&x->l, k);
        uint8_t *data = hasher_buffer(x->hasher);
        if (chunk_read(data, &x->blob, x->db, k, n, e))
            return err_prefix(e, "model '%s', chunk %lld", x->m->name, (long long)k);
        struct hash128 h = hash_xxh3(data, n, 0);
        if (h.lo != x->sums[k - 1].lo || h.hi != x->sums[k - 1].hi)
            return err_set(
                e, ERR_CORRUPT,
                "model '%s', chunk %lld: the bytes fail their checksum; import the model "
                "again",
                x->m->name, (long long)k);
        hasher_push(x->hasher, n);
        rc = write_out(x, data, n, e);
    }
    return rc;
}

static int write_linked(struct export *x, uint32_t shard, struct err *e)
{
    uint64_t left = x->src.files[shard].at_open.n_bytes;
    int rc = 0;
    while (!rc && left) {
        size_t n = (size_t)MIN(left, (uint64_t)STORE_CHUNK_BYTES);
        uint8_t *data = hasher_buffer(x->hasher);
        if (source_read(&x->src, data, shard, x->at, n, e))
            return -1;
        hasher_push(x->hasher, n);
        rc = write_out(x, data, n, e);
        left -= n;
    }
    return rc;
}

/* The partial file for us alone. Once locked it must still have its name: between our open and our
 * lock another export may have published it. */
static int open_locked(struct export *x, struct err *e)
{
    struct stat held, named;
    x->fd = open(x->name, O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (x->fd < 0 && errno == ENOENT && strchr(x->final, '/'))
        return err_set(e, ERR_NOT_FOUND, "the directory '%.*s' does not exist; create it first",
                       (int)(strrchr(x->final, '/') - x->final), x->final);
    if (x->fd < 0)
        return err_errno(e, "cannot create '%s'", x->final);
    if (flock(x->fd, LOCK_EX | LOCK_NB) == 0 && fstat(x->fd, &held) == 0 &&
        stat(x->name, &named) == 0 && held.st_ino == named.st_ino && held.st_dev == named.st_dev)
        return 0;
    close(x->fd);
    return err_set(e, ERR_BUSY, "'%s' is being written by another process", x->final);
}

static int write_shard(struct export *x, uint32_t i, struct err *e)
{
    if (partial_name(x->name, x, i, e) ||
        shard_path(x->final, sizeof x->final, x->path, i, x->m->n_shards) || open_locked(x, e))
        return -1;
    x->n_made = i + 1; /* ours, and to be removed on failure */
    x->at = 0;
    int rc = ftruncate(x->fd, 0) ? err_errno(e, "cannot write '%s'", x->final) : 0;
    if (!rc)
        rc = x->db ? write_stored(x, i, e) : write_linked(x, i, e);
    if (!rc && fsync(x->fd))
        rc = err_errno(e, "cannot write '%s'", x->final);
    if (i == 0)
        x->first = x->fd;
    else
        close(x->fd);
    return rc;
}

static int refuse_existing(const struct export *x, struct err *e)
{
    char path[STORE_PATH_BYTES];
    for (uint32_t i = 0; i < x->m->n_shards; i++) {
        if (shard_path(path, sizeof path, x->path, i, x->m->n_shards))
            return err_set(e, ERR_LIMIT, "path too long: '%.200s'", x->path);
        if (file_check_target(path, e))
            return -1;
        if (!x->replace && access(path, F_OK) == 0)
            return err_set(e, ERR_EXISTS,
                           "'%s' is there already; choose another path, or overwrite it with "
                           "--replace",
                           path);
    }
    return 0;
}

static int publish(const struct export *x, struct err *e)
{
    char from[STORE_PATH_BYTES], to[STORE_PATH_BYTES];
    for (uint32_t i = 0; i < x->m->n_shards; i++) {
        if (partial_name(from, x, i, e) || shard_path(to, sizeof to, x->path, i, x->m->n_shards))
            return -1;
        int rc = renameat2(AT_FDCWD, from, AT_FDCWD, to, x->replace ? 0 : RENAME_NOREPLACE);
        /* Not every filesystem can refuse; we have looked before. */
        if (rc && (errno == EINVAL || errno == ENOSYS))
            rc = rename(from, to);
        if (rc)
            return err_errno(e, "cannot rename '%s' to '%s'", from, to);
    }
    return 0;
}

static int open_what(struct export *x, struct store *s, struct err *e)
{
    char path[STORE_PATH_BYTES];
    if (*x->m->link_path)
        return source_open(&x->src, x->m->link_path, x->m->n_shards, e);
    if (model_path(path, s, x->m->digest, e) || db_open(&x->db, path, DB_IMMUTABLE, e) ||
        model_db_layout(&x->l, x->db, e) || model_db_sums(&x->sums, x->db, x->l.n_chunks, e))
        return err_prefix(e, "model '%s'", x->m->name);
    return x->l.n_shards == x->m->n_shards
               ? 0
               : err_set(e, ERR_CORRUPT, "model '%s' has another number of shards than it should",
                         x->m->name);
}

static int export_all(struct export *x, struct store *s, struct err *e)
{
    char digest[65];
    if (refuse_existing(x, e) || open_what(x, s, e) || hasher_new(&x->hasher, e))
        return -1;
    for (uint32_t i = 0; i < x->m->n_shards; i++)
        if (write_shard(x, i, e))
            return -1;
    hasher_digest(digest, x->hasher);
    if (strcmp(digest, x->m->digest))
        return err_set(e, ERR_CORRUPT,
                       "model '%s' has the digest %s, not %s; %s and import it again", x->m->name,
                       digest, x->m->digest,
                       *x->m->link_path ? "its file was changed" : "remove it");
    return publish(x, e);
}

int store_export(struct store *s, const char *name, const char *path, bool replace,
                 store_progress progress, void *user, struct err *e)
{
    struct store_model m;
    char partial[STORE_PATH_BYTES];
    struct export *x;
    if (store_find(s, &m, name, e))
        return -1;
    if (!(x = mem_zalloc(sizeof *x)))
        return err_set(e, ERR_MEMORY, "out of memory exporting '%s'", name);
    *x = (struct export){
        .m = &m, .path = path, .replace = replace, .progress = progress, .user = user, .first = -1};
    int rc = export_all(x, s, e);
    for (uint32_t i = 0; rc && i < x->n_made; i++)
        if (!partial_name(partial, x, i, NULL))
            unlink(partial);
    if (x->first >= 0)
        close(x->first);
    hasher_free(x->hasher);
    sqlite3_blob_close(x->blob);
    db_close(x->db);
    layout_fini(&x->l);
    source_fini(&x->src);
    mem_free(x->sums);
    mem_free(x);
    return rc;
}
